"""What holds of every picture, asked of the figure before it is a file."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from dsv4_jax import plotting

__all__ = ["check", "labels", "words"]

_SMALLEST = 8.0  # points: 11 pixels where the picture is 900 wide


def words(figure: Figure) -> list[str]:
    """All text that is shown, in no particular order."""
    return [text.get_text() for text, _ in _texts(figure)]


def labels(figure: Figure) -> list[str]:
    """What the legends name."""
    return [text.get_text() for legend in _legends(figure) for text in legend.get_texts()]


def check(figure: Figure) -> None:
    """Raises `AssertionError`: text overlaps, is cut off or too small, a legend is on the data, a series is empty."""
    assert figure.get_figwidth() == plotting.WIDTH
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    edge = Bbox.from_bounds(0, 0, *figure.bbox.size)
    shown = _texts(figure)
    for text, box in shown:
        assert text.get_fontsize() >= _SMALLEST, text
        assert min(box.x0, box.y0) >= -1 and box.x1 <= edge.x1 + 1 and box.y1 <= edge.y1 + 1, f"{text} is cut off"
        assert not any(mark in text.get_text() for mark in ("$", "10^", "{")), text
    for (one, box), (other, its_box) in itertools.combinations(shown, 2):
        assert not _overlap(box, its_box), f"{one} lies on {other}"
    for legend in _legends(figure):
        box = legend.get_window_extent(renderer)
        assert edge.x1 + 1 >= box.x1, f"{legend.get_texts()} is wider than the picture"
        for axes in figure.axes:
            assert not _overlap(box, axes.get_window_extent()), f"a legend lies on {axes}"
    for axes in figure.axes:
        assert axes.lines or axes.patches or axes.collections, f"{axes} is empty"
        assert not axes.get_title(), "titles are at the left"
        for line in axes.lines:
            assert len(line.get_xdata()) and np.isfinite(np.asarray(line.get_ydata(), float)).all(), line
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if isinstance(handle, LineCollection):
                assert len(handle.get_segments()), label


def _texts(figure: Figure) -> list[tuple[Text, Any]]:
    """Every piece of text that is there and seen, with the pixels it covers."""
    figure.draw_without_rendering()
    found = []
    for text in figure.findobj(Text):
        box = text.get_window_extent() if text.get_text().strip() and text.get_visible() else None
        if box is not None and box.width > 0 and _inside(text, figure, box):
            found.append((text, box))
    return found


def _inside(text: Text, figure: Figure, box: Any) -> bool:
    """Whether it is drawn: matplotlib keeps labels of ticks beyond an axis, and of axes that others share."""
    for axes in figure.axes:
        for axis, low, high in ((axes.xaxis, box.x0, box.x1), (axes.yaxis, box.y0, box.y1)):
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            if any(text in (tick.label1, tick.label2) for tick in ticks):
                view = axes.get_window_extent()
                first, last = (view.x0, view.x1) if axis is axes.xaxis else (view.y0, view.y1)
                return first - 1 <= (low + high) / 2 <= last + 1
    return True


def _legends(figure: Figure) -> list[Any]:
    return [legend for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes)] if legend]


def _overlap(one: Any, other: Any) -> bool:
    """By more than the pixel that rounding takes."""
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return wide > 1.5 and high > 1.5
