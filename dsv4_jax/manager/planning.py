"""Builds `StepPlan`s: which tokens of which sequences, padded to a static shape. Pure numpy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..checks import INT32_MAX, check_integer, shown
from ..errors import PlanError
from ..layout import CacheLayout, CacheSize
from ..plan import CacheFacts, StepPlan
from .step_shape import StepSequence, StepShape, StepTokens, int_rows

__all__ = ["build_plan", "check_extras", "next_decode", "next_sequences", "with_extras"]


def build_plan(
    layout: CacheLayout,
    sequences: Sequence[StepSequence] | np.ndarray | StepTokens,
    shape: StepShape,
    *,
    size: CacheSize | None = None,
    table_entries: Sequence[tuple[int, int, int]] | np.ndarray = (),
    slot_copies: Sequence[tuple[int, int]] | np.ndarray = (),
    block_copies: Sequence[tuple[int, int]] | np.ndarray = (),
    steps: int = 1,
) -> StepPlan:
    """Returns the padded plan of these sequences.

    Args:
        sequences: of the step, at least one token each; their tokens follow each other in this order.
        shape: static sizes; must fit.
        size: of the cache. Without it the plan is for caches of any size, and ids are only known to be int32 >= 0.
        table_entries: (slot, column, block) triples.
        slot_copies, block_copies: (source, destination) pairs.
        steps: that the plan serves, each of as many tokens of each sequence.

    Raises:
        PlanError: the sequences do not fit the shape (names the size that is too small), or one has
            less than one token, starts before position 0, ends beyond those of int32, or has no slot, or one that
            another has, too;
            the cache has no such slot, block or column; two copies fill one unit; or what is given are no rows of so
            many integers.
        LayoutError: `layout` or `size` is none.
    """
    facts = CacheFacts.of(layout, size)
    if not isinstance(shape, StepShape):
        raise PlanError(f"shape must be a StepShape, got {shown(shape)}")
    steps = check_integer("steps", steps, 1, INT32_MAX, error=PlanError)
    table_entries = int_rows("table_entries", table_entries, 3)
    slot_copies, block_copies = int_rows("slot_copies", slot_copies, 2), int_rows("block_copies", block_copies, 2)
    step = sequences if isinstance(sequences, StepTokens) else StepTokens.of(layout, sequences, max_tokens=shape.tokens)
    if len(step.slot) and step.slot.max() >= _limit(facts.slots):
        raise PlanError(f"a sequence is of slot {step.slot.max()}, {_range('slot', facts.slots)}")
    if shape.columns > _limit(facts.columns) or shape.columns * layout.block_tokens > _limit(None):
        raise PlanError(
            f"columns={shape.columns}: the table has {facts.columns or _limit(None) // layout.block_tokens}"
        )
    slots = np.sort(step.slot)
    if (twice := slots[1:][slots[1:] == slots[:-1]]).size:  # kernels tell sequences apart by their slots
        raise PlanError(f"slot {twice[0]} is that of two sequences of the step")
    needed = step.shape(
        layout, table_entries=0, slot_copies=len(slot_copies), block_copies=len(block_copies), steps=steps
    )
    for name in _SIZES:
        # Room for entries is reserved in a shape, not needed by a plan.
        need = len(table_entries) if name == "table_entries" else getattr(needed, name)
        have = getattr(shape, name)
        if need > have:
            raise PlanError(f"the step needs {name}={need}, its shape has {name}={have}")
    groups = np.full((shape.groups, shape.group_length), shape.tokens, np.int32)
    groups[step.group, step.place] = np.arange(len(step.sequence))
    return StepPlan(
        seq_slot=_padded(step.slot, shape.sequences),
        seq_start=_padded(step.start, shape.sequences),
        seq_count=_padded(step.count, shape.sequences),
        seq_first=_padded(step.first, shape.sequences),
        seq_stop=_padded(step.stop(steps), shape.sequences),
        token_seq=_padded(step.sequence, shape.tokens),
        token_slot=_padded(step.slot[step.sequence], shape.tokens),
        token_position=_padded(step.position, shape.tokens),
        flush_tokens=_padded(step.flushes, shape.flushes, shape.tokens),
        group_tokens=groups,
        history_seqs=np.arange(shape.sequences if shape.history else 0, dtype=np.int32),
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
    steps: int = 1,
) -> StepPlan:
    """Does `build_plan` for the sequences of an earlier plan of this shape and size, one token each, at other starts.

    What does not depend on the starts is shared with that plan.

    Raises:
        PlanError: as `build_plan`; or the earlier plan was made for another layout or size.
    """
    plan = next_sequences(layout, plan, shape, starts, size=size, steps=steps)
    return with_extras(plan, shape, table_entries, slot_copies, block_copies)


def next_sequences(
    layout: CacheLayout, plan: StepPlan, shape: StepShape, starts: np.ndarray, *, size: CacheSize | None, steps: int
) -> StepPlan:
    """`next_decode` but for entries and copies, which are still those of the earlier plan. Raises `PlanError`."""
    facts = CacheFacts.of(layout, size)
    if facts is not plan.facts and facts != plan.facts:
        raise PlanError(f"the plan before was made for {plan.facts}, this one is for {facts}")
    stop = int(starts.max(initial=0)) + steps
    columns = layout.blocks_for(stop)
    if stop > INT32_MAX:
        raise PlanError(f"a sequence would have {stop} tokens: positions are int32 and reach {INT32_MAX - 1}")
    if columns > shape.columns:
        raise PlanError(f"the step needs columns={columns}, its shape has columns={shape.columns}")
    return plan._replace(
        seq_start=_padded(starts, shape.sequences),
        seq_stop=_padded(starts + steps, shape.sequences),
        token_position=_padded(starts, shape.tokens),
    )


def check_extras(shape: StepShape, **needed: int) -> None:
    """Raises `PlanError` if the shape has no room for so many `table_entries`, `slot_copies` or `block_copies`."""
    for name, need in needed.items():
        if need > getattr(shape, name):
            raise PlanError(f"the step needs {name}={need}, its shape has {name}={getattr(shape, name)}")


def with_extras(
    plan: StepPlan,
    shape: StepShape,
    table_entries: Sequence[tuple[int, int, int]] | np.ndarray,
    slot_copies: Sequence[tuple[int, int]],
    block_copies: Sequence[tuple[int, int]],
) -> StepPlan:
    """Returns a plan of this shape with these entries and copies in place of its own. Raises `PlanError` as
    `build_plan`."""
    check_extras(shape, table_entries=len(table_entries), slot_copies=len(slot_copies), block_copies=len(block_copies))
    assert plan.facts is not None
    return plan._replace(**_extras(plan.facts, shape, table_entries, slot_copies, block_copies))


def _extras(
    facts: CacheFacts,
    shape: StepShape,
    table_entries: Sequence[tuple[int, int, int]] | np.ndarray,
    slot_copies: Sequence[tuple[int, int]] | np.ndarray,
    block_copies: Sequence[tuple[int, int]] | np.ndarray,
) -> dict[str, Any]:
    """The fields of a plan that have nothing to do with its sequences."""
    table = _ids("table_entries", table_entries, shape.table_entries, ("slot", "column", "block"), facts)
    slots = _ids("slot_copies", slot_copies, shape.slot_copies, ("slot", "slot"), facts)
    blocks = _ids("block_copies", block_copies, shape.block_copies, ("block", "block"), facts)
    return dict(
        table_slot=table[0],
        table_index=table[1],
        table_block=table[2],
        copy_slot_src=slots[0],
        copy_slot_dst=slots[1],
        copy_block_src=blocks[0],
        copy_block_dst=blocks[1],
    )


def _ids(
    name: str, ids: Sequence[tuple[int, ...]] | np.ndarray, count: int, kinds: tuple[str, ...], facts: CacheFacts
) -> np.ndarray:
    """[kinds, count] int32, padded with 0. Raises `PlanError`: no ids, or the cache has no such unit."""
    out = np.zeros((len(kinds), count), np.int32)
    if not len(ids):
        return out
    array = int_rows(name, ids, len(kinds))
    wrong = array.view(np.uint64) >= _limits(facts, kinds)  # those below 0, too
    if np.count_nonzero(wrong):  # the fastest question
        i, column = np.argwhere(wrong)[0]
        total = getattr(facts, kinds[column] + "s")
        raise PlanError(f"{name}[{i}] names {kinds[column]} {array[i, column]}, {_range(kinds[column], total)}")
    if len(kinds) == 2 and len(array) > 1:  # copies; null is padding
        filled = np.sort(array[array[:, 1] > 0, 1])
        if (twice := filled[1:][filled[1:] == filled[:-1]]).size:
            raise PlanError(f"{name}: two of them fill {kinds[1]} {twice[0]}")
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
