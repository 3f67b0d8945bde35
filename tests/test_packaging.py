"""What an installed copy promises: its version and lazy imports."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import dsv4_jax

ROOT = pathlib.Path(__file__).parent.parent


def test_version_and_python_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", dsv4_jax.__version__)
    assert f"## {dsv4_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert project["requires-python"] == ">=3.11,<3.14" and "jax>=0.10.2,<0.13" in project["dependencies"]
    assert not any("cuda" in dependency for dependency in project["dependencies"])


def test_environment_is_the_pinned_one():
    """The constraints in use are those that were tested: a JAX of its own for each Python."""
    name = {(3, 11): "jax-0.10.txt", (3, 12): "jax-0.11.txt"}.get(sys.version_info[:2], "jax-0.12.txt")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints" / name).read_text(), re.M))
    for package in ("jax", "jaxlib", "numpy", "ml_dtypes"):
        assert importlib.metadata.version(package) == pins[package]


def test_checkpoints_are_not_packaged():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert built["wheel"]["packages"] == ["dsv4_jax"] and "checkpoints" in built["sdist"]["exclude"]
    assert not list((ROOT / "dsv4_jax").rglob("*.safetensors"))


def test_every_public_name_loads():
    for name in dsv4_jax.__all__:
        assert getattr(dsv4_jax, name) is not None


def test_host_side_imports_no_jax():
    code = (
        "import sys, dsv4_jax.manager, dsv4_jax.capacity, dsv4_jax.plan, dsv4_jax.cli.plan, dsv4_jax.simulate;"
        "from dsv4_jax import pools, records, stores, text, tiers; tiers.swap_plan, tiers.remote, pools.RadixCache;"
        "import dsv4_jax.transports.loopback, dsv4_jax.transports.nixl, dsv4_jax.transports.jax_transfer;"
        "print('jax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "False\n"
