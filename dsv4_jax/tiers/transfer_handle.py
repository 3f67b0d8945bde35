"""`TransferHandle`: whether a transfer has ended, how, and how long it took."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

from ..errors import TransferError, TransferTimeoutError

__all__ = ["TransferHandle"]

_POLL = 1e-3  # longest pause between two looks, seconds


class TransferHandle:
    """A transfer under way. Computations that use its result need no handle: the runtime orders them.

    A host thread needs one, to know when host records may be read, or device blocks given away by other
    means than a jitted step. Holding a handle keeps no cache or record alive.
    """

    def __init__(self, token: Any, started: float | None = None, *, clock: Callable[[], float] = time.monotonic):
        """
        Args:
            token: a small array, output of the executable that does the transfer; or what has its `is_ready` and
                `block_until_ready`.
            started: when that was given to the runtime, by the clock; None: now.
            clock: what time is measured with, in seconds.
        """
        self._token, self._clock = token, clock
        self._error: Exception | None = None
        self._done = False
        self._started = clock() if started is None else started
        self._ended: float | None = None

    def is_ready(self) -> bool:
        """Whether the transfer has ended, well or not."""
        ready = self._done or self._token.is_ready()
        if ready and self._ended is None:
            self._ended = self._clock()
        return ready

    @property
    def duration(self) -> float | None:
        """Seconds from the transfer's start to its end, well or not; None before that.

        It starts when the runtime is given it, so what it waits for there (the step before, say) counts. It ends when
        somebody first sees that it has: `wait` sees it at once, the others when they look.
        """
        return self._ended - self._started if self.is_ready() and self._ended is not None else None

    def wait(self, timeout: float | None = None) -> None:
        """Returns once the transfer has ended well.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            TransferTimeoutError: it has not ended by then; it goes on.
            TransferError: it failed, from the runtime's error; of records between hosts what `dsv4_jax.tiers.remote`
                says.
        """
        if timeout is not None:
            deadline, pause = self._clock() + timeout, 1e-5
            while not self.is_ready():
                left = deadline - self._clock()
                if left <= 0:
                    raise TransferTimeoutError(f"the transfer did not end within {timeout} s")
                time.sleep(min(pause, left))
                pause = min(2 * pause, _POLL)
        if (error := self._result()) is not None:
            if isinstance(error, TransferError):
                raise copy.copy(error) from error.__cause__
            raise TransferError(f"the transfer failed: {error}") from error

    @property
    def error(self) -> Exception | None:
        """What went wrong; None if nothing did, or the transfer has not ended."""
        return self._result() if self.is_ready() else None

    def _result(self) -> Exception | None:
        if not self._done:
            try:
                self._token.block_until_ready()
            except Exception as error:  # whatever the runtime reports is what the waiter must see
                self._error = error.with_traceback(None)
            self._done = True
            self.is_ready()
        return self._error
