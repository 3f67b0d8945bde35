"""The manager: slots, blocks, prefixes and steps of requests. Pure Python + numpy, deterministic.

Every operation happens wholly or not at all: everything is checked, then changed. What is interrupted on its way (out
of memory, Ctrl-C) leaves a manager that refuses everything but `reset()`. It takes one call at a time, from any thread:
one that begins while another is under way is refused, and changes nothing (guard.py). `stats` is for all threads.

A step in four calls: `plan_step` reserves the blocks of the tokens scheduled, moves every request's
length ahead and returns the plan; `plan_tokens` lays the requests' token ids out for that plan;
`take_transfers` says what must travel between the tiers first (nothing without a host tier); after a
step of drafts, `accept` sets the length back to what was kept. Plans must run in the order made; if
one cannot run, `reset()`.

A slot's block-table columns beyond its own blocks keep what an earlier request left there. They are
ids in range and lie beyond everything a step of the plan's tokens may see or write: a plan says how far its blocks
reach (`StepPlan.seq_stop`), and a loop of steps ends there.

How the parts fit, each with its own state and rules, and none that knows the ones above it:

    KVCacheManager   the public calls: what callers name is checked, `guard` closes what was interrupted
      lifecycle      how requests come and go: admit, fork, preempt, resume, release, abort
      steps          plans of steps, their token ids, what of a step is kept
      newcomers      who waits for what others are computing, and what it finds then
      leases         what of it other hosts may read
      publisher      what requests leave in the prefix tree: full blocks, snapshots
      cache          the units of all tiers, the prefix tree over them, copies that wait for a plan
      book           who is there: requests by slot and by id
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, get_args

import numpy as np

from ..checks import INT32_MAX, check_boolean, check_integer, shown
from ..errors import (
    ContextLimitError,
    HandoffError,
    LayoutError,
    ManagerBusyError,
    NoFreeSlotError,
    OutOfBlocksError,
    PlanError,
    RequestError,
)
from ..events import EventLog
from ..layout import CacheLayout, CacheSize, check_layout
from ..plan import StepPlan
from .guard import Guard
from .handoff import Handoff, check_lease_seconds, check_peer
from .integrity import check_manager
from .leases import Leases
from .lifecycle import Lifecycle
from .metrics import HandoffCounts, ManagerStats
from .policies import CachePolicy
from .prefix.hashing import BlockHasher, HashSpec, Key, MediaItem, Namespace
from .prefix.node import T
from .prefix.token_ids import packed_ids, token_ids
from .publishing import Publisher
from .remote_tier import Arrival, end_arrival
from .request import Request, RequestRef, Reuse
from .request_book import RequestBook
from .request_tokens import PromptIds
from .scheduling import Scheduled
from .stats import collect, compute_block_budget
from .step_shape import StepShape
from .steps import Steps
from .tiered_cache import HostSize, TieredCache
from .transfers import Transfers

__all__ = ["KVCacheManager"]


class _Same(enum.Enum):
    """What `weights_id` is where no other is given: None is the id of weights without a name."""

    SAME = "same"


_SAME = _Same.SAME


class KVCacheManager:
    """Decides which slot and blocks hold which tokens of which request, and what stays cached where.

    Args:
        layout: of the cache.
        size: of the cache; blocks 1..num_blocks and slots 1..num_slots + num_snapshots are handed out,
            lowest first, at most num_slots of them to live requests; the others keep snapshots.
        policy: what to cache. None: nothing; blocks are free as soon as their request is released.
        host: pages of the host tier: cached blocks and states that leave the device go there, and those of
            preempted requests. None: there is no host tier.
        weights_id: names the weights, and whatever else cached bytes depend on: other weights, other digests. `wakeup`
            and `reset` take that of other weights; storage and other hosts need one.
        events: the log of cached blocks that come and go.
        arrays: size of the cache, if this manager is to hand out less than it holds (default: `size`). Plans are made
            for a cache of this size, and no other takes them. Two managers must not share a cache.
        clock: what leases are measured with, in seconds.

    Attributes:
        clock: see above.
        handoffs: counts of prompts that went to other hosts or came from them.
        book, cache, publisher, leases, steps, lifecycle, guard: the parts (see the module). Read them as you like; what
            changes them goes through the calls below.

    Raises:
        LayoutError: `size` is larger than `arrays`, or that has more rows than int32 has numbers (see
            `CacheLayout.check_size`), or one of these is none.
        RequestError: the weights' id has no canonical bytes.
        PlanError: `policy` is no `CachePolicy`, or `host` no pair of counts.

    Warns:
        PerformanceWarning: hardly a prompt will hit: the policy keeps no states, or no slot is left for any beside the
            live request's (what still counts: the slot of one that ends at a block boundary, or is preempted there).
    """

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        *,
        policy: CachePolicy | None = None,
        host: HostSize | None = None,
        weights_id: Key = None,
        events: EventLog | None = None,
        arrays: CacheSize | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        check_layout(layout)
        layout.check_size(size)
        arrays = arrays or size
        layout.check_size(arrays)
        if not arrays.holds(size):
            raise LayoutError(f"{size} does not fit a cache of {arrays}")
        if policy is not None and not isinstance(policy, CachePolicy):
            raise PlanError(f"policy must be a CachePolicy or None, got {shown(policy)}")
        self.layout, self.policy, self.host_size, self.events = layout, policy, _host_size(host), events
        self._needs_id = False
        self._weights_id, self._hash_spec = weights_id, self._spec_of(weights_id)
        if policy is not None:
            policy.warn_if_vain(size)
        self.guard, self.book, self.clock, self.handoffs = Guard(), RequestBook(), clock, HandoffCounts()
        self._persists = False
        self._begin(size, arrays)
        self._seen = self._collect()

    def _begin(self, size: CacheSize, arrays: CacheSize, before: TieredCache | None = None) -> None:
        """All parts but the book, with nothing in them. Pages that other hosts' records are written to stay taken."""
        self._asleep = False
        cache = TieredCache(self.layout, size, self.policy, self.host_size, self.events, persists=self._persists)
        if before is not None:
            self.leases.forget()
            cache.keep_reading(before)
            before.transfers.close()
        self.cache = cache
        self.publisher = Publisher(self.layout, self.cache)
        self.leases = Leases(self.layout, self.cache, self.publisher, self.clock, self.handoffs)
        self.steps = Steps(self.layout, size, arrays, self.book, self.cache, self.publisher)
        self.lifecycle = Lifecycle(self.layout, self.book, self.cache, self.publisher, self.steps)

    def _spec_of(self, weights_id: Key, *, needed: bool = False) -> HashSpec:
        """What digests of these weights share. Raises `RequestError`."""
        layout = self.layout
        if (needed or self._needs_id) and weights_id is None:
            raise RequestError(
                "without a weights_id, rows of other weights would be found in storage or on other hosts"
            )
        return HashSpec(layout.block_tokens, (layout.block_fingerprint, weights_id), layout.cfg.vocab_size)

    @property
    def weights_id(self) -> Key:
        """The name of the weights that cached bytes are of. `wakeup` and `reset` take another."""
        return self._weights_id

    @property
    def hash_spec(self) -> HashSpec:
        """What all digests of these weights share: small, and the same in every process of a deployment."""
        return self._hash_spec

    @property
    def size(self) -> CacheSize:
        """The size of the cache that is handed out: what may be live and cached now."""
        return self.steps.size

    @property
    def arrays(self) -> CacheSize:
        """The size of the device arrays, which plans are made for."""
        return self.steps.arrays

    @property
    def generation(self) -> int:
        """How often the manager was reset."""
        return self.book.generation

    @property
    def context_limit(self) -> int:
        """Tokens that one request can hold: the block table's width, and the model's own limit."""
        return self._context_limit(self.size)

    @property
    def pool_limit(self) -> int:
        """Tokens of one request that all blocks together hold, whoever shares them: it may be less than its limit."""
        return self.steps.pool_limit

    def _context_limit(self, size: CacheSize) -> int:
        return min(size.max_blocks_per_request * self.layout.block_tokens, self.layout.cfg.max_position_embeddings)

    # Requests

    @property
    def requests(self) -> tuple[Request, ...]:
        """The live requests, in the order they became live."""
        return self.book.requests

    @property
    def preempted(self) -> tuple[Request, ...]:
        """The preempted requests, in the order they were admitted."""
        return self.book.preempted

    def find(self, ref: RequestRef) -> Request | None:
        """The live request that `ref` was made of; None if it was released or preempted since.

        For results of steps that were under way: what comes late belongs to no request any more.

        Raises:
            RequestError: it is no `RequestRef`.
        """
        self.guard.check()
        if not isinstance(ref, RequestRef):
            raise RequestError(f"not a RequestRef: {shown(ref)}")
        return self.book.find(ref)

    def digests(
        self, tokens: Iterable[int], *, namespace: Namespace | None = None, items: Iterable[MediaItem] = ()
    ) -> list[bytes]:
        """Returns the digests of a prompt's full blocks, in path order: their names in the `EventLog` and in storage.

        For routers; nothing is looked up, and nothing changes. A prompt of any length has them. A process
        without a manager makes the same ones with `BlockHasher(manager.hash_spec, tokens, ...).digests`.

        Raises:
            PlanError, RequestError: as `KVCacheManager.admit_request` for these arguments.
        """
        ids = token_ids(tokens, self.layout.cfg.vocab_size)
        return BlockHasher(self.hash_spec, ids, namespace=namespace, items=items).digests

    def admit_request(
        self,
        tokens: Iterable[int] = (),
        *,
        max_tokens: int | None = None,
        request_id: Hashable | None = None,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
        reuse: Reuse = "output",
    ) -> Request:
        """Returns a new request in the lowest free slot.

        With a policy it starts with the longest cached prefix of its prompt that ends at a snapshot
        (`num_cached` tokens, at least the last one is left to compute), and is matched again by `schedule` before its
        first chunk. What of it is on the host travels with the next step's transfers. Blocks for other tokens are taken
        by the steps that need them.

        Args:
            tokens: prompt ids, may be empty.
            max_tokens: the most tokens it may ever hold, prompt and output together (default and
                at most `context_limit`).
            request_id: any hashable that equals itself and that no live or preempted request has; default: a
                number that only grows.
            namespace: who may share its blocks; requests of different namespaces never do.
            items: multimodal items of the prompt.
            reuse: where the next turn goes on: from the "output", or only from the "prompt", as where a thinking chat
                drops the reasoning. Then a state is kept at the end of the prompt, and none behind it.

        Raises:
            NoFreeSlotError: all slots are taken.
            ContextLimitError: the prompt or `max_tokens` is beyond the context limit, or all blocks together
                (`pool_limit`) do not hold the prompt, and one token after it where `max_tokens` asks for more.
            RequestError: it sleeps; the id is in use or cannot be one, or a token is no id of the model's vocabulary.
            RequestError: no namespace, no items, a key of them without canonical bytes, or an empty item.
            RequestError: `reuse` is neither "output" nor "prompt".
            PlanError: `max_tokens` or an item's position is no count.
        """
        if reuse not in get_args(Reuse):
            raise RequestError(f'reuse must be "output" or "prompt", got {shown(reuse)}')
        space = dict(namespace=namespace, items=items)
        return self._admit("admit_request", tokens, max_tokens, request_id, space, reuse=reuse)

    def _admit(
        self,
        call: str,
        tokens: Iterable[int],
        max_tokens: int | None,
        request_id: Hashable | None,
        space: dict[str, Any],
        arrival: Arrival | None = None,
        reuse: Reuse = "output",
    ) -> Request:
        self.guard.check()
        ids = packed_ids(tokens, self.layout.cfg.vocab_size)
        known = PromptIds.of(ids, self.book.edits)  # the others are the hasher's
        limit = None if max_tokens is None else check_integer("max_tokens", max_tokens, 1, error=PlanError)
        fits = len(ids) <= min(self.context_limit, self.pool_limit)  # else it is refused below
        hasher = self._new_hasher(ids, **space) if fits else None
        with self.guard(call):  # whatever may be another's by now is looked at in here
            self._check_awake()
            if arrival is not None and arrival.closed:
                raise RequestError("the arrival was admitted or closed before")
            self.book.check_id(request_id)
            if hasher is not None and hasher.spec is not self._hash_spec:
                hasher = hasher.of(self._hash_spec)
            with self._counting_failures():
                limit = self._check_limit("new" if request_id is None else request_id, len(ids), limit)
                self.leases.expire()
                request = self.lifecycle.admit(known, limit, request_id, hasher)
                request.reuse = reuse
            if arrival is not None:
                end_arrival(arrival, self.cache)
            return request

    def _check_limit(self, name: Hashable, num_tokens: int, max_tokens: int | None) -> int:
        """The most tokens that a new request of so many may hold. Raises `ContextLimitError`."""
        highest = self.context_limit
        limit = highest if max_tokens is None else max_tokens
        if limit > highest:
            raise ContextLimitError(name, limit, highest)
        if num_tokens > limit:
            raise ContextLimitError(name, num_tokens, limit)
        self.steps.check_pool(name, num_tokens if max_tokens is None else min(num_tokens + 1, limit))
        return limit

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """Counts why a request does not become live (see `CacheStats.admission_failures`)."""
        try:
            yield
        except (ContextLimitError, NoFreeSlotError, OutOfBlocksError) as error:
            self.cache.failures[_what_bound(error)] += 1
            raise

    def can_admit(self, num_tokens: int = 0, *, max_tokens: int | None = None) -> bool:
        """Whether `admit_request` would find a slot now for a prompt of so many tokens: for who waits for one.

        Nothing changes, and nothing is counted as a failure. False: not now (or it sleeps). From any thread; what is
        true may be past when it is acted upon.

        Args:
            num_tokens: of the prompt.
            max_tokens: as in `admit_request`.

        Raises:
            ContextLimitError: it never can: as `admit_request`.
            PlanError: a number is no count.
            ManagerBusyError: another call has been under way for a second.
        """
        count = check_integer("num_tokens", num_tokens, error=PlanError)
        limit = None if max_tokens is None else check_integer("max_tokens", max_tokens, 1, error=PlanError)
        self._check_limit("new", count, limit)
        return self.guard.read(lambda: not self._asleep and self.lifecycle.has_slot)

    def release_request(self, request: Request) -> None:
        """It has ended: its blocks and its slot go back; with a policy they stay cached while there is room.

        A preempted request may be released as well.

        Raises:
            RequestError: it is not live here (released before, another manager's), or no `Request`: an integer may
                be an id or a slot. So in all calls that take one.
        """
        with self.guard("release_request"):
            self.lifecycle.release(self.book.find_known(request))

    def abort_request(self, request: Request) -> None:
        """Releases a request whose last step did not run: nothing of that step stays cached.

        What it filled and kept is taken out of the cache again, published or not. Other live requests that stand on
        it, or on copies that the same plan should have made, start anew from what is left: their `num_cached` is
        less then, down to 0, and they compute again what they had computed. One that is part of a later step says that
        this one ran, as plans run in the order made: what it uses stays. So of several steps that did not run, abort
        the requests of the latest first; of a request that is part of two of them only the last step is taken back.

        Raises:
            RequestError: as `release_request`.
        """
        with self.guard("abort_request"):
            request = self.book.find_known(request)
            self.leases.cancel(request)
            self.lifecycle.abort(request)

    def preempt(self, request: Request) -> None:
        """Takes the slot and the blocks from a live request; `resume` continues it, to the byte.

        Its full blocks stay cached while there is room. Its state, and the block it has begun, go to the
        host if there are records; else `resume` computes again what lies behind the last cached snapshot.
        Results of steps still under way belong to no request any more (see `find`). A step not accepted is kept whole.

        Raises:
            RequestError: not live here, or it does not know its tokens (`request.tokens`).
        """
        with self.guard("preempt"):
            request = self.book.find_live(request)
            self.lifecycle.check_resumable(request)
            self.lifecycle.preempt(request)

    def resume(self, request: Request) -> None:
        """Makes a preempted request live again, in any slot. `num_cached` says where it stands.

        What it has computed before is computed again with the same ids, unless `tokens` were changed since: then it
        goes on from what is there of them. Of the tokens appended since, those behind the first that was not part of
        the prompt may be drafts if the layout has any: they are computed, not looked up.

        Raises:
            RequestError: it is not preempted.
            NoFreeSlotError, OutOfBlocksError: then it stays preempted.
        """
        with self.guard("resume"):
            self._check_awake()
            self._check_preempted(request)
            with self._counting_failures():
                self.lifecycle.resume(request)

    def can_resume(self, request: Request) -> bool:
        """Whether `resume` would find room for a preempted request now: for who waits for it, as `can_admit`.

        Raises:
            RequestError: as `resume`, but for a manager that sleeps.
        """
        with self.guard("can_resume"):
            self._check_preempted(request)
            return not self._asleep and self.lifecycle.can_resume(request)

    def _check_preempted(self, request: Request) -> None:
        if not isinstance(request, Request) or not self.book.is_preempted(request):
            raise RequestError(f"request {shown(getattr(request, 'id', request))} is not preempted here")

    def fork(self, request: Request, *, request_ids: Sequence[Hashable | None] = (None,)) -> list[Request]:
        """Copies of a live request as it stands, one per id: n samples of one prompt.

        They share its full blocks. Its state, and blocks that are not cached, are copied by the next plan:
        its shape needs room for `len(request_ids)` more slot copies, and as many block copies per block
        that is not shared. The request's last step is kept whole.

        Raises:
            RequestError: not live here, or an id is in use or named twice; or its `tokens` were changed where they are
                computed.
            PlanError: `request_ids` are no list of them.
            NoFreeSlotError, OutOfBlocksError: there is no room for all; then there is none.
        """
        names = _listed("request_ids", request_ids)
        with self.guard("fork"):
            self._check_awake()
            request = self.book.find_live(request)
            for i, name in enumerate(names):
                self.book.check_id(name, names[:i])
            with self._counting_failures():
                return self.lifecycle.fork(request, names)

    # Other hosts (docs/remote.md)

    def export_request(self, request: Request, *, seconds: float = 60.0, peer: str | None = None) -> Handoff:
        """What another host needs to go on with a live request: its full blocks so far, and the state after the last.

        Call it while the prompt is being computed, for the blocks that have become full (streaming), and once more when
        a step has reached the last block boundary before the end of `request.tokens`; `Handoff.last` says that all is
        told. Copies to the host that it asks for travel with the transfers of the next step, or of `flush`; then send
        it with the checksums of its pages (`Handoff.vouched`). Until `acknowledge`, or for `seconds` from the latest
        call, these host copies stay where they are; device blocks and slots do not wait for that. The request may end
        meanwhile.

        Leases hold no more than the policy's `LeaseShares`: room beyond that, and room that the host has not, is made
        by ending older leases. Where there is none to be made, what is told is less, and `Handoff.last` is not set.

        Args:
            seconds: how long the lease lasts.
            peer: the name of the host that it is for (`RecordTransport.name` there), which alone may acknowledge it;
                None: whoever is told of it.

        Raises:
            HandoffError: there is no policy or no host tier, an impossible time, or the lease is another peer's.
            RequestError: it is not live here, or its `tokens` were changed where they are computed.
        """
        seconds = check_lease_seconds(seconds)
        with self.guard("export_request"):
            return self.leases.export(self.book.find_live(request), seconds, check_peer(peer))

    def export_again(self, lease: str, first: int = 0, *, peer: str | None = None) -> Handoff | None:
        """Announces again what `export_request` has announced under this lease, from this block on.

        This is for a hand-off that was lost. The lease lasts no longer for that, and the request may have ended. None:
        there is no such lease (any more), or nothing was announced from there on.

        Args:
            peer: who asks: it is answered of its leases only, and of those that name no peer; None: this host.

        Raises:
            HandoffError: `first` is not an integer >= 0.
        """
        start = check_integer("first", first, error=functools.partial(HandoffError, "first"))
        with self.guard("export_again"):
            return self.leases.export_again(lease, start, peer)

    def acknowledge(self, lease: str, *, peer: str | None = None) -> bool:
        """Nobody will read what is under this lease any more. Whether there was such a lease.

        Args:
            peer: who says so: it ends its leases only, and those that name no peer; None: this host takes it back.

        There is none any more after the first acknowledgement, when its time is over, after `abort_request` of what
        was exported, and after `reset`; what another host says of one then changes nothing.
        """
        with self.guard("acknowledge"):
            return self.leases.acknowledge(lease, peer)

    def flush(self) -> None:
        """What waits to travel between device and host need not wait for another step: `take_transfers` follows.

        Call it when the step planned last was dispatched.

        Raises:
            PlanError: the transfers of the step before were not taken.
        """
        with self.guard("flush"):
            self.steps.check_taken()
            self.steps.drain()

    def admit_remote(
        self, arrival: Arrival, *, max_tokens: int | None = None, request_id: Hashable | None = None
    ) -> Request:
        """A new request of a prompt whose prefix has come from another host (`RemoteTier`): a hit like any other.

        At any time: what has not come by now is computed here. Nobody waits for the arrival afterwards.

        Raises: as `admit_request`; then the arrival waits on. `RequestError` also for an arrival that was admitted or
            closed before, or is another manager's.
        """
        if not isinstance(arrival, Arrival) or arrival.closed or arrival.manager is not self:
            raise RequestError(f"not an arrival that is waited for here: {shown(type(arrival))}")
        space = dict(namespace=arrival.namespace, items=arrival.items)
        return self._admit("admit_remote", arrival.tokens, max_tokens, request_id, space, arrival)

    # Steps

    def reserve(self, request: Request, tokens: int) -> None:
        """Takes the blocks of its first `tokens` tokens now, so that steps up to there cannot run out.

        Raises:
            ContextLimitError, OutOfBlocksError, RequestError: as in `plan_step`.
        """
        with self.guard("reserve"):
            self.steps.reserve(self.book.find_live(request), check_integer("tokens", tokens, error=PlanError))

    def schedule(
        self,
        token_budget: int,
        *,
        max_sequences: int | None = None,
        max_chunk: int | None = None,
        shape: StepShape | None = None,
        requests: Iterable[Request] | None = None,
        ahead: bool = False,
    ) -> list[tuple[Request, int]]:
        """How many pending tokens of which requests the next step computes; `plan_step` takes the pairs as they are.

        First every request with one pending token (a decode), the least recently scheduled first; then
        chunks of the others in admission order, as far as tokens, sequences and blocks reach. One of which nothing is
        computed yet is matched again first, so that its `num_cached` may grow here; and while another one computes what
        it shares, and is offered tokens, it waits, and that one comes before it. A chunk
        that lacks blocks holds back those behind it. So nobody starves: decodes take turns and end,
        and only the chunks that wait behind them make new ones. A chunk ends where the policy wants
        a snapshot. Tokens beyond a request's `max_tokens` (`Request.num_excess`), or beyond the columns of the
        shape, are never offered. An empty result while others are pending means that blocks must be freed
        first: release or preempt a request. If nothing can be offered and a request has more tokens than all blocks
        together hold (`pool_limit`), no preemption helps: that is an error, until it is released.

        Args:
            token_budget: most tokens of the step.
            max_sequences: most requests of the step.
            max_chunk: most tokens of one request.
            shape: the pinned shape the step must fit.
            requests: those to choose from, in the order of their turn for chunks; default: all live ones.
            ahead: the step planned last is under way, and its tokens are fed from the device: a request all of whose
                tokens are computed once it has run, the last of them by it, is offered one more, which that step draws.
                Leave out of `requests` those that are to draw nothing more.

        Raises:
            PlanError: a number below 1, no shape, or one with more columns than the block table, or `ahead` is no bool.
            RequestError: one of `requests` is not live here.
            ContextLimitError: a request has outgrown all blocks, see above.
        """
        budget = check_integer("token_budget", token_budget, 1, error=PlanError)
        most = budget if max_sequences is None else check_integer("max_sequences", max_sequences, 1, error=PlanError)
        chunk = budget if max_chunk is None else check_integer("max_chunk", max_chunk, 1, error=PlanError)
        requests = None if requests is None else _listed("requests", requests)
        ahead = check_boolean("ahead", ahead, error=PlanError)
        self.steps.check_shape(shape)
        with self.guard("schedule"):
            self.leases.expire()
            chosen = self.requests if requests is None else self.book.find_all_live(requests)
            return self.steps.schedule(chosen, (budget, most), chunk, shape, ahead)

    def plan_step(
        self,
        scheduled: Iterable[Scheduled],
        *,
        steps: int = 1,
        shape: StepShape | None = None,
        ahead: bool = False,
    ) -> StepPlan:
        """Plans one step: `n` tokens of every `(request, n)`; or the first of `steps` decode or verify steps.

        A sequence of one token is a decode, of up to 1 + draft_tokens tokens a verify step that `accept`
        may cut, of more a prefill chunk that is final. Kinds mix freely. With `steps` = K the plan serves K
        steps, and their blocks and table entries are all in it. Sequences of one token decode, each step is
        `plan.advance()` of the one before. Those of more verify (`model.draft_loop`): how far they come is not known
        before `accept`, without which they can be released, but neither planned nor preempted or forked. Afterwards
        every request counts its tokens of all K steps as cached. Nothing scheduled at all is a step of padding.

        Args:
            scheduled: tokens of the step, each request at most once.
            steps: K.
            shape: pins the plan's static sizes, so that steps of different sizes share one
                executable (see `pinned_shape`); default: what the sequences need, in powers of two.
            ahead: what the steps before with drafts of the device keep is not known yet. For requests that have such
                steps the plan's positions and `num_cached` are the most there can be, and blocks are reserved for
                these; the true ones are on the device (`model.ahead.moved`). `accept` says for each of their plans, in
                the order made, what it kept. Without drafts nothing has to be said.

        Raises:
            RequestError: a request is not live here, a chunk goes beyond the tokens that the request knows, or K > 1
                steps are to sample what it knows already. (None of a chunk, or of a decode or verify step, may be known
                here: sampled on the device, or kept elsewhere.) Or its `tokens` were changed where they are computed.
            ContextLimitError: a request would outgrow its `max_tokens`, or all blocks together do not hold one token of
                it for each step.
            OutOfBlocksError: the step needs more blocks than are free.
            PlanError: a count < 1, a request named twice, K steps of more than 1 + draft_tokens tokens, a request whose
                K steps were not accepted, the shape is too small, or transfers of before (`take_transfers`) were not
                taken, or not run before `sleep` or `resize`. Whatever is raised, nothing has changed.
        """
        scheduled = _listed("scheduled", scheduled)
        with self.guard("plan_step"):
            count = check_integer("steps", steps, 1, INT32_MAX, error=PlanError)
            ahead = check_boolean("ahead", ahead, error=PlanError)
            self._check_awake()
            return self.steps.plan(scheduled, count, shape, ahead)

    def plan_tokens(self, plan: StepPlan, *, unknown: int | None = None) -> np.ndarray:
        """Returns the token ids of a plan, [T] int32 in its order (padding: 0), from the requests' `tokens`.

        They are noted as what the plan computes: a second call gives the same, whatever `tokens` says by then.
        Call it before the requests are released. For a plan of K steps: the tokens of the first.

        Args:
            unknown: a number below 0 that stands where `tokens` does not reach: the step takes these ids from the
                device. Nothing is noted of them before they are appended. Default: that is an error.

        Raises:
            RequestError: a request of the plan is gone, does not know its tokens of it, or its `tokens` were changed
                where they are computed.
            PlanError: the plan was made for another layout or size.
            PlanError: it is no plan of `plan_step` (packed, say, or stacked), or `unknown` is no number below 0.
        """
        if not isinstance(plan, StepPlan):
            raise PlanError(f"plan_tokens takes the StepPlan that plan_step gave, got {type(plan).__name__}")
        if unknown is not None:
            unknown = check_integer("unknown", unknown, -INT32_MAX - 1, -1, error=PlanError)
        with self.guard("plan_tokens"):
            return self.steps.tokens(plan, unknown)

    @property
    def has_transfers(self) -> bool:
        """Whether copies must run before the step planned last that nobody has taken since it was planned.

        They are those asked for by that step, and those of earlier steps that were taken and did not run.
        """
        return bool(self.steps.transfers) and not self.steps.transfers.ran

    def take_transfers(self) -> Transfers:
        """What must travel between the tiers before the step planned last runs, stage by stage, in this order.

        `dsv4_jax.run_transfers(cache, host, stages)` runs them. Without a host tier there never is any;
        with one, call it after every `plan_step` (and after `sleep` or `resize`), before the step. Every copy runs
        once: those that were taken for an earlier step and did not run, since it was lost with them, come first.
        """
        with self.guard("take_transfers"):
            stages, self.steps.transfers = self.steps.transfers, Transfers()
            return stages

    def accept(self, request: Request, n_kept: int, *, steps: int | None = None) -> None:
        """Keeps the first `n_kept` tokens of the request's last step; the others were never there.

        Of plans made ahead (`plan_step(ahead=True)`): of the first of them that nothing was said of; those behind go on
        where it ends. Rejected ids also leave `request.tokens`. Blocks that hold no kept token go back to the pool
        (unless reserved); their table entries are set again before they are next used. A step that is
        not accepted before the request's next one is kept whole. After a step of 1 + draft_tokens tokens of which none
        is kept, the request's state is not cached, nor parked by `preempt`, before its next step.

        Args:
            n_kept: 0..n of the n tokens scheduled. Less than n only if the device state before them is
                still whole: the layout has draft_tokens > 0 and n <= 1 + draft_tokens. Of K steps of several tokens
                what they kept in all, at least K.
            steps: how many of the plan's K steps ran, at least 1, of a loop that ended before all (None) had. What the
                others should have computed is pending again where its ids are known. Say so before any other call.

        Raises:
            PlanError: no step to accept, `n_kept` or `steps` out of range, the step cannot be cut, or steps that did
                not run were taken to have filled blocks that are cached by now (`abort_request` takes them back).
            RequestError: the request is not live here.
        """
        with self.guard("accept"):
            ran = None if steps is None else check_integer("steps", steps, 1, error=PlanError)
            self.steps.accept(self.book.find_live(request), check_integer("n_kept", n_kept, error=PlanError), ran)

    def commit(self) -> None:
        """Makes the blocks that the steps planned so far have filled matchable for others.

        Planning and admitting do this too. A step that may still be cut by `accept` waits for that.
        """
        with self.guard("commit"):
            self.leases.expire()
            self.publisher.commit()

    def pinned_shape(
        self,
        sequences: int,
        tokens: int | None = None,
        *,
        steps: int = 1,
        columns: int | None = None,
        history: bool | None = None,
        slot_copies: int | None = None,
        block_copies: int = 0,
    ) -> StepShape:
        """Returns the shape of every step of up to `sequences` requests and `tokens` tokens (default: one per request).

        With prefix caching or a host tier a request may come with all its table entries at once: there is room for
        one such request in a step, and `schedule(..., shape=shape)` makes others wait.

        Args:
            steps: K, for plans of K steps.
            columns: block-table columns a request may need; default: all.
            history: as in `StepShape.bound`.
            slot_copies: states restored and kept in one step (each costs its bytes, used or not);
                default: up to 4 with prefix caching, unless states lie in blocks, else none. Forks need one each.
            block_copies: partial blocks that forks copy in one step.

        Raises:
            PlanError: a number is no count.
        """
        sequences, steps = (
            check_integer("sequences", sequences, 1, INT32_MAX, error=PlanError),
            check_integer("steps", steps, 1, INT32_MAX, error=PlanError),
        )
        self.guard.check()
        tokens = sequences if tokens is None else tokens
        columns = self.size.max_blocks_per_request if columns is None else columns
        caching = self.cache.caching
        if slot_copies is None:
            slot_copies = min(sequences, 4) if caching and not self.cache.snapshot_blocks else 0
        shape = StepShape.bound(
            self.layout,
            sequences,
            tokens,
            columns=columns,
            steps=steps,
            history=history,
            slot_copies=slot_copies,
            block_copies=block_copies,
        )
        if not caching and not self.host_size.num_pages:  # else one that was preempted comes back with its blocks
            return shape
        return dataclasses.replace(shape, table_entries=shape.table_entries + columns)

    # The whole cache

    def sleep(self) -> None:
        """Takes everything off the device, so that its arrays can be freed: live requests are preempted.

        What is cached or live goes to the host as far as there is room (the transfers follow from
        `take_transfers`; run them before freeing the arrays). Until `wakeup` no request is admitted or scheduled.

        Raises:
            RequestError: it sleeps already, or a live request does not know its tokens.
            PlanError: the transfers of the step before were not taken.
        """
        with self.guard("sleep"):
            self.steps.check_taken()
            self._check_awake()
            self.lifecycle.empty_device()
            self._asleep = True

    def wakeup(self, *, weights_id: Key | _Same = _SAME) -> None:
        """The device arrays are there again, with any content.

        Args:
            weights_id: of the weights that are there now. If it is another than before, nothing computed with the
                others is found again: not on the host, in storage or in hand-offs of before, and preempted requests
                compute all of their tokens again. Default: they are the same.

        Raises:
            RequestError: it does not sleep.
            RequestError: the weights' id has no canonical bytes, or is None beside a driver of storage or other hosts.
        """
        weights_id = self._weights_id if weights_id is _SAME else weights_id
        spec = self._spec_of(weights_id)
        with self.guard("wakeup"):
            if not self._asleep:
                raise RequestError("the manager does not sleep")
            if spec != self._hash_spec:
                self._forget_all()
                self.lifecycle.forget_computed(spec, self.book.preempted)
            self._weights_id, self._hash_spec = weights_id, spec
            self._asleep = False

    def resize(self, size: CacheSize) -> None:
        """Gives the cache another size, larger or smaller; live requests are preempted, as by `sleep`.

        Run the transfers that follow (`take_transfers`) on the old arrays, then make new ones with
        `init_cache(layout, size)`, of any content; `resume` continues the requests. The host tier stays as it is.

        Raises:
            LayoutError: the size has more rows than int32 has numbers.
            PlanError: not a `CacheSize`, or the transfers of the step before were not taken.
            ContextLimitError: a live or preempted request may grow beyond the new context limit, or knows more tokens
                than all blocks will hold.
            RequestError: as `sleep`.

        Warns:
            PerformanceWarning: in a cache of this size hardly a prompt will hit, other than before.
        """
        self.guard.check()
        if not isinstance(size, CacheSize):
            raise PlanError(f"the new size must be a CacheSize, got {type(size).__name__}")
        self.layout.check_size(size)
        with self.guard("resize"):
            self.steps.check_taken()
            limit = self._context_limit(size)
            for request in self.book.ids.values():
                if request.max_tokens > limit:
                    raise ContextLimitError(request.id, request.max_tokens, limit)
                self.steps.check_pool(request.id, min(len(request.ids), request.max_tokens), size)
            self._check_awake()
            if self.policy is not None:  # before anything changes, as warnings may be errors
                self.policy.warn_if_vain(size, self.size)
            self.lifecycle.empty_device()
            self.cache.resize(size)
            self.steps.resize(size)

    def reset(self, *, weights_id: Key | _Same = _SAME) -> None:
        """Forgets every request and all that is cached; requests admitted before are refused from now on.

        The one call that is possible after one was interrupted (`ManagerInterruptedError`). While one is under way, in
        another thread say, it is refused as any other (`ManagerBusyError`).

        Args:
            weights_id: of the weights from now on: what storage or other hosts have of others is not found. Default:
                they are the same.

        Raises:
            RequestError: as `wakeup`.
        """
        weights_id = self._weights_id if weights_id is _SAME else weights_id
        spec = self._spec_of(weights_id)
        with self.guard.anew("reset"):
            self._weights_id, self._hash_spec = weights_id, spec
            self.book.clear()
            self._forget_all()

    def _forget_all(self) -> None:
        """Forgets all that is cached."""
        if self.events is not None:
            self.events.emit("cleared", T.NONE)
        self._begin(self.size, self.arrays, self.cache)

    def persist(self) -> None:
        """Lists for storage, from now on, what comes to the host (see `StorageTier`)."""
        self._persists = self.cache.tree.wanted.persists = True

    def need_weights_id(self) -> None:
        """Demands a `weights_id` from now on, as rows come from elsewhere too. Raises `RequestError` without one."""
        self._spec_of(self._weights_id, needed=True)
        self._needs_id = True

    # Numbers

    def memory_bytes(self) -> int:
        """Returns bytes of the cache this manager manages: exactly what `init_cache` allocates."""
        self.guard.check()
        return self.layout.total_bytes(self.arrays)

    compute_block_budget = staticmethod(compute_block_budget)

    def stats(self) -> ManagerStats:
        """Says where everything is, and what has happened so far, at one moment between two calls.

        From any thread at any time, and beside an engine at work: it holds nobody up. If there is no such moment for a
        second, or within a call of the same thread (from a signal handler), it is as of the last time this was asked.

        Raises:
            IntegrityError: a unit is unaccounted for.
            ManagerInterruptedError: as any call.
        """
        with contextlib.suppress(ManagerBusyError):
            self._seen = self.guard.read(self._collect)
        return self._seen

    def _collect(self) -> ManagerStats:
        return collect(self.layout, self.size, self.book, self.cache, self.leases.stats())

    def check_integrity(self) -> None:
        """Checks that the books agree with each other. For tests: O(blocks).

        Raises:
            IntegrityError: they do not.
            ManagerBusyError: another call has been under way for a second: there is nothing to compare.
        """
        self.guard.read(lambda: check_manager(self.layout, self.size, self.book, self.cache))

    # What callers name

    def _check_awake(self) -> None:
        if self._asleep:
            raise RequestError("the manager sleeps: call wakeup() first")

    def _new_hasher(self, ids: array[int], **space) -> BlockHasher | None:
        if self.cache.caching:
            return BlockHasher.adopt(self.hash_spec, ids, **space)
        BlockHasher(self.hash_spec, **space)  # which checks the space
        return None


def _what_bound(error: ContextLimitError | NoFreeSlotError | OutOfBlocksError) -> str:
    """Returns the pool without room, or "context"."""
    if isinstance(error, OutOfBlocksError):
        return error.pool
    return "slot" if isinstance(error, NoFreeSlotError) else "context"


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    """Returns the values as a list. Raises `PlanError` for what cannot be listed."""
    if type(values) is list:
        return values
    try:
        return list(values)
    except TypeError as error:
        raise PlanError(f"{name} must be a list, got {shown(values)}") from error


def _host_size(host: HostSize | None) -> HostSize:
    """`host` as a `HostSize`, any sequence of one number welcome. Raises `PlanError`."""
    try:
        size = HostSize(0) if host is None else HostSize(*host)
    except TypeError as error:
        raise PlanError(f"host must be None or (num_pages,), got {shown(host)}") from error
    return HostSize(check_integer("host.num_pages", size.num_pages, error=PlanError))
