"""DSpark's stages over the cache against their definition, whatever a manager does; and what steps with them keep."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import AttentionType, CacheLayout, DSV4Config, cache_sharding, init_cache, model
from dsv4_jax.config import DSparkHead
from dsv4_jax.engine import Engine, Prompt
from dsv4_jax.errors import PlanError, ShapeError
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import CachePolicy, KVCacheManager, SnapshotPlacement
from dsv4_jax.model import dspark
from dsv4_jax.model.forward import embed, heard_layers
from dsv4_jax.model.head import head
from dsv4_jax.model.numerics import activations
from dsv4_jax.model.sampling import Sampling, SamplingRows
from dsv4_jax.model.uncached import _layer
from dsv4_jax.ops.hyper_connection import widened
from dsv4_jax.testing import StepRunner
from dsv4_jax.testing.live import Held, assert_same_bytes, live_bytes
from dsv4_jax.testing.serving import Mixes

from ..oracle.dspark import Twin
from .feeding import SMALL_WIDTHS

SWA, CSA, HCA = AttentionType
SPARK = DSparkHead(block_size=5, noise_token_id=31, target_layer_ids=(0, 2), markov_rank=8)
CFG = DSV4Config.tiny(**SMALL_WIDTHS, layer_types=(SWA, CSA, HCA), max_position_embeddings=64, dspark=SPARK)
LAYOUT = CacheLayout(CFG, "f32", "f32", block_tokens=8, draft_tokens=3, include_drafts=True)
TEXT = np.random.default_rng(0).integers(0, 32, 60).tolist()


def fed(params, cache, plan, tokens):
    """A step of known tokens: the backbone's logits, and the stages' rows in the cache."""
    step = cache.begin(plan)
    residual, step, _, heard = heard_layers(params, step, tokens, None, False, SPARK.target_layer_ids)
    return head(params, residual, cache.layout.cfg), dspark.follow(params, step, heard).finish()


def heard_of(params, cache, plan, tokens):
    """As `fed`, but for what the stages hear in place of the logits."""
    step = cache.begin(plan)
    _, step, _, heard = heard_layers(params, step, tokens, None, False, SPARK.target_layer_ids)
    return jnp.concatenate([*map(dspark.mean_stream, heard)], 1), dspark.follow(params, step, heard).finish()


@functools.partial(jax.jit, static_argnums=0)
def heard_uncached(cfg: DSV4Config, params: model.Params, tokens: jax.Array) -> jax.Array:
    """The mean of the streams behind each layer that is heard, without a cache: [T, layers * hidden]."""
    residual, heard = embed(params, tokens, cfg), []
    for i, (p, attn) in enumerate(zip(params["layers"], cfg.layer_types, strict=True)):
        residual = _layer(p, residual, tokens, attn, cfg, activations(params))
        if i in SPARK.target_layer_ids:
            heard.append(widened(residual.streams, residual.written).mean(1))
    return jnp.concatenate(heard, 1)


@functools.partial(jax.jit, static_argnames="width")
def drafted(params, cache, plan, token, width=5):
    """(The logits of each draft, the drafts, how sure the head is of them) of each sequence of a plan."""
    plan, seen = plan.unpack().settled(), []

    def draw(logits, i, before):
        seen.append(logits)
        return logits.argmax(-1).astype(jnp.int32)

    wanted = jnp.where(plan.seq_slot > 0, 2, 0)
    drafts, _ = dspark.guesses(params, cache, plan, token, wanted, width, draw)
    _, residual, _ = dspark.block_logits(params, cache, plan, token, wanted, width)
    before = jnp.concatenate([token[:, None], drafts[:, :-1]], 1).reshape(-1)
    last = params["mtp"][2]
    sure = dspark.confidence(last, residual, last["markov"]["w1"][before], cache.layout.cfg)
    return jnp.stack(seen, 1), drafts, sure.reshape(drafts.shape)


def check_against_the_twin(cfg: DSV4Config, kv_format: str, seeds: range, close: float) -> None:
    """Fed in chunks of any length; blocks behind one token, at the window's length, and after rings have wrapped."""
    layout = CacheLayout(cfg, kv_format, "f32", block_tokens=8, draft_tokens=3, include_drafts=True)
    rounds = kv_format == "fp8"  # which the backbone without a cache does not
    runner = StepRunner(heard_of if rounds else fed, None, layout)
    for seed in seeds:
        params = runner.params = model.init_params(cfg, seed, drafts=True)
        twin, rng = Twin(cfg, params, drafts=3, rounds=rounds), np.random.default_rng(seed)
        heard = np.asarray(heard_uncached(cfg, params, np.array(TEXT)), np.float64)
        manager, cache = KVCacheManager(layout, runner.size), runner.empty_cache()
        request, start = manager.admit_request(TEXT[:1]), 0
        for stop in (1, 5, 6, 7, *sorted(rng.choice(np.arange(9, 57), 3, replace=False).tolist())):
            request.tokens += TEXT[len(request.tokens) : stop]
            while start < stop:
                count = min(int(rng.integers(1, 17)), stop - start)
                plan = manager.plan_step([(request, count)], shape=runner.shape)
                out, cache = runner.run(cache, manager, plan)
                twin.commit(out[:count].astype(np.float64) if rounds else heard[start : start + count], start)
                start += count
            request.tokens += [TEXT[stop], 0, 0]
            plan = manager.plan_step([(request, 3)], shape=runner.shape)  # and none of it is kept
            at = np.flatnonzero(plan.seq_slot == request.slot)[0]
            anchor = np.zeros(plan.num_seqs, np.int32)
            anchor[at] = TEXT[stop]
            logits, drafts, sure = (np.asarray(x)[at] for x in drafted(params, cache, plan, anchor))
            _, cache = runner.run(cache, manager, plan)
            manager.accept(request, 0)
            want = twin.draft(stop, TEXT[stop])
            np.testing.assert_allclose(logits, want.logits, rtol=0, atol=close)
            np.testing.assert_allclose(sure, want.confidence, rtol=0, atol=close)
            assert drafts.tolist() == want.drafts, (seed, stop)
    assert runner.executables == 1


def test_blocks_are_those_of_the_definition() -> None:
    check_against_the_twin(CFG, "f32", range(20), 2e-4)


@pytest.mark.slow
def test_blocks_are_those_of_the_definition_as_rows_are_stored() -> None:
    """In the format of the published models: rounded to FP8 but for the dims of RoPE, which bfloat16 holds."""
    wide = dataclasses.replace(CFG, head_dim=80, rope_dim=16, index_head_dim=16)
    check_against_the_twin(wide, "fp8", range(4), 0.05)


# Whatever a manager does.


def test_what_a_manager_does_changes_no_bit() -> None:
    """Hits on device and host, forks that go on otherwise, preemption, rejected drafts: as lone, cold runs."""
    runner = StepRunner(fed, model.init_params(CFG, 1, drafts=True), LAYOUT, checked=True)
    mixes = Mixes(runner)
    for seed in range(2):
        mixes.run(seed)
    for name in ("hits on the device", "preemptions", "forks", "drafts rejected", "snapshots in"):
        assert mixes.seen[name], name
    assert runner.executables == 1


# Steps that draft.

ONE = dataclasses.replace(CFG, layer_types=(HCA,), dspark=DSparkHead(5, 31, (0,), 32))
OF_ONE = CacheLayout(ONE, "f32", "f32", block_tokens=8, draft_tokens=5, include_drafts=True)
SIZE = CacheSize(24, 2, 8, num_snapshots=12)
PROMPTS, NEW = [TEXT[:19], TEXT[20:25], TEXT[:1], TEXT[20:25]], 21


def leaning(params: model.Params, strength: float) -> model.Params:
    """The same model with what blocks write made this much weaker, and stages that hear the token before alone.

    At 0 the next token depends on the last one only, and the table of pairs says what the backbone will.
    """

    def quiet(layer: model.Params) -> model.Params:
        ffn = layer["ffn"] | {
            name: layer["ffn"][name] | {"down": layer["ffn"][name]["down"] * strength} for name in ("experts", "shared")
        }
        return layer | {"attn": layer["attn"] | {"wo_b": layer["attn"]["wo_b"] * strength}, "ffn": ffn}

    embed, (first, second, last) = params["embed"], params["mtp"]
    alone = embed / jnp.sqrt((embed * embed).mean(1, keepdims=True)) * params["norm"][None]
    last = last | {"norm": jnp.zeros_like(params["norm"]), "markov": {"w1": alone, "w2": params["head"]}}
    return params | {"layers": tuple(map(quiet, params["layers"])), "mtp": (first, second, last)}


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init_params(ONE, seed=1, drafts=True)


def generate(params, drafts=0, *, layout=OF_ONE, **options):
    """(What `model.generate` gives, how many tokens came at once.) Afterwards nothing may be held."""
    manager = KVCacheManager(layout, SIZE, policy=CachePolicy(snapshots=SnapshotPlacement(every=1)))
    cache, sizes = init_cache(layout, SIZE), []
    options = dict(max_new_tokens=NEW, chunk_tokens=16, drafts=drafts) | options
    options["on_step"] = lambda brought: sizes.extend(len(tokens) for tokens in brought.tokens.values() if tokens)
    drawn, cache = model.generate(params, cache, manager, PROMPTS, **options)
    manager.check_integrity()
    assert not manager.requests
    return drawn, sizes


@pytest.mark.parametrize(
    ("strength", "sampling", "drafts", "steps", "least", "most"),
    [
        (None, Sampling(), 5, 1, 1.0, 1.6),
        (0.0, Sampling(), 5, 1, 4.0, 6.0),
        pytest.param(0.02, Sampling(0.6, top_k=30, top_p=0.98), 2, 1, 1.1, 2.9, marks=pytest.mark.slow),
        pytest.param(0.02, Sampling(0.6, top_k=30, top_p=0.98), 3, 2, 1.1, 7.9, marks=pytest.mark.slow),
    ],
)
def test_output_is_that_without_drafts(params, strength, sampling, drafts, steps, least, most) -> None:
    """With guesses that are mostly wrong, always right, and right now and then; one step, or several in a call."""
    given, options = params if strength is None else leaning(params, strength), dict(sampling=sampling, seed=11)
    expected, _ = generate(given, **options)
    drawn, sizes = generate(given, drafts, decode_steps=steps, **options)
    assert drawn == expected
    per_call = (sum(sizes) - len(PROMPTS)) / (len(sizes) - len(PROMPTS))
    assert sum(sizes) == NEW * len(PROMPTS) and max(sizes) <= steps * (1 + drafts) and least <= per_call <= most


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_output_is_that_without_drafts_at_other_widths(params, drafts) -> None:
    for strength in (0.0, 0.02):
        given = leaning(params, strength)
        assert generate(given, drafts)[0] == generate(given)[0]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [6, 7, 8])
def test_output_is_that_without_drafts_of_a_head_with_longer_blocks(drafts) -> None:
    """Eight rows of a block, of which a step verifies as many as it is asked for, greedy and sampled."""
    cfg = dataclasses.replace(ONE, dspark=DSparkHead(8, 31, (0,), 32))
    layout = CacheLayout(cfg, "f32", "f32", block_tokens=8, draft_tokens=drafts, include_drafts=True)
    params = model.init_params(cfg, seed=1, drafts=True)
    for strength in (0.0, 0.02):
        given, most = leaning(params, strength), 1 + drafts
        for sampling in (Sampling(), Sampling(0.6, top_k=30)):
            how = dict(layout=layout, sampling=sampling, seed=11, chunk_tokens=24)
            expected, _ = generate(given, **how)
            drawn, sizes = generate(given, drafts, **how)
            assert drawn == expected and 1 < max(sizes) <= most
            if not strength and sampling.greedy:
                assert max(sizes) == most


@functools.partial(jax.jit, static_argnames=("least",))
def step(params, cache, plan, tokens, drafts, least=0.0):
    drawn, kept, cache = model.draft_step(params, cache, plan, tokens, drafts, 5, least_confidence=least)
    return drawn.tokens, kept, cache


def decoded(params, count: int, wanted, *, least=0.0, before=None):
    """(Tokens, how many each step kept, the manager's request, the cache) of one request, greedy.

    Args:
        wanted: random numbers of drafts; None: none.
        before: (cache, step's number) -> the cache, before every step.
    """
    manager, cache = KVCacheManager(OF_ONE, SIZE), init_cache(OF_ONE, SIZE)
    shape = manager.pinned_shape(2, 12)
    shape = dataclasses.replace(shape, table_entries=shape.table_entries + 4)
    request, kept_of = manager.admit_request(TEXT[:11]), []
    while len(request.tokens) < 11 + count:
        known = min(request.num_pending, 6)
        last = known == request.num_pending
        more = 0 if wanted is None or not last or known > 1 else int(wanted.integers(0, 6))
        cache = cache if before is None else before(cache, len(kept_of))
        plan, start = manager.plan_step([(request, known + more)], shape=shape), request.num_cached - known - more
        at = int(np.flatnonzero(plan.seq_slot == request.slot)[0])
        tokens, drafts = np.zeros(plan.num_tokens, np.int32), np.zeros(plan.num_seqs, np.int32)
        tokens[plan.seq_first[at] :][:known] = request.tokens[start : start + known]
        drafts[at] = more
        drawn, kept, cache = step(params, cache, plan.pack(), tokens, drafts, least)
        drawn, kept = np.asarray(drawn)[at], int(np.asarray(kept)[at])
        if more:
            manager.accept(request, kept)
            kept_of.append((more, kept))
        if last:
            request.tokens += drawn[:kept].tolist()
    return request.tokens[: 11 + count], kept_of, request, cache


def test_rejected_drafts_leave_nothing(params) -> None:
    """Nor do accepted ones, beside their tokens: the cache has the bytes of one in which nothing was drafted."""
    for strength, seed in ((0.02, 0), (0.05, 1), (1.0, 2)):
        given = leaning(params, strength)
        tokens, kept, request, cache = decoded(given, 40, np.random.default_rng(seed))
        plain, _, other, bare = decoded(given, 40, None)
        assert tokens == plain
        if strength < 0.1:
            assert {kept == more + 1 for more, kept in kept} == {False, True}
        length = min(request.num_cached, other.num_cached)
        seen = OF_ONE.cfg.sliding_window
        views = [
            live_bytes(c, Held(r.slot, length, r.blocks), window=seen - (r.num_cached - length))
            for r, c in ((request, cache), (other, bare))
        ]
        assert_same_bytes(*views)


def test_rows_that_are_lost_cost_drafts_alone(params) -> None:
    """A request that comes from where nothing was drafted: no zero is a key, and after a window all is as it was."""
    given, whole = leaning(params, 0.02), list[jax.Array]()
    wanted = functools.partial(np.random.default_rng, 3)
    names = [leaf.name for leaf in OF_ONE.leaves if leaf.pool == "draft"]

    def lose(cache, number):
        if number != 2:
            return cache
        lost = {name: jnp.zeros_like(cache.arrays[name]) for name in names}
        return dataclasses.replace(cache, arrays={**cache.arrays, **lost})

    tokens, _, request, cache = decoded(given, 40, wanted(), before=lose)
    plain, _, other, bare = decoded(given, 40, wanted())
    assert tokens == plain
    for r, c in ((request, cache), (other, bare)):
        whole.append(
            live_bytes(c, Held(r.slot, min(request.num_cached, other.num_cached), r.blocks), window=1)["draft"]
        )
    for one, two in zip(*whole, strict=True):
        np.testing.assert_array_equal(one, two)


def test_no_window_row_that_nobody_stored_is_a_key(params) -> None:
    """Without any rows a block sees itself alone; with those since a token, what the definition sees since there."""
    twin = Twin(ONE, params, drafts=5)
    manager, cache = KVCacheManager(OF_ONE, SIZE), init_cache(OF_ONE, SIZE)
    request, shape = manager.admit_request(TEXT[:5]), manager.pinned_shape(2, 12)
    plan = manager.plan_step([(request, 5)], shape=shape)
    _, _, cache = step(params, cache, plan.pack(), manager.plan_tokens(plan), np.zeros(plan.num_seqs, np.int32))
    (leaf,) = (leaf for leaf in OF_ONE.leaves if leaf.pool == "draft")
    rows = np.array(cache.arrays[leaf.name]).reshape(3, -1, leaf.rows, leaf.width)
    for ring, own in zip(twin.rings, rows[:, request.slot], strict=True):
        ring[:] = own
    request.tokens += [TEXT[5], 0]
    plan = manager.plan_step([(request, 2)], shape=shape)
    at = np.flatnonzero(plan.seq_slot == request.slot)[0]
    anchor = np.zeros(plan.num_seqs, np.int32)
    anchor[at] = TEXT[5]
    said = []
    for since in (0, 3, 5):
        rows[:, request.slot, :since] = 0
        lost = dataclasses.replace(cache, arrays={**cache.arrays, leaf.name: jnp.asarray(rows.reshape(-1, leaf.width))})
        logits, _, _ = (np.asarray(x)[at] for x in drafted(params, lost, plan, anchor))
        want = twin.draft(5, TEXT[5], since=since)
        np.testing.assert_allclose(logits, want.logits, rtol=0, atol=2e-4)
        said.append(logits[0])
    assert np.abs(said[0] - said[1]).max() > 1e-2 < np.abs(said[1] - said[2]).max()


def test_a_block_sees_its_window_alone_and_is_the_same_at_every_width(params) -> None:
    """What lies in the rings beside it, of refused drafts or of before, shows nowhere; fewer drafts are the first."""
    manager, cache = KVCacheManager(OF_ONE, SIZE), init_cache(OF_ONE, SIZE)
    request, shape = manager.admit_request(TEXT[:12]), manager.pinned_shape(2, 12, history=True)
    plan = manager.plan_step([(request, 12)], shape=shape)
    _, _, cache = step(params, cache, plan.pack(), manager.plan_tokens(plan), np.zeros(plan.num_seqs, np.int32))
    request.tokens += [TEXT[12], 0]
    plan = manager.plan_step([(request, 2)], shape=shape)
    at = int(np.flatnonzero(plan.seq_slot == request.slot)[0])
    anchor = np.zeros(plan.num_seqs, np.int32)
    anchor[at] = TEXT[12]
    (leaf,) = (leaf for leaf in OF_ONE.leaves if leaf.pool == "draft")
    rows = np.array(cache.arrays[leaf.name]).reshape(3, -1, leaf.rows, leaf.width)
    window = ONE.sliding_window
    assert leaf.rows > window and window < 12
    seen = {position % leaf.rows for position in range(12 - window, 12)}
    others = [row for row in range(leaf.rows) if row not in seen]
    said = {}
    for width in (5, 3, 1):
        for poison in (None, 0xFFFFFFFF, 0x7F7FFFFF):  # NaN, and the largest number
            spoilt = rows.copy()
            if poison is not None:
                spoilt[:, request.slot, others] = np.array(poison, np.uint32).astype(spoilt.dtype)
                spoilt[:, 0] = spoilt[:, request.slot]
            arrays = {**cache.arrays, leaf.name: jnp.asarray(spoilt.reshape(-1, leaf.width))}
            found = drafted(params, dataclasses.replace(cache, arrays=arrays), plan, anchor, width)
            said[width, poison] = [np.asarray(x)[at] for x in found]
    for (width, poison), found in said.items():
        for ours, whole in zip(found, said[5, None], strict=True):
            np.testing.assert_array_equal(ours, whole[:width], err_msg=f"{width} {poison}")


def test_a_block_that_is_unsure_is_verified_in_part(params) -> None:
    """By what is known before each draft: fewer are kept, and the tokens are those of all."""
    given = leaning(params, 0.02)
    tokens, kept, _, _ = decoded(given, 30, np.random.default_rng(4))
    fewer, kept_of_fewer, _, _ = decoded(given, 30, np.random.default_rng(4), least=0.5)
    assert fewer == tokens
    means = [np.mean([kept - 1 for more, kept in each if more]) for each in (kept, kept_of_fewer)]
    assert 0 < means[1] < means[0]


@pytest.mark.slow
def test_an_engine_keeps_no_draft_that_is_unsure(params) -> None:
    """The text of any other engine, in more steps."""
    given, unsure = leaning(params, 0.02), dict(drafts=3, least_confidence=0.5)
    for sampling in (Sampling(), Sampling(0.6, top_k=30)):
        expected, sizes = generate(given, 3, sampling=sampling)
        drawn, more = generate(given, sampling=sampling, **unsure)
        assert drawn == expected and max(more) > 1 and len(more) > len(sizes)
        if sampling.greedy:
            with Engine.of(given, OF_ONE, SIZE, policy=None, chunk_tokens=16, **unsure) as engine:
                asked = [Prompt(tokens=tokens, max_new_tokens=NEW) for tokens in PROMPTS]
                assert [samples[0].tokens for samples in engine.run(asked)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("least", [0.0, 0.3])  # of the first drafts all are surer, of the second some are not
def test_steps_by_the_standard_rule_draw_from_the_target(params, least) -> None:
    """The first two tokens of 20,480 requests, by whole steps: chi-square against the model without a cache.

    Also if drafts end before one of which the head is unsure.
    """
    given, batch, calls = leaning(params, 0.3), 64, 320
    layout, size = OF_ONE, CacheSize(batch, batch, 1)
    manager, cache = KVCacheManager(layout, size), init_cache(layout, size)
    requests = [manager.admit_request(TEXT[:5]) for _ in range(batch)]
    plan = manager.plan_step([(request, 5) for request in requests[:batch]])
    call = jax.jit(functools.partial(model.draft_step, width=2, acceptance="standard", least_confidence=least))
    sampling = Sampling(0.8, top_k=4)
    rows = SamplingRows.of([dataclasses.replace(sampling, seed=0)] * plan.num_seqs)
    tokens, none = manager.plan_tokens(plan), np.zeros(plan.num_seqs, np.int32)
    _, _, cache = call(given, cache, plan.pack(), tokens, none, sampling=rows)
    for request in requests:
        request.tokens += [TEXT[5], 0, 0]
    plan = manager.plan_step([(request, 3) for request in requests])
    tokens, drafts = np.full(plan.num_tokens, TEXT[5], np.int32), np.where(plan.seq_slot > 0, 2, 0).astype(np.int32)
    shares = {}

    def share(*before: int) -> np.ndarray:
        if before not in shares:
            logits = (
                np.asarray(model.forward_uncached(ONE, given, np.array([*TEXT[:6], *before])), np.float64)[-1] / 0.8
            )
            kept = np.where(logits >= np.sort(logits)[-4], np.exp(logits - logits.max()), 0)
            shares[before] = kept / kept.sum()
        return shares[before]

    rng, found, kept_of_all = np.random.default_rng(0), np.zeros((32, 32)), 0
    packed, live = plan.pack(), np.flatnonzero(plan.seq_slot > 0)
    for number in range(calls):
        seeds = range(number * plan.num_seqs, (number + 1) * plan.num_seqs)
        rows = SamplingRows.of([dataclasses.replace(sampling, seed=seed) for seed in seeds])
        drawn, kept, _ = call(given, cache, packed, tokens, drafts, sampling=rows)
        for pair, count in zip(np.asarray(drawn.tokens)[live], np.asarray(kept)[live], strict=True):
            second = pair[1] if count > 1 else rng.choice(32, p=share(int(pair[0])))
            found[pair[0], second] += 1
            kept_of_all += count - 1
    expected = calls * batch * np.stack([share()[x] * (share(x) if share()[x] else np.zeros(32)) for x in range(32)])
    there = expected > 0
    free, off = there.sum() - 1, ((found - expected)[there] ** 2 / expected[there]).sum()
    assert found.sum() == calls * batch >= 20_000 and not found[~there].any()
    assert off < free + 5 * (2 * free) ** 0.5 and 0 < kept_of_all < 2 * calls * batch


def test_drafts_that_are_not_possible(params) -> None:
    wide = CacheLayout(ONE, "f32", "f32", block_tokens=8, draft_tokens=6, include_drafts=True)
    size = CacheSize(2, 1, 1)
    manager, cache = KVCacheManager(wide, size), init_cache(wide, size)
    plan = manager.plan_step([])
    tokens, drafts = np.zeros(plan.num_tokens, np.int32), np.zeros(plan.num_seqs, np.int32)
    with pytest.raises(ShapeError, match="drafts of 6 tokens by a head whose blocks have 5 rows"):
        model.draft_step(params, cache, plan, tokens, drafts, 6)
    backbone = {name: value for name, value in params.items() if name != "mtp"}
    with pytest.raises(ShapeError, match="the parameters have no DSpark stages"):
        model.draft_step(backbone, cache, plan, tokens, drafts, 2)
    bare = CacheLayout(ONE, "f32", "f32", block_tokens=8, draft_tokens=5)
    with pytest.raises(ShapeError, match="the cache has no DSpark stages"):
        model.draft_step(params, init_cache(bare, size), plan, tokens, drafts, 2)
    with pytest.raises(ShapeError, match="no MTP layer: it drafts with DSpark's stages"):
        model.mtp_forward(params, cache, plan, tokens)
    for least in (1.5, -0.1, float("nan"), "high", True):
        with pytest.raises(ShapeError, match="least_confidence must be a number from 0 to 1, got "):
            model.draft_step(params, cache, plan, tokens, drafts, 2, least_confidence=least)
    for drafting, problem in (
        (dict(drafts=2, least_confidence=1.5), "least_confidence must be a number from 0 to 1, got 1.5"),
        (dict(drafts=2, acceptance="best"), "acceptance is coupled or standard, got 'best'"),
        (dict(least_confidence=0.5), "least_confidence=0.5: it is of drafts that DSpark's stages make"),
    ):
        with pytest.raises(PlanError, match=problem):
            model.generate(params, cache, manager, [[1]], max_new_tokens=2, **drafting)
    with pytest.raises(PlanError, match="drafts=6: a block of the model's DSpark stages has 5"):
        model.generate(params, cache, manager, [[1]], max_new_tokens=2, drafts=6)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "pool"), [((1, 2), False), ((2, 1), False), ((1, 2), True)])
def test_a_mesh_drafts_as_one_device_does(params, shape, pool) -> None:
    """Heads, requests or blocks over two devices, loops of two steps: the tokens of no drafts at all."""
    given, split = leaning(params, 0.02), model.Split(*shape)
    mesh, expected = split.mesh(), generate(given)[0]
    layout, size = OF_ONE, SIZE
    axis = dict(pool_axis="tensor") if pool else {}
    size = dataclasses.replace(SIZE, num_blocks=12, pool_ranks=2) if pool else SIZE
    shards = shape[0]
    cache = init_cache(layout, size, sharding=cache_sharding(layout, mesh, **axis))
    managers = [KVCacheManager(layout, size) for _ in range(shards)]
    sizes = []
    drawn, _ = model.generate(
        model.shard_params(ONE, given, mesh),
        cache,
        managers if shards > 1 else managers[0],
        PROMPTS,
        max_new_tokens=NEW,
        chunk_tokens=16,
        drafts=3,
        decode_steps=2,
        on_step=lambda brought: sizes.extend(len(tokens) for tokens in brought.tokens.values() if tokens),
    )
    assert drawn == expected and 4 < max(sizes) <= 8
