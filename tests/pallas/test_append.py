"""append in Pallas: the op's test class interpreted, the fused epilogue, the lowering for CUDA, and the GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, RowFormat, index_format, kv_format
from dsv4_jax.ops.append import AppendArguments, encode
from dsv4_jax.ops.epilogue import Epilogue
from dsv4_jax.ops.numerics import exp, inv_frequencies
from dsv4_jax.ops.registry import Choice
from dsv4_jax.pallas import append as kernel
from dsv4_jax.pallas.emit import Arithmetic, unsupported_rows

from ..ops.test_append_gather import AppendGatherTest, jit_append
from ..oracle.close import assert_rows_close
from .lowering import lowers_for_cuda

V4_FORMATS = [kv_format(n, 512, 64) for n in KV_FORMATS] + [index_format(n, 128) for n in INDEX_FORMATS]
V4_FORMATS = [fmt for fmt in V4_FORMATS if unsupported_rows(fmt) is None]
# Widths that are no power of two, less than a tile, or end in a part of a scale group.
ODD_FORMATS = [
    kv_format("fp8", 232, 24),
    kv_format("fp8_per_entry", 76, 12),
    kv_format("f32", 40, 8),
    index_format("fp4", 32),
    index_format("fp8", 256),
    index_format("f32", 16),
]
formats = functools.partial(
    pytest.mark.parametrize, "fmt", ids=lambda f: f"{'kv' if f.rope_dim else 'index'}-{f.name}-{f.dim}"
)


def random_epilogue(rng: np.random.Generator, fmt: RowFormat, rope_dim: int | None = None) -> Epilogue:
    """Index keys, whose format has no RoPE dims, are rotated by RoPE and Hadamard all the same."""
    rope_dim = rope_dim or fmt.rope_dim or fmt.dim // 2
    norm = rng.uniform(0.5, 1.5, fmt.dim).astype(np.float32)
    inv_freq = jnp.asarray(inv_frequencies(rope_dim, 160000.0))
    return Epilogue(jnp.asarray(norm), inv_freq, hadamard=not fmt.rope_dim)


def random_values(rng: np.random.Generator, rows: int, dim: int) -> jax.Array:
    """Rows of very different magnitudes, one of them zero."""
    size = 10.0 ** rng.uniform(-3, 3, (rows, 1))
    size[rows // 2] = 0
    return jnp.asarray(rng.standard_normal((rows, dim)) * size, jnp.float32)


class TestAppend(AppendGatherTest):
    implementation = "pallas"

    def takes(self, *, fmt: RowFormat) -> bool:
        return unsupported_rows(fmt) is None  # of the package's formats all: test_rows.py


def check_epilogue(fmt: RowFormat, tokens: int, implementation: Choice = "pallas") -> None:
    """The fused epilogue against the reference's, scattered with some rows dropped."""
    rng = np.random.default_rng(tokens)
    values, epilogue = random_values(rng, tokens, fmt.dim), random_epilogue(rng, fmt)
    position = jnp.asarray(rng.integers(0, 1 << 20, tokens), jnp.int32)
    rows = 2 * tokens
    ids = rng.permutation(rows)[:tokens].astype(np.int32)
    ids[rng.random(tokens) < 0.2] = rows
    old = tuple(jnp.asarray(rng.integers(0, 100, (rows, p.width)), p.dtype) for p in fmt.parts)
    call = functools.partial(jit_append, fmt=fmt)
    args = dict(epilogue=epilogue, position=position)
    expected = call(old, values, jnp.asarray(ids), **args, implementation="xla")
    got = call(old, values, jnp.asarray(ids), **args, implementation=implementation)
    assert_rows_close(fmt, got, expected)
    untouched = np.setdiff1d(np.arange(rows), ids)
    for before, after in zip(old, got, strict=True):
        np.testing.assert_array_equal(np.asarray(after)[untouched], np.asarray(before)[untouched])
    encoded = jax.jit(functools.partial(encode, fmt=fmt, implementation=implementation))(values, **args)
    for part, stored in zip(encoded, got, strict=True):
        np.testing.assert_array_equal(np.asarray(part)[ids < rows], np.asarray(stored)[ids[ids < rows]])


@formats([kv_format("fp8", 512, 64), index_format("fp4", 128), *ODD_FORMATS])
def test_fused_epilogue(fmt: RowFormat) -> None:
    check_epilogue(fmt, 9)


def test_exp_is_the_references() -> None:
    x = np.concatenate([-(10.0 ** np.linspace(-8, 2.2, 4000)), [0.0, -0.0, -np.inf, -87.0, -87.00001, -88, np.nan]])
    x = jnp.asarray(x, jnp.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(Arithmetic(True).exp)(x)), np.asarray(jax.jit(exp)(x)))


@formats(V4_FORMATS)
def test_lowers_for_cuda(fmt: RowFormat, tokens: int = 64) -> None:
    pool = tuple(jax.ShapeDtypeStruct((1000, p.width), p.dtype) for p in fmt.parts)
    epilogue = random_epilogue(np.random.default_rng(0), fmt, 64)
    values = jax.ShapeDtypeStruct((tokens, fmt.dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def stored(pool, values, ids, position, epilogue):
        return kernel.call(AppendArguments(values, fmt, epilogue, position, pool, ids), interpret=False)

    assert lowers_for_cuda(stored, pool, values, ids, ids, epilogue) == 1
    assert lowers_for_cuda(lambda values: kernel.call(AppendArguments(values, fmt), interpret=False), values) == 1


def test_lowers_for_cuda_in_a_prefill() -> None:
    test_lowers_for_cuda(V4_FORMATS[0], 8192)


@pytest.mark.gpu
class TestAppendOnTheGpu(TestAppend):
    @formats([*V4_FORMATS, *ODD_FORMATS])
    @pytest.mark.parametrize("tokens", [1, 3, 64, 257, 1024])
    def test_fused_epilogue(self, fmt: RowFormat, tokens: int) -> None:
        with self.asked(fmt=fmt):
            check_epilogue(fmt, tokens, self.implementation)
