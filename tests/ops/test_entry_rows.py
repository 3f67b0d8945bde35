"""entry_rows against plain Python. Subclass `EntryRowsTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.ops import entry_rows

from .op_test import OpTest

SIZES = dict(base=7, per_block=6, blocks=9)
jit_entry_rows = jax.jit(entry_rows, static_argnames=(*SIZES, "implementation"))


class EntryRowsTest(OpTest):
    op = "entry_rows"

    def test_equals_the_definition_and_stays_within_the_pool(self) -> None:
        """Hostile ids, too: beyond the table, of slots that do not exist, of blocks that do not exist."""
        rng = np.random.default_rng(0)
        entries = rng.integers(0, 6 * 5, (4, 200)).astype(np.int32)
        entries[0, :3] = -5, 6 * 5, 2**31 - 1
        slots, table = np.array([1, 0, -3, 99], np.int32), rng.integers(0, 9, (3, 5)).astype(np.int32)
        table[1, :2] = -1, 2**31 - 1
        got = np.asarray(jit_entry_rows(entries, slots, table, **SIZES, implementation=self.implementation))
        entries = np.maximum(entries, 0)
        block = table[np.clip(slots, 0, 2)[:, None], np.minimum(entries // 6, 4)]
        np.testing.assert_array_equal(got, 7 + 6 * np.clip(block, 0, 8) + entries % 6)


class TestEntryRows(EntryRowsTest):
    implementation = "xla"


def test_refuses() -> None:
    ids, table = np.zeros((2, 3), np.int32), np.zeros((4, 5), np.int32)
    with pytest.raises(ShapeError, match=r"slots is int32 \[2, 3\], expected int32 \[2\]"):
        entry_rows(ids, ids, table, **SIZES)
    with pytest.raises(ShapeError, match=r"blocks must be an integer from 1 to .* got 2147483647"):
        entry_rows(ids, ids[:, 0], table, base=0, per_block=2, blocks=2**31 - 1)
    with pytest.raises(ShapeError, match="table has no slots or no columns"):
        entry_rows(ids, ids[:, 0], table[:0], **SIZES)
