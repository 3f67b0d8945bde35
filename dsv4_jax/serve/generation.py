"""Answers that are being drawn for one HTTP request, and how they are written: all at once, or as events.

A stream gets at most one write for what a turn of the engine has brought; what comes while its client does not read is
joined into the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .backend import Backend, Sample
from .problems import ApiError
from .requests import Wanted

__all__ = ["Answers", "EventStream", "Generation", "Piece", "watched"]

SILENCE = 15.0  # seconds after which a stream says that it is alive
_COMMENT = b": still here\n\n"


class Piece(NamedTuple):
    """What has come of an answer since the last time.

    Attributes:
        index: of the answer.
        finish: None: it goes on; else as of `Output`.
    """

    index: int
    tokens: list[int]
    logprobs: list[float]
    top: list[Any]
    finish: str | None
    cached: int


class Generation:
    """The answers to one request: of each prompt, n.

    Args:
        backend: who draws.
        prompts: ids.
        wanted: what was asked for.
        max_tokens: of each prompt.
        grammar: plain data; None: none.
        reuse: as of `Prompt`.
        score: as of `Prompt`.

    Attributes:
        prompt_tokens: of each prompt.

    Raises: `ApiError`: nobody is there, or so much can never wait, or not now; then none of it is asked for.
    """

    def __init__(
        self,
        backend: Backend,
        prompts: Sequence[Sequence[int]],
        wanted: Wanted,
        max_tokens: Sequence[int],
        *,
        grammar: Any = None,
        reuse: str = "output",
        score: bool = False,
    ):
        self.prompt_tokens = [len(prompt) for prompt in prompts]
        self._event = asyncio.Event()
        mask = wanted.mask
        if grammar is not None:
            mask = (mask or {}) | {"grammar": grammar}
        samplings = [{}] if score else wanted.samples()
        asked, most = len(samplings) * sum(self.prompt_tokens), backend.queue_tokens
        if len(prompts) * len(samplings) > 1 and asked > most:
            said = f"{asked} tokens of prompts, each counted once an answer, are more than the {most} that may wait"
            raise ApiError(400, said, param="n", code="too_many_tokens")
        rows = [np.asarray(prompt, "<i4").tobytes() for prompt in prompts]
        self.samples: list[Sample] = []
        try:
            for row, limit in zip(rows, max_tokens, strict=True):
                for sampling in samplings:
                    self.samples.append(
                        backend.ask(
                            self._event,
                            tokens=row,
                            max_new_tokens=limit,
                            sampling=sampling,
                            stop_tokens=wanted.stop_tokens,
                            tenant=wanted.tenant,
                            salt=wanted.salt,
                            priority=wanted.priority,
                            logprobs=wanted.logprobs,
                            mask=mask,
                            reuse=reuse,
                            score=score,
                        )
                    )
        except ApiError:
            self.abort()
            raise
        self._ended = [False] * len(self.samples)

    async def begin(self) -> None:
        """Returns when the engine has taken on all of them. Raises `ApiError`: it refuses one; then all end."""
        try:
            while not all(sample.taken or sample.finish for sample in self.samples):
                self._event.clear()
                await self._event.wait()
        except BaseException:
            self.abort()
            raise
        self._event.set()  # some may have said more
        for sample in self.samples:
            if sample.problem is not None:
                self.abort()
                raise sample.problem

    def abort(self) -> None:
        """Ends what has not ended."""
        for sample in self.samples:
            sample.abort()

    def stop(self, index: int) -> None:
        """An answer has ended where a text ends it: what still comes of it is not told."""
        self._ended[index] = True
        self.samples[index].abort()

    async def pieces(self, silence: float | None = None) -> AsyncIterator[list[Piece]]:
        """What has come, at each turn of the engine; an empty list after so many seconds of nothing.

        Raises `ApiError`: one has ended in an error; then all end.
        """
        while not all(self._ended):
            if not self._event.is_set():
                try:
                    async with asyncio.timeout(silence):
                        await self._event.wait()
                except TimeoutError:
                    yield []
                    continue
            self._event.clear()
            found: list[Piece] = []
            for index, sample in enumerate(self.samples):
                if self._ended[index] or not (sample.tokens or sample.finish):
                    continue
                if sample.finish in ("abort", "error"):  # not by us: `stop` is told nothing more
                    self.abort()
                    raise sample.problem or ApiError(503, "the server has ended this request", code="aborted")
                finish = sample.finish
                self._ended[index] = finish is not None
                found.append(Piece(index, *sample.take(), finish, sample.cached))
            if found:
                yield found

    @property
    def cached(self) -> int:
        """Tokens of the prompts that were found in the cache: of each, by its first answer."""
        each = len(self.samples) // len(self.prompt_tokens)
        return sum(sample.cached for sample in self.samples[::each])


class Answers(NamedTuple):
    """What a route has asked the engine for, and how it is written: all that is kept of the request.

    Attributes:
        form: has `events`, of a stream, and `whole`.
        problem: the event that tells of an error in a stream; None: OpenAI's.
    """

    generation: Generation
    stream: bool
    form: Any
    problem: Callable[[ApiError], bytes] | None = None


async def watched(receive: Callable[[], Awaitable[Any]], work: Awaitable[Any], gone: Callable[[], object]) -> Any:
    """Awaits this; if the client goes meanwhile, `gone` is called and the work is cancelled."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await task
    finally:
        task.cancel()
        watcher.cancel()


class EventStream:
    """A response of server-sent events.

    Args:
        events: bytes to be written, one after the other; b"": a sign of life.
        gone: called if the client has gone before the end.
        problem: the event that tells of an error.
        headers: more of them.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        gone: Callable[[], object],
        problem: Callable[[ApiError], bytes],
        headers: Iterable[tuple[bytes, bytes]] = (),
    ):
        self._events, self._gone, self._problem = events, gone, problem
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            *headers,
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        ended = False

        async def write() -> None:
            nonlocal ended
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data or _COMMENT, "more_body": True})
            except ApiError as error:
                await send({"type": "http.response.body", "body": self._problem(error), "more_body": True})
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            with contextlib.suppress(asyncio.CancelledError):
                await watched(receive, write(), self._gone)
        finally:
            if not ended:
                self._gone()
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
