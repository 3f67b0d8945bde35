"""Which requests a step feeds, and how much of each: decodes first, then prefill chunks. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import CacheLayout
from .request import Request

__all__ = ["Feed", "schedule"]

Feed = tuple[Request | int, int]  # a request (or its slot), and how many of its tokens to feed


def schedule(
    layout: CacheLayout, requests: Sequence[Request], free_blocks: int, *, budget: int, max_rows: int, max_chunk: int
) -> list[tuple[Request, int]]:
    """Feeds of the next step; see `KVCacheManager.schedule`. `requests` stand in admission order."""
    decodes = sorted((r for r in requests if r.num_pending == 1), key=lambda r: r.last_step)
    prefills = [r for r in requests if r.num_pending > 1]
    feeds: list[tuple[Request, int]] = []
    for request in (*decodes, *prefills):
        if not budget or len(feeds) == max_rows:
            break
        room = (len(request.blocks) + free_blocks) * layout.block_tokens - request.num_cached
        count = min(request.num_pending, budget, max_chunk, room)
        if count:
            feeds.append((request, count))
            budget -= count
            free_blocks -= max(layout.blocks_for(request.num_cached + count) - len(request.blocks), 0)
        elif request.num_pending > 1:
            break  # chunks are first come, first served: none overtakes one that lacks blocks
    return feeds
