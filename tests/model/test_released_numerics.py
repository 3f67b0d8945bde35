"""The released numerics of a model: products, experts and streams against fake-quantised ones of the same inputs."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import AttentionType, CacheLayout, DSV4Config, init_cache, model, testing
from dsv4_jax.engine import Completion, Engine, EngineStats, Prompt
from dsv4_jax.errors import PerformanceWarning
from dsv4_jax.formats.weights import WEIGHT_FORMATS, fp4
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model.moe import moe
from dsv4_jax.model.numerics import linear, product
from dsv4_jax.model.released import as_released, is_released
from dsv4_jax.model.uncached import forward_uncached
from dsv4_jax.model.weights.params import param_specs
from dsv4_jax.model.weights.placement import device_specs
from dsv4_jax.model.weights.quantised import Quantised
from dsv4_jax.ops import registry
from dsv4_jax.ops.hyper_connection import Written, connection_vector, hyper_connection
from dsv4_jax.ops.rounded_rows import RoundedRows
from dsv4_jax.testing.live import Held, live_bytes

from ..oracle import dense, released
from .feeding import V4_WIDTHS, text_tokens
from .released import CFG


@pytest.fixture(scope="module")
def both() -> tuple[model.Params, model.Params]:
    params = model.init_params(CFG, 0, "released")
    return params, as_released(params)


def rows(columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return released.bf16(rng.standard_normal((5, columns)) * np.exp2(rng.integers(-4, 4, (5, 1))))


def near(got: np.ndarray, want: np.ndarray, limit: float) -> bool:
    return bool(np.linalg.norm(np.asarray(got, np.float64) - want) <= limit * np.linalg.norm(want))


def test_holds_the_same_weights(both) -> None:
    plain, params = both
    assert is_released(params) and not is_released(plain)
    for name in ("wq_a", "wo_a", "wo_b"):
        a, b = (p["layers"][1]["attn"][name] for p in both)
        np.testing.assert_array_equal(a.decode(), b.decode())
    a, b = (p["layers"][1]["ffn"]["experts"]["gate_up"] for p in both)
    np.testing.assert_array_equal(a.decode(), b.decode())
    assert plain["layers"][0]["attn"]["wkv"].format.rows == "bf16"


def test_what_cannot_be_widened_is_named() -> None:
    codes, scales = fp4.encode(jax.random.normal(jax.random.key(0), (3, 64, 256)))
    scales = scales.at[2, 7, 5].set(scales[2, 7, 4] - 20)
    codes = codes.at[2, 7].set(0x11)
    scales = scales.at[2, 7, 6:].set(scales[2, 7, 4])
    down = Quantised(fp4.pack(codes, scales), WEIGHT_FORMATS["fp4"])
    message = r"\['layers'\]\[0\]\['down'\]: matrix \[2\], row 7, columns from 128 on: FP4 scales 2\^20 apart"
    with pytest.warns(PerformanceWarning, match=message):
        got = as_released({"layers": [{"down": down}]})["layers"][0]["down"]
    np.testing.assert_array_equal(got.decode(), down.decode())


def test_products_are_fake_quantised(both) -> None:
    """Below 3e-4 beside one bfloat16 rounding, where the plain numerics are 2.6e-2 away."""
    weight = both[1]["layers"][0]["attn"]["wq_a"]
    x, matrix = rows(weight.shape[1]), np.asarray(weight.decode(), np.float64)
    want = released.bf16(dense.product(released.rounded(x), matrix))
    got = np.asarray(linear(jnp.asarray(x, jnp.float32), weight))
    assert near(got, want, 3e-4) and np.array_equal(got, released.bf16(got))
    plain = np.asarray(linear(jnp.asarray(x, jnp.float32), both[0]["layers"][0]["attn"]["wq_a"]))
    assert not near(plain, want, 1e-2) and near(plain, want, 5e-2)


def test_experts_are_fake_quantised(both) -> None:
    """With the routes and shares of the plain model, which the rounding of rows does not move."""
    p = both[1]["layers"][2]["ffn"]
    x, tokens = jnp.asarray(rows(CFG.hidden_size, 1), jnp.bfloat16), jnp.arange(5, dtype=jnp.int32)
    (plain,), (got,) = ((sum(out),) for out in (moe(q["layers"][2]["ffn"], x, tokens, CFG)[0] for q in both))
    got = np.asarray(got)
    np.testing.assert_array_equal(got, released.bf16(got))
    shared = {name: np.asarray(p["shared"][name].decode(), np.float64) for name in ("gate", "up", "down")}
    codes = released.rounded(np.asarray(x, np.float64))
    hidden = released.swiglu(codes @ shared["gate"].T, codes @ shared["up"].T, CFG.swiglu_limit)
    routed = dict(p)
    del routed["shared"]
    (of_routed,), _ = moe(routed, x, tokens, CFG)
    want = released.bf16(np.asarray(of_routed, np.float64) + released.bf16(hidden @ shared["down"].T))
    assert near(got, want, 2e-3) and not near(plain, want, 5e-3)


def test_streams_are_bfloat16() -> None:
    rng, n, width = np.random.default_rng(2), 2, 64
    streams = jnp.asarray(rng.standard_normal((3, n, width)), jnp.bfloat16)
    fn = jnp.asarray(rng.standard_normal(((2 + n) * n, n * width)) * 0.05, jnp.float32)
    vector = connection_vector(jnp.ones(width), jnp.zeros((2 + n) * n), jnp.ones(3))
    output = jnp.asarray(rng.standard_normal((3, width)), jnp.bfloat16)
    back = tuple(jnp.asarray(rng.random(s), jnp.float32) for s in ((3, n), (3, n, n)))

    def run(streams: jax.Array, output: jax.Array | None) -> tuple[jax.Array, ...]:
        written = None if output is None else Written((output,), *back)
        return hyper_connection(streams, fn, vector, written, iterations=3, hc_eps=1e-6, eps=1e-6)

    x, new, post, comb = run(streams, output)
    wide = np.asarray(run(streams.astype(jnp.float32), output.astype(jnp.float32))[1])
    assert new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(new, np.float64), released.bf16(wide))
    for got, want in zip((post, comb), run(new.astype(jnp.float32), None)[2:], strict=True):  # of the rounded streams
        np.testing.assert_array_equal(got, want)
    assert not np.array_equal(x, run(new.astype(jnp.float32), None)[0])  # the mix is rounded before its norm


def test_a_whole_model_runs(both) -> None:
    tokens = jnp.arange(24, dtype=jnp.int32) % CFG.vocab_size
    plain, got = (np.asarray(forward_uncached(CFG, params, tokens)) for params in both)
    assert np.isfinite(got).all() and not near(got, plain, 1e-3)


def test_products_depend_on_no_number_of_rows(both) -> None:
    """Each number of rows is an executable of its own."""
    p = both[1]["layers"][1]
    x, tokens = jnp.asarray(np.tile(rows(CFG.hidden_size, 4), (8, 1))[:33]), jnp.arange(33, dtype=jnp.int32)
    of_heads = jnp.asarray(np.tile(rows(CFG.num_attention_heads * CFG.head_dim, 5), (8, 1))[:33])
    dense_ = jax.jit(lambda x: linear(x, p["attn"]["wq_a"]))
    grouped = jax.jit(lambda x: product(x, p["attn"]["wo_a"], groups=CFG.o_groups))
    experts = jax.jit(lambda x, tokens: moe(p["ffn"], x, tokens, CFG)[0])
    for run, args in ((dense_, (x,)), (grouped, (of_heads,)), (experts, (x, tokens))):
        (whole,) = jax.tree.leaves(run(*args))
        for first, size in ((0, 1), (7, 2), (16, 8), (3, 9), (0, 17)):
            (part,) = jax.tree.leaves(run(*(arg[first : first + size] for arg in args)))
            np.testing.assert_array_equal(part, whole[first : first + size])


@pytest.mark.slow
def test_chunks_neighbours_hits_and_preemption_change_no_bit() -> None:
    cfg = dataclasses.replace(
        CFG, hca_ratio=8, sliding_window=6, num_mtp_layers=0, index_topk=3, max_position_embeddings=64, vocab_size=64
    )
    params, rng = as_released(model.init_params(cfg, 0, "released")), np.random.default_rng(0)
    layout = CacheLayout(cfg, block_tokens=8, numerics="released")
    runner = testing.StepRunner(model.forward, params, layout)
    prompts = [rng.integers(0, cfg.vocab_size, n).tolist() for n in (37, 21, 5)]
    testing.assert_chunking_invariant(runner, prompts[0])
    testing.assert_batch_invariant(runner, prompts)
    seen = testing.assert_serving_invariant(runner, mixes=2)
    assert seen["preemptions"] and seen["hits on the device"] and seen["comparisons"] > 5
    assert runner.executables == 1


SWA, CSA, HCA = AttentionType
# Widths that kernels whose bits are promised have.
GPU_CFG = dataclasses.replace(
    DSV4Config.tiny(layer_types=(SWA, SWA, CSA, HCA)),
    **V4_WIDTHS,
    hidden_size=4096,
    hc_mult=4,
    q_lora_rank=128,
    o_lora_rank=128,
    index_topk=32,
    moe_intermediate_size=256,
    n_routed_experts=16,
    num_experts_per_tok=6,
    num_mtp_layers=0,
)
Seen = dict[str, np.ndarray]  # what an op gave of each token, by its layer and name


def rounded(x: Any) -> bool:
    return isinstance(x, RoundedRows)


def tapped_forward(params: model.Params, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A jitted `forward` that also gives what each op made of the step's tokens, in the order of the ops."""
    pick = registry.pick

    def run(
        params: model.Params, cache: Any, plan: Any, tokens: jax.Array
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        taps, counts, layer = OrderedDict[str, jax.Array](), defaultdict[str, int](int), -1

        def picked(op: str, *args: Any) -> registry.Implementation:
            found = pick(op, *args)

            def call(arguments: Any) -> Any:
                nonlocal layer
                layer += op == "hyper_connection" and counts[op] % 2 == 0
                counts[op] += 1
                result = found.call(arguments)
                # Of attend nobody reads the others; rounded rows come from steps of many tokens alone.
                results = jax.tree.leaves(result, is_leaf=rounded)[: 1 if op == "attend" else None]
                # Pools are compared apart. Where entries lie (entry_rows) is said for as many as the step's table has.
                for i, x in enumerate(() if op in ("append", "compress", "entry_rows") else results):
                    if not rounded(x) and x.ndim and x.shape[0] == tokens.shape[0]:
                        taps[f"layer {layer}: {op}, call {counts[op]} of the step, result {i}"] = x
                return result

            return dataclasses.replace(found, name="cuda", call=call)  # so that a reference is not jitted apart

        with monkeypatch.context() as patched:
            patched.setattr(registry, "pick", picked)
            patched.setattr(
                importlib.import_module(model.forward.__module__), "joined", lambda function, rows: function
            )
            logits, cache = model.forward(params, cache, plan, tokens)
        return logits, cache, taps

    return jax.jit(run, donate_argnums=1)


def fed(params: model.Params, layout: CacheLayout, chunks: Sequence[int], forward: Any) -> tuple[np.ndarray, Any, Seen]:
    """Logits of all tokens, what their next one sees of the cache, and what the ops made of them."""
    columns = layout.blocks_for(sum(chunks) + 1)
    size = CacheSize(columns + 1, 2, columns)
    cache, manager = init_cache(layout, size), KVCacheManager(layout, size)
    request = manager.admit_request(
        np.resize(text_tokens(300), sum(chunks)).tolist(), max_tokens=columns * layout.block_tokens
    )
    logits, seen = list[np.ndarray](), defaultdict[str, list[np.ndarray]](list)
    for count in chunks:
        plan = manager.plan_step([(request, count)], shape=manager.pinned_shape(1, count, history=count > 1))
        got, cache, taps = forward(params, cache, plan.pack(), manager.plan_tokens(plan))
        logits.append(np.asarray(got))
        for name, x in taps.items():
            seen[name].append(np.asarray(x))
    whole = {name: np.concatenate(parts) for name, parts in seen.items()}
    return np.concatenate(logits), live_bytes(cache, Held.of(request)), whole


def first_difference(one: Seen, other: Seen) -> str:
    """The first op, in the order of the step, that gave a token other bits."""
    for name, x in one.items():
        y = other.get(name)
        if y is None or x.shape != y.shape:
            continue  # of a kind of step
        bits = x.view(np.uint8).reshape(len(x), -1) != np.ascontiguousarray(y).view(np.uint8).reshape(len(x), -1)
        if bits.any():
            return f"{name}: {bits.any(1).sum()} of {len(x)} tokens differ, the first is {bits.any(1).argmax()}"
    return "no op"


@pytest.mark.gpu
def test_bits_depend_on_no_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in one step, and in chunks and single tokens: steps of three numbers of rows."""
    params, layout = as_released(model.init_params(GPU_CFG, 2, "released")), CacheLayout(GPU_CFG, numerics="released")
    forward = tapped_forward(params, layout, monkeypatch)
    logits, cache, ops = fed(params, layout, [560], forward)
    others, other_cache, other_ops = fed(params, layout, [64] * 8 + [1] * 48, forward)
    assert np.isfinite(logits).all() and np.ptp(logits) > 0.1
    different = (logits != others).sum()
    stored = {
        pool: sum(
            int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(parts, other_cache[pool], strict=True)
        )
        for pool, parts in cache.items()
    }
    where = first_difference(ops, other_ops)
    said = f"{different} of {logits.size} logits and {stored} cache bytes differ; the first: {where}"
    print(f"{said}; {len(ops)} results of ops were compared")
    assert different == 0 and not any(stored.values()) and where == "no op", said


def of_one_device(params: model.Params) -> model.Params:
    """What is on one device as `shard_params` puts it on several: a stack of matrices may have another kernel than each
    of them has, whose sums have another order."""
    return model.pack_layers(model.stack_projections(params))


def served_and_scored(
    cfg: DSV4Config, *, requests: int, longest: int, drafts: int, mesh: jax.sharding.Mesh | None
) -> tuple[list[Completion], list[np.ndarray], EngineStats]:
    """Answers to random prompts, many of which share beginnings, in an engine with room for few of them; and the
    log-probabilities that another engine, of one device and of other steps, gives the same texts in one pass each.
    """
    params = as_released(model.init_params(cfg, 3, "released", drafts=drafts > 0))
    drafting = dict(draft_tokens=drafts, include_drafts=drafts > 0)
    layout, rng = CacheLayout(cfg, block_tokens=128, numerics="released", **drafting), np.random.default_rng(drafts)
    beginnings = [rng.integers(0, cfg.vocab_size, longest).tolist() for _ in range(8)]
    prompts = [
        Prompt(
            tokens=[*beginnings[i // 8][: rng.integers(longest // 2, longest)], i, 1],
            max_new_tokens=int(rng.integers(2, longest // 2)),
            sampling=model.Sampling(temperature=float(i % 2), seed=i),
            logprobs=0,
        )
        for i in range(requests)
    ]
    columns = layout.blocks_for(longest + longest // 2 + 8)
    size = CacheSize(columns + 3, 6, columns, num_snapshots=4)
    split = {} if mesh is None else dict(mesh=mesh)
    alone = of_one_device(params)
    held = alone if mesh is None else model.shard_params(cfg, params, mesh)
    steps = dict(chunk_tokens=longest // 2, prefill_tokens=(24,), decode_rows=(1, 3), decode_steps=2)
    with Engine.of(held, layout, size, drafts=drafts, **steps, **split) as serving:
        answers = [samples[0] for samples in serving.run(prompts)]
        stats = serving.stats()
    texts = [list(prompt.tokens) + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    with Engine.of(alone, layout, CacheSize(columns + 1, 2, columns), chunk_tokens=longest * 7 // 4) as scoring:
        scores = scoring.score(texts)
    tails = [np.array(score.logprobs[-len(answer.tokens) :]) for score, answer in zip(scores, answers, strict=True)]
    for i, (score, answer) in enumerate(zip(tails, answers, strict=True)):
        if (differs := score != answer.logprobs).any():
            apart = np.abs(score - answer.logprobs)
            print(f"request {i}, {len(prompts[i].tokens)} tokens: {differs.sum()} of {len(score)} differ, from "
                  f"{differs.argmax()} on, by {apart[differs.argmax()]:.1e}, at most {apart.max():.1e}")  # fmt: skip
    return answers, tails, stats


def test_scores_are_compared_of_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bfloat16 matrices, of which some had the kernel of few rows where they were apart: 104 of 2,385
    log-probabilities of a mesh, whose devices have them stacked, were not those of one GPU."""
    cfg, given = dataclasses.replace(GPU_CFG, num_mtp_layers=1, vocab_size=512), list[tuple[int, ...]]()
    layout, size = CacheLayout(cfg, numerics="released"), CacheSize(8, 2, 4)
    cache = jax.eval_shape(lambda: init_cache(layout, size))
    manager = KVCacheManager(layout, size)
    plan = manager.plan_step([(manager.admit_request([5] * 8), 8)])

    def noted(op: str, arguments: Any, choice: Any) -> Any:
        given.append(arguments.weights.shape)
        return registry.run(op, arguments, choice)

    def products(params: model.Params) -> list[tuple[int, ...]]:
        given.clear()
        jax.eval_shape(model.forward, params, cache, plan, jax.ShapeDtypeStruct((8,), jnp.int32))
        return [*given]

    monkeypatch.setattr(sys.modules["dsv4_jax.ops.dense_bf16"], "run", noted)
    loaded = param_specs(cfg, "released", numerics="released")
    assert products(jax.eval_shape(of_one_device, loaded)) == products(device_specs(cfg, numerics="released"))


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("split", [None, (1, 2), (2, 1)])
def test_a_score_has_the_bits_of_decoding(drafts: int, split: tuple[int, int] | None) -> None:
    """64 random requests: prompts in chunks and beside decodes, verified drafts, hits, preemption, one GPU and two."""
    if split and len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    cfg = dataclasses.replace(GPU_CFG, num_mtp_layers=1, vocab_size=512)
    mesh = jax.make_mesh(split, ("data", "tensor"), devices=jax.devices()[:2]) if split else None
    answers, scores, stats = served_and_scored(cfg, requests=64, longest=400, drafts=drafts, mesh=mesh)
    different = sum(int((np.array(a.logprobs) != s).sum()) for a, s in zip(answers, scores, strict=True))
    print(f"{sum(len(s) for s in scores)} log-probabilities, {different} differ; {stats.counts}")
    assert different == 0 and sum(a.cached > 0 for a in answers) > 0 and stats.counts["preemptions"] > 0
