"""Builds `StepPlan`s: which tokens of which rows, padded to a static shape. Pure numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..layout import CacheLayout
from ..plan import StepPlan

__all__ = ["RowFeed", "StepShape", "build_plan", "shape_for"]


class RowFeed(NamedTuple):
    """One row of a step: `count` tokens of the request in `slot`, which holds `start` tokens already."""

    slot: int
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The static sizes of a plan (see `StepPlan` for the letters). Equal shapes share one executable.

    Attributes:
        rows: B.
        tokens: T.
        flushes: F.
        groups: G.
        group_length: J.
        columns: X.
        table_entries: D.
        slot_copies: C.
        block_copies: E.
        history: whether a row may feed more than 1 + draft_tokens tokens.
    """

    rows: int
    tokens: int
    flushes: int
    groups: int
    group_length: int
    columns: int
    table_entries: int
    slot_copies: int = 0
    block_copies: int = 0
    history: bool = False

    def union(self, other: StepShape) -> StepShape:
        """The smallest shape that fits both: for one executable that serves several kinds of step."""
        sizes = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return StepShape(*(max(a, b) for a, b in sizes))

    def bucketed(self, max_columns: int) -> StepShape:
        """Every size rounded up to a power of two (columns at most the block table's width)."""

        def up(n: int) -> int:
            return 1 << (n - 1).bit_length() if n else 0

        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "history"}
        sizes = {name: up(value) for name, value in sizes.items()}
        sizes["columns"] = min(sizes["columns"], max_columns)
        return StepShape(**sizes, history=self.history)


def shape_for(
    layout: CacheLayout,
    rows: Sequence[RowFeed],
    *,
    table_entries: int = 0,
    slot_copies: int = 0,
    block_copies: int = 0,
    lookahead: int = 0,
) -> StepShape:
    """The exact shape these rows need. `lookahead`: further decode steps that will reuse the plan."""
    counts = [row.count for row in rows]
    ends = [row.start + row.count + lookahead for row in rows]
    groups, flushes = _groups(layout, rows), _flushes(layout, rows)
    return StepShape(
        rows=max(len(rows), 1),
        tokens=max(sum(counts), 1),
        flushes=max(len(flushes), 1),
        groups=max(len(groups), 1),
        group_length=max((len(group) for group in groups), default=1),
        columns=max((layout.blocks_for(end) for end in ends), default=1),
        # A decode step may need a new block in every row: reserve the room, so that needing none,
        # some or all of them is the same executable.
        table_entries=max(table_entries, len(rows)),
        slot_copies=slot_copies,
        block_copies=block_copies,
        history=any(count > 1 + layout.draft_tokens for count in counts),
    )


def build_plan(
    layout: CacheLayout,
    rows: Sequence[RowFeed],
    shape: StepShape,
    *,
    table_entries: Sequence[tuple[int, int, int]] = (),
    slot_copies: Sequence[tuple[int, int]] = (),
    block_copies: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """The padded plan of these rows.

    Args:
        rows: the requests fed; their tokens follow each other in this order.
        shape: static sizes; must fit.
        table_entries: (slot, column, block) triples.
        slot_copies, block_copies: (source, destination) pairs.

    Raises:
        PlanError: the rows do not fit the shape; names the size that is too small.
    """
    needed = shape_for(
        layout, rows, table_entries=len(table_entries), slot_copies=len(slot_copies), block_copies=len(block_copies)
    )
    for field in dataclasses.fields(StepShape):
        need, have = getattr(needed, field.name), getattr(shape, field.name)
        need = len(table_entries) if field.name == "table_entries" else need
        if need > have:
            raise PlanError(f"the step needs {field.name}={need}, its shape has {field.name}={have}")

    counts = [row.count for row in rows]
    firsts = np.cumsum([0, *counts])[:-1] if rows else []
    position = np.concatenate([np.arange(row.start, row.start + row.count) for row in rows] or [[]])
    groups = np.full((shape.groups, shape.group_length), shape.tokens, np.int32)
    for g, group in enumerate(_groups(layout, rows)):
        groups[g, : len(group)] = group
    entries, slots, blocks = (np.asarray(x, np.int32).reshape(-1, n) for x, n in (
        (table_entries, 3), (slot_copies, 2), (block_copies, 2)))  # fmt: skip
    return StepPlan(
        row_slot=_padded([row.slot for row in rows], shape.rows),
        row_start=_padded([row.start for row in rows], shape.rows),
        row_count=_padded(counts, shape.rows),
        row_first=_padded(firsts, shape.rows),
        token_row=_padded(np.repeat(np.arange(len(rows)), counts), shape.tokens),
        token_slot=_padded(np.repeat([row.slot for row in rows], counts), shape.tokens),
        token_position=_padded(position, shape.tokens),
        flush_tokens=_padded(_flushes(layout, rows), shape.flushes, shape.tokens),
        group_tokens=groups,
        history_rows=np.arange(shape.rows if shape.history else 0, dtype=np.int32),
        table_columns=np.arange(shape.columns, dtype=np.int32),
        table_slot=_padded(entries[:, 0], shape.table_entries),
        table_index=_padded(entries[:, 1], shape.table_entries),
        table_block=_padded(entries[:, 2], shape.table_entries),
        copy_slot_src=_padded(slots[:, 0], shape.slot_copies),
        copy_slot_dst=_padded(slots[:, 1], shape.slot_copies),
        copy_block_src=_padded(blocks[:, 0], shape.block_copies),
        copy_block_dst=_padded(blocks[:, 1], shape.block_copies),
    )


def _padded(values: Sequence[int] | np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def _groups(layout: CacheLayout, rows: Sequence[RowFeed]) -> list[range]:
    """Runs of tokens that feed the same HCA entry."""
    ratio, groups, first = layout.cfg.hca_ratio, [], 0
    for row in rows:
        at, end = row.start, row.start + row.count
        while at < end:
            stop = min((at // ratio + 1) * ratio, end)
            groups.append(range(first + at - row.start, first + stop - row.start))
            at = stop
        first += row.count
    return groups


def _flushes(layout: CacheLayout, rows: Sequence[RowFeed]) -> list[int] | np.ndarray:
    """Tokens that complete a CSA entry; all tokens of a decode step, whose plan may be advanced."""
    counts = np.array([row.count for row in rows], np.int64)
    if (counts <= 1).all():
        return np.arange(counts.sum())
    position = np.concatenate([np.arange(row.start, row.start + row.count) for row in rows])
    return np.nonzero((position + 1) % layout.cfg.csa_ratio == 0)[0]
