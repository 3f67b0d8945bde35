"""Every error this package raises on purpose, and what it warns of.

Each class also derives from the builtin a caller would reach for (`ValueError`, `RuntimeError`),
so `except ValueError` keeps working, and every message names what was wrong, where, and the range.
"""

from __future__ import annotations

from .checks import shown

__all__ = [
    "BenchmarkError",
    "BlockReleaseError",
    "BuildError",
    "CacheError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ContextLimitError",
    "DonatedCacheError",
    "ExchangeError",
    "ForeignPlanError",
    "GradientError",
    "HandoffError",
    "HashError",
    "ImplementationError",
    "InputError",
    "IntegrityError",
    "LayoutError",
    "ManagerBusyError",
    "ManagerInterruptedError",
    "NoFreeSlotError",
    "NoHitsWarning",
    "NoKernelsWarning",
    "OptionError",
    "OutOfBlocksError",
    "OutputError",
    "PeerError",
    "PeerMetadataError",
    "PlanError",
    "PlanOrderError",
    "PoolError",
    "PoolExhaustedError",
    "PoolReleaseError",
    "PoolResizeError",
    "PrefixTreeError",
    "RecordIdError",
    "RecordMismatchError",
    "RequestError",
    "RotationError",
    "SamplingError",
    "ShapeError",
    "StaleBlockError",
    "StepOrderError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreLockedError",
    "StoreTimeoutError",
    "SwapPlanError",
    "TraceError",
    "TransferError",
    "TransferTimeoutError",
    "TransitionError",
    "TransportClosedError",
    "TransportError",
]


class CacheError(Exception):
    """Base class of all errors of `dsv4_jax`."""


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


class SamplingError(CacheError, ValueError):
    """Tokens cannot be drawn this way: a setting is out of range, or randomness was asked for without keys."""


class ImplementationError(CacheError, RuntimeError):
    """The requested implementation of an op does not exist or cannot run here."""


class BuildError(CacheError, RuntimeError):
    """A native library cannot be compiled: a tool is missing or failed. Says what to install or which log to read."""


class TraceError(CacheError, ValueError):
    """A request trace cannot be read, or cannot be made this way. Names the file, the line and the field."""

    def __init__(self, problem: str, source: str | None = None, line: int | None = None, field: str | None = None):
        self.source, self.line, self.field = source, line, field
        where = (source, None if line is None else f"line {line}", None if field is None else f"field '{field}'")
        prefix = ", ".join(part for part in where if part is not None)
        super().__init__(f"{prefix}: {problem}" if prefix else problem)


class OptionError(CacheError, ValueError):
    """An option of the command line asks for what cannot be. Names the option; its cause is the package's own error."""


class InputError(CacheError, OSError):
    """A file that was named to be read cannot be: there is none, or it is not a regular file."""


class OutputError(CacheError, OSError):
    """A file cannot be written where it was asked for: the place is no regular file's, or writing failed."""


class BenchmarkError(CacheError, ValueError):
    """A benchmark was asked for that does not exist, or cannot be run or drawn here."""


class PlanError(CacheError, ValueError):
    """A step cannot be planned from these tokens."""


class ForeignPlanError(PlanError):
    """A plan was given to a cache of another layout or size than it was made for."""

    def __init__(self, plan: str, cache: str):
        self.plan, self.cache = plan, cache
        super().__init__(f"the plan is for another cache: it was made for {plan}; this cache has {cache}")


class PlanOrderError(PlanError):
    """A step of a checked cache began elsewhere than the one before it ended: plans run once, in the order made.

    Attributes:
        slot: of the (data shard's) cache.
        start: at which the plan says the sequence stands.
        length: tokens that the slot's steps have computed; with drafts it could stand 1 + `draft_tokens` before it.
    """

    def __init__(self, slot: int, start: int, length: int):
        self.slot, self.start, self.length = slot, start, length
        super().__init__(
            f"a step began at token {start} of slot {slot}, which has {length} tokens: a plan ran twice, was left out "
            "or ran out of order, a loop ran other steps than the manager knows of, or a row that it counts was fed -1"
        )


class StepOrderError(CacheError, RuntimeError):
    """A layer was written twice in a step, read before it was written, or its writes did not reach the step's end."""

    def __init__(self, layer: int, problem: str):
        self.layer = layer
        order = "the order of a layer in a step is append and compress (with its index), once each, then reads"
        super().__init__(f"layer {layer}: {problem} ({order})")


class DonatedCacheError(CacheError, RuntimeError):
    """A cache was used after it was given away: the step it was donated to returned the one to go on with."""

    def __init__(self) -> None:
        super().__init__(
            "this cache was donated to a jitted step, which updated its arrays in place: go on with the cache that "
            "the step returned (logits, cache = step(params, cache, plan, tokens))"
        )


class RotationError(CacheError, ValueError):
    """Rows are rotated by a Hadamard matrix that are no index keys, or these and index queries do not agree on it.

    Attributes:
        keys, queries: whether they are rotated; None of other rows.
    """

    def __init__(self, layer: int, problem: str, keys: bool | None = None, queries: bool | None = None):
        self.layer, self.keys, self.queries = layer, keys, queries
        super().__init__(f"layer {layer}: {problem}")


class GradientError(CacheError, TypeError):
    """A step of the cache was differentiated: what it stores and reads has no derivative."""

    def __init__(self) -> None:
        super().__init__(
            "a step of the cache has no gradient, as its rows are stored as codes and read by other steps: "
            "differentiate a forward without a cache (such as dsv4_jax.model.forward_uncached), or what follows the "
            "step, with jax.lax.stop_gradient around all that goes into it"
        )


class ExchangeError(CacheError, RuntimeError):
    """Devices cannot write into one another's memory, or one of them did not come to an exchange in time."""


class SwapPlanError(PlanError):
    """A swap cannot be planned from these ids. Names the side ("device" or "host"), the index and the value."""

    def __init__(self, problem: str, side: str | None = None, index: int | None = None, value: object = None):
        self.side, self.index, self.value = side, index, value
        super().__init__(problem if side is None else f"{side} id {value!r} at index {index} {problem}")


class TransferError(CacheError, RuntimeError):
    """A transfer between tiers failed; its cause is the error of the runtime."""


class TransferTimeoutError(CacheError, TimeoutError):
    """A transfer between tiers did not end in time. It goes on: wait again."""


class TransportError(TransferError):
    """Records could not go between hosts; nothing that arrived counts. Its cause is the error of the engine, if any."""


class TransportClosedError(TransportError):
    """A transport was used after `close()`."""


class PeerError(TransportError):
    """Another host is gone, does not answer in time, or was disconnected from: nothing comes from it any more."""

    def __init__(self, peer: str, problem: str):
        self.peer = peer
        super().__init__(f"peer {shown(peer)}: {problem}")


class PeerMetadataError(TransportError, ValueError):
    """What another host is said to publish cannot be read: too long, no JSON, or not of this form and engine."""


class RecordIdError(TransportError, ValueError):
    """Pages cannot be read from or to these ids; nothing was. Names the side ("source" or "destination")."""

    def __init__(self, problem: str, side: str | None = None, index: int | None = None, value: object = None):
        self.side, self.index, self.value = side, index, value
        super().__init__(problem if side is None else f"{side} page {shown(value)} at index {index} {problem}")


class RecordMismatchError(TransportError):
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
    """A request is unknown, already released, or belongs to another manager."""


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
    """The block pool cannot serve a request; nothing was taken from it."""

    def __init__(self, requested: int, available: int, total: int, pool: str = "device"):
        self.requested, self.available, self.total, self.pool = requested, available, total, pool
        super().__init__(
            f"KV cache OOM in the {pool} pool: requested {requested} blocks, {available} available (of {total} total)"
        )


class BlockReleaseError(CacheError, ValueError):
    """A block id was released that is not held: released twice, null, or out of range."""

    def __init__(self, block: object, problem: str, total: int):
        self.block, self.total = block, total
        super().__init__(f"cannot release block {shown(block)}: {problem} (valid ids are 1..{total})")


class PoolResizeError(CacheError, ValueError):
    """A pool cannot shrink: ids beyond its new end are held."""

    def __init__(self, held: list[int], total: int, pool: str = "device"):
        self.held, self.total, self.pool = held, total, pool
        more = ", ..." if len(held) > 8 else ""
        ids = ", ".join(map(str, held[:8]))
        super().__init__(f"cannot resize the {pool} pool to {total} blocks: {len(held)} held beyond it ({ids}{more})")


class StaleBlockError(CacheError, RuntimeError):
    """A block was named by an older generation: it was released since, and may be someone else's."""


class HandoffError(CacheError, ValueError):
    """A request cannot be handed over like this: not cached, or what another host sent is nothing to go by here.

    Attributes:
        field: of the hand-off; None: it as a whole.
    """

    def __init__(self, field: str | None, problem: str):
        self.field = field
        super().__init__(f"hand-off: {problem}" if field is None else f"hand-off field '{field}': {problem}")


class HashError(CacheError, ValueError):
    """Tokens or keys have no canonical bytes: an id out of range, or a value of an unknown type."""


class PrefixTreeError(CacheError, ValueError):
    """A prefix-tree node is not of this tree, or an operation would break its order or its references."""


class TransitionError(PrefixTreeError):
    """A node cannot go from its state to the one asked for, or not while its parent or children are where they are."""


class PoolError(CacheError, ValueError):
    """A token or state pool (`dsv4_jax.pools`) was asked for something impossible; nothing was changed."""


class PoolExhaustedError(CacheError, RuntimeError):
    """A token or state pool has too few free units; nothing was taken from it."""

    def __init__(self, requested: int, available: int, total: int, unit: str):
        self.requested, self.available, self.total, self.unit = requested, available, total, unit
        super().__init__(f"requested {requested} {unit}, {available} available (of {total} total)")


class PoolReleaseError(CacheError, ValueError):
    """An id was given back to a token or state pool that does not hold it as taken; nothing was freed."""

    def __init__(self, unit: str, ids: object, problem: str, valid: str):
        self.ids = ids
        super().__init__(f"cannot free {unit} {ids}: {problem} (valid ids are {valid})")


class IntegrityError(CacheError, AssertionError):
    """A `check_integrity()` found the manager's own books wrong: a bug, not a misuse."""


class StoreError(CacheError, OSError):
    """The storage tier could not do what it was asked; the operating system's error, if any, is the cause."""


class StoreClosedError(StoreError):
    """A store was used after `close()`."""


class StoreLockedError(StoreError):
    """Another process (or another object of this one) has the store open."""


class StoreFullError(StoreError):
    """The disk is full, or a batch needs more room than the store has."""


class StoreBusyError(StoreError):
    """Back-pressure: a request did not fit the queue within its time limit. Nothing was accepted."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A store did not answer in time. What it was asked may still happen."""


class StoreFormatError(StoreError, ValueError):
    """A file is not a store of this kind, or was made for other sizes; or keys or records have the wrong size."""


class NoHitsWarning(UserWarning):
    """A cache is to keep prefixes, and next to no prompt will find any: a hit ends where a state was kept."""


class NoKernelsWarning(UserWarning):
    """There is an NVIDIA GPU and no CUDA library that it can use: slower implementations run. Said once."""
