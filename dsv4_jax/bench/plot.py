"""The picture of a benchmark: a roofline of the ops that multiply, and how near its floor every op is."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from ..errors import BenchmarkError
from ..output import save_figure
from .ceilings import Ceilings
from .records import Measurement

__all__ = ["draw"]


def draw(records: Sequence[Measurement], ceilings: Ceilings, path: pathlib.Path, *, title: str) -> None:
    """Writes a picture, in the format that the path's name says.

    Raises:
        BenchmarkError: nothing was timed.
        OutputError: the file cannot be written (see `output.check_picture`).
    """
    from matplotlib.figure import Figure

    timed = [(r, r.best_us) for r in records if r.best_us is not None]
    if not timed:
        raise BenchmarkError("--plot: nothing was measured")
    fastest: dict[tuple[str, str, int], tuple[Measurement, float]] = {}
    for record, us in sorted(timed, key=lambda pair: -pair[1]):
        fastest[record.op, record.shape, record.batch] = record, us
    shown = [fastest[key] for key in sorted(fastest)]
    height = min(max(5, 0.2 * len(shown) + 1.5), 400)  # matplotlib draws at most 2^16 pixels
    figure = Figure(figsize=(14, height), layout="constrained")
    figure.suptitle(title, parse_math=False)
    roof, bars = figure.subplots(1, 2)
    _roofline(roof, timed, ceilings)
    names = [f"{r.op}/{r.shape} {r.batch} {r.implementation}" for r, _ in shown]
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(r.implementation for r, _ in shown))}
    bars.set_ylim(-0.6, len(shown) - 0.4)
    bars.barh(
        names, [100 * (r.floor_us or 0) / us for r, us in shown], color=[colours[r.implementation] for r, _ in shown]
    )
    bars.axvline(100, color="black", linewidth=1)
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=6)
    bars.set(xlabel="floor / time, %", title="the fastest implementation against its floor")
    save_figure(figure, path, dpi=150)


def _roofline(axes, timed: Sequence[tuple[Measurement, float]], ceilings: Ceilings) -> None:
    ridge = ceilings.matmul / ceilings.copy
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}  # (FLOPs per byte, TFLOP/s)
    for r, us in timed:
        if r.flops and r.bytes:
            groups.setdefault((r.op, r.implementation), []).append((r.flops / r.bytes, r.flops / us / 1e6))
    intensities = [x for group in groups.values() for x, _ in group] or [ridge]
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 4
    axes.plot(
        [low, ridge, high], [low * ceilings.copy / 1e12, ceilings.matmul / 1e12, ceilings.matmul / 1e12], "k-",
        label=f"{ceilings.copy / 1e9:,.0f} GB/s, {ceilings.matmul / 1e12:,.1f} TFLOP/s",
    )  # fmt: skip
    for (op, implementation), group in groups.items():
        axes.plot(*zip(*group, strict=True), "o", markersize=4, label=f"{op}, {implementation}")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s", title="roofline")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
