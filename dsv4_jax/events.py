"""What appears in and leaves a cache, for routers that send a prompt where its prefix is. Pure Python.

One log for the prefix tree of the manager and for the radix cache of the pools.
"""

from __future__ import annotations

import collections
import enum
import threading
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from .checks import check_boolean, check_integer
from .errors import PlanError

__all__ = ["BlockEvent", "EventBatch", "EventLog", "Tier", "coalesce"]


class Tier(enum.IntEnum):
    """Higher is nearer to the computation. `NONE` is where removed nodes are."""

    NONE = 0
    STORAGE = 1
    HOST = 2
    DEVICE = 3


class BlockEvent(NamedTuple):
    """A copy of a block came to a tier or left it.

    Attributes:
        sequence: 1, 2, ... without gaps.
        kind: "stored", "removed", or "cleared" (the whole cache was reset; no digest, tier NONE); in a log with
            `details` also "state_stored" and "state_removed", of the state at a block's end: hits end where one is.
        digest: of the block. parent: of the block before it, None for a first block.
        tokens: the block's ids, code "I", of one that is stored, in a log with `details`; None for blocks of
            namespaces, and from a prompt's first multimodal item on: their digests are not of tokens alone.
    """

    sequence: int
    kind: str
    tier: Tier
    digest: bytes | None = None
    parent: bytes | None = None
    tokens: array[int] | None = None


# Readers of all logs, as logs are pickled. Who drives the cache never waits for them: to append to a deque and to copy
# it are one instruction each.
_READERS = threading.RLock()


class EventBatch(NamedTuple):
    """Consecutive events of one kind and tier; those stored form one path that continues `parent`."""

    sequence: int
    kind: str
    tier: Tier
    digests: tuple[bytes, ...]
    parent: bytes | None


class EventLog:
    """The last `capacity` events. A reader keeps the number of the last event it has seen.

    A reader that fell behind further than that must start over: `since` tells how many it missed. Readers may be in any
    threads, beside the one that drives the cache.

    Args:
        capacity: events that are kept.
        details: whether it also tells of states, and which tokens a stored block has.

    Raises:
        PlanError: no such capacity, or `details` is no boolean.
    """

    def __init__(self, capacity: int = 65536, *, details: bool = False):
        self.details = check_boolean("details", details, error=PlanError)
        self._names: dict[bytes, array[int]] = {}  # tokens of blocks that are or will be there, the oldest first
        self._events: collections.deque[BlockEvent] = collections.deque(
            maxlen=check_integer("capacity", capacity, 1, error=PlanError)
        )
        self._before = 0  # the number before the first kept event, if there is none
        self._read = 0  # the latest number that a reader has seen

    @property
    def capacity(self) -> int:
        """How many events are kept."""
        return self._events.maxlen or 0

    @property
    def last(self) -> int:
        """The number of the latest event, 0 before the first."""
        try:
            return self._events[-1].sequence
        except IndexError:
            return self._before

    def emit(self, kind: str, tier: Tier, digest: bytes | None = None, parent: bytes | None = None) -> None:
        tokens = self._names.get(digest) if digest is not None and kind == "stored" else None
        self._events.append(BlockEvent(self.last + 1, kind, tier, digest, parent, tokens))

    def emit_all(self, kind: str, tier: Tier, blocks: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """Emits events of one kind, for (digest, parent) each: all of them or, if interrupted, none."""
        self._events.extend([BlockEvent(n, kind, tier, *block) for n, block in enumerate(blocks, self.last + 1)])

    def name(self, blocks: Iterable[tuple[bytes, array[int]]]) -> None:
        """Says which tokens the blocks of these digests have, before they are stored. The last `capacity` are known."""
        names, most = self._names, self.capacity
        for digest, tokens in blocks:
            names.setdefault(digest, tokens)
        while len(names) > most:
            del names[next(iter(names))]

    def copy_from(self, other: EventLog) -> int:
        """Takes over, under the same numbers, what the other has told since; returns how many events.

        For the thread that drives the cache, between two steps: whoever reads here sees no step that is half done.
        """
        fresh, _ = other.since(self.last)
        self._events.extend(fresh)
        return len(fresh)

    def rewind(self, sequence: int) -> None:
        """Takes back the events after number `sequence`, of an operation that was undone.

        If a reader has seen some of them, no number is given twice: they stay, and "cleared" follows, as what it knows
        is wrong. It then knows less than there is until blocks are stored again.
        """
        sequence = min(sequence, last := self.last)
        if self._read > sequence:
            if not self._events or self._events[-1].kind != "cleared":
                self.emit("cleared", Tier.NONE)
            return
        self._before = sequence if last - sequence >= len(self._events) else self._before
        for _ in range(min(last - sequence, len(self._events))):
            self._events.pop()

    def since(self, sequence: int) -> tuple[list[BlockEvent], int]:
        """The events after number `sequence`, and how many of those are no longer kept."""
        sequence, last = check_integer("sequence", sequence, error=PlanError), self.last
        if last <= sequence:
            return [], 0
        with _READERS:
            self._read = max(self._read, last)  # before it looks: none of these is taken back from here on
        last = min(last, self.last)
        fresh = [event for event in list(self._events) if sequence < event.sequence <= last]
        return fresh, max(last - sequence, 0) - len(fresh)


def coalesce(events: Iterable[BlockEvent]) -> list[EventBatch]:
    """Runs of events as batches: fewer and smaller messages. Expanded again, they are the same events."""
    runs: list[list[BlockEvent]] = []
    for event in events:
        last = runs[-1][-1] if runs else None
        joins = (
            last is not None
            and (last.kind, last.tier) == (event.kind, event.tier)
            and (event.kind == "removed" or (event.kind == "stored" and event.parent == last.digest))
        )
        if joins:
            runs[-1].append(event)
        else:
            runs.append([event])
    return [
        EventBatch(run[0].sequence, run[0].kind, run[0].tier, tuple(e.digest for e in run if e.digest), run[0].parent)
        for run in runs
    ]
