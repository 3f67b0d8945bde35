"""`StorageDriver`: host records to and from stores, as the manager's `StorageTier` plans it, beside the steps.

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

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ..checks import check_integer, check_seconds
from ..errors import LayoutError, StoreFormatError
from ..manager import KVCacheManager, MediaItem, Namespace
from ..manager.storage_tier import StorageMove, StorageTier
from ..plan import own_ids
from ..records import block_record, snapshot_layouts, snapshot_record
from ..stores import AsyncStore
from .host_cache import HostCache
from .host_records import gather_of_ranks, scatter_of_ranks
from .store_calls import StorageStats, StoreCall, StoreCalls

__all__ = ["Prefetch", "StorageDriver"]

MAX_SAVES = 8  # calls of `save` whose records wait in memory for room in a store


@dataclasses.dataclass(eq=False, slots=True)
class Prefetch:
    """One `StorageDriver.prefetch`, and what becomes of it.

    Attributes:
        done: whether nothing more will come of it: time to admit the request.
        records: how many came to the host.
    """

    done: bool = False
    records: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class _Save:
    """Records on their way out of the host pool, for a store."""

    moves: list[StorageMove]
    records: Any  # uint8 array in host memory: the pages of `rows` of records
    rows: np.ndarray  # of each move
    until: float


@dataclasses.dataclass(eq=False, slots=True)
class _Lookup:
    digests: list[bytes]
    generation: int  # of the manager
    calls: list[StoreCall]
    prefetch: Prefetch


@dataclasses.dataclass(eq=False, slots=True)
class _Write:
    moves: list[StorageMove]
    calls: list[StoreCall]


@dataclasses.dataclass(eq=False, slots=True)
class _StorageRead:
    moves: list[StorageMove]
    calls: list[StoreCall]
    buffers: dict[str, np.ndarray]  # by scope: [n, record bytes]
    prefetch: Prefetch
    waiting: list[_Lookup]  # of prompts that begin with what it brings


class StorageDriver:
    """Moves host records to stores and back, beside the steps.

    Args:
        manager: with a host tier.
        blocks: store of block records, under the digests of `manager` (32 bytes).
        snapshots: store of snapshot records. None: only blocks are written, and nothing is ever found
            again, as a hit needs a snapshot; for tests and for filling a store that others read.
        lookup_deadline: seconds that a store has to say what it has of a prompt.
        deadline: seconds that it has to read or write records. What takes longer has failed; its memory is kept until
            it has ended all the same, and a store with many such calls is asked nothing more meanwhile.
        clock: what deadlines are measured with, in seconds.
        shard, shards: which data shard of the cache the manager is of, and how many there are: their host pages are
            one array, of which each driver uses its own.

    Raises:
        StoreFormatError: a store has other record or key sizes than the layout; a deadline that is none.
        LayoutError: there is no such shard.
        RequestError: the manager has no `weights_id`.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        blocks: AsyncStore,
        snapshots: AsyncStore | None,
        *,
        lookup_deadline: float = 2.0,
        deadline: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        shard: int = 0,
        shards: int = 1,
    ):
        layout, self._ranks = manager.layout, manager.size.pool_ranks
        self._shards = check_integer("shards", shards, 1, error=LayoutError)
        self._shard = check_integer("shard", shard, 0, self._shards - 1, error=LayoutError)
        self._calls = StoreCalls({"block": blocks, **({"slot": snapshots} if snapshots is not None else {})}, clock)
        states = tuple(snapshot_record(each).bytes for each in snapshot_layouts(layout))
        sizes = {"block": (block_record(layout).bytes,), "slot": states}
        for scope, store in self._calls.stores.items():
            have, wanted = (store.store.record_bytes, store.store.key_bytes), [(size, 32) for size in sizes[scope]]
            if have not in wanted:
                expected = " or ".join(map(str, wanted))
                raise StoreFormatError(f"{scope} store: (record, key) bytes are {have}, expected {expected}")
        self._stored_bytes = {scope: store.store.record_bytes for scope, store in self._calls.stores.items()}
        self._record_bytes = {scope: min(size, sizes[scope][0]) for scope, size in self._stored_bytes.items()}
        self._lookup_deadline = check_seconds("lookup_deadline", lookup_deadline, error=StoreFormatError)
        self._deadline = check_seconds("deadline", deadline, error=StoreFormatError)
        manager.need_weights_id()
        self._manager, self.tier = manager, StorageTier(manager)
        self._saves: list[_Save] = []
        self._writes: list[_Write] = []
        self._lookups: list[_Lookup] = []
        self._reads: list[_StorageRead] = []

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._saves or self._writes or self._lookups or self._reads)

    def stats(self) -> StorageStats:
        """What was asked of the stores so far, from any thread; it asks them nothing."""
        return self._calls.stats(self._record_bytes)

    @property
    def waiting_saves(self) -> int:
        """Calls of `save` whose records wait in memory: for their copy to end, or for room in a store."""
        return len(self._saves)

    def save(self, host: HostCache, limit: int = 64) -> int:
        """Starts up to `limit` records on their way to storage; returns how many. Call it after `run_transfers`.

        None while much of what it started before still waits for room in a store.
        """
        if len(self._saves) >= MAX_SAVES:
            return 0
        moves = [move for move in self.tier.plan_writes(limit) if move.scope in self._calls.stores]
        until = self._calls.clock() + self._deadline
        try:
            for scope in self._calls.stores:
                some = [move for move in moves if move.scope == scope]
                if some:
                    ids, rows = self._dealt_out(host.pages, some)
                    self._saves.append(_Save(some, gather_of_ranks(host.pages, ids.ravel()), rows, until))
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

        It asks the stores and returns at once, whatever they do. If another prompt fetches what this one begins with,
        it is done when that has come. Raises `RequestError` (of what it was given), nothing else.
        """
        digests = self.tier.digests(tokens, namespace=namespace, items=items)
        prefetch = Prefetch(done=not digests)
        if digests:
            within = self._lookup_deadline
            calls = [self._calls.ask(scope, "contains", digests, within=within) for scope in self._calls.stores]
            self._lookups.append(_Lookup(digests, self._manager.generation, calls, prefetch))
        return prefetch

    def poll(self, host: HostCache) -> HostCache:
        """Takes up everything that has ended; `host` is donated: use the one returned. Call it after `run_transfers`.

        A store that fails, or is past its deadline, counts as one that does not have the record.
        """
        for save in list(self._saves):
            self._send(save)
        for write in self._calls.take_ended(self._writes):
            if write.calls[0].flags() is not None:  # of these, False: storage had the key before
                self.tier.finish_writes(write.moves, [True] * len(write.moves))
        for read in self._calls.take_ended(self._reads):
            host = self._land(host, read)
        for lookup in self._calls.take_ended(self._lookups):
            self._fetch(lookup)
        return host

    def drain(self, host: HostCache, timeout: float | None = None) -> HostCache:
        """`poll` until nothing is under way, which the deadlines bound; or for `timeout` seconds: the rest goes on."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.busy and (until is None or time.monotonic() < until):
            host = self.poll(host)
            time.sleep(1e-4)
        return host

    # To storage

    def _send(self, item: _Save) -> None:
        """Hands records to their store; one that takes none until the deadline does not get them."""
        if not item.records.is_ready():
            return
        scope, keys = item.moves[0].scope, [move.key for move in item.moves]
        try:
            pages = np.asarray(item.records).reshape(-1, len(item.moves[0].pages) * item.records.shape[1])
            records = list(self._whole(scope, pages[item.rows, : self._record_bytes[scope]]))
        except BaseException:  # the copy out failed
            self._saves.remove(item)
            raise
        call = self._calls.ask(scope, "write", keys, records, within=self._deadline)
        if call.future is not None:
            self._writes.append(_Write(item.moves, [call]))
        if call.future is not None or self._calls.clock() >= item.until:
            self._saves.remove(item)

    def _whole(self, scope: str, records: np.ndarray) -> np.ndarray:
        """Records as long as the store's: what the layout does not have of them is zeros."""
        missing = self._stored_bytes[scope] - records.shape[1]
        return np.pad(records, ((0, 0), (0, missing))) if missing else records

    # From storage

    def _fetch(self, lookup: _Lookup) -> None:
        """Plans with what the stores have said, and has them read."""
        lookup.prefetch.done = True
        if lookup.generation != self._manager.generation:  # of before a `reset`
            return
        found = {call.scope: call.found() for call in lookup.calls}
        blocks, snapshots = found.get("block", set()), found.get("slot", set())
        moves = self.tier.plan_fetch(
            lookup.digests,
            lambda keys: [key in blocks for key in keys],
            lambda keys: [key in snapshots for key in keys],
        )
        if not moves:
            wanted = set(lookup.digests)
            for read in self._reads:  # another prompt's, that brings the beginning of this one
                if any(move.node.digest in wanted for move in read.moves):
                    lookup.prefetch.done = False
                    read.waiting.append(lookup)
                    return
            return
        lookup.prefetch.done = False
        read = _StorageRead(moves, [], {}, lookup.prefetch, [])
        self._reads.append(read)  # whatever happens now, `poll` tells the manager what became of these moves
        for scope, store in self._calls.stores.items():
            keys = [move.key for move in moves if move.scope == scope]
            if keys:
                buffers = read.buffers[scope] = np.empty((len(keys), store.store.record_bytes), np.uint8)
                read.calls.append(self._calls.ask(scope, "read_into", keys, buffers, within=self._deadline))

    def _land(self, host: HostCache, item: _StorageRead) -> HostCache:
        """Puts what was read into its host records, then tells the manager."""
        arrived: dict[StorageMove, bool] = {}
        pages = host.pages
        item.prefetch.done = True
        try:
            for call in item.calls:
                moves = [move for move in item.moves if move.scope == call.scope]
                done = call.flags() or [False] * len(moves)
                good = [i for i, read_it in enumerate(done) if read_it and self.tier.is_current(moves[i])]
                if good:
                    ids, rows = self._dealt_out(pages, [moves[i] for i in good])
                    read = item.buffers[call.scope][:, : self._record_bytes[call.scope]]
                    records = np.zeros((len(ids), ids.shape[1] * pages.shape[1]), np.uint8)
                    records[rows, : read.shape[1]] = read[good]
                    pages = scatter_of_ranks(pages, records.reshape(ids.size, -1), ids.ravel())
                arrived.update(zip(moves, done, strict=True))
        except BaseException:
            self.tier.finish_reads(item.moves, [False] * len(item.moves), lost=False)
            for lookup in item.waiting:
                lookup.prefetch.done = True
            raise
        answered = {call.scope for call in item.calls if call.flags() is not None} == {m.scope for m in item.moves}
        self.tier.finish_reads(item.moves, [arrived.get(move, False) for move in item.moves], lost=answered)
        item.prefetch.records = sum(self._is_on_host(move) for move in item.moves)
        for lookup in item.waiting:
            self._fetch(lookup)  # what is left of it
        return dataclasses.replace(host, pages=pages)

    def _dealt_out(self, pool: jax.Array, moves: list[StorageMove]) -> tuple[np.ndarray, np.ndarray]:
        """The pages [pieces * N, K] of records of one scope, N of each piece in ids of its own, and which row is whose.

        A piece is what one rank of a data shard has of the pool; those of other data shards get null.

        They are padded with null to a power of two: few executables for all lengths.
        """
        pieces = len({shard.index[0].start for shard in pool.addressable_shards})
        if pieces != self._ranks * self._shards:
            of = f" of each of {self._shards} data shards" if self._shards > 1 else ""
            raise LayoutError(f"host pages are split into {pieces}, the manager's are of {self._ranks} pool ranks{of}")
        pages = np.array([move.pages for move in moves], np.int32)
        if (last := pages.max()) > (most := (pool.shape[0] // pieces - 1) * self._ranks):
            raise LayoutError(
                f"page {last} is beyond the host cache's {most}: it has fewer than its manager's HostSize"
            )
        rank, own = own_ids(pages, self._ranks)
        rank = rank[:, 0] + self._shard * self._ranks  # all pages of a record are on one
        place = np.array([(rank[:i] == of).sum() for i, of in enumerate(rank)])
        most = 1 << int(place.max()).bit_length()
        ids = np.zeros((pieces, most, own.shape[1]), np.int32)
        ids[rank, place] = own
        return ids.reshape(-1, own.shape[1]), rank * most + place

    def _is_on_host(self, move: StorageMove) -> bool:
        snapshot = move.node.snapshot
        held = (move.node.host,) if move.scope == "block" else () if snapshot is None else snapshot.host
        return self.tier.is_current(move) and held == move.pages
