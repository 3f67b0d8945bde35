"""Links that break, and what becomes of hand-offs: the next ones go on, and who waits for the broken ones is told."""

from __future__ import annotations

import gc
import itertools
import json
import time

import pytest

from dsv4_jax.errors import HandoffError, PeerError, TransferError
from dsv4_jax.manager import prometheus_text
from dsv4_jax.tiers.remote import peer as peers
from dsv4_jax.transports import wire
from tests.clock import PATIENCE, FakeClock
from tests.transports.samples import LAYOUT, open_transport, pool

from .byte_engine import BLOCK, VOCAB
from .test_driver import PROMPT, A, Side


@pytest.fixture
def sides():
    sender, taker = Side(0), Side(2)
    yield sender, taker, taker.transport.connect(sender.metadata)
    sender.transport.close(), taker.transport.close()


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


def cut(side: Side) -> None:
    """What a network does to all connections to this host."""
    server = side.transport._engine._server
    until(lambda: server._places)
    with server._lock:
        for connection in server._threads:
            wire.cut(connection)


def hand_over(sender: Side, taker: Side, peer, prompt: list[int]) -> int:
    """How many tokens of this prompt the one has from the other."""
    request = sender.manager.admit_request(prompt, namespace=A)
    sender.engine.spaces[request.id] = A
    sender.engine.step([(request, len(prompt) // BLOCK * BLOCK)])
    sender.driver.export(request)
    sender.manager.release_request(request)
    (handoff,) = sender.poll()
    arrival = taker.driver.receive(handoff.to_json(), peer, prompt, namespace=A)
    until(lambda: [taker.poll()] and arrival.is_over)
    request = taker.manager.admit_remote(arrival)
    taker.manager.release_request(request)
    until(lambda: [taker.poll(), sender.poll()] and not sender.manager.leases)
    return request.num_hit


def test_hand_offs_go_on_after_every_cut(sides) -> None:
    sender, taker, peer = sides
    for i in range(12):
        prompt = [(i + n * n) % VOCAB for n in range(2 * BLOCK + 3)]
        assert hand_over(sender, taker, peer, [i, *prompt]) == 2 * BLOCK
        cut(sender)
        until(lambda: [taker.poll()] and peer.error is not None)
        until(lambda: [taker.poll()] and peer.error is None)
    assert (peer.losses, peer.reconnects) == (12, 12) and taker.driver.counts["done"] == 12
    assert not taker.driver.given_up and not sender.manager.leases and not taker.manager.cache.reading
    stats = taker.transport.stats()
    assert (stats.up, stats.lost, stats.counts["reconnects"], stats.counts["losses"]) == (1, 0, 12, 12)
    assert stats.counts["bytes"] == peer.bytes > 0 and stats.seconds == peer.seconds > 0


def test_receive_says_that_the_peer_is_lost(sides, monkeypatch) -> None:
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    with monkeypatch.context() as during:
        during.setattr(type(taker.transport._engine), "connect", lambda *_: 1 / 0)
        cut(sender)
        until(lambda: [taker.poll()] and peer.error is not None)
        with pytest.raises(PeerError, match="gone"):
            taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
        assert not taker.driver.busy and not taker.manager.cache.reading, "nothing has changed"
        assert taker.transport.stats().lost == 1
    until(lambda: [taker.poll()] and peer.error is None)
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    until(lambda: [taker.poll()] and arrival.is_over)
    assert taker.manager.admit_remote(arrival).num_hit == 4 * BLOCK


@pytest.mark.parametrize("begun", [False, True])
def test_a_cut_ends_what_is_under_way(sides, begun, monkeypatch) -> None:
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    # Never answered: a connection that the server has not taken up yet when all are cut would carry the reads through.
    monkeypatch.setattr(sender.transport._engine._server, "_answer", lambda *_: time.sleep(0.05) or 1 / 0)
    if begun:
        taker.poll()
        assert arrival.reads
    # Else the peer may be found again before anything was asked of it.
    monkeypatch.setattr(type(taker.transport._engine), "connect", lambda *_: 1 / 0)
    cut(sender)
    until(lambda: [taker.poll()] and arrival.is_over)
    assert arrival.failure is not None and not taker.manager.cache.reading
    assert sum(taker.driver.given_up.values()) == taker.driver.given_up["host gone"] == 1
    monkeypatch.undo()
    until(lambda: [taker.poll(), sender.poll()] and not sender.manager.leases)  # told when the peer was found
    assert peer.error is None and hand_over(sender, taker, peer, [5, *PROMPT]) == 4 * BLOCK


def test_a_lost_peer_is_looked_for_after_pauses_that_grow_and_in_the_end_no_more(monkeypatch) -> None:
    clock, tries = FakeClock(), []
    with open_transport("loopback") as there, open_transport("loopback", clock=clock) as here:
        here.publish(LAYOUT, pool())
        peer = here.connect(there.publish(LAYOUT, pool()))
        there.close()
        until(lambda: here.notices() or peer.error is not None)
        monkeypatch.setattr(type(here._engine), "connect", lambda *_: tries.append(clock.now) or 1 / 0)
        while here.stats().peers:
            clock.advance(0.05)
            here.notices()
    pauses = [b - a for a, b in itertools.pairwise(tries)]
    assert pauses[0] < 5 * peers.FIRST_PAUSE and all(each >= peers.LONGEST_PAUSE / 2 for each in pauses[10:])
    assert max(pauses) <= peers.LONGEST_PAUSE + 0.1 and tries[-1] - tries[0] <= peers.GIVEN_UP
    assert here.stats().counts["given_up"] == 1 and peer.error is not None


def test_who_disconnects_is_not_connected_again() -> None:
    clock = FakeClock()
    with open_transport("loopback") as there, open_transport("loopback", clock=clock) as here:
        here.publish(LAYOUT, pool())
        published = there.publish(LAYOUT, pool())
        peer = here.connect(published)
        here.disconnect(peer)
        for _ in range(10):
            clock.advance(100)
            here.notices()
        with pytest.raises(PeerError, match="disconnected"):
            here.check_peer(peer)
        assert peer.error is not None and here.connect(published) is not peer


@pytest.mark.parametrize("answered", [False, True])
def test_a_read_whose_handle_was_dropped_ends(monkeypatch, answered) -> None:
    """Its pages are anybody's again: when it is through, which takes a part of the 30 s, or at its deadline."""
    clock, pages = FakeClock(), pool()
    with open_transport("loopback") as there, open_transport("loopback", clock=clock, timeout=30.0) as here:
        here.publish(LAYOUT, pages)
        peer = here.connect(there.publish(LAYOUT, pool(1)))
        answer, went = there._engine._server._answer, []
        if not answered:
            monkeypatch.setattr(
                there._engine._server, "_answer", lambda *what: went.append(1) or time.sleep(0.2) or answer(*what)
            )
        here.read(peer, "block", [1, 2], [3, 4], None)
        gc.collect()
        with pytest.raises(TransferError, match="written by another read"):
            here.read(peer, "block", [1], [3], None)
        if answered:
            until(lambda: clock.advance(0.01) or here.notices() or not here._written)
            assert peer.error is None and (pages[3] == pool(1)[1]).all()
        else:
            until(lambda: went)
            clock.advance(29.0)
            here.notices()
            assert here._written == {3, 4} and peer.error is None
            clock.advance(1.0)
            here.notices()
            assert not here._written and "in time" in str(peer.error) and not pages.any()


def test_a_lease_is_ended_by_its_own_host_alone(sides) -> None:
    """Not by another one that the metadata was given to, and that has heard its name."""
    sender, taker, peer = sides
    other = Side(2)
    with other.transport:
        theirs = other.transport.connect(sender.metadata)
        request = sender.manager.admit_request(PROMPT, namespace=A)
        sender.engine.spaces[request.id] = A
        sender.engine.step([(request, 4 * BLOCK)])
        sender.driver.export(request, peer=taker.transport.name)
        (handoff,) = sender.poll()
        for word in ({"acknowledge": handoff.lease}, {"again": handoff.lease, "first": 0}):
            other.transport.notify(theirs, json.dumps(word).encode())
        until(lambda: [sender.poll()] and sender.driver.counts["foreign"] == 2)
        assert handoff.lease in sender.manager.leases.active and not sender.driver.take_handoffs()
        arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
        until(lambda: [taker.poll()] and arrival.is_over)
        until(lambda: [taker.poll(), sender.poll()] and not sender.manager.leases)
        assert sender.driver.counts["acknowledged"] == 1
        page = prometheus_text(sender.driver.stats(), prefix="dsv4_transport").splitlines()
        for name, count in {"exported": 1, "announced": 1, "acknowledged": 1, "asked_again": 0, "foreign": 2}.items():
            assert f'dsv4_transport_handoffs_{name}_total{{engine="loopback"}} {count}' in page


def test_the_first_host_that_names_a_lease_has_it_and_names_cannot_be_guessed(sides) -> None:
    sender, taker, peer = sides
    other = Side(2)
    with other.transport:
        theirs, leases = other.transport.connect(sender.metadata), []
        for i in range(2):
            request = sender.manager.admit_request([i, *PROMPT], namespace=A)
            sender.engine.spaces[request.id] = A
            sender.engine.step([(request, 4 * BLOCK)])
            leases.append(sender.driver.export(request).lease)
            sender.manager.release_request(request)
        assert len(leases[0].split("-")[-1]) == 32 and leases[0].split("-")[-1] != leases[1].split("-")[-1]
        taker.transport.notify(peer, json.dumps({"again": leases[0], "first": 0}).encode())
        until(lambda: [sender.poll()] and leases[0] in sender.driver._takers)
        other.transport.notify(theirs, json.dumps({"acknowledge": leases[0]}).encode())
        until(lambda: [sender.poll()] and sender.driver.counts["foreign"] == 1)
        assert leases[0] in sender.manager.leases.active


def test_notices_for_others_that_nobody_takes_are_bounded(sides) -> None:
    sender, taker, peer = sides
    for _ in range(30):
        taker.transport.notify(peer, bytes(100_000))
    taker.transport.notify(peer, b"{}")
    until(lambda: [sender.poll()] and sender.driver.counts["dropped"] == 20)
    until(lambda: [sender.poll()] and sender.driver.counts["dropped"] + len(sender.driver._messages._queues) >= 21)
    assert [len(each.message) for each in sender.driver.take_messages()][:10] == [100_000] * 10
    assert sender.driver.take_messages() == []


def test_a_part_of_what_was_closed_is_refused_and_its_host_told(sides) -> None:
    """Whoever has cancelled the request: no arrival is begun that nobody waits for."""
    sender, taker, peer = sides
    sender.export()
    (handoff,) = sender.poll()
    arrival = taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
    taker.driver.close(arrival)
    for _ in range(2):
        with pytest.raises(HandoffError, match="nobody waits"):
            taker.driver.receive(handoff.to_json(), peer, PROMPT, namespace=A)
        until(lambda: [taker.poll()] and not taker.driver.busy)
    until(lambda: [sender.poll()] and not sender.manager.leases)
    assert taker.driver.given_up == {"closed": 1} and taker.driver.counts["begun"] == 1
