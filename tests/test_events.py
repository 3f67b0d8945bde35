"""The event log, batches of it, and events of an operation that was undone."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.errors import PlanError
from dsv4_jax.events import BlockEvent, EventBatch, EventLog, Tier, coalesce
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree

from .manager.prefix.tree_helpers import digests, publish_path


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


@pytest.mark.parametrize("capacity", [100, 3, 1])
def test_events_are_taken_back(capacity: int) -> None:
    """Before a reader saw them; even where older ones have been forgotten meanwhile: those count as missed."""
    log = EventLog(capacity)
    log.emit_all("stored", Tier.DEVICE, [(b"a", None), (b"b", b"a")])
    before = log.last
    log.emit_all("removed", Tier.DEVICE, [(b"b", b"a"), (b"a", None)])
    log.emit("cleared", Tier.NONE)
    assert [e.sequence for e in copy.deepcopy(log).since(0)[0]] == [1, 2, 3, 4, 5][-capacity:]
    log.rewind(99)
    assert log.last == 5
    log.rewind(before)
    kept, missed = copy.deepcopy(log).since(0)
    assert log.last == before == 2 and len(kept) + missed == 2 and [e.sequence for e in kept] == [1, 2][: len(kept)]
    log.emit("stored", Tier.HOST, b"c")
    assert log.last == 3
    log.rewind(0)
    assert log.last == 0 and log.since(0) == ([], 0)


def test_what_a_reader_saw_before_it_was_undone_is_called_off() -> None:
    """Its numbers were given to other events, which that reader never saw."""
    log = EventLog()
    log.emit("stored", Tier.DEVICE, b"a")
    log.since(0)
    log.emit_all("removed", Tier.DEVICE, [(b"a", None)])
    _, seen = log.since(1), log.last
    log.emit_all("stored", Tier.DEVICE, [(b"b", None)])
    for undone in (2, 1):  # as the steps of an operation are undone: the last one first
        log.rewind(undone)
    log.emit("stored", Tier.DEVICE, b"c")
    events, missed = log.since(seen)
    told = [(e.sequence, e.kind, e.digest) for e in events]
    assert told == [(3, "cleared", None), (4, "stored", b"c")] and not missed


@pytest.mark.parametrize("capacity", [40, 100_000])
def test_a_reader_in_another_thread_sees_every_event_or_how_many_it_missed(capacity: int) -> None:
    """It failed with "deque mutated during iteration", or passed over events that came while it looked."""
    log, seen, told, stop = EventLog(capacity), 0, 0, threading.Event()

    def write() -> None:
        digest = 0
        while not stop.is_set():
            log.emit_all("stored", Tier.DEVICE, [(bytes([i]), None) for i in range(1 + digest % 5)])
            log.emit("removed", Tier.DEVICE, b"x")
            digest += 1

    writer, before = threading.Thread(target=write), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer.start()
    try:
        while told < 300 or seen < 3000:
            events, missed = log.since(seen)
            assert [e.sequence for e in events] == list(range(seen + missed + 1, seen + missed + 1 + len(events)))
            seen += missed + len(events)
            told += bool(events)
    finally:
        stop.set()
        writer.join()
        sys.setswitchinterval(before)
    events, missed = log.since(seen)
    assert seen + missed + len(events) == log.last


def test_an_interrupted_emission_tells_nothing() -> None:
    def blocks():
        yield b"a", None
        raise MemoryError

    log = EventLog()
    with pytest.raises(MemoryError):
        log.emit_all("stored", Tier.DEVICE, blocks())
    assert log.last == 0
