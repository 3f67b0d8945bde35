"""Which nodes may leave a tier, in which order, and which want a copy in a lower one. Pure Python."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from typing import Any

from ...eviction_queue import EvictionQueue
from ..allocator import as_count
from .node import Node, S, T, Tier

__all__ = ["CopyLists", "EvictionQueues", "Listed", "least_recently_used"]


class Listed(enum.IntFlag):
    """The lists that may name a node: a bit of `Node.queued` each. A further list is a further member."""

    BACKUP = enum.auto()
    PERSIST = enum.auto()
    DEVICE_BLOCK = enum.auto()
    HOST_BLOCK = enum.auto()
    STORAGE_BLOCK = enum.auto()
    DEVICE_SNAPSHOT = enum.auto()
    HOST_SNAPSHOT = enum.auto()


def least_recently_used(node: Node) -> Any:
    """Eviction order: the oldest access first; of one path, whose nodes are accessed together, the deepest."""
    return (node.last_access << 32) - node.depth  # one integer: cheaper in a heap than a pair


class EvictionQueues:
    """Who leaves a tier next, blocks and snapshots apart.

    Args:
        order: of blocks: the smallest key leaves first; keys must not shrink. (Of snapshots the least recently used.)

    Attributes:
        blocks, snapshots: a queue per tier. Storage has none for snapshots: these leave it with their blocks.
    """

    def __init__(self, order: Callable[[Node], Any]):
        self.order = order
        self.blocks: dict[Tier, EvictionQueue[Node]] = {}
        self.snapshots: dict[Tier, EvictionQueue[Node]] = {}
        self.clear()

    def clear(self) -> None:
        """Forgets all nodes."""
        self.blocks = {tier: EvictionQueue(bit, leaves, self.order) for tier, bit, leaves in _BLOCKS}
        self.snapshots = {tier: EvictionQueue(bit, leaves, _last_used) for tier, bit, leaves in _SNAPSHOTS}

    def push(self, node: Node) -> None:
        """Puts the node into the queues of the tiers that its block may leave now."""
        state = node.state
        if state is S.DEVICE:
            self.blocks[T.DEVICE].push(node)
            if node.host:
                self.blocks[T.HOST].push(node)
        elif state is S.HOST or state is S.STORAGE:
            self.blocks[state.tier].push(node)

    def push_snapshot(self, node: Node) -> None:
        """Puts the node into the queues of the tiers that its snapshot may leave now."""
        for queue in self.snapshots.values():
            queue.push(node)


# What may leave a tier, leaf first. Children are in no higher tier than their parent.


def _leaves_device(node: Node) -> bool:
    return node.state is S.DEVICE and not node.refs and not node.on_device


def _leaves_host(node: Node) -> bool:
    if node.state is S.DEVICE:  # only the copy leaves
        return node.host > 0
    return node.state is S.HOST and not node.refs and not node.on_host


def _leaves_storage(node: Node) -> bool:
    return node.state is S.STORAGE and not node.refs and not node.children


def _snapshot_leaves_device(node: Node) -> bool:
    return node.snapshot is not None and not node.snapshot.pins and node.snapshot.device > 0


def _snapshot_leaves_host(node: Node) -> bool:
    return node.snapshot is not None and not node.snapshot.pins and node.snapshot.host > 0


def _last_used(node: Node) -> int:
    return node.snapshot.last_used if node.snapshot is not None else 0


_BLOCKS = (
    (T.DEVICE, Listed.DEVICE_BLOCK, _leaves_device),
    (T.HOST, Listed.HOST_BLOCK, _leaves_host),
    (T.STORAGE, Listed.STORAGE_BLOCK, _leaves_storage),
)
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
        self.backup_after = None if backup_after is None else as_count("backup_after", backup_after)
        self.persists = persists
        self.clear()

    def clear(self) -> None:
        """Forgets all nodes."""
        self._backups: collections.deque[Node] = collections.deque()
        self._persists: collections.deque[Node] = collections.deque()
        self._snapshot_persists: collections.deque[Node] = collections.deque()

    def want_backup(self, node: Node) -> None:
        if not node.queued & _BACKUP:
            node.queued |= _BACKUP
            self._backups.append(node)

    def came_to_host(self, node: Node) -> None:
        """The block rests on the host now."""
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
    return snapshot is not None and snapshot.host > 0 and not snapshot.stored


def _pop(waiting: collections.deque[Node], limit: int, bit: int, wants: Callable[[Node], bool]) -> list[Node]:
    """Takes nodes off a list until `limit` of them still want what it is for."""
    limit = as_count("limit", limit)
    chosen: list[Node] = []
    while waiting and len(chosen) < limit:
        node = waiting.popleft()
        node.queued &= ~bit
        if wants(node):
            chosen.append(node)
    return chosen
