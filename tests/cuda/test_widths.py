"""What the kernels are compiled for, as Python knows it: csrc/widths.h says the same."""

from __future__ import annotations

import pathlib
import re

from dsv4_jax.cuda.widths import INDEX_ROWS, KV_ROW, WIDTHS

HEADER = pathlib.Path(__file__).parents[2] / "csrc" / "widths.h"


def constants() -> dict[str, int]:
    """The constants of the header, by name, evaluated."""
    found: dict[str, int] = {}
    for name, expression in re.findall(r"^constexpr int (\w+) = ([^;]+);", HEADER.read_text(), re.M):
        found[name] = eval(expression.replace("/", "//"), {}, found)
    return found


def test_the_header_has_the_same_widths() -> None:
    header = constants()
    assert (header["kNope"], header["kRope"]) == (WIDTHS.nope, WIDTHS.rope)
    assert (header["kDim"], header["kRopePairs"]) == (WIDTHS.dim, WIDTHS.rope_pairs)
    assert (header["kIndexDim"], header["kIndexHeads"]) == (WIDTHS.index_dim, WIDTHS.index_heads)
    assert header["kCsaRatio"] == WIDTHS.csa_ratio


def test_the_header_has_the_same_rows() -> None:
    header = constants()
    assert [part.width for part in KV_ROW.parts] == [header[name] for name in ("kNope", "kRope", "kScales")]
    fp4, fp8 = ([part.width for part in row.parts] for row in INDEX_ROWS)
    assert fp4 == [header["kFp4Bytes"], header["kFp4Scales"]]
    assert fp8 == [header["kIndexDim"], 1]
