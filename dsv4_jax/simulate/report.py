"""A simulation in numbers, ready for JSON. Pure Python + numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..manager.policies import ORDERS
from ..records import page_bytes
from .bounds import Bounds
from .simulation import Server, Simulation

__all__ = ["report", "with_bounds"]


def report(result: Simulation) -> dict[str, Any]:
    """All but "cpu" depends on trace and server alone. Tokens, bytes and seconds, unless a name says otherwise."""
    jobs, server, stats = result.jobs, result.server, result.stats
    counters = stats.cache.counters
    prompt, drawn = sum(j.trace.prompt_tokens for j in jobs), sum(j.drawn for j in jobs)
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
            "output_tokens": drawn,
        },
        "cache": {
            "size": dataclasses.asdict(server.size),
            "host": server.host._asdict() if server.host else None,
            "kv_format": server.layout.kv_row.name,
            "index_format": server.layout.index_row.name,
            "block_tokens": server.layout.block_tokens,
            "bytes": server.layout.total_bytes(server.size),
            "host_bytes": _host_bytes(server),
            "policy": server.policy.write.name if server.policy else "none",
            "order": _order(server),
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


def _order(server: Server) -> str:
    """The name of the order of eviction, "-" without one."""
    return next((name for name, order in ORDERS.items() if server.policy and order is server.policy.order), "-")


def _host_bytes(server: Server) -> int:
    """The null page included."""
    return 0 if server.host is None else (1 + server.host.num_pages) * page_bytes(server.layout)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    data = np.array(values)
    return {
        "mean": float(data.mean()),
        "p50": float(np.quantile(data, 0.5)),
        "p99": float(np.quantile(data, 0.99)),
        "max": float(data.max()),
    }
