"""A request's logits are the same bits alone and among others, when both run the shape that is pinned for a server."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config, init_cache, model
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import KVCacheManager

from . import released
from .feeding import CFG, V4_WIDTHS, decode_step, prefill, text_tokens


def decoded_logits(params: model.Params, layout: CacheLayout, lengths: list[int], rows: int, steps: int) -> np.ndarray:
    """Logits [steps, vocab] of the first of these requests, decoding given text beside the others."""
    columns = layout.blocks_for(max(lengths) + steps)
    size = CacheSize(rows * columns, rows, columns)
    cache, manager = init_cache(layout, size), KVCacheManager(layout, size)
    text = text_tokens(max(lengths) + steps).tolist()
    chunk, step = manager.pinned_shape(1, 16, history=True), manager.pinned_shape(rows)
    requests = []
    for length in lengths:
        requests.append(manager.admit_request(text[:length], max_tokens=columns * layout.block_tokens))
        while requests[-1].num_pending:
            plan = manager.plan_step([(requests[-1], min(16, requests[-1].num_pending))], shape=chunk)
            _, cache = prefill(params, cache, plan.pack(), manager.plan_tokens(plan))
    out = []
    for i in range(steps):
        for request, length in zip(requests, lengths, strict=True):
            request.tokens.append(text[length + i])
        plan = manager.plan_step([(r, 1) for r in requests], shape=step)
        logits, cache = decode_step(params, cache, plan.pack(), manager.plan_tokens(plan))
        out.append(np.asarray(logits[0]))
    return np.stack(out)


def check(cfg: DSV4Config, rows: int, steps: int, **options) -> None:
    params, layout = model.init_params(cfg, seed=2, **options), CacheLayout(cfg)
    others = [3 + 5 * i % 60 for i in range(rows - 1)]
    alone = decoded_logits(params, layout, [41], rows, steps)
    among = decoded_logits(params, layout, [41, *others], rows, steps)
    assert np.isfinite(alone).all() and np.ptp(alone) > 0.1
    np.testing.assert_array_equal(alone, among)


@pytest.mark.slow
def test_alone_and_among_others() -> None:
    check(CFG, rows=5, steps=4)


@pytest.mark.slow
def test_weights_as_released() -> None:
    cfg = dataclasses.replace(released.CFG, layer_types=released.CFG.layer_types[1:])
    check(cfg, rows=5, steps=3, weights="released", packed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bfloat16", "released"])
def test_alone_and_among_63_others_on_the_gpu(weights: str) -> None:
    """V4's widths of attention and of hyper-connections, so that every kernel takes part."""
    cfg = dataclasses.replace(
        DSV4Config.tiny(),
        **V4_WIDTHS,
        hidden_size=4096,
        hc_mult=4,
        q_lora_rank=128,
        o_lora_rank=64,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_experts_per_tok=6,
    )
    check(cfg, rows=64, steps=8, weights=weights, packed=True)
