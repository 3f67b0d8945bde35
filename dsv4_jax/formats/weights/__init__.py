"""The table of weight formats: how a checkpoint and a device hold a matrix [rows, columns].

| format | as released                                              | on the device                             | bits |
| fp8    | e4m3 codes, an e8m0 scale per 128 x 128                  | codes in tiles of 64 x 128; scales as is  | 8.0  |
| fp4    | e2m1 codes, two a byte, an e8m0 scale per row and 32     | both in tiles of 64 x 128                 | 4.25 |

Each is there once more, `fp8_e4m3` and `fp4_e4m3`, in the order in which products with rows of e4m3
(`formats.activations`) read it; which form a matrix is held in says what its products round rows to.

The device holds the released bits in another order, the one in which the CUDA kernels read them; a format's codec, the
module that its entry names (`fp8`, `fp4`), packs them so in `jnp`, and is the contract of the kernels. An e8m0 scale is
2^(code - 127). Nothing here imports jax.

Sources: the released checkpoints (`F8_E4M3` and `I8` tensors with `F8_E8M0` scales beside them), OCP MX for e2m1.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from types import ModuleType

from ...errors import ShapeError

__all__ = ["WEIGHT_FORMATS", "WeightFormat", "WeightPart"]


@dataclasses.dataclass(frozen=True)
class WeightPart:
    """One array of bytes of a packed matrix.

    Attributes:
        name: what it holds.
        rows, columns: how many of the matrix's share an index of its first two axes.
        bytes: those of one index, its third axis; 0: there is no such axis, and it is one byte.
    """

    name: str
    rows: int
    columns: int
    bytes: int = 0

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the shape that this part has of a matrix [rows, columns]."""
        return (-(-rows // self.rows), columns // self.columns, *([self.bytes] if self.bytes else []))


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How a matrix is stored.

    Attributes:
        name: under which the table has it.
        code: of an element.
        per_byte: codes in a byte, neighbours in a row, the first lowest.
        block: rows and columns that share a scale.
        tile: rows and columns come in multiples of these.
        largest_scale: the greatest scale code that kernels can represent; greater ones, NaN among them, are refused.
        parts: what the device holds.
        rows: what products with such weights take rows in, "bf16" or "e4m3".
        module: the codec, an importable module: `encode` of a float matrix and `decode` to one, of codes and scales as
            released; `pack` to the parts and `unpack`. Matrices may have axes before their two. `draw` gives the parts
            of a random matrix.
    """

    name: str
    code: str
    per_byte: int
    block: tuple[int, int]
    tile: tuple[int, int]
    largest_scale: int
    parts: tuple[WeightPart, ...]
    module: str
    rows: str = "bf16"

    @property
    def codec(self) -> ModuleType:
        """The module that encodes, decodes, packs and unpacks matrices of this format; importing it imports jax."""
        return importlib.import_module(self.module)

    def check(self, what: str, rows: int, columns: int) -> None:
        """Raises `ShapeError`: this format has no matrix of that size."""
        if rows < 1 or columns < 1 or rows % self.tile[0] or columns % self.tile[1]:
            raise ShapeError(
                f"{what} [{rows}, {columns}]: {self.name} weights have rows in {self.tile[0]}s and columns in "
                f"{self.tile[1]}s"
            )

    def released(self, rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of the codes, in bytes, and of the scales, as released."""
        scales = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        return (rows, columns // self.per_byte), scales

    def packed(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of all parts of a matrix [rows, columns]."""
        return tuple(part.shape(rows, columns) for part in self.parts)

    def unpacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the matrix's shape, with the axes before its two, from that of the first part."""
        first = self.parts[0]
        *lead, tiles, steps, _ = shape
        return (*lead, tiles * first.rows, steps * first.columns)

    def bytes(self, rows: int, columns: int) -> int:
        """What a matrix takes on the device."""
        return sum(math.prod(shape) for shape in self.packed(rows, columns))


def _formats(rows: str, suffix: str = "") -> tuple[WeightFormat, WeightFormat]:
    fp8 = WeightPart("codes", 64, 128, 8192), WeightPart("scales", 128, 128)
    fp4 = (WeightPart("tiles", 64, 128, 4352),)
    names = f"fp8{suffix}", f"fp4{suffix}"
    modules = tuple(f"{__name__}.{name}" for name in names)
    return (
        WeightFormat(names[0], "e4m3", 1, (128, 128), (64, 128), 134, fp8, modules[0], rows),
        WeightFormat(names[1], "e2m1", 2, (1, 32), (64, 128), 128, fp4, modules[1], rows),
    )


WEIGHT_FORMATS: dict[str, WeightFormat] = {fmt.name: fmt for fmt in (*_formats("bf16"), *_formats("e4m3", "_e4m3"))}
