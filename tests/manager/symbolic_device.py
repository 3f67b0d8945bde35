"""A device that stores token ids instead of rows: whatever a step reads must be the history of its request.

Blocks hold the tokens written to them, slots all tokens fed to their request so far, in order. Both are
(namespace, tokens): bytes of another tenant are wrong even if the tokens are the same.
"""

from __future__ import annotations

import numpy as np

from dsv4_jax import CacheLayout, CacheSize
from dsv4_jax.manager import HostSize
from dsv4_jax.manager.transfers import Transfers
from dsv4_jax.plan import SpillPlan, StateBlocksPlan, StateSwapPlan, StepPlan, SwapPlan
from dsv4_jax.records import state_blocks, state_pages

State = tuple[object, tuple[int, ...]]
Record = tuple[State, int, int, type]  # a page: whose, which of its pages, of how many, and of what
# What a step that never ran should have written: it may be copied about, but no step may read it.
UNWRITTEN: State = ("never written", ())


class SymbolicDevice:
    """Runs plans and transfers; raises AssertionError where a real device would compute something wrong.

    Along a pool axis too: no copy of a block goes from one rank to another, and a table's columns are dealt out.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize, host: HostSize):
        self.layout, self.size, self.ranks = layout, size, size.pool_ranks
        slots = size.num_slots + size.num_snapshots + 1
        self.table = np.zeros((slots, size.max_blocks_per_request), int)
        self.pages: dict[int, Record] = {}
        self.host = host
        self.wipe()

    def wipe(self) -> None:
        """The device arrays are freed and made anew; host records stay."""
        self.blocks: dict[int, State] = {}
        self.states: dict[int, State] = {}
        self.table[:] = 0

    def transfer(self, transfers: Transfers, max_calls: int | None = None) -> int:
        """Runs the calls, the first `max_calls` of them: then it breaks off. Returns how many units moved."""
        moved = 0
        for i, (name, plan) in enumerate(transfers.calls()):
            if i == max_calls:
                break
            if name in ("put_states", "get_states", "spill_states"):
                moved += self.state_blocks(name, plan) if plan is not None else 0
                continue
            source, target, outward = {
                "swap_out": (self.blocks, self.pages, True),
                "snapshot": (self.states, self.pages, True),
                "swap_in": (self.pages, self.blocks, False),
                "restore": (self.pages, self.states, False),
            }[name]
            if plan is None:
                continue
            pairs = _pairs(plan)
            written = [unit for d, records, _ in pairs for unit in (records if outward else [d])]
            assert len(set(written)) == len(written), "a unit is written twice in one call"
            if isinstance(plan, StateSwapPlan):
                assert all(len(records) == state_pages(self.layout, n) for _, records, n in pairs)
            assert all(0 < page <= self.host.num_pages * self.ranks for _, pages, _ in pairs for page in pages)
            assert all(len({page % self.ranks for page in pages}) == 1 for _, pages, _ in pairs)
            if isinstance(plan, SwapPlan):
                assert all((device - page) % self.ranks == 0 for device, (page,), _ in pairs)
            what = type(plan)
            values = [source.get(d, UNWRITTEN) if outward else whole(source, r, what) for d, r, _ in pairs]
            for value, (device, records, num_tokens) in zip(values, pairs, strict=True):
                if isinstance(plan, StateSwapPlan):
                    value = self.state_at(value, num_tokens)
                if outward:
                    target.update((page, (value, i, len(records), what)) for i, page in enumerate(records))
                else:
                    target[device] = value
            moved += len(pairs)
        return moved

    def state_blocks(self, name: str, plan: StateBlocksPlan | SpillPlan) -> int:
        """Runs a call of states in blocks: a part of one is what a page of the host would be."""
        if isinstance(plan, SpillPlan):
            pairs = [(0, *pair, 0) for pair in zip(plan.blocks.tolist(), plan.host_ids.tolist(), strict=True)]
        else:
            columns = (plan.slots.tolist(), plan.blocks.tolist(), plan.num_tokens.tolist())
            pairs = [(slot, blocks, [], tokens) for slot, blocks, tokens in zip(*columns, strict=True)]
        pairs = [pair for pair in pairs if pair[1][0]]
        written = [u for slot, b, p, _ in pairs for u in (b if name == "put_states" else p or [slot])]
        assert len(set(written)) == len(written) and min(written) > 0, "a unit is written twice in one call"
        assert all(len(blocks) == state_blocks(self.layout) and min(blocks) > 0 for _, blocks, _, _ in pairs)
        if name == "put_states":
            for slot, blocks, _, tokens in pairs:
                value = self.state_at(self.states.get(slot, UNWRITTEN), tokens)
                self.blocks.update({b: ("part of a state", (value, i)) for i, b in enumerate(blocks)})
            return len(pairs)
        values = []
        for _, blocks, _, tokens in pairs:
            parts = [self.blocks.get(block, UNWRITTEN) for block in blocks]
            value = parts[0][1][0] if parts[0][0] == "part of a state" else UNWRITTEN
            same = parts == [("part of a state", (value, i)) for i in range(len(blocks))]
            value = value if same else UNWRITTEN
            values.append(value if isinstance(plan, SpillPlan) else self.state_at(value, tokens))
        for value, (slot, _, pages, _) in zip(values, pairs, strict=True):
            if pages:
                self.pages.update((page, (value, i, len(pages), StateSwapPlan)) for i, page in enumerate(pages))
            else:
                self.states[slot] = value
        return len(pairs)

    def state_at(self, state: State, num_tokens: int) -> State:
        """What its rows are at a position: rings reach as far back as drafts are rejected, and not ahead."""
        known = 0 <= len(state[1]) - num_tokens <= self.layout.draft_tokens
        return (state[0], state[1][:num_tokens]) if known else UNWRITTEN

    def step(self, plan: StepPlan, spaces: dict[int, object], tokens: dict[int, list[int]]) -> None:
        """One plan. `spaces` and `tokens`: the namespace and all tokens of the request in each slot."""
        for memory, sources, targets in (
            (self.states, plan.copy_slot_src, plan.copy_slot_dst),
            (self.blocks, plan.copy_block_src, plan.copy_block_dst),
        ):
            pairs = [(s, d) for s, d in zip(sources.tolist(), targets.tolist(), strict=True) if d]
            assert len({d for _, d in pairs}) == len(pairs), "a unit is the target of two copies"
            assert memory is self.states or all((s - d) % self.ranks == 0 for s, d in pairs)
            memory.update([(d, memory.get(s, UNWRITTEN)) for s, d in pairs])
        for slot, column, block in zip(plan.table_slot, plan.table_index, plan.table_block, strict=True):
            if slot:
                assert (block - 1 - column) % self.ranks == 0, "another rank's block"
                self.table[slot, column] = block
        size, written = self.layout.block_tokens, set()
        rows = zip(plan.seq_slot.tolist(), plan.seq_start.tolist(), plan.seq_count.tolist(), strict=True)
        for slot, start, count in rows:
            if not slot:
                continue
            history, space = tuple(tokens[slot]), spaces[slot]
            if start:
                where, state = self.states.get(slot, UNWRITTEN)
                assert (where, state[:start]) == (space, history[:start]), "another request's state"
                assert len(state) - start <= (self.layout.draft_tokens and 1 + self.layout.draft_tokens), "too far"
            for column in range(-(-(start + count) // size)):
                block, low = int(self.table[slot, column]), column * size
                assert block > 0
                kept = history[low : min(start, low + size)]
                if kept:
                    where, content = self.blocks.get(block, UNWRITTEN)
                    assert (where, content[: len(kept)]) == (space, kept), "another request's block"
                if start + count > max(start, low) and low + size > start:
                    assert block not in written, "a block is written by two rows"
                    written.add(block)
                    self.blocks[block] = space, history[low : min(start + count, low + size)]
            self.states[slot] = space, history[: start + count]


def _pairs(plan: SwapPlan | StateSwapPlan) -> list[tuple[int, tuple[int, ...], int]]:
    """(device unit, host records, tokens) of every copy."""
    tokens = plan.num_tokens.tolist() if isinstance(plan, StateSwapPlan) else [0] * len(plan.device_ids)
    records = [tuple(filter(None, np.atleast_1d(ids).tolist())) for ids in plan.host_ids]
    pairs = [pair for pair in zip(plan.device_ids.tolist(), records, tokens, strict=True) if pair[0] or pair[1]]
    assert all(device > 0 and records and min(records) > 0 for device, records, _ in pairs)
    return pairs


def whole(source: dict[int, Record], pages: tuple[int, ...], what: type) -> State:
    """What these pages hold together; UNWRITTEN if they are not those of one unit, in order."""
    parts = [source.get(page, (UNWRITTEN, 0, 0, what)) for page in pages]
    whole = parts[0][0]
    return whole if parts == [(whole, i, len(pages), what) for i in range(len(pages))] else UNWRITTEN
