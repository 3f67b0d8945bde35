"""The CPU library for tests: what `make build` left, or compiled for this process."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import tempfile

import jax

from dsv4_jax import ffi

ROOT = pathlib.Path(__file__).parents[1]


@functools.cache
def load_cpu() -> None:
    """Loads the CPU library; it is newer than its sources."""
    sources = [ROOT / "csrc" / name for name in ("checksum.cc", "swap.cc", "swap.h")]
    built = ROOT / "build" / "libdsv4_cpu.so"
    if not built.is_file() or built.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        folder = tempfile.TemporaryDirectory(prefix="dsv4-cpu-")  # gone with the cache of this function
        _FOLDERS.append(folder)
        built = pathlib.Path(folder.name) / "libdsv4_cpu.so"
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir(), "-o", str(built)]
        subprocess.run([*command, *(str(path) for path in sources if path.suffix == ".cc")], check=True)
    os.environ["DSV4_JAX_CPU_LIBRARY"] = str(built)
    ffi.load_cpu()


_FOLDERS: list[tempfile.TemporaryDirectory] = []
