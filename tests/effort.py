"""What a call costs without a clock: the lines of Python it runs, the same on a busy machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["lines_run"]


def lines_run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How many a call runs, in all Python functions below it; every pass of a loop counts, C code does not.

    Numbers differ between Python versions: compare those of one run, of a small and a large argument.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event in ("call", "line")
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # what others run at a collection does not count
    sys.settrace(trace)
    try:
        function(*args, **kwargs)
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
