"""The tiny model behind the serving tests."""

from __future__ import annotations

import functools

from dsv4_jax import AttentionType, CacheLayout, DSV4Config, model
from dsv4_jax.testing import StepRunner

from ..model.feeding import SMALL_WIDTHS

SWA, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(**SMALL_WIDTHS, layer_types=(SWA, CSA, HCA), max_position_embeddings=64)


@functools.cache
def runner(kv_format: str = "f32", index_format: str = "f32", drafts: int = 2) -> StepRunner:
    """Blocks of 8 tokens. Rows in float32 by default: then no rounding hides a difference. Compiled once a process."""
    layout = CacheLayout(CFG, kv_format, index_format, block_tokens=8, draft_tokens=drafts)
    return StepRunner(model.forward, model.init_params(CFG, seed=1), layout)
