"""What is cached, told to routers: vLLM's messages over ZeroMQ, which llm-d, Dynamo and the Gateway API read.

    engine = Engine.load(checkpoint, events=True)
    publishers = publish(engine, "tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5657")

A hit ends at a state, and no router knows of states. So a block is told of when a hit can end at it or behind it, and
its removal when none can any more, though its bytes are there (`Announcer`). What a router expects of a prompt that
goes on from one that was told is then what it finds; of one that leaves it between two states it may expect more.

Messages have the token ids of prompts: whoever can connect reads them. The default is this machine alone.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from ..checks import check_integer, shown
from ..errors import OptionError
from ..events import BlockEvent, Tier

__all__ = [
    "Announcer",
    "Cleared",
    "EventPublisher",
    "EventSource",
    "Removed",
    "Stored",
    "block_hash",
    "encode",
    "publish",
]

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
MOST_BLOCKS = 512  # of one event: a message has bounds
POLL = 0.05  # seconds between looks at who asks for a replay
END = (-1).to_bytes(8, "big", signed=True)


class Stored(NamedTuple):
    """Blocks that follow each other from `parent` (a digest; None: from the beginning), and their ids."""

    medium: str
    digests: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[array[int], ...]


class Removed(NamedTuple):
    medium: str
    digests: tuple[bytes, ...]


class Cleared(NamedTuple):
    """Nothing that was told holds any more."""


Announcement = Stored | Removed | Cleared


class EventSource(Protocol):
    """An `Engine` with events."""

    def events(
        self, since: int = 0, *, shard: int = 0, timeout: float | None = None
    ) -> tuple[list[BlockEvent], int]: ...


class _Block:
    """What is known of a block: bits of the tiers that have it and its state, and in which media that was told.

    `reach`: children behind which a hit can end, and one for a state of its own.
    """

    __slots__ = ("parent", "reach", "states", "tiers", "tokens", "told")

    def __init__(self, parent: bytes | None):
        self.parent, self.tokens = parent, None
        self.tiers = self.states = self.reach = 0
        self.told: frozenset[str] = frozenset()

    parent: bytes | None
    tokens: array[int] | None
    told: frozenset[str]

    @property
    def ends(self) -> bool:
        """Whether a hit that a router can name ends here."""
        return self.states > 0 and self.tokens is not None


class Announcer:
    """Which blocks routers are told of: those at or behind which a hit can end, as far as their tokens are known.

    Args:
        media: tier -> its name in messages; tiers of one name are told as one, those without a name not at all.

    Blocks of namespaces, and from a prompt's first multimodal item on, are not told: routers name blocks by tokens.
    """

    def __init__(self, media: Mapping[Tier, str] = MEDIA):
        self._media = [
            frozenset(name for tier, name in media.items() if bits >> tier & 1) for bits in range(2 << max(Tier))
        ]
        self._forget()

    def _forget(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._children: dict[bytes, set[bytes]] = {}  # of blocks that are not known, too
        self._dirty: dict[bytes, None] = {}

    def update(self, events: Iterable[BlockEvent], missed: int = 0) -> list[Announcement]:
        """What to tell after these events, of which so many were missed before: they must be all of some turns.

        After a gap all is cleared; blocks that follow what was missed are told of when their parents come again.
        """
        told: list[Announcement] = [Cleared()] if missed else []
        if missed:
            self._forget()
        for event in events:
            if event.digest is None:
                self._forget()
                told = [Cleared()]
            elif event.kind == "stored":
                self._stored(event.digest, event)
            elif (block := self._blocks.get(event.digest)) is not None:
                self._dirty[event.digest] = None
                before = block.ends
                if event.kind == "removed":
                    block.tiers &= ~(1 << event.tier)
                elif event.kind == "state_stored":
                    block.states |= 1 << event.tier
                else:
                    block.states &= ~(1 << event.tier)
                self._reach(event.digest, block.ends - before)
        return told + self._settle()

    def _stored(self, digest: bytes, event: BlockEvent) -> None:
        block = self._blocks.get(digest)
        if block is None:
            block = self._blocks[digest] = _Block(event.parent)
            if event.parent is not None:
                self._children.setdefault(event.parent, set()).add(digest)
            block.reach = sum(self._blocks[child].reach > 0 for child in self._children.get(digest, ()))
            if block.reach and event.parent is not None:
                self._reach(event.parent, 1)
        self._dirty[digest] = None
        before, block.tiers = block.ends, block.tiers | 1 << event.tier
        block.tokens = event.tokens or block.tokens
        self._reach(digest, block.ends - before)

    def _reach(self, digest: bytes | None, by: int) -> None:
        """One place more or less at which a hit can end, at the block or behind this child of it."""
        while by and digest is not None and (block := self._blocks.get(digest)) is not None:
            before, block.reach = block.reach, block.reach + by
            if bool(before) == bool(block.reach):
                return
            self._dirty[digest] = None
            digest = block.parent

    def _settle(self) -> list[Announcement]:
        """What has changed of what routers should know: paths from their beginnings on, new copies before lost ones."""
        new, lost = collections.defaultdict[str, list[bytes]](list), collections.defaultdict[str, list[bytes]](list)
        gone = [digest for digest in self._dirty if not self._blocks[digest].tiers]
        for digest in gone:
            block = self._blocks[digest]
            if block.reach:
                self._reach(block.parent, -1)
                block.reach = 0
        while self._dirty:
            path, digest = list[bytes](), next(iter(self._dirty), None)
            while digest in self._dirty:
                assert digest is not None
                path.append(digest)
                digest = self._blocks[digest].parent
            for digest in reversed(path):
                del self._dirty[digest]
                block = self._blocks[digest]
                parent = self._blocks.get(block.parent) if block.parent is not None else None
                follows = block.parent is None or (parent is not None and bool(parent.told))
                tells = block.tokens is not None and block.reach > 0 and follows
                want = self._media[block.tiers] if tells else frozenset[str]()
                for medium in sorted(want - block.told):
                    new[medium].append(digest)
                for medium in sorted(block.told - want):
                    lost[medium].append(digest)
                if bool(want) != bool(block.told):
                    self._dirty.update(dict.fromkeys(self._children.get(digest, ())))
                block.told = want
        told: list[Announcement] = [run for medium, digests in new.items() for run in self._runs(medium, digests)]
        told += [
            Removed(medium, tuple(digests[i : i + MOST_BLOCKS]))
            for medium, digests in lost.items()
            for i in range(0, len(digests), MOST_BLOCKS)
        ]
        for digest in gone:
            self._drop(digest)
        return told

    def _runs(self, medium: str, digests: list[bytes]) -> list[Stored]:
        """Blocks as paths."""
        runs: list[list[bytes]] = []
        for digest in digests:
            if runs and self._blocks[digest].parent == runs[-1][-1] and len(runs[-1]) < MOST_BLOCKS:
                runs[-1].append(digest)
            else:
                runs.append([digest])
        return [
            Stored(
                medium,
                tuple(run),
                self._blocks[run[0]].parent,
                tuple(tokens for digest in run if (tokens := self._blocks[digest].tokens) is not None),
            )
            for run in runs
        ]

    def _drop(self, digest: bytes) -> None:
        """It is nowhere any more."""
        if (parent := self._blocks.pop(digest).parent) is None:
            return
        siblings = self._children[parent]
        siblings.remove(digest)
        if not siblings:
            del self._children[parent]


def block_hash(digest: bytes) -> int:
    """A block's name in messages: 63 bits of its digest, positive whether a reader takes them as signed or not."""
    return int.from_bytes(digest[:8], "big") >> 1


def encode(announcements: Iterable[Announcement], seconds: float, rank: int) -> bytes:
    """A message's payload: msgpack of [time, events, data rank], events as maps tagged by `type`.

    Raises:
        OptionError: the extra `events` is not installed.
    """
    return _needs("msgspec").msgpack.encode([float(seconds), [_as_map(each) for each in announcements], rank])


def _as_map(told: Announcement) -> dict[str, Any]:
    if isinstance(told, Cleared):
        return {"type": "AllBlocksCleared"}
    hashes = [block_hash(digest) for digest in told.digests]
    if isinstance(told, Removed):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": told.medium}
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if told.parent is None else block_hash(told.parent),
        "token_ids": [token for tokens in told.tokens for token in tokens],
        "block_size": len(told.tokens[0]),
        "lora_id": None,
        "medium": told.medium,
        "lora_name": None,
    }


def _needs(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise OptionError(f"{module} is not installed: pip install 'dsv4_jax[events]'") from None


class EventPublisher:
    """Publishes the events of one data rank, from a thread of its own, until it is closed.

    Every message has three frames: topic, sequence number (8 bytes, big endian, from 0), payload (`encode`). Who missed
    some sends two frames to the replay address, nothing and the first number wanted (8 bytes), and gets nothing, topic,
    number and payload of each that is kept, then an end mark, whose number is -1.

    Args:
        source: an `Engine` with events.
        endpoint: where subscribers connect to; "tcp://127.0.0.1:0" takes a free port.
        replay_endpoint: where replays are asked for; None: nowhere.
        topic: of all messages. llm-d wants "kv@POD@MODEL".
        shard: the engine's data shard.
        rank: the data rank that messages name (default: the shard).
        connect: whether to connect to a subscriber that has bound `endpoint`.
        kept, kept_bytes: messages that can be replayed, and their bytes. As many wait for a subscriber that does not
            read; then messages to it are lost, and their numbers show it.
        announcer: what is told.

    Attributes:
        endpoint, replay_endpoint: with the ports taken.
        sent: messages so far.
        error: what has ended the thread; None: it runs, or was closed.

    Raises:
        OptionError: no such address, or one in use; numbers that are none; the extra `events` is not installed.

    A context manager: leaving it closes it.
    """

    def __init__(
        self,
        source: EventSource,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        shard: int = 0,
        rank: int | None = None,
        connect: bool = False,
        kept: int = 10_000,
        kept_bytes: int = 64 << 20,
        announcer: Announcer | None = None,
    ):
        self._zmq = zmq = _needs("zmq")
        _needs("msgspec")
        kept = check_integer("kept", kept, 1, 10**6, error=OptionError)
        self._kept_bytes = check_integer("kept_bytes", kept_bytes, 1, error=OptionError)
        self._source, self._shard, self._topic = source, shard, topic.encode()
        self._rank = check_integer("rank", shard if rank is None else rank, error=OptionError)
        self._announcer = announcer or Announcer()
        source.events(0, shard=shard)  # which says what is wrong with it
        self._kept = collections.deque[tuple[int, Any]](maxlen=kept)  # messages of ZeroMQ's own, whoever they wait for
        self._bytes = self._seen = self.sent = 0
        self.error: Exception | None = None
        self._context = zmq.Context()
        self._replay: Any = None
        try:
            self._out = self._context.socket(zmq.PUB)
            self._out.setsockopt(zmq.SNDHWM, kept)
            self.endpoint = self._open(self._out, endpoint, connect)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.SNDHWM, 2 * (kept + 1))
                self._replay.setsockopt(zmq.MAXMSGSIZE, 1024)  # of a request
                self.replay_endpoint = self._open(self._replay, replay_endpoint, False)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsv4-kv-events", daemon=True)
        self._thread.start()

    def _open(self, socket: Any, endpoint: str, connect: bool) -> str:
        try:
            (socket.connect if connect else socket.bind)(endpoint)
        except (self._zmq.ZMQError, TypeError) as error:
            raise OptionError(f"events cannot be published at {shown(endpoint)}: {error}") from error
        return endpoint if connect else socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Tells what there is to tell by now, and ends. Twice is allowed."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._tell(POLL)
                if self._replay is not None and self._replay.poll(0):
                    self._serve()  # one a turn: whoever asks often holds no events up
            self._tell(None)
        except Exception as error:
            self.error = error
            logging.getLogger(__name__).exception("events are published no longer")
        finally:
            self._context.destroy(linger=200)

    def _tell(self, timeout: float | None) -> None:
        began = time.monotonic()
        events, missed = self._source.events(self._seen, shard=self._shard, timeout=timeout)
        if not events and not missed:
            if timeout is not None and time.monotonic() - began < timeout / 2:
                self._stop.wait(timeout)  # the engine is closed, and waits for nothing
            return
        self._seen += missed + len(events)
        if told := self._announcer.update(events, missed):
            self._send(encode(told, time.time(), self._rank))

    def _send(self, payload: bytes) -> None:
        number, kept = self.sent, self._kept
        if len(kept) == kept.maxlen:
            self._bytes -= len(kept.popleft()[1])
        kept.append((number, self._zmq.Frame(payload, copy=True)))
        self._bytes += len(payload)
        while self._bytes > self._kept_bytes and len(kept) > 1:
            self._bytes -= len(kept.popleft()[1])
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self.sent += 1

    def _serve(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        who, _, first = frames
        for number, payload in self._kept:
            if number >= int.from_bytes(first, "big"):
                for part in (who, b"", self._topic, number.to_bytes(8, "big")):
                    self._replay.send(part, self._zmq.SNDMORE)
                self._replay.send(payload, copy=False)
        self._replay.send_multipart((who, b"", b"", END, b""))


def publish(
    engine: Any, endpoint: str = "tcp://127.0.0.1:5557", *, replay_endpoint: str | None = None, **options: Any
) -> Sequence[EventPublisher]:
    """A publisher for each data rank of an engine, at the endpoint's port plus the rank.

    Args:
        options: as `EventPublisher`.

    Raises: as `EventPublisher`; `EngineError` if the engine has no events. Then none is left open.
    """
    publishers: list[EventPublisher] = []
    try:
        for rank in range(len(engine.managers)):
            replay = None if replay_endpoint is None else _of_rank(replay_endpoint, rank)
            where = _of_rank(endpoint, rank)
            publishers.append(EventPublisher(engine, where, replay_endpoint=replay, shard=rank, **options))
    except BaseException:
        for publisher in publishers:
            publisher.close()
        raise
    return publishers


def _of_rank(endpoint: str, rank: int) -> str:
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return endpoint if rank == 0 else f"{endpoint}_dp{rank}"
    if not port.isdecimal() or int(port) == 0:
        return endpoint
    return f"{base}:{int(port) + rank}"
