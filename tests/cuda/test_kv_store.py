"""The store of `KVPool` in CUDA: on a GPU the reference's bytes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.pools import KVSpec
from dsv4_jax.pools.kv_pool import store_kv

from ..pools.test_kv_pool import KVStoreTest, parts_of


@pytest.mark.gpu
class TestKVStoreOnTheGpu(KVStoreTest):
    implementation = "cuda"

    def takes(self, **case: Any) -> bool:
        return False  # float32 rows: refused

    @pytest.mark.parametrize("widths", [(1024, 1024), (8, 40), (264, 2048), (576, 64)], ids=str)
    def test_stores_the_reference_bytes(self, widths: tuple[int, int]) -> None:
        """Whatever the pools held; NaN, Inf, zero and subnormal rows among them, and ids that are none."""
        spec, count = KVSpec(20_000, 1, 1, widths[0], 1, widths[1], "fp8"), 5003
        rng = np.random.default_rng(widths[0])
        old = {name: jnp.asarray(rng.integers(0, 100, shape), dtype) for name, (shape, dtype) in spec.leaves.items()}
        k, v = (rng.standard_normal((count, width)).astype(np.float32) * 3 for width in widths)
        k[0, 3], k[1, 7], k[2], v[1], v[2, -1], v[5] = np.nan, np.inf, 0, -np.inf, np.nan, 1e-39
        k[3:200] *= np.exp2(rng.integers(-40, 40, (197, 1))).astype(np.float32)
        ids = rng.permutation(spec.rows)[:count].astype(np.int32)
        ids[[1, 4, 5, 6]] = spec.rows, 2**31 - 1, -1, -(2**31)
        rows = *parts_of(old), jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16), jnp.asarray(ids)
        want, got = (
            jax.jit(functools.partial(store_kv, storage="fp8", implementation=name))(*rows) for name in ("xla", "cuda")
        )
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
