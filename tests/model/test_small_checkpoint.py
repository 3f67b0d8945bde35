"""The trained model of checkpoints/small on real text: peaked distributions, where an error counts as it does in use.

That its logits are those of transformers is in test_hf_equivalence.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import (
    CacheLayout,
    CachePolicy,
    CacheSize,
    DSV4Config,
    KVCacheManager,
    init_cache,
    model,
    ops,
    plan_capacity,
)
from dsv4_jax.config import DSparkHead
from dsv4_jax.engine import Engine, Limits, Prompt
from dsv4_jax.formats.activations import dequantise_rows, quantise_rows
from dsv4_jax.formats.weights import fp4_e4m3
from dsv4_jax.manager import HostSize
from dsv4_jax.model.numerics import matmul
from dsv4_jax.model.sampling import Sampling
from dsv4_jax.model.weights.params import is_leaf
from dsv4_jax.model.weights.quantised import Quantised
from dsv4_jax.ops.moe import gates_and_ups
from dsv4_jax.tiers.remote import RecordTransport
from dsv4_jax.transports import open_engine

from ..clock import PATIENCE
from .feeding import SMALL, SMALL_TEXT, feed, uncached

CFG = DSV4Config.from_hf(SMALL)
# How far from a float32 forward without a cache an implementation may be, in nats a token: the mean loss of the text,
# and KL divergence. What the rounding costs was measured (3e-4 to 7e-4, 4e-4); no kernel may cost four times as much.
EXACT, ROUNDED = (1e-5, 1e-7), (3e-3, 1.5e-3)
ROWS = {"kv_format": "fp8", "index_format": "fp4"}


@pytest.fixture(autouse=True, scope="module")
def compiled_in_a_moment() -> Iterator[None]:
    """What is compiled runs a few times: most of the time would go into making it fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.load_hf(SMALL)[1]


@pytest.fixture(scope="module")
def logits(params: model.Params) -> np.ndarray:
    return np.asarray(uncached(CFG, params, SMALL_TEXT))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(logits.astype(np.float32)), np.float64)


def distance(found: np.ndarray, logits: np.ndarray) -> tuple[float, float]:
    """By how much the loss of the text is greater, and KL divergence: nats a token."""
    ours, theirs = log_softmax(found), log_softmax(logits)
    change = np.take_along_axis((theirs - ours)[:-1], SMALL_TEXT[1:, None], 1).mean()
    return change, (np.exp(theirs) * (theirs - ours)).sum(1).mean()


def assert_as_good(found: np.ndarray, logits: np.ndarray, bounds: tuple[float, float]) -> None:
    change, divergence = distance(found, logits)
    assert abs(change) <= bounds[0] and divergence <= bounds[1], (change, divergence)


def test_it_knows_what_it_reads(logits: np.ndarray) -> None:
    """What makes the other tests mean something: random weights would lose 8.3 nats a token."""
    loss = -np.take_along_axis(log_softmax(logits)[:-1], SMALL_TEXT[1:, None], 1)[:, 0]
    assert SMALL_TEXT.size // CFG.csa_ratio > 2 * CFG.index_topk and loss.mean() < 3 and np.median(loss) < 2


@pytest.mark.slow
def test_through_a_cache_of_float32(params: model.Params, logits: np.ndarray) -> None:
    assert_as_good(feed(CFG, params, SMALL_TEXT, (160,)), logits, EXACT)


@pytest.mark.slow
def test_as_released(logits: np.ndarray) -> None:
    """Weights, rows and index keys."""
    _, released = model.load_hf(SMALL, weights="released", packed=True)
    assert_as_good(feed(CFG, released, SMALL_TEXT, (160,), **ROWS), logits, ROUNDED)


def with_rounded_rows(params: model.Params, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Logits of a float32 model that rounds to e4m3 what goes into products with released weights, and nothing else.

    Its products and its experts are written again, and dense.
    """

    def rounded(x: jax.Array) -> jax.Array:
        return dequantise_rows(*quantise_rows(x))

    def product(x: jax.Array, weight: Quantised, *, groups: int = 1, dtype: Any = None) -> jax.Array:
        rows, matrices = (jnp.split(y, groups, i) for y, i in ((rounded(x), 1), (weight.decode(jnp.float32), 0)))
        each = zip(rows, matrices, strict=True)
        return jnp.concatenate([matmul("tk,nk->tn", part, matrix) for part, matrix in each], 1)

    def experts(x: jax.Array, chosen: jax.Array, share: jax.Array, *tiles: jax.Array, limit: float, **_: Any) -> Any:
        total, x = jnp.zeros(x.shape, jnp.float32), rounded(x)
        for e, packed in enumerate(zip(*tiles, strict=True)):
            both, down = (fp4_e4m3.decode(*fp4_e4m3.unpack(each), jnp.float32) for each in packed)
            gate, up = gates_and_ups(matmul("tk,nk->tn", x, both))
            weight = jnp.where(chosen == e, share, np.float32(0)).sum(1)[:, None]
            gate, up = jnp.minimum(gate, np.float32(limit)), jnp.clip(up, -np.float32(limit), np.float32(limit))
            total += matmul("tk,nk->tn", rounded(jax.nn.silu(gate) * up * weight), down)
        return total

    def wide(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if not is_leaf(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    rooms = {name: importlib.import_module(f"dsv4_jax.model.{name}") for name in ("numerics", "attention", "forward")}
    with monkeypatch.context() as patched:
        patched.setattr(rooms["numerics"], "product", product)
        patched.setattr(rooms["attention"], "product", product)
        patched.setattr(rooms["forward"], "stream_dtype", lambda params: jnp.float32)
        patched.setattr("dsv4_jax.model.moe.to_bfloat16", lambda x: x)
        patched.setattr(ops, "moe_e4m3", experts)
        whole = jax.jit(lambda params: model.forward_uncached.__wrapped__(CFG, params, SMALL_TEXT))
        return np.asarray(whole(jax.tree.map(wide, params, is_leaf=is_leaf)))


@pytest.mark.slow
def test_released_numerics_cost_what_rounding_rows_does(logits: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice the KL divergence of a float32 model whose rows alone are rounded."""
    _, rounding = model.load_hf(SMALL, weights="released", numerics="released")
    _, plain = distance(np.asarray(uncached(CFG, model.load_hf(SMALL, weights="released")[1], SMALL_TEXT)), logits)
    change, divergence = distance(feed(CFG, rounding, SMALL_TEXT, (160,), numerics="released"), logits)
    _, least = distance(with_rounded_rows(rounding, monkeypatch), logits)
    print(f"KL: bfloat16 rows {plain:.2e}, released numerics {divergence:.2e}, rounded rows alone {least:.2e}")
    assert 1e-3 < least < 1e-2 and plain < least / 4
    assert divergence <= 2 * least and abs(change) < 2e-2


@pytest.mark.slow
def test_through_pallas_kernels(params: model.Params, logits: np.ndarray) -> None:
    text = feed(CFG, params, SMALL_TEXT, (160,), implementation="pallas", **ROWS)
    assert_as_good(text, logits, ROUNDED)


@pytest.mark.slow
def test_greedy_text_is_the_same_however_it_is_made() -> None:
    """Where a model knows what comes next nothing hangs on a near tie: not even between executables."""
    _, whole = model.load_hf(SMALL, drafts=True)
    prompts = [SMALL_TEXT[:378].tolist(), SMALL_TEXT[[*range(260), *range(300, 418)]].tolist()]
    found = {}
    for name, options in {"steps": {}, "loops": {"decode_steps": 4}, "drafts": {"drafts": 2}}.items():
        room = {"draft_tokens": 2, "include_drafts": True} if "drafts" in options else {}
        layout = CacheLayout(CFG, **ROWS, **room)
        size = plan_capacity(layout, max_requests=2, max_context=512)
        manager, cache = KVCacheManager(layout, size, policy=CachePolicy()), init_cache(layout, size)
        for again in ("", ", from the cache"):
            text, cache = model.generate(whole, cache, manager, prompts, max_new_tokens=16, **options)
            found[name + again] = text
        assert sum(manager.stats().cache.counters.hit_tokens.values()) >= 2 * 256
    found |= _through_engines(whole, prompts)
    assert [len(text) for text in found["steps"]] == [16, 16]
    assert all(text == found["steps"] for text in found.values()), found


def knowing_pairs(params: model.Params, texts: list[list[int]]) -> tuple[DSV4Config, model.Params]:
    """The same backbone with stages of DSpark that say what followed a token in the texts, the last time that it did.

    So drafts are right now and then: where a text repeats itself, and where a token has one successor.
    """
    spark = DSparkHead(block_size=5, noise_token_id=1, target_layer_ids=(3, 4, 5), markov_rank=64)
    cfg = dataclasses.replace(CFG, num_mtp_layers=0, dspark=spark)
    *stages, last = model.init_params(cfg, 0, drafts=True)["mtp"]
    pairs = {one: other for text in texts for one, other in itertools.pairwise(text)}
    first, second = (np.zeros((CFG.vocab_size, 64), np.float32) for _ in range(2))
    for i, (one, other) in enumerate([*pairs.items()][:64]):
        first[one, i], second[other, i] = 1, 10
    last |= {"norm": jnp.zeros_like(last["norm"]), "markov": {"w1": jnp.asarray(first), "w2": jnp.asarray(second)}}
    return cfg, params | {"mtp": (*stages, last)}


@pytest.mark.slow
def test_text_is_the_same_with_drafts_by_dspark(params: model.Params) -> None:
    """Greedy and sampled, of drafts that are kept in part."""
    prompts = [SMALL_TEXT[:378].tolist(), SMALL_TEXT[[*range(260), *range(300, 418)]].tolist()]

    def written(cfg: DSV4Config, params: model.Params, drafts: int = 0) -> tuple[list[list[int]], int]:
        layout = CacheLayout(cfg, **ROWS, draft_tokens=drafts, include_drafts=drafts > 0)
        size, limits = plan_capacity(layout, max_requests=2, max_context=512), Limits(patience=PATIENCE, lease=PATIENCE)
        chosen = Sampling(), Sampling(0.8, top_p=0.95, seed=5)
        with Engine.of(params, layout, size, drafts=drafts, chunk_tokens=160, limits=limits) as engine:
            asked = [
                engine.add(Prompt(tokens=prompt, max_new_tokens=24, sampling=how))
                for prompt, how in zip(prompts, chosen, strict=True)
            ]
            return [each.result(PATIENCE).tokens for each in asked], engine.stats().counts["steps"]

    expected, steps = written(CFG, params)
    cfg, given = knowing_pairs(params, expected)
    text, fewer = written(cfg, given, 5)
    assert text == expected and [len(each) for each in text] == [24, 24]
    assert 0 < fewer < steps / 1.3, (fewer, steps)


def _through_engines(params: model.Params, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Greedy text of requests that were preempted, of prompts in host memory, and of those that another engine has."""
    layout, limits = CacheLayout(CFG, **ROWS), Limits(patience=PATIENCE, lease=PATIENCE)
    transports = [RecordTransport(open_engine("loopback"), timeout=PATIENCE) for _ in range(2)]

    def engine(size: CacheSize, **options: Any) -> Engine:
        host = HostSize.of(layout, 8, 4)
        return Engine.of(
            params, layout, size, host=host, weights_id="small", chunk_tokens=160, limits=limits, **options
        )

    def answers(one: Engine) -> list[list[int]]:
        asked = [one.add(Prompt(tokens=prompt, max_new_tokens=16)) for prompt in prompts]
        return [each.result(PATIENCE).tokens for each in asked]

    found = {}
    with engine(CacheSize(4, 2, 4)) as small:  # six are needed at the prompts' ends
        found["preempted"] = answers(small)
        assert small.stats().counts["preemptions"] == 1 and small.stats().counts["computed_tokens"] < 800
    size = CacheSize(24, 2, 4, num_snapshots=4)
    here, there = (engine(size, transport=each) for each in transports)
    with transports[0], transports[1], here, there:
        found["two engines"] = answers(here)
        here.sleep()
        here.wakeup()
        before = here.stats().counts["computed_tokens"]
        found["from host memory"] = answers(here)
        assert here.stats().counts["computed_tokens"] - before < 300
        parts, peer = list[bytes](), transports[1].connect(transports[0].published)
        goes_on = [there.add(Prompt(tokens=prompt, max_new_tokens=16, peer=peer)) for prompt in prompts]
        for prompt, taker in zip(prompts, goes_on, strict=True):
            parts.clear()
            assert here.add(Prompt(tokens=prompt, export=parts.append)).result(PATIENCE).finish == "handoff"
            for part in parts:
                there.receive(taker.id, part)
        found["handed off"] = [each.result(PATIENCE).tokens for each in goes_on]
        assert all(each.result().cached >= 256 for each in goes_on)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [160, 1], ids=["prefill", "decode"])
def test_through_cuda_kernels(chunk: int, logits: np.ndarray) -> None:
    _, released = model.load_hf(SMALL, weights="released", packed=True)
    assert_as_good(feed(CFG, released, SMALL_TEXT, (chunk,), **ROWS), logits, ROUNDED)
