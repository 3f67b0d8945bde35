"""Swaps in two halves beside a step equal direct ones."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import cache_sharding, init_cache, init_host_cache
from dsv4_jax.cache import cache_partition
from dsv4_jax.errors import LayoutError, PlanError, ShapeError
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.plan import SwapPlan
from dsv4_jax.tiers.async_swap import start_swap
from dsv4_jax.tiers.host_memory import host_memories, host_memory
from dsv4_jax.tiers.overlapped_swap import gather_from_host, pack_blocks, scatter_to_host, unpack_blocks
from dsv4_jax.tiers.swap_plan import own_swaps, plan_swap

from .. import native
from .swapping import CFG, assert_image, image, model_in, model_out, random_cache, random_host

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
LAYOUT = CacheLayout(CFG)
OUT = SwapPlan(np.array([7, 2, 5, 0], np.int32), np.array([1, 6, 3, 0], np.int32))
IN = SwapPlan(np.array([1, 3, 4, 0], np.int32), np.array([6, 6, 2, 0], np.int32))


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    native.load_cpu()


@pytest.mark.parametrize("implementation", ["xla", "ffi"])
class TestOverlapped:
    def test_out_beside_a_step(self, implementation):
        """The step returns what it packed, in host memory; committing it equals a swap of the blocks."""

        def step(cache, plan, x):
            packed = pack_blocks(cache, plan, implementation=implementation)
            return x @ x, jax.device_put(packed, HOST)

        cache, host = random_cache(LAYOUT, 3), random_host(LAYOUT, 4)
        pool = np.array(host.pages)
        _, packed = jax.jit(step)(cache, OUT, jnp.ones((8, 8)))
        assert packed.sharding.memory_kind == "pinned_host" and not np.asarray(packed)[3].any()
        commit = jax.jit(scatter_to_host, donate_argnums=0, static_argnames="implementation")
        host = commit(host, packed, OUT, implementation=implementation)
        model_out(LAYOUT, image(cache), pool, OUT)
        assert np.array_equal(host.pages, pool) and host.pages.sharding.memory_kind == "pinned_host"

    def test_in_beside_a_step(self, implementation):
        def step(cache, packed, plan, x):
            return x @ x, unpack_blocks(cache, jax.device_put(packed, DEVICE), plan, implementation=implementation)

        cache, host = random_cache(LAYOUT, 5), random_host(LAYOUT, 6)
        want = image(cache)
        packed = jax.jit(gather_from_host, static_argnames="implementation")(host, IN, implementation=implementation)
        assert packed.sharding.memory_kind == "pinned_host" and not np.asarray(packed)[3].any()
        _, cache = jax.jit(step, donate_argnums=0)(cache, packed, IN, jnp.ones((8, 8)))
        model_in(LAYOUT, want, np.array(host.pages), IN)
        assert_image(cache, want)


def test_each_rank_of_a_pool_axis_moves_its_own():
    """What whole swaps move, in records that only their rank packs; and the pool is where `host_memories` says."""
    mesh = jax.make_mesh((2,), ("pool",), devices=jax.devices()[:2])
    where = cache_sharding(LAYOUT, mesh, data_axis=None, pool_axis="pool")
    size = CacheSize(3, 1, 4, pool_ranks=2)
    split, cache, hosts = jax.P("pool"), *made(where, size)
    out, back = (
        plan_swap(way, device, host, num_device=6, num_host=8)
        for way, device, host in (("out", [1, 4, 3], [3, 2, 7]), ("in", [2, 5, 6], [2, 3, 6]))
    )
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    of_cache = cache_partition(LAYOUT, cache.pool_axis, None)
    with jax.set_mesh(mesh):
        whole, _ = start_swap("swap_out", cache, hosts[0], out)
        own = jax.device_put(own_swaps(out, 2), jax.NamedSharding(mesh, split))
        pack = over(lambda c, p: jax.device_put(pack_blocks(c, p), HOST), in_specs=(of_cache, split), out_specs=split)
        land = over(scatter_to_host, in_specs=(split, split, split), out_specs=split)
        parted = jax.jit(land, donate_argnums=0)(hosts[1], jax.jit(pack)(cache, own), own)
        np.testing.assert_array_equal(np.concatenate(host_memories(parted)), np.asarray(whole.pages))
        assert own.device_ids.tolist() == [1, 2, 2, 0] and np.asarray(whole.pages).any(1).sum() == 3

        own = jax.device_put(own_swaps(back, 2), jax.NamedSharding(mesh, split))
        take = over(gather_from_host, in_specs=(split, split), out_specs=split)
        put = over(
            lambda c, x, p: unpack_blocks(c, jax.device_put(x, DEVICE), p),
            in_specs=(of_cache, split, split),
            out_specs=of_cache,
        )
        parted_cache = jax.jit(put)(cache, jax.jit(take)(parted, own), own)
        whole_cache, _ = start_swap("swap_in", cache, whole, back)
    assert_image(parted_cache, image(whole_cache))
    with pytest.raises(LayoutError, match="own_swaps"):
        jax.eval_shape(over(pack_blocks, in_specs=(of_cache, jax.P()), out_specs=split), whole_cache, out)
    with pytest.raises(PlanError, match=r"device_ids\[0\]: block 2 is of rank 1, page 3 of rank 0"):
        own_swaps(SwapPlan(np.array([2]), np.array([3])), 2)
    with pytest.raises(LayoutError, match="lies in 2 memories"):
        host_memory(parted)


def made(where, size):
    """A cache of random bytes on a mesh, and two empty host pools."""
    rng, cache = np.random.default_rng(1), init_cache(LAYOUT, size, sharding=where)
    arrays = {
        name: jax.device_put(
            rng.integers(0, 256, (x.shape[0], x.shape[1] * x.dtype.itemsize), np.uint8).view(x.dtype), x.sharding
        )
        for name, x in cache.arrays.items()
    }
    pages = where.arrays["hca.nope"]
    return dataclasses.replace(cache, arrays=arrays), [init_host_cache(LAYOUT, 4, sharding=pages) for _ in range(2)]


def test_nothing_packed_and_wrong_sizes():
    cache, host = random_cache(LAYOUT, 7), random_host(LAYOUT, 8)
    nothing = SwapPlan(np.zeros(0, np.int32), np.zeros(0, np.int32))
    packed = pack_blocks(cache, nothing)
    assert packed.shape == gather_from_host(host, nothing).shape == (0, host.pages.shape[1])
    assert scatter_to_host(host, packed, nothing) is host and unpack_blocks(cache, packed, nothing) is cache
    with pytest.raises(ShapeError, match="packed records are uint8"):
        scatter_to_host(host, packed, OUT)
    with pytest.raises(ShapeError, match="expected uint8"):
        unpack_blocks(cache, packed, OUT)
