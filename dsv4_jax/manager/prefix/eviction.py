"""What leaves a tier, what its leaving frees, and how often that was. Pure Python."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .node import TIERS, Node, Pages, Tier

__all__ = ["Eviction", "Freed", "Move", "SnapshotEviction", "StateMove", "TreeCounters"]


class Move(NamedTuple):
    """A block to be copied from the device to a page of the host."""

    node: Node
    source: int
    destination: int


class StateMove(NamedTuple):
    """The state at the end of a node's block, to be copied from a slot to pages of the host."""

    node: Node
    source: int
    destination: Pages


@dataclasses.dataclass(slots=True)
class Freed:
    """Units that the tree no longer holds: the caller gives them back to their pools.

    Attributes:
        blocks, snapshots: device blocks and slots.
        pages: of the host.
    """

    blocks: list[int] = dataclasses.field(default_factory=list)
    snapshots: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)

    def add(self, other: Freed) -> None:
        """Adds the units of another."""
        self.blocks += other.blocks
        self.snapshots += other.snapshots
        self.pages += other.pages


@dataclasses.dataclass(slots=True)
class Eviction(Freed):
    """What an eviction frees now, and by moves still to be made.

    Attributes:
        moves: device to host copies; each node's device block is free when `complete(node)` says so.
        unused: pages of those offered that were not needed.
    """

    moves: list[Move] = dataclasses.field(default_factory=list)
    unused: list[int] = dataclasses.field(default_factory=list)


class SnapshotEviction(NamedTuple):
    """The snapshots that left a tier in one call.

    Attributes:
        slots, pages: theirs, now the caller's.
        moves: copies to make before a slot is used again.
        unused: of the places on the host that were offered, those not needed.
    """

    slots: list[int]
    pages: list[int]
    moves: list[StateMove]
    unused: list[Pages]


def _by_tier() -> dict[Tier, int]:
    return dict.fromkeys(TIERS, 0)


@dataclasses.dataclass(slots=True)
class TreeCounters:
    """What has happened to a prefix tree. Tokens of a hit count in the tier where their block was found."""

    lookups: int = 0
    lookup_tokens: int = 0
    hits: int = 0
    hit_tokens: dict[Tier, int] = dataclasses.field(default_factory=_by_tier)
    evicted: dict[Tier, int] = dataclasses.field(default_factory=_by_tier)
    evicted_snapshots: int = 0
    duplicates: int = 0
    adoptions: int = 0
