"""Where the two native libraries are, and how they are opened. Imports no jax: `ffi` registers what XLA calls of them.

Both are optional, built from `csrc/`, and have no Python ABI (ctypes loads them). Each is looked for at

1. the path in the environment variable `DSV4_JAX_CUDA_LIBRARY` or `DSV4_JAX_CPU_LIBRARY`,
2. `built_folder()`, where `dsv4-jax build` puts it: for an installed package a folder of the user's cache,
3. `dsv4_jax/native/`, where a wheel brings it; for a source checkout 2 and 3 are the same.

A library says from which sources it was built (`csrc/common/library.cc`). One built from others than this package's is
refused before anything in it is called.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
from typing import Literal

from .errors import ImplementationError

__all__ = [
    "MIN_DRIVERS",
    "Platform",
    "built_folder",
    "cpu_path",
    "cuda_path",
    "driver_cuda",
    "file_name",
    "in_checkout",
    "library_cuda",
    "open_cpu",
    "open_cuda",
    "open_library",
    "source_digest",
    "sources",
    "spelled",
]

Platform = Literal["CPU", "CUDA"]
_PACKAGE = pathlib.Path(__file__).parent
# Suffixes of what each is built from, as csrc/CMakeLists.txt has them.
_SUFFIXES = {"CPU": (".cc", ".h"), "CUDA": (".cu", ".cuh", ".h")}
# The least NVIDIA driver that runs what a CUDA toolkit of this major version built (NVIDIA's minor version
# compatibility); the library holds machine code and its own runtime, so nothing else of the toolkit matters.
MIN_DRIVERS = {12: "525", 13: "580"}


def in_checkout() -> bool:
    """Whether this is the package of a source checkout, installed or not, and not a copy that pip made."""
    return not (_PACKAGE / "csrc").is_dir()


def sources() -> pathlib.Path:
    """Returns the folder `csrc/` of this package: inside it where pip installed it, beside it in a source checkout."""
    return _PACKAGE.parent / "csrc" if in_checkout() else _PACKAGE / "csrc"


@functools.cache
def source_digest(platform: Platform) -> str:
    """Of the sources of a library, as csrc/source_digest.cmake makes it. 64 hexadecimal digits."""
    files = [path for path in sources().rglob("*") if path.suffix in _SUFFIXES[platform]]
    lines = sorted(
        f"{path.relative_to(sources()).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def built_folder(platform: Platform) -> pathlib.Path:
    """Returns where `dsv4-jax build` puts a library: `dsv4_jax/native/` of a checkout, else `$XDG_CACHE_HOME` or
    `~/.cache`.

    There in `dsv4_jax/<digest of its sources>`, so that versions of the package do not meet.
    """
    if in_checkout():
        return _PACKAGE / "native"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    root = pathlib.Path(cache) if os.path.isabs(cache) else pathlib.Path.home() / ".cache"
    return root / "dsv4_jax" / source_digest(platform)[:16]


def file_name(platform: Platform) -> str:
    return f"libdsv4_{platform.lower()}.so"


def cuda_path() -> pathlib.Path:
    """Says where the CUDA library is, or should be."""
    return _path("CUDA")


def cpu_path() -> pathlib.Path:
    """Says where the CPU library is, or should be."""
    return _path("CPU")


def _path(platform: Platform) -> pathlib.Path:
    if named := os.environ.get(f"DSV4_JAX_{platform}_LIBRARY"):
        return pathlib.Path(named)
    built, packaged = (folder / file_name(platform) for folder in (built_folder(platform), _PACKAGE / "native"))
    return packaged if packaged.is_file() and not built.is_file() else built


def open_cuda() -> ctypes.CDLL:
    """Opens the library of CUDA kernels.

    Raises:
        ImplementationError: they are not built, do not load, were built from other sources, or need a newer driver than
            this machine's.
    """
    path = cuda_path()
    library = open_library("CUDA", path)
    needed, driver = library.dsv4_cuda_version(), driver_cuda()
    if driver is not None and driver // 1000 < needed // 1000:
        raise ImplementationError(
            f"the CUDA library {path} was built with CUDA {spelled(needed)} and needs a driver of "
            f"{MIN_DRIVERS.get(needed // 1000, 'a later generation')} or later; this machine's runs CUDA "
            f"{spelled(driver)} at most: `dsv4-jax build` with a toolkit of CUDA {driver // 1000}, or a newer driver"
        )
    return library


def open_cpu() -> ctypes.CDLL:
    """Opens the library of CPU twins and of the checksum.

    Raises:
        ImplementationError: they are not built, do not load, or were built from other sources.
    """
    return open_library("CPU", cpu_path())


def open_library(platform: Platform, path: pathlib.Path) -> ctypes.CDLL:
    """Returns the library of this kind in a file, built from this package's sources. Raises as `open_cpu`."""
    build = "`make build` or `dsv4-jax build`" if in_checkout() else "`dsv4-jax build`"
    if not path.is_file():
        raise ImplementationError(
            f"no {platform} library at {path}: {build} makes it, or set DSV4_JAX_{platform}_LIBRARY (docs/install.md)"
        )
    try:
        library = ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        raise ImplementationError(f"the {platform} library {path} does not load: {error}") from error
    if _digest_in(library) != source_digest(platform):
        raise ImplementationError(
            f"the {platform} library {path} was built from other sources than this package's: {build} makes it anew"
        )
    return library


def _digest_in(library: ctypes.CDLL) -> str | None:
    try:
        digest = library.dsv4_source_digest
    except AttributeError:
        return None
    digest.restype = ctypes.c_char_p
    return digest().decode("ascii", "replace")


# Versions of CUDA are integers as NVIDIA writes them: 13020 is 13.2.


def spelled(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def library_cuda() -> str | None:
    """The toolkit the CUDA library was built with ("13.0"), also where the driver is too old; None: no library."""
    try:
        return spelled(open_library("CUDA", cuda_path()).dsv4_cuda_version())
    except ImplementationError:
        return None


def driver_cuda() -> int | None:
    """The newest CUDA that this machine's driver runs (12080: 12.8); None: no driver. Starts nothing on a device."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed or version.value <= 0 else version.value
