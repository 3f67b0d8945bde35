"""A pool of unit ids with generations, metadata and resizing. Pure Python.

A generation is stamped on an id whenever it is handed out and never repeats within a pool, so a
`BlockRef` of an earlier owner is recognised however often the id has changed hands since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checks import check_integer
from ..errors import IntegrityError, PlanError, PoolError
from .allocator import BlockAllocator

__all__ = ["BlockPool", "BlockRef", "PoolStats"]


class BlockRef(NamedTuple):
    """An id as it was when it was handed out."""

    block: int
    generation: int


class PoolStats(NamedTuple):
    total: int
    free: int
    held: int


class BlockPool(BlockAllocator):
    """A `BlockAllocator` (ids 1..total, lowest first, 0 never) that knows who holds what since when.

    Args:
        total: how many ids there are.
        pool: the pool's name in error messages.
        ranks: that they lie on.
    """

    def __init__(self, total: int, pool: str = "device", *, ranks: int = 1):
        super().__init__(total, pool, ranks=ranks)
        self._clock = 0
        self._stamps = [0] * (self.num_total + 1)  # generation of each id, 0 before it was first handed out
        self._metadata: dict[int, Any] = {}

    @property
    def num_held(self) -> int:
        return self.num_total - self.num_free

    def stats(self) -> PoolStats:
        free = self.num_free  # once: another thread may ask
        return PoolStats(self.num_total, free, self.num_total - free)

    def acquire(self, count: int, metadata: Any = None) -> list[int]:
        """The `count` lowest free ids, ascending, all of them or none.

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
        """Does what `BlockAllocator.acquire_at` does; `metadata` is kept as by `acquire`."""
        ids = super().acquire_at(places)
        stamps, clock = self._stamps, self._clock
        for clock, block in enumerate(ids, clock + 1):  # noqa: B020 the last stamp is the new clock
            stamps[block] = clock
        self._clock = clock
        if metadata is not None:
            self._metadata.update(dict.fromkeys(ids, metadata))
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Gives ids back: all of them or, if any is wrong (`PoolError`), none."""
        ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        super().release(ids)
        if self._metadata:
            for block in ids:
                self._metadata.pop(block, None)

    def release_refs(self, refs: Iterable[BlockRef]) -> None:
        """Releases ids by reference. Raises `PoolError` if any changed hands since; then none is released."""
        refs = list(refs)
        for ref in refs:
            self.check(ref)
        self.release([ref.block for ref in refs])

    def ref(self, block: int) -> BlockRef:
        """The reference of a held id. Raises `PlanError` if it is not held."""
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

    def resize(self, total: int) -> None:
        """Does what `BlockAllocator.resize` does; ids keep their generation across shrinking and growing."""
        super().resize(total)
        self._stamps.extend([0] * (self.num_total + 1 - len(self._stamps)))

    def reset(self) -> None:
        """Takes every id back. References made before stay stale."""
        super().reset()
        self._metadata.clear()

    def check_integrity(self) -> None:
        super().check_integrity()
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
