"""FP8 matrices as released, in NumPy float64."""

from __future__ import annotations

import numpy as np

from .rows import FP8

Matrix = tuple[np.ndarray, np.ndarray]  # codes [N, K], scales [ceil(N / 128), K / 128]


def dequantised(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """e4m3 codes times an e8m0 scale per 128 x 128."""
    factors = np.exp2(scales.astype(np.float64) - 127).repeat(128, 0)[: len(codes)].repeat(128, 1)[:, : codes.shape[1]]
    return codes.view(FP8["e4m3"]).astype(np.float64) * factors


def product(x: np.ndarray, weights: np.ndarray, groups: int = 1) -> np.ndarray:
    """[T, groups * K] and [N, K] -> [T, N]; every group of the weights' rows has its own columns of x."""
    blocks = np.split(weights, groups)
    return np.concatenate([part @ w.T for part, w in zip(np.split(x, groups, 1), blocks, strict=True)], 1)


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """Any codes but NaN, scales 2^-22 to 2^-12."""
    codes = rng.integers(0, 256, (rows, columns), np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return codes, rng.integers(105, 116, (-(-rows // 128), columns // 128), np.uint8)
