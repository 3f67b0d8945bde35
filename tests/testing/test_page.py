"""docs/own_model.md: its code runs, and its model holds to what it says."""

from __future__ import annotations

import pathlib
import re

import jax.numpy as jnp
import numpy as np

from dsv4_jax import AttentionType, CacheLayout, DSV4Config, testing

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own_model.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)


def test_the_pages_model_is_invariant() -> None:
    """The step of the page, as it stands, with two SWA layers."""
    names: dict = {}
    exec(BLOCKS[0], names)
    cfg = DSV4Config.tiny(layer_types=(AttentionType.SWA,) * 2, hidden_size=16, vocab_size=32, sliding_window=6)
    rng, wide = np.random.default_rng(0), cfg.num_attention_heads * cfg.head_dim

    def normal(*shape: int):
        return jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, jnp.float32)

    layers = [
        dict(kv=normal(16, 32), kv_norm=jnp.ones(32), q=normal(16, wide), sink=normal(4), out=normal(wide, 16))
        for _ in range(2)
    ]
    params = dict(embed=normal(32, 16), head=normal(16, 32), layers=layers)
    runner = testing.StepRunner(names["step"], params, CacheLayout(cfg, block_tokens=8))
    testing.assert_chunking_invariant(runner, list(range(30)))
    testing.assert_batch_invariant(runner, [[1, 2, 3], list(range(20)), [5]])


def test_the_pages_equalities_hold() -> None:
    names: dict = {}
    exec(BLOCKS[0] + BLOCKS[1].replace("mixes=20", "mixes=1"), names)
    assert names["runner"].executables == 1
