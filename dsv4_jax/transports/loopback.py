"""`LoopbackEngine`: pages over sockets of one machine, in one process or between several. No jax, no dependency.

For tests and for trying things out. A thread of the host that has the pages sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .inbox import Inbox
from .sockets import SocketLink, SocketRequest, SocketServer

if TYPE_CHECKING:
    from ..tiers.remote.pages import Pages

__all__ = ["LoopbackEngine", "problem"]


def problem() -> None:
    """Why this engine cannot run here: None, as it runs anywhere."""


class LoopbackEngine:
    """The `TransportEngine` between hosts of one process, for tests."""

    name = "loopback"

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._server: SocketServer | None = None
        self._host = ""
        self._pages: Pages | Sequence[np.ndarray] = ()

    def register(self, host: str, pages: Pages) -> bytes:
        self._host, self._pages = host, pages
        self._server = SocketServer(self._answer, self._inbox.put)
        return self._server.reach

    def connect(self, host: str, metadata: bytes, num_pages: int) -> SocketLink:
        return SocketLink(self._host, metadata)

    def start(self, link: SocketLink, source: np.ndarray, destination: np.ndarray) -> _LoopbackRead:
        return _LoopbackRead(link.ask(source.astype("<i4").tobytes(), [self._pages[i] for i in destination]))

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

    def _answer(self, data: bytes) -> list[np.ndarray]:
        ids = np.frombuffer(data, "<i4")
        if ids.size and not 1 <= ids.min() <= ids.max() < len(self._pages):
            raise ValueError("no page of ours")
        return [self._pages[i] for i in ids]


class _LoopbackRead:
    """The `EngineRead` of a `LoopbackEngine`."""

    def __init__(self, request: SocketRequest):
        self._request = request

    def is_done(self) -> bool:
        return self._request.is_done()

    def release(self) -> None:
        """Does nothing, as nothing is kept."""
