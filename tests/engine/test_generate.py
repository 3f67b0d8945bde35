from __future__ import annotations

import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config, cache_sharding, init_cache, model
from dsv4_jax.errors import ContextLimitError, PlanError, RequestError
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import CachePolicy, HostSize, KVCacheManager, SnapshotPlacement

from ..model.feeding import CSA, HCA, text_tokens, uncached

CFG = DSV4Config.tiny(layer_types=(CSA, HCA))  # depth is tested elsewhere
LAYOUT, SIZE = CacheLayout(CFG, "f32", "f32"), CacheSize(4, 2, 2)
# More prompts than slots, one longer than a chunk, one of a single token, two equal ones.
PROMPTS = [text_tokens(n).tolist() for n in (70, 5, 1, 5)]
SAMPLING = model.Sampling(temperature=0.9, top_k=50, top_p=0.95)


@pytest.fixture(scope="module")
def params():
    return model.init_params(CFG, seed=1)


def generate(params, prompts=PROMPTS, **options):
    """What `model.generate` gives from an empty cache without prefix caching; afterwards nothing may be held."""
    manager = KVCacheManager(LAYOUT, SIZE)
    options = dict(max_new_tokens=9, chunk_tokens=32, decode_steps=4) | options
    drawn, cache = model.generate(params, init_cache(LAYOUT, SIZE), manager, prompts, **options)
    manager.check_integrity()
    assert not manager.requests and manager.stats().blocks_free == SIZE.num_blocks
    assert not any(leaf.is_deleted() for leaf in cache.arrays.values())
    return drawn


@pytest.fixture(scope="module")
def greedy(params) -> list[list[int]]:
    return generate(params)


@pytest.mark.parametrize("biased", [False, True])
def test_greedy_continues_with_the_likeliest_tokens(params, greedy, biased):
    """Every token drawn is the argmax of the uncached model on all tokens before it, with what is added to them."""
    added = np.zeros(CFG.vocab_size, np.float32)
    if biased:
        added[greedy[0]], added[greedy[1]], added[::7] = -100, -0.25, 0.5
        sampling = model.Sampling(logit_bias=dict(enumerate(added.tolist())))
        drawn = generate(params, sampling=sampling)
        assert drawn == generate(params, sampling=sampling, decode_steps=1) and drawn[:2] != greedy[:2]
        assert drawn[:1] == generate(params, PROMPTS[:1], sampling=sampling)
        greedy = drawn
    assert [len(drawn) for drawn in greedy] == [9] * 4
    for prompt, drawn in zip(PROMPTS, greedy, strict=True):
        # Causal: one length for all, padded behind, is one executable.
        text = np.zeros(80, np.int32)
        text[: len(prompt) + 9] = prompt + drawn
        logits = np.asarray(uncached(CFG, params, text))[len(prompt) - 1 :][:9] + added
        assert logits.argmax(-1).tolist() == drawn
    assert greedy[1] == greedy[3]


def test_stop_tokens_end_a_request_before_themselves(params, greedy):
    stop = greedy[0][4]
    expected = [drawn[: drawn.index(stop)] if stop in drawn else drawn for drawn in greedy]
    seen, ended, fed = [[], [], [], []], [], 0

    def note(brought):
        nonlocal fed
        fed += brought.fed
        ended.extend(brought.ended)
        for i, tokens in brought.tokens.items():
            seen[i] += tokens

    drawn = generate(params, stop_tokens=iter([stop]), on_step=note)
    assert drawn == seen == expected and len(drawn[0]) <= 4
    assert sorted(ended) == [0, 1, 2, 3] and fed == sum(map(len, PROMPTS))


def test_a_caller_ends_requests(params, greedy):
    """After any step; the slot is free for the next prompt, and the others go on."""

    def first_of_all_and_second_of_one(brought):
        return np.array([i for i, tokens in brought.tokens.items() if i != 2 or not brought.fed])

    drawn = generate(params, decode_steps=1, on_step=first_of_all_and_second_of_one)
    assert [len(tokens) for tokens in drawn] == [1, 1, 2, 1]
    assert all(tokens == whole[: len(tokens)] for tokens, whole in zip(drawn, greedy, strict=True))
    drawn = generate(params, on_step=lambda brought: {2, 3})  # of those that wait
    assert drawn == [*greedy[:2], [], []]


def test_the_next_step_is_sent_before_the_last_is_read(params, greedy):
    """While the same requests go on. What was sent for a request that then ended is dropped."""
    stop, planned = greedy[0][4], []
    manager = KVCacheManager(LAYOUT, SIZE)

    def note(brought):
        planned.append((brought.fed, manager.steps.num_planned))

    options = dict(max_new_tokens=9, chunk_tokens=32, stop_tokens={stop})
    drawn, _ = model.generate(params, init_cache(LAYOUT, SIZE), manager, PROMPTS[:2], on_step=note, **options)
    assert drawn == [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in greedy[:2]]
    ahead = [count - i for i, (_, count) in enumerate(planned, 1)]
    assert ahead[:-1] == [1] * len(ahead[:-1]) and ahead[-1] == 0, (
        "what is known to be a request's last token is waited for"
    )


def test_what_interrupts_the_manager_is_what_a_caller_sees(params, monkeypatch):
    """Not that the manager, broken off, then releases nothing."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv4_jax.manager.steps.Steps.plan", interrupted)
    manager = KVCacheManager(LAYOUT, SIZE)
    with pytest.raises(KeyboardInterrupt):
        model.generate(params, init_cache(LAYOUT, SIZE), manager, PROMPTS)


@pytest.mark.slow
def test_a_mesh_draws_what_one_device_does(params):
    """Two data shards of two devices each: prompts are spread, and in the next turn go to where they are cached."""
    layout, mesh = CacheLayout(CFG, "f32", "f32", block_tokens=16), model.Split(2, 2).mesh()
    size, policy = CacheSize(10, 1, 5, num_snapshots=6), CachePolicy(snapshots=SnapshotPlacement(every=1))
    managers = [KVCacheManager(layout, size, policy=policy) for _ in range(2)]
    spread, cache = (
        model.shard_params(CFG, params, mesh),
        init_cache(layout, size, sharding=cache_sharding(layout, mesh)),
    )
    options = dict(max_new_tokens=9, chunk_tokens=32, decode_steps=4, sampling=SAMPLING, seed=7)
    expected, hits = generate(params, **options), []
    for _ in range(2):
        brought = []
        drawn, cache = model.generate(spread, cache, managers, PROMPTS, on_step=brought.append, **options)
        assert drawn == expected
        assert max(len(step.tokens) for step in brought) == 2, "one in each shard"
        hits.append([sum(manager.stats().cache.counters.hit_tokens.values()) for manager in managers])
        for manager in managers:
            manager.check_integrity()
            assert not manager.requests
    assert hits == [[0, 0], [64, 0]]
    for wrong, problem in (
        (managers[:1], "1 managers for the 2 data shards"),
        ([managers[0]] * 2, "one manager was given for several"),
        ([managers[0], KVCacheManager(layout, SIZE)], "the manager of shard 1 is of another cache"),
        ([managers[0], None], "a manager for each data shard, got None"),
    ):
        with pytest.raises(PlanError, match=problem):
            model.generate(spread, cache, wrong, PROMPTS)


@pytest.mark.slow
def test_samples_are_reproducible_by_seed(params):
    drawn = generate(params, sampling=SAMPLING, seed=7)
    assert generate(params, sampling=SAMPLING, seed=7) == drawn
    assert drawn not in [generate(params, sampling=SAMPLING, seed=other) for other in (8, 7 + 2**32, 7 - 2**63)]
    assert drawn[1] != drawn[3], "equal prompts draw with keys of their own"


@pytest.mark.slow
def test_samples_do_not_depend_on_company_or_steps_per_call(params):
    together = generate(params, sampling=SAMPLING, seed=7)
    assert generate(params, PROMPTS[:1], sampling=SAMPLING, seed=7) == together[:1]
    assert generate(params, PROMPTS[:2], sampling=SAMPLING, seed=7, decode_steps=1) == together[:2]


@pytest.mark.slow
def test_prompts_start_at_what_is_cached_and_go_on_the_same(params, greedy):
    """One manager over three calls: nothing cached, everything cached, and prompts that go on from answers."""
    layout = CacheLayout(CFG, "f32", "f32", block_tokens=16)
    size = CacheSize(20, 3, 8, num_snapshots=6)
    policy = CachePolicy(snapshots=SnapshotPlacement(every=1))
    manager, cache = KVCacheManager(layout, size, policy=policy), init_cache(layout, size)
    options = dict(max_new_tokens=9, chunk_tokens=32, decode_steps=4)
    prompts = PROMPTS + PROMPTS[:1] * 3  # more of one prompt than slots, side by side
    hits = 0
    for turn in range(3):
        drawn, cache = model.generate(params, cache, manager, prompts, **options)
        expected = generate(params, prompts, **options) if turn == 2 else greedy + greedy[:1] * 3
        assert drawn == expected
        manager.check_integrity()
        assert not manager.requests
        before, hits = hits, sum(manager.stats().cache.counters.hit_tokens.values())
        assert hits > before
        prompts = [p + d for p, d in zip(prompts, drawn, strict=True)] if turn == 1 else prompts


def test_a_manager_with_a_host_tier_is_refused(params):
    manager = KVCacheManager(LAYOUT, SIZE, policy=CachePolicy(), host=HostSize.of(LAYOUT, 2, 1))
    with pytest.raises(PlanError, match="no host tier"):
        model.generate(params, init_cache(LAYOUT, SIZE), manager, PROMPTS)
    assert not manager.requests


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        (dict(prompts=[[1], []]), PlanError, "prompt 1 is empty"),
        (dict(max_new_tokens=0), PlanError, "max_new_tokens"),
        (dict(decode_steps=0), PlanError, "decode_steps"),
        (dict(chunk_tokens=1), PlanError, "chunk_tokens"),
        (dict(prompts=[[1], [1] * 250]), ContextLimitError, "258 tokens exceed the context limit of 256"),
        (dict(prompts=[[1], [1], [1], [CFG.vocab_size]]), RequestError, "0..255"),
        (dict(max_new_tokens=True), PlanError, "max_new_tokens must be an integer of at least 1, got True"),
        (dict(chunk_tokens=32.0), PlanError, "chunk_tokens must be an integer"),
        (dict(seed=2**64), PlanError, "seed must be an integer from"),
        (dict(sampling=model.Sampling(logit_bias={256: 1})), RequestError, "logit_bias: token 256 is outside"),
        (dict(sampling=None), PlanError, "sampling must be a Sampling, got None"),
        (dict(stop_tokens="12"), PlanError, "stop_tokens must be integers, got '1'"),
        (dict(stop_tokens=5), PlanError, "stop_tokens must be token ids, got 5"),
        (dict(exchanges=[None]), PlanError, "exchanges must be of Exchange, got None"),
        (dict(acceptance=np.array([1, 2])), PlanError, "acceptance is"),
        (dict(prompts=5), PlanError, "prompts must be an iterable, got 5"),
    ],
)
def test_impossible_requests_are_refused_before_anything_runs(params, options, error, problem):
    with pytest.raises(error, match=problem):
        generate(params, on_step=lambda _: pytest.fail("a step ran"), **options)


def test_a_prompt_that_can_never_fit_is_refused(params):
    size = CacheSize(1, 1, 2)
    manager = KVCacheManager(LAYOUT, size)
    with pytest.raises(ContextLimitError, match="200 tokens exceed the context limit of 128"):
        model.generate(params, init_cache(LAYOUT, size), manager, [[1] * 200], max_new_tokens=1)
    assert not manager.requests
