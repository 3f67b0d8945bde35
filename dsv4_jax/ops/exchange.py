"""all_gather, all_to_all, sum_to_owner and sum_to_all: what devices of a mesh have of one another, inside
`jax.shard_map`.

The sums have one order whatever the number of devices n: neighbours first, then neighbours of those. So for n = 2, 4 or
8 they have the bits of one device that adds its operands the same way.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import INT32_MAX, check_integer, shown
from ..errors import ShapeError
from .arguments import Check
from .registry import Choice, Implementation, run

__all__ = [
    "IMPLEMENTATION",
    "ONE_SHOT_BYTES",
    "ExchangeArguments",
    "Peers",
    "all_gather",
    "all_to_all",
    "reference",
    "sum_in_pairs",
    "sum_to_all",
    "sum_to_owner",
    "using",
]

Kind = Literal["gather", "all_to_all", "sum_to_owner", "sum_to_all"]
Axes = str | tuple[str, ...]
# Of a sum for all: what a second exchange takes, about 3 us, more than two devices save with it from here on.
ONE_SHOT_BYTES = 512 << 10
# Of several arrays that XLA gathers in one collective: more take longer to be put side by side than a collective more.
ONE_COLLECTIVE_BYTES = 1 << 20
_SHARE = 4  # float32 of the kernel's 16-byte words


@dataclasses.dataclass(frozen=True)
class Peers:
    """What a call needs to know of the buffers of an `ops.Exchange`, which makes these.

    Attributes:
        number: of the exchange in this process.
        axes: of the mesh; their devices exchange.
        size: devices along them.
        slot_bytes: that a device sends another one in a launch, at most.
        channels: calls that may be under way at the same time.
    """

    number: int
    axes: tuple[str, ...]
    size: int
    slot_bytes: int
    channels: int


_IN_USE: contextvars.ContextVar[tuple[Peers, ...]] = contextvars.ContextVar("peers in use", default=())


@contextlib.contextmanager
def using(*peers: Peers) -> Iterator[None]:
    """Calls within, while they are traced, take these peers for their axes if they name none themselves."""
    token = _IN_USE.set(peers)
    try:
        yield
    finally:
        _IN_USE.reset(token)


@dataclasses.dataclass(frozen=True)
class ExchangeArguments:
    """Holds what an implementation of `exchange` is given, as in the arguments of the public functions."""

    arrays: tuple[jax.Array, ...]
    kind: Kind
    axes: tuple[str, ...]
    dimension: int
    peers: Peers | None
    channel: int

    @property
    def empty(self) -> bool:
        return any(array.size == 0 for array in self.arrays)


def all_gather(
    arrays: Sequence[jax.Array],
    axes: Axes,
    *,
    dimension: int = 0,
    peers: Peers | None = None,
    channel: int = 0,
    implementation: Choice = None,
) -> tuple[jax.Array, ...]:
    """What all n devices along the axes have, in their order (`lax.axis_index`). To call inside `jax.shard_map`.

    One exchange moves all arrays.

    Args:
        arrays: of any types; those of each device have the same shapes.
        axes: of the mesh, a name or several; none: the device is alone, and has its own back.
        dimension: of the arrays, along which they are joined.
        peers: the mapped buffers of these devices (`Exchange.peers`), for the CUDA kernel; None: those
            of `using`, and where there are none XLA's collectives serve.
        channel: of the buffers. Calls that do not need one another's results, so that they may run at the same time,
            need channels of their own.

    Returns:
        The joined arrays, n times as long along `dimension`.

    Raises:
        ShapeError: there are no arrays, one lacks the dimension, axes are no different names, or peers or channel are
            not of these axes.
        ImplementationError: as every op (`registry.pick`).
    """
    arrays = _arrays(arrays)
    dimension = check_integer("all_gather: dimension", dimension, error=ShapeError)
    if (i := next((i for i, array in enumerate(arrays) if array.ndim <= dimension), None)) is not None:
        raise ShapeError(f"all_gather: dimension is {dimension}, array {i} has {arrays[i].ndim} dimensions")
    return _exchange(arrays, "gather", axes, dimension, peers, channel, implementation)


def all_to_all(
    x: jax.Array, axes: Axes, *, peers: Peers | None = None, channel: int = 0, implementation: Choice = None
) -> jax.Array:
    """Returns each of the n devices its own part of the rows, with the columns of all of them. Otherwise as
    `all_gather`.

    Args:
        x: [n * T, C] of any type: rows r * T to r * T + T - 1 are those of device r.

    Returns:
        [T, n * C], the columns in the order of the devices that had them.

    Raises:
        ShapeError: x is no matrix, its rows do not divide by n, or as `all_gather`.
        ImplementationError: as every op (`registry.pick`).
    """
    if np.ndim(x) != 2:  # of None, for one, 0
        raise ShapeError(f"all_to_all: x has {np.ndim(x)} dimensions, expected rows and columns")
    x = jnp.asarray(x)
    _check_rows("all_to_all", x, axes, peers)
    return _exchange((x,), "all_to_all", axes, 0, peers, channel, implementation)[0]


def sum_to_owner(
    x: jax.Array, axes: Axes, *, peers: Peers | None = None, channel: int = 0, implementation: Choice = None
) -> jax.Array:
    """Returns the sum over the n devices along the axes, each device its own part of the rows. Otherwise as
    `all_gather`.

    Args:
        x: [n * T, ...] float32, partial sums: rows r * T to r * T + T - 1 are those of device r.

    Returns:
        [T, ...] float32. The order of summation is the module's, so the bits are the same in every run.

    Raises:
        ShapeError: the rows do not divide by n, x is not float32, or as `all_gather`.
        ImplementationError: as every op (`registry.pick`).
    """
    x = _float_rows("sum_to_owner", x)
    _check_rows("sum_to_owner", x, axes, peers)
    return _exchange((x,), "sum_to_owner", axes, 0, peers, channel, implementation)[0]


def sum_to_all(
    x: jax.Array, axes: Axes, *, peers: Peers | None = None, channel: int = 0, implementation: Choice = None
) -> jax.Array:
    """Returns the sum over the n devices along the axes, the whole of it on each. Otherwise as `all_gather`.

    Up to `ONE_SHOT_BYTES`, and between two devices, each sends all it has to each: one exchange. Of more, each sums a
    share and sends that to all: two exchanges, of 2 / n of the bytes.

    Args:
        x: [T, ...] float32, partial sums.

    Returns:
        [T, ...] float32, the same bits on all devices, in the order of summation of the module.

    Raises:
        ShapeError: x is not float32, or as `all_gather`.
        ImplementationError: as every op (`registry.pick`).
    """
    x = _float_rows("sum_to_all", x)
    _check_peers("sum_to_all", peers)
    how: Any = dict(axes=axes, peers=peers, channel=channel, implementation=implementation)
    if x.size * x.dtype.itemsize <= ONE_SHOT_BYTES or (size := _size(axes, peers)) <= 2:
        return _exchange((x,), "sum_to_all", axes, 0, peers, channel, implementation)[0]
    shares = jnp.pad(x.reshape(-1), (0, -x.size % (_SHARE * size))).reshape(size, -1)
    (whole,) = all_gather((sum_to_owner(shares, **how),), **how)
    return whole.reshape(-1)[: x.size].reshape(x.shape)


def reference(arguments: ExchangeArguments) -> tuple[jax.Array, ...]:
    """Returns the op with XLA's collectives, sums in `jnp`."""
    axes = arguments.axes
    if not axes:
        return arguments.arrays
    if arguments.kind == "gather":
        several = arguments.dimension == 0 and len(arguments.arrays) > 1
        small = sum(x.size * x.dtype.itemsize for x in arguments.arrays) <= ONE_COLLECTIVE_BYTES
        if several and small and all(_of_bytes(x) for x in arguments.arrays):
            return _gather_rows(arguments.arrays, axes)
        return tuple(lax.all_gather(x, axes, axis=arguments.dimension, tiled=True) for x in arguments.arrays)
    (x,) = arguments.arrays
    if arguments.kind == "sum_to_all":
        return (sum_in_pairs(list(lax.all_gather(x, axes))),)
    if arguments.kind == "all_to_all":
        return (lax.all_to_all(x, axes, 0, 1, tiled=True),)
    size = lax.axis_size(axes)
    parts = lax.all_to_all(x.reshape(size, x.shape[0] // size, *x.shape[1:]), axes, 0, 0)
    return (sum_in_pairs(list(parts)),)


def _of_bytes(x: jax.Array) -> bool:
    """Whether XLA can take an array for bytes."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.finfo(x.dtype).bits % 8 == 0
    return jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits % 8 == 0


def _gather_rows(arrays: tuple[jax.Array, ...], axes: tuple[str, ...]) -> tuple[jax.Array, ...]:
    """Gathers several arrays in one collective: what they have in memory, side by side."""
    words = [lax.bitcast_convert_type(x, jnp.uint8).reshape(-1) for x in arrays]
    gathered = lax.all_gather(jnp.concatenate(words), axes)
    ends, out = np.cumsum([x.size for x in words]).tolist(), []
    for part, x in zip(jnp.split(gathered, ends[:-1], 1), arrays, strict=True):
        inner = (x.dtype.itemsize,) if x.dtype.itemsize > 1 else ()
        whole = part.reshape(part.shape[0] * x.shape[0], *x.shape[1:], *inner)
        out.append(lax.bitcast_convert_type(whole, x.dtype))
    return tuple(out)


def sum_in_pairs(terms: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum in this module's order: neighbours, then neighbours of these, and so on; an odd one waits its
    turn."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = [*pairs, terms[-1]] if len(terms) % 2 else pairs
    return terms[0]


def _exchange(
    arrays: tuple[jax.Array, ...],
    kind: Kind,
    axes: Axes,
    dimension: int,
    peers: Peers | None,
    channel: int,
    choice: Choice,
) -> tuple[jax.Array, ...]:
    name = "all_gather" if kind == "gather" else kind
    names = _names(axes)
    _check_peers(name, peers)
    if peers is None:
        peers = next((known for known in _IN_USE.get() if known.axes == names), None)
    if peers is not None and peers.axes != names:
        raise ShapeError(f"{name}: peers are of axes {peers.axes}, expected {names}")
    last = INT32_MAX if peers is None else peers.channels - 1
    channel = check_integer(f"{name}: channel", channel, 0, last, error=ShapeError)
    return run("exchange", ExchangeArguments(arrays, kind, names, dimension, peers, channel), choice)


def _check_rows(op: str, x: jax.Array, axes: Axes, peers: Peers | None) -> None:
    """Raises `ShapeError` unless the rows divide by the devices that exchange."""
    _check_peers(op, peers)
    size = _size(axes, peers)
    if x.shape[0] % size:
        raise ShapeError(f"{op}: {x.shape[0]} rows do not divide by {size} devices")


def _check_peers(op: str, peers: Any) -> None:
    if peers is not None:
        Check(op).given("peers", peers, Peers)


def _size(axes: Axes, peers: Peers | None) -> int:
    """Returns how many devices exchange."""
    return lax.axis_size(_names(axes)) if peers is None else peers.size


def _names(axes: Axes) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str | int) else tuple(axes)
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise ShapeError(f"exchange: axes are {shown(axes)}, expected different names of axes of the mesh")
    return names


def _arrays(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    if not isinstance(arrays, tuple | list) or not arrays:
        raise ShapeError("all_gather: expected a sequence of arrays, at least one")
    return tuple(jnp.asarray(array) for array in arrays)


def _float_rows(op: str, x: jax.Array) -> jax.Array:
    x = Check(op).any_shape("x", x, "float32")
    if x.ndim == 0:
        raise ShapeError(f"{op}: x is a scalar, expected float32 rows")
    return x


IMPLEMENTATION = Implementation("exchange", "xla", reference)
