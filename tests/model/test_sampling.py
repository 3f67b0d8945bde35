"""Draws against a float64 oracle that sorts, and what one executable makes of every request's settings."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsv4_jax.checks import MAX_BIASES
from dsv4_jax.errors import RequestError, ShapeError
from dsv4_jax.model import Sampling, SamplingRows
from dsv4_jax.model import sampling as samplers
from dsv4_jax.model.sampling import IN_PROMPT, bias_rows, log_probabilities, token_counts
from dsv4_jax.ops.sample_tokens import noise, threefry

from ..ops.op_test import OpTest

VOCAB, MANY = 37, 4000
WORDS = samplers.mask_words(VOCAB)
sample = jax.jit(samplers.sample, static_argnames=("logprobs", "top", "implementation"))
noise_of = jax.jit(lambda rows, at, vocab: noise(SamplingRows.unpack(rows, len(at)), at, vocab), static_argnums=2)


def packed_mask(allowed: np.ndarray) -> np.ndarray:
    """[..., vocab] bool as words, least significant bit first."""
    bits = np.zeros((*allowed.shape[:-1], 32 * samplers.mask_words(allowed.shape[-1])), np.uint8)
    bits[..., : allowed.shape[-1]] = allowed
    return np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def penalised(logits: np.ndarray, how: Sampling, counts: np.ndarray) -> np.ndarray:
    """As vLLM does it: repetition of what is in prompt or output, then the two others of what is in the output."""
    out = logits.astype(np.float32)
    drawn, seen = counts & (IN_PROMPT - 1), counts > 0
    rate = np.float32(how.repetition_penalty)
    out = np.where(seen, np.where(out > 0, out / rate, out * rate), out)
    out = out - np.float32(how.frequency_penalty) * drawn.astype(np.float32)
    return out - np.float32(how.presence_penalty) * (drawn > 0).astype(np.float32)


def kept(scaled: np.ndarray, how: Sampling) -> tuple[np.ndarray, float]:
    """Which tokens [vocab] all filters keep, and how far the nearest decision is from the other one."""
    scaled = scaled.astype(np.float64)
    ratio = np.exp(scaled - scaled.max())
    left = (ratio >= how.min_p) & np.isfinite(scaled)
    margin = np.abs(ratio - how.min_p)[ratio < 1].min(initial=1) if 0 < how.min_p < 1 else 1.0
    order = [i for i in np.lexsort((np.arange(len(scaled)), -scaled)) if left[i]]
    order = order[: how.top_k or None]
    chance = ratio[order] / ratio[order].sum()
    before = np.cumsum(chance) - chance
    if how.top_p < 1:
        margin = min(margin, np.abs(before[1:] - how.top_p).min(initial=1))
        order = [token for token, mass in zip(order, before, strict=True) if mass < how.top_p or not mass]
    return np.isin(np.arange(len(scaled)), order), margin


def oracle(
    logits: np.ndarray, how: Sampling, perturbation: np.ndarray, counts: Any = None, allowed: Any = None
) -> tuple[int, float]:
    """The token that a row [vocab] draws, and the margin of what is kept, by which rounding might decide."""
    logits = logits.astype(np.float32)
    for token, value in how.logit_bias:
        logits[token] += np.float32(value)
    if allowed is not None:
        logits = np.where(allowed, logits, -np.inf)
    if counts is not None:
        logits = penalised(logits, how, counts)
    if how.greedy:
        return int(logits.argmax()), 1.0
    scaled = logits / np.float32(how.temperature)
    stays, margin = kept(scaled, how)
    return int(np.where(stays, scaled + perturbation, -np.inf).argmax()), margin


# Logits on a grid, so that many are equal.
some_logits = st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB).map(lambda x: np.float32(x) / 4)
some_settings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, VOCAB, 10**12]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-3, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.5]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.75]),
    frequency_penalty=st.sampled_from([0.0, -0.25, 0.5]),
    seed=st.integers(-(2**63), 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.25, 0.0, 0.5, 100.0])),
)
few_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)
some_rows = st.lists(
    st.tuples(some_logits, some_settings, st.integers(0, 2**31 - 1), few_tokens, few_tokens, st.lists(st.booleans())),
    min_size=4,
    max_size=4,
)


class SamplingTest(OpTest):
    op = "sample_tokens"

    def sample(self, *args: Any, **asked: Any) -> samplers.Sampled:
        return sample(*args, **asked, implementation=self.implementation)

    def draws(self, how: Sampling, logits: np.ndarray) -> np.ndarray:
        """MANY draws from the same logits, each at a position of its own."""
        rows = np.broadcast_to(np.asarray(logits, np.float32), (MANY, len(logits)))
        packed = SamplingRows.of([dataclasses.replace(how, seed=0)] * MANY)
        state = dict(biases=bias_rows([how] * MANY)) if how.logit_bias else {}
        return np.asarray(self.sample(rows, packed, np.arange(MANY, dtype=np.int32), **state).tokens)

    @given(rows=some_rows)
    @settings(max_examples=150)
    def test_each_row_draws_what_a_sort_in_float64_draws(self, rows) -> None:
        """Filters, penalties, biases, masks and temperatures mixed in one executable."""
        logits, hows, at, prompts, outputs, bits = zip(*rows, strict=True)
        counts = np.stack([token_counts(p, o, VOCAB) for p, o in zip(prompts, outputs, strict=True)])
        allowed = np.ones((4, VOCAB), bool)
        for i, row in enumerate(bits):
            allowed[i, : min(len(row), VOCAB - 1)] = row[: VOCAB - 1]
        position, packed = np.array(at, np.int32), SamplingRows.of(hows)
        perturbation = np.asarray(noise_of(packed, position, VOCAB))
        each = [oracle(*row) for row in zip(logits, hows, perturbation, counts, allowed, strict=True)]
        wanted, margins = zip(*each, strict=True)
        assume(min(margins) > 1e-5)
        state = dict(masks=packed_mask(allowed), biases=bias_rows(hows)[:, :, :VOCAB], counts=counts)
        drawn = self.sample(np.stack(logits), packed, position, **state)
        assert drawn.tokens.tolist() == [*wanted]
        assert drawn.tokens.dtype == np.int32 and drawn.logprobs is None and drawn.top_ids is None

    @pytest.mark.parametrize("vocab", [4_097, 129_280])
    def test_a_large_vocabulary(self, vocab) -> None:
        """As V4's: sums of so many terms, and rounds in which nothing is kept."""
        rng = np.random.default_rng(0)
        logits = rng.normal(0, 2, (6, vocab)).astype(np.float32)
        filters = [dict(top_p=0.3), dict(top_k=40), dict(min_p=0.2), dict(top_k=1), dict(top_k=500, top_p=0.5), {}]
        hows = [Sampling(1.0, **more, seed=i) for i, more in enumerate(filters)]
        position, packed = np.arange(6, dtype=np.int32), SamplingRows.of(hows)
        perturbation = np.asarray(noise_of(packed, position, vocab))
        each = [oracle(*row) for row in zip(logits, hows, perturbation, strict=True)]
        wanted, margins = zip(*each, strict=True)
        assert self.sample(logits, packed, position).tokens.tolist() == [*wanted] and min(margins) > 1e-7

    def test_draws_have_the_distribution_of_the_settings(self) -> None:
        """Chi-square of each, at one in a thousand."""
        logits = np.random.default_rng(3).normal(0, 1, 11)
        biased = {0: -3.5, 4: 1.25, 7: 0.5, 10: -100.0}
        for how, degrees in (
            (Sampling(0.7), 29.6),
            (Sampling(1.3, top_k=5), 18.5),
            (Sampling(1.0, top_p=0.8), 29.6),
            (Sampling(0.7, logit_bias=biased), 29.6),
            (Sampling(1.3, top_k=5, logit_bias=biased), 18.5),
        ):
            added = np.zeros(11)
            added[[token for token, _ in how.logit_bias]] = [value for _, value in how.logit_bias]
            scaled = (logits + added) / how.temperature
            chance = softmax(np.where(kept(scaled, how)[0], scaled, -np.inf))
            seen, some = np.bincount(self.draws(how, logits), minlength=11), chance > 1e-30
            assert not seen[~some].any()
            assert (((seen - MANY * chance) ** 2)[some] / (MANY * chance)[some]).sum() < degrees, how

    def test_top_p_that_is_reached_exactly_keeps_no_further_token(self) -> None:
        """Of four equals two reach 1/2: the first ones, in float32 exactly."""
        for top_p, count in ((1e-40, 1), (0.25, 1), (0.5, 2), (0.50001, 3), (0.75, 3), (1.0, 4)):
            assert set(self.draws(Sampling(1.0, top_p=top_p), np.zeros(4)).tolist()) == set(range(count))
        assert set(self.draws(Sampling(1.0, min_p=1.0), np.array([0.0, 1, 1, 0.5])).tolist()) == {1, 2}
        assert set(self.draws(Sampling(1.0, top_k=2), np.array([0.0, 1, 1, 1])).tolist()) == {1, 2}

    def test_a_draw_depends_on_its_own_row_only(self) -> None:
        rng = np.random.default_rng(1)
        logits = rng.normal(0, 2, (5, VOCAB)).astype(np.float32)
        biased = {token: 0.1 * token for token in range(1, 33)}
        hows = [Sampling(0.8, seed=1, logit_bias={3: 2.5}), Sampling(logit_bias={5: 7.25})]
        hows += [Sampling(1.0, 4, 0.9, seed=1), Sampling(1.5, min_p=0.1, seed=-3, logit_bias=biased)]
        position, packed = np.array([4, 9, 4, 2**30, 0], np.int32), SamplingRows.of([*hows, None])
        biases = bias_rows([*hows, None])
        together = self.sample(logits, packed, position, biases=biases, logprobs=True, top=3)
        order = np.array([3, 0, 4, 2, 1])
        given = (x[order] for x in (logits, packed, position))
        shuffled = self.sample(*given, biases=biases[order], logprobs=True, top=3)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[order], y), together, shuffled)
        for i in range(5):
            each = (x[i : i + 1] for x in (logits, packed, position))
            biased = bias_rows([*hows, None][i : i + 1]) if i in (0, 1, 3) else None
            alone = self.sample(*each, biases=biased, logprobs=True, top=3)
            jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i : i + 1], y), together, alone)

    @pytest.mark.parametrize(
        "how", [Sampling(1.0, seed=1), Sampling(1.0, 3, 0.5, seed=1), Sampling(1.0, min_p=0.5, seed=1)]
    )
    def test_what_is_not_finite_comes_to_an_end(self, how) -> None:
        logits = np.zeros((6, VOCAB), np.float32)
        logits[0], logits[1, 7], logits[2, 7], logits[3] = -np.inf, np.nan, np.inf, np.inf
        logits[4, 1:] = -np.inf
        drawn = np.asarray(self.sample(logits, SamplingRows.of([how] * 6), np.arange(6, dtype=np.int32)).tokens)
        assert drawn[[0, 2, 3, 4]].tolist() == [0, 7, 0, 0] and ((drawn >= 0) & (drawn < VOCAB)).all()


class TestSampling(SamplingTest):
    implementation = "xla"


def test_one_executable_for_all_settings() -> None:
    step = jax.jit(samplers.sample)
    for more in (
        {},
        dict(temperature=1.0),
        dict(temperature=0.5, top_p=0.9),
        dict(temperature=2.0, top_k=3, min_p=0.1),
    ):
        step(np.zeros((2, VOCAB), np.float32), SamplingRows.of([Sampling(**more, seed=1), None]), np.zeros(2, np.int32))
    assert step._cache_size() == 1


def test_without_settings_it_is_an_argmax() -> None:
    """The program of greedy steps has nothing else in it."""
    logits = jnp.array([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert sample(logits).tokens.tolist() == [1, 0]
    assert sample(logits, SamplingRows.of([Sampling()] * 2), np.zeros(2, np.int32)).tokens.tolist() == [1, 0]
    plain = jax.jit(lambda x: x.argmax(-1).astype(jnp.int32)).lower(logits).as_text()
    own = jax.jit(lambda x: samplers.sample(x).tokens).lower(logits).as_text()
    assert own == plain


# Noise


def test_threefry_is_the_published_one() -> None:
    """The test vectors of Random123 for 20 rounds."""
    cases = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, wanted in cases:
        made = threefry(*(jnp.asarray(word, jnp.uint32) for word in (*key, *counter)))
        assert tuple(map(int, made)) == wanted


def test_noise_is_of_seed_position_and_token_alone() -> None:
    rows = SamplingRows.of([Sampling(1.0, seed=seed) for seed in (5, 5, 6, 5 + 2**32)])
    one = np.asarray(noise_of(rows, np.array([3, 4, 3, 3], np.int32), VOCAB))
    assert len({row.tobytes() for row in one}) == 4
    other = np.asarray(noise_of(rows[:1], np.array([3], np.int32), 2 * VOCAB))
    np.testing.assert_array_equal(other[0, :VOCAB], one[0])
    many = np.asarray(noise_of(rows[:1], np.array([0], np.int32), 1_000_000)).astype(np.float64)
    assert np.isfinite(many).all()
    cdf = np.exp(-np.exp(-np.sort(many[0])))  # uniform, if it is Gumbel's
    assert np.abs(cdf - (np.arange(many.size) + 0.5) / many.size).max() < 1.95 / 1000  # Kolmogorov: one in a thousand


# Log-probabilities


def test_log_probabilities_are_raw() -> None:
    """Of the logits as they are, whatever is drawn of them, against float64."""
    rng, vocab = np.random.default_rng(2), 5_000
    logits = rng.normal(0, 5, (3, vocab)).astype(np.float32)
    allowed = rng.random((3, vocab)) < 0.5
    hows = [Sampling(1.0, seed=1), Sampling(0.5, 7, seed=1), Sampling()]
    drawn = sample(
        logits,
        SamplingRows.of(hows),
        np.arange(3, dtype=np.int32),
        masks=packed_mask(allowed).view(np.int32),
        logprobs=True,
        top=4,
    )
    tokens = np.asarray(drawn.tokens)
    assert allowed[np.arange(3), tokens].all()
    biases = bias_rows(
        [dataclasses.replace(how, logit_bias={token: 3.0}) for how, token in zip(hows, tokens, strict=True)]
    )
    again = sample(
        logits,
        SamplingRows.of(hows),
        np.arange(3, dtype=np.int32),
        masks=packed_mask(allowed),
        biases=biases,
        logprobs=True,
        top=4,
    )
    jax.tree.map(np.testing.assert_array_equal, again, drawn)  # what won wins by more, and is told as likely as it was
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(drawn.logprobs, exact[np.arange(3), tokens], rtol=1e-6, atol=1e-6)
    best = np.argsort(-exact, 1, kind="stable")[:, :4]
    np.testing.assert_array_equal(drawn.top_ids, best)
    np.testing.assert_allclose(drawn.top_logprobs, np.take_along_axis(exact, best, 1), rtol=1e-6, atol=1e-6)
    whole = sample(logits[:, :3], top=9)  # more than there are
    assert whole.top_ids.shape == (3, 3)


def test_log_probabilities_have_the_same_bits_in_any_batch() -> None:
    logits = np.random.default_rng(4).normal(0, 5, (64, 3_001)).astype(np.float32)
    tokens = np.arange(64, dtype=np.int32) * 40
    call = jax.jit(log_probabilities, static_argnames="top")
    want = call(logits, tokens, top=2)
    blocks = jax.jit(lambda x, t: jax.lax.map(lambda row: log_probabilities(*row, top=2), (x, t)))
    for rows in (1, 2, 16):
        cut = (x.reshape(-1, rows, *x.shape[1:]) for x in (logits, tokens))
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.reshape(x.shape)), want, blocks(*cut))
    assert call(logits[:2], np.array([-1, 3], np.int32)).logprobs[0] == 0


# Settings


def test_a_row_is_made_once_a_request() -> None:
    how = Sampling(0.5, 3, 0.25, 0.125, 2.0, 1.0, -1.0, seed=-1)
    packed = SamplingRows.of([how, None, how])
    assert packed.shape == (3, 10) and packed.dtype == np.uint32 and how.row is how.row
    rows = SamplingRows.unpack(packed, 3)
    assert [x[0].item() for x in rows] == [0.5, 0.25, 0.125, 2.0, 1.0, -1.0, 3, True, 2, 2**32 - 1, 2**32 - 1]
    assert [x[1].item() for x in rows] == [0, 1, 0, 1, 0, 0, 0, False, 0, 0, 0]
    assert how == dataclasses.replace(how)
    with pytest.raises(RequestError, match=r"temperature 0\.5 needs a seed"):
        SamplingRows.of([Sampling(0.5)])
    assert SamplingRows.of([]).shape == (0, 10)


def test_biases_are_pairs_in_rows_of_few_sizes() -> None:
    how = Sampling(logit_bias={9: -0.5, 2: 100, 4: 0})
    assert how.logit_bias == ((2, 100.0), (9, -0.5)) and how == Sampling(logit_bias=[[9, -0.5], (np.int64(2), 100.0)])
    assert dataclasses.replace(how, seed=3).logit_bias == how.logit_bias and how.greedy and not how.penalised
    rows = bias_rows([None, how])
    assert rows.shape == (2, 2, 32) and rows.dtype == np.int32
    assert rows[1, 0, :2].tolist() == [2, 9] and rows[1, 1, :2].view(np.float32).tolist() == [100, -0.5]
    assert (rows[0, 0] > 2**31 - 33).all() and not rows[:, 1, 2:].any()
    most = Sampling(logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0))
    assert bias_rows([most, how]).shape == (2, 2, MAX_BIASES)
    # Tokens in no row change nothing, though the vocabulary is smaller than a row.
    logits = np.float32([[0, 1, 0.5], [0, 1, 0.5]])
    assert sample(logits, biases=bias_rows([None, Sampling(logit_bias={0: 1.5})])).tokens.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), 1e-45, "1", True, None]),
        ("top_k", [-1, 1.0, None, True]),
        ("top_p", [None, 0.0, 1.5, float("nan")]),
        ("min_p", [-0.1, 1.1, float("nan"), "0"]),
        ("repetition_penalty", [0.0, -1.0, float("inf"), float("nan"), None]),
        ("presence_penalty", [2.5, -2.5, float("nan"), "1"]),
        ("frequency_penalty", [2.5, -2.5, float("nan"), None]),
        ("seed", [1.5, 2**64, -(2**63) - 1, True]),
        ("logit_bias", [None, 5, "12", b"12", [1], [(1, 2, 3)], ["12"], {1: 1}.items, (x for x in [(1, 2)])]),
        ("logit_bias", [dict, np.array(5)]),
        ("logit_bias", [{1: value} for value in (100.5, -101, float("nan"), float("inf"), "1", True, None)]),
        ("logit_bias", [{token: 1.0} for token in (-1, 2**31, 1.5, "1", True, None)]),
        ("logit_bias", [[(1, 2.0), (1, 2.0)], dict.fromkeys(range(MAX_BIASES + 1), 1.0)]),
    ],
)
def test_impossible_settings_are_named(name, wrong) -> None:
    for value in wrong:
        with pytest.raises(RequestError, match=name):
            Sampling(**{name: value})


def test_masks_biases_and_counts_that_do_not_fit() -> None:
    logits, packed, at = np.zeros((2, VOCAB), np.float32), SamplingRows.of([Sampling()] * 2), np.zeros(2, np.int32)
    call = functools.partial(samplers.sample, logits, packed, at)
    for masks in (np.zeros((2, 1), np.uint32), np.zeros((1, WORDS), np.uint32), np.zeros((2, WORDS), np.float32)):
        with pytest.raises(ShapeError, match=r"masks are .*, expected uint32\[2, 2\]"):
            call(masks=masks)
    for biases in (np.zeros((2, 2), np.int32), np.zeros((1, 2, 4), np.int32), np.zeros((2, 2, 4), np.float32)):
        with pytest.raises(ShapeError, match=r"biases are .*, expected int32\[2, 2, n\]"):
            call(biases=biases)
    with pytest.raises(ShapeError, match=r"counts are int32\[1, 37\], expected int32\[2, 37\]"):
        call(counts=np.zeros((1, VOCAB), np.int32))
    with pytest.raises(ShapeError, match=r"sampling is uint32\[1, 10\], expected uint32\[2, 10\]"):
        samplers.sample(logits, packed[:1], at)
    with pytest.raises(RequestError, match="needs the positions"):
        samplers.sample(logits, packed)
    with pytest.raises(RequestError, match="counts are of penalties"):
        samplers.sample(logits, counts=np.zeros((2, VOCAB), np.int32))
