"""What a cache of fewer bits changes: each layer's attention by itself, against float32 and no cache at all.

All of a layer but its cache is the same on both sides, its input too. So what differs is the rounding of stored rows
and keys, and nothing that a chain of layers makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache, init_cache
from ..capacity import capacity
from ..config import AttentionType
from ..layout import CacheLayout
from ..manager import KVCacheManager
from ..model.attention import attention, selected_entries
from ..model.numerics import rms_norm
from ..model.uncached import attention_uncached, chosen_uncached
from ..model.weights.params import Params
from ..plan import PackedPlan
from ..step import LayerCacheHandle

__all__ = ["LayerAccuracy", "attention_accuracy"]


class LayerAccuracy(NamedTuple):
    """How far one layer with a quantised cache is from float32.

    Attributes:
        layer: its index.
        attention: its kind.
        output_error: norm of the difference of attention outputs over the norm of float32's, the same entries read.
        same_entries: of the entries that float32 picks, the share that the quantised index keys pick too, over tokens
            that have more entries than they may pick. None: no layer that picks, or too few tokens.
    """

    layer: int
    attention: AttentionType
    output_error: float
    same_entries: float | None


def attention_accuracy(
    params: Params, layout: CacheLayout, tokens: Sequence[int], *, compiler_options: Mapping[str, int] | None = None
) -> list[LayerAccuracy]:
    """Every layer's attention through a cache of this layout, fed with the normalised embeddings of a text.

    Args:
        params: as `load_hf` or `init_params` give them.
        tokens: of one sequence; memory grows with the square of their number.
        compiler_options: of `jax.jit`; compiling is most of the time this takes.
    """
    size = capacity(layout, max_requests=1, max_context=len(tokens)).size
    manager = KVCacheManager(layout, size)
    request = manager.admit_request(list(tokens))
    shape = manager.pinned_shape(1, len(tokens), history=True)
    plan = manager.plan_step([(request, len(tokens))], shape=shape)
    measure = jax.jit(_measure, compiler_options=dict(compiler_options or {}))
    measured = measure(params, init_cache(layout, size), plan.pack(), np.asarray(tokens, np.int32))
    found = []
    for spec, (error, same) in zip(layout.cfg.layer_types, jax.device_get(measured), strict=True):
        found.append(LayerAccuracy(len(found), spec, float(error), None if np.isnan(same) else float(same)))
    manager.release_request(request)
    return found


def _measure(params: Params, cache: KVCache, plan: PackedPlan, tokens: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Returns (output_error, same_entries or NaN) of every layer."""
    cfg, step = cache.layout.cfg, cache.begin(plan)
    embedded, found = params["embed"][tokens].astype(jnp.float32), []
    for i, p in enumerate(params["layers"]):
        p_attn, attn = p["attn"], cfg.layer_types[i]
        x = rms_norm(embedded, p["attn_norm"], cfg.rms_norm_eps)
        y, handle = attention(p_attn, step.layer(i), x)
        step, chosen, same = handle.step, None, jnp.float32(np.nan)
        if attn is AttentionType.CSA:
            chosen, wanted = _picked(p_attn, handle, x), chosen_uncached(p_attn, x, cfg)
            choice = (jnp.arange(x.shape[0]) + 1) // cfg.ratio(attn) > cfg.index_topk
            same = (chosen & wanted & choice[:, None]).sum() / (wanted & choice[:, None]).sum()
        exact = attention_uncached(p_attn, x, attn, cfg, chosen=chosen)
        found.append((jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact), same))
    return found


def _picked(p: Params, handle: LayerCacheHandle, x: jax.Array) -> jax.Array:
    """The entries that each token picks by the stored index keys, [T, T // ratio] bool."""
    best, kept = selected_entries(p, handle, x)
    there = jnp.arange(best.shape[1])[None] < kept[:, None]
    entries = x.shape[0] // handle.layout.cfg.ratio(AttentionType.CSA)
    return (jax.nn.one_hot(best, entries, dtype=jnp.bool_) & there[..., None]).any(1)
