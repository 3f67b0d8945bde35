"""Checkpoints: a directory with `config.json` and `model.safetensors` (or shards and their index).

Two spellings of tensor names are read: that of the published checkpoints, which `transformers`
>= 5.10 also writes, and that of the `transformers` modules, which `save_hf` writes. FP8 matrices
with scales per 128 x 128 block are dequantised; MTP layers are skipped.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..config import DSV4Config
from ..errors import CheckpointError
from .params import Params, param_specs
from .safetensors import read_safetensors, write_safetensors

__all__ = ["load_hf", "save_hf"]

# parameter -> (its name in the modules of transformers, then the other names it is found under)
_TOP_NAMES = {
    "embed": ("embed_tokens.weight", "embed.weight"),
    "norm": ("norm.weight",),
    "head": ("lm_head.weight", "head.weight"),
    "hc_head.fn": ("hc_head.hc_fn", "hc_head_fn"),
    "hc_head.base": ("hc_head.hc_base", "hc_head_base"),
    "hc_head.scale": ("hc_head.hc_scale", "hc_head_scale"),
}
_LAYER_NAMES = {
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "ffn_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "attn.wq_a": ("self_attn.q_a_proj.weight", "attn.wq_a.weight"),
    "attn.q_norm": ("self_attn.q_a_norm.weight", "attn.q_norm.weight"),
    "attn.wq_b": ("self_attn.q_b_proj.weight", "attn.wq_b.weight"),
    "attn.wkv": ("self_attn.kv_proj.weight", "attn.wkv.weight"),
    # transformers 5.23 writes it as attn.norm: its rename of compressor norms matches this one too.
    "attn.kv_norm": ("self_attn.kv_norm.weight", "attn.kv_norm.weight", "attn.norm.weight"),
    "attn.attn_sink": ("self_attn.sinks", "attn.attn_sink"),
    "attn.wo_a": ("self_attn.o_a_proj.weight", "attn.wo_a.weight"),
    "attn.wo_b": ("self_attn.o_b_proj.weight", "attn.wo_b.weight"),
    "attn.indexer.wq_b": ("self_attn.compressor.indexer.q_b_proj.weight", "attn.indexer.wq_b.weight"),
    "attn.indexer.weights_proj": (
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "self_attn.compressor.indexer.weights_proj.weight",
        "attn.indexer.weights_proj.weight",
    ),
    "ffn.gate": ("mlp.gate.weight", "ffn.gate.weight"),
    "ffn.gate_bias": ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    "ffn.tid2eid": ("mlp.gate.tid2eid", "ffn.gate.tid2eid"),
    "ffn.experts.gate_up": ("mlp.experts.gate_up_proj",),
    "ffn.experts.down": ("mlp.experts.down_proj",),
    "ffn.shared.gate": ("mlp.shared_experts.gate_proj.weight", "ffn.shared_experts.w1.weight"),
    "ffn.shared.up": ("mlp.shared_experts.up_proj.weight", "ffn.shared_experts.w3.weight"),
    "ffn.shared.down": ("mlp.shared_experts.down_proj.weight", "ffn.shared_experts.w2.weight"),
}
for _part in ("fn", "base", "scale"):
    for _site in ("attn", "ffn"):
        _LAYER_NAMES[f"hc_{_site}.{_part}"] = (f"{_site}_hc.{_part}", f"hc_{_site}_{_part}")
for _ours, _module in (("attn", "self_attn"), ("attn.indexer", "self_attn.compressor.indexer")):
    _module += ".compressor" if _ours == "attn" else ""
    for _part, _theirs, _published in (
        ("wkv", "kv_proj.weight", "wkv.weight"),
        ("wgate", "gate_proj.weight", "wgate.weight"),
        ("ape", "position_bias", "ape"),
        ("norm", "kv_norm.weight", "norm.weight"),
    ):
        _LAYER_NAMES[f"{_ours}.compressor.{_part}"] = (f"{_module}.{_theirs}", f"{_ours}.compressor.{_published}")
_FP8_BLOCK = 128


def load_hf(path: str | pathlib.Path, *, dtype: jax.typing.DTypeLike = jnp.float32) -> tuple[DSV4Config, Params]:
    """Reads a checkpoint directory.

    Args:
        path: holds `config.json` and `model.safetensors` (or the shards its index names).
        dtype: of the matrices, whatever the checkpoint stores: float32 for the reference,
            bfloat16 to compute as fast as the weights allow.

    Raises:
        ConfigError: `config.json` is missing or wrong.
        CheckpointError: a file or tensor is missing, has the wrong shape, is in a format this
            loader cannot read, or is not part of the model; names it.
    """
    path = pathlib.Path(path)
    cfg = DSV4Config.from_hf(path)
    source = _Source(_open(path), cfg)

    def leaf(keys: tuple[Any, ...], spec: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(source.read(*_address(keys), spec.shape).astype(spec.dtype))

    params = jax.tree_util.tree_map_with_path(leaf, param_specs(cfg, dtype))
    source.check_all_read()
    return cfg, params


def save_hf(cfg: DSV4Config, params: Params, path: str | pathlib.Path) -> None:
    """Writes `config.json` and `model.safetensors` so that `load_hf` and `transformers` read them.

    Raises:
        CheckpointError: `params` are not those of `cfg`; names the parameter.
    """
    path = pathlib.Path(path)
    specs, tensors = param_specs(cfg), {}
    if jax.tree.structure(specs) != jax.tree.structure(params):
        raise CheckpointError("the parameters are not those of this config: the trees differ")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (keys, value), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        prefix, name = _address(keys)
        if value.shape != spec.shape:
            raise CheckpointError(f"{prefix}{name}: has shape {value.shape}, the config says {spec.shape}")
        module = _names(prefix, name)[0]
        full = module if name == "head" else f"model.{prefix}{module}"
        array = np.asarray(value)
        tensors[full] = array.astype(np.int64) if name == "ffn.tid2eid" else array
    dtype = "bfloat16" if params["embed"].dtype == jnp.bfloat16 else "float32"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_hf_config(cfg, dtype), indent=2) + "\n")
    write_safetensors(path / "model.safetensors", tensors)


class _Source:
    """The tensors of a checkpoint by name, and which of them were asked for."""

    def __init__(self, tensors: dict[str, np.ndarray], cfg: DSV4Config):
        # Names are compared without the "model." that module names start with.
        self.tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        skipped = ("mtp.", *(f"layers.{cfg.num_layers + i}." for i in range(cfg.num_mtp_layers)))
        if cfg.tie_word_embeddings:
            skipped += _TOP_NAMES["head"]
        self.unread = {name for name in self.tensors if not name.startswith(skipped)}

    def find(self, names: tuple[str, ...], prefix: str) -> str | None:
        return next((prefix + name for name in names if prefix + name in self.tensors), None)

    def read(self, prefix: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The parameter as a NumPy array of its stored (or float32 if dequantised) dtype."""
        names = _names(prefix, name)
        found = self.find(names, prefix)
        if found is not None:
            return self._take(found, shape)
        per_expert = {"ffn.experts.gate_up": ("w1", "w3"), "ffn.experts.down": ("w2",)}.get(name)
        if per_expert is None:
            raise CheckpointError(f"missing tensor {prefix}{names[0]} (or {', '.join(names[1:])})")
        experts, rows, columns = shape
        part = (rows // len(per_expert), columns)
        return np.stack([
            np.concatenate([self._take(f"{prefix}ffn.experts.{e}.{w}.weight", part) for w in per_expert])
            for e in range(experts)
        ])  # fmt: skip

    def _take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.tensors:
            raise CheckpointError(f"missing tensor {name}")
        tensor = self.tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {name} has shape {tensor.shape}, expected {shape}")
        self.unread.discard(name)
        if tensor.dtype.itemsize > 1:
            return tensor
        if tensor.dtype != ml_dtypes.float8_e4m3fn:
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, which this loader cannot dequantise")
        scale_names = (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale")
        scale_name = next((s for s in scale_names if s in self.tensors), None)
        if scale_name is None:
            raise CheckpointError(f"tensor {name} is FP8 but has no {' or '.join(scale_names)}")
        self.unread.discard(scale_name)
        return _dequantise(tensor, self.tensors[scale_name], scale_name)

    def check_all_read(self) -> None:
        if self.unread:
            raise CheckpointError(f"{len(self.unread)} tensors are not part of the model, such as {min(self.unread)}")


def _dequantise(tensor: np.ndarray, scale: np.ndarray, scale_name: str) -> np.ndarray:
    """e4m3 [m, n] times one scale (float32 or ue8m0) per 128 x 128 block -> float32."""
    blocks = tuple(-(-size // _FP8_BLOCK) for size in tensor.shape)
    if scale.shape != blocks:
        raise CheckpointError(f"tensor {scale_name} has shape {scale.shape}, expected {blocks}")
    spread = np.repeat(np.repeat(scale.astype(np.float32), _FP8_BLOCK, 0), _FP8_BLOCK, 1)
    return tensor.astype(np.float32) * spread[: tensor.shape[0], : tensor.shape[1]]


def _open(path: pathlib.Path) -> dict[str, np.ndarray]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return read_safetensors(path / "model.safetensors")
    try:
        where = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{index} holds no weight_map: {error!r}") from None
    shards = {file: read_safetensors(path / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in shards[file]:
            raise CheckpointError(f"missing tensor {name}: the index places it in {file}")
    return {name: shards[file][name] for name, file in where.items()}


def _address(keys: tuple[Any, ...]) -> tuple[str, str]:
    """A path in the parameter tree -> ("layers.3." or "", the parameter's dotted name)."""
    parts = [str(key.key if hasattr(key, "key") else key.idx) for key in keys]
    return (f"layers.{parts[1]}.", ".".join(parts[2:])) if parts[0] == "layers" else ("", ".".join(parts))


def _names(prefix: str, name: str) -> tuple[str, ...]:
    return (_LAYER_NAMES if prefix else _TOP_NAMES)[name]


def _hf_config(cfg: DSV4Config, dtype: str) -> dict[str, Any]:
    """The `config.json` that `DSV4Config.from_hf` and transformers' `DeepseekV4Config` read as `cfg`."""
    same = (
        "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
        "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "rope_theta", "compress_rope_theta",
        "max_position_embeddings", "rms_norm_eps", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
        "moe_intermediate_size", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "swiglu_limit",
        "hc_mult", "hc_sinkhorn_iters", "hc_eps", "tie_word_embeddings",
    )  # fmt: skip
    partial = cfg.rope_dim / cfg.head_dim
    main = {"rope_type": "default", "rope_theta": cfg.rope_theta, "partial_rotary_factor": partial}
    compress: dict[str, Any] = main | {"rope_theta": cfg.compress_rope_theta}
    if cfg.yarn is not None:
        compress |= {
            "rope_type": "yarn",
            "factor": cfg.yarn.factor,
            "original_max_position_embeddings": cfg.yarn.original_max_position_embeddings,
            "beta_fast": cfg.yarn.beta_fast,
            "beta_slow": cfg.yarn.beta_slow,
            "attention_factor": 1.0,
        }
    kinds = ["hash_moe" if i < cfg.num_hash_layers else "moe" for i in range(cfg.num_layers)]
    return {name: getattr(cfg, name) for name in same} | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": dtype,
        "num_hidden_layers": cfg.num_layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": cfg.num_mtp_layers,
        "qk_rope_head_dim": cfg.rope_dim,
        "partial_rotary_factor": partial,
        "layer_types": [kind.value for kind in cfg.layer_types],
        "compress_rates": {"compressed_sparse_attention": cfg.csa_ratio, "heavily_compressed_attention": cfg.hca_ratio},
        "mlp_layer_types": kinds,
        "rope_parameters": {"main": main, "compress": compress},
    }
