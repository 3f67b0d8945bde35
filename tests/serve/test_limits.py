"""Clients that go, wait, do not read or send too much; processes that end; who may ask at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request

import pytest

from dsv4_jax.engine import Handle, Limits
from dsv4_jax.errors import CheckpointError
from dsv4_jax.serve import backend, masks, wire
from dsv4_jax.serve.problems import ApiError

from .serving import Stand, memory_of, wait_for

LONG = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1500, "seed": 1, "ignore_eos": True}


def slow() -> None:
    time.sleep(0.005)


def opened(stand: Stand, path: str, body, *, read: int = 1) -> socket.socket:
    """A connection that has asked, and has read so many bytes of the answer."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", stand.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    if read:
        assert connection.recv(read)
    return connection


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_client_that_goes_ends_its_request(tmp_path, stream):
    with Stand(tmp_path, on_get=slow) as stand:
        connections = [opened(stand, "/v1/completions", LONG | {"stream": stream}, read=0) for _ in range(6)]
        wait_for(lambda: stand.engine.stats().live == 6)
        for connection in connections[:3]:
            connection.close()
        for connection in connections[3:]:
            connection.shutdown(socket.SHUT_WR)  # as good as gone
        stand.idle()
        assert stand.engine.stats().counts["ended_abort"] == 6
        for connection in connections[3:]:
            connection.close()


def test_full_queues_say_so_at_once(tmp_path):
    with Stand(tmp_path, slots=2, limits=Limits(queued=3), queue_tokens=100, on_get=slow) as stand:
        held = [opened(stand, "/v1/completions", LONG | {"stream": True}) for _ in range(2)]
        wait_for(lambda: stand.engine.stats().live == 2)
        held += [opened(stand, "/v1/completions", LONG | {"stream": True}) for _ in range(3)]
        for more in ({}, {"prompt": [9] * 120}):
            status, headers, data = stand.ask("POST", "/v1/completions", LONG | more)
            error = json.loads(data)["error"]
            assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
            assert int(headers["retry-after"]) >= 1
        said = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        assert stand.post("/v1/messages", said)[1]["error"]["type"] == "rate_limit_error"
        assert stand.post("/v1/completions", LONG | {"n": 4})[0] == 429  # none of them is left behind
        for connection in held:
            connection.close()
        stand.idle()
        assert stand.post("/v1/completions", LONG | {"max_tokens": 2})[0] == 200


def test_of_a_request_that_is_answered_nothing_is_kept(tmp_path):
    """Fields that nobody knows, and many values in few bytes, take many times as much memory as they have bytes."""
    with Stand(tmp_path, slots=8, on_get=slow) as stand:
        (pid,) = stand.server.pids
        junk = [{"a": 1}] * 200_000
        before, held = memory_of(pid), list[socket.socket]()
        for number in range(1, 9):
            held.append(opened(stand, "/v1/completions", LONG | {"junk": junk}, read=0))
            wait_for(lambda number=number: stand.engine.stats().live == number)
        assert memory_of(pid) - before < 160 << 20
        for connection in held:
            connection.close()
        stand.idle()
        status, said = stand.post("/v1/completions", b'{"model": "tiny", "junk": [' + b"[]," * (1 << 20) + b"1]}")
        assert (status, said["error"]["code"]) == (413, "body_too_large")


def test_all_that_is_worked_on_is_bounded(tmp_path):
    """A body counts with what is made of it, until its request has been asked of the engine."""
    with Stand(tmp_path, bodies_bytes=1 << 20) as stand:
        body = {"model": "tiny", "prompt": [5] * 1500, "max_tokens": 1}
        large = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 20}\r\n\r\n"
        with contextlib.ExitStack() as held:

            def refused() -> bool:
                """A half that crosses the bound beside a whole one is refused itself; then another is sent."""
                half = held.enter_context(socket.create_connection(("127.0.0.1", stand.port), timeout=60))
                half.sendall(head.encode() + b" " * (900 << 10))
                time.sleep(0.2)
                return stand.post("/v1/completions", large)[0] == 503

            wait_for(refused)
            assert stand.post("/v1/completions", LONG | {"max_tokens": 1})[0] == 200
        wait_for(lambda: stand.post("/v1/completions", large)[0] == 200)


def test_more_tokens_than_may_ever_wait_are_refused_before_they_are_sent(tmp_path):
    with Stand(tmp_path, queue_tokens=1000) as stand:
        body = {"model": "tiny", "prompt": [5] * 100, "max_tokens": 1, "n": 11}
        status, said = stand.post("/v1/completions", body)
        assert (status, said["error"]["param"], said["error"]["code"]) == (400, "n", "too_many_tokens")
        assert stand.post("/v1/completions", body | {"n": 10})[0] == 200
        assert stand.post("/v1/completions", body | {"n": 1, "prompt": [5] * 1500})[0] == 200, "one alone may"
        stand.idle()


def test_what_the_engine_has_not_taken_yet_is_bounded(tmp_path):
    """The engine's end stands still."""

    async def ask_for_ever() -> int:
        ends = list[asyncio.StreamWriter]()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends.append(writer)
            writer.write(wire.pack(hello))

        server = await asyncio.start_unix_server(connected, tmp_path / "socket")
        asked = backend.Backend(str(tmp_path / "socket"))
        running, row = asyncio.create_task(asked.run()), bytes(1 << 20)
        while not asked.there:
            await asyncio.sleep(0.01)
        ends.append(asked._writer)
        with pytest.raises(ApiError, match="too much") as caught:
            while True:
                asked.ask(asyncio.Event(), tokens=row, max_new_tokens=1)
        assert caught.value.status == 503 and caught.value.retry_after
        most = ends[-1].transport.get_write_buffer_size()
        running.cancel()
        server.close()
        for writer in ends:
            writer.transport.abort()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(0)  # in which they are closed
        return most

    hello = wire.Hello(272, 2048, 20, 4, "first", 1 << 22)
    assert asyncio.run(ask_for_ever()) <= backend.MAX_UNSENT + (2 << 20)


@pytest.mark.parametrize("goes", [False, True])
def test_grammars_that_take_long_hold_up_nothing_else(tmp_path, monkeypatch, goes):
    """What waits for them counts as waiting, and ends with its client."""
    may = threading.Event()

    def grammar(asked):
        may.wait()
        return lambda out, row: row.fill(0xFFFFFFFF)

    monkeypatch.setattr(masks, "grammars_of", lambda *_: grammar)
    told = {"model": "tiny", "messages": [{"role": "user", "content": "json " * 20}], "max_tokens": 2, "n": 50}
    told |= {"response_format": {"type": "json_object"}}
    with Stand(tmp_path, queue_tokens=20_000) as stand, contextlib.ExitStack() as held:
        connection = held.enter_context(opened(stand, "/v1/chat/completions", told, read=0))
        bridge = stand.server._bridge
        assert bridge is not None
        wait_for(lambda: bridge.waiting_masks == 50)
        assert bridge.waiting_tokens >= 5000 and stand.get("/health")[0] == 200
        assert stand.post("/v1/completions", LONG | {"prompt": [5] * 1900, "n": 8, "max_tokens": 1})[0] == 429
        assert stand.post("/v1/completions", LONG | {"max_tokens": 1})[0] == 200
        if goes:
            connection.close()
            wait_for(lambda: all(live.aborted for live in lives_of(bridge)))
        may.set()
        if not goes:
            assert b" 200 " in connection.recv(100)
            connection.close()
        stand.idle()
        assert bridge.waiting_masks == 0


def lives_of(bridge) -> list:
    """What waits for a grammar, of all frontends."""
    return [live for session in bridge._sessions for live in session._live.values() if live.masked]


def test_who_waits_costs_nothing_a_turn(tmp_path, monkeypatch):
    takes, made = [0], Handle.reader

    def reader(self, loop, event):
        take = made(self, loop, event)

        def counted():
            takes[0] += 1
            return take()

        return counted

    monkeypatch.setattr(Handle, "reader", reader)
    with Stand(tmp_path, slots=2, on_get=slow) as stand:
        connection = opened(stand, "/v1/completions", LONG | {"stream": True, "n": 100})
        wait_for(lambda: stand.engine.stats().live == 2)
        before, calls = takes[0], stand.engine.stats().counts["calls"]
        wait_for(lambda: stand.engine.stats().counts["calls"] > calls + 30)
        assert takes[0] - before < 6 * (stand.engine.stats().counts["calls"] - calls), "98 wait"
        connection.close()
        stand.idle()


def test_who_does_not_read_stalls_nobody(tmp_path):
    """What is written to it is bounded; after a while it is cut off, and its request ends."""
    device = threading.Event()  # never set: a step takes a while, in which other threads run, as beside a device
    with (
        Stand(tmp_path, stall_s=0.25, slots=32, on_get=lambda: device.wait(0.003)) as stand,
        socket.socket() as stalled,
    ):
        data = json.dumps(LONG | {"n": 100, "stream": True, "return_token_ids": True, "logprobs": 5}).encode()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", stand.port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        stalled.sendall(head % len(data) + data)
        wait_for(lambda: stand.engine.stats().live > 1)
        for _ in range(3):
            assert stand.post("/v1/completions", LONG | {"max_tokens": 20, "priority": -9})[0] == 200
        stand.idle()
        assert stand.engine.stats().counts["ended_abort"] > 0, "it was cut off"
        wait_for(lambda: sockets_of(stand) == 1)


def sockets_of(stand: Stand) -> int:
    """TCP sockets of the frontend, the listening one among them."""
    with open(f"/proc/{stand.server.pids[0]}/net/tcp") as file:
        port = f":{stand.port:04X}"
        rows = [line.split() for line in file.readlines()[1:]]
    # Those whose own port it is, and that somebody holds (inode not 0).
    return sum(row[1].endswith(port) and row[9] != "0" for row in rows)


def test_slow_heads_and_bodies_are_ended(tmp_path):
    with Stand(tmp_path, head_s=0.5, body_s=0.5, body_bytes=1000, head_bytes=2000, connections=40) as stand:
        slow_ones = [socket.create_connection(("127.0.0.1", stand.port), timeout=60) for _ in range(30)]
        for connection in slow_ones:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
        assert stand.get("/v1/models")[0] == 200
        for connection in slow_ones:
            assert b" 408 " in connection.recv(100)
            connection.close()
        with socket.create_connection(("127.0.0.1", stand.port), timeout=60) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{")
            assert b" 408 " in connection.recv(100)
        assert stand.post("/v1/completions", LONG | {"user": "a" * 1000})[0] == 413
        for headers in ({"x-long": "a" * 2500}, {f"x-{i}": "a" * 20 for i in range(90)}):
            assert stand.ask("GET", "/v1/models", headers=headers)[0] == 431
        with socket.create_connection(("127.0.0.1", stand.port), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nx-long: " + b"a" * 5000)
            assert b" 431 " in connection.recv(100)
        with socket.create_connection(("127.0.0.1", stand.port), timeout=60) as connection:  # a body of unknown length
            part = b"%x\r\n" % 600 + b"a" * 600 + b"\r\n"
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head + part * 2)
            assert b" 413 " in connection.recv(100)
        many = [socket.create_connection(("127.0.0.1", stand.port), timeout=60) for _ in range(60)]
        assert b" 503 " in many[-1].recv(100), "more connections than it takes"
        for connection in many:
            connection.close()
        wait_for(lambda: sockets_of(stand) == 1)


@pytest.mark.slow
def test_ten_thousand_slow_connections(tmp_path):
    """As many as `ulimit -n` gives, a byte a second: others are answered meanwhile, and all of them end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(10_000, hard - 1000)
    with Stand(tmp_path, head_s=20.0, connections=count) as stand:
        began, many = time.monotonic(), list[socket.socket]()
        for _ in range(count - 50):
            many.append(socket.create_connection(("127.0.0.1", stand.port), timeout=60))
        while time.monotonic() - began < 15:
            for connection in many:
                with_byte(connection)
            assert stand.post("/v1/completions", LONG | {"max_tokens": 5})[0] == 200
            time.sleep(0.5)
        with open(f"/proc/{stand.server.pids[0]}/status") as file:
            memory = int(next(line for line in file if line.startswith("VmRSS")).split()[1])
        print(f"{len(many)} connections, {memory >> 10} MiB")
        assert memory < 1 << 20  # KiB
        wait_for(lambda: sockets_of(stand) <= 2, 120)
        for connection in many:
            connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def with_byte(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(b"G")


def test_a_frontend_that_dies_takes_its_requests_along(tmp_path):
    """Beside another, which goes on meanwhile."""
    with Stand(tmp_path, frontends=2, on_get=slow) as stand:
        bridge = stand.server._bridge
        assert bridge is not None
        wait_for(lambda: len(bridge._tasks) == 2)
        connections = [opened(stand, "/v1/completions", LONG | {"stream": True}) for _ in range(4)]
        wait_for(lambda: stand.engine.stats().live == 4)
        before = stand.server.pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
            assert stand.post("/v1/completions", LONG | {"max_tokens": 2})[0] == 200  # by the other
            wait_for(lambda: len(bridge._tasks) == 2 and len(stand.server.pids) == 2)  # a third has taken its place
        stand.idle()
        assert stand.engine.stats().counts["ended_abort"] == 4
        assert not {*stand.server.pids} & {*before} and stand.get("/ready")[0] == 200
        for connection in connections:
            connection.close()


def test_other_weights_are_another_fingerprint(tmp_path):
    """Of all frontends. (Those of a model: `test_command.py`.)"""
    told = list[tuple[str, str]]()

    def update(checkpoint: str, name: str) -> None:
        if checkpoint == "nowhere":
            raise CheckpointError("no such config.json: nowhere")
        told.append((checkpoint, name))

    with Stand(tmp_path, frontends=2, admin=True, update=update) as stand:
        bridge = stand.server._bridge
        assert bridge is not None
        wait_for(lambda: len(bridge._tasks) == 2)

        def prints() -> set[str]:
            asked = LONG | {"max_tokens": 1}
            return {stand.post("/v1/completions", asked)[1]["system_fingerprint"] for _ in range(12)}

        before = prints()
        status, said = stand.post("/update_weights", {"checkpoint": "nowhere", "weights_id": "second"})
        assert status == 400 and "config.json" in said["error"]["message"] and prints() == before
        assert stand.post("/update_weights", {"checkpoint": "there", "weights_id": "second"})[0] == 200
        assert told == [("there", "second")]
        wait_for(lambda: len(after := prints()) == 1 and after != before)


def test_an_engine_that_ends_is_told_of(tmp_path):
    with Stand(tmp_path, on_get=slow, attach=False) as stand:
        wait_for(lambda: stand.get("/health")[0] == 200)
        assert json.loads(stand.get("/health")[1])["status"] == "starting" and stand.get("/ready")[0] == 503
        status, said = stand.post("/v1/completions", LONG)
        assert (status, said["error"]["code"]) == (503, "engine_starting")
        stand.attach()
        wait_for(lambda: stand.get("/ready")[0] == 200)
        connection = opened(stand, "/v1/completions", LONG | {"stream": True})
        wait_for(lambda: stand.engine.stats().live == 1)
        stand.engine.close()
        rest = b""
        while b"[DONE]" not in rest:
            part = connection.recv(1 << 16)
            assert part, rest[-300:]
            rest += part
        assert b'"error"' in rest
        status, data = stand.get("/health")
        assert status == 503 and "closed" in json.loads(data)["reason"]
        assert stand.post("/v1/completions", LONG)[0] == 503
        bridge = stand.server._bridge
        assert bridge is not None
        bridge.close()  # as if its process had ended
        wait_for(lambda: b"ended" in stand.get("/health")[1])
        status, said = stand.post("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]})
        assert (status, said["error"]["type"]) == (529, "overloaded_error")
        connection.close()


def test_keys_origins_and_names(tmp_path):
    keys = {"me": "my-secret-key", "you": "your-secret-key"}
    with Stand(tmp_path, keys=keys, cors=["https://good.example"], names=["server.example"]) as stand:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "my-secret-key"},
            {"x-api-key": "\xff"},
        ):
            status, said = stand.post("/v1/completions", LONG | {"max_tokens": 1}, headers=headers)
            assert (status, said["error"]["code"]) == (401, "invalid_api_key")
        body = {"model": "tiny", "prompt": [*range(9, 109)], "max_tokens": 1, "seed": 1}
        found = []
        for headers in ({"authorization": "Bearer my-secret-key"}, {"x-api-key": "your-secret-key"}) * 2:
            status, said = stand.post("/v1/completions", body, headers=headers)
            assert status == 200
            found.append(said["usage"]["prompt_cache_hit_tokens"])
        assert found == [0, 0, 96, 96], "each key has a cache of its own"
        key = {"authorization": "Bearer my-secret-key"}
        assert stand.get("/health")[0] == 200 and stand.get("/v1/models")[0] == 401
        for headers, wanted in (
            ({"host": "evil.example"}, 403),
            ({"host": "server.example:443"}, 200),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": "http://["}, 403),
            ({"origin": f"http://localhost:{stand.port}", "host": f"localhost:{stand.port}"}, 200),
            ({"origin": "https://good.example"}, 200),
        ):
            status, answered, _ = stand.ask("GET", "/v1/models", headers=key | headers)
            assert status == wanted, headers
        assert answered["access-control-allow-origin"] == "https://good.example"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_tls(tmp_path):
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    files = [str(tmp_path / name) for name in ("cert.pem", "key.pem")]
    subprocess.run(
        [*made.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]],
        check=True,
        capture_output=True,
    )
    with Stand(tmp_path, certificate=files[0], key=files[1], attach=False) as stand:
        stand.attach()
        trusted = ssl.create_default_context(cafile=files[0])

        def ready() -> bool:
            try:
                with urllib.request.urlopen(
                    f"https://127.0.0.1:{stand.port}/ready", context=trusted, timeout=30
                ) as said:
                    return said.status == 200
            except OSError:
                return False

        wait_for(ready)


@pytest.mark.slow
def test_answers_end_before_the_server_does(tmp_path):
    with (
        Stand(tmp_path, on_get=slow, drain_s=30.0) as stand,
        opened(stand, "/v1/completions", LONG | {"max_tokens": 100, "stream": True}) as connection,
    ):
        closing = threading.Thread(target=stand.server.close)
        closing.start()
        rest = b""
        while part := connection.recv(1 << 16):
            rest += part
        assert b"[DONE]" in rest and b'"error"' not in rest
        closing.join()
