"""What other hosts may read of a manager's cache: exported prompts, held on the host until a lease ends. Pure Python.

A lease is of one request: of its full blocks and of the state after the last one, as far as the prompt reaches that
others would look up. It ends when it is acknowledged, when its time is over, when a younger one needs its room, when a
step that it relies on turns out not to have run, and with `reset`. Afterwards its pages are anybody's; a reader that
comes late sees it by their bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence

from ..checks import shown
from ..errors import HandoffError
from ..layout import CacheLayout
from .handoff import MAX_BLOCKS, Handoff
from .metrics import HandoffCounts, HandoffStats
from .prefix.holds import Hold
from .prefix.node import Node, Snapshot, T
from .publishing import Publisher
from .request import Request, RequestState
from .tiered_cache import TieredCache
from .transfers import BLOCK

__all__ = ["Lease", "Leases"]


@dataclasses.dataclass(eq=False, slots=True)
class Lease:
    """One request that was exported: what another host may read of it, and until when.

    Attributes:
        id: unlike all others', of this manager or another; nobody guesses it.
        request: whose; it may have ended since.
        peer: who alone may acknowledge it; None: whoever knows it.
        until: when it ends, by the manager's clock.
        touched: when something was last told of it.
        hold: what of the host is held.
        total: blocks that it will be of.
        nodes: of the blocks so far, in path order.
        root: of the digests.
        announced: blocks that hand-offs have announced.
        state: the node with the state, once it is held.
        state_held: that state.
        missed: whether the state was passed, and never will be.
    """

    id: str
    request: Request
    peer: str | None
    until: float
    touched: float
    hold: Hold
    total: int
    root: bytes
    nodes: list[Node] = dataclasses.field(default_factory=list)
    announced: int = 0
    state: Node | None = None
    state_held: Snapshot | None = None
    missed: bool = False

    @property
    def is_told(self) -> bool:
        """Whether all is told that will ever be."""
        whole = self.announced == self.total and (self.state is not None or self.missed)
        return whole or self.request.state is RequestState.RELEASED


class _Pages:
    """How many pages some leases hold, each counted once."""

    def __init__(self) -> None:
        self._units: collections.Counter[Node | Snapshot] = collections.Counter()
        self.count = 0

    def __contains__(self, unit: Node | Snapshot) -> bool:
        return unit in self._units

    def add(self, unit: Node | Snapshot, pages: int) -> None:
        self.count += 0 if unit in self._units else pages
        self._units[unit] += 1

    def remove(self, unit: Node | Snapshot, pages: int) -> None:
        self._units[unit] -= 1
        if not self._units[unit]:
            del self._units[unit]
            self.count -= pages


class Leases:
    """The leases of a manager: makes them, adds what came since, and ends them.

    Attributes:
        active: leases by id, those first of which nothing new was told for longest.
    """

    def __init__(
        self,
        layout: CacheLayout,
        cache: TieredCache,
        publisher: Publisher,
        clock: Callable[[], float],
        counts: HandoffCounts | None = None,
    ):
        self._layout, self._cache, self._publisher, self._clock = layout, cache, publisher, clock
        self._counts = HandoffCounts() if counts is None else counts
        self.active: dict[str, Lease] = {}
        self._held, self._held_by = _Pages(), dict[str, _Pages]()  # of all, of each peer that has any

    def __len__(self) -> int:
        return len(self.active)

    def stats(self) -> HandoffStats:
        """The numbers now."""
        peers = {name: pages.count for name, pages in list(self._held_by.items())}
        begun, ended = self._counts.begun.copy(), self._counts.ended.copy()
        return HandoffStats(len(self.active), self._held.count, peers, begun, ended)

    def forget(self) -> None:
        """All of them have ended, with the cache that they are of."""
        for _ in self.active:
            self._counts.end("sent", "reset")
        self.active.clear()

    def export(self, request: Request, seconds: float, peer: str | None = None) -> Handoff:
        """Does what `KVCacheManager.export_request` says."""
        if request.hasher is None or not self._cache.pages.num_total:
            raise HandoffError(None, f"request {request.id!r} is not cached, or there is no host tier to read it from")
        request.settle_changes()
        self.expire()
        self._publisher.commit()
        lease = next((lease for lease in self.active.values() if lease.request is request), None)
        if lease is not None and peer is not None and lease.peer != peer:
            raise HandoffError("peer", f"the lease of request {request.id!r} is that of {shown(lease.peer)}")
        if lease is None or not self.is_sound(lease.id) or not self._is_of(lease, request):
            lease = self._open(request, lease, peer if lease is None else lease.peer)
        lease.touched = self._clock()
        lease.until = lease.touched + seconds
        self.active[lease.id] = self.active.pop(lease.id)  # the last in order
        self._hold_blocks(lease)
        self._hold_state(lease)
        lease.missed = lease.state is None and (not lease.total or request.num_cached > self._tokens(lease.total))
        return self._announce(lease, lease.announced, seconds)

    def export_again(self, lease: str, first: int, peer: str | None = None) -> Handoff | None:
        """Does what `KVCacheManager.export_again` says."""
        self.expire()
        found = self._find(lease, peer)
        if found is None or not self.is_sound(lease):
            return None
        ended = found.announced == found.total and (found.state is not None or found.missed)
        if first > found.announced or (first == found.announced and not ended):
            return None
        return self._announce(found, first, found.until - self._clock())

    def _announce(self, lease: Lease, first: int, seconds: float) -> Handoff:
        nodes = lease.nodes[first : first + MAX_BLOCKS]
        end = first + len(nodes)
        lease.announced = max(lease.announced, end)
        snapshot = lease.state.snapshot if lease.state is not None and end == lease.total else None
        return Handoff(
            lease.id,
            seconds,
            lease.root.hex(),
            self._layout.block_fingerprint,
            self._layout.snapshot_fingerprint,
            lease.total,
            first,
            (lease.nodes[end - 1].digest if end else lease.root).hex(),
            tuple(node.host for node in nodes),
            snapshot.host if snapshot is not None else (),
            end == lease.total and (snapshot is not None or lease.missed),
        )

    def acknowledge(self, lease: str, peer: str | None = None) -> bool:
        """Ends a lease. Whether there was one of this name, and of this peer."""
        self.expire()
        found = self._find(lease, peer)
        if found is not None:
            self._end(found, "withdrawn" if peer is None else "done")
        return found is not None

    def _find(self, lease: object, peer: str | None) -> Lease | None:
        """The lease of this name, as far as it concerns a peer; None: as far as it concerns this host."""
        found = self.active.get(lease) if isinstance(lease, str) else None
        return None if found is None or (None not in (peer, found.peer) and peer != found.peer) else found

    def expire(self) -> None:
        """Ends the leases whose time is over."""
        if self.active:
            now = self._clock()
            for lease in [lease for lease in self.active.values() if lease.until <= now]:
                self._end(lease, "time")

    def cancel(self, request: Request) -> None:
        """The request's last step did not run: nobody may read what it left."""
        for lease in [lease for lease in self.active.values() if lease.request is request]:
            self._end(lease, "step")

    def is_sound(self, lease: str) -> bool:
        """Whether there is such a lease, and all that it is of is still there: its hand-offs may go out."""
        return lease in self.active and self._cache.tree.holds.is_whole(self.active[lease].hold)

    def _open(self, request: Request, broken: Lease | None, peer: str | None) -> Lease:
        if broken is not None:
            self._end(broken, "changed")
        self._counts.begin("sent")
        total = max(len(request.ids) - 1, 0) // self._layout.block_tokens
        assert request.hasher is not None  # see `export`
        hold, root = self._cache.tree.holds.open(), request.hasher.root
        lease = Lease(secrets.token_hex(16), request, peer, 0.0, 0.0, hold, total, root)
        self.active[lease.id] = lease
        return lease

    def _is_of(self, lease: Lease, request: Request) -> bool:
        """Whether what was announced is of the text that the request goes on with, which may have been rewritten."""
        assert request.hasher is not None  # see `export`
        announced, block = len(lease.nodes), self._layout.block_tokens
        if lease.total > max(len(request.ids) - 1, 0) // block or len(request.history) < announced * block:
            return False
        if announced > len(request.nodes):  # it is behind what it announced
            request.hasher.follow(request.history[: announced * block])
        return not announced or request.hasher.digests[announced - 1] == lease.nodes[-1].digest

    def _end(self, lease: Lease, reason: str) -> None:
        del self.active[lease.id]
        self._counts.end("sent", reason)
        self._cache.tree.holds.end(lease.hold)
        for pages in self._shares(lease):
            for node in lease.nodes:
                pages.remove(node, 1)
            if lease.state_held is not None:
                pages.remove(lease.state_held, self._cache.snapshot_pages)
        if lease.peer is not None and not self._held_by[lease.peer].count:
            del self._held_by[lease.peer]

    def _shares(self, lease: Lease) -> Iterator[_Pages]:
        """In what its pages are counted: in all, and in those of its peer."""
        yield self._held
        if lease.peer is not None:
            yield self._held_by.setdefault(lease.peer, _Pages())

    def _room(self, lease: Lease, units: Sequence[Node | Snapshot | None], pages: int) -> int:
        """How many of these, of so many pages each, the lease may hold: older leases are ended for them, if need be.

        None stands for a state that nobody holds yet.
        """
        policy, total = self._cache.policy, self._cache.pages.num_total
        assert policy is not None  # else nothing is exported
        may = len(units)
        for held, share, peer in zip(
            self._shares(lease), (policy.leases.all, policy.leases.peer), (None, lease.peer), strict=False
        ):
            limit = int(share * total)
            while True:
                more = [pages if unit is None or unit not in held else 0 for unit in units]
                if held.count + sum(more) <= limit or not self._end_oldest(lease, peer):
                    break
            while may and held.count + sum(more[:may]) > limit:
                may -= 1
        return may

    def _end_oldest(self, but: Lease, peer: str | None = None) -> bool:
        """Ends the lease, of this peer or of any, of which nothing was told for longest. Whether there was one."""
        assert self._cache.policy is not None
        late = self._clock() - self._cache.policy.leases.grace
        for lease in self.active.values():
            if lease.touched > late:
                break
            if lease is not but and lease.is_told and (peer is None or lease.peer == peer):
                self._end(lease, "room")
                return True
        return False

    def _tokens(self, blocks: int) -> int:
        return blocks * self._layout.block_tokens

    def _hold_blocks(self, lease: Lease) -> None:
        """Holds what the request has published since, from the first block on, as far as there are pages."""
        cache, tree, request = self._cache, self._cache.tree, lease.request
        start = len(lease.nodes)
        nodes = request.nodes[start : min(request.num_shared, lease.total)]
        if not nodes:
            return
        nodes = nodes[: self._room(lease, nodes, 1)]
        for node in nodes:  # first, so that making room takes none of these
            if node.host:
                tree.holds.keep(lease.hold, node)
        places = [node.depth for node in nodes if not node.host]
        room = cache.try_pages(places)
        while len(room) < len(places) and self._end_oldest(lease):
            room += cache.try_pages(places[len(room) :])
        pages = iter(room)
        for i, node in enumerate(nodes):
            if not node.host:
                if not (page := next(pages, 0)):
                    for later in nodes[i:]:
                        if later in lease.hold.blocks:
                            tree.holds.drop(lease.hold, later)
                    break
                tree.moves.begin_backup(node, page)
                cache.transfers.out(BLOCK, node.block, page)
                tree.moves.complete(node)
                tree.holds.keep(lease.hold, node)
            for held in self._shares(lease):
                held.add(node, 1)
            lease.nodes.append(node)

    def _hold_state(self, lease: Lease) -> None:
        """Holds the state after the last block, if all blocks are held and there is one, and room."""
        if lease.state is not None or not lease.total or len(lease.nodes) < lease.total:
            return
        cache, node, request = self._cache, lease.nodes[-1], lease.request
        snapshot, tokens = node.snapshot, self._tokens(lease.total)
        if not self._room(lease, [snapshot], cache.snapshot_pages):
            return
        if snapshot is None or not snapshot.host:
            slot = snapshot.device if snapshot is not None else self._publisher.state_slot(request, tokens)
            if snapshot is not None:
                cache.tree.snapshots.pin(node)  # so that making room does not take it
            pages = cache.try_snapshot_pages() if slot else ()
            while slot and not pages and self._end_oldest(lease):
                pages = cache.try_snapshot_pages()
            if snapshot is not None:
                cache.tree.snapshots.unpin(node)
            if not pages:
                return
            cache.copy_out_state(slot, pages, tokens)
            if snapshot is not None:
                cache.tree.snapshots.attach(node, T.HOST, pages)
            else:
                self._publisher.attach(request, node, T.HOST, pages)
        cache.tree.holds.keep_state(lease.hold, node)
        lease.state, lease.state_held = node, node.snapshot
        for held in self._shares(lease):
            held.add(node.snapshot, cache.snapshot_pages)  # type: ignore[arg-type]
