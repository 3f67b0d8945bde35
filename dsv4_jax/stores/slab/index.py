"""The books of a slab: which key has which slot, which slots are free, which record was used least recently.

Knows no file and takes no lock: `SlabStore` does, and orders what it does here and in the file.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from ...errors import StoreError

__all__ = ["SlabEntry", "SlabIndex"]


@dataclasses.dataclass(frozen=True, slots=True)
class SlabEntry:
    """Where a record is, and what its header says of its age and its bytes."""

    slot: int
    generation: int
    digest: bytes


class SlabIndex:
    """Books of `num_slots` slots. Every slot is an entry's, free, or held by a call that took it.

    Attributes:
        entries: by key, the least recently used first.
        free: slots, the next to be taken last.
        stale: of the free slots, those that may have a header in the file, which comes off before anything else is
            written there.
        generation: the highest given to a record.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.entries: collections.OrderedDict[bytes, SlabEntry] = collections.OrderedDict()
        self.free: list[int] = []
        self.stale: set[int] = set()
        self.generation = 0

    def restore(self, key: bytes, entry: SlabEntry) -> int | None:
        """Enters what a file has. Of two copies of a key the newer stays: returns the slot of the other."""
        there = self.entries.get(key)
        if there is not None and there.generation >= entry.generation:
            return entry.slot
        self.entries[key] = entry
        return None if there is None else there.slot

    def settle(self, resting: Iterable[int]) -> None:
        """After the last `restore`: the order is that of writing, what has no entry and does not rest is free."""
        self.entries = collections.OrderedDict(sorted(self.entries.items(), key=lambda item: item[1].generation))
        used = {*resting, *(entry.slot for entry in self.entries.values())}
        self.free = [slot for slot in reversed(range(self.num_slots)) if slot not in used]

    def next_generations(self, count: int) -> range:
        """`count` numbers that no record has had."""
        self.generation += count
        return range(self.generation - count + 1, self.generation + 1)

    def take(self, count: int, keep: set[bytes], slots: list[int]) -> list[int]:
        """Takes `slots`, in ascending order; returns those of evicted records.

        Evicts the least recently used records that are not in `keep` if too few slots are free. Cut off anywhere, what
        it has put in `slots` can be given back. The caller must blank the headers of what was evicted, and of what is
        `stale`, before it writes to these slots.

        Raises:
            StoreError: too few slots are free or can be freed; nothing was taken.
        """
        short = max(0, count - len(self.free))
        victims = [key for _, key in zip(range(short), (k for k in self.entries if k not in keep), strict=False)]
        if len(victims) < short:
            raise StoreError(
                f"{count} records need slots, {len(self.free) + len(victims)} of {self.num_slots} are available: "
                "the others are being written"
            )
        evicted = [self.entries[key].slot for key in victims]
        left = len(self.free) - (count - short)
        slots += sorted(self.free[left:] + evicted)
        del self.free[left:]
        for key in victims:
            del self.entries[key]
        return evicted

    def give_back(self, slots: list[int]) -> list[int]:
        """Slots of a call that was cut off, anywhere: those that nobody has now are free and `stale`.

        Returns:
            Those that were not stale before: a header that stands there is of a record that was shown, or written.
        """
        held = {entry.slot for entry in self.entries.values()}.union(self.free)
        lost = [slot for slot in slots if slot not in held]
        known = [slot for slot in lost if slot not in self.stale]
        self.stale.update(lost)
        self.free.extend(lost)
        return known

    def put_back(self, key: bytes, entry: SlabEntry) -> bool:
        """Enters a record whose slot is free after all, as the first to give way; false if the key has another."""
        if key in self.entries:
            return False
        self.free.remove(entry.slot)  # first: cut off in between, it rests until the file is opened again
        self.stale.discard(entry.slot)
        self.entries[key] = entry
        self.entries.move_to_end(key, last=False)
        return True

    def slots_of(self, keys: Iterable[bytes]) -> list[int]:
        return [self.entries[key].slot for key in keys]

    def remove(self, keys: Iterable[bytes]) -> None:
        """Strikes the keys out. Their slots are the caller's."""
        for key in keys:
            del self.entries[key]
