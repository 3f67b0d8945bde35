"""An aborted request's last step did not run: nothing of it is found, started from or lost afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from dsv4_jax import KVCacheManager, stack_transfers
from dsv4_jax.errors import PlanError
from dsv4_jax.manager import HostSize, WritePolicy
from dsv4_jax.manager.request import Request, RequestState
from dsv4_jax.manager.transfers import Transfers, TransferStage

from .symbolic_device import SymbolicDevice
from .test_caching import LAYOUT, PROMPT, feed, make, pairs, run

OTHER = [9] * 12
CALLS = len(TransferStage._fields)


def serve(manager: KVCacheManager, device: SymbolicDevice, prompt: list[int]) -> int:
    """To its end; returns the tokens that were found. The device fails if a step reads another request's bytes."""
    request = manager.admit_request(prompt)
    found = request.num_cached
    while request.num_pending:
        plan = manager.plan_step(manager.schedule(16, requests=[request]))
        device.transfer(manager.take_transfers())
        manager.plan_tokens(plan)
        device.step(plan, {request.slot: None}, {request.slot: prompt})
    manager.release_request(request)
    return found


@pytest.mark.parametrize("way", ["calls", "stages"])
@pytest.mark.parametrize("ran", range(2 * CALLS + 1))
def test_copies_lost_with_their_step_run_before_the_next(ran: int, way: str) -> None:
    """Records that were never written were served: 32 tokens of nobody."""
    manager, host = make(num_blocks=6, num_slots=1, snapshots=1, host=HostSize(60)), HostSize(60)
    device = SymbolicDevice(LAYOUT, manager.arrays, host)
    prompt, other = list(range(40)), [99] * 40
    assert (serve(manager, device, prompt), serve(manager, device, other)) == (0, 0)
    lost = manager.admit_request(prompt)
    assert lost.num_cached == 32
    plan = manager.plan_step(manager.schedule(16))
    transfers = manager.take_transfers()
    copied = {name for stage in transfers[:] for name, copies in stage._asdict().items() if copies is not None}
    assert copied == {"swap_out", "swap_in", "restore"}
    if way == "calls":
        device.transfer(transfers, max_calls=ran)
    else:  # broken off before a stage: it is run from its beginning
        whole = min(ran // CALLS, len(transfers))
        for i, _ in enumerate(stages := iter(transfers)):
            if i == whole:
                break
            device.transfer(Transfers(transfers[i : i + 1]))
        stages.close()
    assert not manager.has_transfers and transfers.ran == (ran >= CALLS * len(transfers))
    manager.plan_tokens(plan)
    manager.abort_request(lost)
    manager.check_integrity()
    assert [serve(manager, device, text) for text in (prompt, other, prompt)] == [32, 32, 32]
    with pytest.raises(PlanError, match="have run already"):
        device.transfer(transfers)
    manager.check_integrity()


def test_transfers_of_before_a_reset_do_not_run() -> None:
    manager = make(num_blocks=6, host=HostSize(60))
    run(manager, PROMPT[:20]).tokens.append(1)
    manager.preempt(manager.requests[0])
    manager.plan_step([])
    transfers = manager.take_transfers()
    assert len(transfers) and not transfers.ran
    manager.reset()
    with pytest.raises(PlanError, match="before the manager was reset"):
        list(transfers)
    with pytest.raises(PlanError, match="before the manager was reset"):
        list(transfers.calls())


def test_stages_may_be_looked_at_before_they_run() -> None:
    manager = make(num_blocks=6, host=HostSize(60))
    device = SymbolicDevice(LAYOUT, manager.arrays, HostSize(60))
    run(manager, PROMPT[:20]).tokens.append(1)
    manager.preempt(manager.requests[0])
    manager.plan_step([])
    transfers = manager.take_transfers()
    looked = list(transfers)
    assert looked == list(transfers) and any(stage.swap_out is not None for stage in transfers)
    assert device.transfer(copy.deepcopy(transfers)) == device.transfer(transfers) > 0
    assert transfers.ran
    with pytest.raises(PlanError, match="have run already"):
        device.transfer(transfers)


def preempted(manager: KVCacheManager, prompt: list[int]) -> Transfers:
    """The transfers that park a request of this prompt."""
    run(manager, prompt).tokens.append(1)
    manager.preempt(manager.requests[0])
    manager.plan_step([])
    return manager.take_transfers()


def test_what_was_looked_at_and_relied_upon_runs_no_more() -> None:
    """The later ones took a stage of their own for one of before, and ran it twice."""
    manager = make(num_blocks=6, host=HostSize(60))
    early = preempted(manager, PROMPT[:20])
    assert list(early)
    late = preempted(manager, [9] * 20)
    with pytest.raises(PlanError, match="have run already"):
        next(iter(early))
    assert [*late.calls()] == [call for stage in late[:] for call in stage._asdict().items()]


def test_no_copy_of_an_earlier_step_runs_after_a_reset() -> None:
    """Of transfers that were nothing but late ones, the first call was given out before it was refused."""
    manager = make(num_blocks=6, host=HostSize(60))
    preempted(manager, PROMPT[:20])
    manager.plan_step([])
    late = manager.take_transfers()
    assert len(late) and not late.has_own
    manager.reset()
    with pytest.raises(PlanError, match="before the manager was reset"):
        next(late.calls())


def test_managers_of_a_mesh_that_were_broken_off_apart() -> None:
    """Copies of one had run, of the other not: together they could not run any more, nor could any later ones."""
    managers = [make(num_blocks=6, host=HostSize(60)) for _ in range(2)]
    transfers = [preempted(manager, PROMPT[:20]) for manager in managers]
    early = transfers[0].calls()
    assert next(early)[0] == "swap_out" and next(early)[0] == "snapshot"  # the first one has run
    early.close()
    calls = [(name, plan.device_ids.tolist()) for name, plan in stack_transfers(transfers).calls() if plan is not None]
    blocks, states = (getattr(transfers[0][0], name).device_ids.tolist() for name in ("swap_out", "snapshot"))
    assert calls == [("swap_out", [0] * len(blocks) + blocks), ("snapshot", states * 2)]
    assert all(each.ran for each in transfers)


@pytest.mark.parametrize("leave", ["sleep", "resize"])
def test_no_step_on_new_arrays_before_the_old_ones_were_copied(leave: str) -> None:
    manager = make(num_blocks=6, host=HostSize(60))
    request = run(manager)
    request.tokens.append(1)
    if leave == "sleep":
        manager.sleep()
        lost = manager.take_transfers()
        manager.wakeup()
    else:
        manager.resize(manager.size)
        lost = manager.take_transfers()
    manager.resume(request)
    with pytest.raises(PlanError, match="did not run: run them on the old arrays, or reset"):
        manager.plan_step([(request, 1)])
    list(lost)
    manager.plan_step([(request, 1)])
    manager.check_integrity()


def in_between(manager: KVCacheManager, what: str) -> None:
    if what == "admit":
        manager.admit_request(OTHER)
    elif what == "plan":
        manager.plan_step([(manager.admit_request(OTHER), 12)])
    elif what == "commit":
        manager.commit()


@pytest.mark.parametrize("what", ["nothing", "admit", "plan", "commit"])
def test_a_step_that_never_ran_is_not_matched(what: str) -> None:
    manager = make(every=1)
    request = manager.admit_request(PROMPT)
    for _ in range(3):
        manager.plan_step([(request, 8)])
    manager.commit()
    manager.plan_step([(request, 8)])  # takes the snapshot after 24 tokens, fills the fourth block
    in_between(manager, what)
    manager.abort_request(request)
    manager.check_integrity()
    again = manager.admit_request(PROMPT)
    assert again.num_cached == 16  # the snapshot after 16 was taken by the third step, which ran
    assert len(manager.cache.tree.match(manager.digests(PROMPT), 40).path) == 3
    feed(manager, again)
    manager.check_integrity()


def test_own_blocks_are_not_given_up_for_unwritten_ones() -> None:
    manager = make()
    request, other = manager.admit_request(PROMPT), manager.admit_request(PROMPT)
    manager.plan_step([(request, 24)])
    manager.abort_request(request)
    feed(manager, other)
    mine = list(other.blocks)
    manager.commit()
    assert other.blocks == mine
    manager.check_integrity()


@pytest.mark.parametrize("write", [WritePolicy.write_back(), WritePolicy.write_through()])
def test_who_stands_on_it_starts_anew(write: WritePolicy) -> None:
    manager = make(every=1, host=HostSize.of(LAYOUT, 20, 4), write=write)
    request = manager.admit_request(PROMPT)
    manager.plan_step([(request, 16)])
    manager.take_transfers()
    manager.plan_step([(request, 8)])
    manager.take_transfers()
    hit = manager.admit_request(PROMPT)
    manager.reserve(hit, 40)
    assert hit.num_cached == 16 and pairs(manager.plan_step([])) == []
    manager.take_transfers()
    manager.abort_request(request)
    manager.check_integrity()
    assert (hit.state, hit.num_cached, len(hit.blocks)) == (RequestState.LIVE, 0, 5)
    feed(manager, hit)
    manager.check_integrity()
    assert hit.num_cached == 40


def forked(manager: KVCacheManager, request: Request) -> Request:
    return manager.fork(request)[0]


def forked_and_preempted(manager: KVCacheManager, request: Request) -> Request:
    child = manager.fork(request)[0]
    manager.preempt(request)
    return child


def forked_twice(manager: KVCacheManager, request: Request) -> Request:
    return manager.fork(manager.fork(request)[0])[0]


@pytest.mark.parametrize("fork", [forked, forked_and_preempted, forked_twice])
def test_forks_of_it_start_anew(fork: Callable[[KVCacheManager, Request], Request]) -> None:
    manager = make()
    request = manager.admit_request(PROMPT)
    manager.plan_step([(request, 20)])
    child = fork(manager, request)
    assert child.num_cached == 20
    manager.abort_request(request)
    manager.check_integrity()
    assert child.num_cached == 0
    plan = manager.plan_step([(child, 20)])
    assert pairs(plan) == [] and not plan.copy_block_dst.any()
    assert manager.plan_tokens(plan)[:20].tolist() == PROMPT[:20]
    manager.check_integrity()


def test_copies_that_the_same_plan_carried() -> None:
    manager = make()
    parent = run(manager, PROMPT[:12])
    child = manager.fork(parent)[0]
    other = manager.admit_request(OTHER)
    assert pairs(manager.plan_step([(other, 12)])) == [(parent.slot, child.slot)]
    manager.abort_request(other)
    assert child.num_cached in (0, 8) and parent.num_cached == 12
    feed(manager, child)
    manager.check_integrity()


def test_a_request_fed_later_says_that_the_step_ran() -> None:
    manager = make(every=1)
    request = manager.admit_request(PROMPT)
    manager.plan_step([(request, 24)])
    manager.plan_step([(request, 8)])
    hit = manager.admit_request(PROMPT)
    assert hit.num_cached == 24
    manager.plan_step([(hit, 8)])
    manager.abort_request(request)
    assert hit.num_cached == 32 and hit.state is RequestState.LIVE
    manager.check_integrity()


@pytest.mark.parametrize("resume", [False, True])
def test_preempted_after_it(resume: bool) -> None:
    """Preempting keeps blocks and state of the step; abort takes them back, live again or not."""
    manager = make(every=None)
    request = manager.admit_request(PROMPT)
    manager.plan_step([(request, 16)])
    manager.preempt(request)
    if resume:
        manager.resume(request)
    manager.abort_request(request)
    manager.check_integrity()
    assert manager.admit_request(PROMPT).num_cached == 0
    assert manager.stats().cache.pools["device"].cached == 0 == manager.stats().cache.pools["slot"].cached


def test_what_ran_before_stays() -> None:
    manager = make()
    request = run(manager)
    request.tokens.append(1)
    manager.plan_step([(request, 1)])
    manager.abort_request(request)
    assert manager.admit_request(PROMPT).num_cached == 32
    manager.check_integrity()
