"""Reads through a layer handle: what each token sees, in decode and in chunks, against float64 over explicit keys."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import step
from dsv4_jax.cache import KVCache, init_cache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.errors import LayoutError, PlanError, ShapeError, StepError
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.ops import registry
from dsv4_jax.ops.columns import Columns
from dsv4_jax.ops.epilogue import Epilogue
from dsv4_jax.ops.registry import Choice
from dsv4_jax.plan import StepPlan
from dsv4_jax.step import LayerWrites

from .harness import Driver, layer_writes, pinned_shape, random_norms, random_stream
from .oracle import attention
from .oracle import rows as oracle
from .oracle.machine import Norms, ProjectedRows

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
CFG = DSV4Config.tiny(
    layer_types=(CSA, HCA, SWA), hca_ratio=16, sliding_window=9, index_topk=3, num_attention_heads=2, index_n_heads=4
)
TOKENS = 75


def read_step(cache: KVCache, plan: StepPlan, rows: ProjectedRows, norms: Norms, queries: dict[str, jax.Array]):
    """Every layer's attention output, [layers, T, H, d], and the CSA selection."""
    step, outs, selected = cache.begin(plan), [], None
    for spec in cache.layout.schedule:
        handle = layer_writes(step, spec, rows, norms)
        chosen = None
        if spec.attn is CSA:
            chosen = selected = handle.top_k(handle.index_scores(queries["index"], queries["weights"]))
        out, _ = handle.attend(queries["attend"], queries["sink"], chosen)
        outs.append(out)
        step = handle.step
    return step.finish(), jnp.stack(outs), selected


jit_read_step = jax.jit(read_step, donate_argnums=0)


def run(layout: CacheLayout, chunks: list[int], width: int, slot: int = 2):
    """Feeds one request in these chunks; returns the driver, the outputs [layers, TOKENS, H, d] and queries."""
    rng = np.random.default_rng(0)
    cfg = layout.cfg
    queries = {
        "attend": rng.standard_normal((TOKENS, cfg.num_attention_heads, cfg.head_dim)),
        "index": rng.standard_normal((TOKENS, cfg.index_n_heads, cfg.index_head_dim)),
        "weights": rng.standard_normal((TOKENS, cfg.index_n_heads)),
    }
    queries = {name: x.astype(np.float32) for name, x in queries.items()}
    sink = rng.standard_normal(cfg.num_attention_heads).astype(np.float32)
    driver = Driver(layout, CacheSize(4, 3, 2))
    stream = random_stream(layout, TOKENS, 3)
    # Moderate magnitudes: this test is about which keys are seen, not about how they are stored.
    driver.admit(slot, ProjectedRows(*(np.clip(x, -3, 3) for x in stream)))
    shape = pinned_shape(layout, 2, width, 2, history=width > 2)
    outs = []
    for n in chunks:
        first = driver.length[slot]
        plan = driver.plan([(slot, n)], shape)
        fed = {name: np.zeros((width, *x.shape[1:]), np.float32) for name, x in queries.items()}
        for name, x in queries.items():
            fed[name][:n] = x[first : first + n]
        driver.cache, out, _ = jit_read_step(
            driver.cache, plan, driver.rows_of(plan), driver.norms, fed | {"sink": sink}
        )
        assert not np.asarray(out[:, n:]).any(), "padding tokens see no key"
        outs.append(np.asarray(out)[:, :n])
    return driver, np.concatenate(outs, 1), queries | {"sink": sink}


def expected(driver: Driver, queries: dict[str, np.ndarray], slot: int = 2) -> list[np.ndarray]:
    """Visibility by docs/model.md: positions t-W+1..t; entries s < (t+1) // ratio, for CSA the top k of them."""
    layout, cfg, stream, live = driver.layout, driver.layout.cfg, driver.streams[slot], driver.live(slot)
    kv, index = layout.kv_row, layout.index_row
    windows = oracle.decode(kv, oracle.encode(kv, stream.kv))
    entries = {p: oracle.decode(kv, tuple(x[0] for x in live[p])) for p in ("csa", "hca")}
    index_keys = oracle.decode(index, tuple(x[0] for x in live["index"]))
    visible = [index_keys[: (t + 1) // 4] for t in range(TOKENS)]
    scores = attention.index_scores(queries["index"], queries["weights"], visible)
    outs = []
    for layer, kind in enumerate(cfg.layer_types):
        keys = []
        for t in range(TOKENS):
            seen = [windows[layer, max(t + 1 - cfg.sliding_window, 0) : t + 1]]
            if kind is CSA and t >= 3:
                best = attention.top_k(scores[t], (t + 1) // 4, cfg.index_topk)
                seen.append(entries["csa"][best])
            elif kind is HCA:
                seen.append(entries["hca"][: (t + 1) // cfg.hca_ratio])
            keys.append(np.concatenate(seen))
        outs.append(attention.attend(queries["attend"], queries["sink"], keys, cfg.head_dim**-0.5)[0])
    return outs


@pytest.mark.parametrize(
    ("chunks", "width"),
    [([1] * TOKENS, 1), pytest.param([TOKENS], TOKENS, marks=pytest.mark.slow), ([1, 2, 30, 7, 35], TOKENS)],
    ids=["serial", "one shot", "ragged"],
)
def test_every_token_sees_exactly_its_keys(chunks: list[int], width: int) -> None:
    """Ring mode and chunk mode, wrapping windows, the first tokens, no entries yet, top-k smaller than the choice."""
    driver, outs, queries = run(CacheLayout(CFG), chunks, width)
    for kind, actual, want in zip(CFG.layer_types, outs, expected(driver, queries), strict=True):
        np.testing.assert_allclose(actual, want, rtol=2e-4, atol=2e-4, err_msg=kind.name)


def test_entries_that_a_chunk_has_in_common_are_its_tokens_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SharedEntries` of a step: reading through them shows every token exactly its keys."""
    given = []

    def through_shared(op: str, arguments: Any, choice: Choice) -> Any:
        if op == "attend" and (shared := arguments.shared) is not None:
            given.append(shared.rows.shape)
            arguments = dataclasses.replace(arguments, entry_ids=shared.rows[shared.ids], shared=None)
        return registry.run(op, arguments, choice)

    monkeypatch.setattr(step, "run", through_shared)
    monkeypatch.setattr(step, "CHUNK", 8)
    monkeypatch.setitem(globals(), "jit_read_step", jax.jit(lambda *args: read_step(*args), donate_argnums=0))
    driver, outs, queries = run(CacheLayout(CFG), [40, 35], TOKENS)
    for out, right in zip(outs, expected(driver, queries), strict=True):
        np.testing.assert_allclose(out, right, rtol=2e-4, atol=2e-4)
    assert len(given) == 2  # CSA's and HCA's, of all sequences


def test_what_is_no_entry_of_a_request_is_none_of_another_in_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's selection may be anything: `SharedEntries` has the rows that `entry_ids` has, of two requests."""

    def both_ids(op: str, arguments: Any, choice: Choice) -> Any:
        if op == "attend":
            return arguments.entry_ids, arguments.shared.rows[arguments.shared.ids]
        return registry.run(op, arguments, choice)

    monkeypatch.setattr(step, "run", both_ids)
    monkeypatch.setattr(step, "CHUNK", 4)
    layout = CacheLayout(CFG)
    driver = Driver(layout, CacheSize(4, 3, 2))
    for slot in (1, 2):
        driver.admit(slot, random_stream(layout, 8, slot))
    plan = driver.plan([(1, 3), (2, 5)], pinned_shape(layout, 2, 8, 2))
    total = 2 * layout.block_tokens // 4
    listed = np.array([[0, -1, total - 1, total, total + 3, 2**31 - 1, -(2**31)]] * 8, np.int32)

    @jax.jit
    def both(cache, plan, rows, norms):
        spec = next(spec for spec in layout.schedule if spec.attn is CSA)
        handle = layer_writes(cache.begin(plan), spec, rows, norms)
        queries = jnp.zeros((8, CFG.num_attention_heads, CFG.head_dim))
        return handle.attend(queries, jnp.zeros(CFG.num_attention_heads), (listed, jnp.full(8, 7, jnp.int32)))

    np.testing.assert_array_equal(*both(driver.cache, plan, driver.rows_of(plan), driver.norms))


def gather_step(cache: KVCache, plan: StepPlan, rows: ProjectedRows, norms: Norms, entries, implementation):
    """What the three gathers give in every layer, read by this implementation."""
    step, found = cache.begin(plan), []
    for spec in cache.layout.schedule:
        handle = layer_writes(step, spec, rows, norms)
        step = handle.step
        handle = dataclasses.replace(handle, step=dataclasses.replace(step, implementation=implementation))
        found.append([handle.gather_swa(jnp.float32)])
        if spec.attn is not SWA:
            found[-1] += [handle.gather_all_compressed(jnp.float32), handle.gather_compressed(entries)]
    return step.finish(), found


jit_gather_step = jax.jit(gather_step, donate_argnums=0, static_argnames="implementation")


@pytest.mark.parametrize("implementation", ["xla", "pallas", None])
@pytest.mark.parametrize(
    ("kv", "chunks"),
    [("fp8", [1] * 20), ("fp8", [1, 2, 30, 7]), pytest.param("bf16", [33], marks=pytest.mark.slow)],
    ids=["fp8 ring", "fp8 chunks", "bf16 chunk"],
)
def test_gathers_give_the_rows_that_a_token_sees(kv: str, chunks: list[int], implementation) -> None:
    """The window in ring and in chunk mode, all entries, and chosen ones, against NumPy's decoder of the live rows."""
    layout, width, slot, rng = CacheLayout(CFG, kv), max(chunks), 2, np.random.default_rng(0)
    driver = Driver(layout, CacheSize(4, 3, 2))
    driver.admit(slot, random_stream(layout, sum(chunks), 5))
    shape = pinned_shape(layout, 2, width, 2, history=width > 1)
    stored = oracle.encode(layout.kv_row, driver.streams[slot].kv)
    windows = oracle.decode(layout.kv_row, stored)
    wide = [schema.entries_per_block * 2 for schema in layout.schemas]
    for n in chunks:
        first = driver.length[slot]
        plan = driver.plan([(slot, n)], shape)
        chosen = rng.integers(0, max((first + 1) // 16, 1), (width, 3)).astype(np.int32)
        driver.cache, found = jit_gather_step(
            driver.cache, plan, driver.rows_of(plan), driver.norms, chosen, implementation=implementation
        )
        live = driver.live(slot)
        for i, kind in enumerate(CFG.layer_types):
            (rows, visible), *of_entries = found[i]
            assert rows.shape == (width, CFG.sliding_window, CFG.head_dim) and not np.asarray(visible)[n:].any()
            for t in range(n):
                at = first + t - CFG.sliding_window + 1 + np.arange(CFG.sliding_window)
                np.testing.assert_array_equal(visible[t], at >= 0)
                np.testing.assert_array_equal(np.asarray(rows[t])[at >= 0], windows[i, at[at >= 0]])
            if kind is SWA:
                continue
            (every, count), some = of_entries
            entries = oracle.decode(layout.kv_row, tuple(x[0] for x in live[kind.name.lower()]))
            assert every.shape == (width, wide[i], CFG.head_dim) and some.dtype == jnp.bfloat16
            for t in range(n):
                seen = (first + t + 1) // CFG.ratio(kind)
                assert count[t] == seen
                np.testing.assert_array_equal(np.asarray(every[t, :seen]), entries[:seen])
                if seen > chosen[t].max():
                    np.testing.assert_array_equal(np.asarray(some[t], np.float32), entries[chosen[t]])


def handle_of(layer: int):
    layout = CacheLayout(CFG)
    scheduled = [StepSequence(1, 0, 1)]
    cache = init_cache(layout, CacheSize(2, 2, 1))
    return cache.begin(build_plan(layout, scheduled, shape_for(layout, scheduled))).layer(layer)


def test_an_empty_cache_on_a_cpu_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its leaves have a dozen shapes: a compile each would take longer than all else."""
    layout, size = CacheLayout(DSV4Config.tiny()), CacheSize(13, 11, 7)  # a size that no other test has compiled
    with jax.log_compiles():
        cache = jax.block_until_ready(init_cache(layout, size))
        assert not [record for record in caplog.records if "compil" in record.message.lower()]
        jax.jit(lambda: jnp.zeros((13, 11, 7)))()
        assert [record for record in caplog.records if "compil" in record.message.lower()]
    for leaf in layout.leaves:
        array = cache.arrays[leaf.name]
        assert array.shape == layout.leaf_shape(leaf, size) and array.dtype == leaf.dtype and array.committed
        assert not np.asarray(array).any()


def test_misuse_is_named() -> None:
    rows, norms = random_stream(CacheLayout(CFG), 1, 0), random_norms(CacheLayout(CFG))
    q, sink = jnp.zeros((1, 2, 32)), jnp.zeros(2)
    with pytest.raises(ShapeError, match=r"layer 0: kv is float32 \[1, 31\], expected float \[1, 32\]"):
        handle_of(0).append(jnp.zeros((1, 31)))
    with pytest.raises(ShapeError, match=r"layer 0: kv is Columns of float32 \[1, 31\]"):
        handle_of(0).append(Columns(jnp.zeros((1, 64)), 4, (31,)))
    with pytest.raises(LayoutError, match="layer 2 is SWA: it has no compressor"):
        handle_of(2).compress(jnp.zeros((1, 64)), jnp.zeros((1, 64)), None)
    with pytest.raises(LayoutError, match="layer 1 is HCA"):
        handle_of(1).index_scores(jnp.zeros((1, 4, 16)), jnp.zeros((1, 4)))
    first = handle_of(0)
    with pytest.raises(ShapeError, match="selected"):
        jax.eval_shape(
            lambda step: layer_writes(step, first.spec, rows, norms).attend(q, sink)[0],
            first.step,
        )


def test_creating_a_handle_creates_no_array() -> None:
    step = handle_of(0).step
    assert step.layer(1).step is step and step.layer(1).cache is step.cache


# The order of a layer in a step

PLAN = build_plan(CacheLayout(CFG), [StepSequence(1, 0, 1)], shape_for(CacheLayout(CFG), [StepSequence(1, 0, 1)]))
ROW, SCORE, NORM = jnp.ones((1, 32)), jnp.ones((1, 64)), Epilogue(jnp.ones(32), jnp.ones(4), 1e-6)
INDEX = (SCORE[:, :32], SCORE[:, :32], Epilogue(jnp.ones(16), jnp.ones(4), 1e-6))
QUERY, SINK = jnp.zeros((1, 2, 32)), jnp.zeros(2)
CHOSEN = jnp.zeros((1, 3), jnp.int32), jnp.ones(1, jnp.int32)


def whole(handle):
    """A layer with all its writes."""
    handle = handle.append(ROW)
    match handle.spec.attn:
        case AttentionType.CSA:
            return handle.compress(SCORE, SCORE, NORM, INDEX)
        case AttentionType.HCA:
            return handle.compress(ROW, ROW, NORM)
    return handle


@pytest.mark.parametrize(
    ("problem", "layer", "calls"),
    [
        ("`append` a second time", 2, lambda h: h.append(ROW).append(ROW)),
        ("`append` a second time", 2, lambda h: h.append(ROW).step.layer(2).append(ROW)),
        ("`compress` a second time", 0, lambda h: h.compress(SCORE, SCORE, NORM).compress(SCORE, SCORE, NORM)),
        ("`compress` a second time", 1, lambda h: h.compress(ROW, ROW, NORM).compress(ROW, ROW, NORM)),
        ("`compress_index` a second time", 0, lambda h: h.compress_index(*INDEX).compress_index(*INDEX)),
        ("`compress_index` a second time", 0, lambda h: h.compress(SCORE, SCORE, NORM, INDEX).compress_index(*INDEX)),
        ("`compress_index` a second time", 0, lambda h: h.compress_index(*INDEX).compress(SCORE, SCORE, NORM, INDEX)),
        ("read before `append`", 2, lambda h: h.gather_swa()),
        ("read before `append`", 2, lambda h: h.attend(QUERY, SINK)),
        ("read before `append`", 1, lambda h: h.compress(ROW, ROW, NORM).attend(QUERY, SINK)),
        ("read through the handle that `append` returned", 2, lambda h: h.append(ROW).step.layer(2).gather_swa()),
        ("read before `compress`", 0, lambda h: h.append(ROW).attend(QUERY, SINK, CHOSEN)),
        ("read before `compress`", 1, lambda h: h.append(ROW).attend(QUERY, SINK)),
        ("read before `compress`", 1, lambda h: h.gather_all_compressed()),
        ("read before `compress`", 0, lambda h: h.compress_index(*INDEX).gather_compressed(CHOSEN[0])),
        (
            "read before `compress_index`",
            0,
            lambda h: h.append(ROW).compress(SCORE, SCORE, NORM).index_scores(jnp.zeros((1, 4, 16)), jnp.zeros((1, 4))),
        ),
        ("ends without its `append`, `compress`, `compress_index` (and", 0, lambda h: h.step.finish()),
        ("ends without its `append`:", 0, lambda h: h.compress(SCORE, SCORE, NORM, INDEX).step.finish()),
        ("ends without its `compress_index` (", 0, lambda h: h.compress(SCORE, SCORE, NORM).append(ROW).step.finish()),
    ],
)
def test_a_wrong_order_is_named(problem: str, layer: int, calls) -> None:
    step = init_cache(CacheLayout(CFG), CacheSize(2, 2, 1)).begin(PLAN)
    for other in {0, 1, 2} - {layer}:
        if problem.endswith(":"):
            step = whole(step.layer(other)).step
    with pytest.raises(StepError, match=f"layer {layer}: .*{re.escape(problem)}.*the order of a layer") as error:
        calls(step.layer(layer))
    assert error.value.layer == layer


def test_append_and_compress_may_come_in_either_order() -> None:
    rows, norms, spec = (
        random_stream(CacheLayout(CFG), 1, 0),
        random_norms(CacheLayout(CFG)),
        CFG.layer_types.index(HCA),
    )
    freq = jnp.ones(4)
    writes = [
        lambda h: h.append(rows.kv[spec]),
        lambda h: h.compress(
            jnp.asarray(rows.hca_kv[0]), jnp.asarray(rows.hca_score[0]), Epilogue(norms.hca[0], freq, 1e-6)
        ),
    ]
    caches = []
    for order in (writes, writes[::-1]):
        handle = handle_of(spec)
        for write in order:
            handle = write(handle)
        caches.append(handle.step.finish(partial=True))
    jax.tree.map(np.testing.assert_array_equal, *caches)


def test_writes_left_behind_on_another_step_are_missed_at_its_end() -> None:
    """A dropped `step = layer.step`, or a layer taken from a step of before."""
    cache = init_cache(CacheLayout(CFG), CacheSize(2, 2, 1))
    begun = cache.begin(PLAN)
    whole(begun.layer(0))
    stale = whole(whole(begun.layer(1)).step.layer(2)).step
    with pytest.raises(StepError, match=r"layer 0: the step ends without .*`layer.step`.*`finish\(partial=True\)`"):
        stale.finish()
    assert stale.finish(partial=True) is stale.cache
    step = begun
    for layer in (2, 0, 1):  # any order of layers
        step = whole(step.layer(layer)).step
    assert step.finish() is step.cache


def test_layers_of_mtp_need_not_be_written() -> None:
    cfg = DSV4Config.tiny(layer_types=(SWA,), num_mtp_layers=1)
    layout, scheduled = CacheLayout(cfg, include_drafts=True), [StepSequence(1, 0, 1)]
    begun = init_cache(layout, CacheSize(2, 2, 1)).begin(build_plan(layout, scheduled, shape_for(layout, scheduled)))
    assert begun.layer(0).append(ROW).step.finish()
    with pytest.raises(StepError, match="layer 0"):
        begun.layer(1).append(ROW).step.finish()


def test_a_step_begins_with_a_plan_and_passes_through_jit() -> None:
    cache = init_cache(CacheLayout(CFG), CacheSize(2, 2, 1))
    with pytest.raises(PlanError, match="StepPlan or a PackedPlan, got NoneType"):
        cache.begin(None)
    assert not hasattr(cache, "layer")
    plain, packed = cache.begin(PLAN, "xla"), cache.begin(PLAN.pack(), "xla")
    jax.tree.map(np.testing.assert_array_equal, plain, packed)
    step = jax.jit(lambda step: whole(step.layer(0)).step)(packed)
    assert step.written[0] == LayerWrites(7) and step.written[1] == LayerWrites(0) and step.implementation == "xla"
    assert repr(step) == "CacheStep(1 tokens, 1 of 3 layers written)"
    assert repr(step.layer(0)) == "LayerCacheHandle(layer 0, CSA, `append`, `compress`, `compress_index`)"
    jax.tree.map(np.testing.assert_array_equal, step, whole(plain.layer(0)).step)


def test_a_layer_may_read_the_entries_of_another() -> None:
    """What a layer reads goes by the owner in its schema, not by the layer."""
    layout, scheduled = CacheLayout(DSV4Config.tiny(layer_types=(HCA, HCA), hca_ratio=2)), [StepSequence(1, 0, 8)]
    plan = build_plan(layout, scheduled, shape_for(layout, scheduled), table_entries=[(1, 0, 1)])
    step = init_cache(layout, CacheSize(2, 2, 1)).begin(plan)
    kv, epilogue = jax.random.normal(jax.random.key(0), (8, 32)), Epilogue(jnp.ones(32), jnp.ones(4), 1e-6)
    reads = dataclasses.replace(layout.schema(1), owner=0, entries=layout.schema(0).entries, entry_state=None)
    assert reads.pools == (reads.window,)

    def reader(step):
        return dataclasses.replace(step.layer(1), schema=reads)

    with pytest.raises(StepError, match="layer 1: read before `compress` of layer 0, whose entries it reads"):
        reader(step).gather_all_compressed()
    with pytest.raises(LayoutError, match="layer 1 is HCA: it has no compressor"):
        reader(step).compress(kv, kv, epilogue)

    @jax.jit
    def read(cache):
        owner = cache.begin(plan).layer(0).append(kv).compress(kv, kv, epilogue)
        return reader(owner.step).gather_all_compressed(), owner.gather_all_compressed()

    shared, own = read(step.cache)
    jax.tree.map(np.testing.assert_array_equal, shared, own)
    assert np.asarray(own[0][7, :4], np.float32).any(-1).all() and own[1][7] == 4
