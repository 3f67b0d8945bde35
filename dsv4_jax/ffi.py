"""The project's own native code: finds, loads and registers the XLA FFI handlers built from `csrc/`.

The CUDA library is optional. It is built with `cmake -S csrc -B build/csrc && cmake --build build/csrc`
(needs nvcc) and looked for at

1. the path in the environment variable `DSV4_JAX_CUDA_LIBRARY`,
2. `dsv4_jax/native/libdsv4_cuda.so`, where that build puts it.

It has no Python ABI (ctypes loads it), and it is compiled against the headers of the oldest supported
jaxlib, whose FFI version every later jaxlib accepts. It loads on machines without a GPU; only running needs one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import jax

from .errors import ImplementationError

__all__ = ["cuda_problem", "cuda_target", "load_cuda"]

# FFI target -> exported handler.
CUDA_TARGETS = {
    "dsv4_append": "Dsv4Append",
    "dsv4_attend": "Dsv4Attend",
    "dsv4_compress_csa": "Dsv4CompressCsa",
    "dsv4_compress_hca": "Dsv4CompressHca",
    "dsv4_finish_queries": "Dsv4FinishQueries",
    "dsv4_index_scores": "Dsv4IndexScores",
    "dsv4_top_k": "Dsv4TopK",
}
_VARIABLE = "DSV4_JAX_CUDA_LIBRARY"


def cuda_path() -> pathlib.Path:
    """Where the CUDA library is, or should be."""
    default = pathlib.Path(__file__).parent / "native" / "libdsv4_cuda.so"
    return pathlib.Path(os.environ.get(_VARIABLE) or default)


@functools.cache
def load_cuda() -> ctypes.CDLL:
    """The CUDA library, its handlers registered with XLA for the platform CUDA.

    Raises:
        ImplementationError: it is not built, or does not load, or lacks a handler; the message says which.
    """
    path = cuda_path()
    if not path.is_file():
        raise ImplementationError(f"no CUDA library at {path}: build csrc/ with CMake and nvcc, or set {_VARIABLE}")
    try:
        library = ctypes.CDLL(str(path.resolve()))
        capsules = {name: jax.ffi.pycapsule(getattr(library, symbol)) for name, symbol in CUDA_TARGETS.items()}
    except (OSError, AttributeError) as error:
        raise ImplementationError(f"the CUDA library {path} does not load: {error}") from error
    for name, capsule in capsules.items():
        jax.ffi.register_ffi_target(name, capsule, platform="CUDA")
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
