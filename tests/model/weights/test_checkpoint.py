from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax import AttentionType, DSV4Config, model
from dsv4_jax.errors import CheckpointError, ConfigError
from dsv4_jax.model.weights.safetensors import read_safetensors, write_safetensors

from ..feeding import uncached

SWA, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(layer_types=(SWA, CSA, HCA), num_mtp_layers=1)
EXPERT = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def params():
    return model.init_params(CFG, seed=4)


def test_round_trip_with_the_mtp_layer(params, tmp_path):
    whole = model.init_params(CFG, seed=4, drafts=True)
    model.save_hf(CFG, whole, tmp_path)
    assert_same(model.load_hf(tmp_path, drafts=True)[1], whole)
    assert_same(model.load_hf(tmp_path)[1], params)
    names = {name for name in read_safetensors(tmp_path / "model.safetensors") if "mtp" in name}
    assert names >= {"mtp.0.e_proj.weight", "mtp.0.hc_head_fn", "mtp.0.attn.wq_a.weight", "mtp.0.norm.weight"}
    with pytest.raises(ConfigError, match="num_mtp_layers"):
        model.save_hf(dataclasses.replace(CFG, num_mtp_layers=0), whole, tmp_path)
    with pytest.raises(ConfigError, match="'drafts': expected True or False, got 'yes'"):
        model.load_hf(tmp_path, drafts="yes")


@pytest.fixture
def saved(params, tmp_path):
    """A checkpoint directory, and its tensors to edit and write back."""
    model.save_hf(CFG, params, tmp_path)
    return tmp_path, {name: np.array(x) for name, x in read_safetensors(tmp_path / "model.safetensors").items()}


def rewrite(saved, **changes: np.ndarray | None) -> None:
    path, tensors = saved
    tensors = {name: x for name, x in (tensors | changes).items() if x is not None}
    write_safetensors(path / "model.safetensors", tensors)


def assert_same(a: model.Params, b: model.Params) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_round_trip(params, saved):
    cfg, loaded = model.load_hf(saved[0])
    assert cfg == CFG
    assert_same(loaded, params)


def test_round_trip_bfloat16_and_tied(tmp_path):
    cfg = DSV4Config.tiny(layer_types=(SWA,), tie_word_embeddings=True)
    params = model.init_params(cfg, seed=4, weights=jnp.bfloat16)
    assert "head" not in params
    model.save_hf(cfg, params, tmp_path)
    loaded_cfg, loaded = model.load_hf(tmp_path, weights=jnp.bfloat16)
    assert loaded_cfg == cfg and loaded["embed"].dtype == jnp.bfloat16 and loaded["norm"].dtype == jnp.float32
    assert_same(loaded, params)


def test_shards(params, saved):
    path, tensors = saved
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        write_safetensors(path / file, {name: tensors[name] for name in part})
    (path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(model.load_hf(path)[1], params)
    write_safetensors(path / "b.safetensors", {name: tensors[name] for name in names[3::2]})
    with pytest.raises(CheckpointError, match=f"missing tensor {names[1]}: the index places it in b.safetensors"):
        model.load_hf(path)


def test_published_spelling(params, saved):
    """Per-expert matrices, names without "model.", MTP layers that are skipped."""
    _, tensors = saved
    fused, down = tensors[EXPERT], tensors["model.layers.1.mlp.experts.down_proj"]
    changes: dict[str, np.ndarray | None] = {EXPERT: None, "model.layers.1.mlp.experts.down_proj": None}
    for e, both in enumerate(fused):
        w1, w3 = np.split(both, 2)
        changes |= {
            f"layers.1.ffn.experts.{e}.{name}.weight": w for name, w in (("w1", w1), ("w2", down[e]), ("w3", w3))
        }
    for theirs, module in (
        ("layers.1.attn.wq_a.weight", "model.layers.1.self_attn.q_a_proj.weight"),
        ("layers.1.attn.indexer.compressor.ape", "model.layers.1.self_attn.compressor.indexer.position_bias"),
        ("layers.2.attn.compressor.norm.weight", "model.layers.2.self_attn.compressor.kv_norm.weight"),
        ("layers.2.hc_ffn_base", "model.layers.2.ffn_hc.base"),
        ("head.weight", "lm_head.weight"),
        ("embed.weight", "model.embed_tokens.weight"),
    ):
        changes |= {module: None, theirs: tensors[module]}
    rewrite(saved, **changes, **{"mtp.0.enorm.weight": np.ones(3, np.float32)})
    assert_same(model.load_hf(saved[0])[1], params)


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.float8_e8m0fnu])
def test_fp8_matrices_are_dequantised_by_block(tmp_path, scale_dtype):
    cfg = DSV4Config.tiny(layer_types=(SWA,), hidden_size=160, q_lora_rank=136)
    params = model.init_params(cfg, seed=4)
    model.save_hf(cfg, params, tmp_path)
    tensors = {name: np.array(x) for name, x in read_safetensors(tmp_path / "model.safetensors").items()}
    name = "model.layers.0.self_attn.q_a_proj.weight"
    codes = (tensors[name] * 100).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[0.5, 2.0], [0.25, 8.0]], scale_dtype)
    write_safetensors(tmp_path / "model.safetensors", tensors | {name: codes, f"{name}_scale_inv": scale})
    expected = codes.astype(np.float32)
    expected[:128, :128] *= 0.5
    expected[:128, 128:] *= 2.0
    expected[128:, :128] *= 0.25
    expected[128:, 128:] *= 8.0
    np.testing.assert_array_equal(model.load_hf(tmp_path)[1]["layers"][0]["attn"]["wq_a"], expected)

    write_safetensors(tmp_path / "model.safetensors", tensors | {name: codes})
    with pytest.raises(CheckpointError, match="is e4m3 but has no"):
        model.load_hf(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tensors | {name: codes, f"{name}_scale_inv": scale[:1]})
    with pytest.raises(CheckpointError, match=r"q_a_proj.weight_scale_inv has shape \(1, 2\), expected \(2, 2\)"):
        model.load_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("model.norm.weight", None, "missing tensor norm.weight"),
        (EXPERT, None, "missing tensor layers.1.ffn.experts.0.w1.weight"),
        ("model.norm.weight", np.ones(3, np.float32), r"tensor norm.weight has shape \(3,\), expected \(64,\)"),
        ("model.layers.0.self_attn.q_a_proj.bias", np.ones(3, np.float32), "not part of the model, such as layers.0"),
        ("model.norm.weight", np.ones(64, np.int8), "dtype int8, which this loader cannot dequantise"),
    ],
)
def test_wrong_tensors_are_named(saved, name, tensor, problem):
    rewrite(saved, **{name: tensor})
    with pytest.raises(CheckpointError, match=problem):
        model.load_hf(saved[0])


def test_broken_files_are_named(saved, tmp_path):
    path, _ = saved
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for content, problem in (
        (whole[:100], "truncated header"),
        (whole[:-8], "does not fit the file"),
        (b"\x04" + bytes(7) + b"oops", "the header is not JSON"),
        (b"", "truncated header"),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=problem):
            model.load_hf(path)
    file.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        model.load_hf(path)
    with pytest.raises(ConfigError, match=r"no such config\.json"):
        model.load_hf(path / "nowhere")


def test_save_refuses_foreign_parameters(params, tmp_path):
    with pytest.raises(CheckpointError, match="trees differ"):
        model.save_hf(DSV4Config.tiny(), params, tmp_path)
    with pytest.raises(CheckpointError, match=r"norm: has shape \(3,\), the config says \(64,\)"):
        model.save_hf(CFG, params | {"norm": jnp.ones(3)}, tmp_path)
    for ready in (model.stack_projections(params), model.pack_layers(params)):
        with pytest.raises(CheckpointError, match="packed or stacked: save them as they were before `pack_layers`"):
            model.save_hf(CFG, ready, tmp_path)
    assert not list(tmp_path.iterdir())


def test_transformers_reads_what_we_write(params, saved):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers", "5.10")
    hf = transformers.DeepseekV4ForCausalLM.from_pretrained(
        saved[0], attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tokens = np.arange(50, dtype=np.int32) * 5
    with torch.no_grad():
        theirs = hf(torch.tensor(tokens, dtype=torch.long)[None], use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(uncached(CFG, params, tokens), theirs, rtol=0, atol=1e-4)
