"""The serving loop's decisions: who is admitted, what the next step computes, who has to go. No clock, thread or jax.

Equal calls give equal plans. `Engine` drives one; a loop of one's own does it so:

    core.add(prompt, now)
    while not core.idle:
        work = core.plan(now)                       # None: nothing can be planned before results are there
        if work is not None:
            under_way.append(executor.send(work))
        if len(under_way) == core.depth or work is None:
            outputs = core.take(under_way.popleft().get(), now)
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..checks import check_boolean, check_integer, check_iterable, check_seconds, shown
from ..errors import (
    ContextLimitError,
    EngineError,
    NoFreeSlotError,
    OutOfBlocksError,
    PlanError,
    QueueFullError,
    RequestError,
)
from ..manager import Arrival, KVCacheManager, Request, StepShape
from ..manager.prefix.token_ids import check_range
from ..manager.transfers import Transfers, null_states
from ..plan import StepPlan
from .executor import Drawn, Row, Shapes, Work
from .handoffs import Handoffs, Remote
from .job import Job, JobState
from .prompt import Output, Prompt, derived_seed

__all__ = ["Core", "Limits", "Sent", "Storage", "check_id", "listed", "shapes_of"]


class Storage(Protocol):
    """Where prompts may lie beside the tiers of the manager: a `StorageDriver`, say."""

    def prefetch(self, tokens: Any, *, namespace: Any = None, items: Any = ()) -> Any:
        """Starts fetching; what it returns has `done`."""
        ...


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a core takes on.

    Attributes:
        queued: most requests that wait to be admitted; others are refused.
        new_tokens: most that one may sample; None: as the context has it.
        aging: seconds of waiting that are worth a level of priority.
        patience: seconds that one waits for storage or another host before it is computed here.
        lease: seconds, from the last part of a hand-off, in which another host may read what was handed off.
        weights: tenant -> its share of admissions, beside 1 for the others.

    Raises:
        PlanError: naming the attribute.
    """

    queued: int = 4096
    new_tokens: int | None = None
    aging: float = 5.0
    patience: float = 2.0
    lease: float = 60.0
    weights: Mapping[Hashable, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("queued", self.queued, 1, error=PlanError)
        if self.new_tokens is not None:
            check_integer("new_tokens", self.new_tokens, 1, error=PlanError)
        for name in ("aging", "patience", "lease"):
            check_seconds(name, getattr(self, name), error=PlanError)
        if not isinstance(self.weights, Mapping):
            raise PlanError(f"weights must be a mapping of tenants, got {shown(self.weights)}")
        for tenant, share in self.weights.items():
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
                raise PlanError(f"the weight of tenant {shown(tenant)} must be a positive number, got {shown(share)}")


_in_turn = operator.attrgetter("rank", "order")  # of a job


class Sent(NamedTuple):
    """A call under way: of each data shard, its rows."""

    rows: list[list[tuple[Job, int, int, int]]]  # job, known tokens, drafts, the most it samples
    decodes: bool  # all of them, and nothing else


class Core:
    """Queue, admission, plans and results of one engine.

    Args:
        managers: of each data shard of the cache one, all alike.
        shapes: of the executor's steps.
        limits: what is taken on.
        storage: where prompts are looked for beside the managers, in the order of the managers; None: nowhere.
        remote: what brings prompts from host to host; None: none. Of one data shard.
        ahead: whether a step is planned while the one before it runs.
        seed: of the seeds of prompts that have none: each gets another, by the order in which they were added.

    Attributes:
        depth: most calls under way.
        counts: what has happened so far, by name.
        problem: why the next in the queue was not admitted, if that was tried.
        paused: while it is true nothing is planned.
        asleep: whether the device's memory is given up.
        on_live: called with each job that gets a slot, for the first time or again.

    Raises:
        PlanError: the managers are not alike, or the shapes not theirs.
    """

    def __init__(
        self,
        managers: KVCacheManager | Sequence[KVCacheManager],
        shapes: Shapes,
        *,
        limits: Limits = Limits(),
        storage: Sequence[Storage] = (),
        remote: Remote | None = None,
        ahead: bool = True,
        seed: int = 0,
    ):
        self.seed = check_integer("seed", seed, -(2**63), 2**64 - 1, error=PlanError)
        self.managers, drivers = listed("managers", managers), listed("storage", storage)
        _check_alike(self.managers)
        if drivers and len(drivers) != len(self.managers):
            raise PlanError(f"{len(drivers)} storage drivers for {len(self.managers)} managers")
        if not isinstance(limits, Limits):
            raise PlanError(f"limits must be Limits, got {shown(limits)}")
        if remote is not None and len(self.managers) > 1:
            raise PlanError(f"hand-offs are of one data shard, here are {len(self.managers)}")
        self.shapes, self.limits, self.storage, self.remote = shapes, limits, drivers, remote
        self.layout = self.managers[0].layout
        if not isinstance(shapes, Shapes):
            raise PlanError(f"shapes must be Shapes, got {shown(shapes)}")
        each = [("mixed", shape) for shape in shapes.all_mixed] + [("decode", shape) for shape in shapes.decodes]
        for kind, shape in each:
            columns = self.managers[0].size.max_blocks_per_request
            if not isinstance(shape, StepShape) or shape.columns != columns:
                raise PlanError(f"shapes.{kind} must be a StepShape of {columns} columns, got {shown(shape)}")
        self.depth = 2 if check_boolean("ahead", ahead, error=PlanError) else 1
        self.paused = self.asleep = False
        self.counts = collections.Counter[str]()
        self.problem: Exception | None = None
        self.on_live: Callable[[Job], object] | None = None
        self._jobs: dict[Hashable, list[Job]] = {}  # that have not ended, by id
        self._queue: dict[Hashable, list[tuple[float, int, Job]]] = {}  # heaps, by tenant
        self._fetching: list[Job] = []  # storage is asked for their prompts
        self._live: list[dict[Request, Job]] = [{} for _ in self.managers]
        self._preempted: list[list[Job]] = [[] for _ in self.managers]
        self._tenants = collections.Counter[Hashable]()  # live and preempted
        self._sent: collections.deque[Sent] = collections.deque()
        self._quiet: list[dict[Job, int]] = [{} for _ in self.managers]  # decode unplanned: see `CoarseCore`
        self._outputs: list[Output] = []  # that wait for the next `take`, or `drain`
        self._deadlines: list[tuple[float, int, Job]] = []  # a heap
        self._masked = self._order = self._waiting = self._stale = self._scores = 0
        self._unflushed = False
        self._scored = False  # whether the call planned last was of scores
        vocab = self.layout.cfg.vocab_size
        self._allowed = np.full(-(-vocab // 32), 0xFFFFFFFF, np.uint32)  # the most a mask can say
        self._allowed[-1] >>= np.uint32(-vocab % 32)
        self._handoffs: Handoffs | None = None
        if remote is not None:
            ways = (limits.lease, limits.patience, self._leave, self._end)
            self._handoffs = Handoffs(self.managers[0], remote, *ways)

    # What is asked for

    def check(self, prompt: Prompt) -> None:
        """Raises if a prompt can never be answered here. From any thread.

        Raises:
            RequestError: it is no `Prompt`, a token (or one of `logit_bias`) is no id of the vocabulary, a namespace
                or an item has a key that is none, or there are more samples than the queue holds.
            PlanError: an item's position is none.
            ContextLimitError: it and its answer exceed the context limit, or all blocks together.
        """
        if not isinstance(prompt, Prompt):
            raise RequestError(f"expected a Prompt, got {shown(prompt)}")
        tokens = prompt.tokens
        assert isinstance(tokens, np.ndarray)
        check_range(tokens, vocab := self.layout.cfg.vocab_size)
        biases = getattr(prompt.sampling, "logit_bias", ())  # by id
        if biases and biases[-1][0] >= vocab:
            raise RequestError(f"logit_bias: token {biases[-1][0]} is outside the vocabulary 0..{vocab - 1}")
        if prompt.namespace is not None or prompt.items:
            self.managers[0].digests((), namespace=prompt.namespace, items=prompt.items)
        if prompt.n > self.limits.queued:
            raise RequestError(f"n is {prompt.n}, at most {self.limits.queued} can wait here")
        most = self.limits.new_tokens
        if most is not None and prompt.max_new_tokens > most:
            raise RequestError(f"max_new_tokens is {prompt.max_new_tokens}, at most {most} are allowed here")
        need = len(tokens) + _more(prompt)
        if need > (limit := self._limit):
            raise ContextLimitError(prompt.id if prompt.id is not None else "new", need, limit)
        if self._handoffs is None and not (prompt.peer is None and prompt.export is None):
            raise RequestError(f"{'peer' if prompt.export is None else 'export'}: this engine has no transport")

    @property
    def _limit(self) -> int:
        first = self.managers[0]
        return min(first.context_limit, first.pool_limit)

    def add(
        self, prompt: Prompt, now: float, *, name: Hashable | None = None, arrival: Arrival | None = None
    ) -> Hashable:
        """Puts a prompt in the queue; returns its id. It has changed nothing if it raises.

        Args:
            name: its id, if the prompt has none.
            arrival: what has come of it from another host: it need not be waited for.

        Raises: as `check`, and:
            RequestError: its id is in use, or cannot be one.
            QueueFullError: too many wait already.
        """
        self.check(prompt)
        name = wanted = prompt.id if name is None else name
        check_id(name, self._jobs)
        if self._waiting + prompt.n > self.limits.queued:
            raise QueueFullError(self._waiting, self.limits.queued)
        while name is None or (wanted is None and name in self._jobs):
            self._order += 1
            name = self._order
        aging = self.limits.aging
        seed = derived_seed(self.seed, self._order)
        jobs = [Job.of(prompt, name, i, self._order + i, now, aging, seed) for i in range(prompt.n)]
        if self.storage and prompt.peer is None and not prompt.score:
            shard = jobs[0].order % len(self.managers)
            asked = self.storage[shard].prefetch(prompt.tokens, namespace=prompt.namespace, items=prompt.items)
            for job in jobs:
                job.shard, job.fetch = shard, asked
        self._order += prompt.n
        self._jobs[name] = jobs
        for job in jobs:
            job.patience = now + self.limits.patience
            if prompt.export is not None:
                job.goal = (len(prompt.tokens) - 1) // self.layout.block_tokens * self.layout.block_tokens
            if job.expires < math.inf:
                heapq.heappush(self._deadlines, (job.expires, job.order, job))
            self._enqueue(job)
            job.arrival = arrival
        self.counts["added"] += len(jobs)
        return name

    def _enqueue(self, job: Job) -> None:
        job.state, job.request, job.ahead, job.row = JobState.QUEUED, None, 0, -1
        job.lease = job.arrival = None
        self._waiting += 1
        if job.prompt.score:  # from its beginning, if it had begun
            job.out, job.logprobs, job.top = [], [], []
        if job.fetch is not None or job.prompt.peer is not None:
            self._fetching.append(job)
        else:
            heapq.heappush(self._queue.setdefault(job.tenant, []), (job.rank, job.order, job))

    def warm_up(
        self, *, prompts: bool = True, draws: bool | None = None, copies: bool = True, waits: bool = False
    ) -> Iterator[Work]:
        """Works of nothing, one of each executable that plain requests need: to be run before the first one comes.

        (Log-probabilities, masks, biases, penalties and routed experts are executables of their own, compiled when
        first asked for. So are copies from and to the host.)

        Args:
            prompts: whether there will be prompts of more than one token.
            draws: whether requests will draw, or have biases or penalties; None: some will, some will not.
            copies: whether states will be copied between slots and blocks: of each power of two that a step may copy.
            waits: whether requests will wait for others: then single steps, too, where K run at once.

        Raises:
            EngineError: calls are under way, or it sleeps.
        """
        if self._sent or self.asleep:
            raise EngineError("it sleeps" if self.asleep else f"{len(self._sent)} calls of the device are under way")
        nothing: list[list[tuple[Job, int]]] = [[] for _ in self.managers]
        loops = dict.fromkeys((self.shapes.steps, 1) if waits else (self.shapes.steps,))
        kinds = [(True, steps, shape) for shape in self.shapes.decodes for steps in loops]
        kinds += [(False, 1, shape) for shape in self.shapes.all_mixed] if prompts else []
        for decoding, steps, shape in kinds:
            for either in (False, True) if draws is None else (draws,):
                work = self._work(nothing, nothing, decoding, steps, shape=shape)
                self._sent.clear()
                yield dataclasses.replace(work, draws=either)
        if copies and (blocks := self.managers[0].cache.snapshot_blocks):
            work = self._work(nothing, nothing, True, self.shapes.steps, shape=self.shapes.decodes[0])
            self._sent.clear()
            most = self.shapes.mixed.sequences
            yield dataclasses.replace(
                work, draws=draws is True, transfers=[null_states(most, blocks) for _ in self.managers]
            )

    def abort(self, name: Hashable, finish: str = "abort") -> bool:
        """Ends a request, whatever it does now; its blocks are free at once. Whether there was one."""
        jobs = [*self._jobs.get(name, ())]
        for job in jobs:
            self._end(job, finish)
        return bool(jobs)

    def abort_all(self) -> None:
        """Ends every request, as `abort` does."""
        for name in [*self._jobs]:
            self.abort(name)

    def receive(self, name: Hashable, part: bytes | None, now: float) -> bool:
        """A part of a hand-off of this request's prompt has come (`Prompt.export`). Whether it still waits for that.

        Args:
            part: None: no more will come, and what has not is computed here.

        Raises:
            HandoffError: anything is wrong with it; it waits on.
            PeerError: its host is lost, so it is computed here.
            RequestError: the request has no `peer`.
        """
        jobs = self._jobs.get(name, ())
        if jobs and jobs[0].prompt.peer is None:
            raise RequestError(f"request {shown(name)} waits for no other host: it has no peer")
        waiting = [job for job in jobs if job.state is JobState.QUEUED and not job.out]
        if not waiting or len(waiting) < waiting[0].prompt.n:
            if self._handoffs is not None and part is not None:
                self._handoffs.refuse(name, jobs, part)
            return False
        assert self._handoffs is not None
        if part is not None:
            return self._handoffs.receive(waiting, part, now)
        for job in waiting:
            job.patience = now
        return True

    # The next call

    @property
    def idle(self) -> bool:
        """Whether no request is here, and no call under way."""
        return not (self._jobs or self._sent or self._outputs)

    @property
    def under_way(self) -> int:
        """Calls that were planned and not taken yet."""
        return len(self._sent)

    @property
    def queued(self) -> int:
        """Requests that wait to be admitted."""
        return self._waiting

    @property
    def live(self) -> int:
        """Requests that have a slot."""
        return sum(map(len, self._live))

    @property
    def preempted(self) -> int:
        """Requests that wait for their blocks again."""
        return sum(map(len, self._preempted))

    @property
    def fetching(self) -> int:
        """Requests whose prompts are looked for in storage or on other hosts."""
        return sum(job.state is JobState.QUEUED for job in self._fetching)

    @property
    def next_deadline(self) -> float | None:
        """When the next deadline is over, on the caller's clock; None: there is none."""
        return self._deadlines[0][0] if self._deadlines else None

    def plan(self, now: float) -> Work | None:
        """The next call, to be sent at once; None: there is nothing that can be planned before results are there.

        Args:
            now: seconds, of any clock that never goes back.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heapq.heappop(self._deadlines)[2]
            if job.state is not JobState.ENDED:
                self._end(job, "deadline")
        work = None
        if not (self.paused or self.asleep or len(self._sent) >= self.depth or (self._sent and self._masked)):
            work = self._next_call(now)
        if self._handoffs is not None and not self.asleep:
            self._handoffs.send(now)
        return work

    def _next_call(self, now: float) -> Work | None:
        """The next call, of scores in turn with the others."""
        self._bring_in(now)
        if not any(self._live):
            return None
        if self._scores and not self._scored:
            work = self._score() or self._next_step()
        else:
            work = self._next_step()
            if work is None and self._scores:
                if self._unsure and self.live > self._scores:
                    return None  # the others may wait for results: it stays their turn, or scores alone went on
                work = self._score()
        self._scored = work is not None and work.kind == "score"
        return work

    @property
    def _unsure(self) -> bool:
        """How many tokens the steps under way keep of their drafts the devices alone know."""
        return bool(self._sent) and self.shapes.drafts > 0

    def _next_step(self) -> Work | None:
        """The next call of requests that sample."""
        unsure = self._unsure  # only steps of decodes go on from there
        if unsure and not self._sent[-1].decodes:
            return None
        each = [self._schedule(shard) for shard in range(len(self.managers))]
        if not any(each) or (unsure and not self._decodes(each)):
            return None
        return self._planned(each)

    def _decodes(self, each: list[list[tuple[Job, int]]]) -> bool:
        """Whether these are all decodes, which can run as such."""
        return all(count == 1 for pairs in each for _, count in pairs) and self._tabled(each)

    def _score(self) -> Work | None:
        """The next chunks of texts that are scored, whose blocks are all reserved."""
        shape, each = self.shapes.mixed, list[list[tuple[Job, int]]]()
        for live in self._live:
            room, pairs = shape.tokens, list[tuple[Job, int]]()
            for job in sorted((job for job in live.values() if job.prompt.score), key=_in_turn):
                assert job.request is not None
                if count := min(room, len(job.prompt.tokens) - job.request.num_cached):
                    pairs.append((job, count))
                    room -= count
            each.append(pairs)
        if not any(each):
            return None
        self.counts["calls"] += 1
        self.counts["steps"] += 1
        self.counts["computed_tokens"] += sum(count for pairs in each for _, count in pairs)
        return self._work(each, [[0] * len(pairs) for pairs in each], False, 1, scores=True)

    def _bring_in(self, now: float) -> None:
        """Makes requests live: those that were preempted come first."""
        for shard, waiting in enumerate(self._preempted):
            waiting.sort(key=_in_turn)
            while waiting and self._has_room(shard, waiting[0]):
                if not self._resume(shard, waiting[0]):
                    break
        if self._fetching:
            self._fetched(now)
        while self._queue and any(self._has_room(shard) for shard in range(len(self.managers))):
            if (job := self._next()) is None or not self._admit(job, now):
                return

    def _fetched(self, now: float) -> None:
        """Whose prompts have come, or are waited for no longer, is in the queue now."""
        still = []
        for job in self._fetching:
            if job.state is not JobState.QUEUED:
                continue
            peer, arrival = job.prompt.peer, job.arrival
            if peer is None:
                done = job.fetch.done
            else:
                done = arrival.is_over if arrival is not None else peer.error is not None
            if done or now >= job.patience:
                heapq.heappush(self._queue.setdefault(job.tenant, []), (job.rank, job.order, job))
            else:
                still.append(job)
        self._fetching = still

    def _next(self) -> Job | None:
        """The job to admit next: the lowest rank, in steps of `aging`; of these the tenant with the least share."""
        best: tuple[Any, Job] | None = None
        for tenant in list(self._queue):
            heap = self._queue[tenant]
            while heap and heap[0][2].state is not JobState.QUEUED:
                heapq.heappop(heap)
            if not heap:
                del self._queue[tenant]
                continue
            rank, order, job = heap[0]
            share = self._tenants[tenant] / self.limits.weights.get(tenant, 1.0)
            key = (rank // self.limits.aging, share, rank, order)
            if best is None or key < best[0]:
                best = key, job
        return None if best is None else best[1]

    def _has_room(self, shard: int, job: Job | None = None) -> bool:
        """Whether there is a slot, and blocks for one of the queue, or that was preempted, beside one for each live
        request."""
        manager, live = self.managers[shard], len(self._live[shard])
        if live >= self.shapes.mixed.sequences or live >= manager.size.num_slots:
            return False
        known = len(job.request.ids) if job is not None and job.request is not None else 1
        blocks = manager.layout.blocks_for(known) + live
        return not live or blocks <= manager.cache.num_available

    def _resume(self, shard: int, job: Job) -> bool:
        assert job.request is not None
        try:
            self.managers[shard].resume(job.request)
        except (NoFreeSlotError, OutOfBlocksError):
            return False
        self._preempted[shard].remove(job)
        self._enter(job, shard, job.request)
        return True

    def _admit(self, job: Job, now: float) -> bool:
        """The next in the queue becomes live, or ends in an error of its own; False: it has to wait."""
        prompt = job.prompt
        extra = self.shapes.steps * (1 + self.shapes.drafts) - 1
        need = len(prompt.tokens) + (0 if prompt.score else _more(prompt) + extra)
        limit = min(need, self._limit)
        for shard in self._places(job):
            manager = self.managers[shard]
            waiting = self._preempted[shard]  # in the order of their turns
            if (waiting and _in_turn(waiting[0]) < _in_turn(job)) or not self._has_room(shard, job):
                continue
            try:
                if job.arrival is not None and not job.arrival.closed:
                    request = manager.admit_remote(job.arrival, max_tokens=limit)
                else:
                    text = () if prompt.score else job.text if job.out else prompt.tokens
                    space: dict[str, Any] = dict(namespace=prompt.namespace, items=prompt.items, reuse=prompt.reuse)
                    request = manager.admit_request(text, max_tokens=limit, **({} if prompt.score else space))
                if prompt.score:  # without its tokens it can neither wait for blocks nor be preempted
                    self._reserve(manager, request, len(prompt.tokens))
            except (NoFreeSlotError, OutOfBlocksError) as error:
                self.problem = error
                continue
            except (RequestError, ContextLimitError, PlanError) as error:
                self._end(job, "error", error)
                return True
            job.admitted = now
            self._enter(job, shard, request)
            return True
        return False

    def _reserve(self, manager: KVCacheManager, request: Request, tokens: int) -> None:
        try:
            manager.reserve(request, tokens)
        except OutOfBlocksError:
            manager.release_request(request)
            raise

    def _places(self, job: Job) -> list[int]:
        """The shards, best first: which has most of it cached, of those which has the fewest requests."""
        if len(self.managers) == 1:
            return [0]
        prompt, cached = job.prompt, [0] * len(self.managers)
        if self.managers[0].cache.caching:  # digests of a prompt are those of all shards
            digests = self.managers[0].digests(prompt.tokens, namespace=prompt.namespace, items=prompt.items)
            cached = [manager.cache.tree.match(digests, len(prompt.tokens)).hit for manager in self.managers]
        home = job.shard if job.fetch is not None else -1
        return sorted(range(len(cached)), key=lambda shard: (-cached[shard], shard != home, len(self._live[shard])))

    def _enter(self, job: Job, shard: int, request: Request) -> None:
        if job.state is JobState.QUEUED:
            self._waiting -= 1
            self._tenants[job.tenant] += 1
            self._masked += job.prompt.mask is not None
            self._scores += job.prompt.score
        job.state, job.shard, job.request, job.row, job.fresh = JobState.LIVE, shard, request, -1, True
        job.decodes = None  # its slot may be another
        self._live[shard][request] = job
        if job.prompt.export is not None:
            job.patience = math.inf
            self._handoffs.moved(job)  # type: ignore[union-attr]
        if self.on_live is not None:
            self.on_live(job)

    # Steps

    def _schedule(self, shard: int) -> list[tuple[Job, int]]:
        """Jobs of a data shard, and how many of their tokens the next step computes.

        If the manager offers nothing and no result may change that, the least important have to go.
        """
        manager, live, shape, quiet = self.managers[shard], self._live[shard], self.shapes.mixed, self._quiet[shard]
        under_way = bool(quiet) or any(sent.rows[shard] for sent in self._sent)  # what it brings may free blocks
        room = shape.tokens - len(quiet) - (sum(map(self._drafts, live.values())) if self.shapes.drafts else 0)
        while live:
            ready = [job for job in live.values() if job not in quiet] if quiet else live.values()
            waiting = [
                job
                for job in ready
                if (job.ahead < job.prompt.max_new_tokens - len(job.out) if job.ahead else job.request.num_pending)  # type: ignore[union-attr]
            ]
            if self._handoffs is not None:
                waiting = [job for job in waiting if job.request.num_cached < job.goal]  # type: ignore[union-attr]
            if not waiting:
                return []
            waiting.sort(key=_in_turn)
            requests = [job.request for job in waiting]
            try:
                offered = manager.schedule(room, shape=shape, requests=requests, ahead=bool(self._sent))  # type: ignore[arg-type]
            except ContextLimitError as error:  # it has outgrown all blocks
                self._end(next(job for job in waiting if job.request.id == error.request), "error", error)  # type: ignore[union-attr]
                continue
            if self._handoffs is not None:
                offered = [(each, min(count, live[each].goal - each.num_cached)) for each, count in offered]
            if offered or under_way:
                return [(live[request], count) for request, count in offered]
            others = [job for job in live.values() if not job.prompt.score]
            if len(others) > 1:
                self._preempt(max(others, key=_in_turn))
            elif len(live) > 1:
                return []  # scores end first
            else:
                needed, free = self.layout.blocks_for(waiting[0].request.num_cached + 1), manager.cache.num_available  # type: ignore[union-attr]
                self._end(waiting[0], "error", OutOfBlocksError(needed, free, manager.size.total_blocks))
        return []

    def _lacks(self, shard: int, pairs: Sequence[tuple[Job, int]], steps: int) -> bool:
        """Whether there are not as many free blocks as these need for their tokens in so many steps."""
        places: list[int] = []
        for job, count in pairs:
            request = job.request
            assert request is not None
            held = len(request.blocks)
            places += range(held, max(held, self.layout.blocks_for(request.num_cached + count * steps)))
        return bool(places) and self.managers[shard].cache.shortage(places, []) is not None

    def _preempt(self, job: Job) -> None:
        assert job.request is not None
        self.managers[job.shard].preempt(job.request)
        del self._live[job.shard][job.request]
        job.state, job.row = JobState.PREEMPTED, -1
        self._preempted[job.shard].append(job)
        self.counts["preemptions"] += 1

    def _drafts(self, job: Job) -> int:
        """How many drafts its next step may have: none at the end of a prompt, before a mask, nor amid known tokens."""
        request = job.request
        assert request is not None
        if not self.shapes.drafts or request.num_cached < request.num_prompt or job.prompt.mask is not None:
            return 0
        if request.num_pending > 1:  # it computes its answer again: behind a part of that nothing is drawn, or accepted
            return 0
        return max(min(self.shapes.drafts, request.max_tokens - request.num_cached - 1, job.left - 1), 0)

    def _planned(self, each: list[list[tuple[Job, int]]]) -> Work:
        """The call of these tokens: a loop if all decode and nobody waits, else one step."""
        decoding = self._decodes(each)
        steps = self.shapes.steps if decoding and self._loops(each) else 1
        drafts = [[0] * len(pairs) for pairs in each]
        if self.shapes.drafts:
            drafts = [[self._drafts(job) if count == 1 else 0 for job, count in pairs] for pairs in each]
            for shard, pairs in enumerate(each):
                wanted = [(job, count + more) for (job, count), more in zip(pairs, drafts[shard], strict=True)]
                if any(drafts[shard]) and self._lacks(shard, wanted, steps):
                    drafts[shard], steps = [0] * len(pairs), 1
        self.counts["calls"] += 1
        self.counts["steps"] += steps
        self.counts["computed_tokens"] += sum(count for pairs in each for _, count in pairs) * steps
        return self._work(each, drafts, decoding, steps)

    def _work(
        self,
        each: list[list[tuple[Job, int]]],
        drafts: Any,
        decoding: bool,
        steps: int,
        *,
        scores: bool = False,
        shape: StepShape | None = None,
    ) -> Work:
        """The call of these tokens, and of so many drafts of each, planned; `shape`: the least that has room for it."""
        if shape is None and decoding:
            shape = self.shapes.decode_of(max(map(len, each)))
        elif shape is None:
            most = (sum(count for _, count in pairs) + sum(more) for pairs, more in zip(each, drafts, strict=True))
            shape = self.shapes.mixed_of(max(most))
        plans, transfers, rows, sent = self._planned_rows(each, drafts, [shape] * len(each), steps, scores)
        tokens = np.zeros((len(each), shape.tokens), np.int32)
        source = np.full((len(each), shape.tokens), -1, np.int32)
        targets = np.full((len(each), shape.tokens), -1, np.int32) if scores else None
        masks: dict[int, np.ndarray] = {}
        for shard, (pairs, plan) in enumerate(zip(each, plans, strict=True)):
            firsts = plan.seq_first[: len(pairs)]
            source[shard, firsts] = [job.row if job.ahead else -1 for job, _ in pairs]
            if targets is None:
                tokens[shard] = self.managers[shard].plan_tokens(plan, unknown=-1)
                continue
            for (job, count), at, start in zip(pairs, firsts.tolist(), plan.seq_start.tolist(), strict=False):
                text: Any = job.prompt.tokens
                tokens[shard, at : at + count] = text[start : start + count]
                after = text[start + 1 : start + count + 1]
                targets[shard, at : at + len(after)] = after
        for live in self._live:
            for job in live.values():
                job.row = -1
        for shard, entries in enumerate(sent):
            for row, (job, _, _, samples) in enumerate(entries):
                job.row = row
                job.ahead += samples
                if job.prompt.export is not None:
                    self._handoffs.moved(job)  # type: ignore[union-attr]
                if samples and job.prompt.mask is not None:
                    self._mask(job, shard * shape.sequences + row, masks)
        self._sent.append(Sent(sent, decoding and all(samples for entries in sent for *_, samples in entries)))
        flat = None if targets is None else targets.reshape(-1)
        kind = "score" if scores else "decode" if decoding else "mixed"
        return Work(kind, plans, transfers, steps, tokens.reshape(-1), source.reshape(-1), rows, masks, flat)

    def _planned_rows(
        self,
        each: list[list[tuple[Job, int]]],
        drafts: Sequence[Sequence[int]],
        shapes: Sequence[StepShape],
        steps: int = 1,
        scores: bool = False,
    ) -> tuple[list[StepPlan], list[Transfers], list[list[Row]], list[list[tuple[Job, int, int, int]]]]:
        """Plans of each data shard, of these shapes: also transfers, rows and what `Sent` has of them."""
        plans, transfers, rows, sent = [], [], list[list[Row]](), list[list[tuple[Job, int, int, int]]]()
        for manager, pairs, more, shape in zip(self.managers, each, drafts, shapes, strict=True):
            planned, mine, entries = list[Any](), list[Row](), list[tuple[Job, int, int, int]]()
            for (job, count), guessed in zip(pairs, more, strict=True):  # hundreds of them pass here every step
                request, prompt = job.request, job.prompt
                assert request is not None
                if job.cached < 0:
                    self._note_hit(job, request)
                if job.ahead and not guessed:  # nearly all: one more token, of the call before
                    if job.decodes is None:
                        job.decodes = Row(prompt, job.sampling, job.seed, request.slot, 1, False, True)
                    mine.append(job.decodes)
                    entries.append((job, 1, 0, steps))
                    planned.append((request, 1))
                    continue
                samples = not scores and request.num_cached + count >= len(request.ids)
                known = request.ids if job.fresh and samples else None
                prefills = not (job.out or job.ahead)
                mine.append(Row(prompt, job.sampling, job.seed, request.slot, count, prefills, samples, guessed, known))
                job.fresh = job.fresh and not samples
                entries.append((job, count, guessed, steps * (1 + guessed) if samples else 0))
                planned.append((request, count + guessed))
            rows.append(mine)
            sent.append(entries)
            plans.append(manager.plan_step(planned, steps=steps, shape=shape, ahead=bool(self._sent)))
            transfers.append(manager.take_transfers())
            self.counts["transfers"] += len(transfers[-1])
        self._unflushed = True
        return plans, transfers, rows, sent

    def _note_hit(self, job: Job, request: Request) -> None:
        """What is cached of a prompt is known when its first chunk is scheduled: until then it is looked up again."""
        job.cached = request.num_hit
        self.counts["cached_tokens"] += request.num_hit
        self.counts["prompt_tokens"] += len(job.prompt.tokens)

    def _mask(self, job: Job, row: int, masks: dict[int, np.ndarray]) -> None:
        """Asks a request which tokens may come next. One that raises ends when the step has run."""
        words = np.zeros_like(self._allowed)
        assert job.prompt.mask is not None
        try:
            job.prompt.mask(tuple(job.out), words[:])  # whatever it does to them, and to the form of its row
            if not (words & self._allowed).any():
                raise RequestError("the mask allows no token")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever it is, it is this request's
            if job.state is not JobState.ENDED:
                self._end(job, "error", _as_exception(error))
        else:
            masks[row] = words

    def _tabled(self, each: list[list[tuple[Job, int]]]) -> bool:
        """Blocks found in the cache need table entries that decode plans have no room for."""
        block = self.layout.block_tokens
        for manager in self.managers:
            manager.commit()
        return all(
            job.request.restores is None and job.request.num_tabled * block >= job.request.num_cached  # type: ignore[union-attr]
            for pairs in each
            for job, _ in pairs
        )

    def _loops(self, each: list[list[tuple[Job, int]]]) -> bool:
        """Whether K steps can run at once: nobody waits, and each of them can go on for so long."""
        steps = self.shapes.steps
        if steps == 1 or self._waiting or self._masked or self._scores or any(self._preempted):
            return False
        if sum(map(len, each)) != sum(map(len, self._live)):
            return False
        for shard, pairs in enumerate(each):
            wanted = [(job, 1 + self._drafts(job)) for job, _ in pairs]
            for job, count in wanted:
                request = job.request
                assert request is not None
                if request.num_cached + steps * count > request.max_tokens:
                    return False
                if len(request.ids) > request.num_cached + 1:  # it has to be fed what it knows
                    return False
                if self.shapes.drafts and request.num_cached < request.num_prompt:
                    return False
            if self._lacks(shard, wanted, steps):
                return False
        return True

    # Results

    def take(self, drawn: Drawn, now: float) -> list[Output]:
        """Takes up what the oldest call under way has sampled; returns what there is to tell, of ended requests too."""
        sent, outputs, plain, weights = self._sent.popleft(), self._outputs, 0, self.managers[0].weights_id
        for shard, entries in enumerate(sent.rows):
            manager = self.managers[shard]
            for row, (job, count, drafts, samples) in enumerate(entries):
                request = job.request
                if job.state is not JobState.LIVE or request is None:
                    continue
                if drawn.experts is not None and job.prompt.routed_experts:
                    self._tell(job, experts=drawn.experts[shard][row])
                if job.prompt.score:
                    if self.layout.draft_tokens and (request.earlier or not self._is_sent(job)):
                        manager.accept(request, count)  # without its ids these may be drafts to it: all are kept
                    self._take_scores(job, drawn, shard, row)
                if not samples:
                    continue
                job.ahead -= samples
                ids = drawn.tokens[shard][row]
                prompt, out = job.prompt, job.out
                if len(ids) == 1 and prompt.is_plain and not self.shapes.drafts and ids[0] not in prompt.stop_tokens:
                    out.append(ids[0])  # nearly all: hundreds of them pass here every step
                    request.ids.append(ids[0])
                    plain += 1
                    if len(out) < prompt.max_new_tokens:
                        outputs.append(Output(job.id, job.index, ids, (), (), None, None, job.cached, weights))
                    else:
                        self._end(job, "length", tokens=ids)
                    continue
                if drafts or request.earlier:  # which steps the manager has to be told of what they keep
                    manager.accept(request, len(ids))
                self._sampled(job, request, ids, drawn, shard, row)
        self.counts["sampled_tokens"] += plain
        return self.drain()

    def _is_sent(self, job: Job) -> bool:
        """Whether it is part of a call under way."""
        return any(job is other for sent in self._sent for other, *_ in sent.rows[job.shard])

    def _take_scores(self, job: Job, drawn: Drawn, shard: int, row: int) -> None:
        """Takes up the log-probabilities of a chunk; they are told of when all are there."""
        assert drawn.logprobs is not None
        new = [token for token in drawn.tokens[shard][row] if token >= 0]
        job.out += new
        job.logprobs += drawn.logprobs[shard][row][: len(new)]
        job.top += _top(job.prompt, drawn, shard, row, len(new))
        self.counts["scored_tokens"] += len(new)
        if len(job.out) + 1 == len(job.prompt.tokens):
            self._end(job, "length", tokens=job.out, logprobs=job.logprobs, top=job.top)

    def _sampled(self, job: Job, request: Request, ids: list[int], drawn: Drawn, shard: int, row: int) -> None:
        prompt, most = job.prompt, job.prompt.max_new_tokens - len(job.out)
        kept = next((i for i, token in enumerate(ids[:most]) if token in prompt.stop_tokens), min(most, len(ids)))
        stopped, error = kept < min(most, len(ids)), None
        new = ids[:kept]
        job.out += new
        request.ids.extend(new)
        self.counts["sampled_tokens"] += len(new)
        finish = "stop" if stopped else "length" if len(job.out) >= prompt.max_new_tokens else None
        if prompt.stop_after is not None and new:
            try:
                if prompt.stop_after(list(new)):
                    finish = "stop"
            except KeyboardInterrupt:
                raise
            except BaseException as problem:  # whatever it is, it is this request's
                finish, error = "error", _as_exception(problem)
            if job.state is JobState.ENDED:  # it has aborted itself
                return
        more: dict[str, Any] = {}
        if prompt.logprobs is not None and drawn.logprobs is not None:
            more["logprobs"] = drawn.logprobs[shard][row][:kept]
            more["top"] = _top(prompt, drawn, shard, row, kept)
        if finish is not None:
            self._end(job, finish, error, tokens=new, **more)
        elif new:
            self._tell(job, tokens=new, **more)

    def drain(self) -> list[Output]:
        """What there is to tell now."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _tell(self, job: Job, **what: Any) -> None:
        weights = self.managers[0].weights_id
        self._outputs.append(Output(job.id, job.index, cached=max(job.cached, 0), weights_id=weights, **what))

    def _end(self, job: Job, finish: str, error: Exception | None = None, **what: Any) -> None:
        """It has ended: its slot and its blocks are free."""
        if job.state is JobState.QUEUED:
            self._waiting -= 1
            self._stale += 1
        elif job.state in (JobState.LIVE, JobState.PREEMPTED):
            self._release(job)
            self._stale += job.expires < math.inf
        if job.lease is not None and finish != "handoff":
            self._handoffs.withdraw(job)  # type: ignore[union-attr]
        job.state, job.request = JobState.ENDED, None
        if self._stale > 64 + self._waiting:
            self._sweep()
        jobs = self._jobs[job.id]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.id]
            if self._handoffs is not None and job.prompt.peer is not None:
                self._handoffs.ended(job)
        self.counts[f"ended_{finish}"] += 1
        self._tell(job, finish=finish, error=error, **what)

    def _release(self, job: Job) -> None:
        """Its slot and its blocks are free."""
        assert job.request is not None
        self.managers[job.shard].release_request(job.request)
        if job.state is JobState.LIVE:
            del self._live[job.shard][job.request]
        else:
            self._preempted[job.shard].remove(job)
        self._forget(job)

    def _leave(self, job: Job) -> None:
        """It is computed, for another host that has not been told of all of it."""
        self._release(job)
        job.state, job.request = JobState.LEAVING, None

    def _sweep(self) -> None:
        """Takes those that have ended out of the queue: else many that come and go would fill it."""
        self._stale = 0
        for tenant, heap in list(self._queue.items()):
            heap[:] = [entry for entry in heap if entry[2].state is JobState.QUEUED]
            heapq.heapify(heap)
            if not heap:
                del self._queue[tenant]
        self._fetching = [job for job in self._fetching if job.state is JobState.QUEUED]
        self._deadlines = [entry for entry in self._deadlines if entry[2].state is not JobState.ENDED]
        heapq.heapify(self._deadlines)

    def _forget(self, job: Job) -> None:
        self._masked -= job.prompt.mask is not None
        self._scores -= job.prompt.score
        self._tenants[job.tenant] -= 1
        if not self._tenants[job.tenant]:
            del self._tenants[job.tenant]

    def flush(self) -> list[Transfers]:
        """Copies between the tiers that wait for a next step, where there may be none for a while: to be moved now.

        Nothing while calls are under way, or there is nothing since the last time.
        """
        if self._sent or self.asleep or not self._unflushed:
            return []
        self._unflushed = False
        for manager in self.managers:
            manager.flush()
        transfers = [manager.take_transfers() for manager in self.managers]
        self.counts["transfers"] += sum(map(len, transfers))
        return transfers

    # When things go wrong, and when weights change

    def fail(self, error: Exception) -> list[Output]:
        """The calls under way are lost, the cache with them: their requests end in this error, the others begin anew.

        With none under way it is the live requests that end, or, if there are none, all: what fails for other reasons
        may fail for ever, and nobody is left without an answer.

        The executor's cache has to be an empty one afterwards (`Executor.recover`).
        """
        lost = {job for sent in self._sent for entries in sent.rows for job, *_ in entries}
        lost = lost or {job for live in self._live for job in live.values()}
        everybody = not lost
        self._begin_again(lost, error)
        if everybody:
            for job in [*self.jobs]:
                self._end(job, "error", error)
        self.counts["failures"] += 1
        return self.drain()

    def forget(self, **weights: Any) -> None:
        """Nothing that was cached counts any more; live requests begin anew from their texts. No call is under way.

        Args:
            weights: `weights_id`, if other weights are used from now on.

        Raises:
            EngineError: calls are under way.
            RequestError: as `KVCacheManager.reset`, of the weights' id; nothing has changed.
        """
        if self._sent:
            raise EngineError(f"{len(self._sent)} calls of the device are under way")
        self._begin_again((), None, **weights)

    def sleep(self) -> list[Transfers]:
        """Nothing is planned until `wakeup`. Returns what has to leave the device before its memory is given up.

        Raises:
            EngineError: calls are under way, or it sleeps already.
        """
        if self._sent or self.asleep:
            raise EngineError("it sleeps already" if self.asleep else f"{len(self._sent)} calls are under way")
        for shard, live in enumerate(self._live):
            for job in [job for job in live.values() if job.prompt.score]:  # whose text the manager does not know
                self._release(job)
                self._enqueue(job)
            self.managers[shard].sleep()
            for job in live.values():
                job.state, job.row = JobState.PREEMPTED, -1
            self._preempted[shard] += live.values()
            live.clear()
        self.asleep = True
        return [manager.take_transfers() for manager in self.managers]

    def wakeup(self) -> None:
        """The device has memory again, with any content. Raises `EngineError` if it does not sleep."""
        if not self.asleep:
            raise EngineError("it does not sleep")
        for manager in self.managers:
            manager.wakeup()
        self.asleep = False

    def _begin_again(self, lost: Container[Job], error: Exception | None, **weights: Any) -> None:
        for manager in self.managers:  # first: it may refuse the weights' id, and nothing has changed then
            manager.reset(**weights)
        self._sent.clear()
        again = [job for live in self._live for job in live.values()]
        again += [job for waiting in self._preempted for job in waiting]
        for job in again:
            self._forget(job)
        again += [job for job in self.jobs if job.state is JobState.LEAVING]
        if self._handoffs is not None:
            self._handoffs.forget()
        if self.asleep:  # resetting them has woken them up
            for manager in self.managers:
                manager.sleep()
        self._live = [{} for _ in self.managers]
        self._preempted = [[] for _ in self.managers]
        for job in sorted(again, key=lambda job: job.order):
            job.patience = -math.inf
            self._enqueue(job)
            if job in lost:
                self._end(job, "error", error)

    @property
    def jobs(self) -> Iterator[Job]:
        """All that have not ended."""
        return (job for jobs in self._jobs.values() for job in jobs)


def check_id(name: Hashable | None, used: Container[Hashable] = ()) -> None:
    """Raises `RequestError` if this can be no request's id, or is in use. None is no id."""
    try:
        hash(name)
    except TypeError:
        raise RequestError(f"an id must be hashable, got {shown(name)}") from None
    if name is not None and name in used:
        raise RequestError(f"id {shown(name)} is in use")


def listed(name: str, values: Any) -> list[Any]:
    """Returns what is given for each data shard as a list; a manager alone is that of one."""
    return [values] if isinstance(values, KVCacheManager) else [*check_iterable(name, values, error=PlanError)]


def _check_alike(managers: list[KVCacheManager]) -> None:
    if not managers:
        raise PlanError("no manager")
    if others := [manager for manager in managers if not isinstance(manager, KVCacheManager)]:
        raise PlanError(f"expected a manager for each data shard, got {shown(others[0])}")
    if len({id(manager) for manager in managers}) < len(managers):
        raise PlanError("one manager was given for several data shards: each has blocks of its own")
    caches = [(each.layout, each.arrays, each.size, each.host_size, each.policy) for each in managers]
    for i, manager in enumerate(managers):
        if caches[i] != caches[0]:
            raise PlanError(f"the manager of shard {i} is of another cache than that of shard 0")
        if manager.hash_spec != managers[0].hash_spec:
            ids = f"{shown(manager.weights_id)}, that of shard 0 of {shown(managers[0].weights_id)}"
            raise PlanError(f"the manager of shard {i} is of weights {ids}")


def _as_exception(error: BaseException) -> Exception:
    """An error of a callback as one that can be told: `SystemExit` is not for whoever reads it."""
    if isinstance(error, Exception):
        return error
    told = RequestError(f"a callback raised {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _top(prompt: Prompt, drawn: Drawn, shard: int, row: int, tokens: int) -> list[tuple[list[int], list[float]]]:
    """The likeliest tokens of a row's first places, as many of each as the prompt asks for."""
    count = prompt.logprobs
    return (
        [(i[:count], p[:count]) for i, p in drawn.top[shard][row][:tokens]] if count and drawn.top is not None else []
    )


def _more(prompt: Prompt) -> int:
    """Tokens that are computed beyond its own: the last one sampled is never fed."""
    return 0 if prompt.export is not None else (0 if prompt.score else prompt.max_new_tokens) - 1


def shapes_of(
    managers: Sequence[KVCacheManager],
    chunk_tokens: int,
    *,
    steps: int = 1,
    drafts: int = 0,
    decode_rows: Iterable[int] = (),
    prefill_tokens: Iterable[int] = (),
) -> Shapes:
    """The shapes of an executor's steps for these managers, one for each data shard.

    Args:
        chunk_tokens: most tokens of a step.
        steps, drafts: as in `Shapes`.
        decode_rows: of how many rows further shapes of decodes are, beside the one that has a row for each slot.
        prefill_tokens: of how many tokens further shapes of steps that compute prompts are, beside the one of
            `chunk_tokens`.

    Raises:
        PlanError: a step has no room for a token of each slot, and its drafts; `decode_rows` are not from 1 to less
            than the number of slots; `prefill_tokens` are not from a token of each slot, and its drafts, to less than
            `chunk_tokens`; or the managers are not alike.
    """
    each = listed("managers", managers)
    _check_alike(each)
    manager, rows = each[0], each[0].size.num_slots
    chunk_tokens = check_integer("chunk_tokens", chunk_tokens, error=PlanError)
    drafts = check_integer("drafts", drafts, error=PlanError)
    least = rows * (1 + drafts)
    if chunk_tokens < least:
        times = f", times {1 + drafts} with drafts" if drafts else ""
        raise PlanError(f"chunk_tokens must be at least the number of slots {rows}{times}, got {chunk_tokens}")
    mixed = manager.pinned_shape(rows, chunk_tokens, history=True)
    each_rows = check_iterable("decode_rows", decode_rows, error=PlanError)
    fewer = {check_integer("decode_rows", few, 1, rows - 1, error=PlanError) for few in each_rows}
    decodes = [manager.pinned_shape(few, few * (1 + drafts), steps=steps) for few in (*sorted(fewer), rows)]
    *others, decode = (_wider(manager, shape, drafts) for shape in decodes)
    mixed = _wider(manager, mixed, drafts)
    each_tokens = check_iterable("prefill_tokens", prefill_tokens, error=PlanError)
    fewer = {check_integer("prefill_tokens", few, least, chunk_tokens - 1, error=PlanError) for few in each_tokens}
    narrower = [manager.pinned_shape(rows, few, history=True) for few in sorted(fewer)]
    # With as many table entries as the widest a step fits if its tokens do.
    narrower = [dataclasses.replace(shape, table_entries=mixed.table_entries) for shape in narrower]
    return Shapes(mixed, decode, steps, drafts, tuple(others), tuple(narrower))


def _wider(manager: KVCacheManager, shape: StepShape, drafts: int) -> StepShape:
    """With room for the table entries of drafts."""
    more = shape.sequences * (1 + drafts // manager.layout.block_tokens) if drafts else 0
    return dataclasses.replace(shape, table_entries=shape.table_entries + more)
