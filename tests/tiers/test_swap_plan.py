"""Swap plans: what is refused, how, and what comes out; records: where every byte of them lies."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.errors import PlanError
from dsv4_jax.layout import CacheLayout
from dsv4_jax.plan import StateSwapPlan
from dsv4_jax.record_format import ALIGNMENT
from dsv4_jax.records import block_record, page_bytes, snapshot_record, state_pages, state_record
from dsv4_jax.tiers.swap_plan import plan_state_swap, plan_swap


def plan(direction, device, host, **options):
    return plan_swap(direction, device, host, num_device=9, num_host=5, **options)


@pytest.mark.parametrize(
    ("direction", "device", "host", "says"),
    [
        ("out", [1, 0], [1, 2], "device_ids[1] must be an integer from 1 to 9, got 0"),
        ("in", [1, 2], [0, 2], "host_ids[0] must be an integer from 1 to 5, got 0"),
        ("in", [1, 10], [1, 2], "device_ids[1] must be an integer from 1 to 9, got 10"),
        ("out", [1, -1], [1, 2], "device_ids[1] must be an integer from 1 to 9, got -1"),
        ("out", [1, 2, 3], [1, 2, 6], "host_ids[2] must be an integer from 1 to 5, got 6"),
        ("out", [1, 2**40], [1, 2], "device_ids[1] must be an integer"),
        ("out", [1, 1.5], [1, 2], "device_ids[1] must be an integer"),
        ("out", [True], [1], "device_ids[0] must be an integer"),
        ("out", [1, 2, 3], [4, 2, 4], "host_ids[2]: 4 is written twice, first at index 0"),
        ("in", [7, 7], [1, 2], "device_ids[1]: 7 is written twice, first at index 0"),
    ],
)
def test_bad_ids_are_named(direction, device, host, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        plan(direction, device, host)


def test_bad_lists():
    with pytest.raises(PlanError, match="2 device ids for 1 host ids"):
        plan("out", [1, 2], [1])
    with pytest.raises(PlanError, match="3 ids do not fit a plan of length 2"):
        plan("out", [1, 2, 3], [1, 2, 3], length=2)
    for length in (-1, 2.0, "2", True, 2**40):
        with pytest.raises(PlanError, match="length must be an integer"):
            plan("out", [], [], length=length)
    with pytest.raises(PlanError, match="'sideways'"):
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
    assert len(record.descriptors) == 11 * len(record.pieces)


def test_a_layout_without_blocks_has_an_empty_record():
    layout = CacheLayout(DSV4Config.tiny(layer_types=(AttentionType.SWA,)))
    assert block_record(layout).pieces == () and block_record(layout).bytes == 0
    assert snapshot_record(layout).bytes > 0 and state_record(layout) == snapshot_record(layout)
    assert page_bytes(layout) == snapshot_record(layout).bytes and state_pages(layout, 5) == 1


# Bytes of window rows and compressor rows: what the record is made of, a layer.
FP8_ROW, BF16_ROW, F32 = 448 + 2 * 64 + 8, 2 * 512, 4


def carried(windows: int, csa: int, row: int) -> int:
    """What a snapshot should take: windows, and of 4 tokens the half of kv and score that the next entry takes."""
    return windows * 128 * row + csa * 4 * (2 * 512 + 2 * 128) * F32


def unfinished(csa: int, hca: int, online: bool) -> int:
    """What a state elsewhere has more: 3 rows of each CSA compressor; a triple, or 127 rows, of each HCA layer."""
    return csa * 3 * (4 * 512 + 4 * 128) * F32 + hca * (3 * 512 if online else 127 * 2 * 512) * F32


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("hca_state", ["online", "raw"])
def test_state_pages_have_the_bytes_predicted(drafts, hca_state):
    """Flash has 43 layers, 21 of CSA and 20 of HCA; Pro 61, 30 and 31. Drafts are no part of a record."""
    for cfg, windows, csa, hca in ((DSV4Config.flash(), 43, 21, 20), (DSV4Config.pro(), 61, 30, 31)):
        for kv_format, row in (("fp8", FP8_ROW), ("bf16", BF16_ROW)):
            layout = CacheLayout(cfg, kv_format, draft_tokens=drafts, hca_state=hca_state)
            want = carried(windows, csa, row)
            assert snapshot_record(layout).bytes == want
            assert state_record(layout).bytes == want + unfinished(csa, hca, hca_state == "online")
            assert state_record(layout).pieces[: len(snapshot_record(layout).pieces)] == snapshot_record(layout).pieces
    flash = CacheLayout(DSV4Config.flash(), draft_tokens=drafts, hca_state=hca_state)
    assert snapshot_record(flash).bytes == 3_644_416
    assert page_bytes(flash) == block_record(flash).bytes
    most = 10 if hca_state == "online" else 33
    assert [state_pages(flash, n) for n in (0, 127, 128, 129, 1024)] == [9, most, 9, most, 9]


def test_plans_of_states():
    layout, sizes = CacheLayout(DSV4Config.tiny()), dict(num_device=9, num_host=12)
    assert (state_pages(layout, 128), state_pages(layout, 300)) == (3, 4)

    def of(slots, records, tokens, **options):
        return plan_state_swap(options.pop("direction", "out"), layout, slots, records, tokens, **sizes, **options)

    made = of([3, 9, 1], [[2, 5, 11, 12], (1, 3, 4), np.array([7, 6, 8])], [300, 256, 0])
    assert isinstance(made, StateSwapPlan) and {x.dtype for x in made} == {np.dtype(np.int32)}
    pages = [[2, 5, 11, 12], [1, 3, 4, 0], [7, 6, 8, 0], [0, 0, 0, 0]]
    assert [x.tolist() for x in made] == [[3, 9, 1, 0], pages, [300, 256, 0, 0]]
    assert [x.shape for x in of([], [], [])] == [(0,), (0, 1), (0,)]
    again = of([1, 2], [[3, 4, 5], [3, 4, 5]], [128, 128], direction="in")  # one snapshot for two requests
    assert again.host_ids.tolist() == [[3, 4, 5], [3, 4, 5]]
    alone = CacheLayout(DSV4Config.tiny(layer_types=(AttentionType.SWA,)))  # a number stands for one page
    assert plan_state_swap("out", alone, [1], [2], [35], **sizes).host_ids.tolist() == [[2]]
    for arguments, says in (
        (([1], [2], [300]), "the state of 300 tokens takes 4 host pages, got 1"),
        (([1], [[2, 3, 4, 5]], [256]), "the state of 256 tokens takes 3 host pages, got 4"),
        (([1], [2], [-1]), "num_tokens[0] must be an integer from 0 to 2147483647, got -1"),
        (([1], [2], [2**31]), "num_tokens[0] must be an integer from 0 to 2147483647, got 2147483648"),
        (([1], [2], [1.5]), "num_tokens[0] must be an integer"),
        (([1, 2], [2], [32]), "2 device ids for 1 states of 1 token counts"),
        (([1], [[1, 2, 13]], [0]), "host_ids[2] must be an integer from 1 to 12, got 13"),
        (([0], [[1, 2, 3]], [0]), "device_ids[0] must be an integer from 1 to 9, got 0"),
        (([1, 2], [[2, 3, 4], [5, 3, 6]], [0, 0]), "host_ids[4]: 3 is written twice, first at index 1"),
    ):
        with pytest.raises(PlanError, match=re.escape(says)):
            of(*arguments)
    with pytest.raises(PlanError, match="1 ids do not fit a plan of length 0"):
        of([1], [[1, 2, 3]], [128], length=0)
    with pytest.raises(PlanError, match="'sideways'"):
        of([1], [[1, 2, 3]], [128], direction="sideways")
