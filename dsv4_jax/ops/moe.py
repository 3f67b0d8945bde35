"""moe: the routed experts of a feed-forward layer, with FP4 weights that stay as released (`formats.weights.fp4`)."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import INT32_MAX, check_integer, shown
from ..errors import ShapeError
from ..formats.weights import fp4
from ..formats.weights.fp4 import TILE_BYTES, TILE_COLUMNS, TILE_ROWS
from .arguments import Check
from .numerics import clamped_swiglu
from .registry import Choice, Implementation, run

__all__ = [
    "IMPLEMENTATION",
    "PARTS",
    "ExpertSums",
    "MoeArguments",
    "Product",
    "checked",
    "gates_and_ups",
    "moe",
    "reference",
    "summed",
]

PARTS = 8  # of all experts: each is summed by itself, and the parts by a binary tree
_TURN = 8  # rows of gates, then as many of ups: `fp4.gate_up_rows`


@dataclasses.dataclass(frozen=True)
class MoeArguments:
    """Holds what an implementation of `moe` or of `moe_e4m3` is given, as in their arguments."""

    x: jax.Array
    chosen: jax.Array
    share: jax.Array
    gate_up: jax.Array
    down: jax.Array
    limit: float
    first: int
    routed: int
    shards: int
    beside: jax.Array | None = None

    @property
    def empty(self) -> bool:
        return self.chosen.size == 0

    @property
    def inter(self) -> int:
        """Width between the two products."""
        return self.down.shape[2] * TILE_COLUMNS


def moe(
    x: jax.Array,
    chosen: jax.Array,
    share: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    limit: float,
    first: int | jax.Array = 0,
    routed: int | None = None,
    shards: int = 1,
    implementation: Choice = None,
) -> jax.Array:
    """Each token's experts times their shares, added in a fixed order (`ExpertSums`): [T, hidden] float32.

    An expert is down @ (silu(min(gate, limit)) * clip(up, -limit, limit)) with gate and up its first two matrices times
    the token. Sums are float32; what lies between the products is rounded to bf16. A token's bits depend on the token,
    its experts and their shares: not on its neighbours, and in the CUDA kernel not on their number either (XLA's
    products of another number of rows may round otherwise).

    Args:
        x: [T, hidden] float, taken in bf16.
        chosen: [T, top] int32, a token's experts, of all `routed`. What is no expert adds nothing; one that is named
            twice counts with both shares.
        share: [T, top] float, what each counts.
        gate_up: [experts, inter / 32, hidden / 128, 4352] uint8, packed: gates and ups, eight rows of each in turn
            (`formats.weights.fp4.gate_up_rows`), of the experts that are here.
        down: [experts, hidden / 64, inter / 128, 4352] uint8, packed.
        limit: of the SwiGLU: gates are clamped above, ups on both sides.
        first: number of the first expert that is here, int32 if it is an array; what others would add is left out.
        routed: how many experts there are on all devices; None: those here. Devices with 1 / n of them each, n a power
            of two up to `PARTS`, give sums of which `ops.sum_to_owner` makes, bit by bit, what one device gives.
        shards: so many devices' tokens follow one another. XLA's products take each device's by themselves, so that
            they round as they would there.

    Raises:
        ShapeError: an argument has the wrong shape or dtype, or a number is not of its range; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    return run("moe", checked("moe", x, chosen, share, gate_up, down, limit, first, routed, shards), implementation)


def checked(
    op: str,
    x: jax.Array,
    chosen: jax.Array,
    share: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    limit: float,
    first: int | jax.Array,
    routed: int | None,
    shards: int,
) -> MoeArguments:
    """Returns the record of the experts of an op of this name; raises as `moe`."""
    check = Check(op)
    x = check.array("x", x, "float", "T", "hidden")
    chosen, share = check.array("chosen", chosen, "int32", "T", "top"), check.array("share", share, "float", "T", "top")
    gate_up = check.array("gate_up", gate_up, "uint8", "experts", "tiles", "steps", TILE_BYTES)
    down = check.array("down", down, "uint8", "experts", "tiles of down", "steps of down", TILE_BYTES)
    hidden, inter = x.shape[1], down.shape[2] * TILE_COLUMNS
    wanted = (2 * inter // TILE_ROWS, hidden // TILE_COLUMNS, hidden // TILE_ROWS)
    if hidden % TILE_COLUMNS or (*gate_up.shape[1:3], down.shape[1]) != wanted:
        raise ShapeError(
            f"{op}: x has {hidden} columns; gate_up {list(gate_up.shape)} and down {list(down.shape)} are not "
            f"experts of {hidden} x {inter}"
        )
    here = down.shape[0]
    if not here:
        raise ShapeError(f"{op}: gate_up and down hold no experts, expected at least one")
    if not isinstance(limit, numbers.Real) or not limit >= 0:
        raise ShapeError(f"{op}: limit is {shown(limit)}, expected a number >= 0")
    last = INT32_MAX - here
    if routed is not None:
        last = check_integer(f"{op}: routed", routed, here, INT32_MAX, error=ShapeError) - here
    shards = check_integer(f"{op}: shards", shards, 1, INT32_MAX, error=ShapeError)
    if x.shape[0] % shards:
        raise ShapeError(f"{op}: {x.shape[0]} tokens are not those of {shards} devices")
    if isinstance(first, jax.Array):
        chosen, first = chosen - check.array("first", first, "int32"), 0  # a kernel's `first` is static
    first = check_integer(f"{op}: first", first, 0, last, error=ShapeError)
    routed = here if routed is None else int(routed)
    return MoeArguments(x, chosen, share, gate_up, down, limit, first, routed, shards)


def reference(arguments: MoeArguments) -> jax.Array:
    """Computes `moe` in `jnp`: every expert that is here, dequantised, on every token; those that chose it keep the
    result."""
    x = arguments.x.astype(jnp.bfloat16)

    def expert(multiply: Product, share: jax.Array) -> jax.Array:
        gate, up = gates_and_ups(multiply(x, 0))
        return share[:, None] * multiply(clamped_swiglu(gate, up, arguments.limit).astype(jnp.bfloat16), 1)

    return summed(arguments, expert, fp4)


Product: TypeAlias = Callable[[jax.Array, int], jax.Array]


def gates_and_ups(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first product's columns [T, 2 inter], taken apart: [T, inter] twice."""
    tokens, width = rows.shape
    both = rows.reshape(tokens, width // (2 * _TURN), 2, _TURN)
    gate, up = (both[:, :, i].reshape(tokens, width // 2) for i in (0, 1))
    return gate, up


def summed(arguments: MoeArguments, expert: Callable[[Product, jax.Array], jax.Array], codec: ModuleType) -> jax.Array:
    """The sum over the experts that are here of what each gives to tokens, [T, hidden], where they chose it.

    `expert(multiply, share)`: its part, with every token's share [T] of it; `multiply(x, i)` multiplies bf16 rows by
    its first or second matrix, dequantised.
    """
    tokens, chosen, share = arguments.x.shape[0], arguments.chosen, arguments.share.astype(jnp.float32)

    def product(x: jax.Array, tiles: jax.Array) -> jax.Array:
        weights = codec.decode(*codec.unpack(tiles))
        each = x.reshape(arguments.shards, tokens // arguments.shards, x.shape[1])
        out = lax.map(lambda x: jnp.einsum("tk,nk->tn", x, weights, preferred_element_type=jnp.float32), each)
        return out.reshape(tokens, weights.shape[0])

    def add(sums: ExpertSums, given: tuple[jax.Array, ...]) -> tuple[ExpertSums, None]:
        number, done, *matrices = given
        counts = chosen == number
        part = expert(lambda x, i: product(x, matrices[i]), jnp.where(counts, share, np.float32(0)).sum(1))
        return sums.add(jnp.where(counts.any(1)[:, None], part, np.float32(0)), done), None

    here = arguments.down.shape[0]
    numbers = jnp.arange(arguments.first, arguments.first + here, dtype=jnp.int32)
    experts = numbers, ExpertSums.done(here, arguments.routed), arguments.gate_up, arguments.down
    return lax.scan(add, ExpertSums.zeros(arguments.x.shape), experts)[0].total()


class ExpertSums(NamedTuple):
    """A sum over experts on its way. A pytree.

    All experts there are make `PARTS` parts of equal size; in each they are added in their order, and the parts by a
    binary tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).

    Attributes:
        part, pair, quarter, whole: float32, of the part, the pair of parts ... that is being summed.
    """

    part: jax.Array
    pair: jax.Array
    quarter: jax.Array
    whole: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> ExpertSums:
        return cls(*(jnp.zeros(shape, jnp.float32) for _ in cls._fields))

    @staticmethod
    def done(here: int, routed: int) -> jax.Array:
        """[here] int32: how many levels of the tree are complete before each of a device's experts is added."""
        parts = np.arange(here) * PARTS // routed
        return jnp.asarray([0, *(int(x).bit_length() for x in parts[1:] ^ parts[:-1])], jnp.int32)

    def add(self, value: jax.Array, done: jax.Array) -> ExpertSums:
        """Adds an expert's part. What it gives nobody must be +0."""
        sums = self._carried(lambda level: done > level)
        return sums._replace(part=sums.part + value)

    def total(self) -> jax.Array:
        return self._carried(lambda level: np.True_).whole

    def _carried(self, complete: Callable[[int], Any]) -> ExpertSums:
        sums = list(self)
        for level in range(len(sums) - 1):
            up, zero = complete(level), np.float32(0)
            sums[level + 1] += jnp.where(up, sums[level], zero)
            sums[level] = jnp.where(up, zero, sums[level])
        return ExpertSums(*sums)


IMPLEMENTATION = Implementation("moe", "xla", reference)
