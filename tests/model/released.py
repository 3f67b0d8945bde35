"""A checkpoint as the published ones are, written and read without this package's loader: JSON, bytes and NumPy."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from dsv4_jax import AttentionType, DSV4Config

from ..oracle import dense, experts

SWA, CSA, HCA = AttentionType
# Every kind of layer and of routing, in sizes that the released formats have.
CFG = DSV4Config.tiny(
    layer_types=(SWA, CSA, HCA), hidden_size=128, q_lora_rank=128, head_dim=64, rope_dim=16, o_lora_rank=64,
    index_head_dim=32, moe_intermediate_size=128, n_routed_experts=4, num_mtp_layers=1,
)  # fmt: skip

Tensor = tuple[str, np.ndarray]  # as the file names the dtype, and the bits
_BITS = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.int8}


def tensors(cfg: DSV4Config = CFG, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the published names: matrices of about unit gain."""
    rng, out = np.random.default_rng(seed), {}
    hidden, dim, heads, streams = cfg.hidden_size, cfg.head_dim, cfg.num_attention_heads, cfg.hc_mult
    inner = cfg.moe_intermediate_size

    def bf16(x: np.ndarray) -> Tensor:
        return "BF16", x.astype(ml_dtypes.bfloat16).view(np.uint16)

    def plain(name: str, *shape: int) -> None:
        out[name] = bf16(rng.normal(0, shape[-1] ** -0.5, shape))

    def norm(name: str, size: int) -> None:
        out[f"{name}.weight"] = bf16(rng.uniform(0.5, 1.5, size))

    def single(name: str, *shape: int) -> None:
        out[name] = "F32", rng.normal(0, 0.5, shape).astype(np.float32)

    def fp8(name: str, rows: int, columns: int) -> None:
        codes, _ = dense.random_matrix(rng, rows, columns)
        scales = rng.integers(0, 2, (-(-rows // 128), -(-columns // 128)), np.uint8)
        gain = np.sqrt((dense.dequantised(codes, scales + 127) ** 2).sum() / rows)
        out[f"{name}.weight"] = "F8_E4M3", codes
        out[f"{name}.scale"] = "F8_E8M0", scales + np.uint8(127 - round(np.log2(gain)))

    def fp4(name: str, rows: int, columns: int) -> None:
        codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        scales = rng.integers(0, 3, (rows, columns // 32), np.uint8)
        gain = np.sqrt((experts.dequantised(codes, scales + 127) ** 2).sum() / rows)
        out[f"{name}.weight"] = "I8", codes.view(np.int8)
        out[f"{name}.scale"] = "F8_E8M0", scales + np.uint8(127 - round(np.log2(gain)))

    def compressor(name: str, ratio: int, width: int, size: int) -> None:
        plain(f"{name}.wkv.weight", width, hidden)
        plain(f"{name}.wgate.weight", width, hidden)
        single(f"{name}.ape", ratio, width)
        norm(f"{name}.norm", size)

    def head(at: str) -> None:
        norm(f"{at}norm", hidden)
        single(f"{at}hc_head_base", streams)
        single(f"{at}hc_head_scale", 1)
        out[f"{at}hc_head_fn"] = "F32", rng.normal(0, 0.1, (streams, streams * hidden)).astype(np.float32)

    layers = [(f"layers.{i}", attn, i < cfg.num_hash_layers) for i, attn in enumerate(cfg.layer_types)]
    for at, attn, hashed in [*layers, *((f"mtp.{i}", SWA, False) for i in range(cfg.num_draft_layers))]:
        for site in ("attn", "ffn"):
            norm(f"{at}.{site}_norm", hidden)
            weights = (2 + streams) * streams
            out[f"{at}.hc_{site}_fn"] = "F32", rng.normal(0, 0.1, (weights, streams * hidden)).astype(np.float32)
            single(f"{at}.hc_{site}_base", weights)
            single(f"{at}.hc_{site}_scale", 3)
        fp8(f"{at}.attn.wq_a", cfg.q_lora_rank, hidden)
        norm(f"{at}.attn.q_norm", cfg.q_lora_rank)
        fp8(f"{at}.attn.wq_b", heads * dim, cfg.q_lora_rank)
        fp8(f"{at}.attn.wkv", dim, hidden)
        norm(f"{at}.attn.kv_norm", dim)
        single(f"{at}.attn.attn_sink", heads)
        fp8(f"{at}.attn.wo_a", cfg.o_groups * cfg.o_lora_rank, heads * dim // cfg.o_groups)
        fp8(f"{at}.attn.wo_b", hidden, cfg.o_groups * cfg.o_lora_rank)
        if attn is HCA:
            compressor(f"{at}.attn.compressor", cfg.hca_ratio, dim, dim)
        if attn is CSA:
            index = cfg.index_head_dim
            compressor(f"{at}.attn.compressor", cfg.csa_ratio, 2 * dim, dim)
            compressor(f"{at}.attn.indexer.compressor", cfg.csa_ratio, 2 * index, index)
            fp8(f"{at}.attn.indexer.wq_b", cfg.index_n_heads * index, cfg.q_lora_rank)
            plain(f"{at}.attn.indexer.weights_proj.weight", cfg.index_n_heads, hidden)
        plain(f"{at}.ffn.gate.weight", cfg.n_routed_experts, hidden)
        if hashed:
            order = rng.random((cfg.vocab_size, cfg.n_routed_experts)).argsort(1)
            out[f"{at}.ffn.gate.tid2eid"] = "I64", order[:, : cfg.num_experts_per_tok].astype(np.int64)
        else:
            out[f"{at}.ffn.gate.bias"] = "F32", rng.normal(0, 0.1, cfg.n_routed_experts).astype(np.float32)
        sizes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
        for matrix, size in sizes.items():
            fp8(f"{at}.ffn.shared_experts.{matrix}", *size)
            for e in range(cfg.n_routed_experts):
                fp4(f"{at}.ffn.experts.{e}.{matrix}", *size)
    plain("embed.weight", cfg.vocab_size, hidden)
    plain("head.weight", cfg.vocab_size, hidden)
    head("")
    for i in range(cfg.num_mtp_layers):
        for name in ("enorm", "hnorm"):
            norm(f"mtp.{i}.{name}", hidden)
        for name in ("e_proj", "h_proj"):
            fp8(f"mtp.{i}.{name}", hidden, hidden)
        head(f"mtp.{i}.")
    if cfg.dspark is not None:
        targets, rank = len(cfg.dspark.target_layer_ids), cfg.dspark.markov_rank
        fp8("mtp.0.main_proj", hidden, targets * hidden)
        norm("mtp.0.main_norm", hidden)
        head("mtp.2.")
        for table in ("markov_w1", "markov_w2"):
            plain(f"mtp.2.markov_head.{table}.weight", cfg.vocab_size, rank)
        plain("mtp.2.confidence_head.proj.weight", 1, hidden + rank)
    return out


def with_fp8_experts(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As base checkpoints are: the same but for routed experts in FP8, a scale per 128 x 128."""
    rng, changed = np.random.default_rng(1), dict(given)
    for name in given:
        if ".ffn.experts." in name and name.endswith(".weight"):
            rows, columns = given[name][1].shape[0], given[name][1].shape[1] * 2
            changed[name] = "F8_E4M3", dense.random_matrix(rng, rows, columns)[0]
            scales = np.full((-(-rows // 128), -(-columns // 128)), 119, np.uint8)
            changed[f"{name.removesuffix('.weight')}.scale"] = "F8_E8M0", scales
    return changed


def write(path: pathlib.Path, given: Mapping[str, Tensor], cfg: DSV4Config = CFG, shards: int = 1) -> None:
    """The directory: `config.json`, and the tensors in files of equal numbers of them, with their index."""
    fields = cfg.to_hf("bfloat16") | {
        "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    (path / "config.json").write_text(json.dumps(fields))
    names, where = list(given), {}
    for shard in range(shards):
        header, body, file = {}, b"", f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        # Wide elements first: so all are aligned.
        for name in sorted(names[shard::shards], key=lambda name: -given[name][1].itemsize):
            dtype, bits = given[name]
            start, body = len(body), body + np.ascontiguousarray(bits).tobytes()
            header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [start, len(body)]}
            where[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (path / file).write_bytes(len(text).to_bytes(8, "little") + text + body)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def read(path: pathlib.Path) -> dict[str, Tensor]:
    """All tensors of a directory of one file."""
    data = (path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        bits = np.frombuffer(data[start + first : start + last], _BITS[entry["dtype"]])
        out[name] = entry["dtype"], bits.reshape(entry["shape"])
    return out


def dequantised(given: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The parameters by published name, float32 (token tables int64), scales multiplied in."""
    out = {}
    for name, (dtype, bits) in given.items():
        if dtype == "F8_E8M0":
            continue
        scale = given.get(name.removesuffix(".weight") + ".scale", ("", np.zeros(0)))[1]
        match dtype:
            case "BF16":
                out[name] = bits.view(ml_dtypes.bfloat16).astype(np.float32)
            case "F8_E4M3":
                out[name] = dense.dequantised(bits, scale).astype(np.float32)
            case "I8":
                out[name] = experts.dequantised(bits.view(np.uint8), scale).astype(np.float32)
            case _:
                out[name] = bits
    return out


def for_transformers(given: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Those of the backbone under the names of transformers' modules: a state dict of `DeepseekV4ForCausalLM`."""
    flat, out = dequantised({name: x for name, x in given.items() if not name.startswith("mtp.")}), {}
    rules = (
        (r"^embed\.", "embed_tokens."), (r"^hc_head_", "hc_head.hc_"), (r"\.hc_(attn|ffn)_", r".\1_hc."),
        (r"\.attn_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.indexer\.(compressor\.)?", ".attn.compressor.indexer."),
        (r"\.compressor(\.indexer)?\.wkv\.", r".compressor\1.kv_proj."), (r"\.wgate\.", ".gate_proj."),
        (r"\.compressor(\.indexer)?\.norm\.", r".compressor\1.kv_norm."), (r"\.ape$", ".position_bias"),
        (r"\.attn\.attn_sink$", ".attn.sinks"), (r"\.weights_proj\.", ".scorer.weights_proj."),
        (r"\.wq_a\.", ".q_a_proj."), (r"\.q_norm\.", ".q_a_norm."), (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wo_a\.", ".o_a_proj."), (r"\.wo_b\.", ".o_b_proj."), (r"\.attn\.", ".self_attn."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"), (r"\.ffn\.", ".mlp."), (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."),
    )  # fmt: skip
    of_experts: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for name, array in flat.items():
        if found := re.fullmatch(r"(layers\.\d+)\.ffn\.experts\.(\d+)\.(w\d)\.weight", name):
            of_experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = array
            continue
        module = name
        for pattern, to in rules:
            module = re.sub(pattern, to, module)
        out["lm_head.weight" if name == "head.weight" else f"model.{module}"] = array
    for at, each in of_experts.items():
        ordered = [each[e] for e in range(len(each))]
        out[f"model.{at}.mlp.experts.gate_up_proj"] = np.stack([np.concatenate([e["w1"], e["w3"]]) for e in ordered])
        out[f"model.{at}.mlp.experts.down_proj"] = np.stack([e["w2"] for e in ordered])
    return out
