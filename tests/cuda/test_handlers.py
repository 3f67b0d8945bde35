"""Both sides of a call name the same operands, results and attributes: the library's handlers, asked without a GPU.

A handler of the CUDA platform that is called on the CPU decodes its call and then lacks a stream, its first operand.
What else it lacks is where the two sides differ.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ffi, libraries
from dsv4_jax.cuda.widths import BF16_ROW
from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import (
    all_gather,
    all_to_all,
    append,
    attend,
    dense_bf16,
    dense_e4m3,
    dense_fp8,
    entry_rows,
    hyper_connection,
    index_scores,
    moe,
    moe_e4m3,
    normalise,
    route,
    sample_tokens,
    sum_to_all,
    sum_to_owner,
    swiglu,
    top_k,
)
from dsv4_jax.ops.append import WindowView
from dsv4_jax.ops.columns import Product
from dsv4_jax.ops.compress import compress_csa, compress_hca
from dsv4_jax.ops.exchange import Peers
from dsv4_jax.ops.gather import gather_rows
from dsv4_jax.ops.hyper_connection import Written, hyper_head
from dsv4_jax.ops.queries import finish_queries
from dsv4_jax.pools.kv_pool import store_kv

from ..ops.test_columns import INDEX, KV
from ..pallas.test_append import random_epilogue
from ..pallas.test_compress import FP4, FP8, plan_of, stream_of

IDS = jnp.arange(4, dtype=jnp.int32)
ONLY_THE_STREAM = r"bad operands at: 0\)\s+Diagnostics:\s+Failed to get platform stream: XLA FFI GPU context"


@functools.cache
def register() -> None:
    """The handlers of the CUDA library for the CPU too; swaps and sequences have twins there, and tests."""
    try:
        library = libraries.open_cuda()
    except ImplementationError as error:
        pytest.skip(str(error))
    for target, handler in ffi.handlers(library).items():
        if handler.op not in ("swap", "sequence"):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.address), platform="cpu")


def rows(count: int, fmt) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros((count, part.width), part.dtype) for part in fmt.parts)


def call_append():
    epilogue = random_epilogue(np.random.default_rng(0), KV)
    return append(rows(8, KV), jnp.zeros((4, 512)), IDS, fmt=KV, epilogue=epilogue, position=IDS, implementation="cuda")


def call_attend(fmt=KV):
    window = WindowView(rows(8, fmt), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2), bool))
    ids, count = jnp.zeros((4, 2), jnp.int32), jnp.ones(4, jnp.int32)
    queries, sink = jnp.zeros((4, 64, 512)), jnp.zeros(64)
    return attend(queries, sink, window, rows(8, fmt), ids, count, scale=1.0, fmt=fmt, implementation="cuda")


def call_compress(*kinds: str):
    plan, table = plan_of(np.arange(4), 1)
    rng = np.random.default_rng(0)
    inputs = [stream_of(kind, plan, table, FP4 if kind == "index" else FP8, 0, rng) for kind in kinds]
    if kinds == ("online",):
        return compress_hca(inputs[0], plan, table, implementation="cuda")
    return compress_csa(inputs, plan, table, implementation="cuda")


def call_dense_fp8(op=dense_fp8):
    codes, scales = jnp.zeros((8, 4, 8192), jnp.uint8), jnp.zeros((4, 4), jnp.uint8)
    return op(jnp.zeros((3, 1024)), codes, scales, groups=2, implementation="cuda")


def call_hyper_connection(outputs: int, head: bool = False, dtype=jnp.float32):
    n, width = 4, 4096
    rows = n if head else (2 + n) * n
    written = (
        Written((jnp.zeros((3, width), dtype),) * outputs, jnp.zeros((3, n)), jnp.zeros((3, n, n))) if outputs else None
    )
    weights = jnp.zeros((rows, n * width)), jnp.zeros(width + 64)
    call = hyper_head if head else functools.partial(hyper_connection, iterations=20)
    return call(jnp.zeros((3, n, width), dtype), *weights, written, hc_eps=1e-6, eps=1e-6, implementation="cuda")


def call_index_scores():
    return index_scores(
        rows(64, INDEX),
        jnp.zeros((4, 4, 128)),
        jnp.zeros((4, 4)),
        jnp.zeros((4, 2), jnp.int32),
        IDS,
        base=0,
        rows_per_block=32,
        fmt=INDEX,
        implementation="cuda",
    )


def call_kv_store():
    pool = jnp.zeros((8, 64), jnp.uint8), jnp.zeros((8, 1))
    x = jnp.zeros((4, 64), jnp.bfloat16)
    return store_kv(pool, pool, x, x, IDS, storage="fp8", implementation="cuda")


def call_moe(op=moe):
    weights = jnp.zeros((8, 8, 4, 4352), jnp.uint8), jnp.zeros((8, 8, 2, 4352), jnp.uint8)
    return op(
        jnp.zeros((3, 512)), jnp.zeros((3, 6), jnp.int32), jnp.zeros((3, 6)), *weights, limit=1.0, implementation="cuda"
    )


def call_exchange(op):
    peers = Peers(0, (), 2, 1024, 1)
    return op([jnp.zeros((4, 8))] if op is all_gather else jnp.zeros((4, 8)), (), peers=peers, implementation="cuda")


def call_query_product():
    product = Product(jnp.zeros((4, 512), jnp.bfloat16), jnp.zeros((1024, 512), jnp.bfloat16), (2, 512))
    return finish_queries(product, IDS, jnp.ones(32), eps=1e-6, implementation="cuda")


CALLS = {
    "all_gather": lambda: call_exchange(all_gather),
    "all_to_all": lambda: call_exchange(all_to_all),
    "append": call_append,
    "attend": call_attend,
    "attend_rows": lambda: call_attend(BF16_ROW),
    "compress_csa": lambda: call_compress("csa", "index"),
    "compress_hca": lambda: call_compress("online"),
    "dense_bf16": lambda: dense_bf16(jnp.zeros((3, 4096)), jnp.zeros((256, 4096), jnp.bfloat16), implementation="cuda"),
    "dense_e4m3": lambda: call_dense_fp8(dense_e4m3),
    "dense_fp8": call_dense_fp8,
    "dense_stream": lambda: dense_bf16(
        jnp.zeros((3, 1024)), jnp.zeros((512, 512), jnp.bfloat16), groups=2, implementation="cuda"
    ),
    "entry_rows": lambda: entry_rows(
        jnp.zeros((4, 8), jnp.int32), IDS, IDS[:, None], base=0, per_block=4, blocks=3, implementation="cuda"
    ),
    "finish_queries": lambda: finish_queries(jnp.zeros((4, 2, 512)), IDS, jnp.ones(32), implementation="cuda"),
    "gather": lambda: gather_rows(rows(8, KV), IDS, fmt=KV, implementation="cuda"),
    "hyper_connection": lambda: call_hyper_connection(2),
    "hyper_connection_bf16": lambda: call_hyper_connection(1, dtype=jnp.bfloat16),
    "hyper_connection_first": lambda: call_hyper_connection(0),
    "hyper_head": lambda: call_hyper_connection(1, head=True),
    "index_scores": call_index_scores,
    "kv_store": call_kv_store,
    "moe": call_moe,
    "moe_e4m3": lambda: call_moe(moe_e4m3),
    "normalise": lambda: normalise(
        jnp.zeros((3, 512)), jnp.zeros(512), eps=1e-6, dtype=jnp.bfloat16, implementation="cuda"
    ),
    "query_product": call_query_product,
    "route": lambda: route(jnp.zeros((3, 256)), bias=jnp.zeros(256), top=6, implementation="cuda"),
    "route_hashed": lambda: route(
        jnp.zeros((3, 256)), chosen=jnp.zeros((3, 6), jnp.int32), top=6, implementation="cuda"
    ),
    "sample_tokens": lambda: sample_tokens(
        jnp.zeros((4, 37)), jnp.zeros((4, 10), jnp.uint32), IDS, implementation="cuda"
    ),
    "sum_to_all": lambda: call_exchange(sum_to_all),
    "sum_to_owner": lambda: call_exchange(sum_to_owner),
    "swiglu": lambda: swiglu(
        jnp.zeros((3, 512)), jnp.zeros((3, 512)), limit=1.0, dtype=jnp.bfloat16, implementation="cuda"
    ),
    "top_k": lambda: top_k(jnp.zeros((4, 64)), IDS, k=8, implementation="cuda"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("assumed_library")
def test_both_sides_of_a_call_agree(name: str) -> None:
    register()
    with pytest.raises(jax.errors.JaxRuntimeError, match=ONLY_THE_STREAM):
        jax.block_until_ready(CALLS[name]())


@pytest.mark.usefixtures("assumed_library")
def test_a_library_of_other_attributes_says_so() -> None:
    """What a library of older sources answers: the names that differ, not other bytes."""
    register()
    result = jax.ShapeDtypeStruct((4, 2, 512), jnp.bfloat16)
    tables = jnp.zeros((4, 32)), jnp.zeros((4, 32))
    call = jax.ffi.ffi_call("dsv4_finish_queries", result)
    attributes = dict(start=np.int32(0), eps=np.float32(0), hadamard=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Attribute name mismatch: rounded vs round_fp4"):
        jax.block_until_ready(call(jnp.zeros((4, 1024)), *tables, **attributes, rounded=False))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Wrong number of attributes: expected 4 but got 3"):
        jax.block_until_ready(call(jnp.zeros((4, 1024)), *tables, **attributes))
