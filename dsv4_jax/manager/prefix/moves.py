"""Blocks that go from tier to tier, and blocks that are lost. Pure Python.

A move has two ends: `begin_...` when its destination is given, then `complete` or `abort`. In between the node is
neither evicted nor moved again.
"""

from __future__ import annotations

from ...checks import check_integer
from ...errors import IntegrityError, PlanError
from .eviction import Freed
from .node import ABORTS, COMPLETES, SETTLED, TRANSITIONS, Node, NodeState, S, T, subtree_of
from .nodes import NodeTable

__all__ = ["BlockMoves"]


class BlockMoves:
    """Begins, completes and aborts what moves blocks between tiers."""

    def __init__(self, nodes: NodeTable):
        self._nodes = nodes

    def begin_backup(self, node: Node, host: int) -> None:
        """Begins the copy of a published block from device to host. It stays matchable, and on the device until
        `complete`."""
        if self._nodes.check(node).host:
            raise IntegrityError(f"{node} has a host copy already")
        self._begin(node, S.BACKING_UP, host=host)

    def begin_offload(self, node: Node, host: int) -> None:
        """Device to host move of a block that is evicted."""
        self._begin(node, S.OFFLOADING, host=host)

    def begin_load(self, node: Node, block: int) -> None:
        """Begins a copy from host to device, parents first."""
        self._begin(node, S.LOADING, block=block)

    def begin_persist(self, node: Node) -> None:
        """Begins a copy from host to storage. The block stays matchable."""
        if self._nodes.check(node).stored:
            raise IntegrityError(f"{node} has a storage copy already")
        self._begin(node, S.PERSISTING)

    def begin_fetch(self, node: Node, host: int) -> None:
        """Begins a copy from storage to host, parents first."""
        self._begin(node, S.FETCHING, host=host)

    def complete(self, node: Node) -> Freed:
        """The move under way has succeeded. Moves up complete parents first.

        Raises:
            IntegrityError: no move is under way, or the parent is in too low a tier.
        """
        nodes = self._nodes
        old = nodes.check(node).state
        if old not in COMPLETES:
            raise IntegrityError(f"{node} is not on the move")
        freed = Freed()
        if old is S.PERSISTING:
            node.stored = True
            nodes.emit("stored", T.STORAGE, node)
        nodes.set_state(node, COMPLETES[old])
        if old is not S.PERSISTING:
            nodes.emit("stored", T.DEVICE if old is S.LOADING else T.HOST, node)
        if old is S.OFFLOADING:
            freed.blocks.append(node.block)
            node.block = 0
            nodes.emit("removed", T.DEVICE, node)
        return freed

    def abort(self, node: Node) -> Freed:
        """The write or move under way is called off: the node is where it was, and what it was given is freed.

        A reserved block (leaf first) ceases to be. An offloaded block whose parent has left the device
        meanwhile cannot go back: `discard` it.

        Raises:
            IntegrityError: nothing is under way, children are in the way, or the parent is in too low a tier.
        """
        nodes = self._nodes
        old = nodes.check(node).state
        if old not in ABORTS:
            raise IntegrityError(f"{node} is neither being written nor on the move")
        freed = Freed()
        if old is S.WRITING:
            if node.children:
                raise IntegrityError(f"{node} has children: blocks being written are aborted leaf first")
            nodes.drop(node, freed)
            return freed
        nodes.set_state(node, ABORTS[old])
        if old is S.LOADING:
            freed.blocks.append(node.block)
            node.block = 0
        elif old is not S.PERSISTING:
            freed.pages.append(nodes.set_host(node, 0))
        return freed

    def _begin(self, node: Node, state: NodeState, *, block: int = 0, host: int = 0) -> None:
        """Starts a move whose destination is the unit given."""
        self._nodes.check(node)
        parent = node.parent
        if state is S.LOADING or state is S.FETCHING:
            above = T.DEVICE if state is S.LOADING else T.HOST
            if parent is not None and parent.state.tier < above and parent.state is not state:
                raise IntegrityError(f"{node} cannot go up before {parent}")
        if state is S.LOADING:
            block = check_integer("block", block, 1, error=PlanError)
        elif state is not S.PERSISTING:
            host = check_integer("host", host, 1, error=PlanError)
        self._nodes.set_state(node, state)
        node.block = block or node.block
        if host:
            self._nodes.set_host(node, host)

    # Losses

    def discard(self, node: Node) -> Freed:
        """Removes a node, whose bytes may be lost, and everything below it.

        The node itself may be on the move (a transfer that failed); no copy of it may be under way any more.

        Raises:
            IntegrityError: something there is referenced, being written, or below the node and on the move.
        """
        below = subtree_of(self._nodes.check(node))
        for n in below:
            if n.refs or (n.snapshot and n.snapshot.pins) or (n is not node and n.state not in SETTLED):
                raise IntegrityError(f"{n} is in use: it cannot be discarded with {node}")
        if S.REMOVED not in TRANSITIONS[node.state]:
            raise IntegrityError(f"{node} cannot be removed in this state")
        freed = Freed()
        for n in reversed(below):
            self._nodes.drop(n, freed)
        return freed

    def retract(self, node: Node) -> Freed:
        """Removes a published node whose bytes were never written, and all below it, in whatever tier.

        Moves between the lower tiers are forgotten: what is said of their ends later is ignored.

        Raises:
            IntegrityError: something there is referenced, or a snapshot pinned; nothing has changed.
        """
        below = subtree_of(self._nodes.check(node))
        for n in below:
            if n.refs or (n.snapshot and n.snapshot.pins):
                raise IntegrityError(f"{n} is in use: it cannot be retracted with {node}")
        freed = Freed()
        for n in reversed(below):
            if n.state is S.PERSISTING:
                self.abort(n)
            self._nodes.drop(n, freed)
        return freed

    def drop_stored(self, node: Node) -> None:
        """Storage has lost its copy of a block that another tier has as well."""
        if self._nodes.check(node).state in (S.STORAGE, S.FETCHING, S.PERSISTING) or not node.stored:
            raise IntegrityError(f"{node} has no storage copy besides another")
        node.stored = False
        self._nodes.emit("removed", T.STORAGE, node)
