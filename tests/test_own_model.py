"""examples/own_model.py: the same model in three frameworks gives the same tokens, on one device and on a mesh."""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import KVCacheManager, init_cache, testing

from .docs.pages import DOCS, blocks
from .examples import load_example

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 64, n).tolist() for n in (37, 20, 5, 1)]
FRAMEWORKS = ["plain JAX", "flax NNX", "Equinox"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("own_model")


@pytest.fixture(scope="module")
def expected(example: ModuleType) -> list[list[int]]:
    """Of the plain model, every token from a cold cache of its own."""
    runner = testing.StepRunner(*example.plain(example.draw()), example.LAYOUT, size=example.SIZE)
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(6):
            tokens.append(int(runner.alone(tokens).logits[-1].argmax()))
        answers.append(tokens[len(prompt) :])
    assert len({token for answer in answers for token in answer}) > 8, "a model that always says the same shows nothing"
    return answers


@pytest.mark.every_case
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_three_frameworks_give_the_same_tokens(example: ModuleType, expected, framework: str) -> None:
    assert list(example.MODELS) == FRAMEWORKS
    step, params = example.MODELS[framework](example.draw())
    answers, cache = example.generate(testing.assert_one_trace(step), params, PROMPTS, 6)
    assert answers == expected
    assert {d for x in jax.tree.leaves(cache) for d in x.devices()} == {jax.devices()[0]}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.slow
def test_on_a_mesh_with_explicit_axes_too(example: ModuleType, expected, framework: str) -> None:
    """Every device has a prompt; the parameters are on all of them."""
    mesh = example.explicit_mesh()
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,) and mesh.size == 4
    step, params = example.MODELS[framework](example.draw())
    with jax.set_mesh(mesh):
        answers, cache = example.generate(step, params, PROMPTS, 6, mesh)
    assert answers == expected
    assert all(x.sharding.spec[0] == "data" for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("framework", FRAMEWORKS[:1])  # the others differ in where their parameters are
def test_it_holds_to_the_equalities(example: ModuleType, framework: str) -> None:
    runner = testing.StepRunner(*example.MODELS[framework](example.draw()), example.LAYOUT, size=example.SIZE)
    testing.assert_chunking_invariant(runner, PROMPTS[0])
    testing.assert_batch_invariant(runner, PROMPTS)
    assert testing.assert_serving_invariant(runner, mixes=2)["comparisons"] > 5


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_its_decode_step_copies_no_pool(example: ModuleType, framework: str) -> None:
    size = example.dsv4.CacheSize(3000, 300, 8)
    manager = KVCacheManager(example.LAYOUT, size)
    plan = manager.plan_step([(manager.admit_request([1]), 1) for _ in range(2)])
    step, params = example.MODELS[framework](example.draw())
    cache = init_cache(example.LAYOUT, size)
    testing.assert_no_copies(step, params, cache, plan.pack(), np.zeros(2, np.int32), donate_argnums=1)


def test_it_runs(example: ModuleType, capsys, monkeypatch) -> None:
    monkeypatch.setattr(example, "MODELS", {"plain JAX": example.plain})
    example.main([])
    assert capsys.readouterr().out.startswith("plain JAX [[")
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    assert "--mesh" in capsys.readouterr().out


def test_the_layers_of_the_page_are_those_of_the_example(example: ModuleType) -> None:
    """docs/own_model.md writes each kind of layer out; its step gives what the example's attention gives."""
    page: dict = {}
    exec(blocks(DOCS / "own_model.md")[0].text, page)
    weights = example.draw()
    layers = [layer["matrices"] | layer["small"] for layer in weights["layers"]]

    def expected(params, cache, plan, tokens):
        step, x = cache.begin(plan), params["embed"][tokens]
        for i, p in enumerate(params["layers"]):
            made = {name: x @ p[name] for name in example.products_of(example.CFG.layer_types[i])}
            out, step = example.attention(step.layer(i), made, p)
            x = x + out @ p["out"]
        return x @ params["head"], step.finish()

    params = jax.tree.map(jnp.asarray, weights | {"layers": layers})
    found, wanted = (testing.StepRunner(step, params, example.LAYOUT) for step in (page["step"], expected))
    np.testing.assert_array_equal(found.alone(PROMPTS[0]).logits, wanted.alone(PROMPTS[0]).logits)
