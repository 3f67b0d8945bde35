"""Whatever the manager does, a request's tokens, logits and bytes are those of a lone, cold run."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

import dsv4_jax as dsv4
from dsv4_jax.manager import CachePolicy
from dsv4_jax.plan import StepPlan
from dsv4_jax.records import record_format, state_record
from dsv4_jax.testing.mixes import Mix
from dsv4_jax.testing.serving import Mixes
from dsv4_jax.tiers import async_swap, swap, transfers

from .engine import runner


@pytest.fixture(scope="module")
def mixes() -> Mixes:
    return Mixes(runner())


def test_a_few_mixes_equal_lone_cold_runs(mixes: Mixes) -> None:
    for seed in range(3):
        mixes.run(seed)
    assert mixes.seen["comparisons"] > 15 and mixes.seen["logits compared"] > 500
    for name in ("hits on the device", "preemptions", "forks", "drafts rejected", "blocks in", "snapshots in"):
        assert mixes.seen[name], name


class InBlocks(Mix):
    """States on the device lie in blocks."""

    def _policy(self) -> CachePolicy | None:
        policy = super()._policy()
        return None if policy is None else dataclasses.replace(policy, states="blocks")


def test_mixes_with_states_in_blocks_equal_lone_cold_runs(mixes: Mixes, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: collections.Counter[str] = collections.Counter()
    run = transfers.start_swap

    def counted(name, cache, host, plan, **options):
        moved[name] += 1
        return run(name, cache, host, plan, **options)

    monkeypatch.setattr(transfers, "start_swap", counted)
    for seed in (2, 4):
        mixes.run(seed, InBlocks)
    assert min(moved[name] for name in ("put_states", "get_states", "spill_states")) > 0


@pytest.mark.slow
def test_more_mixes_equal_lone_cold_runs_and_exercise_everything(mixes: Mixes) -> None:
    for seed in range(3, 10):
        mixes.run(seed)
    assert not mixes.missing
    assert mixes.runner.executables == 1, "mixed and lone runs must share one executable"


# The comparison itself: a part of the work left undone has to be seen.


class Forgetful(Mix):
    """Leaves out one kind of transfer, or one kind of copy of the plans."""

    forgets = ""

    def transfer(self) -> None:
        stages = [stage._replace(**{self.forgets: None}) for stage in self.manager.take_transfers()]
        self.cache, self.host = dsv4.run_transfers(self.cache, self.host, stages)


class Copyless(Mix):
    forgets = ""

    def plan(self, scheduled):
        plan, scheduled = super().plan(scheduled)
        return plan._replace(**{self.forgets: np.zeros_like(getattr(plan, self.forgets))}), scheduled


@pytest.mark.slow
@pytest.mark.parametrize(
    "forgets", ["swap_out", "snapshot", "swap_in", "restore", "copy_slot_dst", "copy_block_dst", "table_slot"]
)
def test_the_comparison_sees_what_is_left_out(mixes: Mixes, forgets: str) -> None:
    kind = type("Kind", (Copyless if forgets in StepPlan._fields else Forgetful,), {"forgets": forgets})
    with pytest.raises(AssertionError, match=r"differ|expected|not"):
        for seed in range(40):
            mixes.run(seed, kind)


@pytest.fixture
def swaps_anew(monkeypatch: pytest.MonkeyPatch):
    """Swaps are traced as they are patched, and then as they were."""
    async_swap._compiled.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    async_swap._compiled.cache_clear()


PIECES = {
    f"{i} {piece.leaf.name}": i for i, piece in enumerate(state_record(runner().layout).pieces)
}  # of a slot's state: what a snapshot has, then what an unfinished entry has pooled


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES)
def test_the_comparison_sees_any_part_that_a_state_is_carried_without(mixes: Mixes, swaps_anew, piece: str) -> None:
    whole = state_record(mixes.runner.layout)
    lacking = dataclasses.replace(whole, pieces=tuple(p for i, p in enumerate(whole.pieces) if i != PIECES[piece]))
    swaps_anew.setattr(swap, "record_format", lambda layout, s: lacking if s == "slot" else record_format(layout, s))
    with pytest.raises(AssertionError, match=r"differ|expected|not"):
        for seed in range(60):
            mixes.run(seed)
