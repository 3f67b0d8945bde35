"""swiglu's kernel: on a GPU what the reference is held to."""

from __future__ import annotations

import pytest

from ..ops.test_swiglu import SwigluTest


@pytest.mark.gpu
class TestSwigluOnTheGpu(SwigluTest):
    implementation = "cuda"
