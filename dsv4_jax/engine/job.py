"""A request as the core sees it: one sample of a prompt. Imports no jax."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Hashable
from typing import Any

from ..manager import Arrival, Request
from .executor import Row
from .prompt import Prompt, derived_seed

__all__ = ["Job", "JobState"]


class JobState(enum.Enum):
    QUEUED = "queued"
    LIVE = "live"
    PREEMPTED = "preempted"
    LEAVING = "leaving"  # computed, and not all of its hand-off is told
    ENDED = "ended"


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """One sample of a prompt.

    Attributes:
        id: of its prompt.
        index: of the sample.
        seed: of its random numbers.
        sampling: the prompt's, with this seed; None: it takes the likeliest token.
        order: the first to be added has the lowest.
        rank: who has the lowest goes first; a level of priority is worth `Limits.aging` seconds of waiting.
        expires: when its deadline is over.
        out: ids sampled so far, as far as they are known.
        logprobs, top: of a score so far, as `out` is of its tokens.
        ahead: tokens that calls under way sample for it.
        row: its row in the call sent last; -1: none.
        fresh: whether it has sampled nothing since it became live.
        decodes: its row of steps that go on from a call under way, the same as long as it is live; None: not made yet.
        cached: tokens of its prompt that were found in the cache; -1: it was not admitted yet.
        shard: of its request; of one in the queue whose prompt storage is asked for, where that comes to.
        fetch: what storage is asked for its prompt (`done`); None: nothing.
        patience: until when it waits for that, or for another host.
        goal: how many tokens are computed of it at most: of one for another host those of full blocks.
        lease: of its hand-off, so far.
        arrival: what comes of it from another host; None: nothing yet.
    """

    id: Hashable
    index: int
    prompt: Prompt
    seed: int
    sampling: Any
    order: int
    rank: float
    added: float
    expires: float = math.inf
    state: JobState = JobState.QUEUED
    request: Request | None = None
    shard: int = 0
    out: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[Any] = dataclasses.field(default_factory=list)
    ahead: int = 0
    row: int = -1
    fresh: bool = True
    decodes: Row | None = None
    cached: int = -1
    admitted: float = 0.0
    fetch: Any = None
    patience: float = math.inf
    goal: int = sys.maxsize
    lease: str | None = None
    arrival: Arrival | None = None

    @classmethod
    def of(cls, prompt: Prompt, name: Hashable, index: int, order: int, now: float, aging: float, seed: int) -> Job:
        """Sample `index` of a prompt that is added now. `seed`: of a prompt that has none."""
        how, rank = prompt.sampling, prompt.priority * aging + now
        given = getattr(how, "seed", None)
        own = seed if given is None else given
        own = derived_seed(own, index) if index else own
        how = None if how is None else dataclasses.replace(how, seed=own)
        until = math.inf if prompt.deadline is None else now + prompt.deadline
        return cls(name, index, prompt, own, how, order, rank, now, until)

    @property
    def left(self) -> int:
        """Tokens that it may still sample, without those under way."""
        return self.prompt.max_new_tokens - len(self.out) - self.ahead

    @property
    def text(self) -> list[int]:
        """Ids known so far, prompt and answer."""
        return [*self.prompt.tokens.tolist(), *self.out]  # type: ignore[union-attr]

    @property
    def tenant(self) -> Hashable:
        """Whose share of the engine it takes."""
        space = self.prompt.namespace
        return None if space is None else space.tenant
