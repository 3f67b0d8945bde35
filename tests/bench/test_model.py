"""Whole layers in `bench`: floors against a count by hand, experts against what the step routes, layers that fit."""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import judged

from dsv4_jax import model, ops
from dsv4_jax.bench.model import (
    TOKENS_A_STEP,
    bytes_needed,
    chosen_experts,
    draft_floors,
    launches,
    measure_model,
    model_config,
    model_floors,
)
from dsv4_jax.bench.step import StepOptions, cache_and_plan, cache_floors, random_cache
from dsv4_jax.bench.timing import Ceilings
from dsv4_jax.cli import bench_steps
from dsv4_jax.config import DSparkHead, DSV4Config
from dsv4_jax.errors import OptionError
from dsv4_jax.layout import CacheLayout

TINY = StepOptions(model="tiny", layers=2, batch=5, context=200, implementation="xla")  # hashed, scored


def fp8(*matrices: tuple[int, int]) -> tuple[int, int]:
    """(bytes, weights)"""
    weights = sum(rows * columns for rows, columns in matrices)
    return weights + sum(-(-rows // 128) * -(-columns // 128) for rows, columns in matrices), weights


def test_floors_of_flash_are_those_counted_by_hand() -> None:
    layers, batch, context = 4, 64, 8192  # window, window, CSA, HCA; the first three hashed
    cfg = StepOptions(layers=layers).config()
    layout, used = CacheLayout(cfg), [200, 199, 198, 100]
    parts = {part.name: part for part in model_floors(layout, used, batch, context)}

    shared = [(2048, 4096), (2048, 4096), (4096, 2048)]
    every = fp8((1024, 4096), (32768, 1024), (512, 4096), (8192, 4096), (4096, 8192), *shared)
    indexer = fp8((8192, 1024))
    dense, weights = (4 * a + b for a, b in zip(every, indexer, strict=True))
    assert parts["fp8"][1:] == (dense, 2 * batch * weights)

    expert = 3 * 2048 * 4096
    # Half a byte a weight, and a byte for every 32.
    assert parts["fp4"][1:] == (sum(used) * expert * 17 // 32, 2 * batch * 6 * 4 * expert)

    hidden, kv = 4096, 512
    hyper = 2 * (24 * 4 * hidden)  # two a layer, float32
    gate = 256 * hidden
    csa = [2 * kv * hidden * 2, 2 * 128 * 2 * hidden, 64 * hidden]  # compressor, the indexer's, index weights
    hca = [2 * kv * hidden]
    bf16 = layers * gate + sum(csa) + sum(hca)
    vectors = layers * (2 * (24 + 3) + 2 * hidden + 1024 + kv + 64)  # hyper-connections, norms, sinks
    ape = 4 * 2 * kv + kv + 4 * 2 * 128 + 128 + 128 * kv + kv  # with the compressors' norms
    last = 4 * 4 * hidden + 4 + 1 + hidden
    table = 3 * batch * 6 * 4
    embedding = batch * hidden * 2
    plain = 2 * bf16 + 4 * (layers * hyper + vectors + ape + 256 + last) + table + embedding
    assert parts["plain"][1:] == (plain, 2 * batch * (bf16 + layers * hyper + 4 * 4 * hidden))

    vocabulary = 129280
    assert parts["head"][1:] == (vocabulary * hidden * 2 + batch * vocabulary * 4, 2 * batch * vocabulary * hidden)
    # Eight blocks and the head read, seven blocks write: 16 passes over the tokens' streams.
    assert parts["streams"][1:] == (16 * batch * 4 * hidden * 4, 0)
    assert list(parts)[5:] == [part.name for part in cache_floors(layout, batch, context)]

    # With every expert read, all weights that layers have but for the tables' and the embedding's other rows.
    read = sum(part.bytes for part in model_floors(layout, [256] * layers, batch, context)[:4])
    others = (3 * (vocabulary - batch) * 6 * 4) + (vocabulary - batch) * hidden * 2
    assert read - batch * vocabulary * 4 + others == model.weight_bytes(cfg)


@pytest.mark.slow
def test_experts_are_those_that_the_step_reads(monkeypatch) -> None:
    cfg = model_config(TINY)
    layout, size, plan = cache_and_plan(cfg, TINY)
    params, cache = model.init_params(cfg, 3, "released", packed=True), random_cache(layout, size, jax.random.key(2))
    tokens = jnp.asarray([3, 77, 200, 12, 150], jnp.int32)
    used, _ = jax.jit(chosen_experts)(params, cache, plan, tokens)
    route = ops.route

    def step(params, cache, plan, tokens):
        seen = []

        def visited(*args, **kwargs):
            seen.append(route(*args, **kwargs))
            return seen[-1]

        monkeypatch.setattr(ops, "route", visited)
        model.decode_step(params, cache, plan, tokens)
        return [chosen for chosen, _ in seen]

    chosen = jax.jit(step)(params, cache, plan, tokens)
    masks = [np.isin(np.arange(cfg.n_routed_experts), ids) for ids in chosen]
    np.testing.assert_array_equal(used, masks)
    assert len(masks) == cfg.num_layers


def test_launches_are_those_of_the_step() -> None:
    inner = '%inner (p: f32[2]) -> f32[2] {\n  ROOT %c = f32[2] custom-call(%p), custom_call_target="k"\n}'
    body = "%body () -> f32[2] {\n  %a = f32[2] fusion(%p), calls=%inner\n  %b = f32[2] custom-call(%a)\n}"
    entry = "ENTRY %main () -> f32[2] {\n  %w = f32[2] while(%p), body=%body\n  %z = f32[2] fusion(%w)\n}"
    assert launches("\n\n".join(("HloModule x", inner, body, entry))) == 2
    joined = body.replace("custom-call(%a)", 'custom-call(%a), backend_config={call0 = {}, targets = "a;b;c"}')
    assert launches("\n\n".join(("HloModule x", inner, joined, entry))) == 4


def test_numbers_that_are_not_finite_are_refused() -> None:
    options = StepOptions(model="tiny", batch=1, context=100, steps=1, layers=1, implementation="xla")
    params = model.init_params(model_config(options), 0, "released", packed=True)
    with pytest.raises(OptionError, match="not finite"):
        measure_model(options, params | {"norm": params["norm"] * np.float32("nan")}, None)


@pytest.mark.parametrize(("over", "verdict"), [(1.3, "goal"), (1.6, "required"), (1.8, "missed")])
def test_twelve_layers_of_flash_have_a_target(over: float, verdict: str) -> None:
    row = {"table": "models", "model": "flash", "layers": 12, "batch": 64, "context": 8192, "over_floor": over}
    assert judged(row)["verdict"] == verdict
    assert "verdict" not in judged(row | {"layers": 11})


def test_a_step_with_drafts_is_judged_by_the_tokens_it_gives() -> None:
    row = {"table": "models", "model": "flash", "layers": 43, "devices": 2, "batch": 1, "context": 8192, "drafts": 3}
    assert judged(row | {"token_ms": 4.0})["verdict"] == "required"
    assert judged(row | {"token_ms": 4.3})["verdict"] == "missed"
    assert "verdict" not in judged(row | {"token_ms": 4.0, "batch": 2})
    spark = row | {"draft_head": "dspark"}
    assert [judged(spark | {"token_ms": ms})["verdict"] for ms in (2.6, 2.7)] == ["required", "missed"]
    five = [judged(spark | {"drafts": 5, "token_ms": ms})["verdict"] for ms in (2.0, 2.6, 2.7)]
    assert five == ["goal", "required", "missed"] and "verdict" not in judged(spark | {"drafts": 4, "token_ms": 2.0})
    alone = {"table": "models", "model": "flash", "layers": 12, "devices": 1, "batch": 1, "context": 8192, "drafts": 5}
    alone |= {"draft_head": "dspark", "token_ms": 1.0, "over_floor": 9.0}
    assert [judged(alone | {"drafting_ms": ms})["verdict"] for ms in (0.35, 0.36)] == ["required", "missed"]


def test_what_drafting_by_dspark_must_read_of_flash_is_counted_by_hand() -> None:
    """Three stages, the head once for all rows, the second table of pairs for each draft."""
    options = StepOptions(batch=1, context=8192, drafts=5, draft_head="dspark")
    cfg = options.config()
    assert cfg.dspark == DSparkHead(5, 128799, (40, 41, 42), 256)
    layout, hidden, words, rows = CacheLayout(cfg, draft_tokens=5, include_drafts=True), 4096, 129280, 5
    parts = {part.name: part for part in draft_floors(layout, [30, 20, 10], 1, 5)}
    shared = [(2048, 4096), (2048, 4096), (4096, 2048)]
    dense, _ = fp8((1024, 4096), (32768, 1024), (512, 4096), (8192, 4096), (4096, 8192), *shared)
    main, _ = fp8((4096, 3 * 4096))
    assert parts["drafts fp8"].bytes == 3 * dense + main
    assert parts["drafts fp4"][1:] == (60 * 3 * 2048 * hidden * 17 // 32, 2 * rows * 6 * 3 * 3 * 2048 * hidden)
    assert parts["drafts head"][1:] == (words * hidden * 2 + rows * words * 4, 2 * rows * words * hidden)
    assert parts["drafts pairs"][1:] == (5 * (words + 1) * 256 * 2, 2 * 5 * words * 256)
    of_one = draft_floors(layout, [30, 20, 10], 1, 1)
    changed = [one.name for one, five in zip(of_one, parts.values(), strict=True) if one != five]
    assert changed == ["drafts head", "drafts pairs"], "a block has all of its rows"
    # With every expert read: the weights of the stages, but for confidence and the first table.
    read = sum(part.bytes for part in draft_floors(layout, [256] * 3, 1, 1)[:5])
    stages = model.weight_bytes(cfg, drafts=True) - model.weight_bytes(cfg)
    tables, logits, confidence = words * 256 * 2, words * (2 * hidden + 4), 2 * (hidden + 256)
    assert read - logits - 512 - 2 * hidden * 2 == stages - tables - confidence


@pytest.mark.slow
@pytest.mark.parametrize(("head", "drafts", "loop"), [("mtp", 2, 1), ("dspark", 5, 1), ("dspark", 3, 2)])
def test_a_step_with_drafts_is_timed_beside_one_that_verifies_alone(head: str, drafts: int, loop: int) -> None:
    options = StepOptions("tiny", 2, 200, drafts=drafts, draft_head=head, layers=2, steps=1, loop=loop)
    cfg = model_config(options)
    params = model.init_params(cfg, 0, "released", packed=True, drafts=True)
    report = measure_model(options, params, Ceilings(4e12, 8e14))
    assert report["drafting_ms"] == report["step_ms"] - report["verify_ms"] and report["verify_ms"] > 0
    assert report["token_ms"] == report["step_ms"] / TOKENS_A_STEP[head][drafts] and report["draft_head"] == head
    assert 1 <= report["experts"] <= cfg.n_routed_experts
    if head == "mtp":
        assert "floor_ms" not in report and "draft_experts" not in report
    else:
        floors = report["floor_us"]
        of_drafts = sum(us for name, us in floors.items() if name.startswith("drafts ")) / 1e3
        assert report["drafting_floor_ms"] == pytest.approx(of_drafts) and 0 < of_drafts < report["floor_ms"]
        assert cfg.num_experts_per_tok <= report["draft_experts"] <= cfg.n_routed_experts


def test_drafts_are_no_more_than_their_head_makes() -> None:
    with pytest.raises(OptionError, match="4 drafts of a step: the head mtp makes at most 3"):
        StepOptions(drafts=4).config()
    with pytest.raises(OptionError, match="--drafts: 6 of a step, --draft-head dspark makes at most 5"):
        bench_steps.model_options(arguments(drafts=6, draft_head="dspark"), False)
    with pytest.raises(OptionError, match="--draft-head: it makes --drafts, of which there are none"):
        bench_steps.model_options(arguments(draft_head="dspark"), False)


def arguments(**given) -> argparse.Namespace:
    fields = dict.fromkeys(
        (
            "implementations",
            "model",
            "layers",
            "batch",
            "context",
            "profile",
            "devices",
            "tensor",
            "drafts",
            "draft_head",
            "numerics",
        )
    )
    return argparse.Namespace(**(fields | {"key_split": None, "steps": 20, "loop": 1, "chunk": 1, "xla": ()} | given))


def test_few_requests_are_cut_for_latency(monkeypatch) -> None:
    monkeypatch.setattr(bench_steps, "device_limit", lambda: 2**40)
    splits = [option.key_split for option in bench_steps.model_options(arguments(batch=[1, 16, 17]), False)]
    assert splits == ["latency", "latency", "throughput"]
    (option,) = bench_steps.model_options(arguments(batch=[1], key_split="throughput"), False)
    assert option.key_split == "throughput"


def test_as_many_layers_run_as_fit(monkeypatch) -> None:
    def chosen(gib: float, **given) -> int:
        monkeypatch.setattr(bench_steps, "device_limit", lambda: int(gib * 2**30))
        (layers,) = {option.config().num_layers for option in bench_steps.model_options(arguments(**given), False)}
        return layers

    assert chosen(200) == DSV4Config.flash().num_layers
    assert chosen(100) == 12 and chosen(100, batch=[1, 64, 256]) == 12 and chosen(100, layers=20) == 20
    few = chosen(24, batch=[1, 256])
    need = [bytes_needed(StepOptions(batch=256, context=8192, layers=n)) for n in (few, few + 1)]
    assert need[0] <= 24 * 2**30 < need[1]
    with pytest.raises(OptionError, match=rf"--layers.* 30 layers of flash take \d+ bytes.*: {chosen(40)} fit"):
        chosen(40, layers=30)
    with pytest.raises(OptionError, match="not even one fits"):
        chosen(2)


def test_few_requests_share_heads_and_many_do_not(monkeypatch) -> None:
    monkeypatch.setattr(bench_steps, "device_limit", lambda: 200 << 30)
    options = bench_steps.model_options(arguments(devices=2, batch=[1, 8, 64]), False)
    assert [(option.split.data, option.split.tensor) for option in options] == [(1, 2), (1, 2), (2, 1)]
    with pytest.raises(OptionError, match="--devices: 64 of"):
        bench_steps.model_options(arguments(devices=64), False)
    with pytest.raises(OptionError, match="--devices, --tensor: batch 3, 2 devices"):
        bench_steps.model_options(arguments(devices=2, tensor=1, batch=[3]), False)


def test_floors_of_a_device_among_two() -> None:
    """Half of the experts and, where heads are split, of their matrices; the rest as alone, of the tokens there."""
    layout = CacheLayout(StepOptions(layers=4).config())
    alone = {part.name: part for part in model_floors(layout, [100] * 4, 32, 8192)}
    data = {part.name: part for part in model_floors(layout, [100] * 4, 64, 8192, model.Split(2, 1))}
    assert {name: part for name, part in data.items() if name != "fp4"} == {
        name: part for name, part in alone.items() if name != "fp4"
    }
    assert (data["fp4"].bytes, data["fp4"].flops) == (alone["fp4"].bytes, alone["fp4"].flops)
    heads = {part.name: part for part in model_floors(layout, [100] * 4, 32, 8192, model.Split(1, 2))}
    halved, _ = fp8((32768 // 2, 1024), (8192 // 2, 4096))
    assert alone["fp8"].bytes - heads["fp8"].bytes == 4 * halved
    assert heads["fp4"].flops == alone["fp4"].flops / 2 and heads["plain"] == alone["plain"]
    assert alone["head"].bytes - heads["head"].bytes == 129280 // 2 * 4096 * 2
    assert heads["head"].flops == alone["head"].flops / 2
    long = (layout, [100] * 4, 1, 8192, model.Split(1, 2), 4096)
    whole, shares = ({part.name: part for part in model_floors(*long, shared=shared)} for shared in (False, True))
    assert shares["streams"].bytes == whole["streams"].bytes / 2 and shares["plain"].flops == whole["plain"].flops / 2
    of_heads = 2 * 4096 * 4 * (32768 * 1024 + 8192 * 4096) // 2
    assert shares["fp8"].flops - of_heads == (whole["fp8"].flops - of_heads) / 2


def test_floors_of_prefill_are_those_of_its_tokens() -> None:
    layout, batch, chunk = CacheLayout(DSV4Config.flash()), 3, 700
    whole = cache_floors(layout, batch, 2500, chunk=chunk)
    tokens = [cache_floors(layout, batch, context) for context in range(2500 - chunk + 1, 2501)]
    for part, each in zip(whole, zip(*tokens, strict=True), strict=True):
        assert part.flops == sum(token.flops for token in each), part.name
        assert each[-1].bytes <= part.bytes < sum(token.bytes for token in each), part.name
    report = dict(table="steps", model="flash", batch=1, context=8192, chunk=4096, over_floor=1.2)
    assert judged(report | {"step_ms": 76.0})["verdict"] == "required"
    assert "verdict" not in judged(report | {"step_ms": 76.0, "chunk": 2048})
