"""Every error this package raises on purpose, and what it warns of.

Each class also derives from the builtin a caller would reach for (`ValueError`, `RuntimeError`),
so `except ValueError` keeps working, and every message names what was wrong, where, and the range.
"""

from __future__ import annotations

from typing import Any

from .checks import shown
from .former_names import former_name

__all__ = [
    "CacheError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ContextLimitError",
    "EngineError",
    "ExchangeError",
    "FileError",
    "HandoffError",
    "ImplementationError",
    "IntegrityError",
    "LayoutError",
    "ManagerBusyError",
    "ManagerInterruptedError",
    "NoFreeSlotError",
    "OptionError",
    "OutOfBlocksError",
    "PeerError",
    "PerformanceWarning",
    "PlanError",
    "PoolError",
    "QueueFullError",
    "RecordMismatchError",
    "RequestError",
    "ShapeError",
    "StepError",
    "StoreBusyError",
    "StoreError",
    "StoreFormatError",
    "TraceError",
    "TransferError",
    "TransferTimeoutError",
]


class CacheError(Exception):
    """Base class of all errors of `dsv4_jax`. Copied and pickled they are what they were, without their cause.

    What is raised again and again is a copy: the original would keep the frames of all that it was raised in.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[CacheError], args: tuple[Any, ...]) -> CacheError:
    error = kind.__new__(kind, *args)  # whose `__init__` takes what the message was made of
    error.args = args
    return error


class ConfigError(CacheError, ValueError):
    """A model configuration is missing a field or a field has an impossible value.

    Attributes:
        field: None: of the file as a whole, which the message names.
    """

    def __init__(self, field: str | None, problem: str):
        self.field = field
        super().__init__(problem if field is None else f"config field '{field}': {problem}")


class LayoutError(CacheError, ValueError):
    """A cache layout was asked for that does not exist (format, block size, layer kind)."""


class ShapeError(CacheError, ValueError):
    """An array has the wrong shape or dtype for the operation it was given to."""


class CapacityError(CacheError, ValueError):
    """A capacity question has no answer: too little memory, or too few givens."""


class CheckpointError(CacheError, ValueError):
    """A checkpoint directory is incomplete or does not match its config."""


class OptionError(CacheError, ValueError):
    """An option of the command line or of a benchmark asks for what cannot be. Its cause is the package's own error."""


class FileError(CacheError, OSError):
    """A file that was named cannot be read or written: it is missing or not a regular file, or writing failed."""


class TraceError(CacheError, ValueError):
    """A request trace cannot be read, or cannot be made this way. Names the file, the line and the field."""

    def __init__(self, problem: str, source: str | None = None, line: int | None = None, field: str | None = None):
        self.source, self.line, self.field = source, line, field
        where = (source, None if line is None else f"line {line}", None if field is None else f"field '{field}'")
        prefix = ", ".join(part for part in where if part is not None)
        super().__init__(f"{prefix}: {problem}" if prefix else problem)


class PlanError(CacheError, ValueError):
    """A step or a swap cannot be planned from these arguments, or a plan is of another cache than it is given to."""


class ImplementationError(CacheError, RuntimeError):
    """An implementation of an op does not exist, cannot run here, or its native library cannot be compiled."""


class StepError(CacheError, RuntimeError):
    """A step of the cache is used against its rules: nothing of the step counts.

    A layer was written twice or read before it was written; a plan ran twice or out of order; the cache had been
    donated to another step; index keys and queries do not agree on their rotation; or the step was differentiated.

    Attributes:
        layer: the layer that was used wrongly; None if it is the step as a whole.
    """

    def __init__(self, layer: int | None, problem: str):
        self.layer = layer
        super().__init__(problem if layer is None else f"layer {layer}: {problem}")


class ExchangeError(CacheError, RuntimeError):
    """Devices cannot write into one another's memory, or one of them did not come to an exchange in time."""


class TransferError(CacheError, RuntimeError):
    """A transfer between tiers or hosts was refused or failed. Its cause is the error of the runtime, or of the engine.

    Of records that another host sent, nothing that arrived counts.
    """


class TransferTimeoutError(CacheError, TimeoutError):
    """A transfer between tiers did not end in time. It goes on: wait again."""


class PeerError(TransferError):
    """Another host is gone, does not answer in time, or was disconnected from: nothing comes from it any more."""

    def __init__(self, peer: str, problem: str):
        self.peer = peer
        super().__init__(f"peer {shown(peer)}: {problem}")


class RecordMismatchError(TransferError):
    """Pages arrived with other bytes than their checksums say: torn, or overwritten at their source. Do not use them.

    Attributes:
        sources, destinations: pages of the peer, and where they went; all other pages of the read are as they should.
    """

    def __init__(self, peer: str, sources: list[int], destinations: list[int]):
        self.peer, self.sources, self.destinations = peer, sources, destinations
        pairs = ", ".join(f"{a} -> {b}" for a, b in zip(sources[:8], destinations[:8], strict=True))
        more = ", ..." if len(sources) > 8 else ""
        super().__init__(f"peer {shown(peer)}: {len(sources)} pages do not match their checksums ({pairs}{more})")


class ContextLimitError(PlanError):
    """A request has, or would have, more tokens than one request can ever hold here.

    Attributes:
        request: its id.
        tokens: that it would have.
        limit: tokens that it can hold: by its block table, the model or its `max_tokens`; or all blocks together do.
    """

    def __init__(self, request: object, tokens: int, limit: int, of: str = "the context limit"):
        self.request, self.tokens, self.limit = request, tokens, limit
        super().__init__(f"request {request}: {tokens} tokens exceed {of} of {limit} tokens")


class RequestError(CacheError, ValueError):
    """A request is unknown, released or of another manager; or its tokens, keys or sampling settings are impossible."""


class ManagerInterruptedError(CacheError, RuntimeError):
    """An earlier call of this manager did not come to its end: its books are not trusted. `reset()` begins anew.

    Attributes:
        call: the call that was broken off.
    """

    def __init__(self, call: str, cause: BaseException | None = None):
        self.call = call
        why = "it was broken off" if cause is None else f"{type(cause).__name__}: {cause}"
        super().__init__(f"{call}() of this manager did not come to its end ({why}): only reset() is possible now")


class ManagerBusyError(CacheError, RuntimeError):
    """Another call of this manager is under way. Nothing has changed, that call goes on, and nothing is wrong.

    Attributes:
        call: the call that is under way.
        thread: the name of the thread it is under way in; None: around this call, in the same thread (which is in a
            signal handler, say).
    """

    def __init__(self, call: str, thread: str | None = None):
        self.call, self.thread = call, thread
        where = "around this call" if thread is None else f"in thread {thread!r}"
        super().__init__(f"{call}() of this manager is under way {where}: it takes one call at a time")


class NoFreeSlotError(CacheError, RuntimeError):
    """All request slots are taken."""

    def __init__(self, total: int):
        self.total = total
        super().__init__(f"max concurrent requests exceeded: requested 1 slot, 0 available (of {total} total)")


class OutOfBlocksError(CacheError, RuntimeError):
    """A pool (device blocks, host pages, tokens, states) has too few free units; nothing was taken from it.

    Attributes:
        requested, available, total: numbers of units.
        pool: the pool's name.
    """

    def __init__(self, requested: int, available: int, total: int, pool: str = "device", unit: str = "blocks"):
        self.requested, self.available, self.total, self.pool = requested, available, total, pool
        super().__init__(
            f"KV cache OOM in the {pool} pool: requested {requested} {unit}, {available} available (of {total} total)"
        )


class EngineError(CacheError, RuntimeError):
    """An engine cannot do this now, or any more: it is closed, its device hangs, or calls are under way."""


class QueueFullError(EngineError):
    """As many requests wait as an engine takes on: ask again later.

    Attributes:
        waiting, limit: numbers of requests, or of what the message says.
    """

    def __init__(self, waiting: int, limit: int, what: str = "requests"):
        self.waiting, self.limit = waiting, limit
        super().__init__(f"{waiting} {what} wait already, at most {limit} may")


class PoolError(CacheError, ValueError):
    """A pool was asked for something impossible, such as to release an id that is not held; nothing was changed."""


class HandoffError(CacheError, ValueError):
    """A request cannot be handed over like this: not cached, or what another host sent is nothing to go by here.

    Attributes:
        field: of the hand-off; None: it as a whole.
    """

    def __init__(self, field: str | None, problem: str):
        self.field = field
        super().__init__(f"hand-off: {problem}" if field is None else f"hand-off field '{field}': {problem}")


class StoreError(CacheError, OSError):
    """A store could not do what it was asked: it is closed or full, or storage failed, which is the cause then."""


class StoreFormatError(StoreError, ValueError):
    """A file is not a store of this kind, or was made for other sizes; or keys or records have the wrong size."""


class IntegrityError(CacheError, AssertionError):
    """The manager's own books are wrong, or a call on its prefix tree would make them wrong: a bug, not a misuse."""


class StoreBusyError(StoreError, TimeoutError):
    """A store did not take a call, or end it, in time; or another process has it open. Trying again may help."""


class PerformanceWarning(UserWarning):
    """All works, and slower than it could: no prompt will find a cached prefix, or a GPU has no CUDA library."""


_FORMER = {  # names that were here, for one release: the class that took each over
    "BenchmarkError": "OptionError",
    "BlockReleaseError": "PoolError",
    "BuildError": "ImplementationError",
    "DonatedCacheError": "StepError",
    "ForeignPlanError": "PlanError",
    "GradientError": "StepError",
    "HashError": "RequestError",
    "InputError": "FileError",
    "NoHitsWarning": "PerformanceWarning",
    "NoKernelsWarning": "PerformanceWarning",
    "OutputError": "FileError",
    "PeerMetadataError": "TransferError",
    "PlanOrderError": "StepError",
    "PoolExhaustedError": "OutOfBlocksError",
    "PoolReleaseError": "PoolError",
    "PoolResizeError": "PoolError",
    "PrefixTreeError": "IntegrityError",
    "RecordIdError": "TransferError",
    "RotationError": "StepError",
    "SamplingError": "RequestError",
    "StaleBlockError": "PoolError",
    "StepOrderError": "StepError",
    "StoreClosedError": "StoreError",
    "StoreFullError": "StoreError",
    "StoreLockedError": "StoreBusyError",
    "StoreTimeoutError": "StoreBusyError",
    "SwapPlanError": "PlanError",
    "TransitionError": "IntegrityError",
    "TransportClosedError": "TransferError",
    "TransportError": "TransferError",
}


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
