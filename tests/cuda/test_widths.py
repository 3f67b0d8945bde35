"""What Python takes the CUDA kernels to be built for is what their headers say."""

from __future__ import annotations

import pathlib
import re

from dsv4_jax.cuda.compress import ROWS
from dsv4_jax.cuda.widths import INDEX_ROWS, KV_ROW, WIDTHS, Widths, unsupported_rows
from dsv4_jax.formats import Codes, Part, Scales, index_format, kv_format

CSRC = pathlib.Path(__file__).parents[2] / "csrc"


def constants(header: str) -> dict[str, int]:
    """Its `constexpr int`s, in integer arithmetic."""
    found: dict[str, int] = {}
    for name, value in re.findall(r"^constexpr int (k\w+) = ([^;]+);", (CSRC / header).read_text(), re.M):
        found[name] = eval(value.replace("/", "//"), {}, found)
    return found


def test_widths_are_those_of_the_header() -> None:
    k = constants("common/widths.h")
    assert Widths(k["kNope"], k["kRope"], k["kIndexDim"], k["kIndexHeads"], k["kCsaRatio"]) == WIDTHS
    assert (k["kDim"], k["kRopePairs"]) == (WIDTHS.dim, WIDTHS.rope_pairs)
    assert KV_ROW.parts == (
        Part("codes", "uint8", k["kNope"], Codes("e4m3", k["kNope"])),
        Part("rope", "uint16", k["kRope"], Codes("bf16", k["kRope"])),
        Part("scale", "uint8", k["kScales"], Scales("ue8m0", k["kScaleGroup"], 1e-4)),
    )
    fp4, fp8 = INDEX_ROWS
    assert fp4.parts == (
        Part("codes", "uint8", k["kFp4Bytes"], Codes("e2m1", k["kIndexDim"])),
        Part("scale", "uint8", k["kFp4Scales"], Scales("ue8m0", k["kFp4Group"], 6 * 2.0**-126)),
    )
    assert fp8.parts == (
        Part("codes", "uint8", k["kIndexDim"], Codes("e4m3", k["kIndexDim"])),
        Part("scale", "float32", 1, Scales("power_of_two", k["kIndexDim"], 1e-4)),
    )


def test_rows_are_numbered_as_in_the_header() -> None:
    (names,) = re.findall(r"enum class Format : int \{([^}]+)\}", (CSRC / "rows/emit.cuh").read_text())
    numbers = dict(re.findall(r"(\w+) = (\d+)", names))
    assert {name: int(number) for name, number in numbers.items()} == {
        "kFp8": ROWS.index(KV_ROW),
        "kIndexFp4": ROWS.index(INDEX_ROWS[0]),
        "kIndexFp8": ROWS.index(INDEX_ROWS[1]),
    }


def test_a_reason_says_what_there_is_and_what_was_asked_for() -> None:
    assert unsupported_rows(kv_format("fp8", 512, 64), KV_ROW) is None
    assert unsupported_rows(index_format("fp4", 64), *INDEX_ROWS) == (
        "it is built for rows of 128 e2m1, 4 ue8m0 per 32 (floor 7.05297e-38) or of 128 e4m3, 1 power_of_two per 128 "
        "(floor 0.0001), not of 64 e2m1, 2 ue8m0 per 32 (floor 7.05297e-38)"
    )
