"""Sockets between processes: strangers, nonsense from either end, and bounds."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time

import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.transports import open_engine
from dsv4_jax.transports.inbox import MAX_WAITING, Inbox
from dsv4_jax.transports.sockets import SocketLink, SocketServer

from ..clock import PATIENCE


@pytest.fixture
def server():
    inbox = Inbox()

    def answer(data):
        if data == b"no":
            raise KeyError("nothing of that name")
        return [data * 3]

    server = SocketServer(answer, inbox.put)
    server.inbox = inbox
    yield server
    server.close()


def ask(link, data, size):
    buffer, until = bytearray(size), time.monotonic() + PATIENCE
    request = link.ask(data, [buffer])
    while not request.is_done() and time.monotonic() < until:
        time.sleep(0.001)
    return bytes(buffer)


def test_strangers_and_nonsense_end_their_own_connection_only(server):
    good = SocketLink("me", server.reach)
    reach = json.loads(server.reach)
    rng, secret = np.random.default_rng(0), bytes.fromhex(reach["secret"])
    hello = secret + b"\x02me"
    strange = [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, rng.bytes(500), secret + b"\x01\xff"]
    strange += [
        hello + each for each in (b"x\xff\xff\xff\xff", b"!\xff\xff\xff\xff", b"?\xff\xff\xff\xff", rng.bytes(99))
    ]
    for data in strange:
        with socket.create_connection((reach["address"], reach["port"]), timeout=PATIENCE) as stranger:
            with contextlib.suppress(OSError):  # it may have closed already
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
            assert answer(stranger) in (b"", b"+\0\0\0\0")
            assert answer(stranger) == b""
    stranger = SocketLink("me", json.dumps({**reach, "secret": "00" * 16}).encode())
    with pytest.raises(OSError, match="closed"):
        ask(stranger, b"abc", 9)
    stranger.close()
    assert ask(good, b"abc", 9) == b"abcabcabc"
    good.close()


def answer(connection):
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"port": "80"},
        {"port": True},
        {"secret": "zz" * 16},
        {"secret": 1},
        {"address": "example.com"},
        {"address": 1},
        {"more": 1},
    ],
)
def test_addresses_that_are_none(server, change):
    with pytest.raises(ValueError, match=r"address|secret|hex"):
        SocketLink("me", json.dumps({**json.loads(server.reach), **change}).encode())


def test_an_answer_that_is_refused_breaks_the_link_and_says_why(server):
    link = SocketLink("me", server.reach)
    with pytest.raises(OSError, match="nothing of that name"):
        ask(link, b"no", 1)
    for call in (lambda: link.ask(b"", []), lambda: link.tell(b"")):
        with pytest.raises(OSError, match="broken"):
            call()
    link.close()


def test_a_server_that_answers_nonsense(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reach = {**json.loads(server.reach), "port": listener.getsockname()[1]}

        def greet():
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"+\0\0\0\0")
                connection.recv(100)
                connection.sendall(b"-\xff\xff\xff\xff" + b"x" * 100)

        thread = threading.Thread(target=greet)
        thread.start()
        link = SocketLink("me", json.dumps(reach).encode())
        with pytest.raises(OSError, match="nonsense"):
            ask(link, b"", 1)
        link.close()
        thread.join()


def test_a_host_that_cannot_be_reached_shows_when_it_is_asked(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    link = SocketLink("me", json.dumps({**json.loads(server.reach), "port": port}).encode())
    with pytest.raises(OSError, match="refused"):
        ask(link, b"", 1)
    link.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # which greets nobody
        link = SocketLink("me", json.dumps({**json.loads(server.reach), "port": listener.getsockname()[1]}).encode())
        request = link.ask(b"", [bytearray(1)])
        assert not request.is_done()
        link.close()
        with pytest.raises(OSError, match=r"closed|answer|reset"):
            request.is_done()


def test_a_process_with_many_open_files(server):
    with contextlib.ExitStack() as files:
        zero = files.enter_context(open(os.devnull))
        for _ in range(1100):
            files.callback(os.close, os.dup(zero.fileno()))
        link = SocketLink("me", server.reach)
        assert ask(link, b"ab", 6) == b"ababab"
        link.close()


def test_a_connection_without_a_thread_is_closed(server, monkeypatch):
    reach, start = json.loads(server.reach), threading.Thread.start

    def fails(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with socket.create_connection((reach["address"], reach["port"]), timeout=PATIENCE) as stranger:
        assert answer(stranger) == b""
    monkeypatch.setattr(threading.Thread, "start", start)
    link = SocketLink("me", server.reach)
    assert ask(link, b"a", 3) == b"aaa"
    link.close()


def test_messages_that_nobody_reads_are_bounded():
    inbox = Inbox()
    inbox.put("them", bytes(MAX_WAITING // 2))
    with pytest.raises(ValueError, match="nobody reads"):
        inbox.put("them", bytes(MAX_WAITING // 2))
    assert len(inbox.take()) == 1 and inbox.take() == []
    inbox.put("them", bytes(MAX_WAITING // 2))


def test_unknown_and_missing_engines(monkeypatch):
    with pytest.raises(ImplementationError, match="unknown transport 'carrier pigeon', expected one of 'nixl'"):
        open_engine("carrier pigeon")
    monkeypatch.setattr("dsv4_jax.transports.nixl._PACKAGES", ())
    with pytest.raises(ImplementationError, match="pip install --no-deps nixl"):
        open_engine("nixl")
