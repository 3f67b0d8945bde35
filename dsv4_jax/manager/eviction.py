"""What leaves a tier next, and what its leaving frees. Pure Python."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

from .node import Node, S

__all__ = ["Eviction", "EvictionQueue", "Freed", "Move", "SnapshotEviction"]


class Move(NamedTuple):
    """A block to be copied from one tier's unit to another's."""

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
        moves: (device unit, host unit) copies to make before a device unit is used again.
        unused: host ids of those offered that were not needed.
    """

    units: list[int]
    moves: list[tuple[int, int]]
    unused: list[int]


class EvictionQueue:
    """Nodes by key, smallest first: a heap with at most one entry per node, corrected when it comes up.

    Keys may only grow and eligibility may come and go without telling the queue: a touch costs
    nothing here. Popping is O(log n), plus O(log n) for every entry that was touched since.

    Args:
        bit: of `Node.queued`, this queue's own.
        eligible: whether a node may leave. Whenever it becomes true, the node must be pushed.
        key: of a node that is eligible; larger leaves later. It must not shrink while the node lives.
    """

    def __init__(self, bit: int, eligible: Callable[[Node], bool], key: Callable[[Node], Any]):
        self._bit, self._eligible, self._key = bit, eligible, key
        self._heap: list[tuple[Any, int, Node]] = []
        self._bound = 1024

    def push(self, node: Node) -> None:
        """Makes sure the node is in the queue if it is eligible."""
        if node.queued & self._bit or not self._eligible(node):
            return
        node.queued |= self._bit
        heapq.heappush(self._heap, (self._key(node), node.number, node))
        if len(self._heap) > self._bound:
            self._forget_removed()

    def pop(self) -> Node | None:
        """Takes out the eligible node with the smallest key."""
        heap = self._heap
        while heap:
            key, number, node = heap[0]
            if not self._eligible(node):
                heapq.heappop(heap)
                node.queued &= ~self._bit
            elif (now := self._key(node)) != key:
                heapq.heapreplace(heap, (now, number, node))
            else:
                heapq.heappop(heap)
                node.queued &= ~self._bit
                return node
        return None

    def holds(self, node: Node) -> bool:
        return bool(node.queued & self._bit)

    def _forget_removed(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].state is not S.REMOVED]
        heapq.heapify(self._heap)
        self._bound = 2 * len(self._heap) + 1024
