"""Prompts from engine to engine: what another host has computed is gone on with as one's own, whatever goes wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_jax import CacheSize
from dsv4_jax.engine import Core, Drawn, Engine, Limits, Prompt, Work, shapes_of
from dsv4_jax.errors import ContextLimitError, HandoffError, PeerError, PlanError, RequestError
from dsv4_jax.manager import HostSize, LeaseShares, Namespace
from dsv4_jax.tiers.remote import RecordTransport, RemoteDriver
from dsv4_jax.transports import open_engine
from tests.clock import PATIENCE
from tests.remote.byte_engine import BLOCK, VOCAB, ByteEngine, answer

from .serving import Server, eventually

PROMPT = [i * i % VOCAB for i in range(9 * BLOCK + 3)]


class ByteExecutor:
    """Runs works on a `ByteEngine`: one wrong byte is a wrong answer."""

    def __init__(self, drafts: int, blocks: int, pages: int, seed: int):
        self.bytes = ByteEngine(
            drafts=drafts, size=CacheSize(blocks, 3, 16, num_snapshots=3), host=HostSize(pages), seed=seed
        )
        self.shapes = shapes_of([self.bytes.manager], 3 * BLOCK)
        self.transport = RecordTransport(open_engine("loopback"), timeout=PATIENCE)
        self.transport.publish_host(self.bytes.host)
        self.driver = RemoteDriver(self.bytes.manager, self.transport, ask_after=0.05)
        self.on_send: Callable[[Work], object] = lambda work: None
        self.last: list[int] = []

    def check(self, prompt: Prompt) -> None:
        """Everything can be asked for."""

    def move(self, transfers: Any) -> None:
        for stages in transfers:
            for stage in stages:
                self.bytes.move(stage)

    def send(self, work: Work) -> Any:
        self.on_send(work)
        self.move(work.transfers)
        plan, drawn = work.plans[0], list[list[int]]()
        self.bytes.copy(plan)
        for row, first, start in zip(work.rows[0], plan.seq_first.tolist(), plan.seq_start.tolist(), strict=False):
            for i in range(row.count):
                at = work.source[first + i]
                token = int(work.tokens[first + i]) if at < 0 else self.last[at]
                sampled = self.bytes.feed(row.slot, row.prompt.namespace, start + i, token)
            drawn.append([sampled])
        self.last = [ids[-1] for ids in drawn]
        return Done(Drawn([drawn]))

    def poll(self, *, idle: bool) -> bool:
        manager = self.bytes.manager
        if idle:
            manager.flush()
            self.move([manager.take_transfers()])
        self.driver.poll(self.bytes.host, self.bytes.host)
        return self.driver.busy or len(manager.leases) > 0

    def recover(self) -> None:
        self.bytes.blocks[:] = 0
        self.bytes.states.clear()


@dataclasses.dataclass
class Done:
    drawn: Drawn

    def get(self) -> Drawn:
        return self.drawn


class Side:
    """An engine of one host."""

    def __init__(self, drafts: int, blocks: int = 40, pages: int = 80, ahead: bool = True, **limits: Any):
        self.executor = ByteExecutor(drafts, blocks, pages, seed=drafts)
        self.manager, self.transport = self.executor.bytes.manager, self.executor.transport
        limit = Limits(**{"patience": PATIENCE, "lease": PATIENCE} | limits)
        self.core = Core(self.manager, self.executor.shapes, limits=limit, remote=self.executor.driver, ahead=ahead)
        self.engine = Engine(self.core, self.executor)


@pytest.fixture
def side():
    made: list[Side] = []

    def make(drafts: int = 0, **options: Any) -> Side:
        made.append(Side(drafts, **options))
        return made[-1]

    yield make
    try:
        for each in made:
            eventually(lambda held=each.executor.bytes.held, call=each.engine._call: not any(call(held).values()))
    finally:
        for each in made:
            each.engine.close()
            each.transport.close()


def handed(sender: Side, taker: Side, tokens=PROMPT, count: int = 6, *, parts=lambda part: [part], **options):
    """A request at both ends; the parts of its hand-off go by way of `parts`. Returns both handles."""
    peer = taker.transport.connect(sender.transport.published)
    there = taker.engine.add(Prompt(tokens=tokens, max_new_tokens=count, peer=peer, **options))
    sent: list[bytes] = []
    here = sender.engine.add(Prompt(tokens=tokens, export=sent.append, **options))

    def forward(given: list[bytes] = sent) -> None:
        while given:
            for part in parts(given.pop(0)):
                taker.engine.receive(there.id, part)

    return here, there, forward


def goes_on(forward: Callable[[], object], handle: Any) -> Any:
    def ended() -> bool:
        forward()
        return handle.done

    eventually(ended)
    return handle.result()


def lease_over(*sides: Side) -> None:
    eventually(lambda: not any(len(each.manager.leases) for each in sides))


def nobody_reads(sender: Side) -> None:
    """As if their time was over."""
    sender.engine._call(lambda: [*map(sender.manager.acknowledge, list(sender.manager.leases.active))])


@pytest.mark.parametrize("tenant", [None, Namespace("a")])
def test_what_one_has_computed_the_other_goes_on_with(side, tenant):
    """It streams: parts come before the last one, and all that is left to compute is behind the last boundary."""
    sender, taker, parts = side(), side(2), list[dict[str, Any]]()
    log = lambda part: parts.append(json.loads(part)) or [part]  # noqa: E731
    here, there, forward = handed(sender, taker, parts=log, namespace=tenant)
    done = goes_on(forward, there)
    assert done.tokens == answer(tenant, PROMPT, 6) and done.cached == 9 * BLOCK
    assert taker.engine.stats().counts["computed_tokens"] <= 3 + 6
    assert (ended := here.result()).finish == "handoff" and ended.lease == parts[0]["lease"] and not ended.tokens
    assert len(parts) > 2 and [part["last"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert sender.engine.stats().counts["computed_tokens"] == 9 * BLOCK, "nothing behind the last boundary"
    lease_over(sender)  # acknowledged


def test_receivers_that_died_keep_no_prompt_from_being_told(side):
    """Twenty prompts that nobody acknowledges, on a host with room for a few: the oldest leases end."""
    sender, parts = side(patience=20), list[bytes]()
    cache = sender.manager.cache
    cache.policy = dataclasses.replace(cache.policy, leases=LeaseShares(grace=0.01))
    for tenant in range(20):
        handle = sender.engine.add(Prompt(tokens=PROMPT, namespace=Namespace(str(tenant)), export=parts.append))
        assert handle.result(PATIENCE).finish == "handoff" and json.loads(parts[-1])["last"]
    ended = sender.manager.stats().handoffs.ended
    assert ended["sent", "room"] > 10 and not ended["sent", "time"]
    assert 'reason="room"' in sender.engine.metrics()
    nobody_reads(sender)


def test_all_that_is_cached_is_told_without_a_step(side):
    sender, taker = side(), side()
    sender.engine.add(Prompt(tokens=PROMPT, max_new_tokens=2)).result()
    calls = sender.engine.stats().counts["calls"]
    here, there, forward = handed(sender, taker)
    assert goes_on(forward, there).tokens == answer(None, PROMPT, 6)
    assert here.result().finish == "handoff" and sender.engine.stats().counts["calls"] == calls
    short = sender.engine.add(Prompt(tokens=PROMPT[:BLOCK], export=lambda part: None))
    assert short.result().finish == "handoff", "nothing to hand off is handed off at once"
    nobody_reads(sender)


def test_a_host_that_is_lost_is_told_of_and_comes_back(side):
    """Who waits for it computes; the next request is handed over as before."""
    sender, taker = side(), side()
    peer, parts = taker.transport.connect(sender.transport.published), list[bytes]()
    sender.engine.add(Prompt(tokens=PROMPT, export=parts.append)).result()
    there = taker.engine.add(Prompt(tokens=PROMPT, max_new_tokens=6, peer=peer))
    taker.engine.pause()
    taker.engine._call(lambda: taker.transport._lose(peer, PeerError(peer.name, "cut")))
    with pytest.raises(PeerError, match="cut"):
        taker.engine.receive(there.id, parts[0])
    taker.engine.resume()
    assert there.result(PATIENCE).tokens == answer(None, PROMPT, 6) and there.result().cached == 0
    eventually(lambda: peer.error is None)
    again = taker.engine.add(Prompt(tokens=[1, *PROMPT], max_new_tokens=6, peer=peer))
    sender.engine.add(Prompt(tokens=[1, *PROMPT], export=lambda part: taker.engine.receive(again.id, part)))
    assert again.result(PATIENCE).tokens == answer(None, [1, *PROMPT], 6) and again.result().cached == 9 * BLOCK
    nobody_reads(sender)


def test_who_is_named_alone_ends_the_hand_off(side):
    """Another host that knows the lease does not; pages count as the named one's; both pages of numbers say it."""
    sender, taker, stranger = side(), side(), side()
    name, parts = taker.transport.name, list[bytes]()
    ended = sender.engine.add(Prompt(tokens=PROMPT, export=parts.append, export_to=name)).result(PATIENCE)
    assert ended.finish == "handoff"
    foreign = stranger.transport.connect(sender.transport.published)
    stranger.transport.notify(foreign, json.dumps({"acknowledge": ended.lease}).encode())
    eventually(lambda: sender.executor.driver.counts["foreign"])
    held = sender.engine.managers[0].stats().handoffs
    assert held.leases == 1 and held.peers == {name: held.lease_pages} and held.lease_pages >= 9
    peer = taker.transport.connect(sender.transport.published)
    there = taker.engine.add(Prompt(tokens=PROMPT, max_new_tokens=6, peer=peer))
    for part in parts:
        taker.engine.receive(there.id, part)
    assert there.result(PATIENCE).cached == 9 * BLOCK
    lease_over(sender)
    assert re.search(r'dsv4_transport_bytes_total{engine="loopback",[^}]*} [1-9]', taker.engine.metrics())
    assert re.search(r'dsv4_transport_notices_total{engine="loopback",[^}]*} [1-9]', sender.engine.metrics())
    assert re.search(r'dsv4_transport_refused_total{engine="loopback",[^}]*} 0', sender.engine.metrics()), "not missing"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("when", ["before", "in the middle", "after"])
def test_an_abort_where_it_goes_on_ends_what_comes(side, when, n):
    """Its arrival, and the lease at the other end, whose parts may come before it or after it."""
    sender, taker = side(), side()
    peer, parts = taker.transport.connect(sender.transport.published), list[bytes]()
    there = taker.engine.add(Prompt(tokens=PROMPT, max_new_tokens=6, n=n, peer=peer))
    here = sender.engine.add(Prompt(tokens=PROMPT, export=parts.append))
    here.result()
    given = {"before": 0, "in the middle": 2, "after": len(parts)}[when]
    for part in parts[:given]:
        taker.engine.receive(there.id, part)
    there.abort()
    there.results(PATIENCE)
    for part in parts[given:]:
        assert not taker.engine.receive(there.id, part)
    lease_over(sender)
    eventually(lambda: not taker.executor.driver.busy)
    assert not taker.engine.receive(there.id, b"{}"), "nor is what is none of any use"


def test_samples_of_one_prompt_wait_for_one_hand_off(side):
    sender, taker = side(), side()
    peer, parts = taker.transport.connect(sender.transport.published), list[bytes]()
    there = taker.engine.add(Prompt(tokens=PROMPT, max_new_tokens=3, peer=peer, n=3))
    sender.engine.add(Prompt(tokens=PROMPT, export=parts.append)).result()
    for part in parts:
        assert taker.engine.receive(there.id, part)
    assert [each.tokens for each in there.results()] == [answer(None, PROMPT, 3)] * 3
    assert [each.cached for each in there.results()] == [9 * BLOCK] * 3
    assert not taker.engine.receive(there.id, parts[0]), "nobody waits any more"
    lease_over(sender)


def test_parts_that_are_lost_are_told_again(side):
    """Even the last one, of a request that has ended."""
    sender, taker = side(), side()
    lost: dict[bool, bytes] = {}

    def some(part: bytes) -> list[bytes]:
        last = json.loads(part)["last"]
        return [part] if last in lost or lost.setdefault(last, part) is None else []

    here, there, forward = handed(sender, taker, parts=some)
    assert goes_on(forward, there).tokens == answer(None, PROMPT, 6)
    assert len(lost) == 2 and here.result().finish == "handoff" and there.result().cached == 9 * BLOCK
    lease_over(sender)


def torn(part: bytes) -> list[bytes]:
    fields = json.loads(part)
    if fields["sums"]:
        fields["sums"] = ("0" if fields["sums"][0] != "0" else "1") + fields["sums"][1:]
    return [json.dumps(fields).encode()]


def test_torn_records_are_computed_here(side):
    sender, taker = side(), side()
    here, there, forward = handed(sender, taker, parts=torn)
    done = goes_on(forward, there)
    assert done.tokens == answer(None, PROMPT, 6) and done.cached < 9 * BLOCK
    ended = here.result()
    assert ended.finish == "handoff" or "given it up" in str(ended.error)
    lease_over(sender)


def test_what_comes_late_is_computed_here(side):
    sender, taker = side(lease=0.05), side(patience=0.02)
    here, there, forward = handed(sender, taker, parts=lambda part: [])
    done = goes_on(forward, there)
    assert done.tokens == answer(None, PROMPT, 6) and done.cached == 0
    assert here.result().finish in ("handoff", "error")  # the lease may end before all is told
    lease_over(sender)


def test_a_host_that_is_gone_is_not_waited_for(side):
    sender, taker = side(lease=0.05), side()
    here, there, _ = handed(sender, taker)
    (peer,) = taker.transport._links
    taker.transport.disconnect(peer)
    assert there.result(PATIENCE).tokens == answer(None, PROMPT, 6)
    here.abort()
    lease_over(sender)


@pytest.mark.parametrize("when", ["queued", "first part", "all parts"])
def test_an_abort_at_either_end_leaves_nothing(side, when):
    sender, taker = side(), side()
    peer, parts = taker.transport.connect(sender.transport.published), list[bytes]()
    there = taker.engine.add(Prompt(tokens=PROMPT, max_new_tokens=6, peer=peer))
    if when == "queued":
        sender.engine.pause()
    here = sender.engine.add(Prompt(tokens=PROMPT, export=parts.append))
    if when != "queued":
        eventually(lambda: len(parts) > (when == "all parts" and not here.done))
        if when == "all parts":
            here.result()
        for part in list(parts):
            taker.engine.receive(there.id, part)
    there.abort(), here.abort()
    assert there.result(PATIENCE).finish in ("abort", "length") and here.result(PATIENCE).finish in ("abort", "handoff")
    if when == "queued":
        sender.engine.resume()
    lease_over(sender)


@pytest.mark.parametrize("together", [False, True])
def test_a_step_that_fails_takes_its_leases_along(side, together):
    """Who was in the step ends; others are computed again, and told under another lease."""
    sender, taker, parts = side(ahead=False), side(), list[bytes]()
    peer = taker.transport.connect(sender.transport.published)
    there = taker.engine.add(Prompt(tokens=PROMPT, max_new_tokens=6, peer=peer))

    failures = [OSError("the device")]

    def fail(work: Work) -> None:
        alone = all(row.prompt.export is None for row in work.rows[0])  # all is computed, and not all is told
        if len(parts) >= 2 and alone != together and failures:
            raise failures.pop()

    sender.executor.on_send = fail
    sender.engine.pause()
    other = sender.engine.add(Prompt(tokens=[1], max_new_tokens=100))
    here = sender.engine.add(Prompt(tokens=PROMPT, export=parts.append))
    sender.engine.resume()
    ended = here.result(PATIENCE)
    assert isinstance(other.result(PATIENCE).error, OSError)
    assert ended.finish == ("error" if together else "handoff") and sender.engine.stats().counts["failures"] == 1
    assert len({json.loads(part)["lease"] for part in parts}) == 2 - together
    for part in parts:
        taker.engine.receive(there.id, part)
    if together:
        assert taker.engine.receive(there.id, None)
    assert there.result(PATIENCE).tokens == answer(None, PROMPT, 6)
    assert there.result().cached == (0 if together else 9 * BLOCK)
    lease_over(sender)


def test_without_room_on_the_host_it_ends_in_an_error(side):
    sender = side(pages=6, patience=0.05)
    ended = sender.engine.add(Prompt(tokens=PROMPT, export=lambda part: None)).result(PATIENCE)
    assert ended.finish == "error" and isinstance(ended.error, HandoffError) and "no room" in str(ended.error)
    assert sender.engine.add(Prompt(tokens=PROMPT, max_new_tokens=3)).result().tokens == answer(None, PROMPT, 3)
    lease_over(sender)


def test_a_callback_that_raises_ends_its_request(side):
    def raising(part: bytes) -> None:
        raise KeyError("the pipe")

    sender = side()
    ended = sender.engine.add(Prompt(tokens=PROMPT, export=raising)).result(PATIENCE)
    assert ended.finish == "error" and isinstance(ended.error, KeyError)
    lease_over(sender)


def test_refusals_change_nothing(side):
    sender, taker = side(), side()
    peer = taker.transport.connect(sender.transport.published)
    there = taker.engine.add(Prompt(tokens=PROMPT, max_new_tokens=2, peer=peer))
    for bad in (b"", b"{}", b"x" * 99):
        with pytest.raises(HandoffError):
            taker.engine.receive(there.id, bad)
    parts: list[bytes] = []
    sender.engine.add(Prompt(tokens=PROMPT[::-1], export=parts.append)).result()
    with pytest.raises(HandoffError, match="digest"):
        taker.engine.receive(there.id, parts[0])
    assert not taker.engine.receive("nobody", parts[0])
    with pytest.raises(ContextLimitError):
        taker.engine.add(Prompt(tokens=PROMPT * 9, peer=peer))
    taker.engine.pause()
    waiting = taker.engine.add(Prompt(tokens=PROMPT, max_new_tokens=1, id="plain"))
    with pytest.raises(RequestError, match="no peer"):
        taker.engine.receive("plain", parts[0])
    taker.engine.resume()
    assert waiting.result().tokens == answer(None, PROMPT, 1)
    there.abort()
    nobody_reads(sender)


def test_an_engine_without_a_transport_refuses():
    core = Server().core
    with pytest.raises(RequestError, match="export: this engine has no transport"):
        core.add(Prompt(tokens=[1], export=print), 0.0)
    many = Server(shards=2)
    with pytest.raises(PlanError, match="one data shard"):
        Core(many.managers, many.executor.shapes, remote=object())
    for options in (dict(n=2), dict(peer=7), dict(export=7), dict(export_to=7), dict(export_to="x", export=None)):
        with pytest.raises(RequestError):
            Prompt(**{"tokens": [1], "export": print} | options)
