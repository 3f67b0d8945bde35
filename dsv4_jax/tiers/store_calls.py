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
from ..stores import AsyncStore
from ..stores.base import Flags

__all__ = ["MAX_LATE", "StoreCall", "StoreCalls"]

MAX_LATE = 16  # calls past their deadline that a store may still be at before it is asked nothing more


@dataclasses.dataclass(eq=False, slots=True)
class StoreCall:
    """A call of one store, about these keys. No future: it was refused."""

    scope: str
    keys: list[bytes]
    future: Future[Flags] | None
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


class StoreCalls:
    """Makes calls of the stores of some scopes and says which have ended, well, badly or by their deadline.

    Args:
        stores: by scope ("block", "slot").
        clock: what deadlines are measured with, in seconds.
    """

    def __init__(self, stores: Mapping[str, AsyncStore], clock: Callable[[], float] = time.monotonic):
        self.stores, self.clock = dict(stores), clock
        self._late: dict[str, list[Future[Flags]]] = {scope: [] for scope in stores}

    def ask(self, scope: str, what: str, keys: list[bytes], *records: Any, within: float) -> StoreCall:
        """Makes the call `what` of a store, if it takes it at once.

        One that hangs is asked nothing more while `MAX_LATE` calls to it are late.
        """
        late = self._late[scope] = [future for future in self._late[scope] if not future.done()]
        future, until = None, self.clock() + within
        if len(late) < MAX_LATE:
            with contextlib.suppress(StoreError):  # busy, or closed
                future = getattr(self.stores[scope], what)(keys, *records, timeout=0)
        return StoreCall(scope, keys, future, until)

    def take_ended(self, items: list[Any]) -> Iterator[Any]:
        """Takes those out of the list, one by one, all of whose `calls` have ended or are out of time."""
        for item in list(items):
            if all(self._has_ended(call) for call in item.calls):
                items.remove(item)
                for call in item.calls:
                    if call.future is not None and not call.future.done():
                        self._late[call.scope].append(call.future)
                yield item

    def _has_ended(self, call: StoreCall) -> bool:
        return call.future is None or call.future.done() or self.clock() >= call.until
