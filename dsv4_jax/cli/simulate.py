"""`simulate`: a trace of requests through the real manager, without a device: hits, evictions, queues.

The server is a simple one: it computes as many decodes and prefill chunks as fit its token budget, in steps that take
what a fitted model says (attention alone, see `dsv4_jax/simulate/step_time.py`). The cache decisions are the real ones.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from ..errors import InputError
from ..output import open_output
from ..records import state_pages
from ..simulate import ChatTrace, Server, TraceRequest, link_outputs, make_trace, read_trace, simulate, write_trace
from ..simulate.bounds import Turn, bounds, turns_of
from ..simulate.plot import draw
from ..simulate.report import report, with_bounds
from .inputs import open_regular
from .models import add_model, model_config, model_file
from .options import add_command, add_json, add_layout, layout_from, naming, refuse_same
from .plan import human
from .printing import Progress, present, say
from .simulate_server import DEFAULTS, Variant, add_server, room, server_from, variant
from .simulate_table import table
from .simulated_hosts import add_hosts, check_hosts, run_hosts
from .values import given_path, output_file, picture_file, positive

__all__ = ["add_parser", "run"]

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
    trace.add_argument("--save-trace", type=output_file, metavar="FILE", help="write the trace in our own form")
    trace.add_argument("--limit", type=positive, metavar="N", help="read N requests at most")
    trace.add_argument(
        "--trace-block-tokens", type=positive, default=512, metavar="N", help="of a hash id (default: 512)"
    )
    trace.add_argument(
        "--timestamp-unit", choices=("ms", "s"), default="ms", help="of `timestamp` (default: %(default)s)"
    )
    trace.add_argument(
        "--link-outputs", action="store_true", help="outputs without ids get those of the chat's next turn"
    )
    add_model(parser)
    add_server(parser)
    parser.set_defaults(**DEFAULTS)
    add_hosts(parser)
    several = parser.add_argument_group("comparison")
    several.add_argument(
        "--compare",
        type=variant,
        action="append",
        metavar="'NAME: OPTIONS'",
        help="run this variant; several are put side by side ('NAME:' alone: as the command line says)",
    )
    several.add_argument(
        "--bound", action="store_true", help="also say what a clairvoyant cache of this memory could find"
    )
    parser.add_argument(
        "--plot", type=picture_file, metavar="PNG", help="draw it over simulated time (several hosts: over the rate)"
    )
    add_layout(parser)
    add_json(parser)
    parser.set_defaults(run=run, refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    if (args.trace is None) == (args.generate is None):
        args.refuse("give either a TRACE or --generate")
    refuse_same(
        {
            "TRACE": args.trace,
            "--model": model_file(args.model),
            "--save-trace": args.save_trace,
            "--plot": args.plot,
            "--json": args.json,
        }
    )
    variants = args.compare or [Variant("", "", {})]
    if len({each.name for each in variants}) < len(variants):
        args.refuse("argument --compare: two variants have the same name")
    handed = check_hosts(args)
    layout = layout_from(args, model_config(args.model))
    trace, linked = _trace(args)
    if handed:
        return run_hosts(args, layout, trace, linked)
    servers = []
    for each in variants:
        with naming(f"--compare {each.name}") if each.name else contextlib.nullcontext():
            servers.append(server_from(each.of(args), layout, trace))
    turns = turns_of(trace, layout) if args.bound else None
    runs = []
    with Progress("requests", len(trace) * len(variants)) as progress:
        for each, server in zip(variants, servers, strict=True):
            progress.update(f"requests, {each.name}" if each.name else None)
            with naming(
                fields={"no request of the trace fits": f"{room(each.of(args))}: no request of the trace fits"}
            ):
                answer = report(simulate(trace, server, on_done=progress.advance))
            runs.append({"name": each.name, "options": each.text, **_with_bounds(answer, turns, trace, server)})
    result = {"model": args.model, "title": f"{args.model}: {_memory(runs)}", "linked_outputs": linked, "runs": runs}
    if args.plot:
        draw(result, args.plot)
    present(result, args.json, lambda console: console.print(table(result)))
    broken = sum(sum(each["isolation"].values()) for each in runs)
    if broken:
        say(f"{broken} units held what they should not: a bug of the manager")
    return 1 if broken else 0


def _with_bounds(
    answer: dict[str, Any], turns: list[Turn] | None, trace: list[TraceRequest], server: Server
) -> dict[str, Any]:
    if turns is None:
        return answer
    pages, size = server.host.num_pages if server.host else 0, server.size
    blocks, states = size.num_blocks + pages, size.num_slots + size.num_snapshots
    states += pages // state_pages(server.layout, 0)
    found = bounds(turns, trace, server.layout.block_tokens, blocks=blocks, states=states)
    return with_bounds(answer, found)


def _memory(runs: list[dict[str, Any]]) -> str:
    """What all runs have in common of their sizes."""
    first, *others = (run["cache"] for run in runs)
    parts = []
    for name in ("bytes", "host_bytes"):
        if first[name] and all(abs(other[name] - first[name]) <= 0.01 * first[name] for other in others):
            parts.append(f"{human(first[name])} of {'HBM' if name == 'bytes' else 'host memory'}")
    return ", ".join(parts) or "several sizes"


def _trace(args: argparse.Namespace) -> tuple[list[TraceRequest], int]:
    """The requests, and how many outputs were linked."""
    if args.trace is None:
        with naming("--generate"):
            trace = make_trace(ChatTrace.parse(args.generate))[: args.limit]
    else:
        with _lines(args.trace) as file, naming("TRACE"):
            trace = read_trace(
                file,
                source=str(args.trace),
                trace_block_tokens=args.trace_block_tokens,
                timestamp_unit={"ms": 1e-3, "s": 1.0}[args.timestamp_unit],
                limit=args.limit,
            )
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
            raise InputError("TRACE: stdin is closed")
        else:
            file = sys.stdin.buffer
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
        stack.callback(text.detach)
        yield text
