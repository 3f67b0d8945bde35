"""The weights: a pytree of plain dicts, named as in the published checkpoints, one dict per layer.

Matrices are stored [out, in], as checkpoints do. The layers that draft are there where they were asked for: "mtp",
a tuple of the MTP layer, or of the stages of DSpark.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...checks import shown
from ...config import AttentionType, DSV4Config, LayerSpec, Numerics, build_schedule
from ...errors import CheckpointError, ConfigError
from ...formats.weights import WEIGHT_FORMATS, WeightFormat
from ...former_names import former_keywords
from .names import MTP
from .quantised import FP4, FP8, Quantised

__all__ = ["RELEASED", "Params", "Weights", "check_expert_ids", "has_mtp", "is_leaf", "param_specs", "weight_bytes"]

Params = dict[str, Any]
RELEASED = "released"
Weights: TypeAlias = "jax.typing.DTypeLike | Literal['released']"


@former_keywords(mtp="drafts")
def param_specs(
    cfg: DSV4Config, weights: Weights = jnp.float32, *, drafts: bool = False, numerics: Numerics = "plain"
) -> Params:
    """The tree of `jax.ShapeDtypeStruct` that the parameters of this model have.

    Args:
        weights: the dtype of all matrices; or "released", the formats of the published checkpoints: `Quantised` fp8
            matrices of attention and shared experts, fp4 experts (gates and ups in one, eight rows of each in turn,
            as `ops.moe` takes them), and bfloat16 for embedding, head, compressors, index weights and gate. Norms,
            sinks, biases and hyper-connections are float32 always.
        drafts: with those of the layers that draft, whose projections (of DSpark `main_proj`) are stored as those of
            attention are, and DSpark's table of pairs of tokens as the embedding is.
        numerics: "released" has FP8 and FP4 matrices in the forms whose products round rows to e4m3
            (`CacheLayout(numerics=)` is to say so, too); of released weights alone.

    Raises:
        ShapeError: a matrix has a size that its released format does not have.
        ConfigError: `weights` or `numerics` is something else, or they do not go together; the released formats go
            with another way of scoring experts; `drafts` is no bool, or the model has neither DSpark's stages nor one
            MTP layer; or `cfg` is none.
    """
    if not isinstance(cfg, DSV4Config):
        raise ConfigError(None, f"the parameters of a model are those of a DSV4Config, got {shown(cfg)}")
    if not isinstance(drafts, bool):
        raise ConfigError("drafts", f"expected True or False, got {shown(drafts)}")
    if drafts and cfg.dspark is None and cfg.num_mtp_layers != 1:
        raise ConfigError("num_mtp_layers", f"a model drafts with one MTP layer, this one has {cfg.num_mtp_layers}")
    released = isinstance(weights, str) and weights == RELEASED
    if not released and not _is_float(weights):
        raise ConfigError("weights", f"expected a dtype of floats or {RELEASED!r}, got {shown(weights)}")
    if numerics not in get_args(Numerics):
        raise ConfigError("numerics", f"expected {' or '.join(map(repr, get_args(Numerics)))}, got {shown(numerics)}")
    if numerics == "released" and not released:
        raise ConfigError("numerics", f"the released ones are of weights as {RELEASED!r}, got {shown(weights)}")
    dtype = jnp.bfloat16 if released else weights
    if released and cfg.scoring_func != "sqrtsoftplus":
        raise ConfigError("scoring_func", f"released weights are for sqrtsoftplus, got {cfg.scoring_func!r}")

    def matrix(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def stored(fmt: WeightFormat, name: str, *shape: int) -> Any:
        if not released:
            return matrix(*shape)
        *lead, rows, columns = shape
        fmt.check(name, rows, columns)
        parts = fmt.packed(rows, columns)
        return Quantised(tuple(jax.ShapeDtypeStruct((*lead, *part), jnp.uint8) for part in parts), fmt)

    rounding = "_e4m3" if numerics == "released" else ""
    dense, expert = (functools.partial(stored, WEIGHT_FORMATS[f"{fmt.name}{rounding}"]) for fmt in (FP8, FP4))

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
            "wq_a": dense("wq_a", cfg.q_lora_rank, hidden),
            "q_norm": vector(cfg.q_lora_rank),
            "wq_b": dense("wq_b", heads * dim, cfg.q_lora_rank),
            "wkv": dense("wkv", dim, hidden),
            "kv_norm": vector(dim),
            "attn_sink": vector(heads),
            "wo_a": dense("wo_a", cfg.o_groups * cfg.o_lora_rank, heads * dim // cfg.o_groups),
            "wo_b": dense("wo_b", hidden, cfg.o_groups * cfg.o_lora_rank),
        }
        if attn is AttentionType.HCA:
            p["compressor"] = compressor(cfg.hca_ratio, dim, dim)
        if attn is AttentionType.CSA:
            p["compressor"] = compressor(cfg.csa_ratio, 2 * dim, dim)
            p["indexer"] = {
                "wq_b": dense("indexer.wq_b", cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank),
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
            "experts": {
                "gate_up": expert("experts.gate_up", experts, 2 * inner, hidden),
                "down": expert("experts.down", experts, hidden, inner),
            },
        }
        if spec.hash_routed:
            p["tid2eid"] = jax.ShapeDtypeStruct((cfg.vocab_size, cfg.num_experts_per_tok), jnp.int32)
        else:
            p["gate_bias"] = vector(experts)
        if cfg.n_shared_experts:
            width = inner * cfg.n_shared_experts
            p["shared"] = {
                "gate": dense("shared.gate", width, hidden),
                "up": dense("shared.up", width, hidden),
                "down": dense("shared.down", hidden, width),
            }
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

    def before_head() -> Params:
        fn = vector(streams, streams * hidden)
        return {"hc_head": {"fn": fn, "base": vector(streams), "scale": vector(1)}, "norm": vector(hidden)}

    def mtp_layer(spec: LayerSpec) -> Params:
        of_input = {name: vector(hidden) for name in ("enorm", "hnorm")}
        of_input |= {name: dense(name, hidden, hidden) for name in ("e_proj", "h_proj")}
        return layer(spec) | of_input | before_head()

    def stage(spec: LayerSpec) -> Params:
        p, head = layer(spec), cfg.dspark
        assert head is not None
        if spec.layer_idx == cfg.num_layers:
            p |= {"main_proj": dense("main_proj", hidden, len(head.target_layer_ids) * hidden)}
            p |= {"main_norm": vector(hidden)}
        if spec.layer_idx == cfg.num_layers + head.stages - 1:
            p |= before_head() | {"confidence": matrix(1, hidden + head.markov_rank)}
            p["markov"] = {name: matrix(cfg.vocab_size, head.markov_rank) for name in ("w1", "w2")}
        return p

    schedule = build_schedule(cfg, include_drafts=drafts)
    tree = before_head() | {
        "embed": matrix(cfg.vocab_size, hidden),
        "layers": tuple(layer(spec) for spec in schedule if not spec.is_mtp),
    }
    if drafts:
        of = mtp_layer if cfg.dspark is None else stage
        tree[MTP] = tuple(of(spec) for spec in schedule if spec.is_mtp)
    return tree if cfg.tie_word_embeddings else tree | {"head": matrix(cfg.vocab_size, hidden)}


def _is_float(dtype: Any) -> bool:
    try:
        return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:  # no dtype at all
        return False


def is_leaf(node: Any) -> bool:
    """Tells `jax.tree` functions that a quantised parameter, which has several arrays, is one leaf."""
    return isinstance(node, Quantised)


def check_expert_ids(name: str, table: np.ndarray, cfg: DSV4Config) -> None:
    """Raises `CheckpointError` unless the table of a hash layer [vocab, top] gives each token distinct experts."""
    if not np.issubdtype(table.dtype, np.integer):
        raise CheckpointError(f"tensor {name} has dtype {table.dtype}, expected integers")
    low, high, experts = table.min(), table.max(), cfg.n_routed_experts
    if low < 0 or high >= experts:
        raise CheckpointError(f"tensor {name} holds experts {low}..{high}, the model has 0..{experts - 1}")
    in_order = np.sort(table, 1)
    if (twice := (in_order[:, 1:] == in_order[:, :-1]).any(1)).any():
        token = int(twice.argmax())
        raise CheckpointError(f"tensor {name} gives token {token} the experts {table[token].tolist()}: one twice")


def has_mtp(params: Params) -> bool:
    """Whether the layers that draft are among the parameters."""
    return len(params.get(MTP, ())) > 0


@former_keywords(mtp="drafts")
def weight_bytes(cfg: DSV4Config, weights: Weights = RELEASED, *, drafts: bool = False) -> int:
    """Returns the parameters' bytes on devices, with `drafts` those of the layers that draft too.

    Raises as `param_specs`.
    """
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(param_specs(cfg, weights, drafts=drafts)))
