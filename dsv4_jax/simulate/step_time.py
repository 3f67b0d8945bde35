"""How long a step takes, as far as attention goes: a model fitted to measured steps of V4-Flash. Pure Python + numpy.

    computing = fixed + max(weights, prefill_token * P) + prefill_context * C + decode_token * D + decode_context * S
    step      = bytes from the host / bandwidth + max(computing, bytes to the host / bandwidth)

with P prompt tokens, C the tokens before each of them, added up, D decodes, and S the tokens before each of those.
The projections' weights are read once a step, which takes `weights` seconds unless arithmetic takes longer. What comes
from the host (blocks and states of hits) must be there before the step can begin: it is waited for. What goes
to the host leaves beside the step, which waits only for what exceeds its own time.

A step that ends a chunk early, for a snapshot to be taken, costs its fixed part and the weights once more.

`MEASURED` holds the steps that `fitted` minimises the relative errors of; `weights` is not fitted but the
floor of 2.48 ms (bytes of the projections over the copy rate) that these steps were measured beside. With six
measurements and five constants the errors (at most 0.5 %) say that the form fits, not how well it predicts; the same
steps measured a day before took up to 0.3 ms longer.

Limits: one NVIDIA H200, fp8 rows, fp4 index keys, bf16 projections, the attention stack alone: no MoE, no embedding, no
head, no sampling, no collectives. Prefill was measured for chunks of 1,024 and 4,096 tokens behind 8 Ki and 128 Ki,
decoding for 1 to 256 requests. A model of which attention is a smaller part serves slower than this; what
stays is the order of policies, and how waiting grows as hits fall.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from ..errors import TraceError
from ..untrusted import read_settings

__all__ = ["MEASURED", "MeasuredStep", "StepTime", "fitted"]


class MeasuredStep(NamedTuple):
    """A step of equal requests: each computes `tokens` tokens behind `context` others, in `seconds` together."""

    requests: int
    tokens: int
    context: int
    seconds: float


MEASURED = (
    MeasuredStep(64, 1, 128 << 10, 6.42e-3),
    MeasuredStep(1, 1, 1 << 20, 5.40e-3),
    MeasuredStep(256, 1, 8 << 10, 9.14e-3),
    MeasuredStep(1, 4096, 8 << 10, 117.8e-3),
    MeasuredStep(1, 4096, 128 << 10, 220.0e-3),
    MeasuredStep(1, 1024, 128 << 10, 56.3e-3),
)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The constants of a step's time. The defaults are what `fitted` finds, with two or three digits.

    Attributes:
        fixed: seconds of any step.
        weights: seconds in which the projections' weights are read.
        prefill_token, decode_token: seconds of a token.
        prefill_context, decode_context: seconds of a token for each token before it.
        bandwidth: bytes per second between host and device, in either direction.

    Raises:
        TraceError: a number is negative or none, or the bandwidth is 0.
    """

    fixed: float = 2.89e-3
    weights: float = 2.48e-3
    prefill_token: float = 26.0e-6
    prefill_context: float = 0.201e-9
    decode_token: float = 14.6e-6
    decode_context: float = 13.9e-12
    bandwidth: float = 50e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < 1e18 or (name == "bandwidth" and not value):
                least = "above 0" if name == "bandwidth" else "of at least 0"
                raise TraceError(f"{value} is not a number {least} and below 1e18", field=name)

    def computing(self, decodes: int, decode_context: float, prefill: int, prefill_context: float) -> float:
        """Returns seconds of a step but for transfers: D, S, P and C of the module's formula."""
        return (
            self.fixed
            + max(self.weights, self.prefill_token * prefill)
            + self.prefill_context * prefill_context
            + self.decode_token * decodes
            + self.decode_context * decode_context
        )

    def seconds(self, computing: float, loaded: int, stored: int) -> float:
        """Returns seconds of a step that computes for `computing` seconds, with bytes from the host and to it."""
        return loaded / self.bandwidth + max(computing, stored / self.bandwidth)

    def of(self, step: MeasuredStep) -> float:
        """Returns seconds of a step of this form."""
        context = step.requests * _context(step)
        if step.tokens == 1:
            return self.computing(step.requests, context, 0, 0)
        return self.computing(0, 0, step.requests * step.tokens, context)

    @classmethod
    def parse(cls, text: str) -> StepTime:
        """Reads `name=value,name=value,...`; the defaults stand for the rest. Raises `TraceError`."""
        types = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        return cls(**read_settings(text, types, lambda problem, name: TraceError(problem, field=name)))


def fitted(steps: tuple[MeasuredStep, ...] = MEASURED, *, weights: float = StepTime.weights) -> StepTime:
    """Returns the constants with the least squared relative errors. Chunks must take longer to compute than
    `weights`."""
    rows, wanted = [], []
    for step in steps:
        tokens, context = step.requests * step.tokens, step.requests * _context(step)
        decode = step.tokens == 1
        row = [1, 0, 0, tokens, context] if decode else [1, tokens, context, 0, 0]
        rows.append(np.array(row) / step.seconds)
        wanted.append(1 - weights / step.seconds if decode else 1)
    scale = np.abs(rows).max(axis=0)
    found = np.linalg.lstsq(np.array(rows) / scale, np.array(wanted), rcond=None)[0] / scale
    fixed, *others = found.tolist()
    return StepTime(fixed, weights, *others)


def _context(step: MeasuredStep) -> float:
    """Returns the tokens before each one of a request's, added up."""
    return step.tokens * step.context + step.tokens * (step.tokens - 1) / 2
