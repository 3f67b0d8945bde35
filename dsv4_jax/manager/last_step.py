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

    Plans run in the order made: a request that uses some of it and is part of a later step says that the step ran.

    Attributes:
        written: nodes of blocks that the step filled, parents first, and that no later step has read.
        attached: the nodes with the snapshots that the step should have taken, or that were made of its state; none
            that a request of a later step has started from.
        relying: live requests that stand on these, or on copies that were to be made of the request, or by that plan or
            a later one.
        parked: preempted ones that have such copies on the host.
        heirs: requests of the same step that list blocks of it: they are theirs to take back now.
    """

    written: list[Node]
    attached: list[Node]
    relying: list[Request]
    parked: list[Request]
    heirs: dict[Request, list[Node]]

    @classmethod
    def of(
        cls,
        request: Request,
        cache: TieredCache,
        publisher: Publisher,
        live: Iterable[Request],
        waiting: Iterable[Request],
    ) -> LastStep:
        """`waiting`: the preempted requests."""
        step = request.last_step
        others = [other for other in live if other is not request]
        later = [other for other in others if other.last_step > step and other.was_scheduled]
        used = {node for other in later for node in other.nodes}
        written = [n for n in publisher.last_written(request) if cache.tree.is_current(n) and n not in used]
        block = publisher.block_tokens
        attached = [
            node
            for node in publisher.last_attached(request)
            if not any(_started_from(other, node, block, step) for other in later)
        ]
        relying: list[Request] = []
        heirs: dict[Request, list[Node]] = {}
        for other in others:
            listed = [node for node in written if node in other.nodes]
            if other.was_scheduled and other.last_step >= step:
                if listed and other.last_step == step:
                    heirs[other] = listed
            elif (
                listed
                or any(_started_from(other, node, block, step) for node in attached)
                or _is_copy(other, request, step)
            ):
                relying.append(other)
        inherited = {node for nodes in heirs.values() for node in nodes}
        parked = [other for other in waiting if other is not request and _is_copy(other, request, step)]
        return cls([n for n in written if n not in inherited], attached, relying, parked, heirs)

    def take_back(self, cache: TieredCache) -> None:
        """Takes all of it out of the cache, once the request has given up its own and those relying stand still."""
        tree = cache.tree
        for heir, nodes in self.heirs.items():
            heir.forget_earlier_steps(heir.last_step)
            heir.written += nodes
        for node in self.written:
            if tree.is_current(node):  # else it went with the one above
                cache.give_back(tree.moves.retract(node))
        for node in self.attached:
            if tree.is_current(node) and node.snapshot is not None:
                snapshot = node.snapshot
                for tier, release in ((T.DEVICE, cache.release_states), (T.HOST, cache.pages.release)):
                    if snapshot.copy(tier):
                        release(tree.snapshots.drop(node, tier))
                if snapshot.stored:
                    tree.snapshots.drop(node, T.STORAGE)


def _is_copy(other: Request, request: Request, step: int) -> bool:
    """Whether its state is a copy of the request after this step, or one that was to be made in this step or later."""
    return other.forked is not None and (other.forked == (request.id, step) or 0 < step <= other.copied)


def _started_from(request: Request, node: Node, block_tokens: int, step: int) -> bool:
    """Whether it became live after this step with the state at the end of the node's block, and where that is."""
    listed = len(request.nodes) > node.depth and request.nodes[node.depth] is node
    return listed and request.num_hit == (node.depth + 1) * block_tokens and request.started >= step
