"""What the radix cache is made of and what it answers with. NumPy, no jax."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from ..errors import PoolError
from .spec import distinct
from .token_allocator import TokenToKVPoolAllocator

__all__ = ["Inserted", "Lock", "RadixMatch", "RadixNode", "RadixQueues", "check_foreign"]


class RadixQueues(enum.IntFlag):
    """The eviction queues that may list a node: a bit of `RadixNode.queued` each."""

    LEAF = enum.auto()
    WINDOW = enum.auto()
    SNAPSHOT = enum.auto()


class RadixNode:
    """A run of tokens that follows its parent's.

    Attributes:
        parent: None for a root, and for a node that has left the tree.
        start: tokens before this node's first.
        tokens, ids: int64 and int32 [n], the tokens and their slots in the KV pool. Its own arrays, no views.
        window_ids: int32 [n], slots of the window pool; None if the node is a tombstone there.
        snapshot: the track slot of the state after the last token, if there is one.
        children: by the bytes of their first page.
        refs: locks on this node or below.
        window_refs: locks that need this node's window rows.
        used: when it was last matched or inserted, on the cache's clock.
        queued: which eviction queues list it: bits of `RadixQueues`.
        digests: of its pages, if the cache has an event log; of a root, where they begin.
        owner: the tree that made it.
    """

    __slots__ = (
        "alive",
        "children",
        "digests",
        "ids",
        "number",
        "owner",
        "parent",
        "queued",
        "refs",
        "snapshot",
        "start",
        "tokens",
        "used",
        "window_ids",
        "window_refs",
    )

    def __init__(
        self,
        number: int,
        parent: RadixNode | None,
        start: int,
        tokens: np.ndarray,
        ids: np.ndarray,
        owner: object = None,
    ):
        self.number, self.parent, self.start, self.tokens, self.ids = number, parent, start, tokens, ids
        self.owner = owner
        self.digests: list[bytes] = []
        self.children: dict[bytes, RadixNode] = {}
        self.window_ids: np.ndarray | None = None
        self.snapshot: int | None = None
        self.refs = self.window_refs = self.used = self.queued = 0
        self.alive = True

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def rows(self) -> np.ndarray:
        """The `window_ids`, or zeros for a tombstone."""
        return np.zeros(len(self.tokens), np.int32) if self.window_ids is None else self.window_ids

    def path(self) -> list[RadixNode]:
        """Returns this node and those above it, the root excepted, upwards."""
        node, out = self, []
        while node.parent is not None:
            out.append(node)
            node = node.parent
        return out


class RadixMatch(NamedTuple):
    """The longest usable prefix.

    Attributes:
        node: where it ends; lock it before anything that may evict.
        ids: int32 [n], the prefix's slots.
        window_ids: int32 [n], those of the window pool, 0 where there are none; the last `window` are there.
        snapshot: the track slot of the state at its end; None without states.
        kv_length: tokens whose KV rows are here, usable or not.
    """

    node: RadixNode
    ids: np.ndarray
    window_ids: np.ndarray
    snapshot: int | None
    kv_length: int

    @property
    def length(self) -> int:
        return len(self.ids)


class Inserted(NamedTuple):
    """Who owns what after an insert. What is not named here is the cache's now.

    Attributes:
        node: where the inserted prefix ends.
        ids: int32 [n], the cache's slots of the whole prefix: write them to the request's table row.
        kept, kept_window: int32, slots that are still the caller's: duplicates, and the tail that fills no page.
        prefix: tokens that were here before.
        took_snapshot: whether the snapshot is the cache's now.
    """

    node: RadixNode
    ids: np.ndarray
    kept: np.ndarray
    kept_window: np.ndarray
    prefix: int
    took_snapshot: bool


@dataclasses.dataclass(eq=False, slots=True)
class Lock:
    """Keeps a path. Its window rows are kept from position `window_start` on (which no split can move)."""

    node: RadixNode
    window_start: int


def check_foreign(name: str, ids: np.ndarray, owned: np.ndarray, allocator: TokenToKVPoolAllocator) -> None:
    """Ids that the cache does not hold at this place must belong to the caller alone."""
    if ids.size == 0:
        return
    if not allocator.is_held(ids).all():
        raise PoolError(f"insert: {name} {ids.tolist()} are not all handed out")
    if distinct(ids).size != ids.size or owned[ids].any():
        raise PoolError(f"insert: {name} {ids.tolist()} are named twice, or the cache's at another place")
