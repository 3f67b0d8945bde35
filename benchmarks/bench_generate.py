"""Tokens a second of `dsv4-jax generate` on some layers with random weights as released, and where the time goes.

The checkpoint is drawn, written and loaded as any other. Beside every run stands the step that `bench model` times.
What is more is the host's: planning, dispatch, reading tokens back, printing.

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

from dsv4_jax import model
from dsv4_jax.bench.model import measure_model, model_config
from dsv4_jax.bench.step import StepOptions
from dsv4_jax.cli import generate as generate_command
from dsv4_jax.cli import main as cli
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model.compiled_steps import CompiledSteps
from dsv4_jax.plan import StepPlan

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
    folder: pathlib.Path, prompts: int, tokens: int, new: int, steps: int, loaded: dict[str, Any]
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = folder / f"{prompts}.jsonl"
    ids.write_text("".join(f"{rng.integers(vocabulary, size=tokens).tolist()}\n" for _ in range(prompts)))
    argv = ["generate", "--checkpoint", folder, "--prompt-file", ids, "--max-new-tokens", new, "--decode-steps", steps]
    argv += ["--stop-tokens", "none", "--json"]
    timed, out = Timed(), io.StringIO()

    def load(*args: Any, **kwargs: Any) -> Any:
        if not loaded:
            loaded["it"] = real(*args, **kwargs)
        return loaded["it"]

    real, compiled = generate_command.load, CompiledSteps.compiled

    def compiled_timed(self: CompiledSteps, step: Any, *args: Any, **kwargs: Any) -> Any:
        called = compiled(self, step, *args, **kwargs)
        return timed.of("dispatch", called) if step.__name__ == "_decode" else called

    with contextlib.ExitStack() as patched:
        for name, owner in PARTS.items():
            patched.enter_context(mock.patch.object(owner, name, timed.of(name, getattr(owner, name))))
        patched.enter_context(mock.patch.object(CompiledSteps, "compiled", compiled_timed))
        patched.enter_context(mock.patch.object(generate_command, "load", load))
        patched.enter_context(contextlib.redirect_stdout(out))
        status = cli([str(word) for word in argv])
    if status:
        raise SystemExit(status)
    report = json.loads(out.getvalue())
    del report["answers"], report["checkpoint"]
    step_ms = report["decode_s"] / report["decoded"] * prompts * 1e3
    report |= dict(prompts=prompts, decode_steps=steps, step_ms=step_ms, host_us=timed.medians_us())
    prefill, decode = report["prefill_tokens_per_s"], report["decode_tokens_per_s"]
    say(
        f"{prompts} prompts of {tokens}, {steps} steps a call: prefill {prefill:,.0f} tokens/s, decode {decode:,.0f} "
        f"tokens/s, {report['step_ms']:.3f} ms a step; load {report['load_s']:.1f} s, compile "
        f"{report['compile_s']:.1f} s; host, us a call: {report['host_us']}"
    )
    return report


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--model", choices=("flash", "pro", "tiny"), default="flash")
    command.add_argument("--layers", type=int, default=4)
    command.add_argument("--prompts", type=int, nargs="*", default=[1, 16])
    command.add_argument("--steps", type=int, nargs="*", default=[1, 8])
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
        for prompts in args.prompts:
            for steps in args.steps:
                report = run(folder, prompts, args.prompt_tokens, args.new_tokens, steps, loaded)
                each = StepOptions(model=args.model, layers=args.layers, batch=prompts, context=context, loop=steps)
                step = measure_model(each, loaded["it"][1], None)["step_ms"]
                say(f"    bench model: {step:.3f} ms a step; beyond it {(report['step_ms'] - step) * 1e3:.0f} us")
                recorder.add("generate", model=args.model, layers=args.layers, **report, bench_step_ms=step)


if __name__ == "__main__":
    main()
