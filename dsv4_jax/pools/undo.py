"""Undo: an operation on host books happens wholly or not at all. Pure Python and NumPy, no jax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Undo"]


class Undo:
    """Puts old values back if its block raises, newest first: an error of ours, `MemoryError`, Ctrl-C, anything.

    What is about to change is kept first, so that it does not matter between which two lines the block ends.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for step in reversed(self._steps):
                step()

    def keep(self, thing: object, *names: str) -> None:
        """Attributes. Those that are lists or dicts must be replaced, not written to."""
        self._steps += [functools.partial(setattr, thing, name, getattr(thing, name)) for name in names]

    def keep_at(self, array: np.ndarray, index: Any) -> None:
        """Elements of an array."""
        self._steps.append(functools.partial(array.__setitem__, index, array[index].copy()))

    def keep_end(self, items: list[Any]) -> None:
        """Where a list ends, which is only appended to."""
        self._steps.append(functools.partial(items.__delitem__, slice(len(items), None)))

    def keep_key(self, items: dict[Any, Any], key: Any) -> None:
        """What a dict has under a key, or that it has nothing there. Its order is not kept."""
        step = functools.partial(items.__setitem__, key, items[key]) if key in items else None
        self._steps.append(step or functools.partial(items.pop, key, None))

    def call(self, step: Callable[..., Any], *args: Any) -> None:
        """Anything that may be done whether or not the change was made."""
        self._steps.append(functools.partial(step, *args))
