"""Handlers refuse operands that begin where kernels would fault: csrc/common/alignment.h, compiled for the host."""

from __future__ import annotations

import ctypes
import pathlib
import re
import subprocess

import pytest

CSRC = pathlib.Path(__file__).parents[2] / "csrc"
SOURCE = r"""
#include "common/alignment.h"
#include <cstring>
extern "C" void problem(const void* x, const void* weights, char* out) {
  std::strcpy(out, dsv4::misaligned("dense", {{"x", x}, {"weights", weights}}).c_str());
}
"""


def test_the_operand_is_named(tmp_path: pathlib.Path) -> None:
    library = tmp_path / "alignment.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-I", CSRC, "-x", "c++", "-o", library, "-"]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    problem = ctypes.CDLL(str(library)).problem
    problem.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    for x, weights, message in (
        (0, 4096, ""), (16, 48, ""), (4096, 4100, "dense: weights is not 16-byte aligned"),
        (8, 4, "dense: x is not 16-byte aligned"),
    ):  # fmt: skip
        out = ctypes.create_string_buffer(200)
        problem(x, weights, out)
        assert out.value.decode() == message


@pytest.mark.parametrize("source", sorted(path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.cu")))
def test_every_handler_looks(source: str) -> None:
    """By `misaligned`, or by reading its operands with `Operands`, which does. Those that need not say why here."""
    by_element = {"index/entry_rows.cu", "moe/route.cu", "fusion/sequence.cu"}  # read single numbers; calls handlers
    of_its_own = {"swap/swap.cu", "exchange/exchange.cu"}  # csrc/swap/swap.h; smaller accesses
    text = (CSRC / source).read_text()
    assert (source in by_element | of_its_own) != bool(re.search(r"dsv4::misaligned\(|dsv4::Operands operands", text))
