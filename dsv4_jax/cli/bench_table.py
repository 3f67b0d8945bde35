"""Records of `bench` as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .printing import Output

__all__ = ["print_record"]

_STEPS = {"steps": "decode step", "models": "decode step of whole layers"}  # table of a record -> title
_WIDE = 140  # a wide table in a pipe or a log is better than one cell per line
# Column of a measured op -> how its cell is made.
_TIMES: dict[str, Callable[[dict[str, Any]], str]] = {
    "us": lambda row: _number(row["us"]),
    "kernel us": lambda row: _number(row["kernel_us"]),
}
# Those that say something of real sizes only: speeds, and what the ceilings of the device allow.
_RATIOS: dict[str, Callable[[dict[str, Any]], str]] = {
    "GB/s": lambda row: f"{row['gb_per_s']:,.0f}",
    "TFLOP/s": lambda row: f"{row['tflop_per_s']:,.1f}" if row["flops"] else "",
    "floor us": lambda row: _number(row["floor_us"]),
    "of floor": lambda row: f"{row['of_floor']:.0%}",
    "required / goal / peer": lambda row: _judged(row),
}


def print_record(console: Console, record: dict[str, Any]) -> None:
    """Prints what `bench` found: the ops in one table, and a table for each step."""
    top, quick = record["ceilings"], record["quick"]
    known = (
        "tiny sizes, which show what runs and is right, not how fast it can be"
        if quick
        else f"copy {top['copy_gb_per_s']:,.0f} GB/s, bf16 matmul {top['matmul_tflop_per_s']:,.0f} TFLOP/s"
    )
    console.print(
        f"{record['device']}, jax {record['software']['jax']}: {known}", markup=False, highlight=False, soft_wrap=True
    )
    ops = [row for row in record["rows"] if row["table"] == "ops"]
    if measured := [row for row in ops if not row["problem"]]:
        wide = console if console.is_terminal or quick else Output(width=max(console.width, _WIDE))
        wide.print(_table(measured, quick))
    for reason, names in _problems(ops).items():
        said = f"not measured: {'; '.join(f'{name} ({also})' for name, also in names.items())}: {reason}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    for report in record["rows"]:
        if title := _STEPS.get(report["table"]):
            console.print(_step(report, title))


def _table(rows: list[dict[str, Any]], quick: bool) -> Table:
    cells = _TIMES if any(row["kernel_us"] is not None for row in rows) else {"us": _TIMES["us"]}
    cells = cells if quick else cells | _RATIOS
    table = Table("op / shape", "implementation")
    for name in ("batch", *cells, "error"):
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        label = f"{row['op']} {row['shape']}{', ' + row['variant'] if row['variant'] else ''}"
        if last is not None and (label, row["batch"]) != last:
            table.add_section()
        last = label, row["batch"]
        shown = (cell(row) for cell in cells.values())
        table.add_row(label, row["implementation"], str(row["batch"]), *shown, _error(row))
    return table


def _judged(row: dict[str, Any]) -> str:
    targets = [row["required_us"], row["goal_us"], row["peer_us"]]
    if not any(targets):
        return ""
    said = " / ".join(_number(us) for us in targets)
    colour = {"goal": "green", "required": "green", "missed": "red"}.get(row["verdict"], "default")
    return f"[{colour}]{said}{' ' + row['verdict'] if row['verdict'] else ''}[/]"


def _error(row: dict[str, Any]) -> str:
    error = f"{row['relative_error']:.0e}" if row["correct"] else f"[red]{row['relative_error']:.1e} wrong[/]"
    if row["batch_invariant"] is None:
        return error
    return error + (", invariant" if row["batch_invariant"] else ", [red]not invariant[/]")


def _problems(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Groups what could not be measured: reason -> implementation -> its ops."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for row in rows:
        if row["problem"]:
            found.setdefault(row["problem"], {}).setdefault(row["implementation"], {})[row["op"]] = None
    return {reason: {name: ", ".join(ops) for name, ops in names.items()} for reason, names in found.items()}


def _step(report: dict[str, Any], title: str) -> Table:
    table = Table("", "", title=title, title_justify="left", show_header=False)
    for name, value in report.items():
        if isinstance(value, dict):
            for part, number in value.items():
                shown = f"{number:,.1f}" if isinstance(number, float) else str(number)
                table.add_row(escape(f"  {name}: {part[:60]}"), escape(shown))
        elif value is not None and name != "table":
            table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else escape(str(value)))
    return table


def _number(us: float | None) -> str:
    return "-" if us is None else f"{us:,.1f}"
