"""The table of row formats: how one cache row is stored, byte by byte.

A row is stored as a few *parts*, each a column block of its own pool leaf, so that every part
stays aligned (a 584-byte row would not be) and keeps a plain unsigned carrier dtype. This module
knows only the geometry and imports no jax; the codec of a format lives in the module its table
entry names and has two functions, `encode(fmt, x)` and `decode(fmt, parts, dtype)`.

| KV row format   | parts (V4 widths: 448 NoPE + 64 RoPE dims)                        | bytes |
| fp8             | e4m3 NoPE 448, bf16 RoPE 128, ue8m0 scales 7 (one per 64 dims) + 1 | 584   |
| fp8_per_entry   | e4m3 NoPE 448, bf16 RoPE 128, one fp32 inverse scale               | 580   |
| bf16 / f32      | all dims                                                           | 1024 / 2048 |

| index key format | parts (V4 width: 128)                                             | bytes |
| fp4              | e2m1, two to a byte (element 2i low) 64, ue8m0 scales 4 (per 32)  | 68    |
| fp8              | e4m3 128, one fp32 scale (a power of two)                         | 132   |
| bf16 / f32       | all dims                                                          | 256 / 512 |

Sources: FlashMLA's "MODEL1" FP8 page, vLLM `fp8_ds_mla`, OCP MX for e2m1/ue8m0.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType

import numpy as np

from ..checks import shown
from ..errors import LayoutError

__all__ = ["INDEX_FORMATS", "KV_FORMATS", "NOPE_GROUP", "Part", "RowFormat", "codec", "index_format", "kv_format"]

NOPE_GROUP = 64  # NoPE dims that share one ue8m0 scale
FP4_GROUP = 32  # index-key dims that share one ue8m0 scale
SCALE_ALIGN = 8  # scale bytes of a KV row are padded to this


@dataclasses.dataclass(frozen=True)
class Part:
    """One column block of a stored row: `width` elements of an unsigned (or float32) carrier."""

    name: str
    dtype: str
    width: int

    @property
    def bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How a row of `dim` values (the last `rope_dim` of them rotary) is stored."""

    name: str
    dim: int
    rope_dim: int
    parts: tuple[Part, ...]
    module: str

    @property
    def nope_dim(self) -> int:
        return self.dim - self.rope_dim

    @property
    def row_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def _fp8(dim: int, rope_dim: int) -> tuple[Part, ...]:
    groups = -(-(dim - rope_dim) // NOPE_GROUP)
    scales = -(-groups // SCALE_ALIGN) * SCALE_ALIGN
    return (
        Part("nope", "uint8", dim - rope_dim),
        Part("rope", "uint16", rope_dim),
        Part("scale", "uint8", scales),
    )


def _fp8_per_entry(dim: int, rope_dim: int) -> tuple[Part, ...]:
    return (
        Part("nope", "uint8", dim - rope_dim),
        Part("rope", "uint16", rope_dim),
        Part("inv_scale", "float32", 1),
    )


def _index_fp4(dim: int, _: int) -> tuple[Part, ...]:
    return Part("codes", "uint8", dim // 2), Part("scale", "uint8", -(-dim // FP4_GROUP))


def _index_fp8(dim: int, _: int) -> tuple[Part, ...]:
    return Part("codes", "uint8", dim), Part("scale", "float32", 1)


def _bf16(dim: int, _: int) -> tuple[Part, ...]:
    return (Part("row", "uint16", dim),)


def _f32(dim: int, _: int) -> tuple[Part, ...]:
    return (Part("row", "float32", dim),)


_Geometry = Callable[[int, int], tuple[Part, ...]]

KV_FORMATS: dict[str, tuple[str, _Geometry]] = {
    "fp8": ("fp8", _fp8),
    "fp8_per_entry": ("fp8_per_entry", _fp8_per_entry),
    "bf16": ("plain", _bf16),
    "f32": ("plain", _f32),
}

INDEX_FORMATS: dict[str, tuple[str, _Geometry]] = {
    "fp4": ("index_fp4", _index_fp4),
    "fp8": ("index_fp8", _index_fp8),
    "bf16": ("plain", _bf16),
    "f32": ("plain", _f32),
}


def kv_format(name: str, head_dim: int, rope_dim: int) -> RowFormat:
    """The stored form of a KV row. Raises `LayoutError` for an unknown name."""
    return _lookup(KV_FORMATS, "KV row", name, head_dim, rope_dim)


def index_format(name: str, dim: int) -> RowFormat:
    """The stored form of an index key. Raises `LayoutError` for an unknown name."""
    return _lookup(INDEX_FORMATS, "index key", name, dim, 0)


def codec(fmt: RowFormat) -> ModuleType:
    """The jnp codec module of a format (imports jax)."""
    return importlib.import_module(f".{fmt.module}", __name__)


def _lookup(table: dict[str, tuple[str, _Geometry]], what: str, name: str, dim: int, rope_dim: int) -> RowFormat:
    if not isinstance(name, str) or name not in table:
        raise LayoutError(f"unknown {what} format {shown(name)}, expected one of {sorted(table)}")
    module, geometry = table[name]
    return RowFormat(name, dim, rope_dim, geometry(dim, rope_dim), module)
