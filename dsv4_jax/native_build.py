"""Compiles the native libraries where the package is: what `dsv4-jax build` does. Imports no jax.

CMake and nvcc are those of the system or of pip (`nvidia-cuda-nvcc` and `nvidia-cuda-cccl` make a whole CUDA 13
compiler), a C++ compiler is the system's. A library replaces the one before when it is done and opens.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from . import libraries
from .errors import ImplementationError

__all__ = ["Compiler", "build", "choose_nvcc", "find_nvccs"]

# Told of progress: steps done, steps in all, what was done last.
Report = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True)
class Compiler:
    """An nvcc and the CUDA version it compiles for, as NVIDIA writes them: 12080 is 12.8."""

    path: pathlib.Path
    version: int


def find_nvccs() -> list[Compiler]:
    """Every nvcc there is, each once: `$CUDACXX`, PATH, `$CUDA_HOME`, /usr/local/cuda*, then those pip installed."""
    found: dict[pathlib.Path, Compiler] = {}
    for path in _nvcc_paths():
        if path and os.access(path, os.X_OK) and (real := pathlib.Path(path).resolve()) not in found:
            try:
                found[real] = _compiler(pathlib.Path(path))
            except ImplementationError:
                continue  # not for this machine; another may be
    return list(found.values())


def _nvcc_paths() -> Iterator[str | None]:
    yield os.environ.get("CUDACXX")
    yield shutil.which("nvcc")
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        yield f"{root}/bin/nvcc" if root else None
    yield from sorted(glob.glob("/usr/local/cuda-*/bin/nvcc"))
    packages = importlib.util.find_spec("nvidia")  # the folder that NVIDIA's packages share
    for root in (packages.submodule_search_locations if packages else None) or ():
        yield from sorted(glob.glob(f"{root}/cu*/bin/nvcc"), reverse=True)


def _compiler(path: pathlib.Path) -> Compiler:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImplementationError(f"{path} does not run: {error}") from error
    if not (found := re.search(r"release (\d+)\.(\d+)", said)):
        raise ImplementationError(f"{path} is no nvcc: it does not say its release")
    return Compiler(path, int(found[1]) * 1000 + int(found[2]) * 10)


def choose_nvcc(named: str | os.PathLike[str] | None = None) -> Compiler:
    """The named nvcc, or the first of `find_nvccs` whose code this machine's driver runs (no driver: the first).

    Raises:
        ImplementationError: there is none, or the driver is too old for what it makes.
    """
    compilers = [_compiler(pathlib.Path(named))] if named is not None else find_nvccs()
    if not compilers:
        raise ImplementationError(
            "there is no nvcc: install a CUDA toolkit, or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`"
            " (docs/install.md)"
        )
    driver = libraries.driver_cuda()
    fit = [c for c in compilers if driver is None or c.version // 1000 <= driver // 1000]
    if driver is not None and not fit:
        generation = compilers[0].version // 1000
        raise ImplementationError(
            f"{compilers[0].path} is of CUDA {libraries.spelled(compilers[0].version)}, whose code needs a driver of "
            f"{libraries.MIN_DRIVERS.get(generation, 'a later generation')} or later; this machine's runs CUDA "
            f"{libraries.spelled(driver)} at most: install a toolkit of CUDA {driver // 1000}, or a newer driver"
        )
    return fit[0]


def build(
    nvcc: Compiler | None, *, architectures: Sequence[int] = (), jobs: int | None = None, report: Report | None = None
) -> list[pathlib.Path]:
    """Compiles the CPU library and, with an nvcc, the CUDA library, and returns where they are now.

    Args:
        nvcc: None: no CUDA library.
        architectures: compute capabilities for the CUDA code, 90 for 9.0; empty: all there is code for and nvcc knows.
        jobs: compilers at a time; None: one per CPU that this process may use.

    Raises:
        ImplementationError: a tool is missing, or one failed; then its output is kept in a file that the message names.
    """
    cmake, ninja = _tool("cmake"), _tool("ninja")
    if cmake is None:
        raise ImplementationError("there is no cmake: install it, or `pip install cmake`")
    if not (libraries.sources() / "CMakeLists.txt").is_file():
        raise ImplementationError(
            f"the sources are not at {libraries.sources()}: the package was installed without them"
        )
    target = libraries.built_folder("CUDA" if nvcc else "CPU")
    try:
        target.mkdir(parents=True, exist_ok=True)
        work = pathlib.Path(tempfile.mkdtemp(prefix=".build-", dir=target))
    except OSError as error:
        raise ImplementationError(f"cannot write to {target}: {error}") from error
    log = work / "build.log"
    configure = [
        cmake, "-S", str(libraries.sources()), "-B", str(work / "objects"), *(["-G", "Ninja"] if ninja else []),
        f"-DPYTHON={sys.executable}", "-DDSV4_DESTINATION=.", f"-DDSV4_CUDA={'ON' if nvcc else 'OFF'}",
        *([f"-DCMAKE_CUDA_COMPILER={nvcc.path}"] if nvcc else []),
        *([f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
        *(["-DDSV4_CUDA_ARCHITECTURES=" + ";".join(map(str, architectures))] if architectures else []),
    ]  # fmt: skip
    parallel = str(jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    try:
        _run(configure, log, None)
        _run([cmake, "--build", str(work / "objects"), "--parallel", parallel], log, report)
        install = ["--prefix", str(work / "done"), "--component", "libraries", "--strip"]
        _run([cmake, "--install", str(work / "objects"), *install], log, None)
        made = [_place("CPU", work / "done"), *([_place("CUDA", work / "done")] if nvcc else [])]
        (target / "build.log").unlink(missing_ok=True)  # of a failure before
    except ImplementationError as error:
        kept = target / "build.log"
        os.replace(log, kept)
        raise ImplementationError(f"{error} (all of the output is in {kept})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def _tool(name: str) -> str | None:
    """On PATH or beside this Python, where pip puts what it installs and which need not be on PATH."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def _run(command: list[str], log: pathlib.Path, report: Report | None) -> None:
    problem = ""
    # A group of its own: Ctrl-C must end the compilers that the build system started, too.
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        print("$", *command, file=file)
        try:
            for line in process.stdout or ():
                file.write(line)
                if not problem and re.search(r"\berror\b", line, re.IGNORECASE):
                    problem = f": {line.strip()}"
                if report and (step := re.match(r"\[\s*([1-9]\d*)(?:/(\d+)|%)\]\s*(.*)", line)):
                    report(int(step[1]), int(step[2] or 100), _short(step[3]))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise ImplementationError(f"{pathlib.Path(command[0]).name} failed{problem}")


def _short(step: str) -> str:
    """What a build system says of a step, in a word or two: the source or the library."""
    name = step.split()[-1].rpartition("/")[2] if step else ""
    return name.removesuffix(".o")


def _place(platform: libraries.Platform, folder: pathlib.Path) -> pathlib.Path:
    """A library that opens, from where it was built to where it is looked for, at once."""
    new = folder / libraries.file_name(platform)
    libraries.open_library(platform, new)
    target = libraries.built_folder(platform) / new.name
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(new, target)
    return target
