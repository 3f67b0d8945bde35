"""Files that are read: regular ones only, so that no read waits on a FIFO or never ends, as a device's does."""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from ..errors import FileError, PlanError
from ..output import file_kind

__all__ = ["MAX_TOKENS", "open_regular", "read_tokens", "read_whole"]

MAX_TOKENS = 1 << 24  # of a file: sixteen times the longest context


@contextlib.contextmanager
def open_regular(path: pathlib.Path, option: str, hint: str = "") -> Iterator[BinaryIO]:
    """Opens a file to be read. Raises `FileError` that names the option."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for its writer
    except OSError as error:
        raise FileError(f"{option} {path}: {error.strerror}") from error
    try:
        if kind := file_kind(os.fstat(handle).st_mode):
            raise FileError(f"{option} {path}: is {kind}, not a regular file{hint}")
        with open(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def read_whole(path: pathlib.Path, option: str, most: int) -> bytes:
    """Reads a file of at most so many bytes. Raises `FileError` that names the option."""
    with open_regular(path, option) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise FileError(f"{option} {path}: {error.strerror}") from error
    if len(data) > most:
        raise FileError(f"{option} {path}: at most {most} bytes are read")
    return data


def read_tokens(path: pathlib.Path) -> np.ndarray:
    """Reads a 1-D integer array of at least one token. Raises `PlanError` and `FileError`."""
    with open_regular(path, "--tokens") as file:
        try:
            return _array(file)
        except PlanError as error:
            raise PlanError(f"--tokens {path}: {error}") from error.__cause__


def _array(file: BinaryIO) -> np.ndarray:
    shape, dtype = _header(file)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise PlanError(f"{dtype} of shape {shape}, expected integers of one dimension")
    count, size = shape[0], shape[0] * dtype.itemsize
    if count < 1:
        raise PlanError("holds no token")
    if count > MAX_TOKENS:
        raise PlanError(f"says that it holds {count} tokens, at most {MAX_TOKENS} are read")
    data = file.read(size)
    if len(data) < size:
        raise PlanError(f"says that it holds {count} tokens in {size} bytes, but there are {len(data)}")
    return np.frombuffer(data, dtype)


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a .npy file; nothing is read or allocated for its data."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of files that Python 2 wrote
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            elif version == (2, 0):
                shape, _, dtype = np.lib.format.read_array_header_2_0(file)
            else:
                raise ValueError(f"version {version}")
    except Exception as error:  # the header is a Python literal: reading a bad one fails in many ways
        raise PlanError(f"not a .npy file of numbers ({error})") from error
    return shape, dtype
