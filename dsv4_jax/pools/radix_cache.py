"""RadixCache: which prefixes have KV rows in a `KVPool`, token by token. NumPy, no jax.

The counterpart, for token pools, of the block tree in `dsv4_jax.manager`. Three kinds of things hang on a node,
and a match ends where all that the model needs are present: KV slots always; with `window`, slots of a second
pool for the last `window` tokens (older ones may be gone: tombstones); with `states`, a snapshot of the recurrent
state at exactly the match's end. One owner at any time: `insert` says what stays the caller's.

Every call is done wholly or not at all, whatever interrupts it; that of the allocators and of the log with it.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from ..errors import IntegrityError, PoolError
from ..events import EventLog, Tier
from ..eviction_queue import EvictionQueue
from .digests import as_tokens, chain, root_digest
from .radix_node import Inserted, Lock, Match, Node, check_foreign
from .slots import StateSlots
from .spec import as_ids, check_count
from .token_allocator import TokenToKVPoolAllocator
from .undo import Undo

__all__ = ["RadixCache"]

_NONE = np.zeros(0, np.int32)


class RadixCache:
    """A compressed prefix tree over token ids.

    Args:
        allocator: of the KV pool. Its page size is the tree's: nodes start and end at page boundaries.
        window: tokens of the sliding window, for models with window layers.
        window_allocator: of the window layers' pool; given with `window`, and not the same as `allocator`.
        states: track slots, for models with recurrent state.
        events: told of every page whose KV rows come or go, by its digest (`page_digests`): a page is "stored"
            after the one before it and "removed" before it, all on the device; `clear` is one event, "cleared".
            Namespaces need canonical bytes then. Not told: window rows and snapshots, without which a page that
            is here may not be matched.
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
        self._leaves = EvictionQueue(1, _is_loose_leaf, _used)
        self._windows = EvictionQueue(2, _has_loose_window, _used)
        self._snapshots = EvictionQueue(4, _has_loose_snapshot, _used)
        for node in self._nodes():
            node.queued = 0
            for queue in (self._leaves, self._windows, self._snapshots):
                queue.push(node)

    @property
    def total_size(self) -> int:
        """Tokens in the tree."""
        return self._total

    @property
    def protected_size(self) -> int:
        """Tokens under a lock."""
        return self._protected

    @property
    def evictable_size(self) -> int:
        """Tokens that `evict` could free: a node without a lock has none below it either."""
        return self._total - self._protected

    def match(self, tokens: Any, namespace: Hashable = None, *, limit: int | None = None) -> Match:
        """The longest prefix of `tokens` that can be used, in whole pages.

        Args:
            namespace: prefixes of different namespaces (adapters, salts) never meet.
            limit: match no more tokens than this. Leave some to compute here rather than cutting the match
                afterwards: the snapshot is that of the match's end.
        """
        tokens = as_tokens(tokens)
        if limit is not None:
            tokens = tokens[: check_count("limit", limit, 0)]
        root = self._root(namespace)
        path, kv_length = self._walk(root, tokens)
        end, live, whole = 0, 0, True  # whole: no tombstone so far
        for node, count in path:
            whole = whole and (not self._window or node.window_ids is not None)
            live = live + count if not self._window or node.window_ids is not None else 0
            at_state = self._states is None or (count == len(node) and node.snapshot is not None)
            if at_state and (whole or live >= self._window):
                end = node.start + count
        last, count = [(root, 0), *(step for step in path if step[0].start < end)][-1]
        undo = Undo()
        try:
            if count < len(last):
                last = self._split(undo, last, count)
            nodes = self._touched(last)
            ids = np.concatenate([_NONE, *(n.ids for n in nodes)])
            return Match(last, ids, np.concatenate([_NONE, *(n.rows for n in nodes)]), last.snapshot, kv_length)
        except BaseException:
            undo.put_back()
            raise

    def insert(
        self,
        tokens: Any,
        ids: Any,
        namespace: Hashable = None,
        *,
        window_ids: Any = None,
        snapshot: int | None = None,
    ) -> Inserted:
        """Makes the prefix of whole pages matchable and takes over the slots that it lacks.

        Args:
            tokens: [n] token ids.
            ids: [n] their KV slots: the cache's own where the caller got them from it, else the caller's.
            window_ids: [n] their window slots, 0 for tokens that have left the window; with `window` only.
            snapshot: track slot with the state after all n tokens, which must be whole pages then.

        Raises:
            PoolError: the arguments do not fit together, or a slot to be taken over is not handed out, is named
                twice, or is already the cache's; nothing was changed.
        """
        self._check_no_batch("insert")
        tokens, ids = as_tokens(tokens), as_ids("insert: ids", ids).reshape(-1)
        rows = np.zeros(len(tokens), np.int32)
        if window_ids is not None:
            rows = as_ids("insert: window ids", window_ids).reshape(-1)
        if not len(ids) == len(rows) == len(tokens):
            raise PoolError(f"insert: {len(tokens)} tokens, {len(ids)} ids, {len(rows)} window ids")
        if window_ids is not None and not self._window:
            raise PoolError("insert: this cache has no window")
        end = len(tokens) // self._page * self._page
        self._check_snapshot(snapshot, end == len(tokens))
        live = int(np.flatnonzero(rows)[0]) if rows.any() else len(rows)
        if not rows[live:].all():
            raise PoolError("insert: window ids must be those of the last tokens, without gaps")
        live = -(-live // self._page) * self._page  # whole pages only

        root = self._root(namespace)
        path, prefix = self._walk(root, tokens[:end])
        own = np.concatenate([_NONE, *(n.ids[:count] for n, count in path)])
        foreign = np.concatenate([ids[:prefix][ids[:prefix] != own], ids[prefix:]])
        check_foreign("ids", foreign, self._owned, self._allocator)
        mine = rows[:prefix] != np.concatenate([_NONE, *(n.rows[:count] for n, count in path)])
        if self._window_allocator is not None:
            foreign_rows = np.concatenate([rows[:prefix][mine], rows[prefix:]])
            foreign_rows = foreign_rows[foreign_rows != 0]
            check_foreign("window ids", foreign_rows, self._owned_window, self._window_allocator)

        undo = Undo()
        try:
            undo.call(self._queue)
            if end:
                undo.keep_key(self._roots, namespace)
                self._roots[namespace] = root
            last, count = [(root, 0), *path][-1]
            if count < len(last):
                last = self._split(undo, last, count)
            revived = np.zeros(end, bool)
            for node in last.path():
                if node.window_ids is None and node.end > live and rows[node.start : node.end].any():
                    if node.start < live:
                        self._split(undo, node, live - node.start)
                    revived[node.start : node.end] = True
                    self._adopt_rows(undo, node, rows[node.start : node.end])
            for first, stop in self._pieces(prefix, end, live):
                last = self._attach(undo, last, first, tokens[first:stop], ids[first:stop].astype(np.int32))
                if self._window and first >= live:
                    revived[first:stop] = True
                    self._adopt_rows(undo, last, rows[first:stop])
            took = snapshot is not None and last.parent is not None and last.snapshot is None
            if took:
                undo.keep(last, "snapshot")
                undo.call(self._owned_states.discard, snapshot)
                last.snapshot = snapshot
                self._owned_states.add(snapshot)
            nodes = self._touched(last)
            self._leaves.push(last)
            self._snapshots.push(last)
            kept = np.concatenate([ids[:prefix][ids[:prefix] != own], ids[end:]]).astype(np.int32)
            still = np.concatenate([mine & ~revived[:prefix], ~revived[prefix:], np.ones(len(rows) - end, bool)])
            kept_rows = rows[still & (rows != 0)].astype(np.int32)
            return Inserted(last, np.concatenate([_NONE, *(n.ids for n in nodes)]), kept, kept_rows, prefix, took)
        except BaseException:
            undo.put_back()
            raise

    def lock(self, node: Node) -> Lock:
        """Keeps a node and all above it from eviction; of the window rows, those of the last `window` tokens."""
        if not isinstance(node, Node) or node.owner is not self or not node.alive:
            raise PoolError("lock: the node has left the tree, or is another cache's")
        path, lock = node.path(), Lock(node, node.end)
        undo = Undo()
        try:
            undo.keep(self, "_protected")
            undo.call(self._locks.discard, lock)
            for above in path:
                undo.keep(above, "refs", "window_refs")
                self._protected += len(above) if above.refs == 0 else 0
                above.refs += 1
            for above in path:
                if node.end - lock.window_start >= self._window:
                    break
                above.window_refs += 1
                lock.window_start = above.start
            self._locks.add(lock)
            return lock
        except BaseException:
            undo.put_back()
            raise

    def unlock(self, lock: Lock) -> None:
        """Ends a lock. Raises `PoolError` if it has ended already."""
        if not isinstance(lock, Lock) or lock not in self._locks:
            raise PoolError("unlock: the lock has ended already, or is another cache's")
        undo = Undo()
        try:
            undo.call(self._queue)
            undo.keep(self, "_protected")
            undo.call(self._locks.add, lock)
            self._locks.remove(lock)
            for above in lock.node.path():
                undo.keep(above, "refs", "window_refs")
                above.refs -= 1
                above.window_refs -= above.start >= lock.window_start
                self._protected -= len(above) if above.refs == 0 else 0
                for queue in (self._leaves, self._windows, self._snapshots):
                    queue.push(above)
        except BaseException:
            undo.put_back()
            raise

    def evict(self, count: int) -> int:
        """Frees at least `count` tokens if so many can be, whole leaves, least recently used first.

        What hangs on a leaf goes with it. Returns how many tokens were freed.
        """
        self._check_no_batch("evict")
        count, freed = check_count("count", count, 0), 0
        undo = Undo()
        try:
            undo.call(self._queue)
            while freed < count and (node := self._leaves.pop()) is not None:
                freed += len(node)
                self._remove(undo, node)
            return freed
        except BaseException:
            undo.put_back()
            raise

    def evict_window(self, count: int) -> int:
        """Frees at least `count` window slots if so many can be; their nodes become tombstones. Returns how many."""
        self._check_no_batch("evict_window")
        count, freed = check_count("count", count, 0), 0
        undo = Undo()
        try:
            undo.call(self._queue)
            while freed < count and (node := self._windows.pop()) is not None:
                freed += len(node)
                self._drop_rows(undo, node)
            return freed
        except BaseException:
            undo.put_back()
            raise

    def evict_snapshots(self, count: int) -> int:
        """Frees `count` track slots if so many can be. Returns how many."""
        count, freed = check_count("count", count, 0), 0
        undo = Undo()
        try:
            undo.call(self._queue)
            while freed < count and (node := self._snapshots.pop()) is not None:
                freed += 1
                self._drop_snapshot(undo, node)
            return freed
        except BaseException:
            undo.put_back()
            raise

    def clear(self) -> None:
        """Forgets everything and gives all slots back. Raises `PoolError` while there are locks."""
        self._check_no_batch("clear")
        if self._locks:
            raise PoolError(f"clear: {len(self._locks)} locks are held")
        undo = Undo()
        try:
            undo.call(self._queue)
            undo.keep(self, "_roots", "_locks", "_owned_states", "_total", "_protected", "_owned", "_owned_window")
            for node in list(self._nodes()):
                self._give_back(undo, node)
            self._start()
            self._tell(undo, "cleared", Tier.NONE, [(None, None)])
        except BaseException:
            undo.put_back()
            raise

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
            "an id is owned twice": np.unique(ids).size == len(ids) and np.unique(rows).size == len(rows),
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

    # What hangs on nodes

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
