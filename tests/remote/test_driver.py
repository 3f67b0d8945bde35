"""`RemoteDriver` between two byte engines of one process: who gets what, and what is left when a call is broken off."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time

import numpy as np
import pytest

from dsv4_jax import AttentionType, CacheLayout, CachePolicy, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import (
    HandoffError,
    LayoutError,
    ManagerInterruptedError,
    RequestError,
    TransferError,
)
from dsv4_jax.manager import Handoff, HostSize, Namespace
from dsv4_jax.records import page_bytes
from dsv4_jax.tiers.remote import Pages, RecordTransport, RemoteDriver, driver
from dsv4_jax.transports import open_engine
from tests.clock import PATIENCE
from tests.interruption import Fault
from tests.remote.byte_engine import BLOCK, VOCAB, ByteEngine, Host, answer

PROMPT = [i * i % VOCAB for i in range(4 * BLOCK + 3)]
A, B = Namespace("a"), Namespace("b")
SLOW = bool(os.environ.get("RUN_SLOW"))


class Side:
    def __init__(self, drafts: int, ranks: int = 1) -> None:
        size = CacheSize(12 // ranks, 2, 8, num_snapshots=2, pool_ranks=ranks)
        self.engine = ByteEngine(drafts=drafts, size=size, host=HostSize(40))
        self.manager = self.engine.manager
        self.transport = RecordTransport(open_engine("loopback"))
        self.metadata = self.transport.publish_host(self.engine.host)
        self.driver = RemoteDriver(self.manager, self.transport, ask_after=0.02)

    def poll(self, **options) -> list[Handoff]:
        self.manager.flush()
        self.engine.transfer()
        self.driver.poll(self.engine.host, self.engine.host, **options)
        return self.driver.take_handoffs()

    def export(self, **options: float) -> None:
        request = self.manager.admit_request(PROMPT, namespace=A)
        self.engine.spaces[request.id] = A
        self.engine.step([(request, 4 * BLOCK)])
        self.driver.export(request, **options)


@pytest.fixture
def sides():
    sender, taker = Side(0), Side(2)
    yield sender, taker, taker.transport.connect(sender.metadata)
    sender.transport.close(), taker.transport.close()


def test_a_part_goes_to_the_arrival_of_its_prompt_and_tenant(sides) -> None:
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    data = handoff.to_json()
    arrival = taker.driver.receive(data, peer, PROMPT, namespace=A)
    for tokens, space, field in ((PROMPT, B, "root"), ([1, *PROMPT[1:]], A, "digest")):
        with pytest.raises(HandoffError) as caught:
            taker.driver.receive(data, peer, tokens, namespace=space)
        assert caught.value.field == field
    assert taker.driver.receive(data, peer, PROMPT, namespace=A) is arrival
    while not arrival.is_over:
        taker.poll()
    assert taker.manager.admit_remote(arrival).num_hit == 4 * BLOCK


def test_a_torn_record_is_counted_as_one(sides) -> None:
    """And not as a peer that is gone, which is somebody else's to look after."""
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    handoff = dataclasses.replace(handoff, sums=(bytes(16), *handoff.sums[1:]))
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    while not arrival.is_over:
        taker.poll()
    assert taker.manager.admit_remote(arrival).num_hit == 0
    ended = taker.manager.stats().handoffs.ended
    assert (ended["received", "torn"], ended["received", "peer"]) == (1, 0)
    assert taker.driver.given_up == {"torn or stale record": 1}


@pytest.mark.parametrize(("there", "here"), [(2, 4), (1, 2), (4, 1)])
def test_hosts_of_unlike_numbers_of_ranks(there, here) -> None:
    """Pages are each host's own: where they lie there and here need not agree."""
    sender, taker = Side(0, there), Side(2, here)
    peer = taker.transport.connect(sender.metadata)
    sender.export()
    (handoff,) = sender.poll()
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    while not arrival.is_over:
        taker.poll()
    request = taker.manager.admit_remote(arrival)
    taker.engine.spaces[request.id] = A
    drawn = taker.engine.step([(request, request.num_pending)])[request]
    assert request.num_hit == 4 * BLOCK and drawn[-1:] == answer(A, PROMPT, 1)
    taker.manager.check_integrity(), sender.transport.close(), taker.transport.close()


def test_a_lease_ends_by_its_time_though_nobody_asks_for_anything_but_poll(sides) -> None:
    sender, _, _ = sides
    sender.export(seconds=1e-6)
    assert not sender.poll() and not sender.manager.leases


def test_a_poll_that_was_broken_off_loses_no_handoff_and_lets_nothing_in_uncompared(sides, monkeypatch) -> None:
    sender, taker, peer = sides

    def broken(*_):
        raise KeyboardInterrupt

    sender.export()
    with monkeypatch.context() as during:
        during.setattr(sender.transport, "checksums", broken)
        with pytest.raises(KeyboardInterrupt):
            sender.poll()
    (handoff,) = sender.poll()
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    with monkeypatch.context() as during:
        during.setattr(taker.transport, "_sums", broken)  # while what has come is compared
        with pytest.raises(KeyboardInterrupt):
            while not arrival.is_over:
                taker.poll()
    while not arrival.is_over:
        taker.poll()
    assert arrival.failure is not None and not taker.manager.cache.reading  # what was not compared does not count
    assert taker.manager.admit_remote(arrival).num_hit == 0
    taker.manager.check_integrity()


def test_a_part_goes_out_a_step_later_though_each_step_is_followed_by_another_export(sides, monkeypatch) -> None:
    sender, _, _ = sides
    monkeypatch.setattr(type(sender.engine.host.pages), "is_ready", lambda self: False)
    request, parts = sender.manager.admit_request(PROMPT, namespace=A), []
    sender.engine.spaces[request.id] = A
    for _ in range(4):
        sender.engine.step([(request, BLOCK)])
        sender.driver.export(request)  # its copies travel with the next step
        fence = Fence()
        sender.driver.poll(sender.engine.host, sender.engine.host, fence=fence)
        fence.ready = True
        sender.driver.poll(sender.engine.host, sender.engine.host)
        parts.append([handoff.end for handoff in sender.driver.take_handoffs()])
    assert parts == [[], [1], [2], [3]]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_handoff_that_was_lost_is_asked_for_and_told_again(sides, lost: int) -> None:
    sender, taker, peer = sides
    request, sent = sender.manager.admit_request(PROMPT, namespace=A), []
    sender.engine.spaces[request.id] = A
    for count in (BLOCK, 2 * BLOCK, BLOCK):
        sender.engine.step([(request, count)])
        sender.driver.export(request)
        sent += sender.poll()
    sender.manager.release_request(request)
    arrivals = [taker.driver.receive(each.to_json(), peer, PROMPT, namespace=A) for each in sent if each != sent[lost]]
    until = time.monotonic() + PATIENCE
    while not arrivals[-1].is_over and time.monotonic() < until:
        taker.poll(), time.sleep(1e-3)
        for handoff in sender.poll():
            taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    assert arrivals[0] is arrivals[1] and arrivals[0].failure is None
    assert taker.manager.admit_remote(arrivals[0]).num_hit == 4 * BLOCK


def test_what_is_told_again_is_vouched_for_as_it_was_at_first(sides) -> None:
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    sender.engine.pages[handoff.blocks[1]][5] ^= 1
    assert sender.driver.export_again(handoff.lease, 0) is not None
    (again,) = sender.poll()
    arrival, until = taker.driver.receive(again.to_json(), peer, PROMPT, namespace=A), time.monotonic() + PATIENCE
    while not arrival.is_over and time.monotonic() < until:
        taker.poll()
    assert again.sums == handoff.sums and arrival.failure is not None and arrival.joined == 1


def test_words_that_no_driver_says_are_messages(sides) -> None:
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    lease = handoff.lease
    none = [
        {"again": lease},
        {"again": lease, "first": True},
        {"again": lease, "first": -1},
        {"again": lease, "first": 9e9},
        {"again": lease, "first": "0"},
        {"again": [], "first": 0},
        {"acknowledge": 1},
        ["acknowledge"],
        {"acknowledge": lease, "more": 1},
        {"again": lease, "first": 0, "more": 1},
    ]
    said = [*(json.dumps(word).encode() for word in none), b"[" * 1000, b"\xff", b"{" + b" " * 2000 + b"}"]
    harmless = [{"again": "nobody's", "first": 0}, {"again": lease, "first": 10**300}, {"acknowledge": "nobody's"}]
    for message in [*(json.dumps(word).encode() for word in harmless), *said]:
        taker.transport.notify(peer, message)
    messages, until = [], time.monotonic() + PATIENCE
    while len(messages) < len(said) and time.monotonic() < until:
        assert sender.poll() == []
        messages += sender.driver.take_messages()
    assert [each.message for each in messages] == said and len(sender.manager.leases) == 1


class Fence:
    ready = deleted = False

    def is_ready(self) -> bool:
        return self.ready

    def is_deleted(self) -> bool:
        return self.deleted


def test_an_engine_that_keeps_a_step_ahead_streams_by_fences(sides, monkeypatch) -> None:
    sender, taker, peer = sides
    monkeypatch.setattr(type(sender.engine.host.pages), "is_ready", lambda self: False)  # something always runs
    sender.export()
    fences = [Fence() for _ in range(3)]
    assert sender.poll(fence=fences[0]) == [] == sender.poll(fence=fences[1])
    fences[1].ready = True  # of a later call: says nothing of this one
    fences[0].deleted = fences[0].ready = True
    assert sender.poll() == []
    fences[0].deleted = False
    (handoff,) = sender.poll(fence=fences[2])
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    fence = Fence()
    for _ in range(3):
        taker.poll(fence=fence), taker.poll(fence=Fence())
    assert not arrival.records and len(arrival.reads) == 5
    fence.ready, until = True, time.monotonic() + PATIENCE
    while not arrival.is_over and time.monotonic() < until:
        taker.poll(fence=Fence())
    assert arrival.failure is None and taker.manager.admit_remote(arrival).num_hit == 4 * BLOCK


@pytest.mark.parametrize("donated", [False, True])
def test_what_has_no_fence_that_passes_waits_for_the_next_one(sides, monkeypatch, donated) -> None:
    sender, taker, peer = sides
    monkeypatch.setattr(type(sender.engine.host.pages), "is_ready", lambda self: False)  # something always runs
    first, fence = Fence() if donated else None, Fence()
    sender.export()
    assert sender.poll(fence=first) == []
    if first is not None:
        first.deleted = True
    assert sender.poll(fence=fence) == []
    fence.ready = True
    (handoff,) = sender.poll()
    first, fence = Fence() if donated else None, Fence()
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    taker.poll(fence=first)
    if first is not None:
        first.deleted = True
    taker.poll(fence=fence)
    assert len(arrival.reads) == 5 and not any(page.any() for page in taker.engine.pages.memories)
    fence.ready, until = True, time.monotonic() + PATIENCE
    while not arrival.is_over and time.monotonic() < until:
        taker.poll()
    assert arrival.failure is None and taker.manager.admit_remote(arrival).num_hit == 4 * BLOCK


@pytest.mark.parametrize("host", ["sender", "taker"])
def test_broken_off_anywhere_in_a_poll_no_page_stays_taken_and_the_prompt_comes_or_not(host) -> None:
    path = driver.__file__
    for n in itertools.count(0, 1 if SLOW else 61):
        fault = Fault(KeyboardInterrupt, n, root=path, opcodes=True)
        sender, taker = Side(0), Side(2)

        def poll(side: Side, fault=fault, broken={"sender": sender, "taker": taker}[host]) -> list[Handoff]:
            try:
                return fault.call(side.poll) if side is broken else side.poll()
            except KeyboardInterrupt:
                with contextlib.suppress(ManagerInterruptedError):
                    side.manager.check_integrity()
                    return side.driver.take_handoffs()
                side.manager.reset()
                return []

        with sender.transport, taker.transport:
            peer = taker.transport.connect(sender.metadata)
            sender.export()
            handoffs = []
            for _ in range(5):
                handoffs += poll(sender)
            if not handoffs:  # the sender was reset
                assert host == "sender" and not sender.driver.busy
                continue
            arrival = taker.driver.receive(handoffs[0].to_json(), peer, PROMPT, namespace=A)
            until = time.monotonic() + PATIENCE
            while not arrival.is_over and time.monotonic() < until:
                poll(taker), time.sleep(2e-4)
            assert arrival.is_over and not arrival.reads and not taker.manager.cache.reading
            if arrival.failure is None:
                assert taker.manager.admit_remote(arrival).num_hit == 4 * BLOCK
            taker.manager.reset()
            assert len(taker.manager.cache.try_pages(range(40))) == 40
        if not fault.hit:
            break
    assert n > 300


@pytest.mark.parametrize("begun", [False, True])
def test_a_transport_that_is_closed_gives_its_pages_back(sides, monkeypatch, begun) -> None:
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    monkeypatch.setattr(type(taker.engine.host.pages), "is_ready", lambda self: begun)
    taker.poll()
    assert len(arrival.reads) == 5
    taker.transport.close()
    monkeypatch.undo()
    with pytest.raises(TransferError):
        taker.poll()
    assert arrival.is_over and arrival.failure is not None and not taker.manager.cache.reading
    assert not taker.driver.busy and taker.manager.admit_remote(arrival).num_hit == 0


def copied(engine: ByteEngine) -> None:
    """What a step does to a pool that was not donated to it."""
    engine.pages = Pages([memory.copy() for memory in engine.pages.memories])
    engine.host = Host(engine.pages, engine.layout)


def test_pages_that_are_no_host_pool_are_refused_by_the_first_poll() -> None:
    """A copy of them, say, or those of another one: what is read would come to nobody's memory."""
    side = Side(0)
    with RecordTransport(open_engine("loopback")) as transport:
        transport.publish(side.engine.layout, [memory.copy() for memory in side.engine.pages.memories])
        driver = RemoteDriver(side.manager, transport)
        for _ in range(2):
            with pytest.raises(TransferError, match=r"not where pages were published.*publish_host"):
                driver.poll(side.engine.host, side.engine.host)
    with side.transport:
        side.driver.poll(side.engine.host, side.engine.host)


def test_a_pool_that_was_copied_between_two_calls_takes_nothing_in_and_tells_of_nothing(sides) -> None:
    """Before the first poll, or while reads are under way: they are given up, and their pages are free."""
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    taker.poll()
    until = time.monotonic() + PATIENCE
    while not all(reading.handle.is_ready() for reading in taker.driver._readings) and time.monotonic() < until:
        time.sleep(1e-3)
    assert arrival.reads and not arrival.is_over  # all bytes have come, to where the pool was
    copied(taker.engine), copied(sender.engine)
    request = sender.manager.admit_request([1, *PROMPT], namespace=A)
    sender.engine.step([(request, BLOCK)])
    sender.driver.export(request)
    for side in (taker, sender):
        with pytest.raises(TransferError, match="copied instead of donated"):
            side.poll()
    assert arrival.is_over and "copied" in arrival.failure and not taker.manager.cache.reading
    assert not taker.driver.busy and peer.error is not None  # nothing more is written
    assert not sender.driver.take_handoffs()
    assert taker.manager.admit_remote(arrival).num_hit == 0
    taker.manager.check_integrity()


def test_a_transport_whose_pages_are_not_as_the_managers_is_refused(sides) -> None:
    side = sides[0]
    engine = side.engine
    other = CacheLayout(DSV4Config.tiny(hca_ratio=8, layer_types=(AttentionType.CSA,), num_hash_layers=0), "f32")
    memories = {
        "publish": None,
        "other records": (other, np.zeros((41, page_bytes(other)), np.uint8)),
        "has 40 pages, 39 are published": (engine.layout, engine.pages.memories[0][:40]),
        "split into 2, the manager's are of 1": (
            engine.layout,
            [memory[:30] for memory in np.zeros_like([engine.pages.memories[0]] * 2)],
        ),
    }
    for problem, pages in memories.items():
        with RecordTransport(open_engine("loopback")) as transport:
            if pages is not None:
                transport.publish(*pages)
            with pytest.raises(LayoutError if pages else TransferError, match=problem):
                RemoteDriver(side.manager, transport)


def test_other_hosts_insist_on_a_name_of_the_weights() -> None:
    side = Side(0)
    with side.transport:
        with pytest.raises(RequestError, match="weights_id"):  # which has a driver already
            side.manager.reset(weights_id=None)
        manager = KVCacheManager(
            side.engine.layout, side.manager.size, policy=CachePolicy(), host=side.manager.host_size
        )
        with pytest.raises(RequestError, match="weights_id"):
            RemoteDriver(manager, side.transport)
        manager.reset(weights_id="v1")
        RemoteDriver(manager, side.transport)


def test_layouts_whose_blocks_hold_nothing_are_refused() -> None:
    layout = CacheLayout(DSV4Config.tiny(layer_types=(AttentionType.SWA,), num_hash_layers=0))
    with RecordTransport(open_engine("loopback")) as transport, pytest.raises(LayoutError, match="no records"):
        RemoteDriver(KVCacheManager(layout, CacheSize(4, 2, 2)), transport)
