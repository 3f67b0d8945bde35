"""RadixCache: which prefixes have KV rows in a `KVPool`, token by token. NumPy, no jax.

The counterpart, for token pools, of the block tree in `dsv4_jax.manager`. Three kinds of things belong to a node,
and a match ends where all that the model needs are present: KV slots always; with `window`, slots of a second
pool for the last `window` tokens (older ones may have been freed: tombstones); with `states`, a snapshot of the
recurrent state at exactly the match's end. One owner at any time: `insert` says what stays the caller's.

Every call is done wholly or not at all, whatever interrupts it; that of the allocators and of the log with it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ..checks import check_integer
from ..errors import PoolError
from ..events import EventLog, Tier
from .digests import as_tokens
from .radix_node import Inserted, Lock, RadixMatch, RadixNode, check_foreign
from .radix_tree import RadixTree
from .slots import StateSlots
from .spec import as_ids
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
        events: the log of every page whose KV rows come or go, by its digest (`page_digests`): a page is "stored"
            after the one before it and "removed" before it, all on the device; `clear` is one event, "cleared".
            Namespaces need canonical bytes then. Not logged: window rows and snapshots, without which a page that
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
        self._tree = RadixTree(
            allocator, window=window, window_allocator=window_allocator, states=states, events=events
        )

    def check_integrity(self) -> None:
        """Checks the books against each other. For tests: O(tokens). Raises `IntegrityError`."""
        self._tree.check_integrity()

    @property
    def total_size(self) -> int:
        """How many tokens are in the tree."""
        return self._tree.total

    @property
    def protected_size(self) -> int:
        """How many tokens are under a lock."""
        return self._tree.protected

    @property
    def evictable_size(self) -> int:
        """Tokens that `evict` could free: a node without a lock has none below it either."""
        return self._tree.total - self._tree.protected

    def match(self, tokens: Any, namespace: Hashable = None, *, limit: int | None = None) -> RadixMatch:
        """The longest prefix of `tokens` that can be used, in whole pages.

        Args:
            namespace: hashable; prefixes of unequal namespaces (adapters, salts) never meet.
            limit: match no more tokens than this. Leave some to compute here rather than cutting the match
                afterwards: the snapshot is that of the match's end.
        """
        tree = self._tree
        tokens = as_tokens(tokens)
        if limit is not None:
            tokens = tokens[: check_integer("limit", limit, error=PoolError)]
        root = tree.root_of(namespace)
        path, kv_length = tree.walk(root, tokens)
        end, live, whole = 0, 0, True  # whole: no tombstone so far
        for node, count in path:
            whole = whole and (not tree.window or node.window_ids is not None)
            live = live + count if not tree.window or node.window_ids is not None else 0
            at_state = tree.states is None or (count == len(node) and node.snapshot is not None)
            if at_state and (whole or live >= tree.window):
                end = node.start + count
        last, count = [(root, 0), *(step for step in path if step[0].start < end)][-1]
        undo = Undo()
        try:
            if count < len(last):
                last = tree.split(undo, last, count)
            nodes = tree.touch(last)
            ids = np.concatenate([_NONE, *(n.ids for n in nodes)])
            return RadixMatch(last, ids, np.concatenate([_NONE, *(n.rows for n in nodes)]), last.snapshot, kv_length)
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
                twice, or is already the cache's; or a `batch` of an allocator is open. Nothing was changed.
        """
        tree = self._tree
        tree.check_no_batch("insert")
        tokens, ids = as_tokens(tokens), as_ids("insert: ids", ids).reshape(-1)
        rows = np.zeros(len(tokens), np.int32)
        if window_ids is not None:
            rows = as_ids("insert: window ids", window_ids).reshape(-1)
        if not len(ids) == len(rows) == len(tokens):
            raise PoolError(f"insert: {len(tokens)} tokens, {len(ids)} ids, {len(rows)} window ids")
        if window_ids is not None and not tree.window:
            raise PoolError("insert: this cache has no window")
        end = len(tokens) // tree.page * tree.page
        tree.check_snapshot(snapshot, end == len(tokens))
        live = int(np.flatnonzero(rows)[0]) if rows.any() else len(rows)
        if not rows[live:].all():
            raise PoolError("insert: window ids must be those of the last tokens, without gaps")
        live = -(-live // tree.page) * tree.page  # whole pages only

        root = tree.root_of(namespace)
        path, prefix = tree.walk(root, tokens[:end])
        own = np.concatenate([_NONE, *(n.ids[:count] for n, count in path)])
        foreign = np.concatenate([ids[:prefix][ids[:prefix] != own], ids[prefix:]])
        check_foreign("ids", foreign, tree.owned, tree.allocator)
        mine = rows[:prefix] != np.concatenate([_NONE, *(n.rows[:count] for n, count in path)])
        if tree.window_allocator is not None:
            foreign_rows = np.concatenate([rows[:prefix][mine], rows[prefix:]])
            foreign_rows = foreign_rows[foreign_rows != 0]
            check_foreign("window ids", foreign_rows, tree.owned_window, tree.window_allocator)

        undo = Undo()
        try:
            undo.call(tree.rebuild_queues)
            if end:
                undo.keep_key(tree.roots, namespace)
                tree.roots[namespace] = root
            last, count = [(root, 0), *path][-1]
            if count < len(last):
                last = tree.split(undo, last, count)
            revived = np.zeros(end, bool)
            for node in last.path():
                if node.window_ids is None and node.end > live and rows[node.start : node.end].any():
                    if node.start < live:
                        tree.split(undo, node, live - node.start)
                    revived[node.start : node.end] = True
                    tree.adopt_rows(undo, node, rows[node.start : node.end])
            for first, stop in tree.pieces(prefix, end, live):
                last = tree.attach(undo, last, first, tokens[first:stop], ids[first:stop].astype(np.int32))
                if tree.window and first >= live:
                    revived[first:stop] = True
                    tree.adopt_rows(undo, last, rows[first:stop])
            took = snapshot is not None and last.parent is not None and last.snapshot is None
            if took:
                undo.keep(last, "snapshot")
                undo.call(tree.owned_states.discard, snapshot)
                last.snapshot = snapshot
                tree.owned_states.add(snapshot)
            nodes = tree.touch(last)
            tree.leaves.push(last)
            tree.snapshots.push(last)
            kept = np.concatenate([ids[:prefix][ids[:prefix] != own], ids[end:]]).astype(np.int32)
            still = np.concatenate([mine & ~revived[:prefix], ~revived[prefix:], np.ones(len(rows) - end, bool)])
            kept_rows = rows[still & (rows != 0)].astype(np.int32)
            return Inserted(last, np.concatenate([_NONE, *(n.ids for n in nodes)]), kept, kept_rows, prefix, took)
        except BaseException:
            undo.put_back()
            raise

    def lock(self, node: RadixNode) -> Lock:
        """Keeps a node and all above it from eviction; of the window rows, those of the last `window` tokens."""
        tree = self._tree
        if not isinstance(node, RadixNode) or node.owner is not tree or not node.alive:
            raise PoolError("lock: the node has left the tree, or is another cache's")
        path, lock = node.path(), Lock(node, node.end)
        undo = Undo()
        try:
            undo.keep(tree, "protected")
            undo.call(tree.locks.discard, lock)
            for above in path:
                undo.keep(above, "refs", "window_refs")
                tree.protected += len(above) if above.refs == 0 else 0
                above.refs += 1
            for above in path:
                if node.end - lock.window_start >= tree.window:
                    break
                above.window_refs += 1
                lock.window_start = above.start
            tree.locks.add(lock)
            return lock
        except BaseException:
            undo.put_back()
            raise

    def unlock(self, lock: Lock) -> None:
        """Ends a lock. Raises `PoolError` if it has ended already."""
        tree = self._tree
        if not isinstance(lock, Lock) or lock not in tree.locks:
            raise PoolError("unlock: the lock has ended already, or is another cache's")
        undo = Undo()
        try:
            undo.call(tree.rebuild_queues)
            undo.keep(tree, "protected")
            undo.call(tree.locks.add, lock)
            tree.locks.remove(lock)
            for above in lock.node.path():
                undo.keep(above, "refs", "window_refs")
                above.refs -= 1
                above.window_refs -= above.start >= lock.window_start
                tree.protected -= len(above) if above.refs == 0 else 0
                for queue in (tree.leaves, tree.windows, tree.snapshots):
                    queue.push(above)
        except BaseException:
            undo.put_back()
            raise

    def evict(self, count: int) -> int:
        """Frees at least `count` tokens, or all that can be freed: whole leaves, least recently used first.

        What a leaf holds is freed with it. Returns how many tokens were freed. Raises `PoolError` within a `batch` of
        an allocator, as `evict_window` and `clear` do.
        """
        tree = self._tree
        tree.check_no_batch("evict")
        count, freed = check_integer("count", count, error=PoolError), 0
        undo = Undo()
        try:
            undo.call(tree.rebuild_queues)
            while freed < count and (node := tree.leaves.pop()) is not None:
                freed += len(node)
                tree.remove(undo, node)
            return freed
        except BaseException:
            undo.put_back()
            raise

    def evict_window(self, count: int) -> int:
        """Frees at least `count` window slots, or all it can; their nodes become tombstones. Returns how many."""
        tree = self._tree
        tree.check_no_batch("evict_window")
        count, freed = check_integer("count", count, error=PoolError), 0
        undo = Undo()
        try:
            undo.call(tree.rebuild_queues)
            while freed < count and (node := tree.windows.pop()) is not None:
                freed += len(node)
                tree.drop_rows(undo, node)
            return freed
        except BaseException:
            undo.put_back()
            raise

    def evict_snapshots(self, count: int) -> int:
        """Frees `count` track slots, or all that can be freed. Returns how many."""
        tree = self._tree
        count, freed = check_integer("count", count, error=PoolError), 0
        undo = Undo()
        try:
            undo.call(tree.rebuild_queues)
            while freed < count and (node := tree.snapshots.pop()) is not None:
                freed += 1
                tree.drop_snapshot(undo, node)
            return freed
        except BaseException:
            undo.put_back()
            raise

    def clear(self) -> None:
        """Forgets everything and gives all slots back. Raises `PoolError` while there are locks."""
        tree = self._tree
        tree.check_no_batch("clear")
        if tree.locks:
            raise PoolError(f"clear: {len(tree.locks)} locks are held")
        undo = Undo()
        try:
            undo.call(tree.rebuild_queues)
            undo.keep(tree, "roots", "locks", "owned_states", "total", "protected", "owned", "owned_window")
            for node in list(tree.nodes()):
                tree.give_back(undo, node)
            tree.begin()
            tree.tell(undo, "cleared", Tier.NONE, [(None, None)])
        except BaseException:
            undo.put_back()
            raise
