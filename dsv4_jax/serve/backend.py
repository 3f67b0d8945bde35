"""The frontend's end of the socket: samples that are drawn elsewhere, as they come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import msgspec

from . import wire
from .problems import ApiError, of_engine

__all__ = ["Backend", "Sample"]

RETRY = 0.1  # seconds between attempts to reach the engine
MAX_UNSENT = 64 << 20  # bytes of questions that the engine's end has not taken yet


class Sample:
    """One answer that is being drawn.

    What comes while nobody takes it is joined: at most `max_new_tokens` of it.

    Attributes:
        finish: None: it goes on; else as of `Output`.
        cached: tokens of the prompt that were found in the cache.
        problem: what it ended in, if that was an error.
        drawn: tokens that have come so far.
        taken: whether the engine has taken it on.
    """

    __slots__ = (
        "_backend",
        "_event",
        "cached",
        "drawn",
        "finish",
        "id",
        "logprobs",
        "problem",
        "taken",
        "tokens",
        "top",
    )

    def __init__(self, backend: Backend, number: int, event: asyncio.Event):
        self._backend, self.id, self._event = backend, number, event
        self.tokens, self.logprobs, self.top = list[int](), list[float](), list[Any]()
        self.finish: str | None = None
        self.problem: ApiError | None = None
        self.cached = self.drawn = 0
        self.taken = False

    def put(self, news: wire.News) -> None:
        """Takes up what the engine has said."""
        self.taken = True
        self.tokens += news.tokens
        self.logprobs += news.logprobs
        self.top += news.top
        self.drawn += len(news.tokens)
        self.cached, self.finish = news.cached, news.finish
        if news.problem is not None:
            self.problem = of_engine(*news.problem)
        self._event.set()

    def fail(self, problem: ApiError) -> None:
        """The engine will say nothing more."""
        self.finish, self.problem = "error", problem
        self._event.set()

    def take(self) -> tuple[list[int], list[float], list[Any]]:
        """What has come since the last time: ids, their log-probabilities, and the likeliest of each place."""
        taken = self.tokens, self.logprobs, self.top
        self.tokens, self.logprobs, self.top = [], [], []
        return taken

    def abort(self) -> None:
        """Ends it, if it has not ended."""
        if self.finish is None:
            self._backend.abort(self)


class Backend:
    """The engine as a frontend sees it.

    Attributes:
        hello: what it said first; None: it was never reached.
        there: whether it can be reached now.
    """

    def __init__(self, path: str):
        self._path = path
        self.hello: wire.Hello | None = None
        self.there = False
        self._writer: asyncio.StreamWriter | None = None
        self._samples: dict[int, Sample] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        """Stays connected, until it is cancelled."""
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=1 << 20)
                try:
                    await self._listen(reader, writer)
                finally:
                    self._lost()
                    writer.close()
            await asyncio.sleep(RETRY)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (data := await wire.read(reader)) is not None:
            message = wire.decode_news(data)
            if isinstance(message, wire.Outputs):
                for news in message.news:
                    sample = self._samples.get(news.id)
                    if sample is not None:
                        if news.finish is not None:
                            del self._samples[news.id]
                        sample.put(news)
            elif isinstance(message, wire.Answer):
                future = self._calls.pop(message.id, None)
                if future is not None and not future.done():
                    if message.problem is not None:
                        future.set_exception(of_engine(*message.problem))
                    else:
                        future.set_result(message.value)
            else:
                self.hello, self._writer, self.there = message, writer, True

    def _lost(self) -> None:
        self.there, self._writer = False, None
        gone = self.problem()
        samples, self._samples = self._samples, {}
        for sample in samples.values():
            sample.fail(gone)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(gone)

    def problem(self) -> ApiError:
        """Why nothing can be asked for now."""
        if self.hello is None:
            return of_engine("starting", "the engine is starting")
        return of_engine("gone", "the engine has ended")

    @property
    def queue_tokens(self) -> int:
        """Tokens of prompts that may wait. Raises `ApiError`: the engine was never reached."""
        if self.hello is None:
            raise self.problem()
        return self.hello.queue_tokens

    @property
    def live(self) -> int:
        """Samples that have not ended."""
        return len(self._samples)

    def ask(self, event: asyncio.Event, **asked: Any) -> Sample:
        """Has a sample drawn; `event` is set when there is something of it.

        Raises `ApiError`: nobody is there, or so much was asked for that the engine's end has not taken it yet.
        """
        if self._writer is None:
            raise self.problem()
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            raise ApiError(503, "too much is asked for at once", code="busy", retry_after=1)
        number = next(self._numbers)
        sample = self._samples[number] = Sample(self, number, event)
        self._send(wire.Ask(number, **asked))
        return sample

    def abort(self, sample: Sample) -> None:
        """Ends it; what still comes of it is dropped."""
        if self._samples.pop(sample.id, None) is not None:
            self._send(wire.Abort(sample.id))

    async def call(self, name: str, timeout: float = 10.0, **arguments: Any) -> Any:
        """Asks the engine's end something. Raises `ApiError`: nobody is there, it takes too long, or it fails."""
        if self._writer is None:
            raise self.problem()
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(wire.Call(number, name, arguments))
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise ApiError(503, f"the engine has not answered in {timeout:.0f} s", code="engine_busy") from None
        finally:
            self._calls.pop(number, None)

    def _send(self, message: msgspec.Struct) -> None:
        if self._writer is not None:
            self._writer.write(wire.pack(message))
