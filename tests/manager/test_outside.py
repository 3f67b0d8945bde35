"""A few of the random loads of outside.py at all times; what they found is in test_attack.py."""

from __future__ import annotations

import collections
import warnings

import pytest

from dsv4_jax.errors import PerformanceWarning
from tests.manager.outside import Outside

HAPPENED = (
    "compared",
    "fed",
    "forked",
    "hit",
    "junction",
    "lost",
    "moved",
    "outgrown",
    "parked",
    "read",
    "rejected",
    "resized",
    "steps at once",
    "steps left out",
    "unparked",
    "written",
)


@pytest.mark.slow
def test_random_loads_from_outside() -> None:
    did: collections.Counter[str] = collections.Counter()
    for seed in range(40):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # many of the sizes are too small for any
            load = Outside(seed)
            load.run(200)
        did += load.did
    assert all(did[name] for name in HAPPENED), did
