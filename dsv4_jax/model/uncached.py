"""The same model with no cache: dense attention over a whole sequence, masks instead of plans.

It is the second opinion on the cache. It shares the parts that have nothing to do with one
(hyper-connections, experts, head) and writes the rest again from the model's definition (docs/model.md):
RoPE as a complex product, compression as a reshape, selection as a mask.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config import AttentionType, DSV4Config
from ..ops.numerics import rope_frequencies
from .attention import output_projection
from .forward import check_tokens, embed
from .head import head
from .hyper_connections import Residual, behind, read
from .moe import moe
from .numerics import activations, linear, matmul, rms_norm
from .released import stream_dtype
from .weights.params import Params

__all__ = ["attention_uncached", "chosen_uncached", "forward_uncached", "mtp_uncached"]


@functools.partial(jax.jit, static_argnums=0)
def forward_uncached(cfg: DSV4Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns logits [T, vocab] float32 of one sequence, [T] int32. Memory grows with T squared.

    Raises `ShapeError` if the tokens are no array of integers.
    """
    return head(params, _backbone(params, tokens, cfg), cfg)


@functools.partial(jax.jit, static_argnums=0)
def mtp_uncached(cfg: DSV4Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Runs the MTP layer's logits [T - 1, vocab] float32: row t, of the residual of token t and of token t + 1,
    about t + 2.

    The layer as the papers number its places: row t is at position t (DeepSeek-V3, arXiv 2412.19437, section 2.2;
    DeepSeek-V4, arXiv 2606.19348, section 2.1; `MTPBlock` of the released code). Memory grows with T squared.

    Args:
        params: with the MTP layer.
        tokens: [T] int32, T at least 2.
    """
    (p,), eps = params["mtp"], cfg.rms_norm_eps
    residual = _backbone(params, tokens, cfg)
    x = rms_norm(residual.whole[:-1].astype(jnp.float32), p["hnorm"], eps)
    following = rms_norm(params["embed"][tokens[1:]].astype(jnp.float32), p["enorm"], eps)
    streams = [linear(x[:, i], p["h_proj"]) + linear(following, p["e_proj"]) for i in range(cfg.hc_mult)]
    begun = Residual(jnp.stack(streams, 1).astype(stream_dtype(params)))
    residual = _layer(p, begun, tokens[1:], AttentionType.SWA, cfg, activations(params))
    return head(params, residual, cfg, of=p)


def _backbone(params: Params, tokens: jax.Array, cfg: DSV4Config) -> Residual:
    """Returns the residual after the last layer."""
    check_tokens(tokens, len(tokens))
    residual, dtype = embed(params, tokens, cfg), activations(params)
    for p, attn in zip(params["layers"], cfg.layer_types, strict=True):
        residual = _layer(p, residual, tokens, attn, cfg, dtype)
    return residual


def _layer(
    p: Params, residual: Residual, tokens: jax.Array, attn: AttentionType, cfg: DSV4Config, dtype: jnp.dtype
) -> Residual:
    x, streams, *back = read(p, "hc_attn", residual, cfg, dtype)
    y = attention_uncached(p["attn"], x, attn, cfg)
    x, streams, *back = read(p, "hc_ffn", behind((y,), streams, *back), cfg, dtype)
    return behind(moe(p["ffn"], x, tokens, cfg)[0], streams, *back)


def attention_uncached(
    p: Params, x: jax.Array, attn: AttentionType, cfg: DSV4Config, *, chosen: jax.Array | None = None
) -> jax.Array:
    """Runs an attention layer over one sequence: [T, hidden] -> [T, hidden].

    Args:
        p: the layer's "attn" parameters.
        x: [T, hidden] float32, normalised.
        chosen: [T, T // ratio] bool, the entries of a CSA layer that each token reads; None: as its indexer picks.
    """
    eps, freq = cfg.rms_norm_eps, rope_frequencies(cfg, attn)
    position = jnp.arange(x.shape[0])
    q_latent = rms_norm(linear(x, p["wq_a"]), p["q_norm"], eps)
    q = linear(q_latent, p["wq_b"]).reshape(-1, cfg.num_attention_heads, cfg.head_dim)
    q = _rotate(rms_norm(q, None, eps), position[:, None], freq)
    keys = _rotate(rms_norm(linear(x, p["wkv"]), p["kv_norm"], eps), position, freq)
    age = position[:, None] - position[None]
    visible = (age >= 0) & (age < cfg.sliding_window)
    if attn is not AttentionType.SWA:
        entries = _compress(p["compressor"], x, freq, eps)
        if attn is AttentionType.CSA:
            ready = chosen_uncached(p, x, cfg) if chosen is None else chosen
        else:
            ready = _ready(x, entries.shape[0], cfg.ratio(attn))
        keys, visible = jnp.concatenate([keys, entries]), jnp.concatenate([visible, ready], 1)

    logits = matmul("thd,kd->thk", q, keys) * np.float32(cfg.head_dim**-0.5)
    logits = jnp.where(visible[:, None], logits, -np.float32(np.inf))
    sink = jnp.broadcast_to(p["attn_sink"][None, :, None], (*logits.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, sink], -1), -1)[..., :-1]
    out = matmul("thk,kd->thd", weights, keys)
    return output_projection(p, _rotate(out, -position[:, None], freq), cfg)


def _compress(p: Params, x: jax.Array, freq: np.ndarray, eps: float) -> jax.Array:
    """The entries of all whole blocks, [T // ratio, e]; overlapping if the projections are twice as wide as e."""
    ratio, width, dim = *p["ape"].shape, p["norm"].shape[0]
    blocks = x.shape[0] // ratio
    kv, gate = (linear(x[: blocks * ratio], p[w]).reshape(blocks, ratio, width) for w in ("wkv", "wgate"))
    gate = gate + p["ape"][None]
    if width == 2 * dim:

        def with_previous(rows: jax.Array, nothing: float) -> jax.Array:
            before = jnp.pad(rows[:-1, :, :dim], ((1, 0), (0, 0), (0, 0)), constant_values=nothing)
            return jnp.concatenate([before[:blocks], rows[:, :, dim:]], 1)

        kv, gate = with_previous(kv, 0.0), with_previous(gate, -np.inf)
    pooled = (kv * jax.nn.softmax(gate, 1)).sum(1)
    return _rotate(rms_norm(pooled, p["norm"], eps), ratio * jnp.arange(blocks), freq)


def chosen_uncached(p: Params, x: jax.Array, cfg: DSV4Config) -> jax.Array:
    """Returns which entries each token's indexer picks in a CSA layer, [T, T // ratio] bool.

    Args:
        p: the layer's "attn" parameters.
        x: [T, hidden] float32, normalised.
    """
    eps, freq, p_index = cfg.rms_norm_eps, rope_frequencies(cfg, AttentionType.CSA), p["indexer"]
    keys = _compress(p_index["compressor"], x, freq, eps)
    ready = _ready(x, keys.shape[0], cfg.ratio(AttentionType.CSA))
    if keys.shape[0] <= cfg.index_topk:
        return ready
    q = linear(rms_norm(linear(x, p["wq_a"]), p["q_norm"], eps), p_index["wq_b"])
    q = _rotate(q.reshape(-1, cfg.index_n_heads, cfg.index_head_dim), jnp.arange(x.shape[0])[:, None], freq)
    scale = np.float32((cfg.index_n_heads * cfg.index_head_dim) ** -0.5)
    heads = linear(x, p_index["weights_proj"]) * scale
    scores = matmul("th,ths->ts", heads, jax.nn.relu(matmul("thd,sd->ths", q, keys)))
    _, best = lax.top_k(jnp.where(ready, scores, -np.float32(np.inf)), cfg.index_topk)
    return ready & jax.nn.one_hot(best, keys.shape[0], dtype=jnp.bool_).any(1)


def _ready(x: jax.Array, entries: int, ratio: int) -> jax.Array:
    """Which of the entries are finished when each token attends, [T, entries] bool."""
    return jnp.arange(entries)[None] < ((jnp.arange(x.shape[0]) + 1) // ratio)[:, None]


def _rotate(x: jax.Array, position: jax.Array, freq: np.ndarray) -> jax.Array:
    """RoPE: adjacent pairs of the last dims as complex numbers, times e^(i * position * freq)."""
    plain, rotary = jnp.split(x, [x.shape[-1] - 2 * freq.size], -1)
    pairs = lax.complex(rotary[..., 0::2], rotary[..., 1::2])
    angle = position[..., None].astype(jnp.float32) * lax.expand_dims(jnp.asarray(freq), range(position.ndim))
    turned = pairs * lax.complex(jnp.cos(angle), jnp.sin(angle))
    return jnp.concatenate([plain, jnp.stack([turned.real, turned.imag], -1).reshape(rotary.shape)], -1)
