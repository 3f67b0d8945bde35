"""The books under the prefix tree: nodes, their states, and moves between tiers. Pure Python."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from ...errors import PrefixTreeError, TransitionError
from ...eviction_queue import EvictionQueue
from ..allocator import as_count
from .events import EventLog
from .eviction import Freed
from .node import (
    ABORTS,
    BACKUP_BIT,
    COMPLETES,
    PERSIST_BIT,
    SETTLED,
    TRANSITIONS,
    Node,
    NodeState,
    S,
    T,
    Tier,
    copies,
    count_child,
    link,
    subtree_of,
    unlink,
)

__all__ = ["TIERS", "TreeBase", "TreeCounters", "least_recently_used"]

TIERS = (T.DEVICE, T.HOST, T.STORAGE)


def least_recently_used(node: Node) -> Any:
    """Eviction order: the oldest access first; of one path, whose nodes are accessed together, the deepest."""
    return (node.last_access << 32) - node.depth  # one integer: cheaper in a heap than a pair


@dataclasses.dataclass(slots=True)
class TreeCounters:
    """Totals since construction. Tokens of a hit count in the tier where their block was found."""

    lookups: int = 0
    lookup_tokens: int = 0
    hits: int = 0
    hit_tokens: dict[Tier, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    evicted: dict[Tier, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    evicted_snapshots: int = 0
    duplicates: int = 0
    adoptions: int = 0


class TreeBase:
    """Nodes and their states. `PrefixTree` is the class to use; see there for the arguments.

    Every change of state goes through `_set_state`, which knows the transition table, keeps parents
    from being in a lower tier than their children, and does all the counting.
    """

    def __init__(
        self,
        block_tokens: int = 128,
        *,
        order: Callable[[Node], Any] = least_recently_used,
        backup_after: int | None = None,
        persists: bool = False,
        events: EventLog | None = None,
    ):
        self.persists = persists
        self.block_tokens = as_count("block_tokens", block_tokens, 1)
        self.counters = TreeCounters()
        self._order, self._events = order, events
        self._backup_after = None if backup_after is None else as_count("backup_after", backup_after)
        self._number = self._clock = 0
        self._clear()

    def _clear(self) -> None:
        self._epoch = object()
        self._nodes: dict[bytes, Node] = {}  # published, by digest
        self._writing: dict[Node, None] = {}  # reserved, in order
        self._counts = dict.fromkeys(NodeState, 0)
        self._idle = dict.fromkeys(TIERS, 0)  # at rest and unreferenced
        self._num_host = 0  # nodes with a host unit
        self._num_snapshots = dict.fromkeys(TIERS, 0)
        self._backups: collections.deque[Node] = collections.deque()
        self._persists: collections.deque[Node] = collections.deque()
        self._snapshot_persists: collections.deque[Node] = collections.deque()
        rules = ((T.DEVICE, _device_leaf), (T.HOST, _host_leaf), (T.STORAGE, _storage_leaf))
        self._queues = {tier: EvictionQueue(1 << tier, eligible, self._order) for tier, eligible in rules}
        self._snapshot_queues = {
            T.DEVICE: EvictionQueue(32, lambda n: _has_snapshot(n, T.DEVICE), _snapshot_use),
            T.HOST: EvictionQueue(64, lambda n: _has_snapshot(n, T.HOST), _snapshot_use),
        }

    def __len__(self) -> int:
        """Published nodes."""
        return len(self._nodes)

    def get(self, digest: bytes) -> Node | None:
        """The published node of this digest."""
        return self._nodes.get(digest)

    def is_current(self, node: Node) -> bool:
        """Whether the node is still in the tree. Late events (a transfer's end after `reset`) ask this first."""
        return node.epoch is self._epoch and node.state is not S.REMOVED

    def count(self, state: NodeState) -> int:
        """Nodes in this state."""
        return self._counts[state]

    def held(self, tier: Tier) -> int:
        """Units of published nodes: device blocks, host blocks (also of backups), storage copies without either."""
        if tier is T.HOST:
            return self._num_host
        states = (S.STORAGE, S.FETCHING)
        if tier is T.DEVICE:
            states = (S.DEVICE, S.BACKING_UP, S.OFFLOADING, S.LOADING)
        return sum(self._counts[state] for state in states)

    def num_snapshots(self, tier: Tier) -> int:
        """Snapshot copies in this tier."""
        return self._num_snapshots[tier]

    def evictable(self, tier: Tier) -> int:
        """Unreferenced nodes at rest in this tier. All can leave it, unless moves are under way below some."""
        return self._idle[tier]

    def reset(self) -> None:
        """Forgets everything. Nodes known before are refused from now on; the caller resets the pools."""
        self._clear()
        if self._events is not None:
            self._events.emit("cleared", T.NONE)

    # Moves

    def begin_backup(self, node: Node, host: int) -> None:
        """Device to host copy of a published block. It stays matchable, and on the device until `complete`."""
        if self._check(node).host:
            raise TransitionError(f"{node} has a host copy already")
        self._begin(node, S.BACKING_UP, host=host)

    def begin_load(self, node: Node, block: int) -> None:
        """Host to device copy, parents first."""
        self._begin(node, S.LOADING, block=block)

    def begin_persist(self, node: Node) -> None:
        """Host to storage copy. The block stays matchable."""
        if self._check(node).stored:
            raise TransitionError(f"{node} has a storage copy already")
        self._begin(node, S.PERSISTING)

    def begin_fetch(self, node: Node, host: int) -> None:
        """Storage to host copy, parents first."""
        self._begin(node, S.FETCHING, host=host)

    def complete(self, node: Node) -> Freed:
        """The move under way has succeeded. Moves up complete parents first.

        Raises:
            TransitionError: no move is under way, or the parent is in too low a tier.
        """
        old = self._check(node).state
        if old not in COMPLETES:
            raise TransitionError(f"{node} is not on the move")
        freed = Freed()
        if old is S.PERSISTING:
            node.stored = True
            self._emit("stored", T.STORAGE, node)
        self._set_state(node, COMPLETES[old])
        if old is not S.PERSISTING:
            self._emit("stored", T.DEVICE if old is S.LOADING else T.HOST, node)
        if old is S.OFFLOADING:
            freed.blocks.append(node.block)
            node.block = 0
            self._emit("removed", T.DEVICE, node)
        return freed

    def abort(self, node: Node) -> Freed:
        """The write or move under way is called off: the node is where it was, and what it was given is freed.

        A reserved block (leaf first) ceases to be. An offloaded block whose parent has left the device
        meanwhile cannot go back: `discard` it.

        Raises:
            TransitionError: nothing is under way, children are in the way, or the parent is in too low a tier.
        """
        old = self._check(node).state
        if old not in ABORTS:
            raise TransitionError(f"{node} is neither being written nor on the move")
        freed = Freed()
        if old is S.WRITING:
            if node.children:
                raise TransitionError(f"{node} has children: blocks being written are aborted leaf first")
            self._drop(node, freed)
            return freed
        self._set_state(node, ABORTS[old])
        if old is S.LOADING:
            freed.blocks.append(node.block)
            node.block = 0
        elif old is not S.PERSISTING:
            freed.host_blocks.append(self._set_host(node, 0))
        return freed

    def discard(self, node: Node) -> Freed:
        """Removes a node, whose bytes may be lost, and everything below it.

        The node itself may be on the move (a transfer that failed); no copy of it may be under way any more.

        Raises:
            PrefixTreeError: something there is referenced, being written, or below the node and on the move.
        """
        self._check(node)
        below = subtree_of(node)
        for n in below:
            if n.refs or (n.snapshot and n.snapshot.pins) or (n is not node and n.state not in SETTLED):
                raise PrefixTreeError(f"{n} is in use: it cannot be discarded with {node}")
        if S.REMOVED not in TRANSITIONS[node.state]:
            raise TransitionError(f"{node} cannot be removed in this state")
        freed = Freed()
        for n in reversed(below):
            self._drop(n, freed)
        return freed

    def drop_stored(self, node: Node) -> None:
        """Storage has lost its copy of a block that another tier has as well."""
        if self._check(node).state in (S.STORAGE, S.FETCHING, S.PERSISTING) or not node.stored:
            raise TransitionError(f"{node} has no storage copy besides another")
        node.stored = False
        self._emit("removed", T.STORAGE, node)

    # Books

    def _check(self, node: Node) -> Node:
        """The node itself. Raises `PrefixTreeError` if it is no longer, or never was, of this tree."""
        if node.epoch is not self._epoch or node.state is S.REMOVED:
            raise PrefixTreeError(f"{node} is not in this tree: it was removed, or the tree was reset")
        return node

    def _begin(self, node: Node, state: NodeState, *, block: int = 0, host: int = 0) -> None:
        """Starts a move whose destination is the unit given."""
        self._check(node)
        parent = node.parent
        if state is S.LOADING or state is S.FETCHING:
            above = T.DEVICE if state is S.LOADING else T.HOST
            if parent is not None and parent.state.tier < above and parent.state is not state:
                raise TransitionError(f"{node} cannot go up before {parent}")
        if state is S.LOADING:
            block = as_count("block", block, 1)
        elif state is not S.PERSISTING:
            host = as_count("host", host, 1)
        self._set_state(node, state)
        node.block = block or node.block
        if host:
            self._set_host(node, host)

    def _set_state(self, node: Node, state: NodeState) -> None:
        """The only place where a state changes. Raises `TransitionError`, then nothing has changed."""
        old, parent = node.state, node.parent
        if state not in TRANSITIONS[old]:
            raise TransitionError(f"{node} cannot become {state.value}")
        goes_up = state.tier > old.tier or (old is S.WRITING and state is S.DEVICE)
        if goes_up and parent is not None and (parent.state.tier < state.tier or parent.state is S.WRITING):
            raise TransitionError(f"{node} cannot become {state.value} below {parent}")
        if state.tier < old.tier:
            above = node.children if not state.tier else node.on_device + (node.on_host if state.tier < T.HOST else 0)
            if above or node.refs:
                raise TransitionError(
                    f"{node} cannot become {state.value}: {above} children above it, {node.refs} refs"
                )
        if parent is not None and old.tier is not state.tier:
            count_child(parent, old.tier, -1)
            count_child(parent, state.tier, 1)
        if not node.refs:
            if old in SETTLED:
                self._idle[old.tier] -= 1
            if state in SETTLED:
                self._idle[state.tier] += 1
        self._counts[old] -= 1
        self._counts[state] += 1
        node.state = state
        if state is S.HOST and self.persists and not node.stored and not node.queued & PERSIST_BIT:
            node.queued |= PERSIST_BIT
            self._persists.append(node)
        self._enqueue(node)
        if parent is not None:
            self._enqueue(parent)

    def _set_host(self, node: Node, host: int) -> int:
        """Gives the node a host unit, or takes it away (0). Returns the one it had."""
        old, node.host = node.host, host
        self._num_host += bool(host) - bool(old)
        return old

    def _set_snapshot(self, node: Node, tier: Tier, unit: int) -> int:
        """Sets one tier's copy of the node's snapshot (storage: 1 or 0), 0 for none. Returns what it was."""
        snapshot = node.snapshot
        if snapshot is None:
            return 0
        if tier is T.DEVICE:
            old, snapshot.device = snapshot.device, unit
        elif tier is T.HOST:
            old, snapshot.host = snapshot.host, unit
        else:
            old, snapshot.stored = int(snapshot.stored), bool(unit)
        self._num_snapshots[tier] += bool(unit) - bool(old)
        if snapshot.tier is T.NONE:
            node.snapshot = None
        return old

    def _enqueue(self, node: Node) -> None:
        """Puts the node into the queues of the tiers that it may leave now."""
        state = node.state
        if state is S.DEVICE:
            self._queues[T.DEVICE].push(node)
            if node.host:
                self._queues[T.HOST].push(node)
        elif state is S.HOST or state is S.STORAGE:
            self._queues[state.tier].push(node)

    def _new(self, digest: bytes, parent: Node | None, state: NodeState) -> Node:
        self._number += 1
        node = Node(digest, parent, self._number, self._epoch, state)
        self._counts[state] += 1
        if state in SETTLED:
            self._idle[state.tier] += 1
        link(node)
        return node

    def _drop(self, node: Node, freed: Freed) -> None:
        """Removes a node without children, its units into `freed`. Raises `TransitionError` if it must not."""
        old, held = node.state, copies(node)
        if old is S.WRITING:
            node.refs = 0  # its writer's
        self._set_state(node, S.REMOVED)
        unlink(node)
        if node.parent is not None and node.parent.state is S.STORAGE:
            self._enqueue(node.parent)  # it has one child less now
        if old is S.WRITING:
            del self._writing[node]
        else:
            del self._nodes[node.digest]
        for tier in held:
            self._emit("removed", tier, node)
        if node.block:
            freed.blocks.append(node.block)
        if node.host:
            freed.host_blocks.append(self._set_host(node, 0))
        if node.stored:
            freed.stored.append(node.digest)
        node.block, node.stored = 0, False
        for tier, units in ((T.DEVICE, freed.snapshots), (T.HOST, freed.host_snapshots), (T.STORAGE, [])):
            if unit := self._set_snapshot(node, tier, 0):
                units.append(unit)

    def _want_backup(self, node: Node) -> None:
        if not node.queued & BACKUP_BIT:
            node.queued |= BACKUP_BIT
            self._backups.append(node)

    def _emit(self, kind: str, tier: Tier, node: Node) -> None:
        if self._events is not None:
            self._events.emit(kind, tier, node.digest, node.parent.digest if node.parent else None)


# What may leave a tier, leaf first. Children are in no higher tier than their parent.


def _device_leaf(node: Node) -> bool:
    return node.state is S.DEVICE and not node.refs and not node.on_device


def _host_leaf(node: Node) -> bool:
    if node.state is S.DEVICE:  # only the copy leaves
        return node.host > 0
    return node.state is S.HOST and not node.refs and not node.on_host


def _storage_leaf(node: Node) -> bool:
    return node.state is S.STORAGE and not node.refs and not node.children


def _has_snapshot(node: Node, tier: Tier) -> bool:
    return node.snapshot is not None and not node.snapshot.pins and node.snapshot.copy(tier) > 0


def _snapshot_use(node: Node) -> int:
    return node.snapshot.last_used if node.snapshot is not None else 0
