"""`SocketLink`: a connection to a `SocketServer`, made and used in the background. No jax."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .identity import Identity
from .wire import (
    ASK,
    FRAME,
    MAX_ASK,
    PING,
    TELL,
    Reach,
    check_answer,
    cut,
    fill,
    gate_key,
    introduce,
    look_alive,
    proof,
    read,
)

__all__ = ["SocketLink", "SocketRequest"]

MAX_JOBS, MAX_QUEUED_BYTES = 4096, 32 << 20  # requests and messages that wait to be sent; bytes of the messages
_PATIENCE = 10.0  # seconds for a connection to be made
_PING_SECONDS = 60.0  # without a word, after which one asks whether the other end is still there
_TRIES = (0.3, 1.0, 3.0, _PATIENCE)  # seconds for the other end to answer at all, before one tries again
_OVERHEAD = 256  # bytes that a message takes beside its own


class SocketRequest:
    """An answer under way into the given buffers."""

    def __init__(self, data: bytes, buffers: Sequence[Any]):
        self.data, self.buffers = data, buffers
        self.error: str | None = None
        self.ended = threading.Event()

    def is_done(self) -> bool:
        """Whether the buffers hold the answer. Raises `OSError` if they never will."""
        if self.ended.is_set() and self.error is not None:
            raise OSError(self.error)
        return self.ended.is_set()


class SocketLink:
    """A connection to a server: requests are answered, and messages taken, in their order.

    It is made in the background, so a host that cannot be reached shows later. Once broken it stays so.

    Args:
        name: of this host, which ends in the mark of `me`.
        reach: what the server has published.
        context: TLS; None: none.
        token: what this host must have beside what is published.

    Raises:
        ValueError: only one end has certificates.
    """

    def __init__(
        self, name: str, me: Identity, reach: Reach, *, context: ssl.SSLContext | None = None, token: bytes = b""
    ):
        if reach.tls != (context is not None):
            raise ValueError(f"{'it insists on' if reach.tls else 'it has no'} TLS, and this end does otherwise")
        self._name, self._me, self._reach, self._context = name, me, reach, context
        self._gate = gate_key(reach.secret, token)
        self._socket: Any = None  # a socket, of TLS perhaps
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[SocketRequest | bytes | None] = queue.SimpleQueue()
        self._open_jobs = self._queued = 0  # jobs that have not ended; bytes of messages among them
        self._up = self._looking_up = False
        self._error: str | None = None  # the text alone: its frames would keep buffers and sockets
        self._thread = threading.Thread(target=self._run, daemon=True, name="dsv4 transport")
        self._thread.start()

    def ask(self, data: bytes, buffers: Sequence[Any]) -> SocketRequest:
        """Asks for bytes that fill these buffers. Raises `OSError` if the connection is broken."""
        if len(data) > MAX_ASK:
            raise ValueError(f"a request of {len(data)} bytes, at most {MAX_ASK}")
        request = SocketRequest(data, buffers)
        self._put(request, 0)
        return request

    def tell(self, message: bytes) -> None:
        """Raises `OSError` if the connection is broken, or `MAX_QUEUED_BYTES` wait already."""
        self._put(message, len(message) + _OVERHEAD)

    def is_up(self) -> bool:
        """Whether it is made. Raises `OSError` if it is broken, which shows while nothing is under way."""
        with self._lock:
            self._check()
            if self._up and not self._open_jobs and self._socket is not None:
                ready = select.poll()  # `select.select` takes no descriptors beyond 1023
                ready.register(self._socket, select.POLLIN)
                if ready.poll(0):  # nobody has asked for anything
                    self._break("the other end has closed the connection")
                    self._check()
            return self._up

    def close(self) -> None:
        """Ends the connection: when this returns no buffer is written any more."""
        with self._lock:
            self._break("disconnected")
            looking_up = self._looking_up
        self._jobs.put(None)
        if looking_up:  # which nobody can break off; it writes nothing, and ends by itself
            self._drop_jobs()
        else:
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(f"the connection is broken: {self._error}")

    def _break(self, error: str) -> None:
        self._error = self._error or error
        if self._socket is not None:
            cut(self._socket)

    def _put(self, job: SocketRequest | bytes, size: int) -> None:
        with self._lock:
            self._check()
            if self._open_jobs >= MAX_JOBS or self._queued + size > MAX_QUEUED_BYTES:
                raise OSError("the other end does not take what is sent")
            self._open_jobs += 1
            self._queued += size
            self._jobs.put(job)

    # In its thread

    def _run(self) -> None:
        job: SocketRequest | bytes | None = None
        try:
            self._connect()
            while True:
                try:
                    job = self._jobs.get(timeout=_PING_SECONDS)
                except queue.Empty:
                    job = None
                    self._ping()
                    continue
                if job is None:
                    break
                self._do(job)
                self._end(job)
        except Exception as error:  # nothing more can be understood on this connection
            with self._lock:
                self._break(str(error) or type(error).__name__)
            if job is not None:
                self._end(job)
        self._drop_jobs()
        if self._socket is not None:
            self._socket.close()

    def _drop_jobs(self) -> None:
        """Ends what waits, after an error: nobody adds anything."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    self._end(job)

    def _do(self, job: SocketRequest | bytes) -> None:
        if isinstance(job, SocketRequest):
            self._socket.sendall(FRAME.pack(ASK, len(job.data)) + job.data)
            check_answer(self._socket)
            for buffer in job.buffers:
                fill(self._socket, memoryview(buffer))
        else:
            self._socket.sendall(FRAME.pack(TELL, len(job)) + job)

    def _end(self, job: SocketRequest | bytes) -> None:
        with self._lock:
            self._open_jobs -= 1
            error = self._error
            if not isinstance(job, SocketRequest):
                self._queued -= len(job) + _OVERHEAD
                return
        if error is not None and job.error is None and not job.ended.is_set():
            job.error = error
        job.ended.set()

    def _ping(self) -> None:
        with self._lock:
            self._check()
            self._open_jobs += 1
        try:
            self._socket.settimeout(_PATIENCE)
            self._socket.sendall(FRAME.pack(PING, 0))
            check_answer(self._socket)
            self._socket.settimeout(None)
        finally:
            with self._lock:
                self._open_jobs -= 1

    def _connect(self) -> None:
        until = time.monotonic() + _PATIENCE
        for patience in _TRIES:
            try:
                self._greet(self._dial(min(until, time.monotonic() + patience)), until)
                return
            except (ConnectionResetError, TimeoutError):
                # One of very many that came at once, perhaps: another may be among the first. Or the secret is no
                # longer right, or the token not.
                if patience is _TRIES[-1] or self._error is not None or time.monotonic() >= until:
                    raise
                time.sleep(0.02)

    def _dial(self, until: float) -> bytes:
        """Connects to the first of its addresses that answers; the number with which it does."""
        with self._lock:
            self._looking_up = True
        try:
            places = socket.getaddrinfo(self._reach.address, self._reach.port, type=socket.SOCK_STREAM)
        finally:
            with self._lock:
                self._looking_up = False
        problem: OSError = OSError("it has no address")
        for family, kind, protocol, _, place in places:
            connection = socket.socket(family, kind, protocol)
            with self._lock:
                old, self._socket = self._socket, connection
            if old is not None:
                old.close()
            try:
                _knock(connection, place, until, lambda: self._error)
                with self._lock:
                    self._check()  # closed meanwhile? From here on that wakes us
                return read(connection, 16, until)
            except OSError as error:
                problem = error
        raise problem

    def _greet(self, number: bytes, until: float) -> None:
        self._socket.settimeout(max(1e-3, until - time.monotonic()))
        look_alive(self._socket)
        self._socket.sendall(proof(self._gate, b"gate", number))
        if self._context is not None:
            wrapped = self._context.wrap_socket(
                self._socket, server_hostname=self._reach.address, do_handshake_on_connect=False
            )
            with self._lock:
                self._socket = wrapped
                self._check()
            wrapped.do_handshake()
        introduce(self._socket, self._name, self._me, self._reach, self._gate, number)
        self._socket.settimeout(None)
        with self._lock:
            self._up = True


def _knock(connection: socket.socket, place: Any, until: float, closed: Callable[[], object]) -> None:
    """Connects, until then or until it is closed."""
    connection.setblocking(False)
    writable = select.poll()  # `select.select` takes no descriptors beyond 1023
    writable.register(connection, select.POLLOUT)
    problem = connection.connect_ex(place)
    while problem in (errno.EINPROGRESS, errno.EALREADY):
        if closed() is not None or time.monotonic() > until:
            raise TimeoutError("it does not answer")
        writable.poll(50)
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or connection.connect_ex(place)
    if problem not in (0, errno.EISCONN):
        raise OSError(problem, os.strerror(problem))
