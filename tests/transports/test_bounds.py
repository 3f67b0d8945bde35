"""What a peer may do that has the metadata of a host: no more than the bounds that docs/remote.md names."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
import tracemalloc

import numpy as np
import pytest

from dsv4_jax import inbox
from dsv4_jax.errors import TransferError
from dsv4_jax.inbox import Inbox
from dsv4_jax.tiers.remote import transport as transports
from dsv4_jax.tiers.remote.metadata import PoolMetadata
from dsv4_jax.tiers.remote.read import PIECE_PAGES
from dsv4_jax.transports import jax_transfer, link, open_engine, wire
from dsv4_jax.transports.sockets import MAX_ANSWER_BYTES, asked_pages

from ..clock import PATIENCE
from .peer import host
from .samples import LAYOUT, PAGES, join, open_transport, pool
from .test_sockets import link_to, listening, until

__all__ = ["listening"]  # a fixture


def fill(box: Inbox, sender: str, size: int, **options) -> int:
    """How many messages of this size it takes."""
    count = 0
    while box.put(sender, bytes(size), **options):
        count += 1
    return count


def test_a_sender_fills_its_own_share_and_no_more():
    box = Inbox(1 << 20, 1 << 18)
    assert fill(box, "hostile", 0) == (1 << 18) // 256
    assert box.put("innocent", b"done") and box.dropped == 1
    assert box.take(2) == [("hostile", b""), ("innocent", b"done")], "each in turn"
    assert len(box.take()) == inbox.MAX_AT_ONCE, "and never more than that at once"


def test_when_all_is_full_who_has_most_gives_way():
    box = Inbox(1 << 16, 1 << 14)
    for i in range(100):  # one host under many names
        fill(box, f"hostile {i}", 1000)
    assert box._bytes <= 1 << 16
    assert box.put("innocent", b"done")
    taken = []
    while some := box.take():
        taken += some
    assert ("innocent", b"done") in taken and box._bytes == 0 and not box._queues


def test_a_sender_waits_for_room_and_then_loses_nothing():
    box, put = Inbox(1 << 20, 1 << 12), []
    thread = threading.Thread(
        target=lambda: put.extend(box.put("a", bytes([i]) * 500, wait=PATIENCE) for i in range(40))
    )
    thread.start()
    taken = []
    while len(taken) < 40:
        taken += box.take()
    thread.join()
    assert put == [True] * 40 and taken == [("a", bytes([i]) * 500) for i in range(40)]
    fill(box, "a", 500)
    thread = threading.Thread(target=lambda: put.append(box.put("a", bytes(500), wait=PATIENCE)))
    thread.start()
    box.close()  # nobody waits any more
    thread.join()
    assert put[-1] is False


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("size", [0, 4 << 20])
def test_a_flood_of_notices_keeps_nobody_waiting_and_little_memory(size):
    """At first nobody takes them, for as long as it takes to fill the share of a sender."""
    with open_transport("loopback") as victim, open_transport("loopback") as innocent, host("loopback") as hostile:
        published = victim.publish(LAYOUT, pool())
        innocent.publish(LAYOUT, pool())
        peer = innocent.connect(published)
        before, box = resident(), victim._engine._inbox
        hostile.ask("flood", base64.b64encode(published).decode(), size)
        until(lambda: box._bytes + size + 256 > inbox.MAX_OF_ONE)
        for i in range(10):
            began, seen = time.monotonic(), False
            innocent.notify(peer, str(i).encode())
            while not seen:
                asked = time.monotonic()
                notices = victim.notices()
                assert len(notices) <= inbox.MAX_AT_ONCE and time.monotonic() - asked < 1
                seen = (innocent.name, str(i).encode()) in notices
            assert time.monotonic() - began < 1
            assert innocent.read(peer, "block", [1], [1], None).wait(PATIENCE) is None
        assert box._bytes <= inbox.MAX_OF_ONE and victim.stats().counts["dropped"] == 0
        # The share, a message that comes, and what is not given back at once.
        assert resident() - before < inbox.MAX_OF_ONE + 8 * wire.MAX_TELL + (32 << 20)


def test_an_innocent_notice_is_not_lost_though_many_have_filled_the_inbox(listening):
    """One host that has the secret, under 20 names."""
    box = listening._inbox
    with contextlib.ExitStack() as crowd:
        for _ in range(20):
            connection = crowd.enter_context(join(listening.reach))
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                for _ in range(4):
                    connection.sendall(wire.FRAME.pack(wire.TELL, 4 << 20) + bytes(4 << 20))
        assert box._bytes <= inbox.MAX_WAITING
        friend = link_to(listening.reach, name="friend-")
        friend.tell(b"done")
        taken = []
        until(lambda: taken.extend(box.take()) or any(message == b"done" for _, message in taken))
        friend.close()


def test_what_is_queued_for_a_peer_that_stands_still_is_bounded():
    with socket.create_server(("127.0.0.1", 0)) as deaf, open_transport("loopback") as there:
        reach = wire.Reach.unpack(PoolMetadata.unpack(there.publish(LAYOUT, pool())).reach)
        link_ = link_to(dataclasses.replace(reach, port=deaf.getsockname()[1]))
        message, sent = bytes(4 << 20), 0
        with pytest.raises(OSError, match="does not take"):
            while True:
                link_.tell(message)
                sent += len(message)
        assert 4 * len(message) <= sent <= link.MAX_QUEUED_BYTES
        link_.close()
        assert link_._queued == 0 and link_._open_jobs == 0


def test_a_request_names_no_more_pages_than_go_into_one_answer():
    pages = np.zeros((9, 1 << 20), np.uint8)
    assert asked_pages(np.full(32, 8, "<i4").tobytes(), pages).tolist() == [8] * 32
    assert wire.MAX_PAGES >= PIECE_PAGES and MAX_ANSWER_BYTES >= transports.PIECE_BYTES, "what a reader asks for"
    for ids, page in ((np.full(33, 8, "<i4"), 1 << 20), (np.ones(wire.MAX_PAGES + 1, "<i4"), 1)):
        tracemalloc.start()
        with pytest.raises(ValueError, match="pages at once"):
            asked_pages(ids.tobytes(), pages[:, :page])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
    with pytest.raises(ValueError, match="a request of"):
        link.SocketLink.ask(None, bytes(wire.MAX_ASK + 1), [])


def test_a_request_of_repeated_pages_costs_its_host_nothing(listening):
    """One answer as large as can be, in little more memory than it takes to say it."""
    with open_transport("loopback") as there:
        reach = wire.Reach.unpack(PoolMetadata.unpack(there.publish(LAYOUT, pool(1))).reach)
        count = min(wire.MAX_PAGES, MAX_ANSWER_BYTES // LAYOUT_PAGE)
        with join(reach) as greedy:
            tracemalloc.start()
            ids = np.full(count, PAGES, "<i4").tobytes()
            greedy.sendall(wire.FRAME.pack(wire.ASK, len(ids)) + ids)
            assert wire.read(greedy, 5) == wire.FRAME.pack(wire.GOOD, 0)
            left = count * LAYOUT_PAGE
            while left:
                left -= len(greedy.recv(min(left, 1 << 16)))
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
            tracemalloc.stop()


LAYOUT_PAGE = pool().shape[1]


def test_copies_that_a_peer_has_not_pulled_are_bounded():
    engine = open_engine("jax")
    numbers = [engine._offer("greedy", MAX_ANSWER_BYTES) for _ in range(jax_transfer.MAX_OFFERED // MAX_ANSWER_BYTES)]
    with pytest.raises(ValueError, match="has not pulled"):
        engine._offer("greedy", 1)
    assert engine._offer("innocent", MAX_ANSWER_BYTES)
    engine._answer(b"d" + numbers[0].to_bytes(8, "little"), "innocent")  # of another one's
    with pytest.raises(ValueError, match="has not pulled"):
        engine._offer("greedy", 1)
    engine._answer(b"d" + numbers[0].to_bytes(8, "little"), "greedy")
    assert engine._offer("greedy", MAX_ANSWER_BYTES)


@pytest.mark.parametrize("engine", ["loopback", "nixl"])
def test_a_peer_with_too_many_pages_is_refused_before_anything_is_made_of_them(engine):
    from dsv4_jax.transports import engine_problem

    if (problem := engine_problem(engine)) is not None:
        pytest.skip(f"{engine}: {problem}")
    with open_transport(engine) as there, open_transport(engine) as here:
        known = PoolMetadata.unpack(there.publish(LAYOUT, pool()))
        here.publish(LAYOUT, pool())
        for count in (transports.MAX_PEER_PAGES + 1, 10_000_000, 2**31 - 1):
            tracemalloc.start()
            with pytest.raises(TransferError, match=f"has {count} pages, more than {transports.MAX_PEER_PAGES}"):
                here.connect(dataclasses.replace(known, num_pages=count).pack())
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            tracemalloc.stop()
        assert here.stats().peers == ()


def test_another_host_under_a_known_name_is_refused():
    with open_transport("loopback") as there, open_transport("loopback") as thief, open_transport("loopback") as here:
        known, other = (PoolMetadata.unpack(each.publish(LAYOUT, pool())) for each in (there, thief))
        here.publish(LAYOUT, pool())
        peer = here.connect(known.pack())
        for forged in (
            dataclasses.replace(known, num_pages=2),
            dataclasses.replace(known, reach=other.reach),
        ):
            with pytest.raises(TransferError, match="has published something else"):
                here.connect(forged.pack())
        here.disconnect(peer)
        with pytest.raises(TransferError, match="a name that is not its own"):
            here.connect(dataclasses.replace(known, reach=other.reach).pack())
        assert here.connect(known.pack()).error is None


def test_messages_of_many_megabytes_come_few_at_once(listening):
    """Who begins one and says nothing more has memory of the host for as long as a frame may take."""
    with contextlib.ExitStack() as crowd:
        before = resident()
        for _ in range(40):
            crowd.enter_context(join(listening.reach)).sendall(wire.FRAME.pack(wire.TELL, wire.MAX_TELL) + b"x")
        friend = crowd.enter_context(join(listening.reach))
        friend.sendall(wire.FRAME.pack(wire.TELL, 4) + b"done")
        until(lambda: any(message == b"done" for _, message in listening._inbox.take()))
        assert resident() - before < 8 * wire.MAX_TELL + (32 << 20)


def test_json_that_is_none_costs_nothing(listening):
    for data in (b"[" * 100_000, json.dumps({"address": "a" * 10_000}).encode()):
        with pytest.raises(ValueError):
            wire.Reach.unpack(data)
