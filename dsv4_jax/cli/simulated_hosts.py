"""`simulate` on several hosts: some that compute prompts and some that decode, against as many that do both."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..layout import CacheLayout
from ..simulate import Link, Server, TraceRequest, hosts_report, simulate_handed, simulate_joint
from ..simulate.hosts_plot import draw
from .options import naming
from .plan import human
from .printing import Progress, present, say
from .simulate_server import room, server_from
from .values import byte_rate, duration, number, positive

__all__ = ["add_hosts", "check_hosts", "run_hosts"]

_MOST_SPEEDS = 16


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """The options of several hosts."""
    hosts = parser.add_argument_group("several hosts, each one as the options above say")
    hosts.add_argument("--prefill-hosts", type=positive, metavar="N", help="hosts that compute prompts, and ...")
    hosts.add_argument(
        "--decode-hosts",
        type=positive,
        metavar="M",
        help="hosts that decode what these hand over; the same trace also runs on N + M hosts that do both",
    )
    hosts.add_argument(
        "--network", type=byte_rate, metavar="RATE", help="of each host's card, in and out each (default: 50GB/s)"
    )
    hosts.add_argument("--latency", type=duration, metavar="TIME", help="of each message and read (default: 100us)")
    hosts.add_argument(
        "--speed",
        type=_speeds,
        metavar="X,X,...",
        help="requests come so many times as fast; one run each (default: 1)",
    )


def check_hosts(args: argparse.Namespace) -> bool:
    """Whether there are several hosts. Refuses options that do not go together."""
    given = {
        f"--{name}": getattr(args, name.replace("-", "_")) is not None
        for name in ("prefill-hosts", "decode-hosts", "network", "latency", "speed")
    }
    if not (given["--prefill-hosts"] and given["--decode-hosts"]):
        if wrong := next((name for name, there in given.items() if there), None):
            args.refuse(f"argument {wrong}: goes with both --prefill-hosts and --decode-hosts")
        return False
    for name in ("compare", "bound"):
        if getattr(args, name):
            args.refuse(f"argument --{name}: not with several hosts")
    return True


def run_hosts(args: argparse.Namespace, layout: CacheLayout, trace: Sequence[TraceRequest], linked: int) -> int:
    """The command, when there are several hosts."""
    server = server_from(args, layout, trace)
    given = {"bandwidth": args.network, "latency": args.latency}
    link = Link(**{name: value for name, value in given.items() if value is not None})
    prefill, decode, speeds = args.prefill_hosts, args.decode_hosts, args.speed or [1.0]
    runs: list[dict[str, Any]] = []
    with Progress("requests", 2 * len(speeds) * len(trace)) as progress, naming(fields=_words(args)):
        told = {"on_done": progress.advance}
        ways = {
            f"{prefill} + {decode}": lambda faster: simulate_handed(faster, server, prefill, decode, link, **told),
            f"{prefill + decode} joint": lambda faster: simulate_joint(faster, server, prefill + decode, **told),
        }
        for speed, (name, simulated) in itertools.product(speeds, ways.items()):
            progress.update(f"requests, {name}, speed {speed:g}")
            # From 0 on: of seconds since 1970 a float has too few digits left for a step's.
            faster = [dataclasses.replace(each, arrival=(each.arrival - trace[0].arrival) / speed) for each in trace]
            runs.append({"name": name, "speed": speed, **hosts_report(simulated(faster))})
    result = {
        "model": args.model,
        "title": _title(args, server, link),
        "linked_outputs": linked,
        "hosts": {"prefill": prefill, "decode": decode, "joint": prefill + decode},
        "network": dataclasses.asdict(link),
        "runs": runs,
    }
    if args.plot:
        draw(result, args.plot)
    present(result, args.json, lambda console: console.print(_table(result)))
    broken = sum(count for each in runs for count in each["isolation"].values())
    if broken:
        say(f"{broken} units held what they should not, or were left over: a bug of the manager")
    return 1 if broken else 0


def _words(args: argparse.Namespace) -> dict[str, str]:
    """What errors say of hosts and requests, in the words of the command line."""
    return {
        "hand-offs need host memory, and a cache policy": "--prefill-hosts: hand-offs need --host, and a --policy",
        "hosts": "--prefill-hosts or --decode-hosts",
        "no request of the trace": f"{room(args)}: no request of the trace",
    }


def _title(args: argparse.Namespace, server: Server, link: Link) -> str:
    memory = human(server.layout.total_bytes(server.size))
    return f"{args.model}: {memory} of HBM a host, {link.bandwidth / 1e9:g} GB/s between hosts"


def _table(result: dict[str, Any]) -> Table:
    """A line for each run."""
    requests = result["runs"][0]["requests"]
    title = f"{result['title']}; {requests['run']:,} requests, {requests['prompt_tokens']:,} prompt tokens"
    if rejected := sum(requests["rejected"].values()):
        title += f"; {rejected:,} requests do not fit"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("hosts", no_wrap=True)
    names = ("req/s", "TTFT\np50, s", "\np95", "TPOT\np50, ms", "\np95", "gap\np99", "out\ntok/s", "hits", "GB\nsent")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("TTFT:\nmostly")
    for i, run in enumerate(result["runs"]):
        first, token = run["seconds"]["first_token"], run["seconds"]["per_output_token"]
        sent = run["network"]["bytes"]
        table.add_row(
            run["name"],
            f"{run['requests']['per_second']:.2f}",
            _seconds(first["p50"]),
            _seconds(first["p95"]),
            f"{1e3 * token['p50']:,.1f}",
            f"{1e3 * token['p95']:,.1f}",
            f"{1e3 * run['seconds']['token_gap']['p99']:,.1f}",
            f"{run['per_second']['output_tokens']:,.0f}",
            f"{run['hits']['rate']:.1%}",
            f"{sent / 1e9:,.1f}" if sent else "",
            run["bound"],
            end_section=i % 2 == 1,
        )
    return table


def _seconds(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _speeds(text: str) -> list[float]:
    """argparse type: numbers, each once."""
    speeds = [number(part) for part in text.split(",")]
    if len(speeds) > _MOST_SPEEDS or len(set(speeds)) < len(speeds) or not all(1e-6 <= x <= 1e6 for x in speeds):
        raise argparse.ArgumentTypeError(f"must be 1 to {_MOST_SPEEDS} different numbers from 1e-6 to 1e6")
    return speeds
