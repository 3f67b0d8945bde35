"""The attention layer: projections around one layer of the cache (spec 2.1 - 2.8).

This is what model code that uses the cache looks like: project, `append`, `compress`, select,
`attend`. The handle knows where every byte lies; this file knows none of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import LayerCacheHandle
from ..config import AttentionType, DSV4Config
from ..errors import LayoutError
from ..formats.index_fp4 import round_trip
from ..layout import CacheLayout
from ..ops.finish import Finish
from ..ops.numerics import hadamard, rope
from .numerics import layer_frequencies, linear, matmul, rms_norm
from .params import Params

__all__ = ["attention", "index_qat_default"]


def attention(
    p: Params, handle: LayerCacheHandle, x: jax.Array, *, index_qat: bool | None = None
) -> tuple[jax.Array, LayerCacheHandle]:
    """One attention layer.

    Args:
        p: the layer's "attn" parameters.
        handle: the layer's view of the cache, of the step that feeds these tokens.
        x: [T, hidden] float32, normalised.
        index_qat: rotate indexer queries and keys by a Hadamard matrix and round the queries to
            FP4, as the model was trained; None: as `index_qat_default` says.

    Returns:
        ([T, hidden] float32, the handle with the layer's cache updated).
    """
    cfg, attn = handle.layout.cfg, handle.spec.attn
    position = jnp.asarray(handle.plan.token_position)
    freq = jnp.asarray(layer_frequencies(cfg, attn))

    q_latent = rms_norm(linear(x, p["wq_a"]), p["q_norm"], cfg.rms_norm_eps)
    q = linear(q_latent, p["wq_b"]).reshape(-1, cfg.num_attention_heads, cfg.head_dim)
    q = rope(rms_norm(q, None, cfg.rms_norm_eps), position[:, None], freq)

    handle = handle.append(linear(x, p["wkv"]), Finish(p["kv_norm"], freq, cfg.rms_norm_eps))
    selected = index = None
    qat = False
    if attn is AttentionType.CSA:
        qat = index_qat_default(handle.layout) if index_qat is None else index_qat
        index = compressor_inputs(p["indexer"]["compressor"], x, position, freq, cfg, rotate=qat)
    if attn is not AttentionType.SWA:
        handle = handle.compress(*compressor_inputs(p["compressor"], x, position, freq, cfg), index)
    if attn is AttentionType.CSA:
        selected = select_entries(p["indexer"], handle, x, q_latent, freq, qat)
    out, _ = handle.attend(q, p["attn_sink"], selected)

    out = rope(out, position[:, None], freq, inverse=True)
    return output_projection(p, out, cfg), handle


def compressor_inputs(
    p: Params, x: jax.Array, position: jax.Array, freq: jax.Array, cfg: DSV4Config, *, rotate: bool = False
) -> tuple[jax.Array, jax.Array, Finish]:
    """(kv, score, finish) of a compressor; the score carries the bias of the token's place in its block."""
    ratio = np.int32(p["ape"].shape[0])
    score = linear(x, p["wgate"]) + p["ape"][position % ratio]
    return linear(x, p["wkv"]), score, Finish(p["norm"], freq, cfg.rms_norm_eps, rotate)


def select_entries(
    p: Params, handle: LayerCacheHandle, x: jax.Array, q_latent: jax.Array, freq: jax.Array, qat: bool
) -> tuple[jax.Array, jax.Array]:
    """The lightning indexer: picks the entries each token attends to (spec 2.5)."""
    cfg, position = handle.layout.cfg, jnp.asarray(handle.plan.token_position)
    q = linear(q_latent, p["wq_b"]).reshape(-1, cfg.index_n_heads, cfg.index_head_dim)
    q = rope(q, position[:, None], freq)
    q = round_trip(hadamard(q)) if qat else q
    weights = linear(x, p["weights_proj"]) * np.float32((cfg.index_head_dim * cfg.index_n_heads) ** -0.5)
    return handle.top_k(handle.index_scores(q, weights))


def output_projection(p: Params, out: jax.Array, cfg: DSV4Config) -> jax.Array:
    """[T, heads, head_dim] -> [T, hidden]: each group of consecutive heads to `o_lora_rank`, then all to hidden."""
    grouped = out.reshape(out.shape[0], cfg.o_groups, -1)
    first = p["wo_a"].reshape(cfg.o_groups, cfg.o_lora_rank, -1)
    return linear(matmul("tgd,grd->tgr", grouped, first).reshape(out.shape[0], -1), p["wo_b"])


def index_qat_default(layout: CacheLayout) -> bool:
    """Whether index keys are quantised, so that the trained rotation and rounding matter.

    Raises:
        LayoutError: they are, but no Hadamard matrix of that size exists here.
    """
    if layout.index_row.name not in ("fp4", "fp8"):
        return False
    dim = layout.cfg.index_head_dim
    if dim & (dim - 1):
        raise LayoutError(
            f"index_head_dim {dim} is no power of two: use an unquantised index format or index_qat=False"
        )
    return True
