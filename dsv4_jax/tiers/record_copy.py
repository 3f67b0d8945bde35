"""Copies between units of cache leaves and records, in two implementations: one native call, or XLA operations.

Both take the leaves of a scope (see `dsv4_jax.records`), records uint8 [R, bytes], and int32 [N] unit and [N] or [N, K]
record ids of which those below `first_unit` and `first_record`, or too high, make their pair move nothing. Of K
records a pair's bytes fill one after the other.

The native call has a CPU twin that shares the CUDA kernel's address arithmetic. The XLA form moves records one by one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ffi
from ..errors import ImplementationError
from ..layout import LeafSpec
from ..ops.scatter import set_existing
from ..record_format import Piece, RecordFormat

__all__ = [
    "Ids",
    "SwapImplementation",
    "choose_implementation",
    "native_in",
    "native_out",
    "pack",
    "positions",
    "read",
    "unpack",
    "write",
]

SwapImplementation = Literal["xla", "ffi"] | None
TARGETS = ("dsv4_swap_in", "dsv4_swap_out")  # of both libraries
Leaves = tuple[jax.Array, ...]
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Ids(NamedTuple):
    """Pairs of unit and record, and the first id of each that is not padding (1; 0 in packed arrays).

    `num_tokens` [N] int32: of the states, where the units are slots.
    """

    units: jax.Array
    records: jax.Array
    first_unit: int = 1
    first_record: int = 1
    num_tokens: jax.Array | None = None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """What a native call is given of them."""
        return (self.units, self.records) + (() if self.num_tokens is None else (self.num_tokens,))


def choose_implementation(implementation: SwapImplementation) -> Literal["xla", "ffi"]:
    """Returns the choice, of None "ffi" if the default backend has its native library (on a GPU: with code for it),
    else "xla".

    "ffi" comes with its targets registered for the default backend.

    Raises:
        ImplementationError: unknown name, or "ffi" without the library (says how to get it).
    """
    if implementation == "xla":
        return "xla"
    if implementation not in ("ffi", None):
        raise ImplementationError(f"swap: unknown implementation {implementation!r}, expected 'xla', 'ffi' or None")
    problem = ffi.cuda_problem("swap") if jax.default_backend() == "gpu" else ffi.cpu_problem()
    if problem is None:
        for target in TARGETS:
            ffi.cuda_target("swap", target) if jax.default_backend() == "gpu" else ffi.cpu_target(target)
        return "ffi"
    if implementation == "ffi":
        raise ImplementationError(f"swap: {problem}")
    if jax.default_backend() == "gpu":
        ffi.warn_without_cuda()
    return "xla"


def positions(ids: jax.Array) -> jax.Array:
    """The numbers of the rows of a packed array that has one for each of these ids."""
    return jnp.arange(len(ids), dtype=jnp.int32)


# One native call


def native_out(leaves: Leaves, records: jax.Array, ids: Ids, descriptors: tuple[int, ...]) -> jax.Array:
    """Units to records, which are updated in place. `descriptors`: of the leaves, as `RecordFormat.descriptors`."""
    # The result has the type of the array itself: it carries the memory space.
    call = jax.ffi.ffi_call("dsv4_swap_out", jax.typeof(records), input_output_aliases={len(leaves): 0})
    return call(*leaves, records, *ids.arrays, **_attributes(ids, descriptors))


def native_in(leaves: Leaves, records: jax.Array, ids: Ids, descriptors: tuple[int, ...]) -> Leaves:
    """Records to units: the leaves, updated in place."""
    aliases = {i: i for i in range(len(leaves))}
    call = jax.ffi.ffi_call("dsv4_swap_in", tuple(map(jax.typeof, leaves)), input_output_aliases=aliases)
    return tuple(call(*leaves, records, *ids.arrays, **_attributes(ids, descriptors)))


def _attributes(ids: Ids, descriptors: tuple[int, ...]) -> dict[str, np.ndarray | np.int64]:
    first = dict(first_unit=np.int64(ids.first_unit), first_record=np.int64(ids.first_record))
    return dict(pieces=np.array(descriptors, np.int64), **first)


# Plain XLA operations


def pack(leaves: Leaves, ids: Ids, valid: jax.Array, record: RecordFormat) -> jax.Array:
    """Returns the records [N, bytes] uint8 of these units in device memory; zeros where not valid."""
    units, of = jnp.where(valid, ids.units, 0)[:, None], dict(zip(record.leaves, leaves, strict=True))
    packed = jnp.zeros((len(units), record.bytes), jnp.uint8)
    for piece in record.pieces:
        rows, live = _rows(piece, ids)
        data = _view(of[piece.leaf], piece.leaf)[:, units, rows, _columns(piece)]  # [layers, N, rows, values]
        data = _bytes(jnp.where(live[..., None], data, 0)).reshape(piece.layers, len(units), piece.bytes)
        data = jnp.pad(data, ((0, 0), (0, 0), (0, piece.stride - piece.bytes)))
        data = jnp.moveaxis(data, 0, 1).reshape(len(units), piece.layers * piece.stride)
        packed = lax.dynamic_update_slice(packed, data, (0, piece.offset))
    return jnp.where(valid[:, None], packed, jnp.uint8(0))


def unpack(leaves: Leaves, records: jax.Array, ids: Ids, valid: jax.Array, record: RecordFormat) -> Leaves:
    """The leaves with these units set from records [N, bytes] in device memory: zeros where these have nothing."""
    out = []
    for spec, leaf in zip(record.leaves, leaves, strict=True):
        view, each = _view(leaf, spec), jnp.arange(len(records))[:, None]
        units = jnp.zeros((spec.layers, len(records), *view.shape[2:]), leaf.dtype)
        for piece in record.pieces:
            if piece.leaf != spec:
                continue
            end = piece.offset + piece.layers * piece.stride
            data = records[:, piece.offset : end].reshape(len(records), piece.layers, piece.stride)[..., : piece.bytes]
            data = jnp.moveaxis(data, 0, 1).reshape(*data.shape[1::-1], piece.rows, piece.width)
            rows, live = _rows(piece, ids)
            rows = jnp.where(live, rows, np.int32(spec.rows))
            units = units.at[:, each, rows, _columns(piece)].set(_elements(data, leaf.dtype), mode="drop")
        names = jnp.where(valid, ids.units, np.int32(view.shape[1]))
        out.append(set_existing(view, names, units, axis=1).reshape(leaf.shape))
    return tuple(out)


def write(pool: jax.Array, records: jax.Array, record_ids: jax.Array) -> jax.Array:
    """Sets rows of a pool in host memory to records in device memory, one by one; ids must be in range."""
    column = jax.device_put(np.int32(0), HOST)

    # Only the row and its number cross: XLA:GPU runs a slice of host memory between the memories, but what works on
    # host operands alone it gives to the host's processor, or refuses to compile (a loop that carries them).
    def one(pool: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        record, record_id = jax.device_put((pair[0][None], pair[1]), HOST)
        return lax.dynamic_update_slice(pool, record, (record_id, column), allow_negative_indices=False), None

    return lax.scan(one, pool, (records, record_ids))[0]


def read(pool: jax.Array, record_ids: jax.Array) -> jax.Array:
    """Rows [N, bytes] of a pool in host memory, one by one, in device memory; ids must be in range."""
    column = jax.device_put(np.int32(0), HOST)

    def one(_: None, record_id: jax.Array) -> tuple[None, jax.Array]:
        start = (jax.device_put(record_id, HOST), column)
        record = lax.dynamic_slice(pool, start, (1, pool.shape[1]), allow_negative_indices=False)
        return None, jax.device_put(record, DEVICE)[0]

    return lax.scan(one, None, record_ids)[1]


def _view(leaf: jax.Array, spec: LeafSpec) -> jax.Array:
    """Returns a leaf as an array [layers, units, rows, width]."""
    return leaf.reshape(spec.layers, -1, spec.rows, spec.width)


def _columns(piece: Piece) -> slice:
    """The values of a row that the piece has."""
    size = piece.leaf.row_bytes // piece.leaf.width
    return slice(piece.column // size, (piece.column + piece.width) // size)


def _rows(piece: Piece, ids: Ids) -> tuple[jax.Array, jax.Array]:
    """Which rows of its unit the piece has, and which of them are live: [N, rows] each."""
    number = jnp.broadcast_to(jnp.arange(piece.rows, dtype=jnp.int32), (len(ids.units), piece.rows))
    if piece.positions is None:
        return number, jnp.full(number.shape, True)
    assert ids.num_tokens is not None, "states come with their numbers of tokens"
    ratio, before, unfinished = map(np.int32, piece.positions)
    tokens = jnp.maximum(ids.num_tokens, 0)[:, None]
    position = tokens // ratio * ratio - before + number
    live = (position >= 0) & (position < tokens)
    if unfinished:
        live &= tokens % unfinished != 0
    return position % np.int32(piece.leaf.rows), live


def _bytes(x: jax.Array) -> jax.Array:
    """[..., n] of any carrier as [..., n * itemsize] uint8, little-endian."""
    if x.dtype == jnp.uint8:
        return x
    data = lax.bitcast_convert_type(x, jnp.uint8)
    return data.reshape(*data.shape[:-2], -1)


def _elements(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns bytes as elements of the leaf's dtype: the inverse of `_bytes`."""
    if dtype == jnp.uint8:
        return x
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, dtype.itemsize), dtype)
