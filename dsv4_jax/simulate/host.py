"""A host that serves: continuous batching over the real manager, without a device. Pure Python + numpy, deterministic.

Each step: preempted requests are resumed first, then those in line are admitted, as slots and blocks allow; the step
computes what `schedule` says. If that is nothing, the request that arrived last is preempted until it is something. A
request whose tokens are all computed samples its next one, and leaves when it has sampled all.

Of most decode steps nothing but positions would reach the manager: within a block a decode needs nothing, gives
nothing, and is always scheduled. So a request *glides* there: its steps take their time, and the manager is
told of them all at once, as one chunk, in the step that fills the block or samples the last token. Blocks are
taken, published and evicted in the same steps as if every one were planned, and everything but the manager's
CPU time comes out the same (`Server.every_step` plans them all; a test compares). Steps in which everyone glides
are not planned at all.
"""

from __future__ import annotations

import collections
import heapq
import time
from collections.abc import Callable

from ..errors import IntegrityError, NoFreeSlotError, OutOfBlocksError
from ..manager import EventLog, KVCacheManager, Request
from .shadow import Text, TransferBytes
from .simulation import Server, SimulatedRequest, Simulation
from .tokens import run_tokens

__all__ = ["Host"]

SAMPLED = 16  # one in so many planned steps is timed and its pools looked at, but for the first ones
FIRST = 256


class Host:
    """One host and its queue. Steps are `begin` and `end`; in between the host is at work, and others may queue.

    Args:
        ended: called with each job that has got all it came for.
        answered: called with each job when it has its first token.
        events: where the manager tells of its blocks.

    Attributes:
        result: what has happened; `result.now` is the host's clock.
        on_computed: of a host that computes prompts for others: called with each job after its steps, while it is
            live. Such a job ends when the first `SimulatedRequest.until` tokens are computed; no token is sampled.
        flushed: bytes that travelled since the last step; they count with the next one.
    """

    def __init__(
        self,
        server: Server,
        ended: Callable[[SimulatedRequest], object],
        answered: Callable[[SimulatedRequest], object] = lambda _: None,
        events: EventLog | None = None,
    ):
        self.server, self._ended, self._answered = server, ended, answered
        self.on_computed: Callable[[SimulatedRequest], object] | None = None
        self.result = Simulation(server)
        self.manager = KVCacheManager(
            server.layout,
            server.size,
            policy=server.policy,
            host=server.host,
            events=events,
            clock=lambda: self.result.now,
        )
        self.line: collections.deque[SimulatedRequest] = collections.deque()  # not admitted
        self.live: dict[Request, SimulatedRequest] = {}
        self.active: dict[Request, SimulatedRequest] = {}  # of the live ones, those that `schedule` decides about
        self.gliding: list[
            tuple[int, int, SimulatedRequest]
        ] = []  # a heap: the others, by their next step of the manager
        self.glide_base = 0  # their tokens, added up, if each had glided since step 0
        self.preempted: list[SimulatedRequest] = []  # the first to arrive first
        self.fresh: list[SimulatedRequest] = []  # admitted since the last step
        self.seen: set[int] = set()
        self.blocked = {"slot": -1, "device": -1}  # the last step before which the pool had no room for one more
        self.filled = False  # whether the manager was told of tokens in the step before
        self.glides, self.order = server.glides, 0
        self.pairs: list[tuple[Request, int]] = []  # of the step under way, as far as the manager knows of it
        self.ends = 0.0  # when it ends
        self.flushed = TransferBytes()

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, neither live nor in line."""
        return not (self.line or self.live or self.preempted)

    def take(self, job: SimulatedRequest, now: float) -> None:
        """Puts a job in line."""
        job.offered, job.queued = now, self.result.steps
        self.line.append(job)

    def begin(self, now: float) -> float | None:
        """Brings in who fits and begins a step. Returns when it ends; None: there is nothing to compute."""
        self.result.now = max(self.result.now, now)
        if self.line or self.preempted:
            self._bring_in()
        if self.live:
            self._step()
            return self.ends
        if self.line or self.preempted:
            raise IntegrityError("no request runs, and yet there is no room for one more")
        return None

    def end(self) -> None:
        """The step is over: tokens are sampled, and who has all of them leaves."""
        result = self.result
        result.now = self.ends
        if result.timeline.due:
            result.timeline.add(result.now, self._sample())
        result.timeline.tick()
        for request, count in self.pairs:
            job = self.live[request]
            if self.on_computed is not None:
                if self.server.layout.draft_tokens:  # else what may be cut is not told of
                    self.manager.accept(request, count)
                self._hand_over(job)
            elif not request.num_pending:
                self._sample_token(job)

    def flush(self) -> int:
        """Moves what waits to travel between device and host now. Returns the bytes that go to the host."""
        self.manager.flush()
        moved, _ = self.result.shadow.transfer(self.manager.take_transfers())
        self.flushed = self.flushed.plus(moved)
        return moved.stored

    def finish(self) -> Simulation:
        """The result, when nobody is here any more."""
        result = self.result
        result.stats = self.manager.stats()
        result.note_peaks(result.stats)
        result.timeline.add(result.now, self._sample(), last=True)
        return result

    # Who comes in

    def _bring_in(self) -> None:
        while self.preempted or self.line:
            resumes = bool(self.preempted)
            job = self.preempted[0] if resumes else self.line[0]
            pool = self._binding(job, resumes=resumes) or (self._resume(job) if resumes else self._admit(job))
            if pool is not None:
                self.blocked[pool] = self.result.steps  # for all in line: those behind wait for the same
                return

    def _binding(self, job: SimulatedRequest, *, resumes: bool) -> str | None:
        """The pool without room for one more request, if there is one. Each live one may need a block soon.

        Who is new needs a block as well: it may share most of its own. Who is resumed needs all, or would
        soon be preempted again.
        """
        if len(self.live) == self.server.size.num_slots:
            return "slot"
        known = len(job.request.tokens) if resumes and job.request is not None else 1
        needed = self.server.layout.blocks_for(known) + len(self.live)
        return "device" if needed > self.manager.cache.num_available else None

    def _admit(self, job: SimulatedRequest) -> str | None:
        """The first in line becomes live; else returns the pool that has no room."""
        trace, result, layout = job.trace, self.result, self.server.layout
        ids = run_tokens((*trace.prompt, *trace.output), layout.cfg.vocab_size)
        prompt = ids[: trace.prompt_tokens]
        start = time.thread_time()
        try:
            if job.arrival is None:
                request = self.manager.admit_request(prompt, max_tokens=len(ids), namespace=job.namespace)
            else:
                request = self.manager.admit_remote(job.arrival, max_tokens=len(ids))
                job.arrival = None
        except NoFreeSlotError:  # slots may also be taken by snapshots that live requests have yet to read
            return self._no_room("slot")
        result.admission_cpu.append(time.thread_time() - start)
        job.output = ids[trace.prompt_tokens :].tolist()
        job.text = Text(ids, layout.block_tokens, trace.tenant, job.index)
        job.seen = self._seen_tokens(job.text.names, len(prompt))
        self.line.popleft()
        job.request, job.admitted, job.hit = request, result.now, request.num_hit
        job.held_up = tuple(pool for pool, step in self.blocked.items() if step >= job.queued)
        totals = result.totals
        totals.prompt, totals.hit = totals.prompt + len(prompt), totals.hit + job.hit
        totals.recomputed += job.seen - job.hit
        self.fresh.append(job)
        result.jobs.append(job)
        self._becomes_live(job)
        return None

    def _becomes_live(self, job: SimulatedRequest) -> None:
        assert job.request is not None
        self.order += 1
        job.order, job.unchecked = self.order, True
        self.live[job.request] = self.active[job.request] = job
        if self.on_computed is not None and job.request.num_cached >= job.until:
            self._hand_over(job)  # there is nothing to compute

    def _no_room(self, pool: str) -> str:
        if not self.live:
            raise IntegrityError(f"no request runs, and yet there is no room in the {pool} pool for one")
        return pool

    def _seen_tokens(self, names: list[int], prompt: int) -> int:
        """Prompt tokens that a cache of any size could have had (at least the last one is computed)."""
        block, count = self.server.layout.block_tokens, 0
        for name in names[: (prompt - 1) // block]:
            if name not in self.seen:
                break
            count += 1
        self.seen.update(names)
        return count * block

    # Who has to go, and comes back

    def _preempt(self) -> None:
        """Nobody glides: whoever does could be scheduled."""
        job = max(self.live.values(), key=lambda job: job.index)
        request = job.request
        assert request is not None
        had = request.num_cached
        self.manager.preempt(request)
        self.result.preemptions += 1
        self.result.lost += had
        del self.live[request], self.active[request]
        if job in self.fresh:
            self.fresh.remove(job)
        self.preempted.append(job)
        self.preempted.sort(key=lambda job: job.index)

    def _resume(self, job: SimulatedRequest) -> str | None:
        """The first of those preempted becomes live again; else returns the pool that has no room."""
        request = job.request
        assert request is not None
        try:
            self.manager.resume(request)
        except NoFreeSlotError:
            return self._no_room("slot")
        except OutOfBlocksError:
            return self._no_room("device")
        self.preempted.remove(job)
        self.result.lost -= request.num_cached
        self._becomes_live(job)
        return None

    # Steps

    def _step(self) -> None:
        result, step = self.result, self.result.steps + 1
        gliding, glide_context = len(self.gliding), self.glide_base + len(self.gliding) * step
        due = self._due(step)
        result.steps = step
        pairs, moved = self._plan(due, gliding) if due or self.active or self.filled else ([], TransferBytes())
        # What was due has glided, but for this step: its tokens are counted there.
        others = [(r.num_cached - count, count) for r, count in pairs if r not in due]
        chunks = [(start, count) for start, count in others if count > 1]
        decodes = gliding + len(others) - len(chunks)
        prefill = sum([count for _, count in chunks])
        time_of = self.server.step_time
        computing = time_of.computing(
            decodes,
            glide_context + sum([start for start, count in others if count == 1]),
            prefill,
            sum([count * start + count * (count - 1) // 2 for start, count in chunks]),
        )
        seconds = time_of.seconds(computing, moved.loaded, moved.stored)
        self.pairs, self.ends = pairs, result.now + seconds
        result.busy, result.waited = result.busy + seconds, result.waited + seconds - computing
        result.scheduled_tokens += decodes + prefill
        result.prefill_tokens += prefill
        result.live_seconds += seconds * len(self.live)
        result.live_max = max(result.live_max, len(self.live))
        if decodes:
            result.token_gaps.append((seconds, decodes))

    def _due(self, step: int) -> dict[Request, int]:
        """Whoever's glide ends with this step, and how many tokens of it the manager has to be told of."""
        due = {}
        while self.gliding and self.gliding[0][0] == step:
            job = heapq.heappop(self.gliding)[2]
            request, count = job.request, step - job.glides_from
            assert request is not None
            self.glide_base -= request.num_cached - job.glides_from - 1
            request.tokens += job.output[job.sampled : job.sampled + count - 1]
            job.sampled += count - 1
            due[request] = count
        return due

    def _plan(self, due: dict[Request, int], gliding: int) -> tuple[list[tuple[Request, int]], TransferBytes]:
        """What the manager is told of: tokens of this step, and those glided up to here; and the bytes moved first."""
        manager, result, live = self.manager, self.result, self.live
        look = result.planned < FIRST or result.planned % SAMPLED == 0
        start = time.thread_time() if look else 0.0
        while True:
            turns = sorted(self.active, key=lambda request: live[request].order)
            room = self.server.token_budget - gliding
            scheduled = manager.schedule(room, requests=turns)  # publishes what the step before has filled
            if self.on_computed is not None:
                scheduled = [(r, min(count, live[r].until - r.num_cached)) for r, count in scheduled]
            if scheduled or gliding:
                break
            self._preempt()
        pairs = scheduled
        if due:  # among the decodes, where they would be if all were planned
            split = next((i for i, (_, count) in enumerate(scheduled) if count > 1), len(scheduled))
            decodes = sorted([*due.items(), *scheduled[:split]], key=lambda pair: live[pair[0]].order)
            pairs = [*decodes, *scheduled[split:]]
        self.filled = bool(pairs)
        if not pairs and not self.fresh and not manager.cache.transfers:
            return [], TransferBytes()
        plan = manager.plan_step(pairs)
        stages = manager.take_transfers()
        result.planned += 1
        if look:
            result.step_cpu.append(time.thread_time() - start)
            result.note_peaks(manager.stats())
        moved, loaded = result.shadow.transfer(stages)
        moved, self.flushed = self.flushed.plus(moved), TransferBytes()
        result.shadow.begin(plan)
        for request, _ in pairs:
            if (job := live[request]).begun < 0 and request.num_hit > job.hit:  # since it was admitted
                result.totals.hit += request.num_hit - job.hit
                result.totals.recomputed -= request.num_hit - job.hit
                job.hit = request.num_hit
                if job not in self.fresh:
                    self.fresh.append(job)
        for job in self.fresh:
            self._count_host_hit(job, loaded)
        self.fresh.clear()
        for request, count in pairs:
            job = live[request]
            assert job.text is not None
            result.shadow.compute(job.text, request.slot, request.num_cached - count, count, check_blocks=job.unchecked)
            job.unchecked = False
            if job.begun < 0:
                job.begun = result.now
        return pairs, moved

    def _count_host_hit(self, job: SimulatedRequest, loaded: set[int]) -> None:
        """What came from the host is a host hit of the first who asked for it."""
        assert job.request is not None
        blocks = job.request.blocks[: job.hit // self.server.layout.block_tokens]
        hit_host = sum(block in loaded for block in blocks) * self.server.layout.block_tokens
        job.hit_host += hit_host
        self.result.totals.hit_host += hit_host
        loaded.difference_update(blocks)

    def _sample_token(self, job: SimulatedRequest) -> None:
        request, result = job.request, self.result
        assert request is not None
        if job.sampled < len(job.output):
            request.tokens.append(job.output[job.sampled])
            job.sampled += 1
        if job.sampled <= 1 and not job.first_token:
            job.first_token = result.now
            result.totals.answered += 1
            result.totals.waited += job.first_token - job.trace.arrival
            self._answered(job)
        if job.sampled == len(job.output):
            self._leave(job)
        elif (within := request.num_cached % self.server.layout.block_tokens) and self.glides:
            steps = min(self.server.layout.block_tokens - within, len(job.output) - job.sampled)
            job.glides_from = result.steps
            self.glide_base += request.num_cached - result.steps - 1
            heapq.heappush(self.gliding, (result.steps + steps, job.order, job))
            self.active.pop(request, None)
        else:
            self.active[request] = job

    def _hand_over(self, job: SimulatedRequest) -> None:
        """Somebody else is told how far it is; it leaves when that is all."""
        assert job.request is not None and self.on_computed is not None
        self.on_computed(job)
        if job.request.num_cached >= job.until:
            self._leave(job)

    def _leave(self, job: SimulatedRequest) -> None:
        request = job.request
        assert request is not None
        job.ended, job.request, job.text, job.output = self.result.now, None, None, []  # which are large
        self.manager.release_request(request)
        del self.live[request]
        self.active.pop(request, None)
        if job in self.fresh:
            self.fresh.remove(job)
        self._ended(job)

    def _sample(self) -> dict[str, float]:
        states = {"running": len(self.live), "waiting": len(self.line), "preempted": len(self.preempted)}
        return states | self.result.sample(self.manager.stats())
