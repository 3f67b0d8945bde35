"""`RecordTransport`: host records of another machine, read page by page into ours. Imports no jax.

    transport = RecordTransport(engine)               # of `dsv4_jax.transports`
    metadata = transport.publish_host(host)           # the host pool, once; send this to the others
    peer = transport.connect(their_metadata)          # another kind of records there: LayoutError
    handle = transport.read(peer, "block", [17, 4], [3, 9], checksums)
    handle.wait()                                     # pages 3 and 9 hold what pages 17 and 4 of the peer held
    transport.notify(peer, b"done")                   # the other end: transport.notices()

What to read is known by other means (a router, a notice): page ids and, from `checksums` of the host that has them, 16
bytes for each. A reader pulls, since it knows which of its pages are free; the other host's program takes no part. The
host must keep the pages as they are meanwhile; if it did not, the checksums show it and nothing wrong is served.

Nothing hangs: a read has a deadline, and a peer that dies, or lets one pass, is *lost*: cut off, all its reads ended
with an error, after which none of its bytes arrive any more. It is looked for, after pauses that grow, until it is
found again or was disconnected from: a thread does that, which there is only while a peer is lost.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...checks import INT32_MAX, check_integer, check_seconds, shown
from ...errors import CacheError, PeerError, StoreFormatError, TransferError
from ...layout import CacheLayout
from ...stores.checksum import checksums
from ..host_memory import host_memories, host_places
from ..transfer_handle import TransferHandle
from .checks import Paired, RecordKind, check_ids, check_pages, check_pairs, pair_snapshots
from .engine import TransportEngine
from .metadata import PoolMetadata
from .pages import Pages
from .peer import GIVEN_UP, Link, Peer, PeerStats, TransportStats
from .read import PIECE_BYTES, PIECE_PAGES, PageRead

if TYPE_CHECKING:
    from ..host_cache import HostCache

__all__ = ["MAX_NOTICE", "Notice", "Peer", "RecordTransport"]

MAX_NOTICE = 4 << 20  # bytes of a message
MAX_PEER_PAGES = 1 << 20  # what an engine keeps of them is up to 80 bytes each
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 0.5  # seconds between looks at whether a lost peer is due, or found
_NEGLECTED = 1.0  # seconds after which a read that nobody looks at is looked at by the transport
_NO_PAGES = Pages([np.zeros((1, 0), np.uint8)])
Ids = Sequence[int] | np.ndarray


class Notice(NamedTuple):
    """A message. With the engines "sockets" and "jax" its sender has proved its name; NIXL's may claim any.

    Attributes:
        sender: name of the transport that sent it.
        message: its bytes.
    """

    sender: str
    message: bytes


class RecordTransport:
    """Publishes pages to other hosts, and reads theirs. Calls from several threads run one at a time.

    Attributes:
        name: of this end, unlike all others'.
        published: what `publish_host` returned; None before that.

    Args:
        engine: what moves the bytes; the transport owns it.
        timeout: seconds that a read has to end.
        max_peer_pages: `connect` takes no peer that says it has more.
        clock: what deadlines are measured with, in seconds.

    Raises (all calls but `close` and `disconnect`): `TransferError` after `close`.
    """

    def __init__(
        self,
        engine: TransportEngine,
        *,
        timeout: float = 30.0,
        max_peer_pages: int = MAX_PEER_PAGES,
        clock: Callable[[], float] = time.monotonic,
    ):
        mark = getattr(engine, "identity", None) or secrets.token_hex(6)
        self.name = f"{socket.gethostname()[:64]}-{os.getpid()}-{mark}"
        self._max_peer_pages = check_integer("max_peer_pages", max_peer_pages, 1, INT32_MAX, error=StoreFormatError)
        self._timeout = check_seconds("timeout", timeout, error=StoreFormatError)
        self._engine, self._clock = engine, clock
        self._lock = threading.RLock()
        self.published: bytes | None = None
        self._layout: CacheLayout | None = None
        self._pages = _NO_PAGES
        self._places: list[tuple[int, tuple[int, ...]]] = []  # of the pages' memories
        self._host: HostCache | None = None  # kept alive
        self._links: dict[Peer, Link] = {}
        self._seeker: threading.Thread | None = None  # looks for lost peers
        self._hurry = threading.Event()
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds = 0.0
        self._written: set[int] = set()  # pages that reads under way write
        self._closed = False

    @property
    def num_pages(self) -> int:
        """Pages 1..num_pages are published here; 0 before that."""
        return len(self._pages) - 1

    @property
    def layout(self) -> CacheLayout | None:
        """The layout of the records that are published here; None before that."""
        return self._layout

    @property
    def num_ranks(self) -> int:
        """How many memories the pages are in: one, or as many as there are pool ranks."""
        return len(self._pages.memories)

    def publish_host(self, host: HostCache) -> bytes:
        """Opens a host pool to others, and to what is read from them. Comes first, and once.

        The pool is kept alive until it is donated. Whatever it is donated for must stay where it is until `close`:
        `check_host` tells, which `RemoteDriver.poll` calls.

        Args:
            host: along a pool axis ids are those of all ranks.

        Returns:
            What others give to `connect`: JSON, at most 256 KiB. Who has it may read every page.

        Raises:
            LayoutError: some pages are in several memories.
            TransferError: something was published before, or the engine cannot register it.
        """
        with self._open():
            published = self.publish(host.layout, host_memories(host))
            self._host = host
            return published

    def check_host(self, host: HostCache) -> None:
        """Raises `TransferError` unless this is the published pool, or what it was donated for; keeps it alive.

        Waits for nothing. To be called, after `close` too, before what was read, or is to be read, is believed.
        """
        if (places := host_places(host)) != self._places:
            have, want = (", ".join(f"{at:#x} {shape}" for at, shape in each) for each in (places, self._places))
            raise TransferError(
                f"the host pool ({have}) is not where pages were published ({want}): it was copied instead of donated "
                "to what writes it (see run_transfers), or something else was published (see publish_host)"
            )
        with self._lock:
            if not self._closed:
                self._host = host

    def publish(self, layout: CacheLayout, pages: np.ndarray | Sequence[np.ndarray]) -> bytes:
        """Does what `publish_host` does, for memory of the caller's own instead of a `HostCache`.

        Args:
            layout: of the records.
            pages: [1 + n, page_bytes(layout)] uint8, contiguous and writable, page 0 null, which must stay where it is
                until `close`. Of several pool ranks: that of each, in their order.

        Returns:
            What others give to `connect`: JSON, at most 256 KiB. Who has it may read every page.

        Raises:
            ShapeError: other memory than that.
            TransferError: it was published before, or the engine cannot register it.
        """
        with self._open():
            if self._layout is not None:
                raise TransferError("a transport publishes once: its pages are registered already")
            pool = Pages(check_pages(layout, pages))
            reach = self._call("cannot register the pages", self._engine.register, self.name, pool)
            self._layout, self._pages = layout, pool
            self._places = [(memory.ctypes.data, memory.shape) for memory in pool.memories]
            fingerprints = layout.block_fingerprint, layout.snapshot_fingerprint
            metadata = PoolMetadata(self._engine.name, self.name, self.num_pages, pool.width, *fingerprints, reach)
            self.published = metadata.pack()
            return self.published

    def connect(self, metadata: bytes) -> Peer:
        """Connects to the host that published this, from which pages can be read then. Again: the same peer, at once if
        it is lost.

        Raises:
            TransferError: it is too long, no such JSON, or of another engine; it has more than `max_peer_pages`;
                another host has published something else under its name.
            LayoutError: blocks or snapshots mean something else there; says which.
            PeerError: the host cannot be reached. (With sockets that shows later.)
            TransferError: nothing is published here yet.
        """
        with self._open():
            layout = self._published()
            there = PoolMetadata.unpack(metadata)
            if there.engine != self._engine.name:
                raise TransferError(f"{there.host!r} is on engine {there.engine!r}, this is {self._engine.name!r}")
            records = there.layout_of(layout)
            if there.num_pages > self._max_peer_pages:
                raise TransferError(f"{there.host!r} has {there.num_pages} pages, more than {self._max_peer_pages}")
            if (known := next((peer for peer in self._links if peer.name == there.host), None)) is not None:
                if self._links[known].there != there:
                    raise TransferError(f"{there.host!r} is connected, and has published something else")
                if known.error is not None:
                    self._connect(known, self._links[known])
                return known
            peer, link = Peer(there.host, there.num_pages), Link(there, records)
            self._connect(peer, link)
            self._links[peer] = link
            return peer

    def check_peer(self, peer: Peer) -> None:
        """Raises `PeerError` if the peer is lost, or was disconnected from: nothing can be read of it now."""
        with self._open():
            self._link(peer)

    def seeks(self, peer: Peer) -> bool:
        """Whether the peer is lost, and is looked for."""
        with self._lock:
            return peer in self._links and peer.error is not None

    def checksums(self, kind: RecordKind, pages: Ids) -> list[bytes]:
        """Returns 16 bytes for each of these pages of ours, which vouch for its bytes, its kind and its layout to a
        reader.

        Raises:
            TransferError: as `read`.
        """
        with self._open():
            layout = self._published()
            return self._sums(layout, kind, check_ids(layout, kind, "source", pages, self.num_pages))

    def read(
        self,
        peer: Peer,
        kind: RecordKind,
        source: Ids,
        destination: Ids,
        checksums: Sequence[bytes] | None,
        *,
        timeout: float | None = None,
    ) -> TransferHandle:
        """Starts to copy pages of a peer into ours.

        A read moves on when its handle is looked at: `is_ready` and `wait` also verify what has come, some milliseconds
        of work at a time. Until the handle says that it is over, the destinations belong to it. One that nobody looks
        at, and be it that its handle was dropped, is looked at by `notices`, and ends at its deadline at the latest.

        Args:
            peer: of `connect`.
            kind: what all of them hold. A snapshot's pages stand one after the other, in the order of its bytes.
            source: pages of the peer, which may repeat.
            destination: as many pages here, each once, that no other read under way writes. (As many records, where
                snapshots of one of the two have the windows of DSpark's stages: what they have more is not read, or
                zeros.)
            checksums: of the source's pages, by `checksums` there. None: nothing is verified; then the caller does.
            timeout: seconds; None: the transport's.

        Returns:
            Its handle. `wait`, or `error`, gives `RecordMismatchError` (which pages arrived with other bytes),
            `PeerError` (lost, or disconnected from), `TransferError`, or the engine's `TransferError`.

        Raises:
            TransferError: an id that is no page of that side, a destination twice or being written, unequal numbers, or
                pages that are no whole snapshots. Nothing has moved.
            PeerError: the peer is lost, or was disconnected from.
        """
        with self._open():
            layout, link = self._published(), self._link(peer)
            seconds = self._timeout if timeout is None else check_seconds("timeout", timeout, error=StoreFormatError)
            there = link.records if kind == "snapshot" else layout
            theirs = check_ids(there, kind, "source", source, peer.num_pages)
            ours = check_ids(layout, kind, "destination", destination, self.num_pages)
            paired = Paired(theirs, ours, checksums, [])
            if there is not layout:
                check_pairs(ours, ours, None, self._written)  # those, too, that are blank in the end
                paired = pair_snapshots(there, layout, theirs, ours, checksums)
            check_pairs(*paired[:3], self._written)
            read = self._make_read(peer, link, kind, paired, seconds)
            link.reads.add(read)
            self._written.update(read.written)
            read.is_ready()  # which starts it
            return TransferHandle(read, clock=self._clock)

    def notify(self, peer: Peer, message: bytes) -> None:
        """Sends a message of at most `MAX_NOTICE` bytes, which arrives after those before it, or never.

        Raises:
            TransferError: it is no bytes, or too long.
            PeerError: the peer is lost, or was disconnected from.
        """
        with self._open():
            link = self._link(peer)
            if not isinstance(message, bytes) or len(message) > MAX_NOTICE:
                size = f"{len(message)} bytes" if isinstance(message, bytes) else type(message).__name__
                raise TransferError(f"a notice must be at most {MAX_NOTICE} bytes, got {size}")
            try:
                self._engine.send(link.link, message)
            except Exception as error:  # of whatever kind the engine has
                self._lose(peer, _as_peer_error(peer.name, "cannot be notified", error))
                raise self._why(peer) from error

    def notices(self) -> list[Notice]:
        """Messages that have come, at most some hundred at once; those of one sender in its order. Does not wait.

        Links that have broken are found out, and reads that nobody looks at move on: call it now and then, as a
        `RemoteDriver` does.
        """
        with self._open():
            for peer, link in list(self._links.items()):
                self._tend(peer, link)
            received = self._call("cannot receive notices", self._engine.received)
            self._counts["notices"] += len(received)
            return [Notice(sender, message) for sender, message in received if len(message) <= MAX_NOTICE]

    def stats(self) -> TransportStats:
        """What there is to be told of peers, reads and strangers. After `close`, too."""
        with self._lock:
            peers = tuple(
                PeerStats(
                    each.name,
                    None if each.error is None else str(each.error),
                    each.losses,
                    each.reconnects,
                    each.reads,
                    each.bytes,
                    each.seconds,
                )
                for each in self._links
            )
            counts = collections.Counter(self._counts)
            counts.update(getattr(self._engine, "counts", ()))
            return TransportStats(self._engine.name, peers, counts, self._seconds)

    def disconnect(self, peer: Peer) -> None:
        """Cuts a peer off; its reads under way end with `PeerError`. It is not looked for any more. Again: nothing."""
        with self._lock:
            if peer in self._links:
                try:
                    self._lose(peer, PeerError(peer.name, "disconnected"), seek=False)
                finally:
                    del self._links[peer]

    def close(self) -> None:
        """Cuts all peers off and lets go of the pages and of all else; reads under way end. Again: nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                for peer in list(self._links):
                    self._lose(peer, TransferError("the transport was closed"))
            finally:
                self._links.clear()
                self._engine.close()
                self._pages, self._host = _NO_PAGES, None
            seeker = self._seeker
        self._hurry.set()
        if seeker is not None:
            seeker.join()

    def __enter__(self) -> RecordTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Holds the lock. Raises `TransferError` if the transport is closed."""
        with self._lock:
            if self._closed:
                raise TransferError("the transport is closed")
            yield

    def _published(self) -> CacheLayout:
        if self._layout is None:
            raise TransferError("publish_host() comes first: reads go to registered pages")
        return self._layout

    def _link(self, peer: Peer) -> Link:
        """The link to a peer that is not lost."""
        link = self._links.get(peer)
        if link is None and not isinstance(peer, Peer):
            raise TransferError(f"{shown(peer)} is no peer")
        if link is not None:
            self._tend(peer, link)
        if link is None or peer.error is not None:
            raise self._why(peer)
        return link

    def _connect(self, peer: Peer, link: Link, *, tried: bool = False) -> None:
        """Makes the engine's link anew. `tried`: nobody has asked for it; it counts once it is known to be up."""
        if link.link is not None:  # it is being tried
            old, link.link = link.link, None
            self._engine.disconnect(old)
        there = link.there
        try:
            link.link = self._engine.connect(there.host, there.reach, there.num_pages)
        except Exception as error:  # of whatever kind the engine has
            raise _as_peer_error(there.host, "cannot be connected to", error) from error
        link.tried = tried
        if not tried:
            self._found(peer, link)

    def _found(self, peer: Peer, link: Link) -> None:
        if peer.error is not None:
            peer.reconnects += 1
            self._counts["reconnects"] += 1
        peer.error = None
        link.made(self._clock())

    def _tend(self, peer: Peer, link: Link) -> None:
        """Sees whether a peer is lost, or found; moves on with reads that nobody looks at."""
        now = self._clock()
        try:
            if link.link is not None:
                is_up = getattr(self._engine, "is_up", None)
                if (is_up is None or is_up(link.link)) and link.tried:
                    self._found(peer, link)
            elif now - link.since >= GIVEN_UP:
                self._counts["given_up"] += 1
                del self._links[peer]
            elif now >= link.again:
                self._connect(peer, link, tried=True)
        except Exception as error:  # of whatever kind the engine has
            self._lose(peer, _as_peer_error(peer.name, "the link broke", error))
        for read in [read for read in link.reads if now - read.looked >= _NEGLECTED]:
            self._advance(peer, read)

    def _why(self, peer: Peer) -> TransferError:
        """A new error of why a peer is gone: one that is raised again would collect tracebacks."""
        return PeerError(peer.name, f"gone: {peer.error or 'not of this transport'}")

    def _call(self, problem: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except CacheError:
            raise
        except Exception as error:  # of whatever kind the engine has
            raise TransferError(f"{self._engine.name}: {problem}: {error}") from error

    def _sums(self, layout: CacheLayout, kind: RecordKind, ids: Sequence[int]) -> list[bytes]:
        """Of pages here with records of this layout."""
        fingerprint = layout.block_fingerprint if kind == "block" else layout.snapshot_fingerprint
        records = [self._pages[i] for i in ids]
        return checksums(records, [kind.encode()] * len(records), bytes.fromhex(fingerprint), [0] * len(records))

    def _make_read(
        self,
        peer: Peer,
        link: Link,
        kind: RecordKind,
        paired: Paired,
        seconds: float,
    ) -> PageRead:
        source, destination, sums, blank = paired

        def wrong(piece: slice) -> list[int]:
            if sums is None:
                return []
            have = self._sums(link.records, kind, destination[piece])
            return [i for i, (a, b) in enumerate(zip(have, sums[piece], strict=True)) if a != b]

        def start(theirs: np.ndarray, ours: np.ndarray) -> Any:
            return self._engine.start(link.link, theirs, ours)

        def look(read: PageRead) -> None:
            with self._lock:
                self._advance(peer, read)

        piece = min(max(1, PIECE_BYTES // self._pages.width), PIECE_PAGES)
        pairs = np.array(source, np.int32), np.array(destination, np.int32)
        now = self._clock()
        times = dict(began=now, until=now + seconds)
        return PageRead(peer.name, *pairs, blank, piece=piece, **times, start=start, wrong=wrong, look=look)

    def _advance(self, peer: Peer, read: PageRead) -> None:
        if read.is_over:
            return
        read.looked = self._clock()
        try:
            if read.advance():
                self._finish(peer, read, None)
            elif self._clock() >= read.until:
                raise PeerError(peer.name, "a read did not end in time")
        except BaseException as error:  # of whatever kind the engine has; Ctrl-C leaves a piece that nobody compares
            self._lose(peer, _as_peer_error(peer.name, "a read failed", error))
            if not isinstance(error, Exception):
                raise

    def _finish(self, peer: Peer, read: PageRead, error: TransferError | None) -> None:
        read.finish(error)
        link = self._links[peer]
        link.reads.discard(read)
        self._written.difference_update(read.written)
        if error is not None:
            self._counts["failed_reads"] += 1
            return
        for page, end in read.blank:
            self._pages[page][end:] = 0
        link.failures = 0
        size, seconds = len(read.source) * self._pages.width, self._clock() - read.began
        self._counts.update(reads=1, bytes=size)
        self._seconds += seconds
        peer.reads, peer.bytes, peer.seconds = peer.reads + 1, peer.bytes + size, peer.seconds + seconds

    def _lose(self, peer: Peer, error: TransferError, *, seek: bool = True) -> None:
        """Cuts it off, then ends its reads: their pages are the manager's again. It is looked for."""
        if peer.error is None:
            peer.losses += 1
            self._counts["losses"] += 1
        peer.error, link = _without_frames(error), self._links[peer]
        try:
            if link.link is not None:
                self._engine.disconnect(link.link)
        finally:
            for read in list(link.reads):
                self._finish(peer, read, error)
            link.lost(self._clock())
            if seek and self._seeker is None and not self._closed:
                seeker = threading.Thread(target=self._seek, daemon=True, name="dsv4 lost peers")
                with contextlib.suppress(RuntimeError):  # the process has too many; calls look for it, too
                    seeker.start()
                    self._seeker = seeker

    def _seek(self) -> None:
        """Looks for lost peers until there is none."""
        pause = 0.0
        while not self._hurry.wait(pause):
            with self._lock:
                for peer, link in list(self._links.items()):
                    if peer.error is not None:
                        self._tend(peer, link)
                lost = [link for peer, link in self._links.items() if peer.error is not None]
                if self._closed or not lost:
                    self._seeker = None
                    return
                soon = min(0.0 if link.tried else link.again - self._clock() for link in lost)
                pause = min(max(soon, _SHORTEST_LOOK), _LONGEST_LOOK)


def _as_peer_error(peer: str, problem: str, error: BaseException) -> TransferError:
    if isinstance(error, TransferError):
        return error
    lost = PeerError(peer, f"{problem}: {type(error).__name__}: {error}")
    lost.__cause__ = error if isinstance(error, Exception) else None
    return lost


def _without_frames(error: TransferError) -> TransferError:
    """What is kept as long as a peer is lost: frames would keep sockets, pages and what callers have."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__, each = None, each.__cause__ or each.__context__
    return error
