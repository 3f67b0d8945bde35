"""What a coarse core does not plan at once changes nothing that it decides."""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest

import dsv4_jax as dsv4
from dsv4_jax.engine import CoarseCore, Core, Drawn, Limits, Output, Prompt, Work, shapes_of
from dsv4_jax.engine.shadow import answer_of
from dsv4_jax.errors import PlanError
from dsv4_jax.manager import CachePolicy, HostSize, KVCacheManager, Namespace

from .serving import BLOCK, CFG, COLUMNS

SLOTS, BLOCKS = 5, 2 * COLUMNS


class Known:
    """A core whose answers are known before they are asked for, step by step.

    Attributes:
        told: of each id, what it was told.
        ends: the step after which each ended, and how.
    """

    def __init__(self, coarse: bool, *, shards: int = 1, caching: bool = True, host: bool = True, slots: int = SLOTS):
        layout = dsv4.CacheLayout(CFG, "f32", "f32", block_tokens=BLOCK)
        size = dsv4.CacheSize(BLOCKS, slots, COLUMNS, num_snapshots=slots if caching else 0)
        policy, pages = CachePolicy() if caching else None, HostSize.of(layout, 20, 6) if host else None
        self.managers = [KVCacheManager(layout, size, policy=policy, host=pages) for _ in range(shards)]
        shapes, limits = shapes_of(self.managers, 24), Limits(queued=1000, aging=1.0)
        self.core: Core
        if coarse:
            self.core = CoarseCore(self.managers, shapes, self.answer, limits=limits)
        else:
            self.core = Core(self.managers, shapes, limits=limits, ahead=False)
        self.answers: dict[Any, list[int]] = {}
        self.told: dict[Any, list[int]] = {}
        self.ends: dict[Any, tuple[int, str]] = {}
        self.steps = self.planned = 0

    def add(self, text: list[int], count: int, **options: Any) -> None:
        name = len(self.answers)
        self.answers[name] = answer_of(text, count, name, CFG.vocab_size)
        self.told[name] = []
        self.core.add(Prompt(tokens=text, max_new_tokens=count, id=name, **options), self.steps * 0.1)

    def answer(self, job: Any, count: int) -> list[int]:
        return self.answers[job.id][len(job.out) : len(job.out) + count]

    def draw(self, work: Work) -> Drawn:
        tokens: list[list[list[int]]] = []
        for plan, rows in zip(work.plans, work.rows, strict=True):
            tokens.append([])
            for row, start, count in zip(rows, plan.seq_start.tolist(), plan.seq_count.tolist(), strict=False):
                at = start + count - len(row.prompt.tokens)
                tokens[-1].append(self.answers[row.prompt.id][at : at + 1] if row.samples else [])
        return Drawn(tokens)

    def note(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.told[output.id] += output.tokens
            if output.finish is not None:
                self.ends[output.id] = self.steps, output.finish

    def step(self) -> None:
        work = self.core.plan(self.steps * 0.1)
        self.note(self.core.drain())
        self.steps += 1
        if work is not None:
            self.planned += bool(work.plans)
            for stages in work.transfers:
                collections.deque(stages.calls(), maxlen=0)
            self.note(self.core.take(self.draw(work), self.steps * 0.1))

    @property
    def counts(self) -> dict[str, Any]:
        """What the managers have done."""
        stats = [manager.stats().cache.counters for manager in self.managers]
        return {"core": dict(self.core.counts), "managers": stats}


def run(seed: int, coarse: bool) -> Known:
    rng = random.Random(seed)
    server = Known(
        coarse,
        shards=rng.choice([1, 1, 2]),
        caching=rng.random() < 0.8,
        host=rng.random() < 0.6,
        slots=rng.choice([3, SLOTS, 12]),
    )
    base = [rng.randrange(CFG.vocab_size) for _ in range(60)]
    left = 30
    while left or not server.core.idle:
        while left and rng.random() < 0.2:
            left -= 1
            text = base[: rng.randrange(1, 60)] + [rng.randrange(CFG.vocab_size) for _ in range(rng.randrange(1, 30))]
            server.add(
                text,
                rng.randint(1, 90),
                namespace=rng.choice([None, Namespace(tenant="x")]),
                priority=rng.randint(0, 2),
                deadline=rng.choice([None, None, None, 12.0]),
                stop_tokens=rng.choice([(), (), (rng.randrange(CFG.vocab_size),)]),
            )
        if rng.random() < 0.02 and server.answers:
            server.core.abort(rng.choice([*server.answers]))
            server.note(server.core.drain())
        server.step()
    return server


@pytest.mark.parametrize("seed", range(10))
def test_decisions_are_those_of_planning_every_step(seed: int) -> None:
    """Tenants, priorities, aborts, deadlines, preemptions: every answer ends in the same step, with the same counts."""
    plain, coarse = run(seed, False), run(seed, True)
    assert coarse.ends == plain.ends and coarse.told == plain.told
    assert coarse.counts == plain.counts
    assert coarse.steps == plain.steps and coarse.planned <= plain.planned
    for manager in coarse.managers:
        manager.commit()
        manager.check_integrity()
        assert not manager.requests and not manager.preempted


def test_a_block_of_decodes_is_one_plan() -> None:
    server = Known(True)
    server.add([*range(10)], 4 * BLOCK)
    while not server.core.idle:
        server.step()
    assert (server.steps, server.told[0]) == (4 * BLOCK, server.answers[0])
    assert (
        server.planned == 2 + 2 * 4
    )  # the prompt; the end of its block; of each further one its first token and its last


def test_what_glides_is_told_of_when_the_core_sleeps() -> None:
    server = Known(True)
    server.add([*range(10)], 40)
    for _ in range(4):
        server.step()
    for stages in server.core.sleep():
        collections.deque(stages.calls(), maxlen=0)
    server.core.wakeup()
    while not server.core.idle:
        server.step()
    assert server.told[0] == server.answers[0]


def test_steps_that_cannot_be_coarse_are_refused() -> None:
    layout = dsv4.CacheLayout(CFG, "f32", "f32", block_tokens=BLOCK)
    manager = KVCacheManager(layout, dsv4.CacheSize(BLOCKS, SLOTS, COLUMNS))
    for shapes, why in (
        (shapes_of([manager], 24, steps=4), "single ones"),
        (shapes_of([manager], SLOTS), "leave out some of 5 decodes"),
    ):
        with pytest.raises(PlanError, match=why):
            CoarseCore(manager, shapes, lambda job, count: [0] * count)


def test_one_that_was_preempted_comes_back_with_its_blocks() -> None:
    """Without prefix caching, too, if a host tier keeps them: a step has room for its table entries."""
    layout = dsv4.CacheLayout(CFG, "f32", "f32", block_tokens=BLOCK)
    manager = KVCacheManager(layout, dsv4.CacheSize(BLOCKS, 1, COLUMNS), host=HostSize.of(layout, 20, 2))
    shape = manager.pinned_shape(1, BLOCK, history=True)
    request = manager.admit_request([*range(10 * BLOCK)])
    while request.num_pending > BLOCK:
        manager.plan_step(manager.schedule(BLOCK, shape=shape), shape=shape)
        manager.take_transfers()
    manager.preempt(request)
    manager.resume(request)
    assert request.num_cached == 9 * BLOCK and manager.schedule(BLOCK, shape=shape) == [(request, BLOCK)]
