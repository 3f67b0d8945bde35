"""The experts' CUDA kernels: their lowering on the CPU; on a GPU float64, and a token's bits alone and among others."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import moe, moe_e4m3

from ..ops.test_moe import EXPERTS, HIDDEN, LIMIT, TOP, MoeTest


@pytest.mark.usefixtures("assumed_library")
@pytest.mark.parametrize(("op", "settings"), [(moe, ""), (moe_e4m3, "shape = 0 : i32")])
def test_lowers_to_one_ffi_call(op: Callable[..., jax.Array], settings: str) -> None:
    args = (
        jax.ShapeDtypeStruct((3, HIDDEN), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, TOP), jnp.int32),
        jax.ShapeDtypeStruct((3, TOP), jnp.float32),
        jax.ShapeDtypeStruct((EXPERTS, 8, 4, 4352), jnp.uint8),
        jax.ShapeDtypeStruct((EXPERTS, 8, 2, 4352), jnp.uint8),
    )
    call = functools.partial(op, limit=LIMIT, implementation="cuda")
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@dsv4_{op.__name__}(") == 1 and f"tensor<3x{HIDDEN}xf32>" in text and settings in text


@pytest.mark.usefixtures("assumed_library")
def test_sizes_the_kernel_does_not_take() -> None:
    weights = jnp.zeros((8, 8, 3, 4352), jnp.uint8), jnp.zeros((8, 6, 2, 4352), jnp.uint8)
    pairs = jnp.zeros((2, TOP), jnp.int32)
    with pytest.raises(ImplementationError, match=r"moe: .*'cuda' cannot run: it takes sizes in 256s"):
        moe(jnp.zeros((2, 384)), pairs, pairs.astype(jnp.float32), *weights, limit=LIMIT, implementation="cuda")


@pytest.mark.gpu
class TestMoeOnTheGpu(MoeTest):
    implementation = "cuda"
    tokens = 300

    def test_a_chunk_whose_lists_take_48_kib(self) -> None:
        """What a launch may have without asking, but the kernel has some shared memory of its own beside."""
        rows, packed, _ = self.case(4096)
        among = self.run(*rows, *packed)
        np.testing.assert_array_equal(self.run(*(x[4000:4064] for x in rows), *packed), among[4000:4064])

    def test_alone(self) -> None:
        rows, packed, _ = self.case(self.tokens)
        among = self.run(*rows, *packed)
        for size in (1, 5, 64, 100):
            np.testing.assert_array_equal(self.run(*(x[7 : 7 + size] for x in rows), *packed), among[7 : 7 + size])
