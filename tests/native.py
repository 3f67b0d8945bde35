"""Native libraries for tests: the CPU library that `make build` left, or compiled for this process; and small fakes."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import jax
import pytest

from dsv4_jax import ffi, libraries
from dsv4_jax.errors import ImplementationError

ROOT = pathlib.Path(__file__).parents[1]


@functools.cache
def load_cpu() -> None:
    """Loads the CPU library, built from these sources."""
    built = libraries.cpu_path()
    try:
        libraries.open_library("CPU", built)
    except ImplementationError:
        folder = tempfile.TemporaryDirectory(prefix="dsv4-cpu-")  # gone with the cache of this function
        _FOLDERS.append(folder)
        built = pathlib.Path(folder.name) / "libdsv4_cpu.so"
        header = built.with_name("dsv4_source_digest.h")
        header.write_text(f'#define DSV4_SOURCE_DIGEST "{libraries.source_digest("CPU")}"\n')
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir(), "-I", folder.name]
        sources = map(str, (ROOT / "csrc").rglob("*.cc"))
        subprocess.run([*command, "-I", str(ROOT / "csrc"), "-o", str(built), *sources], check=True)
    os.environ["DSV4_JAX_CPU_LIBRARY"] = str(built)
    ffi.load_cpu()


_FOLDERS: list[tempfile.TemporaryDirectory] = []


def fake_cuda(
    path: pathlib.Path, built: Mapping[str, str] | None = None, *, digest: str | None = None, version: int = 12080
) -> pathlib.Path:
    """A library at `path` that says it was built from these sources (or `digest`).

    It has handlers that cannot be called. `built`: target -> op and architectures, such as "swap 800, 900".
    """
    digest = libraries.source_digest("CUDA") if digest is None else digest
    source = "typedef struct H { const char *op, *target; void* call; const int* built; const struct H* next; } H;\n"
    last = "0"
    for target, entry in (built or {}).items():
        op, _, codes = entry.partition(" ")
        source += f"int {target}_built[] = {{{codes}, 0}};\n"
        source += f'H {target} = {{"{op}", "{target}", {target}_built, {target}_built, {last}}};\n'
        last = f"&{target}"
    source += f"const H* dsv4_handlers(void) {{ return {last}; }}\n"
    source += f'const char* dsv4_source_digest(void) {{ return "{digest}"; }}\n'
    source += f"int dsv4_cuda_version(void) {{ return {version}; }}\n"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=source, text=True, check=True)
    return path


def run_sanitized(*tests: str, options: tuple[str, ...] = (), **variables: str) -> None:
    """Runs tests (arguments of pytest, from the repository's root) in a process of their own under CUDA's memcheck.

    Fails unless they pass and it found nothing; skips where there is no compute-sanitizer.
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    # The tool follows child processes unless it is told not to; it crashed or hung over XLA's assembler in one run of
    # four.
    command = [sanitizer, "--target-processes", "application-only", "--error-exitcode", "9", *options]
    command += [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark", *tests]
    # Also where this process is a worker of pytest-xdist: plugins warn of workers, and warnings fail.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    run = subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=300)
    found = "\n".join(line for line in run.stdout.splitlines() if "Host Frame" not in line)
    assert run.returncode == 0 and "ERROR SUMMARY: 0 errors" in found, found[-4000:] + run.stderr[-2000:]
