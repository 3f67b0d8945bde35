"""A pool of unit ids: which blocks, slots or pages are free, and who holds the others. Pure Python.

A generation is stamped on an id whenever it is handed out and never repeats within a pool, so a `BlockRef` of an
earlier owner is recognised however often the id has changed hands since.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checks import INT32_MAX, as_int, check_integer, shown
from ..errors import IntegrityError, OutOfBlocksError, PlanError, PoolError

__all__ = ["BlockAllocator", "BlockRef", "PoolStats"]


class BlockRef(NamedTuple):
    """An id as it was when it was handed out."""

    block: int
    generation: int


class PoolStats(NamedTuple):
    total: int
    free: int
    held: int


class BlockAllocator:
    """Hands out ids 1..n, always the lowest free one. Id 0 is the null unit and is never handed out.

    Units may lie on several ranks (`CacheSize.pool_ranks`), which have a list of free ids each: id g is on rank
    (g - 1) mod ranks. Whoever takes one says for which place: place i is served by rank i mod ranks.

    Ids from `_fresh` on were never taken; freed ids below it wait in a heap. So construction does not
    build a list of ids, and a call costs O(log n) per id.

    Args:
        total: n, how many ids there are, on all ranks.
        pool: the pool's name in error messages.
        ranks: that they lie on.

    Raises:
        PlanError: `total` is negative, no integer, or ids do not fit int32.
    """

    def __init__(self, total: int, pool: str = "device", *, ranks: int = 1):
        self._total = check_integer(f"the number of blocks of the {pool} pool", total, high=INT32_MAX, error=PlanError)
        self.name, self.ranks = pool, check_integer("the number of ranks", ranks, 1, error=PlanError)
        self._clock = 0
        self._stamps = [0] * (self._total + 1)  # generation of each id, 0 before it was first handed out
        self.reset()

    def reset(self) -> None:
        """Takes every id back, whoever holds it. References made before stay stale."""
        self._fresh = list(range(1, self.ranks + 1))  # of each rank
        self._freed: list[list[int]] = [[] for _ in range(self.ranks)]
        self._held = bytearray(self._total + 1)
        self._metadata: dict[int, Any] = {}

    def resize(self, total: int) -> None:
        """Makes the ids 1..total; they keep their generations across shrinking and growing.

        Raises:
            PoolError: ids > total are held; nothing has changed.
            PlanError: `total` is negative or not an integer.
        """
        total = check_integer("the number of blocks", total, error=PlanError)
        held = [block for block in range(total + 1, min(max(self._fresh), self._total + 1)) if self._held[block]]
        if held:
            more = ", ..." if len(held) > 8 else ""
            ids = f"{len(held)} held beyond it ({', '.join(map(str, held[:8]))}{more})"
            raise PoolError(f"cannot resize the {self.name} pool to {total} blocks: {ids}")
        if total < self._total:
            del self._held[total + 1 :]
            for rank, freed in enumerate(self._freed):
                self._freed[rank] = [block for block in freed if block <= total]
                heapq.heapify(self._freed[rank])
                first = next(i for i in range(total + 1, total + 1 + self.ranks) if self.rank_of(i) == rank)
                self._fresh[rank] = min(self._fresh[rank], first)
        else:
            self._held.extend(bytes(total - self._total))
        self._total = total
        self._stamps.extend([0] * (total + 1 - len(self._stamps)))

    @property
    def num_total(self) -> int:
        return self._total

    @property
    def num_free(self) -> int:
        return sum(self.free_on)

    @property
    def num_held(self) -> int:
        return self.num_total - self.num_free

    def stats(self) -> PoolStats:
        free = self.num_free  # once: another thread may ask
        return PoolStats(self.num_total, free, self.num_total - free)

    @property
    def free_on(self) -> list[int]:
        """How many ids of each rank are free."""
        total, ranks = self._total, self.ranks
        return [
            max(total - fresh + ranks, 0) // ranks + len(freed)
            for fresh, freed in zip(self._fresh, self._freed, strict=True)
        ]

    def rank_of(self, block: int) -> int:
        """The rank that an id is on."""
        return (block - 1) % self.ranks

    def shortage(
        self, places: Sequence[int], more: Sequence[int] = (), freed: Sequence[int] = ()
    ) -> OutOfBlocksError | None:
        """Why these places cannot be served, with so many `more` ids on each rank, and those of the places `freed`.

        None: they can. Of several ranks that lack ids, the one that lacks most is named.
        """
        if self.ranks == 1:
            count, free = len(places), self.num_free + sum(more) + len(freed)
            return None if count <= free else OutOfBlocksError(count, free, self._total, self.name)
        wanted, have = (
            [0] * self.ranks,
            [free + extra for free, extra in zip(self.free_on, more or [0] * self.ranks, strict=True)],
        )
        for counts, some in ((wanted, places), (have, freed)):
            for place in some:
                counts[place % self.ranks] += 1
        rank = max(range(self.ranks), key=lambda rank: wanted[rank] - have[rank])
        if wanted[rank] <= have[rank]:
            return None
        return OutOfBlocksError(wanted[rank], have[rank], self._total // self.ranks, f"{self.name} (rank {rank})")

    def is_held(self, block: int) -> bool:
        """Whether this id is handed out. Ids out of range are not, nor is what is no id."""
        number = as_int(block)
        return number is not None and 0 < number <= self._total and bool(self._held[number])

    def acquire(self, count: int, metadata: Any = None) -> list[int]:
        """The `count` lowest free ids, ascending: all of them or none. On several ranks: for places 0, 1, ...

        Args:
            count: how many.
            metadata: kept with each of them until it is released, unless None.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
            PlanError: `count` is negative or not an integer.
        """
        return self.acquire_at(
            range(check_integer("the number of blocks to acquire", count, error=PlanError)), metadata
        )

    def acquire_at(self, places: Sequence[int], metadata: Any = None) -> list[int]:
        """Returns an id for each place, the lowest free one of its rank: all of them or none. `metadata` as of
        `acquire`.

        Raises:
            OutOfBlocksError: a rank has fewer free ones; nothing was taken.
        """
        if len(places) and (error := self.shortage(places)):
            raise error
        if self.ranks == 1:
            ids = self._take(0, len(places))
        else:
            counts = collections.Counter(place % self.ranks for place in places)
            taken = {rank: iter(self._take(rank, count)) for rank, count in counts.items()}
            ids = [next(taken[place % self.ranks]) for place in places]
        held, stamps, clock = self._held, self._stamps, self._clock
        for clock, block in enumerate(ids, clock + 1):  # noqa: B020 the last stamp is the new clock
            held[block] = 1
            stamps[block] = clock
        self._clock = clock
        if metadata is not None:
            self._metadata.update(dict.fromkeys(ids, metadata))
        return ids

    def _take(self, rank: int, count: int) -> list[int]:
        """So many ids of a rank that has them, the lowest free ones, ascending."""
        freed, fresh = self._freed[rank], self._fresh[rank]
        ids = [heapq.heappop(freed) for _ in range(min(count, len(freed)))]
        self._fresh[rank] = end = fresh + (count - len(ids)) * self.ranks
        ids.extend(range(fresh, end, self.ranks))
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Gives ids back: all of them or, if any is wrong, none.

        Raises:
            PoolError: an id is null, out of range, not held, or named twice; or there are no ids at all.
        """
        checked: set[int] = set()
        try:
            blocks = iter(ids.tolist() if isinstance(ids, np.ndarray) else ids)
        except TypeError as error:
            raise self._not_released(ids, "not a list of ids") from error
        for block in blocks:
            checked.add(self._checked(block, checked))
        held, freed, ranks = self._held, self._freed, self.ranks
        for block in checked:
            held[block] = 0
            heapq.heappush(freed[(block - 1) % ranks], block)
        if self._metadata:
            for block in checked:
                self._metadata.pop(block, None)

    def _checked(self, block: Any, already: set[int]) -> int:
        number = as_int(block)
        if number is None:
            raise self._not_released(block, "not an integer")
        if number == 0:
            raise self._not_released(block, "it is the null block")
        if not 0 < number <= self._total:
            raise self._not_released(block, "out of range")
        if not self._held[number]:
            raise self._not_released(block, "it is not held (released twice?)")
        if number in already:
            raise self._not_released(block, "named twice in one call")
        return number

    def _not_released(self, block: object, problem: str) -> PoolError:
        return PoolError(f"cannot release block {shown(block)}: {problem} (valid ids are 1..{self._total})")

    def release_refs(self, refs: Iterable[BlockRef]) -> None:
        """Releases ids by reference. Raises `PoolError` if any changed hands since; then none is released."""
        refs = list(refs)
        for ref in refs:
            self.check(ref)
        self.release([ref.block for ref in refs])

    def ref(self, block: int) -> BlockRef:
        """Returns the reference of a held id. Raises `PlanError` if it is not held."""
        block = self._held_id(block)
        return BlockRef(block, self._stamps[block])

    def is_current(self, ref: BlockRef) -> bool:
        """Whether the id is still held by whom it was handed to when `ref` was made."""
        return self.is_held(ref.block) and self._stamps[ref.block] == ref.generation

    def check(self, ref: BlockRef) -> None:
        """Raises `PoolError` unless `ref` is current."""
        if not self.is_current(ref):
            now = self._stamps[ref.block] if self.is_held(ref.block) else "not held"
            raise PoolError(
                f"block {ref.block} of the {self.name} pool: generation {ref.generation} is stale (now: {now})"
            )

    def metadata(self, block: int) -> Any:
        """What is kept with a held id, or None. Raises `PlanError` if it is not held."""
        return self._metadata.get(self._held_id(block))

    def set_metadata(self, block: int, metadata: Any) -> None:
        """Keeps `metadata` with a held id until it is released; None forgets. Raises `PlanError` if it is not held."""
        block = self._held_id(block)
        if metadata is None:
            self._metadata.pop(block, None)
        else:
            self._metadata[block] = metadata

    def check_integrity(self) -> None:
        """Free and held ids partition 1..n, and no generation is there twice. Raises `IntegrityError`."""
        free = [block for freed in self._freed for block in freed]
        free = sorted([*free, *(b for fresh in self._fresh for b in range(fresh, self._total + 1, self.ranks))])
        held = [i for i, flag in enumerate(self._held) if flag]
        if sorted(free + held) != list(range(1, self._total + 1)):
            raise IntegrityError(f"{self.name} pool: free {free} and held {held} do not partition 1..{self._total}")
        if any(self.rank_of(block) != rank for rank, freed in enumerate(self._freed) for block in freed):
            raise IntegrityError(f"{self.name} pool: an id is free on a rank that it is not on")
        if stray := [block for block in self._metadata if not self.is_held(block)]:
            raise IntegrityError(f"{self.name} pool: metadata of ids {stray} that are not held")
        stamps = [self._stamps[block] for block in range(1, self.num_total + 1) if self.is_held(block)]
        if len(set(stamps)) != len(stamps) or not all(0 < stamp <= self._clock for stamp in stamps):
            raise IntegrityError(f"{self.name} pool: generations {stamps} repeat or are from the future")

    def _held_id(self, block: int) -> int:
        block = check_integer("a block id", block, 1, error=PlanError)
        if not self.is_held(block):
            raise PlanError(f"block {block} of the {self.name} pool is not held")
        return block
