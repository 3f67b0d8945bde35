"""Which token slots of a `KVPool` are free. NumPy, no jax.

The unit is a page of `page_size` consecutive slots, page p being ids p * page_size .. (p + 1) * page_size - 1,
so that id // page_size and id % page_size are a token's page and its place there. Page 0 holds the padding
sink (id 0), comes on top of the pool's size and is never handed out. With page_size 1 a page is a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..checks import check_integer
from ..errors import IntegrityError, OutOfBlocksError, PoolError
from .spec import MAX_ROWS, as_ids, distinct
from .undo import Undo

__all__ = ["TokenToKVPoolAllocator"]


class TokenToKVPoolAllocator:
    """Hands out token slots, all of a request or none.

    Free pages are served in ascending order from a main list; freed pages wait in a second one and are merged
    (and with `sort` sorted) only when the first runs out. So `free` costs only what it frees. Every call is done
    wholly or not at all, whatever interrupts it.

    Args:
        size: `KVSpec.size`, the tokens that can be handed out; what is beyond whole pages is left out.
        page_size: `KVSpec.page_size`, tokens per page. Ids are page_size .. page_size + size - 1.
        sort: serve low ids first again after a merge, for locality.
    """

    def __init__(self, size: int, page_size: int = 1, *, sort: bool = True):
        size, self._page = (
            check_integer("size", size, 1, error=PoolError),
            check_integer("page_size", page_size, 1, error=PoolError),
        )
        self._pages = size // self._page
        if self._pages < 1:
            raise PoolError(f"{size} slots hold no page of {self._page} tokens")
        if self.num_ids > MAX_ROWS:
            raise PoolError(f"{size} slots and a page of {self._page} for padding exceed {MAX_ROWS} rows")
        self._sort = sort
        self._batch: Undo | None = None  # of the innermost batch
        self._waiting: list[np.ndarray] = []  # freed in batches that have not ended
        self._reset()

    def _reset(self) -> None:
        self._held = np.zeros(self.num_ids, bool)
        self._taken = np.zeros(self.num_ids, bool)  # held, or freed in a batch that has not ended
        self._used = np.zeros(self._pages + 1, np.int32)  # taken tokens of each page
        self._rebuild()

    def _rebuild(self) -> None:
        """The free lists from the counts: all free pages, ascending."""
        self._free = (np.flatnonzero(self._used[1:] == 0) + 1).astype(np.int32)
        self._next = 0  # of `_free`, the first page not yet served
        self._released: list[np.ndarray] = []
        self._num_released = 0

    @property
    def size(self) -> int:
        """Tokens that can be handed out at once: whole pages."""
        return self._pages * self._page

    capacity = size

    @property
    def page_size(self) -> int:
        return self._page

    @property
    def num_ids(self) -> int:
        """All ids are below this: those of the padding page and those that can be handed out."""
        return self._page * (self._pages + 1)

    @property
    def num_held(self) -> int:
        """How many tokens are handed out."""
        return int(np.count_nonzero(self._held))

    def available_size(self) -> int:
        """Returns tokens of the free pages. Unused places of a page in use are not counted: only `after` reaches
        them."""
        return (len(self._free) - self._next + self._num_released) * self._page

    def is_held(self, ids: Any) -> np.ndarray:
        """Which of the ids are handed out, bool of the same shape. Ids out of range are not. Raises `PoolError`."""
        ids = as_ids("ids", ids)
        inside = (ids >= 0) & (ids < self.num_ids)
        return inside & self._held[np.where(inside, ids, 0).astype(np.int64)]

    def alloc(self, count: int, *, after: int | None = None) -> np.ndarray:
        """`count` token ids, int32 [count], consecutive within each page.

        Args:
            after: the last token of the request, if any: the free places behind it in its page come first.

        Raises:
            OutOfBlocksError: too few are free; nothing was taken.
            PoolError: `count` is negative or no integer, or `after` is not handed out.
        """
        count = check_integer("count", count, error=PoolError)
        tail = self._behind(after)[:count]
        pages = -(-(count - tail.size) // self._page)
        if pages * self._page > self.available_size():
            raise OutOfBlocksError(count, tail.size + self.available_size(), self.size, "token", "tokens")
        undo = Undo(self._batch)
        try:
            fresh = self._take(undo, pages)[:, None] * np.int32(self._page) + np.arange(self._page, dtype=np.int32)
            ids = np.concatenate([tail, fresh.reshape(-1)])[:count]
            self._mark(undo, self._held, ids, True)
            self._mark(undo, self._taken, ids, True)
            self._count(undo, ids, 1)
            return ids
        except BaseException:
            undo.put_back()
            raise

    def free(self, ids: Any) -> None:
        """Gives tokens back: all of them or, if any is wrong, none. A page is free once all its tokens are.

        Raises:
            PoolError: an id is the null one, not of this pool, not handed out, or named twice.
        """
        undo = Undo(self._batch)
        try:
            self.free_within(undo, ids)
        except BaseException:
            undo.put_back()
            raise

    def free_within(self, undo: Undo, ids: Any) -> None:
        """`free` as a part of something larger that is undone as a whole."""
        ids = self._checked(ids)
        if ids.size:
            self._mark(undo, self._held, ids, False)
            if self._batch is None:
                self._make_available(undo, ids)
            else:
                undo.keep_end(self._waiting)
                self._waiting.append(ids)

    def clear(self) -> None:
        """Everything is free again. Raises `PoolError` within a `batch`."""
        if self._batch is not None:
            raise PoolError("clear() within a batch")
        undo = Undo(self._batch)
        try:
            undo.keep(self, "_held", "_taken", "_used", "_free", "_next", "_released", "_num_released")
            self._reset()
        except BaseException:
            undo.put_back()
            raise

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A transaction: if the block raises, all its `alloc` and `free` are undone and the error is raised again.

        Blocks nest, each undone by itself; what an inner one did is undone with the outer one. Freed tokens are
        handed out again only when the outermost block has ended: until then they may be taken back, so
        they must not be written to. They are not held meanwhile, and `available_size` does not count them. A
        `RadixCache` over this allocator takes and gives no slots in a batch: its tree would not be undone with it.
        """
        undo, outer = Undo(self._batch), self._batch
        try:
            undo.keep(self, "_batch")
            self._batch = undo
            yield
            self._batch = outer
            if outer is None and self._waiting:
                undo.keep(self, "_waiting")
                self._make_available(undo, np.concatenate(self._waiting))
                self._waiting = []
        except BaseException:
            undo.put_back()
            raise

    @property
    def in_batch(self) -> bool:
        return self._batch is not None

    def check_integrity(self) -> None:
        """Held and free pages partition the pool, and the null page is in neither. Raises `IntegrityError`."""
        free = np.concatenate([self._free[self._next :], *self._released])
        counts = np.bincount(np.flatnonzero(self._taken) // self._page, minlength=self._pages + 1)
        waiting = np.zeros(self.num_ids, bool)
        for ids in self._waiting:
            waiting[ids] = True
        problems = {
            "free pages and pages without held tokens differ": not np.array_equal(
                np.sort(free), np.flatnonzero(self._used[1:] == 0) + 1
            ),
            "tokens taken per page are miscounted": not np.array_equal(counts, self._used),
            "taken tokens are not those held and those freed in a batch": not np.array_equal(
                self._taken, self._held | waiting
            ),
            "tokens wait for the end of no batch": bool(self._waiting) and self._batch is None,
            "the null page is held": bool(self._taken[: self._page].any()),
            "the number of released pages is miscounted": sum(map(len, self._released)) != self._num_released,
        }
        for problem, wrong in problems.items():
            if wrong:
                raise IntegrityError(f"token allocator: {problem}")

    def _behind(self, after: int | None) -> np.ndarray:
        """The free ids that follow `after` in its page, up to the next that is taken."""
        if after is None:
            return np.zeros(0, np.int32)
        after = check_integer("after", after, error=PoolError)  # a Python int: 255 and 1 are 0 in uint8
        if not self.is_held(after):
            raise PoolError(f"after: token {after} is not handed out")
        rest = np.arange(after + 1, (after // self._page + 1) * self._page, dtype=np.int32)
        taken = np.flatnonzero(self._taken[rest])
        return rest[: taken[0]] if taken.size else rest

    def _take(self, undo: Undo, pages: int) -> np.ndarray:
        undo.keep(self, "_free", "_next", "_released", "_num_released")
        if pages > len(self._free) - self._next:
            merged = np.concatenate([self._free[self._next :], *self._released])
            if self._sort:
                merged.sort()
            self._free, self._next, self._released, self._num_released = merged, 0, [], 0
        taken = self._free[self._next : self._next + pages]
        self._next += pages
        return taken

    def _make_available(self, undo: Undo, ids: np.ndarray) -> None:
        self._mark(undo, self._taken, ids, False)
        self._count(undo, ids, -1)
        pages = distinct(ids // self._page)
        pages = pages[self._used[pages] == 0].astype(np.int32)
        undo.keep(self, "_num_released")
        undo.keep_end(self._released)
        self._released.append(pages)
        self._num_released += len(pages)

    def _mark(self, undo: Undo, which: np.ndarray, ids: np.ndarray, value: bool) -> None:
        undo.keep_at(which, ids)
        which[ids] = value

    def _count(self, undo: Undo, ids: np.ndarray, by: int) -> None:
        pages = ids // self._page
        undo.keep_at(self._used, pages)
        np.add.at(self._used, pages, np.int32(by))

    def _checked(self, ids: Any) -> np.ndarray:
        """Returns the ids as a flat array of its own, or `PoolError`."""
        try:
            ids = as_ids("ids", ids).reshape(-1)
        except PoolError as error:
            raise self._not_freed(ids, "not integers") from error
        for problem, wrong in (
            ("the null token", ids == 0),
            ("out of range", (ids < self._page) | (ids >= self.num_ids)),
        ):
            if wrong.any():
                raise self._not_freed(ids[wrong].tolist(), problem)
        ids = ids.astype(np.int64)  # a copy: the caller may write to its own
        if not self._held[ids].all():
            raise self._not_freed(ids[~self._held[ids]].tolist(), "not held (freed twice?)")
        if distinct(ids).size != ids.size:
            unique, times = np.unique(ids, return_counts=True)
            raise self._not_freed(unique[times > 1].tolist(), "named twice in one call")
        return ids

    def _not_freed(self, ids: object, problem: str) -> PoolError:
        valid = f"{self._page}..{self.num_ids - 1}"
        return PoolError(f"cannot free tokens {ids}: {problem} (valid ids are {valid})")
