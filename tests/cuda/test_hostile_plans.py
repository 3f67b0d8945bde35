"""Ids that do not exist on a GPU, in CUDA and in Pallas, also under the sanitizer; on the CPU the step's lowering."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda import append, compress
from dsv4_jax.ffi import cuda_target
from dsv4_jax.ops.append import AppendArguments
from dsv4_jax.ops.compress import CompressArguments, CompressorInputs

from .. import hostile
from ..harness import random_norms, random_stream
from ..native import run_sanitized
from ..pallas.test_compress import FP8, arrays, plan_of, stream_of

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.usefixtures("assumed_library")
def test_the_step_lowers_to_every_kernel() -> None:
    """What the class below runs on a GPU reaches the kernels, which are told how many blocks a layer has."""
    layout = hostile.LAYOUT
    plan = hostile.plan_of(layout, "verify")
    rows, norms = random_stream(layout, plan.num_tokens, 1), random_norms(layout)
    entries = np.zeros((plan.num_tokens, 5), np.int32)
    # A function of its own: the targets above must not stay in the cache of `jit_step`.
    step = jax.jit(
        lambda *args: hostile.step(*args, implementation=hostile.wherever("cuda"), reads=hostile.wherever("cuda"))
    )
    text = step.trace(hostile.random_cache(layout, 0), plan, rows, norms, entries)
    text = text.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("append", "compress_csa", "compress_hca", "index_scores", "top_k", "attend"):
        assert f"@dsv4_{kernel}" in text, kernel
    blocks, slots = hostile.SIZE.block_units, hostile.SIZE.slot_units
    hca = next(line for line in text.splitlines() if "@dsv4_compress_hca" in line and "ordinal = 1" in line)
    numbers = dict(ratio=16, slots=slots, ring=3, base=blocks * 8, rows_per_block=8, blocks=blocks, format=0)
    assert [f"{name} = {number} : i32" in hca for name, number in numbers.items()] == [True] * len(numbers)
    assert "hadamard = false" in hca and "bias = false" in hca


@pytest.mark.gpu
class TestCuda(hostile.HostilePlans):
    implementation = "cuda"
    reads = hostile.wherever("cuda")

    def writes(self, hca_state):
        return hostile.wherever("cuda", *(["compress"] if hca_state == "raw" else []))


@pytest.mark.gpu
class TestPallas(hostile.HostilePlans):
    implementation = "pallas"


def refused(call: Callable[..., object], *args: object, match: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(jax.jit(call)(*args))


@pytest.mark.gpu
class TestOperands:
    """Handlers refuse operands that do not have as many rows as others or as the ids that they take for valid."""

    def test_append(self) -> None:
        fmt = hostile.LAYOUT.kv_row
        pool = tuple(jnp.zeros((40, p.width), p.dtype) for p in fmt.parts)
        values, ids = jnp.zeros((4, fmt.dim)), jnp.arange(3, dtype=jnp.int32)
        call = lambda pool, values, ids: append.call(AppendArguments(values, fmt, pool=pool, row_ids=ids))  # noqa: E731
        refused(call, pool, values, ids, match="operand 1 has")
        short = (*pool[:2], pool[2][:39])
        refused(call, short, values[:3], ids, match="operand 4 has")

    @pytest.mark.parametrize(
        ("wrong", "match"),
        [
            (dict(blocks=10**6), "do not fit"),
            (dict(slots=10**6), "do not fit"),
            (dict(base=10**6), "do not fit"),
            (dict(ordinal=2), "do not fit"),
            (dict(ring=7), "at least 8"),
        ],
    )
    def test_compress(self, wrong: dict[str, int], match: str) -> None:
        plan, table = plan_of(np.array([3, 126]), 1)
        stream = stream_of("csa", plan, table, FP8, 0, np.random.default_rng(0))
        geometry = dataclasses.replace(stream.geometry, **wrong)

        def call(*operands):
            return compress.call(CompressArguments("csa", (CompressorInputs(*operands, geometry),), plan, table))

        refused(call, *arrays(stream), match=match)

    def test_index_scores(self) -> None:
        """More scores than queries, and bases that leave no block or split a copy."""
        fmt = hostile.LAYOUT.index_row
        pool = tuple(jnp.zeros((64, p.width), p.dtype) for p in fmt.parts)
        weights, queries = jnp.zeros((2, 4)), jnp.zeros((2, 4, 128), jnp.bfloat16)
        table, count = jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32)

        def call(tokens: int, base: int):
            out = jax.ShapeDtypeStruct((tokens, 32), jnp.float32)
            return lambda *operands: jax.ffi.ffi_call(cuda_target("index_scores", "dsv4_index_scores"), out)(
                *operands,
                base=np.int32(base),
                rows_per_block=np.int32(32),
                first_weight=np.int32(0),
                weight_scale=np.float32(1),
            )

        operands = (*pool, queries, weights, table, count)
        jax.block_until_ready(jax.jit(call(2, 32))(*operands))
        refused(call(3, 32), *operands, match="scores is")
        refused(call(2, 36), *operands, match="less than a block")
        refused(call(2, 30), *operands, match="multiple of 4")


STEP = "test_a_step_writes_nothing_that_no_valid_id_names"
OPS = [name for name in vars(hostile.HostilePlans) if name.startswith("test_") and name != STEP]
STEPS = [f"{STEP}[{'-'.join(kind)}]" for kind in hostile.HostilePlans.steps]
SANITIZED = [f"{cls}::{name}" for cls in ("TestCuda", "TestPallas") for name in OPS + STEPS]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizer_finds_nothing(name: str) -> None:
    """No access outside of an allocation, whatever the ids hold. A process for each op: they run side by side."""
    run_sanitized(
        f"{__file__}::{name}",
        # An allocation for every array: within one of XLA's own pool the sanitizer sees no ends of arrays.
        XLA_PYTHON_CLIENT_ALLOCATOR="platform",
        # The sanitizer cannot follow the capture of command buffers (the process dies).
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=",
    )
