"""The planner: predicted bytes are allocated bytes, answers are maximal, inverse questions agree."""

from __future__ import annotations

import bisect
import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager, init_cache, init_host_cache, plan_capacity
from dsv4_jax.capacity import SNAPSHOT_FRACTION, capacity, plan_host_capacity
from dsv4_jax.config import AttentionType
from dsv4_jax.errors import CapacityError, LayoutError
from dsv4_jax.manager import HostSize
from dsv4_jax.records import block_record, snapshot_record, state_pages

SWA_ONLY = DSV4Config.tiny(layer_types=(AttentionType.SWA,) * 2)
CONFIGS = {"tiny": DSV4Config.tiny(), "swa_only": SWA_ONLY, "flash": DSV4Config.flash(), "pro": DSV4Config.pro()}
layouts = st.builds(
    lambda model, kv, index, drafts, hca: CacheLayout(CONFIGS[model], kv, index, draft_tokens=drafts, hca_state=hca),
    st.sampled_from(list(CONFIGS)),
    st.sampled_from(["fp8", "bf16", "f32"]),
    st.sampled_from(["fp4", "bf16"]),
    st.integers(0, 4),
    st.sampled_from(["online", "raw"]),
)
requests = st.integers(1, 64)
snapshots = st.integers(0, 9)
fractions = st.one_of(st.none(), st.floats(0, 0.9))


def fits_int32(layout: CacheLayout, r: int, columns: int, p: int) -> bool:
    """Whether a cache of this size has row ids on the device."""
    try:
        layout.check_size(CacheSize(r * columns, r, columns, p))
    except LayoutError:
        return False
    return True


def bytes_of(layout: CacheLayout, r: int, columns: int, p: int) -> int:
    return layout.total_bytes(CacheSize(r * columns, r, columns, p))


@settings(max_examples=20)  # every new shape is a compile
@given(st.integers(1, 4), st.integers(1, 700), st.integers(0, 3), st.integers(0, 2), st.sampled_from(["f32", "fp8"]))
def test_predicted_bytes_are_allocated_bytes(r, context, p, drafts, kv):
    layout = CacheLayout(CONFIGS["tiny"], kv, draft_tokens=drafts)
    answer = capacity(layout, max_requests=r, max_context=context, num_snapshots=p)
    cache = init_cache(layout, answer.size)
    assert answer.total_bytes == sum(x.nbytes for x in cache.arrays.values())
    for pool, size in answer.bytes_by_pool.items():
        assert size == sum(x.nbytes for x in cache.pool(pool)), pool
    assert sum(answer.bytes_by_pool.values()) == answer.total_bytes
    assert KVCacheManager(layout, answer.size).memory_bytes() == answer.total_bytes


@given(layouts, requests, st.integers(0, 10**12), snapshots)
def test_longest_context_is_maximal(layout, r, spare, p):
    memory = bytes_of(layout, r, 1, p) + spare
    answer = capacity(layout, hbm_bytes=memory, max_requests=r, num_snapshots=p)
    size = answer.size
    limit = layout.cfg.max_position_embeddings
    assert 0 <= answer.leftover_bytes == memory - answer.total_bytes
    assert size == CacheSize(r * size.max_blocks_per_request, r, size.max_blocks_per_request, p)
    if answer.limited_by == "context":
        assert answer.max_context == limit and size.max_blocks_per_request == layout.blocks_for(limit)
    else:
        assert answer.max_context == size.max_blocks_per_request * layout.block_tokens < limit
        assert bytes_of(layout, r, size.max_blocks_per_request + 1, p) > memory


@given(layouts, st.integers(1, 4096), st.integers(0, 10**12), snapshots)
@example(CacheLayout(CONFIGS["tiny"]), 1, 10**12, 0)
def test_most_requests_is_maximal(layout, context, spare, p):
    columns = layout.blocks_for(context)
    memory = bytes_of(layout, 1, columns, p) + spare
    try:
        answer = capacity(layout, hbm_bytes=memory, max_context=context, num_snapshots=p)
    except CapacityError as error:
        # As many requests as have row ids leave memory to spare, for at least one more.
        assert "int32" in str(error)
        most = bisect.bisect(range(1, 2**31), False, key=lambda r: not fits_int32(layout, r, columns, p))
        one_more = bytes_of(layout, 2, columns, p) - bytes_of(layout, 1, columns, p)
        assert bytes_of(layout, most, columns, p) + one_more <= memory
        return
    assert answer.total_bytes == bytes_of(layout, answer.max_requests, columns, p) <= memory
    assert bytes_of(layout, answer.max_requests + 1, columns, p) > memory
    assert answer.full_requests == answer.max_requests


@given(layouts, requests, st.integers(1, 4096), snapshots)
def test_inverse_questions_agree(layout, r, context, p):
    forward = capacity(layout, max_requests=r, max_context=context, num_snapshots=p)
    memory = forward.total_bytes
    assert plan_capacity(layout, hbm_bytes=memory, max_context=context, num_snapshots=p) == forward.size
    back = capacity(layout, hbm_bytes=memory, max_requests=r, num_snapshots=p)
    assert back.size == forward.size and context <= back.max_context < context + layout.block_tokens
    every = capacity(layout, hbm_bytes=memory, max_requests=r, max_context=context, num_snapshots=p)
    assert (every.size, every.limited_by, every.leftover_bytes) == (forward.size, "none", 0)
    with pytest.raises(CapacityError, match="too few"):
        capacity(layout, hbm_bytes=bytes_of(layout, 1, 1, p) - 1, max_context=context, num_snapshots=p)


@given(layouts, requests, st.integers(1, 4096), st.integers(1, 10**9), snapshots)
def test_all_three_given(layout, r, context, memory, p):
    columns = layout.blocks_for(context)
    least = layout.total_bytes(CacheSize(columns, r, columns, p))
    if memory < least:
        with pytest.raises(CapacityError, match=f"take {least} .* {least - memory} bytes are missing"):
            capacity(layout, hbm_bytes=memory, max_requests=r, max_context=context, num_snapshots=p)
        return
    answer = capacity(layout, hbm_bytes=memory, max_requests=r, max_context=context, num_snapshots=p)
    size = answer.size
    assert (size.num_slots, size.max_blocks_per_request, size.num_snapshots) == (r, columns, p)
    assert columns <= size.num_blocks and answer.total_bytes <= memory
    if size.num_blocks < r * columns:
        assert answer.leftover_bytes < layout.bytes_per_block and answer.limited_by in ("blocks", "slots")
    else:
        assert answer.limited_by == "none" and answer.full_requests == r
        if p and layout.bytes_per_block:  # prefixes stay cached in what the requests leave
            assert answer.leftover_bytes < layout.bytes_per_block
        else:
            assert size.num_blocks == r * columns
    assert 1 <= answer.full_requests == min(size.num_blocks // columns, r)


@given(layouts, requests, st.integers(0, 8 * 10**10), st.integers(0, 10**10), fractions)  # below what int32 can number
def test_more_memory_never_holds_less(layout, r, spare, more, f):
    memory = capacity(layout, max_requests=r, max_context=1, snapshot_fraction=f).total_bytes + spare
    small, large = (capacity(layout, hbm_bytes=m, max_requests=r, snapshot_fraction=f) for m in (memory, memory + more))
    assert small.max_context <= large.max_context and small.total_bytes <= large.total_bytes
    few = capacity(layout, hbm_bytes=memory, max_context=1, snapshot_fraction=f)
    many = capacity(layout, hbm_bytes=memory + more, max_context=1, snapshot_fraction=f)
    assert few.max_requests <= many.max_requests


def split(layout: CacheLayout, blocks: int, fraction: float | None) -> int:
    """Snapshots beside so many blocks, from the definition: the fewest that take their share, at least one."""
    f = SNAPSHOT_FRACTION if fraction is None else fraction
    taken = blocks * layout.bytes_per_block
    return max(math.ceil(f / (1 - f) * taken / layout.bytes_per_slot), 1) if f else 0


@given(layouts, requests, st.integers(1, 4096), st.integers(0, 10**9), fractions)
def test_snapshots_take_their_share_of_the_bytes(layout, r, context, spare, f):
    columns = layout.blocks_for(context)

    def bytes_for(blocks: int, requests: int, width: int) -> int:
        return layout.total_bytes(CacheSize(blocks, requests, width, split(layout, blocks, f)))

    asked = capacity(layout, max_requests=r, max_context=context, snapshot_fraction=f)
    assert asked.size == CacheSize(r * columns, r, columns, split(layout, r * columns, f))
    memory = asked.total_bytes + spare
    most = capacity(layout, hbm_bytes=memory, max_context=context, snapshot_fraction=f)
    n = most.max_requests
    assert most.size == CacheSize(n * columns, n, columns, split(layout, n * columns, f))
    assert bytes_for(n * columns, n, columns) <= memory < bytes_for((n + 1) * columns, n + 1, columns)
    longest = capacity(layout, hbm_bytes=memory, max_requests=r, snapshot_fraction=f)
    width = longest.size.max_blocks_per_request
    assert longest.size == CacheSize(r * width, r, width, split(layout, r * width, f))
    assert bytes_for(r * width, r, width) <= memory
    assert longest.limited_by == "context" or bytes_for(r * (width + 1), r, width + 1) > memory
    every = capacity(layout, hbm_bytes=memory, max_requests=r, max_context=context, snapshot_fraction=f).size
    blocks = every.num_blocks
    assert every == CacheSize(blocks, r, columns, split(layout, blocks, f))
    if f == 0 or not layout.bytes_per_block:
        assert every == asked.size
    else:
        assert bytes_for(blocks, r, columns) <= memory < bytes_for(blocks + 1, r, columns)
    least = bytes_for(columns, r, columns)
    if r > 1 and (tight := (least + asked.total_bytes) // 2) < asked.total_bytes:
        size = capacity(layout, hbm_bytes=tight, max_requests=r, max_context=context, snapshot_fraction=f).size
        assert size == CacheSize(size.num_blocks, r, columns, split(layout, size.num_blocks, f))
        assert columns <= size.num_blocks <= r * columns
        assert bytes_for(size.num_blocks, r, columns) <= tight < bytes_for(size.num_blocks + 1, r, columns)


@given(layouts, st.integers(1, 10**11))
def test_a_host_tier_is_as_many_pages_as_fit(layout, memory):
    page = block_record(layout).bytes or snapshot_record(layout).bytes
    least = page * (1 + bool(block_record(layout).bytes) + state_pages(layout, 0))
    if memory < least:
        with pytest.raises(CapacityError, match=f"host_bytes: {memory} bytes are too few: .* take {least}"):
            plan_host_capacity(layout, memory)
        return
    pages = plan_host_capacity(layout, memory)
    assert (1 + pages) * page <= memory < (2 + pages) * page


def test_nothing_is_set_aside_for_states_in_blocks():
    layout = CacheLayout(CONFIGS["flash"])
    facts = dict(hbm_bytes=4 << 30, max_requests=8, max_context=32768)
    apart, together = capacity(layout, **facts), capacity(layout, **facts, states="blocks")
    assert together.size.num_snapshots == 0 < apart.size.num_snapshots
    assert together.size.num_blocks > apart.size.num_blocks and together.leftover_bytes < layout.bytes_per_block
    with pytest.raises(CapacityError, match="states"):
        capacity(layout, **facts, states="pages")


def test_a_host_tier_is_allocated_as_planned():
    layout = CacheLayout(CONFIGS["tiny"])
    host = init_host_cache(layout, HostSize(plan_host_capacity(layout, 10**6)).num_pages)
    assert 0.97 * 10**6 < host.pages.nbytes <= 10**6


def test_more_host_memory_than_pages_have_ids():
    layout = CacheLayout(CONFIGS["flash"])
    most = 2**31 * (page := block_record(layout).bytes)
    assert plan_host_capacity(layout, most) == 2**31 - 1
    for memory in (most + page, 2**62):
        with pytest.raises(CapacityError, match=f"host_bytes: page ids are int32 .*: {most} bytes, got {memory}"):
            plan_host_capacity(layout, memory)


def test_all_memory_is_for_the_cache_as_far_as_rows_have_ids():
    """Live requests left most of the memory unused, although prefixes could have stayed in it."""
    layout, asked = CacheLayout(CONFIGS["flash"]), dict(max_requests=4, max_context=1000)
    small, large, huge = (plan_capacity(layout, hbm_bytes=m * 10**9, **asked) for m in (1, 20, 10**6))
    assert 4 * 8 < small.num_blocks < large.num_blocks < huge.num_blocks
    assert layout.total_bytes(large) > 0.999 * 20 * 10**9
    layout.check_size(huge)
    with pytest.raises(LayoutError, match="int32"):
        layout.check_size(
            dataclasses.replace(
                huge, num_blocks=huge.num_blocks + 1, num_snapshots=split(layout, huge.num_blocks + 1, None)
            )
        )
    assert plan_capacity(layout, hbm_bytes=10**15, num_snapshots=0, **asked).num_blocks == 4 * 8


def test_known_numbers():
    """Flash, FP8 entries and FP4 keys: from the published row sizes."""
    layout = CacheLayout(DSV4Config.flash())
    block = 21 * 32 * (584 + 68) + 20 * 584
    slot = 43 * 128 * 584 + 21 * 8 * (4 * 512 + 4 * 128) * 4 + 20 * 3 * 512 * 4
    answer = capacity(layout, max_requests=64, max_context=131072, num_snapshots=0)
    assert answer.size == CacheSize(64 * 1024, 64, 1024)
    assert answer.total_bytes == (64 * 1024 + 1) * block + 65 * (slot + 4 * 1024)
    assert capacity(layout, hbm_bytes=80 * 2**30, max_context=131072, num_snapshots=0).max_requests == (
        (80 * 2**30 - block - slot - 4096) // (1024 * block + slot + 4096)
    )
    cached = capacity(layout, max_requests=64, max_context=131072, snapshot_fraction=0.25).size
    assert cached.num_snapshots == -(64 * 1024 * block // (-3 * slot)) == 1943


def test_weights_leave_less_for_the_cache():
    layout, weights = CacheLayout(CONFIGS["flash"]), 82_417_000_000
    given = {"max_context": 8192, "num_snapshots": 0}
    whole = capacity(layout, hbm_bytes=141 * 10**9, weight_bytes=weights, **given)
    assert whole.size == capacity(layout, hbm_bytes=141 * 10**9 - weights, **given).size
    assert (whole.hbm_bytes, whole.weight_bytes) == (141 * 10**9, weights)
    assert whole.leftover_bytes == whole.hbm_bytes - weights - whole.total_bytes >= 0
    with pytest.raises(CapacityError, match=f"hbm_bytes: 1000 bytes are too few: weights take {weights}"):
        plan_capacity(layout, hbm_bytes=1000, weight_bytes=weights, max_context=8192)


def test_what_binds():
    layout = CacheLayout(DSV4Config.flash())
    assert capacity(layout, hbm_bytes=10**10, max_context=128).limited_by == "slots"
    assert capacity(layout, hbm_bytes=10**10, max_context=100_000).limited_by == "blocks"
    assert capacity(layout, hbm_bytes=10**12, max_requests=1).limited_by == "context"
    assert capacity(layout, hbm_bytes=10**12, max_requests=1, max_context=128).limited_by == "none"


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({}, "give at least two of hbm_bytes, max_requests and max_context"),
        ({"hbm_bytes": 10**9}, r"missing: max_requests, max_context"),
        ({"max_requests": 0, "max_context": 5}, "max_requests must be an integer of at least 1, got 0"),
        ({"max_requests": 2.0, "max_context": 5}, "max_requests must be an integer of at least 1, got 2.0"),
        ({"max_requests": True, "max_context": 5}, "max_requests must be an integer"),
        ({"max_requests": 2, "max_context": 4097}, "max_context: 4097 tokens exceed the model's 4096"),
        ({"max_requests": 2, "max_context": 5, "num_snapshots": -1}, "num_snapshots must be an integer of at least 0"),
        (
            {"max_requests": 2, "max_context": 5, "snapshot_fraction": 1},
            r"snapshot_fraction must be a number in \[0, 1\)",
        ),
        ({"max_requests": 2, "max_context": 5, "snapshot_fraction": "1"}, "snapshot_fraction must be a number"),
        (
            {"max_requests": 2, "max_context": 5, "snapshot_fraction": 0.5, "num_snapshots": 3},
            "give either num_snapshots or snapshot_fraction",
        ),
        ({"hbm_bytes": 1000, "max_requests": 3}, r"hbm_bytes: 1000 bytes are too few: 3 request\(s\), 3 at 128 tokens"),
    ],
)
def test_refusals(given_, message):
    with pytest.raises(CapacityError, match=message):
        plan_capacity(CacheLayout(CONFIGS["tiny"]), **given_)


@pytest.mark.parametrize(
    ("given_", "pool"),
    [
        ({"max_requests": 4096, "max_context": 2**20}, "csa"),
        ({"max_requests": 10**6, "max_context": 128}, "swa"),
        ({"hbm_bytes": 10**13, "max_context": 2**20}, "csa"),
        ({"hbm_bytes": 10**13, "max_context": 1}, "swa"),
        ({"hbm_bytes": 10**13, "max_requests": 4096}, "csa"),
        ({"max_requests": 1, "max_context": 1, "num_snapshots": 10**6}, "swa"),
        ({"hbm_bytes": 10**15, "max_requests": 4096, "max_context": 2**20}, "csa"),
    ],
)
def test_more_rows_than_int32_has(given_, pool):
    layout = CacheLayout(CONFIGS["flash"])
    with pytest.raises(CapacityError, match=f"pool '{pool}': .* rows, row ids are int32 and reach 2147483646"):
        plan_capacity(layout, **{"num_snapshots": 0} | given_)


@pytest.mark.parametrize(
    "value", [True, 1.0, float("nan"), "1", [1], 0, -1, 2**63, 10**5000, -(10**5000)], ids=range(10)
)
def test_counts_of_odd_types(value):
    layout = CacheLayout(CONFIGS["tiny"])
    for name in ("hbm_bytes", "max_requests", "max_context", "num_snapshots"):
        if (name, value) == ("num_snapshots", 0):
            continue
        with pytest.raises(CapacityError):
            plan_capacity(layout, **dict(max_requests=1, max_context=9) | {name: value})


def test_shares_of_any_real_type():
    """Numpy's float32 and float16 were refused as no number in [0, 1)."""
    layout = CacheLayout(CONFIGS["tiny"])
    for share in (np.float16(0.25), np.float32(0.25), np.float64(0.25), Fraction(1, 4)):
        size = plan_capacity(layout, max_requests=3, max_context=500, snapshot_fraction=share)
        assert size == plan_capacity(layout, max_requests=3, max_context=500, snapshot_fraction=0.25)
        assert type(size.num_snapshots) is int
    assert plan_capacity(layout, max_requests=3, max_context=500, snapshot_fraction=np.int8(0)).num_snapshots == 0
    for share in (
        np.float32(1),
        np.float32("nan"),
        False,
        np.False_,
        np.array(0.25),
        0.25j,
        Fraction(-1, 9),
        10**400,
        Fraction(10**30 - 1, 10**30),
    ):
        with pytest.raises(CapacityError, match=r"snapshot_fraction must be a number in \[0, 1\), got "):
            plan_capacity(layout, max_requests=3, max_context=500, snapshot_fraction=share)


def test_units_beyond_int32():
    for given_ in ({"max_requests": 2**40, "max_context": 5}, {"hbm_bytes": 2**62, "max_context": 5}):
        with pytest.raises(CapacityError, match="CacheSize"):
            plan_capacity(CacheLayout(SWA_ONLY), **given_)


def test_report_is_plain_data():
    answer = capacity(CacheLayout(CONFIGS["tiny"]), hbm_bytes=10**8, max_requests=3)
    report = answer.as_dict()
    assert report["size"] == dataclasses.asdict(answer.size)
    assert report["total_bytes"] + report["leftover_bytes"] == 10**8
    assert sum(report["bytes_by_pool"].values()) == report["total_bytes"]
