"""Where native libraries are looked for, which are refused before anything is called, and how they are built."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from dsv4_jax import ffi, libraries, native_build
from dsv4_jax.cli import main, printing
from dsv4_jax.errors import ImplementationError

from .native import ROOT, fake_cuda


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of the package as pip installs it: with its sources, no libraries, and an empty cache beside it."""
    package = tmp_path / "site" / "dsv4_jax"
    shutil.copytree(ROOT / "csrc", package / "csrc")
    (package / "native").mkdir()
    monkeypatch.setattr(libraries, "_PACKAGE", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for platform in ("CPU", "CUDA"):
        monkeypatch.delenv(f"DSV4_JAX_{platform}_LIBRARY", raising=False)
    return package


class TestPlaces:
    def test_a_checkout_has_one_folder(self, monkeypatch) -> None:
        monkeypatch.delenv("DSV4_JAX_CUDA_LIBRARY", raising=False)
        assert libraries.in_checkout() and libraries.sources() == ROOT / "csrc"
        assert libraries.cuda_path() == ROOT / "dsv4_jax" / "native" / "libdsv4_cuda.so"
        assert libraries.built_folder("CPU") == ROOT / "dsv4_jax" / "native"

    def test_an_installed_package_has_its_own_and_the_cache(self, installed, monkeypatch, tmp_path) -> None:
        built = tmp_path / "cache" / "dsv4_jax" / libraries.source_digest("CUDA")[:16] / "libdsv4_cuda.so"
        packaged = installed / "native" / "libdsv4_cuda.so"
        assert libraries.cuda_path() == built  # neither is there: where `dsv4-jax build` would put it
        packaged.touch()
        assert libraries.cuda_path() == packaged
        built.parent.mkdir(parents=True)
        built.touch()
        assert libraries.cuda_path() == built  # made for this machine
        monkeypatch.setenv("DSV4_JAX_CUDA_LIBRARY", "elsewhere.so")
        assert libraries.cuda_path() == pathlib.Path("elsewhere.so")

    @pytest.mark.parametrize("cache", ["", "relative/path"])
    def test_what_is_no_cache_folder_is_passed_over(self, installed, monkeypatch, tmp_path, cache: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert libraries.built_folder("CPU").parent == tmp_path / ".cache" / "dsv4_jax"


class TestRefusals:
    def test_none(self, tmp_path) -> None:
        with pytest.raises(ImplementationError, match=r"no CUDA library at .*none\.so: .*`dsv4-jax build`"):
            libraries.open_library("CUDA", tmp_path / "none.so")

    @pytest.mark.parametrize("digest", ["", "0" * 64])
    def test_of_other_sources(self, monkeypatch, tmp_path, digest: str) -> None:
        path = fake_cuda(tmp_path / "libother.so", digest=digest)
        monkeypatch.setenv("DSV4_JAX_CUDA_LIBRARY", str(path))
        with pytest.raises(ImplementationError, match=r"built from other sources than this package's: .*makes it anew"):
            libraries.open_cuda()
        assert libraries.library_cuda() is None

    def test_of_something_else(self, tmp_path) -> None:
        path = tmp_path / "libempty.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", path, "/dev/null"], check=True)
        with pytest.raises(ImplementationError, match="built from other sources"):
            libraries.open_library("CPU", path)

    @pytest.mark.parametrize(
        ("built", "driver", "fine"),
        [(13000, 12080, False), (13000, 13000, True), (13050, 13000, True), (12080, 13000, True), (13000, None, True)],
    )
    def test_for_a_newer_driver(
        self, monkeypatch, tmp_path, capsys, built: int, driver: int | None, fine: bool
    ) -> None:
        monkeypatch.setattr(libraries, "driver_cuda", lambda: driver)
        monkeypatch.setenv("DSV4_JAX_CUDA_LIBRARY", str(fake_cuda(tmp_path / "libfake.so", version=built)))
        if fine:
            assert libraries.open_cuda().dsv4_cuda_version() == built
        else:
            with pytest.raises(
                ImplementationError, match=r"CUDA 13\.0 and needs a driver of 580 or later; .* CUDA 12\.8"
            ):
                libraries.open_cuda()
        assert libraries.library_cuda() == libraries.spelled(built)

    def test_the_driver_is_asked_without_a_device(self) -> None:
        assert libraries.driver_cuda() is None or libraries.driver_cuda() >= 12000


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_cmake_and_python_agree_on_the_sources(tmp_path) -> None:
    script = tmp_path / "digest.cmake"
    script.write_text(
        f"include({ROOT / 'csrc' / 'source_digest.cmake'})\n"
        'dsv4_source_digest(digest ${SUFFIXES})\nmessage("${digest}")\n'
    )
    for platform, suffixes in (("CPU", (".cc", ".h")), ("CUDA", (".cu", ".cuh", ".h"))):
        run = subprocess.run(
            ["cmake", f"-DSUFFIXES={';'.join(suffixes)}", "-P", script], capture_output=True, text=True
        )
        assert run.stderr.strip() == libraries.source_digest(platform)


def fake_nvcc(folder: pathlib.Path, release: str) -> pathlib.Path:
    folder.mkdir(parents=True)
    path = folder / "nvcc"
    path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.1"\n')
    path.chmod(0o755)
    return path


class TestBuild:
    def test_the_first_nvcc_that_the_driver_allows(self, monkeypatch, tmp_path) -> None:
        new, old = fake_nvcc(tmp_path / "new" / "bin", "13.1"), fake_nvcc(tmp_path / "old" / "bin", "12.8")
        monkeypatch.setattr(native_build, "_nvcc_paths", lambda: iter([None, str(new), str(new), str(old), "/nowhere"]))
        assert [(c.path, c.version) for c in native_build.find_nvccs()] == [(new, 13010), (old, 12080)]
        for driver, chosen in ((None, new), (13000, new), (12040, old)):
            monkeypatch.setattr(libraries, "driver_cuda", lambda driver=driver: driver)
            assert native_build.choose_nvcc().path == chosen
        with pytest.raises(
            ImplementationError, match=r"CUDA 13\.1, whose code needs a driver of 580 .* CUDA 12\.4 at most"
        ):
            native_build.choose_nvcc(new)

    def test_pip_brings_one(self, monkeypatch, tmp_path) -> None:
        nvcc = fake_nvcc(tmp_path / "nvidia" / "cu13" / "bin", "13.5")
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delitem(sys.modules, "nvidia", raising=False)
        assert nvcc in [c.path for c in native_build.find_nvccs()]

    def test_bad_input_is_one_line(self, monkeypatch, capsys, tmp_path) -> None:
        monkeypatch.setattr(native_build, "_nvcc_paths", lambda: iter([]))
        for argv, status, said in (
            ([], 1, "there is no nvcc: "),
            (["--nvcc", str(tmp_path / "nvcc")], 2, "nvcc does not run"),
            (["--nvcc", "/bin/true"], 2, "--nvcc: /bin/true is no nvcc"),
            (["--nvcc", "/bin/true", "--cpu-only"], 2, "--cpu-only: excludes --nvcc"),
        ):
            assert main(["build", *argv]) == status
            out, err = capsys.readouterr()
            assert out == "" and said in err and err.count("\n") == 1
        with pytest.raises(SystemExit) as exit_:
            main(["build", "--architectures", "80,9.0"])
        assert exit_.value.code == 2 and "'9.0' is no compute capability" in capsys.readouterr().err

    def test_without_cmake(self, monkeypatch, capsys) -> None:
        monkeypatch.setattr(native_build, "_tool", lambda name: None)
        assert main(["build", "--cpu-only"]) == 1
        assert "there is no cmake" in capsys.readouterr().err

    @pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
    @pytest.mark.slow
    def test_a_failure_keeps_the_output_and_nothing_else(self, installed, capsys) -> None:
        (installed / "csrc" / "swap" / "checksum.cc").write_text("#error nonsense\n")
        libraries.source_digest.cache_clear()
        assert main(["build", "--cpu-only"]) == 1
        err = capsys.readouterr().err.splitlines()[-1]
        folder = libraries.built_folder("CPU")
        libraries.source_digest.cache_clear()
        assert "cmake failed" in err and "nonsense" in err and str(folder / "build.log") in err
        assert os.listdir(folder) == ["build.log"]

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
    def test_an_installed_package_builds_into_the_cache(self, installed, capsys, tmp_path, monkeypatch) -> None:
        for name in ("_FIRST_LINE", "_LINES_EVERY"):
            monkeypatch.setattr(printing, name, 0.02)
        assert main(["build", "--cpu-only", "--jobs", "2", "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) == {"libraries": [str(libraries.cpu_path())], "cuda": None, "least_driver": None}
        assert libraries.cpu_path().is_relative_to(tmp_path / "cache")
        assert re.search(r"^build, \w+\.(cc|so): \d of \d, \d+ s$", err, re.M)  # a log shows where it is
        assert "dsv4_swap_out" in ffi.handlers(libraries.open_cpu())
        assert os.listdir(libraries.cpu_path().parent) == ["libdsv4_cpu.so"]
