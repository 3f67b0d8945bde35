"""Manifold-constrained hyper-connections: several parallel residual streams (docs/model.md, Hyper-connections).

What a block writes is added when the next one reads: one op from block to block (`ops.hyper_connection`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..config import DSV4Config
from ..ops.hyper_connection import Written, connection_vector, hyper_connection, hyper_head, widened
from ..ops.numerics import MIN_ROWS
from ..ops.registry import Choice, offered
from .weights.params import Params
from .weights.stacking import SITES

__all__ = ["Residual", "behind", "padded_rows", "read", "read_head"]


class Residual(NamedTuple):
    """The residual between two blocks. A pytree whose arrays all begin with the axis of tokens.

    Attributes:
        streams: [T, n, hidden] float32; bfloat16 in the released numerics.
        written: the last block's output, not in the streams yet; None before the first.
    """

    streams: jax.Array
    written: Written | None = None

    @property
    def whole(self) -> jax.Array:
        """The streams with the last block's output added to them."""
        return self.streams if self.written is None else widened(self.streams, self.written)


def behind(outputs: tuple[jax.Array, ...], streams: jax.Array, post: jax.Array, comb: jax.Array) -> Residual:
    """Returns the residual behind a block that made `outputs` [T, hidden], and of which `read` gave the rest.

    Outputs become what the streams are; those of the released numerics hold bfloat16 numbers already.
    """
    return Residual(streams, Written(tuple(x.astype(streams.dtype) for x in outputs), post, comb))


def read(
    p: Params,
    site: str,
    residual: Residual,
    cfg: DSV4Config,
    dtype: jax.typing.DTypeLike,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes what a block of the layer p reads, at "hc_attn" or "hc_ffn".

    Returns:
        (block input [T, hidden] of `dtype`, normalised; streams, post and comb with which it writes).
    """
    return hyper_connection(
        residual.streams,
        p[site]["fn"],
        _vector(p[site], p.get(SITES[site])),
        residual.written,
        iterations=cfg.hc_sinkhorn_iters,
        hc_eps=cfg.hc_eps,
        eps=cfg.rms_norm_eps,
        dtype=dtype,
        implementation=offered("hyper_connection", implementation),
    )


def read_head(
    params: Params,
    residual: Residual,
    cfg: DSV4Config,
    dtype: jax.typing.DTypeLike,
    implementation: Choice = None,
) -> jax.Array:
    """Computes the head's input: [max(T, MIN_ROWS), hidden] of `dtype`, normalised; [T, hidden] if that is float32."""
    p = params["hc_head"]
    return hyper_head(
        residual.streams,
        p["fn"],
        _vector(p, params["norm"]),
        residual.written,
        hc_eps=cfg.hc_eps,
        eps=cfg.rms_norm_eps,
        dtype=dtype,
        rows=padded_rows(dtype),
        implementation=offered("hyper_connection", implementation),
    )


def padded_rows(dtype: jax.typing.DTypeLike) -> int:
    """The least rows of what goes into products with bfloat16 weights (`ops.numerics.pad_rows`)."""
    return MIN_ROWS if dtype == jnp.bfloat16 else 0


def _vector(p: Params, norm: jax.Array | None) -> jax.Array:
    """Returns the vector of a site, stacked or not; stacked ones have taken the norm in."""
    if "vector" in p:
        return p["vector"]
    assert norm is not None
    return connection_vector(norm, p["base"], p["scale"])
