"""The CUDA top_k: its lowering and fallback on the CPU, the op's test classes on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda import top_k as kernel

from ..ops.test_top_k import jit_top_k
from ..pallas.test_top_k import TestTopKOnTheGpu as LongRows


def test_lowers_to_one_ffi_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "cuda_target", lambda target: target)
    args = (jax.ShapeDtypeStruct((3, 32_768), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32))
    call = functools.partial(kernel._top_k, k=512)
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_top_k") == 1 and "tensor<3x512xi32>" in text


@pytest.mark.parametrize(("width", "k"), [(1100, 1050), (262_145, 3)])
def test_what_the_kernel_cannot_take_goes_to_the_reference(width: int, k: int) -> None:
    scores = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    count = np.full(1, width, np.int32)
    got, want = (jit_top_k(scores, count, k=k, implementation=i) for i in ("cuda", "xla"))
    np.testing.assert_array_equal(got[0], want[0])


class TestTopKOnTheGpu(LongRows):
    implementation = "cuda"


del LongRows  # its own tests run where it stands
