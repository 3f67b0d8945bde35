"""The attention layer: projections around one layer of the cache (docs/model.md, Projections).

This is what model code that uses the cache looks like: project, `append`, `compress`, select,
`attend`. The handle knows where every byte lies; this file knows none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .. import ops
from ..config import AttentionType, DSV4Config
from ..errors import LayoutError
from ..layout import CacheLayout
from ..ops.columns import Values, dense
from ..ops.dense_e4m3 import dense_e4m3_rounding
from ..ops.epilogue import Epilogue
from ..ops.numerics import rope_frequencies
from ..ops.rounded_rows import RoundedRows
from ..step import LayerCacheHandle
from .numerics import MAX_ROWS, linear, matmul, product
from .projections import products
from .weights.params import Params
from .weights.quantised import Quantised, rounds_rows
from .weights.split import Split, split_of

__all__ = ["attention", "block_attention", "index_qat_default", "output_projection", "selected_entries"]


def attention(
    p: Params,
    handle: LayerCacheHandle,
    x: jax.Array,
    *,
    index_qat: bool | None = None,
) -> tuple[jax.Array, LayerCacheHandle]:
    """Runs one attention layer on the tokens of a step.

    Args:
        p: the layer's "attn" parameters.
        handle: the layer in the step of these tokens.
        x: [T, hidden] float, normalised; or [T / n, hidden] of this device's share of the tokens (`Split.own_share`).
        index_qat: rotate indexer queries and keys by a Hadamard matrix and round the queries to
            FP4, as the model was trained; None: as `index_qat_default` says.

    Returns:
        (the layer's output, as x but float32; the handle after the layer's writes: its `step` has the next layer).
    """
    cfg, attn = handle.layout.cfg, handle.spec.attn
    qat = index_qat_default(handle.layout) if index_qat is None and attn is AttentionType.CSA else bool(index_qat)
    freq, dtype, of_x, of_q = _projected(p, handle, x)
    q = _queries(p, handle, of_q, freq)

    def compressor(name: str, rotate: bool = False) -> tuple[Values, Values, Epilogue, jax.Array]:
        """Returns (kv, score, epilogue, position bias) of a compressor."""
        weights = p["indexer"]["compressor"] if name == "indexer.compressor" else p[name]
        epilogue = Epilogue(weights["norm"], freq, cfg.rms_norm_eps, rotate)
        return of_x[f"{name}.wkv"], of_x[f"{name}.wgate"], epilogue, weights["ape"]

    handle = handle.append(of_x["wkv"], Epilogue(p["kv_norm"], freq, cfg.rms_norm_eps))
    selected = None
    if attn is AttentionType.HCA:
        kv, score, epilogue, ape = compressor("compressor")
        handle = handle.compress(kv, score, epilogue, ape=ape)
    if attn is AttentionType.CSA:
        kv, score, epilogue, ape = compressor("compressor")
        handle = handle.compress(kv, score, epilogue, compressor("indexer.compressor", rotate=qat), ape=ape)
        selected = _selected(p, handle, of_q["indexer.wq_b"], of_x["indexer.weights_proj"], freq, qat)

    count = handle.plan.num_tokens
    shared = x.shape[0] < count
    if rounds_rows(p["wo_a"]) and count <= MAX_ROWS:
        rows = handle.attend_rounding(q, p["attn_sink"], selected, inverse_rope=freq)
        return output_projection(p, rows, cfg, shared=shared), handle
    # `dtype`: rounded at once to what `matmul` would round it to.
    out, _ = handle.attend(q, p["attn_sink"], selected, inverse_rope=freq, dtype=dtype)
    return output_projection(p, out, cfg, shared=shared), handle


def block_attention(
    p: Params, handle: LayerCacheHandle, x: jax.Array, *, index_qat: bool | None = None
) -> tuple[jax.Array, LayerCacheHandle]:
    """Runs the attention of a stage of DSpark on blocks, as `attention` runs a layer's on the tokens of a step.

    Nothing is stored: the handle is returned as it was. `index_qat` means nothing here.
    """
    freq, dtype, of_x, of_q = _projected(p, handle, x)
    q = _queries(p, handle, of_q, freq)
    epilogue = Epilogue(p["kv_norm"], freq, handle.layout.cfg.rms_norm_eps)
    out = handle.attend_block(q, p["attn_sink"], of_x["wkv"], epilogue, inverse_rope=freq, dtype=dtype)
    return output_projection(p, out, handle.layout.cfg), handle


def _projected(
    p: Params, handle: LayerCacheHandle, x: jax.Array
) -> tuple[jax.Array, jnp.dtype, Mapping[str, Values], Mapping[str, Values]]:
    """Returns RoPE frequencies, the dtype of products, and products of x and of the query latent.

    Of a share of the tokens: products of all of them, but for those that only the indexer takes; along a pool axis
    for all, since each rank has scores of its own entries, of all tokens.
    """
    cfg = handle.layout.cfg
    freq = jnp.asarray(rope_frequencies(cfg, handle.spec.attn))
    dtype = jnp.dtype(jnp.bfloat16 if p["wo_a"].dtype == jnp.bfloat16 else jnp.float32)
    of_x = products(p, "of_input", x)
    latent = ops.normalise(of_x["wq_a"], p["q_norm"], eps=cfg.rms_norm_eps, dtype=dtype)
    if x.shape[0] == handle.plan.num_tokens:
        return freq, dtype, of_x, products(p, "of_q_latent", latent)
    of_all, latent_of_all = _of_all_shares(split_of(p), of_x, latent)
    if handle.spec.attn is not AttentionType.CSA or handle.cache.pool_axis.name is not None:
        return freq, dtype, of_all, products(p, "of_q_latent", latent_of_all)
    of_q = products(p, "of_q_latent", latent_of_all, ("wq_b",)) | products(p, "of_q_latent", latent, ("indexer.wq_b",))
    return freq, dtype, of_all | {"indexer.weights_proj": of_x["indexer.weights_proj"]}, of_q


def _of_all_shares(split: Split, of_x: Mapping[str, Values], latent: jax.Array) -> tuple[dict[str, Values], jax.Array]:
    """Gathers the query latent and the products of x, without those that it was made of."""
    kept = {name: values for name, values in of_x.items() if name != "wq_a"}
    kept["wkv"] = dense(kept["wkv"]).astype(jnp.bfloat16)  # as it was made
    leaves, tree = jax.tree.flatten(kept)
    different = {id(x): x for x in leaves}  # columns of one matrix have it all
    latent, *gathered = split.all_shares(latent, *different.values())
    found = dict(zip(different, gathered, strict=True))
    kept = jax.tree.unflatten(tree, [found[id(x)] for x in leaves])
    return kept, latent


def _queries(p: Params, handle: LayerCacheHandle, of_q: Mapping[str, Values], freq: jax.Array) -> jax.Array:
    return handle.queries(of_q["wq_b"].reshape(-1, p["attn_sink"].shape[0], handle.layout.cfg.head_dim), freq)


def selected_entries(
    p: Params, handle: LayerCacheHandle, x: jax.Array, *, index_qat: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns which entries the tokens of a step read in a CSA layer: what `attention` selected, for who looks on.

    Args:
        p, x, index_qat: as `attention` was given them.
        handle: as it returned it, after the layer's writes.

    Returns:
        (logical entries [T, K] int32, how many count [T] int32), as `LayerCacheHandle.top_k`.
    """
    qat = index_qat_default(handle.layout) if index_qat is None else index_qat
    freq, _, of_x, of_q = _projected(p, handle, x)
    return _selected(p, handle, of_q["indexer.wq_b"], of_x["indexer.weights_proj"], freq, qat)


def _selected(
    p: Params, handle: LayerCacheHandle, queries: Values, head_weights: Values, freq: jax.Array, qat: bool
) -> tuple[jax.Array, jax.Array]:
    """Selects for all tokens; of queries of this device's share of them for these, and all devices have all of it."""
    cfg, plan, split = handle.layout.cfg, handle.plan, split_of(p)
    shared = queries.shape[0] < plan.num_tokens
    if shared:
        of_tokens = jnp.asarray(plan.token_seq), jnp.asarray(plan.token_slot), jnp.asarray(plan.token_position)
        seq, slot, position = map(split.own_share, of_tokens)
        own = plan._replace(token_seq=seq, token_slot=slot, token_position=position)
        handle = dataclasses.replace(handle, step=dataclasses.replace(handle.step, plan=own))
    index_q = handle.index_queries(queries.reshape(-1, cfg.index_n_heads, cfg.index_head_dim), freq, qat=qat)
    scale = (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
    entries, count = handle.top_k(handle.index_scores(index_q, head_weights, scale=scale))
    if shared:
        entries, count = split.all_shares(entries, count)
    return entries, count


def output_projection(p: Params, out: jax.Array | RoundedRows, cfg: DSV4Config, *, shared: bool = False) -> jax.Array:
    """Projects [T, heads, head_dim], or rows of that as `attend_rounding` gives them, to [T, hidden]: each group of
    consecutive heads to `o_lora_rank`, then all to hidden.

    Where heads are split over devices, each makes its groups' latents, and all of them the product of all latents: a
    sum of shares of it would depend on the number of devices. `shared`: of this device's share of the tokens alone.
    """
    split = split_of(p)
    gathered = split.own_share_of_columns if shared else split.all_columns
    groups = cfg.o_groups // split.tensor
    if isinstance(p["wo_a"], Quantised):
        rows = out if isinstance(out, RoundedRows) else out.reshape(out.shape[0], -1)
        if split.tensor == 1 and rounds_rows(p["wo_a"]) and rounds_rows(p["wo_b"]) and rows.shape[0] <= MAX_ROWS:
            whole = p["wo_a"].whole_rows
            latent = dense_e4m3_rounding(rows, *p["wo_a"].parts, groups=groups, whole_rows=whole)
            return product(latent, p["wo_b"])
        latent = product(rows, p["wo_a"], groups=groups, dtype=jnp.bfloat16)
        return linear(gathered(latent), p["wo_b"])
    assert isinstance(out, jax.Array)
    first = p["wo_a"].reshape(groups * cfg.o_lora_rank, -1)
    if first.dtype == jnp.bfloat16:
        dtype = p["wo_b"].dtype  # what the next product takes
        latent = ops.dense_bf16(out.reshape(out.shape[0], -1), first, groups=groups, dtype=dtype)
    else:
        grouped = out.reshape(out.shape[0], groups, -1)
        latent = matmul("tgd,grd->tgr", grouped, first.reshape(groups, cfg.o_lora_rank, -1))
    return linear(gathered(latent.reshape(out.shape[0], -1)), p["wo_b"])


def index_qat_default(layout: CacheLayout) -> bool:
    """Whether index keys are stored rotated (`RowFormat.needs_rotation`), as the model was trained for.

    Raises:
        LayoutError: they are, but no Hadamard matrix of that size exists here.
    """
    if not layout.index_row.needs_rotation:
        return False
    dim = layout.cfg.index_head_dim
    if dim & (dim - 1):
        raise LayoutError(
            f"index_head_dim {dim} is no power of two: use an unquantised index format or index_qat=False"
        )
    return True
