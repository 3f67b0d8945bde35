"""Simulations as pictures: one over its time in detail, several side by side, and several hosts over their rate."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..plotting import COLOURS, LIMIT, figure, legend_below, legends_above, look, model_title, plain_log, style, whole

__all__ = ["hosts_picture", "picture"]

_DASHED = (0, (4, 1.5))
_PARTS = 48  # of the time, for means
_TIERS = {"device": COLOURS[0], "host": COLOURS[4]}
_UNITS = {"device": "device blocks", "host": "host blocks", "snapshot": "states", "storage": "storage blocks"}
_POOLS = {"device": ("device", COLOURS[0]), "host": ("host", COLOURS[4]), "slot": ("slots", COLOURS[2])}


def picture(result: dict[str, Any]) -> Any:
    """Draws what `simulate` prints as JSON of one host.

    Returns:
        The `matplotlib.figure.Figure`: four panels. Shares go from 0 to 100 %, so that pictures can be compared.
    """
    runs, model = result["runs"], result["model"]
    with style():
        made = figure(result["title"].replace(model, model_title(model), 1), _subtitle(result), 7.4)
        panels = made.subplots(2, 2, sharex=True)
        if len(runs) == 1:
            _one(panels, runs[0])
            for row in panels:
                legends_above(row, 420)
        else:
            _several(panels, runs)
            legend_below(made, panels.flat)
        for axes in panels[1]:
            axes.set_xlabel("simulated minutes")
        for axes in panels.flat:
            axes.set_xlim(0, max(_columns(run)["minutes"][-1] for run in runs))
    return made


def _subtitle(result: dict[str, Any]) -> str:
    runs = result["runs"]
    if len(runs) > 1:
        return f"{len(runs)} servers, the same {runs[0]['requests']['run']:,} requests"
    (run,) = runs
    cache, size = run["cache"], run["cache"]["size"]
    parts = [f"device: {size['num_blocks']:,} blocks, {size['num_snapshots']:,} states"]
    if cache["host"]:
        parts.append(f"host: {cache['host']['num_pages']:,} pages")
    name = f"{run['name']}: " if run["name"] else ""
    served = f"{name}{cache['policy']}, {cache['order']}; {cache['kv_format']} rows, {cache['index_format']} index keys"
    return f"{served}\n{'; '.join(parts)}"


def _columns(run: dict[str, Any]) -> dict[str, np.ndarray]:
    columns = {name: np.array(values, float) for name, values in run["timeline"].items()}
    return columns | {"minutes": columns["seconds"] / 60}


# One run


def _one(panels: np.ndarray, run: dict[str, Any]) -> None:
    columns = _columns(run)
    minutes = columns["minutes"]
    (hits, pools), (evictions, requests) = panels
    prompt = np.maximum(columns["prompt_tokens"], 1)
    parts = {tier: 100 * columns[f"hit_{tier}_tokens"] / prompt for tier in _TIERS if f"hit_{tier}_tokens" in columns}
    parts = {tier: share for tier, share in parts.items() if share.any()}
    if parts:
        colours = [_TIERS[tier] for tier in parts]
        hits.stackplot(minutes, *parts.values(), labels=list(parts), colors=colours)
    _limits(hits, [run])
    hits.set(ylabel="prompt tokens found so far, %", ylim=(0, 100), title="Hit rate")

    for name, (label, colour) in _POOLS.items():
        pool = run["pools"].get(name)
        if pool and pool["total"] and pool["peak_used"]:
            used = 100 * columns[f"{name}_used"] / pool["total"]
            all_of_it = used + 100 * columns[f"{name}_cached"] / pool["total"]
            pools.plot(*_means(minutes, all_of_it), color=colour, linestyle=_DASHED, label="" if used.any() else label)
            if used.any():
                pools.plot(*_means(minutes, used), color=colour, label=label)
    pools.set(ylabel="share, %", ylim=(0, 102), title="Pools in use; dashed: and kept for hits")

    shown = {label: columns[f"evicted_{unit}"] for unit, label in _UNITS.items() if columns[f"evicted_{unit}"].any()}
    for i, (label, values) in enumerate(shown.items()):
        evictions.plot(minutes, values, label=label, **look(i))
    if shown:
        evictions.set(ylabel="so far", ylim=(0, None), title="Evicted")
        whole(evictions.yaxis)
    else:
        evictions.plot(*_waited(columns), color=COLOURS[0])
        evictions.set(ylabel="seconds, mean", ylim=(0, None), title="Time to the first token (nothing was evicted)")

    for i, state in enumerate(("running", "waiting", "preempted")):
        if columns[state].any():
            _band(requests, minutes, columns[state], i)
            requests.plot(*_means(minutes, columns[state]), label=state, **look(i))
    requests.set(ylabel="mean; pale: least and most", ylim=(0, None), title="Requests")
    whole(requests.yaxis)


def _band(axes: Any, minutes: np.ndarray, values: np.ndarray, i: int) -> None:
    edges = _edges(minutes)
    part = np.clip(np.searchsorted(edges, minutes, side="right") - 1, 0, _PARTS - 1)
    middle = (edges[:-1] + edges[1:]) / 2
    there = np.unique(part)
    low, high = ([pick(values[part == each]) for each in there] for pick in (np.min, np.max))
    axes.fill_between(middle[there], low, high, color=COLOURS[i], alpha=0.15, linewidth=0)


# Several


def _several(panels: np.ndarray, runs: list[dict[str, Any]]) -> None:
    (hits, recomputed), (waits, there) = panels
    means: list[float] = []
    for i, run in enumerate(runs):
        # Thinner from one to the next: where curves are the same, all of them can be seen.
        line: dict[str, Any] = {**look(i), "linewidth": min(1.3 + 0.5 * (len(runs) - 1 - i), 3)}
        columns = _columns(run)
        minutes, rate, waited = columns["minutes"], _rate(columns), _waited(columns)
        means += waited[1].tolist()
        hits.plot(minutes, rate, label=f"{run['name']}: {rate[-1]:.1f} %", **line)
        recomputed.plot(minutes, columns["recomputed_tokens"] / 1e6, **line)
        waits.plot(*waited, **line)
        there.plot(*_means(minutes, columns["running"] + columns["waiting"] + columns["preempted"]), **line)
    _limits(hits, runs)
    hits.set(ylabel="prompt tokens found so far, %", ylim=(0, 100), title="Hit rate")
    recomputed.set(ylabel="million tokens so far", ylim=(0, None), title="Seen before, yet computed again")
    waits.set(ylabel="seconds, mean", ylim=(0, None), title="Time to the first token")
    if means:
        _log_if_wide(waits, means)
    there.set(ylabel="requests, mean", ylim=(0, None), title="Running and waiting")
    whole(there.yaxis)


# Of both


def _rate(columns: dict[str, np.ndarray]) -> np.ndarray:
    found = columns["hit_device_tokens"] + columns["hit_host_tokens"]
    return 100 * found / np.maximum(columns["prompt_tokens"], 1)


def _edges(minutes: np.ndarray) -> np.ndarray:
    return np.linspace(0, minutes[-1], _PARTS + 1)


def _means(minutes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(middles, means) of equal parts of the time; a value holds until the next."""
    areas = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(minutes))])
    edges = _edges(minutes)
    return (edges[:-1] + edges[1:]) / 2, np.diff(np.interp(edges, minutes, areas)) / np.diff(edges)


def _waited(columns: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean seconds to the first token of those who got it in the same part of the time, where there are any."""
    edges = _edges(columns["minutes"])
    sums = (np.interp(edges, columns["minutes"], columns[name]) for name in ("answered", "waited_seconds"))
    answered, waited = map(np.diff, sums)
    some = answered > 0
    return (edges[:-1] + edges[1:])[some] / 2, waited[some] / answered[some]


def _limits(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Lines at what no cache exceeds, of the whole trace; one line where a clairvoyant cache of this size finds all."""
    best = 100 * runs[0]["hits"]["highest_possible_rate"]
    bounds = {100 * each["bound"]["clairvoyant_rate"] for each in runs if each["bound"]}
    named = "endless"
    if len(bounds) == 1:
        clairvoyant = bounds.pop()
        if f"{clairvoyant:.1f}" == f"{best:.1f}":
            named = "endless or clairvoyant"
        else:
            axes.axhline(
                clairvoyant, color=LIMIT, linestyle="-.", linewidth=1.2, label=f"clairvoyant: {clairvoyant:.1f} %"
            )
    axes.axhline(best, color=LIMIT, linestyle=":", linewidth=1.2, label=f"{named} cache: {best:.1f} %")


def _log_if_wide(axes: Any, values: list[float]) -> None:
    """Makes the vertical axis logarithmic if the values reach over more than a factor of 20."""
    if max(values) > 20 * min(values) > 0:
        axes.set(yscale="log", ylim=(min(values) / 1.3, max(values) * 1.3))
        plain_log(axes.yaxis, min(values), max(values))


# Several hosts

_PANELS = (
    ("Time to the first token", "first_token", 1.0, "seconds"),
    ("Time of each further token, by request", "per_output_token", 1e3, "milliseconds"),
)


def hosts_picture(result: dict[str, Any]) -> Any:
    """Draws what `simulate` prints as JSON of several hosts, over the rate at which they serve requests.

    Returns:
        The `matplotlib.figure.Figure`: two panels, the median and the 95th percentile in each. A line goes from speed
        to speed of the trace: where hosts cannot serve more, it goes straight up.
    """
    runs, model = result["runs"], result["model"]
    requests = runs[0]["requests"]
    subtitle = f"{requests['run']:,} requests, {requests['prompt_tokens']:,} prompt tokens"
    with style():
        made = figure(result["title"].replace(model, model_title(model), 1), subtitle, 4.2)
        panels = made.subplots(1, 2)
        for axes, (title, name, scale, unit) in zip(panels, _PANELS, strict=True):
            sampled: list[float] = []
            for i, hosts in enumerate(dict.fromkeys(run["name"] for run in runs)):
                mine = sorted((run for run in runs if run["name"] == hosts), key=lambda run: run["speed"])
                rates = [run["per_second"]["requests"] for run in mine]
                for percentile, dashes, label in (("p50", "-", "median"), ("p95", "--", "95 %")):
                    values = [scale * run["seconds"][name][percentile] for run in mine]
                    line = {"color": COLOURS[i], "linestyle": dashes, "marker": "os"[i]}
                    axes.plot(rates, values, label=f"{hosts} hosts, {label}", **line)
                    sampled += values
            axes.set(title=title, xlabel="requests served a second", ylabel=unit, ylim=(0, 1.06 * max(sampled) or 1))
            _log_if_wide(axes, sampled)
        legend_below(made, panels)
    return made
