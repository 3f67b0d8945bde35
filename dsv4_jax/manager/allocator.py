"""The pool of unit ids: which blocks (or slots) are free. Pure Python."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..checks import INT32_MAX, as_int, shown
from ..errors import BlockReleaseError, IntegrityError, OutOfBlocksError, PlanError

__all__ = ["BlockAllocator", "as_count"]


def as_count(name: str, value: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    """`value` as a Python int, numpy integers welcome. Raises `PlanError` unless an integer in least..most."""
    number = as_int(value)
    if number is None:
        raise PlanError(f"{name} must be an integer, got {shown(value)}")
    if number < least:
        raise PlanError(f"{name} must be at least {least}, got {shown(value)}")
    if number > most:
        raise PlanError(f"{name} must be at most {most}, got {shown(value)}")
    return number


class BlockAllocator:
    """Hands out ids 1..n, always the lowest free one. Id 0 is the null unit and is never handed out.

    Ids above `_fresh` were never taken; freed ids below it wait in a heap. So construction does not
    build a list of ids, and a call costs O(log n) per id.

    Args:
        total: n, how many ids there are.
        pool: the pool's name in error messages.

    Raises:
        PlanError: `total` is negative, no integer, or ids do not fit int32.
    """

    def __init__(self, total: int, pool: str = "device"):
        self._total = as_count(f"the number of blocks of the {pool} pool", total, most=INT32_MAX)
        self.name = pool
        self._fresh = 1
        self._freed: list[int] = []
        self._held = bytearray(self._total + 1)

    @property
    def num_total(self) -> int:
        return self._total

    @property
    def num_free(self) -> int:
        return self._total - self._fresh + 1 + len(self._freed)

    def is_held(self, block: int) -> bool:
        """Whether this id is handed out. Ids out of range are not, nor is what is no id."""
        number = as_int(block)
        return number is not None and 0 < number <= self._total and bool(self._held[number])

    def acquire(self, count: int) -> list[int]:
        """The `count` lowest free ids, ascending: all of them or none.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
            PlanError: `count` is negative or not an integer.
        """
        count = as_count("the number of blocks to acquire", count)
        if count > self.num_free:
            raise OutOfBlocksError(count, self.num_free, self._total, self.name)
        freed = self._freed
        ids = [heapq.heappop(freed) for _ in range(min(count, len(freed)))]
        fresh = count - len(ids)
        ids.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        for block in ids:
            self._held[block] = 1
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Gives ids back: all of them or, if any is wrong, none.

        Raises:
            BlockReleaseError: an id is null, out of range, not held, or named twice; or there are no ids at all.
        """
        checked: set[int] = set()
        try:
            blocks = iter(ids.tolist() if isinstance(ids, np.ndarray) else ids)
        except TypeError as error:
            raise BlockReleaseError(ids, "not a list of ids", self._total) from error
        for block in blocks:
            checked.add(self._checked(block, checked))
        for block in checked:
            self._held[block] = 0
            heapq.heappush(self._freed, block)

    def _checked(self, block: Any, already: set[int]) -> int:
        def refuse(problem: str) -> BlockReleaseError:
            return BlockReleaseError(block, problem, self._total)

        number = as_int(block)
        if number is None:
            raise refuse("not an integer")
        block = number
        if block == 0:
            raise refuse("it is the null block")
        if not 0 < block <= self._total:
            raise refuse("out of range")
        if not self._held[block]:
            raise refuse("it is not held (released twice?)")
        if block in already:
            raise refuse("named twice in one call")
        return block

    def check_integrity(self) -> None:
        """Free and held ids partition 1..n and the null id is in neither. Raises `IntegrityError`."""
        free = sorted([*self._freed, *range(self._fresh, self._total + 1)])
        held = [i for i, flag in enumerate(self._held) if flag]
        if sorted(free + held) != list(range(1, self._total + 1)):
            raise IntegrityError(f"{self.name} pool: free {free} and held {held} do not partition 1..{self._total}")
