"""The data shards of `generate`: a manager each, and the prompts that are live in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import numpy as np

from ..checks import shown
from ..errors import ManagerInterruptedError, NoFreeSlotError, OutOfBlocksError, PlanError
from ..manager import KVCacheManager, Request

__all__ = ["Shards"]


class Shards:
    """A manager for each data shard of a cache, and the requests that are live in them.

    Attributes:
        managers: one each, alike.
        live: of each, request -> index of its prompt.
    """

    def __init__(self, managers: KVCacheManager | Sequence[KVCacheManager], shards: int):
        """Raises `PlanError`: there are not as many managers as data shards, or they are not alike."""
        self.managers = [managers] if isinstance(managers, KVCacheManager) else [*managers]
        self.live: list[dict[Request, int]] = [{} for _ in self.managers]
        if others := [manager for manager in self.managers if not isinstance(manager, KVCacheManager)]:
            raise PlanError(f"expected a manager for each data shard, got {shown(others[0])}")
        if len(self.managers) != shards:
            raise PlanError(f"{len(self.managers)} managers for the {shards} data shards of the cache")
        if len({id(manager) for manager in self.managers}) < shards:
            raise PlanError("one manager was given for several data shards: each has blocks of its own")
        first = self.managers[0]
        for i, manager in enumerate(self.managers):
            if (manager.layout, manager.arrays, manager.size) != (first.layout, first.arrays, first.size):
                raise PlanError(f"the manager of shard {i} is of another cache than that of shard 0")
            if any(manager.host_size):
                raise PlanError("generate moves nothing between tiers: its manager must have no host tier")

    @property
    def requests(self) -> list[Request]:
        """All live requests, shard by shard."""
        return [request for live in self.live for request in live]

    @property
    def full(self) -> bool:
        """No shard has a free slot."""
        each = zip(self.managers, self.live, strict=True)
        return all(len(live) == manager.size.num_slots for manager, live in each)

    def index(self, request: Request) -> int | None:
        """Returns the index of a request's prompt; None if the request is not live any more."""
        return next((live[request] for live in self.live if request in live), None)

    def admit(self, index: int, prompt: np.ndarray, room: int) -> bool:
        """Makes a prompt live with blocks for `room` tokens, or says that it must wait for others to end.

        It goes to the shard that has most of it cached, of those to the one with the fewest requests; to the next in
        this order where that one has no room.

        Raises:
            NoFreeSlotError, OutOfBlocksError: there is none, and nothing to wait for.
        """
        cached = [_cached(manager, prompt) for manager in self.managers] if len(self.managers) > 1 else [0]
        problems = []
        for shard in sorted(range(len(cached)), key=lambda shard: (-cached[shard], len(self.live[shard]))):
            manager, request = self.managers[shard], None
            try:
                request = manager.admit_request(prompt, max_tokens=room)
                manager.reserve(request, room)
            except (NoFreeSlotError, OutOfBlocksError) as problem:
                problems.append(problem)
                if request is not None:
                    manager.release_request(request)
            else:
                self.live[shard][request] = index
                return True
        if not self.requests:
            raise problems[0]
        return False

    def release(self, indices: Iterable[int]) -> None:
        """Ends the requests of these prompts."""
        ended = {*indices}
        for manager, live in zip(self.managers, self.live, strict=True):
            for request in [request for request, index in live.items() if index in ended]:
                manager.release_request(request)
                del live[request]

    def release_all(self) -> None:
        """Ends every one, in the managers that can still do that."""
        for manager, live in zip(self.managers, self.live, strict=True):
            with contextlib.suppress(ManagerInterruptedError):  # what broke off a call of the manager is on its way
                for request in live:
                    manager.release_request(request)


def _cached(manager: KVCacheManager, prompt: np.ndarray) -> int:
    """Blocks of a prompt with which a request would begin."""
    if not manager.cache.caching:
        return 0
    return manager.cache.tree.match(manager.digests(prompt), len(prompt)).hit
