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
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Sequence

import numpy as np

from ...errors import StoreError, StoreFormatError
from ..record_header import HEADER_BYTES, VERSION
from .owned_file import OwnedFile, move_all, store_error

__all__ = ["SlabFile"]

PAGE = 4096
_SECTOR = 512
_MAGIC = b"dsv4slab"
_GEOMETRY = struct.Struct("<8sIIQQ")
_BATCH_BYTES = 8 << 20  # one system call moves about this much; the size of a bounce buffer
_BATCH_BUFFERS = 512  # below the kernel's limit of 1024, pads included
_MAX_BYTES = 2**63 - 1  # of a file
# A bad sector, as the page cache, the block layer and checksumming file systems call it; an end of the file that was
# not there before, in the middle of a sector.
_UNREADABLE = (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EINVAL)


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class SlabFile(OwnedFile):
    """An open, locked slab file of `slots` records.

    Args:
        path: made, with its geometry, for its owner alone, if it does not exist or no byte was written to it.
        direct: move records with O_DIRECT.
        preallocate: have a new file's blocks reserved.

    Raises:
        StoreBusyError: somebody has it open.
        StoreFormatError: it is something else, has other sizes, or would be larger than files can be.
        StoreError: the file system refuses. A file that could not be made is not there.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike,
        record_bytes: int,
        slots: int,
        key_bytes: int,
        *,
        direct: bool,
        preallocate: bool,
    ):
        self.record_bytes, self.slots = record_bytes, slots
        self.stride = _round_up(record_bytes)
        self.data_offset = PAGE + _round_up(slots * HEADER_BYTES)
        self._size = self.data_offset + slots * self.stride
        if self._size > _MAX_BYTES:
            raise StoreFormatError(
                f"record_bytes {record_bytes} times max_records {slots} makes a file of more than {_MAX_BYTES} bytes"
            )
        self._pad = _pages(PAGE)[: self.stride - record_bytes]
        self._scratch = _pages(PAGE)[: self._pad.size]  # where pads are read to; what it holds is never looked at
        self._local = threading.local()
        super().__init__(path)
        with self.opening():
            self.check_geometry(key_bytes, preallocate)
            self.headers = self.file
            self.records = self.open_direct() if direct else self.headers
            self.alignment = self.find_alignment() if direct else 1

    def check_geometry(self, key_bytes: int, preallocate: bool) -> None:
        wanted = _GEOMETRY.pack(_MAGIC, VERSION, key_bytes, self.record_bytes, self.slots)
        unwritten = self.is_unwritten(self._size)  # before anything is read: the page cache counts as written
        found = os.pread(self.file, _GEOMETRY.size + 4, 0)
        if not found.strip(b"\0"):
            if not unwritten:
                raise StoreFormatError(f"{self.path} is not a slab file, and not empty")
            self.make(self._size, wanted + struct.pack("<I", zlib.crc32(wanted)), preallocate=preallocate)
            return
        body, crc = found[: _GEOMETRY.size], found[_GEOMETRY.size :]
        if body[:8] != _MAGIC or struct.pack("<I", zlib.crc32(body)) != crc:
            raise StoreFormatError(f"{self.path} is not a slab file")
        if body != wanted:
            _, version, keys, record_bytes, slots = _GEOMETRY.unpack(body)
            if version != VERSION:
                raise StoreFormatError(
                    f"{self.path} is a slab file of version {version}, only version {VERSION} can be read: remove it, "
                    "or name another; its records are made anew as they are needed"
                )
            raise StoreFormatError(
                f"{self.path} has {slots} records of {record_bytes} bytes, keys of {keys} bytes; "
                f"asked for {self.slots} of {self.record_bytes}, keys of {key_bytes}"
            )
        # A file cut short by an interrupted copy reads as zeros, which are refused like any wrong bytes.
        if os.fstat(self.file).st_size < self._size:
            os.ftruncate(self.file, self._size)

    def find_alignment(self) -> int:
        """What O_DIRECT asks of addresses and sizes of memory here: 512 bytes, the sector of most disks, or 4096."""
        try:
            os.preadv(self.records, [_bytes(_pages(PAGE)[_SECTOR : 2 * _SECTOR])], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return PAGE
        return _SECTOR

    def read_headers(self) -> tuple[bytes, set[int]]:
        """All record headers, `HEADER_BYTES` each, and the slots of those that the disk cannot read: blank here."""
        table = memoryview(bytearray(self.slots * HEADER_BYTES))
        try:
            move_all(os.preadv, self.headers, [table], PAGE)
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            unreadable = {slot for start in range(0, len(table), PAGE) for slot in self._unreadable(table, start)}
            if len(unreadable) == self.slots:
                raise
            return bytes(table), unreadable
        return bytes(table), set()

    def _unreadable(self, table: memoryview, start: int) -> range:
        """Reads a page of headers alone; the slots of it if the disk cannot."""
        page = table[start : start + PAGE]
        try:
            move_all(os.preadv, self.headers, [page], PAGE + start)
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            page[:] = bytes(len(page))
            return range(start // HEADER_BYTES, (start + len(page)) // HEADER_BYTES)
        return range(0)

    def read_header(self, slot: int) -> bytes:
        """Reads one record's header. Raises `StoreError`."""
        header = memoryview(bytearray(HEADER_BYTES))
        self._do(os.preadv, self.headers, [header], PAGE + slot * HEADER_BYTES)
        return bytes(header)

    def write_headers(self, headers: dict[int, bytes]) -> None:
        """Write the headers of some slots, neighbours in one call. Raises `StoreError`."""
        for run in _runs(sorted(headers), _BATCH_BUFFERS):
            joined = memoryview(b"".join(headers[slot] for slot in run))
            self._do(os.pwritev, self.headers, [joined], PAGE + run[0] * HEADER_BYTES)

    def write_records(self, slots: Sequence[int], records: Sequence[np.ndarray]) -> None:
        """Write records (uint8 [record_bytes]) to their slots. Raises `StoreError`."""
        self._move(slots, records, write=True)

    def read_records(self, slots: Sequence[int], buffers: Sequence[np.ndarray]) -> None:
        """Fills buffers (uint8 [record_bytes]) from their slots. Raises `StoreError`.

        What the disk cannot read in one call with its neighbours is read alone. What it cannot read then either
        leaves its buffer in any state, which the checksum refuses.
        """
        self._move(slots, buffers, write=False)

    def _move(self, slots: Sequence[int], buffers: Sequence[np.ndarray], *, write: bool) -> None:
        by_slot: dict[int, list[np.ndarray]] = {}
        for slot, buffer in zip(slots, buffers, strict=True):
            by_slot.setdefault(slot, []).append(buffer)
        for run in _runs(sorted(by_slot), min(_BATCH_BUFFERS // 2, max(1, _BATCH_BYTES // self.stride))):
            views = [by_slot[slot][0] for slot in run]
            if write:
                self._move_run(run[0], views, write=True)
            elif not self._could_read(run[0], views):
                for slot, view in zip(run, views, strict=True):
                    self._could_read(slot, [view])
        for first, *again in by_slot.values():
            for buffer in again:
                buffer[:] = first

    def _could_read(self, first: int, views: list[np.ndarray]) -> bool:
        """Reads slots from `first` on; False if the disk cannot. Raises `StoreError` for anything else."""
        try:
            self._move_run(first, views, write=False)
        except StoreError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _UNREADABLE:
                raise
            return False
        return True

    def _move_run(self, first: int, views: list[np.ndarray], *, write: bool) -> None:
        """Writes the views to the slots from `first` on, or reads these into them, in one call."""
        call, offset = os.pwritev if write else os.preadv, self.data_offset + first * self.stride
        if any((view.ctypes.data | view.size) % self.alignment for view in views):
            staged = self.bounce_buffer()[: len(views) * self.stride].reshape(len(views), self.stride)
            if write:
                for row, view in zip(staged, views, strict=True):
                    row[: self.record_bytes] = view
            self._do(call, self.records, [_bytes(staged)], offset)
            if not write:
                for row, view in zip(staged, views, strict=True):
                    view[:] = row[: self.record_bytes]
        else:
            pad = self._pad if write else self._scratch
            padded = [part for view in views for part in (view, pad)] if pad.size else views
            self._do(call, self.records, [_bytes(part) for part in padded], offset)

    def bounce_buffer(self) -> np.ndarray:
        """Returns this thread's page-aligned buffer, kept: making one costs as much as filling it."""
        if not hasattr(self._local, "bounce"):
            self._local.bounce = _pages(max(_BATCH_BYTES, self.stride))
        return self._local.bounce

    def _do(self, call, file: int, views: list[memoryview], offset: int) -> None:
        try:
            move_all(call, file, views, offset)
        except OSError as error:
            raise store_error(error, f"{'writing' if call is os.pwritev else 'reading'} {self.path} failed") from error


def _pages(size: int) -> np.ndarray:
    """Memory of zeros that begins at a page: uint8 [size]."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.data).cast("B")


def _runs(slots: list[int], longest: int) -> list[list[int]]:
    """Sorted slots cut into runs of neighbours."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][-1] + 1 == slot and len(runs[-1]) < longest:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs
