"""ChunkCache: the prefix cache that caches nothing, to switch the real one off. NumPy, no jax."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from .radix_node import Inserted, Lock, RadixMatch, RadixNode
from .spec import as_ids

__all__ = ["ChunkCache"]

_NONE = np.zeros(0, np.int32)


class ChunkCache:
    """The interface of `RadixCache` without a cache: every match is empty and every slot stays the caller's."""

    total_size = protected_size = evictable_size = 0

    def __init__(self) -> None:
        self._root = RadixNode(0, None, 0, np.zeros(0, np.int64), _NONE)

    def match(self, tokens: Any, namespace: Hashable = None, *, limit: int | None = None) -> RadixMatch:
        """Finds nothing."""
        return RadixMatch(self._root, _NONE, _NONE, None, 0)

    def insert(
        self, tokens: Any, ids: Any, namespace: Hashable = None, *, window_ids: Any = None, snapshot: int | None = None
    ) -> Inserted:
        """Takes nothing over."""
        kept = as_ids("insert: ids", ids).reshape(-1).astype(np.int32)
        rows = as_ids("insert: window ids", [] if window_ids is None else window_ids).reshape(-1).astype(np.int32)
        return Inserted(self._root, _NONE, kept, rows[rows != 0], 0, False)

    def lock(self, node: RadixNode) -> Lock:
        return Lock(node, 0)

    def unlock(self, lock: Lock) -> None: ...

    def evict(self, count: int) -> int:
        return 0

    evict_window = evict_snapshots = evict

    def clear(self) -> None: ...

    def check_integrity(self) -> None: ...
