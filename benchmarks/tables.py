"""Tables of the pages of results, as Markdown: columns of rows' fields, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["Row", "columns_of", "context", "number", "percent", "table_of"]

Row: TypeAlias = Mapping[str, Any]


def columns_of(rows: Iterable[Row], columns: str, made: Mapping[str, Callable[[Any], str]]) -> str:
    """Writes a line for each row.

    Args:
        columns: "heading = field | heading = field:format | heading = @name": a format of `FORMATS` or of Python, or
            what `made[name]` makes of the row. Where a row has no such field nothing stands.
    """
    pairs = [column.partition("= ") for column in columns.split(" | ")]

    def cell(row: Row, source: str) -> str:
        if source.startswith("@"):
            return made[source[1:]](row)
        name, _, shown = source.partition(":")
        value = row.get(name)
        return "" if value is None else FORMATS[shown](value) if shown in FORMATS else f"{value:{shown}}"

    lines = [[cell(row, source) for *_, source in pairs] for row in rows]
    return table_of([[heading.strip() for heading, *_ in pairs], *lines])


def table_of(table: Sequence[Sequence[str]]) -> str:
    """Writes a table without the columns that are empty below their heading; numbers to the right."""
    kept = [i for i in range(len(table[0])) if any(line[i] for line in table[1:])]
    head, *body = [[line[i] for i in kept] for line in table]
    right = [all(not line[i] or line[i][0].isdigit() for line in body) for i in range(len(head))]
    lines = [head, ["---:" if each else "---" for each in right], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def context(tokens: int) -> str:
    """Writes a number of tokens in Ki or Mi."""
    return f"{tokens >> 20} Mi" if tokens % (1 << 20) == 0 else f"{tokens >> 10} Ki"


def number(value: Any) -> str:
    """Writes a number with at most two decimals and about four digits, thousands apart; two numbers as a range."""
    if isinstance(value, list):
        return " to ".join(number(x) for x in value)
    if isinstance(value, float):
        places = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else None
        value = round(value, places)
    return f"{value:,}"


def percent(share: Any) -> str:
    """Writes a share in per cent, with three digits at most."""
    low, *high = share if isinstance(share, list) else [share]
    return " to ".join(f"{100 * x:.3g}" for x in (low, *high)) + " %"


FORMATS: dict[str, Callable[[Any], str]] = {
    "": lambda value: value if isinstance(value, str) else number(value),
    "percent": lambda value: percent(value),
    "times": lambda value: f"{value:.2f}x",
    "tokens": context,
    "millions": lambda value: number(value / 1e6),
    "count": lambda value: str(value or ""),
}
