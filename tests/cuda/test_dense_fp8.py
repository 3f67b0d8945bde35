"""The dense FP8 kernel: its lowering on the CPU; on a GPU float64, and a row's bits alone and among others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats.weights.fp8 import pack
from dsv4_jax.ops import dense_fp8

from ..ops.test_dense_fp8 import MATRICES, DenseFp8Test
from ..oracle import dense as oracle

CODES, SCALES = jax.ShapeDtypeStruct((8, 4, 8192), jnp.uint8), jax.ShapeDtypeStruct((4, 4), jnp.uint8)


def lowered(rows: int, **options) -> str:
    call = jax.jit(functools.partial(dense_fp8, implementation="cuda", **options))
    x = jax.ShapeDtypeStruct((rows, options.get("groups", 1) * 512), jnp.float32)
    return call.trace(x, CODES, SCALES).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("assumed_library")
@pytest.mark.parametrize(("dtype", "spelled"), [(jnp.float32, "f32"), (jnp.bfloat16, "bf16")])
def test_lowers_to_one_ffi_call(dtype, spelled: str) -> None:
    text = lowered(3, groups=2, dtype=dtype)
    assert text.count("@dsv4_dense_fp8") == 1 and f"tensor<3x512x{spelled}>" in text
    assert "groups = 2 : i32" in text and "whole_rows = 512 : i32" in text
    assert "whole_rows = 4096 : i32" in lowered(3, whole_rows=4096)


@pytest.mark.usefixtures("assumed_library")
def test_more_rows_are_for_the_reference() -> None:
    lowered(1 << 16)
    with pytest.raises(ImplementationError, match="'cuda' cannot run: it takes up to 65536 rows, not 65537"):
        lowered((1 << 16) + 1)


@pytest.mark.gpu
class TestDenseFp8OnTheGpu(DenseFp8Test):
    implementation = "cuda"

    @pytest.mark.parametrize("name", MATRICES)
    def test_alone_and_among_others(self, name: str) -> None:
        x, weights, scales, _ = self.case(name, 300)
        groups = MATRICES[name][2]
        among = self.run(x, weights, scales, groups=groups)
        for first, size in ((0, 1), (3, 8), (100, 16), (31, 33), (180, 64), (9, 129), (0, 256)):
            alone = self.run(x[first : first + size], weights, scales, groups=groups)
            np.testing.assert_array_equal(alone, among[first : first + size])

    @pytest.mark.parametrize(("n", "k", "groups"), [(24576, 1024, 1), (8192, 4096, 8)])
    def test_a_share_of_rows_has_the_bits_of_the_whole(self, n: int, k: int, groups: int) -> None:
        """Of matrices whose shares alone would be cut into more parts of K: `wq_b` and `wo_a` on two and four GPUs."""
        rng = np.random.default_rng(n)
        codes, scales = oracle.random_matrix(rng, n, k)
        for rows in (1, 8, 64):
            x = rng.standard_normal((rows, groups * k)).astype(jnp.bfloat16)
            whole = self.run(x, *pack(codes, scales), groups=groups)
            for shares in (2, 4):
                size, own = n // shares, max(1, groups // shares)
                for i in range(shares):
                    part = slice(i * size, (i + 1) * size), slice(i * size // 128, (i + 1) * size // 128)
                    weights = pack(codes[part[0]], scales[part[1]])
                    taken = x[:, i * own * k : (i + 1) * own * k] if groups > 1 else x
                    got = self.run(taken, *weights, groups=own, whole_rows=n)
                    np.testing.assert_array_equal(got, whole[:, part[0]])
