"""What requests leave in the prefix tree: full blocks, and snapshots at block boundaries. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import HashError
from .policies import Placement, SnapshotPlacement
from .prefix.node import S, T
from .prefix.prefix_tree import PrefixTree
from .request import Request
from .tiered_cache import TieredCache

__all__ = ["Publisher", "Save"]


class Save(NamedTuple):
    """A snapshot that the next plan takes of a request's slot.

    Attributes:
        slot: where to: taken from the pool, or (`rolls`) that of the request's last rolling snapshot.
    """

    request: Request
    slot: int
    placement: Placement
    rolls: bool


class Publisher:
    """Publishes the blocks and takes the snapshots of the requests of one manager."""

    def __init__(self, cache: TieredCache, block_tokens: int):
        self._cache, self._block_tokens = cache, block_tokens
        self._dirty: dict[Request, None] = {}  # may have blocks to publish
        self.replaced = False  # whether a request's block was replaced by another's since this was last reset

    @property
    def _tree(self) -> PrefixTree:
        return self._cache.tree

    @property
    def _snapshots(self) -> SnapshotPlacement:
        policy = self._cache.policy
        return SnapshotPlacement(None, False, False) if policy is None else policy.snapshots

    def mark(self, request: Request) -> None:
        """The request may have filled blocks: `commit` looks at it."""
        if request.hasher is not None:
            self._dirty[request] = None

    def forget(self, request: Request) -> None:
        self._dirty.pop(request, None)

    def commit(self, final: Callable[[Request], int]) -> None:
        """Publishes what the steps planned so far have filled. `final(request)`: tokens that stay, whatever comes."""
        for request in list(self._dirty):
            if self.publish(request, final(request)):
                del self._dirty[request]
        self._cache.back_up()
        self._cache.keep_watermark()

    def publish(self, request: Request, tokens: int) -> bool:
        """Puts the full blocks among the first `tokens` tokens into the tree. Whether all are there now.

        A block that another request has published meanwhile is given back, and the other one shared.
        """
        if request.hasher is None:
            return True
        blocks, nodes, tree = request.blocks, request.nodes, self._tree
        full = min(tokens, len(request.tokens)) // self._block_tokens  # a caller may keep the ids to itself
        if len(nodes) < full:
            if not self._hash(request, full):
                return True
            for i in range(len(nodes), full):
                parent = nodes[-1] if nodes else None
                nodes.append(tree.reserve(parent, request.hasher.digests[i], blocks[i]))
        for i in range(request.num_shared, len(nodes)):
            published, spare = tree.publish(nodes[i])
            if published.state is S.WRITING:
                return False  # the block is on its way between tiers under another node: later
            nodes[i] = published
            if spare:
                self.replaced = True
                blocks[i] = published.block
                request.num_tabled = min(request.num_tabled, i)
                self._cache.release_blocks([spare])
        return len(nodes) * self._block_tokens + self._block_tokens > request.num_cached

    def _hash(self, request: Request, blocks: int) -> bool:
        """Whether the digests of the first `blocks` blocks are known."""
        hasher, tokens = request.hasher, blocks * self._block_tokens
        if hasher is None:
            return False
        if hasher.num_tokens < tokens:
            try:
                hasher.extend(request.tokens[hasher.num_tokens : tokens])
            except HashError:  # ids that no step could have been fed: nothing more of this request is cached
                request.hasher = None
                return False
        return True

    # Snapshots

    def next_stop(self, request: Request, start: int, stop: int) -> int:
        """Where a chunk of tokens [start, stop) should end, for a snapshot to be taken there."""
        if request.hasher is None:
            return stop
        return self._snapshots.next_stop(start, stop, prompt_tokens=request.num_prompt, block_tokens=self._block_tokens)

    def plan_saves(self, requests: list[Request], room: int) -> list[Save]:
        """Snapshots to take of these requests, which stand at a block boundary, as far as slots are to be had.

        Nothing but slots of the pool is taken: `saved` or `cancel` must follow.
        """
        saves: list[Save] = []
        for request in requests:
            if len(saves) == room:
                break
            placement = self._wanted(request)
            if placement is Placement.NONE:
                continue
            slot = self._rolling_slot(request) if placement is Placement.ROLLING else 0
            rolls = slot > 0
            if rolls and request.rolling is not None:
                self._tree.pin_snapshot(request.rolling)  # nobody else may have this slot
            slot = slot if rolls else self._cache.try_slot()
            if slot:
                saves.append(Save(request, slot, placement, rolls))
        return saves

    def saved(self, saves: list[Save]) -> None:
        """The plan with these copies is made: hits can end there. The requests' blocks must be published before."""
        for request, slot, placement, rolls in saves:
            i = request.num_cached // self._block_tokens - 1
            node = request.nodes[i] if i < request.num_shared else None
            if rolls:
                self._unroll(request)
            if node is None or node.snapshot is not None:
                self._cache.slots.release([slot])
                continue
            self._tree.attach_snapshot(node, T.DEVICE, slot)
            if placement is Placement.ROLLING:
                request.rolling = node

    def cancel(self, saves: list[Save]) -> None:
        """The plan was not made."""
        self._cache.slots.release([save.slot for save in saves if not save.rolls])
        for save in saves:
            if save.rolls and save.request.rolling is not None:
                self._tree.unpin_snapshot(save.request.rolling)

    def keep_slot(self, request: Request, *, always: bool) -> bool:
        """Makes the slot of a request that stands at a block boundary a snapshot, if one is wanted (or `always`)."""
        i, rest = divmod(request.num_cached, self._block_tokens)
        i -= 1
        if rest or not 0 <= i < request.num_shared or request.nodes[i].snapshot is not None:
            return False
        if not always and self._wanted(request) is Placement.NONE:
            return False
        self._tree.attach_snapshot(request.nodes[i], T.DEVICE, request.slot)
        if request.rolling is not None and self._rolling_slot(request):
            self._cache.slots.release([self._tree.drop_snapshot(request.rolling, T.DEVICE)])
        return True

    def _unroll(self, request: Request) -> None:
        """The slot of the last rolling snapshot is the request's again."""
        if request.rolling is not None:
            self._tree.unpin_snapshot(request.rolling)
            self._tree.drop_snapshot(request.rolling, T.DEVICE)
            request.rolling = None

    def _wanted(self, request: Request) -> Placement:
        i = request.num_cached // self._block_tokens - 1
        if request.hasher is None or (i < request.num_shared and request.nodes[i].snapshot is not None):
            return Placement.NONE
        return self._snapshots.at(request.num_cached, prompt_tokens=request.num_prompt, block_tokens=self._block_tokens)

    def _rolling_slot(self, request: Request) -> int:
        node = request.rolling
        if node is None or not self._tree.is_current(node) or node.snapshot is None or node.snapshot.pins:
            return 0
        return node.snapshot.device
