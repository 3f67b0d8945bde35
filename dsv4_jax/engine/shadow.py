"""Executors without a device, for tests and simulations. Import no jax."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..manager.transfers import Transfers
from .executor import Drawn, Row, Shapes, Work
from .prompt import Prompt

__all__ = ["Recorded", "ShadowExecutor", "answer_of", "shadow_token"]


def shadow_token(seed: int, position: int, last: int, vocab_size: int) -> int:
    """The token that a `ShadowExecutor` samples after the token `last` at `position`: a function of these alone."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + last * 0x2545F4914F6CDD1D + 1) % 2**64
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64
    return (mixed ^ (mixed >> 32)) % vocab_size


@dataclasses.dataclass(frozen=True)
class _Ready:
    drawn: Callable[[], Drawn]

    def get(self) -> Drawn:
        return self.drawn()


class ShadowExecutor:
    """Runs no model: what it samples is `shadow_token` of what it was fed last and where, so a wrong id or place shows.

    Attributes:
        shapes: of its steps.
        on_send: called with each work before it runs; may raise.
        guesses: of its drafts, the share that is right.
    """

    def __init__(
        self,
        shapes: Shapes,
        vocab_size: int,
        *,
        on_send: Callable[[Work], object] = lambda _: None,
        on_get: Callable[[], object] = lambda: None,
        guesses: float = 0.5,
    ):
        self.shapes, self.vocab_size, self.on_send, self.on_get, self.guesses = (
            shapes,
            vocab_size,
            on_send,
            on_get,
            guesses,
        )
        self.recovered = 0
        self._last: list[dict[int, tuple[int, int]]] = []  # of the call before, row -> its last token, and where it is

    def check(self, prompt: Prompt) -> None:
        """Everything can be asked for."""

    def move(self, transfers: Sequence[Transfers]) -> None:
        for stages in transfers:
            collections.deque(stages.calls(), maxlen=0)

    def recover(self) -> None:
        self.recovered += 1
        self._last = []

    def send(self, work: Work) -> _Ready:
        self.on_send(work)
        self.move(work.transfers)
        if work.targets is not None:
            self._last = [{} for _ in work.plans]
            return self._scored(work)
        tokens, source = (x.reshape(len(work.plans), -1) for x in (work.tokens, work.source))
        last: list[dict[int, tuple[int, int]]] = []
        drawn: list[list[list[int]]] = []
        for shard, (plan, rows) in enumerate(zip(work.plans, work.rows, strict=True)):
            last.append({})
            drawn.append([])
            starts, firsts = plan.seq_start.tolist(), plan.seq_first.tolist()
            for i, row in enumerate(rows):
                at = firsts[i] + row.count - 1
                feeds = source[shard, at]
                fed, place = int(tokens[shard, at]), starts[i] + row.count - 1
                mask = self._leant(row, work.masks.get(shard * plan.num_seqs + i))
                if feeds >= 0:
                    fed, place = self._last[shard][int(feeds)]
                out = list[int]()
                for _ in range(work.steps):
                    for more in range(1 + row.drafts):
                        fed = self._draw(row.seed, place, fed, mask)
                        out.append(fed)
                        place += 1
                        if more < row.drafts and (fed * 2654435761 % 2**32) >= self.guesses * 2**32:
                            break
                drawn[-1].append(out)
                last[-1][i] = fed, place
        self._last = last
        result = Drawn(drawn, [[[-1.0] * len(row) for row in rows] for rows in drawn])

        def get() -> Drawn:
            self.on_get()
            return result

        return _Ready(get)

    def _scored(self, work: Work) -> _Ready:
        """A score's log-probabilities are minus the targets themselves."""
        assert work.targets is not None
        targets, drawn = work.targets.reshape(len(work.plans), -1), list[list[list[int]]]()
        for shard, (plan, rows) in enumerate(zip(work.plans, work.rows, strict=True)):
            firsts = plan.seq_first.tolist()
            drawn.append([targets[shard, firsts[i] : firsts[i] + row.count].tolist() for i, row in enumerate(rows)])
        scores = [[[-float(token) for token in row] for row in rows] for rows in drawn]
        return _Ready(lambda: Drawn(drawn, scores))

    def _leant(self, row: Row, mask: np.ndarray | None) -> np.ndarray | None:
        """A row's mask with its biases. Its logits are all alike, so the tokens of the largest bias are left."""
        biases = getattr(row.sampling, "logit_bias", ())
        if not biases:
            return mask
        words = np.full(-(-self.vocab_size // 32), 0xFFFFFFFF, np.uint32) if mask is None else mask
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")
        added = np.zeros(len(allowed))
        added[[token for token, _ in biases]] = [value for _, value in biases]
        added[self.vocab_size :] = -np.inf
        added = np.where(allowed, added, -np.inf)
        return np.packbits(added == added.max(), bitorder="little").view(np.uint32)

    def _draw(self, seed: int, place: int, fed: int, mask: np.ndarray | None) -> int:
        token = shadow_token(seed, place, fed, self.vocab_size)
        if mask is not None:
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size])
            token = int(allowed[token % len(allowed)])
        return token


class Recorded:
    """Runs another executor, and keeps every work that it was sent; or what one has drawn, again.

    Attributes:
        works: sent so far.
    """

    def __init__(self, executor: Any):
        self.executor, self.shapes, self.works = executor, executor.shapes, list[Work]()

    def check(self, prompt: Prompt) -> None:
        self.executor.check(prompt)

    def send(self, work: Work) -> Any:
        self.works.append(work)
        return self.executor.send(work)

    def move(self, transfers: Sequence[Transfers]) -> None:
        self.executor.move(transfers)

    def recover(self) -> None:
        self.executor.recover()


def answer_of(prompt: Iterable[int], count: int, seed: int, vocab_size: int) -> list[int]:
    """What a `ShadowExecutor` answers to a prompt without stops, masks or biases."""
    text = [*map(int, prompt)]
    for _ in range(count):
        text.append(shadow_token(seed, len(text) - 1, text[-1], vocab_size))
    return text[len(text) - count :]
