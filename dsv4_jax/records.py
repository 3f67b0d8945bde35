"""What a host record holds: one unit of every leaf of a scope, over all layers, as contiguous bytes. Imports no jax.

A block record is one block (its CSA, HCA and index rows of all layers), a snapshot record one slot (window and
compressor state). Leaves follow each other in the layout's order, a leaf's layers in theirs. Each *piece* (one
layer's rows of one leaf, as they lie in the leaf) starts at a multiple of 16 bytes; what a piece leaves of its last
16 bytes, and the record's tail, is zero. So equal blocks have equal record bytes, and a record can be hashed, stored
and sent as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

from .layout import CacheLayout, LeafSpec

__all__ = ["ALIGNMENT", "Piece", "RecordFormat", "block_record", "record_format", "snapshot_record"]

WORD = 16  # every piece starts at a multiple: the width of one access of the kernels
ALIGNMENT = 128  # every record does: what one PCIe write carries

RecordScope = Literal["block", "slot"]


class Piece(NamedTuple):
    """Where a leaf lies in a record: `layers` pieces of `bytes` bytes, `stride` apart, from `offset` on."""

    leaf: LeafSpec
    bytes: int
    offset: int

    @property
    def layers(self) -> int:
        return self.leaf.layers

    @property
    def stride(self) -> int:
        return -(-self.bytes // WORD) * WORD


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """The bytes of a record.

    Attributes:
        scope: "block" or "slot".
        pieces: one per leaf of that scope, in the layout's order; empty if the layout has none (SWA only).
        bytes: of a whole record, a multiple of `ALIGNMENT` (0 without leaves).
    """

    scope: RecordScope
    pieces: tuple[Piece, ...]
    bytes: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        """(layers, piece bytes, offset) of every leaf, one after the other: what the native handlers read."""
        return tuple(n for piece in self.pieces for n in (piece.layers, piece.bytes, piece.offset))


@functools.lru_cache(maxsize=64)
def record_format(layout: CacheLayout, scope: RecordScope) -> RecordFormat:
    """The record of one block or slot of this layout."""
    pieces, end = [], 0
    for leaf in layout.leaves:
        if leaf.scope == scope:
            pieces.append(Piece(leaf, leaf.rows * leaf.row_bytes, end))
            end += pieces[-1].layers * pieces[-1].stride
    return RecordFormat(scope, tuple(pieces), -(-end // ALIGNMENT) * ALIGNMENT)


def block_record(layout: CacheLayout) -> RecordFormat:
    """The record of one block."""
    return record_format(layout, "block")


def snapshot_record(layout: CacheLayout) -> RecordFormat:
    """The record of one slot: its window and compressor state."""
    return record_format(layout, "slot")
