"""Released numerics that are slightly wrong: each mistake is seen by a check that implementations of the ops pass.

The checks are the tests' own, called with the reference, or with the simulated unit in a kernel's place, after a change
of one thing. Unchanged they pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.formats.activations import quantise_rows
from dsv4_jax.formats.scaling import e4m3_values
from dsv4_jax.ops import registry

from ..cuda import test_dense_e4m3 as on_the_gpu
from ..formats import test_activations as quantiser
from ..oracle import matrix_unit
from . import test_dense_e4m3 as dense
from . import test_moe_e4m3 as moe
from . import test_swiglu as swiglu

Change = Callable[[pytest.MonkeyPatch], None]
FORMAT, DENSE, MOE, SWIGLU = (
    importlib.import_module(f"dsv4_jax.{name}")
    for name in ("formats.activations", "ops.dense_e4m3", "ops.moe_e4m3", "ops.swiglu")
)
FEW = np.r_[0, 5, 150, 299]  # what `test_has_the_bits_of_the_unit` looks at, of 300 rows


class Dense(dense.DenseE4m3Test):
    implementation = "xla"
    multiply = staticmethod(ops.dense_e4m3)


class Moe(moe.MoeE4m3Test):
    implementation = "xla"
    multiply = staticmethod(ops.moe_e4m3)


class Swiglu(swiglu.SwigluTest):
    implementation = "xla"


class Simulated(on_the_gpu.TestDenseE4m3OnTheGpu):
    """The unit in place of the kernel. Of 300 rows those that nobody looks at are left out."""

    laid = staticmethod(lambda *as_released: as_released)

    @staticmethod
    def multiply(x: Any, codes: np.ndarray, scales: np.ndarray, *, groups: int = 1, **_: Any) -> np.ndarray:
        here = FEW if len(x) == 300 else np.arange(len(x))
        of_rows = np.exp2(scales.astype(np.float32) - 127).repeat(128, 0)[: len(codes)]
        out = np.full((len(x), len(codes)), np.nan, np.float32)
        parts = parts_of(len(codes), codes.shape[1], len(x))
        out[here] = unit(*dense.codes_of(x[here]), codes, of_rows, parts=parts, groups=groups)
        return out


def parts_of(weight_rows: int, columns: int, rows: int) -> int:
    return matrix_unit.parts_of(weight_rows, columns)


unit = matrix_unit.dense


def quantised() -> None:
    quantiser.test_all_numbers_as_released()
    quantiser.test_small_blocks_have_the_floor_and_nan_is_its_own()


def multiplied() -> None:
    for name in ("odd", "groups"):
        Dense().test_equals_float64_of_the_same_codes(name, 17)


def multiplied_in_blocks() -> None:
    Dense().test_columns_share_their_scale_in_128s()


def bits() -> None:
    for name in ("groups", "four_parts"):
        Simulated().test_has_the_bits_of_the_unit(name)


def experts() -> None:
    Moe().test_against_float64_and_among_others(0)


def experts_in_blocks() -> None:
    Moe().test_columns_share_their_scale_in_128s()


def activated() -> None:
    Swiglu().test_equals_float64()


CHECKS = [quantised, multiplied, multiplied_in_blocks, bits, experts, experts_in_blocks, activated]

# The mistakes


def in_all_rooms(quantise: Callable[[jax.Array], tuple[jax.Array, jax.Array]], block: int = 128) -> Change:
    """Rows rounded in another way, to codes and float32 scales of so many columns."""

    def rounded(x: jax.Array, _: Any = None, dtype: Any = jnp.bfloat16) -> jax.Array:
        codes, scales = quantise(x)
        return (e4m3_values(codes) * jnp.repeat(scales, block, -1)).astype(dtype)

    def as_stored(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales = quantise(x)
        return codes, (jnp.frexp(scales)[1] + 126).astype(jnp.uint8)

    def change(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(quantiser, "quantise", as_stored)
        patched.setattr(DENSE, "quantise_rows", lambda x: (x, None))
        patched.setattr(DENSE, "dequantise_rows", rounded)
        patched.setattr(MOE, "_rounded", rounded)

    return change


def by_float32_scales(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    blocks = FORMAT.grouped(FORMAT.to_bfloat16(x), 128)
    scales = FORMAT.absmax(blocks, np.float32(1e-4)) / np.float32(448)
    return FORMAT.e4m3_codes(blocks / scales[..., None]).reshape(x.shape), scales


def by_blocks_of_64(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    apart = jnp.pad(x.reshape(*x.shape[:-1], -1, 64), [(0, 0)] * x.ndim + [(0, 64)])  # each in a block of its own
    codes, scales = quantise_rows(apart.reshape(*x.shape[:-1], -1))
    codes = codes.reshape(*apart.shape)[..., :64].reshape(x.shape)
    return codes, FORMAT.power_of_two(scales.astype(jnp.int32) - 127)


def between_products(change: Change) -> Change:
    """The change of what goes into an expert's second product alone."""

    def changed(patched: pytest.MonkeyPatch) -> None:
        right = MOE._rounded
        change(patched)
        wrong = MOE._rounded
        patched.setattr(MOE, "_rounded", lambda x: (wrong if x.shape[1] == moe.INTER else right)(x))

    return changed


def without_clamp(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(quantiser, "quantise", quantise_rows)
    cast = lambda x: jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)  # noqa: E731
    patched.setattr(FORMAT, "e4m3_codes", cast)


def without_limit(room: Any) -> Change:
    def change(patched: pytest.MonkeyPatch) -> None:
        limited = room.clamped_swiglu
        patched.setattr(room, "clamped_swiglu", lambda gate, up, limit: limited(gate, up, 1e9))

    return change


def shares_behind_the_second_product(patched: pytest.MonkeyPatch) -> None:
    summed = MOE.summed

    def changed(arguments: Any, expert: Any, codec: Any) -> jax.Array:
        return summed(arguments, lambda by, share: share[:, None] * expert(by, jnp.ones_like(share)), codec)

    patched.setattr(MOE, "summed", changed)


def scales_of_the_next_group(patched: pytest.MonkeyPatch) -> None:
    pack = Dense.laid

    def laid(codes: np.ndarray, scales: np.ndarray) -> Any:
        return pack(codes, np.roll(scales, 1, 0))

    patched.setattr(Dense, "laid", staticmethod(laid))


def rows_scales_of_the_first_group(patched: pytest.MonkeyPatch) -> None:
    """Of five groups; of one it changes nothing."""

    def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales = quantise_rows(x)
        first = scales.shape[-1] // 5 if scales.shape[-1] == 20 else scales.shape[-1]
        return codes, jnp.tile(scales[:, :first], (1, scales.shape[-1] // first))

    patched.setattr(DENSE, "quantise_rows", quantise)


def promotion_every_256(patched: pytest.MonkeyPatch) -> None:
    """Two blocks of 128 in one sum, which takes the second's scale: exact in all but the unit's bits."""

    def changed(x: np.ndarray, row_scales: np.ndarray, w: np.ndarray, scales: np.ndarray, **how: Any) -> np.ndarray:
        if how["groups"] > 1:
            return matrix_unit.dense(x, row_scales, w, scales, **how)
        out, blocks = np.zeros((len(x), len(w)), np.float32), w.shape[1] // 128
        for part in np.split(np.arange(blocks), how["parts"]):
            total = np.zeros_like(out)
            for pair in part.reshape(-1, 2):
                sums, factor = np.zeros_like(out), None
                for block in pair:
                    last, factor = factor, row_scales[:, block, None] * scales[None, :, block]
                    sums = sums if last is None else sums * (last / factor)
                    for k in range(128 * block, 128 * block + 128, 32):
                        sums = matrix_unit.add_products(x[:, k : k + 32], w[:, k : k + 32], sums)
                total = total + sums * factor
            out = out + total
        return out

    patched.setattr(f"{__name__}.unit", changed)


def parts_by_rows(patched: pytest.MonkeyPatch) -> None:
    def changed(weight_rows: int, columns: int, rows: int) -> int:
        return matrix_unit.parts_of(weight_rows, columns) if rows <= 64 else 1

    patched.setattr(f"{__name__}.parts_of", changed)


FLOAT32, HALF = in_all_rooms(by_float32_scales), in_all_rooms(by_blocks_of_64, 64)
MUTANTS: dict[str, tuple[Change, tuple[Callable[[], None], ...]]] = {
    "float32 scales": (FLOAT32, (quantised, multiplied, experts)),
    "blocks of 64": (HALF, (quantised, multiplied_in_blocks, experts_in_blocks)),
    "blocks of 64 between products": (between_products(HALF), (experts_in_blocks,)),
    "no clamp": (without_clamp, (quantised,)),
    "no limit of experts": (without_limit(MOE), (experts,)),
    "no limit of the shared expert": (without_limit(SWIGLU), (activated,)),
    "shares behind the second product": (shares_behind_the_second_product, (experts,)),
    "weights' scales of another group": (scales_of_the_next_group, (multiplied,)),
    "rows' scales of another group": (rows_scales_of_the_first_group, (multiplied,)),
    "promotion every 256": (promotion_every_256, (bits,)),
    "parts by rows": (parts_by_rows, (bits,)),
}


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """References run as they are now, not as they were traced once."""
    monkeypatch.setattr(registry, "_compiled", lambda implementation, arguments: implementation.call(arguments))
    monkeypatch.setattr(swiglu, "jit_swiglu", ops.swiglu)


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_right_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.every_case
@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, checks = MUTANTS[name]
    change(monkeypatch)
    missed = []
    for check in checks:
        try:
            check()
        except AssertionError:
            continue
        missed.append(check.__name__)
    assert not missed
