"""docs/own_model.md: its code runs, and its model holds to what it says."""

from __future__ import annotations

import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config, KVCacheManager, init_cache, testing

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own_model.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)


def page() -> tuple[dict, dict, CacheLayout]:
    """The page's step and loop, as they stand, parameters of two SWA layers for them, and a layout."""
    names: dict = {}
    exec(BLOCKS[0] + BLOCKS[1], names)
    cfg = DSV4Config.tiny(layer_types=(AttentionType.SWA,) * 2, hidden_size=16, vocab_size=32, sliding_window=6)
    rng, wide = np.random.default_rng(0), cfg.num_attention_heads * cfg.head_dim

    def normal(*shape: int):
        return jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, jnp.float32)

    layers = [
        dict(kv=normal(16, 32), kv_norm=jnp.ones(32), q=normal(16, wide), sink=normal(4), out=normal(wide, 16))
        for _ in range(2)
    ]
    params = dict(embed=normal(32, 16), head=normal(16, 32), layers=layers)
    return names, params, CacheLayout(cfg, block_tokens=8)


def test_the_pages_model_is_invariant() -> None:
    names, params, layout = page()
    runner = testing.StepRunner(names["step"], params, layout)
    testing.assert_chunking_invariant(runner, list(range(30)))
    testing.assert_batch_invariant(runner, [[1, 2, 3], list(range(20)), [5]])


def test_the_pages_loop_is_its_steps_as_far_as_they_are_reserved() -> None:
    names, params, layout = page()
    size, ran = CacheSize(2, 1, 2), []
    loop = jax.jit(names["loop"], static_argnames="num_steps")
    for steps in (3, 7):
        manager, cache = KVCacheManager(layout, size), init_cache(layout, size)
        plan = manager.plan_step([(manager.admit_request(), 1)], steps=3)
        ran.append(loop(params, cache, plan.pack(), jnp.asarray([5]), num_steps=steps))
    (three, exact), (seven, over) = ran
    assert seven[:, 0].tolist() == [*three[:, 0].tolist(), -1, -1, -1, -1]
    chex.assert_trees_all_equal(over.arrays, exact.arrays)
    cache, tokens = init_cache(layout, size), jnp.asarray([5])
    for drawn in three:
        logits, cache = names["jitted"](params, cache, plan.pack(), tokens)
        tokens, plan = logits.argmax(-1).astype(jnp.int32), plan.advance()
        assert tokens.tolist() == drawn.tolist()


@pytest.mark.slow
def test_the_pages_equalities_hold() -> None:
    names: dict = {}
    exec(BLOCKS[0] + BLOCKS[2].replace("mixes=20", "mixes=1"), names)
    assert names["runner"].executables == 1
