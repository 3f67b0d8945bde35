"""What a device would hold: for every unit the name of its bytes, moved about by plans and transfers alone.

The manager's own books are not consulted. So a hit of blocks that another tenant has written, or that
hold other tokens than the prompt's, shows. Pure Python + numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np

from ..layout import CacheLayout
from ..manager.transfers import TransferStage
from ..plan import SpillPlan, StateBlocksPlan, StateSwapPlan, StepPlan, SwapPlan
from ..records import block_record, page_bytes
from .tokens import prefix_names

__all__ = ["Content", "ShadowDevice", "Text", "TransferBytes"]

# Names the bytes of a block, or of a slot's state: (tenant, tokens, name, author). They end after `tokens` tokens;
# `name` is that of the last full block up to there (see `prefix_names`); `author` wrote what follows that block: a
# request's index, -1 if nothing does. Plain tuples: a trace makes millions.
Content = tuple[object, int, int, int]
Page = tuple[Content, int, bool]  # of the host: of what, the how manieth, and whether of a state
T = TypeVar("T")


class Text:
    """All tokens of a request, prompt and output, as contents of blocks.

    Args:
        ids: [N] int32.
        tenant: the request's.
        author: the request's index.

    Attributes:
        names: of the full blocks.
        blocks: contents of the full blocks.
    """

    def __init__(self, ids: np.ndarray, block_tokens: int, tenant: object, author: int):
        self.names = prefix_names(ids, block_tokens, tenant)
        ends = range(block_tokens, len(ids) + 1, block_tokens)
        self.blocks: list[Content] = [(tenant, end, name, -1) for end, name in zip(ends, self.names, strict=True)]
        self._block_tokens, self._tenant, self._author = block_tokens, tenant, author

    def content(self, tokens: int) -> Content:
        """The content of the state after `tokens` tokens, and of the block that the last of them lies in."""
        full, rest = divmod(tokens, self._block_tokens)
        if not rest and full:
            return self.blocks[full - 1]
        return self._tenant, tokens, self.names[full - 1] if full else 0, self._author


class TransferBytes(NamedTuple):
    """Bytes of each kind of copy between device and host."""

    swap_out: int = 0
    snapshot: int = 0
    swap_in: int = 0
    restore: int = 0

    def plus(self, other: TransferBytes) -> TransferBytes:
        return TransferBytes(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def stored(self) -> int:
        """Bytes that go to the host."""
        return self.swap_out + self.snapshot

    @property
    def loaded(self) -> int:
        """Bytes that come from the host."""
        return self.swap_in + self.restore


class ShadowDevice:
    """The device's and the host's units.

    Attributes:
        moved: bytes of each kind of transfer so far.
        foreign: units that a request was given though another tenant had written them.
        wrong: those with other tokens than the request's, of the same tenant.
    """

    def __init__(self, layout: CacheLayout):
        self._block = layout.block_tokens
        self._record, self._page = block_record(layout).bytes, page_bytes(layout)
        self._blocks: dict[int, Content] = {}
        self._slots: dict[int, Content] = {}
        self._pages: dict[int, Page] = {}
        self._states: dict[int, Page] = {}  # blocks that hold parts of states
        self._table: dict[int, list[int]] = {}  # by slot
        self.moved = TransferBytes()
        self.foreign = self.wrong = 0

    def transfer(self, stages: Iterable[TransferStage]) -> tuple[TransferBytes, set[int]]:
        """Runs the stages. Returns the bytes, and the blocks that came from the host."""
        before, loaded = self.moved, set[int]()
        for stage in stages:
            moved = (
                _move(stage.swap_out, self._blocks, self._pages, outward=True) * self._record,
                (_move(stage.snapshot, self._slots, self._pages, outward=True) + self._spill(stage.spill_states))
                * self._page,
                self._put_and_swap_in(stage) * self._record,
                _move(stage.restore, self._slots, self._pages, outward=False) * self._page,
            )
            self._get_states(stage.get_states)
            self.moved = self.moved.plus(TransferBytes(*moved))
            if stage.swap_in is not None:
                loaded.update(stage.swap_in.device_ids.tolist())
        return TransferBytes(*(now - then for now, then in zip(self.moved, before, strict=True))), loaded - {0}

    def _put_and_swap_in(self, stage: TransferStage) -> int:
        if (plan := stage.put_states) is not None:
            for slot, blocks in zip(plan.slots.tolist(), plan.blocks.tolist(), strict=True):
                content = self._slots.get(slot)
                for i, block in enumerate(blocks if slot else ()):
                    self._blocks.pop(block, None)
                    _put(self._states, block, None if content is None else (content, i, True))
        if stage.swap_in is not None:
            for block in stage.swap_in.device_ids.tolist():
                self._states.pop(block, None)
        return _move(stage.swap_in, self._blocks, self._pages, outward=False)

    def _state_in(self, blocks: list[int]) -> Content | None:
        """The state that these blocks hold together, in order."""
        first = self._states.get(blocks[0])
        whole = first is not None and all(self._states.get(b) == (first[0], i, True) for i, b in enumerate(blocks))
        return first[0] if first is not None and whole else None

    def _spill(self, plan: SpillPlan | None) -> int:
        if plan is None:
            return 0
        for blocks, pages in zip(plan.blocks.tolist(), plan.host_ids.tolist(), strict=True):
            content = self._state_in(blocks)
            for i, page in enumerate(pages if blocks[0] else ()):
                _put(self._pages, page, None if content is None else (content, i, True))
        return int((plan.host_ids > 0).sum())

    def _get_states(self, plan: StateBlocksPlan | None) -> None:
        if plan is not None:
            for slot, blocks in zip(plan.slots.tolist(), plan.blocks.tolist(), strict=True):
                if slot:
                    _put(self._slots, slot, self._state_in(blocks))

    def sums(self, pages: Iterable[int]) -> tuple[bytes, ...]:
        """16 bytes for each page of the host, that differ where what lies there differs."""
        return tuple(hash(self._pages.get(page)).to_bytes(16, "little", signed=True) for page in pages)

    def receive(self, other: ShadowDevice, source: Iterable[int], pages: Iterable[int]) -> None:
        """Pages of another's host are here, in these pages."""
        for theirs, ours in zip(source, pages, strict=True):
            _put(self._pages, ours, other._pages.get(theirs))

    def begin(self, plan: StepPlan) -> None:
        """Carries out the plan's copies and table entries."""
        for held, source, target in (
            (self._slots, plan.copy_slot_src, plan.copy_slot_dst),
            (self._blocks, plan.copy_block_src, plan.copy_block_dst),
        ):
            pairs = [(d, held.get(s)) for s, d in zip(source.tolist(), target.tolist(), strict=True) if s > 0 and d > 0]
            for unit, content in pairs:
                _put(held, unit, content)
        set_here = np.flatnonzero(plan.table_slot > 0)
        entries = (x[set_here].tolist() for x in (plan.table_slot, plan.table_index, plan.table_block))
        for slot, column, block in zip(*entries, strict=True):
            row = self._table.setdefault(slot, [])
            if column >= len(row):
                row += [0] * (column + 1 - len(row))
            row[column] = block

    def compute(self, text: Text, slot: int, start: int, count: int, *, check_blocks: bool) -> None:
        """Computes one sequence of a step: checks the state it starts from (and the blocks before it), then writes its
        own."""
        block, end, row = self._block, start + count, self._table[slot]
        if start:
            self._check([self._slots.get(slot)], [text.content(start)])
        full, rest = divmod(start, block)
        if check_blocks:
            wanted = text.blocks[:full] + ([text.content(start)] if rest else [])
            self._check([self._blocks.get(unit) for unit in row[: len(wanted)]], wanted)
        done = end // block
        self._blocks.update(zip(row[full:done], text.blocks[full:done], strict=True))
        if end % block:
            self._blocks[row[done]] = text.content(end)
        for unit in row[full : -(-end // block)] if self._states else ():
            self._states.pop(unit, None)
        self._slots[slot] = text.content(end)

    def _check(self, held: list[Content | None], wanted: list[Content]) -> None:
        if held != wanted:
            for has, want in itertools.zip_longest(held, wanted):
                if has != want:
                    foreign = has is not None and has[0] != want[0]
                    self.foreign += foreign
                    self.wrong += not foreign


def _move(
    plan: SwapPlan | StateSwapPlan | None,
    device: dict[int, Content],
    host: dict[int, Page],
    *,
    outward: bool,
) -> int:
    """Copies; returns how many pages. Units whose pages do not hold one thing, in order, hold nothing then."""
    if plan is None:
        return 0
    state = isinstance(plan, StateSwapPlan)
    rows = plan.host_ids.reshape(len(plan.device_ids), -1).tolist()
    for unit, row in zip(plan.device_ids.tolist(), rows, strict=True):
        pages = [page for page in row if page > 0]
        if unit <= 0 or not pages:
            continue
        if outward:
            content = device.get(unit)
            for i, page in enumerate(pages):
                _put(host, page, None if content is None else (content, i, state))
        else:
            first = host.get(pages[0])
            whole = first is not None and all(host.get(page) == (first[0], i, state) for i, page in enumerate(pages))
            _put(device, unit, first[0] if first is not None and whole else None)
    return int((plan.host_ids > 0).sum())


def _put(held: dict[int, T], unit: int, content: T | None) -> None:
    if content is None:
        held.pop(unit, None)
    else:
        held[unit] = content
