"""What a stored row is made of, stated as facts that kernels go by.

A row is stored as a few *parts*, each a column block of its own pool leaf, so that every part stays aligned (a row of
584 bytes would not be) and keeps a plain unsigned carrier dtype. A part holds codes of the row's values, or scales of
those codes. A kernel asks for parts, never for the name of a format: two formats with equal parts are the same to it,
and a format with other parts falls through to the reference, which calls the format's codec.

The name of a code or scale stands for its whole arithmetic. A codec that rounds otherwise names its codes otherwise,
in words of its own: no kernel takes those for something else.

| codes | an element           | its values                                                                  |
| e4m3  | uint8                | float8_e4m3fn, rounded to nearest even, clipped to +-448; NaN is 0x7F        |
| e2m1  | uint8, two values    | the first in the low nibble; rounded to nearest even, clipped to +-6; no NaN |
| bf16  | uint16               | rounded to nearest even; NaN is 0x7FC0                                       |
| f32   | float32              | as they are                                                                  |

| scales       | an element | by m, the largest magnitude of a group and the floor                        |
| ue8m0        | uint8      | the least 2^k that brings m into the codes' range, stored as k + 127; 0xFF:  |
|              |            | the group has a NaN, of codes that have none                                |
| power_of_two | float32    | the same 2^k                                                                |
| absmax       | float32    | m * (1 / 448), for e4m3 codes of x * (448 / m)                              |

For m a NaN does not count, and Inf is the largest float32.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..checks import check_integer, shown
from ..errors import LayoutError

__all__ = ["Codes", "Part", "RowFormat", "Scales"]

CARRIERS = ("uint8", "uint16", "uint32", "float32")
UNQUANTISED = ("bf16", "f32")
# Codes -> (carrier, values of one element); scales -> carrier. Of names that are not here, nothing is known.
_CODES = {"e4m3": ("uint8", 1), "e2m1": ("uint8", 2), "bf16": ("uint16", 1), "f32": ("float32", 1)}
_SCALES = {"ue8m0": "uint8", "power_of_two": "float32", "absmax": "float32"}


@dataclasses.dataclass(frozen=True)
class Codes:
    """Codes of `dims` values of the row. The codes of a row follow each other in the order of its dims."""

    code: str
    dims: int

    def __post_init__(self) -> None:
        check_integer(f"{self.code} codes", self.dims, 1, error=LayoutError)

    def __str__(self) -> str:
        return f"{self.dims} {self.code}"


@dataclasses.dataclass(frozen=True)
class Scales:
    """Scales of the row's quantised codes, one for each `group` of them, the last group perhaps shorter.

    Attributes:
        code: what a scale is.
        group: dims that share one.
        floor: least magnitude that a group is taken to have.
    """

    code: str
    group: int
    floor: float

    def __post_init__(self) -> None:
        check_integer(f"group of {self.code} scales", self.group, 1, error=LayoutError)

    def __str__(self) -> str:
        return f"{self.code} per {self.group} (floor {self.floor:g})"


@dataclasses.dataclass(frozen=True)
class Part:
    """One column block of a stored row. Parts are equal if they hold the same, whatever their names.

    Attributes:
        name: of its leaf in a pool, an identifier.
        dtype: of its carrier: "uint8", "uint16", "uint32" or "float32".
        width: elements of a row.
        holds: what they are; None: something else, that only the format's codec knows.

    Raises:
        LayoutError: a field is none of these, or codes that are known are kept in another carrier or width.
    """

    name: str = dataclasses.field(compare=False)
    dtype: str
    width: int
    holds: Codes | Scales | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise LayoutError(f"part {shown(self.name)}: its name must be an identifier")
        if self.dtype not in CARRIERS:
            raise LayoutError(f"part {self.name!r}: carrier {shown(self.dtype)}, expected one of {list(CARRIERS)}")
        check_integer(f"width of part {self.name!r}", self.width, 1, error=LayoutError)
        match self.holds:
            case Codes(code, dims) if code in _CODES:
                carrier, values = _CODES[code]
                if (self.dtype, self.width * values) != (carrier, dims):
                    raise LayoutError(
                        f"part {self.name!r}: {dims} {code} codes are {carrier}, {values} to an element, "
                        f"got {self.dtype}[{self.width}]"
                    )
            case Scales(code) if self.dtype != _SCALES.get(code, self.dtype):
                raise LayoutError(f"part {self.name!r}: {code} scales are {_SCALES[code]}, got {self.dtype}")

    def __str__(self) -> str:
        if self.holds is None:
            return f"{self.width} {self.dtype}"
        return str(self.holds) if isinstance(self.holds, Codes) else f"{self.width} {self.holds}"

    @property
    def bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How a row of `dim` values (the last `rope_dim` of them rotary) is stored.

    Attributes:
        name: under which a table has it.
        dim: values of a row.
        rope_dim: how many of them, the last, carry RoPE and may be kept apart; 0 for index keys.
        parts: what is stored: codes in the order of the dims, then scales.
        module: the codec, an importable module.
        needs_rotation: whether rows are to be rotated by a Hadamard matrix before they are stored, and queries with
            them, as V4's quantised index keys are.

    Raises:
        LayoutError: no parts, two of one name, or parts that do not hold the row.
    """

    name: str
    dim: int
    rope_dim: int
    parts: tuple[Part, ...]
    module: str
    needs_rotation: bool = False

    def __post_init__(self) -> None:
        if not self.parts or len({part.name for part in self.parts}) != len(self.parts):
            raise LayoutError(f"row format {self.name!r}: needs parts, each of a name of its own")
        codes = [part.holds for part in self.parts if isinstance(part.holds, Codes)]
        known = all(part.holds for part in self.parts)
        if known and sum(c.dims for c in codes) != self.dim:
            raise LayoutError(f"row format {self.name!r}: {self.contents} do not hold {self.dim} values")
        for part in self.parts:
            if isinstance(part.holds, Scales) and part.width < self.groups(part.holds):
                raise LayoutError(f"row format {self.name!r}: {self.contents} are too few scales")

    @property
    def nope_dim(self) -> int:
        return self.dim - self.rope_dim

    @property
    def row_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def holds(self) -> tuple[Codes | Scales | None, ...]:
        """What each part holds."""
        return tuple(part.holds for part in self.parts)

    @property
    def scales(self) -> tuple[Scales, ...]:
        """The scales among what the parts hold."""
        return tuple(x for x in self.holds if isinstance(x, Scales))

    def groups(self, scales: Scales) -> int:
        """How many scales a row needs. A part may have more elements: those are zeros."""
        scaled = (x.dims for x in self.holds if isinstance(x, Codes) and x.code not in UNQUANTISED)
        return -(-sum(scaled) // scales.group)

    @property
    def padded(self) -> bool:
        """Whether a part has more scales than the row needs."""
        return any(isinstance(p.holds, Scales) and p.width > self.groups(p.holds) for p in self.parts)

    @property
    def quantised(self) -> bool:
        """Whether some values are kept in less than bf16."""
        return not all(isinstance(x, Codes) and x.code in UNQUANTISED for x in self.holds)

    @property
    def dense_dtype(self) -> str:
        """The narrowest dtype that values of rows are read in as they were stored: "float32" or "bfloat16"."""
        return "float32" if all(isinstance(x, Codes) and x.code == "f32" for x in self.holds) else "bfloat16"

    @property
    def contents(self) -> str:
        """What the parts hold, in words: "448 e4m3, 64 bf16, 8 ue8m0 per 64 (floor 0.0001)"."""
        return ", ".join(map(str, self.parts))
