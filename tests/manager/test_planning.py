"""Plans are what `StepPlan` says they are, for any rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.config import DSV4Config
from dsv4_jax.errors import PlanError
from dsv4_jax.layout import CacheLayout
from dsv4_jax.manager.planning import RowFeed, StepShape, build_plan, next_decode, shape_for
from dsv4_jax.plan import StepPlan

LAYOUT = CacheLayout(DSV4Config.tiny(), draft_tokens=2)
COLUMNS = 4
CONTEXT = COLUMNS * LAYOUT.block_tokens


@st.composite
def feeds(draw: st.DrawFn) -> list[RowFeed]:
    slots = draw(st.lists(st.integers(1, 20), unique=True, max_size=6))
    rows = []
    for slot in slots:
        start = draw(st.integers(0, CONTEXT - 1))
        count = draw(st.one_of(st.integers(1, 3), st.integers(1, 90)))
        rows.append(RowFeed(slot, start, min(count, CONTEXT - start)))
    return rows


def check_plan(plan: StepPlan, rows: list[RowFeed], layout: CacheLayout = LAYOUT) -> None:
    """Every promise of `StepPlan`'s docstring, checked token by token."""
    assert all(field.dtype == np.int32 and (field >= 0).all() for field in plan.arrays)
    tokens = [(b, row.slot, row.start + i) for b, row in enumerate(rows) for i in range(row.count)]
    count = len(tokens)
    assert plan.token_seq[:count].tolist() == [t[0] for t in tokens]
    assert plan.token_slot[:count].tolist() == [t[1] for t in tokens]
    assert plan.token_position[:count].tolist() == [t[2] for t in tokens]
    for field in (plan.token_seq, plan.token_slot, plan.token_position):
        assert not field[count:].any()
    for field, name in ((plan.seq_slot, "slot"), (plan.seq_start, "start"), (plan.seq_count, "count")):
        assert field.tolist() == [getattr(r, name) for r in rows] + [0] * (len(field) - len(rows))
    assert [plan.token_seq[f] for f in plan.seq_first[: len(rows)]] == list(range(len(rows)))

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
    assert len(plan.table_columns) >= max((layout.blocks_for(r.start + r.count) for r in rows), default=1)
    assert plan.history_seqs.tolist() in ([], list(range(plan.num_seqs)))
    if any(r.count > 1 + layout.draft_tokens for r in rows):
        assert len(plan.history_seqs)


@settings(max_examples=120, deadline=None)
@given(feeds())
def test_any_rows(rows: list[RowFeed]) -> None:
    exact = shape_for(LAYOUT, rows)
    check_plan(build_plan(LAYOUT, rows, exact), rows)
    check_plan(build_plan(LAYOUT, rows, exact.bucketed(COLUMNS)), rows)
    assert shape_for(LAYOUT, np.array(rows, np.int64)) == exact


@settings(max_examples=120, deadline=None)
@given(feeds(), st.data())
def test_the_bound_fits_all_it_promises(rows: list[RowFeed], data: st.DataObject) -> None:
    total = sum(r.count for r in rows)
    b, t = len(rows) + data.draw(st.integers(1, 2)), max(total, 1) + data.draw(st.integers(0, 9))
    shape = StepShape.bound(LAYOUT, b, t, columns=COLUMNS, history=True)
    check_plan(build_plan(LAYOUT, rows, shape), rows)
    entries = [(r.slot, c, 1) for r in rows for c in range(-(-r.start // 128), LAYOUT.blocks_for(r.start + r.count))]
    assert len(entries) <= min(shape.table_entries, shape_for(LAYOUT, rows).table_entries)


def test_advance_stays_a_plan_of_the_next_tokens() -> None:
    rows = [RowFeed(3, 13, 1), RowFeed(1, 126, 1)]
    plan = build_plan(LAYOUT, rows, StepShape.bound(LAYOUT, 4, 4, columns=2, lookahead=3), lookahead=3)
    for step in range(4):
        check_plan(plan, [RowFeed(r.slot, r.start + step, 1) for r in rows])
        plan = plan.advance()


def test_copies_and_entries_are_padded_with_unit_0() -> None:
    rows = [RowFeed(1, 0, 1)]
    shape = StepShape.bound(LAYOUT, 2, 2, columns=1, slot_copies=2, block_copies=3)
    plan = build_plan(LAYOUT, rows, shape, table_entries=[(1, 0, 7)], slot_copies=[(4, 1)], block_copies=[(5, 7)])
    got = [f.tolist() for f in plan.arrays[-7:]]
    assert got == [[1, 0], [0, 0], [7, 0], [4, 0], [1, 0], [5, 0, 0], [7, 0, 0]]


@pytest.mark.parametrize(
    ("field", "rows", "options"),
    [
        ("rows", [RowFeed(1, 0, 1), RowFeed(2, 0, 1), RowFeed(3, 0, 1)], {}),
        ("tokens", [RowFeed(1, 0, 9)], {}),
        ("columns", [RowFeed(1, 128, 1)], {}),
        ("columns", [RowFeed(1, 127, 1)], dict(lookahead=1)),
        ("history", [RowFeed(1, 14, 4)], {}),
        ("group_length", [RowFeed(1, 0, 3)], {}),
        ("table_entries", [RowFeed(1, 0, 1)], dict(table_entries=[(1, i, 1) for i in range(3)])),
        ("slot_copies", [RowFeed(1, 0, 1)], dict(slot_copies=[(1, 2)])),
        ("block_copies", [RowFeed(1, 0, 1)], dict(block_copies=[(1, 2)])),
    ],
)
def test_a_shape_too_small_is_named(field: str, rows: list[RowFeed], options: dict) -> None:
    shape = StepShape(2, 8, 8, 8, 2, 1, 2)
    with pytest.raises(PlanError, match=f"the step needs {field}="):
        build_plan(LAYOUT, rows, shape, **options)


@pytest.mark.parametrize("row", [RowFeed(0, 0, 1), RowFeed(-1, 0, 1), RowFeed(1, -1, 1), RowFeed(1, 0, 0)])
def test_impossible_rows(row: RowFeed) -> None:
    with pytest.raises(PlanError, match="every row"):
        build_plan(LAYOUT, [row], StepShape.bound(LAYOUT, 2, 2, columns=1))


def test_two_rows_of_one_slot() -> None:
    rows = [RowFeed(2, 0, 1), RowFeed(1, 0, 3), RowFeed(2, 4, 1)]
    with pytest.raises(PlanError, match="slot 2 is fed by two rows"):
        build_plan(LAYOUT, rows, StepShape.bound(LAYOUT, 3, 8, columns=1))


def test_shapes_combine() -> None:
    a = shape_for(LAYOUT, [RowFeed(1, 0, 5)])
    b = shape_for(LAYOUT, [RowFeed(1, 130, 1), RowFeed(2, 0, 1)])
    both = a.union(b)
    for rows in ([RowFeed(1, 0, 5)], [RowFeed(1, 130, 1), RowFeed(2, 0, 1)]):
        check_plan(build_plan(LAYOUT, rows, both), rows)
    assert shape_for(LAYOUT, [RowFeed(1, 300, 5)]).bucketed(3).columns == 3
    assert (a.bucketed(9).tokens, a.bucketed(9).rows, a.bucketed(9).slot_copies) == (8, 1, 0)


def test_the_next_decode_of_the_same_rows_is_the_plan_built_anew() -> None:
    layout, rng = CacheLayout(DSV4Config.tiny()), np.random.default_rng(4)
    shape = StepShape.bound(layout, 5, 5, columns=9, slot_copies=2, block_copies=1, lookahead=2)
    for rows in (1, 3, 5):
        slots = rng.permutation(9)[:rows] + 1
        first, then = rng.integers(0, 100, (2, rows))
        plan = build_plan(layout, [RowFeed(*row, 1) for row in zip(slots, first, strict=True)], shape)
        extras = dict(table_entries=[(3, 1, 7)], slot_copies=[(1, 2)], block_copies=[(5, 6)], lookahead=2)
        expected = build_plan(layout, [RowFeed(*row, 1) for row in zip(slots, then, strict=True)], shape, **extras)
        following = next_decode(layout, plan, shape, then, **extras)
        assert following.facts == expected.facts
        for name, a, b in zip(expected._fields[:-1], following.arrays, expected.arrays, strict=True):
            assert a.dtype == b.dtype == np.int32, name
            np.testing.assert_array_equal(a, b, err_msg=name)
    for problem, changed in (
        ("columns=10", dict(starts=np.full(5, 9 * layout.block_tokens))),
        ("slot_copies=3", dict(slot_copies=[(1, 2)] * 3)),
        ("block_copies=2", dict(block_copies=[(1, 2)] * 2)), ("table_entries=99", dict(table_entries=[(1, 1, 1)] * 99)),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=problem):
            next_decode(layout, plan, shape, **(dict(starts=then) | changed))
