"""The id pool: order, all-or-nothing, refusals."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dsv4_jax.errors import CacheError, OutOfBlocksError, PlanError, PoolError
from dsv4_jax.manager.allocator import BlockAllocator

from ..effort import lines_run


def test_hands_out_the_lowest_ids_and_never_the_null_one() -> None:
    pool = BlockAllocator(6)
    assert pool.acquire(4) == [1, 2, 3, 4]
    pool.release([3, 1])
    assert (pool.num_free, pool.num_total) == (4, 6)
    assert pool.acquire(3) == [1, 3, 5]
    assert [pool.is_held(i) for i in (-1, 0, 1, 6, 7)] == [False, False, True, False, False]
    assert pool.acquire(0) == []
    assert pool.acquire(np.int32(1)) == [6]
    pool.check_integrity()


def test_acquire_is_all_or_nothing() -> None:
    pool = BlockAllocator(5)
    pool.acquire(2)
    with pytest.raises(
        OutOfBlocksError, match=r"KV cache OOM .*requested 4 blocks, 3 available \(of 5 total\)"
    ) as info:
        pool.acquire(4)
    assert (info.value.requested, info.value.available, info.value.total) == (4, 3, 5)
    assert pool.num_free == 3
    assert pool.acquire(3) == [3, 4, 5]
    with pytest.raises(OutOfBlocksError, match="requested 1 blocks, 0 available"):
        pool.acquire(1)


@pytest.mark.parametrize("count", [-1, 1.0, "1", None, True, np.float32(1)])
def test_acquire_refuses(count: object) -> None:
    pool = BlockAllocator(5)
    with pytest.raises(PlanError):
        pool.acquire(count)
    assert pool.num_free == 5


@pytest.mark.parametrize(
    ("ids", "block", "problem"),
    [
        ([2, 0], 0, "null"),
        ([2, -1], -1, "out of range"),
        ([2, 9], 9, "out of range"),
        ([2, 5], 5, "not held"),
        ([2, 3, 2], 2, "twice in one call"),
        ([1.0], 1.0, "not an integer"),
        ([True], True, "not an integer"),
        (np.array([3, 3]), 3, "twice in one call"),
        (np.array([-3]), -3, "out of range"),
        (np.array([[1, 2]]), [1, 2], "not an integer"),
    ],
)
def test_release_is_checked_as_a_whole(ids: object, block: object, problem: str) -> None:
    pool = BlockAllocator(8)
    pool.acquire(4)
    with pytest.raises(PoolError, match=rf"cannot release block {re.escape(str(block))}: .*{problem}"):
        pool.release(ids)
    assert pool.num_free == 4
    assert all(pool.is_held(i) for i in (1, 2, 3, 4))
    pool.check_integrity()


def test_release_takes_numpy_ids_and_refuses_them_the_second_time() -> None:
    pool = BlockAllocator(4)
    ids = np.asarray(pool.acquire(3), np.int32)
    pool.release(ids[:1])
    pool.release(iter([ids[1], 3]))
    assert pool.num_free == 4
    with pytest.raises(PoolError, match="not held"):
        pool.release(ids)
    pool.release([])
    pool.check_integrity()


def test_release_errors_are_cache_errors_and_value_errors() -> None:
    with pytest.raises(CacheError):
        BlockAllocator(1).release([0])
    with pytest.raises(ValueError, match="null"):
        BlockAllocator(1).release([0])


def test_a_million_ids() -> None:
    assert lines_run(BlockAllocator, 1_000_000) == lines_run(BlockAllocator, 10)
    pool = BlockAllocator(1_000_000)
    ids = pool.acquire(1_000_000)
    pool.release(ids[::2])
    assert pool.acquire(3) == [1, 3, 5]
    assert pool.num_free == 500_000 - 3
