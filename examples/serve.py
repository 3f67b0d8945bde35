"""Serves many requests from one small cache: how an engine drives `KVCacheManager`.

Requests ask about a few long documents, some twice, some going on from an earlier answer. More are waiting than
the cache can hold, so what they share is found again in it, on the device or on the host, and requests that the
blocks do not suffice for are preempted and resumed. The model is tiny and random, its answers are noise, but the
same noise whatever the manager does: some are checked against runs that are alone and cache nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

import dsv4_jax as dsv4
from dsv4_jax import model
from dsv4_jax.manager import CachePolicy, HostSize, Request, SnapshotPlacement, StepShape, WritePolicy, prometheus_text
from dsv4_jax.manager.prefix.node import Tier

EXAMPLES = """
examples:
  python examples/serve.py                                  32 requests, half the blocks they would like
  python examples/serve.py --no-cache                       the same without prefix caching, for comparison
  python examples/serve.py --policy write_through --host-blocks 0
  python examples/serve.py --requests 200 --json            numbers for a script
  python examples/serve.py --prometheus | grep hit_tokens   what a scraper would see
"""
LAYERS = (dsv4.AttentionType.SWA, dsv4.AttentionType.CSA, dsv4.AttentionType.HCA)
CONFIG = dsv4.DSV4Config.tiny(layer_types=LAYERS)
LAYOUT = dsv4.CacheLayout(CONFIG, "f32", "f32", block_tokens=16)
MAX_TOKENS, STEP_TOKENS = 192, 48  # of a request; of a step, all requests together


@functools.partial(jax.jit, donate_argnames="cache")
def step(params: model.Params, cache: dsv4.KVCache, plan: dsv4.PackedPlan, tokens: jax.Array) -> Any:
    """One step: each row's likeliest next token [B], and the cache, updated in place."""
    logits, cache = model.prefill(params, cache, plan, tokens)
    return logits.argmax(-1), cache


@dataclasses.dataclass(eq=False)
class Job:
    """What a user asked for. `answer` grows as its tokens come."""

    prompt: list[int]
    max_new_tokens: int
    follows: Job | None = None  # the conversation it goes on with: its prompt starts with all of that
    answer: list[int] = dataclasses.field(default_factory=list)
    num_hit: int = 0
    done: bool = False

    @property
    def ready(self) -> bool:
        return self.follows is None or self.follows.done

    @property
    def text(self) -> list[int]:
        return [*(self.follows.text + self.follows.answer if self.follows else ()), *self.prompt]


class Server:
    """The engine: a queue, a manager, the device's state, and a loop that brings them together.

    Args:
        policy: None: no prefix caching.
        host: None: no host tier.
        shape: of every step; None: pinned to what this manager's steps may need.
    """

    def __init__(
        self,
        params: model.Params,
        size: dsv4.CacheSize,
        *,
        policy: CachePolicy | None = None,
        host: HostSize | None = None,
        shape: StepShape | None = None,
    ):
        self.params = params
        self.manager = dsv4.KVCacheManager(LAYOUT, size, policy=policy, host=host)
        self.cache = dsv4.init_cache(LAYOUT, size)
        self.host = dsv4.init_host_cache(LAYOUT, host.num_pages) if host else None
        # One executable for every step. (One more for decodes alone, `pinned_shape(num_slots)`, would save work.)
        self.shape = shape or self.manager.pinned_shape(size.num_slots, STEP_TOKENS, history=True)
        self.waiting: collections.deque[Job] = collections.deque()
        self.jobs: dict[Request, Job] = {}  # live and preempted
        self.counts = collections.Counter[str]()

    def warm_up(self) -> None:
        """A step of nothing, which compiles it."""
        plan = self.manager.plan_step([], shape=self.shape)
        _, self.cache = step(self.params, self.cache, plan.pack(), self.manager.plan_tokens(plan))

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def run(self) -> Iterator[int]:
        """Steps until nothing is left to do; yields their numbers."""
        while self.waiting or self.jobs:
            self.start()
            self.step()
            yield self.counts["steps"]

    def start(self) -> None:
        """Makes requests live: those that were preempted come first."""
        manager = self.manager
        # One that came back at once would be the next to go: it waits until there is room for all of it.
        while manager.preempted and (not manager.requests or self._fits(manager.preempted[0])):
            if not manager.can_resume(manager.preempted[0]):
                return
            manager.resume(manager.preempted[0])
        while not manager.preempted and (job := next((job for job in self.waiting if job.ready), None)):
            tokens = job.text
            limit = len(tokens) + job.max_new_tokens
            if not manager.can_admit(len(tokens), max_tokens=limit):
                return  # no slot yet; one that could never be admitted would be an error
            # A hit comes with its blocks, and with the state at its end: only the rest is left to compute.
            request = manager.admit_request(tokens, max_tokens=limit)
            job.num_hit = request.num_cached
            self.jobs[request] = job
            self.waiting.remove(job)

    def _fits(self, request: Request) -> bool:
        use = self.manager.stats().cache.pools["device"]
        return LAYOUT.blocks_for(request.max_tokens) <= use.free + use.evictable

    def step(self) -> None:
        """One step of all live requests, as far as tokens and blocks reach."""
        manager = self.manager
        # Decodes first, then chunks of prompts. Nothing: all blocks are taken, and the youngest gives up its own.
        while not (scheduled := manager.schedule(STEP_TOKENS, shape=self.shape)):
            manager.preempt(manager.requests[-1])
            self.counts["preemptions"] += 1
        plan = manager.plan_step(scheduled, shape=self.shape)
        tokens = manager.plan_tokens(plan)
        # Blocks and states change their tier before the step runs: what it reads must be there, what it writes free.
        if self.host is not None:
            self.cache, self.host = dsv4.run_transfers(self.cache, self.host, manager.take_transfers())
        sampled, self.cache = step(self.params, self.cache, plan.pack(), tokens)
        self.counts.update(steps=1, computed_tokens=sum(count for _, count in scheduled))
        for (request, _), token in zip(scheduled, np.asarray(sampled).tolist(), strict=False):
            if request.num_pending:
                continue  # in the middle of its prompt, where nothing is sampled
            job = self.jobs[request]
            request.tokens.append(token)
            job.answer.append(token)
            self.counts["sampled_tokens"] += 1
            if len(job.answer) == job.max_new_tokens:
                manager.release_request(request)  # what it computed stays cached while there is room
                del self.jobs[request]
                job.done = True
                self.counts["done"] += 1


def alone(server: Server, job: Job) -> list[int]:
    """The answer to a request that runs alone, from an empty cache that keeps nothing."""
    lone = Server(server.params, server.manager.size, shape=server.shape)  # as XLA rounds in one shape, so in the same
    lone.submit(again := Job(job.text, job.max_new_tokens))
    collections.deque(lone.run(), maxlen=0)
    return again.answer


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


# What is shown


def report(server: Server, seconds: float) -> dict[str, Any]:
    """Prints all numbers of a run."""
    stats, counts = server.manager.stats().cache, server.counts
    counters = stats.counters
    tiers = (Tier.DEVICE, Tier.HOST)
    return {
        "done": counts["done"],
        "waiting": len(server.waiting),
        "live": len(server.manager.requests),
        "preempted": len(server.manager.preempted),
        "steps": counts["steps"],
        "seconds": round(seconds, 3),
        "tokens_per_second": round(counts["sampled_tokens"] / max(seconds, 1e-9), 1),
        "sampled_tokens": counts["sampled_tokens"],
        "computed_tokens": counts["computed_tokens"],
        "hit_rate": round(stats.hit_rate(), 4),
        "hit_rate_by_tier": {tier.name.lower(): round(stats.hit_rate(tier), 4) for tier in tiers},
        "evictions": {tier.name.lower(): counters.evicted[tier] for tier in tiers},
        "preemptions": counts["preemptions"],
        "pools": {name: {"total": p.total, "free": p.free, "cached": p.cached} for name, p in stats.pools.items()},
    }


def table(numbers: dict[str, Any]) -> Table:
    out = Table(show_header=False, title="dsv4_jax serving", title_justify="left")

    def line(name: str, *parts: str) -> None:
        out.add_row(name, ", ".join(parts))

    line("requests", *(f"{numbers[name]} {name}" for name in ("done", "live", "preempted", "waiting")))
    line("tokens", f"{numbers['sampled_tokens']} sampled", f"{numbers['computed_tokens']} computed")
    line("speed", f"{numbers['tokens_per_second']} tokens/s", f"{numbers['steps']} steps")
    tiers = (f"{name} {rate:.1%}" for name, rate in numbers["hit_rate_by_tier"].items())
    line("hit rate", f"{numbers['hit_rate']:.1%}", *tiers)
    line("evictions", *(f"{name} {count}" for name, count in numbers["evictions"].items()))
    line("preemptions", str(numbers["preemptions"]))
    for name, pool in numbers["pools"].items():
        used = pool["total"] - pool["free"] - pool["cached"]
        line(f"pool: {name}", f"{used} in use", f"{pool['cached']} cached", f"{pool['free']} free")
    return out


def policy(text: str) -> WritePolicy:
    """argparse type: when blocks are copied to the host."""
    name, _, threshold = text.partition(":")
    try:
        if name == "selective":
            return WritePolicy.write_through_selective(int(threshold or 2))
        return {"write_back": WritePolicy.write_back, "write_through": WritePolicy.write_through}[text]()
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not write_back, write_through or selective:N") from error


def count(low: int):
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {low}")
        return int(text)

    return parse


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--requests", type=count(1), default=32, metavar="N", help="default: %(default)s")
    p.add_argument("--seed", type=count(0), default=0, help="of prompts and weights (default: %(default)s)")
    p.add_argument(
        "--policy", type=policy, default="write_back", help="write_back (default), write_through, selective:N"
    )
    p.add_argument("--no-cache", action="store_true", help="keep nothing of a request that has ended")
    p.add_argument("--slots", type=count(1), default=6, metavar="N", help="requests at once (default: %(default)s)")
    least = LAYOUT.blocks_for(MAX_TOKENS)
    p.add_argument(
        "--blocks", type=count(least), default=16, metavar="N", help=f"at least {least} (default: %(default)s)"
    )
    p.add_argument(
        "--host-blocks", type=count(0), default=24, metavar="N", help="0: no host tier (default: %(default)s)"
    )
    p.add_argument("--check", action=argparse.BooleanOptionalAction, help="default: for up to 64 requests")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    p.add_argument("--prometheus", action="store_true", help="print the cache's numbers as Prometheus text instead")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    params = model.init_params(CONFIG, seed=args.seed)
    columns = LAYOUT.blocks_for(MAX_TOKENS)
    size = dsv4.CacheSize(args.blocks, args.slots, columns, num_snapshots=0 if args.no_cache else 2 * args.slots)
    caching = None if args.no_cache else CachePolicy(args.policy, SnapshotPlacement(every=2))
    host = HostSize.of(LAYOUT, args.host_blocks, 2 * args.slots) if args.host_blocks else None
    server, jobs = Server(params, size, policy=caching, host=host), conversations(args.requests, args.seed)
    for job in jobs:
        server.submit(job)
    server.warm_up()

    console, start = Console(), time.perf_counter()
    shown = console.is_terminal and not (args.json or args.prometheus)
    with Live(console=console, transient=True, auto_refresh=False) if shown else contextlib.nullcontext() as live:
        for number in server.run():
            if live is not None and number % 5 == 0:
                live.update(table(report(server, time.perf_counter() - start)), refresh=True)
    numbers = report(server, time.perf_counter() - start)

    wrong, checked = [], []
    if args.check or (args.check is None and args.requests <= 64):
        # The last ones had the fullest cache and the most hits.
        checked = sorted(jobs, key=lambda job: job.num_hit)[-4:]
        wrong = [job for job in checked if alone(server, job) != job.answer]
        numbers["checked"], numbers["wrong"] = len(checked), len(wrong)
    if args.json:
        print(json.dumps(numbers, indent=2))
    elif args.prometheus:
        print(prometheus_text(server.manager.stats()), end="")
    else:
        console.print(table(numbers))
        if checked:
            console.print(f"{len(checked) - len(wrong)} of {len(checked)} answers checked are those of a cold run")
    for job in wrong:
        print(f"differs from its cold run: {job.answer}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
