"""Values of arguments: the types that argparse calls. What they refuse is refused before any work."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Literal

from ..errors import FileError
from ..output import check_output, check_picture
from ..untrusted import read_number

__all__ = [
    "byte_count",
    "byte_rate",
    "duration",
    "fraction",
    "given_path",
    "json_file",
    "natural",
    "number",
    "output_file",
    "output_folder",
    "picture_file",
    "positive",
    "short",
    "token_count",
    "unicode_text",
]

_LIMIT = 2**31  # of whatever is counted: ids and positions are int32
_BYTE_LIMIT = 2.0**63
_BARE_BYTES = 2**20  # from which on a number without a unit is taken for bytes
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = {prefix + unit: size for prefix, size in _PREFIXES.items() for unit in ("", "b")}
_BYTE_RATES = {
    f"{spelt}{unit}/s": size / bits
    for prefix, size in _PREFIXES.items()
    for spelt in {prefix, prefix.capitalize()}
    for unit, bits in (("B", 1), ("bit", 8))
}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def short(text: str) -> str:
    """Returns a value in a message: what was typed, unless that is very long."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def positive(text: str) -> int:
    """Returns an integer of at least 1."""
    value = natural(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def natural(text: str) -> int:
    """Returns an integer of at least 0, below 2^31, in ASCII digits."""
    match = re.fullmatch(r"([+-]?)0*([0-9]+)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{short(text)} is not an integer")
    sign, digits = match.groups()
    if sign == "-" and digits != "0":
        raise argparse.ArgumentTypeError("must not be negative")
    if len(digits) > 10 or int(digits) >= _LIMIT:
        raise argparse.ArgumentTypeError(f"{short(text)}: must be below 2^31")
    return int(digits)


def byte_count(text: str) -> int:
    """A number of bytes with an SI or IEC unit (80GiB, 1.5GB); without one it is bytes, and too few are a slip."""
    value = _measured(text.lower(), _BYTES)
    if not value < _BYTE_LIMIT:
        raise argparse.ArgumentTypeError(f"{short(text)} is not a size such as 80GiB or 80e9 (below 2^63 bytes)")
    if 0 < value < _BARE_BYTES and text.strip()[-1] in ".0123456789":
        raise argparse.ArgumentTypeError(f"{short(text)} is {int(value)} bytes, did you mean {text.strip()}GiB?")
    return int(value)


def byte_rate(text: str) -> float:
    """Returns bytes per second: a number above 0 with a unit (50GB/s, 12.5GiB/s, 400Gbit/s), or inf."""
    if text.strip() == "inf":
        return math.inf
    rate = _measured(text, _BYTE_RATES)
    if not 0 < rate < _BYTE_LIMIT:
        problem = f"{short(text)} is not a rate above 0 such as 50GB/s or 400Gbit/s (below 2^63 bytes a second; or inf)"
        raise argparse.ArgumentTypeError(problem)
    return rate


def duration(text: str) -> float:
    """Returns seconds, at least 0 and at most an hour: a number with a unit (100us, 1.5ms, 2s)."""
    seconds = _measured(text, _TIMES)
    if not seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{short(text)} is not a time of at most an hour such as 100us or 1.5ms")
    return seconds


def _measured(text: str, units: Mapping[str, float]) -> float:
    """The number before one of these units, times what the unit stands for; NaN for anything else."""
    match = re.fullmatch(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?)\s*([a-zA-Z/]*)", text.strip())
    return float(match[1]) * units.get(match[2], math.nan) if match else math.nan


def token_count(text: str) -> int:
    """A positive number of tokens; K and M are 2^10 and 2^20."""
    match = re.fullmatch(r"0*([0-9]{1,10})([km]?)", text.strip().lower())
    count = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]] if match else 0
    if not 0 < count < _LIMIT:
        problem = f"{short(text)} is not a positive number of tokens such as 8192 or 128K (below 2^31)"
        raise argparse.ArgumentTypeError(problem)
    return count


def fraction(text: str) -> float:
    """A share of something that leaves a rest: a number in [0, 1)."""
    try:
        value = read_number(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{short(text)} is not a number in [0, 1)")
    return value


def number(text: str) -> float:
    """Parses any number. What it is for says which are too small or too large."""
    try:
        return read_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{short(text)} is not a number") from None


def unicode_text(text: str) -> str:
    """A text of characters: Python makes something else of bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{short(text)} is no Unicode text") from None
    return text


def given_path(text: str) -> pathlib.Path:
    """A path to read from. What is there is looked at when it is opened."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("a name holds no NUL" if text else "an empty name")
    return pathlib.Path(text)


def output_file(text: str) -> pathlib.Path:
    """A file to write, refused before any work if it cannot be written."""
    return _output(text, check_output)


def json_file(text: str) -> pathlib.Path | Literal["-"]:
    """`-` for stdout, or a file to write. Its name must say JSON: `--json trace.jsonl` means a TRACE."""
    if text == "-":
        return "-"
    path = output_file(text)
    if path.suffix.lower() != ".json":
        raise argparse.ArgumentTypeError(f"{short(text)}: the name of its file ends in .json (without one: stdout)")
    return path


def picture_file(text: str) -> pathlib.Path:
    """A picture to write, refused before any work if it cannot be drawn or written."""
    return _output(text, check_picture)


def output_folder(text: str) -> pathlib.Path:
    """A directory to write into, made when it is needed."""
    path = given_path(text)
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise argparse.ArgumentTypeError(f"{short(str(place))} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{short(str(place))} is a directory that may not be written")
    return path


def _output(text: str, check: Callable[[str], None]) -> pathlib.Path:
    if text == "-":
        raise argparse.ArgumentTypeError("'-' (stdout) is not for this output: name a file")
    try:
        check(text)
    except FileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return pathlib.Path(text)
