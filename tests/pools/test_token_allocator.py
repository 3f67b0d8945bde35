"""The token allocator against a set of ids: conservation, no aliases, refusals, transactions, pages."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.errors import CacheError, OutOfBlocksError, PoolError
from dsv4_jax.pools import TokenToKVPoolAllocator


class Boom(Exception):
    pass


def test_lowest_ids_first_and_never_the_null_one() -> None:
    pool = TokenToKVPoolAllocator(6)
    first = pool.alloc(4)
    assert first.dtype == np.int32 and first.tolist() == [1, 2, 3, 4]
    pool.free(first[[2, 0]])
    assert pool.available_size() == 4
    assert pool.alloc(2).tolist() == [5, 6]  # freed ids wait for a merge
    assert pool.alloc(2).tolist() == [1, 3]
    assert pool.alloc(0).shape == (0,) and pool.available_size() == 0
    with pytest.raises(OutOfBlocksError, match=r"requested 1 tokens, 0 available \(of 6 total\)") as info:
        pool.alloc(1)
    assert (info.value.requested, info.value.available, info.value.total) == (1, 0, 6)
    pool.clear()
    assert pool.available_size() == 6 == pool.capacity


def test_first_freed_first_served_without_sort() -> None:
    pool = TokenToKVPoolAllocator(4, sort=False)
    pool.alloc(4)
    pool.free([3])
    pool.free([1])
    assert pool.alloc(2).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([2, 0], "null"),
        ([1, -1], "out of range"),
        ([1, 9], "out of range"),
        ([1, 5], "not held"),
        ([1, 1], "twice"),
        ([1.0], "not integers"),
        ([True], "not integers"),
        (np.array([[1, 2], [2, 3]]), "twice"),
        ([1, 2**40], "range"),
    ],
)
def test_free_is_checked_as_a_whole(ids: Any, problem: str) -> None:
    pool = TokenToKVPoolAllocator(8)
    pool.alloc(4)
    with pytest.raises(PoolError, match=problem):
        pool.free(ids)
    assert pool.available_size() == 4
    pool.free(np.array([[1, 2], [3, 4]]))
    with pytest.raises(PoolError, match="freed twice"):
        pool.free([4])
    pool.free([])
    pool.check_integrity()


@pytest.mark.parametrize("count", [-1, 1.0, None, True, "1"])
def test_alloc_refuses(count: Any) -> None:
    pool = TokenToKVPoolAllocator(8)
    with pytest.raises(PoolError, match="count"):
        pool.alloc(count)
    with pytest.raises(PoolError, match="not handed out"):
        pool.alloc(1, after=3)
    with pytest.raises(PoolError, match="hold no page"):
        TokenToKVPoolAllocator(3, page_size=4)


@pytest.mark.parametrize(("size", "page", "usable"), [(16, 4, 16), (16, 1, 16), (4, 4, 4), (18, 4, 16), (5, 5, 5)])
def test_the_size_is_what_can_be_allocated(size: int, page: int, usable: int) -> None:
    """The page of the null token comes on top; only what is no whole page is left out."""
    pool = TokenToKVPoolAllocator(size, page)
    assert pool.size == pool.capacity == pool.available_size() == usable
    assert pool.alloc(usable).tolist() == list(range(page, page + usable)) and pool.num_ids == page + usable
    pool.check_integrity()


def test_pages() -> None:
    """A page comes back once, when the last of its tokens does."""
    pool = TokenToKVPoolAllocator(12, page_size=4)  # ids 4..15
    a = pool.alloc(6)
    assert a.tolist() == [4, 5, 6, 7, 8, 9] and pool.available_size() == 4
    pool.free(a[:3])
    assert pool.available_size() == 4
    pool.free(a[3:4])
    assert pool.available_size() == 8
    grown = pool.alloc(4, after=9)
    assert grown.tolist() == [10, 11, 12, 13]  # the page of token 9 first
    with pytest.raises(OutOfBlocksError, match="requested 7 tokens, 6 available"):
        pool.alloc(7, after=13)
    assert pool.alloc(6, after=13).tolist() == [14, 15, 4, 5, 6, 7]
    with pytest.raises(PoolError, match="out of range"):
        pool.free([16])
    pool.check_integrity()


def test_tokens_freed_in_a_batch_wait_for_its_end() -> None:
    """Not as pages, not behind `after`, not when an inner block ends: all may yet be taken back."""
    pool = TokenToKVPoolAllocator(8, page_size=2)
    a = pool.alloc(8)
    with pool.batch():
        with pool.batch():
            pool.free(a[1:4])
        assert pool.available_size() == 0 and pool.num_held == 5 and not pool.is_held(a[1:4]).any()
        with pytest.raises(OutOfBlocksError):
            pool.alloc(1)
        with pytest.raises(OutOfBlocksError):
            pool.alloc(1, after=2)  # token 3 was freed here
        with pytest.raises(PoolError, match="freed twice"):
            pool.free(a[1:2])
        pool.check_integrity()
    assert pool.available_size() == 2 and pool.alloc(3, after=2).tolist() == [3, 4, 5]
    with pool.batch():  # nor what was taken in it
        pool.free(pool.alloc(0))
        pool.free([5])
        assert pool.available_size() == 0
    pool.check_integrity()


def test_batch_is_undone_when_it_raises() -> None:
    pool = TokenToKVPoolAllocator(8)
    a = pool.alloc(4)
    with pytest.raises(Boom), pool.batch():
        pool.free(a[:2])
        b = pool.alloc(4)
        pool.free(b[:1])
        raise Boom
    assert pool.available_size() == 4
    assert pool.is_held(range(-1, 10)).tolist() == [False] * 2 + [True] * 4 + [False] * 5
    pool.check_integrity()
    with pool.batch():
        pool.free(a[:1])
        with pytest.raises(Boom), pool.batch():
            pool.free(a[1:2])
            raise Boom
        with pool.batch():
            pool.free(a[2:3])
        with pytest.raises(PoolError):
            pool.free(a[2:3])
        with pytest.raises(PoolError, match="within a batch"):
            pool.clear()
    assert pool.is_held([1, 2, 3, 4]).tolist() == [False, True, False, True]
    pool.check_integrity()


@pytest.mark.parametrize("odd", [[1.0], [True], ["1"], [None], [[1], [2, 3]], [2**70], 2**70, "1", object(), {1}])
def test_ids_of_odd_types_are_refused(odd: Any) -> None:
    pool = TokenToKVPoolAllocator(8)
    pool.alloc(4)
    with pytest.raises(PoolError):
        pool.is_held(odd)
    with pytest.raises(PoolError, match="not integers"):
        pool.free(odd)
    assert pool.num_held == 4


def test_ids_of_any_integer_type() -> None:
    pool = TokenToKVPoolAllocator(300)
    pool.alloc(6)
    for number, kind in enumerate([np.uint8, np.int8, np.uint64, np.int16, np.uint32], 1):
        ids = np.array([number], kind)
        assert pool.is_held(ids).all()
        pool.free(ids)
    assert not pool.is_held(np.array([2**64 - 1, 2**32 + 6], np.uint64)).any() and pool.num_held == 1
    with pytest.raises(PoolError, match="out of range"):
        pool.free(np.array([2**32 + 6], np.uint64))
    with pytest.raises(PoolError, match="rows"):
        TokenToKVPoolAllocator(2**31 - 1)
    paged = TokenToKVPoolAllocator(256, 2)
    assert paged.alloc(253)[-1] == 254 and paged.alloc(1, after=np.uint8(254)).tolist() == [255]
    assert paged.alloc(2, after=np.uint8(255)).tolist() == [256, 257]


@given(st.integers(0, 2**32), st.sampled_from([1, 1, 2, 4]), st.booleans())
@settings(max_examples=30)
@pytest.mark.slow
def test_trace(seed: int, page: int, sort: bool) -> None:
    """150 operations an example against a plain set of ids."""
    random = Random(seed)
    size = random.randint(page, 60) // page * page
    pool = TokenToKVPoolAllocator(size, page, sort=sort)
    held: set[int] = set()
    waiting: set[int] = set()  # freed in a batch that has not ended

    def step(depth: int = 0) -> None:
        nonlocal held, waiting
        kind = random.choice(["alloc", "alloc", "grow", "free", "free", "bad", "batch", "clear"])
        if kind in ("alloc", "grow"):
            after = random.choice(sorted(held)) if kind == "grow" and held else None
            count, before = random.randint(0, size // 3 + 1), pool.available_size()
            try:
                ids = pool.alloc(count, after=after).tolist()
            except OutOfBlocksError:
                assert count > before
            else:
                assert len(set(ids)) == count == len(ids) and not (held | waiting) & set(ids)
                assert all(page <= i < size + page for i in ids)
                assert after is not None or all(i % page == k % page for k, i in enumerate(ids))
                held |= set(ids)
        elif kind == "free":
            ids = random.sample(sorted(held), random.randint(0, len(held)))
            pool.free(np.array(ids, np.int64 if random.random() < 0.5 else np.int32))
            held -= set(ids)
            waiting |= set(ids) if depth else set()
        elif kind == "bad":
            wrong = random.choice([0, -1, size + page, *(set(range(size + 1)) - held)])
            with pytest.raises(PoolError):
                pool.free([*random.sample(sorted(held), min(len(held), 2)), wrong])
        elif kind == "batch" and depth < 3:
            before = set(held), set(waiting)
            try:
                with pool.batch():
                    for _ in range(random.randint(0, 4)):
                        step(depth + 1)
                    if random.random() < 0.5:
                        raise Boom
            except Boom:
                held, waiting = before
            waiting = waiting if depth else set()
        elif kind == "clear" and depth == 0 and random.random() < 0.1:
            pool.clear()
            held = set()
        pool.check_integrity()
        assert set(np.flatnonzero(pool.is_held(np.arange(size + page)))) == held
        assert pool.num_held == len(held)
        assert pool.available_size() + page * len({i // page for i in held | waiting}) == pool.size == size

    for _ in range(150):
        step()


def test_host_side_imports_no_jax() -> None:
    names = "ChunkCache, RadixCache, ReqToTokenPool, StateSlots, TokenToKVPoolAllocator"
    code = f"import sys; from dsv4_jax.pools import {names}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_are_those_of_the_package() -> None:
    assert all(issubclass(e, CacheError) for e in (PoolError, OutOfBlocksError, PoolError))
