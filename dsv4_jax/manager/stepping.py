"""Steps: which tokens of which requests the next one feeds, and what its plan must carry. Pure Python + numpy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..checks import INT32_MAX, shown
from ..errors import ContextLimitError, OutOfBlocksError, PlanError, RequestError
from ..plan import StepPlan
from .allocator import as_count
from .planning import StepShape, build_plan, check_extras, next_rows, shape_for, with_extras
from .publishing import Save
from .request import Request
from .request_book import RequestBook
from .scheduling import Feed, Room, room_of, schedule
from .transfers import Transfers

__all__ = ["SteppingManager"]


class _Rows(NamedTuple):
    """The rows of a step. Those of the step before serve again while nothing else has changed them.

    Attributes:
        requests, counts: [B]
        feeds: the pairs that name them.
        arrays: slots, starts, counts, limits, blocks held and blocks tabled, [B] int64 each.
        restored: those that start from a snapshot in this step.
        decode: the pinned shape and the plan of the step before, if every row fed one token.
    """

    requests: list[Request]
    counts: list[int]
    feeds: list[tuple[Request, int]]
    arrays: tuple[np.ndarray, ...]
    restored: list[Request]
    decode: tuple[StepShape, StepPlan] | None = None

    @classmethod
    def of(cls, requests: list[Request], counts: list[int]) -> _Rows:
        columns = (
            [r.slot for r in requests], [r.num_cached for r in requests], counts, [r.max_tokens for r in requests],
            [len(r.blocks) for r in requests], [r.num_tabled for r in requests],
        )  # fmt: skip
        # One list each: the fastest way from objects to arrays that was found.
        arrays = tuple(np.fromiter(values, np.int64, len(values)) for values in columns)
        restored = [r for r in requests if r.restores is not None]
        return cls(requests, counts, list(zip(requests, counts, strict=True)), arrays, restored)


class SteppingManager(RequestBook):
    """Plans steps of live requests. `KVCacheManager` is the class to use; see there."""

    def reserve(self, request: Request | int, tokens: int) -> None:
        """Takes the blocks of its first `tokens` tokens now, so that steps up to there cannot run out.

        Raises:
            ContextLimitError, OutOfBlocksError, RequestError: as in `plan_step`.
        """
        with self._guard("reserve"):
            request, tokens = self._checked(request), as_count("tokens", tokens)
            if tokens > request.max_tokens:
                raise ContextLimitError(request.id, tokens, request.max_tokens)
            missing = self.layout.blocks_for(tokens) - len(request.blocks)
            request.blocks += self._cache.acquire_blocks(max(missing, 0))
            self._rows = None
            request.reserved = max(request.reserved, tokens)

    def plan_step(self, feeds: Iterable[Feed], *, steps: int = 1, shape: StepShape | None = None) -> StepPlan:
        """Plans one step: `n` tokens of every `(request, n)`; or the first of `steps` decode steps.

        A row of one token is a decode, of up to 1 + draft_tokens tokens a verify step that `accept`
        may cut, of more a prefill chunk that is final. Kinds mix freely. With `steps` = K every row
        feeds one token; the plan serves K steps, each `plan.advance()` of the one before, and their
        blocks and table entries are all in this plan. Afterwards every request counts its tokens of
        all K steps as cached. No feeds at all is a step of padding.

        Args:
            feeds: each request at most once.
            steps: K.
            shape: pins the plan's static sizes, so that steps of different sizes share one
                executable (see `pinned_shape`); default: what the rows need, in powers of two.

        Raises:
            RequestError: a request is not live here, or a chunk goes beyond the tokens that the request knows. (None
                of a chunk, or of a decode or verify step, may be known here: drawn on the device, or kept elsewhere.)
            ContextLimitError: a request would outgrow its `max_tokens`.
            OutOfBlocksError: the step needs more blocks than are free.
            PlanError: a count < 1, a request named twice, K steps of more than one token, or the
                shape is too small. Whatever is raised, nothing has changed.
        """
        feeds = feeds if type(feeds) is list else list(feeds)
        with self._guard("plan_step"):
            return self._plan_step(feeds, as_count("steps", steps, 1, INT32_MAX), shape)

    def _plan_step(self, feeds: list[Feed], steps: int, shape: StepShape | None) -> StepPlan:
        self._check_awake()
        self._check_taken()
        self._check_shape(shape)
        rows = self._rows
        again = rows is not None and feeds == rows.feeds and (steps == 1 or max(rows.counts, default=1) == 1)
        requests, counts = (rows.requests, rows.counts) if again else self._feeds(feeds, steps)
        if not again or self._publisher.replaced:
            rows = _Rows.of(requests, counts)
        # First what may be refused: nothing changes before it is certain that all of the rest succeeds.
        freed, replaced = self._publisher.preview(self._final_tokens)
        slots, starts, fed, limits, held, tabled = rows.arrays
        if replaced:  # their table entries are set again
            tabled = np.minimum(tabled, np.array([replaced.get(r, len(r.blocks)) for r in requests], np.int64))
        block = self.layout.block_tokens
        ends = starts + fed * steps
        blocks = -(-ends // block)
        missing = np.maximum(blocks - held, 0)
        self._check_tokens(requests, starts, ends, fed, limits)
        count = int(missing.sum())
        if not self._cache.can_acquire(count, freed):
            raise OutOfBlocksError(count, self._cache.num_available + freed, self._cache.blocks.num_total)
        untabled = np.flatnonzero(tabled < blocks).tolist()
        copies = self._copies(rows.restored)
        needed = dict(
            table_entries=int((blocks - tabled)[untabled].sum()), slot_copies=len(copies),
            block_copies=len(self._cache.copies.blocks),
        )  # fmt: skip
        fits, plan = self._rows_plan(rows, shape, steps, needed)
        # From here on everything changes.
        self._commit()
        self._publisher.replaced = False
        fresh, entries = iter(self._cache.acquire_blocks(count)), list[tuple[int, int, int]]()
        paths: dict[int, list[int]] = {}  # of the rows that need table entries, by row
        for i in untabled:
            paths[i] = requests[i].blocks + list(itertools.islice(fresh, missing[i]))
            entries += [(requests[i].slot, column, paths[i][column]) for column in range(tabled[i], blocks[i])]
        at_boundary = [requests[i] for i in np.flatnonzero((starts % block == 0) & (starts > 0)).tolist()]
        saves = self._saves(at_boundary, copies, shape)
        copies += [(save.request.slot, save.slot) for save in saves]
        block_copies = [(source, target) for target, source in self._cache.copies.blocks.items()]
        if shape is None:
            fits = dataclasses.replace(fits, slot_copies=len(copies)).bucketed(self.size.max_blocks_per_request)
        plan = with_extras(plan, fits, entries, copies, block_copies)
        self._steps += 1
        arrays = (slots, ends, fed, limits, np.maximum(held, blocks), np.maximum(tabled, blocks))
        decode = (shape, plan) if shape is not None and max(counts, default=2) == 1 else None
        self._rows = rows._replace(arrays=arrays, restored=[], decode=decode)
        for i, path in paths.items():
            requests[i].blocks, requests[i].num_tabled = path, int(blocks[i])
        for save in saves:
            self._publisher.publish(save.request, save.request.num_cached)  # its last step is kept whole now
        self._publisher.saved(saves, self._steps)
        for request in rows.restored:
            if request.restores is not None:
                self._cache.tree.snapshots.unpin(request.restores)
                request.restores = None
        for request, count in zip(requests, counts, strict=True):
            request.fed = count * steps
            request.num_cached += request.fed
            request.last_step, request.forked = self._steps, None
        for i in np.flatnonzero(ends // block > starts // block).tolist() if steps == 1 else range(len(requests)):
            self._publisher.mark(requests[i])  # of K steps always: only the first one's ids pass `plan_tokens`
        for slot in self._cache.copies.slots:
            self._live[slot].copied = self._steps
        self._cache.end_copies()
        self._step_transfers = self._cache.drain()
        return plan

    def _check_shape(self, shape: StepShape | None) -> None:
        if shape is None:
            return
        if not isinstance(shape, StepShape):
            raise PlanError(f"shape must be a StepShape or None, got {type(shape).__name__}")
        for name, value in vars(shape).items():
            if name != "history" and (type(value) is not int or not 0 <= value <= INT32_MAX):
                as_count(f"the shape's {name}", value, 0, INT32_MAX)
        if shape.columns > self.size.max_blocks_per_request:
            raise PlanError(f"columns={shape.columns}: the table has {self.size.max_blocks_per_request}")

    def _check_tokens(
        self, requests: list[Request], starts: np.ndarray, ends: np.ndarray, fed: np.ndarray, limits: np.ndarray
    ) -> None:
        """No request outgrows its limit, and none of which some tokens are known feeds a chunk beyond them."""
        if len(over := np.flatnonzero(ends > limits)):
            request = requests[over[0]]
            raise ContextLimitError(request.id, int(ends[over[0]]), request.max_tokens)
        chunks = np.flatnonzero(fed > 1 + self.layout.draft_tokens)  # drafts may be drawn on the device
        for i in chunks.tolist():
            start, stop, known = int(starts[i]), int(starts[i] + fed[i]), len(requests[i].tokens)
            if start < known < stop:
                raise RequestError(
                    f"request {requests[i].id!r} knows {known} tokens, the step feeds {start}..{stop - 1}"
                )

    def take_transfers(self) -> Transfers:
        """What must travel between the tiers before the step planned last runs, stage by stage, in this order.

        `dsv4_jax.run_transfers(cache, host, stages)` runs them. Without a host tier there never is any;
        with one, call it after every `plan_step` (and after `sleep` or `resize`), before the step.
        """
        with self._guard("take_transfers"):
            stages, self._step_transfers = self._step_transfers, Transfers()
            return stages

    def commit(self) -> None:
        """Makes the blocks that the steps planned so far have filled matchable for others.

        Planning and admitting do this too. A step that may still be cut by `accept` waits for that.
        """
        with self._guard("commit"):
            self._commit()

    def _commit(self) -> None:
        self._publisher.commit(self._final_tokens)

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
        room = len(requests) if shape is None else max(shape.slot_copies - len(copies), 0)
        return self._publisher.plan_saves(requests, room)

    def _rows_plan(
        self, rows: _Rows, shape: StepShape | None, steps: int, needed: dict[str, int]
    ) -> tuple[StepShape, StepPlan]:
        """The shape, and the plan but for its entries and copies, of which at least `needed` must fit.

        The shape is what the rows need, in powers of two, unless given. Raises `PlanError`.
        """
        slots, starts, counts, *_ = rows.arrays
        if shape is not None and rows.decode is not None and rows.decode[0] == shape:
            check_extras(shape, **needed)
            return shape, next_rows(self.layout, rows.decode[1], shape, starts, size=self.arrays, lookahead=steps - 1)
        fed = np.stack([slots, starts, counts], 1)
        if shape is None:
            shape = shape_for(self.layout, fed, lookahead=steps - 1, **needed).bucketed(
                self.size.max_blocks_per_request
            )
        check_extras(shape, **needed)
        return shape, build_plan(self.layout, fed, shape, size=self.arrays, lookahead=steps - 1)

    def _feeds(self, feeds: Iterable[Feed], steps: int) -> tuple[list[Request], list[int]]:
        """The requests and their token counts, checked one by one."""
        counts: dict[Request, int] = {}
        live = self._live
        for feed in feeds:
            try:
                request, count = feed
            except (TypeError, ValueError) as error:
                raise PlanError(f"a feed is a (request, number of tokens) pair, got {shown(feed)}") from error
            # In full only what is not plainly right: hundreds of rows pass here every step.
            if type(request) is not Request or live.get(request.slot) is not request:
                request = self._checked(request)
            if type(count) is not int or not 0 < count <= INT32_MAX:
                count = as_count("a row's number of tokens", count, 1, INT32_MAX)
            if request in counts:
                raise PlanError(f"request {request.id!r} is fed twice in one step")
            if steps > 1 and count != 1:
                raise PlanError(f"{steps} steps in one plan feed one token per row, request {request.id!r} has {count}")
            counts[request] = count
        return list(counts), list(counts.values())

    def plan_tokens(self, plan: StepPlan) -> np.ndarray:
        """The token ids of a plan, [T] int32 in its order (padding: 0), from the requests' `tokens`.

        They are noted as what the plan feeds: a second call gives the same, whatever `tokens` says by then.
        Call it before the requests are released. For a plan of K steps: the tokens of the first.

        Raises:
            RequestError: a request of the plan is gone, or does not know the tokens it feeds.
        """
        with self._guard("plan_tokens"):
            return self._plan_tokens(plan)

    def _plan_tokens(self, plan: StepPlan) -> np.ndarray:
        ids: list[int] = []
        fresh: list[tuple[Request, int, int]] = []
        for request, start, count in self._rows_of(plan):
            history, tokens, stop = request.history, request.tokens, start + count
            noted = len(history)
            if noted >= stop:  # laid out before: what is fed does not change any more
                ids += history[start:stop]
                continue
            if len(tokens) < stop:
                known = len(tokens)
                raise RequestError(f"request {request.id!r} knows {known} tokens, the plan feeds {start}..{stop - 1}")
            if request.hasher is not None:
                fresh.append((request, start, stop))
            if count == 1:
                ids.append(tokens[start])
            else:
                ids += history[start:]
                ids += tokens[max(start, noted) : stop]
        out = np.zeros(plan.num_tokens, np.int32)
        out[: len(ids)] = self._token_ids(ids)  # rows follow each other, padding stands last
        for request, start, stop in fresh:
            history = request.history
            if len(history) == start and stop - start == 1:
                history.append(request.tokens[start])
            else:
                self._publisher.note(request, min(stop, request.num_cached))
        return out

    def _rows_of(self, plan: StepPlan) -> Iterable[tuple[Request, int, int]]:
        """The request, first token and number of tokens of each row. Raises `RequestError` if one is gone."""
        rows = self._rows
        if rows is not None and rows.decode is not None and rows.decode[1].seq_slot is plan.seq_slot:
            return zip(rows.requests, plan.seq_start.tolist(), itertools.repeat(1))
        columns = (plan.seq_slot.tolist(), plan.seq_start.tolist(), plan.seq_count.tolist())
        return [
            (self._live.get(slot) or self._checked(slot), start, count)
            for slot, start, count in zip(*columns, strict=True) if slot
        ]  # fmt: skip

    def accept(self, request: Request | int, n_kept: int) -> None:
        """Keeps the first `n_kept` tokens of the request's last step; the others were never fed.

        Rejected ids also leave `request.tokens`. Blocks that hold no kept token go back to the pool
        (unless reserved); their table entries are set again before they are next used. A step that is
        not accepted before the request's next one is kept whole.

        Args:
            n_kept: 0..n of the n tokens fed. Less than n only if the device state before them is
                still whole: the layout has draft_tokens > 0 and n <= 1 + draft_tokens.

        Raises:
            PlanError: no step to accept, `n_kept` out of range, or the step cannot be cut.
            RequestError: the request is not live here.
        """
        with self._guard("accept"):
            request, n_kept = self._checked(request), as_count("n_kept", n_kept)
            fed, drafts = request.fed, self.layout.draft_tokens
            if not fed:
                raise PlanError(f"request {request.id!r} has no step to accept")
            if n_kept > fed:
                raise PlanError(f"request {request.id!r}: cannot keep {n_kept} of the {fed} tokens fed")
            if n_kept < fed and (not drafts or fed > 1 + drafts):
                cut = f"a step of {fed} tokens cannot be cut to {n_kept}"
                raise PlanError(f"request {request.id!r}: {cut} with draft_tokens={drafts}")
            self._rows = None
            del request.tokens[request.num_cached - fed + n_kept : request.num_cached]
            request.num_cached += n_kept - fed
            request.fed, request.kept_from = 0, request.num_cached  # it did run
            keep = self.layout.blocks_for(max(request.num_cached, request.reserved))
            self._cache.release_blocks(request.blocks[keep:])
            del request.blocks[keep:]
            request.num_tabled = min(request.num_tabled, keep)
            del request.history[request.num_cached :]
            self._publisher.mark(request)

    def schedule(
        self,
        token_budget: int,
        *,
        max_rows: int | None = None,
        max_chunk: int | None = None,
        shape: StepShape | None = None,
        requests: Iterable[Request] | None = None,
    ) -> list[tuple[Request, int]]:
        """Feeds for the next step from the requests' pending tokens; `plan_step` takes them as they are.

        First every request with one pending token (a decode), the least recently fed first; then
        chunks of the others in admission order, as far as tokens, rows and blocks reach. A chunk
        that lacks blocks holds back those behind it. So nobody starves: decodes take turns and end,
        and only the chunks that wait behind them make new ones. A chunk ends where the policy wants
        a snapshot. Tokens beyond a request's `max_tokens` (`Request.num_excess`), or beyond the columns of the
        shape, are never offered. An empty result while others are pending means that blocks must be freed
        first: release or preempt a request.

        Args:
            token_budget: most tokens of the step.
            max_rows: most requests of the step.
            max_chunk: most tokens of one request.
            shape: the pinned shape the step must fit.
            requests: those to choose from, in the order of their turn for chunks; default: all live ones.

        Raises:
            PlanError: a number below 1, no shape, or one with more columns than the block table.
            RequestError: one of `requests` is not live here.
        """
        budget = as_count("token_budget", token_budget, 1)
        rows = budget if max_rows is None else as_count("max_rows", max_rows, 1)
        chunk = budget if max_chunk is None else as_count("max_chunk", max_chunk, 1)
        requests = None if requests is None else list(requests)
        self._check_shape(shape)
        with self._guard("schedule"):
            chosen = self.requests if requests is None else [self._checked(request) for request in requests]
            self._commit()  # now, as `plan_step` would: blocks that turn out to be shared need table entries again
            room = Room(budget, rows, self._cache.num_available)
            if shape is not None:
                room = room_of(self.layout, shape, room)
                room.copies -= len(self._cache.copies.slots)
                if room.copies < 0 or shape.block_copies < len(self._cache.copies.blocks):
                    return []  # no step of this shape can carry the copies that forks wait for
            return schedule(self.layout, chosen, room, max_chunk=chunk, next_stop=self._publisher.next_stop)

    def pinned_shape(
        self,
        rows: int,
        tokens: int | None = None,
        *,
        steps: int = 1,
        columns: int | None = None,
        history: bool | None = None,
        slot_copies: int | None = None,
        block_copies: int = 0,
    ) -> StepShape:
        """The shape of every step of up to `rows` requests and `tokens` tokens (default: one per row).

        With prefix caching a request may come with all its table entries at once: there is room for
        one such request in a step, and `schedule(..., shape=shape)` makes others wait.

        Args:
            steps: K, for plans of K decode steps.
            columns: block-table columns a request may need; default: all.
            history: as in `StepShape.bound`.
            slot_copies: states restored and kept in one step (each costs its bytes, used or not);
                default: up to 4 with prefix caching, else none. Forks need one each.
            block_copies: partial blocks that forks copy in one step.

        Raises:
            PlanError: a number is no count.
        """
        rows, steps = as_count("rows", rows, 1, INT32_MAX), as_count("steps", steps, 1, INT32_MAX)
        self._guard.check()
        tokens = rows if tokens is None else tokens
        columns = self.size.max_blocks_per_request if columns is None else columns
        caching = self._cache.caching
        if slot_copies is None:
            slot_copies = min(rows, 4) if caching else 0
        shape = StepShape.bound(
            self.layout, rows, tokens, columns=columns, lookahead=steps - 1, history=history,
            slot_copies=slot_copies, block_copies=block_copies,
        )  # fmt: skip
        return dataclasses.replace(shape, table_entries=shape.table_entries + columns) if caching else shape
