"""What is timed: per op, the arrays of its calls and the call itself.

Every call has its own ids, queries, positions and values, drawn over a pool far larger than the GPU's L2. Stored rows
are valid in every format: no NaN codes, scales near 1. Ops that update arrays in place pass them from call to call
(`carry`), as the layers of a step do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..config import DSV4Config
from ..formats import Codes, RowFormat, Scales, codec
from ..layout import CacheLayout
from ..manager.planning import build_plan
from ..manager.step_shape import StepSequence, shape_for
from ..ops.append import Rows, WindowView, load
from ..ops.compress import CompressorGeometry, CompressorInputs, compress_csa, compress_hca
from ..ops.gather import gather_rows
from ..ops.numerics import inv_frequencies
from ..ops.registry import OPS, Op
from ..pools.carriers import decode
from ..pools.kv_pool import store_kv
from ..pools.spec import KVSpec
from .shapes import (
    BLOCK_TOKENS,
    AppendShape,
    AttendShape,
    CompressShape,
    GatherShape,
    KVStoreShape,
    ScoreShape,
    Shape,
    TopKShape,
)

__all__ = ["Problem", "problem", "pure", "random_part", "random_rows", "registered"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Calls of one op at one shape, each on arguments of its own.

    Attributes:
        shared: arrays that all calls read.
        carry: makes the arrays that each call updates in place; () for a pure op.
        calls: the arguments of each call.
        apply: (shared, carry, call, implementation) -> (carry, out).
        result: (carry, out, call) -> arrays to be compared with another implementation's.
        tolerance: largest relative error of a correct implementation.
    """

    shared: Any
    carry: Callable[[], Any]
    calls: list[Any]
    apply: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    result: Callable[[Any, Any, Any], Any]
    tolerance: float


def registered(op: str) -> Op:
    """Returns the op of the registry behind one of `shapes.OPS`: each compressor is one of its own here."""
    return OPS["compress" if op.startswith("compress") else op]


def problem(shape: Shape, calls: int, *, pool_rows: int, seed: int = 0) -> Problem:
    """Makes `calls` calls of an op at a shape. `pool_rows`: at least so many stored rows to read from."""
    key = jax.random.key(seed)
    return _MAKERS[type(shape)](key, shape, calls, pool_rows)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_part(key: jax.Array, shape: tuple[int, ...], dtype: str, holds: Codes | Scales | None = None) -> jax.Array:
    """Draws one part of a pool. Float32 parts (scales, state, rows) are positive."""
    if dtype == "float32":
        return jnp.abs(jax.random.normal(key, shape, jnp.float32))
    bits = jax.random.bits(key, shape, dtype)
    if isinstance(holds, Scales):  # ue8m0: 2^-9 to 2^-4
        return bits % np.uint8(6) + np.uint8(118)
    if dtype == "uint16":  # bf16 in +-[0.5, 1)
        return (bits & np.uint16(0x807F)) | np.uint16(0x3F00)
    # e4m3 without its NaNs; e2m1 has none.
    return bits & np.uint8(0xF7) if dtype == "uint8" else bits


def random_rows(key: jax.Array, fmt: RowFormat, rows: int) -> Rows:
    """Draws the parts of a pool, [rows, width] each."""
    keys = jax.random.split(key, len(fmt.parts))
    return tuple(
        random_part(k, (rows, part.width), part.dtype, part.holds) for k, part in zip(keys, fmt.parts, strict=True)
    )


def pure(shared: Any, calls: list[Any], call: Callable[[Any, Any, Any], Any], tolerance: float) -> Problem:
    """Makes a problem of calls that overwrite nothing; `call`'s result is what is compared."""
    return Problem(
        shared,
        tuple,
        calls,
        lambda shared, _, args, name: ((), call(shared, args, name)),
        lambda _, out, args: out,
        tolerance,
    )


def _draw(key: jax.Array, calls: int, make: Callable[[jax.Array], Any]) -> list[Any]:
    make = jax.jit(make)
    return [make(k) for k in jax.random.split(jax.random.fold_in(key, 1), calls)]


def _distinct_rows(rows: int, calls: int, tokens: int) -> np.ndarray:
    """Draws ids [calls, tokens], no two of them equal."""
    return np.random.default_rng(0).permutation(rows)[: calls * tokens].reshape(calls, tokens).astype(np.int32)


def _finish(width: int, rope_dim: int, *, compressed: bool, hadamard: bool = False) -> ops.Epilogue:
    cfg = DSV4Config.flash()
    theta, yarn = (cfg.compress_rope_theta, cfg.yarn) if compressed else (cfg.rope_theta, None)
    norm = jnp.linspace(0.5, 1.5, width, dtype=jnp.float32)
    return ops.Epilogue(norm, jnp.asarray(inv_frequencies(rope_dim, theta, yarn)), cfg.rms_norm_eps, hadamard)


def _append(key: jax.Array, shape: AppendShape, calls: int, pool_rows: int) -> Problem:
    fmt, tokens = shape.fmt, shape.tokens
    rows = max(pool_rows, calls * tokens)
    ids = _distinct_rows(rows, calls, tokens)

    def make(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = jax.random.split(key)
        values = jax.random.normal(a, (tokens, fmt.dim), jnp.bfloat16)
        return values, jax.random.randint(b, (tokens,), 0, 1 << 20, jnp.int32)

    epilogue = _finish(fmt.dim, fmt.rope_dim, compressed=False) if shape.fused else None
    args = [(*call, jnp.asarray(own)) for call, own in zip(_draw(key, calls, make), ids, strict=True)]

    def apply(epilogue: Any, pool: Any, call: Any, implementation: Any) -> tuple[Any, None]:
        values, position, own = call
        position = position if shape.fused else None
        options: dict[str, Any] = dict(fmt=fmt, epilogue=epilogue, position=position)
        return ops.append(pool, values, own, **options, implementation=implementation), None

    def result(pool: Any, _: None, call: Any) -> jax.Array:
        return codec(fmt).decode(fmt, load(pool, call[2]), jnp.float32)

    return Problem(epilogue, lambda: random_rows(key, fmt, rows), args, apply, result, 1e-2)


def _compress(key: jax.Array, shape: CompressShape, calls: int, _: int) -> Problem:
    """Every call feeds slots of its own. A decode step stands at the last token of 8 Ki."""
    cfg = DSV4Config.flash()
    layout = CacheLayout(cfg, hca_state="raw" if shape.kind == "hca_raw" else "online")
    ratio, compressors = shape.ratio, shape.compressors
    start = 8 * 1024 - 1 if shape.length == 1 else 0
    per_block, slots = BLOCK_TOKENS // ratio, calls * shape.rows + 1
    columns = layout.blocks_for(start + shape.length)
    # Only the last block of a decoding slot is written: one block per slot is enough.
    own_blocks = 1 if shape.length == 1 else columns
    table = (np.arange(slots)[:, None] - 1) * own_blocks + 1 + np.arange(columns)[None] % own_blocks
    table[0] = 0
    units = (slots - 1) * own_blocks + 1
    geometries = [CompressorGeometry(ratio, 0, slots, s.ring, 0, per_block, s.fmt) for s in compressors]
    epilogues = [
        _finish(s.fmt.dim, s.fmt.rope_dim or cfg.rope_dim, compressed=True, hadamard=s.kind == "index")
        for s in compressors
    ]

    def make(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        sizes = [(shape.rows * shape.length, s.input_width) for s in compressors]
        keys = jax.random.split(key, (len(sizes), 2))
        return [
            (jax.random.normal(a, size, jnp.float32), jax.random.normal(b, size, jnp.float32))
            for (a, b), size in zip(keys, sizes, strict=True)
        ]

    args = []
    for i, inputs in enumerate(_draw(key, calls, make)):
        own = np.arange(shape.rows) + i * shape.rows + 1
        scheduled = [StepSequence(int(slot), start, shape.length) for slot in own]
        plan = jax.tree.map(jnp.asarray, build_plan(layout, scheduled, shape_for(layout, scheduled)))
        entries = np.arange(start // ratio, (start + shape.length) // ratio)
        emitted = table[own][:, entries // per_block] * per_block + entries % per_block
        ring = own[:, None] * shape.ring + np.arange(shape.ring)[None]
        args.append((plan, inputs, *(jnp.asarray(x.reshape(-1), jnp.int32) for x in (emitted, ring))))

    def apply(shared: Any, carry: Any, call: Any, implementation: Any) -> tuple[Any, None]:
        epilogues, table = shared
        plan, inputs, *_ = call
        fed = [
            CompressorInputs(state, pool, kv, score, epilogue, geometry)
            for (state, pool), (kv, score), epilogue, geometry in zip(carry, inputs, epilogues, geometries, strict=True)
        ]
        if ratio == cfg.csa_ratio:
            return compress_csa(fed, plan, table, implementation=implementation), None
        mode = layout.hca_state
        return [compress_hca(fed[0], plan, table, mode=mode, implementation=implementation)], None

    def result(carry: Any, _: None, call: Any) -> Any:
        emitted, ring = call[-2:]
        return [
            (codec(s.fmt).decode(s.fmt, load(pool, emitted), jnp.float32), state[ring])
            for s, (state, pool) in zip(compressors, carry, strict=True)
        ]

    def carry() -> list[Any]:
        return [
            (random_part(key, (slots * s.ring, s.state_width), "float32"), random_rows(key, s.fmt, units * per_block))
            for s in compressors
        ]

    shared = epilogues, jnp.asarray(table, jnp.int32)
    return Problem(shared, carry, args, apply, result, 1e-2)


def _gather(key: jax.Array, shape: GatherShape, calls: int, pool_rows: int) -> Problem:
    fmt, rows = shape.fmt, max(pool_rows, shape.rows)
    args = _draw(key, calls, lambda k: jax.random.randint(k, (shape.rows,), 0, rows, jnp.int32))
    call = lambda pool, ids, name: gather_rows(pool, ids, fmt=fmt, implementation=name)  # noqa: E731
    return pure(random_rows(key, fmt, rows), args, call, 0.0)


def _index_scores(key: jax.Array, shape: ScoreShape, calls: int, pool_rows: int) -> Problem:
    fmt, per_block = shape.fmt, shape.rows_per_block
    one = shape.tokens * shape.blocks
    blocks = max(pool_rows // per_block, min(calls, 2) * one)
    order = np.random.default_rng(0).permutation(blocks).astype(np.int32)

    def make(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = jax.random.split(key)
        queries = jax.random.normal(a, (shape.tokens, shape.heads, fmt.dim), jnp.bfloat16)
        return queries, jax.random.normal(b, (shape.tokens, shape.heads), jnp.float32)

    count = jnp.full(shape.tokens, shape.keys, jnp.int32)
    args = [
        (
            *call,
            jnp.asarray(np.take(order, np.arange(i * one, (i + 1) * one), mode="wrap").reshape(shape.tokens, -1)),
            count,
        )
        for i, call in enumerate(_draw(key, calls, make))
    ]

    def call(pool: Any, args: Any, name: Any) -> jax.Array:
        return ops.index_scores(pool, *args, base=0, rows_per_block=per_block, fmt=fmt, implementation=name)

    return pure(random_rows(key, fmt, blocks * per_block), args, call, 1e-2)


def _top_k(key: jax.Array, shape: TopKShape, calls: int, _: int) -> Problem:
    count = jnp.full(shape.tokens, shape.entries, jnp.int32)
    args = _draw(key, calls, lambda k: jax.random.normal(k, (shape.tokens, shape.entries), jnp.float32))

    def call(_: Any, args: Any, name: Any) -> jax.Array:
        if name == "lax.top_k":
            return jax.lax.top_k(args[0], shape.k)[1]
        return ops.top_k(*args, k=shape.k, implementation=name)[0]

    return pure((), [(scores, count) for scores in args], call, 0.0)


def _attend(key: jax.Array, shape: AttendShape, calls: int, pool_rows: int) -> Problem:
    fmt, tokens, heads = shape.fmt, shape.tokens, shape.heads
    rows = max(pool_rows, 2 * shape.window)

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        a, b, c = jax.random.split(key, 3)
        start = jax.random.randint(b, (tokens, 1), 0, rows - shape.window, jnp.int32)
        return (
            jax.random.normal(a, (tokens, heads, fmt.dim), jnp.bfloat16),
            start + jnp.arange(shape.window, dtype=jnp.int32)[None],
            jnp.ones((tokens, shape.window), jnp.bool),
            jax.random.randint(c, (tokens, shape.entries), 0, rows, jnp.int32),
            jnp.full(tokens, shape.entries, jnp.int32),
        )

    op = functools.partial(ops.attend, scale=fmt.dim**-0.5, fmt=fmt, key_split=shape.key_split)

    def call(shared: Any, args: Any, name: Any) -> tuple[jax.Array, jax.Array]:
        pool, sink = shared
        queries, ids, visible, *entries = args
        rest = (pool, *entries) if shape.entries else (None, None, None)
        return op(queries, sink, WindowView(pool, ids, visible), *rest, implementation=name)

    shared = random_rows(key, fmt, rows), jax.random.normal(key, (heads,), jnp.float32)
    return pure(shared, _draw(key, calls, make), call, 3e-3)


def _kv_store(key: jax.Array, shape: KVStoreShape, calls: int, pool_rows: int) -> Problem:
    tokens, heads, dim, storage = shape.tokens, shape.heads, shape.dim, shape.storage
    rows = max(pool_rows, calls * tokens)
    ids = _distinct_rows(rows, calls, tokens)
    leaves = KVSpec(rows - 1, 1, heads, dim, storage=storage).leaves

    def make(key: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(k, (tokens, heads * dim), jnp.bfloat16) for k in jax.random.split(key)]

    def carry() -> list[tuple[jax.Array, ...]]:
        return [
            tuple(random_part(key, *leaf) for name, leaf in leaves.items() if name.startswith(part)) for part in "kv"
        ]

    def apply(_: Any, pools: Any, call: Any, implementation: Any) -> tuple[Any, None]:
        return list(store_kv(*pools, *call, storage=storage, implementation=implementation)), None

    def result(pools: Any, _: None, call: Any) -> list[jax.Array]:
        return [decode(tuple(part[call[2]] for part in parts), storage, jnp.float32) for parts in pools]

    args = [(*call, jnp.asarray(own)) for call, own in zip(_draw(key, calls, make), ids, strict=True)]
    return Problem((), carry, args, apply, result, 0.0)


_MAKERS: dict[type[Shape], Callable[..., Problem]] = {
    AppendShape: _append,
    CompressShape: _compress,
    GatherShape: _gather,
    ScoreShape: _index_scores,
    TopKShape: _top_k,
    AttendShape: _attend,
    KVStoreShape: _kv_store,
}
