"""Time for tests: a clock that goes on when told to, and how long a test waits before it calls something hung."""

from __future__ import annotations

__all__ = ["PATIENCE", "FakeClock"]

PATIENCE = 300  # seconds; more than the slowest machine needs


class FakeClock:
    """Stands for `time.monotonic`."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
