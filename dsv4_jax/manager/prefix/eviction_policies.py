"""Eviction policies: who leaves a tier first, blocks and snapshots. Pure Python.

Keys of one policy are compared with each other. They may shrink only where `EvictionQueues.demote` is called: when a
node becomes an idle end, a host copy comes to lie below a block on the device, a snapshot is passed (see worth.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .node import Node
from .worth import block_worth, is_idle_end, snapshot_worth

__all__ = ["EVICTION_POLICIES", "LFU", "LRU", "WORTH", "EvictionPolicy"]

Key = Callable[[Node], Any]


class EvictionPolicy(NamedTuple):
    """Keys of what may leave a tier; the smallest leaves first.

    Attributes:
        block: of a block that leaves for good, or for storage.
        moved: of a block that moves to the host.
        copy: of a host copy of a block on the device, where blocks move to the host when they are evicted: it
            saves one copy to the host, and no computing.
        snapshot: of a node's snapshot.
    """

    block: Key
    moved: Key
    copy: Key
    snapshot: Key


_TIME, _DEPTH = 72, 24  # bits for what is less important: when, and how deep. One integer is cheaper than a tuple


def _block_by_age(node: Node) -> int:
    """The oldest access first; of one path, whose nodes are accessed together, the deepest."""
    return (node.last_access << _DEPTH) - node.depth


def _snapshot_by_age(node: Node) -> int:
    return node.snapshot.last_used << _DEPTH if node.snapshot is not None else 0


def _block_by_hits(node: Node) -> tuple[int, int]:
    """Returns the fewest hits first, the oldest access among equals."""
    return node.hits, _block_by_age(node)


def _snapshot_by_hits(node: Node) -> tuple[int, int]:
    return node.snapshot.hits if node.snapshot is not None else 0, _snapshot_by_age(node)


def _block_by_worth(node: Node) -> int:
    age = _block_by_age(node)
    return age if is_idle_end(node) else (block_worth(node) << _TIME) + age


def _idle_ends_first(node: Node) -> int:
    age = _block_by_age(node)
    return age if is_idle_end(node) else age + (1 << _TIME)


def _snapshot_by_worth(node: Node) -> int:
    return (snapshot_worth(node.snapshot) << _TIME) + _snapshot_by_age(node) if node.snapshot is not None else 0


LRU = EvictionPolicy(_block_by_age, _block_by_age, _block_by_age, _snapshot_by_age)
LFU = EvictionPolicy(_block_by_hits, _block_by_hits, _block_by_hits, _snapshot_by_hits)
WORTH = EvictionPolicy(_block_by_worth, _idle_ends_first, _block_by_age, _snapshot_by_worth)
EVICTION_POLICIES = {"worth": WORTH, "lru": LRU, "lfu": LFU}
