"""Numbers over simulated time, of bounded length: when there are too many samples, every second one goes."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Timeline"]


class Timeline:
    """Samples taken every `stride` steps.

    Args:
        most: samples to keep.
    """

    def __init__(self, most: int = 512):
        self._most, self._stride, self._steps = most, 1, 0
        self._rows: list[dict[str, float]] = []

    @property
    def due(self) -> bool:
        """Whether this step is to be sampled."""
        return self._steps % self._stride == 0

    def tick(self) -> None:
        """The step is over."""
        self._steps += 1

    def add(self, seconds: float, sample: Mapping[str, float], *, last: bool = False) -> None:
        """A sample; the last one is added whether it is due or not."""
        self._rows.append({"seconds": seconds, **sample})
        if len(self._rows) > self._most and not last:
            self._rows = self._rows[::2]
            self._stride *= 2

    def columns(self) -> dict[str, list[float]]:
        """The samples of every name, all of one length."""
        return {name: [row[name] for row in self._rows] for name in self._rows[0]} if self._rows else {}
