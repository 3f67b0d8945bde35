"""`SocketEngine`: pages over TCP, between hosts or on one, with mutual TLS where nothing is trusted. No jax.

A thread of the host that has the pages sends them. Who connects has its metadata, whose secret it says first, and the
token, if there is one; with TLS each end shows a certificate. Neither parses anything of anybody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import TransferError
from ..inbox import Inbox
from .identity import Identity, mark_of
from .link import SocketLink, SocketRequest
from .server import Answer, SocketServer
from .wire import MAX_PAGES, Reach, Tls, TlsContext, public_name

if TYPE_CHECKING:
    from ..tiers.remote.pages import Pages

__all__ = ["MAX_ANSWER_BYTES", "SocketEngine", "asked_pages", "problem"]

MAX_ANSWER_BYTES = 32 << 20  # of one request for pages, or one page


def problem() -> None:
    """Why this engine cannot run here: None, as it runs anywhere."""


class SocketEngine:
    """The `TransportEngine` over sockets.

    Args:
        address: IP address of this machine to listen on, or a name of it. By default no other machine reaches it.
        port: 0: any that is free.
        advertise: IP address or DNS name under which others reach this host, if that is not `address`: `address` may be
            "0.0.0.0" or "::" then. Names are looked up for each connection.
        tls: certificates: connections are encrypted, and only of hosts that `Tls.authority` vouches for. The names of
            this host's certificate have to contain what is published. None: everybody between the hosts reads along.
        token: what all hosts have that may connect, beside the metadata of the other; at least 16 bytes.

    Attributes:
        identity: what the name of this host has to end in.
        counts: of the server's connections (`SocketServer.counts`), messages that were "dropped", and connections for
            which "unreadable_certificates" had to be those before.

    Raises:
        TransferError: nobody could connect to that; a certificate that cannot be used; a token that is too short.
    """

    name = "sockets"

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        port: int = 0,
        advertise: str | None = None,
        tls: Tls | None = None,
        token: bytes | str = b"",
    ):
        public_name(address, advertise)
        self._token = token.encode() if isinstance(token, str) else token
        if self._token and len(self._token) < 16:
            raise TransferError(f"a token of {len(self._token)} bytes can be guessed: at least 16")
        self._where = dict(address=address, port=port, advertise=advertise, tls=tls)
        self._context = TlsContext(tls, server=False) if tls is not None else None
        self._me, self._inbox = Identity(), Inbox()
        self.identity = self._me.mark
        self._server: SocketServer | None = None
        self._host = ""
        self._pages: Pages | Sequence[np.ndarray] = ()
        self.answers: Answer = self._answer  # what requests are answered with

    @property
    def counts(self) -> Counter[str]:
        counts = Counter({"dropped": self._inbox.dropped})
        if self._server is not None:
            counts.update(self._server.counts)
        contexts = (self._context, None if self._server is None else self._server.context)
        counts["unreadable_certificates"] = sum(each.unreadable for each in contexts if each is not None)
        return counts

    def register(self, host: str, pages: Pages) -> bytes:
        self._host, self._pages = host, pages
        self._server = SocketServer(self.answers, self._inbox, self._me, token=self._token, **self._where)
        return self._server.reach.pack()

    def connect(self, host: str, metadata: bytes, num_pages: int) -> SocketLink:
        link = self.link_to(host, metadata)
        if self._server is not None:
            self._server.know(host)
        return link

    def link_to(self, host: str, metadata: bytes) -> SocketLink:
        """A link to the host that has published this. Raises `ValueError` if that is not of this name."""
        reach = Reach.unpack(metadata)
        if not host.endswith(mark_of(reach.public)):
            raise ValueError("a name that is not its own")
        context = None if self._context is None else self._context()
        return SocketLink(self._host, self._me, reach, context=context, token=self._token)

    def is_up(self, link: SocketLink) -> bool:
        return link.is_up()

    def start(self, link: SocketLink, source: np.ndarray, destination: np.ndarray) -> _SocketRead:
        return _SocketRead(link.ask(source.astype("<i4").tobytes(), [self._pages[i] for i in destination]))

    def send(self, link: SocketLink, message: bytes) -> None:
        link.tell(message)

    def received(self) -> list[tuple[str, bytes]]:
        return self._inbox.take()

    def disconnect(self, link: SocketLink) -> None:
        link.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._pages = ()

    def _answer(self, data: bytes, sender: str) -> tuple[int, Iterator[np.ndarray]]:
        pages = self._pages
        ids = asked_pages(data, pages)
        return len(ids) * pages[1].nbytes, (pages[i] for i in ids)


class _SocketRead:
    """The `EngineRead` of a `SocketEngine`."""

    def __init__(self, request: SocketRequest):
        self._request = request

    def is_done(self) -> bool:
        return self._request.is_done()

    def release(self) -> None:
        """Does nothing, as nothing is kept."""


def asked_pages(data: bytes, pages: Pages | Sequence[np.ndarray]) -> np.ndarray:
    """The ids of a request. Raises `ValueError` if they are none of ours, or too many for one request."""
    ids = np.frombuffer(data, "<i4")
    if ids.size and not 1 <= ids.min() <= ids.max() < len(pages):
        raise ValueError("no page of ours")
    if ids.size > MAX_PAGES or (ids.size > 1 and ids.size * pages[1].nbytes > MAX_ANSWER_BYTES):
        raise ValueError(f"{ids.size} pages at once")
    return ids
