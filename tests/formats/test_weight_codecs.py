"""Weight formats against NumPy: what codes and scales mean, which are made, and where their bits lie on a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.formats.weights import WEIGHT_FORMATS, fp4, fp8

from ..oracle import dense, experts

FP8, FP4 = WEIGHT_FORMATS["fp8"], WEIGHT_FORMATS["fp4"]


def released(name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    if name.startswith("fp8"):
        return dense.random_matrix(rng, rows, columns)
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    return codes, rng.integers(2, fp4.LARGEST_SCALE + 1, (rows, columns // 32), np.uint8)


def oracle(name: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return (dense if name.startswith("fp8") else experts).dequantised(codes, scales)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_decodes_exactly(name: str) -> None:
    codes, scales = released(name, 192, 256)
    got = jax.jit(WEIGHT_FORMATS[name].codec.decode)(codes, scales)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), oracle(name, codes, scales))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_comes_back(name: str) -> None:
    fmt = WEIGHT_FORMATS[name]
    codes, scales = released(name, 192, 256)
    assert (codes.shape, scales.shape) == fmt.released(192, 256)
    parts = jax.jit(fmt.codec.pack)(codes, scales)
    assert tuple(part.shape for part in parts) == fmt.packed(192, 256)
    assert fmt.unpacked(parts[0].shape) == (192, 256)
    assert fmt.bytes(192, 256) == sum(part.nbytes for part in parts) == codes.nbytes + scales.nbytes
    for part, want in zip(jax.jit(fmt.codec.unpack)(*parts), (codes, scales), strict=True):
        np.testing.assert_array_equal(part, want)


def test_stacks_of_fp4_matrices() -> None:
    codes, scales = (np.stack([x, x[::-1]]) for x in released("fp4", 128, 256))
    (tiles,) = fp4.pack(codes, scales)
    for tile, *of_one in zip(tiles, codes, scales, strict=True):
        np.testing.assert_array_equal(tile, fp4.pack(*of_one)[0])
    assert FP4.unpacked(tiles.shape) == (2, 128, 256)
    for part, want in zip(fp4.unpack(tiles), (codes, scales), strict=True):
        np.testing.assert_array_equal(part, want)


@pytest.mark.parametrize("shape", [(256, 128), (130, 300)])
def test_fp8_is_made_of_the_least_scale_that_fits(shape: tuple[int, int]) -> None:
    """By block: 2^k with amax / 448 <= 2^k < 2 amax / 448, and every value the nearest code of it."""
    rng = np.random.default_rng(1)
    matrix = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 3, (1, shape[1])))).astype(np.float32)
    matrix[0, :2] = 448 * 2.0**-12, 449 * 2.0**-3
    codes, scales = (np.asarray(x) for x in jax.jit(fp8.encode)(matrix))
    got = dense.dequantised(codes, scales)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        factor, amax = np.exp2(float(scales[i, j]) - 127), np.abs(matrix[block]).max()
        assert amax <= 448 * factor < 2 * amax
        x = matrix[block] / factor
        step = np.exp2(np.maximum(np.floor(np.log2(np.abs(x) + 1e-30)), -6) - 3)
        assert (np.abs(got[block] / factor - x) <= step / 2).all()


def test_fp4_is_made_of_the_least_scale_that_fits() -> None:
    rng = np.random.default_rng(2)
    matrix = (rng.standard_normal((64, 128)) * 0.02).astype(np.float32)
    codes, scales = (np.asarray(x) for x in jax.jit(fp4.encode)(matrix))
    amax = np.abs(matrix).reshape(64, 4, 32).max(-1)
    np.testing.assert_array_equal(scales, np.ceil(np.log2(amax.astype(np.float64) / 6)) + 127)
    factors = np.exp2(scales.astype(np.float64) - 127).repeat(32, -1)
    error = np.abs(experts.dequantised(codes, scales) - matrix) / factors
    assert error.max() <= 1 and np.median(error) < 0.25


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_sizes_that_a_format_does_not_have(name: str) -> None:
    fmt = WEIGHT_FORMATS[name]
    fmt.check("wq_b", 192, 256)
    for rows, columns in ((96, 256), (192, 64), (0, 128)):
        with pytest.raises(ShapeError, match=rf"wq_b \[{rows}, {columns}\]: {name} weights have rows in 64s and col"):
            fmt.check("wq_b", rows, columns)


def test_the_table_says_what_the_packed_forms_are() -> None:
    for fmt in WEIGHT_FORMATS.values():
        module = fmt.codec
        assert fmt.tile == (module.TILE_ROWS, module.TILE_COLUMNS)
        assert (fmt.parts[0].bytes, fmt.largest_scale) == (module.TILE_BYTES, module.LARGEST_SCALE)
