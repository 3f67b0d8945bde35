"""The MTP layer over the cache: a guess at the token after next (`draft_steps.py`: steps that make and verify them).

The layer takes the residual of a token after the backbone's last layer, and the token that follows it (docs/model.md,
MTP). Here both are put at the place of the second: a step's tokens are fed to the layer under the plan that fed them to
the backbone, each with the residual of the token before, which is in the cache if that was fed by an earlier step.
Attention within the window depends on distances alone, so all places may be one higher than the paper's. What the cache
then keeps after n tokens is a function of these n, whatever comes next: a prefix can be shared, forked or chunked
anywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..cache import KVCache
from ..errors import ShapeError
from ..ops.no_gradient import without_gradient
from ..ops.registry import Choice
from ..plan import PackedPlan, StepPlan
from ..step import CacheStep, LayerCacheHandle
from .forward import block, joined, layers
from .head import head
from .hyper_connections import Residual
from .numerics import activations, linear, rms_norm
from .released import stream_dtype
from .weights.names import MTP
from .weights.params import Params, has_mtp

__all__ = ["check_mtp", "flat", "follow", "guess", "mtp_forward", "mtp_layer"]


def mtp_forward(
    params: Params,
    cache: KVCache,
    plan: StepPlan | PackedPlan,
    tokens: jax.Array,
    *,
    index_qat: bool | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Runs a step as `forward` does, and gives the MTP layer's logits of every scheduled token too.

    (DeepSeek-V4, arXiv 2606.19348, section 2.1, which refers to DeepSeek-V3, arXiv 2412.19437, section 2.2.)

    Args:
        params: with the MTP layer (`load_hf(drafts=True)`).
        cache: of a layout with `include_drafts`.

    Returns:
        (logits, the MTP layer's logits, both [T, vocab] float32, the cache). Both rows of a token are about the token
        after it; the second knows nothing of the token itself but its embedding. That of a token at position 0, whose
        predecessor does not exist, means nothing.

    Raises:
        ShapeError: `tokens` does not match the plan; or there is no MTP layer, in the parameters or in the cache.
    """
    check_mtp(params, cache)
    if cache.layout.cfg.dspark is not None:
        raise ShapeError("the model has no MTP layer: it drafts with DSpark's stages (draft_step)")
    step = cache.begin(plan, implementation)
    residual, step, _ = layers(params, step, tokens, index_qat)
    after, step = follow(params, step, residual, tokens)
    cfg = cache.layout.cfg
    logits = head(params, residual, cfg, implementation)
    return logits, head(params, after, cfg, implementation, of=params[MTP][0]), step.finish()


def check_mtp(params: Params, cache: KVCache) -> None:
    """Raises `ShapeError` unless both have the layers that draft."""
    what = "MTP layer" if cache.layout.cfg.dspark is None else "DSpark stages"
    if not has_mtp(params):
        raise ShapeError(f"the parameters have no {what}: they were made without drafts=True")
    if not cache.layout.include_drafts:
        raise ShapeError(f"the cache has no {what}: its layout was made without include_drafts=True")


def follow(
    params: Params, step: CacheStep[KVCache], residual: Residual, tokens: jax.Array, *, whole: bool = True
) -> tuple[Residual, CacheStep[KVCache]]:
    """Runs the MTP layer on a step's tokens, after the backbone. `whole`: as of `guess`."""
    before, handle = mtp_layer(step).carry_residual(flat(residual))
    return guess(params, handle, before, tokens, whole=whole)


def guess(
    params: Params,
    handle: LayerCacheHandle[KVCache],
    before: jax.Array,
    tokens: jax.Array,
    *,
    whole: bool = True,
) -> tuple[Residual, CacheStep[KVCache]]:
    """Runs the MTP layer: residuals of the tokens before [T, n * hidden], and tokens [T] -> the residual after it.

    `whole`: the residual is used; else XLA leaves out what only it needs, which kernels that are one call would not let
    it.
    """
    p, cfg, dtype = without_gradient(params[MTP][0]), handle.layout.cfg, activations(params)
    streams = before.reshape(-1, cfg.hidden_size)
    embedded = rms_norm(params["embed"][tokens].astype(jnp.float32), p["enorm"], cfg.rms_norm_eps)
    projected = linear(rms_norm(streams, p["hnorm"], cfg.rms_norm_eps), p["h_proj"])
    streams = projected.reshape(-1, cfg.hc_mult, cfg.hidden_size) + linear(embedded, p["e_proj"])[:, None]

    def run() -> tuple[Residual, CacheStep[KVCache]]:
        begun = Residual(streams.astype(stream_dtype(params)))
        residual, after, _ = block(p, handle, begun, tokens, dtype)
        return residual, after.step

    return joined(run, tokens.shape[0])() if whole else run()


def mtp_layer(step: CacheStep[KVCache]) -> LayerCacheHandle[KVCache]:
    return step.layer(step.layout.cfg.num_layers)


def flat(residual: Residual) -> jax.Array:
    """Returns the streams with the last block's output added to them: [T, n * hidden] float32, as the cache has."""
    return residual.whole.astype(jnp.float32).reshape(residual.streams.shape[0], -1)
