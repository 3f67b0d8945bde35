"""Ends a call at one of its lines, as Ctrl-C or a lack of memory would."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import dsv4_jax

T = TypeVar("T")
ROOT = Path(dsv4_jax.__file__).parent
MANAGER = str(ROOT / "manager")
POOLS = tuple(str(ROOT / name) for name in ("pools", "events.py", "eviction_queue.py"))


class Fault:
    """Raises `error` at the n-th line of the manager that runs inside `call`; `hit` says whether it came to that.

    `root`: another file or folder, or several. `opcodes`: at the n-th instruction instead.
    """

    def __init__(
        self, error: type[BaseException], line: int, *, root: str | tuple[str, ...] = MANAGER, opcodes: bool = False
    ):
        self.error, self.left, self.hit = error, line, False
        self._root, self._opcodes = root, opcodes

    def call(self, function: Callable, *args, **options):
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function(*args, **options)
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, arg):
        frame.f_trace_opcodes = self._opcodes
        closes = self._opcodes and frame.f_code.co_name == "<genexpr>"  # when it is closed an error goes nowhere
        return self._line if frame.f_code.co_filename.startswith(self._root) and not closes else None

    def _line(self, frame, event, arg):
        if event == ("opcode" if self._opcodes else "line") and not self.hit:
            self.left -= 1
            if self.left < 0:
                self.hit = True
                raise self.error("injected")
        return self._line


def raises_at(line: int, kind: type[BaseException], call: Callable[[], Any]) -> bool:
    """Calls, and raises before the `line`th line of the pools; whether there was one."""
    fault = Fault(kind, line - 1, root=POOLS)
    with contextlib.suppress(kind):
        fault.call(call)
    return fault.hit


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
