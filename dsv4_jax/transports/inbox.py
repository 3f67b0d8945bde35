"""Messages that have come and nobody has asked for yet, bounded in bytes. No jax."""

from __future__ import annotations

import threading

__all__ = ["MAX_WAITING", "Inbox"]

MAX_WAITING = 64 << 20  # bytes


class Inbox:
    """Filled by threads, emptied by one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: list[tuple[str, bytes]] = []
        self._bytes = 0

    def put(self, sender: str, message: bytes) -> None:
        """Raises `ValueError` if there is no room."""
        with self._lock:
            if self._bytes + len(message) > MAX_WAITING:
                raise ValueError("nobody reads the messages")
            self._bytes += len(message) + 64
            self._messages.append((sender, message))

    def take(self) -> list[tuple[str, bytes]]:
        with self._lock:
            messages, self._messages, self._bytes = self._messages, [], 0
            return messages
