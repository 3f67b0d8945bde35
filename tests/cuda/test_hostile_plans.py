"""Ids that do not exist on a GPU, in CUDA and in Pallas, also under the sanitizer; on the CPU the step's lowering."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from dsv4_jax.cuda import append, attend, compress, index_scores, top_k

from .. import hostile
from ..harness import random_norms, random_stream

ROOT = pathlib.Path(__file__).parents[2]


def test_the_step_lowers_to_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the class below runs on a GPU reaches the kernels, which are told how many blocks a layer has."""
    for module in (append, attend, compress, index_scores, top_k):
        monkeypatch.setattr(module, "cuda_target", lambda target: target)
    layout = hostile.LAYOUT
    plan = hostile.plan_of(layout, "verify")
    rows, norms = random_stream(layout, plan.num_tokens, 1), random_norms(layout)
    entries = np.zeros((plan.num_tokens, 5), np.int32)
    # A function of its own: the targets above must not stay in the cache of `jit_step`.
    step = jax.jit(lambda *args: hostile.step(*args, implementation="cuda", reads="cuda"))
    text = step.trace(hostile.random_cache(layout, 0), plan, rows, norms, entries)
    text = text.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("append", "compress_csa", "compress_hca", "index_scores", "top_k", "attend"):
        assert f"@dsv4_{kernel}" in text, kernel
    blocks, slots = hostile.SIZE.block_units, hostile.SIZE.slot_units
    # ratio, ordinal, slots, ring, base, entries of a block, format, Hadamard, bias, blocks
    assert f"fields = dense<[16, 1, {slots}, 3, {blocks * 8}, 8, 0, 0, 0, {blocks}]>" in text


@pytest.mark.gpu
class TestCuda(hostile.HostilePlans):
    implementation = "cuda"
    gather = "pallas"


@pytest.mark.gpu
class TestPallas(hostile.HostilePlans):
    implementation = gather = "pallas"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("name", ["TestCuda", "TestPallas"])
def test_sanitizer_finds_nothing(name: str) -> None:
    """No access outside of an allocation, whatever the ids hold."""
    test = f"{pathlib.Path(__file__).relative_to(ROOT)}::{name}"
    command = ["compute-sanitizer", "--error-exitcode", "9", sys.executable, "-m", "pytest", "-m", "gpu", test]
    # A process of its own, also where this one is a worker of pytest-xdist: plugins warn of workers, and warnings fail.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST_")}
    # An allocation for every array: within one of XLA's own pool the sanitizer sees no ends of arrays.
    environment["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
