"""What policies find on request traces, as a record: the table "What a trace shows" of RESULTS.md. No jax, no device.

    python benchmarks/bench_policies.py conversation_trace.jsonl --json record.json [--plot FOLDER] [--jobs N] ...
    python benchmarks/bench_policies.py --json record.json [--plot FOLDER]

With a trace in Mooncake's form (the conversation trace: github.com/kvcache-ai/Mooncake, FAST25-release/traces):
V4-Flash, 20 GiB on the device, 64 GiB on the host. Without: the made-up loads of `policy_loads.py`. Each line of
`VARIANTS` (of the loads: `LOAD_VARIANTS`) is a `--compare` of `dsv4-jax simulate`, which does the work; two minutes a
line on the conversation trace, and 0.7 GB of memory. Behind them stands what the rules of SGLang and vLLM find in the
same memory (`peer_rules.py`). The record is written anew after each line. `--only` runs the lines whose name holds a
word, `--jobs` N of them at a time.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import pathlib
import platform
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from harness import Recorder, parser
from peer_rules import PEERS
from policy_loads import LOADS, Load

from dsv4_jax.cli import main
from dsv4_jax.cli.values import byte_count
from dsv4_jax.config import DSV4Config
from dsv4_jax.layout import CacheLayout
from dsv4_jax.manager import CachePolicy
from dsv4_jax.manager.policies import EVICTION_POLICIES
from dsv4_jax.simulate.bounds import endless_bound, turns_of
from dsv4_jax.simulate.trace import read_trace, write_trace

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
LOAD_VARIANTS = {
    "as before, no states at regular intervals": "--snapshots-at prompt,output,junctions,doubling:4",
    "the default": "",
    "the default, half for states": "--snapshot-fraction 0.5",
    "states in blocks": "--states blocks",
    "states in blocks, half of a tier for a tenant at most": "--states blocks --namespace-share 0.5",
}


class Job(NamedTuple):
    """A line to simulate, and its trace."""

    trace: str
    policy: str
    options: str
    words: tuple[str, ...]  # of the command


def jobs_of(args: argparse.Namespace, folder: pathlib.Path) -> tuple[list[Job], dict[str, tuple[pathlib.Path, int]]]:
    """The lines of all traces, and the file of each trace with the bytes of its memory."""
    traces, jobs = dict[str, tuple[pathlib.Path, int]](), list[Job]()
    words = ("simulate", "--json", "--model", "flash", "--bound")
    if args.trace is not None:
        loads = {"conversation": Load(list, "20GiB", "64GiB")}
    else:
        loads = {name: load for name, load in LOADS.items() if args.load in name}
    for name, load in loads.items():
        path = args.trace or folder / f"{len(traces)}.jsonl"
        if args.trace is None:
            with path.open("w", encoding="utf-8") as file:
                write_trace(load.make(), file)
        sizes = ["--hbm", load.hbm, *(["--host", load.host] if load.host else [])]
        limit = ["--limit", str(args.limit)] if args.limit else []
        title = f"{name}, {load.hbm}{f' + {load.host}' if load.host else ''}"
        traces[title] = path, byte_count(load.hbm) + (byte_count(load.host) if load.host else 0)
        variants = VARIANTS if args.trace is not None else LOAD_VARIANTS
        for policy, options in variants.items():
            if args.only in policy:
                jobs.append(Job(title, policy, options, (*words, str(path), *sizes, *limit)))
    return jobs, traces


def peer_rows(title: str, path: pathlib.Path, memory: int, limit: int | None) -> Iterator[dict[str, Any]]:
    """Lines of the table "simulate" of what the rules of others find."""
    layout = CacheLayout(DSV4Config.flash())
    with path.open(encoding="utf-8") as file:
        trace = read_trace(file, limit=limit)
    prompt, endless = sum(each.prompt_tokens for each in trace), endless_bound(turns_of(trace, layout))
    for name, rules in PEERS.items():
        found = rules(trace, layout, memory)
        yield {
            "trace": title,
            "policy": name,
            "hit_rate": found / prompt,
            "of_endless": found / (endless * layout.block_tokens),
        }


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


def simulate_line(job: Job) -> dict[str, Any]:
    """Simulates a line."""
    out = io.StringIO()
    with redirect_stdout(out):
        if main([*job.words, "--compare", f"{job.policy}: {job.options}"]):
            raise RuntimeError(f"{job.policy}: failed")  # the pool would wait for ever for one that has left
    return json.loads(out.getvalue())


def run() -> None:
    options = parser(__doc__)
    options.add_argument("trace", nargs="?", type=pathlib.Path)
    options.add_argument("--plot", type=pathlib.Path, metavar="FOLDER", help="also draw all lines over time")
    options.add_argument("--only", default="", metavar="WORD")
    options.add_argument("--load", default="", metavar="WORD", help="only the loads whose name holds it")
    options.add_argument("--jobs", type=int, default=1, metavar="N")
    options.add_argument("--limit", type=int)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        simulate_all(args, pathlib.Path(folder))


def simulate_all(args: argparse.Namespace, folder: pathlib.Path) -> None:
    jobs, traces = jobs_of(args, folder)
    where = args.trace.name if args.trace else "LOAD.jsonl"
    shown = ["simulate", where, "--model", "flash", "--bound", "--hbm", "SIZE", "--host", "SIZE"]
    recorder = Recorder(
        args.json,
        device=f"one CPU core, Python {platform.python_version()}",
        software={},
        quick=bool(args.limit),
        command=shlex.join(["python", "-m", "dsv4_jax", *shown, "--compare", "NAME: OPTIONS"]),
        note="All lines: python benchmarks/bench_policies.py; the options of each are in the record.",
    )
    results: dict[str, list[dict[str, Any]]] = {title: [] for title in traces}
    pool = multiprocessing.get_context("spawn").Pool(min(args.jobs, max(len(jobs), 1)), maxtasksperchild=1)
    for job, result in zip(jobs, pool.imap(simulate_line, jobs, chunksize=1), strict=True):
        results[job.trace].append(result)
        print(recorder.add("simulate", **row(job.trace, result["runs"][0])), flush=True)
        if len(results[job.trace]) == sum(other.trace == job.trace for other in jobs):
            for line in peer_rows(job.trace, *traces[job.trace], args.limit):
                print(recorder.add("simulate", **line), flush=True)
    if args.plot:
        from dsv4_jax.plotting import save
        from dsv4_jax.simulate.plot import picture

        for i, (title, lines) in enumerate(results.items()):
            together = lines[0] | {"runs": [each["runs"][0] for each in lines], "title": title}
            name = (args.json or pathlib.Path("policies")).stem
            save(picture(together), args.plot / f"{name}{f'-{i}' if i else ''}.png")


if __name__ == "__main__":
    run()
