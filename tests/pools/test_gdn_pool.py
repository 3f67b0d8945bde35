"""GDNPool against NumPy arrays: states, copies and resets over all layers, track slots, no copies of the pool."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.errors import OutOfBlocksError, PoolError, ShapeError
from dsv4_jax.pools import GDNPool, GDNSpec, ReqToTokenPool, StateSlots, copy_states
from dsv4_jax.pools.gdn_pool import reset_states

from . import assert_in_place

SPEC = GDNSpec(max_requests=4, layers=3, heads=2, k_dim=5, v_dim=3, conv_dim=7, conv_kernel=4, track_slots=3)
set_states = jax.jit(GDNPool.set_states, donate_argnums=0)
get_states = jax.jit(GDNPool.get_states)


def states_of(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Conv inputs are small integers: exact in bf16."""
    recurrent = rng.standard_normal((n, SPEC.heads, SPEC.v_dim, SPEC.k_dim)).astype(np.float32)
    return recurrent, rng.integers(-9, 9, (n, SPEC.conv_dim, SPEC.conv_kernel - 1)).astype(np.float32)


def test_shapes_and_bytes() -> None:
    pool = GDNPool.init(SPEC)
    assert pool.recurrent.shape == (3, 8, 2, 3, 5) and pool.recurrent.dtype == jnp.float32  # value dim first
    assert pool.conv.shape == (3, 8, 7, 3) and pool.conv.dtype == jnp.uint16
    assert pool.mem_bytes == SPEC.total_bytes == sum(a.nbytes for a in jax.tree.leaves(pool))
    recurrent, conv = pool.get_layer_state(2)
    assert recurrent.shape == (8, 2, 3, 5) and conv.shape == (8, 7, 3) and conv.dtype == jnp.bfloat16


@given(st.integers(0, 2**32))
@settings(max_examples=10)
def test_trace(seed: int) -> None:
    """40 random writes, copies and resets an example; after each, every state of every layer and slot."""
    rng = np.random.default_rng(seed)
    pool = GDNPool.init(SPEC)
    model = [np.zeros((SPEC.layers, SPEC.slots, *s), np.float32) for s in ((2, 3, 5), (7, 3))]
    for _ in range(40):
        kind = rng.integers(3)
        slots = rng.permutation(SPEC.slots)[:3]
        live = slots > 0
        if kind == 0:
            layer, states = int(rng.integers(SPEC.layers)), states_of(rng, 3)
            pool = set_states(pool, jnp.int32(layer), jnp.asarray(slots), *states)
            for leaf, x in zip(model, states, strict=True):
                leaf[layer, slots[live]] = x[live]
        elif kind == 1:
            src = rng.integers(0, SPEC.slots, 3)  # overlaps dst: all are read first
            pool = copy_states(pool, src, slots)
            for leaf in model:
                leaf[:, slots[live]] = leaf[:, src[live]]
        else:
            pool = reset_states(pool, slots)
            for leaf in model:
                leaf[:, slots] = 0
        np.testing.assert_array_equal(pool.recurrent, model[0])
        np.testing.assert_array_equal(
            jax.lax.bitcast_convert_type(pool.conv, jnp.bfloat16).astype(jnp.float32), model[1]
        )
    recurrent, conv, same = get_states(pool, 1, jnp.array([2, 0, 2]), jnp.array([5, 5, 1]))
    np.testing.assert_array_equal(recurrent, model[0][1, [2, 0, 2]])
    np.testing.assert_array_equal(conv.astype(jnp.float32), model[1][1, [2, 0, 2]])
    np.testing.assert_array_equal(same.recurrent, pool.recurrent)
    assert not model[0][:, 0].any()


@functools.partial(jax.jit, donate_argnums=0)
def add_tokens(pool: GDNPool, slots: jax.Array, positions: jax.Array, tokens: jax.Array) -> GDNPool:
    """One token of each request: layer l's recurrent state sums (l + 1) * token, the convolution keeps the last 3."""
    for layer in range(SPEC.layers):
        recurrent, conv, pool = pool.get_states(layer, slots, positions)
        new = jnp.broadcast_to(tokens[:, None, None], (*conv.shape[:2], 1)).astype(conv.dtype)
        conv = jnp.concatenate([conv[:, :, 1:], new], -1)
        pool = pool.set_states(layer, slots, recurrent + np.float32(layer + 1) * tokens[:, None, None, None], conv)
    return pool


@given(st.integers(0, 2**32))
@settings(max_examples=4)
@pytest.mark.slow
def test_slots_change_owners(seed: int) -> None:
    """Requests come, go, fork, and start from snapshots; nothing is ever reset. Each state is its own tokens' only."""
    random = Random(seed)
    pool, table, track = GDNPool.init(SPEC), ReqToTokenPool(SPEC.max_requests, 99), StateSlots(SPEC)
    live: dict[int, list[int]] = {}
    kept: dict[int, list[int]] = {}
    for _ in range(40):
        kind = random.choice(["admit", "fork", "restore", "keep", "forget", "free", "step", "step", "step"])
        source = {"fork": live, "keep": live, "free": live, "restore": kept, "forget": kept}.get(kind, {})
        of = random.choice(sorted(source)) if source else 0
        if kind == "step" and live:
            slots = sorted(live) + [0] * (SPEC.max_requests - len(live))
            positions, tokens = [len(live.get(s, [])) for s in slots], [random.randint(1, 9) for _ in slots]
            pool = add_tokens(pool, *(jnp.array(x) for x in (slots, positions)), jnp.array(tokens, jnp.float32))
            for slot, token in zip(slots, tokens, strict=True):
                live.get(slot, []).append(token)
        elif kind == "free" and of:
            table.free(of)
            del live[of]
        elif kind == "forget" and of:
            track.free_track_slot(of)
            del kept[of]
        elif kind == "keep" and of and track.num_free:
            slot = track.alloc_track_slot()
            pool, kept[slot] = copy_states(pool, [of], [slot]), list(live[of])
        elif (kind == "admit" or (kind in ("fork", "restore") and of)) and table.available_size():
            (slot,) = table.alloc()
            pool = copy_states(pool, [of], [slot]) if of else pool
            live[slot] = list(source[of]) if of else []
        for slot, told in (live | kept).items():
            if told:  # at position 0 there is nothing to read
                expected = np.arange(1, SPEC.layers + 1) * sum(told)
                np.testing.assert_array_equal(pool.recurrent[:, slot, 0, 0, 0], expected)
                last = jax.lax.bitcast_convert_type(pool.conv[:, slot, 0], jnp.bfloat16).astype(jnp.float32)
                np.testing.assert_array_equal(last, [[0, 0, 0, *told][-3:]] * SPEC.layers)
    assert not np.asarray(pool.recurrent[:, 0]).any()


def test_at_position_0_a_state_is_empty() -> None:
    """A slot that was not reset: its next owner's first token starts from zeros, later ones from its state."""
    rng = np.random.default_rng(0)
    r, c = states_of(rng, 3)
    r[1, 0, 0, 0] = np.nan
    pool = set_states(GDNPool.init(SPEC), 1, jnp.array([1, 2, 3]), r, c)
    for positions in (np.array([7, 0, 0]), jnp.array([7, 0, 0]), np.array([7, 0, 0], np.uint8)):
        recurrent, conv, same = get_states(pool, 1, jnp.array([1, 2, 3]), positions)
        np.testing.assert_array_equal(recurrent, [r[0], 0 * r[2], 0 * r[2]])
        np.testing.assert_array_equal(conv.astype(jnp.float32), [c[0], 0 * c[2], 0 * c[2]])
        np.testing.assert_array_equal(same.recurrent, pool.recurrent)
    with pytest.raises(ShapeError, match="2 positions of 3 slots"):
        pool.get_states(1, [1, 2, 3], [0, 1])
    for odd in ([0.0, 1.0, 1.0], None):
        with pytest.raises(ShapeError, match="positions must be integers"):
            pool.get_states(1, [1, 2, 3], odd)
    with pytest.raises(TypeError, match="positions"):  # or the states would be those of whoever had the slots before
        pool.get_states(1, [1, 2, 3])


@pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1, -(2**31)])
def test_device_layers_out_of_range_change_nothing(layer: int) -> None:
    r, c = states_of(np.random.default_rng(0), 2)
    pool = set_states(GDNPool.init(SPEC), 2, jnp.array([1, 2]), r, c)
    after = set_states(jax.tree.map(jnp.copy, pool), jnp.int32(layer), jnp.array([3, 4]), r, c)
    for a, b in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    recurrent, conv, _ = get_states(pool, jnp.int32(layer), jnp.array([1, 2]), jnp.array([1, 1]))
    assert not np.asarray(recurrent).any() and not np.asarray(conv, np.float32).any()


def test_nothing_to_do_and_what_is_refused() -> None:
    pool = GDNPool.init(SPEC)
    assert reset_states(pool, []) is pool and copy_states(pool, [], []) is pool
    r, c = states_of(np.random.default_rng(1), 2)
    for call, error, problem in (
        (lambda: reset_states(pool, [8]), PoolError, r"0\.\.7"),
        (lambda: copy_states(pool, [1, 2], [3, 3]), PoolError, "dst names a slot twice"),
        (lambda: copy_states(pool, [1, 2], [3]), ShapeError, "src has 2 slots, dst 1"),
        (lambda: pool.set_states(3, [1, 2], r, c), PoolError, "layer"),
        (lambda: pool.set_states(0, [1, 1], r, c), PoolError, "twice"),
        (lambda: pool.set_states(0, [1, 2], r.swapaxes(2, 3), c), ShapeError, r"recurrent .*\(2, 2, 3, 5\)"),
        (lambda: pool.get_layer_state(-1), PoolError, "layer"),
        (lambda: pool.get_states(jnp.float32(1), [1], [0]), ShapeError, "layer"),
        (lambda: pool.set_states(0, [1, 2], r.astype(np.int32), c), ShapeError, "recurrent must be floating"),
        (lambda: pool.set_states(0, [1, 2], r, c.astype(np.int32)), ShapeError, "conv must be floating"),
        (lambda: pool.set_states(0, [1, 2], r.tolist(), c), ShapeError, "recurrent must be an array, got list"),
        (lambda: reset_states(pool, [[1], [2, 3]]), ShapeError, "slots must be integers"),
        (lambda: copy_states(pool, [1.0], [2]), ShapeError, "src must be integers"),
        (lambda: GDNSpec(4, 1, 2, 5, 3, 7, 1), PoolError, "conv_kernel"),
        (lambda: GDNSpec(4, 1, 2, 5, 3, 7, 4, conv_storage="fp8"), PoolError, "conv_storage"),
    ):
        with pytest.raises(error, match=problem):
            call()


def test_track_slots_come_after_the_working_slots() -> None:
    slots = StateSlots(SPEC)
    assert [slots.alloc_track_slot() for _ in range(3)] == [5, 6, 7]
    with pytest.raises(OutOfBlocksError, match=r"requested 1 track slots, 0 available \(of 3 total\)"):
        slots.alloc_track_slot()
    slots.free_track_slot(6)
    for bad in (6, 4, 0, True):
        with pytest.raises(PoolError):
            slots.free_track_slot(bad)
    assert slots.alloc_track_slot() == 6
    slots.check_integrity()


@pytest.mark.parametrize("what", ["step", "copy", "reset"])
def test_in_place(what: str) -> None:
    spec = GDNSpec(500, 3, 2, 16, 16, 24, 4, track_slots=20)
    ids = jnp.array([7, 500, 0])

    def step(pool: GDNPool) -> GDNPool:
        for layer in range(spec.layers):
            recurrent, conv, pool = pool.get_states(layer, ids, jnp.array([0, 5, 0]))
            pool = pool.set_states(layer, ids, recurrent * np.float32(0.5) + np.float32(1), conv + conv)
        return pool

    steps: dict[str, Any] = {
        "step": step,
        "copy": functools.partial(GDNPool.copy_states, src=ids, dst=ids[::-1]),
        "reset": functools.partial(GDNPool.reset_states, slots=ids),
    }
    after = assert_in_place(steps[what], GDNPool.init(spec))
    assert float(after.recurrent[1, 7, 0, 0, 0]) == (what == "step") and not np.asarray(after.recurrent[:, 0]).any()
