"""docs/stores.md: the store of its recipe keeps the contract."""

from __future__ import annotations

import functools
import re
from typing import Any

from .conformance import ROOT, StoreConformance
from .samples import RECORD_BYTES


@functools.cache
def recipe() -> type:
    (block,) = re.findall(r"runs this[^`]*```python\n(.*?)```", (ROOT / "docs" / "stores.md").read_text(), re.S)
    scope: dict[str, Any] = {}
    exec(block, scope)
    return scope["MemoryStore"]


class TestRecipe(StoreConformance):
    persistent = False

    def open(self, path):
        return recipe()(record_bytes=RECORD_BYTES)
