"""The device executor under an engine: weights that change, memory given up, prompts from another engine."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, model
from dsv4_jax.engine import Engine, Limits, Prompt, build, device
from dsv4_jax.errors import CheckpointError, ConfigError, EngineError, LayoutError, PlanError, RequestError
from dsv4_jax.manager import HostSize
from dsv4_jax.model.released import as_released
from dsv4_jax.tiers.remote import RecordTransport
from dsv4_jax.transports import open_engine
from tests.clock import PATIENCE

from ..examples import load_example
from ..model import released
from ..model.feeding import CSA, HCA, text_tokens

CFG = DSV4Config.tiny(layer_types=(CSA, HCA))
LAYOUT = CacheLayout(CFG, "f32", "f32", block_tokens=16)
SIZE, HOST = CacheSize(16, 3, 5, num_snapshots=4), HostSize.of(LAYOUT, 16, 4)
TEXT = text_tokens(70).tolist()


@pytest.fixture
def compiled_in_a_moment() -> Iterator[None]:
    """What is compiled runs a few times: most of the time would go into making it fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def weights() -> list[model.Params]:
    return [model.init_params(CFG, seed=seed) for seed in (1, 2)]


def engine(params: model.Params, name: str, **options) -> Engine:
    return Engine.of(params, LAYOUT, SIZE, weights_id=name, host=HOST, chunk_tokens=32, **options)


def answer(one: Engine, tokens=TEXT, count: int = 6) -> list[int]:
    done = one.add(Prompt(tokens=tokens, max_new_tokens=count)).result(PATIENCE)
    assert done.error is None, done.error
    return done.tokens


@pytest.mark.parametrize("steps", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_few_requests_and_short_prompts_run_in_narrow_steps(weights, steps):
    """Those that end one by one, and one that comes back from a wide step: what it samples is what it does alone."""
    asked = [(TEXT[at : at + 40], count) for at, count in ((0, 9), (12, 13), (24, 18))]

    def drawn(**options) -> tuple[list[list[int]], dict[str, list[int]]]:
        core, executor = build.build(weights[0], LAYOUT, SIZE, weights_id="x", chunk_tokens=32, **options)
        widths, send = {"decode": list[int](), "mixed": list[int]()}, executor.send

        def noted(work):
            plan = work.plans[0]
            widths[work.kind].append(plan.num_seqs if work.kind == "decode" else plan.num_tokens)
            return send(work)

        executor.send = noted
        with Engine(core, executor) as one:
            done = one.run([Prompt(tokens=tokens, max_new_tokens=count) for tokens, count in asked])
        return [sample.tokens for (sample,) in done], widths

    expected, wide = drawn(decode_steps=steps)
    found, narrow = drawn(decode_steps=steps, decode_rows=(2, 1), prefill_tokens=(12,))
    assert found == expected and [len(each) for each in found] == [9, 13, 18]
    rows = narrow["decode"]
    assert set(wide["decode"]) == {3} and rows == sorted(rows, reverse=True) and set(rows) == {1, 2, 3}
    assert set(wide["mixed"]) == {32} and set(narrow["mixed"]) == {12, 32}


@pytest.mark.parametrize("rows", [5, "1", (0,), (3,), (1.5,), (True,)], ids=str)
def test_rows_that_no_decode_can_have_are_refused(weights, rows):
    with pytest.raises(PlanError, match="decode_rows"):
        build.build(weights[0], LAYOUT, SIZE, decode_rows=rows)


@pytest.mark.parametrize(("chunk", "narrow"), [(2048, [512]), (4096, [1024]), (1024, []), (None, [])])
def test_on_a_gpu_steps_have_a_quarter_of_the_tokens_where_that_is_enough(weights, monkeypatch, chunk, narrow):
    monkeypatch.setattr(build.jax, "default_backend", lambda: "gpu")
    core, _ = build.build(weights[0], LAYOUT, SIZE, chunk_tokens=chunk)
    assert [shape.tokens for shape in core.shapes.narrower] == narrow


@pytest.fixture
def compiled(caplog) -> Iterator[Callable[[], list[str]]]:
    """Says what was compiled since the last time, in any thread: `jax.log_compiles` is of this one."""
    jax.config.update("jax_log_compiles", True)

    def told() -> list[str]:
        found = [text.split(" with ")[0] for text in caplog.messages if text.startswith("Compiling")]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING):
        yield told
    jax.config.update("jax_log_compiles", False)


def test_nothing_is_compiled_once_it_is_warm(weights, compiled):
    """Prompts that come alone or together, new ones and such as go on from what is cached."""
    prompts = [[seed, *TEXT[: 20 + 5 * seed]] for seed in range(8)]
    with Engine.of(weights[0], LAYOUT, CacheSize(300, 8, 5), chunk_tokens=128, prefill_tokens=(48,)) as one:
        one.warm_up()
        assert compiled().count("Compiling jit(_mixed)") == 4, "of each width, that draws and that does not"
        for some in (prompts[:1], prompts[1:3], prompts[3:], prompts[:3], prompts[2:4], prompts):
            one.run([Prompt(tokens=tokens, max_new_tokens=3) for tokens in some])
        counters = one.managers[0].stats().cache.counters
    assert sum(counters.hit_tokens.values()) > 0 and not counters.evicted_snapshots
    assert not (found := compiled()), found


def test_weights_change_between_steps_and_memory_comes_and_goes(weights, compiled):
    """Tokens after a change are those of an engine that never had other weights; nothing is compiled for it."""
    old, new = weights
    with engine(new, "new") as fresh:
        expected = answer(fresh)
    with engine(old, "old") as one:
        before = answer(one)
        assert before != expected
        compiled()
        wrong = jax.tree.map(lambda x: x, new) | {"embed": new["embed"][:-1]}
        for params, name, problem in (
            (wrong, "wrong", r"params\['embed'\] is float32\["),
            ({}, "wrong", "structure"),
            (new, "old", "of the weights in use"),
        ):
            with pytest.raises(RequestError, match=problem):
                one.update_weights(params, name)
        assert answer(one) == before, "a refusal changes nothing"

        one.pause()
        waiting = one.add(Prompt(tokens=TEXT, max_new_tokens=6))
        one.update_weights(new, "new")
        assert not waiting.done
        one.resume()
        done = waiting.result(PATIENCE)
        assert done.tokens == expected and done.cached == 0 and done.weights_id == "new"
        assert one.add(Prompt(tokens=TEXT, max_new_tokens=1)).result(PATIENCE).cached == 64, (
            "of the new ones it is found"
        )

        one.sleep()
        with pytest.raises(EngineError):
            one.sleep()
        waiting = one.add(Prompt(tokens=TEXT, max_new_tokens=6))
        one.wakeup()
        done = waiting.result(PATIENCE)
        assert done.tokens == expected and done.cached == 64, "it was on the host"
        found = compiled()
        assert not [text for text in found if "_mixed" in text or "_decode" in text], found
        one.update_weights(new, "again", donate=True)  # the very same, which are not given up
        assert answer(one) == expected


def aligned(x: jax.Array) -> np.ndarray:
    """The same on the host, at an address at which a CPU device would use it where it is."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    own = memory[-memory.ctypes.data % 64 :][: x.nbytes].view(x.dtype).reshape(x.shape)
    own[...] = x
    return own


@pytest.mark.parametrize("mesh", [None, model.Split(2, 1)])
def test_weights_come_from_anywhere(weights, mesh):
    """From the host, which goes on to write there, and from one device, whether jax may move them or not."""
    expected = []
    for params in weights:
        with engine(params, "plain") as one:
            expected.append(answer(one))
    mesh = None if mesh is None else mesh.mesh()
    for place in (aligned, lambda x: x + 0, lambda x: jax.device_put(x + 0, jax.devices()[0])):
        first, second, third = (jax.tree.map(place, weights[i]) for i in (0, 1, 0))
        with engine(first, "first", mesh=mesh) as one:
            found = [answer(one)]
            one.update_weights(second, "second")
            found.append(answer(one))
            one.update_weights(third, "third", donate=True)
            for array in jax.tree.leaves((first, second, third)) if place is aligned else ():
                array[...] = 0
            found.append(answer(one, TEXT[1:]))
            one.update_weights(weights[0], "fourth")
            found.append(answer(one, TEXT[1:]))
        assert found[:2] == expected and found[2] == found[3]


def test_old_weights_that_are_given_up_may_be_among_the_new(weights):
    """At other places, too; what was given up is refused before anything changes."""
    old, new = (jax.tree.map(lambda x: x + 0, each) for each in weights)
    swapped = old | {"embed": old["head"], "head": old["embed"]}
    with engine(jax.tree.map(lambda x: x + 0, swapped), "fresh") as fresh:
        expected = answer(fresh)
    with engine(old, "old") as one:
        one.update_weights(swapped, "swapped", donate=True)
        assert answer(one) == expected
        one.update_weights(new, "new", donate=True)
        assert old["embed"].is_deleted() and old["head"].is_deleted()
        before = answer(one)
        with pytest.raises(RequestError, match=r"params\['embed'\] was deleted"):
            one.update_weights(old, "old", donate=True)
        done = one.add(Prompt(tokens=TEXT, max_new_tokens=6)).result(PATIENCE)
        assert done.tokens == before and done.cached == 64 and done.weights_id == "new"


@pytest.mark.parametrize("room", [0, 4])
def test_weights_for_which_the_device_has_no_memory(weights, monkeypatch, room):
    """No answer of the old ones has the name of the new ones, and no step runs without some that were given up."""
    old, new = (jax.tree.map(lambda x: x + 0, each) for each in weights)
    with engine(old, "old") as one:
        before, left, put = answer(one), iter(range(room)), device._put
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no memory"):
            patched.setattr(device, "_put", lambda *given: put(*given) if next(left, None) is not None else _fail())
            one.update_weights(new, "new", donate=True)
        done = one.add(Prompt(tokens=TEXT, max_new_tokens=6)).result(PATIENCE)
        if room:
            assert not done.tokens and "deleted" in str(done.error)
        else:
            assert done.tokens == before and done.cached == 64 and done.weights_id == "old"
        one.update_weights(new, "again", donate=True)
        assert answer(one) != before


def _fail() -> None:
    raise RuntimeError("no memory")


def test_a_prompt_of_another_engine_is_gone_on_with(weights):
    """Over sockets, from one thread's engine to another's, beside steps that do not wait for it."""
    transports = [RecordTransport(open_engine("loopback"), timeout=PATIENCE) for _ in range(2)]
    limits = Limits(patience=PATIENCE, lease=PATIENCE)
    here, there = (engine(weights[0], "same", transport=each, limits=limits) for each in transports)
    with transports[0], transports[1], here, there:
        expected, parts = answer(there, TEXT[::-1]), list[bytes]()
        peer = transports[1].connect(transports[0].published)
        goes_on = there.add(Prompt(tokens=TEXT, max_new_tokens=6, peer=peer))
        ended = here.add(Prompt(tokens=TEXT, export=parts.append)).result(PATIENCE)
        assert ended.finish == "handoff" and ended.lease
        for part in parts:
            assert there.receive(goes_on.id, part)
        done = goes_on.result(PATIENCE)
        assert done.cached == 64 and here.stats().counts["computed_tokens"] == 64
        assert answer(here) == done.tokens and answer(there, TEXT[::-1]) == expected
        while len(here.managers[0].leases):
            pass
    with pytest.raises(PlanError, match="host tier"):
        Engine.of(weights[0], LAYOUT, SIZE, weights_id="same", transport=transports[0])


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("events", 5, "events must be an iterable, got 5"),
        ("events", [True], "events must be of EventLog, got True"),
        ("mesh", (), r"mesh must be a Mesh or None, got \(\)"),
        ("pool", 1, "pool must be True or False"),
        ("drafts", None, "drafts must be an integer"),
        ("exchanges", None, "exchanges must be an iterable"),
    ],
)
def test_what_an_engine_is_made_of_is_checked(weights, name, value, problem):
    with pytest.raises(PlanError, match=problem):
        engine(weights[0], "w", **{name: value})


def test_what_is_no_folder_is_no_checkpoint():
    with pytest.raises(CheckpointError, match="path of a folder, got None"):
        Engine.load(None)


def test_a_checkpoint_is_held_as_the_device_computes_it(tmp_path, monkeypatch):
    """A CPU holds FP8 matrices as bfloat16, which has their values, if they and the MTP layer take half its memory."""
    released.write(tmp_path, released.tensors())
    cfg = released.CFG

    def dtypes(**options) -> set[str]:
        core, executor = build.load(tmp_path, memory=1 << 22, max_requests=2, max_context=256, **options)
        assert core.managers[0].weights_id == str(tmp_path)
        return {str(leaf.dtype) for leaf in jax.tree.leaves(executor.params)}

    wide = model.device_bytes(cfg, "bfloat16")
    monkeypatch.setattr(build, "device_limit", lambda: 2 * wide)
    assert "bfloat16" in dtypes() and "uint8" not in dtypes()
    assert "bfloat16" not in dtypes(weights="float32")
    monkeypatch.setattr(build, "device_limit", lambda: 2 * wide - 1)
    assert "uint8" in dtypes()


@pytest.mark.parametrize("drafts", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_of_released_numerics(tmp_path, compiled_in_a_moment, drafts):
    """Its tokens are those of a forward without a cache, with drafts and without, which plain ones are not."""
    cfg = dataclasses.replace(released.CFG, layer_types=(HCA,), hc_sinkhorn_iters=1)
    released.write(tmp_path, released.tensors(cfg), cfg)
    text = np.random.default_rng(0).integers(0, cfg.vocab_size, 40).tolist()
    params, run = (
        model.load_hf(tmp_path, weights="released")[1],
        jax.jit(functools.partial(model.forward_uncached, cfg)),
    )
    tokens = []
    for each in (params, as_released(params)):
        known = [*text]
        for _ in range(6):
            logits = run(each, np.array([*known, *[0] * (48 - len(known))], np.int32))
            known.append(int(logits[len(known) - 1].argmax()))
        tokens.append(known[len(text) :])
    plain, expected = tokens
    assert plain != expected
    options = dict(
        kv_format="f32", index_format="f32", memory=1 << 22, max_requests=2, max_context=256, chunk_tokens=32
    )
    with Engine.load(tmp_path, numerics="released", drafts=drafts, **options) as one:
        assert answer(one, text) == expected and one.managers[0].layout.numerics == "released"
        _, other = model.load_hf(tmp_path, weights="released", packed=True, drafts=drafts > 0)
        with pytest.raises(RequestError, match="structure"):
            one.update_weights(other, "plain")
    for more, error, problem in (
        (dict(weights="bfloat16"), ConfigError, "released ones are of weights as 'released', got 'bfloat16'"),
        (dict(numerics="exact"), LayoutError, "numerics must be 'plain', 'released', got 'exact'"),
    ):
        with pytest.raises(error, match=problem):
            Engine.load(tmp_path, **options | dict(numerics="released") | more)
    layout = CacheLayout(cfg, block_tokens=128, numerics="released")
    with pytest.raises(PlanError, match="params have plain numerics, the cache's layout says 'released'"):
        Engine.of(params, layout, CacheSize(2, 1, 1))
    with pytest.raises(PlanError, match="params have released numerics, the cache's layout says 'plain'"):
        Engine.of(as_released(params), CacheLayout(cfg), CacheSize(2, 1, 1))


@pytest.mark.slow
def test_policy_gradients(capsys):
    """examples/rollout.py learns; what sampling says and what scoring says is the same, under each round's weights."""
    rounds = load_example("rollout").main(["--rounds", "6"])
    assert len(rounds) == 6 and all(apart < 1e-4 for _, apart in rounds)
    assert capsys.readouterr().out.count("round ") == 6
    rewards = [reward for reward, _ in rounds]  # from half of the tokens to nearly all
    assert np.mean(rewards[:2]) < 0.6 and np.mean(rewards[-2:]) > 0.8
