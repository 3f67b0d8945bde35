"""Steps: which tokens of which requests the next one feeds, and what its plan must carry. Pure Python + numpy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..errors import ContextLimitError, OutOfBlocksError, PlanError, RequestError
from ..plan import StepPlan
from .allocator import as_count
from .planning import StepShape, build_plan, next_decode, shape_for
from .publishing import Save
from .request import Request
from .request_book import RequestBook
from .scheduling import Feed, Room, schedule
from .transfers import TransferStage

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
        request, tokens = self._checked(request), as_count("tokens", tokens)
        if tokens > request.max_tokens:
            raise ContextLimitError(request.id, tokens, request.max_tokens)
        missing = self.layout.blocks_for(tokens) - len(request.blocks)
        request.blocks += self._acquire_blocks(max(missing, 0))
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
            RequestError: a request is not live here.
            ContextLimitError: a request would outgrow its `max_tokens`.
            OutOfBlocksError: the step needs more blocks than are free.
            PlanError: a count < 1, a request named twice, K steps of more than one token, or the
                shape is too small. Whatever is raised, nothing has changed.
        """
        self._check_awake()
        if self._step_transfers:
            raise PlanError("the transfers of the step before were not taken (see take_transfers)")
        steps = as_count("steps", steps, 1)
        rows = self._rows
        again = (
            rows is not None
            and type(feeds) is list
            and feeds == rows.feeds
            and (steps == 1 or max(rows.counts, default=1) == 1)
        )
        requests, counts = (rows.requests, rows.counts) if again else self._feeds(feeds, steps)
        self.commit()
        if not again or self._publisher.replaced:
            self._rows = rows = _Rows.of(requests, counts)
            self._publisher.replaced = False
        slots, starts, fed, limits, held, tabled = rows.arrays
        block = self.layout.block_tokens
        ends = starts + fed * steps
        blocks = -(-ends // block)
        missing = np.maximum(blocks - held, 0)
        over = np.flatnonzero(ends > limits)
        if len(over):
            request = requests[over[0]]
            raise ContextLimitError(request.id, int(ends[over[0]]), request.max_tokens)
        taken = self._acquire_blocks(int(missing.sum()))
        saves: list[Save] = []
        try:
            fresh, entries = iter(taken), []
            paths: dict[int, list[int]] = {}  # of the rows that need table entries, by row
            for i in np.flatnonzero(tabled < blocks).tolist():
                paths[i] = requests[i].blocks + list(itertools.islice(fresh, missing[i]))
                entries += [(requests[i].slot, column, paths[i][column]) for column in range(tabled[i], blocks[i])]
            copies = self._copies(rows.restored)
            at_boundary = [requests[i] for i in np.flatnonzero((starts % block == 0) & (starts > 0)).tolist()]
            saves = self._saves(at_boundary, copies, shape)
            copies += [(save.request.slot, save.slot) for save in saves]
            plan = self._build(rows, shape, entries, copies, steps)
        except Exception:
            self._cache.release_blocks(taken)
            self._publisher.cancel(saves)
            raise
        self._steps += 1
        arrays = (slots, ends, fed, limits, np.maximum(held, blocks), np.maximum(tabled, blocks))
        decode = (shape, plan) if shape is not None and max(counts, default=2) == 1 else None
        self._rows = rows._replace(arrays=arrays, restored=[], decode=decode)
        for i, path in paths.items():
            requests[i].blocks, requests[i].num_tabled = path, int(blocks[i])
        for save in saves:
            self._publisher.publish(save.request, save.request.num_cached)  # its last step is kept whole now
        self._publisher.saved(saves)
        for request in rows.restored:
            if request.restores is not None:
                self._cache.tree.unpin_snapshot(request.restores)
                request.restores = None
        for request, count in zip(requests, counts, strict=True):
            request.fed = count * steps
            request.num_cached += request.fed
            request.last_step = self._steps
        for i in np.flatnonzero(ends // block > starts // block).tolist():
            self._publisher.mark(requests[i])
        self._cache.end_copies()
        self._step_transfers = self._cache.transfers.drain()
        return plan

    def take_transfers(self) -> list[TransferStage]:
        """What must travel between the tiers before the step planned last runs, stage by stage, in this order.

        `dsv4_jax.run_transfers(cache, host, stages)` runs them. Without a host tier there never is any;
        with one, call it after every `plan_step` (and after `sleep`), before the step.
        """
        stages, self._step_transfers = self._step_transfers, []
        return stages

    def commit(self) -> None:
        """Makes the blocks that the steps planned so far have filled matchable for others.

        Planning and admitting do this too. A step that may still be cut by `accept` waits for that.
        """
        self._publisher.commit(self._final_tokens)

    def _acquire_blocks(self, count: int) -> list[int]:
        """Raises `OutOfBlocksError`, and counts that."""
        try:
            return self._cache.acquire_blocks(count)
        except OutOfBlocksError:
            self._cache.failures["device"] += 1
            raise

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

    def _build(
        self,
        rows: _Rows,
        shape: StepShape | None,
        entries: list[tuple[int, int, int]],
        slot_copies: list[tuple[int, int]],
        steps: int,
    ) -> StepPlan:
        """The plan; its shape is what it needs, in powers of two, unless given."""
        block_copies = [(source, block) for block, source in self._cache.copies.blocks.items()]
        slots, starts, counts, *_ = rows.arrays
        extras = dict(
            size=self.size, table_entries=entries, slot_copies=slot_copies, block_copies=block_copies,
            lookahead=steps - 1,
        )  # fmt: skip
        if shape is not None and rows.decode is not None and rows.decode[0] == shape:
            return next_decode(self.layout, rows.decode[1], shape, starts, **extras)
        fed = np.stack([slots, starts, counts], 1)
        if shape is None:
            shape = shape_for(
                self.layout, fed, table_entries=len(entries), slot_copies=len(slot_copies),
                block_copies=len(block_copies), lookahead=steps - 1,
            ).bucketed(self.size.max_blocks_per_request)  # fmt: skip
        elif shape.columns > self.size.max_blocks_per_request:
            raise PlanError(f"columns={shape.columns}: the table has {self.size.max_blocks_per_request}")
        return build_plan(self.layout, fed, shape, **extras)

    def _feeds(self, feeds: Iterable[Feed], steps: int) -> tuple[list[Request], list[int]]:
        """The requests and their token counts, checked one by one."""
        counts: dict[Request, int] = {}
        live = self._live
        for feed in feeds:
            try:
                request, count = feed
            except (TypeError, ValueError) as error:
                raise PlanError(f"a feed is a (request, number of tokens) pair, got {feed!r}") from error
            # In full only what is not plainly right: hundreds of rows pass here every step.
            if type(request) is not Request or live.get(request.slot) is not request:
                request = self._checked(request)
            if type(count) is not int or count < 1:
                count = as_count("a row's number of tokens", count, 1)
            if request in counts:
                raise PlanError(f"request {request.id!r} is fed twice in one step")
            if steps > 1 and count != 1:
                raise PlanError(f"{steps} steps in one plan feed one token per row, request {request.id!r} has {count}")
            counts[request] = count
        return list(counts), list(counts.values())

    def plan_tokens(self, plan: StepPlan) -> np.ndarray:
        """The token ids of a plan, [T] int32 in its order (padding: 0), from the requests' `tokens`.

        Call it before the requests are released. For a plan of K steps: the tokens of the first.

        Raises:
            RequestError: a request of the plan is gone, or does not know the tokens it feeds.
        """
        ids: list[int] = []
        live = self._live
        for slot, start, count in zip(
            plan.row_slot.tolist(), plan.row_start.tolist(), plan.row_count.tolist(), strict=True
        ):
            if not slot:
                continue
            request = live.get(slot) or self._checked(slot)
            if len(request.tokens) < start + count:
                known = len(request.tokens)
                raise RequestError(
                    f"request {request.id!r} knows {known} tokens, the plan feeds {start}..{start + count - 1}"
                )
            ids += request.tokens[start : start + count]
        out = np.zeros(plan.num_tokens, np.int32)
        out[: len(ids)] = self._token_ids(ids)  # rows follow each other, padding stands last
        return out

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
        request, n_kept = self._checked(request), as_count("n_kept", n_kept)
        fed, drafts = request.fed, self.layout.draft_tokens
        if not fed:
            raise PlanError(f"request {request.id!r} has no step to accept")
        if n_kept > fed:
            raise PlanError(f"request {request.id!r}: cannot keep {n_kept} of the {fed} tokens fed")
        if n_kept < fed and (not drafts or fed > 1 + drafts):
            raise PlanError(
                f"request {request.id!r}: a step of {fed} tokens cannot be cut to {n_kept} with draft_tokens={drafts}"
            )
        self._rows = None
        del request.tokens[request.num_cached - fed + n_kept : request.num_cached]
        request.num_cached += n_kept - fed
        request.fed = 0
        keep = self.layout.blocks_for(max(request.num_cached, request.reserved))
        self._cache.release_blocks(request.blocks[keep:])
        del request.blocks[keep:]
        request.num_tabled = min(request.num_tabled, keep)
        if n_kept < fed and request.hasher is not None and request.hasher.num_tokens > request.num_cached:
            request.hasher.truncate(request.num_cached)  # what follows in `tokens` has moved
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
        a snapshot. An empty result while tokens are pending means that blocks must be freed first:
        release or preempt a request.

        Args:
            token_budget: most tokens of the step.
            max_rows: most requests of the step.
            max_chunk: most tokens of one request.
            shape: the pinned shape the step must fit.
            requests: those to choose from, in the order of their turn for chunks; default: all live ones.

        Raises:
            PlanError: a number below 1.
            RequestError: one of `requests` is not live here.
        """
        budget = as_count("token_budget", token_budget, 1)
        rows = budget if max_rows is None else as_count("max_rows", max_rows, 1)
        chunk = budget if max_chunk is None else as_count("max_chunk", max_chunk, 1)
        chosen = self.requests if requests is None else [self._checked(request) for request in requests]
        self.commit()  # now, as `plan_step` would: blocks that turn out to be shared need table entries again
        room = Room(budget, rows, self._cache.num_available)
        if shape is not None:
            room = Room(
                min(room.tokens, shape.tokens), min(room.rows, shape.rows), room.blocks,
                shape.table_entries, shape.slot_copies - len(self._cache.copies.slots),
            )  # fmt: skip
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
        """
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
