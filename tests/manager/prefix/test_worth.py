"""What leaves first: ends of paths that no hit can reach, states that were passed, what saves least for its bytes."""

from __future__ import annotations

import itertools

import pytest

from dsv4_jax.manager.prefix.eviction_policies import EVICTION_POLICIES
from dsv4_jax.manager.prefix.node import Node, Tier
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree
from dsv4_jax.manager.prefix.worth import UNIT, HitRates, Kind, block_worth, kind_of, snapshot_worth
from tests.manager.prefix.tree_helpers import digests, publish_path

UNITS = itertools.count(1)


def cached(tree: PrefixTree, name: str, count: int, *states: int, **place: int) -> list[Node]:
    """A path that nobody uses, with snapshots taken after so many blocks."""
    nodes: list[Node] = []
    for depth in range(1, count + 1):
        more = publish_path(tree, name, depth, [next(UNITS) for _ in range(depth)])
        tree.release(nodes)
        nodes = more
        if depth in states:
            tree.snapshots.attach(nodes[-1], Tier.DEVICE, next(UNITS), **place)
    tree.release(nodes)
    return nodes


def hit(tree: PrefixTree, name: str, count: int) -> None:
    tree.release(tree.take(tree.match(digests(name, count), count * tree.block_tokens + 1)))


def leave(tree: PrefixTree, count: int) -> set[Node]:
    """The nodes that leave the device."""
    before = list(tree.nodes.published.values())
    tree.evictor.evict(Tier.DEVICE, count)
    tree.check_integrity()
    return {node for node in before if not tree.is_current(node)}


def test_blocks_behind_the_last_state_leave_first() -> None:
    tree = PrefixTree(4)
    old, new = cached(tree, "a", 3, 3), cached(tree, "b", 4, 2)
    assert leave(tree, 2) == set(new[2:])
    assert leave(tree, 2) == set(old[1:]), "and a path loses its end with its state: what is left of it comes next"
    assert leave(tree, 1) == {old[0]}


def test_blocks_whose_state_is_gone_leave_first() -> None:
    tree = PrefixTree(4)
    old, new = cached(tree, "a", 2, 2), cached(tree, "b", 2, 2)
    tree.snapshots.drop(new[1], Tier.DEVICE)
    assert leave(tree, 2) == set(new)
    assert leave(tree, 2) == set(old)


def test_what_is_in_use_is_no_idle_end() -> None:
    tree = PrefixTree(4, host=True)
    (used,) = publish_path(tree, "a", 1)
    (old,) = cached(tree, "b", 1)
    for host, node in enumerate((used, old), 1):
        tree.moves.begin_backup(node, host)
        tree.moves.complete(node)
    tree.evictor.evict(Tier.HOST, 1)
    assert (used.host, old.host) == (1, 0)
    tree.release([used])
    tree.check_integrity()
    assert leave(tree, 1) and tree.is_current(used) != tree.is_current(old)


def test_a_block_counts_its_hits_and_fades() -> None:
    tree = PrefixTree(4)
    (often,), (seldom,) = cached(tree, "a", 1, 1), cached(tree, "b", 1, 1)
    for _ in range(3):
        hit(tree, "a", 1)
    assert [block_worth(n) for n in (often, seldom)] == [4 * UNIT, UNIT]
    for i in range(6):  # one comes, one goes
        cached(tree, "cdefgh"[i], 1, 1)
        leave(tree, 1)
    assert not tree.is_current(seldom) and tree.nodes.level > 2 * UNIT
    for i in range(6):
        cached(tree, "ijklmn"[i], 1, 1)
        leave(tree, 1)
    assert not tree.is_current(often), "its hits are long past"


@pytest.mark.parametrize(("order", "first"), [("worth", "the passed one"), ("lru", "the oldest")])
def test_the_next_turn_passes_the_states_of_the_one_before(order: str, first: str) -> None:
    tree = PrefixTree(4, eviction=EVICTION_POLICIES[order])
    other = cached(tree, "x", 3, 3)
    for name in "uvw":  # states of this kind are hit, so that fresh ones are worth something
        cached(tree, name, 3, 3)
        hit(tree, name, 3)
    nodes = cached(tree, "a", 3, 1, 3)
    hit(tree, "a", 3)
    cached(tree, "a", 6, 6, after=3)
    assert [nodes[i].snapshot.kind for i in (0, 2)] == [Kind.PASSED, Kind.PASSED]
    tree.snapshots.evict(Tier.DEVICE, 1)
    assert (other[2].snapshot is None) == (first == "the oldest")
    assert (nodes[0].snapshot is None) == (first == "the passed one")
    tree.check_integrity()


def test_a_junction_is_not_passed_and_its_own_steps_pass_nothing() -> None:
    tree = PrefixTree(4)
    nodes = cached(tree, "a", 2, 2)
    cached(tree, "ab", 2, 2)
    tree.snapshots.attach(nodes[0], Tier.DEVICE, 1)
    assert nodes[0].snapshot.kind == Kind.JUNCTION, "two paths part there"
    hit(tree, "a", 2)
    cached(tree, "a", 4, 3, 4, after=2)
    assert (nodes[0].snapshot.kind, nodes[1].snapshot.kind) == (Kind.JUNCTION, Kind.PASSED)
    third = tree.get(digests("a", 3)[2])
    assert third is not None and third.snapshot.kind == Kind.UNKNOWN, "the same request took it"


def test_a_state_saves_the_blocks_up_to_the_next_one_above() -> None:
    tree = PrefixTree(4)
    nodes = cached(tree, "a", 8, 2, 5, 8)
    assert [nodes[i].snapshot.reach for i in (1, 4, 7)] == [2, 3, 3]
    worth = snapshot_worth(nodes[7].snapshot)
    tree.snapshots.drop(nodes[4], Tier.DEVICE)
    assert nodes[7].snapshot.reach == 6 and snapshot_worth(nodes[7].snapshot) > worth
    tree.snapshots.drop(nodes[1], Tier.DEVICE)
    assert nodes[7].snapshot.reach == 8


def test_kinds_that_are_hit_are_worth_more() -> None:
    rates = HitRates(blocks=9)
    fresh = rates.worth(1)
    for _ in range(100):
        rates.taken(1)
        rates.taken(2)
        rates.hit(2)
    assert rates.worth(1) < fresh < rates.worth(2)
    bytes_alike = HitRates(blocks=1)
    assert bytes_alike.worth(1) == pytest.approx(9 * HitRates(blocks=9).worth(1)), "for its bytes"
    many = HitRates()
    for _ in range(10_000):
        many.taken(3)
    for _ in range(5000):
        many.taken(3)
        many.hit(3)
    assert many.worth(3) > 3.5 * UNIT, "what was long ago counts little: nearly all of the last ones were hit"


def test_a_state_that_its_owner_takes_back_was_none() -> None:
    tree = PrefixTree(4)
    nodes = publish_path(tree, "a", 3)
    before = tree.snapshots.rates.worth(0)
    for slot, node in enumerate(nodes, 1):  # the rolling end of an output
        tree.snapshots.attach(node, Tier.DEVICE, slot, kind=0)
        if slot < 3:
            tree.snapshots.drop(node, Tier.DEVICE)
    tree.take(tree.match(digests("a", 3), 13))
    assert tree.snapshots.rates.worth(0) > 2 * before


def test_kinds_of_places() -> None:
    kinds = [kind_of(tokens, 100, 4) for tokens in (100, 96, 92, 88, 84, 64, 32, 4)]
    assert kinds == [1, 1, 2, 3, 3, 5, 6, 6]
    assert kind_of(104, 100, 4) == 0 and kind_of(4, 0, 4) == 0


def test_host_copies_leave_before_what_only_the_host_has() -> None:
    for moves_down, first in ((True, "copy"), (False, "old")):
        tree = PrefixTree(4, host=True, moves_down=moves_down)
        (old,), (copy,) = cached(tree, "a", 1, 1), cached(tree, "b", 1, 1)
        tree.moves.begin_backup(copy, 1)
        tree.moves.complete(copy)
        (move,) = tree.evictor.evict(Tier.DEVICE, 1, [2]).moves
        assert move.node is old
        tree.moves.complete(old)
        tree.evictor.evict(Tier.HOST, 1)
        assert (copy.host == 0) == (first == "copy") and tree.is_current(old) == (first == "copy")
        tree.check_integrity()


def test_a_path_leaves_as_a_whole_in_one_call() -> None:
    tree = PrefixTree(4)
    kept = cached(tree, "a", 4, 4)
    idle = cached(tree, "b", 4, 4)
    tree.snapshots.drop(idle[3], Tier.DEVICE)
    assert leave(tree, 4) == set(idle) and all(map(tree.is_current, kept))
