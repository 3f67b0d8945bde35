"""What an engine measures of its requests, and what it says to probes. Imports no jax.

The engine's thread counts, any thread reads: a lock is held for the one or the other, and for no step.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..manager.metrics import Family, Histogram, ManagerStats
from .job import Job
from .prompt import Output, Prompt

__all__ = ["EngineMetrics", "EngineStats", "Health", "vllm_families"]

SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))  # 1 ms to 500 s
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))  # 1 to 500,000
# Of each histogram: our name, vLLM's, what it says, and its bounds.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "From add to the first token.", SECONDS),
    "between_tokens_seconds": (
        "inter_token_latency_seconds",
        "From a token to the next; those that come together share what they took.",
        SECONDS,
    ),
    "token_seconds": (
        "request_time_per_output_token_seconds",
        "Of each sample that has ended, from its first token to its last, by token.",
        SECONDS,
    ),
    "request_seconds": ("e2e_request_latency_seconds", "From add to the end of each sample.", SECONDS),
    "queue_seconds": ("request_queue_time_seconds", "From add until it has a slot for the first time.", SECONDS),
    "request_prompt_tokens": ("request_prompt_tokens", "Tokens of the prompt of each sample that has ended.", TOKENS),
    "request_generation_tokens": (
        "request_generation_tokens",
        "Tokens sampled for each sample that has ended.",
        TOKENS,
    ),
    "call_tokens": ("iteration_tokens_total", "Tokens that a call of the device computes.", TOKENS),
}


class EngineStats(NamedTuple):
    """An engine at the end of a turn.

    Attributes:
        queued, live, preempted: requests that wait to be admitted, that have a slot, that wait for blocks again.
        counts: what has happened since it began, by name (0 for what has not): "added", "calls", "steps",
            "computed_tokens", "sampled_tokens", "prompt_tokens", "cached_tokens", "preemptions", "failures",
            "ended_stop", ...
        turn_s: seconds of the host's work in the turn, without waiting for the device.
        paused: whether nothing is planned.
    """

    queued: int
    live: int
    preempted: int
    counts: collections.Counter[str]
    turn_s: float
    paused: bool


class Health(NamedTuple):
    """What a probe asks an engine.

    Attributes:
        live: whether it can answer at all: false once its thread has ended, and while the device hangs, as its watchdog
            finds: time to start the process anew.
        ready: whether a request that is added now is answered: it is live, and neither closed, paused nor asleep.
        reason: why it is not ready; "" if it is.
        step_age: seconds since the oldest call of the device that is under way was begun; None: none is.
        last_error: what the last step that failed has died of; None: none has failed. The engine has gone on since.
    """

    live: bool
    ready: bool
    reason: str
    step_age: float | None
    last_error: str | None


@dataclasses.dataclass(slots=True)
class _Timing:
    """When what happened to a request, by sample. Of one without tokens the first and the last say nothing."""

    added: float
    prompt: int
    score: bool
    admitted: list[bool]
    ended: list[bool]
    first: list[float]
    last: list[float]
    tokens: list[int]


class EngineMetrics:
    """Counts what the readers of an engine were told, and when.

    What readers were told is counted, so that numbers and answers agree: also of those whom the watchdog answered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Hashable, _Timing] = {}
        self._histograms = {name: Histogram(bounds) for name, (_, _, bounds) in HISTOGRAMS.items()}
        self._ended = collections.Counter[str]()
        self._refused = 0

    def added(self, name: Hashable, prompt: Prompt, now: float) -> None:
        """A request was taken on."""
        many = prompt.n
        admitted, ended, first, last = [False] * many, [False] * many, [now] * many, [now] * many
        timing = _Timing(now, len(prompt.tokens), prompt.score, admitted, ended, first, last, [0] * many)
        with self._lock:
            self._open[name] = timing

    def refused(self) -> None:
        """One was not, since too many wait."""
        with self._lock:
            self._refused += 1

    def live(self, job: Job) -> None:
        """A sample has a slot, for the first time or again."""
        timing = self._open.get(job.id)
        if timing is not None and not timing.admitted[job.index]:
            timing.admitted[job.index] = True
            with self._lock:
                self._histograms["queue_seconds"].add(job.admitted - timing.added)

    def call(self, tokens: int) -> None:
        """A call of the device was planned."""
        with self._lock:
            self._histograms["call_tokens"].add(tokens)

    def told(self, outputs: Iterable[Output], now: float) -> None:
        """Readers have these outputs."""
        gaps = collections.Counter[float]()
        with self._lock:
            for output in outputs:
                timing, index, count = self._open.get(output.id), output.index, len(output.tokens)
                if timing is None:
                    continue
                if count and not timing.score:
                    if timing.tokens[index]:
                        gaps[(now - timing.last[index]) / count] += count
                    else:
                        timing.first[index] = now
                        self._histograms["time_to_first_token_seconds"].add(now - timing.added)
                    timing.last[index] = now
                    timing.tokens[index] += count
                if output.finish is not None:
                    self._end(timing, index, output.finish, now)
            between = self._histograms["between_tokens_seconds"]
            for gap, times in gaps.items():
                between.add(gap, times)

    def _end(self, timing: _Timing, index: int, finish: str, now: float) -> None:
        if timing.ended[index]:
            return
        histograms, tokens, timing.ended[index] = self._histograms, timing.tokens[index], True
        self._ended[finish] += 1
        histograms["request_seconds"].add(now - timing.added)
        histograms["request_prompt_tokens"].add(timing.prompt)
        histograms["request_generation_tokens"].add(tokens)
        if tokens > 1:
            histograms["token_seconds"].add((timing.last[index] - timing.first[index]) / (tokens - 1))

    def close(self, name: Hashable, now: float) -> None:
        """Readers are told nothing more of this request: samples that have not ended have failed."""
        with self._lock:
            if (timing := self._open.pop(name, None)) is not None:
                for index in range(len(timing.ended)):
                    self._end(timing, index, "error", now)

    def families(self, stats: EngineStats, health: Health) -> Iterator[Family]:
        """Under our names."""
        with self._lock:
            histograms = {name: each.copy() for name, each in self._histograms.items()}
            ended, refused = dict(self._ended), self._refused
        counts = stats.counts
        states = {"queued": stats.queued, "live": stats.live, "preempted": stats.preempted}
        yield Family("requests", "gauge", "Samples by state.", _by("state", states))
        yield Family("ended_total", "counter", "Samples that have ended, by how.", _by("reason", ended))
        yield Family("refused_total", "counter", "Requests refused as too many wait.", [({}, refused)])
        for name, text in (
            ("added", "Samples taken on."),
            ("prompt_tokens", "Tokens of prompts, of each sample when its first chunk is planned."),
            ("cached_tokens", "Tokens of prompts that were found in the cache."),
            ("computed_tokens", "Tokens that the device has computed, or computes."),
            ("sampled_tokens", "Tokens sampled."),
            ("scored_tokens", "Tokens of scores."),
            ("preemptions", "Samples that had to give up their slot for a while."),
            ("calls", "Calls of the device."),
            ("steps", "Steps, of which a call may run several."),
            ("failures", "Steps that have failed; the engine goes on with an empty cache."),
        ):
            yield Family(f"{name}_total", "counter", text, [({}, counts.get(name, 0))])
        yield Family("turn_seconds", "gauge", "The host's work in the last turn.", [({}, stats.turn_s)])
        yield Family("live", "gauge", "Whether it can answer (0: start it anew).", [({}, int(health.live))])
        yield Family("ready", "gauge", "Whether what is added now is answered.", [({}, int(health.ready))])
        age = [] if health.step_age is None else [({}, health.step_age)]
        yield Family("oldest_step_seconds", "gauge", "Age of the oldest call of the device that is under way.", age)
        for name, each in histograms.items():
            yield Family(name, "histogram", HISTOGRAMS[name][1], [({}, each)])


def vllm_families(
    stats: EngineStats, own: Mapping[str, Family], managers: Sequence[ManagerStats], layout_tokens: int
) -> Iterator[Family]:
    """The same under vLLM's names, which routers, autoscalers and dashboards read.

    Args:
        own: what `EngineMetrics.families` gave, by name.
        managers: of each data shard.
        layout_tokens: of a block.
    """
    counts = stats.counts

    def one(name: str, kind: str, text: str, value: float) -> Family:
        return Family(f"vllm:{name}", kind, text, [({}, value)])

    yield one("num_requests_waiting", "gauge", "Samples without a slot.", stats.queued + stats.preempted)
    yield one("num_requests_running", "gauge", "Samples with a slot.", stats.live)
    if managers:
        pools = [each.cache.pools["device"] for each in managers]
        total = sum(pool.total for pool in pools)
        used = sum(pool.total - pool.free - pool.evictable for pool in pools)
        text = "Blocks of live requests, of all blocks (0 to 1); what can be evicted is not in use."
        yield one("kv_cache_usage_perc", "gauge", text, used / total if total else 0.0)
        config = {"block_size": str(layout_tokens), "num_gpu_blocks": str(total)}
        yield Family("vllm:cache_config_info", "gauge", "Of the cache; always 1.", [(config, 1)])
    for name, count, text in (
        ("prefix_cache_queries_total", "prompt_tokens", "Prompt tokens looked up."),
        ("prefix_cache_hits_total", "cached_tokens", "Prompt tokens found."),
        ("prompt_tokens_total", "prompt_tokens", "Tokens of prompts."),
        ("generation_tokens_total", "sampled_tokens", "Tokens sampled."),
        ("num_preemptions_total", "preemptions", "Preemptions."),
    ):
        yield one(name, "counter", text, counts.get(count, 0))
    ended = [({"finished_reason": labels["reason"]}, value) for labels, value in own["ended_total"].samples]
    yield Family("vllm:request_success_total", "counter", own["ended_total"].text, ended)
    for name, (theirs, text, _) in HISTOGRAMS.items():
        yield Family(f"vllm:{theirs}", "histogram", text, own[name].samples)


def _by(label: str, values: Mapping[str, int]) -> list[tuple[dict[str, str], int]]:
    return [({label: name}, value) for name, value in values.items()]
