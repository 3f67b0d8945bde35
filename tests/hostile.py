"""Plans, tables and lists full of ids that do not exist, and a step that is given them. No test of its own.

`HostilePlans` is the test class of every implementation: whatever an id holds, a unit that no valid id names keeps its
bytes, and a read goes to the nearest row that exists. What no comparison of bytes can show, an access outside of an
allocation, is for the sanitizer: tests/cuda/test_hostile_plans.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import KVCache, init_cache
from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.ops import append, attend, index_scores, top_k
from dsv4_jax.ops.append import WindowView
from dsv4_jax.ops.gather import gather_rows
from dsv4_jax.ops.registry import OPS, Choice, Name, frozen
from dsv4_jax.plan import StepPlan

from .harness import layer_writes, random_norms, random_stream
from .ops.test_append_gather import random_rows

CSA, HCA = AttentionType.CSA, AttentionType.HCA
# The step runs two of the layers; rows of others of their kind lie on both sides of theirs.
V4 = DSV4Config.tiny(
    layer_types=(HCA, CSA, CSA, HCA, CSA, CSA, HCA),
    head_dim=512,
    rope_dim=64,
    index_head_dim=128,
    num_attention_heads=2,
    index_n_heads=4,
    index_topk=8,
    sliding_window=9,
    hca_ratio=16,
)
LAYERS = (3, 4)
SIZE = CacheSize(num_blocks=4, num_slots=3, max_blocks_per_request=2)
FAR = (-(2**31), -(2**30) - 7, -1, 2**26, 10**9, 2**31 - 1)  # 2^26 blocks of 32 rows: the product is 2^31
FEEDS = {"verify": [(1, 126, 2), (2, 3, 1)], "chunk": [(1, 121, 8), (3, 14, 2)]}  # both complete entries of each kind


# The same with widths that make little work for the interpreter.
SMALL = dataclasses.replace(V4, head_dim=32, rope_dim=8, index_head_dim=32)
LAYOUT = CacheLayout(V4, draft_tokens=1)


def plan_of(layout: CacheLayout, scheduled: str) -> StepPlan:
    rows = [StepSequence(*feed) for feed in FEEDS[scheduled]]
    shape = shape_for(layout, rows, slot_copies=3, block_copies=3).bucketed(SIZE.max_blocks_per_request)
    return build_plan(layout, rows, shape)


def random_cache(layout: CacheLayout, seed: int) -> KVCache:
    """Any bytes; a block table in which slot s has blocks of its own."""
    rng = np.random.default_rng(seed)
    cache = init_cache(layout, SIZE)
    arrays = {
        name: jnp.asarray(
            rng.standard_normal(x.shape) if x.dtype == jnp.float32 else rng.integers(0, 200, x.shape), x.dtype
        )
        for name, x in cache.arrays.items()
    }
    arrays["block_table.ids"] = jnp.asarray([[0, 0], [1, 2], [3, 0], [4, 0]], jnp.int32)
    return KVCache(arrays, layout)


def spoiled(rng: np.random.Generator, ids: np.ndarray, *near: int, share: float = 0.4) -> np.ndarray:
    """`ids`, some of them replaced by far ones or those of `near`."""
    wrong = rng.choice(np.array([*FAR, *near], np.int64), ids.shape)
    return np.where(rng.random(ids.shape) < share, wrong, ids).astype(np.int32)


def spoiled_plan(rng: np.random.Generator, plan: StepPlan) -> StepPlan:
    """Every field of ids, places or positions spoiled, but for the copies and table entries of `begin`."""
    tokens, rows, slots = plan.num_tokens, plan.num_seqs, SIZE.slot_units
    near = dict(
        seq_slot=(slots, slots + 3, 150),
        seq_start=(127,),
        seq_count=(0, 100),
        seq_first=(tokens, 100),
        token_seq=(rows, rows + 1),
        token_slot=(slots, slots + 3, 150),
        token_position=(255, 256, 1000),
        flush_tokens=(tokens + 1,),
        group_tokens=(tokens + 1,),
    )
    if rng.random() < 0.5:  # or all of them are so wrong that no token is left
        near = {name: near[name] for name in rng.permutation([*near])[:2].tolist()}
    return plan._replace(**{name: spoiled(rng, getattr(plan, name), *ids) for name, ids in near.items()})


def step(cache: KVCache, plan: StepPlan, rows, norms, entries: jax.Array, implementation: Choice, reads):
    """These layers' writes, and everything they read: (cache, what was read)."""
    cfg, tokens, seen, found = cache.layout.cfg, plan.num_tokens, [], []
    begun = cache.begin(plan.settled(), implementation)
    for i in LAYERS:
        spec, selected = cache.layout.layer(i), None
        handle = layer_writes(begun, spec, rows, norms)
        begun = handle.step
        handle = dataclasses.replace(handle, step=dataclasses.replace(begun, implementation=reads))
        if spec.attn is CSA:
            queries = jnp.ones((tokens, cfg.index_n_heads, cfg.index_head_dim), jnp.bfloat16)
            scores = handle.index_scores(queries, jnp.ones((tokens, cfg.index_n_heads)))
            found += [scores, *handle.top_k(scores)]
            selected = entries, jnp.full(tokens, entries.shape[1], jnp.int32)
        queries = jnp.ones((tokens, cfg.num_attention_heads, cfg.head_dim), jnp.bfloat16)
        out, _ = handle.attend(queries, jnp.zeros(cfg.num_attention_heads), selected)
        seen += [out, handle.gather_compressed(entries)]
    return begun.finish(partial=True), seen + found


def wherever(name: Name, *but: str) -> Choice:
    """This implementation of every op that has it; the default of the others, and of those in `but`."""
    return frozen({op.name: name for op in OPS.values() if name in op.names and op.name not in but})


jit_step = jax.jit(step, static_argnames=("implementation", "reads"))
jit_begin = jax.jit(lambda cache, plan: cache.begin(plan).finish(partial=True))
jit_append = jax.jit(append, static_argnames=("fmt", "implementation"))
jit_gather = jax.jit(gather_rows, static_argnames=("fmt", "dtype", "implementation"))
jit_scores = jax.jit(index_scores, static_argnames=("base", "rows_per_block", "fmt", "implementation"))
jit_top_k = jax.jit(top_k, static_argnames=("k", "implementation"))
jit_attend = jax.jit(attend, static_argnames=("scale", "fmt", "implementation"))


def may_change(layout: CacheLayout, plan: StepPlan, table: np.ndarray) -> dict[str, np.ndarray]:
    """Of every leaf [layers, units, ...]: what a step of these layers may write, given its valid ids."""
    slots = {int(s) for s in plan.token_slot if 0 < s < SIZE.slot_units}
    blocks = {int(b) for s in slots for b in table[s] if 0 < b < SIZE.block_units}
    out = {}
    for leaf in layout.leaves:
        if leaf.scope == "table":
            continue
        units, named = (SIZE.block_units, blocks) if leaf.scope == "block" else (SIZE.slot_units, slots)
        mask = np.zeros((leaf.layers, units), bool)
        mask[[pool.ordinal for i in LAYERS for pool in layout.schema(i).pools if pool.pool == leaf.pool]] = True
        mask[:, [u for u in range(units) if u not in named]] = False
        out[leaf.name] = mask
    return out


def by_unit(layout: CacheLayout, cache: KVCache) -> dict[str, np.ndarray]:
    """Every leaf but the table as [layers, units, bytes]."""
    out = {}
    for leaf in layout.leaves:
        if leaf.scope != "table":
            units = SIZE.block_units if leaf.scope == "block" else SIZE.slot_units
            out[leaf.name] = np.asarray(cache.arrays[leaf.name]).reshape(leaf.layers, units, -1).view(np.uint8)
    return out


class HostilePlans:
    """Subclass it with the implementation under test; the tests jit once and give each executable many plans."""

    implementation: ClassVar[Choice]
    reads: ClassVar[Choice] = None  # of what a step reads, if not `implementation`
    cfg: ClassVar[DSV4Config] = V4
    formats: ClassVar[tuple[str, str]] = ("fp8", "fp4")
    steps: ClassVar[tuple[tuple[str, Literal["online", "raw"]], ...]] = (
        ("verify", "online"),
        ("verify", "raw"),
        ("chunk", "online"),
        ("chunk", "raw"),
    )
    plans: ClassVar[int] = 30

    def writes(self, hca_state: Literal["online", "raw"]) -> Choice:
        """What a step writes with."""
        return self.implementation

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "scheduled" in metafunc.fixturenames:
            metafunc.parametrize(("scheduled", "hca_state"), self.steps)

    def test_a_step_writes_nothing_that_no_valid_id_names(
        self, scheduled: str, hca_state: Literal["online", "raw"]
    ) -> None:
        layout = CacheLayout(self.cfg, *self.formats, draft_tokens=1, hca_state=hca_state)
        rng, good = np.random.default_rng(0), plan_of(layout, scheduled)
        rows, norms = random_stream(layout, good.num_tokens, 1), random_norms(layout)
        entries = np.arange(5, dtype=np.int32) * np.ones((good.num_tokens, 1), np.int32)
        cache = random_cache(layout, 2)
        whole, changed = by_unit(layout, cache), 0
        for i in range(self.plans):
            # The first plan is valid: or a step that never writes at all would pass.
            plan = spoiled_plan(rng, good) if i else good
            table = np.asarray(cache.block_table)
            if i % 3 == 2:
                table = spoiled(rng, table, SIZE.block_units, SIZE.block_units + 9)
            given = KVCache(cache.arrays | {"block_table.ids": jnp.asarray(table)}, layout)
            after, seen = jit_step(
                given,
                plan,
                rows,
                norms,
                spoiled(rng, entries, 63, 64) if i else entries,
                implementation=self.writes(layout.hca_state),
                reads=self.reads or self.implementation,
            )
            allowed = may_change(layout, plan, table)
            for name, data in by_unit(layout, after).items():
                differs = (data != whole[name]).any(-1)
                assert not (differs & ~allowed[name]).any(), f"plan {i}: {name} changed at {np.argwhere(differs)}"
                changed += int(differs.any())
            assert np.array_equal(after.block_table, table)
            absent = (plan.token_slot <= 0) | (plan.token_slot >= SIZE.slot_units)
            assert not np.asarray(seen[0], np.float32)[absent].any(), "a token without a slot sees no key"
        assert changed > len(whole), "only the valid plan wrote"

    def test_rows_are_appended_where_they_exist(self) -> None:
        fmt, rng = LAYOUT.kv_row, np.random.default_rng(3)
        pool = random_rows(rng, fmt, 40)
        values = rng.standard_normal((12, fmt.dim)).astype(np.float32)
        for _ in range(self.plans):
            ids = spoiled(rng, rng.permutation(40)[:12], 40, 41)
            after = jit_append(tuple(map(jnp.asarray, pool)), values, ids, fmt=fmt, implementation=self.implementation)
            untouched = np.setdiff1d(np.arange(40), ids)
            for old, new in zip(pool, after, strict=True):
                np.testing.assert_array_equal(np.asarray(new)[untouched], old[untouched])

    def test_gathered_rows_are_the_nearest(self) -> None:
        fmt, rng = LAYOUT.kv_row, np.random.default_rng(4)
        pool = tuple(map(jnp.asarray, random_rows(rng, fmt, 40)))
        call = functools.partial(
            jit_gather, pool, fmt=fmt, dtype=jnp.dtype("float32"), implementation=self.implementation
        )
        for _ in range(self.plans):
            ids = spoiled(rng, rng.integers(0, 40, 11), 40, 41)
            np.testing.assert_array_equal(call(ids), call(np.clip(ids, 0, 39)))

    def test_scores_are_of_the_nearest_blocks(self) -> None:
        """From the layer's base to the pool's end; counts of any size."""
        fmt, rng = LAYOUT.index_row, np.random.default_rng(5)
        pool = tuple(map(jnp.asarray, random_rows(rng, fmt, 10 * 32)))
        queries, weights = rng.standard_normal((3, 4, 128)).astype(np.float32), np.ones((3, 4), np.float32)
        call = functools.partial(
            jit_scores,
            pool,
            queries,
            weights,
            base=4 * 32,
            rows_per_block=32,
            fmt=fmt,
            implementation=self.implementation,
        )
        for _ in range(self.plans):
            table = spoiled(rng, rng.integers(0, 6, (3, 2)), 6, 7)
            count = spoiled(rng, rng.integers(0, 65, 3), 65)
            np.testing.assert_array_equal(call(table, count), call(np.clip(table, 0, 5), np.clip(count, 0, 64)))

    def test_top_k_of_any_count(self) -> None:
        rng = np.random.default_rng(6)
        scores = rng.standard_normal((4, 50)).astype(np.float32)
        call = functools.partial(jit_top_k, scores, k=8, implementation=self.implementation)
        for _ in range(self.plans):
            count = spoiled(rng, rng.integers(0, 51, 4), 51)
            for got, want in zip(call(count), call(np.clip(count, 0, 50)), strict=True):
                np.testing.assert_array_equal(got, want)

    def test_attended_rows_are_the_nearest(self) -> None:
        """Window ids, entry ids and counts; a row that is not visible is no key whatever its id is."""
        fmt, rng = LAYOUT.kv_row, np.random.default_rng(7)
        window, entries = (tuple(map(jnp.asarray, random_rows(rng, fmt, n))) for n in (30, 20))
        queries, sink = rng.standard_normal((3, 2, 512)).astype(np.float32), np.zeros(2, np.float32)
        visible = rng.random((3, 9)) < 0.7

        def call(window_ids, entry_ids, count):
            return jit_attend(
                queries,
                sink,
                WindowView(window, window_ids, visible),
                entries,
                entry_ids,
                count,
                scale=0.1,
                fmt=fmt,
                implementation=self.implementation,
            )

        for _ in range(self.plans):
            ids = spoiled(rng, rng.integers(0, 30, (3, 9)), 30), spoiled(rng, rng.integers(0, 20, (3, 70)), 20)
            count = spoiled(rng, rng.integers(0, 71, 3), 71)
            nearest = np.clip(ids[0], 0, 29), np.clip(ids[1], 0, 19), np.clip(count, 0, 70)
            for got, want in zip(call(*ids, count), call(*nearest), strict=True):
                np.testing.assert_array_equal(got, want)
