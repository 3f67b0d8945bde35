"""Copies between device units that the next plan must carry: what forks are made of. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["PendingCopies"]


class PendingCopies:
    """Pairs (source, destination) of slots and of blocks, for the next plan, whichever requests it is of.

    A source that is released before then keeps its bytes: it goes back to its pool after that plan.
    """

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}  # destination -> source
        self.blocks: dict[int, int] = {}
        self._late_slots: list[int] = []
        self._late_blocks: list[int] = []

    def release_blocks(self, blocks: Iterable[int]) -> list[int]:
        """The blocks, of those given, that can be given back now."""
        return self._release(blocks, self.blocks, self._late_blocks)

    def release_slots(self, slots: Iterable[int]) -> list[int]:
        """The slots, of those given, that can be given back now."""
        return self._release(slots, self.slots, self._late_slots)

    def clear(self) -> tuple[list[int], list[int]]:
        """The copies are in a plan, or called off. Returns the blocks and slots that can be given back now."""
        late = self._late_blocks, self._late_slots
        self.__init__()
        return late

    @property
    def late(self) -> tuple[list[int], list[int]]:
        """Released blocks and slots that are still to be copied from."""
        return self._late_blocks, self._late_slots

    @staticmethod
    def _release(units: Iterable[int], copies: dict[int, int], late: list[int]) -> list[int]:
        units = list(units)
        if not copies:
            return units
        for unit in units:
            copies.pop(unit, None)
        sources = set(copies.values())
        late += [unit for unit in units if unit in sources]
        return [unit for unit in units if unit not in sources]
