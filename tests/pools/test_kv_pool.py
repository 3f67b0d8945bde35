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
from dsv4_jax.ops.registry import Choice
from dsv4_jax.pallas import kv_store as kernel
from dsv4_jax.pools import KVPool, KVSpec
from dsv4_jax.pools.kv_pool import KVStoreArguments, store_kv

from ..ops.op_test import OpTest
from ..pallas.lowering import lowers_for_cuda
from . import assert_in_place

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


def check_trace(storage: str, implementation: Choice, seed: int, steps: int) -> None:
    """Random writes to random layers, padding among them; after each, all rows of all layers, and a gather."""
    spec, rng = spec_of(storage), np.random.default_rng(seed)
    pool = KVPool.init(spec)
    model = {p: np.zeros((spec.layers, spec.rows, *spec.heads(p)), np.float32) for p in "kv"}
    for _ in range(steps):
        layer = int(rng.integers(spec.layers))
        ids = rng.permutation(np.concatenate([rng.choice(np.arange(1, spec.size + 1), 5, replace=False), [0, 0]]))
        k, v = (rows_of(rng, 7, *spec.heads(p)) for p in "kv")
        for part, x in (("k", k), ("v", v)):
            model[part][layer, ids[ids > 0]] = stored(x[ids > 0], storage)
        pool = set_kv(pool, np.int32(layer), ids.astype(np.int32), k, v, implementation=implementation)
        slots = rng.integers(0, spec.size + 1, (2, 3))
        buffers, (keys, values) = read(pool, np.int32(layer), slots.astype(np.int32))
        for part, buffer, rows in zip("kv", zip(*buffers, strict=True), (keys, values), strict=True):
            np.testing.assert_array_equal(np.stack(buffer), model[part])
            np.testing.assert_array_equal(rows, model[part][layer][slots])
        assert not any(x[:, 0].any() for x in model.values())


@jax.jit
def read(pool: KVPool, layer: jax.Array, slots: jax.Array) -> tuple[Any, Any]:
    """K and V of every layer, and some rows of one."""
    buffers = [pool.get_kv_buffer(at, jnp.float32) for at in range(pool.spec.layers)]
    return buffers, pool.gather_kv(layer, slots, jnp.float32)[:2]


@given(st.integers(0, 2**32), st.sampled_from(STORAGES))
@settings(max_examples=24)
def test_trace(seed: int, storage: str) -> None:
    check_trace(storage, "xla", seed, 40)


@pytest.mark.parametrize("storage", STORAGES)
def test_buffers_have_the_stored_type(storage: str) -> None:
    pool = jax.eval_shape(lambda: KVPool.init(spec_of(storage)))
    k, v = jax.eval_shape(lambda p: p.get_kv_buffer(2), pool)
    assert (k.shape, v.shape) == ((24, 2, 12), (24, 3, 5)) and k.dtype == v.dtype == FLOATS.get(storage, jnp.bfloat16)
    assert jax.eval_shape(lambda p: p.get_key_buffer(0), pool).shape == k.shape
    assert jax.eval_shape(lambda p: p.get_value_buffer(0, jnp.float32), pool).dtype == jnp.float32


class KVStoreTest(OpTest):
    op = "kv_store"

    @pytest.mark.parametrize("storage", ["bf16", "fp8"])  # the others: byte for byte the reference's
    def test_trace(self, storage: str) -> None:
        with self.asked(storage=storage):
            check_trace(storage, self.implementation, 0, 5)


class TestKVStore(KVStoreTest):
    implementation = "xla"


class TestKernel(KVStoreTest):
    """Interpreted here; compiled on a GPU, below."""

    implementation = "pallas"

    @pytest.mark.parametrize("storage", STORAGES)
    def test_stores_the_reference_bytes(self, storage: str) -> None:
        """Widths of a GQA model, bf16 and float32 inputs, with NaN, Inf and zero rows."""
        spec = KVSpec(30, 2, 2, 128, 4, 64, storage)
        rng = np.random.default_rng(1)
        x = rows_of(rng, 6, 1, 256).reshape(6, 256)
        x[0, 3], x[1, 7], x[2] = np.nan, np.inf, 0
        for dtype in (jnp.float32, jnp.bfloat16) if storage == "bf16" else (jnp.float32,):
            pools = [
                set_kv(
                    KVPool.init(spec),
                    1,
                    jnp.asarray([30, 4, 9, 0, 1, 2]),
                    jnp.asarray(x, dtype),
                    jnp.asarray(x[::-1].copy(), dtype),
                    implementation=i,
                )
                for i in ("xla", "pallas")
            ]
            for a, b in zip(*(jax.tree.leaves(p) for p in pools), strict=True):
                np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("storage", ["fp8", "bf16"])
    def test_rows_of_a_program_change_nothing(self, storage: str) -> None:
        """7 rows, some of them not stored, 4 a program (1 in the tests above); other widths."""
        check_tilings(storage, (4,), count=7, pool_rows=12, widths=(80, 40))


def check_tilings(storage: str, tilings: tuple[int, ...], count: int, pool_rows: int, widths: tuple[int, int]) -> None:
    """All bytes of the pools are the reference's, whatever they held."""
    rng = np.random.default_rng(3)
    spec = KVSpec(pool_rows - 1, 1, 1, widths[0], 1, widths[1], storage)
    filled = {
        n: rng.integers(0, 256, (spec.rows, d[1] * np.dtype(t).itemsize), np.uint8).view(t)
        for n, (d, t) in spec.leaves.items()
    }
    k, v = (jnp.asarray(rng.standard_normal((count, width)), jnp.bfloat16) for width in widths)
    ids = rng.permutation(spec.rows)[:count].astype(np.int32)
    ids[[1, 4, 5]] = spec.rows, 2**31 - 1, -1
    reference = jax.jit(functools.partial(store_kv, storage=storage, implementation="xla"))
    calls = [reference]
    for i, rows in enumerate(tilings):
        tiling = dict(per_program=rows, warps=1 << i % 4)
        calls.append(jax.jit(lambda *x, tiling=tiling: kernel.call(KVStoreArguments(*x, storage), **tiling)))
    want, *others = (
        [np.asarray(x).tobytes() for x in jax.tree.leaves(call(*parts_of(filled), k, v, ids))] for call in calls
    )
    for tiling, found in zip(tilings, others, strict=True):
        assert found == want, tiling


def parts_of(leaves: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(leaves[n] for n in (part, f"{part}_scale") if n in leaves) for part in "kv")


@pytest.mark.gpu
class TestKernelOnTheGpu(TestKernel):
    @pytest.mark.parametrize("storage", STORAGES)
    def test_many_rows_of_gqa_widths(self, storage: str) -> None:
        check_tilings(storage, (1, 2, 4, 8), count=5003, pool_rows=20_000, widths=(1024, 1024))

    def test_is_the_default(self) -> None:
        spec, x = KVSpec(30, 1, 8, 128), jnp.ones((2, 8, 128))
        text = set_kv.lower(KVPool.init(spec), 0, jnp.asarray([1, 2]), x, x).as_text()
        assert text.count("__gpu$xla.gpu.triton") == 1

    def test_rows_far_into_large_pools(self) -> None:
        """Byte offsets beyond 2^32: 2.2 million rows of 2 KB."""
        spec, ids = KVSpec(2_200_000, 1, 8, 128), np.array([7, 2_199_999, 1_048_577, 2_097_153, 0])
        x = jnp.asarray(rows_of(np.random.default_rng(4), 5, 8, 128), jnp.bfloat16)
        pool = set_kv(KVPool.init(spec), 0, jnp.asarray(ids), x, -x, implementation="pallas")
        k, v, _ = pool.gather_kv(0, ids)
        np.testing.assert_array_equal(np.asarray(k[:4], np.float32), np.asarray(x[:4], np.float32))
        np.testing.assert_array_equal(np.asarray(v[:4], np.float32), -np.asarray(x[:4], np.float32))
        written = jax.jit(lambda pool: jnp.sum(pool.arrays["k"].any(1), dtype=jnp.int32))(pool)
        assert int(written) == 4


@pytest.mark.parametrize(
    ("storage", "width"), [*((s, (8, 128)) for s in STORAGES), ("bf16", (1, 576)), ("fp8", (3, 40))], ids=str
)
def test_kernel_lowers_for_cuda(storage: str, width: tuple[int, int]) -> None:
    spec = KVSpec(1000, 4, *width, storage=storage)
    shapes = {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in spec.leaves.items()}
    x = jax.ShapeDtypeStruct((64, spec.width("k")), jnp.bfloat16)
    call = lambda *x: kernel.call(KVStoreArguments(*x, storage), interpret=False)  # noqa: E731
    assert lowers_for_cuda(call, *parts_of(shapes), x, x, jax.ShapeDtypeStruct((64,), jnp.int32)) == 1


def test_shapes_of_rows_and_kinds_of_ids() -> None:
    """[n, h, d], [b, s, h, d] and [n, h * d]; int32 and int64 ids, from the host and from the device."""
    spec, rng = spec_of("f32"), np.random.default_rng(2)
    k, v = (rows_of(rng, 6, *spec.heads(p)) for p in "kv")
    ids = np.array([3, 1, 20, 8, 9, 10])
    assert ids.dtype == np.int64
    pool = KVPool.init(spec)

    def stored_by(indices: Any, k: Any, v: Any, layer: Any = 2) -> dict[str, np.ndarray]:
        new = jax.jit(lambda pool, k, v: pool.set_kv_buffer(layer, indices, k, v))(pool, k, v)
        return {name: np.asarray(a) for name, a in new.arrays.items()}

    expect = stored_by(ids, k, v)
    np.testing.assert_array_equal(expect["k"].view(np.float32)[2 * spec.rows + ids], k.reshape(6, 24))
    others = [
        stored_by(ids.reshape(2, 3).astype(np.int32), k.reshape(2, 3, 2, 12), v.reshape(2, 3, 3, 5)),
        stored_by(ids.tolist(), k.reshape(6, 24), v.reshape(6, 15), np.int64(2)),
    ]
    with jax.enable_x64(True):
        others.append(stored_by(jnp.asarray(ids, jnp.int64), k, v))
        # An id that would become 5 if it were narrowed before it is checked.
        over = stored_by(jnp.asarray([2**32 + 5], jnp.int64), k[:1], v[:1])
    for other in others:
        for name in "kv":
            np.testing.assert_array_equal(other[name], expect[name])
    assert not over["k"].any() and not over["v"].any()


def test_device_ids_out_of_range_are_padding() -> None:
    spec = spec_of("bf16")
    k, v = (np.ones((4, *spec.heads(p)), np.float32) for p in "kv")
    pool = set_kv(KVPool.init(spec), 1, jnp.asarray([-1, 0, 21, 2**31 - 1]), k, v)
    assert not any(np.asarray(a).any() for a in pool.arrays.values())
    assert pool.set_kv_buffer(0, [], k[:0], v[:0]) is pool


@pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1, -(2**31), 2**28 + 1, 178956971])
def test_device_layers_out_of_range_change_nothing(layer: int) -> None:
    """Nothing is stored, zeros are read. The last two times 24 rows are row 24 or so again in int32."""
    spec = spec_of("f32")
    k, v = (np.ones((2, *spec.heads(p)), np.float32) for p in "kv")
    pool = set_kv(KVPool.init(spec), 1, jnp.asarray([1, 2]), k, v)
    after = set_kv(jax.tree.map(jnp.copy, pool), jnp.int32(layer), jnp.asarray([3, 4]), k, v)
    for a, b in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    keys, values, _ = pool.gather_kv(jnp.int32(layer), jnp.asarray([1, 2]))
    assert not np.asarray(keys).any() and not np.asarray(values).any()


@pytest.mark.parametrize(
    "layer", [jnp.float32(1), jnp.asarray([1]), jnp.asarray(True), np.asarray(True), 1.0, None], ids=str
)
def test_a_layer_is_an_integer(layer: Any) -> None:
    pool = KVPool.init(spec_of("f32"))
    for call in (lambda: pool.gather_kv(layer, [1]), lambda: pool.get_key_buffer(layer)):
        with pytest.raises((PoolError, ShapeError), match="layer"):
            call()


@pytest.mark.parametrize("odd", [[1.0], [True], ["1"], [None], [[1], [2, 3]], [2**70], {1}], ids=str)
def test_indices_of_odd_types_are_refused(odd: Any) -> None:
    with pytest.raises((PoolError, ShapeError)):
        KVPool.init(spec_of("f32")).gather_kv(0, odd)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layer": 3}, PoolError, "from 0 to 2, got 3"),
        ({"layer": -1}, PoolError, "got -1"),
        ({"indices": [1, 21]}, PoolError, r"0\.\.20, got 1\.\.21"),
        ({"indices": [-1, 2]}, PoolError, r"got -1\.\.2"),
        ({"indices": [2, 2]}, PoolError, "twice"),
        ({"indices": [1.0, 2.0]}, ShapeError, "integers"),
        ({"k": (2, 3, 8)}, ShapeError, r"k has shape \(2, 3, 8\)"),
        ({"v": (3, 3, 5)}, ShapeError, "v has shape"),
        ({"k": (2, 2, 12, 1)}, ShapeError, "k has shape"),
        ({"implementation": "cuda"}, ImplementationError, "CUDA"),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    change = {n: np.ones(x, np.float32) if n in "kv" else x for n, x in change.items()}
    args = {"layer": 0, "indices": [1, 2], "k": np.ones((2, 2, 12), np.float32), "v": np.ones((2, 3, 5), np.float32)}
    with pytest.raises(error, match=message):
        KVPool.init(spec_of("bf16")).set_kv_buffer(**(args | change))
    with pytest.raises(ShapeError, match="floating"):
        KVPool.init(spec_of("bf16")).set_kv_buffer(**(args | {"k": np.ones((2, 24), np.int32)}))
    with pytest.raises(ShapeError, match="v must be an array, got list"):
        KVPool.init(spec_of("bf16")).set_kv_buffer(**(args | {"v": [[1.0] * 15] * 2}))


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


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_a_step_over_all_layers_copies_nothing(storage: str) -> None:
    """Write, then read, layer by layer, each fed by the one before."""
    spec = KVSpec(20_000, 3, 2, 16, 1, 8, storage)

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
