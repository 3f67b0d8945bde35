"""`JaxEngine`: pages over TCP by `jax.experimental.transfer`, which comes with jax. jax is imported when it is used.

What moves is arrays. The host that has the pages offers copies of those it is asked for, under a random number; the
reader pulls them into arrays of its own and copies these into its pool. So each side copies once more than NIXL, and
the program of the host that has the pages takes part, in a thread. Requests and messages go over a socket.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..untrusted import parse_json
from .inbox import Inbox
from .sockets import SocketLink, SocketRequest, SocketServer

if TYPE_CHECKING:
    from ..tiers.remote.pages import Pages

__all__ = ["JaxEngine", "problem"]

_OFFERED = datetime.timedelta(minutes=2)  # how long copies wait to be pulled


def problem() -> str | None:
    """None if this jax has it."""
    try:
        from jax.experimental import transfer

        return None if hasattr(transfer, "start_transfer_server") else "this jax has no transfer server"
    except (ImportError, AttributeError) as error:
        return f"this jax has no transfer server: {error}"


class JaxEngine:
    """The `TransportEngine` over `jax.experimental.transfer`.

    Args:
        address: IP address of this machine under which others reach it.
    """

    name = "jax"

    def __init__(self, address: str = "127.0.0.1"):
        self._address, self._inbox = address, Inbox()
        self._sockets: SocketServer | None = None
        self._transfers: Any = None  # jax's server
        self._host = ""
        self._pages: Pages | Sequence[np.ndarray] = ()

    def register(self, host: str, pages: Pages) -> bytes:
        from jax.experimental import transfer

        self._host, self._pages = host, pages
        self._sockets = SocketServer(self._answer, self._inbox.put, self._address)
        place = f"[{self._address}]:0" if ":" in self._address else f"{self._address}:0"
        self._transfers = transfer.start_transfer_server(_device().client, place, [place])
        return json.dumps({"sockets": self._sockets.reach.decode(), "transfers": self._transfers.address()}).encode()

    def connect(self, host: str, metadata: bytes, num_pages: int) -> _JaxLink:
        reach = parse_json(metadata, unique_keys=True)
        if not isinstance(reach, dict) or sorted(reach) != ["sockets", "transfers"]:
            raise ValueError("no addresses of ours")
        if not all(isinstance(each, str) for each in reach.values()):
            raise ValueError("no addresses of ours")
        sockets = SocketLink(self._host, reach["sockets"].encode())
        try:
            return _JaxLink(sockets, self._transfers.connect(reach["transfers"]))
        except BaseException:
            sockets.close()
            raise

    def start(self, link: _JaxLink, source: np.ndarray, destination: np.ndarray) -> _JaxRead:
        return _JaxRead(link, source, [self._pages[i] for i in destination])

    def send(self, link: _JaxLink, message: bytes) -> None:
        link.sockets.tell(message)

    def received(self) -> list[tuple[str, bytes]]:
        return self._inbox.take()

    def disconnect(self, link: _JaxLink) -> None:
        link.sockets.close()
        link.transfers = None

    def close(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
        self._transfers = None  # which ends its threads
        self._pages = ()

    def _answer(self, data: bytes) -> list[bytes]:
        """Offers copies of the pages asked for; the number to pull them by."""
        import jax

        ids = np.frombuffer(data, "<i4")
        if ids.size and not 1 <= ids.min() <= ids.max() < len(self._pages):
            raise ValueError("no page of ours")
        number = secrets.randbits(63)
        copies = [jax.device_put(self._pages[i].copy(), _device()) for i in ids]
        self._transfers.await_pull(number, copies, timeout=datetime.datetime.now() + _OFFERED)
        return [number.to_bytes(8, "little")]


class _JaxLink:
    def __init__(self, sockets: SocketLink, transfers: Any):
        self.sockets, self.transfers = sockets, transfers


class _JaxRead:
    """The `EngineRead` of a `JaxEngine`."""

    def __init__(self, link: _JaxLink, source: np.ndarray, pages: list[np.ndarray]):
        self._link, self._pages = link, pages
        self._number = bytearray(8)
        self._arrays: list[Any] | None = None
        self._request: SocketRequest = link.sockets.ask(source.astype("<i4").tobytes(), [self._number])

    def is_done(self) -> bool:
        if self._arrays is None:
            if not self._request.is_done():
                return False
            self._arrays = self._pull()
        if not all(array.is_ready() for array in self._arrays):
            return False
        for page, array in zip(self._pages, self._arrays, strict=True):
            page[:] = array  # raises jax's error if it did not come
        self._pages = self._arrays = []
        return True

    def release(self) -> None:
        self._pages = self._arrays = []

    def _pull(self) -> list[Any]:
        import jax

        place = jax.sharding.SingleDeviceSharding(_device())
        kinds = [jax.ShapeDtypeStruct(page.shape, page.dtype, sharding=place) for page in self._pages]
        return self._link.transfers.pull(int.from_bytes(self._number, "little"), kinds)


def _device() -> Any:
    import jax

    return jax.local_devices(backend="cpu")[0]
