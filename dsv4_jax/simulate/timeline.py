"""Numbers over simulated time, of bounded length: when there are too many samples, every second one goes."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Timeline"]


class Timeline:
    """Samples taken every `stride` steps.

    Args:
        samples: how many to keep.
    """

    def __init__(self, samples: int = 512):
        self._limit, self._stride, self._steps = samples, 1, 0
        self._rows: list[dict[str, float]] = []

    @property
    def due(self) -> bool:
        """Whether this step is to be sampled."""
        return self._steps % self._stride == 0

    def tick(self) -> None:
        """Counts a step that is over."""
        self._steps += 1

    def add(self, seconds: float, sample: Mapping[str, float], *, last: bool = False) -> None:
        """Adds a sample; the last one whether it is due or not."""
        self._rows.append({"seconds": seconds, **sample})
        if len(self._rows) > self._limit and not last:
            self._rows = self._rows[::2]
            self._stride *= 2

    def columns(self) -> dict[str, list[float]]:
        """The samples of every name, all of one length."""
        return {name: [row[name] for row in self._rows] for name in self._rows[0]} if self._rows else {}
