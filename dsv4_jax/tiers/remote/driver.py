"""`RemoteDriver`: prompts handed from host to host, as the manager's leases and `RemoteTier` plan it, beside the steps.

    transport.publish_host(host)                      # the manager's host pool
    driver = RemoteDriver(manager, transport)

    driver.export(request)                            # the host that computes: after each step of the prompt, and
    for handoff in driver.take_handoffs(): ...        # what `poll` has made ready goes to the other host, by any means

    arrival = driver.receive(handoff, peer, tokens)   # the host that goes on: each hand-off that comes
    if arrival.is_over: manager.admit_remote(arrival)

    manager.flush()                                   # both, after each step: copies that were asked for since travel
    cache, host = run_transfers(cache, host, manager.take_transfers())
    driver.poll(cache, host)                          # while some have not, no export is made ready

Nothing here waits. Bytes go from one host's pool into the other's while both serve; pages are read, and written, when
no computation that was started before can touch them. By the arrays that `poll` is given this is known only while
nothing is under way on the device. An engine that starts a step before it has looked at the one before has no such
moment: it gives a fence as well, which tells of each poll by itself.

    cache, host = run_transfers(cache, host, manager.take_transfers())
    logits, cache = step(params, cache, plan, tokens)
    driver.poll(cache, host, fence=logits)

What does not arrive whole, or in time, is computed anew. A lease is of one other host: the one that `export` names, or
the first that says its name, which nobody can guess. What others say of it counts for nothing. Imports no jax.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...checks import INT64_MAX, check_seconds
from ...errors import HandoffError, LayoutError, RecordMismatchError, StoreFormatError, TransferError
from ...inbox import Inbox
from ...manager import Arrival, Handoff, KVCacheManager, MediaItem, Namespace, Request
from ...manager.prefix.hashing import given_items
from ...manager.remote_tier import RemoteRead, RemoteTier
from ...manager.request_tokens import prompt_tokens
from ...records import block_record
from ...untrusted import parse_json
from ..transfer_handle import TransferHandle
from .checks import RecordKind
from .peer import HANDOFF_COUNTS, Peer, TransportStats
from .transport import Notice, RecordTransport

if TYPE_CHECKING:
    from ...cache import KVCache
    from ..host_cache import HostCache

__all__ = ["Fence", "RemoteDriver"]

_MAX_WORD = 1024  # bytes of what one driver says to another
MAX_KEPT, MAX_KEPT_OF_ONE = 16 << 20, 1 << 20  # bytes of notices for others, of all senders and of one
_REMEMBERED = 1024  # leases of arrivals that were closed, of which hand-offs may still come
_REASONS = {  # why an arrival was given up: `Arrival.reason` in words
    "peer": "host gone",
    "torn": "torn or stale record",
    "time": "lease over",
    "room": "no room",
    "evicted": "prefix evicted",
    "reset": "reset",
    "moved": "pool moved",
    "left": "closed",
}


class Fence(Protocol):
    """What tells whether a computation has run: a `jax.Array` that it makes."""

    def is_ready(self) -> bool: ...
    def is_deleted(self) -> bool: ...


@dataclasses.dataclass(eq=False, slots=True)
class _Reading:
    """Records of one kind on their way; no handle: to be started when the device is through."""

    arrival: Arrival
    peer: Peer
    kind: RecordKind
    reads: list[RemoteRead]
    fence: Fence | None
    handle: TransferHandle | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Coming:
    """Whom an arrival comes from, and when it was last heard of, or asked for."""

    peer: Peer
    heard: float


@dataclasses.dataclass(eq=False, slots=True)
class _Export:
    """A hand-off that is vouched for when the device is through with its copies."""

    handoff: Handoff
    asked: int  # copies that the cache had asked for then
    fence: Fence | None = None


class RemoteDriver:
    """Exports prompts of a manager to other hosts, and receives theirs, over a transport.

    Args:
        manager: with a policy and a host tier.
        transport: on which its host pool is published. `poll` sees whether it is that one.
        ask_after: seconds. A prompt of which nothing more was heard for so long is asked for again: hand-offs may have
            been lost. The driver of the host that computes it announces again what it has announced.

    Attributes:
        manager: as given.
        tier: its receiving side.
        counts: "exported" (calls), "announced" (hand-offs that were ready to be sent), "acknowledged" (leases that
            the other host has ended), "asked_again" (hand-offs that it missed), "foreign" (words about leases of
            others), "dropped" (notices for others that nobody took); "begun" and "done" (arrivals, whole).
        given_up: arrivals that were not done, by the reason: "host gone", "torn or stale record", "lease over",
            "no room", "prefix evicted", "reset", "pool moved", "closed" (nobody waited any more).

    Raises:
        RequestError: the manager has no `weights_id`.
        LayoutError: blocks of this layout hold nothing; what is published has other records, fewer pages than the
            manager's `HostSize`, or other pool ranks.
        TransferError: nothing is published.
    """

    def __init__(self, manager: KVCacheManager, transport: RecordTransport, *, ask_after: float = 1.0):
        if not block_record(manager.layout).bytes:
            raise LayoutError("blocks of this layout have no records: all layers see the window only")
        _check_published(manager, transport)
        manager.need_weights_id()
        self.tier = RemoteTier(manager, clock=manager.clock)
        self.manager, self._transport = manager, transport
        self._ask_after = check_seconds("ask_after", ask_after, error=StoreFormatError)
        self._exported: list[_Export] = []
        self._sums: dict[str, dict[int, bytes]] = {}  # of a lease: by page, as they were sent
        self._ready: list[Handoff] = []
        self._arrivals: dict[Arrival, _Coming] = {}
        self._readings: list[_Reading] = []
        self._messages = Inbox(MAX_KEPT, MAX_KEPT_OF_ONE)
        self._ended: dict[str, None] = {}  # leases of arrivals that were closed, the oldest first
        self._owed: dict[str, tuple[Peer, float]] = {}  # acknowledgements, of leases that last until then
        self._takers: dict[str, str] = {}  # of a lease: the host that it is of
        self.counts: collections.Counter[str] = collections.Counter(
            dict.fromkeys((*HANDOFF_COUNTS, "begun", "done"), 0)
        )
        self.given_up: collections.Counter[str] = collections.Counter()

    @property
    def busy(self) -> bool:
        """Whether something is under way that `poll` goes on with."""
        return bool(self._exported or self._readings or self._arrivals or self._owed)

    def stats(self) -> TransportStats:
        """What the transport tells of peers and reads (`RecordTransport.stats`), with `counts`; from any thread."""
        return dataclasses.replace(self._transport.stats(), handoffs=self.counts.copy())

    # The host that has computed

    def export(self, request: Request, *, seconds: float = 60.0, peer: str | None = None) -> Handoff:
        """Exports as `KVCacheManager.export_request` does; `take_handoffs` has it once its bytes are on the host.

        Args:
            peer: name of the transport of the host that it is for; no other one's word about its lease counts. None:
                the first that says one.

        Returns:
            It, without checksums: what it will tell.
        """
        handoff = self.manager.export_request(request, seconds=seconds, peer=peer)
        self.counts["exported"] += 1
        self._exported.append(_Export(handoff, self.manager.cache.transfers.asked))
        return handoff

    def export_again(self, lease: str, first: int = 0, *, peer: str | None = None) -> Handoff | None:
        """Exports as `KVCacheManager.export_again` does; `take_handoffs` has it, too.

        A driver asks by itself for what it misses: this is for a host that knows nothing of the lease.
        """
        handoff = self.manager.export_again(lease, first, peer=peer)
        if handoff is not None:
            self._exported.append(_Export(handoff, self.manager.cache.transfers.asked))
        return handoff

    def take_handoffs(self) -> list[Handoff]:
        """Returns the hand-offs to be sent now (`to_json`), in the order exported. None of a lease that has ended."""
        ready, self._ready = self._ready, []
        return [handoff for handoff in ready if self.manager.leases.is_sound(handoff.lease)]

    # The host that goes on

    def receive(
        self,
        handoff: bytes,
        peer: Peer,
        tokens: Iterable[int],
        *,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
    ) -> Arrival:
        """A hand-off that has come: of a new arrival, or the next part of one of this prompt that has not ended.

        Args:
            peer: of `RecordTransport.connect`, the host that sent it.
            tokens, namespace, items: of the request, from whoever sent it.

        Raises:
            ContextLimitError, HandoffError, PlanError, RequestError: as `RemoteTier.expect` and `extend`;
                nothing has changed.
            HandoffError: an arrival of its lease was closed: nobody waits for it.
            PeerError: the peer is lost: nothing can be read of it before it is found. Nothing has changed.
        """
        self._transport.check_peer(peer)
        lease = Handoff.from_json(handoff).lease
        if lease in self._ended or any(each.closed and each.lease == lease for each in self._arrivals):
            self._say(peer, {"acknowledge": lease})  # once more
            raise HandoffError("lease", "nobody waits for it any more")
        known, _ = prompt_tokens(tokens, self.manager.layout.cfg.vocab_size)
        prompt, now = (known, namespace, given_items(items)), self.manager.clock()
        for arrival, coming in self._arrivals.items():
            same = arrival.lease == lease and coming.peer is peer and not arrival.closed and not arrival.is_over
            if same and (arrival.tokens, arrival.namespace, arrival.items) == prompt:
                self.tier.extend(arrival, handoff)
                coming.heard = now
                return arrival
        arrival = self.tier.expect(handoff, known, namespace=namespace, items=prompt[2])
        self._arrivals[arrival] = _Coming(peer, now)
        self.counts["begun"] += 1
        return arrival

    def refuse(self, handoff: bytes, peer: Peer) -> None:
        """A hand-off that has come and nobody waits for: its host is told, and need not keep it. `HandoffError`: it is
        none."""
        self._say(peer, {"acknowledge": Handoff.from_json(handoff).lease})

    def close(self, arrival: Arrival) -> None:
        """Nobody waits for it any more; `poll` tells its host. Raises as `RemoteTier.close`."""
        self.tier.close(arrival)

    # Both

    def poll(self, cache: KVCache, host: HostCache, *, fence: Fence | None = None) -> None:
        """Takes up everything that has ended. Call it after `run_transfers`, and after steps, with what they returned.

        Args:
            fence: an array of the computation that was started last, which will not be donated (one that was counts for
                nothing). What is found to do in this call is done in a later one, once the fence is ready, whatever was
                started since. None: once the next fence is, or all arrays of `cache` and `host` are, at some call.

        Raises:
            TransferError: the host pool is not where it was published: it was copied instead of donated, or something
                else was published. Reads under way are given up, as they did not go to this pool.
            TransferError: the transport was closed. What was under way has failed, and its pages are free.
        """
        self.manager.commit()  # which ends leases, too
        self.tier.expire()
        try:
            self._transport.check_host(host)
        except TransferError as error:
            self._give_up_reads(str(error))
            self._end_arrivals()
            raise
        self._end_reads()
        self._plan(fence)
        waiting = [reading for reading in self._readings if reading.handle is None]
        if waiting or self._exported:
            through = _is_through(cache, host)
            self._start([reading for reading in waiting if through or _has_passed(reading.fence)])
            for reading in waiting:
                reading.fence = _later(reading.fence, fence)
            self._vouch(through, fence)
        self._ask()
        self._end_arrivals()
        self._take_notices()
        for known in (self._sums, self._takers):
            for ended in known.keys() - self.manager.leases.active.keys():
                del known[ended]

    def take_messages(self) -> list[Notice]:
        """Notices of other hosts that were not for the driver, some hundred at most. Of those that nobody takes the
        first megabyte of each sender is kept."""
        return [Notice(*each) for each in self._messages.take()]

    # Inside

    def _take_notices(self) -> None:
        for notice in self._transport.notices():
            match _parse(notice.message):
                case {"acknowledge": str(lease), **rest} if not rest:
                    if self._is_of(lease, notice.sender):
                        self.counts["acknowledged"] += self.manager.acknowledge(lease, peer=notice.sender)
                case {"again": str(lease), "first": first, **rest} if not rest and type(first) is int and first >= 0:
                    told = (*(export.handoff for export in self._exported), *self._ready)
                    if self._is_of(lease, notice.sender) and all(each.lease != lease for each in told):
                        self.counts["asked_again"] += (
                            self.export_again(lease, min(first, INT64_MAX), peer=notice.sender) is not None
                        )
                case _:
                    self.counts["dropped"] += not self._messages.put(*notice)

    def _is_of(self, lease: str, sender: str) -> bool:
        """Whether it is this host whose word about a lease counts."""
        if lease not in self.manager.leases.active:
            return False
        mine = (self.manager.leases.active[lease].peer or self._takers.setdefault(lease, sender)) == sender
        self.counts["foreign"] += not mine
        return mine

    def _ask(self) -> None:
        """Asks for hand-offs that were lost, as it seems."""
        now = self.manager.clock()
        for arrival, coming in self._arrivals.items():
            missing = not (arrival.last or arrival.closed or arrival.failure is not None)
            if missing and (arrival.asks or now - coming.heard >= self._ask_after):
                arrival.asks, coming.heard = False, now
                self._say(coming.peer, {"again": arrival.lease, "first": arrival.announced})

    def _say(self, peer: Peer, word: dict[str, Any]) -> bool:
        with contextlib.suppress(TransferError):  # then it is lost
            self._transport.notify(peer, json.dumps(word).encode())
            return True
        return False

    def _vouch(self, through: bool, fence: Fence | None) -> None:
        """Checksums of what was exported, if all its copies are on the host."""
        for export in self._exported:
            if self.manager.cache.transfers.have_run(export.asked):
                export.fence = _later(export.fence, fence)
        while self._exported:
            handoff, export = self._exported[0].handoff, self._exported[0]
            if self.manager.leases.is_sound(handoff.lease):
                queued = self.manager.cache.transfers.have_run(export.asked)
                if not (through and queued) and not _has_passed(export.fence):
                    break
                blocks = self._sums_of(handoff.lease, "block", handoff.blocks)
                state = self._sums_of(handoff.lease, "snapshot", handoff.state)
                self._ready.append(handoff.vouched(blocks, state))
                self.counts["announced"] += 1
            del self._exported[0]  # of a call that was broken off it is announced once more

    def _sums_of(self, lease: str, kind: RecordKind, pages: Sequence[int]) -> list[bytes]:
        """The checksums, as they were sent before if they were: who reads a page sees whether it has changed since."""
        sent = self._sums.setdefault(lease, {})
        new = [page for page in pages if page not in sent]
        sent.update(zip(new, self._transport.checksums(kind, new), strict=True))
        return [sent[page] for page in pages]

    def _plan(self, fence: Fence | None) -> None:
        for arrival, coming in self._arrivals.items():
            if (error := coming.peer.error) is not None:
                self.tier.fail(arrival, str(error))
            self.tier.plan_reads(arrival)
            mine = [reading for reading in self._readings if reading.arrival is arrival]
            if sum(len(reading.reads) for reading in mine) == len(arrival.reads):
                continue
            known = {read for reading in mine for read in reading.reads}
            reads = [read for read in arrival.reads if read not in known]  # of a call that was broken off, too
            for kind, scope in (("block", "block"), ("snapshot", "slot")):
                if some := [read for read in reads if read.scope == scope]:
                    self._readings.append(_Reading(arrival, coming.peer, kind, some, fence))

    def _start(self, starts: Iterable[_Reading]) -> None:
        for reading in starts:
            source = [page for read in reading.reads for page in read.source]
            pages = [page for read in reading.reads for page in read.pages]
            sums = [each for read in reading.reads for each in read.sums]
            try:
                if reading.arrival.reads.keys() >= set(reading.reads):  # else a call that ended them was broken off
                    reading.handle = self._transport.read(reading.peer, reading.kind, source, pages, sums)
                    continue
            except TransferError as error:  # the peer is gone, or its ids are none
                self.tier.fail(reading.arrival, str(error))
            except BaseException:  # broken off: it may have begun, and nobody has its handle
                self._transport.disconnect(reading.peer)
                raise
            self.tier.finish_reads(reading.arrival, reading.reads, [False] * len(reading.reads))
            self._readings.remove(reading)

    def _end_reads(self) -> None:
        for reading in list(self._readings):
            if reading.handle is None or not reading.handle.is_ready():
                continue
            error = reading.handle.error
            bad: Sequence[int] | None = [] if error is None else None
            if isinstance(error, RecordMismatchError):
                bad = error.destinations
            done = [bad is not None and not set(bad) & set(read.pages) for read in reading.reads]
            if error is not None:
                self.tier.fail(reading.arrival, str(error), "peer" if bad is None else "torn")
            self.tier.finish_reads(reading.arrival, reading.reads, done)
            self._readings.remove(reading)  # of a call that was broken off it is ended once more

    def _give_up_reads(self, why: str) -> None:
        """What has come, or comes, is not in the manager's pages."""
        for reading in list(self._readings):
            self._transport.disconnect(reading.peer)  # after which nothing is written
            self.tier.fail(reading.arrival, why, "moved")
            self.tier.finish_reads(reading.arrival, reading.reads, [False] * len(reading.reads))
            self._readings.remove(reading)

    def _end_arrivals(self) -> None:
        """Acknowledges what is over: nothing more is read of it."""
        for arrival, coming in list(self._arrivals.items()):
            if arrival.is_over:
                del self._arrivals[arrival]
                if arrival.closed:
                    self._ended[arrival.lease] = None
                    if len(self._ended) > _REMEMBERED:
                        del self._ended[next(iter(self._ended))]
                if arrival.failure is None and arrival.last and arrival.joined == arrival.total:
                    self.counts["done"] += 1
                else:
                    self.given_up[_REASONS[arrival.reason]] += 1
                self._owed[arrival.lease] = coming.peer, arrival.until
        for lease, (peer, until) in list(self._owed.items()):
            said = peer.error is None and self._say(peer, {"acknowledge": lease})
            if said or self.manager.clock() >= until or not self._transport.seeks(peer):  # it ends by itself
                del self._owed[lease]


def _check_published(manager: KVCacheManager, transport: RecordTransport) -> None:
    if transport.layout is None:
        raise TransferError("publish_host() comes first: the driver reads into the manager's host pool")
    prints = [(layout.block_fingerprint, layout.snapshot_fingerprint) for layout in (transport.layout, manager.layout)]
    if prints[0] != prints[1]:
        raise LayoutError("what is published has other records than the manager's layout")
    if (have := transport.num_ranks) != (want := manager.size.pool_ranks):
        raise LayoutError(f"published pages are split into {have}, the manager's are of {want} pool ranks")
    if (have := transport.num_pages) < (want := manager.cache.pages.num_total):
        raise LayoutError(f"the manager has {want} pages, {have} are published")


def _parse(message: bytes) -> Any:
    """What may be a word of another driver; None if it is not."""
    if len(message) > _MAX_WORD:
        return None
    try:
        return parse_json(message, unique_keys=True)
    except ValueError:
        return None


def _later(fence: Fence | None, now: Fence | None) -> Fence | None:
    """The fence, or if it will never pass the one given now: it is of all that was started before, too."""
    return now if now is not None and (fence is None or fence.is_deleted()) else fence


def _has_passed(fence: Fence | None) -> bool:
    return fence is not None and not fence.is_deleted() and fence.is_ready()


def _is_through(cache: KVCache, host: HostCache) -> bool:
    """Whether everything has run that could still read or write host pages."""
    arrays: tuple[Any, ...] = (host.pages, *cache.arrays.values())
    return all(array.is_ready() for array in arrays)
