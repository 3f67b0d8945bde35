"""The dense FP8 kernel: its lowering on the CPU; on a GPU float64, and a row's bits alone and among others."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax import ops
from dsv4_jax.errors import ImplementationError

from ..ops.test_dense_fp8 import DenseFp8Test, OnTheGpu

CODES, SCALES = jax.ShapeDtypeStruct((8, 4, 8192), jnp.uint8), jax.ShapeDtypeStruct((4, 4), jnp.uint8)


def lowered(rows: int, op: Callable[..., jax.Array] = ops.dense_fp8, **options) -> str:
    call = jax.jit(functools.partial(op, implementation="cuda", **options))
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
@pytest.mark.parametrize("op", [ops.dense_fp8, ops.dense_e4m3])
def test_more_rows_are_for_the_reference(op: Callable[..., jax.Array]) -> None:
    lowered(1 << 16, op)
    with pytest.raises(ImplementationError, match="'cuda' cannot run: it takes up to 65536 rows, not 65537"):
        lowered((1 << 16) + 1, op)


@pytest.mark.gpu
class TestDenseFp8OnTheGpu(OnTheGpu, DenseFp8Test):
    implementation = "cuda"
