"""What policies find on request traces, as a record: the table "What a trace shows" of RESULTS.md. No jax, no device.

    python benchmarks/bench_policies.py conversation_trace.jsonl --json record.json [--plot FOLDER] [--jobs N] ...
    python benchmarks/bench_policies.py --json record.json [--plot FOLDER]

With a trace in Mooncake's form (the conversation trace: github.com/kvcache-ai/Mooncake, FAST25-release/traces):
V4-Flash, 20 GiB on the device, 64 GiB on the host. Without: a made-up trace of chats in little memory. Each line of
`VARIANTS` is a `--compare` of `dsv4-jax simulate`, which does the work; two minutes a line on the
conversation trace, and 0.7 GB of memory. The record is written anew after each line. `--only` runs the lines whose name
holds a word, `--jobs` N of them at a time.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import multiprocessing
import pathlib
import platform
import shlex
from contextlib import redirect_stdout
from typing import Any

from harness import Recorder, parser

from dsv4_jax.cli import main
from dsv4_jax.manager import CachePolicy
from dsv4_jax.manager.policies import EVICTION_POLICIES

DEFAULT = CachePolicy()
BEFORE = "--snapshots-at prompt,output,every:32"
VARIANTS = {
    "no cache": "--policy none",
    "every 32 blocks, 64 states on the device": f"{BEFORE} --snapshots 64",
    "every 32 blocks": BEFORE,
    "every 8 blocks": "--snapshots-at prompt,output,every:8",
    "ends alone": "--snapshots-at prompt,output",
    "ends and junctions": "--snapshots-at prompt,output,junctions",
    "the default": "",
    "the default, write_through": "--policy write_through",
    "the default, selective, 2 hits": "--policy selective:2",
    **{
        f"the default, order {name}": f"--order {name}"
        for name, order in EVICTION_POLICIES.items()
        if order is not DEFAULT.eviction
    },
    "the default, 40 % for states": "--snapshot-fraction 0.4",
    "the default, states from 8 blocks before the end": "--snapshots-at prompt,output,junctions,doubling:8,every:64",
    "the default, no states at regular intervals": "--snapshots-at prompt,output,junctions,doubling:4",
    "the default, no host": "--host-pages 0",
    "the default, no host, 40 % for states": "--host-pages 0 --snapshot-fraction 0.4",
}
MADE_UP = "chats=200,tenants=4,turns=4,system=4000,question=500,answer=250,rate=4,pause=15,seed=7"


def command(args: argparse.Namespace) -> list[str]:
    """Returns the command line of a variant, but for the variant."""
    words = ["simulate", "--json", "--model", "flash", "--bound"]
    if args.trace is None:
        return [*words, "--generate", MADE_UP, "--hbm", "1500MiB", "--host", "4GiB"]
    limit = ["--limit", str(args.limit)] if args.limit else []
    return [*words, str(args.trace), "--hbm", "20GiB", "--host", "64GiB", *limit]


def row(trace: str, run: dict[str, Any]) -> dict[str, Any]:
    """Returns a line of the table "simulate"."""
    hits, moved, waited = run["hits"], run["transfer_bytes"], run["seconds"]["first_token"]
    return {
        "trace": trace,
        "policy": run["name"],
        "options": run["options"],
        "hit_rate": hits["rate"],
        "host_hit_rate": hits["rate_by_tier"]["host"],
        "of_endless": run["bound"]["share_of_endless"],
        "of_clairvoyant": run["bound"]["share_of_clairvoyant"],
        "recomputed_tokens": run["recomputed_tokens"]["seen_before"],
        "out_gib": (moved["swap_out"] + moved["snapshot"]) / 2**30,
        "in_gib": (moved["swap_in"] + moved["restore"]) / 2**30,
        "first_token_mean_s": waited["mean"],
        "first_token_p99_s": waited["p99"],
        "steps": run["steps"],
    }


def simulate_line(words: list[str], line: tuple[str, str]) -> dict[str, Any]:
    """Simulates one of `VARIANTS`."""
    name, options = line
    out = io.StringIO()
    with redirect_stdout(out):
        if main([*words, "--compare", f"{name}: {options}"]):
            raise SystemExit(f"{name}: failed")
    return json.loads(out.getvalue())


def run() -> None:
    options = parser(__doc__)
    options.add_argument("trace", nargs="?", type=pathlib.Path)
    options.add_argument("--plot", type=pathlib.Path, metavar="FOLDER", help="also draw all lines over time")
    options.add_argument("--only", default="", metavar="WORD")
    options.add_argument("--jobs", type=int, default=1, metavar="N")
    options.add_argument("--limit", type=int)
    args = options.parse_args()
    words, results = command(args), []
    trace = "conversation, 20 + 64 GiB" if args.trace else "200 chats, 1.5 + 4 GiB"

    shown = [word.rpartition("/")[2] for word in words if word != "--json"]
    recorder = Recorder(
        args.json,
        device=f"one CPU core, Python {platform.python_version()}",
        software={},
        quick=bool(args.limit),
        command=shlex.join(["python", "-m", "dsv4_jax", *shown, "--compare", "NAME: OPTIONS"]),
        note="All lines: python benchmarks/bench_policies.py; the options of each are in the record.",
    )
    lines = [line for line in VARIANTS.items() if args.only in line[0]]
    pool = multiprocessing.get_context("spawn").Pool(min(args.jobs, len(lines)), maxtasksperchild=1)
    for result in pool.imap(functools.partial(simulate_line, words), lines, chunksize=1):
        results.append(result)
        print(recorder.add("simulate", **row(trace, result["runs"][0])), flush=True)
    if args.plot:
        from dsv4_jax.plotting import save
        from dsv4_jax.simulate.plot import picture

        together = results[0] | {"runs": [each["runs"][0] for each in results]}
        save(picture(together), args.plot / f"{(args.json or pathlib.Path('policies')).stem}.png")


if __name__ == "__main__":
    run()
