"""Names and keywords that were public and moved or were renamed: they answer for one release, with a warning."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["former_keywords", "former_name"]

F = TypeVar("F", bound=Callable[..., Any])


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


def former_keywords(**former: str) -> Callable[[F], F]:
    """Lets a function take keywords by their former names, with a warning (`DeprecationWarning`).

    Args:
        former: former name -> the name now.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            for name in former.keys() & kwargs.keys():
                what = f"{function.__qualname__.removesuffix('.__init__')}({name}=) is {former[name]}= now"
                warnings.warn(f"dsv4_jax: {what}", DeprecationWarning, stacklevel=2)
                kwargs[former[name]] = kwargs.pop(name)
            return function(*args, **kwargs)

        return renamed  # type: ignore[return-value]

    return decorate
