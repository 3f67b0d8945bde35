"""The process of HTTP: reads its `Config` from stdin and a listening socket from whoever started it.

python -m dsv4_jax.serve.frontend FD
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import resource
import signal
import socket
import sys
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..text import Tokenizer
from .app import Frontend
from .backend import Backend
from .config import Config
from .problems import ApiError

__all__ = ["frontend", "guarded", "main", "serve"]

_SPARE_FILES = 64  # descriptors that are no connections


def guarded(config: Config) -> Any:
    """Uvicorn's protocol with bounds: connections, seconds and bytes for the head of a request, unread answers."""
    limit = min(config.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_FILES)
    full = _plain(503, ApiError(503, "too many connections", code="too_many_connections", retry_after=1))
    late = _plain(408, ApiError(408, f"no request was there in {config.head_s:.0f} s", code="timeout"))
    long = _plain(431, ApiError(431, f"headers are of at most {config.head_bytes} bytes", code="headers_too_large"))

    class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: Any = None
        _stall: Any = None
        _head = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limit:
                self._end(full)
            else:
                self._timer = self.loop.call_later(config.head_s, self._end, late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            before = self.cycle
            idle = before is None or before.response_complete
            if idle and self._timer is None:
                self._timer = self.loop.call_later(config.head_s, self._end, late)
            super().data_received(data)
            if self.cycle is not before:  # the head of a request is there
                self._head = 0
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
            elif idle:
                self._head += len(data)
                if self._head > config.head_bytes:
                    self._end(long)

        def send_400_response(self, msg: str) -> None:
            self._end(_plain(400, ApiError(400, "this is no request of HTTP", code="invalid_http")))

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stall is None:
                self._stall = self.loop.call_later(config.stall_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

        def _end(self, answer: bytes) -> None:
            self._cancel()
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()
                self._stall = self.loop.call_later(config.stall_s, self.transport.abort)

        def _cancel(self) -> None:
            for timer in (self._timer, self._stall):
                if timer is not None:
                    timer.cancel()
            self._timer = self._stall = None

    return Guarded


def _plain(status: int, error: ApiError) -> bytes:
    body = error.encoded()
    head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return (head + "connection: close\r\n\r\n").encode() + body


def frontend(config: Config) -> Frontend:
    """What answers. Raises `CheckpointError`: the checkpoint's tokenizer cannot be read."""
    from .chatting import Chats

    there = (pathlib.Path(config.checkpoint) / "tokenizer.json").is_file()
    texts = Tokenizer(config.checkpoint) if there else None
    chat = Chats(config, texts) if texts is not None else None
    return Frontend(config, Backend(config.socket), texts, chat)


async def serve(config: Config, listening: socket.socket, ended: asyncio.Event) -> None:
    """Serves until it is told to end (SIGTERM, SIGINT), or for a while after `ended` is set."""
    ours = frontend(config)
    options: dict[str, Any] = {}
    if config.certificate is not None:
        options = {"ssl_certfile": config.certificate, "ssl_keyfile": config.key}
    server = uvicorn.Server(
        uvicorn.Config(
            ours.app(),
            http=guarded(config),
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(config.head_s) or 1,
            timeout_graceful_shutdown=max(1, int(config.drain_s)),
            backlog=2048,
            **options,
        )
    )
    linked = asyncio.create_task(ours.backend.run())

    async def outlive() -> None:
        await ended.wait()
        await asyncio.sleep(config.linger_s)
        server.should_exit = True

    waiting = asyncio.create_task(outlive())
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in (linked, waiting):
            task.cancel()


def main() -> None:
    """The process."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = Config.load(sys.stdin.buffer.readline())
    listening = socket.socket(fileno=int(sys.argv[1]))
    listening.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the process that started this one: it tells

    async def run() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def watch() -> None:  # the pipe is closed when the process at its other end ends
            with contextlib.suppress(OSError):
                os.read(0, 1)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=watch, daemon=True).start()
        await serve(config, listening, ended)

    try:
        import uvloop
    except ImportError:
        asyncio.run(run())
    else:
        uvloop.run(run())


if __name__ == "__main__":
    main()
