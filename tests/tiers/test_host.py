"""The host records as an array: where they lie, what they cost, what is refused; and whole requests through them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager, init_cache, init_host_cache, model, plan_swap
from dsv4_jax.cache import KVCache
from dsv4_jax.config import AttentionType
from dsv4_jax.errors import CapacityError
from dsv4_jax.manager.planning import StepShape
from dsv4_jax.plan import SwapPlan
from dsv4_jax.tiers.host import HostCache
from dsv4_jax.tiers.records import block_record, snapshot_record

from ..harness import Driver, image, pinned_shape, random_stream
from ..oracle.live import assert_same
from . import native
from .swapping import jitted

CSA, HCA = AttentionType.CSA, AttentionType.HCA
CFG = DSV4Config.tiny(layer_types=(CSA, HCA), hc_sinkhorn_iters=1)
SIZE = CacheSize(num_blocks=5, num_slots=2, max_blocks_per_request=2)


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    native.load_cpu()


def test_records_are_pinned_zeros_updated_in_place():
    layout = CacheLayout(CFG)
    for blocks in (1, 3, 64):
        host = init_host_cache(layout, blocks, snapshots=2)
        assert (host.num_blocks, host.num_snapshots) == (blocks, 2)
        assert host.blocks.shape == (1 + blocks, block_record(layout).bytes) and not np.asarray(host.blocks).any()
        assert host.snapshots.shape == (3, snapshot_record(layout).bytes)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(host)} == {"pinned_host"}
        # The very first donated call updates them where they are.
        where = host.blocks.unsafe_buffer_pointer()
        plan = SwapPlan(np.ones(1, np.int32), np.ones(1, np.int32))
        after = jitted("swap_out")(init_cache(layout, SIZE), host, plan)
        assert after.blocks.unsafe_buffer_pointer() == where and host.blocks.is_deleted()
    host = init_host_cache(layout, 1, device=jax.devices()[1])
    assert host.snapshots is None and host.num_snapshots == 0 and host.blocks.devices() == {jax.devices()[1]}


@pytest.mark.parametrize("counts", [(0, 0), (-1, 0), (1.5, 0), (True, 0), (1, -1), (1, "2")])
def test_impossible_counts(counts):
    with pytest.raises(CapacityError, match="must be an integer >= "):
        init_host_cache(CacheLayout(CFG), counts[0], snapshots=counts[1])


# Whole requests


def empty(layout: CacheLayout) -> KVCache:
    """Committed to its device, as the records are: or a step would compile again for what comes back from them."""
    return jax.device_put(init_cache(layout, SIZE), jax.devices()[0])


def out(cache: KVCache, host: HostCache, blocks: list[int], slot: int) -> HostCache:
    """A request's blocks to records 1.., its slot to snapshot 1."""
    sizes = dict(num_device=SIZE.num_blocks, num_host=host.num_blocks, length=2)
    host = jitted("swap_out")(cache, host, plan_swap("out", blocks, range(1, len(blocks) + 1), **sizes))
    return jitted("snapshot")(cache, host, plan_swap("out", [slot], [1], num_device=SIZE.num_slots, num_host=1))


def back(cache: KVCache, host: HostCache, blocks: list[int], slot: int) -> KVCache:
    """The reverse of `out`, to these blocks and this slot; the table is set as a next step would set it."""
    sizes = dict(num_device=SIZE.num_blocks, num_host=host.num_blocks, length=2)
    cache = jitted("swap_in")(cache, host, plan_swap("in", blocks, range(1, len(blocks) + 1), **sizes))
    cache = jitted("restore")(cache, host, plan_swap("in", [slot], [1], num_device=SIZE.num_slots, num_host=1))
    table = cache.block_table.at[slot, : len(blocks)].set(jnp.array(blocks, jnp.int32))
    return cache.with_pool("block_table", (table,))


@pytest.mark.parametrize("options", [{}, dict(kv_format="bf16", index_format="fp8", hca_state="raw", draft_tokens=2)])
def test_cold_prefill_equals_round_trip_equals_preemption(options):
    """137 tokens, elsewhere for a while, 20 more: the bytes of a run that never left the device."""
    layout = CacheLayout(CFG, **options)
    # One shape for prefill and decoding: one compile.
    shape, stream = pinned_shape(layout, 1, 24, 2, history=True), random_stream(layout, 160, 1)

    def prefill(driver: Driver, slot: int) -> None:
        for count in (24, 24, 24, 24, 24, 17):
            driver.step([(slot, count)], shape)

    def start() -> Driver:
        driver = Driver(layout, SIZE)
        driver.cache = empty(layout)
        driver.admit(2, stream)
        prefill(driver, 2)
        return driver

    def finish(driver: Driver, slot: int) -> None:
        for _ in range(20):
            driver.step([(slot, 1)], shape)

    cold, swapped, preempted = start(), start(), start()
    finish(cold, 2)

    # Out, zero, in: the whole cache is the same.
    host = out(swapped.cache, init_host_cache(layout, 3, snapshots=1), swapped.blocks[2], 2)
    swapped.cache = back(empty(layout), host, swapped.blocks[2], 2)
    finish(swapped, 2)
    assert image(swapped.cache) == image(cold.cache)

    # Out; another request takes slot and blocks; in again elsewhere: its own bytes are the same.
    host = out(preempted.cache, init_host_cache(layout, 3, snapshots=1), preempted.blocks[2], 2)
    was = preempted.blocks[2]
    preempted.release(2)
    preempted.free = [b for b in preempted.free if b not in was] + was
    preempted.admit(2, random_stream(layout, 160, 2))
    prefill(preempted, 2)
    assert sorted(preempted.blocks[2]) == sorted(was)
    preempted.blocks[1] = [int(preempted.free.pop()) for _ in was]
    preempted.length[1], preempted.streams[1] = 137, stream
    preempted.cache = back(preempted.cache, host, preempted.blocks[1], 1)
    finish(preempted, 1)
    assert not set(preempted.blocks[1]) & set(was)
    assert_same(preempted.live(1), cold.live(2))


@pytest.mark.slow
def test_next_token_logits_after_a_round_trip():
    """The model's own decode step after out, zero, in: the same logits and the same bytes."""
    layout, rng = CacheLayout(CFG), np.random.default_rng(0)
    params, manager = model.init_params(CFG, 0), KVCacheManager(layout, SIZE)
    request = manager.admit_request(rng.integers(0, CFG.vocab_size, 140).tolist())
    shape = StepShape.bound(layout, 1, 32, columns=2)
    # Without LLVM's optimisations, which are most of the test's time.
    forward = jax.jit(model.forward, compiler_options={"xla_backend_optimization_level": 0})

    def step(cache: KVCache, plan) -> tuple[np.ndarray, KVCache]:
        logits, cache = forward(params, cache, plan.pack(), manager.plan_tokens(plan))
        return np.asarray(logits), cache

    cache = empty(layout)
    for count in (32, 32, 32, 32, 11):
        plan = manager.plan_step([(request, count)], shape=shape)
        _, cache = step(cache, plan)
    slot, blocks = int(plan.row_slot[0]), [b for b in np.asarray(cache.block_table)[plan.row_slot[0]].tolist() if b]
    assert len(blocks) == 2
    host = out(cache, init_host_cache(layout, 2, snapshots=1), blocks, slot)
    returned = back(empty(layout), host, blocks, slot)
    assert image(returned) == image(cache)
    plan = manager.plan_step([(request, 1)], shape=shape)
    (stayed, cache), (came_back, returned) = step(cache, plan), step(returned, plan)
    assert np.array_equal(stayed, came_back) and np.isfinite(stayed[0]).all() and stayed[0].any()
    assert image(returned) == image(cache)
