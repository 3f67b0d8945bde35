"""Requests that come while others compute what they share: they wait for it, find it, and never wait in vain."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.manager import CachePolicy, HostSize, Namespace, Request, SnapshotPlacement

BLOCK = 8
LAYOUT = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=BLOCK)
SHARED = [i % 40 for i in range(20 * BLOCK + 4)]  # parts within a block


def make(slots: int = 12, blocks: int = 400, snapshots: int = 40, host: int = 0, **placement) -> KVCacheManager:
    policy = CachePolicy(snapshots=SnapshotPlacement(**placement))
    size = CacheSize(blocks, slots, 40, num_snapshots=snapshots)
    return KVCacheManager(LAYOUT, size, policy=policy, host=HostSize.of(LAYOUT, host, host) if host else None)


def prompt(i: int, shared: int = len(SHARED)) -> list[int]:
    return SHARED[:shared] + [41 + i] * 20


def serve(manager: KVCacheManager, budget: int = 64, **options) -> int:
    """Computes all that is known. Returns how many tokens that took."""
    computed = 0
    while scheduled := manager.schedule(budget, **options):
        manager.plan_tokens(manager.plan_step(scheduled, shape=options.get("shape")))
        assert all(True for _ in manager.take_transfers())
        computed += sum(count for _, count in scheduled)
        manager.check_integrity()
    assert not any(request.num_pending for request in options.get("requests", manager.requests))
    return computed


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("budget", [16, 64, 1000])
def test_what_many_share_is_computed_once(budget: int, shaped: bool) -> None:
    manager = make()
    requests = [manager.admit_request(prompt(i)) for i in range(12)]
    shape = manager.pinned_shape(12, max(budget, 12)) if shaped else None
    own = len(prompt(0)) - 20 * BLOCK
    assert serve(manager, budget, shape=shape) == 20 * BLOCK + 12 * own
    assert [r.num_hit for r in requests] == [0] + [20 * BLOCK] * 11
    counters = manager.stats().cache.counters
    assert (counters.lookups, counters.hits, sum(counters.hit_tokens.values())) == (12, 11, 11 * 20 * BLOCK)
    assert counters.lookup_tokens == 12 * len(prompt(0)) and counters.duplicates == 0


def test_each_starts_where_it_goes_another_way() -> None:
    manager = make()
    parts = [160, 40, 100, 100, 160, 8, 7]
    requests = [manager.admit_request(prompt(i, shared)) for i, shared in enumerate(parts)]
    full = [shared // BLOCK * BLOCK for shared in parts]
    assert serve(manager) == sum(len(r.tokens) for r in requests) - sum(full[1:])
    assert [r.num_hit for r in requests] == [0, *full[1:]]


def test_tenants_wait_for_their_own_alone() -> None:
    manager = make()
    requests = [manager.admit_request(prompt(i), namespace=Namespace(i % 2)) for i in range(6)]
    assert [r for r, _ in manager.schedule(1000)] == requests[:2]
    assert serve(manager) == 2 * len(prompt(0)) + 4 * (len(prompt(0)) - 160)


@pytest.mark.parametrize("end", ["abort", "lose", "release", "preempt", "leave out"])
def test_nobody_waits_for_one_that_does_not_go_on(end: str) -> None:
    for steps in range(8):
        stop_after(steps, end)


def stop_after(steps: int, end: str) -> None:
    """The one that computes is stopped after so many steps; all others are answered, at no more cost than it has to."""
    manager = make(host=30)
    first, *others = [manager.admit_request(prompt(i)) for i in range(5)]
    for _ in range(steps):
        manager.plan_tokens(manager.plan_step(manager.schedule(40)))
        list(manager.take_transfers())
    if end == "lose":  # a step that never ran
        scheduled = manager.schedule(40)
        manager.plan_step(scheduled)
        manager.take_transfers()
        for request, _ in scheduled:
            manager.abort_request(request)
        others = [r for r in others if r in manager.requests]
        assert others
    elif end == "leave out":
        assert {r for r, _ in manager.schedule(1000, requests=others)} <= set(others)
    else:
        {"abort": manager.abort_request, "release": manager.release_request, "preempt": manager.preempt}[end](first)
    manager.check_integrity()
    whole = len(prompt(0))
    done = sum(r.num_cached - r.num_hit for r in others)
    more = serve(manager, 40, requests=others)
    assert all(r.num_cached == whole for r in others)
    assert done + more <= whole + (len(others) - 1) * (whole - 160) + 160 * (end == "lose")
    if end == "preempt":
        manager.resume(first)
    serve(manager, 40)
    for request in manager.requests:
        manager.release_request(request)
    manager.check_integrity()


def test_the_one_that_computes_is_scheduled_in_the_place_of_who_waits_for_it() -> None:
    manager = make()
    late, urgent, other = (manager.admit_request(p) for p in (prompt(0), prompt(1), [7] * 50))
    manager.plan_step(manager.schedule(16, requests=[late]))
    order = [urgent, other, late]
    assert [r for r, _ in manager.schedule(24, requests=order)] == [late]
    while urgent.last_step == 0:
        scheduled = manager.schedule(24, requests=order)
        assert scheduled[0][0] in (late, urgent)
        manager.plan_step(scheduled)
    assert urgent.num_hit == 160
    assert serve(manager, 64) > 0


def test_a_chain_of_requests_that_wait_for_each_other() -> None:
    manager = make()
    a = manager.admit_request(prompt(0, 40))
    b = manager.admit_request(prompt(1, 100))
    c = manager.admit_request(SHARED[:100] + [42] * 12 + [1] * 20)
    assert [r for r, _ in manager.schedule(1000)] == [a]
    assert serve(manager) == 60 + (120 - 40) + (132 - 112)
    assert (a.num_hit, b.num_hit, c.num_hit) == (0, 40, 112)


def test_what_was_computed_meanwhile_is_found_without_waiting() -> None:
    manager = make(junctions=False, every=4)
    first = manager.admit_request(prompt(0))
    second = manager.admit_request(prompt(1))
    assert [r for r, _ in manager.schedule(1000)] == [first, second]  # no state is kept for it where they part
    serve(manager, requests=[first])
    assert not second.num_hit
    assert [r for r, _ in manager.schedule(1000)] == [second]
    assert second.num_hit == second.num_cached == 160


def test_what_went_to_the_host_meanwhile_is_found() -> None:
    manager = make(blocks=60, host=80)
    newcomer = manager.admit_request(prompt(1))
    first = manager.admit_request(prompt(0))
    serve(manager, requests=[first])
    manager.release_request(first)
    for i in range(3):
        other = manager.admit_request([i] * 300)
        serve(manager, requests=[other])
        manager.release_request(other)
    [(request, count)] = manager.schedule(1000)
    assert request is newcomer and request.num_hit >= 144 and count <= len(request.tokens) - 144
    manager.plan_step([(request, count)])
    assert len(manager.take_transfers()) > 0
    assert sum(manager.stats().cache.counters.hit_tokens.values()) == request.num_hit


def test_reserved_blocks_go_back_for_those_that_are_found() -> None:
    manager = make(blocks=60)
    requests = [manager.admit_request(prompt(i), max_tokens=200) for i in range(2)]
    for request in requests:
        manager.reserve(request, 200)
    assert manager.stats().blocks_free == 10
    serve(manager)
    assert requests[1].num_hit == 160 and manager.stats().blocks_free == 30
    assert [len(r.blocks) for r in requests] == [25, 25]


def test_what_a_newcomer_s_tokens_say_now_is_looked_up() -> None:
    manager = make()
    edited = [manager.admit_request(prompt(0)) for _ in range(3)][1]
    edited.tokens[50] = 99
    manager.fork(edited)  # which takes notice of it
    serve(manager)
    assert [r.num_hit for r in manager.requests] == [0, 48, 176, 48]


def test_forks_of_a_newcomer_wait_for_it() -> None:
    manager = make()
    parent = manager.admit_request(prompt(0))
    children = manager.fork(parent, request_ids=[None, None])
    whole, most = len(prompt(0)), (len(prompt(0)) - 1) // BLOCK * BLOCK
    assert serve(manager) == whole + 2 * (whole - most)
    assert [child.num_hit for child in children] == [most, most] and all(child.forked is None for child in children)


def test_without_a_slot_to_spare_nobody_waits() -> None:
    manager = make(slots=3, snapshots=0)
    requests = [manager.admit_request(prompt(i)) for i in range(3)]
    assert [r for r, _ in manager.schedule(1000)] == requests
    assert serve(manager) == 3 * len(prompt(0))


def test_where_no_state_was_kept_nobody_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make(doubling=None, end_of_prompt=False)
    requests = [manager.admit_request(prompt(i)) for i in range(4)]
    monkeypatch.setattr(manager.publisher, "plan_saves", lambda *_: [])
    steps = 0
    while scheduled := manager.schedule(1000):
        manager.plan_step(scheduled)
        steps += 1
    assert steps <= 6 and all(not r.num_pending for r in requests)


def calls(manager: KVCacheManager) -> list[Callable[[Request], object]]:
    return [manager.abort_request, manager.release_request, manager.preempt]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_all_of_them_are_answered(seed: int) -> None:
    draw, manager = random.Random(seed), make(slots=6, blocks=60, snapshots=6, host=20 * (seed % 2))
    waiting, answered, steps = [prompt(i, draw.choice([40, 100, 160])) for i in range(30)], 0, 0
    while waiting or manager.requests or manager.preempted:
        steps += 1
        assert steps < 2000
        while waiting and manager.can_admit() and draw.random() < 0.8:
            manager.admit_request(waiting.pop())
        for request in manager.preempted:
            if manager.can_resume(request) and draw.random() < 0.5:
                manager.resume(request)
        order = draw.sample(manager.requests, len(manager.requests))
        scheduled = manager.schedule(48, requests=order)
        if not scheduled and manager.requests:
            manager.preempt(manager.requests[-1])
            continue
        manager.plan_tokens(manager.plan_step(scheduled))
        list(manager.take_transfers())
        if draw.random() < 0.1 and scheduled:
            request = draw.choice(scheduled)[0]
            draw.choice(calls(manager))(request)
            answered += request not in manager.preempted
        for request in manager.requests:
            if not request.num_pending:
                manager.release_request(request)
                answered += 1
        manager.check_integrity()
    assert answered == 30
