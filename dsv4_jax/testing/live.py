"""What of a device cache a request can still see: the canonical view all byte comparisons use."""

from __future__ import annotations

import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.layout import CacheLayout


def units(cache: KVCache, layout: CacheLayout, leaf) -> np.ndarray:
    """A leaf as [layers, units, rows, width]."""
    array = np.asarray(cache.arrays[leaf.name])
    return array.reshape(leaf.layers, -1, leaf.rows, leaf.width)


def live_bytes(
    cache: KVCache, layout: CacheLayout, slot: int, length: int, blocks: list[int], *, window: int | None = None
) -> dict[str, list[np.ndarray]]:
    """Pool name -> its parts [layers, rows, width], rows in position (or entry) order.

    Window: the last `window` positions (by default `sliding_window` - 1, what the next token sees
    beside itself). Entries and index keys: all completed ones,
    through `blocks`. CSA state: the tokens of the unfinished entry and the `ratio` before them.
    HCA state: the tokens of the unfinished entry (raw) or their softmax triple (online).
    """
    cfg = layout.cfg
    window = cfg.sliding_window - 1 if window is None else window
    view: dict[str, list[np.ndarray]] = {}
    for leaf in layout.leaves:
        if leaf.scope == "table":
            continue
        data = units(cache, layout, leaf)
        if leaf.scope == "block":
            ratio = cfg.hca_ratio if leaf.pool == "hca" else cfg.csa_ratio
            entry = np.arange(length // ratio)
            block = np.asarray(blocks, int)[entry // leaf.rows] if len(entry) else entry
            rows = data[:, block, entry % leaf.rows]
        else:
            if leaf.pool == "swa":
                first = max(length - window, 0)
            elif leaf.pool == "hca_state":
                first = length // cfg.hca_ratio * cfg.hca_ratio
                if layout.hca_state == "online" and first < length:
                    first = length - 1
            else:
                first = max(length // cfg.csa_ratio * cfg.csa_ratio - cfg.csa_ratio, 0)
            rows = data[:, slot, np.arange(first, length) % leaf.rows]
        view.setdefault(leaf.pool, []).append(rows)
    return view


def assert_same(actual: dict[str, list[np.ndarray]], expected: dict[str, list[np.ndarray]], context: str = "") -> None:
    """Equal bytes, part by part."""
    assert actual.keys() == expected.keys()
    for pool in actual:
        if not expected[pool]:  # no entry yet
            assert all(part.size == 0 for part in actual[pool]), f"{context}: {pool} has rows, expected none"
            continue
        for i, (a, e) in enumerate(zip(actual[pool], expected[pool], strict=True)):
            assert a.dtype == e.dtype, (pool, i, a.dtype, e.dtype)
            if e.size == 0:
                assert a.size == 0, f"{context}: {pool} part {i} has {a.shape}, expected no rows"
                continue
            assert a.shape == e.shape, f"{context}: {pool} part {i} has {a.shape}, expected {e.shape}"
            same = np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(e).view(np.uint8)
            assert same.all(), (
                f"{context}: {pool} part {i}: {(~same).sum()} of {same.size} bytes differ, "
                f"first at {np.argwhere(~same)[0]}: {a[~(a == e)][:4]} != {e[~(a == e)][:4]}"
            )


def assert_untouched(cache: KVCache, layout: CacheLayout, slots: set[int], blocks: set[int]) -> None:
    """Every slot and block that was never handed out, the null ones first of all, is still all zeros."""
    for leaf in layout.leaves:
        if leaf.scope == "table":
            table = np.asarray(cache.block_table)
            assert not table[[s for s in range(len(table)) if s not in slots]].any(), "a free slot's table changed"
            continue
        data = units(cache, layout, leaf)
        used = blocks if leaf.scope == "block" else slots
        assert 0 not in used
        free = [u for u in range(data.shape[1]) if u not in used]
        assert not data[:, free].view(np.uint8).any(), f"{leaf.name}: a free or null unit changed"
