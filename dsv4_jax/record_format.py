"""How the bytes of a host record are laid out: pieces of leaves, and which rows each holds. Imports no jax."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

from .layout import LeafSpec

__all__ = ["DensePiece", "Piece", "Positions", "RecordFormat"]

WORD = 16  # every piece starts at a multiple: the width of one access of the kernels
ALIGNMENT = 128  # every record does: what one PCIe write carries

RecordScope = Literal["block", "slot"]


class Positions(NamedTuple):
    """Whose rows a piece holds of a request with n tokens: row k that of position n // ratio * ratio - before + k.

    It lies at row position mod R of a ring of R rows. It is dead if the position is not in 0..n-1, and if `unfinished`
    is not 0 and n is a multiple of it.
    """

    ratio: int
    before: int
    unfinished: int = 0


class Piece(NamedTuple):
    """Some bytes of some rows of a leaf, in every layer of it.

    Attributes:
        leaf: whose rows.
        rows: of a layer.
        column, width: the first byte of a row that is in the record, and how many are.
        offset: where the first layer begins in the record; the next ones follow `stride` apart.
        positions: which rows; None: the first ones of a unit.
    """

    leaf: LeafSpec
    rows: int
    column: int
    width: int
    offset: int
    positions: Positions | None = None

    @property
    def layers(self) -> int:
        return self.leaf.layers

    @property
    def bytes(self) -> int:
        """Bytes of one layer of the piece."""
        return self.rows * self.width

    @property
    def stride(self) -> int:
        return -(-self.bytes // WORD) * WORD


class DensePiece(Piece):
    """A piece whose layers follow each other without a gap."""

    __slots__ = ()

    @property
    def stride(self) -> int:
        return self.bytes


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """How the bytes of a record are laid out.

    Attributes:
        scope: "block" or "slot".
        pieces: in their order; empty for the blocks of a layout that has none (SWA only).
        bytes: of a whole record, a multiple of `ALIGNMENT` (0 without pieces).
    """

    scope: RecordScope
    pieces: tuple[Piece, ...]
    bytes: int

    @functools.cached_property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """The leaves that the pieces are of."""
        return tuple(dict.fromkeys(piece.leaf for piece in self.pieces))

    @functools.cached_property
    def descriptors(self) -> tuple[int, ...]:
        """Eleven numbers a piece, one piece after the other: what the native handlers read (csrc/swap/swap.h).

        Its leaf among `leaves`, layers, rows of a unit in the leaf, bytes of a row, column, rows, width, offset, and
        the three of its positions, zeros without. Whole units are one wide row.
        """
        return tuple(
            n for piece in self.pieces for n in (self.leaves.index(piece.leaf), piece.layers, *_numbers(piece))
        )


def _numbers(piece: Piece) -> tuple[int, ...]:
    ring, row_bytes, rows, width = piece.leaf.rows, piece.leaf.row_bytes, piece.rows, piece.width
    if piece.positions is None:
        ring, row_bytes, rows, width = 1, ring * row_bytes, 1, rows * width
    return ring, row_bytes, piece.column, rows, width, piece.offset, *(piece.positions or (0, 0, 0))
