"""The model over the cache against the same model without one: needs nothing but jax."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config, init_cache, model
from dsv4_jax.errors import LayoutError, RequestError, ShapeError
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model import SamplingRows
from dsv4_jax.model.projections import products
from dsv4_jax.model.sampling import log_probabilities
from dsv4_jax.model.weights import packing
from dsv4_jax.model.weights.stacking import Stacked
from dsv4_jax.ops.columns import Columns, Product

from . import feeding
from .feeding import CFG, feed, forward, prefill, text_tokens

LENGTH = 304
SHALLOW = dataclasses.replace(CFG, layer_types=(feeding.HCA,))
taken_apart = jax.jit(lambda packed: tuple(packed["layers"]))


@pytest.fixture(scope="module")
def params():
    return model.init_params(CFG, seed=1)


@pytest.fixture(scope="module")
def shallow():
    return model.init_params(SHALLOW, seed=1)


@pytest.fixture(scope="module")
def uncached(params) -> np.ndarray:
    return np.asarray(feeding.uncached(CFG, params, text_tokens(LENGTH)))


@pytest.mark.parametrize("chunks", [(LENGTH,), (13, 1, 1, 7, 50, 26), (97, 8, 33)], ids=str)
def test_any_chunking_equals_uncached(params, uncached, chunks):
    logits = feed(CFG, params, text_tokens(LENGTH), chunks, most=LENGTH)
    np.testing.assert_allclose(logits, uncached, rtol=0, atol=1e-4)


def test_decode_equals_uncached(params, uncached):
    np.testing.assert_allclose(feed(CFG, params, text_tokens(LENGTH), [1]), uncached, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_stacked_projections_change_nothing(params, uncached):
    stacked = model.stack_projections(params)
    assert set(stacked["layers"][2]["attn"]) >= {"of_input", "of_q_latent"}
    assert not {"wq_a", "wq_b", "wkv"} & set(stacked["layers"][2]["attn"])
    sizes = [sum(x.size for x in jax.tree.leaves(p)) for p in (params, stacked)]
    sites = 2 * len(params["layers"])  # whose vectors are padded
    assert sizes[0] <= sizes[1] < sizes[0] + 64 * sites
    packed = model.pack_layers(stacked)
    assert len(jax.tree.leaves(packed["layers"])) <= 12 < len(jax.tree.leaves(stacked["layers"][0]))
    chex.assert_trees_all_equal(taken_apart(packed), stacked["layers"])
    logits = feed(CFG, packed, text_tokens(LENGTH), [13, 1, 1, 50], most=LENGTH)
    np.testing.assert_allclose(logits, uncached, rtol=0, atol=1e-4)


def test_queries_of_a_long_chunk_are_left_to_their_kernel():
    """Stacked in bf16, of 512 tokens or more."""
    weights = jnp.asarray(np.arange(96 * 4).reshape(96, 4) % 7, jnp.bfloat16)
    p = {"of_q_latent": (Stacked(weights, ("wq_b", "indexer.wq_b"), (64, 32)),)}
    few, many = (products(p, "of_q_latent", jnp.ones((tokens, 4), jnp.bfloat16)) for tokens in (511, 512))
    assert {type(x) for x in few.values()} == {Columns} and {type(x) for x in many.values()} == {Product}
    for name in few:
        np.testing.assert_array_equal(many[name].cut()[:511], few[name].cut())


@pytest.mark.slow
def test_packs_are_of_bounded_size(monkeypatch, params):
    monkeypatch.setattr(packing, "MAX_ELEMENTS", 2**14)
    monkeypatch.setattr(packing, "SMALL", 2**8)
    packed = model.pack_layers(params)
    assert any(x.ndim > 1 for x in packed["layers"].arrays)
    # One parameter may be larger than a pack should be; two are not put together then.
    largest = max(x.size for layer in params["layers"] for x in jax.tree.leaves(layer))
    assert all(x.size <= max(2**14, largest) for x in packed["layers"].arrays)
    chex.assert_trees_all_equal(taken_apart(packed), params["layers"])


@pytest.mark.slow
def test_quantised_formats_stay_close(params, uncached):
    """fp8 rows and fp4 keys change logits by quantisation error, not by more: they still mean the same text."""
    logits = feed(CFG, params, text_tokens(LENGTH), [1], kv_format="fp8", index_format="fp4")
    assert np.abs(logits - uncached).max() > 1e-4
    assert np.corrcoef(logits.ravel(), uncached.ravel())[0, 1] > 0.95


@pytest.mark.slow
def test_rows_do_not_mix(params):
    """Requests that share a step, with padding beside them, get the logits each gets alone."""
    text, lengths = text_tokens(LENGTH), (60, 25)
    layout, size = CacheLayout(CFG), CacheSize(6, 2, 3)

    def logits_of(fed: tuple[int, ...]) -> list[np.ndarray]:
        cache, manager = init_cache(layout, size), KVCacheManager(layout, size)
        requests = [manager.admit_request(text[:n]) for n in fed]
        shape = manager.pinned_shape(2, 144, history=True)
        plan = manager.plan_step([(r, r.num_pending) for r in requests], shape=shape)
        logits, _ = prefill(params, cache, plan.pack(), manager.plan_tokens(plan))
        assert logits.shape == (2, CFG.vocab_size)
        return list(np.asarray(logits)[: len(fed)])

    together = logits_of(lengths)
    for n, logits in zip(lengths, together, strict=True):
        np.testing.assert_allclose(logits, logits_of((n,))[0], rtol=0, atol=1e-5)


def test_wrong_token_shape_is_refused(params):
    layout, size = CacheLayout(CFG, "f32", "f32"), CacheSize(1, 1, 1)
    cache, manager = init_cache(layout, size), KVCacheManager(layout, size)
    plan = manager.plan_step([(manager.admit_request([1, 2, 3]), 3)])
    with pytest.raises(ShapeError, match=r"tokens has shape \(3,\), the plan schedules \(4,\)"):
        model.forward(params, cache, plan, np.zeros(3, np.int32))
    for decode in (model.decode_step, lambda *args: model.decode_loop(*args, 2)):
        with pytest.raises(ShapeError, match="one token per sequence, the plan has 4 for 1"):
            decode(params, cache, plan, np.zeros(4, np.int32))
    masks, one = np.zeros((1, 8), np.uint32), manager.plan_step([])
    with pytest.raises(RequestError, match="masks of a loop of 2 steps"):
        model.decode_loop(params, cache, one, np.zeros(1, np.int32), 2, masks=masks)
    with pytest.raises(RequestError, match="masks of a loop of 3 steps"):
        model.draft_loop(params, cache, one, np.zeros(1, np.int32), np.zeros(1, np.int32), 1, 3, masks=masks)


@pytest.mark.parametrize(
    "tokens", [np.zeros(4, np.float32), np.zeros(4, bool), [0] * 4, None, np.zeros(4, object)], ids=str
)
def test_tokens_that_are_no_ids_are_refused(params, tokens):
    layout, size = CacheLayout(CFG, "f32", "f32"), CacheSize(1, 1, 1)
    cache, manager = init_cache(layout, size), KVCacheManager(layout, size)
    plan = manager.plan_step([(manager.admit_request([1, 2, 3, 4]), 4)])
    for step in (model.forward, model.prefill):
        with pytest.raises(ShapeError, match=r"tokens are .*, expected an array of integers"):
            step(params, cache, plan, tokens)
    if isinstance(tokens, np.ndarray) and tokens.dtype != object:
        with pytest.raises(ShapeError, match=r"tokens are .*, expected an array of integers"):
            model.forward_uncached(CFG, params, tokens)


def test_index_rotation_needs_a_power_of_two():
    cfg = DSV4Config.tiny(index_head_dim=24)
    assert model.index_qat_default(CacheLayout(cfg, "fp8", "bf16")) is False
    assert model.index_qat_default(CacheLayout(CFG, "fp8", "fp4")) is True
    with pytest.raises(LayoutError, match="index_head_dim 24"):
        model.index_qat_default(CacheLayout(cfg, "fp8", "fp4"))


def test_a_text_is_scored_as_it_is_sampled(shallow):
    """Chunks of a known text: raw log-probabilities of what follows, the likeliest tokens, and the experts' routes."""
    layout, size = CacheLayout(SHALLOW, "f32", "f32"), CacheSize(4, 2, 2)
    cache, manager = init_cache(layout, size), KVCacheManager(layout, size)
    request, shape = manager.admit_request(text_tokens(30).tolist()), manager.pinned_shape(2, 24, history=True)
    score = jax.jit(model.score_step, donate_argnames="cache", static_argnames=("rows", "top", "routed_experts"))
    draw = jax.jit(model.sample_step, donate_argnames="cache", static_argnames=("logprobs", "top", "routed_experts"))
    asked, rows = dict(top=2, routed_experts=True), SamplingRows.of([model.Sampling(0.9, seed=1), None])
    sampled = []
    while len(request.tokens) < 34:
        plan = manager.plan_step([(request, min(request.num_pending, 24))], shape=shape)
        drawn, cache = draw(
            shallow, cache, plan.pack(), manager.plan_tokens(plan), sampling=rows, logprobs=True, **asked
        )
        if not request.num_pending:
            request.tokens.append(int(drawn.tokens[0]))
            sampled.append(jax.tree.map(np.asarray, drawn))

    text, logits = (
        np.array(request.tokens, np.int32),
        feeding.uncached(SHALLOW, shallow, np.array(request.tokens, np.int32)),
    )
    exact = np.asarray(jax.nn.log_softmax(logits), np.float64)
    again, scored = manager.admit_request(text.tolist()), []
    while again.num_pending:
        count = min(again.num_pending, 20)
        plan = manager.plan_step([(again, count)], shape=shape)
        targets = np.full(plan.num_tokens, -1, np.int32)
        following = text[again.num_cached - count + 1 :][:count]
        targets[: len(following)] = following
        made, cache = score(shallow, cache, plan.pack(), manager.plan_tokens(plan), targets, rows=7, **asked)
        assert (np.asarray(made.experts)[count:] == -1).all()
        scored.append(jax.tree.map(lambda x, count=count: np.asarray(x)[:count], made))
    scored = jax.tree.map(lambda *parts: np.concatenate(parts), *scored)
    np.testing.assert_allclose(scored.logprobs[:-1], exact[np.arange(33), text[1:]], atol=2e-5)
    assert scored.logprobs[-1] == 0 and scored.tokens[-1] == -1
    np.testing.assert_array_equal(scored.top_ids[:, 0], exact.argmax(1))
    np.testing.assert_allclose(scored.top_logprobs, -np.sort(-exact, 1)[:, :2], atol=2e-5)
    assert (
        scored.experts.shape == (34, SHALLOW.num_layers, SHALLOW.num_experts_per_tok)
        and scored.experts.dtype == np.int16
    )
    assert scored.experts.min() >= 0 and scored.experts.max() < SHALLOW.n_routed_experts
    for i, drawn in enumerate(sampled):
        np.testing.assert_allclose(drawn.logprobs[0], scored.logprobs[29 + i], atol=2e-5)
        np.testing.assert_array_equal(drawn.top_ids[0], scored.top_ids[29 + i])
        fed = drawn.experts[drawn.experts[:, 0, 0] >= 0]
        np.testing.assert_array_equal(fed, scored.experts[30 + i - len(fed) :][: len(fed)])


def test_scores_have_the_bits_of_the_same_logits(shallow):
    layout, size = CacheLayout(SHALLOW, "f32", "f32"), CacheSize(2, 1, 2)
    manager = KVCacheManager(layout, size)
    plan = manager.plan_step([(manager.admit_request(text_tokens(24).tolist()), 24)])
    tokens = manager.plan_tokens(plan)
    targets = np.roll(tokens, -1)
    logits, _ = forward(shallow, init_cache(layout, size), plan.pack(), tokens)
    want = jax.jit(functools.partial(log_probabilities, top=3))(logits, targets)
    score = functools.partial(model.score_step, rows=plan.num_tokens, top=3)
    made, _ = jax.jit(score)(shallow, init_cache(layout, size), plan.pack(), tokens, targets)
    jax.tree.map(np.testing.assert_array_equal, made, want)
    with pytest.raises(ShapeError, match=r"targets has shape \(3,\), the plan schedules \(32,\)"):
        model.score_step(shallow, init_cache(layout, size), plan, tokens, targets[:3])
    with pytest.raises(ShapeError, match="rows must be an integer of at least 1, got 0"):
        model.score_step(shallow, init_cache(layout, size), plan, tokens, targets, rows=0)
