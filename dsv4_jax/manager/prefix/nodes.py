"""The nodes of a prefix tree: where each block is, and the counts that follow from it. Pure Python.

Every change of a node's state, units or references is made here: the transition table holds, no parent comes into a
lower tier than its children, and counts, queues and events follow.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import IntegrityError
from ...events import EventLog
from .eviction import Freed
from .node import (
    SETTLED,
    TIERS,
    TRANSITIONS,
    Node,
    NodeState,
    Owner,
    S,
    T,
    Tier,
    Unit,
    copies,
    count_child,
    link,
    unlink,
)
from .owners import Owners, is_over
from .queues import CopyLists, EvictionQueues

__all__ = ["NodeTable"]


class NodeTable:
    """The nodes of a tree: changes where their blocks are, and keeps the counts.

    Attributes:
        published: nodes that can be matched, by digest.
        writing: nodes reserved for blocks that are about to be written, in order.
        counts: nodes in each state.
        idle: nodes at rest and without references in each tier.
        num_host: nodes with a host unit.
        num_snapshots: snapshot copies in each tier.
        pins: of all snapshots.
        epoch: changes with every `clear`; nodes of an earlier one are stale.
        clock: moves with every reference taken or given back, and every publication.
        level: the most that a unit was worth that was lost so far (see worth.py).
        last_tier: whose units are lost when they are evicted, but for storage: the host if there is one, else the
            device.
    """

    def __init__(
        self,
        queues: EvictionQueues,
        wanted: CopyLists,
        events: EventLog | None,
        *,
        last_tier: Tier = T.DEVICE,
        ranks: int = 1,
        owners: Owners | None = None,
        snapshot_blocks: int = 1,
    ):
        self._owners, self.snapshot_blocks = owners, snapshot_blocks
        self._ranks = ranks
        self._queues, self._wanted, self._events, self.last_tier = queues, wanted, events, last_tier
        self._number = self.clock = 0
        self.clear()

    def clear(self) -> None:
        """Removes all nodes from the table."""
        self.epoch = object()
        self.level = 0
        self.published: dict[bytes, Node] = {}
        self.writing: dict[Node, None] = {}
        self.counts = dict.fromkeys(NodeState, 0)
        self.idle = dict.fromkeys(TIERS, 0)
        self._idle_on = [0] * self._ranks
        self.num_host = 0
        self.num_snapshots = dict.fromkeys(TIERS, 0)
        self.pins = 0
        self._queues.clear()
        self._wanted.clear()
        if self._owners is not None:
            self._owners.clear()

    def is_current(self, node: Node) -> bool:
        """Whether the node is still in the tree."""
        return node.epoch is self.epoch and node.state is not S.REMOVED

    def check(self, node: Node) -> Node:
        """Returns the node itself. Raises `IntegrityError` if it is no longer, or never was, of this tree."""
        if node.epoch is not self.epoch or node.state is S.REMOVED:
            raise IntegrityError(f"{node} is not in this tree: it was removed, or the tree was reset")
        return node

    def is_any_in_use(self) -> bool:
        """Whether a snapshot is pinned, or a block on its way between tiers (not to a second copy on the host)."""
        return self.pins > 0 or any(self.counts[state] for state in (S.OFFLOADING, S.LOADING, S.PERSISTING, S.FETCHING))

    def accessed(self, parent: Node | None) -> int:
        """When a node below this parent counts as accessed: never after it, so that the deepest always leaves first."""
        return self.clock if parent is None else parent.last_access

    # Changes

    def new(self, digest: bytes, parent: Node | None, state: NodeState, owner: Owner | None = None) -> Node:
        """A node that is in no dictionary yet. `owner`: of a node without a parent."""
        self._number += 1
        node = Node(digest, parent, self._number, self.epoch, state)
        node.level = self.level if parent is None else parent.level
        self.counts[state] += 1
        if owner is not None and parent is None:
            node.owner = owner
            owner.roots[node] = None
        if state in SETTLED:
            self._count_idle(node, state.tier, 1)
        link(node)
        self._count_owned(node, state.tier, 1, T.DEVICE)
        return node

    def _count_owned(self, node: Node, tier: Tier, units: int, only: Tier) -> None:
        """The node has so many units more in a tier, if it is `only`."""
        if node.owner is not None and tier is only and self._owners is not None:
            self._owners.count(node, tier, units)

    @property
    def idle_on(self) -> list[int]:
        """The idle ones of the device, by the rank that holds their blocks: that of their depth, modulo the ranks."""
        return [self.idle[T.DEVICE]] if self._ranks == 1 else list(self._idle_on)

    def _count_idle(self, node: Node, tier: Tier, by: int) -> None:
        self.idle[tier] += by
        if tier is T.DEVICE and self._ranks > 1:
            self._idle_on[node.depth % self._ranks] += by

    def set_state(self, node: Node, state: NodeState) -> None:
        """Sets a state, which no other place does. Raises `IntegrityError`, then nothing has changed."""
        old, parent = node.state, node.parent
        if state not in TRANSITIONS[old]:
            raise IntegrityError(f"{node} cannot become {state.value}")
        before, after = old.tier, state.tier
        if after < before:
            above = node.children if not after else node.on_device + (node.on_host if after < T.HOST else 0)
            if above or node.refs:
                raise IntegrityError(f"{node} cannot become {state.value}: {above} children above it, {node.refs} refs")
        elif (
            parent is not None
            and (after > before or old is S.WRITING)
            and (parent.state.tier < after or parent.state is S.WRITING)
        ):
            raise IntegrityError(f"{node} cannot become {state.value} below {parent}")
        if parent is not None and before is not after:
            count_child(parent, before, -1)
            count_child(parent, after, 1)
        if not node.refs:
            if old in SETTLED:
                self._count_idle(node, before, -1)
            if state in SETTLED:
                self._count_idle(node, after, 1)
        self.counts[old] -= 1
        self.counts[state] += 1
        node.state = state
        if before is not after:
            self._count_owned(node, before, -1, T.DEVICE)
            self._count_owned(node, after, 1, T.DEVICE)
        if state is S.REMOVED:
            return
        if state is S.HOST:
            self._wanted.came_to_host(node)
        if state is S.DEVICE and node.host:
            self._queues.demote(node)  # what is on the host is a copy now
        else:
            self._queues.push(node)
        if parent is not None and after < before:
            self._queues.push(parent)

    def add_references(self, nodes: Iterable[Node], access: int, level: int) -> None:
        """One more reference to each, accessed then, at that level of worth."""
        idle, several = self.idle, self._ranks > 1  # a call for each node would be a third of the time
        for node in nodes:
            if not node.refs and node.state in SETTLED:
                if several:
                    self._count_idle(node, node.state.tier, -1)
                else:
                    idle[node.state.tier] -= 1
            node.refs += 1
            node.last_access = access
            node.level = level

    def drop_references(self, nodes: Iterable[Node], access: int) -> None:
        """Drops a reference to each, children first."""
        idle, several = self.idle, self._ranks > 1
        for node in nodes:
            node.refs -= 1
            node.last_access = access
            if not node.refs:
                if node.state in SETTLED:
                    if several:
                        self._count_idle(node, node.state.tier, 1)
                    else:
                        idle[node.state.tier] += 1
                if node.children:
                    self._queues.push(node)
                else:
                    self._queues.end_of_path(node)

    def set_host(self, node: Node, host: int) -> int:
        """Gives the node a host unit, or takes it away (0). Returns the one it had."""
        old, node.host = node.host, host
        self.num_host += bool(host) - bool(old)
        self._count_owned(node, T.HOST, bool(host) - bool(old), T.HOST)
        return old

    def set_snapshot(self, node: Node, tier: Tier, unit: Unit) -> Unit:
        """Sets where one tier's copy of the node's snapshot is (see `Snapshot.copy`). Returns where it was."""
        snapshot = node.snapshot
        if snapshot is None:
            return 0
        old = snapshot.set_copy(tier, unit)
        self.num_snapshots[tier] += bool(unit) - bool(old)
        self._count_owned(node, tier, self.snapshot_blocks * (bool(unit) - bool(old)), tier)
        if self._events is not None and self._events.details and bool(unit) != bool(old):
            self.emit("state_stored" if unit else "state_removed", tier, node)
        if snapshot.tier is T.NONE:
            node.snapshot = None
            self._queues.end_of_path(node)
        return old

    def lose(self, node: Node, tier: Tier, worth: int) -> None:
        """A unit of this worth is lost from the last tier. One of an owner that is over says nothing of the others."""
        if worth > self.level and not is_over(node, tier):
            self.level = worth

    def drop(self, node: Node, freed: Freed) -> None:
        """Removes a node without children, its units into `freed`. Raises `IntegrityError` if this is not allowed."""
        old, snapshot = node.state, node.snapshot
        held = copies(node) if self._events is not None else ()
        if old is S.WRITING:
            node.refs = 0  # its writer's
        self.set_state(node, S.REMOVED)
        unlink(node)
        if (parent := node.parent) is not None:
            self._queues.end_of_path(parent)
        if old is S.WRITING:
            del self.writing[node]
        else:
            del self.published[node.digest]
        for tier in held:
            self.emit("removed", tier, node)
        if node.block:
            freed.blocks.append(node.block)
        if node.host:
            freed.pages.append(self.set_host(node, 0))
        node.block, node.stored = 0, False
        if snapshot is not None:
            freed.pages.extend(snapshot.host)
            if snapshot.device:
                freed.snapshots.append(snapshot.device)
            for tier in TIERS:
                self.set_snapshot(node, tier, 0)
        if node.owner is not None:
            node.owner.roots.pop(node, None)

    def emit(self, kind: str, tier: Tier, node: Node) -> None:
        """Tells the event log of a copy that came ("stored") or went ("removed")."""
        if self._events is not None:
            self._events.emit(kind, tier, node.digest, node.parent.digest if node.parent else None)
