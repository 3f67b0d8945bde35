"""The model configuration: what the cache must know of a DeepSeek-V4 checkpoint.

Pure Python. Field names follow the Hugging Face `config.json`; the numbers of `flash()` and
`pro()` are those of the published V4-Flash and V4-Pro checkpoints.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ConfigError

__all__ = ["AttentionType", "DSV4Config", "LayerSpec", "YarnScaling", "build_schedule"]


class AttentionType(enum.Enum):
    """The attention kind of a layer; the values are Hugging Face's `layer_types` strings."""

    SWA = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of the schedule.

    `layer_idx` counts from 0; MTP layers follow the backbone. `hash_routed` layers take their
    expert ids from a table indexed by the token id instead of from the router's scores.
    """

    layer_idx: int
    attn: AttentionType
    hash_routed: bool = False
    is_mtp: bool = False


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN frequency scaling of the compress RoPE (no attention factor: V4 applies no mscale)."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True)
class DSV4Config:
    """A DeepSeek-V4 model, as far as its attention, its cache and its reference forward need it.

    Raises `ConfigError` (naming the field) on construction if a value is impossible.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[AttentionType, ...]
    num_attention_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    csa_ratio: int = 4
    hca_ratio: int = 128
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnScaling | None = YarnScaling()
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-6
    num_mtp_layers: int = 0
    # Feed-forward and residual path: only the reference model reads these.
    n_routed_experts: int = 256
    num_experts_per_tok: int = 6
    n_shared_experts: int = 1
    moe_intermediate_size: int = 2048
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    num_hash_layers: int = 3
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_layers(self) -> int:
        """Backbone layers (MTP layers not counted)."""
        return len(self.layer_types)

    @property
    def nope_dim(self) -> int:
        """Leading dims of a KV row that carry no RoPE."""
        return self.head_dim - self.rope_dim

    def ratio(self, attn: AttentionType) -> int:
        """Tokens per compressed entry: 4 (CSA), 128 (HCA), 0 (SWA has no entries)."""
        return {AttentionType.SWA: 0, AttentionType.CSA: self.csa_ratio, AttentionType.HCA: self.hca_ratio}[attn]

    def count(self, attn: AttentionType) -> int:
        """How many backbone layers are of this kind."""
        return sum(t is attn for t in self.layer_types)

    @classmethod
    def flash(cls) -> DSV4Config:
        """DeepSeek-V4-Flash: 43 layers (2 SWA, 21 CSA, 20 HCA), 64 heads, top-512."""
        return cls(
            vocab_size=129280, hidden_size=4096, num_attention_heads=64, head_dim=512, rope_dim=64,
            q_lora_rank=1024, o_groups=8, o_lora_rank=1024, sliding_window=128, index_n_heads=64,
            index_head_dim=128, index_topk=512, num_mtp_layers=1,
            layer_types=_ratios_to_types([0, 0] + [4, 128] * 20 + [4], 4, 128),
        )  # fmt: skip

    @classmethod
    def pro(cls) -> DSV4Config:
        """DeepSeek-V4-Pro: 61 layers (30 CSA, 31 HCA), 128 heads, top-1024."""
        return cls(
            vocab_size=129280, hidden_size=7168, num_attention_heads=128, head_dim=512, rope_dim=64,
            q_lora_rank=1536, o_groups=16, o_lora_rank=1024, sliding_window=128, index_n_heads=64,
            index_head_dim=128, index_topk=1024, num_mtp_layers=1, n_routed_experts=384,
            moe_intermediate_size=3072, routed_scaling_factor=2.5,
            layer_types=_ratios_to_types([128, 128] + [4, 128] * 29 + [4], 4, 128),
        )  # fmt: skip

    @classmethod
    def tiny(cls, **overrides: Any) -> DSV4Config:
        """A four-layer model for tests and demos: every attention kind, real ratio rules, small widths.

        The HCA ratio is 16 and the window 32, so that a few hundred tokens pass many flushes.
        """
        fields: dict[str, Any] = dict(
            vocab_size=256, hidden_size=64, num_attention_heads=4, head_dim=32, rope_dim=8,
            q_lora_rank=32, o_groups=2, o_lora_rank=16, sliding_window=32, index_n_heads=16,
            index_head_dim=16, index_topk=8, hca_ratio=16, max_position_embeddings=4096,
            yarn=YarnScaling(original_max_position_embeddings=256), n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=64, num_hash_layers=1, hc_mult=2,
            hc_sinkhorn_iters=3, layer_types=_ratios_to_types([0, 4, 16, 4], 4, 16),
        )  # fmt: skip
        return cls(**(fields | overrides))

    @classmethod
    def from_hf(cls, source: str | pathlib.Path | Mapping[str, Any]) -> DSV4Config:
        """Reads a Hugging Face config: a `config.json`, the directory that holds one, or its dict.

        The schedule may be given as `layer_types` or as per-layer `compress_ratios` (longer than
        `num_hidden_layers` when MTP entries trail it: only the backbone's part is used).

        Raises:
            ConfigError: naming the field that is missing or impossible.
        """
        return _parse_hf(cls, source)


def build_schedule(cfg: DSV4Config, *, include_mtp: bool = False) -> tuple[LayerSpec, ...]:
    """The layers in order; with `include_mtp`, the SWA-only MTP layers follow the backbone."""
    backbone = tuple(LayerSpec(i, attn, hash_routed=i < cfg.num_hash_layers) for i, attn in enumerate(cfg.layer_types))
    if not include_mtp:
        return backbone
    first = cfg.num_layers
    return backbone + tuple(LayerSpec(first + i, AttentionType.SWA, is_mtp=True) for i in range(cfg.num_mtp_layers))


def _ratios_to_types(ratios: Sequence[int], csa_ratio: int, hca_ratio: int) -> tuple[AttentionType, ...]:
    kinds = {0: AttentionType.SWA, csa_ratio: AttentionType.CSA, hca_ratio: AttentionType.HCA}
    for i, ratio in enumerate(ratios):
        if ratio not in kinds:
            raise ConfigError("compress_ratios", f"entry {i} is {ratio!r}, expected one of {sorted(kinds)}")
    return tuple(kinds[r] for r in ratios)


def _validate(cfg: DSV4Config) -> None:
    positive = (
        "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "rope_dim", "q_lora_rank", "o_groups",
        "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings",
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "hc_mult",
    )  # fmt: skip
    for name in positive:
        value = getattr(cfg, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(name, f"must be a positive integer, got {value!r}")
    for name in ("num_mtp_layers", "num_hash_layers", "hc_sinkhorn_iters", "n_shared_experts"):
        value = getattr(cfg, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(name, f"must be a non-negative integer, got {value!r}")
    for name in ("rope_theta", "compress_rope_theta", "rms_norm_eps"):
        value = getattr(cfg, name)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(name, f"must be a positive number, got {value!r}")
    if not cfg.layer_types:
        raise ConfigError("layer_types", "a model needs at least one layer")
    for i, kind in enumerate(cfg.layer_types):
        if not isinstance(kind, AttentionType):
            raise ConfigError("layer_types", f"entry {i} is {kind!r}, expected an AttentionType")
    if cfg.rope_dim % 2 or cfg.rope_dim >= cfg.head_dim:
        raise ConfigError("rope_dim", f"must be even and smaller than head_dim {cfg.head_dim}, got {cfg.rope_dim}")
    if cfg.index_head_dim % 2 or cfg.index_head_dim < cfg.rope_dim:
        raise ConfigError("index_head_dim", f"must be even and at least rope_dim {cfg.rope_dim}")
    if cfg.num_attention_heads % cfg.o_groups:
        raise ConfigError("o_groups", f"must divide num_attention_heads {cfg.num_attention_heads}")
    if cfg.csa_ratio < 2:
        raise ConfigError("csa_ratio", f"must be at least 2, got {cfg.csa_ratio}")
    if cfg.hca_ratio < 2 or cfg.hca_ratio == cfg.csa_ratio:
        raise ConfigError("hca_ratio", f"must be at least 2 and differ from csa_ratio, got {cfg.hca_ratio}")
    if cfg.num_experts_per_tok > cfg.n_routed_experts:
        raise ConfigError("num_experts_per_tok", f"exceeds n_routed_experts {cfg.n_routed_experts}")
    if cfg.scoring_func not in ("sqrtsoftplus", "softmax", "sigmoid"):
        raise ConfigError("scoring_func", f"unknown scoring function {cfg.scoring_func!r}")


def _parse_hf(cls: type[DSV4Config], source: str | pathlib.Path | Mapping[str, Any]) -> DSV4Config:
    if isinstance(source, Mapping):
        hf = source
    else:
        path = pathlib.Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError("config.json", f"no such file: {path}")
        try:
            hf = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError("config.json", f"{path} is not JSON: {error}") from None
        if not isinstance(hf, dict):
            raise ConfigError("config.json", f"{path} holds no JSON object")

    def get(name: str, default: Any = None) -> Any:
        value = hf.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(name, "missing")
        return default

    if hf.get("model_type", "deepseek_v4") != "deepseek_v4":
        raise ConfigError("model_type", f"expected 'deepseek_v4', got {hf['model_type']!r}")
    if get("num_key_value_heads", 1) != 1:
        raise ConfigError("num_key_value_heads", "DeepSeek-V4 has one shared KV head")
    rates = hf.get("compress_rates") or {}
    csa = rates.get(AttentionType.CSA.value, hf.get("compress_rate_csa") or 4)
    hca = rates.get(AttentionType.HCA.value, hf.get("compress_rate_hca") or 128)
    head_dim = get("head_dim")
    ropes, yarn = _parse_rope(hf)
    factor = hf.get("partial_rotary_factor")
    rope_dim = hf.get("qk_rope_head_dim") or (int(head_dim * factor) if factor is not None else 64)
    return cls(
        vocab_size=get("vocab_size"),
        hidden_size=get("hidden_size"),
        layer_types=_parse_schedule(hf, get("num_hidden_layers"), csa, hca),
        num_attention_heads=get("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=get("q_lora_rank"),
        o_groups=get("o_groups"),
        o_lora_rank=get("o_lora_rank"),
        sliding_window=get("sliding_window"),
        index_n_heads=get("index_n_heads"),
        index_head_dim=get("index_head_dim"),
        index_topk=get("index_topk"),
        csa_ratio=csa,
        hca_ratio=hca,
        rope_theta=ropes[0],
        compress_rope_theta=ropes[1],
        yarn=yarn,
        max_position_embeddings=get("max_position_embeddings", 1048576),
        rms_norm_eps=get("rms_norm_eps", 1e-6),
        num_mtp_layers=get("num_nextn_predict_layers", 0),
        n_routed_experts=get("n_routed_experts"),
        num_experts_per_tok=get("num_experts_per_tok"),
        n_shared_experts=get("n_shared_experts", 1),
        moe_intermediate_size=get("moe_intermediate_size"),
        scoring_func=get("scoring_func", "sqrtsoftplus"),
        norm_topk_prob=hf.get("norm_topk_prob", True),
        routed_scaling_factor=get("routed_scaling_factor", 1.5),
        num_hash_layers=_parse_hash_layers(hf),
        swiglu_limit=get("swiglu_limit", 10.0),
        hc_mult=get("hc_mult", 4),
        hc_sinkhorn_iters=get("hc_sinkhorn_iters", 20),
        hc_eps=get("hc_eps", 1e-6),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def _parse_schedule(hf: Mapping[str, Any], layers: Any, csa: int, hca: int) -> tuple[AttentionType, ...]:
    if not isinstance(layers, int) or layers < 1:
        raise ConfigError("num_hidden_layers", f"must be a positive integer, got {layers!r}")
    names, ratios = hf.get("layer_types"), hf.get("compress_ratios")
    field = "layer_types" if names is not None else "compress_ratios"
    entries = names if names is not None else ratios
    if entries is None:
        raise ConfigError("layer_types", "missing (and no compress_ratios): the schedule cannot be guessed")
    if len(entries) < layers:
        raise ConfigError(field, f"has {len(entries)} entries for {layers} layers")
    if names is None:
        return _ratios_to_types(entries[:layers], csa, hca)
    known = {kind.value: kind for kind in AttentionType}
    for i, name in enumerate(names[:layers]):
        if name not in known:
            raise ConfigError("layer_types", f"entry {i} is {name!r}, expected one of {sorted(known)}")
    return tuple(known[name] for name in names[:layers])


def _parse_rope(hf: Mapping[str, Any]) -> tuple[tuple[float, float], YarnScaling | None]:
    """(main theta, compress theta) and the YaRN scaling of the compress RoPE, from any HF spelling."""
    nested = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    main, compress = nested.get("main"), nested.get("compress")
    if not isinstance(main, Mapping) or not isinstance(compress, Mapping):
        main, compress = {}, nested
    thetas = (
        main.get("rope_theta", hf.get("rope_theta", 10000.0)),
        compress.get("rope_theta", hf.get("compress_rope_theta", 160000.0))
        if compress is not nested
        else hf.get("compress_rope_theta", 160000.0),
    )
    kind = compress.get("rope_type", compress.get("type", "default"))
    if kind == "default":
        return thetas, None
    if kind != "yarn":
        raise ConfigError("rope_parameters", f"unsupported rope_type {kind!r}, expected 'default' or 'yarn'")
    try:
        return thetas, YarnScaling(
            factor=float(compress["factor"]),
            original_max_position_embeddings=int(compress["original_max_position_embeddings"]),
            beta_fast=float(compress.get("beta_fast") or 32.0),
            beta_slow=float(compress.get("beta_slow") or 1.0),
        )
    except KeyError as missing:
        raise ConfigError("rope_parameters", f"yarn needs {missing}") from None


def _parse_hash_layers(hf: Mapping[str, Any]) -> int:
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        return int(hf.get("num_hash_layers", 3))
    hashed = [kind == "hash_moe" for kind in kinds]
    count = sum(hashed)
    if any(hashed[count:]):
        raise ConfigError("mlp_layer_types", "hash_moe layers must come first")
    return count
