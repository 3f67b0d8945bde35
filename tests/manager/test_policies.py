"""Strategy objects, and the numbers about a cache as Prometheus text."""

from __future__ import annotations

import dataclasses
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import ConfigError, IntegrityError, PerformanceWarning, PlanError, RequestError
from dsv4_jax.manager.allocator import BlockAllocator
from dsv4_jax.manager.metrics import collect_stats, pool_use, prometheus_text
from dsv4_jax.manager.policies import (
    EVICTION_POLICIES,
    CachePolicy,
    HostWatermark,
    NamespaceShares,
    SnapshotKind,
    SnapshotPlacement,
    WritePolicy,
)
from dsv4_jax.manager.prefix.eviction_policies import LRU
from dsv4_jax.manager.prefix.hashing import Namespace
from dsv4_jax.manager.prefix.node import Node, Tier
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree
from dsv4_jax.records import state_blocks

from .prefix.tree_helpers import digests, publish_path


def hit(tree: PrefixTree, name: str, blocks: int) -> None:
    """One request that finds the path and ends."""
    match = tree.match(digests(name, blocks), 10**6)
    tree.release(tree.take(match, len(match.path)))


@pytest.mark.parametrize(
    ("policy", "after"),
    [(WritePolicy.write_through(), 0), (WritePolicy.write_through_selective(2), 2), (WritePolicy.write_back(), None)],
)
def test_write_policies_choose_blocks_at_their_hits(policy: WritePolicy, after: int | None) -> None:
    tree = PrefixTree(4, backup_after=policy.backup_after)
    nodes = publish_path(tree, "a", 3)
    tree.release(nodes)
    assert policy.moves_when_evicted == (after is None)
    for hits in range(4):
        listed = tree.wanted.pop_backups(0) + tree.wanted.pop_backups(2) + tree.wanted.pop_backups(9)
        assert listed == (nodes if hits == after else [])
        for i, node in enumerate(listed):
            tree.moves.begin_backup(node, i + 1)
            tree.moves.complete(node)
        hit(tree, "a", 3)
    assert [n.host for n in nodes] == ([0, 0, 0] if after is None else [1, 2, 3])


def test_what_is_no_longer_worth_a_backup_is_passed_over() -> None:
    tree = PrefixTree(4, backup_after=1)
    nodes = publish_path(tree, "a", 2)
    tree.release(nodes)
    hit(tree, "a", 2)
    hit(tree, "a", 2)
    tree.moves.begin_backup(nodes[0], 1)
    tree.evictor.evict(Tier.DEVICE, 1)
    assert tree.wanted.pop_backups(9) == []
    tree.moves.complete(nodes[0])
    # A copy that was evicted is wanted again at the next hit.
    assert tree.evictor.evict(Tier.HOST, 1).pages == [1]
    hit(tree, "a", 2)
    assert tree.wanted.pop_backups(1) == [nodes[0]]
    hit(tree, "a", 2)
    tree.reset()
    assert tree.wanted.pop_backups(9) == []


@pytest.mark.parametrize("threshold", [0, -1, 1.5, None])
def test_a_threshold_is_a_number_of_hits(threshold: object) -> None:
    with pytest.raises(PlanError):
        WritePolicy.write_through_selective(threshold)


def only(**choices: object) -> SnapshotPlacement:
    """Nothing but what is named."""
    return dataclasses.replace(SnapshotPlacement.none(), **choices)


def test_snapshot_placement() -> None:
    def kinds(policy: SnapshotPlacement, prompt: int, end: int, junction: int = 0) -> dict[int, str]:
        found = {t: policy.at(t, prompt_tokens=prompt, block_tokens=4, junction=junction) for t in range(end + 1)}
        return {t: kind.value for t, kind in found.items() if kind is not SnapshotKind.NONE}

    assert kinds(only(every=2), 11, 32) == dict.fromkeys((8, 16, 24, 32), "keep")
    assert kinds(only(end_of_prompt=True), 11, 32) == {8: "keep"}
    # The prompt's last token is computed again, so a prompt of whole blocks ends one block earlier.
    assert kinds(only(end_of_prompt=True), 12, 32) == {8: "keep"}
    assert kinds(only(end_of_prompt=True), 13, 32) == {12: "keep"}
    assert kinds(only(end_of_prompt=True), 4, 32) == {}
    assert kinds(only(end_of_prompt=True), 0, 32) == {}
    assert kinds(only(end_of_output=True), 12, 24) == dict.fromkeys((16, 20, 24), "rolling")
    assert kinds(only(every=4, end_of_prompt=True, end_of_output=True), 9, 24) == {
        8: "keep",
        12: "rolling",
        16: "keep",
        20: "rolling",
        24: "rolling",
    }
    assert kinds(only(junctions=True), 40, 60, junction=12) == {12: "keep"}
    assert kinds(only(junctions=True), 40, 60) == kinds(only(), 40, 60, junction=12) == {}
    # Its last boundary is after 88 tokens, 22 blocks: 2, 4, 8 and 16 blocks before it.
    assert kinds(only(doubling=2), 91, 120) == dict.fromkeys((24, 56, 72, 80), "keep")
    assert kinds(only(doubling=3), 29, 60) == {4: "keep", 16: "keep"}  # 7 blocks: after 1 and after 4
    assert kinds(only(doubling=8), 33, 60) == {}  # 8 blocks: there is nothing to keep before the first
    assert kinds(SnapshotPlacement.none(), 9, 24, junction=8) == {}
    for name in ("every", "doubling"):
        with pytest.raises(PlanError, match=f"{name} must be an integer of at least 1"):
            only(**{name: 0})


def test_default_placement_of_a_long_prompt() -> None:
    policy, stops, start = SnapshotPlacement(), [], 0
    while start < 100_000:
        start = policy.next_stop(start, 100_000, prompt_tokens=100_000, block_tokens=128, junction=2048)
        stops.append(start)
    end = 781  # blocks: a snapshot at the end and eight before it, which thin out, and all the way one in 64
    near_the_end = {end - n for n in (512, 256, 128, 64, 32, 16, 8, 4, 0)}
    assert stops == [2048, *(128 * n for n in sorted({*range(64, end, 64)} | near_the_end)), 100_000]


placements = st.builds(
    SnapshotPlacement,
    st.none() | st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(1, 9),
)


@given(placements, st.integers(0, 400), st.integers(0, 90), st.integers(0, 400), st.integers(1, 60))
def test_chunks_end_where_a_snapshot_is_wanted(policy, prompt, junction, start, length) -> None:
    """`next_stop` is the first place beyond `start` where `at` wants a state; `at` is its own definition, in a loop."""
    block, stop = 4, start + length
    facts = dict(prompt_tokens=prompt, block_tokens=block, junction=junction * block)
    end = max(prompt - 1, 0) // block
    distances = set()
    if policy.doubling is not None:
        distances = {policy.doubling * 2**k for k in range(9)}
    for tokens in range(500):
        i, rest = divmod(tokens, block)
        kept = (
            i > 0
            and not rest
            and any(
                [
                    policy.every is not None and i % policy.every == 0,
                    policy.end_of_prompt and i == end,
                    policy.junctions and i == junction,
                    end - i in distances,
                ]
            )
        )
        rolls = i > 0 and not rest and policy.end_of_output and tokens > prompt
        wanted = SnapshotKind.KEEP if kept else SnapshotKind.ROLLING if rolls else SnapshotKind.NONE
        assert policy.at(tokens, **facts) is wanted
    wanted = [t for t in range(start + 1, stop) if policy.at(t, **facts) is not SnapshotKind.NONE]
    assert policy.next_stop(start, stop, **facts) == min([*wanted, stop])


def test_spacings_of_any_integer_type() -> None:
    """Numpy's were kept as they came: they overflowed within a call of the manager, which was lost then."""
    facts = dict(prompt_tokens=100_000, block_tokens=128)
    for kind in (np.int64, np.uint8, np.int8, np.uint64, np.array):
        odd, plain = SnapshotPlacement(every=kind(9), doubling=kind(8)), SnapshotPlacement(every=9, doubling=8)
        assert odd == plain and {type(odd.every), type(odd.doubling)} == {int}
        for start in range(0, 100_000, 4000):
            stop = odd.next_stop(start, start + 4000, **facts)
            assert stop == plain.next_stop(start, start + 4000, **facts) and type(stop) is int
            assert odd.at(stop, **facts) is plain.at(stop, **facts)


@pytest.mark.parametrize("value", [None, 8, 0, "no", [], 1.0])
def test_choices_are_true_or_false(value) -> None:
    for name in ("end_of_prompt", "end_of_output", "junctions"):
        with pytest.raises(PlanError, match=f"{name} must be True or False, got "):
            SnapshotPlacement(**{name: value})


@pytest.mark.parametrize("value", [None, "lru", 3])
def test_parts_of_a_policy_are_what_they_should_be(value) -> None:
    """A manager took them, and was lost in its first step."""
    for name in ("write", "snapshots", "eviction", "watermark"):
        with pytest.raises(ConfigError, match=f"{name}': must be of type .*, got {value!r}"):
            CachePolicy(**{name: value})
    if value is not None:
        with pytest.raises(PlanError, match=f"policy must be a CachePolicy or None, got {value!r}"):
            KVCacheManager(CacheLayout(DSV4Config.tiny()), CacheSize(9, 2, 4, 2), policy=value)


def test_a_policy_that_cannot_hit_says_so() -> None:
    layout = CacheLayout(DSV4Config.tiny())
    with pytest.warns(PerformanceWarning, match="keeps no states"):
        KVCacheManager(layout, CacheSize(9, 2, 4, 8), policy=CachePolicy(snapshots=SnapshotPlacement.none()))
    with pytest.warns(PerformanceWarning, match="num_snapshots is 0, and the one slot is the live request's") as caught:
        manager = KVCacheManager(layout, CacheSize(9, 1, 4), policy=CachePolicy())
    assert len(caught) == 1 and caught[0].filename == __file__
    manager.reset()  # warned already: the suite makes every further warning an error
    KVCacheManager(layout, CacheSize(9, 1, 4))
    KVCacheManager(layout, CacheSize(9, 1, 4, 1), policy=CachePolicy())
    KVCacheManager(layout, CacheSize(9, 2, 4), policy=CachePolicy())


def test_a_new_size_that_cannot_hit_says_so() -> None:
    manager = KVCacheManager(CacheLayout(DSV4Config.tiny()), CacheSize(9, 2, 4), policy=CachePolicy())
    manager.admit_request([1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PerformanceWarning):
            manager.resize(CacheSize(9, 1, 4))
    assert manager.size.num_slots == 2 and len(manager.requests) == 1, "an error, and nothing has changed"
    with pytest.warns(PerformanceWarning, match="the one slot is the live request's") as caught:
        manager.resize(CacheSize(9, 1, 4))
    assert len(caught) == 1 and caught[0].filename == __file__
    manager.resize(CacheSize(7, 1, 4))  # said already: the suite makes every further warning an error
    manager.resize(CacheSize(7, 1, 4, 1))
    KVCacheManager(manager.layout, CacheSize(9, 2, 4)).resize(CacheSize(9, 1, 4))


def test_what_the_one_slot_still_keeps() -> None:
    """So the warning must not say that nothing is ever found."""
    with pytest.warns(PerformanceWarning, match="find next to nothing"):
        manager = KVCacheManager(CacheLayout(DSV4Config.tiny()), CacheSize(9, 1, 4), policy=CachePolicy())
    request = manager.admit_request([7] * 255)
    request.tokens.append(8)  # the output ends at a block boundary
    while scheduled := manager.schedule(256):
        manager.plan_step(scheduled)
    manager.release_request(request)
    assert manager.admit_request([*request.tokens, 9]).num_cached == 256


def test_host_watermark() -> None:
    mark = HostWatermark(0.1, 0.25)
    assert [mark.excess(free, 100) for free in (0, 9, 10, 30)] == [25, 16, 0, 0]
    assert mark.excess(0, 0) == 0
    assert HostWatermark(0, 0).excess(0, 8) == 0
    for low in (0, 0.1, 0.15, 0.3, 0.5, 1):
        for total in range(12):  # a page fewer, and something has to be evicted
            fewest = next(free for free in range(total + 1) if not HostWatermark(low, 1).excess(free, total))
            assert HostWatermark(low, 1).kept_free(total) == fewest
    for low, high in ((-0.1, 0.5), (0.5, 0.4), (0.5, 1.1)):
        with pytest.raises(ConfigError, match="host watermark"):
            HostWatermark(low, high)
    assert HostWatermark(np.float32(0.5), Fraction(3, 4)).excess(1, 4) == 2
    for odd in ("0", None, True, 1j, [0.5], np.array([0.1, 0.2])):
        for shares in ({"low": odd}, {"high": odd}, {"low": 0.1, "high": odd}):
            with pytest.raises(ConfigError, match=r"(low|high) must be a number in \[0, 1\], got "):
                HostWatermark(**shares)
    for share in (float("nan"), float("inf"), 10**400):
        with pytest.raises(ConfigError, match="0 <= low <= high <= 1 must hold"):
            HostWatermark(0.0, share)


def test_eviction_orders() -> None:
    def first_out(order: str) -> Node:
        tree = PrefixTree(4, eviction=EVICTION_POLICIES[order])
        (a,), (b,) = publish_path(tree, "a", 1), publish_path(tree, "b", 1)
        tree.release([a])
        tree.release([b])
        for name in "aab":
            hit(tree, name, 1)
        before = {a, b}
        tree.evictor.evict(Tier.DEVICE, 1)
        (gone,) = [n for n in before if not tree.is_current(n)]
        return gone

    assert first_out("lru").digest == digests("a", 1)[0]
    assert first_out("lfu").digest == digests("b", 1)[0]


def test_the_default_policy_is_complete() -> None:
    policy = CachePolicy()
    PrefixTree(4, eviction=policy.eviction, backup_after=policy.write.backup_after)
    assert policy.write.name == "write_back"
    assert dataclasses.replace(policy, write=WritePolicy.write_through()).write.backup_after == 0


def cache_with_traffic() -> tuple[PrefixTree, BlockAllocator, BlockAllocator]:
    tree, device, host = PrefixTree(4), BlockAllocator(10), BlockAllocator(4, "host")
    nodes = publish_path(tree, "a", 4, device.acquire(4))
    tree.snapshots.attach(nodes[2], Tier.DEVICE, 1)
    tree.release(nodes)
    moved = tree.evictor.evict(Tier.DEVICE, 2, host.acquire(2))
    for move in moved.moves:
        device.release(tree.moves.complete(move.node).blocks)
    match = tree.match(digests("a", 4), 21)
    tree.take(match)
    tree.reserve(nodes[1], b"new", device.acquire(1)[0])
    return tree, device, host


def test_stats_account_for_every_unit() -> None:
    tree, device, host = cache_with_traffic()
    stats = collect_stats(
        tree, device, host, private=1, block_bytes=100, page_bytes=90, admission_failures={"slot": 3}, generation=2
    )
    assert stats.pools["device"] == (10, 7, 1, 2, 0, 100, 0)
    assert stats.pools["host"] == (4, 2, 0, 2, 1, 90, 0)
    assert stats.pools["device"].used_bytes == 300
    assert (stats.hit_rate(), stats.hit_rate(Tier.DEVICE), stats.hit_rate(Tier.HOST)) == (12 / 21, 8 / 21, 4 / 21)
    assert stats.recomputed_tokens == 9
    assert stats.counters.evicted[Tier.DEVICE] == 2
    hit(tree, "a", 4)
    assert stats.counters.lookups == 1  # a snapshot, not a view
    with pytest.raises(IntegrityError, match="does not add up"):
        collect_stats(tree, device, host, private=2)
    with pytest.raises(IntegrityError, match="does not add up"):
        pool_use(BlockAllocator(3), private=0, cached=0, evictable=1)
    assert collect_stats(PrefixTree(), BlockAllocator(3), private=0).hit_rate() == 0.0


def test_prometheus_text() -> None:
    tree, device, host = cache_with_traffic()
    stats = collect_stats(
        tree, device, host, private=1, block_bytes=100, page_bytes=90, admission_failures={'a"b\\c\nd': 3}
    )
    text = prometheus_text(stats)
    lines = text.splitlines()
    assert text.endswith("\n")
    for line in (
        'dsv4_cache_units{pool="device",state="free"} 7',
        'dsv4_cache_units{pool="host",state="evictable"} 1',
        'dsv4_cache_pool_size{pool="device"} 10',
        'dsv4_cache_used_bytes{pool="device"} 300',
        'dsv4_cache_hit_tokens_total{tier="host"} 4',
        'dsv4_cache_evictions_total{tier="device"} 2',
        "dsv4_cache_recomputed_tokens_total 9",
        'dsv4_cache_admission_failures_total{pool="a\\"b\\\\c\\nd"} 3',
        "# TYPE dsv4_cache_lookups_total counter",
    ):
        assert line in lines, line
    declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(declared)) == len(declared)
    # Every sample follows its own family's HELP and TYPE.
    family = ""
    for line in lines:
        if line.startswith("#"):
            family = line.split()[2]
        else:
            assert line.split("{")[0].split()[0] == family
            float(line.rsplit(" ", 1)[1])
    assert prometheus_text(stats, prefix="x").startswith("# HELP x_units")


# Where the next turn goes on


def test_a_request_says_where_the_next_turn_goes_on() -> None:
    """Of a thinking chat nothing behind the prompt's second to last token comes again: no state is kept there."""
    layout = CacheLayout(DSV4Config.tiny())
    block = layout.block_tokens
    found = {}
    for reuse in ("output", "prompt"):
        policy = CachePolicy(snapshots=SnapshotPlacement(every=3, end_of_prompt=False, doubling=None))
        manager = KVCacheManager(layout, CacheSize(32, 2, 16, num_snapshots=8), policy=policy)
        request = manager.admit_request([7] * (2 * block), reuse=reuse)
        request.tokens += [8] * (5 * block)  # sampled
        while request.num_pending:
            manager.plan_step(manager.schedule(block))
            manager.take_transfers()
        digests = manager.digests(request.tokens)
        manager.release_request(request)
        path = manager.cache.tree.match(digests, len(digests) * block + 1).path
        states = [i + 1 for i, node in enumerate(path) if node.snapshot is not None]
        turns = ([7] * (2 * block - 1) + [9] * block, [7] * (2 * block) + [8] * (5 * block))
        found[reuse] = [manager.admit_request(turn).num_hit // block for turn in turns]
        manager.check_integrity()
        assert states == ([1] if reuse == "prompt" else [3, 6, 7])
    assert found == {"prompt": [1, 1], "output": [0, 6]}
    for wrong in ("no", None, 3):
        with pytest.raises(RequestError, match="reuse"):
            manager.admit_request([1], reuse=wrong)


# States in blocks


def test_states_in_blocks_need_no_share_of_their_own() -> None:
    """Many short prompts need many states and few blocks, long ones the reverse: all memory serves either."""
    layout = CacheLayout(DSV4Config.tiny())
    block, blocks, ends = layout.block_tokens, state_blocks(layout), SnapshotPlacement(every=None, doubling=None)

    def found(prompts: list[list[int]], size: CacheSize, states: str) -> int:
        manager = KVCacheManager(layout, size, policy=CachePolicy(snapshots=ends, states=states))
        hits, shape = 0, manager.pinned_shape(1, 32 * block, history=True)
        assert shape.slot_copies == (states == "slots"), "to and from blocks they go beside the step"
        for prompt in prompts * 2:
            request = manager.admit_request(prompt)
            hits += request.num_hit // block
            while request.num_pending:
                manager.plan_step(manager.schedule(10**6, shape=shape), shape=shape)
                manager.take_transfers()
            manager.release_request(request)
            manager.check_integrity()
        device = manager.stats().cache.pools["device"]
        assert device.free + device.cached == device.total
        return hits

    short = [[i] * (block + 1) for i in range(20)]
    long = [[20 + i] * (20 * block + 1) for i in range(3)]
    room = 20 * (1 + blocks) + 2  # of who is live
    assert found(short, CacheSize(room, 1, 32), "blocks") == 20
    assert found(long, CacheSize(room, 1, 32), "blocks") == 3 * 20
    slots = int((room - 60) * layout.bytes_per_block / layout.bytes_per_slot)  # with enough blocks for the long ones
    assert found(short, CacheSize(60, 1, 32, num_snapshots=slots), "slots") < 20


def test_states_lie_in_slots_or_blocks() -> None:
    layout = CacheLayout(DSV4Config.tiny())
    with pytest.raises(ConfigError, match="states"):
        CachePolicy(states="pages")
    with pytest.raises(ConfigError, match="pool axis"):
        KVCacheManager(layout, CacheSize(8, 2, 8, pool_ranks=2), policy=CachePolicy(states="blocks"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        KVCacheManager(layout, CacheSize(8, 1, 8), policy=CachePolicy(states="blocks"))


# Shares of namespaces


def test_a_scan_takes_no_more_than_its_share() -> None:
    """A tenant that reads and never comes back evicts its own units; without a share it evicts the others'."""
    layout = CacheLayout(DSV4Config.tiny())
    block, prompt = layout.block_tokens, [i % 250 for i in range(layout.block_tokens * 4 + 1)]

    def found_after_a_scan(shares: NamespaceShares | None) -> tuple[int, KVCacheManager]:
        manager = KVCacheManager(
            layout, CacheSize(24, 1, 8, num_snapshots=9), policy=CachePolicy(eviction=LRU, shares=shares)
        )

        def ask(tenant: str, first: int) -> int:
            request = manager.admit_request([first, *prompt[1:]], namespace=Namespace(tenant))
            while request.num_pending:
                manager.plan_step([(request, min(request.num_pending, block))])
                manager.take_transfers()
            manager.release_request(request)
            manager.check_integrity()
            return request.num_hit

        assert ask("chat", 0) == 0
        for i in range(1, 20):
            ask("scan", i)
        return ask("chat", 0), manager

    assert found_after_a_scan(None)[0] == 0
    for shares in (NamespaceShares(0.5), NamespaceShares(of={Namespace("scan"): 0.5})):
        found, manager = found_after_a_scan(shares)
        assert found == 4 * block
        use = manager.stats().cache.namespaces[Namespace("scan"), Tier.DEVICE]
        # The device has 24 blocks and 10 slots; what a live request has counts, too.
        assert use.limit == use.share * (24 + 10 * manager.cache.snapshot_pages) and use.evicted > 0
        assert 0 < use.used <= use.limit + 5 + manager.cache.snapshot_pages
        text = prometheus_text(manager.stats())
        assert f'dsv4_cache_namespace_evictions_total{{namespace="scan",tier="device"}} {use.evicted:.1f}' in text


@pytest.mark.parametrize(
    "arguments",
    [{"each": 0}, {"each": 1.5}, {"each": True}, {"of": {"a": 0.5}}, {"of": {Namespace("a"): 0}}, {"of": 3}],
)
def test_shares_are_of_namespaces_and_no_more_than_all(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="namespace shares"):
        NamespaceShares(**arguments)


def test_a_policy_refuses_other_shares() -> None:
    with pytest.raises(ConfigError, match="shares"):
        CachePolicy(shares=0.5)
