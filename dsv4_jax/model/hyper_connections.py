"""Manifold-constrained hyper-connections: several parallel residual streams (docs/model.md, Hyper-connections)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config import DSV4Config
from .numerics import linear, matmul, rms_norm
from .params import Params

__all__ = ["collapse", "hyper_head", "sinkhorn", "widen"]


def collapse(p: Params, streams: jax.Array, cfg: DSV4Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a block reads from the streams [T, n, hidden], and how its output goes back.

    Returns:
        (block input [T, hidden], post [T, n], comb [T, n, n]), for `widen`.
    """
    n, eps = cfg.hc_mult, np.float32(cfg.hc_eps)
    mix = _mix(p["fn"], streams, cfg)
    pre, post, comb = jnp.split(mix, (n, 2 * n), -1)
    base_pre, base_post, base_comb = jnp.split(p["base"][None], (n, 2 * n), -1)
    scale_pre, scale_post, scale_comb = p["scale"]
    pre = jax.nn.sigmoid(pre * scale_pre + base_pre) + eps
    post = np.float32(2) * jax.nn.sigmoid(post * scale_post + base_post)
    comb = (comb * scale_comb + base_comb).reshape(-1, n, n)
    return matmul("tn,tnd->td", pre, streams), post, sinkhorn(comb, cfg.hc_sinkhorn_iters, eps)


def widen(y: jax.Array, streams: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """New streams: X'[k] = post[k] * y + sum_j comb[j, k] * X[j]. [T, n, hidden]"""
    return post[..., None] * y[:, None] + matmul("tjk,tjd->tkd", comb, streams)


def hyper_head(p: Params, streams: jax.Array, cfg: DSV4Config) -> jax.Array:
    """The streams before the final norm and the head: a gated sum. [T, n, hidden] -> [T, hidden]"""
    gate = jax.nn.sigmoid(_mix(p["fn"], streams, cfg) * p["scale"][None] + p["base"][None]) + np.float32(cfg.hc_eps)
    return matmul("tn,tnd->td", gate, streams)


def sinkhorn(logits: jax.Array, iterations: int, eps: np.float32) -> jax.Array:
    """A nearly doubly stochastic [T, n, n]: softmax over rows, columns normalised, then rows and columns in turn."""

    def normalised(comb: jax.Array, axis: int) -> jax.Array:
        return comb / (comb.sum(axis, keepdims=True) + eps)

    comb = normalised(jax.nn.softmax(logits, -1) + eps, -2)
    # A loop: unrolled, twenty iterations at two sites a layer would be most of the model's compile time.
    return lax.fori_loop(0, iterations - 1, lambda _, comb: normalised(normalised(comb, -1), -2), comb)


def _mix(fn: jax.Array, streams: jax.Array, cfg: DSV4Config) -> jax.Array:
    return linear(rms_norm(streams.reshape(streams.shape[0], -1), None, cfg.rms_norm_eps), fn)
