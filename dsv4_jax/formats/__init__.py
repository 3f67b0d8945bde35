"""The table of row formats: how one cache row is stored, byte by byte.

Parts, and the facts about them that kernels go by, are those of `rows`. Nothing here imports jax; the codec of a
format lives in the module its table entry names.

| KV row format   | parts (V4 widths: 448 NoPE + 64 RoPE dims)                        | bytes |
| fp8             | e4m3 NoPE 448, bf16 RoPE 128, ue8m0 scales 7 (one per 64 dims) + 1 | 584   |
| fp8_per_entry   | e4m3 NoPE 448, bf16 RoPE 128, one fp32 inverse scale               | 580   |
| bf16 / f32      | all dims                                                           | 1024 / 2048 |

| index key format | parts (V4 width: 128)                                             | bytes |
| fp4              | e2m1, two to a byte (element 2i low) 64, ue8m0 scales 4 (per 32)  | 68    |
| fp8              | e4m3 128, one fp32 scale (a power of two)                         | 132   |
| bf16 / f32       | all dims                                                          | 256 / 512 |

A format of one's own is one more entry: `KV_FORMATS["mine"] = FormatSpec("my_package.my_codec", my_parts)`. Its name
is part of what stored blocks are found by, so it stands for one way to store rows, for good.

Sources: FlashMLA's "MODEL1" FP8 page, vLLM `fp8_ds_mla`, OCP MX for e2m1/ue8m0.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from types import ModuleType

from ..checks import shown
from ..errors import LayoutError
from .rows import Codes, Part, RowFormat, Scales

__all__ = [
    "INDEX_FORMATS",
    "KV_FORMATS",
    "Codes",
    "FormatSpec",
    "Part",
    "RowFormat",
    "Scales",
    "codec",
    "index_format",
    "kv_format",
]

NOPE_GROUP = 64  # NoPE dims that share one ue8m0 scale
FP4_GROUP = 32  # index-key dims that share one ue8m0 scale
SCALE_ALIGN = 8  # scale bytes of a KV row are padded to this
FP8_FLOOR = 1e-4  # least magnitude that a group of e4m3 codes is taken to have
FP4_FLOOR = 6 * 2.0**-126


@dataclasses.dataclass(frozen=True)
class FormatSpec:
    """An entry of the tables.

    Attributes:
        module: the codec, an importable module, imported when it is first used: `encode(fmt, x)` takes float rows
            [..., dim] to the parts [..., width], `decode(fmt, parts, dtype)` back to [..., dim] of `dtype`.
        parts: (dim, rope_dim) -> the parts of a row. `rope_dim` is 0 for index keys.
        needs_rotation: see `RowFormat`.
    """

    module: str
    parts: Callable[[int, int], tuple[Part, ...]]
    needs_rotation: bool = False


def _fp8(dim: int, rope_dim: int) -> tuple[Part, ...]:
    nope = dim - rope_dim
    groups = -(-nope // NOPE_GROUP)
    return (
        Part("nope", "uint8", nope, Codes("e4m3", nope)),
        Part("rope", "uint16", rope_dim, Codes("bf16", rope_dim)),
        Part("scale", "uint8", -(-groups // SCALE_ALIGN) * SCALE_ALIGN, Scales("ue8m0", NOPE_GROUP, FP8_FLOOR)),
    )


def _fp8_per_entry(dim: int, rope_dim: int) -> tuple[Part, ...]:
    nope = dim - rope_dim
    return (
        Part("nope", "uint8", nope, Codes("e4m3", nope)),
        Part("rope", "uint16", rope_dim, Codes("bf16", rope_dim)),
        Part("inv_scale", "float32", 1, Scales("absmax", nope, FP8_FLOOR)),
    )


def _index_fp4(dim: int, _: int) -> tuple[Part, ...]:
    return (
        Part("codes", "uint8", dim // 2, Codes("e2m1", dim)),
        Part("scale", "uint8", -(-dim // FP4_GROUP), Scales("ue8m0", FP4_GROUP, FP4_FLOOR)),
    )


def _index_fp8(dim: int, _: int) -> tuple[Part, ...]:
    return (
        Part("codes", "uint8", dim, Codes("e4m3", dim)),
        Part("scale", "float32", 1, Scales("power_of_two", dim, FP8_FLOOR)),
    )


def _bf16(dim: int, _: int) -> tuple[Part, ...]:
    return (Part("row", "uint16", dim, Codes("bf16", dim)),)


def _f32(dim: int, _: int) -> tuple[Part, ...]:
    return (Part("row", "float32", dim, Codes("f32", dim)),)


KV_FORMATS: dict[str, FormatSpec] = {
    "fp8": FormatSpec(f"{__name__}.fp8", _fp8),
    "fp8_per_entry": FormatSpec(f"{__name__}.fp8_per_entry", _fp8_per_entry),
    "bf16": FormatSpec(f"{__name__}.plain", _bf16),
    "f32": FormatSpec(f"{__name__}.plain", _f32),
}

INDEX_FORMATS: dict[str, FormatSpec] = {
    "fp4": FormatSpec(f"{__name__}.index_fp4", _index_fp4, needs_rotation=True),
    "fp8": FormatSpec(f"{__name__}.index_fp8", _index_fp8, needs_rotation=True),
    "bf16": FormatSpec(f"{__name__}.plain", _bf16),
    "f32": FormatSpec(f"{__name__}.plain", _f32),
}


def kv_format(name: str, head_dim: int, rope_dim: int) -> RowFormat:
    """Returns the stored form of a KV row. Raises `LayoutError`: no such name, or the format has no row of these
    widths."""
    return _lookup(KV_FORMATS, "KV row", name, head_dim, rope_dim)


def index_format(name: str, dim: int) -> RowFormat:
    """Returns the stored form of an index key. Raises `LayoutError`: no such name, or the format has no key of this
    width."""
    return _lookup(INDEX_FORMATS, "index key", name, dim, 0)


def codec(fmt: RowFormat) -> ModuleType:
    """Returns the jnp codec module of a format (imports jax). Raises `LayoutError`: there is none."""
    return _codec(fmt.name, fmt.module)


@functools.cache
def _codec(name: str, module: str) -> ModuleType:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise LayoutError(f"row format {name!r}: its codec {module!r} cannot be imported: {error}") from error
    for function in ("encode", "decode"):
        if not callable(getattr(found, function, None)):
            raise LayoutError(f"row format {name!r}: its codec {module!r} has no function {function!r}")
    return found


def _lookup(table: dict[str, FormatSpec], what: str, name: str, dim: int, rope_dim: int) -> RowFormat:
    if not isinstance(name, str) or name not in table:
        raise LayoutError(f"unknown {what} format {shown(name)}, expected one of {sorted(table)}")
    spec = table[name]
    return RowFormat(name, dim, rope_dim, spec.parts(dim, rope_dim), spec.module, spec.needs_rotation)
