"""The engine's end of the socket: two threads write to it, and a frontend reads when it likes."""

from __future__ import annotations

import contextlib
import pathlib
import random
import socket
import struct
import tempfile
import threading
from typing import Any

import numpy as np

from dsv4_jax.engine import Engine
from dsv4_jax.serve import wire
from dsv4_jax.serve.bridge import Bridge

from ..clock import PATIENCE
from ..engine.serving import CFG, Server, eventually


class Short:
    """A socket that takes less than it is given now and then, or nothing."""

    def __init__(self, inner: socket.socket, rng: random.Random):
        self._inner, self._rng = inner, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, data: bytes) -> int:
        if self._rng.random() < 0.2:
            raise BlockingIOError
        return self._inner.send(data[: self._rng.randrange(1, len(data) + 1)] if self._rng.random() < 0.3 else data)


def test_what_two_threads_write_is_whole_and_in_order():
    """Of samples, of questions between them; to a frontend that reads nothing until all have ended, and then does."""
    rng, device = random.Random(3), threading.Event()
    device.set()
    server = Server(slots=4, on_get=device.wait)
    hello = wire.Hello(CFG.vocab_size, 100, 5, 64, "x", 1 << 20)
    with contextlib.ExitStack() as opened:
        path = pathlib.Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="dsv4-"))) / "socket"
        engine = opened.enter_context(Engine(server.core, server.executor))
        bridge = opened.enter_context(Bridge(engine, path, hello))
        client = opened.enter_context(socket.socket(socket.AF_UNIX))
        client.settimeout(PATIENCE)
        client.connect(str(path))
        stream = opened.enter_context(client.makefile("rb"))

        def read() -> Any:
            (length,) = struct.unpack("<I", stream.read(4))
            return wire.decode_news(stream.read(length))

        assert read() == hello
        (session,) = bridge._sessions
        session._socket = Short(session._socket, rng)
        for reads, first in ((False, 0), (True, 100)):
            found: dict[int, list[int]] = {first + i: [] for i in range(20)}
            ended, answers = set[int](), 0

            def take(found=found, ended=ended) -> int:
                message = read()
                for news in message.news if isinstance(message, wire.Outputs) else ():
                    assert news.id not in ended and news.problem is None
                    found[news.id] += news.tokens
                    ended |= {news.id} if news.finish else set()
                return isinstance(message, wire.Answer)

            for i in found:
                text = np.arange(1 + i % 30, dtype="<i4").tobytes()
                client.sendall(wire.pack(wire.Ask(i, text, 40, {"temperature": 1.0, "seed": i})))
                for k in range(3):
                    client.sendall(wire.pack(wire.Call(1000 + k, "metrics")))
                answers += take() if reads else 0
            if not reads:
                eventually(lambda: engine.stats().counts["ended_length"] == 20)
            while len(ended) < 20 or answers < 60:
                answers += take()
            for i, tokens in found.items():
                assert tokens == server.expected([*range(1 + i % 30)], 40, seed=i)
            assert (bridge.waiting_tokens, session._live) == (0, {})
        device.clear()
        client.sendall(wire.pack(wire.Ask(7, b"\0" * 40, 90)))
        eventually(lambda: bridge.waiting_tokens)
        client.shutdown(socket.SHUT_RDWR)
        eventually(lambda: not bridge._sessions)
        device.set()
        eventually(lambda: engine.stats().counts["ended_abort"] == 1)
        assert bridge.waiting_tokens == 0
