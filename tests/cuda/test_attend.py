"""The CUDA attend without a GPU: dispatch, fallback, lowering to the FFI call, and that the library builds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ffi
from dsv4_jax.cuda import attend as kernel
from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import kv_format
from dsv4_jax.ops import attend

from ..ops.test_attend import jit_attend
from ..oracle import rows as oracle

FMT = kv_format("fp8", 512, 64)


def arguments(tokens: int = 2, heads: int = 64, window: int = 128, entries: int = 512):
    s = jax.ShapeDtypeStruct
    rows = lambda n: (s((n, 448), jnp.uint8), s((n, 64), jnp.uint16), s((n, 8), jnp.uint8))  # noqa: E731
    return (
        s((tokens, heads, 512), jnp.float32), s((heads,), jnp.float32), rows(1024),
        s((tokens, window), jnp.int32), s((tokens, window), jnp.bool), rows(4096) if entries else None,
        s((tokens, entries), jnp.int32) if entries else None, s((tokens,), jnp.int32) if entries else None,
    )  # fmt: skip


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("DSV4_JAX_CUDA_LIBRARY", str(tmp_path / "absent.so"))
    ffi.load_cuda.cache_clear()
    yield tmp_path / "absent.so"
    ffi.load_cuda.cache_clear()


def test_says_where_the_library_should_be(no_library):
    assert str(no_library) in (ffi.cuda_problem() or "")
    with pytest.raises(ImplementationError, match="absent"):
        call = functools.partial(attend, scale=1.0, fmt=FMT, implementation="cuda")
        jax.eval_shape(call, *arguments())


def test_a_file_that_is_no_library_is_refused(no_library):
    no_library.write_text("not an ELF file")
    assert "does not load" in (ffi.cuda_problem() or "")


@pytest.mark.parametrize(("entries", "splits"), [(512, 2), (1024, 2), (8192, 8), (0, 1)])
def test_lowers_to_one_ffi_call(monkeypatch, entries, splits):
    monkeypatch.setattr(kernel, "cuda_target", lambda name: name)
    call = functools.partial(kernel._attend, scale=512**-0.5, fmt=FMT)
    text = jax.jit(call).trace(*arguments(entries=entries)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_attend") == 1
    assert f"splits = {splits} : i32" in text
    assert f"tensor<2x{entries}xi32>" in text


def test_splits_do_not_depend_on_the_batch_and_fit_a_cluster():
    assert [kernel.split_count(128, k) for k in (0, 1, 512, 1024, 8192, 1 << 20)] == [1, 1, 2, 2, 8, 8]


def test_other_formats_take_the_reference():
    fmt = kv_format("bf16", 64, 16)
    rng = np.random.default_rng(0)
    rows = oracle.encode("bf16", rng.standard_normal((24, 64)), 16)
    args = (
        rng.standard_normal((2, 4, 64)).astype(np.float32), np.zeros(4, np.float32), rows,
        rng.integers(0, 24, (2, 16)).astype(np.int32), np.ones((2, 16), bool), None, None, None,
    )  # fmt: skip
    got, want = (jit_attend(*args, scale=0.125, fmt=fmt, implementation=i) for i in ("cuda", "xla"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
