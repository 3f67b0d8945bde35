"""Messages that have come and nobody has asked for yet: bounded for each sender and for all of them. Pure Python.

A sender that has filled its share waits, or loses what it sends; others lose nothing by it. When all have filled the
whole, whoever has most there gives way to those that have less.
"""

from __future__ import annotations

import collections
import threading
import time

__all__ = ["MAX_AT_ONCE", "MAX_OF_ONE", "MAX_WAITING", "Inbox"]

MAX_WAITING = 64 << 20  # bytes, of all senders
MAX_OF_ONE = 8 << 20  # bytes, of one
MAX_AT_ONCE = 256  # messages that `take` returns
_OVERHEAD = 256  # bytes that a message takes beside its own


class _Queue:
    def __init__(self) -> None:
        self.messages: collections.deque[bytes] = collections.deque()
        self.bytes = 0


class Inbox:
    """Filled by threads, emptied by one.

    Args:
        total, of_one: bytes, of all senders and of one; a message counts 256 more than it has.

    Attributes:
        dropped: messages that were lost as there was no room.
    """

    def __init__(self, total: int = MAX_WAITING, of_one: int = MAX_OF_ONE) -> None:
        self._total, self._of_one = total, of_one
        self._changed = threading.Condition()
        self._queues: dict[str, _Queue] = {}  # in turn
        self._bytes = 0
        self._closed = False
        self.dropped = 0

    def put(self, sender: str, message: bytes, *, wait: float = 0.0) -> bool:
        """Whether there was room for it. It goes behind all others of this sender.

        Args:
            wait: seconds for which a sender that has filled its share waits for room.
        """
        need, until = len(message) + _OVERHEAD, time.monotonic() + wait
        with self._changed:
            while not self._makes_room(sender, need):
                left = until - time.monotonic()
                if left <= 0 or self._closed:
                    self.dropped += 1
                    return False
                self._changed.wait(left)
            queue = self._queues.setdefault(sender, _Queue())
            queue.messages.append(message)
            queue.bytes += need
            self._bytes += need
            return True

    def take(self, limit: int = MAX_AT_ONCE) -> list[tuple[str, bytes]]:
        """At most so many messages, each sender's in its order, and of each in turn."""
        taken: list[tuple[str, bytes]] = []
        with self._changed:
            while self._queues and len(taken) < limit:
                sender = next(iter(self._queues))
                queue = self._queues.pop(sender)
                message = queue.messages.popleft()
                queue.bytes -= len(message) + _OVERHEAD
                self._bytes -= len(message) + _OVERHEAD
                taken.append((sender, message))
                if queue.messages:
                    self._queues[sender] = queue  # behind the others
            if taken:
                self._changed.notify_all()
        return taken

    def close(self) -> None:
        """Nobody waits for room any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _makes_room(self, sender: str, need: int) -> bool:
        """Whether there is room now, if need be at the cost of the sender that has most here."""
        mine = queue.bytes if (queue := self._queues.get(sender)) is not None else 0
        if mine + need > self._of_one:
            return False
        while self._bytes + need > self._total:
            most = max(self._queues, key=lambda name: self._queues[name].bytes, default=sender)
            if most == sender or self._queues[most].bytes <= mine + need:
                return False
            self._drop_last(most)
        return True

    def _drop_last(self, sender: str) -> None:
        queue = self._queues[sender]
        size = len(queue.messages.pop()) + _OVERHEAD
        queue.bytes -= size
        self._bytes -= size
        self.dropped += 1
        if not queue.messages:
            del self._queues[sender]
