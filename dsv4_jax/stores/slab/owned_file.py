"""`OwnedFile`: one file that one process has open, through errors, interrupts, forks and what others do to its path.

The path is opened once, never through a symbolic link; whatever is opened after that is what was locked. The file is
made wholly or not at all. Once an fsync has failed it is not used again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import stat
import threading
import weakref
from collections.abc import Iterator

from ...errors import StoreBusyError, StoreError, StoreFormatError

__all__ = ["OwnedFile", "move_all", "store_error"]


class OwnedFile:
    """A regular file, open and locked; made, for its owner alone, if there is none.

    Whoever goes on opening it does so within `opening`: if that fails the file is let go, and not there if it was not
    there before.

    Raises:
        StoreBusyError: somebody has it open.
        StoreFormatError: it is no path of a regular file.
        StoreError: the file system refuses.
    """

    def __init__(self, path: str | bytes | os.PathLike):
        self.path, self.file = _checked_path(path), -1
        self._made = False
        self._files: list[int] = []
        self._sync_lock = threading.Lock()
        self._failed: StoreError | None = None
        weakref.finalize(self, _let_go, self._files)  # one that is dropped is not locked for ever
        _OPEN.add(self)
        with self.opening():
            self._open()
            self._lock()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._made and not isinstance(error, StoreBusyError):  # then another process has it open
                self._remove()
            self.close()
            if not isinstance(error, OSError) or isinstance(error, StoreError):
                raise
            link = ": a symbolic link is not followed" if error.errno == errno.ELOOP else ""
            raise store_error(error, f"cannot open {self.path}{link}") from error

    def _open(self) -> None:
        # Opening a FIFO or a device must neither wait nor take a terminal.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            self._files.append(os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600))
            self._made = True
        except FileExistsError:
            self._files.append(os.open(self.path, flags))
        self.file = self._files[0]

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self.file).st_mode):
            raise StoreFormatError(f"{self.path} is not a regular file")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusyError(f"{self.path} is open in another store: a slab file has one owner") from None
        if not self._has_its_name():
            raise StoreError(f"{self.path} was replaced while it was being opened")

    def _has_its_name(self) -> bool:
        """Whether the path still means this file. Raises `OSError` if it means none."""
        return os.path.samestat(os.fstat(self.file), os.stat(self.path, follow_symlinks=False))

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._has_its_name():
                os.unlink(self.path)

    def open_direct(self) -> int:
        """Returns the same file once more, with O_DIRECT: not by its path, which may mean another one by now."""
        try:
            self._files.append(os.open(f"/proc/self/fd/{self.file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            raise store_error(error, f"cannot open {self.path} with O_DIRECT") from error
        return self._files[-1]

    def is_unwritten(self, size: int) -> bool:
        """Whether nobody wrote a byte of a file that begins with zeros: it is empty, or `make` was cut short."""
        if os.fstat(self.file).st_size == size:  # not every file system tells
            return True
        try:
            os.lseek(self.file, 0, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return True
        return False

    def make(self, size: int, start: bytes, *, preallocate: bool) -> None:
        """Makes room, then writes the first bytes: a kill in between leaves what `is_unwritten`, an error an empty
        file."""
        try:
            os.fchmod(self.file, 0o600)  # it may have been there, empty
            os.ftruncate(self.file, 0)
            if preallocate:
                self._check_room(size)
            os.ftruncate(self.file, size)
            if preallocate:
                os.posix_fallocate(self.file, 0, size)
            move_all(os.pwritev, self.file, [memoryview(start)], 0)
            os.fdatasync(self.file)
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)  # or a power cut could take the file's name away
            finally:
                os.close(directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self.file, 0)
            raise

    def _check_room(self, size: int) -> None:
        """Before any is taken: to fill a disk and then find that it was too small fails all who write to it."""
        disk = os.fstatvfs(self.file)
        free = (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize
        if disk.f_blocks and free < size:
            raise StoreError(f"cannot make {self.path}: it needs {size} bytes, the disk has {free} free")

    def sync(self) -> None:
        """Wait until the disk has what was written. Raises `StoreError`.

        Once that failed it fails for ever: the kernel tells one caller of the pages it could not write, once, and
        then calls them clean.
        """
        with self._sync_lock:
            self.check()
            try:
                os.fdatasync(self.file)
            except OSError as error:
                self._failed = store_error(error, f"fdatasync of {self.path} failed")
                raise self._failed from error

    def check(self) -> None:
        """Raises `StoreError` after a failed `sync`."""
        if self._failed is not None:
            raise StoreError(f"{self.path} must be opened again: {self._failed}")

    @property
    def is_open(self) -> bool:
        return bool(self._files)

    def close(self) -> None:
        _let_go(self._files)


_OPEN: weakref.WeakSet[OwnedFile] = weakref.WeakSet()


def _let_go(files: list[int]) -> None:
    """Unlocks and closes. Without the first, a process between fork and exec could hold the lock a moment longer."""
    while files:
        file = files.pop()
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(file)


def _after_fork() -> None:
    """A child has copies of the open files, and they hold the lock as long as any lives: it closes its own."""
    for file in list(_OPEN):
        while file._files:
            with contextlib.suppress(OSError):
                os.close(file._files.pop())


os.register_at_fork(after_in_child=_after_fork)


def _checked_path(path: str | bytes | os.PathLike) -> pathlib.Path:
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise StoreFormatError(f"path must be a path of a file, got {type(path).__name__}") from None
    if "\0" in text:
        raise StoreFormatError(f"path must be a path of a file, got {text!r}")
    return pathlib.Path(text)


def store_error(error: OSError, what: str) -> StoreError:
    """The error of a store that this one of the system is."""
    return StoreError(f"{what}: {error.strerror or error}")


def move_all(call, file: int, views: list[memoryview], offset: int) -> None:
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
