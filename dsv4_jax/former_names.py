"""Names that were public and moved or were renamed: they answer for one release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["former_name"]


def former_name(module: str, former: Mapping[str, str], name: str) -> Any:
    """Returns what `module.name` stood for and warns (`DeprecationWarning`). Called by the `__getattr__` of `module`.

    Args:
        former: name -> where it is now, as a path below `module`, or one that begins with `dsv4_jax`.

    Raises:
        AttributeError: `name` is not in `former`.
    """
    if name not in former:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    path = former[name] if former[name].startswith("dsv4_jax.") else f"{module}.{former[name]}"
    warnings.warn(f"{module}.{name} is {path} now", DeprecationWarning, stacklevel=3)
    home, _, new = path.rpartition(".")
    return getattr(importlib.import_module(home), new)
