"""`SlabStore`: one file of fixed-size slots on a local disk, an index in memory.

How a record is committed: its bytes are written to a slot whose header is blank, then the header. A crash in
between leaves a blank header, so the record was never there; a crash of the machine may also lose or tear what the
page cache held, and then the checksum, verified on every read, refuses it. Replacing a record blanks its header first.
So nothing needs a log, and opening is one sequential read of the headers. The index shows no key whose header the file
may lack: it is told last of what is written, and first of what goes; after a failed call headers are read again.

No lock is held while records and their headers are written, so that the checksums of one call are computed while
another waits for the disk. Of two threads that write the same key, the one that comes to the index second blanks its
header again; should a crash prevent that, opening finds both and keeps the newer. Nor is one held while records are
read: a reader looks the slot up, reads into the caller's memory, verifies. If the slot was given to another key
meanwhile the checksum (which covers the key) fails, the index shows why, and it is a miss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from ...checks import check_boolean, check_integer
from ...errors import StoreError, StoreFormatError
from ..base import Buffers, Flags, StoreStats
from ..checks import check_keys, check_process, check_records, end_within
from ..checksum import checksums
from ..record_header import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    RecordHeader,
    fingerprint_digest,
    pack_header,
    unpack_header,
)
from .file import SlabFile
from .index import SlabEntry, SlabIndex

__all__ = ["SlabStore"]

_BLANK = bytes(HEADER_BYTES)
_MAX_GENERATION = 1 << 62  # no store comes so far, and one that goes on from here stays within 64 bits


class SlabStore:
    """A `RecordStore` in one file, of at most `max_records` records; the least recently used give way.

    Use is counted by a clock that ticks with the calls (never by time): writing and reading a record makes it the
    most recent, `contains` does not. What is kept across a restart is the order of writing.

    Args:
        path: the file, made (mode 0600) if absent or empty; no symbolic link. One process, one store at a time. Whoever
            can write it decides what is served (see docs/stores.md).
        record_bytes: size of every record (`block_record(layout).bytes` for blocks).
        max_records: slots of the file.
        fingerprint: what the records are (`CacheLayout.block_fingerprint`, or `snapshot_fingerprint`). Others that are
            in the file are counted as `foreign` on opening and their slots are free.
        key_bytes: length of every key, at most 48.
        sync: when the disk is waited for. "close": in `flush` and `close`; a killed process loses nothing that was
            written, a machine that loses power may lose recent records (it never serves wrong ones). "write": each
            `write` returns when its records would survive a power cut too.
        direct: go past the page cache (O_DIRECT). Then a cold store is as fast as a warm one, memory is left to others,
            and where records begin at multiples of 512 bytes and are as many long (4096 on some disks), the disk
            reads and writes the caller's memory itself.
        preallocate: reserve a new file's room at once, so that a full disk is found here and not later, and writing
            is faster (by a third with `direct` on ext4). Without, the file takes room as records come.

    A record that the disk cannot read, alone neither, is a miss and forgotten, as one that is damaged. After a failed
    fsync every call raises `StoreError` until the store is closed and opened again: what the disk has is unknown then.

    Attributes:
        file, index: its parts, to look at.

    Raises:
        StoreFormatError: a setting of a wrong type or size; a file of another kind, or with other sizes.
        StoreBusyError, StoreError: see those. A new file is not there then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        record_bytes: int,
        max_records: int,
        fingerprint: str | bytes,
        key_bytes: int = 32,
        sync: Literal["close", "write"] = "close",
        direct: bool = False,
        preallocate: bool = True,
    ):
        self.record_bytes = check_integer("record_bytes", record_bytes, 1, error=StoreFormatError)
        self.max_records = check_integer("max_records", max_records, 1, error=StoreFormatError)
        self.key_bytes = check_integer("key_bytes", key_bytes, 1, MAX_KEY_BYTES, error=StoreFormatError)
        if sync not in ("close", "write"):
            raise StoreFormatError(f"sync must be 'close' or 'write', got {sync!r}")
        direct, preallocate = (
            check_boolean(name, value, error=StoreFormatError)
            for name, value in (("direct", direct), ("preallocate", preallocate))
        )
        self._fingerprint, self._sync = fingerprint_digest(fingerprint), sync
        self._lock = threading.Lock()
        self.index = SlabIndex(self.max_records)
        self._stats = StoreStats()
        self._calls = 0
        self._idle = threading.Condition(self._lock)
        self._closed, self._process = False, os.getpid()
        self.file = SlabFile(
            path, self.record_bytes, self.max_records, self.key_bytes, direct=direct, preallocate=preallocate
        )
        try:
            self._load()
        except BaseException:
            self.file.close()
            raise

    def _load(self) -> None:
        """Rebuild the index from the headers; blank what cannot be used so that it is counted once."""
        with self.file.opening():
            table, unreadable = self.file.read_headers()
        useless: list[int] = []
        for slot in np.flatnonzero(np.frombuffer(table, np.uint8).reshape(-1, HEADER_BYTES).any(1)).tolist():
            header = unpack_header(table[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES])
            if header is None or not self._is_possible(header):
                self._stats.corrupted += 1
                useless.append(slot)
                continue
            self.index.generation = max(self.index.generation, header.generation)
            if header.fingerprint != self._fingerprint:
                self._stats.foreign += 1
                useless.append(slot)
                continue
            older = self.index.restore(header.key, SlabEntry(slot, header.generation, header.digest))
            if older is not None:  # a power cut may bring back the blanked older copy
                useless.append(older)
        try:
            self.file.write_headers(dict.fromkeys(useless, _BLANK))
        except StoreError:  # a full disk, say: what is there can be read all the same
            self.index.stale.update(useless)
        self.index.settle(resting=unreadable)  # those rest until the file is opened again
        if self._sync == "write":
            self.file.sync()  # a key that is here is not written again: it may be of a process that was killed

    def _is_possible(self, header: RecordHeader) -> bool:
        """Whether a store of these sizes can have written it."""
        sizes = len(header.key), header.record_bytes
        return sizes == (self.key_bytes, self.record_bytes) and header.generation < _MAX_GENERATION

    # The protocol.

    def contains(self, keys: Sequence[bytes]) -> Flags:
        keys = check_keys(keys, self.key_bytes)
        with self._using(), self._lock:
            return np.array([key in self.index.entries for key in keys], bool)

    def read_into(self, keys: Sequence[bytes], buffers: Buffers) -> Flags:
        keys = check_keys(keys, self.key_bytes)
        views = check_records(buffers, len(keys), self.record_bytes, writable=True)
        good = np.zeros(len(keys), bool)
        with self._using():
            found: dict[int, SlabEntry] = {}
            with self._lock:
                entries = self.index.entries
                for i, key in enumerate(keys):
                    if key in entries:
                        found[i] = entries[key]
                        entries.move_to_end(key)
            some = [views[i] for i in found]
            self.file.read_records([entry.slot for entry in found.values()], some)
            generations = [entry.generation for entry in found.values()]
            digests = checksums(some, [keys[i] for i in found], self._fingerprint, generations)
            for (i, entry), digest in zip(found.items(), digests, strict=True):
                good[i] = digest == entry.digest
            with self._lock:
                # What the index still shows as it was is damaged; the rest was evicted while it was read.
                bad = {
                    keys[i] for i, entry in found.items() if not good[i] and self.index.entries.get(keys[i]) == entry
                }
                self._stats.corrupted += len(bad)
                self._stats.read += int(good.sum())
                self._stats.missed += int((~good).sum())
                self._forget_unreadable(list(bad))
        return good

    def write(self, keys: Sequence[bytes], records: Buffers) -> Flags:
        keys = check_keys(keys, self.key_bytes)
        views = check_records(records, len(keys), self.record_bytes, writable=False)
        if len(set(keys)) > self.max_records:
            raise StoreError(f"a batch of {len(set(keys))} records into a store of {self.max_records}")
        added = np.zeros(len(keys), bool)
        slots: list[int] = []
        evicted: list[int] = []
        with self._using():
            try:
                with self._lock:
                    new: dict[bytes, int] = {}
                    for i, key in enumerate(keys):
                        if key in self.index.entries:
                            self.index.entries.move_to_end(key)
                        else:
                            new.setdefault(key, i)
                    evicted = self.index.take(len(new), set(keys), slots)
                    self._stats.evicted += len(evicted)
                    generations = self.index.next_generations(len(new))
                    blanks = self.index.stale.intersection(slots).union(evicted)
                chosen, some = dict(zip(new, slots, strict=True)), [views[i] for i in new.values()]
                digests = checksums(some, list(new), self._fingerprint, generations)
                headers = {
                    key: RecordHeader(key, generation, self.record_bytes, self._fingerprint, digest)
                    for key, generation, digest in zip(new, generations, digests, strict=True)
                }
                # A disk that is full says so at a slot that was never used: before what gives way has lost its header.
                self._write_records(slots, some, blanks, without=True)
                self.file.write_headers(dict.fromkeys(blanks, _BLANK))
                self._write_records(slots, some, blanks, without=False)
                if self._sync == "write" and new:
                    self.file.sync()  # a header must not reach the disk before its record
                self.file.write_headers({chosen[key]: pack_header(header) for key, header in headers.items()})
                if self._sync == "write" and new:
                    self.file.sync()  # whoever finds the key in the index does not write it again
                with self._lock:
                    self.index.stale.difference_update(slots)
                    for key in self._publish(headers, chosen):
                        added[new[key]] = True
            except BaseException:
                with self._lock:
                    self._stats.evicted -= len(self._recover(slots, keys).intersection(evicted))
                raise
        return added

    def delete(self, keys: Sequence[bytes]) -> Flags:
        keys = check_keys(keys, self.key_bytes)
        with self._using(), self._lock:
            there = {key for key in keys if key in self.index.entries}
            self._forget(list(there))
            self._stats.deleted += len(there)
            first = {key: i for i, key in reversed(list(enumerate(keys)))}
            return np.array([key in there and first[key] == i for i, key in enumerate(keys)], bool)

    @property
    def active_calls(self) -> int:
        """Calls that use the file now; `close` waits for them."""
        return self._calls

    def stats(self) -> StoreStats:
        check_process(self._process)
        with self._lock:
            return dataclasses.replace(self._stats, records=len(self.index.entries))

    def flush(self) -> None:
        with self._using():
            self.file.sync()

    def close(self, timeout: float | None = None) -> None:
        """As `RecordStore.close`. Raises `StoreBusyError` if it takes longer than `timeout` seconds, as the disk hangs:
        then it goes on, and a later call waits for it."""
        if os.getpid() == self._process:
            end_within("close", self._let_go, timeout)

    def _let_go(self) -> None:
        with self._lock:  # so that every close returns when the file is let go, and one can finish another's work
            self._closed = True
            self._idle.wait_for(lambda: self._calls == 0)
            if self.file.is_open:
                try:
                    self.file.sync()
                except StoreError:
                    self.file.close()
                    raise
                self.file.close()

    def __enter__(self) -> SlabStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Under the lock, `_using` excepted.

    def _forget(self, keys: list[bytes]) -> None:
        """Strikes the keys out, blanks their headers, then lets the slots go: nothing is shown that the file may not
        have, and a slot that is written to never has a header."""
        slots = self.index.slots_of(keys)
        try:
            self.index.remove(keys)
            self.file.write_headers(dict.fromkeys(slots, _BLANK))
            self.index.free.extend(slots)
        except BaseException:
            self._recover(slots)
            raise

    def _forget_unreadable(self, keys: list[bytes]) -> None:
        """`_forget`; on a disk that cannot be written either, their headers come off when the slots are used again."""
        try:
            self._forget(keys)
        except StoreError:
            keys = [key for key in keys if key in self.index.entries]
            slots = self.index.slots_of(keys)
            self.index.remove(keys)
            self.index.give_back(slots)

    def _recover(self, slots: list[int], unwritten: Sequence[bytes] = ()) -> set[int]:
        """After a call that was cut off: of its slots that nobody has the index shows what the file does.

        Where a header stands its record is whole: the header comes off before the record is touched, and goes on when
        it is written.

        Args:
            unwritten: keys that are not shown all the same: `write` did not return, nor perhaps a sync.

        Returns:
            The slots of records that are shown again.
        """
        found: list[tuple[int, bytes, SlabEntry]] = []
        for slot in self.index.give_back(slots):
            with contextlib.suppress(StoreError):  # then it is not shown
                data = self.file.read_header(slot)
                if data == _BLANK:
                    self.index.stale.discard(slot)
                elif (header := unpack_header(data)) is not None:
                    found.append((header.generation, header.key, SlabEntry(slot, header.generation, header.digest)))
        found.sort(key=lambda each: each[0], reverse=True)  # the oldest is to give way first
        back = [entry for _, key, entry in found if key not in unwritten and self.index.put_back(key, entry)]
        return {entry.slot for entry in back}

    def _publish(self, headers: dict[bytes, RecordHeader], chosen: dict[bytes, int]) -> list[bytes]:
        """Make written records visible; a key another thread made visible first gives its slot back."""
        fresh = [key for key in headers if key not in self.index.entries]
        late = [chosen[key] for key in headers.keys() - set(fresh)]
        for key in fresh:
            self.index.entries[key] = SlabEntry(chosen[key], headers[key].generation, headers[key].digest)
        self._stats.written += len(fresh)
        self.file.write_headers(dict.fromkeys(late, _BLANK))
        self.index.free.extend(late)
        return fresh

    # Without it.

    def _write_records(self, slots: list[int], records: list[np.ndarray], blanks: set[int], *, without: bool) -> None:
        """Writes the records whose slots are in `blanks`; `without`: the others."""
        some = [(slot, record) for slot, record in zip(slots, records, strict=True) if (slot in blanks) != without]
        self.file.write_records([slot for slot, _ in some], [record for _, record in some])

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Around a call: `close` waits for it."""
        check_process(self._process)  # before the lock, which a thread that a fork left behind may hold
        counted = False
        try:
            with self._lock:
                if self._closed:
                    raise StoreError("the store is closed")
                self.file.check()
                self._calls += 1
                counted = True
            yield
        finally:
            if counted:
                with self._lock:
                    self._calls -= 1
                    self._idle.notify_all()
