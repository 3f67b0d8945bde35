"""Calls of stores that nobody waits for: each has a deadline; a store does not have what it does not answer by then."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from ..errors import StoreError
from ..manager.metrics import Family, Samples
from ..stores import AsyncStore
from ..stores.base import Flags

__all__ = ["MAX_LATE", "StorageStats", "StoreCall", "StoreCalls"]

MAX_LATE = 16  # calls past their deadline that a store may still be at before it is asked nothing more


@dataclasses.dataclass(eq=False, slots=True)
class StoreCall:
    """A call of one store, about these keys. No future: it was refused."""

    scope: str
    what: str
    keys: list[bytes]
    future: Future[Flags] | None
    began: float
    until: float

    def flags(self) -> list[bool] | None:
        """What it has answered; None if nothing, an error or nonsense."""
        if self.future is None or not self.future.done() or self.future.exception() is not None:
            return None
        flags = self.future.result()
        return [bool(flag) for flag in flags] if np.shape(flags) == (len(self.keys),) else None

    def found(self) -> set[bytes]:
        """The keys that it has answered yes to."""
        return {key for key, has in zip(self.keys, self.flags() or (), strict=False) if has}


_CALLS = ("contains", "read_into", "write")
_RESULTS = ("done", "failed", "late", "refused", "found", "missed")


@dataclasses.dataclass(frozen=True)
class StorageStats:
    """What was asked of stores so far, as `StoreCalls` counts it.

    Attributes:
        counts, seconds: as of `StoreCalls`.
        record_bytes: of each scope.
        pending_bytes: of calls that its store has accepted and not done.
        late: calls out of time that its store is still at; it is asked nothing more while there are many.
    """

    counts: Mapping[tuple[str, str, str], int]
    seconds: Mapping[tuple[str, str], float]
    record_bytes: Mapping[str, int]
    pending_bytes: Mapping[str, int]
    late: Mapping[str, int]

    def families(self) -> Iterator[Family]:
        """For `prometheus_text`."""

        def by(results: tuple[str, ...]) -> Samples:
            return [
                ({"scope": scope, "call": call, "result": result}, count)
                for (scope, call, result), count in self.counts.items()
                if result in results
            ]

        text = "Calls of stores that were done, have failed, were out of time, or were refused as too many wait."
        yield Family("calls_total", "counter", text, by(("done", "failed", "late", "refused")))
        text = "Records asked for in calls that were done: found (of writes: added), and missed."
        yield Family("records_total", "counter", text, by(("found", "missed")))
        moved: Samples = [
            ({"scope": scope, "call": call}, self.counts[scope, call, "found"] * size)
            for scope, size in self.record_bytes.items()
            for call in _CALLS[1:]
            if (scope, call) in self.seconds
        ]
        yield Family("bytes_total", "counter", "Bytes read from stores and written to them.", moved)
        spent: Samples = [({"scope": scope, "call": call}, each) for (scope, call), each in self.seconds.items()]
        yield Family("call_seconds_total", "counter", "How long calls took until they were taken up.", spent)
        for name, text, values in (
            ("pending_bytes", "Bytes that a store has accepted and not moved.", self.pending_bytes),
            ("late_calls", "Calls out of time that a store is still at.", self.late),
        ):
            yield Family(name, "gauge", text, [({"scope": scope}, value) for scope, value in values.items()])


class StoreCalls:
    """Makes calls of the stores of some scopes and says which have ended, well, badly or by their deadline.

    Args:
        stores: by scope ("block", "slot").
        clock: what deadlines are measured with, in seconds.

    Attributes:
        counts: of each scope and kind of call how many were "done", "failed", "late" (out of time) or "refused" (busy,
            closed, or too many late), and of the keys of those done how many were "found" (written), and "missed".
        seconds: of each scope and kind of call, until it was taken up, added up.
    """

    def __init__(self, stores: Mapping[str, AsyncStore], clock: Callable[[], float] = time.monotonic):
        self.stores, self.clock = dict(stores), clock
        self._late: dict[str, list[Future[Flags]]] = {scope: [] for scope in stores}
        kinds = [(scope, what) for scope in stores for what in _CALLS]
        self.counts = {(*kind, result): 0 for kind in kinds for result in _RESULTS}
        self.seconds = dict.fromkeys(kinds, 0.0)

    def ask(self, scope: str, what: str, keys: list[bytes], *records: Any, within: float) -> StoreCall:
        """Makes the call `what` of a store, if it takes it at once.

        One that hangs is asked nothing more while `MAX_LATE` calls to it are late.
        """
        late = self._late[scope] = [future for future in self._late[scope] if not future.done()]
        future, now = None, self.clock()
        if len(late) < MAX_LATE:
            with contextlib.suppress(StoreError):  # busy, or closed
                future = getattr(self.stores[scope], what)(keys, *records, timeout=0)
        return StoreCall(scope, what, keys, future, now, now + within)

    def take_ended(self, items: list[Any]) -> Iterator[Any]:
        """Takes those out of the list, one by one, all of whose `calls` have ended or are out of time."""
        for item in list(items):
            if all(self._has_ended(call) for call in item.calls):
                items.remove(item)
                for call in item.calls:
                    self._count(call)
                yield item

    def _count(self, call: StoreCall) -> None:
        """One has ended, or is out of time: then it is late."""
        kind, result = (call.scope, call.what), "done"
        if call.future is None:
            result = "refused"
        elif not call.future.done():
            self._late[call.scope].append(call.future)
            result = "late"
        elif (flags := call.flags()) is None:
            result = "failed"
        else:
            self.counts[*kind, "found"] += sum(flags)
            self.counts[*kind, "missed"] += len(flags) - sum(flags)
        self.counts[*kind, result] += 1
        self.seconds[kind] += self.clock() - call.began

    def stats(self, record_bytes: Mapping[str, int]) -> StorageStats:
        """The numbers now, from any thread; `record_bytes`: of each scope."""
        pending = {scope: store.pending_bytes for scope, store in self.stores.items()}
        late = {scope: sum(not future.done() for future in list(some)) for scope, some in self._late.items()}
        return StorageStats(dict(self.counts), dict(self.seconds), dict(record_bytes), pending, late)

    def _has_ended(self, call: StoreCall) -> bool:
        return call.future is None or call.future.done() or self.clock() >= call.until
