"""The first thing this package must show: the model over the cache gives the logits of transformers'."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from dsv4_jax import AttentionType, DSV4Config, model

from . import released
from .feeding import SMALL, SMALL_TEXT, feed, text_tokens, uncached

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.10")

pytestmark = pytest.mark.every_case  # torch is there on Python 3.11 alone
torch.set_num_threads(1)  # tensors this small only lose by more
TOLERANCE = 1e-4
S, C, H = (kind.value for kind in (AttentionType.SWA, AttentionType.CSA, AttentionType.HCA))


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny checkpoint: what differs from `COMMON`, its length of text and the chunkings to try."""

    name: str
    length: int
    fields: dict[str, Any]
    ratios: tuple[int, ...] | None = None
    chunkings: tuple[tuple[int, ...], ...] = ((13, 1, 1, 7, 50, 26), (127, 3, 64), (5, 88, 31, 2, 40))


COMMON: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    head_dim=32, partial_rotary_factor=8 / 32, q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=4,
    num_experts_per_tok=2, index_n_heads=16, index_head_dim=16, hc_mult=2, hc_sinkhorn_iters=3,
    num_nextn_predict_layers=0, max_position_embeddings=1024,
    rope_parameters={"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
)  # fmt: skip

CASES = [
    Case(
        "every_kind_hca8", 310,
        dict(layer_types=[S, C, H, C], compress_rates={C: 4, H: 8}, sliding_window=8, index_topk=6,
             mlp_layer_types=["hash_moe", "moe", "moe", "moe"]),
    ),
    Case(
        "published_ratios_hc4", 420,
        dict(compress_ratios=[128, 4, 0, 0], num_hidden_layers=3, sliding_window=32, index_topk=8, hc_mult=4,
             hc_sinkhorn_iters=20, num_nextn_predict_layers=1,
             mlp_layer_types=["hash_moe", "hash_moe", "moe"], o_groups=4),
        ratios=(128, 4, 0, 0),
    ),
    Case(
        "odd_window_hca16", 333,
        dict(layer_types=[C, H, S], num_hidden_layers=3, compress_rates={C: 4, H: 16}, sliding_window=13, index_topk=5,
             index_n_heads=32, scoring_func="sigmoid", routed_scaling_factor=2.5, n_routed_experts=6,
             num_experts_per_tok=3, swiglu_limit=0.5, mlp_layer_types=["moe"] * 3, head_dim=48,
             partial_rotary_factor=16 / 48),
    ),
]  # fmt: skip


def randomise(hf: torch.nn.Module, seed: int) -> None:
    """Random everything: by default transformers leaves norms at one and biases, sinks and tables at zero."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in [*hf.named_parameters(), *hf.named_buffers()]:
            if "inv_freq" in name:
                continue
            if "tid2eid" in name:
                order = torch.rand(p.shape[0], hf.config.n_routed_experts, generator=rng).argsort(1)
                p.copy_(order[:, : p.shape[1]])
            elif "norm" in name or name.endswith("scale"):
                p.uniform_(0.5, 1.5, generator=rng)
            elif "correction_bias" in name:
                p.normal_(0, 0.3, generator=rng)
            elif p.ndim == 1 or "position_bias" in name:
                p.normal_(generator=rng)
            else:
                p.normal_(0, p.shape[-1] ** -0.5, generator=rng)


@dataclasses.dataclass
class Checkpoint:
    case: Case
    hf: torch.nn.Module
    cfg: DSV4Config
    params: model.Params
    tokens: np.ndarray
    logits: np.ndarray


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    """A random checkpoint as transformers saves it, loaded by us, and transformers' logits of some text."""
    case, path = request.param, tmp_path_factory.mktemp(request.param.name)
    config = transformers.DeepseekV4Config(
        **(COMMON | case.fields), attn_implementation="eager", experts_implementation="eager"
    )
    hf = transformers.DeepseekV4ForCausalLM(config).eval()
    randomise(hf, seed=CASES.index(case))
    hf.save_pretrained(path)
    if case.ratios is not None:
        # transformers writes `layer_types`; published checkpoints say the same in `compress_ratios`.
        saved = json.loads((path / "config.json").read_text())
        del saved["layer_types"], saved["compress_rates"]
        (path / "config.json").write_text(json.dumps(saved | {"compress_ratios": case.ratios}))
    cfg, params = model.load_hf(path)
    tokens = text_tokens(case.length)
    return Checkpoint(case, hf, cfg, params, tokens, hf_logits(hf, tokens))


def hf_logits(hf: torch.nn.Module, tokens: np.ndarray, chunks: tuple[int, ...] | None = None) -> np.ndarray:
    """transformers' logits [T, vocab], without a cache or through its own in these chunks."""
    ids = torch.tensor(tokens, dtype=torch.long)[None]
    with torch.no_grad():
        if chunks is None:
            return hf(ids, use_cache=False).logits[0].numpy()
        cache = transformers.DynamicCache(config=hf.config)
        return np.concatenate([hf(part, past_key_values=cache).logits[0].numpy() for part in ids.split(chunks, 1)])


def assert_same_logits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape and np.isfinite(ours).all()
    assert np.abs(theirs).max() > 1, "logits near zero would agree whatever we computed"
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def padded(c: Checkpoint) -> int:
    """One executable serves one shot and all chunks: compiling is most of this test, and padding must not matter."""
    return -(-c.case.length // 16) * 16


def test_checkpoint_passes_many_flushes(checkpoint):
    """What makes the other tests mean something."""
    assert len(checkpoint.tokens) >= 300 and len(checkpoint.tokens) // checkpoint.cfg.hca_ratio >= 3
    assert checkpoint.cfg.index_topk < len(checkpoint.tokens) // checkpoint.cfg.csa_ratio
    assert checkpoint.cfg.index_n_heads >= 16 and checkpoint.cfg.yarn is not None


def test_one_shot_prefill(checkpoint):
    c = checkpoint
    assert_same_logits(feed(c.cfg, c.params, c.tokens, [c.case.length], most=padded(c)), c.logits)


@pytest.mark.parametrize("chunking", range(3))
def test_chunked_prefill(checkpoint, chunking):
    c = checkpoint
    assert_same_logits(feed(c.cfg, c.params, c.tokens, c.case.chunkings[chunking], most=padded(c)), c.logits)


def test_token_by_token_decode(checkpoint):
    c = checkpoint
    assert_same_logits(feed(c.cfg, c.params, c.tokens, [1]), c.logits)


def test_forward_uncached(checkpoint):
    c = checkpoint
    assert_same_logits(np.asarray(uncached(c.cfg, c.params, c.tokens)), c.logits)


@pytest.mark.parametrize("checkpoint", CASES[:1], indirect=True, ids=lambda case: case.name)
def test_transformers_own_cached_decode(checkpoint):
    """Once is enough: this checks the yardstick."""
    c = checkpoint
    cached = hf_logits(c.hf, c.tokens, (200, *[1] * 20, c.case.length - 220))
    assert_same_logits(feed(c.cfg, c.params, c.tokens, [1]), cached)


def test_released_formats(tmp_path):
    """FP8 and FP4 weights under the published names; transformers gets them from a reader that is not ours."""
    cfg, tensors = released.CFG, released.tensors()
    released.write(tmp_path, tensors, shards=3)
    config = transformers.DeepseekV4Config.from_dict(cfg.to_hf("float32"))
    config._attn_implementation = config._experts_implementation = "eager"
    hf = transformers.DeepseekV4ForCausalLM(config).eval()
    state = {name: torch.tensor(np.array(x)) for name, x in released.for_transformers(tensors).items()}
    missing, unexpected = hf.load_state_dict(state, strict=False)
    assert not unexpected and all("inv_freq" in name for name in missing), (missing, unexpected)
    tokens = text_tokens(300)
    assert_same_logits(uncached(cfg, model.load_hf(tmp_path)[1], tokens), hf_logits(hf, tokens))


def test_a_trained_checkpoint(tmp_path):
    """Its weights in a plain dtype, which bfloat16 holds exactly, on real text: there is a choice of entries."""
    cfg, params = model.load_hf(SMALL)
    model.save_hf(dataclasses.replace(cfg, num_mtp_layers=0), params, tmp_path)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = hf_logits(transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, **plain).eval(), SMALL_TEXT)
    assert SMALL_TEXT.size // cfg.csa_ratio > 2 * cfg.index_topk
    ours = np.asarray(uncached(cfg, params, SMALL_TEXT))
    assert_same_logits(ours, theirs)
    assert np.linalg.norm(ours - theirs) <= 5e-6 * np.linalg.norm(theirs)
