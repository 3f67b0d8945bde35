"""docs/tiers.md: its example runs and does what its comments say, its numbers are the layout's."""

from __future__ import annotations

import pathlib
import re

import jax
import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config
from dsv4_jax.plan import SwapPlan
from dsv4_jax.records import block_record
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
    before = image(cache)
    exec("host = " + rest, scope)
    assert scope["written"].all() and scope["found"].all()
    after = image(scope["cache"])
    for leaf in (leaf for leaf in layout.leaves if leaf.scope in ("block", "slot")):
        old, new = (data[leaf.name].reshape(leaf.layers, -1, leaf.rows * leaf.row_bytes) for data in (before, after))
        moved = {7: 3, 1: 5, 2: 6} if leaf.scope == "block" else {2: 1}
        for unit in range(old.shape[1]):
            np.testing.assert_array_equal(new[:, unit], old[:, moved.get(unit, unit)], err_msg=leaf.name)
    ids = np.array([2], np.int32)
    left = np.asarray(overlapped_swap.pack_blocks(scope["cache"], SwapPlan(ids, ids)))
    np.testing.assert_array_equal(np.asarray(scope["host"].blocks)[4], left[0])
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
