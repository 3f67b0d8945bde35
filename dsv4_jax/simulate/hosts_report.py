"""Several hosts in numbers, ready for JSON. Pure Python + numpy."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .hosts import Handed, HostsRun
from .simulation import Simulation

__all__ = ["hosts_report"]

_PARTS = ("wait", "prompt", "hand-off", "decode wait", "last chunk")


def hosts_report(run: HostsRun) -> dict[str, Any]:
    """All of it depends on trace, server and hosts alone. Tokens, bytes and seconds, unless a name says otherwise.

    "first_token_parts" are means that add up to that of "first_token"; "bound" names the largest of them. "token_gap"
    is the time between two tokens of a request, over all tokens; "per_output_token" its mean of each request, over all
    requests. "computed" are the tokens of the chunks of all hosts: what preemptions and hand-offs have lost counts
    again. "hits" are found where the prompt is computed; "found_tokens" of a host that decodes are handed over, too.
    """
    jobs = [handed.job for handed in run.requests]
    began, over = min(job.trace.arrival for job in jobs), max(job.ended for job in jobs)
    seconds, asked = max(over - began, 1e-9), jobs[-1].trace.arrival - began
    prompt, drawn = sum(job.trace.prompt_tokens for job in jobs), sum(job.drawn for job in jobs)
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
            "output_tokens": drawn,
        },
        "seconds": {
            "simulated": seconds,
            "first_token": _spread([job.first_token - job.trace.arrival for job in jobs]),
            "first_token_parts": parts,
            "per_output_token": _spread([(j.ended - j.first_token) / (j.drawn - 1) for j in jobs if j.drawn > 1]),
            "token_gap": _weighted(gaps),
            "whole_request": _spread([job.ended - job.trace.arrival for job in jobs]),
        },
        "bound": max(parts, key=lambda name: parts[name]),
        "per_second": {"output_tokens": drawn / seconds, "prompt_tokens": prompt / seconds},
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
    """Seconds of each of `_PARTS`."""
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
    return {
        "bytes": sent.total(),
        "blocks": run.records["block"],
        "states": run.records["slot"],
        "busiest_share": share,
    }


def _host(kind: str, host: Simulation, seconds: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "requests": len(host.jobs),
        "busy": host.busy / seconds,
        "live_mean": host.live_seconds / seconds,
        "live_most": host.live_most,
        "found_tokens": sum(job.hit for job in host.jobs),
        "prompt_tokens": host.totals.prompt,
        "computed": host.prefill_tokens,
        "steps": host.steps,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    data = np.array(values or [0.0])
    return {"mean": float(data.mean())} | {f"p{p}": float(np.quantile(data, p / 100)) for p in (50, 95, 99)}


def _weighted(gaps: Sequence[tuple[float, int]]) -> dict[str, float]:
    """As `_spread`, of seconds that count so many times."""
    counts = collections.Counter[float]()
    for seconds, count in gaps or [(0.0, 1)]:
        counts[seconds] += count
    values = np.array(sorted(counts))
    weights = np.array([counts[value] for value in values.tolist()])
    sums = np.cumsum(weights)
    places = {p: int(np.searchsorted(sums, sums[-1] * p / 100)) for p in (50, 95, 99)}
    mean = float((values * weights).sum() / sums[-1])
    return {"mean": mean} | {f"p{p}": float(values[place]) for p, place in places.items()}
