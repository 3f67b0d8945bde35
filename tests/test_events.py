"""The event log as books that can be put back: several events at once, and events of an operation that was undone."""

from __future__ import annotations

import pytest

from dsv4_jax.events import EventLog, Tier
from dsv4_jax.manager import EventLog as ManagersEventLog


def test_the_manager_and_the_pools_have_one_log() -> None:
    assert ManagersEventLog is EventLog


@pytest.mark.parametrize("capacity", [100, 3, 1])
def test_events_are_taken_back(capacity: int) -> None:
    """Even where older ones have been forgotten meanwhile: those count as missed."""
    log = EventLog(capacity)
    log.emit_all("stored", Tier.DEVICE, [(b"a", None), (b"b", b"a")])
    before = log.last
    log.emit_all("removed", Tier.DEVICE, [(b"b", b"a"), (b"a", None)])
    log.emit("cleared", Tier.NONE)
    assert [e.sequence for e in log.since(0)[0]] == [1, 2, 3, 4, 5][-capacity:]
    log.rewind(99)
    assert log.last == 5
    log.rewind(before)
    kept, missed = log.since(0)
    assert log.last == before == 2 and len(kept) + missed == 2 and [e.sequence for e in kept] == [1, 2][: len(kept)]
    log.emit("stored", Tier.HOST, b"c")
    assert log.last == 3 and log.since(2)[0][0].digest == b"c"
    log.rewind(0)
    assert log.last == 0 and log.since(0) == ([], 0)


def test_an_interrupted_emission_tells_nothing() -> None:
    def blocks():
        yield b"a", None
        raise MemoryError

    log = EventLog()
    with pytest.raises(MemoryError):
        log.emit_all("stored", Tier.DEVICE, blocks())
    assert log.last == 0
