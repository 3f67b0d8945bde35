"""What is cached is known by the tokens that were fed, and `Request.tokens` cannot say otherwise unnoticed."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest

from dsv4_jax import CacheSize, KVCacheManager
from dsv4_jax.errors import RequestError
from dsv4_jax.manager import CachePolicy, HostSize, Request
from dsv4_jax.manager.request_tokens import PromptIds, TokenIds

from .test_caching import LAYOUT, PROMPT, feed, make, run

BLOCK = LAYOUT.block_tokens
EDITED = [*PROMPT[:5], 200, *PROMPT[6:]]


@pytest.mark.parametrize("lays_out", [True, False], ids=["plan_tokens", "own ids"])
def test_tokens_edited_before_they_are_fed(lays_out: bool) -> None:
    manager = make()
    request = manager.admit_request(PROMPT)
    request.tokens[5] = 200
    while request.num_pending:
        plan = manager.plan_step([(request, 8)])
        if lays_out:
            assert manager.plan_tokens(plan)[:8].tolist() == EDITED[request.num_cached - 8 : request.num_cached]
    manager.release_request(request)
    assert manager.admit_request(PROMPT).num_cached == 0
    assert manager.admit_request(EDITED).num_cached == 32
    manager.check_integrity()


CHANGES = {
    "set": lambda r: r.tokens.__setitem__(3, 99),
    "negative": lambda r: r.tokens.__setitem__(3 - len(r.tokens), 99),
    "slice": lambda r: r.tokens.__setitem__(slice(3, 9), [99] * 6),
    "backwards": lambda r: r.tokens.__setitem__(slice(9, 2, -1), [99] * 7),
    "deleted": lambda r: r.tokens.__delitem__(slice(3, None)),
    "shifted": lambda r: r.tokens.__delitem__(3),
    "inserted": lambda r: r.tokens.insert(3, 99),
    "popped": lambda r: r.tokens.pop(3),
    "removed": lambda r: r.tokens.remove(3),
    "reversed": lambda r: r.tokens.reverse(),
    "sorted": lambda r: r.tokens.sort(reverse=True),
    "cleared": lambda r: r.tokens.clear(),
    "none of it": lambda r: setattr(r, "tokens", r.tokens * 0),
    "another list": lambda r: setattr(r, "tokens", [*PROMPT[:3], 99, *r.tokens[4:]]),
}


@pytest.mark.parametrize("hit", [False, True], ids=["fed", "found"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_computed_cannot_be_changed(change: Callable[[Request], None], hit: bool) -> None:
    """Not by any way to change a list; restored, or preempted and resumed, it goes on."""
    manager = make(num_blocks=30, snapshots=4, host=HostSize.of(LAYOUT, 20, 4))
    if hit:
        manager.release_request(run(manager))
    request = manager.admit_request(PROMPT)
    if not hit:
        manager.plan_tokens(manager.plan_step([(request, 32)]))
    assert request.num_cached == 32
    before = list(request.tokens)
    change(request)
    assert request.tokens != before
    first = next((i for i, pair in enumerate(zip(before, request.tokens, strict=False)) if pair[0] != pair[1]), None)
    first = len(request.tokens) if first is None else first
    for call in (
        lambda: manager.plan_step([(request, 1)]),
        lambda: manager.fork(request),
        lambda: manager.export_request(request),
    ):
        with pytest.raises(RequestError, match=f"token {first} was fed as {before[first]} and"):
            call()
    changed = list(request.tokens)
    request.tokens[:] = before
    (child,) = manager.fork(request)
    manager.release_request(child)
    request.tokens[:] = changed
    manager.preempt(request)
    manager.resume(request)
    assert request.num_cached == 0 or request.tokens[: request.num_cached] == before[: request.num_cached]
    fed = []
    while request.num_pending:
        start, plan = request.num_cached, manager.plan_step([(request, request.num_pending)])
        list(manager.take_transfers())
        fed += manager.plan_tokens(plan)[: request.num_cached - start].tolist()
    assert fed == changed[len(changed) - len(fed) :]
    manager.release_request(request)
    again = manager.admit_request([*changed, 1])
    assert again.num_cached <= len(changed) and manager.admit_request(PROMPT).num_cached == 32
    manager.check_integrity()


def test_a_fork_is_changed_from_where_it_stands() -> None:
    """Its parent was preempted, and is fed again: the fork was given the parent's ids for its own."""
    manager = make(num_blocks=30)
    request = run(manager)
    request.tokens.append(1)
    manager.preempt(request)
    manager.resume(request)
    assert request.num_cached == 40 or request.num_cached == 32
    stands = request.num_cached
    (child,) = manager.fork(request)
    del child.tokens[stands:]
    child.tokens += [200, 201, 202]
    plan = manager.plan_step([(child, 3)])
    assert manager.plan_tokens(plan)[:3].tolist() == [200, 201, 202]
    manager.check_integrity()


@pytest.mark.parametrize("draft", [0, 7])
def test_new_draws_are_not_cached_as_the_old_answer(draft: int) -> None:
    """Preempted, cut back, resumed, and a loop of steps whose ids nobody lays out on the host."""
    manager = make(num_blocks=30, drafts=draft, every=1, snapshots=8)
    request = manager.admit_request(PROMPT[:12])
    for token in PROMPT[12:34]:
        feed(manager, request)
        request.tokens.append(token)
    manager.preempt(request)
    del request.tokens[17:]
    manager.resume(request)
    while request.num_pending > 1:
        manager.plan_tokens(manager.plan_step([(request, request.num_pending - 1)]))
    manager.plan_tokens(manager.plan_step([(request, 1)], steps=8))
    request.tokens += [200 - i for i in range(9)]
    feed(manager, request)
    answer = list(request.tokens)
    manager.release_request(request)
    assert manager.admit_request([*answer[:24], 1]).num_cached == 24
    assert manager.admit_request(PROMPT[:34]).num_cached <= 32
    found = manager.cache.tree.match(manager.digests(PROMPT[:34]), 34).path
    mine = manager.cache.tree.match(manager.digests(answer[:24]), 25).path
    assert len(mine) == 3 and mine[2] not in found
    manager.check_integrity()


@pytest.mark.parametrize("count", [1, 200])
def test_tokens_are_a_list_when_somebody_asks_for_them(count: int) -> None:
    """Before that they are an array, of which nothing that was made of it is left when they are a list."""
    size = CacheSize(num_blocks=2 * count, num_slots=count, max_blocks_per_request=2, num_snapshots=1)
    manager = KVCacheManager(LAYOUT, size, policy=CachePolicy())
    requests = [manager.admit_request(np.arange(BLOCK - 2) + i) for i in range(count)]
    shape = manager.pinned_shape(count, BLOCK * count)
    while scheduled := manager.schedule(BLOCK * count, shape=shape):
        manager.plan_tokens(manager.plan_step(scheduled, shape=shape))
    assert all(type(request.ids) is PromptIds for request in requests)
    for token in (7, 8, 9):
        for i, request in enumerate(requests):
            (request.ids if token == 7 or i % 2 else request.tokens).append(token)
        scheduled = manager.schedule(BLOCK * count, shape=shape)
        plan = manager.plan_step(scheduled, shape=shape)
        assert len(scheduled) == count and manager.plan_tokens(plan)[:count].tolist() == [token] * count
    assert all(r.tokens[-3:] == [7, 8, 9] and type(r.tokens) is TokenIds for r in requests)
    assert {r.history[-3:].tobytes() for r in requests} == {array("I", [7, 8, 9]).tobytes()}


def test_a_list_of_tokens_of_one_s_own() -> None:
    manager = make()
    request = manager.admit_request(PROMPT)
    for wrong in (np.arange(5), "abc", None, iter([1])):
        with pytest.raises(RequestError, match="tokens must be a list"):
            request.tokens = wrong
    request.tokens += [7]
    assert request.tokens == [*PROMPT, 7] and request.tokens.copy().__class__ is list
    request.tokens = tuple(PROMPT[:20])
    feed(manager, request)
    assert request.history.tolist() == PROMPT[:16]


@pytest.mark.parametrize("prompt", [[5, 6], PROMPT])
def test_several_steps_do_not_sample_what_is_known(prompt: list[int]) -> None:
    """The loop drew, and what it had drawn was cached as the prompt."""
    manager = make()
    request = manager.admit_request(prompt)
    with pytest.raises(
        RequestError, match=f"knows tokens 1..{len(prompt) - 1}, which 16 steps in one plan would sample"
    ):
        manager.plan_step([(request, 1)], steps=16)
    manager.plan_step([(request, len(prompt) - 1)])
    manager.plan_step([(request, 1)], steps=2)
    manager.check_integrity()


def test_a_plan_s_tokens_are_noted_once() -> None:
    manager = make()
    request = manager.admit_request(PROMPT)
    plan = manager.plan_step([(request, 8)])
    first = manager.plan_tokens(plan)
    request.tokens[3] = 77
    assert manager.plan_tokens(plan).tolist() == first.tolist()
    request.tokens[3] = PROMPT[3]
    request.tokens[9] = 300  # no id of the vocabulary: nothing is noted
    plan = manager.plan_step([(request, 8)])
    with pytest.raises(RequestError):
        manager.plan_tokens(plan)
    request.tokens[9] = 30
    assert manager.plan_tokens(plan)[1] == 30


def test_drafts_that_were_never_fed_name_no_block() -> None:
    """Six tokens of a block, drafts that fill it, preempted before they are fed, other drafts after that."""
    manager = make(drafts=3)
    request = run(manager, PROMPT[:30])
    request.tokens += [1, 1, 1]
    manager.preempt(request)
    request.tokens[30:] = [2, 3, 3]
    manager.resume(request)
    feed(manager, request)
    if request.num_scheduled:
        manager.accept(request, request.num_scheduled)
    request.tokens.append(4)
    feed(manager, request)
    manager.release_request(request)
    assert len(manager.cache.tree.match(manager.digests([*PROMPT[:30], 1, 1, 1, 4, 4]), 35).path) == 3
    assert len(manager.cache.tree.match(manager.digests([*PROMPT[:30], 2, 3, 3, 4, 4]), 35).path) == 4
    manager.check_integrity()


@pytest.mark.parametrize("drafts", [0, 3])
def test_resume_matches_no_drafts(drafts: int) -> None:
    """Another request has computed just these tokens. Unverified drafts are fed; without drafts they are text."""
    manager = make(num_blocks=30, drafts=drafts)
    request = run(manager, PROMPT[:15])
    manager.preempt(request)
    run(manager, [*PROMPT[:15], *[7] * 26])
    request.tokens += [7] * 18
    manager.resume(request)
    assert request.num_cached == (16 if drafts else 32)  # the token drawn last stands in any case
    manager.check_integrity()


@pytest.mark.parametrize("policy", [True, False], ids=["cached", "no policy"])
@pytest.mark.parametrize("host", [None, HostSize.of(LAYOUT, 20, 4)], ids=["fed again", "parked"])
def test_a_preempted_request_goes_on_with_what_its_tokens_say(host: HostSize | None, policy: bool) -> None:
    """Its state on the host stands only as far as the ids do."""
    if policy:
        manager = make(num_blocks=8, snapshots=0, every=None, host=host)
    else:
        manager = KVCacheManager(LAYOUT, CacheSize(8, 3, 6), host=host)
    for changed in ([*PROMPT[:20], 3], [9] * 20 + [3], [*PROMPT[:17], 3], PROMPT[:20]):
        request = manager.admit_request(PROMPT[:20])
        manager.plan_tokens(manager.plan_step([(request, 20)]))
        list(manager.take_transfers())
        request.tokens.append(3)
        manager.preempt(request)
        assert (request.parked is not None) == (host is not None)
        request.tokens[:] = changed
        manager.resume(request)
        assert (request.num_cached == 20) == (host is not None and changed == [*PROMPT[:20], 3])
        fed = []
        while request.num_pending:
            start = request.num_cached
            plan = manager.plan_step([(request, request.num_pending)])
            list(manager.take_transfers())
            fed += manager.plan_tokens(plan)[: request.num_cached - start].tolist()
        assert fed == changed[len(changed) - len(fed) :]
        manager.check_integrity()
        manager.release_request(request)


@pytest.mark.parametrize("end", ["admit", "release", "preempt"])
def test_ids_behind_a_computed_one_that_is_gone_are_not_noted(end: str) -> None:
    """Nobody lays out what a loop of steps draws: displaced by one, it was cached as another text."""
    manager = make(num_blocks=40, every=1, snapshots=10)
    request = run(manager, PROMPT[:8])
    manager.plan_tokens(manager.plan_step([]))
    request.tokens.append(50)
    manager.plan_tokens(manager.plan_step([(request, 1)], steps=8))
    request.tokens += range(51, 59)
    before = list(request.tokens)
    del request.tokens[0]
    request.tokens.append(77)
    wrong = [*before[:9], *request.tokens[9:]]
    {
        "admit": lambda: manager.commit(),
        "release": lambda: manager.release_request(request),
        "preempt": lambda: manager.preempt(request),
    }[end]()
    assert len(manager.cache.tree.match(manager.digests(wrong), 17).path) < 2
    if end == "admit":
        request.tokens[:] = before
        request.tokens.append(1)
        feed(manager, request)
        manager.release_request(request)
        assert manager.admit_request([*before[:16], 1]).num_cached == 16
    manager.check_integrity()


@pytest.mark.parametrize("meanwhile", [lambda m: None, lambda m: m.commit()], ids=["at once", "committed"])
def test_drawn_ids_that_were_cut_are_not_replaced(meanwhile: Callable[[KVCacheManager], None]) -> None:
    """A loop of steps has drawn beyond the end of an answer: the next turn's ids passed for what was computed there."""
    manager = make(num_blocks=40, every=1, snapshots=10)
    request = run(manager, PROMPT[:9])
    request.tokens.append(50)
    manager.plan_tokens(manager.plan_step([(request, 1)], steps=8))
    list(manager.take_transfers())
    request.tokens += range(51, 59)
    del request.tokens[13:]
    meanwhile(manager)
    (child,) = manager.fork(request)  # nothing stands there yet
    for each in (request, child):
        each.tokens += [99] * 6
        meanwhile(manager)
        for call in (manager.fork, lambda r: manager.plan_step([(r, 1)])):
            with pytest.raises(RequestError, match="token 13 was removed, which is computed, and another stands there"):
                call(each)
    manager.release_request(child)
    manager.preempt(request)
    manager.resume(request)
    assert request.num_cached == 8
    plan = manager.plan_step([(request, 11)])
    assert manager.plan_tokens(plan)[:11].tolist() == request.tokens[8:19]
    text = list(request.tokens)
    manager.release_request(request)
    assert len(manager.cache.tree.match(manager.digests(text[:16]), 17).path) == 2
    manager.check_integrity()


def test_a_plan_is_not_laid_out_from_displaced_tokens() -> None:
    manager = make()
    request = manager.admit_request(PROMPT)
    manager.plan_tokens(manager.plan_step([(request, 8)]))
    plan = manager.plan_step([(request, 4)])
    removed = request.tokens.pop(3)
    with pytest.raises(RequestError, match="token 3 was fed as 3 and is 4"):
        manager.plan_tokens(plan)
    request.tokens.insert(3, removed)
    assert manager.plan_tokens(plan)[:4].tolist() == PROMPT[8:12]


@pytest.mark.parametrize("ways", ["assigned", "cut"])
def test_drafts_behind_a_prompt_that_was_cut_are_not_looked_up(ways: str) -> None:
    """It was cut where nothing was computed yet, and drafts stood where its end had been."""
    manager = make(drafts=3, every=1, num_blocks=40, snapshots=10)
    text = list(range(60))
    manager.release_request(run(manager, text))
    request = manager.admit_request([*text[:5], *[100] * 55])
    manager.plan_tokens(manager.plan_step([(request, 3)]))
    if ways == "assigned":
        manager.preempt(request)
        request.tokens = text[:5]
        manager.resume(request)
        manager.plan_tokens(manager.plan_step([(request, 5)]))
    else:
        del request.tokens[5:]
        manager.plan_tokens(manager.plan_step([(request, 2)]))
    request.tokens += text[5:]  # drawn the first, the others drafts
    manager.preempt(request)
    manager.resume(request)
    assert request.num_cached == 0
    manager.check_integrity()


class Refusing:
    """No token, and it says so in its own way."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    def __index__(self) -> int:
        raise RuntimeError("deleted")


@pytest.mark.parametrize("wrong", [np.arange(2), Refusing(), None, 3.0], ids=["array", "refusing", "none", "float"])
def test_what_is_no_token_closes_no_manager(wrong: object) -> None:
    """In place of a computed id it raised whatever its comparison raises, and the manager was closed."""
    manager = make(num_blocks=30, host=HostSize(40))
    request = manager.admit_request(PROMPT)
    manager.plan_tokens(manager.plan_step([(request, 16)]))
    list(manager.take_transfers())
    request.tokens[3] = wrong
    with pytest.raises(RequestError, match="token 3 was fed as 3 and is"):
        manager.plan_step([(request, 1)])
    manager.preempt(request)
    manager.resume(request)
    assert request.num_cached == 0
    plan = manager.plan_step([(request, 8)])
    with pytest.raises(RequestError):
        manager.plan_tokens(plan)
    manager.commit()
    manager.release_request(request)
    manager.check_integrity()
