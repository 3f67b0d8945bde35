"""Prompts that one manager exports and another takes over: `Handoff`, leases, arrivals."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.config import Numerics
from dsv4_jax.errors import (
    ConfigError,
    ContextLimitError,
    HandoffError,
    ManagerInterruptedError,
    PlanError,
    RequestError,
)
from dsv4_jax.manager import CachePolicy, Handoff, HostSize, LeaseShares, Namespace, prometheus_text
from dsv4_jax.manager.remote_tier import RemoteTier
from tests.clock import FakeClock
from tests.interruption import Fault

from .handoff_trace import LEASE, Pair, vouch
from .symbolic_device import SymbolicDevice
from .test_caching_stateful import BLOCK, LAYOUT, POLICIES

CALLS = (
    ["prefill"] * 4
    + ["flush", "deliver", "plan", "finish"] * 3
    + ["serve_sender", "serve_taker", "admit"] * 2
    + [
        "export",
        "give_up",
        "acknowledge",
        "wait",
        "reset",
    ]
)
OFTEN = (
    "streamed",
    "extended",
    "records",
    "remote hits",
    "acknowledged",
    "acknowledged too late",
    "not sent",
    "told again",
)
SELDOM = (
    "records that were here",
    "stale records",
    "admitted early",
    "resets",
    "resets while reading",
    "failed: its lease has ended",
    "failed: a record did not arrive whole",
    "ended for room",
)
SLOW = bool(os.environ.get("RUN_SLOW"))


def test_whatever_happens_nothing_wrong_is_read_and_nothing_stays_held() -> None:
    did = collections.Counter[str]()
    for seed in range(60 if SLOW else 8):
        drafts = ((0, 3), (0, 0), (3, 1))[seed % 3]
        pair = Pair(seed, policy=[*POLICIES][seed % 3], drafts=drafts, small=8 * (seed % 2))
        pair.run(400 if SLOW else 130)
        did += pair.did
    assert all(did[name] for name in (*OFTEN, *(SELDOM if SLOW else ()))), did


class HandoffMachine(RuleBasedStateMachine):
    """The same, its order and its choices hypothesis's: what fails shrinks."""

    @initialize(
        seed=st.integers(0, 99),
        policy=st.sampled_from(sorted(POLICIES)),
        small=st.sampled_from([0, 8]),
        drafts=st.sampled_from([(0, 3), (0, 0), (3, 1)]),
    )
    def start(self, seed: int, **options: Any) -> None:
        self.pair = Pair(seed, **options)

    @rule(call=st.sampled_from(CALLS), choices=st.randoms(use_true_random=False))
    def act(self, call: str, choices: random.Random) -> None:
        self.pair.random = choices
        getattr(self.pair, call)()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.end()


TestHandoffMachine = pytest.mark.slow(HandoffMachine.TestCase)
TestHandoffMachine.settings = settings(max_examples=100 if SLOW else 10, stateful_step_count=60)


# One hand-off, step by step

PROMPT = [i % 5 for i in range(5 * BLOCK + 3)]
HOST = HostSize.of(LAYOUT, 8, 2)
SPACE = Namespace("tenant")


class Host:
    """A manager, its symbolic device and a clock."""

    def __init__(
        self,
        *,
        blocks: int = 12,
        drafts: int = 0,
        host: HostSize | None = HOST,
        weights: str = "w",
        block: int = BLOCK,
        numerics: Numerics = "plain",
        leases: LeaseShares | None = None,
    ):
        self.clock = FakeClock()
        layout = CacheLayout(LAYOUT.cfg, block_tokens=block, draft_tokens=drafts, numerics=numerics)
        size = CacheSize(blocks, 2, 8, num_snapshots=2)
        self.manager = KVCacheManager(
            layout,
            size,
            policy=CachePolicy(leases=leases or LeaseShares()),
            host=host,
            weights_id=weights,
            clock=self.clock,
        )
        self.device = SymbolicDevice(layout, size, host or HostSize(0))
        self.tier = RemoteTier(self.manager, clock=self.clock)

    def admit(self):
        return self.manager.admit_request(PROMPT, namespace=SPACE)

    def step(self, request, count: int) -> None:
        plan = self.manager.plan_step([(request, count)])
        self.device.transfer(self.manager.take_transfers())
        self.manager.plan_tokens(plan)
        self.device.step(plan, {request.slot: SPACE}, {request.slot: request.tokens})

    def send(self, handoff: Handoff) -> bytes:
        self.manager.flush()
        self.device.transfer(self.manager.take_transfers())
        pages = self.device.pages
        return handoff.vouched(*([vouch(pages[p]) for p in part] for part in (handoff.blocks, handoff.state))).to_json()

    def prefill(self) -> bytes:
        """The hand-off of the whole prompt."""
        request = self.admit()
        self.step(request, 5 * BLOCK)
        data = self.send(self.manager.export_request(request))
        self.manager.release_request(request)
        return data

    def read(self, arrival, sender: Host) -> int:
        """All that can be read now; returns how many records."""
        reads = self.tier.plan_reads(arrival)
        for read in reads:
            self.device.pages.update(zip(read.pages, (sender.device.pages[p] for p in read.source), strict=True))
        self.tier.finish_reads(arrival, reads, [True] * len(reads))
        self.manager.check_integrity()
        return len(reads)


def test_a_prompt_goes_over_whole_and_only_what_is_missing_is_read() -> None:
    sender, taker = Host(), Host(blocks=9, drafts=3)
    data = sender.prefill()
    arrival = taker.tier.expect(data, PROMPT, namespace=SPACE)
    assert not arrival.is_over and taker.read(arrival, sender) == 6 and arrival.is_over  # 5 blocks and the state
    with pytest.raises(RequestError, match="waited for here"):
        sender.manager.admit_remote(arrival)
    request = taker.manager.admit_remote(arrival)
    assert request.num_hit == 5 * BLOCK
    taker.step(request, 3)  # on the symbolic device, which compares what it reads
    with pytest.raises(RequestError, match="waited for"):
        taker.manager.admit_remote(arrival)
    taker.manager.release_request(request)
    again = taker.tier.expect(data, PROMPT, namespace=SPACE)
    assert taker.read(again, sender) == 0 and again.is_over  # on the device
    taker.manager.sleep()
    taker.device.transfer(taker.manager.take_transfers())
    taker.manager.wakeup()
    third = taker.tier.expect(data, PROMPT, namespace=SPACE)
    assert taker.read(third, sender) == 0 and third.is_over  # on the host
    taker.tier.close(again), taker.tier.close(third)
    lease = json.loads(data)["lease"]
    assert [sender.manager.acknowledge(lease), sender.manager.acknowledge(lease)] == [True, False]


def test_hand_offs_of_other_weights() -> None:
    """Of before an update, on either side."""
    sender, taker, late = Host(), Host(), Host()
    data = sender.prefill()
    arrival, lease = late.tier.expect(data, PROMPT, namespace=SPACE), json.loads(data)["lease"]
    for host in (sender, taker, late):
        host.manager.sleep()
        host.device.transfer(host.manager.take_transfers())
        host.manager.wakeup(weights_id="w2")
    with pytest.raises(HandoffError, match="other weights"):
        taker.tier.expect(data, PROMPT, namespace=SPACE)
    assert late.tier.plan_reads(arrival) == [] and arrival.is_over
    assert late.manager.admit_remote(arrival).num_cached == 0
    assert sender.manager.export_again(lease) is None and not sender.manager.acknowledge(lease)
    assert sender.admit().num_cached == 0
    for host in (sender, taker, late):
        host.manager.check_integrity()


def test_blocks_go_out_while_later_chunks_are_computed() -> None:
    sender, taker = Host(), Host()
    request, arrival, read = sender.admit(), None, []
    for _ in range(5):
        sender.step(request, BLOCK)
        handoff = sender.manager.export_request(request)
        data = sender.send(handoff)
        if arrival is None:
            arrival = taker.tier.expect(data, PROMPT, namespace=SPACE)
        else:
            taker.tier.extend(arrival, data)
        read.append(taker.read(arrival, sender))
    assert read == [1, 1, 1, 1, 2] and handoff.last and arrival.is_over
    assert taker.manager.admit_remote(arrival).num_hit == 5 * BLOCK


def test_two_arrivals_of_one_prompt_read_it_once() -> None:
    sender, taker = Host(), Host()
    data = sender.prefill()
    first, second = (taker.tier.expect(data, PROMPT, namespace=SPACE) for _ in range(2))
    reads = taker.tier.plan_reads(first)
    assert len(reads) == 6 and taker.tier.plan_reads(second) == [] and not second.is_over
    taker.tier.finish_reads(first, reads, [True] * 6)
    assert taker.tier.plan_reads(second) == [] and second.is_over and second.records == 0
    assert taker.manager.admit_remote(second).num_hit == 5 * BLOCK


def test_a_lease_holds_the_host_copies_until_it_ends() -> None:
    host = Host(host=HostSize.of(LAYOUT, 6, 1), leases=LeaseShares(1.0, 1.0))
    data = host.prefill()
    pages = host.manager.cache.pages.num_total
    assert len(host.manager.cache.try_pages(range(pages))) == 1  # all but those of five blocks and a state
    host.manager.reset()
    data = host.prefill()
    host.clock.advance(59.9)
    host.manager.commit()
    assert len(host.manager.leases) == 1
    host.clock.advance(0.2)
    host.manager.commit()
    assert not len(host.manager.leases) and len(host.manager.cache.try_pages(range(pages))) == pages
    assert not host.manager.acknowledge(json.loads(data)["lease"])


def tell(host: Host, tenant: int, peer: str | None = None) -> Handoff:
    """All of a prompt that another tenant has, computed and exported; nobody acknowledges it."""
    request = host.manager.admit_request(PROMPT, namespace=Namespace(str(tenant)))
    host.manager.plan_step([(request, 5 * BLOCK)])
    host.manager.take_transfers()
    handoff = host.manager.export_request(request, seconds=3600, peer=peer)
    host.manager.flush()
    host.manager.take_transfers()
    host.manager.release_request(request)
    host.manager.check_integrity()
    return handoff


def test_dead_receivers_keep_no_prompt_from_being_told_whole() -> None:
    """Thirty prompts that nobody acknowledges, on a host with room for two: the oldest leases end."""
    host = Host(blocks=16, host=HostSize.of(LAYOUT, 12, 2))
    sent = []
    for tenant in range(30):
        sent.append(tell(host, tenant))
        host.clock.advance(1.5)
    assert all(each.last and each.state for each in sent)
    assert [*host.manager.leases.active] == [sent[-1].lease]
    stats = host.manager.stats()
    assert (stats.handoffs.leases, stats.handoffs.begun["sent"], stats.handoffs.ended["sent", "room"]) == (1, 30, 29)
    assert stats.handoffs.lease_pages == 29 <= 0.9 * stats.cache.pools["host"].total
    text = prometheus_text(stats)
    assert 'dsv4_cache_handoffs_ended_total{side="sent",reason="room"} 29' in text
    assert "\ndsv4_cache_lease_pages 29\n" in text


def test_leases_hold_their_share_and_those_just_told_are_left_alone() -> None:
    host = Host(blocks=16, host=HostSize.of(LAYOUT, 20, 4), leases=LeaseShares(0.55, 0.3, grace=5.0))
    first = tell(host, 1, "a")
    host.clock.advance(4.0)
    second = tell(host, 2, "a")  # more than 0.3 of 116 pages for one peer
    assert first.last and not second.last and len(second.blocks) == 5, "blocks have room beside the first, no state"
    other = tell(host, 3, "b")
    assert other.last, "another peer has a share of its own"
    assert not tell(host, 4, "c").last, "together no more than 0.55"
    host.clock.advance(4.0)
    assert tell(host, 5, "a").last, "the oldest of its own has gone"
    assert first.lease not in host.manager.leases.active and other.lease in host.manager.leases.active
    assert host.manager.stats().handoffs.peers["b"] == 29
    host.clock.advance(5.1)
    assert tell(host, 6, "d").last and second.lease not in host.manager.leases.active
    assert host.manager.stats().handoffs.lease_pages <= 0.55 * 116
    for odd in ((0, 1, 1), (1, 2, 1), (1, 1, -1), ("a", 1, 1)):
        with pytest.raises(ConfigError, match="lease shares"):
            LeaseShares(*odd)


def test_what_is_pinned_is_not_said_to_be_evictable() -> None:
    host = Host(blocks=16, host=HostSize.of(LAYOUT, 12, 2), leases=LeaseShares(1.0, 1.0))
    lease = tell(host, 1).lease
    host.manager.sleep()  # all of it is on the host now, and nowhere else
    host.manager.take_transfers()
    total = host.manager.cache.pages.num_total
    use = host.manager.stats().cache.pools["host"]
    assert (use.pinned, use.evictable) == (29, use.cached - 29)
    room = host.manager.cache.try_pages(range(total))
    assert len(room) == use.free + use.evictable
    host.manager.cache.pages.release(room)
    host.manager.acknowledge(lease)
    use = host.manager.stats().cache.pools["host"]
    assert use.pinned == 0 and use.evictable == use.cached >= 29
    assert 'units{pool="host",state="pinned"} 0' in prometheus_text(host.manager.stats())


def test_only_its_peer_ends_a_lease() -> None:
    host = Host(blocks=16, host=HostSize.of(LAYOUT, 20, 4))
    mine, anybodys = tell(host, 1, "a").lease, tell(host, 2).lease
    assert mine[:8] != anybodys[:8], "who knows one does not know the next"
    assert not host.manager.acknowledge(mine, peer="b") and host.manager.export_again(mine, peer="b") is None
    assert host.manager.export_again(mine, peer="a") is not None and host.manager.export_again(mine) is not None
    assert host.manager.acknowledge(mine, peer="a") and host.manager.acknowledge(anybodys, peer="b")
    third = tell(host, 3, "a").lease
    assert host.manager.acknowledge(third), "this host takes back what it likes"
    ended = host.manager.stats().handoffs.ended
    assert (ended["sent", "done"], ended["sent", "withdrawn"]) == (2, 1)
    request = host.admit()
    host.manager.export_request(request, peer="a")
    for odd in ("b", 3):
        with pytest.raises(HandoffError, match="peer"):
            host.manager.export_request(request, peer=odd)


def test_why_arrivals_have_ended_is_counted() -> None:
    sender, taker = Host(), Host()
    data = sender.prefill()
    whole = taker.tier.expect(data, PROMPT, namespace=SPACE)
    taker.read(whole, sender)
    taker.manager.admit_remote(whole)
    taker.manager.reset()
    arrivals = [taker.tier.expect(data, PROMPT, namespace=SPACE) for _ in range(3)]
    torn = taker.tier.plan_reads(arrivals[0])
    taker.tier.finish_reads(arrivals[0], torn, [False] * len(torn))
    taker.tier.fail(arrivals[1], "the peer is lost")
    for arrival in (arrivals[0], arrivals[1], arrivals[1]):
        taker.tier.close(arrival)
    taker.clock.advance(61)
    taker.tier.expire()
    taker.tier.close(arrivals[2])
    stats = taker.manager.stats().handoffs
    assert stats.begun["received"] == 4
    assert {reason: n for (side, reason), n in stats.ended.items() if side == "received" and n} == {
        "done": 1,
        "torn": 1,
        "peer": 1,
        "time": 1,
    }


def test_a_step_that_did_not_run_ends_the_lease() -> None:
    host = Host()
    request = host.admit()
    host.step(request, 2 * BLOCK)
    lease = host.manager.export_request(request).lease
    host.manager.plan_step([(request, BLOCK)])
    host.manager.abort_request(request)
    assert not host.manager.leases.is_sound(lease) and not len(host.manager.leases)
    host.manager.check_integrity()


def test_reset_keeps_pages_that_are_being_written_from_others() -> None:
    sender, taker = Host(), Host()
    data = sender.prefill()
    arrival = taker.tier.expect(data, PROMPT, namespace=SPACE)
    reads = taker.tier.plan_reads(arrival)
    written = {page for read in reads for page in read.pages}
    taker.manager.reset()
    assert written.isdisjoint(taker.manager.cache.try_pages(range(HOST.num_pages)))
    taker.manager.reset()
    another = taker.tier.expect(data, PROMPT, namespace=SPACE)
    assert taker.read(another, sender) == 5  # waits for none of those reads; another state has no room beside theirs
    taker.tier.finish_reads(arrival, reads, [True] * len(reads))
    taker.manager.check_integrity()
    taker.tier.close(another)
    assert arrival.failure == "the manager was reset" and arrival.is_over
    assert len(taker.manager.cache.try_pages(range(HOST.num_pages))) == HOST.num_pages


def test_pages_that_nobody_waits_for_go_back() -> None:
    sender, taker = Host(), Host()
    data = sender.prefill()
    arrival = taker.tier.expect(data, PROMPT, namespace=SPACE)
    reads = taker.tier.plan_reads(arrival)
    taker.tier.finish_reads(arrival, reads[1:], [True] * 5)
    assert len(taker.manager.cache.landed) == 4 + taker.manager.cache.snapshot_pages
    taker.clock.advance(61)
    taker.tier.expire()  # what waits for the first block, which may never come
    assert not taker.manager.cache.landed and not arrival.is_over
    taker.tier.finish_reads(arrival, reads[:1], [True])
    assert arrival.is_over and not taker.manager.cache.landed
    again = taker.tier.expect(data, PROMPT, namespace=SPACE)
    reads = taker.tier.plan_reads(again)
    taker.step(taker.admit(), 5 * BLOCK)  # which computes what is on its way
    assert taker.tier.plan_reads(again) == []
    taker.tier.finish_reads(again, reads, [True] * len(reads))
    assert again.is_over and not taker.manager.cache.landed
    taker.manager.check_integrity()


def test_reads_that_are_ended_twice_end_once() -> None:
    sender, taker = Host(), Host()
    arrival = taker.tier.expect(sender.prefill(), PROMPT, namespace=SPACE)
    reads = taker.tier.plan_reads(arrival)
    for part in (reads[:1], reads[:1], reads, reads):
        assert len(arrival.reads) == 6 - arrival.records
        taker.tier.finish_reads(arrival, part, [True] * len(part))
        taker.manager.check_integrity()
    assert arrival.records == 6 and taker.manager.admit_remote(arrival).num_hit == 5 * BLOCK


# What others send


def fields(**changes: Any) -> bytes:
    return json.dumps({**json.loads(Host().prefill()), **changes}).encode()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": "dsv4_jax hand-off 2"}, "format"),
        ({"lease": "x" * 65}, "lease"),
        ({"lease": 7}, "lease"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": True}, "seconds"),
        ({"seconds": 10**400}, "seconds"),
        ({"root": "0" * 64}, "root"),
        ({"root": "0" * 63}, "root"),
        ({"block_fingerprint": "f" * 64}, "block_fingerprint"),
        ({"snapshot_fingerprint": "f" * 64}, "snapshot_fingerprint"),
        ({"total": 2**31}, "total"),
        ({"total": 4}, "total"),
        ({"total": 6}, "state"),
        ({"total": True}, "total"),
        ({"first": 1}, "total"),
        ({"first": -1}, "first"),
        ({"digest": "0" * 64}, "digest"),
        ({"blocks": [1, 2, 3, 4, 0]}, "blocks"),
        ({"blocks": [1, 1, 2, 3, 4]}, "blocks"),
        ({"blocks": list(range(1, 16386))}, "blocks"),
        ({"blocks": "12345"}, "blocks"),
        ({"blocks": [1.0] * 5}, "blocks"),
        ({"state": [90]}, "sums"),
        ({"last": 1}, "last"),
        ({"last": False}, "state"),
        ({"total": 6, "state": [], "sums": "0" * 160}, "last"),
        ({"sums": "00"}, "sums"),
        ({"sums": None}, "sums"),
        ({"more": 1}, None),
    ],
)
def test_a_wrong_field_is_named_and_nothing_changes(change: dict[str, Any], field: str | None) -> None:
    taker = Host()
    with pytest.raises(HandoffError) as caught:
        taker.tier.expect(fields(**change), PROMPT, namespace=SPACE)
    assert caught.value.field == field, caught.value
    assert len(str(caught.value)) < 400 and not taker.manager.cache.tree.holds.active
    assert taker.manager.cache.pages.num_free == HOST.num_pages


@pytest.mark.parametrize(
    "data", [b"", b"[", b"[]", b"7", b'{"a":1,"a":2}', b"[" * 100_000, b" " * (3 << 20), "text", None]
)
def test_what_is_no_handoff_is_refused(data: Any) -> None:
    with pytest.raises(HandoffError):
        Host().tier.expect(data, PROMPT, namespace=SPACE)


WHOLE = Host().prefill()


@given(st.data())
@settings(max_examples=60)
def test_a_changed_byte_is_refused_or_harmless(data: st.DataObject) -> None:
    """It may name other pages, whose bytes do not match then; it never gives bytes to another prompt."""
    text = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        handoff = Handoff.from_json(bytes(text))
    except HandoffError:
        return
    assert Handoff.from_json(handoff.to_json()) == handoff
    assert all(page >= 1 for page in handoff.blocks + handoff.state)


def test_other_weights_another_tenant_and_other_tokens_are_refused() -> None:
    data = Host().prefill()
    for taker, tokens, space, field in (
        (Host(weights="other"), PROMPT, SPACE, "root"),
        (Host(), PROMPT, Namespace("another"), "root"),
        (Host(), [*PROMPT[:9], 3, *PROMPT[10:]], SPACE, "digest"),
        (Host(), PROMPT[: 5 * BLOCK], SPACE, "total"),
        (Host(host=None), PROMPT, SPACE, "total"),
        (Host(block=2 * BLOCK), PROMPT, SPACE, "block_fingerprint"),
        (Host(numerics="released"), PROMPT, SPACE, "block_fingerprint"),
    ):
        with pytest.raises(HandoffError) as caught:
            taker.tier.expect(data, tokens, namespace=space)
        assert caught.value.field == field
        taker.manager.check_integrity()


def test_a_prompt_that_could_never_be_admitted_is_not_read() -> None:
    """All of it came to the host, and `admit_remote` refused it."""
    data, taker = Host().prefill(), Host(blocks=5)
    before = taker.manager.stats()
    with pytest.raises(ContextLimitError, match=r"expected: 4[0-9] tokens exceed .* 40 tokens"):
        taker.tier.expect(data, PROMPT, namespace=SPACE)
    assert taker.manager.stats() == before
    taker.manager.check_integrity()


def test_what_is_no_arrival_of_this_manager_is_refused_and_nothing_changes() -> None:
    sender, taker, other = Host(), Host(), Host()
    data = sender.prefill()
    for arrival in (None, other.tier.expect(data, PROMPT, namespace=SPACE)):
        for call in (
            lambda a: taker.tier.extend(a, data),
            taker.tier.plan_reads,
            lambda a: taker.tier.finish_reads(a, [], []),
            lambda a: taker.tier.fail(a, "why"),
            taker.tier.close,
            taker.manager.admit_remote,
        ):
            with pytest.raises(RequestError, match="not an arrival"):
                call(arrival)
        taker.manager.check_integrity()
    for reads, done in (([[]], [True]), ([], [True]), (None, []), ([None], [True])):
        with pytest.raises(PlanError, match="read"):
            other.tier.finish_reads(arrival, reads, done)
    with pytest.raises(RequestError, match="items must be"):
        taker.tier.expect(data, PROMPT, namespace=SPACE, items=None)
    assert other.read(arrival, sender) == 6


def test_parts_that_were_lost_are_asked_for_and_told_again() -> None:
    sender, taker = Host(), Host()
    request, parts = sender.admit(), []
    for _ in range(5):
        sender.step(request, BLOCK)
        handoff = sender.manager.export_request(request)
        parts.append(sender.send(handoff))
    sender.manager.release_request(request)

    def again(first: int) -> bytes:
        return sender.send(sender.manager.export_again(handoff.lease, first))

    arrival = taker.tier.expect(parts[1], PROMPT, namespace=SPACE)
    assert arrival.asks and arrival.announced == 0 and taker.read(arrival, sender) == 0
    taker.tier.extend(arrival, parts[0])
    taker.tier.extend(arrival, parts[3])
    assert arrival.asks and arrival.announced == 1
    with pytest.raises(HandoffError, match="lease"):
        taker.tier.extend(arrival, Host().prefill())
    taker.tier.extend(arrival, again(arrival.announced))
    assert arrival.announced == 5 and arrival.last and not arrival.asks
    taker.tier.extend(arrival, parts[0])  # late, and known
    assert taker.read(arrival, sender) == 6 and taker.manager.admit_remote(arrival).num_hit == 5 * BLOCK
    assert Handoff.from_json(again(0)).end == 5
    assert Handoff.from_json(again(5)).state and sender.manager.export_again(handoff.lease, 6) is None
    for first in (-1, True, "0", None, 1.0):
        with pytest.raises(HandoffError, match="first"):
            sender.manager.export_again(handoff.lease, first)
    sender.clock.advance(59)
    assert Handoff.from_json(again(0)).seconds == pytest.approx(1)
    sender.clock.advance(2)
    assert sender.manager.export_again(handoff.lease) is None is sender.manager.export_again(None)


def test_a_state_that_is_not_made_yet_is_not_told_again() -> None:
    host = Host()
    request = host.admit()
    host.step(request, 2 * BLOCK)
    lease = host.manager.export_request(request).lease
    assert host.manager.export_again(lease, 2) is None and not host.manager.export_again(lease, 1).last


def test_what_cannot_be_exported_is_refused() -> None:
    host = Host()
    request = host.admit()
    for seconds in (0, -1, float("inf"), "1", 1e9):
        with pytest.raises(HandoffError, match="seconds"):
            host.manager.export_request(request, seconds=seconds)
    bare = KVCacheManager(LAYOUT, CacheSize(8, 2, 8))
    with pytest.raises(HandoffError, match="no host tier"):
        bare.export_request(bare.admit_request(PROMPT))
    with pytest.raises(HandoffError, match="no checksums"):
        host.step(request, BLOCK)
        host.manager.export_request(request).to_json()
    handoff = host.manager.export_again(host.manager.export_request(request).lease)
    with pytest.raises(HandoffError, match="16 bytes"):
        handoff.vouched([b""], [])
    assert host.manager.acknowledge(None) is False
    assert dataclasses.replace(handoff, blocks=()).end == 0


def test_a_prompt_shorter_than_a_block_is_an_arrival_of_nothing() -> None:
    sender, taker = Host(), Host()
    request = sender.manager.admit_request([1, 2, 3])
    data = sender.send(sender.manager.export_request(request, seconds=LEASE))
    arrival = taker.tier.expect(data, [1, 2, 3])
    assert taker.tier.plan_reads(arrival) == [] and arrival.is_over and arrival.failure is None
    assert taker.manager.admit_remote(arrival).num_hit == 0


def test_the_layouts_must_mean_the_same() -> None:
    other = CacheLayout(DSV4Config.tiny(hca_ratio=8, sliding_window=16), block_tokens=BLOCK)
    assert other.snapshot_fingerprint != LAYOUT.snapshot_fingerprint


@pytest.mark.parametrize("call", ["export_request", "expect", "plan_reads", "finish_reads", "admit_remote"])
def test_broken_off_anywhere_it_is_whole_or_refuses_all_but_reset(call: str) -> None:
    hits = 0
    for line in itertools.count(0, 1 if SLOW else 9):
        sender, taker, fault = Host(), Host(), Fault(KeyboardInterrupt, line)
        host, reads = taker, []

        def run(name: str, function: Callable[..., Any], *args: Any, fault: Fault = fault, **options: Any) -> Any:
            return fault.call(function, *args, **options) if name == call else function(*args, **options)

        try:
            host = sender
            request = sender.admit()
            sender.step(request, 5 * BLOCK)
            data = sender.send(run("export_request", sender.manager.export_request, request))
            host = taker
            arrival = run("expect", taker.tier.expect, data, PROMPT, namespace=SPACE)
            reads = run("plan_reads", taker.tier.plan_reads, arrival)
            run("finish_reads", taker.tier.finish_reads, arrival, reads, [True] * len(reads))
            assert run("admit_remote", taker.manager.admit_remote, arrival).num_hit == 5 * BLOCK
        except KeyboardInterrupt:
            hits += 1
        if not fault.hit:
            break
        with contextlib.suppress(ManagerInterruptedError):  # nothing had begun, or it had ended
            host.manager.check_integrity()
            continue
        with pytest.raises(ManagerInterruptedError):
            host.manager.commit()
        host.manager.reset()
        host.manager.check_integrity()
        if call in ("plan_reads", "finish_reads"):
            reads = reads or list(arrival.reads)  # planned, and not returned any more
            host.tier.finish_reads(arrival, reads, [True] * len(reads))
            host.manager.check_integrity()
        assert len(host.manager.cache.try_pages(range(HOST.num_pages))) == HOST.num_pages
    assert hits > 2


def test_a_lease_is_of_one_text() -> None:
    """The request was preempted and rewritten: old blocks were told of as the beginning of the new text."""
    host = Host(host=HostSize(60))
    manager, request = host.manager, host.manager.admit_request(PROMPT)
    manager.plan_tokens(manager.plan_step([(request, 2 * BLOCK)]))
    list(manager.take_transfers())
    told = manager.export_request(request)
    assert len(told.blocks) == 2
    manager.preempt(request)
    request.tokens[: 2 * BLOCK] = [200] * (2 * BLOCK)
    manager.resume(request)
    while request.num_pending > 3:
        manager.plan_tokens(manager.plan_step([(request, BLOCK)]))
        list(manager.take_transfers())
    new = manager.export_request(request)
    assert new.lease != told.lease and new.first == 0 and len(new.blocks) == new.total
    assert not set(new.blocks) & set(told.blocks) and manager.export_again(told.lease) is None
    manager.preempt(request)
    del request.tokens[3 * BLOCK :]
    manager.resume(request)
    assert manager.export_request(request).total == 2
    manager.check_integrity()


def test_a_lease_does_not_outlive_ids_that_were_not_kept() -> None:
    """Computed once more after a preemption and then rejected: the digests of before were believed on."""
    host = Host(drafts=3, host=HostSize(60))
    manager, request = host.manager, host.manager.admit_request(PROMPT[: BLOCK + 1])
    manager.plan_tokens(manager.plan_step([(request, BLOCK + 1)]))
    told = manager.export_request(request)
    assert (told.total, len(told.blocks)) == (1, 1)
    manager.preempt(request)
    manager.resume(request)
    assert request.num_cached == 0
    manager.plan_step([(request, 2)])
    list(manager.take_transfers())
    manager.accept(request, 0)
    request.tokens += [3, 4]
    again = manager.export_request(request)
    assert again.lease != told.lease and (again.total, again.blocks) == (1, ())
    manager.check_integrity()
