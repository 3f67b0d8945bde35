"""Snapshots of a prefix tree's nodes: states that hits can end at, and their copies. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from ...checks import check_integer, shown
from ...errors import IntegrityError, OutOfBlocksError, PlanError
from .eviction import SnapshotEviction, StateMove, TreeCounters
from .node import TIERS, Node, Pages, S, Snapshot, T, Tier, Unit
from .nodes import NodeTable
from .queues import CopyLists, EvictionQueues
from .worth import HitRates, Kind, snapshot_worth

__all__ = ["Snapshots"]


class Snapshots:
    """The snapshots of a tree: attaches, pins, moves and drops them."""

    def __init__(
        self, nodes: NodeTable, queues: EvictionQueues, wanted: CopyLists, counters: TreeCounters, blocks: int = 1
    ):
        self._nodes, self._queues, self._wanted, self._counters = nodes, queues, wanted, counters
        self.rates = HitRates(blocks)

    def count(self, tier: Tier) -> int:
        """How many snapshots have a copy in this tier."""
        return self._nodes.num_snapshots[tier]

    def attach(self, node: Node, tier: Tier, unit: Unit = 0, *, kind: int = Kind.UNKNOWN, after: int = 0) -> Snapshot:
        """Adds a copy of the state at the end of the node's block. Matches can end there from now on.

        Call it once the step that fills the snapshot is dispatched, or the copy has arrived.

        Args:
            unit: its slot, or its pages on the host; storage has none.
            kind: of place that it was taken at (`worth.kind_of`); a node that has children is a junction.
            after: blocks that the request found cached. Snapshots up to there are passed by this one.

        Raises:
            IntegrityError: the node is gone or being written, or has a snapshot in this tier.
            PlanError: no slot, or no pages.
        """
        if self._nodes.check(node).state is S.WRITING:
            raise IntegrityError(f"{node} is not published: it cannot have a snapshot")
        if tier not in TIERS or (node.snapshot is not None and node.snapshot.copy(tier)):
            raise IntegrityError(f"{node} cannot have another snapshot in the {tier.name.lower()} tier")
        unit = _checked(tier, unit)
        if (snapshot := node.snapshot) is None:
            self._nodes.clock += 1
            snapshot = node.snapshot = self._new(node, Kind.JUNCTION if node.children else kind)
            self._pass(snapshot.next_above, after)
        elif snapshot.tier < T.HOST:  # it comes back
            self._nodes.clock += 1
            snapshot.last_used, snapshot.level = self._nodes.clock, self._nodes.level
        self._nodes.set_snapshot(node, tier, unit)
        if tier is not T.STORAGE:
            self._queues.snapshots[tier].demote(node)  # which may still be listed with the snapshot that it had before
        if tier is T.HOST:
            self._wanted.snapshot_came_to_host(node)
        return snapshot

    def _new(self, node: Node, kind: int) -> Snapshot:
        above = node.parent
        while above is not None and above.snapshot is None:
            above = above.parent
        snapshot = Snapshot(
            node, above.snapshot if above is not None else None, last_used=self._nodes.clock, level=self._nodes.level
        )
        self._be(snapshot, kind)
        return snapshot

    def _be(self, snapshot: Snapshot, kind: int) -> None:
        snapshot.kind, snapshot.rate = kind, self.rates.taken(kind)

    def _pass(self, snapshot: Snapshot | None, after: int) -> None:
        """A request has left one below this one, and found the first `after` blocks cached."""
        while snapshot is not None and snapshot.kind != Kind.PASSED:
            node = snapshot.node
            if node.depth < after and node.children <= 1:
                self._be(snapshot, Kind.PASSED)
                self._queues.demote_snapshot(node)
            snapshot = snapshot.next_above

    def hit(self, node: Node) -> None:
        """A request starts from the node's snapshot, if it has one."""
        if (snapshot := node.snapshot) is not None:
            snapshot.hits += 1
            snapshot.last_used, snapshot.level = self._nodes.clock, self._nodes.level
            before, snapshot.rate = snapshot.rate, self.rates.hit(snapshot.kind)
            if snapshot.rate < before:
                self._queues.demote_snapshot(node)

    def drop(self, node: Node, tier: Tier, *, pinned: bool = False) -> list[int]:
        """Its owner takes one tier's copy away; returns its slot, its pages, or nothing (storage).

        Without copies there is no snapshot.

        Args:
            pinned: by its owner, who unpins it with this.

        Raises:
            IntegrityError: there is none, or somebody else has pinned it.
        """
        snapshot = self._nodes.check(node).snapshot
        if pinned and snapshot is not None and snapshot.pins == 1 and snapshot.copy(tier):
            self._pin(snapshot, -1)
        unit = self._drop(node, tier)
        if pinned and node.snapshot is not None:
            self._queues.push_snapshot(node)
        if snapshot is not None and not snapshot.hits and snapshot.tier is T.NONE:
            self.rates.given_up(snapshot.kind)
        return unit

    def _drop(self, node: Node, tier: Tier) -> list[int]:
        snapshot = node.snapshot
        if snapshot is None or snapshot.pins or not snapshot.copy(tier):
            raise IntegrityError(f"{node} has no {tier.name.lower()} snapshot that can be dropped")
        unit = self._nodes.set_snapshot(node, tier, 0)
        if isinstance(unit, tuple):
            return list(unit)
        return [] if tier is T.STORAGE else [unit]

    def pin(self, node: Node) -> None:
        """Keeps a snapshot while a copy of it is under way. Raises `IntegrityError` if there is none."""
        if (snapshot := self._nodes.check(node).snapshot) is None:
            raise IntegrityError(f"{node} has no snapshot")
        self._pin(snapshot, 1)

    def _pin(self, snapshot: Snapshot, by: int) -> None:
        snapshot.pins += by
        self._nodes.pins += by

    def unpin(self, node: Node) -> None:
        """Raises `IntegrityError` if it is not pinned."""
        if (snapshot := self._nodes.check(node).snapshot) is None or not snapshot.pins:
            raise IntegrityError(f"{node} has no pinned snapshot")
        self._pin(snapshot, -1)
        self._queues.push_snapshot(node)
        self._queues.push(node)

    def evict(self, tier: Tier, count: int, room: Sequence[Pages] = ()) -> SnapshotEviction:
        """Takes `count` snapshots from the device or the host, in the order of its queue: all or none.

        From the device a snapshot without a copy on the host goes to pages of `room`, as far as
        those reach (the last of that order first). Without another copy it is lost; its node's block stays.

        Args:
            room: where on the host copies may be made to.

        Raises:
            OutOfBlocksError: fewer are unpinned; nothing has changed.
        """
        count, queue = check_integer("count", count, error=PlanError), self._queues.snapshots[tier]
        nodes: list[Node] = []
        while len(nodes) < count and (node := queue.pop()) is not None:
            nodes.append(node)
        if len(nodes) < count:
            for node in nodes:
                queue.push(node)
            raise OutOfBlocksError(count, len(nodes), len(nodes), f"{tier.name.lower()} snapshot")
        self._counters.evicted_snapshots += count
        moves, spots = [], list(reversed(room))
        for node in nodes:
            if node.snapshot is not None and tier is self._nodes.last_tier:
                self._nodes.lose(node, tier, snapshot_worth(node.snapshot))
            if node.owner is not None and node.owner.over.get(tier):
                node.owner.evicted[tier] += 1
        for node in reversed(nodes):
            if spots and node.snapshot is not None and not node.snapshot.host:
                moves.append(StateMove(node, node.snapshot.device, spots[-1]))
                self.attach(node, T.HOST, spots.pop())
        units = [unit for node in nodes for unit in self._drop(node, tier)]
        return SnapshotEviction(units if tier is T.DEVICE else [], units if tier is T.HOST else [], moves, spots[::-1])


def _checked(tier: Tier, unit: Unit) -> Unit:
    if tier is T.STORAGE:
        return 1
    if tier is T.DEVICE:
        return check_integer("a slot", unit, 1, error=PlanError)
    if not isinstance(unit, tuple) or not unit:
        raise PlanError(f"the pages of a state must be a tuple of ids, got {shown(unit)}")
    return tuple(check_integer("a page", page, 1, error=PlanError) for page in unit)
