"""What the CUDA library is built for: CMake's choice, and what is said of a device that has no code in it."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import numpy as np
import pytest
import rich.console

from dsv4_jax import ffi
from dsv4_jax.cli import doctor
from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import kv_format
from dsv4_jax.ops import registry
from dsv4_jax.ops.append import AppendArguments
from dsv4_jax.ops.top_k import TopKArguments
from dsv4_jax.tiers import record_copy

from ..native import fake_cuda

ROWS = AppendArguments(np.zeros((1, 512), np.float32), kv_format("fp8", 512, 64))
SCORES = TopKArguments(np.zeros((1, 4), np.float32), np.ones(1, np.int32), 1)
CSRC = pathlib.Path(__file__).parents[2] / "csrc"


def choose(tmp_path: pathlib.Path, asked: str, supported: str) -> subprocess.CompletedProcess:
    script = tmp_path / "choose.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        f'include({CSRC / "architectures.cmake"})\ndsv4_architectures("{asked}" "{supported}" a)\n'
        'message("${a_PORTABLE}|${a_CLUSTER}|${a_HOPPER}")\n'
    )
    return subprocess.run(["cmake", "-P", script], capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
class TestCMake:
    @pytest.mark.parametrize(
        ("asked", "supported", "groups"),
        [
            ("80;90;120", "75;80;86;90;100;120", "80-real;90-real;120-real|90-real;120-real|90a-real"),
            ("80;90;100;120", "75;80;86;90", "80-real;90-real|90-real|90a-real"),
            ("80;89", "80;89;90", "80-real;89-real||"),
            ("90;90", "80;90", "90-real|90-real|90a-real"),
        ],
    )
    def test_every_source_for_all_that_can_run_it(self, tmp_path, asked: str, supported: str, groups: str) -> None:
        run = choose(tmp_path, asked, supported)
        assert run.returncode == 0, run.stderr
        assert run.stderr.strip().splitlines()[-1] == groups
        left_out = set(asked.split(";")) - set(supported.split(";"))
        assert {arch for arch in asked.split(";") if f"{arch}: left out" in run.stdout} == left_out

    @pytest.mark.parametrize(
        ("asked", "problem"),
        [("70;90", "8.0 or more"), ("90a", "no compute capability"), ("120", "none of the compute")],
    )
    def test_impossible_requests(self, tmp_path, asked: str, problem: str) -> None:
        run = choose(tmp_path, asked, "75;80;90")
        assert run.returncode != 0
        assert problem in " ".join(run.stderr.split())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    """A library that says it has swap for 8.0, 9.0 and 10.0, attend and append for 9.0, and no other kernel."""
    built = {"dsv4_swap_out": "swap 800, 900, 1000", "dsv4_attend": "attend 900", "dsv4_append": "append 900"}
    monkeypatch.setenv("DSV4_JAX_CUDA_LIBRARY", str(fake_cuda(tmp_path / "libfake.so", built)))
    monkeypatch.setattr(ffi, "_register", lambda platform, library, target: target)  # it has no handlers
    ffi.load_cuda.cache_clear()
    yield
    ffi.load_cuda.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    monkeypatch.setattr(ffi, "_capabilities", lambda: {capability})
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")


def picked(op: str, arguments) -> str:
    return registry.pick(op, arguments).name


def test_knows_what_is_there(library) -> None:
    assert ffi.built_for("swap") == ("8.0", "9.0", "10.0")
    assert ffi.built_for("top_k") == ()
    assert ffi.cuda_problem() is None
    assert "has no top_k kernel" in (ffi.cuda_problem("top_k") or "")


def test_code_runs_within_its_generation(library, monkeypatch) -> None:
    for capability, usable in (
        ("8.0", True),
        ("8.9", True),
        ("9.0", True),
        ("10.3", True),
        ("7.5", False),
        ("12.0", False),
    ):
        on(monkeypatch, capability)
        problem = ffi.cuda_problem("swap")
        assert (problem is None) is usable, capability
        if problem:
            assert f"compute capability {capability}," in problem and "8.0, 9.0, 10.0" in problem
    on(monkeypatch, "8.0")
    assert ffi.cuda_target("swap", "dsv4_swap_out") == "dsv4_swap_out"
    with pytest.raises(ImplementationError, match=r"8\.0, the attend kernel .* built for 9\.0"):
        ffi.cuda_target("attend", "dsv4_attend")


def test_without_code_another_implementation_serves(library, monkeypatch) -> None:
    on(monkeypatch, "12.0")
    assert record_copy.choose_implementation(None) == "xla"
    with pytest.raises(ImplementationError, match=r"capability 12\.0"):
        record_copy.choose_implementation("ffi")
    assert picked("append", ROWS) == picked("top_k", SCORES) == "pallas"
    on(monkeypatch, "9.0")
    assert record_copy.choose_implementation(None) == "ffi"
    assert picked("append", ROWS) == "cuda"
    assert picked("top_k", SCORES) == "pallas"  # this library was built without it


def test_doctor_names_the_capabilities(library, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ffi, "_capabilities", lambda: {"8.0"})
    report = doctor.examine()
    assert report["cuda_code"]["swap"] == {"capabilities": ("8.0", "9.0", "10.0"), "problem": None}
    assert "compute capability 8.0, the attend kernel" in report["cuda_code"]["attend"]["problem"]
    rich.console.Console(width=200).print(doctor._table(report))
    printed = capsys.readouterr().out
    assert "code for compute capability 9.0: append, attend " in printed
    assert "code for compute capability 8.0, 9.0, 10.0: swap " in printed
    assert "no code: compress, queries, gather, index_scores, top_k, " in printed


def test_a_kernel_on_another_backend_is_refused_before_it_is_traced(library) -> None:
    assert ffi.code_problem("swap") is None
    with pytest.raises(ImplementationError, match="swap: the backend is cpu, and CUDA kernels need a GPU"):
        ffi.cuda_target("swap", "dsv4_swap_out")
    with pytest.raises(ImplementationError, match="append: implementation 'cuda' cannot run: the backend is cpu"):
        registry.pick("append", ROWS, "cuda")
