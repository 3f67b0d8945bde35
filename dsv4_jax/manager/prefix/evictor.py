"""Blocks that leave a tier to make room, least valuable first. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from ...checks import check_integer
from ...errors import IntegrityError, OutOfBlocksError, PlanError
from ...eviction_queue import EvictionQueue
from .eviction import Eviction, Freed, Move, TreeCounters
from .moves import BlockMoves
from .node import SETTLED, Node, S, T, Tier, children_of, subtree_of
from .nodes import NodeTable
from .queues import EvictionQueues
from .worth import block_worth, is_idle_end

__all__ = ["Evictor"]


class Evictor:
    """Chooses the blocks that leave a tier, and makes them leave."""

    def __init__(self, nodes: NodeTable, queues: EvictionQueues, moves: BlockMoves, counters: TreeCounters):
        self._nodes, self._queues, self._moves, self._counters = nodes, queues, moves, counters

    def evict(self, tier: Tier, count: int, room: Sequence[int] = ()) -> Eviction:
        """Makes `count` blocks leave a tier, leaves first, in the order of its queue: all or none.

        From the device a block goes to its host copy; without one, to a host block of `room` by a
        move (the blocks next to the root are served first); else to its storage copy; else it is
        removed, with what lies below it in lower tiers. From the host it goes to its storage copy,
        else it is removed likewise; the host copy of a block that is on the device counts too, and
        only the copy goes. From storage it is removed.

        Args:
            room: host block ids that moves may use.

        Raises:
            OutOfBlocksError: fewer can leave (others are referenced or on the move); nothing has changed.
        """
        victims = self._victims(tier, check_integer("count", count, error=PlanError), len(room))
        result = Eviction()
        spots, homeless = iter(room), 0  # victims that could use one: the last len(room) of them get one
        if room and tier is T.DEVICE:
            homeless = sum([not node.host for node in victims])
        for node in victims:
            if homeless and not node.host:
                homeless -= 1
                if homeless < len(room):
                    host = next(spots)
                    self._moves.begin_offload(node, host)
                    result.moves.append(Move(node, node.block, host))
                    continue
            self._leave(node, tier, result)
        self._counters.evicted[tier] += len(victims)
        result.unused.extend(spots)
        return result

    def evict_colder(self, tier: Tier, node: Node) -> Freed | None:
        """Evicts the next block, if it would leave before this node did; else None, and nothing has changed."""
        try:
            (victim,) = self._victims(tier, 1, 0)
        except OutOfBlocksError:
            return None
        queue = self._queues.blocks[tier]
        if not queue.key(victim) < queue.key(node):
            queue.push(victim)
            return None
        result = Eviction()
        self._leave(victim, tier, result)
        self._counters.evicted[tier] += 1
        return result

    def device_leaf(self) -> Node:
        """Returns a node on the device with no other below it there, held by nobody. Raises `IntegrityError` without
        one."""
        for node in self._nodes.published.values():
            if node.state is S.DEVICE and not node.refs and not node.on_device and not node.held:
                return node
        raise IntegrityError("no block at rest on the device")

    def _leave(self, node: Node, tier: Tier, freed: Freed) -> None:
        """One victim goes down to a copy, or away."""
        if tier is self._nodes.last_tier and (tier is T.DEVICE or node.state is not S.DEVICE) and not is_idle_end(node):
            self._nodes.lose(node, tier, block_worth(node))
        if node.owner is not None and node.owner.over.get(tier):
            node.owner.evicted[tier] += 1
        if tier is T.DEVICE and (node.host or (node.stored and not node.on_host)):
            self._nodes.set_state(node, S.HOST if node.host else S.STORAGE)
            freed.blocks.append(node.block)
            node.block = 0
        elif tier is T.HOST and (node.state is S.DEVICE or node.stored):
            if node.state is S.HOST:
                self._nodes.set_state(node, S.STORAGE)
            freed.pages.append(self._nodes.set_host(node, 0))
        else:
            for n in reversed(subtree_of(node)) if node.children else (node,):
                self._nodes.drop(n, freed)
            return
        self._nodes.emit("removed", tier, node)

    def _victims(self, tier: Tier, count: int, room: int) -> list[Node]:
        """The next `count` nodes to leave. Counters are as if those chosen had left, until all are found."""
        queue = self._queues.blocks[tier]
        chosen: list[Node] = []
        passed: list[Node] = []
        in_use: bool | None = None  # whether anything is; looked up where it matters
        busy: set[Node] = set()  # with something in use at or below a child that goes down to its copy
        while len(chosen) < count and (node := queue.pop()) is not None:
            parent, goes_down = node.parent, tier is T.DEVICE and node.host > 0
            if room < count and not goes_down and (node in busy or _held_from_below(node, tier)):
                passed.append(node)
                continue
            if goes_down and parent is not None:
                if in_use is None:
                    in_use = self._nodes.is_any_in_use()
                if in_use and (node in busy or _is_pinned(node) or _is_used_below(node, tier)):
                    busy.add(parent)
            chosen.append(node)
            if count > 1 and parent is not None and node.state.tier is tier:
                _leaves(node, parent, tier, room, 1)
                if len(chosen) < count:  # else it is listed when the node really leaves
                    _relist(queue, parent, tier)
        for node in chosen if count > 1 else ():
            if node.parent is not None and node.state.tier is tier:
                _leaves(node, node.parent, tier, room, -1)
        for node in passed:
            queue.push(node)
        if len(chosen) < count:
            for node in chosen:
                queue.push(node)
            raise OutOfBlocksError(count, len(chosen), self._nodes.idle[tier], f"{tier.name.lower()} cache")
        return chosen


def _leaves(node: Node, parent: Node, tier: Tier, room: int, count: int) -> None:
    """A node leaves a tier in thought (-1: comes back): its parent has one child less there, or anywhere."""
    if tier is T.DEVICE:
        parent.on_device -= count
        gone = not (room or node.host or node.stored)
    elif tier is T.HOST:
        parent.on_host -= count
        gone = not node.stored
    else:
        gone = True
    if gone:
        parent.children -= count


def _relist(queue: EvictionQueue[Node], parent: Node, tier: Tier) -> None:
    """Lists a node that has one child less in thought. (One above the tier may be chosen already: its copy.)"""
    if is_idle_end(parent) and (parent.state.tier is tier or queue.holds(parent)):
        queue.demote(parent)
    elif parent.state.tier is tier:
        queue.push(parent)


def _held_from_below(node: Node, tier: Tier) -> bool:
    """Whether the node cannot leave: a child is about to come up to this tier; or it would have to be removed, and
    it or a lower-tier node below it is in use."""
    if node.state.tier is not tier:
        return False
    if tier is T.HOST and node.stored:
        return any(child.state is S.FETCHING for child in children_of(node))
    return _is_pinned(node) or (node.children > 0 and _is_used_below(node, tier))


def _is_used_below(node: Node, tier: Tier) -> bool:
    below = [n for child in children_of(node) if child.state.tier < tier for n in subtree_of(child)]
    return any(n.state not in SETTLED or _is_pinned(n) for n in below)


def _is_pinned(node: Node) -> bool:
    return node.snapshot is not None and node.snapshot.pins > 0
