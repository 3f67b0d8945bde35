"""`AsyncStore`: a `RecordStore` behind a few threads, with a bounded queue.

Moving records is system calls and checksums, which let other Python threads run, so a step's host work goes on
meanwhile. Nothing is copied: records are read from, and buffers filled in, the caller's memory, which belongs to the
call until its future is done.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ..checks import check_integer, check_seconds
from ..errors import ShapeError, StoreBusyError, StoreError
from .base import Buffers, Flags, RecordStore
from .call_queue import CallQueue, QueuedCall
from .checks import check_keys, check_process, check_records, end_within

__all__ = ["AsyncStore"]

_MAX_WORKERS = 256
_STUCK = 1.0  # seconds without the end of any call
_LANES = 4  # threads for each worker, at most
_EXIT: dict[str, float] = {}  # when the interpreter began to end


class AsyncStore:
    """The calls of a `RecordStore`, each returning a `concurrent.futures.Future` of its result.

    * Per key, calls take effect in the order they were made; calls without a common key may pass each other.
    * Back-pressure: the records of calls accepted and not yet done are at most `queue_bytes`. A call that does not fit
      waits; with a `timeout` it raises `StoreBusyError` in the end, and nothing of it was accepted. A call larger than
      the whole queue is accepted when the queue is empty.
    * Malformed keys and buffers raise at once; errors of the store are the future's, and stop no other call. So do
      those of a future's callback, whatever they are: they go to `threading.excepthook`.
    * Whatever was accepted is done before `drain` or `close` return, and at interpreter exit, which waits for it for
      `exit_timeout` seconds: what a store that hangs has not done by then is lost, and a `RuntimeWarning` says so. A
      callback may make calls without a wait (`timeout=0`), but not wait for what waits for it: there `drain`, `flush`
      and `close` raise.
    * A call that hangs holds up those of its own keys only: when no call has begun or ended for a second, and some
      wait, a thread more is started for these, up to four times as many as `workers`; it ends when nothing is left.
    * A forked child has none of the threads: there calls raise `StoreBusyError`, and `close` does nothing.

    Args:
        store: what does the work; closed by `close`. Use it directly too, if its calls may come in between.
        workers: threads, at most 256. They wait for the disk or compute checksums, without holding up Python: may
            exceed the cores.
        queue_bytes, exit_timeout: see above.

    Attributes:
        queue: the calls that wait, to look at.

    Raises:
        ShapeError: a setting out of range.
        StoreError: the threads cannot be started.
    """

    def __init__(
        self, store: RecordStore, *, workers: int = 4, queue_bytes: int = 256 << 20, exit_timeout: float = 10.0
    ):
        workers = check_integer("workers", workers, 1, _MAX_WORKERS, error=ShapeError)
        self._exit_timeout = check_seconds("exit_timeout", exit_timeout, error=ShapeError)
        self.store, self.queue_bytes = store, check_integer("queue_bytes", queue_bytes, 1, error=ShapeError)
        self._change = threading.Condition()  # of everything below
        self.queue = CallQueue()
        self._unfinished = 0
        self._bytes = 0
        self._closing = False
        self._idle = 0  # threads that wait for a call
        self._moved = time.monotonic()  # when a call last began or ended
        self._workers = workers
        self._process = os.getpid()
        self._threads = list[threading.Thread]()
        self._closed = False
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # of the thread that watches
        try:
            for _ in range(workers):
                self._start(self._run)
            threading.Thread(target=self._watch, name="dsv4-store-watch", daemon=True).start()
        except BaseException as error:
            self._stop()
            if not isinstance(error, RuntimeError):
                raise
            raise StoreError(f"cannot start {workers} threads: {error}") from error
        atexit.register(self._exit)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"dsv4-store-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the calls accepted and not yet done."""
        return self._bytes

    @property
    def pending_calls(self) -> int:
        """Calls accepted and not yet done."""
        return self._unfinished

    def contains(self, keys: Sequence[bytes], *, timeout: float | None = None) -> Future[Flags]:
        keys = check_keys(keys, self.store.key_bytes)
        return self._accept(lambda: self.store.contains(keys), keys, 0, timeout)

    def read_into(self, keys: Sequence[bytes], buffers: Buffers, *, timeout: float | None = None) -> Future[Flags]:
        keys = check_keys(keys, self.store.key_bytes)
        views = check_records(buffers, len(keys), self.store.record_bytes, writable=True)
        return self._accept(lambda: self.store.read_into(keys, views), keys, self._size(keys), timeout)

    def write(self, keys: Sequence[bytes], records: Buffers, *, timeout: float | None = None) -> Future[Flags]:
        keys = check_keys(keys, self.store.key_bytes)
        views = check_records(records, len(keys), self.store.record_bytes, writable=False)
        return self._accept(lambda: self.store.write(keys, views), keys, self._size(keys), timeout)

    def delete(self, keys: Sequence[bytes], *, timeout: float | None = None) -> Future[Flags]:
        keys = check_keys(keys, self.store.key_bytes)
        return self._accept(lambda: self.store.delete(keys), keys, 0, timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until nothing accepted is left to do. Raises `StoreBusyError` after `timeout` seconds."""
        self._check_caller("drain")
        with self._change:
            if not self._change.wait_for(lambda: self._unfinished == 0, timeout):
                raise StoreBusyError(f"{self._unfinished} calls not done after {timeout} s")

    def flush(self, timeout: float | None = None) -> None:
        """Waits as `drain` does, then flushes the store. Raises `StoreBusyError` after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        self.drain(timeout)
        end_within("flush", self.store.flush, None if until is None else until - time.monotonic())

    def close(self, timeout: float | None = None) -> None:
        """Accept no more, finish what was accepted, close the store.

        A second call does nothing, but finish what a first one left that was interrupted or out of time.

        Args:
            timeout: seconds for all of it; None: as long as it takes.

        Raises:
            StoreBusyError: it is not done after `timeout` seconds. Calls go on, and the store is not closed, or its own
                `close` goes on.
        """
        if os.getpid() != self._process:
            return
        until = None if timeout is None else time.monotonic() + timeout
        self._check_caller("close")
        self._stop()
        self.drain(timeout)
        for thread in [*self._threads]:
            thread.join()
        left = None if until is None else until - time.monotonic()
        end_within("close", self.store.close, left, self._jobs.put)
        self._closed = True
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        """The interpreter ends: `close`, all stores together within the time that they have, or a second each."""
        if os.getpid() != self._process:
            return
        began = _EXIT.setdefault("began", time.monotonic())
        try:
            self.close(max(began + self._exit_timeout - time.monotonic(), 1.0))
        except StoreBusyError as error:
            what = f"the store {type(self.store).__name__} hangs: {self._unfinished} calls are lost at exit ({error})"
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def _stop(self) -> None:
        with self._change:
            self._closing = True
            self._change.notify_all()

    def _check_caller(self, what: str) -> None:
        check_process(self._process)
        if threading.current_thread() in self._threads:
            raise StoreError(f"{what} in a callback would wait for the call that called it back")

    def __enter__(self) -> AsyncStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _size(self, keys: list[bytes]) -> int:
        return len(keys) * self.store.record_bytes

    def _accept(self, work: Callable[[], Flags], keys: list[bytes], size: int, timeout: float | None) -> Future[Flags]:
        check_process(self._process)
        call = QueuedCall(work, set(keys), size)
        with self._change:
            fits = self._change.wait_for(
                lambda: self._closing or self._bytes == 0 or self._bytes + size <= self.queue_bytes, timeout
            )
            if self._closing:
                raise StoreError("the store is closed")
            if not fits:
                raise StoreBusyError(
                    f"{size} bytes did not fit within {timeout} s: {self._bytes} of {self.queue_bytes} bytes are queued"
                )
            self.queue.put(call)
            self._bytes += size
            self._unfinished += 1
            self._change.notify_all()
        return call.future

    def _run(self) -> None:
        while self._run_one():
            pass

    def _help(self) -> None:
        """A further thread's work: what waits while others hang."""
        while self.queue.ready and self._run_one(wait=False):
            pass
        with self._change:
            self._threads.remove(threading.current_thread())

    def _watch(self) -> None:
        """Starts a further thread when all hang, and others wait. Ends the store, if asked."""
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                self._jobs.get(timeout=_STUCK / 2)()
            with self._change:
                stuck = self.queue.ready and not self._idle and time.monotonic() - self._moved >= _STUCK
                if stuck and len(self._threads) < _LANES * self._workers:
                    self._moved = time.monotonic()
                    with contextlib.suppress(RuntimeError):  # no thread can be had
                        self._start(self._help)

    def _run_one(self, *, wait: bool = True) -> bool:
        with self._change:
            self._idle += wait
            try:
                self._change.wait_for(lambda: not wait or self.queue.ready or (self._closing and self._unfinished == 0))
            finally:
                self._idle -= wait
            if not self.queue.ready:
                return False
            call = self.queue.ready.popleft()
            self._moved = time.monotonic()
        result: Any = None
        error: BaseException | None = None
        try:
            result = call.work()
        except BaseException as caught:
            error = caught
        with self._change:
            self._bytes -= call.size
            self._moved = time.monotonic()
            self.queue.end(call)
            self._change.notify_all()
        # After the release, so that the future's callbacks may make calls; before `drain` may return.
        try:
            if error is not None:
                call.future.set_exception(error)
            else:
                call.future.set_result(result)
        except BaseException:  # of a callback, and no `Exception`: those are logged where it is called
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        del call, error  # of whose traceback this frame is: a cycle would keep the records
        with self._change:
            self._unfinished -= 1
            self._change.notify_all()
        return True
