"""The XLA FFI handlers built from `csrc/`: loads them, registers them, says what they were built for.

There are two libraries, both optional (`libraries` says where they are): the CUDA kernels (`libdsv4_cuda.so`, needs
nvcc) and the CPU twins of those that have one (`libdsv4_cpu.so`). A twin has the target name of its kernel, for another
platform: one call in a traced function serves both. The libraries are compiled against the headers of the oldest
supported jaxlib, whose FFI version every later jaxlib accepts. The CUDA one loads on machines without a GPU; only
running needs one.

The CUDA library holds machine code for the compute capabilities it was built for, and not every kernel can be built
for each (csrc/architectures.cmake): which it is, is known per op before anything is launched.
"""

from __future__ import annotations

import ctypes
import functools

import jax

from .errors import ImplementationError
from .libraries import cuda_path, open_cpu, open_cuda

__all__ = ["built_for", "cpu_problem", "cpu_target", "cuda_problem", "cuda_target", "load_cpu", "load_cuda"]

# Op, the name of its source in csrc/ -> FFI target -> exported handler.
CUDA_TARGETS = {
    "append": {"dsv4_append": "Dsv4Append"},
    "attend": {"dsv4_attend": "Dsv4Attend"},
    "compress": {"dsv4_compress_csa": "Dsv4CompressCsa", "dsv4_compress_hca": "Dsv4CompressHca"},
    "index_scores": {"dsv4_index_scores": "Dsv4IndexScores"},
    "moe": {"dsv4_moe": "Dsv4Moe"},
    "queries": {"dsv4_finish_queries": "Dsv4FinishQueries"},
    "swap": {"dsv4_swap_in": "Dsv4SwapIn", "dsv4_swap_out": "Dsv4SwapOut"},
    "top_k": {"dsv4_top_k": "Dsv4TopK"},
}
CPU_TARGETS = CUDA_TARGETS["swap"]


@functools.cache
def load_cuda() -> ctypes.CDLL:
    """The CUDA library, the handlers of the ops it was built with registered with XLA for the platform CUDA.

    Raises:
        ImplementationError: it is not built, or does not load, or lacks a handler; the message says which.
    """
    library = open_cuda()
    ops = [op for op in CUDA_TARGETS if _built_for(library, op)]
    if not ops:
        raise ImplementationError(f"the CUDA library {cuda_path()} does not load: no dsv4_*_built_for in it")
    _register("CUDA", library, {name: symbol for op in ops for name, symbol in CUDA_TARGETS[op].items()})
    return library


@functools.cache
def load_cpu() -> ctypes.CDLL:
    """The library of CPU twins, its handlers registered with XLA for the platform cpu. Raises as `load_cuda`."""
    library = open_cpu()
    _register("cpu", library, CPU_TARGETS)
    return library


def _register(platform: str, library: ctypes.CDLL, targets: dict[str, str]) -> None:
    try:
        capsules = {name: jax.ffi.pycapsule(getattr(library, symbol)) for name, symbol in targets.items()}
    except AttributeError as error:
        raise ImplementationError(f"the {platform.upper()} library does not load: {error}") from error
    for name, capsule in capsules.items():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)


def built_for(op: str) -> tuple[str, ...]:
    """The compute capabilities ("8.0", "9.0", ...) whose code of this op the CUDA library holds; none: left out.

    Raises:
        ImplementationError: as `load_cuda`.
    """
    return _built_for(load_cuda(), op)


def _built_for(library: ctypes.CDLL, op: str) -> tuple[str, ...]:
    try:
        codes = (ctypes.c_int * 64).in_dll(library, f"dsv4_{op}_built_for")
    except ValueError:
        return ()
    found = []
    for code in codes:  # as __CUDA_ARCH__, ends with 0; csrc/built_for.h
        if code == 0:
            break
        found.append(f"{code // 100}.{code % 100 // 10}")
    return tuple(found)


def _runs_on(capability: str, built: tuple[str, ...]) -> bool:
    """Whether machine code for one of `built` runs on a device: same generation, and not newer."""
    major, minor = map(int, capability.split("."))
    return any(major == int(m) and minor >= int(n) for m, n in (code.split(".") for code in built))


def _capabilities() -> set[str]:
    """The compute capabilities of this process's GPUs; none where there are none."""
    if jax.default_backend() != "gpu":
        return set()
    # An AMD device has none, and no use for the library.
    return {str(getattr(device, "compute_capability", "0.0")) for device in jax.local_devices()}


def cuda_problem(op: str | None = None) -> str | None:
    """Why the CUDA kernel of an op cannot be used on this process's devices, None if it can.

    Args:
        op: a key of `CUDA_TARGETS`; None: the library as a whole, whatever the devices.
    """
    try:
        load_cuda()
    except ImplementationError as error:
        return str(error)
    if op is None:
        return None
    built = built_for(op)
    if not built:
        return (
            f"the CUDA library {cuda_path()} has no {op} kernel: none of the capabilities it was built for can run it"
        )
    missing = sorted(capability for capability in _capabilities() if not _runs_on(capability, built))
    if missing:
        return (
            f"the device has compute capability {', '.join(missing)}, the {op} kernel in {cuda_path()} is built for "
            f"{', '.join(built)}"
        )
    return None


def cuda_target(name: str) -> str:
    """The registered FFI target of that name; loads the library first.

    Raises:
        ImplementationError: `cuda_problem` of its op.
    """
    op = next(op for op, targets in CUDA_TARGETS.items() if name in targets)
    if problem := cuda_problem(op):
        raise ImplementationError(problem)
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
