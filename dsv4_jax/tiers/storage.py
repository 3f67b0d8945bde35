"""Moves host records to and from block stores, as the manager's `StorageTier` plans it, beside the steps.

    driver = StorageDriver(manager, AsyncStore(blocks), AsyncStore(snapshots))
    driver.prefetch(prompt)                          # when a request arrives, before it is admitted
    ...
    cache, host = run_transfers(cache, host, manager.take_transfers())
    host = driver.poll(host)                         # what has arrived goes to its host records
    driver.save(host)                                # what is new on the host goes to storage

Nothing here waits but `drain`, and that no longer than the deadlines: a store that is busy is asked again later, or not
at all; one that fails, hangs or answers nonsense does not have the record. Records are copied out of the host pool in
one computation before their bytes go to a store, and into it in one before the manager may use them: the pool itself
stays the program's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from ..errors import StoreError, StoreFormatError
from ..manager import KVCacheManager, MediaItem, Namespace
from ..manager.storage_tier import Contains, StorageMove, StorageTier
from .async_store import AsyncStore
from .host import HostCache
from .records import block_record, snapshot_record
from .staging import gather_records, scatter_records
from .store import Flags, check_seconds

__all__ = ["Prefetch", "StorageDriver"]

_POOLS = {"block": "blocks", "slot": "snapshots"}  # scope -> field of HostCache
_MOST_STAGED = 8  # calls of `save` whose records wait in memory for room in a store
_MOST_LATE = 16  # calls past their deadline that a store may still be at before it is asked nothing more


@dataclasses.dataclass(eq=False, slots=True)
class Prefetch:
    """What becomes of a `StorageDriver.prefetch`.

    Attributes:
        done: whether nothing more will come of it: time to admit the request.
        records: how many came to the host.
    """

    done: bool = False
    records: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class _Staged:
    """Records on their way out of the host pool, for a store."""

    moves: list[StorageMove]
    records: Any  # [N, record bytes] uint8 array in host memory
    until: float


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """A call of one store, about these keys. No future: it was refused."""

    scope: str
    keys: list[bytes]
    future: Future[Flags] | None
    until: float

    def flags(self) -> list[bool] | None:
        """What it has answered; None if nothing, an error or nonsense."""
        if self.future is None or not self.future.done() or self.future.exception() is not None:
            return None
        flags = self.future.result()
        return [bool(flag) for flag in flags] if np.shape(flags) == (len(self.keys),) else None


@dataclasses.dataclass(eq=False, slots=True)
class _Lookup:
    digests: list[bytes]
    generation: int  # of the manager
    calls: list[_Call]
    prefetch: Prefetch


@dataclasses.dataclass(eq=False, slots=True)
class _Write:
    moves: list[StorageMove]
    calls: list[_Call]


@dataclasses.dataclass(eq=False, slots=True)
class _Read:
    moves: list[StorageMove]
    calls: list[_Call]
    buffers: dict[str, np.ndarray]  # by scope: [n, record bytes]
    prefetch: Prefetch


class StorageDriver:
    """See the module.

    Args:
        manager: with a host tier.
        blocks: store of block records, under the digests of `manager` (32 bytes).
        snapshots: store of snapshot records. None: only blocks are written, and nothing is ever found
            again, as a hit needs a snapshot; for tests and for filling a store that others read.
        lookup_deadline: seconds that a store has to say what it has of a prompt.
        deadline: seconds that it has to read or write records. What takes longer has failed; its memory is kept until
            it has ended all the same, and a store with many such calls is asked nothing more meanwhile.

    Raises:
        StoreFormatError: a store has other record or key sizes than the layout; a deadline that is none.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        blocks: AsyncStore,
        snapshots: AsyncStore | None,
        *,
        lookup_deadline: float = 2.0,
        deadline: float = 30.0,
    ):
        layout = manager.layout
        self._stores = {"block": blocks, **({"slot": snapshots} if snapshots is not None else {})}
        sizes = {"block": block_record(layout).bytes, "slot": snapshot_record(layout).bytes}
        for scope, store in self._stores.items():
            have, want = (store.store.record_bytes, store.store.key_bytes), (sizes[scope], 32)
            if have != want:
                raise StoreFormatError(f"{scope} store: (record, key) bytes are {have}, expected {want}")
        self._lookup_deadline = check_seconds("lookup_deadline", lookup_deadline)
        self._deadline = check_seconds("deadline", deadline)
        self._manager, self.tier = manager, StorageTier(manager)
        self._staged: list[_Staged] = []
        self._writes: list[_Write] = []
        self._lookups: list[_Lookup] = []
        self._reads: list[_Read] = []
        self._late: dict[str, list[Future[Flags]]] = {scope: [] for scope in self._stores}

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._staged or self._writes or self._lookups or self._reads)

    def save(self, host: HostCache, limit: int = 64) -> int:
        """Starts up to `limit` records on their way to storage; returns how many. Call it after `run_transfers`.

        None while much of what it started before still waits for room in a store.
        """
        if len(self._staged) >= _MOST_STAGED:
            return 0
        moves = [move for move in self.tier.plan_writes(limit) if move.scope in self._stores]
        until = time.monotonic() + self._deadline
        try:
            for scope in self._stores:
                some = [move for move in moves if move.scope == scope]
                if some:
                    self._staged.append(_Staged(some, _read(getattr(host, _POOLS[scope]), _padded(some)), until))
        finally:
            # The copy out comes before whatever runs next on the pool, so its records are free to go: a store that
            # hangs must not hold them. `poll` tells the manager when storage has them.
            self.tier.finish_writes(moves, [False] * len(moves))
        return len(moves)

    def prefetch(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
    ) -> Prefetch:
        """Starts fetching what storage has of this prompt; `poll` goes on with it.

        It asks the stores and returns at once, whatever they do. Raises `HashError` (of what it was given), nothing
        else.
        """
        digests = self.tier.digests(tokens, namespace=namespace, items=items)
        prefetch = Prefetch(done=not digests)
        if digests:
            calls = [self._ask(scope, "contains", digests, within=self._lookup_deadline) for scope in self._stores]
            self._lookups.append(_Lookup(digests, self._manager.generation, calls, prefetch))
        return prefetch

    def poll(self, host: HostCache) -> HostCache:
        """Takes up everything that has ended; `host` is donated: use the one returned. Call it after `run_transfers`.

        A store that fails, or is past its deadline, counts as one that does not have the record.
        """
        for staged in list(self._staged):
            self._send(staged)
        for write in self._take_ended(self._writes):
            if write.calls[0].flags() is not None:  # of these, False: storage had the key before
                self.tier.finish_writes(write.moves, [True] * len(write.moves))
        for read in self._take_ended(self._reads):
            host = self._land(host, read)
        for lookup in self._take_ended(self._lookups):
            self._fetch(lookup)
        return host

    def drain(self, host: HostCache) -> HostCache:
        """`poll` until nothing is under way."""
        while self.busy:
            host = self.poll(host)
            time.sleep(1e-4)
        return host

    # Calls of the stores

    def _ask(self, scope: str, what: str, keys: list[bytes], *records: Any, within: float) -> _Call:
        """Makes a call, if the store takes it at once."""
        late = self._late[scope] = [future for future in self._late[scope] if not future.done()]
        future, until = None, time.monotonic() + within
        if len(late) < _MOST_LATE:
            with contextlib.suppress(StoreError):  # busy, or closed
                future = getattr(self._stores[scope], what)(keys, *records, timeout=0)
        return _Call(scope, keys, future, until)

    def _take_ended(self, items: list[Any]) -> Iterable[Any]:
        """Takes those out of the list, one by one, whose calls have ended or are out of time."""
        for item in list(items):
            if all(self._has_ended(call) for call in item.calls):
                items.remove(item)
                for call in item.calls:
                    if call.future is not None and not call.future.done():
                        self._late[call.scope].append(call.future)
                yield item

    def _has_ended(self, call: _Call) -> bool:
        return call.future is None or call.future.done() or time.monotonic() >= call.until

    # To storage

    def _send(self, item: _Staged) -> None:
        """Hands records to their store; one that takes none until the deadline does not get them."""
        if not item.records.is_ready():
            return
        scope, keys = item.moves[0].scope, [move.key for move in item.moves]
        try:
            records = np.asarray(item.records)[: len(keys)]
        except BaseException:  # the copy out failed
            self._staged.remove(item)
            raise
        call = self._ask(scope, "write", keys, records, within=self._deadline)
        if call.future is not None:
            self._writes.append(_Write(item.moves, [call]))
        if call.future is not None or time.monotonic() >= item.until:
            self._staged.remove(item)

    # From storage

    def _fetch(self, lookup: _Lookup) -> None:
        """Plans with what the stores have said, and has them read."""
        lookup.prefetch.done = True
        if lookup.generation != self._manager.generation:  # of before a `reset`
            return
        known = {call.scope: _known(call) for call in lookup.calls}
        nothing = _known(None)
        moves = self.tier.plan_fetch(lookup.digests, known.get("block", nothing), known.get("slot", nothing))
        if not moves:
            return
        lookup.prefetch.done = False
        read = _Read(moves, [], {}, lookup.prefetch)
        self._reads.append(read)  # whatever happens now, `poll` tells the manager what became of these moves
        for scope, store in self._stores.items():
            keys = [move.key for move in moves if move.scope == scope]
            if keys:
                buffers = read.buffers[scope] = np.empty((len(keys), store.store.record_bytes), np.uint8)
                read.calls.append(self._ask(scope, "read_into", keys, buffers, within=self._deadline))

    def _land(self, host: HostCache, item: _Read) -> HostCache:
        """Puts what was read into its host records, then tells the manager."""
        arrived: dict[StorageMove, bool] = {}
        fields = {}
        item.prefetch.done = True
        try:
            for call in item.calls:
                moves = [move for move in item.moves if move.scope == call.scope]
                done = call.flags() or [False] * len(moves)
                good = [i for i, read_it in enumerate(done) if read_it and self.tier.is_current(moves[i])]
                if good:
                    ids = _padded([moves[i] for i in good])
                    records = np.zeros((len(ids), item.buffers[call.scope].shape[1]), np.uint8)
                    records[: len(good)] = item.buffers[call.scope][good]
                    field = _POOLS[call.scope]
                    fields[field] = _write(getattr(host, field), records, ids)
                arrived.update(zip(moves, done, strict=True))
        except BaseException:
            self.tier.finish_reads(item.moves, [False] * len(item.moves), lost=False)
            raise
        answered = {call.scope for call in item.calls if call.flags() is not None} == {m.scope for m in item.moves}
        self.tier.finish_reads(item.moves, [arrived.get(move, False) for move in item.moves], lost=answered)
        item.prefetch.records = sum(self._is_on_host(move) for move in item.moves)
        return HostCache(fields.get("blocks", host.blocks), fields.get("snapshots", host.snapshots), host.layout)

    def _is_on_host(self, move: StorageMove) -> bool:
        holder = move.node if move.scope == "block" else move.node.snapshot
        return self.tier.is_current(move) and holder is not None and holder.host == move.record


def _known(call: _Call | None) -> Contains:
    """What a look-up found, as the manager asks for it; nothing if there was none, or it failed."""
    flags = None if call is None else call.flags()
    found = set() if call is None or flags is None else {key for key, has in zip(call.keys, flags, strict=True) if has}
    return lambda keys: [key in found for key in keys]


def _padded(moves: list[StorageMove]) -> np.ndarray:
    """The record ids, padded with null to a power of two: few executables for all lengths."""
    ids = np.zeros(1 << (len(moves) - 1).bit_length(), np.int32)
    ids[: len(moves)] = [move.record for move in moves]
    return ids


_read = jax.jit(gather_records)
_write = jax.jit(scatter_records, donate_argnums=0)
