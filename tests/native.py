"""Native libraries for tests: the CPU library that `make build` left, or compiled for this process; and small fakes."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import tempfile

import jax

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
        subprocess.run([*command, "-o", str(built), *map(str, (ROOT / "csrc").glob("*.cc"))], check=True)
    os.environ["DSV4_JAX_CPU_LIBRARY"] = str(built)
    ffi.load_cpu()


_FOLDERS: list[tempfile.TemporaryDirectory] = []


def fake_cuda(path: pathlib.Path, source: str = "", *, digest: str | None = None, version: int = 12080) -> pathlib.Path:
    """A library at `path` that says it was built from these sources (or `digest`), with what `source` (C) adds."""
    digest = libraries.source_digest("CUDA") if digest is None else digest
    source += f'const char* dsv4_source_digest(void) {{ return "{digest}"; }}\n'
    source += f"int dsv4_cuda_version(void) {{ return {version}; }}\n"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=source, text=True, check=True)
    return path
