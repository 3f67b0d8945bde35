"""K steps in one executable equal K executables, byte for byte, and neither copies a pool."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, init_cache, model
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model.sampling import sample

from .feeding import CFG, decode_step, prefill, text_tokens

LAYOUT = CacheLayout(CFG)  # the default formats
STEPS = 40  # from token 100 on: past a block boundary, several HCA flushes, many CSA flushes
decode_loop = jax.jit(model.decode_loop, donate_argnames="cache", static_argnames=("num_steps", "sampling"))


@pytest.fixture(scope="module")
def params():
    return model.init_params(CFG, seed=1)


def prefilled(params):
    """A cache and a manager with two requests of 100 and 37 tokens, and each one's next token."""
    size = CacheSize(4, 2, 2)
    cache, manager = init_cache(LAYOUT, size), KVCacheManager(LAYOUT, size)
    requests = [manager.admit_request(text_tokens(n).tolist()) for n in (100, 37)]
    plan = manager.plan_step([(r, r.num_pending) for r in requests], shape=manager.pinned_shape(2, 144, history=True))
    logits, cache = prefill(params, cache, plan.pack(), manager.plan_tokens(plan))
    return cache, manager, requests, np.asarray(logits.argmax(-1), np.int32)


@pytest.mark.slow
def test_loop_equals_steps(params):
    """The same tokens and the same cache bytes, and each call consumes the cache it was given."""
    sampling, keys = model.Sampling(temperature=0.8, top_k=20, top_p=0.9), jax.random.split(jax.random.key(5), 2)
    start, manager, requests, first = prefilled(params)
    shape = manager.pinned_shape(2, steps=STEPS)
    plan = manager.plan_step([(r, 1) for r in requests], steps=STEPS, shape=shape)
    looped, loop_cache = decode_loop(params, start, plan.pack(), first, num_steps=STEPS, sampling=sampling, keys=keys)
    looped = np.asarray(looped)
    assert looped.shape == (STEPS, 2)
    assert len(set(looped[:, 0].tolist())) > 3, "a constant output would prove little"
    assert all(leaf.is_deleted() for leaf in start.arrays.values())

    cache, manager, requests, tokens = prefilled(params)
    draw = jax.jit(functools.partial(sample, sampling=sampling))
    for i in range(STEPS):
        plan = manager.plan_step([(r, 1) for r in requests], shape=shape)
        before = cache
        logits, cache = decode_step(params, cache, plan.pack(), tokens)
        assert all(leaf.is_deleted() for leaf in before.arrays.values())
        tokens = np.asarray(draw(logits, keys=keys, position=plan.token_position))
        np.testing.assert_array_equal(tokens, looped[i], err_msg=f"step {i}")
    for name, leaf in cache.arrays.items():
        np.testing.assert_array_equal(np.asarray(loop_cache.arrays[name]), np.asarray(leaf), err_msg=name)


@pytest.mark.parametrize("steps", [None, 8], ids=["decode_step", "decode_loop"])
def test_no_copies(params, steps):
    """Donated bytes are all reused, temporaries are small beside a pool, nothing of a pool's size is copied."""
    size = CacheSize(20_000, 2_000, 8)
    cache = jax.eval_shape(lambda: init_cache(LAYOUT, size))
    manager = KVCacheManager(LAYOUT, size)
    plan = manager.plan_step([(manager.admit_request(), 1) for _ in range(2)], steps=steps or 1)
    arguments = (params, cache, plan.pack(), jax.ShapeDtypeStruct((2,), jnp.int32))
    lowered = decode_loop.lower(*arguments, num_steps=steps) if steps else decode_step.lower(*arguments)
    compiled = lowered.compile()

    total = LAYOUT.total_bytes(size)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == total
    assert memory.temp_size_in_bytes < min(0.02 * total, smallest_pool(size, LAYOUT.leaf_bytes))
    # The order of dimensions aside: a bitcast copy of a pool is a copy of a pool.
    copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\(", compiled.as_text())
    largest = max((math.prod(map(int, dims.split(","))) for dims in copied), default=0)
    assert largest < smallest_pool(size, lambda leaf, size: math.prod(LAYOUT.leaf_shape(leaf, size)))


def smallest_pool(size, measure) -> int:
    """The least of the cache's leaves, the block table apart, by `measure`."""
    return min(measure(leaf, size) for leaf in LAYOUT.leaves if leaf.scope != "table")
