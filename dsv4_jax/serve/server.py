"""The engine's process: a listening socket, frontends that accept from it, and the bridge that they talk to."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from ..engine import Engine
from ..errors import EngineError, OptionError
from .bridge import ORDERS, Bridge
from .config import Config
from .masks import Masks
from .wire import Hello

__all__ = ["Server", "listen"]

_SOON = 2.0  # a frontend that ends within so many seconds again and again is not started any more
_TRIES = 5


SEND_BUFFER = 1 << 17  # bytes that the kernel keeps of an answer for a client that does not read, twice of them


def listen(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A socket that listens there; port 0: any that is free. Raises `OptionError`."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as opened:
            listening = opened.enter_context(socket.socket(family, kind, proto))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # of every connection
            listening.bind(address)
            listening.listen(backlog)
            opened.pop_all()
            return listening
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise OptionError(f"--host, --port: nothing can listen at {host}:{port}: {why}") from error


class Server:
    """Frontends, before there is an engine and beside one.

    Args:
        listening: where clients connect; closed by `close`.
        config: of the frontends, but for `socket`.
        frontends: processes of HTTP, which share what connects.

    A context manager: leaving it ends them.
    """

    def __init__(self, listening: socket.socket, config: Config, *, frontends: int = 1):
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="dsv4-serve-"))  # only for this user
        self.path = self._folder / "engine.sock"
        self._config = dataclasses.replace(config, socket=str(self.path))
        self._listening = listening
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._lock = threading.Lock()
        self._closing = False
        self._bridge: Bridge | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.problem: str | None = None
        self._threads = [threading.Thread(target=self._keep, daemon=True) for _ in range(frontends)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the frontends' processes."""
        with self._lock:
            return [process.pid for process in self._processes]

    def _keep(self) -> None:
        """Runs a frontend, again and again: the engine, and what it has cached, stay when one ends."""
        failed = 0
        while not self._closing and failed < _TRIES:
            began = time.monotonic()
            process = self._begin()
            if process is None:
                return
            process.wait()
            failed = failed + 1 if time.monotonic() - began < _SOON else 0
            with self._lock:
                self._processes.remove(process)
            assert process.stdin is not None
            process.stdin.close()
        if not self._closing:
            self.problem = f"a frontend has ended {_TRIES} times within {_SOON:.0f} s of its beginning"

    def _begin(self) -> subprocess.Popen[bytes] | None:
        fd = self._listening.fileno()
        command = [sys.executable, "-m", "dsv4_jax.serve.frontend", str(fd)]
        with self._lock:
            if self._closing:
                return None
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd])
            self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(self._config.dump())
            process.stdin.flush()
        return process

    def attach(
        self,
        engine: Engine,
        *,
        vocab_size: int,
        context: int,
        top: int = 20,
        queued: int = 4096,
        weights_id: str = "",
        grammar: Callable[[Any], Any] | None = None,
        queue_tokens: int = 1 << 22,
        update: Callable[[str, str], None] | None = None,
    ) -> None:
        """From now on requests are answered, by this engine. Raises `EngineError`.

        Args:
            vocab_size, context, top, queued, weights_id: of the engine.
            grammar: makes masks of grammars' plain data.
            queue_tokens: tokens of prompts that may wait for their first token, over all frontends.
            update: as of `Bridge`.
        """
        if self._bridge is not None:
            raise EngineError("it serves an engine already")
        admin = [name for name in ORDERS if name != "update_weights" or update is not None]
        orders = admin if self._config.admin else []
        hello = Hello(vocab_size, context, top, queued, weights_id, queue_tokens, orders)
        masks = Masks(vocab_size, grammar)
        self._bridge = Bridge(engine, self.path, hello, masks=masks, update=update)

    def close(self, timeout: float | None = None) -> None:
        """Ends the frontends, once their answers have ended or `drain_s` is over; then what they had asked for."""
        with self._lock:
            self._closing = True
            processes = list(self._processes)
        for process in processes:
            process.terminate()
        until = time.monotonic() + (self._config.drain_s + 5 if timeout is None else timeout)
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join()
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)
