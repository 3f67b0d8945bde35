"""Where the two native libraries are, and how they are opened. Imports no jax: `ffi` registers what XLA calls of them.

Both are optional, built from `csrc/` with `cmake -S csrc -B build/csrc && cmake --build build/csrc`, and have no Python
ABI (ctypes loads them). Each is looked for at

1. the path in the environment variable `DSV4_JAX_CUDA_LIBRARY` or `DSV4_JAX_CPU_LIBRARY`,
2. `dsv4_jax/native/`, where that build puts it,
3. for the CPU one: `build/` of a source checkout, where `make build` puts it.
"""

from __future__ import annotations

import ctypes
import os
import pathlib

from .errors import ImplementationError

__all__ = ["cpu_path", "cuda_path", "open_cpu", "open_cuda"]

_NATIVE = pathlib.Path(__file__).parent / "native"


def cuda_path() -> pathlib.Path:
    """Where the CUDA library is, or should be."""
    return pathlib.Path(os.environ.get("DSV4_JAX_CUDA_LIBRARY") or _NATIVE / "libdsv4_cuda.so")


def cpu_path() -> pathlib.Path:
    """Where the CPU library is, or should be."""
    if named := os.environ.get("DSV4_JAX_CPU_LIBRARY"):
        return pathlib.Path(named)
    packaged, built = _NATIVE / "libdsv4_cpu.so", _NATIVE.parents[1] / "build" / "libdsv4_cpu.so"
    return built if built.is_file() and not packaged.is_file() else packaged


def open_cuda() -> ctypes.CDLL:
    """The CUDA kernels. Raises `ImplementationError` if they are not built or do not load."""
    return _open("CUDA", cuda_path(), "build csrc/ with CMake and nvcc, or set DSV4_JAX_CUDA_LIBRARY")


def open_cpu() -> ctypes.CDLL:
    """The CPU twins and the checksum. Raises `ImplementationError` if they are not built or do not load."""
    return _open("CPU", cpu_path(), "build csrc/ with CMake or `make build`, or set DSV4_JAX_CPU_LIBRARY")


def _open(platform: str, path: pathlib.Path, remedy: str) -> ctypes.CDLL:
    if not path.is_file():
        raise ImplementationError(f"no {platform} library at {path}: {remedy}")
    try:
        return ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        raise ImplementationError(f"the {platform} library {path} does not load: {error}") from error
