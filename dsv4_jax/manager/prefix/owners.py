"""Whose units are whose, as far as namespaces have shares of a tier: who has more is evicted first. Pure Python.

A node is its root's owner's. Units are counted in blocks: a block counts one, a state as many as its bytes take. An
owner with more units in a tier than its share is *over* there: its units leave that tier before anybody else's, until
it has a tenth less than its share. What nobody else wants stays: a share is no bound on what lies idle.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .eviction_policies import EvictionPolicy, Key
from .node import Node, Owner, T, Tier, subtree_of
from .worth import is_idle_end

__all__ = ["Owners", "is_over", "units_of", "with_owners"]

_BACK = 0.9  # of its share, at which an owner is no longer over


class Owners:
    """The owners of a tree's nodes.

    Args:
        share_of: the share of a namespace; None: nobody has a share, and nothing is counted.
        capacity: of each tier, in blocks.
        demote: told of each node whose keys have shrunk in a tier.
    """

    def __init__(
        self,
        share_of: Callable[[Hashable], float] | None,
        capacity: Mapping[Tier, int],
        demote: Callable[[Node, Tier], object],
    ):
        self._share_of, self.capacity, self._demote = share_of, dict(capacity), demote
        self.known: dict[Hashable, Owner] = {}

    def of(self, name: Hashable) -> Owner | None:
        """The owner of this name; None if nobody has a share."""
        if self._share_of is None:
            return None
        owner = self.known.get(name)
        if owner is None:
            for other in [other for other in self.known.values() if not other.roots]:
                del self.known[other.name]
            owner = self.known[name] = Owner(name, self._share_of(name))
        return owner

    def clear(self) -> None:
        """Nobody has units any more."""
        self.known.clear()

    def resize(self, tier: Tier, capacity: int) -> None:
        """The tier has other units, and nothing of it is held."""
        self.capacity[tier] = capacity

    def adopt(self, root: Node, owner: Owner, blocks_of_state: int) -> None:
        """A root that nobody owned is the owner's, with all below it."""
        owner.roots[root] = None
        for node in subtree_of(root):
            if node.owner is not None:
                continue
            node.owner = owner
            for tier, units in units_of(node, blocks_of_state).items():
                self.count(node, tier, units)

    def count(self, node: Node, tier: Tier, units: int) -> None:
        """The node has so many units more in a tier."""
        owner = node.owner
        if owner is None or tier not in owner.used or not units:
            return
        used = owner.used[tier] = owner.used[tier] + units
        limit = owner.share * self.capacity[tier]
        if units > 0 and used > limit and not owner.over[tier]:
            owner.over[tier] = True
            for root in owner.roots:
                for each in subtree_of(root):
                    self._demote(each, tier)
        elif units < 0 and owner.over[tier] and used <= _BACK * limit:
            owner.over[tier] = False


def units_of(node: Node, blocks_of_state: int) -> dict[Tier, int]:
    """What a node has in each tier, in blocks."""
    state = node.snapshot
    return {
        T.DEVICE: (node.state.tier is T.DEVICE) + (blocks_of_state if state is not None and state.device else 0),
        T.HOST: (node.host > 0) + (blocks_of_state if state is not None and state.host else 0),
    }


def is_over(node: Node, tier: Tier) -> bool:
    """Whether the node's owner has more than its share of a tier."""
    return node.owner is not None and node.owner.over.get(tier, False)


def with_owners(policy: EvictionPolicy, tier: Tier) -> EvictionPolicy:
    """The policy's keys in a tier, behind whether the owner has no more than its share. (Idle ends are nobody's.)"""

    def block(key: Key) -> Key:
        def shared(node: Node) -> tuple[bool, Any]:
            return not (is_over(node, tier) or is_idle_end(node)), key(node)

        return shared

    def snapshot(node: Node) -> tuple[bool, Any]:
        return not is_over(node, tier), policy.snapshot(node)

    return EvictionPolicy(block(policy.block), block(policy.moved), block(policy.copy), snapshot)
