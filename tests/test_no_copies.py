"""The cache is updated in place: aliased bytes, temporaries, HLO text, traces, leaves, cross-lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import CHECKED, KVCache, init_cache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.plan import StepPlan
from dsv4_jax.testing import assert_no_copies, assert_one_trace

from .harness import Driver, layer_writes, pinned_shape, random_norms, random_stream, write_step
from .oracle.machine import Norms, ProjectedRows

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
ROWS = 2
KINDS = DSV4Config.tiny(layer_types=(SWA, CSA, HCA))
# Small widths, so that the pool is large against every activation with few bytes.
FLASH_DEPTH = DSV4Config.tiny(
    layer_types=DSV4Config.flash().layer_types,
    head_dim=16,
    rope_dim=4,
    index_head_dim=16,
    num_attention_heads=2,
    index_n_heads=2,
    index_topk=4,
    sliding_window=8,
)


def decode_step(
    cache: KVCache, plan: StepPlan, rows: ProjectedRows, norms: Norms, hidden: jax.Array | float = 0.0
) -> tuple[KVCache, jax.Array]:
    """All cache operations of a decode step, each layer fed by the one before, as in a model."""
    cfg = cache.layout.cfg
    step, hidden = cache.begin(plan), jnp.full((plan.num_tokens, 1), hidden, jnp.float32)
    for spec in cache.layout.schedule:
        fed = ProjectedRows(*(x + hidden[None] for x in rows))
        handle = layer_writes(step, spec, fed, norms)
        selected = None
        if spec.attn is CSA:
            queries = jnp.ones((plan.num_tokens, cfg.index_n_heads, cfg.index_head_dim), jnp.float32)
            weights = jnp.ones((plan.num_tokens, cfg.index_n_heads), jnp.float32)
            selected = handle.top_k(handle.index_scores(queries + hidden[:, :, None], weights))
        queries = jnp.ones((plan.num_tokens, cfg.num_attention_heads, cfg.head_dim), jnp.float32)
        sink = jnp.zeros(cfg.num_attention_heads, jnp.float32)
        out, _ = handle.attend(queries + hidden[:, :, None], sink, selected)
        hidden, step = out.mean((1, 2))[:, None], handle.step
    return step.finish(), hidden


def loop(steps: int):
    """`steps` decode steps in one executable: the plan advances, blocks were reserved ahead."""

    def run(cache: KVCache, plan: StepPlan, rows: ProjectedRows, norms: Norms) -> tuple[KVCache, jax.Array]:
        cache, hidden = decode_step(cache, plan, rows, norms)

        def body(carry, _):
            cache, plan, hidden = carry
            cache, hidden = decode_step(cache, plan, rows, norms, hidden)
            return (cache, plan.advance(), hidden), None

        plan = jax.tree.map(jnp.asarray, plan.advance())
        (cache, _, hidden), _ = jax.lax.scan(body, (cache, plan, hidden), length=steps - 1)
        return cache, hidden

    return run


def operands(layout: CacheLayout, size: CacheSize, steps: int = 1) -> tuple[KVCache, StepPlan, ProjectedRows, Norms]:
    scheduled = [StepSequence(slot, 20 + slot, 1) for slot in range(1, ROWS + 1)]
    plan = build_plan(layout, scheduled, shape_for(layout, scheduled, steps=steps), steps=steps)
    return init_cache(layout, size), plan, random_stream(layout, ROWS, 0), random_norms(layout)


def assert_in_place(step, cache: KVCache, *rest, compiler_options: dict | None = None) -> None:
    new = assert_no_copies(step, cache, *rest, compiler_options=compiler_options)(cache, *rest)
    # (Of a checked cache the host has read the lengths, whose memory a CPU does not take away then.)
    assert all(a.is_deleted() for name, a in cache.arrays.items() if name not in CHECKED)
    assert not any(a.is_deleted() for a in new[0].arrays.values())


@pytest.mark.parametrize(("formats", "checked"), [(("fp8", "fp4"), False), (("bf16", "bf16"), True)])
def test_decode_step_copies_nothing(formats: tuple[str, str], checked: bool) -> None:
    layout, size = CacheLayout(KINDS, *formats), CacheSize(4000, 400, 4)
    _, plan, *rest = operands(layout, size)
    cache = init_cache(layout, size, checked=checked).standing(jnp.asarray(plan.seq_slot), jnp.asarray(plan.seq_start))
    assert len(cache.arrays) == len(layout.leaves) + 2 * checked <= 24
    assert_in_place(decode_step, cache, plan, *rest)


def test_a_step_with_unit_copies_copies_nothing_else() -> None:
    """Snapshots and forks: a few slots and blocks within the pools, and no pool."""
    layout = CacheLayout(KINDS)
    cache, _, *rest = operands(layout, CacheSize(4000, 400, 4))
    scheduled = [StepSequence(slot, 20 + slot, 1) for slot in range(1, ROWS + 1)]
    shape = shape_for(layout, scheduled, slot_copies=4, block_copies=2)
    plan = build_plan(layout, scheduled, shape, slot_copies=[(1, 9), (2, 8)], block_copies=[(3, 4)])
    assert_in_place(decode_step, cache, plan, *rest)


@pytest.mark.slow
def test_decode_loop_copies_nothing() -> None:
    """Eight steps: the cache is the carry of the scan, still in place."""
    layout = CacheLayout(KINDS)
    assert_in_place(loop(8), *operands(layout, CacheSize(4000, 400, 4), steps=8))


@pytest.mark.slow
def test_prefill_copies_no_paged_pool() -> None:
    """A chunk that overruns the rings reads their history before it writes.

    Nothing but an optimization barrier orders the two. The CPU backend drops barriers, so it may
    copy a per-request leaf there; the paged pools, which are the memory, it never copies.
    """
    layout = CacheLayout(DSV4Config.tiny(layer_types=(CSA, HCA)))
    scheduled = [StepSequence(1, 20, 48)]
    plan = build_plan(layout, scheduled, shape_for(layout, scheduled))
    cache = init_cache(layout, CacheSize(4000, 4, 4))
    args = cache, plan, random_stream(layout, 48, 0), random_norms(layout)
    paged = [leaf.name for leaf in layout.leaves if leaf.scope == "block"]
    assert len(paged) == 8
    assert_no_copies(decode_step, *args, only=lambda path: any(f"'{name}'" in path for name in paged))


@pytest.mark.slow
def test_many_layers_copy_nothing() -> None:
    """A quarter of Flash's: past these, each layer is one of those before it."""
    layout = CacheLayout(dataclasses.replace(FLASH_DEPTH, layer_types=FLASH_DEPTH.layer_types[:11]))
    cache, plan, rows, norms = operands(layout, CacheSize(1500, 150, 4))
    assert_in_place(decode_step, cache, plan, rows, norms)


def test_two_hundred_steps_compile_once() -> None:
    """Requests join (a chunk), decode and leave under one pinned shape: one trace."""
    layout = CacheLayout(DSV4Config.tiny(layer_types=(CSA, HCA)))
    shape = pinned_shape(layout, 4, 24, 2, history=True)
    driver = Driver(layout, CacheSize(8, 4, 2))
    step = jax.jit(assert_one_trace(write_step), donate_argnums=0)
    rng = np.random.default_rng(0)
    stream, joins, leaves = random_stream(layout, 256, 0), 0, 0
    for _ in range(200):
        for slot in list(driver.length):
            if driver.length[slot] > 200 or rng.random() < 0.02:
                driver.release(slot)
                leaves += 1
        idle = [slot for slot in range(1, 5) if slot not in driver.length]
        scheduled = [(slot, 1) for slot in driver.length]
        if idle and rng.random() < 0.3:
            driver.admit(idle[0], stream)
            scheduled.append((idle[0], int(rng.integers(1, 21))))
            joins += 1
        plan = driver.plan(scheduled, shape)
        rows = driver.rows_of(plan) if scheduled else ProjectedRows(*(x[:, :24] for x in stream))
        driver.cache = step(driver.cache, plan, rows, driver.norms)
    assert joins > 3 and leaves > 2


def test_a_call_passes_few_arrays_at_any_depth() -> None:
    """What a call costs the host grows with its arrays; its time is in `dsv4-jax bench step`."""
    deep = cache_of(FLASH_DEPTH)
    shallow = cache_of(dataclasses.replace(FLASH_DEPTH, layer_types=FLASH_DEPTH.layer_types[:4]))
    assert len(deep) == len(shallow) <= 24
    assert all(a.dtype == b.dtype and a.size >= b.size for a, b in zip(deep, shallow, strict=True))


def cache_of(cfg: DSV4Config) -> list[jax.Array]:
    return jax.tree.leaves(init_cache(CacheLayout(cfg), CacheSize(4, 2, 4)))


@pytest.mark.slow
def test_flash_decode_step_lowers_for_cuda() -> None:
    """Full V4-Flash widths and depth, abstract arrays: trace and cross-lower every cache op of a decode step.

    The time it takes grows with the operations: about 1,900 a layer.
    """
    layout = CacheLayout(DSV4Config.flash())
    size, batch = CacheSize(20000, 64, 1024), 64
    cache = jax.eval_shape(lambda: init_cache(layout, size))
    scheduled = [StepSequence(slot, 1000, 1) for slot in range(1, batch + 1)]
    plan = build_plan(layout, scheduled, shape_for(layout, scheduled))
    cfg, d, di = layout.cfg, 512, 128
    widths = ((43, d), (21, 2 * d), (21, 2 * d), (21, 2 * di), (21, 2 * di), (20, d), (20, d), (0, 0))
    rows = ProjectedRows(*(jax.ShapeDtypeStruct((n, batch, w), jnp.float32) for n, w in widths))
    norms = Norms(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((21, d), (21, di), (20, d))))
    assert (cfg.head_dim, cfg.index_head_dim) == (d, di)
    traced = jax.jit(decode_step, donate_argnums=0).trace(cache, plan, rows, norms)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text
    operations = text.count(" = ")
    assert 0 < operations <= 2_500 * cfg.num_layers, operations
