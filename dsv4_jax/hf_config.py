"""Hugging Face's spellings of a DeepSeek-V4 config -> one each, and back: what `DSV4Config.from_hf` and `to_hf` read.

Each spelling is read as `transformers` 5.23 reads it, or refused: a checkpoint never runs here as
another model than there. Types and ranges of single fields are checked by `DSV4Config` itself.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError
from .untrusted import brief, integer_field, number_field, plain, read_json

__all__ = ["CSA", "DSPARK_STAGES", "HCA", "SWA", "check_weight_blocks", "hf_fields", "parse_hf", "read_hf"]

CSA, HCA, SWA = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
DSPARK_STAGES = 3  # whatever number of MTP layers the config has beside it

_MAX_BYTES = 4 * 2**20
# Neither this package nor (but for the activation and the MLP's bias) transformers computes anything else.
_ONLY = {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
# transformers lets the second name override the first.
_SAME = {"n_routed_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
_REQUIRED = (
    "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size",
)  # fmt: skip
_DEFAULTS = {
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "tie_word_embeddings": False,
}
_DEFAULT_ROTARY_FACTOR = 64 / 512
_DEFAULT_THETA = 10000.0

# Main theta, compress theta, the shares of dims that are said to be rotated, and the scaling of the compress RoPE.
_Rope = tuple[Any, Any, list[Any], Mapping[str, Any]]


def read_hf(source: Any) -> Mapping[str, Any]:
    """Returns the JSON object of a `config.json`, given by its path or its directory's."""
    try:
        path = pathlib.Path(source)
        path = path / "config.json" if path.is_dir() else path
        found = path.is_file()
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(None, f"no path to a config.json: {brief(source)} ({type(error).__name__})") from None
    if not found:
        raise ConfigError(None, f"no such config.json: {plain(str(path))}")
    try:
        hf = read_json(path, _MAX_BYTES)
    except ValueError as error:
        raise ConfigError(None, f"{path} is not JSON: {error}") from None
    if not isinstance(hf, dict):
        raise ConfigError(None, f"{path} holds no JSON object")
    return hf


def parse_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `DSV4Config`: kinds of layers as these strings, the YaRN scaling as a dict of its fields or
    None.

    A field that is null counts as missing.
    """
    hf = {name: value for name, value in hf.items() if value is not None}
    for name, only in _ONLY.items():
        if name in hf and (type(hf[name]) is not type(only) or hf[name] != only):
            raise ConfigError(name, f"only {only!r} is supported, got {brief(hf[name])}")
    for name, other in _SAME.items():
        if other in hf and hf[other] != hf.get(name):
            raise ConfigError(other, f"{brief(hf[other])} conflicts with {name} {brief(hf.get(name))}")
    if hf.get("per_layer_config"):
        raise ConfigError("per_layer_config", "layers of different widths are not supported")
    for name in ("num_hidden_layers", *_REQUIRED):
        if name not in hf:
            raise ConfigError(name, "missing")
    layers = integer_field("num_hidden_layers", hf["num_hidden_layers"])
    (csa, hca), dspark = _rates(hf), _dspark(hf, layers)
    return (
        {name: hf[name] for name in _REQUIRED}
        | {name: hf.get(name, value) for name, value in _DEFAULTS.items()}
        | {
            "layer_types": _schedule(hf, layers, csa, hca),
            "csa_ratio": csa,
            "hca_ratio": hca,
            "num_mtp_layers": hf.get("num_nextn_predict_layers", 1) if dspark is None else 0,
            "dspark": dspark,
            "num_hash_layers": _hash_layers(hf, layers),
            **_rope(hf),
        }
    )


# DSpark's head: what must be there of it, and what other models' have that is not computed here.
_DSPARK = ("block_size", "noise_token_id", "target_layer_ids", "markov_rank")
_DSPARK_ONLY = {
    "sample_from_anchor": True,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
}


def _dspark(hf: Mapping[str, Any], layers: int) -> dict[str, Any] | None:
    """Returns the fields of `DSparkHead`; None: the checkpoint has no such head."""
    if not any(hf.get(f"dspark_{name}") for name in _DSPARK):
        return None
    for name in _DSPARK:
        if f"dspark_{name}" not in hf:
            raise ConfigError(f"dspark_{name}", "missing, and DSpark's draft head needs it")
    same = {"n_routed_experts", "num_experts_per_tok"}
    only = _DSPARK_ONLY | {"draft_vocab_size": hf["vocab_size"]} | {f"dspark_{name}": hf[name] for name in same}
    for name, value in only.items():
        if name in hf and (type(hf[name]) is not type(value) or hf[name] != value):
            raise ConfigError(name, f"only {value!r} is supported, got {brief(hf[name])}")
    if "compress_ratios" in hf:  # the backbone's are checked with the schedule
        entries = hf["compress_ratios"]
        behind = list(entries[layers:]) if isinstance(entries, list | tuple) else []
        if behind not in ([], [0] * DSPARK_STAGES):
            problem = f"behind those of {layers} layers {DSPARK_STAGES} zeros stand, of DSpark's stages"
            raise ConfigError("compress_ratios", f"{problem}, got {brief(behind)}")
    fields = {name: hf[f"dspark_{name}"] for name in _DSPARK}
    ids = fields["target_layer_ids"]
    return fields | {"target_layer_ids": tuple(ids) if isinstance(ids, list) else ids}


def _rates(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Returns tokens per compressed entry of CSA and HCA layers: the scalar's, else the dict's, else 4 and 128."""
    rates = _mapping("compress_rates", hf.get("compress_rates", {}))
    csa = hf.get("compress_rate_csa", rates.get(CSA, 4))
    hca = hf.get("compress_rate_hca", rates.get(HCA, 128))
    return integer_field("csa_ratio", csa, low=2), integer_field("hca_ratio", hca, low=2)


def _schedule(hf: Mapping[str, Any], layers: int, csa: int, hca: int) -> list[str]:
    if "layer_types" in hf:
        return _entries(hf, "layer_types", layers, {kind: kind for kind in (SWA, CSA, HCA)})
    if "compress_ratios" not in hf:
        raise ConfigError("layer_types", "missing (and no compress_ratios): the schedule cannot be guessed")
    # 4 and 128 name the kinds whatever the rates are; the rates themselves do if they are others.
    named = {0: SWA, 4: CSA, 128: HCA}
    return _entries(hf, "compress_ratios", layers, {csa: CSA, hca: HCA} | named)


def _hash_layers(hf: Mapping[str, Any], layers: int) -> int:
    if "mlp_layer_types" not in hf:
        return min(integer_field("num_hash_layers", hf.get("num_hash_layers", 3), low=0), layers)
    hashed = _entries(hf, "mlp_layer_types", layers, {"hash_moe": True, "moe": False})
    count = sum(hashed)
    if any(hashed[count:]):
        raise ConfigError("mlp_layer_types", "hash_moe layers must come first")
    return count


def _entries(hf: Mapping[str, Any], field: str, layers: int, known: Mapping[Any, Any]) -> list[Any]:
    """What the backbone's entries of a per-layer list stand for; entries beyond the backbone are not read."""
    entries = hf[field]
    if not isinstance(entries, list | tuple):
        raise ConfigError(field, f"must be a list, got {brief(entries)}")
    if len(entries) < layers:
        raise ConfigError(field, f"has {len(entries)} entries for {layers} layers")
    wanted = type(next(iter(known)))
    for i, entry in enumerate(entries[:layers]):
        if type(entry) is not wanted or entry not in known:
            raise ConfigError(field, f"entry {i} is {brief(entry)}, expected one of {sorted(known)}")
    return [known[entry] for entry in entries[:layers]]


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both thetas, the rotated dims and the YaRN scaling of the compress RoPE."""
    # transformers takes rope_scaling, the older name, if it says anything.
    old, new = (_mapping("rope_parameters", hf.get(name, {})) for name in ("rope_scaling", "rope_parameters"))
    given, head_dim = old or new, integer_field("head_dim", hf["head_dim"])
    nested = "main" in given or "compress" in given
    rope = _nested_rope(hf, given) if nested else _flat_rope(hf, given, head_dim)
    theta, compress_theta, factors, compress = rope
    dims = [int(head_dim * number_field("partial_rotary_factor", factor, low=0, high=1)) for factor in factors]
    if len(set(dims)) > 1:
        raise ConfigError("rope_parameters", f"two partial_rotary_factors, for {dims[0]} and for {dims[1]} dims")
    yarn = _yarn(compress)
    return {"rope_theta": theta, "compress_rope_theta": compress_theta, "rope_dim": dims[0], "yarn": yarn}


def _nested_rope(hf: Mapping[str, Any], given: Mapping[str, Any]) -> _Rope:
    """Reads RoPE parameters under "main" and "compress", which speak for themselves."""
    main, compress = (_mapping("rope_parameters", given.get(name)) for name in ("main", "compress"))
    if _kind(main) != "default":
        raise ConfigError("rope_parameters", f"only the compress RoPE is scaled, main has {brief(_kind(main))}")
    if "rope_theta" not in compress:
        raise ConfigError("rope_parameters", "compress needs rope_theta")
    # transformers reads no qk_rope_head_dim here.
    factors = [rope.get("partial_rotary_factor", hf.get("partial_rotary_factor")) for rope in (main, compress)]
    if None in factors:
        raise ConfigError("partial_rotary_factor", "missing, and nested rope_parameters need it")
    theta = main.get("rope_theta", hf.get("rope_theta", _DEFAULT_THETA))
    # Left out here, transformers computes another one from `factor`.
    return theta, compress["rope_theta"], factors, {"attention_factor": None, **compress}


def _flat_rope(hf: Mapping[str, Any], given: Mapping[str, Any], head_dim: int) -> _Rope:
    """Reads RoPE parameters that scale the compress RoPE alone; all else is said by the fields beside them."""
    theta = hf.get("rope_theta", _DEFAULT_THETA)
    if given.get("rope_theta", theta) != theta:
        raise ConfigError("rope_parameters", f"rope_theta conflicts with the field beside it, {brief(theta)}")
    factor = _rotary_factor(hf, head_dim)
    factors = [factor, given.get("partial_rotary_factor", factor)]
    return theta, hf.get("compress_rope_theta", 160000.0), factors, given


def _rotary_factor(hf: Mapping[str, Any], head_dim: int) -> Any:
    """The share of dims that are rotated: partial_rotary_factor wins over qk_rope_head_dim."""
    if "partial_rotary_factor" in hf:
        return hf["partial_rotary_factor"]
    if "qk_rope_head_dim" in hf:
        return integer_field("qk_rope_head_dim", hf["qk_rope_head_dim"]) / head_dim
    return _DEFAULT_ROTARY_FACTOR


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = _kind(rope)
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError("rope_parameters", f"unsupported rope_type {brief(kind)}, expected 'default' or 'yarn'")
    for name in ("factor", "original_max_position_embeddings"):
        if name not in rope:
            raise ConfigError("rope_parameters", f"yarn needs {name!r}")
    attention = rope.get("attention_factor", 1.0)
    if isinstance(attention, bool) or attention != 1:
        raise ConfigError("rope_parameters", f"yarn needs attention_factor 1.0, got {brief(attention)}")
    return {
        "factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
    }


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _mapping(field: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(field, f"must be an object, got {brief(value)}")
    return value


def check_weight_blocks(hf: Mapping[str, Any]) -> None:
    """Refuses FP8 weights whose scales are not per 128 x 128 block: shapes alone do not always tell."""
    quantised = _mapping("quantization_config", hf.get("quantization_config") or {})
    block = quantised.get("weight_block_size", [128, 128])
    if block not in (None, [128, 128]):
        raise ConfigError("quantization_config", f"weight_block_size must be [128, 128], got {brief(block)}")


def hf_fields(fields: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The `config.json` of fields as `parse_hf` gives them: transformers' `DeepseekV4Config` reads it as these."""
    same = (
        "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
        "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "rope_theta", "compress_rope_theta",
        "max_position_embeddings", "rms_norm_eps", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
        "moe_intermediate_size", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "swiglu_limit",
        "hc_mult", "hc_sinkhorn_iters", "hc_eps", "tie_word_embeddings",
    )  # fmt: skip
    head_dim, rope_dim, layers = fields["head_dim"], fields["rope_dim"], len(fields["layer_types"])
    # transformers rounds head_dim times this share down.
    partial = rope_dim / head_dim
    partial = partial if int(head_dim * partial) == rope_dim else math.nextafter(partial, 1)
    main = {"rope_type": "default", "rope_theta": fields["rope_theta"], "partial_rotary_factor": partial}
    compress: dict[str, Any] = main | {"rope_theta": fields["compress_rope_theta"]}
    if fields["yarn"] is not None:
        compress |= {"rope_type": "yarn", **fields["yarn"], "attention_factor": 1.0}
    dspark = {f"dspark_{name}": value for name, value in (fields["dspark"] or {}).items()}
    if dspark:
        dspark["dspark_target_layer_ids"] = [*dspark["dspark_target_layer_ids"]]
    return {name: fields[name] for name in same} | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": dtype,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": DSPARK_STAGES if dspark else fields["num_mtp_layers"],
        **dspark,
        "qk_rope_head_dim": rope_dim,
        "partial_rotary_factor": partial,
        "layer_types": [*fields["layer_types"]],
        "compress_rates": {CSA: fields["csa_ratio"], HCA: fields["hca_ratio"]},
        "mlp_layer_types": ["hash_moe" if i < fields["num_hash_layers"] else "moe" for i in range(layers)],
        "rope_parameters": {"main": main, "compress": compress},
    }
