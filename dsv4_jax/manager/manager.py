"""The plain manager: slots, blocks and steps of live requests. Pure Python + numpy, deterministic.

Every operation happens wholly or not at all: everything is checked, then changed. One thread drives it.

A step in three calls: `plan_step` reserves the blocks of the tokens it feeds, moves every request's
length ahead and returns the plan; `plan_tokens` lays the requests' token ids out for that plan; after
a step of drafts, `accept` sets the length back to what was kept. Plans must run in the order made.

A slot's block-table columns beyond its own blocks keep what an earlier request left there. They are
ids in range and lie beyond everything a step of the plan's tokens may see or write.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

import numpy as np

from ..errors import ContextLimitError, IntegrityError, NoFreeSlotError, PlanError, RequestError
from ..layout import CacheLayout, CacheSize
from ..plan import StepPlan
from .allocator import BlockAllocator, as_count
from .planning import StepShape, build_plan, shape_for
from .request import Request, RequestState
from .scheduling import Feed, schedule
from .stats import ManagerStats, compute_block_budget

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Decides which slot and blocks hold which tokens of which request.

    Args:
        layout: of the cache.
        size: of the cache; slots 1..num_slots and blocks 1..num_blocks are handed out, lowest first.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize):
        self.layout, self.size = layout, size
        self.generation = 0
        self._next_id = 0
        self._clear()

    def _clear(self) -> None:
        self._blocks = BlockAllocator(self.size.num_blocks)
        self._slots = BlockAllocator(self.size.num_slots, pool="slot")
        self._live: dict[int, Request] = {}  # by slot, in admission order
        self._ids: set[Hashable] = set()
        self._steps = 0

    @property
    def context_limit(self) -> int:
        """Tokens that one request can hold: the block table's width, and the model's own limit."""
        table = self.size.max_blocks_per_request * self.layout.block_tokens
        return min(table, self.layout.cfg.max_position_embeddings)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The live requests, in admission order."""
        return tuple(self._live.values())

    # Requests

    def admit_request(
        self, tokens: Iterable[int] = (), *, max_tokens: int | None = None, request_id: Hashable | None = None
    ) -> Request:
        """A new request in the lowest free slot. Takes no blocks: steps take them as they need them.

        Args:
            tokens: prompt ids, may be empty.
            max_tokens: the most tokens it may ever hold, prompt and output together (default and
                at most `context_limit`).
            request_id: any hashable that no live request has; default: a number that only grows.

        Raises:
            NoFreeSlotError: all slots are taken.
            ContextLimitError: the prompt or `max_tokens` is beyond the limit.
            RequestError: the id is in use, or a token is no id of the model's vocabulary.
        """
        prompt = self._token_ids(tokens if isinstance(tokens, np.ndarray) else list(tokens)).tolist()
        name = "new" if request_id is None else request_id
        limit = self.context_limit if max_tokens is None else as_count("max_tokens", max_tokens, 1)
        if limit > self.context_limit:
            raise ContextLimitError(name, limit, self.context_limit)
        if len(prompt) > limit:
            raise ContextLimitError(name, len(prompt), limit)
        if request_id is not None and request_id in self._ids:
            raise RequestError(f"request id {request_id!r} is in use by a live request")
        if not self._slots.num_free:
            raise NoFreeSlotError(self.size.num_slots)
        while request_id is None:
            self._next_id += 1
            request_id = None if self._next_id in self._ids else self._next_id
        (slot,) = self._slots.acquire(1)
        request = Request(request_id, slot, self.generation, limit, prompt)
        self._live[slot] = request
        self._ids.add(request_id)
        return request

    def release_request(self, request: Request | int) -> None:
        """Gives its blocks and its slot back.

        Raises:
            RequestError: it is not live here (released before, another manager's, an unknown slot).
        """
        request = self._checked(request)
        self._blocks.release(request.blocks)
        self._slots.release([request.slot])
        del self._live[request.slot]
        self._ids.discard(request.id)
        request.blocks, request.state = [], RequestState.RELEASED

    def reserve(self, request: Request | int, tokens: int) -> None:
        """Takes the blocks of its first `tokens` tokens now, so that steps up to there cannot run out.

        Raises:
            ContextLimitError, OutOfBlocksError, RequestError: as in `plan_step`.
        """
        request, tokens = self._checked(request), as_count("tokens", tokens)
        if tokens > request.max_tokens:
            raise ContextLimitError(request.id, tokens, request.max_tokens)
        missing = self.layout.blocks_for(tokens) - len(request.blocks)
        request.blocks += self._blocks.acquire(max(missing, 0))
        request.reserved = max(request.reserved, tokens)

    # Steps

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
        steps = as_count("steps", steps, 1)
        requests, counts = self._feeds(feeds, steps)
        slots = [r.slot for r in requests]
        state = [(r.num_cached, r.max_tokens, len(r.blocks), r.num_tabled) for r in requests]
        starts, limits, held, tabled = np.array(state, int).reshape(-1, 4).T
        ends = starts + np.array(counts, int) * steps
        blocks = -(-ends // self.layout.block_tokens)
        missing = np.maximum(blocks - held, 0)
        over = np.flatnonzero(ends > limits)
        if len(over):
            request = requests[over[0]]
            raise ContextLimitError(request.id, int(ends[over[0]]), request.max_tokens)
        taken = self._blocks.acquire(int(missing.sum()))
        try:
            fresh, entries = iter(taken), []
            paths: dict[int, list[int]] = {}  # of the rows that need table entries, by row
            for i in np.flatnonzero(tabled < blocks).tolist():
                paths[i] = requests[i].blocks + list(itertools.islice(fresh, missing[i]))
                entries += [(slots[i], column, paths[i][column]) for column in range(tabled[i], blocks[i])]
            rows = np.array([slots, starts, counts], int).T
            if shape is None:
                shape = shape_for(self.layout, rows, table_entries=len(entries), lookahead=steps - 1)
                shape = shape.bucketed(self.size.max_blocks_per_request)
            elif shape.columns > self.size.max_blocks_per_request:
                raise PlanError(f"columns={shape.columns}: the table has {self.size.max_blocks_per_request}")
            plan = build_plan(self.layout, rows, shape, table_entries=entries, lookahead=steps - 1)
        except Exception:
            self._blocks.release(taken)
            raise
        self._steps += 1
        for request, count in zip(requests, counts, strict=True):
            request.fed = count * steps
            request.num_cached += request.fed
            request.last_step = self._steps
        for i, path in paths.items():
            requests[i].blocks, requests[i].num_tabled = path, int(blocks[i])
        return plan

    def _feeds(self, feeds: Iterable[Feed], steps: int) -> tuple[list[Request], list[int]]:
        """The requests and their token counts, checked one by one."""
        counts: dict[Request, int] = {}
        for feed in feeds:
            try:
                request, count = feed
            except (TypeError, ValueError) as error:
                raise PlanError(f"a feed is a (request, number of tokens) pair, got {feed!r}") from error
            request, count = self._checked(request), as_count("a row's number of tokens", count, 1)
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
        out = np.zeros(plan.num_tokens, np.int64)
        rows = (plan.row_slot.tolist(), plan.row_start.tolist(), plan.row_count.tolist(), plan.row_first.tolist())
        for slot, start, count, first in zip(*rows, strict=True):
            if not slot:
                continue
            request = self._checked(slot)
            ids = request.tokens[start : start + count]
            if len(ids) != count:
                known = len(request.tokens)
                raise RequestError(
                    f"request {request.id!r} knows {known} tokens, the plan feeds {start}..{start + count - 1}"
                )
            out[first : first + count] = self._token_ids(ids)
        return out.astype(np.int32)

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
        del request.tokens[request.num_cached - fed + n_kept : request.num_cached]
        request.num_cached += n_kept - fed
        request.fed = 0
        keep = self.layout.blocks_for(max(request.num_cached, request.reserved))
        self._blocks.release(request.blocks[keep:])
        del request.blocks[keep:]
        request.num_tabled = min(request.num_tabled, keep)

    def schedule(
        self, token_budget: int, *, max_rows: int | None = None, max_chunk: int | None = None
    ) -> list[tuple[Request, int]]:
        """Feeds for the next step from the requests' pending tokens; `plan_step` takes them as they are.

        First every request with one pending token (a decode), the least recently fed first; then
        chunks of the others in admission order, as far as tokens, rows and free blocks reach. A
        chunk that lacks blocks holds back those behind it. So nobody starves: decodes take turns and
        end, and only the chunks that wait behind them make new ones. An empty result while tokens
        are pending means that blocks must be freed first.

        Args:
            token_budget: most tokens of the step.
            max_rows: most requests of the step.
            max_chunk: most tokens of one request.
        """
        budget = as_count("token_budget", token_budget, 1)
        return schedule(
            self.layout, self.requests, self._blocks.num_free, budget=budget,
            max_rows=budget if max_rows is None else as_count("max_rows", max_rows, 1),
            max_chunk=budget if max_chunk is None else as_count("max_chunk", max_chunk, 1),
        )  # fmt: skip

    def pinned_shape(
        self,
        rows: int,
        tokens: int | None = None,
        *,
        steps: int = 1,
        columns: int | None = None,
        history: bool | None = None,
    ) -> StepShape:
        """The shape of every step of up to `rows` requests and `tokens` tokens (default: one per row).

        Args:
            steps: K, for plans of K decode steps.
            columns: block-table columns a request may need; default: all.
            history: as in `StepShape.bound`.
        """
        return StepShape.bound(
            self.layout, rows, rows if tokens is None else tokens, lookahead=steps - 1, history=history,
            columns=self.size.max_blocks_per_request if columns is None else columns,
        )  # fmt: skip

    # Books

    def memory_bytes(self) -> int:
        """Bytes of the cache this manager manages: exactly what `init_cache` allocates."""
        return self.layout.total_bytes(self.size)

    compute_block_budget = staticmethod(compute_block_budget)

    def stats(self) -> ManagerStats:
        live = self.requests
        ahead = sum(len(r.blocks) - self.layout.blocks_for(r.num_cached) for r in live)
        blocks, slots = self._blocks, self._slots
        return ManagerStats(
            blocks.num_total, blocks.num_free, blocks.num_total - blocks.num_free, ahead,
            slots.num_total, slots.num_free, len(live), sum(r.num_cached for r in live), self.generation,
        )  # fmt: skip

    def reset(self) -> None:
        """Forgets every request; those admitted before are refused from now on."""
        for request in self.requests:
            request.blocks, request.state = [], RequestState.RELEASED
        self.generation += 1
        self._clear()

    def check_integrity(self) -> None:
        """The books agree with each other. For tests: O(blocks). Raises `IntegrityError`."""

        def require(condition: bool, problem: str) -> None:
            if not condition:
                raise IntegrityError(problem)

        self._blocks.check_integrity()
        self._slots.check_integrity()
        owned = [block for r in self.requests for block in r.blocks]
        require(all(self._blocks.is_held(block) for block in owned), "a request owns a block that is not held")
        require(len(set(owned)) == len(owned), "two requests own the same block")
        require(len(owned) + self._blocks.num_free == self.size.num_blocks, "a held block has no owner")
        require(len(self._live) + self._slots.num_free == self.size.num_slots, "a held slot has no request")
        require(self._ids == {r.id for r in self.requests}, "ids and live requests differ")
        for slot, r in self._live.items():
            name = f"request {r.id!r}"
            require(r.slot == slot and self._slots.is_held(slot), f"{name} is not in its slot")
            require(r.state is RequestState.LIVE and r.generation == self.generation, f"{name} is stale")
            require(0 <= r.fed <= r.num_cached <= r.max_tokens, f"{name}: impossible lengths")
            cached = self.layout.blocks_for(r.num_cached)
            require(cached <= r.num_tabled <= len(r.blocks), f"{name}: cached tokens without a table entry")
            require(
                len(r.blocks) == self.layout.blocks_for(max(r.num_cached, r.reserved)),
                f"{name} holds {len(r.blocks)} blocks for {r.num_cached} cached and {r.reserved} reserved tokens",
            )

    def _checked(self, request: Request | int) -> Request:
        """The live request meant. Raises `RequestError`."""
        if isinstance(request, Request):
            if self._live.get(request.slot) is request:
                return request
            why = "was released" if request.state is RequestState.RELEASED else "belongs to another manager"
            raise RequestError(f"request {request.id!r} {why}")
        try:
            slot = as_count("slot", request)
        except PlanError as error:
            raise RequestError(f"neither a request nor a slot: {request!r}") from error
        if slot not in self._live:
            raise RequestError(f"no live request in slot {slot} (slots are 1..{self.size.num_slots})")
        return self._live[slot]

    def _token_ids(self, tokens: list[int] | np.ndarray) -> np.ndarray:
        """[N] integers, checked against the vocabulary. Raises `RequestError`."""
        try:
            ids = np.asarray(tokens)
        except ValueError:  # ragged
            ids = np.zeros((), object)
        if ids.size == 0:
            ids = np.zeros(0, np.int64)
        vocab = self.layout.cfg.vocab_size
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ((ids < 0) | (ids >= vocab)).any():
            raise RequestError(f"tokens must be a flat sequence of integers in 0..{vocab - 1}")
        return ids
