"""Requests and steps of the plain manager: results, refusals, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import operator
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import dsv4_jax
from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import (
    CacheError,
    ContextLimitError,
    IntegrityError,
    NoFreeSlotError,
    OutOfBlocksError,
    PlanError,
    RequestError,
)
from dsv4_jax.manager import CachePolicy, StepShape, scheduling
from dsv4_jax.manager.request import RequestState

from ..effort import lines_run

BLOCK = 128


def make(num_blocks: int = 8, num_slots: int = 3, columns: int = 4, *, drafts: int = 2, **config) -> KVCacheManager:
    layout = CacheLayout(DSV4Config.tiny(**config), draft_tokens=drafts)
    return KVCacheManager(layout, CacheSize(num_blocks, num_slots, columns))


def books(manager: KVCacheManager) -> tuple:
    """All that a refused call must leave as it was."""
    requests = [copy.deepcopy({name: getattr(r, name) for name in r.__slots__}) for r in manager.requests]
    return (
        manager.stats()[:10],
        manager.stats().cache.pools,
        requests,
        bytes(manager.cache.blocks._held),
        bytes(manager.cache.slots._held),
    )


def refused(
    manager: KVCacheManager, error: type[CacheError], call: Callable[[], object], match: str | None = None
) -> None:
    before = books(manager)
    with pytest.raises(error, match=match):
        call()
    assert books(manager) == before
    manager.check_integrity()


def entries(plan) -> list[tuple[int, int, int]]:
    """The table entries of a plan, padding left out."""
    triples = zip(plan.table_slot.tolist(), plan.table_index.tolist(), plan.table_block.tolist(), strict=True)
    return [t for t in triples if t[0]]


# Import


def test_the_manager_imports_no_jax() -> None:
    code = "import sys, dsv4_jax.manager, dsv4_jax; dsv4_jax.KVCacheManager; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert {"KVCacheManager", "CachePolicy"} <= set(dsv4_jax.__all__)


# Admission and release


def test_slots_and_ids() -> None:
    manager = make()
    a, b, c = manager.admit_request(), manager.admit_request([1, 2]), manager.admit_request(np.array([3], np.int32))
    assert [r.slot for r in (a, b, c)] == [1, 2, 3]
    assert [r.id for r in (a, b, c)] == [1, 2, 3]
    assert (a.tokens, b.tokens, c.tokens) == ([], [1, 2], [3])
    assert type(c.tokens[0]) is int
    assert (b.num_cached, b.blocks, b.state, b.num_pending) == (0, [], RequestState.LIVE, 2)
    manager.release_request(b)
    d = manager.admit_request()
    assert (d.slot, d.id) == (2, 4)
    assert manager.requests == (a, c, d)
    assert np.arange(9)[d] == 2
    assert manager.stats().blocks_used == 0


def test_callers_ids() -> None:
    manager = make()
    a = manager.admit_request(request_id="a")
    assert a.id == "a"
    refused(manager, RequestError, lambda: manager.admit_request(request_id="a"), "in use")
    manager.admit_request(request_id=1)
    assert manager.admit_request().id == 2
    manager.release_request(a)
    assert manager.admit_request(request_id="a").slot == 1


def test_no_free_slot() -> None:
    manager = make(num_slots=1)
    manager.admit_request()
    refused(manager, NoFreeSlotError, manager.admit_request, "max concurrent requests exceeded")


@pytest.mark.parametrize("config", [{}, dict(max_position_embeddings=300)])
def test_context_limit_is_checked_at_admission(config: dict) -> None:
    manager = make(**config)
    limit = config.get("max_position_embeddings", 4 * BLOCK)
    assert manager.context_limit == limit
    refused(manager, ContextLimitError, lambda: manager.admit_request([0] * (limit + 1)), f"limit of {limit}")
    refused(manager, ContextLimitError, lambda: manager.admit_request(max_tokens=limit + 1))
    refused(manager, ContextLimitError, lambda: manager.admit_request([0] * 5, max_tokens=4), "request new: 5 tokens")
    assert manager.admit_request([0] * limit).max_tokens == limit


def test_a_prompt_that_all_blocks_do_not_hold_is_refused_at_admission() -> None:
    """It was admitted, and an engine preempted and resumed it for ever. One token after the prompt has to fit as well,
    if the request says that there will be any."""
    manager = make(num_blocks=3, columns=8)
    assert (manager.context_limit, manager.pool_limit) == (8 * BLOCK, 3 * BLOCK)
    most = 3 * BLOCK
    for tokens, limit in ((most + 1, None), (8 * BLOCK, None), (most + 1, most + 1), (most, most + 1)):
        options, why = dict(max_tokens=limit), "all 3 blocks .* 384 tokens"
        refused(manager, ContextLimitError, lambda n=tokens, o=options: manager.admit_request([0] * n, **o), why)
        refused(manager, ContextLimitError, lambda n=tokens, o=options: manager.can_admit(n, **o), why)
    for tokens, limit in ((most, None), (most, most), (most - 1, most), (most - 1, 8 * BLOCK)):
        assert manager.can_admit(tokens, max_tokens=limit)
        request = manager.admit_request([0] * tokens, max_tokens=limit)  # which comes to its end
        while scheduled := manager.schedule(100, requests=[request]):
            manager.plan_step(scheduled)
        assert request.num_cached == len(request.tokens)
        manager.release_request(request)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_request_that_outgrows_all_blocks_is_said_to_have(drafts: int) -> None:
    """Nothing was offered: preempting it, as one does then, and resuming it led here again, for ever."""
    manager = make(num_blocks=2, columns=8, drafts=drafts)
    request, other = manager.admit_request([0] * 250), manager.admit_request([1] * 3, max_tokens=3)
    steps = 0
    with pytest.raises(ContextLimitError, match="request 1: 257 tokens exceed all 2 blocks of the cache") as outgrown:
        while True:
            if scheduled := manager.schedule(64):
                manager.plan_step(scheduled)
                if not request.num_pending:
                    request.tokens += [5] * (1 + drafts)
            elif manager.preempted:
                manager.resume(manager.preempted[0])
            else:
                manager.preempt(manager.requests[-1])
            steps += 1
            assert steps < 100
    assert (outgrown.value.request, outgrown.value.limit, request.num_cached) == (1, 256, 256)
    del request.tokens[257:]  # plans of several steps draw what comes after their first token
    for call in (
        lambda: manager.schedule(1),
        lambda: manager.plan_step([(request, 1)]),
        lambda: manager.reserve(request, 257),
        lambda: manager.plan_step([(request, 1)], steps=3),
    ):
        refused(manager, ContextLimitError, call, "all 2 blocks")
    manager.release_request(request)
    if manager.preempted:
        manager.resume(other)
    assert manager.schedule(64) == ([(other, 3)] if other.num_pending else [])


def test_drafts_that_all_blocks_do_not_hold_are_left_out() -> None:
    """A step of them is too long where one token is not: as wherever blocks are short."""
    manager = make(num_blocks=1, columns=8)
    request = manager.admit_request([0] * (BLOCK - 2))
    manager.plan_step([(request, BLOCK - 2)])
    refused(manager, OutOfBlocksError, lambda: manager.plan_step([(request, 3)]))
    refused(
        manager, ContextLimitError, lambda: manager.plan_step([(request, 1)], steps=3), "129 tokens exceed all 1 blocks"
    )
    manager.plan_step([(request, 1)], steps=2)


def test_whether_one_can_be_admitted_is_asked_for_nothing() -> None:
    manager = make(num_slots=2)
    first = manager.admit_request([1] * 9)
    assert manager.can_admit() and manager.can_admit(np.int64(9), max_tokens=20)
    manager.admit_request()
    before = books(manager), manager.stats()
    assert not any(manager.can_admit(9) for _ in range(3))
    assert (books(manager), manager.stats()) == before and not manager.stats().cache.admission_failures
    for wrong in (dict(num_tokens=10, max_tokens=9), dict(num_tokens=9999), dict(max_tokens=9999)):
        refused(manager, ContextLimitError, lambda w=wrong: manager.can_admit(**w))
    for wrong in (dict(num_tokens=-1), dict(num_tokens=1.0), dict(max_tokens=0)):
        refused(manager, PlanError, lambda w=wrong: manager.can_admit(**w))
    refused(manager, RequestError, lambda: manager.can_resume(first), "not preempted")
    manager.preempt(first)
    assert manager.can_resume(first) and manager.can_admit()
    manager.admit_request()
    assert not manager.can_resume(first)
    refused(manager, NoFreeSlotError, lambda: manager.resume(first))
    manager.sleep()
    assert not manager.can_admit() and not manager.can_resume(first)


def test_every_reason_for_which_a_request_does_not_become_live_is_counted() -> None:
    """Only slots were."""
    manager = make(num_blocks=3, num_slots=2, columns=8)
    request = manager.admit_request([1] * 9)
    for error, call in (
        (ContextLimitError, lambda: manager.admit_request([0] * 400)),
        (ContextLimitError, lambda: manager.admit_request([0] * 4, max_tokens=2)),
        (ContextLimitError, lambda: manager.admit_request(max_tokens=10**6)),
        (NoFreeSlotError, lambda: manager.fork(request, request_ids=[None] * 2)),
    ):
        refused(manager, error, call)
    assert manager.stats().cache.admission_failures == {"context": 3, "slot": 1}
    manager.plan_step([(request, 9)])
    manager.reserve(request, 3 * BLOCK)
    refused(manager, OutOfBlocksError, lambda: manager.fork(request))
    manager.preempt(request)
    for _ in range(2):
        manager.admit_request()
    refused(manager, NoFreeSlotError, lambda: manager.resume(request))
    refused(manager, NoFreeSlotError, manager.admit_request)
    refused(manager, RequestError, lambda: manager.admit_request([-1]))  # a mistake, no want of room
    assert manager.stats().cache.admission_failures == {"context": 3, "slot": 3, "device": 1}


def test_a_request_is_shown_in_one_line() -> None:
    manager = make()
    request = manager.admit_request([7] * 500, request_id="a\nb" * 3)
    assert repr(request) == r"<Request 'a\nba\nba\nb' live in slot 1: 0 of 500 tokens cached>"
    manager.plan_step([(request, 200)])
    manager.preempt(request)
    assert repr(request).endswith("preempted: 0 of 500 tokens cached>")

    class Name:
        def __repr__(self) -> str:
            return "two\nlines" * 100

    other = manager.admit_request(request_id=Name())
    assert len(repr(other).splitlines()) == 1 and len(repr(other)) < 300
    manager.release_request(other)
    assert "released" in repr(other)


@pytest.mark.parametrize("tokens", [[-1], [256], [1.0], [[1]], ["a"], [1, None], np.array([[1]]), [True], [1, [2, 3]]])
def test_bad_token_ids(tokens: object) -> None:
    manager = make()
    refused(manager, RequestError, lambda: manager.admit_request(tokens), "tokens must be")


@pytest.mark.parametrize("max_tokens", [0, -3, 2.0, "9"])
def test_bad_max_tokens(max_tokens: object) -> None:
    manager = make()
    refused(manager, PlanError, lambda: manager.admit_request(max_tokens=max_tokens))


def test_release() -> None:
    manager, other = make(), make()
    a, b = manager.admit_request(), manager.admit_request()
    foreign = other.admit_request()
    manager.plan_step([(a, 200), (b, 10)])
    manager.release_request(a)
    assert manager.stats()[:4] == (8, 7, 1, 0)
    assert (a.state, a.blocks) == (RequestState.RELEASED, [])
    refused(manager, RequestError, lambda: manager.release_request(a), "request 1 was released")
    refused(manager, RequestError, lambda: manager.release_request(foreign), "another manager")
    with pytest.raises(RequestError, match="has no slot"):
        operator.index(a)
    manager.release_request(b)
    assert b.state is RequestState.RELEASED
    assert manager.stats().blocks_free == 8


def test_reset_refuses_older_requests() -> None:
    manager = make()
    old = manager.admit_request([1, 2])
    manager.plan_step([(old, 2)])
    manager.reset()
    assert manager.stats()[:9] == (8, 8, 0, 0, 3, 3, 0, 0, 1)
    new = manager.admit_request()
    assert (new.slot, new.generation, new.id) == (1, 1, 2)
    calls = (manager.release_request, lambda r: manager.plan_step([(r, 1)]), lambda r: manager.accept(r, 1))
    for call in calls:
        refused(manager, RequestError, lambda call=call: call(old), "released")


# Steps


def test_mixed_step() -> None:
    manager = make()
    a, b, c = (manager.admit_request() for _ in range(3))
    plan = manager.plan_step([(b, 130), (a, 1), (c, 3)])
    assert entries(plan) == [(2, 0, 1), (2, 1, 2), (1, 0, 3), (3, 0, 4)]
    assert (a.blocks, b.blocks, c.blocks) == ([3], [1, 2], [4])
    assert [r.num_cached for r in (a, b, c)] == [1, 130, 3]
    assert plan.seq_slot.tolist() == [2, 1, 3, 0]
    plan = manager.plan_step([(a, 127), (b, 1)])
    assert entries(plan) == []
    plan = manager.plan_step([(a, 1)])
    assert entries(plan) == [(1, 1, 5)]
    manager.check_integrity()


def test_an_empty_step_is_all_padding() -> None:
    manager = make()
    shape = manager.pinned_shape(2)
    plan = manager.plan_step([], shape=shape)
    assert not plan.seq_slot.any()
    assert (plan.group_tokens == 2).all()
    assert (plan.flush_tokens == 2).all()
    assert manager.plan_tokens(plan).tolist() == [0, 0]


def test_steps_ahead() -> None:
    manager = make()
    a, b = manager.admit_request(), manager.admit_request()
    manager.plan_step([(a, 126), (b, 3)])
    plan = manager.plan_step([(a, 1), (b, 1)], steps=4)
    assert entries(plan) == [(1, 1, 3)]
    assert (a.num_cached, b.num_cached, a.blocks) == (130, 7, [1, 3])
    assert plan.table_columns.tolist() == [0, 1]
    assert plan.seq_start.tolist() == [126, 3]
    most = 1 + manager.layout.draft_tokens
    refused(
        manager, PlanError, lambda: manager.plan_step([(a, 1), (b, most + 1)], steps=2), f"up to {most} tokens each"
    )
    refused(manager, PlanError, lambda: manager.plan_step([(a, 1)], steps=0))
    refused(manager, ContextLimitError, lambda: manager.plan_step([(a, 1)], steps=383), "513 tokens exceed")
    refused(
        manager, PlanError, lambda: manager.plan_step([(a, 1)], steps=300, shape=manager.pinned_shape(1, columns=3))
    )


def test_steps_with_drafts_ahead() -> None:
    """What they keep is known afterwards: until then a request may end, and nothing else."""
    manager = make(num_blocks=6)
    a, b = manager.admit_request([7] * 127), manager.admit_request([8] * 3)
    manager.plan_step([(a, 126), (b, 2)])
    shape, count = manager.pinned_shape(2, 6, steps=3), a.num_cached
    plan = manager.plan_step([(a, 3), (b, 3)], steps=3, shape=shape)
    assert (a.num_cached, b.num_cached) == (count + 9, 11) and len(a.blocks) == 2
    assert entries(plan) == [(a.slot, 1, a.blocks[1])] and plan.seq_start.tolist() == [126, 2]
    waits = "has 3 steps with drafts that were not accepted"
    refused(manager, PlanError, lambda: manager.plan_step([(a, 1)]), waits)
    refused(manager, PlanError, lambda: manager.fork(a), waits)
    a.tokens += [9] * 20  # else it could not be resumed, whatever was kept
    refused(manager, PlanError, lambda: manager.preempt(a), waits)
    refused(manager, PlanError, lambda: manager.sleep(), waits)
    refused(manager, PlanError, lambda: manager.accept(a, 2), "3 steps with drafts keep a token each, not 2")
    refused(manager, PlanError, lambda: manager.accept(a, 10), "cannot keep 10 of the 9 tokens")
    manager.accept(a, 5)
    assert a.num_cached == count + 5
    refused(manager, PlanError, lambda: manager.accept(a, 5), "no step to accept")
    manager.release_request(b)
    assert manager.plan_step([(a, 1)]).seq_start.tolist()[0] == count + 5
    manager.check_integrity()


def test_two_hundred_steps_of_one_shape() -> None:
    manager = make(num_blocks=12, num_slots=4)
    rng, shapes = np.random.default_rng(0), set()
    shape = manager.pinned_shape(4)
    for _ in range(200):
        if len(manager.requests) < 4 and rng.random() < 0.3:
            manager.admit_request()
        for request in manager.requests:
            if rng.random() < 0.02 or request.num_cached > 300:
                manager.release_request(request)
        plan = manager.plan_step([(r, 1) for r in manager.requests], shape=shape)
        shapes.add(plan.pack().shapes)
    assert len(shapes) == 1
    assert plan.num_tokens == plan.num_seqs == 4


def test_the_default_shape_of_decode_steps_depends_on_rows_and_columns_alone() -> None:
    manager = make()
    a, b = manager.admit_request(), manager.admit_request()
    manager.plan_step([(a, 1), (b, 100)])
    shapes = {manager.plan_step([(a, 1), (b, 1)]).pack().shapes for _ in range(28)}
    assert len(shapes) == 1
    assert manager.plan_step([(a, 1), (b, 1)]).pack().shapes not in shapes  # b sees a second column


def test_refused_steps_change_nothing() -> None:
    manager = make(num_blocks=4)
    a, b = manager.admit_request(), manager.admit_request(max_tokens=200)
    gone = manager.admit_request()
    manager.release_request(gone)
    foreign = make().admit_request()
    manager.plan_step([(a, 100), (b, 128)])
    full = r"KV cache OOM in the device pool: requested 3 blocks, 2 available \(of 4 total\)"
    refused(manager, OutOfBlocksError, lambda: manager.plan_step([(b, 1), (a, 200)]), full)
    refused(manager, ContextLimitError, lambda: manager.plan_step([(a, 1), (b, 73)]), "201 tokens .* 200")
    refused(manager, PlanError, lambda: manager.plan_step([(a, 1), (a, 1)]), "twice")
    refused(manager, RequestError, lambda: manager.plan_step([(a, 1), (gone, 1)]), "released")
    refused(manager, RequestError, lambda: manager.plan_step([(a, 1), (foreign, 1)]), "another manager")
    refused(manager, RequestError, lambda: manager.plan_step([(3, 1)]), "not a Request")
    for count in (0, -1, 1.0, None, True):
        refused(manager, PlanError, lambda count=count: manager.plan_step([(a, 1), (b, count)]))
    for pair in (a, (a,), (a, 1, 1), "ab1"):
        refused(
            manager, PlanError, lambda pair=pair: manager.plan_step([pair]), "are .request, number of tokens. pairs"
        )
    small = StepShape(1, 4, 4, 4, 4, 4, 1)
    refused(manager, PlanError, lambda: manager.plan_step([(a, 1), (b, 1)], shape=small), "sequences=2")
    refused(manager, PlanError, lambda: manager.plan_step([(b, 5)], shape=small), "tokens=5")
    wide = manager.pinned_shape(4, columns=5)
    refused(manager, PlanError, lambda: manager.plan_step([(a, 1)], shape=wide), "columns=5")
    assert entries(manager.plan_step([(b, 1)])) == [(2, 1, 3)]


def test_plan_tokens() -> None:
    manager = make()
    a, b = manager.admit_request(range(10)), manager.admit_request([7])
    plan = manager.plan_step([(b, 1), (a, 4)])
    assert manager.plan_tokens(plan).tolist() == [7, 0, 1, 2, 3, 0, 0, 0]
    assert manager.plan_tokens(plan).dtype == np.int32
    b.tokens.append(np.int64(9))
    plan = manager.plan_step([(b, 1), (a, 6)], shape=manager.pinned_shape(2, 7))
    assert manager.plan_tokens(plan).tolist() == [9, 4, 5, 6, 7, 8, 9]
    plan = manager.plan_step([(b, 1)])
    with pytest.raises(RequestError, match=r"knows 2 tokens, the plan schedules 2\.\.2"):
        manager.plan_tokens(plan)
    b.tokens.append(-1)
    with pytest.raises(RequestError, match="tokens must be"):
        manager.plan_tokens(plan)
    manager.release_request(b)
    with pytest.raises(RequestError, match="no live request"):
        manager.plan_tokens(plan)


# Accept and reserve


@pytest.mark.parametrize("kept", range(4))
def test_accept(kept: int) -> None:
    manager = make(drafts=3)
    a = manager.admit_request([5] * 127)
    manager.plan_step([(a, 126)])
    a.tokens += [1, 2, 3]
    manager.plan_step([(a, 4)])
    assert (a.num_cached, a.blocks) == (130, [1, 2])
    manager.accept(a, kept)
    assert a.num_cached == 126 + kept
    assert a.tokens == [5] * 126 + [5, 1, 2, 3][:kept]
    assert a.blocks == ([1] if kept <= 2 else [1, 2])
    manager.check_integrity()
    refused(manager, PlanError, lambda: manager.accept(a, 0), "no step to accept")
    b = manager.admit_request()
    manager.plan_step([(b, 1)])
    plan = manager.plan_step([(a, 4)])
    assert entries(plan) == ([(1, 1, 3)] if kept <= 2 else [])


def test_accept_all_keeps_pending_prompt_tokens() -> None:
    manager = make()
    a = manager.admit_request(range(50))
    manager.plan_step([(a, 40)])
    manager.accept(a, 40)
    assert (a.num_cached, a.num_pending, len(a.tokens)) == (40, 10, 50)


def test_a_loop_of_fewer_steps_than_were_planned() -> None:
    """What did not run is pending again, and its blocks go back."""
    manager = make(num_blocks=6, drafts=0)
    a, b = manager.admit_request([5] * 127), manager.admit_request([6] * 2)
    manager.plan_step([(a, 126), (b, 1)])
    plan = manager.plan_step([(a, 1), (b, 1)], steps=9)
    assert plan.seq_stop.tolist() == [135, 10] and (a.num_cached, b.num_cached) == (135, 10)
    for steps, problem in (
        (0, "steps must be an integer of at least 1"),
        (10, "10 steps ran of a plan of 9"),
        (1.5, "steps must"),
    ):
        refused(manager, PlanError, lambda steps=steps: manager.accept(a, 1, steps=steps), problem)
    refused(manager, PlanError, lambda: manager.accept(a, 3, steps=2), "cannot keep 3 of the 2 tokens")
    refused(manager, PlanError, lambda: manager.accept(a, 1, steps=2), "a step of 2 tokens cannot be cut to 1")
    a.tokens += [7, 8, 9, 9, 9]  # 9: of steps that did not run
    manager.accept(a, 2, steps=2)
    manager.accept(b, 9, steps=9)
    assert (a.num_cached, a.num_pending, len(a.blocks), b.num_cached) == (128, 4, 1, 10)
    assert a.tokens[126:] == [5, 7, 8, 9, 9, 9]
    manager.check_integrity()
    plan = manager.plan_step([(a, 4)])
    assert plan.seq_start.tolist()[0] == 128 and len(entries(plan)) == 1

    manager = make(drafts=2, num_blocks=6)
    a = manager.admit_request()
    manager.plan_step([(a, 3)], steps=4)
    refused(manager, PlanError, lambda: manager.accept(a, 1, steps=2), "2 steps with drafts keep a token each, not 1")
    refused(manager, PlanError, lambda: manager.accept(a, 7, steps=2), "cannot keep 7 of the 6")
    manager.accept(a, 3, steps=2)
    assert a.num_cached == 3
    manager.check_integrity()


def test_steps_that_did_not_run_are_not_taken_back_from_others() -> None:
    """Blocks that they were to fill are cached by now: only an abort takes these out again."""
    layout = CacheLayout(DSV4Config.tiny())
    manager = KVCacheManager(layout, CacheSize(6, 3, 4, num_snapshots=4), policy=CachePolicy())
    a = manager.admit_request([5] * 121)
    manager.plan_step([(a, 120)])
    manager.plan_step([(a, 1)], steps=9)
    a.tokens += [5] * 9
    manager.commit()
    with pytest.raises(PlanError, match="9 steps have filled are cached already"):
        manager.accept(a, 2, steps=2)
    manager.accept(a, 8, steps=8)
    manager.check_integrity()


def test_refused_accepts_change_nothing() -> None:
    manager, plain = make(drafts=2), make(drafts=0)
    a, b = manager.admit_request(), plain.admit_request()
    refused(manager, PlanError, lambda: manager.accept(a, 0), "no step")
    manager.plan_step([(a, 4)])
    plain.plan_step([(b, 1)])
    refused(manager, PlanError, lambda: manager.accept(a, 3), "a step of 4 tokens cannot be cut to 3")
    refused(manager, PlanError, lambda: manager.accept(a, 5), "cannot keep 5 of the 4")
    refused(plain, PlanError, lambda: plain.accept(b, 0), "draft_tokens=0")
    for kept in (-1, 1.0, None):
        refused(manager, PlanError, lambda kept=kept: manager.accept(a, kept))
    refused(manager, RequestError, lambda: manager.accept(b, 1))
    plain.accept(b, 1)
    manager.plan_step([(a, 1)], steps=4)
    refused(manager, PlanError, lambda: manager.accept(a, 2), "cannot be cut")
    manager.plan_step([(a, 1)], steps=3)
    manager.accept(a, 1)
    assert a.num_cached == 9


def test_reserve() -> None:
    manager = make(num_blocks=4)
    a, b = manager.admit_request(), manager.admit_request()
    manager.reserve(a, 300)
    assert (a.blocks, manager.stats().blocks_ahead) == ([1, 2, 3], 3)
    refused(manager, OutOfBlocksError, lambda: manager.reserve(b, 129), "requested 2 blocks, 1 available")
    refused(manager, ContextLimitError, lambda: manager.reserve(b, 513))
    assert entries(manager.plan_step([(a, 128), (b, 128)])) == [(1, 0, 1), (2, 0, 4)]
    assert entries(manager.plan_step([(a, 2)])) == [(1, 1, 2)]
    manager.accept(a, 0)
    assert (a.blocks, manager.stats().blocks_ahead) == ([1, 2, 3], 2)
    manager.check_integrity()
    assert [entries(manager.plan_step([(a, n)])) for n in (1, 127, 44)] == [[], [], [(1, 2, 3)]]
    refused(manager, OutOfBlocksError, lambda: manager.plan_step([(a, 100)]))
    manager.release_request(a)
    assert manager.stats().blocks_free == 3


# Schedule


def test_schedule_decodes_first_then_chunks_in_admission_order() -> None:
    manager = make(num_blocks=20, num_slots=5)
    long, short, d1, d2 = (manager.admit_request([1] * n) for n in (300, 40, 1, 1))
    manager.admit_request()
    assert manager.schedule(100) == [(d1, 1), (d2, 1), (long, 98)]
    assert manager.schedule(100, max_chunk=64) == [(d1, 1), (d2, 1), (long, 64), (short, 34)]
    assert manager.schedule(100, max_sequences=3, max_chunk=8) == [(d1, 1), (d2, 1), (long, 8)]
    assert manager.schedule(1) == [(d1, 1)]
    for name in ("token_budget", "max_sequences", "max_chunk"):
        refused(manager, PlanError, lambda name=name: manager.schedule(**{"token_budget": 1} | {name: 0}), name)


def test_schedule_starves_no_request() -> None:
    manager = make(num_blocks=20, num_slots=6)
    for n in (200, 1, 1, 90, 1, 1):
        manager.admit_request([1] * n)
    target = {r: len(r.tokens) + 5 for r in manager.requests}
    for _ in range(200):
        scheduled = manager.schedule(2)
        if not scheduled:
            break
        manager.plan_step(scheduled)
        for request, _ in scheduled:
            if not request.num_pending and len(request.tokens) < target[request]:
                request.tokens.append(2)
    assert {r: r.num_cached for r in manager.requests} == target


def test_schedule_stays_within_the_free_blocks() -> None:
    manager = make(num_blocks=3, num_slots=4, columns=3)
    a, b, c = manager.admit_request([1] * 256), manager.admit_request([1] * 200), manager.admit_request([1] * 2)
    scheduled = manager.schedule(500)
    assert scheduled == [(a, 256), (b, 128)]
    manager.plan_step(scheduled)
    a.tokens.append(1)
    assert manager.schedule(500) == []
    manager.release_request(a)
    assert manager.schedule(500) == [(b, 72), (c, 2)]


@pytest.mark.parametrize("seed", range(6))
def test_many_requests_are_offered_what_few_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    layout = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=8)
    size = CacheSize(120, 24, 12, num_snapshots=10)
    manager = KVCacheManager(layout, size, policy=CachePolicy() if seed % 2 else None)
    for _ in range(60):
        while manager.can_admit() and draw.random() < 0.6:
            manager.admit_request([draw.randrange(3)] * draw.randint(0, 40), max_tokens=draw.choice([None, 50]))
        for request in manager.requests:
            if not request.num_pending and draw.random() < 0.8 and len(request.tokens) < 96:
                request.tokens.append(draw.randrange(50))
            if draw.random() < 0.03:
                manager.release_request(request)
        ahead, shape = draw.random() < 0.5, draw.choice([None, manager.pinned_shape(24, 64)])
        options = dict(max_sequences=draw.choice([None, 5, 30]), ahead=ahead, shape=shape)
        if draw.random() < 0.5:
            options["requests"] = draw.sample(manager.requests, draw.randint(0, len(manager.requests)))
        budget = draw.randint(1, 64)
        manager.schedule(budget, **options)  # what newcomers find they have now
        offers = []
        for many in (0, 10**9):
            monkeypatch.setattr(scheduling, "_MANY", many)
            offers.append(manager.schedule(budget, **options))
        assert offers[0] == offers[1]
        if not offers[0] and manager.requests:
            manager.release_request(manager.requests[-1])
            continue
        plan = manager.plan_step(offers[0], shape=shape, ahead=ahead)
        list(manager.take_transfers())
        manager.plan_tokens(plan, unknown=-1)
        for request, _ in offers[0]:
            if len(request.tokens) < request.num_cached:
                request.tokens.append(7)
        manager.check_integrity()


@pytest.mark.parametrize("caching", [False, True])
def test_plans_of_the_rows_of_before_are_those_made_anew(caching: bool) -> None:
    layout = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=8)
    policy = CachePolicy() if caching else None
    managers = [KVCacheManager(layout, CacheSize(80, 4, 16, num_snapshots=4), policy=policy) for _ in range(2)]
    shape, plans = managers[0].pinned_shape(4, 8), []
    for manager in managers:
        for n in (1, 4, 7):
            manager.admit_request([n] * n, max_tokens=60)
    for step in range(50):
        for manager in managers:
            for request in manager.requests:
                if not request.num_pending and len(request.tokens) < 60:
                    request.tokens.append(step)
        managers[1].steps.forget_batch()
        plans = [m.plan_step(m.schedule(8, shape=shape), shape=shape) for m in managers]
        np.testing.assert_array_equal(plans[0].pack().vector, plans[1].pack().vector)
        tokens = [m.plan_tokens(plan) for m, plan in zip(managers, plans, strict=True)]
        np.testing.assert_array_equal(*tokens)
        assert managers[0].stats()[:10] == managers[1].stats()[:10]
        names = ("num_cached", "num_tabled", "num_scheduled", "loop", "last_step", "blocks", "tokens", "history")
        here, there = ([[getattr(r, name) for name in names] for r in m.requests] for m in managers)
        assert here == there


# Books


def test_block_budget() -> None:
    layout = CacheLayout(DSV4Config.flash())
    budget = KVCacheManager.compute_block_budget(layout, 100_000, 4)
    assert (budget["blocks"], budget["slots"]) == (4 * 782, 4)
    size = CacheSize(4 * 782, 4, 782)
    assert budget["total"] == layout.total_bytes(size) == KVCacheManager(layout, size).memory_bytes()
    assert budget["total"] == sum(v for k, v in budget.items() if k not in ("blocks", "slots", "total"))
    units = 4 * 782 + 1
    assert [budget[k] for k in ("csa", "hca", "index")] == [
        21 * 32 * 584 * units,
        20 * 584 * units,
        21 * 32 * 68 * units,
    ]
    swa = KVCacheManager.compute_block_budget(
        CacheLayout(DSV4Config.tiny(layer_types=layout.cfg.layer_types[:1])), 9, 1
    )
    assert (swa["csa"], swa["hca"], swa["index"]) == (0, 0, 0)
    for bad in ((0, 1), (1, 0), (1.5, 1), (1, -1)):
        with pytest.raises(PlanError):
            KVCacheManager.compute_block_budget(layout, *bad)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m, a, b: a.blocks.append(b.blocks[0]),
        lambda m, a, b: a.blocks.pop(),
        lambda m, a, b: a.blocks.append(7),
        lambda m, a, b: setattr(a, "num_cached", 129),
        lambda m, a, b: setattr(a, "slot", 2),
        lambda m, a, b: setattr(a, "generation", 5),
        lambda m, a, b: m.cache.blocks._held.__setitem__(0, 1),
        lambda m, a, b: m.cache.blocks._freed[0].append(1),
        lambda m, a, b: m.book.ids.clear(),
    ],
)
def test_check_integrity_sees_it(break_it: Callable) -> None:
    manager = make()
    a, b = manager.admit_request(), manager.admit_request()
    manager.plan_step([(a, 5), (b, 5)])
    manager.check_integrity()
    break_it(manager, a, b)
    with pytest.raises(IntegrityError):
        manager.check_integrity()


def test_planning_a_decode_costs_a_few_lines() -> None:
    """Whatever the batch: 30 lines of Python each at first, none in the next steps (their time: bench_manager.py)."""

    def cost(batch: int) -> tuple[int, int]:
        manager = make(num_blocks=1200, num_slots=batch)
        scheduled = [(manager.admit_request(), 1) for _ in range(batch)]
        shape = manager.pinned_shape(batch)
        first, again = (lines_run(manager.plan_step, scheduled, shape=shape) for _ in range(2))
        return first, again

    (first, again), (first_of_more, again_of_more) = cost(256), cost(512)
    assert 0 < first_of_more - first <= 45 * 256 and again_of_more == again
