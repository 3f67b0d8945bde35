"""Which tokens of which requests a step computes: decodes first, then prefill chunks. Pure Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ..layout import CacheLayout
from .newcomers import Newcomers, Room
from .request import Request
from .step_shape import StepShape

__all__ = ["Scheduled", "StepRoom", "room_of", "schedule"]

Scheduled = tuple[Request, int]  # a request, and how many of its tokens the step computes
_PLENTY = 1 << 60


@dataclasses.dataclass(slots=True)
class StepRoom:
    """What a step may still use.

    Attributes:
        tokens, sequences: of the step.
        blocks: available ones, of each rank that blocks are dealt out to.
        entries: block-table entries the plan can carry.
        copies: slot copies it can carry: one for every request that starts from a snapshot.
        columns: of the block table that it can see.
        chunk: most tokens of one request.
        flushes, groups: as in `StepShape`.
    """

    tokens: int
    sequences: int
    blocks: list[int]
    entries: int = _PLENTY
    copies: int = _PLENTY
    columns: int = _PLENTY
    chunk: int = _PLENTY
    flushes: int = _PLENTY
    groups: int = _PLENTY


def room_of(layout: CacheLayout, shape: StepShape, room: StepRoom) -> StepRoom:
    """What a step of this shape may use of `room` (tokens, sequences and blocks)."""
    sequences, tokens = min(room.sequences, shape.sequences), min(room.tokens, shape.tokens)
    fits = StepShape.bound(layout, max(sequences, 1), max(tokens, 1), columns=1)
    return StepRoom(
        tokens,
        sequences,
        room.blocks,
        shape.table_entries,
        shape.slot_copies,
        shape.columns,
        min(
            shape.tokens if shape.history else 1 + layout.draft_tokens,
            _PLENTY if shape.group_length >= fits.group_length else shape.group_length,
        ),
        # Every step of so many sequences and tokens has room for them in a shape made by `bound`: nothing to count.
        _PLENTY if shape.flushes >= fits.flushes else shape.flushes,
        _PLENTY if shape.groups >= fits.groups else shape.groups,
    )


def schedule(
    layout: CacheLayout,
    requests: Sequence[Request],
    room: StepRoom,
    *,
    max_chunk: int,
    next_stop: Callable[[Request, int, int], int],
    ahead_of: int = 0,
    newcomers: Newcomers | None = None,
) -> list[tuple[Request, int]]:
    """Tokens of the next step; see `KVCacheManager.schedule`.

    Args:
        requests: in the order in which they became live.
        room: that the step has.
        next_stop: `(request, start, stop)`: where a chunk should end, for its state to be kept there.
        newcomers: matches requests again before their first chunk, and knows which of them wait for others.
        ahead_of: number of the step that is under way: requests whose next token it draws are offered that token, too.
    """
    waiting = [(request, len(request.ids) - request.num_cached) for request in requests]
    if ahead_of:
        waiting = [(r, 1 if pending < 1 and r.last_step == ahead_of > r.started else pending) for r, pending in waiting]
    decodes = sorted([pair for pair in waiting if pair[1] == 1], key=lambda pair: pair[0].last_step)
    prefills = [pair for pair in waiting if pair[1] > 1]
    scheduled: list[tuple[Request, int]] = []
    block = layout.block_tokens
    tokens, sequences, entries, copies, blocks = room.tokens, room.sequences, room.entries, room.copies, [*room.blocks]
    widest, chunk = room.columns * block, min(max_chunk, room.chunk)
    lists = _Lists(layout, room.flushes, room.groups) if min(room.flushes, room.groups) < _PLENTY else None
    waits: dict[Request, Request] = {}  # who waits for whom
    served: set[Request] | None = None  # of whom tokens are scheduled, or who wait for such
    if newcomers is not None and prefills:
        prefills, waits = newcomers.arrange(prefills)
    for request, pending in (*decodes, *prefills):  # locals: hundreds of sequences pass here
        if not tokens or not sequences:
            break
        start, tabled = request.num_cached, request.num_tabled
        if pending == 1 and start < tabled * block and request.restores is None and lists is None:
            if start < request.max_tokens and start < widest:  # what nearly all are: a decode within its last block
                scheduled.append((request, 1))
                tokens -= 1
                sequences -= 1
            continue
        if newcomers is not None and pending > 1:
            served = {r for r, _ in scheduled} if served is None else served
            if waits.get(request) in served:
                served.add(request)
                continue
            if request.last_step <= request.started:
                promised = [had - left for had, left in zip(newcomers.available, blocks, strict=True)]
                most = Room(room.blocks, min(room.entries, room.columns), room.copies)
                if not newcomers.begin(request, most, Room(blocks, entries, copies)) and scheduled:
                    break  # it finds more than there is room for now: it comes next
                if request.num_cached != start:
                    blocks = [has - gone for has, gone in zip(newcomers.available, promised, strict=True)]
                    if newcomers.waits_for(request) in served:  # for the next part of its prompt
                        served.add(request)
                        continue
                    start, pending = request.num_cached, len(request.ids) - request.num_cached
        held, limit = len(request.blocks), min(request.max_tokens, widest)
        if start >= limit:
            continue  # no step of this kind will ever compute it: it holds nobody back
        restores = request.restores is not None
        reach = min(_reach(held, blocks), tabled + entries) * block
        stop = min(start + min(pending, tokens, chunk), reach, limit)
        if lists is not None:
            stop = lists.reach(start, stop)
        if stop > start and restores <= copies:
            if pending > 1:
                stop = next_stop(request, start, stop)
            scheduled.append((request, stop - start))
            tokens -= stop - start
            sequences -= 1
            copies -= restores or (copies > 0 and start in request.wanted)  # whose state is to be kept
            if served is not None:
                served.add(request)
            needed = -(-stop // block)
            if needed > tabled:
                entries -= needed - tabled
                for place in range(held, needed):
                    blocks[place % len(blocks)] -= 1
            if lists is not None:
                lists.take(start, stop)
        elif pending > 1:
            break  # chunks are first come, first served: none overtakes one that lacks blocks
    return scheduled


def _reach(held: int, blocks: Sequence[int]) -> int:
    """How many blocks a request that holds so many can have: up to the first place whose rank has none left."""
    ranks = len(blocks)
    return min(held + (rank - held) % ranks + free * ranks for rank, free in enumerate(blocks))


class _Lists:
    """Room in the lists of a plan whose length depends on where a chunk begins and ends."""

    def __init__(self, layout: CacheLayout, flushes: int, groups: int):
        self._csa, self._hca = layout.flush_ratio, layout.group_ratio
        self._flushes, self._groups = flushes, groups

    def reach(self, start: int, stop: int) -> int:
        """How far a chunk from `start` may go, at most to `stop`."""
        if not self._flushes or not self._groups:  # a decode is listed as a flush wherever it stands
            return start
        flushes = (start // self._csa + self._flushes + 1) * self._csa - 1
        return min(stop, flushes, (start // self._hca + self._groups) * self._hca)

    def take(self, start: int, stop: int) -> None:
        self._flushes -= max(stop // self._csa - start // self._csa, 1)
        self._groups -= (stop - 1) // self._hca - start // self._hca + 1
