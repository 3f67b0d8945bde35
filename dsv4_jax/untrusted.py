"""Input from outside (JSON, names, numbers): read, checked and shown within bounds.

JSON of limited size and depth, fields of a config by type and range, any value as one short line.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .checks import INT32_MAX
from .errors import CacheError, ConfigError

__all__ = [
    "INT32_MAX",
    "brief",
    "failing",
    "integer_field",
    "number_field",
    "parse_json",
    "plain",
    "read_json",
    "read_number",
    "read_settings",
]

_FLOAT32 = (1e-37, 3e38)
_LONGEST_NAME = 200


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of more than 4300 digits.
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _LONGEST_NAME


def brief(value: object) -> str:
    """The value as one short line, however long, deep or odd it is."""
    return " ".join(_SHORT.repr(value).split())


def plain(name: str) -> str:
    """A name as it is if it is short and printable, else `brief`."""
    return name if name.isprintable() and len(name) <= _LONGEST_NAME else brief(name)


@contextlib.contextmanager
def failing(kind: type[CacheError], problem: str) -> Iterator[None]:
    """Raises an error of this kind for whatever a program of others raises, a panic of its Rust, too."""
    try:
        yield
    except (MemoryError, CacheError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
            raise kind(f"{problem}: {error}") from None
        raise


def integer_field(field: str, value: Any, low: int = 1, high: int = INT32_MAX) -> int:
    """The value if it is an integer in this range, which a bool is not."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(field, f"must be an integer from {low} to {high}, got {brief(value)}")
    return value


def number_field(field: str, value: Any, low: float = _FLOAT32[0], high: float = _FLOAT32[1]) -> float:
    """The value if it is an integer or float in this range, which a bool and NaN are not."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(field, f"must be a number from {low:g} to {high:g}, got {brief(value)}")
    return value


def read_number(text: str, kind: Callable[[str], Any] = float) -> Any:
    """The `int` or `float` that a text is, in ASCII and without the underscores that Python takes, or `ValueError`."""
    if not text.isascii() or "_" in text:
        raise ValueError("not a number")
    return kind(text)


def read_settings(text: str, types: Mapping[str, type], error: Callable[[str, str], Exception]) -> dict[str, Any]:
    """The values of `name=value,name=value,...`.

    Args:
        types: of the values, `int` or `float`, by name.
        error: makes an error of a problem and the name that it is about.
    """
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in types:
            raise error(f"unknown setting; there are {', '.join(types)}", name[:40])
        if name in values:
            raise error("is given twice", name)
        try:
            values[name] = read_number(value, types[name])
        except ValueError:
            kind = "number" if types[name] is float else "integer"
            raise error(f"{value[:40]!r} is no {kind}", name) from None
    return values


def parse_json(data: bytes, *, unique_keys: bool = False) -> Any:
    """Returns the JSON value of UTF-8 text. With `unique_keys`, an object that says a key twice is refused.

    Raises:
        ValueError: says in one line why this is no such text.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: pathlib.Path, max_bytes: int, *, unique_keys: bool = False) -> Any:
    """The JSON value of a file, of which no more than `max_bytes` are read.

    Raises:
        ValueError: the file cannot be read, is larger, or holds no JSON; says why in one line.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("not a regular file")  # a FIFO would wait for its writer
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise ValueError(f"{size} bytes, at most {max_bytes} are read")
            data = file.read(size)
    except OSError as error:
        raise ValueError(error.strerror) from None
    return parse_json(data, unique_keys=unique_keys)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {brief(twice)} is given twice")
    return items
