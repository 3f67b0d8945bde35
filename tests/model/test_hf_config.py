"""Every way to spell a field that spellings conflict about: our config is that of transformers, or a refusal."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from dsv4_jax import AttentionType, DSV4Config
from dsv4_jax.config import YarnScaling
from dsv4_jax.errors import ConfigError
from dsv4_jax.ops import rope_frequencies

transformers = pytest.importorskip("transformers", "5.10")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

pytestmark = pytest.mark.every_case  # transformers is there on Python 3.11 alone
SWA, CSA, HCA = AttentionType
ABSENT: Any = ...
COMMON = dict(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=32,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    index_n_heads=16,
    index_head_dim=64,
    index_topk=8,
    compress_ratios=[0, 4, 128, 4],
    max_position_embeddings=1024,
    qk_rope_head_dim=8,
)
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64}
MAIN = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
COMPRESS = MAIN | YARN | {"rope_theta": 70000.0, "attention_factor": 1.0}


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """transformers warns of most of these configs."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def without(rope: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != name}


def agreed(**changes: Any) -> bool:
    """Whether both read this config, after showing that they read it alike or that we refuse it."""
    hf = {name: value for name, value in (COMMON | changes).items() if value is not ABSENT}
    try:
        cfg = DSV4Config.from_hf(copy.deepcopy(hf))
    except ConfigError:
        return False
    theirs = transformers.DeepseekV4Config(**copy.deepcopy(hf))
    rotary = modeling.DeepseekV4RotaryEmbedding(theirs)
    assert (rotary.main_attention_scaling, rotary.compress_attention_scaling) == (1.0, 1.0)
    for kind, inv_freq in ((SWA, rotary.main_inv_freq), (CSA, rotary.compress_inv_freq)):
        np.testing.assert_allclose(rope_frequencies(cfg, kind), inv_freq.numpy(), rtol=2e-6)
    assert tuple(kind.value for kind in cfg.layer_types) == tuple(theirs.layer_types)
    assert (cfg.csa_ratio, cfg.hca_ratio) == tuple(theirs.compress_rates[kind.value] for kind in (CSA, HCA))
    hashed = [i < cfg.num_hash_layers for i in range(cfg.num_layers)]
    assert hashed == [kind == "hash_moe" for kind in theirs.mlp_layer_types]
    assert cfg.num_mtp_layers == theirs.num_nextn_predict_layers
    for field in ("moe_intermediate_size", "n_routed_experts", "scoring_func", "tie_word_embeddings", "hc_mult"):
        assert getattr(cfg, field) == getattr(theirs, field), field
    return True


ROPES = {
    "none": {},
    "flat": {"rope_scaling": YARN},
    "flat default": {"rope_parameters": {"rope_type": "default"}},
    "flat, old key": {"rope_scaling": without(YARN, "rope_type") | {"type": "yarn"}},
    "flat, betas": {"rope_parameters": YARN | {"beta_fast": 8, "beta_slow": 0}},
    "flat, attention 1": {"rope_scaling": YARN | {"attention_factor": 1.0}},
    "flat, main theta": {"rope_scaling": YARN | {"rope_theta": 10000.0}},
    "flat, mscale": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    "two flats": {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 4}},
    "empty old key": {"rope_scaling": {}, "rope_parameters": YARN},
    "nested": {"rope_parameters": {"main": MAIN, "compress": COMPRESS}},
    "nested, old key": {"rope_scaling": {"main": MAIN, "compress": COMPRESS}},
    "nested and leftovers": {"rope_parameters": {"main": MAIN, "compress": COMPRESS, "factor": 2}},
    "nested default": {"rope_parameters": {"main": MAIN, "compress": MAIN}},
    "nested, no main theta": {"rope_parameters": {"main": without(MAIN, "rope_theta"), "compress": COMPRESS}},
}
REFUSED_ROPES = {
    "flat, attention 2": {"rope_scaling": YARN | {"attention_factor": 2.0}},
    "flat, attention null": {"rope_scaling": YARN | {"attention_factor": None}},
    "nested, no attention": {"rope_parameters": {"main": MAIN, "compress": without(COMPRESS, "attention_factor")}},
    "nested, attention 2": {"rope_parameters": {"main": MAIN, "compress": COMPRESS | {"attention_factor": 2.0}}},
    "main yarn": {"rope_parameters": {"main": COMPRESS, "compress": COMPRESS}},
    "main linear": {"rope_parameters": {"main": MAIN | {"rope_type": "linear", "factor": 2}, "compress": COMPRESS}},
    "two shares": {"rope_parameters": {"main": MAIN, "compress": COMPRESS | {"partial_rotary_factor": 0.5}}},
    "only main": {"rope_parameters": {"main": MAIN}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2}},
    "betas turned": {"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 32}},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rope_spellings(rope):
    """With every way to say the rotated dims, and heads for which a share of them is rounded down."""
    ways = itertools.product((ABSENT, 0.25, 0.5), (ABSENT, 8, 16), (32, 49, 64))
    read = [
        agreed(**ROPES[rope], partial_rotary_factor=factor, qk_rope_head_dim=dims, head_dim=head_dim)
        for factor, dims, head_dim in ways
    ]
    assert sum(read) >= 14


@pytest.mark.parametrize("rope", REFUSED_ROPES)
def test_refused_ropes(rope):
    assert not agreed(**REFUSED_ROPES[rope], partial_rotary_factor=0.25)


def test_yarn_ramps():
    """Long and short original contexts, where the ends of the ramp leave the head."""
    read = [
        agreed(
            head_dim=128,
            qk_rope_head_dim=dims,
            compress_rope_theta=theta,
            rope_scaling=YARN | {"factor": factor, "original_max_position_embeddings": context, "beta_fast": fast},
        )
        for dims, theta, factor, context, fast in itertools.product(
            (2, 8, 64), (1.0, 1.5, 50.0, 160000.0), (1, 2.5, 40), (1, 6, 64, 4096, 2**20), (1, 32)
        )
    ]
    assert 60 < sum(read) < len(read)


def test_rates_and_schedules():
    rates = (ABSENT, {CSA.value: 8, HCA.value: 32}, {HCA.value: 16}, {CSA.value: 128, HCA.value: 4})
    kinds = [CSA.value, SWA.value, HCA.value, HCA.value, CSA.value]
    schedules = [{}, {"layer_types": kinds}, {"layer_types": kinds[:4]}, {"compress_ratios": [128, 0, 4, 4, 0, 0]}]
    read = [
        agreed(**schedule, compress_rates=given, compress_rate_csa=csa, compress_rate_hca=hca)
        for given, csa, hca, schedule in itertools.product(rates, (ABSENT, None, 2), (ABSENT, 64), schedules)
        if given is ABSENT or CSA.value in given or csa == 2  # transformers has no default for half a dict
    ]
    assert all(read)
    assert not agreed(layer_types=kinds[:3]) and not agreed(compress_ratios=[0, 4, 128])


@pytest.mark.parametrize("layers", [[1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 7], [1] * 4])
def test_hash_layers(layers):
    kinds = [{0: "moe", 1: "hash_moe"}.get(kind, "no kind") for kind in layers]
    assert agreed(mlp_layer_types=kinds)
    assert agreed(mlp_layer_types=kinds, num_hash_layers=3)
    assert not agreed(mlp_layer_types=kinds[:3])


@pytest.mark.parametrize("count", [ABSENT, None, 0, 2, 4, 50])
def test_number_of_hash_layers(count):
    assert agreed(num_hash_layers=count)


def test_names_that_transformers_lets_override_others():
    assert agreed(intermediate_size=64, num_local_experts=4)
    assert not agreed(intermediate_size=128) and not agreed(num_local_experts=8)


def test_what_neither_computes_is_refused():
    for change in ({"norm_topk_prob": False}, {"n_shared_experts": 2}, {"attention_bias": True}, {"mlp_bias": True}):
        assert not agreed(**change)


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(32, 8), (44, 30), (47, 6), (47, 24), (49, 32), (512, 64)])
@pytest.mark.parametrize("yarn", [None, YarnScaling(original_max_position_embeddings=64)], ids=["plain", "yarn"])
def test_transformers_reads_the_dims_that_we_write(head_dim, rope_dim, yarn):
    cfg = DSV4Config.tiny(head_dim=head_dim, rope_dim=rope_dim, index_head_dim=64, yarn=yarn)
    fields = cfg.to_hf("float32")
    assert DSV4Config.from_hf(fields) == cfg and agreed(**fields)
    assert transformers.DeepseekV4Config(**fields).qk_rope_head_dim == rope_dim
