"""gather's kernel: on a GPU what the reference is held to, ids out of range, any number of rows, and large pools."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.formats import RowFormat, kv_format
from dsv4_jax.ops.gather import gather_rows

from ..ops.test_append_gather import GatherTest, jit_gather, random_rows

FMT = kv_format("fp8", 512, 64)


@pytest.mark.gpu
class TestGatherOnTheGpu(GatherTest):
    implementation = "cuda"

    def takes(self, *, fmt: RowFormat) -> bool:
        return fmt == FMT

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    @pytest.mark.parametrize("count", [1, 3, 4, 5, 1001])
    def test_any_number_of_rows(self, count: int, dtype: type) -> None:
        rng = np.random.default_rng(count)
        self.check(FMT, random_rows(rng, FMT, 300), rng.integers(0, 300, count), dtype)

    def test_an_id_out_of_range_reads_the_nearest_row(self) -> None:
        pool = tuple(map(jnp.asarray, random_rows(np.random.default_rng(0), FMT, 9)))
        ids = jnp.asarray([-1, 9, -(2**31), 2**31 - 1, 4], jnp.int32)
        got, want = (jit_gather(pool, ids, fmt=FMT, implementation=name) for name in ("cuda", "xla"))
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))

    @pytest.mark.parametrize("gib", [3, 5], ids=lambda g: f"{g}GiB")
    def test_rows_far_into_a_large_pool(self, gib: int) -> None:
        """Byte offsets beyond 2^31 and 2^32."""
        count = (gib << 30) // FMT.parts[0].bytes
        ids = jnp.asarray([0, 1, count // 2, count - 2, count - 1], jnp.int32)
        new = random_rows(np.random.default_rng(3), FMT, len(ids))
        pool = tuple(
            jax.jit(lambda values: jnp.zeros((count, values.shape[1]), values.dtype).at[ids].set(values))(values)
            for values in map(jnp.asarray, new)
        )
        got = gather_rows(pool, ids, fmt=FMT, implementation="cuda")
        order = jnp.arange(len(ids), dtype=jnp.int32)
        want = gather_rows(tuple(map(jnp.asarray, new)), order, fmt=FMT, implementation="xla")
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
