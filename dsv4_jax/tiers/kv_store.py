"""`KvBlockStore`: records in any tensorstore KvStore: file, memory, S3, GCS, OCDBT. Imports no jax.

For those who outgrow one disk: several machines may share one bucket. A record is one object, named by its key in
hexadecimal, holding the header of `slab_record.py` (generation 0) and the bytes; values are copied once each
way, because tensorstore's are `bytes`. There is no bound and no eviction here: buckets have lifecycle rules for that.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import StoreClosedError, StoreError, StoreFormatError
from .slab_record import HEADER_BYTES, MAX_KEY_BYTES, RecordHeader, checksum, pack_header, unpack_header
from .store import Buffers, Flags, StoreStats, check_keys, check_records, fingerprint_digest

__all__ = ["KvBlockStore"]


class KvBlockStore:
    """A `BlockStore` over a tensorstore KvStore.

    Give each layout its own path: a record of another layout under the same key is refused and counted as `foreign`
    when it is read, and replaced when the key is written, so two layouts in one place work, but evict each other.

    Args:
        spec: a tensorstore KvStore spec, such as `{"driver": "s3", "bucket": "b", "path": "kv/"}` or `"file:///x/"`.
        record_bytes, fingerprint, key_bytes: as of `SlabStore`.
        in_flight: records on their way at once; the memory held is this many records.

    Raises:
        StoreError: tensorstore is not installed, or cannot open the spec.
    """

    def __init__(
        self, spec: Any, *, record_bytes: int, fingerprint: str | bytes, key_bytes: int = 32, in_flight: int = 64
    ):
        if record_bytes < 1 or in_flight < 1 or not 1 <= key_bytes <= MAX_KEY_BYTES:
            raise StoreFormatError(
                f"a store needs record_bytes >= 1, in_flight >= 1 and key_bytes in 1..{MAX_KEY_BYTES}, "
                f"got {record_bytes}, {in_flight}, {key_bytes}"
            )
        try:
            import tensorstore
        except ImportError as error:
            raise StoreError("KvBlockStore needs tensorstore: pip install 'dsv4_jax[storage]'") from error
        try:
            self._kv = tensorstore.KvStore.open(spec).result()
        except ValueError as error:  # what tensorstore raises for everything
            raise StoreError(f"cannot open the key-value store {spec!r}: {error}") from error
        self.record_bytes, self.key_bytes, self._in_flight = record_bytes, key_bytes, in_flight
        self._fingerprint = fingerprint_digest(fingerprint)
        self._stats, self._lock, self._closed = StoreStats(), threading.Lock(), False

    def contains(self, keys: Sequence[bytes]) -> Flags:
        """Reads the headers (128 bytes an object)."""
        self._check_open()
        keys = check_keys(keys, self.key_bytes)
        return np.array([flag for batch in self._batches(keys) for flag in self._present(keys[batch])], bool)

    def read_into(self, keys: Sequence[bytes], buffers: Buffers) -> Flags:
        self._check_open()
        keys = check_keys(keys, self.key_bytes)
        views = check_records(buffers, len(keys), self.record_bytes, writable=True)
        good = np.zeros(len(keys), bool)
        stats = StoreStats()
        for batch in self._batches(keys):
            futures = [self._kv.read(_name(key)) for key in keys[batch]]
            for i, future in enumerate(futures, batch.start):
                result = _wait(future, "read")
                if result.state != "value":
                    continue
                verdict = self._judge(keys[i], result.value)
                if verdict == "good":
                    views[i][:] = np.frombuffer(result.value, np.uint8, offset=HEADER_BYTES)
                    good[i] = True
                elif verdict == "foreign":
                    stats.foreign += 1
                else:
                    stats.corrupted += 1
                    # Only this very copy: somebody may have written a good one since.
                    _wait(self._kv.write(_name(keys[i]), None, if_equal=result.stamp.generation), "delete")
        self._count(read=int(good.sum()), missed=int((~good).sum()), corrupted=stats.corrupted, foreign=stats.foreign)
        return good

    def write(self, keys: Sequence[bytes], records: Buffers) -> Flags:
        self._check_open()
        keys = check_keys(keys, self.key_bytes)
        views = check_records(records, len(keys), self.record_bytes, writable=False)
        added = np.zeros(len(keys), bool)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        for batch in self._batches(keys):
            there = self._present(keys[batch])
            new = [i for i in range(batch.start, batch.stop) if first[keys[i]] == i and not there[i - batch.start]]
            futures = [self._kv.write(_name(keys[i]), self._value(keys[i], views[i])) for i in new]
            for i, future in zip(new, futures, strict=True):
                _wait(future, "write")
                added[i] = True
        self._count(written=int(added.sum()))
        return added

    def delete(self, keys: Sequence[bytes]) -> Flags:
        self._check_open()
        keys = check_keys(keys, self.key_bytes)
        gone = np.zeros(len(keys), bool)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        for batch in self._batches(keys):
            there = self._present(keys[batch])
            for future in [self._kv.write(_name(key), None) for key in keys[batch]]:
                _wait(future, "delete")
            gone[batch] = [flag and first[keys[i]] == i for i, flag in enumerate(there, batch.start)]
        self._count(deleted=int(gone.sum()))
        return gone

    def stats(self) -> StoreStats:
        """`records` is -1: an object store does not know."""
        with self._lock:
            return dataclasses.replace(self._stats, records=-1)

    def flush(self) -> None:
        """Nothing to do: tensorstore's writes are durable when they return."""
        self._check_open()

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> KvBlockStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batches(self, keys: list[bytes]) -> list[slice]:
        return [slice(i, min(i + self._in_flight, len(keys))) for i in range(0, len(keys), self._in_flight)]

    def _present(self, keys: list[bytes]) -> list[bool]:
        futures = [self._kv.read(_name(key), byte_range=slice(0, HEADER_BYTES)) for key in keys]
        return [self._is_ours(key, future) for key, future in zip(keys, futures, strict=True)]

    def _is_ours(self, key: bytes, future: Any) -> bool:
        try:
            value = future.result().value
        except ValueError as error:
            if "OUT_OF_RANGE" in str(error):  # an object shorter than a header
                return False
            raise StoreError(f"key-value store: read failed: {error}") from error
        header = unpack_header(value)
        return header is not None and (header.key, header.fingerprint) == (key, self._fingerprint)

    def _value(self, key: bytes, view: np.ndarray) -> bytes:
        digest = checksum(view, key, self._fingerprint, 0)
        return pack_header(RecordHeader(key, 0, self.record_bytes, self._fingerprint, digest)) + view.tobytes()

    def _judge(self, key: bytes, value: bytes) -> str:
        header = unpack_header(value)
        if header is None:
            return "corrupted"
        if header.fingerprint != self._fingerprint:
            return "foreign"
        record = np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
        whole = header.key == key and record.size == header.record_bytes == self.record_bytes
        return "good" if whole and checksum(record, key, self._fingerprint, 0) == header.digest else "corrupted"

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")


def _name(key: bytes) -> str:
    return key.hex()


def _wait(future: Any, what: str) -> Any:
    try:
        return future.result()
    except ValueError as error:
        raise StoreError(f"key-value store: {what} failed: {error}") from error
