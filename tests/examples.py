"""The programs of examples/, imported from where they stand."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType

__all__ = ["load_example"]


def load_example(name: str) -> ModuleType:
    """`examples/<name>.py` as a module."""
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).parents[1] / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
