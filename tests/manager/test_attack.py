"""What attacks from outside have found, each as the shortest history that showed it."""

from __future__ import annotations

import pytest

from dsv4_jax.errors import PlanError
from dsv4_jax.manager import HostSize, KVCacheManager, StorageTier
from dsv4_jax.manager.request import Request
from dsv4_jax.manager.transfers import BLOCK, SLOT

from .test_caching import PROMPT, make

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
    manager = make(host=HostSize(2, 1), snapshots=0)
    tier, request = StorageTier(manager), parked(manager)
    block, snapshot = request.parked.blocks[0], request.parked.snapshot
    manager.resume(request)
    if stage != "asked for":
        manager.plan_step([])
    taken = manager.take_transfers() if "taken" in stage else []
    if "next" in stage:
        manager._cache.transfers.out(BLOCK, request.blocks[0], 2)  # of another request
        manager.plan_step([])
        assert manager.take_transfers()
    assert not tier.plan_writes(1)
    reads = tier.plan_reads(PROMPT[:17], everything, everything)
    assert (BLOCK, block) not in [(move.scope, move.record) for move in reads]
    assert (SLOT, snapshot) not in [(move.scope, move.record) for move in reads]
    assert not taken or not taken.ran


def test_no_sleep_before_the_transfers_of_the_last_step_are_taken() -> None:
    """The step would run after what it writes was copied to the host."""
    manager = make(host=HostSize(8, 4))
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
    manager = make(host=HostSize(5, 4), every=1)
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
