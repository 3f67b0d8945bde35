"""`JaxEngine`: pages over TCP by `jax.experimental.transfer`, which comes with jax. jax is imported when it is used.

What moves is arrays. The host that has the pages offers copies of those it is asked for, under a random number; the
reader pulls them into arrays of its own and copies these into its pool. So each side copies once more than NIXL, and
the program of the host that has the pages takes part, in a thread. Requests and messages go over a socket.

XLA's server takes any bytes for those of a friend: a stranger's can end the process. Its ports are for networks that
are trusted.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TransferError
from ..untrusted import parse_json
from .link import SocketLink, SocketRequest
from .sockets import MAX_ANSWER_BYTES, SocketEngine, asked_pages
from .wire import is_name, public_name, resolve

if TYPE_CHECKING:
    from ..tiers.remote.pages import Pages

__all__ = ["MAX_OFFERED", "JaxEngine", "problem"]

MAX_OFFERED = 4 * MAX_ANSWER_BYTES  # bytes of copies that one peer has asked for, and not said to have pulled
_OFFERED = 120.0  # seconds that copies wait to be pulled
_PAGES, _PULLED = b"p", b"d"  # requests: pages by their ids; these were pulled


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
        address: IP address of this machine to listen on, or a name of it. By default no other machine reaches it.
        port, transfer_port, data_port: of requests and messages, of XLA's server, and of its data; 0: any that is free.
        advertise: IP address or DNS name under which others reach this host, if that is not `address`: `address` may be
            "0.0.0.0" then. Data is listened for at the address that this name has here, since XLA tells it the others.
        token: as `SocketEngine` has it; XLA's ports know nothing of it.

    Raises:
        TransferError: nobody could connect to that.
    """

    name = "jax"

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        port: int = 0,
        transfer_port: int = 0,
        data_port: int = 0,
        advertise: str | None = None,
        token: bytes | str = b"",
    ):
        self._address, self._public = address, public_name(address, advertise)
        self._ports = transfer_port, data_port
        self._sockets = SocketEngine(address, port=port, advertise=advertise, token=token)
        self._sockets.answers = self._answer
        self.identity = self._sockets.identity
        self._transfers: Any = None  # jax's server
        self._pages: Pages | Sequence[np.ndarray] = ()
        self._lock = threading.Lock()
        self._offers: dict[tuple[str, int], tuple[int, float]] = {}  # by peer and number: bytes, until when

    @property
    def counts(self) -> Counter[str]:
        return self._sockets.counts

    def register(self, host: str, pages: Pages) -> bytes:
        from jax.experimental import transfer

        self._pages = pages
        listened = resolve(self._address)
        own = resolve(self._public) if ipaddress.ip_address(listened).is_unspecified else listened
        places = [_place(ip, port) for ip, port in zip((listened, own), self._ports, strict=True)]
        try:
            self._transfers = transfer.start_transfer_server(_device().client, places[0], places[1:])
        except Exception as error:  # of jax
            raise TransferError(f"jax's transfer server cannot listen on {' and '.join(places)}: {error}") from error
        port = int(self._transfers.address().rpartition(":")[2])
        sockets = self._sockets.register(host, pages)
        return json.dumps({"sockets": sockets.decode(), "address": self._public, "port": port}).encode()

    def connect(self, host: str, metadata: bytes, num_pages: int) -> _JaxLink:
        reach = parse_json(metadata, unique_keys=True)
        if not isinstance(reach, dict) or sorted(reach) != ["address", "port", "sockets"]:
            raise ValueError("no addresses of ours")
        address, port, sockets = reach["address"], reach["port"], reach["sockets"]
        if not is_name(address) or not isinstance(sockets, str) or type(port) is not int or not 0 < port < 65536:
            raise ValueError("no addresses of ours")
        link = self._sockets.connect(host, sockets.encode(), num_pages)
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0]
            return _JaxLink(link, self._transfers.connect(_place(str(found), port)))
        except BaseException:
            link.close()
            raise

    def is_up(self, link: _JaxLink) -> bool:
        return link.sockets.is_up()

    def start(self, link: _JaxLink, source: np.ndarray, destination: np.ndarray) -> _JaxRead:
        return _JaxRead(link, source, [self._pages[i] for i in destination])

    def send(self, link: _JaxLink, message: bytes) -> None:
        link.sockets.tell(message)

    def received(self) -> list[tuple[str, bytes]]:
        return self._sockets.received()

    def disconnect(self, link: _JaxLink) -> None:
        link.sockets.close()
        link.transfers = None

    def close(self) -> None:
        self._sockets.close()
        self._transfers = None  # which ends its threads
        self._pages = ()

    def _answer(self, data: bytes, sender: str) -> tuple[int, Iterable[bytes]]:
        """Offers copies of the pages asked for; the number to pull them by."""
        import jax

        what, rest = data[:1], data[1:]
        if what == _PULLED and len(rest) == 8:
            with self._lock:
                self._offers.pop((sender, int.from_bytes(rest, "little")), None)
            return 0, []
        if what != _PAGES:
            raise ValueError("no request of ours")
        pages = self._pages
        ids = asked_pages(rest, pages)
        number = self._offer(sender, len(ids) * pages[1].nbytes)
        copies = [jax.device_put(pages[i].copy(), _device()) for i in ids]
        until = datetime.datetime.now() + datetime.timedelta(seconds=_OFFERED)
        self._transfers.await_pull(number, copies, timeout=until)
        return 8, [number.to_bytes(8, "little")]

    def _offer(self, sender: str, size: int) -> int:
        """The number of a new offer. Raises `ValueError` if this peer has too many."""
        now, number = time.monotonic(), secrets.randbits(63)
        with self._lock:
            self._offers = {key: offer for key, offer in self._offers.items() if offer[1] > now}
            if sum(offer[0] for key, offer in self._offers.items() if key[0] == sender) + size > MAX_OFFERED:
                raise ValueError("it has not pulled what it has asked for before")
            self._offers[sender, number] = size, now + _OFFERED
        return number


class _JaxLink:
    def __init__(self, sockets: SocketLink, transfers: Any):
        self.sockets, self.transfers = sockets, transfers


class _JaxRead:
    """The `EngineRead` of a `JaxEngine`."""

    def __init__(self, link: _JaxLink, source: np.ndarray, pages: list[np.ndarray]):
        self._link, self._pages = link, pages
        self._number = bytearray(8)
        self._arrays: list[Any] | None = None
        self._request: SocketRequest = link.sockets.ask(_PAGES + source.astype("<i4").tobytes(), [self._number])

    def is_done(self) -> bool:
        if self._arrays is None:
            if not self._request.is_done():
                return False
            self._arrays = self._pull()
        if not all(array.is_ready() for array in self._arrays):
            return False
        for page, array in zip(self._pages, self._arrays, strict=True):
            page[:] = array  # raises jax's error if it did not come
        if self._pages:
            with contextlib.suppress(OSError):  # of what is sent after this
                self._link.sockets.ask(_PULLED + self._number, [])
        self._pages = self._arrays = []
        return True

    def release(self) -> None:
        self._pages = self._arrays = []

    def _pull(self) -> list[Any]:
        import jax

        place = jax.sharding.SingleDeviceSharding(_device())
        kinds = [jax.ShapeDtypeStruct(page.shape, page.dtype, sharding=place) for page in self._pages]
        return self._link.transfers.pull(int.from_bytes(self._number, "little"), kinds)


def _place(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _device() -> Any:
    import jax

    return jax.local_devices(backend="cpu")[0]
