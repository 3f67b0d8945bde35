"""K steps in one executable equal K executables, byte for byte, and neither copies a pool."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, init_cache, model
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model import SamplingRows
from dsv4_jax.model.sampling import bias_rows, sample_rows, token_counts

from .feeding import CFG, decode_step, prefill, text_tokens

LAYOUT = CacheLayout(CFG)  # the default formats
SIZE = CacheSize(4, 2, 2)
STEPS = 40  # from token 100 on: past a block boundary, several HCA flushes, many CSA flushes
decode_loop = jax.jit(
    model.decode_loop, donate_argnames="cache", static_argnames=("num_steps", "logprobs", "top", "routed_experts")
)


sample_step = jax.jit(model.sample_step, donate_argnames="cache", static_argnames=("logprobs", "top", "routed_experts"))
draw = jax.jit(sample_rows, static_argnames=("logprobs", "top"))


@pytest.fixture(scope="module")
def params():
    return model.init_params(CFG, seed=1)


def prefilled(params):
    """A cache and a manager with two requests of 100 and 37 tokens, and each one's next token."""
    cache, manager = init_cache(LAYOUT, SIZE), KVCacheManager(LAYOUT, SIZE)
    requests = [manager.admit_request(text_tokens(n).tolist()) for n in (100, 37)]
    plan = manager.plan_step([(r, r.num_pending) for r in requests], shape=manager.pinned_shape(2, 144, history=True))
    logits, cache = prefill(params, cache, plan.pack(), manager.plan_tokens(plan))
    return cache, manager, requests, np.asarray(logits.argmax(-1), np.int32)


@pytest.mark.slow
def test_loop_equals_steps(params):
    """The same tokens, log-probabilities, routes and counts, the same cache bytes; each call consumes its cache."""
    hows = [model.Sampling(0.8, 20, 0.9, frequency_penalty=0.3, seed=5, logit_bias={7: 2.5, 9: -100})]
    hows += [model.Sampling(1.2, min_p=0.02, seed=5)]
    sampling, asked = SamplingRows.of(hows), dict(logprobs=True, top=2, routed_experts=True)
    biases = bias_rows(hows)
    start, manager, requests, first = prefilled(params)
    counts = np.zeros((SIZE.slot_units, CFG.vocab_size), np.int32)
    for request in requests:
        counts[request.slot] = token_counts(request.tokens, [], CFG.vocab_size)
    shape = manager.pinned_shape(2, steps=STEPS)
    plan = manager.plan_step([(r, 1) for r in requests], steps=STEPS, shape=shape)
    run = dict(sampling=sampling, biases=biases, counts=counts, **asked)
    looped, loop_cache = decode_loop(params, start, plan.pack(), first, num_steps=STEPS, **run)
    looped = jax.tree.map(np.asarray, looped)
    assert looped.tokens.shape == looped.logprobs.shape == (STEPS, 2) and looped.top_ids.shape == (STEPS, 2, 2)
    assert looped.experts.shape == (STEPS, 2, CFG.num_layers, CFG.num_experts_per_tok)
    assert len(set(looped.tokens[:, 0].tolist())) > 3, "a constant output would prove little"
    assert all(leaf.is_deleted() for leaf in start.arrays.values())

    cache, manager, requests, tokens = prefilled(params)
    for i in range(STEPS):
        plan = manager.plan_step([(r, 1) for r in requests], shape=shape)
        before = cache
        if i % 8:
            drawn, cache = sample_step(params, cache, plan.pack(), tokens, **run | dict(counts=counts))
        else:
            logits, cache = decode_step(params, cache, plan.pack(), tokens)
            plain = {name: asked[name] for name in ("logprobs", "top")} | dict(biases=biases)
            drawn = draw(logits, plan.seq_slot, plan.token_position, sampling, counts, **plain)
            drawn = drawn._replace(experts=looped.experts[i])
        assert all(leaf.is_deleted() for leaf in before.arrays.values())
        tokens, counts = np.asarray(drawn.tokens), np.asarray(drawn.counts)
        wanted = jax.tree.map(lambda x, i=i: x[i], looped._replace(counts=None))
        jax.tree.map(np.testing.assert_array_equal, drawn._replace(counts=None), wanted)
    np.testing.assert_array_equal(counts[1:], looped.counts[1:])
    for request, output in zip(requests, looped.tokens.T, strict=True):
        np.testing.assert_array_equal(
            counts[request.slot], token_counts(request.tokens[: request.num_prompt], output, CFG.vocab_size)
        )
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
