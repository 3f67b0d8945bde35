"""What the caching manager promises, case by case. Random traces: test_caching_stateful.py."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_jax import CacheLayout, CachePolicy, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import (
    ConfigError,
    ContextLimitError,
    IntegrityError,
    NoFreeSlotError,
    OutOfBlocksError,
    PerformanceWarning,
    PlanError,
    RequestError,
)
from dsv4_jax.manager import (
    EventLog,
    HostSize,
    HostWatermark,
    MediaItem,
    Namespace,
    SnapshotPlacement,
    StepShape,
    WritePolicy,
    prometheus_text,
)
from dsv4_jax.manager.prefix.node import Tier
from dsv4_jax.manager.request import Request, RequestState
from dsv4_jax.manager.storage_tier import StorageTier
from dsv4_jax.manager.transfers import TransferQueue

B = 8
LAYOUT = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=B)
PROMPT = [i % 5 for i in range(40)]


def make(
    num_blocks: int = 24,
    num_slots: int = 4,
    snapshots: int = 4,
    *,
    drafts: int = 0,
    host: HostSize | None = None,
    write: WritePolicy | None = None,
    every: int | None = 2,
    events: EventLog | None = None,
    watermark: HostWatermark | None = None,
    weights_id: str = "",
) -> KVCacheManager:
    layout = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=B, draft_tokens=drafts)
    policy = CachePolicy(
        write=write or WritePolicy.write_back(),
        snapshots=SnapshotPlacement(every),
        watermark=watermark or HostWatermark(),
    )
    size = CacheSize(num_blocks, num_slots, 12, num_snapshots=snapshots)
    return KVCacheManager(layout, size, policy=policy, host=host, events=events, weights_id=weights_id)


def feed(manager: KVCacheManager, request: Request) -> None:
    """All pending tokens, in chunks that end where snapshots are wanted."""
    while request.num_pending:
        stop = manager.publisher.next_stop(request, request.num_cached, len(request.tokens))
        manager.plan_step([(request, stop - request.num_cached)])
        manager.take_transfers()


def run(manager: KVCacheManager, prompt: list[int] = PROMPT, **options) -> Request:
    request = manager.admit_request(prompt, **options)
    feed(manager, request)
    return request


def serve(manager: KVCacheManager, prompt: list[int] = PROMPT, **options) -> None:
    manager.release_request(run(manager, prompt, **options))


def pairs(plan) -> list[tuple[int, int]]:
    return [(s, d) for s, d in zip(plan.copy_slot_src.tolist(), plan.copy_slot_dst.tolist(), strict=True) if d]


# Hits


def test_the_same_prompt_hits_all_but_its_last_token_s_block() -> None:
    manager = make()
    serve(manager)
    request = manager.admit_request(PROMPT)
    # 40 tokens: the last one is computed again, so the hit is at most 39 tokens, 4 blocks.
    assert (request.num_cached, request.num_hit, request.num_pending) == (32, 32, 8)
    again = manager.admit_request([*PROMPT, 1])
    assert again.num_cached == 32  # the state after 40 tokens was never kept: a prompt's end is no block's
    manager.check_integrity()
    counters = manager.stats().cache.counters
    assert (counters.lookups, counters.hits, counters.lookup_tokens) == (3, 2, 121)
    assert counters.hit_tokens[Tier.DEVICE] == 64
    assert manager.stats().cache.hit_rate() == 64 / 121


def test_a_hit_is_the_minimum_of_blocks_and_snapshot() -> None:
    manager = make(every=3)
    serve(manager)  # blocks of 8..40, snapshots after 24 (every 3) and 32 (end of prompt)
    assert manager.admit_request(PROMPT[:32]).num_cached == 24  # four blocks, of which 31 tokens may be used
    assert manager.admit_request([*PROMPT[:30], 9, 9, 9, 9]).num_cached == 24  # three blocks agree
    assert manager.admit_request([*PROMPT[:23], 9]).num_cached == 0  # two blocks, no snapshot there
    assert manager.admit_request(PROMPT[:24]).num_cached == 0


def test_a_restored_state_is_copied_by_the_first_plan_that_feeds_it() -> None:
    manager = make()
    serve(manager)
    request = manager.admit_request(PROMPT)
    snapshot = request.restores.snapshot
    assert snapshot.pins == 1
    assert pairs(manager.plan_step([])) == []
    assert (snapshot.device, request.slot) in pairs(manager.plan_step([(request, 1)]))
    assert snapshot.pins == 0 and request.restores is None


def test_table_entries_of_a_hit_come_with_its_first_plan() -> None:
    manager = make()
    serve(manager)
    request = manager.admit_request(PROMPT)
    plan = manager.plan_step([(request, 2)])
    entries = zip(plan.table_slot.tolist(), plan.table_index.tolist(), plan.table_block.tolist(), strict=True)
    assert [e for e in entries if e[0]] == [(request.slot, i, request.blocks[i]) for i in range(5)]


def test_blocks_are_shared_and_counted_once() -> None:
    manager = make()
    serve(manager)
    a, b = manager.admit_request(PROMPT), manager.admit_request(PROMPT)
    assert a.blocks == b.blocks and len(a.blocks) == 4
    feed(manager, a)
    feed(manager, b)
    manager.commit()
    manager.check_integrity()
    assert a.blocks == b.blocks  # the fifth was computed again by both: given back
    assert manager.stats().cache.counters.duplicates == 2
    manager.release_request(a)
    manager.release_request(b)
    assert manager.stats().cache.pools["device"][:5] == (24, 19, 0, 5, 5)


def test_nothing_is_matchable_before_its_step_is_planned_or_after_an_abort() -> None:
    manager = make()
    first = manager.admit_request(PROMPT)
    assert manager.admit_request(PROMPT).num_cached == 0
    manager.plan_step([(first, 40)])
    manager.abort_request(first)  # its step did not run
    manager.check_integrity()
    assert manager.admit_request(PROMPT).num_cached == 0


def test_drafts_are_published_once_they_are_accepted() -> None:
    manager = make(drafts=3)
    request = manager.admit_request(PROMPT)
    feed(manager, request)
    request.tokens += [1, 2, 3, 4] * 2
    manager.plan_step([(request, 4)])
    manager.commit()
    assert len(request.nodes) == 5 and request.num_shared == 5
    manager.plan_step([(request, 4)])
    manager.commit()
    assert len(request.nodes) == 5  # 48 tokens, of which four may still go
    manager.accept(request, 3)
    manager.commit()
    assert len(request.nodes) == 5
    request.tokens.append(4)
    manager.plan_step([(request, 1)])
    manager.accept(request, 1)
    manager.commit()
    assert len(request.nodes) == 6
    manager.check_integrity()


def test_ids_the_manager_never_sees_are_never_cached() -> None:
    manager = make()
    request = manager.admit_request()
    manager.plan_step([(request, 40)])
    manager.release_request(request)
    assert manager.stats().cache.pools["device"].cached == 0
    manager.check_integrity()


def test_without_a_policy_nothing_is_cached() -> None:
    layout = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=B)
    manager = KVCacheManager(layout, CacheSize(8, 2, 8))
    serve(manager)
    assert manager.admit_request(PROMPT).num_cached == 0 and manager.stats().blocks_free == 8


# Who shares


def test_tenants_adapters_weights_and_pictures_do_not_share() -> None:
    manager = make(num_slots=12, snapshots=8)
    serve(manager, namespace=Namespace("a"))
    for space in (Namespace("b"), Namespace("a", adapter="x"), None):
        assert manager.admit_request(PROMPT, namespace=space).num_cached == 0
    assert manager.admit_request(PROMPT, namespace=Namespace("a")).num_cached == 32
    item = MediaItem("cat", 20, 22)
    assert manager.admit_request(PROMPT, namespace=Namespace("a"), items=[item]).num_cached == 16
    assert (
        make(weights_id="w1").admit_request(PROMPT).hasher.root
        != make(weights_id="w2").admit_request(PROMPT).hasher.root
    )


def test_ten_tenants_with_one_prompt_never_hit_each_other() -> None:
    manager = make(num_blocks=96, num_slots=4, snapshots=20)
    for tenant in range(10):
        serve(manager, namespace=Namespace(tenant))
    assert manager.stats().cache.counters.hits == 0
    for tenant in range(10):
        request = manager.admit_request(PROMPT, namespace=Namespace(tenant))
        assert request.num_cached == 32
        manager.release_request(request)


@pytest.mark.parametrize("bad", [dict(namespace=Namespace(1.5)), dict(items=[MediaItem("x", 3, 3)])])
def test_bad_keys_change_nothing(bad) -> None:
    manager = make()
    with pytest.raises(RequestError):
        manager.admit_request(PROMPT, **bad)
    assert manager.stats().slots_used == 0
    manager.check_integrity()


# Snapshots


def test_chunks_end_where_a_snapshot_is_wanted() -> None:
    manager = make(every=2)
    request = manager.admit_request(PROMPT)
    ends = []
    while request.num_pending:
        manager.plan_step(manager.schedule(100))
        ends.append(request.num_cached)
    assert ends == [16, 32, 40]
    manager.commit()
    states = [node.snapshot is not None for node in request.nodes]
    assert states == [False, True, False, True, False]


def test_the_end_of_an_output_can_be_hit() -> None:
    manager = make(every=None)
    request = run(manager)
    for token in range(20):
        request.tokens.append(token)
        manager.plan_step([(request, 1)])
    tokens = list(request.tokens)
    manager.release_request(request)
    assert manager.admit_request([*tokens, 7, 7]).num_cached == 56  # of 60
    assert manager.stats().cache.pools["slot"].cached == 2  # end of prompt, end of output: none between


def test_a_slot_that_ends_at_a_boundary_becomes_the_snapshot() -> None:
    with pytest.warns(PerformanceWarning):
        manager = make(every=1, snapshots=0, num_slots=1)
    serve(manager, PROMPT[:8])
    assert manager.stats().cache.pools["slot"][:4] == (1, 0, 0, 1)
    request = manager.admit_request(PROMPT)
    assert (request.num_cached, request.slot) == (8, 1)  # it moved in, there is no other
    manager.check_integrity()


def test_live_requests_come_before_snapshots() -> None:
    manager = make(num_slots=3, snapshots=0)
    serve(manager)
    assert manager.stats().cache.pools["slot"].cached == 2
    for _ in range(3):
        manager.admit_request([9])
    assert manager.stats().cache.pools["slot"][:4] == (3, 0, 3, 0)
    with pytest.raises(NoFreeSlotError):
        manager.admit_request([9])
    assert manager.stats().cache.admission_failures == {"slot": 1}
    manager.check_integrity()


# Eviction and the host tier


def test_cached_blocks_give_way_to_requests() -> None:
    manager = make(num_blocks=6)
    serve(manager)
    assert manager.stats().blocks_free == 1
    run(manager, [9] * 40)
    assert manager.stats().cache.counters.evicted[Tier.DEVICE] == 4
    manager.check_integrity()
    request, before = manager.admit_request([8] * 40), manager.stats()
    with pytest.raises(OutOfBlocksError, match="requested 5 blocks, 1 available"):
        manager.plan_step([(request, 40)])
    assert manager.stats() == before


@pytest.mark.parametrize("write", [WritePolicy.write_back(), WritePolicy.write_through()])
def test_evicted_blocks_come_back_from_the_host(write: WritePolicy) -> None:
    manager = make(num_blocks=6, num_slots=2, snapshots=0, host=HostSize.of(LAYOUT, 16, 4), write=write)
    serve(manager)
    serve(manager, [9] * 40)
    request = manager.admit_request(PROMPT)
    assert request.num_cached == 32 and manager.stats().cache.counters.hit_tokens[Tier.HOST] > 0
    manager.plan_step([(request, 8)])
    stages = manager.take_transfers()
    loaded = [b for s in stages if s.swap_in for b in s.swap_in.device_ids.tolist() if b]
    assert set(loaded) <= set(request.blocks[:4]) and loaded
    manager.check_integrity()


def test_a_full_host_takes_what_it_can() -> None:
    manager = make(num_blocks=6, host=HostSize(2))
    serve(manager)
    serve(manager, [9] * 40)
    tree = manager.cache.tree
    assert tree.held(Tier.HOST) == 2
    assert manager.stats().cache.pools["host"][:4] == (2, 0, 0, 2)
    manager.check_integrity()


def test_selective_backup_waits_for_the_second_hit() -> None:
    manager = make(host=HostSize.of(LAYOUT, 8, 4), write=WritePolicy.write_through_selective(2))
    serve(manager)
    for backed_up in (0, 0, 4):
        assert manager.stats().cache.pools["host"].cached == backed_up
        serve(manager)
        manager.commit()


def test_the_watermark_keeps_host_blocks_free() -> None:
    manager = make(
        host=HostSize.of(LAYOUT, 10, 4), write=WritePolicy.write_through(), watermark=HostWatermark(0.3, 0.5)
    )
    serve(manager)
    assert manager.stats().cache.pools["host"].free >= 5
    serve(manager, [9] * 40)
    assert manager.stats().cache.pools["host"].free >= 3
    with pytest.raises(ConfigError, match="watermark"):
        HostWatermark(0.5, 0.3)


def test_transfers_must_be_taken() -> None:
    manager = make(host=HostSize.of(LAYOUT, 8, 4), write=WritePolicy.write_through())
    request = manager.admit_request(PROMPT)
    manager.plan_step([(request, 32)])
    manager.plan_step([(request, 1)])  # backs up what the first has filled
    with pytest.raises(PlanError, match="transfers"):
        manager.plan_step([(request, 1)])
    (stage,) = manager.take_transfers()
    assert stage.swap_out.device_ids.tolist() == request.blocks[:4] and stage.swap_in is None
    assert manager.take_transfers() == []
    manager.plan_step([(request, 1)])


def test_stages_keep_the_order_of_copies() -> None:
    queue = TransferQueue()
    queue.out("block", 1, 10)
    queue.into("block", 10, 1)  # after it: its block is filled again
    queue.out("block", 2, 11)
    assert len(queue) == 3
    (stage,) = queue.drain()
    assert [x.tolist() for x in stage.swap_out] == [[1, 2], [10, 11]]
    queue.into("block", 10, 1)
    queue.out("block", 3, 10)  # only once record 10 has been read
    queue.out("block", 1, 12)
    queue.into("block", 12, 1)
    queue.into("block", 10, 1)  # a block is written once a stage
    queue.out("slot", 1, (1, 4), 35)
    queue.out("slot", 2, 2, 16)
    stages = queue.drain()
    assert [(s.swap_out is not None, s.swap_in is not None, s.snapshot is not None) for s in stages] == [
        (False, True, False),
        (True, True, False),
        (False, True, True),
    ]
    assert [x.tolist() for x in stages[-1].snapshot] == [[1, 2], [[1, 4], [2, 0]], [35, 16]]
    assert queue.drain() == [] and len(queue) == 0
    queue.into("slot", [4, 3], 1, 35)
    queue.out("slot", 2, (5, 4), 9)  # only once record 4 has been read
    assert len(queue.drain()) == 2


# Preemption, forks, sleep


def test_preempted_requests_resume_where_they_were() -> None:
    manager = make(host=HostSize.of(LAYOUT, 8, 4))
    request = run(manager, PROMPT[:35])
    request.tokens.append(1)
    ref, epoch = request.ref, request.epoch
    manager.preempt(request)
    assert (request.state, request.slot, request.blocks) == (RequestState.PREEMPTED, 0, [])
    assert request.parked.num_cached == 35 and len(request.parked.blocks) == 1
    assert manager.find(ref) is None and request.epoch > epoch and manager.preempted == (request,)
    with pytest.raises(RequestError, match="preempted"):
        manager.plan_step([(request, 1)])
    with pytest.raises(RequestError, match="in use"):
        manager.admit_request(request_id=request.id)
    manager.resume(request)
    assert (request.num_cached, request.parked, manager.find(request.ref)) == (35, None, request)
    manager.plan_step([(request, 1)])
    (stage,) = manager.take_transfers()
    assert stage.swap_out is not None and stage.restore is not None and request.slot in stage.restore.device_ids
    manager.check_integrity()
    with pytest.raises(RequestError, match="not preempted"):
        manager.resume(request)


@pytest.mark.parametrize("spare", [0, 60], ids=["full", "room"])
def test_a_state_in_blocks_that_finds_none_is_parked(spare: int) -> None:
    """Blocks run out at a block's boundary, as they do, where there is no tail to park: the state goes to the host."""
    size, policy = CacheSize(8 + spare, 4, 12, num_snapshots=4), CachePolicy(states="blocks")
    manager = KVCacheManager(LAYOUT, size, policy=policy, host=HostSize.of(LAYOUT, 16, 4))
    other, request = run(manager, PROMPT[::-1][:32]), run(manager, PROMPT[:32])
    request.tokens.append(1)
    manager.preempt(request)
    assert (request.parked is None) == bool(spare)
    manager.check_integrity()
    manager.release_request(other)
    manager.resume(request)
    assert (request.num_cached, request.num_pending, request.parked) == (32, 1, None)
    manager.plan_step([(request, 1)])
    manager.check_integrity()


def test_without_a_host_the_tail_is_fed_again() -> None:
    manager = make()
    request = run(manager, PROMPT[:35])
    request.tokens.append(1)
    manager.preempt(request)
    assert request.parked is None
    manager.resume(request)
    assert (request.num_cached, request.num_pending) == (32, 4)
    manager.check_integrity()


def test_preemption_needs_tokens_and_frees_everything() -> None:
    manager = make(num_blocks=5, num_slots=1, snapshots=1)
    blind = manager.admit_request()
    manager.plan_step([(blind, 8)])
    with pytest.raises(RequestError, match="could not be resumed"):
        manager.preempt(blind)
    manager.release_request(blind)
    request = run(manager)
    request.tokens.append(1)
    manager.preempt(request)
    serve(manager, [9] * 40)
    manager.resume(request)
    assert request.num_cached == 0  # all of it was needed by the other
    manager.release_request(request)
    manager.preempt(again := run(manager))
    manager.release_request(again)
    assert again.state is RequestState.RELEASED and not manager.preempted
    manager.check_integrity()


def test_a_resume_that_fails_changes_nothing() -> None:
    manager = make(num_blocks=5, num_slots=2, host=HostSize.of(LAYOUT, 8, 4))
    request = run(manager, PROMPT[:35])
    request.tokens.append(1)
    manager.preempt(request)
    other = run(manager, [9] * 40)
    parked = request.parked
    manager.resume(request)  # from the host: but there is no block for it
    assert request.num_cached == 0 or request.parked is None
    manager.release_request(request)
    manager.release_request(other)
    assert parked is not None
    manager.check_integrity()


def test_forks_share_full_blocks_and_copy_the_rest() -> None:
    manager = make(num_slots=4)
    request = run(manager, PROMPT[:35])
    children = manager.fork(request, request_ids=["x", None])
    assert [c.id for c in children] == ["x", 2]
    assert all(c.blocks[:4] == request.blocks[:4] and c.blocks[4] != request.blocks[4] for c in children)
    parent_block, parent_slot = request.blocks[4], request.slot
    manager.release_request(request)  # what they are copied from stays until then
    plan = manager.plan_step([])
    assert {(parent_slot, c.slot) for c in children} == set(pairs(plan))
    blocks = zip(plan.copy_block_src.tolist(), plan.copy_block_dst.tolist(), strict=True)
    assert {(parent_block, c.blocks[4]) for c in children} == {p for p in blocks if p[1]}
    manager.check_integrity()
    assert pairs(manager.plan_step([])) == []


def test_refused_forks_change_nothing() -> None:
    manager = make(num_blocks=6, num_slots=3, snapshots=0)
    request = run(manager, PROMPT[:35])
    before = manager.stats()
    for error, ids in (
        (RequestError, ["a", "a"]),
        (RequestError, [request.id]),
        (NoFreeSlotError, [None] * 3),
        (OutOfBlocksError, [None] * 2),
    ):
        with pytest.raises(error):
            manager.fork(request, request_ids=ids)
        after = manager.stats()
        assert after[:10] == before[:10] and after.cache.pools["device"] == before.cache.pools["device"]
        manager.check_integrity()


def test_pinned_shapes_carry_forks_and_hits_or_say_so() -> None:
    manager = make(num_slots=4)
    request = run(manager, PROMPT[:35])
    manager.fork(request)
    with pytest.raises(PlanError, match="block_copies=1"):
        manager.plan_step([], shape=manager.pinned_shape(4, slot_copies=1))
    manager.plan_step([], shape=manager.pinned_shape(4, slot_copies=1, block_copies=1))
    serve(manager)
    waiting = [manager.admit_request(PROMPT) for _ in range(2)]
    shape = manager.pinned_shape(4, 64, slot_copies=1)
    assert [r for r, _ in manager.schedule(64, shape=shape)] == waiting[:1]  # one restored state a step
    manager.plan_step(manager.schedule(64, shape=shape), shape=shape)
    manager.check_integrity()


def test_sleep_empties_the_device_and_keeps_what_the_host_can_hold() -> None:
    manager = make(host=HostSize.of(LAYOUT, 16, 8))
    serve(manager)
    live = run(manager, [9] * 20)
    live.tokens.append(1)
    manager.sleep()
    stats = manager.stats()
    assert (stats.blocks_free, stats.slots_used, stats.preempted) == (24, 0, 1)
    assert stats.cache.pools["slot"].free == 8
    assert manager.take_transfers()
    with pytest.raises(RequestError, match="sleeps"):
        manager.admit_request(PROMPT)
    with pytest.raises(RequestError, match="sleeps"):
        manager.plan_step([])
    manager.wakeup()
    with pytest.raises(RequestError, match="does not sleep"):
        manager.wakeup()
    assert manager.admit_request(PROMPT).num_cached == 32
    manager.resume(live)
    assert live.num_cached == 20
    manager.check_integrity()


def test_reset_forgets_all_and_refuses_older_requests() -> None:
    events = EventLog()
    manager = make(host=HostSize.of(LAYOUT, 8, 4), events=events)
    live, waiting = run(manager), run(manager, [9] * 20)
    waiting.tokens.append(1)
    manager.preempt(waiting)
    manager.reset()
    for call in (manager.release_request, manager.preempt, manager.fork, manager.resume):
        with pytest.raises(RequestError):
            call(waiting if call == manager.resume else live)
    assert manager.admit_request(PROMPT).num_cached == 0
    assert events.since(0)[0][-1].kind == "cleared"
    manager.check_integrity()


# Books


def test_events_tell_where_blocks_are() -> None:
    events = EventLog()
    manager = make(num_blocks=5, host=HostSize.of(LAYOUT, 8, 4), events=events)
    serve(manager)
    assert [(e.kind, e.tier) for e in events.since(0)[0]] == [("stored", Tier.DEVICE)] * 5
    seen = events.last
    serve(manager, [9] * 8)
    kinds = [(e.kind, e.tier) for e in events.since(seen)[0]]
    assert kinds == [("stored", Tier.HOST), ("removed", Tier.DEVICE), ("stored", Tier.DEVICE)]


def test_prometheus_text_has_every_pool() -> None:
    manager = make(host=HostSize.of(LAYOUT, 8, 4))
    serve(manager)
    manager.admit_request(PROMPT)
    text = prometheus_text(manager.stats())
    for pool in ("device", "slot", "host"):
        assert f'dsv4_cache_units{{pool="{pool}",state="free"}}' in text
    for sample in ('requests{state="live"} 1', 'requests{state="preempted"} 0', "request_tokens 32", "blocks_ahead 0"):
        assert f"\ndsv4_cache_{sample}\n" in text
    assert text.endswith(prometheus_text(manager.stats().cache))
    for odd in (None, manager, manager.stats().cache.pools):
        with pytest.raises(PlanError, match=r"takes what KVCacheManager.stats\(\) gave"):
            prometheus_text(odd)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m, r: r.nodes.pop(),
        lambda m, r: setattr(r.nodes[1], "refs", 2),
        lambda m, r: m.cache.slots.release([r.slot]),
        lambda m, r: r.blocks.reverse(),
        lambda m, r: m.cache.pages.acquire(1),
        lambda m, r: m.cache.tree.snapshots.pin(r.nodes[1]),
        lambda m, r: setattr(r, "num_tabled", 9),
    ],
)
def test_check_integrity_sees_it(break_it) -> None:
    manager = make(host=HostSize.of(LAYOUT, 8, 4))
    request = run(manager)
    manager.commit()
    manager.check_integrity()
    break_it(manager, request)
    with pytest.raises(IntegrityError):
        manager.check_integrity()


def test_numpy_and_python_prompts_are_the_same() -> None:
    manager = make()
    serve(manager)
    for dtype in (np.int32, np.int64, np.uint8):
        request = manager.admit_request(np.array(PROMPT, dtype))
        assert request.num_cached == 32 and type(request.tokens[0]) is int
        manager.release_request(request)


def test_what_schedule_gives_fits_its_shape() -> None:
    """Eight equal prompts side by side: their blocks turn out to be shared, and need table entries again."""
    manager = make(num_blocks=96, num_slots=8)
    requests = [manager.admit_request(PROMPT) for _ in range(8)]
    chunk, decode = manager.pinned_shape(8, 400), manager.pinned_shape(8)
    while any(r.num_pending > 1 for r in requests):
        manager.plan_step(manager.schedule(400, shape=chunk), shape=chunk)
    for token in range(20):
        for request in requests:
            if not request.num_pending:
                request.tokens.append(token % 3)
        scheduled = manager.schedule(8, shape=decode)
        manager.plan_step(scheduled, shape=decode)
        assert scheduled
        manager.check_integrity()
    assert len({tuple(r.blocks[:5]) for r in requests}) == 1


def test_schedule_chooses_among_the_requests_named() -> None:
    manager = make()
    a, b = manager.admit_request(PROMPT), manager.admit_request([9] * 10)
    assert [r for r, _ in manager.schedule(100, requests=[b])] == [b]
    assert [r for r, _ in manager.schedule(100, requests=iter([b, a]))] == [b, a]
    manager.release_request(b)
    with pytest.raises(RequestError, match="released"):
        manager.schedule(100, requests=[a, b])


def test_the_known_part_of_a_request_is_cached() -> None:
    manager = make()
    request = run(manager)
    manager.plan_step([(request, 1)], steps=12)  # ids of a K-step loop, of which the caller keeps three
    request.tokens += [1, 2, 3]
    manager.release_request(request)
    manager.check_integrity()
    assert manager.stats().cache.pools["device"].cached == 5


def test_steps_of_the_same_rows_see_what_changed_between() -> None:
    """Rows fed again are not read anew: what changes them has to say so."""
    manager = make(num_blocks=30, num_slots=4, drafts=2)
    rows = [manager.admit_request(PROMPT[:n]) for n in (3, 9, 17)]
    for request in rows:
        feed(manager, request)
    scheduled = [(r, 1) for r in rows]

    def starts() -> list[int]:
        plan = manager.plan_step(scheduled)
        manager.check_integrity()
        live = {r.slot: r for r in rows}
        tables = zip(plan.table_slot.tolist(), plan.table_index.tolist(), plan.table_block.tolist(), strict=True)
        assert all(live[slot].blocks[column] == block for slot, column, block in tables if slot)
        return plan.seq_start.tolist()[:3]

    assert [starts() for _ in range(9)][-1] == [11, 17, 25]
    manager.accept(rows[0], 0)
    assert starts() == [11, 18, 26]
    manager.reserve(rows[1], 60)
    assert len(rows[1].blocks) == 8 and starts() == [12, 19, 27]
    assert len(rows[1].blocks) == 8
    slot = rows[2].slot
    manager.release_request(rows[2])
    with pytest.raises(RequestError, match="released"):
        manager.plan_step(scheduled)
    rows[2] = manager.admit_request(PROMPT[:20])
    assert rows[2].slot == slot
    scheduled[2] = (rows[2], 1)
    assert starts() == [13, 20, 16]  # what the one before has left
    scheduled[2] = (rows[2], 2)
    assert starts() == [14, 21, 17]
    manager.plan_step(scheduled, steps=4)
    with pytest.raises(PlanError, match="4 steps with drafts that were not accepted"):
        manager.plan_step(scheduled)
    manager.accept(rows[2], 5)
    assert starts() == [19, 26, 24]


def test_a_step_that_failed_still_restores_when_it_is_planned_again() -> None:
    manager = make(num_slots=2)
    serve(manager)
    request = manager.admit_request(PROMPT)
    small = manager.pinned_shape(1, slot_copies=1)
    with pytest.raises(PlanError, match="tokens=3"):
        manager.plan_step([(request, 3)], shape=small)
    assert request.restores is not None
    assert len(pairs(manager.plan_step([(request, 3)]))) == 1
    manager.check_integrity()


# What schedule gives, refused plans, backups, other sizes


def state(manager: KVCacheManager) -> tuple:
    rows = [
        (r.num_cached, list(r.blocks), r.num_tabled, r.num_scheduled, r.last_step, len(r.nodes))
        for r in manager.requests
    ]
    return manager.stats(), rows, len(manager.cache.tree), len(manager.cache.transfers)


def test_schedule_keeps_to_a_shape_without_history_and_of_few_columns() -> None:
    manager = make(num_blocks=30, drafts=3)
    request = manager.admit_request(PROMPT)
    shape = manager.pinned_shape(2, 20, history=False)
    assert manager.schedule(20, shape=shape) == [(request, 4)]
    manager.plan_step(manager.schedule(20, shape=shape), shape=shape)
    narrow = manager.pinned_shape(2, 20, columns=2)
    manager.plan_step(manager.schedule(20, shape=narrow), shape=narrow)
    assert request.num_cached == 16 and manager.schedule(20, shape=narrow) == []
    behind = manager.admit_request([9] * 12)
    assert manager.schedule(20, shape=narrow) == [(behind, 8)]  # the first holds nobody back


def test_a_request_at_its_limit_does_not_stop_the_others() -> None:
    manager = make()
    full, other = manager.admit_request(PROMPT[:8], max_tokens=10), manager.admit_request([9] * 12)
    full.tokens += [1, 2, 3, 4]
    assert full.num_excess == 2
    scheduled = manager.schedule(40)
    assert scheduled == [(full, 10), (other, 8)]
    manager.plan_step(scheduled)
    full.tokens.append(5)
    assert manager.schedule(40) == [(other, 4)]


@pytest.mark.parametrize(
    ("scheduled", "options", "error"),
    [
        ([1], dict(shape=StepShape(1, 1, 1, 1, 1, 1, 1)), PlanError),
        ([41], {}, RequestError),
        ([9, 97], {}, PlanError),
        ([9] * 5, {}, PlanError),
        ([40, 0], {}, PlanError),
        ([1], dict(steps=99), PlanError),
        ([1], dict(shape="any"), PlanError),
    ],
)
def test_a_refused_plan_changes_nothing(scheduled: list[int], options: dict, error: type[Exception]) -> None:
    """Not even what the step before has filled is published by it."""
    manager = make(num_blocks=9)
    first, second = manager.admit_request(PROMPT), manager.admit_request(PROMPT)
    manager.plan_step([(first, 24), (second, 24)])
    rows, before = [first, second], state(manager)
    with pytest.raises(error):
        manager.plan_step([(rows[i % 2], n) for i, n in enumerate(scheduled)], **options)
    assert state(manager) == before
    manager.check_integrity()


def test_a_plan_that_fits_once_blocks_are_shared_is_not_refused() -> None:
    """Six blocks are the other's as well: committed first, they make the room that the step needs."""
    manager = make(num_blocks=6)
    first, second = manager.admit_request(PROMPT), manager.admit_request(PROMPT)
    manager.plan_step([(first, 24), (second, 24)])
    before = state(manager)
    with pytest.raises(OutOfBlocksError, match="requested 4 blocks, 3 available"):
        manager.plan_step([(first, 16), (second, 16)])
    assert state(manager) == before
    manager.plan_step([(first, 16)])
    assert len(set(first.blocks) | set(second.blocks)) == 5
    manager.check_integrity()


def test_backups_that_find_no_room_take_none_from_those_queued() -> None:
    manager = make(num_blocks=12, host=HostSize(3), write=WritePolicy.write_through(), every=None)
    prompt = [i % 7 for i in range(49)]
    request = run(manager, prompt)
    manager.commit()
    copies = [node.depth for node in request.nodes if node.host]
    assert copies == [0, 1, 2] and manager.stats().cache.counters.evicted[Tier.HOST] == 0
    manager.check_integrity()


def test_backups_make_room_of_colder_ones() -> None:
    manager = make(num_blocks=24, host=HostSize(3), write=WritePolicy.write_through(), every=None)
    serve(manager, [1] * 25)
    run(manager, [2] * 25)
    manager.commit()
    kept = [node for node in manager.cache.tree.nodes.published.values() if node.host]
    assert len(kept) == 3 and all(node.refs for node in kept)
    manager.check_integrity()


@pytest.mark.parametrize("blocks", [6, 40])
def test_another_size(blocks: int) -> None:
    manager = make(num_blocks=12, host=HostSize.of(LAYOUT, 20, 4))
    request = run(manager, PROMPT[:35])
    request.tokens.append(1)
    size = CacheSize(blocks, 2, 6)
    with pytest.raises(ContextLimitError):
        manager.resize(size)
    manager.release_request(request)
    request = run(manager, PROMPT[:35], max_tokens=48)
    request.tokens.append(1)
    for wrong in (None, 5, (6, 2, 6)):
        with pytest.raises(PlanError):
            manager.resize(wrong)
    manager.resize(size)
    manager.check_integrity()
    assert manager.size == size and manager.memory_bytes() == manager.layout.total_bytes(size)
    assert manager.stats().blocks_total == manager.stats().blocks_free == blocks and manager.preempted == (request,)
    with pytest.raises(PlanError, match="not taken"):
        manager.resize(size)
    assert [stage.swap_in for stage in manager.take_transfers()] == [None]
    manager.resume(request)
    assert request.num_cached == 35
    assert manager.plan_step([(request, 1)]).facts.blocks == blocks + 1
    manager.check_integrity()


# Other weights


@pytest.mark.parametrize("call", ["wakeup", "reset"])
def test_new_weights_find_nothing_of_the_old_ones(call: str) -> None:
    events = EventLog()
    manager = make(num_blocks=30, host=HostSize.of(LAYOUT, 20, 4), weights_id="v1", events=events)
    tier, stored = StorageTier(manager), set[bytes]()
    serve(manager)
    request = run(manager, PROMPT[:20])
    request.tokens.append(3)
    manager.sleep()
    list(manager.take_transfers())
    writes = tier.plan_writes(100)
    tier.finish_writes(writes, [True] * len(writes))
    stored |= {move.key for move in writes}
    assert len(stored) == 5 and request.parked is not None
    contains = lambda keys: [key in stored for key in keys]  # noqa: E731
    if call == "wakeup":
        manager.wakeup(weights_id="v2")
        manager.resume(request)
        assert request.num_cached == 0 and request.tokens == [*PROMPT[:20], 3]
        feed(manager, request)
        manager.release_request(request)
    else:
        manager.reset(weights_id="v2")
        assert request.state is RequestState.RELEASED
    assert manager.weights_id == "v2"
    assert any(event.kind == "cleared" for event in events.since(0)[0])
    assert manager.hash_spec == make(weights_id="v2").hash_spec
    assert tier.plan_reads(PROMPT, contains, contains) == []
    manager.check_integrity()
    again = manager.admit_request(PROMPT)
    assert again.num_cached == (16 if call == "wakeup" else 0)  # what was computed since
    manager.release_request(again)
    manager.sleep()
    list(manager.take_transfers())
    manager.wakeup(weights_id="v1")
    assert manager.admit_request(PROMPT).num_cached == 0  # these bytes were given up; storage still has them
    reads = tier.plan_reads(PROMPT, contains, contains)
    assert {move.key for move in reads} <= stored and reads
    manager.check_integrity()


def test_the_same_weights_keep_what_is_cached() -> None:
    manager = make(host=HostSize.of(LAYOUT, 20, 4), weights_id="v1")
    serve(manager)
    for weights in ({}, {"weights_id": "v1"}):
        manager.sleep()
        list(manager.take_transfers())
        manager.wakeup(**weights)
        request = manager.admit_request(PROMPT)
        assert request.num_cached == 32
        feed(manager, request)
        manager.release_request(request)


def test_weights_are_named_by_calls_only() -> None:
    manager = make(weights_id="v1")
    for name in ("weights_id", "hash_spec"):
        with pytest.raises(AttributeError):
            setattr(manager, name, "v2")
    with pytest.raises(RequestError, match="does not sleep"):
        manager.wakeup(weights_id="v2")
    manager.sleep()
    for call in (manager.wakeup, manager.reset):
        with pytest.raises(RequestError):
            call(weights_id=1.5)
    assert manager.weights_id == "v1"
    manager.wakeup(weights_id=None)
    assert manager.weights_id is None and manager.hash_spec == KVCacheManager(LAYOUT, manager.size).hash_spec


# Records on their way from storage


def test_no_read_lands_where_a_queued_copy_still_reads() -> None:
    """A parked request is resumed: its records are read by the next transfers, and free in the books already."""
    manager = make(num_blocks=12, host=HostSize.of(LAYOUT, 4, 3))
    tier = StorageTier(manager)
    request = run(manager, PROMPT[:12])
    request.tokens.append(1)
    manager.preempt(request)
    manager.plan_step([])
    for _ in manager.take_transfers():
        pass
    parked = request.parked
    assert parked is not None and parked.blocks
    manager.resume(request)

    def fetched() -> set[int]:
        moves = tier.plan_reads([3] * 33, lambda keys: [True] * len(keys), lambda keys: [True] * len(keys))
        tier.finish_reads(moves, [False] * len(moves))
        assert moves
        return {page for move in moves for page in move.pages}

    waiting = {*parked.blocks, *parked.state}
    assert not fetched() & waiting
    manager.plan_step([(request, 1)])
    assert not fetched() & waiting
    stages = manager.take_transfers()
    assert stages and not fetched() & waiting  # taken, not run
    assert tier.plan_writes(9) == []
    for _ in stages:
        pass
    assert fetched() & waiting
    manager.check_integrity()


def test_a_fetched_snapshot_whose_block_has_gone_leaks_no_record() -> None:
    manager = make(num_blocks=6, host=HostSize.of(LAYOUT, 4, 2), every=1)
    tier = StorageTier(manager)
    yes = lambda keys: [True] * len(keys)  # noqa: E731
    moves = tier.plan_reads(PROMPT[:9], yes, yes)
    assert [move.scope for move in moves] == ["block", "slot"]
    tier.finish_reads(moves[:1], [True])
    manager.cache.give_back(manager.cache.tree.moves.retract(moves[0].node))
    tier.finish_reads(moves[1:], [True])
    manager.check_integrity()
    host = manager.stats().cache.pools["host"]
    assert host.free == host.total


def test_sleep_with_blocks_on_their_way_from_storage_below() -> None:
    manager = make(num_blocks=6, host=HostSize.of(LAYOUT, 2, 1), every=1, write=WritePolicy.write_through_selective(99))
    tier = StorageTier(manager)
    serve(manager, PROMPT[:9])
    yes = lambda keys: [True] * len(keys)  # noqa: E731
    moves = tier.plan_reads(PROMPT, yes, yes)
    assert any(move.scope == "block" for move in moves)
    manager.sleep()
    manager.check_integrity()
    assert manager.stats().blocks_free == 6 and not manager.take_transfers()
    tier.finish_reads(moves, [True] * len(moves))
    manager.wakeup()
    manager.check_integrity()
    assert manager.admit_request(PROMPT).num_cached == 0


def test_backups_keep_the_watermark() -> None:
    watermark = HostWatermark(0.5, 0.5)
    manager = make(host=HostSize(4), write=WritePolicy.write_through(), every=None, watermark=watermark)
    request = run(manager, PROMPT)
    manager.commit()
    assert [node.depth for node in request.nodes if node.host] == [0, 1]
    assert manager.stats().cache.counters.evicted[Tier.HOST] == 0
    manager.check_integrity()
