"""The prefix tree: states, references, matching, publishing, eviction, snapshots."""

from __future__ import annotations

import enum
import itertools

import pytest

from dsv4_jax.errors import IntegrityError, OutOfBlocksError, PlanError
from dsv4_jax.eviction_queue import EvictionQueue
from dsv4_jax.manager.prefix.eviction import Freed
from dsv4_jax.manager.prefix.hashing import BlockHasher, HashSpec, Namespace
from dsv4_jax.manager.prefix.node import Node, NodeState, S, T, Tier
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree
from dsv4_jax.manager.prefix.queues import Listed

from .tree_helpers import digests, publish_path

# The state machine as it was meant, one line per state.
ALLOWED = {
    "writing": "device removed",
    "device": "backing_up offloading host storage removed",
    "backing_up": "device",
    "offloading": "host device removed",
    "host": "loading persisting device storage removed",
    "loading": "device host removed",
    "persisting": "host",
    "storage": "fetching device removed",
    "fetching": "host storage removed",
    "removed": "",
}


def node_in(state: str) -> tuple[PrefixTree, Node]:
    """A lonely unreferenced node in a state, brought there by public calls."""
    tree = PrefixTree(4)
    if state in ("storage", "fetching"):
        node = tree.add_stored(None, b"x")
        if state == "fetching":
            tree.moves.begin_fetch(node, 5)
        return tree, node
    node = tree.reserve(None, b"x", 1)
    if state == "writing":
        return tree, node
    tree.publish(node)
    tree.release([node])
    if state == "removed":
        tree.moves.discard(node)
    elif state == "backing_up":
        tree.moves.begin_backup(node, 5)
    elif state in ("offloading", "host", "loading", "persisting"):
        tree.evictor.evict(Tier.DEVICE, 1, [5])
        if state != "offloading":
            tree.moves.complete(node)
        if state == "loading":
            tree.moves.begin_load(node, 2)
        elif state == "persisting":
            tree.moves.begin_persist(node)
    return tree, node


@pytest.mark.parametrize("old", ALLOWED)
def test_the_transition_table_is_kept_from_every_state_to_every_other(old: str) -> None:
    assert set(ALLOWED) == {state.value for state in NodeState}
    for new in ALLOWED:
        tree, node = node_in(old)
        assert node.state.value == old
        if old == "writing" and new == "removed":
            node.refs = 0  # its writer's, whom `abort` stands for
        if new in ALLOWED[old].split():
            tree.nodes.set_state(node, NodeState(new))
            assert node.state.value == new
        else:
            with pytest.raises(IntegrityError, match=f"cannot become {new}"):
                tree.nodes.set_state(node, NodeState(new))
            assert node.state.value == old


CALLS = {
    "publish": {"writing": "device"},
    "backup": {"device": "backing_up"},
    "load": {"host": "loading"},
    "persist": {"host": "persisting"},
    "fetch": {"storage": "fetching"},
    "complete": {
        "backing_up": "device",
        "offloading": "host",
        "loading": "device",
        "persisting": "host",
        "fetching": "host",
    },
    "abort": {
        "writing": "removed",
        "backing_up": "device",
        "offloading": "device",
        "loading": "host",
        "persisting": "host",
        "fetching": "storage",
    },
    "discard": dict.fromkeys(("device", "offloading", "host", "loading", "storage", "fetching"), "removed"),
}


@pytest.mark.parametrize(("call", "old"), list(itertools.product(CALLS, ALLOWED)))
def test_every_call_in_every_state(call: str, old: str) -> None:
    tree, node = node_in(old)
    calls = {
        "publish": lambda: tree.publish(node),
        "backup": lambda: tree.moves.begin_backup(node, 7),
        "load": lambda: tree.moves.begin_load(node, 8),
        "persist": lambda: tree.moves.begin_persist(node),
        "fetch": lambda: tree.moves.begin_fetch(node, 7),
        "complete": lambda: tree.moves.complete(node),
        "abort": lambda: tree.moves.abort(node),
        "discard": lambda: tree.moves.discard(node),
    }
    held = (node.block, node.host)
    if old not in CALLS[call]:
        with pytest.raises(IntegrityError):
            calls[call]()
        assert (node.state.value, node.block, node.host) == (old, *held)
    else:
        freed = calls[call]()
        assert node.state.value == CALLS[call][old]
        if isinstance(freed, Freed):  # every unit is either kept or given back
            assert sorted(freed.blocks + freed.pages) == sorted({*held} - {0, node.block, node.host})
    tree.check_integrity()


def test_nothing_is_matched_before_it_is_published() -> None:
    tree = PrefixTree(4)
    names = digests("abc", 3)
    a = tree.reserve(None, names[0], 1)
    b = tree.reserve(a, names[1], 2)
    assert tree.match(names, 99).path == ()
    assert tree.publish(b) == (b, 0)  # not yet: its parent is not
    assert b.state is NodeState.WRITING
    assert tree.publish(a) == (a, 0)
    assert tree.match(names, 99).path == (a,)
    tree.publish(b)
    assert tree.match(names, 99).path == (a, b)
    with pytest.raises(IntegrityError, match="not being written"):
        tree.publish(b)
    tree.check_integrity()


def test_the_last_token_is_always_left_to_compute() -> None:
    tree = PrefixTree(4)
    for node, i in zip(publish_path(tree, "a", 3), (1, 2, 3), strict=True):
        tree.snapshots.attach(node, Tier.DEVICE, i)
    hits = [tree.match(digests("a", n // 4), n).hit for n in (0, 1, 3, 4, 5, 8, 9, 11, 12)]
    assert hits == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert tree.match(digests("a", 3), 13).hit == 3
    with pytest.raises(PlanError):
        tree.match([], -1)


def test_a_hit_ends_at_a_snapshot() -> None:
    tree = PrefixTree(4)
    nodes = publish_path(tree, "a", 4)
    match = tree.match(digests("a", 4), 17)
    assert (match.hit, len(match.path), match.nodes, match.snapshot) == (0, 4, (), None)
    snapshot = tree.snapshots.attach(nodes[2], Tier.HOST, (6, 9))
    match = tree.match(digests("a", 4), 17)
    assert (match.hit, match.nodes, match.snapshot) == (3, tuple(nodes[:3]), snapshot)
    assert tree.match(digests("a", 4), 12).hit == 0
    assert tree.snapshots.drop(nodes[2], Tier.HOST) == [6, 9]
    assert tree.match(digests("a", 4), 17).hit == 0


def test_a_path_across_tiers_is_matched_in_order() -> None:
    tree = PrefixTree(4)
    nodes = publish_path(tree, "a", 4)
    tree.release(nodes)
    for move in tree.evictor.evict(Tier.DEVICE, 2, [7, 8]).moves:
        tree.moves.complete(move.node)
    tree.moves.begin_persist(nodes[3])
    tree.moves.complete(nodes[3])
    assert tree.evictor.evict(Tier.HOST, 1).pages == [7]
    match = tree.match(digests("a", 4), 17)
    assert [n.state.value for n in match.path] == ["device", "device", "host", "storage"]
    tree.take(match, 4)
    assert tree.counters.hit_tokens == {Tier.DEVICE: 8, Tier.HOST: 4, Tier.STORAGE: 4}
    # Up again, parents first.
    with pytest.raises(IntegrityError, match="cannot go up before"):
        tree.moves.begin_load(nodes[3], 9)
    tree.moves.begin_fetch(nodes[3], 12)
    tree.moves.complete(nodes[3])
    with pytest.raises(IntegrityError, match="cannot go up before"):
        tree.moves.begin_load(nodes[3], 9)
    tree.moves.begin_load(nodes[2], 9)
    tree.moves.begin_load(nodes[3], 10)
    with pytest.raises(IntegrityError, match="below"):
        tree.moves.complete(nodes[3])
    tree.moves.complete(nodes[2])
    tree.moves.complete(nodes[3])
    assert [n.block for n in nodes[2:]] == [9, 10]
    tree.check_integrity()


def test_eviction_is_leaf_first_and_least_recent_first() -> None:
    tree = PrefixTree(4)
    a, b = publish_path(tree, "a", 3, [1, 2, 3]), publish_path(tree, "b", 2, [4, 5])
    tree.release(a)
    tree.release(b)
    assert tree.evictor.evict(Tier.DEVICE, 1).blocks == [3]
    tree.release(tree.acquire(a[:2]))
    assert tree.evictor.evict(Tier.DEVICE, 3).blocks == [5, 4, 2]
    assert tree.evictor.evict(Tier.DEVICE, 0).blocks == []
    with pytest.raises(OutOfBlocksError, match="device cache pool: requested 2 blocks, 1 available"):
        tree.evictor.evict(Tier.DEVICE, 2)
    assert tree.evictable(Tier.DEVICE) == len(tree) == 1
    for count in (-1, 1.0):
        with pytest.raises(PlanError):
            tree.evictor.evict(Tier.DEVICE, count)
    assert tree.evictor.evict(Tier.DEVICE, 1).blocks == [1]
    tree.check_integrity()


def test_what_is_referenced_stays() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "aa", 2)
    b = publish_path(tree, "ab", 2)
    tree.release(b)
    with pytest.raises(OutOfBlocksError):
        tree.evictor.evict(Tier.DEVICE, 2)
    assert tree.evictor.evict(Tier.DEVICE, 1).blocks == [b[1].block or 1001 + 1000]
    assert all(tree.is_current(n) for n in a)
    with pytest.raises(IntegrityError, match="in use"):
        tree.moves.discard(a[0])


def test_eviction_with_too_little_room_moves_what_is_next_to_the_root() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 3, [1, 2, 3])
    tree.release(a)
    result = tree.evictor.evict(Tier.DEVICE, 3, [8])
    assert (result.blocks, [(m.node, m.source, m.destination) for m in result.moves]) == ([3, 2], [(a[0], 1, 8)])
    assert tree.match(digests("a", 3), 99).path == ()  # on the move
    assert tree.moves.complete(a[0]).blocks == [1]
    assert tree.match(digests("a", 3), 99).path == (a[0],)
    tree.check_integrity()


def test_a_host_copy_makes_eviction_free_and_may_itself_be_evicted() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 2, [1, 2])
    for node, host in zip(a, (5, 6), strict=True):
        tree.moves.begin_backup(node, host)
        with pytest.raises(IntegrityError, match="host copy already"):
            tree.moves.begin_backup(node, 9)
        tree.moves.complete(node)
    assert tree.match(digests("a", 2), 99).path == tuple(a)
    assert tree.evictor.evict(Tier.HOST, 1).pages == [6]  # although it is referenced: the device has it
    tree.release(a)
    result = tree.evictor.evict(Tier.DEVICE, 2, [9])
    assert (result.blocks, len(result.moves), result.unused) == ([1], 1, [])
    assert (a[0].state, a[0].host, a[1].host) == (NodeState.HOST, 5, 9)


def test_two_requests_that_write_the_same_block() -> None:
    tree = PrefixTree(4)
    names = digests("abc", 3)
    mine, theirs = [], []
    for path, first in ((mine, 1), (theirs, 11)):
        for i in range(3):
            path.append(tree.reserve(path[-1] if path else None, names[i], first + i))
    for node in theirs[:2]:
        assert tree.publish(node) == (node, 0)
    assert tree.publish(mine[0]) == (theirs[0], 1)
    assert tree.publish(mine[1]) == (theirs[1], 2)
    assert tree.publish(mine[2]) == (mine[2], 0)
    assert mine[2].parent is theirs[1]
    assert tree.publish(theirs[2]) == (mine[2], 13)
    assert [n.refs for n in (*theirs[:2], mine[2])] == [2, 2, 2]
    assert (tree.counters.duplicates, len(tree)) == (3, 3)
    path = [*theirs[:2], mine[2]]
    tree.release(path)
    tree.release(path)
    tree.check_integrity()
    assert tree.evictor.evict(Tier.DEVICE, 3).blocks == [3, 12, 11]


def test_a_block_computed_again_brings_its_node_back_to_the_device() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 1, [1])
    tree.release(a)
    (move,) = tree.evictor.evict(Tier.DEVICE, 1, [5]).moves
    again = tree.reserve(None, digests("a", 1)[0], 2)
    assert tree.publish(again) == (again, 0)  # wait: the other is on the move
    tree.moves.complete(move.node)
    assert tree.publish(again) == (a[0], 0)
    assert (a[0].state, a[0].block, a[0].host, a[0].refs) == (NodeState.DEVICE, 2, 5, 1)
    assert tree.counters.adoptions == 1
    tree.check_integrity()


def test_references_go_to_whole_paths() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 3)
    for path in (a[1:], [a[0], a[2]], a[::-1], [a[0], a[0]]):
        with pytest.raises(IntegrityError, match="does not follow"):
            tree.acquire(path)
    with pytest.raises(IntegrityError, match="does not follow"):
        tree.release([a[0], a[2]])
    tree.release(a[2:])
    with pytest.raises(IntegrityError, match="no reference"):
        tree.release(a)
    assert [n.refs for n in a] == [1, 1, 0]
    writing = tree.reserve(a[1], b"w", 9)
    for call in (tree.acquire, tree.release):
        with pytest.raises(IntegrityError):
            call([*a[:2], writing])
    with pytest.raises(IntegrityError, match="must be on the device and referenced"):
        tree.reserve(a[2], b"v", 10)
    with pytest.raises(IntegrityError, match="cannot take 1 blocks of a match of 0"):
        tree.take(tree.match([], 1), 1)
    assert [n.refs for n in a] == [1, 1, 0]
    tree.check_integrity()


def test_digests_that_are_no_path_are_noticed() -> None:
    tree = PrefixTree(4)
    publish_path(tree, "a", 3)
    names = digests("a", 3)
    with pytest.raises(IntegrityError, match="digest 1 does not follow digest 0"):
        tree.match([names[0], names[2]], 99)


def test_an_aborted_write_leaves_nothing_behind() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 1, [1])
    b = tree.reserve(a[0], b"b", 2)
    c = tree.reserve(b, b"c", 3)
    with pytest.raises(IntegrityError, match="leaf first"):
        tree.moves.abort(b)
    assert (tree.moves.abort(c).blocks, tree.moves.abort(b).blocks) == ([3], [2])
    assert not tree.is_current(b)
    tree.release(a)
    tree.check_integrity()
    assert tree.evictor.evict(Tier.DEVICE, 1).blocks == [1]


def test_nodes_of_before_a_reset_are_refused() -> None:
    tree = PrefixTree(4)
    (a,), other = publish_path(tree, "a", 1), PrefixTree(4)
    w = tree.reserve(a, b"w", 2)
    tree.reset()
    assert (len(tree), tree.is_current(a), tree.count(NodeState.WRITING)) == (0, False, 0)
    for call in (
        lambda: tree.publish(w),
        lambda: tree.moves.abort(w),
        lambda: tree.release([a]),
        lambda: tree.acquire([a]),
        lambda: tree.moves.begin_backup(a, 1),
        lambda: tree.moves.discard(a),
        lambda: tree.snapshots.attach(a, Tier.DEVICE, 1),
        lambda: tree.reserve(a, b"x", 3),
        lambda: tree.add_stored(a, b"x"),
        lambda: other.release([a]),
    ):
        with pytest.raises(IntegrityError, match="is not in this tree"):
            call()
    tree.check_integrity()


def test_a_forks_references_are_its_own() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 2, [1, 2])
    forks = [tree.acquire(a) for _ in range(3)]
    assert [n.refs for n in a] == [4, 4]
    for path in (a, *forks[:2]):
        tree.release(path)
    with pytest.raises(OutOfBlocksError):
        tree.evictor.evict(Tier.DEVICE, 1)
    tree.release(forks[2])
    assert tree.evictor.evict(Tier.DEVICE, 2).blocks == [2, 1]


def test_snapshots_are_evicted_by_their_last_use() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 3)
    for node, slot in zip(a, (7, 8, 9), strict=True):
        tree.snapshots.attach(node, Tier.DEVICE, slot)
    with pytest.raises(IntegrityError, match="another snapshot"):
        tree.snapshots.attach(a[0], Tier.DEVICE, 5)
    tree.take(tree.match(digests("a", 1), 9))  # ends at the first node
    tree.snapshots.pin(a[1])
    with pytest.raises(IntegrityError, match="can be dropped"):
        tree.snapshots.drop(a[1], Tier.DEVICE)
    with pytest.raises(OutOfBlocksError, match="requested 3 blocks, 2 available"):
        tree.snapshots.evict(Tier.DEVICE, 3)
    assert tree.snapshots.evict(Tier.DEVICE, 1).slots == [9]
    tree.snapshots.unpin(a[1])
    with pytest.raises(IntegrityError, match="no pinned"):
        tree.snapshots.unpin(a[1])
    tree.snapshots.attach(a[1], Tier.HOST, (3,))
    tree.snapshots.attach(a[1], Tier.STORAGE)
    assert tree.snapshots.evict(Tier.DEVICE, 2).slots == [8, 7]
    assert (a[0].snapshot, a[1].snapshot.tier) == (None, Tier.HOST)
    assert (tree.snapshots.drop(a[1], Tier.HOST), a[1].snapshot.tier) == ([3], Tier.STORAGE)
    assert (tree.snapshots.drop(a[1], Tier.STORAGE), a[1].snapshot) == ([], None)
    assert [tree.snapshots.count(t) for t in (Tier.DEVICE, Tier.HOST, Tier.STORAGE)] == [0, 0, 0]
    tree.check_integrity()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_state_that_comes_back_is_the_latest(tier: Tier) -> None:
    """While storage had a copy, a state counted as last used when it first came, and was the next to go again."""
    tree = PrefixTree(4)
    old, other = publish_path(tree, "a", 2)
    at = lambda unit: unit if tier is Tier.DEVICE else (unit,)  # noqa: E731
    evict = lambda count: [*(left := tree.snapshots.evict(tier, count)).slots, *left.pages]  # noqa: E731
    for node, unit in ((old, 1), (other, 2)):
        tree.snapshots.attach(node, tier, at(unit))
    tree.snapshots.attach(old, Tier.STORAGE)
    assert evict(1) == [1]
    tree.snapshots.attach(old, tier, at(3))
    assert evict(2) == [2, 3]
    tree.check_integrity()


def test_a_removed_node_gives_all_its_units_back() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 2, [1, 2])
    tree.release(a)
    tree.snapshots.attach(a[1], Tier.DEVICE, 4)
    tree.snapshots.attach(a[1], Tier.HOST, (5, 7))
    (move,) = tree.evictor.evict(Tier.DEVICE, 1, [6]).moves
    tree.moves.complete(move.node)
    tree.moves.begin_persist(a[1])
    tree.moves.complete(a[1])
    freed = tree.evictor.evict(Tier.DEVICE, 1)
    assert (freed.blocks, freed.pages, freed.snapshots) == ([1], [6, 5, 7], [4])
    assert len(tree) == 0


def test_a_move_under_way_below_keeps_its_path() -> None:
    tree = PrefixTree(4)
    a = publish_path(tree, "a", 2, [1, 2])
    tree.release(a)
    tree.evictor.evict(Tier.DEVICE, 1, [6])
    with pytest.raises(OutOfBlocksError, match="requested 1 blocks, 0 available"):
        tree.evictor.evict(Tier.DEVICE, 1)  # would take the block that is being copied along
    tree.check_integrity()
    assert len(tree.evictor.evict(Tier.DEVICE, 1, [7]).moves) == 1
    with pytest.raises(IntegrityError, match="below"):
        tree.moves.abort(a[1])
    assert sorted(tree.moves.discard(a[1]).blocks) == [2]
    assert tree.moves.abort(a[0]).pages == [7]
    tree.check_integrity()


def test_ten_tenants_share_nothing() -> None:
    tree, spec = PrefixTree(4), HashSpec(4, "weights", 100)
    prompt = list(range(40))
    for tenant in range(10):
        hasher = BlockHasher(spec, prompt, namespace=Namespace(tenant))
        match = tree.match(hasher.digests, len(prompt))
        assert match.path == ()
        parent = None
        for i, digest in enumerate(hasher.digests):
            parent = tree.publish(tree.reserve(parent, digest, 1 + 10 * tenant + i)).node
            tree.snapshots.attach(parent, Tier.DEVICE, 1 + 10 * tenant + i)
        mine = tree.match(hasher.digests, len(prompt))
        assert {(n.block - 1) // 10 for n in mine.nodes} == {tenant}
        assert mine.hit == 9
    tree.check_integrity()


def test_integrity_notices_what_is_wrong() -> None:
    def broken(change) -> None:
        tree = PrefixTree(4)
        a = publish_path(tree, "a", 3, [1, 2, 3])
        tree.snapshots.attach(a[2], Tier.DEVICE, 1)
        tree.release(a)
        tree.check_integrity()
        change(tree, a)
        with pytest.raises(IntegrityError):
            tree.check_integrity()

    for change in (
        lambda t, a: setattr(a[0], "block", 2),
        lambda t, a: setattr(a[0], "block", 0),
        lambda t, a: setattr(a[0], "host", 4),
        lambda t, a: setattr(a[2], "refs", 1),
        lambda t, a: setattr(a[0], "state", NodeState.HOST),
        lambda t, a: setattr(a[1], "on_device", 0),
        lambda t, a: setattr(a[1], "depth", 2),
        lambda t, a: setattr(a[2], "parent", a[0]),
        lambda t, a: setattr(a[2], "queued", 0),
        lambda t, a: setattr(a[2].snapshot, "device", 0),
        lambda t, a: t.nodes.published.pop(a[0].digest),
        lambda t, a: t.nodes.published.__setitem__(b"?", a[0]),
        lambda t, a: t.nodes.idle.__setitem__(Tier.DEVICE, 2),
        lambda t, a: t.nodes.counts.__setitem__(NodeState.DEVICE, 2),
        lambda t, a: t.nodes.num_snapshots.__setitem__(Tier.HOST, 1),
        lambda t, a: t.nodes.writing.__setitem__(a[0], None),
    ):
        broken(change)


def test_a_fourth_tier_would_have_a_list_of_its_own() -> None:
    """The bits of eviction queues were `1 << tier`: a fourth tier's would have been that of the storage list."""
    assert enum.verify(enum.UNIQUE, enum.NAMED_FLAGS, enum.CONTINUOUS)(Listed)
    tree = PrefixTree(4, backup_after=0, persists=True)
    queues = [*tree.queues.blocks.values(), *tree.queues.snapshots.values()]
    members = {name: bit.value for name, bit in Listed.__members__.items()}
    assert len(queues) == len(members) - 2  # and those of `CopyLists`
    toy = enum.IntFlag("toy", members | {"FOURTH_BLOCK": enum.auto()})
    fourth = EvictionQueue(toy["FOURTH_BLOCK"], lambda node: True, lambda node: node.number)
    (node,) = publish_path(tree, "a", 1, [1])
    tree.snapshots.attach(node, Tier.DEVICE, 1)
    tree.snapshots.attach(node, Tier.HOST, (1,))
    tree.release([node])
    tree.evictor.evict(Tier.DEVICE, 1, [5])
    tree.moves.complete(node)
    listed = node.queued
    assert listed & Listed.BACKUP and listed & Listed.PERSIST and listed & Listed.HOST_BLOCK
    assert not fourth.holds(node) and fourth.lacks(node)
    fourth.push(node)
    assert fourth.holds(node) and node.queued == listed | toy["FOURTH_BLOCK"]
    assert fourth.pop() is node and fourth.pop() is None
    assert node.queued == listed and tree.wanted.pop_persists(2) == [node]


def test_the_quick_names_of_states_and_tiers_are_all_there() -> None:
    assert {name: value for name, value in vars(S).items() if name.isupper()} == dict(NodeState.__members__)
    assert {name: value for name, value in vars(T).items() if name.isupper()} == dict(Tier.__members__)
