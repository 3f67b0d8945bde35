from __future__ import annotations

import jax
import numpy as np
import pytest

from dsv4_jax import DSV4Config, model
from dsv4_jax.model.moe import moe, route

T = 20


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(T, 64)).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


SCORES = {
    "softmax": softmax,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
}


@pytest.mark.parametrize("scoring_func", SCORES)
@pytest.mark.parametrize("hashed", [True, False])
def test_routing_and_experts(x, scoring_func, hashed):
    """Against a loop over tokens: chosen by score plus bias (or by token id), weighted by score alone."""
    cfg = DSV4Config.tiny(
        scoring_func=scoring_func, n_routed_experts=6, num_experts_per_tok=3, swiglu_limit=0.7, num_hash_layers=1
    )
    p = model.init_params(cfg, seed=6)["layers"][0 if hashed else 1]["ffn"]
    tokens = np.arange(T, dtype=np.int32) * 7
    scores = SCORES[scoring_func](x.astype(np.float64) @ np.asarray(p["gate"], np.float64).T)
    share, out, picked = np.zeros((T, 6)), np.zeros((T, 64)), []

    def mlp(row, gate, up, down):
        gate, up = np.minimum(gate @ row, 0.7), np.clip(up @ row, -0.7, 0.7)
        return down @ (gate / (1 + np.exp(-gate)) * up)

    for t in range(T):
        chosen = p["tid2eid"][tokens[t]] if hashed else np.argsort(-(scores[t] + p["gate_bias"]))[:3]
        chosen = np.asarray(chosen)
        picked.append(chosen.tolist())
        share[t, chosen] = scores[t, chosen] / scores[t, chosen].sum() * cfg.routed_scaling_factor
        for e in chosen:
            gate, up = np.split(np.asarray(p["experts"]["gate_up"][e]), 2)
            out[t] += share[t, e] * mlp(x[t], gate, up, np.asarray(p["experts"]["down"][e]))
        out[t] += mlp(x[t], *(np.asarray(p["shared"][name]) for name in ("gate", "up", "down")))
    chosen, shares = jax.jit(route, static_argnums=3)(p, x, tokens, cfg)
    np.testing.assert_allclose(shares, share, atol=1e-5)
    (routed, shared), also = jax.jit(moe, static_argnums=3)(p, x, tokens, cfg)
    assert chosen.tolist() == also.tolist() == picked
    np.testing.assert_allclose(routed + shared, out, atol=1e-4)
