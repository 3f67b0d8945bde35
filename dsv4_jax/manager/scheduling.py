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
    """What a step may use.

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
        room: that the step has.
        next_stop: `(request, start, stop)`: where a chunk should end, for its state to be kept there.
    """
    waiting = [(request, len(request.tokens) - request.num_cached) for request in requests]
    decodes = sorted([pair for pair in waiting if pair[1] == 1], key=_last_step)
    prefills = [pair for pair in waiting if pair[1] > 1]
    feeds: list[tuple[Request, int]] = []
    block = layout.block_tokens
    tokens, rows, blocks, entries, copies = dataclasses.astuple(room)  # locals: hundreds of rows pass here
    for request, pending in (*decodes, *prefills):
        if not tokens or not rows:
            break
        start, held, tabled = request.num_cached, len(request.blocks), request.num_tabled
        restores = request.restores is not None
        reach = min(held + blocks, tabled + entries) * block
        stop = min(start + min(pending, tokens, max_chunk), reach)
        if stop > start and restores <= copies:
            if pending > 1:
                stop = next_stop(request, start, stop)
            feeds.append((request, stop - start))
            tokens -= stop - start
            rows -= 1
            copies -= restores
            needed = -(-stop // block)
            if needed > tabled:
                entries -= needed - tabled
                blocks -= max(needed - held, 0)
        elif pending > 1:
            break  # chunks are first come, first served: none overtakes one that lacks blocks
    return feeds


def _last_step(pair: tuple[Request, int]) -> int:
    return pair[0].last_step
