"""Ids that do not exist, on the CPU: the reference, what `begin` does, and the Pallas kernels interpreted."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_jax.layout import CacheLayout

from .hostile import SIZE, SMALL, HostilePlans, by_unit, jit_begin, plan_of, random_cache, spoiled


class TestReference(HostilePlans):
    implementation = "xla"
    cfg, formats = SMALL, ("f32", "f32")
    steps = (("verify", "online"), ("chunk", "raw"))
    plans = 10


@pytest.mark.slow
class TestPallas(HostilePlans):
    implementation = "pallas"
    reads = "xla"
    cfg, formats = SMALL, ("f32", "f32")
    steps = (("chunk", "online"),)
    plans = 5
    # Here the interpreter itself keeps ids in bounds.
    test_attended_rows_are_the_nearest = test_rows_are_appended_where_they_exist = None


del HostilePlans


def test_begin_copies_and_tables_only_what_exists() -> None:
    """A copy from or to a unit that does not exist moves nothing, nor is an entry beyond the table set."""
    layout, rng = CacheLayout(SMALL, draft_tokens=1), np.random.default_rng(8)
    cache, good = random_cache(layout, 9), plan_of(layout, "verify")
    before, table = by_unit(layout, cache), np.asarray(cache.block_table)
    for _ in range(10):
        slots, blocks = (rng.permutation(n)[: len(good.copy_slot_src)] for n in (SIZE.slot_units, SIZE.block_units))
        entries = len(good.table_slot)
        plan = good._replace(
            copy_slot_src=spoiled(rng, slots, SIZE.slot_units),
            copy_slot_dst=spoiled(rng, slots[::-1]),
            copy_block_src=spoiled(rng, blocks, SIZE.block_units),
            copy_block_dst=spoiled(rng, blocks[::-1]),
            table_slot=spoiled(rng, rng.permutation(SIZE.slot_units)[:entries], SIZE.slot_units),
            table_index=spoiled(rng, rng.integers(0, 2, entries), 2),
            table_block=rng.integers(0, 5, entries, np.int32),
        )
        want = {name: data.copy() for name, data in before.items()}
        for leaf in layout.leaves:
            if leaf.scope == "table":
                continue
            block = leaf.scope == "block"
            pairs = (plan.copy_block_src, plan.copy_block_dst) if block else (plan.copy_slot_src, plan.copy_slot_dst)
            units = SIZE.block_units if block else SIZE.slot_units
            for src, dst in zip(*pairs, strict=True):
                if 0 <= src < units and 0 < dst < units:
                    want[leaf.name][:, dst] = before[leaf.name][:, src]
        tabled = table.copy()
        for slot, column, block in zip(plan.table_slot, plan.table_index, plan.table_block, strict=True):
            if 0 <= slot < SIZE.slot_units and 0 <= column < SIZE.max_blocks_per_request:
                tabled[slot, column] = block
        after = jit_begin(cache, plan)
        for name, data in by_unit(layout, after).items():
            np.testing.assert_array_equal(data, want[name], err_msg=name)
        np.testing.assert_array_equal(after.block_table, tabled)
