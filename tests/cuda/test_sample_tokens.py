"""sample_tokens' kernels: on a GPU what the reference is held to."""

from __future__ import annotations

import pytest

from ..model.test_sampling import SamplingTest


@pytest.mark.gpu
class TestSamplingOnTheGpu(SamplingTest):
    implementation = "cuda"
