"""What routers are told of a cache: what they expect of a prompt is what it finds; messages, replay, gaps, threads."""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence

import pytest

from dsv4_jax.engine import Engine, Prompt
from dsv4_jax.errors import EngineError, OptionError, PlanError
from dsv4_jax.events import BlockEvent, EventLog, Tier
from dsv4_jax.integrations.kv_events import (
    Announcer,
    Cleared,
    EventPublisher,
    Removed,
    Stored,
    block_hash,
    encode,
    publish,
)
from dsv4_jax.manager import MediaItem, Namespace
from dsv4_jax.manager.prefix.node import copies

from ..clock import PATIENCE
from ..engine.serving import BLOCK, CFG, Seeded, Server
from ..transports.test_bounds import resident

MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}


class Router:
    """What a router knows: media of each block, by all its tokens from the beginning, as it hashes them itself."""

    def __init__(self) -> None:
        self.media = collections.defaultdict[bytes, set[str]](set)
        self.path: dict[bytes, bytes] = {}  # digest -> all tokens

    def take(self, told: Sequence[Stored | Removed | Cleared]) -> None:
        for each in told:
            match each:
                case Cleared():
                    self.media.clear()
                    self.path.clear()
                case Removed(medium, digests):
                    for digest in digests:
                        self.media[self.path[digest]].remove(medium)
                case Stored(medium, digests, parent, tokens):
                    text = b"" if parent is None else self.path[parent]
                    assert parent is None or self.media[text], "it follows what was told"
                    for digest, ids in zip(digests, tokens, strict=True):
                        text += ids.tobytes()
                        self.path[digest] = text
                        assert medium not in self.media[text]
                        self.media[text].add(medium)

    def expected(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that it expects to be found."""
        text, blocks = array("I", tokens).tobytes(), (len(tokens) - 1) // BLOCK
        return BLOCK * next((i for i in range(blocks) if not self.media.get(text[: 4 * BLOCK * (i + 1)])), blocks)


class All(Announcer):
    """Another policy: whatever is there."""

    def update(self, events, missed=0):
        events = [e for e in events if e.kind in ("stored", "removed", "cleared")]
        states = [e._replace(kind=f"state_{e.kind}") for e in events if e.kind != "cleared"]
        return super().update([*events, *states] if not any(e.kind == "cleared" for e in events) else events, missed)


def serve(**options) -> tuple[Engine, Server]:
    server = Server(logs=[EventLog(details=True) for _ in range(options.get("shards", 1))], **options)
    return Engine(server.core, server.executor), server


def told_by_tree(server: Server) -> dict[bytes, set[str]]:
    """What should be told: of all blocks at or behind which there is a state, where they are."""
    found = {}
    for node in server.managers[0].cache.tree.nodes.published.values():
        below = [node]
        for each in below:
            child = each.first_child
            while child is not None:
                below.append(child)
                child = child.next
        if any(each.snapshot is not None for each in below):
            found[node.digest] = {MEDIUM[tier] for tier in copies(node)}
    return {digest: media for digest, media in found.items() if media}


def check_told(router: Router, server: Server) -> None:
    known = {digest: router.media[path] for digest, path in router.path.items() if router.media[path]}
    assert known == told_by_tree(server)


@pytest.mark.parametrize("host", [False, True])
def test_what_a_router_expects_is_what_prompts_find(host: bool) -> None:
    """Conversations and questions about documents, in a cache that is too small for all of them."""
    engine, server = serve(host=host, slots=4 if host else 2, blocks=40)  # two: few states stay
    routers, seen = [(Announcer(), Router()), (All(), Router())], 0
    rng, sums = random.Random(1), collections.Counter[str]()
    talks = [[rng.randrange(CFG.vocab_size) for _ in range(rng.randint(20, 70))] for _ in range(6)]
    with engine:
        for turn in range(60):
            talk = rng.choice(talks)
            goes_on = turn % 3 > 0
            asked = talk if goes_on else [*talk[: rng.randint(1, len(talk))], rng.randrange(CFG.vocab_size)]
            asked = asked[:150]
            events, missed = engine.events(seen)
            assert not missed
            seen += len(events)
            for announcer, router in routers:
                router.take(announcer.update(events))
            ours, all_of_it = (router.expected(asked) for _, router in routers)
            result = engine.add(Prompt(tokens=asked, max_new_tokens=9, sampling=Seeded(turn))).result(30)
            assert result.cached <= ours <= all_of_it, "what can be found was told"
            kind = "on" if goes_on else "off"
            sums.update({f"{kind} found": result.cached, f"{kind} ours": ours, f"{kind} all": all_of_it})
            if goes_on and len(talk) < 150:
                talk += [*result.tokens, rng.randrange(CFG.vocab_size)]
        routers[0][1].take(routers[0][0].update(engine.events(seen)[0]))
        engine.pause()
        check_told(routers[0][1], server)
    assert sums["on found"] > 1000 and sums["off found"] > 100
    assert sums["on ours"] <= 1.05 * sums["on found"], sums
    assert host or sums["on all"] > 1.5 * sums["on found"], f"else this policy is of no use: {sums}"


def test_many_readers_while_it_serves() -> None:
    """Each sees every event once, and the same in the end; what it tells by then is what is there."""
    engine, server = serve(host=True, slots=3, blocks=30)
    ended, wrong = threading.Event(), list[object]()
    states = [(Announcer(), Router()) for _ in range(2)]

    def read(announcer: Announcer, router: Router) -> None:
        try:
            seen = 0
            while True:
                last = ended.is_set()
                events, missed = engine.events(seen, timeout=0.01)
                assert not missed and [e.sequence for e in events] == [*range(seen + 1, seen + 1 + len(events))]
                seen += len(events)
                router.take(announcer.update(events))
                if last and not events:
                    return
        except BaseException as error:
            wrong.append(error)

    readers = [threading.Thread(target=read, args=state) for state in states]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for reader in readers:
            reader.start()
        rng = random.Random(2)
        for round_ in range(4):
            prompts = [
                Prompt(tokens=[i % 5] * rng.randint(1, 90), max_new_tokens=20, sampling=Seeded(i)) for i in range(20)
            ]
            engine.run(prompts)
            if round_ == 1:
                engine.pause()
                engine.resume(keep=False)
        engine.pause()
    finally:
        ended.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(before)
    assert not wrong
    for _, router in states:
        check_told(router, server)
        assert router.path
    engine.close()


def test_a_private_namespace_and_pictures_are_not_told() -> None:
    engine, _ = serve()
    text = [*range(1, 60)]
    with engine:
        ways = [dict(namespace=Namespace(tenant="a")), dict(items=[MediaItem("cat", 20, 30)])]
        for way in ways:
            engine.add(Prompt(tokens=text, max_new_tokens=2, sampling=Seeded(), **way)).result(30)
        told = Announcer().update(engine.events()[0])
        assert told == [], "the first block of the second is its text alone, but no hit can end there"
        engine.add(Prompt(tokens=text, max_new_tokens=2, sampling=Seeded())).result(30)
        told = Announcer().update(engine.events()[0])
        assert [(each.medium, len(each.digests), each.parent) for each in told] == [("GPU", 3, None)]
        assert [token for ids in told[0].tokens for token in ids] == text[:48]


def event(number: int, kind: str, digest: str | None = None, parent: str | None = None, tier=Tier.DEVICE) -> BlockEvent:
    names = [None if name is None else name.encode() * 32 for name in (digest, parent)]
    return BlockEvent(number, kind, tier, *names, array("I", [number, 1]) if kind == "stored" else None)


def test_changes_within_a_turn_that_cancel_out_are_not_told() -> None:
    """A state that rolls from block to block of a long prompt says nothing of the blocks before it."""
    announcer = Announcer()
    a, b = b"a" * 32, b"b" * 32
    assert announcer.update([event(1, "stored", "a")]) == []
    (told,) = announcer.update([event(2, "state_stored", "a")])
    assert (told.digests, told.parent) == ((a,), None)
    moved = [event(3, "state_removed", "a"), event(4, "stored", "b", "a"), event(5, "state_stored", "b", "a")]
    assert [(each.digests, each.parent) for each in announcer.update(moved)] == [((b,), a)]
    gone = [event(6, "removed", "b", "a"), event(7, "state_removed", "b", "a")]
    assert announcer.update(gone) == [Removed("GPU", (a, b))], "no hit can end at the first, whose bytes are there"
    assert announcer.update([event(8, "removed", "a")]) == []
    one = Announcer({Tier.DEVICE: "GPU", Tier.HOST: "GPU"})
    both = [event(1, "stored", "a"), event(2, "state_stored", "a"), event(3, "stored", "a", tier=Tier.HOST)]
    assert [each.digests for each in one.update(both)] == [(a,)]
    assert one.update([event(4, "removed", "a")]) == []
    assert one.update([event(5, "removed", "a", tier=Tier.HOST)]) == [Removed("GPU", (a,))]


def test_after_a_gap_all_is_cleared_and_told_again_as_it_comes() -> None:
    announcer = Announcer()
    announcer.update([event(1, "stored", "a"), event(2, "state_stored", "a")])
    late = [event(8, "stored", "c", "b"), event(9, "state_stored", "c", "b")]
    assert announcer.update(late, missed=5) == [Cleared()], "nobody knows what it follows"
    told = announcer.update([event(10, "stored", "a"), event(11, "stored", "b", "a")])
    assert [(each.digests, each.parent) for each in told] == [((b"a" * 32, b"b" * 32, b"c" * 32), None)]
    assert announcer.update([event(12, "cleared"), event(13, "stored", "a")]) == [Cleared()]


def test_an_engine_says_what_was_missed_and_what_it_does_not_have() -> None:
    server = Server(logs=[EventLog(4, details=True)])
    with Engine(server.core, server.executor) as engine:
        engine.add(Prompt(tokens=[*range(1, 100)], max_new_tokens=9)).result(30)
        events, missed = engine.events()
        assert len(events) == 4 and missed > 0 and events[-1].sequence == missed + 4
        assert engine.events(missed + 4, timeout=0.001) == ([], 0)
        for wrong, error in (((-1,), PlanError), ((1.5,), PlanError)):
            with pytest.raises(error):
                engine.events(*wrong)
        with pytest.raises(EngineError, match="shard must be an integer from 0 to 0"):
            engine.events(0, shard=1)
    assert engine.events(missed + 4, timeout=600)[0] == [], "nobody waits for an engine that has ended"
    server = Server()
    with Engine(server.core, server.executor) as engine, pytest.raises(EngineError, match="has no events"):
        engine.events()


# Over ZeroMQ

# vLLM 0.33.0's encoder (msgspec) wrote this of the same events; its maps have headers of 16 bits (de0008, not 88).
THEIRS = (
    "93cb3ff800000000000093de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf4000000000000000"
    "07b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401ce0001f8ff0304aa626c6f636b5f73697a6502a76c6f"
    "72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f"
    "6861736865739107a66d656469756da343505581a474797065b0416c6c426c6f636b73436c656172656400"
)


def test_messages_are_those_of_vllm() -> None:
    pytest.importorskip("msgspec")
    a, b = ((n << 1).to_bytes(8, "big") + bytes(24) for n in (2**62, 7))
    told = [
        Stored("GPU", (a, b), None, (array("I", [1, 129279]), array("I", [3, 4]))),
        Removed("CPU", (b,)),
        Cleared(),
    ]
    assert encode(told, 1.5, 0).hex() == THEIRS.replace("de0008", "88")
    assert -(2**63) <= block_hash(b"\xff" * 32) < 2**63


def replayed(zmq, publisher: EventPublisher, first: int = 0) -> Iterator[tuple[int, bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asks:
        asks.setsockopt(zmq.LINGER, 0)
        asks.setsockopt(zmq.RCVTIMEO, 20_000)
        asks.connect(publisher.replay_endpoint)
        asks.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            _, topic, number, payload = asks.recv_multipart()
            if number == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return
            assert topic == b"kv@pod@model"
            yield int.from_bytes(number, "big"), payload


def test_a_subscriber_and_one_that_comes_late_know_the_same() -> None:
    """Three frames; numbers without gaps; a replay, and its end; and strangers' bytes, which change nothing."""
    zmq, msgspec = pytest.importorskip("zmq"), pytest.importorskip("msgspec")
    engine, _ = serve()

    def told(messages: dict[int, bytes]) -> list[dict]:
        return [event for payload in messages.values() for event in msgspec.msgpack.decode(payload)[1]]

    options = dict(replay_endpoint="tcp://127.0.0.1:0", topic="kv@pod@model")
    context = zmq.Context()
    hears, stranger = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    with engine, publish(engine, "tcp://127.0.0.1:0", **options)[0] as publisher, context, hears, stranger:
        for socket in (hears, stranger):
            socket.setsockopt(zmq.LINGER, 0)
        stranger.connect(publisher.replay_endpoint)
        for junk in ([b""], [b"", b"123"], [b"x", b"y", b"z"], [b"", b"9" * 4000]):
            stranger.send_multipart(junk)
        hears.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        hears.connect(publisher.endpoint)
        number, first = 0, 0
        while not hears.poll(100):  # until it is connected
            number += 1
            assert number < 200
            engine.add(Prompt(tokens=[number % CFG.vocab_size] * 40, max_new_tokens=1)).result(30)
        for i in range(5):
            engine.add(Prompt(tokens=[7, i] * 30, max_new_tokens=1)).result(30)
        heard: dict[int, bytes] = {}
        until, last = time.monotonic() + 30, block_hash(engine.managers[0].digests([7, 4] * 30)[2])
        while not any(last in event.get("block_hashes", ()) for event in told(heard)):
            assert time.monotonic() < until
            if hears.poll(100):
                _, count, payload = hears.recv_multipart()
                first = min(heard, default=int.from_bytes(count, "big"))
                heard[int.from_bytes(count, "big")] = payload
        kept = dict(replayed(zmq, publisher))
        assert [*kept] == [*range(publisher.sent)], "from 0, none left out"
        assert {count: kept[count] for count in heard} == heard and [*heard] == [*range(first, first + len(heard))]
        assert [count for count, _ in replayed(zmq, publisher, publisher.sent - 2)] == [*kept][-2:]
        seconds, _, rank = msgspec.msgpack.decode(heard[max(heard)])
        assert abs(seconds - time.time()) < 600 and rank == 0 and publisher.error is None
        stored = next(event for event in told(heard) if last in event["block_hashes"])
        assert stored["type"] == "BlockStored" and stored["block_size"] == BLOCK and stored["medium"] == "GPU"
        assert ([7, 4] * 30)[:48][-len(stored["token_ids"]) :] == stored["token_ids"]


class Many:
    """A source of so many messages of 64 KiB or more."""

    count = 256

    def events(self, since: int = 0, *, shard: int = 0, timeout: float | None = None) -> tuple[list, int]:
        if since >= self.count:
            time.sleep(timeout or 0)
        return [None] * (since < self.count), 0

    def update(self, events: list, missed: int = 0) -> list[Removed]:
        return [Removed("GPU", (b"\xff" * 32,) * 8000)]


def test_askers_that_do_not_read_share_what_is_kept_for_them() -> None:
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    many, where = Many(), "tcp://127.0.0.1:0"
    options: dict = dict(replay_endpoint=where, topic="kv@pod@model", announcer=many)
    with EventPublisher(many, where, **options) as publisher, zmq.Context() as context, contextlib.ExitStack() as crowd:
        until = time.monotonic() + PATIENCE
        while publisher.sent < many.count:
            assert time.monotonic() < until
            time.sleep(0.01)
        before = resident()
        for _ in range(24):
            asker = crowd.enter_context(context.socket(zmq.DEALER))
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
                asker.setsockopt(option, value)
            asker.connect(publisher.replay_endpoint)
            asker.send_multipart((b"", bytes(8)))
        kept = dict(replayed(zmq, publisher))
        assert [*kept] == [*range(many.count)] and len(kept[255]) > 1 << 16, "and others are answered"
        assert resident() - before < 64 << 20, "not sixteen megabytes and more for each"


def test_a_publisher_for_each_data_rank_and_refusals() -> None:
    zmq = pytest.importorskip("zmq")
    engine, _ = serve(shards=2)
    with zmq.Context() as context, context.socket(zmq.PUB) as taken, engine:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(OptionError, match=f"127.0.0.1:{port}"):
            publish(engine, f"tcp://127.0.0.1:{port - 1}")  # the second rank's is taken, and the first let go
        with pytest.raises(OptionError, match="nonsense"):
            publish(engine, "nonsense")
        with pytest.raises(OptionError, match="kept"):
            publish(engine, "tcp://127.0.0.1:0", kept=0)
        first, second = publish(engine, "ipc://@dsv4-events" + str(port))
        assert (first.endpoint, second.endpoint) == tuple(f"ipc://@dsv4-events{port}{end}" for end in ("", "_dp1"))
        for each in (first, second):
            each.close()
            each.close()
    server = Server()
    with Engine(server.core, server.executor) as engine, pytest.raises(EngineError, match="has no events"):
        publish(engine, "tcp://127.0.0.1:0")
