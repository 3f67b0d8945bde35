"""Slot ids first .. first + count - 1: request slots, track slots. Pure Python."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ..checks import as_int, check_integer
from ..errors import IntegrityError, OutOfBlocksError, PoolError
from .spec import GDNSpec
from .undo import Undo

__all__ = ["Slots", "StateSlots"]


class Slots:
    """Hands out slot ids, the lowest free ones, all that are asked for or none. Calls are whole, as the allocator's.

    Args:
        first: the lowest id.
        count: how many there are.
        unit: what they are called in error messages.
    """

    def __init__(self, first: int, count: int, unit: str):
        self._first, self._count, self._unit = first, check_integer(unit, count, error=PoolError), unit
        self.clear()

    def clear(self) -> None:
        """Makes all slots free again."""
        self._free, self._held = list(range(self._first, self._first + self._count)), set[int]()

    @property
    def num_total(self) -> int:
        return self._count

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self._held)

    def is_held(self, slot: object) -> bool:
        """Whether this slot is handed out. Whatever is no integer is not."""
        return as_int(slot) in self._held

    def alloc(self, count: int = 1) -> list[int]:
        """`count` slots, ascending. Raises `OutOfBlocksError` if fewer are free, `PoolError` if it is no count."""
        count = check_integer("count", count, error=PoolError)
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free), self._count, self._unit.split()[0], self._unit)
        undo = Undo()
        try:
            undo.call(self._rebuild)
            slots = heapq.nsmallest(count, self._free)
            undo.call(self._held.difference_update, slots)
            self._held.update(slots)
            for _ in slots:
                heapq.heappop(self._free)
            return slots
        except BaseException:
            undo.put_back()
            raise

    def free(self, slots: int | Iterable[int]) -> None:
        """Gives slots back, all or, if any is wrong, none (`PoolError`)."""
        undo = Undo()
        try:
            self.free_within(undo, slots)
        except BaseException:
            undo.put_back()
            raise

    def free_within(self, undo: Undo, slots: int | Iterable[int]) -> None:
        """`free` as a part of something larger that is undone as a whole."""
        checked = set[int]()
        for slot in [slots] if isinstance(slots, str) or not isinstance(slots, Iterable) else slots:
            number = as_int(slot)
            if number is None:
                raise self._refused(slot, "not an integer")
            if number not in self._held:
                raise self._refused(slot, "not held (freed twice?)")
            if number in checked:
                raise self._refused(slot, "named twice in one call")
            checked.add(number)
        undo.call(self._rebuild)
        undo.call(self._held.update, checked)
        self._held.difference_update(checked)
        for slot in checked:
            heapq.heappush(self._free, slot)

    def _rebuild(self) -> None:
        """The free slots from those held; a sorted list is a heap."""
        self._free = sorted(set(range(self._first, self._first + self._count)) - self._held)

    def check_integrity(self) -> None:
        """Checks that free and held slots partition the range. Raises `IntegrityError`."""
        if sorted([*self._free, *self._held]) != list(range(self._first, self._first + self._count)):
            raise IntegrityError(
                f"{self._unit}: free {sorted(self._free)} and held {sorted(self._held)} are not all, once"
            )

    def _refused(self, slot: object, problem: str) -> PoolError:
        valid = f"{self._first}..{self._first + self._count - 1}"
        return PoolError(f"cannot free {self._unit} {slot}: {problem} (valid ids are {valid})")


class StateSlots(Slots):
    """The track slots of a `GDNPool`: where snapshots of recurrent state are kept.

    Working slots need no books here: they are the request slots of `ReqToTokenPool`.
    """

    def __init__(self, spec: GDNSpec):
        super().__init__(1 + spec.max_requests, spec.track_slots, "track slots")

    def alloc_track_slot(self) -> int:
        """Takes one track slot. Raises `OutOfBlocksError`."""
        return self.alloc(1)[0]

    def free_track_slot(self, slot: int) -> None:
        """Raises `PoolError` unless the slot was handed out."""
        self.free(slot)
