"""`generate(drafts=)`: the tokens of decoding without drafts, greedy and drawn."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config, cache_sharding, init_cache, model
from dsv4_jax.errors import PlanError
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import CachePolicy, KVCacheManager, SnapshotPlacement, StepShape
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence
from dsv4_jax.model.ahead import moved
from dsv4_jax.model.sampling import Sampling, SamplingRows, bias_rows, distribution, draw, sample
from dsv4_jax.model.speculative import accept, accept_standard

from . import test_mtp
from .feeding import V4_WIDTHS, feed, text_tokens
from .test_mtp import HCA, TEXT

CFG = dataclasses.replace(test_mtp.CFG, layer_types=(HCA,))  # all kinds are in test_mtp
LAYOUT = CacheLayout(CFG, "f32", "f32", block_tokens=8, draft_tokens=2, include_drafts=True)
SIZE = CacheSize(20, 2, 8, num_snapshots=12)
POLICY = CachePolicy(snapshots=SnapshotPlacement(every=1))
# More prompts than slots, one longer than a chunk, one of a single token, two equal ones.
PROMPTS = [TEXT[:19], TEXT[20:25], TEXT[:1], TEXT[20:25]]
NEW = 21


def leaning(params: model.Params, strength: float) -> model.Params:
    """The same model with what blocks write made this much weaker, and an MTP layer that hears the token alone.

    At 0 the next token depends on the last one only, and the MTP layer says what the backbone will.
    """

    def quiet(layer: model.Params) -> model.Params:
        ffn = layer["ffn"] | {
            name: layer["ffn"][name] | {"down": layer["ffn"][name]["down"] * strength} for name in ("experts", "shared")
        }
        return layer | {"attn": layer["attn"] | {"wo_b": layer["attn"]["wo_b"] * strength}, "ffn": ffn}

    (mtp,) = map(quiet, params["mtp"])
    hidden, dtype = params["embed"].shape[1], params["embed"].dtype
    mtp |= {"e_proj": jnp.eye(hidden, dtype=dtype), "h_proj": jnp.zeros((hidden, hidden), dtype)}
    mtp |= {"enorm": jnp.ones(hidden)}
    mtp |= {name: params[name] for name in ("hc_head", "norm")}
    return params | {"layers": tuple(map(quiet, params["layers"])), "mtp": (mtp,)}


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init_params(CFG, seed=1, drafts=True)


def generate(params, prompts=PROMPTS, *, cache=None, manager=None, **options):
    """(What `model.generate` gives, how many tokens came at once.) Afterwards nothing may be held."""
    manager = KVCacheManager(LAYOUT, SIZE, policy=POLICY) if manager is None else manager
    cache, sizes = init_cache(LAYOUT, SIZE) if cache is None else cache, []
    options = dict(max_new_tokens=NEW, chunk_tokens=16) | options
    options["on_step"] = lambda brought: sizes.extend(len(tokens) for tokens in brought.tokens.values() if tokens)
    drawn, cache = model.generate(params, cache, manager, prompts, **options)
    manager.check_integrity()
    assert not manager.requests and not any(leaf.is_deleted() for leaf in cache.arrays.values())
    return drawn, sizes, cache


@pytest.mark.parametrize(
    ("strength", "sampling", "least", "most"),
    [
        (None, Sampling(), 1.0, 1.3),
        (0.0, Sampling(), 2.5, 3.0),
        (0.02, Sampling(), 1.4, 2.5),
        (0.02, Sampling(0.6, top_k=30, top_p=0.98, logit_bias=dict.fromkeys(range(0, 32, 2), 0.75)), 1.1, 2.9),
        (0.0, Sampling(logit_bias=dict.fromkeys(range(16), -100)), 2.5, 3.0),
    ],
)
def test_output_is_that_without_drafts(params, strength, sampling, least, most) -> None:
    """With guesses that are mostly wrong, always right, and right now and then."""
    given, options = params if strength is None else leaning(params, strength), dict(sampling=sampling, seed=11)
    expected, _, _ = generate(given, **options)
    drawn, sizes, _ = generate(given, drafts=2, **options)
    assert drawn == expected
    if sampling.logit_bias:
        assert drawn != generate(given, **options | dict(sampling=dataclasses.replace(sampling, logit_bias=())))[0]
    # The first token of each is drawn by the step that ends its prompt.
    per_step = (sum(sizes) - len(PROMPTS)) / (len(sizes) - len(PROMPTS))
    assert sum(sizes) == NEW * len(PROMPTS) and max(sizes) <= 3 and least <= per_step <= most, per_step


@pytest.mark.slow
def test_a_mesh_drafts_as_one_device_does(params) -> None:
    """Heads and words of the output matrix over two devices, loops of three steps: the tokens of no drafts at all."""
    given, mesh = leaning(params, 0.02), model.Split(1, 2).mesh()
    cache = init_cache(LAYOUT, SIZE, sharding=cache_sharding(LAYOUT, mesh))
    expected, _, _ = generate(given)
    drawn, at_once, _ = generate(model.shard_params(CFG, given, mesh), cache=cache, drafts=2, decode_steps=3)
    assert drawn == expected and 5 < max(at_once) <= 9


RULES = ("all", "by the first", "by the second")


@jax.jit
def drawn_pairs(
    p: list[jax.Array],
    q: list[jax.Array],
    rows: SamplingRows,
    place: jax.Array,
    rule: jax.Array,
    biases: Any,
) -> tuple[jax.Array, jax.Array]:
    """(Two tokens of each row as one number, how many it kept), of which `RULES` says when drafts are cut off."""
    count, vocab = len(place), p[0].shape[-1]
    first = distribution(jnp.broadcast_to(q[0], (count, vocab)), rows, biases=biases)
    x = draw(first, rows, place)
    second = distribution(q[1][x], rows, biases=biases)
    y = draw(second, rows, place + np.int32(1))
    logits = [jnp.broadcast_to(p[0], (count, vocab)), p[1][x], p[2][x * vocab + y]]
    drafts = jnp.stack([jnp.full_like(x, 2), 1 + x % 2, 1 + y % 2])[rule]
    shares = jnp.stack([first, second], 1)
    drawn, kept = accept_standard(
        jnp.stack(logits, 1), jnp.stack([x, y], 1), shares, drafts, rows, place, biases=biases
    )
    # A second token that this step has not drawn is drawn by the next one, which knows of no draft.
    then = distribution(p[1][drawn.tokens[:, 0]], rows, biases=biases)
    after = draw(then, rows, place + np.int32(1))
    return jnp.where(kept > 1, drawn.tokens[:, 1], after) + np.int32(vocab) * drawn.tokens[:, 0], kept


def by_the_standard_rule(setting: Sampling, rule: str, count: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(How often each pair of tokens came, how often it should, how many drafts were kept of two), of so many rows."""
    rng, vocab = np.random.default_rng(3), 6
    p, q = (
        [np.float32(rng.normal(0, 0.7, (vocab,) * (1 + k + 1))).reshape(-1, vocab) for k in range(-1, 2)] for _ in "pq"
    )
    q = [near + np.float32(0.7) * (far - near) for near, far in zip(p, q, strict=True)]
    rows = SamplingRows.of([dataclasses.replace(setting, seed=seed) for seed in range(count)])
    biases = bias_rows([setting] * count) if setting.logit_bias else None
    added = np.zeros(vocab, np.float32)
    for token, value in setting.logit_bias:
        added[token] = value
    chosen = jnp.int32(RULES.index(rule))
    pairs, kept = drawn_pairs(p, q, rows, jnp.zeros(count, jnp.int32) + np.int32(9), chosen, biases)
    of_all = SamplingRows.of([dataclasses.replace(setting, seed=0)] * (1 + vocab))
    shares = np.asarray(distribution(np.concatenate([p[0], p[1]]) + added, of_all), np.float64)
    expected = count * (shares[0][:, None] * shares[1:]).reshape(-1)
    return np.bincount(pairs, minlength=vocab**2), expected, float(kept.mean()) - 1


def unlikely(found: np.ndarray, expected: np.ndarray) -> bool:
    """By chi-square, five standard deviations off; also if anything came that cannot."""
    there = expected > 0
    free, off = there.sum() - 1, ((found - expected)[there] ** 2 / expected[there]).sum()
    return bool(found[~there].any() or off > free + 5 * (2 * free) ** 0.5)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Sampling(1.0), marks=pytest.mark.slow),
        Sampling(0.8, top_k=4, top_p=0.9, min_p=0.05, logit_bias={0: 0.6, 3: -0.9}),
    ],
)
def test_the_standard_rule_draws_from_the_target(setting) -> None:
    """Also if drafts are cut off by what is known before them. Who looks at the draft itself draws otherwise."""
    for rule in RULES:
        found, expected, kept = by_the_standard_rule(setting, rule, 24_000)
        assert unlikely(found, expected) == (rule == "by the second") and 0.3 < kept < 1.9, rule


def test_a_stop_token_within_what_a_step_keeps(params) -> None:
    given = leaning(params, 0.0)
    plain, _, _ = generate(given)
    stop = plain[0][5]
    expected = [drawn[: drawn.index(stop)] if stop in drawn else drawn for drawn in plain]
    assert generate(given, drafts=2, stop_tokens={stop})[0] == expected


def test_prompts_start_at_what_others_left_behind(params) -> None:
    """Also at what a step that others drafted in has filled."""
    given, manager, cache = leaning(params, 0.0), KVCacheManager(LAYOUT, SIZE, policy=POLICY), None
    prompts, hits = PROMPTS, []
    for _ in range(2):
        expected, _, _ = generate(given, prompts)
        drawn, _, cache = generate(given, prompts, manager=manager, cache=cache, drafts=2)
        assert drawn == expected
        hits.append(sum(manager.stats().cache.counters.hit_tokens.values()))
        prompts = [prompt + more for prompt, more in zip(prompts, drawn, strict=True)]
    assert hits[1] > hits[0] + 16


@pytest.mark.slow
def test_draws_do_not_depend_on_company(params) -> None:
    given, options = leaning(params, 0.02), dict(drafts=2, sampling=Sampling(temperature=0.9), seed=7)
    together, sizes, _ = generate(given, **options)
    assert generate(given, **options)[0] == together and 1 < max(sizes) <= 3
    assert generate(given, **options | dict(drafts=0))[0] == together, "drafts change nothing of what is drawn"
    looped, sizes, _ = generate(given, decode_steps=3, **options)
    assert looped == together and 3 < max(sizes) <= 9
    assert generate(given, **options | dict(seed=8))[0] != together
    assert together[1] != together[3], "equal prompts draw with keys of their own"
    assert generate(given, PROMPTS[:1], **options)[0] == together[:1]
    uncut = KVCacheManager(LAYOUT, SIZE)  # another cuts prompts at blocks, and the last token of this one comes alone
    prompt = [TEXT[:9]]
    assert generate(given, prompt, manager=uncut, **options)[0] == generate(given, prompt, **options)[0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict(drafts=-1), "drafts must be an integer of at least 0, got -1"),
        (dict(drafts=3), "drafts=3: the layout has include_drafts=True and draft_tokens=2"),
        (dict(drafts=2, chunk_tokens=5), "number of slots 2, times 3 with drafts"),
        (dict(drafts=2, params={"mtp": ()}), "drafts=2: the parameters have no MTP layer"),
    ],
)
def test_drafts_that_are_not_possible(params, options, problem) -> None:
    with pytest.raises(PlanError, match=problem):
        generate(**dict(params=params) | options)


def test_a_plan_at_other_places_is_what_a_host_plans() -> None:
    """Positions, and what completes entries of any ratio, as sets: lists may have room for more."""
    rng, made_for, ended = np.random.default_rng(0), jax.jit(moved, static_argnums=(1, 3)), 0
    for layout in (LAYOUT, CacheLayout(test_mtp.CFG, "f32", "f32", draft_tokens=7)):
        for _ in range(20):
            counts, first = rng.integers(1, 9, 3), rng.integers(0, 300, 3)
            there = first + rng.integers(0, 50, 3)
            rows = (zip((1, 2, 3), starts.tolist(), counts.tolist(), strict=True) for starts in (first, there))
            here, wanted = ([StepSequence(*row) for row in each] for each in rows)
            shape = StepShape(4, 26, 26, 26, 8, columns=90, table_entries=0, history=True)
            one, other = build_plan(layout, here, shape, steps=9), build_plan(layout, wanted, shape)
            made = made_for(one, layout, jnp.asarray([*there, 0], jnp.int32), 8)
            fit = there + counts <= first + 9 * counts
            # The host lists a sequence's only token whether it completes an entry or not, as it may be advanced.
            completes = np.append((other.token_position + 1) % layout.flush_ratio == 0, True)
            flushes = np.where(completes[other.flush_tokens], other.flush_tokens, 26)
            other = other.only(np.array([*fit, False]))._replace(flush_tokens=flushes)
            ended += int((~fit).sum())
            for field in ("seq_slot", "token_slot"):
                np.testing.assert_array_equal(getattr(made, field), getattr(other, field))
            other = other._replace(token_position=other.token_position * (other.token_slot > 0))
            np.testing.assert_array_equal(made.seq_start, other.seq_start)
            np.testing.assert_array_equal(made.token_position, other.token_position)
            for field in ("flush_tokens", "group_tokens"):
                one, two = (
                    np.asarray(getattr(plan, field)).reshape(-1, *getattr(plan, field).shape[1:] or (1,))
                    for plan in (made, other)
                )
                sets = [sorted([t for t in row.tolist() if t < 26] for row in lists) for lists in (one, two)]
                assert [row for row in sets[0] if row] == [row for row in sets[1] if row], field
    assert ended > 9


def test_a_step_copies_no_pool(params) -> None:
    """It passes over the MTP layer's window once for each draft and once more, in place."""
    size = CacheSize(20_000, 2_000, 8)
    cache, manager = jax.eval_shape(lambda: init_cache(LAYOUT, size)), KVCacheManager(LAYOUT, size)
    plan = manager.plan_step([(manager.admit_request(), 3)])
    tokens, drafts = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (plan.num_tokens, plan.num_seqs))
    step = jax.jit(model.draft_step, donate_argnames="cache", static_argnames="width")
    compiled = step.lower(params, cache, plan.pack(), tokens, drafts, width=2).compile()
    memory, pools = compiled.memory_analysis(), [leaf for leaf in LAYOUT.leaves if leaf.scope != "table"]
    assert memory.alias_size_in_bytes == LAYOUT.total_bytes(size)
    assert memory.temp_size_in_bytes < min(LAYOUT.leaf_bytes(leaf, size) for leaf in pools)


def test_all_that_may_be_asked_for(params) -> None:
    """Shapes of a step's fields, and of a loop's."""
    cache, manager = jax.eval_shape(lambda: init_cache(LAYOUT, SIZE)), KVCacheManager(LAYOUT, SIZE)
    shape = manager.pinned_shape(2, 6, steps=4)
    plan = manager.plan_step([(manager.admit_request(), 3) for _ in range(2)], steps=4, shape=shape).pack()
    counts = jnp.zeros((SIZE.slot_units, CFG.vocab_size), jnp.int32)
    state: Any = dict(sampling=SamplingRows.of([Sampling()] * 2), counts=counts)
    asked: Any = dict(width=2, logprobs=True, top=4, routed_experts=True)
    fed, drafts, masks = (np.zeros(shape, np.int32) for shape in (6, 2, (2, 3, CFG.vocab_size // 32)))
    step = functools.partial(model.draft_step, **asked)
    loop = functools.partial(model.draft_loop, num_steps=4, **asked)
    one, kept, _ = jax.eval_shape(step, params, cache, plan, fed, drafts, masks=masks.astype(np.uint32), **state)
    several, each, _ = jax.eval_shape(loop, params, cache, plan, drafts, drafts, **state)
    fields = [(2, 3), (2, 3), (2, 3, 4), (2, 3, 4), (6, CFG.num_layers, CFG.num_experts_per_tok)]
    assert [x.shape for x in one] == [*fields, counts.shape] and kept.shape == (2,)
    assert [x.shape for x in several] == [*((4, *field) for field in fields), counts.shape] and each.shape == (4, 2)


# The rule.

COUNT, WORDS = 20_000, 16
DRAFT = jax.jit(lambda logits, rows, at: sample(logits, rows, at).tokens)


def verified(target: np.ndarray, draft: np.ndarray, how: Sampling, drafts: int = 2, **state: Any) -> Any:
    """What is sampled after COUNT known tokens, [COUNT, 3], of logits [3, WORDS], with guesses from [2, WORDS]."""
    rows, at = SamplingRows.of([how] * COUNT), np.arange(COUNT, dtype=np.int32) * 5
    each = [np.broadcast_to(np.float32(logits), (COUNT, WORDS)) for logits in draft]
    guesses = jnp.stack([DRAFT(logits, rows, at + np.int32(i)) for i, logits in enumerate(each)], 1)
    logits = np.broadcast_to(np.float32(target), (COUNT, 3, WORDS))
    drawn, kept = jax.jit(accept)(logits, guesses, np.full(COUNT, drafts, np.int32), rows, at, **state)
    return np.asarray(drawn.tokens), np.asarray(kept), np.asarray(guesses)


def chances(logits: np.ndarray) -> np.ndarray:
    each = np.exp(logits - logits.max(-1, keepdims=True))
    return each / each.sum(-1, keepdims=True)


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_a_draft_is_kept_as_often_as_noise_in_common_allows(spread) -> None:
    """And what is drawn does not depend on who drafts: the target draws the same with all wrong or with none."""
    rng, how = np.random.default_rng(0), Sampling(1.0, seed=3)
    target, draft = rng.normal(0, spread, (3, WORDS)), rng.normal(0, spread, (2, WORDS))
    draft = (draft + 2 * target[:2]) / 3
    drawn, kept, guesses = verified(target, draft, how)
    for logits, count in ((draft[::-1], 2), (draft, 0), (draft, 1)):
        others, fewer, _ = verified(target, logits, how, count)
        np.testing.assert_array_equal(others, drawn)
        assert fewer.max() == count + 1
    right = np.cumprod(drawn[:, :2] == guesses, 1).sum(1)
    np.testing.assert_array_equal(kept, right + 1)
    p, q = chances(target[0]), chances(draft[0])
    distance = np.abs(p - q).sum() / 2
    rate, error = (right > 0).mean(), 4 * (0.25 / COUNT) ** 0.5
    assert (1 - distance) / (1 + distance) - error <= rate <= 1 - distance + error
    wanted, seen = COUNT * chances(target), [np.bincount(drawn[:, i], minlength=WORDS) for i in range(3)]
    common = wanted > 5
    assert ((seen - wanted)[common] ** 2 / wanted[common]).sum() < 80  # one in a thousand, 45 degrees


def test_equal_distributions_are_always_right() -> None:
    """Filtered alike, too: any noise but the same would do worse."""
    logits = np.random.default_rng(1).normal(0, 2, (3, WORDS))
    for how in (Sampling(1.0, seed=1), Sampling(0.7, 5, 0.9, seed=2), Sampling()):
        _, kept, _ = verified(logits, logits[:2], how)
        assert (kept == 3).all()


def test_penalties_biases_and_masks_of_drafts() -> None:
    """A place has the counts of what was drafted before it, a mask of its own, and the biases of its sequence."""
    logits = np.zeros((3, WORDS))
    logits[:, 5], logits[:, 6] = 3, 2
    how = Sampling(presence_penalty=2.0)
    masks = np.full((COUNT, 3, 1), 0xFFFF, np.uint32)
    masks[:, 2] = 1 << 9
    state = dict(counts=np.zeros((COUNT, WORDS), np.int32), masks=masks)
    drawn, kept, _ = verified(logits, logits[:2], how, **state)
    # Both drafts are token 5, as if nothing were counted: the second is wrong.
    assert (drawn == [5, 6, 9]).all() and (kept == 2).all()
    biases = bias_rows([Sampling(logit_bias={7: 2.5}), Sampling(logit_bias={7: 3.5})] * (COUNT // 2))
    drawn, kept, _ = verified(logits, logits[:2], how, biases=biases, **state)
    assert (drawn[::2] == [5, 7, 9]).all() and (kept[::2] == 2).all()
    assert (drawn[1::2] == [7, 7, 9]).all() and (kept[1::2] == 1).all()


# In the formats and widths of the released models.


def check_greedy(cfg: DSV4Config, drafts: int) -> float:
    """Every token is the likeliest there, but for what one shape's rounding differs from another's.

    Returns the tokens of a step: with so small a vocabulary random guesses are right now and then.
    """
    params = model.init_params(cfg, 2, "released", packed=True, drafts=True)
    layout = CacheLayout(cfg, draft_tokens=drafts, include_drafts=True)
    prompts, new = [(text_tokens(length) % cfg.vocab_size).tolist() for length in (70, 3, 41, 1)], 40
    size, sizes = CacheSize(8, 4, 2), []
    drawn, _ = model.generate(
        params,
        init_cache(layout, size),
        KVCacheManager(layout, size),
        prompts,
        max_new_tokens=new,
        drafts=drafts,
        chunk_tokens=64,
        on_step=lambda step: sizes.extend(map(len, filter(None, step.tokens.values()))),
    )
    for prompt, answer in zip(prompts, drawn, strict=True):
        text = np.pad(np.array(prompt + answer, np.int32), (0, 128 - len(prompt) - new))
        logits = feed(cfg, params, text, [64], kv_format="fp8", index_format="fp4")[len(prompt) - 1 :][:new]
        behind = logits.max(1) - np.take_along_axis(logits, np.array(answer)[:, None], 1)[:, 0]
        assert (behind <= 0.05 * logits.std()).all(), (behind.max(), logits.std())
    return (sum(sizes) - len(prompts)) / (len(sizes) - len(prompts))


@pytest.mark.gpu
def test_greedy_output_on_the_gpu() -> None:
    """V4's attention widths, so that every kernel takes part."""
    cfg = DSV4Config.tiny(
        **V4_WIDTHS,
        hidden_size=256,
        q_lora_rank=128,
        o_lora_rank=64,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_experts_per_tok=6,
        num_mtp_layers=1,
        vocab_size=8,
        layer_types=(test_mtp.CSA, HCA),
    )
    assert check_greedy(cfg, drafts=2) > 1
