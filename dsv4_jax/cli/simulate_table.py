"""What `simulate` found, as tables: of one run, of several side by side, and of several hosts."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from .printing import columns, facts, human

__all__ = ["hosts_table", "table"]

Run = dict[str, Any]  # as in the JSON that the command prints


def table(result: dict[str, Any]) -> Table:
    """Returns the table of what the command prints as JSON: one run in detail, several in a line each."""
    runs = result["runs"]
    return _one(result, runs[0]) if len(runs) == 1 else _several(result, runs)


def hosts_table(result: dict[str, Any]) -> Table:
    """Returns the table of a simulation of several hosts: a line for each run."""
    names = ["req/s\nserved", "TTFT\np50, s", "\np95", "TPOT\np50, ms", "\np95", "gap\np99", "out\ntok/s"]
    names += ["hits", "GB\nsent", mostly := "TTFT:\nmostly"]
    rows = []
    for run in result["runs"]:
        seconds, sent = run["seconds"], run["network"]["bytes"]
        first, token = seconds["first_token"], seconds["per_output_token"]
        milliseconds = (1e3 * token["p50"], 1e3 * token["p95"], 1e3 * seconds["token_gap"]["p99"])
        row = [
            run["name"],
            f"{run['per_second']['requests']:.2f}",
            _rounded(first["p50"], 2),
            _rounded(first["p95"], 2),
        ]
        row += [_rounded(value, 1) for value in milliseconds]
        row += [f"{run['per_second']['output_tokens']:,.0f}", f"{run['hits']['rate']:.1%}"]
        rows.append([*row, _rounded(sent / 1e9, 1) if sent else "", run["bound"]])
    return columns(_title(result, result["runs"][0]), names, rows, words=[mostly], every=2)


def _rounded(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if value < 100 else f"{value:,.0f}"


def _title(result: dict[str, Any], run: Run) -> str:
    requests = run["requests"]
    title = f"{result['title']}; {requests['run']:,} requests, {requests['prompt_tokens']:,} prompt tokens"
    rejected = sum(requests["rejected"].values())
    return f"{title}; {rejected:,} requests do not fit" if rejected else title


def _several(result: dict[str, Any], runs: list[Run]) -> Table:
    bound = any(run["bound"] for run in runs)
    names = ["hits", "of end-\nless", *(["clair-\nvoyant"] if bound else []), "redone,\nM", "GiB\nout", "GiB\nback"]
    rows = []
    for run in runs:
        hits, moved, first = run["hits"], run["transfer_bytes"], run["seconds"]["first_token"]
        row = [run["name"], f"{hits['rate']:.1%}", f"{hits['share_of_highest']:.1%}"]
        row += [f"{run['bound']['share_of_clairvoyant']:.1%}"] if bound else []
        row.append(f"{run['recomputed_tokens']['seen_before'] / 1e6:,.2f}")
        for count in (moved["swap_out"] + moved["snapshot"], moved["swap_in"] + moved["restore"]):
            row.append(f"{count / 2**30:,.1f}" if count else "")
        rows.append([*row, f"{first['mean']:,.3f}", f"{first['p99']:,.3f}", f"{run['steps']:,}"])
    title = f"{_title(result, runs[0])}; an endless cache finds {runs[0]['hits']['highest_possible_rate']:.1%}"
    return columns(title, [*names, "TTFT, s\nmean", "\np99", "steps"], rows)


def _one(result: dict[str, Any], run: Run) -> Table:
    requests, cache, seconds, linked = run["requests"], run["cache"], run["seconds"], result["linked_outputs"]
    size, pages, waited = cache["size"], cache["host"], seconds["waited_for_transfers"]
    trace = {
        "requests": f"{requests['run']:,}, {requests['tenants']:,} tenants",
        "never admitted": _nonzero(requests["rejected"]),
        "tokens": f"prompts {requests['prompt_tokens']:,}, output {requests['output_tokens']:,}",
        "outputs linked to a next turn": f"{linked:,}" if linked else None,
    }
    memory = {
        "policy": f"{cache['policy']}, {cache['order']}",
        "device": f"{human(cache['bytes'])}: {size['num_blocks']:,} blocks, {size['num_snapshots']:,} states",
        "host": f"{human(cache['host_bytes'])}: {pages['num_pages']:,} pages" if pages else None,
    }
    times = {
        "simulated seconds": f"{seconds['simulated']:,.1f}, {run['steps']:,} steps",
        "waited for transfers, seconds": f"{waited:,.2f}" if waited else None,
        "queued, seconds": _names(seconds["queued"], ",.3f"),
        "first token, seconds": _names(seconds["first_token"], ",.3f"),
        "whole request, seconds": _names(seconds["whole_request"], ",.3f"),
        "manager per planned step, CPU us": _names(run["cpu"]["step"], ",.0f", scale=1e6),
        "manager per admission, CPU us": _names(run["cpu"]["admission"], ",.0f", scale=1e6),
    }
    name = f", {run['name']}" if run["name"] else ""
    return facts(result["title"] + name, trace, memory, _hits(run), _costs(run), times)


def _hits(run: Run) -> dict[str, str | None]:
    hits, bound = run["hits"], run["bound"]
    possible = None
    if bound:
        binds = "blocks" if bound["blocks_rate"] <= bound["states_rate"] else "states"
        found = f"of it {bound['share_of_clairvoyant']:.1%} found"
        possible = f"{bound['clairvoyant_rate']:.2%} ({binds} bind), {found}"
    return {
        "hit rate, by tokens": f"{hits['rate']:.2%}: {_names(hits['rate_by_tier'], '.2%')}",
        "at most, endless cache": f"{hits['highest_possible_rate']:.2%}, of it {hits['share_of_highest']:.1%} found",
        "at most, this memory": possible,
        "requests with a hit": f"{hits['requests']:,}",
    }


def _costs(run: Run) -> dict[str, str | None]:
    again, moved = run["recomputed_tokens"], run["transfer_bytes"]
    preempted = f"{run['preemptions']:,}, tokens lost {again['after_preemption']:,}" if run["preemptions"] else None
    rows = {
        "seen before, yet recomputed": f"{again['seen_before']:,} tokens",
        "preemptions": preempted,
        "evicted": _nonzero(run["evictions"]),
        "moved to the host": _moved(blocks=moved["swap_out"], states=moved["snapshot"]),
        "moved back": _moved(blocks=moved["swap_in"], states=moved["restore"]),
        "held up in line, by pool": _nonzero(run["admission_failures"]),
    }
    for name in ("device", "host", "slot"):
        pool = run["pools"].get(name)
        if pool and pool["total"]:
            in_use = f"at most {pool['peak_in_use']:,} ({pool['peak_in_use'] / pool['total']:.0%}) in use"
            rows[f"pool: {name}"] = f"{pool['total']:,}, {in_use}, {pool['peak_used']:,} with what is cached"
    return rows


def _moved(**count: int) -> str | None:
    return ", ".join(f"{name} {human(moved)}" for name, moved in count.items() if moved) or None


def _nonzero(values: dict[str, int]) -> str | None:
    return _names({name: value for name, value in values.items() if value}) or None


def _names(values: dict[str, Any], form: str = ",", scale: float = 1) -> str:
    return ", ".join(f"{name} {scale * value:{form}}" for name, value in values.items())
