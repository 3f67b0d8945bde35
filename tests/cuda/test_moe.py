"""The experts' CUDA kernel: its lowering on the CPU; on a GPU float64, and a token's bits alone and among others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda import expert_weights, moe
from dsv4_jax.errors import ShapeError

from ..oracle import experts as oracle

HIDDEN, INTER, LIMIT = 512, 256, 1.0
EXPERTS, TOP = 8, 6


def test_lowers_to_one_ffi_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "cuda_target", lambda target: target)
    args = (jax.ShapeDtypeStruct((3, HIDDEN), jnp.bfloat16), jax.ShapeDtypeStruct((3, TOP), jnp.int32),
            jax.ShapeDtypeStruct((3, TOP), jnp.float32), jax.ShapeDtypeStruct((EXPERTS, 8, 4, 4352), jnp.uint8),
            jax.ShapeDtypeStruct((EXPERTS, 8, 2, 4352), jnp.uint8))  # fmt: skip
    call = functools.partial(moe.experts, limit=LIMIT)
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_moe") == 1 and f"tensor<3x{HIDDEN}xf32>" in text


def test_sizes_the_kernel_does_not_take() -> None:
    x, pairs = jnp.zeros((2, 384)), jnp.zeros((2, TOP), jnp.int32)
    with pytest.raises(ShapeError, match="sizes in 256s"):
        moe.experts(x, pairs, pairs, jnp.zeros((8, 8, 3, 4352)), jnp.zeros((8, 6, 2, 4352)), limit=LIMIT)


def test_no_tokens() -> None:
    x, pairs = jnp.zeros((0, HIDDEN)), jnp.zeros((0, TOP), jnp.int32)
    out = moe.experts(x, pairs, pairs, jnp.zeros((8, 8, 4, 4352)), jnp.zeros((8, 8, 2, 4352)), limit=LIMIT)
    assert out.shape == (0, HIDDEN)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 4])
def test_against_float64_and_alone(first: int) -> None:
    rng = np.random.default_rng(1)
    weights = oracle.random_weights(rng, EXPERTS, HIDDEN, INTER)
    parts = [[np.stack([w[name][i] for w in weights]) for name in oracle.NAMES] for i in (0, 1)]
    gate_up = expert_weights.pack(*(expert_weights.gate_up_rows(gate, up) for gate, up, _ in parts))
    down = expert_weights.pack(*(x for _, _, x in parts))
    run = jax.jit(functools.partial(moe.experts, limit=LIMIT, first=first, routed=2 * EXPERTS))
    tokens = 300
    x = rng.standard_normal((tokens, HIDDEN)).astype(jnp.bfloat16)
    chosen = rng.permuted(np.tile(np.arange(2 * EXPERTS, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOP]
    share = rng.random((tokens, TOP), np.float32)
    got = np.asarray(run(x, chosen, share, gate_up, down))
    want = oracle.experts(x.astype(np.float64), chosen, share, weights, LIMIT, first)
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)
    for size in (1, 5, 64, 100):
        few = run(x[7 : 7 + size], chosen[7 : 7 + size], share[7 : 7 + size], gate_up, down)
        np.testing.assert_array_equal(np.asarray(few), got[7 : 7 + size])
