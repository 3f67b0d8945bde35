"""The model configuration: what the cache must know of a DeepSeek-V4 checkpoint.

Pure Python. Field names follow the Hugging Face `config.json`; the numbers of `flash()` and
`pro()` are those of the published V4-Flash and V4-Pro checkpoints.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from . import hf_config
from .errors import ConfigError
from .former_names import former_keywords
from .untrusted import INT32_MAX, brief, integer_field, number_field

__all__ = ["AttentionType", "DSV4Config", "DSparkHead", "LayerSpec", "Numerics", "YarnScaling", "build_schedule"]

Numerics = Literal["plain", "released"]  # what a model rounds (`model.released`)
_MAX_LAYERS = 1024
_MAX_BLOCK = 64  # rows of a DSpark block


class AttentionType(enum.Enum):
    """The attention kind of a layer; the values are Hugging Face's `layer_types` strings."""

    SWA = hf_config.SWA
    CSA = hf_config.CSA
    HCA = hf_config.HCA


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of the schedule.

    `layer_idx` counts from 0; the layers that draft follow the backbone (`is_mtp`: an MTP layer, or a stage of DSpark).
    `hash_routed` layers take their expert ids from a table indexed by the token id instead of from the router's
    scores.
    """

    layer_idx: int
    attn: AttentionType
    hash_routed: bool = False
    is_mtp: bool = False


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN frequency scaling of the compress RoPE (no attention factor: V4 applies no mscale).

    Raises `ConfigError` on construction if a value is impossible.
    """

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        number_field("yarn.factor", self.factor, low=1)
        integer_field("yarn.original_max_position_embeddings", self.original_max_position_embeddings)
        number_field("yarn.beta_fast", self.beta_fast, low=1e-6)
        number_field("yarn.beta_slow", self.beta_slow, low=1e-6)
        if self.beta_fast < self.beta_slow:
            raise ConfigError("yarn.beta_fast", f"must be at least beta_slow {self.beta_slow}, got {self.beta_fast}")

    def ramp(self, rope_dim: int, theta: float) -> tuple[int, int]:
        """Returns the pairs of dims between which scaling sets in.

        They are those that turn `beta_fast` and `beta_slow` times within the original context.
        """

        def pair_turning(rotations: float) -> float:
            turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return rope_dim * math.log(turns) / (2 * math.log(theta))

        low, high = math.floor(pair_turning(self.beta_fast)), math.ceil(pair_turning(self.beta_slow))
        return max(low, 0), min(high, rope_dim - 1)


@dataclasses.dataclass(frozen=True)
class DSparkHead:
    """The draft head of three stages that checkpoints since July 2026 have (docs/model.md, DSpark).

    Attributes:
        block_size: rows of a block, and so the most drafts of a step.
        noise_token_id: what stands in a block behind the last token.
        target_layer_ids: the layers of the backbone whose output it hears, ascending.
        markov_rank: of the table of pairs of tokens.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int

    stages: ClassVar[int] = hf_config.DSPARK_STAGES


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
    norm_topk_prob: bool = True  # the only value: the published models and transformers always normalise
    routed_scaling_factor: float = 1.5
    num_hash_layers: int = 3
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dspark: DSparkHead | None = None  # instead of MTP layers

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_layers(self) -> int:
        """Backbone layers (those that draft not counted)."""
        return len(self.layer_types)

    @property
    def num_draft_layers(self) -> int:
        """Layers that draft: the stages of DSpark, or MTP layers."""
        return self.num_mtp_layers if self.dspark is None else self.dspark.stages

    @property
    def nope_dim(self) -> int:
        """Leading dims of a KV row that carry no RoPE."""
        return self.head_dim - self.rope_dim

    def ratio(self, attn: AttentionType) -> int:
        """Returns tokens per compressed entry: 4 (CSA), 128 (HCA), 0 (SWA has no entries).

        Raises `ConfigError`: this is no `AttentionType`; their values, Hugging Face's strings, are none.
        """
        _check_attention(attn)
        return {AttentionType.SWA: 0, AttentionType.CSA: self.csa_ratio, AttentionType.HCA: self.hca_ratio}[attn]

    def count(self, attn: AttentionType) -> int:
        """How many backbone layers are of this kind. Raises as `ratio`."""
        _check_attention(attn)
        return sum(t is attn for t in self.layer_types)

    @classmethod
    def flash(cls) -> DSV4Config:
        """Returns DeepSeek-V4-Flash: 43 layers (2 SWA, 21 CSA, 20 HCA), 64 heads, top-512."""
        return cls(
            vocab_size=129280,
            hidden_size=4096,
            num_attention_heads=64,
            head_dim=512,
            rope_dim=64,
            q_lora_rank=1024,
            o_groups=8,
            o_lora_rank=1024,
            sliding_window=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=512,
            num_mtp_layers=1,
            layer_types=_types([0, 0] + [4, 128] * 20 + [4]),
        )

    @classmethod
    def pro(cls) -> DSV4Config:
        """Returns DeepSeek-V4-Pro: 61 layers (30 CSA, 31 HCA), 128 heads, top-1024."""
        return cls(
            vocab_size=129280,
            hidden_size=7168,
            num_attention_heads=128,
            head_dim=512,
            rope_dim=64,
            q_lora_rank=1536,
            o_groups=16,
            o_lora_rank=1024,
            sliding_window=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=1024,
            num_mtp_layers=1,
            n_routed_experts=384,
            moe_intermediate_size=3072,
            routed_scaling_factor=2.5,
            layer_types=_types([128, 128] + [4, 128] * 29 + [4]),
        )

    @classmethod
    def tiny(cls, **overrides: Any) -> DSV4Config:
        """Returns a four-layer model for tests and demos: every attention kind, real ratio rules, small widths.

        The HCA ratio is 16 and the window 32, so that a few hundred tokens pass many flushes.
        """
        fields: dict[str, Any] = dict(
            vocab_size=256,
            hidden_size=64,
            num_attention_heads=4,
            head_dim=32,
            rope_dim=8,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=16,
            sliding_window=32,
            index_n_heads=16,
            index_head_dim=16,
            index_topk=8,
            hca_ratio=16,
            max_position_embeddings=4096,
            yarn=YarnScaling(original_max_position_embeddings=256),
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            num_hash_layers=1,
            hc_mult=2,
            hc_sinkhorn_iters=1,
            layer_types=_types([0, 4, 128, 4]),
        )
        return cls(**(fields | overrides))

    @classmethod
    def tiny_released(cls, **overrides: Any) -> DSV4Config:
        """Returns a model of three layers and an MTP layer whose checkpoint is as the published ones are: 10 MB.

        Matrices of FP8 blocks and FP4 experts, every attention kind, a layer routed by token ids and two by scores.
        Rows of the cache are V4's, and sizes what kernels for released weights take (but for hyper-connections, which
        have kernels of the published widths only). The vocabulary holds `text.save_byte_tokenizer`'s.
        """
        fields: dict[str, Any] = dict(
            vocab_size=272,
            hidden_size=256,
            num_attention_heads=4,
            head_dim=512,
            rope_dim=64,
            q_lora_rank=128,
            o_groups=2,
            o_lora_rank=128,
            sliding_window=128,
            index_n_heads=8,
            index_head_dim=128,
            index_topk=32,
            max_position_embeddings=16384,
            yarn=YarnScaling(original_max_position_embeddings=1024),
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            num_hash_layers=1,
            num_mtp_layers=1,
            layer_types=_types([0, 4, 128]),
        )
        return cls(**(fields | overrides))

    @classmethod
    def from_hf(cls, source: str | pathlib.Path | Mapping[str, Any]) -> DSV4Config:
        """Reads a Hugging Face config: a `config.json`, the directory that holds one, or its dict.

        The schedule may be given as `layer_types` or as per-layer `compress_ratios` (longer than
        `num_hidden_layers` when MTP entries trail it: only the backbone's part is used). Where
        spellings conflict, the one that wins is that of `transformers` 5.23; what this package does
        not compute (`norm_topk_prob` false, a YaRN attention factor, YaRN on the main RoPE) is refused.

        Raises:
            ConfigError: naming the field that is missing, impossible or not supported.
        """
        hf = source if isinstance(source, Mapping) else hf_config.read_hf(source)
        fields = hf_config.parse_hf(hf)
        kinds, yarn, dspark = (fields.pop(name) for name in ("layer_types", "yarn", "dspark"))
        return cls(
            layer_types=tuple(map(AttentionType, kinds)),
            yarn=None if yarn is None else YarnScaling(**yarn),
            dspark=None if dspark is None else DSparkHead(**dspark),
            **fields,
        )

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """The `config.json` that `from_hf` and `transformers` read as this model, with weights of `dtype`."""
        kinds = [kind.value for kind in self.layer_types]
        return hf_config.hf_fields(dataclasses.asdict(self) | {"layer_types": kinds}, dtype)


@former_keywords(include_mtp="include_drafts")
def build_schedule(cfg: DSV4Config, *, include_drafts: bool = False) -> tuple[LayerSpec, ...]:
    """The layers in order; with `include_drafts`, the SWA-only layers that draft follow the backbone."""
    backbone = tuple(LayerSpec(i, attn, hash_routed=i < cfg.num_hash_layers) for i, attn in enumerate(cfg.layer_types))
    if not include_drafts:
        return backbone
    first = cfg.num_layers
    return backbone + tuple(LayerSpec(first + i, AttentionType.SWA, is_mtp=True) for i in range(cfg.num_draft_layers))


def _types(ratios: list[int]) -> tuple[AttentionType, ...]:
    kinds = {0: AttentionType.SWA, 4: AttentionType.CSA, 128: AttentionType.HCA}
    return tuple(kinds[ratio] for ratio in ratios)


def _check_attention(attn: object) -> None:
    if not isinstance(attn, AttentionType):
        raise ConfigError(None, f"expected an AttentionType, got {brief(attn)}")


def _validate(cfg: DSV4Config) -> None:
    for name in (
        "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "rope_dim", "q_lora_rank", "o_groups",
        "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings",
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "hc_mult",
    ):  # fmt: skip
        integer_field(name, getattr(cfg, name))
    for name, high in (
        ("num_mtp_layers", _MAX_LAYERS),
        ("num_hash_layers", INT32_MAX),
        ("n_shared_experts", INT32_MAX),
    ):
        integer_field(name, getattr(cfg, name), low=0, high=high)
    integer_field("hc_sinkhorn_iters", cfg.hc_sinkhorn_iters, high=1000)
    for name in ("rms_norm_eps", "routed_scaling_factor", "swiglu_limit"):
        number_field(name, getattr(cfg, name))
    for name in ("rope_theta", "compress_rope_theta"):
        number_field(name, getattr(cfg, name), low=1)
    number_field("hc_eps", cfg.hc_eps, low=0)
    integer_field("csa_ratio", cfg.csa_ratio, low=2)
    integer_field("hca_ratio", cfg.hca_ratio, low=2)
    if cfg.hca_ratio == cfg.csa_ratio:
        raise ConfigError("hca_ratio", f"must differ from csa_ratio, got {cfg.hca_ratio}")
    if not isinstance(cfg.layer_types, tuple) or not 1 <= len(cfg.layer_types) <= _MAX_LAYERS:
        raise ConfigError("layer_types", f"must be a tuple of 1 to {_MAX_LAYERS} layers, got {brief(cfg.layer_types)}")
    for i, kind in enumerate(cfg.layer_types):
        if not isinstance(kind, AttentionType):
            raise ConfigError("layer_types", f"entry {i} is {brief(kind)}, expected an AttentionType")
    if cfg.rope_dim % 2 or cfg.rope_dim >= cfg.head_dim:
        raise ConfigError("rope_dim", f"must be even and smaller than head_dim {cfg.head_dim}, got {cfg.rope_dim}")
    if cfg.index_head_dim % 2 or cfg.index_head_dim < cfg.rope_dim:
        raise ConfigError("index_head_dim", f"must be even and at least rope_dim {cfg.rope_dim}")
    if cfg.num_attention_heads % cfg.o_groups:
        raise ConfigError("o_groups", f"must divide num_attention_heads {cfg.num_attention_heads}")
    if cfg.num_experts_per_tok > cfg.n_routed_experts:
        raise ConfigError("num_experts_per_tok", f"exceeds n_routed_experts {cfg.n_routed_experts}")
    if cfg.scoring_func not in ("sqrtsoftplus", "softmax", "sigmoid"):
        raise ConfigError("scoring_func", f"unknown scoring function {brief(cfg.scoring_func)}")
    if cfg.norm_topk_prob is not True:
        raise ConfigError("norm_topk_prob", f"only true is supported, got {brief(cfg.norm_topk_prob)}")
    if not isinstance(cfg.tie_word_embeddings, bool):
        raise ConfigError("tie_word_embeddings", f"must be true or false, got {brief(cfg.tie_word_embeddings)}")
    _validate_yarn(cfg)
    _validate_dspark(cfg)


def _validate_dspark(cfg: DSV4Config) -> None:
    head = cfg.dspark
    if head is None:
        return
    if not isinstance(head, DSparkHead):
        raise ConfigError("dspark", f"must be a DSparkHead or None, got {brief(head)}")
    if cfg.num_mtp_layers:
        raise ConfigError("num_mtp_layers", f"must be 0 beside DSpark, got {cfg.num_mtp_layers}")
    integer_field("dspark_block_size", head.block_size, high=_MAX_BLOCK)
    integer_field("dspark_noise_token_id", head.noise_token_id, low=0, high=cfg.vocab_size - 1)
    integer_field("dspark_markov_rank", head.markov_rank)
    ids, field = head.target_layer_ids, "dspark_target_layer_ids"
    if not isinstance(ids, tuple) or not ids:
        raise ConfigError(field, f"must be a tuple of layers, got {brief(ids)}")
    for layer in ids:
        integer_field(field, layer, low=0, high=cfg.num_layers - 1)
    if any(one >= other for one, other in itertools.pairwise(ids)):
        raise ConfigError(field, f"must ascend, got {brief(ids)}")


def _validate_yarn(cfg: DSV4Config) -> None:
    if cfg.yarn is None:
        return
    if not isinstance(cfg.yarn, YarnScaling):
        raise ConfigError("yarn", f"must be a YarnScaling or None, got {brief(cfg.yarn)}")
    if cfg.compress_rope_theta == 1:
        raise ConfigError("compress_rope_theta", "must exceed 1 with YaRN")
    low, high = cfg.yarn.ramp(cfg.rope_dim, cfg.compress_rope_theta)
    if low > high:
        # Implementations differ in what they make of this, and no model has it.
        raise ConfigError("yarn", f"an original context that scales from pair {low} to {high} makes no ramp")
