"""examples/train_small.py: what it trains is the model, rounded as it is released; a resumed run has the same bits."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as dsv4
from dsv4_jax.config import AttentionType
from dsv4_jax.formats import fp8, index_fp4, kv_format
from dsv4_jax.formats.weights import fp4 as fp4_weights
from dsv4_jax.formats.weights import fp8 as fp8_weights
from dsv4_jax.model import forward_uncached, init_params, load_hf
from dsv4_jax.model.uncached import mtp_uncached

from . import pictures
from .examples import load_example
from .oracle.dspark import Twin

RNG = np.random.default_rng(34)


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as optax needs it
        yield load_example("train_small")


@pytest.fixture(scope="module")
def model(example: ModuleType) -> ModuleType:
    return example.small_model


@pytest.fixture(scope="module")
def trainer(example: ModuleType):
    """Of a model as small as the released formats allow: every kind of layer (the MTP layer is SWA) and of router."""
    return example.Trainer(
        tiny(AttentionType.CSA, AttentionType.HCA), example.Recipe(steps=6, batch=2, length=64, fp4=0.4, sparse=0.2)
    )


def tiny(*layers: AttentionType) -> dsv4.DSV4Config:
    return dsv4.DSV4Config.tiny(
        vocab_size=258,
        hidden_size=128,
        layer_types=layers,
        num_attention_heads=2,
        head_dim=128,
        rope_dim=16,
        q_lora_rank=128,
        o_lora_rank=64,
        moe_intermediate_size=128,
        index_head_dim=32,
        num_mtp_layers=1,
        sliding_window=16,
        hc_sinkhorn_iters=3,
    )


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_the_uncached_model(example: ModuleType, model: ModuleType, trainer) -> None:
    cfg, tokens = trainer.cfg, jnp.asarray(RNG.integers(0, 258, (1, 66)), jnp.int32)
    params = init_params(cfg, 3, drafts=True)
    trained = {jax.tree_util.keystr(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(params)}
    trained = {name: x for name, x in trained.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def ours(trained: dict[str, jax.Array]) -> tuple[jax.Array, tuple]:
        found = model.losses(cfg, example.replaced(params, trained), tokens, precision=model.EXACT)
        return found.total, found

    def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]).mean()

    def theirs(trained: dict[str, jax.Array]) -> jax.Array:
        tree, row = example.replaced(params, trained), tokens[0]
        mtp = cross_entropy(mtp_uncached(cfg, tree, row[:65]), row[2:])
        return cross_entropy(forward_uncached(cfg, tree, row[:64]), row[1:65]) + np.float32(0.3) * mtp

    (total, found), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(trained)
    expected, of_expected = jax.jit(jax.value_and_grad(theirs))(trained)
    np.testing.assert_allclose(total - np.float32(0.1) * found.index, expected, rtol=2e-5)
    np.testing.assert_array_equal(found.counts.sum(1), [64 * cfg.num_experts_per_tok] * 2)
    norm = np.linalg.norm([np.linalg.norm(x) for x in of_expected.values()])
    for name, x in gradients.items():
        if "indexer" in name:  # learns from a loss of its own, which nothing else learns from
            assert np.linalg.norm(x) > 0, name
        else:
            assert np.linalg.norm(x - of_expected[name]) < 1e-4 * np.linalg.norm(x) + 1e-6 * norm, name


def test_roundings_are_those_of_the_formats(model: ModuleType) -> None:
    wide = (RNG.normal(size=(192, 256)) * np.exp2(RNG.integers(-6, 6, (192, 256)))).astype(np.float32)
    halves = np.float32([0, 0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5])  # between two codes
    wide[0, :32] = np.tile(halves, 4)
    x = jnp.asarray(wide)
    np.testing.assert_array_equal(model.fp8_rounded_weight(x), fp8_weights.decode(*fp8_weights.encode(x), jnp.float32))
    np.testing.assert_array_equal(model.fp4_rounded(x), fp4_weights.decode(*fp4_weights.encode(x), jnp.float32))
    np.testing.assert_array_equal(model.fp4_rounded(x), index_fp4.round_trip(x))
    row = kv_format("fp8", 256, 64)
    stored = fp8.decode(row, fp8.encode(row, x))
    np.testing.assert_array_equal(model.Precision(jnp.float32).row(x, 64)[:, :192], stored[:, :192])


def test_a_resumed_run_ends_with_the_same_bits(example: ModuleType, model: ModuleType, tmp_path) -> None:
    """Of the plain model, which compiles sooner: the loop and what it keeps are the same."""
    recipe = example.Recipe(steps=6, batch=2, length=64)
    trainer = example.Trainer(model.PlainConfig(258, 32, 1, 2, 64), recipe)
    text, held_out = (RNG.integers(2, 258, n).astype(np.uint16) for n in (3000, 400))
    few = {"evaluate": 1, "final": 1, "evaluations": 1}
    through = example.train(trainer, text, held_out, tmp_path / "through", **few)
    example.train(trainer, text, held_out, tmp_path / "cut", stop=3, **few)
    resumed = example.train(trainer, text, held_out, tmp_path / "cut", resume=True, **few)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(through), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not any(np.array_equal(x, through.stacks[name]) for name, x in trainer.begin().stacks.items())
    lines = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 6 and 0 < lines[-1]["held_out"] < 8


def test_a_step_trains_all_but_the_hash_tables(example: ModuleType, trainer) -> None:
    state = trainer.begin()
    starts, on = jnp.zeros(2, jnp.int32), np.bool_(True)
    phase = example.Phase(on, on)
    after, found, _ = jax.eval_shape(trainer.step, state, jnp.zeros(500, jnp.uint16), starts, np.float32(0.1), phase)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert found.counts.shape == state.biases.shape == (2, trainer.cfg.n_routed_experts)
    count = sum(x.size for x in state.stacks.values()) + state.biases.size
    specs = dsv4.model.param_specs(trainer.cfg, drafts=True)
    assert count == sum(x.size for x in jax.tree.leaves(specs) if x.dtype != jnp.int32)


def test_a_checkpoint_is_what_was_trained_with(example: ModuleType, model: ModuleType, trainer, tmp_path) -> None:
    state = trainer.begin()
    biases = jnp.asarray(RNG.normal(size=state.biases.shape), jnp.float32)
    example.export(trainer, state.stacks, biases, tmp_path)
    cfg, params = load_hf(tmp_path, weights=jnp.float32, drafts=True)
    assert cfg == trainer.cfg
    begun = trainer.begin(tmp_path)  # a run that goes on from it
    np.testing.assert_array_equal(begun.biases, biases)
    for name, x in model.rounded(state.stacks).items():
        np.testing.assert_array_equal(begun.stacks[name], x.astype(jnp.float32))
    expected = trainer.params(model.rounded(state.stacks), biases)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(ours.dtype))


@pytest.mark.slow
def test_losses_of_blocks_are_those_of_their_definition(model: ModuleType) -> None:
    """Behind one token, within the window, at its length and beyond: distributions of the backbone without a cache."""
    cfg = model.with_drafts(tiny(AttentionType.SWA, AttentionType.HCA))
    params, tokens = init_params(cfg, 5, drafts=True), RNG.integers(0, 258, 64).astype(np.int32)
    found = model.draft_losses(cfg, params, jnp.asarray(tokens)[None], 7, model.EXACT)
    _, (first, second), _, _ = model._backbone(
        cfg,
        params,
        jnp.asarray(tokens)[None],
        model._kept_products(cfg, model.LEARNED, model.EXACT, False),
        model.EXACT,
    )
    heard = np.concatenate([first[0], second[0]], 1).astype(np.float64)
    of_backbone = np.asarray(jax.nn.softmax(forward_uncached(cfg, params, jnp.asarray(tokens)), -1), np.float64)
    twin, fed, losses, sure = Twin(cfg, params, drafts=5), 0, [], []
    for start in 1 + np.arange(7) * (64 - 6) // 6:
        twin.commit(heard[fed:start], fed)
        fed = start
        said = twin.draft(start, tokens[start], lambda k, _, at=start: int(tokens[min(at + k + 1, 63)]))
        likely = said.logits - np.log(np.exp(said.logits).sum(1, keepdims=True))
        target = of_backbone[start : start + 5]
        losses.append(-(target * likely).sum(1))
        right, c = np.minimum(target, np.exp(likely)).sum(1), np.asarray(said.confidence)
        sure.append(-(right * np.log(c) + (1 - right) * np.log(1 - c)))
    np.testing.assert_allclose(found.drafts, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(found.confidence, np.mean(sure), rtol=1e-5)
    weights = 0.8 ** np.arange(5)
    total = (np.mean(losses, 0) * weights).sum() / weights.sum() + np.mean(sure)
    np.testing.assert_allclose(found.total, total, rtol=1e-5)
    np.testing.assert_array_equal(found.counts.sum(1), [7 * 5 * cfg.num_experts_per_tok] * 3)


def test_stages_that_draft_are_trained_beside_a_backbone_that_stays(
    example: ModuleType, model: ModuleType, tmp_path
) -> None:
    """From a checkpoint with an MTP layer to one with DSpark; a resumed run has the same bits."""
    plain = example.Trainer(tiny(AttentionType.SWA), example.Recipe(steps=1))
    begun = plain.begin()
    example.export(plain, begun.stacks, begun.biases, tmp_path / "start")
    cfg = model.with_drafts(plain.cfg)
    trainer = example.Trainer(cfg, example.Recipe(steps=6, batch=2, length=32, blocks=4))
    text = np.tile(RNG.integers(2, 258, 40), 40).astype(np.uint16)
    few: dict = {"evaluate": 1, "final": 1, "evaluations": 1, "start": tmp_path / "start"}
    through = example.train(trainer, text, text[:200], tmp_path / "through", **few)
    example.train(trainer, text, text[:200], tmp_path / "cut", stop=3, **few)
    resumed = example.train(trainer, text, text[:200], tmp_path / "cut", resume=True, **few)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(through), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    lines = [json.loads(line) for line in (tmp_path / "through" / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["held_out"] < lines[0]["loss"] - 0.1 and len(lines[-1]["held_out_agreed"]) == 5
    example.export(trainer, through.stacks, through.biases, tmp_path / "drafts")
    found, params = load_hf(tmp_path / "drafts", drafts=True)
    assert found == cfg and len(params["mtp"]) == 3
    _, before = load_hf(tmp_path / "start")
    for name, x in before.items():
        jax.tree.map(np.testing.assert_array_equal, params[name], x)
    assert float(jnp.abs(params["mtp"][2]["markov"]["w2"]).max()) > 0  # they begin at zero


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (dict(steps=0), "--steps: must be at least 1, got 0"),
        (dict(blocks=0), "--blocks: must be at least 1, got 0"),
        (dict(length=40), "--length: must be a multiple of the window of 16, got 40"),
    ],
)
def test_sizes_that_nothing_can_be_trained_with(example: ModuleType, sizes: dict[str, int], problem: str) -> None:
    recipe = example.Recipe(**{"steps": 1, "batch": 1, "length": 32, **sizes})
    with pytest.raises(SystemExit, match=problem):
        example.Trainer(tiny(AttentionType.SWA), recipe)


def test_a_run_that_is_not_there_is_not_exported(example: ModuleType, tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"--run: .*nothing has no state of a run"):
        example.main(["export", "--toy", "--run", str(tmp_path / "nothing"), "--to", str(tmp_path / "to")])
    assert not any(tmp_path.iterdir())


def test_the_small_model_has_its_size(model: ModuleType) -> None:
    cfg, plain = model.small_config(), model.plain_specs(model.PlainConfig())
    specs = dsv4.model.param_specs(cfg, drafts=True)
    count, of_plain = (sum(x.size for x in jax.tree.leaves(tree) if x.dtype != jnp.int32) for tree in (specs, plain))
    assert 22e6 < count < 24e6 and dsv4.model.weight_bytes(cfg, drafts=True) < 23.5e6
    assert abs(of_plain / count - 1) < 0.03


def test_text_is_taken_under_known_licences_only(example: ModuleType, tmp_path) -> None:
    code = "".join(f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(20))
    files = {
        "it/a.py": code,
        "it/b.py": "# GNU General Public License\n" + code,
        "it/tests/test_a.py": code,
        "it/c.txt": code,
    }
    for licence, taken in (("MIT", ["it/a.py"]), ("GPL-3.0-only", None)):
        wheel = tmp_path / f"{licence}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("it-1.dist-info/METADATA", f"Name: it\nLicense-Expression: {licence}\n\nIt is MIT.")
            for name, content in files.items():
                archive.writestr(name, content)
        if taken is None:
            with pytest.raises(SystemExit, match="it==1: its licence is"):
                example.small_text.read_wheel(wheel, "it==1")
        else:
            texts, about = example.small_text.read_wheel(wheel, "it==1")
            assert [text.path for text in texts] == taken and about["licence"] == licence
    tokens = RNG.integers(0, 4096, 1000).astype(np.uint16)
    example.small_text.write_tokens(tokens, tmp_path / "text.xz")
    np.testing.assert_array_equal(example.small_text.read_tokens(tmp_path / "text.xz"), tokens)
    np.testing.assert_array_equal(example.small_text.tokens_of(tmp_path, "text"), tokens)


def test_the_loss_is_drawn(example: ModuleType) -> None:
    lines = [{"step": step, "loss": 8 - 0.1 * step, "tokens_per_s": 1.0} for step in range(10, 60, 10)]
    held_out = [{"step": step, "tokens": 1000 * step, "held_out": 3.0} for step in (30, 60)]
    made = example.picture({"small": lines + held_out, "plain": lines[:3] + held_out})
    pictures.check(made)
    assert pictures.labels(made) == ["small", "small, held out", "plain", "plain, held out"]


def test_windows_of_the_text_are_each_drawn_once_an_epoch(example: ModuleType) -> None:
    recipe = example.Recipe(steps=1, batch=4, length=32)
    batches = example.Batches(np.zeros(32 * 9 + 5, np.uint16), recipe)  # eight windows
    starts = np.concatenate([batches.starts(step) for step in range(4)])
    for epoch in (starts[:8], starts[8:]):
        assert sorted(epoch - epoch.min()) == list(range(0, 256, 32)) and epoch.max() + 34 <= 32 * 9 + 5
    assert not np.array_equal(starts[:8], starts[8:])
