"""Swaps as computations of their own: what they move, what they donate, what their handles hold."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv4_jax import init_host_cache, run_transfers, stack_transfers
from dsv4_jax.errors import LayoutError, PlanError
from dsv4_jax.layout import CacheLayout
from dsv4_jax.manager.transfers import Transfers, TransferStage
from dsv4_jax.plan import StateSwapPlan, SwapPlan
from dsv4_jax.tiers import async_swap

from .. import native
from ..clock import PATIENCE
from .swapping import (
    CFG,
    assert_image,
    image,
    model_in,
    model_out,
    model_restore,
    model_snapshot,
    random_cache,
    random_host,
)

LAYOUT = CacheLayout(CFG)
OUT = SwapPlan(np.array([7, 2, 5, 0], np.int32), np.array([1, 6, 3, 0], np.int32))
IN = SwapPlan(np.array([1, 3, 4, 0], np.int32), np.array([6, 6, 2, 0], np.int32))


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    native.load_cpu()


def test_transfers_of_their_own():
    cache, host = random_cache(LAYOUT, 1), random_host(LAYOUT, 2)
    want, pool = image(cache), np.array(host.pages)
    given, (host, handle) = host, async_swap.start_swap("swap_out", cache, host, OUT)
    handle.wait(PATIENCE)
    assert handle.is_ready() and handle.error is None and given.pages.is_deleted()
    assert handle.duration > 0
    model_out(LAYOUT, want, pool, OUT)
    # The pool may be read now, and goes on being donated: the handle does not hold it.
    assert np.array_equal(host.pages, pool)
    given, (cache, handle) = cache, async_swap.start_swap("swap_in", cache, host, IN)
    handle.wait()
    model_in(LAYOUT, want, pool, IN)
    assert_image(cache, want)
    assert all(x.is_deleted() for x in given.arrays.values())
    slots = StateSwapPlan(*(np.array(ids, np.int32) for ids in ([2], [[1, 3, 7, 9, 8]], [35])))
    others, states = slots._replace(device_ids=slots.device_ids + np.int32(1)), np.array(host.pages)
    host, first = async_swap.start_swap("snapshot", cache, host, slots)
    cache, second = async_swap.start_swap("restore", cache, host, others)
    first.wait(PATIENCE), second.wait(PATIENCE)
    model_snapshot(LAYOUT, want, states, slots)
    model_restore(LAYOUT, want, states, others)
    assert_image(cache, want)


def test_a_host_cache_smaller_than_its_manager_thinks_loses_nothing_silently():
    cache, host = random_cache(LAYOUT, 1), random_host(LAYOUT, 2)
    last = host.num_pages
    for operation, at, ids in (("swap_out", 1, [3, last + 1]), ("swap_in", 0, [last + 1, 1])):
        with pytest.raises(
            PlanError, match=rf"host_ids\[{at}\]: page {last + 1} is beyond the host cache's {last} pages"
        ):
            async_swap.start_swap(operation, cache, host, SwapPlan(np.array([1, 2], np.int32), np.array(ids, np.int32)))
    slots = StateSwapPlan(*(np.array(ids, np.int32) for ids in ([2], [[1, 3, 7, last + 1, 8]], [35])))
    for operation in ("snapshot", "restore"):
        with pytest.warns(DeprecationWarning, match=rf"start_swap\('{operation}', ...\) now"):
            former = getattr(async_swap, f"{operation}_async")
        assert former.func is async_swap.start_swap and former.args == (operation,)
        with pytest.raises(PlanError, match=r"host_ids\[0\]: page .* is beyond"):
            async_swap.start_swap(operation, cache, host, slots)
    assert not host.pages.is_deleted() and not cache.block_table.is_deleted()


def test_transfers_of_too_few_managers_are_refused():
    """They would be cut in two, and half of one's blocks be moved in the other's cache."""
    split = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
    cache = jax.device_put(random_cache(LAYOUT, 1, shards=2), split)
    host = init_host_cache(LAYOUT, 8, sharding=split)
    stage = TransferStage(OUT, None, None, None)
    for stages, count in ((Transfers([stage]), 1), *((stack_transfers([[stage]] * n), n) for n in (1, 4))):
        with pytest.raises(LayoutError, match=f"transfers of {count} managers for 2 data shards"):
            run_transfers(cache, host, stages)
    with pytest.raises(LayoutError, match="2 managers for 1 data shards"):
        run_transfers(random_cache(LAYOUT, 1), random_host(LAYOUT, 2), stack_transfers([[stage]] * 2))
