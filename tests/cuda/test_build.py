"""csrc/ compiles without spills or serialised wgmma, and every handler the package names is in the library."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from dsv4_jax import libraries
from dsv4_jax.errors import ImplementationError

ROOT = pathlib.Path(__file__).parents[2]


def built(tmp_path: pathlib.Path) -> tuple[pathlib.Path, str]:
    """The library and the assembler's reports: those of `make build`, if it was built from these sources."""
    folder = ROOT / "build"
    try:
        libraries.open_library("CUDA", folder / "libdsv4_cuda.so")
        reports = reports_in(folder)
    except ImplementationError:
        reports = {}
    if not reports:
        folder = tmp_path / "build"
        options = [
            f"-DPYTHON={sys.executable}",
            "-DDSV4_CUDA=ON",
            "-DDSV4_CUDA_ARCHITECTURES=90",
            "-DDSV4_PTXAS_REPORT=ON",
        ]
        subprocess.run(["cmake", "-S", ROOT / "csrc", "-B", folder, *options], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", folder, "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
        reports = reports_in(folder)
    csrc = ROOT / "csrc"
    assert set(reports) == {path.relative_to(csrc).as_posix() for path in csrc.rglob("*.cu")}
    return folder / "libdsv4_cuda.so", "".join(reports.values())


def reports_in(folder: pathlib.Path) -> dict[str, str]:
    """Source -> what nvcc said of it; its object is linked into the library beside."""
    logs = folder.rglob("*.cu.o.log")
    return {f"{path.parent.name}/{path.name.removesuffix('.o.log')}": path.read_text() for path in logs}


# Bytes a kernel may spill: measured, it is faster for what the registers are used for instead (docs/kernels.md).
SPILLS = {
    "top_k_rows_kernel": 152,  # three rows on an SM
    "index_scores_kernel": 32,  # eight tokens share their keys
    "attend_rows_kernel": 48,  # queries of a warpgroup stay in registers
    "attend_wide_kernel": 16,  # a warpgroup's logits of its share of a run
    "hyper_connection_kernel": 20,  # of float32 streams, addresses of a cluster's next eight tokens
    "dense_fp8_many_kernel": 160,  # sums of parts of K while the next part is multiplied
    "kv_store_kernel": 32,  # two thousand columns of a row under way at a time, five blocks an SM
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None or shutil.which("cmake") is None, reason="no nvcc, or no cmake")
def test_builds_and_registers(tmp_path: pathlib.Path) -> None:
    library, log = built(tmp_path)
    spills = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL)
    assert len(spills) > 3
    for name, n in spills:
        kernel = re.match(r"_ZN4dsv4\d+(\w*?kernel)", name)
        assert int(n) <= (SPILLS.get(kernel[1], 0) if kernel else 0), name
    assert "serialized" not in log  # the compiler's word for wgmma it could not run asynchronously
    # A process of its own: a target can be registered once.
    code = "from dsv4_jax import ffi; print(ffi.cuda_problem())"
    env = os.environ | {"DSV4_JAX_CUDA_LIBRARY": str(library), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env, cwd=ROOT)
    assert run.stdout.strip() == "None"
