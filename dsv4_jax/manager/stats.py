"""Numbers about the pools: where everything is, and what a load would need. Pure Python."""

from __future__ import annotations

from typing import NamedTuple

from ..layout import CacheLayout, CacheSize
from .allocator import as_count

__all__ = ["ManagerStats", "compute_block_budget"]


class ManagerStats(NamedTuple):
    """Where everything is. `blocks_ahead` are held by requests but lie beyond their cached tokens."""

    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_ahead: int
    slots_total: int
    slots_free: int
    slots_used: int
    tokens_cached: int
    generation: int


def compute_block_budget(layout: CacheLayout, max_context: int, max_requests: int) -> dict[str, int]:
    """What `max_requests` requests of `max_context` tokens each need.

    Returns:
        "blocks" and "slots" to allocate, the bytes of every pool by its name ("swa", "csa",
        "hca", "index", "csa_state", ..., null units included) and "total", their sum.
    """
    context, requests = as_count("max_context", max_context, 1), as_count("max_requests", max_requests, 1)
    columns = layout.blocks_for(context)
    size = CacheSize(columns * requests, requests, columns)
    budget = {"blocks": size.num_blocks, "slots": requests} | dict.fromkeys(("csa", "hca", "index"), 0)
    for leaf in layout.leaves:
        budget[leaf.pool] = budget.get(leaf.pool, 0) + layout.leaf_bytes(leaf, size)
    return budget | {"total": layout.total_bytes(size)}
