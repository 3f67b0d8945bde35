"""Serves many conversations from one small cache: an `Engine`, and tasks of asyncio that ask it.

Requests ask about a few long documents, some twice, some going on from an earlier answer. What they share is found
again, on the device or on the host, and requests that the blocks do not suffice for are preempted and resumed. The
model is tiny and random: its answers are noise, but the same noise as of runs that are alone and cache nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

import dsv4_jax as dsv4
from dsv4_jax import model
from dsv4_jax.engine import Engine, Prompt
from dsv4_jax.manager import CachePolicy, HostSize, SnapshotPlacement, Tier, WritePolicy, prometheus_text

EXAMPLES = """
examples:
  python examples/serve.py                                  32 requests, half the blocks they would like
  python examples/serve.py --no-cache                       the same without prefix caching, for comparison
  python examples/serve.py --copy-at 1 --json               numbers for a script
  python examples/serve.py --prometheus | grep hit_tokens   what a scraper would see
"""
CONFIG = dsv4.DSV4Config.tiny(layer_types=tuple(dsv4.AttentionType))
LAYOUT = dsv4.CacheLayout(CONFIG, "f32", "f32", block_tokens=16)
COLUMNS, STEP_TOKENS = LAYOUT.blocks_for(192), 48  # blocks of a request; tokens of a step, all requests together
NUMBERS = {  # option -> least, default, help
    "requests": (1, 32, "how many"),
    "seed": (0, 0, "of prompts and weights"),
    "slots": (1, 6, "requests at once"),
    "blocks": (COLUMNS, 16, f"of the device, at least {COLUMNS}"),
    "host-blocks": (0, 24, "0: no host tier"),
    "copy-at": (0, 0, "a block is copied to the host at its N-th use; 0: when it leaves the device"),
}


@dataclasses.dataclass(eq=False)
class Job:
    """What a user asks for; `answer` grows as its tokens come."""

    prompt: list[int]
    count: int
    follows: Job | None = None  # the conversation it goes on with: all of that comes before its own prompt
    answer: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    task: asyncio.Task[None] = dataclasses.field(init=False)

    async def ask(self, engine: Engine) -> None:
        if self.follows is not None:
            await self.follows.task
            self.prompt = [*self.follows.prompt, *self.follows.answer, *self.prompt]
        async for output in engine.add(Prompt(tokens=self.prompt, max_new_tokens=self.count)):
            self.answer += output.tokens
            self.cached = output.cached


def conversations(count: int, seed: int) -> list[Job]:
    """Questions about three documents: every fourth is asked again, every third followed by another one."""
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> list[int]:
        return rng.integers(0, CONFIG.vocab_size, rng.integers(low, high + 1)).tolist()

    documents, jobs = [text(40, 80) for _ in range(3)], list[Job]()
    while len(jobs) < count:
        job = Job(documents[rng.integers(3)] + text(2, 12), int(rng.integers(8, 25)))
        jobs.append(job)
        if rng.random() < 0.25:
            jobs.append(Job(job.prompt, job.count))
        if rng.random() < 0.33:
            jobs.append(Job(text(4, 12), int(rng.integers(8, 25)), follows=job))
    return jobs[:count]


async def serve(engine: Engine, jobs: list[Job], live: Live | None, start: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        for job in jobs:
            job.task = tasks.create_task(job.ask(engine))
        while live is not None and not all(job.task.done() for job in jobs):
            live.update(table(report(engine, time.perf_counter() - start)), refresh=True)
            await asyncio.sleep(0.1)


def report(engine: Engine, seconds: float) -> dict[str, Any]:
    """All numbers of a run."""
    cache, now, tiers = engine.managers[0].stats().cache, engine.stats(), {"device": Tier.DEVICE, "host": Tier.HOST}
    return {
        "done": now.counts["ended_length"],
        **{name: getattr(now, name) for name in ("queued", "live", "preempted")},
        "seconds": round(seconds, 3),
        "tokens_per_second": round(now.counts["sampled_tokens"] / max(seconds, 1e-9), 1),
        **{name: now.counts[name] for name in ("steps", "sampled_tokens", "computed_tokens", "preemptions")},
        "hit_rate": round(cache.hit_rate(), 4),
        "hit_rate_by_tier": {name: round(cache.hit_rate(tier), 4) for name, tier in tiers.items()},
        "evictions": {name: cache.counters.evicted[tier] for name, tier in tiers.items()},
        "pools": {name: {"total": p.total, "free": p.free, "cached": p.cached} for name, p in cache.pools.items()},
    }


def table(numbers: dict[str, Any]) -> Table:
    out = Table(show_header=False, title="dsv4_jax serving", title_justify="left")
    for name, value in numbers.items():
        out.add_row(name, json.dumps(value).replace('"', ""))
    return out


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter)
    for name, (_, default, what) in NUMBERS.items():
        p.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    p.add_argument("--no-cache", action="store_true", help="keep nothing of a request that has ended")
    p.add_argument("--check", action=argparse.BooleanOptionalAction, help="default: for up to 64 requests")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    p.add_argument("--prometheus", action="store_true", help="print the cache's numbers as Prometheus text instead")
    args = p.parse_args(argv)
    for name, (low, *_) in NUMBERS.items():
        if getattr(args, name.replace("-", "_")) < low:
            p.error(f"--{name}: at least {low}")

    params, jobs = model.init_params(CONFIG, seed=args.seed), conversations(args.requests, args.seed)
    size = dsv4.CacheSize(args.blocks, args.slots, COLUMNS, num_snapshots=0 if args.no_cache else 2 * args.slots)
    writes = WritePolicy.write_through_selective(args.copy_at) if args.copy_at else WritePolicy.write_back()
    caching = None if args.no_cache else CachePolicy(writes, SnapshotPlacement(every=2))
    host = HostSize.of(LAYOUT, args.host_blocks, 2 * args.slots) if args.host_blocks else 0
    shown = (console := Console()).is_terminal and not (args.json or args.prometheus)
    with Engine.of(params, LAYOUT, size, policy=caching, host=host, chunk_tokens=STEP_TOKENS) as engine:
        engine.warm_up()
        start = time.perf_counter()
        with Live(console=console, transient=True, auto_refresh=False) if shown else contextlib.nullcontext() as live:
            asyncio.run(serve(engine, jobs, live, start))
        numbers, metrics = report(engine, time.perf_counter() - start), engine.managers[0].stats()

    wrong = list[Job]()
    if args.check or (args.check is None and args.requests <= 64):
        checked = sorted(jobs, key=lambda job: job.cached)[-4:]  # those with the most hits
        with Engine.of(params, LAYOUT, size, policy=None, chunk_tokens=STEP_TOKENS) as engine:
            cold = engine.run(Prompt(tokens=job.prompt, max_new_tokens=job.count) for job in checked)
        wrong = [job for job, (answer,) in zip(checked, cold, strict=True) if answer.tokens != job.answer]
        numbers |= {"checked": len(checked), "wrong": len(wrong)}
    text = prometheus_text(metrics).rstrip() if args.prometheus else json.dumps(numbers, indent=2)
    print(text) if args.json or args.prometheus else console.print(table(numbers))
    for job in wrong:
        print(f"differs from its cold run: {job.answer}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
