"""The CUDA finish_queries: its lowering and what it refuses on the CPU, the op's test class on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import finish_queries

from ..ops.test_queries import QueriesTest


@pytest.mark.parametrize(("dim", "pairs", "qat"), [(512, 32, False), (128, 32, True)])
@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call(dim: int, pairs: int, qat: bool) -> None:
    shapes = [((2, 8, dim), jnp.float32), ((2,), jnp.int32), ((pairs,), jnp.float32)]
    traced = jax.jit(finish(qat)).trace(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@dsv4_finish_queries") == 1


@pytest.mark.parametrize(
    ("dim", "pairs", "qat", "reason"),
    [(64, 8, False, "it takes heads of 128 or 512"), (512, 32, True, "it rotates and rounds heads of 128")],
)
@pytest.mark.usefixtures("assumed_library")
def test_what_the_kernel_cannot_take_is_refused(dim: int, pairs: int, qat: bool, reason: str) -> None:
    with pytest.raises(ImplementationError, match=f"queries: .*'cuda' cannot run: {reason}"):
        finish(qat)(jnp.zeros((2, 8, dim)), jnp.zeros(2, jnp.int32), jnp.zeros(pairs))


def finish(qat: bool):
    return functools.partial(finish_queries, eps=1e-6, rotate=qat, round_fp4=qat, implementation="cuda")


@pytest.mark.gpu
class TestQueriesOnTheGpu(QueriesTest):
    implementation = "cuda"

    def takes(self, *, dim: int, rotate: bool) -> bool:
        return dim == 128 or (dim == 512 and not rotate)
