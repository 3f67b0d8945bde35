"""Token ids as callers have them: checked, and converted once. Pure Python + numpy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...checks import INT32_MAX, as_int, int_array, shown
from ...errors import RequestError

__all__ = ["check_range", "packed", "packed_ids", "token_ids"]


def token_ids(tokens: Iterable[int] | np.ndarray, vocab_size: int = INT32_MAX + 1) -> np.ndarray:
    """Returns the ids as an array, [N] int32. Raises `RequestError` if any is no id of the vocabulary.

    Integers of any type are welcome, in a flat array or whatever can be iterated. Booleans and floats are none.
    What an iterator raises is passed on.
    """
    if isinstance(tokens, np.ndarray):
        return _checked(tokens, vocab_size)
    return np.frombuffer(packed_ids(tokens, vocab_size), "<i4")


def packed_ids(tokens: Iterable[int] | np.ndarray, vocab_size: int = INT32_MAX + 1) -> array[int]:
    """Returns the ids as an array of code "I", the caller's own. Raises as `token_ids`."""
    if isinstance(tokens, np.ndarray):
        return packed(_checked(tokens, vocab_size))
    if isinstance(tokens, array) and tokens.typecode == "I":
        check_range(np.frombuffer(tokens, np.uint32), vocab_size)
        return array("I", tokens)
    return _converted(_listed(tokens), vocab_size)


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
