"""A simulation of one host or several in numbers, ready for JSON. Pure Python + numpy."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..manager.policies import EVICTION_POLICIES
from ..records import page_bytes
from .bounds import Bounds
from .hosts import Handed, HostsRun
from .simulation import Server, Simulation

__all__ = ["hosts_report", "report", "with_bounds"]

_PERCENTS = (50, 95, 99)
_PARTS = ("wait", "prompt", "hand-off", "decode wait", "last chunk")


def report(result: Simulation) -> dict[str, Any]:
    """Returns the numbers of one host, which but for "cpu" depend on trace and server alone: tokens, bytes and
    seconds."""
    jobs, server, stats = result.jobs, result.server, result.stats
    counters = stats.cache.counters
    prompt, sampled = sum(j.trace.prompt_tokens for j in jobs), sum(j.sampled for j in jobs)
    hit, from_host = sum(j.hit for j in jobs), sum(j.hit_host for j in jobs)
    seen = sum(j.seen for j in jobs)
    moved = result.shadow.moved._asdict()
    waits = {pool: sum(pool in j.held_up for j in jobs) for pool in ("slot", "device")}
    return {
        "requests": {
            "run": len(jobs),
            "rejected": {limit: result.rejected[limit] for limit in ("context", "device")},
            "tenants": len({j.trace.tenant for j in jobs}),
            "prompt_tokens": prompt,
            "output_tokens": sampled,
        },
        "cache": {
            "size": dataclasses.asdict(server.size),
            "host": server.host._asdict() if server.host else None,
            "kv_format": server.layout.kv_row.name,
            "index_format": server.layout.index_row.name,
            "block_tokens": server.layout.block_tokens,
            "bytes": server.layout.total_bytes(server.size),
            "host_bytes": 0 if server.host is None else (1 + server.host.num_pages) * page_bytes(server.layout),
            "policy": server.policy.write.name if server.policy else "none",
            "order": _eviction(server),
        },
        "hits": {
            "requests": sum(j.hit > 0 for j in jobs),
            "tokens": {"device": hit - from_host, "host": from_host},
            "rate": _share(hit, prompt),
            "rate_by_tier": {"device": _share(hit - from_host, prompt), "host": _share(from_host, prompt)},
            "seen_before_tokens": seen,
            "highest_possible_rate": _share(seen, prompt),
            "share_of_highest": _share(hit, seen),
        },
        "recomputed_tokens": {"seen_before": seen - hit, "after_preemption": result.lost},
        "evictions": {tier.name.lower(): count for tier, count in counters.evicted.items()}
        | {"snapshot": counters.evicted_snapshots},
        "transfer_bytes": moved | {"total": sum(moved.values())},
        "preemptions": result.preemptions,
        "admission_failures": waits | {"never": sum(result.rejected.values())},
        "pools": {
            name: {
                "total": pool.total,
                "peak_used": result.peak.get(name, 0),
                "peak_in_use": result.peak_in_use.get(name, 0),
                "unit_bytes": pool.unit_bytes,
            }
            for name, pool in stats.cache.pools.items()
        },
        "seconds": {
            "simulated": result.now,
            "busy": result.busy,
            "waited_for_transfers": result.waited,
            "queued": _spread([j.admitted - j.trace.arrival for j in jobs]),
            "first_token": _spread([j.first_token - j.trace.arrival for j in jobs]),
            "whole_request": _spread([j.ended - j.trace.arrival for j in jobs]),
        },
        "steps": result.steps,
        "planned_steps": result.planned,
        "scheduled_tokens": result.scheduled_tokens,
        "isolation": {"foreign_units": result.shadow.foreign, "wrong_units": result.shadow.wrong},
        "cpu": {"step": _spread(result.step_cpu), "admission": _spread(result.admission_cpu)},
        "bound": None,
        "timeline": result.timeline.columns(),
    }


def with_bounds(answer: dict[str, Any], found: Bounds) -> dict[str, Any]:
    """A report, and what no cache of its memory could exceed (see `bounds`): rates, and the run's shares of them."""
    hit = sum(answer["hits"]["tokens"].values())
    bound = {
        "endless_rate": _share(found.endless, found.prompt),
        "blocks_rate": _share(found.blocks, found.prompt),
        "states_rate": _share(found.states, found.prompt),
        "clairvoyant_rate": _share(found.clairvoyant, found.prompt),
        "share_of_endless": _share(hit, found.endless),
        "share_of_clairvoyant": _share(hit, found.clairvoyant),
    }
    return answer | {"bound": bound}


def _eviction(server: Server) -> str:
    """The name of the eviction policy, "-" without one."""
    return next(
        (name for name, policy in EVICTION_POLICIES.items() if server.policy and policy is server.policy.eviction), "-"
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    return _percentiles(values, 50, 99) | {"max": float(max(values, default=0.0))}


def _percentiles(values: Sequence[float], *percents: int) -> dict[str, float]:
    data = np.array(values or [0.0])
    return {"mean": float(data.mean())} | {f"p{p}": float(np.quantile(data, p / 100)) for p in percents}


# Several hosts


def hosts_report(run: HostsRun) -> dict[str, Any]:
    """Returns the numbers of several hosts, which depend on trace, server and hosts alone: tokens, bytes and seconds.

    "requests" has the rate at which requests come, "per_second" the rates at which they and their tokens are served.
    "first_token_parts" are means that add up to that of "first_token"; "bound" names the largest of them. "token_gap"
    is the time between two tokens of a request, over all tokens; "per_output_token" its mean of each request, over all
    requests. "computed" are the tokens of the chunks of all hosts: what preemptions and hand-offs have lost counts
    again. "hits" are found where the prompt is computed; "found_tokens" of a host that decodes are handed over, too.
    """
    jobs = [handed.job for handed in run.requests]
    began, over = min(job.trace.arrival for job in jobs), max(job.ended for job in jobs)
    seconds, asked = max(over - began, 1e-9), jobs[-1].trace.arrival - began
    prompt, sampled = sum(job.trace.prompt_tokens for job in jobs), sum(job.sampled for job in jobs)
    means = np.mean([_parts(handed) for handed in run.requests], axis=0).tolist()
    parts = dict(zip(_PARTS if run.network is not None else _PARTS[:2], means, strict=False))
    found = [handed.prompt or handed.job for handed in run.requests]
    hit = sum(job.hit for job in found)
    gaps = [gap for _, host in run.hosts for gap in host.token_gaps]
    return {
        "requests": {
            "run": len(jobs),
            "rejected": {limit: run.rejected[limit] for limit in ("context", "device")},
            "per_second": (len(jobs) - 1) / asked if asked else 0.0,
            "prompt_tokens": prompt,
            "output_tokens": sampled,
        },
        "seconds": {
            "simulated": seconds,
            "first_token": _percentiles([job.first_token - job.trace.arrival for job in jobs], *_PERCENTS),
            "first_token_parts": parts,
            "per_output_token": _percentiles(
                [(j.ended - j.first_token) / (j.sampled - 1) for j in jobs if j.sampled > 1], *_PERCENTS
            ),
            "token_gap": _weighted(gaps),
            "whole_request": _percentiles([job.ended - job.trace.arrival for job in jobs], *_PERCENTS),
        },
        "bound": max(parts, key=lambda name: parts[name]),
        "per_second": {
            "requests": len(jobs) / seconds,
            "output_tokens": sampled / seconds,
            "prompt_tokens": prompt / seconds,
        },
        "hits": {"tokens": hit, "rate": hit / prompt},
        "computed": sum(host.prefill_tokens for _, host in run.hosts),
        "preemptions": sum(host.preemptions for _, host in run.hosts),
        "hand_offs": {
            "sent": sum(handed.prompt is not None for handed in run.requests),
            "whole": run.whole,
            "given_up": dict(sorted(run.given_up.items())),
        },
        "network": _network(run, seconds),
        "hosts": [_host(kind, host, seconds) for kind, host in run.hosts],
        "isolation": {
            "foreign_units": sum(host.shadow.foreign for _, host in run.hosts),
            "wrong_units": sum(host.shadow.wrong for _, host in run.hosts),
            "held_units": run.held,
        },
    }


def _parts(handed: Handed) -> tuple[float, ...]:
    """Returns the seconds that each of `_PARTS` took of a request's time to the first token."""
    job, prompt = handed.job, handed.prompt
    if prompt is None:
        return job.begun - job.trace.arrival, job.first_token - job.begun, 0.0, 0.0, 0.0
    ended = min(prompt.ended, job.offered)  # nobody waited for the rest of a hand-off that had failed
    begun = min(prompt.begun, ended) if prompt.begun >= 0 else ended
    times = (job.trace.arrival, begun, ended, job.offered, job.begun, job.first_token)
    return tuple(after - before for before, after in itertools.pairwise(times))


def _network(run: HostsRun, seconds: float) -> dict[str, Any]:
    if run.network is None:
        return {"bytes": 0, "blocks": 0, "states": 0, "busiest_share": 0.0}
    sent, received = run.network.sent, run.network.received
    busiest = max([*sent.values(), *received.values()], default=0)
    share = busiest / run.network.link.bandwidth / seconds
    blocks, states = run.records["block"], run.records["slot"]
    return {"bytes": sent.total(), "blocks": blocks, "states": states, "busiest_share": share}


def _host(kind: str, host: Simulation, seconds: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "requests": len(host.jobs),
        "busy": host.busy / seconds,
        "live_mean": host.live_seconds / seconds,
        "live_most": host.live_max,
        "found_tokens": sum(job.hit for job in host.jobs),
        "prompt_tokens": host.totals.prompt,
        "computed": host.prefill_tokens,
        "steps": host.steps,
    }


def _weighted(gaps: Sequence[tuple[float, int]]) -> dict[str, float]:
    """As `_percentiles`, of seconds each of which counts so many times."""
    counts = collections.Counter[float]()
    for seconds, count in gaps or [(0.0, 1)]:
        counts[seconds] += count
    values = np.array(sorted(counts))
    weights = np.array([counts[value] for value in values.tolist()])
    sums = np.cumsum(weights)
    places = {p: int(np.searchsorted(sums, sums[-1] * p / 100)) for p in _PERCENTS}
    mean = float((values * weights).sum() / sums[-1])
    return {"mean": mean} | {f"p{p}": float(values[place]) for p, place in places.items()}
