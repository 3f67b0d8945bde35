"""What appears in and leaves the cache, for routers that send a prompt where its prefix is. Pure Python."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ..allocator import as_count
from .node import Tier

__all__ = ["BlockEvent", "EventBatch", "EventLog", "coalesce"]


class BlockEvent(NamedTuple):
    """A copy of a block came to a tier or left it.

    Attributes:
        sequence: 1, 2, ... without gaps.
        kind: "stored", "removed", or "cleared" (the whole cache was reset; no digest, tier NONE).
        digest: of the block. parent: of the block before it, None for a first block.
    """

    sequence: int
    kind: str
    tier: Tier
    digest: bytes | None = None
    parent: bytes | None = None


class EventBatch(NamedTuple):
    """Consecutive events of one kind and tier; those stored form one path that continues `parent`."""

    sequence: int
    kind: str
    tier: Tier
    digests: tuple[bytes, ...]
    parent: bytes | None


class EventLog:
    """The last `capacity` events. A reader keeps the number of the last event it has seen.

    A reader that fell behind further than that must start over: `since` tells how many it missed.
    """

    def __init__(self, capacity: int = 65536):
        self._events: collections.deque[BlockEvent] = collections.deque(maxlen=as_count("capacity", capacity, 1))
        self.last = 0

    def emit(self, kind: str, tier: Tier, digest: bytes | None = None, parent: bytes | None = None) -> None:
        self.last += 1
        self._events.append(BlockEvent(self.last, kind, tier, digest, parent))

    def since(self, sequence: int) -> tuple[list[BlockEvent], int]:
        """The events after number `sequence`, and how many of those are no longer kept."""
        fresh = self.last - as_count("sequence", sequence)
        kept = min(max(fresh, 0), len(self._events))
        return list(itertools.islice(reversed(self._events), kept))[::-1], max(fresh, 0) - kept


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
