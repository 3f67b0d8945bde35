"""`simulate`: a trace of requests through the real manager, without a device: hits, evictions, queues.

The server is a simple one: a step takes a fixed time, a time per token, and the time of its transfers; it
computes as many decodes and prefill chunks as fit its token budget. The cache decisions are the real ones.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.markup import escape
from rich.table import Table

from ..errors import CapacityError, InputError
from ..layout import CacheLayout, CacheSize
from ..manager import CachePolicy, HostSize, WritePolicy
from ..manager.policies import ORDERS
from ..output import open_output
from ..simulate import ChatTrace, Server, StepTime, TraceRequest, make_trace, read_trace, simulate, write_trace
from ..simulate.plot import draw
from ..simulate.report import report
from .inputs import open_regular
from .options import add_json, add_layout, layout_from, print_json, progress_bar, refuse_same, stdout
from .placement import DEFAULT_PLACEMENT, PLACEMENT_HELP, placement
from .plan import human, model_config
from .values import byte_count, given_path, natural, output_file, picture_file, positive, short, token_count

__all__ = ["add_parser", "run"]

_EXAMPLES = """
examples:
  dsv4_jax simulate trace.jsonl --hbm 20GiB                              what would be found, what evicted?
  dsv4_jax simulate trace.jsonl --hbm 20GiB --policy none --json         the same without prefix caching
  dsv4_jax simulate trace.jsonl --blocks 4000 --host-blocks 20000 --host-snapshots 400 --policy selective:2
  dsv4_jax simulate --generate chats=200,tenants=4,seed=1 --blocks 600 --snapshots 64 --plot sim.png
  dsv4_jax simulate --generate chats=200 --save-trace trace.jsonl        also keep the trace that was made up

the trace is a file, or - for stdin; a line of it is one of
  {"arrival": 0.5, "prompt": [["system", 2000], ["question 1", 90]], "output": 120, "tenant": "a"}
  {"timestamp": 500, "input_length": 1300, "output_length": 120, "hash_ids": [0, 1, 17]}
a run ["system", 2000] is the first 2000 tokens of the sequence of that name; output may be runs as well.

settings of --generate (lengths and pauses are means): seed, chats, tenants, systems (system prompts, the
same ones for every tenant), turns, system, question, answer (tokens), rate (chats a second), pause (seconds)
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "simulate", help="a request trace through the manager, without a device", description=__doc__,
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
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
    size = parser.add_argument_group("cache size")
    size.add_argument("--model", default="flash", metavar="NAME|PATH", help="flash, pro, tiny, or a config.json")
    pool = size.add_mutually_exclusive_group()
    pool.add_argument("--blocks", type=positive, metavar="N", help="on the device")
    pool.add_argument("--hbm", type=byte_count, metavar="BYTES", help="for the device's cache (default: 8GiB)")
    size.add_argument("--context", type=token_count, metavar="TOKENS", help="of one request (default: the longest)")
    size.add_argument("--max-requests", type=positive, default=64, metavar="N", help="live at once (default: 64)")
    size.add_argument("--snapshots", type=natural, default=64, metavar="N", help="slots for states (default: 64)")
    size.add_argument("--host-blocks", type=natural, default=0, metavar="N", help="default: no host tier")
    size.add_argument("--host-snapshots", type=natural, default=0, metavar="N")
    policy = parser.add_argument_group("policy")
    policy.add_argument(
        "--policy", type=_write_policy, default="write_back", metavar="NAME",
        help="none (no caching), write_back (default), write_through, or selective:N (blocks with N hits)",
    )  # fmt: skip
    policy.add_argument("--order", choices=sorted(ORDERS), default="lru", help="of eviction (default: %(default)s)")
    policy.add_argument(
        "--snapshots-at", type=placement, default=DEFAULT_PLACEMENT, metavar="LIST", help=PLACEMENT_HELP
    )
    step = parser.add_argument_group("server")
    step.add_argument("--token-budget", type=positive, default=8192, metavar="N", help="of a step (default: 8192)")
    step.add_argument("--step-ms", type=_amount, default=20.0, metavar="MS", help="any step (default: 20)")
    step.add_argument("--token-us", type=_amount, default=50.0, metavar="US", help="per token (default: 50)")
    step.add_argument(
        "--host-bandwidth", type=byte_count, default=byte_count("50GB"), metavar="BYTES",
        help="a second, device to host or back (default: 50GB)",
    )  # fmt: skip
    parser.add_argument("--plot", type=picture_file, metavar="PNG", help="draw it over simulated time")
    add_layout(parser)
    add_json(parser)
    parser.set_defaults(run=run, refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    if (args.trace is None) == (args.generate is None):
        args.refuse("give either a TRACE or --generate")
    if not args.host_bandwidth:
        args.refuse("argument --host-bandwidth: must be positive")
    refuse_same({"TRACE": args.trace, "--save-trace": args.save_trace, "--plot": args.plot})
    layout = layout_from(args, model_config(args.model))
    trace = _trace(args)
    server = _server(args, layout, trace)
    with progress_bar() as bar:
        task = bar.add_task("requests", total=len(trace))
        result = simulate(trace, server, on_done=lambda: bar.advance(task))
    choices = {"order": args.order, "snapshots_at": dataclasses.asdict(args.snapshots_at)}
    answer = {"model": args.model, **choices, **report(result)}
    if args.plot:
        draw(answer, args.plot, title=f"{args.model}, {answer['cache']['policy']}: {_title(server)}")
    if args.json:
        print_json(answer)
    else:
        stdout().print(_table(answer))
    broken = sum(answer["isolation"].values())
    if broken:
        print(f"{broken} units held what they should not: a bug of the manager", file=sys.stderr)
    return 1 if broken else 0


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace is None:
        trace = make_trace(ChatTrace.parse(args.generate))[: args.limit]
    else:
        with _lines(args.trace) as file:
            trace = read_trace(
                file, source=str(args.trace), trace_block_tokens=args.trace_block_tokens,
                timestamp_unit={"ms": 1e-3, "s": 1.0}[args.timestamp_unit], limit=args.limit,
            )  # fmt: skip
    if args.save_trace:
        with open_output(args.save_trace, encoding="utf-8") as file:
            write_trace(trace, file)
    return trace


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


def _server(args: argparse.Namespace, layout: CacheLayout, trace: list[TraceRequest]) -> Server:
    longest = max(request.prompt_tokens + request.output_tokens for request in trace)
    context = min(args.context or longest, layout.cfg.max_position_embeddings)
    size = CacheSize(args.blocks or 1, args.max_requests, layout.blocks_for(context), args.snapshots)
    if not args.blocks:
        memory = byte_count("8GiB") if args.hbm is None else args.hbm
        spare = memory - layout.total_bytes(size)
        if spare < 0:
            problem = f"{memory} bytes are too few: one block and {size.slot_units} slots take {memory - spare}"
            raise CapacityError(f"--hbm: {problem}, so {-spare} are missing")
        blocks = 1 + spare // layout.bytes_per_block
        size = CacheSize(blocks, size.num_slots, size.max_blocks_per_request, size.num_snapshots)
    policy = None
    if args.policy is not None:
        policy = CachePolicy(write=args.policy, snapshots=args.snapshots_at, order=ORDERS[args.order])
    host = HostSize(args.host_blocks, args.host_snapshots) if args.host_blocks or args.host_snapshots else None
    time = StepTime(args.step_ms * 1e-3, args.token_us * 1e-6, args.host_bandwidth)
    return Server(layout, size, policy, host, args.token_budget, time)


def _write_policy(text: str) -> WritePolicy | None:
    """argparse type: None for no caching at all."""
    plain = {"none": None, "write_back": WritePolicy.write_back(), "write_through": WritePolicy.write_through()}
    if text in plain:
        return plain[text]
    name, _, threshold = text.partition(":")
    if name != "selective":
        raise argparse.ArgumentTypeError(f"{short(text)} is neither none, write_back, write_through nor selective:N")
    return WritePolicy.write_through_selective(positive(threshold))


def _amount(text: str) -> float:
    """argparse type: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{short(text)} is not a number of at least 0 (below 1e9)")
    return value


def _title(server: Server) -> str:
    host = f", {server.host.num_blocks:,} on the host" if server.host else ""
    return f"{server.size.num_blocks:,} blocks{host}, {server.size.num_snapshots:,} snapshots"


def _table(answer: dict[str, Any]) -> Table:
    cache, hits, seconds, requests = answer["cache"], answer["hits"], answer["seconds"], answer["requests"]
    title = f"{escape(answer['model'])}, {cache['policy']}, {answer['order']}: {human(cache['bytes'])} of cache"
    table = Table("", "", title=title, title_justify="left", show_header=False)

    def line(name: str, *parts: str) -> None:
        table.add_row(name, ", ".join(parts))

    def by_name(values: dict[str, Any], form: str = ",") -> list[str]:
        return [f"{name} {value:{form}}" for name, value in values.items()]

    line("requests", f"{requests['run']:,}", f"{requests['tenants']:,} tenants")
    line("tokens", f"prompts {requests['prompt_tokens']:,}", f"output {requests['output_tokens']:,}")
    table.add_section()
    line("hit rate, by tokens", f"{hits['rate']:.2%}", *by_name(hits["rate_by_tier"], ".2%"))
    line("at most (an endless cache)", f"{hits['highest_possible_rate']:.2%}")
    line("requests with a hit", f"{hits['requests']:,}")
    line("recomputed tokens", *(n.replace("_", " ") for n in by_name(answer["recomputed_tokens"])))
    line("evicted", *by_name(answer["evictions"]))
    line("moved", *(f"{name} {human(count)}" for name, count in answer["transfer_bytes"].items()))
    table.add_section()
    line("preemptions", f"{answer['preemptions']:,}")
    line("held up in line, by pool", *by_name(answer["admission_failures"]))
    for name, pool in answer["pools"].items():
        share = pool["peak_in_use"] / max(pool["total"], 1)
        line(
            f"pool: {name}", f"{pool['total']:,}",
            f"at most {pool['peak_in_use']:,} ({share:.0%}) in use, {pool['peak_used']:,} with what is cached",
        )  # fmt: skip
    table.add_section()
    line("simulated seconds", f"{seconds['simulated']:,.1f}", f"{answer['steps']:,} steps")
    for name in ("queued", "first_token", "whole_request"):
        line(f"{name.replace('_', ' ')}, seconds", *by_name(seconds[name], ",.3f"))
    for name, spread in answer["cpu"].items():
        micros = {key: value * 1e6 for key, value in spread.items()}
        line(f"manager per {name}, CPU us", *by_name(micros, ",.0f"))
    return table
