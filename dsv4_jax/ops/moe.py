"""moe: the routed experts of a feed-forward layer, with FP4 weights that stay as released (`formats.weights.fp4`)."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

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

__all__ = ["IMPLEMENTATION", "PARTS", "ExpertSums", "MoeArguments", "moe", "reference"]

PARTS = 8  # of all experts: each is summed by itself, and the parts by a binary tree
_TURN = 8  # rows of gates, then as many of ups: `fp4.gate_up_rows`


@dataclasses.dataclass(frozen=True)
class MoeArguments:
    """Holds what an implementation of `moe` is given, as in its arguments."""

    x: jax.Array
    chosen: jax.Array
    share: jax.Array
    gate_up: jax.Array
    down: jax.Array
    limit: float
    first: int
    routed: int
    shards: int

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
    check = Check("moe")
    x = check.array("x", x, "float", "T", "hidden")
    chosen, share = check.array("chosen", chosen, "int32", "T", "top"), check.array("share", share, "float", "T", "top")
    gate_up = check.array("gate_up", gate_up, "uint8", "experts", "tiles", "steps", TILE_BYTES)
    down = check.array("down", down, "uint8", "experts", "tiles of down", "steps of down", TILE_BYTES)
    hidden, inter = x.shape[1], down.shape[2] * TILE_COLUMNS
    wanted = (2 * inter // TILE_ROWS, hidden // TILE_COLUMNS, hidden // TILE_ROWS)
    if hidden % TILE_COLUMNS or (*gate_up.shape[1:3], down.shape[1]) != wanted:
        raise ShapeError(
            f"moe: x has {hidden} columns; gate_up {list(gate_up.shape)} and down {list(down.shape)} are not experts "
            f"of {hidden} x {inter}"
        )
    here = down.shape[0]
    if not here:
        raise ShapeError("moe: gate_up and down hold no experts, expected at least one")
    if not isinstance(limit, numbers.Real) or not limit >= 0:
        raise ShapeError(f"moe: limit is {shown(limit)}, expected a number >= 0")
    last = INT32_MAX - here
    if routed is not None:
        last = check_integer("moe: routed", routed, here, INT32_MAX, error=ShapeError) - here
    shards = check_integer("moe: shards", shards, 1, INT32_MAX, error=ShapeError)
    if x.shape[0] % shards:
        raise ShapeError(f"moe: {x.shape[0]} tokens are not those of {shards} devices")
    if isinstance(first, jax.Array):
        chosen, first = chosen - check.array("first", first, "int32"), 0  # a kernel's `first` is static
    first = check_integer("moe: first", first, 0, last, error=ShapeError)
    routed = here if routed is None else int(routed)
    return run("moe", MoeArguments(x, chosen, share, gate_up, down, limit, first, routed, shards), implementation)


def reference(arguments: MoeArguments) -> jax.Array:
    """Computes `moe` in `jnp`: every expert that is here, dequantised, on every token; those that chose it keep the
    result."""
    x, chosen = arguments.x.astype(jnp.bfloat16), arguments.chosen
    share = arguments.share.astype(jnp.float32)

    def product(x: jax.Array, tiles: jax.Array) -> jax.Array:
        weights = fp4.decode(*fp4.unpack(tiles))
        each = x.reshape(arguments.shards, x.shape[0] // arguments.shards, x.shape[1])
        out = lax.map(lambda x: jnp.einsum("tk,nk->tn", x, weights, preferred_element_type=jnp.float32), each)
        return out.reshape(x.shape[0], weights.shape[0])

    def add(sums: ExpertSums, expert: tuple[jax.Array, ...]) -> tuple[ExpertSums, None]:
        number, done, gate_up, down = expert
        both = product(x, gate_up).reshape(x.shape[0], arguments.inter // _TURN, 2, _TURN)
        hidden = clamped_swiglu(both[:, :, 0], both[:, :, 1], arguments.limit).reshape(x.shape[0], arguments.inter)
        result, counts = product(hidden.astype(jnp.bfloat16), down), chosen == number
        part = jnp.where(counts, share, np.float32(0)).sum(1)[:, None] * result
        return sums.add(jnp.where(counts.any(1)[:, None], part, np.float32(0)), done), None

    here = arguments.down.shape[0]
    numbers = jnp.arange(arguments.first, arguments.first + here, dtype=jnp.int32)
    experts = numbers, ExpertSums.done(here, arguments.routed), arguments.gate_up, arguments.down
    return lax.scan(add, ExpertSums.zeros(x.shape), experts)[0].total()


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
