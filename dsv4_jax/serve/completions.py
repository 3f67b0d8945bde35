"""`/v1/completions`: what follows a text, or ids."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from ..text import StopText
from .generation import SILENCE, Generation, Piece
from .requests import Wanted

__all__ = ["Completions", "Decoded", "Texts", "event", "finite", "joined", "usage"]


class Texts(Protocol):
    """A tokenizer as this server needs it."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text to go on with: marks in it are the tokens that they name."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special marks."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, of a mark those of its name."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether it is a mark that is no text."""
        ...


class Decoded:
    """The text of an answer while its ids come, up to where a text ends it.

    Attributes:
        stopped: one of the texts that end it was found.
    """

    def __init__(self, texts: Texts, stops: Sequence[str]):
        self._texts, self._stop = texts, StopText(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def feed(self, ids: Sequence[int], *, ends: bool) -> str:
        """Returns what can be said now; with `ends` all that is left."""
        if self.stopped:
            return ""
        texts = self._texts
        data = b"".join([texts.bytes_of(token) for token in ids if not texts.is_special(token)])
        piece = self._stop.add(self._decoder.decode(data, ends))
        return piece + self._stop.end() if ends and not self.stopped else piece


def usage(generation: Generation, reasoning: int | None = None) -> dict[str, Any]:
    """Tokens of prompts and answers, as OpenAI counts them, and the vendor's own counts of cached ones."""
    prompt, cached = sum(generation.prompt_tokens), generation.cached
    drawn = sum(sample.drawn for sample in generation.samples)
    said: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }
    if reasoning is not None:
        said["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return said


def event(data: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class Completions:
    """The answers to a request, in the form of this route.

    Args:
        head: fields that all objects have: id, created, model, ...
        echo: the texts of the prompts, to stand before the answers; None: they do not.
        said: called with the usage at the end.
    """

    def __init__(
        self,
        texts: Texts,
        wanted: Wanted,
        generation: Generation,
        head: dict[str, Any],
        echo: list[str] | None = None,
        said: Callable[[dict[str, Any]], object] = lambda usage: None,
    ):
        self._texts, self._wanted, self._generation = texts, wanted, generation
        self._head = head | {"object": "text_completion"}
        self._decoded = [Decoded(texts, wanted.stops) for _ in generation.samples]
        self._offsets = [0] * len(generation.samples)
        self._echo, self._said = echo, said

    def _choice(self, piece: Piece) -> dict[str, Any]:
        decoded, finish = self._decoded[piece.index], piece.finish
        text = decoded.feed(piece.tokens, ends=finish is not None)
        if decoded.stopped:
            finish = "stop"
            self._generation.stop(piece.index)
        choice: dict[str, Any] = {"index": piece.index, "text": text, "finish_reason": finish, "logprobs": None}
        if self._wanted.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece)
        if self._wanted.token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        names = [self._name(token) for token in piece.tokens]
        offsets, at = [], self._offsets[piece.index]
        for name in names:
            offsets.append(at)
            at += len(name)
        self._offsets[piece.index] = at
        tops: list[dict[str, float]] | None = None
        if self._wanted.logprobs:
            tops = [{self._name(i): value for i, value in zip(ids, values, strict=True)} for ids, values in piece.top]
        logprobs = [finite(value) for value in piece.logprobs]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token: int) -> str:
        return self._texts.bytes_of(token).decode("utf-8", "replace")

    async def events(self) -> AsyncIterator[bytes]:
        """The stream: a chunk for each answer that has said something, in one write for a turn of the engine."""
        if self._echo is not None:
            each = len(self._generation.samples) // len(self._echo)
            for index in range(len(self._generation.samples)):
                yield self._chunk([{"index": index, "text": self._echo[index // each], "finish_reason": None}])
        async for pieces in self._generation.pieces(SILENCE):
            data = b""
            for piece in pieces:
                choice = self._choice(piece)
                if choice["text"] or choice["finish_reason"] or choice["logprobs"] or self._wanted.token_ids:
                    data += self._chunk([choice])
            if data or not pieces:
                yield data
        said = usage(self._generation)
        self._said(said)
        if self._wanted.usage:
            yield event(self._head | {"choices": [], "usage": said})
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return event(self._head | {"choices": choices} | ({"usage": None} if self._wanted.usage else {}))

    async def whole(self) -> dict[str, Any]:
        """The answers at once."""
        choices: list[dict[str, Any]] = []
        each = len(self._generation.samples) // len(self._generation.prompt_tokens)
        for index in range(len(self._generation.samples)):
            text = "" if self._echo is None else self._echo[index // each]
            choices.append({"index": index, "text": text, "finish_reason": None, "logprobs": None})
        async for pieces in self._generation.pieces():
            for piece in pieces:
                new, choice = self._choice(piece), choices[piece.index]
                choice["text"] += new["text"]
                choice["finish_reason"] = new["finish_reason"]
                if new["logprobs"] is not None:
                    choice["logprobs"] = joined(choice["logprobs"], new["logprobs"])
                if self._wanted.token_ids:
                    choice["token_ids"] = choice.get("token_ids", []) + new["token_ids"]
        said = usage(self._generation)
        self._said(said)
        return self._head | {"choices": choices, "usage": said}


def joined(before: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Lists of the same names one behind the other."""
    if before is None:
        return new
    return {key: None if value is None else (before.get(key) or []) + value for key, value in new.items()}


def finite(value: float) -> float:
    """JSON has no infinity."""
    return max(value, -9999.0)
