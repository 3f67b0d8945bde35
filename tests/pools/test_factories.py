"""Factories and the capacity planner: what is planned is what is allocated, and it is the most that fits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.errors import CapacityError, PoolError
from dsv4_jax.pools import GDNSpec, KVPool, TokenToKVPoolAllocator
from dsv4_jax.pools.factories import make_full_attention_net_mem_pool, make_gdn_pool, make_req_to_token_pool, plan_pools

SHAPE = dict(layers=2, k_heads=2, k_dim=8, v_heads=1, v_dim=4)
GDN = GDNSpec(max_requests=3, layers=2, heads=1, k_dim=4, v_dim=4, conv_dim=4, conv_kernel=3, track_slots=1)


def test_factories() -> None:
    pool, allocator = make_full_attention_net_mem_pool(32, 2, 2, 8, 1, 4, storage="fp8", page_size=4)
    assert pool.spec.size == allocator.size == 32 and pool.spec.heads("v") == (1, 4)
    ids = allocator.alloc(32)
    stored = pool.set_kv_buffer(1, jnp.asarray(ids), jnp.ones((32, 16)), jnp.ones((32, 4)))
    assert (np.asarray(stored.gather_kv(1, ids)[0]) == 1).all()  # every one of them is a row
    assert int(ids.max()) == pool.spec.last < pool.spec.rows
    host, table = make_req_to_token_pool(3, 10)
    assert table.ids.shape == (4, 10) and host.alloc() == [1]
    states, slots = make_gdn_pool(GDN)
    assert states.recurrent.shape[1] == GDN.slots and slots.alloc_track_slot() == 4


@given(
    st.integers(0, 200_000),
    st.floats(0.5, 1.0),
    st.sampled_from(["bf16", "f32", "fp8"]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 300)),
    st.sampled_from([1, 4, 16]),
)
def test_the_plan_is_what_is_allocated_and_the_most_that_fits(
    after: int, fraction: float, storage: str, states: bool, most: int | None, page: int
) -> None:
    given: dict[str, Any] = dict(SHAPE, storage=storage, page_size=page, max_requests=3, max_context=20)
    try:
        plan = plan_pools(
            free_before_model=200_000,
            free_after_model=after,
            memory_fraction=fraction,
            max_tokens=most,
            gdn=GDN if states else None,
            **given,
        )
    except CapacityError as error:
        assert str(after) in str(error) and "max_tokens" in str(error)
        return
    pool = jax.eval_shape(lambda: KVPool.init(plan.kv))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool)) == plan.kv_bytes
    _, table = make_req_to_token_pool(3, 20)
    assert sum(x.nbytes for x in jax.tree.leaves(table)) == plan.table_bytes
    assert plan.gdn_bytes == (GDN.total_bytes if states else 0)
    assert plan.total_bytes <= plan.budget_bytes <= after
    assert plan.limited_by == "memory" or plan.tokens == most // page * page
    assert plan.tokens == plan.kv.size == TokenToKVPoolAllocator(plan.tokens, page).size
    if plan.limited_by == "memory":  # eight rows or a page more would not fit
        assert plan.total_bytes + max(8, page) * plan.kv.bytes_per_token > plan.budget_bytes


def test_the_refusal_lists_every_term() -> None:
    with pytest.raises(CapacityError) as info:
        plan_pools(
            free_before_model=100_000,
            free_after_model=20_000,
            memory_fraction=0.9,
            gdn=GDN,
            max_requests=3,
            max_context=700,
            max_tokens=50,
            **SHAPE,
        )
    text = str(info.value)
    for term in (20_000, 10_000, 100_000, 0.9, GDN.total_bytes, 4 * 4 * 701, "max_tokens 50", "80 a token"):
        assert str(term) in text, (term, text)


@pytest.mark.parametrize(
    "bad",
    [
        {"memory_fraction": 0},
        {"memory_fraction": 1.1},
        {"memory_fraction": True},
        {"free_before_model": 0},
        {"max_tokens": 0},
        {"page_size": 0},
        {"layers": 0},
        {"storage": "int4"},
        {"max_requests": -1},
        {"gdn": 5},
    ],
    ids=str,
)
def test_refuses(bad: dict[str, Any]) -> None:
    good: dict[str, Any] = dict(SHAPE, free_before_model=10**6, free_after_model=10**6, memory_fraction=0.9)
    with pytest.raises(PoolError):
        plan_pools(**(good | bad))


def test_states_larger_than_int64_has_bytes_for_leave_no_room() -> None:
    spec = GDNSpec(2**33, 2**33, 2**10, 2**10, 2**10, 1, 2)
    assert spec.total_bytes == (2**33 + 1) * 2**33 * (2**30 * 4 + 2)
    with pytest.raises(CapacityError, match=str(spec.total_bytes)):
        plan_pools(free_before_model=10**9, free_after_model=10**9, memory_fraction=0.9, gdn=spec, **SHAPE)
