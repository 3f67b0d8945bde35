"""Token ids as callers have them: checked, and converted once. Pure Python + numpy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...checks import INT32_MAX, as_int, int_array, shown
from ...errors import RequestError

__all__ = ["check_range", "packed", "token_ids", "token_list"]


def token_ids(tokens: Iterable[int] | np.ndarray, vocab_size: int = INT32_MAX + 1) -> np.ndarray:
    """Returns the ids as an array, [N] int32. Raises `RequestError` if any is no id of the vocabulary.

    Integers of any type are welcome, in a flat array or whatever can be iterated. Booleans and floats are none.
    What an iterator raises is passed on.
    """
    if isinstance(tokens, np.ndarray):
        return _checked(tokens, vocab_size)
    return np.frombuffer(_converted(_listed(tokens), vocab_size), "<i4")


def token_list(
    tokens: Iterable[int] | np.ndarray,
    vocab_size: int = INT32_MAX + 1,
    *,
    copied: Callable[[list[int]], list[int]] = list.copy,
) -> tuple[list[int], array[int]]:
    """Returns the ids as a list and as an array of code "I", both the caller's. Raises as `token_ids`.

    The list holds the ints that were given: to make 100,000 new ones takes longer than all else that is done here.

    Args:
        copied: what makes it of a list.
    """
    if isinstance(tokens, np.ndarray):
        ids = _checked(tokens, vocab_size)
        return copied(ids.tolist()), packed(ids)
    values = tokens if type(tokens) is list else _listed(tokens)
    ids = _converted(values, vocab_size)
    return copied(values if _are_ints(values) else ids.tolist()), ids


def packed(ids: np.ndarray) -> array[int]:
    """Returns an array of int32 ids, none below 0, as an array of code "I"."""
    copy = array("I")
    copy.frombytes(np.ascontiguousarray(ids, np.int32).view(np.uint8).data)
    return copy


def check_range(ids: np.ndarray, vocab_size: int) -> None:
    """Raises `RequestError` if one of these integers is no id of the vocabulary."""
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        _check_token(int(ids[(ids < 0) | (ids >= vocab_size)][0]), vocab_size)


def _checked(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns an array of ids as int32."""
    ids = np.asarray(ids)  # of a masked array the numbers
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RequestError(f"tokens must be a flat sequence of integers, got {ids.dtype}{list(ids.shape)}")
    check_range(ids, vocab_size)
    return ids.astype("<i4", copy=False)


def _listed(tokens: Iterable[int]) -> list[int]:
    if type(tokens) is list:
        return tokens.copy()
    try:
        values = iter(tokens)
    except TypeError as error:
        raise RequestError(f"tokens must be a flat sequence of integers, got {shown(tokens)}") from error
    return list(values)


def _converted(tokens: list[int], vocab_size: int) -> array[int]:
    """Returns a list of ids as an array of code "I"."""
    ids = int_array(tokens, "I")
    if ids is None:
        for token in tokens:
            _check_token(token, vocab_size)
        raise RequestError(f"tokens must be integers in 0..{vocab_size - 1}")
    check_range(np.frombuffer(ids, np.uint32), vocab_size)
    return ids


def _check_token(token: Any, vocab_size: int) -> None:
    number = as_int(token)
    if number is None:
        raise RequestError(f"tokens must be integers in 0..{vocab_size - 1}, got {shown(token)}")
    if not 0 <= number < vocab_size:
        raise RequestError(f"tokens must be in the vocabulary: token id {shown(number)} is not in 0..{vocab_size - 1}")


def _are_ints(tokens: list[int]) -> bool:
    """Whether all integers of a list are Python's (or an enum's), not numpy's or others: then their sum is."""
    try:
        with np.errstate(over="ignore"):  # numpy's may wrap around
            return type(sum(tokens)) is int
    except MemoryError:
        raise  # of the process, not of the argument
    except Exception:  # what has no sum
        return False
