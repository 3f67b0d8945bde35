"""The feed-forward part: routed experts, hash-routed experts and the shared expert (docs/model.md, Experts)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ops
from ..config import DSV4Config
from ..formats.activations import to_bfloat16
from ..ops.batches import in_tiles
from ..ops.moe import ExpertSums
from ..ops.numerics import clamped_swiglu
from .numerics import linear
from .projections import products
from .weights.params import Params
from .weights.quantised import Quantised, rounds_rows
from .weights.split import split_of

__all__ = ["moe", "route"]

_SCORES = {
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    "sigmoid": jax.nn.sigmoid,
    "softmax": lambda x: jax.nn.softmax(x, -1),
}
MAX_TOKENS = 8192  # of a call of `ops.moe`: less than its CUDA kernel takes


def moe(p: Params, x: jax.Array, tokens: jax.Array, cfg: DSV4Config) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns what the experts add to [T, hidden] float of [T] token ids, [T, hidden] float32 of the routed and of the
    shared, or bfloat16 of both; and which routed ones each token chose, [T, k] int32. All but the ids may be of this
    device's share of the tokens (`Split.own_share`).

    Experts that stay as released run on the tokens that chose them (`ops.moe`). Others run on every token, and the
    routing weight, mostly zero, picks: the plainest form with static shapes, and exact.
    """
    experts = p["experts"]
    if "shared" in p and rounds_rows(p["shared"]["down"]):
        shared = _shared(p["shared"], x, cfg)
        if split_of(p).devices == 1 and rounds_rows(experts["down"]):
            out, chosen = _dispatched(p, x, tokens, cfg, shared.astype(jnp.bfloat16))
            return (out,), chosen
        out, chosen = _routed(p, x, tokens, cfg)
        return (to_bfloat16(out + shared),), chosen
    out, chosen = _routed(p, x, tokens, cfg)
    return (out, _shared(p["shared"], x, cfg)) if "shared" in p else (out,), chosen


def _routed(p: Params, x: jax.Array, tokens: jax.Array, cfg: DSV4Config) -> tuple[jax.Array, jax.Array]:
    dispatched = isinstance(p["experts"]["gate_up"], Quantised)
    return _dispatched(p, x, tokens, cfg) if dispatched else _everywhere(p, x, tokens, cfg)


def _shared(p: Params, x: jax.Array, cfg: DSV4Config) -> jax.Array:
    both, down = products(p, "of_token", x), p["down"]
    dtype = jnp.bfloat16 if down.dtype == jnp.bfloat16 else jnp.float32  # what `linear` takes
    return linear(ops.swiglu(both["gate"], both["up"], limit=cfg.swiglu_limit, dtype=dtype), down)


def _dispatched(
    p: Params, x: jax.Array, tokens: jax.Array, cfg: DSV4Config, beside: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    split, shared = split_of(p), x.shape[0] < tokens.shape[0]
    tokens = split.own_share(tokens) if shared else tokens
    gate, picks = p["gate"], {"chosen": p["tid2eid"][tokens]} if "tid2eid" in p else {"bias": p["gate_bias"]}
    logits = linear(x, gate, alike=rounds_rows(p["experts"]["down"]))
    chosen, share = ops.route(logits, **picks, top=cfg.num_experts_per_tok, scale=cfg.routed_scaling_factor)
    experts: Any = ops.moe_e4m3 if rounds_rows(p["experts"]["down"]) else ops.moe
    ((gate_up,), (down,)) = (p["experts"][name].parts for name in ("gate_up", "down"))
    place = {"first": split.first(down.shape[0]), "routed": cfg.n_routed_experts, "shards": split.data}

    def run(x: jax.Array, chosen: jax.Array, share: jax.Array, *beside: jax.Array) -> jax.Array:
        more = {"beside": beside[0]} if beside else {}
        return experts(x, chosen, share, gate_up, down, limit=cfg.swiglu_limit, **place, **more)

    given = (x.astype(jnp.bfloat16), chosen, share, *(() if beside is None else (beside,)))
    every = split.all_tokens(*given, shared=shared)
    return split.own_sums(in_tiles(run, MAX_TOKENS, *every), shared=shared), chosen


def _everywhere(p: Params, x: jax.Array, tokens: jax.Array, cfg: DSV4Config) -> tuple[jax.Array, jax.Array]:
    split, experts = split_of(p), p["experts"]
    chosen, share = route(p, x, tokens, cfg)
    x, share = split.all_tokens(x, share)
    here = experts["down"].shape[0]
    share = lax.dynamic_slice_in_dim(share, split.first(here), here, 1)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        # Each device's tokens by themselves: they round as they would there.
        shards = x.reshape(split.data, x.shape[0] // split.data, x.shape[1])
        return lax.map(lambda x: linear(x, weight), shards).reshape(x.shape[0], weight.shape[0])

    def add_expert(sums: ExpertSums, expert: tuple[jax.Array, jax.Array, Params]) -> tuple[ExpertSums, None]:
        weight, done, e = expert
        gate, up = jnp.split(product(x, e["gate_up"]), 2, -1)
        return sums.add(weight[:, None] * product(clamped_swiglu(gate, up, cfg.swiglu_limit), e["down"]), done), None

    each = share.T, ExpertSums.done(here, cfg.n_routed_experts), experts
    return split.own_sums(lax.scan(add_expert, ExpertSums.zeros(x.shape), each)[0].total()), chosen


def route(p: Params, x: jax.Array, tokens: jax.Array, cfg: DSV4Config) -> tuple[jax.Array, jax.Array]:
    """The experts that each token chose, [T, k] int32, and each expert's share of each token, [T, experts] float32,
    zero where not chosen.

    The bias only helps to choose; the shares are the chosen experts' scores, normalised and scaled.
    Hash layers look the experts up by token id.
    """
    scores = _SCORES[cfg.scoring_func](linear(x, p["gate"]))
    if "tid2eid" in p:
        chosen = p["tid2eid"][tokens]
    else:
        _, chosen = lax.top_k(scores + p["gate_bias"][None], cfg.num_experts_per_tok)
    picked = jax.nn.one_hot(chosen, cfg.n_routed_experts, dtype=jnp.float32).sum(1) * scores
    share = picked / (picked.sum(-1, keepdims=True) + np.float32(1e-20)) * np.float32(cfg.routed_scaling_factor)
    return chosen, share
