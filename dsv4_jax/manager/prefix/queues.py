"""Which nodes may leave a tier, in their eviction policy's order, and which want a copy in a lower one. Pure Python."""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Callable
from typing import Any

from ...checks import check_integer
from ...errors import PlanError
from ...eviction_queue import EvictionQueue
from .eviction_policies import EvictionPolicy
from .node import TIERS, Node, S, T, Tier
from .owners import with_owners
from .worth import is_idle_end

__all__ = ["CopyLists", "EvictionQueues", "Listed"]


class Listed(enum.IntFlag):
    """The lists that may name a node: a bit of `Node.queued` each. A further list is a further member."""

    BACKUP = enum.auto()
    PERSIST = enum.auto()
    DEVICE_BLOCK = enum.auto()
    HOST_BLOCK = enum.auto()
    STORAGE_BLOCK = enum.auto()
    DEVICE_SNAPSHOT = enum.auto()
    HOST_SNAPSHOT = enum.auto()


class EvictionQueues:
    """Who leaves a tier next, blocks and snapshots apart.

    Args:
        policy: the smallest keys leave first.
        moves_down: whether blocks that are evicted from the device go to the host.
        shared: whether namespaces have shares of the tiers (see owners.py).

    Attributes:
        blocks, snapshots: a queue per tier. Storage has none for snapshots: these leave it with their blocks.
    """

    def __init__(self, policy: EvictionPolicy, *, moves_down: bool = False, shared: bool = False):
        self._policies = {tier: with_owners(policy, tier) if shared else policy for tier in TIERS}
        self._moves_down = moves_down
        self.blocks: dict[Tier, EvictionQueue[Node]] = {}
        self.snapshots: dict[Tier, EvictionQueue[Node]] = {}
        self.clear()

    def clear(self) -> None:
        """Removes all nodes from the lists."""
        policies = self._policies
        keys = {tier: policies[tier].block for tier in TIERS}
        if self._moves_down:
            keys[T.DEVICE] = policies[T.DEVICE].moved
            keys[T.HOST] = functools.partial(_key_on_host, policies[T.HOST])
        self.blocks = {tier: EvictionQueue(bit, leaves, keys[tier]) for tier, bit, leaves in _BLOCKS}
        self.snapshots = {tier: EvictionQueue(bit, leaves, policies[tier].snapshot) for tier, bit, leaves in _SNAPSHOTS}

    def push(self, node: Node) -> None:
        """Puts the node into the queues of the tiers that its block may leave now."""
        state = node.state
        if state is S.DEVICE:
            self.blocks[T.DEVICE].push(node)
            if node.host:
                self.blocks[T.HOST].push(node)
        elif state is S.HOST or state is S.STORAGE:
            self.blocks[state.tier].push(node)

    def demote(self, node: Node) -> None:
        """Lists the node as `push` does, when the node's block may have come to be worth less."""
        if node.queued & _BLOCKS_BITS:
            for queue in self.blocks.values():
                queue.demote(node)
        else:
            self.push(node)

    def end_of_path(self, node: Node) -> None:
        """The node has one child less, or no snapshot any more: `push` it, or `demote` an idle end."""
        if is_idle_end(node):
            self.demote(node)
        else:
            self.push(node)

    def push_snapshot(self, node: Node) -> None:
        """Puts the node into the queues of the tiers that its snapshot may leave now."""
        for queue in self.snapshots.values():
            queue.push(node)

    def demote_snapshot(self, node: Node) -> None:
        """Lists the node as `push_snapshot` does, when the node's snapshot has come to be worth less."""
        for queue in self.snapshots.values():
            queue.demote(node)


def _key_on_host(policy: EvictionPolicy, node: Node) -> Any:
    return policy.copy(node) if node.state is S.DEVICE else policy.block(node)


# What may leave a tier, leaf first. Children are in no higher tier than their parent.


def _leaves_device(node: Node) -> bool:
    return node.state is S.DEVICE and not node.refs and not node.on_device


def _leaves_host(node: Node) -> bool:
    if node.held:
        return False
    if node.state is S.DEVICE:  # only the copy leaves
        return node.host > 0
    return node.state is S.HOST and not node.refs and not node.on_host


def _leaves_storage(node: Node) -> bool:
    return node.state is S.STORAGE and not node.refs and not node.children


def _snapshot_leaves_device(node: Node) -> bool:
    return node.snapshot is not None and not node.snapshot.pins and node.snapshot.device > 0


def _snapshot_leaves_host(node: Node) -> bool:
    snapshot = node.snapshot
    return snapshot is not None and not snapshot.pins and not snapshot.held and len(snapshot.host) > 0


_BLOCKS = (
    (T.DEVICE, Listed.DEVICE_BLOCK, _leaves_device),
    (T.HOST, Listed.HOST_BLOCK, _leaves_host),
    (T.STORAGE, Listed.STORAGE_BLOCK, _leaves_storage),
)
_BLOCKS_BITS = sum(int(bit) for _, bit, _ in _BLOCKS)
_SNAPSHOTS = (
    (T.DEVICE, Listed.DEVICE_SNAPSHOT, _snapshot_leaves_device),
    (T.HOST, Listed.HOST_SNAPSHOT, _snapshot_leaves_host),
)
_BACKUP, _PERSIST = int(Listed.BACKUP), int(Listed.PERSIST)  # arithmetic with the members themselves is slow


class CopyLists:
    """Who wants a copy in a lower tier, in the order in which they began to want one.

    Args:
        backup_after: hits after which a device block without host copy wants one; 0: when published; None: never.
        persists: whether blocks and snapshots that come to the host want a copy in storage.
    """

    def __init__(self, backup_after: int | None, persists: bool):
        self.backup_after = (
            None if backup_after is None else check_integer("backup_after", backup_after, error=PlanError)
        )
        self.persists = persists
        self.clear()

    def clear(self) -> None:
        """Removes all nodes from the lists."""
        self._backups: collections.deque[Node] = collections.deque()
        self._persists: collections.deque[Node] = collections.deque()
        self._snapshot_persists: collections.deque[Node] = collections.deque()

    def want_backup(self, node: Node) -> None:
        if not node.queued & _BACKUP:
            node.queued |= _BACKUP
            self._backups.append(node)

    def came_to_host(self, node: Node) -> None:
        """Lists a block that has come to rest on the host."""
        if self.persists and not node.stored and not node.queued & _PERSIST:
            node.queued |= _PERSIST
            self._persists.append(node)

    def snapshot_came_to_host(self, node: Node) -> None:
        """The snapshot has a copy on the host now."""
        if self.persists and node.snapshot is not None and not node.snapshot.stored:
            self._snapshot_persists.append(node)

    def pop_backups(self, limit: int) -> list[Node]:
        """Up to `limit` blocks that the write policy wants on the host, parents first. What is left stays listed."""
        return _pop(self._backups, limit, _BACKUP, lambda node: node.state is S.DEVICE and not node.host)

    def pop_persists(self, limit: int) -> list[Node]:
        """Up to `limit` blocks on the host that storage has no copy of, the longest there first."""
        return _pop(self._persists, limit, _PERSIST, lambda node: node.state is S.HOST and not node.stored)

    def pop_snapshot_persists(self, limit: int) -> list[Node]:
        """Up to `limit` nodes with a snapshot on the host that storage has no copy of, the longest there first."""
        return _pop(self._snapshot_persists, limit, 0, _snapshot_wants_storage)


def _snapshot_wants_storage(node: Node) -> bool:
    snapshot = node.snapshot
    return snapshot is not None and len(snapshot.host) > 0 and not snapshot.stored


def _pop(waiting: collections.deque[Node], limit: int, bit: int, wants: Callable[[Node], bool]) -> list[Node]:
    """Takes nodes off a list until `limit` of them still want what it is for."""
    limit = check_integer("limit", limit, error=PlanError)
    chosen: list[Node] = []
    while waiting and len(chosen) < limit:
        node = waiting.popleft()
        node.queued &= ~bit
        if wants(node):
            chosen.append(node)
    return chosen
