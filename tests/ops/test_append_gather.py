"""append and gather: rows go where the ids say, come back as stored, and ids past the end are dropped."""

from __future__ import annotations

from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, RowFormat, index_format, kv_format
from dsv4_jax.ops import append, gather_rows

from ..oracle import rows as oracle

FORMATS = [kv_format(n, 32, 8) for n in KV_FORMATS] + [index_format(n, 32) for n in INDEX_FORMATS]


class AppendGatherTest:
    implementation: ClassVar[Literal["xla", "pallas"]]

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{'kv' if f.rope_dim else 'index'}-{f.name}")
    def test_rows_land_and_come_back(self, fmt: RowFormat) -> None:
        rng = np.random.default_rng(0)
        old = [rng.integers(0, 100, (40, p.width)).astype(p.dtype) for p in fmt.parts]
        values = rng.standard_normal((6, 32)).astype(np.float32)
        ids = np.array([7, 40, 0, 39, 2**31 - 1, 12], np.int32)  # 40 and above: dropped, never wrapped
        pool = append(
            tuple(map(jnp.asarray, old)), jnp.asarray(values), jnp.asarray(ids), fmt=fmt,
            implementation=self.implementation,
        )  # fmt: skip
        encoded = oracle.encode(fmt.name, values, fmt.rope_dim)
        for before, after, rows in zip(old, pool, encoded, strict=True):
            expected = before.copy()
            expected[ids[ids < 40]] = rows[ids < 40]
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(after, expected)
        order = jnp.asarray([[12, 7], [39, 0], [7, 7]], jnp.int32)
        dense = gather_rows(pool, order, fmt=fmt, dtype=jnp.float32, implementation=self.implementation)
        expected = oracle.decode(fmt.name, tuple(np.asarray(p) for p in pool), fmt.rope_dim)[np.asarray(order)]
        np.testing.assert_array_equal(dense, expected)


class TestAppendGather(AppendGatherTest):
    implementation = "xla"
