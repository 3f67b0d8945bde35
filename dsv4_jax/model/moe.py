"""The feed-forward part: routed experts, hash-routed experts and the shared expert (docs/model.md, Experts)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config import DSV4Config
from ..ops.moe import swiglu
from .numerics import linear
from .params import Params

__all__ = ["moe", "route"]

_SCORES = {
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    "sigmoid": jax.nn.sigmoid,
    "softmax": lambda x: jax.nn.softmax(x, -1),
}


def moe(p: Params, x: jax.Array, tokens: jax.Array, cfg: DSV4Config) -> jax.Array:
    """[T, hidden] float32, [T] token ids -> [T, hidden].

    Every expert runs on every token and the routing weight, mostly zero, picks: the plainest form
    with static shapes, and exact. A production model would dispatch tokens to experts instead.
    """
    share = route(p, x, tokens, cfg)

    def add_expert(total: jax.Array, expert: tuple[jax.Array, Params]) -> tuple[jax.Array, None]:
        weight, e = expert
        gate, up = jnp.split(linear(x, e["gate_up"]), 2, -1)
        return total + weight[:, None] * linear(swiglu(gate, up, cfg.swiglu_limit), e["down"]), None

    out, _ = lax.scan(add_expert, jnp.zeros_like(x), (share.T, p["experts"]))
    if "shared" in p:
        shared = p["shared"]
        hidden = swiglu(linear(x, shared["gate"]), linear(x, shared["up"]), cfg.swiglu_limit)
        out = out + linear(hidden, shared["down"])
    return out


def route(p: Params, x: jax.Array, tokens: jax.Array, cfg: DSV4Config) -> jax.Array:
    """Each expert's share of each token, [T, experts] float32, zero where not chosen.

    The bias only helps to choose; the shares are the chosen experts' scores, normalised and scaled.
    Hash layers look the experts up by token id.
    """
    scores = _SCORES[cfg.scoring_func](linear(x, p["gate"]))
    if "tid2eid" in p:
        chosen = p["tid2eid"][tokens]
    else:
        _, chosen = lax.top_k(scores + p["gate_bias"][None], cfg.num_experts_per_tok)
    picked = jax.nn.one_hot(chosen, cfg.n_routed_experts, dtype=jnp.float32).sum(1) * scores
    return picked / (picked.sum(-1, keepdims=True) + np.float32(1e-20)) * np.float32(cfg.routed_scaling_factor)
