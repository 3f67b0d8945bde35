"""Requests and messages between processes over TCP. No jax.

A server answers requests with bytes of a length that the asker knows, and takes messages. Connecting takes a secret
that is in what the server publishes. Both ends bound what they read: the other may be anything.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..untrusted import parse_json

__all__ = ["SocketLink", "SocketRequest", "SocketServer"]

_HELLO = struct.Struct("<16sB")  # secret, bytes of the name that follows
_FRAME = struct.Struct("<cI")  # what, bytes that follow
_ASK, _TELL, _GOOD, _BAD = b"?", b"!", b"+", b"-"
_MAX_ASK, _MAX_TELL, _MAX_ERROR = 1 << 20, 4 << 20, 1024  # bytes
_MAX_CONNECTIONS, _MAX_QUEUED = 256, 4096
_PATIENCE = 10.0  # seconds for a connection to be made

Answer = Callable[[bytes], Sequence[Any]]


class SocketServer:
    """Listens until it is closed.

    Args:
        answer: given a request, the buffers of the answer; any error it raises goes back as text.
        tell: given the name of a sender and its message.
        address: IP address to listen on.
    """

    def __init__(self, answer: Answer, tell: Callable[[str, bytes], None], address: str = "127.0.0.1"):
        self._answer, self._tell = answer, tell
        self._secret = secrets.token_bytes(16)
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True, name="dsv4 transport")
        self._thread.start()

    @property
    def reach(self) -> bytes:
        """The address and port, as `SocketLink` takes them."""
        address, port = self._listener.getsockname()[:2]
        return json.dumps({"address": address, "port": port, "secret": self._secret.hex()}).encode()

    def close(self) -> None:
        """Ends all connections and threads."""
        with self._lock:
            self._closed = True
            threads = [self._thread, *self._open.values()]
            for each in (self._listener, *self._open):
                _cut(each)
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.01)  # this one failed; others may not
                continue
            with self._lock:
                if self._closed or len(self._open) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True, name="dsv4 transport")
                try:
                    thread.start()
                except RuntimeError:  # the process has too many
                    connection.close()
                    continue
                self._open[connection] = thread

    def _serve(self, connection: socket.socket) -> None:
        # Whatever goes wrong with a connection ends that one.
        with contextlib.suppress(OSError, ValueError), connection:
            try:
                sender = self._greet(connection)
                while True:
                    self._serve_one(connection, sender)
            finally:
                with self._lock:
                    self._open.pop(connection, None)

    def _greet(self, connection: socket.socket) -> str:
        connection.settimeout(_PATIENCE)
        secret, size = _HELLO.unpack(_read(connection, _HELLO.size))
        name = _read(connection, size).decode()
        if not hmac.compare_digest(secret, self._secret) or not name.isprintable():
            raise ValueError("a stranger")
        connection.sendall(_FRAME.pack(_GOOD, 0))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may vanish without a word
        return name

    def _serve_one(self, connection: socket.socket, sender: str) -> None:
        what, size = _FRAME.unpack(_read(connection, _FRAME.size))
        if what not in (_ASK, _TELL) or size > (_MAX_ASK if what == _ASK else _MAX_TELL):
            raise ValueError("no frame of ours")
        data = _read(connection, size)
        if what == _TELL:
            self._tell(sender, data)
            return
        try:
            buffers = self._answer(data)
        except Exception as error:  # the asker's fault, or its to know
            text = f"{type(error).__name__}: {error}".encode()[:_MAX_ERROR]
            connection.sendall(_FRAME.pack(_BAD, len(text)) + text)
            return
        connection.sendall(_FRAME.pack(_GOOD, 0))
        for buffer in buffers:
            connection.sendall(buffer)


class SocketRequest:
    """An answer under way into the given buffers."""

    def __init__(self, data: bytes, buffers: Sequence[Any]):
        self.data, self.buffers = data, buffers
        self.error: Exception | None = None
        self.ended = threading.Event()

    def is_done(self) -> bool:
        """Whether the buffers hold the answer. Raises `OSError` if they never will."""
        if self.ended.is_set() and self.error is not None:
            raise OSError(str(self.error))
        return self.ended.is_set()


class SocketLink:
    """A connection to a server: requests are answered, and messages taken, in their order.

    It is made in the background, so a host that cannot be reached shows when it is first asked.

    Raises:
        ValueError: no server has published this.
    """

    def __init__(self, name: str, reach: bytes):
        self._place, secret = _parse(reach)
        self._hello = _HELLO.pack(secret, len(name.encode())) + name.encode()
        version = ipaddress.ip_address(self._place[0]).version
        self._socket = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[SocketRequest | bytes | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="dsv4 transport")
        self._thread.start()

    def ask(self, data: bytes, buffers: Sequence[Any]) -> SocketRequest:
        """Asks for bytes that fill these buffers."""
        if len(data) > _MAX_ASK:
            raise ValueError(f"a request of {len(data)} bytes, at most {_MAX_ASK}")
        request = SocketRequest(data, buffers)
        self._put(request)
        return request

    def tell(self, message: bytes) -> None:
        self._put(message)

    def close(self) -> None:
        """Ends the connection: when this returns no buffer is written any more."""
        with self._lock:
            self._error = self._error or OSError("disconnected")
            _cut(self._socket)
        self._jobs.put(None)
        self._thread.join()
        self._socket.close()

    def _put(self, job: SocketRequest | bytes) -> None:
        with self._lock:
            if self._error is not None:
                raise OSError(f"the connection is broken: {self._error}")
            if self._jobs.qsize() >= _MAX_QUEUED:
                raise OSError("the other end does not take what is sent")
            self._jobs.put(job)

    def _connect(self) -> None:
        until = time.monotonic() + _PATIENCE
        self._socket.setblocking(False)
        writable = select.poll()  # `select.select` takes no descriptors beyond 1023
        writable.register(self._socket, select.POLLOUT)
        problem = self._socket.connect_ex(self._place)
        while problem in (errno.EINPROGRESS, errno.EALREADY):
            if self._error is not None or time.monotonic() > until:
                raise TimeoutError("it does not answer")
            writable.poll(50)
            problem = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or self._socket.connect_ex(
                self._place
            )
        if problem not in (0, errno.EISCONN):
            raise OSError(problem, os.strerror(problem))
        if self._error is not None:  # closed meanwhile: from here on that wakes us
            raise self._error
        self._socket.settimeout(_PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(self._hello)
        _check_answer(self._socket)
        self._socket.settimeout(None)

    def _work(self) -> None:
        connected = False
        while (job := self._jobs.get()) is not None:
            try:
                if not connected:
                    self._connect()
                    connected = True
                if isinstance(job, SocketRequest):
                    self._socket.sendall(_FRAME.pack(_ASK, len(job.data)) + job.data)
                    _check_answer(self._socket)
                    for buffer in job.buffers:
                        _fill(self._socket, memoryview(buffer))
                else:
                    self._socket.sendall(_FRAME.pack(_TELL, len(job)) + job)
            except Exception as error:  # nothing more can be understood on this connection
                with self._lock:
                    self._error = self._error or error
                    _cut(self._socket)
                if isinstance(job, SocketRequest):
                    job.error = error
            if isinstance(job, SocketRequest):
                job.ended.set()


def _check_answer(connection: socket.socket) -> None:
    what, size = _FRAME.unpack(_read(connection, _FRAME.size))
    if what == _BAD and size <= _MAX_ERROR:
        raise ValueError(f"the other end says: {_read(connection, size).decode(errors='replace')!r}")
    if what != _GOOD or size:
        raise ValueError("the other end answers nonsense")


def _parse(reach: bytes) -> tuple[tuple[str, int], bytes]:
    value = parse_json(reach, unique_keys=True)
    if not isinstance(value, dict) or sorted(value) != ["address", "port", "secret"]:
        raise ValueError("no address of ours")
    address, port, secret = value["address"], value["port"], value["secret"]
    if not isinstance(address, str) or type(port) is not int or not 0 < port < 65536:
        raise ValueError("no address of ours")
    if not isinstance(secret, str) or len(secret) != 32:
        raise ValueError("no secret of ours")
    return (str(ipaddress.ip_address(address)), port), bytes.fromhex(secret)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        if not (count := connection.recv_into(view)):
            raise ConnectionResetError("the other end has closed the connection")
        view = view[count:]


def _cut(connection: socket.socket) -> None:
    """Wakes whoever reads from it or writes to it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
