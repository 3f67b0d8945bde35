"""gather in Pallas: the op's test class interpreted, the lowering for CUDA, and large pools on the GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, RowFormat, index_format, kv_format
from dsv4_jax.ops.gather import GatherArguments, gather_rows
from dsv4_jax.pallas import gather as kernel

from ..ops.test_append_gather import GatherTest, random_rows
from .lowering import lowers_for_cuda

V4_FORMATS = [kv_format(n, 512, 64) for n in KV_FORMATS] + [index_format(n, 128) for n in INDEX_FORMATS]
V4_FORMATS = [fmt for fmt in V4_FORMATS if kernel.unsupported_rows(fmt) is None]
v4_formats = pytest.mark.parametrize("fmt", V4_FORMATS, ids=lambda f: f"{'kv' if f.rope_dim else 'index'}-{f.name}")


class TestGather(GatherTest):
    implementation = "pallas"

    def takes(self, *, fmt: RowFormat) -> bool:
        return kernel.unsupported_rows(fmt) is None  # of the package's formats all: test_rows.py


@v4_formats
def test_lowers_for_cuda(fmt: RowFormat) -> None:
    pool = tuple(jax.ShapeDtypeStruct((1000, p.width), p.dtype) for p in fmt.parts)
    call = lambda pool, ids: kernel.call(GatherArguments(pool, ids, fmt, jnp.bfloat16), interpret=False)  # noqa: E731
    assert lowers_for_cuda(call, pool, jax.ShapeDtypeStruct((37,), jnp.int32)) == 1


@pytest.mark.gpu
class TestGatherOnTheGpu(TestGather):
    @v4_formats
    @pytest.mark.parametrize("tokens", [1, 257, 5000])
    def test_v4_widths(self, fmt: RowFormat, tokens: int) -> None:
        rng = np.random.default_rng(tokens)
        self.check(fmt, random_rows(rng, fmt, 20_000), rng.integers(0, 20_000, tokens), jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("gib", [1.9, 3, 5], ids=lambda g: f"{g}GiB")
def test_rows_far_into_a_large_pool(gib: float) -> None:
    """Byte offsets beyond 2^31 and 2^32."""
    fmt = kv_format("fp8", 512, 64)
    rows = int(gib * 2**30) // 448
    rng = np.random.default_rng(3)
    ids = np.unique(np.concatenate([[0, rows - 1], rng.integers(0, rows, 1000)]))
    some = random_rows(rng, fmt, len(ids))
    fill = jax.jit(lambda at, new: jnp.zeros((rows, new.shape[1]), new.dtype).at[at].set(new))
    pool = tuple(fill(jnp.asarray(ids, jnp.int32), jnp.asarray(p)) for p in some)
    gather = functools.partial(gather_rows, fmt=fmt, dtype=jnp.bfloat16)
    reaches = gib != 3  # between 2^31 elements and 4 GiB Triton's offsets do not: refused, and left to the reference
    if not reaches:
        with pytest.raises(ImplementationError, match="does not reach all of an array"):
            gather(pool, jnp.asarray(ids, jnp.int32), implementation="pallas")
    dense = gather(pool, jnp.asarray(ids, jnp.int32), implementation="pallas" if reaches else None)
    small = gather(tuple(map(jnp.asarray, some)), jnp.arange(len(ids), dtype=jnp.int32), implementation="xla")
    np.testing.assert_array_equal(np.asarray(dense, np.float32), np.asarray(small, np.float32))
