"""Swaps in two halves beside a step equal direct ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError
from dsv4_jax.layout import CacheLayout
from dsv4_jax.plan import SwapPlan
from dsv4_jax.tiers.overlapped_swap import gather_from_host, pack_blocks, scatter_to_host, unpack_blocks

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
