"""The static shape of a step: what its sequences and their tokens need. Pure numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checks import INT32_MAX, as_int, check_integer, shown
from ..errors import PlanError
from ..layout import CacheLayout, check_layout

__all__ = ["StepSequence", "StepShape", "StepTokens", "int_rows", "shape_for"]


class StepSequence(NamedTuple):
    """One sequence of a step: `count` tokens of the request in `slot`, which holds `start` tokens already."""

    slot: int
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The static sizes of a plan (see `StepPlan` for the letters). Equal shapes share one executable.

    Attributes:
        sequences: B.
        tokens: T.
        flushes: F.
        groups: G.
        group_length: J.
        columns: X.
        table_entries: D.
        slot_copies: C.
        block_copies: E.
        history: whether a sequence may have more than 1 + draft_tokens tokens in it.
    """

    sequences: int
    tokens: int
    flushes: int
    groups: int
    group_length: int
    columns: int
    table_entries: int
    slot_copies: int = 0
    block_copies: int = 0
    history: bool = False

    @classmethod
    def bound(
        cls,
        layout: CacheLayout,
        sequences: int,
        tokens: int,
        *,
        columns: int,
        steps: int = 1,
        history: bool | None = None,
        slot_copies: int = 0,
        block_copies: int = 0,
    ) -> StepShape:
        """Fits every step of up to `sequences` sequences and `tokens` tokens in all.

        Args:
            columns: block-table columns a sequence may need.
            steps: that a plan serves, each of as many tokens.
            history: whether one sequence may have more than 1 + draft_tokens tokens; default: whether
                all together may have more than that each.

        Raises:
            PlanError: a number is no count.
            LayoutError: `layout` is none.
        """
        check_layout(layout)
        sequences, tokens, columns, steps = (
            check_integer(f"a shape's {name}", value, 1, INT32_MAX, error=PlanError)
            for name, value in (("sequences", sequences), ("tokens", tokens), ("columns", columns), ("steps", steps))
        )
        slot_copies, block_copies = (
            check_integer(f"a shape's {name}", value, 0, INT32_MAX, error=PlanError)
            for name, value in (("slot_copies", slot_copies), ("block_copies", block_copies))
        )
        return cls(
            sequences=sequences,
            tokens=tokens,
            flushes=min(tokens, tokens // layout.flush_ratio + sequences),
            groups=min(tokens, tokens // layout.group_ratio + 2 * sequences),
            group_length=min(tokens, layout.group_ratio),
            columns=columns,
            table_entries=sequences + tokens * steps // layout.block_tokens,
            slot_copies=slot_copies,
            block_copies=block_copies,
            history=tokens > sequences * (1 + layout.draft_tokens) if history is None else history,
        )

    def union(self, other: StepShape) -> StepShape:
        """The smallest shape that fits both: for one executable that serves several kinds of step."""
        sizes = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return StepShape(*(max(a, b) for a, b in sizes))

    def bucketed(self, max_columns: int) -> StepShape:
        """Returns this shape with every size rounded up to a power of two (columns at most the block table's width)."""

        def up(n: int) -> int:
            return 1 << (n - 1).bit_length() if n else 0

        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "history"}
        sizes = {name: up(value) for name, value in sizes.items()}
        sizes["columns"] = min(sizes["columns"], max_columns)
        return StepShape(**sizes, history=self.history)


class StepTokens(NamedTuple):
    """What follows from the sequences alone, as arrays over sequences [B] and their tokens [N]."""

    slot: np.ndarray  # [B]
    start: np.ndarray  # [B]
    count: np.ndarray  # [B]
    first: np.ndarray  # [B] index of the sequence's first token
    sequence: np.ndarray  # [N]
    position: np.ndarray  # [N]
    group: np.ndarray  # [N] runs of tokens of the same HCA entry
    place: np.ndarray  # [N] index of the token in its group
    flushes: np.ndarray  # [F'] tokens

    @classmethod
    def of(
        cls, layout: CacheLayout, sequences: Sequence[StepSequence] | np.ndarray, *, max_tokens: int = INT32_MAX
    ) -> StepTokens:
        """Raises `PlanError`: no rows of three integers, impossible ones, or more than `max_tokens` in all."""
        slot, start, count = int_rows("sequences", sequences, 3).T
        if len(slot) and (count.min() < 1 or start.min() < 0 or slot.min() < 1):
            raise PlanError("every sequence must have a slot >= 1, a start >= 0 and a count >= 1")
        if len(start) and start.max() > INT32_MAX:
            raise PlanError(f"a sequence starts at {start.max()}: positions are int32 and reach {INT32_MAX - 1}")
        if (tokens := sum(count.tolist())) > max_tokens:  # before they are listed
            raise PlanError(f"the step needs tokens={tokens}, its shape has tokens={max_tokens}")
        if len(count) and count.min() == count.max() == 1:
            each = np.arange(len(count))  # a decode step: every sequence is a token, a group, and may flush
            return cls(slot, start, count, each, each, start, each, np.zeros_like(each), each)
        first = np.cumsum(count) - count
        sequence = np.repeat(np.arange(len(count)), count)
        token = np.arange(len(sequence))
        position = token + (start - first)[sequence]
        opens = (position % layout.group_ratio == 0) | (token == first[sequence])
        group = np.cumsum(opens) - 1
        place = token - token[opens][group]
        # Tokens that complete a CSA entry, and those of sequences of one token, which may be advanced to where they do.
        flushes = np.flatnonzero(((position + 1) % layout.flush_ratio == 0) | (count == 1)[sequence])
        return cls(slot, start, count, first, sequence, position, group, place, flushes)

    def stop(self, steps: int) -> np.ndarray:
        """Returns [B] tokens of each sequence after so many steps of as many. Raises `PlanError`: more than int32
        counts."""
        stop = self.start + self.count * steps  # none of these is more than 2^31
        if (most := int(stop.max(initial=0))) > INT32_MAX:
            raise PlanError(f"a sequence would have {most} tokens: positions are int32 and reach {INT32_MAX - 1}")
        return stop

    def shape(
        self, layout: CacheLayout, *, table_entries: int, slot_copies: int, block_copies: int, steps: int
    ) -> StepShape:
        """The smallest shape that fits: see `shape_for`."""
        block = layout.block_tokens
        longest, end = (int(x.max(initial=0)) for x in (self.count, self.stop(steps)))
        return StepShape(
            sequences=max(len(self.slot), 1),
            tokens=max(len(self.sequence), 1),
            flushes=max(len(self.flushes), 1),
            groups=max(int(self.group[-1]) + 1, 1) if len(self.group) else 1,
            group_length=int(self.place.max(initial=0)) + 1,
            columns=max(layout.blocks_for(end), 1) if len(self.slot) else 1,
            table_entries=max(table_entries, int((-(-self.count * steps // block)).sum())),
            slot_copies=slot_copies,
            block_copies=block_copies,
            history=longest > 1 + layout.draft_tokens,
        )


def shape_for(
    layout: CacheLayout,
    sequences: Sequence[StepSequence] | np.ndarray,
    *,
    table_entries: int = 0,
    slot_copies: int = 0,
    block_copies: int = 0,
    steps: int = 1,
) -> StepShape:
    """The shape these sequences need, padded sequences and tokens at least one.

    All sizes are exact but `table_entries`, which has room for every block that sequences of this many
    tokens can need at any position: steps that need none, some or all of them share an executable.

    Args:
        sequences: of the step (as an array: [B, 3]).
        table_entries, slot_copies, block_copies: at least so many of each.
        steps: that the plan serves, each of as many tokens of each sequence.

    Raises:
        PlanError: a number is no count, or a sequence has no slot, starts before position 0 or has no token.
        LayoutError: `layout` is none.
    """
    check_layout(layout)
    table_entries, slot_copies, block_copies = (
        check_integer(name, value, 0, INT32_MAX, error=PlanError)
        for name, value in (
            ("table_entries", table_entries),
            ("slot_copies", slot_copies),
            ("block_copies", block_copies),
        )
    )
    steps = check_integer("steps", steps, 1, INT32_MAX, error=PlanError)
    return StepTokens.of(layout, sequences).shape(
        layout, table_entries=table_entries, slot_copies=slot_copies, block_copies=block_copies, steps=steps
    )


def int_rows(name: str, rows: Any, width: int) -> np.ndarray:
    """Returns rows of so many integers each, as int64 [n, width]. Raises `PlanError` for anything else."""
    if type(rows) is np.ndarray and rows.dtype == np.int64 and rows.shape[1:] == (width,):
        return rows  # the manager's own, in every step
    try:
        given = [tuple(row) for row in rows]
    except TypeError:
        raise PlanError(f"{name} must be rows of {width} integers, got {shown(rows)}") from None
    out = [[as_int(value) for value in row] for row in given]
    for i, row in enumerate(out):
        if len(row) != width or None in row:
            raise PlanError(f"{name}[{i}] must be {width} integers, got {shown(given[i])}")
    try:
        return np.array(out, np.int64).reshape(-1, width)
    except OverflowError:
        raise PlanError(f"{name}: an id does not fit 64 bits") from None
