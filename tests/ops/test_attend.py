"""attend against float64."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import codec
from dsv4_jax.ops import attend
from dsv4_jax.ops.append import WindowView

from ..oracle import attention
from ..oracle import rows as oracle_rows
from .arg_specs import ATTEND, AttendSpec
from .op_test import OpTest

TOLERANCE = dict(rtol=2e-5, atol=2e-5)
jit_attend = jax.jit(attend, static_argnames=("scale", "fmt", "dtype", "key_split", "implementation"))


def problem(spec: AttendSpec, seed: int = 0) -> dict:
    """Random pools, ids and masks; rows that are not keys hold NaN."""
    rng = np.random.default_rng(seed)
    fmt, dim = spec.fmt, spec.fmt.dim

    def pool(rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        values = rng.standard_normal((rows, dim)).astype(np.float32)
        values[0] = np.nan  # what padding ids point at
        parts = oracle_rows.encode(fmt, values)
        return parts, oracle_rows.decode(fmt, parts)

    window, window_values = pool(64)
    visible = rng.random((spec.tokens, spec.window)) < 0.8
    visible[:, -1] = True
    ids = np.where(visible, rng.integers(1, 64, visible.shape), 0).astype(np.int32)
    keys = [window_values[ids[t][visible[t]]] for t in range(spec.tokens)]
    entries = entry_ids = count = None
    if spec.entries:
        entries, entry_values = pool(64)
        count = rng.integers(0, spec.entries + 1, spec.tokens).astype(np.int32)
        count[0] = 0
        chosen = np.arange(spec.entries) < count[:, None]
        entry_ids = np.where(chosen, rng.integers(1, 64, chosen.shape), 0).astype(np.int32)
        keys = [np.concatenate([k, entry_values[entry_ids[t, : count[t]]]]) for t, k in enumerate(keys)]
    return dict(
        # Values of bf16, to which kernels round.
        queries=(rng.standard_normal((spec.tokens, spec.heads, dim)) * 3).astype(jnp.bfloat16).astype(np.float32),
        sink=rng.standard_normal(spec.heads).astype(np.float32),
        window=window,
        window_ids=ids,
        window_visible=visible,
        entries=entries,
        entry_ids=entry_ids,
        entry_count=count,
        keys=keys,
    )


class AttendTest(OpTest):
    op = "attend"
    specs: ClassVar[dict[str, AttendSpec]] = ATTEND
    tolerance: ClassVar[dict[str, float]] = TOLERANCE
    large: ClassVar[dict[str, float]] = dict(rtol=1e-3, atol=2e-3)  # of logits of thousands

    def run(self, spec: AttendSpec, p: dict, dtype: type = jnp.float32, **options) -> tuple[np.ndarray, np.ndarray]:
        window = WindowView(p["window"], p["window_ids"], p["window_visible"])
        args = p["queries"], p["sink"], window, p["entries"], p["entry_ids"], p["entry_count"]
        options |= dict(scale=spec.fmt.dim**-0.5, fmt=spec.fmt, dtype=dtype, implementation=self.implementation)
        out, lse = jit_attend(*args, **options)
        assert out.dtype == dtype and lse.dtype == jnp.float32
        return np.asarray(out), np.asarray(lse)

    @pytest.mark.parametrize("name", ATTEND)
    def test_equals_float64(self, name: str) -> None:
        spec = self.specs[name]
        p = problem(spec)
        expected, expected_lse = attention.attend(p["queries"], p["sink"], p["keys"], spec.fmt.dim**-0.5)
        with self.asked(fmt=spec.fmt):
            out, lse = self.run(spec, p)
            np.testing.assert_allclose(out, expected, **self.tolerance)
            np.testing.assert_allclose(lse, expected_lse, **self.tolerance)

    def test_a_token_without_keys_gives_zero(self) -> None:
        spec = self.specs["csa"]
        p = problem(spec)
        p["window_visible"][2] = False
        p["entry_count"][2] = 0
        p["keys"][2] = p["keys"][2][:0]
        out, lse = self.run(spec, p)
        assert not out[2].any() and (lse[2] == -np.inf).all()
        expected, _ = attention.attend(p["queries"], p["sink"], p["keys"], spec.fmt.dim**-0.5)
        np.testing.assert_allclose(out, expected, **self.tolerance)

    @pytest.mark.parametrize("sink", [-1e30, -50.0, 0.0, 50.0])
    def test_sink_of_any_size(self, sink: float) -> None:
        """A huge sink takes all the weight, none at all leaves a plain softmax; the lse never counts it."""
        spec = self.specs["csa"]
        p = problem(spec) | dict(sink=np.full(spec.heads, sink, np.float32))
        out, lse = self.run(spec, p)
        expected, expected_lse = attention.attend(p["queries"], p["sink"], p["keys"], spec.fmt.dim**-0.5)
        np.testing.assert_allclose(out, expected, **self.tolerance)
        np.testing.assert_allclose(lse, expected_lse, **self.tolerance)

    def test_large_logits_do_not_overflow(self) -> None:
        spec = self.specs["swa"]
        p = problem(spec)
        p["queries"] = p["queries"] * np.float32(1000)
        out, _ = self.run(spec, p)
        expected, _ = attention.attend(p["queries"], p["sink"], p["keys"], spec.fmt.dim**-0.5)
        np.testing.assert_allclose(out, expected, **self.large)

    @pytest.mark.parametrize("name", ["csa", "v4_widths"])
    def test_output_turned_back_and_rounded(self, name: str) -> None:
        """As the plain output, turned back afterwards; in bfloat16 it is rounded once."""
        spec = self.specs[name]
        p = problem(spec)
        position = np.arange(spec.tokens, dtype=np.int32) * 1001
        freq = (10_000.0 ** -np.linspace(0, 1, spec.fmt.rope_dim // 2)).astype(np.float32)
        turned, lse = self.run(spec, p, inverse_rope=(position, freq))
        halves, _ = self.run(spec, p, jnp.bfloat16, inverse_rope=(position, freq))
        plain, plain_lse = self.run(spec, p)
        np.testing.assert_array_equal(lse, plain_lse)
        np.testing.assert_array_equal(turned[..., : spec.fmt.nope_dim], plain[..., : spec.fmt.nope_dim])
        angle = (position[:, None].astype(np.float32) * freq).astype(np.float64)
        pairs = plain[..., spec.fmt.nope_dim :].reshape(*plain.shape[:-1], -1, 2).astype(np.float64)
        back = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(-1j * angle)[:, None]
        expected = np.stack([back.real, back.imag], -1).reshape(*plain.shape[:-1], -1)
        np.testing.assert_allclose(turned[..., spec.fmt.nope_dim :], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(halves, turned.astype(jnp.bfloat16))

    def test_order_of_entries_is_irrelevant(self) -> None:
        spec = self.specs["hca_many_tokens"]
        p = problem(spec)
        q = dict(p, entry_ids=p["entry_ids"].copy())
        for t, n in enumerate(p["entry_count"]):
            q["entry_ids"][t, :n] = p["entry_ids"][t, :n][::-1]
        np.testing.assert_allclose(self.run(spec, q)[0], self.run(spec, p)[0], **self.tolerance)


class TestAttend(AttendTest):
    implementation = "xla"

    @pytest.mark.parametrize("implementation", [None, "xla", "pallas", "cuda"])
    def test_unknown_key_splits_are_named_before_anything_is_read(self, implementation) -> None:
        with pytest.raises(ImplementationError, match="key_split 'balanced'"):
            attend(*[None] * 6, scale=1.0, fmt=ATTEND["csa"].fmt, key_split="balanced", implementation=implementation)

    def test_reference_reads_the_stored_values(self) -> None:
        """The oracle decodes with its own codec; both decoders must agree for the comparison to mean anything."""
        fmt = ATTEND["csa"].fmt
        parts = problem(ATTEND["csa"])["entries"]
        np.testing.assert_array_equal(codec(fmt).decode(fmt, parts), oracle_rows.decode(fmt, parts))
