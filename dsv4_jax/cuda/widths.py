"""What the CUDA kernels are compiled for: csrc/common/widths.h says the same to them."""

from __future__ import annotations

from typing import NamedTuple

import jax

from ..formats import RowFormat, index_format, kv_format

__all__ = ["BF16_ROW", "INDEX_ROWS", "KV_ROW", "WIDTHS", "Widths", "unsupported_pairs", "unsupported_rows"]


class Widths(NamedTuple):
    """DeepSeek-V4's sizes that are constants of the kernels.

    Attributes:
        nope, rope: dims of a KV row without and with RoPE.
        index_dim: dims of an index key, of which the last `rope` rotate.
        index_heads: most heads of an index query.
        csa_ratio: tokens of a CSA entry.
    """

    nope: int
    rope: int
    index_dim: int
    index_heads: int
    csa_ratio: int

    @property
    def dim(self) -> int:
        return self.nope + self.rope

    @property
    def rope_pairs(self) -> int:
        return self.rope // 2


WIDTHS = Widths(nope=448, rope=64, index_dim=128, index_heads=64, csa_ratio=4)
# Rows that kernels read and write. The order of all three is that of `Format` in csrc.
KV_ROW = kv_format("fp8", WIDTHS.dim, WIDTHS.rope)
BF16_ROW = kv_format("bf16", WIDTHS.dim, WIDTHS.rope)  # of attend alone
INDEX_ROWS = index_format("fp4", WIDTHS.index_dim), index_format("fp8", WIDTHS.index_dim)


def unsupported_rows(fmt: RowFormat, *rows: RowFormat) -> str | None:
    """Why a kernel for `rows` does not take those of a format, or None: their parts are not the same."""
    if any(fmt.parts == row.parts for row in rows):
        return None
    return f"it is built for rows of {' or of '.join(row.contents for row in rows)}, not of {fmt.contents}"


def unsupported_pairs(inv_freq: jax.Array) -> str | None:
    """Why a kernel that turns V4's pairs of RoPE dims does not turn by these frequencies, or None."""
    pairs = inv_freq.shape[0]
    return None if pairs == WIDTHS.rope_pairs else f"it turns {WIDTHS.rope_pairs} pairs of dims, not {pairs}"
