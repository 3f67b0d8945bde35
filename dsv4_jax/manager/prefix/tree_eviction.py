"""The evicting half of the prefix tree: blocks and snapshots that leave a tier. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import OutOfBlocksError, PrefixTreeError
from ..allocator import as_count
from .eviction import Eviction, Freed, Move, SnapshotEviction
from .node import BACKUP_BIT, PERSIST_BIT, SETTLED, Node, S, Snapshot, T, Tier, children_of, subtree_of
from .tree_base import TIERS, TreeBase

__all__ = ["EvictingTree"]


class EvictingTree(TreeBase):
    """Adds eviction, backup candidates and snapshots to the books."""

    def evict(self, tier: Tier, count: int, room: Sequence[int] = ()) -> Eviction:
        """Makes `count` blocks leave a tier, least recently used leaves first: all or none.

        From the device a block goes to its host copy; without one, to a host block of `room` by a
        move (the blocks next to the root are served first); else to its storage copy; else it is
        removed, with what lies below it in lower tiers. From the host it goes to its storage copy,
        else it is removed likewise; the host copy of a block that is on the device counts too, and
        only the copy goes. From storage it is removed.

        Args:
            room: host block ids that moves may use.

        Raises:
            OutOfBlocksError: fewer can leave (others are referenced or on the move); nothing has changed.
        """
        victims = self._victims(tier, as_count("count", count), len(room))
        result = Eviction()
        moving: set[Node] = set()
        if tier is T.DEVICE and room:
            moving = set([node for node in victims if not node.host][-len(room) :])
        spots = list(reversed(room))
        for node in victims:
            if tier is T.DEVICE and node in moving:
                host = spots.pop()
                self._begin(node, S.OFFLOADING, host=host)
                result.moves.append(Move(node, node.block, host))
            else:
                self._leave(node, tier, result)
        self.counters.evicted[tier] += len(victims)
        result.unused = spots[::-1]
        return result

    def evict_colder(self, tier: Tier, node: Node) -> Freed | None:
        """As `evict`, of the next one, if it would leave before this node did; else None, and nothing has changed."""
        try:
            (victim,) = self._victims(tier, 1, 0)
        except OutOfBlocksError:
            return None
        if not self._order(victim) < self._order(node):
            self._queues[tier].push(victim)
            return None
        result = Eviction()
        self._leave(victim, tier, result)
        self.counters.evicted[tier] += 1
        return result

    def device_leaf(self) -> Node:
        """A node on the device with no other below it there. Raises `PrefixTreeError` if there is none at rest."""
        for node in self._nodes.values():
            if node.state is S.DEVICE and not node.refs and not node.on_device:
                return node
        raise PrefixTreeError("no block at rest on the device")

    def retract(self, node: Node) -> Freed:
        """Removes a published node whose bytes were never written, and all below it, in whatever tier.

        Moves between the lower tiers are forgotten: their ends are for nobody.

        Raises:
            PrefixTreeError: something there is referenced, or a snapshot pinned; nothing has changed.
        """
        below = subtree_of(self._check(node))
        for n in below:
            if n.refs or (n.snapshot and n.snapshot.pins):
                raise PrefixTreeError(f"{n} is in use: it cannot be retracted with {node}")
        freed = Freed()
        for n in reversed(below):
            if n.state is S.PERSISTING:
                self.abort(n)
            self._drop(n, freed)
        return freed

    def _leave(self, node: Node, tier: Tier, freed: Freed) -> None:
        """One victim goes down to a copy, or away."""
        if tier is T.DEVICE and (node.host or (node.stored and not node.on_host)):
            self._set_state(node, S.HOST if node.host else S.STORAGE)
            freed.blocks.append(node.block)
            node.block = 0
        elif tier is T.HOST and (node.state is S.DEVICE or node.stored):
            if node.state is S.HOST:
                self._set_state(node, S.STORAGE)
            freed.host_blocks.append(self._set_host(node, 0))
        else:
            for n in reversed(subtree_of(node)):
                self._drop(n, freed)
            return
        self._emit("removed", tier, node)

    def _victims(self, tier: Tier, count: int, room: int) -> list[Node]:
        """The next `count` nodes to leave. Counters are as if those chosen had left, until all are found."""
        queue = self._queues[tier]
        chosen: list[Node] = []
        passed: list[Node] = []
        moving = self._counts[S.FETCHING] + self._counts[S.PERSISTING] > 0
        busy: set[Node] = set()  # with a move under way below a child that goes down to its copy
        while len(chosen) < count and (node := queue.pop()) is not None:
            parent, goes_down = node.parent, tier is T.DEVICE and node.host > 0
            if room < count and not goes_down and (node in busy or _held_from_below(node, tier)):
                passed.append(node)
                continue
            if moving and goes_down and parent is not None and (node in busy or _has_moves_below(node, tier)):
                busy.add(parent)
            chosen.append(node)
            if parent is not None and node.state.tier is tier:
                _leaves(parent, tier, 1)
                if parent.state.tier is tier:
                    queue.push(parent)
        for node in chosen:
            if node.parent is not None and node.state.tier is tier:
                _leaves(node.parent, tier, -1)
        for node in passed:
            queue.push(node)
        if len(chosen) < count:
            for node in chosen:
                queue.push(node)
            raise OutOfBlocksError(count, len(chosen), self._idle[tier], f"{tier.name.lower()} cache")
        return chosen

    def pop_backups(self, limit: int) -> list[Node]:
        """Up to `limit` blocks that the write policy wants on the host, parents first. What is left stays listed."""
        limit = as_count("limit", limit)
        chosen: list[Node] = []
        while self._backups and len(chosen) < limit:
            node = self._backups.popleft()
            node.queued &= ~BACKUP_BIT
            if node.state is S.DEVICE and not node.host:
                chosen.append(node)
        return chosen

    def pop_persists(self, limit: int) -> list[Node]:
        """Up to `limit` blocks on the host that storage has no copy of, the longest there first."""
        limit = as_count("limit", limit)
        chosen: list[Node] = []
        while self._persists and len(chosen) < limit:
            node = self._persists.popleft()
            node.queued &= ~PERSIST_BIT
            if node.state is S.HOST and not node.stored:
                chosen.append(node)
        return chosen

    def pop_snapshot_persists(self, limit: int) -> list[Node]:
        """Up to `limit` nodes with a snapshot on the host that storage has no copy of, the longest there first."""
        limit = as_count("limit", limit)
        chosen: list[Node] = []
        while self._snapshot_persists and len(chosen) < limit:
            node = self._snapshot_persists.popleft()
            if self.is_current(node) and node.snapshot is not None and node.snapshot.host and not node.snapshot.stored:
                chosen.append(node)
        return chosen

    # Snapshots

    def attach_snapshot(self, node: Node, tier: Tier, unit: int = 0) -> Snapshot:
        """Adds a copy of the state at the end of the node's block. Matches can end there from now on.

        Call it once the step that fills the snapshot is dispatched, or the copy has arrived.

        Args:
            unit: its id in the tier's snapshot pool; storage has none.

        Raises:
            PrefixTreeError: the node is gone or being written, or has a snapshot in this tier.
        """
        if self._check(node).state is S.WRITING:
            raise PrefixTreeError(f"{node} is not published: it cannot have a snapshot")
        if tier not in TIERS or (node.snapshot is not None and node.snapshot.copy(tier)):
            raise PrefixTreeError(f"{node} cannot have another snapshot in the {tier.name.lower()} tier")
        unit = 1 if tier is T.STORAGE else as_count("unit", unit, 1)
        if (snapshot := node.snapshot) is None:
            self._clock += 1
            snapshot = node.snapshot = Snapshot(last_used=self._clock)
        self._set_snapshot(node, tier, unit)
        if tier is not T.STORAGE:
            self._snapshot_queues[tier].push(node)
        if tier is T.HOST and self.persists and not snapshot.stored:
            self._snapshot_persists.append(node)
        return snapshot

    def drop_snapshot(self, node: Node, tier: Tier) -> int:
        """Takes one tier's copy away; returns its unit, 0 for storage. Without copies the node has no snapshot.

        Raises:
            PrefixTreeError: there is none, or it is pinned.
        """
        snapshot = self._check(node).snapshot
        if snapshot is None or snapshot.pins or not snapshot.copy(tier):
            raise PrefixTreeError(f"{node} has no {tier.name.lower()} snapshot that can be dropped")
        unit = self._set_snapshot(node, tier, 0)
        return 0 if tier is T.STORAGE else unit

    def pin_snapshot(self, node: Node) -> None:
        """Keeps a snapshot while a copy of it is under way."""
        if (snapshot := self._check(node).snapshot) is None:
            raise PrefixTreeError(f"{node} has no snapshot")
        snapshot.pins += 1

    def unpin_snapshot(self, node: Node) -> None:
        """Raises `PrefixTreeError` if it is not pinned."""
        if (snapshot := self._check(node).snapshot) is None or not snapshot.pins:
            raise PrefixTreeError(f"{node} has no pinned snapshot")
        snapshot.pins -= 1
        for queue in self._snapshot_queues.values():
            queue.push(node)
        self._enqueue(node)

    def evict_snapshots(self, tier: Tier, count: int, room: Sequence[int] = ()) -> SnapshotEviction:
        """Takes `count` snapshots from the device or the host, least recently used first: all or none.

        From the device a snapshot without a copy on the host goes to a host unit of `room`, as far as
        those reach (the most recently used go first). Without another copy it is lost; its node's block stays.

        Args:
            room: host snapshot ids that copies may be made to.

        Raises:
            OutOfBlocksError: fewer are unpinned; nothing has changed.
        """
        count, queue = as_count("count", count), self._snapshot_queues[tier]
        nodes: list[Node] = []
        while len(nodes) < count and (node := queue.pop()) is not None:
            nodes.append(node)
        if len(nodes) < count:
            for node in nodes:
                queue.push(node)
            raise OutOfBlocksError(count, len(nodes), len(nodes), f"{tier.name.lower()} snapshot")
        self.counters.evicted_snapshots += count
        moves, spots = [], list(reversed(room))
        for node in reversed(nodes):
            if spots and node.snapshot is not None and not node.snapshot.copy(T.HOST):
                moves.append((node.snapshot.copy(T.DEVICE), spots[-1]))
                self.attach_snapshot(node, T.HOST, spots.pop())
        return SnapshotEviction([self.drop_snapshot(node, tier) for node in nodes], moves, spots[::-1])


def _leaves(parent: Node, tier: Tier, count: int) -> None:
    """`count` children leave a tier in thought (negative: come back)."""
    if tier is T.DEVICE:
        parent.on_device -= count
    elif tier is T.HOST:
        parent.on_host -= count
    else:
        parent.children -= count


def _held_from_below(node: Node, tier: Tier) -> bool:
    """Whether the node cannot leave: a child is about to come up to this tier; or it would have to be removed, and
    it or a lower-tier node below it is in use."""
    if node.state.tier is not tier:
        return False
    if tier is T.HOST and node.stored:
        return any(child.state is S.FETCHING for child in children_of(node))
    if node.snapshot is not None and node.snapshot.pins:
        return True
    if not node.children:
        return False
    return _has_moves_below(node, tier)


def _has_moves_below(node: Node, tier: Tier) -> bool:
    below = [n for child in children_of(node) if child.state.tier < tier for n in subtree_of(child)]
    return any(n.state not in SETTLED or (n.snapshot is not None and n.snapshot.pins) for n in below)
