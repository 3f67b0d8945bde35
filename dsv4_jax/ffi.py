"""The XLA FFI handlers built from `csrc/`: loads them, registers them, says what they were built for.

There are two libraries, both optional (`libraries` says where they are): the CUDA kernels (`libdsv4_cuda.so`, made by
nvcc) and the CPU twins of those that have one (`libdsv4_cpu.so`). A twin has the target name of its kernel, for another
platform: one call in a traced function serves both. A wheel's libraries are compiled against the headers of the oldest
supported jaxlib, whose FFI version every later jaxlib accepts. The CUDA one loads on machines without a GPU; only
running needs one.

The CUDA library holds machine code for the compute capabilities it was built for, and not every kernel can be built
for each (csrc/architectures.cmake): which it is, is known per op before anything is launched.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import NamedTuple

import jax

from .errors import ImplementationError, PerformanceWarning
from .libraries import cuda_path, open_cpu, open_cuda

__all__ = [
    "Handler",
    "built_for",
    "code_problem",
    "cpu_problem",
    "cpu_target",
    "cuda_problem",
    "cuda_target",
    "handlers",
    "load_cpu",
    "load_cuda",
    "warn_without_cuda",
]


@functools.cache
def load_cuda() -> ctypes.CDLL:
    """Opens the CUDA library, once.

    Raises:
        ImplementationError: it is not built, does not load, was built from other sources, or the driver is too old for
            it; the message says which.
    """
    return open_cuda()


@functools.cache
def load_cpu() -> ctypes.CDLL:
    """Opens the library of CPU twins, once. Raises as `load_cuda`."""
    return open_cpu()


class _Handler(ctypes.Structure):
    """Mirrors `dsv4::Handler` of csrc/common/registry.h."""


_Handler._fields_ = (
    ("op", ctypes.c_char_p),
    ("target", ctypes.c_char_p),
    ("call", ctypes.c_void_p),
    ("built_for", ctypes.POINTER(ctypes.c_int)),
    ("next", ctypes.POINTER(_Handler)),
)


class Handler(NamedTuple):
    """A handler of a library, which is an XLA FFI target.

    Attributes:
        op: whose code it is; several handlers may be of one op.
        address: of the C function.
        built_for: the compute capabilities ("8.0", "9.0", ...) that its kernels are compiled for; none: a CPU twin.
    """

    op: str
    address: int
    built_for: tuple[str, ...]


@functools.cache
def handlers(library: ctypes.CDLL) -> dict[str, Handler]:
    """Returns all handlers of a library by target: they enter themselves into its list (csrc/common/registry.h)."""
    first = library.dsv4_handlers
    first.restype = ctypes.POINTER(_Handler)
    found, entry = {}, first()
    while entry:
        handler = entry.contents
        codes: list[int] = []  # as __CUDA_ARCH__
        while code := handler.built_for[len(codes)]:
            codes.append(code)
        built_for = tuple(f"{code // 100}.{code % 100 // 10}" for code in codes)
        found[handler.target.decode()] = Handler(handler.op.decode(), handler.call, built_for)
        entry = handler.next
    return found


@functools.cache
def _register(platform: str, library: ctypes.CDLL, target: str) -> str:
    """Registers the handler of a target with XLA, once."""
    if (handler := handlers(library).get(target)) is None:
        raise ImplementationError(f"the {platform.upper()} library has no handler {target}")
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.address), platform=platform)
    return target


def built_for(op: str) -> tuple[str, ...]:
    """The compute capabilities ("8.0", "9.0", ...) whose code of this op the CUDA library holds; none: left out.

    Raises:
        ImplementationError: as `load_cuda`.
    """
    return next((handler.built_for for handler in handlers(load_cuda()).values() if handler.op == op), ())


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
    """Why the CUDA kernel of an op cannot be used in this process, None if it can.

    Args:
        op: as its handlers in csrc/ name it; None: the library as a whole, whatever the devices.
    """
    try:
        load_cuda()
    except ImplementationError as error:
        return str(error)
    if op is None:
        return None
    if (problem := code_problem(op)) is not None:
        return problem
    backend = jax.default_backend()
    return None if backend == "gpu" else f"the backend is {backend}, and CUDA kernels need a GPU"


def code_problem(op: str) -> str | None:
    """Why the CUDA library, which is there, has no code of an op for this process's GPUs, None if it has.

    Raises:
        ImplementationError: as `load_cuda`.
    """
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


def warn_without_cuda() -> None:
    """Says once that this process's NVIDIA GPU does without the CUDA library. To call where a slower way is taken."""
    if (problem := cuda_problem()) is not None and _is_nvidia():
        _warn(problem)


def _is_nvidia() -> bool:
    return "rocm" not in str(getattr(jax.devices()[0].client, "platform_version", ""))


@functools.cache
def _warn(problem: str) -> None:
    warnings.warn(PerformanceWarning(f"slower implementations serve without the CUDA kernels: {problem}"), stacklevel=2)


def cuda_target(op: str, target: str) -> str:
    """The name of an FFI target of the CUDA library, registered with XLA.

    Args:
        op: as its handlers in csrc/ name it.
        target: such as "dsv4_attend".

    Raises:
        ImplementationError: `cuda_problem(op)`, or the library has no such handler.
    """
    if problem := cuda_problem(op):
        raise ImplementationError(f"{op}: {problem}")
    return _register("CUDA", load_cuda(), target)


def cpu_problem() -> str | None:
    """Says why the CPU twins cannot be used; None if they can."""
    try:
        load_cpu()
    except ImplementationError as error:
        return str(error)
    return None


def cpu_target(target: str) -> str:
    """The name of an FFI target of the CPU twins, registered with XLA. Raises as `load_cpu`."""
    return _register("cpu", load_cpu(), target)
