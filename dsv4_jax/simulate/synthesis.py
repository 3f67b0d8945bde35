"""Traces made up from a seed: chats of several turns, of tenants that share a system prompt. Pure Python."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from ..errors import TraceError
from .trace import TraceRequest, TraceRun

__all__ = ["ChatTrace", "make_trace"]


@dataclasses.dataclass(frozen=True)
class ChatTrace:
    """What to make. Lengths and pauses are means.

    Attributes:
        seed: equal settings make equal traces.
        chats: begin at random (Poisson) and end after some turns.
        tenants: every chat belongs to one, at random; the first ones have more.
        systems: system prompts of a tenant; tenants have the same ones, which they must not share.
        turns: requests of a chat; each one's prompt is all that was said before and a new question.
        system, question, answer: tokens.
        rate: chats that begin in a second.
        pause: seconds between the requests of a chat.
    """

    seed: int = 0
    chats: int = 100
    tenants: int = 4
    systems: int = 2
    turns: int = 4
    system: int = 2000
    question: int = 300
    answer: int = 200
    rate: float = 2.0
    pause: float = 20.0

    def __post_init__(self) -> None:
        for name in ("chats", "tenants", "systems", "turns", "system", "question", "answer"):
            if getattr(self, name) < 1:
                raise TraceError(f"must be at least 1, got {getattr(self, name)}", field=name)
        for name in ("rate", "pause"):
            if not 0 < getattr(self, name) < 1e9:
                raise TraceError(f"must be a positive number, got {getattr(self, name)}", field=name)

    @classmethod
    def parse(cls, text: str) -> ChatTrace:
        """Of `name=value,name=value,...`; the defaults for the rest. Raises `TraceError`."""
        types = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in types:
                raise TraceError(f"unknown setting; there are {', '.join(types)}", field=name)
            try:
                values[name] = types[name](value)
            except ValueError:
                raise TraceError(f"{value!r} is no {types[name].__name__}", field=name) from None
        return cls(**values)


def make_trace(settings: ChatTrace) -> list[TraceRequest]:
    """The requests, earliest first."""
    draw = random.Random(settings.seed)
    weights = [1 / (1 + tenant) for tenant in range(settings.tenants)]
    requests, start = [], 0.0
    for chat in range(settings.chats):
        start += draw.expovariate(settings.rate)
        tenant = draw.choices(range(settings.tenants), weights)[0]
        system = draw.randrange(settings.systems)
        said = [TraceRun(f"system {system}", settings.system)]
        arrival = start
        for turn in range(draw.randint(1, 2 * settings.turns - 1)):
            said.append(TraceRun(f"chat {chat} question {turn}", _length(draw, settings.question)))
            answer = TraceRun(f"chat {chat} answer {turn}", _length(draw, settings.answer))
            requests.append(TraceRequest(round(arrival, 6), tuple(said), (answer,), f"tenant {tenant}"))
            said.append(answer)
            arrival += draw.expovariate(1 / settings.pause)
    requests.sort(key=lambda request: request.arrival)
    return requests


def _length(draw: random.Random, mean: int) -> int:
    """Many short ones and a few long ones, as people write."""
    return max(1, round(draw.gammavariate(1.5, mean / 1.5)))
