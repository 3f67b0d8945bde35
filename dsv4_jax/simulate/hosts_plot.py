"""Several hosts over the rate of requests: how long the first token takes, and the others."""

from __future__ import annotations

import pathlib
from typing import Any

from ..plotting import COLOURS, figure, legend_below, model_title, plain_log, save, style

__all__ = ["draw", "picture"]

_HEIGHT = 4.2  # inches
_PANELS = (
    ("Time to the first token", "first_token", 1.0, "seconds"),
    ("Time of each further token, by request", "per_output_token", 1e3, "milliseconds"),
)


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the picture of what `simulate` prints as JSON of several hosts.

    Raises:
        OutputError: the file cannot be written (see `output.check_picture`).
    """
    save(picture(result), path)


def picture(result: dict[str, Any]) -> Any:
    """The `matplotlib.figure.Figure`: two panels, the median and the 95th percentile in each."""
    runs, model = result["runs"], result["model"]
    requests = runs[0]["requests"]
    subtitle = f"{requests['run']:,} requests, {requests['prompt_tokens']:,} prompt tokens"
    with style():
        made = figure(result["title"].replace(model, model_title(model), 1), subtitle, _HEIGHT)
        panels = made.subplots(1, 2)
        for axes, (title, name, scale, unit) in zip(panels, _PANELS, strict=True):
            drawn: list[float] = []
            for i, hosts in enumerate(dict.fromkeys(run["name"] for run in runs)):
                mine = sorted((r for r in runs if r["name"] == hosts), key=lambda run: run["requests"]["per_second"])
                rates = [run["requests"]["per_second"] for run in mine]
                for percentile, dashes in (("p50", "-"), ("p95", "--")):
                    values = [scale * run["seconds"][name][percentile] for run in mine]
                    label = f"{hosts} hosts, {'median' if percentile == 'p50' else '95 %'}"
                    axes.plot(rates, values, color=COLOURS[i], linestyle=dashes, marker="os"[i], label=label)
                    drawn += values
            axes.set(title=title, xlabel="requests a second", ylabel=unit, ylim=(0, 1.06 * max(drawn) or 1))
            if min(drawn) > 0 and max(drawn) > 20 * min(drawn):
                axes.set(yscale="log", ylim=(min(drawn) / 1.3, max(drawn) * 1.3))
                plain_log(axes.yaxis, min(drawn), max(drawn))
        legend_below(made, panels)
    return made
