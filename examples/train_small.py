"""Trains a small DeepSeek-V4 on Python code, and writes it as the released checkpoints are.

    python examples/train_small.py prepare --data text                   download, tokenizer, tokens (small_text.py)
    python examples/train_small.py train --data text --run run --steps 5000
    python examples/train_small.py train --data text --run run --steps 5000 --resume
    python examples/train_small.py export --data text --run run --to checkpoints/small
    python examples/train_small.py plot --run run --run plain --to loss.svg
    python examples/train_small.py train --drafts --start checkpoints/small --data text --run drafts --steps 2000
    python examples/train_small.py export --drafts --start checkpoints/small --run drafts --to small-dspark
    python examples/train_small.py train --toy --run toy --steps 30      a CPU is enough: three layers, bytes as tokens

It needs the extra `train` (optax, orbax, tokenizers; the toy no tokenizers). What the model computes, and is rounded to
in training, is in small_model.py. `--model plain` trains a plain transformer of the same size on the same batches.
`--drafts` trains the three stages of DSpark for a checkpoint whose weights stay as they are (an MTP layer is left out).

One run: Muon for matrices and Adam for the rest (both as optax has them), a learning rate that rises for 2 % of the
steps, stays until 30 % and falls to nothing; CSA layers read all entries for the first 15 %, FP4 sets in at 50 %. All
that goes by the share of the run that is over, and what a step does is a function of its number and of the state: on a
CPU a run that was interrupted and resumed ends with the same bits. `--seconds` ends a run early, with the same
schedule, by the clock; then it is a function of that, too. `--start` begins with the weights of a checkpoint, and fresh
moments.

State is kept by orbax in the run's folder. `log.jsonl` beside it has a line for every 10 steps and every evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # for its neighbours, also where it is not the program
import small_model
import small_text
from small_model import DraftLosses, Losses, Phase, PlainConfig, Stacks

import dsv4_jax as dsv4
from dsv4_jax.model.weights.names import MTP

__all__ = ["Batches", "Recipe", "State", "Trainer", "export", "flops_per_token", "main", "picture", "replaced", "train"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run does.

    Attributes:
        steps: of the whole run.
        batch, length: sequences of a step, and tokens of each, a multiple of the window.
        blocks: of drafts of a sequence.
        rate: the highest learning rate of matrices, an update's root mean square being a fifth of it.
        other_rate: that of all else (Adam), as a share of `rate`.
        warm_up, decay, sparse, fp4: the shares of the run after which the rate is at its highest, after which it falls,
            after which CSA layers read what their indexers pick, and after which FP4 sets in.
        seed: of the weights and of the order of the text.
        bias_step: by how much an expert's bias rises or falls in a step.
    """

    steps: int
    batch: int = 16
    length: int = 4096
    blocks: int = 512
    rate: float = 6e-3
    other_rate: float = 0.3
    weight_decay: float = 0.1
    warm_up: float = 0.02
    decay: float = 0.3
    sparse: float = 0.15
    fp4: float = 0.5
    seed: int = 0
    bias_step: float = 1e-3
    remat: bool = False

    def rate_at(self, over: float) -> float:
        """The learning rate when this share of the run is over."""
        rising = min((over * self.steps + 1) / max(self.warm_up * self.steps, 1), 1)
        return self.rate * rising * min(max(1 - over, 0) / (1 - self.decay), 1)

    def phase_at(self, over: float) -> Phase:
        return Phase(fp4=np.bool_(over >= self.fp4), sparse=np.bool_(over >= self.sparse))


class State(NamedTuple):
    """All that a run goes on from.

    Attributes:
        stacks: the parameters, float32 (`small_model.stack`).
        biases: [layers with one, experts] float32, of the routers of what is trained; the MTP layer's is the last.
        moments: the optimiser's.
    """

    stacks: Stacks
    biases: jax.Array
    moments: Any


class Batches:
    """Windows of a long text, each once an epoch, in an order drawn for each epoch."""

    def __init__(self, tokens: np.ndarray, recipe: Recipe):
        self.tokens, self._batch, self._length, self._seed = tokens, recipe.batch, recipe.length, recipe.seed
        self._count = (tokens.size - 2) // recipe.length - 1
        if self._count < 1:
            raise SystemExit(f"{tokens.size} tokens are less than two windows of {recipe.length}")
        self._order = functools.lru_cache(maxsize=2)(self._drawn)

    def _drawn(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, epoch))
        return rng.integers(self._length) + self._length * rng.permutation(self._count)

    def starts(self, step: int) -> np.ndarray:
        """Where the windows of a step begin, [batch] int32."""
        places = np.arange(step * self._batch, (step + 1) * self._batch)
        return np.array([self._order(int(i) // self._count)[i % self._count] for i in places], np.int32)

    def in_order(self, steps: int) -> Iterator[np.ndarray]:
        """Yields the first windows of the text, `steps` batches or as many as there are: for evaluation."""
        for step in range(min(steps, self._count // self._batch)):
            yield (np.arange(step * self._batch, (step + 1) * self._batch) * self._length).astype(np.int32)


class Trainer:
    """The model, its optimiser, and one step of training."""

    def __init__(self, cfg: dsv4.DSV4Config | PlainConfig, recipe: Recipe):
        """Raises `SystemExit`: the recipe has a size that the model cannot be trained with."""
        self.cfg, self.recipe = cfg, recipe
        plain = isinstance(cfg, PlainConfig)
        for name in ("steps", "batch", "length", "blocks"):
            if (size := getattr(recipe, name)) < 1:
                raise SystemExit(f"--{name}: must be at least 1, got {size}")
        window = 1 if isinstance(cfg, PlainConfig) else cfg.sliding_window
        if recipe.length % window:
            raise SystemExit(f"--length: must be a multiple of the window of {window}, got {recipe.length}")
        # Where the stacks' arrays go; what is not trained is in it: hash tables, or the backbone of stages that draft.
        self.tree = small_model.plain_draw(cfg, recipe.seed) if plain else small_model.draw(cfg, recipe.seed)
        self.optimiser = _optimiser(recipe, small_model.stack(cfg, self.tree))
        # Not donated: an evaluation is a step whose state is thrown away, so that nothing else has to be compiled.
        self._compiled = jax.jit(self._step)

    def begin(self, start: pathlib.Path | None = None) -> State:
        """Begins with random weights, or with those of a checkpoint, and fresh moments.

        Stages that the checkpoint has not are drawn, and what they say is read by its own head.
        """
        tree, cfg = self.tree, self.cfg
        if start is not None:
            assert isinstance(cfg, dsv4.DSV4Config)
            own = dsv4.DSV4Config.from_hf(start)
            if dataclasses.replace(own, dspark=cfg.dspark, num_mtp_layers=cfg.num_mtp_layers) != cfg:
                raise SystemExit(f"{start} is a model of other sizes")
            alike = own.dspark == cfg.dspark
            _, tree = dsv4.model.load_hf(start, weights=jnp.float32, drafts=alike)
            if not alike:
                *first, last = self.tree[MTP]
                tree = tree | {MTP: (*first, last | {name: tree[name] for name in ("norm", "hc_head")})}
        self.tree = tree
        stacks = small_model.stack(cfg, tree)
        return State(stacks, self._biases(tree), self.optimiser.init(stacks))

    def params(self, stacks: Stacks, biases: jax.Array, tree: dsv4.model.Params | None = None) -> dsv4.model.Params:
        """The tree of the model's parameters. `tree`: what is not trained (default: as it begins)."""
        whole = small_model.unstack(self.cfg, stacks, self.tree if tree is None else tree)
        rows = iter(biases)

        def one(p: dsv4.model.Params) -> dsv4.model.Params:
            return p | {"ffn": p["ffn"] | {"gate_bias": next(rows)}} if "gate_bias" in p.get("ffn", {}) else p

        return whole | {name: tuple(map(one, whole[name])) for name in self._trained_layers if name in whole}

    def step(
        self, state: State, tokens: jax.Array, starts: ArrayLike, rate: ArrayLike, phase: Phase
    ) -> tuple[State, Losses | DraftLosses, jax.Array]:
        """The state after a step, the losses before it, and the norm of the gradient."""
        return self._compiled(self.tree, state, tokens, starts, rate, phase)

    @property
    def _trained_layers(self) -> tuple[str, ...]:
        return (MTP,) if getattr(self.cfg, "dspark", None) is not None else ("layers", MTP)

    def _biases(self, tree: dsv4.model.Params) -> jax.Array:
        layers = [p for name in self._trained_layers for p in tree.get(name, ())]
        found = [p["ffn"]["gate_bias"] for p in layers if "gate_bias" in p.get("ffn", {})]
        return jnp.stack(found) if found else jnp.zeros((1, 1))  # orbax keeps no empty arrays

    def _step(
        self,
        tree: dsv4.model.Params,
        state: State,
        tokens: jax.Array,
        starts: jax.Array,
        rate: jax.Array,
        phase: Phase,
    ) -> tuple[State, Losses | DraftLosses, jax.Array]:
        cfg, recipe = self.cfg, self.recipe
        batch = tokens[starts[:, None] + jnp.arange(recipe.length + 2)].astype(jnp.int32)
        weights = self.params(small_model.rounded(state.stacks, phase.fp4), state.biases, tree)
        on_gpu = jax.default_backend() == "gpu"

        def loss(trained: dict[str, jax.Array]) -> tuple[jax.Array, Losses | DraftLosses]:
            params = replaced(weights, trained)
            if isinstance(cfg, PlainConfig):
                found = small_model.plain_losses(cfg, params, batch, implementation="cudnn" if on_gpu else None)
            elif cfg.dspark is not None:
                precision = small_model.Precision(jnp.bfloat16 if on_gpu else jnp.float32)  # what each is fast at
                found = small_model.draft_losses(
                    cfg, params, batch[:, :-2], recipe.blocks, precision, remat=recipe.remat
                )
            else:
                found = small_model.losses(cfg, params, batch, phase, remat=recipe.remat)
            return found.total, found

        # By the rounded weights, each by itself: the gradient passes the rounding as it is.
        names = small_model.trained(cfg)
        leaves = ((jax.tree_util.keystr(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(weights))
        trained = {name: x for name, x in leaves if name in names}
        gradients, found = jax.grad(loss, has_aux=True)(trained)
        stacked = small_model.stack(cfg, replaced(weights, gradients))
        norm = jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(stacked)))
        stacked = jax.tree.map(lambda x: x / jnp.maximum(norm, np.float32(1)), stacked)
        updates, moments = self.optimiser.update(stacked, state.moments, state.stacks)
        stacks = jax.tree.map(lambda x, by: x + rate * by, state.stacks, updates)
        counts = found.counts
        biases = state.biases + np.float32(recipe.bias_step) * jnp.sign(counts.mean(-1, keepdims=True) - counts)
        return State(stacks, biases, moments), found, norm


def replaced(tree: dsv4.model.Params, values: dict[str, jax.Array]) -> dsv4.model.Params:
    """The tree with those of its leaves that `values` has under their `keystr`."""
    return jax.tree_util.tree_map_with_path(lambda keys, x: values.get(jax.tree_util.keystr(keys), x), tree)


def _optimiser(recipe: Recipe, stacks: Stacks) -> Any:
    """Updates at a learning rate of 1."""
    import optax

    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    return optax.contrib.muon(
        1.0,
        beta=0.95,
        weight_decay=recipe.weight_decay,
        consistent_rms=0.2,
        adam_learning_rate=recipe.other_rate,
        adam_b1=0.9,
        adam_b2=0.95,
        muon_weight_dimension_numbers={name: axes if name.startswith("muon") else None for name in stacks},
    )


class _Log:
    """Lines of JSON, in a file and on the screen."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def __call__(self, **facts: Any) -> None:
        values = {name: np.asarray(value) for name, value in facts.items()}
        line = json.dumps(
            {name: (x.astype(float).round(5) if x.dtype.kind == "f" else x).tolist() for name, x in values.items()}
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def train(
    trainer: Trainer,
    text: np.ndarray,
    held_out: np.ndarray,
    run: pathlib.Path,
    *,
    resume: bool = False,
    start: pathlib.Path | None = None,
    stop: int | None = None,
    seconds: float | None = None,
    save_every: float = 120.0,
    evaluations: int = 4,
    evaluate: int = 4,
    final: int = 16,
    kept: Callable[[State, bool], None] | None = None,
) -> State:
    """Runs `trainer.recipe` in the folder `run`, or goes on with what is there.

    Args:
        stop: a step to stop at, as if interrupted, after saving.
        seconds: that the run may take from now on.
        save_every: seconds between saved states.
        evaluations: on held-out text on the way, beside the one at the end.
        evaluate, final: batches of each of them, and of the last.
        kept: called with the state and whether it is the last, whenever that is saved.
    """
    import orbax.checkpoint as ocp

    recipe, begun, batches = trainer.recipe, time.monotonic(), Batches(text, trainer.recipe)
    run.mkdir(parents=True, exist_ok=True)
    log, first, state = _Log(run / "log.jsonl"), 0, trainer.begin(start)
    manager = ocp.CheckpointManager(
        (run / "state").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
    )
    if resume and (latest := manager.latest_step()) is not None:
        state = _restored(manager, latest, state)
        first = latest
    state = jax.device_put(state, jax.devices()[0])  # one step is compiled for new states and those that were kept
    on_device = jnp.asarray(np.concatenate([text, held_out]))  # one array, so that a step has one shape
    tokens_of_step, over_at_first = recipe.batch * recipe.length, first / recipe.steps

    def over(step: int) -> float:
        """The share of the run that is over before a step."""
        by_steps = step / recipe.steps
        if seconds is None:
            return by_steps
        by_clock = (time.monotonic() - compiled) / (seconds - (compiled - begun)) if step > first else 0.0
        return min(max(by_steps, over_at_first + (1 - over_at_first) * by_clock), 1.0)

    def evaluated(step: int, state: State, count: int) -> None:
        phase, found = recipe.phase_at(over(step)), []
        for starts in Batches(held_out, recipe).in_order(count):
            found.append(trainer.step(state, on_device, starts + np.int32(text.size), np.float32(0), phase)[1].facts)
        means = {name: np.mean([facts[name] for facts in found], 0, np.float64) for name in found[0]}
        held = {"held_out" if name == "loss" else f"held_out_{name}": mean for name, mean in means.items()}
        log(step=step, **held, tokens=step * tokens_of_step)

    def save(step: int, state: State, last: bool) -> None:
        if step in manager.all_steps():
            return
        manager.save(step, args=ocp.args.StandardSave(state))
        if kept is not None:
            kept(state, last)

    step, waiting, evaluated_at = first, [], int(over_at_first * (evaluations + 1))
    saved = compiled = time.monotonic()
    mark = (first, compiled)
    while step < (recipe.steps if stop is None else stop) and (done := over(step)) < 1:
        if int(done * (evaluations + 1)) > evaluated_at:
            evaluated_at = int(done * (evaluations + 1))
            evaluated(step, state, evaluate)
        rate = recipe.rate_at(done)
        state, found, norm = trainer.step(
            state, on_device, batches.starts(step), np.float32(rate), recipe.phase_at(done)
        )
        waiting.append((step, rate, found, norm))
        if step == first:
            jax.block_until_ready(found)
            saved = compiled = time.monotonic()
            mark = (first, compiled)
            log(step=step, loss=found.facts["loss"], compiled_s=compiled - begun)
        step += 1
        if len(waiting) > 2:  # no further ahead of the device than that
            at, rate, found, norm = waiting.pop(0)
            loss = float(found.facts["loss"])
            if at % 10 == 0 and at > first:
                speed = (at - mark[0]) * tokens_of_step / (time.monotonic() - mark[1])
                mark, spread = (at, time.monotonic()), _spread(found.counts)
                log(
                    step=at,
                    **found.facts,
                    norm=norm,
                    rate=rate,
                    fullest=spread,
                    tokens_per_s=speed,
                )
            if not np.isfinite(loss):
                raise SystemExit(f"the loss of step {at} is {loss}")
        if time.monotonic() - saved > save_every:
            save(step, state, False)
            saved = time.monotonic()
    ended = stop is None or step >= recipe.steps
    save(step, state, ended)
    if ended:
        evaluated(step, state, final)
    manager.wait_until_finished()
    manager.close()
    return state


def _restored(manager: Any, step: int, like: State) -> State:
    import orbax.checkpoint as ocp

    return manager.restore(step, args=ocp.args.StandardRestore(jax.tree.map(_described, like)))


def _spread(counts: jax.Array) -> float:
    """The tokens of the fullest expert over those of an average one, of the worst layer."""
    each = np.asarray(counts)
    return float((each.max(-1) / np.maximum(each.mean(-1), 1)).max())


def _described(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x


def flops_per_token(cfg: dsv4.DSV4Config, length: int) -> float:
    """Counts multiplications and additions of all products of a training step, forward and backward."""
    experts, inner, hidden = cfg.n_routed_experts + cfg.n_shared_experts, cfg.moe_intermediate_size, cfg.hidden_size
    heads, dim, mix = cfg.num_attention_heads, cfg.head_dim, cfg.hc_mult * (2 + cfg.hc_mult)
    every = (
        cfg.q_lora_rank * (hidden + heads * dim)
        + dim * hidden
        + cfg.o_lora_rank * (heads * dim + cfg.o_groups * hidden)
    )
    every += 3 * experts * inner * hidden + 2 * mix * cfg.hc_mult * hidden + 2 * heads * dim * 2 * cfg.sliding_window
    total = every * (cfg.num_layers + 1) + 2 * cfg.vocab_size * hidden + (1 + cfg.hc_mult) * hidden * hidden
    csa, hca = (cfg.count(kind) for kind in (dsv4.AttentionType.CSA, dsv4.AttentionType.HCA))
    entries, index = length // cfg.csa_ratio, cfg.index_n_heads * cfg.index_head_dim
    total += csa * (4 * dim * hidden + 2 * heads * dim * entries)
    total += csa * (index * (cfg.q_lora_rank + entries) + 4 * cfg.index_head_dim * hidden)
    total += hca * (2 * dim * hidden + 2 * heads * dim * (length // cfg.hca_ratio))
    return 6.0 * total


def export(trainer: Trainer, stacks: Stacks, biases: jax.Array, to: pathlib.Path) -> None:
    """Writes the weights in the released formats, under the published names."""
    assert isinstance(trainer.cfg, dsv4.DSV4Config)
    params = trainer.params(stacks, biases)
    dsv4.model.save_hf(trainer.cfg, small_model.released(trainer.cfg, params), to)


def picture(runs: dict[str, list[dict[str, Any]]]) -> Any:
    """The loss over tokens, a `matplotlib.figure.Figure`: of the lines of each run's log, in training and held out."""
    import dsv4_jax.plotting as plotting

    with plotting.style():
        made = plotting.figure("Loss in training", "Nats per token of the text; points are held-out files", 3.6)
        axes = made.subplots()
        for i, (name, lines) in enumerate(runs.items()):
            look = plotting.look(i, markers=True)
            held_out = [line for line in lines if "held_out" in line]
            on_the_way = [line for line in lines if "tokens_per_s" in line]
            each = held_out[-1]["tokens"] / held_out[-1]["step"] / 1e6
            few = min(5, len(on_the_way))
            smooth = np.convolve([line["loss"] for line in on_the_way], np.full(few, 1 / few), "valid")
            tokens = [each * line["step"] for line in on_the_way[few // 2 :][: len(smooth)]]
            axes.plot(tokens, smooth, color=look["color"], linestyle=look["linestyle"], label=name)
            axes.plot(
                [line["tokens"] / 1e6 for line in held_out],
                [line["held_out"] for line in held_out],
                color=look["color"],
                marker=look["marker"],
                linestyle="none",
                label=f"{name}, held out",
            )
        axes.set(xlabel="million tokens", ylabel="nats per token", ylim=(1, 4), xlim=(0, None))
        plotting.legend_below(made, [axes])
    return made


def _toy_text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of some of the standard library, two left for the marks."""
    folder = pathlib.Path(json.__file__).parent
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    tokens = np.frombuffer(data, np.uint8).astype(np.uint16) + np.uint16(2)
    return tokens[: -len(tokens) // 8], tokens[-len(tokens) // 8 :]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "train", "export", "plot"))
    parser.add_argument("--data", type=pathlib.Path, help="folder of the text")
    parser.add_argument("--manifest", type=pathlib.Path, help="prepare: what it writes of its sources")
    parser.add_argument("--run", type=pathlib.Path, action="append", help="folder of the run; plot: several times")
    parser.add_argument("--to", type=pathlib.Path, help="export: the checkpoint's folder; plot: the picture")
    parser.add_argument("--model", choices=("v4", "plain"), default="v4")
    parser.add_argument("--toy", action="store_true", help="a tiny model on bytes, for a CPU")
    parser.add_argument("--drafts", action="store_true", help="DSpark's stages, for the checkpoint --start as it is")
    parser.add_argument("--start", type=pathlib.Path, help="train: begin with the weights of this checkpoint")
    parser.add_argument("--resume", action="store_true", help="train: go on where the run's folder is")
    parser.add_argument("--seconds", type=float, help="train: end after so long")
    parser.add_argument("--stop", type=int, help="train: stop at this step, to be resumed")
    types = {"int": int, "float": float}
    for field in dataclasses.fields(Recipe):
        if field.type in types:
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=types[field.type], help="as in Recipe")
    parser.add_argument("--remat", action="store_const", const=True, help="train: less memory, more work")
    args = parser.parse_args(argv)
    if args.command == "prepare":
        small_text.prepare(args.data, args.manifest or args.data / "manifest.json")
        return 0
    if args.command == "plot":
        import dsv4_jax.plotting as plotting

        logs = {run.name: (run / "log.jsonl").read_text().splitlines() for run in args.run}
        plotting.save(picture({name: [json.loads(line) for line in lines] for name, lines in logs.items()}), args.to)
        return 0
    (run,) = args.run
    chosen: dict[str, Any] = dict(steps=100, batch=2, length=128, blocks=16) if args.toy else dict(steps=3000)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe)}
    recipe = Recipe(**{**chosen, **{name: value for name, value in given.items() if value is not None}})
    if args.model == "plain":
        cfg: Any = PlainConfig(512, 64, 2, 4, 128) if args.toy else PlainConfig()
    else:
        cfg = small_model.toy_config() if args.toy else small_model.small_config()
    if args.drafts:
        if args.model == "plain" or (args.start is None and not args.toy):
            raise SystemExit("--drafts: the stages of a V4 that is trained already, give --start")
        cfg = small_model.with_drafts(cfg)
    if args.command == "export" and not (run / "state").is_dir():
        raise SystemExit(f"--run: {run} has no state of a run")
    trainer = Trainer(cfg, recipe)
    if args.command == "export":
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager((run / "state").absolute()) as manager:
            state = _restored(manager, manager.latest_step(), trainer.begin(args.start if args.drafts else None))
        export(trainer, state.stacks, state.biases, args.to)
        if args.data is not None:
            small_text.save_tokenizer(args.data, args.to)
        return 0
    text, held_out = (
        _toy_text() if args.toy else (small_text.tokens_of(args.data, split) for split in ("train", "held_out"))
    )
    train(trainer, text, held_out, run, resume=args.resume, start=args.start, stop=args.stop, seconds=args.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
