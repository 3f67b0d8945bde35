"""The cache's bytes against an independent one-token-at-a-time NumPy machine."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.testing.live import assert_same_bytes, assert_untouched

from .harness import Driver, jit_write_step, optimised_write_step, pinned_shape, random_stream
from .oracle.machine import Machine

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA


def run_trace(
    layout: CacheLayout,
    tokens: int,
    *,
    seed: int = 0,
    check_every: int = 9,
    max_chunk: int = 40,
    write_step=jit_write_step,
) -> None:
    """Two interleaved requests in random chunks and decode steps, compared row by row with the machine."""
    rng = np.random.default_rng(seed)
    kinds = {"csa": CSA, "index": CSA, "hca": HCA}
    counts = {pool: layout.cfg.count(kind) for pool, kind in kinds.items() if layout.cfg.count(kind)}
    blocks = layout.blocks_for(tokens)
    driver = Driver(layout, CacheSize(2 * blocks + 3, 4, blocks), seed=seed, write_step=write_step)
    machine = Machine(layout.cfg, layout.kv_row, layout.index_row, layout.hca_state, layout.block_tokens, driver.norms)
    chunked = pinned_shape(layout, 2, max_chunk + 1, blocks)
    decode = pinned_shape(layout, 2, 2, blocks)
    slots = (3, 1)
    for slot in slots:
        driver.admit(slot, random_stream(layout, tokens, seed + slot))
    steps = 0
    while any(driver.length[slot] < tokens for slot in slots):
        left = {slot: tokens - driver.length[slot] for slot in slots if driver.length[slot] < tokens}
        if rng.random() < 0.5:
            scheduled, shape = [(slot, 1) for slot in left], decode
        else:
            scheduled, shape = [(slot, min(n, int(rng.integers(1, max_chunk)))) for slot, n in left.items()], chunked
            if len(scheduled) > 1:  # one long chunk, the other request decodes or waits
                long, short = scheduled if rng.random() < 0.5 else scheduled[::-1]
                scheduled = [long, (short[0], 1)] if rng.random() < 0.7 else [long]
        before = dict(driver.length)
        driver.step(scheduled, shape)
        for slot, count in scheduled:
            for t in range(before[slot], before[slot] + count):
                machine.feed(slot, driver.streams[slot].tokens(t))
        steps += 1
        if steps % check_every == 0 or not left:
            for slot in slots:
                if driver.length[slot]:
                    assert_same_bytes(
                        driver.live(slot, layout.cfg.sliding_window),
                        machine.live(slot, counts),
                        f"slot {slot} at {driver.length[slot]}",
                    )
    for slot in slots:
        assert_same_bytes(
            driver.live(slot, layout.cfg.sliding_window), machine.live(slot, counts), f"slot {slot} at the end"
        )
    assert_untouched(driver.cache, driver.touched_slots, driver.touched_blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("hca_state", "tokens"), [("online", 1000), ("raw", 500)], ids=["online", "raw"])
def test_many_tokens(hca_state: str, tokens: int) -> None:
    """The default formats, two interleaved requests of so many tokens each, every layer kind."""
    run_trace(CacheLayout(DSV4Config.tiny(), hca_state=hca_state), tokens)


@pytest.mark.parametrize("formats", [("fp8_per_entry", "fp8"), ("bf16", "bf16"), ("f32", "f32")])
@pytest.mark.slow
def test_other_formats(formats: tuple[str, str]) -> None:
    """In optimised code: without LLVM's optimisations XLA rounds some of these rows' last bits otherwise."""
    layout = CacheLayout(DSV4Config.tiny(layer_types=(CSA, HCA)), *formats)
    run_trace(layout, 130, seed=5, check_every=3, write_step=optimised_write_step)


@pytest.mark.slow
def test_production_widths() -> None:
    """The widths, window and ratios of V4 (512 / 64 / 128, 128, 4 / 128), past two HCA entries, in optimised code."""
    cfg = DSV4Config.tiny(
        head_dim=512, rope_dim=64, index_head_dim=128, sliding_window=128, hca_ratio=128, layer_types=(CSA, HCA)
    )
    run_trace(CacheLayout(cfg), 280, seed=7, check_every=2, max_chunk=90, write_step=optimised_write_step)


EDGES = {
    "window of one, only HCA": (dict(layer_types=(HCA,), hca_ratio=8, sliding_window=1), {}),
    "only SWA": (dict(layer_types=(SWA, SWA), num_mtp_layers=1), dict(include_drafts=True)),
    "only CSA, large blocks": (dict(layer_types=(CSA,)), dict(block_tokens=256)),
    "odd widths, small blocks": (
        dict(head_dim=48, rope_dim=2, index_head_dim=32, sliding_window=7, hca_ratio=6),
        dict(block_tokens=12),
    ),
    "drafts, online": ({}, dict(draft_tokens=3)),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str) -> None:
    config, options = EDGES[edge]
    cfg = DSV4Config.tiny(**dict(layer_types=(CSA, HCA)) | config)
    run_trace(CacheLayout(cfg, **options), 90, seed=11, check_every=2, max_chunk=50)
