"""The argument structs of the plain C entries: Python's mirrors have the sizes that the libraries say."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess

import pytest

from dsv4_jax import libraries
from dsv4_jax.cuda import c_entries
from dsv4_jax.errors import ImplementationError

from ..native import load_cpu


def cuda_library() -> ctypes.CDLL:
    try:
        return libraries.open_cuda()
    except ImplementationError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("op", c_entries.ENTRIES)
def test_mirrors_have_the_size_of_their_structs(op: str) -> None:
    assert c_entries.mismatch(cuda_library(), op) is None


def test_the_kernel_of_swap_and_its_twin_agree_on_their_arguments() -> None:
    load_cpu()
    size = libraries.open_cpu().dsv4_swap_args_size()
    assert size > 0
    assert cuda_library().dsv4_swap_args_size() == size


def test_a_library_of_other_sources_is_refused(tmp_path: pathlib.Path) -> None:
    source, path = tmp_path / "fake.c", tmp_path / "libfake.so"
    source.write_text("int dsv4_attend_args_size(void) { return 8; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    library = ctypes.CDLL(str(path))
    size = ctypes.sizeof(c_entries.AttendArgs)
    with pytest.raises(ImplementationError, match=rf"attend: AttendArgs has {size} bytes here and 8 in the library"):
        c_entries.open_entry(library, "attend")
    with pytest.raises(ImplementationError, match="no dsv4_moe_args_size"):
        c_entries.open_entry(library, "moe")


def test_a_failed_launch_is_an_error(tmp_path: pathlib.Path) -> None:
    source, path = tmp_path / "fake.c", tmp_path / "libfake.so"
    size = ctypes.sizeof(c_entries.TopKArgs)
    source.write_text(
        f"int dsv4_top_k_args_size(void) {{ return {size}; }}\n"
        "int dsv4_top_k_launch(const int* args, int tokens, void* stream) { return tokens; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    launch = c_entries.open_entry(ctypes.CDLL(str(path)), "top_k")
    launch(c_entries.TopKArgs(), 0, None)
    with pytest.raises(ImplementationError, match="top_k: CUDA error 700"):
        launch(c_entries.TopKArgs(), 700, None)
