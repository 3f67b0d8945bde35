"""The experts' part of a feed-forward layer in NumPy float64, from weights as released."""

from __future__ import annotations

import numpy as np

from .rows import E2M1

NAMES = ("gate", "up", "down")
Matrix = tuple[np.ndarray, np.ndarray]  # codes [rows, K / 2], scales [rows, K / 32]


def dequantised(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """e2m1 codes, column 2i in the low nibble, times an e8m0 scale per 32 columns."""
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    values = np.where(pairs & 8, -1.0, 1.0) * E2M1[pairs & 7]
    return values * np.exp2(scales.astype(np.float64) - 127).repeat(32, -1)


def experts(
    x: np.ndarray, chosen: np.ndarray, share: np.ndarray, weights: list[dict[str, Matrix]], limit: float, first: int = 0
) -> np.ndarray:
    """[T, hidden], [T, top] twice -> [T, hidden]; `weights`: of experts `first` and on, others are left out."""
    out = np.zeros(x.shape)
    for e, matrices in enumerate(weights):
        gate, up, down = (dequantised(*matrices[name]) for name in NAMES)
        token, place = np.nonzero(chosen == first + e)
        g, u = x[token].astype(np.float64) @ gate.T, x[token].astype(np.float64) @ up.T
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        np.add.at(out, token, share[token, place, None].astype(np.float64) * ((g / (1 + np.exp(-g)) * u) @ down.T))
    return out


def random_weights(rng: np.random.Generator, experts: int, hidden: int, inter: int) -> list[dict[str, Matrix]]:
    """Any codes, scales 2^-10 to 2^-5."""

    def matrix(rows: int, columns: int) -> Matrix:
        codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        return codes, rng.integers(117, 123, (rows, columns // 32), np.uint8)

    sizes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    return [{name: matrix(*size) for name, size in sizes.items()} for _ in range(experts)]
