"""The slab file: where its parts are, and batches of positioned reads and writes on them.

    0                    4096                  data
    | file header        | record headers      | record 0   | pad | record 1   | pad | ...
      64 bytes used        128 bytes a slot      both parts start at multiples of 4096

Headers lie together so that opening a large store is one sequential read; records start at multiples of 4096 so that
they can go past the page cache (`direct=True`, O_DIRECT), from the caller's memory if address and size of a record are
multiples of what the disk asks for (512 bytes mostly), through an aligned bounce buffer if not: a copy that costs as
much as a checksum. Knows nothing of keys, and takes no lock but the file's.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import pathlib
import struct
import threading
import zlib
from collections.abc import Sequence

import numpy as np

from ..errors import StoreError, StoreFormatError, StoreFullError, StoreLockedError
from .slab_record import HEADER_BYTES

__all__ = ["SlabFile"]

PAGE = 4096
_SECTOR = 512
_MAGIC, _VERSION = b"dsv4slab", 1
_GEOMETRY = struct.Struct("<8sIIQQ")
_BATCH_BYTES = 8 << 20  # one system call moves about this much; the size of a bounce buffer
_BATCH_BUFFERS = 512  # below the kernel's limit of 1024, pads included
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class SlabFile:
    """An open, locked slab file of `slots` records.

    Args:
        path: made, with its geometry, if it does not exist or is empty.
        direct: move records with O_DIRECT.
        preallocate: have a new file's blocks reserved.

    Raises:
        StoreLockedError: somebody has it open.
        StoreFormatError: it is something else, or has other sizes.
        StoreFullError, StoreError: the file system refuses.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        record_bytes: int,
        slots: int,
        key_bytes: int,
        *,
        direct: bool,
        preallocate: bool,
    ):
        self.path, self.record_bytes, self.slots = pathlib.Path(path), record_bytes, slots
        self.stride = _round_up(record_bytes)
        self.data_offset = PAGE + _round_up(slots * HEADER_BYTES)
        self._size = self.data_offset + slots * self.stride
        self._pad = _pages(PAGE)[: self.stride - record_bytes]
        self._scratch = _pages(PAGE)[: self._pad.size]  # where pads are read to; what it holds is never looked at
        self._files: list[int] = []
        self._local = threading.local()
        try:
            self.headers = self._open(0)
            self._lock()
            self._check_geometry(key_bytes, preallocate)
            self.records = self._open(os.O_DIRECT) if direct else self.headers
            self.alignment = self._find_alignment() if direct else 1
        except OSError as error:
            self.close()
            if isinstance(error, StoreError):
                raise
            raise _typed(error, f"cannot open {self.path}{' with O_DIRECT' if direct else ''}") from error
        except BaseException:
            self.close()
            raise

    def _open(self, flags: int) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
        self._files.append(file)
        return file

    def _lock(self) -> None:
        try:
            fcntl.flock(self.headers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLockedError(f"{self.path} is open in another store: a slab file has one owner") from None

    def _check_geometry(self, key_bytes: int, preallocate: bool) -> None:
        wanted = _GEOMETRY.pack(_MAGIC, _VERSION, key_bytes, self.record_bytes, self.slots)
        found = os.pread(self.headers, _GEOMETRY.size + 4, 0)
        if not found.strip(b"\0"):  # new, or its making was cut short before the header got there
            if os.fstat(self.headers).st_size not in (0, self._size):
                raise StoreFormatError(f"{self.path} is not a slab file, and not empty")
            if preallocate:
                os.posix_fallocate(self.headers, 0, self._size)
            os.ftruncate(self.headers, self._size)
            os.pwrite(self.headers, wanted + struct.pack("<I", zlib.crc32(wanted)), 0)
            directory = os.open(self.path.resolve().parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)  # or a power cut could take the file's name away
            finally:
                os.close(directory)
            return
        body, crc = found[: _GEOMETRY.size], found[_GEOMETRY.size :]
        if body[:8] != _MAGIC or struct.pack("<I", zlib.crc32(body)) != crc:
            raise StoreFormatError(f"{self.path} is not a slab file")
        if body != wanted:
            _, version, keys, record_bytes, slots = _GEOMETRY.unpack(body)
            raise StoreFormatError(
                f"{self.path} has {slots} records of {record_bytes} bytes, keys of {keys} bytes, version {version}; "
                f"asked for {self.slots} of {self.record_bytes}, keys of {key_bytes}, version {_VERSION}"
            )
        # A file cut short by an interrupted copy reads as zeros, which are refused like any wrong bytes.
        if os.fstat(self.headers).st_size < self._size:
            os.ftruncate(self.headers, self._size)

    def _find_alignment(self) -> int:
        """What O_DIRECT asks of addresses and sizes of memory here: 512 bytes, the sector of most disks, or 4096."""
        try:
            os.preadv(self.records, [_bytes(_pages(PAGE)[_SECTOR : 2 * _SECTOR])], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return PAGE
        return _SECTOR

    def read_headers(self) -> bytes:
        """All record headers, `HEADER_BYTES` each."""
        table = bytearray(self.slots * HEADER_BYTES)
        _transfer(os.preadv, self.headers, [memoryview(table)], PAGE)
        return bytes(table)

    def write_headers(self, headers: dict[int, bytes]) -> None:
        """Write the headers of some slots, neighbours in one call. Raises `StoreFullError`, `StoreError`."""
        for run in _runs(sorted(headers), _BATCH_BUFFERS):
            joined = memoryview(b"".join(headers[slot] for slot in run))
            self._do(os.pwritev, self.headers, [joined], PAGE + run[0] * HEADER_BYTES)

    def write_records(self, slots: Sequence[int], records: Sequence[np.ndarray]) -> None:
        """Write records (uint8 [record_bytes]) to their slots. Raises `StoreFullError`, `StoreError`."""
        self._move(slots, records, write=True)

    def read_records(self, slots: Sequence[int], buffers: Sequence[np.ndarray]) -> None:
        """Fill buffers (uint8 [record_bytes]) from their slots. Raises `StoreError`."""
        self._move(slots, buffers, write=False)

    def _move(self, slots: Sequence[int], buffers: Sequence[np.ndarray], *, write: bool) -> None:
        by_slot: dict[int, list[np.ndarray]] = {}
        for slot, buffer in zip(slots, buffers, strict=True):
            by_slot.setdefault(slot, []).append(buffer)
        call = os.pwritev if write else os.preadv
        pad = self._pad if write else self._scratch
        for run in _runs(sorted(by_slot), min(_BATCH_BUFFERS // 2, max(1, _BATCH_BYTES // self.stride))):
            offset, views = self.data_offset + run[0] * self.stride, [by_slot[slot][0] for slot in run]
            if any((view.ctypes.data | view.size) % self.alignment for view in views):
                staged = self._bounce()[: len(run) * self.stride].reshape(len(run), self.stride)
                if write:
                    for row, view in zip(staged, views, strict=True):
                        row[: self.record_bytes] = view
                self._do(call, self.records, [_bytes(staged)], offset)
                if not write:
                    for row, view in zip(staged, views, strict=True):
                        view[:] = row[: self.record_bytes]
            else:
                padded = [part for view in views for part in (view, pad)] if pad.size else views
                self._do(call, self.records, [_bytes(part) for part in padded], offset)
        for first, *again in by_slot.values():
            for buffer in again:
                buffer[:] = first

    def _bounce(self) -> np.ndarray:
        """This thread's page-aligned buffer, kept: making one costs as much as filling it."""
        if not hasattr(self._local, "bounce"):
            self._local.bounce = _pages(max(_BATCH_BYTES, self.stride))
        return self._local.bounce

    def _do(self, call, file: int, views: list[memoryview], offset: int) -> None:
        try:
            _transfer(call, file, views, offset)
        except OSError as error:
            raise _typed(error, f"{'writing' if call is os.pwritev else 'reading'} {self.path} failed") from error

    def sync(self) -> None:
        """Wait until the disk has what was written. Raises `StoreFullError`, `StoreError`."""
        try:
            os.fdatasync(self.headers)
        except OSError as error:
            raise _typed(error, f"fdatasync of {self.path} failed") from error

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def _pages(size: int) -> np.ndarray:
    """Zeroed, page-aligned uint8 [size]."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.data).cast("B")


def _typed(error: OSError, what: str) -> StoreError:
    return (StoreFullError if error.errno in _FULL else StoreError)(f"{what}: {error.strerror or error}")


def _runs(slots: list[int], longest: int) -> list[list[int]]:
    """Sorted slots cut into runs of neighbours."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][-1] + 1 == slot and len(runs[-1]) < longest:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _transfer(call, file: int, views: list[memoryview], offset: int) -> None:
    """`preadv` or `pwritev` until all is moved: the kernel may move less than it was asked to."""
    while views:
        moved = call(file, views, offset)
        if moved == 0:
            raise OSError(errno.EIO, "the file is shorter than it should be")
        offset += moved
        while views and moved >= views[0].nbytes:
            moved -= views.pop(0).nbytes
        if moved:
            views[0] = views[0][moved:]
