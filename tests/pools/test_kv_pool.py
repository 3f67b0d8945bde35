"""KVPool against plain NumPy buffers: every storage and implementation, the sink, index kinds, no copies."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.errors import ImplementationError, PoolError, ShapeError
from dsv4_jax.ops.dispatch import Implementation
from dsv4_jax.pallas import kv_store as kernel
from dsv4_jax.pools import KVPool, KVSpec

from ..pallas.lowering import lowers_for_cuda
from .in_place import assert_in_place

STORAGES = ("bf16", "f16", "f32", "fp8")
FLOATS: dict[str, Any] = {"bf16": jnp.bfloat16, "f16": np.float16, "f32": np.float32}
set_kv = jax.jit(KVPool.set_kv_buffer, static_argnames="implementation", donate_argnums=0)


def spec_of(storage: str, **changes: int) -> KVSpec:
    """K and V differ in heads and width, and neither width is a power of two."""
    return KVSpec(
        **{"size": 20, "layers": 3, "k_heads": 2, "k_dim": 12, "v_heads": 3, "v_dim": 5} | changes, storage=storage
    )


def rows_of(rng: np.random.Generator, n: int, heads: int, dim: int) -> np.ndarray:
    return rng.standard_normal((n, heads, dim)).astype(np.float32) * np.float32(3)


def stored(x: np.ndarray, storage: str) -> np.ndarray:
    """What comes back of rows [n, heads, dim]: plain NumPy, float32."""
    if storage != "fp8":
        return x.astype(FLOATS[storage]).astype(np.float32)
    amax = np.maximum(np.abs(x).max((1, 2), keepdims=True), 1e-4).astype(np.float64)
    scale = np.exp2(np.ceil(np.log2(amax / 448)))
    return ((x / scale).astype(jnp.float8_e4m3fn).astype(np.float64) * scale).astype(np.float32)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("storage", STORAGES)
def test_writes_and_reads(storage: str, implementation: Implementation) -> None:
    """Random writes to random layers, padding among them, against NumPy buffers. All rows, all layers, every step."""
    spec, rng = spec_of(storage), np.random.default_rng(0)
    pool = KVPool.init(spec)
    model = {p: np.zeros((spec.layers, spec.rows, *spec.heads(p)), np.float32) for p in "kv"}
    for _ in range(6):
        layer = int(rng.integers(spec.layers))
        ids = rng.permutation(np.concatenate([rng.choice(np.arange(1, spec.size + 1), 5, replace=False), [0, 0]]))
        k, v = (rows_of(rng, 7, *spec.heads(p)) for p in "kv")
        for part, x in (("k", k), ("v", v)):
            model[part][layer, ids[ids > 0]] = stored(x[ids > 0], storage)
        pool = set_kv(pool, jnp.int32(layer), jnp.asarray(ids, jnp.int32), k, v, implementation=implementation)
        for at in range(spec.layers):
            for part, got in zip("kv", pool.get_kv_buffer(at, jnp.float32), strict=True):
                np.testing.assert_array_equal(got, model[part][at])
    k, v, same = pool.gather_kv(1, np.array([[4, 0], [20, 7]]), jnp.float32)
    np.testing.assert_array_equal(k, model["k"][1][[[4, 0], [20, 7]]])
    np.testing.assert_array_equal(v, model["v"][1][[[4, 0], [20, 7]]])
    np.testing.assert_array_equal(same.arrays["k"], pool.arrays["k"])
    assert pool.get_key_buffer(0).dtype == FLOATS.get(storage, jnp.bfloat16)
    assert not np.asarray(pool.get_value_buffer(2, jnp.float32))[0].any()


@pytest.mark.parametrize("storage", STORAGES)
def test_kernel_stores_the_reference_bytes(storage: str) -> None:
    """Widths of a GQA model, bf16 and float32 inputs, with NaN, Inf and zero rows."""
    spec = KVSpec(30, 2, 2, 128, 4, 64, storage)
    rng = np.random.default_rng(1)
    x = rows_of(rng, 6, 1, 256).reshape(6, 256)
    x[0, 3], x[1, 7], x[2] = np.nan, np.inf, 0
    for dtype in (jnp.float32, jnp.bfloat16):
        pools = [
            set_kv(KVPool.init(spec), 1, jnp.asarray([30, 4, 9, 0, 1, 2]), jnp.asarray(x, dtype),
                   jnp.asarray(x[::-1].copy(), dtype), implementation=i)
            for i in ("xla", "pallas")
        ]  # fmt: skip
        for a, b in zip(*(jax.tree.leaves(p) for p in pools), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("width", [(8, 128), (1, 576), (3, 40)], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
def test_kernel_lowers_for_cuda(storage: str, width: tuple[int, int]) -> None:
    spec = KVSpec(1000, 4, *width, storage=storage)
    shapes = {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in spec.leaves.items()}
    parts = (
        tuple(shapes[n] for n in ("k", "k_scale") if n in shapes),
        tuple(shapes[n] for n in ("v", "v_scale") if n in shapes),
    )
    x = jax.ShapeDtypeStruct((64, spec.width("k")), jnp.bfloat16)
    call = functools.partial(kernel._store_kv, storage=storage, interpret=False)
    assert lowers_for_cuda(call, *parts, x, x, jax.ShapeDtypeStruct((64,), jnp.int32)) == 1


def test_shapes_of_rows_and_kinds_of_ids() -> None:
    """[n, h, d], [b, s, h, d] and [n, h * d]; int32 and int64 ids, from the host and from the device."""
    spec, rng = spec_of("f32"), np.random.default_rng(2)
    k, v = (rows_of(rng, 6, *spec.heads(p)) for p in "kv")
    ids = np.array([3, 1, 20, 8, 9, 10])
    assert ids.dtype == np.int64
    pool = KVPool.init(spec)
    expect = pool.set_kv_buffer(2, ids, k, v)
    np.testing.assert_array_equal(expect.get_key_buffer(2)[ids], k)
    two = pool.set_kv_buffer(2, ids.reshape(2, 3).astype(np.int32), k.reshape(2, 3, 2, 12), v.reshape(2, 3, 3, 5))
    flat = pool.set_kv_buffer(np.int64(2), ids.tolist(), jnp.asarray(k.reshape(6, 24)), jnp.asarray(v.reshape(6, 15)))
    with jax.enable_x64(True):
        wide = pool.set_kv_buffer(2, jnp.asarray(ids, jnp.int64), jnp.asarray(k), jnp.asarray(v))
        # An id that would become 5 if it were narrowed before it is checked.
        over = pool.set_kv_buffer(2, jnp.asarray([2**32 + 5], jnp.int64), jnp.asarray(k[:1]), jnp.asarray(v[:1]))
    for other in (two, flat, wide):
        np.testing.assert_array_equal(other.arrays["k"], expect.arrays["k"])
        np.testing.assert_array_equal(other.arrays["v"], expect.arrays["v"])
    assert not np.asarray(over.arrays["k"]).any()


def test_device_ids_out_of_range_are_padding() -> None:
    spec = spec_of("bf16")
    k, v = (np.ones((4, *spec.heads(p)), np.float32) for p in "kv")
    pool = set_kv(KVPool.init(spec), 1, jnp.asarray([-1, 0, 21, 2**31 - 1]), k, v)
    assert not any(np.asarray(a).any() for a in pool.arrays.values())
    assert pool.set_kv_buffer(0, [], k[:0], v[:0]) is pool


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layer": 3}, PoolError, r"0\.\.2, got 3"), ({"layer": -1}, PoolError, "got -1"),
        ({"indices": [1, 21]}, PoolError, r"0\.\.20, got 1\.\.21"), ({"indices": [-1, 2]}, PoolError, r"got -1\.\.2"),
        ({"indices": [2, 2]}, PoolError, "twice"), ({"indices": [1.0, 2.0]}, ShapeError, "integers"),
        ({"k": (2, 3, 8)}, ShapeError, r"k has shape \(2, 3, 8\)"), ({"v": (3, 3, 5)}, ShapeError, "v has shape"),
        ({"k": (2, 2, 12, 1)}, ShapeError, "k has shape"), ({"implementation": "cuda"}, ImplementationError, "no CUDA"),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    change = {n: np.ones(x, np.float32) if n in "kv" else x for n, x in change.items()}
    args = {"layer": 0, "indices": [1, 2], "k": np.ones((2, 2, 12), np.float32), "v": np.ones((2, 3, 5), np.float32)}
    with pytest.raises(error, match=message):
        KVPool.init(spec_of("bf16")).set_kv_buffer(**(args | change))
    with pytest.raises(ShapeError, match="floating"):
        KVPool.init(spec_of("bf16")).set_kv_buffer(**(args | {"k": np.ones((2, 24), np.int32)}))


@pytest.mark.parametrize("bad", [{"size": 0}, {"layers": True}, {"k_dim": 1.5}, {"size": 2**31}], ids=str)
def test_spec_refuses(bad: dict[str, Any]) -> None:
    with pytest.raises(PoolError):
        spec_of("bf16", **bad)
    with pytest.raises(PoolError, match="one of"):
        spec_of("int8")


@given(st.integers(1, 100), st.sampled_from(STORAGES))
@settings(max_examples=20)
def test_bytes_are_those_allocated(size: int, storage: str) -> None:
    spec = spec_of(storage, size=size)
    pool = jax.eval_shape(functools.partial(KVPool.init, spec))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool)) == spec.total_bytes == pool.mem_bytes
    assert spec.rows > size and spec.rows % 8 == 0


@pytest.mark.parametrize("storage", STORAGES)
def test_a_step_over_all_layers_copies_nothing(storage: str) -> None:
    """Write, then read, layer by layer, each fed by the one before."""
    spec = KVSpec(20_000, 6, 2, 16, 1, 8, storage)

    def step(pool: KVPool, ids: jax.Array, k: jax.Array, v: jax.Array) -> tuple[KVPool, jax.Array]:
        hidden = jnp.float32(0)
        for layer in range(spec.layers):
            pool = pool.set_kv_buffer(layer, ids, k + hidden, v + hidden)
            keys, values, pool = pool.gather_kv(layer, ids, jnp.float32)
            hidden = hidden + keys.mean() * values.mean()
        return pool, hidden

    pool, _ = assert_in_place(
        step, KVPool.init(spec), jnp.asarray([5, 19_999, 0]), jnp.ones((3, 2, 16)), jnp.ones((3, 1, 8))
    )
    assert len(jax.tree.leaves(pool)) == (4 if storage == "fp8" else 2)
