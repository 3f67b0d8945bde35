"""docs/tiers.md: its example runs and does what its comments say, its numbers are the layout's."""

from __future__ import annotations

import pathlib
import re

import jax
import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config
from dsv4_jax.plan import SwapPlan
from dsv4_jax.records import block_record, snapshot_record, state_pages, state_record
from dsv4_jax.testing.live import Held, assert_same_bytes, live_bytes
from dsv4_jax.tiers import overlapped_swap

from .. import native
from .swapping import image

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "tiers.md").read_text()


def test_example(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.load_cpu()
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    made, rest = block.split("\nhost = ", 1)
    scope: dict = {}
    exec(made, scope)
    rng = np.random.default_rng(0)
    layout, cache = scope["layout"], scope["cache"]
    for name, x in cache.arrays.items():  # in place of the prefill
        data = rng.integers(0, 256, x.nbytes, np.uint8).view(x.dtype).reshape(x.shape)
        cache.arrays[name] = jax.device_put(data, next(iter(x.devices())))
    before, was = image(cache), live_bytes(cache, Held(1, 300, [3, 5, 6]))
    exec("host = " + rest, scope)
    assert scope["written"].all() and scope["found"].all()
    after = image(scope["cache"])
    for leaf in (leaf for leaf in layout.leaves if leaf.scope == "block"):
        old, new = (data[leaf.name].reshape(leaf.layers, -1, leaf.rows * leaf.row_bytes) for data in (before, after))
        moved = {7: 3, 1: 5, 2: 6}
        for unit in range(old.shape[1]):
            np.testing.assert_array_equal(new[:, unit], old[:, moved.get(unit, unit)], err_msg=leaf.name)
    assert_same_bytes(live_bytes(scope["cache"], Held(2, scope["tokens"], [7, 1, 2])), was)
    ids = np.array([2], np.int32)
    left = np.asarray(overlapped_swap.pack_blocks(scope["cache"], SwapPlan(ids, ids)))
    np.testing.assert_array_equal(np.asarray(scope["host"].pages)[4], left[0])
    assert left.any()


def test_numbers() -> None:
    record = block_record(CacheLayout(DSV4Config.flash()))
    pieces = {piece.leaf.name: (piece.layers, piece.bytes) for piece in record.pieces}
    table = {}
    for names, layers, sizes in re.findall(r"^\| (`.*?`) \| (\d+) \| ([\d, ]+) \|$", TEXT, re.M):
        for name, size in zip(names.split(", "), sizes.split(", "), strict=True):
            table[name.strip("`")] = int(layers), int(size.replace(",", ""))
    assert table == pieces
    held = sum(layers * size for layers, size in pieces.values())
    padding = sum(piece.layers * (piece.stride - piece.bytes) for piece in record.pieces)
    assert (
        f"is {record.bytes:,} bytes: {held:,} of {sum(n for n, _ in pieces.values())} pieces, {padding} to"
        in " ".join(TEXT.split())
    )
    assert record.bytes == 879 * 512
    layout = CacheLayout(DSV4Config.flash())
    rows = re.findall(r"^\| (\w+): .* \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", TEXT, re.M)
    assert [name for name, *_ in rows] == ["window", "CSA", "index"]
    pools = dict(window="swa", CSA="csa_state", index="index_state")
    for name, *numbers in rows:
        count, layers, row, total = (int(number.replace(",", "")) for number in numbers)
        pieces = [piece for piece in snapshot_record(layout).pieces if piece.leaf.pool == pools[name]]
        assert {(piece.rows, piece.layers) for piece in pieces} == {(count, layers)}
        assert sum(piece.width for piece in pieces) == row and count * layers * row == total
        assert sum(piece.layers * piece.stride for piece in pieces) == total
    snapshot, more = snapshot_record(layout).bytes, state_record(layout).bytes - snapshot_record(layout).bytes
    assert f"a block boundary, {snapshot:,} bytes for V4-Flash" in " ".join(TEXT.split())
    assert f"is still to come: {more:,} bytes more" in " ".join(TEXT.split()) and [
        state_pages(layout, n) for n in (256, 300)
    ] == [9, 10]
