"""The manager: slots, blocks, prefixes and steps of requests. Pure Python + numpy, deterministic.

Every operation happens wholly or not at all: everything is checked, then changed. One thread drives it. What is
interrupted on its way (out of memory, Ctrl-C) leaves a manager that refuses everything but `reset()` (guard.py).

A step in four calls: `plan_step` reserves the blocks of the tokens it feeds, moves every request's
length ahead and returns the plan; `plan_tokens` lays the requests' token ids out for that plan;
`take_transfers` says what must travel between the tiers first (nothing without a host tier); after a
step of drafts, `accept` sets the length back to what was kept. Plans must run in the order made; if
one cannot run, `reset()`.

A slot's block-table columns beyond its own blocks keep what an earlier request left there. They are
ids in range and lie beyond everything a step of the plan's tokens may see or write.

The layers, each a file: request_book.py (who is there), stepping.py (steps), this one (how requests
come and go); below them tiered_cache.py (whose units these are) and publishing.py (what stays cached).
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence

from ..errors import ContextLimitError, HashError, NoFreeSlotError, OutOfBlocksError, PlanError, RequestError
from ..layout import CacheSize
from .allocator import as_count
from .guard import Guard
from .integrity import check_manager
from .last_step import LastStep
from .prefix.hashing import BlockHasher, MediaItem, Namespace
from .prefix.node import Node, T
from .request import Parked, Request, RequestState
from .stats import ManagerStats, collect, compute_block_budget
from .stepping import SteppingManager
from .tiered_cache import Hit
from .transfers import BLOCK, SLOT

__all__ = ["KVCacheManager"]


class KVCacheManager(SteppingManager):
    """Decides which slot and blocks hold which tokens of which request, and what stays cached where.

    Args:
        layout: of the cache.
        size: of the cache; blocks 1..num_blocks and slots 1..num_slots + num_snapshots are handed out,
            lowest first, at most num_slots of them to live requests; the others keep snapshots.
        policy: what to cache. None: nothing; blocks are free as soon as their request is released.
        host: records of the host tier, (num_blocks, num_snapshots): cached blocks and states that leave
            the device go there, and those of preempted requests. None: there is no host tier.
        salt: whatever else cached bytes depend on, such as the name of the weights.
        events: where cached blocks that come and go are told.
        arrays: size of the cache, if this manager is to hand out less than it holds (default: `size`). Plans are made
            for a cache of this size, and no other takes them. Two managers must not share a cache.

    Raises:
        LayoutError: `size` is larger than `arrays`, or that has more rows than int32 has numbers (see
            `CacheLayout.check_size`).
        HashError: the salt has no canonical bytes.
        PlanError: `host` is no pair of counts.
    """

    # Requests

    def admit_request(
        self,
        tokens: Iterable[int] = (),
        *,
        max_tokens: int | None = None,
        request_id: Hashable | None = None,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
    ) -> Request:
        """A new request in the lowest free slot.

        With a policy it starts with the longest cached prefix of its prompt that ends at a snapshot
        (`num_cached` tokens, at least the last one is left to compute). What of it is on the host
        travels with the next step's transfers. Blocks for other tokens are taken by the steps that need them.

        Args:
            tokens: prompt ids, may be empty.
            max_tokens: the most tokens it may ever hold, prompt and output together (default and
                at most `context_limit`).
            request_id: any hashable that equals itself and that no live or preempted request has; default: a
                number that only grows.
            namespace: who may share its blocks; requests of different namespaces never do.
            items: multimodal items of the prompt.

        Raises:
            NoFreeSlotError: all slots are taken.
            ContextLimitError: the prompt or `max_tokens` is beyond the limit.
            RequestError: the id is in use or cannot be one, or a token is no id of the model's vocabulary.
            HashError: no namespace, no items, a key of them without canonical bytes, or an empty item.
            PlanError: `max_tokens` or an item's position is no count.
        """
        self._guard.check()
        self._check_awake()
        ids = self._token_ids(tokens)
        name = "new" if request_id is None else request_id
        limit = self.context_limit if max_tokens is None else as_count("max_tokens", max_tokens, 1)
        if limit > self.context_limit:
            raise ContextLimitError(name, limit, self.context_limit)
        if len(ids) > limit:
            raise ContextLimitError(name, len(ids), limit)
        self._check_id(request_id)
        hasher = self._new_hasher(ids, namespace=namespace, items=items)
        with self._guard("admit_request"):
            try:
                self._check_slot()
            except NoFreeSlotError:
                self._cache.failures["slot"] += 1
                raise
            self._commit()
            hit = self._start(hasher, len(ids))
            request = self._new_request(ids.tolist(), limit, request_id, hit.slot)
            request.hasher = hasher
            self._use_hit(request, hit)
            return request

    def release_request(self, request: Request | int) -> None:
        """It has ended: its blocks and its slot go back; with a policy they stay cached while there is room.

        A preempted request may be released as well.

        Raises:
            RequestError: it is not live here (released before, another manager's, an unknown slot).
        """
        with self._guard("release_request"):
            if isinstance(request, Request) and self._is_preempted(request):
                self._drop_parked(request)
            else:
                request = self._checked(request)
                self._leave_slot(request, keep=True)
            self._forget(request)

    def abort_request(self, request: Request | int) -> None:
        """As `release_request`, for a request whose last step did not run: nothing of that step stays cached.

        What it filled and kept is taken out of the cache again, published or not. Other live requests that stand on
        it, or on copies that the same plan should have made, start anew from what is left: their `num_cached` is
        less then, down to 0, and they are fed again what they were fed. One that was fed by a later step says that
        this one ran, as plans run in the order made: what it uses stays. So of several steps that did not run, abort
        the requests of the latest first; of a request fed by two of them only the last step is taken back.

        Raises:
            RequestError: as `release_request`.
        """
        with self._guard("abort_request"):
            if not (isinstance(request, Request) and self._is_preempted(request)):
                request = self._checked(request)
            undo = LastStep.of(request, self._cache, self._publisher, self.requests, self.preempted)
            for other in undo.relying:
                self._stand_still(other)
            for other in undo.parked:
                self._drop_parked(other)
                other.forked = None
            if request.state is RequestState.PREEMPTED:
                self._drop_parked(request)
            else:
                self._leave_slot(request, keep=False)
            undo.take_back(self._cache)
            for other in undo.relying:
                self._start_anew(other)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._ids[request.id]
        request.state = RequestState.RELEASED

    def preempt(self, request: Request | int) -> None:
        """Takes the slot and the blocks from a live request; `resume` continues it, to the byte.

        Its full blocks stay cached while there is room. Its state, and the block it has begun, go to the
        host if there are records; else `resume` feeds again what lies behind the last cached snapshot.
        Results of steps still under way are for nobody (see `find`). A step not accepted is kept whole.

        Raises:
            RequestError: not live here, or it does not know its tokens (`request.tokens`).
        """
        with self._guard("preempt"):
            request = self._checked(request)
            self._check_resumable(request)
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        request.keep_step()
        self._publisher.note(request, request.num_cached)
        self._publisher.publish(request, request.num_cached)
        request.parked = self._park(request)
        self._leave_slot(request, keep=True, always=True)
        request.state, request.epoch = RequestState.PREEMPTED, self._new_epoch()
        request.slot = request.num_cached = 0

    def resume(self, request: Request) -> None:
        """Makes a preempted request live again, in any slot. `num_cached` says where it stands.

        What it was fed before is fed again as it was. Of the tokens appended since, those behind the first that
        was not part of the prompt may be drafts if the layout has any: they are computed, not looked up.

        Raises:
            RequestError: it is not preempted.
            NoFreeSlotError, OutOfBlocksError: then it stays preempted.
        """
        with self._guard("resume"):
            self._check_awake()
            if not isinstance(request, Request) or not self._is_preempted(request):
                raise RequestError(f"request {getattr(request, 'id', request)!r} is not preempted here")
            self._check_slot()
            self._check_room(request)
            self._commit()
            if not self._unpark(request):
                request.forked = None
                known = self._follow_verified(request, request.hasher)
                self._use_hit(request, self._start(request.hasher, known))
            self._drop_parked(request)
            request.started = self._steps
            self._live[request.slot], request.state = request, RequestState.LIVE

    def _follow_verified(self, request: Request, hasher: BlockHasher | None) -> int:
        """Makes the hasher's tokens those that are certain to stand: fed, of the prompt, or drawn last.

        Returns how many tokens the request knows: one of them is left to compute.
        """
        history, tokens = request.history, request.tokens
        if hasher is None:
            return len(tokens)
        certain = max(request.num_prompt, len(history) + 1) if self.layout.draft_tokens else len(tokens)
        ids = history[:]
        try:
            ids.extend(tokens[len(history) : certain])
            hasher.follow(ids.tobytes())
        except (HashError, OverflowError, TypeError):  # no ids: `plan_tokens` will say so
            ids = history
            hasher.follow(ids.tobytes())
        hasher.truncate(len(ids))
        return len(tokens)

    def fork(self, request: Request | int, *, request_ids: Sequence[Hashable | None] = (None,)) -> list[Request]:
        """Copies of a live request as it stands, one per id: n samples of one prompt.

        They share its full blocks. Its state, and blocks that are not cached, are copied by the next plan:
        its shape needs room for `len(request_ids)` more slot copies, and as many block copies per block
        that is not shared. The request's last step is kept whole.

        Raises:
            RequestError: not live here, or an id is in use or named twice.
            NoFreeSlotError, OutOfBlocksError: not all can be had; then there is none.
        """
        names = list(request_ids)
        with self._guard("fork"):
            self._check_awake()
            request = self._checked(request)
            for i, name in enumerate(names):
                self._check_id(name, names[:i])
            return self._fork(request, names)

    def _fork(self, request: Request, names: list[Hashable | None]) -> list[Request]:
        pinned = len(self._pinned())
        if len(self._live) + len(names) > self.size.num_slots or len(names) > self._cache.num_slots_available(pinned):
            raise NoFreeSlotError(self.size.num_slots)
        used = self.layout.blocks_for(request.num_cached)
        needed = (used - self._publisher.would_share(request, request.num_cached)) * len(names)
        if not self._cache.can_acquire(needed):
            raise OutOfBlocksError(needed, self._cache.num_available, self._cache.blocks.num_total)
        request.keep_step()
        self._publisher.publish(request, request.num_cached)
        shared = request.num_shared
        blocks = self._cache.acquire_blocks((used - shared) * len(names))
        slots = [self._cache.acquire_slot() for _ in names]
        return [self._child(request, name, slot, shared, used, blocks) for name, slot in zip(names, slots, strict=True)]

    def _child(
        self, parent: Request, name: Hashable | None, slot: int, shared: int, used: int, blocks: list[int]
    ) -> Request:
        """One fork; takes the blocks it needs from the front of `blocks`."""
        child = self._new_request(list(parent.tokens), parent.max_tokens, name, slot)
        child.num_prompt, child.num_cached, child.num_hit = parent.num_prompt, parent.num_cached, parent.num_cached
        child.hasher = parent.hasher.copy() if parent.hasher is not None else None
        child.history, child.kept_from = parent.history[:], parent.num_cached
        child.forked = (parent.id, parent.last_step) if parent.forked is None else parent.forked
        child.copied = 0 if parent.forked is None else parent.copied
        child.nodes = self._cache.tree.acquire(parent.nodes[:shared])
        own, blocks[: used - shared] = blocks[: used - shared], []
        child.blocks = parent.blocks[:shared] + own
        pending = self._cache.copies
        for source, block in zip(parent.blocks[shared:used], own, strict=True):
            pending.blocks[block] = pending.blocks.get(source, source)
        if parent.restores is not None:
            self._cache.tree.snapshots.pin(parent.restores)
            child.restores = parent.restores
        elif parent.num_cached:
            pending.slots[slot] = pending.slots.get(parent.slot, parent.slot)
        return child

    # Where requests start and stand

    def _check_resumable(self, request: Request) -> None:
        if len(request.tokens) < request.num_cached:
            known = f"knows {len(request.tokens)} of the {request.num_cached} tokens it has fed"
            raise RequestError(f"request {request.id!r} {known}: it could not be resumed")

    def _is_preempted(self, request: Request) -> bool:
        return self._ids.get(request.id) is request and request.state is RequestState.PREEMPTED

    def _pinned(self) -> set[Node]:
        """Nodes whose snapshots live requests have still to start from."""
        return {r.restores for r in self._live.values() if r.restores is not None}

    def _check_slot(self) -> None:
        """Raises `NoFreeSlotError` if no other request can become live."""
        if len(self._live) >= self.size.num_slots or self._cache.num_slots_available(len(self._pinned())) < 1:
            raise NoFreeSlotError(self.size.num_slots)

    def _start(self, hasher: BlockHasher | None, num_tokens: int) -> Hit:
        """A slot, and what is cached of these tokens. Raises `NoFreeSlotError`."""
        match = None if hasher is None else self._cache.tree.match(hasher.digests, num_tokens)
        others = self.size.num_slots - len(self._live) - 1
        return self._cache.start(match, others=others, pinned=len(self._pinned()))

    def _use_hit(self, request: Request, hit: Hit) -> None:
        request.nodes, request.restores, request.slot = hit
        request.blocks = [node.block for node in hit.nodes]
        self._stand_at(request, len(hit.nodes))

    def _stand_at(self, request: Request, blocks: int) -> None:
        """It starts after so many cached blocks of the hasher's tokens: these were fed then, whatever `tokens` says."""
        request.num_cached = request.num_hit = blocks * self.layout.block_tokens
        if request.hasher is not None and len(request.history) < request.num_cached:
            request.history = array("i")
            request.history.frombytes(request.hasher.ids(request.num_cached))

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
        request.num_cached = request.num_hit = request.num_tabled = 0
        self._publisher.forget(request)
        self._rows = None

    def _start_anew(self, request: Request) -> None:
        """Starts a request that stands still: from the longest cached prefix whose state is on the device."""
        tree, hasher = self._cache.tree, request.hasher
        request.started = self._steps
        if hasher is not None:
            path = tree.match(hasher.digests, self._follow_verified(request, hasher)).path
            states = [i + 1 for i, n in enumerate(path) if n.snapshot is not None and n.snapshot.device]
            here = next((i for i, n in enumerate(path) if n.state.tier is not T.DEVICE), len(path))
            hit = max((end for end in states if end <= here), default=0)
            if hit:
                nodes = tree.acquire(path[:hit])
                tree.snapshots.pin(nodes[-1])
                request.nodes, request.restores = nodes, nodes[-1]
                request.blocks = [node.block for node in nodes] + request.blocks
                self._stand_at(request, hit)
        missing = self.layout.blocks_for(request.reserved) - len(request.blocks)
        if missing > 0 and self._cache.can_acquire(missing):
            request.blocks += self._cache.acquire_blocks(missing)
        request.reserved = min(request.reserved, len(request.blocks) * self.layout.block_tokens)

    def _leave_slot(self, request: Request, *, keep: bool, always: bool = False) -> None:
        """Gives up slot and blocks. `keep`: for the cache, as the policy wants it; `always`: also the state."""
        slot, kept = request.slot, False
        if keep:
            self._publisher.publish(request, self._final_tokens(request))
            # A slot that is still to be copied from is no snapshot; nor is a copy of what another's last step may never
            # have written, as nobody could take that back.
            settled = request.num_cached == self._final_tokens(request) and request.restores is None
            if settled and request.forked is None and slot not in self._cache.copies.slots.values():
                kept = self._publisher.keep_slot(request, always=always)
        self._let_go(request)
        if not kept:
            self._cache.release_slot(slot)

    def _park(self, request: Request) -> Parked | None:
        """Queues the way to the host of what only this request has; None if there is no room, or nothing to park."""
        cache, first = self._cache, request.num_shared
        if request.restores is not None or request.slot in cache.copies.slots or not request.num_pending:
            return None
        if first * self.layout.block_tokens == request.num_cached and (request.forked is None or not first):
            return None  # its slot becomes a snapshot, or there is one already
        own = request.blocks[first : self.layout.blocks_for(request.num_cached)]
        blocks, snapshots = cache.try_host_blocks(len(own)), cache.try_host_snapshots(1)
        if len(blocks) < len(own) or not snapshots:
            cache.host_blocks.release(blocks)
            cache.host_snapshots.release(snapshots)
            return None
        for block, record in zip(own, blocks, strict=True):
            cache.transfers.out(BLOCK, block, record)
        cache.transfers.out(SLOT, request.slot, snapshots[0])
        return Parked(request.num_cached, first, blocks, snapshots[0])

    def _parked_path(self, request: Request) -> Sequence[Node] | None:
        """The shared blocks before what was parked; None if they are not all there, or nothing was parked."""
        parked = request.parked
        if parked is None or parked.num_cached >= len(request.tokens):
            return None
        digests = request.hasher.digests[: parked.first_block] if request.hasher is not None else []
        path = self._cache.tree.match(digests, len(request.tokens)).path
        return None if len(path) < parked.first_block or any(n.state.tier < T.HOST for n in path) else path

    def _check_room(self, request: Request) -> None:
        """Raises `OutOfBlocksError` if what was parked does not fit on the device, but the shared blocks before do."""
        path, parked = self._parked_path(request), request.parked
        if path is None or parked is None:
            return
        below = sum(node.state.tier is not T.DEVICE for node in path)
        stay = sum(node.state.tier is T.DEVICE and not node.refs for node in path)
        available = self._cache.num_available - stay + self._publisher.preview(self._final_tokens)[0]
        if below <= available < below + len(parked.blocks):
            raise OutOfBlocksError(below + len(parked.blocks), available, self._cache.blocks.num_total)

    def _unpark(self, request: Request) -> bool:
        """Whether what was parked and the shared blocks before it are all there: then they are the request's again."""
        cache, path, parked = self._cache, self._parked_path(request), request.parked
        if path is None or parked is None or not cache.load(path):
            return False
        nodes = cache.tree.acquire(path)
        if not cache.can_acquire(len(parked.blocks)):
            cache.tree.release(nodes)
            return False
        request.slot = self._start(None, 0).slot
        own = cache.acquire_blocks(len(parked.blocks))
        for record, block in zip(parked.blocks, own, strict=True):
            cache.transfers.into(BLOCK, record, block)
        cache.transfers.into(SLOT, parked.snapshot, request.slot)
        request.nodes, request.blocks = nodes, [node.block for node in nodes] + own
        request.num_cached = request.num_hit = parked.num_cached
        self._publisher.mark(request)
        return True

    def _drop_parked(self, request: Request) -> None:
        if request.parked is not None:
            self._cache.host_blocks.release(request.parked.blocks)
            self._cache.host_snapshots.release([request.parked.snapshot])
            request.parked = None

    # The whole cache

    def sleep(self) -> None:
        """Takes everything off the device, so that its arrays can be freed: live requests are preempted.

        What is cached or live goes to the host as far as there is room (the transfers follow from
        `take_transfers`; run them before freeing the arrays). Until `wakeup` no request is admitted or fed.

        Raises:
            RequestError: it sleeps already, or a live request does not know its tokens.
            PlanError: the transfers of the step before were not taken.
        """
        with self._guard("sleep"):
            self._check_taken()
            self._empty_device()
            self._asleep = True

    def _empty_device(self) -> None:
        self._check_awake()
        for request in self.requests:
            self._check_resumable(request)
        self._commit()
        for request in self.requests:
            self._preempt(request)
        self._cache.end_copies()
        self._cache.evict_all()
        self._step_transfers = self._cache.drain()

    def wakeup(self) -> None:
        """The device arrays are there again, with any content. Raises `RequestError` if it does not sleep."""
        with self._guard("wakeup"):
            if not self._asleep:
                raise RequestError("the manager does not sleep")
            self._asleep = False

    def resize(self, size: CacheSize) -> None:
        """From now on the cache has another size, larger or smaller; live requests are preempted, as by `sleep`.

        Run the transfers that follow (`take_transfers`) on the old arrays, then make new ones with
        `init_cache(layout, size)`, of any content; `resume` continues the requests. The host tier stays as it is.

        Raises:
            LayoutError: the size has more rows than int32 has numbers.
            PlanError: not a `CacheSize`, or the transfers of the step before were not taken.
            ContextLimitError: a live or preempted request may grow beyond the new context limit.
            RequestError: as `sleep`.
        """
        with self._guard("resize"):
            if not isinstance(size, CacheSize):
                raise PlanError(f"the new size must be a CacheSize, got {type(size).__name__}")
            self._check_taken()
            limit = self._context_limit(size)
            for request in self._ids.values():
                if request.max_tokens > limit:
                    raise ContextLimitError(request.id, request.max_tokens, limit)
            self.layout.check_size(size)
            self._empty_device()
            self._cache.resize(size)
            self.size = self.arrays = size
            self._rows = None

    def reset(self) -> None:
        """Forgets every request and all that is cached; requests admitted before are refused from now on.

        The one call that is possible after one was interrupted (`ManagerInterruptedError`).
        """
        guard = Guard()
        with guard("reset"):
            self._guard = guard  # which has begun: there is no instant at which another call could pass
            for request in self._ids.values():
                request.blocks, request.nodes, request.restores, request.parked = [], [], None, None
                request.state = RequestState.RELEASED
            self.generation += 1
            if self.events is not None:
                self.events.emit("cleared", T.NONE)
            self._clear()

    # Books

    def memory_bytes(self) -> int:
        """Bytes of the cache this manager manages: exactly what `init_cache` allocates."""
        self._guard.check()
        return self.layout.total_bytes(self.arrays)

    compute_block_budget = staticmethod(compute_block_budget)

    def stats(self) -> ManagerStats:
        """Where everything is, and what has happened so far. Raises `IntegrityError` if a unit is unaccounted for."""
        self._guard.check()
        return collect(self)

    def check_integrity(self) -> None:
        """The books agree with each other. For tests: O(blocks). Raises `IntegrityError`."""
        self._guard.check()
        check_manager(self)
