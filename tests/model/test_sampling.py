from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import RequestError
from dsv4_jax.model import Sampling
from dsv4_jax.model import sampling as samplers
from dsv4_jax.model.sampling import distribution

sample = jax.jit(samplers.sample, static_argnames="sampling")
ROWS, VOCAB = 4000, 11


def draws(sampling: Sampling, logits: np.ndarray, seed: int = 0) -> np.ndarray:
    """ROWS draws from the same logits, each with a key of its own."""
    keys = jax.random.split(jax.random.key(seed), ROWS)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None], (ROWS, VOCAB))
    return np.asarray(sample(rows, sampling, keys, jnp.zeros(ROWS, jnp.int32)))


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 1, VOCAB)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals():
    logits = jnp.array([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert sample(logits).tolist() == [1, 0]


def test_temperature_shapes_the_distribution(logits):
    counts = np.bincount(draws(Sampling(temperature=0.7), logits), minlength=VOCAB) / ROWS
    np.testing.assert_allclose(counts, softmax(logits / 0.7), atol=0.03)


def test_top_k_keeps_the_k_likeliest(logits):
    drawn = set(draws(Sampling(temperature=1.0, top_k=3), logits).tolist())
    assert drawn == set(np.argsort(-logits)[:3].tolist())


def test_top_p_keeps_the_fewest_that_reach_p(logits):
    order = np.argsort(-logits)
    reached = np.searchsorted(np.cumsum(softmax(logits)[order]), 0.7) + 1
    drawn = set(draws(Sampling(temperature=1.0, top_p=0.7), logits).tolist())
    assert 1 < reached < VOCAB // 2 and drawn == set(order[:reached].tolist())
    for least in (1e-6, 1e-40, 5e-324):  # the last two are 0 where subnormals are flushed, and in float32
        sampling = Sampling(temperature=1.0, top_p=least)
        assert set(draws(sampling, logits).tolist()) == {int(order[0])}
        kept = np.asarray(distribution(jnp.asarray(logits, jnp.float32), sampling))
        assert kept.sum() == kept[order[0]] == 1


def test_top_p_that_is_reached_exactly_keeps_no_further_token():
    """Of four equals two reach 1/2: the first ones, in float32 exactly."""
    for top_p, kept in ((0.25, 1), (0.5, 2), (0.50001, 3), (0.75, 3), (1.0, 4)):
        chances = np.asarray(distribution(jnp.zeros(4), Sampling(temperature=1.0, top_p=top_p)))
        assert (chances > 0).tolist() == [i < kept for i in range(4)]


def test_a_draw_depends_on_its_own_row_only(logits):
    sampling, keys = Sampling(temperature=1.0), jax.random.split(jax.random.key(1), 3)
    rows = jnp.asarray(np.stack([logits, logits[::-1], logits * 2]), jnp.float32)
    position = jnp.array([4, 9, 4], jnp.int32)
    together = sample(rows, sampling, keys, position)
    alone = [int(sample(rows[i : i + 1], sampling, keys[i : i + 1], position[i : i + 1])[0]) for i in range(3)]
    assert together.tolist() == alone
    at_other_positions = [sample(rows, sampling, keys, position + np.int32(i)).tolist() for i in range(1, 9)]
    assert any(other != alone for other in at_other_positions)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-45}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"top_p": None}, "top_p"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_impossible_settings_are_named(fields, name):
    with pytest.raises(RequestError, match=name):
        Sampling(**fields)


def test_randomness_needs_keys():
    with pytest.raises(RequestError, match="needs keys"):
        sample(jnp.zeros((1, 3)), Sampling(temperature=1.0))
