"""The kernels that `kernels.py` times: a table of cases, and the operands of each.

Ops that the cache has come from `dsv4_jax.bench` (its shapes and its random operands); those of the model, and the
forms in which a step calls the others, are made here. Every call has operands of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.ops import Problem, problem, pure
from dsv4_jax.bench.shapes import CASES, QUICK, AttendShape, ScoreShape, Shape, TopKShape, select
from dsv4_jax.formats.index_fp4 import round_trip
from dsv4_jax.formats.weights import WEIGHT_FORMATS
from dsv4_jax.ops.attend import SharedEntries, WindowView
from dsv4_jax.ops.columns import Product
from dsv4_jax.ops.hyper_connection import Written, connection_vector, hyper_head
from dsv4_jax.ops.queries import finish_queries

__all__ = ["KERNELS", "OPS", "TINY", "Kernel", "Made"]

ROPE_PAIRS, EPS = 32, 1e-6
FREQUENCIES = np.linspace(1, 0.01, ROPE_PAIRS, dtype=np.float32)
TOP, LIMIT = 6, 10.0  # experts of a token; of the SwiGLU


class Made(NamedTuple):
    """The calls of a case. bytes, flops: what each cannot do without; None: not counted."""

    problem: Problem
    bytes: int | None
    flops: int | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A case, for any batch.

    Attributes:
        op, name: in records (`records.Measurement`).
        batches: tokens, requests or rows that are measured.
        make: (batch, calls, pool rows) -> the calls.
        size: batch -> about the bytes that a call reads or writes, from which follows how many calls there are.
        variant: how the op was called, if not as a step does by default.
        parts: other handlers that the op calls -> the name under which each is recorded; "": not timed here.
        implementation: that is timed on a GPU unless others are asked for.
        registered: the op of the registry that these calls are of, if it has another name.
    """

    op: str
    name: str
    batches: tuple[int, ...]
    make: Callable[[int, int, int], Made]
    size: Callable[[int], float]
    variant: str | None = None
    parts: tuple[tuple[str, str], ...] = ()
    implementation: str = "cuda"
    registered: str | None = None


def random_calls(calls: int, make: Callable[[jax.Array], Any], seed: int = 0) -> list[Any]:
    """Returns what `make` makes of each of `calls` keys."""
    make = jax.jit(make)
    return [make(key) for key in jax.random.split(jax.random.key(seed), calls)]


# Ops of the cache, as a step calls them


def of_shape(shape: Shape, calls: int, pool_rows: int) -> Made:
    return Made(problem(shape, calls, pool_rows=pool_rows), shape.bytes_moved, shape.flops)


def scores(shape: ScoreShape, calls: int, pool_rows: int, rounded: bool, one_request: bool = False) -> Made:
    """Makes calls of index_scores. `rounded`: queries rounded to FP4, as the model's are; `one_request`: all tokens
    have its keys.
    """
    base = problem(shape, calls, pool_rows=max(pool_rows, 2 * shape.keys))

    def changed(call: Any) -> Any:
        queries, weights, table, count = call
        if rounded:
            queries = jax.jit(round_trip)(queries.astype(jnp.float32)).astype(jnp.bfloat16)
        return queries, weights, jnp.broadcast_to(table[:1], table.shape) if one_request else table, count

    keys = shape.keys * shape.fmt.row_bytes * (1 if one_request else shape.tokens)
    return Made(dataclasses.replace(base, calls=[changed(call) for call in base.calls]), keys, shape.flops)


def attention(shape: AttendShape, calls: int, pool_rows: int, chunk: bool = False, total: int = 0) -> Made:
    """Makes calls of attend, whose output is turned back and rounded to bf16.

    `chunk`: tokens follow one another in one request, so that windows overlap and entries come from the `total` there
    are: CSA's tokens choose theirs, HCA's see all.
    """
    base = problem(shape, calls, pool_rows=max(pool_rows, shape.tokens + 2 * shape.window, total))
    tokens, freq = shape.tokens, jnp.asarray(FREQUENCIES)
    position = jnp.arange(tokens, dtype=jnp.int32) + 8192
    keys = tokens * (shape.window + shape.entries)

    def in_chunk(key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        queries = jax.random.normal(a, (tokens, shape.heads, shape.fmt.dim), jnp.bfloat16)
        ids = jnp.arange(tokens, dtype=jnp.int32)[:, None] + jnp.arange(shape.window, dtype=jnp.int32)[None]
        entry_ids = jax.random.randint(b, (tokens, shape.entries), 0, max(total, 1), jnp.int32)
        count = jnp.full(tokens, shape.entries, jnp.int32)
        if total == shape.entries:
            entry_ids = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (tokens, total))
            count = jnp.maximum(total - tokens // 128 + jnp.arange(1, tokens + 1, dtype=jnp.int32) // 128, 0)
        return queries, ids, jnp.ones(ids.shape, bool), entry_ids, count

    if chunk:
        base = dataclasses.replace(base, calls=random_calls(calls, in_chunk))
        base = dataclasses.replace(base, shared=(tuple(x[: tokens + 256] for x in base.shared[0]), *base.shared))
    else:
        base = dataclasses.replace(base, shared=(base.shared[0], *base.shared))

    def call(shared: Any, args: Any, name: Any) -> tuple[jax.Array, jax.Array]:
        (window, pool, sink), (position, freq) = shared
        queries, ids, visible, *entries = args
        rest: Any = (pool, *entries) if shape.entries else (None, None, None)
        own = SharedEntries(jnp.arange(total, dtype=jnp.int32), entries[0]) if chunk and shape.entries else None
        return ops.attend(
            queries,
            sink,
            WindowView(window, ids, visible),
            *rest,
            scale=shape.fmt.dim**-0.5,
            fmt=shape.fmt,
            key_split=shape.key_split,
            inverse_rope=(position, freq),
            dtype=jnp.bfloat16,
            shared=own,
            implementation=name,
        )

    flops = 4 * shape.heads * shape.fmt.dim * keys
    made = pure((base.shared, (position, freq)), base.calls, call, 5e-3)
    return Made(made, None if chunk else keys * shape.fmt.row_bytes, flops)


# Ops of the model


def experts(op: str, tokens: int, calls: int, here: int, routed: int, hidden: int, inter: int) -> Made:
    """Makes calls of moe, or of moe_e4m3, for tokens routed at random, of whose experts the first `here` are on the
    device.
    """
    codec = WEIGHT_FORMATS["fp4_e4m3" if op == "moe_e4m3" else "fp4"].codec
    multiply: Callable[..., jax.Array] = getattr(ops, op)

    def weights(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(key, (2, here))
        gate_up = jax.lax.map(lambda key: codec.draw(key, 2 * inter, hidden)[0], keys[0])
        return gate_up, jax.lax.map(lambda key: codec.draw(key, hidden, inter)[0], keys[1])

    def make(key: jax.Array) -> Any:
        a, b, c = jax.random.split(key, 3)
        chosen = jax.lax.top_k(jax.random.uniform(a, (tokens, routed)), TOP)[1].astype(jnp.int32)
        share = jax.random.uniform(b, (tokens, TOP), jnp.float32, 0.1, 1.1)
        x = jax.random.normal(c, (tokens, hidden), jnp.bfloat16)
        return x, chosen, 1.5 * share / share.sum(1, keepdims=True)

    def call(shared: Any, args: Any, name: Any) -> jax.Array:
        return multiply(*args, *shared, limit=LIMIT, routed=routed, implementation=name)

    shared, args = jax.jit(weights)(jax.random.key(7)), random_calls(calls, make)
    read = [len({int(e) for e in np.unique(chosen) if e < here}) for _, chosen, _ in args]
    each = sum(math.prod(x.shape[1:]) for x in shared)
    tolerance = (
        8e-3 if op == "moe_e4m3" else 4e-3
    )  # the unit's 14 bits move numbers between the products to other codes
    return Made(pure(shared, args, call, tolerance), round(each * sum(read) / calls), 6 * tokens * TOP * hidden * inter)


def router(tokens: int, calls: int, experts: int, scale: float) -> Made:
    def make(key: jax.Array) -> jax.Array:
        return 2 * jax.random.normal(key, (tokens, experts), jnp.float32)

    def call(bias: Any, logits: Any, name: Any) -> Any:
        return ops.route(logits, bias=bias, top=TOP, scale=scale, implementation=name)

    bias = 0.1 * jax.random.normal(jax.random.key(3), (experts,), jnp.float32)
    return Made(pure(bias, random_calls(calls, make), call, 1e-5), 4 * tokens * (experts + 2 * TOP))


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows and columns of weights, and groups of the rows that take columns of x of their own."""

    rows: int
    columns: int
    groups: int = 1

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}" + (f"/{self.groups}" if self.groups > 1 else "")


def dense(op: str, matrix: Matrix, tokens: int, calls: int) -> Made:
    """Makes calls of a product, each with weights of its own."""
    m, columns, fp8 = matrix, matrix.groups * matrix.columns, op != "dense_bf16"
    settings: dict[str, Any] = {"groups": m.groups} | ({} if fp8 else {"alike": True})
    multiply: Callable[..., jax.Array] = getattr(ops, op)

    def make(key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        if fp8:
            form = "fp8_e4m3" if op == "dense_e4m3" else "fp8"
            weights = WEIGHT_FORMATS[form].codec.draw(b, m.rows, m.columns)
        else:
            weights = (jax.random.normal(b, (m.rows, m.columns), jnp.bfloat16) * jnp.bfloat16(m.columns**-0.5),)
        return jax.random.normal(a, (tokens, columns), jnp.bfloat16), *weights

    def call(_: Any, args: Any, name: Any) -> jax.Array:
        return multiply(*args, **settings, dtype=jnp.bfloat16, implementation=name)

    bytes_ = m.rows * m.columns * (1 if fp8 else 2)
    return Made(pure((), random_calls(calls, make), call, 5e-3), bytes_, 2 * tokens * m.rows * m.columns)


def streams(tokens: int, calls: int, width: int, outputs: int, head: bool, dtype: Any = jnp.float32) -> Made:
    """Makes calls of what a block, or the head, reads of four streams and `outputs` of the block before (0: none)."""
    n, rows = 4, 4 if head else 24

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 8 + outputs)
        normal, uniform = jax.random.normal, jax.random.uniform
        fn = normal(keys[1], (rows, n * width), jnp.float32) * np.float32((n * width) ** -0.5)
        vector = connection_vector(
            uniform(keys[2], (width,), jnp.float32, 0.5, 1.5),
            normal(keys[3], (rows,), jnp.float32),
            uniform(keys[4], (1 if head else 3,), jnp.float32, 0.5, 1.5),
        )
        written = None
        if outputs:
            ys = tuple(normal(keys[8 + i], (tokens, width), dtype) for i in range(outputs))
            post, comb = uniform(keys[5], (tokens, n)), uniform(keys[6], (tokens, n, n))
            written = Written(ys, post.astype(jnp.float32), comb.astype(jnp.float32))
        return normal(keys[0], (tokens, n, width), dtype), fn, vector, written

    def call(_: Any, args: Any, name: Any) -> Any:
        how: Any = dict(hc_eps=EPS, eps=EPS, dtype=jnp.bfloat16, implementation=name)
        return hyper_head(*args, **how) if head else ops.hyper_connection(*args, iterations=20, **how)

    of_tokens = tokens * n * width * (2 if outputs else 1) + outputs * tokens * width
    bytes_ = jnp.dtype(dtype).itemsize * of_tokens + 4 * rows * n * width
    return Made(pure((), random_calls(calls, make), call, 5e-3), bytes_ + 2 * tokens * width)


def query_product(tokens: int, calls: int, heads: int, dim: int, columns: int) -> Made:
    """Makes calls of the product and last steps of a chunk's queries: heads of 128 dims are the indexer's."""

    def make(key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        weights = jax.random.normal(b, (heads * dim, columns), jnp.bfloat16) * jnp.bfloat16(columns**-0.5)
        return jax.random.normal(a, (tokens, columns), jnp.bfloat16), weights

    def call(shared: Any, args: Any, name: Any) -> jax.Array:
        indexer = dim == 128
        how: Any = dict(eps=None if indexer else EPS, rotate=indexer, round_fp4=indexer, implementation=name)
        x, weights = args
        return finish_queries(Product(x, weights, (heads, dim)), *shared, **how)

    shared = jnp.arange(tokens, dtype=jnp.int32), jnp.asarray(FREQUENCIES)
    # FP4 rounds by a sum's last bit: a step of it in a few elements.
    made = pure(shared, random_calls(calls, make), call, 1e-2 if dim == 128 else 5e-3)
    return Made(made, None, 2 * tokens * heads * dim * columns)


# The table


def _cache_ops() -> list[Kernel]:
    found = []
    for op in ("append", "compress_csa", "compress_index", "compress_hca", "gather", "top_k", "kv_store"):
        for case in (case for case in CASES if case.op == op):
            more = {("append", "fused"): (16, 256, 8192), ("top_k", "flash-8k"): (4096,)}.get((op, case.name), ())
            found.append(_of_case(case, tuple(sorted({*case.batches, *more}))))
    found.append(_top_k_32k())
    return found


def _of_case(case: Any, batches: tuple[int, ...]) -> Kernel:
    without_cuda = case.name == "decode-raw" or (case.op, case.name) == ("kv_store", "bf16")
    return Kernel(
        case.op,
        case.name,
        batches,
        lambda batch, calls, rows: of_shape(case.make(batch), calls, rows),
        lambda batch: case.make(batch).bytes_moved,
        implementation="pallas" if without_cuda else "cuda",
        registered="compress" if case.op.startswith("compress") else None,
    )


def _top_k_32k() -> Kernel:
    ((case, _), *_) = select(CASES, ["top_k"], name="flash-8k")
    return _of_case(
        dataclasses.replace(case, name="flash-32k", make=lambda b: TopKShape(b, 8192, 512)),
        (1, 4096),
    )


def _scores() -> list[Kernel]:
    found = []
    batches = {8192: (64, 256), 32768: (1,), 131072: (1, 16, 64, 256), 1 << 20: (1, 16)}
    names = {8192: "8k", 32768: "32k", 131072: "128k", 1 << 20: "1m"}
    for fmt in ("fp4", "fp8"):
        ((case, _), *_) = select(CASES, ["index_scores"], name=f"{fmt}-8k")
        for context, some in batches.items():
            for rounded in (True, False) if context == 131072 else (True,):
                found.append(_score_case(case, f"{fmt}-{names[context]}", context, some, rounded))
        for context in (32768, 131072):
            found.append(_score_case(case, f"{fmt}-{names[context]}-prefill", context, (4096,), True, True))
    return found


def _score_case(case: Any, name: str, context: int, batches: tuple[int, ...], rounded: bool, prefill=False) -> Kernel:
    def shape(batch: int) -> ScoreShape:
        return dataclasses.replace(case.make(batch), blocks=context // 128)

    return Kernel(
        "index_scores",
        name,
        batches,
        lambda b, calls, rows: scores(shape(b), calls, rows, rounded, prefill),
        lambda b: shape(b).bytes_moved,
        None if rounded else "bf16 queries",
    )


def _attends() -> list[Kernel]:
    found, batches = (
        [],
        {
            "csa-flash": (1, 8, 16, 64, 128, 256),
            "hca-flash-128k": (1, 8, 64, 256),
            "hca-flash-1m": (1, 16),
            "csa-pro": (1, 64, 256),
            "swa-flash": (1, 64),
        },
    )
    for name, some in batches.items():
        (case,) = (case for case in CASES if (case.op, case.name) == ("attend", name))
        for split in ("throughput", "latency"):
            found.append(_attend_case(case.with_key_split(split), some, None if split == "throughput" else split))
    chunks = {
        "swa": (64, 0, 0),
        "csa": (64, 512, 32768),
        "hca-8k": (64, 64, 64),
        "hca-128k": (64, 1024, 1024),
        "csa-pro": (128, 1024, 32768),
    }
    (case,) = (case for case in CASES if (case.op, case.name) == ("attend", "csa-flash"))
    for name, sizes in chunks.items():
        found.append(_chunk_case(case, f"{name}-chunk", *sizes))
    return found


def _attend_case(case: Any, batches: tuple[int, ...], variant: str | None) -> Kernel:
    return Kernel(
        "attend",
        case.name,
        batches,
        lambda b, calls, rows: attention(case.make(b), calls, rows),
        lambda b: case.make(b).bytes_moved,
        variant,
    )


def _chunk_case(case: Any, name: str, heads: int, entries: int, total: int) -> Kernel:
    def shape(batch: int) -> AttendShape:
        return dataclasses.replace(case.make(batch), heads=heads, entries=entries)

    return Kernel(
        "attend",
        name,
        (4096,),
        lambda b, calls, rows: attention(shape(b), calls, rows, True, total),
        lambda b: shape(b).bytes_moved,
        parts=(("dsv4_gather", ""),),
    )


def _model_ops() -> list[Kernel]:
    found = []
    tokens, hidden = (1, 4, 16, 64, 128, 256, 1024, 4096), (4096, 2048)
    for op, name, here in (
        ("moe", "flash", 256),
        ("moe", "flash, half of the experts", 128),
        ("moe_e4m3", "flash", 256),
    ):
        found.append(
            Kernel(
                op,
                name,
                tokens if op == "moe" else (*tokens, 8192),
                lambda b, calls, _, op=op, here=here: experts(op, b, calls, here, 256, *hidden),
                lambda b: 13.4e6 * min(256, 6 * b),
            )
        )
    for name, sizes in {"flash": (256, 1.5), "pro": (384, 2.5)}.items():
        found.append(
            Kernel(
                "route",
                name,
                (1, 16, 64, 256, 1024),
                lambda b, calls, _, sizes=sizes: router(b, calls, *sizes),
                lambda b: 0.0,
            )
        )
    # Of a layer: wq_b, wo_b, wo_a, wq_a with wkv, the indexer's wq_b, the shared expert's first two and its last.
    flash = ((32768, 1024), (4096, 8192), (8192, 4096, 8), (1536, 4096), (8192, 1024), (4096, 4096), (4096, 2048))
    pro = ((65536, 1536), (7168, 16384), (16384, 4096, 16), (2048, 7168), (8192, 1536), (6144, 7168), (7168, 3072))
    few = ((4096, 8192), (8192, 4096, 8), (32768, 1024), (40960, 1024), (4160, 4096), (2560, 4096))
    batches = (1, 16, 64, 256, 1024, 4096)
    products = ("dense_fp8", flash + pro, batches), ("dense_e4m3", flash + pro, batches), ("dense_bf16", few, (1, 16))
    products += (("dense_bf16", [(1024, 4096), (256, 4096)], (1, 16, 64, 256, 1024, 4096)),)  # a compressor; the gate
    for op, sizes, batches in products:
        for matrix in (Matrix(*size) for size in sizes):
            weights = matrix.rows * matrix.columns
            found.append(
                Kernel(
                    op,
                    str(matrix),
                    batches,
                    lambda b, calls, _, op=op, m=matrix: dense(op, m, b, calls),
                    lambda b, w=weights: w,
                    parts=(("dsv4_round_rows", f"{matrix} rounding"),) if op == "dense_e4m3" else (),
                )
            )
    for model, width in {"flash": 4096, "pro": 7168}.items():
        kinds = {
            "": (1, False, jnp.float32),
            "bf16": (1, False, jnp.bfloat16),
            "two outputs": (2, False, jnp.float32),
            "first": (0, False, jnp.float32),
            "head": (1, True, jnp.float32),
            "bf16 head": (1, True, jnp.bfloat16),
        }
        for kind, (outputs, head, dtype) in kinds.items():
            size = jnp.dtype(dtype).itemsize
            whole = kind in ("", "bf16")  # what a step has, at all its sizes
            found.append(
                Kernel(
                    "hyper_connection",
                    f"{model} {kind}".strip(),
                    (1, 16, 64, 256, 1024, 4096) if whole else (64,),
                    lambda b, calls, _, how=(width, outputs, head, dtype): streams(b, calls, *how),
                    lambda b, width=width, size=size: width * (9 * size * b + 4 * 96),
                    parts=(("dsv4_hyper_mixing", "" if kind else f"{model} mixing"),) if not head else (),
                )
            )
    for name, sizes in {"flash": (64, 512, 1024), "pro": (128, 512, 1536), "indexer": (64, 128, 1024)}.items():
        found.append(
            Kernel(
                "queries",
                f"product-{name}",
                (4096,),
                lambda b, calls, _, sizes=sizes: query_product(b, calls, *sizes),
                lambda b, s=sizes: 2 * s[0] * s[1] * (s[2] + b),
            )
        )
    return found


KERNELS: tuple[Kernel, ...] = (*_cache_ops(), *_scores(), *_attends(), *_model_ops())
OPS = tuple(dict.fromkeys(kernel.op for kernel in KERNELS))


def _tiny() -> tuple[Kernel, ...]:
    """Returns a case of each op at sizes that a CPU computes in a moment."""
    small: dict[str, Any] = {case.op: case for case in QUICK}
    score, attend = small["index_scores"], small["attend"]
    few = dict(size=lambda b: 1.0)
    return (
        *(
            dataclasses.replace(_of_case(small[op], small[op].batches), size=few["size"])
            for op in ("append", "compress_hca", "gather", "top_k", "kv_store")
        ),
        Kernel("index_scores", "tiny", (2,), lambda b, n, rows: scores(score.make(b), n, rows, True, True), **few),
        Kernel("attend", "tiny", (2,), lambda b, n, rows: attention(attend.make(b), n, rows), **few),
        Kernel("attend", "tiny-chunk", (6,), lambda b, n, rows: attention(attend.make(b), n, rows, True, 64), **few),
        *(
            Kernel(op, "tiny", (3,), lambda b, n, _, op=op: experts(op, b, n, 8, 16, 256, 128), **few)
            for op in ("moe", "moe_e4m3")
        ),
        Kernel("route", "tiny", (3,), lambda b, n, _: router(b, n, 16, 1.5), **few),
        *(
            Kernel(op, "256x128/2", (3,), lambda b, n, _, op=op: dense(op, Matrix(256, 128, 2), b, n), **few)
            for op in ("dense_fp8", "dense_e4m3")
        ),
        Kernel("dense_bf16", "256x128", (3,), lambda b, n, _: dense("dense_bf16", Matrix(256, 128), b, n), **few),
        Kernel("hyper_connection", "tiny", (3,), lambda b, n, _: streams(b, n, 64, 1, False), **few),
        Kernel("hyper_connection", "tiny head", (3,), lambda b, n, _: streams(b, n, 64, 2, True), **few),
        Kernel("queries", "product-tiny", (3,), lambda b, n, _: query_product(b, n, 2, 128, 64), **few),
    )


TINY = _tiny()
