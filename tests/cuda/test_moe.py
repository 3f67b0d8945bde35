"""The experts' CUDA kernel: its lowering on the CPU; on a GPU float64, and a token's bits alone and among others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda import expert_weights, moe
from dsv4_jax.errors import ImplementationError, ShapeError

from ..ops.op_test import OpTest
from ..oracle import experts as oracle

HIDDEN, INTER, LIMIT = 512, 256, 1.0
EXPERTS, TOP = 8, 6


@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call() -> None:
    args = (jax.ShapeDtypeStruct((3, HIDDEN), jnp.bfloat16), jax.ShapeDtypeStruct((3, TOP), jnp.int32),
            jax.ShapeDtypeStruct((3, TOP), jnp.float32), jax.ShapeDtypeStruct((EXPERTS, 8, 4, 4352), jnp.uint8),
            jax.ShapeDtypeStruct((EXPERTS, 8, 2, 4352), jnp.uint8))  # fmt: skip
    call = functools.partial(moe.experts, limit=LIMIT)
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_moe") == 1 and f"tensor<3x{HIDDEN}xf32>" in text


@pytest.mark.usefixtures("assumed_library")
def test_sizes_the_kernel_does_not_take() -> None:
    with pytest.raises(ImplementationError, match=r"moe: .*'cuda' cannot run: it takes sizes in 256s"):
        zeros(2, 384, 3)


def test_arguments_are_named() -> None:
    x, chosen = jnp.zeros((2, HIDDEN)), jnp.zeros((2, TOP), jnp.int32)
    with pytest.raises(ShapeError, match=r"experts: share is int32 \[2, 6\], expected float"):
        moe.experts(x, chosen, chosen, jnp.zeros((8, 8, 4, 4352)), jnp.zeros((8, 8, 2, 4352)), limit=LIMIT)


@pytest.mark.usefixtures("assumed_library")
def test_no_tokens() -> None:
    assert zeros(0, HIDDEN, 4).shape == (0, HIDDEN)


def zeros(tokens: int, hidden: int, steps: int) -> jax.Array:
    weights = jnp.zeros((8, 8, steps, 4352), jnp.uint8), jnp.zeros((8, 2 * steps, 2, 4352), jnp.uint8)
    pairs = jnp.zeros((tokens, TOP), jnp.int32)
    return moe.experts(jnp.zeros((tokens, hidden)), pairs, pairs.astype(jnp.float32), *weights, limit=LIMIT)


@pytest.mark.gpu
class TestExpertsOnTheGpu(OpTest):
    op, implementation = "moe", "cuda"

    @pytest.mark.parametrize("first", [0, 4])
    def test_against_float64_and_alone(self, first: int) -> None:
        check_experts(first)


def check_experts(first: int) -> None:
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
