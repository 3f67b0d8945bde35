"""The project's own native code: finds, loads and registers the XLA FFI handlers built from `csrc/`.

There are two libraries, both optional, built with `cmake -S csrc -B build/csrc && cmake --build build/csrc`:
the CUDA kernels (`libdsv4_cuda.so`, needs nvcc) and the CPU twins of those that have one (`libdsv4_cpu.so`).
Each is looked for at

1. the path in the environment variable `DSV4_JAX_CUDA_LIBRARY` or `DSV4_JAX_CPU_LIBRARY`,
2. `dsv4_jax/native/`, where that build puts it,
3. for the CPU one: `build/` of a source checkout, where `make build` puts it.

A twin has the target name of its kernel, for another platform: one call in a traced function serves both.
The libraries have no Python ABI (ctypes loads them), and they are compiled against the headers of the oldest
supported jaxlib, whose FFI version every later jaxlib accepts. The CUDA one loads on machines without a GPU;
only running needs one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import jax

from .errors import ImplementationError

__all__ = ["cpu_problem", "cpu_target", "cuda_problem", "cuda_target", "load_cpu", "load_cuda"]

# FFI target -> exported handler.
CUDA_TARGETS = {
    "dsv4_append": "Dsv4Append",
    "dsv4_attend": "Dsv4Attend",
    "dsv4_compress_csa": "Dsv4CompressCsa",
    "dsv4_compress_hca": "Dsv4CompressHca",
    "dsv4_finish_queries": "Dsv4FinishQueries",
    "dsv4_index_scores": "Dsv4IndexScores",
    "dsv4_swap_in": "Dsv4SwapIn",
    "dsv4_swap_out": "Dsv4SwapOut",
    "dsv4_top_k": "Dsv4TopK",
}
CPU_TARGETS = {"dsv4_swap_in": "Dsv4SwapIn", "dsv4_swap_out": "Dsv4SwapOut"}
_NATIVE = pathlib.Path(__file__).parent / "native"


def cuda_path() -> pathlib.Path:
    """Where the CUDA library is, or should be."""
    return pathlib.Path(os.environ.get("DSV4_JAX_CUDA_LIBRARY") or _NATIVE / "libdsv4_cuda.so")


def cpu_path() -> pathlib.Path:
    """Where the library of CPU twins is, or should be."""
    if named := os.environ.get("DSV4_JAX_CPU_LIBRARY"):
        return pathlib.Path(named)
    packaged, built = _NATIVE / "libdsv4_cpu.so", _NATIVE.parents[1] / "build" / "libdsv4_cpu.so"
    return built if built.is_file() and not packaged.is_file() else packaged


@functools.cache
def load_cuda() -> ctypes.CDLL:
    """The CUDA library, its handlers registered with XLA for the platform CUDA.

    Raises:
        ImplementationError: it is not built, or does not load, or lacks a handler; the message says which.
    """
    return _load("CUDA", cuda_path(), CUDA_TARGETS, "build csrc/ with CMake and nvcc, or set DSV4_JAX_CUDA_LIBRARY")


@functools.cache
def load_cpu() -> ctypes.CDLL:
    """The library of CPU twins, its handlers registered with XLA for the platform cpu. Raises as `load_cuda`."""
    return _load("cpu", cpu_path(), CPU_TARGETS, "build csrc/ with CMake or `make build`, or set DSV4_JAX_CPU_LIBRARY")


def _load(platform: str, path: pathlib.Path, targets: dict[str, str], remedy: str) -> ctypes.CDLL:
    what = f"{platform.upper()} library"
    if not path.is_file():
        raise ImplementationError(f"no {what} at {path}: {remedy}")
    try:
        library = ctypes.CDLL(str(path.resolve()))
        capsules = {name: jax.ffi.pycapsule(getattr(library, symbol)) for name, symbol in targets.items()}
    except (OSError, AttributeError) as error:
        raise ImplementationError(f"the {what} {path} does not load: {error}") from error
    for name, capsule in capsules.items():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    return library


def cuda_problem() -> str | None:
    """Why the CUDA kernels cannot be used, None if they can (the GPU itself is not looked at)."""
    try:
        load_cuda()
    except ImplementationError as error:
        return str(error)
    return None


def cuda_target(name: str) -> str:
    """The registered FFI target of that name; loads the library first. Raises `ImplementationError` if it cannot."""
    load_cuda()
    return name


def cpu_problem() -> str | None:
    """Why the CPU twins cannot be used, None if they can."""
    try:
        load_cpu()
    except ImplementationError as error:
        return str(error)
    return None


def cpu_target(name: str) -> str:
    """The registered FFI target of that name; loads the library of CPU twins first. Raises as `load_cpu`."""
    load_cpu()
    return name
