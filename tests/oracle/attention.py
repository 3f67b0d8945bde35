"""Attention over a cache in float64, one token and one head at a time, from explicit key lists (docs/model.md)."""

from __future__ import annotations

import numpy as np


def attend(
    queries: np.ndarray, sink: np.ndarray, keys: list[np.ndarray], scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """queries [T, H, d], keys[t] [n_t, d] -> out [T, H, d], lse [T, H] (sink not counted), both float64."""
    tokens, heads, dim = queries.shape
    out, lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        k = keys[t].astype(np.float64)
        for h in range(heads):
            if not len(k):
                continue
            z = k @ queries[t, h].astype(np.float64) * scale
            top = z.max()
            lse[t, h] = np.log(np.exp(z - top).sum()) + top
            m = max(top, sink[h])
            weights = np.exp(z - m)
            out[t, h] = weights @ k / (weights.sum() + np.exp(float(sink[h]) - m))
    return out, lse


def index_scores(queries: np.ndarray, weights: np.ndarray, keys: list[np.ndarray]) -> list[np.ndarray]:
    """queries [T, H, d], weights [T, H], keys[t] [n_t, d] -> scores [n_t] of every token."""
    out = []
    for q, w, k in zip(queries.astype(np.float64), weights.astype(np.float64), keys, strict=True):
        out.append(sum(w[h] * np.maximum(k.astype(np.float64) @ q[h], 0) for h in range(len(w))))
    return out


def top_k(scores: np.ndarray, count: int, k: int) -> list[int]:
    """The k best of the first `count`, best first; NaN last, ties to the lower index."""
    ranked = [-np.inf if np.isnan(s) else float(s) for s in scores[:count]]
    return sorted(range(count), key=lambda i: (-ranked[i], i))[:k]
