"""Strict JAX for every test, four CPU devices, and a reason for every GPU test that cannot run.

Every test runs on Python 3.12. Others run the first case of each, those marked every_case in full and those marked slow
not at all; all of them with RUN_SLOW=1.
Tests run on the CPU unless JAX_PLATFORMS says otherwise: `JAX_PLATFORMS=cuda,cpu pytest -m gpu`.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is compiling, and a third of that LLVM's optimisations: the CPU does without them, except in
# `harness.optimised_write_step` or if XLA_FLAGS asks for them.
# Four devices for the sharding tests. One thread each: tests run in several processes already.
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_backend_optimization_level=0" if os.environ["JAX_PLATFORMS"] == "cpu" else "",
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=4",
    "--xla_cpu_multi_thread_eigen=false",
]).strip()  # fmt: skip

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Each new shape is a compile, so an example may take seconds; the same examples every time.
hypothesis.settings.register_profile(
    "project",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile("explore", parent=hypothesis.settings.get_profile("project"), derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.version_info[:2] != (3, 12) and not os.environ.get("RUN_SLOW"):
        for item in items:
            later_case = any(item.callspec.indices.values()) if hasattr(item, "callspec") else False
            if item.get_closest_marker("slow") or (later_case and not item.get_closest_marker("every_case")):
                item.add_marker(pytest.mark.skip(reason="runs on Python 3.12, or with RUN_SLOW=1"))
    _skip_without_gpu(items)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if "cuda" not in os.environ["JAX_PLATFORMS"] and "gpu" not in os.environ["JAX_PLATFORMS"]:
        reason = "needs a GPU: set JAX_PLATFORMS=cuda,cpu to run it"
    elif jax.default_backend() != "gpu":
        reason = f"needs a GPU: JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} has none"
    else:
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))
