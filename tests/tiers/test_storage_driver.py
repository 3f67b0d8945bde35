"""Blocks and snapshots to storage and back: the bytes of a prompt survive the loss of device and host."""

from __future__ import annotations

import dataclasses
import functools
import random
import types
from typing import Any

import jax
import numpy as np
import pytest

import dsv4_jax
from dsv4_jax import AttentionType, CacheLayout, CachePolicy, CacheSize, DSV4Config, KVCacheManager, model
from dsv4_jax.errors import LayoutError, RequestError, StoreFormatError
from dsv4_jax.manager import HostSize, SnapshotPlacement
from dsv4_jax.manager.policies import EVICTION_POLICIES
from dsv4_jax.manager.prefix.node import Tier
from dsv4_jax.plan import StepPlan
from dsv4_jax.records import block_record, snapshot_record
from dsv4_jax.stores import AsyncStore, SlabStore
from dsv4_jax.testing.live import Held, Live, assert_same_bytes, live_bytes
from dsv4_jax.tiers.host_records import gather_of_ranks, scatter_of_ranks
from dsv4_jax.tiers.storage_driver import StorageDriver

from ..clock import FakeClock

BLOCK = 8
LAYOUT = CacheLayout(
    DSV4Config.tiny(hca_ratio=8, layer_types=(AttentionType.CSA,), num_hash_layers=0), block_tokens=BLOCK
)
SIZE, HOST = CacheSize(6, 2, 6, num_snapshots=2), HostSize.of(LAYOUT, 12, 6)
SCRATCH = 0  # the null block: nobody reads it
PROMPT = [i % 7 for i in range(33)]


@functools.partial(jax.jit, donate_argnums=0)
def _begin(cache: dsv4_jax.KVCache, plan: StepPlan) -> dsv4_jax.KVCache:
    return cache.begin(plan).finish(partial=True)


class Engine:
    """A manager and a cache whose steps write bytes made of the tokens fed so far, a block at a time."""

    def __init__(self, path, order: str = "worth", **sizes) -> None:
        policy = CachePolicy(snapshots=SnapshotPlacement(every=2), eviction=EVICTION_POLICIES[order])
        self.manager = KVCacheManager(LAYOUT, SIZE, policy=policy, host=HOST, weights_id="weights")
        self.shape = self.manager.pinned_shape(2, BLOCK)
        self.path, self.sizes = path, sizes
        self.stores = [AsyncStore(self.store(scope)) for scope in ("block", "slot")]
        self.clock = FakeClock()  # deadlines pass when a test says so, not on a slow machine
        self.driver = StorageDriver(self.manager, *self.stores, clock=self.clock)
        self.fresh()

    def store(self, scope: str) -> SlabStore:
        record, fingerprint = {
            "block": (block_record(LAYOUT), LAYOUT.block_fingerprint),
            "slot": (snapshot_record(LAYOUT), LAYOUT.snapshot_fingerprint),
        }[scope]
        return SlabStore(self.path / scope, record_bytes=record.bytes, max_records=32, fingerprint=fingerprint)

    def fresh(self) -> None:
        self.cache = dsv4_jax.init_cache(LAYOUT, SIZE)
        self.host = dsv4_jax.init_host_cache(LAYOUT, HOST.num_pages)

    def units(self, scope: str, ids: list[int]) -> list[np.ndarray]:
        """The bytes of these units, leaf by leaf."""
        leaves = [leaf for leaf in LAYOUT.leaves if leaf.scope == scope]
        count = self.cache.block_units if scope == "block" else self.cache.slot_units
        return [
            np.asarray(self.cache.arrays[leaf.name]).reshape(leaf.layers, count, -1)[:, ids].copy() for leaf in leaves
        ]

    def fill(self, scope: str, ids: list[int], tokens: list[int]) -> None:
        """Writes bytes that depend on these tokens alone."""
        random = np.random.default_rng(tokens)
        arrays = dict(self.cache.arrays)
        for leaf in LAYOUT.leaves:
            if leaf.scope == scope and ids:
                count = self.cache.block_units if scope == "block" else self.cache.slot_units
                view = np.array(arrays[leaf.name]).reshape(leaf.layers, count, -1)
                view[:, ids] = random.integers(0, 200, view[:, ids].shape).astype(view.dtype)
                arrays[leaf.name] = jax.device_put(view.reshape(arrays[leaf.name].shape), jax.devices()[0])
        self.cache = dataclasses.replace(self.cache, arrays=arrays)

    def run(self, request) -> None:
        """Feeds all its tokens."""
        while request.num_pending:
            self.step([(request, min(BLOCK, request.num_pending))])
            self.fill_last(request)
            self.manager.check_integrity()

    def fill_last(self, request) -> None:
        """What the request's last step wrote: one block, and its state."""
        tokens = request.tokens[: request.num_cached]
        self.fill("block", request.blocks[-1:], tokens)
        self.fill("slot", [request.slot], tokens)

    def step(self, scheduled) -> None:
        plan = self.manager.plan_step(scheduled, shape=self.shape)
        self.cache, self.host = dsv4_jax.run_transfers(self.cache, self.host, self.manager.take_transfers())
        self.host = self.driver.poll(self.host)
        self.driver.save(self.host)
        self.cache = _begin(self.cache, plan)

    def empty_device(self) -> None:
        """All that is cached goes to the host, and from there to storage."""
        self.manager.sleep()
        self.cache, self.host = dsv4_jax.run_transfers(self.cache, self.host, self.manager.take_transfers())
        self.manager.wakeup()
        self.driver.save(self.host)
        self.host = self.driver.drain(self.host)

    def serve(self, prompt: list[int]):
        request = self.manager.admit_request(prompt)
        self.run(request)
        self.manager.release_request(request)

    def fetch(self, prompt: list[int]) -> int:
        """Records that come to the host for this prompt."""
        prefetch = self.driver.prefetch(prompt)
        while not prefetch.done:
            self.host = self.driver.poll(self.host)
            self.manager.check_integrity()
        return prefetch.records

    def free(self) -> int:
        """Free pages of the host."""
        return self.manager.stats().cache.pools["host"].free

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture(params=["worth", "lru"])
def engine(tmp_path, request):
    engine = Engine(tmp_path, request.param)
    yield engine
    engine.close()


def stored_prompt(engine: Engine) -> tuple[list[np.ndarray], Live]:
    """Runs PROMPT, then others, and stores it all. Returns the bytes of its blocks, and what of its slot lives on."""
    request = engine.manager.admit_request(PROMPT)
    while request.num_cached < 32:
        engine.step([(request, BLOCK)])
        engine.fill_last(request)
    held = Held(request.slot, request.num_cached, request.blocks)
    blocks, state = engine.units("block", request.blocks), live_bytes(engine.cache, held)
    engine.run(request)
    engine.manager.release_request(request)
    for other in range(2):
        engine.serve([100 + other] * 41)
    engine.empty_device()
    return blocks, state


def test_a_prompt_comes_back_from_storage(engine) -> None:
    blocks, state = stored_prompt(engine)
    assert engine.stores[0].store.stats().records >= 4 and engine.stores[1].store.stats().records >= 1
    engine.manager.reset()
    engine.fresh()
    assert engine.fetch(PROMPT) == 4 + 1
    request = engine.manager.admit_request(PROMPT)
    assert request.num_hit == 32
    assert engine.manager.stats().cache.counters.hit_tokens[Tier.HOST] == 32
    engine.step([(request, 1)])
    for got, want in zip(engine.units("block", request.blocks[:4]), blocks, strict=True):
        np.testing.assert_array_equal(got, want)
    assert_same_bytes(live_bytes(engine.cache, Held(request.slot, 32, request.blocks)), state)
    assert engine.fetch(PROMPT) == 0  # all of it is nearer already


def test_a_prompt_whose_beginning_another_one_fetches_waits_for_it(engine) -> None:
    """It was told at once that nothing would come, and so computed what was on its way."""
    stored_prompt(engine)
    engine.manager.reset()
    engine.fresh()
    other = [*PROMPT[:32], 7, 7]
    asked = [engine.driver.prefetch(PROMPT), engine.driver.prefetch(other)]
    while not (asked[0].done and asked[1].done):
        engine.host = engine.driver.poll(engine.host)
        assert asked[0].done == asked[1].done, "whoever was answered first, both have to wait"
    assert sorted(one.records for one in asked) == [0, 5], "of the one that the stores answered first"
    assert engine.manager.admit_request(other).num_hit == 32


def test_a_host_cache_smaller_than_its_managers_is_refused(engine) -> None:
    """It would give storage other records' bytes."""
    stored_prompt(engine)
    engine.manager.reset()
    engine.fresh()
    engine.driver.prefetch(PROMPT)
    with pytest.raises(LayoutError, match="beyond the host cache's 1: it has fewer"):
        engine.driver.drain(dsv4_jax.init_host_cache(LAYOUT, 1))
    engine.manager.check_integrity()
    assert engine.fetch(PROMPT) == 4 + 1


@pytest.mark.parametrize("stage", ["contains", "read_into"])
def test_answers_after_a_reset_are_dropped(engine, stage) -> None:
    stored_prompt(engine)
    engine.manager.reset()
    asked = []
    for calls in engine.stores:
        call = getattr(calls, stage)
        setattr(calls, stage, lambda *args, call=call, **options: asked.append(1) or call(*args, **options))
    engine.driver.prefetch(PROMPT)
    while not asked:
        engine.host = engine.driver.poll(engine.host)
    assert engine.driver.busy
    engine.manager.reset()
    engine.host = engine.driver.drain(engine.host)
    engine.manager.check_integrity()
    assert engine.free() == HOST.num_pages
    assert engine.manager.admit_request(PROMPT).num_hit == 0


def test_a_lost_record_ends_the_run_before_it(engine) -> None:
    stored_prompt(engine)
    engine.manager.reset()
    digests = engine.manager.admit_request(PROMPT).hasher.digests
    engine.manager.reset()
    store = engine.stores[0].store
    contains = store.contains
    store.contains = lambda keys: contains(keys) | True  # a hint only: the third is gone when it is read
    assert store.delete([digests[2]]).tolist() == [True]
    assert engine.fetch(PROMPT) == 2  # the snapshot came too, but there is nothing for it to go with
    tree = engine.manager.cache.tree
    assert [tree.get(d).state.tier if tree.get(d) else None for d in digests] == [Tier.HOST, Tier.HOST, None, None]
    assert not engine.manager.cache.fetching and engine.free() == HOST.num_pages - 2


def test_nothing_without_a_snapshot(engine) -> None:
    stored_prompt(engine)
    engine.manager.reset()
    snapshots = engine.stores[1].store
    digests = engine.manager.admit_request(PROMPT).hasher.digests
    snapshots.delete([d for d, found in zip(digests, snapshots.contains(digests), strict=True) if found])
    assert engine.fetch(PROMPT) == 0


def test_stores_of_other_sizes_are_refused(tmp_path, engine) -> None:
    with pytest.raises(StoreFormatError, match="slot store"):
        StorageDriver(engine.manager, engine.stores[0], engine.stores[0])


def test_storage_insists_on_a_name_of_the_weights(engine) -> None:
    with pytest.raises(RequestError, match="weights_id"):
        StorageDriver(KVCacheManager(LAYOUT, SIZE, policy=CachePolicy(), host=HOST), *engine.stores)
    engine.manager.sleep()
    for call in (engine.manager.wakeup, engine.manager.reset):
        with pytest.raises(RequestError, match="weights_id"):
            call(weights_id=None)
    assert engine.manager.weights_id == "weights"


def serve_random_prompts(engine: Engine, rng: random.Random, count: int) -> int:
    """Prefetches and serves prompts that share their beginnings; every block must hold its own bytes. Tokens hit."""
    texts = [[rng.randrange(3) for _ in range(41)] for _ in range(4)]
    hits = 0
    for _ in range(count):
        prompt = rng.choice(texts)[: rng.randint(9, 41)]
        engine.driver.prefetch(prompt)
        if rng.random() < 0.7:
            engine.host = engine.driver.drain(engine.host)
        request = engine.manager.admit_request(prompt)
        hits += request.num_hit
        engine.run(request)
        found = engine.units("block", request.blocks)
        for i in range(len(request.blocks)):
            engine.fill("block", [SCRATCH], prompt[: (i + 1) * BLOCK])
            for got, want in zip(found, engine.units("block", [SCRATCH]), strict=True):
                np.testing.assert_array_equal(got[:, i], want[:, 0])
        engine.manager.release_request(request)
    engine.host = engine.driver.drain(engine.host)
    engine.manager.check_integrity()
    return hits


def test_random_traces_with_storage(engine) -> None:
    """Every fetched record has the bytes that were saved, whatever runs between."""
    for _ in range(3):
        assert serve_random_prompts(engine, random.Random(3), 10)
        engine.empty_device()
        engine.manager.reset()  # what comes next is in storage alone
    assert engine.stores[0].store.stats().read and not engine.stores[0].store.stats().corrupted


def test_drivers_of_two_data_shards_share_one_pool(tmp_path):
    """Each writes and reads the pages of its own shard, and no others."""
    engine = Engine(tmp_path)
    placed = dsv4_jax.cache_sharding(LAYOUT, model.Split(2, 1).mesh()).arrays
    place: Any = placed[next(leaf.name for leaf in LAYOUT.leaves if leaf.scope == "block")]
    pages = dsv4_jax.init_host_cache(LAYOUT, HOST.num_pages, sharding=place).pages
    expected, each = np.array(pages), pages.shape[0] // 2
    moves: Any = [types.SimpleNamespace(pages=(page,)) for page in (3, 1, 7)]
    for shard in range(2):
        driver = StorageDriver(engine.manager, *engine.stores, shard=shard, shards=2)
        ids, rows = driver._dealt_out(pages, moves)
        records = np.zeros((len(ids), pages.shape[1]), np.uint8)
        records[rows] = own = np.arange(3, dtype=np.uint8)[:, None] + 1 + 10 * shard
        expected[[shard * each + 3, shard * each + 1, shard * each + 7]] = own
        pages = scatter_of_ranks(pages, records, ids.ravel())
        np.testing.assert_array_equal(np.asarray(gather_of_ranks(pages, ids.ravel()))[rows], own + 0 * records[rows])
    np.testing.assert_array_equal(np.asarray(pages), expected)
    with pytest.raises(LayoutError, match="split into 2, the manager's are of 1 pool ranks"):
        StorageDriver(engine.manager, *engine.stores)._dealt_out(pages, moves)
    with pytest.raises(LayoutError, match="shard must be"):
        StorageDriver(engine.manager, *engine.stores, shard=2, shards=2)
    engine.close()
