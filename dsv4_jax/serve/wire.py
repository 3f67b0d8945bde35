"""What the process of the engine and those of HTTP say to each other: msgpack behind four bytes of length.

Everything is plain data, so that neither has to import what the other needs.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec

__all__ = ["Abort", "Answer", "Ask", "Call", "Hello", "News", "Outputs", "decode_asks", "decode_news", "pack", "read"]

MAX_FRAME = 1 << 30
_LENGTH = struct.Struct("<I")


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """A sample to be drawn.

    Attributes:
        id: names it on this connection.
        tokens: ids of the prompt, int32, little end first.
        sampling: fields of a `model.Sampling`.
        stop_tokens: it ends before one of these.
        tenant, salt: of its `Namespace`.
        logprobs: as of `Prompt`.
        mask: what `Masks.of` takes; None: every token may come.
        reuse: as of `Prompt`.
        score: as of `Prompt`.
    """

    id: int
    tokens: bytes
    max_new_tokens: int
    sampling: dict[str, Any] = {}
    stop_tokens: list[int] = []
    tenant: str | None = None
    salt: str | None = None
    priority: int = 0
    deadline: float | None = None
    logprobs: int | None = None
    mask: dict[str, Any] | None = None
    reuse: str = "output"
    score: bool = False


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """Ends a sample."""

    id: int


class Call(msgspec.Struct, array_like=True, tag="call"):
    """A question about the engine, or an order to it."""

    id: int
    name: str
    arguments: dict[str, Any] = {}


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The engine's first words, and what it says anew when its weights have changed.

    Attributes:
        vocab_size: ids are below.
        context: tokens of a request, its answer included.
        top: likeliest tokens that an answer may come with.
        queued: requests that may wait.
        weights_id: names the weights.
        queue_tokens: tokens of prompts that may wait.
        admin: names of the orders that it takes.
    """

    vocab_size: int
    context: int
    top: int
    queued: int
    weights_id: str
    queue_tokens: int
    admin: list[str] = []


class News(msgspec.Struct, array_like=True):
    """What became of a sample since the last time.

    Attributes:
        problem: (kind, message) if it ended in an error.
    """

    id: int
    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[list[int], list[float]]]
    finish: str | None
    cached: int
    problem: tuple[str, str] | None = None


class Outputs(msgspec.Struct, array_like=True, tag="outputs"):
    """Of a turn of the engine, or of several if the reader was late."""

    news: list[News]


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """To a `Call`."""

    id: int
    value: Any = None
    problem: tuple[str, str] | None = None


_ENCODER = msgspec.msgpack.Encoder()
decode_asks = msgspec.msgpack.Decoder(Ask | Abort | Call).decode
decode_news = msgspec.msgpack.Decoder(Hello | Outputs | Answer).decode


def pack(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    data = _ENCODER.encode(message)
    return _LENGTH.pack(len(data)) + data


async def read(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None: the other end has gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME:
            return None
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
