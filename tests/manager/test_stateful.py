"""The manager against a model of a few dictionaries, over random histories."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from dsv4_jax.config import DSV4Config
from dsv4_jax.errors import (
    CacheError,
    ContextLimitError,
    NoFreeSlotError,
    OutOfBlocksError,
    RequestError,
)
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager import KVCacheManager, Request
from dsv4_jax.manager.step_shape import StepSequence

from .test_planning import check_plan

CFG = DSV4Config.tiny(hca_ratio=8)
LAYOUT = CacheLayout(CFG, block_tokens=8, draft_tokens=3)
SIZE = CacheSize(num_blocks=11, num_slots=3, max_blocks_per_request=5)
LIMIT = 40


class ManagerMachine(RuleBasedStateMachine):
    """`cached` is the model: tokens of every live request. The device's table is replayed from plans."""

    live = Bundle("live")
    gone = Bundle("gone")

    @initialize()
    def start(self) -> None:
        self.manager = KVCacheManager(LAYOUT, SIZE)
        self.cached: dict[Request, int] = {}
        self.reserved: dict[Request, int] = {}
        self.fed: dict[Request, int] = {}
        self.planned: dict[Request, int] = {}
        self.table = np.zeros((SIZE.slot_units, SIZE.max_blocks_per_request), np.int32)

    def used(self, cached: dict[Request, int]) -> int:
        return sum(-(-max(n, self.reserved[r]) // 8) for r, n in cached.items())

    @rule(target=live, prompt=st.lists(st.integers(0, 255), max_size=12))
    def admit(self, prompt: list[int]):
        slots = {r.slot for r in self.cached}
        if len(slots) == 3:
            try:
                self.manager.admit_request(prompt)
            except NoFreeSlotError:
                return multiple()
            raise AssertionError("a fourth request was admitted")
        request = self.manager.admit_request(prompt)
        assert request.slot == min({1, 2, 3} - slots)
        assert request.tokens == prompt
        self.cached[request], self.reserved[request], self.fed[request] = 0, 0, 0
        return request

    @rule(target=gone, request=consumes(live))
    def release(self, request: Request) -> Request:
        if request in self.cached:
            self.manager.release_request(request)
            del self.cached[request], self.reserved[request], self.fed[request]
        return request

    @rule(request=live, tokens=st.integers(0, 44))
    def reserve(self, request: Request, tokens: int) -> None:
        if request not in self.cached:
            return
        wanted = self.reserved | {request: max(tokens, self.reserved[request])}
        before, self.reserved = self.reserved, wanted
        fits = self.used(self.cached) <= 11 and tokens <= LIMIT
        try:
            self.manager.reserve(request, tokens)
            assert fits
        except (OutOfBlocksError, ContextLimitError):
            self.reserved = before
            assert not fits

    @rule(requests=st.lists(live, max_size=4), counts=st.lists(st.integers(1, 14), min_size=4, max_size=4))
    def step(self, requests: list[Request], counts: list[int]) -> None:
        self.run(list(zip(requests, counts, strict=False)), 1)

    @rule(requests=st.lists(live, min_size=1, max_size=3), steps=st.integers(1, 9))
    def decode(self, requests: list[Request], steps: int) -> None:
        self.run([(r, 1) for r in requests], steps)

    def run(self, scheduled: list[tuple[Request, int]], steps: int) -> None:
        named = [r for r, _ in scheduled]
        after = self.cached | {r: self.cached.get(r, 0) + n * steps for r, n in scheduled}
        legal = (
            all(r in self.cached for r in named)
            and len(set(named)) == len(named)
            and all(after[r] <= LIMIT for r in named)
            and self.used(after) <= 11
            # a chunk of which some tokens are known is known whole
            and not any(self.cached[r] < len(r.tokens) < self.cached[r] + n for r, n in scheduled if n > 4)
            # what several steps draw is not known before
            and not (steps > 1 and any(len(r.tokens) > self.cached[r] + 1 for r in named))
        )
        rows = [StepSequence(r.slot, self.cached.get(r, 0), n) for r, n in scheduled]
        try:
            plan = self.manager.plan_step(scheduled, steps=steps)
        except CacheError:
            assert not legal
            return
        assert legal
        check_plan(plan, rows, LAYOUT, steps=steps)
        for slot, column, block in zip(plan.table_slot, plan.table_index, plan.table_block, strict=True):
            self.table[slot, column] = block
        self.cached = after
        self.fed |= {r: n * steps for r, n in scheduled}
        self.planned |= {r: steps for r, _ in scheduled}

    @rule(request=live, drafts=st.integers(1, 3), kept=st.integers(0, 3))
    def verify(self, request: Request, drafts: int, kept: int) -> None:
        self.run([(request, 1 + drafts)], 1)
        self.accept(request, kept)

    @rule(request=live, kept=st.integers(0, 5))
    def accept(self, request: Request, kept: int) -> None:
        if request not in self.cached:
            return
        fed = self.fed[request]
        legal = fed and kept <= fed and (kept == fed or fed <= 4)
        try:
            self.manager.accept(request, kept)
        except CacheError:
            assert not legal
            return
        assert legal
        self.cached[request] += kept - fed
        self.fed[request] = 0

    @rule(request=live, steps=st.integers(1, 9))
    def end_early(self, request: Request, steps: int) -> None:
        """So many steps of its last plan ran, and all of what they computed is kept."""
        if request not in self.cached:
            return
        fed, planned = self.fed[request], self.planned.get(request, 1)
        try:
            self.manager.accept(request, fed // planned * steps, steps=steps)
        except CacheError:
            assert not fed or steps > planned
            return
        assert fed and steps <= planned
        self.cached[request] += fed // planned * steps - fed
        self.fed[request] = 0

    @rule(request=gone)
    def nothing_works_for_a_released_request(self, request: Request) -> None:
        for call in (
            lambda: self.manager.release_request(request),
            lambda: self.manager.accept(request, 0),
            lambda: self.manager.reserve(request, 1),
            lambda: self.manager.plan_step([(request, 1)]),
        ):
            try:
                call()
            except RequestError:
                continue
            raise AssertionError("a released request was accepted")

    @rule()
    def scheduled_feeds_always_plan(self) -> None:
        scheduled = self.manager.schedule(9, max_sequences=2, max_chunk=6)
        assert len(scheduled) <= 2
        assert sum(n for _, n in scheduled) <= 9
        assert all(1 <= n <= min(6, r.num_pending) for r, n in scheduled)
        before = self.cached
        self.run(scheduled, 1)
        assert self.cached == before | {r: before[r] + n for r, n in scheduled}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert {r: r.num_cached for r in self.manager.requests} == self.cached
        stats = self.manager.stats()
        assert stats.blocks_used == self.used(self.cached)
        assert stats.blocks_free == 11 - stats.blocks_used
        assert (stats.slots_used, stats.tokens_cached) == (len(self.cached), sum(self.cached.values()))
        assert not self.table[0].any()
        for request, cached in self.cached.items():
            blocks = -(-cached // 8)
            assert self.table[request.slot, :blocks].tolist() == request.blocks[:blocks]


ManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestManager = ManagerMachine.TestCase
