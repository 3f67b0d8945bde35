"""Which token slots each request holds: the host's side of the table. NumPy, no jax.

`ReqToTokenPool` is the truth; the device has a copy (`TokenTable`) that follows by small updates:
write here, `drain()`, and hand the update to the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..checks import INT32_MAX, check_integer
from ..errors import IntegrityError, PoolError
from .slots import Slots
from .spec import as_ids, distinct
from .undo import Undo

__all__ = ["KVIndices", "ReqToTokenPool", "TableUpdate"]


class TableUpdate(NamedTuple):
    """What changed since the last update. A pytree of fixed shapes, given to `TokenTable.apply`.

    Attributes:
        slots, positions, ids: [capacity] int32, cells and their token ids; slot 0 is padding.
        lengths: [max_requests + 1] int32 of all slots.
    """

    slots: np.ndarray
    positions: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray


class KVIndices(NamedTuple):
    """Ragged rows of the table, flattened.

    Attributes:
        indices: [capacity] int32 token ids, row after row; `fill` past the last.
        offsets: [rows + 1] int32: row i is indices[offsets[i]:offsets[i + 1]].
    """

    indices: Any
    offsets: Any


class ReqToTokenPool:
    """Request slots 1..max_requests (0 is padding) and the token ids of their positions.

    A row holds `length(slot)` tokens, without gaps; what lies behind is never shown. Free the token ids
    themselves with their allocator: this pool only lists them. Calls are whole, as the allocator's.

    Args:
        max_requests: requests at once.
        max_context: tokens of one request.
    """

    def __init__(self, max_requests: int, max_context: int):
        self.max_requests = check_integer("max_requests", max_requests, 1, error=PoolError)
        self.max_context = check_integer("max_context", max_context, 1, error=PoolError)
        if max(self.max_requests, self.max_context) >= INT32_MAX:
            raise PoolError(f"a table of {self.max_requests} x {self.max_context} cannot be addressed in int32")
        self._slots = Slots(1, self.max_requests, "request slots")
        self._table = np.zeros((self.max_requests + 1, self.max_context), np.int32)
        self._lengths = np.zeros(self.max_requests + 1, np.int32)
        self._dirty: dict[int, tuple[int, int]] = {}  # slot -> columns the device does not have yet

    def available_size(self) -> int:
        """How many request slots are free."""
        return self._slots.num_free

    def alloc(self, n: int = 1) -> list[int]:
        """Takes `n` request slots, empty. Raises `OutOfBlocksError`."""
        return self._slots.alloc(n)

    def free(self, slot: int) -> np.ndarray:
        """Gives a slot back and returns the token ids it listed. Raises `PoolError` unless it was held."""
        if not self._slots.is_held(slot):
            self._slots.free([slot])  # refuses it
        slot = int(slot)
        ids = self._table[slot, : self._lengths[slot]].copy()
        undo = Undo()
        try:
            self._slots.free_within(undo, slot)
            undo.keep_at(self._lengths, slot)
            undo.keep_key(self._dirty, slot)
            self._lengths[slot] = 0
            self._dirty.pop(slot, None)
            return ids
        except BaseException:
            undo.put_back()
            raise

    def clear(self) -> None:
        """All slots are free and empty."""
        undo = Undo()
        try:
            undo.keep(self, "_lengths", "_dirty")
            self._lengths, self._dirty = np.zeros_like(self._lengths), {}
            self._slots.clear()
        except BaseException:
            undo.put_back()
            raise

    @property
    def lengths(self) -> np.ndarray:
        """[max_requests + 1] int32 of all slots, a copy."""
        return self._lengths.copy()

    def length(self, slot: int) -> int:
        return int(self._lengths[self._held(slot)])

    def tokens(self, slot: int) -> np.ndarray:
        """Returns the token ids of a request, int32 [length], a copy."""
        return self._table[slot, : self.length(slot)].copy()

    def write(self, slot: int, start: int, ids: Any) -> None:
        """Writes token ids to positions start..start+n-1; the request is at least that long then.

        Raises:
            PoolError: the slot is free, `start` would leave a gap, the row is too short, or an id is not positive.
        """
        length = self.length(slot)
        start = check_integer("start", start, error=PoolError)
        ids = as_ids(f"request slot {slot}: positive token ids", ids).reshape(-1)
        if ids.size and (ids.min() < 1 or ids.max() > INT32_MAX):
            span = f"{ids.min()}..{ids.max()}"
            raise PoolError(f"request slot {slot}: token ids must be positive int32 numbers, got {span}")
        end = start + ids.size
        if start > length:
            raise PoolError(f"request slot {slot}: writing at {start} leaves a gap after its {length} tokens")
        if end > self.max_context:
            raise PoolError(f"request slot {slot}: {end} tokens exceed max_context, {self.max_context}")
        if ids.size == 0:
            return
        first, last = self._dirty.get(int(slot), (start, end))
        undo = Undo()
        try:
            undo.keep_at(self._table, (slot, slice(start, end)))
            undo.keep_at(self._lengths, slot)
            undo.keep_key(self._dirty, int(slot))
            self._table[slot, start:end] = ids
            self._lengths[slot] = max(length, end)
            self._dirty[int(slot)] = min(first, start), max(last, end)
        except BaseException:
            undo.put_back()
            raise

    def append(self, slot: int, ids: Any) -> None:
        """Writes behind the last token (see `write`)."""
        self.write(slot, self.length(slot), ids)

    def truncate(self, slot: int, length: int) -> np.ndarray:
        """Shortens a request to `length` tokens and returns the ids it no longer lists. Raises `PoolError`."""
        old = self.length(slot)
        if check_integer("length", length, error=PoolError) > old:
            raise PoolError(f"request slot {slot}: cannot truncate {old} tokens to {length}")
        gone = self._table[slot, length:old].copy()
        undo = Undo()
        try:
            undo.keep_at(self._lengths, slot)
            self._lengths[slot] = length
            return gone
        except BaseException:
            undo.put_back()
            raise

    def drain(self, capacity: int | None = None) -> TableUpdate:
        """What the device's table lacks, and forgets it: apply every update, in order.

        Args:
            capacity: cells of the update, so that steps share one shape. Default: the next power of two.

        Raises:
            PoolError: more cells changed than `capacity`; nothing is forgotten.
        """
        spans = [(s, a, min(b, int(self._lengths[s]))) for s, (a, b) in self._dirty.items()]
        spans = [(s, a, b) for s, a, b in spans if a < b]
        count = sum(b - a for _, a, b in spans)
        if capacity is None:
            capacity = 1 << max(count - 1, 0).bit_length()
        elif count > check_integer("capacity", capacity, error=PoolError):
            raise PoolError(f"{count} cells changed, the update holds {capacity}")
        slots, positions, ids = (np.zeros(capacity, np.int32) for _ in range(3))
        at = 0
        for slot, first, last in spans:
            to = slice(at, at := at + last - first)
            slots[to], positions[to], ids[to] = slot, np.arange(first, last), self._table[slot, first:last]
        update = TableUpdate(slots, positions, ids, self._lengths.copy())
        undo = Undo()
        try:
            undo.keep(self, "_dirty")
            self._dirty = {}
            return update
        except BaseException:
            undo.put_back()
            raise

    def kv_indices(
        self, slots: Any, lengths: Any = None, starts: Any = None, *, capacity: int | None = None, fill: int = 0
    ) -> KVIndices:
        """Returns the token ids of several requests in one vector: the twin of `TokenTable.kv_indices`, bit for bit.

        Args:
            slots: [n] request slots; 0 gives an empty row.
            lengths: [n] tokens of each, None for all behind its start. Never more than are there.
            starts: [n] first positions, None for 0.
            capacity: of the result; None for exactly what is needed.
            fill: what stands behind the last id.

        Raises:
            PoolError: a slot is out of range, a number is negative, `capacity` is too small, or `fill` is no int32
                number.
        """
        slots = _vector("slots", slots, None, self.max_requests)
        starts = _vector("starts", 0 if starts is None else starts, slots.size, None)
        behind = np.maximum(self._lengths[slots] - starts, 0)
        counts = behind if lengths is None else np.minimum(_vector("lengths", lengths, slots.size, None), behind)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        total = int(offsets[-1])
        capacity = total if capacity is None else check_integer("capacity", capacity, error=PoolError)
        if as_ids("fill", fill).ndim or not -INT32_MAX <= fill <= INT32_MAX:
            raise PoolError(f"fill must be an int32 number, got {fill}")
        if total > capacity:
            raise PoolError(f"{total} token ids do not fit a capacity of {capacity}")
        indices = np.full(capacity, fill, np.int32)
        for slot, start, count, at in zip(slots, starts, counts, offsets, strict=False):
            indices[at : at + count] = self._table[slot, start : start + count]
        return KVIndices(indices, offsets)

    def check_integrity(self) -> None:
        """Free slots list nothing, ids are positive, no token is listed twice in a row. Raises `IntegrityError`."""
        self._slots.check_integrity()
        held = self._slots.held
        for slot, length in enumerate(self._lengths.tolist()):
            ids = self._table[slot, :length]
            if length and slot not in held:
                raise IntegrityError(f"request slot {slot} is free and lists {length} tokens")
            if (ids < 1).any() or distinct(ids).size != length:
                raise IntegrityError(f"request slot {slot} lists a null token or a token twice")
        if not held >= set(self._dirty):
            raise IntegrityError(f"free request slots {sorted(set(self._dirty) - held)} wait for an update")

    def _held(self, slot: int) -> int:
        if not self._slots.is_held(slot):
            raise PoolError(f"request slot {slot!r} is not held (slots are 1..{self.max_requests})")
        return slot


def _vector(name: str, values: Any, size: int | None, last: int | None) -> np.ndarray:
    """Non-negative integers, int64 [size]; a scalar stands for all of them."""
    array = as_ids(name, values)
    if array.size and (array.min() < 0 or array.max() > (INT32_MAX if last is None else last)):
        raise PoolError(f"{name} must be integers in 0..{INT32_MAX if last is None else last}, got {array.tolist()}")
    if size is None:
        return array.reshape(-1).astype(np.int64)
    if array.ndim and array.size != size:
        raise PoolError(f"{name} has {array.size} entries, expected {size}")
    return np.broadcast_to(array.reshape(-1) if array.ndim else array, (size,)).astype(np.int64)
