"""Which requests there are, in which slots, and the checks of what callers name. Pure Python + numpy."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from ..checks import shown
from ..errors import HashError, LayoutError, PlanError, RequestError
from ..layout import CacheLayout, CacheSize
from .allocator import as_count
from .guard import Guard
from .policies import CachePolicy
from .prefix.events import EventLog
from .prefix.hashing import BlockHasher, HashSpec, Key, MediaItem, Namespace, token_ids
from .publishing import Publisher
from .request import Request, RequestRef, RequestState
from .tiered_cache import HostSize, TieredCache
from .transfers import Transfers

__all__ = ["RequestBook"]


class RequestBook:
    """The live and preempted requests of a manager. `KVCacheManager` is the class to use; see there."""

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        *,
        policy: CachePolicy | None = None,
        host: HostSize | None = None,
        salt: Key = None,
        events: EventLog | None = None,
        arrays: CacheSize | None = None,
    ):
        layout.check_size(arrays or size)
        self.layout, self.size, self.arrays = layout, size, arrays or size
        if not self.arrays.holds(size):
            raise LayoutError(f"{size} does not fit a cache of {self.arrays}")
        self.policy, self.host_size, self.events = policy, _host_size(host), events
        self._hashing = HashSpec(layout.block_tokens, (layout.fingerprint, salt), layout.cfg.vocab_size)
        self.generation = 0
        self._persists = False
        self._guard = Guard()
        self._next_id = self._next_epoch = 0
        self._clear()

    def _clear(self) -> None:
        self._cache = TieredCache(self.layout, self.size, self.policy, self.host_size, self.events)
        self._cache.tree.wanted.persists = self._persists
        self._publisher = Publisher(self._cache, self.layout.block_tokens)
        self._live: dict[int, Request] = {}  # by slot, in the order they became live
        self._ids: dict[Hashable, Request] = {}  # live and preempted
        self._steps = 0
        self._rows: Any = None  # of the step planned last, until something changes them
        self._step_transfers = Transfers()
        self._asleep = False

    @property
    def context_limit(self) -> int:
        """Tokens that one request can hold: the block table's width, and the model's own limit."""
        return self._context_limit(self.size)

    def _context_limit(self, size: CacheSize) -> int:
        return min(size.max_blocks_per_request * self.layout.block_tokens, self.layout.cfg.max_position_embeddings)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The live requests, in the order they became live."""
        return tuple(self._live.values())

    @property
    def preempted(self) -> tuple[Request, ...]:
        """The preempted requests, in the order they were admitted."""
        return tuple(r for r in self._ids.values() if r.state is RequestState.PREEMPTED)

    def find(self, ref: RequestRef) -> Request | None:
        """The live request that `ref` was made of; None if it was released or preempted since.

        For results of steps that were under way: what comes late is for nobody.
        """
        self._guard.check()
        request = self._ids.get(ref.id)
        live = request is not None and request.state is RequestState.LIVE and request.epoch == ref.epoch
        return request if live else None

    @property
    def hash_spec(self) -> HashSpec:
        """What all digests of this cache share: small, and the same in every process of a deployment."""
        return self._hashing

    def digests(
        self, tokens: Iterable[int], *, namespace: Namespace | None = None, items: Iterable[MediaItem] = ()
    ) -> list[bytes]:
        """The digests of a prompt's full blocks, in path order: their names in the `EventLog` and in storage.

        For routers; nothing is looked up, and nothing changes. A prompt of any length has them. A process
        without a manager makes the same ones with `BlockHasher(manager.hash_spec, tokens, ...).digests`.

        Raises:
            HashError, PlanError, RequestError: as `KVCacheManager.admit_request` for these arguments.
        """
        return BlockHasher(self._hashing, self._token_ids(tokens), namespace=namespace, items=items).digests

    @property
    def has_transfers(self) -> bool:
        """Whether the last planned step's transfers have not been taken."""
        return bool(self._step_transfers)

    def persist(self) -> None:
        """From now on, what comes to the host is listed for storage (see `StorageTier`)."""
        self._persists = self._cache.tree.wanted.persists = True

    # For the managers

    def _new_request(self, tokens: list[int], limit: int, request_id: Hashable, slot: int) -> Request:
        while request_id is None:
            self._next_id += 1
            request_id = None if self._next_id in self._ids else self._next_id
        request = Request(
            request_id,
            slot,
            self.generation,
            limit,
            tokens,
            num_prompt=len(tokens),
            epoch=self._new_epoch(),
            started=self._steps,
        )
        self._live[slot] = self._ids[request_id] = request
        return request

    def _new_epoch(self) -> int:
        self._next_epoch += 1
        return self._next_epoch

    def _new_hasher(self, tokens: Sequence[int] | np.ndarray, **space) -> BlockHasher | None:
        caching = self._cache.caching
        hasher = BlockHasher(self._hashing, tokens if caching else (), **space)  # which checks the space anyway
        return hasher if caching else None

    def _final_tokens(self, request: Request) -> int:
        """Cached tokens that stay whatever is accepted."""
        fed, drafts = request.fed, self.layout.draft_tokens
        return request.num_cached - (fed if drafts and fed <= 1 + drafts else 0)

    def _let_go(self, request: Request) -> None:
        """Its blocks go back: shared ones to the tree, those only it has to the pool. It leaves the live ones."""
        shared, tree = request.num_shared, self._cache.tree
        for node in reversed(request.nodes[shared:]):
            tree.moves.abort(node)  # its block is among the request's
        tree.release(request.nodes[:shared])
        self._cache.release_blocks(request.blocks[shared:])
        if request.restores is not None:
            tree.snapshots.unpin(request.restores)
        self._publisher.forget(request)
        self._rows = None
        del self._live[request.slot]
        request.fed = request.num_tabled = request.reserved = 0
        request.blocks, request.nodes, request.restores, request.rolling = [], [], None, None

    def _checked(self, request: Request | int) -> Request:
        """The live request meant. Raises `RequestError`."""
        if isinstance(request, Request):
            if self._live.get(request.slot) is request:
                return request
            mine = request.state is not RequestState.LIVE
            why = f"was {request.state.value}" if mine else "belongs to another manager"
            raise RequestError(f"request {request.id!r} {why}")
        try:
            slot = as_count("slot", request)
        except PlanError as error:
            raise RequestError(f"neither a request nor a slot: {shown(request)}") from error
        if slot not in self._live:
            raise RequestError(f"no live request in slot {slot} (slots are 1..{self._cache.slots.num_total})")
        return self._live[slot]

    def _check_id(self, request_id: Hashable, others: Iterable[Hashable] = ()) -> None:
        """Raises `RequestError` for an id that is in use, among the `others`, or no id."""
        if request_id is None:
            return
        try:
            sound = bool(request_id == request_id)  # NaN is not
            taken, twice = request_id in self._ids, request_id in set(others)
        except MemoryError:
            raise  # of the process, not of the argument
        except Exception as error:  # whatever its `__hash__` or `__eq__` raised
            raise RequestError(f"request id {shown(request_id)} cannot be hashed and compared") from error
        if not sound:
            raise RequestError(f"request id {shown(request_id)} does not equal itself")
        if taken:
            raise RequestError(f"request id {request_id!r} is in use by a {self._ids[request_id].state.value} request")
        if twice:
            raise RequestError(f"request id {request_id!r} is named twice")

    def _check_awake(self) -> None:
        if self._asleep:
            raise RequestError("the manager sleeps: call wakeup() first")

    def _check_taken(self) -> None:
        if self._step_transfers:
            raise PlanError("the transfers of the step before were not taken (see take_transfers)")

    def _token_ids(self, tokens: Iterable[int] | np.ndarray) -> np.ndarray:
        """[N] int32, checked against the vocabulary. Raises `RequestError`."""
        try:
            return token_ids(tokens, self.layout.cfg.vocab_size)
        except HashError as error:
            raise RequestError(str(error)) from error


def _host_size(host: HostSize | None) -> HostSize:
    """`host` as a `HostSize`, any sequence of one or two numbers welcome. Raises `PlanError`."""
    try:
        size = HostSize(0) if host is None else HostSize(*host)
    except TypeError as error:
        raise PlanError(f"host must be None or (num_blocks, num_snapshots), got {shown(host)}") from error
    return HostSize(*(as_count(f"host.{name}", count) for name, count in size._asdict().items()))
