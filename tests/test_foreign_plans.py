"""A plan belongs to the caches of one layout and size: no other takes it, and it names no unit that they lack."""

from __future__ import annotations

import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config, KVCacheManager, init_cache, stack_plans
from dsv4_jax.errors import PlanError
from dsv4_jax.manager import StepShape
from dsv4_jax.manager.planning import build_plan, next_decode
from dsv4_jax.manager.step_shape import StepSequence
from dsv4_jax.plan import PackedPlan

CFG = DSV4Config.tiny(layer_types=(AttentionType.CSA, AttentionType.HCA))
LAYOUT, SIZE = CacheLayout(CFG), CacheSize(4, 2, 3)
SHAPE = StepShape.bound(LAYOUT, 1, 1, columns=3, slot_copies=1, block_copies=1)
OTHERS = {
    "layout": (CacheLayout(CFG, "bf16"), SIZE),
    "draft tokens": (CacheLayout(CFG, draft_tokens=1), SIZE),
    "slots": (LAYOUT, CacheSize(4, 3, 3)),
    "snapshots": (LAYOUT, CacheSize(4, 2, 3, num_snapshots=1)),
    "blocks": (LAYOUT, CacheSize(5, 2, 3)),
    "columns": (LAYOUT, CacheSize(4, 2, 2)),
}


def begun(cache, plan):
    return cache.begin(plan).finish(partial=True)


def planned(layout: CacheLayout, size: CacheSize):
    manager = KVCacheManager(layout, size)
    return manager.plan_step([(manager.admit_request([1]), 1)])


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_of_another_cache_is_refused_when_traced(other: str) -> None:
    layout, size = OTHERS[other]
    cache, plan = init_cache(LAYOUT, SIZE), planned(layout, size)
    for form in (plan, plan.pack()):
        with pytest.raises(PlanError, match=r"made for layout .*; this cache has layout ") as caught:
            jax.eval_shape(begun, cache, form)
        assert str(plan.facts) in str(caught.value) and str(cache.facts) in str(caught.value)
    jax.eval_shape(begun, init_cache(layout, size), plan)


def test_a_plan_without_a_size_belongs_to_a_layout() -> None:
    plan = build_plan(LAYOUT, [StepSequence(1, 0, 1)], SHAPE)
    for size in (SIZE, CacheSize(9, 9, 9)):
        jax.eval_shape(begun, init_cache(LAYOUT, size), plan.pack())
    with pytest.raises(PlanError, match=f"made for layout {LAYOUT.fingerprint[:12]}; this cache has "):
        jax.eval_shape(begun, init_cache(CacheLayout(CFG, "bf16"), SIZE), plan)
    jax.eval_shape(begun, init_cache(CacheLayout(CFG, "bf16"), SIZE), plan._replace(facts=None))


def test_a_step_takes_a_packed_plan() -> None:
    cache, plan = init_cache(LAYOUT, SIZE), planned(LAYOUT, SIZE)
    seen = [cache.begin(form).layer(0).visible_entries() for form in (plan, plan.pack())]
    assert np.array_equal(*seen) and int(seen[0].max()) == 0
    jax.tree.map(np.testing.assert_array_equal, begun(cache, plan.pack()), begun(cache, plan))


def test_equal_plans_of_equal_caches_share_a_trace() -> None:
    """Plans of several managers and steps, or sent from another process, plain and packed."""
    for pack in (lambda plan: plan, lambda plan: plan.pack()):
        traces: list[None] = []
        step = jax.jit(lambda cache, plan, traces=traces: traces.append(None) or begun(cache, plan))
        for _ in range(2):
            layout = CacheLayout(CFG)
            cache, manager = init_cache(layout, CacheSize(4, 2, 3)), KVCacheManager(layout, CacheSize(4, 2, 3))
            requests = [manager.admit_request([1, 2, 3]) for _ in range(2)]
            for _ in range(3):
                plan = manager.plan_step([(r, 1) for r in requests], shape=manager.pinned_shape(2))
                step(cache, pack(plan))
        step(cache, pickle.loads(pickle.dumps(pack(plan))))
        assert len(traces) == 1


def test_what_a_plan_goes_through_keeps_its_facts() -> None:
    plan = planned(LAYOUT, SIZE)
    assert (
        plan.facts is not None and str(plan.facts) == f"layout {LAYOUT.fingerprint[:12]}, 3 slots, 5 blocks, 3 columns"
    )
    assert plan.advance().facts == plan.pack().facts == plan.pack().unpack().facts == plan.facts
    assert len(jax.tree.leaves(plan)) == len(plan.arrays) and len(jax.tree.leaves(plan.pack())) == 1
    assert jax.tree.map(lambda x: x, plan).facts == plan.facts
    assert isinstance(stack_plans([plan, plan]), PackedPlan) and stack_plans([plan, plan]).facts == plan.facts
    with pytest.raises(
        PlanError, match=r"shard 1 has a plan for layout .*, 4 slots, .*, shard 0 for layout .*, 3 slots"
    ):
        stack_plans([plan, planned(LAYOUT, CacheSize(4, 3, 3))])


def test_a_model_without_compressed_layers_has_no_blocks_to_compare() -> None:
    layout = CacheLayout(DSV4Config.tiny(layer_types=(AttentionType.SWA,)))
    jax.eval_shape(begun, init_cache(layout, SIZE), planned(layout, SIZE))


FAR = [-1, -(2**31), 2**31, 2**31 - 1, 2**63 - 1, 2**64]


@pytest.mark.parametrize("far", [None, *FAR])
@pytest.mark.parametrize(
    ("field", "ids", "place", "kind", "last"),
    [
        ("table_entries", [(1, 1, 1)], 0, "slot", 2),
        ("table_entries", [(1, 1, 1)], 1, "column", 2),
        ("table_entries", [(1, 1, 1)], 2, "block", 4),
        ("slot_copies", [(1, 2)], 0, "slot", 2),
        ("slot_copies", [(1, 2)], 1, "slot", 2),
        ("block_copies", [(1, 2)], 1, "block", 4),
    ],
)
def test_ids_of_no_unit_are_refused(field: str, ids: list, place: int, kind: str, last: int, far: int | None) -> None:
    wrong = list(ids[0])
    wrong[place] = last + 1 if far is None else far
    message = rf"{field}: an id does not fit" if far == 2**64 else rf"{field}\[0\] names {kind} {wrong[place]}, "
    rows = [StepSequence(1, 0, 1)]
    plan = build_plan(LAYOUT, rows, SHAPE, size=SIZE, **{field: ids})
    with pytest.raises(PlanError, match=message):
        build_plan(LAYOUT, rows, SHAPE, size=SIZE, **{field: [tuple(wrong)]})
    with pytest.raises(PlanError, match=message):
        next_decode(LAYOUT, plan, SHAPE, np.zeros(1, np.int64), size=SIZE, **{field: [tuple(wrong)]})
    if far not in (None, 2**31 - 1):  # without a size: what int32 holds
        with pytest.raises(PlanError, match=message):
            build_plan(LAYOUT, rows, SHAPE, **{field: [tuple(wrong)]})


def test_rows_and_columns_beyond_the_cache_are_refused() -> None:
    for slot in (3, 150, 2**31):
        with pytest.raises(PlanError, match=rf"a sequence is of slot {slot}, slot ids are 0\.\.2"):
            build_plan(LAYOUT, [StepSequence(slot, 0, 1)], SHAPE, size=SIZE)
    with pytest.raises(PlanError, match=rf"slot ids are 0\.\.{2**31 - 1} \(no size was given\)"):
        build_plan(LAYOUT, [StepSequence(2**31, 0, 1)], SHAPE)
    wide = StepShape.bound(LAYOUT, 1, 1, columns=4)
    with pytest.raises(PlanError, match="columns=4: the table has 3"):
        build_plan(LAYOUT, [StepSequence(1, 0, 1)], wide, size=SIZE)
    with pytest.raises(PlanError, match=f"columns={2**24 + 1}: the table has {2**24}"):
        build_plan(LAYOUT, [StepSequence(1, 2**31 - 2, 1)], StepShape.bound(LAYOUT, 1, 1, columns=2**24 + 1))


def test_the_next_decode_is_of_the_same_cache() -> None:
    plan = build_plan(LAYOUT, [StepSequence(1, 0, 1)], SHAPE, size=SIZE)
    with pytest.raises(
        PlanError, match=r"the plan before was made for layout .*, 5 blocks, .*, this one is for .* 6 blocks"
    ):
        next_decode(LAYOUT, plan, SHAPE, np.zeros(1, np.int64), size=CacheSize(5, 2, 3))


@pytest.mark.parametrize(
    "first", ["jax", "dsv4_jax.manager.planning", pytest.param("dsv4_jax.ops", marks=pytest.mark.slow)]
)
def test_a_plan_is_a_pytree_whatever_is_imported_first(first: str) -> None:
    """Its facts are no leaf, though nothing that makes plans imports jax."""
    code = f"""
import {first}
import numpy as np
from dsv4_jax import CacheLayout, CacheSize, DSV4Config
from dsv4_jax.manager import StepSequence, build_plan, shape_for
layout, rows = CacheLayout(DSV4Config.tiny()), [StepSequence(1, 0, 1)]
import jax
plan = build_plan(layout, rows, shape_for(layout, rows), size=CacheSize(2, 2, 2))
assert len(jax.tree.leaves(plan)) == 19 and len(jax.tree.leaves(plan.pack())) == 1
assert jax.tree.map(np.asarray, plan).facts == plan.facts
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
