"""What both ends of a connection say, and how long they wait for the other: frames, greeting, addresses, TLS. No jax.

    server                                    whoever connects
    a random number                      ->
                                         <-   32 bytes that take the secret that was published, and the token if there
                                              is one; nothing else of theirs is looked at before
              (TLS, if the server has certificates: each end shows its own)
                                         <-   its name, what is public of it, and the proof that it is its own
    the proof that this is the server    ->
                                         <-   requests, messages

A *mark* is the part of a name that is bound to a secret of its owner: `Identity`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import ipaddress
import json
import os
import socket
import ssl
import struct
import time
from typing import Any

from ..errors import TransferError
from ..untrusted import parse_json
from .identity import PUBLIC_BYTES, Identity, mark_of

__all__ = [
    "ASK",
    "BAD",
    "FRAME",
    "GOOD",
    "MAX_ASK",
    "MAX_ERROR",
    "MAX_PAGES",
    "MAX_TELL",
    "PING",
    "PROOF_BYTES",
    "TELL",
    "Reach",
    "Tls",
    "TlsContext",
    "check_answer",
    "cut",
    "fill",
    "gate_key",
    "introduce",
    "is_name",
    "look_alive",
    "proof",
    "public_name",
    "read",
    "resolve",
    "send",
    "welcome",
]

FRAME = struct.Struct("<cI")  # what, bytes that follow
ASK, TELL, PING, GOOD, BAD = b"?", b"!", b"~", b"+", b"-"
MAX_PAGES = 4096  # that one request may ask for
MAX_ASK, MAX_TELL, MAX_ERROR = 64 + 4 * MAX_PAGES, 4 << 20, 1024  # bytes
PROOF_BYTES = 32
_LONGEST_NAME = 255
_VANISHED = 30  # seconds after which a machine that says nothing at all is gone


class _Closing(ssl.SSLSocket):
    """Of a connection that was reset before TLS began, which `wrap_socket` leaves open before Python 3.13."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """As it looks for bytes on a socket that is not connected; nothing else here calls it."""
        try:
            return super().recv(buflen, flags)
        except OSError:
            self.close()
            raise


@dataclasses.dataclass(frozen=True)
class Tls:
    """Paths of PEM files: what this host shows, and who vouches for the others.

    They may be replaced while they are used: each connection is made by what they are then, and goes on by that.

    Attributes:
        certificate: of this host (or with those between it and the authority); its names are those that are published.
        key: of the certificate.
        authority: certificates of whoever signs those of all hosts; who shows no certificate of theirs is refused.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authority: str | os.PathLike[str]

    def context(self, server: bool) -> ssl.SSLContext:
        """TLS 1.3, both ends known. Raises `TransferError` if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.sslsocket_class = _Closing
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if server:
            context.num_tickets = 0
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise TransferError(f"TLS by {self.certificate}, {self.key}, {self.authority}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context


class TlsContext:
    """The context of one end, made anew when one of its files is another than before. From any thread.

    Attributes:
        unreadable: how often that could not be: the one before is as good as it was.

    Raises: `TransferError`: a file cannot be used from the start.
    """

    def __init__(self, tls: Tls, server: bool):
        self._tls, self._server, self.unreadable = tls, server, 0
        self._made = self._files(), tls.context(server)

    def __call__(self) -> ssl.SSLContext:
        """For a connection that is made now. It costs a look at three files."""
        files, context = self._made
        if (now := self._files()) != files:
            try:
                context = self._tls.context(self._server)
                self._made = now, context
            except TransferError:  # it is being written, or the key is to follow
                self.unreadable += 1
        return context

    def _files(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for path in (self._tls.certificate, self._tls.key, self._tls.authority):
            with contextlib.suppress(OSError):  # it is missing: for a moment, it is hoped
                now = os.stat(path)
                found.append((now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns))
        return found


@dataclasses.dataclass(frozen=True)
class Reach:
    """How to connect to a server: what it publishes.

    Attributes:
        address: IP address or DNS name, which is looked up anew for each connection.
        secret: who has it may try.
        public: of the server's identity.
        tls: whether it insists on certificates.
    """

    address: str
    port: int
    secret: bytes
    public: bytes
    tls: bool

    def pack(self) -> bytes:
        fields = dataclasses.asdict(self) | {"secret": self.secret.hex(), "public": self.public.hex()}
        return json.dumps(fields).encode()

    @staticmethod
    def unpack(data: bytes) -> Reach:
        """Returns what `pack` made. Raises `ValueError` for anything else."""
        value = parse_json(data, unique_keys=True)
        if not isinstance(value, dict) or sorted(value) != ["address", "port", "public", "secret", "tls"]:
            raise ValueError("no address of ours")
        address, port, tls = value["address"], value["port"], value["tls"]
        if not is_name(address) or type(port) is not int or not 0 < port < 65536 or type(tls) is not bool:
            raise ValueError("no address of ours")
        found = []
        for field, size in (("secret", 16), ("public", PUBLIC_BYTES)):
            if not isinstance(value[field], str) or len(value[field]) != 2 * size:
                raise ValueError(f"no {field} of ours")
            found.append(bytes.fromhex(value[field]))
        return Reach(address, port, found[0], found[1], tls)


def is_name(address: Any) -> bool:
    """Whether it is an IP address of a host, or may be a DNS name."""
    if not isinstance(address, str) or not 0 < len(address) <= 253 or not address.isascii():
        return False
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(address).is_unspecified
    labels = address.removesuffix(".").split(".")
    return all(label and len(label) < 64 and label.replace("-", "").replace("_", "").isalnum() for label in labels)


def public_name(address: str, advertise: str | None) -> str:
    """What is published of an address that is listened on. Raises `TransferError` if nobody could connect to that."""
    if advertise is None and isinstance(address, str):
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address).is_unspecified:
                raise TransferError(
                    f"{address} is every address of this host and of no other: say by advertise= where others reach it"
                )
    name = address if advertise is None else advertise
    if not is_name(name):
        raise TransferError(f"{name!r} is no IP address or DNS name at which others reach this host")
    return name


def resolve(address: str) -> str:
    """The IP address of a name of this host, to listen on. Raises `TransferError` if there is none."""
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise TransferError(f"there is no address {address!r}: {error}") from error


# Greeting


def gate_key(secret: bytes, token: bytes) -> bytes:
    return hmac.digest(token, b"dsv4_jax gate" + secret, "sha256")


def proof(key: bytes, what: bytes, *parts: bytes) -> bytes:
    """`PROOF_BYTES` that only who has the key can make."""
    hashed = b"".join(hashlib.sha256(part).digest() for part in (what, *parts))
    return hmac.digest(key, hashed, "sha256")


def introduce(connection: socket.socket, name: str, me: Identity, reach: Reach, gate: bytes, number: bytes) -> None:
    """Says who this is, and sees that the other end is who it should be, by the time limit of the connection."""
    mine, key = os.urandom(16), me.key_with(reach.public)
    said = name.encode()
    connection.sendall(
        bytes([len(said)]) + said + me.public + mine + proof(key, b"name", gate, number, mine, said, reach.public)
    )
    check_answer(connection)
    if not hmac.compare_digest(read(connection, PROOF_BYTES), proof(key, b"server", gate, number, mine)):
        raise ConnectionError("it is another host than the one that has published this")


def welcome(connection: socket.socket, me: Identity, gate: bytes, number: bytes, until: float) -> tuple[str, bytes]:
    """Who this is, by its name, and what proves to it that it has come to the right place. Raises `ValueError` if it is
    not."""
    said = read(connection, read(connection, 1, until)[0], until)
    public, theirs = read(connection, PUBLIC_BYTES, until), read(connection, 16, until)
    given, name = read(connection, PROOF_BYTES, until), said.decode()
    if not name.isprintable() or not name.endswith(mark_of(public)):
        raise ValueError("a name that is not its own")
    key = me.key_with(public)
    if not hmac.compare_digest(given, proof(key, b"name", gate, number, theirs, said, me.public)):
        raise ValueError("a name that is not its own")
    return name, proof(key, b"server", gate, number, theirs)


def check_answer(connection: socket.socket) -> None:
    """Raises `ValueError` unless the other end has done what it was asked for."""
    what, size = FRAME.unpack(read(connection, FRAME.size))
    if what == BAD and size <= MAX_ERROR:
        raise ValueError(f"the other end says: {read(connection, size).decode(errors='replace')!r}")
    if what != GOOD or size:
        raise ValueError("the other end answers nonsense")


# Bytes. `until`: by the monotonic clock; None: by the time limit that the connection has.


def read(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    data = bytearray(size)
    fill(connection, memoryview(data), until)
    return bytes(data)


def fill(connection: socket.socket, view: memoryview, until: float | None = None) -> None:
    while view:
        _limit(connection, until)
        if not (count := connection.recv_into(view)):
            raise ConnectionResetError("the other end has closed the connection")
        view = view[count:]


def send(connection: socket.socket, data: Any, until: float | None = None) -> None:
    view = memoryview(data)
    while view:
        _limit(connection, until)
        view = view[connection.send(view) :]


def _limit(connection: socket.socket, until: float | None) -> None:
    if until is not None:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("it takes too long")
        connection.settimeout(left)


def look_alive(connection: socket.socket) -> None:
    """Makes a machine that has vanished without a word known within a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _VANISHED // 2),
        ("TCP_KEEPINTVL", _VANISHED // 6),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * _VANISHED),
    ):
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def cut(connection: socket.socket) -> None:
    """Wakes whoever reads from it or writes to it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # of TLS, too: its own would say goodbye first
