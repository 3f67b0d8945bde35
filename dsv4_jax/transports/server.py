"""`SocketServer`: answers requests and takes messages over TCP, of hosts that have its secret. No jax.

Strangers cost it little. One thread holds all connections that have not said the secret yet: it reads 32 bytes of
each, for two seconds at most, and lets the oldest go when there are too many. What comes after that has a deadline as a
whole: to say its name, to say what it asks for, to take what it is told. A connection that says nothing is closed, too.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import hmac
import os
import resource
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..inbox import Inbox
from .identity import Identity
from .wire import (
    ASK,
    BAD,
    FRAME,
    GOOD,
    MAX_ASK,
    MAX_ERROR,
    MAX_TELL,
    PING,
    PROOF_BYTES,
    TELL,
    Reach,
    Tls,
    TlsContext,
    cut,
    fill,
    gate_key,
    look_alive,
    proof,
    public_name,
    read,
    resolve,
    send,
    welcome,
)

__all__ = ["Answer", "SocketServer"]

MAX_STRANGERS = 4096  # connections that have not said the secret, or a quarter of the files that may be open
MAX_UNNAMED = 64  # that have, and not their name
MAX_PLACES = 256  # that have: each has a thread
RESERVED_PLACES = 64  # of these, for peers that are known here
MAX_PLACES_OF_ONE = 4  # of one peer: the oldest gives way
SECRET_SECONDS, NAME_SECONDS = 2.0, 5.0  # for the secret; for the whole of a greeting
IDLE_SECONDS = 300.0  # between frames; who connects says something every minute
FRAME_SECONDS, SLOWEST = 10.0, 1 << 20  # for a frame, and a second more for so many bytes
_MAX_KNOWN = 1024
_LARGE, _MAX_LARGE = 64 << 10, 8  # bytes of a message that waits until it is one of so many that come at once
_BACKLOG = 4096
_A_TURN = 256  # connections taken before others are looked at again

Answer = Callable[[bytes, str], tuple[int, Iterable[Any]]]


class _Stranger(NamedTuple):
    number: bytes
    said: bytearray
    until: float


class _Place(NamedTuple):
    name: str
    origin: bytes  # of all that come by the same certificate, or else from the same machine


class SocketServer:
    """Listens until it is closed.

    Args:
        answer: given a request and the name of who asks, the bytes and the buffers of the answer; any error it raises
            goes back as text.
        inbox: of the messages.
        me: of this host.
        address: to listen on: an IP address of this machine, or a name of it.
        port: 0: any that is free.
        advertise: what is published instead of `address`.
        tls: None: neither encrypted nor certified.
        token: what peers must have beside what is published.

    Attributes:
        reach: what is published.
        counts: connections so far: "accepted"; "strangers" (that were dropped before they said the secret), "refused"
            (for want of a place, of a certificate, or of a proof of their name).
        context: of TLS, if there is one.

    Raises: `TransferError`, `OSError`: it cannot listen there.
    """

    def __init__(
        self,
        answer: Answer,
        inbox: Inbox,
        me: Identity,
        address: str = "127.0.0.1",
        *,
        port: int = 0,
        advertise: str | None = None,
        tls: Tls | None = None,
        token: bytes = b"",
    ):
        self._answer, self._inbox, self._me = answer, inbox, me
        name, place, secret = public_name(address, advertise), resolve(address), secrets.token_bytes(16)
        self.context = TlsContext(tls, server=True) if tls is not None else None
        self._gate = gate_key(secret, token)
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        self._listener = socket.create_server((place, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.reach = Reach(name, self._listener.getsockname()[1], secret, me.public, tls is not None)
        self._max_strangers = max(16, min(MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first; of the thread that greets
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._unnamed: dict[socket.socket, None] = {}  # the oldest first
        self._places: dict[socket.socket, _Place] = {}  # the oldest first
        self._mine: collections.OrderedDict[str, None] = collections.OrderedDict()  # that this host connects to
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()  # that have said something
        self._large = threading.BoundedSemaphore(_MAX_LARGE)
        self.counts = collections.Counter(accepted=0, strangers=0, refused=0)
        self._closed = False
        self._events = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._events.register(self._listener, select.POLLIN)
        self._thread = threading.Thread(target=self._greet, daemon=True, name="dsv4 transport")
        self._thread.start()

    def know(self, name: str) -> None:
        """Has a place for this peer at all times, as this host connects to it: others give way."""
        self._remember(self._mine, name)

    def _remember(self, names: collections.OrderedDict[str, None], name: str) -> None:
        with self._lock:
            names[name] = None
            names.move_to_end(name)
            if len(names) > _MAX_KNOWN:
                names.popitem(last=False)

    def close(self) -> None:
        """Ends all connections and threads."""
        with self._lock:
            self._closed = True
            threads = [self._thread, *self._threads.values()]
            for each in (self._listener, *self._threads):
                cut(each)
        self._inbox.close()
        for thread in threads:
            thread.join()
        self._listener.close()

    # Strangers, in one thread

    def _greet(self) -> None:
        by_file = {self._listener.fileno(): self._listener}
        while not self._closed:
            try:
                self._greet_some(by_file)
            except OSError:  # of what is gone again
                time.sleep(0.01)
        for connection in list(self._strangers):
            self._drop(connection, by_file)
        if hasattr(self._events, "close"):
            self._events.close()

    def _greet_some(self, by_file: dict[int, socket.socket]) -> None:
        for file, _ in self._events.poll(self._pause()):
            connection = by_file.get(file)  # those first who are here already
            if connection is not None and connection in self._strangers:
                self._listen_to(connection, by_file)
        now = time.monotonic()
        while self._strangers and next(iter(self._strangers.values())).until <= now:
            self._drop(next(iter(self._strangers)), by_file)
        self._accept(by_file)

    def _pause(self) -> float:
        """Until the next of them has had its time: in the unit of `epoll` or `poll`."""
        if not self._strangers:
            seconds = 0.5
        else:
            seconds = min(0.5, max(0.0, next(iter(self._strangers.values())).until - time.monotonic()))
        return seconds if hasattr(select, "epoll") else 1000 * seconds

    def _accept(self, by_file: dict[int, socket.socket]) -> None:
        for _ in range(_A_TURN):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if self._strangers:
                        self._drop(next(iter(self._strangers)), by_file)
                        continue
                    time.sleep(0.01)  # this one failed; others may not
                return
            self.counts["accepted"] += 1
            if len(self._strangers) >= self._max_strangers:
                self._drop(next(iter(self._strangers)), by_file)
            connection.setblocking(False)
            number = os.urandom(16)
            self._strangers[connection] = _Stranger(number, bytearray(), time.monotonic() + SECRET_SECONDS)
            by_file[connection.fileno()] = connection
            try:
                connection.send(number)
                self._events.register(connection, select.POLLIN)
            except OSError:  # it is gone again
                self._drop(connection, by_file)

    def _listen_to(self, connection: socket.socket, by_file: dict[int, socket.socket]) -> None:
        stranger = self._strangers[connection]
        try:
            said = connection.recv(PROOF_BYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        stranger.said.extend(said)
        if said and len(stranger.said) < PROOF_BYTES:
            return
        if not said or not hmac.compare_digest(stranger.said, proof(self._gate, b"gate", stranger.number)):
            self._drop(connection, by_file)
            return
        del self._strangers[connection], by_file[connection.fileno()]
        self._events.unregister(connection)
        self._let_in(connection, stranger.number)

    def _drop(self, connection: socket.socket, by_file: dict[int, socket.socket]) -> None:
        del self._strangers[connection], by_file[connection.fileno()]
        self.counts["strangers"] += 1
        connection.close()

    def _let_in(self, connection: socket.socket, number: bytes) -> None:
        """It has said the secret; a thread of its own goes on."""
        thread = threading.Thread(target=self._serve, args=(connection, number), daemon=True, name="dsv4 transport")
        with self._lock:
            if self._closed:
                connection.close()
                return
            if len(self._unnamed) >= MAX_UNNAMED:
                cut(oldest := next(iter(self._unnamed)))
                del self._unnamed[oldest]
            self._unnamed[connection] = None
            self._threads[connection] = thread
            try:
                thread.start()
            except RuntimeError:  # the process has too many
                del self._unnamed[connection], self._threads[connection]
                connection.close()

    # Who has the secret, in a thread of its own

    def _serve(self, connection: socket.socket, number: bytes) -> None:
        # Whatever goes wrong with a connection ends that one.
        spoken = connection
        try:
            with contextlib.suppress(OSError, ValueError):
                until = time.monotonic() + NAME_SECONDS
                look_alive(connection)
                if self.context is not None:
                    connection.settimeout(NAME_SECONDS)
                    spoken = self.context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                    self._replace(connection, spoken)
                    self._shake_hands(spoken, until)
                name = self._place(spoken, number, until)
                while True:
                    self._serve_one(spoken, name)
        finally:
            with self._lock:
                for of in (self._threads, self._unnamed, self._places):
                    of.pop(spoken, None)
            spoken.close()

    def _replace(self, connection: socket.socket, spoken: socket.socket) -> None:
        """The one is closed as the other has its file now."""
        with self._lock:
            self._threads[spoken] = self._threads.pop(connection)
            if self._closed or connection not in self._unnamed:
                raise ConnectionAbortedError("others have come")
            del self._unnamed[connection]
            self._unnamed[spoken] = None

    def _shake_hands(self, connection: ssl.SSLSocket, until: float) -> None:
        try:
            connection.do_handshake()
        except ssl.SSLError:
            self.counts["refused"] += 1
            connection.settimeout(max(1e-3, until - time.monotonic()))
            socket.socket.shutdown(connection, socket.SHUT_WR)
            while socket.socket.recv(connection, 4096) and time.monotonic() < until:
                pass  # who closes with something unread takes back what it has said: why it has refused
            raise

    def _place(self, connection: socket.socket, number: bytes, until: float) -> str:
        """Its name, once it has proved it and has a place."""
        try:
            name, answer = welcome(connection, self._me, self._gate, number, until)
            place = _Place(name, _origin(connection))
        except ValueError:
            self.counts["refused"] += 1
            raise
        with self._lock:
            if connection not in self._unnamed:
                raise ConnectionAbortedError("others have come")
            del self._unnamed[connection]
            mine = [each for each, other in self._places.items() if other.name == name]
            is_known = name in self._mine or name in self._known
            has_room = len(self._places) < MAX_PLACES - (0 if is_known else RESERVED_PLACES)
            goes = mine[0] if len(mine) >= MAX_PLACES_OF_ONE else None if has_room else self._gives_way(place)
            if goes is not None:
                cut(goes)
                del self._places[goes]
            if has_room := has_room or goes is not None:
                self._places[connection] = place
        if not has_room:
            self.counts["refused"] += 1
            _refuse(connection, "no place is free", until)
            raise ConnectionAbortedError("no place is free")
        send(connection, FRAME.pack(GOOD, 0) + answer, until)
        return name

    def _gives_way(self, to: _Place) -> socket.socket | None:
        """The oldest place of the origin that has most: to a peer that this host connects to, and to one of an origin
        that has fewer with it than that without."""
        others = {each: place.origin for each, place in self._places.items() if place.name not in self._mine}
        counts = collections.Counter(others.values())
        most = max(counts, key=lambda origin: counts[origin], default=None)
        if most is None or (to.name not in self._mine and counts[most] <= counts[to.origin] + 1):
            return None
        return next(each for each, origin in others.items() if origin == most)

    def _serve_one(self, connection: socket.socket, sender: str) -> None:
        head = memoryview(bytearray(FRAME.size))
        fill(connection, head[:1], time.monotonic() + IDLE_SECONDS)
        until = time.monotonic() + FRAME_SECONDS
        fill(connection, head[1:], until)
        what, size = FRAME.unpack(head)
        if what not in (ASK, TELL, PING) or size > {ASK: MAX_ASK, TELL: MAX_TELL, PING: 0}[what]:
            raise ValueError("no frame of ours")
        if sender not in self._known:
            self._remember(self._known, sender)
        if what == TELL:
            self._take(connection, sender, size)
        elif what == PING:
            send(connection, FRAME.pack(GOOD, 0), until)
        else:
            self._say(connection, sender, read(connection, size, until))

    def _take(self, connection: socket.socket, sender: str, size: int) -> None:
        with self._large if size > _LARGE else contextlib.nullcontext():
            message = read(connection, size, time.monotonic() + FRAME_SECONDS + size / SLOWEST)
        if not self._inbox.put(sender, message, wait=IDLE_SECONDS):
            raise ConnectionAbortedError("nobody reads its messages")

    def _say(self, connection: socket.socket, sender: str, data: bytes) -> None:
        try:
            size, buffers = self._answer(data, sender)
        except Exception as error:  # the asker's fault, or its to know
            _refuse(connection, f"{type(error).__name__}: {error}", time.monotonic() + FRAME_SECONDS)
            return
        until = time.monotonic() + FRAME_SECONDS + size / SLOWEST
        send(connection, FRAME.pack(GOOD, 0), until)
        for buffer in buffers:
            send(connection, buffer, until)


def _origin(connection: socket.socket) -> bytes:
    """Of its certificate, or else its address: of IPv6 that of the network, as a machine may have all of one."""
    if isinstance(connection, ssl.SSLSocket):
        return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").digest()
    return socket.inet_pton(connection.family, connection.getpeername()[0].partition("%")[0])[:8]


def _refuse(connection: socket.socket, why: str, until: float) -> None:
    text = why.encode()[:MAX_ERROR]
    send(connection, FRAME.pack(BAD, len(text)) + text, until)
