"""Checks of the arguments of public calls: is it an integer in this range, and how does it read in a message?"""

from __future__ import annotations

import operator
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

__all__ = [
    "INT32_MAX",
    "INT64_MAX",
    "MAX_BIASES",
    "as_int",
    "check_boolean",
    "check_integer",
    "check_iterable",
    "check_seconds",
    "check_share",
    "int_array",
    "shown",
]

T = TypeVar("T")
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_BIASES = 1024  # tokens whose logits one request may change


def check_integer(
    name: str, value: Any, low: int = 0, high: int = INT64_MAX, *, error: Callable[[str], Exception]
) -> int:
    """Returns `value` as a Python int; numpy's integers are welcome, booleans and floats are not.

    Raises:
        error: the value is not an integer in low..high. The message names the argument, the range and the value.
    """
    number = as_int(value)
    if number is None or not low <= number <= high:
        wanted = (
            f"of at least {low}" if high >= INT64_MAX and (number is None or number < low) else f"from {low} to {high}"
        )
        raise error(f"{name} must be an integer {wanted}, got {shown(value)}")
    return number


def check_boolean(name: str, value: Any, *, error: Callable[[str], Exception]) -> bool:
    """Returns `value` as a bool; numpy's booleans are welcome, 0 and 1 are not. Raises `error` for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"{name} must be True or False, got {type(value).__name__} {shown(value)}")
    return bool(value)


def check_iterable(name: str, values: Iterable[T], *, error: Callable[[str], Exception]) -> Iterator[T]:
    """Returns an iterator over `values`. Raises `error` if it cannot be iterated over."""
    try:
        return iter(values)
    except TypeError:
        raise error(f"{name} must be an iterable, got {shown(values)}") from None


def check_seconds(
    name: str, value: Any, high: float = threading.TIMEOUT_MAX, *, error: Callable[[str], Exception]
) -> float:
    """Returns `value` as a float. Raises `error` unless it is a number above 0, and no more than `high`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= high:  # which NaN is not, nor an integer that no float can be
        raise error(f"{name} must be a positive number of seconds, at most {high:.0f}, got {shown(value)}")
    return float(value)


def check_share(name: str, value: Any, *, error: Callable[[str], Exception]) -> float:
    """Returns `value` as a float. Raises `error` unless it is a number from 0 to 1."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:  # which NaN is not
        raise error(f"{name} must be a number from 0 to 1, got {shown(value)}")
    return float(value)


def as_int(value: Any) -> int | None:
    """Returns `value` as a Python int, numpy's too; None for booleans, floats and what refuses to be one."""
    if type(value) is int:
        return value
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return int(operator.index(value))
    except MemoryError:
        raise  # of the process, not of the argument
    except Exception:  # whatever its `__index__` raised
        return None


def int_array(values: list[Any], code: str) -> array[int] | None:
    """A list of integers as an array of code "I" or "Q"; None if something else is in it, or does not fit.

    About 5 ns for each of Python's; numpy, and the codes of signed integers, take three to five times as long.
    """
    try:
        packed = array(code, values)  # which refuses floats
    except MemoryError:
        raise  # of the process, not of the argument
    except Exception:  # whatever an `__index__` raised
        return None
    # It does not refuse booleans, which are 0 or 1.
    small = np.flatnonzero(np.frombuffer(packed, f"u{packed.itemsize}") <= 1).tolist()
    return None if small and bool in map(type, map(values.__getitem__, small)) else packed


def shown(value: object) -> str:
    """Returns a value in a message: at most 200 characters of its repr, whatever that does."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, a class with a broken repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."
