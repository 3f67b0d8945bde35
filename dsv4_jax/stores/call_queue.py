"""The order of `AsyncStore`'s calls: per key as they were made, else as there is a thread. Takes no lock."""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import Future

from .base import Flags

__all__ = ["CallQueue", "QueuedCall"]


class QueuedCall:
    """One accepted call: it runs when the earlier calls that share a key with it are done."""

    def __init__(self, work: Callable[[], Flags], keys: set[bytes], size: int):
        self.work, self.keys, self.size = work, keys, size
        self.future: Future[Flags] = Future()
        self.future.set_running_or_notify_cancel()  # accepted is accepted: it can no longer be cancelled
        self.waits_for = 0
        self.followers: list[QueuedCall] = []


class CallQueue:
    """Calls that wait, and those that run.

    Attributes:
        ready: calls that may run now, the oldest first. Whoever takes one out runs it, then calls `end`.
        last: the latest unfinished call of each key.
    """

    def __init__(self) -> None:
        self.ready: collections.deque[QueuedCall] = collections.deque()
        self.last: dict[bytes, QueuedCall] = {}

    def put(self, call: QueuedCall) -> None:
        """Puts a call behind the latest ones that share a key with it: wholly, or not at all."""
        latest = {key: self.last.get(key) for key in call.keys}
        earlier = {id(other): other for other in latest.values() if other is not None}
        try:
            self.last.update(dict.fromkeys(call.keys, call))
            for other in earlier.values():
                other.followers.append(call)
            call.waits_for = len(earlier)
            if not earlier:
                self.ready.append(call)
        except BaseException:
            for key, other in latest.items():
                if other is None:
                    self.last.pop(key, None)
                else:
                    self.last[key] = other
            for queue in (self.ready, *(other.followers for other in earlier.values())):
                if call in queue:
                    queue.remove(call)
            raise

    def end(self, call: QueuedCall) -> None:
        """Lets those be ready that waited for this call alone."""
        for key in call.keys:
            if self.last.get(key) is call:
                del self.last[key]
        for follower in call.followers:
            follower.waits_for -= 1
            if not follower.waits_for:
                self.ready.append(follower)
