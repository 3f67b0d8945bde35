"""Drives the cache operations as a serving loop would: own block allocation, pinned plan shapes, donated steps."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import KVCache, init_cache
from dsv4_jax.config import AttentionType, LayerSpec
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager import StepShape
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence
from dsv4_jax.ops.epilogue import Epilogue
from dsv4_jax.ops.numerics import inv_frequencies
from dsv4_jax.ops.registry import Choice
from dsv4_jax.plan import StepPlan
from dsv4_jax.step import CacheStep, LayerCacheHandle
from dsv4_jax.testing.live import Held, live_bytes

from .oracle.machine import Norms, ProjectedRows

EPS = 1e-6


def random_stream(layout: CacheLayout, tokens: int, seed: int) -> ProjectedRows:
    """Projected rows of `tokens` tokens: magnitudes vary over tokens, some rows are zero or huge."""
    cfg, rng = layout.cfg, np.random.default_rng(seed)
    csa, hca = (sum(s.attn is k for s in layout.schedule) for k in (AttentionType.CSA, AttentionType.HCA))
    size = 10.0 ** rng.uniform(-2, 2, (1, tokens, 1))
    size[:, rng.random(tokens) < 0.02] = 0.0
    size[:, rng.random(tokens) < 0.02] = 1e6

    def draw(layers: int, width: int, scale) -> np.ndarray:
        return (rng.standard_normal((layers, tokens, width)) * scale).astype(np.float32)

    # Scores spread wide enough that some softmax weights underflow.
    spread = 10.0 ** rng.uniform(-1, 1.7, (1, tokens, 1))
    d, di, mtp = cfg.head_dim, cfg.index_head_dim, sum(spec.is_mtp for spec in layout.schedule)
    return ProjectedRows(
        draw(len(layout.schedule), d, size),
        draw(csa, 2 * d, size),
        draw(csa, 2 * d, spread),
        draw(csa, 2 * di, size),
        draw(csa, 2 * di, spread),
        draw(hca, d, size),
        draw(hca, d, spread),
        draw(mtp, cfg.hc_mult * cfg.hidden_size, size),
    )


def random_norms(layout: CacheLayout, seed: int = 99) -> Norms:
    cfg, rng = layout.cfg, np.random.default_rng(seed)
    csa, hca = (sum(s.attn is k for s in layout.schedule) for k in (AttentionType.CSA, AttentionType.HCA))
    return Norms(
        *(
            rng.uniform(0.5, 1.5, (n, width)).astype(np.float32)
            for n, width in ((csa, cfg.head_dim), (csa, cfg.index_head_dim), (hca, cfg.head_dim))
        )
    )


def _ordinal(layout: CacheLayout, layer_idx: int) -> int:
    """Position of a layer among those of its kind."""
    kinds = [spec.attn for spec in layout.schedule]
    return kinds[:layer_idx].count(kinds[layer_idx])


def layer_writes(step: CacheStep, spec: LayerSpec, rows: ProjectedRows, norms: Norms) -> LayerCacheHandle:
    """One layer's append, compress and index compress: both at once in every other CSA layer."""
    cfg, j, i = step.layout.cfg, _ordinal(step.layout, spec.layer_idx), spec.layer_idx
    inv_freq = jnp.asarray(inv_frequencies(cfg.rope_dim, cfg.compress_rope_theta, cfg.yarn))
    handle = step.layer(i).append(rows.kv[i])
    if spec.attn is AttentionType.CSA:
        main = (rows.csa_kv[j], rows.csa_score[j], Epilogue(norms.csa[j], inv_freq, EPS))
        index = (rows.index_kv[j], rows.index_score[j], Epilogue(norms.index[j], inv_freq, EPS, hadamard=True))
        handle = handle.compress(*main).compress_index(*index) if j % 2 else handle.compress(*main, index)
    elif spec.attn is AttentionType.HCA:
        handle = handle.compress(rows.hca_kv[j], rows.hca_score[j], Epilogue(norms.hca[j], inv_freq, EPS))
    elif spec.is_mtp:
        _, handle = handle.carry_residual(rows.residual[i - cfg.num_layers])
    return handle


def write_step(
    cache: KVCache, plan: StepPlan, rows: ProjectedRows, norms: Norms, *, implementation: Choice = None
) -> KVCache:
    """Every write of a step, all layers."""
    step = cache.begin(plan, implementation)
    for spec in cache.layout.schedule:
        step = layer_writes(step, spec, rows, norms).step
    return step.finish()


jit_write_step = jax.jit(write_step, donate_argnums=0, static_argnames="implementation")
# Compiled as users compile it: the tests' own default leaves LLVM's optimisations out (conftest).
optimised_write_step = jax.jit(
    write_step,
    donate_argnums=0,
    static_argnames="implementation",
    compiler_options={"xla_backend_optimization_level": 3},
)


def pinned_shape(
    layout: CacheLayout, rows: int, tokens: int, columns: int, *, history: bool | None = None
) -> StepShape:
    """A shape that fits every step of up to `rows` rows and `tokens` tokens in all."""
    return StepShape(
        sequences=rows,
        tokens=tokens,
        flushes=min(tokens, tokens // layout.cfg.csa_ratio + rows),
        groups=min(tokens, 2 * rows + tokens // layout.cfg.hca_ratio),
        group_length=min(tokens, layout.cfg.hca_ratio),
        columns=columns,
        table_entries=rows + tokens // layout.block_tokens,
        history=tokens > rows * (1 + layout.draft_tokens) if history is None else history,
    )


class Driver:
    """A cache, the requests in it and the blocks they hold."""

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        norms: Norms | None = None,
        seed: int = 0,
        implementation: Choice = None,
        write_step: Callable[..., KVCache] = jit_write_step,
    ):
        self.layout, self.size, self.implementation, self.write_step = layout, size, implementation, write_step
        self.norms = random_norms(layout) if norms is None else norms
        self.cache = init_cache(layout, size)
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, size.num_blocks + 1)))
        self.blocks: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.streams: dict[int, ProjectedRows] = {}
        self.touched_slots: set[int] = set()
        self.touched_blocks: set[int] = set()

    def admit(self, slot: int, stream: ProjectedRows) -> None:
        assert slot not in self.length
        self.blocks[slot], self.length[slot], self.streams[slot] = [], 0, stream

    def release(self, slot: int) -> None:
        self.free += self.blocks.pop(slot)
        del self.length[slot], self.streams[slot]

    def plan(self, scheduled: list[tuple[int, int]], shape: StepShape) -> StepPlan:
        """Plans `count` tokens of every (slot, count), allocating blocks, and advances the lengths."""
        rows, entries = [], []
        for slot, count in scheduled:
            start = self.length[slot]
            rows.append(StepSequence(slot, start, count))
            while len(self.blocks[slot]) < self.layout.blocks_for(start + count):
                block = int(self.free.pop())
                entries.append((slot, len(self.blocks[slot]), block))
                self.blocks[slot].append(block)
                self.touched_blocks.add(block)
            self.length[slot] = start + count
            self.touched_slots.add(slot)
        return build_plan(self.layout, rows, shape, table_entries=entries)

    def rows_of(self, plan: StepPlan, streams: dict[int, ProjectedRows] | None = None) -> ProjectedRows:
        """The plan's token rows; padding tokens get NaN, which must not reach anything."""
        streams = self.streams if streams is None else streams
        layers = next(iter(self.streams.values()))
        out = ProjectedRows(*(np.full((x.shape[0], plan.num_tokens, x.shape[2]), np.nan, np.float32) for x in layers))
        for slot, start, count, first in zip(
            plan.seq_slot, plan.seq_start, plan.seq_count, plan.seq_first, strict=True
        ):
            if slot:
                for dst, src in zip(out, streams[int(slot)], strict=True):
                    dst[:, first : first + count] = src[:, start : start + count]
        return out

    def step(
        self, scheduled: list[tuple[int, int]], shape: StepShape, streams: dict[int, ProjectedRows] | None = None
    ) -> None:
        plan = self.plan(scheduled, shape)
        rows = self.rows_of(plan, streams)
        self.cache = self.write_step(self.cache, plan, rows, self.norms, implementation=self.implementation)

    def rollback(self, slot: int, length: int) -> None:
        """Rejects tokens: the length goes back, nothing else happens."""
        assert length <= self.length[slot]
        self.length[slot] = length

    def live(self, slot: int, window: int | None = None) -> dict[str, list[np.ndarray]]:
        return live_bytes(self.cache, Held(slot, self.length[slot], self.blocks[slot]), window=window)


def image(cache: KVCache) -> dict[str, bytes]:
    """Every byte of the cache."""
    return {name: np.asarray(a).tobytes() for name, a in cache.arrays.items()}
