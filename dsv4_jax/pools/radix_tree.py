"""The tree under the radix cache: nodes, what is attached to them, and who owns which slots. NumPy, no jax."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator

import numpy as np

from ..checks import check_integer
from ..errors import IntegrityError, PoolError
from ..events import EventLog, Tier
from ..eviction_queue import EvictionQueue
from .digests import chain, root_digest
from .radix_node import Lock, RadixNode, RadixQueues
from .slots import StateSlots
from .spec import distinct
from .token_allocator import TokenToKVPoolAllocator
from .undo import Undo

__all__ = ["RadixTree"]

_NONE = np.zeros(0, np.int32)


class RadixTree:
    """The books of a `RadixCache`. What changes them keeps the old values in an `Undo` first.

    Attributes:
        allocator, window_allocator, states, events: as given to `RadixCache`.
        window, page: tokens of the window (0: none) and of a page.
        roots: by namespace, of those that have nodes.
        locks: that are held.
        owned, owned_window, owned_states: the slots that are the tree's: a flag for each id, and a set.
        total, protected: tokens in the tree, and under a lock.
        leaves, windows, snapshots: what may be evicted.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        *,
        window: int | None = None,
        window_allocator: TokenToKVPoolAllocator | None = None,
        states: StateSlots | None = None,
        events: EventLog | None = None,
    ):
        if (window is None) != (window_allocator is None) or window_allocator is allocator:
            raise PoolError("a window needs its size and an allocator of its own")
        self.allocator, self.window_allocator, self.states = allocator, window_allocator, states
        self.events = events
        self.window = 0 if window is None else check_integer("window", window, 1, error=PoolError)
        self.page = allocator.page_size
        self._clock = self._numbers = 0
        self.begin()

    def begin(self) -> None:
        """Makes the tree empty."""
        window = 0 if self.window_allocator is None else self.window_allocator.num_ids
        self.owned, self.owned_window = np.zeros(self.allocator.num_ids, bool), np.zeros(window, bool)
        self.roots: dict[Hashable, RadixNode] = {}
        self.locks: set[Lock] = set()
        self.owned_states: set[int] = set()
        self.total = self.protected = 0
        self.rebuild_queues()

    def rebuild_queues(self) -> None:
        """Makes the eviction queues anew from the tree."""
        self.leaves = EvictionQueue(RadixQueues.LEAF, _is_loose_leaf, _used)
        self.windows = EvictionQueue(RadixQueues.WINDOW, _has_loose_window, _used)
        self.snapshots = EvictionQueue(RadixQueues.SNAPSHOT, _has_loose_snapshot, _used)
        for node in self.nodes():
            node.queued = 0
            for queue in (self.leaves, self.windows, self.snapshots):
                queue.push(node)

    def check_integrity(self) -> None:
        """Checks the tree's books against the tree itself. Raises `IntegrityError`."""
        nodes = list(self.nodes())
        ids = np.concatenate([_NONE, *(n.ids for n in nodes)])
        rows = np.concatenate([_NONE, *(n.window_ids for n in nodes if n.window_ids is not None)])
        states = [n.snapshot for n in nodes if n.snapshot is not None]
        refs, window_refs = collections.Counter[RadixNode](), collections.Counter[RadixNode]()
        for lock in self.locks:
            path = lock.node.path()
            refs.update(path)
            window_refs.update(n for n in path if n.start >= lock.window_start)
        checks = {
            "total size": self.total == len(ids),
            "protected size": self.protected == sum(len(n) for n in nodes if n.refs),
            "an id is owned twice": distinct(ids).size == len(ids) and distinct(rows).size == len(rows),
            "owned ids": np.array_equal(np.flatnonzero(self.owned), np.sort(ids)),
            "owned window ids": np.array_equal(np.flatnonzero(self.owned_window), np.sort(rows)),
            "owned ids that are not handed out": self.allocator.is_held(ids).all(),
            "snapshots": sorted(states) == sorted(self.owned_states),
            "snapshots that are not handed out": self.states is None or all(map(self.states.is_held, states)),
            "references": all(n.refs == refs[n] and n.window_refs == window_refs[n] for n in nodes),
            "links": all(
                c.parent is n and c.start == n.end and key == self._key(c.tokens) and c.alive and len(c)
                for n in (*nodes, *self.roots.values())
                for key, c in n.children.items()
            ),
            "page boundaries": all(len(n) % self.page == 0 == n.start % self.page for n in nodes),
            "lengths": all(len(n) == len(n.ids) == len(n.rows) for n in nodes),
        }
        if wrong := [name for name, right in checks.items() if not right]:
            raise IntegrityError(f"radix cache: {', '.join(wrong)}")

    # The tree

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the roots."""
        stack = [c for root in self.roots.values() for c in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _key(self, tokens: np.ndarray) -> bytes:
        return tokens[: self.page].tobytes()

    def root_of(self, namespace: Hashable) -> RadixNode:
        """The root of a namespace; one that is not kept if nothing was inserted there."""
        try:
            if namespace in self.roots:
                return self.roots[namespace]
        except TypeError:
            raise PoolError(f"a namespace must be hashable, got {namespace!r}") from None
        root = self._node(None, 0, np.zeros(0, np.int64), _NONE)
        root.digests = [] if self.events is None else [root_digest(self.page, namespace)]
        return root

    def _node(self, parent: RadixNode | None, start: int, tokens: np.ndarray, ids: np.ndarray) -> RadixNode:
        self._numbers += 1
        return RadixNode(self._numbers, parent, start, tokens, ids, self)

    def walk(self, root: RadixNode, tokens: np.ndarray) -> tuple[list[tuple[RadixNode, int]], int]:
        """Returns the nodes along `tokens` with the tokens matched in each (whole pages), and their sum. Changes
        nothing."""
        node, path, at = root, [], 0
        while len(tokens) - at >= self.page and (child := node.children.get(self._key(tokens[at:]))) is not None:
            common = min(len(child), len(tokens) - at)
            differ = np.flatnonzero(child.tokens[:common] != tokens[at : at + common])
            common = (int(differ[0]) if differ.size else common) // self.page * self.page
            path.append((child, common))
            node, at = child, at + common
            if common < len(child):
                break
        return path, at

    def split(self, undo: Undo, node: RadixNode, count: int) -> RadixNode:
        """Cuts a node after `count` tokens; returns the new upper part.

        The node itself becomes the lower part: its end stays where it is, so locks and the snapshot stay with it.
        """
        parent = node.parent
        assert parent is not None
        upper = self._node(parent, node.start, node.tokens[:count].copy(), node.ids[:count].copy())
        upper.refs, upper.window_refs, upper.used = node.refs, node.window_refs, node.used
        upper.digests = node.digests[: count // self.page]
        upper.children[self._key(node.tokens[count:])] = node
        undo.call(self.rebuild_queues)
        undo.keep_key(parent.children, self._key(node.tokens))
        undo.keep(node, "parent", "start", "tokens", "ids", "digests", "window_ids")
        parent.children[self._key(node.tokens)] = upper
        node.parent, node.start = upper, node.start + count
        node.tokens, node.ids = node.tokens[count:].copy(), node.ids[count:].copy()
        node.digests = node.digests[count // self.page :]
        if node.window_ids is not None:
            upper.window_ids, node.window_ids = node.window_ids[:count].copy(), node.window_ids[count:].copy()
            self.windows.push(upper)
        return upper

    def pieces(self, first: int, end: int, live: int) -> list[tuple[int, int]]:
        """first..end as nodes: with a window, cut where its rows begin."""
        cut = min(max(live, first), end) if self.window else end
        return [(a, b) for a, b in ((first, cut), (cut, end)) if a < b]

    def attach(self, undo: Undo, parent: RadixNode, start: int, tokens: np.ndarray, ids: np.ndarray) -> RadixNode:
        """A new node below `parent`; its slots are the tree's from now on."""
        node = self._node(parent, start, tokens.copy(), ids)  # no view: it would keep the whole prompt in memory
        if self.events is not None:
            node.digests = chain(parent.digests[-1], tokens, self.page)
        undo.keep_key(parent.children, self._key(tokens))
        undo.keep_at(self.owned, ids)
        undo.keep(self, "total")
        parent.children[self._key(tokens)] = node
        self.owned[ids] = True
        self.total += len(ids)
        self.tell(undo, "stored", Tier.DEVICE, _links(node))
        return node

    def touch(self, node: RadixNode) -> list[RadixNode]:
        """Returns the nodes from the root's child down to `node`, used now."""
        self._clock += 1
        nodes = node.path()[::-1]
        for above in nodes:
            above.used = self._clock
        return nodes

    def remove(self, undo: Undo, node: RadixNode) -> None:
        """Takes a leaf out and gives back what it holds."""
        parent = node.parent
        assert parent is not None
        self.tell(undo, "removed", Tier.DEVICE, _links(node)[::-1])
        self.give_back(undo, node)
        undo.keep(self, "total", "roots")
        undo.keep_key(parent.children, self._key(node.tokens))
        self.total -= len(node)
        del parent.children[self._key(node.tokens)]
        self.leaves.push(parent)
        if parent.parent is None and not parent.children:
            self.roots = {name: root for name, root in self.roots.items() if root is not parent}

    def tell(self, undo: Undo, kind: str, tier: Tier, pages: list[tuple[bytes | None, bytes | None]]) -> None:
        """Tells the event log, if there is one, of pages: (digest, that of the page before) each."""
        if self.events is not None:
            undo.call(self.events.rewind, self.events.last)
            self.events.emit_all(kind, tier, pages)

    # What is attached to nodes

    def give_back(self, undo: Undo, node: RadixNode) -> None:
        """Frees all slots of a node, which leaves the tree."""
        self.allocator.free_within(undo, node.ids)
        undo.keep_at(self.owned, node.ids)
        self.owned[node.ids] = False
        self.drop_rows(undo, node)
        self.drop_snapshot(undo, node)
        undo.keep(node, "alive")
        node.alive = False

    def adopt_rows(self, undo: Undo, node: RadixNode, rows: np.ndarray) -> None:
        """The node has these window slots now; they are the tree's."""
        rows = rows.astype(np.int32)
        undo.keep(node, "window_ids")
        undo.keep_at(self.owned_window, rows)
        node.window_ids = rows
        self.owned_window[rows] = True
        self.windows.push(node)

    def drop_rows(self, undo: Undo, node: RadixNode) -> None:
        """Frees the window slots of a node, if it has some."""
        if node.window_ids is not None:
            assert self.window_allocator is not None
            self.window_allocator.free_within(undo, node.window_ids)
            undo.keep_at(self.owned_window, node.window_ids)
            undo.keep(node, "window_ids")
            self.owned_window[node.window_ids] = False
            node.window_ids = None

    def drop_snapshot(self, undo: Undo, node: RadixNode) -> None:
        """Frees the track slot of a node, if it has one."""
        if node.snapshot is not None:
            assert self.states is not None
            self.states.free_within(undo, node.snapshot)
            undo.call(self.owned_states.add, node.snapshot)
            undo.keep(node, "snapshot")
            self.owned_states.discard(node.snapshot)
            node.snapshot = None

    def check_no_batch(self, call: str) -> None:
        """Raises `PoolError` in a batch of an allocator."""
        if self.allocator.in_batch or (self.window_allocator is not None and self.window_allocator.in_batch):
            raise PoolError(f"{call} within a batch of the allocator: the tree would not be undone with it")

    def check_snapshot(self, snapshot: int | None, whole_pages: bool) -> None:
        """Raises `PoolError` unless the track slot, if any, is the caller's and stands at the end of whole pages."""
        if snapshot is None:
            return
        if self.states is None or not self.states.is_held(snapshot):
            raise PoolError(f"insert: snapshot {snapshot} is not a track slot that was handed out")
        if not whole_pages:
            raise PoolError(f"insert: a snapshot needs whole pages of {self.page} tokens")
        if snapshot in self.owned_states:
            raise PoolError(f"insert: snapshot {snapshot} is already the cache's")


def _links(node: RadixNode) -> list[tuple[bytes | None, bytes | None]]:
    """Returns the digest of each page of a node, and of the page before it: None before the first."""
    if not node.digests or node.parent is None:
        return []
    above = node.parent.digests[-1] if node.parent.parent is not None else None
    return list(zip(node.digests, [above, *node.digests], strict=False))


# What may go, the least recently used first.


def _used(node: RadixNode) -> int:
    return node.used


def _is_loose_leaf(node: RadixNode) -> bool:
    return node.alive and node.parent is not None and not node.children and node.refs == 0


def _has_loose_window(node: RadixNode) -> bool:
    return node.alive and node.window_ids is not None and node.window_refs == 0


def _has_loose_snapshot(node: RadixNode) -> bool:
    return node.alive and node.snapshot is not None and node.refs == 0
