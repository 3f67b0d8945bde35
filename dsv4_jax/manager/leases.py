"""What other hosts may read of a manager's cache: exported prompts, held on the host until a lease ends. Pure Python.

A lease is of one request: of its full blocks and of the state after the last one, as far as the prompt reaches that
others would look up. It ends when it is acknowledged, when its time is over, when a step that it relies on turns out
not to have run, and with `reset`. Afterwards its pages are anybody's; a reader that comes late sees it by their bytes.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

from ..errors import HandoffError
from ..layout import CacheLayout
from .handoff import MAX_BLOCKS, Handoff
from .prefix.holds import Hold
from .prefix.node import Node, T
from .publishing import Publisher
from .request import Request
from .tiered_cache import TieredCache
from .transfers import BLOCK

__all__ = ["Lease", "Leases"]


@dataclasses.dataclass(eq=False, slots=True)
class Lease:
    """One request that was exported: what another host may read of it, and until when.

    Attributes:
        id: unlike all others', of this manager or another.
        request: whose; it may have ended since.
        until: when it ends, by the manager's clock.
        hold: what of the host is held.
        total: blocks that it will be of.
        nodes: of the blocks so far, in path order.
        root: of the digests.
        announced: blocks that hand-offs have announced.
        state: the node with the state, once it is held.
        missed: whether the state was passed, and never will be.
    """

    id: str
    request: Request
    until: float
    hold: Hold
    total: int
    root: bytes
    nodes: list[Node] = dataclasses.field(default_factory=list)
    announced: int = 0
    state: Node | None = None
    missed: bool = False


class Leases:
    """The leases of a manager: makes them, adds what came since, and ends them.

    Attributes:
        active: leases by id.
    """

    def __init__(self, layout: CacheLayout, cache: TieredCache, publisher: Publisher, clock: Callable[[], float]):
        self._layout, self._cache, self._publisher, self._clock = layout, cache, publisher, clock
        self._name = secrets.token_hex(8)  # ids of another process, or of before a reset, are nobody's
        self._count = 0
        self.active: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self.active)

    def export(self, request: Request, seconds: float) -> Handoff:
        """Does what `KVCacheManager.export_request` says."""
        if request.hasher is None or not self._cache.pages.num_total:
            raise HandoffError(None, f"request {request.id!r} is not cached, or there is no host tier to read it from")
        request.settle_changes()
        self.expire()
        self._publisher.commit()
        lease = next((lease for lease in self.active.values() if lease.request is request), None)
        if lease is None or not self.is_sound(lease.id) or not self._is_of(lease, request):
            lease = self._open(request, lease)
        lease.until = self._clock() + seconds
        self._hold_blocks(lease)
        self._hold_state(lease)
        lease.missed = lease.state is None and (not lease.total or request.num_cached > self._tokens(lease.total))
        return self._announce(lease, lease.announced, seconds)

    def export_again(self, lease: str, first: int) -> Handoff | None:
        """Does what `KVCacheManager.export_again` says."""
        self.expire()
        if not isinstance(lease, str) or not self.is_sound(lease):
            return None
        found = self.active[lease]
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

    def acknowledge(self, lease: str) -> bool:
        """Ends a lease. Whether there was one of this name."""
        self.expire()
        if found := isinstance(lease, str) and lease in self.active:
            self._end(self.active[lease])
        return found

    def expire(self) -> None:
        """Ends the leases whose time is over."""
        if self.active:
            now = self._clock()
            for lease in [lease for lease in self.active.values() if lease.until <= now]:
                self._end(lease)

    def cancel(self, request: Request) -> None:
        """The request's last step did not run: nobody may read what it left."""
        for lease in [lease for lease in self.active.values() if lease.request is request]:
            self._end(lease)

    def is_sound(self, lease: str) -> bool:
        """Whether there is such a lease, and all that it is of is still there: its hand-offs may go out."""
        return lease in self.active and self._cache.tree.holds.is_whole(self.active[lease].hold)

    def _open(self, request: Request, broken: Lease | None) -> Lease:
        if broken is not None:
            self._end(broken)
        self._count += 1
        total = max(len(request.tokens) - 1, 0) // self._layout.block_tokens
        assert request.hasher is not None  # see `export`
        hold, root = self._cache.tree.holds.open(), request.hasher.root
        lease = Lease(f"{self._name}-{self._count}", request, 0.0, hold, total, root)
        self.active[lease.id] = lease
        return lease

    def _is_of(self, lease: Lease, request: Request) -> bool:
        """Whether what was announced is of the text that the request goes on with, which may have been rewritten."""
        assert request.hasher is not None  # see `export`
        announced, block = len(lease.nodes), self._layout.block_tokens
        if lease.total > max(len(request.tokens) - 1, 0) // block or len(request.history) < announced * block:
            return False
        if announced > len(request.nodes):  # it is behind what it announced
            request.hasher.follow(request.history[: announced * block])
        return not announced or request.hasher.digests[announced - 1] == lease.nodes[-1].digest

    def _end(self, lease: Lease) -> None:
        del self.active[lease.id]
        self._cache.tree.holds.end(lease.hold)

    def _tokens(self, blocks: int) -> int:
        return blocks * self._layout.block_tokens

    def _hold_blocks(self, lease: Lease) -> None:
        """Holds what the request has published since, from the first block on, as far as there are pages."""
        cache, tree, request = self._cache, self._cache.tree, lease.request
        start = len(lease.nodes)
        nodes = request.nodes[start : min(request.num_shared, lease.total)]
        for node in nodes:  # first, so that making room takes none of these
            if node.host:
                tree.holds.keep(lease.hold, node)
        room = cache.try_pages([node.depth for node in nodes if not node.host])
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
            lease.nodes.append(node)

    def _hold_state(self, lease: Lease) -> None:
        """Holds the state after the last block, if all blocks are held and there is one, and room."""
        if lease.state is not None or not lease.total or len(lease.nodes) < lease.total:
            return
        cache, node, request = self._cache, lease.nodes[-1], lease.request
        snapshot, tokens = node.snapshot, self._tokens(lease.total)
        if snapshot is None or not snapshot.host:
            slot = snapshot.device if snapshot is not None else self._publisher.state_slot(request, tokens)
            if snapshot is not None:
                cache.tree.snapshots.pin(node)  # so that making room does not take it
            pages = cache.try_snapshot_pages() if slot else ()
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
        lease.state = node
