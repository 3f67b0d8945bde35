"""Handlers refuse operands that do not fit by their names, with INVALID_ARGUMENT: csrc/common/handler.h, on the CPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ffi

from .test_widths import CSRC

# A handler with an operand whose type XLA checks and one whose type the table checks; and a check of bare addresses.
SOURCE = r"""
#include <cstring>

#include "common/handler.h"

namespace dsv4 {

const Handler* handlers = nullptr;

namespace {

namespace ffi = xla::ffi;

struct Address {
  const void* data;
  int64_t shape[1];

  const void* untyped_data() const { return data; }
  size_t element_count() const { return shape[0]; }
  ffi::DataType element_type() const { return ffi::U8; }
  ffi::Span<const int64_t> dimensions() const { return {shape, 1}; }
};

ffi::Error dense(ffi::Buffer<ffi::F32, 2> x, ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer>, int32_t groups) {
  const int64_t columns = x.dimensions()[1];
  return check("dense",
               {{"x", x, {4, kAny}}, {"weights", weights, {8, columns}, kVectors, {ffi::F32, ffi::BF16}}},
               {{groups >= 1, "groups must be at least 1"}});
}

}  // namespace

DSV4_HANDLER(dense, test_dense, dense,
             ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32, 2>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<int32_t>(
                 "groups"));

}  // namespace dsv4

extern "C" const dsv4::Handler* dsv4_handlers() { return dsv4::handlers; }

extern "C" void problem(const void* x, const void* ids, int64_t elements, char* out) {
  const dsv4::Address vectors = {x, {elements}}, single = {ids, {elements}};
  const auto error =
      dsv4::check("dense", {{"x", vectors, {dsv4::kAny}}, {"ids", single, {dsv4::kAny}, dsv4::kElements}});
  std::strcpy(out, error.message().c_str());
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("checks") / "checks.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir(), "-I", CSRC, "-x", "c++"]
    subprocess.run([*command, "-o", path, "-"], input=SOURCE, text=True, check=True)
    library = ctypes.CDLL(str(path))
    (handler,) = ffi.handlers(library).values()
    assert (handler.op, handler.built_for) == ("dense", ())
    jax.ffi.register_ffi_target("test_dense", jax.ffi.pycapsule(handler.address), platform="cpu")
    return library


def test_what_does_not_fit_is_named(library: ctypes.CDLL) -> None:
    def call(x: Any = (4, 16), weights: Any = (8, 16), dtype: Any = jnp.bfloat16, groups: int = 1) -> None:
        kernel = jax.ffi.ffi_call("test_dense", jax.ShapeDtypeStruct((4, 8), jnp.float32))
        jax.block_until_ready(kernel(jnp.zeros(x), jnp.zeros(weights, dtype), groups=np.int32(groups)))

    call()
    for wrong, message in (
        (dict(x=(5, 16)), r"dense: x is \[5, 16\], expected \[4, any\]"),
        (dict(weights=(8, 17)), r"dense: weights is \[8, 17\], expected \[8, 16\]"),
        (dict(weights=(8,)), r"dense: weights is \[8\], expected \[8, 16\]"),
        (dict(dtype=jnp.int32), "dense: weights is of another element type than expected"),
        (dict(groups=0), "dense: groups must be at least 1"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: {message}"):
            call(**wrong)


def test_what_begins_where_a_load_would_fault_is_named(library: ctypes.CDLL) -> None:
    problem = library.problem
    problem.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p)
    for x, ids, elements, message in (
        (0, 4096, 8, ""),
        (16, 4, 8, ""),
        (8, 4096, 8, "dense: x is not 16-byte aligned"),
        (8, 4096, 0, ""),
    ):
        out = ctypes.create_string_buffer(200)
        problem(x, ids, elements, out)
        assert out.value.decode() == message


@pytest.mark.parametrize("source", sorted(path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.cu")))
def test_every_handler_checks(source: str) -> None:
    """By `check`, or by `Operands` or `read_moe`, which do. Those that need not say why here."""
    # Those of swap.h; of smaller accesses; of the calls.
    of_its_own = {"swap/swap.cu", "exchange/exchange.cu", "fusion/sequence.cu"}
    text = (CSRC / source).read_text()
    assert (source in of_its_own) != bool(re.search(r'\bcheck\(\s*"|\bOperands operands|\bread_moe\("', text))
    assert re.search(r"\bcheck\(target,", (CSRC / "moe/operands.h").read_text())
