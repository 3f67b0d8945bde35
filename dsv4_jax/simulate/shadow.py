"""What a device would hold: for every unit the name of its bytes, moved about by plans and transfers alone.

The manager's own books are not consulted. So a hit of blocks that another tenant has written, or that
hold other tokens than the prompt's, shows. Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..layout import CacheLayout
from ..manager.prefix.hashing import BlockHasher
from ..manager.transfers import TransferStage
from ..plan import StateSwapPlan, StepPlan, SwapPlan
from ..records import block_record, snapshot_record

__all__ = ["Content", "ShadowDevice", "Text", "TransferBytes"]


class Content(NamedTuple):
    """Names the bytes of a block, or of a slot's state.

    Attributes:
        tenant: who wrote them.
        tokens: they end there.
        digest: of the last full block up to there.
        author: of what follows that block: a request's index; -1 if nothing does.
    """

    tenant: object
    tokens: int
    digest: bytes
    author: int


class Text(NamedTuple):
    """All tokens of a request, as digests of its blocks (prompt and output)."""

    hasher: BlockHasher
    tenant: object
    author: int

    def content(self, tokens: int) -> Content:
        """Of the state after `tokens` tokens, and of the block that the last of them lies in."""
        full, rest = divmod(tokens, self.hasher.spec.block_tokens)
        digest = self.hasher.digests[full - 1] if full else self.hasher.root
        return Content(self.tenant, tokens, digest, self.author if rest else -1)


class TransferBytes(NamedTuple):
    """Bytes of each kind of copy between device and host."""

    swap_out: int = 0
    snapshot: int = 0
    swap_in: int = 0
    restore: int = 0


class ShadowDevice:
    """The device's and the host's units.

    Attributes:
        moved: bytes of each kind of transfer so far.
        foreign: units that a request was given though another tenant had written them.
        wrong: those with other tokens than the request's, of the same tenant.
    """

    def __init__(self, layout: CacheLayout):
        self._layout = layout
        self._record, self._state = block_record(layout).bytes, snapshot_record(layout).bytes
        self._blocks: dict[int, Content] = {}
        self._slots: dict[int, Content] = {}
        self._host_blocks: dict[int, Content] = {}
        self._host_slots: dict[int, Content] = {}
        self._table: dict[tuple[int, int], int] = {}
        self.moved = TransferBytes()
        self.foreign = self.wrong = 0

    def transfer(self, stages: Iterable[TransferStage]) -> tuple[int, set[int]]:
        """Runs the stages. Returns the bytes, and the blocks that came from the host."""
        before, loaded = sum(self.moved), set()
        for stage in stages:
            moved = TransferBytes(
                _move(stage.swap_out, self._blocks, self._host_blocks, outward=True) * self._record,
                _move(stage.snapshot, self._slots, self._host_slots, outward=True) * self._state,
                _move(stage.swap_in, self._blocks, self._host_blocks, outward=False) * self._record,
                _move(stage.restore, self._slots, self._host_slots, outward=False) * self._state,
            )
            self.moved = TransferBytes(*map(sum, zip(self.moved, moved, strict=True)))
            if stage.swap_in is not None:
                loaded.update(stage.swap_in.device_ids.tolist())
        return sum(self.moved) - before, loaded - {0}

    def begin(self, plan: StepPlan) -> None:
        """The plan's copies and table entries."""
        for held, source, target in (
            (self._slots, plan.copy_slot_src, plan.copy_slot_dst),
            (self._blocks, plan.copy_block_src, plan.copy_block_dst),
        ):
            pairs = [(d, held.get(s)) for s, d in zip(source.tolist(), target.tolist(), strict=True) if s > 0 and d > 0]
            for unit, content in pairs:
                _put(held, unit, content)
        entries = (plan.table_slot.tolist(), plan.table_index.tolist(), plan.table_block.tolist())
        for slot, column, block in zip(*entries, strict=True):
            if slot > 0:
                self._table[slot, column] = block

    def compute(self, text: Text, slot: int, start: int, count: int, *, check_blocks: bool) -> None:
        """One sequence of a step: checks the state it starts from (and the blocks before it), then writes its own."""
        block, end = self._layout.block_tokens, start + count
        if start:
            self._check(self._slots.get(slot), text.content(start))
        if check_blocks:
            for column in range(self._layout.blocks_for(start)):
                held = self._blocks.get(self._table.get((slot, column), 0))
                self._check(held, text.content(min((column + 1) * block, start)))
        for column in range(start // block, self._layout.blocks_for(end)):
            self._blocks[self._table[slot, column]] = text.content(min((column + 1) * block, end))
        self._slots[slot] = text.content(end)

    def _check(self, held: Content | None, wanted: Content) -> None:
        if held != wanted:
            foreign = held is not None and held.tenant != wanted.tenant
            self.foreign += foreign
            self.wrong += not foreign


def _move(
    plan: SwapPlan | StateSwapPlan | None, device: dict[int, Content], host: dict[int, Content], *, outward: bool
) -> int:
    """Copies; returns how many records."""
    if plan is None:
        return 0
    records = plan.host_ids.reshape(len(plan.device_ids), -1)[:, 0].tolist()  # a state's first stands for all of them
    pairs = [(d, h) for d, h in zip(plan.device_ids.tolist(), records, strict=True) if d > 0 and h > 0]
    for unit, record in pairs:
        if outward:
            _put(host, record, device.get(unit))
        else:
            _put(device, unit, host.get(record))
    return int((plan.host_ids > 0).sum())


def _put(held: dict[int, Content], unit: int, content: Content | None) -> None:
    if content is None:
        held.pop(unit, None)
    else:
        held[unit] = content
