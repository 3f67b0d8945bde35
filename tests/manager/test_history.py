"""What is cached is known by the tokens that were fed, whatever `Request.tokens` says before or after."""

from __future__ import annotations

import pytest

from dsv4_jax.errors import RequestError
from dsv4_jax.manager import HostSize

from .test_caching import LAYOUT, PROMPT, feed, make, run

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


def test_tokens_edited_after_they_were_fed() -> None:
    manager = make()
    request = manager.admit_request(PROMPT)
    while request.num_pending:
        manager.plan_tokens(manager.plan_step([(request, 8)]))
        request.tokens[: request.num_cached] = [9] * request.num_cached
    manager.release_request(request)
    assert manager.admit_request([9] * 39 + [1]).num_cached == 0
    assert manager.admit_request(PROMPT).num_cached == 32


def test_a_plan_s_tokens_are_noted_once() -> None:
    manager = make()
    request = manager.admit_request(PROMPT)
    plan = manager.plan_step([(request, 8)])
    first = manager.plan_tokens(plan)
    request.tokens[3] = 77
    assert manager.plan_tokens(plan).tolist() == first.tolist()
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


@pytest.mark.parametrize("host", [None, HostSize.of(LAYOUT, 20, 4)], ids=["fed again", "parked"])
def test_a_preempted_request_goes_on_with_what_it_was_fed(host: HostSize | None) -> None:
    manager = make(num_blocks=8, snapshots=0, every=None, host=host)
    request = manager.admit_request(PROMPT[:20])
    manager.plan_tokens(manager.plan_step([(request, 20)]))
    request.tokens.append(3)
    manager.preempt(request)
    manager.take_transfers()
    request.tokens[:20] = [9] * 20
    manager.resume(request)
    fed = []
    while request.num_pending:
        start = request.num_cached
        plan = manager.plan_step([(request, request.num_pending)])
        manager.take_transfers()
        fed += manager.plan_tokens(plan)[: request.num_cached - start].tolist()
    assert fed == ([*PROMPT[:20], 3][start:] if host is None else [3])
    manager.check_integrity()


def test_what_a_hit_found_is_history() -> None:
    manager = make()
    manager.release_request(run(manager))
    request = manager.admit_request(PROMPT)
    assert request.num_cached == 32
    request.tokens[3] = 9  # cached already: the bytes are those of the prompt
    feed(manager, request)
    manager.release_request(request)
    assert manager.admit_request([*PROMPT[:3], 9, *PROMPT[4:]]).num_cached == 0
