"""The names of the tensors of a checkpoint: where each parameter is found, and the name it is saved under."""

from __future__ import annotations

from typing import Any

__all__ = ["EXPERT_MATRICES", "MTP", "OWN_MTP_TABLES", "address", "expert_name", "names_of", "published_name"]

MTP = "mtp"  # as a parameter, and as what the names of its tensors begin with: no modules of transformers have them
# parameter -> (its name in the modules of transformers, the published one, then others it is found under)
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
        "attn.indexer.weights_proj.weight",
        "self_attn.compressor.indexer.weights_proj.weight",
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

# Of the layers that draft, beside those of any layer: the MTP layer's, then those of DSpark's stages.
_MTP_NAMES = _LAYER_NAMES | {
    "enorm": ("enorm.weight",),
    "hnorm": ("hnorm.weight",),
    "e_proj": ("e_proj.weight",),
    "h_proj": ("h_proj.weight",),
    "norm": ("norm.weight",),
    "hc_head.fn": ("hc_head_fn",),
    "hc_head.base": ("hc_head_base",),
    "hc_head.scale": ("hc_head_scale",),
    "main_proj": ("main_proj.weight",),
    "main_norm": ("main_norm.weight",),
    "markov.w1": ("markov_head.markov_w1.weight",),
    "markov.w2": ("markov_head.markov_w2.weight",),
    "confidence": ("confidence_head.proj.weight",),
}

# What an MTP layer has in some checkpoints, and shares with the model here.
OWN_MTP_TABLES = (f"{MTP}.0.emb.tok_emb.weight", f"{MTP}.0.head.weight")

# Parameters of all experts -> the published matrices of one, above one another.
EXPERT_MATRICES = {"ffn.experts.gate_up": ("w1", "w3"), "ffn.experts.down": ("w2",)}


def address(keys: tuple[Any, ...]) -> tuple[str, str]:
    """A path in the parameter tree -> ("layers.3.", "mtp.0." or "", the parameter's dotted name)."""
    parts = [str(key.key if hasattr(key, "key") else key.idx) for key in keys]
    if parts[0] in ("layers", MTP):
        return f"{parts[0]}.{parts[1]}.", ".".join(parts[2:])
    return "", ".".join(parts)


def names_of(prefix: str, name: str) -> tuple[str, ...]:
    """The names of a parameter without their prefix, that of the transformers modules first."""
    if prefix.startswith(f"{MTP}."):
        return _MTP_NAMES[name]
    return (_LAYER_NAMES if prefix else _TOP_NAMES)[name]


def published_name(prefix: str, name: str) -> str:
    """The name of a parameter in the published checkpoints, but for those of all experts."""
    names = names_of(prefix, name)
    return prefix + names[min(1, len(names) - 1)]


def expert_name(prefix: str, expert: int, matrix: str) -> str:
    """The published name of an expert's matrix, "w1" (gate), "w2" (down) or "w3" (up)."""
    return f"{prefix}ffn.experts.{expert}.{matrix}.weight"
