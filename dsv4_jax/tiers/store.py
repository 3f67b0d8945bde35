"""The storage tier's contract: `BlockStore`, and what its implementations share. Imports no jax.

A *record* is the bytes of one host record (one block across all layers), always `record_bytes` long.
A *key* is the content hash of the tokens that made it, always `key_bytes` long; a key therefore names
one value for ever, and storing a key twice is storing it once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ..errors import CacheError, ShapeError, StoreFormatError, StoreLockedError

__all__ = [
    "BlockStore",
    "Buffers",
    "Flags",
    "StoreStats",
    "check_count",
    "check_keys",
    "check_process",
    "check_records",
    "check_seconds",
    "check_switch",
    "fingerprint_digest",
]

Buffers: TypeAlias = Any  # an array [n, record_bytes], or a sequence of n objects with the buffer protocol
Flags: TypeAlias = np.ndarray  # bool [n]


@dataclasses.dataclass
class StoreStats:
    """Counts since the store was opened; `records` is how many it holds now.

    Attributes:
        corrupted: records refused because their bytes do not match their checksum (torn writes, bit rot), or because
            the disk could not read them.
        foreign: records refused because another layout wrote them.
    """

    records: int = 0
    written: int = 0
    read: int = 0
    missed: int = 0
    evicted: int = 0
    deleted: int = 0
    corrupted: int = 0
    foreign: int = 0


@runtime_checkable
class BlockStore(Protocol):
    """Fixed-size records under content-hash keys. Every call takes a batch and may be called from any thread.

    Guarantees every implementation gives:

    * *Nothing wrong is served.* `read_into` reports a key as read only if the buffer holds exactly the bytes that
      were written under it, for the same layout: each record carries a checksum over its bytes, its key and the
      layout's fingerprint. A record that fails is refused and counted (`stats().corrupted`, `.foreign`), and does not
      stand in the way of a new one; it is an ordinary miss to the caller, who recomputes the block.
    * *Order.* A `write` or `delete` that returned is seen by every later call. Calls that overlap in time take
      effect in some order, record by record. A batch is not a transaction: after an error, or a crash, any
      subset of its records may be there, each of them whole.
    * *Misses are normal.* A store may forget any record at any time (eviction, another client, lost disk), so only
      `read_into` is authoritative; `contains` is a hint for planning.
    * *Errors before effects.* Keys and buffers are checked first; a malformed batch changes nothing. An empty
      batch is no operation. After `close()` every call but `close()` and `stats()` raises `StoreClosedError`.
    * *One process.* A forked child cannot use its parent's store: every call raises `StoreLockedError`, but `close()`,
      which does nothing there. It opens its own, where a store may have several owners.

    `keys` is a sequence of n `bytes`, each `key_bytes` long. Records and buffers are an array `[n, record_bytes]`
    of uint8, or a sequence of n C-contiguous buffers of `record_bytes` (views of a pinned pool, a `bytearray`, ...).
    Results are bool arrays `[n]`.

    Raises (all of them): `StoreFormatError` for a key of the wrong type or length, `ShapeError` for a wrong number of
    buffers, a wrong size, a read-only or non-contiguous target; `StoreFullError`, `StoreError` when storage fails.
    """

    record_bytes: int
    key_bytes: int

    def contains(self, keys: Sequence[bytes]) -> Flags:
        """Which keys a read would probably find. Reads no record, and does not count as a use of it."""
        ...

    def read_into(self, keys: Sequence[bytes], buffers: Buffers) -> Flags:
        """Fill `buffers[i]` with the record of `keys[i]`; true where that happened.

        Where the result is false the buffer's bytes are undefined. Keys may repeat; buffers must not overlap.
        """
        ...

    def write(self, keys: Sequence[bytes], records: Buffers) -> Flags:
        """Store `records[i]` under `keys[i]`; true where a record was added, false where the key was there already.

        A key that is present, or that came earlier in the batch, is not written again; it counts as used now. The
        records must not change until the call returns.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> Flags:
        """Forget the keys; true where there was one (where that is known: an object store may not say)."""
        ...

    def stats(self) -> StoreStats: ...

    def flush(self) -> None:
        """Return once everything written is as durable as the store can make it."""
        ...

    def close(self) -> None:
        """Flush and let go. Any thread may call it: it waits for calls under way. A second call does nothing, but
        finish what an interrupted first one left."""
        ...


_MOST = 2**63 - 1  # of any count or size: what file systems and their calls can say


def check_count(name: str, value: Any, most: int = _MOST, error: type[CacheError] = StoreFormatError) -> int:
    """A setting as an int. Raises `error` unless it is an integer in 1..most."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if not 1 <= count <= most:
        shown = f"{type(value).__name__} {value!r:.40}" if count.bit_length() <= 64 else f"{count.bit_length()} bits"
        raise error(f"{name} must be an integer in 1..{most}, got {shown}")
    return count


def check_seconds(name: str, value: Any) -> float:
    """A setting as a time that threads can wait. Raises `StoreFormatError` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < threading.TIMEOUT_MAX:
        raise StoreFormatError(f"{name} must be a positive number of seconds, got {type(value).__name__} {value!r:.40}")
    return float(value)


def check_switch(name: str, value: Any) -> bool:
    """A setting as a bool. Raises `StoreFormatError` if it is something else."""
    if not isinstance(value, bool | np.bool_):
        raise StoreFormatError(f"{name} must be True or False, got {type(value).__name__}")
    return bool(value)


def check_process(owner: int) -> None:
    """Raises `StoreLockedError` in any process but `owner`, whose store it is: after a fork, its threads and locks are
    nobody's."""
    if (here := os.getpid()) != owner:
        raise StoreLockedError(f"the store is open in process {owner}, of which {here} is a forked child")


def check_keys(keys: Sequence[bytes], key_bytes: int) -> list[bytes]:
    """The keys as a list of `bytes`. Raises `StoreFormatError` for one of another type or length."""
    try:
        checked = list(keys)
    except TypeError:
        raise StoreFormatError(f"keys must be a sequence of bytes, got {type(keys).__name__}") from None
    for i, key in enumerate(checked):
        if not isinstance(key, bytes) or len(key) != key_bytes:
            size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise StoreFormatError(f"keys[{i}] must be bytes of length {key_bytes}, got {size}")
    return checked


def check_records(buffers: Buffers, count: int, record_bytes: int, *, writable: bool) -> list[np.ndarray]:
    """Views uint8 [record_bytes] of the given buffers, sharing their memory.

    Raises:
        ShapeError: not `count` buffers, or one that is no plain memory (an array of objects, say, whose bytes are
            pointers), of the wrong size, not contiguous, or read-only if `writable`.
    """
    name = "buffers" if writable else "records"
    try:
        given, buffers = len(buffers), iter(buffers)
    except TypeError:
        raise ShapeError(f"{name} must be an array or a sequence of buffers, got {type(buffers).__name__}") from None
    if given != count:
        raise ShapeError(f"{name}: {given} given for {count} keys")
    views = []
    for i, buffer in enumerate(buffers):
        try:
            view = memoryview(buffer)
            if "O" in view.format:
                raise TypeError("it holds objects")
            view = view.cast("B")
        except (TypeError, ValueError, BufferError, NotImplementedError) as error:
            raise ShapeError(f"{name}[{i}] must be a C-contiguous buffer of bytes: {error}") from None
        if view.nbytes != record_bytes:
            raise ShapeError(f"{name}[{i}] has {view.nbytes} bytes, a record has {record_bytes}")
        if writable and view.readonly:
            raise ShapeError(f"{name}[{i}] is read-only")
        views.append(np.frombuffer(view, np.uint8))
    return views


def fingerprint_digest(fingerprint: str | bytes) -> bytes:
    """32 bytes that stand for a layout's fingerprint (`CacheLayout.fingerprint`, or any other name of a format)."""
    try:
        data = fingerprint.encode() if isinstance(fingerprint, str) else fingerprint
    except UnicodeEncodeError as error:
        raise StoreFormatError(f"fingerprint must be text that UTF-8 can encode: {error}") from None
    if not isinstance(data, bytes | bytearray):
        raise StoreFormatError(f"fingerprint must be str or bytes, got {type(fingerprint).__name__}")
    return hashlib.sha256(data).digest()
