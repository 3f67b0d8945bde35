"""Swap plans: what is refused, how, and what comes out; records: where every byte of them lies."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.errors import PlanError, SwapPlanError
from dsv4_jax.layout import CacheLayout
from dsv4_jax.records import ALIGNMENT, block_record, snapshot_record
from dsv4_jax.tiers.swap_plan import plan_swap


def plan(direction, device, host, **options):
    return plan_swap(direction, device, host, num_device=9, num_host=5, **options)


@pytest.mark.parametrize(
    ("direction", "device", "host", "side", "index", "value", "says"),
    [
        ("out", [1, 0], [1, 2], "device", 1, 0, "device id 0 at index 1 is the null id (valid ids are 1..9)"),
        ("in", [1, 2], [0, 2], "host", 0, 0, "host id 0 at index 0 is the null id (valid ids are 1..5)"),
        ("in", [1, 10], [1, 2], "device", 1, 10, "out of range (valid ids are 1..9)"),
        ("out", [1, -1], [1, 2], "device", 1, -1, "device id -1 at index 1 is out of range"),
        ("out", [1, 2, 3], [1, 2, 6], "host", 2, 6, "host id 6 at index 2 is out of range (valid ids are 1..5)"),
        ("out", [1, 2**40], [1, 2], "device", 1, 2**40, "out of range"),
        ("out", [1, 1.5], [1, 2], "device", 1, 1.5, "not an integer"),
        ("out", [True], [1], "device", 0, True, "not an integer"),
        ("out", [1, 2, 3], [4, 2, 4], "host", 2, 4, "is written twice, first at index 0"),
        ("in", [7, 7], [1, 2], "device", 1, 7, "is written twice, first at index 0"),
    ],
)
def test_bad_ids_are_named(direction, device, host, side, index, value, says):
    with pytest.raises(SwapPlanError) as caught:
        plan(direction, device, host)
    error = caught.value
    assert (error.side, error.index, error.value) == (side, index, value) and says in str(error)
    assert isinstance(error, PlanError | ValueError)


def test_bad_lists():
    with pytest.raises(SwapPlanError, match="2 device ids for 1 host ids"):
        plan("out", [1, 2], [1])
    with pytest.raises(SwapPlanError, match="3 ids do not fit a plan of length 2"):
        plan("out", [1, 2, 3], [1, 2, 3], length=2)
    with pytest.raises(SwapPlanError, match="'sideways'"):
        plan("sideways", [1], [1])


def test_padding_and_lengths():
    made = plan("in", np.array([3, 9, 1]), (2, 2, 5))  # one record may fill two blocks
    assert made.device_ids.tolist() == [3, 9, 1, 0] and made.host_ids.tolist() == [2, 2, 5, 0]
    assert made.device_ids.dtype == made.host_ids.dtype == np.int32
    assert [len(plan("out", [], [], length=n).host_ids) for n in (None, 0, 3)] == [0, 0, 3]
    assert [len(plan("in", range(1, n + 1), [1] * n).host_ids) for n in (1, 2, 5, 8)] == [1, 2, 8, 8]


def test_flash_record():
    """All 21 CSA and 20 HCA layers of Flash: the block's bytes, and 8 to pad each HCA layer's scales."""
    layout = CacheLayout(DSV4Config.flash())
    record = block_record(layout)
    used = layout.bytes_per_block + 20 * 8
    assert record.bytes == -(-used // ALIGNMENT) * ALIGNMENT and record.bytes % ALIGNMENT == 0
    assert record.pieces[-1].offset + record.pieces[-1].layers * record.pieces[-1].stride == used
    assert all(piece.offset % 16 == 0 and piece.stride % 16 == 0 for piece in record.pieces)
    assert {piece.leaf.name for piece in record.pieces} == {x.name for x in layout.leaves if x.scope == "block"}
    assert snapshot_record(layout).bytes >= layout.bytes_per_slot
    assert len(record.descriptors) == 3 * len(record.pieces)


def test_a_layout_without_blocks_has_an_empty_record():
    layout = CacheLayout(DSV4Config.tiny(layer_types=(AttentionType.SWA,)))
    assert block_record(layout).pieces == () and block_record(layout).bytes == 0
    assert snapshot_record(layout).bytes > 0
