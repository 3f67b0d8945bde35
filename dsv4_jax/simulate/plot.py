"""A simulation over its time: hit rate, pools, evictions, requests."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from ..output import save_figure

__all__ = ["draw"]


def draw(result: dict[str, Any], path: pathlib.Path, *, title: str) -> None:
    """Four panels of a `report`. Raises `OutputError`: the file cannot be written (see `output.check_picture`)."""
    from matplotlib.figure import Figure

    columns = {name: np.array(values, float) for name, values in result["timeline"].items()}
    seconds = columns["seconds"]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    (hits, pools), (evictions, requests) = figure.subplots(2, 2, sharex=True)

    prompt = np.maximum(columns["prompt_tokens"], 1)
    device, host = columns["hit_device_tokens"] / prompt, columns["hit_host_tokens"] / prompt
    hits.stackplot(seconds, 100 * device, 100 * host, labels=["from the device", "from the host"], alpha=0.8)
    best = 100 * result["hits"]["highest_possible_rate"]
    hits.axhline(best, color="black", linestyle=":", label=f"whole trace, endless cache: {best:.1f} %")
    hits.set(ylabel="prompt tokens found so far, %", ylim=(0, 100), title="Hit rate")

    for name, pool in result["pools"].items():
        if pool["total"]:
            (line,) = pools.plot(seconds, 100 * columns[f"{name}_used"] / pool["total"], label=f"{name}: in use")
            cached = columns[f"{name}_used"] + columns[f"{name}_cached"]
            pools.plot(seconds, 100 * cached / pool["total"], "--", color=line.get_color(), label=f"{name}: + cached")
    pools.set(ylabel="share of the pool, %", ylim=(0, 105), title="Pool use")

    for unit, label in (("device", "blocks, device"), ("host", "blocks, host"), ("snapshot", "snapshots")):
        evictions.plot(seconds, columns[f"evicted_{unit}"], label=label)
    evictions.set(ylabel="units so far", ylim=(0, None), xlabel="simulated seconds", title="Evictions")

    for state in ("running", "waiting", "preempted"):
        requests.plot(seconds, columns[state], label=state)
    requests.set(ylabel="requests", ylim=(0, None), xlabel="simulated seconds", title="Requests")

    for axes in (hits, pools, evictions, requests):
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize="small")
    save_figure(figure, path, dpi=120)
