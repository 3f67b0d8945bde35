"""The example: decoding through the pools equals a run without a cache, with prefix hits, reuse and eviction."""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..examples import load_example
from . import assert_in_place


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("gqa_decode")


@pytest.mark.parametrize("model", ["GQA", "HYBRID"])
def test_equals_the_run_without_a_cache(example: ModuleType, model: str) -> None:
    """Three rounds of requests that continue their answers, then new ones, for which the cache must evict."""
    cfg = getattr(example, model)
    params = example.init_params(cfg)
    server = example.Server(cfg, params, tokens=55, track_slots=6)
    compiled = example.decode_step._cache_size()
    prompts = [[1, 2, 3, 4, 5], [9], [1, 2, 3, 7, 7, 7]]
    for turn in range(4):
        if turn == 3:
            before = server.prefixes.total_size
            prompts = [list(range(20, 30)), list(range(40, 50))]
        answers = server.generate(prompts, 3)
        for prompt, (tokens, logits) in zip(prompts, answers, strict=True):
            expected, expected_logits = example.uncached(cfg, params, prompt, 3)
            assert tokens == expected
            np.testing.assert_allclose(logits, expected_logits, atol=2e-5)
        server.prefixes.check_integrity()
        server.allocator.check_integrity()
        server.table.check_integrity()
        assert server.allocator.num_held == server.prefixes.total_size == server.prefixes.evictable_size
        assert server.table.available_size() == 4
        if turn in (1, 2):  # all that was computed before: the prompt, and the answer but for its last token
            assert server.hits[-3:] == [len(p) - 3 for p in prompts]
        prompts = [p + tokens + [11, 12] for p, (tokens, _) in zip(prompts, answers, strict=True)]
    assert example.decode_step._cache_size() == compiled + 1
    assert before + 2 * 12 > 55, "nothing was evicted"


def test_a_slot_starts_empty_whatever_its_last_owner_left(example: ModuleType) -> None:
    """One request slot, no prefix hits, and every state made NaN before each request: no reset is needed."""
    cfg = example.HYBRID
    params = example.init_params(cfg)
    server = example.Server(cfg, params, max_requests=1, track_slots=1)
    for prompt in ([1, 2, 3, 4, 5], [9, 8], [30, 31, 32]):
        states = server.caches.states
        rubbish = jax.tree.map(lambda a: jnp.full_like(a, np.nan if a.dtype == np.float32 else 0x7FC00000), states)
        zeros = jax.tree.map(lambda a, b: a.at[:, 0].set(b[:, 0]), rubbish, states)  # the padding slot's own
        server.caches = server.caches._replace(states=zeros)
        ((tokens, logits),) = server.generate([prompt], 3)
        expected, expected_logits = example.uncached(cfg, params, prompt, 3)
        assert tokens == expected and server.hits[-1] == 0
        np.testing.assert_allclose(logits, expected_logits, atol=2e-5)


def test_the_step_copies_no_pool(example: ModuleType) -> None:
    cfg = example.HYBRID
    server = example.Server(cfg, example.init_params(cfg), tokens=20_000, max_requests=2000, max_context=8)
    (slot,) = server.table.alloc()
    server.table.append(slot, [5])
    kv, table, states = server.caches

    def step(pools, update, slots, tokens):
        logits, caches = example.decode_step.__wrapped__(
            cfg, server.params, example.Caches(pools[0], table, pools[1]), update, slots, tokens
        )
        return (caches.kv, caches.states), logits

    one = np.array([slot, 0], np.int32)
    (kv, _), _ = assert_in_place(step, (kv, states), server.table.drain(2), one, one)
    assert np.asarray(kv.get_key_buffer(0))[5].any()
    assert len(jax.tree.leaves((kv, states))) <= 4
