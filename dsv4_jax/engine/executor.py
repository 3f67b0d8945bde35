"""What the core sends to whatever runs steps, and what comes back. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..manager import StepShape
from ..manager.transfers import Transfers
from ..plan import StepPlan
from .prompt import Prompt

__all__ = ["Drawn", "Executor", "Pending", "Row", "Shapes", "Work"]


class Row(NamedTuple):
    """A sequence of a step.

    Attributes:
        prompt: of its request.
        sampling: its settings with its seed; None: the likeliest token.
        seed: of its random numbers.
        slot: of its request, the same as long as it is live.
        count: its tokens in the step that are known, or fed from the call before.
        prefills: whether it has sampled nothing before: its tokens are of the prompt.
        samples: whether it samples: its last known token is the last of its text.
        drafts: tokens beyond `count` that the step may guess.
        text: ids of its whole text, if it samples for the first time since it has this slot; else None.
    """

    prompt: Prompt
    sampling: Any
    seed: int
    slot: int
    count: int
    prefills: bool
    samples: bool
    drafts: int = 0
    text: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Work:
    """A call of the device: a step of every data shard, or K of them.

    Attributes:
        kind: "mixed" (chunks of prompts among decodes), "decode" (one token of each row, and its drafts), or "score"
            (chunks of texts, in steps of the mixed shape).
        plans: of each data shard.
        transfers: of each data shard, to be run before.
        steps: K.
        tokens: [shards * T] int32 in the plans' order; 0 where the call before gives the token, and of drafts.
        source: [shards * T] int32: the row of the call before (of the same shard) whose last token is fed; -1: none. If
            that call had drafts, the row goes on from where it ended: the plan has the furthest place that may be.
        rows: of each data shard, in the plan's order.
        targets: of "score", [shards * T] int32: the token after each; -1: there is none. Else None.
        draws: whether to run what can draw, though no row does: to compile it.
        masks: row (counted over all shards) -> uint32 [words] of the tokens that it may sample.
        quiet: sequences that decode a token in this step and are in no plan (see `CoarseCore`), and the tokens before
            these, added up.
    """

    kind: str
    plans: Sequence[StepPlan]
    transfers: Sequence[Transfers]
    steps: int
    tokens: np.ndarray
    source: np.ndarray
    rows: Sequence[Sequence[Row]]
    masks: dict[int, np.ndarray]
    targets: np.ndarray | None = None
    draws: bool = False
    quiet: tuple[int, int] = (0, 0)


class Drawn(NamedTuple):
    """What a call has sampled, by data shard and row.

    Attributes:
        tokens: of each row, in order; of one that does not sample, anything; of a score, its targets.
        logprobs, top: of each, as `Output`; None if no row asked for them.
        experts: of each row, int16 [layers, tokens, k]; None if no row asked for them.
    """

    tokens: Sequence[Sequence[list[int]]]
    logprobs: Sequence[Sequence[list[float]]] | None = None
    top: Sequence[Sequence[list[tuple[list[int], list[float]]]]] | None = None
    experts: Sequence[Sequence[np.ndarray]] | None = None


class Pending(Protocol):
    """A call that is under way."""

    def get(self) -> Drawn:
        """Waits for it. Raises what went wrong on the device."""
        ...


class Shapes(NamedTuple):
    """Of the steps that an executor runs, for each data shard.

    Attributes:
        mixed, decode: of the kinds of step; `decode` has room for K steps and drafts.
        steps: K of a loop, 1: none.
        drafts: most drafts of a row.
        fewer: of decodes of fewer rows, the fewest first: a step costs what its shape has rows for.
        narrower: of mixed steps of fewer tokens, the fewest first; else as `mixed`.
    """

    mixed: StepShape
    decode: StepShape
    steps: int = 1
    drafts: int = 0
    fewer: tuple[StepShape, ...] = ()
    narrower: tuple[StepShape, ...] = ()

    @property
    def decodes(self) -> tuple[StepShape, ...]:
        """All that decodes can have, the fewest rows first."""
        return (*self.fewer, self.decode)

    def decode_of(self, rows: int) -> StepShape:
        """The first of them that has room for so many rows."""
        return next((shape for shape in self.fewer if rows <= shape.sequences), self.decode)

    @property
    def all_mixed(self) -> tuple[StepShape, ...]:
        """All that mixed steps can have, the fewest tokens first."""
        return (*self.narrower, self.mixed)

    def mixed_of(self, tokens: int) -> StepShape:
        """The first of them that has room for so many tokens."""
        return next((shape for shape in self.narrower if tokens <= shape.tokens), self.mixed)


class Executor(Protocol):
    """Runs steps, in the order sent, and decides nothing.

    Attributes:
        shapes: of its steps.
    """

    shapes: Shapes

    def check(self, prompt: Prompt) -> None:
        """Raises `RequestError` if its steps cannot do what the prompt asks for. From any thread."""
        ...

    def send(self, work: Work) -> Pending:
        """Starts a call, without waiting for it."""
        ...

    def move(self, transfers: Sequence[Transfers]) -> None:
        """Runs copies between tiers that no step waits for."""
        ...

    def recover(self) -> None:
        """All calls under way are lost, and the cache with them: an empty one."""
        ...
