"""What the tests of the CUDA kernels share."""

from __future__ import annotations

import pytest

from dsv4_jax import ffi


@pytest.fixture
def assumed_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CUDA library were there, with every handler: enough to lower for a GPU on a machine without one."""
    monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: None)
    monkeypatch.setattr(ffi, "cuda_target", lambda op, target: target)
