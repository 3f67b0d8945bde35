"""The picture of a benchmark: a roofline of the ops that multiply, and every op's best time beside its floor."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import OptionError
from ..plotting import COLOURS, LIMIT, MUTED, bare, figure, legends_above, look, plain_log, save, style, tick
from .records import Measurement
from .timing import Ceilings

__all__ = ["draw", "picture"]

_ROW, _ROOFLINE = 0.21, 3.9  # inches
_MAX_ROWS = 300  # a PNG has at most 2^16 pixels


class _Timed(NamedTuple):
    record: Measurement
    us: float

    @property
    def shape(self) -> str:
        r = self.record
        return f"{r.op} {r.shape}{f' {r.variant}' if r.variant else ''}, {r.batch:,}"


def draw(records: Sequence[Measurement], ceilings: Ceilings | None, path: pathlib.Path, *, device: str) -> None:
    """Writes the picture of a run, in the format that the path's name says.

    Raises:
        OptionError: nothing was timed.
        FileError: the file cannot be written (see `output.check_picture`).
    """
    save(picture(records, ceilings, device=device), path)


def picture(records: Sequence[Measurement], ceilings: Ceilings | None, *, device: str) -> Any:
    """Draws a run as a `matplotlib.figure.Figure`.

    Args:
        ceilings: None of a quick run: its sizes say nothing of them, so times alone are drawn.

    Raises:
        OptionError: nothing was timed.
    """
    timed = [_Timed(r, r.best_us) for r in records if r.best_us is not None]
    if not timed:
        raise OptionError("--plot: nothing was measured")
    with style():
        floors = [each for each in timed if each.record.floor_us]
        if ceilings and floors:
            return _against_ceilings(floors, ceilings, device)
        return _times(timed, device, quick=ceilings is None)


def _against_ceilings(timed: list[_Timed], ceilings: Ceilings, device: str) -> Any:
    fastest: dict[str, _Timed] = {}
    for each in sorted(timed, key=lambda each: -each.us):
        fastest[each.shape] = each
    rows = [each for shape, each in sorted(fastest.items(), key=_order)][:_MAX_ROWS]
    multiplying = [each for each in timed if each.record.flops and each.record.bytes]
    heights = [_ROOFLINE] * bool(multiplying) + [_ROW * len(rows) + 0.9]
    what = _ops(timed)
    detail = f"{device}; copy {ceilings.copy / 1e9:,.0f} GB/s, bf16 matmul {ceilings.matmul / 1e12:,.0f} TFLOP/s"
    made = figure(f"{what} against what the device can do", detail, sum(heights) + 0.7)
    panels = made.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    if multiplying:
        _roofline(panels[0], multiplying, ceilings)
    _floors(panels[-1], rows)
    return made


def _ops(timed: list[_Timed]) -> str:
    names = list(dict.fromkeys(each.record.op for each in timed))
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} ops"


def _order(item: tuple[str, _Timed]) -> tuple[str, str, int]:
    record = item[1].record
    return record.op, record.shape, record.batch


def _colours(timed: list[_Timed]) -> dict[str, str]:
    names = sorted({each.record.implementation for each in timed})
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def _floors(axes: Any, rows: list[_Timed]) -> None:
    colours = _colours(rows)
    shares = [100 * (each.record.floor_us or 0) / each.us for each in rows]
    for name, colour in colours.items():
        mine = [i for i, each in enumerate(rows) if each.record.implementation == name]
        axes.barh(mine, [shares[i] for i in mine], height=0.66, color=colour, label=name)
    for i, (each, share) in enumerate(zip(rows, shares, strict=True)):
        axes.annotate(
            f"{share:.{1 if share < 9.95 else 0}f} %  {each.us:,.1f} us",
            (share, i),
            (4, 0),
            va="center",
            textcoords="offset points",
            fontsize=8.5,
            color=MUTED,
            bbox={"facecolor": "white", "lw": 0, "pad": 0.8},
        )
    axes.axvline(100, color=LIMIT, linewidth=1)
    axes.set_yticks(range(len(rows)), [each.shape for each in rows])
    longest = max(100, *shares)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.25 * longest), xlabel="floor / time, %")
    tick(axes.xaxis, range(0, int(longest) + 1, 20))
    axes.set_title("Fastest implementation by op, shape and batch: share of its floor, and time")
    bare(axes)
    legends_above([axes], 600)


def _roofline(axes: Any, timed: list[_Timed], ceilings: Ceilings) -> None:
    ridge = ceilings.matmul / ceilings.copy
    groups: dict[str, list[tuple[float, float]]] = {}  # (FLOPs per byte, TFLOP/s)
    for r, us in timed:
        assert r.flops and r.bytes
        groups.setdefault(f"{r.op}, {r.implementation}", []).append((r.flops / r.bytes, r.flops / us / 1e6))
    points = [point for group in groups.values() for point in group]
    low, high = min(*(x for x, _ in points), ridge) / 2, max(*(x for x, _ in points), ridge) * 3
    top = ceilings.matmul / 1e12
    axes.plot([low, ridge, high], [low * ceilings.copy / 1e12, top, top], color=LIMIT, linewidth=1.2)
    for i, (name, group) in enumerate(groups.items()):
        axes.plot(*zip(*group, strict=True), **{**look(i, markers=True), "linestyle": ""}, label=name, alpha=0.85)
    lowest = min(y for _, y in points)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(lowest / 1.6, max(top, *(y for _, y in points)) * 1.6),
        xlabel="FLOPs per byte",
        ylabel="TFLOP/s",
        title="Roofline: the line is what the device can do",
    )
    plain_log(axes.xaxis, low, high)
    plain_log(axes.yaxis, lowest / 1.6, top * 1.6)
    legends_above([axes], 640)


def _times(timed: list[_Timed], device: str, *, quick: bool) -> Any:
    """Draws times alone: of ops without floors, or at sizes that say nothing of ceilings."""
    shapes = sorted({each.shape: each for each in timed}.items(), key=_order)[:_MAX_ROWS]
    place = {shape: i for i, (shape, _) in enumerate(shapes)}
    detail = f"{device}; sizes this small say nothing of what the device can do" if quick else device
    made = figure(f"{_ops(timed)}: times{' at tiny sizes' if quick else ''}", detail, _ROW * len(place) + 1.7)
    axes = made.subplots()
    names = list(dict.fromkeys(each.record.implementation for each in timed))
    for i, name in enumerate(names):
        mine = [each for each in timed if each.record.implementation == name and each.shape in place]
        marker = {**look(i, markers=True), "linestyle": ""}
        axes.plot([each.us for each in mine], [place[each.shape] for each in mine], **marker, label=name)
    axes.set_yticks(range(len(place)), list(place))
    low, high = min(each.us for each in timed), max(each.us for each in timed)
    axes.set(ylim=(len(place) - 0.4, -0.6), xscale="log", xlim=(low / 1.3, high * 1.3), xlabel="us")
    axes.set_title("A call, by op, shape and batch")
    plain_log(axes.xaxis, low, high)
    legends_above([axes], 600)
    return made
