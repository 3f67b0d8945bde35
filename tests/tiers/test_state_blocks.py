"""States in blocks of the device: what comes back to a slot, or goes to the host, is what the slot's record says."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax.cache import init_cache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.errors import LayoutError, ShapeError
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager.transfers import TransferStage
from dsv4_jax.plan import SpillPlan, StateBlocksPlan, StateSwapPlan
from dsv4_jax.records import block_bytes, state_blocks, state_pages
from dsv4_jax.tiers import async_swap
from dsv4_jax.tiers.host_cache import init_host_cache
from dsv4_jax.tiers.state_blocks import get_states, put_states
from dsv4_jax.tiers.transfers import run_transfers, stack_transfers

from .swapping import (
    CFG,
    PAGES,
    STATES,
    assert_image,
    image,
    model_restore,
    model_snapshot,
    random_cache,
    random_host,
)

LAYOUT = CacheLayout(CFG)
BLOCKS = state_blocks(LAYOUT)


def ids(values: list) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(("formats", "options"), STATES, ids=str)
def test_what_comes_back_is_the_record_of_the_state(formats, options):
    """By way of blocks a slot gets what it would by way of the host, and the host what it would from the slot; blocks
    that are not named keep their bytes."""
    layout = CacheLayout(CFG, *formats, **options)
    assert block_bytes(layout).bytes == layout.bytes_per_block
    cache, host = random_cache(layout, 1), random_host(layout, 2)
    count, pages = state_blocks(layout), list(range(PAGES, PAGES - state_pages(layout, 0), -1))
    tokens = 3 * layout.block_tokens
    blocks = ids([list(range(1, 2 * count, 2)), [0] * count])
    want, before, records = image(cache), image(cache), np.array(host.pages)
    snapshot = StateSwapPlan(ids([3]), ids([pages]), ids([tokens]))
    model_snapshot(layout, before, records, snapshot)
    model_restore(layout, want, records, snapshot._replace(device_ids=ids([1])))

    plan = StateBlocksPlan(ids([3, 0]), blocks, ids([tokens, 0]))
    stages = [
        TransferStage(put_states=plan),
        TransferStage(spill_states=SpillPlan(blocks, ids([pages, [0] * len(pages)]))),
        TransferStage(get_states=plan._replace(slots=ids([1, 0]))),
    ]
    cache, host = run_transfers(cache, host, stages)
    assert np.array_equal(host.pages, records)
    after = image(cache)
    for leaf in layout.leaves:
        if leaf.scope == "block":  # but for those that the state lies in
            view = (leaf.layers, -1, leaf.rows, leaf.row_bytes)
            mine, others = (data[leaf.name].reshape(view) for data in (after, before))
            kept = np.setdiff1d(np.arange(mine.shape[1]), blocks)
            assert np.array_equal(mine[:, kept], others[:, kept]), leaf.name
            want[leaf.name] = after[leaf.name]
    assert_image(cache, want)


def test_over_data_shards_and_without_a_host():
    split = NamedSharding(jax.make_mesh((2,), ("data",)), P("data"))
    cache = jax.device_put(random_cache(LAYOUT, 1, shards=2), split)
    plan = StateBlocksPlan(ids([2]), ids([range(1, 1 + BLOCKS)]), ids([LAYOUT.block_tokens]))
    stages = [TransferStage(put_states=plan, get_states=plan._replace(slots=ids([1])))]
    window = next(leaf for leaf in LAYOUT.leaves if leaf.pool == "swa")
    cache, host = run_transfers(cache, None, stack_transfers([stages, []]))
    assert host is None
    slots = np.asarray(cache.arrays[window.name]).reshape(2, window.layers, -1, window.rows, window.width)
    assert np.array_equal(slots[0][:, 1], slots[0][:, 2]) and not np.array_equal(slots[1][:, 1], slots[1][:, 2])


def test_plans_of_another_form_are_refused():
    cache = random_cache(LAYOUT, 1)
    with pytest.raises(ShapeError, match="StateBlocksPlan"):
        put_states(cache, SpillPlan(ids([[1]]), ids([[1]])))
    with pytest.raises(ShapeError, match=f"int32 \\[N, {BLOCKS}\\]"):
        put_states(cache, StateBlocksPlan(ids([1]), ids([[1] * (BLOCKS + 1)]), ids([128])))
    with pytest.raises(ShapeError, match="tokens"):
        put_states(cache, StateBlocksPlan(ids([1]), ids([[1] * BLOCKS]), ids([128, 128])))
    swa = CacheLayout(DSV4Config.tiny(layer_types=(AttentionType.SWA,) * 2))
    with pytest.raises(LayoutError, match="where there are blocks"):
        put_states(random_cache(swa, 1), StateBlocksPlan(ids([1]), ids([[1]]), ids([128])))
    with pytest.raises(LayoutError, match="spill_states needs a host cache"):
        async_swap.start_swap("spill_states", cache, None, SpillPlan(ids([[1] * BLOCKS]), ids([[1]])))
    other = init_host_cache(CacheLayout(CFG, "bf16"), 4)
    with pytest.raises(LayoutError, match="cannot hold states"):
        async_swap.start_swap("spill_states", cache, other, SpillPlan(ids([[1] * BLOCKS]), ids([[1] * 3])))


def test_states_move_in_place():
    """Nothing of the size of the cache lies beside it: leaves are updated where they are."""
    size = CacheSize(4000, 200, 8)
    cache = jax.eval_shape(lambda: init_cache(LAYOUT, size))
    plan = StateBlocksPlan(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in ((4,), (4, BLOCKS), (4,))))
    for move in (put_states, get_states):
        memory = jax.jit(move, donate_argnums=0).lower(cache, plan).compile().memory_analysis()
        assert memory.alias_size_in_bytes == LAYOUT.total_bytes(size)
        assert memory.temp_size_in_bytes < LAYOUT.total_bytes(size) / 20, move
