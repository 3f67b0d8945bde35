"""The MTP layer over the cache against the same layer without one, whatever a manager does."""

from __future__ import annotations

import chex
import jax
import numpy as np
import pytest

from dsv4_jax import AttentionType, CacheLayout, DSV4Config, init_cache, model
from dsv4_jax.errors import ConfigError, LayoutError, ShapeError, StepError
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import CachePolicy, KVCacheManager, SnapshotPlacement
from dsv4_jax.model.mtp import mtp_forward
from dsv4_jax.model.uncached import mtp_uncached
from dsv4_jax.testing import StepRunner
from dsv4_jax.testing.live import assert_same_bytes
from dsv4_jax.testing.serving import Mixes

from .feeding import SMALL_WIDTHS

SWA, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(**SMALL_WIDTHS, layer_types=(SWA, CSA, HCA), max_position_embeddings=64, num_mtp_layers=1)
LAYOUT = CacheLayout(CFG, "f32", "f32", block_tokens=8, draft_tokens=2, include_drafts=True)
TEXT = np.random.default_rng(0).integers(0, 32, 60).tolist()


def guesses(params, cache, plan, tokens):
    """A step whose logits are the MTP layer's."""
    _, logits, cache = mtp_forward(params, cache, plan, tokens)
    return logits, cache


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init_params(CFG, seed=1, drafts=True)


@pytest.fixture(scope="module")
def runner(params) -> StepRunner:
    return StepRunner(guesses, params, LAYOUT, checked=True)  # no mix runs a plan twice or out of order


@pytest.fixture(scope="module")
def uncached(params) -> np.ndarray:
    """Row i: what the residual of token i and token i + 1 say of token i + 2."""
    return np.asarray(mtp_uncached(CFG, params, np.array(TEXT)))


@pytest.mark.parametrize("chunks", [(1,) * 60, (16, 16, 16, 12), (3, 1, 13, 2, 2, 16, 1, 6, 16)], ids=len)
def test_any_chunking_equals_uncached(runner, uncached, chunks) -> None:
    logits = runner.alone(TEXT, chunks).logits
    np.testing.assert_allclose(logits[1:], uncached, rtol=0, atol=1e-4)


def test_the_layer_hears_both_the_residual_and_the_token(params, uncached) -> None:
    """What the comparisons rely on: either changed, the guesses are others, and only from there on."""
    text = np.array(TEXT)
    text[30] = (text[30] + 1) % 32
    other = np.asarray(mtp_uncached(CFG, params, text))
    changed = np.abs(other - uncached).max(1) > 1e-3
    assert not changed[:29].any() and changed[29] and changed[30]  # row 29 of token 30 alone


def test_what_a_manager_does_changes_no_bit(runner) -> None:
    """Hits on device and host, forks that go on otherwise, preemption, rejected drafts: as lone, cold runs."""
    mixes = Mixes(runner)
    for seed in range(3):
        mixes.run(seed)
    for name in ("hits on the device", "preemptions", "forks", "drafts rejected", "blocks in", "snapshots in"):
        assert mixes.seen[name], name
    assert runner.executables == 1


def test_a_prefix_is_shared_by_texts_that_differ_right_behind_it(runner) -> None:
    """Its state holds nothing of the token that came next when it was stored."""
    policy = CachePolicy(snapshots=SnapshotPlacement(every=1))
    manager = KVCacheManager(LAYOUT, runner.size, policy=policy, weights_id="weights")
    cache, texts = runner.empty_cache(), (TEXT[:20], [*TEXT[:16], (TEXT[16] + 1) % 32, *TEXT[17:20]])
    for text, hit in zip(texts, (0, 16), strict=True):
        request, rows = manager.admit_request(text), []
        assert request.num_hit == hit
        while request.num_pending:
            plan = manager.plan_step([(request, min(request.num_pending, 8))], shape=runner.shape)
            count = request.num_scheduled
            logits, cache = runner.run(cache, manager, plan)
            rows.append(logits[:count])
        cold = runner.alone(text)
        np.testing.assert_array_equal(np.concatenate(rows).view(np.uint32), cold.logits[hit:].view(np.uint32))
        assert_same_bytes(runner.live(cache, request), cold.live)
        manager.release_request(request)


def test_a_step_of_drafts_is_taken_back_whole(runner) -> None:
    """None of its tokens is kept, and the residual of the token before it is still there."""
    manager, cache, rows = KVCacheManager(LAYOUT, runner.size), runner.empty_cache(), []
    request = manager.admit_request(TEXT[:20])
    for count, kept in ((16, 16), (4, 4), (3, 0), (3, 3), (3, 1), (1, 1)):
        known = len(request.tokens)
        if not request.num_pending:  # guesses, all wrong where they are not to be kept
            request.tokens += [(TEXT[known + i] + (i >= kept)) % 32 for i in range(count)]
        plan = manager.plan_step([(request, count)], shape=runner.shape)
        logits, cache = runner.run(cache, manager, plan)
        rows.append(logits[:kept])
        if kept < count:
            manager.accept(request, kept)
    cold = runner.alone(TEXT[:25])
    np.testing.assert_array_equal(np.concatenate(rows).view(np.uint32), cold.logits.view(np.uint32))
    assert_same_bytes(runner.live(cache, request), cold.live)


def test_packed_and_stacked_as_other_layers(params) -> None:
    stacked = model.stack_projections(params)
    packed = model.pack_layers(stacked)
    assert len(packed["mtp"]) == 1 and len(packed["layers"]) == 3
    assert len(jax.tree.leaves(packed["mtp"])) <= 12 < len(jax.tree.leaves(stacked["mtp"]))
    chex.assert_trees_all_equal(tuple(packed["mtp"]), stacked["mtp"])


def test_without_an_mtp_layer(params) -> None:
    size = CacheSize(2, 1, 1)
    bare = CacheLayout(CFG, "f32", "f32", block_tokens=8)
    plan = KVCacheManager(LAYOUT, size).plan_step([])
    arguments = (plan, np.zeros(plan.num_tokens, np.int32))
    backbone = {name: value for name, value in params.items() if name != "mtp"}
    with pytest.raises(ShapeError, match="the parameters have no MTP layer"):
        mtp_forward(backbone, init_cache(LAYOUT, size), *arguments)
    with pytest.raises(ShapeError, match="the cache has no MTP layer"):
        mtp_forward(params, init_cache(bare, size), KVCacheManager(bare, size).plan_step([]), arguments[1])
    with pytest.raises(ShapeError, match="drafts of 3 tokens in a cache whose draft_tokens is 2"):
        model.draft_step(params, init_cache(LAYOUT, size), *arguments, np.zeros(1, np.int32), 3)
    for count in (0, 2):
        with pytest.raises(ConfigError, match=f"num_mtp_layers.*one MTP layer, this one has {count}"):
            model.param_specs(DSV4Config.tiny(num_mtp_layers=count), drafts=True)
    with pytest.raises(LayoutError, match="layer 0 is SWA: only MTP layers keep residuals"):
        init_cache(LAYOUT, size).begin(plan).layer(0).last_residual()
    handle = init_cache(LAYOUT, size).begin(plan).layer(3)
    before, handle = handle.carry_residual(np.ones((plan.num_tokens, 64), np.float32))
    assert before.shape == (plan.num_tokens, 64)
    for again in (handle.last_residual, lambda: handle.carry_residual(before)):
        with pytest.raises(StepError, match="`carry_residual` a second time"):
            again()


def test_the_backbone_is_what_it_is_without() -> None:
    with_mtp, without = (model.init_params(CFG, seed=1, drafts=mtp) for mtp in (True, False))
    assert set(with_mtp) - set(without) == {"mtp"}
    jax.tree.map(np.testing.assert_array_equal, with_mtp | {"mtp": None}, without | {"mtp": None})
