"""Traces made up from a seed: chats of several turns, of tenants that share a system prompt. Pure Python."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

from ..errors import TraceError
from ..untrusted import read_number, shown
from .trace import TraceRequest, TraceRun

__all__ = ["ChatTrace", "make_trace"]

MAX_TENANTS = 1 << 20
MAX_TOKENS = 1 << 24  # a mean: drawn lengths stay below those of a trace's runs
MAX_SYSTEMS = 1 << 31
MAX_RUNS = 1 << 25  # of all prompts, if every chat were as long as it can be


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
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            # A seed that is no integer may be another one every time.
            if isinstance(value, bool) or not isinstance(value, int | kind):
                raise TraceError(f"must be of type {kind.__name__}, got {shown(value)}", field=field.name)
        most = dict.fromkeys(("system", "question", "answer"), MAX_TOKENS)
        most |= {"chats": MAX_RUNS, "turns": MAX_RUNS, "tenants": MAX_TENANTS, "systems": MAX_SYSTEMS}
        for name, limit in most.items():
            if not 1 <= (value := getattr(self, name)) <= limit:
                number = value if abs(value) < 1 << 64 else "a longer number"
                raise TraceError(f"must be at least 1 and at most {limit}, got {number}", field=name)
        for name in ("rate", "pause"):
            if not 1e-9 < getattr(self, name) < 1e9:
                raise TraceError(f"must be a positive number (1e-9 to 1e9), got {getattr(self, name)}", field=name)
        if self.chats * (2 * self.turns) ** 2 > MAX_RUNS:
            problem = f"{self.chats} chats of {self.turns} turns: chats * (2 * turns)^2 is at most {MAX_RUNS}"
            raise TraceError(problem, field="chats")

    @classmethod
    def parse(cls, text: str) -> ChatTrace:
        """Of `name=value,name=value,...`; the defaults for the rest. Raises `TraceError`."""
        types = {name: type(value) for name, value in dataclasses.asdict(cls()).items()}
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in types:
                raise TraceError(f"unknown setting; there are {', '.join(types)}", field=name[:40])
            if name in values:
                raise TraceError("is given twice", field=name)
            try:
                values[name] = read_number(value, types[name])
            except ValueError:
                raise TraceError(f"{value[:40]!r} is no {types[name].__name__}", field=name) from None
        return cls(**values)


def make_trace(settings: ChatTrace) -> list[TraceRequest]:
    """The requests, earliest first."""
    draw = random.Random(settings.seed)
    weights = list(itertools.accumulate(1 / (1 + tenant) for tenant in range(settings.tenants)))
    requests, start = [], 0.0
    for chat in range(settings.chats):
        start += draw.expovariate(settings.rate)
        tenant = draw.choices(range(settings.tenants), cum_weights=weights)[0]
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
