"""The eviction queue: smallest key first, whatever happened to keys and eligibility since; nothing is kept for ever."""

from __future__ import annotations

import dataclasses
import enum
import random

from dsv4_jax.eviction_queue import EvictionQueue


class Lists(enum.IntFlag):
    FIRST = 1
    SECOND = 2


@dataclasses.dataclass(eq=False)
class Leaf:
    number: int
    key: int
    alive: bool = True
    queued: int = 0


def queue_of(leaves: list[Leaf], bit: Lists = Lists.SECOND) -> EvictionQueue[Leaf]:
    queue = EvictionQueue[Leaf](bit, lambda leaf: leaf.alive, lambda leaf: leaf.key)
    for leaf in leaves:
        queue.push(leaf)
    return queue


def test_the_smallest_key_leaves_first_whatever_was_touched_since() -> None:
    rng = random.Random(0)
    leaves = [Leaf(i, rng.randrange(50)) for i in range(200)]
    queue = queue_of(leaves)
    for leaf in rng.sample(leaves, 100):
        leaf.key += rng.randrange(100)
    for leaf in rng.sample(leaves, 40):
        leaf.alive = False
    expected = sorted((leaf.key, leaf.number) for leaf in leaves if leaf.alive)
    popped = [queue.pop() for _ in expected]
    assert [(leaf.key, leaf.number) for leaf in popped if leaf is not None] == expected
    assert queue.pop() is None and not any(map(queue.holds, leaves))


def test_queues_of_other_bits_do_not_meet() -> None:
    leaf = Leaf(1, 1)
    first, second = queue_of([leaf], Lists.FIRST), queue_of([leaf], Lists.SECOND)
    assert leaf.queued == Lists.FIRST | Lists.SECOND and first.holds(leaf) and second.holds(leaf)
    assert first.pop() is leaf and not first.holds(leaf) and second.holds(leaf)
    assert first.pop() is None and second.pop() is leaf


def test_what_may_not_leave_is_not_listed_until_it_is_pushed_again() -> None:
    leaf = Leaf(1, 1, alive=False)
    queue = queue_of([leaf])
    assert not queue.holds(leaf) and queue.pop() is None
    leaf.alive = True
    queue.push(leaf), queue.push(leaf)
    assert queue.pop() is leaf and queue.pop() is None


def test_removed_nodes_are_forgotten() -> None:
    queue, leaves = queue_of([]), [Leaf(i, i) for i in range(3000)]
    for leaf in leaves:
        queue.push(leaf)
        queue.push(leaf)
        leaf.alive = leaf.number % 100 == 0
    assert sum(map(queue.holds, leaves)) < 1500
    assert [queue.pop() for _ in range(30)] == leaves[::100]
    assert queue.pop() is None


def test_a_key_that_shrinks_is_told() -> None:
    rng = random.Random(1)
    leaves = [Leaf(i, rng.randrange(50, 100)) for i in range(200)]
    queue = queue_of(leaves)
    for leaf in rng.sample(leaves, 100):
        leaf.key -= rng.randrange(1, 50)
        assert queue.late() == [leaf]
        leaf.alive = rng.random() < 0.8
        queue.demote(leaf)
        if rng.random() < 0.5:
            leaf.key += rng.randrange(20)
        leaf.alive = True
        assert not queue.late()
    expected = sorted((leaf.key, leaf.number) for leaf in leaves)
    popped = [queue.pop() for _ in expected]
    assert [(leaf.key, leaf.number) for leaf in popped if leaf is not None] == expected
    assert queue.pop() is None and not any(map(queue.holds, leaves))


def test_one_that_is_demoted_comes_up_once_and_again_when_pushed() -> None:
    leaf = Leaf(1, 5)
    queue = queue_of([leaf])
    leaf.key = 3
    queue.demote(leaf)
    assert queue.pop() is leaf and queue.pop() is None
    queue.push(leaf)
    leaf.key = 2
    queue.demote(leaf)
    assert queue.pop() is leaf and queue.pop() is None
