"""Bytes between hosts, over simulated time. Pure Python.

What is modelled: each host has a card that takes `bandwidth` bytes a second in and as many out. Of n transfers through
one end each gets an nth of it, and goes as fast as the slower one of its two ends lets it (what an end has left over is
not given to others). A transfer begins `latency` seconds after it was asked for, and so late arrives a message, which
takes no bandwidth. The switch between the cards never is in the way; no packet is lost.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable

from ..errors import TraceError

__all__ = ["Link", "Network"]


@dataclasses.dataclass(frozen=True)
class Link:
    """The network card of every host.

    Attributes:
        bandwidth: bytes per second, in and out each; may be infinite.
        latency: seconds, of a message and before each transfer.

    Raises:
        TraceError: the bandwidth is not above 0, or the latency negative, infinite or no number.
    """

    bandwidth: float = 50e9
    latency: float = 100e-6

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise TraceError(f"{self.bandwidth} is not a bandwidth above 0", field="bandwidth")
        if not 0 <= self.latency < math.inf:
            raise TraceError(f"{self.latency} is not a time of at least 0", field="latency")


@dataclasses.dataclass(eq=False, slots=True)
class _Transfer:
    source: int
    target: int
    left: float  # seconds that it would take alone
    done: Callable[[], object]


class Network:
    """The transfers between hosts, which are numbers, and how they share bandwidth.

    Args:
        link: of every host.
        at: `(seconds, call)`: calls then, in simulated time.

    Attributes:
        sent, received: bytes, by host.
    """

    def __init__(self, link: Link, at: Callable[[float, Callable[[], object]], object]):
        self.link, self._at = link, at
        self._transfers: dict[_Transfer, None] = {}  # in the order they began
        self._now, self._changes = 0.0, 0
        self.sent, self.received = collections.Counter[int](), collections.Counter[int]()

    def transfer(self, now: float, source: int, target: int, count: int, done: Callable[[], object]) -> None:
        """Moves `count` bytes; calls `done` when they are there."""
        self.sent[source] += count
        self.received[target] += count
        moved = _Transfer(source, target, count / self.link.bandwidth, done)
        start = now + self.link.latency
        self._at(start, lambda: self._begin(start, moved))

    def _begin(self, now: float, moved: _Transfer) -> None:
        self._advance(now)
        self._transfers[moved] = None
        self._go_on()

    def _shares(self) -> dict[_Transfer, int]:
        """Returns the n of each transfer: an nth of the bandwidth is its own."""
        out = collections.Counter(moved.source for moved in self._transfers)
        into = collections.Counter(moved.target for moved in self._transfers)
        return {moved: max(out[moved.source], into[moved.target]) for moved in self._transfers}

    def _advance(self, now: float) -> None:
        for moved, share in self._shares().items():
            moved.left = max(moved.left - (now - self._now) / share, 0.0)
        self._now = now

    def _go_on(self) -> None:
        """Waits for the transfer that ends next, unless another one begins before."""
        self._changes += 1
        if not self._transfers:
            return
        ends = {moved: self._now + moved.left * share for moved, share in self._shares().items()}
        first, change = min(ends.values()), self._changes
        over = [moved for moved, end in ends.items() if end == first]

        def end() -> None:
            if change == self._changes:
                self._advance(first)
                for moved in over:
                    del self._transfers[moved]
                self._go_on()
                for moved in over:
                    moved.done()

        self._at(first, end)
