"""One snapshot of a manager's numbers, and Prometheus text of it. Pure Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import IntegrityError, PlanError
from .allocator import BlockAllocator
from .prefix.eviction import TreeCounters
from .prefix.node import TIERS, Tier
from .prefix.prefix_tree import PrefixTree

__all__ = ["CacheStats", "ManagerStats", "NamespaceUse", "PoolUse", "collect_stats", "pool_use", "prometheus_text"]


class PoolUse(NamedTuple):
    """Where a pool's units are: free + private + cached == total.

    Attributes:
        private: held by requests alone: being written, or not yet a full block.
        cached: held by the prefix tree.
        evictable: those of the cached that no request references.
        unit_bytes: bytes of one unit.
    """

    total: int
    free: int
    private: int
    cached: int
    evictable: int
    unit_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return (self.total - self.free) * self.unit_bytes


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """What the cache holds and has done, at one moment.

    Attributes:
        pools: by name: "device", "host", "snapshot", ...
        stored_blocks: blocks known to be in storage and nowhere else.
        counters: of the tree.
        admission_failures: how often a request did not become live (admitted here or from another host, resumed, or
            forked), by what bound: a pool ("slot", "device", along a pool axis with its rank), or "context": it has
            more tokens than one request can ever hold.
        generation: of the manager.
        namespaces: of each namespace that has units and each of device and host, where namespaces have shares.
    """

    pools: Mapping[str, PoolUse]
    stored_blocks: int
    counters: TreeCounters
    admission_failures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    generation: int = 0
    namespaces: Mapping[tuple[Hashable, Tier], NamespaceUse] = dataclasses.field(default_factory=dict)

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens looked up and not found."""
        return self.counters.lookup_tokens - sum(self.counters.hit_tokens.values())

    def hit_rate(self, tier: Tier | None = None) -> float:
        """Share of the tokens looked up that were found in a tier (None: in any)."""
        found = self.counters.hit_tokens
        tokens = sum(found.values()) if tier is None else found[tier]
        return tokens / self.counters.lookup_tokens if self.counters.lookup_tokens else 0.0


class NamespaceUse(NamedTuple):
    """What a namespace has of a tier, where namespaces have shares (`NamespaceShares`): units in blocks.

    Attributes:
        used: its blocks, and its states, each as many blocks as its bytes take.
        share: the most of the tier that it may take from others.
        limit: that in blocks.
        over: whether it has more: then it is evicted first.
        evicted: blocks and states that have left the tier because of that.
    """

    used: int
    share: float
    limit: int
    over: bool
    evicted: int


class ManagerStats(NamedTuple):
    """Where everything is, and what has happened so far.

    Attributes:
        blocks_total, blocks_free: device blocks; cached ones are not free, though available.
        blocks_used: held by requests or cached.
        blocks_ahead: of live requests, beyond their cached tokens.
        slots_total, slots_free, slots_used: of live requests, snapshots not counted.
        tokens_cached: of live requests, those they share counted for each.
        generation: resets of the manager.
        preempted: requests that wait to be resumed.
        cache: pools, hits, evictions, failures.
    """

    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_ahead: int
    slots_total: int
    slots_free: int
    slots_used: int
    tokens_cached: int
    generation: int
    preempted: int
    cache: CacheStats


def pool_use(pool: BlockAllocator, *, private: int, cached: int, evictable: int, unit_bytes: int = 0) -> PoolUse:
    """Returns the numbers of one pool. Raises `IntegrityError` unless they account for every unit."""
    use = PoolUse(pool.num_total, pool.num_free, private, cached, evictable, unit_bytes)
    if use.free + private + cached != use.total or min(use) < 0 or evictable > cached:
        raise IntegrityError(f"{pool.name} pool: {use} does not add up to {use.total}")
    return use


def collect_stats(
    tree: PrefixTree,
    device: BlockAllocator,
    host: BlockAllocator | None = None,
    *,
    private: int,
    private_host: int = 0,
    block_bytes: int = 0,
    page_bytes: int = 0,
    state_pages: int = 0,
    state_blocks: int = 0,
    others: Mapping[str, PoolUse] | None = None,
    admission_failures: Mapping[str, int] | None = None,
    generation: int = 0,
) -> CacheStats:
    """Returns the numbers now. `private` units are those that requests hold and the tree does not count as cached.

    Args:
        page_bytes: of a page of the host.
        state_pages: pages that hold cached states, which nobody references.
        state_blocks: device blocks that hold cached states.
        others: further pools' numbers, to be listed with these.

    Raises:
        IntegrityError: a pool's units are not all accounted for.
    """
    uses = {}
    sides = (
        (Tier.DEVICE, device, private, state_blocks, block_bytes),
        (Tier.HOST, host, private_host, state_pages, page_bytes),
    )
    for tier, pool, own, states, size in sides:
        if pool is not None:
            held = tree.held(tier)
            uses[pool.name] = pool_use(
                pool,
                private=own,
                cached=held + states,
                evictable=min(tree.evictable(tier), held) + states,
                unit_bytes=size,
            )
    counters = dataclasses.replace(
        tree.counters, hit_tokens=dict(tree.counters.hit_tokens), evicted=dict(tree.counters.evicted)
    )
    uses |= others or {}
    failures, stored = dict(admission_failures or {}), tree.held(Tier.STORAGE)
    return CacheStats(uses, stored, counters, failures, generation, _namespaces(tree))


def _namespaces(tree: PrefixTree) -> dict[tuple[Hashable, Tier], NamespaceUse]:
    capacity = tree.owners.capacity
    return {
        (owner.name, tier): NamespaceUse(
            used, owner.share, int(owner.share * capacity[tier]), owner.over[tier], owner.evicted[tier]
        )
        for owner in list(tree.owners.known.values())
        for tier, used in owner.used.items()
        if capacity.get(tier)
    }


def prometheus_text(stats: ManagerStats | CacheStats, prefix: str = "dsv4_cache") -> str:
    """Returns what `KVCacheManager.stats` gave in Prometheus' text exposition format, version 0.0.4; or its `cache`
    alone.

    Raises:
        PlanError: it is neither.
    """
    if not isinstance(stats, ManagerStats | CacheStats):
        raise PlanError(f"prometheus_text takes what KVCacheManager.stats() gave, got {type(stats).__name__}")
    families = _families(stats) if isinstance(stats, CacheStats) else _all_families(stats)
    lines = []
    for name, kind, text, samples in families:
        lines += [f"# HELP {prefix}_{name} {text}", f"# TYPE {prefix}_{name} {kind}"]
        for labels, value in samples:
            shown = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
            lines.append(f"{prefix}_{name}{{{shown}}} {value}" if shown else f"{prefix}_{name} {value}")
    return "\n".join(lines) + "\n"


_Samples = list[tuple[dict[str, str], float]]


def _all_families(stats: ManagerStats) -> Iterator[tuple[str, str, str, _Samples]]:
    requests: _Samples = [({"state": "live"}, stats.slots_used), ({"state": "preempted"}, stats.preempted)]
    yield "requests", "gauge", "Requests by state.", requests
    yield "request_tokens", "gauge", "Tokens of live requests in the cache.", [({}, stats.tokens_cached)]
    yield "blocks_ahead", "gauge", "Blocks of live requests beyond these tokens.", [({}, stats.blocks_ahead)]
    yield from _families(stats.cache)


def _families(stats: CacheStats) -> Iterator[tuple[str, str, str, _Samples]]:
    counters, pools = stats.counters, stats.pools

    def by_tier(values: Mapping[Tier, float]) -> _Samples:
        return [({"tier": tier.name.lower()}, values[tier]) for tier in TIERS]

    states = ("free", "private", "cached", "evictable")
    units: _Samples = [({"pool": n, "state": s}, getattr(use, s)) for n, use in pools.items() for s in states]
    yield "units", "gauge", "Units of a pool. Evictable ones are among the cached.", units
    yield "pool_size", "gauge", "Size of a pool in units.", [({"pool": n}, use.total) for n, use in pools.items()]
    yield "used_bytes", "gauge", "Bytes of units in use.", [({"pool": n}, use.used_bytes) for n, use in pools.items()]
    yield "stored_blocks", "gauge", "Blocks that only storage has.", [({}, stats.stored_blocks)]
    yield "lookups_total", "counter", "Prompts looked up.", [({}, counters.lookups)]
    yield "hits_total", "counter", "Prompts of which at least one block was found.", [({}, counters.hits)]
    yield "lookup_tokens_total", "counter", "Prompt tokens looked up.", [({}, counters.lookup_tokens)]
    yield "hit_tokens_total", "counter", "Prompt tokens found, by tier.", by_tier(counters.hit_tokens)
    yield "recomputed_tokens_total", "counter", "Prompt tokens not found.", [({}, stats.recomputed_tokens)]
    yield "evictions_total", "counter", "Blocks that left a tier.", by_tier(counters.evicted)
    yield "snapshot_evictions_total", "counter", "Snapshot copies evicted.", [({}, counters.evicted_snapshots)]
    yield "duplicates_total", "counter", "Blocks computed twice at once.", [({}, counters.duplicates)]
    yield (
        "adoptions_total",
        "counter",
        "Blocks computed again and taken up by a lower tier's node.",
        [({}, counters.adoptions)],
    )
    failures: _Samples = [({"pool": pool}, n) for pool, n in stats.admission_failures.items()]
    yield "admission_failures_total", "counter", "Requests that did not become live, by what bound.", failures
    yield "generation", "gauge", "Resets of the manager.", [({}, stats.generation)]
    if spaces := stats.namespaces:

        def each(field: str) -> _Samples:
            labels = ({"namespace": _named(name), "tier": tier.name.lower()} for name, tier in spaces)
            return [(label, float(getattr(use, field))) for label, use in zip(labels, spaces.values(), strict=True)]

        yield "namespace_units", "gauge", "Units of a namespace, in blocks.", each("used")
        yield "namespace_limit", "gauge", "Units that a namespace may take from others, in blocks.", each("limit")
        yield "namespace_over", "gauge", "Whether a namespace has more than its share.", each("over")
        yield "namespace_evictions_total", "counter", "Units evicted for having more than a share.", each("evicted")


def _named(namespace: Any) -> str:
    """A namespace as a label: its tenant, and its adapter if it has one."""
    parts = [getattr(namespace, "tenant", namespace), getattr(namespace, "adapter", None)]
    return "/".join("" if part is None else str(part) for part in parts).removesuffix("/")


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
