"""The weights: a pytree of plain dicts, named as in the published checkpoints, one dict per layer.

Matrices are stored [out, in], as checkpoints do. MTP layers have no place here: the reference
model parses their number and does not run them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import AttentionType, DSV4Config, LayerSpec, build_schedule

__all__ = ["Params", "init_params", "param_specs"]

Params = dict[str, Any]


def param_specs(cfg: DSV4Config, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """The tree of `jax.ShapeDtypeStruct` that the parameters of this model have.

    `dtype` is that of the matrices; norms, sinks, biases and hyper-connections are float32 always.
    """

    def matrix(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def vector(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    hidden, dim, streams = cfg.hidden_size, cfg.head_dim, cfg.hc_mult
    heads, experts, inner = cfg.num_attention_heads, cfg.n_routed_experts, cfg.moe_intermediate_size

    def compressor(ratio: int, width: int, dim: int) -> Params:
        return {
            "wkv": matrix(width, hidden),
            "wgate": matrix(width, hidden),
            "ape": vector(ratio, width),
            "norm": vector(dim),
        }

    def attention(attn: AttentionType) -> Params:
        p: Params = {
            "wq_a": matrix(cfg.q_lora_rank, hidden),
            "q_norm": vector(cfg.q_lora_rank),
            "wq_b": matrix(heads * dim, cfg.q_lora_rank),
            "wkv": matrix(dim, hidden),
            "kv_norm": vector(dim),
            "attn_sink": vector(heads),
            "wo_a": matrix(cfg.o_groups * cfg.o_lora_rank, heads * dim // cfg.o_groups),
            "wo_b": matrix(hidden, cfg.o_groups * cfg.o_lora_rank),
        }
        if attn is AttentionType.HCA:
            p["compressor"] = compressor(cfg.hca_ratio, dim, dim)
        if attn is AttentionType.CSA:
            p["compressor"] = compressor(cfg.csa_ratio, 2 * dim, dim)
            p["indexer"] = {
                "wq_b": matrix(cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank),
                "weights_proj": matrix(cfg.index_n_heads, hidden),
                "compressor": compressor(cfg.csa_ratio, 2 * cfg.index_head_dim, cfg.index_head_dim),
            }
        return p

    def hyper_connection() -> Params:
        weights = (2 + streams) * streams
        return {"fn": vector(weights, streams * hidden), "base": vector(weights), "scale": vector(3)}

    def feed_forward(spec: LayerSpec) -> Params:
        p: Params = {
            "gate": matrix(experts, hidden),
            "experts": {"gate_up": matrix(experts, 2 * inner, hidden), "down": matrix(experts, hidden, inner)},
        }
        if spec.hash_routed:
            p["tid2eid"] = jax.ShapeDtypeStruct((cfg.vocab_size, cfg.num_experts_per_tok), jnp.int32)
        else:
            p["gate_bias"] = vector(experts)
        if cfg.n_shared_experts:
            width = inner * cfg.n_shared_experts
            p["shared"] = {"gate": matrix(width, hidden), "up": matrix(width, hidden), "down": matrix(hidden, width)}
        return p

    def layer(spec: LayerSpec) -> Params:
        return {
            "hc_attn": hyper_connection(),
            "attn_norm": vector(hidden),
            "attn": attention(spec.attn),
            "hc_ffn": hyper_connection(),
            "ffn_norm": vector(hidden),
            "ffn": feed_forward(spec),
        }

    head = {"fn": vector(streams, streams * hidden), "base": vector(streams), "scale": vector(1)}
    tree = {
        "embed": matrix(cfg.vocab_size, hidden),
        "layers": tuple(layer(spec) for spec in build_schedule(cfg)),
        "hc_head": head,
        "norm": vector(hidden),
    }
    return tree if cfg.tie_word_embeddings else tree | {"head": matrix(cfg.vocab_size, hidden)}


def init_params(cfg: DSV4Config, seed: int = 0, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Random parameters in which nothing is neutral: norms, sinks, biases and mixing weights differ too.

    Matrices are normal with variance 1 / fan-in; hash layers send every token to distinct experts.
    """
    rng = np.random.default_rng(seed)

    def leaf(path: tuple[Any, ...], spec: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name == "tid2eid":
            order = rng.random((cfg.vocab_size, cfg.n_routed_experts)).argsort(1)
            return jnp.asarray(order[:, : cfg.num_experts_per_tok], jnp.int32)
        if "norm" in name or name == "scale":
            value = rng.uniform(0.5, 1.5, spec.shape)
        elif name in ("attn_sink", "ape", "base"):
            value = rng.normal(size=spec.shape)
        elif name == "gate_bias":
            value = rng.normal(0, 0.1, spec.shape)
        else:
            value = rng.normal(0, spec.shape[-1] ** -0.5, spec.shape)
        return jnp.asarray(value.astype(np.float32)).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(leaf, param_specs(cfg, dtype))
