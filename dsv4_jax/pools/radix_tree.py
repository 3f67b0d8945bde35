"""The tree under the radix cache: nodes, what is attached to them, and who owns which slots. NumPy, no jax."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator

import numpy as np

from ..errors import IntegrityError, PoolError
from ..events import EventLog, Tier
from ..eviction_queue import EvictionQueue
from .digests import chain, root_digest
from .radix_node import Listed, Lock, Node
from .slots import StateSlots
from .spec import check_count, distinct
from .token_allocator import TokenToKVPoolAllocator
from .undo import Undo

__all__ = ["RadixTree"]

_NONE = np.zeros(0, np.int32)


class RadixTree:
    """The books of a `RadixCache`. What changes them keeps the old values in an `Undo` first."""

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
        self._allocator, self._window_allocator, self._states = allocator, window_allocator, states
        self._events = events
        self._window = 0 if window is None else check_count("window", window)
        self._page = allocator.page_size
        self._clock = self._numbers = 0
        self._start()

    def _start(self) -> None:
        window = 0 if self._window_allocator is None else self._window_allocator.num_ids
        self._owned, self._owned_window = np.zeros(self._allocator.num_ids, bool), np.zeros(window, bool)
        self._roots: dict[Hashable, Node] = {}
        self._locks: set[Lock] = set()
        self._owned_states: set[int] = set()
        self._total = self._protected = 0
        self._queue()

    def _queue(self) -> None:
        """The eviction queues from the tree."""
        self._leaves = EvictionQueue(Listed.LEAF, _is_loose_leaf, _used)
        self._windows = EvictionQueue(Listed.WINDOW, _has_loose_window, _used)
        self._snapshots = EvictionQueue(Listed.SNAPSHOT, _has_loose_snapshot, _used)
        for node in self._nodes():
            node.queued = 0
            for queue in (self._leaves, self._windows, self._snapshots):
                queue.push(node)

    def check_integrity(self) -> None:
        """The tree's books against the tree itself. Raises `IntegrityError`."""
        nodes = list(self._nodes())
        ids = np.concatenate([_NONE, *(n.ids for n in nodes)])
        rows = np.concatenate([_NONE, *(n.window_ids for n in nodes if n.window_ids is not None)])
        states = [n.snapshot for n in nodes if n.snapshot is not None]
        refs, window_refs = collections.Counter[Node](), collections.Counter[Node]()
        for lock in self._locks:
            path = lock.node.path()
            refs.update(path)
            window_refs.update(n for n in path if n.start >= lock.window_start)
        checks = {
            "total size": self._total == len(ids),
            "protected size": self._protected == sum(len(n) for n in nodes if n.refs),
            "an id is owned twice": distinct(ids).size == len(ids) and distinct(rows).size == len(rows),
            "owned ids": np.array_equal(np.flatnonzero(self._owned), np.sort(ids)),
            "owned window ids": np.array_equal(np.flatnonzero(self._owned_window), np.sort(rows)),
            "owned ids that are not handed out": self._allocator.is_held(ids).all(),
            "snapshots": sorted(states) == sorted(self._owned_states),
            "snapshots that are not handed out": self._states is None or all(map(self._states.is_held, states)),
            "references": all(n.refs == refs[n] and n.window_refs == window_refs[n] for n in nodes),
            "links": all(
                c.parent is n and c.start == n.end and key == self._key(c.tokens) and c.alive and len(c)
                for n in (*nodes, *self._roots.values())
                for key, c in n.children.items()
            ),
            "page boundaries": all(len(n) % self._page == 0 == n.start % self._page for n in nodes),
            "lengths": all(len(n) == len(n.ids) == len(n.rows) for n in nodes),
        }  # fmt: skip
        if wrong := [name for name, right in checks.items() if not right]:
            raise IntegrityError(f"radix cache: {', '.join(wrong)}")

    # The tree

    def _nodes(self) -> Iterator[Node]:
        stack = [c for root in self._roots.values() for c in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _key(self, tokens: np.ndarray) -> bytes:
        return tokens[: self._page].tobytes()

    def _root(self, namespace: Hashable) -> Node:
        """The root of a namespace; one that is not kept if nothing was inserted there."""
        try:
            if namespace in self._roots:
                return self._roots[namespace]
        except TypeError:
            raise PoolError(f"a namespace must be hashable, got {namespace!r}") from None
        root = self._node(None, 0, np.zeros(0, np.int64), _NONE)
        root.digests = [] if self._events is None else [root_digest(self._page, namespace)]
        return root

    def _node(self, parent: Node | None, start: int, tokens: np.ndarray, ids: np.ndarray) -> Node:
        self._numbers += 1
        return Node(self._numbers, parent, start, tokens, ids, self)

    def _walk(self, root: Node, tokens: np.ndarray) -> tuple[list[tuple[Node, int]], int]:
        """The nodes along `tokens` with the tokens matched in each (whole pages), and their sum. Changes nothing."""
        node, path, at = root, [], 0
        while len(tokens) - at >= self._page and (child := node.children.get(self._key(tokens[at:]))) is not None:
            common = min(len(child), len(tokens) - at)
            differ = np.flatnonzero(child.tokens[:common] != tokens[at : at + common])
            common = (int(differ[0]) if differ.size else common) // self._page * self._page
            path.append((child, common))
            node, at = child, at + common
            if common < len(child):
                break
        return path, at

    def _split(self, undo: Undo, node: Node, count: int) -> Node:
        """Cuts a node after `count` tokens; returns the new upper part.

        The node itself becomes the lower part: its end stays where it is, so locks and the snapshot stay with it.
        """
        parent = node.parent
        assert parent is not None
        upper = self._node(parent, node.start, node.tokens[:count], node.ids[:count])
        upper.refs, upper.window_refs, upper.used = node.refs, node.window_refs, node.used
        upper.digests = node.digests[: count // self._page]
        upper.children[self._key(node.tokens[count:])] = node
        undo.call(self._queue)
        undo.keep_key(parent.children, self._key(node.tokens))
        undo.keep(node, "parent", "start", "tokens", "ids", "digests", "window_ids")
        parent.children[self._key(node.tokens)] = upper
        node.parent, node.start = upper, node.start + count
        node.tokens, node.ids = node.tokens[count:], node.ids[count:]
        node.digests = node.digests[count // self._page :]
        if node.window_ids is not None:
            upper.window_ids, node.window_ids = node.window_ids[:count], node.window_ids[count:]
            self._windows.push(upper)
        return upper

    def _pieces(self, first: int, end: int, live: int) -> list[tuple[int, int]]:
        """first..end as nodes: with a window, cut where its rows begin."""
        cut = min(max(live, first), end) if self._window else end
        return [(a, b) for a, b in ((first, cut), (cut, end)) if a < b]

    def _attach(self, undo: Undo, parent: Node, start: int, tokens: np.ndarray, ids: np.ndarray) -> Node:
        node = self._node(parent, start, tokens, ids)
        if self._events is not None:
            node.digests = chain(parent.digests[-1], tokens, self._page)
        undo.keep_key(parent.children, self._key(tokens))
        undo.keep_at(self._owned, ids)
        undo.keep(self, "_total")
        parent.children[self._key(tokens)] = node
        self._owned[ids] = True
        self._total += len(ids)
        self._tell(undo, "stored", Tier.DEVICE, _links(node))
        return node

    def _touched(self, node: Node) -> list[Node]:
        """The nodes from the root's child down to `node`, used now."""
        self._clock += 1
        nodes = node.path()[::-1]
        for above in nodes:
            above.used = self._clock
        return nodes

    def _remove(self, undo: Undo, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self._tell(undo, "removed", Tier.DEVICE, _links(node)[::-1])
        self._give_back(undo, node)
        undo.keep(self, "_total", "_roots")
        undo.keep_key(parent.children, self._key(node.tokens))
        self._total -= len(node)
        del parent.children[self._key(node.tokens)]
        self._leaves.push(parent)
        if parent.parent is None and not parent.children:
            self._roots = {name: root for name, root in self._roots.items() if root is not parent}

    def _tell(self, undo: Undo, kind: str, tier: Tier, pages: list[tuple[bytes | None, bytes | None]]) -> None:
        if self._events is not None:
            undo.call(self._events.rewind, self._events.last)
            self._events.emit_all(kind, tier, pages)

    # What is attached to nodes

    def _give_back(self, undo: Undo, node: Node) -> None:
        self._allocator.free_within(undo, node.ids)
        undo.keep_at(self._owned, node.ids)
        self._owned[node.ids] = False
        self._drop_rows(undo, node)
        self._drop_snapshot(undo, node)
        undo.keep(node, "alive")
        node.alive = False

    def _adopt_rows(self, undo: Undo, node: Node, rows: np.ndarray) -> None:
        rows = rows.astype(np.int32)
        undo.keep(node, "window_ids")
        undo.keep_at(self._owned_window, rows)
        node.window_ids = rows
        self._owned_window[rows] = True
        self._windows.push(node)

    def _drop_rows(self, undo: Undo, node: Node) -> None:
        if node.window_ids is not None:
            assert self._window_allocator is not None
            self._window_allocator.free_within(undo, node.window_ids)
            undo.keep_at(self._owned_window, node.window_ids)
            undo.keep(node, "window_ids")
            self._owned_window[node.window_ids] = False
            node.window_ids = None

    def _drop_snapshot(self, undo: Undo, node: Node) -> None:
        if node.snapshot is not None:
            assert self._states is not None
            self._states.free_within(undo, node.snapshot)
            undo.call(self._owned_states.add, node.snapshot)
            undo.keep(node, "snapshot")
            self._owned_states.discard(node.snapshot)
            node.snapshot = None

    def _check_no_batch(self, call: str) -> None:
        if self._allocator.in_batch or (self._window_allocator is not None and self._window_allocator.in_batch):
            raise PoolError(f"{call} within a batch of the allocator: the tree would not be undone with it")

    def _check_snapshot(self, snapshot: int | None, whole_pages: bool) -> None:
        if snapshot is None:
            return
        if self._states is None or not self._states.is_held(snapshot):
            raise PoolError(f"insert: snapshot {snapshot} is not a track slot that was handed out")
        if not whole_pages:
            raise PoolError(f"insert: a snapshot needs whole pages of {self._page} tokens")
        if snapshot in self._owned_states:
            raise PoolError(f"insert: snapshot {snapshot} is already the cache's")


def _links(node: Node) -> list[tuple[bytes | None, bytes | None]]:
    """The digest of each page of a node, and of the page before it: None before the first."""
    if not node.digests or node.parent is None:
        return []
    above = node.parent.digests[-1] if node.parent.parent is not None else None
    return list(zip(node.digests, [above, *node.digests], strict=False))


# What may go, the least recently used first.


def _used(node: Node) -> int:
    return node.used


def _is_loose_leaf(node: Node) -> bool:
    return node.alive and node.parent is not None and not node.children and node.refs == 0


def _has_loose_window(node: Node) -> bool:
    return node.alive and node.window_ids is not None and node.window_refs == 0


def _has_loose_snapshot(node: Node) -> bool:
    return node.alive and node.snapshot is not None and node.refs == 0
