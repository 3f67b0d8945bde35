"""The id pool: order, refusals, generations, metadata, resizing; all of it against a model over random histories."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsv4_jax.errors import (
    CacheError,
    IntegrityError,
    OutOfBlocksError,
    PlanError,
    PoolError,
)
from dsv4_jax.manager.allocator import BlockAllocator, BlockRef

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


def test_a_million_ids() -> None:
    assert lines_run(BlockAllocator, 1_000_000) == lines_run(BlockAllocator, 10)
    pool = BlockAllocator(1_000_000)
    ids = pool.acquire(1_000_000)
    pool.release(ids[::2])
    assert pool.acquire(3) == [1, 3, 5]
    assert pool.num_free == 500_000 - 3


def test_a_reference_is_stale_once_its_block_was_released() -> None:
    pool = BlockAllocator(3)
    (a,) = pool.acquire(1)
    first = pool.ref(a)
    assert first == BlockRef(1, 1)
    pool.check(first)
    pool.release([a])
    assert not pool.is_current(first)
    with pytest.raises(PoolError, match=r"block 1 of the device pool: generation 1 is stale \(now: not held\)"):
        pool.check(first)
    assert pool.acquire(2) == [1, 2]
    assert not pool.is_current(first)
    with pytest.raises(PoolError, match="now: 2"):
        pool.release_refs([pool.ref(2), first])
    assert pool.num_free == 1
    pool.release_refs([pool.ref(2), pool.ref(np.int32(1))])
    assert pool.stats() == (3, 3, 0)


def test_references_made_before_a_reset_stay_stale() -> None:
    pool = BlockAllocator(2, "host")
    refs = [pool.ref(b) for b in pool.acquire(2, "x")]
    pool.reset()
    assert (pool.num_free, pool.num_held, pool.name) == (2, 0, "host")
    pool.acquire(2)
    assert not any(pool.is_current(r) for r in refs)
    assert pool.metadata(1) is None
    pool.check_integrity()


def test_metadata_lives_as_long_as_the_block_is_held() -> None:
    pool = BlockAllocator(4)
    pool.acquire(2, metadata="request 7")
    assert [pool.metadata(1), pool.metadata(2)] == ["request 7"] * 2
    pool.set_metadata(2, None)
    pool.set_metadata(1, {"layer": 3})
    assert [pool.metadata(1), pool.metadata(2)] == [{"layer": 3}, None]
    pool.release(np.array([1]))
    assert pool.acquire(1) == [1]
    assert pool.metadata(1) is None
    for call in (pool.metadata, pool.ref, lambda b: pool.set_metadata(b, 1)):
        for block in (0, 3, -1, 9, 1.0, None):
            with pytest.raises(PlanError):
                call(block)


def test_a_refused_acquire_keeps_no_metadata_and_stamps_nothing() -> None:
    pool = BlockAllocator(2)
    with pytest.raises(OutOfBlocksError) as info:
        pool.acquire(3, "x")
    assert (info.value.requested, info.value.available, info.value.total) == (3, 2, 2)
    with pytest.raises(PlanError):
        pool.acquire(-1, "x")
    assert pool.acquire(0, "x") == []
    pool.check_integrity()
    pool.acquire(1)
    assert pool.ref(1).generation == 1


def test_resize() -> None:
    pool = BlockAllocator(4)
    refs = [pool.ref(b) for b in pool.acquire(4)]
    pool.release([2, 4])
    with pytest.raises(PoolError, match=r"cannot resize the device pool to 2 blocks: 1 held beyond it \(3\)"):
        pool.resize(2)
    assert (pool.num_total, pool.num_free) == (4, 2)
    pool.resize(3)
    assert (pool.num_total, pool.num_free) == (3, 1)
    assert pool.acquire(1) == [2]
    with pytest.raises(OutOfBlocksError):
        pool.acquire(1)
    pool.resize(6)
    assert pool.acquire(3) == [4, 5, 6]
    assert not pool.is_current(refs[3])
    assert pool.is_current(refs[0])
    for total in (-1, 2.0, None, True):
        with pytest.raises(PlanError):
            pool.resize(total)
    pool.release(range(1, 7))
    pool.resize(0)
    assert pool.stats() == (0, 0, 0)
    with pytest.raises(PoolError, match="out of range"):
        pool.release([1])
    pool.resize(1)
    assert pool.acquire(1) == [1]
    pool.check_integrity()


def test_integrity_notices() -> None:
    pool = BlockAllocator(2)
    pool.acquire(2)
    pool._metadata[9] = "?"
    with pytest.raises(IntegrityError, match="metadata"):
        pool.check_integrity()
    pool._metadata.clear()
    pool._stamps[2] = pool._stamps[1]
    with pytest.raises(IntegrityError, match="generations"):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """`held` is the model: id to (generation, metadata)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.total, self.clock = BlockAllocator(5), 5, 0
        self.held: dict[int, tuple[int, object]] = {}
        self.refs: list[BlockRef] = []

    @rule(count=st.integers(-1, 6), tag=st.sampled_from([None, "a", "b"]))
    def acquire(self, count: int, tag: object) -> None:
        free = [i for i in range(1, self.total + 1) if i not in self.held]
        try:
            ids = self.pool.acquire(count, tag)
        except CacheError:
            assert not 0 <= count <= len(free)
            return
        assert ids == free[:count]
        for block in ids:
            self.clock += 1
            self.held[block] = self.clock, tag
            self.refs.append(BlockRef(block, self.clock))

    @rule(ids=st.lists(st.integers(-1, 8), max_size=4))
    def release(self, ids: list[int]) -> None:
        try:
            self.pool.release(np.array(ids, np.int32) if len(ids) % 2 else iter(ids))
        except PoolError:
            assert len(set(ids)) < len(ids) or not set(ids) <= set(self.held)
            return
        for block in ids:
            del self.held[block]

    @rule(last=st.integers(1, 4))
    def release_refs(self, last: int) -> None:
        refs = self.refs[-last:]
        legal = all(self.held.get(b, (0,))[0] == g for b, g in refs)
        try:
            self.pool.release_refs(refs)
        except PoolError:
            assert not legal
            return
        assert legal
        for ref in refs:
            del self.held[ref.block]

    @rule(total=st.integers(0, 8))
    def resize(self, total: int) -> None:
        beyond = [b for b in self.held if b > total]
        try:
            self.pool.resize(total)
        except PoolError as error:
            assert beyond and f"{len(beyond)} held beyond it ({', '.join(map(str, sorted(beyond)))})" in str(error)
            return
        assert not beyond
        self.total = total

    @rule()
    def reset(self) -> None:
        if self.clock % 5 == 0:
            self.pool.reset()
            self.held.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.stats() == (self.total, self.total - len(self.held), len(self.held))
        for block in range(-1, self.total + 2):
            assert self.pool.is_held(block) == (block in self.held)
        for block, (generation, tag) in self.held.items():
            assert self.pool.ref(block) == (block, generation)
            assert self.pool.metadata(block) == tag
        for ref in self.refs[-20:]:
            assert self.pool.is_current(ref) == (self.held.get(ref.block, (0,))[0] == ref.generation)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
