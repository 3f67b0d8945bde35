"""Stored rows of two implementations: equal bytes but where rsqrt, cos or sin may differ in the last bit."""

from __future__ import annotations

import numpy as np


def assert_rows_close(name: str, actual, expected) -> None:
    """Stored parts of a row format. float32 elements agree to 1e-6 of their row's largest; of any other
    part at most 0.1 % of the codes differ, and those by one step (the sign of a zero is no difference)."""
    for a, e in zip(map(np.asarray, actual), map(np.asarray, expected), strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if a.dtype == np.float32:
            size = np.abs(e).max(-1, keepdims=True, initial=0)
            assert (np.abs(a - e) <= 1e-6 * size).all(), np.abs(a - e).max()
            continue
        steps = np.abs(_ordered(name, a) - _ordered(name, e))
        assert (steps != 0).mean() <= 1e-3, f"{name}: {(steps != 0).sum()} of {steps.size} codes differ"
        assert steps.max(initial=0) <= 1, f"{name}: codes differ by up to {steps.max()} steps"


def _ordered(name: str, codes: np.ndarray) -> np.ndarray:
    """Sign-magnitude codes as integers in the order of their values: [codes] or, for packed fp4, [codes, 2]."""
    bits = 8 * codes.dtype.itemsize
    wide = codes.astype(np.int64)
    if name == "fp4":
        wide, bits = np.stack([wide & 15, wide >> 4], -1), 4
    magnitude = wide & (1 << bits - 1) - 1
    return np.where(wide >> bits - 1, -magnitude, magnitude)
