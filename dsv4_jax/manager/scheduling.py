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
    waiting = [(request, request.num_pending) for request in requests]
    decodes = sorted([pair for pair in waiting if pair[1] == 1], key=_last_step)
    prefills = [pair for pair in waiting if pair[1] > 1]
    feeds: list[tuple[Request, int]] = []
    block = layout.block_tokens
    for request, pending in (*decodes, *prefills):
        if not room.tokens or not room.rows:
            break
        start, held, tabled = request.num_cached, len(request.blocks), request.num_tabled
        restores = request.restores is not None
        reach = min(held + room.blocks, tabled + room.entries) * block
        stop = min(start + min(pending, room.tokens, max_chunk), reach)
        if stop > start and restores <= room.copies:
            if pending > 1:
                stop = next_stop(request, start, stop)
            feeds.append((request, stop - start))
            room.tokens -= stop - start
            room.rows -= 1
            blocks = -(-stop // block)
            if blocks > tabled:
                room.entries -= blocks - tabled
                room.blocks -= max(blocks - held, 0)
            if restores:
                room.copies -= 1
        elif pending > 1:
            break  # chunks are first come, first served: none overtakes one that lacks blocks
    return feeds


def _last_step(pair: tuple[Request, int]) -> int:
    return pair[0].last_step
