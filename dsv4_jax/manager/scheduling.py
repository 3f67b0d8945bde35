"""Which tokens of which requests a step computes: decodes first, then prefill chunks. Pure Python + numpy."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence

import numpy as np

from ..checks import INT32_MAX
from ..layout import CacheLayout
from .batch import Batch
from .newcomers import Newcomers, Room
from .request import Request
from .request_book import RequestBook
from .step_shape import StepShape

__all__ = ["Scheduled", "StepRoom", "room_of", "schedule"]

Scheduled = tuple[Request, int]  # a request, and how many of its tokens the step computes
_PLENTY = 1 << 60
_NOBODY = np.zeros(0, np.int64)
_MANY = 128  # requests from which on arrays are faster than a loop


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


def room_of(shape: StepShape, room: StepRoom, fits: StepShape, drafts: int) -> StepRoom:
    """What a step of this shape may use of `room` (tokens, sequences and blocks).

    `fits`: the shape that `StepShape.bound` makes for so many. `drafts`: `draft_tokens` of the layout.
    """
    sequences, tokens = min(room.sequences, shape.sequences), min(room.tokens, shape.tokens)
    return StepRoom(
        tokens,
        sequences,
        room.blocks,
        shape.table_entries,
        shape.slot_copies,
        shape.columns,
        min(
            shape.tokens if shape.history else 1 + drafts,
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
    book: RequestBook,
    last: Batch | None,
    max_chunk: int,
    next_stop: Callable[[Request, int, int], int],
    ahead_of: int = 0,
    newcomers: Newcomers | None = None,
) -> list[tuple[Request, int]]:
    """Tokens of the next step; see `KVCacheManager.schedule`.

    Args:
        requests: in the order in which they became live.
        room: that the step has.
        book: of the manager.
        last: the sequences of the step before, if they still are what they were then.
        next_stop: `(request, start, stop)`: where a chunk should end, for its state to be kept there.
        newcomers: matches requests again before their first chunk, and knows which of them wait for others.
        ahead_of: number of the step that is under way: requests whose next token it draws are offered that token, too.
    """
    scheduled: list[tuple[Request, int]] = []
    block = layout.block_tokens
    tokens, sequences, entries, copies, blocks = room.tokens, room.sequences, room.entries, room.copies, [*room.blocks]
    widest, chunk = min(room.columns, INT32_MAX) * block, min(max_chunk, room.chunk)
    lists = _Lists(layout, room.flushes, room.groups) if min(room.flushes, room.groups) < _PLENTY else None
    turns = _Turns.of(requests, book, last, ahead_of)
    prefills = turns.prefills
    plain = turns.take_plain(block, widest) if lists is None and len(turns.order) <= min(tokens, sequences) else 0
    tokens, sequences = tokens - plain, sequences - plain
    waits: dict[Request, Request] = {}  # who waits for whom
    served: set[Request] | None = None  # of whom tokens are scheduled, or who wait for such
    if newcomers is not None and prefills:
        prefills, waits = newcomers.arrange(prefills)
    for request, pending in (*turns.each(), *prefills):  # locals: hundreds of sequences pass here
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
            if served is None:
                served = {r for r, _ in turns.merged(scheduled)} if waits else set()
            if waits.get(request) in served:
                served.add(request)
                continue
            if request.last_step <= request.started:
                promised = [had - left for had, left in zip(newcomers.available, blocks, strict=True)]
                most = Room(room.blocks, min(room.entries, room.columns), room.copies)
                if not newcomers.begin(request, most, Room(blocks, entries, copies)) and (scheduled or plain):
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
    return turns.merged(scheduled) if plain else scheduled


@dataclasses.dataclass(slots=True)
class _Turns:
    """Who has tokens to compute: decodes by the turns they take, then all others.

    Of many requests this is found out for all at once, of a few one by one, which is faster.

    Attributes:
        order: of the decodes of many requests, as indices of `requests`.
        decodes: those that are looked at one by one: all, but for those that `take_plain` has taken.
        prefills: requests with several tokens to compute, and how many.
        rows: what the book counts of each request; None: they are few.
    """

    requests: Sequence[Request]
    order: np.ndarray
    prefills: list[Scheduled]
    rows: np.ndarray | None
    last: Batch | None
    decodes: list[Scheduled] = dataclasses.field(default_factory=list)
    same: bool = False  # whether they are those of the step before, in this order
    _plain: np.ndarray | None = None  # of the decodes in order: whether they are

    @classmethod
    def of(cls, requests: Sequence[Request], book: RequestBook, last: Batch | None, ahead_of: int) -> _Turns:
        if len(requests) < _MANY:
            pending = [len(request.ids) - request.num_cached for request in requests]
            if ahead_of:
                pending = [
                    1 if count < 1 and r.last_step == ahead_of > r.started else count
                    for r, count in zip(requests, pending, strict=True)
                ]
            decodes = [pair for pair in zip(requests, pending, strict=True) if pair[1] == 1]
            if len(decodes) > 1:
                decodes.sort(key=lambda pair: pair[0].last_step)
            prefills = [pair for pair in zip(requests, pending, strict=True) if pair[1] > 1]
            return cls(requests, _NOBODY, prefills, None, last, decodes)
        same = last is not None and len(last.ids) == len(last.requests) == len(requests)
        if last is not None and same and (same := all(map(operator.is_, last.requests, requests))):
            slots, ids = last.arrays[0], last.ids
        else:
            slots, ids = book.columns(requests)
        rows = book.counts.table[slots]
        counts = np.fromiter(map(len, ids), np.int64, len(ids)) - rows[:, 0]
        if ahead_of:
            counts[(counts < 1) & (rows[:, 4] == ahead_of) & (rows[:, 5] < ahead_of)] = 1
        ones = np.flatnonzero(counts == 1)
        turns = rows[ones, 4]
        if turns.size and turns.min() < turns.max():
            ones = ones[np.argsort(turns, kind="stable")]
        more = np.flatnonzero(counts > 1)
        prefills = [(requests[i], count) for i, count in zip(more.tolist(), counts[more].tolist(), strict=True)]
        return cls(requests, ones, prefills, rows, last, same=same)

    def take_plain(self, block: int, widest: int) -> int:
        """Takes the decodes within their last block, which need nothing: how many. There is room for all of them."""
        if self.rows is None:
            return 0
        rows = self.rows[self.order]
        within = rows[:, 0] < rows[:, 1] * block
        plain = within & (rows[:, 0] < np.minimum(rows[:, 6], widest))
        if not plain.all():
            here = plain | ~within  # the others have come to an end
            self.order, plain = self.order[here], plain[here]
        self._plain = plain
        self.decodes = [(self.requests[i], 1) for i in self.order[~plain].tolist()]
        return int(np.count_nonzero(plain))

    def each(self) -> list[Scheduled]:
        """The decodes one by one."""
        if self.rows is None or self._plain is not None:
            return self.decodes
        return [(self.requests[i], 1) for i in self.order.tolist()]

    def merged(self, scheduled: list[Scheduled]) -> list[Scheduled]:
        """These, which were looked at one by one, and those that `take_plain` has taken, in order."""
        if self._plain is None:
            return scheduled
        chosen = {request for request, _ in scheduled}
        others = np.flatnonzero(~self._plain).tolist()
        lost = [i for i, (request, _) in zip(others, self.decodes, strict=True) if request not in chosen]
        order = np.delete(self.order, lost) if lost else self.order
        return [*self._pairs(order), *scheduled[len(others) - len(lost) :]]

    def _pairs(self, order: np.ndarray) -> list[Scheduled]:
        """The decodes; those of the step before if they are the same."""
        count, last = len(order), self.last
        if last is not None and len(last.requests) >= count and (last.arrays[2][:count] == 1).all():
            # In the order of before, too, or looked at one by one.
            same = self.same and (order == np.arange(count)).all()
            if same or all(map(operator.is_, last.requests, map(self.requests.__getitem__, order.tolist()))):
                return last.scheduled[:count]
        return [(self.requests[i], 1) for i in order.tolist()]


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
