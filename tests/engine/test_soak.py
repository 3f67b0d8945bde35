"""The soak of `soak.py`, as long as a suite has time for: random requests on the real model, all checked."""

from __future__ import annotations

import dataclasses

import pytest

from .soak import SCENES, Scene, soak


def test_random_requests_are_answered_rightly():
    """One device, a host tier, stores that fail, loops, steps that fail; three executables."""
    scene = Scene("a suite's", steps=3, stores=True, all_kinds=False, faults=0.02, every=8)
    users = soak(scene, 30, seed=0)
    assert users.oracle.tokens > 100 and users.oracle.logprobs > 100


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("scene", SCENES, ids=[scene.name for scene in SCENES])
def test_every_engine_answers_rightly(scene):
    """Masks, penalties, drafts, shards, hosts: 150 requests of each (2,000: `python -m tests.engine.soak`)."""
    users = soak(dataclasses.replace(scene, every=10), 150, seed=3)
    oracle = users.oracle
    assert oracle.tokens + oracle.scored > 500 and users.seen["weights"] and users.seen["sleep"]
    assert not scene.hosts or (oracle.scored and oracle.experts and users.seen["hand-offs whole"])
