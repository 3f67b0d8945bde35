"""Arrays that are made piece by piece where they are to stay.

A tree of these is stacked and packed as one of arrays is, which only moves what is to be made. Then `make` allocates
each array once and writes its pieces into it, so that beside it there is never more than the piece at hand.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["Deferred", "Progress", "join", "lengthened", "make"]

Progress: TypeAlias = Callable[[int, int], None]  # bytes made so far, bytes in all
_BYTES_AHEAD = 2**28  # of pieces that a device may be behind


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An array to be made. A leaf, not a pytree.

    Attributes:
        shape, dtype: as those of an array.
        pieces: (elements, what makes them), one after the other in the array's memory.
    """

    shape: tuple[int, ...]
    dtype: Any
    pieces: tuple[tuple[int, Callable[[], jax.Array]], ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    def reshape(self, *shape: Any) -> Deferred:
        """As of an array; one of the sizes may be -1."""
        given = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
        known = math.prod(n for n in given if n != -1)
        return dataclasses.replace(self, shape=tuple(self.size // known if n == -1 else n for n in given))


def join(parts: Sequence[Any]) -> Any:
    """Arrays, or deferred ones, one after the other along their first axis."""
    first = parts[0]
    if not isinstance(first, Deferred):
        return jnp.concatenate(parts)
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return Deferred(shape, first.dtype, tuple(itertools.chain.from_iterable(part.pieces for part in parts)))


def lengthened(array: Any, rows: int) -> Any:
    """An array, or a deferred one, with so many rows of zeros behind it."""
    if not rows:
        return array
    zeros = functools.partial(jnp.zeros, (rows, *array.shape[1:]), array.dtype)
    if isinstance(array, Deferred):
        shape = (rows, *array.shape[1:])
        return join([array, Deferred(shape, array.dtype, ((math.prod(shape), zeros),))])
    return join([array, zeros()])


def make(tree: Any, progress: Progress | None = None) -> Any:
    """The tree with its deferred arrays made; `progress` is called after every piece."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Deferred)]
    total, done = sum(leaf.nbytes for leaf in leaves), 0

    def tell(made: int) -> None:
        nonlocal done
        done += made
        if progress is not None:
            progress(done, total)

    return jax.tree.map(lambda leaf: _made(leaf, tell) if isinstance(leaf, Deferred) else leaf, tree)


def _made(array: Deferred, tell: Callable[[int], None]) -> jax.Array:
    itemsize, ahead = np.dtype(array.dtype).itemsize, 0
    if len(array.pieces) == 1:
        whole = array.pieces[0][1]().reshape(array.shape).block_until_ready()
        tell(array.nbytes)
        return whole
    width = math.gcd(math.prod(array.shape[1:]), *(size for size, _ in array.pieces))
    whole, start = jnp.zeros(array.shape, array.dtype), 0
    for size, piece in array.pieces:
        whole = _write(whole, piece(), np.int32(start // width), width)
        start, ahead = start + size, ahead + size * itemsize
        if ahead > _BYTES_AHEAD:
            whole.block_until_ready()
            ahead = 0
        tell(size * itemsize)
    return whole.block_until_ready()


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(whole: jax.Array, piece: jax.Array, start: np.int32, width: int) -> jax.Array:
    rows = lax.dynamic_update_slice_in_dim(whole.reshape(-1, width), piece.reshape(-1, width), start, 0)
    return rows.reshape(whole.shape)
