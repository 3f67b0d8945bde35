"""What requests leave in the prefix tree: full blocks, and snapshots at block boundaries. Pure Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import RequestError
from ..layout import CacheLayout
from .policies import SnapshotKind, SnapshotPlacement
from .prefix.node import SETTLED, Node, S, T, Tier, Unit
from .prefix.prefix_tree import PrefixTree
from .prefix.token_ids import packed, token_ids
from .prefix.worth import kind_of
from .request import Request
from .tiered_cache import TieredCache

__all__ = ["Publisher", "Save"]

_NOWHERE = SnapshotPlacement.none()


class Save(NamedTuple):
    """A snapshot that the next plan takes of a request's slot.

    Attributes:
        slot: where to, a slot or the unit of a state in blocks: taken from the pool, or (`rolls`) that of the request's
            last rolling snapshot.
    """

    request: Request
    slot: int
    placement: SnapshotKind
    rolls: bool


class Publisher:
    """Publishes the blocks and takes the snapshots of the requests of one manager."""

    def __init__(self, layout: CacheLayout, cache: TieredCache):
        self.block_tokens, self._draft_tokens = layout.block_tokens, layout.draft_tokens
        self._vocab_size = layout.cfg.vocab_size
        self._cache = cache
        self._dirty: dict[Request, None] = {}  # may have blocks to publish
        self.replaced = False  # whether a request's block was replaced by another's since this was last reset

    @property
    def _tree(self) -> PrefixTree:
        return self._cache.tree

    @property
    def snapshots(self) -> SnapshotPlacement:
        """Where states are kept."""
        policy = self._cache.policy
        return _NOWHERE if policy is None else policy.snapshots

    def _placement(self, request: Request) -> SnapshotPlacement:
        """Where the request's states are kept."""
        placement = self.snapshots
        if request.reuse == "output" or placement == _NOWHERE:
            return placement
        return dataclasses.replace(placement, end_of_prompt=True, end_of_output=False)

    @property
    def is_idle(self) -> bool:
        """Whether no request may have blocks to publish."""
        return not self._dirty and not self.replaced

    def mark(self, request: Request) -> None:
        """The request may have filled blocks: `commit` looks at it."""
        if request.hasher is not None:
            self._dirty[request] = None

    def forget(self, request: Request) -> None:
        self._dirty.pop(request, None)

    def final_tokens(self, request: Request) -> int:
        """Cached tokens that stay whatever is accepted."""
        last, drafts = request.num_scheduled, self._draft_tokens
        if request.is_open:
            return request.step_start
        return request.num_cached - (last if drafts and last <= 1 + drafts else 0)

    def commit(self) -> None:
        """Publishes what the steps planned so far have filled, as far as it stays whatever is accepted."""
        for request in list(self._dirty):
            if self.publish(request, self.final_tokens(request)):
                del self._dirty[request]
        self._cache.back_up()
        self._cache.keep_watermark()

    def preview(self) -> tuple[list[int], dict[Request, int]]:
        """What `commit` would do now: the places of device blocks that become available, and the first block of each
        request that another's would replace."""
        more, first = list[int](), dict[Request, int]()
        fresh: set[bytes] = set()
        for request in list(self._dirty):
            for i, digest, other in self._outlook(request, self.final_tokens(request), fresh):
                if digest in fresh or (other is not None and other.state.tier is T.DEVICE):
                    if digest in fresh or (other is not None and other.refs > 0):
                        more.append(i)
                    first.setdefault(request, i)
        return more, first

    def publish(self, request: Request, tokens: int) -> bool:
        """Puts the full blocks among the first `tokens` tokens into the tree. Whether all are there now.

        A block that another request has published meanwhile is given back, and the other one shared.
        """
        self.note(request, tokens)
        if request.hasher is None:
            return True
        blocks, nodes, tree = request.blocks, request.nodes, self._tree
        full = self._full_blocks(request, tokens)
        if len(nodes) < full:
            if not self._hash(request, full):
                return True
            owner = tree.owners.of(request.hasher.namespace)
            tree.name(request.hasher, len(nodes), full)
            for i in range(len(nodes), full):
                parent = nodes[-1] if nodes else None
                nodes.append(tree.reserve(parent, request.hasher.digests[i], blocks[i], owner))
        request.forget_earlier_steps(request.last_step)
        for i in range(request.num_shared, len(nodes)):
            published, spare = tree.publish(nodes[i])
            if published.state is S.WRITING:
                return False  # the block is on its way between tiers under another node: later
            nodes[i] = published
            if not spare and (i + 1) * self.block_tokens > request.step_start:
                request.written.append(published)
            if spare:
                self.replaced = True
                blocks[i] = published.block
                request.num_tabled = min(request.num_tabled, i)
                self._cache.release_blocks([spare])
        return len(nodes) * self.block_tokens + self.block_tokens > request.num_cached

    def _full_blocks(self, request: Request, tokens: int) -> int:
        """Full blocks among the first `tokens` tokens whose ids are known: a caller may keep them to itself."""
        known = max(len(request.ids), len(request.history)) if request.hasher is not None else 0
        return min(tokens, known) // self.block_tokens

    def note(self, request: Request, tokens: int) -> None:
        """Takes the first `tokens` ids for computed, as far as they are known and not noted yet.

        None while ids before them differ from what was noted: these may stand elsewhere than where they were computed;
        and none where others were removed.
        """
        history, tokens = request.history, min(tokens, request.ids.shortest)
        if len(history) >= tokens or request.is_displaced:
            return
        try:
            history.extend(packed(token_ids(request.ids[len(history) : tokens], self._vocab_size)))
        except RequestError:  # no ids that a step could have computed
            request.hasher = None  # nothing more of this request is cached

    def last_written(self, request: Request) -> list[Node]:
        """Returns the published nodes whose blocks the request's last step filled."""
        if request.left_by != request.last_step:
            return []
        return [n for n in request.written if (n.depth + 1) * self.block_tokens > request.step_start]

    def last_attached(self, request: Request) -> list[Node]:
        """The nodes that the request's last step, or its preemption, gave snapshots, which somebody may use by now."""
        if request.left_by != request.last_step:
            return []
        return [
            node
            for node in request.attached
            if self._tree.is_current(node) and (node.depth + 1) * self.block_tokens >= request.step_start
        ]

    def would_share(self, request: Request, tokens: int) -> int:
        """Leading blocks of the request that the tree holds once `publish(request, tokens)` was called."""
        return request.num_shared + sum(1 for _ in self._outlook(request, tokens, set()))

    def _outlook(self, request: Request, tokens: int, fresh: set[bytes]) -> Iterator[tuple[int, bytes, Node | None]]:
        """The blocks that `publish` would put into the tree, their digests, and the nodes that have these already.

        `fresh`: digests that earlier ones of the same round add.
        """
        full = self._full_blocks(request, tokens)
        if len(request.nodes) < full and not self._hash(request, full):
            return
        for i in range(request.num_shared, max(full, len(request.nodes))):
            assert request.hasher is not None
            other = self._tree.get(digest := request.hasher.digests[i])
            if other is not None and other.state not in SETTLED and other.state is not S.BACKING_UP:
                return
            yield i, digest, other
            fresh.add(digest)

    def _hash(self, request: Request, blocks: int) -> bool:
        """Whether the digests of the first `blocks` blocks are those of what was scheduled."""
        tokens, start = blocks * self.block_tokens, len(request.nodes) * self.block_tokens
        self.note(request, tokens)
        if request.hasher is None or len(request.history) < tokens:
            return False
        request.hasher.follow(request.history[start:tokens], start)
        return True

    # Snapshots

    def next_stop(self, request: Request, start: int, stop: int) -> int:
        """Where a chunk of tokens [start, stop) should end, for a snapshot to be taken there."""
        if request.hasher is None or (request.reuse == "prompt" and start >= request.num_prompt):
            return stop
        if request.wanted:
            stop = min([stop, *(tokens for tokens in request.wanted if tokens > start)])
        return self._placement(request).next_stop(
            start, stop, prompt_tokens=request.num_prompt, block_tokens=self.block_tokens, junction=request.junction
        )

    def plan_saves(self, requests: list[Request], room: int) -> list[Save]:
        """Snapshots to take of these requests, which stand at a block boundary, as far as there are slots.

        Those that others wait for come first, then others that stay, then those that their requests will replace.
        Nothing but slots of the pool is taken: `saved` has to follow.
        """
        if any(request.wanted for request in requests):
            requests = sorted(requests, key=lambda request: request.num_cached not in request.wanted)
        saves: list[Save] = []
        chosen = set[Node]()
        ends = [(request, self._ends_at(request)) for request in requests]
        wanted = [(self._wanted(request, node), request, node) for request, node in ends]
        for placement in (SnapshotKind.KEEP, SnapshotKind.ROLLING):
            for wants, request, node in wanted:
                if wants is not placement or node in chosen:  # several may come to one junction together
                    continue
                if len(saves) == room:
                    return saves
                slot = self._rolling_slot(request) if placement is SnapshotKind.ROLLING else 0
                rolls = slot > 0
                if rolls and request.rolling is not None:
                    self._tree.snapshots.pin(request.rolling)  # nobody else may have this slot
                slot = slot if rolls else self._cache.try_state()
                if slot:
                    saves.append(Save(request, slot, placement, rolls))
                    if node is not None:
                        chosen.add(node)
        return saves

    def saved(self, saves: list[Save], step: int) -> None:
        """The plan of this step, with these copies, is made: hits can end there.

        The requests' blocks must be published before.
        """
        for request, slot, placement, rolls in saves:
            node = self._ends_at(request)
            if rolls:
                self._unroll(request)
            if node is None or node.has_near_state:
                self._cache.release_states([slot])
                continue
            self.attach(request, node, T.DEVICE, slot, step)
            if placement is SnapshotKind.ROLLING:
                request.rolling = node

    def will_keep(self, request: Request) -> bool:
        """Whether `keep_slot(always=True)` finds room for the state of a request at a block boundary, or one there."""
        if not self._cache.snapshot_blocks:
            return True
        node = self._ends_at(request)
        has_room = request.rolling is not None or not self._cache.shortage(range(self._cache.snapshot_blocks))
        return node is not None and (node.has_near_state or has_room)

    def keep_slot(self, request: Request, *, always: bool) -> bool:
        """Keeps the state of a request that stands at a block boundary, if it is wanted (or `always`). Whether its slot
        has become the snapshot."""
        node = self._ends_at(request)
        if node is None or node.has_near_state or request.num_cached % self.block_tokens or not request.has_whole_state:
            return False
        if not always and self._wanted(request, node) is SnapshotKind.NONE:
            return False
        unit = request.slot
        if self._cache.snapshot_blocks:
            if request.rolling is not None and self._rolling_slot(request):
                (unit,) = self._tree.snapshots.drop(request.rolling, T.DEVICE)
            elif not (unit := self._cache.try_state()):
                return False
            self._cache.put_state(request.slot, unit, request.num_cached)
        self.attach(request, node, T.DEVICE, unit)
        if self._cache.snapshot_blocks:
            return False  # the slot is free, once the copy has run
        if request.rolling is not None and self._rolling_slot(request):
            self._cache.release_states(self._tree.snapshots.drop(request.rolling, T.DEVICE))
        return True

    def state_slot(self, request: Request, tokens: int) -> int:
        """The slot that holds the request's state after so many tokens, whatever is accepted; 0 if none does."""
        waits = request.restores is not None or request.forked is not None or request.slot in self._cache.copies.slots
        here = request.num_cached == tokens == self.final_tokens(request) and request.has_whole_state
        return request.slot if here and not waits else 0

    def attach(self, request: Request, node: Node, tier: Tier, unit: Unit, step: int | None = None) -> None:
        """The state at the end of the node's block is the request's, left by this step (None: by its last one)."""
        kind = kind_of(request.num_cached, request.num_prompt, self.block_tokens)
        after = request.num_hit // self.block_tokens
        self._tree.snapshots.attach(node, tier, unit, kind=kind, after=after)
        request.forget_earlier_steps(request.last_step if step is None else step)
        request.attached.append(node)

    def _unroll(self, request: Request) -> None:
        """The slot of the last rolling snapshot is the request's again."""
        if request.rolling is not None:
            self._tree.snapshots.drop(request.rolling, T.DEVICE, pinned=True)
            request.rolling = None

    def _ends_at(self, request: Request) -> Node | None:
        """The node of the last block that the request has filled, if the tree holds it."""
        i = request.num_cached // self.block_tokens - 1
        return request.nodes[i] if 0 <= i < request.num_shared else None

    def _wanted(self, request: Request, node: Node | None) -> SnapshotKind:
        """What the policy wants of the request's state at the end of its last block, which is the node's."""
        if request.hasher is None or not request.has_whole_state or (node is not None and node.has_near_state):
            return SnapshotKind.NONE
        if request.num_cached in request.wanted:
            return SnapshotKind.KEEP
        if request.reuse == "prompt" and request.num_cached >= request.num_prompt:
            return SnapshotKind.NONE  # nobody goes on from there
        return self._placement(request).at(
            request.num_cached,
            prompt_tokens=request.num_prompt,
            block_tokens=self.block_tokens,
            junction=request.junction,
        )

    def _rolling_slot(self, request: Request) -> int:
        node = request.rolling
        if node is None or not self._tree.is_current(node) or node.snapshot is None or node.snapshot.pins:
            return 0
        return node.snapshot.device
