"""The request table against a dict of lists, and its copy on the device against the table."""

from __future__ import annotations

from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.errors import OutOfBlocksError, PoolError, ShapeError
from dsv4_jax.pools import ReqToTokenPool, TokenTable

from . import assert_in_place

REQUESTS, CONTEXT, CELLS, ROWS, CAPACITY = 4, 12, 64, 3, 16
apply = jax.jit(TokenTable.apply, donate_argnums=0)
rows = jax.jit(TokenTable.rows, static_argnums=2)
kv_indices = jax.jit(TokenTable.kv_indices, static_argnames=("capacity", "fill"))


def test_slots_start_at_one_and_are_refused_typed() -> None:
    pool = ReqToTokenPool(2, 4)
    assert pool.alloc(2) == [1, 2] and pool.available_size() == 0
    with pytest.raises(OutOfBlocksError, match="requested 1 request slots, 0 available"):
        pool.alloc()
    for bad, problem in ((0, "not held"), (3, "not held"), (-1, "not held"), (True, "not an integer")):
        with pytest.raises(PoolError, match=problem):
            pool.free(bad)
    for fill in (2**40, 1.5, [1], True):
        with pytest.raises(PoolError, match="fill"):
            pool.kv_indices([1], fill=fill)
    pool.append(1, [5, 6, 7])
    assert pool.truncate(1, 1).tolist() == [6, 7] and pool.free(1).tolist() == [5]
    with pytest.raises(PoolError, match="freed twice"):
        pool.free(1)
    assert pool.alloc() == [1] and pool.tokens(1).size == 0  # nothing of the request before
    pool.clear()
    assert pool.available_size() == 2
    with pytest.raises(PoolError, match="max_context"):
        ReqToTokenPool(1, 0)


@pytest.mark.parametrize(
    ("call", "args", "problem"),
    [
        ("write", (2, 0, [1]), "not held"),
        ("write", (1, 4, [1]), "gap"),
        ("write", (1, 0, [1] * 9), "exceed"),
        ("write", (1, 0, [0]), "positive"),
        ("write", (1, 0, [-1]), "positive"),
        ("write", (1, -1, [3]), "start"),
        ("write", (1, 0, [1.5]), "positive"),
        ("write", (1, 0, [2**31]), "positive"),
        ("truncate", (1, 4), "truncate"),
        ("tokens", (0,), "not held"),
        ("drain", (2,), "3 cells"),
        ("kv_indices", ([5],), "slots"),
        ("kv_indices", ([1], [-1]), "lengths"),
        ("kv_indices", ([1], [1, 1]), "2 entries"),
    ],
)
def test_refuses(call: str, args: tuple[Any, ...], problem: str) -> None:
    pool = ReqToTokenPool(2, 8)
    pool.alloc()
    pool.append(1, [3, 4, 5])
    with pytest.raises(PoolError, match=problem):
        getattr(pool, call)(*args)
    assert pool.tokens(1).tolist() == [3, 4, 5]
    assert pool.drain(4).ids.tolist() == [3, 4, 5, 0]


@pytest.mark.parametrize(
    "odd", [1.0, np.float64(1), True, np.bool_(True), "1", None, [1], {1}, np.array([1])], ids=repr
)
def test_slots_of_odd_types_are_refused(odd: Any) -> None:
    """Slot 1 is held, and all of these look like it."""
    pool = ReqToTokenPool(2, 8)
    pool.alloc()
    pool.append(1, [3, 4, 5])
    with pytest.raises(PoolError, match="not an integer"):
        pool.free(odd)
    for call in (pool.length, pool.tokens, lambda s: pool.append(s, [6]), lambda s: pool.truncate(s, 1)):
        with pytest.raises(PoolError, match="not held"):
            call(odd)
    pool.check_integrity()
    assert pool.tokens(np.int8(1)).tolist() == [3, 4, 5] and pool.free(np.uint64(1)).tolist() == [3, 4, 5]


@pytest.mark.parametrize("odd", [[1.0], [True], ["1"], [None], [[1], [2, 3]], [2**70], "1", {1}], ids=repr)
def test_ids_and_numbers_of_odd_types_are_refused(odd: Any) -> None:
    pool = ReqToTokenPool(2, 8)
    pool.alloc()
    pool.append(1, np.array([3], np.uint8))
    for call in (
        lambda: pool.append(1, odd),
        lambda: pool.kv_indices(odd),
        lambda: pool.kv_indices([1], odd),
        lambda: pool.kv_indices([1], [1], odd),
        lambda: pool.kv_indices([1], capacity=odd),
        lambda: pool.kv_indices([1], [2**63]),
        lambda: pool.truncate(1, odd),
        lambda: pool.alloc(odd),
        lambda: pool.drain(odd),
        lambda: pool.write(1, odd, [4]),
    ):
        with pytest.raises(PoolError):
            call()
    assert pool.tokens(1).tolist() == [3] and pool.available_size() == 1
    for size in ((2**31, 1), (1, 2**31)):
        with pytest.raises(PoolError, match="int32"):
            ReqToTokenPool(*size)


@given(st.integers(0, 2**32))
@settings(max_examples=20)
@pytest.mark.slow
def test_trace(seed: int) -> None:
    """150 operations an example. After each: rows, lengths and no stale cell; now and then, the device."""
    random = Random(seed)
    pool = ReqToTokenPool(REQUESTS, CONTEXT)
    table = TokenTable.init(pool)
    model: dict[int, list[int]] = {}
    fresh = iter(range(1, 10_000))
    for number in range(150):
        kind = random.choice(["alloc", "append", "append", "write", "truncate", "free", "clear"])
        slot = random.choice(sorted(model)) if model else None
        if kind == "alloc" and len(model) < REQUESTS:
            (got,) = pool.alloc()
            assert got == min(set(range(1, REQUESTS + 1)) - set(model))
            model[got] = []
        elif slot is None or (kind == "clear" and random.random() < 0.9):
            continue
        elif kind == "append":
            ids = [next(fresh) for _ in range(random.randint(0, CONTEXT - len(model[slot])))]
            pool.append(slot, ids)
            model[slot] += ids
        elif kind == "write":
            start = random.randint(0, len(model[slot]))
            ids = [next(fresh) for _ in range(random.randint(0, CONTEXT - start))]
            pool.write(slot, start, np.array(ids, np.int64))
            model[slot][start : start + len(ids)] = ids
        elif kind == "truncate":
            length = random.randint(0, len(model[slot]))
            assert pool.truncate(slot, length).tolist() == model[slot][length:]
            del model[slot][length:]
        elif kind == "free":
            assert pool.free(slot).tolist() == model.pop(slot)
        elif kind == "clear":
            pool.clear()
            model.clear()
        pool.check_integrity()
        assert {s: pool.tokens(s).tolist() for s in model} == model
        assert pool.lengths.tolist() == [len(model.get(s, [])) for s in range(REQUESTS + 1)]
        slots = [random.randint(0, REQUESTS) for _ in range(ROWS)]
        starts, lengths = ([random.randint(0, CONTEXT) for _ in range(ROWS)] for _ in range(2))
        taken = [model.get(s, [])[a : a + n] for s, a, n in zip(slots, starts, lengths, strict=True)]
        host = pool.kv_indices(slots, lengths, starts, capacity=ROWS * CONTEXT, fill=7)
        assert host.offsets.tolist() == [0, *np.cumsum([len(t) for t in taken])]
        flat = [i for row in taken for i in row]
        assert host.indices.tolist() == flat + [7] * (ROWS * CONTEXT - len(flat))
        if number % 8 == 0:
            table = apply(table, pool.drain(CELLS))
            given = (np.array(x, np.int32) for x in (slots, lengths, starts))
            device = kv_indices(table, *given, capacity=ROWS * CONTEXT, fill=7)
            np.testing.assert_array_equal(device.indices, host.indices)
            np.testing.assert_array_equal(device.offsets, host.offsets)
            ids, seen = rows(table, np.arange(REQUESTS + 1, dtype=np.int32), CONTEXT)
            expected = [model.get(s, []) for s in range(REQUESTS + 1)]
            assert ids.tolist() == [r + [0] * (CONTEXT - len(r)) for r in expected]
            assert seen.tolist() == [len(r) for r in expected]


def test_all_of_a_request_and_a_capacity_that_is_too_small() -> None:
    pool = ReqToTokenPool(2, 8)
    table = TokenTable.init(pool)
    pool.alloc(2)
    pool.append(1, [3, 4, 5])
    pool.append(2, [9, 8])
    table = apply(table, pool.drain())
    assert pool.kv_indices([2, 1]).indices.tolist() == [9, 8, 3, 4, 5]
    with pytest.raises(PoolError, match="5 token ids do not fit a capacity of 4"):
        pool.kv_indices([2, 1], capacity=4)
    cut = kv_indices(table, jnp.array([2, 1]), capacity=4)
    assert cut.indices.tolist() == [9, 8, 3, 4] and int(cut.offsets[-1]) == 5
    assert kv_indices(table, jnp.zeros(0, jnp.int32), capacity=2, fill=3).indices.tolist() == [3, 3]
    assert pool.kv_indices([], capacity=2, fill=3).indices.tolist() == [3, 3]
    with pytest.raises(ShapeError, match="of a pool of 3 requests for a table of 2"):
        table.apply(ReqToTokenPool(3, 8).drain())


def test_extend_keeps_pace_with_the_host() -> None:
    pool = ReqToTokenPool(3, 8)
    table = TokenTable.init(pool)
    pool.alloc(3)
    pool.append(1, [3, 4])
    table = apply(table, pool.drain(8))
    table = jax.jit(TokenTable.extend, donate_argnums=0)(table, jnp.array([3, 1, 0]), jnp.array([7, 9, 0]))
    pool.append(1, [9])
    pool.append(3, [7])
    ids, lengths = rows(table, np.arange(4, dtype=np.int32), 4)
    assert ids.tolist() == [[0] * 4, [3, 4, 9, 0], [0] * 4, [7, 0, 0, 0]] and lengths.tolist() == pool.lengths.tolist()


def test_updates_are_in_place() -> None:
    pool = ReqToTokenPool(100, 1000)
    pool.alloc(2)
    pool.append(2, np.arange(1, 50))

    def step(ids: jax.Array, lengths: jax.Array, update: Any) -> tuple[TokenTable, Any]:
        """The lengths are replaced, not updated: only the ids are to be in place."""
        table = TokenTable(ids, lengths).apply(update)
        return table, table.kv_indices(jnp.array([2, 0]), capacity=CAPACITY)

    empty = TokenTable.init(pool)
    table, flat = assert_in_place(step, empty.ids, empty.lengths, pool.drain(64))
    assert flat.indices.tolist() == list(range(1, CAPACITY + 1)) and int(table.lengths[2]) == 49
