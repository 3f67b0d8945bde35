"""The books of a slab, without a file: every slot is a record's, free, or of a call that took it."""

from __future__ import annotations

import pytest

from dsv4_jax.errors import StoreError
from dsv4_jax.stores.slab.index import SlabEntry, SlabIndex


def entry(slot: int, generation: int = 1) -> SlabEntry:
    return SlabEntry(slot, generation, b"d" * 16)


def full_index() -> SlabIndex:
    index = SlabIndex(4)
    for slot in range(4):
        assert index.restore(b"%d" % slot, entry(slot, generation=slot + 1)) is None
    index.settle(resting=[])
    return index


@pytest.mark.parametrize(("first", "second", "stays"), [(1, 2, 1), (2, 1, 0), (3, 3, 0)])
def test_of_two_copies_the_newer_stays_and_the_other_slot_is_told(first, second, stays):
    index = SlabIndex(4)
    assert index.restore(b"k", entry(0, first)) is None
    assert index.restore(b"k", entry(1, second)) == 1 - stays
    index.settle(resting=[2])
    assert index.entries[b"k"].slot == stays and index.free == [3, 1 - stays]  # and slot 2 rests


def test_the_order_of_a_file_is_that_of_writing():
    index = SlabIndex(3)
    for slot, generation in ((0, 9), (1, 4), (2, 7)):
        index.restore(b"%d" % slot, entry(slot, generation))
    index.settle(resting=[])
    assert list(index.entries) == [b"1", b"2", b"0"] and index.free == []


def test_taking_evicts_the_least_recently_used_but_not_the_kept():
    index, slots = full_index(), list[int]()
    index.entries.move_to_end(b"1")  # a use
    assert index.take(2, {b"0"}, slots) == [2, 3]
    assert slots == [2, 3] and list(index.entries) == [b"0", b"1"]
    index.give_back(slots)
    assert sorted(index.free) == [2, 3]


def test_what_cannot_be_taken_changes_nothing():
    index, slots = full_index(), list[int]()
    with pytest.raises(StoreError, match="3 records need slots, 2 of 4 are available"):
        index.take(3, {b"0", b"1"}, slots)
    assert not slots and len(index.entries) == 4 and not index.free


def test_slots_of_a_call_that_was_cut_off_are_free_and_stale_or_their_records_again():
    index, slots = full_index(), list[int]()
    index.remove([b"3"])
    index.free.append(3)
    taken = index.take(2, set(), slots)
    assert taken == [0] and slots == [0, 3] and index.give_back([1, *slots]) == [0, 3]  # 1 is a record's
    assert (index.free, index.stale) == ([0, 3], {0, 3}) and index.give_back(slots) == []
    assert index.put_back(b"0", entry(0)) and not index.put_back(b"1", entry(3))
    assert (index.free, index.stale, list(index.entries)) == ([3], {3}, [b"0", b"1", b"2"])
    again = list[int]()
    index.take(1, set(), again)
    assert again == [3] and index.give_back(again) == [] and index.stale == {3}  # as before


def test_generations_are_given_once():
    index = SlabIndex(4)
    assert [*index.next_generations(3), *index.next_generations(0), *index.next_generations(1)] == [1, 2, 3, 4]
