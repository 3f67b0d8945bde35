"""Transfers outside of a step: started, and waited for when somebody needs to know."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from ..cache import KVCache
from ..errors import TransferError, TransferTimeoutError
from ..plan import SwapPlan
from . import swap
from .host import HostCache
from .moves import SwapImplementation

__all__ = ["TransferHandle", "restore_async", "snapshot_async", "swap_in_async", "swap_out_async"]

_POLL = 1e-3  # longest pause between two looks, seconds


class TransferHandle:
    """A transfer under way. Computations that use its result need no handle: the runtime orders them.

    A host thread needs one, to know when host records may be read, or device blocks given away by other
    means than a jitted step. Holding a handle keeps no cache or record alive.
    """

    def __init__(self, token: Any, started: float | None = None):
        """
        Args:
            token: a small array, output of the executable that does the transfer.
            started: when that was given to the runtime, in `time.monotonic()`; None: now.
        """
        self._token = token
        self._error: Exception | None = None
        self._done = False
        self._started = time.monotonic() if started is None else started
        self._ended: float | None = None

    def is_ready(self) -> bool:
        """Whether the transfer has ended, well or not."""
        ready = self._done or self._token.is_ready()
        if ready and self._ended is None:
            self._ended = time.monotonic()
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
            TransferError: it failed, from the runtime's error.
        """
        if timeout is not None:
            deadline, pause = time.monotonic() + timeout, 1e-5
            while not self.is_ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransferTimeoutError(f"the transfer did not end within {timeout} s")
                time.sleep(min(pause, left))
                pause = min(2 * pause, _POLL)
        if (error := self._result()) is not None:
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
                self._error = error
            self._done = True
            self.is_ready()
        return self._error


def swap_out_async(
    cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> tuple[HostCache, TransferHandle]:
    """`swap.swap_out` as a computation of its own; `host` is donated. Raises as `swap_out`."""
    return _start("swap_out", cache, host, plan, implementation)


def swap_in_async(
    cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> tuple[KVCache, TransferHandle]:
    """`swap.swap_in` as a computation of its own; `cache` is donated. Raises as `swap_in`."""
    return _start("swap_in", cache, host, plan, implementation)


def snapshot_async(
    cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> tuple[HostCache, TransferHandle]:
    """`swap.snapshot` as a computation of its own; `host` is donated. Raises as `snapshot`."""
    return _start("snapshot", cache, host, plan, implementation)


def restore_async(
    cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> tuple[KVCache, TransferHandle]:
    """`swap.restore` as a computation of its own; `cache` is donated. Raises as `restore`."""
    return _start("restore", cache, host, plan, implementation)


def _start(operation: str, cache, host, plan: SwapPlan, implementation: SwapImplementation):
    started = time.monotonic()
    result, token = _compiled(operation)(cache, host, plan, implementation=implementation)
    return result, TransferHandle(token, started)


@functools.cache
def _compiled(operation: str):
    move = getattr(swap, operation)

    def run(cache: KVCache, host: HostCache, plan: SwapPlan, implementation: SwapImplementation):
        # Outputs of one executable become ready together: any of them tells of the transfer.
        return move(cache, host, plan, implementation=implementation), jnp.sum(jnp.asarray(plan.device_ids))

    written = "host" if operation in ("swap_out", "snapshot") else "cache"
    return jax.jit(run, donate_argnames=written, static_argnames="implementation")
