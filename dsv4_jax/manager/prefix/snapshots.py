"""Snapshots of a prefix tree's nodes: states that hits can end at, and their copies. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import OutOfBlocksError, PrefixTreeError
from ..allocator import as_count
from .counters import TreeCounters
from .eviction import Move, SnapshotEviction
from .node import TIERS, Node, S, Snapshot, T, Tier
from .nodes import NodeTable
from .queues import CopyLists, EvictionQueues

__all__ = ["Snapshots"]


class Snapshots:
    """See the module."""

    def __init__(self, nodes: NodeTable, queues: EvictionQueues, wanted: CopyLists, counters: TreeCounters):
        self._nodes, self._queues, self._wanted, self._counters = nodes, queues, wanted, counters

    def count(self, tier: Tier) -> int:
        """Copies in this tier."""
        return self._nodes.num_snapshots[tier]

    def attach(self, node: Node, tier: Tier, unit: int = 0) -> Snapshot:
        """Adds a copy of the state at the end of the node's block. Matches can end there from now on.

        Call it once the step that fills the snapshot is dispatched, or the copy has arrived.

        Args:
            unit: its id in the tier's snapshot pool; storage has none.

        Raises:
            PrefixTreeError: the node is gone or being written, or has a snapshot in this tier.
        """
        if self._nodes.check(node).state is S.WRITING:
            raise PrefixTreeError(f"{node} is not published: it cannot have a snapshot")
        if tier not in TIERS or (node.snapshot is not None and node.snapshot.copy(tier)):
            raise PrefixTreeError(f"{node} cannot have another snapshot in the {tier.name.lower()} tier")
        unit = 1 if tier is T.STORAGE else as_count("unit", unit, 1)
        if (snapshot := node.snapshot) is None:
            self._nodes.clock += 1
            snapshot = node.snapshot = Snapshot(last_used=self._nodes.clock)
        self._nodes.set_snapshot(node, tier, unit)
        if tier is not T.STORAGE:
            self._queues.snapshots[tier].push(node)
        if tier is T.HOST:
            self._wanted.snapshot_came_to_host(node)
        return snapshot

    def drop(self, node: Node, tier: Tier) -> int:
        """Takes one tier's copy away; returns its unit, 0 for storage. Without copies the node has no snapshot.

        Raises:
            PrefixTreeError: there is none, or it is pinned.
        """
        snapshot = self._nodes.check(node).snapshot
        if snapshot is None or snapshot.pins or not snapshot.copy(tier):
            raise PrefixTreeError(f"{node} has no {tier.name.lower()} snapshot that can be dropped")
        unit = self._nodes.set_snapshot(node, tier, 0)
        return 0 if tier is T.STORAGE else unit

    def pin(self, node: Node) -> None:
        """Keeps a snapshot while a copy of it is under way. Raises `PrefixTreeError` if there is none."""
        if (snapshot := self._nodes.check(node).snapshot) is None:
            raise PrefixTreeError(f"{node} has no snapshot")
        snapshot.pins += 1

    def unpin(self, node: Node) -> None:
        """Raises `PrefixTreeError` if it is not pinned."""
        if (snapshot := self._nodes.check(node).snapshot) is None or not snapshot.pins:
            raise PrefixTreeError(f"{node} has no pinned snapshot")
        snapshot.pins -= 1
        self._queues.push_snapshot(node)
        self._queues.push(node)

    def evict(self, tier: Tier, count: int, room: Sequence[int] = ()) -> SnapshotEviction:
        """Takes `count` snapshots from the device or the host, least recently used first: all or none.

        From the device a snapshot without a copy on the host goes to a host unit of `room`, as far as
        those reach (the most recently used go first). Without another copy it is lost; its node's block stays.

        Args:
            room: host snapshot ids that copies may be made to.

        Raises:
            OutOfBlocksError: fewer are unpinned; nothing has changed.
        """
        count, queue = as_count("count", count), self._queues.snapshots[tier]
        nodes: list[Node] = []
        while len(nodes) < count and (node := queue.pop()) is not None:
            nodes.append(node)
        if len(nodes) < count:
            for node in nodes:
                queue.push(node)
            raise OutOfBlocksError(count, len(nodes), len(nodes), f"{tier.name.lower()} snapshot")
        self._counters.evicted_snapshots += count
        moves, spots = [], list(reversed(room))
        for node in reversed(nodes):
            if spots and node.snapshot is not None and not node.snapshot.copy(T.HOST):
                moves.append(Move(node, node.snapshot.copy(T.DEVICE), spots[-1]))
                self.attach(node, T.HOST, spots.pop())
        return SnapshotEviction([self.drop(node, tier) for node in nodes], moves, spots[::-1])
