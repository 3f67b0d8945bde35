"""Where a prompt leaves what is cached a state is kept, so that the next one which shares as much hits all of it."""

from __future__ import annotations

import dataclasses

import pytest

from dsv4_jax import CacheLayout, CachePolicy, CacheSize, DSV4Config, KVCacheManager, plan_capacity
from dsv4_jax.manager import HostSize, SnapshotPlacement
from dsv4_jax.manager.prefix.node import Tier
from dsv4_jax.manager.request import Request
from dsv4_jax.manager.storage_tier import StorageTier

B = 128
LAYOUT = CacheLayout(DSV4Config.tiny())
JUNCTIONS = CachePolicy(snapshots=dataclasses.replace(SnapshotPlacement.none(), junctions=True))
SHARED = [i % 7 for i in range(7 * B)]


def make(policy: CachePolicy | None = None, **options) -> KVCacheManager:
    return KVCacheManager(LAYOUT, CacheSize(64, 4, 16, 4), policy=policy or CachePolicy(), **options)


def prompt(user: int, shared: list[int] = SHARED) -> list[int]:
    return [*shared, *[20 + user] * (B + 40)]


def feed(manager: KVCacheManager) -> list[int]:
    """All pending tokens, as `schedule` deals them out. The tokens of each step."""
    counts = []
    while scheduled := manager.schedule(10_000):
        manager.plan_step(scheduled)
        manager.take_transfers()
        manager.check_integrity()
        counts.append(sum(count for _, count in scheduled))
    return counts


def serve(manager: KVCacheManager, tokens: list[int]) -> int:
    """Tokens found."""
    request = manager.admit_request(tokens)
    hit = request.num_cached
    feed(manager)
    manager.release_request(request)
    return hit


def test_the_third_prompt_hits_what_the_first_two_share() -> None:
    manager = make(JUNCTIONS)
    assert [serve(manager, prompt(user)) for user in range(4)] == [0, 0, 7 * B, 7 * B]
    manager = make()  # the second one finds what was kept four blocks before the first one's end
    assert [serve(manager, prompt(user)) for user in range(4)] == [0, 4 * B, 7 * B, 7 * B]


def test_the_default_policy_hits_in_the_default_size_of_a_cache() -> None:
    for given in (
        {"max_requests": 1, "max_context": 10 * B},
        {"max_requests": 4, "max_context": 10 * B},
        {"hbm_bytes": 10**6, "max_context": 10 * B},
        {"hbm_bytes": 10**6, "max_requests": 2},
    ):
        manager = KVCacheManager(LAYOUT, plan_capacity(LAYOUT, **given), policy=CachePolicy())
        assert [serve(manager, prompt(0)) for _ in range(3)] == [0, 8 * B, 8 * B], given


def test_one_chunk_ends_at_the_junction_and_none_elsewhere() -> None:
    manager = make(JUNCTIONS)
    first, second = manager.admit_request(prompt(1)), None
    assert first.junction == 0 and feed(manager) == [8 * B + 40]
    manager.release_request(first)
    second = manager.admit_request(prompt(2))
    assert (second.num_cached, second.junction) == (0, 7 * B)
    assert feed(manager) == [7 * B, B + 40]
    third = manager.admit_request(prompt(3))
    assert (third.num_cached, third.junction) == (7 * B, 0)
    assert feed(manager) == [B + 40]


def test_a_junction_behind_a_hit() -> None:
    manager = make(JUNCTIONS)
    for user in range(2):
        serve(manager, prompt(user))
    longer = [*SHARED, *[1] * 4 * B]
    serve(manager, prompt(5, longer))
    request = manager.admit_request(prompt(6, longer))
    assert (request.num_cached, request.junction) == (7 * B, 11 * B)
    assert feed(manager) == [4 * B, B + 40]
    assert manager.admit_request(prompt(7, longer)).num_cached == 11 * B


def test_several_at_one_junction_keep_one_state() -> None:
    manager = make(JUNCTIONS)
    serve(manager, prompt(0))
    for user in (1, 2, 3):
        assert manager.admit_request(prompt(user)).junction == 7 * B
    feed(manager)
    assert manager.stats().cache.pools["slot"].cached == 1
    assert manager.stats().cache.counters.evicted_snapshots == 0


def test_outputs_that_come_to_a_boundary_do_not_crowd_out_a_junction() -> None:
    """Decodes come first in a step, and took all the copies that its shape has: of states that they replace soon."""
    manager = make(CachePolicy(snapshots=SnapshotPlacement(doubling=None, end_of_prompt=False)))
    serve(manager, prompt(0))
    writer, second = manager.admit_request([99] * (B - 1)), manager.admit_request(prompt(1))
    shape = manager.pinned_shape(2, 10 * B, slot_copies=1)
    manager.plan_step([(writer, B - 1)])
    writer.tokens += [9] * (B + 2)
    manager.plan_step([(writer, B + 1), (second, 7 * B)])
    assert writer.num_cached == 2 * B and second.num_cached == second.junction
    manager.plan_step([(writer, 1), (second, 1)], shape=shape)
    assert manager.admit_request(prompt(2)).num_cached == 7 * B


def test_no_second_state_where_somebody_kept_one_meanwhile() -> None:
    manager = make(JUNCTIONS)
    serve(manager, prompt(0))
    late = manager.admit_request(prompt(1))
    assert serve_beside(manager, prompt(2), late) == 0
    assert manager.stats().cache.pools["slot"].cached == 1
    feed(manager)
    assert manager.stats().cache.pools["slot"].cached == 1


def serve_beside(manager: KVCacheManager, tokens: list[int], waiting: Request) -> int:
    """As `serve`, while another request waits."""
    request = manager.admit_request(tokens)
    hit = request.num_cached
    while request.num_pending:
        manager.plan_step(manager.schedule(10_000, requests=[request]))
    manager.release_request(request)
    assert waiting.num_cached == 0
    return hit


def test_blocks_that_are_evicted_meanwhile() -> None:
    """What lay between the hit and the junction is gone when the request comes there: it fills it anew."""
    manager = KVCacheManager(LAYOUT, CacheSize(18, 4, 16, 4), policy=JUNCTIONS)
    serve(manager, prompt(0))
    request = manager.admit_request(prompt(1))
    assert request.junction == 7 * B
    serve_beside(manager, [90 + i % 9 for i in range(14 * B)], request)
    feed(manager)
    manager.release_request(request)
    assert serve(manager, prompt(2)) == 7 * B


def test_a_junction_of_blocks_on_the_host() -> None:
    manager = make(JUNCTIONS, host=HostSize.of(LAYOUT, 32, 4))
    serve(manager, prompt(0))
    manager.sleep()
    list(manager.take_transfers())
    manager.wakeup()
    assert [serve(manager, prompt(user)) for user in (1, 2)] == [0, 7 * B]
    assert manager.stats().cache.counters.adoptions == 7  # computed again, on the way to the junction


def test_a_state_that_only_storage_has_is_kept_again() -> None:
    """Prompts came by the junction for ever, each with its state, and found nothing: storage may not be read."""
    manager = make(JUNCTIONS, host=HostSize.of(LAYOUT, 64, 4))
    tier, cache = StorageTier(manager), manager.cache
    for user in range(2):
        serve(manager, prompt(user))
    manager.sleep()
    list(manager.take_transfers())
    manager.wakeup()
    writes = tier.plan_writes(99)
    tier.finish_writes(writes, [True] * len(writes))
    cache.pages.release(cache.tree.snapshots.evict(Tier.HOST, cache.tree.snapshots.count(Tier.HOST)).pages)
    assert [serve(manager, prompt(user)) for user in (2, 3)] == [0, 7 * B]
    manager.check_integrity()


def test_a_request_that_is_preempted_or_forked_before_its_junction() -> None:
    manager = make(JUNCTIONS)
    serve(manager, prompt(0))
    request = manager.admit_request(prompt(1))
    manager.plan_step([(request, 100)])
    (child,) = manager.fork(request)
    assert child.junction == 7 * B
    manager.release_request(child)
    manager.preempt(request)
    manager.resume(request)
    assert (request.num_cached, request.junction) == (0, 7 * B)
    feed(manager)
    manager.release_request(request)
    assert serve(manager, prompt(2)) == 7 * B


def test_a_step_that_did_not_run_kept_no_state_at_its_junction() -> None:
    manager = make(JUNCTIONS)
    serve(manager, prompt(0))
    request = manager.admit_request(prompt(1))
    manager.plan_step(manager.schedule(10_000))  # up to the junction
    manager.plan_step(manager.schedule(10_000))  # this one should have taken the state
    waiting = manager.admit_request(prompt(2))
    assert (waiting.num_cached, waiting.junction) == (7 * B, 0)
    manager.abort_request(request)
    manager.check_integrity()
    assert (waiting.num_cached, waiting.junction) == (0, 7 * B)  # it starts anew, and keeps the state itself
    feed(manager)
    assert manager.admit_request(prompt(3)).num_cached == 7 * B


@pytest.mark.parametrize(
    "policy", [None, CachePolicy(snapshots=dataclasses.replace(SnapshotPlacement(), junctions=False))]
)
def test_without_junctions_chunks_do_not_end_there(policy: CachePolicy | None) -> None:
    manager = KVCacheManager(LAYOUT, CacheSize(64, 4, 16, 4), policy=policy)
    serve(manager, prompt(0))
    manager.admit_request(prompt(1))
    assert 7 * B not in feed(manager)
