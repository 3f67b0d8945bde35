"""Undo: an operation on host books happens wholly or not at all. Pure Python and NumPy, no jax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Undo"]


class Undo:
    """Old values, and what puts them back, newest first, when an operation is interrupted.

    By an error of ours, `MemoryError`, Ctrl-C, anything: what is about to change is kept first, so that it does not
    matter between which two lines that is. No context manager: its end would be a line where the operation is done
    and is not undone any more.

        undo = Undo()
        try:
            ...
            return what
        except BaseException:
            undo.put_back()
            raise

    Args:
        within: a larger operation that this one is a part of: it can undo both.
    """

    def __init__(self, within: Undo | None = None) -> None:
        self._steps: list[Callable[[], Any]] = [] if within is None else within._steps
        self._first = len(self._steps)

    def put_back(self) -> None:
        while len(self._steps) > self._first:
            self._steps.pop()()

    def keep(self, thing: object, *names: str) -> None:
        """Keeps attributes. Those that are lists or dicts must be replaced, not written to."""
        self._steps.extend([functools.partial(setattr, thing, name, getattr(thing, name)) for name in names])

    def keep_at(self, array: np.ndarray, index: Any) -> None:
        """Keeps elements of an array."""
        self._steps.append(functools.partial(array.__setitem__, index, array[index].copy()))

    def keep_end(self, items: list[Any]) -> None:
        """Keeps where a list ends, which is only appended to."""
        self._steps.append(functools.partial(items.__delitem__, slice(len(items), None)))

    def keep_key(self, items: dict[Any, Any], key: Any) -> None:
        """Keeps what a dict has under a key, or that it has nothing there. Its order is not kept."""
        step = functools.partial(items.__setitem__, key, items[key]) if key in items else None
        self._steps.append(step or functools.partial(items.pop, key, None))

    def call(self, step: Callable[..., Any], *args: Any) -> None:
        """Notes a call that may be made whether or not the change was made."""
        self._steps.append(functools.partial(step, *args))
