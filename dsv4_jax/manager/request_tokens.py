"""The token ids of a request: `Request.tokens`, and ids as callers give them. Pure Python + numpy."""

from __future__ import annotations

import copy
import operator
import sys
from array import array
from collections.abc import Iterable
from typing import Any, Self, SupportsIndex

import numpy as np

from .prefix.token_ids import packed_ids

__all__ = ["Edits", "PromptIds", "TokenIds", "prompt_tokens"]


class Edits:
    """What was done to the `tokens` of all requests of one manager.

    Attributes:
        any: whether anybody has changed ids that stood there.
        listed: of how many requests they were made a list.
    """

    __slots__ = ("any", "listed")

    def __init__(self) -> None:
        self.any, self.listed = False, 0


class TokenIds(list[int]):
    """`Request.tokens`: a list that knows from which index on its ids are not those that once stood there.

    To append costs nothing more than to a list.

    Attributes:
        edits: how often ids were changed, removed or inserted.
        changed_from: the lowest index at which an id was changed, removed or inserted since the manager last took
            notice; `sys.maxsize`: nowhere.
        shortest: the least length that a change has left, if one has removed any; else `sys.maxsize`.
    """

    __slots__ = ("_edits", "changed_from", "edits", "shortest")

    def __init__(self, ids: Iterable[int], edits: Edits):
        super().__init__(ids)
        self._edits, self.edits = edits, 0
        self.settle()

    def settle(self) -> None:
        """The manager has taken notice of all changes."""
        self.changed_from = self.shortest = sys.maxsize

    def change(self, index: int, before: int) -> None:
        """Notes a change from this index on. `before`: the length then."""
        self.edits += 1
        if index < self.changed_from:
            self.changed_from, self._edits.any = index, True
        if before > len(self) < self.shortest:
            self.shortest = len(self)

    def drop(self, first: int, last: int) -> None:
        """Takes ids first..last - 1 out as if they had never been there: no change."""
        super().__delitem__(slice(first, last))

    def _at(self, index: SupportsIndex | slice) -> int:
        """The lowest index that is changed with this one; the length for what is beyond the end."""
        size = len(self)
        if isinstance(index, slice):
            places = range(*index.indices(size))
            return min(places, default=min(places.start, size)) if places.step < 0 else min(places.start, size)
        place = operator.index(index)
        return max(place + size if place < 0 else place, 0)

    def __setitem__(self, index, value) -> None:
        first, before = self._at(index), len(self)
        super().__setitem__(index, value)
        self.change(first, before)

    def __delitem__(self, index) -> None:
        first, before = self._at(index), len(self)
        super().__delitem__(index)
        self.change(first, before)

    def insert(self, index: SupportsIndex, value: int) -> None:
        """Does as a list does."""
        first, before = self._at(index), len(self)
        super().insert(index, value)
        self.change(first, before)

    def pop(self, index: SupportsIndex = -1) -> int:
        """Does as a list does."""
        first, before = self._at(index), len(self)
        value = super().pop(index)
        self.change(first, before)
        return value

    def remove(self, value: int) -> None:
        """Does as a list does."""
        del self[self.index(value)]

    def clear(self) -> None:
        """Does as a list does."""
        del self[:]

    def reverse(self) -> None:
        """Does as a list does."""
        self[:] = self[::-1]

    def sort(self, **options) -> None:
        """Does as a list does."""
        self[:] = sorted(self, **options)

    def __imul__(self, times: SupportsIndex) -> Self:
        self[:] = list(self) * times
        return self


class PromptIds(array):
    """What `TokenIds` hold, before anybody has asked for a list: made of a prompt in no time, four bytes an id.

    Who does not hand them out may append to them, too. Nobody changes them otherwise.
    """

    _edits: Edits
    edits, changed_from, shortest = 0, sys.maxsize, sys.maxsize

    @classmethod
    def of(cls, ids: array[int], edits: Edits) -> Self:
        """A copy of an array of code "I"."""
        made = cls("I", ids)
        made._edits = edits
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptIds:  # an array's own makes a plain one
        return PromptIds.of(self, copy.deepcopy(self._edits, memo))

    def listed(self) -> TokenIds:
        """The list that stands in for them from now on."""
        self._edits.listed += 1
        return TokenIds(self.tolist(), self._edits)

    def settle(self) -> None:
        """Nothing has changed."""

    def drop(self, first: int, last: int) -> None:
        """Does as `TokenIds` do."""
        del self[first:last]


def prompt_tokens(tokens: Iterable[int] | np.ndarray, vocab_size: int) -> tuple[list[int], array[int]]:
    """Returns a prompt as a list and as `packed_ids` does, which says what is raised."""
    ids = packed_ids(tokens, vocab_size)
    return ids.tolist(), ids
