"""What formats cost and what drafts are accepted, on a random model: against a forward without a cache, and by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import AttentionType, DSV4Config
from dsv4_jax.bench import acceptance, quality
from dsv4_jax.bench.quality import REFERENCE, Feeding, Form, Mean, Variant
from dsv4_jax.errors import OptionError
from dsv4_jax.model import forward_uncached, init_params
from dsv4_jax.model.released import as_released
from dsv4_jax.model.uncached import mtp_uncached

from ..model.released import CFG as RELEASED

RNG = np.random.default_rng(34)
CFG = DSV4Config.tiny(
    vocab_size=8,  # so small that random drafts are often right
    layer_types=(AttentionType.SWA, AttentionType.CSA, AttentionType.HCA),
    index_topk=4,
    num_mtp_layers=1,
)
WINDOWS = RNG.integers(0, 8, (5, 41)).astype(np.int32)
FORMS = [Form("float32"), Form("bfloat16"), Form("released", "released")]
FEEDING = Feeding(WINDOWS, requests=3, chunk=24, decoded=6)  # the second group is not full


@pytest.fixture(autouse=True, scope="module")
def compiled_in_a_moment():
    """What is compiled runs a few times: most of the time would go into making it fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def params():
    return init_params(CFG, 2, drafts=True)


def test_what_is_measured_is_the_models(params) -> None:
    chosen = quality.variants(["fp8"], ["fp4"], ["throughput"])
    assert chosen == [REFERENCE, Variant("fp8", "fp4", "throughput")]
    backbone = {name: value for name, value in params.items() if name != "mtp"}
    first, other = quality.measure_quality(CFG, lambda form: backbone, [Form("float32")], chosen, FEEDING)
    logp = np.stack([jax.nn.log_softmax(forward_uncached(CFG, backbone, row[:40])) for row in WINDOWS])
    losses = -np.take_along_axis(logp, WINDOWS[:, 1:, None], 2)[..., 0]
    half = quality._t95(4) * losses.mean(1).std(ddof=1) / 5**0.5
    np.testing.assert_allclose((first["loss"], first["loss_half"]), (losses.mean(), half), rtol=1e-4)
    np.testing.assert_allclose(first["decoded_loss"], losses[:, -6:].mean(), rtol=1e-4)
    assert first["kl"] is None and first["against"] is None and first["tokens"] == other["tokens"] == 200
    assert 0 < other["kl"] < 0.1 and 0.8 < other["same_token"] <= 1 and 0.5 < other["same_entries"] <= 1
    assert other["against"] == "float32 rows" and abs(other["loss_change"] - other["loss"] + first["loss"]) < 1e-6


@pytest.mark.slow
def test_the_same_twice_differs_in_nothing(params) -> None:
    """The reference of other weights is compared with that of float32: here they are the same."""
    rows = quality.measure_quality(CFG, lambda form: params, FORMS[:2], [REFERENCE], FEEDING)
    row = list(rows)[-1]
    assert row["against"] == "float32 weights" and row["numerics"] is None and abs(row["kl"]) < 1e-6
    assert (row["loss_change"], row["same_token"], row["same_entries"]) == (0, 1, 1)


@pytest.mark.slow
def test_released_numerics_are_those_of_the_model() -> None:
    """As a forward without a cache has them, and compared with the plain ones of what stands for float32 weights."""
    cfg = dataclasses.replace(RELEASED, num_mtp_layers=0)
    kept = init_params(cfg, 0, "released")
    rounds = {"float32": kept, "released": as_released(kept)}
    first, other = quality.measure_quality(cfg, lambda form: rounds[form.weights], FORMS[::2], [REFERENCE], FEEDING)
    for row, params in zip((first, other), rounds.values(), strict=True):
        logp = np.stack([jax.nn.log_softmax(forward_uncached(cfg, params, each[:40])) for each in WINDOWS])
        loss = -np.take_along_axis(logp, WINDOWS[:, 1:, None], 2).mean()
        np.testing.assert_allclose(row["loss"], loss, rtol=3e-4)
    assert abs(other["loss_change"]) > 1e-3 and 1e-3 < other["kl"] < 0.1
    assert other["numerics"] == "released" and other["against"] == "float32 weights"


def test_picks_are_compared_as_sets() -> None:
    ours, theirs = (RNG.permuted(np.tile(np.arange(9), (2, 7, 1)), axis=2)[..., :5] for _ in range(2))
    count = np.full((2, 7), 5)
    count[0, 0] = 3
    same = [
        [len({*a[:n]} & {*b[:n]}) / 5 for a, b, n in zip(*rows, strict=True)]
        for rows in zip(ours, theirs, count, strict=True)
    ]
    padded = [
        jnp.stack([quality._sorted(jnp.asarray(x), jnp.asarray(n), 5) for x, n in zip(picks, count, strict=True)])
        for picks in (ours, theirs)
    ]
    np.testing.assert_allclose(quality._alike(*padded), np.mean(same, 0), rtol=1e-6)


@pytest.mark.slow
def test_accepted_drafts_are_those_the_model_would_have_made(params) -> None:
    rows = list(acceptance.measure_acceptance(CFG, params, FEEDING, 2, 0.0, kv_format="f32", index_format="f32"))
    right = []
    for (
        row
    ) in WINDOWS:  # at place t token t is known: the MTP layer's row t - 1 and the backbone's row t are about t + 1
        guesses = np.asarray(mtp_uncached(CFG, params, row[:40])).argmax(-1)
        right.append(guesses[33:39] == np.asarray(forward_uncached(CFG, params, row[:40])).argmax(-1)[34:40])
    assert 0.02 < np.mean(right) < 0.98
    first, second = rows
    assert first["accepted"] == pytest.approx(np.mean(right)) and first["places"] == 30
    assert second["accepted"] <= first["accepted"] == first["accepted_after_others"]
    assert second["tokens_a_step"] == pytest.approx(1 + first["accepted"] + second["accepted"])


@pytest.mark.slow
def test_drafts_that_are_sampled(params) -> None:
    """Two random distributions have most of their mass in common."""
    first, second = acceptance.measure_acceptance(CFG, params, FEEDING, 2, 1.0)
    assert 0 < second["accepted"] < first["accepted"] < 1
    assert first["accepted"] * second["accepted_after_others"] == pytest.approx(second["accepted"])


def test_intervals_and_windows() -> None:
    for degrees, t in ((3, 3.182), (4, 2.776), (10, 2.228), (255, 1.969)):
        assert quality._t95(degrees) == pytest.approx(t, rel=0.012)
    assert Mean.of(np.array([1.0, np.nan, 3.0])) == (2.0, None)
    assert Mean.of(np.array([1.0, 2, 3, 4])).half == pytest.approx(quality._t95(3) * 1.2909944 / 2)
    np.testing.assert_array_equal(quality.windows_of(np.arange(10), 4, 100), [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]])
    assert quality.windows_of(np.arange(100), 4, 13).shape == (3, 5)
    with pytest.raises(OptionError, match="a text of 4 tokens has no window of 5"):
        quality.windows_of(np.arange(4), 4, 100)
    splits = quality.variants(["bf16"], ["fp8", "fp4"], ["latency", "throughput"])
    assert [str(x) for x in splits] == [
        "f32/f32, throughput",
        "bf16/fp8, throughput",
        "bf16/fp4, throughput",
        "bf16/fp8, latency",
    ]
