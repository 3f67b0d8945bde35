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
from collections import Counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

import dsv4_jax as dsv4
from dsv4_jax import model
from dsv4_jax.engine import Engine, Prompt
from dsv4_jax.errors import CacheError
from dsv4_jax.manager import CachePolicy, HostSize, SnapshotPlacement, Tier, WritePolicy, prometheus_text

EXAMPLES = """
examples:
  python examples/serve.py                                  32 requests, half the blocks they would like
  python examples/serve.py --no-cache                       the same without prefix caching, for comparison
  python examples/serve.py --policy selective:1 --json      numbers for a script
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
}


@dataclasses.dataclass(eq=False)
class Job:
    """What a user asked for. `answer` grows as its tokens come."""

    prompt: list[int]
    max_new_tokens: int
    follows: Job | None = None  # the conversation it goes on with: its prompt starts with all of that
    answer: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def asked(self) -> Prompt:
        before = [*self.follows.asked.tokens, *self.follows.answer] if self.follows else []
        return Prompt(tokens=before + self.prompt, max_new_tokens=self.max_new_tokens)

    async def ask(self, engine: Engine) -> None:
        if self.follows is not None:
            await self.follows.done.wait()
        async for output in engine.add(self.asked):
            self.answer += output.tokens
            self.cached = output.cached
        self.done.set()


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
            jobs.append(Job(job.prompt, job.max_new_tokens))
        if rng.random() < 0.33:
            jobs.append(Job(text(4, 12), int(rng.integers(8, 25)), follows=job))
    return jobs[:count]


async def serve(engine: Engine, jobs: list[Job], live: Live | None, start: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(job.ask(engine)) for job in jobs]
        while live is not None and not all(task.done() for task in asked):
            live.update(table(report(engine, jobs, time.perf_counter() - start)), refresh=True)
            await asyncio.sleep(0.1)


def report(engine: Engine, jobs: list[Job], seconds: float) -> dict[str, Any]:
    """All numbers of a run."""
    cache, now = engine.managers[0].stats().cache, engine.stats()
    counts, tiers = Counter(now.counts), {"device": Tier.DEVICE, "host": Tier.HOST}
    done = sum(job.done.is_set() for job in jobs)
    return {
        "done": done,
        "waiting": len(jobs) - done - now.live - now.preempted,
        "live": now.live,
        "preempted": now.preempted,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(counts["sampled_tokens"] / max(seconds, 1e-9), 1),
        **{name: counts[name] for name in ("steps", "sampled_tokens", "computed_tokens", "preemptions")},
        "hit_rate": round(cache.hit_rate(), 4),
        "hit_rate_by_tier": {name: round(cache.hit_rate(tier), 4) for name, tier in tiers.items()},
        "evictions": {name: cache.counters.evicted[tier] for name, tier in tiers.items()},
        "pools": {name: {"total": p.total, "free": p.free, "cached": p.cached} for name, p in cache.pools.items()},
    }


def table(numbers: dict[str, Any]) -> Table:
    out = Table(show_header=False, title="dsv4_jax serving", title_justify="left")
    for name, value in numbers.items():
        parts = value if isinstance(value, dict) else {"": value}
        out.add_row(name, ", ".join(f"{part} {number}".strip() for part, number in parts.items()))
    return out


def policy(text: str) -> WritePolicy:
    """argparse type: when blocks are copied to the host."""
    name, _, threshold = text.partition(":")
    if name == "selective":
        return WritePolicy.write_through_selective(int(threshold or 2))
    return {"write_back": WritePolicy.write_back, "write_through": WritePolicy.write_through}[text]()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (_, default, what) in NUMBERS.items():
        p.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    p.add_argument("--policy", default="write_back", help="when blocks go to the host: or write_through, selective:N")
    p.add_argument("--no-cache", action="store_true", help="keep nothing of a request that has ended")
    p.add_argument("--check", action=argparse.BooleanOptionalAction, help="default: for up to 64 requests")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    p.add_argument("--prometheus", action="store_true", help="print the cache's numbers as Prometheus text instead")
    args = p.parse_args(argv)
    for name, (low, *_) in NUMBERS.items():
        if getattr(args, name.replace("-", "_")) < low:
            p.error(f"--{name}: at least {low}")
    try:
        args.policy = policy(args.policy)
    except (KeyError, ValueError, CacheError):
        p.error(f"--policy: {args.policy!r} is not write_back, write_through or selective:N")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    params, console, jobs = (
        model.init_params(CONFIG, seed=args.seed),
        Console(),
        conversations(args.requests, args.seed),
    )
    size = dsv4.CacheSize(args.blocks, args.slots, COLUMNS, num_snapshots=0 if args.no_cache else 2 * args.slots)
    caching = None if args.no_cache else CachePolicy(args.policy, SnapshotPlacement(every=2))
    host = HostSize.of(LAYOUT, args.host_blocks, 2 * args.slots) if args.host_blocks else 0
    shown = console.is_terminal and not (args.json or args.prometheus)
    with Engine.of(params, LAYOUT, size, policy=caching, host=host, chunk_tokens=STEP_TOKENS) as engine:
        engine.warm_up()
        start = time.perf_counter()
        with Live(console=console, transient=True, auto_refresh=False) if shown else contextlib.nullcontext() as live:
            asyncio.run(serve(engine, jobs, live, start))
        numbers, metrics = report(engine, jobs, time.perf_counter() - start), engine.managers[0].stats()

    wrong = list[Job]()
    if args.check or (args.check is None and args.requests <= 64):
        checked = sorted(jobs, key=lambda job: job.cached)[-4:]  # those with the most hits
        bare = dataclasses.replace(size, num_snapshots=0)
        with Engine.of(params, LAYOUT, bare, policy=None, chunk_tokens=STEP_TOKENS) as engine:
            wrong = [job for job in checked if engine.run([job.asked])[0][0].tokens != job.answer]
        numbers |= {"checked": len(checked), "wrong": len(wrong)}
    if args.json or args.prometheus:
        print(json.dumps(numbers, indent=2) if args.json else prometheus_text(metrics).rstrip())
    else:
        console.print(table(numbers))
    for job in wrong:
        print(f"differs from its cold run: {job.answer}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
