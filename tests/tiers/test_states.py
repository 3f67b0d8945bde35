"""States through host records: by position, between caches of different draft widths, and nothing in them is idle."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, cache_sharding, init_host_cache
from dsv4_jax.cache import KVCache
from dsv4_jax.config import AttentionType
from dsv4_jax.errors import LayoutError
from dsv4_jax.plan import StateSwapPlan
from dsv4_jax.record_format import Piece
from dsv4_jax.records import snapshot_record, state_pages, state_record
from dsv4_jax.testing.live import Live, assert_same_bytes
from dsv4_jax.testing.runner import with_garbage
from dsv4_jax.tiers import swap
from dsv4_jax.tiers.host_cache import HostCache
from dsv4_jax.tiers.swap_plan import plan_state_swap, plan_swap

from .. import native
from ..harness import Driver, pinned_shape, random_stream
from .swapping import jitted

SWA, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(layer_types=(SWA, CSA, HCA), hca_ratio=16, sliding_window=12)
SIZE = CacheSize(num_blocks=8, num_slots=2, max_blocks_per_request=4)
BLOCK, TOKENS = 16, 60
PAGES = 40  # of the host; none of the states takes more than 30
BOUNDARY, WITHIN = 32, 39  # tokens: no entry unfinished, one of each kind
# After as many tokens no ring holds anything of before: 16 + 3 rows of raw HCA state are the most.
RING = 19


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    native.load_cpu()


def layout_of(drafts: int, hca_state: str = "online", **options) -> CacheLayout:
    return CacheLayout(CFG, block_tokens=BLOCK, draft_tokens=drafts, hca_state=hca_state, **options)


@functools.cache
def stream(layout: CacheLayout):
    return random_stream(layout, TOKENS, 1)


def run(driver: Driver, slot: int, until: int) -> Driver:
    """Feeds a slot's tokens up to a length, 7 a step."""
    shape = pinned_shape(driver.layout, 1, 7, SIZE.max_blocks_per_request, history=True)
    while driver.length[slot] < until:
        driver.step([(slot, min(7, until - driver.length[slot]))], shape)
    return driver


@functools.cache
def cold(layout: CacheLayout, tokens: int) -> Driver:
    """Slot 1 of a cache of zeros."""
    driver = Driver(layout, SIZE)
    driver.admit(1, stream(layout))
    return run(driver, 1, tokens)


def away(driver: Driver, slot: int) -> HostCache:
    """A request's blocks in host pages 1.. and its state in pages 5.. ."""
    layout, blocks, tokens = driver.layout, driver.blocks[slot], driver.length[slot]
    host = init_host_cache(layout, PAGES)
    plan = plan_swap("out", blocks, range(1, 1 + len(blocks)), num_device=SIZE.num_blocks, num_host=PAGES)
    host = jitted("swap_out")(driver.cache, host, plan)
    return jitted("snapshot")(driver.cache, host, states("out", layout, slot, tokens))


def states(direction: str, layout: CacheLayout, slot: int, tokens: int) -> StateSwapPlan:
    records = list(range(5, 5 + state_pages(layout, tokens)))
    return plan_state_swap(direction, layout, [slot], [records], [tokens], num_device=SIZE.num_slots, num_host=PAGES)


def back(host: HostCache, layout: CacheLayout, tokens: int) -> Driver:
    """The request in slot 2 of a cache full of garbage, in other blocks."""
    driver = Driver(layout, SIZE, seed=5)
    driver.cache = with_garbage(driver.cache, np.random.default_rng(6))
    driver.admit(2, stream(layout))
    blocks = driver.blocks[2] = [int(driver.free.pop()) for _ in range(layout.blocks_for(tokens))]
    driver.length[2] = tokens
    plan = plan_swap("in", blocks, range(1, 1 + len(blocks)), num_device=SIZE.num_blocks, num_host=PAGES)
    cache = jitted("swap_in")(driver.cache, host, plan)
    cache = jitted("restore")(cache, host, states("in", layout, 2, tokens))
    table = cache.block_table.at[2, : len(blocks)].set(jnp.array(blocks, jnp.int32))
    driver.cache = cache.with_pool("block_table", (table,))
    return driver


def slot_bytes(driver: Driver, slot: int) -> dict[str, np.ndarray]:
    """All rows of a slot, dead ones included."""
    leaves = [leaf for leaf in driver.layout.leaves if leaf.scope == "slot"]
    return {
        leaf.name: np.asarray(driver.cache.arrays[leaf.name]).reshape(leaf.layers, -1, leaf.rows, leaf.width)[:, slot]
        for leaf in leaves
    }


def whole(driver: Driver, slot: int) -> Live:
    """As `live_bytes`, with all of the window's rows."""
    return driver.live(slot, window=CFG.sliding_window)


@pytest.mark.parametrize("tokens", [BOUNDARY, WITHIN])
@pytest.mark.parametrize(("written", "read"), [(0, 3), (3, 0), (2, 2)])
@pytest.mark.parametrize("hca_state", ["online", pytest.param("raw", marks=pytest.mark.slow)])
def test_a_state_continues_in_a_cache_of_any_draft_width(hca_state, written, read, tokens):
    source, target = layout_of(written, hca_state), layout_of(read, hca_state)
    driver = back(away(cold(source, tokens), 1), target, tokens)
    assert_same_bytes(whole(driver, 2), whole(cold(target, tokens), 1), "restored")
    for more in (1, 4, 9):
        run(driver, 2, tokens + more)
        assert_same_bytes(driver.live(2), cold(target, tokens + more).live(1), f"{more} later")
    # Nothing that was dead is left then: all of the slot is as in a run that never went away.
    run(driver, 2, tokens + RING)
    for name, rows in slot_bytes(driver, 2).items():
        np.testing.assert_array_equal(rows, slot_bytes(cold(target, tokens + RING), 1)[name], err_msg=name)


def test_a_restored_slot_has_zeros_where_its_state_has_nothing():
    layout = layout_of(3)
    driver = back(away(cold(layout, BOUNDARY), 1), layout, BOUNDARY)
    held, before = slot_bytes(driver, 2), slot_bytes(cold(layout, BOUNDARY), 1)
    assert before["hca_state.rows"].any() and not held["hca_state.rows"].any()
    width = layout.leaves[-2].width if layout.leaves[-2].pool == "hca_state" else 0
    assert width == 3 * CFG.head_dim
    for name in ("csa_state.rows", "index_state.rows"):  # of 8 + 3 rows four halves of kv and score
        live = held[name].any((0, 2))
        assert live.tolist() == [p % 11 in [i % 11 for i in range(28, 32)] for p in range(11)]
        quarters = held[name][:, live].reshape(1, 4, 4, -1)
        assert quarters[:, :, 0::2].all((0, 3)).all() and not quarters[:, :, 1::2].any()
    assert held["swa.nope"].any(2).sum() == 3 * 12 and before["swa.nope"].any(2).sum() == 3 * 15


PIECES = [
    pytest.param(state, i, marks=[pytest.mark.slow] if state == "raw" else [])
    for state in ("online", "raw")
    for i in range(len(state_record(layout_of(1, state)).pieces))
]


@pytest.mark.parametrize(("hca_state", "piece"), PIECES)
def test_no_row_of_a_record_can_be_left_out(hca_state, piece):
    """Without any one of its rows the state is not what a cold run has."""
    layout = layout_of(1, hca_state)
    part: Piece = state_record(layout).pieces[piece]
    tokens = BOUNDARY if part in snapshot_record(layout).pieces else WITHIN
    host, expected = away(cold(layout, tokens), 1), whole(cold(layout, tokens), 1)
    assert_same_bytes(whole(back(host, layout, tokens), 2), expected)
    seen = 0
    for row in range(part.rows):
        records = np.array(host.pages)
        start = part.offset + row * part.width
        held = records[5:].reshape(-1)[start : start + part.width]  # the pages of the state follow each other
        if held.any():  # else it is the row of a token that is still to come
            held[:] = 0
            lacking = dataclasses.replace(host, pages=jax.device_put(records, host.pages.sharding))
            with pytest.raises(AssertionError, match=f"{part.leaf.pool} part"):
                assert_same_bytes(whole(back(lacking, layout, tokens), 2), expected)
            seen += 1
    unfinished = {"csa_state": 3, "index_state": 3, "hca_state": 1 if hca_state == "online" else 7}
    assert seen == (part.rows if tokens == BOUNDARY else unfinished[part.leaf.pool])


def test_equal_states_have_equal_records():
    """Whatever cache, draft width, slot and blocks they were in, and whatever lay beside them."""
    for tokens in (BOUNDARY, WITHIN):
        first = state_of(cold(layout_of(0), tokens), 1)
        for drafts in (1, 3):
            there = back(away(cold(layout_of(0), tokens), 1), layout_of(drafts), tokens)
            assert state_of(there, 2) == state_of(cold(layout_of(drafts), tokens), 1) == first
        snapshot, state = snapshot_record(layout_of(0)), state_record(layout_of(0))
        end = (snapshot if tokens == BOUNDARY else state).bytes
        assert any(first[: snapshot.bytes]) and any(first[snapshot.bytes : end]) == (tokens == WITHIN)
        assert not any(first[end:])


def state_of(driver: Driver, slot: int) -> bytes:
    """The host pages of its state."""
    return np.asarray(away(driver, slot).pages)[5:].tobytes()


def test_records_of_another_kind_of_state_are_refused():
    driver = cold(layout_of(0), WITHIN)
    for other in (layout_of(0, "raw"), layout_of(0, kv_format="bf16")):
        with pytest.raises(LayoutError, match="cannot hold states of"):
            swap.snapshot(driver.cache, init_host_cache(other, 1), states("out", layout_of(0), 1, WITHIN))


@pytest.mark.slow  # of swaps and of states in blocks there is one that every push runs
def test_four_shards():
    """Each shard moves its own states to its own records and back, by its own positions."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    layout, target = layout_of(0), layout_of(3)
    mesh, lengths = jax.make_mesh((4,), ("data",)), (BOUNDARY, WITHIN, 5, 47)
    split = NamedSharding(mesh, P("data"))
    drivers = [cold(layout, tokens) for tokens in lengths]
    joined = {
        name: np.concatenate([np.asarray(driver.cache.arrays[name]) for driver in drivers])
        for name in drivers[0].cache.arrays
    }
    cache = jax.device_put(KVCache(joined, layout), cache_sharding(layout, mesh))
    host = init_host_cache(layout, PAGES, sharding=split)

    def plans(slot: int) -> StateSwapPlan:
        """As many pages for every state, the last ones null where it has fewer."""
        records = np.zeros((4, state_pages(layout, 1)), np.int32)
        for row, tokens in zip(records, lengths, strict=True):
            row[: state_pages(layout, tokens)] = range(1, 1 + state_pages(layout, tokens))
        plan = StateSwapPlan(np.full(4, slot, np.int32), records, np.array(lengths, np.int32))
        return jax.device_put(plan, split)

    def empty() -> KVCache:
        shapes = {leaf: target.leaf_shape(leaf, SIZE) for leaf in target.leaves}
        arrays = {leaf.name: jnp.ones((4 * rows, width), leaf.dtype) for leaf, (rows, width) in shapes.items()}
        return jax.device_put(KVCache(arrays, target), cache_sharding(target, mesh))

    for implementation in ("ffi", "xla"):
        options = dict(mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=implementation == "ffi")
        out, into = (
            jax.jit(
                jax.shard_map(functools.partial(move, implementation=implementation), **options), donate_argnums=written
            )
            for move, written in ((swap.snapshot, 1), (swap.restore, 0))
        )
        host = out(cache, host, plans(1))
        there = into(empty(), host, plans(2))
        for i, tokens in enumerate(lengths):
            want = slot_bytes(back(away(drivers[i], 1), target, tokens), 2)
            for leaf in target.leaves:
                if leaf.scope == "slot":
                    rows = np.split(np.asarray(there.arrays[leaf.name]), 4)[i]
                    rows = rows.reshape(leaf.layers, -1, leaf.rows, leaf.width)
                    np.testing.assert_array_equal(rows[:, 2], want[leaf.name], err_msg=f"{leaf.name}, shard {i}")
                    assert (rows[:, 1] == 1).all()
