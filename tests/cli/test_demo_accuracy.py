"""What a quantised cache changes in each layer: nothing in float32, little in bfloat16, about 3 % in fp8."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config, model
from dsv4_jax.cli.demo_accuracy import attention_accuracy
from dsv4_jax.config import AttentionType
from dsv4_jax.model import uncached

CFG = DSV4Config.tiny(layer_types=(AttentionType.CSA, AttentionType.HCA))
TOKENS = np.random.default_rng(0).integers(0, 256, 140).tolist()
attention_uncached = jax.jit(uncached.attention_uncached, static_argnums=(2, 3))
chosen_uncached = jax.jit(uncached.chosen_uncached, static_argnums=2)


@pytest.fixture(scope="module")
def params():
    return model.init_params(CFG, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "errors", "same"),
    [
        (("f32", "f32"), (0, 1e-5), (1, 1)),
        (("bf16", "bf16"), (1e-4, 4e-3), (0.98, 1)),
        (("fp8", "fp4"), (0.01, 0.045), (0.8, 0.99)),
    ],
    ids=["f32", "bf16", "fp8"],
)
def test_accuracy(params, formats, errors, same) -> None:
    csa, hca = attention_accuracy(
        params, CacheLayout(CFG, *formats), TOKENS, compiler_options={"xla_backend_optimization_level": 0}
    )
    assert (csa.layer, csa.attention, hca.layer, hca.attention) == (0, AttentionType.CSA, 1, AttentionType.HCA)
    assert all(errors[0] <= layer.output_error <= errors[1] for layer in (csa, hca))
    assert csa.same_entries is not None and same[0] <= csa.same_entries <= same[1] and hca.same_entries is None


def test_without_a_choice_there_is_no_share(params) -> None:
    """Up to `index_topk` entries all are picked."""
    x = jax.random.normal(jax.random.key(0), (4 * CFG.index_topk, CFG.hidden_size))
    chosen = np.asarray(chosen_uncached(params["layers"][0]["attn"], x, CFG))
    entries = np.arange(CFG.index_topk)[None]
    np.testing.assert_array_equal(chosen, entries < ((np.arange(len(x)) + 1) // 4)[:, None])


@pytest.mark.slow
def test_entries_can_be_given(params) -> None:
    p, x = params["layers"][0]["attn"], jax.random.normal(jax.random.key(0), (60, CFG.hidden_size))
    picked = chosen_uncached(p, x, CFG)
    assert (np.asarray(picked).sum(1) == np.minimum((np.arange(60) + 1) // 4, CFG.index_topk)).all()
    as_picked = attention_uncached(p, x, AttentionType.CSA, CFG)
    np.testing.assert_array_equal(attention_uncached(p, x, AttentionType.CSA, CFG, chosen=picked), as_picked)
    none = attention_uncached(p, x, AttentionType.CSA, CFG, chosen=np.zeros_like(picked))
    assert np.abs(none - as_picked).max() > 1e-3
