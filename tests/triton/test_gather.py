"""The Triton gather: refused in one line where jax-triton is missing; on a GPU, the op's own tests."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import RowFormat, kv_format
from dsv4_jax.ops import registry, top_k
from dsv4_jax.ops.gather import GatherArguments, gather_rows

from ..ops import test_append_gather as op_tests

FP8 = kv_format("fp8", 512, 64)


def rows(fmt, count: int):
    return tuple(jnp.zeros((count, part.width), part.dtype) for part in fmt.parts)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)  # as if not installed
    with pytest.raises(ImplementationError, match=r"needs jax-triton, install dsv4_jax\[triton\]"):
        gather_rows(rows(FP8, 4), jnp.zeros(2, jnp.int32), fmt=FP8, implementation="triton")


def test_other_formats_are_refused():
    fmt = kv_format("bf16", 64, 16)
    arguments = GatherArguments(rows(fmt, 8), jnp.array([3, 1]), fmt, jnp.bfloat16)
    assert "it does not read rows of 64 bf16" in (registry.find("gather", "triton").supports(arguments) or "")


def test_must_be_asked_for(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "triton" in registry.OPS["gather"].names and "triton" not in registry.OPS["gather"].chain
    with pytest.raises(ImplementationError, match="no Triton kernel"):
        top_k(jnp.zeros((1, 4)), jnp.ones(1, jnp.int32), k=2, implementation="triton")


@pytest.fixture(scope="class")
def jax_triton():
    pytest.importorskip("jax_triton")


@pytest.mark.gpu
@pytest.mark.usefixtures("jax_triton")
class TestTritonGather(op_tests.GatherTest):
    implementation = "triton"

    def takes(self, *, fmt: RowFormat) -> bool:
        return fmt.name == "fp8" and fmt.rope_dim > 0

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    @pytest.mark.parametrize("count", [1, 3, 4, 1001])
    def test_any_number_of_rows(self, count: int, dtype: type) -> None:
        rng = np.random.default_rng(count)
        self.check(FP8, op_tests.random_rows(rng, FP8, 300), rng.integers(0, 300, count), dtype)

    def test_compiled_with_other_work(self) -> None:
        """In a jitted function, twice, over a pool whose byte offsets pass 2^31."""
        count = 5 << 20
        pool = tuple(jnp.zeros((count, part.width), part.dtype) for part in FP8.parts)
        new = op_tests.random_rows(np.random.default_rng(0), FP8, 8)
        ids = jnp.asarray([0, 1, 2, count // 2, count - 4, count - 3, count - 2, count - 1], jnp.int32)
        pool = tuple(part.at[ids].set(jnp.asarray(values)) for part, values in zip(pool, new, strict=True))

        @jax.jit
        def both(pool, ids):
            return [gather_rows(pool, i, fmt=FP8, implementation="triton") for i in (ids, ids[::-1])]

        forward, backward = both(pool, ids)
        want = gather_rows(pool, ids, fmt=FP8, implementation="xla")
        for got, expected in ((forward, want), (backward, want[::-1])):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
