"""What attacks from outside have found, each as the shortest history that showed it."""

from __future__ import annotations

import sys

import pytest

from dsv4_jax.errors import ManagerInterruptedError, OutOfBlocksError, PlanError
from dsv4_jax.manager import EventLog, HostSize, KVCacheManager, StepShape, Tier, WritePolicy
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree
from dsv4_jax.manager.request import Request, RequestState
from dsv4_jax.manager.storage_tier import StorageTier
from dsv4_jax.manager.transfers import BLOCK, SLOT

from .test_caching import LAYOUT, PROMPT, make

# Storage and the copies beside steps


def everything(keys: list[bytes]) -> list[bool]:
    return [True] * len(keys)


def parked(manager: KVCacheManager) -> Request:
    """A preempted request whose state and second block are on the host."""
    request = manager.admit_request([1, 2, 3] * 5)
    manager.plan_step([(request, 12)])
    manager.preempt(request)
    manager.plan_step([])
    list(manager.take_transfers())
    return request


@pytest.mark.parametrize("stage", ["asked for", "planned", "taken", "taken, and those of the next step too"])
def test_nothing_lands_where_a_copy_still_reads(stage: str) -> None:
    """The copies of the step planned last were forgotten until they were taken, those of earlier steps after that."""
    manager = make(host=HostSize.of(LAYOUT, 4, 3), snapshots=0)
    tier, request = StorageTier(manager), parked(manager)
    busy = {*request.parked.blocks, *request.parked.state}
    manager.resume(request)
    if stage != "asked for":
        manager.plan_step([])
    taken = manager.take_transfers() if "taken" in stage else []
    if "next" in stage:
        other = max(busy) + 1
        manager.cache.transfers.out(BLOCK, request.blocks[0], other)  # of another request
        busy.add(other)
        manager.plan_step([])
        assert manager.take_transfers()
    assert not tier.plan_writes(1)
    reads = tier.plan_reads(PROMPT[:17], everything, everything)
    assert reads and busy.isdisjoint(page for move in reads for page in move.pages)
    assert not taken or not taken.ran


def test_no_sleep_before_the_transfers_of_the_last_step_are_taken() -> None:
    """The step would run after what it writes was copied to the host."""
    manager = make(host=HostSize.of(LAYOUT, 8, 4))
    request = parked(manager)
    manager.resume(request)
    manager.plan_step([(request, 1)])
    with pytest.raises(PlanError, match="were not taken"):
        manager.sleep()
    assert request in manager.requests and not manager._asleep
    list(manager.take_transfers())
    manager.sleep()


def test_what_a_read_arrives_below_stays_on_the_host() -> None:
    """The parent went back to storage meanwhile; the read's end could not go above it, and the manager was lost."""
    manager = make(host=HostSize.of(LAYOUT, 5, 4), every=1)
    tier, others = StorageTier(manager), [4] * 33
    for prompt in (PROMPT[:17], PROMPT[:33]):
        reads = tier.plan_reads(prompt, everything, everything)
        if len(prompt) < 33:
            tier.finish_reads(reads, [True] * len(reads))
    pressing = tier.plan_reads(others, everything, everything)
    assert [move.scope for move in reads] == [BLOCK, BLOCK, SLOT]
    tier.finish_reads(reads, [True] * len(reads))
    tier.finish_reads(pressing, [True] * len(pressing))
    manager.check_integrity()
    assert manager.admit_request(PROMPT[:33]).num_cached == 32


def test_a_block_stays_while_something_moves_below_one_that_leaves_with_it() -> None:
    """The child went down to its copy on the host, and the parent was to be removed with a record being persisted."""
    tree = PrefixTree(8)
    top = tree.publish(tree.reserve(None, b"top", 1)).node
    child = tree.publish(tree.reserve(top, b"child", 2)).node
    last = tree.publish(tree.reserve(child, b"last", 3)).node
    for node, host in ((child, 1), (last, 2)):
        tree.moves.begin_backup(node, host)
        tree.moves.complete(node)
    tree.release([top, child, last])
    assert tree.evictor.evict(Tier.DEVICE, 1).blocks == [3]
    tree.moves.begin_persist(last)
    with pytest.raises(OutOfBlocksError):
        tree.evictor.evict(Tier.DEVICE, 2)
    tree.check_integrity()
    tree.moves.complete(last)
    assert sorted(tree.evictor.evict(Tier.DEVICE, 2).blocks) == [1, 2]


# Steps that did not run


def step(manager: KVCacheManager, *scheduled: tuple[Request, int]) -> None:
    manager.plan_step(list(scheduled))
    list(manager.take_transfers())


def test_a_preempted_fork_of_an_aborted_request_does_not_keep_its_copy() -> None:
    manager = make(host=HostSize.of(LAYOUT, 8, 4))
    parent = manager.admit_request(PROMPT)
    step(manager, (parent, 12))
    (child,) = manager.fork(parent)
    step(manager, (parent, 3))  # should have made the copies; it does not run
    manager.preempt(child)
    assert child.parked is not None
    manager.abort_request(parent)
    manager.resume(child)
    assert child.num_cached == 0
    manager.check_integrity()


def test_a_fork_whose_copies_an_earlier_step_should_have_made_starts_anew() -> None:
    manager = make(host=HostSize.of(LAYOUT, 8, 4), num_slots=6)
    parent, other, last = (manager.admit_request([7 + i] * 30) for i in range(3))
    step(manager, (parent, 12))
    (child,) = manager.fork(parent)
    step(manager, (other, 3))  # should have made the copies; it does not run, nor does what comes after
    (grandchild,) = manager.fork(child)
    step(manager, (last, 3))
    (pending,) = manager.fork(grandchild)
    manager.abort_request(last)
    manager.abort_request(other)
    assert (child.num_cached, grandchild.num_cached, pending.num_cached) == (0, 0, 0)
    assert parent.num_cached == 12
    manager.check_integrity()


@pytest.mark.parametrize("end", ["release", "preempt"])
def test_a_fork_s_copy_that_was_never_made_becomes_no_snapshot(end: str) -> None:
    """The block at its end was another's, so the parent's abort did not take it back, nor the snapshot with it."""
    manager = make(every=None, host=HostSize.of(LAYOUT, 8, 4))
    step(manager, (first := manager.admit_request(PROMPT[:17]), 8))
    step(manager, (first, 4))
    step(manager, (first, 5))  # no snapshot after 8 tokens is wanted any more
    step(manager, (parent := manager.admit_request(PROMPT[:8] + [9] * 9), 4))
    step(manager, (parent, 4))  # does not run; its block is one that the first one has computed
    (child,) = manager.fork(parent)
    step(manager)
    (manager.release_request if end == "release" else manager.preempt)(child)
    manager.abort_request(parent)
    manager.check_integrity()
    if end == "preempt":
        manager.resume(child)
        assert child.num_cached == 0
    assert manager.admit_request(PROMPT[:8] + [9] * 9).num_cached == 0


def test_a_preempted_fork_goes_on_where_it_stood() -> None:
    """At a block boundary too, where nothing but the state is its own."""
    manager = make(host=HostSize.of(LAYOUT, 8, 4), every=None)
    parent = manager.admit_request([*PROMPT[:16], 9])
    step(manager, (parent, 16))
    (child,) = manager.fork(parent)
    step(manager, (parent, 1))
    manager.preempt(child)
    manager.resume(child)
    assert child.num_cached == 16
    step(manager, (child, 1))
    manager.check_integrity()


def test_a_lost_step_s_snapshot_goes_though_its_request_left_another_one() -> None:
    """Preempted at the next boundary its slot became a snapshot, and the one that the step had taken was forgotten."""
    manager = make(every=1)
    step(manager, (request := manager.admit_request(PROMPT[:25]), 8))
    step(manager, (request, 8))  # does not run, nor does its copy of the state after 8 tokens
    manager.preempt(request)
    manager.abort_request(request)
    assert manager.admit_request(PROMPT[:25]).num_cached == 0
    manager.check_integrity()


def test_who_starts_anew_is_known_by_the_ids_that_are_there() -> None:
    """It looked up the prompt as it was admitted, and published what followed under ids changed since."""
    manager = make(every=1, snapshots=8)
    first, second = manager.admit_request(PROMPT), manager.admit_request(PROMPT)
    step(manager, (first, 8))
    step(manager, (first, 1))  # does not run; takes the snapshot after 8 tokens
    request, same = manager.admit_request(PROMPT), manager.admit_request(PROMPT)
    assert request.num_cached == same.num_cached == 8
    request.tokens[10] = 200
    for count in (8, 8, 9):
        step(manager, (second, count))
    manager.abort_request(first)
    assert (request.num_cached, same.num_cached) == (0, 16)
    assert same.history.tolist() == PROMPT[:16]
    assert request.history.tolist() == PROMPT[:8]
    manager.check_integrity()


# Refused calls


def books(manager: KVCacheManager) -> tuple:
    """All that a refused call must leave as it was."""
    cache = manager.cache
    nodes = [
        (n.digest, n.state, n.block, n.host, n.refs, n.hits, n.snapshot) for n in cache.tree.nodes.published.values()
    ]
    requests = [
        (r.id, r.state, r.num_cached, r.num_scheduled, r.num_tabled, r.reserved, r.blocks[:], r.nodes[:])
        for r in manager.book.ids.values()
    ]
    return manager.stats(), manager.events.last, nodes, requests, len(cache.transfers), str(cache.pages.stats())


def test_a_refused_resume_changes_nothing() -> None:
    """It published what others had filled, and loaded the shared blocks, before it found too few blocks."""
    manager = make(6, host=HostSize.of(LAYOUT, 8, 4), events=EventLog())
    request = manager.admit_request(PROMPT[:30])
    step(manager, (request, 16))
    step(manager, (request, 5))
    manager.preempt(request)
    step(manager, (other := manager.admit_request([9] * 40), 1))
    manager.reserve(other, 48)
    step(manager, (manager.requests[0], 8))
    manager.accept(other, 8)
    other.reserved = 0
    manager.cache.release_blocks(other.blocks[4:])
    del other.blocks[4:]
    assert request.parked.first_block == 2 and manager.cache.num_available == 2
    before = books(manager)
    with pytest.raises(OutOfBlocksError):
        manager.resume(request)
    assert manager.stats().cache.admission_failures == {"device": 1}  # is told, and nothing else has changed
    manager.cache.failures.clear()
    assert books(manager) == before and request.parked is not None
    manager.release_request(other)
    manager.resume(request)
    assert request.num_cached == 21


@pytest.mark.parametrize("write", [WritePolicy.write_back(), WritePolicy.write_through()])
def test_blocks_that_can_be_had_are_had_whatever_is_being_fetched_below_them(write: WritePolicy) -> None:
    """A step was refused after it had published, when a fetch held the blocks that it had counted on."""
    manager = make(6, host=HostSize.of(LAYOUT, 2, 1), every=1, events=EventLog(), write=write)
    tier = StorageTier(manager)
    request = manager.admit_request(PROMPT[:9])
    step(manager, (request, 8))
    step(manager, (request, 1))
    manager.release_request(request)
    reads = tier.plan_reads(PROMPT[:25], everything, everything)  # below the block on the device; the host is full
    assert [move.scope for move in reads] == [BLOCK, BLOCK, SLOT]
    other = manager.admit_request([9] * 48)
    assert not manager.cache.shortage(range(6))
    step(manager, (other, 48))
    assert not any(tier.is_current(move) for move in reads if move.scope == BLOCK)
    tier.finish_reads(reads, [True] * len(reads))
    manager.check_integrity()
    assert not manager.cache.fetching and not manager.cache.pages.num_held


# Schedules and shapes


@pytest.mark.parametrize("copies", [(0, 9), (9, 0), (1, 1)])
def test_nothing_is_offered_while_the_shape_cannot_carry_the_copies_of_forks(copies: tuple[int, int]) -> None:
    manager = make()
    request = manager.admit_request(PROMPT)
    step(manager, (request, 12))
    manager.fork(request)
    shape = manager.pinned_shape(4, 16, slot_copies=copies[0], block_copies=copies[1])
    scheduled = manager.schedule(16, shape=shape)
    assert bool(scheduled) == (copies == (1, 1))
    manager.plan_step(scheduled, shape=shape if scheduled else None)


@pytest.mark.parametrize("shape", ["wide", 5, StepShape(1, 1, 1, 1, 1, 500, 9), StepShape(None, 1, 1, 1, 1, 1, 1)])
def test_what_is_no_shape_of_this_cache_is_refused_and_nothing_else(shape) -> None:
    """It ended in an AttributeError half way, and the manager refused everything; or in feeds that no step took."""
    manager = make()
    request = manager.admit_request(PROMPT)
    for call in (lambda: manager.schedule(8, shape=shape), lambda: manager.plan_step([(request, 1)], shape=shape)):
        with pytest.raises(PlanError, match=r"shape|columns"):
            call()
    assert manager.schedule(8) == [(request, 8)]


def test_a_plan_of_another_cache_has_no_tokens_here() -> None:
    """They were laid out, and noted as computed, for whoever was in its slots."""
    manager, other = make(), make(num_blocks=23)
    request = manager.admit_request(PROMPT)
    plan = other.plan_step([(other.admit_request(PROMPT[::-1]), 9)])
    with pytest.raises(PlanError, match="24 blocks"):
        manager.plan_tokens(plan)
    assert not request.history
    manager.plan_tokens(manager.plan_step([(request, 9)]))
    assert len(request.history) == 9


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("pages", [0, 60])
def test_no_state_is_kept_that_lacks_a_row_of_its_record(pages: int, kept: int) -> None:
    """The last draft of a whole verify step takes the ring's row of the oldest token that a record holds."""
    manager = make(drafts=1, every=None, host=HostSize(pages))
    request = manager.admit_request(PROMPT)
    manager.plan_step([(request, 16 - kept)])
    manager.plan_step([(request, 2)])
    manager.accept(request, kept)
    (child,) = manager.fork(request) if not kept else [request]
    manager.plan_step([])  # carries the copies
    list(manager.take_transfers())
    for one in (request, child):
        if one in manager.requests:
            manager.preempt(one)
    states = manager.stats().cache.pools["slot"].cached
    assert (request.num_hit, request.parked, states) == (0, None, kept), "at 16 tokens, a block boundary"
    request.tokens[:] = PROMPT
    manager.resume(request)
    assert request.num_cached == 16 * kept
    manager.check_integrity()


# Interrupts


def test_an_interrupted_reset_is_finished_or_refused() -> None:
    """Between its first two lines the manager trusted books that the call before had left half changed."""

    def interrupt(frame, event, _):
        nonlocal countdown
        if event == "line" and "dsv4_jax" in frame.f_code.co_filename:
            countdown -= 1
            if countdown < 0:
                raise KeyboardInterrupt
        return interrupt

    outcomes, line, trace = [], 0, sys.gettrace()
    while outcomes[-1:] != ["whole"]:
        manager = make()
        request = manager.admit_request(PROMPT)
        (lambda manager: manager.guard("plan_step"))(manager)  # and there it stopped
        countdown, line = line, line + 1
        sys.settrace(interrupt)
        try:
            manager.reset()
            outcomes.append("whole")
        except KeyboardInterrupt:
            outcomes.append("interrupted")
        finally:
            sys.settrace(trace)
        try:
            manager.check_integrity()
            assert not manager.requests and request.state is RequestState.RELEASED
        except ManagerInterruptedError:
            manager.reset()
        manager.check_integrity()
    assert outcomes.count("interrupted") > 20
