"""FlashMLA's page of FP8 rows: the same bytes as the `fp8` format, arranged for its sparse decode kernel.

A page of b entries is `[b x data][b x scales][padding]` (DeepSeek-V4 "MODEL1" layout): the data of
an entry are its e4m3 NoPE bytes and then its bf16 RoPE bytes (little endian), its scales the 8
ue8m0 bytes; the page is padded with zeros to a multiple of the data of one entry. At V4 widths
that is 576 + 8 bytes an entry: 37440 bytes for 64 entries (CSA, 256-token blocks), 1728 for 2 (HCA).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import LayoutError, ShapeError
from . import NOPE_GROUP, Codes, RowFormat, Scales

__all__ = ["pack_pages", "page_bytes", "unpack_pages"]

Parts = tuple[jax.Array, jax.Array, jax.Array]


def page_bytes(fmt: RowFormat, entries: int) -> int:
    """Returns bytes of a page of `entries` rows. Raises `LayoutError`: rows of `fmt` hold something else."""
    data, scales = _entry_bytes(fmt)
    return -(-entries * (data + scales) // data) * data


def pack_pages(fmt: RowFormat, parts: Parts, entries: int) -> jax.Array:
    """Packs the stored parts of consecutive rows into pages.

    Args:
        fmt: of the stored rows: e4m3 codes, bf16 codes, ue8m0 scales, as "fp8" KV rows are.
        parts: nope uint8 [rows, nope_dim], rope uint16 [rows, rope_dim], scale uint8 [rows, s], as the
            pools hold them.
        entries: rows per page; must divide `rows`.

    Returns:
        [rows / entries, page_bytes] uint8.

    Raises:
        LayoutError: the rows hold something else.
        ShapeError: the rows do not fill whole pages.
    """
    nope, rope, scale = parts
    size = page_bytes(fmt, entries)
    if nope.shape[0] % entries:
        raise ShapeError(f"{nope.shape[0]} rows do not fill pages of {entries}")
    pages = nope.shape[0] // entries
    rope_bytes = lax.bitcast_convert_type(rope, jnp.uint8).reshape(rope.shape[0], -1)
    data = jnp.concatenate([nope, rope_bytes], -1).reshape(pages, -1)
    used = jnp.concatenate([data, scale.reshape(pages, -1)], -1)
    return jnp.pad(used, ((0, 0), (0, size - used.shape[-1])))


def unpack_pages(fmt: RowFormat, pages: jax.Array, entries: int) -> Parts:
    """Undoes `pack_pages`: [pages, page_bytes] uint8 -> parts of `pages * entries` rows.

    Raises:
        LayoutError: the rows hold something else.
        ShapeError: the pages have another size.
    """
    size = page_bytes(fmt, entries)
    if pages.shape[-1] != size:
        raise ShapeError(f"pages of {entries} entries have {size} bytes, got {pages.shape[-1]}")
    data, scales = _entry_bytes(fmt)
    rows = pages.shape[0] * entries
    entry = pages[:, : entries * data].reshape(rows, data)
    rope = entry[:, fmt.nope_dim :].reshape(rows, fmt.rope_dim, 2)
    scale = pages[:, entries * data : entries * (data + scales)].reshape(rows, scales)
    return entry[:, : fmt.nope_dim], lax.bitcast_convert_type(rope, jnp.uint16), scale


def _entry_bytes(fmt: RowFormat) -> tuple[int, int]:
    """Returns the bytes of data and of scales of one entry."""
    match fmt.holds:
        case Codes("e4m3"), Codes("bf16"), Scales("ue8m0", group) if group == NOPE_GROUP:
            nope, rope, scale = fmt.parts
            return nope.bytes + rope.bytes, scale.bytes
    raise LayoutError(
        f"FlashMLA pages hold e4m3 and bf16 codes with a ue8m0 scale per {NOPE_GROUP}, {fmt.name!r} rows are "
        f"{fmt.contents}"
    )
