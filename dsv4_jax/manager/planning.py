"""Builds `StepPlan`s: which tokens of which rows, padded to a static shape. Pure numpy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checks import INT32_MAX
from ..errors import PlanError
from ..layout import CacheLayout, CacheSize
from ..plan import CacheFacts, StepPlan
from .allocator import as_count

__all__ = ["RowFeed", "StepShape", "build_plan", "check_extras", "next_decode", "next_rows", "shape_for", "with_extras"]


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

    @classmethod
    def bound(
        cls,
        layout: CacheLayout,
        rows: int,
        tokens: int,
        *,
        columns: int,
        lookahead: int = 0,
        history: bool | None = None,
        slot_copies: int = 0,
        block_copies: int = 0,
    ) -> StepShape:
        """Fits every step of up to `rows` rows and `tokens` tokens in all.

        Args:
            columns: block-table columns a row may need.
            lookahead: further decode steps that reuse the plan.
            history: whether one row may feed more than 1 + draft_tokens tokens; default: whether
                all rows together may feed more than that each.

        Raises:
            PlanError: a number is no count.
        """
        cfg = layout.cfg
        rows, tokens, columns = (
            as_count(f"a shape's {name}", value, 1, INT32_MAX)
            for name, value in (("rows", rows), ("tokens", tokens), ("columns", columns))
        )
        lookahead, slot_copies, block_copies = (
            as_count(f"a shape's {name}", value, 0, INT32_MAX)
            for name, value in (("lookahead", lookahead), ("slot_copies", slot_copies), ("block_copies", block_copies))
        )
        return cls(
            rows=rows,
            tokens=tokens,
            flushes=min(tokens, tokens // cfg.csa_ratio + rows),
            groups=min(tokens, tokens // cfg.hca_ratio + 2 * rows),
            group_length=min(tokens, cfg.hca_ratio),
            columns=columns,
            table_entries=rows + (tokens + rows * lookahead) // layout.block_tokens,
            slot_copies=slot_copies,
            block_copies=block_copies,
            history=tokens > rows * (1 + layout.draft_tokens) if history is None else history,
        )

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


class _Fed(NamedTuple):
    """What follows from the rows alone, as arrays over rows [B] and fed tokens [N]."""

    slot: np.ndarray  # [B]
    start: np.ndarray  # [B]
    count: np.ndarray  # [B]
    first: np.ndarray  # [B] index of the row's first token
    row: np.ndarray  # [N]
    position: np.ndarray  # [N]
    group: np.ndarray  # [N] runs of tokens that feed the same HCA entry
    place: np.ndarray  # [N] index of the token in its group
    flushes: np.ndarray  # [F'] tokens


def _fed(layout: CacheLayout, rows: Sequence[RowFeed] | np.ndarray) -> _Fed:
    slot, start, count = np.asarray(rows, np.int64).reshape(-1, 3).T
    if len(count) and count.min() == count.max() == 1:
        each = np.arange(len(count))  # a decode step: every row is a token, a group, and may flush
        return _Fed(slot, start, count, each, each, start, each, np.zeros_like(each), each)
    first = np.cumsum(count) - count
    row = np.repeat(np.arange(len(count)), count)
    token = np.arange(len(row))
    position = token + (start - first)[row]
    opens = (position % layout.cfg.hca_ratio == 0) | (token == first[row])
    group = np.cumsum(opens) - 1
    place = token - token[opens][group]
    # Tokens that complete a CSA entry; above all tokens, as the plan of a decode step may be advanced.
    flushes = np.flatnonzero((position + 1) % layout.cfg.csa_ratio == 0)
    return _Fed(slot, start, count, first, row, position, group, place, flushes)


def shape_for(
    layout: CacheLayout,
    rows: Sequence[RowFeed] | np.ndarray,
    *,
    table_entries: int = 0,
    slot_copies: int = 0,
    block_copies: int = 0,
    lookahead: int = 0,
) -> StepShape:
    """The shape these rows need, padded rows and tokens at least one.

    All sizes are exact but `table_entries`, which has room for every block that rows of this many
    tokens can need at any position: steps that need none, some or all of them share an executable.

    Args:
        rows: the requests fed (as an array: [B, 3]).
        table_entries, slot_copies, block_copies: at least so many of each.
        lookahead: further decode steps that will reuse the plan.
    """
    return _shape(layout, _fed(layout, rows), table_entries, slot_copies, block_copies, lookahead)


def _shape(
    layout: CacheLayout, fed: _Fed, table_entries: int, slot_copies: int, block_copies: int, lookahead: int
) -> StepShape:
    block = layout.block_tokens
    longest, end = (int(x.max(initial=0)) for x in (fed.count, fed.start + fed.count))
    return StepShape(
        rows=max(len(fed.slot), 1),
        tokens=max(len(fed.row), 1),
        flushes=max(len(fed.flushes), 1),
        groups=max(int(fed.group[-1]) + 1, 1) if len(fed.group) else 1,
        group_length=int(fed.place.max(initial=0)) + 1,
        columns=max(layout.blocks_for(end + lookahead), 1) if len(fed.slot) else 1,
        table_entries=max(table_entries, int((-(-(fed.count + lookahead) // block)).sum())),
        slot_copies=slot_copies,
        block_copies=block_copies,
        history=longest > 1 + layout.draft_tokens,
    )


def build_plan(
    layout: CacheLayout,
    rows: Sequence[RowFeed] | np.ndarray,
    shape: StepShape,
    *,
    size: CacheSize | None = None,
    table_entries: Sequence[tuple[int, int, int]] = (),
    slot_copies: Sequence[tuple[int, int]] = (),
    block_copies: Sequence[tuple[int, int]] = (),
    lookahead: int = 0,
) -> StepPlan:
    """The padded plan of these rows.

    Args:
        rows: the requests fed, at least one token each; their tokens follow each other in this order.
        shape: static sizes; must fit.
        size: of the cache. Without it the plan is for caches of any size, and ids are only known to be int32 >= 0.
        table_entries: (slot, column, block) triples.
        slot_copies, block_copies: (source, destination) pairs.
        lookahead: further decode steps that will reuse the plan.

    Raises:
        PlanError: the rows do not fit the shape (names the size that is too small), or a row feeds
            less than one token, starts before position 0, or has no slot, or one that another has, too;
            or the cache has no such slot, block or column.
    """
    facts = CacheFacts.of(layout, size)
    fed = _fed(layout, rows)
    if len(fed.slot) and (fed.count.min() < 1 or fed.start.min() < 0 or fed.slot.min() < 1):
        raise PlanError("every row must have a slot >= 1, a start >= 0 and a count >= 1")
    if len(fed.slot) and fed.slot.max() >= _limit(facts.slots):
        raise PlanError(f"a row is of slot {fed.slot.max()}, {_range('slot', facts.slots)}")
    if shape.columns > _limit(facts.columns) or shape.columns * layout.block_tokens > _limit(None):
        raise PlanError(
            f"columns={shape.columns}: the table has {facts.columns or _limit(None) // layout.block_tokens}"
        )
    slots = np.sort(fed.slot)
    if (twice := slots[1:][slots[1:] == slots[:-1]]).size:  # kernels tell rows apart by their slots
        raise PlanError(f"slot {twice[0]} is fed by two rows of the step")
    needed = _shape(layout, fed, 0, len(slot_copies), len(block_copies), lookahead)
    # Room for entries is reserved in a shape, not needed by a plan.
    needed = dataclasses.replace(needed, table_entries=len(table_entries))
    for name in _SIZES:
        need, have = getattr(needed, name), getattr(shape, name)
        if need > have:
            raise PlanError(f"the step needs {name}={need}, its shape has {name}={have}")
    groups = np.full((shape.groups, shape.group_length), shape.tokens, np.int32)
    groups[fed.group, fed.place] = np.arange(len(fed.row))
    return StepPlan(
        seq_slot=_padded(fed.slot, shape.rows),
        seq_start=_padded(fed.start, shape.rows),
        seq_count=_padded(fed.count, shape.rows),
        seq_first=_padded(fed.first, shape.rows),
        token_seq=_padded(fed.row, shape.tokens),
        token_slot=_padded(fed.slot[fed.row], shape.tokens),
        token_position=_padded(fed.position, shape.tokens),
        flush_tokens=_padded(fed.flushes, shape.flushes, shape.tokens),
        group_tokens=groups,
        history_seqs=np.arange(shape.rows if shape.history else 0, dtype=np.int32),
        table_columns=np.arange(shape.columns, dtype=np.int32),
        **_extras(facts, shape, table_entries, slot_copies, block_copies),
        facts=facts,
    )


def next_decode(
    layout: CacheLayout,
    plan: StepPlan,
    shape: StepShape,
    starts: np.ndarray,
    *,
    size: CacheSize | None = None,
    table_entries: Sequence[tuple[int, int, int]] = (),
    slot_copies: Sequence[tuple[int, int]] = (),
    block_copies: Sequence[tuple[int, int]] = (),
    lookahead: int = 0,
) -> StepPlan:
    """`build_plan` for the rows of an earlier plan of this shape and size, one token each, at other starts.

    What does not depend on the starts is shared with that plan.

    Raises:
        PlanError: as `build_plan`; or the earlier plan was made for another layout or size.
    """
    rows = next_rows(layout, plan, shape, starts, size=size, lookahead=lookahead)
    return with_extras(rows, shape, table_entries, slot_copies, block_copies)


def next_rows(
    layout: CacheLayout, plan: StepPlan, shape: StepShape, starts: np.ndarray, *, size: CacheSize | None, lookahead: int
) -> StepPlan:
    """`next_decode` but for entries and copies, which are still those of the earlier plan. Raises `PlanError`."""
    facts = CacheFacts.of(layout, size)
    if facts is not plan.facts and facts != plan.facts:
        raise PlanError(f"the plan before was made for {plan.facts}, this one is for {facts}")
    columns = layout.blocks_for(int(starts.max(initial=0)) + 1 + lookahead)
    if columns > shape.columns:
        raise PlanError(f"the step needs columns={columns}, its shape has columns={shape.columns}")
    return plan._replace(seq_start=_padded(starts, shape.rows), token_position=_padded(starts, shape.tokens))


def check_extras(shape: StepShape, **needed: int) -> None:
    """Raises `PlanError` if the shape has no room for so many `table_entries`, `slot_copies` or `block_copies`."""
    for name, need in needed.items():
        if need > getattr(shape, name):
            raise PlanError(f"the step needs {name}={need}, its shape has {name}={getattr(shape, name)}")


def with_extras(
    plan: StepPlan,
    shape: StepShape,
    table_entries: Sequence[tuple[int, int, int]],
    slot_copies: Sequence[tuple[int, int]],
    block_copies: Sequence[tuple[int, int]],
) -> StepPlan:
    """A plan of this shape with these entries and copies in place of its own. Raises `PlanError` as `build_plan`."""
    check_extras(shape, table_entries=len(table_entries), slot_copies=len(slot_copies), block_copies=len(block_copies))
    assert plan.facts is not None
    return plan._replace(**_extras(plan.facts, shape, table_entries, slot_copies, block_copies))


def _extras(
    facts: CacheFacts,
    shape: StepShape,
    table_entries: Sequence[tuple[int, int, int]],
    slot_copies: Sequence[tuple[int, int]],
    block_copies: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """The fields of a plan that have nothing to do with its rows."""
    table = _ids("table_entries", table_entries, shape.table_entries, ("slot", "column", "block"), facts)
    slots = _ids("slot_copies", slot_copies, shape.slot_copies, ("slot", "slot"), facts)
    blocks = _ids("block_copies", block_copies, shape.block_copies, ("block", "block"), facts)
    return dict(
        table_slot=table[0], table_index=table[1], table_block=table[2],
        copy_slot_src=slots[0], copy_slot_dst=slots[1], copy_block_src=blocks[0], copy_block_dst=blocks[1],
    )  # fmt: skip


def _ids(
    name: str, ids: Sequence[tuple[int, ...]], count: int, kinds: tuple[str, ...], facts: CacheFacts
) -> np.ndarray:
    """[kinds, count] int32, padded with 0. Raises `PlanError`: the cache has no such unit."""
    out = np.zeros((len(kinds), count), np.int32)
    if not len(ids):
        return out
    try:
        array = np.array(ids, np.int64).reshape(-1, len(kinds))
    except OverflowError:
        raise PlanError(f"{name}: an id does not fit 64 bits") from None
    wrong = array.view(np.uint64) >= _limits(facts, kinds)  # those below 0, too
    if np.count_nonzero(wrong):  # the fastest question
        i, column = np.argwhere(wrong)[0]
        total = getattr(facts, kinds[column] + "s")
        raise PlanError(f"{name}[{i}] names {kinds[column]} {array[i, column]}, {_range(kinds[column], total)}")
    out[:, : len(array)] = array.T
    return out


@functools.lru_cache(maxsize=64)
def _limits(facts: CacheFacts, kinds: tuple[str, ...]) -> np.ndarray:
    return np.array([_limit(getattr(facts, kind + "s")) for kind in kinds], np.uint64)


def _limit(total: int | None) -> int:
    """What ids of units must be below: their number, or what fits int32."""
    return 2**31 if total is None else total


def _range(kind: str, total: int | None) -> str:
    return f"{kind} ids are 0..{_limit(total) - 1}" + (" (no size was given)" if total is None else "")


def _padded(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    if len(values) == size:
        return values.astype(np.int32)
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


_SIZES = tuple(field.name for field in dataclasses.fields(StepShape))
