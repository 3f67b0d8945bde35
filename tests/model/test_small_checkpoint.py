"""The trained model of checkpoints/small on real text: peaked distributions, where an error counts as it does in use.

That its logits are those of transformers is in test_hf_equivalence.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from dsv4_jax import CacheLayout, CachePolicy, DSV4Config, KVCacheManager, init_cache, model, plan_capacity

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


def assert_as_good(found: np.ndarray, logits: np.ndarray, bounds: tuple[float, float]) -> None:
    ours, theirs = log_softmax(found), log_softmax(logits)
    change = np.take_along_axis((theirs - ours)[:-1], SMALL_TEXT[1:, None], 1).mean()
    divergence = (np.exp(theirs) * (theirs - ours)).sum(1).mean()
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


@pytest.mark.slow
def test_through_pallas_kernels(params: model.Params, logits: np.ndarray) -> None:
    text = feed(CFG, params, SMALL_TEXT, (160,), implementation="pallas", **ROWS)
    assert_as_good(text, logits, ROUNDED)


@pytest.mark.slow
def test_greedy_text_is_the_same_however_it_is_made() -> None:
    """Where a model knows what comes next nothing hangs on a near tie: not even between executables."""
    _, whole = model.load_hf(SMALL, mtp=True)
    prompts = [SMALL_TEXT[:300].tolist(), SMALL_TEXT[[*range(260), *range(400, 440)]].tolist()]
    found = {}
    for name, options in {"steps": {}, "loops": {"decode_steps": 4}, "drafts": {"drafts": 2}}.items():
        room = {"draft_tokens": 2, "include_mtp": True} if "drafts" in options else {}
        layout = CacheLayout(CFG, **ROWS, **room)
        size = plan_capacity(layout, max_requests=2, max_context=512)
        manager, cache = KVCacheManager(layout, size, policy=CachePolicy()), init_cache(layout, size)
        for again in ("", ", from the cache"):
            text, cache = model.generate(whole, cache, manager, prompts, max_new_tokens=16, **options)
            found[name + again] = text
        assert sum(manager.stats().cache.counters.hit_tokens.values()) >= 2 * 256
    assert [len(text) for text in found["steps"]] == [16, 16]
    assert all(text == found["steps"] for text in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [160, 1], ids=["prefill", "decode"])
def test_through_cuda_kernels(chunk: int, logits: np.ndarray) -> None:
    _, released = model.load_hf(SMALL, weights="released", packed=True)
    assert_as_good(feed(CFG, released, SMALL_TEXT, (chunk,), **ROWS), logits, ROUNDED)
