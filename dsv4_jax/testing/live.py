"""What of a cache a request can still see, and whether two caches have the same bytes there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..cache import KVCache
from ..layout import LeafSpec

__all__ = ["Held", "Live", "assert_same_bytes", "assert_same_cache", "assert_untouched", "live_bytes"]

Live = dict[str, list[np.ndarray]]


class Held(NamedTuple):
    """Where a request lies in a cache.

    Attributes:
        slot: of the request.
        length: tokens it holds.
        blocks: ids of its blocks, in the order of its tokens.
    """

    slot: int
    length: int
    blocks: Sequence[int]

    @classmethod
    def of(cls, request: Any) -> Held:
        """Reads the state of a manager's `Request`, all steps of which have run."""
        return cls(request.slot, request.num_cached, request.blocks)


def live_bytes(cache: KVCache, held: Held, *, window: int | None = None) -> Live:
    """All bytes that the next token of a request can see: pool name -> its parts [layers, rows, width].

    Rows are in the order of positions (or entries), so that two requests with the same tokens have the same view,
    whichever slots and blocks hold them. Window: the last `window` positions (by default `sliding_window` - 1, what
    the next token sees beside itself; of DSpark's stages one more, for all of a block is beside them). Entries and
    index keys: all completed ones. CSA state: the tokens of the unfinished entry and the `overlap_rows` before them, of
    which the next entry takes the first halves of kv and score: the others are zeros here. HCA state: the tokens of the
    unfinished entry (raw) or their softmax triple (online). Residual of MTP layers: that of the last token. A pool
    without rows yet has no parts, or empty ones.
    """
    layout, length = cache.layout, held.length
    schemas = {pool.pool: schema for schema in layout.schemas for pool in schema.pools}
    view: Live = {}
    for leaf in layout.leaves:
        if leaf.scope == "table":
            continue
        data, schema = _units(cache, leaf), schemas[leaf.pool]
        if leaf.scope == "block":
            entry = np.arange(length // schema.ratio)
            block = np.asarray(held.blocks, int)[entry // leaf.rows] if len(entry) else entry
            rows = data[:, block, entry % leaf.rows]
        else:
            if leaf.pool == schema.window.pool:
                seen = schema.swa_window_size - (leaf.pool != "draft")
                first = max(length - (seen if window is None else window), 0)
            elif schema.residual is not None:
                first = max(length - 1, 0)
            else:
                first = max(length // schema.ratio * schema.ratio - schema.overlap_rows, 0)
                if not schema.overlap_rows and layout.hca_state == "online" and first < length:
                    first = length - 1
            positions = np.arange(first, length)
            rows = data[:, held.slot, positions % leaf.rows]
            if leaf.pool != schema.window.pool and schema.overlap_rows:
                rows = _without_dead_halves(rows, positions < length // schema.ratio * schema.ratio)
        view.setdefault(leaf.pool, []).append(rows)
    return view


def assert_same_cache(cache: KVCache, held: Held, other: KVCache, other_held: Held, *, context: str = "") -> None:
    """Two requests have the same bytes wherever their next token looks, in one cache or in two.

    Such as a request of a busy server, and the same tokens in a cold cache of their own.

    Raises:
        AssertionError: names the pool, its part, and the first byte that differs.
    """
    if held.length != other_held.length:
        raise AssertionError(f"{_prefix(context)}{held.length} tokens, expected {other_held.length}")
    assert_same_bytes(live_bytes(cache, held), live_bytes(other, other_held), context=context)


def assert_same_bytes(actual: Live, expected: Live, context: str = "") -> None:
    """Asserts equal bytes, part by part, of two results of `live_bytes`."""
    context = _prefix(context)
    if actual.keys() != expected.keys():
        raise AssertionError(f"{context}pools {sorted(actual)}, expected {sorted(expected)}")
    for pool in actual:
        if not expected[pool]:  # no entry yet
            if any(part.size for part in actual[pool]):
                raise AssertionError(f"{context}{pool} has rows, expected none")
            continue
        for i, (a, e) in enumerate(zip(actual[pool], expected[pool], strict=True)):
            where = f"{context}{pool} part {i}"
            if a.dtype != e.dtype:
                raise AssertionError(f"{where} is {a.dtype}, expected {e.dtype}")
            if e.size == 0:
                if a.size:
                    raise AssertionError(f"{where} has {a.shape}, expected no rows")
                continue
            if a.shape != e.shape:
                raise AssertionError(f"{where} has {a.shape}, expected {e.shape}")
            same = np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(e).view(np.uint8)
            if not same.all():
                raise AssertionError(
                    f"{where}: {(~same).sum()} of {same.size} bytes differ, first at [layer, row, byte] "
                    f"{np.argwhere(~same)[0].tolist()}: {a[~(a == e)][:4]} != {e[~(a == e)][:4]}"
                )


def assert_untouched(cache: KVCache, slots: set[int], blocks: set[int]) -> None:
    """Every slot and block that was never handed out, the null ones first of all, is still all zeros."""
    for leaf in cache.layout.leaves:
        if leaf.scope == "table":
            table = np.asarray(cache.block_table)
            if table[[s for s in range(len(table)) if s not in slots]].any():
                raise AssertionError("a free slot's table changed")
            continue
        data = _units(cache, leaf)
        used = blocks if leaf.scope == "block" else slots
        free = [u for u in range(data.shape[1]) if u not in used - {0}]
        touched = [u for u in free if data[:, u].view(np.uint8).any()]
        if touched:
            raise AssertionError(f"{leaf.name}: a free or null unit changed: {leaf.scope} {touched[0]}")


def _units(cache: KVCache, leaf: LeafSpec) -> np.ndarray:
    """Returns a leaf as [layers, units, rows, width]."""
    return np.asarray(cache.arrays[leaf.name]).reshape(leaf.layers, -1, leaf.rows, leaf.width)


def _without_dead_halves(rows: np.ndarray, finished: np.ndarray) -> np.ndarray:
    """[layers, rows, kv 2e | score 2e] with the second halves, which their own entry has taken, zero where finished."""
    halves = np.array(rows).reshape(*rows.shape[:2], 4, rows.shape[2] // 4)
    halves[:, finished, 1::2] = 0
    return halves.reshape(rows.shape)


def _prefix(context: str) -> str:
    return f"{context}: " if context else ""
