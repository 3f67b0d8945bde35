"""The CUDA attend without a GPU: without its library, what it refuses, its lowering to the FFI call."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ffi
from dsv4_jax.cache import init_cache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.cuda import attend as kernel
from dsv4_jax.cuda.widths import BF16_ROW
from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import RowFormat, kv_format
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.ops import Epilogue, attend
from dsv4_jax.ops.append import WindowView
from dsv4_jax.ops.attend import CHUNK, AttendArguments, SharedEntries, finish_output
from dsv4_jax.ops.gather import gather_rows
from dsv4_jax.ops.rounded_rows import RoundedRows

from ..ops.arg_specs import ATTEND, ATTEND_V4, AttendSpec
from ..ops.test_attend import AttendTest, jit_attend, problem
from ..oracle import attention
from ..oracle import rows as oracle

FMT = kv_format("fp8", 512, 64)
PER_TOKEN = ("queries", "window_ids", "window_visible", "entry_ids", "entry_count")


def arguments(tokens: int = 2, heads: int = 64, window: int = 128, entries: int = 512):
    s = jax.ShapeDtypeStruct
    rows = lambda n: (s((n, 448), jnp.uint8), s((n, 64), jnp.uint16), s((n, 8), jnp.uint8))  # noqa: E731
    return (
        s((tokens, heads, 512), jnp.float32),
        s((heads,), jnp.float32),
        WindowView(rows(1024), s((tokens, window), jnp.int32), s((tokens, window), jnp.bool)),
        rows(4096) if entries else None,
        s((tokens, entries), jnp.int32) if entries else None,
        s((tokens,), jnp.int32) if entries else None,
    )


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


@pytest.mark.parametrize(
    ("entries", "key_split", "splits", "blocks"),
    [
        (512, "throughput", 2, 8),
        (1024, "throughput", 2, 8),
        (8192, "throughput", 6, 8),
        (0, "throughput", 1, 8),
        (64, "latency", 3, 1),
        (512, "latency", 4, 8),
        (1024, "latency", 6, 8),
        (8192, "latency", 8, 1),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call(entries, key_split, splits, blocks, fused):
    last = dict(inverse_rope=(jnp.arange(2), jnp.ones(32)), dtype=jnp.bfloat16) if fused else {}
    call = functools.partial(attend, scale=512**-0.5, fmt=FMT, key_split=key_split, implementation="cuda", **last)
    text = jax.jit(call).trace(*arguments(entries=entries)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_attend") == 1
    assert f"splits = {splits} : i32" in text and f"blocks = {blocks} : i32" in text
    assert f"tensor<2x{entries}xi32>" in text
    sums = f"tensor<{2 if splits > 1 and blocks == 8 else 0}x{splits}x17536xui32>"  # of runs that a kernel merges
    assert f"-> (tensor<2x64x512x{'bf16' if fused else 'f32'}>, tensor<2x64xf32>, {sums})" in text
    assert "concatenate" not in text  # nothing is left to do after the kernel


@pytest.mark.parametrize(
    ("heads", "key_split", "splits"),
    [
        (64, "throughput", [1, 1, 2, 2, 6, 6]),
        (128, "throughput", [1, 1, 1, 1, 6, 6]),
        (64, "latency", [2, 3, 4, 6, 8, 8]),
        (128, "latency", [2, 3, 4, 4, 8, 8]),
    ],
)
def test_splits_do_not_depend_on_the_batch_and_fit_a_cluster(heads, key_split, splits):
    assert [kernel.split_count(128, k, heads, key_split) for k in (0, 1, 512, 1024, 8192, 1 << 20)] == splits
    more = [kernel.split_count(128, k, heads, key_split) for k in range(0, 20_000, 32)]
    assert more == sorted(more) and (min(more), max(more)) == (splits[0], splits[-1])
    assert all(n >= kernel.split_count(128, k, heads) for n, k in zip(more, range(0, 20_000, 32), strict=True))


def test_runs_of_few_tokens_have_several_blocks():
    """Eight while all runs' clusters run at once, four of each of two runs while tokens' do; one if of one tile."""
    blocks = kernel.blocks_of_run
    assert [blocks(1, 64, splits, 9) for splits in (1, 2, 3, 6, 8, 9)] == [8, 8, 8, 8, 8, 1]
    assert [blocks(n, 64, 2, 10) for n in (7, 8, 14, 15, 256)] == [8, 4, 4, 1, 1]
    assert [blocks(n, 64, 6, 130) for n in (2, 3, 16)] == [8, 1, 1]
    assert [blocks(n, heads, 1, 2) for n, heads in ((14, 5), (7, 128), (8, 65))] == [8, 8, 1]
    assert [kernel.tile_count(*keys) for keys in ((128, 0), (1, 1), (130, 65), (0, 0))] == [2, 2, 5, 0]


@pytest.mark.parametrize(("key_split", "splits"), [("throughput", (2, 1)), ("latency", (4, 3))])
@pytest.mark.usefixtures("assumed_library")
def test_a_layer_splits_as_its_layout_says(key_split, splits):
    """Flash's CSA (512 entries) and HCA layers (1 entry of 128 tokens): the layout is all that chooses."""
    layout = CacheLayout(DSV4Config.flash(), key_split=key_split)
    rows = [StepSequence(1, 127, 1)]
    plan = build_plan(layout, rows, shape_for(layout, rows))
    cache = jax.eval_shape(lambda: init_cache(layout, CacheSize(1, 1, 1)))
    chosen = jnp.zeros((1, 512), jnp.int32), jnp.ones(1, jnp.int32)

    def layer(cache, queries, attn, selected=None):
        spec = next(spec for spec in layout.schedule if spec.attn is attn)
        width = 1024 if attn is AttentionType.CSA else 512
        projected, epilogue = jnp.zeros((1, width)), Epilogue(jnp.ones(512), jnp.ones(32), 1e-6)
        handle = cache.begin(plan).layer(spec.layer_idx).append(queries[:, 0])
        handle = handle.compress(projected, projected, epilogue)
        step = dataclasses.replace(handle.step, implementation="cuda")
        return dataclasses.replace(handle, step=step).attend(queries, jnp.zeros(64), selected)

    queries = jax.ShapeDtypeStruct((1, 64, 512), jnp.float32)
    for attn, count, selected in zip((AttentionType.CSA, AttentionType.HCA), splits, (chosen, None), strict=True):
        call = jax.jit(functools.partial(layer, attn=attn, selected=selected))
        assert f"splits = {count} : i32" in call.trace(cache, queries).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("assumed_library")
@pytest.mark.parametrize(("tokens", "shared", "target"), [(512, 4096, "rows"), (512, 70_000, ""), (256, 4096, "")])
def test_a_chunk_decodes_once_what_its_tokens_have_in_common(tokens, shared, target, monkeypatch):
    """Where that is less to decode; the gather is the GPU's own, here it is the reference."""
    monkeypatch.setattr(kernel, "gather_rows", functools.partial(gather_rows, implementation="xla"))
    s = jax.ShapeDtypeStruct
    rows = SharedEntries(s((shared,), jnp.int32), s((tokens, 512), jnp.int32))
    call = functools.partial(attend, scale=512**-0.5, fmt=FMT, implementation="cuda")
    traced = jax.jit(lambda *args: call(*args[:-1], shared=args[-1])).trace(*arguments(tokens), rows)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_attend_rows") == bool(target) and text.count("@dsv4_attend(") == (not target)
    assert ("tensor<4096x512xbf16>" in text) == bool(target)
    assert ("tensor<132x1x16384xui32>" in text) == bool(target)  # what waits of one run of two


@pytest.mark.usefixtures("assumed_library")
def test_other_formats_are_refused():
    fmt = kv_format("bf16", 64, 16)
    rng = np.random.default_rng(0)
    rows = oracle.encode(fmt, rng.standard_normal((24, 64)))
    args = (
        rng.standard_normal((2, 4, 64)).astype(np.float32),
        np.zeros(4, np.float32),
        WindowView(rows, rng.integers(0, 24, (2, 16)).astype(np.int32), np.ones((2, 16), bool)),
        None,
        None,
        None,
    )
    with pytest.raises(
        ImplementationError, match=r"attend: .*'cuda' cannot run: .* rows of .* or of 512 bf16, not of 64 bf16"
    ):
        jit_attend(*args, scale=0.125, fmt=fmt, implementation="cuda")


@pytest.mark.gpu
class TestAttendOnTheGpu(AttendTest):
    implementation = "cuda"
    specs = ATTEND_V4
    tolerance: ClassVar[dict[str, float]] = dict(rtol=0, atol=0.05)  # bf16 queries and weights; values of size 1
    large = tolerance

    def takes(self, *, fmt: RowFormat) -> bool:
        return fmt in (FMT, BF16_ROW)

    @pytest.mark.parametrize("name", ["v4_widths"])
    def test_output_turned_back_and_rounded(self, name: str) -> None:
        """Of the kernel alone: two programs of the reference need not agree in the last bit on a GPU."""
        super().test_output_turned_back_and_rounded(name)

    @pytest.mark.parametrize("shape", [(1, 5, 1, 3), (7, 64, 128, 512), (3, 130, 70, 1200), (2, 64, 128, 8192)])
    def test_last_steps_give_the_bits_of_separate_ones(self, shape: tuple[int, int, int, int]) -> None:
        spec = AttendSpec(*shape, ATTEND["v4_widths"].fmt)
        p = problem(spec)
        back = (jnp.arange(spec.tokens, dtype=jnp.int32) * 70_001, jnp.asarray(10_000.0 ** -jnp.linspace(0, 1, 32)))
        plain, lse = self.run(spec, p)
        for dtype in (jnp.float32, jnp.bfloat16):
            fused, fused_lse = self.run(spec, p, dtype, inverse_rope=back)
            expected = jax.jit(finish_output, static_argnames="dtype")(plain, back, dtype)
            np.testing.assert_array_equal(fused, np.asarray(expected))
            np.testing.assert_array_equal(fused_lse, lse)

    @pytest.mark.parametrize("shape", [(7, 64, 128, 300), (5, 130, 70, 1200), (300, 8, 128, 0)])
    def test_rounds_as_products_do(self, shape: tuple[int, int, int, int]) -> None:
        """To the codes and scales that the rounded output has, of one head NaN."""
        spec = AttendSpec(*shape, BF16_ROW)
        p = problem(spec)
        p["queries"][1, 2] = np.nan
        back = (jnp.arange(spec.tokens, dtype=jnp.int32) * 701, jnp.asarray(10_000.0 ** -jnp.linspace(0, 1, 32)))
        out, lse = self.run(spec, p, jnp.bfloat16, inverse_rope=back)
        window = WindowView(p["window"], p["window_ids"], p["window_visible"])
        operands = p["queries"], p["sink"], window, p["entries"], p["entry_ids"], p["entry_count"], 512**-0.5, BF16_ROW
        asked = AttendArguments(*operands, inverse_rope=back, dtype=jnp.bfloat16, rounds=True)
        got, got_lse = jax.jit(lambda: kernel.call(asked))()
        want = RoundedRows.of(jnp.asarray(out).reshape(spec.tokens, -1))
        assert isinstance(got, RoundedRows)
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.scales, want.scales)
        np.testing.assert_array_equal(got_lse, lse)

    @pytest.mark.parametrize("entries", [0, 1, 512, 1024])
    def test_both_key_splits_agree_with_float64(self, entries: int) -> None:
        spec = AttendSpec(7, 64, 128, entries, FMT)
        p = problem(spec)
        expected, expected_lse = attention.attend(p["queries"], p["sink"], p["keys"], spec.fmt.dim**-0.5)
        for key_split in ("throughput", "latency"):
            out, lse = self.run(spec, p, key_split=key_split)
            np.testing.assert_allclose(out, expected, **self.tolerance)
            np.testing.assert_allclose(lse, expected_lse, **self.tolerance)

    @pytest.mark.parametrize("heads", [5, 130])
    @pytest.mark.parametrize("keys", [(1, 170), (1, 0), (70, 300), (128, 512), (130, 1000), (70, 2500), (1, 8192)])
    @pytest.mark.parametrize("key_split", ["throughput", "latency"])
    def test_a_batch_has_the_bits_of_its_tokens_in_small_calls(
        self, keys: tuple[int, int], heads: int, key_split: str
    ) -> None:
        """A run of few tokens has several blocks, of many one. Tokens see any number of keys, from none on."""
        tokens, most = kernel.WIDE_CLUSTERS + 1, kernel.WIDE_CLUSTERS // -(-heads // kernel.HEADS)
        spec = AttendSpec(tokens, heads, *keys, FMT)
        p = problem(spec, seed=heads)
        position, freq = jnp.arange(tokens, dtype=jnp.int32) * 70_001, jnp.asarray(10_000.0 ** -jnp.linspace(0, 1, 32))
        out, lse = self.run(spec, p, jnp.bfloat16, inverse_rope=(position, freq), key_split=key_split)
        for first, size in ((0, 1), (2, 2), (1, most // 2), (1, most)):
            own = slice(first, first + size)
            part = p | {name: None if p[name] is None else p[name][own] for name in PER_TOKEN}
            how: dict = dict(inverse_rope=(position[own], freq), key_split=key_split)
            few = self.run(spec, part, jnp.bfloat16, **how)
            np.testing.assert_array_equal(few[0], out[own])
            np.testing.assert_array_equal(few[1], lse[own])

    @pytest.mark.parametrize("fmt", [FMT, BF16_ROW], ids=["fp8", "bf16"])
    def test_tokens_without_any_key_between_others(self, fmt: RowFormat) -> None:
        """No window either: a block of the kernel over bf16 rows takes several such tokens and others in turn."""
        p = problem(AttendSpec(400, 8, 1, 70, fmt))
        p |= dict(window_ids=p["window_ids"][:, :0], window_visible=p["window_visible"][:, :0])
        p["entry_count"] = np.where(np.arange(400) % 3 == 1, p["entry_count"], 0).astype(np.int32)
        keys = [k[1 : 1 + n] for k, n in zip(p["keys"], p["entry_count"], strict=True)]  # the first was the window's
        out, lse = self.run(AttendSpec(400, 8, 0, 70, fmt), p)
        expected, expected_lse = attention.attend(p["queries"], p["sink"], keys, fmt.dim**-0.5)
        np.testing.assert_allclose(out, expected, **self.tolerance)
        np.testing.assert_allclose(lse, expected_lse, **self.tolerance)

    def test_ids_out_of_range_read_the_nearest_row(self) -> None:
        """By both kernels, of keys; what is no key reads nothing."""
        spec = AttendSpec(5, 64, 128, 200, FMT)
        p = problem(spec)
        near = {}
        for name, seen in (("window_ids", p["window_visible"]), ("entry_ids", None)):
            ids = p[name].copy()
            ids[:, ::5], ids[:, 1::5] = 2**31 - 1, 64
            ids[:, 2::5] = np.where(seen[:, 2::5], ids[:, 2::5], -(2**31)) if seen is not None else ids[:, 2::5]
            p[name], near[name] = ids, np.clip(ids, 0, 63)
        dense = {
            name: (np.asarray(gather_rows(p[name], jnp.arange(64), fmt=FMT)).view(np.uint16),)
            for name in ("window", "entries")
        }
        expected = self.run(spec, p | near)
        for fmt, rows in ((FMT, {}), (BF16_ROW, dense)):
            for a, b in zip(self.run(AttendSpec(5, 64, 128, 200, fmt), p | rows), expected, strict=True):
                np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("key_split", ["throughput", "latency"])
    def test_a_token_alone_has_the_bits_it_has_in_a_batch(self, key_split: str) -> None:
        spec = AttendSpec(7, 64, 128, 512, ATTEND["v4_widths"].fmt)
        p = problem(spec)
        position, freq = jnp.arange(7, dtype=jnp.int32) * 70_001, jnp.asarray(10_000.0 ** -jnp.linspace(0, 1, 32))
        whole, _ = self.run(spec, p, jnp.bfloat16, inverse_rope=(position, freq), key_split=key_split)
        wide = p | {"entry_ids": np.pad(p["entry_ids"], ((0, 0), (0, 4000)))}  # more room, the same keys
        roomy, _ = self.run(spec, wide, jnp.bfloat16, inverse_rope=(position, freq), key_split=key_split)
        np.testing.assert_array_equal(roomy, whole)
        part = p | {name: p[name][3:5] for name in PER_TOKEN}
        alone, _ = self.run(spec, part, jnp.bfloat16, inverse_rope=(position[3:5], freq), key_split=key_split)
        np.testing.assert_array_equal(alone, whole[3:5])

    @pytest.mark.parametrize("key_split", ["throughput", "latency"])
    @pytest.mark.parametrize("shape", [(3, 130, 300), (64, 128, 1100), (2, 128, 0)])
    def test_a_chunk_has_the_bits_of_its_tokens_alone(self, shape: tuple[int, int, int], key_split: str) -> None:
        """Over rows that are decoded once, over fp8 rows, and over bf16 rows, a few tokens at a time."""
        spec, times = AttendSpec(8, *shape, FMT), CHUNK // 8 + 1
        few = problem(spec)
        p = few | {name: None if few[name] is None else np.concatenate([few[name]] * times) for name in PER_TOKEN}
        position = jnp.arange(8 * times, dtype=jnp.int32) * 701
        freq = jnp.asarray(10_000.0 ** -jnp.linspace(0, 1, 32))
        how: dict = dict(inverse_rope=(position, freq), key_split=key_split)
        if p["entries"] is None:
            wide = tuple(np.concatenate([part, *[part[:1]] * 70_000]) for part in p["window"])
            shared, plain = None, self.run(spec, p | dict(window=wide), jnp.bfloat16, **how)
        else:  # in another order than they lie in
            order = np.random.default_rng(1).permutation(64).astype(np.int32)
            shared = SharedEntries(order, np.argsort(order).astype(np.int32)[p["entry_ids"]])
            plain = self.run(spec, p, jnp.bfloat16, **how)
        chunk = self.run(spec, p, jnp.bfloat16, shared=shared, **how)
        dense = {
            name: p[name] and (np.asarray(gather_rows(p[name], jnp.arange(64), fmt=FMT)).view(np.uint16),)
            for name in ("window", "entries")
        }
        how |= dict(inverse_rope=(position[:8], freq))
        alone = self.run(AttendSpec(8, *shape, BF16_ROW), few | dense, jnp.bfloat16, **how)
        for at in (0, 1):
            np.testing.assert_array_equal(chunk[at], plain[at])
            np.testing.assert_array_equal(alone[at], plain[at][:8])
