"""The jnp reference on a CPU: an op where nobody jits it, the same jitted, and what it takes to compile a step.

    JAX_PLATFORMS=cpu python benchmarks/bench_reference.py           # two minutes
    JAX_PLATFORMS=cpu python benchmarks/bench_reference.py --only steps --level 0

Seconds are of the processor, all threads together, so that what else a machine does counts little. Ops: the shapes of
`dsv4_jax bench --quick`, which are few tokens at V4's widths, and `lax.top_k` beside `top_k`. Steps: tokens of one
request through four layers, at the widths of `DSV4Config.tiny` and at V4's attention widths; `first` is what its
first call costs before anything runs: trace, lower, compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

import dsv4_jax as dsv4
from dsv4_jax.bench.ops import problem
from dsv4_jax.bench.shapes import QUICK, TopKShape
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import StepSequence, StepShape, build_plan

TINY = dsv4.DSV4Config.tiny()
V4_WIDTHS = dataclasses.replace(
    TINY, hidden_size=512, head_dim=512, rope_dim=64, num_attention_heads=16, q_lora_rank=256, o_lora_rank=128,
    index_head_dim=128, index_topk=64, sliding_window=128, hca_ratio=128,
)  # fmt: skip
STEPS = {"tiny": (TINY, (1, 22, 64)), "v4-widths": (V4_WIDTHS, (1, 22, 64))}
REPEATS = 20


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - start


def measure_ops() -> Table:
    table = Table("op", "shape", "tokens", "first call s", "call ms", "jitted ms")
    for case in QUICK:
        (batch,) = case.batches
        shape = case.make(batch)
        made = problem(case.op, shape, 1, pool_rows=1 << 10)
        ours = lambda shared, carry, call, made=made: made.apply(shared, carry, call, "xla")  # noqa: E731
        add_op(table, (case.op, case.name, batch), ours, made)
        if isinstance(shape, TopKShape):
            alone = lambda shared, carry, call, k=shape.k: lax.top_k(call[0], k)  # noqa: E731
            add_op(table, ("lax.top_k", case.name, batch), alone, made)
    return table


def add_op(table: Table, names: tuple[Any, ...], apply: Callable[..., Any], made: Any) -> None:
    operands = (made.shared, made.carry(), made.calls[0])
    jitted = jax.jit(apply)
    first = seconds(lambda: apply(*operands))
    call = min(seconds(lambda: apply(*operands)) for _ in range(REPEATS))
    jax.block_until_ready(jitted(*operands))
    alone = min(seconds(lambda: jitted(*operands)) for _ in range(REPEATS))
    table.add_row(*map(str, names), f"{first:.2f}", f"{1e3 * call:.2f}", f"{1e3 * alone:.2f}")


def measure_steps(level: int | None) -> Table:
    table = Table("model", "tokens", "trace s", "lower s", "compile s", "first s", "instructions", "fusions", "step ms")
    for name, (cfg, tokens) in STEPS.items():
        params = dsv4.model.init_params(cfg)
        for count in tokens:
            table.add_row(name, str(count), *measure_step(cfg, params, count, level))
    return table


def measure_step(cfg: dsv4.DSV4Config, params: dsv4.model.Params, count: int, level: int | None) -> list[str]:
    layout = dsv4.CacheLayout(cfg)
    columns = layout.blocks_for(count)
    size = CacheSize(num_blocks=columns, num_slots=1, max_blocks_per_request=columns)
    shape = StepShape.bound(layout, 1, count, columns=columns, history=count > 1)
    entries = [(1, column, column + 1) for column in range(columns)]
    plan = build_plan(layout, [StepSequence(1, 0, count)], shape, size=size, table_entries=entries).pack()
    tokens, cache = np.zeros(count, np.int32), dsv4.init_cache(layout, size)

    options: Any = None if level is None else {"xla_backend_optimization_level": level}
    step = jax.jit(dsv4.model.forward, donate_argnames="cache")
    times = [time.process_time()]
    traced = step.trace(params, cache, plan, tokens)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile(compiler_options=options)
    times.append(time.process_time())
    text = compiled.as_text() or ""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.process_time()
        _, cache = jax.block_until_ready(compiled(params, cache, plan, tokens))
        best = min(best, time.process_time() - start)
    parts = [*np.diff(times), times[-1] - times[0]]
    instructions, fusions = (len(re.findall(r, text, re.M)) for r in (r"^\s+(ROOT )?%?\S+ = ", r" fusion\("))
    return [*(f"{s:.2f}" for s in parts), str(instructions), str(fusions), f"{1e3 * best:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ops", "steps"), help="(default: both)")
    parser.add_argument("--level", type=int, choices=range(4), help="XLA's optimisation level of steps (default: 3)")
    args = parser.parse_args()
    console = Console(width=120)
    if args.only != "steps":
        console.print(measure_ops())
    if args.only != "ops":
        console.print(measure_steps(args.level))


if __name__ == "__main__":
    main()
