"""`MooncakeStore`: records as objects of a Mooncake Store, the memory of several machines under one master.

For machines that share prefixes without a disk or a bucket between them. A record is one object, named by layout and
key, holding a `RecordHeader` (generation 0) and the bytes. They are copied once each way, through memory that Mooncake
has registered. Its master evicts what was not used for long, and a machine that goes takes what lay in it along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..checks import check_integer, shown
from ..errors import StoreError, StoreFormatError
from .base import Buffers, Flags, StoreStats
from .checks import check_keys, check_process, check_records, end_within
from .checksum import checksum
from .record_header import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    VERSION,
    RecordHeader,
    fingerprint_digest,
    pack_header,
    unpack_header,
)

__all__ = ["MooncakeStore"]

# Mooncake's answers
_DONE, _OTHER_SIZE, _NOT_READY, _MISSING = 0, -600, -703, -704


class MooncakeStore:
    """A `RecordStore` over a Mooncake client.

    Another layout's records, and those of other versions of the format, have other names: none is ever "foreign".
    `write` says of a key that another machine writes at the same time that it was added by both.

    Args:
        client: a `mooncake.store.MooncakeDistributedStore` that has been set up. It stays the caller's, who closes it
            after the store.
        record_bytes, fingerprint, key_bytes: as of `SlabStore`.
        in_flight: records on their way at once, and held in memory.

    Raises:
        StoreFormatError: a setting of a wrong type or size.
        StoreError: the client cannot register memory, or cannot reach its master.
    """

    def __init__(
        self, client: Any, *, record_bytes: int, fingerprint: str | bytes, key_bytes: int = 32, in_flight: int = 64
    ):
        self.record_bytes = check_integer("record_bytes", record_bytes, 1, error=StoreFormatError)
        self.key_bytes = check_integer("key_bytes", key_bytes, 1, MAX_KEY_BYTES, error=StoreFormatError)
        self._in_flight = check_integer("in_flight", in_flight, 1, error=StoreFormatError)
        self._fingerprint = fingerprint_digest(fingerprint)
        self._prefix = f"dsv4-{VERSION}-{self._fingerprint[:12].hex()}-"
        self._client = client
        self._rows = np.zeros((self._in_flight, HEADER_BYTES + self.record_bytes), np.uint8)
        try:
            code = client.register_buffer(self._rows.ctypes.data, self._rows.nbytes)
        except Exception as error:
            raise StoreError(f"Mooncake cannot register {self._rows.nbytes} bytes: {error}") from error
        if code:
            raise StoreError(f"Mooncake cannot register {self._rows.nbytes} bytes: {code}")
        self._stats, self._lock, self._closed, self._process = StoreStats(), threading.Lock(), False, os.getpid()

    def contains(self, keys: Sequence[bytes]) -> Flags:
        self._check()
        keys = check_keys(keys, self.key_bytes)
        with self._begun():
            return np.array([there for batch in self._batches(keys) for there in self._present(keys[batch])], bool)

    def read_into(self, keys: Sequence[bytes], buffers: Buffers) -> Flags:
        self._check()
        keys = check_keys(keys, self.key_bytes)
        views = check_records(buffers, len(keys), self.record_bytes, writable=True)
        good, codes, corrupted = np.zeros(len(keys), bool), list[int](), 0
        wanted: dict[bytes, list[int]] = {}  # Mooncake takes a name once
        for i, key in enumerate(keys):
            wanted.setdefault(key, []).append(i)
        once = list(wanted)
        with self._begun():
            for batch in self._batches(once):
                names = self._names(once[batch])
                answers = self._ask("batch_get_into", names, *self._memory(len(names)))
                damaged = []
                for key, name, row, answer in zip(once[batch], names, self._rows, answers, strict=False):
                    if self._is_good(key, row, answer):
                        for i in wanted[key]:
                            views[i][:] = row[HEADER_BYTES:]
                            good[i] = True
                    elif answer >= 0 or answer == _OTHER_SIZE:
                        damaged.append(name)
                corrupted += len(damaged)
                if damaged:
                    with contextlib.suppress(StoreError):  # they are misses all the same
                        self._ask("batch_remove", damaged, True)
                codes += answers
            self._count(read=int(good.sum()), missed=int((~good).sum()), corrupted=corrupted)
        if codes and all(code < 0 and code not in (_OTHER_SIZE, _NOT_READY, _MISSING) for code in codes):
            raise StoreError(f"Mooncake cannot read: {codes[0]}")
        return good

    def write(self, keys: Sequence[bytes], records: Buffers) -> Flags:
        self._check()
        keys = check_keys(keys, self.key_bytes)
        views = check_records(records, len(keys), self.record_bytes, writable=False)
        added = np.zeros(len(keys), bool)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        with self._begun():
            for batch in self._batches(keys):
                there = self._present(keys[batch])
                new = [i for i in range(batch.start, batch.stop) if first[keys[i]] == i and not there[i - batch.start]]
                for row, i in zip(self._rows, new, strict=False):
                    row[:HEADER_BYTES] = np.frombuffer(self._header(keys[i], views[i]), np.uint8)
                    row[HEADER_BYTES:] = views[i]
                names = self._names([keys[i] for i in new])
                codes = self._ask("batch_put_from", names, *self._memory(len(new))) if new else []
                added[[i for i, code in zip(new, codes, strict=True) if code == _DONE]] = True
                self._count(written=codes.count(_DONE))
                if wrong := [code for code in codes if code != _DONE]:
                    raise StoreError(f"Mooncake cannot write {len(wrong)} of {len(new)} records: {wrong[0]}")
        return added

    def delete(self, keys: Sequence[bytes]) -> Flags:
        self._check()
        keys = check_keys(keys, self.key_bytes)
        once = {key: i for i, key in reversed(list(enumerate(keys)))}
        gone = np.zeros(len(keys), bool)
        with self._begun():
            codes = self._ask("batch_remove", self._names([*once]), True) if keys else []
            gone[[i for i, code in zip(once.values(), codes, strict=True) if code == _DONE]] = True
            self._count(deleted=int(gone.sum()))
        if wrong := [code for code in codes if code not in (_DONE, _MISSING)]:
            raise StoreError(f"Mooncake cannot delete {len(wrong)} of {len(keys)} records: {wrong[0]}")
        return gone

    def stats(self) -> StoreStats:
        """`records` is -1: it does not know."""
        return dataclasses.replace(self._stats, records=-1)

    def flush(self) -> None:
        """Nothing to do: what was written is where it will be."""
        self._check()

    def close(self, timeout: float | None = None) -> None:
        """Waits for the call under way, then has the client let go of the memory.

        Raises:
            StoreBusyError: it is not done after `timeout` seconds, since the client hangs. A later call finishes it.
            StoreError: the client refuses.
        """
        if os.getpid() == self._process:
            end_within("close: Mooncake's client", self._let_go, timeout)

    def _let_go(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                try:
                    self._client.unregister_buffer(self._rows.ctypes.data)
                except Exception as error:
                    raise StoreError(f"Mooncake cannot let go of {self._rows.nbytes} bytes: {error}") from error

    def __enter__(self) -> MooncakeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        check_process(self._process)
        if self._closed:
            raise StoreError("the store is closed")

    @contextlib.contextmanager
    def _begun(self) -> Any:
        """One call at a time has the rows."""
        with self._lock:
            self._check()
            yield

    def _batches(self, keys: list[bytes]) -> list[slice]:
        return [slice(i, min(i + self._in_flight, len(keys))) for i in range(0, len(keys), self._in_flight)]

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _memory(self, count: int) -> tuple[list[int], list[int]]:
        """Addresses and sizes of so many rows."""
        address, size = self._rows.ctypes.data, self._rows.shape[1]
        return [address + i * size for i in range(count)], [size] * count

    def _present(self, keys: list[bytes]) -> list[bool]:
        codes = self._ask("batch_is_exist", self._names(keys))
        if wrong := [code for code in codes if code < 0]:
            raise StoreError(f"Mooncake cannot look up {len(wrong)} of {len(keys)} records: {wrong[0]}")
        return [code == 1 for code in codes]

    def _ask(self, call: str, names: list[str], *others: Any) -> list[int]:
        """What the client answers, one number a name. Raises `StoreError` if it raises, or answers something else."""
        try:
            codes = getattr(self._client, call)(names, *others)
        except Exception as error:
            raise StoreError(f"Mooncake's {call} of {len(names)} records: {error}") from error
        if not isinstance(codes, Sequence) or len(codes) != len(names) or any(type(code) is not int for code in codes):
            raise StoreError(f"Mooncake's {call} of {len(names)} records answers {shown(codes)}")
        return list(codes)

    def _header(self, key: bytes, view: np.ndarray) -> bytes:
        digest = checksum(view, key, self._fingerprint, 0)
        return pack_header(RecordHeader(key, 0, self.record_bytes, self._fingerprint, digest))

    def _is_good(self, key: bytes, row: np.ndarray, size: int) -> bool:
        if size != len(row) or (header := unpack_header(row[:HEADER_BYTES].tobytes())) is None:
            return False
        if (header.key, header.record_bytes, header.fingerprint) != (key, self.record_bytes, self._fingerprint):
            return False
        return checksum(row[HEADER_BYTES:], key, self._fingerprint, 0) == header.digest

    def _count(self, **more: int) -> None:
        for name, count in more.items():
            setattr(self._stats, name, getattr(self._stats, name) + count)
