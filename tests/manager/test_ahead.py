"""Steps planned before the tokens of the step before are known: look-ahead, with and without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import PlanError, RequestError
from dsv4_jax.manager import BlockHasher, CachePolicy, EventLog

from ..effort import lines_run
from .test_manager import make, refused

BLOCK = 8
UNKNOWN = -1


def caching(drafts: int = 0) -> KVCacheManager:
    layout = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=BLOCK, draft_tokens=drafts)
    return KVCacheManager(layout, CacheSize(64, 4, 16, num_snapshots=4), policy=CachePolicy(), events=EventLog())


def feed(manager: KVCacheManager) -> None:
    """All that is known."""
    while scheduled := manager.schedule(64):
        manager.plan_tokens(manager.plan_step(scheduled))


def drawn(prompt: list[int], place: int) -> int:
    """What the device draws as token `place` of the continuation of a prompt."""
    return (sum(prompt) * 31 + place * 7) % 50


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_look_ahead_leaves_what_a_loop_without_it_leaves(steps: int, shaped: bool) -> None:
    prompts = [list(range(i, i + 19 + 5 * i)) for i in range(3)]

    def serve(ahead: bool) -> tuple[KVCacheManager, list[list[int]], int]:
        manager = caching()
        requests = [manager.admit_request(prompt, max_tokens=90) for prompt in prompts]
        shape = manager.pinned_shape(4, 32, steps=steps) if shaped else None
        late: list[list[tuple]] = []
        fed_unknown = 0
        for _ in range(60):
            live = [r for r in requests if r in manager.requests]
            pairs = manager.schedule(32, requests=live, ahead=ahead, shape=shape)
            k = steps if pairs and all(n == 1 and r.num_cached >= r.num_prompt for r, n in pairs) else 1
            plan = manager.plan_step(pairs, steps=k, ahead=ahead, shape=shape)
            ids = manager.plan_tokens(plan, unknown=UNKNOWN).tolist() if ahead else manager.plan_tokens(plan).tolist()
            at = 0
            for request, count in pairs:
                row, start = ids[at : at + count], request.num_cached - count * k
                text = prompts[requests.index(request)]
                true = text + [drawn(text, place) for place in range(len(text), 90)]
                fed_unknown += row.count(UNKNOWN)
                assert all(a in (b, UNKNOWN) for a, b in zip(row, true[start:], strict=False))
                at += count
            assert not any(ids[at:])
            late.append([(r.ref, prompts[requests.index(r)], r.num_cached, k) for r, _ in pairs])
            while len(late) > (1 if ahead else 0):  # what the step before has drawn
                for ref, text, stop, k_then in late.pop(0):
                    if (request := manager.find(ref)) is None:
                        continue
                    row = [drawn(text, place) for place in range(stop - k_then + 1, stop + 1)]
                    request.tokens += row[-(stop + 1 - len(request.tokens)) :] if stop >= len(request.tokens) else []
                    if len(request.tokens) >= 70 + len(text) % 3:  # a stop token
                        manager.release_request(request)
            manager.check_integrity()
        assert not manager.requests
        return manager, [list(r.tokens) for r in requests], fed_unknown

    (plain, texts, none), (manager, same, some) = serve(False), serve(True)
    assert not none and some > 50
    assert [a[: len(b)] for a, b in zip(texts, same, strict=True)] == same or texts == same
    stored = [{e.digest for e in m.events.since(0)[0] if e.kind == "stored"} for m in (plain, manager)]
    true = set()
    for text in prompts:
        whole = text + [drawn(text, place) for place in range(len(text), 90)]
        true |= set(BlockHasher(manager.hash_spec, whole).digests)
    assert stored[1] <= true and stored[0] <= true  # nothing under a placeholder
    # The last token of each was fed before it was seen to be the last.
    assert len(stored[1] - stored[0]) <= len(prompts) and len(stored[0] - stored[1]) <= 3 * (steps > 1)
    for text, request in zip(texts, prompts, strict=True):
        assert len(request) < len(text)


def test_the_surplus_of_a_request_that_ends_is_dropped() -> None:
    manager = caching()
    request = manager.admit_request(range(BLOCK - 1), max_tokens=40)
    manager.plan_tokens(manager.plan_step(manager.schedule(BLOCK)))
    assert manager.schedule(BLOCK) == [] and manager.schedule(BLOCK, ahead=True) == [(request, 1)]
    plan = manager.plan_step([(request, 1)])
    assert manager.plan_tokens(plan, unknown=-7).tolist()[0] == -7
    assert request.num_cached == BLOCK and not request.num_shared
    manager.release_request(request)  # the token that it was fed is not one of it
    stats = manager.stats()
    assert stats.blocks_free == stats.blocks_total and not manager.events.since(0)[0]
    manager.check_integrity()


def test_whom_a_look_ahead_is_offered() -> None:
    manager = make(drafts=0)
    fed, half, fresh = (manager.admit_request(range(n), max_tokens=n + 2) for n in (5, 20, 6))
    assert manager.schedule(30, requests=[fed], ahead=True) == [(fed, 5)]
    manager.plan_step([(fed, 5), (half, 8)])
    assert manager.schedule(30, ahead=True) == [(fed, 1), (half, 12), (fresh, 6)]
    manager.plan_step([(half, 12)])
    assert manager.schedule(30, ahead=True) == [(half, 1), (fresh, 6)]  # what `fed` waits for was drawn long ago
    fed.tokens.append(3)
    assert manager.schedule(30, ahead=True) == [(fed, 1), (half, 1), (fresh, 6)]
    manager.plan_step([(half, 1)])
    manager.plan_step([(half, 1)])
    assert manager.schedule(30, requests=[half], ahead=True) == []  # it may hold no more
    manager.preempt(fed)
    manager.resume(fed)
    assert manager.schedule(30, requests=[fed], ahead=True) == [(fed, 6)]


def test_ids_planned_ahead_are_noted_at_once_where_blocks_fill() -> None:
    """However many there are: what has filled a block is noted already, and the others are looked at together."""

    def effort(count: int) -> int:
        layout = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=BLOCK)
        size = CacheSize(4 * count, count, 4, num_snapshots=count)
        manager = KVCacheManager(layout, size, policy=CachePolicy())
        requests = [manager.admit_request(range(i, i + BLOCK - 2 + i % 2)) for i in range(count)]
        shape, lines = manager.pinned_shape(count, BLOCK * count), list[int]()
        for step in range(6):
            scheduled = manager.schedule(BLOCK * count, shape=shape, ahead=step > 0)
            plan = manager.plan_step(scheduled, shape=shape, ahead=step > 0)
            assert len(scheduled) == count
            lines.append(lines_run(manager.plan_tokens, plan, unknown=UNKNOWN))
            for request in requests:  # of the step before
                request.ids.extend([step] * (step > 0))
        assert all(len(request.history) == len(request.ids) - 1 for request in requests)
        return max(lines[1:])

    assert effort(24) == effort(4)


@pytest.mark.parametrize("unknown", [0, 5, 1.5, "x", True, -(2**31) - 1])
def test_what_stands_for_unknown_tokens_is_no_token(unknown: object) -> None:
    manager = make()
    request = manager.admit_request([1, 2])
    plan = manager.plan_step([(request, 2)])
    refused(manager, PlanError, lambda: manager.plan_tokens(plan, unknown=unknown), "unknown must be an integer")
    refused(manager, PlanError, lambda: manager.schedule(5, ahead=1), "ahead must be True or False")
    refused(manager, PlanError, lambda: manager.plan_step([], ahead=None), "ahead must be True or False")


def test_without_saying_so_unknown_tokens_are_an_error() -> None:
    manager = make()
    request = manager.admit_request([1, 2])
    manager.plan_step([(request, 2)])
    plan = manager.plan_step(manager.schedule(4, ahead=True))
    refused(manager, RequestError, lambda: manager.plan_tokens(plan), "knows 2 tokens, the plan schedules 2..2")
    assert manager.plan_tokens(plan, unknown=-1)[0] == -1
    request.tokens.append(9)
    assert manager.plan_tokens(plan).tolist()[0] == 9


@pytest.mark.parametrize("loop", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_ahead_of_what_is_kept(loop: int, depth: int) -> None:
    """Plans for the most that may be kept, corrected in order: never shorter than what the device does, and the same in
    the end as without looking ahead."""
    width, draw = 3, random.Random(depth * 2 + loop)
    ahead, plain = caching(width), caching(width)
    prompts = [list(range(n)) for n in (9, 17)]
    pairs = [[m.admit_request(prompt, max_tokens=110) for prompt in prompts] for m in (ahead, plain)]
    for manager in (ahead, plain):
        feed(manager)
    for requests in pairs:
        for i, request in enumerate(requests):
            request.tokens.append(i)
    true = [len(prompt) for prompt in prompts]  # tokens in the cache of the device
    late: list[list[list[int]]] = []

    def settle() -> None:
        for i, steps in enumerate(late.pop(0)):
            row = [draw.randrange(50) for _ in range(sum(steps))]
            request, twin = pairs[0][i], pairs[1][i]
            ahead.accept(request, len(row))
            request.tokens += row
            plan = plain.plan_step([(twin, 1 + width)], steps=loop)
            assert plan is not None
            plain.accept(twin, len(row))
            twin.tokens += row
            assert request.num_cached >= twin.num_cached and request.step_start == twin.num_cached
        ahead.check_integrity()

    for turn in range(6):
        offered = ahead.schedule(8, ahead=True)
        assert [(r, n) for r, n in offered] == [(r, 1) for r in pairs[0]]
        plan = ahead.plan_step([(r, 1 + width) for r, _ in offered], steps=loop, ahead=True)
        ids = ahead.plan_tokens(plan, unknown=UNKNOWN)
        rows = ids[: 2 * (1 + width)].reshape(2, -1)
        assert (rows[:, 1:] == UNKNOWN).all() and (rows[:, 0] == UNKNOWN).all() == (turn > 0)
        late.append([[draw.randint(1, 1 + width) for _ in range(loop)] for _ in prompts])
        for i, steps in enumerate(late[-1]):
            for kept in steps:  # each goes on where the one before has ended, within what is reserved
                assert true[i] + 1 + width <= int(plan.seq_stop[i])
                true[i] += kept
        if len(late) > depth:
            settle()
    request = pairs[0][0]
    assert request.is_open == (depth + loop > 2)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: ahead.fork(request), "were not accepted"),
        (lambda: ahead.preempt(request), "were not accepted"),
        (lambda: ahead.plan_step([(request, 1)]), "were not accepted"),
        (lambda: ahead.plan_step([(r, 1 + width) for r in pairs[0]]), "were not accepted"),
        (lambda: ahead.accept(request, loop - 1), "keep a token each"),
        (lambda: ahead.accept(request, loop * (1 + width) + 1), "cannot keep"),
    ]
    for call, problem in calls if request.is_open else ():  # a single step is kept whole as ever
        with pytest.raises(PlanError, match=problem):
            call()
    while late:
        settle()
    for request, twin, length in zip(*pairs, true, strict=True):
        assert (request.num_cached, list(request.tokens)) == (length, list(twin.tokens))
        assert twin.num_cached == length and len(request.blocks) == len(twin.blocks)
    for manager, requests in zip((ahead, plain), pairs, strict=True):
        feed(manager)
        for request in requests:
            manager.preempt(request)
        manager.check_integrity()
    stored = [{e.digest for e in m.events.since(0)[0] if e.kind == "stored"} for m in (plain, ahead)]
    assert stored[0] == stored[1] and len(stored[0]) >= 5


def test_a_request_with_open_steps_can_end() -> None:
    manager = caching(2)
    for end in (manager.release_request, manager.abort_request):
        request = manager.admit_request(range(12), max_tokens=60)
        feed(manager)
        request.tokens.append(1)
        for _ in range(3):
            manager.plan_step([(request, 3)], ahead=True)
        assert (request.num_cached, request.step_start, len(request.earlier)) == (21, 12, 2)
        manager.accept(request, 1)
        request.tokens.append(2)
        assert (request.num_cached, request.step_start) == (19, 13)
        end(request)
        manager.check_integrity()
    assert manager.stats().cache.pools["device"].private == 0


def test_known_drafts_are_kept_whole_as_ever() -> None:
    manager = caching(2)
    request = manager.admit_request(range(12), max_tokens=60)
    feed(manager)
    request.tokens += [1, 2, 3]
    plan = manager.plan_step([(request, 3)])
    assert manager.plan_tokens(plan)[:3].tolist() == [1, 2, 3]
    manager.plan_step([(request, 1)], ahead=True)
    assert not request.is_open and request.num_cached == 16
    assert np.array_equal(manager.plan_tokens(manager.plan_step([(request, 1)]), unknown=-1)[:1], [-1])
