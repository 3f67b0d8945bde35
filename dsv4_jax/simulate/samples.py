"""How full a simulated host is, and what it has found so far: of the steps that are looked at. Pure Python."""

from __future__ import annotations

from ..manager import ManagerStats
from ..manager.metrics import PoolUse
from .simulation import Simulation, Totals

__all__ = ["note_peaks", "sample"]


def note_peaks(result: Simulation, stats: ManagerStats) -> None:
    """Of every pool the most units in use, with what is cached and by requests alone."""
    for name, pool in stats.cache.pools.items():
        result.peak[name] = max(result.peak.get(name, 0), pool.total - pool.free)
        result.peak_in_use[name] = max(result.peak_in_use.get(name, 0), _in_use(name, pool))


def sample(totals: Totals, stats: ManagerStats) -> dict[str, float]:
    """What a `Timeline` has of one moment, but for who is there."""
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
    for tier, count in stats.cache.counters.evicted.items():
        numbers[f"evicted_{tier.name.lower()}"] = count
    numbers["evicted_snapshot"] = stats.cache.counters.evicted_snapshots
    return numbers


def _in_use(name: str, pool: PoolUse) -> int:
    """Units of requests. Only device blocks are shared with the cache; on the host lie copies of what is in use."""
    return pool.private + (pool.cached - pool.evictable if name == "device" else 0)
