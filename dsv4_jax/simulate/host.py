"""A host that serves: the engine's `Core` over the real manager, without a device. Pure Python + numpy, deterministic.

Who is admitted, what a step computes and who has to go is the core's business, as where it serves. A step under way is
not looked ahead of: the next one is planned when its results are there. Of most decode steps the manager is not told
(`CoarseCore`), unless `Server.every_step` asks for it: everything but CPU time comes out the same.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

from ..engine.coarse import CoarseCore
from ..engine.core import Core, Limits, shapes_of
from ..engine.executor import Drawn
from ..engine.job import Job, JobState
from ..engine.prompt import Output, Prompt
from ..errors import IntegrityError, NoFreeSlotError
from ..manager import EventLog, KVCacheManager
from .executor import TimedExecutor, TimedStep
from .shadow import Text
from .simulation import Server, SimulatedRequest, Simulation
from .tokens import run_tokens

__all__ = ["Host"]

SAMPLED = 16  # one in so many planned steps is timed and its pools looked at, but for the first ones
FIRST = 256
AT_DOOR = 1 << 25  # prompt tokens in the core's queue beyond which requests wait outside: memory has an end


class Host:
    """One host and its queue. Steps are `begin` and `end`; in between the host is at work, and others may queue.

    Args:
        ended: called with each job that has got all it came for.
        answered: called with each job when it has its first token.
        events: where the manager tells of its blocks.
        computed: of a host that computes prompts for others: called with each job after its steps, while it is
            live. Such a job ends when the first `SimulatedRequest.until` tokens are computed; no token is sampled.

    Attributes:
        result: what has happened; `result.now` is the host's clock.
    """

    def __init__(
        self,
        server: Server,
        ended: Callable[[SimulatedRequest], object],
        answered: Callable[[SimulatedRequest], object] = lambda _: None,
        events: EventLog | None = None,
        computed: Callable[[SimulatedRequest], object] | None = None,
    ):
        self.server, self._ended, self._answered = server, ended, answered
        self.result = Simulation(server)
        self.manager = KVCacheManager(
            server.layout,
            server.size,
            policy=server.policy,
            host=server.host,
            events=events,
            clock=lambda: self.result.now,
        )
        shapes = shapes_of([self.manager], server.token_budget)
        limits = Limits(queued=1 << 62)
        self.executor = TimedExecutor(server, shapes, self.result)
        self.core: Core
        if computed is not None:
            self.core = _PromptCore(self.manager, shapes, limits, self.executor.jobs, computed)
        elif server.glides:
            self.core = CoarseCore(self.manager, shapes, self._answer, limits=limits)
        else:
            self.core = Core(self.manager, shapes, limits=limits, ahead=False)
        self.core.on_live = self._becomes_live
        self._door: collections.deque[SimulatedRequest] = collections.deque()
        self._queued = 0  # prompt tokens in the core's queue
        self._seen: set[int] = set()
        self._blocked = {"slot": -1, "device": -1}  # the last step before which the pool had no room for one more
        self._mark = 0.0  # CPU seconds at which the core began what it does now
        self._step: TimedStep | None = None
        self._ends = 0.0  # when it ends

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, neither live nor in line."""
        return self.core.idle and not self._door

    def take(self, job: SimulatedRequest, now: float) -> None:
        """Puts a job in line."""
        job.offered, job.queued = now, self.result.steps
        self._door.append(job)
        self._let_in()

    def begin(self, now: float) -> float | None:
        """Brings in who fits and begins a step. Returns when it ends; None: there is nothing to compute."""
        result, core = self.result, self.core
        result.now = max(result.now, now)
        core.problem, self._mark = None, time.thread_time()
        while (work := core.plan(result.now)) is None:
            outputs = core.drain()
            self._tell(outputs)
            if not (self._let_in() or outputs):
                break
        self._let_in()
        if core.queued or core.preempted:
            full = core.live == self.server.size.num_slots or isinstance(core.problem, NoFreeSlotError)
            self._blocked["slot" if full else "device"] = result.steps
        if work is None:
            if not self.is_idle:
                raise core.problem or IntegrityError("no request runs, and yet there is no room for one more")
            return None
        if work.plans and (result.planned < FIRST or result.planned % SAMPLED == 0):
            result.step_cpu.append(time.thread_time() - self._mark)
            result.note_peaks(self.manager.stats())
        self._step = self.executor.send(work)
        self._ends = result.now + self._step.seconds
        result.steps += 1
        result.live_seconds += self._step.seconds * core.live
        result.live_max = max(result.live_max, core.live)
        return self._ends

    def end(self) -> None:
        """The step is over: tokens are sampled, and who has all of them leaves."""
        result, step = self.result, self._step
        assert step is not None
        result.now = self._ends
        if result.timeline.due:
            result.timeline.add(result.now, self._sample())
        result.timeline.tick()
        self._tell(self.core.take(step.get(), result.now))

    def flush(self) -> int:
        """Moves what waits to travel between device and host now. Returns the bytes that go to the host."""
        self.manager.flush()
        before = self.executor.flushed.stored
        self.executor.move([self.manager.take_transfers()])
        return self.executor.flushed.stored - before

    def finish(self) -> Simulation:
        """The result, when nobody is here any more."""
        result = self.result
        result.preemptions = self.core.counts["preemptions"]
        result.stats = self.manager.stats()
        result.note_peaks(result.stats)
        result.timeline.add(result.now, self._sample(), last=True)
        return result

    def _sample(self) -> dict[str, float]:
        core = self.core
        waiting = core.queued + len(self._door)
        states = {"running": core.live, "waiting": waiting, "preempted": core.preempted}
        return states | self.result.sample(self.manager.stats())

    # Who comes in

    def _let_in(self) -> bool:
        """Gives the core those that have come, as far as memory has room for their prompts. Whether there was one."""
        waited = len(self._door)
        while self._door and (self._queued < AT_DOOR or not self.core.queued):
            job = self._door.popleft()
            trace = job.trace
            prompt = Prompt(
                tokens=run_tokens(trace.prompt, self.server.layout.cfg.vocab_size),
                max_new_tokens=max(trace.output_tokens, 1),  # one that nobody asks for is sampled, and never fed
                namespace=job.namespace,
                id=job.index,
            )
            self.executor.jobs[job.index] = job
            self._queued += trace.prompt_tokens
            self.core.add(prompt, job.offered, arrival=job.arrival)
        return len(self._door) < waited

    def _becomes_live(self, admitted: Job) -> None:
        job, request, result = self.executor.jobs[admitted.id], admitted.request, self.result  # type: ignore[index]
        assert request is not None
        seconds = time.thread_time() - self._mark
        job.request, job.unchecked = request, True
        if job.text is None:
            result.admission_cpu.append(seconds)
            self._admitted(job, request.num_hit)
        self._mark = time.thread_time()

    def _admitted(self, job: SimulatedRequest, hit: int) -> None:
        result = self.result
        trace, layout = job.trace, self.server.layout
        ids = run_tokens((*trace.prompt, *trace.output), layout.cfg.vocab_size)
        job.output = ids[trace.prompt_tokens :].tolist()
        job.text = Text(ids, layout.block_tokens, trace.tenant, job.index)
        job.seen = self._seen_tokens(job.text.names, trace.prompt_tokens)
        job.admitted = result.now
        job.held_up = tuple(pool for pool, step in self._blocked.items() if step >= job.queued)
        self._queued -= trace.prompt_tokens
        result.jobs.append(job)
        result.unbegun += 1
        result.totals.prompt += trace.prompt_tokens
        result.totals.recomputed += job.seen
        result.find(job, hit)

    def _seen_tokens(self, names: list[int], prompt: int) -> int:
        """Prompt tokens that a cache of any size could have had (at least the last one is computed)."""
        block, count = self.server.layout.block_tokens, 0
        for name in names[: (prompt - 1) // block]:
            if name not in self._seen:
                break
            count += 1
        self._seen.update(names)
        return count * block

    # What comes out

    def _answer(self, job: Job, count: int) -> list[int]:
        mine = self.executor.jobs[job.id]  # type: ignore[index]
        return mine.output_from(len(job.prompt.tokens) + len(job.out), count)

    def _tell(self, outputs: list[Output]) -> None:
        result = self.result
        for output in outputs:
            job = self.executor.jobs[output.id]  # type: ignore[index]
            if output.error is not None:
                raise output.error
            if output.tokens and not job.first_token:
                job.first_token = result.now
                result.totals.answered += 1
                result.totals.waited += job.first_token - job.trace.arrival
                self._answered(job)
            job.sampled = min(job.sampled + len(output.tokens), job.trace.output_tokens)
            if output.finish is not None:
                self._leave(job)

    def _leave(self, job: SimulatedRequest) -> None:
        del self.executor.jobs[job.index]
        result = self.result
        result.unbegun -= job.begun < 0
        result.lost += job.computed - (job.reached - job.hit) if job.computed else 0
        job.ended, job.request, job.text, job.output, job.arrival = result.now, None, None, [], None  # which are large
        self._ended(job)


class _PromptCore(Core):
    """Of a host that computes prompts for others: no token is sampled."""

    def __init__(
        self,
        manager: KVCacheManager,
        shapes: Any,
        limits: Limits,
        jobs: dict[int, SimulatedRequest],
        computed: Callable[[SimulatedRequest], object],
    ):
        super().__init__(manager, shapes, limits=limits, ahead=False)
        self._asked, self._computed = jobs, computed

    def _left(self, job: Job) -> int:
        assert job.request is not None
        return self._asked[job.id].until - job.request.num_cached  # type: ignore[index]

    def _hand_over(self, job: Job) -> None:
        """Somebody else is told how far it is; it ends when that is all."""
        self._computed(self._asked[job.id])  # type: ignore[index]
        if self._left(job) <= 0:
            self._end(job, "handoff")

    def _schedule(self, shard: int) -> list[tuple[Job, int]]:
        while True:
            for job in [job for job in self._live[shard].values() if self._left(job) <= 0]:
                self._hand_over(job)  # there is nothing to compute
            offered = super()._schedule(shard)
            pairs = [(job, min(count, left)) for job, count in offered if (left := self._left(job)) > 0]
            if pairs or not offered:
                return pairs

    def take(self, drawn: Drawn, now: float) -> list[Output]:
        rows = self._sent[0].rows
        outputs = super().take(drawn, now)
        for shard, entries in enumerate(rows):
            for job, count, *_ in entries:
                if job.state is JobState.LIVE and job.request is not None:
                    if self.layout.draft_tokens:  # else what may be cut is not told of
                        self.managers[shard].accept(job.request, count)
                    self._hand_over(job)
        return [*outputs, *self.drain()]
