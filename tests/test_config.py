"""Configuration parsing: the published schedules, every Hugging Face spelling, and named complaints."""

from __future__ import annotations

import json
import pathlib
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

from dsv4_jax import CacheLayout, rope_frequencies
from dsv4_jax.config import AttentionType, DSparkHead, DSV4Config, YarnScaling, build_schedule
from dsv4_jax.cuda.widths import INDEX_ROWS, KV_ROW, WIDTHS, unsupported_rows
from dsv4_jax.errors import ConfigError

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}


def flash_json(**changes: Any) -> dict[str, Any]:
    """The fields of the published V4-Flash `config.json` that we read."""
    fields = {
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": YARN,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 3,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 1,
    }
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


def test_the_tiny_released_model_is_one_that_kernels_take() -> None:
    """Rows of V4, a layer of each kind and routing, FP8 blocks and FP4 experts of the kernels' sizes."""
    cfg, flash = DSV4Config.tiny_released(), DSV4Config.flash()
    layout = CacheLayout(cfg, "fp8", "fp4")
    assert not unsupported_rows(layout.kv_row, KV_ROW) and not unsupported_rows(layout.index_row, *INDEX_ROWS)
    assert {*cfg.layer_types} == {*AttentionType} and 0 < cfg.num_hash_layers < cfg.num_layers and cfg.num_mtp_layers
    for name in ("csa_ratio", "hca_ratio", "sliding_window", "rope_dim", "hc_mult"):
        assert getattr(cfg, name) == getattr(flash, name), name
    assert cfg.index_n_heads <= WIDTHS.index_heads and not cfg.moe_intermediate_size % 256 and not cfg.hidden_size % 256
    assert [x % 128 for x in (cfg.q_lora_rank, cfg.o_lora_rank, cfg.num_attention_heads * cfg.head_dim)] == [0, 0, 0]


@pytest.mark.parametrize("cfg", [DSV4Config.flash(), DSV4Config.pro()])
def test_mtp_layers_follow_the_backbone_and_are_swa_only(cfg: DSV4Config) -> None:
    layers = build_schedule(cfg, include_drafts=True)
    assert layers[: cfg.num_layers] == build_schedule(cfg)
    assert [(s.layer_idx, s.attn, s.is_mtp) for s in layers[cfg.num_layers :]] == [(cfg.num_layers, SWA, True)]


def test_published_flash_json_is_flash() -> None:
    assert DSV4Config.from_hf(flash_json()) == DSV4Config.flash()


def test_published_pro_json_is_pro() -> None:
    pro = flash_json(
        num_hidden_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        index_topk=1024,
        n_routed_experts=384,
        moe_intermediate_size=3072,
        routed_scaling_factor=2.5,
        compress_ratios=[128, 128] + [4, 128] * 29 + [4] + [0],
    )
    assert DSV4Config.from_hf(pro) == DSV4Config.pro()


@pytest.mark.parametrize("trailing", [0, 1, 3])
def test_ratios_of_trailing_layers_are_ignored(trailing: int) -> None:
    """The 0731 checkpoint lists 46 ratios for 43 backbone layers."""
    ratios = [0, 0] + [4, 128] * 20 + [4] + [0] * trailing
    assert DSV4Config.from_hf(flash_json(compress_ratios=ratios)) == DSV4Config.flash()


DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


@pytest.mark.parametrize("mtp_layers", [1, 3])
@pytest.mark.parametrize("behind", [[], [0, 0, 0]])
def test_dspark_is_recognised_by_its_own_fields(mtp_layers: int, behind: list[int]) -> None:
    """Whatever number of MTP layers stands beside them."""
    ratios = [0, 0] + [4, 128] * 20 + [4] + behind
    given = flash_json(num_nextn_predict_layers=mtp_layers, compress_ratios=ratios, **DSPARK)
    cfg = DSV4Config.from_hf(given)
    assert cfg.dspark == DSparkHead(5, 128799, (40, 41, 42), 256) and (cfg.num_mtp_layers, cfg.num_draft_layers) == (
        0,
        3,
    )
    schedule = build_schedule(cfg, include_drafts=True)
    assert [(spec.layer_idx, spec.attn, spec.is_mtp) for spec in schedule[43:]] == [
        (i, SWA, True) for i in (43, 44, 45)
    ]
    assert DSV4Config.from_hf(cfg.to_hf("bfloat16")) == cfg
    assert cfg.to_hf("bfloat16")["num_nextn_predict_layers"] == 3
    assert DSV4Config.from_hf(flash_json()).num_draft_layers == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [({name: value}, name) for name in DSPARK for value in (None, "x", -1)]
    + [
        ({"dspark_target_layer_ids": [42, 41, 40]}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": [41, 42, 43]}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids"),
        ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id"),
        ({"dspark_n_routed_experts": 128}, "dspark_n_routed_experts"),
        ({"dspark_num_experts_per_tok": 3}, "dspark_num_experts_per_tok"),
        ({"markov_head_type": "gated"}, "markov_head_type"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size"),
        ({"compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0]}, "compress_ratios"),
    ],
)
def test_a_dspark_head_that_is_no_whole_one_is_named(changes: dict[str, Any], field: str) -> None:
    fields = {"compress_ratios": [0, 0] + [4, 128] * 20 + [4]} | DSPARK | changes
    with pytest.raises(ConfigError, match=field):
        DSV4Config.from_hf(flash_json(**fields))


def test_layer_types_win_over_ratios() -> None:
    names = [SWA.value, HCA.value, CSA.value]
    cfg = DSV4Config.from_hf(flash_json(num_hidden_layers=3, layer_types=names, compress_ratios=[4, 4, 4]))
    assert cfg.layer_types == (SWA, HCA, CSA)


def test_compress_rates_rename_the_ratios() -> None:
    rates = {CSA.value: 4, HCA.value: 16}
    cfg = DSV4Config.from_hf(flash_json(num_hidden_layers=3, compress_rates=rates, compress_ratios=[0, 4, 16]))
    assert (cfg.hca_ratio, cfg.layer_types) == (16, (SWA, CSA, HCA))


MAIN = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.125}
COMPRESS = YARN | MAIN | {"rope_type": "yarn", "rope_theta": 70000.0, "factor": 8, "attention_factor": 1.0}
NESTED = {"main": MAIN, "compress": COMPRESS}


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"rope_scaling": YARN}, (10000, 160000, YarnScaling())),
        ({"rope_scaling": ..., "rope_parameters": YARN | {"rope_type": "yarn"}}, (10000, 160000, YarnScaling())),
        ({"rope_scaling": ..., "rope_parameters": NESTED}, (5000, 70000, YarnScaling(factor=8.0))),
        ({"rope_scaling": YARN | {"factor": 4}, "rope_parameters": YARN}, (10000, 160000, YarnScaling(factor=4))),
        ({"rope_scaling": None}, (10000, 160000, None)),
        ({"rope_scaling": ..., "rope_theta": 1.0e3, "compress_rope_theta": 2.0e3}, (1000, 2000, None)),
    ],
    ids=["flat scaling", "flat parameters", "nested", "both", "null", "absent"],
)
def test_rope_spellings(spelling: dict[str, Any], expected: tuple) -> None:
    cfg = DSV4Config.from_hf(flash_json(**spelling))
    assert (cfg.rope_theta, cfg.compress_rope_theta, cfg.yarn) == expected


def test_partial_rotary_factor_gives_the_rope_dims() -> None:
    assert DSV4Config.from_hf(flash_json(qk_rope_head_dim=..., partial_rotary_factor=0.25)).rope_dim == 128


def test_partial_rotary_factor_wins_and_has_a_default() -> None:
    assert DSV4Config.from_hf(flash_json(qk_rope_head_dim=64, partial_rotary_factor=0.25)).rope_dim == 128
    assert DSV4Config.from_hf(flash_json(head_dim=256, qk_rope_head_dim=...)).rope_dim == 32


def test_scalar_rates_win_over_the_dict() -> None:
    rates = {CSA.value: 8, HCA.value: 32}
    cfg = DSV4Config.from_hf(flash_json(compress_rates=rates, compress_rate_csa=16))
    assert (cfg.csa_ratio, cfg.hca_ratio) == (16, 32)


def test_published_ratios_name_the_kinds_whatever_the_rates_are() -> None:
    rates = {CSA.value: 128, HCA.value: 4}
    cfg = DSV4Config.from_hf(flash_json(compress_rates=rates))
    assert (cfg.csa_ratio, cfg.hca_ratio, cfg.layer_types) == (128, 4, DSV4Config.flash().layer_types)


def test_every_number_of_rope_dims_survives_its_share_of_the_head() -> None:
    """6 / 47 * 47 is less than 6, and so it is for one pair in thirty."""
    pairs = [(head, rope) for head in range(3, 200) for rope in range(2, head, 2)]
    rounded_down = [(head, rope) for head, rope in pairs if int(head * (rope / head)) != rope]
    assert len(rounded_down) > 100
    for head, rope in rounded_down + pairs[::20]:
        cfg = DSV4Config.tiny(head_dim=head, rope_dim=rope, index_head_dim=200)
        assert DSV4Config.from_hf(cfg.to_hf("float32")) == cfg


def test_entries_beyond_the_backbone_are_not_read() -> None:
    kinds = ["hash_moe"] * 2 + ["moe"] * 41
    assert DSV4Config.from_hf(flash_json(mlp_layer_types=[*kinds, "hash_moe", "no kind"])).num_hash_layers == 2
    assert DSV4Config.from_hf(flash_json(num_hash_layers=50)).num_hash_layers == 43
    names = [SWA.value] * 43 + ["no kind"]
    assert DSV4Config.from_hf(flash_json(layer_types=names)).count(SWA) == 43


def test_hash_layers_from_mlp_layer_types() -> None:
    kinds = ["hash_moe"] * 2 + ["moe"] * 41
    assert DSV4Config.from_hf(flash_json(mlp_layer_types=kinds)).num_hash_layers == 2
    with pytest.raises(ConfigError, match="mlp_layer_types"):
        DSV4Config.from_hf(flash_json(mlp_layer_types=kinds[::-1]))


def test_from_file_and_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(flash_json()))
    assert DSV4Config.from_hf(tmp_path) == DSV4Config.flash()
    assert DSV4Config.from_hf(str(tmp_path / "config.json")) == DSV4Config.flash()


@pytest.mark.parametrize(
    "data",
    [b"{", b"[1]", None, b'{"vocab_size": "\xff"}', b'{"a": ' + b"[" * 200000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=["cut", "list", "missing", "not UTF-8", "deep", "many digits"],
)
def test_unreadable_files(tmp_path: pathlib.Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        DSV4Config.from_hf(tmp_path)
    assert is_one_line(error.value)


def test_no_more_of_a_file_is_read_than_a_config_needs(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="1099511627776 bytes, at most"):
        DSV4Config.from_hf(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("source", [5, None, ["config.json"], "a\0b", "x" * 5000, b"config.json"], ids=ascii)
def test_sources_of_a_wrong_kind(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        DSV4Config.from_hf(source)
    assert is_one_line(error.value, most=6000)


READ = (
    *flash_json(),
    "partial_rotary_factor",
    "layer_types",
    "compress_rates",
    "compress_rate_csa",
    "compress_rate_hca",
    "mlp_layer_types",
    "rope_parameters",
    "norm_topk_prob",
    "tie_word_embeddings",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "num_local_experts",
    "intermediate_size",
    "per_layer_config",
)
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
ODD = [
    True,
    False,
    0,
    -1,
    1,
    1.5,
    4.0,
    0.0,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "4",
    "a\nb\ud800",
    "x" * 10**6,
    [],
    [1],
    [[]],
    ["moe"] * 43,
    [4.0] * 43,
    [True] * 43,
    [[]] * 43,
    {},
    {"main": {}},
    {"type": []},
    {CSA.value: []},
    10**9,
    2**31,
    10**20,
    10**400,
    10**5000,
    -(10**5000),
    [10**5000] * 43,
    DEEP,
    1e-300,
    1e300,
    5e-324,
]


@pytest.mark.parametrize("field", READ)
def test_an_odd_value_is_read_or_refused_in_one_line(field: str) -> None:
    """Of whatever type and size: no other exception, and what is read can be said again."""
    assert_read_or_refused(flash_json(**{field: value}) for value in ODD)


@pytest.mark.parametrize("rope", ["flat", "main", "compress"])
@pytest.mark.parametrize("field", [*COMPRESS, "mscale", "truncate"])
def test_an_odd_rope_parameter_is_read_or_refused_in_one_line(rope: str, field: str) -> None:
    for value in ODD:
        parameters = YARN | {field: value} if rope == "flat" else NESTED | {rope: NESTED[rope] | {field: value}}
        assert_read_or_refused([flash_json(rope_scaling=..., rope_parameters=parameters)])


def assert_read_or_refused(configs: Iterable[dict[str, Any]]) -> None:
    for hf in configs:
        try:
            cfg = DSV4Config.from_hf(hf)
        except ConfigError as error:
            assert is_one_line(error)
        else:
            assert DSV4Config.from_hf(cfg.to_hf("float32")) == cfg


def is_one_line(error: Exception, most: int = 1000) -> bool:
    """Printable even where the terminal takes nothing but UTF-8."""
    text = str(error)
    return text.isprintable() and 0 < len(text.encode()) <= most


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
        ({"num_hidden_layers": 10**9}, "compress_ratios"),
        ({"num_hidden_layers": 5000, "compress_ratios": [0] * 5000}, "layer_types"),
        ({"num_nextn_predict_layers": 10**9}, "num_mtp_layers"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"intermediate_size": 18432}, "intermediate_size"),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"compress_rates": [4, 128]}, "compress_rates"),
        ({"compress_rate_hca": "128"}, "hca_ratio"),
        ({"compress_ratios": [0.0] * 43}, "compress_ratios"),
        ({"layer_types": SWA.value * 3}, "layer_types"),
        ({"mlp_layer_types": ["moe"] * 42}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types"),
        ({"head_dim": 49, "qk_rope_head_dim": 32}, "rope_dim"),  # 32 / 49 * 49 < 32
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
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
        ({"rope_scaling": "yarn"}, "rope_parameters"),
        ({"rope_scaling": YARN | {"attention_factor": 1.28}}, "rope_parameters"),
        ({"rope_scaling": YARN | {"attention_factor": None}}, "rope_parameters"),
        ({"rope_scaling": YARN | {"rope_theta": 5000.0}}, "rope_parameters"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"rope_scaling": YARN | {"factor": "16"}}, "yarn.factor"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 65536.5}},
            "yarn.original_max_position_embeddings",
        ),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 32}}, "yarn.beta_fast"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 3}}, "yarn"),
        ({"rope_scaling": YARN, "compress_rope_theta": 1}, "compress_rope_theta"),
        ({"rope_scaling": {"main": MAIN}}, "rope_parameters"),
        ({"rope_scaling": NESTED | {"main": COMPRESS}}, "rope_parameters"),
        ({"rope_scaling": NESTED | {"main": MAIN | {"partial_rotary_factor": 0.25}}}, "rope_parameters"),
        ({"rope_scaling": {"main": MAIN, "compress": YARN | MAIN | {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"rope_scaling": {"main": {}, "compress": {"rope_theta": 10000.0}}}, "partial_rotary_factor"),
        ({"rope_scaling": NESTED | {"compress": {}}}, "rope_parameters"),
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
        ({"num_mtp_layers": 10**9}, "num_mtp_layers"),
        ({"hc_sinkhorn_iters": 10**9}, "hc_sinkhorn_iters"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
        ({"layer_types": [SWA]}, "layer_types"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"swiglu_limit": "10"}, "swiglu_limit"),
        ({"rope_theta": True}, "rope_theta"),
        ({"yarn": {"factor": 16}}, "yarn"),
    ],
)
def test_impossible_values_are_refused_on_construction(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        DSV4Config.tiny(**changes)
    assert error.value.field == field


@pytest.mark.parametrize("kind", [*(kind.value for kind in AttentionType), "SWA", 4, None, []], ids=str)
def test_kinds_are_no_strings(kind: Any) -> None:
    """Taken for a kind that is not SWA, "sliding_attention" would have the other layers' RoPE."""
    cfg = DSV4Config.tiny()
    for call in (cfg.ratio, cfg.count, lambda kind: rope_frequencies(cfg, kind)):
        with pytest.raises(ConfigError, match="expected an AttentionType"):
            call(kind)
