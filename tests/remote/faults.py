"""Rounds of requests through a prefill and a decode host, in each of which something goes wrong, and a table of it.

python -m tests.remote.faults --rounds 220

A fault is drawn for each round, a kill comes at a random instant of it. Every request has to be answered as a request
that runs alone, and in the end neither host may hold anything. Processes and sockets are real, the engine is NumPy's
(byte_engine).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import sys
import time

from rich.progress import track

from dsv4_jax.manager import Namespace

from .byte_engine import BLOCK, VOCAB
from .hosts import Faults
from .router import Router

__all__ = ["FAULTS", "Outcome", "run_rounds", "table"]

FAULTS = {
    "nothing": Faults(),
    "prefill process killed": Faults(),
    "decode process killed": Faults(),
    "both killed": Faults(),
    "acknowledgements lost": Faults(lost_acknowledgements=1.0),
    "hand-offs lost": Faults(lost_handoffs=0.3),
    "hand-offs doubled": Faults(doubled_handoffs=0.7),
    "records torn": Faults(torn_records=0.4),
    "leases stale": Faults(late_reads=0.7),
    "links cut": Faults(),
    "all at once": Faults(0.5, 0.15, 0.3, 0.2, 0.3),
}
KILLS = {"prefill process killed": "p", "decode process killed": "d", "both killed": "pd", "all at once": "pd"}
CUT = ("links cut", "all at once")  # in which all connections to the prefill host are cut, three times


@dataclasses.dataclass
class Outcome:
    """Of the rounds with one fault."""

    rounds: int = 0
    kills: int = 0
    requests: int = 0
    handed: int = 0
    recomputed: int = 0
    again: int = 0
    given_up: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: int = 0
    held: int = 0
    latest_kill: float = 0.0


def run_rounds(names: list[str], seed: int, *, shown: bool = False) -> dict[str, Outcome]:
    """One round for each name, in order. Raises `TimeoutError` if a request is never answered."""
    rng, outcomes, router = random.Random(seed), {name: Outcome() for name in FAULTS}, Router(seed)
    texts = [[rng.randrange(VOCAB) for _ in range(10 * BLOCK)] for _ in range(3)]
    try:
        for name in track(names, "rounds", disable=not shown):
            _round(router, rng, texts, name, outcomes[name])
    finally:
        router.close()
    return outcomes


def _round(router: Router, rng: random.Random, texts: list[list[int]], name: str, outcome: Outcome) -> None:
    faults = FAULTS[name]
    router.fail(faults)
    asked = []
    for _ in range(rng.randint(4, 8)):
        text = rng.choice(texts)
        prompt = text[: rng.randint(1, len(text))] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2 * BLOCK))]
        asked.append(router.ask(prompt, rng.randint(4, 12), Namespace(rng.choice("aab"))))
    texts[rng.randrange(3)] = [rng.randrange(VOCAB) for _ in range(10 * BLOCK)]
    kills = [(rng.uniform(0, 0.25), who) for who in KILLS.get(name, "")]
    before = router.deaths
    cuts = [(rng.uniform(0, 0.25), lambda: router.prefill.tell("cut")) for _ in range(3 * (name in CUT))]
    router.run(cuts + [(when, (router.prefill if who == "p" else router.decode).kill) for when, who in kills])
    router.fail(Faults())
    outcome.rounds += 1
    outcome.kills += router.deaths - before
    outcome.requests += len(asked)
    for each in asked:
        outcome.handed += each.hit
        outcome.recomputed += each.recomputed
        outcome.again += each.lives - 1
        outcome.wrong += not each.is_right
        outcome.given_up.update(_kind(failure) for failure in each.failures)
    outcome.held += sum(router.held().values())


def _kind(failure: str) -> str:
    kinds = {
        "torn or stale record": "checksums",
        "lease over": "lease",
        "host gone": "peer",
        "no room": "not free",
        "prefix evicted": "left the cache",
    }
    for kind, words in kinds.items():
        if words in failure:
            return kind
    return failure


def table(outcomes: dict[str, Outcome]) -> str:
    """As Markdown."""
    heads = (
        "fault",
        "rounds",
        "kills",
        "requests",
        "handed over",
        "computed again",
        "given up because",
        "wrong",
        "held",
    )
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * 5} --- | ---: | ---: |"]
    total = Outcome()
    for name, o in [*outcomes.items(), ("all", total)]:
        if not o.rounds:
            continue
        why = ", ".join(f"{kind} {count}" for kind, count in sorted(o.given_up.items())) or "-"
        cells = (name, o.rounds, o.kills, o.requests, o.handed, o.recomputed, why, o.wrong, o.held)
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if o is not total:
            for field in dataclasses.fields(Outcome):
                if field.name != "given_up":
                    setattr(total, field.name, getattr(total, field.name) + getattr(o, field.name))
            total.given_up += o.given_up
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(FAULTS), help="one fault (default: all in turn)")
    args = parser.parse_args()
    kinds, start = [args.only] if args.only else [*FAULTS], time.perf_counter()
    names = [kinds[i % len(kinds)] for i in range(args.rounds)]
    outcomes = run_rounds(names, args.seed, shown=sys.stdout.isatty())
    print(table(outcomes))
    print(f"{args.rounds} rounds in {time.perf_counter() - start:.1f} s")
    if any(o.wrong or o.held for o in outcomes.values()):
        raise SystemExit("something wrong was served, or something is held")


if __name__ == "__main__":
    main()
