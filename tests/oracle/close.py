"""Stored rows of two implementations: equal bytes but where rsqrt, cos or sin may differ in the last bit."""

from __future__ import annotations

import numpy as np

from dsv4_jax.formats import Codes, RowFormat


def assert_rows_close(fmt: RowFormat | None, actual, expected) -> None:
    """Stored parts of a row format; None: one part of float32 numbers.

    float32 elements agree to 1e-6 of their row's largest; of any other part at most 0.1 % of the codes differ, and
    those by one step (the sign of a zero is no difference).
    """
    every = [None] if fmt is None else fmt.holds
    for holds, a, e in zip(every, map(np.asarray, actual), map(np.asarray, expected), strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if a.dtype == np.float32:
            size = np.abs(e).max(-1, keepdims=True, initial=0)
            assert (np.abs(a - e) <= 1e-6 * size).all(), np.abs(a - e).max()
            continue
        pairs = isinstance(holds, Codes) and holds.code == "e2m1"
        steps = np.abs(_ordered(a, pairs) - _ordered(e, pairs))
        assert (steps != 0).mean() <= 1e-3, f"{holds}: {(steps != 0).sum()} of {steps.size} codes differ"
        assert steps.max(initial=0) <= 1, f"{holds}: codes differ by up to {steps.max()} steps"


def _ordered(codes: np.ndarray, pairs: bool) -> np.ndarray:
    """Sign-magnitude codes as integers in the order of their values: [codes] or, of two in a byte, [codes, 2]."""
    bits = 8 * codes.dtype.itemsize
    wide = codes.astype(np.int64)
    if pairs:
        wide, bits = np.stack([wide & 15, wide >> 4], -1), 4
    magnitude = wide & (1 << bits - 1) - 1
    return np.where(wide >> bits - 1, -magnitude, magnitude)
