"""Manifold-constrained hyper-connections: several parallel residual streams (docs/model.md, Hyper-connections).

What a block writes is added when the next one reads: one op from block to block (`ops.hyper_connection`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from ..config import DSV4Config
from ..ops.hyper_connection import Written, hyper_connection, hyper_head
from ..ops.registry import Choice, offered
from .params import Params

__all__ = ["Residual", "read", "read_head"]


class Residual(NamedTuple):
    """The residual between two blocks. A pytree whose arrays all begin with the axis of tokens.

    Attributes:
        streams: [T, n, hidden] float32.
        written: the last block's output, not in the streams yet; None before the first.
    """

    streams: jax.Array
    written: Written | None = None


def read(
    p: Params,
    norm: jax.Array,
    residual: Residual,
    cfg: DSV4Config,
    dtype: jax.typing.DTypeLike,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A block's input [T, hidden] of `dtype`, normalised; the streams, post and comb with which it writes."""
    chosen = offered("hyper_connection", implementation)
    return hyper_connection(
        residual.streams, p["fn"], p["base"], p["scale"], norm, residual.written, iterations=cfg.hc_sinkhorn_iters,
        hc_eps=cfg.hc_eps, eps=cfg.rms_norm_eps, dtype=dtype, implementation=chosen,
    )  # fmt: skip


def read_head(
    p: Params,
    norm: jax.Array,
    residual: Residual,
    cfg: DSV4Config,
    dtype: jax.typing.DTypeLike,
    implementation: Choice = None,
) -> jax.Array:
    """The head's input [T, hidden] of `dtype`, normalised."""
    chosen = offered("hyper_connection", implementation)
    return hyper_head(
        residual.streams, p["fn"], p["base"], p["scale"], norm, residual.written, hc_eps=cfg.hc_eps,
        eps=cfg.rms_norm_eps, dtype=dtype, implementation=chosen,
    )  # fmt: skip
