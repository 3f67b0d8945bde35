"""Which node of a cache leaves next: one heap for the prefix tree and for the radix cache. Pure Python."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["EvictionQueue", "Queued"]


class Queued(Protocol):
    """What a queue needs of a node: a number of its own, and bits that say which queues list it."""

    number: int
    queued: int


N = TypeVar("N", bound=Queued)


class EvictionQueue(Generic[N]):
    """Nodes by key, smallest first: a heap of entries that are corrected when they come up.

    Keys may grow and eligibility may come and go without telling the queue: a touch costs
    nothing here. Popping is O(log n), plus O(log n) for every entry that was touched since.
    A key that has shrunk is to be told (`demote`): a second entry names the node then, until either comes up.

    Args:
        bit: of `node.queued`, this queue's own: one for each list of these nodes (a member of their `IntFlag`).
        eligible: whether a node may leave. Whenever it becomes true, the node must be pushed.
        key: of a node that is eligible; larger leaves later. When it shrinks while the node is listed: `demote`.
    """

    def __init__(self, bit: int, eligible: Callable[[N], bool], key: Callable[[N], Any]):
        self._bit, self._eligible, self._key = int(bit), eligible, key  # arithmetic with flags is slow
        self._heap: list[tuple[Any, int, N]] = []
        self._bound = 1024

    def push(self, node: N) -> None:
        """Makes sure the node is in the queue if it is eligible."""
        if node.queued & self._bit or not self._eligible(node):
            return
        self._list(node)

    def demote(self, node: N) -> None:
        """Lists the node as `push` does, when its key may have shrunk, also if it is listed and not eligible now."""
        if node.queued & self._bit or self._eligible(node):
            self._list(node)

    def relist(self, node: N) -> None:
        """Lists the node as `push` does, when its key may have shrunk; not if it is listed and not eligible now."""
        node.queued &= ~self._bit
        if self._eligible(node):
            self._list(node)

    def key(self, node: N) -> Any:
        """Returns the node's key now."""
        return self._key(node)

    def pop(self) -> N | None:
        """Takes out the eligible node with the smallest key."""
        if (node := self.first()) is not None:
            heapq.heappop(self._heap)
            node.queued &= ~self._bit
        return node

    def first(self) -> N | None:
        """Returns the eligible node with the smallest key, which stays."""
        heap = self._heap
        while heap:
            key, number, node = heap[0]
            if not node.queued & self._bit:
                heapq.heappop(heap)  # the other entry of a demoted one has come up before
            elif not self._eligible(node):
                heapq.heappop(heap)
                node.queued &= ~self._bit
            elif (now := self._key(node)) != key:
                heapq.heapreplace(heap, (now, number, node))
            else:
                return node
        return None

    def holds(self, node: N) -> bool:
        """Whether the queue has an entry for the node, eligible or not."""
        return bool(node.queued & self._bit)

    def lacks(self, node: N) -> bool:
        """Whether the node should be here and is not: whoever made it eligible has not pushed it."""
        return not self.holds(node) and self._eligible(node)

    def late(self) -> list[N]:
        """Eligible nodes of which no entry comes up in time: whoever shrank their keys has not told. For tests."""
        first: dict[N, Any] = {}
        for key, _, node in self._heap:
            if self.holds(node) and self._eligible(node) and (node not in first or key < first[node]):
                first[node] = key
        return [node for node, key in first.items() if self._key(node) < key]

    def _list(self, node: N) -> None:
        node.queued |= self._bit
        heapq.heappush(self._heap, (self._key(node), node.number, node))
        if len(self._heap) > self._bound:
            self._forget_ineligible()

    def _forget_ineligible(self) -> None:
        first: dict[N, tuple[Any, int, N]] = {}  # of a node that was demoted the entry that comes up first
        for entry in self._heap:
            node = entry[2]
            if not node.queued & self._bit or not self._eligible(node):
                node.queued &= ~self._bit
            elif node not in first or entry[0] < first[node][0]:
                first[node] = entry
        kept = list(first.values())
        heapq.heapify(kept)
        self._heap, self._bound = kept, 2 * len(kept) + 1024
