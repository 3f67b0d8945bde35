"""What is simulated, and what has happened in it. Pure Python."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from ..errors import CapacityError
from ..layout import CacheLayout, CacheSize
from ..manager import Arrival, CachePolicy, HostSize, ManagerStats, Namespace, Request
from ..manager.metrics import PoolUse
from .shadow import ShadowDevice, Text
from .step_time import StepTime
from .trace import TraceRequest

__all__ = ["MAX_UNITS", "Server", "SimulatedRequest", "Simulation", "Timeline", "Totals"]

MAX_UNITS = 1 << 26  # of a pool: the manager keeps a list of them


@dataclasses.dataclass(frozen=True)
class Server:
    """The server that is simulated.

    Raises `CapacityError` if a pool has more units than memory can list, or a step no room for a token of each slot.

    Attributes:
        token_budget: most tokens of a step.
        every_step: whether every decode step is planned by the manager (see the module `host`).
    """

    layout: CacheLayout
    size: CacheSize
    policy: CachePolicy | None = None
    host: HostSize | None = None
    token_budget: int = 8192
    step_time: StepTime = dataclasses.field(default_factory=StepTime)
    every_step: bool = False

    def __post_init__(self) -> None:
        pages = self.host.num_pages if self.host is not None else 0
        size = self.size
        counts = dict(num_blocks=size.num_blocks, num_slots=size.num_slots, num_snapshots=size.num_snapshots)
        for field, count in (counts | {"num_pages": pages}).items():
            if count > MAX_UNITS:
                raise CapacityError(f"{field}: {count}, at most {MAX_UNITS} can be simulated")
        if self.token_budget < size.num_slots:
            problem = f"{self.token_budget}, less than a token of each of {size.num_slots} slots"
            raise CapacityError(f"token_budget: {problem}")

    @property
    def context_limit(self) -> int:
        """Tokens that one request can hold."""
        limit = self.size.max_blocks_per_request * self.layout.block_tokens
        return min(limit, self.layout.cfg.max_position_embeddings)

    @property
    def glides(self) -> bool:
        """Whether decodes may pass unplanned: not with drafts, which delay what is published, or no room for chunks."""
        return not (self.every_step or self.layout.draft_tokens or self.token_budget <= self.size.num_slots)


@dataclasses.dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request on its way. Times are simulated seconds.

    Attributes:
        request: of the manager, until it has ended.
        output: [N] ids it will generate.
        text: of prompt and output, until it has ended.
        sampled: how many of the output it has.
        seen: leading prompt tokens, in whole blocks, that some request of the tenant had before.
        hit, hit_host: prompt tokens found, and those of them found on the host.
        computed, reached: tokens computed for it, and those that its last step ended after.
        unchecked: whether its next step is the first one since it got its blocks.
        queued: steps there had been when it was put in line.
        held_up: pools it had to wait for in line.
        until: of a prompt that is computed for another host: how many of its tokens are.
        arrival: what comes of it from another host.
        offered, admitted, begun, first_token, ended: when it was put in line, became live, its first tokens began to be
            computed (-1: none were), and so on.
    """

    trace: TraceRequest
    index: int
    request: Request | None = None
    output: list[int] = dataclasses.field(default_factory=list)
    text: Text | None = None
    sampled: int = 0
    seen: int = 0
    hit: int = 0
    hit_host: int = 0
    computed: int = 0
    reached: int = 0
    unchecked: bool = True
    queued: int = 0
    held_up: tuple[str, ...] = ()
    until: int = 0
    arrival: Arrival | None = None
    offered: float = 0.0
    admitted: float = 0.0
    begun: float = -1.0
    first_token: float = 0.0
    ended: float = 0.0

    def output_from(self, place: int, count: int) -> list[int]:
        """The ids that it generates at a place of its text and behind; of one that generates none, any."""
        first = place - self.trace.prompt_tokens
        return self.output[first : first + count] or [0] * count

    @property
    def namespace(self) -> Namespace | None:
        """The namespace of its blocks in the manager."""
        return None if self.trace.tenant is None else Namespace(self.trace.tenant)


@dataclasses.dataclass
class Totals:
    """Tokens of the requests admitted so far, and their waiting for the first token."""

    prompt: int = 0
    hit: int = 0
    hit_host: int = 0
    recomputed: int = 0
    answered: int = 0
    waited: float = 0.0


class Timeline:
    """Numbers over simulated time, of bounded length: when there are too many samples, every second one goes.

    Args:
        samples: how many to keep.
    """

    def __init__(self, samples: int = 512):
        self._limit, self._stride, self._steps = samples, 1, 0
        self._rows: list[dict[str, float]] = []

    @property
    def due(self) -> bool:
        """Whether this step is to be sampled."""
        return self._steps % self._stride == 0

    def tick(self) -> None:
        """Counts a step that is over."""
        self._steps += 1

    def add(self, seconds: float, sample: Mapping[str, float], *, last: bool = False) -> None:
        """Adds a sample; the last one whether it is due or not."""
        self._rows.append({"seconds": seconds, **sample})
        if len(self._rows) > self._limit and not last:
            self._rows = self._rows[::2]
            self._stride *= 2

    def columns(self) -> dict[str, list[float]]:
        """The samples of every name, all of one length."""
        return {name: [row[name] for row in self._rows] for name in self._rows[0]} if self._rows else {}


@dataclasses.dataclass(eq=False)
class Simulation:
    """What has happened. Made by `simulate`.

    Attributes:
        jobs: those that ran, in order of arrival.
        rejected: those that could never run, by what they exceed: "context" or "device".
        now: simulated seconds. busy: those of steps. waited: those of steps that went into transfers.
        planned: steps of which the manager knows.
        scheduled_tokens: of all steps; `prefill_tokens`: those of chunks.
        live_seconds: live requests, added up over the seconds of steps; `live_max`: the most of a step.
        token_gaps: (seconds, decodes) of each step with decodes.
        lost: tokens that were computed again because of preemptions.
        unbegun: live requests that no step has computed anything for.
        peak: most units in use of each pool; `peak_in_use`: by requests. Of the steps that were looked at.
        step_cpu, admission_cpu: CPU seconds of the manager itself per planned step (some of them) and admission.
        stats: the manager's at the end.
    """

    server: Server
    jobs: list[SimulatedRequest] = dataclasses.field(default_factory=list)
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    now: float = 0.0
    busy: float = 0.0
    waited: float = 0.0
    steps: int = 0
    planned: int = 0
    scheduled_tokens: int = 0
    prefill_tokens: int = 0
    live_seconds: float = 0.0
    live_max: int = 0
    token_gaps: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    lost: int = 0
    unbegun: int = 0
    totals: Totals = dataclasses.field(default_factory=Totals)
    peak: dict[str, int] = dataclasses.field(default_factory=dict)
    peak_in_use: dict[str, int] = dataclasses.field(default_factory=dict)
    step_cpu: list[float] = dataclasses.field(default_factory=list)
    admission_cpu: list[float] = dataclasses.field(default_factory=list)
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    shadow: ShadowDevice = dataclasses.field(init=False)
    stats: ManagerStats = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.shadow = ShadowDevice(self.server.layout)

    def find(self, job: SimulatedRequest, tokens: int) -> None:
        """So many leading tokens of its prompt were found in the cache."""
        more, job.hit = tokens - job.hit, tokens
        self.totals.hit += more
        self.totals.recomputed -= more

    def note_peaks(self, stats: ManagerStats) -> None:
        """Keeps the most units in use of every pool, with what is cached and by requests alone."""
        for name, pool in stats.cache.pools.items():
            self.peak[name] = max(self.peak.get(name, 0), pool.total - pool.free)
            self.peak_in_use[name] = max(self.peak_in_use.get(name, 0), _in_use(name, pool))

    def sample(self, stats: ManagerStats) -> dict[str, float]:
        """What a `Timeline` has of one moment, but for who is there."""
        totals, counters = self.totals, stats.cache.counters
        numbers: dict[str, float] = {
            "prompt_tokens": totals.prompt,
            "hit_device_tokens": totals.hit - totals.hit_host,
            "hit_host_tokens": totals.hit_host,
            "recomputed_tokens": totals.recomputed,
            "answered": totals.answered,
            "waited_seconds": totals.waited,
        }
        for name, pool in stats.cache.pools.items():
            numbers[f"{name}_used"] = _in_use(name, pool)
            numbers[f"{name}_cached"] = pool.total - pool.free - _in_use(name, pool)
        for tier, count in counters.evicted.items():
            numbers[f"evicted_{tier.name.lower()}"] = count
        return numbers | {"evicted_snapshot": counters.evicted_snapshots}


def _in_use(name: str, pool: PoolUse) -> int:
    """Returns units of requests. Only device blocks are shared with the cache; on the host lie copies of what is in
    use."""
    return pool.private + (pool.cached - pool.evictable if name == "device" else 0)
