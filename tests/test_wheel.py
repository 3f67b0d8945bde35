"""The wheel, of what `make build` compiled: outside this tree it runs, finds its libraries, and builds more."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import numpy as np
import pytest

from .native import ROOT

pytestmark = pytest.mark.slow
STEP = """
import jax
import dsv4_jax as dsv4

cfg = dsv4.DSV4Config.tiny(layer_types=(dsv4.config.AttentionType.HCA,))
layout = dsv4.CacheLayout(cfg, kv_format="fp8", index_format="fp4")
size = dsv4.plan_capacity(layout, max_requests=1, max_context=128)
manager, cache = dsv4.KVCacheManager(layout, size), dsv4.init_cache(layout, size)
manager.admit_request([72, 105])
plan = manager.plan_step(manager.schedule(token_budget=16))
step = jax.jit(dsv4.model.prefill, donate_argnames="cache")
logits, cache = step(dsv4.model.init_params(cfg), cache, plan.pack(), manager.plan_tokens(plan))
print(dsv4.__file__, logits.shape == (1, cfg.vocab_size), bool(jax.numpy.isfinite(logits).all()))
"""


def run(*command, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def from_cache(name: str) -> str | None:
    """A variable of the CMake cache that `make build` left in build/."""
    cache = ROOT / "build" / "CMakeCache.txt"
    found = re.search(rf"^{name}:\w+=(.*)$", cache.read_text() if cache.is_file() else "", re.M)
    return found[1] if found else None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """Built in build/, as `make build` configured it, so that nothing is compiled twice; CPU only without that."""
    folder = tmp_path_factory.mktemp("dist")
    if from_cache("DSV4_PTXAS_REPORT"):
        names = ("PYTHON", "DSV4_CUDA_ARCHITECTURES", "DSV4_PTXAS_REPORT")
        settings = {"build-dir": str(ROOT / "build")} | {f"cmake.define.{name}": from_cache(name) for name in names}
    else:
        settings = {"build-dir": str(folder / "build"), "cmake.define.DSV4_CUDA": "OFF"}
    options = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
    environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        folder,
        *options,
        ROOT,
        env=environment,
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> pathlib.Path:
    """Of an environment with the wheel, which has jax from this one and nothing of this tree."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    here = pathlib.Path(np.__file__).parents[1]
    packages = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # By links: a .pth file would bring the editable install of this environment along.
    for path in here.iterdir():
        if "dsv4_jax" not in path.name and path.suffix != ".pth" and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return python


def outside(python: pathlib.Path, tmp_path: pathlib.Path, *args, **environment) -> str:
    clean = {n: v for n, v in os.environ.items() if n != "PYTHONPATH" and not n.startswith("DSV4")}
    return run(python, *args, cwd=tmp_path, env=clean | {"XDG_CACHE_HOME": str(tmp_path / "cache")} | environment)


def test_one_wheel_for_all_pythons(wheel, tmp_path) -> None:
    assert re.fullmatch(r"dsv4_jax-[\d.]+-py3-none-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    assert {f"dsv4_jax/{path.relative_to(ROOT)}" for path in (ROOT / "csrc").rglob("*") if path.is_file()} <= names
    tracked = {str(path.relative_to(ROOT)) for path in (ROOT / "dsv4_jax").rglob("*.py")}
    assert tracked <= names and "dsv4_jax/py.typed" in names
    assert not any(name.endswith(".safetensors") for name in names)
    pages = {name.rpartition("/")[2] for name in names if "share/doc/dsv4_jax" in name}
    assert {"README.md", *(path.name for path in (ROOT / "docs").glob("*.md"))} == pages
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    assert "Keywords: " in metadata and "Author: The dsv4_jax project" in metadata
    for library in (tmp_path / "dsv4_jax" / "native").iterdir():
        needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library))
        # Nothing of Python, of jaxlib or of a CUDA toolkit.
        assert {name.split(".so")[0] for name in needed} <= {"libstdc++", "libgcc_s", "libc", "libm", "ld-linux-x86-64"}
        undefined = run("nm", "-D", "--undefined-only", library)
        assert not re.findall(r" U (_?Py\w+|cuda\w+|cu[A-Z]\w+)", undefined)


def test_doctor_and_a_step_outside_the_tree(wheel, python, tmp_path) -> None:
    report = json.loads(outside(python, tmp_path, "-m", "dsv4_jax", "doctor", "--json"))
    assert report["problem"] is None and report["native"]["cpu"] == "usable"
    with zipfile.ZipFile(wheel) as archive:
        if "dsv4_jax/native/libdsv4_cuda.so" in archive.namelist():
            assert report["native"]["cuda"] == "usable" and report["cuda_build"]["toolkit"]
            assert "9.0" in report["cuda_code"]["attend"]["capabilities"]
        else:
            assert "`dsv4-jax build` makes it" in report["native"]["cuda"]
    printed = outside(python, tmp_path, "-c", STEP)
    assert "site-packages/dsv4_jax" in printed and printed.split()[1:] == ["True", "True"]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_the_command_builds_what_then_is_found(python, tmp_path) -> None:
    command = python.with_name("dsv4-jax")
    made = outside(command, tmp_path, "build", "--cpu-only").strip()
    assert made.startswith(str(tmp_path / "cache" / "dsv4_jax"))
    code = "from dsv4_jax import libraries as l; l.open_cpu(); print(l.cpu_path())"
    assert outside(python, tmp_path, "-c", code).strip() == made


def test_the_source_distribution_is_complete(tmp_path) -> None:
    code = f"import os, scikit_build_core.build as b; os.chdir({str(ROOT)!r}); print(b.build_sdist({str(tmp_path)!r}))"
    made = run(sys.executable, "-c", code).split()[-1]
    with tarfile.open(tmp_path / made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("csrc", "docs", "tests", "dsv4_jax", "benchmarks", "constraints", "examples")
    kinds = (".py", ".md", ".cu", ".cuh", ".cc", ".h", ".txt", ".cmake")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    here = {path.relative_to(ROOT).as_posix() for path in paths}
    assert here | {"README.md", "LICENSE", "Makefile", "CHANGELOG.md", "pyproject.toml"} <= names
    assert not [name for name in names if name.endswith(".so") or name.startswith(("build/", ".venv"))]
