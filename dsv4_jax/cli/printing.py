"""What commands print: a table or JSON on stdout, progress and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from ..output import open_output

__all__ = ["JsonTarget", "Output", "Progress", "columns", "facts", "human", "one_line", "present", "say", "write_json"]

JsonTarget = pathlib.Path | Literal["-"] | None  # what `--json` gives: a file, stdout, or no JSON
_FIRST_LINE, _LINES_EVERY = 2.0, 10.0  # seconds between lines of progress where there is no terminal


class Output(Console):
    """Where tables go. Made per command, so that it writes to the stdout of the moment."""

    def on_broken_pipe(self) -> None:
        """Rich would end the process here, with a status of its own."""
        raise BrokenPipeError


def present(report: dict[str, Any], to: JsonTarget, table: Callable[[Console], None]) -> None:
    """Shows what a command found: its JSON on stdout and nothing else, or its table there and the JSON in the file."""
    if to == "-":
        print(_json(report))
        return
    if to is not None:
        write_json(report, to)
    table(Output())


def write_json(report: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the file, whole or not at all. Raises `FileError`."""
    with open_output(path, encoding="utf-8") as file:
        file.write(_json(report) + "\n")


def say(line: str) -> None:
    """A line on stderr. If nobody reads it the command goes on, and its status says what happened."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def one_line(message: object, longest: int = 600) -> str:
    """A message fit for one line of a terminal: no control characters, and of a bounded length."""
    text = " ".join(str(message).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def human(count: float) -> str:
    """Spells a number of bytes in IEC units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"


def facts(title: str | None, *sections: Mapping[str, str | None]) -> Table:
    """A table of names and values, in sections. A value of None leaves its row out; values may have rich's markup."""
    title = None if title is None else escape(title)
    table = Table("", "", title=title, title_justify="left", show_header=False)
    for section in sections:
        for name, value in section.items():
            if value is not None:
                table.add_row(name, value)
        table.add_section()
    return table


def columns(
    title: str, names: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[str] = (), every: int = 0
) -> Table:
    """A table of a line for each run, named in its first column: numbers, and words that are folded and never cut.

    Args:
        names: of the columns after the first.
        rows: the cells.
        words: those of `names` whose cells are words.
        every: a line is drawn below each so many rows; 0: nowhere.
    """
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("", overflow="fold", min_width=8)
    for name in names:
        if name in words:
            table.add_column(name, overflow="fold", min_width=6)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for count, row in enumerate(rows, 1):
        table.add_row(*map(escape, row), end_section=every > 0 and count % every == 0)
    return table


def _json(report: dict[str, Any]) -> str:
    return json.dumps(_finite(report), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """How far a command is, on stderr: a bar on a terminal, removed when done; elsewhere, as in a log, lines.

    Lines come by the clock, the first after two seconds: a command that is quick says nothing, one that compiles for a
    minute says where it is.

    Args:
        what: what is being done.
        total: how many of it there are; None: not known yet.
    """

    def __init__(self, what: str, total: int | None = None):
        self._what, self._done, self._total = what, 0, total
        self._start = time.monotonic()
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total)
        self._over = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, daemon=True) if self._bar.disable else None

    def __enter__(self) -> Self:
        self._bar.start()
        if self._lines:
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Says nothing more: what follows is printed in its place."""
        self._over.set()
        if self._lines:
            self._lines.join()
        self._bar.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Takes the bar away while something else is printed."""
        self._bar.stop()
        yield
        self._bar.start()

    def advance(self, count: int = 1) -> None:
        self.update(done=self._done + count)

    def update(self, what: str | None = None, *, done: int | None = None, total: int | None = None) -> None:
        """Changes what is given: what is being done, how much of it is done, and of how much."""
        self._what = self._what if what is None else what
        self._done = self._done if done is None else done
        self._total = self._total if total is None else total
        self._bar.update(self._task, description=self._what, completed=self._done, total=self._total)

    def _print_lines(self) -> None:
        wait = _FIRST_LINE
        while not self._over.wait(wait):
            of = "" if self._total is None else f": {self._done:,} of {self._total:,}"
            say(one_line(f"{self._what}{of}, {time.monotonic() - self._start:.0f} s"))
            wait = _LINES_EVERY
