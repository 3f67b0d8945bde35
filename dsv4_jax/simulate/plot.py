"""Simulations over their time: one in detail, or several side by side."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from ..output import save_figure

__all__ = ["draw"]

_SIZE = (9.0, 7.6)  # inches; at 100 dots each
_PER_PANEL = 2  # columns of a legend
_PARTS = 40  # of the time, for means


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    """Four panels of what `simulate` prints as JSON, "title" above them.

    Raises:
        OutputError: the file cannot be written (see `output.check_picture`).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    figure.suptitle(_title(result), parse_math=False, fontsize="medium")
    panels = figure.subplots(2, 2, sharex=True)
    runs = result["runs"]
    if len(runs) == 1:
        _one(panels, runs[0])
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": _PER_PANEL}
        for axes in panels.flat:
            if axes.get_legend_handles_labels()[0]:
                axes.legend(**place, frameon=False, fontsize="small")
    else:
        _several(panels, runs)
        handles, labels = panels[0][0].get_legend_handles_labels()
        columns = max(min(110 // (max(map(len, labels)) + 8), 4), 1)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
    for axes in panels.flat:
        axes.grid(True, alpha=0.3)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("simulated minutes")
    save_figure(figure, path, dpi=100)


def _title(result: dict[str, Any]) -> str:
    runs = result["runs"]
    if len(runs) > 1:
        return result["title"]
    cache = runs[0]["cache"]
    sizes = [f"device {cache['size']['num_blocks']:,} blocks, {cache['size']['num_snapshots']:,} states"]
    if cache["host"]:
        sizes.append(f"host {cache['host']['num_pages']:,} pages")
    name = f" ({runs[0]['name']})" if runs[0]["name"] else ""
    return f"{result['title']}, {cache['policy']}, {cache['order']}{name}\n{'; '.join(sizes)}"


def _columns(run: dict[str, Any]) -> dict[str, np.ndarray]:
    columns = {name: np.array(values, float) for name, values in run["timeline"].items()}
    return columns | {"minutes": columns["seconds"] / 60}


# One run


def _one(panels: np.ndarray, run: dict[str, Any]) -> None:
    columns = _columns(run)
    minutes = columns["minutes"]
    (hits, pools), (evictions, requests) = panels
    prompt = np.maximum(columns["prompt_tokens"], 1)
    parts = {tier: 100 * columns[f"hit_{tier}_tokens"] / prompt for tier in ("device", "host")}
    parts = {f"from the {tier}": share for tier, share in parts.items() if share.any()}
    if parts:
        hits.stackplot(minutes, *parts.values(), labels=list(parts), alpha=0.8)
    best = _limits(hits, run)
    hits.set(ylabel="prompt tokens found so far, %", ylim=(0, _above(best, *parts.values())), title="Hit rate")

    for name, pool in run["pools"].items():
        if pool["total"] and pool["peak_used"]:
            used, cached = columns[f"{name}_used"], columns[f"{name}_cached"]
            (line,) = pools.plot(minutes, 100 * (used + cached) / pool["total"], "--", label=f"{name}: + cached")
            if used.any():
                pools.plot(minutes, 100 * used / pool["total"], color=line.get_color(), label=f"{name}: in use")
    pools.set(ylabel="share of the pool, %", ylim=(0, 105), title="Pool use")

    labels = {"device": "blocks, device", "host": "blocks, host", "storage": "blocks, storage", "snapshot": "states"}
    shown = {label: columns[f"evicted_{unit}"] for unit, label in labels.items() if columns[f"evicted_{unit}"].any()}
    for label, values in shown.items():
        evictions.plot(minutes, values / 1000, label=label)
    if shown:
        evictions.set(ylabel="thousand units so far", ylim=(0, None), title="Evictions")
    else:
        evictions.plot(*_waited(columns))
        evictions.set(ylabel="seconds, mean", ylim=(0, None), title="Time to the first token")

    for state in ("running", "waiting", "preempted"):
        if columns[state].any():
            requests.plot(minutes, columns[state], label=state)
    requests.set(ylabel="requests", ylim=(0, None), title="Requests")


# Several


def _several(panels: np.ndarray, runs: list[dict[str, Any]]) -> None:
    (hits, recomputed), (waits, there) = panels
    highest = 0.0
    means: list[float] = []
    for i, run in enumerate(runs):
        look: dict[str, Any] = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":", "-.")[i // 10 % 4]}
        columns = _columns(run)
        minutes, rate, waited = columns["minutes"], _rate(columns), _waited(columns)
        highest = max(highest, rate.max())
        means += waited[1].tolist()
        hits.plot(minutes, rate, label=run["name"], **look)
        recomputed.plot(minutes, columns["recomputed_tokens"] / 1e6, **look)
        waits.plot(*waited, **look)
        there.plot(minutes, columns["running"] + columns["waiting"] + columns["preempted"], **look)
    best = _limits(hits, runs[0], several=runs)
    hits.set(ylabel="prompt tokens found so far, %", ylim=(0, _above(best, np.array([highest]))), title="Hit rate")
    recomputed.set(ylabel="million tokens so far", ylim=(0, None), title="Seen before, yet computed again")
    waits.set(ylabel="seconds, mean", title="Time to the first token")
    if means and max(means) > 20 * min(means) > 0:
        waits.set_yscale("log")
    else:
        waits.set_ylim(0, None)
    there.set(ylabel="requests", ylim=(0, None), title="Running and waiting")


def _rate(columns: dict[str, np.ndarray]) -> np.ndarray:
    found = columns["hit_device_tokens"] + columns["hit_host_tokens"]
    return 100 * found / np.maximum(columns["prompt_tokens"], 1)


def _waited(columns: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean seconds to the first token of those who got it in the same part of the time, where there are any."""
    edges = np.linspace(0, columns["minutes"][-1], _PARTS + 1)
    sums = (np.interp(edges, columns["minutes"], columns[name]) for name in ("answered", "waited_seconds"))
    answered, waited = map(np.diff, sums)
    some = answered > 0
    return (edges[:-1] + edges[1:])[some] / 2, waited[some] / answered[some]


def _limits(axes: Any, run: dict[str, Any], *, several: list[dict[str, Any]] | None = None) -> float:
    """Lines at what no cache exceeds, of the whole trace. Returns the highest."""
    best = 100 * run["hits"]["highest_possible_rate"]
    axes.axhline(best, color="black", linestyle=":", label=f"endless cache: {best:.1f} %")
    bounds = {each["bound"]["clairvoyant_rate"] for each in several or [run] if each["bound"]}
    if len(bounds) == 1:
        clairvoyant = 100 * bounds.pop()
        axes.axhline(clairvoyant, color="black", linestyle="-.", label=f"clairvoyant: {clairvoyant:.1f} %")
    return best


def _above(best: float, *shares: np.ndarray) -> float:
    """The upper end of an axis of per cents that are stacked."""
    most = max([best, *np.sum(shares, axis=0).ravel()] if shares else [best])
    return min(1.15 * most, 105) or 1.0
