"""What preempted requests keep on the host: their state, and the blocks that only they have. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import CacheLayout
from ..records import state_pages
from .hits import load
from .prefix.node import Node, T
from .publishing import Publisher
from .request import Parked, Request
from .tiered_cache import TieredCache
from .transfers import BLOCK, SLOT

__all__ = ["Parking"]


class Parking:
    """Parks the states of preempted requests, and gives them back when these are resumed."""

    def __init__(self, layout: CacheLayout, cache: TieredCache, publisher: Publisher):
        self._layout, self._cache, self._publisher = layout, cache, publisher

    def park(self, request: Request) -> Parked | None:
        """Queues the way to the host of what only this request has; None if there is no room, or nothing to park."""
        cache, first = self._cache, request.num_shared
        if request.restores is not None or request.slot in cache.copies.slots or not request.num_pending:
            return None
        if not request.has_whole_state:
            return None
        at_boundary = first * self._layout.block_tokens == request.num_cached and (request.forked is None or not first)
        if at_boundary and self._publisher.will_keep(request):
            return None  # its state becomes a snapshot, or there is one already
        own = request.blocks[first : self._layout.blocks_for(request.num_cached)]
        needed = state_pages(self._layout, request.num_cached)
        if len(own) + needed > cache.pages.num_total:
            return None
        blocks = cache.try_pages(range(first, first + len(own)))
        state = cache.try_state_pages(needed) if len(blocks) == len(own) else ()
        if not state:
            cache.pages.release(blocks)
            return None
        for block, page in zip(own, blocks, strict=True):
            cache.transfers.out(BLOCK, block, page)
        cache.transfers.out(SLOT, request.slot, state, request.num_cached)
        return Parked(request.num_cached, first, blocks, list(state))

    def check_room(self, request: Request) -> None:
        """Raises `OutOfBlocksError` if what was parked does not fit on the device, but the shared blocks before do."""
        path, parked = self._shared_path(request), request.parked
        if path is None or parked is None:
            return
        # Those that stay on the device are available no more.
        below = [node.depth for node in path if node.state.tier is not T.DEVICE]
        stay = [node.depth for node in path if node.state.tier is T.DEVICE and not node.refs]
        freed = self._publisher.preview()[0]
        if self._cache.shortage([*below, *stay], freed):
            return
        if error := self._cache.shortage([*below, *stay, *self._places(parked)], freed):
            raise error

    def unpark(self, request: Request) -> bool:
        """Whether what was parked and the shared blocks before it are all there: then they are the request's again.

        It has a slot then, too. Raises `NoFreeSlotError`.
        """
        cache, path, parked = self._cache, self._shared_path(request), request.parked
        if path is None or parked is None or not load(cache, path):
            return False
        nodes = cache.tree.acquire(path)
        if cache.shortage(self._places(parked)):
            cache.tree.release(nodes)
            return False
        request.slot = cache.acquire_slot()
        own = cache.acquire_blocks(self._places(parked))
        for page, block in zip(parked.blocks, own, strict=True):
            cache.transfers.into(BLOCK, page, block)
        cache.transfers.into(SLOT, parked.state, request.slot, parked.num_cached)
        request.nodes, request.blocks = nodes, [node.block for node in nodes] + own
        request.num_cached = request.num_hit = parked.num_cached
        self._publisher.mark(request)
        return True

    def drop(self, request: Request) -> None:
        """Gives back the pages of what was parked, if any."""
        if request.parked is not None:
            self._cache.pages.release(request.parked.blocks + request.parked.state)
            request.parked = None

    @staticmethod
    def _places(parked: Parked) -> range:
        return range(parked.first_block, parked.first_block + len(parked.blocks))

    def _shared_path(self, request: Request) -> Sequence[Node] | None:
        """The shared blocks before what was parked; None if they are not all there, or nothing was parked."""
        parked = request.parked
        if parked is None or parked.num_cached > len(request.history) or parked.num_cached >= len(request.ids):
            return None
        digests = request.hasher.digests[: parked.first_block] if request.hasher is not None else []
        path = self._cache.tree.match(digests, len(request.ids)).path
        return None if len(path) < parked.first_block or any(n.state.tier < T.HOST for n in path) else path
