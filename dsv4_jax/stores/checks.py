"""What a store does first: its settings, its process, and the keys and buffers of a call, checked. Errors are typed."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ShapeError, StoreBusyError, StoreFormatError
from .base import Buffers

__all__ = ["check_keys", "check_process", "check_records", "end_within"]


def check_process(owner: int) -> None:
    """Raises `StoreBusyError` in any process but `owner`, whose store it is: a forked child has copies of its locks,
    in whatever state they were, and none of its threads."""
    if (here := os.getpid()) != owner:
        raise StoreBusyError(f"the store is open in process {owner}, of which {here} is a forked child")


def end_within(
    what: str,
    end: Callable[[], object],
    seconds: float | None,
    start: Callable[[Callable[[], None]], object] | None = None,
) -> None:
    """Calls `end`, which may hang: then, after so many seconds, it is left to itself. None: waits for it.

    Args:
        start: has another thread call what it is given; default: a new one, which there may be none of while the
            interpreter ends.

    Raises: what `end` raises, and `StoreBusyError` if it takes longer.
    """
    if seconds is None:
        end()
        return
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            end()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    if start is not None:
        start(run)
    else:
        threading.Thread(target=run, name="dsv4-store-end", daemon=True).start()
    try:
        error = ended.get(timeout=max(seconds, 0.0))
    except queue.Empty:
        raise StoreBusyError(f"{what} has not ended after {seconds:.1f} s") from None
    if error is not None:
        raise error


def check_keys(keys: Sequence[bytes], key_bytes: int) -> list[bytes]:
    """Returns the keys as a list of `bytes`. Raises `StoreFormatError` for one of another type or length."""
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
    """Returns views uint8 [record_bytes] of the given buffers, sharing their memory.

    Raises:
        ShapeError: not `count` buffers, or one that is no plain memory (an array of objects, say, whose bytes are
            pointers), of the wrong size, not contiguous; if `writable`, one that is read-only, or two that overlap.
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
    if writable and len(views) > 1:
        _check_apart(name, np.array([view.ctypes.data for view in views]), record_bytes)
    return views


def _check_apart(name: str, addresses: np.ndarray, size: int) -> None:
    """Raises `ShapeError` if some of these buffers overlap: one record would be served as another."""
    order = np.argsort(addresses, kind="stable")
    close = np.flatnonzero(np.diff(addresses[order]) < size)
    if close.size:
        one, other = sorted(order[close[0] : close[0] + 2].tolist())
        raise ShapeError(f"{name}[{one}] and {name}[{other}] overlap")
