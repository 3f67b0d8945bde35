"""Reads through a layer handle: what each token sees, in decode and in chunks, against float64 over explicit keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import KVCache, init_cache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.errors import LayoutError, ShapeError
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager.planning import RowFeed, build_plan, shape_for
from dsv4_jax.ops.columns import Columns
from dsv4_jax.plan import StepPlan

from .harness import Driver, layer_writes, pinned_shape, random_norms, random_stream
from .oracle import attention
from .oracle import rows as oracle
from .oracle.machine import CompressorInputs, Norms

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
CFG = DSV4Config.tiny(
    layer_types=(CSA, HCA, SWA), hca_ratio=16, sliding_window=9, index_topk=3, num_attention_heads=2, index_n_heads=4
)  # fmt: skip
TOKENS = 75


def read_step(cache: KVCache, plan: StepPlan, rows: CompressorInputs, norms: Norms, queries: dict[str, jax.Array]):
    """Every layer's attention output, [layers, T, H, d], and the CSA selection."""
    cache, outs, selected = cache.begin(plan), [], None
    for spec in cache.layout.schedule:
        handle = layer_writes(cache, plan, spec, rows, norms)
        chosen = None
        if spec.attn is CSA:
            chosen = selected = handle.top_k(handle.index_scores(queries["index"], queries["weights"]))
        out, _ = handle.attend(queries["attend"], queries["sink"], chosen)
        outs.append(out)
        cache = handle.cache
    return cache, jnp.stack(outs), selected


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
    driver.admit(slot, CompressorInputs(*(np.clip(x, -3, 3) for x in stream)))
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
    """Visibility by spec 2.6: positions t-W+1..t; entries s < (t+1) // ratio, for CSA the top k of them."""
    layout, cfg, stream, live = driver.layout, driver.layout.cfg, driver.streams[slot], driver.live(slot)
    kv, index = layout.kv_row.name, layout.index_row.name
    windows = oracle.decode(kv, oracle.encode(kv, stream.kv, cfg.rope_dim), cfg.rope_dim)
    entries = {p: oracle.decode(kv, tuple(x[0] for x in live[p]), cfg.rope_dim) for p in ("csa", "hca")}
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
    [([1] * TOKENS, 1), ([TOKENS], TOKENS), ([1, 2, 30, 7, 35], TOKENS)],
    ids=["serial", "one shot", "ragged"],
)
def test_every_token_sees_exactly_its_keys(chunks: list[int], width: int) -> None:
    """Ring mode and chunk mode, wrapping windows, the first tokens, no entries yet, top-k smaller than the choice."""
    driver, outs, queries = run(CacheLayout(CFG), chunks, width)
    for kind, actual, want in zip(CFG.layer_types, outs, expected(driver, queries), strict=True):
        np.testing.assert_allclose(actual, want, rtol=2e-4, atol=2e-4, err_msg=kind.name)


def handle_of(layer: int):
    layout = CacheLayout(CFG)
    feeds = [RowFeed(1, 0, 1)]
    cache = init_cache(layout, CacheSize(2, 2, 1))
    return cache.layer(layer, build_plan(layout, feeds, shape_for(layout, feeds)))


def test_misuse_is_named() -> None:
    rows, norms = random_stream(CacheLayout(CFG), 1, 0), random_norms(CacheLayout(CFG))
    q, sink = jnp.zeros((1, 2, 32)), jnp.zeros(2)
    with pytest.raises(ShapeError, match=r"layer 0: kv has shape \(1, 31\)"):
        handle_of(0).append(jnp.zeros((1, 31)))
    with pytest.raises(ShapeError, match=r"layer 0: kv has shape \(1, 31\)"):
        handle_of(0).append(Columns(jnp.zeros((1, 64)), 4, (31,)))
    score = jnp.zeros((1, 64))
    with pytest.raises(ShapeError, match=r"layer 0: ape has shape \(1, 64\), expected \(4, 64\)"):
        handle_of(0).compress(score, score, None, ape=score)
    with pytest.raises(ShapeError, match="layer 2: append"):
        handle_of(2).attend(q, sink)
    with pytest.raises(LayoutError, match="layer 2 is SWA-only"):
        handle_of(2).compress(jnp.zeros((1, 64)), jnp.zeros((1, 64)), None)
    with pytest.raises(LayoutError, match="layer 1 is HCA"):
        handle_of(1).index_scores(jnp.zeros((1, 4, 16)), jnp.zeros((1, 4)))
    first = handle_of(0)
    with pytest.raises(ShapeError, match="selected"):
        jax.eval_shape(
            lambda cache, plan: layer_writes(cache, plan, first.spec, rows, norms).attend(q, sink),
            first.cache, first.plan,
        )  # fmt: skip


def test_creating_a_handle_creates_no_array() -> None:
    handle = handle_of(0)
    assert handle.cache.layer(1, handle.plan).cache is handle.cache
