"""csrc/ compiles without spills or serialised wgmma, and every handler the package names is in the library."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def built(tmp_path: pathlib.Path) -> tuple[pathlib.Path, str]:
    """The library and the assembler's report: those `make build` left, if they are newer than the sources."""
    library, log = ROOT / "build" / "libdsv4_cuda.so", ROOT / "build" / "ptxas.log"
    newest = max(path.stat().st_mtime for path in (ROOT / "csrc").iterdir())
    if library.is_file() and log.is_file() and min(library.stat().st_mtime, log.stat().st_mtime) > newest:
        return library, log.read_text()
    library = tmp_path / "libdsv4_cuda.so"
    command = [
        "nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC",
        "-cudart", "static", "-isystem", jax.ffi.include_dir(), "-Xptxas", "-v", "--threads", "0", "-o", str(library),
        *map(str, sorted((ROOT / "csrc").glob("*.cu"))),
    ]  # fmt: skip
    return library, subprocess.run(command, check=True, capture_output=True, text=True).stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_builds_and_registers(tmp_path: pathlib.Path) -> None:
    library, log = built(tmp_path)
    spills = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL)
    assert len(spills) > 3
    assert {name: int(n) for name, n in spills if int(n) > 0} == {}
    assert "serialized" not in log  # the compiler's word for wgmma it could not run asynchronously
    # A process of its own: a target can be registered once.
    code = "from dsv4_jax import ffi; print(ffi.cuda_problem())"
    env = os.environ | {"DSV4_JAX_CUDA_LIBRARY": str(library), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert run.stdout.strip() == "None"
