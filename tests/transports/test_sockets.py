"""Sockets between processes: strangers, nonsense from either end, deadlines, places, names, TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import select
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError, PeerError, TransferError
from dsv4_jax.inbox import Inbox
from dsv4_jax.tiers.remote import RecordTransport
from dsv4_jax.transports import engine_problem, open_engine, server, wire
from dsv4_jax.transports.identity import PUBLIC_BYTES, Identity
from dsv4_jax.transports.link import SocketLink
from dsv4_jax.transports.server import SocketServer

from ..clock import PATIENCE
from .samples import LAYOUT, certificates, join, knock, open_transport, pass_gate, pool

ROOT = pathlib.Path(__file__).parents[2]


def start_server(**options):
    inbox = Inbox()

    def answer(data, sender):
        if data == b"no":
            raise KeyError("nothing of that name")
        return 3 * len(data), [data * 3]

    started = SocketServer(answer, inbox, Identity(), **options)
    started.inbox = inbox
    return started


@pytest.fixture
def listening():
    started = start_server()
    yield started
    started.close()


def link_to(reach, **options) -> SocketLink:
    me = options.pop("me", None) or Identity()
    return SocketLink(options.pop("name", "me-") + me.mark, me, reach, **options)


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def ask(link, data, size):
    buffer = bytearray(size)
    request = link.ask(data, [buffer])
    until(request.is_done)
    return bytes(buffer)


def rest_of(connection) -> bytes:
    """What it says until it closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 20):
            said += more
    return said


def test_strangers_and_nonsense_end_their_own_connection_only(listening):
    reach, rng = listening.reach, np.random.default_rng(0)
    good = link_to(reach)
    for data in [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, rng.bytes(500), b"\x01\xff", reach.secret * 2]:
        with knock(reach) as stranger:
            with contextlib.suppress(OSError):  # it may have closed already
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
            assert len(rest_of(stranger)) == 16  # a number, whatever it says
    for data in (b"\0", b"\xff" * 300, b"\x02me" + rng.bytes(PUBLIC_BYTES + 16 + 32)):
        stranger, _ = pass_gate(reach)
        with stranger:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            assert rest_of(stranger) == b""
    for data in (b"x\xff\xff\xff\xff", b"!\xff\xff\xff\xff", b"?\xff\xff\xff\xff", b"~\1\0\0\0\0", rng.bytes(99)):
        with join(reach) as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
            assert rest_of(stranger) == b""
    stranger = link_to(dataclasses.replace(reach, secret=bytes(16)))
    with pytest.raises(OSError, match=r"closed|reset"):
        ask(stranger, b"abc", 9)
    stranger.close()
    assert ask(good, b"abc", 9) == b"abcabcabc"
    good.close()


@pytest.mark.parametrize("held", [4096, 256])
def test_a_peer_connects_at_once_however_many_strangers_there_are(listening, held):
    """10,000, or as many as a process here may have open, of which the server holds some for two seconds at most."""
    listening._max_strangers, count = min(held, listening._max_strangers), 10_000
    command = [sys.executable, "-m", "tests.transports.strangers", "127.0.0.1", str(listening.reach.port), str(count)]
    taken = []

    def connect():
        began = time.monotonic()
        link = link_to(listening.reach)
        assert ask(link, b"abc", 9) == b"abcabcabc"
        taken.append(time.monotonic() - began)
        link.close()

    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strangers:
        until(lambda: listening.counts["accepted"] > 0)
        for _ in range(5):
            connect()  # while they come
        there = int(strangers.stdout.readline())
        for _ in range(5):
            connect()  # while they are all here
        strangers.stdin.close()
    assert statistics.median(taken) < 1, taken
    assert listening.counts["strangers"] >= there / 2 and len(listening._strangers) <= listening._max_strangers
    until(lambda: not listening._strangers)


def test_a_greeting_has_a_deadline_as_a_whole(listening, monkeypatch):
    monkeypatch.setattr(server, "SECRET_SECONDS", 0.3)
    monkeypatch.setattr(server, "NAME_SECONDS", 0.3)
    slow, silent = knock(listening.reach), knock(listening.reach)
    named, _ = pass_gate(listening.reach)
    with slow, silent, named:
        ended = threading.Event()

        def trickle():
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    slow.send(b"\0"), named.send(b"\xff")

        thread = threading.Thread(target=trickle)
        thread.start()
        assert [len(rest_of(each)) for each in (silent, slow, named)] == [16, 16, 0]
        ended.set(), thread.join()
    until(lambda: not listening._strangers and not listening._threads)


def test_who_says_nothing_or_does_not_read_is_closed(listening, monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(server, "FRAME_SECONDS", 0.2)
    monkeypatch.setattr(server, "SLOWEST", 1 << 30)
    listening._answer = lambda data, sender: (64 << 20, [bytes(1 << 20)] * 64)
    with join(listening.reach) as idle, join(listening.reach) as half, join(listening.reach) as deaf:
        half.sendall(b"!\1")  # the beginning of a frame
        deaf.sendall(wire.FRAME.pack(wire.ASK, 1) + b"x")
        assert rest_of(idle) == rest_of(half) == b""
        until(lambda: not listening._threads)
        assert len(rest_of(deaf)) < 64 << 20


def test_connections_notice_machines_that_vanish(listening):
    with join(listening.reach):
        until(lambda: listening._places)
        (connection,) = listening._places
        get = lambda name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))  # noqa: E731
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert get("TCP_USER_TIMEOUT") == 30_000
        assert get("TCP_KEEPIDLE") + get("TCP_KEEPCNT") * get("TCP_KEEPINTVL") <= 60


def test_places_are_kept_for_peers_that_are_known(listening, monkeypatch):
    monkeypatch.setattr(server, "MAX_PLACES", 6)
    monkeypatch.setattr(server, "RESERVED_PLACES", 2)
    friend, before = Identity(), Identity()
    listening.know("me-" + friend.mark)
    with join(listening.reach, before) as once:  # who was here once, and said something
        once.sendall(wire.FRAME.pack(wire.PING, 0))
        assert wire.read(once, 5) == wire.FRAME.pack(wire.GOOD, 0)
    until(lambda: not listening._places)
    with contextlib.ExitStack() as crowd:
        for _ in range(4):
            crowd.enter_context(join(listening.reach))
        with pytest.raises(ValueError, match="no place is free"):
            join(listening.reach)
        for me in (friend, before):
            crowd.enter_context(join(listening.reach, me))
    assert listening.counts["refused"] == 1


def test_a_crowd_that_was_here_before_takes_no_place_of_a_peer_of_this_host(listening, monkeypatch):
    """One host under many names, each of which has said something: known, and forgetting nobody else."""
    monkeypatch.setattr(server, "MAX_PLACES", 6)
    monkeypatch.setattr(server, "RESERVED_PLACES", 2)
    monkeypatch.setattr(server, "_MAX_KNOWN", 8)
    friend = Identity()
    listening.know("me-" + friend.mark)
    hostile = [Identity() for _ in range(12)]
    with contextlib.ExitStack() as crowd:

        def come(me) -> socket.socket:
            connection = crowd.enter_context(join(listening.reach, me))
            connection.sendall(wire.FRAME.pack(wire.PING, 0))
            assert wire.read(connection, 5) == wire.FRAME.pack(wire.GOOD, 0)
            return connection

        for me in hostile:
            come(me).close()
            until(lambda: not listening._places)
        here = [come(me) for me in hostile[-6:]]
        come(friend)
        assert rest_of(here[0]) == b"", "the oldest gives way"
        for me in hostile[-4:]:
            with contextlib.suppress(ValueError, OSError):
                come(me)
        assert "me-" + friend.mark in [place.name for place in listening._places.values()]


def test_one_machine_takes_no_places_of_others_under_however_many_names(listening, monkeypatch):
    """Of a host that only serves: it connects to nobody, so it knows nobody before."""
    monkeypatch.setattr(server, "MAX_PLACES", 6)
    monkeypatch.setattr(server, "RESERVED_PLACES", 2)
    with contextlib.ExitStack() as crowd:

        def come(source, me=None) -> socket.socket:
            connection = crowd.enter_context(join(listening.reach, me, source=source))
            connection.sendall(wire.FRAME.pack(wire.PING, 0))
            assert wire.read(connection, 5) == wire.FRAME.pack(wire.GOOD, 0)
            return connection

        names = [Identity() for _ in range(6)]
        for me in names:  # each has said something once, so none of them is new
            come("127.0.0.1", me).close()
            until(lambda: not listening._places)
        hostile = [come("127.0.0.1", me) for me in names]
        friends = [come("127.0.0.2") for _ in range(3)]
        assert [rest_of(each) for each in hostile[:3]] == [b""] * 3, "the oldest of those that have most give way"
        for source in ("127.0.0.1", "127.0.0.2"):  # each has as many as the other
            with pytest.raises(ValueError, match="no place is free"):
                come(source)
        for each in (*friends, *hostile[3:]):
            each.sendall(wire.FRAME.pack(wire.PING, 0))
            assert wire.read(each, 5) == wire.FRAME.pack(wire.GOOD, 0)


def test_one_peer_has_few_places_and_its_oldest_gives_way(listening):
    me = Identity()
    with contextlib.ExitStack() as crowd:
        mine = [crowd.enter_context(join(listening.reach, me)) for _ in range(server.MAX_PLACES_OF_ONE + 2)]
        assert [rest_of(each) for each in mine[:2]] == [b"", b""]
        mine[-1].sendall(wire.FRAME.pack(wire.PING, 0))
        assert wire.read(mine[-1], 5) == wire.FRAME.pack(wire.GOOD, 0)


def test_those_that_do_not_say_their_name_give_way_to_others(listening, monkeypatch):
    monkeypatch.setattr(server, "MAX_UNNAMED", 4)
    with contextlib.ExitStack() as crowd:
        for _ in range(9):
            crowd.enter_context(pass_gate(listening.reach)[0])
        with join(listening.reach) as friend:
            friend.sendall(wire.FRAME.pack(wire.PING, 0))
            assert wire.read(friend, 5) == wire.FRAME.pack(wire.GOOD, 0)
        until(lambda: len(listening._threads) <= 4)


def test_a_name_is_of_who_has_its_secret(listening):
    """All else about a host is known to those that it was published to."""
    friend, thief, reach = Identity(), Identity(), listening.reach
    link = link_to(reach, me=friend, name="friend-")
    link.tell(b"first")
    until(lambda: listening.inbox.take() == [("friend-" + friend.mark, b"first")])
    thief.mark = friend.mark  # its name, with a number of the thief's own
    with pytest.raises(ConnectionResetError):
        join(reach, thief, "friend-")
    thief.public = friend.public  # or with the other's number, whose secret it has not
    with pytest.raises(ConnectionResetError):
        join(reach, thief, "friend-")
    assert listening.counts["refused"] == 2
    link.close()


def test_a_host_in_the_place_of_another_is_not_taken_for_it(listening):
    reach, number = listening.reach, os.urandom(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def stand_in():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(number)
                wire.read(connection, wire.PROOF_BYTES)
                wire.read(connection, wire.read(connection, 1)[0] + PUBLIC_BYTES + 16 + wire.PROOF_BYTES)
                connection.sendall(wire.FRAME.pack(wire.GOOD, 0) + os.urandom(wire.PROOF_BYTES))

        thread = threading.Thread(target=stand_in)
        thread.start()
        link = link_to(dataclasses.replace(reach, port=listener.getsockname()[1]))
        with pytest.raises(OSError, match="another host"):
            ask(link, b"", 0)
        link.close(), thread.join()


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"port": "80"},
        {"port": True},
        {"secret": "zz" * 16},
        {"secret": 1},
        {"public": "00"},
        {"tls": 1},
        {"address": "exa mple.com"},
        {"address": "0.0.0.0"},
        {"address": ""},
        {"address": 1},
        {"more": 1},
    ],
)
def test_addresses_that_are_none(listening, change):
    with pytest.raises(ValueError, match=r"address|secret|public|hex"):
        wire.Reach.unpack(json.dumps({**json.loads(listening.reach.pack()), **change}).encode())
    assert wire.Reach.unpack(listening.reach.pack()) == listening.reach


def test_an_answer_that_is_refused_breaks_the_link_and_says_why(listening):
    link = link_to(listening.reach)
    with pytest.raises(OSError, match="nothing of that name"):
        ask(link, b"no", 1)
    for call in (lambda: link.ask(b"", []), lambda: link.tell(b""), link.is_up):
        with pytest.raises(OSError, match="broken"):
            call()
    link.close()


def test_a_link_that_broke_keeps_no_buffers_of_what_it_was_asked(listening):
    """They are pages: a pool that is gone must not wait for the collector of cycles."""
    link, page = link_to(listening.reach), np.zeros(9, np.uint8)
    kept, request = weakref.ref(page), link.ask(b"no", [page])
    with pytest.raises(OSError, match="nothing of that name"):
        until(request.is_done)
    link._thread.join()
    gc.disable()
    try:
        del page, request
        assert kept() is None
    finally:
        gc.enable()
    link.close()


def test_a_link_knows_when_it_is_up_and_when_the_other_end_is_gone(listening, monkeypatch):
    link = link_to(listening.reach)
    until(link.is_up)
    for connection in [*listening._threads]:
        wire.cut(connection)

    def broken():
        with contextlib.suppress(OSError):
            link.is_up()
            return False
        return True

    until(broken)
    link.close()
    monkeypatch.setattr("dsv4_jax.transports.link._PING_SECONDS", 0.01)
    link = link_to(listening.reach)
    until(lambda: listening._known and link.is_up())  # it has said something by itself
    link.close()


def test_a_server_that_answers_nonsense(listening):
    link = link_to(listening.reach)
    until(link.is_up)
    listening._answer = lambda data, sender: (0, [])
    send = server.send
    server.send = lambda connection, data, limit=None: send(connection, b"-\xff\xff\xff\xff" + b"x" * 100, limit)
    try:
        with pytest.raises(OSError, match="nonsense"):
            ask(link, b"", 1)
    finally:
        server.send = send
    link.close()


def test_a_host_that_cannot_be_reached_shows(listening, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    link = link_to(dataclasses.replace(listening.reach, port=port))
    with pytest.raises(OSError, match="refused"):
        ask(link, b"", 1)
    link.close()
    with monkeypatch.context() as names:
        names.setattr(socket, "getaddrinfo", looked_up({}))
        link = link_to(dataclasses.replace(listening.reach, address="nowhere.decode"))
        with pytest.raises(OSError, match="no such name"):
            ask(link, b"", 1)
        link.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # which greets nobody
        link = link_to(dataclasses.replace(listening.reach, port=listener.getsockname()[1]))
        request = link.ask(b"", [bytearray(1)])
        assert not request.is_done() and not link.is_up()
        link.close()
        with pytest.raises(OSError, match=r"closed|answer|reset|disconnected"):
            request.is_done()


def looked_up(names):
    """Stands for `socket.getaddrinfo`: no test asks a server of names."""
    real = socket.getaddrinfo

    def look_up(name, port, **options):
        if name not in names:
            raise socket.gaierror("no such name")
        return real(names[name], port, **options)

    return look_up


def test_a_name_is_looked_up_for_each_connection(listening, monkeypatch):
    """A host that was started anew has its name, and another address."""
    names = {"decode-0.decode": "127.0.0.9"}
    monkeypatch.setattr(socket, "getaddrinfo", looked_up(names))
    reach = dataclasses.replace(listening.reach, address="decode-0.decode")
    link = link_to(wire.Reach.unpack(reach.pack()))
    with pytest.raises(OSError, match="refused"):
        ask(link, b"abc", 9)
    link.close()
    names["decode-0.decode"] = "127.0.0.1"
    link = link_to(reach)
    assert ask(link, b"abc", 9) == b"abcabcabc"
    link.close()


def test_a_link_that_is_closed_while_a_name_is_looked_up_waits_for_nobody(listening, monkeypatch):
    asked, answered = threading.Event(), threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (asked.set(), answered.wait(PATIENCE), [])[2])
    link = link_to(listening.reach)
    request = link.ask(b"abc", [bytearray(9)])
    assert asked.wait(PATIENCE)
    link.close()
    with pytest.raises(OSError, match="disconnected"):
        request.is_done()
    answered.set()
    link._thread.join()


def test_a_process_with_many_open_files(listening):
    with contextlib.ExitStack() as files:
        zero = files.enter_context(open(os.devnull))
        for _ in range(1100):
            files.callback(os.close, os.dup(zero.fileno()))
        link = link_to(listening.reach)
        assert ask(link, b"ab", 6) == b"ababab"
        link.close()


def test_a_connection_without_a_thread_is_closed(listening, monkeypatch):
    start = threading.Thread.start

    def fails(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pass_gate(listening.reach)[0] as stranger:
        assert rest_of(stranger) == b""
    monkeypatch.setattr(threading.Thread, "start", start)
    link = link_to(listening.reach)
    assert ask(link, b"a", 3) == b"aaa"
    link.close()


# Engines: where they listen, and what they insist on


def listening_ports() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens, by Linux."""
    links = []
    for each in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed
            links.append(os.readlink(each))
    mine, found = {each[8:-1] for each in links if each.startswith("socket:")}, set()
    for line in pathlib.Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        place, state, inode = (line.split()[i] for i in (1, 3, 9))
        if state == "0A" and inode in mine:
            address, port = place.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as files:
        opened = [files.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in opened]


def test_sockets_listen_where_they_are_told_to_and_nowhere_else():
    before, (port,) = listening_ports(), free_ports(1)
    for options, place in (
        ({}, ("127.0.0.1", None)),
        ({"port": port}, ("127.0.0.1", port)),
        ({"address": "localhost"}, ("127.0.0.1", None)),
        ({"address": "127.0.0.2"}, ("127.0.0.2", None)),
        ({"address": "0.0.0.0", "advertise": "localhost"}, ("0.0.0.0", None)),
    ):
        engine = open_engine("sockets", **options)
        reach = wire.Reach.unpack(engine.register("host-" + engine.identity, [np.zeros(8, np.uint8)] * 2))
        ((address, found),) = listening_ports() - before
        engine.close()
        assert address == place[0] and found == reach.port and place[1] in (None, found)
        assert reach.address == options.get("advertise", options.get("address", "127.0.0.1"))


def test_jax_listens_where_it_is_told_to_and_publishes_what_others_reach():
    if (problem := engine_problem("jax")) is not None:
        pytest.skip(problem)
    pages, ports = [np.zeros(8, np.uint8)] * 2, free_ports(3)
    fixed = dict(zip(("port", "transfer_port", "data_port"), ports, strict=True))
    for options, addresses in (
        ({}, {"127.0.0.1"}),
        (fixed, {"127.0.0.1"}),
        ({"address": "0.0.0.0", "advertise": "localhost"}, {"0.0.0.0", "127.0.0.1"}),
    ):
        before, engine = listening_ports(), open_engine("jax", **options)
        published = json.loads(engine.register("host-" + engine.identity, pages))
        found = listening_ports() - before
        assert {address for address, _ in found} == addresses and len(found) == 3
        assert options is not fixed or {port for _, port in found} == set(ports)
        where = {published["address"], wire.Reach.unpack(published["sockets"].encode()).address}
        assert where == {options.get("advertise", "127.0.0.1")}
        engine.close()
    with pytest.raises(TransferError, match="cannot listen"):
        open_engine("jax", address="192.0.2.200").register("host", pages)


def test_nixl_listens_where_it_is_told_to(monkeypatch):
    if (problem := engine_problem("nixl")) is not None:
        pytest.skip(problem)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before, first = listening_ports(), free_ports(1)[0]
    for options in ({}, {"address": "127.0.0.1", "ports": (first, first + 40)}, {"devices": "lo"}):
        with RecordTransport(open_engine("nixl", **options)) as transport:
            transport.publish(LAYOUT, pool())
            found = listening_ports() - before
            assert {address for address, _ in found} == {"127.0.0.1"}
            assert "ports" not in options or all(first <= port <= first + 40 for _, port in found)
    for options in ({"address": "192.0.2.200"}, {"address": "127.0.0.1", "devices": "lo"}, {"ports": (7, 8)}):
        with pytest.raises(TransferError, match=r"address|ports"):
            open_engine("nixl", **options)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with pytest.raises(TransferError, match="UCX_NET_DEVICES"):
        open_engine("nixl", address="127.0.0.1")


@pytest.mark.parametrize("engine", ["sockets", "jax"])
@pytest.mark.parametrize(
    "options", [{"address": "0.0.0.0"}, {"address": "::"}, {"advertise": "0.0.0.0"}, {"advertise": "a b"}]
)
def test_an_address_at_which_nobody_reaches_this_host_is_refused(engine, options):
    with pytest.raises(TransferError, match=r"advertise|others reach"):
        open_engine(engine, **options)


def test_a_token_that_can_be_guessed_is_refused():
    with pytest.raises(TransferError, match="guessed"):
        open_engine("sockets", token="secret")


def test_who_has_the_metadata_needs_the_token_too():
    pages, token = pool(), "one of all hosts"
    with contextlib.ExitStack() as ends:
        there, friend, thief = (
            ends.enter_context(open_transport("sockets", token=each)) for each in (token, token, "another one...16")
        )
        published = there.publish(LAYOUT, pool(1))
        for each in (friend, thief):
            each.publish(LAYOUT, pages)
        friend.read(friend.connect(published), "block", [1], [1], None).wait(PATIENCE)
        peer = thief.connect(published)
        with pytest.raises(PeerError):
            thief.read(peer, "block", [1], [1], None).wait(PATIENCE)


def test_tls_is_of_both_ends_and_of_one_authority(tmp_path):
    mine, others = certificates(tmp_path / "ours"), certificates(tmp_path / "theirs")
    pages = pool()
    with contextlib.ExitStack() as ends:
        there = ends.enter_context(open_transport("sockets", tls=mine, address="localhost"))
        published = there.publish(LAYOUT, pool(1))
        for tls, problem in ((mine, None), (others, "."), (None, "TLS")):
            here = ends.enter_context(open_transport("sockets", tls=tls))
            here.publish(LAYOUT, pages)
            if problem is None:
                peer = here.connect(published)
                here.read(peer, "block", [1, 2], [3, 4], there.checksums("block", [1, 2])).wait(PATIENCE)
                here.notify(peer, b"done")
                until(lambda: there.notices())
                continue
            with pytest.raises(PeerError, match=problem):
                here.read(here.connect(published), "block", [1], [1], None).wait(PATIENCE)
        plain = ends.enter_context(open_transport("sockets"))
        with pytest.raises(PeerError, match="TLS"):  # who insists on it does not do without
            here = ends.enter_context(open_transport("sockets", tls=mine))
            here.publish(LAYOUT, pages)
            here.connect(plain.publish(LAYOUT, pages))
        elsewhere = ends.enter_context(open_transport("sockets", tls=mine, address="127.0.0.2"))
        with pytest.raises(PeerError, match=r"verify|certificate|match"):  # a name that its certificate has not
            here.read(here.connect(elsewhere.publish(LAYOUT, pool(1))), "block", [1], [1], None).wait(PATIENCE)
    with pytest.raises(TransferError, match="TLS"):
        open_engine("sockets", tls=dataclasses.replace(mine, key=tmp_path / "none.pem"))


def read_one(here, published) -> None:
    here.read(here.connect(published), "block", [1], [1], None).wait(PATIENCE)


@pytest.mark.parametrize(("days", "problem"), [((-9, -1), "expired"), ((1, 2), "not yet valid")])
def test_a_certificate_out_of_its_time_is_none(tmp_path, days, problem):
    """Whichever end shows it. One that is put in its place is shown from the next connection on."""
    good = certificates(tmp_path / "good")
    bad = certificates(tmp_path / "bad", by=good, days=days)
    with contextlib.ExitStack() as ends:
        here, there, late, early = (
            ends.enter_context(open_transport("sockets", tls=t)) for t in (good, good, bad, bad)
        )
        published, of_late = (each.publish(LAYOUT, pool(1)) for each in (there, late))
        for each in (here, early):
            each.publish(LAYOUT, pool())
        with pytest.raises(PeerError, match=problem):
            read_one(here, of_late)
        with pytest.raises(PeerError, match=r"alert.*certificate"):  # it is told
            read_one(early, published)
        until(lambda: there.stats().counts["refused"] >= 1)
        for name in ("key.pem", "certificate.pem"):  # one after the other, as whoever renews them does
            os.replace(tmp_path / "good" / name, tmp_path / "bad" / name)
        read_one(here, of_late)
        read_one(early, published)


def test_a_certificate_that_is_replaced_is_shown_to_whoever_connects_then(tmp_path):
    """Who is connected stays so; what cannot be read yet, or is of another key, leaves the one before."""
    good = certificates(tmp_path / "good")
    other = certificates(tmp_path / "other")  # which nobody here vouches for
    with contextlib.ExitStack() as ends:
        here, there = (ends.enter_context(open_transport("sockets", tls=good)) for _ in range(2))
        published = there.publish(LAYOUT, pool(1))
        here.publish(LAYOUT, pool())
        read_one(here, published)
        for written in (b"", (tmp_path / "other" / "certificate.pem").read_bytes()):
            (tmp_path / "good" / "certificate.pem").write_bytes(written)
            here.disconnect(here.connect(published))
            before = here.stats().counts["unreadable_certificates"], there.stats().counts["unreadable_certificates"]
            read_one(here, published)
            now = here.stats().counts["unreadable_certificates"], there.stats().counts["unreadable_certificates"]
            assert all(map(int.__gt__, now, before))
        peer = here.connect(published)
        for name in ("key", "certificate", "authority"):
            os.replace(getattr(other, name), getattr(good, name))
        read_one(here, published)
        assert peer.losses == 0 and here.connect(published) is peer
        with open_transport("sockets", tls=good) as newcomer:  # of the others now, as the server is
            newcomer.publish(LAYOUT, pool())
            read_one(newcomer, published)


@pytest.mark.parametrize("is_server", [False, True])
def test_a_connection_that_is_reset_before_tls_begins_is_closed(tmp_path, is_server):
    context = certificates(tmp_path / "tls").context(is_server)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        ours = listener.accept()[0]
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        assert select.select([ours], [], [], PATIENCE)[0]
        number = ours.fileno()
        name = None if is_server else "localhost"
        with pytest.raises(ConnectionResetError):
            context.wrap_socket(ours, is_server, do_handshake_on_connect=False, server_hostname=name)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def test_unknown_and_missing_engines(monkeypatch):
    with pytest.raises(ImplementationError, match="unknown transport 'carrier pigeon', expected one of 'nixl'"):
        open_engine("carrier pigeon")
    monkeypatch.setattr("dsv4_jax.transports.nixl._PACKAGES", ())
    with pytest.raises(ImplementationError, match="pip install --no-deps nixl"):
        open_engine("nixl")
