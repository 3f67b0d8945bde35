"""dsv4_jax.testing: a right step passes every comparison, and each comparison sees the mistake it is for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import (
    AttentionType,
    CacheLayout,
    CacheSize,
    DSV4Config,
    KVCacheManager,
    init_cache,
    init_host_cache,
    model,
    testing,
)
from dsv4_jax.errors import PlanError, ShapeError
from dsv4_jax.testing import StepRunner
from dsv4_jax.testing.invariance import chunkings
from dsv4_jax.testing.live import Held, assert_untouched
from dsv4_jax.testing.mixes import Mix

from ..model.feeding import SMALL_WIDTHS

_, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(**SMALL_WIDTHS, layer_types=(CSA, HCA), max_position_embeddings=64)
LAYOUT = CacheLayout(CFG, "f32", "f32", block_tokens=8)
PARAMS = model.init_params(CFG, 0)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, CFG.vocab_size, n).tolist() for n in (37, 21, 5)]


def runner(step: Callable = model.forward) -> StepRunner:
    return StepRunner(step, PARAMS, LAYOUT)


def test_mixes_keep_to_the_context_of_a_small_cache() -> None:
    small = StepRunner(model.forward, PARAMS, LAYOUT, size=CacheSize(12, 2, 3))
    for seed in range(20):
        mix = Mix(small, init_cache(LAYOUT, small.size), init_host_cache(LAYOUT, 1), seed, Counter())
        for _ in range(4):
            mix.admit(mix.prompt())
        assert all(job.total <= 24 for job in mix.jobs.values()) and len(mix.jobs) == mix.manager.size.num_slots


def test_a_right_step_passes_all() -> None:
    right = runner()
    testing.assert_chunking_invariant(right, PROMPTS[0])
    testing.assert_batch_invariant(right, PROMPTS)
    seen = testing.assert_serving_invariant(right, mixes=2)
    assert seen["comparisons"] > 5 and seen["mixes"] == 2 and not seen["drafts accepted"]
    assert right.executables == 1


def test_a_comparison_of_nothing_is_refused() -> None:
    for compare, problem in (
        (lambda right: testing.assert_chunking_invariant(right, PROMPTS[0], []), "no chunks to cut 37 tokens into"),
        (lambda right: testing.assert_batch_invariant(right, PROMPTS[:1]), "at least two, got 1 prompts"),
        (lambda right: testing.assert_batch_invariant(right, []), "at least two, got 0 prompts"),
        (
            lambda right: testing.assert_serving_invariant(right, mixes=0),
            "mixes must be an integer of at least 1, got 0",
        ),
    ):
        with pytest.raises(PlanError, match=problem):
            compare(runner())


# Mistakes, each seen by the comparison that is for it.


def by_place_in_the_step(params, cache, plan, tokens):
    """As if a position were counted from the first token of the step."""
    logits, cache = model.forward(params, cache, plan, tokens)
    return logits + jnp.arange(logits.shape[0], dtype=jnp.float32)[:, None], cache


def by_the_neighbours(params, cache, plan, tokens):
    """As an expert's capacity would, that all requests of a step share."""
    logits, cache = model.forward(params, cache, plan, tokens)
    slot = jnp.asarray(plan.unpack().token_slot)
    others = ((slot[:, None] != slot[None]) & (slot > 0)[None]).sum(-1)
    return logits * (np.float32(1) + others.astype(jnp.float32))[:, None], cache


def wrong_bytes(params, cache, plan, tokens):
    """One bit of a pool, after steps of more than one token."""
    logits, cache = model.forward(params, cache, plan, tokens)
    (pool,) = cache.pool("csa")
    odd = (jnp.asarray(plan.unpack().seq_count).max() > 1).astype(jnp.float32)
    return logits, cache.with_pool("csa", (pool + odd * np.float32(0.125),))


def the_cache_it_was_given(params, cache, plan, tokens):
    """Every write of the step is lost."""
    logits, _ = model.forward(params, cache, plan, tokens)
    return logits, cache


def without_snapshots(params, cache, plan, tokens):
    """The plan's copies between slots are not carried out: what restores a prefix, or forks."""
    plan = plan.unpack()
    return model.forward(params, cache, plan._replace(copy_slot_dst=plan.copy_slot_dst * np.int32(0)), tokens)


def test_positions_of_the_step_are_seen() -> None:
    with pytest.raises(AssertionError, match=r"\[16, 16, 5\] against single tokens: logits of position 1 "):
        testing.assert_chunking_invariant(runner(by_place_in_the_step), PROMPTS[0])


def test_lost_writes_are_seen() -> None:
    with pytest.raises(AssertionError, match=r"\[8\] against single tokens: logits of position 1 differ"):
        testing.assert_chunking_invariant(runner(the_cache_it_was_given), PROMPTS[0][:8], [[8]])


def test_neighbours_are_seen() -> None:
    wrong = runner(by_the_neighbours)
    testing.assert_chunking_invariant(wrong, PROMPTS[0], [[16, 16, 5]])
    with pytest.raises(AssertionError, match=r"prompt 0 among 3 against alone: logits of position \d+ differ"):
        testing.assert_batch_invariant(wrong, PROMPTS)


def test_wrong_bytes_are_seen_before_they_reach_a_logit() -> None:
    with pytest.raises(AssertionError, match=r"csa part 0: \d+ of \d+ bytes differ, first at \[layer, row, byte\]"):
        testing.assert_chunking_invariant(runner(wrong_bytes), PROMPTS[0][:8], [[8]])


@pytest.mark.slow
def test_what_only_a_manager_brings_about_is_seen() -> None:
    wrong = runner(without_snapshots)
    testing.assert_chunking_invariant(wrong, PROMPTS[0], [[16, 16, 5]])
    testing.assert_batch_invariant(wrong, PROMPTS)
    with pytest.raises(AssertionError, match="differ"):
        testing.assert_serving_invariant(wrong, mixes=10)


def test_a_runner_needs_the_logits_of_every_token() -> None:
    with pytest.raises(ShapeError, match=r"logits \(4, 32\): comparisons need those of every token, \(16, vocab\)"):
        testing.assert_chunking_invariant(runner(model.prefill), PROMPTS[0])
    with pytest.raises(PlanError, match="do not cut 5 tokens"):
        testing.assert_chunking_invariant(runner(), PROMPTS[2], [[2, 2]])


def test_chunkings_cut_all_tokens() -> None:
    some = list(chunkings(runner(), 37))
    assert all(sum(sizes) == 37 and min(sizes) > 0 and max(sizes) <= 16 for sizes in some)
    assert len({tuple(sizes) for sizes in some}) == len(some) == 5


# Caches


def test_same_cache() -> None:
    manager, cache = KVCacheManager(LAYOUT, CacheSize(6, 2, 3)), init_cache(LAYOUT, CacheSize(6, 2, 3))
    requests = [manager.admit_request(PROMPTS[1]) for _ in range(2)]
    step = jax.jit(model.forward, donate_argnames="cache")
    plan = manager.plan_step([(request, 21) for request in requests])
    _, cache = step(PARAMS, cache, plan.pack(), manager.plan_tokens(plan))
    one, two = map(Held.of, requests)
    assert one.length == 21 and set(one.blocks).isdisjoint(two.blocks)
    testing.assert_same_cache(cache, one, cache, two)
    assert_untouched(cache, {one.slot, two.slot}, {*one.blocks, *two.blocks})
    with pytest.raises(AssertionError, match="here: 21 tokens, expected 20"):
        testing.assert_same_cache(cache, one, cache, two._replace(length=20), context="here")
    with pytest.raises(AssertionError, match=r"csa part 0: \d+ of"):
        testing.assert_same_cache(cache, one, cache, two._replace(blocks=two.blocks[::-1]))
    with pytest.raises(AssertionError, match=r"a free or null unit changed: block 1"):
        assert_untouched(cache, {one.slot, two.slot}, {*one.blocks, *two.blocks} - {1})
    for leaf in LAYOUT.leaves:
        if leaf.scope == "table":
            continue
        arrays = cache.arrays | {leaf.name: cache.arrays[leaf.name] + cache.arrays[leaf.name].dtype.type(1)}
        with pytest.raises(AssertionError, match=rf"{leaf.pool} part 0: \d+ of \d+ bytes differ"):
            testing.assert_same_cache(dataclasses.replace(cache, arrays=arrays), one, cache, one)


# Compiled steps


def operands() -> tuple:
    size = CacheSize(2000, 200, 4)
    manager = KVCacheManager(LAYOUT, size)
    plan = manager.plan_step([(manager.admit_request([1]), 1) for _ in range(2)])
    return init_cache(LAYOUT, size), plan.pack(), np.zeros(plan.num_tokens, np.int32)


def updated(cache, plan, tokens):
    logits, cache = model.forward(PARAMS, cache, plan, tokens)
    return cache, logits


def one_more(cache, plan, tokens):
    """The old rows are read after the new ones are written."""
    old = cache.arrays["csa.row"]
    cache, logits = updated(cache, plan, tokens)
    return cache, logits, old


def upside_down(cache, plan, tokens):
    cache, logits = updated(cache, plan, tokens)
    return dataclasses.replace(cache, arrays={name: x[::-1] for name, x in cache.arrays.items()}), logits


def in_another_dtype(cache, plan, tokens):
    cache, logits = updated(cache, plan, tokens)
    (values,) = cache.pool("csa")
    return cache.with_pool("csa", (values.astype(jnp.bfloat16),)), logits


def test_no_copies() -> None:
    args = operands()
    compiled = testing.assert_no_copies(updated, *args)
    new, _ = compiled(*args)
    assert new.layout == LAYOUT and all(x.is_deleted() for x in args[0].arrays.values())


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (one_more, r"\['csa.row'\] is copied \d times"),
        pytest.param(upside_down, "bytes of temporaries for|is copied", marks=pytest.mark.slow),
        (in_another_dtype, "donated bytes are updated in place"),
    ],
)
def test_copies_are_seen(step: Callable, problem: str) -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands())
    with pytest.raises(AssertionError, match=problem):
        testing.assert_no_copies(step, *shapes)


def test_one_trace() -> None:
    step = jax.jit(testing.assert_one_trace(lambda x, flag: x["a"] * 2), static_argnums=1)
    for value in (1, 2):
        assert int(step({"a": jnp.int32(value)}, True)) == 2 * value
    with pytest.raises(AssertionError, match=r"traced again: .*\['a'\]: int32\[\] -> int32\[2\]"):
        step({"a": jnp.ones(2, jnp.int32)}, True)
    with pytest.raises(AssertionError, match="True -> False"):
        step({"a": jnp.int32(1)}, False)
    eager = testing.assert_one_trace(lambda x: x + x)
    assert [float(eager(x)) for x in (jnp.float32(1), jnp.float32(2))] == [2, 4]
