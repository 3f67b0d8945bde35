"""Continuous batching without a device: a trace through the real manager. Pure Python + numpy, deterministic.

Each step: who has arrived waits in line; preempted requests are resumed first, then those in line are
admitted, as slots and blocks allow; the step computes what `schedule` says. If that is nothing, the
request that arrived last is preempted until it is something. A request whose tokens are all computed draws
its next one, and leaves when it has drawn all.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import CapacityError, IntegrityError, NoFreeSlotError, OutOfBlocksError, TraceError
from ..layout import CacheLayout, CacheSize
from ..manager import CachePolicy, HostSize, KVCacheManager, ManagerStats, Namespace, Request
from ..manager.metrics import PoolUse
from ..manager.prefix.hashing import BlockHasher, HashSpec
from .shadow import ShadowDevice, Text
from .timeline import Timeline
from .trace import TraceRequest, run_tokens

__all__ = ["Job", "Server", "Simulation", "StepTime", "simulate"]

MAX_UNITS = 1 << 26  # of a pool: the manager keeps a list of them
MAX_TOKENS = 1 << 24  # of a request: its ids are made at once


@dataclasses.dataclass(frozen=True)
class StepTime:
    """How long a step takes: a fixed part, a part per token, and what it waits for transfers.

    Attributes:
        step: seconds of any step.
        token: seconds per token.
        host_bandwidth: bytes per second between device and host.
    """

    step: float = 0.02
    token: float = 50e-6
    host_bandwidth: float = 50e9

    def seconds(self, tokens: int, moved: int) -> float:
        return self.step + tokens * self.token + moved / self.host_bandwidth


@dataclasses.dataclass(frozen=True)
class Server:
    """Everything but the trace. Raises `CapacityError` if a pool has more units than memory can list.

    Attributes:
        token_budget: most tokens of a step.
    """

    layout: CacheLayout
    size: CacheSize
    policy: CachePolicy | None = None
    host: HostSize | None = None
    token_budget: int = 8192
    step_time: StepTime = dataclasses.field(default_factory=StepTime)

    def __post_init__(self) -> None:
        host = self.host or HostSize(0, 0)
        for count, unit in (
            (self.size.num_blocks, "blocks"), (self.size.num_slots, "requests at once"),
            (self.size.num_snapshots, "snapshots"), (host.num_blocks, "blocks on the host"),
            (host.num_snapshots, "snapshots on the host"),
        ):  # fmt: skip
            if count > MAX_UNITS:
                raise CapacityError(f"{count} {unit}: at most {MAX_UNITS} can be simulated")


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request on its way. Times are simulated seconds.

    Attributes:
        output: [N] ids it will generate.
        text: of prompt and output.
        drawn: how many of the output it has.
        seen: leading prompt tokens, in whole blocks, that some request of the tenant had before.
        hit, hit_host: prompt tokens found, and those of them found on the host.
        unchecked: whether its next step is the first one since it got its blocks.
        held_up: pools it had to wait for in line.
    """

    trace: TraceRequest
    index: int
    request: Request | None = None
    output: list[int] = dataclasses.field(default_factory=list)
    text: Text | None = None
    drawn: int = 0
    seen: int = 0
    hit: int = 0
    hit_host: int = 0
    unchecked: bool = True
    held_up: set[str] = dataclasses.field(default_factory=set)
    admitted: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0


@dataclasses.dataclass(eq=False)
class Simulation:
    """What has happened. Made by `simulate`.

    Attributes:
        jobs: those that ran, in order of arrival.
        rejected: those that could never run, by what they exceed: "context" or "device".
        now: simulated seconds. busy: those of steps.
        scheduled_tokens: of all steps.
        lost: tokens that were computed again because of preemptions.
        peak: most units in use of each pool; `peak_in_use`: by requests.
        step_cpu, admission_cpu: CPU seconds of the manager itself per step and admission.
        stats: the manager's at the end.
    """

    server: Server
    jobs: list[Job] = dataclasses.field(default_factory=list)
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    now: float = 0.0
    busy: float = 0.0
    steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    lost: int = 0
    peak: dict[str, int] = dataclasses.field(default_factory=dict)
    peak_in_use: dict[str, int] = dataclasses.field(default_factory=dict)
    step_cpu: list[float] = dataclasses.field(default_factory=list)
    admission_cpu: list[float] = dataclasses.field(default_factory=list)
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    shadow: ShadowDevice = dataclasses.field(init=False)
    stats: ManagerStats = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.shadow = ShadowDevice(self.server.layout)


def simulate(
    trace: Sequence[TraceRequest], server: Server, *, on_done: Callable[[], object] = lambda: None
) -> Simulation:
    """Runs a trace to its end.

    Args:
        trace: earliest first, as `read_trace` returns it.
        on_done: called once for each request, when it ends or is rejected.

    Raises:
        TraceError: no request of the trace can ever run, or one that can is too long to be made.
    """
    return _Engine(trace, server, on_done).run()


class _Engine:
    def __init__(self, trace: Sequence[TraceRequest], server: Server, on_done: Callable[[], object]):
        self.server, self.on_done = server, on_done
        self.manager = KVCacheManager(server.layout, server.size, policy=server.policy, host=server.host)
        self.hashing = HashSpec(server.layout.block_tokens, None, server.layout.cfg.vocab_size)
        self.result = Simulation(server)
        self.ahead = collections.deque(self._runnable(trace))  # not arrived
        self.line: collections.deque[Job] = collections.deque()  # not admitted
        self.live: dict[Request, Job] = {}
        self.preempted: list[Job] = []  # the first to arrive first
        self.fresh: list[Job] = []  # admitted since the last step
        self.seen: set[bytes] = set()

    def _runnable(self, trace: Sequence[TraceRequest]) -> list[Job]:
        jobs, size, layout = [], self.server.size, self.server.layout
        for index, request in enumerate(trace):
            tokens = request.prompt_tokens + request.output_tokens
            over_context = tokens > self.manager.context_limit
            if over_context or layout.blocks_for(tokens) > size.num_blocks:
                self.result.rejected["context" if over_context else "device"] += 1
                self.on_done()
            elif tokens > MAX_TOKENS:
                raise TraceError(f"request {index} has {tokens} tokens: at most {MAX_TOKENS} can be simulated")
            else:
                jobs.append(Job(request, index))
        if not jobs:
            room = min(self.manager.context_limit, size.num_blocks * layout.block_tokens)
            raise TraceError(f"no request of the trace fits: this cache holds {room} tokens of one")
        return jobs

    def run(self) -> Simulation:
        result = self.result
        while self.ahead or self.line or self.live or self.preempted:
            while self.ahead and self.ahead[0].trace.arrival <= result.now:
                self.line.append(self.ahead.popleft())
            self._bring_in()
            if self.live:
                self._step()
            elif self.line or self.preempted:
                raise IntegrityError("no request runs, and yet there is no room for one more")
            elif self.ahead:
                result.now = max(result.now, self.ahead[0].trace.arrival)
        result.stats = self.manager.stats()
        result.timeline.add(result.now, self._sample(result.stats), last=True)
        return result

    # Who comes in

    def _bring_in(self) -> None:
        while self.preempted or self.line:
            resumes = bool(self.preempted)
            job = self.preempted[0] if resumes else self.line[0]
            pool = self._binding(job, resumes=resumes) or (self._resume(job) if resumes else self._admit(job))
            if pool is not None:
                for waiting in self.line:  # in order: those behind wait for the same
                    waiting.held_up.add(pool)
                return

    def _binding(self, job: Job, *, resumes: bool) -> str | None:
        """The pool without room for one more request, if there is one. Each live one may need a block soon.

        Who is new needs a block as well: it may share most of its own. Who is resumed needs all, or would
        soon be preempted again.
        """
        if len(self.live) == self.server.size.num_slots:
            return "slot"
        device = self.manager.stats().cache.pools["device"]
        known = len(job.request.tokens) if resumes and job.request is not None else 1
        needed = self.server.layout.blocks_for(known) + len(self.live)
        return "device" if needed > device.free + device.evictable else None

    def _admit(self, job: Job) -> str | None:
        """The first in line becomes live; else returns the pool that has no room."""
        trace, vocab = job.trace, self.server.layout.cfg.vocab_size
        prompt, output = run_tokens(trace.prompt, vocab), run_tokens(trace.output, vocab)
        namespace = None if trace.tenant is None else Namespace(trace.tenant)
        start = time.thread_time()
        try:
            request = self.manager.admit_request(prompt, max_tokens=len(prompt) + len(output), namespace=namespace)
        except NoFreeSlotError:  # slots may also be taken by snapshots that live requests have yet to read
            return self._no_room("slot")
        self.result.admission_cpu.append(time.thread_time() - start)
        hasher = BlockHasher(self.hashing, np.concatenate([prompt, output]), namespace=namespace)
        job.output, job.text = output.tolist(), Text(hasher, trace.tenant, job.index)
        job.seen = self._seen_tokens(hasher, len(prompt))
        self.line.popleft()
        job.request, job.admitted, job.hit = request, self.result.now, request.num_hit
        self.live[request] = job
        self.fresh.append(job)
        self.result.jobs.append(job)
        return None

    def _no_room(self, pool: str) -> str:
        if not self.live:
            raise IntegrityError(f"no request runs, and yet there is no room in the {pool} pool for one")
        return pool

    def _seen_tokens(self, hasher: BlockHasher, prompt: int) -> int:
        """Prompt tokens that a cache of any size could have had (at least the last one is computed)."""
        block, count = self.server.layout.block_tokens, 0
        for digest in hasher.digests[: (prompt - 1) // block]:
            if digest not in self.seen:
                break
            count += 1
        self.seen.update(hasher.digests)
        return count * block

    # Who has to go, and comes back

    def _preempt(self) -> None:
        job = max(self.live.values(), key=lambda job: job.index)
        request = job.request
        assert request is not None
        had = request.num_cached
        self.manager.preempt(request)
        self.result.preemptions += 1
        self.result.lost += had
        del self.live[request]
        if job in self.fresh:
            self.fresh.remove(job)
        self.preempted.append(job)
        self.preempted.sort(key=lambda job: job.index)

    def _resume(self, job: Job) -> str | None:
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
        self.live[request], job.unchecked = job, True
        self.result.lost -= request.num_cached
        return None

    # Steps

    def _step(self) -> None:
        manager, result = self.manager, self.result
        start = time.thread_time()
        while not (scheduled := manager.schedule(self.server.token_budget)):
            self._preempt()
        plan = manager.plan_step(scheduled)
        stages = manager.take_transfers()
        result.step_cpu.append(time.thread_time() - start)
        moved, loaded = result.shadow.transfer(stages)
        result.shadow.begin(plan)
        for job in self.fresh:
            self._count_host_hit(job, loaded)
        self.fresh.clear()
        tokens = sum(count for _, count in scheduled)
        seconds = self.server.step_time.seconds(tokens, moved)
        result.steps, result.scheduled_tokens = result.steps + 1, result.scheduled_tokens + tokens
        result.now, result.busy = result.now + seconds, result.busy + seconds
        for request, count in scheduled:
            job = self.live[request]
            assert job.text is not None
            first = request.num_cached - count
            result.shadow.compute(job.text, request.slot, first, count, check_blocks=job.unchecked)
            job.unchecked = False
        stats = manager.stats()
        for name, pool in stats.cache.pools.items():
            result.peak[name] = max(result.peak.get(name, 0), pool.total - pool.free)
            result.peak_in_use[name] = max(result.peak_in_use.get(name, 0), _in_use(name, pool))
        if result.timeline.due:
            result.timeline.add(result.now, self._sample(stats))
        result.timeline.tick()
        for request, _ in scheduled:
            if not request.num_pending:
                self._draw(self.live[request], request)

    def _count_host_hit(self, job: Job, loaded: set[int]) -> None:
        """What came from the host is a host hit of the first who asked for it."""
        assert job.request is not None
        blocks = job.request.blocks[: job.hit // self.server.layout.block_tokens]
        job.hit_host = sum(block in loaded for block in blocks) * self.server.layout.block_tokens
        loaded.difference_update(blocks)

    def _draw(self, job: Job, request: Request) -> None:
        if job.drawn < len(job.output):
            request.tokens.append(job.output[job.drawn])
            job.drawn += 1
        if job.drawn <= 1 and not job.first_token:
            job.first_token = self.result.now
        if job.drawn == len(job.output):
            job.ended = self.result.now
            self.manager.release_request(request)
            del self.live[request]
            self.on_done()

    def _sample(self, stats: ManagerStats) -> dict[str, float]:
        pools, counters = stats.cache.pools, stats.cache.counters
        jobs = self.result.jobs
        sample: dict[str, float] = {
            "running": len(self.live), "waiting": len(self.line), "preempted": len(self.preempted),
            "prompt_tokens": sum(job.trace.prompt_tokens for job in jobs),
            "hit_device_tokens": sum(job.hit - job.hit_host for job in jobs),
            "hit_host_tokens": sum(job.hit_host for job in jobs),
        }  # fmt: skip
        for name, pool in pools.items():
            sample[f"{name}_used"] = _in_use(name, pool)
            sample[f"{name}_cached"] = pool.total - pool.free - _in_use(name, pool)
        for tier, count in counters.evicted.items():
            sample[f"evicted_{tier.name.lower()}"] = count
        sample["evicted_snapshot"] = counters.evicted_snapshots
        return sample


def _in_use(name: str, pool: PoolUse) -> int:
    """Units of requests. Only device blocks are shared with the cache; on the host lie copies of what is in use."""
    return pool.private + (pool.cached - pool.evictable if name == "device" else 0)
