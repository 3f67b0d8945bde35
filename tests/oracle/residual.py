"""Hyper-connections in NumPy float64, token by token, from their definition (docs/model.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from .released import bf16

Arrays = Mapping[str, np.ndarray]


def widened(arrays: Arrays, outputs: Sequence[np.ndarray]) -> np.ndarray:
    """The streams after a block wrote: X'[k] = post[k] y + sum over j of comb[j, k] X[j]; as bfloat16 if they are."""
    streams = arrays["streams"].astype(np.float64)
    if not outputs:
        return streams
    y = sum(x.astype(np.float64) for x in outputs)
    post, comb = arrays["post"].astype(np.float64), arrays["comb"].astype(np.float64)
    new = np.stack([post[t, :, None] * y[t] + comb[t].T @ streams[t] for t in range(len(streams))])
    return bf16(new) if arrays["streams"].dtype == ml_dtypes.bfloat16 else new


def normalised(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def gates(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def mixed(arrays: Arrays, streams: np.ndarray, eps: float) -> np.ndarray:
    return normalised(streams.reshape(len(streams), -1), eps) @ arrays["fn"].astype(np.float64).T


def read(arrays: Arrays, streams: np.ndarray, pre: np.ndarray, eps: float) -> np.ndarray:
    mix = (pre[..., None] * streams).sum(1)
    return normalised(bf16(mix) if arrays["streams"].dtype == ml_dtypes.bfloat16 else mix, eps) * arrays["norm"]


def sinkhorn(logits: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    comb = np.exp(logits - logits.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + eps
    for i in range(iterations):
        if i > 0:
            comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    return comb


def connection(
    arrays: Arrays, outputs: Sequence[np.ndarray], *, iterations: int, hc_eps: float, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, streams, post, comb."""
    streams = widened(arrays, outputs)
    n, base, scale = streams.shape[1], arrays["base"].astype(np.float64), arrays["scale"].astype(np.float64)
    mix = mixed(arrays, streams, eps) * np.repeat(scale, (n, n, n * n)) + base
    pre, post = gates(mix[:, :n]) + hc_eps, 2 * gates(mix[:, n : 2 * n])
    comb = sinkhorn(mix[:, 2 * n :].reshape(-1, n, n), iterations, hc_eps)
    return read(arrays, streams, pre, eps), streams, post, comb


def head(arrays: Arrays, outputs: Sequence[np.ndarray], *, hc_eps: float, eps: float) -> np.ndarray:
    streams = widened(arrays, outputs)
    pre = gates(mixed(arrays, streams, eps) * arrays["scale"].astype(np.float64) + arrays["base"]) + hc_eps
    return read(arrays, streams, pre, eps)
