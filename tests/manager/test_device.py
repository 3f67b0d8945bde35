"""The manager drives the real cache: its plans against a request that runs alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager, init_cache
from dsv4_jax.config import AttentionType
from dsv4_jax.manager import Request, StepShape
from dsv4_jax.testing.live import Held, assert_same_bytes, live_bytes

from ..harness import jit_write_step, layer_writes, random_norms, random_stream
from ..oracle.machine import ProjectedRows

jax.config.update("jax_numpy_dtype_promotion", "strict")

LAYOUT = CacheLayout(
    DSV4Config.tiny(layer_types=(AttentionType.CSA, AttentionType.HCA)), block_tokens=16, draft_tokens=2
)
SIZE = CacheSize(num_blocks=14, num_slots=2, max_blocks_per_request=6)
NORMS = random_norms(LAYOUT)
SHAPE = StepShape.bound(LAYOUT, 2, 12, columns=6, history=True)


class Engine:
    """A cache, its manager, and the projected rows that stand for every request's tokens."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(LAYOUT, SIZE)
        self.cache = init_cache(LAYOUT, SIZE)
        self.streams: dict[int, ProjectedRows] = {}

    def admit(self, stream: ProjectedRows) -> Request:
        request = self.manager.admit_request()
        self.streams[request.slot] = stream
        return request

    def step(self, scheduled: list[tuple[Request, int]]) -> None:
        """Padding rows are NaN: they must reach nothing."""
        plan = self.manager.plan_step(scheduled, shape=SHAPE)
        rows = ProjectedRows(*(np.full((x.shape[0], plan.num_tokens, x.shape[2]), np.nan, np.float32) for x in KEPT))
        for slot, start, count, first in zip(
            plan.seq_slot, plan.seq_start, plan.seq_count, plan.seq_first, strict=True
        ):
            if slot:
                for to, stream in zip(rows, self.streams[int(slot)], strict=True):
                    to[:, first : first + count] = stream[:, start : start + count]
        self.cache = jit_write_step(self.cache, plan, rows, NORMS)
        self.manager.check_integrity()

    def live(self, request: Request) -> dict[str, list[np.ndarray]]:
        return live_bytes(self.cache, Held.of(request))

    def reads(self, request: Request) -> list[np.ndarray]:
        """Feeds the request one more token and returns all it then sees: windows, entries, scores, attention."""
        plan = self.manager.plan_step([(request, 1)], shape=SHAPE)
        return [np.asarray(x) for x in jit_reads(self.cache, plan)]


def reads(cache, plan) -> list[jax.Array]:
    step, seen = cache.begin(plan), []
    rows = ProjectedRows(*(jnp.asarray(x[:, : plan.num_tokens]) for x in OTHER))
    cfg = LAYOUT.cfg
    queries = jnp.ones((plan.num_tokens, cfg.num_attention_heads, cfg.head_dim), jnp.bfloat16)
    for spec in LAYOUT.schedule:
        handle = layer_writes(step, spec, rows, NORMS)
        chosen = None
        if spec.attn is AttentionType.CSA:
            index = jnp.ones((plan.num_tokens, cfg.index_n_heads, cfg.index_head_dim), jnp.bfloat16)
            scores = handle.index_scores(index, jnp.ones((plan.num_tokens, cfg.index_n_heads), jnp.float32))
            chosen = handle.top_k(scores)
            visible = jnp.arange(scores.shape[1])[None] < handle.visible_entries()[:, None]
            seen += [jnp.where(visible, scores, 0.0)[:1], chosen[1][:1]]
        out, lse = handle.attend(queries, jnp.zeros(cfg.num_attention_heads, jnp.float32), chosen)
        seen += [out[:1], lse[:1]]
    return seen


jit_reads = jax.jit(reads)
KEPT, LEFT, OTHER = (random_stream(LAYOUT, 97, seed) for seed in (1, 2, 3))


def alone(chunks: list[int]) -> tuple[Engine, Request]:
    engine = Engine()
    request = engine.admit(KEPT)
    for n in chunks:
        engine.step([(request, n)])
    return engine, request


def test_memory_bytes_are_the_allocated_bytes() -> None:
    for layout, size in ((LAYOUT, SIZE), (CacheLayout(DSV4Config.tiny()), CacheSize(3, 2, 2, num_snapshots=2))):
        cache = init_cache(layout, size)
        assert KVCacheManager(layout, size).memory_bytes() == sum(x.nbytes for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("length", [12, 50])
def test_a_reused_slot_shows_nothing_of_its_last_request(length: int) -> None:
    """The slot, its stale table columns and its blocks held another, longer request; a third runs beside."""
    engine = Engine()
    left, other = engine.admit(LEFT), engine.admit(OTHER)
    for _ in range(11):
        engine.step([(left, 8), (other, 3)])
    engine.manager.release_request(left)
    for _ in range(4):
        engine.step([(other, 12)])
    stale = np.asarray(engine.cache.block_table)[left.slot]
    assert len(set(stale.tolist()) & set(other.blocks)) > 1
    kept = engine.admit(KEPT)
    assert kept.slot == left.slot
    done = 0
    while done < length:
        n = min(7, length - done)
        engine.step([(other, 1), (kept, n)])
        done += n
    single, lone = alone([12] * (length // 12) + [length % 12] * (length % 12 > 0))
    assert kept.blocks != lone.blocks
    assert_same_bytes(engine.live(kept), single.live(lone))
    for a, b in zip(engine.reads(kept), single.reads(lone), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_rejected_drafts_leave_no_trace() -> None:
    """Every cut of a verify step at every phase of a block, while the returned blocks serve someone else."""
    engine = Engine()
    kept, other = engine.admit(KEPT), engine.admit(OTHER)
    rng = np.random.default_rng(0)
    wrong = ProjectedRows(*(x[:, ::-1] for x in KEPT))
    returned = 0
    while kept.num_cached < 45:
        start, blocks = kept.num_cached, len(kept.blocks)
        keep = int(rng.integers(0, 4))
        # The drafts after the kept ones were wrong.
        engine.streams[kept.slot] = ProjectedRows(
            *(np.concatenate([a[:, : start + keep], b[:, start + keep :]], 1) for a, b in zip(KEPT, wrong, strict=True))
        )
        engine.step([(kept, 3)])
        grown = len(kept.blocks) > blocks
        engine.manager.accept(kept, min(keep, 3))
        returned += grown and len(kept.blocks) == blocks
        engine.step([(other, 2)])
    assert returned  # a rejected draft had opened a block, and `other` may have it by now
    single, lone = alone([12, 12, 12] + [1] * (kept.num_cached - 36))
    assert_same_bytes(engine.live(kept), single.live(lone))


def test_steps_ahead_are_the_steps_one_by_one() -> None:
    """Six decode steps of two requests from one plan and its `advance()`s, over a block boundary."""
    engine = Engine()
    kept, other = engine.admit(KEPT), engine.admit(OTHER)
    engine.step([(kept, 12)])
    plan = engine.manager.plan_step([(kept, 1), (other, 1)], steps=6, shape=SHAPE)
    assert (kept.num_cached, len(kept.blocks), other.num_cached) == (18, 2, 6)
    for _ in range(6):
        rows = ProjectedRows(*(np.full((x.shape[0], plan.num_tokens, x.shape[2]), np.nan, np.float32) for x in KEPT))
        for to, a, b in zip(rows, KEPT, OTHER, strict=True):
            to[:, 0], to[:, 1] = a[:, plan.token_position[0]], b[:, plan.token_position[1]]
        engine.cache = jit_write_step(engine.cache, plan, rows, NORMS)
        plan = plan.advance()
    engine.manager.check_integrity()
    single, lone = alone([12, 6])
    assert_same_bytes(engine.live(kept), single.live(lone))
