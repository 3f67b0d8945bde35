"""Plans are what `StepPlan` says they are, for any sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.config import DSV4Config
from dsv4_jax.errors import PlanError
from dsv4_jax.layout import CacheLayout
from dsv4_jax.manager import StepShape
from dsv4_jax.manager.planning import build_plan, next_decode
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.plan import StepPlan

LAYOUT = CacheLayout(DSV4Config.tiny(), draft_tokens=2)
COLUMNS = 4
CONTEXT = COLUMNS * LAYOUT.block_tokens


@st.composite
def scheduled(draw: st.DrawFn) -> list[StepSequence]:
    slots = draw(st.lists(st.integers(1, 20), unique=True, max_size=6))
    sequences = []
    for slot in slots:
        start = draw(st.integers(0, CONTEXT - 1))
        count = draw(st.one_of(st.integers(1, 3), st.integers(1, 90)))
        sequences.append(StepSequence(slot, start, min(count, CONTEXT - start)))
    return sequences


def check_plan(plan: StepPlan, sequences: list[StepSequence], layout: CacheLayout = LAYOUT, *, steps: int = 1) -> None:
    """Every promise of `StepPlan`'s docstring, checked token by token. `steps`: that it still serves."""
    assert all(field.dtype == np.int32 and (field >= 0).all() for field in plan.arrays)
    tokens = [(b, row.slot, row.start + i) for b, row in enumerate(sequences) for i in range(row.count)]
    count = len(tokens)
    assert plan.token_seq[:count].tolist() == [t[0] for t in tokens]
    assert plan.token_slot[:count].tolist() == [t[1] for t in tokens]
    assert plan.token_position[:count].tolist() == [t[2] for t in tokens]
    for field in (plan.token_seq, plan.token_slot, plan.token_position):
        assert not field[count:].any()
    for field, name in ((plan.seq_slot, "slot"), (plan.seq_start, "start"), (plan.seq_count, "count")):
        assert field.tolist() == [getattr(r, name) for r in sequences] + [0] * (len(field) - len(sequences))
    stops = [r.start + r.count * steps for r in sequences]
    assert plan.seq_stop.tolist() == stops + [0] * (plan.num_seqs - len(sequences))
    assert [plan.token_seq[f] for f in plan.seq_first[: len(sequences)]] == list(range(len(sequences)))

    # Groups: every token once, in order, within one row and one entry; padded with T.
    ratio, grouped = layout.cfg.hca_ratio, []
    for group in plan.group_tokens.tolist():
        members = [t for t in group if t < plan.num_tokens]
        assert group == members + [plan.num_tokens] * (len(group) - len(members))
        assert members == list(range(members[0], members[-1] + 1)) if members else True
        assert len({(tokens[t][0], tokens[t][2] // ratio) for t in members}) <= 1
        grouped += members
    assert sorted(grouped) == list(range(count))

    # Flushes: all that complete an entry, each once, no padding token.
    listed = [t for t in plan.flush_tokens.tolist() if t < plan.num_tokens]
    assert set(plan.flush_tokens.tolist()) <= {*range(count), plan.num_tokens}
    assert len(set(listed)) == len(listed)
    due = {t for t, (_, _, position) in enumerate(tokens) if (position + 1) % layout.cfg.csa_ratio == 0}
    assert due <= set(listed)

    assert plan.table_columns.tolist() == list(range(len(plan.table_columns)))
    assert len(plan.table_columns) >= max((layout.blocks_for(r.start + r.count) for r in sequences), default=1)
    assert plan.history_seqs.tolist() in ([], list(range(plan.num_seqs)))
    if any(r.count > 1 + layout.draft_tokens for r in sequences):
        assert len(plan.history_seqs)


@settings(max_examples=120, deadline=None)
@given(scheduled())
def test_any_sequences(sequences: list[StepSequence]) -> None:
    exact = shape_for(LAYOUT, sequences)
    check_plan(build_plan(LAYOUT, sequences, exact), sequences)
    check_plan(build_plan(LAYOUT, sequences, exact.bucketed(COLUMNS)), sequences)
    assert shape_for(LAYOUT, np.array(sequences, np.int64)) == exact


@settings(max_examples=120, deadline=None)
@given(scheduled(), st.data())
def test_the_bound_fits_all_it_promises(sequences: list[StepSequence], data: st.DataObject) -> None:
    total = sum(r.count for r in sequences)
    b, t = len(sequences) + data.draw(st.integers(1, 2)), max(total, 1) + data.draw(st.integers(0, 9))
    shape = StepShape.bound(LAYOUT, b, t, columns=COLUMNS, history=True)
    check_plan(build_plan(LAYOUT, sequences, shape), sequences)
    entries = [
        (r.slot, c, 1) for r in sequences for c in range(-(-r.start // 128), LAYOUT.blocks_for(r.start + r.count))
    ]
    assert len(entries) <= min(shape.table_entries, shape_for(LAYOUT, sequences).table_entries)


def test_advance_stays_a_plan_of_the_next_tokens() -> None:
    sequences = [StepSequence(3, 13, 1), StepSequence(1, 126, 1)]
    plan = build_plan(LAYOUT, sequences, StepShape.bound(LAYOUT, 4, 4, columns=2, steps=4), steps=4)
    first = plan
    for step in range(4):
        check_plan(plan, [StepSequence(r.slot, r.start + step, 1) for r in sequences], steps=4 - step)
        for a, b in zip(first.advance(step).settled().arrays, plan.settled().arrays, strict=True):
            np.testing.assert_array_equal(a, b)
        plan = plan.advance()
    for step in range(3):  # nothing is reserved any more: all is padding, and stays it
        for later in (plan, first.advance(4 + step), first.advance(2**31 - 5), first.advance(10**12)):
            assert not later.seq_slot.any() and not later.token_slot.any()
            assert (later.token_position < CONTEXT).all() and all(field.dtype == np.int32 for field in later.arrays)
        plan = plan.advance()


def test_sequences_end_one_by_one() -> None:
    """Where each has its own number of tokens in a step, its reservation is as many times that; chunks do not go on."""
    sequences = [StepSequence(3, 13, 1), StepSequence(1, 20, 3), StepSequence(2, 0, 2)]
    plan = build_plan(LAYOUT, sequences, StepShape.bound(LAYOUT, 4, 6, columns=2, history=True, steps=5), steps=5)
    assert plan.seq_stop.tolist() == [18, 35, 10, 0]
    for step in range(1, 6):
        later = plan.advance(step)
        assert later.seq_slot.tolist() == [3 * (step < 5), 0, 0, 0]
        assert later.token_slot.tolist() == [3 * (step < 5), 0, 0, 0, 0, 0]
    assert plan.advance(0) is plan
    with pytest.raises(PlanError, match="0 or more steps, got -1"):
        plan.advance(-1)
    kept = plan.only(np.array([False, True, False, True]))
    assert kept.seq_slot.tolist() == [0, 1, 0, 0] and kept.token_slot.tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("steps", [1.5, np.float32(2), True, "2", None, np.arange(2)])
def test_a_plan_is_advanced_by_whole_steps(steps) -> None:
    plan = build_plan(LAYOUT, [StepSequence(1, 0, 1)], StepShape.bound(LAYOUT, 1, 1, columns=1))
    with pytest.raises(PlanError, match="advanced by a number of steps, an integer, got"):
        plan.settled().advance(steps)


@pytest.mark.parametrize("kept", [np.array([2, 1]), np.array([True]), True, [True, False], None, np.ones((2, 2), bool)])
def test_sequences_are_kept_by_booleans(kept) -> None:
    sequences = [StepSequence(1, 0, 1), StepSequence(2, 0, 1)]
    plan = build_plan(LAYOUT, sequences, StepShape.bound(LAYOUT, 2, 2, columns=1))
    with pytest.raises(PlanError, match=r"the sequences of a plan that stay are bool\[2\], got "):
        plan.only(kept)


def test_positions_reach_what_int32_does() -> None:
    """Not one further, where a number of tokens would wrap."""
    columns, last = 2**31 // LAYOUT.block_tokens, 2**31 - 2
    shape = StepShape.bound(LAYOUT, 1, 4, columns=columns, steps=9, history=True)
    plan = build_plan(LAYOUT, [StepSequence(1, last, 1)], shape)
    assert plan.seq_stop.tolist() == [2**31 - 1] and plan.token_position.tolist()[0] == last
    for start, count, steps in ((last, 2, 1), (last, 1, 2), (last + 1, 1, 1), (last - 4, 2, 3)):
        with pytest.raises(PlanError, match=r"would have .* tokens: positions are int32 and reach 2147483646"):
            build_plan(LAYOUT, [StepSequence(1, start, count)], shape, steps=steps)
        with pytest.raises(PlanError, match="positions are int32"):
            shape_for(LAYOUT, [StepSequence(1, start, count)], steps=steps)
    for start in (2**31, 2**63 - 1):
        with pytest.raises(PlanError, match=f"a sequence starts at {start}: positions are int32"):
            build_plan(LAYOUT, [StepSequence(1, start, 1)], shape)
    with pytest.raises(PlanError, match="would have 2147483648 tokens"):
        next_decode(LAYOUT, plan, shape, np.array([last]), steps=2)


def test_copies_and_entries_are_padded_with_unit_0() -> None:
    sequences = [StepSequence(1, 0, 1)]
    shape = StepShape.bound(LAYOUT, 2, 2, columns=1, slot_copies=2, block_copies=3)
    plan = build_plan(LAYOUT, sequences, shape, table_entries=[(1, 0, 7)], slot_copies=[(4, 1)], block_copies=[(5, 7)])
    got = [f.tolist() for f in plan.arrays[-7:]]
    assert got == [[1, 0], [0, 0], [7, 0], [4, 0], [1, 0], [5, 0, 0], [7, 0, 0]]


@pytest.mark.parametrize(
    ("field", "sequences", "options"),
    [
        ("sequences", [StepSequence(1, 0, 1), StepSequence(2, 0, 1), StepSequence(3, 0, 1)], {}),
        ("tokens", [StepSequence(1, 0, 9)], {}),
        ("columns", [StepSequence(1, 128, 1)], {}),
        ("columns", [StepSequence(1, 127, 1)], dict(steps=2)),
        ("history", [StepSequence(1, 14, 4)], {}),
        ("group_length", [StepSequence(1, 0, 3)], {}),
        ("table_entries", [StepSequence(1, 0, 1)], dict(table_entries=[(1, i, 1) for i in range(3)])),
        ("slot_copies", [StepSequence(1, 0, 1)], dict(slot_copies=[(1, 2)])),
        ("block_copies", [StepSequence(1, 0, 1)], dict(block_copies=[(1, 2)])),
    ],
)
def test_a_shape_too_small_is_named(field: str, sequences: list[StepSequence], options: dict) -> None:
    shape = StepShape(2, 8, 8, 8, 2, 1, 2)
    with pytest.raises(PlanError, match=f"the step needs {field}="):
        build_plan(LAYOUT, sequences, shape, **options)


@pytest.mark.parametrize(
    "sequence", [StepSequence(0, 0, 1), StepSequence(-1, 0, 1), StepSequence(1, -1, 1), StepSequence(1, 0, 0)]
)
def test_impossible_sequences(sequence: StepSequence) -> None:
    with pytest.raises(PlanError, match="every sequence"):
        build_plan(LAYOUT, [sequence], StepShape.bound(LAYOUT, 2, 2, columns=1))


@pytest.mark.parametrize("field", ["sequences", "table_entries", "slot_copies", "block_copies"])
def test_rows_of_another_form_are_refused(field: str) -> None:
    """NumPy would cut floats and strings to integers, and deal pairs out as triples."""
    width = 3 if field in ("sequences", "table_entries") else 2
    other = [(1,) * (5 - width)] * width
    for wrong in ([(1.0,) * width], [("1",) * width], [(True,) * width], other, [1] * width, None, [(2**64,) * width]):
        arguments = dict(sequences=[StepSequence(1, 0, 1)]) | {field: wrong}
        with pytest.raises(PlanError, match=field):
            build_plan(LAYOUT, shape=StepShape(2, 8, 8, 8, 2, 1, 2, 2, 2), **arguments)
    with pytest.raises(PlanError, match="slot_copies: two of them fill slot 2"):
        build_plan(LAYOUT, [], StepShape(2, 8, 8, 8, 2, 1, 2, 2, 2), slot_copies=[(1, 2), (3, 2)])
    for huge in (shape_for, lambda *args: build_plan(*args, StepShape(2, 8, 8, 8, 2, 1, 2))):
        with pytest.raises(PlanError, match="the step needs tokens=4294967298"):
            huge(LAYOUT, [StepSequence(1, 0, 2**32 + 2)])  # before they are listed
    with pytest.raises(PlanError, match="steps must be an integer from 1"):
        build_plan(LAYOUT, [StepSequence(1, 0, 1)], StepShape(2, 8, 8, 8, 2, 1, 2), steps=0)


def test_two_sequences_of_one_slot() -> None:
    sequences = [StepSequence(2, 0, 1), StepSequence(1, 0, 3), StepSequence(2, 4, 1)]
    with pytest.raises(PlanError, match="slot 2 is that of two sequences"):
        build_plan(LAYOUT, sequences, StepShape.bound(LAYOUT, 3, 8, columns=1))


def test_shapes_combine() -> None:
    a = shape_for(LAYOUT, [StepSequence(1, 0, 5)])
    b = shape_for(LAYOUT, [StepSequence(1, 130, 1), StepSequence(2, 0, 1)])
    both = a.union(b)
    for sequences in ([StepSequence(1, 0, 5)], [StepSequence(1, 130, 1), StepSequence(2, 0, 1)]):
        check_plan(build_plan(LAYOUT, sequences, both), sequences)
    assert shape_for(LAYOUT, [StepSequence(1, 300, 5)]).bucketed(3).columns == 3
    assert (a.bucketed(9).tokens, a.bucketed(9).sequences, a.bucketed(9).slot_copies) == (8, 1, 0)


def test_the_next_decode_of_the_same_sequences_is_the_plan_built_anew() -> None:
    layout, rng = CacheLayout(DSV4Config.tiny()), np.random.default_rng(4)
    shape = StepShape.bound(layout, 5, 5, columns=9, slot_copies=2, block_copies=1, steps=3)
    for sequences in (1, 3, 5):
        slots = rng.permutation(9)[:sequences] + 1
        first, then = rng.integers(0, 100, (2, sequences))
        plan = build_plan(layout, [StepSequence(*row, 1) for row in zip(slots, first, strict=True)], shape)
        extras = dict(table_entries=[(3, 1, 7)], slot_copies=[(1, 2)], block_copies=[(5, 6)], steps=3)
        expected = build_plan(layout, [StepSequence(*row, 1) for row in zip(slots, then, strict=True)], shape, **extras)
        following = next_decode(layout, plan, shape, then, **extras)
        assert following.facts == expected.facts
        for name, a, b in zip(expected._fields[:-1], following.arrays, expected.arrays, strict=True):
            assert a.dtype == b.dtype == np.int32, name
            np.testing.assert_array_equal(a, b, err_msg=name)
    for problem, changed in (
        ("columns=10", dict(starts=np.full(5, 9 * layout.block_tokens))),
        ("slot_copies=3", dict(slot_copies=[(1, 2)] * 3)),
        ("block_copies=2", dict(block_copies=[(1, 2)] * 2)),
        ("table_entries=99", dict(table_entries=[(1, 1, 1)] * 99)),
    ):
        with pytest.raises(PlanError, match=problem):
            next_decode(layout, plan, shape, **(dict(starts=then) | changed))
