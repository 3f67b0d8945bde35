"""Which token slots of a `KVPool` are free. NumPy, no jax.

The unit is a page of `page_size` consecutive slots, page p being ids p * page_size .. (p + 1) * page_size - 1,
so that id // page_size and id % page_size are a token's page and its place there. Page 0 holds the padding
sink (id 0) and is never handed out. With page_size 1 a page is a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import IntegrityError, PoolError, PoolExhaustedError, PoolReleaseError
from .spec import check_count

__all__ = ["TokenToKVPoolAllocator"]

_Journal = list[tuple[bool, np.ndarray]]  # (taken or given back, ids), oldest first


class TokenToKVPoolAllocator:
    """Hands out token slots, all of a request or none.

    Free pages are served in ascending order from a main list; freed pages wait in a second one and are merged
    (and with `sort` sorted) only when the first runs out. So `free` costs only what it frees.

    Args:
        size: `KVSpec.size`; ids 1..size exist. In pages, those of whole pages after page 0 are used.
        page_size: tokens per page.
        sort: serve low ids first again after a merge, for locality.
    """

    def __init__(self, size: int, page_size: int = 1, *, sort: bool = True):
        self._size = check_count("size", size)
        self._page = check_count("page_size", page_size)
        self._pages = (self._size + 1) // self._page - 1
        if self._pages < 1:
            raise PoolError(f"{self._size} slots hold no page of {self._page} tokens beside the padding page")
        self._sort = sort
        self._journals: list[_Journal] = []
        self._reset()

    def _reset(self) -> None:
        self._held = np.zeros(self._size + 1, bool)
        self._used = np.zeros(self._pages + 1, np.int32)  # held tokens of each page
        self._rebuild()

    def _rebuild(self) -> None:
        """The free lists from the counts: all free pages, ascending."""
        self._free = (np.flatnonzero(self._used[1:] == 0) + 1).astype(np.int32)
        self._next = 0  # of `_free`, the first page not yet served
        self._released: list[np.ndarray] = []
        self._num_released = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def page_size(self) -> int:
        return self._page

    @property
    def capacity(self) -> int:
        """Tokens that can be handed out at once: all whole pages but page 0."""
        return self._pages * self._page

    @property
    def num_held(self) -> int:
        """Tokens handed out."""
        return int(self._used.sum())

    def available_size(self) -> int:
        """Tokens of the free pages. Unused places of a page in use are not counted: only `after` reaches them."""
        return (len(self._free) - self._next + self._num_released) * self._page

    def is_held(self, ids: Any) -> np.ndarray:
        """Which of the ids are handed out, bool of the same shape. Ids out of range are not."""
        ids = np.asarray(ids)
        inside = (ids >= 0) & (ids <= self._size)
        return inside & self._held[np.where(inside, ids, 0)]

    def alloc(self, count: int, *, after: int | None = None) -> np.ndarray:
        """`count` token ids, int32 [count], consecutive within each page.

        Args:
            after: the last token of the request, if any: the free places behind it in its page come first.

        Raises:
            PoolExhaustedError: too few are free; nothing was taken.
            PoolError: `count` is negative or no integer, or `after` is not handed out.
        """
        count = check_count("count", count, 0)
        tail = self._behind(after)[:count]
        pages = -(-(count - tail.size) // self._page)
        if pages * self._page > self.available_size():
            raise PoolExhaustedError(count, tail.size + self.available_size(), self.capacity, "tokens")
        fresh = self._take(pages)[:, None] * np.int32(self._page) + np.arange(self._page, dtype=np.int32)
        ids = np.concatenate([tail, fresh.reshape(-1)])[:count]
        self._mark(ids, True)
        self._record(True, ids)
        return ids

    def free(self, ids: Any) -> None:
        """Gives tokens back: all of them or, if any is wrong, none. A page is free once all its tokens are.

        Raises:
            PoolReleaseError: an id is the null one, not of this pool, not handed out, or named twice.
        """
        ids = self._checked(ids)
        if ids.size:
            self._mark(ids, False)
            pages = np.unique(ids // self._page)
            self._release(pages[self._used[pages] == 0].astype(np.int32))
            self._record(False, ids)

    def clear(self) -> None:
        """Everything is free again. Raises `PoolError` within a `batch`."""
        if self._journals:
            raise PoolError("clear() within a batch")
        self._reset()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A transaction: if the block raises, all its `alloc` and `free` are undone and the error goes on.

        Blocks nest, each undone by itself; what an inner one did is undone with the outer one. Freed tokens are
        available at once, in the block too; so dispatch no step that writes them before the block ends.
        """
        journal: _Journal = []
        self._journals.append(journal)
        try:
            yield
        except BaseException:
            for taken, ids in reversed(journal):
                self._mark(ids, not taken)
            self._rebuild()
            raise
        else:
            if len(self._journals) > 1:
                self._journals[-2].extend(journal)
        finally:
            self._journals.pop()

    def check_integrity(self) -> None:
        """Held and free pages partition the pool, and the null page is in neither. Raises `IntegrityError`."""
        free = np.concatenate([self._free[self._next :], *self._released])
        counts = np.bincount(np.flatnonzero(self._held) // self._page, minlength=self._pages + 1)
        problems = {
            "free pages and pages without held tokens differ": not np.array_equal(
                np.sort(free), np.flatnonzero(self._used[1:] == 0) + 1
            ),
            "tokens held per page are miscounted": not np.array_equal(counts, self._used),
            "the null page is held": bool(self._held[: self._page].any()),
            "the number of released pages is miscounted": sum(map(len, self._released)) != self._num_released,
        }
        for problem, wrong in problems.items():
            if wrong:
                raise IntegrityError(f"token allocator: {problem}")

    def _behind(self, after: int | None) -> np.ndarray:
        """The free ids that follow `after` in its page, up to the next held one."""
        if after is None:
            return np.zeros(0, np.int32)
        if not self.is_held(check_count("after", after, 0)):
            raise PoolError(f"after: token {after} is not handed out")
        rest = np.arange(after + 1, (after // self._page + 1) * self._page, dtype=np.int32)
        held = np.flatnonzero(self._held[rest])
        return rest[: held[0]] if held.size else rest

    def _take(self, pages: int) -> np.ndarray:
        if pages > len(self._free) - self._next:
            self._free = np.concatenate([self._free[self._next :], *self._released])
            self._next, self._released, self._num_released = 0, [], 0
            if self._sort:
                self._free.sort()
        taken = self._free[self._next : self._next + pages]
        self._next += pages
        return taken

    def _release(self, pages: np.ndarray) -> None:
        self._released.append(pages)
        self._num_released += len(pages)

    def _mark(self, ids: np.ndarray, held: bool) -> None:
        self._held[ids] = held
        np.add.at(self._used, ids // self._page, np.int32(1 if held else -1))

    def _record(self, taken: bool, ids: np.ndarray) -> None:
        if self._journals and ids.size:
            self._journals[-1].append((taken, ids.copy()))  # the caller may write to its own

    def _checked(self, ids: Any) -> np.ndarray:
        """The ids as a flat array of its own, or `PoolReleaseError`."""
        ids = np.array(ids).reshape(-1)
        valid = f"{self._page}..{self._page * (self._pages + 1) - 1}"
        if ids.size == 0:
            return ids.astype(np.int64)
        if ids.dtype.kind not in "iu":
            raise PoolReleaseError("tokens", ids.tolist(), "not integers", valid)
        for problem, wrong in (
            ("the null token", ids == 0),
            ("out of range", (ids < self._page) | (ids >= self._page * (self._pages + 1))),
        ):
            if wrong.any():
                raise PoolReleaseError("tokens", ids[wrong].tolist(), problem, valid)
        ids = ids.astype(np.int64)
        if not self._held[ids].all():
            raise PoolReleaseError("tokens", ids[~self._held[ids]].tolist(), "not held (freed twice?)", valid)
        unique, times = np.unique(ids, return_counts=True)
        if unique.size != ids.size:
            raise PoolReleaseError("tokens", unique[times > 1].tolist(), "named twice in one call", valid)
        return ids
