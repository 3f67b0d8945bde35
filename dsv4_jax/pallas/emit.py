"""What every kernel that writes rows does last: RMSNorm, RoPE, Hadamard, quantise and store, for one row.

A row lives in registers as a tile [groups, 64] of float32, dim c at [c // 64, c % 64], zeros past the
last dim. `groups` is a power of two, as Triton wants. The steps and their rounding are those of
`ops.numerics` and the codecs, so the same raw row gives the same bytes whatever kernel emits it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..formats import FP4_GROUP, NOPE_GROUP, Codes, RowFormat, Scales
from ..formats.index_fp4 import e2m1_codes
from ..formats.scaling import (
    E4M3_MAX,
    UE8M0_NAN,
    absmax,
    bf16_bits,
    e4m3_codes,
    flush_subnormals,
    power_of_two,
    ue8m0_scale_exponent,
)
from ..ops.epilogue import Epilogue
from ..ops.numerics import rounded, tree_sum
from .tiles import outer

__all__ = [
    "Arithmetic",
    "EpilogueRefs",
    "RowTile",
    "emit",
    "epilogue_operands",
    "hadamard",
    "rms_norm",
    "rope",
    "store",
    "unsupported_rows",
]

LANES = NOPE_GROUP
_MAGIC = np.float32(1.5 * 2**23)  # the float32 numbers around it are the integers


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Products that no compiler contracts into a fused multiply-add, and sums of a fixed order.

    Compiled, these are PTX's `mul.rn` and Triton's reduction, whose order follows from the tile's
    shape. Interpreted, they are the reference's.
    """

    interpret: bool

    def product(self, a: jax.Array, b: jax.Array | np.floating) -> jax.Array:
        if self.interpret:
            return rounded(a * b)
        a, b = jnp.broadcast_arrays(a, jnp.asarray(b, jnp.float32))
        (out,) = pltriton.elementwise_inline_asm(
            "mul.rn.f32 $0, $1, $2;",
            args=[a, b],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
        )
        return out

    def total(self, x: jax.Array, axis: int) -> jax.Array:
        """The sum over an axis, which is kept with size 1."""
        return tree_sum(x, axis) if self.interpret else x.sum(axis, keepdims=True)

    def exp(self, x: jax.Array) -> jax.Array:
        """Computes, bit for bit as `ops.numerics.exp`, e^x for x <= 0."""
        clamped = jnp.maximum(x, np.float32(-88))
        n = self._nearest(self.product(clamped, np.float32(1.4426950408889634)))
        r = clamped - self.product(n, np.float32(0.693359375)) - self.product(n, np.float32(-2.12194440e-4))
        series = self.product(r, np.float32(1 / 5040)) + np.float32(1 / 720)
        for factorial in (120, 24, 6, 2, 1, 1):
            series = self.product(series, r) + np.float32(1 / factorial)
        power = lax.bitcast_convert_type((n.astype(jnp.int32) + np.int32(127)) << np.int32(23), jnp.float32)
        return jnp.where(x < np.float32(-87), np.float32(0), self.product(series, power))

    def _nearest(self, x: jax.Array) -> jax.Array:
        """The nearest integer, ties to even, of |x| < 2^22 (Triton has no `round`, and XLA would undo the addition)."""
        return jnp.round(x) if self.interpret else (x + _MAGIC) - _MAGIC


@dataclasses.dataclass(frozen=True)
class RowTile:
    """Where the dims of a row of `dim` values stand in its tile."""

    dim: int

    @property
    def shape(self) -> tuple[int, int]:
        return pl.next_power_of_2(-(-self.dim // LANES)), LANES

    def columns(self) -> jax.Array:
        """[groups, 64] int32; those past the last dim are >= dim."""
        group, lane = outer(*(jnp.arange(n, dtype=jnp.int32) for n in self.shape))
        return group * np.int32(LANES) + lane

    def pairs(self) -> jax.Array:
        """Returns [groups, 32] int32: c // 2 of the dims c."""
        group, lane = outer(*(jnp.arange(n, dtype=jnp.int32) for n in (self.shape[0], LANES // 2)))
        return group * np.int32(LANES // 2) + lane

    def load(
        self, ref, row: jax.Array, first: int = 0, where: jax.Array | None = None, other: jax.Array | None = None
    ) -> jax.Array:
        """Loads columns `first` ... of a row of `ref`; `other` (default: zeros) past the last and if `where` is
        false."""
        columns = self.columns()
        mask = columns < np.int32(self.dim)
        mask = mask if where is None else mask & where
        other = jnp.zeros(self.shape, ref.dtype) if other is None else other
        at = ref.at[jnp.full(self.shape, row), columns + np.int32(first)]
        return pltriton.load(at, mask=mask, other=other)

    def padded_with_zeros(self, x: jax.Array) -> jax.Array:
        """Returns x, with zeros past the last dim."""
        return x if self.dim == x.size else jnp.where(self.columns() < np.int32(self.dim), x, np.float32(0))

    def store(self, ref, row: jax.Array, values: jax.Array, first: int = 0) -> None:
        """Writes the dims to columns `first` ... of a row of `ref`."""
        columns = self.columns()
        store(ref, row, columns + np.int32(first), values, columns < np.int32(self.dim))


@dataclasses.dataclass(frozen=True)
class EpilogueRefs:
    """A `Epilogue` in a kernel: its arrays as refs, the rest of it static."""

    norm: Any  # float32 [1, e]
    inv_freq: Any  # float32 [1, rope_dim / 2]
    eps: float
    hadamard: bool

    def weight(self, tile: RowTile) -> jax.Array:
        """Returns the norm weight as a row tile."""
        return tile.load(self.norm, jnp.int32(0))

    def frequencies(self, tile: RowTile) -> jax.Array:
        """RoPE frequencies of the pairs of dims, [groups, 32]; 0 for pairs that are not rotated."""
        count = self.inv_freq.shape[1]
        place = tile.pairs() - np.int32(tile.dim // 2 - count)
        rotary = (place >= 0) & (place < count)
        at = self.inv_freq.at[jnp.zeros_like(place), jnp.where(rotary, place, 0)]
        return pltriton.load(at, mask=rotary, other=jnp.zeros(place.shape, jnp.float32))

    def load(self, tile: RowTile) -> EpilogueRefs:
        """Returns the same, already loaded: so that the row and these need not wait for each other."""
        return _EpilogueTiles(self.weight(tile), self.frequencies(tile), self.eps, self.hadamard)


class _EpilogueTiles(EpilogueRefs):
    def weight(self, tile: RowTile) -> jax.Array:
        return self.norm

    def frequencies(self, tile: RowTile) -> jax.Array:
        return self.inv_freq


def epilogue_operands(epilogue: Epilogue) -> tuple[jax.Array, jax.Array]:
    """Returns the arrays a kernel's `EpilogueRefs` refer to."""
    return epilogue.norm.astype(jnp.float32)[None], epilogue.inv_freq.astype(jnp.float32)[None]


def store(ref, row: jax.Array, columns: jax.Array, values: jax.Array, mask: jax.Array) -> None:
    """Stores a tile in one row, unless there is no such row. Where the mask is false the column is sent
    past the end: the interpreter writes old values back there, and they must not meet a live lane."""
    mask = mask & (row >= 0) & (row < ref.shape[0])
    columns = jnp.where(mask, columns, np.int32(ref.shape[1]))
    pltriton.store(ref.at[jnp.full(columns.shape, row), columns], values, mask=mask)


def emit(
    x: jax.Array, fmt: RowFormat, epilogue: EpilogueRefs | None, position: jax.Array | None, pool, row, math: Arithmetic
) -> None:
    """Finishes, quantises and stores the raw row of tile `x` as row `row` of the pool's parts, if they have it."""
    tile = RowTile(fmt.dim)
    if epilogue is not None:
        assert position is not None
        x = rms_norm(x, tile, epilogue, math)
        x = rope(x, tile, epilogue, position, math)
        if epilogue.hadamard:
            x = hadamard(x, fmt.dim, math)
    body = _body(fmt)
    assert body is not None, unsupported_rows(fmt)
    body(x, fmt, tile, pool, row)


def unsupported_rows(fmt: RowFormat) -> str | None:
    """Why rows of a format cannot be stored by `emit`, or None."""
    return None if _body(fmt) else f"it does not store rows of {fmt.contents}"


def _body(fmt: RowFormat) -> Callable[..., None] | None:
    """What quantises and stores a row of such parts, if anything here does."""
    match fmt.holds:
        case (Codes("f32" | "bf16"),):
            return _store_plain
        case Codes("e4m3"), Codes("bf16"), Scales("ue8m0", group) if group == NOPE_GROUP:
            return _store_groups
        case Codes("e4m3", dims), Codes("bf16"), Scales("absmax", group) if group >= dims and not fmt.padded:
            return _store_absmax
        case Codes("e4m3", dims), Scales("power_of_two", group) if group >= dims and not fmt.padded:
            return _store_power_of_two
        case Codes("e2m1"), Scales("ue8m0", group) if group == FP4_GROUP and not fmt.padded:
            return _store_e2m1
    return None


def rms_norm(x: jax.Array, tile: RowTile, epilogue: EpilogueRefs, math: Arithmetic) -> jax.Array:
    squares = math.product(x, x)
    if math.interpret:
        squares = squares.reshape(1, -1)  # the reference's tree
    total = math.total(math.total(squares, 1), 0)
    mean = math.product(total, np.float32(1.0 / tile.dim))
    return math.product(math.product(x, lax.rsqrt(mean + np.float32(epilogue.eps))), epilogue.weight(tile))


def rope(x: jax.Array, tile: RowTile, epilogue: EpilogueRefs, position: jax.Array, math: Arithmetic) -> jax.Array:
    even, odd = _split(x)
    freq = epilogue.frequencies(tile)
    angle = position.astype(jnp.float32) * freq
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = math.product(even, cos) - math.product(odd, sin), math.product(even, sin) + math.product(odd, cos)
    return _merge(*(jnp.where(freq != 0, new, old) for new, old in zip(turned, (even, odd), strict=True)))


def hadamard(x: jax.Array, dim: int, math: Arithmetic) -> jax.Array:
    """Multiplies x @ H_dim / sqrt(dim) as H_a and H_b over the axes of x as [a, b]."""
    size = x.size
    a = 1 << (size.bit_length() - 1) // 2
    b = size // a
    y = x.reshape(a, 1, b)
    y = math.total(_signed(jnp.broadcast_to(y, (a, b, b)), 1, 2), 2).reshape(1, a, b)
    y = math.total(_signed(jnp.broadcast_to(y, (a, a, b)), 0, 1), 1).reshape(x.shape)
    y = math.product(y, np.float32(dim**-0.5))
    return RowTile(dim).padded_with_zeros(y)


def _signed(x: jax.Array, i: int, j: int) -> jax.Array:
    """x, negated where the indices along axes i and j have an odd number of common bits."""
    common = lax.broadcasted_iota(jnp.int32, x.shape, i) & lax.broadcasted_iota(jnp.int32, x.shape, j)
    return jnp.where((lax.population_count(common) & np.int32(1)) != 0, -x, x)


def _store_plain(x, fmt: RowFormat, tile: RowTile, pool, row) -> None:
    (part,) = pool
    tile.store(part, row, x if fmt.dense_dtype == "float32" else bf16_bits(flush_subnormals(x)))


def _store_groups(x, fmt: RowFormat, tile: RowTile, pool, row) -> None:
    nope, rope, scale = pool
    x = flush_subnormals(x)
    dims = nope.shape[1]
    groups = np.int32(-(-dims // NOPE_GROUP))
    exponent = ue8m0_scale_exponent(absmax(_first(x, dims, tile), _floor(fmt)), E4M3_MAX)
    _store_first(nope, row, e4m3_codes(x * power_of_two(-exponent)[:, None]), tile)
    _store_rest(rope, row, x, dims, tile)
    group = jnp.arange(x.shape[0], dtype=jnp.int32)
    code = jnp.where(group < groups, exponent + np.int32(127), 0).astype(jnp.uint8)
    store(scale, row, group, code, group < scale.shape[1])
    if scale.shape[1] > x.shape[0]:
        group = jnp.arange(pl.next_power_of_2(scale.shape[1]), dtype=jnp.int32)
        padding = (group >= x.shape[0]) & (group < scale.shape[1])
        store(scale, row, group, jnp.zeros(group.shape, jnp.uint8), padding)


def _store_absmax(x, fmt: RowFormat, tile: RowTile, pool, row) -> None:
    nope, rope, inv_scale = pool
    x = flush_subnormals(x)
    dims = nope.shape[1]
    amax = _whole_row(absmax(_first(x, dims, tile), _floor(fmt)))
    _store_first(nope, row, e4m3_codes(x * (E4M3_MAX / amax)), tile)
    _store_rest(rope, row, x, dims, tile)
    _store_one(inv_scale, row, amax * np.float32(1 / 448))


def _store_power_of_two(x, fmt: RowFormat, tile: RowTile, pool, row) -> None:
    codes, scale = pool
    x = flush_subnormals(x)
    exponent = ue8m0_scale_exponent(_whole_row(absmax(x, _floor(fmt))), E4M3_MAX)
    tile.store(codes, row, e4m3_codes(x * power_of_two(-exponent)))
    _store_one(scale, row, power_of_two(exponent))


def _store_e2m1(x, fmt: RowFormat, tile: RowTile, pool, row) -> None:
    packed, scale = pool
    groups = flush_subnormals(x).reshape(-1, FP4_GROUP)
    exponent = ue8m0_scale_exponent(absmax(groups, _floor(fmt)), 6.0)
    codes = e2m1_codes(groups * power_of_two(-exponent)[:, None]).astype(jnp.int32)
    low, high = _split(codes.reshape(x.shape))
    column = tile.pairs()
    store(packed, row, column, (low | high << np.int32(4)).astype(jnp.uint8), column < packed.shape[1])
    nan = jnp.isnan(groups).astype(jnp.int32).max(1) != 0
    group = jnp.arange(groups.shape[0], dtype=jnp.int32)
    code = jnp.where(nan, UE8M0_NAN, (exponent + np.int32(127)).astype(jnp.uint8))
    store(scale, row, group, code, group < scale.shape[1])


def _floor(fmt: RowFormat) -> np.float32:
    (scales,) = fmt.scales
    return np.float32(scales.floor)


def _first(x: jax.Array, dims: int, tile: RowTile) -> jax.Array:
    """x, zeros past the first `dims`."""
    return jnp.where(tile.columns() < np.int32(dims), x, np.float32(0))


def _store_first(part, row, codes: jax.Array, tile: RowTile) -> None:
    """The codes of the first dims, as many as the part has columns."""
    columns = tile.columns()
    store(part, row, columns, codes, columns < np.int32(part.shape[1]))


def _store_rest(part, row, x: jax.Array, first: int, tile: RowTile) -> None:
    """The dims from `first` on in bf16."""
    columns = tile.columns()
    mask = (columns >= np.int32(first)) & (columns < np.int32(tile.dim))
    store(part, row, columns - np.int32(first), bf16_bits(x), mask)


def _store_one(part, row, value: jax.Array) -> None:
    """A single value [1, 1] in column 0."""
    zero = jnp.zeros((1, 1), jnp.int32)
    store(part, row, zero, value, zero == 0)


def _whole_row(group_max: jax.Array) -> jax.Array:
    """[groups] -> [1, 1]"""
    return group_max.max(0, keepdims=True)[:, None]


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[groups, 64] -> its even and its odd dims, [groups, 32] each, of the same 32-bit dtype."""
    pairs = lax.bitcast_convert_type(x, jnp.int32).reshape(x.shape[0], LANES // 2, 2)
    odd = lax.broadcasted_iota(jnp.int32, pairs.shape, 2) == 1
    # A sum with a zero, in integers: exact for every bit pattern, and it stays within a thread.
    halves = (jnp.where(odd == which, pairs, 0).sum(2, dtype=jnp.int32) for which in (False, True))
    even, odd = (lax.bitcast_convert_type(h, x.dtype) for h in halves)
    return even, odd


def _merge(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Returns the inverse of `_split`."""
    shape = (*even.shape, 2)
    which = lax.broadcasted_iota(jnp.int32, shape, 2) == 0
    pairs = jnp.where(which, jnp.broadcast_to(even[..., None], shape), jnp.broadcast_to(odd[..., None], shape))
    return pairs.reshape(even.shape[0], LANES)
