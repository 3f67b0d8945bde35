"""Checkpoints in the released formats: loaded, decoded with, saved; against transformers and against plain weights."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config, ffi, init_cache, model
from dsv4_jax.config import DSparkHead
from dsv4_jax.errors import CheckpointError, ConfigError, PerformanceWarning, ShapeError
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.model import numerics
from dsv4_jax.model.released import as_released, is_released
from dsv4_jax.model.weights import loading, packing
from dsv4_jax.model.weights.deferred import Deferred
from dsv4_jax.model.weights.params import is_leaf
from dsv4_jax.model.weights.quantised import Quantised

from .. import released
from ..feeding import V4_WIDTHS, feed, text_tokens, uncached
from ..released import CFG

TENSORS = released.tensors()
decode = jax.jit(lambda weight: weight.decode(jnp.float32))
WQ_A, W1 = "layers.1.attn.wq_a", "layers.2.ffn.experts.3.w1"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("released")
    released.write(path, TENSORS, shards=3)
    return path


@pytest.fixture(scope="module")
def params(checkpoint) -> model.Params:
    return model.load_hf(checkpoint, weights="released", drafts=True)[1]


@pytest.fixture(scope="module")
def plain(checkpoint) -> model.Params:
    return model.load_hf(checkpoint, drafts=True)[1]


def dequantised(params: model.Params) -> model.Params:
    """Plain float32 parameters; gates above ups, as they are in those."""

    def leaf(path, value):
        value = decode(value) if isinstance(value, Quantised) else value
        if "gate_up" in jax.tree_util.keystr(path):
            turns = value.reshape(*value.shape[:-2], -1, 2, 8, value.shape[-1]).swapaxes(-4, -3)
            value = turns.reshape(value.shape)
        return value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_leaf)


def assert_same(a: model.Params, b: model.Params) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_keeps_what_was_written(checkpoint, params, plain) -> None:
    """The bits of the file in the formats of the specs; and dequantised, the same weights twice and from NumPy."""
    specs = model.param_specs(CFG, "released", drafts=True)
    assert jax.tree.structure(params) == jax.tree.structure(specs)
    jax.tree.map(lambda x, spec: (x.shape, x.dtype) == (spec.shape, spec.dtype) or pytest.fail(), params, specs)
    assert sum(x.nbytes for x in jax.tree.leaves(params)) == model.weight_bytes(CFG, drafts=True)
    assert_same(dequantised(params), plain)
    want = released.dequantised(TENSORS)
    np.testing.assert_array_equal(plain["layers"][1]["attn"]["wq_a"], want[f"{WQ_A}.weight"])
    np.testing.assert_array_equal(plain["layers"][2]["ffn"]["experts"]["gate_up"][3, :128], want[f"{W1}.weight"])
    np.testing.assert_array_equal(plain["layers"][0]["ffn"]["tid2eid"], want["layers.0.ffn.gate.tid2eid"])
    (mtp,), names = plain["mtp"], {"e_proj": "e_proj.weight", "hnorm": "hnorm.weight", "norm": "norm.weight"}
    for name, published in names.items():
        np.testing.assert_array_equal(mtp[name], want[f"mtp.0.{published}"])
    np.testing.assert_array_equal(mtp["hc_head"]["fn"], want["mtp.0.hc_head_fn"])
    layer = params["layers"][1]["attn"]
    assert layer["wq_a"].format.name == "fp8" and layer["indexer"]["weights_proj"].dtype == jnp.bfloat16
    assert params["mtp"][0]["h_proj"].format.name == "fp8" and "gate_bias" in params["mtp"][0]["ffn"]


def test_the_mtp_layer_is_skipped_unless_asked_for(checkpoint, params) -> None:
    assert_same(model.load_hf(checkpoint, weights="released")[1], {k: x for k, x in params.items() if k != "mtp"})


def test_read_for_released_numerics(checkpoint, params) -> None:
    """As those that are loaded already are laid out anew, and packed."""
    load = functools.partial(model.load_hf, checkpoint, weights="released", numerics="released", drafts=True)
    want = as_released(params)
    assert_same(load()[1], want)
    packed = load(packed=True)[1]
    assert_same(packed, model.pack_layers(model.stack_projections(want)))
    assert is_released(packed) and not is_released(model.pack_layers(model.stack_projections(params)))
    drawn = model.init_params(CFG, 3, "released", numerics="released", drafts=True)
    assert_same(drawn, as_released(model.init_params(CFG, 3, "released", drafts=True)))


def test_what_cannot_be_widened_is_named_as_it_is_read(tmp_path) -> None:
    cfg = dataclasses.replace(CFG, layer_types=CFG.layer_types[:1], num_mtp_layers=0)
    given = released.tensors(cfg)
    name = "layers.0.ffn.experts.1.w2"
    scales = given[f"{name}.scale"][1].copy()
    scales[5] = scales[5, 0]
    scales[5, 1] -= 20
    given[f"{name}.scale"] = "F8_E8M0", scales
    released.write(tmp_path, given, cfg)
    message = f"tensor {re.escape(name)}.weight: row 5, columns from 0 on: FP4 scales 2\\^20 apart"
    with pytest.warns(PerformanceWarning, match=message) as told:
        _, read = model.load_hf(tmp_path, weights="released", numerics="released")
    assert len(told) == 1
    _, plain = model.load_hf(tmp_path, weights="released")
    down, same = (p["layers"][0]["ffn"]["experts"]["down"] for p in (read, plain))
    np.testing.assert_array_equal(decode(down), decode(same))


@pytest.mark.parametrize("weights", ["float32", jnp.bfloat16])
def test_released_numerics_are_of_released_weights(checkpoint, monkeypatch, weights) -> None:
    monkeypatch.setattr(loading, "open_tensors", lambda *_: pytest.fail("opened"))
    with pytest.raises(ConfigError, match="'numerics': the released ones are of weights as 'released', got"):
        model.load_hf(checkpoint, weights=weights, numerics="released")
    with pytest.raises(ConfigError, match="'numerics': expected 'plain' or 'released', got 'exact'"):
        model.load_hf(checkpoint, weights=weights, numerics="exact")


def test_packed_as_it_is_loaded(checkpoint, params, plain) -> None:
    """What stacking and packing the loaded parameters gives, and progress to the last byte."""
    told: list[tuple[int, int]] = []
    load = functools.partial(model.load_hf, checkpoint, packed=True, drafts=True)
    _, packed = load(weights="released", progress=lambda *bytes_: told.append(bytes_))
    assert_same(packed, model.pack_layers(model.stack_projections(params)))
    total = sum(x.nbytes for x in jax.tree.leaves(packed))
    assert model.weight_bytes(CFG, drafts=True) <= total < 1.02 * model.weight_bytes(CFG, drafts=True) + 2**14
    assert told[-1] == (total, total) and len(told) > 100
    assert all(a[0] < b[0] and b[1] == total for a, b in itertools.pairwise(told))
    assert_same(load()[1], model.pack_layers(model.stack_projections(plain)))


@pytest.mark.slow
def test_computes_as_plain_weights_of_bfloat16(checkpoint, params) -> None:
    """The weights are exact in bfloat16 and rows are rounded to it in both; what is left is the order of sums."""
    tokens, (_, narrow) = text_tokens(60), model.load_hf(checkpoint, weights=jnp.bfloat16)
    want, got = uncached(CFG, narrow, tokens), uncached(CFG, params, tokens)
    assert np.ptp(want) > 1 and np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    _, packed = model.load_hf(checkpoint, weights="released", packed=True)
    through_cache = feed(CFG, packed, tokens, (16,))
    assert np.linalg.norm(through_cache - got) <= 1e-2 * np.linalg.norm(got)


def test_saves_what_was_released(tmp_path, params) -> None:
    model.save_hf(CFG, params, tmp_path)
    found = released.read(tmp_path)
    assert set(found) == set(TENSORS)
    for name in TENSORS:
        (dtype, bits), (want_dtype, want) = found[name], TENSORS[name]
        if "norm" in name:  # held in float32
            np.testing.assert_array_equal(bits, (want.astype(np.uint32) << 16).view(np.float32))
        else:
            assert dtype == want_dtype
            np.testing.assert_array_equal(bits, want)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["expert_dtype"] == "fp4" and fields["quantization_config"]["weight_block_size"] == [128, 128]
    cfg, again = model.load_hf(tmp_path, weights="released", drafts=True)
    assert cfg == CFG
    assert_same(again, params)


def test_random_ones_are_drawn_packed_or_not() -> None:
    params, packed = (model.init_params(CFG, 3, "released", packed=packed, drafts=True) for packed in (False, True))
    assert_same(model.pack_layers(model.stack_projections(params)), packed)
    other = model.init_params(CFG, 3 + 2**32, "released")["layers"][1]
    layer = params["layers"][1]
    for name, weight in (("wq_b", layer["attn"]["wq_b"]), ("down", layer["ffn"]["experts"]["down"])):
        values = np.asarray(decode(weight))
        assert abs(values.std() * values.shape[-1] ** 0.5 - 1) < 0.05, name
    experts = np.asarray(decode(layer["ffn"]["experts"]["down"]))
    assert (experts[0] != experts[1]).mean() > 0.5
    assert (np.asarray(other["attn"]["wq_b"].parts[0]) != np.asarray(layer["attn"]["wq_b"].parts[0])).mean() > 0.5
    table = np.asarray(params["layers"][0]["ffn"]["tid2eid"])
    assert all(len(set(row)) == CFG.num_experts_per_tok for row in table.tolist()) and len(set(table[:, 0])) > 1


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, None])
@pytest.mark.parametrize("weights", ["released", "float32"])
def test_a_seed_has_64_bits(seed, weights: str) -> None:
    with pytest.raises(ConfigError, match=r"seed must be an integer (of at least 0|from 0 to \d+), got"):
        model.init_params(CFG, seed, weights)


def test_bytes_of_the_published_models() -> None:
    """What 16 GiB of rounding would hide: the released sizes without MTP, and with it."""
    for name, sizes in (("flash", [145.3, 148.6]), ("pro", [792.3, 805.3])):
        cfg = getattr(DSV4Config, name)()
        assert [round(model.weight_bytes(cfg, drafts=mtp) / 2**30, 1) for mtp in (False, True)] == sizes


@pytest.mark.parametrize(
    ("fields", "problem", "error"),
    [
        ({"hidden_size": 64}, r"wq_a \[128, 64\]: fp8 weights have rows in 64s and columns in 128s", ShapeError),
        ({"moe_intermediate_size": 96}, r"experts.down \[4, 128, 96\]|fp4 weights have", ShapeError),
        ({"scoring_func": "sigmoid"}, "released weights are for sqrtsoftplus", ConfigError),
    ],
)
def test_models_that_have_no_released_form(fields, problem, error) -> None:
    cfg = DSV4Config(**{**{f: getattr(CFG, f) for f in CFG.__dataclass_fields__}, **fields})
    with pytest.raises(error, match=problem):
        model.init_params(cfg, 0, "released")


def test_stacks_need_whole_blocks_of_scales() -> None:
    cfg = DSV4Config.tiny(
        layer_types=CFG.layer_types[:1],
        hidden_size=128,
        q_lora_rank=64,
        head_dim=64,
        rope_dim=16,
        o_lora_rank=64,
        index_head_dim=32,
        moe_intermediate_size=128,
    )
    with pytest.raises(ShapeError):
        model.init_params(cfg, 0, "released", packed=True)


HOSTILE = [
    ({f"{WQ_A}.scale": None}, "tensor layers.1.attn.wq_a.weight is e4m3 but has no layers.1.attn.wq_a.weight_"),
    ({f"{W1}.scale": None}, "tensor layers.2.ffn.experts.3.w1.weight is e2m1 but has no"),
    ({f"{WQ_A}.scale": ("F8_E8M0", np.full((1, 2), 127, np.uint8))}, r"wq_a.scale has shape \(1, 2\), expected \(1,"),
    ({f"{W1}.scale": ("F8_E8M0", np.full((128, 2), 127, np.uint8))}, r"w1.scale has shape \(128, 2\), expected \(1"),
    ({f"{WQ_A}.scale": ("F8_E8M0", np.full((1, 1), 255, np.uint8))}, "wq_a.scale holds the scale nan, at most 128"),
    ({f"{W1}.scale": ("F8_E8M0", np.full((128, 4), 255, np.uint8))}, "w1.scale holds the scale nan, at most 2 is"),
    ({f"{WQ_A}.scale": ("F8_E8M0", np.full((1, 1), 135, np.uint8))}, "wq_a.scale holds the scale 256.0, at most 128"),
    ({f"{W1}.scale": ("F8_E8M0", np.full((128, 4), 129, np.uint8))}, "w1.scale holds the scale 4.0, at most 2 is"),
    ({f"{WQ_A}.scale": ("F32", np.ones((1, 1), np.float32))}, "wq_a.scale has dtype float32, expected one of float8"),
    ({f"{W1}.scale": ("I8", np.ones((128, 4), np.int8))}, "w1.scale has dtype int8, expected one of float8_e8m0fnu"),
    ({f"{WQ_A}.weight": ("BF16", np.ones((128, 128), np.uint16))}, "wq_a.weight has dtype bfloat16, as released it"),
    ({f"{W1}.weight": ("F8_E4M3", np.ones((128, 128), np.uint8))}, "w1.weight has dtype float8_e4m3fn, as released it"),
    ({f"{WQ_A}.weight": ("F8_E4M3", np.ones((128, 64), np.uint8))}, r"wq_a.weight has shape \(128, 64\), expected"),
    ({f"{W1}.weight": ("I8", np.ones((128, 32), np.int8))}, r"w1.weight has shape \(128, 32\), expected \(128, 64\)"),
    ({f"{W1}.weight": None}, "missing tensor layers.2.ffn.experts.3.w1.weight"),
    ({f"{WQ_A}.weight": None}, "missing tensor layers.1.self_attn.q_a_proj.weight"),
    ({"layers.2.ffn.experts.4.w1.weight": ("I8", np.ones((128, 64), np.int8))}, "1 tensors are not part of the model"),
    ({"mtp.0.e_proj.weight": None}, "missing tensor mtp.0.e_proj.weight$"),
    ({"mtp.0.h_proj.scale": None}, "tensor mtp.0.h_proj.weight is e4m3 but has no"),
    ({"mtp.0.ffn.experts.1.w2.weight": None}, "missing tensor mtp.0.ffn.experts.1.w2.weight"),
    ({"mtp.0.emb.weight": ("F32", np.ones(128, np.float32))}, "not part of the model, such as mtp.0.emb.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "problem"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_tensors(tmp_path, monkeypatch, changes, problem) -> None:
    """Refused before a parameter is made."""
    monkeypatch.setattr("dsv4_jax.model.weights.deferred._made", lambda *_: pytest.fail("made a parameter"))
    released.write(tmp_path, {name: x for name, x in (TENSORS | changes).items() if x is not None})
    with pytest.raises(CheckpointError, match=problem) as error:
        model.load_hf(tmp_path, weights="released", packed=True, drafts=True)
    assert str(error.value).isprintable()


STAGES = {
    "mtp.0.main_proj.weight": ("F8_E4M3", np.zeros((128, 384), np.uint8)),
    "mtp.0.main_proj.scale": ("F8_E8M0", np.full((1, 3), 127, np.uint8)),
    "mtp.1.attn.attn_sink": ("F32", np.ones(4, np.float32)),
    "mtp.2.markov_head.markov_w1.weight": ("BF16", np.ones((8, 2), np.uint16)),
}
OTHERS = {
    "experts": (
        {},
        {},
        r"routed experts are FP8 \(e4m3, a scale per 128 x 128\).*released.*FP4.*bfloat16 or float32",
    ),
    "several": ({"num_nextn_predict_layers": 3}, STAGES, "'num_mtp_layers': a model drafts with one MTP layer"),
    "stages": ({}, STAGES, r"draft head has 3 stages.*config says nothing \(dspark_\*\).*without drafts"),
    "embedding": (
        {},
        {"mtp.0.emb.tok_emb.weight": ("BF16", np.ones((4, 128), np.uint16))},
        r"MTP layer has an embedding and a head of its own \(mtp.0.emb.tok_emb.weight\).*without drafts",
    ),
    "head": (
        {},
        {"mtp.0.head.weight": ("BF16", np.ones((4, 128), np.uint16))},
        r"of its own \(mtp.0.head.weight\)",
    ),
}


def test_other_checkpoints_are_named_before_weights_are_read(tmp_path, monkeypatch) -> None:
    """What they are, and with what they run; they do run with that."""
    plain = {}
    for case, (fields, changes, problem) in OTHERS.items():
        path = tmp_path / case
        path.mkdir()
        released.write(path, released.with_fp8_experts(TENSORS) if case == "experts" else TENSORS | changes)
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        with monkeypatch.context() as nothing, pytest.raises((CheckpointError, ConfigError), match=problem) as error:
            nothing.setattr("dsv4_jax.model.weights.deferred._made", lambda *_: pytest.fail("made a parameter"))
            model.load_hf(path, weights="released", drafts=case != "experts")
        assert str(error.value).isprintable()
        if case != "head":
            plain[case] = model.load_hf(path, weights="released" if case != "experts" else jnp.float32)[1]
    want = released.dequantised(released.with_fp8_experts(TENSORS))
    np.testing.assert_array_equal(
        plain["experts"]["layers"][2]["ffn"]["experts"]["gate_up"][3, :128], want[f"{W1}.weight"]
    )
    for case in ("stages", "embedding"):
        assert_same(plain[case], plain["several"])


# DSpark: three stages, of which the first and the last have more.
SPARKS = dataclasses.replace(CFG, num_mtp_layers=0, dspark=DSparkHead(4, 7, (0, 2), 32))
OF_STAGES = released.tensors(SPARKS)


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("stages")
    released.write(path, OF_STAGES, SPARKS)
    return path


def test_stages_keep_what_was_written(stages, tmp_path) -> None:
    """In every form; the bits of the file, there and back; and skipped where they are not asked for."""
    cfg, params = model.load_hf(stages, weights="released", drafts=True)
    assert cfg == SPARKS and len(params["mtp"]) == 3
    assert sum(x.nbytes for x in jax.tree.leaves(params)) == model.weight_bytes(cfg, drafts=True)
    want, (first, _, last) = released.dequantised(OF_STAGES), dequantised(params)["mtp"]
    np.testing.assert_array_equal(first["main_proj"], want["mtp.0.main_proj.weight"])
    np.testing.assert_array_equal(first["main_norm"], want["mtp.0.main_norm.weight"])
    np.testing.assert_array_equal(last["markov"]["w2"], want["mtp.2.markov_head.markov_w2.weight"])
    np.testing.assert_array_equal(last["confidence"], want["mtp.2.confidence_head.proj.weight"])
    np.testing.assert_array_equal(last["hc_head"]["fn"], want["mtp.2.hc_head_fn"])
    assert first["main_proj"].shape == (128, 256) and params["mtp"][0]["main_proj"].format.name == "fp8"
    assert_same(model.load_hf(stages, drafts=True)[1], dequantised(params))
    packed = model.pack_layers(model.stack_projections(params))
    assert_same(model.load_hf(stages, weights="released", drafts=True, packed=True)[1], packed)
    total = sum(x.nbytes for x in jax.tree.leaves(packed))
    assert total == model.device_bytes(cfg, drafts=True)
    backbone = {name: x for name, x in params.items() if name != "mtp"}
    assert_same(model.load_hf(stages, weights="released")[1], backbone)
    model.save_hf(cfg, params, tmp_path)
    found = released.read(tmp_path)
    assert set(found) == set(OF_STAGES)
    for name in OF_STAGES:
        if "norm" not in name:
            np.testing.assert_array_equal(found[name][1], OF_STAGES[name][1])
    again, loaded = model.load_hf(tmp_path, weights="released", drafts=True)
    assert again == cfg
    assert_same(loaded, params)
    drawn = (model.init_params(cfg, 3, "released", drafts=mtp) for mtp in (True, False))
    with_stages, without = drawn
    assert jax.tree.structure(with_stages) == jax.tree.structure(params)
    assert_same({name: x for name, x in with_stages.items() if name != "mtp"}, without)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mtp.0.main_proj.scale": None}, "mtp.0.main_proj.weight is e4m3 but has no"),
        ({"mtp.0.main_norm.weight": None}, "missing tensor mtp.0.main_norm.weight$"),
        ({"mtp.1.ffn.shared_experts.w2.weight": None}, r"missing tensor mtp.1.*\(or ffn.shared_experts.w2.weight\)"),
        ({"mtp.2.confidence_head.proj.weight": ("BF16", np.ones((1, 128), np.uint16))}, r"expected \(1, 160\)"),
        ({"mtp.0.e_proj.weight": ("BF16", np.ones((1, 1), np.uint16))}, "not part of the model, such as mtp.0.e_proj"),
        ({"mtp.3.attn_norm.weight": ("F32", np.ones(128, np.float32))}, "not part of the model, such as mtp.3.attn_n"),
    ],
)
def test_hostile_stages(tmp_path, changes, problem) -> None:
    released.write(tmp_path, {name: x for name, x in (OF_STAGES | changes).items() if x is not None}, SPARKS)
    with pytest.raises(CheckpointError, match=problem):
        model.load_hf(tmp_path, weights="released", drafts=True)


def test_a_bias_of_images_is_not_read(stages, tmp_path) -> None:
    more = {"mtp.1.ffn.gate.bias_vl": ("F32", np.ones(4, np.float32))}
    released.write(tmp_path, OF_STAGES | more, SPARKS)
    assert_same(*(model.load_hf(path, weights="released", drafts=True)[1] for path in (stages, tmp_path)))


def test_bytes_of_the_published_stages() -> None:
    """Gigabytes beside the backbone's, as the shapes of their files have them."""
    for name, ids, rank, wide in (("flash", (40, 41, 42), 256, 10.86), ("pro", (58, 59, 60), 512, 41.98)):
        cfg = dataclasses.replace(
            getattr(DSV4Config, name)(), num_mtp_layers=0, dspark=DSparkHead(5, 128799, ids, rank)
        )
        more = model.weight_bytes(cfg, drafts=True) - model.weight_bytes(cfg)
        assert round(more / 1e9, 2) == pytest.approx(wide, abs=0.011)


def test_codes_that_are_nan(tmp_path) -> None:
    codes = TENSORS[f"{WQ_A}.weight"][1].copy()
    codes[5, 7] = 0xFF
    released.write(tmp_path, TENSORS | {f"{WQ_A}.weight": ("F8_E4M3", codes)})
    for options in (dict(weights="released"), dict(weights="released", packed=True), {}):
        with pytest.raises(CheckpointError, match=f"tensor {WQ_A}.weight holds a NaN"):
            model.load_hf(tmp_path, **options)


def test_truncated(checkpoint, tmp_path) -> None:
    for file in checkpoint.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:-64] if "00002" in file.name else data)
    with pytest.raises(CheckpointError, match="does not fit the file"):
        model.load_hf(tmp_path, weights="released")


def test_the_host_holds_a_few_tensors(tmp_path) -> None:
    """Of a file of 10 MB, whose largest tensor has 0.3 MB, one MB at most is ever in the host's own memory."""
    cfg = dataclasses.replace(
        CFG, layer_types=CFG.layer_types[:1], hidden_size=512, moe_intermediate_size=512, n_routed_experts=24
    )
    released.write(tmp_path, released.tensors(cfg), cfg)
    load = functools.partial(model.load_hf, tmp_path, weights="released", packed=True)
    _, first = load()  # compiles
    assert sum(x.nbytes for x in jax.tree.leaves(first)) > 10 * 2**20
    tracemalloc.start()
    try:
        _, again = load()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert_same(again, first)


def test_many_rows_are_tiles_of_few(monkeypatch) -> None:
    """Each row's bits are those of a call of as many rows as a tile has."""
    weight = model.init_params(CFG, 0, "released")["layers"][0]["attn"]["wq_b"]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((37, 128)), jnp.float32)
    monkeypatch.setattr(numerics, "MAX_ROWS", 16)
    run = jax.jit(functools.partial(numerics.product, weight=weight))
    got, alone = np.asarray(run(x)), np.asarray(run(jnp.concatenate([x[20:21], -x[:15]])))
    np.testing.assert_array_equal(got[20], alone[0])
    want = np.asarray(x.astype(jnp.bfloat16)).astype(np.float64) @ np.asarray(decode(weight)).astype(np.float64).T
    assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


def deferred(cfg: DSV4Config, weights: str) -> model.Params:
    """Parameters of which only shapes are known, in the form to decode with."""
    made = jax.tree.map(lambda x: Deferred(x.shape, x.dtype, ()), model.param_specs(cfg, weights, drafts=True))
    return model.pack_layers(model.stack_projections(made))


@pytest.mark.parametrize("weights", ["released", "bfloat16"])
@pytest.mark.parametrize("cfg", [CFG, DSV4Config.flash(), DSV4Config.pro()], ids=["tiny", "flash", "pro"])
def test_parameters_of_a_pack_begin_where_kernels_can_load(cfg, weights) -> None:
    """Hyper-connections have 27 numbers in all: behind them norms began at odd addresses, and kernels faulted."""
    params = deferred(cfg, weights)
    for layers, place in ((x, place) for x in (params["layers"], params["mtp"]) for of in x.places for place in of):
        array = layers.arrays[place.array]
        row_bytes = array.nbytes // array.shape[0]
        assert place.start * row_bytes % packing.ALIGNMENT == 0, (place, array.shape)
        assert place.start + place.rows <= array.shape[0] and place.rows * row_bytes >= np.prod(place.shape)


def test_decode_steps_on_a_gpu_call_the_kernels(monkeypatch) -> None:
    """Lowered for one: a layer has six dense products, one router, and its experts in one call."""
    cfg = dataclasses.replace(
        CFG,
        **V4_WIDTHS,
        hidden_size=256,
        moe_intermediate_size=256,
    )
    monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: None)
    monkeypatch.setattr(ffi, "cuda_target", lambda op, target: target)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), deferred(cfg, "released"))
    layout, size = CacheLayout(cfg), CacheSize(3, 3, 1)
    rows = [StepSequence(slot, 5, 1) for slot in (1, 2, 3)]
    plan = build_plan(layout, rows, shape_for(layout, rows), size=size).pack()
    step = jax.jit(model.decode_step).trace(params, init_cache(layout, size), plan, np.zeros(3, np.int32))
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    calls = collections.Counter(re.findall(r"@(dsv4_\w+)\(", text))
    sequences = re.findall(r'targets = "([^"]*)"', text)
    calls.update(name for names in sequences for name in names.split(";"))
    assert {name: calls[f"dsv4_{name}"] for name in ("dense_fp8", "moe", "route")} == dict(
        dense_fp8=6 * 3, moe=3, route=3
    )
    joined = "|".join(sequences)
    assert joined.count("dsv4_attend;dsv4_dense_fp8;dsv4_dense_fp8") == 3
    queries = "dsv4_dense_fp8;(dsv4_dense_stream;)?dsv4_normalise;dsv4_dense_fp8;dsv4_finish_queries"
    assert len(re.findall(queries, joined)) == 3
