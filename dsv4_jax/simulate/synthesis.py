"""Traces made up from a seed: chats of several turns, of tenants that share a system prompt. Pure Python."""

from __future__ import annotations

import dataclasses
import itertools
import random

from ..errors import TraceError
from ..untrusted import brief, read_settings
from .trace import TraceRequest, TraceRun

__all__ = ["ChatTrace", "make_trace"]

MAX_TENANTS = 1 << 20
MAX_TOKENS = 1 << 24  # a mean: sampled lengths stay below those of a trace's runs
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
                raise TraceError(f"must be of type {kind.__name__}, got {brief(value)}", field=field.name)
        limits = dict.fromkeys(("system", "question", "answer"), MAX_TOKENS)
        limits |= {"chats": MAX_RUNS, "turns": MAX_RUNS, "tenants": MAX_TENANTS, "systems": MAX_SYSTEMS}
        for name, limit in limits.items():
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
        """Reads `name=value,name=value,...`; the defaults stand for the rest. Raises `TraceError`."""
        types = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        return cls(**read_settings(text, types, lambda problem, name: TraceError(problem, field=name)))


def make_trace(settings: ChatTrace) -> list[TraceRequest]:
    """Makes the requests of a trace, earliest first."""
    chance = random.Random(settings.seed)
    weights = list(itertools.accumulate(1 / (1 + tenant) for tenant in range(settings.tenants)))
    requests, start = [], 0.0
    for chat in range(settings.chats):
        start += chance.expovariate(settings.rate)
        tenant = chance.choices(range(settings.tenants), cum_weights=weights)[0]
        system = chance.randrange(settings.systems)
        said = [TraceRun(f"system {system}", settings.system)]
        arrival = start
        for turn in range(chance.randint(1, 2 * settings.turns - 1)):
            said.append(TraceRun(f"chat {chat} question {turn}", _length(chance, settings.question)))
            answer = TraceRun(f"chat {chat} answer {turn}", _length(chance, settings.answer))
            requests.append(TraceRequest(round(arrival, 6), tuple(said), (answer,), f"tenant {tenant}"))
            said.append(answer)
            arrival += chance.expovariate(1 / settings.pause)
    requests.sort(key=lambda request: request.arrival)
    return requests


def _length(chance: random.Random, mean: int) -> int:
    """A length around this mean: many short ones and a few long ones, as people write."""
    return max(1, round(chance.gammavariate(1.5, mean / 1.5)))
