"""Managers and requests are copied and pickled whole: a copy makes the plans that the original makes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from dsv4_jax import CacheLayout, CachePolicy, CacheSize, DSV4Config, KVCacheManager

LAYOUT = CacheLayout(DSV4Config.tiny())
OPTIONS = {"plain": {}, "caching": dict(policy=CachePolicy()), "tiers": dict(policy=CachePolicy(), host=(50,))}


@pytest.mark.every_case
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_as_the_original(options: str, copied: Callable) -> None:
    manager = KVCacheManager(LAYOUT, CacheSize(12, 3, 4, num_snapshots=2), **OPTIONS[options])
    for prompt in (range(200), range(200), [5, 6]):
        manager.admit_request(list(prompt))
    manager.plan_step([(request, 2) for request in manager.requests])
    again = copied(manager)
    assert again is not manager and [r.tokens for r in again.requests] == [r.tokens for r in manager.requests]
    assert set(again.requests).isdisjoint(manager.requests)

    def go_on(manager: KVCacheManager) -> list[np.ndarray]:
        vectors = []
        while feeds := manager.schedule(token_budget=100):
            vectors.append(manager.plan_step(feeds).pack().vector)
            manager.check_integrity()
        for request in list(manager.requests):
            manager.release_request(request)
        manager.check_integrity()
        return vectors

    first = go_on(again)
    assert len(first) > 3 and len(manager.requests) == 3
    for a, b in zip(first, go_on(manager), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_request_is_pickled_with_what_it_knows() -> None:
    manager = KVCacheManager(LAYOUT, CacheSize(4, 1, 4))
    request = manager.admit_request([1, 2, 3])
    manager.plan_step([(request, 2)])
    again = pickle.loads(pickle.dumps(request))
    assert (again.tokens, again.num_cached, again.slot) == ([1, 2, 3], 2, request.slot)
    with pytest.raises(ValueError, match="request"):
        manager.release_request(again)  # it is a copy, which the manager does not know
