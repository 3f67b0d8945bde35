"""What a request's last step has left in the cache, and how to take it back if the step never ran. Pure Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .prefix.node import Node, T
from .publishing import Publisher
from .request import Request
from .tiered_cache import TieredCache

__all__ = ["LastStep"]


@dataclasses.dataclass(slots=True)
class LastStep:
    """Made before anything of the request is given up.

    Attributes:
        written: nodes of blocks that the step filled, parents first, and that nobody has computed on since.
        attached: the node with the snapshot that the step should have taken, or that was made of its state; None if
            there is none, or somebody has started from it and been fed since.
        relying: live requests that start from these, or from copies that were to be made of the request or by the
            same plan, and were not fed since.
    """

    written: list[Node]
    attached: Node | None
    relying: list[Request]

    @classmethod
    def of(
        cls, request: Request, cache: TieredCache, publisher: Publisher, live: Iterable[Request],
        copied: frozenset[int],
    ) -> LastStep:  # fmt: skip
        """`copied`: slots that the same plan should have filled by copies."""
        others = [other for other in live if other is not request]
        written = [node for node in publisher.last_written(request) if cache.tree.is_current(node)]
        attached = publisher.last_attached(request)
        fed = [other for other in others if other.num_cached != other.num_hit]
        used = {node for other in fed for node in other.nodes}
        written = [node for node in written if node not in used]
        if any(len(other.nodes) > attached.depth and other.nodes[attached.depth] is attached
               and other.num_hit == (attached.depth + 1) * publisher.block_tokens for other in fed
               ) if attached is not None else False:  # fmt: skip
            attached = None
        gone, copies = set(written), cache.copies.slots
        relying = [
            other for other in others
            if other not in fed and (
                not gone.isdisjoint(other.nodes)
                or (attached is not None and other.nodes and other.nodes[-1] is attached)
                or (request.slot and copies.get(other.slot) == request.slot)
                or other.slot in copied
            )
        ]  # fmt: skip
        return cls(written, attached, relying)

    def take_back(self, cache: TieredCache) -> None:
        """Takes all of it out of the cache, once the request has given up its own and those relying stand still."""
        tree = cache.tree
        for node in self.written:
            if tree.is_current(node):  # else it went with the one above
                cache.give_back(tree.retract(node))
        node = self.attached
        if node is None or not tree.is_current(node) or node.snapshot is None:
            return
        snapshot = node.snapshot
        for tier, pool in ((T.DEVICE, cache.slots), (T.HOST, cache.host_snapshots)):
            if snapshot.copy(tier):
                pool.release([tree.drop_snapshot(node, tier)])
        if snapshot.stored:
            tree.drop_snapshot(node, T.STORAGE)
