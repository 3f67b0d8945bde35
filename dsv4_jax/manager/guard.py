"""Whether a manager's books can be trusted, and whether a call is changing them now. Pure Python.

Every public call that may change the books passes here, one at a time. A call that is refused (`REFUSALS`) has changed
nothing. Whatever else leaves a call (out of memory, Ctrl-C, a bug) leaves the books half changed: from then on all
calls but `reset()` are refused. A call that begins while another has not ended, in another thread or around it (a
signal handler), is refused as well, and the other one goes on as if it had not been: `ManagerBusyError`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

from ..errors import (
    HandoffError,
    ManagerBusyError,
    ManagerInterruptedError,
    NoFreeSlotError,
    OutOfBlocksError,
    PerformanceWarning,
    PlanError,
    RequestError,
)

__all__ = ["PATIENCE", "REFUSALS", "Guard"]

REFUSALS = (HandoffError, NoFreeSlotError, OutOfBlocksError, PerformanceWarning, PlanError, RequestError)
PATIENCE = 1.0  # seconds that who only reads waits for a moment in which no call is under way
_PAUSE = 2e-4  # seconds between two looks for one
_ENDING = threading.RLock()  # of who takes the place of a call that never ended

R = TypeVar("R")


class Guard:
    """`with guard("admit_request"): ...` around what one public call changes. Calls do not nest.

    The call is noted before its first change and forgotten after its last, so that there is no instant at which an
    exception could leave half a change behind unseen. It is noted with the frame that makes it: a call that is noted
    is under way as long as a thread has that frame on its stack, and was broken off otherwise.
    """

    __slots__ = ("_begun", "_broken", "_noted")

    def __init__(self) -> None:
        # One place, taken by `setdefault` and given back by `del`: both are atomic. (No lock: managers are pickled.)
        self._noted: dict[int, tuple[FrameType, str]] = {}
        self._begun = 0  # calls so far
        self._broken: tuple[str, BaseException | None] | None = None  # the call that was broken off, and by what

    def __call__(self, call: str) -> Guard:
        """Begins a call of the caller's frame.

        Raises:
            ManagerInterruptedError: one before was broken off.
            ManagerBusyError: another is under way.
        """
        mine = (sys._getframe(1), call)
        while True:
            if self._broken is None and self._noted.setdefault(0, mine) is mine:
                if self._broken is None:
                    break
                del self._noted[0]  # a call in between was broken off
            self._refuse()
        self._begun += 1
        return self

    def anew(self, call: str) -> Guard:
        """Begins a call of the caller's frame that makes new books: also after one that was broken off.

        Once it has come to its end, that is forgotten. Raises `ManagerBusyError`.
        """
        mine = (sys._getframe(1), call)
        while (noted := self._noted.setdefault(0, mine)) is not mine:
            self._refuse_while_running(noted)
            with _ENDING:
                if self._noted.get(0) is noted:  # a call that was broken off before it could say so
                    self._broken = self._broken or (noted[1], None)
                    del self._noted[0]
        self._begun += 1
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._broken = None
        elif not issubclass(kind, REFUSALS):
            self._broken = self._noted[0][1], error
        del self._noted[0]

    def check(self) -> None:
        """Raises `ManagerInterruptedError` if a call was broken off. One that is under way is none of that."""
        if self._broken is not None or self._noted:
            with contextlib.suppress(ManagerBusyError):
                self._refuse()

    def read(self, look: Callable[[], R]) -> R:
        """What `look` returns, which changes nothing: from any thread, and as of one moment between two calls.

        It waits for such a moment, for `PATIENCE` seconds at most, and not at all within a call of this thread.

        Raises:
            ManagerInterruptedError: a call was broken off.
            ManagerBusyError: there was no such moment.
        """
        until = time.monotonic() + PATIENCE
        while True:
            begun = self._begun
            try:
                self._refuse()
                seen = look()
            except ManagerInterruptedError:
                raise
            except ManagerBusyError as error:
                if error.thread is None or time.monotonic() >= until:
                    raise
            except Exception:  # what `look` has met in the midst of a change says nothing
                if begun == self._begun and not self._noted:
                    raise
            else:
                if begun == self._begun and not self._noted:
                    return seen
            time.sleep(_PAUSE)

    def _refuse(self) -> None:
        """Raises the error of another call that begins now; returns if it may begin."""
        if self._broken is not None:
            call, cause = self._broken
            raise ManagerInterruptedError(call, cause) from cause
        if (noted := self._noted.get(0)) is not None:
            self._refuse_while_running(noted)
            if self._noted.get(0) is noted:  # nobody runs it, and it has not ended
                raise ManagerInterruptedError(noted[1])

    @staticmethod
    def _refuse_while_running(noted: tuple[FrameType, str]) -> None:
        """Raises `ManagerBusyError` if a thread has the frame of this call on its stack."""
        running, call = noted
        for thread, top in sys._current_frames().items():
            frame: FrameType | None = top
            while frame is not None and frame is not running:
                frame = frame.f_back
            if frame is not None:
                if thread == threading.get_ident():
                    raise ManagerBusyError(call)
                names = [each.name for each in threading.enumerate() if each.ident == thread]
                raise ManagerBusyError(call, names[0] if names else str(thread))
