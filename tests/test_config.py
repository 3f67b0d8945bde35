"""Configuration parsing: the published schedules, every Hugging Face spelling, and named complaints."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from dsv4_jax.config import AttentionType, DSV4Config, YarnScaling, build_schedule
from dsv4_jax.errors import ConfigError

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}


def flash_json(**changes: Any) -> dict[str, Any]:
    """The fields of the published V4-Flash `config.json` that we read."""
    fields = {
        "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 512, "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
        "rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": YARN,
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "n_routed_experts": 256,
        "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "num_hash_layers": 3, "swiglu_limit": 10.0,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    merged = fields | changes
    return {k: v for k, v in merged.items() if v is not ...}


def test_flash_schedule() -> None:
    cfg = DSV4Config.flash()
    assert (cfg.num_layers, cfg.count(SWA), cfg.count(CSA), cfg.count(HCA)) == (43, 2, 21, 20)
    layers = build_schedule(cfg)
    assert [s.layer_idx for s in layers] == list(range(43))
    assert [s.attn for s in layers] == [SWA, SWA] + [CSA, HCA] * 20 + [CSA]
    assert [s.hash_routed for s in layers] == [True] * 3 + [False] * 40
    assert not any(s.is_mtp for s in layers)


def test_pro_schedule() -> None:
    cfg = DSV4Config.pro()
    assert (cfg.num_layers, cfg.count(SWA), cfg.count(CSA), cfg.count(HCA)) == (61, 0, 30, 31)
    assert [s.attn for s in build_schedule(cfg)] == [HCA, HCA] + [CSA, HCA] * 29 + [CSA]
    assert (cfg.num_attention_heads, cfg.index_topk, cfg.q_lora_rank) == (128, 1024, 1536)


@pytest.mark.parametrize("cfg", [DSV4Config.flash(), DSV4Config.pro()])
def test_mtp_layers_follow_the_backbone_and_are_swa_only(cfg: DSV4Config) -> None:
    layers = build_schedule(cfg, include_mtp=True)
    assert layers[: cfg.num_layers] == build_schedule(cfg)
    assert [(s.layer_idx, s.attn, s.is_mtp) for s in layers[cfg.num_layers :]] == [(cfg.num_layers, SWA, True)]


def test_published_flash_json_is_flash() -> None:
    assert DSV4Config.from_hf(flash_json()) == DSV4Config.flash()


def test_published_pro_json_is_pro() -> None:
    pro = flash_json(
        num_hidden_layers=61, hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, o_groups=16,
        index_topk=1024, n_routed_experts=384, moe_intermediate_size=3072, routed_scaling_factor=2.5,
        compress_ratios=[128, 128] + [4, 128] * 29 + [4] + [0],
    )  # fmt: skip
    assert DSV4Config.from_hf(pro) == DSV4Config.pro()


@pytest.mark.parametrize("trailing", [0, 1, 3])
def test_ratios_of_trailing_layers_are_ignored(trailing: int) -> None:
    """The 0731 checkpoint lists 46 ratios for 43 backbone layers."""
    ratios = [0, 0] + [4, 128] * 20 + [4] + [0] * trailing
    assert DSV4Config.from_hf(flash_json(compress_ratios=ratios)) == DSV4Config.flash()


def test_layer_types_win_over_ratios() -> None:
    names = [SWA.value, HCA.value, CSA.value]
    cfg = DSV4Config.from_hf(flash_json(num_hidden_layers=3, layer_types=names, compress_ratios=[4, 4, 4]))
    assert cfg.layer_types == (SWA, HCA, CSA)


def test_compress_rates_rename_the_ratios() -> None:
    rates = {CSA.value: 4, HCA.value: 16}
    cfg = DSV4Config.from_hf(flash_json(num_hidden_layers=3, compress_rates=rates, compress_ratios=[0, 4, 16]))
    assert (cfg.hca_ratio, cfg.layer_types) == (16, (SWA, CSA, HCA))


NESTED = {
    "main": {"rope_type": "default", "rope_theta": 5000.0},
    "compress": YARN | {"rope_type": "yarn", "rope_theta": 70000.0, "factor": 8},
}


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"rope_scaling": YARN}, (10000, 160000, YarnScaling())),
        ({"rope_scaling": ..., "rope_parameters": YARN | {"rope_type": "yarn"}}, (10000, 160000, YarnScaling())),
        ({"rope_scaling": ..., "rope_parameters": NESTED}, (5000, 70000, YarnScaling(factor=8.0))),
        ({"rope_scaling": None}, (10000, 160000, None)),
        ({"rope_scaling": ..., "rope_theta": 1.0e3, "compress_rope_theta": 2.0e3}, (1000, 2000, None)),
    ],
    ids=["flat scaling", "flat parameters", "nested", "null", "absent"],
)
def test_rope_spellings(spelling: dict[str, Any], expected: tuple) -> None:
    cfg = DSV4Config.from_hf(flash_json(**spelling))
    assert (cfg.rope_theta, cfg.compress_rope_theta, cfg.yarn) == expected


def test_partial_rotary_factor_gives_the_rope_dims() -> None:
    assert DSV4Config.from_hf(flash_json(qk_rope_head_dim=..., partial_rotary_factor=0.25)).rope_dim == 128


def test_hash_layers_from_mlp_layer_types() -> None:
    kinds = ["hash_moe"] * 2 + ["moe"] * 41
    assert DSV4Config.from_hf(flash_json(mlp_layer_types=kinds)).num_hash_layers == 2
    with pytest.raises(ConfigError, match="mlp_layer_types"):
        DSV4Config.from_hf(flash_json(mlp_layer_types=kinds[::-1]))


def test_from_file_and_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(flash_json()))
    assert DSV4Config.from_hf(tmp_path) == DSV4Config.flash()
    assert DSV4Config.from_hf(str(tmp_path / "config.json")) == DSV4Config.flash()


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_unreadable_files(tmp_path: pathlib.Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        DSV4Config.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"head_dim": ...}, "head_dim"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"index_topk": -1}, "index_topk"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "43"}, "num_hidden_layers"),
        ({"num_hidden_layers": 50}, "compress_ratios"),
        ({"compress_ratios": [7] * 43}, "compress_ratios"),
        ({"compress_ratios": ...}, "layer_types"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"layer_types": [SWA.value] * 42}, "layer_types"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"model_type": "llama"}, "model_type"),
        ({"qk_rope_head_dim": 512}, "rope_dim"),
        ({"qk_rope_head_dim": 63}, "rope_dim"),
        ({"o_groups": 7}, "o_groups"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_parameters"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_parameters"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_configs_name_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        DSV4Config.from_hf(flash_json(**changes))
    assert error.value.field == field
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": ()}, "layer_types"),
        ({"layer_types": ("sliding_attention",)}, "layer_types"),
        ({"csa_ratio": 1}, "csa_ratio"),
        ({"hca_ratio": 4}, "hca_ratio"),
        ({"index_head_dim": 4}, "index_head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"head_dim": 32.0}, "head_dim"),
        ({"num_mtp_layers": -1}, "num_mtp_layers"),
    ],
)
def test_impossible_values_are_refused_on_construction(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        DSV4Config.tiny(**changes)
    assert error.value.field == field
