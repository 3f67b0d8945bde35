"""How requests come and go: admitted, forked, preempted, resumed, released, aborted. Pure Python.

Every call is given what the facade has checked: who is meant is known here, and that the manager is awake. What may
still be refused is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..errors import NoFreeSlotError, OutOfBlocksError, RequestError
from ..layout import CacheLayout
from .hits import Hit, take_hit
from .last_step import LastStep
from .newcomers import follow_verified
from .parking import Parking
from .prefix.hashing import BlockHasher, HashSpec
from .prefix.node import T
from .publishing import Publisher
from .request import Request, RequestState
from .request_book import RequestBook
from .request_tokens import PromptIds
from .steps import Steps
from .tiered_cache import TieredCache

__all__ = ["Lifecycle"]


class Lifecycle:
    """Admits, forks, preempts, resumes and releases the requests of a manager."""

    def __init__(self, layout: CacheLayout, book: RequestBook, cache: TieredCache, publisher: Publisher, steps: Steps):
        self._layout, self._book, self._cache, self._publisher, self._steps = layout, book, cache, publisher, steps
        self._parking = Parking(layout, cache, publisher)

    # Coming

    def admit(self, tokens: PromptIds, limit: int, request_id: Hashable, hasher: BlockHasher | None) -> Request:
        """A new live request at what is cached of its tokens. Raises `NoFreeSlotError`."""
        self._check_slot()
        self._publisher.commit()
        hit = self._hit(hasher, len(tokens))
        request = self._book.add(tokens, limit, request_id, hit.slot, self._steps.num_planned)
        request.hasher = hasher
        self._use(request, hit)
        return request

    def resume(self, request: Request) -> None:
        """A preempted request is live again. Raises `NoFreeSlotError`, `OutOfBlocksError`: then it stays preempted."""
        self._check_slot()
        self._book.settle_changes([request])
        self._parking.check_room(request)
        self._publisher.commit()
        if not self._parking.unpark(request):
            request.forked = None
            known = self._follow_verified(request, request.hasher)
            request.looked_up = request.ids.edits
            self._use(request, self._hit(request.hasher, known))
        self._parking.drop(request)
        self._book.resume(request, self._steps.num_planned)

    def can_resume(self, request: Request) -> bool:
        """Whether `resume` would find room now."""
        try:
            self._parking.check_room(request)
        except OutOfBlocksError:
            return False
        return self.has_slot

    def fork(self, request: Request, names: list[Hashable | None]) -> list[Request]:
        """Copies of a live request, one per id. Raises `NoFreeSlotError`, `OutOfBlocksError`."""
        request.check_accepted()
        self._book.settle_changes([request])
        cache, size, free = self._cache, self._steps.size, self._cache.num_slots_available(len(self._book.pinned()))
        if len(self._book.live) + len(names) > size.num_slots or len(names) > free:
            raise NoFreeSlotError(size.num_slots)
        used = self._layout.blocks_for(request.num_cached)
        places = [*range(self._publisher.would_share(request, request.num_cached), used)] * len(names)
        if error := cache.shortage(places):
            raise error
        request.keep_step()
        self._publisher.publish(request, request.num_cached)
        own = used - request.num_shared
        blocks = cache.acquire_blocks([*range(request.num_shared, used)] * len(names))
        slots = [cache.acquire_slot() for _ in names]
        return [
            self._child(request, name, slot, blocks[i * own : (i + 1) * own])
            for i, (name, slot) in enumerate(zip(names, slots, strict=True))
        ]

    def _child(self, parent: Request, name: Hashable | None, slot: int, own: list[int]) -> Request:
        """One fork; `own`: the blocks for what it does not share."""
        child = self._book.add(parent.tokens.copy(), parent.max_tokens, name, slot, self._steps.num_planned)
        child.ids.changed_from, child.ids.shortest = parent.ids.changed_from, parent.ids.shortest
        shared, pending = parent.num_shared, self._cache.copies
        child.num_prompt, child.num_cached, child.num_hit = parent.num_prompt, parent.num_cached, parent.num_cached
        child.junction, child.reuse, child.looked_up = parent.junction, parent.reuse, -1
        child.hasher = parent.hasher.copy() if parent.hasher is not None else None
        child.history, child.kept_from, child.torn = parent.history[: parent.num_cached], parent.num_cached, parent.torn
        child.forked = (parent.id, parent.last_step) if parent.forked is None else parent.forked
        child.copied = 0 if parent.forked is None else parent.copied
        child.nodes = self._cache.tree.acquire(parent.nodes[:shared])
        child.blocks = parent.blocks[:shared] + own
        for source, block in zip(parent.blocks[shared : shared + len(own)], own, strict=True):
            pending.blocks[block] = pending.blocks.get(source, source)
        if parent.restores is not None:
            self._cache.tree.snapshots.pin(parent.restores)
            child.restores = parent.restores
        elif parent.num_cached:
            pending.slots[slot] = pending.slots.get(parent.slot, parent.slot)
        return child

    # Where a request starts

    def _check_slot(self) -> None:
        """Raises `NoFreeSlotError` if no other request can become live."""
        if not self.has_slot:
            raise NoFreeSlotError(self._steps.size.num_slots)

    @property
    def has_slot(self) -> bool:
        """Whether another request can become live."""
        free = self._cache.num_slots_available(len(self._book.pinned()))
        return len(self._book.live) < self._steps.size.num_slots and free > 0

    def _hit(self, hasher: BlockHasher | None, num_tokens: int) -> Hit:
        """A slot, and what is cached of these tokens. Raises `NoFreeSlotError`."""
        match = None if hasher is None else self._cache.tree.match(hasher.digests, num_tokens)
        others = self._steps.size.num_slots - len(self._book.live) - 1
        return take_hit(self._cache, match, others=others, pinned=len(self._book.pinned()))

    def _use(self, request: Request, hit: Hit) -> None:
        request.nodes, request.restores, request.slot, junction = hit
        request.blocks = [node.block for node in hit.nodes]
        request.junction = junction * self._layout.block_tokens
        self._stand_at(request, len(hit.nodes))

    def _stand_at(self, request: Request, blocks: int) -> None:
        """It starts after cached blocks of the hasher's tokens: these are its history, whatever `tokens` says."""
        request.num_cached = request.num_hit = blocks * self._layout.block_tokens
        if request.hasher is not None and len(request.history) < request.num_cached:
            request.history = request.hasher.ids(request.num_cached)

    def _follow_verified(self, request: Request, hasher: BlockHasher | None) -> int:
        """Makes the hasher's tokens those that are certain to stand: computed, of the prompt, or sampled last.

        Returns how many tokens the request knows: one of them is left to compute.
        """
        if hasher is not None:
            follow_verified(request, hasher, self._layout.cfg.vocab_size, self._layout.draft_tokens)
        return len(request.ids)

    # Going

    def release(self, request: Request) -> None:
        """A live or preempted request has ended."""
        if request.state is RequestState.PREEMPTED:
            self._parking.drop(request)
        else:
            self._leave_slot(request, keep=True)
        self._book.remove(request)

    def check_resumable(self, request: Request) -> None:
        """Raises `RequestError` if the request, once preempted, could not be resumed."""
        request.check_accepted()
        if max(len(request.ids), len(request.history)) < request.num_cached:
            known = f"knows {len(request.ids)} of the {request.num_cached} tokens it has in the cache"
            raise RequestError(f"request {request.id!r} {known}: it could not be resumed")

    def preempt(self, request: Request) -> None:
        """A live, resumable request gives up slot and blocks."""
        request.keep_step()
        self._publisher.note(request, request.num_cached)
        self._publisher.publish(request, request.num_cached)
        request.parked = self._parking.park(request)
        self._leave_slot(request, keep=True, always=True)
        self._book.preempt(request)

    def empty_device(self) -> None:
        """Preempts all live requests and moves what is cached off the device. Raises `RequestError`."""
        requests, cache = self._book.requests, self._cache
        for request in requests:
            self.check_resumable(request)
        self._publisher.commit()
        for request in requests:
            self.preempt(request)
        cache.end_copies()
        cache.evict_all()
        self._steps.leave_arrays()

    @staticmethod
    def forget_computed(spec: HashSpec, requests: Iterable[Request]) -> None:
        """Makes preempted requests compute all their tokens again: nothing is cached any more, and digests are of
        `spec`."""
        for request in requests:
            request.parked, request.forked = None, None
            request.written, request.attached = [], []
            request.left_by = request.last_step = request.copied = request.started = 0
            if request.hasher is not None:
                request.hasher = request.hasher.of(spec)

    def _leave_slot(self, request: Request, *, keep: bool, always: bool = False) -> None:
        """Gives up slot and blocks. `keep`: for the cache, as the policy wants it; `always`: also the state."""
        slot, kept = request.slot, False
        if keep:
            final = self._publisher.final_tokens(request)
            self._publisher.publish(request, final)
            # A slot that is still to be copied from is no snapshot; nor is a copy of what another's last step may never
            # have written, as nobody could take that back.
            settled = request.num_cached == final and request.restores is None
            if settled and request.forked is None and slot not in self._cache.copies.slots.values():
                kept = self._publisher.keep_slot(request, always=always)
        self._let_go(request)
        if not kept:
            self._cache.release_slot(slot)

    def _let_go(self, request: Request) -> None:
        """Its blocks go back: shared ones to the tree, those only it has to the pool. It leaves the live ones."""
        shared, tree = request.num_shared, self._cache.tree
        for node in reversed(request.nodes[shared:]):
            tree.moves.abort(node)  # its block is among the request's
        tree.release(request.nodes[:shared])
        self._cache.release_blocks(request.blocks[shared:])
        if request.restores is not None:
            tree.snapshots.unpin(request.restores)
        self._publisher.forget(request)
        self._steps.forget_batch()
        self._book.leave(request)
        request.num_scheduled = request.loop = request.num_tabled = request.reserved = 0
        self._steps.newcomers.forget(request)
        request.torn, request.earlier, request.wanted = -1, [], []
        request.blocks, request.nodes, request.restores, request.rolling = [], [], None, None

    # Steps that did not run

    def abort(self, request: Request) -> None:
        """A live or preempted request has ended, and its last step did not run: see `LastStep`."""
        undo = LastStep.of(request, self._cache, self._publisher, self._book.requests, self._book.preempted)
        for other in undo.relying:
            self._stand_still(other)
        for other in undo.parked:
            self._parking.drop(other)
            other.forked = None
        if request.state is RequestState.PREEMPTED:
            self._parking.drop(request)
        else:
            self._leave_slot(request, keep=False)
        undo.take_back(self._cache)
        for other in undo.relying:
            self._start_anew(other)
        self._book.remove(request)

    def _stand_still(self, request: Request) -> None:
        """Takes from a request the blocks it shares and the state it stands on; it keeps slot and own blocks."""
        self._publisher.note(request, request.num_cached)
        request.keep_step()
        cache, shared = self._cache, request.num_shared
        for node in reversed(request.nodes[shared:]):
            cache.tree.moves.abort(node)  # its block is among the request's
        for block in request.blocks[shared:]:
            cache.copies.blocks.pop(block, None)
        cache.copies.slots.pop(request.slot, None)
        if request.restores is not None:
            cache.tree.snapshots.unpin(request.restores)
        cache.tree.release(request.nodes[:shared])
        request.blocks = request.blocks[shared:]
        request.nodes, request.restores, request.rolling, request.forked = [], None, None, None
        request.num_cached = request.num_hit = request.junction = request.num_tabled = 0
        request.torn = -1
        self._publisher.forget(request)
        self._steps.forget_batch()

    def _start_anew(self, request: Request) -> None:
        """Starts a request that stands still: from the longest cached prefix whose state is on the device."""
        tree, hasher = self._cache.tree, request.hasher
        request.started = self._steps.num_planned
        kept, request.blocks = request.blocks, []
        if hasher is not None:
            path = tree.match(hasher.digests, self._follow_verified(request, hasher)).path
            states = [i + 1 for i, n in enumerate(path) if n.snapshot is not None and n.snapshot.device]
            here = next((i for i, n in enumerate(path) if n.state.tier is not T.DEVICE), len(path))
            hit = max((end for end in states if end <= here), default=0)
            if len(path) > hit:
                request.junction = len(path) * self._layout.block_tokens
            if hit:
                nodes = tree.acquire(path[:hit])
                request.nodes, snapshot = nodes, nodes[-1].snapshot
                tokens = hit * self._layout.block_tokens
                if snapshot is None or not self._cache.get_state(snapshot.device, request.slot, tokens):
                    tree.snapshots.pin(nodes[-1])
                    request.restores = nodes[-1]
                self._stand_at(request, hit)
        shared = [node.block for node in request.nodes]
        request.blocks = shared + self._at_places(kept, len(shared))
        missing = range(len(request.blocks), self._layout.blocks_for(request.reserved))
        if missing and not self._cache.shortage(missing):
            request.blocks += self._cache.acquire_blocks(missing)
        request.reserved = min(request.reserved, len(request.blocks) * self._layout.block_tokens)

    def _at_places(self, blocks: list[int], first: int) -> list[int]:
        """The blocks that can be a request's from place `first` on, in that order; the others go back."""
        pool, kept = self._cache.blocks, list[int]()
        waiting: list[list[int]] = [[] for _ in range(pool.ranks)]
        for block in reversed(blocks):
            waiting[pool.rank_of(block)].append(block)
        while left := waiting[(first + len(kept)) % pool.ranks]:
            kept.append(left.pop())
        self._cache.release_blocks([block for left in waiting for block in left])
        return kept
