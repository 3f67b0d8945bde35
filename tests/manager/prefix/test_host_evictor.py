"""Blocks and states compete for the pages of the host."""

from __future__ import annotations

import itertools

import pytest

from dsv4_jax.manager.prefix.eviction_policies import EVICTION_POLICIES
from dsv4_jax.manager.prefix.node import Node, Tier
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree
from tests.manager.prefix.tree_helpers import digests, publish_path


def on_host(tree: PrefixTree, name: str, pages: itertools.count, state: int = 3) -> list[Node]:
    """Two blocks and a state of so many pages, moved to the host."""
    nodes = publish_path(tree, name, 2)
    tree.snapshots.attach(nodes[1], Tier.HOST, tuple(next(pages) for _ in range(state)))
    tree.release(nodes)
    for _ in nodes:
        (move,) = tree.evictor.evict(Tier.DEVICE, 1, [next(pages)]).moves
        tree.moves.complete(move.node)
    return nodes


@pytest.mark.parametrize("order", ["lru", "lfu"])
def test_the_oldest_path_leaves_with_its_state(order: str) -> None:
    tree, pages = (
        PrefixTree(4, eviction=EVICTION_POLICIES[order], host=True, moves_down=True, snapshot_blocks=3),
        itertools.count(1),
    )
    old, new = on_host(tree, "a", pages), on_host(tree, "b", pages)
    held = {page for node in old for page in (node.host, *(node.snapshot.host if node.snapshot else ()))}
    freed = tree.host.evict(5)
    assert set(freed.pages) == held == {1, 2, 3, 4, 5}
    assert all(map(tree.is_current, new)) and new[1].snapshot is not None
    tree.check_integrity()


def test_it_frees_what_can_leave_and_no_more() -> None:
    tree, pages = PrefixTree(4, host=True, moves_down=True, snapshot_blocks=3), itertools.count(1)
    nodes, _ = on_host(tree, "a", pages), on_host(tree, "b", pages)
    tree.acquire(nodes)
    tree.snapshots.pin(nodes[1])
    assert sorted(tree.host.evict(99).pages) == [6, 7, 8, 9, 10]
    assert tree.host.evict(1).pages == []
    tree.snapshots.unpin(nodes[1])
    assert sorted(tree.host.evict(1).pages) == [1, 2, 3], "a state leaves as a whole, in use or not"
    assert nodes[1].snapshot is None
    tree.check_integrity()


def test_a_state_that_is_hit_outlasts_blocks_that_are_not() -> None:
    tree, pages = PrefixTree(4, host=True, moves_down=True, snapshot_blocks=3), itertools.count(1)
    hit = on_host(tree, "a", pages)
    on_host(tree, "b", pages)
    for _ in range(3):
        tree.release(tree.take(tree.match(digests("a", 2), 9)))
    tree.host.evict(5)
    assert hit[1].snapshot is not None and all(map(tree.is_current, hit)) and len(tree) == 2
    tree.check_integrity()


def test_a_copy_takes_the_place_of_a_colder_state_only() -> None:
    tree = PrefixTree(4, eviction=EVICTION_POLICIES["lru"], host=True, snapshot_blocks=3)
    (old,), (new,) = publish_path(tree, "a", 1), publish_path(tree, "b", 1)
    tree.snapshots.attach(old, Tier.HOST, (1, 2, 3))
    tree.release([old])
    tree.release([new])
    freed = tree.host.evict_colder(new)
    assert freed is not None and freed.pages == [1, 2, 3]
    tree.snapshots.attach(new, Tier.HOST, (1, 2, 3))
    assert tree.host.evict_colder(old) is None and new.snapshot is not None
    tree.check_integrity()
