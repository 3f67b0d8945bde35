"""One read of another host's pages: in pieces, each verified while the next is on its way. Imports no jax."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import RecordMismatchError
from .engine import EngineRead

__all__ = ["PIECE_BYTES", "PIECE_PAGES", "PageRead"]

PIECE_BYTES, PIECE_PAGES = 16 << 20, 4096  # of one piece, at most or one page: its checksums take some milliseconds
_FLYING = 2  # pieces on their way at once, so that the engine works while one is verified
_SPIN, _PAUSE = 2e-3, 2e-4  # seconds: how long a wait looks again and again, and its pauses after that


class PageRead:
    """What a `TransferHandle` of `RecordTransport.read` looks at.

    Args:
        peer: name of the other host.
        source, destination: int32 [n], pages there and here.
        blank: pages here, and from which byte on they are zeros in the end.
        piece: pages of a piece.
        began, until: when it was begun, and has to have ended, by the transport's clock.
        start: begins to copy some of them.
        wrong: given which of a piece, the indices of those in it whose bytes are not what they should be.
        look: asks the transport to `advance` this read, and to end it if that fails or its time is up.
    """

    def __init__(
        self,
        peer: str,
        source: np.ndarray,
        destination: np.ndarray,
        blank: list[tuple[int, int]],
        *,
        piece: int,
        began: float,
        until: float,
        start: Callable[[np.ndarray, np.ndarray], EngineRead],
        wrong: Callable[[slice], list[int]],
        look: Callable[[PageRead], None],
    ):
        self.peer, self.source, self.destination, self.blank = peer, source, destination, blank
        self.written = {*destination.tolist(), *(page for page, _ in blank)}
        self._start, self._wrong, self._look = start, wrong, look
        self._waiting = deque(slice(i, i + piece) for i in range(0, len(source), piece))
        self._flying: deque[tuple[slice, EngineRead]] = deque()
        self._mismatched: list[int] = []
        self.began, self.until = began, until
        self.looked = began  # when somebody looked at it last, as the transport says
        self.is_over = False
        self.error: Exception | None = None

    def advance(self) -> bool:
        """Verifies a piece that has arrived, if one has, and starts others. Whether this was the last. Raises what the
        engine does."""
        self._fill()
        if self._flying and self._flying[0][1].is_done():
            piece, read = self._flying.popleft()
            read.release()
            self._fill()
            self._mismatched += [piece.start + i for i in self._wrong(piece)]
        return not self._flying

    def finish(self, error: Exception | None = None) -> None:
        """It is over: with this error, or as it came."""
        while self._flying:
            self._flying.popleft()[1].release()
        self._waiting.clear()
        if error is None and self._mismatched:
            pairs = self.source[self._mismatched].tolist(), self.destination[self._mismatched].tolist()
            error = RecordMismatchError(self.peer, *pairs)
        self.is_over, self.error = True, error

    def _fill(self) -> None:
        while self._waiting and len(self._flying) < _FLYING:
            piece = self._waiting.popleft()
            self._flying.append((piece, self._start(self.source[piece], self.destination[piece])))

    # What a handle calls.

    def is_ready(self) -> bool:
        if not self.is_over:
            self._look(self)
        return self.is_over

    def block_until_ready(self) -> Any:
        began = time.monotonic()
        while not self.is_ready():
            # No pause at first, which other threads need all the same: an engine's may be among them.
            time.sleep(_PAUSE if time.monotonic() - began > _SPIN else 0)
        if self.error is not None:
            raise copy.copy(self.error) from self.error.__cause__  # it is that of the peer, and of its other reads
