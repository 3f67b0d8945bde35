"""Which requests a step feeds, and how much of each: decodes first, then prefill chunks. Pure Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ..layout import CacheLayout
from .request import Request

__all__ = ["Feed", "Room", "schedule"]

Feed = tuple[Request | int, int]  # a request (or its slot), and how many of its tokens to feed
_PLENTY = 1 << 60


@dataclasses.dataclass(slots=True)
class Room:
    """What a step has left.

    Attributes:
        tokens, rows: of the step.
        blocks: that can be had.
        entries: block-table entries the plan can carry.
        copies: slot copies it can carry: one for every request that starts from a snapshot.
    """

    tokens: int
    rows: int
    blocks: int
    entries: int = _PLENTY
    copies: int = _PLENTY


def schedule(
    layout: CacheLayout,
    requests: Sequence[Request],
    room: Room,
    *,
    max_chunk: int,
    next_stop: Callable[[Request, int, int], int],
) -> list[tuple[Request, int]]:
    """Feeds of the next step; see `KVCacheManager.schedule`.

    Args:
        requests: in the order in which they became live.
        room: used up.
        next_stop: `(request, start, stop)`: where a chunk should end, for its state to be kept there.
    """
    decodes = sorted((r for r in requests if r.num_pending == 1), key=lambda r: r.last_step)
    prefills = [r for r in requests if r.num_pending > 1]
    feeds: list[tuple[Request, int]] = []
    for request in (*decodes, *prefills):
        if not room.tokens or not room.rows:
            break
        start, held = request.num_cached, len(request.blocks)
        copies = request.restores is not None
        reach = min(held + room.blocks, request.num_tabled + room.entries) * layout.block_tokens
        stop = min(start + min(request.num_pending, room.tokens, max_chunk), reach)
        if stop > start and copies <= room.copies:
            if request.num_pending > 1:
                stop = next_stop(request, start, stop)
            feeds.append((request, stop - start))
            blocks = layout.blocks_for(stop)
            room.tokens -= stop - start
            room.rows -= 1
            room.blocks -= max(blocks - held, 0)
            room.entries -= max(blocks - request.num_tabled, 0)
            room.copies -= copies
        elif request.num_pending > 1:
            break  # chunks are first come, first served: none overtakes one that lacks blocks
    return feeds
