"""One snapshot of a manager's numbers, and Prometheus text of it. Pure Python."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ..errors import IntegrityError, PlanError
from .allocator import BlockAllocator
from .prefix.eviction import TreeCounters
from .prefix.node import TIERS, Tier
from .prefix.prefix_tree import PrefixTree

__all__ = [
    "ENDS",
    "CacheStats",
    "Family",
    "HandoffCounts",
    "HandoffStats",
    "Histogram",
    "ManagerStats",
    "Measured",
    "NamespaceUse",
    "PoolUse",
    "Samples",
    "collect_stats",
    "exposition",
    "pool_use",
    "prometheus_text",
]


class PoolUse(NamedTuple):
    """Where a pool's units are: free + private + cached == total.

    Attributes:
        private: held by requests alone: being written, or not yet a full block.
        cached: held by the prefix tree.
        evictable: those of the cached that can leave: no request references them, and no other host may read them.
        unit_bytes: bytes of one unit.
        pinned: those of the cached that another host may read, or that wait for a prompt of its.
    """

    total: int
    free: int
    private: int
    cached: int
    evictable: int
    unit_bytes: int = 0
    pinned: int = 0

    @property
    def used_bytes(self) -> int:
        return (self.total - self.free) * self.unit_bytes


# Why hand-offs are given up. Sent: its time was over, a younger one needed room, this host took it back, a step of it
# did not run, the request's text was changed, the manager was reset. Received: the peer is lost, a record was torn, its
# time was over, no room here, what came before it was evicted, the manager was reset, the pool is not where it was
# published, it was not waited for.
ENDS = {
    "sent": ("time", "room", "withdrawn", "step", "changed", "reset"),
    "received": ("peer", "torn", "time", "room", "evicted", "reset", "moved", "left"),
}


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

    def families(self) -> Iterator[Family]:
        """For `prometheus_text`."""
        return _families(self)

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens looked up and not found."""
        return self.counters.lookup_tokens - sum(self.counters.hit_tokens.values())

    def hit_rate(self, tier: Tier | None = None) -> float:
        """Share of the tokens looked up that were found in a tier (None: in any)."""
        found = self.counters.hit_tokens
        tokens = sum(found.values()) if tier is None else found[tier]
        return tokens / self.counters.lookup_tokens if self.counters.lookup_tokens else 0.0


@dataclasses.dataclass(frozen=True)
class HandoffStats:
    """Prompts that went to other hosts and came from them, since the manager was made; resets do not matter.

    Attributes:
        leases: those of now.
        lease_pages: pages of the host that they hold, each counted once.
        peers: of each peer that leases name, how many pages its leases hold.
        begun: how many hand-offs were "sent" (their leases) and "received" (arrivals).
        ended: how many of each have ended, by how: "done", or the reason for which they were given up.
    """

    leases: int = 0
    lease_pages: int = 0
    peers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    begun: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ended: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)

    def families(self) -> Iterator[Family]:
        """For `prometheus_text`."""
        yield Family("leases", "gauge", "Prompts that other hosts may read.", [({}, self.leases)])
        yield Family("lease_pages", "gauge", "Pages of the host that they hold.", [({}, self.lease_pages)])
        peers: Samples = [({"peer": name}, pages) for name, pages in self.peers.items()]
        yield Family("lease_peer_pages", "gauge", "Pages of the host that leases of a known peer hold.", peers)
        begun: Samples = [({"side": side}, count) for side, count in self.begun.items()]
        yield Family("handoffs_begun_total", "counter", "Prompts told to other hosts, and told of by them.", begun)
        ended: Samples = [({"side": s, "reason": reason}, count) for (s, reason), count in self.ended.items()]
        yield Family("handoffs_ended_total", "counter", "Those that were done, or given up for what reason.", ended)


class HandoffCounts:
    """What a manager counts of hand-offs; its leases and its arrivals are counted by whoever keeps them."""

    def __init__(self) -> None:
        self.begun = dict.fromkeys(("sent", "received"), 0)
        self.ended = {(side, reason): 0 for side, reasons in ENDS.items() for reason in ("done", *reasons)}

    def begin(self, side: str) -> None:
        """One more."""
        self.begun[side] += 1

    def end(self, side: str, reason: str) -> None:
        """One has ended."""
        self.ended[side, reason] += 1


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
        handoffs: leases, and prompts that went to other hosts or came from them.
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
    handoffs: HandoffStats = HandoffStats()

    def families(self) -> Iterator[Family]:
        """For `prometheus_text`."""
        return _all_families(self)


def pool_use(
    pool: BlockAllocator, *, private: int, cached: int, evictable: int, unit_bytes: int = 0, pinned: int = 0
) -> PoolUse:
    """Returns the numbers of one pool. Raises `IntegrityError` unless they account for every unit."""
    use = PoolUse(pool.num_total, pool.num_free, private, cached, evictable, unit_bytes, pinned)
    if use.free + private + cached != use.total or min(use) < 0 or evictable + pinned > cached:
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
            held, blocks, pages = tree.held(tier), 0, 0
            if tier is Tier.HOST:  # (what was held and was taken back all the same is held in name only)
                blocks, pages = min(tree.holds.blocks, held), min(tree.holds.pages, states)
            uses[pool.name] = pool_use(
                pool,
                private=own,
                cached=held + states,
                evictable=min(tree.evictable(tier), held - blocks) + states - pages,
                unit_bytes=size,
                pinned=blocks + pages,
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


class Histogram:
    """Counts of values by upper bounds. Not for several threads at once.

    Args:
        bounds: in rising order; what is above the last is counted as well.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value, so many times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        """Another one of the same counts."""
        same = Histogram(self.bounds)
        same.counts, same.total = self.counts.copy(), self.total
        return same

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


Samples: TypeAlias = Sequence[tuple[Mapping[str, str], float | Histogram]]


class Family(NamedTuple):
    """A metric as a scraper reads it.

    Attributes:
        name: without the prefix of whose it is; with a colon: of another server's, and complete.
        kind: "gauge", "counter" or "histogram".
        text: what it says.
        samples: labels, and a number or a histogram.
    """

    name: str
    kind: str
    text: str
    samples: Samples


@runtime_checkable
class Measured(Protocol):
    """Numbers that `prometheus_text` can print: of a manager, of its cache, of stores, of a transport."""

    def families(self) -> Iterable[Family]:
        """The metrics, each once."""
        ...


def prometheus_text(stats: Measured, prefix: str = "dsv4_cache") -> str:
    """Returns what `KVCacheManager.stats` gave in Prometheus' text exposition format, version 0.0.4; or its `cache`
    alone, or what `stats` of `StorageDriver`, `RecordTransport` or `RemoteDriver` gave (say another prefix there).

    Raises:
        PlanError: it is none of these.
    """
    if isinstance(stats, type) or not isinstance(stats, Measured):
        raise PlanError(f"prometheus_text takes what KVCacheManager.stats() gave, got {type(stats).__name__}")
    return exposition([(prefix, {}, stats.families())])


def exposition(groups: Iterable[tuple[str, Mapping[str, str], Iterable[Family]]]) -> str:
    """Returns the text of all these metrics; those of one name stand together, as a scraper demands.

    Args:
        groups: of each a prefix of the names, labels of every sample, and the metrics.
    """
    heads: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    for prefix, common, families in groups:
        for name, kind, text, samples in families:
            full = name if ":" in name else f"{prefix}_{name}"
            heads.setdefault(full, f"# HELP {full} {text}\n# TYPE {full} {kind}")
            some = lines.setdefault(full, [])
            for labels, value in samples:
                some += _lines(full, {**labels, **common}, value)
    return "".join(f"{head}\n" + "".join(f"{line}\n" for line in lines[full]) for full, head in heads.items())


def _lines(name: str, labels: Mapping[str, str], value: float | Histogram) -> Iterator[str]:
    if not isinstance(value, Histogram):
        yield f"{name}{_labels(labels)} {value}"
        return
    below = 0
    for bound, count in zip((*value.bounds, "+Inf"), value.counts, strict=True):
        below += count
        yield f"{name}_bucket{_labels({**labels, 'le': str(bound)})} {below}"
    yield f"{name}_sum{_labels(labels)} {value.total}"
    yield f"{name}_count{_labels(labels)} {below}"


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
    return f"{{{shown}}}" if shown else ""


def _all_families(stats: ManagerStats) -> Iterator[Family]:
    requests: Samples = [({"state": "live"}, stats.slots_used), ({"state": "preempted"}, stats.preempted)]
    yield Family("requests", "gauge", "Requests by state.", requests)
    yield Family("request_tokens", "gauge", "Tokens of live requests in the cache.", [({}, stats.tokens_cached)])
    yield Family("blocks_ahead", "gauge", "Blocks of live requests beyond these tokens.", [({}, stats.blocks_ahead)])
    yield from stats.handoffs.families()
    yield from _families(stats.cache)


def _families(stats: CacheStats) -> Iterator[Family]:
    counters, pools = stats.counters, stats.pools

    def by_tier(values: Mapping[Tier, float]) -> Samples:
        return [({"tier": tier.name.lower()}, values[tier]) for tier in TIERS]

    states = ("free", "private", "cached", "evictable", "pinned")
    units: Samples = [({"pool": n, "state": s}, getattr(use, s)) for n, use in pools.items() for s in states]
    yield Family("units", "gauge", "Units of a pool. Evictable and pinned ones are among the cached.", units)
    yield Family(
        "pool_size", "gauge", "Size of a pool in units.", [({"pool": n}, use.total) for n, use in pools.items()]
    )
    yield Family(
        "used_bytes", "gauge", "Bytes of units in use.", [({"pool": n}, use.used_bytes) for n, use in pools.items()]
    )
    yield Family("stored_blocks", "gauge", "Blocks that only storage has.", [({}, stats.stored_blocks)])
    yield Family("lookups_total", "counter", "Prompts looked up.", [({}, counters.lookups)])
    yield Family("hits_total", "counter", "Prompts of which at least one block was found.", [({}, counters.hits)])
    yield Family("lookup_tokens_total", "counter", "Prompt tokens looked up.", [({}, counters.lookup_tokens)])
    yield Family("hit_tokens_total", "counter", "Prompt tokens found, by tier.", by_tier(counters.hit_tokens))
    yield Family("recomputed_tokens_total", "counter", "Prompt tokens not found.", [({}, stats.recomputed_tokens)])
    yield Family("evictions_total", "counter", "Blocks that left a tier.", by_tier(counters.evicted))
    yield Family("snapshot_evictions_total", "counter", "Snapshot copies evicted.", [({}, counters.evicted_snapshots)])
    yield Family("duplicates_total", "counter", "Blocks computed twice at once.", [({}, counters.duplicates)])
    text = "Blocks computed again and taken up by a lower tier's node."
    yield Family("adoptions_total", "counter", text, [({}, counters.adoptions)])
    failures: Samples = [({"pool": pool}, n) for pool, n in stats.admission_failures.items()]
    yield Family("admission_failures_total", "counter", "Requests that did not become live, by what bound.", failures)
    yield Family("generation", "gauge", "Resets of the manager.", [({}, stats.generation)])
    if spaces := stats.namespaces:

        def each(field: str) -> Samples:
            labels = ({"namespace": _named(name), "tier": tier.name.lower()} for name, tier in spaces)
            return [(label, float(getattr(use, field))) for label, use in zip(labels, spaces.values(), strict=True)]

        yield Family("namespace_units", "gauge", "Units of a namespace, in blocks.", each("used"))
        yield Family(
            "namespace_limit", "gauge", "Units that a namespace may take from others, in blocks.", each("limit")
        )
        yield Family("namespace_over", "gauge", "Whether a namespace has more than its share.", each("over"))
        yield Family(
            "namespace_evictions_total", "counter", "Units evicted for having more than a share.", each("evicted")
        )


def _named(namespace: Any) -> str:
    """A namespace as a label: its tenant, and its adapter if it has one."""
    parts = [getattr(namespace, "tenant", namespace), getattr(namespace, "adapter", None)]
    return "/".join("" if part is None else str(part) for part in parts).removesuffix("/")


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
