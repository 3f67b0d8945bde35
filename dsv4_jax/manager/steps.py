"""Steps of live requests: which tokens the next one computes, what its plan carries, what of it is kept afterwards.

Every call is given what the facade has checked but for the requests named. What may be refused is refused before
anything changes. Pure Python + numpy.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from ..checks import INT32_MAX, check_integer, shown
from ..errors import ContextLimitError, PlanError, RequestError
from ..layout import CacheLayout, CacheSize
from ..plan import CacheFacts, StepPlan
from .batch import Batch
from .newcomers import Newcomers
from .planning import build_plan, check_extras, next_sequences, with_extras
from .prefix.token_ids import token_ids
from .publishing import Publisher, Save
from .request import Request
from .request_book import RequestBook
from .scheduling import Scheduled, StepRoom, room_of, schedule
from .step_shape import StepShape, StepTokens
from .tiered_cache import TieredCache
from .transfers import Transfers

__all__ = ["Steps"]


class Steps:
    """Schedules and plans the steps of a manager, and takes their outcome.

    Attributes:
        size: of the cache that is handed out.
        arrays: size of the cache that the plans are made for.
        num_planned: steps planned so far.
        transfers: what must run before the step planned last, until it is taken.
        newcomers: the requests that no step has begun.
    """

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        arrays: CacheSize,
        book: RequestBook,
        cache: TieredCache,
        publisher: Publisher,
    ):
        self.size, self.arrays = size, arrays
        self.num_planned = 0
        self.transfers = Transfers()
        self._on_old_arrays = 0  # stages of the queue that belong before the last resize
        self._layout, self._book, self._cache, self._publisher = layout, book, cache, publisher
        self._last: Batch | None = None  # of the step planned last
        self._sound: StepShape | None = None  # the shape that was checked last
        self._room: tuple[tuple, StepShape] | None = None  # for what the last shape was that `room_of` compared with
        self.newcomers = Newcomers(layout, book, cache, publisher)
        book.resize(size.num_slots + size.num_snapshots)

    def forget_batch(self) -> None:
        """What a live request holds, or how long it is, was changed otherwise than by a step."""
        self._last = None

    @property
    def _batch(self) -> Batch | None:
        """The sequences of the step planned last, unless somebody has asked for lists of their ids since."""
        last = self._last
        return last if last is not None and last.listed == self._book.edits.listed else None

    def resize(self, size: CacheSize) -> None:
        """Plans are made for a cache of this size from now on."""
        self.size = self.arrays = size
        self._sound = None
        self._book.resize(size.num_slots + size.num_snapshots)
        self.forget_batch()

    def leave_arrays(self) -> None:
        """The device holds nothing any more once the copies asked for so far have run, and its arrays are given up."""
        self.drain()
        self._on_old_arrays = self._cache.transfers.asked

    def drain(self) -> None:
        """The copies asked for so far must run before the step planned last."""
        self.transfers = self._cache.transfers.drain()

    def check_taken(self) -> None:
        """Raises `PlanError` unless the transfers of the step planned last were taken."""
        if self.transfers.has_own:
            raise PlanError("the transfers of the step before were not taken (see take_transfers)")

    def check_moved(self) -> None:
        """Raises `PlanError` unless what a resize or a sleep has moved off the device is off it."""
        if not self._cache.transfers.have_run(self._on_old_arrays):
            raise PlanError(
                "transfers to the host, of before the arrays were given up, did not run: run them on the old arrays, "
                "or reset() if these are lost"
            )

    def check_shape(self, shape: StepShape | None) -> None:
        """Raises `PlanError` unless a shape of counts with no more columns than the block table, or None."""
        if shape is None or shape is self._sound:
            return
        if not isinstance(shape, StepShape):
            raise PlanError(f"shape must be a StepShape or None, got {type(shape).__name__}")
        for name, value in vars(shape).items():
            if name != "history" and (type(value) is not int or not 0 <= value <= INT32_MAX):
                check_integer(f"the shape's {name}", value, 0, INT32_MAX, error=PlanError)
        if shape.columns > self.size.max_blocks_per_request:
            raise PlanError(f"columns={shape.columns}: the table has {self.size.max_blocks_per_request}")
        self._sound = shape

    @property
    def pool_limit(self) -> int:
        """Tokens of one request that all blocks together hold."""
        return self.size.total_blocks * self._layout.block_tokens

    def check_pool(self, name: object, tokens: int, size: CacheSize | None = None) -> None:
        """Raises `ContextLimitError` if all blocks (of a cache of this size) do not hold so many tokens of one request.

        Then no preemption and no release of others would help, as `OutOfBlocksError` has it.
        """
        blocks = (size or self.size).total_blocks
        if self._layout.blocks_for(tokens) > blocks:
            limit = blocks * self._layout.block_tokens
            raise ContextLimitError(name, tokens, limit, f"all {blocks} blocks of the cache, a limit")

    # Before a step

    def reserve(self, request: Request, tokens: int) -> None:
        """Takes the blocks of a request's first `tokens` tokens now. See `KVCacheManager.reserve`."""
        if tokens > request.max_tokens:
            raise ContextLimitError(request.id, tokens, request.max_tokens)
        self.check_pool(request.id, tokens)
        request.blocks += self._cache.acquire_blocks(range(len(request.blocks), self._layout.blocks_for(tokens)))
        self.forget_batch()
        request.reserved = max(request.reserved, tokens)

    def schedule(
        self,
        requests: Sequence[Request],
        room: tuple[int, int],
        max_chunk: int,
        shape: StepShape | None,
        ahead: bool,
    ) -> list[tuple[Request, int]]:
        """Does what `KVCacheManager.schedule` says, within `room`."""
        self._publisher.commit()  # now, as `plan` would: blocks that turn out to be shared need table entries again
        free = StepRoom(*room, self._cache.available_on)
        if shape is not None:
            copies = self._cache.copies
            free = room_of(shape, free, self._least(shape, *room), self._layout.draft_tokens)
            free.copies -= len(copies.slots)
            if free.copies < 0 or shape.block_copies < len(copies.blocks):
                return []  # no step of this shape can carry the copies that forks wait for
        chosen = schedule(
            self._layout,
            requests,
            free,
            book=self._book,
            last=self._batch,
            max_chunk=max_chunk,
            next_stop=self._publisher.next_stop,
            ahead_of=self.num_planned if ahead else 0,
            newcomers=self.newcomers.at(self.num_planned, self.size.num_slots) if self._cache.caching else None,
        )
        if self.newcomers.began:
            self.forget_batch()
        if not chosen:
            for request in requests:  # one that has all blocks, and tokens that it may still compute
                if self.pool_limit <= request.num_cached < min(len(request.ids), request.max_tokens):
                    self.check_pool(request.id, request.num_cached + 1)
        return chosen

    def _least(self, shape: StepShape, tokens: int, sequences: int) -> StepShape:
        """The smallest shape of as many sequences and tokens as such a step may have."""
        key = (max(min(sequences, shape.sequences), 1), max(min(tokens, shape.tokens), 1))
        if self._room is None or self._room[0] != key:
            self._room = key, StepShape.bound(self._layout, *key, columns=1)
        return self._room[1]

    # Planning

    def plan(self, scheduled: list[Scheduled], steps: int, shape: StepShape | None, ahead: bool = False) -> StepPlan:
        """Does what `KVCacheManager.plan_step` says."""
        layout, cache, publisher = self._layout, self._cache, self._publisher
        self.check_taken()
        self.check_moved()
        self.check_shape(shape)
        batch = self._batch
        again = batch is not None and scheduled == batch.scheduled and (steps == 1 or batch.longest <= 1)
        if again and steps == 1 and batch.quiet > 0 and self._is_quiet(batch, shape):
            return self._plan_quietly(batch)
        requests, counts = (batch.requests, batch.counts) if again else self._checked(scheduled, steps, ahead)
        most = 1 + layout.draft_tokens  # tokens of a step that may be cut
        opened = [r for r in requests if r.leaves_open(most)] if ahead and most > 1 else ()
        self._book.settle_changes(requests)
        if not again or publisher.replaced:
            batch = Batch.of(requests, counts, self._book.counts.table, self._book.edits.listed)
        # First what may be refused: nothing changes before it is certain that all of the rest succeeds.
        freed, replaced = publisher.preview()
        slots, starts, lengths, limits, held, tabled = batch.arrays
        if replaced:  # their table entries are set again
            tabled = np.minimum(tabled, np.array([replaced.get(r, len(r.blocks)) for r in requests], np.int64))
        block = layout.block_tokens
        ends = starts + lengths * steps
        blocks = -(-ends // block)
        missing = np.maximum(blocks - held, 0)
        self._check_tokens(requests, steps, starts, ends, lengths, limits)
        lacking = np.flatnonzero(missing).tolist()
        places = [place for i in lacking for place in range(int(held[i]), int(blocks[i]))]
        if places and (error := cache.shortage(places, freed)):
            for request in requests:  # one token in each step is the least: without room for drafts there may be some
                self.check_pool(request.id, request.num_cached + steps)
            raise error
        untabled = np.flatnonzero(tabled < blocks).tolist()
        copies = self._copies(batch.restored)
        needed = dict(
            table_entries=int((blocks - tabled)[untabled].sum()),
            slot_copies=len(copies),
            block_copies=len(cache.copies.blocks),
        )
        fits, plan = self._batch_plan(batch, shape, steps, needed)
        # From here on everything changes.
        publisher.commit()
        publisher.replaced = False
        fresh = iter(cache.acquire_blocks(places))
        added: dict[int, list[int]] = {}  # blocks of the sequences that need table entries, by index
        entries: tuple[list[int], list[int], list[int]] = [], [], []  # of the block table: slots, columns, ids
        for i in untabled:
            first, request = int(tabled[i]), requests[i]
            added[i] = list(itertools.islice(fresh, missing[i]))
            ids = request.blocks[first : blocks[i]] + added[i]
            entries[0].extend([request.slot] * len(ids))
            entries[1].extend(range(first, first + len(ids)))
            entries[2].extend(ids)
        at_boundary = [requests[i] for i in np.flatnonzero((starts % block == 0) & (starts > 0)).tolist()]
        if opened:  # where they stand is not known
            at_boundary = [request for request in at_boundary if request not in opened]
        saves = self._saves(at_boundary, copies, shape)
        if cache.snapshot_blocks:
            for save in saves:
                cache.put_state(save.request.slot, save.slot, save.request.num_cached)
        else:
            copies += [(save.request.slot, save.slot) for save in saves]
        block_copies = [(source, target) for target, source in cache.copies.blocks.items()]
        if shape is None:
            fits = dataclasses.replace(fits, slot_copies=len(copies)).bucketed(self.size.max_blocks_per_request)
        plan = with_extras(plan, fits, np.array(entries, np.int64).T, copies, block_copies)
        self.num_planned += 1
        arrays = (slots, ends, lengths, limits, np.maximum(held, blocks), np.maximum(tabled, blocks))
        decode = (shape, plan) if shape is not None and batch.longest == 1 else None
        quiet = self._quiet_steps(arrays) if decode is not None and steps == 1 else 0
        self._last = batch._replace(
            arrays=arrays, restored=[], copied=[], decode=decode, quiet=quiet, slots=plan.seq_slot, carried=True
        )
        if opened or (steps > 1 and batch.longest > 1):
            self.forget_batch()  # their lengths are not known before they are accepted
        for i, more in added.items():
            requests[i].blocks += more
            requests[i].num_tabled = int(blocks[i])
        for save in saves:
            publisher.publish(save.request, save.request.num_cached)  # its last step is kept whole now
        publisher.saved(saves, self.num_planned)
        for request in batch.restored:
            if request.restores is not None:
                cache.tree.snapshots.unpin(request.restores)
                request.restores = None
        for request in opened:
            request.earlier.append((request.num_scheduled, request.loop))
        table = self._book.counts.table
        rows = table[slots]
        rows[:, 0], rows[:, 2], rows[:, 3], rows[:, 4] = ends, lengths * steps, steps, self.num_planned
        table[slots] = rows
        for request in batch.copied:
            request.forked = None
        for i in np.flatnonzero(ends // block > starts // block).tolist() if steps == 1 else range(len(requests)):
            publisher.mark(requests[i])  # of K steps always: only the first one's ids pass `plan_tokens`
        for slot in cache.copies.slots:
            self._book.live[slot].copied = self.num_planned
        cache.end_copies()
        self.drain()
        return plan

    def _quiet_steps(self, arrays: tuple[np.ndarray, ...]) -> int:
        """How many decode steps of the same sequences come before one of them begins, fills or needs a block, or ends.

        0 if that is not worth finding out: one of many does so in nearly every step.
        """
        _, starts, _, limits, _, _ = arrays
        block = self._layout.block_tokens
        if not 0 < len(starts) <= block:
            return 0
        within = starts % block
        return int(np.where(within > 0, np.minimum(block - 1 - within, limits - starts), 0).min())

    def _is_quiet(self, batch: Batch, shape: StepShape | None) -> bool:
        """Whether nothing but the sequences' next tokens has to be in the step."""
        copies, decode = self._cache.copies, batch.decode
        idle = not (copies.slots or copies.blocks or self._book.edits.any) and self._publisher.is_idle
        return idle and decode is not None and (decode[0] is shape or decode[0] == shape)

    def _plan_quietly(self, batch: Batch) -> StepPlan:
        """Does what `plan` does for a step in which nothing happens but one more token of each sequence."""
        assert batch.decode is not None
        shape, before = batch.decode
        slots, starts, *others = batch.arrays
        ends = starts + 1
        plan = next_sequences(self._layout, before, shape, starts, size=self.arrays, steps=1)
        if batch.carried:  # what the step before has carried
            plan = with_extras(plan, shape, (), (), ())
        self._publisher.commit()
        self.num_planned += 1
        self._last = batch._replace(
            arrays=(slots, ends, *others), decode=(shape, plan), quiet=batch.quiet - 1, carried=False
        )
        table = self._book.counts.table
        rows = table[slots]
        rows[:, 0], rows[:, 2], rows[:, 3], rows[:, 4] = ends, 1, 1, self.num_planned
        table[slots] = rows
        self._cache.end_copies()
        self.drain()
        return plan

    def _checked(self, scheduled: list[Scheduled], steps: int, ahead: bool) -> tuple[list[Request], list[int]]:
        """The requests and their token counts, checked one by one."""
        counts: dict[Request, int] = {}
        live = self._book.live
        for pair in scheduled:
            try:
                request, count = pair
            except (TypeError, ValueError) as error:
                raise PlanError(f"scheduled tokens are (request, number of tokens) pairs, got {shown(pair)}") from error
            # In full only what is not plainly right: hundreds of sequences pass here every step.
            if type(request) is not Request or live.get(request.slot) is not request:
                request = self._book.find_live(request)
            if type(count) is not int or not 0 < count <= INT32_MAX:
                count = check_integer("a sequence's number of tokens", count, 1, INT32_MAX, error=PlanError)
            if request in counts:
                raise PlanError(f"request {request.id!r} is scheduled twice in one step")
            if steps > 1 and count > 1 + self._layout.draft_tokens:
                most = f"up to {1 + self._layout.draft_tokens} tokens each"
                raise PlanError(f"{steps} steps in one plan compute {most}, request {request.id!r} has {count}")
            if not ahead:
                request.check_accepted()
            counts[request] = count
        return list(counts), list(counts.values())

    def _check_tokens(
        self,
        requests: list[Request],
        steps: int,
        starts: np.ndarray,
        ends: np.ndarray,
        lengths: np.ndarray,
        limits: np.ndarray,
    ) -> None:
        """No request outgrows its limit, no chunk goes beyond the known tokens of a request, if some are known, and of
        several steps only the first one's tokens are known: the others' are sampled on the device."""
        if len(over := np.flatnonzero(ends > limits)):
            request = requests[over[0]]
            raise ContextLimitError(request.id, int(ends[over[0]]), request.max_tokens)
        chunks = np.flatnonzero(lengths > 1 + self._layout.draft_tokens)  # drafts may be sampled on the device
        for i in chunks.tolist():
            start, stop, known = int(starts[i]), int(starts[i] + lengths[i]), len(requests[i].ids)
            if start < known < stop:
                span = f"{start}..{stop - 1}"
                raise RequestError(f"request {requests[i].id!r} knows {known} tokens, the step schedules {span}")
        for request in requests if steps > 1 else ():
            start, known = request.num_cached, len(request.ids)
            if known > start + 1:
                raise RequestError(
                    f"request {request.id!r} knows tokens {start + 1}..{known - 1}, which {steps} steps in one plan "
                    "would sample anew: feed them first, in plans of one step"
                )

    def _copies(self, restored: list[Request]) -> list[tuple[int, int]]:
        """The slot copies that the next plan must carry."""
        copies = [(source, slot) for slot, source in self._cache.copies.slots.items()]
        for request in restored:
            node = request.restores
            assert node is not None and node.snapshot is not None
            copies.append((node.snapshot.device, request.slot))
        return copies

    def _saves(self, requests: list[Request], copies: list[tuple[int, int]], shape: StepShape | None) -> list[Save]:
        """Snapshots of these requests, where there is room for them. Not of slots that are about to be filled."""
        filled = {destination for _, destination in copies}
        requests = [r for r in requests if r.slot not in filled]
        copied = shape is not None and not self._cache.snapshot_blocks  # by the plan itself, not by its transfers
        room = max(shape.slot_copies - len(copies), 0) if shape is not None and copied else len(requests)
        return self._publisher.plan_saves(requests, room)

    def _batch_plan(
        self, batch: Batch, shape: StepShape | None, steps: int, needed: dict[str, int]
    ) -> tuple[StepShape, StepPlan]:
        """The shape, and the plan but for its entries and copies, of which at least `needed` must fit.

        The shape is what the sequences need, in powers of two, unless given. Raises `PlanError`.
        """
        slots, starts, counts, *_ = batch.arrays
        last = batch.decode
        if shape is not None and last is not None and last[0] == shape:
            check_extras(shape, **needed)
            return shape, next_sequences(self._layout, last[1], shape, starts, size=self.arrays, steps=steps)
        step = StepTokens.of(self._layout, np.stack([slots, starts, counts], 1))
        if shape is None:
            exact = step.shape(self._layout, steps=steps, **needed)
            shape = exact.bucketed(self.size.max_blocks_per_request)
        check_extras(shape, **needed)
        return shape, build_plan(self._layout, step, shape, size=self.arrays, steps=steps)

    # After planning

    def tokens(self, plan: StepPlan, unknown: int | None = None) -> np.ndarray:
        """Returns the token ids of a plan. See `KVCacheManager.plan_tokens`."""
        out = np.zeros(plan.num_tokens, np.int32)
        if (quickly := self._note_decodes(plan, unknown)) is not None:
            out[: len(quickly)] = quickly
            return out
        ids: list[int] = []
        gaps: list[tuple[int, int]] = []  # what is not known, as places in `ids`
        decodes: list[array[int]] = []  # the histories of those of which one token is noted
        noted_here: list[int] = []
        edited = self._book.edits.any
        drawn = unknown is not None and not (edited or self._layout.draft_tokens)  # ahead, and whole
        fresh: list[tuple[Request, int, int]] = []
        for request, start, count in self._sequences_of(plan):
            history, tokens, stop = request.history, request.ids, start + count
            noted = len(history)
            if count == 1 and noted == start < len(tokens) and not edited:  # what most are
                decodes.append(history)
                noted_here.append(len(ids))
                ids.append(tokens[start])
                continue
            if count == 1 and drawn and noted <= len(tokens) <= min(start, noted + 1):  # or, planned ahead
                gaps.append((len(ids), len(ids) + 1))
                if noted < len(tokens):  # of the step before it is known by now
                    decodes.append(history)
                    noted_here.append(len(ids))
                ids.append(tokens[noted] if noted < len(tokens) else 0)
                continue
            if noted >= stop:  # laid out before: what was scheduled does not change any more
                ids += history[start:stop]
                continue
            known = len(tokens)
            if known < stop and unknown is None:
                raise RequestError(
                    f"request {request.id!r} knows {known} tokens, the plan schedules {start}..{stop - 1}"
                )
            fresh.append((request, start, stop))
            if known < stop:
                gaps.append((len(ids) + max(known - start, 0), len(ids) + count))
                row = [*history[start:], *tokens[max(start, noted) :]]
                ids += row + [0] * (count - len(row))
            elif count == 1:
                ids.append(tokens[start])
            else:
                ids += history[start:]
                ids += tokens[max(start, noted) : stop]
        self._book.settle_changes([request for request, _, _ in fresh] if edited else ())
        out[: len(ids)] = token_ids(ids, self._layout.cfg.vocab_size)  # sequences follow each other, then padding
        for history, place in zip(decodes, noted_here, strict=True):
            history.append(ids[place])
        for first, last in gaps:
            assert unknown is not None
            out[first:last] = unknown
        for request, start, stop in fresh:
            history = request.history
            if len(history) == start and stop - start == 1 and len(request.ids) > start:
                history.append(request.ids[start])
            elif len(request.ids) >= stop:
                self._publisher.note(request, min(stop, request.num_cached))
            else:  # of steps that may be cut only what they have kept for certain
                self._publisher.note(request, self._publisher.final_tokens(request))
        return out

    def _note_decodes(self, plan: StepPlan, unknown: int | None) -> np.ndarray | None:
        """The ids of the plan made last, each noted, if all are of decodes and none was noted before; else None.

        Nor if some are known and others are not. As `tokens` without it, but a third faster: hundreds of sequences pass
        here every step.
        """
        batch = self._batch
        if batch is None or not self._is_last_decode(plan) or self._book.edits.any:
            return None
        starts = plan.seq_start.tolist()[: len(batch.requests)]
        texts, histories = batch.ids, batch.histories
        noted, drawn = [*map(len, histories)], None
        if unknown is not None and all(map(operator.le, known := [*map(len, texts)], starts)):
            drawn = np.full(len(starts), unknown, np.int32)
            fresh = [*map(operator.sub, known, noted)]  # of each, how many have come since the step before
            if not {*fresh} <= {0, 1}:
                return None
            if 0 in fresh:  # of blocks that are full all was noted when they were published
                texts, noted = list(itertools.compress(texts, fresh)), list(itertools.compress(noted, fresh))
                histories = list(itertools.compress(histories, fresh))
                if not noted:
                    return drawn
        elif noted != starts:
            return None
        try:
            ids = [*map(operator.getitem, texts, noted)]
        except IndexError:
            return None  # some are not known
        checked = token_ids(ids, self._layout.cfg.vocab_size)
        collections.deque(map(array.append, histories, ids), maxlen=0)  # in C
        return checked if drawn is None else drawn

    def _is_last_decode(self, plan: StepPlan) -> bool:
        """Whether this is the plan made last, and all its sequences are of one token."""
        batch = self._batch
        return batch is not None and batch.decode is not None and batch.decode[1].seq_slot is plan.seq_slot

    def _sequences_of(self, plan: StepPlan) -> Iterable[tuple[Request, int, int]]:
        """Returns the request, first token and number of tokens of each sequence.

        Raises `RequestError` if one is gone, `PlanError` for a plan of another cache, or for none.
        """
        if (batch := self._batch) is not None and batch.slots is plan.seq_slot:
            return zip(batch.requests, plan.seq_start.tolist(), batch.counts, strict=False)
        if isinstance(plan.facts, CacheFacts):
            plan.facts.check(CacheFacts.of(self._layout, self.arrays))
        arrays = (plan.seq_slot, plan.seq_start, plan.seq_count)
        if any(type(array) is not np.ndarray or array.shape != arrays[0].shape or array.ndim != 1 for array in arrays):
            raise PlanError("the plan's sequences are no arrays of one length in the host's memory")
        columns = [array.tolist() for array in arrays]
        live = self._book.live
        return [
            (live.get(slot) or self._book.find_in_slot(slot), start, count)
            for slot, start, count in zip(*columns, strict=True)
            if slot
        ]

    def accept(self, request: Request, n_kept: int, steps: int | None) -> None:
        """Keeps the first `n_kept` tokens of a request's last step or steps. See `KVCacheManager.accept`."""
        scheduled, planned = request.earlier[0] if request.earlier else (request.num_scheduled, request.loop)
        drafts, who = self._layout.draft_tokens, f"request {request.id!r}"
        if not planned:
            raise PlanError(f"{who} has no step to accept")
        steps = planned if steps is None else steps
        if steps > planned:
            raise PlanError(f"{who}: {steps} steps ran of a plan of {planned}")
        length, start = scheduled // planned * steps, request.step_start
        if n_kept > length:
            raise PlanError(f"{who}: cannot keep {n_kept} of the {length} tokens scheduled")
        if request.is_open and n_kept < steps:
            raise PlanError(f"{who}: {steps} steps with drafts keep a token each, not {n_kept}")
        if not request.is_open and n_kept < length and (not drafts or length > 1 + drafts):
            cut = f"a step of {length} tokens cannot be cut to {n_kept}"
            raise PlanError(f"{who}: {cut} with draft_tokens={drafts}")
        if steps < planned and len(request.nodes) > (start + n_kept) // self._layout.block_tokens:
            raise PlanError(f"{who}: blocks that only {planned} steps have filled are cached already")
        self.forget_batch()
        request.ids.drop(start + n_kept, start + length)
        request.num_cached -= scheduled - n_kept
        if request.earlier:  # those planned ahead go on from there
            del request.earlier[0]
        else:
            request.num_scheduled, request.loop, request.kept_from = 0, 0, request.num_cached  # it did run
        if not n_kept and length > drafts:
            request.torn = request.num_cached
        keep = self._layout.blocks_for(max(request.num_cached, request.reserved))
        self._cache.release_blocks(request.blocks[keep:])
        del request.blocks[keep:]
        request.num_tabled = min(request.num_tabled, keep)
        del request.history[start + n_kept :]
        self._publisher.mark(request)
