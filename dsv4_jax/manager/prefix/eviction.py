"""What leaves a tier, and what its leaving frees. Pure Python."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .node import Node

__all__ = ["Eviction", "Freed", "Move", "SnapshotEviction"]


class Move(NamedTuple):
    """A block, or the state at its end, to be copied from one tier's unit to another's."""

    node: Node
    source: int
    destination: int


@dataclasses.dataclass(slots=True)
class Freed:
    """Units that the tree no longer holds: the caller gives them back to their pools.

    Attributes:
        blocks, host_blocks: device and host block ids.
        snapshots, host_snapshots: snapshot ids.
        stored: digests whose storage copies the tree has forgotten.
    """

    blocks: list[int] = dataclasses.field(default_factory=list)
    host_blocks: list[int] = dataclasses.field(default_factory=list)
    snapshots: list[int] = dataclasses.field(default_factory=list)
    host_snapshots: list[int] = dataclasses.field(default_factory=list)
    stored: list[bytes] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Eviction(Freed):
    """What an eviction frees now, and by moves still to be made.

    Attributes:
        moves: device to host copies; each node's device block is free when `complete(node)` says so.
        unused: host ids of those offered that were not needed.
    """

    moves: list[Move] = dataclasses.field(default_factory=list)
    unused: list[int] = dataclasses.field(default_factory=list)


class SnapshotEviction(NamedTuple):
    """Snapshots that left a tier.

    Attributes:
        units: theirs, now the caller's.
        moves: copies to make before a device unit is used again.
        unused: host ids of those offered that were not needed.
    """

    units: list[int]
    moves: list[Move]
    unused: list[int]
