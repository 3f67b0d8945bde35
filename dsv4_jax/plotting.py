"""How all pictures look: size, colours, ticks, legends. matplotlib is imported when one is drawn.

A picture is 900 pixels wide where it is shown (a PNG has twice that), and no text in it is smaller than 11 of them.
Series differ in colour and in dashes or markers, so that they can be told apart without colours.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .output import open_output

__all__ = [
    "COLOURS",
    "LIMIT",
    "MUTED",
    "WIDTH",
    "bare",
    "binary",
    "figure",
    "legend_below",
    "legends_above",
    "look",
    "model_title",
    "plain_log",
    "save",
    "style",
    "tick",
    "token_ticks",
    "whole",
]

WIDTH = 9.0  # inches, of 100 pixels
# Okabe and Ito's colours, which people with any colour vision can tell apart; without yellow, which is too pale here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LIMIT, INK, MUTED, _GRID = "#1d2733", "#1d2733", "#5b6b7d", "#e3e8ee"
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_MARKERS = "osD^vPX"
_DPI = 200
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.visible": False,
    "ytick.minor.visible": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "legend.columnspacing": 1.4,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "dsv4_jax",
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """What is drawn meanwhile looks as all pictures do."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def figure(title: str, subtitle: str, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure`, `height` inches high, under a title and a line (or lines) of
    detail."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    lines = subtitle.count("\n") + 1 if subtitle else 0
    head = (0.42 + 0.17 * lines) / height
    layout = ConstrainedLayoutEngine(rect=(0.008, 0, 0.984, 1 - head), w_pad=0.06, h_pad=0.06, hspace=0.06, wspace=0.05)
    made = Figure(figsize=(WIDTH, height), layout=layout)
    title = _short(title.replace(".00 ", " "), 80)
    subtitle = "\n".join(_short(line, 130) for line in subtitle.split("\n"))
    made.text(0.012, 1 - 0.1 / height, title, size=13, weight="bold", va="top", parse_math=False)
    made.text(0.012, 1 - 0.36 / height, subtitle, size=9, color=MUTED, va="top", parse_math=False)
    return made


def model_title(name: str) -> str:
    """Returns what a title calls a model: V4-Flash for `flash`; a path as it is."""
    return {"flash": "V4-Flash", "pro": "V4-Pro", "tiny": "Tiny model"}.get(name, name)


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]}...{text[3 - longest // 2 :]}"


def save(made: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format that the name says. Raises `FileError`."""
    kind = pathlib.Path(path).suffix[1:].lower()
    with style(), open_output(path) as file:
        made.savefig(file, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)


# Series


def look(i: int, *, markers: bool = False) -> dict[str, Any]:
    """Returns how the i-th series looks: its colour, and dashes or a marker that another with this colour has not."""
    again = i + i // len(COLOURS)
    made: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": _DASHES[again % len(_DASHES)]}
    return made | ({"marker": _MARKERS[again % len(_MARKERS)]} if markers else {})


# Ticks


def binary(count: int) -> str:
    """Tokens as people say them: 512, 1K, 128K, 1M (2^10 and 2^20), and 100,000 in full."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size:,}{unit}"
    return f"{count:,}"


def token_ticks(axis: Any, values: Sequence[int], high: int = 9) -> None:
    """A logarithmic axis of tokens, ticked at powers of two among these values (the last always)."""
    step = -(-len(values) // high)
    tick(axis, sorted(values)[::-1][::step], binary)


def plain_log(axis: Any, low: float, high: float) -> None:
    """Makes an axis logarithmic with its numbers written out: 0.1, 1, 10, 1,000; between them 2 and 5 where there is
    room."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, -(-(last - first) // 8))
    values = [10.0**power for power in range(first, last + 1, step)]
    if high < 300 * low:
        values = [value * part for value in values for part in (1, 2, 5) if low <= value * part <= high] or values
    tick(axis, values, _plain)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}" if value > 9e-4 else f"{value:.0e}"


def tick(axis: Any, values: Sequence[Any], text: Callable[[Any], str] = "{:,}".format) -> None:
    """Puts ticks at these values and nowhere else."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FixedFormatter([text(value) for value in values]))
    axis.set_minor_locator(NullLocator())


def whole(axis: Any) -> None:
    """Puts ticks at integers: of what is counted."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def bare(axes: Any) -> None:
    """Takes from horizontal bars the lines between rows and the left edge."""
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


# Legends, which never lie on the data


def legends_above(row: Sequence[Any], room: int) -> None:
    """Puts legends between panels side by side and their titles, `room` pixels wide; the titles stay level."""
    lines = {axes: _columns(axes.get_legend_handles_labels()[1], room) for axes in row}
    rows = max(math.ceil(len(axes.get_legend_handles_labels()[1]) / lines[axes]) for axes in row)
    for axes, columns in lines.items():
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            made = axes.legend(
                handles,
                labels,
                loc="lower left",
                bbox_to_anchor=(0, 1),
                ncols=columns,
                borderaxespad=0.2,
                borderpad=0.1,
                labelspacing=0.3,
            )
            made.set_in_layout(False)  # else a wide one would make its panel narrow; the title leaves it room
        axes.set_title(axes.get_title(loc="left"), pad=7 + 14 * rows)


def _columns(labels: Sequence[str], room: int) -> int:
    """The most columns that are no wider than `room` pixels, as matplotlib fills them. At least one."""
    for columns in range(len(labels), 1, -1):
        least, longer = divmod(len(labels), columns)
        ends = [i * least + min(i, longer) for i in range(columns + 1)]
        if sum(60 + 6.5 * max(map(len, labels[a:b])) for a, b in itertools.pairwise(ends)) <= room:
            return columns
    return 1


def legend_below(made: Any, axes: Sequence[Any]) -> None:
    """One for all panels, each label once, in as many columns as fit."""
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        made.legend(found.values(), found.keys(), loc="outside lower left", ncols=_columns(list(found), 880))
