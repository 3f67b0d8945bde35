"""finish_queries in Pallas: the op's test class interpreted and on the GPU, and the lowering for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.ops.queries import QueriesArguments
from dsv4_jax.pallas import queries as kernel

from ..ops.test_queries import QueriesTest
from .lowering import lowers_for_cuda


class TestQueries(QueriesTest):
    implementation = "pallas"


@pytest.mark.gpu
class TestQueriesOnTheGpu(QueriesTest):
    implementation = "pallas"


@pytest.mark.parametrize(("dim", "eps", "qat"), [(512, 1e-6, False), (128, None, True)])
def test_lowers_for_cuda(dim: int, eps: float | None, qat: bool) -> None:
    shapes = [((64, 64, dim), jnp.float32), ((64,), jnp.int32), ((32,), jnp.float32)]
    call = lambda *x: kernel.call(QueriesArguments(*x, eps, qat, qat), interpret=False)  # noqa: E731
    assert lowers_for_cuda(call, *(jax.ShapeDtypeStruct(*s) for s in shapes)) == 1
