"""compress: any mix of decode, verify and prefill steps writes what the NumPy machine writes token by token."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager import StepShape
from dsv4_jax.ops.registry import Choice
from dsv4_jax.testing.live import assert_untouched

from ..harness import Driver, image, pinned_shape, random_stream
from ..oracle.close import assert_rows_close
from ..oracle.machine import Machine
from .op_test import OpTest

CSA, HCA = AttentionType.CSA, AttentionType.HCA
SMALL = DSV4Config.tiny(layer_types=(CSA, HCA))
# Two CSA layers: the harness feeds both compressors of one at once, those of the other apart.
BOTH = DSV4Config.tiny(layer_types=(CSA, HCA, CSA))
ODD = DSV4Config.tiny(layer_types=(CSA, HCA), head_dim=48, rope_dim=2, index_head_dim=32, hca_ratio=6)
LAYOUTS = {
    "f32-verify": CacheLayout(BOTH, "f32", "f32", draft_tokens=2),
    "fp8-fp4": CacheLayout(SMALL),
    "odd-fp8-raw-verify": CacheLayout(ODD, "fp8_per_entry", "fp8", draft_tokens=2, hca_state="raw", block_tokens=12),
}
TOKENS = 44
LONGEST = 48  # tokens of a step


def assert_close(layout: CacheLayout, actual: dict, expected: dict) -> None:
    for pool in actual.keys() - {"swa"}:
        if expected[pool] and expected[pool][0].size:
            fmt = {"csa": layout.kv_row, "hca": layout.kv_row, "index": layout.index_row}.get(pool)
            assert_rows_close(fmt, actual[pool], expected[pool])


def make_driver(layout: CacheLayout, blocks: int, implementation: Choice) -> Driver:
    return Driver(layout, CacheSize(2 * blocks + 2, 4, blocks), implementation=implementation)


def shapes(layout: CacheLayout, blocks: int, longest: int) -> tuple[StepShape, StepShape]:
    """Of decode and verify steps, and of steps with chunks: up to three rows each."""
    width = 3 * (1 + layout.draft_tokens)
    return pinned_shape(layout, 3, width, blocks, history=False), pinned_shape(layout, 3, longest, blocks, history=True)


def check_chunkings(
    layout: CacheLayout, sizes: tuple[int, ...], implementation: Choice, tokens: int, blocks: int
) -> None:
    """Feeds `tokens` tokens to a cache in steps of each size: its bytes are equal in the end."""
    images, (step, chunk) = [], shapes(layout, blocks, max(sizes))
    for size in sizes:
        driver = make_driver(layout, blocks, implementation)
        driver.admit(2, random_stream(layout, tokens, 1))
        while driver.length[2] < tokens:
            count = min(size, tokens - driver.length[2])
            driver.step([(2, count)], step if size <= 1 + layout.draft_tokens else chunk)
        images.append(image(driver.cache))
    for other in images[1:]:
        assert [leaf for leaf in other if other[leaf] != images[0][leaf]] == []


class CompressTest(OpTest):
    op = "compress"
    tokens: ClassVar[int] = TOKENS

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_equals_the_machine(self, name: str) -> None:
        """Two requests, decode and verify steps and chunks longer than the CSA ring interleaved, next to padding."""
        layout, rng = LAYOUTS[name], np.random.default_rng(3)
        csa = layout.cfg.count(CSA)
        counts = {"csa": csa, "index": csa, "hca": 1}
        blocks = layout.blocks_for(self.tokens)
        driver = make_driver(layout, blocks, self.implementation)
        machine = Machine(
            layout.cfg, layout.kv_row, layout.index_row, layout.hca_state, layout.block_tokens, driver.norms
        )
        most = 1 + layout.draft_tokens
        step, chunk = shapes(layout, blocks, LONGEST)
        for slot in (3, 1):
            driver.admit(slot, random_stream(layout, self.tokens, slot))
        while min(driver.length.values()) < self.tokens:
            long = rng.random() < 0.25
            scheduled = []
            for slot in rng.permutation([3, 1]):
                count = min(int(rng.integers(0, 25 if long else most + 1)), self.tokens - driver.length[slot])
                scheduled += [(int(slot), count)] if count else []
            before = dict(driver.length)
            driver.step(scheduled, chunk if long else step)
            for slot, count in scheduled:
                for t in range(before[slot], before[slot] + count):
                    machine.feed(slot, driver.streams[slot].tokens(t))
                assert_close(layout, driver.live(slot), machine.live(slot, counts))
        assert_untouched(driver.cache, driver.touched_slots, driver.touched_blocks)

    @pytest.mark.parametrize("name", ["fp8-fp4", "odd-fp8-raw-verify"])
    def test_every_chunking_gives_the_same_bytes(self, name: str) -> None:
        layout = LAYOUTS[name]
        check_chunkings(layout, (LONGEST, 23, 1), self.implementation, self.tokens, layout.blocks_for(self.tokens))


class TestCompress(CompressTest):
    implementation = "xla"
