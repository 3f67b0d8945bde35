"""Tokens a second of `dsv4-jax generate` on some layers with random weights as released, and where the time goes.

The checkpoint is drawn, written and loaded as any other. Beside every run stands the step that `bench model` times.
What is more is the host's: planning, dispatch, reading tokens back, printing.

Then what sampling adds to a step: `sample` by itself on logits of the vocabulary, and runs that draw at a temperature
or of what filters keep. Last, the same requests through an `Engine`'s thread.

    python benchmarks/bench_generate.py --layers 4 --json generate.json
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from harness import Recorder, jax_device, parser

from dsv4_jax import CacheLayout, model, plan_capacity
from dsv4_jax.bench.model import measure_model, model_config
from dsv4_jax.bench.step import StepOptions
from dsv4_jax.bench.timing import timed
from dsv4_jax.cli import generate as generate_command
from dsv4_jax.cli import main as cli
from dsv4_jax.engine import Engine, Prompt
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model.compiled_steps import CompiledSteps
from dsv4_jax.model.sampling import Sampling, SamplingRows, sample
from dsv4_jax.plan import StepPlan

# What a row of a step may ask for, as options of the command.
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
}
PARTS = {"schedule": KVCacheManager, "plan_step": KVCacheManager, "plan_tokens": KVCacheManager, "pack": StepPlan}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def checkpoint(options: StepOptions, folder: pathlib.Path) -> None:
    cfg, start = model_config(options), time.perf_counter()
    params = jax.block_until_ready(model.init_params(cfg, 0, "released"))
    drawn = time.perf_counter()
    model.save_hf(cfg, params, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    written = time.perf_counter() - drawn
    say(f"{size / 1e9:.1f} GB drawn in {drawn - start:.1f} s, written in {written:.1f} s")


class Timed:
    """Counts calls of some functions, and the seconds of each."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = collections.defaultdict(list)

    def of(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls[name].append(time.perf_counter() - start)

        return timed

    def medians_us(self) -> dict[str, float]:
        return {name: round(float(np.median(seconds)) * 1e6, 1) for name, seconds in self.calls.items()}


def run(
    folder: pathlib.Path, prompts: int, tokens: int, new: int, steps: int, loaded: dict[str, Any], drawing: str
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = folder / f"{prompts}.jsonl"
    ids.write_text("".join(f"{rng.integers(vocabulary, size=tokens).tolist()}\n" for _ in range(prompts)))
    argv = ["generate", "--checkpoint", folder, "--prompt-file", ids, "--max-new-tokens", new, "--decode-steps", steps]
    argv += ["--stop-tokens", "none", "--json"]
    argv += [word for name, value in SETTINGS[drawing].items() for word in (f"--{name.replace('_', '-')}", value)]
    clocks, out = Timed(), io.StringIO()

    def load(*args: Any, **kwargs: Any) -> Any:
        if not loaded:
            loaded["it"] = real(*args, **kwargs)
        return loaded["it"]

    real, compiled = generate_command.load, CompiledSteps.compiled

    def compiled_timed(self: CompiledSteps, step: Any, *args: Any, **kwargs: Any) -> Any:
        called = compiled(self, step, *args, **kwargs)
        return clocks.of("dispatch", called) if step.__name__ == "_decode" else called

    with contextlib.ExitStack() as patched:
        for name, owner in PARTS.items():
            patched.enter_context(mock.patch.object(owner, name, clocks.of(name, getattr(owner, name))))
        patched.enter_context(mock.patch.object(CompiledSteps, "compiled", compiled_timed))
        patched.enter_context(mock.patch.object(generate_command, "load", load))
        patched.enter_context(contextlib.redirect_stdout(out))
        status = cli([str(word) for word in argv])
    if status:
        raise SystemExit(status)
    report = json.loads(out.getvalue())
    del report["answers"], report["checkpoint"]
    step_ms = report["decode_s"] / report["decoded"] * prompts * 1e3
    report |= dict(prompts=prompts, decode_steps=steps, step_ms=step_ms, host_us=clocks.medians_us(), sampling=drawing)
    prefill, decode = report["prefill_tokens_per_s"], report["decode_tokens_per_s"]
    say(
        f"{prompts} prompts of {tokens}, {steps} steps a call, {drawing}: prefill {prefill:,.0f} tokens/s, "
        f"decode {decode:,.0f} tokens/s, {report['step_ms']:.3f} ms a step; load {report['load_s']:.1f} s, compile "
        f"{report['compile_s']:.1f} s; host, us a call: {report['host_us']}"
    )
    return report


def samples(vocabulary: int, rows: int, kept: int) -> dict[str, float]:
    """Microseconds of `sample` on [rows, vocabulary] logits: without settings, and with rows of each kind."""
    logits = jax.random.normal(jax.random.key(0), (rows, vocabulary)) * 3
    position = jax.numpy.arange(rows, dtype=jax.numpy.int32)
    found = {}
    for name, settings in {"none": None, **SETTINGS, "top_p": {"temperature": 1.0, "top_p": 0.95}}.items():
        packed = None if settings is None else SamplingRows.of(Sampling(seed=i, **settings) for i in range(rows))  # type: ignore[arg-type]
        call = jax.jit(sample)
        arguments = (logits,) if packed is None else (logits, jax.device_put(packed), position)
        found[name] = timed(lambda: call(*arguments).tokens, kept, 1)["step_ms"] * 1e3  # noqa: B023
    return found


def through_engine(params: model.Params, options: StepOptions, prompts: int, tokens: int, new: int) -> float:
    """Milliseconds a step of requests that an engine's thread decodes, from the second token of the last on."""
    cfg = model_config(options)
    layout = CacheLayout(cfg, "fp8", "fp4")
    size = plan_capacity(layout, max_requests=prompts, max_context=options.context, num_snapshots=0)
    rng, times = np.random.default_rng(1), list[tuple[float, int]]()
    with Engine.of(params, layout, size, policy=None) as engine:
        for _ in range(2):  # the first compiles
            handles = [
                engine.add(Prompt(tokens=rng.integers(cfg.vocab_size, size=tokens), max_new_tokens=new))
                for _ in range(prompts)
            ]
            times.clear()
            for output in handles[-1]:
                times.append((time.perf_counter(), len(output.tokens)))
            for handle in handles:
                handle.result()
    return (times[-1][0] - times[0][0]) / max(sum(count for _, count in times[1:]), 1) * 1e3


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--model", choices=("flash", "pro", "tiny"), default="flash")
    command.add_argument("--layers", type=int, default=4)
    command.add_argument("--prompts", type=int, nargs="*", default=[1, 16])
    command.add_argument("--steps", type=int, nargs="*", default=[1, 8])
    command.add_argument("--rows", type=int, nargs="*", default=[1, 64, 256], help="of `sample` by itself")
    command.add_argument("--sampling", choices=SETTINGS, nargs="*", default=[*SETTINGS])
    command.add_argument("--prompt-tokens", type=int, default=512)
    command.add_argument("--new-tokens", type=int, default=129)
    args = command.parse_args()
    context = args.prompt_tokens + args.new_tokens
    options = StepOptions(model=args.model, layers=args.layers, context=context)
    recorder = Recorder(
        args.json,
        command=f"python benchmarks/bench_generate.py --model {args.model} --layers {args.layers}",
        **jax_device(),
    )
    with tempfile.TemporaryDirectory() as name:
        folder, loaded = pathlib.Path(name), dict[str, Any]()
        checkpoint(options, folder)
        for rows in args.rows:
            found = samples(model_config(options).vocab_size, rows, 20)
            say(f"sample of {rows} rows, us: " + ", ".join(f"{name} {us:.1f}" for name, us in found.items()))
            recorder.add("sampling", batch=rows, vocabulary=model_config(options).vocab_size, us=found)
        for prompts in args.prompts:
            for steps in args.steps:
                reports = [
                    run(folder, prompts, args.prompt_tokens, args.new_tokens, steps, loaded, drawing)
                    for drawing in args.sampling
                ]
                each = StepOptions(model=args.model, layers=args.layers, batch=prompts, context=context, loop=steps)
                step = measure_model(each, loaded["it"][1], None)["step_ms"]
                beyond = ", ".join(f"{each['sampling']} {(each['step_ms'] - step) * 1e3:.0f}" for each in reports)
                say(f"    bench model: {step:.3f} ms a step; beyond it, us: {beyond}")
                for report in reports:
                    recorder.add("generate", model=args.model, layers=args.layers, **report, bench_step_ms=step)
            took = through_engine(loaded["it"][1], options, prompts, args.prompt_tokens, args.new_tokens)
            say(f"{prompts} prompts through an engine's thread: {took:.3f} ms a step")
            recorder.add("engine", model=args.model, layers=args.layers, prompts=prompts, step_ms=took)


if __name__ == "__main__":
    main()
