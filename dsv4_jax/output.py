"""Files that a command or a caller asks to be written: whole or not at all, and only where a regular file may be.

A file is written under an unpredictable name in the folder of its place, synchronised, and then renamed to it. So a
reader sees the old file or the new one, and a failure (a full disk, Ctrl-C) leaves the old one and nothing else. Only
a process that is killed while it writes leaves a file called `.<16 hexadecimal digits>.part`.

What is at the place already must be a regular file that we may write; it is replaced and keeps its permissions (other
hard links to it keep the old bytes). Folders, devices, FIFOs and sockets are refused. So are symbolic links: what a
link names may be changed, by others in a shared folder, after it was looked at. Folders on the way may be links.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from typing import IO, Any

from .errors import FileError

__all__ = ["PICTURES", "check_output", "check_picture", "file_kind", "open_output"]

PICTURES = (".png", ".pdf", ".svg")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}


def file_kind(mode: int) -> str | None:
    """What there is instead of a regular file, in words; None if it is one."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


def check_output(path: str | os.PathLike[str]) -> None:
    """Says before the work what `open_output` would say after it. Makes a file in the folder and removes it.

    Raises:
        FileError: no file can be written there.
    """
    with _folder(path) as (folder, name):
        _mode(folder, name)
        temporary, file = _create(folder)
        os.close(file)
        os.unlink(temporary, dir_fd=folder)


def check_picture(path: str | os.PathLike[str]) -> None:
    """Checks, as `check_output`, the place of a picture: its name must say a format, and matplotlib be there.

    Raises:
        FileError: no picture can be written there.
    """
    check_output(path)
    if pathlib.Path(path).suffix.lower() not in PICTURES:
        *others, last = PICTURES
        raise FileError(f"{_shown(path)}: the name of a picture ends in {', '.join(others)} or {last}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise FileError("a picture needs matplotlib: install dsv4_jax[plot]") from None


@contextlib.contextmanager
def open_output(path: str | os.PathLike[str], *, encoding: str | None = None) -> Iterator[IO[Any]]:
    """A file to write to, of bytes or (with an encoding) of text; it is at its place when the block has ended well.

    Raises:
        FileError: no file can be written there, or writing failed. Then nothing has changed.
    """
    with _folder(path) as (folder, name):
        mode = _mode(folder, name)
        temporary, handle = _create(folder)
        try:
            with open(handle, "w" if encoding else "wb", encoding=encoding) as file:
                if mode is not None:
                    os.fchmod(handle, stat.S_IMODE(mode) & 0o777)
                yield file
                file.flush()
                os.fsync(handle)
            _mode(folder, name)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        with contextlib.suppress(OSError):  # not every file system can: the file is there all the same
            os.fsync(folder)


@contextlib.contextmanager
def _folder(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """The open folder of a path, and the name in it. What goes wrong meanwhile is a `FileError` of that path."""
    parent, name = os.path.split(os.fspath(path))
    if name in ("", ".", ".."):
        raise FileError(f"{_shown(path)}: is a directory or an empty name, not a file")
    if "\0" in os.fspath(path):
        raise FileError(f"{_shown(path)}: a name holds no NUL")
    try:
        folder = os.open(parent or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        problem = f"there is no folder {_shown(parent)}" if missing else _why(error)
        raise FileError(f"{_shown(path)}: {problem}") from error
    try:
        yield folder, name
    except FileError as error:
        raise FileError(f"{_shown(path)}: {error}") from error.__cause__
    except OSError as error:
        raise FileError(f"{_shown(path)}: {_why(error)}") from error
    finally:
        os.close(folder)


def _mode(folder: int, name: str) -> int | None:
    """The mode of the file that will be replaced; None: there is none. Raises `FileError` if it must not be."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    mode, around = found.st_mode, os.fstat(folder)
    if stat.S_ISLNK(mode):
        raise FileError("is a symbolic link: name the file itself")
    if kind := file_kind(mode):
        raise FileError(f"is {kind}, not a regular file")
    if not os.access(name, os.W_OK, dir_fd=folder, follow_symlinks=False):
        raise FileError("is a file that may not be written")
    if around.st_mode & stat.S_ISVTX and os.geteuid() not in (0, found.st_uid, around.st_uid):
        raise FileError("belongs to someone else, and only its owner may replace it in this folder")
    return mode


def _create(folder: int) -> tuple[str, int]:
    """(name, descriptor) of a new file. The name owes nothing to its place, which may be as long as names can be."""
    name = f".{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return name, os.open(name, flags, 0o666, dir_fd=folder)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _shown(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-97:]}"
