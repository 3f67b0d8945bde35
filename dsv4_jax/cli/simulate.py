"""`simulate`: a trace of requests through the real manager, without a device: hits, evictions, queues.

Requests are admitted, planned and preempted by the engine's own code. Steps take what a fitted model says (attention
alone, see `dsv4_jax/simulate/step_time.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.table import Table

from ..errors import FileError
from ..layout import CacheLayout
from ..output import open_output
from ..plotting import save
from ..records import state_pages
from ..simulate import Server, TraceRequest, read_trace, simulate
from ..simulate.bounds import Turn, bounds, turns_of
from ..simulate.hosts import simulate_handed, simulate_joint
from ..simulate.linking import link_outputs
from ..simulate.network import Link
from ..simulate.plot import hosts_picture, picture
from ..simulate.report import hosts_report, report, with_bounds
from ..simulate.synthesis import ChatTrace, make_trace
from ..simulate.trace import write_trace
from .inputs import open_regular
from .models import add_model, model_config, model_file
from .options import add_command, add_json, add_layout, layout_from, naming, option, refuse_same
from .printing import Progress, human, present, say
from .simulate_server import DEFAULTS, Variant, add_server, given_sizes, server_from, variant
from .simulate_table import hosts_table, table
from .values import byte_rate, duration, given_path, number, output_file, picture_file, positive

__all__ = ["add_parser", "run"]

Trace = list[TraceRequest]
_MAX_SPEEDS = 16
_EXAMPLES = """
  dsv4-jax simulate trace.jsonl --hbm 20GiB                              what would be found, what evicted?
  dsv4-jax simulate trace.jsonl --hbm 20GiB --host 64GiB --bound         and what could be found at most?
  dsv4-jax simulate trace.jsonl --hbm 20GiB --json \\
      --compare 'no cache: --policy none' --compare 'worth:' --compare 'lru: --order lru' --plot orders.png
  dsv4-jax simulate --generate chats=200,tenants=4,seed=1 --blocks 600 --snapshots 64 --plot sim.png
  dsv4-jax simulate trace.jsonl --limit 1500 --hbm 20GiB --host 64GiB \\
      --prefill-hosts 3 --decode-hosts 1 --network 50GB/s --speed 1,2,3 --plot hosts.png
  dsv4-jax simulate --generate chats=200 --save-trace trace.jsonl        also keep the trace that was made up

the trace is a file, or - for stdin; a line of it is one of
  {"arrival": 0.5, "prompt": [["system", 2000], ["question 1", 90]], "output": 120, "tenant": "a"}
  {"timestamp": 500, "input_length": 1300, "output_length": 120, "hash_ids": [0, 1, 17]}
a run ["system", 2000] is the first 2000 tokens of the sequence of that name (["system", 90, 2000]: 90 tokens from token
2000 of it on); output may be runs as well.

settings of --generate (lengths and pauses are means): seed, chats, tenants, systems (system prompts, the
same ones for every tenant), turns, system, question, answer (tokens), rate (chats a second), pause (seconds)

--compare takes the options of cache size, policy and server; what a variant does not say is as on the command line.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(
        commands,
        "simulate",
        "a request trace through the manager, without a device",
        __doc__,
        _EXAMPLES,
        fails="a request held what it should not: a bug of the manager",
    )
    parser.add_argument("trace", nargs="?", type=given_path, metavar="TRACE", help="JSON lines; - for stdin")
    trace = parser.add_argument_group("trace")
    trace.add_argument("--generate", metavar="NAME=VALUE,...", help="make a trace up instead ('': all defaults)")
    option(trace, "--save-trace", output_file, "FILE", "write the trace in our own form")
    option(trace, "--limit", positive, "N", "read N requests at most")
    option(trace, "--trace-block-tokens", positive, "N", "of a hash id", default=512)
    unit = "of `timestamp` (default: %(default)s)"
    trace.add_argument("--timestamp-unit", choices=("ms", "s"), default="ms", help=unit)
    linked = "outputs without ids get those of the chat's next turn"
    trace.add_argument("--link-outputs", action="store_true", help=linked)
    add_model(parser)
    add_server(parser)
    parser.set_defaults(**DEFAULTS)
    hosts = parser.add_argument_group("several hosts, each one as the options above say")
    option(hosts, "--prefill-hosts", positive, "N", "hosts that compute prompts, and ...")
    handed = "hosts that decode what these hand over; the same trace also runs on N + M hosts that do both"
    option(hosts, "--decode-hosts", positive, "M", handed)
    option(hosts, "--network", byte_rate, "RATE", "of each host's card, in and out each (default: 50GB/s)")
    option(hosts, "--latency", duration, "TIME", "of each message and read (default: 100us)")
    option(hosts, "--speed", _speeds, "X,X,...", "requests come so many times as fast; one run each (default: 1)")
    several = parser.add_argument_group("comparison")
    beside = "run this variant; several are put side by side ('NAME:' alone: as the command line says)"
    option(several, "--compare", variant, "'NAME: OPTIONS'", beside, action="append")
    bound = "also say what a clairvoyant cache of this memory could find"
    several.add_argument("--bound", action="store_true", help=bound)
    option(parser, "--plot", picture_file, "PNG", "draw it over simulated time (several hosts: over the rate served)")
    add_layout(parser)
    add_json(parser)
    parser.set_defaults(run=run, refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    if (args.trace is None) == (args.generate is None):
        args.refuse("give either a TRACE or --generate")
    read = {"TRACE": args.trace, "--model": model_file(args.model)}
    refuse_same({**read, "--save-trace": args.save_trace, "--plot": args.plot, "--json": args.json})
    names = [each.name for each in args.compare or ()]
    if len(set(names)) < len(names):
        args.refuse("argument --compare: two variants have the same name")
    several = _several_hosts(args)
    layout = layout_from(args, model_config(args.model))
    trace, linked = _trace(args)
    title, more = (_run_hosts if several else _run_variants)(args, layout, trace)
    result: dict[str, Any] = {"model": args.model, "title": f"{args.model}: {title}", "linked_outputs": linked, **more}
    shown: Callable[[dict[str, Any]], Table] = hosts_table if several else table
    if args.plot:
        save((hosts_picture if several else picture)(result), args.plot)
    present(result, args.json, lambda console: console.print(shown(result)))
    broken = sum(sum(each["isolation"].values()) for each in result["runs"])
    if broken:
        say(f"{broken} units held what they should not, or were left over: a bug of the manager")
    return 1 if broken else 0


def _several_hosts(args: argparse.Namespace) -> bool:
    """Whether there are several hosts. Refuses options that do not go together."""
    names = ("prefill-hosts", "decode-hosts", "network", "latency", "speed")
    given = [name for name in names if getattr(args, name.replace("-", "_")) is not None]
    if not {"prefill-hosts", "decode-hosts"} <= set(given):
        if given:
            args.refuse(f"argument --{given[0]}: goes with both --prefill-hosts and --decode-hosts")
        return False
    for name in ("compare", "bound"):
        if getattr(args, name):
            args.refuse(f"argument --{name}: not with several hosts")
    return True


# One host


def _run_variants(args: argparse.Namespace, layout: CacheLayout, trace: Trace) -> tuple[str, dict[str, Any]]:
    """Runs the trace on each variant of the server: a title, and what the result has beside it."""
    variants, servers, runs = args.compare or [Variant("", "", {})], [], []
    for each in variants:
        with naming(f"--compare {each.name}") if each.name else contextlib.nullcontext():
            servers.append(server_from(each.of(args), layout, trace))
    turns = turns_of(trace, layout) if args.bound else None
    with Progress("requests", len(trace) * len(variants)) as progress:
        for each, server in zip(variants, servers, strict=True):
            progress.update(f"requests, {each.name}" if each.name else None)
            with naming(fields=_too_long(each.of(args))):
                answer = report(simulate(trace, server, on_done=progress.advance))
            if turns is not None:
                answer = _with_bounds(answer, turns, trace, server)
            runs.append({"name": each.name, "options": each.text, **answer})
    return _memory(runs), {"runs": runs}


def _with_bounds(answer: dict[str, Any], turns: list[Turn], trace: Trace, server: Server) -> dict[str, Any]:
    pages, size = server.host.num_pages if server.host else 0, server.size
    states = size.num_slots + size.num_snapshots + pages // state_pages(server.layout, 0)
    found = bounds(turns, trace, server.layout.block_tokens, blocks=size.num_blocks + pages, states=states)
    return with_bounds(answer, found)


def _memory(runs: list[dict[str, Any]]) -> str:
    """What all runs have in common of their sizes."""
    first, *others = (run["cache"] for run in runs)
    parts = []
    for name, kind in (("bytes", "HBM"), ("host_bytes", "host memory")):
        if first[name] and all(abs(other[name] - first[name]) <= 0.01 * first[name] for other in others):
            parts.append(f"{human(first[name])} of {kind}")
    return ", ".join(parts) or "several sizes"


# Several hosts


def _run_hosts(args: argparse.Namespace, layout: CacheLayout, trace: Trace) -> tuple[str, dict[str, Any]]:
    """Runs the trace at each speed, on hosts that compute prompts or decode and on as many that do both."""
    server = server_from(args, layout, trace)
    given = {"bandwidth": args.network, "latency": args.latency}
    link = Link(**{name: value for name, value in given.items() if value is not None})
    prefill, decode, speeds = args.prefill_hosts, args.decode_hosts, args.speed or [1.0]
    runs: list[dict[str, Any]] = []
    words = _too_long(args) | {
        "hand-offs need host memory, and a cache policy": "--prefill-hosts: hand-offs need --host, and a --policy",
        "hosts": "--prefill-hosts or --decode-hosts",
    }
    with Progress("requests", 2 * len(speeds) * len(trace)) as progress, naming(fields=words):
        done = progress.advance
        ways = {
            f"{prefill} + {decode}": lambda faster: simulate_handed(
                faster, server, prefill, decode, link, on_done=done
            ),
            f"{prefill + decode} joint": lambda faster: simulate_joint(faster, server, prefill + decode, on_done=done),
        }
        for speed, (name, simulated) in itertools.product(speeds, ways.items()):
            progress.update(f"requests, {name}, speed {speed:g}")
            # From 0 on: of seconds since 1970 a float has too few digits left for a step's.
            faster = [dataclasses.replace(each, arrival=(each.arrival - trace[0].arrival) / speed) for each in trace]
            runs.append({"name": name, "speed": speed, **hosts_report(simulated(faster))})
    memory = human(layout.total_bytes(server.size))
    hosts = {"prefill": prefill, "decode": decode, "joint": prefill + decode}
    title = f"{memory} of HBM a host, {link.bandwidth / 1e9:g} GB/s between hosts"
    return title, {"hosts": hosts, "network": dataclasses.asdict(link), "runs": runs}


# The trace


def _too_long(args: argparse.Namespace) -> dict[str, str]:
    """Names the options that say how long a request may be, where none of the trace fits."""
    return {"no request of the trace fits": f"{given_sizes(args)}: no request of the trace fits"}


def _trace(args: argparse.Namespace) -> tuple[Trace, int]:
    """The requests, and how many outputs were linked."""
    if args.trace is None:
        with naming("--generate"):
            trace = make_trace(ChatTrace.parse(args.generate))[: args.limit]
    else:
        unit = {"ms": 1e-3, "s": 1.0}[args.timestamp_unit]
        forms = {"trace_block_tokens": args.trace_block_tokens, "timestamp_unit": unit, "limit": args.limit}
        with _lines(args.trace) as file, naming("TRACE"):
            trace = read_trace(file, source=str(args.trace), **forms)
    linked = 0
    if args.link_outputs:
        trace, linked = link_outputs(trace, trace_block_tokens=args.trace_block_tokens)
    if args.save_trace:
        with open_output(args.save_trace, encoding="utf-8") as file:
            write_trace(trace, file)
    return trace, linked


@contextlib.contextmanager
def _lines(path: pathlib.Path) -> Iterator[TextIO]:
    with contextlib.ExitStack() as stack:
        if str(path) != "-":
            file = stack.enter_context(open_regular(path, "TRACE", " (a pipe is read as -, from stdin)"))
        elif sys.stdin is None:
            raise FileError("TRACE: stdin is closed")
        else:
            file = sys.stdin.buffer
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
        stack.callback(text.detach)
        yield text


def _speeds(text: str) -> list[float]:
    """Parses numbers, each once."""
    speeds = [number(part) for part in text.split(",")]
    if len(speeds) > _MAX_SPEEDS or len(set(speeds)) < len(speeds) or not all(1e-6 <= x <= 1e6 for x in speeds):
        raise argparse.ArgumentTypeError(f"must be 1 to {_MAX_SPEEDS} different numbers from 1e-6 to 1e6")
    return speeds
