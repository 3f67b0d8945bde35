"""What a store is: `RecordStore`, the contract that every one keeps.

A *record* is the bytes of one host record (one block across all layers, or one snapshot), always `record_bytes` long.
A *key* is the content hash of the tokens that made it, always `key_bytes` long; a key therefore names
one value for ever, and storing a key twice is storing it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

__all__ = ["Buffers", "Flags", "RecordStore", "StoreStats"]

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
class RecordStore(Protocol):
    """Fixed-size records under content-hash keys. Every call takes a batch and may be called from any thread.

    What every store guarantees, and tests/stores/conformance.py holds it to:

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
      batch is no operation. After `close()` every call but `close()` and `stats()` raises `StoreError`.
    * *One process.* A forked child cannot use its parent's store: every call raises `StoreBusyError`, but `close()`,
      which does nothing there. It opens its own, where a store may have several owners.

    `keys` is a sequence of n `bytes`, each `key_bytes` long. Records and buffers are an array `[n, record_bytes]`
    of uint8, or a sequence of n C-contiguous buffers of `record_bytes` (views of a pinned pool, a `bytearray`, ...).
    Results are bool arrays `[n]`.

    Raises (all of them): `StoreFormatError` for a key of the wrong type or length, `ShapeError` for a wrong number of
    buffers, a wrong size, a read-only or non-contiguous target, or targets that overlap; `StoreError`
    when storage fails.
    """

    record_bytes: int
    key_bytes: int

    def contains(self, keys: Sequence[bytes]) -> Flags:
        """Which keys a read would probably find. Reads no record, and does not count as a use of it."""
        ...

    def read_into(self, keys: Sequence[bytes], buffers: Buffers) -> Flags:
        """Fills `buffers[i]` with the record of `keys[i]`; true where that happened.

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
        """Flushes and lets go. Any thread may call it: it waits for calls under way. A second call does nothing, but
        finish what an interrupted first one left.

        Those of this package take a `timeout` in seconds, after which they raise `StoreBusyError`: a disk, a network or
        a client may hang.
        """
        ...
