"""The picture of the demo: equal to a forward without a cache, and what a smaller cache changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..plotting import COLOURS, LIMIT, MUTED, bare, figure, legends_above, look, plain_log, style, tick

__all__ = ["picture"]

_BIN = 16  # tokens, of a mean


def picture(report: dict[str, Any], differences: Sequence[np.ndarray], divergences: Sequence[np.ndarray]) -> Any:
    """Draws what the demo has found, as a `matplotlib.figure.Figure`.

    Args:
        report: what `demo` prints as JSON.
        differences: the largest logit difference of each token, by request.
        divergences: of each token's prediction through the quantised cache, in nats, by request.
    """
    quantised = report["quantised"]
    formats = f"{quantised['kv_format']} rows, {quantised['index_format']} index keys"
    model = "Tiny random model" if report["random"] else report["model"]
    below = max(1.9, 0.22 * len(quantised["layers"]))  # inches
    with style():
        sizes = f"{report['tokens']:,} tokens of {len(report['requests'])} requests"
        made = figure(f"{model}: {report['verdict']}", f"{sizes}. Above: float32. Below: {formats}.", 4.5 + below)
        rooms = [["equal"] * 3, ["output", "entries", "predictions"]]
        panels = made.subplot_mosaic(rooms, height_ratios=(2.4, below))
        _equal(panels["equal"], report, differences)
        _layers(panels["output"], quantised["layers"], "output_error", "Attention output differs")
        picking = [layer for layer in quantised["layers"] if layer["same_entries"] is not None]
        if picking:
            _layers(panels["entries"], picking, "same_entries", "Same entries picked")
        else:
            made.delaxes(panels["entries"])
        _predictions(panels["predictions"], quantised, divergences)
        legends_above([panels["equal"]], 780)
        legends_above([panels[name] for name in ("output", "entries", "predictions") if panels[name].figure], 250)
    return made


def _equal(axes: Any, report: dict[str, Any], differences: Sequence[np.ndarray]) -> None:
    tolerance = report["tolerance"]
    axes.axhline(tolerance, color=LIMIT, linestyle=":", linewidth=1.2, label=f"allowed: {tolerance:.0e}")
    least = tolerance
    for i, (request, difference) in enumerate(zip(report["requests"], differences, strict=True)):
        so_far = np.maximum(np.maximum.accumulate(difference), tolerance * 1e-6)  # zero has no place on this axis
        least = min(least, so_far[0])
        prompt = request["prompt_tokens"]
        label = f"request {i + 1}: {prompt} + {request['new_tokens']} tokens"
        axes.plot(np.arange(len(so_far)), so_far, **look(i), label=label)
        axes.plot(prompt, so_far[min(prompt, len(so_far) - 1)], "o", color=look(i)["color"])
    most = max(tolerance, *(difference.max() for difference in differences))
    axes.set(
        yscale="log",
        ylim=(least / 2, most * 2),
        xlim=(0, max(map(len, differences))),
        ylabel="largest so far",
        xlabel="token; from the dot on, one at a time",
        title="Difference from the logits of a forward without a cache",
    )
    plain_log(axes.yaxis, least, most)


def _layers(axes: Any, layers: Sequence[dict[str, Any]], what: str, title: str) -> None:
    shares = [100 * layer[what] for layer in layers]
    axes.barh(range(len(layers)), shares, height=0.6, color=COLOURS[0])
    for i, share in enumerate(shares):
        axes.annotate(
            f"{share:.1f} %" if share < 9.95 else f"{share:.0f} %",
            (share, i),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=MUTED,
        )
    tick(axes.yaxis, range(len(layers)), lambda i: f"{layers[i]['layer']} {layers[i]['attention']}")
    axes.set(ylim=(len(layers) - 0.4, -0.6), xlim=(0, max(*shares, 1e-9) * 1.35), title=title, xlabel="%")
    bare(axes)


def _predictions(axes: Any, quantised: dict[str, Any], divergences: Sequence[np.ndarray]) -> None:
    neighbours, longest = quantised["kl_nats_between_neighbours"], max(map(len, divergences))
    parts = [np.concatenate([kl[at : at + _BIN] for kl in divergences]) for at in range(0, longest, _BIN)]
    means = np.maximum([part.mean() for part in parts], 1e-9)
    axes.axhline(neighbours, color=LIMIT, linestyle=":", linewidth=1.2, label="neighbouring tokens")
    axes.plot(_BIN * (np.arange(len(means)) + 0.5), means, color=COLOURS[1], label=f"mean {quantised['kl_nats']:.4f}")
    low, high = means.min(), max(neighbours, means.max())
    axes.set(yscale="log", ylim=(low / 2, high * 2), xlabel="token", ylabel="nats", title="Predictions (KL)")
    axes.set_xlim(0, longest)
    plain_log(axes.yaxis, low, high)
