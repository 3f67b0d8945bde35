"""Products of few rows: with bfloat16 weights they are padded, and nothing of it shows in the result."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4_jax.model.numerics import linear
from dsv4_jax.ops.numerics import MIN_ROWS, pad_rows

ROWS = range(1, MIN_ROWS + 2)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def rows_multiplied(x: jax.Array, weight: jax.Array) -> int:
    (rows,) = re.findall(r"f32\[(\d+),24\] = dot_general", str(jax.make_jaxpr(linear)(x, weight)))
    return int(rows)


def test_bfloat16_products_of_few_rows() -> None:
    """Each is what it would be alone, and the same bits however many there are."""
    weight, x = normal(1, 24, 64).astype(jnp.bfloat16), normal(3, MIN_ROWS + 1, 64)

    def exact(spec: str, *operands: jax.Array) -> np.ndarray:
        return np.einsum(spec, *(np.asarray(a.astype(jnp.bfloat16), np.float64) for a in operands))

    many = linear(x[:MIN_ROWS], weight)
    want = exact("ti,oi->to", x, weight)
    for rows in ROWS:
        product = linear(x[:rows], weight)
        assert product.dtype == jnp.float32
        np.testing.assert_allclose(product, want[:rows], rtol=0, atol=1e-5)
        if rows <= MIN_ROWS:
            np.testing.assert_array_equal(product, many[:rows])
        assert rows_multiplied(x[:rows], weight) == max(rows, MIN_ROWS)


def test_float32_products_are_not_padded() -> None:
    weight, x = normal(1, 24, 64), normal(2, MIN_ROWS + 1, 64)
    for rows in ROWS:
        want = jnp.einsum("ti,oi->to", x[:rows], weight, precision=lax.Precision.HIGHEST)
        np.testing.assert_array_equal(linear(x[:rows], weight), want)
        assert rows_multiplied(x[:rows], weight) == rows


def test_pad_rows() -> None:
    x = normal(1, 3, 2, 5)
    assert pad_rows(x, jnp.float32) is x
    padded = pad_rows(x, jnp.bfloat16)
    assert padded.shape == (MIN_ROWS, 2, 5) and padded.dtype == x.dtype
    np.testing.assert_array_equal(padded[:3], x)
    assert not padded[3:].any()
    assert pad_rows(padded, jnp.bfloat16) is padded
