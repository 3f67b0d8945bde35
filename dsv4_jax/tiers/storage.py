"""Moves host records to and from block stores, as the manager's `StorageTier` plans it, beside the steps.

    driver = StorageDriver(manager, AsyncStore(blocks), AsyncStore(snapshots))
    driver.prefetch(prompt)                          # when a request arrives, before it is admitted
    ...
    cache, host = run_transfers(cache, host, manager.take_transfers())
    host = driver.poll(host)                         # what has arrived goes to its host records
    driver.save(host)                                # what is new on the host goes to storage

Nothing here waits but `drain`: a store that is busy is asked again later, or not at all. Records are
copied out of the host pool in one computation before their bytes go to a store, and into it in one before
the manager may use them: the pool itself stays the program's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import StoreBusyError, StoreFormatError
from ..manager import KVCacheManager, MediaItem, Namespace
from ..manager.storage_tier import StorageMove, StorageTier
from .async_store import AsyncStore
from .host import HostCache
from .records import block_record, snapshot_record
from .staging import gather_records, scatter_records
from .store import Flags

__all__ = ["StorageDriver"]

_POOLS = {"block": "blocks", "slot": "snapshots"}  # scope -> field of HostCache


class _Write(NamedTuple):
    moves: list[StorageMove]
    staged: Any  # [N, record bytes] uint8 array in host memory


class _Read(NamedTuple):
    moves: list[StorageMove]
    buffers: dict[str, np.ndarray]  # by scope: [n, record bytes]
    futures: dict[str, Future[Flags]]


class StorageDriver:
    """See the module.

    Args:
        manager: with a host tier.
        blocks: store of block records, under the digests of `manager` (32 bytes).
        snapshots: store of snapshot records. None: only blocks are written, and nothing is ever found
            again, as a hit needs a snapshot; for tests and for filling a store that others read.

    Raises:
        StoreFormatError: a store has other record or key sizes than the layout.
    """

    def __init__(self, manager: KVCacheManager, blocks: AsyncStore, snapshots: AsyncStore | None):
        layout = manager.layout
        self._stores = {"block": blocks, **({"slot": snapshots} if snapshots is not None else {})}
        sizes = {"block": block_record(layout).bytes, "slot": snapshot_record(layout).bytes}
        for scope, store in self._stores.items():
            have, want = (store.store.record_bytes, store.store.key_bytes), (sizes[scope], 32)
            if have != want:
                raise StoreFormatError(f"{scope} store: (record, key) bytes are {have}, expected {want}")
        self.tier = StorageTier(manager)
        self._staged: list[_Write] = []
        self._writes: list[tuple[list[StorageMove], Future[Flags]]] = []
        self._reads: list[_Read] = []

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._staged or self._writes or self._reads)

    def save(self, host: HostCache, limit: int = 64) -> int:
        """Starts up to `limit` records on their way to storage; returns how many. Call it after `run_transfers`."""
        moves = [move for move in self.tier.plan_writes(limit) if move.scope in self._stores]
        for scope in self._stores:
            some = [move for move in moves if move.scope == scope]
            if some:
                self._staged.append(_Write(some, _read(getattr(host, _POOLS[scope]), _padded(some))))
        return len(moves)

    def prefetch(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
    ) -> int:
        """Starts fetching what storage has of this prompt; returns how many records. Raises `HashError`."""
        moves = self.tier.plan_reads(
            tokens, functools.partial(self._contains, "block"), functools.partial(self._contains, "slot"),
            namespace=namespace, items=items,
        )  # fmt: skip
        if moves:
            read = _Read(moves, {}, {})
            self._reads.append(read)
            try:
                for scope, store in self._stores.items():
                    keys = [move.key for move in moves if move.scope == scope]
                    read.buffers[scope] = np.empty((len(keys), store.store.record_bytes), np.uint8)
                    read.futures[scope] = store.read_into(keys, read.buffers[scope], timeout=0)
            except StoreBusyError:
                return 0  # `poll` calls it off
        return len(moves)

    def poll(self, host: HostCache) -> HostCache:
        """Takes up everything that has ended; `host` is donated: use the one returned.

        A store that fails counts as one that does not have the record.
        """
        staged, self._staged = self._staged, []
        for item in staged:
            if not item.staged.is_ready():
                self._staged.append(item)
                continue
            store = self._stores[item.moves[0].scope]
            records = np.asarray(item.staged)[: len(item.moves)]
            try:
                self._writes.append((item.moves, store.write([m.key for m in item.moves], records, timeout=0)))
            except StoreBusyError:
                self._staged.append(item)
        writes, self._writes = self._writes, []
        for moves, future in writes:
            if not future.done():
                self._writes.append((moves, future))
                continue
            # False: storage had the key before.
            self.tier.finish_writes(moves, [future.exception() is None] * len(moves))
        reads, self._reads = self._reads, []
        for item in reads:
            if not all(future.done() for future in item.futures.values()):
                self._reads.append(item)
            else:
                host = self._land(host, item)
        return host

    def drain(self, host: HostCache) -> HostCache:
        """`poll` until nothing is under way."""
        while self.busy:
            host = self.poll(host)
            time.sleep(1e-4)
        return host

    def _contains(self, scope: str, keys: list[bytes]) -> Sequence[bool]:
        if scope not in self._stores:
            return [False] * len(keys)
        return self._stores[scope].contains(keys).result().tolist()

    def _land(self, host: HostCache, item: _Read) -> HostCache:
        """Puts what was read into its host records, then tells the manager."""
        arrived: dict[StorageMove, bool] = {}
        fields = {}
        for scope, future in item.futures.items():
            moves = [move for move in item.moves if move.scope == scope]
            done = [False] * len(moves) if future.exception() else future.result().tolist()
            arrived.update(zip(moves, done, strict=True))
            good = [i for i, read_it in enumerate(done) if read_it and self.tier.is_current(moves[i])]
            if good:
                ids = _padded([moves[i] for i in good])
                records = np.zeros((len(ids), item.buffers[scope].shape[1]), np.uint8)
                records[: len(good)] = item.buffers[scope][good]
                fields[_POOLS[scope]] = _write(getattr(host, _POOLS[scope]), records, ids)
        answered = len(item.futures) == len(self._stores) and not any(f.exception() for f in item.futures.values())
        self.tier.finish_reads(item.moves, [arrived.get(move, False) for move in item.moves], lost=answered)
        return HostCache(fields.get("blocks", host.blocks), fields.get("snapshots", host.snapshots), host.layout)


def _padded(moves: list[StorageMove]) -> np.ndarray:
    """The record ids, padded with null to a power of two: few executables for all lengths."""
    ids = np.zeros(1 << (len(moves) - 1).bit_length(), np.int32)
    ids[: len(moves)] = [move.record for move in moves]
    return ids


_read = jax.jit(gather_records)
_write = jax.jit(scatter_records, donate_argnums=0)
