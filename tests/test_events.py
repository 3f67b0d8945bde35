"""The event log as books that can be put back: several events at once, and events of an operation that was undone."""

from __future__ import annotations

import copy
import sys
import threading

import pytest

from dsv4_jax.events import EventLog, Tier
from dsv4_jax.manager import EventLog as ManagersEventLog


def test_the_manager_and_the_pools_have_one_log() -> None:
    assert ManagersEventLog is EventLog


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
