"""The sequences of one step as arrays. Those of the step before serve again while nothing else has changed them.

NumPy, no jax.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from ..plan import StepPlan
from .request import Request
from .request_tokens import PromptIds, TokenIds
from .step_shape import StepShape

__all__ = ["Batch"]


class Batch(NamedTuple):
    """The sequences of one step, as lists of requests and as arrays.

    Attributes:
        requests, counts: [B]
        scheduled: the pairs that name them.
        longest: the largest of the counts, 0 if there is none.
        arrays: slots, starts, counts, limits, blocks held and blocks tabled, [B] int64 each.
        restored: those that start from a snapshot in this step.
        copied: those that are forks, and were in no step before.
        ids, histories: their `ids` and `history`, if every sequence has one token.
        listed: how many requests had lists of ids by then (`Edits`): if there are more, some of `ids` may be others.
        slots: the plan's `seq_slot`, by which it is known again.
        quiet: steps that follow in which nothing happens but one more token of each sequence.
        carried: whether the plan has table entries or copies.
        decode: the pinned shape and the plan of the step before, if every sequence had one token in it.
    """

    requests: list[Request]
    counts: list[int]
    longest: int
    scheduled: list[tuple[Request, int]]
    arrays: tuple[np.ndarray, ...]
    restored: list[Request]
    copied: list[Request]
    ids: list[TokenIds | PromptIds]
    histories: list[array[int]]
    listed: int
    decode: tuple[StepShape, StepPlan] | None = None
    slots: np.ndarray | None = None
    quiet: int = 0
    carried: bool = True

    @classmethod
    def of(cls, requests: list[Request], counts: list[int], table: np.ndarray, listed: int) -> Batch:
        """`table`: of the book's `counts`; `listed`: of its `edits`."""
        # A list each: the fastest way from objects to arrays that was found.
        slots = np.array([r.slot for r in requests], np.int64)
        rows = table[slots].T
        held = np.array([len(r.blocks) for r in requests], np.int64)
        arrays = (slots, rows[0], np.array(counts, np.int64), rows[6], held, rows[1])
        restored = [r for r in requests if r.restores is not None]
        copied = [r for r in requests if r.forked is not None]
        scheduled = list(zip(requests, counts, strict=True))
        longest = max(counts, default=0)
        decodes = requests if longest == 1 else []
        ids, histories = [r.ids for r in decodes], [r.history for r in decodes]
        return cls(requests, counts, longest, scheduled, arrays, restored, copied, ids, histories, listed)
