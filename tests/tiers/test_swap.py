"""swap: every leaf and layer travels bit-exactly, and nothing else changes; one class for all implementations."""

from __future__ import annotations

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax.cache import KVCache, init_cache
from dsv4_jax.config import DSV4Config
from dsv4_jax.errors import ImplementationError, LayoutError, ShapeError
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.plan import StateSwapPlan, SwapPlan
from dsv4_jax.records import state_pages
from dsv4_jax.sharding import cache_sharding
from dsv4_jax.tiers import record_copy, swap
from dsv4_jax.tiers.host_cache import HostCache, init_host_cache
from dsv4_jax.tiers.swap_plan import plan_swap

from .. import native
from .swapping import (
    CFG,
    FORMATS,
    PAGES,
    SIZE,
    STATES,
    assert_image,
    image,
    jitted,
    model_in,
    model_out,
    model_restore,
    model_snapshot,
    random_cache,
    random_host,
)

LAYOUT = CacheLayout(CFG)
OTHER = dict(draft_tokens=2)  # of the caches that states are restored to


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    native.load_cpu()


def random_plan(rng: np.random.Generator, direction: str, length: int = 6) -> SwapPlan:
    n = int(rng.integers(0, length + 1))
    blocks = rng.permutation(np.arange(1, SIZE.num_blocks + 1))[:n]
    records = rng.permutation(np.arange(1, PAGES + 1))[:n]
    sizes = dict(num_device=SIZE.num_blocks, num_host=PAGES, length=length)
    return plan_swap(direction, blocks, records, **sizes)


def ids(values: list) -> np.ndarray:
    return np.array(values, np.int32)


class TestXla:
    implementation = "xla"

    def run(self, operation: str, *args, donate: bool = True):
        return jitted(operation, donate)(*args, implementation=self.implementation)

    @pytest.mark.parametrize(
        "formats",
        [FORMATS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FORMATS[1:3]), FORMATS[3]],
        ids="/".join,
    )
    def test_ten_rounds_of_random_subsets(self, formats):
        layout = CacheLayout(CFG, *formats)
        cache, host, rng = random_cache(layout, 1), random_host(layout, 2), np.random.default_rng(3)
        want, pool = image(cache), np.array(host.pages)
        for i in range(10):
            out, back = random_plan(rng, "out"), random_plan(rng, "in")
            host = self.run("swap_out", cache, host, out)
            model_out(layout, want, pool, out)
            assert np.array_equal(host.pages, pool), (i, out)
            cache = self.run("swap_in", cache, host, back)
            model_in(layout, want, pool, back)
            assert_image(cache, want, (i, back))
        assert host.pages.sharding.memory_kind == "pinned_host"

    @pytest.mark.parametrize(("formats", "options"), STATES, ids=str)
    def test_states_of_slots(self, formats, options):
        """By position, from rings of any size to rings of any other; what no record holds is zero afterwards."""
        layout, other = CacheLayout(CFG, *formats, **options), CacheLayout(CFG, *formats, **{**options, **OTHER})
        cache, target, host = random_cache(layout, 1), random_cache(other, 2), random_host(layout, 3)
        want, pool, most = image(target), np.array(host.pages), state_pages(layout, 1)
        few = state_pages(layout, 0)
        assert few < most <= 10
        pages = np.zeros((3, most), np.int32)  # of the second state those of a snapshot; the third is padding
        pages[0], pages[1, :few] = range(13, 13 - most, -1), (1, 3, 2)[:few]
        for tokens in ((128, 0, 0), (1, 3, 0), (257, 128, 0), (126, 639, 5), (2**31 - 1, 2**31 - 128, -9)):
            out = StateSwapPlan(ids([3, 1, 0]), pages, ids(tokens))
            host = self.run("snapshot", cache, host, out)
            model_snapshot(layout, image(cache), pool, out)
            assert np.array_equal(host.pages, pool), tokens
            back = out._replace(device_ids=ids([2, 1, 0]))
            target = self.run("restore", target, host, back)
            model_restore(other, want, pool, back)
            assert_image(target, want, tokens)

    def test_any_records_of_states_stay_inside(self):
        """Whatever int32 a plan of states holds: pairs of existing slots and records move, all else keeps its bytes."""
        cache, host = random_cache(LAYOUT, 4), random_host(LAYOUT, 5)
        before, records = image(cache), np.array(host.pages)
        any_id = st.integers(-2, PAGES + 2) | st.integers(-(2**31), 2**31 - 1)
        some = st.lists(any_id, min_size=4, max_size=4, unique=True)

        @hypothesis.settings(max_examples=30)
        @hypothesis.given(some, some, st.lists(any_id | st.integers(0, 600), min_size=2, max_size=2))
        def check(slots, named, tokens):
            plan = StateSwapPlan(ids(slots[:2]), ids([named[:2], named[2:]]), ids(tokens))
            pool, want = records.copy(), {name: data.copy() for name, data in before.items()}
            model_snapshot(LAYOUT, before, pool, plan)
            assert np.array_equal(self.run("snapshot", cache, host, plan, donate=False).pages, pool)
            model_restore(LAYOUT, want, records, plan)
            assert_image(self.run("restore", cache, host, plan, donate=False), want, plan)

        check()
        assert_image(cache, before)

    def test_any_ids_stay_inside(self):
        """Whatever int32 the ids hold: pairs of existing units move, all else keeps its bytes."""
        cache, host = random_cache(LAYOUT, 4), random_host(LAYOUT, 5)
        before, records = image(cache), np.array(host.pages)
        near = st.integers(-2, max(SIZE.num_blocks, PAGES) + 2)
        some = st.lists(near | st.integers(-(2**31), 2**31 - 1), min_size=6, max_size=6)

        @hypothesis.settings(max_examples=40)
        @hypothesis.given(some, some)
        def check(device, records_named):
            plan = SwapPlan(ids(device), ids(records_named))
            pool = records.copy()
            model_out(LAYOUT, before, pool, plan)
            after = np.asarray(self.run("swap_out", cache, host, plan, donate=False).pages)
            pairs = [(d, h) for d, h in zip(*plan, strict=True) if 0 < d <= SIZE.num_blocks and 0 < h <= PAGES]
            unsure = {h for i, (_, h) in enumerate(pairs) if h in [x for _, x in pairs[:i]]}  # written twice
            kept = [i for i in range(1 + PAGES) if i not in unsure]
            assert np.array_equal(after[kept], pool[kept])
            want = {name: data.copy() for name, data in before.items()}
            model_in(LAYOUT, want, records, plan)
            got = self.run("swap_in", cache, host, plan, donate=False)
            if len({d for d, _ in pairs}) == len(pairs):
                assert_image(got, want, plan)

        check()
        assert_image(cache, before)
        assert np.array_equal(host.pages, records)

    def test_inside_scan(self):
        """Both states are the carry; each round reads what the one before wrote."""
        rng = np.random.default_rng(6)
        plans = [(random_plan(rng, "out"), random_plan(rng, "in")) for _ in range(5)]

        def step(state, plan):
            cache, host = state
            host = swap.swap_out(cache, host, plan[0], implementation=self.implementation)
            return (swap.swap_in(cache, host, plan[1], implementation=self.implementation), host), None

        cache, host = random_cache(LAYOUT, 7), random_host(LAYOUT, 8)
        want, pool = image(cache), np.array(host.pages)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *plans)
        loop = jax.jit(lambda state, plans: jax.lax.scan(step, state, plans)[0], donate_argnums=0)
        cache, host = loop((cache, host), stacked)
        for out, back in plans:
            model_out(LAYOUT, want, pool, out)
            model_in(LAYOUT, want, pool, back)
        assert_image(cache, want)
        assert np.array_equal(host.pages, pool)

    def test_without_donation_the_old_state_stays(self):
        cache, host = random_cache(LAYOUT, 9), random_host(LAYOUT, 10)
        before, records = image(cache), np.array(host.pages)
        plan = SwapPlan(ids([1, 7]), ids([6, 2]))
        out = self.run("swap_out", cache, host, plan, donate=False)
        self.run("swap_in", cache, host, plan, donate=False)
        assert_image(cache, before)
        assert np.array_equal(host.pages, records) and not np.array_equal(out.pages, records)

    def test_four_shards(self):
        """Each shard swaps between its own blocks and its own records, by its own ids."""
        if jax.device_count() < 4:
            pytest.skip("needs four devices")
        mesh = jax.make_mesh((4,), ("data",))
        single, split = random_cache(LAYOUT, 11, shards=4), NamedSharding(mesh, P("data"))
        host = init_host_cache(LAYOUT, PAGES, sharding=split)
        assert host.pages.shape[0] == 4 * (1 + PAGES)
        want, pool = image(single), np.array(host.pages)
        cache = jax.device_put(single, cache_sharding(LAYOUT, mesh))
        rng = np.random.default_rng(12)
        outs, backs = ([random_plan(rng, d) for _ in range(4)] for d in ("out", "in"))

        def local(cache, host, out, back):
            host = swap.swap_out(cache, host, out, implementation=self.implementation)
            return swap.swap_in(cache, host, back, implementation=self.implementation), host

        # check_vma as the model's steps have it: a plain dynamic_update_slice in a scan does not say how it varies.
        options = dict(mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=self.implementation == "ffi")
        step = jax.jit(jax.shard_map(local, **options), donate_argnums=(0, 1))
        plans = [jax.device_put(SwapPlan(*map(np.concatenate, zip(*p, strict=True))), split) for p in (outs, backs)]
        cache, host = step(cache, host, *plans)
        records, rows = pool.shape[0] // 4, {name: len(data) // 4 for name, data in want.items()}
        for i, (out, back) in enumerate(zip(outs, backs, strict=True)):
            mine = {name: data[i * rows[name] : (i + 1) * rows[name]] for name, data in want.items()}
            mine_pool = pool[i * records : (i + 1) * records]
            model_out(LAYOUT, mine, mine_pool, out)
            model_in(LAYOUT, mine, mine_pool, back)
        assert_image(cache, want)
        assert np.array_equal(host.pages, pool) and host.pages.sharding.memory_kind == "pinned_host"

    def test_empty_plans_and_other_layouts(self):
        cache, host = random_cache(LAYOUT, 13), random_host(LAYOUT, 14)
        nothing = SwapPlan(ids([]), ids([]))
        assert swap.swap_out(cache, host, nothing, implementation=self.implementation).pages is host.pages
        assert swap.swap_in(cache, host, nothing, implementation=self.implementation) is cache
        with pytest.raises(LayoutError, match="block_tokens=256"):
            swap.swap_out(cache, init_host_cache(CacheLayout(CFG, block_tokens=256), 1), nothing)
        for wrong in (SwapPlan(ids([1]), ids([1, 2])), SwapPlan(np.array([1.0], np.float32), ids([1]))):
            with pytest.raises(ShapeError, match=r"two int32 \[N\] arrays"):
                swap.swap_in(cache, host, wrong)
        none = StateSwapPlan(ids([]), ids([[]]).T, ids([]))
        assert swap.snapshot(cache, host, none, implementation=self.implementation).pages is host.pages
        assert swap.restore(cache, host, none, implementation=self.implementation) is cache
        for wrong in (StateSwapPlan(ids([1]), ids([1]), ids([1])), StateSwapPlan(ids([1]), ids([[1]]), ids([1, 2]))):
            with pytest.raises(ShapeError, match=r"holds int32 \[N\], \[N, K\] and \[N\] arrays"):
                swap.restore(cache, host, wrong)
        with pytest.raises(ShapeError, match="states are swapped by a StateSwapPlan, got SwapPlan"):
            swap.snapshot(cache, host, nothing)
        with pytest.raises(ShapeError, match="blocks are swapped by a SwapPlan, got StateSwapPlan"):
            swap.swap_out(cache, host, none)
        with pytest.raises(LayoutError, match="cannot hold states of"):
            swap.snapshot(cache, init_host_cache(CacheLayout(CFG, hca_state="raw"), 1), none)


class TestFfi(TestXla):
    implementation = "ffi"

    def test_is_the_default(self):
        cache, host, plan = random_cache(LAYOUT, 15), random_host(LAYOUT, 16), SwapPlan(ids([1]), ids([1]))
        assert "dsv4_swap_out" in str(jax.make_jaxpr(swap.swap_out)(cache, host, plan))
        assert "dsv4_swap_in" in str(jax.make_jaxpr(swap.swap_in)(cache, host, plan))

    def test_flash(self):
        """Full widths and depth: records of 450 KB, many thousand words."""
        layout = CacheLayout(DSV4Config.flash())
        cache, host = random_cache(layout, 17), init_host_cache(layout, PAGES)
        want, pool = image(cache), np.array(host.pages)
        out, back = SwapPlan(ids([7, 2, 0]), ids([6, 1, 0])), SwapPlan(ids([3, 4, 5]), ids([1, 6, 6]))
        host = self.run("swap_out", cache, host, out)
        model_out(layout, want, pool, out)
        assert pool.shape[1] > 400_000 and np.array_equal(host.pages, pool)
        cache = self.run("swap_in", cache, host, back)
        model_in(layout, want, pool, back)
        assert_image(cache, want)

    def test_in_place_without_temporaries(self):
        """A step that swaps both ways: every byte of cache and records aliased, no copy of a pool, no staging."""
        layout = CacheLayout(DSV4Config.tiny())
        cache, host = init_cache(layout, CacheSize(64, 8, 8)), init_host_cache(layout, 100)
        some = np.arange(8, dtype=np.int32)
        plans = SwapPlan(some, some), StateSwapPlan(some, np.stack([some, np.zeros_like(some)], 1), some)

        def step(cache: KVCache, host: HostCache, plans: tuple[SwapPlan, StateSwapPlan]) -> tuple[KVCache, HostCache]:
            host = swap.snapshot(cache, swap.swap_out(cache, host, plans[0]), plans[1])
            return swap.restore(swap.swap_in(cache, host, plans[0]), host, plans[1]), host

        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(cache, host, plans).compile()
        memory, pools = compiled.memory_analysis(), [*cache.arrays.values(), host.pages]
        assert memory.alias_size_in_bytes + memory.host_alias_size_in_bytes == sum(x.nbytes for x in pools)
        assert memory.temp_size_in_bytes + memory.host_temp_size_in_bytes < 4096
        assert not re.findall(r"= \S+ copy(?:-start)?\(", compiled.as_text())
        # From the second step on: a CPU device does not write to what jnp.zeros made.
        cache, host = compiled(cache, host, plans)
        where = [x.unsafe_buffer_pointer() for x in (*cache.arrays.values(), host.pages)]
        cache, host = compiled(cache, host, plans)
        assert [x.unsafe_buffer_pointer() for x in (*cache.arrays.values(), host.pages)] == where
        assert all(x.is_deleted() for x in pools)


def piece(layers=2, ring=1, row=16, column=0, rows=1, width=16, offset=0, *, leaf=0, by=(0, 0, 0)) -> tuple[int, ...]:
    """What `RecordFormat.descriptors` has of one piece."""
    return (leaf, layers, ring, row, column, rows, width, offset, *by)


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ((), "1 to 40 pieces"),
        (41 * piece(), "1 to 40 pieces"),
        ((2, 16), "eleven numbers each"),
        (piece(leaf=-1), "a piece of no leaf"),
        (piece(leaf=24), "a piece of no leaf"),
        (piece() + piece(offset=32, leaf=1), "5 operands|4 operands"),
        (piece(row=48, width=48), "piece 0 is not of a whole number of units"),
        (piece(layers=0), "impossible sizes"),
        (piece(width=-16), "impossible sizes"),
        (piece(ring=2**31 - 1, row=2**31 - 1), "impossible sizes"),
        (piece(by=(0, -4, 0)), "impossible numbers"),
        (piece(column=8), "does not lie in its rows"),
        (piece(rows=2), "does not lie in its rows"),
        (piece() + piece(offset=16), "piece 1 does not follow"),
        (piece(offset=8), "piece 0 does not follow"),
        (piece(layers=10), "piece 0 does not fit the record"),
        (piece(by=(4, 0, 0)), "4 operands for 1 leaves and 4 more"),
    ],
)
def test_the_handler_refuses_descriptors_that_do_not_fit(pieces, problem):
    leaf, pool = jnp.zeros((20, 16), jnp.uint8), jnp.zeros((3, 128), jnp.uint8)
    some = record_copy.Ids(jnp.array(ids([1])), jnp.array(ids([1])))
    for call in (record_copy.native_out, record_copy.native_in):
        with pytest.raises(jax.errors.JaxRuntimeError, match=problem):
            jax.block_until_ready(call((leaf,), pool, some, pieces))


def test_implementations():
    cache, host, plan = random_cache(LAYOUT, 15), random_host(LAYOUT, 16), SwapPlan(ids([1]), ids([1]))
    with pytest.raises(ImplementationError, match="'pallas'"):
        swap.swap_out(cache, host, plan, implementation="pallas")


def test_without_the_library(monkeypatch):
    monkeypatch.setattr("dsv4_jax.ffi.cpu_problem", lambda: "no CPU library at nowhere")
    monkeypatch.setattr("dsv4_jax.ffi.cuda_problem", lambda op: "no CUDA library at nowhere")
    assert record_copy.choose_implementation(None) == "xla"
    with pytest.raises(ImplementationError, match="library at nowhere"):
        record_copy.choose_implementation("ffi")
