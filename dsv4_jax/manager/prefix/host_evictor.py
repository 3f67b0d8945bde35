"""Pages of the host that are made free: blocks and states compete for them, by one order. Pure Python."""

from __future__ import annotations

from ...errors import OutOfBlocksError
from .eviction import Freed
from .evictor import Evictor
from .node import Node, T
from .queues import EvictionQueues
from .snapshots import Snapshots

__all__ = ["HostEvictor"]


class HostEvictor:
    """Makes blocks and states leave the host, in one order."""

    def __init__(self, queues: EvictionQueues, evictor: Evictor, snapshots: Snapshots):
        self._queues, self._evictor, self._snapshots = queues, evictor, snapshots

    def evict(self, pages: int) -> Freed:
        """Makes blocks and states leave the host until they free so many pages, or none can leave any more."""
        freed = Freed()
        while len(freed.pages) < pages:
            if self._state_is_next():
                left = self._evict_state(freed) or self._evict_blocks(1, freed)
            elif self._snapshots.count(T.HOST):
                left = self._evict_blocks(1, freed) or self._evict_state(freed)
            else:
                missing = pages - len(freed.pages)
                left = self._evict_blocks(missing, freed) or self._evict_blocks(1, freed)
            if not left:
                break
        return freed

    def evict_colder(self, node: Node) -> Freed | None:
        """Makes the next one leave if it would before a copy of this node's block; else None, nothing has changed."""
        if not self._state_is_next():
            return self._evictor.evict_colder(T.HOST, node)
        states = self._queues.snapshots[T.HOST]
        state, freed = states.first(), Freed()
        if state is None or not states.key(state) < self._queues.blocks[T.HOST].key(node):
            return None
        self._evict_state(freed)
        return freed

    def _state_is_next(self) -> bool:
        blocks, states = self._queues.blocks[T.HOST], self._queues.snapshots[T.HOST]
        block, state = blocks.first(), states.first()
        return state is not None and (block is None or states.key(state) < blocks.key(block))

    def _evict_state(self, freed: Freed) -> bool:
        try:
            freed.pages += self._snapshots.evict(T.HOST, 1).pages
        except OutOfBlocksError:
            return False
        return True

    def _evict_blocks(self, count: int, freed: Freed) -> bool:
        try:
            freed.add(self._evictor.evict(T.HOST, count))
        except OutOfBlocksError:
            return False
        return True
