"""Numbers about a manager: where everything is, and what a load would need. Pure Python."""

from __future__ import annotations

from ..checks import check_integer
from ..errors import PlanError
from ..layout import CacheLayout, CacheSize
from ..records import page_bytes
from .metrics import HandoffStats, ManagerStats, PoolUse, collect_stats, pool_use
from .prefix.node import T
from .request_book import RequestBook
from .tiered_cache import TieredCache

__all__ = ["collect", "compute_block_budget"]

_NO_HANDOFFS = HandoffStats()


def collect(
    layout: CacheLayout, size: CacheSize, book: RequestBook, cache: TieredCache, handoffs: HandoffStats = _NO_HANDOFFS
) -> ManagerStats:
    """Returns the numbers now. Raises `IntegrityError` if a unit is unaccounted for."""
    live, waiting = book.requests, book.preempted
    late_blocks, late_slots = cache.copies.late
    parked = [request.parked for request in waiting if request.parked is not None]
    blocks, in_slots = cache.blocks, 0 if cache.snapshot_blocks else cache.tree.snapshots.count(T.DEVICE)
    states = cache.tree.snapshots.count(T.HOST) * cache.snapshot_pages
    pools: dict[str, PoolUse] = {
        "slot": pool_use(
            cache.slots,
            private=len(live) + len(late_slots),
            cached=in_slots,
            evictable=in_slots,
            unit_bytes=layout.bytes_per_slot,
        )
    }
    return ManagerStats(
        blocks.num_total,
        blocks.num_free,
        blocks.num_held,
        sum(len(r.blocks) - layout.blocks_for(r.num_cached) for r in live),
        size.num_slots,
        size.num_slots - len(live),
        len(live),
        sum(r.num_cached for r in live),
        book.generation,
        len(waiting),
        collect_stats(
            cache.tree,
            blocks,
            cache.pages if cache.pages.num_total else None,
            others=pools,
            private=sum(len(r.blocks) - r.num_shared for r in live) + len(late_blocks),
            private_host=sum(len(p.blocks) + len(p.state) for p in parked)
            + sum(map(len, cache.fetching))
            + len(cache.reading)
            + len(cache.landed),
            block_bytes=layout.bytes_per_block,
            page_bytes=page_bytes(layout),
            state_pages=states,
            state_blocks=cache.tree.snapshots.count(T.DEVICE) * cache.snapshot_blocks,
            admission_failures=cache.failures,
            generation=book.generation,
        ),
        handoffs,
    )


def compute_block_budget(layout: CacheLayout, max_context: int, max_requests: int) -> dict[str, int]:
    """What `max_requests` requests of `max_context` tokens each need.

    Returns:
        "blocks" and "slots" to allocate, the bytes of every pool by its name ("swa", "csa",
        "hca", "index", "csa_state", ..., null units included) and "total", their sum.
    """
    context, requests = (
        check_integer("max_context", max_context, 1, error=PlanError),
        check_integer("max_requests", max_requests, 1, error=PlanError),
    )
    columns = layout.blocks_for(context)
    size = CacheSize(columns * requests, requests, columns)
    budget = {"blocks": size.num_blocks, "slots": requests} | dict.fromkeys(("csa", "hca", "index"), 0)
    for leaf in layout.leaves:
        budget[leaf.pool] = budget.get(leaf.pool, 0) + layout.leaf_bytes(leaf, size)
    return budget | {"total": layout.total_bytes(size)}
