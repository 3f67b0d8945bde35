"""Whether a manager's books can be trusted: every public call that may change them passes here. Pure Python.

A call that is refused (`REFUSALS`) has changed nothing. Whatever else leaves a call (out of memory, Ctrl-C, a bug)
leaves the books half changed: from then on all calls but `reset()` are refused.
"""

from __future__ import annotations

from types import TracebackType

from ..errors import (
    ContextLimitError,
    HandoffError,
    HashError,
    ManagerInterruptedError,
    NoFreeSlotError,
    OutOfBlocksError,
    PlanError,
    RequestError,
)

__all__ = ["REFUSALS", "Guard"]

REFUSALS = (
    ContextLimitError, HandoffError, HashError, NoFreeSlotError, OutOfBlocksError, PlanError, RequestError,
)  # fmt: skip


class Guard:
    """`with guard("admit_request"): ...` around what one public call changes. Calls do not nest.

    The call is noted before its first change and forgotten after its last, so that there is no instant at which an
    exception could leave half a change behind unseen.
    """

    __slots__ = ("_call", "_cause")

    def __init__(self) -> None:
        self._call: str | None = None
        self._cause: BaseException | None = None

    def __call__(self, call: str) -> Guard:
        """Begins a call. Raises `ManagerInterruptedError` if the one before has not ended."""
        if self._call is not None:
            raise ManagerInterruptedError(self._call, self._cause) from self._cause
        self._call = call
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, REFUSALS):
            self._call = None
        else:
            self._cause = error

    def check(self) -> None:
        """For calls that only read. Raises as a call that changes something."""
        if self._call is not None:
            raise ManagerInterruptedError(self._call, self._cause) from self._cause
