"""The plan: everything one device step must know, as small int32 arrays. Imports no jax.

A step takes T scheduled tokens of B *sequences* (of one request each) through the model. Those of
a sequence are consecutive, in position order. All shapes are static and padded; the manager makes
the plan, the device only reads it.

Padding never touches live data: padded sequences and tokens have slot 0, padded token lists hold T
(one past the last token), padded table and copy entries name unit 0. Nothing holds -1.

A plan is made for caches of one layout and size and says for which (`CacheFacts`); no other takes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .checks import INT32_MAX, as_int, shown
from .errors import PlanError
from .layout import CacheLayout, CacheSize, check_layout

__all__ = [
    "CacheFacts",
    "OwnSwapPlan",
    "PackedPlan",
    "SpillPlan",
    "StateBlocksPlan",
    "StateSwapPlan",
    "StepPlan",
    "SwapPlan",
    "own_ids",
    "register_pytrees",
]

IntArray: TypeAlias = Any  # int32: a numpy array on the host, a jax array while a step is traced


@dataclasses.dataclass(frozen=True)
class CacheFacts:
    """What a plan knows of the cache it was made for: static, a pytree without leaves.

    (See `register_pytrees`.)

    Attributes:
        fingerprint: of the layout (`CacheLayout.fingerprint`).
        slots, blocks: units, the null unit included: valid ids are 0..n-1. (Blocks: those of all pool ranks.)
        columns: of the block table.

    The last three are None in a plan that was made without a size: any cache of its layout takes it.
    """

    fingerprint: str
    slots: int | None = None
    blocks: int | None = None
    columns: int | None = None

    @classmethod
    @functools.lru_cache(maxsize=64)  # a manager asks in every step
    def of(cls, layout: CacheLayout, size: CacheSize | None) -> CacheFacts:
        """Returns the facts of what `init_cache(layout, size)` makes (of a shard of it, if it is sharded)."""
        check_layout(layout)
        _register_beside_jax()
        if size is None:
            return cls(layout.fingerprint)
        layout.check_size(size)
        # A model without compressed layers has no leaf that would know of blocks.
        paged = any(leaf.scope == "block" for leaf in layout.leaves)
        blocks = size.total_blocks + 1 if paged else None
        return cls(layout.fingerprint, size.slot_units, blocks, size.max_blocks_per_request)

    def __str__(self) -> str:
        sizes = ((self.slots, "slots"), (self.blocks, "blocks"), (self.columns, "columns"))
        known = [f"{n} {what}" for n, what in sizes if n is not None]
        return ", ".join([f"layout {self.fingerprint[:12]}", *known])

    def check(self, cache: CacheFacts) -> None:
        """Raises `PlanError` unless a plan made for this takes a step of `cache`."""
        if self != cache and (self.slots is not None or self.fingerprint != cache.fingerprint):
            raise PlanError(f"the plan is for another cache: it was made for {self}; this cache has {cache}")


def own_ids(ids: Any, ranks: int) -> tuple[Any, Any]:
    """Returns the rank of each of these blocks or pages of all pool ranks, and its id there. Null stays null, of any
    rank."""
    return (ids - 1) % ranks, (ids - 1) // ranks + 1


class StepPlan(NamedTuple):
    """One step. All fields but the last are int32 arrays; shapes are static per compiled step.

    Plans may share arrays: do not write to them.

    Attributes:
        seq_slot: [B] slot of each sequence (0: padding).
        seq_start: [B] tokens of the sequence already in the cache.
        seq_count: [B] tokens of the sequence in this step.
        seq_first: [B] index of the sequence's first token.
        seq_stop: [B] tokens of the sequence that the plan has reserved room for, those of later steps (`advance`) among
            them: at least `seq_start + seq_count`.
        token_seq: [T] sequence of each token.
        token_slot: [T] slot of each token (0: padding).
        token_position: [T] absolute position of each token.
        flush_tokens: [F] tokens that may complete a CSA entry, padded with T. Every token at
            which (position + 1) % `layout.flush_ratio` == 0 is listed; others are ignored.
        group_tokens: [G, J] tokens of one HCA entry (of `layout.group_ratio` tokens), in position order, padded with
            T: every token stands in exactly one group and a group never crosses an entry boundary.
        history_seqs: [B] arange(B): sequences whose windows are taken as they were before the step. Empty [0] when
            none has more than 1 + draft_tokens tokens: then every window is still whole in its ring after the append.
        table_columns: [X] arange(X): block-table columns that any sequence of this step can see.
        table_slot, table_index, table_block: [D] block-table entries set before the step.
        copy_slot_src, copy_slot_dst: [C] slots copied before the step (state snapshots, forks).
        copy_block_src, copy_block_dst: [E] blocks copied before the step (forked partial blocks).
        facts: of the caches it is for, static; None: not known, any cache takes the plan.

    Copies read everything before they write anything, then table entries are set, then tokens run.
    """

    seq_slot: IntArray
    seq_start: IntArray
    seq_count: IntArray
    seq_first: IntArray
    seq_stop: IntArray
    token_seq: IntArray
    token_slot: IntArray
    token_position: IntArray
    flush_tokens: IntArray
    group_tokens: IntArray
    history_seqs: IntArray
    table_columns: IntArray
    table_slot: IntArray
    table_index: IntArray
    table_block: IntArray
    copy_slot_src: IntArray
    copy_slot_dst: IntArray
    copy_block_src: IntArray
    copy_block_dst: IntArray
    facts: CacheFacts | None = None

    @property
    def arrays(self) -> tuple[IntArray, ...]:
        """All fields but `facts`, the arrays, in their order."""
        return self[:-1]

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.token_slot.shape[0]

    @property
    def num_seqs(self) -> int:
        """B, padding included."""
        return self.seq_slot.shape[0]

    def pack(self) -> PackedPlan:
        """Returns the same plan as one array: what to pass to a jitted step.

        Every host array of a jitted call costs its own transfer; the fields are views of one.
        """
        return PackedPlan(
            np.concatenate(self.arrays, axis=None, dtype=np.int32),
            tuple(field.shape for field in self.arrays),
            self.facts,
        )

    def unpack(self) -> StepPlan:
        """Returns itself: so that a step takes either form."""
        return self

    def advance(self, steps: IntArray = 1) -> StepPlan:
        """Returns the plan of a later decode step of the same sequences: so many tokens further, nothing else to do.

        For K-step loops: every sequence has one token per step and the blocks of all K steps are reserved ahead. From
        where its reservation ends (`seq_stop`) a sequence is padding, as the blocks of that place may be others'. So
        is, after the first step, a sequence of several tokens in one. Works on traced arrays.

        Args:
            steps: 0 or more; 0 is this plan. Traced, it may be 0 as well, and what is done once must not be: `settled`
                plans alone are moved so.

        Raises:
            PlanError: `steps` is below 0 or no integer; or traced, and the plan has room for copies or table entries.
        """
        known = as_int(steps)
        if known is None and (np.ndim(steps) or np.dtype(getattr(steps, "dtype", object)).kind not in "iu"):
            raise PlanError(f"a plan is advanced by a number of steps, an integer, got {shown(steps)}")
        if known == 0:
            return self
        if known is None and any(x.shape[0] for x in (self.table_slot, self.copy_slot_src, self.copy_block_src)):
            raise PlanError("a plan is settled before it is advanced by a traced number: begin it once before the loop")
        if known is not None and known < 0:
            raise PlanError(f"a plan is advanced by 0 or more steps, got {known}")
        further = steps if known is None else np.int32(min(known, INT32_MAX))
        goes_on = (self.seq_count == 1) & (further < self.seq_stop - self.seq_start)
        here = self.settled().only(goes_on | (further == 0))
        live, live_seqs = (here.token_slot > 0).astype(np.int32), (here.seq_slot > 0).astype(np.int32)
        return here._replace(
            seq_start=self.seq_start + further * live_seqs, token_position=self.token_position + further * live
        )

    def only(self, sequences: Any) -> StepPlan:
        """Returns this plan with the other sequences as padding: of a loop those that have ended, say.

        Args:
            sequences: [B] bool. Works on traced arrays.

        Raises:
            PlanError: it is something else.
        """
        if getattr(sequences, "dtype", None) != np.bool_ or sequences.shape != self.seq_slot.shape:
            given = f"{getattr(sequences, 'dtype', type(sequences).__name__)}{[*np.shape(sequences)]}"
            raise PlanError(f"the sequences of a plan that stay are bool{[self.num_seqs]}, got {given}")
        kept = sequences.astype(np.int32)
        return self._replace(seq_slot=self.seq_slot * kept, token_slot=self.token_slot * kept[self.token_seq])

    def settled(self) -> StepPlan:
        """Returns this plan without copies and table entries: for a cache in which they are carried out."""
        empty = self.table_slot[:0]
        return self._replace(
            table_slot=empty,
            table_index=empty,
            table_block=empty,
            copy_slot_src=empty,
            copy_slot_dst=empty,
            copy_block_src=empty,
            copy_block_dst=empty,
        )


@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A `StepPlan` as one int32 vector; the shapes of its fields and its facts are static.

    A pytree with one leaf (see `register_pytrees`).
    """

    vector: IntArray
    shapes: tuple[tuple[int, ...], ...]
    facts: CacheFacts | None = None

    def unpack(self) -> StepPlan:
        """The plan; works on traced arrays (the fields are static slices)."""
        fields, start = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            fields.append(self.vector[start : start + size].reshape(shape))
            start += size
        return StepPlan(*fields, facts=self.facts)


class SwapPlan(NamedTuple):
    """Which blocks travel between the device cache and the host records, in either direction.

    Made and checked by `dsv4_jax.plan_swap`. A pair with an id <= 0 or beyond its pool is
    padding: it moves nothing.

    Attributes:
        device_ids: [N] int32 blocks of the cache.
        host_ids: [N] int32 pages.
    """

    device_ids: IntArray
    host_ids: IntArray


class OwnSwapPlan(NamedTuple):
    """A `SwapPlan` dealt out to the ranks of a pool axis by `tiers.swap_plan.own_swaps`, in ids of their own.

    Attributes:
        device_ids: [ranks * N] int32 blocks: N of each rank, in the ranks' order.
        host_ids: [ranks * N] int32 pages.
    """

    device_ids: IntArray
    host_ids: IntArray


class StateSwapPlan(NamedTuple):
    """Which slots' states travel between the device cache and the host's pages, in either direction.

    Made and checked by `dsv4_jax.plan_state_swap`. A pair whose slot or first page is <= 0 or beyond its pool is
    padding; of a state's other pages those that are hold nothing of it.

    Attributes:
        device_ids: [N] int32 slots of the cache.
        host_ids: [N, K] int32: the pages of each state, in order.
        num_tokens: [N] int32: how many tokens the request of each state has, at that state.
    """

    device_ids: IntArray
    host_ids: IntArray
    num_tokens: IntArray


class StateBlocksPlan(NamedTuple):
    """Which states travel between slots and blocks of the device, in either direction.

    A pair whose slot or first block is <= 0 or beyond its pool is padding.

    Attributes:
        slots: [N] int32 slots of the cache.
        blocks: [N, K] int32: the blocks of each state, in order: `dsv4_jax.records.state_blocks` of them.
        num_tokens: [N] int32: how many tokens the request of each state has, at that state: whole blocks of them.
    """

    slots: IntArray
    blocks: IntArray
    num_tokens: IntArray


class SpillPlan(NamedTuple):
    """Which states in blocks of the device go to pages of the host.

    Attributes:
        blocks: [N, K] int32: the blocks of each state, in order.
        host_ids: [N, L] int32: its pages, in order.
    """

    blocks: IntArray
    host_ids: IntArray


@functools.cache
def register_pytrees() -> None:
    """Tells jax which parts of plans are static. Modules that import jax call it, and this one once jax is there."""
    import jax  # hosts that only plan need no jax

    jax.tree_util.register_dataclass(PackedPlan, data_fields=["vector"], meta_fields=["shapes", "facts"])
    names = [field.name for field in dataclasses.fields(CacheFacts)]
    jax.tree_util.register_dataclass(CacheFacts, data_fields=[], meta_fields=names)


def _register_beside_jax() -> None:
    if "jax" in sys.modules:
        register_pytrees()


_register_beside_jax()
