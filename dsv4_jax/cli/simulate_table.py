"""Simulations as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from .plan import human

__all__ = ["table"]

Cell = Callable[[dict[str, Any]], str | None]  # None: nothing to say of this run


def table(result: dict[str, Any]) -> Table:
    """Of what the command prints as JSON: one run in detail, several in a line each."""
    runs = result["runs"]
    return _one(result, runs[0]) if len(runs) == 1 else _several(result, runs)


def _several(result: dict[str, Any], runs: list[dict[str, Any]]) -> Table:
    columns: dict[str, Cell] = {
        "hits": lambda run: f"{run['hits']['rate']:.1%}",
        "of end-\nless": lambda run: f"{run['hits']['share_of_highest']:.1%}",
        "clair-\nvoyant": lambda run: f"{run['bound']['share_of_clairvoyant']:.1%}" if run["bound"] else None,
        "redone,\nM": lambda run: f"{run['recomputed_tokens']['seen_before'] / 1e6:,.2f}",
        "GiB\nout": lambda run: _gib(run, "swap_out", "snapshot"),
        "GiB\nback": lambda run: _gib(run, "swap_in", "restore"),
        "TTFT, s\nmean": lambda run: f"{run['seconds']['first_token']['mean']:,.3f}",
        "\np99": lambda run: f"{run['seconds']['first_token']['p99']:,.3f}",
        "steps": lambda run: f"{run['steps']:,}",
    }
    requests = runs[0]["requests"]
    best = runs[0]["hits"]["highest_possible_rate"]
    title = f"{result['title']}; {requests['run']:,} requests, {requests['prompt_tokens']:,} prompt tokens"
    title = escape(f"{title}; an endless cache finds {best:.1%}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("", overflow="fold", min_width=10)
    shown = {name: cell for name, cell in columns.items() if any(cell(run) is not None for run in runs)}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(escape(run["name"]), *(cell(run) or "" for cell in shown.values()))
    return table


def _gib(run: dict[str, Any], *kinds: str) -> str | None:
    moved = sum(run["transfer_bytes"][kind] for kind in kinds)
    return f"{moved / 2**30:,.1f}" if moved else None


def _one(result: dict[str, Any], run: dict[str, Any]) -> Table:
    name = f", {run['name']}" if run["name"] else ""
    table = Table("", "", title=escape(result["title"] + name), title_justify="left", show_header=False)
    for section in (_trace(result), _cache(), _hits(), _costs(), _times()):
        for label, cell in section.items():
            if (value := cell(run)) is not None:
                table.add_row(label, value)
        table.add_section()
    return table


def _trace(result: dict[str, Any]) -> dict[str, Cell]:
    def tokens(run: dict[str, Any]) -> str:
        return f"prompts {run['requests']['prompt_tokens']:,}, output {run['requests']['output_tokens']:,}"

    linked = result["linked_outputs"]
    return {
        "requests": lambda run: f"{run['requests']['run']:,}, {run['requests']['tenants']:,} tenants",
        "never admitted": lambda run: _names(run["requests"]["rejected"], skip=True) or None,
        "tokens": tokens,
        "outputs linked to a next turn": lambda run: f"{linked:,}" if linked else None,
    }


def _cache() -> dict[str, Cell]:
    def host(run: dict[str, Any]) -> str | None:
        size = run["cache"]["host"]
        if size is None:
            return None
        return f"{human(run['cache']['host_bytes'])}: {size['num_pages']:,} pages"

    def device(run: dict[str, Any]) -> str:
        size = run["cache"]["size"]
        return f"{human(run['cache']['bytes'])}: {size['num_blocks']:,} blocks, {size['num_snapshots']:,} states"

    return {
        "policy": lambda run: f"{run['cache']['policy']}, {run['cache']['order']}",
        "device": device,
        "host": host,
    }


def _hits() -> dict[str, Cell]:
    def bound(run: dict[str, Any]) -> str | None:
        found = run["bound"]
        if found is None:
            return None
        least = "blocks" if found["blocks_rate"] <= found["states_rate"] else "states"
        return f"{found['clairvoyant_rate']:.2%} ({least} bind), of it {found['share_of_clairvoyant']:.1%} found"

    return {
        "hit rate, by tokens": lambda run: f"{run['hits']['rate']:.2%}: " + _names(run["hits"]["rate_by_tier"], ".2%"),
        "at most, endless cache": lambda run: (
            f"{run['hits']['highest_possible_rate']:.2%}, of it {run['hits']['share_of_highest']:.1%} found"
        ),
        "at most, this memory": bound,
        "requests with a hit": lambda run: f"{run['hits']['requests']:,}",
    }


def _costs() -> dict[str, Cell]:
    def preempted(run: dict[str, Any]) -> str | None:
        lost = run["recomputed_tokens"]["after_preemption"]
        return f"{run['preemptions']:,}, tokens lost {lost:,}" if run["preemptions"] else None

    rows: dict[str, Cell] = {
        "seen before, yet recomputed": lambda run: f"{run['recomputed_tokens']['seen_before']:,} tokens",
        "preemptions": preempted,
        "evicted": lambda run: _names(run["evictions"], skip=True) or None,
        "moved to the host": lambda run: _moved(run, swap_out="blocks", snapshot="states"),
        "moved back": lambda run: _moved(run, swap_in="blocks", restore="states"),
        "held up in line, by pool": lambda run: _names(run["admission_failures"], skip=True) or None,
    }
    return rows | {f"pool: {name}": _pool(name) for name in ("device", "host", "slot")}


def _moved(run: dict[str, Any], **kinds: str) -> str | None:
    moved = {name: run["transfer_bytes"][kind] for kind, name in kinds.items() if run["transfer_bytes"][kind]}
    return ", ".join(f"{name} {human(count)}" for name, count in moved.items()) or None


def _pool(name: str) -> Cell:
    def cell(run: dict[str, Any]) -> str | None:
        pool = run["pools"].get(name)
        if not pool or not pool["total"]:
            return None
        share = pool["peak_in_use"] / pool["total"]
        in_use = f"at most {pool['peak_in_use']:,} ({share:.0%}) in use"
        return f"{pool['total']:,}, {in_use}, {pool['peak_used']:,} with what is cached"

    return cell


def _times() -> dict[str, Cell]:
    def spread(name: str) -> Cell:
        return lambda run: _names(run["seconds"][name], ",.3f")

    def cpu(name: str) -> Cell:
        return lambda run: _names({key: 1e6 * value for key, value in run["cpu"][name].items()}, ",.0f")

    return {
        "simulated seconds": lambda run: f"{run['seconds']['simulated']:,.1f}, {run['steps']:,} steps",
        "waited for transfers, seconds": lambda run: (
            f"{run['seconds']['waited_for_transfers']:,.2f}" if run["seconds"]["waited_for_transfers"] else None
        ),
        "queued, seconds": spread("queued"),
        "first token, seconds": spread("first_token"),
        "whole request, seconds": spread("whole_request"),
        "manager per planned step, CPU us": cpu("step"),
        "manager per admission, CPU us": cpu("admission"),
    }


def _names(values: dict[str, Any], form: str = ",", *, skip: bool = False) -> str:
    """`skip`: leaves out what is 0."""
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items() if value or not skip)
