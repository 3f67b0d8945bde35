"""Parts and formats that contradict themselves are refused, and what facts follow from the rest."""

from __future__ import annotations

import dataclasses

import pytest

from dsv4_jax.errors import LayoutError
from dsv4_jax.formats import (
    INDEX_FORMATS,
    KV_FORMATS,
    Codes,
    FormatSpec,
    Part,
    RowFormat,
    Scales,
    codec,
    index_format,
    kv_format,
)

E4M3, UE8M0 = Codes("e4m3", 32), Scales("ue8m0", 16, 1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "width", "holds", "message"),
    [
        ("a-b", "uint8", 4, None, "must be an identifier"),
        (3, "uint8", 4, None, "must be an identifier"),
        ("a", "uint64", 4, None, "carrier 'uint64'"),  # without 64-bit types JAX would make it uint32
        ("a", "int8", 4, None, "carrier 'int8'"),
        ("a", "uint8", 0, None, "width of part 'a' must be an integer of at least 1, got 0"),
        ("a", "uint8", True, None, "width of part 'a'"),
        ("a", "uint16", 32, E4M3, r"32 e4m3 codes are uint8, 1 to an element, got uint16\[32\]"),
        ("a", "uint8", 31, E4M3, r"got uint8\[31\]"),
        ("a", "uint8", 16, Codes("e2m1", 33), "33 e2m1 codes are uint8, 2 to an element"),
        ("a", "uint8", 64, Codes("bf16", 32), "32 bf16 codes are uint16"),
        ("a", "float32", 2, UE8M0, "ue8m0 scales are uint8, got float32"),
        ("a", "uint8", 1, Scales("absmax", 8, 1e-4), "absmax scales are float32"),
    ],
)
def test_parts_that_contradict_themselves(name, dtype, width, holds, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Part(name, dtype, width, holds)


@pytest.mark.parametrize("holds", [lambda: Codes("e4m3", 0), lambda: Codes("own", 1.5), lambda: Scales("ue8m0", 0, 0)])
def test_codes_and_scales_of_nothing(holds) -> None:
    with pytest.raises(LayoutError, match="must be an integer of at least 1"):
        holds()


def row(*parts: Part, dim: int = 32, rope_dim: int = 0) -> RowFormat:
    return RowFormat("toy", dim, rope_dim, parts, "nowhere")


def test_rows_that_contradict_themselves() -> None:
    codes, scale = Part("codes", "uint8", 32, E4M3), Part("scale", "uint8", 2, UE8M0)
    with pytest.raises(LayoutError, match="needs parts"):
        row()
    with pytest.raises(LayoutError, match="each of a name of its own"):
        row(codes, Part("codes", "uint16", 4))
    with pytest.raises(LayoutError, match=r"32 e4m3, 2 ue8m0 per 16 \(floor 0.0001\) do not hold 40 values"):
        row(codes, scale, dim=40)
    with pytest.raises(LayoutError, match="too few scales"):
        row(codes, Part("scale", "uint8", 1, UE8M0))
    assert row(codes, Part("scale", "uint8", 3, UE8M0)).padded and not row(codes, scale).padded
    assert row(codes, Part("more", "uint16", 1), dim=40).contents == "32 e4m3, 1 uint16"  # the rest may be in there


@pytest.mark.parametrize(("widths", "name"), [((64, 64), "fp8"), ((8, 0), "fp8_per_entry"), ((0, 0), "bf16")])
def test_widths_that_a_format_has_no_row_of(widths: tuple[int, int], name: str) -> None:
    with pytest.raises(LayoutError, match="must be an integer of at least 1"):
        kv_format(name, *widths)


def test_an_odd_fp4_key_is_refused() -> None:
    with pytest.raises(LayoutError, match="33 e2m1 codes are uint8, 2 to an element"):
        index_format("fp4", 33)


def test_facts_of_the_formats() -> None:
    rows = {f"kv {n}": kv_format(n, 512, 64) for n in ("fp8", "fp8_per_entry", "bf16", "f32")}
    rows |= {f"index {n}": index_format(n, 128) for n in ("fp4", "fp8", "bf16", "f32")}
    assert {n for n, fmt in rows.items() if fmt.quantised} == {"kv fp8", "kv fp8_per_entry", "index fp4", "index fp8"}
    assert {n for n, fmt in rows.items() if fmt.needs_rotation} == {"index fp4", "index fp8"}
    assert {n for n, fmt in rows.items() if fmt.dense_dtype == "float32"} == {"kv f32", "index f32"}
    assert {n for n, fmt in rows.items() if fmt.padded} == {"kv fp8"}
    assert rows["kv fp8"].contents == "448 e4m3, 64 bf16, 8 ue8m0 per 64 (floor 0.0001)"
    assert len({fmt.parts for fmt in rows.values()}) == len(rows)


def test_parts_are_equal_whatever_their_names() -> None:
    fmt = kv_format("fp8", 512, 64)
    renamed = tuple(dataclasses.replace(part, name=f"x{i}") for i, part in enumerate(fmt.parts))
    assert fmt.parts == renamed
    other = dataclasses.replace(fmt.parts[2], holds=Scales("ue8m0", 64, 1e-5))
    assert fmt.parts != (*fmt.parts[:2], other)


def test_a_codec_that_is_none_is_named() -> None:
    with pytest.raises(LayoutError, match="'toy': its codec 'nowhere' cannot be imported"):
        codec(row(Part("codes", "uint8", 32, E4M3)))
    fmt = dataclasses.replace(row(Part("codes", "uint8", 32, E4M3)), module="math")
    with pytest.raises(LayoutError, match="'math' has no function 'encode'"):
        codec(fmt)


def test_an_entry_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table entry is all that the lookups need; its rows are other rows than those of an equal entry."""
    monkeypatch.setitem(KV_FORMATS, "mine", FormatSpec("my.codec", KV_FORMATS["fp8"].parts))
    monkeypatch.setitem(INDEX_FORMATS, "mine", FormatSpec("my.codec", INDEX_FORMATS["fp8"].parts, needs_rotation=True))
    mine, fp8 = kv_format("mine", 32, 8), kv_format("fp8", 32, 8)
    assert mine != fp8 and mine.parts == fp8.parts and mine.module == "my.codec"
    assert index_format("mine", 16).needs_rotation
