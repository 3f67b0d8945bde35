"""append and gather: rows go where the ids say, come back as stored, and ids past the end are dropped."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config
from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, Codes, RowFormat, Scales, index_format, kv_format
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.ops import Columns, Epilogue, append
from dsv4_jax.ops.append import window_rows, window_view
from dsv4_jax.ops.gather import gather_rows

from ..oracle import rows as oracle
from .op_test import OpTest

V4 = kv_format("fp8", 512, 64)
FORMATS = [kv_format(n, 32, 8) for n in KV_FORMATS] + [index_format(n, 32) for n in INDEX_FORMATS]
# And widths that are no power of two, or end in a part of a scale group.
GATHER_FORMATS = [*FORMATS, V4, kv_format("fp8", 232, 24), kv_format("fp8_per_entry", 76, 12)]


jit_append = jax.jit(append, static_argnames=("fmt", "implementation"))
jit_gather = jax.jit(gather_rows, static_argnames=("fmt", "dtype", "implementation"))


class AppendGatherTest(OpTest):
    op = "append"

    @pytest.mark.parametrize("fmt", [*FORMATS, V4], ids=lambda f: f"{'kv' if f.rope_dim else 'index'}-{f.name}-{f.dim}")
    def test_rows_land_and_come_back(self, fmt: RowFormat) -> None:
        with self.asked(fmt=fmt):
            self.check_rows(fmt)

    @pytest.mark.parametrize("start", [8, 4])
    def test_bfloat16_is_stored_as_its_float32(self, start: int) -> None:
        rng = np.random.default_rng(1)
        matrix, ids = jnp.asarray(rng.standard_normal((6, 1024)), jnp.bfloat16), jnp.arange(6, dtype=jnp.int32)
        epilogue = Epilogue(jnp.asarray(rng.random(512, np.float32)), jnp.asarray(rng.random(32, np.float32)), 1e-6)
        for how in ({}, dict(epilogue=epilogue, position=1000 * ids)):
            got, want = (
                jit_append(
                    tuple(np.zeros((6, p.width), p.dtype) for p in V4.parts),
                    Columns(x, start, (512,)),
                    ids,
                    fmt=V4,
                    implementation=self.implementation,
                    **how,
                )
                for x in (matrix, matrix.astype(jnp.float32))
            )
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)

    def check_rows(self, fmt: RowFormat) -> None:
        rng = np.random.default_rng(0)
        old = [rng.integers(0, 100, (40, p.width)).astype(p.dtype) for p in fmt.parts]
        values = rng.standard_normal((6, fmt.dim)).astype(np.float32)
        ids = np.array([7, 40, 0, 39, 2**31 - 1, 12], np.int32)  # 40 and above: dropped, never wrapped
        pool = jit_append(tuple(old), values, ids, fmt=fmt, implementation=self.implementation)
        encoded = oracle.encode(fmt, values)
        for before, after, rows in zip(old, pool, encoded, strict=True):
            expected = before.copy()
            expected[ids[ids < 40]] = rows[ids < 40]
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(after, expected)
        order = np.array([[12, 7], [39, 0], [7, 7]], np.int32)
        dense = jit_gather(pool, order, fmt=fmt, dtype=jnp.float32, implementation=self.implementation)
        expected = oracle.decode(fmt, tuple(np.asarray(p) for p in pool))[order]
        np.testing.assert_array_equal(dense, expected)


class TestAppendGather(AppendGatherTest):
    implementation = "xla"


@pytest.mark.parametrize(("draft", "first"), [(0, 0), (2, 3)])
def test_the_last_rows_of_a_ring_are_stored_and_shown(draft: int, first: int) -> None:
    """Sequences of all lengths about that of the ring: what lies there, and what each token's window is."""
    window, slots, ordinal = 8, 4, 1
    ring = window + draft
    layout = CacheLayout(DSV4Config.tiny(sliding_window=window), draft_tokens=draft)
    for start, count in itertools.product((0, ring - 1, 2 * ring + 3), (1, ring - 1, ring, ring + 1)):
        rows = [StepSequence(2, start, count), StepSequence(3, 2 * ring, 1)]
        shape = dataclasses.replace(shape_for(layout, rows), tokens=ring + 4, history=count > 1 + draft)
        plan, place = build_plan(layout, rows, shape), dict(ordinal=ordinal, slots=slots, ring=ring)
        before, after = (np.full((2 * slots * ring, 1), -1, np.int32) for _ in range(2))
        for slot, begin, n in ((2, start, count), (3, 2 * ring, 1)):
            for pool, end in ((before, begin), (after, begin + n)):
                for position in range(max(0, end - ring), end):
                    pool[(ordinal * slots + slot) * ring + position % ring] = 100 * slot + position
        chunk = (100 * plan.token_slot + plan.token_position)[:, None]
        ids = np.asarray(window_rows(plan, rows=len(before), **place))
        assert np.unique(ids[ids < len(before)]).size == min(count, ring) + 1  # no row twice
        stored = before.copy()
        stored[ids[ids < len(before)]] = chunk[ids < len(before)]
        np.testing.assert_array_equal(stored, after)
        pool, new = (
            (jnp.asarray(before), (jnp.asarray(chunk),)) if plan.history_seqs.size else (jnp.asarray(after), None)
        )
        view = window_view((pool,), new, plan, window=window, first=first, **place)
        position = plan.token_position[:, None] + np.arange(1 - window, 1)
        visible = (position >= first) & (plan.token_slot > 0)[:, None]
        np.testing.assert_array_equal(view.visible, visible)
        shown = np.asarray(view.rows[0])[np.asarray(view.ids), 0]
        np.testing.assert_array_equal(shown[visible], (100 * plan.token_slot[:, None] + position)[visible])


def random_rows(rng: np.random.Generator, fmt: RowFormat, rows: int) -> tuple[np.ndarray, ...]:
    """Stored rows with any code in any element; scales where products are exact in bf16 and float32."""
    parts = []
    for part in fmt.parts:
        bits = rng.integers(0, 256, (rows, part.bytes), dtype=np.uint8)
        if isinstance(part.holds, Scales) and part.holds.code == "ue8m0":
            bits = rng.integers(127 - 60, 127 + 60, bits.shape, dtype=np.uint8)
            if Codes("e2m1", fmt.dim) in fmt.holds:
                bits[rng.random(bits.shape) < 0.05] = 0xFF
        elif part.dtype == "float32":
            bits = np.exp2(rng.integers(-60, 60, (rows, part.width)).astype(np.float32)).view(np.uint8)
        parts.append(bits.view(part.dtype))
        if part.dtype == "uint16":
            parts[-1][(parts[-1] & 0x7FFF) > 0x7F80] = 0x7FC0  # the only stored NaN
    return tuple(parts)


class GatherTest(OpTest):
    op = "gather"

    def check(self, fmt: RowFormat, pool: tuple[np.ndarray, ...], ids: np.ndarray, dtype: type) -> None:
        ids = ids.astype(np.int32)
        dense = jit_gather(pool, ids, fmt=fmt, dtype=jnp.dtype(dtype), implementation=self.implementation)
        expected = oracle.decode(fmt, tuple(p[ids] for p in pool)).astype(dtype)
        assert dense.shape == (*ids.shape, fmt.dim) and dense.dtype == dtype
        np.testing.assert_array_equal(np.asarray(dense, np.float32), expected.astype(np.float32))
        if fmt.rope_dim and Codes("bf16", fmt.rope_dim) in fmt.holds and dtype == jnp.bfloat16:
            rope = np.asarray(dense)[..., fmt.nope_dim :].view(np.uint16)
            np.testing.assert_array_equal(rope, pool[1][ids])

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    @pytest.mark.parametrize("fmt", GATHER_FORMATS, ids=lambda f: f"{'kv' if f.rope_dim else 'index'}-{f.name}-{f.dim}")
    def test_equals_the_definition(self, fmt: RowFormat, dtype: type) -> None:
        rng = np.random.default_rng(fmt.dim)
        with self.asked(fmt=fmt):
            self.check(fmt, random_rows(rng, fmt, 50), rng.integers(0, 50, (3, 7)), dtype)


class TestGather(GatherTest):
    implementation = "xla"
