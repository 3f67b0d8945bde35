"""A small DeepSeek-V4 that can be trained: its sizes, its forward for batches, and the roundings of the released model.

`dsv4.model.forward_uncached` is the definition; `losses` here computes the same numbers (tests/test_train_small.py)
for [B, T] tokens at once, in the form that a GPU is fast at: the window in blocks, all experts as one wide layer, no
[T, T] array. What training adds to the definition:

* **Rounding.** What the released model computes with rounded is rounded here too, and the gradient passes as if it were
  not (straight through): FP8 weights per 128 x 128, FP8 inputs of the products with FP8 and FP4 weights per row and 128
  columns, FP8 rows of the window and of entries per 64, FP4 experts per row and 32 columns, FP4 index queries and keys
  after a Hadamard rotation. The FP4 ones set in later (`Phase.fp4`), as for V4 (arXiv 2606.19348, section 5.2.1).
* **The indexer's loss.** A choice of the best entries has no gradient. As in DeepSeek-V3.2 (arXiv 2512.02556, its
  continued pre-training) the indexer's input is detached, and its scores learn the attention's own distribution: what
  all heads give to each entry, normalised, is the target of a KL divergence. At first attention reads all entries, then
  those that the indexer picks (`Phase.sparse`). V3.2 then compares the picked ones alone; here the target stays over
  all, whose scores are at hand, and so a bad choice is unlearned.
* **Balance** of the experts without a loss: a bias that only chooses rises for experts that got too few tokens
  (DeepSeek-V3, arXiv 2412.19437, section 2.1.2); `losses` gives the counts.

DSpark's stages (`with_drafts`) are trained by themselves, beside a backbone that stays as it is (`draft_losses`):
blocks behind some tokens of a text learn the backbone's own distribution at their places, given the text before.

A plain transformer of the same size (`PlainConfig`) is here for comparison: full causal attention, SwiGLU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import dsv4_jax as dsv4
from dsv4_jax.config import AttentionType, DSparkHead
from dsv4_jax.formats import index_format, kv_format
from dsv4_jax.formats.scaling import (
    E4M3_MAX,
    absmax,
    e4m3_codes,
    e4m3_values,
    grouped,
    power_of_two,
    ue8m0_scale_exponent,
    ungrouped,
)
from dsv4_jax.formats.weights import WeightFormat
from dsv4_jax.formats.weights.fp4 import gate_up_rows
from dsv4_jax.model import Params, init_params, param_specs
from dsv4_jax.model.weights.names import MTP
from dsv4_jax.model.weights.quantised import FP4, FP8, Quantised
from dsv4_jax.ops.numerics import hadamard, rope_frequencies

__all__ = [
    "EXACT",
    "LEARNED",
    "DraftLosses",
    "Losses",
    "Phase",
    "PlainConfig",
    "Precision",
    "Stacks",
    "draft_losses",
    "draw",
    "fp4_rounded",
    "fp8_rounded",
    "losses",
    "plain_draw",
    "plain_losses",
    "released",
    "rounded",
    "small_config",
    "stack",
    "toy_config",
    "trained",
    "unstack",
    "with_drafts",
]

Tree: TypeAlias = Any
_FP8_FLOOR, _FP4_FLOOR = (
    np.float32(row.scales[0].floor) for row in (kv_format("fp8", 128, 64), index_format("fp4", 128))
)
_HIDDEN = np.float32(-1e30)  # the logit of a key that is not seen


def small_config() -> dsv4.DSV4Config:
    """V4-Flash a sixteenth as wide, six layers deep: 22.8 M parameters, 23.2 MB as released.

    Row widths, window, ratios and YaRN are those of V4, for which the CUDA kernels are made; 64 picked entries choose
    from 256 tokens on.
    """
    swa, csa, hca = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
    return dsv4.DSV4Config(
        vocab_size=4096,
        hidden_size=256,
        layer_types=(swa, swa, csa, hca, csa, hca),
        num_attention_heads=4,
        head_dim=512,
        rope_dim=64,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=128,
        sliding_window=128,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=64,
        num_mtp_layers=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        num_hash_layers=2,
        max_position_embeddings=65536,
    )


def toy_config(vocab_size: int = 512) -> dsv4.DSV4Config:
    """Returns `small_config` with every width that the released formats leave free as small as can be: for a CPU."""
    swa, csa, hca = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
    return dsv4.DSV4Config.tiny(
        vocab_size=vocab_size,
        hidden_size=128,
        layer_types=(swa, csa, hca),
        num_attention_heads=4,
        head_dim=64,
        rope_dim=16,
        q_lora_rank=128,
        o_lora_rank=64,
        moe_intermediate_size=128,
        index_head_dim=32,
        index_n_heads=16,
        num_mtp_layers=1,
        hc_sinkhorn_iters=20,
    )


def with_drafts(cfg: dsv4.DSV4Config) -> dsv4.DSV4Config:
    """The same backbone with DSpark's stages in place of an MTP layer, their sizes in V4's proportions to the others.

    The noise is the mark that ends a file: nothing of a text is drafted behind it.
    """
    last = tuple(range(max(cfg.num_layers - 3, 0), cfg.num_layers))
    head = DSparkHead(block_size=5, noise_token_id=1, target_layer_ids=last, markov_rank=64)
    return dataclasses.replace(cfg, num_mtp_layers=0, dspark=head)


# Rounding


def fp8_rounded(x: jax.Array, group: int) -> jax.Array:
    """x [..., n], each `group` of its columns as e4m3 codes with a power of two as scale; float32."""
    groups = grouped(x.astype(jnp.float32), group)
    exponent = ue8m0_scale_exponent(absmax(groups, _FP8_FLOOR), E4M3_MAX)[..., None]
    values = e4m3_values(e4m3_codes(groups * power_of_two(-exponent)))
    return ungrouped(values * power_of_two(exponent))[..., : x.shape[-1]]


def fp8_rounded_weight(x: jax.Array) -> jax.Array:
    """A matrix [..., rows, columns] as FP8 with a scale per 128 x 128; float32."""
    *lead, rows, columns = x.shape
    padded = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -rows % 128), (0, -columns % 128)])
    blocks = padded.reshape(*lead, padded.shape[-2] // 128, 128, padded.shape[-1] // 128, 128).swapaxes(-3, -2)
    done = fp8_rounded(blocks.reshape(*blocks.shape[:-2], 128 * 128), 128 * 128)
    return done.reshape(blocks.shape).swapaxes(-3, -2).reshape(padded.shape)[..., :rows, :columns]


def fp4_rounded(x: jax.Array) -> jax.Array:
    """x [..., n], each 32 of its columns as e2m1 codes with a power of two as scale; float32."""
    groups = grouped(x.astype(jnp.float32), 32)
    exponent = ue8m0_scale_exponent(absmax(groups, _FP4_FLOOR), 6.0)[..., None]
    y = groups * power_of_two(-exponent)
    # Codes are 0.5 apart below 2, 1 apart below 4, and 2 apart up to 6.
    size = jnp.abs(y)
    step = jnp.where(size < 2, np.float32(0.5), jnp.where(size < 4, np.float32(1), np.float32(2)))
    return ungrouped(jnp.round(y / step) * step * power_of_two(exponent))[..., : x.shape[-1]]


class Phase(NamedTuple):
    """What sets in during training; bool arrays, so that nothing is compiled again.

    Attributes:
        fp4: experts, index queries and index keys are rounded to FP4.
        sparse: CSA layers read the entries that the indexer picks, not all.
    """

    fp4: jax.Array | np.bool | bool
    sparse: jax.Array | np.bool | bool


LEARNED = Phase(fp4=True, sparse=True)


@dataclasses.dataclass(frozen=True)
class Precision:
    """What the forward computes in.

    Attributes:
        dtype: of activations between products.
        rounds: whether activations are rounded as in the released model.
    """

    dtype: Any = jnp.bfloat16
    rounds: bool = True

    def of_product(self, x: jax.Array) -> jax.Array:
        """The input of a product with FP8 or FP4 weights: FP8 per row and 128 columns."""
        return self._through(x, lambda x: fp8_rounded(x, 128))

    def row(self, x: jax.Array, rope_dim: int) -> jax.Array:
        """A row of the window, or an entry: FP8 per 64, but for the columns that rotate."""
        if not self.rounds:
            return x.astype(self.dtype)
        plain = np.arange(x.shape[-1]) < x.shape[-1] - rope_dim
        return self._through(x, lambda x: jnp.where(plain, fp8_rounded(jnp.where(plain, x, np.float32(0)), 64), x))

    def index(self, x: jax.Array, on: jax.Array | np.bool | bool) -> jax.Array:
        """Index queries or keys: rotated by a Hadamard matrix, then FP4 per 32."""
        if not self.rounds:
            return x.astype(self.dtype)
        n = x.shape[-1]
        signs = jnp.asarray(hadamard(jnp.eye(n)) * np.float32(n**0.5), self.dtype)
        x = jnp.einsum("...i,ij->...j", x.astype(self.dtype), signs, preferred_element_type=jnp.float32)
        return self._through(x * np.float32(n**-0.5), lambda x: jnp.where(on, fp4_rounded(x), x))

    def _through(self, x: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        if not self.rounds:
            return x.astype(self.dtype)
        x = x.astype(jnp.float32)
        # Exact: the difference of a value and what it is rounded to is a float32.
        return (x + lax.stop_gradient(function(x) - x)).astype(self.dtype)


EXACT = Precision(jnp.float32, rounds=False)


# Parameters in stacks


Stacks: TypeAlias = dict[str, jax.Array]


class _Leaf(NamedTuple):
    """Where a parameter is: its path in the tree, its stack, and which of the stack's it is."""

    keys: tuple[Any, ...]
    stack: str
    number: int


_BY_ADAM = ("embed", "head", "fn", "ape", "gate", "weights_proj", "w1", "w2", "confidence")  # the others by Muon


def _leaves(cfg: dsv4.DSV4Config | PlainConfig) -> Iterator[_Leaf]:
    """All that is trained, in a fixed order.

    Parameters of one shape that are stored and updated alike share a stack, so that a step's rounding and its update
    are a few large kernels and not a thousand small ones. The name of a stack says how: optimiser, format, shape.
    """
    if isinstance(cfg, PlainConfig):
        specs, formats = plain_specs(cfg), {}
    else:
        specs = param_specs(cfg, drafts=True)
        formats = dict(
            jax.tree_util.tree_leaves_with_path(
                param_specs(cfg, "released", drafts=True), is_leaf=lambda x: isinstance(x, Quantised)
            )
        )
    counts: dict[str, int] = {}
    frozen = isinstance(cfg, dsv4.DSV4Config) and cfg.dspark is not None  # all but the stages
    for keys, spec in jax.tree_util.tree_leaves_with_path(specs):
        name = keys[-1].key
        if not jnp.issubdtype(spec.dtype, jnp.floating) or name == "gate_bias" or (frozen and keys[0].key != MTP):
            continue  # hash tables are drawn once, biases follow the counts
        stored = formats.get(keys)
        fmt = stored.format.name if isinstance(stored, Quantised) else "f32" if _stays_float32(stored) else "bf16"
        small = len(spec.shape) < 2 or name in _BY_ADAM
        is_expert_gate = name == "gate" and len(keys) > 1 and keys[-2].key == "shared"
        optimiser = "adam" if small and not is_expert_gate else "muon"
        stack = f"{optimiser}.{fmt}.{'x'.join(map(str, spec.shape))}"
        yield _Leaf(keys, stack, counts.get(stack, 0))
        counts[stack] = counts.get(stack, 0) + 1


def trained(cfg: dsv4.DSV4Config | PlainConfig) -> set[str]:
    """The `keystr` of all that is trained: with DSpark its stages, with an MTP layer or none everything."""
    return {jax.tree_util.keystr(leaf.keys) for leaf in _leaves(cfg)}


def _stays_float32(spec: Any) -> bool:
    return spec is not None and spec.dtype == jnp.float32


def stack(cfg: dsv4.DSV4Config | PlainConfig, tree: Tree, dtype: Any = jnp.float32) -> Stacks:
    """The trained parameters of a tree (or their gradients), those alike in one array [number, ...]."""
    values = dict(jax.tree_util.tree_leaves_with_path(tree))
    members: dict[str, list[jax.Array]] = {}
    for leaf in _leaves(cfg):
        members.setdefault(leaf.stack, []).append(values[leaf.keys].astype(dtype))
    return {name: jnp.stack(arrays) for name, arrays in members.items()}


def unstack(cfg: dsv4.DSV4Config | PlainConfig, stacks: Stacks, tree: Tree) -> Tree:
    """`tree` with the trained parameters replaced by those of the stacks."""
    new = {leaf.keys: stacks[leaf.stack][leaf.number] for leaf in _leaves(cfg)}
    return jax.tree_util.tree_map_with_path(lambda keys, x: new.get(keys, x), tree)


def rounded(stacks: Stacks, fp4: jax.Array | np.bool | bool = True) -> Stacks:
    """What the released model would compute with: matrices in bfloat16 after their rounding, the rest as it is."""

    def one(name: str, x: jax.Array) -> jax.Array:
        fmt = name.split(".")[1]
        if fmt == FP8.name:
            x = fp8_rounded_weight(x)
        elif fmt == FP4.name:
            x = jnp.where(fp4, fp4_rounded(x), x)
        return x if fmt == "f32" else x.astype(jnp.bfloat16)

    return {name: one(name, x) for name, x in stacks.items()}


def released(cfg: dsv4.DSV4Config, params: Params) -> Params:
    """Plain parameters in the released formats: what `save_hf` writes under the published names."""

    @functools.partial(jax.jit, static_argnums=(1, 2))  # each shape once
    def packed(x: jax.Array, fmt: WeightFormat, gates: bool) -> tuple[jax.Array, ...]:
        codes = fmt.codec.encode(x)
        if gates:
            codes = tuple(gate_up_rows(*jnp.split(part, 2, -2)) for part in codes)
        return fmt.codec.pack(*codes)

    def one(keys: tuple[Any, ...], x: jax.Array, spec: Any) -> Any:
        if not isinstance(spec, Quantised):
            return x.astype(spec.dtype)
        return Quantised(packed(x, spec.format, keys[-1].key == "gate_up"), spec.format)

    return jax.tree_util.tree_map_with_path(one, params, param_specs(cfg, "released", drafts=True))


def draw(cfg: dsv4.DSV4Config, seed: int = 0) -> Params:
    """Parameters to begin training with, the layers that draft and all, float32.

    Matrices that write into the residual are smaller by the root of their number; hyper-connections begin near a plain
    residual, in which each block reads mostly one of the streams.
    """
    drawn = init_params(cfg, seed, drafts=True)
    rng, n, sites = np.random.default_rng(seed), cfg.hc_mult, iter(range(10**6))

    def one(keys: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name, of = keys[-1].key, keys[-2].key if len(keys) > 1 and hasattr(keys[-2], "key") else ""
        if "norm" in name:
            return jnp.ones_like(x)
        if name in ("attn_sink", "ape", "gate_bias", "w2", "confidence"):
            return jnp.zeros_like(x)
        if name == "scale":
            return jnp.full_like(x, 0.05)
        if name == "embed":
            return x * np.float32(cfg.hidden_size**0.5)
        if name in ("wo_b", "down"):
            return x * np.float32((2 * cfg.num_layers) ** -0.5)
        if name == "base" and of == "hc_head":
            return jnp.full_like(x, -math.log(n - 1))
        if name == "base":
            site = next(sites)
            pre = np.where(np.arange(n) == site % n, 1.0, -2.0)
            return jnp.asarray(np.concatenate([pre, rng.normal(0, 0.5, n), (4 * np.eye(n)).ravel()]), jnp.float32)
        return x

    return jax.tree_util.tree_map_with_path(one, drawn)


# Forward


class Losses(NamedTuple):
    """What `losses` gives; means over tokens, in nats.

    Attributes:
        total: what is minimised.
        next_token: of the next token, by the backbone.
        after_next: of the one after it, by the MTP layer.
        index: the indexers' KL divergence, mean over CSA layers.
        counts: [layers with a bias, experts] float32, tokens that chose each expert.
    """

    total: jax.Array
    next_token: jax.Array
    after_next: jax.Array
    index: jax.Array
    counts: jax.Array

    @property
    def facts(self) -> dict[str, jax.Array]:
        """What the log tells of them."""
        return {"loss": self.next_token, "drafts": self.after_next, "index": self.index}


class DraftLosses(NamedTuple):
    """What `draft_losses` gives; means over blocks, in nats.

    Attributes:
        total: what is minimised.
        drafts: the cross-entropy of the rows' distributions with the backbone's, mean over the rows of a block.
        confidence: the cross-entropy of how sure the head is with how likely the standard rule keeps a draft.
        agreed: [rows] the share of blocks in which the likeliest token of row k is the backbone's, and so are those of
            the rows before it; each row knows the text's own token before its place.
        counts: [stages, experts] float32, tokens that chose each expert.
    """

    total: jax.Array
    drafts: jax.Array
    confidence: jax.Array
    agreed: jax.Array
    counts: jax.Array

    @property
    def facts(self) -> dict[str, jax.Array]:
        """What the log tells of them."""
        return {"loss": self.drafts, "confidence": self.confidence, "agreed": self.agreed}


def losses(
    cfg: dsv4.DSV4Config,
    params: Params,
    tokens: jax.Array,
    phase: Phase = LEARNED,
    precision: Precision = Precision(),
    *,
    mtp_weight: float = 0.3,
    index_weight: float = 0.1,
    remat: bool = False,
) -> Losses:
    """The losses of `params` (with an MTP layer), rounded already, on tokens [B, T + 2]; T a multiple of the window."""
    run = _kept_products(cfg, phase, precision, remat)
    streams, _, index, counts = _backbone(cfg, params, tokens[:, :-2], run, precision)
    of_logits = jax.checkpoint(_cross_entropy)
    next_token = of_logits(_head(params, streams, params, cfg, precision), tokens[:, 1:-1])

    (p,), following = params[MTP], tokens[:, 1:-1]
    told = _linear(precision.of_product(_norm(streams, p["hnorm"], cfg)), p["h_proj"])
    x = _looked_up(params["embed"].astype(precision.dtype), following)
    embedded = precision.of_product(_norm(x, p["enorm"], cfg))
    streams = told + _linear(embedded, p["e_proj"])[:, :, None]
    streams, _, of_experts = run(p, streams, following, AttentionType.SWA)
    after_next = of_logits(_head(p, streams, params, cfg, precision), tokens[:, 2:])

    of_index = jnp.stack(index).mean() if index else jnp.float32(0)
    total = next_token + np.float32(mtp_weight) * after_next + np.float32(index_weight) * of_index
    return Losses(total, next_token, after_next, of_index, jnp.stack([*counts, of_experts]))


def _kept_products(cfg: dsv4.DSV4Config, phase: Phase, precision: Precision, remat: bool) -> Callable[..., Any]:
    """`_layer` of (parameters, streams, tokens, kind), of whose forward only the products are kept.

    What lies between them is cheaper to compute again than to keep. `remat`: nothing is kept.
    """

    def layer(p: Params, streams: jax.Array, tokens: jax.Array, attn: AttentionType) -> Any:
        return _layer(p, streams, tokens, attn, cfg, phase, precision)

    return jax.checkpoint(layer, static_argnums=3, policy=None if remat else _KEPT)


_KEPT = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names("comb")
)


def _backbone(
    cfg: dsv4.DSV4Config, params: Params, tokens: jax.Array, run: Callable[..., Any], precision: Precision
) -> tuple[jax.Array, list[jax.Array], list[jax.Array], list[jax.Array]]:
    """(Streams behind the last layer, means of the streams behind those that DSpark hears, indexers' losses, tokens of
    the experts of each layer that scores them), of tokens [B, T]."""
    x = _looked_up(params["embed"].astype(precision.dtype), tokens)
    streams = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], cfg.hc_mult, x.shape[2]))
    heard, index, counts = [], [], []
    for i, (p, attn) in enumerate(zip(params["layers"], cfg.layer_types, strict=True)):
        streams, of_index, of_experts = run(p, streams, tokens, attn)
        if cfg.dspark is not None and i in cfg.dspark.target_layer_ids:
            heard.append(streams.astype(jnp.float32).mean(2).astype(precision.dtype))
        index += [] if of_index is None else [of_index]
        counts += [] if "tid2eid" in p["ffn"] else [of_experts]
    return streams, heard, index, counts


def draft_losses(
    cfg: dsv4.DSV4Config,
    params: Params,
    tokens: jax.Array,
    blocks: int,
    precision: Precision = Precision(),
    *,
    decay: float = 0.8,
    remat: bool = False,
) -> DraftLosses:
    """The losses of DSpark's stages of `params`, rounded already, on tokens [B, T]; T a multiple of the window.

    The backbone is run as it is, without a gradient. Row k of a block behind n tokens learns the distribution that the
    backbone has at position n + k, and knows the text's token there as it would a draft that was right. It weighs
    `decay` ** k as much as the first, for it counts only if those before it are kept. The confidence learns what the
    standard rule would keep, the sum of the lesser of both distributions, and nothing else learns from it.

    Args:
        blocks: of each sequence, spread over it.
    """
    spark, count = cfg.dspark, tokens.shape[1]
    assert spark is not None
    rows = spark.block_size
    starts = 1 + np.arange(blocks) * (count - rows - 1) // max(blocks - 1, 1)  # tokens before each
    places = (starts[:, None] + np.arange(rows)).reshape(-1)
    run = _kept_products(cfg, LEARNED, precision, remat)
    frozen = {name: lax.stop_gradient(x) for name, x in params.items() if name != MTP}
    streams, heard, _, _ = _backbone(cfg, frozen, tokens, run, precision)
    target = lax.stop_gradient(jax.nn.softmax(_head(frozen, streams[:, places], frozen, cfg, precision), -1))
    h, logits, counts = _blocks(
        cfg, params | frozen, lax.stop_gradient(jnp.concatenate(heard, -1)), tokens, starts, precision, remat
    )
    last = params[MTP][-1]
    pair = _looked_up(last["markov"]["w1"].astype(precision.dtype), tokens[:, places])
    logits = logits + _exact_linear(pair, last["markov"]["w2"])
    likely = jax.nn.log_softmax(logits, -1)

    def of_rows(each: jax.Array) -> jax.Array:
        """Means over blocks, [rows]."""
        return each.reshape(-1, rows).mean(0)

    weights = np.float32(decay) ** np.arange(rows, dtype=np.float32)
    of_drafts = of_rows(-(target * likely).sum(-1))
    known = lax.stop_gradient(jnp.concatenate([h, pair.astype(jnp.float32)], -1))
    sure = jnp.einsum("bti,i->bt", known, last["confidence"][0].astype(jnp.float32))
    right = lax.stop_gradient(jnp.minimum(target, jnp.exp(likely)).sum(-1))
    confidence = (jax.nn.softplus(sure) - right * sure).mean()
    same = (logits.argmax(-1) == target.argmax(-1)).reshape(-1, rows)
    agreed = jnp.cumprod(same.astype(jnp.float32), 1).mean(0)
    total = (of_drafts * weights).sum() / weights.sum() + confidence
    return DraftLosses(total, of_drafts.mean(), confidence, agreed, counts)


def _blocks(
    cfg: dsv4.DSV4Config,
    params: Params,
    heard: jax.Array,
    tokens: jax.Array,
    starts: np.ndarray,
    precision: Precision,
    remat: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Blocks behind the first `starts` tokens of each sequence, of what the stages hear of all of them [B, T, .].

    Returns (what the confidence is given [B, blocks * rows, hidden] float32, logits without what pairs of tokens add,
    tokens of each stage's experts).
    """
    spark = cfg.dspark
    assert spark is not None
    stages, rows, window = params[MTP], spark.block_size, cfg.sliding_window
    of_main = _norm(_linear(precision.of_product(heard), stages[0]["main_proj"]), stages[0]["main_norm"], cfg)
    of_main = precision.of_product(of_main.astype(precision.dtype))
    at = jnp.asarray(starts[:, None] + np.arange(rows)).reshape(-1)
    ids = jnp.full((tokens.shape[0], starts.size, rows), np.int32(spark.noise_token_id))
    ids = ids.at[:, :, 0].set(tokens[:, starts]).reshape(tokens.shape[0], -1)
    before = starts[:, None] + np.arange(-window, 0)  # positions of the window
    freq = rope_frequencies(cfg, AttentionType.SWA)
    seen = np.concatenate([before >= 0, np.ones((starts.size, rows), bool)], 1)[None, :, None, None]

    def attention(p: Params, x: jax.Array) -> jax.Array:
        q, own, _ = _queries_and_rows(p, x, at, freq, cfg, precision)
        of_window = _window_rows(p, of_main, jnp.arange(of_main.shape[1]), freq, cfg, precision)
        of_window = of_window[:, np.maximum(before, 0)]  # [B, blocks, window, dim]
        keys = jnp.concatenate([of_window, own.reshape(*of_window.shape[:2], rows, -1)], 2)
        scores = _exact("bnqhd,bnkd->bnqhk", q.reshape(*keys.shape[:2], rows, *q.shape[2:]), keys)
        scores = jnp.where(seen, scores * np.float32(cfg.head_dim**-0.5), _HIDDEN)
        top = lax.stop_gradient(jnp.maximum(scores.max(-1), p["attn_sink"]))
        weight = jnp.exp(scores - top[..., None])
        total = weight.sum(-1) + jnp.exp(p["attn_sink"] - top)
        out = jnp.einsum("bnqhk,bnkd->bnqhd", weight.astype(q.dtype), keys, preferred_element_type=q.dtype)
        out = out.astype(jnp.float32) / total[..., None]
        return _of_heads(p, out.reshape(q.shape), at, freq, cfg, precision)

    def stage(streams: jax.Array, p: Params) -> tuple[jax.Array, jax.Array]:
        x, back = _read(p["hc_attn"], streams, cfg, precision)
        y = attention(p["attn"], _norm(x, p["attn_norm"], cfg).astype(precision.dtype))
        return _of_ffn(p, _write(streams, y, *back), ids, cfg, precision)

    x = _looked_up(params["embed"].astype(precision.dtype), ids)
    streams = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], cfg.hc_mult, x.shape[2]))
    alike = [{name: stage[name] for name in stages[1]} for stage in stages]  # the second has what all have
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *alike)
    streams, counts = lax.scan(jax.checkpoint(stage, policy=None if remat else _KEPT), streams, stacked)
    h = _collapsed(stages[-1], streams, cfg)
    return h, _logits(stages[-1], h, params, cfg, precision), counts


def _layer(
    p: Params,
    streams: jax.Array,
    tokens: jax.Array,
    attn: AttentionType,
    cfg: dsv4.DSV4Config,
    phase: Phase,
    precision: Precision,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    x, back = _read(p["hc_attn"], streams, cfg, precision)
    x = _norm(x, p["attn_norm"], cfg).astype(precision.dtype)
    y, of_index = _attention(p["attn"], x, attn, cfg, phase, precision)
    streams, of_experts = _of_ffn(p, _write(streams, y, *back), tokens, cfg, precision)
    return streams, of_index, of_experts


def _of_ffn(
    p: Params, streams: jax.Array, tokens: jax.Array, cfg: dsv4.DSV4Config, precision: Precision
) -> tuple[jax.Array, jax.Array]:
    """The second half of a layer: the streams after its experts, and the tokens of each of these."""
    x, back = _read(p["hc_ffn"], streams, cfg, precision)
    y, of_experts = _experts(p["ffn"], _norm(x, p["ffn_norm"], cfg).astype(precision.dtype), tokens, cfg, precision)
    return _write(streams, y, *back), of_experts


def _head(p: Params, streams: jax.Array, of_all: Params, cfg: dsv4.DSV4Config, precision: Precision) -> jax.Array:
    """Logits; `p` has the weights of the streams and the norm."""
    return _logits(p, _collapsed(p, streams, cfg), of_all, cfg, precision)


def _collapsed(p: Params, streams: jax.Array, cfg: dsv4.DSV4Config) -> jax.Array:
    """The streams in one, float32."""
    (mix,) = _mix(p["hc_head"], streams, cfg, (cfg.hc_mult,))
    return _weighted(jax.nn.sigmoid(mix) + np.float32(cfg.hc_eps), streams)


def _logits(p: Params, x: jax.Array, of_all: Params, cfg: dsv4.DSV4Config, precision: Precision) -> jax.Array:
    return _exact_linear(_norm(x, p["norm"], cfg).astype(precision.dtype), of_all["head"])


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
    return (jax.nn.logsumexp(logits, -1) - jnp.where(is_target, logits, np.float32(0)).sum(-1)).mean()


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), preferred_element_type=x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exact(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum in float32. The gradient is rounded to what x and y are in: products of float32 are slow ones."""
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _exact_forward(spec: str, x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _exact(spec, x, y), (x, y)


def _exact_backward(spec: str, given: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, ...]:
    _, pull = jax.vjp(lambda x, y: jnp.einsum(spec, x, y, preferred_element_type=x.dtype), *given)
    return pull(gradient.astype(given[0].dtype))


_exact.defvjp(_exact_forward, _exact_backward)


def _exact_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _exact("bti,oi->bto", x, weight.astype(x.dtype))


@jax.custom_vjp
def _looked_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table[tokens]; the gradient is a product, a sum over tokens in float32, and not many additions to few rows."""
    return table[tokens]


def _looked_up_backward(given: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, tokens = given
    of_token = jax.nn.one_hot(tokens, table.shape[0], dtype=gradient.dtype)
    of_table = jnp.einsum("btv,btd->vd", of_token, gradient, preferred_element_type=jnp.float32)
    return of_table.astype(table.dtype), None


_looked_up.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _looked_up_backward)


def _norm(x: jax.Array, weight: jax.Array | None, cfg: dsv4.DSV4Config) -> jax.Array:
    """Computes an RMSNorm in float32."""
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + np.float32(cfg.rms_norm_eps))
    return x if weight is None else x * weight


# Hyper-connections: sums over four streams are written out, for products of 4 x 4 matrices are slow ones.


def _mix(p: Params, streams: jax.Array, cfg: dsv4.DSV4Config, widths: tuple[int, ...]) -> list[jax.Array]:
    flat = streams.reshape(*streams.shape[:2], -1)
    mean = jnp.mean(jnp.square(flat.astype(jnp.float32)), -1, keepdims=True)
    mix = _exact_linear(flat, p["fn"]) * lax.rsqrt(mean + np.float32(cfg.rms_norm_eps))
    starts = np.cumsum((0, *widths)).tolist()
    return [
        mix[..., first:last] * p["scale"][i] + p["base"][first:last]
        for i, (first, last) in enumerate(itertools.pairwise(starts))
    ]


def _weighted(pre: jax.Array, streams: jax.Array) -> jax.Array:
    """Computes sum_j pre_j X_j in float32."""
    each = (pre[..., j, None] * streams[:, :, j].astype(jnp.float32) for j in range(streams.shape[2]))
    return functools.reduce(operator.add, each)


def _read(
    p: Params, streams: jax.Array, cfg: dsv4.DSV4Config, precision: Precision
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    n = cfg.hc_mult
    pre, post, comb = _mix(p, streams, cfg, (n, n, n * n))
    comb = comb.reshape(*comb.shape[:2], n, n)
    comb = jax.checkpoint(_sinkhorn, static_argnums=(1, 2))(comb, cfg.hc_sinkhorn_iters, cfg.hc_eps)
    comb = checkpoint_name(comb, "comb")
    x = _weighted(jax.nn.sigmoid(pre) + np.float32(cfg.hc_eps), streams)
    return x.astype(precision.dtype), (np.float32(2) * jax.nn.sigmoid(post), comb)


def _sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """[B, T, n, n] of any sign -> nearly doubly stochastic.

    A row's and a column's factor are what changes: comb = rows * M * columns. Tokens lie last in all arrays, so that
    the lanes of a warp are tokens. The gradient is that of these iterations: that of their limit, which would cost
    less, is wrong by tenths where logits are large, and training diverged by it.
    """
    m = jax.nn.softmax(jnp.moveaxis(logits, (2, 3), (0, 1)), 1) + np.float32(eps)

    def both(_: Any, factors: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, columns = factors
        rows = rows / (rows * (m * columns[None]).sum(1) + np.float32(eps))
        return rows, columns / (columns * (m * rows[:, None]).sum(0) + np.float32(eps))

    columns = np.float32(1) / (m.sum(0) + np.float32(eps))
    rows, columns = lax.fori_loop(0, iterations - 1, both, (jnp.ones_like(columns), columns))
    return jnp.moveaxis(m * rows[:, None] * columns[None], (0, 1), (2, 3))


def _write(streams: jax.Array, y: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    kept = sum(comb[:, :, j, :, None] * streams[:, :, j, None].astype(jnp.float32) for j in range(streams.shape[2]))
    return (kept + post[..., None] * y[:, :, None].astype(jnp.float32)).astype(streams.dtype)


# Attention


def _attention(
    p: Params, x: jax.Array, attn: AttentionType, cfg: dsv4.DSV4Config, phase: Phase, precision: Precision
) -> tuple[jax.Array, jax.Array | None]:
    """[B, T, hidden] -> the same, and the indexer's loss."""
    (batch, count, _), heads, dim, window = x.shape, cfg.num_attention_heads, cfg.head_dim, cfg.sliding_window
    dtype, freq, position = precision.dtype, rope_frequencies(cfg, attn), jnp.arange(count)
    q, rows, latent = _queries_and_rows(p, x, position, freq, cfg, precision)

    # The window, in blocks of its length: a block's tokens see its rows and those of the block before.
    blocks = count // window
    rows = rows.reshape(batch, blocks, window, dim)
    keys = jnp.concatenate([jnp.pad(rows[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0))), rows], 2)
    age = (np.arange(window)[:, None] + window) - np.arange(2 * window)
    seen = (age >= 0) & (age < window) & ((np.arange(blocks) > 0)[:, None, None] | (np.arange(2 * window) >= window))
    scale = np.float32(dim**-0.5)
    q_blocks = q.reshape(batch, blocks, window, heads, dim)
    near = _exact("bnqhd,bnkd->bnqhk", q_blocks, keys) * scale
    near = jnp.where(seen[None, :, :, None], near, _HIDDEN)
    of_near = near.reshape(batch, count, heads, 2 * window)
    top = jnp.maximum(of_near.max(-1), p["attn_sink"])

    far = entries = ready = loss = None
    if attn is not AttentionType.SWA:
        entries = precision.row(_compress(p["compressor"], x, freq, cfg), cfg.rope_dim)
        ready = jnp.arange(entries.shape[1]) < ((position + 1) // cfg.ratio(attn))[:, None]
        far = _exact("bthd,bsd->bths", q, entries) * scale
        far = jnp.where(ready[None, :, None], far, _HIDDEN)
        top = jnp.maximum(top, far.max(-1))
    top = lax.stop_gradient(top)[..., None]

    near = jnp.exp(of_near - top)
    total = near.sum(-1) + jnp.exp(p["attn_sink"] - top[..., 0])
    near = near.astype(dtype).reshape(batch, blocks, window, heads, 2 * window)
    out = jnp.einsum("bnqhk,bnkd->bnqhd", near, keys, preferred_element_type=dtype)
    out = out.reshape(batch, count, heads, dim).astype(jnp.float32)
    if far is not None and entries is not None and ready is not None:
        read = far = jnp.exp(far - top)
        if attn is AttentionType.CSA:
            scores = _index_scores(p, x, latent, cfg, phase, precision)
            picked = _picked(lax.stop_gradient(scores), ready, cfg.index_topk, precision) | ~jnp.asarray(phase.sparse)
            read = jnp.where(picked[:, :, None], far, np.float32(0))
            shares = far / (total + read.sum(-1))[..., None]
            loss = _index_loss(scores, lax.stop_gradient(shares.sum(2)), ready)
        total = total + read.sum(-1)
        of_far = jnp.einsum("bths,bsd->bthd", read.astype(dtype), entries, preferred_element_type=dtype)
        out = out + of_far.astype(jnp.float32)
    return _of_heads(p, out / total[..., None], position, freq, cfg, precision), loss


def _queries_and_rows(
    p: Params, x: jax.Array, position: jax.Array, freq: np.ndarray, cfg: dsv4.DSV4Config, precision: Precision
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, heads, dim], window rows [B, T, dim] and the query latent of x [B, T, hidden]."""
    given = precision.of_product(x)
    latent = precision.of_product(_norm(_linear(given, p["wq_a"]), p["q_norm"], cfg))
    q = _linear(latent, p["wq_b"]).reshape(*x.shape[:2], cfg.num_attention_heads, cfg.head_dim)
    q = _rotate(_norm(q, None, cfg), position, freq).astype(precision.dtype)
    return q, _window_rows(p, given, position, freq, cfg, precision), latent


def _window_rows(
    p: Params, given: jax.Array, position: jax.Array, freq: np.ndarray, cfg: dsv4.DSV4Config, precision: Precision
) -> jax.Array:
    rows = _rotate(_norm(_linear(given, p["wkv"]), p["kv_norm"], cfg), position, freq)
    return precision.row(rows, cfg.rope_dim)


def _of_heads(
    p: Params, out: jax.Array, position: jax.Array, freq: np.ndarray, cfg: dsv4.DSV4Config, precision: Precision
) -> jax.Array:
    """The layer's output [B, T, hidden] of what its heads give, [B, T, heads, dim] float32."""
    dtype = precision.dtype
    out = _rotate(out, -position, freq).astype(dtype)
    # The groups as one matrix, zero but for its blocks: by itself each would take a copy of its columns.
    groups = jnp.eye(cfg.o_groups, dtype=dtype)[:, None, :, None]
    first = p["wo_a"].reshape(cfg.o_groups, cfg.o_lora_rank, 1, -1).astype(dtype) * groups
    latent = _linear(out.reshape(*out.shape[:2], -1), first.reshape(cfg.o_groups * cfg.o_lora_rank, -1))
    return _linear(precision.of_product(latent), p["wo_b"])


def _compress(p: Params, x: jax.Array, freq: np.ndarray, cfg: dsv4.DSV4Config) -> jax.Array:
    """The entries of all whole blocks, [B, T // ratio, e] float32; overlapping if the projections are twice as wide."""
    (ratio, width), dim = p["ape"].shape, p["norm"].shape[0]
    batch, blocks = x.shape[0], x.shape[1] // ratio
    kv, gate = (
        _exact_linear(x[:, : blocks * ratio], p[w]).reshape(batch, blocks, ratio, width) for w in ("wkv", "wgate")
    )
    gate = gate + p["ape"]
    if width == 2 * dim:

        def with_previous(rows: jax.Array, nothing: np.float32) -> jax.Array:
            before = jnp.pad(rows[:, :-1, :, :dim], ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=nothing)
            return jnp.concatenate([before, rows[..., dim:]], 2)

        kv, gate = with_previous(kv, np.float32(0)), with_previous(gate, _HIDDEN)
    pooled = (kv * jax.nn.softmax(gate, 2)).sum(2)
    return _rotate(_norm(pooled, p["norm"], cfg), ratio * jnp.arange(blocks), freq)


def _index_scores(
    p: Params, x: jax.Array, latent: jax.Array, cfg: dsv4.DSV4Config, phase: Phase, precision: Precision
) -> jax.Array:
    """[B, T, entries] float32; what comes in is detached."""
    x, latent, p = lax.stop_gradient(x), lax.stop_gradient(latent), p["indexer"]
    freq = rope_frequencies(cfg, AttentionType.CSA)
    keys = precision.index(_compress(p["compressor"], x, freq, cfg), phase.fp4)
    q = _linear(latent, p["wq_b"]).reshape(*x.shape[:2], cfg.index_n_heads, cfg.index_head_dim)
    q = precision.index(_rotate(q, jnp.arange(x.shape[1]), freq), phase.fp4)
    weight = _exact_linear(x, p["weights_proj"]) * np.float32((cfg.index_n_heads * cfg.index_head_dim) ** -0.5)
    products = jnp.einsum("bthd,bsd->bths", q, keys, preferred_element_type=precision.dtype)
    return (jax.nn.relu(products.astype(jnp.float32)) * weight[..., None]).sum(2)


def _picked(scores: jax.Array, ready: jax.Array, best: int, precision: Precision) -> jax.Array:
    """The `best` ready entries of the highest score, and those equal to the last of them: [B, T, entries] bool.

    The bits of the least score are found from the top one down, each by one count: a GPU sorts for any other way.
    """
    scores = jnp.where(ready, scores.astype(precision.dtype), -jnp.inf)
    of_bits = jnp.uint16 if scores.dtype == jnp.bfloat16 else jnp.uint32
    bits, sign = lax.bitcast_convert_type(scores, of_bits), of_bits(1 << (8 * scores.dtype.itemsize - 1))
    order = jnp.where(bits & sign != 0, ~bits, bits | sign)  # as unsigned numbers in the order of the scores

    def bit(i: jax.Array, least: jax.Array) -> jax.Array:
        tried = least | lax.shift_right_logical(sign, i.astype(of_bits))
        enough = (order >= tried[..., None]).sum(-1, dtype=jnp.int32) >= best
        return jnp.where(enough, tried, least)

    least = lax.fori_loop(0, 8 * scores.dtype.itemsize, bit, jnp.zeros(scores.shape[:-1], of_bits))
    return (order >= least[..., None]) & ready


def _index_loss(scores: jax.Array, target: jax.Array, ready: jax.Array) -> jax.Array:
    """KL(target || softmax(scores)) over the ready entries, mean over tokens that have any."""
    target = target / jnp.maximum(target.sum(-1, keepdims=True), np.float32(1e-20))
    scores = jax.nn.log_softmax(jnp.where(ready, scores, _HIDDEN), -1)
    each = jnp.where(ready, target * (jnp.log(jnp.maximum(target, np.float32(1e-20))) - scores), np.float32(0))
    count = np.float32(scores.shape[0]) * ready.any(-1).sum().astype(jnp.float32)
    return each.sum() / jnp.maximum(count, np.float32(1))


def _rotate(x: jax.Array, position: jax.Array, freq: np.ndarray) -> jax.Array:
    """RoPE of the last dims of x [B, T, ...], adjacent pairs; float32."""
    plain = x.shape[-1] - 2 * freq.size
    angle = position[:, None].astype(jnp.float32) * freq
    cos, sin = lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))

    def of_dims(even: jax.Array, odd: jax.Array, others: float) -> jax.Array:
        pairs = jnp.stack([even, odd], -1).reshape(even.shape[0], -1)
        pairs = jnp.pad(pairs, ((0, 0), (plain, 0)), constant_values=others)
        return pairs.reshape(even.shape[0], *[1] * (x.ndim - 3), -1)

    x = x.astype(jnp.float32)
    neighbour = x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    return x * of_dims(cos, cos, 1.0) + neighbour * of_dims(-sin, sin, 0.0)


# Experts


def _experts(
    p: Params, x: jax.Array, tokens: jax.Array, cfg: dsv4.DSV4Config, precision: Precision
) -> tuple[jax.Array, jax.Array]:
    """All experts, the shared one too, as one wide layer whose inner values the router weighs, mostly by zero.

    A quarter of it would do, by products of each expert with its own tokens; at this size the sorting costs more.
    """
    count, dtype = cfg.n_routed_experts, precision.dtype
    share, chosen = _route(p, x, tokens, cfg)
    given = precision.of_product(x)
    gate_up, down = p["experts"]["gate_up"], p["experts"]["down"]
    if "shared" in p:
        of_shared = jnp.concatenate([p["shared"]["gate"], p["shared"]["up"]])
        gate_up = jnp.concatenate([gate_up, of_shared.astype(gate_up.dtype)[None]])
        down = jnp.concatenate([down, p["shared"]["down"].astype(down.dtype)[None]])
        share = jnp.concatenate([share, jnp.ones_like(share[..., :1])], -1)
    both = jnp.einsum("btd,eid->btei", given, gate_up.astype(dtype), preferred_element_type=dtype)
    gate, up = jnp.split(both.astype(jnp.float32), 2, -1)
    limit = np.float32(cfg.swiglu_limit)
    inner = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit) * share[..., None]
    inner = precision.of_product(inner)
    out = jnp.einsum("btei,edi->btd", inner, down.astype(dtype), preferred_element_type=dtype)
    return out, chosen.reshape(-1, count).sum(0)


def _route(p: Params, x: jax.Array, tokens: jax.Array, cfg: dsv4.DSV4Config) -> tuple[jax.Array, jax.Array]:
    """Each expert's share of each token, zero where not chosen, and 1 where it is: both [B, T, experts] float32."""
    scores = jnp.sqrt(jax.nn.softplus(_exact_linear(x, p["gate"])))
    if "tid2eid" in p:
        chosen = jax.nn.one_hot(p["tid2eid"][tokens], cfg.n_routed_experts, dtype=jnp.float32).sum(-2)
    else:
        left, chosen = lax.stop_gradient(scores) + p["gate_bias"], jnp.zeros_like(scores)
        for _ in range(cfg.num_experts_per_tok):
            best = jax.nn.one_hot(left.argmax(-1), cfg.n_routed_experts, dtype=jnp.float32)
            chosen, left = chosen + best, jnp.where(best > 0, _HIDDEN, left)
    picked = chosen * scores
    share = picked / (picked.sum(-1, keepdims=True) + np.float32(1e-20)) * np.float32(cfg.routed_scaling_factor)
    return share, chosen


# A plain transformer, for comparison


@dataclasses.dataclass(frozen=True)
class PlainConfig:
    """A transformer of about as many parameters: 23.0 M by default."""

    vocab_size: int = 4096
    hidden_size: int = 512
    layers: int = 6
    heads: int = 8
    inner: int = 1344
    rope_theta: float = 10000.0


def plain_specs(cfg: PlainConfig) -> Params:
    """Returns the parameters' shapes and dtypes, as `param_specs` does."""
    d, matrix = cfg.hidden_size, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = {
        "attn_norm": matrix(d),
        "wq": matrix(d, d),
        "wk": matrix(d, d),
        "wv": matrix(d, d),
        "wo": matrix(d, d),
        "ffn_norm": matrix(d),
        "gate_proj": matrix(cfg.inner, d),
        "up": matrix(cfg.inner, d),
        "down": matrix(d, cfg.inner),
    }
    ends = {"embed": matrix(cfg.vocab_size, d), "norm": matrix(d), "head": matrix(cfg.vocab_size, d)}
    return ends | {"layers": tuple(dict(layer) for _ in range(cfg.layers))}


def plain_draw(cfg: PlainConfig, seed: int = 0) -> Params:
    """Parameters to begin with, float32."""
    rng = np.random.default_rng(seed)

    def one(keys: tuple[Any, ...], spec: jax.ShapeDtypeStruct) -> jax.Array:
        name = keys[-1].key
        if "norm" in name:
            return jnp.ones(spec.shape)
        width = 1.0 if name == "embed" else spec.shape[-1] ** -0.5
        width *= (2 * cfg.layers) ** -0.5 if name in ("wo", "down") else 1.0
        return jnp.asarray(rng.normal(0, width, spec.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(one, plain_specs(cfg))


def plain_losses(cfg: PlainConfig, params: Params, tokens: jax.Array, *, implementation: str | None = None) -> Losses:
    """Computes `losses` of the next token alone, in bfloat16. `implementation`: of `jax.nn.dot_product_attention`."""
    count = tokens.shape[1] - 2
    x = _looked_up(params["embed"].astype(jnp.bfloat16), tokens[:, :count])
    dim = cfg.hidden_size // cfg.heads
    freq = (cfg.rope_theta ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + np.float32(1e-6)) * weight).astype(jnp.bfloat16)

    for p in params["layers"]:
        y = norm(x, p["attn_norm"])
        q, k, v = (_linear(y, p[w]).reshape(*y.shape[:2], cfg.heads, dim) for w in ("wq", "wk", "wv"))
        q, k = (_rotate(z, jnp.arange(count), freq).astype(jnp.bfloat16) for z in (q, k))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)  # type: ignore[arg-type]
        x = x + _linear(y.reshape(x.shape), p["wo"])
        y = norm(x, p["ffn_norm"])
        x = x + _linear(jax.nn.silu(_linear(y, p["gate_proj"])) * _linear(y, p["up"]), p["down"])
    logits = _exact_linear(norm(x, params["norm"]), params["head"])
    loss, none = _cross_entropy(logits, tokens[:, 1:-1]), jnp.float32(0)
    return Losses(loss, loss, none, none, jnp.zeros((1, 1)))
