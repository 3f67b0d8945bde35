"""The event log, and batches of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.errors import PlanError
from dsv4_jax.manager.prefix.events import BlockEvent, EventBatch, EventLog, coalesce
from dsv4_jax.manager.prefix.node import Tier
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree

from .tree_helpers import digests, publish_path


def test_a_tree_tells_what_comes_and_goes() -> None:
    log = EventLog()
    tree = PrefixTree(4, events=log)
    names = digests("a", 3)
    nodes = publish_path(tree, "a", 3)
    tree.release(nodes)
    moves = tree.evictor.evict(Tier.DEVICE, 1, [9]).moves
    assert log.last == 3  # the bytes are still where they were
    tree.moves.complete(moves[0].node)
    tree.evictor.evict(Tier.DEVICE, 2)
    tree.reset()
    assert coalesce(log.since(0)[0]) == [
        EventBatch(1, "stored", Tier.DEVICE, tuple(names), None),
        EventBatch(4, "stored", Tier.HOST, (names[2],), names[1]),
        EventBatch(5, "removed", Tier.DEVICE, (names[2],), names[1]),
        EventBatch(6, "removed", Tier.HOST, (names[2],), names[1]),
        EventBatch(7, "removed", Tier.DEVICE, (names[1], names[0]), names[0]),
        EventBatch(9, "cleared", Tier.NONE, (), None),
    ]


def test_blocks_that_are_only_reserved_are_not_told() -> None:
    log = EventLog()
    tree = PrefixTree(4, events=log)
    node = tree.reserve(None, b"x", 1)
    tree.moves.abort(node)
    assert log.since(0) == ([], 0)


def test_a_reader_learns_how_much_it_missed() -> None:
    log = EventLog(capacity=3)
    for i in range(5):
        log.emit("stored", Tier.HOST, bytes([i]))
    events, missed = log.since(0)
    assert ([e.sequence for e in events], missed) == ([3, 4, 5], 2)
    assert [e.sequence for e in log.since(4)[0]] == [5]
    assert log.since(5) == log.since(99) == ([], 0)
    for capacity in (0, -1, 1.5):
        with pytest.raises(PlanError):
            EventLog(capacity)
    with pytest.raises(PlanError):
        log.since(-1)


events = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared"]),
        st.sampled_from([Tier.DEVICE, Tier.HOST]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=20,
)


@given(events)
def test_batches_say_the_same_as_their_events(told) -> None:
    log = EventLog()
    for kind, tier, digest, parent in told:
        log.emit(kind, tier, *([] if kind == "cleared" else [bytes([digest]), bytes([parent])]))
    original = log.since(0)[0]
    expanded, sequence = [], 0
    for batch in coalesce(original):
        assert batch.sequence == sequence + 1
        parent = batch.parent
        for digest in batch.digests or [None]:
            sequence += 1
            expanded.append(BlockEvent(sequence, batch.kind, batch.tier, digest, parent))
            parent = digest
    keep = [e if e.kind == "stored" else e._replace(parent=None) for e in original]
    assert [e if e.kind == "stored" else e._replace(parent=None) for e in expanded] == keep
