"""Arrays that are made piece by piece where they are to stay.

A tree of these is stacked and packed as one of arrays is, which only moves what is to be made. Then `make` allocates
each array once and writes its pieces into it, so that beside it there is never more than the piece at hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["Deferred", "Progress", "join", "lengthened", "make"]

Array: TypeAlias = "jax.Array | np.ndarray"
Progress: TypeAlias = Callable[[int, int], None]  # bytes made so far, bytes in all
_BYTES_AHEAD = 2**28  # of pieces that a device may be behind
_FIRST, _DONE = threading.Lock(), set[tuple[Any, ...]]()  # see `_first_alone`


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An array to be made. A leaf, not a pytree.

    Attributes:
        shape, dtype: as those of an array.
        pieces: (elements, what makes them), one after the other in the array's memory; small ones may be of NumPy.
    """

    shape: tuple[int, ...]
    dtype: Any
    pieces: tuple[tuple[int, Callable[[], Array]], ...]

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
        """Returns the array with another shape, one of whose sizes may be -1."""
        given = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
        known = math.prod(n for n in given if n != -1)
        return dataclasses.replace(self, shape=tuple(self.size // known if n == -1 else n for n in given))

    def rows(self, start: int, stop: int) -> Deferred:
        """Returns these rows of the first axis. A piece that they cut is made whole."""
        width = math.prod(self.shape[1:])
        first, last, at, pieces = start * width, stop * width, 0, []
        for size, piece in self.pieces:
            low, high = max(first - at, 0), min(last - at, size)
            if low < high:
                whole = high - low == size
                pieces.append((high - low, piece if whole else functools.partial(_cut, piece, low, high)))
            at += size
        return Deferred((stop - start, *self.shape[1:]), self.dtype, tuple(pieces))


def join(parts: Sequence[Any]) -> Any:
    """Joins arrays, or deferred ones, one after the other along their first axis."""
    first = parts[0]
    if not isinstance(first, Deferred):
        return jnp.concatenate(parts)
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return Deferred(shape, first.dtype, tuple(itertools.chain.from_iterable(part.pieces for part in parts)))


def lengthened(array: Any, rows: int) -> Any:
    """Returns an array, or a deferred one, with so many rows of zeros behind it."""
    if not rows:
        return array
    shape = (rows, *array.shape[1:])
    if isinstance(array, Deferred):
        zeros = functools.partial(np.zeros, shape, array.dtype)
        return join([array, Deferred(shape, array.dtype, ((math.prod(shape), zeros),))])
    return join([array, jnp.zeros(shape, array.dtype)])


def make(tree: Any, progress: Progress | None = None, device: jax.Device | None = None) -> Any:
    """The tree with its deferred arrays made, on the default device if none is named.

    `progress` is called after every piece.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Deferred)]
    total, done = sum(leaf.nbytes for leaf in leaves), 0

    def tell(made: int) -> None:
        nonlocal done
        done += made
        if progress is not None:
            progress(done, total)

    with contextlib.nullcontext() if device is None else jax.default_device(device):
        return jax.tree.map(lambda leaf: _made(leaf, tell, device) if isinstance(leaf, Deferred) else leaf, tree)


def _made(array: Deferred, tell: Callable[[int], None], device: jax.Device | None) -> jax.Array:
    width, whole, start, ahead = _row(array), None, 0, 0
    kind = (device, array.shape[1:], str(array.dtype))
    for piece in _joined(array.pieces, kind):
        with _first_alone((*kind, array.size, piece.shape)):
            if piece.size == array.size:
                whole = jax.device_put(piece.reshape(array.shape), device)
            else:
                whole = jnp.zeros(array.shape, array.dtype, device=device) if whole is None else whole
                whole = _write(whole, jax.device_put(piece, device), np.int32(start // width), width)
        start, ahead = start + piece.size, ahead + piece.nbytes
        if ahead > _BYTES_AHEAD:
            whole.block_until_ready()
            ahead = 0
        tell(piece.nbytes)
    assert whole is not None
    return whole.block_until_ready()


def _row(array: Deferred) -> int:
    """Elements of which all pieces have whole numbers."""
    return math.gcd(math.prod(array.shape[1:]), *(size for size, _ in array.pieces))


def _joined(pieces: tuple[tuple[int, Callable[[], Array]], ...], kind: tuple[Any, ...]) -> Iterator[Array]:
    """The pieces made; those of NumPy that follow one another as one. `kind`: of the array."""
    waiting: list[np.ndarray] = []
    for size, piece in pieces:
        with _first_alone((*kind, size)):
            made = piece()
        if isinstance(made, np.ndarray):
            waiting.append(made.reshape(-1))
            continue
        if waiting:
            yield np.concatenate(waiting)
            waiting = []
        yield made
    if waiting:
        yield np.concatenate(waiting)


def _cut(piece: Callable[[], Array], start: int, stop: int) -> Array:
    return piece().reshape(-1)[start:stop]


@contextlib.contextmanager
def _first_alone(kind: tuple[Any, ...]) -> Iterator[None]:
    """Lets one thread at a time do what is done for the first time for its kind.

    It compiles, and jax's compilation cache takes an entry that several threads write at once for a broken one.
    """
    with contextlib.nullcontext() if kind in _DONE else _FIRST:
        yield
        _DONE.add(kind)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(whole: jax.Array, piece: jax.Array, start: np.int32, width: int) -> jax.Array:
    rows = lax.dynamic_update_slice_in_dim(whole.reshape(-1, width), piece.reshape(-1, width), start, 0)
    return rows.reshape(whole.shape)
