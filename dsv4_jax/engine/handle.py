"""The reader's end of a request: outputs as they come, for threads and for asyncio. Imports no jax."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ..checks import check_seconds
from ..errors import EngineError
from .prompt import Completion, Output

__all__ = ["Handle", "Loops", "Teller", "Waiter"]

FAIR = 5e-3  # seconds: so long a thread that computes keeps the interpreter from others


class _Event(Protocol):
    """An `asyncio.Event`, or what is told in its place."""

    def set(self) -> None: ...


class Teller(Protocol):
    """Who is told of all its events at once, in the engine's thread (or the watchdog's), in place of a loop."""

    def tell(self, events: Iterable[Any]) -> None:
        """There is news of these. Neither raises nor waits."""
        ...


Waiter = tuple[asyncio.AbstractEventLoop, _Event] | tuple[Teller, Any]


class Handle:
    """A request that was added to an engine. Iterate over it (`for` or `async for`) for its outputs, as they come.

    What comes while nobody reads waits here, joined: a slow reader gets fewer, longer outputs, and holds nobody up.
    Leaving an iteration before its end (`break`, a cancelled task) aborts the request.

    Attributes:
        id: of the request.
    """

    def __init__(
        self,
        name: Hashable,
        samples: int,
        abort: Callable[[Handle], object],
        may_wait: Callable[[], object] = lambda: None,
    ):
        self.id = name
        self._completions = [Completion(name, i) for i in range(samples)]
        self._lock = threading.RLock()
        self._changed, self._asleep = threading.Condition(self._lock), 0  # threads that wait for news
        self._left = samples  # that have not ended
        self._waiters: list[Waiter] = []
        self._abort, self._may_wait = abort, may_wait

    def __repr__(self) -> str:
        return f"<Handle {self.id!r}: {self._left} of {len(self._completions)} samples go on>"

    @property
    def done(self) -> bool:
        """Whether all its samples have ended."""
        return self._left == 0

    def abort(self) -> None:
        """Ends it now, as "abort", if it has not ended. From any thread; waits for nothing."""
        self._abort(self)

    def results(self, timeout: float | None = None) -> list[Completion]:
        """Waits for its end; returns all samples, in order. Raises `TimeoutError` if it takes longer (it goes on)."""
        until = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout, error=EngineError)
        if self._left:
            self._may_wait()
        with self._lock:
            while self._left:
                rest = None if until is None else until - time.monotonic()
                if rest is not None and rest <= 0:
                    raise TimeoutError(f"request {self.id!r} has not ended in {timeout} s")
                self._sleep(rest)
        return self._completions

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for its end; returns the first sample. Raises as `results`."""
        return self.results(timeout)[0]

    def _sleep(self, seconds: float | None = None) -> None:
        """Waits for news. The lock is held."""
        self._asleep += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._asleep -= 1

    def __iter__(self) -> Iterator[Output]:
        seen = _Seen(len(self._completions))
        try:
            while True:
                with self._lock:
                    while not (outputs := seen.news(self._completions)) and self._left:
                        self._may_wait()
                        self._sleep()
                if not outputs:
                    return
                yield from outputs
        finally:
            if self._left:
                self.abort()

    async def __aiter__(self) -> AsyncIterator[Output]:
        seen, loop, event = _Seen(len(self._completions)), asyncio.get_running_loop(), asyncio.Event()
        waiter = (loop, event)
        with self._lock:
            self._waiters.append(waiter)
        try:
            while True:
                event.clear()
                with self._lock:
                    outputs, left = seen.news(self._completions), self._left
                for output in outputs:
                    yield output
                if not outputs:
                    if not left:
                        return
                    await event.wait()
        finally:
            with self._lock:
                self._waiters.remove(waiter)
            if self._left:
                self.abort()

    def reader(self, teller: Teller, event: Any) -> Callable[[], list[Output]]:
        """For who reads many requests at once: what it returns gives the outputs since it was last called.

        `teller` is told of `event` when there are some. Nothing is aborted.
        """
        seen = _Seen(len(self._completions))
        with self._lock:
            self._waiters.append((teller, event))

        def take() -> list[Output]:
            with self._lock:
                return seen.news(self._completions)

        return take

    def put(self, output: Output) -> Sequence[Waiter]:
        """The engine's end: takes up an output. Returns the tasks to be woken."""
        with self._lock:
            completion = self._completions[output.index]
            if completion.finish is not None:
                return ()
            completion.add(output)
            self._left -= output.finish is not None
            if self._asleep:
                self._changed.notify_all()
            return self._waiters.copy() if self._waiters else ()

    def fail(self, error: Exception) -> list[Waiter]:
        """All samples that have not ended end in this error. Returns the tasks to be woken."""
        return [
            waiter
            for i in range(len(self._completions))
            for waiter in self.put(Output(self.id, i, finish="error", error=error))
        ]


class Loops:
    """Sets readers' events, each in its loop of asyncio: one call of a loop or teller, however many events there are.

    A thread that computes hands the interpreter on every few milliseconds alone, and a loop has to ask for it anew
    after each call of the system: beside steps that never let go of it, it might not come to its turn before the engine
    is done. Therefore who calls a loop that has not run since it was called last waits for it, once, and not for long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._called: dict[asyncio.AbstractEventLoop, _Called] = {}  # and have not run since

    def wake(self, waiters: Iterable[Waiter]) -> None:
        """Has these events set. From any thread."""
        found: dict[Any, set[Any]] = {}
        for loop, event in waiters:
            found.setdefault(loop, set()).add(event)
        for loop, events in found.items():
            if not isinstance(loop, asyncio.AbstractEventLoop):
                loop.tell(events)
                continue
            with self._lock:
                self._called = {each: its for each, its in self._called.items() if not each.is_closed()}
                called = self._called.get(loop)
                if called is None:
                    self._called[loop] = _Called(events)
                else:
                    called.events |= events
            if called is not None:
                called.wait()
                continue
            with contextlib.suppress(RuntimeError):  # it is closed: nobody reads any more
                loop.call_soon_threadsafe(self._set, loop)

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            called = self._called.pop(loop)
        called.ran.set()
        for event in called.events:
            event.set()


class _Called:
    """A loop that has been called."""

    __slots__ = ("events", "ran", "waited")

    def __init__(self, events: set[_Event]):
        self.events, self.ran, self.waited = events, threading.Event(), False

    def wait(self) -> None:
        """Waits until it has run, if nobody has waited for that before."""
        if not self.waited:
            self.waited = True
            self.ran.wait(FAIR)


class _Seen:
    """How much of each sample a reader has."""

    def __init__(self, samples: int):
        self._counts = [(0, 0)] * samples  # tokens, experts
        self._ended = [False] * samples

    def news(self, completions: list[Completion]) -> list[Output]:
        """What has come since: of each sample an output, or several if the weights have changed."""
        outputs = []
        for i, now in enumerate(completions):
            (tokens, experts), ends = self._counts[i], now.finish is not None and not self._ended[i]
            if len(now.tokens) == tokens and len(now.experts) == experts and not ends:
                continue
            more = now.experts[experts:]
            bounds = [start for start, _ in now.weights if start > tokens]
            for stop in bounds:  # tokens of weights that are no longer in use stand alone
                own = slice(tokens, stop)
                outputs.append(
                    Output(
                        now.id,
                        i,
                        now.tokens[own],
                        now.logprobs[own],
                        now.top[own],
                        cached=now.cached,
                        weights_id=now.weights_of(tokens),
                    )
                )
                tokens = stop
            outputs.append(
                Output(
                    now.id,
                    i,
                    now.tokens[tokens:],
                    now.logprobs[tokens:],
                    now.top[tokens:],
                    now.finish,
                    now.error,
                    now.cached,
                    now.weights_of(tokens) if tokens < len(now.tokens) else now.weights_id,
                    np.concatenate(more, 1) if more else None,
                    now.lease,
                )
            )
            self._counts[i], self._ended[i] = (len(now.tokens), len(now.experts)), now.finish is not None
        return outputs
