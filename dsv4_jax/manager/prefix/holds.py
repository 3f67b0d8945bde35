"""Host copies that stay where they are for somebody who is no request: another host that reads them. Pure Python.

A hold is of a path's blocks, from the first one on, and of the state at its end. What it names is not evicted from the
host; it may be loaded, moved down from the device to its held copy, and hit, all the same. A step that did not run
takes its blocks back whoever holds them: then the hold is not whole any more.
"""

from __future__ import annotations

import dataclasses

from ...errors import IntegrityError
from .node import Node, Pages, Snapshot
from .nodes import NodeTable
from .queues import EvictionQueues

__all__ = ["Hold", "Holds"]


@dataclasses.dataclass(eq=False, slots=True)
class Hold:
    """Host copies that are kept for somebody outside; `Holds.open` makes it.

    Attributes:
        blocks: held nodes, each with the page it was held in.
        states: held snapshots, likewise.
    """

    blocks: dict[Node, int] = dataclasses.field(default_factory=dict)
    states: dict[Snapshot, Pages] = dataclasses.field(default_factory=dict)


class Holds:
    """The holds of a tree that have not ended.

    Attributes:
        active: holds that have not ended.
        blocks, pages: how many blocks and how many pages of states they hold, each counted once.
    """

    def __init__(self, nodes: NodeTable, queues: EvictionQueues):
        self._nodes, self._queues = nodes, queues
        self.active: dict[Hold, None] = {}
        self.blocks = self.pages = 0

    def clear(self) -> None:
        """Forgets all nodes, as the tree does, and with them who held them."""
        self.active.clear()
        self.blocks = self.pages = 0

    def open(self) -> Hold:
        """Makes a hold, of nothing yet."""
        hold = Hold()
        self.active[hold] = None
        return hold

    def keep(self, hold: Hold, node: Node) -> None:
        """Holds the host copy of a block, unless the hold has ended. Raises `IntegrityError` if it has none."""
        if hold not in self.active or node in hold.blocks:
            return
        if not self._nodes.check(node).host:
            raise IntegrityError(f"{node} has no host copy to hold")
        hold.blocks[node] = node.host
        self.blocks += not node.held
        node.held += 1

    def keep_state(self, hold: Hold, node: Node) -> None:
        """Holds the host copy of the state at the end of a block, unless the hold has ended."""
        if hold not in self.active:
            return
        snapshot = self._nodes.check(node).snapshot
        if snapshot is None or not snapshot.host:
            raise IntegrityError(f"{node} has no state on the host to hold")
        if snapshot not in hold.states:
            hold.states[snapshot] = snapshot.host
            self.pages += 0 if snapshot.held else len(snapshot.host)
            snapshot.held += 1

    def drop(self, hold: Hold, node: Node) -> None:
        """Ends the hold of a block."""
        del hold.blocks[node]
        self._let_go(node)

    def is_whole(self, hold: Hold) -> bool:
        """Whether all that was held is still there."""
        return (
            hold in self.active
            and all(self._nodes.is_current(node) and node.host == page for node, page in hold.blocks.items())
            and all(_stands(snapshot) and snapshot.host == pages for snapshot, pages in hold.states.items())
        )

    def end(self, hold: Hold) -> None:
        """Nothing is held any more. Does nothing if it has ended, or the tree was cleared."""
        if hold not in self.active:
            return
        del self.active[hold]
        for node in reversed(hold.blocks):
            self._let_go(node)
        for snapshot, pages in hold.states.items():
            snapshot.held -= 1
            self.pages -= 0 if snapshot.held else len(pages)
            if _stands(snapshot):
                self._queues.push_snapshot(snapshot.node)

    def _let_go(self, node: Node) -> None:
        node.held -= 1
        self.blocks -= not node.held
        if self._nodes.is_current(node):
            self._queues.push(node)


def _stands(snapshot: Snapshot) -> bool:
    return snapshot.node.snapshot is snapshot
