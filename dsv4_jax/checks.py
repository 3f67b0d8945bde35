"""What arguments of public calls are looked at with: is it an integer, and how does it read in a message?"""

from __future__ import annotations

import operator
from array import array
from typing import Any

import numpy as np

__all__ = ["INT32_MAX", "as_int", "int_array", "shown"]

INT32_MAX = 2**31 - 1


def as_int(value: Any) -> int | None:
    """`value` as a Python int, numpy integers welcome. None if it is none: booleans, floats, what refuses to be one."""
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
    """A value in a message: at most 200 characters of its repr, whatever that does."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, a class with a broken repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."
