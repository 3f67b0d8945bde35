"""The engine's end of the socket: what frontends ask for goes to the engine, what it answers goes back.

One thread with a loop of asyncio serves all connections. What a turn of the engine brings is one message, whatever
number of samples it is about, and the engine's own thread writes it: to wake the other one costs more, since both need
the interpreter. While a frontend does not read, its answers wait, joined, until the loop's thread can write them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from ..engine import Engine, Output, Prompt
from ..errors import (
    CacheError,
    CheckpointError,
    ConfigError,
    ContextLimitError,
    EngineError,
    FileError,
    QueueFullError,
    RequestError,
)
from ..manager import Namespace
from . import wire
from .masks import Masks

__all__ = ["ORDERS", "Bridge", "status"]

QUESTIONS = ("health", "metrics", "status")
ORDERS = ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "update_weights")


class Bridge:
    """Serves an engine to frontends on a Unix socket.

    Args:
        engine: not closed by this.
        path: of the socket; nothing is there yet.
        hello: what frontends are told first.
        masks: makes masks of what samples ask for; None: they can ask for none.
        update: loads weights from a folder and puts them in place (`update_weights`); None: it cannot be asked for.

    A context manager: leaving it ends what frontends have asked for.
    """

    def __init__(
        self,
        engine: Engine,
        path: str | os.PathLike[str],
        hello: wire.Hello,
        *,
        masks: Masks | None = None,
        update: Callable[[str, str], None] | None = None,
    ):
        self.engine, self.path, self.hello = engine, pathlib.Path(path), hello
        self.masks, self.update = masks, update
        self.lock = threading.Lock()  # of what waits, and of what sessions share with the engine's thread
        self.waiting_tokens = 0
        self.waiting_masks = 0  # samples whose grammar is being made
        self.grammars = ThreadPoolExecutor(2, "dsv4-grammar")  # of its own: health is asked for meanwhile
        self.loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._sampling = _sampling_class()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions: set[_Session] = set()
        self._thread = threading.Thread(target=self._run, name="dsv4-bridge", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            raise EngineError(f"no socket at {self.path}: {self._problem}") from self._problem

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections, and with them what they asked for."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.grammars.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:
            self._problem = error
        finally:
            self._ready.set()
            self.loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._connected, self.path, limit=1 << 20)
        self.path.chmod(0o600)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        session = _Session(self, writer)
        self._sessions.add(session)
        try:
            await session.run(reader)
        except (ConnectionError, asyncio.CancelledError, msgspec.MsgspecError):
            pass
        finally:
            self._tasks.discard(task)
            self._sessions.discard(session)
            session.close()
            writer.close()

    def let_wait(self, ask: wire.Ask) -> int:
        """The tokens of its prompt, which wait from now on. Raises `QueueFullError`: no more may."""
        count, most, masked = len(ask.tokens) // 4, self.hello.queue_tokens, ask.mask is not None
        with self.lock:
            if self.waiting_tokens and self.waiting_tokens + count > most:
                raise QueueFullError(self.waiting_tokens, most, "tokens of prompts")
            if masked and self.waiting_masks >= self.hello.queued:
                raise QueueFullError(self.waiting_masks, self.hello.queued)
            self.waiting_tokens += count
            self.waiting_masks += masked
        return count

    def prompt(self, ask: wire.Ask) -> Prompt:
        """What an `Ask` asks of the engine. Raises `RequestError`."""
        space = None if ask.tenant is None and ask.salt is None else Namespace(ask.tenant, ask.salt)
        mask = None
        if ask.mask is not None:
            if self.masks is None:
                raise RequestError("this engine knows no grammar of its tokens")
            mask = self.masks.of(ask.mask)
        return Prompt(
            tokens=np.frombuffer(ask.tokens, "<i4"),
            max_new_tokens=ask.max_new_tokens,
            sampling=None if ask.score else self._sampling(**ask.sampling),
            stop_tokens=ask.stop_tokens,
            namespace=space,
            priority=ask.priority,
            deadline=ask.deadline,
            logprobs=ask.logprobs,
            mask=mask,
            reuse=ask.reuse,  # type: ignore[arg-type]
            score=ask.score,
        )

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Answers a question, or follows an order. Waits for the engine. Raises what that raises."""
        engine = self.engine
        if name in QUESTIONS:
            if name == "health":
                return engine.health()._asdict()
            return engine.metrics(arguments.get("model_name")) if name == "metrics" else status(engine)
        if name not in self.hello.admin:
            raise RequestError(f"{name} is not to be asked of this engine")
        if name == "pause":
            engine.pause()
        elif name == "resume":
            engine.resume(keep=arguments.get("keep", True))
        elif name == "sleep":
            engine.sleep()
        elif name == "wake_up":
            engine.wakeup()
        elif name == "reset_prefix_cache":
            engine.forget()
        elif self.update is not None:
            try:
                self.update(arguments["checkpoint"], arguments["weights_id"])
            except (CheckpointError, ConfigError, FileError) as error:
                raise RequestError(f"checkpoint: {error}") from error
            self.loop.call_soon_threadsafe(self._rename, arguments["weights_id"])
        return {}

    def _rename(self, weights_id: str) -> None:
        """Tells all frontends of the weights in use."""
        self.hello = msgspec.structs.replace(self.hello, weights_id=weights_id)
        for session in self._sessions:
            session.write(wire.pack(self.hello))


class _Session:
    """A connection to a frontend. What follows `_lock` is of the loop's thread and of those that `tell`."""

    def __init__(self, bridge: Bridge, writer: asyncio.StreamWriter):
        self._bridge, self._writer = bridge, writer
        self._event = asyncio.Event()  # there is something that the loop's thread has to write
        self._tasks: set[asyncio.Task[Any]] = set()
        # Of its own, so that whoever writes meanwhile never does so to what another has opened since.
        self._socket = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        writer.transport.set_write_buffer_limits(0)  # `drain` returns when all is written
        self._lock = bridge.lock
        self._live: dict[int, _Live] = {}
        self._changed: dict[_Live, None] = {}  # of those, which have something to tell
        self._first: list[wire.News] = []  # what is said of those that were taken on, or refused
        self._rest = b""  # of a message of which a part is written
        self._behind = self._closed = False  # whether what there is to tell waits for the loop's thread

    async def run(self, reader: asyncio.StreamReader) -> None:
        self.write(wire.pack(self._bridge.hello))
        telling = asyncio.create_task(self._catch_up())
        self._tasks.add(telling)
        while (data := await wire.read(reader)) is not None:
            message = wire.decode_asks(data)
            if isinstance(message, wire.Ask):
                self._ask(message)
            elif isinstance(message, wire.Abort):
                live = self._live.get(message.id)
                if live is not None and live.abort is not None:
                    live.abort()
                elif live is not None:
                    live.aborted = True
            else:
                self._start(self._answer(message))

    def close(self) -> None:
        """Nobody reads any more: what was asked for here ends."""
        for task in self._tasks:
            task.cancel()
        with self._lock:
            self._closed = True
            self._socket.close()
            for live in self._live.values():
                if live.abort is not None:
                    live.abort()
                self._let_go(live)
            self._live.clear()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ask(self, ask: wire.Ask) -> None:
        try:
            count = self._bridge.let_wait(ask)
        except QueueFullError as error:
            self._refuse(ask.id, error)
            return
        live = _Live(ask.id, count, ask.mask is not None)
        with self._lock:
            self._live[ask.id] = live
        if live.masked:  # a grammar takes a while, and may be a bomb
            self._start(self._add_later(ask, live))
        else:
            self._add(ask, live)

    def _let_go(self, live: _Live) -> None:
        """It does not wait any more. The lock is held."""
        self._bridge.waiting_tokens -= live.waiting
        self._bridge.waiting_masks -= live.masked
        live.waiting, live.masked = 0, False

    def _add(self, ask: wire.Ask, live: _Live, prompt: Prompt | None = None) -> None:
        bridge = self._bridge
        try:
            handle = bridge.engine.add(bridge.prompt(ask) if prompt is None else prompt)
        except Exception as error:
            self._refuse(ask.id, error)
            return
        live.abort, live.take = handle.abort, handle.reader(self, live)
        with self._lock:
            self._first.append(wire.News(ask.id, [], [], [], None, 0))  # it is taken on
            self._changed[live] = None  # it may have said something before it had a reader
            self._behind = True
        self._event.set()
        if live.aborted:
            handle.abort()

    async def _add_later(self, ask: wire.Ask, live: _Live) -> None:
        try:
            loop = asyncio.get_running_loop()
            prompt = await loop.run_in_executor(self._bridge.grammars, self._prompt_of, ask, live)
        except Exception as error:
            self._refuse(ask.id, error)
            return
        if prompt is None or live.aborted:
            self._refuse(ask.id, None)
            return
        with self._lock:
            self._bridge.waiting_masks -= live.masked
            live.masked = False
        self._add(ask, live, prompt)

    def _prompt_of(self, ask: wire.Ask, live: _Live) -> Prompt | None:
        """None: it was aborted before its turn came."""
        return None if live.aborted else self._bridge.prompt(ask)

    def _refuse(self, number: int, error: Exception | None) -> None:
        finish = "abort" if error is None else "error"
        with self._lock:
            if (live := self._live.pop(number, None)) is not None:
                self._let_go(live)
            self._first.append(wire.News(number, [], [], [], finish, 0, None if error is None else _problem(error)))
            self._behind = True
        self._event.set()

    async def _answer(self, call: wire.Call) -> None:
        try:
            value = await asyncio.to_thread(self._bridge.call, call.name, call.arguments)
            self.write(wire.pack(wire.Answer(call.id, value)))
        except Exception as error:
            self.write(wire.pack(wire.Answer(call.id, None, _problem(error))))

    def write(self, data: bytes) -> None:
        """Writes a message, behind what is left of the one before. In the loop's thread."""
        with self._lock:
            self._writer.write(self._rest + data)
            self._rest = b""
            if self._writer.transport.get_write_buffer_size():
                self._behind = True
                self._event.set()

    def tell(self, events: Iterable[_Live]) -> None:
        """The engine has said something of these: one message for all, at once if the frontend reads."""
        with self._lock:
            if self._closed:
                return
            self._changed.update(dict.fromkeys(events))
            if self._behind:
                return
            self._rest = self._message()
            if self._rest:
                with contextlib.suppress(OSError):  # it does not read now; or it has gone, as who reads finds out
                    self._rest = self._rest[self._socket.send(self._rest) :]
            if not self._rest:
                return
            self._behind = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._bridge.loop.call_soon_threadsafe(self._event.set)

    def _message(self) -> bytes:
        """All that there is to tell, or nothing. The lock is held."""
        news, self._first = self._first, []
        changed, self._changed = self._changed, {}
        for live in changed:
            for output in live.take():
                news.append(_news(live.number, output))
                self._let_go(live)
                if output.finish is not None:
                    self._live.pop(live.number, None)
        return wire.pack(wire.Outputs(news)) if news else b""

    async def _catch_up(self) -> None:
        """Tells of what waits for this thread, until nothing does and all is written."""
        while True:
            await self._event.wait()
            self._event.clear()
            with self._lock:
                self._behind = True
                data = self._message()
            self.write(data)
            await self._writer.drain()
            with self._lock:
                unsent = self._writer.transport.get_write_buffer_size()  # others have written meanwhile
                self._behind = bool(unsent or self._rest or self._first or self._changed)
                if self._behind:
                    self._event.set()


class _Live:
    """A sample that has not ended.

    Attributes:
        waiting: tokens of its prompt, until it has said anything.
        masked: whether its grammar is being made.
    """

    __slots__ = ("abort", "aborted", "masked", "number", "take", "waiting")

    def __init__(self, number: int, waiting: int, masked: bool):
        self.number, self.waiting, self.masked = number, waiting, masked
        self.take: Callable[[], list[Output]] = list
        self.abort: Callable[[], object] | None = None
        self.aborted = False


def _news(number: int, output: Output) -> wire.News:
    problem = None if output.error is None else _problem(output.error)
    top = [(list(ids), list(values)) for ids, values in output.top]
    tokens, logprobs = output.tokens, output.logprobs
    return wire.News(number, list(tokens), list(logprobs), top, output.finish, output.cached, problem)


def _problem(error: Exception) -> tuple[str, str]:
    """What kind of error it is to a client, and what it says."""
    if isinstance(error, QueueFullError):
        return "full", str(error)
    if isinstance(error, ContextLimitError):
        return "context", str(error)
    if isinstance(error, RequestError):
        return "request", str(error)
    if isinstance(error, EngineError):
        return "engine", str(error)
    return "failure", str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}"


def status(engine: Engine) -> dict[str, Any]:
    """What the page draws: the engine after its last turn, and its managers."""
    now = engine.stats()
    pools: dict[str, dict[str, int]] = {}
    report: dict[str, Any] = {
        "time": time.time(),
        "queued": now.queued,
        "live": now.live,
        "preempted": now.preempted,
        "paused": now.paused,
        "turn_ms": now.turn_s * 1e3,
        "counts": now.counts,
        "pools": pools,
        "slots": 0,
        "stored": 0,
        "lookup_tokens": 0,
        "hit_tokens": {},
    }
    for manager in engine.managers:
        stats = manager.stats()
        report["slots"] += stats.slots_total
        report["stored"] += stats.cache.stored_blocks
        for name, pool in stats.cache.pools.items():
            into = pools.setdefault(name, dict.fromkeys(("total", "free", "private", "cached", "evictable"), 0))
            for key in into:
                into[key] += getattr(pool, key)
        counters = stats.cache.counters
        report["lookup_tokens"] += counters.lookup_tokens
        for tier, tokens in counters.hit_tokens.items():
            report["hit_tokens"][tier.name.lower()] = report["hit_tokens"].get(tier.name.lower(), 0) + tokens
    return report


def _sampling_class() -> Any:
    from ..model.sampling import Sampling

    return Sampling
