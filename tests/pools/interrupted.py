"""Ends a call at each of its lines in turn, as Ctrl-C or a lack of memory would."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import dsv4_jax

T = TypeVar("T")
ROOT = Path(dsv4_jax.__file__).parent
OURS = {str(path) for path in [*(ROOT / "pools").glob("*.py"), ROOT / "events.py", ROOT / "eviction_queue.py"]}


def raises_at(line: int, kind: type[BaseException], call: Callable[[], Any]) -> bool:
    """Calls, and raises before its `line`th line; whether there was one."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in OURS:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise kind
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except kind:
        assert left == 0
    finally:
        sys.settrace(before)
    return left == 0


def changes_nothing_when_interrupted(make: Callable[[], T], call: Callable[[T], Any], state: Callable[[T], Any]) -> int:
    """`state` is the same after each interrupted `call` on a new `make()`; how often that was."""
    line = 0
    while True:
        line += 1
        thing = make()
        before = state(thing)
        if not raises_at(line, (KeyboardInterrupt, MemoryError)[line % 2], lambda thing=thing: call(thing)):
            assert state(thing) != before, "the call does nothing"
            return line - 1
        assert state(thing) == before, f"interrupted at line {line}"
