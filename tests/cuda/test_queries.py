"""The CUDA finish_queries: its lowering and fallback on the CPU, the op's test class on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.cuda import queries as kernel

from ..ops.test_queries import QueriesTest


@pytest.mark.parametrize(
    ("dim", "pairs", "qat", "calls"), [(512, 32, False, 1), (128, 32, True, 1), (64, 8, False, 0), (512, 32, True, 0)]
)
def test_lowers_to_one_ffi_call_or_the_reference(
    monkeypatch: pytest.MonkeyPatch, dim: int, pairs: int, qat: bool, calls: int
) -> None:
    monkeypatch.setattr(kernel, "cuda_target", lambda target: target)
    shapes = [((2, 8, dim), jnp.float32), ((2,), jnp.int32), ((pairs,), jnp.float32)]
    call = functools.partial(kernel._finish_queries, eps=1e-6, rotate=qat, round_fp4=qat)
    text = (
        jax.jit(call).trace(*(jax.ShapeDtypeStruct(*s) for s in shapes)).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert text.count("@dsv4_finish_queries") == calls


@pytest.mark.gpu
class TestQueriesOnTheGpu(QueriesTest):
    implementation = "cuda"
