"""The digests of a prompt, asked for without a request: those of the events, in this process and in others."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from dsv4_jax import CacheLayout, CachePolicy, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import PlanError, RequestError
from dsv4_jax.manager import BlockHasher, EventLog, MediaItem, Namespace, Tier

LAYOUT = CacheLayout(DSV4Config.tiny(hca_ratio=16), block_tokens=16)
SIZE = CacheSize(num_blocks=8, num_slots=3, max_blocks_per_request=4, num_snapshots=2)
PROMPT = [(i * i) % 251 for i in range(60)]
SPACE = dict(namespace=Namespace("a", "lora"), items=[MediaItem("cat", 20, 2**40)])


def test_they_are_those_of_the_events() -> None:
    log = EventLog()
    manager = KVCacheManager(LAYOUT, SIZE, policy=CachePolicy(), events=log, weights_id="w")
    digests = manager.digests(PROMPT, **SPACE)
    assert log.last == 0 and not manager.requests
    request = manager.admit_request(PROMPT, **SPACE)
    assert request.hasher.digests == digests and len(digests) == 3
    manager.plan_step([(request, 60)])
    manager.commit()
    events, missed = log.since(0)
    assert [(e.kind, e.tier, e.digest) for e in events] == [("stored", Tier.DEVICE, digest) for digest in digests]
    assert [e.parent for e in events] == [None, *digests[:2]] and not missed
    manager.check_integrity()


def test_every_process_of_a_deployment_makes_the_same() -> None:
    plain = KVCacheManager(LAYOUT, CacheSize(3, 1, 2), weights_id="w")  # no policy, another size
    cached = KVCacheManager(LAYOUT, SIZE, policy=CachePolicy(), weights_id="w")
    spec = pickle.loads(pickle.dumps(cached.hash_spec))
    digests = cached.digests(PROMPT, **SPACE)
    assert digests == plain.digests(np.array(PROMPT, np.uint16), **SPACE) == BlockHasher(spec, PROMPT, **SPACE).digests
    assert (
        len(
            {
                tuple(x)
                for x in (
                    digests,
                    plain.digests(PROMPT),
                    cached.digests(PROMPT, items=SPACE["items"]),
                    KVCacheManager(LAYOUT, SIZE, weights_id="v").digests(PROMPT, **SPACE),
                )
            }
        )
        == 4
    )


def test_only_full_blocks_have_one() -> None:
    manager = KVCacheManager(LAYOUT, SIZE)
    assert [len(manager.digests(PROMPT[:n])) for n in (0, 15, 16, 17, 60)] == [0, 0, 1, 1, 3]
    # Of any length: a router may know longer prompts than one engine takes.
    assert len(manager.digests(PROMPT * 1000)) == 3750 and len(PROMPT * 1000) > manager.context_limit


def test_refusals() -> None:
    manager = KVCacheManager(LAYOUT, SIZE, policy=CachePolicy())
    for tokens in ([-1], [256], [True], None, "a", np.array([[1]])):
        with pytest.raises(RequestError):
            manager.digests(tokens)
    with pytest.raises(RequestError):
        manager.digests(PROMPT, namespace="a")
    with pytest.raises(PlanError):
        manager.digests(PROMPT, items=[MediaItem("k", -1, 3)])
