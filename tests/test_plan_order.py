"""Checked caches: plans that run twice, are left out or come out of order raise; what managers do in order does not."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import (
    AttentionType,
    CacheLayout,
    CachePolicy,
    CacheSize,
    DSV4Config,
    KVCache,
    KVCacheManager,
    cache_sharding,
    init_cache,
    init_host_cache,
    run_transfers,
    shard_step,
    stack_plans,
    stack_transfers,
)
from dsv4_jax.cache import LENGTH, WRONG
from dsv4_jax.errors import LayoutError, StepError

CFG = DSV4Config.tiny(layer_types=(AttentionType.HCA,), hca_ratio=8)
LAYOUT, DRAFTING = CacheLayout(CFG, "f32", block_tokens=8), CacheLayout(CFG, "f32", block_tokens=8, draft_tokens=2)
SIZE = CacheSize(12, 2, 6, num_snapshots=2)


def write(params, cache, plan, tokens):
    """A step of which the one layer's window is written."""
    step = cache.begin(plan)
    kv = jnp.broadcast_to(tokens[:, None].astype(jnp.float32), (step.plan.num_tokens, CFG.head_dim))
    return tokens, step.layer(0).append(kv).step.finish(partial=True)


jit_write = jax.jit(write, donate_argnums=1)


class Engine:
    def __init__(self, layout: CacheLayout = LAYOUT, **options) -> None:
        self.manager = KVCacheManager(layout, SIZE, **options)
        self.cache = init_cache(layout, SIZE, checked=True)
        self.shape = dataclasses.replace(self.manager.pinned_shape(2, 16, history=True), block_copies=2)

    def plan(self, request, count, **options):
        return self.manager.plan_step([(request, count)], shape=self.shape, **options)

    def run(self, plan) -> None:
        _, self.cache = jit_write((), self.cache, plan.pack(), np.zeros(plan.num_tokens, np.int32))

    def length(self, slot: int) -> int:
        self.cache.check_order()
        return int(self.cache.arrays[LENGTH][slot, 0])


def test_a_plan_run_twice_left_out_or_out_of_order() -> None:
    def started() -> tuple[Engine, list]:
        engine = Engine()
        request = engine.manager.admit_request(range(12))
        engine.run(engine.plan(request, 5))
        return engine, [engine.plan(request, 1) for _ in range(3)]

    for order, start, length in (((0, 0), 5, 6), ((1,), 6, 5), ((0, 2), 7, 6), ((0, 1, 0), 5, 7)):
        engine, plans = started()
        for i in order[:-1]:
            engine.run(plans[i])
        engine.cache.check_order()
        engine.run(plans[order[-1]])
        for use in (engine.cache.check_order, partial(engine.run, plans[0]), partial(jax.tree.leaves, engine.cache)):
            with pytest.raises(StepError, match=f"began at token {start} of slot 1, which has {length}"):
                use()
    engine, plans = started()
    for plan in plans:
        engine.run(plan)
    assert engine.length(1) == 8


def test_without_jit_the_step_itself_raises_and_the_cache_stays_as_it_was() -> None:
    engine = Engine()
    request = engine.manager.admit_request(range(12))
    first, second = engine.plan(request, 5), engine.plan(request, 1)
    with pytest.raises(StepError, match="began at token 5 of slot 1, which has 0"):
        write((), engine.cache, second, np.zeros(second.num_tokens, np.int32))
    engine.run(first)
    engine.run(second)
    assert engine.length(1) == 6


def test_drafts_may_be_taken_back_and_no_more() -> None:
    engine = Engine(DRAFTING)
    request = engine.manager.admit_request(range(10))
    engine.run(engine.plan(request, 10))
    assert engine.length(1) == 10
    for kept in (1, 0, 3, 2):
        engine.run(plan := engine.plan(request, 3))
        engine.run(plan)  # writes the same again
        engine.manager.accept(request, kept)
    assert (engine.length(1), request.num_cached) == (17, 16)
    late = engine.plan(request, 1)
    engine.run(late._replace(seq_start=late.seq_start + np.int32(2) * (late.seq_slot > 0)))
    with pytest.raises(StepError, match="began at token 18 of slot 1, which has 17 tokens"):
        engine.cache.check_order()


def test_loops_of_several_steps() -> None:
    """Cut short with the manager told of it, and not; and a row that the loop was fed -1 for."""

    @jax.jit
    def loop(cache, plan, tokens, steps):
        plan = plan.unpack()
        cache, plan = cache.begin(plan).finish(partial=True), plan.settled().only(tokens >= 0)

        def body(i, cache):
            return write((), cache, plan.advance(i), jnp.zeros(plan.num_tokens, jnp.int32))[1]

        return jax.lax.fori_loop(0, steps, body, cache)

    for fed, told, ends in ((0, True, True), (0, False, False), (-1, False, False)):
        engine = Engine()
        request = engine.manager.admit_request(range(5))
        engine.run(engine.plan(request, 5))
        shape = engine.manager.pinned_shape(2, steps=4)
        for ran in (4, 3, 4):
            plan = engine.manager.plan_step([(request, 1)], steps=4, shape=shape)
            engine.cache = loop(engine.cache, plan.pack(), np.full(2, fed, np.int32), ran)
            if ran == 3 and told:
                engine.manager.accept(request, 3, steps=3)
            if not ends and ran == 3:
                break
        plan = engine.plan(request, 1)
        if ends:
            engine.run(plan)
            assert engine.length(1) == 17
        else:
            with pytest.raises(StepError, match="a row that it counts was fed -1"):
                engine.run(plan), engine.cache.check_order()


def test_requests_that_come_back() -> None:
    """From a snapshot on the device in another slot, as a fork, and from the host."""
    engine = Engine(policy=CachePolicy(), host=(100,))
    manager, host = engine.manager, init_host_cache(LAYOUT, 100)

    def turn(request, count):
        nonlocal host
        plan = engine.plan(request, count)
        engine.cache, host = run_transfers(engine.cache, host, manager.take_transfers())
        engine.run(plan)
        manager.plan_tokens(plan)

    first = manager.admit_request(range(20))
    turn(first, 16)
    turn(first, 4)
    (fork,) = manager.fork(first)
    fork.tokens.append(7)
    manager.release_request(first)
    turn(fork, 1)
    again = manager.admit_request(range(20))
    assert again.num_cached == 16 and again.slot != fork.slot
    turn(again, 4)
    fork.tokens.append(8)
    manager.preempt(fork)
    other = manager.admit_request(range(100, 103))
    turn(other, 3)
    manager.release_request(other)
    manager.release_request(again)
    manager.resume(fork)
    assert fork.num_cached == 21
    turn(fork, 1)
    assert engine.length(fork.slot) == 22


def test_over_a_mesh() -> None:
    """Each data shard has lengths of its own."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    managers = [KVCacheManager(LAYOUT, SIZE, policy=CachePolicy(), host=(100,)) for _ in range(2)]
    where = cache_sharding(LAYOUT, mesh)
    cache = init_cache(LAYOUT, SIZE, sharding=where, checked=True)
    host = init_host_cache(LAYOUT, 100, sharding=where.arrays["block_table.ids"])
    step, shape = shard_step(write, mesh), managers[0].pinned_shape(2, 16, history=True)
    requests = [manager.admit_request(range(12)) for manager in managers]

    def turn(*counts: int) -> list:
        nonlocal cache, host
        each = list(zip(managers, requests, counts, strict=True))
        plans = [m.plan_step([(request, n)] if n else [], shape=shape) for m, request, n in each]
        tokens = np.concatenate([m.plan_tokens(plan) for m, plan in zip(managers, plans, strict=True)])
        cache, host = run_transfers(cache, host, stack_transfers([m.take_transfers() for m in managers]))
        _, cache = step((), cache, stack_plans(plans), tokens)
        return plans

    turn(12, 7)
    requests[0].tokens.append(3)
    managers[0].preempt(requests[0])
    parked, requests[0] = requests[0], managers[0].admit_request([5])
    turn(1, 1)
    managers[0].release_request(requests[0])
    requests[0] = parked
    managers[0].resume(requests[0])
    assert requests[0].num_cached == 12
    plans = turn(1, 1)
    cache.check_order()
    assert np.asarray(cache.arrays[LENGTH]).reshape(2, -1)[:, 1].tolist() == [13, 9]
    nothing = managers[0].plan_step([], shape=shape)
    _, cache = step((), cache, stack_plans([nothing, plans[1]]), np.zeros(2 * shape.tokens, np.int32))
    with pytest.raises(StepError, match="began at token 8 of slot 1, which has 9"):
        cache.check_order()


def test_what_is_refused() -> None:
    with pytest.raises(LayoutError, match="checked is True or False: got 1"):
        init_cache(LAYOUT, SIZE, checked=1)
    engine = Engine()
    plan = engine.plan(engine.manager.admit_request([1]), 1)
    whole = engine.cache.arrays
    for arrays in (
        whole | {LENGTH: jnp.zeros((2, 1), jnp.int32)},
        {name: whole[name] for name in whole if name != WRONG},
    ):
        with pytest.raises(LayoutError, match=r"checked.length is .*: of 5 slots both have \[5, 1\]"):
            KVCache(arrays, LAYOUT).begin(plan)
