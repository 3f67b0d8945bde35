"""The sequences of one step as arrays. Those of the step before serve again while nothing else has changed them.

NumPy, no jax.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..plan import StepPlan
from .request import Request
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
        decode: the pinned shape and the plan of the step before, if every sequence had one token in it.
    """

    requests: list[Request]
    counts: list[int]
    longest: int
    scheduled: list[tuple[Request, int]]
    arrays: tuple[np.ndarray, ...]
    restored: list[Request]
    decode: tuple[StepShape, StepPlan] | None = None

    @classmethod
    def of(cls, requests: list[Request], counts: list[int]) -> Batch:
        columns = (
            [r.slot for r in requests],
            [r.num_cached for r in requests],
            counts,
            [r.max_tokens for r in requests],
            [len(r.blocks) for r in requests],
            [r.num_tabled for r in requests],
        )
        # One list each: the fastest way from objects to arrays that was found.
        arrays = tuple(np.fromiter(values, np.int64, len(values)) for values in columns)
        restored = [r for r in requests if r.restores is not None]
        scheduled = list(zip(requests, counts, strict=True))
        return cls(requests, counts, max(counts, default=0), scheduled, arrays, restored)
