"""`in_batches`: `jax.vmap` in parts, whose function is compiled once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.ops.batches import MAX_BATCH, in_batches


@pytest.mark.parametrize(
    "rows", [1, 2, MAX_BATCH - 1, MAX_BATCH, MAX_BATCH + 1, 22, 2 * MAX_BATCH, 2 * MAX_BATCH + 1, 5 * MAX_BATCH - 1]
)
def test_equals_vmap_and_traces_once(rows: int) -> None:
    sizes = []

    def one(x: jax.Array, scale: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes.append(x.shape)
        return jnp.where(seen, x * scale, np.float32(-1)), scale + np.float32(1)

    rng = np.random.default_rng(rows)
    x, scale = jnp.asarray(rng.normal(size=(rows, 3)), jnp.float32), jnp.asarray(rng.normal(size=rows), jnp.float32)
    seen = jnp.asarray(rng.random(rows) < 0.5)
    got = jax.jit(lambda *operands: in_batches(one, *operands))(x, scale, seen)
    assert sizes == [(3,)]
    for made, expected in zip(got, jax.vmap(one)(x, scale, seen), strict=True):
        np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("rows", [MAX_BATCH + 1, 22, 100, 129])
def test_no_batch_is_larger_than_it_may_be_and_few_rows_are_added(rows: int) -> None:
    traced = jax.make_jaxpr(lambda x: in_batches(lambda row: row + np.float32(1), x))(jnp.zeros((rows, 2)))
    (scan,) = [eqn for eqn in traced.eqns if eqn.primitive.name == "scan"]
    batches, size, _ = scan.invars[-1].aval.shape
    assert size <= MAX_BATCH and 0 <= batches * size - rows < batches
