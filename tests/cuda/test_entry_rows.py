"""entry_rows's kernel: on a GPU what the reference is held to."""

from __future__ import annotations

import pytest

from ..ops.test_entry_rows import EntryRowsTest


@pytest.mark.gpu
class TestEntryRowsOnTheGpu(EntryRowsTest):
    implementation = "cuda"
