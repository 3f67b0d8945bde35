"""FlashMLA pages against a packer that places every byte by its published offset."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.errors import LayoutError, ShapeError
from dsv4_jax.formats import RowFormat, codec, index_format, kv_format
from dsv4_jax.formats.flashmla import pack_pages, page_bytes, unpack_pages

V4 = kv_format("fp8", 512, 64)
pack, unpack = (jax.jit(f, static_argnums=(0, 2)) for f in (pack_pages, unpack_pages))


def numpy_pages(fmt: RowFormat, nope: np.ndarray, rope: np.ndarray, scale: np.ndarray, b: int) -> np.ndarray:
    data, scales = fmt.nope_dim + 2 * fmt.rope_dim, scale.shape[1]
    size = b * (data + scales)
    while size % data:
        size += 1
    pages = np.zeros((len(nope) // b, size), np.uint8)
    for row in range(len(nope)):
        page, i = divmod(row, b)
        out = pages[page]
        out[i * data : i * data + fmt.nope_dim] = nope[row]
        for k in range(fmt.rope_dim):
            out[i * data + fmt.nope_dim + 2 * k] = rope[row, k] & 0xFF
            out[i * data + fmt.nope_dim + 2 * k + 1] = rope[row, k] >> 8
        out[b * data + i * scales : b * data + (i + 1) * scales] = scale[row]
    return pages


@pytest.mark.parametrize(("entries", "size"), [(64, 37440), (2, 1728), (32, 19008), (1, 1152)])
def test_page_bytes_at_v4_widths(entries: int, size: int) -> None:
    assert page_bytes(V4, entries) == size
    assert size % 576 == 0


@pytest.mark.parametrize("entries", [1, 2, 64])
@pytest.mark.parametrize("fmt", [V4, kv_format("fp8", 32, 8), kv_format("fp8", 136, 6)], ids=lambda f: str(f.dim))
def test_pages_equal_the_numpy_packer_and_unpack(fmt: RowFormat, entries: int) -> None:
    rng = np.random.default_rng(entries)
    parts = tuple(
        rng.integers(0, 1 << (8 * np.dtype(p.dtype).itemsize), (3 * entries, p.width), p.dtype) for p in fmt.parts
    )
    pages = pack(fmt, parts, entries)
    expected = numpy_pages(fmt, *parts, entries)
    assert pages.dtype == np.uint8 and pages.shape == (3, page_bytes(fmt, entries))
    np.testing.assert_array_equal(pages, expected)
    for part, back in zip(parts, unpack(fmt, pages, entries), strict=True):
        assert back.dtype == part.dtype
        np.testing.assert_array_equal(back, part)


def test_a_page_decodes_to_the_values_stored() -> None:
    """Read as a kernel would: code times 2^(scale byte - 127) of its group of 64, bf16 RoPE dims."""
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    page = np.asarray(pack(V4, jax.jit(codec(V4).encode, static_argnums=0)(V4, x), 4))[0]
    entry = page[: 4 * 576].reshape(4, 576)
    scale = np.exp2(page[4 * 576 : 4 * 584].reshape(4, 8)[:, :7].astype(np.float32) - 127)
    nope = entry[:, :448].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.repeat(scale, 64, 1)
    rope = entry[:, 448:].copy().view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(nope, x[:, :448], rtol=1 / 16, atol=2.0**-14)
    np.testing.assert_allclose(rope, x[:, 448:], rtol=1 / 256)


def test_wrong_uses_are_named() -> None:
    with pytest.raises(LayoutError, match="bf16"):
        page_bytes(kv_format("bf16", 512, 64), 64)
    with pytest.raises(LayoutError, match="fp8"):
        page_bytes(index_format("fp8", 128), 64)
    parts = tuple(np.zeros((3, p.width), p.dtype) for p in V4.parts)
    with pytest.raises(ShapeError, match="3 rows"):
        pack_pages(V4, parts, 2)
    with pytest.raises(ShapeError, match="1728"):
        unpack_pages(V4, np.zeros((1, 1727), np.uint8), 2)
