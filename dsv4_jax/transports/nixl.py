"""`NixlEngine`: pages by NIXL, which reads from another host's registered memory without that host's program. No jax.

The pool is registered once. Each end has a prepared list of its pages, in which a page's index is its id: a read names
two lists of ids and no addresses. Underneath is UCX: RDMA where there is a network card for it, else TCP; within a
machine shared memory, and reads from another process. UCX_TLS, if set, must name `tcp` beside others, or hosts never
find each other, and beside a GPU `cuda_copy`, or NIXL does not start. The wheels ask for torch and run without it:
install them with `--no-deps`.

UCX takes any bytes for those of a friend: a stranger's can end the process. Its ports are for trusted networks.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import logging
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TransferError
from ..inbox import Inbox
from .wire import resolve

if TYPE_CHECKING:
    from ..tiers.remote.pages import Pages

__all__ = ["NixlEngine", "problem"]

_PACKAGES = ("nixl_cu13", "nixl_cu12")  # alike but for the CUDA that memory of devices would need
_RANKS = struct.Struct("<H")  # whose memories' addresses follow, 8 bytes each
_READER = "/"  # between a host's name and the number of its reading agent
_GOING, _DONE = "PROC", "DONE"  # NIXL's words
_SLEEP = 1000  # microseconds that an agent's thread waits at most for something to happen
_SIOCGIFADDR = 0x8915  # of Linux
_GRACE = 0.1  # seconds that reads of a link that is cut have to end by themselves


def problem() -> str | None:
    """None if there is a wheel that can be loaded."""
    try:
        _nixl()
    except ImportError as error:
        return str(error)
    return None


def _nixl() -> Any:
    name = next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)
    if name is None:
        raise ImportError("neither nixl-cu12 nor nixl-cu13 is installed (pip install --no-deps nixl-cu12)")
    return importlib.import_module(name)


class NixlEngine:
    """The `TransportEngine` over NIXL.

    NIXL's side is two agents. One is what others read from and send notices to. The other reads: when a link is cut
    while a read of it has not ended well, only the end of the agent is known to stop what is on its way, so another
    takes its place, and begins the reads of the other links anew.

    Args:
        address: of the network device to listen on: its IP address, or a name of that; "0.0.0.0": all devices. None:
            what UCX_NET_DEVICES says, and if it says nothing the loopback device, which no other machine reaches.
        devices: their names, as UCX has them ("mlx5_0:1,eth0"), instead of an address: RDMA cards have none.
        ports: the first and the last port to listen on, at least four of each device; None: any that are free.

    Raises:
        TransferError: no device has this address; both are given, or UCX_NET_DEVICES is set beside them.
    """

    name = "nixl"

    def __init__(
        self, address: str | None = None, *, devices: str | None = None, ports: tuple[int, int] | None = None
    ) -> None:
        self._settings = _settings(address, devices, ports)
        self._inbox = Inbox()
        self._serving: _Agent | None = None
        self._reading: _Agent | None = None
        self._links: dict[_NixlLink, None] = {}
        self._readers = 0
        self._pages: Pages | None = None

    def register(self, host: str, pages: Pages) -> bytes:
        self._host, self._pages = host, pages
        self._serving = _Agent(host, pages, self._settings)
        places = np.array(_places(pages), "<u8")
        return _RANKS.pack(len(places)) + places.tobytes() + self._serving.agent.get_agent_metadata()

    def connect(self, host: str, metadata: bytes, num_pages: int) -> _NixlLink:
        link = _NixlLink(host, metadata, num_pages)
        link.open(self._reader)
        self._links[link] = None
        return link

    def is_up(self, link: _NixlLink) -> bool:
        """Always: UCX connects when it is first used."""
        return True

    def start(self, link: _NixlLink, source: np.ndarray, destination: np.ndarray) -> _NixlRead:
        read = _NixlRead(link, source, destination)
        link.reads.add(read)  # also if this fails: some of it may be on its way
        read.begin(self._reader)
        return read

    def send(self, link: _NixlLink, message: bytes) -> None:
        self._reader.agent.send_notif(link.host, message)

    def received(self) -> list[tuple[str, bytes]]:
        if self._serving is None:
            return []
        for reader, messages in self._serving.agent.get_new_notifs().items():
            for message in messages:
                self._inbox.put(_sender(reader), message)
        return self._inbox.take()

    @property
    def counts(self) -> Counter[str]:
        """Messages that were "dropped"."""
        return Counter({"dropped": self._inbox.dropped})

    def disconnect(self, link: _NixlLink) -> None:
        self._links.pop(link, None)
        ended = link.settle()
        link.close(self._reader)
        if not ended:
            for other in self._links:
                other.let_go(self._reader)
            self._reader.close()
            self._reading = None
            for other in self._links:
                other.go_on(lambda: self._reader)

    def close(self) -> None:
        for agent in (self._reading, self._serving):
            if agent is not None:
                agent.close()
        self._serving = self._reading = None
        self._pages = None

    @property
    def _reader(self) -> _Agent:
        """What reads now; made when it is first needed."""
        if self._reading is None:
            assert self._pages is not None
            self._readers += 1
            self._reading = _Agent(f"{self._host}{_READER}{self._readers}", self._pages, self._settings)
        return self._reading


class _Agent:
    """NIXL's agent, with our pages registered and listed."""

    def __init__(self, name: str, pages: Pages, settings: dict[str, str]):
        self.agent = _new_agent(name, settings)
        self._width, places = pages.width, _places(pages)
        regions = [(place, memory.nbytes, 0, "") for place, memory in zip(places, pages.memories, strict=True)]
        self._memory = self.agent.register_memory(regions, "DRAM")
        self.pages = self.list_pages("", places, len(pages))

    def list_pages(self, host: str, places: Sequence[int], count: int) -> Any:
        """Of memories at these addresses, among which the pages are dealt out, `count` with one null page."""
        before = np.arange(-1, count - 1)
        rows = (before // len(places) + 1).astype(np.uint64) * np.uint64(self._width)
        descriptors = np.zeros((count, 3), np.uint64)  # address, bytes, device
        descriptors[:, 0] = np.asarray(places, np.uint64)[before % len(places)] + rows
        descriptors[:, 1] = self._width
        return self.agent.prep_xfer_dlist(host, descriptors, "DRAM")

    def close(self) -> None:
        """Its threads and sockets end with the last reference to it."""
        with contextlib.suppress(Exception):  # of kinds of its own: reads under way keep both
            self.agent.release_dlist_handle(self.pages)
            self.agent.deregister_memory(self._memory)
        self.agent = self.pages = self._memory = None


def _new_agent(name: str, settings: dict[str, str]) -> Any:
    """An agent with these settings of UCX, whose thread sleeps while there is nothing to do.

    NIXL's own configuration has no setting for that: its thread would keep a core busy for ever. So the agent inside
    is replaced by one of the same kind that has.
    """
    nixl = _nixl()
    bindings = importlib.import_module(f"{nixl.__name__}._bindings")
    with _quiet():
        agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _SLEEP
        agent.agent = bindings.nixlAgent(name, config)
        if "UCX" not in agent.get_plugin_list():
            raise OSError("NIXL has no UCX here")
        with _environment(settings):  # lists of devices cannot be said otherwise
            agent.create_backend("UCX")
    return agent


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """With these variables beside those of the environment."""
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)


def _settings(address: str | None, devices: str | None, ports: tuple[int, int] | None) -> dict[str, str]:
    """Where to listen, as UCX is told: variables that are not set."""
    asked = address if devices is None else devices
    if (address is not None and devices is not None) or (asked is not None and "UCX_NET_DEVICES" in os.environ):
        raise TransferError("an address, devices and UCX_NET_DEVICES say the same: give one of them")
    said = {}
    if devices is not None:
        said["UCX_NET_DEVICES"] = devices
    elif "UCX_NET_DEVICES" not in os.environ:
        device = "lo" if address is None else _device_of(address)
        said |= {"UCX_NET_DEVICES": device} if device else {}
    if ports is not None:
        first, last = ports
        if not 0 < first <= last - 3 <= 65532 or "UCX_TCP_PORT_RANGE" in os.environ:
            raise TransferError(f"ports {first} to {last}: not four of them, or UCX_TCP_PORT_RANGE says others")
        said["UCX_TCP_PORT_RANGE"] = f"{first}-{last}"
    return said


def _device_of(address: str) -> str:
    """The network device that has this address; "" for all of them."""
    found = resolve(address)
    if found in ("0.0.0.0", "::"):
        return ""
    for _, name in socket.if_nameindex():
        if found in _addresses(name):
            return name
    raise TransferError(f"no network device of this machine has the address {found}")


def _addresses(device: str) -> list[str]:
    """The IP addresses of a network device, as Linux tells them."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            number, *_, name = line.split()
            if name == device:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return found


class _NixlLink:
    def __init__(self, host: str, metadata: bytes, num_pages: int):
        self.host, self._metadata, self._count = host, metadata, 1 + num_pages
        self.reads: set[_NixlRead] = set()
        self.pages: Any = None  # the list of its pages

    def open(self, reader: _Agent) -> None:
        (ranks,) = _RANKS.unpack_from(self._metadata)
        places = np.frombuffer(self._metadata, "<u8", ranks, _RANKS.size).tolist()
        name = reader.agent.add_remote_agent(self._metadata[_RANKS.size + 8 * ranks :])
        if name != self.host.encode():
            reader.agent.remove_remote_agent(name)
            raise ValueError("the metadata is of a host of another name")
        try:
            self.pages = reader.list_pages(self.host, places, self._count)
        except BaseException:
            reader.agent.remove_remote_agent(self.host)
            raise

    def settle(self) -> bool:
        """Whether all its reads end well, for which they are given some time."""
        until = time.monotonic() + _GRACE
        while any(read.is_going() for read in self.reads) and time.monotonic() < until:
            time.sleep(1e-3)
        return all(read.state == _DONE for read in self.reads)

    def close(self, reader: _Agent) -> None:
        self.let_go(reader)
        for read in list(self.reads):
            read.release()
        with contextlib.suppress(Exception):  # of a kind of its own: the other end may be gone
            reader.agent.remove_remote_agent(self.host)

    def let_go(self, reader: _Agent) -> None:
        """Lets go of all that keeps the reader; reads that have not ended are broken off."""
        for read in self.reads:
            read.let_go()
        with contextlib.suppress(Exception):  # of a kind of its own
            reader.agent.release_dlist_handle(self.pages)
        self.pages = None

    def go_on(self, reader: Callable[[], _Agent]) -> None:
        """Goes on with another reader. If that cannot be, its reads say so."""
        try:
            self.open(reader())
            for read in self.reads:
                if read.state != _DONE:
                    read.begin(reader())
        except Exception as error:  # of a kind of its own
            for read in self.reads:
                read.state = f"{type(error).__name__}: {error}"


class _NixlRead:
    """The `EngineRead` of a `NixlEngine`."""

    def __init__(self, link: _NixlLink, source: np.ndarray, destination: np.ndarray):
        self._link, self._ids = link, (source, destination)
        self._agent: Any = None
        self._handle: Any = None
        self.state = _GOING

    def begin(self, reader: _Agent) -> None:
        source, destination = self._ids
        self._agent = reader.agent
        self._handle = self._agent.make_prepped_xfer("READ", reader.pages, destination, self._link.pages, source)
        self.state = self._agent.transfer(self._handle)

    def is_going(self) -> bool:
        """Whether it is under way still."""
        if self.state == _GOING:
            try:
                self.state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # of a kind of its own
                self.state = f"{type(error).__name__}: {error}"
        return self.state == _GOING

    def is_done(self) -> bool:
        if not self.is_going() and self.state != _DONE:
            raise OSError(f"NIXL says {self.state}")
        return self.state == _DONE

    def release(self) -> None:
        self.let_go()
        self._link.reads.discard(self)

    def let_go(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(Exception):  # of a kind of its own: it has not ended
                self._agent.release_xfer_handle(self._handle)
        self._agent = self._handle = None


def _places(pages: Pages) -> list[int]:
    """Returns the addresses of the memories."""
    return [memory.ctypes.data for memory in pages.memories]


@contextlib.contextmanager
def _quiet() -> Any:
    """Without the lines in which NIXL says that it starts."""
    logger = logging.getLogger("nixl")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _sender(reader: str | bytes) -> str:
    name = reader.decode(errors="replace") if isinstance(reader, bytes) else reader
    return name.partition(_READER)[0]
