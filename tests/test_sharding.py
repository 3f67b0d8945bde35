"""A cache over four devices is four caches: the same bytes and logits as each shard alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv4_jax import (
    CacheLayout,
    CacheSize,
    DSV4Config,
    KVCacheManager,
    cache_sharding,
    init_cache,
    model,
    shard_step,
    stack_plans,
)
from dsv4_jax.cache import KVCache
from dsv4_jax.config import AttentionType
from dsv4_jax.errors import LayoutError, PlanError
from dsv4_jax.manager import StepShape
from dsv4_jax.model.sampling import bias_rows, sample_rows

CFG = DSV4Config.tiny(layer_types=(AttentionType.CSA,))
LAYOUT = CacheLayout(CFG, "fp8", "fp4")
SIZE = CacheSize(num_blocks=4, num_slots=2, max_blocks_per_request=2)
AUTO = (jax.sharding.AxisType.Auto,)
MESHES = {
    "data4": ((4,), ("data",)),
    "data4_auto": ((4,), ("data",), AUTO),
}
forward = jax.jit(model.forward, donate_argnames="cache")


@pytest.fixture(scope="module")
def params():
    return model.init_params(CFG, 0)


@pytest.fixture
def mesh(request):
    assert len(jax.devices()) >= 4, "conftest asks for four CPU devices"
    return jax.make_mesh(*MESHES[request.param])


def feeds_of(manager: KVCacheManager, shard: int) -> list[list[tuple]]:
    """Steps of a shard: all different, joins included; shard 1 idles in the second step."""
    rng = np.random.default_rng(shard)
    a, b = (manager.admit_request(rng.integers(0, CFG.vocab_size, n).tolist()) for n in (60, 40))
    middle = [] if shard == 1 else [(a, 5 + shard), (b, 3)]
    return [[(a, 16 - shard)], middle, [(b, 10), (a, 1)]]


def run(params, shards: list[int], mesh=None) -> tuple[list[np.ndarray], KVCache]:
    """Logits of each step, shards concatenated, and the cache."""
    managers = [KVCacheManager(LAYOUT, SIZE) for _ in shards]
    steps = zip(*(feeds_of(m, s) for m, s in zip(managers, shards, strict=True)), strict=True)
    shape = StepShape.bound(LAYOUT, 2, 16, columns=2)
    cache = init_cache(LAYOUT, SIZE, sharding=None if mesh is None else cache_sharding(LAYOUT, mesh))
    step = forward if mesh is None else shard_step(model.forward, mesh)
    logits = []
    for scheduled in steps:
        plans = [m.plan_step(f, shape=shape) for m, f in zip(managers, scheduled, strict=True)]
        tokens = np.concatenate([m.plan_tokens(p) for m, p in zip(managers, plans, strict=True)])
        out, cache = step(params, cache, stack_plans(plans), tokens)
        live = np.concatenate([p.token_slot > 0 for p in plans])
        logits.append(np.where(live[:, None], np.asarray(out), 0))
    return logits, cache


@pytest.mark.parametrize("mesh", ["data4_auto"], indirect=True)
def test_shard_map_by_hand(params, mesh):
    """As own_model.md says: split as `cache_sharding` says, and with `check_vma=False`."""
    where, shape = cache_sharding(LAYOUT, mesh), StepShape.bound(LAYOUT, 2, 16, columns=2)
    managers = [KVCacheManager(LAYOUT, SIZE) for _ in range(4)]
    plan = stack_plans([m.plan_step(feeds_of(m, i)[0], shape=shape) for i, m in enumerate(managers)])
    specs, rows = jax.tree.map(lambda sharding: sharding.spec, where), jax.P("data")
    step = jax.shard_map(
        model.forward, mesh=mesh, in_specs=(jax.P(), specs, rows, rows), out_specs=(rows, specs), check_vma=False
    )
    cache = init_cache(LAYOUT, SIZE, sharding=where)
    logits, after = jax.eval_shape(step, params, cache, plan, np.zeros(4 * shape.tokens, np.int32))
    assert logits.shape == (4 * shape.tokens, CFG.vocab_size)
    assert jax.tree.map(jnp.shape, after.arrays) == jax.tree.map(jnp.shape, cache.arrays)


@pytest.mark.parametrize("mesh", ["data4"], indirect=True)
@pytest.mark.slow
def test_model_step_equals_single_device(params, mesh):
    shards = list(range(mesh.shape["data"]))
    with jax.set_mesh(mesh):
        logits, cache = run(params, shards, mesh)
    alone = [run(params, [shard]) for shard in shards]
    for i, step in enumerate(logits):
        np.testing.assert_allclose(step, np.concatenate([a[0][i] for a in alone]), rtol=0, atol=2e-5)
    for leaf in LAYOUT.leaves:
        array = cache.arrays[leaf.name]
        rows = LAYOUT.leaf_shape(leaf, SIZE)[0]
        assert array.shape[0] == rows * len(shards)
        # Every device, the replicas of the tensor axis included.
        for shard in array.addressable_shards:
            which = (shard.index[0].start or 0) // rows
            assert shard.data.nbytes == LAYOUT.leaf_bytes(leaf, SIZE)
            assert np.array_equal(shard.data, alone[which][1].arrays[leaf.name]), (leaf.name, which)


@pytest.mark.parametrize("mesh", ["data4_auto"], indirect=True)
@pytest.mark.slow
def test_cache_is_updated_in_place(params, mesh):
    with jax.set_mesh(mesh):
        cache = init_cache(LAYOUT, SIZE, sharding=cache_sharding(LAYOUT, mesh))
        managers = [KVCacheManager(LAYOUT, SIZE) for _ in range(mesh.shape["data"])]
        shape = managers[0].pinned_shape(2)
        plan = stack_plans([m.plan_step([], shape=shape) for m in managers])
        step = shard_step(model.decode_step, mesh)
        tokens = np.zeros(2 * len(managers), np.int32)
        lowered = step.lower(params, cache, plan, tokens)
        compiled = lowered.compile()
        assert compiled.memory_analysis().alias_size_in_bytes == LAYOUT.total_bytes(SIZE)
        _, after = compiled(params, cache, plan, tokens)
    assert all(x.is_deleted() for x in cache.arrays.values())
    # A step of padding writes null units only.
    assert not np.asarray(after.arrays["block_table.ids"]).any()


def test_plans_of_one_shard_are_a_packed_plan():
    manager = KVCacheManager(LAYOUT, SIZE)
    plan = manager.plan_step([(manager.admit_request(), 3)])
    stacked = stack_plans([plan])
    assert stacked.shapes == plan.pack().shapes and np.array_equal(stacked.vector, plan.pack().vector)
    assert jnp.asarray(stack_plans([plan, plan]).vector).shape == (2 * stacked.vector.size,)


def test_refusals():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    with pytest.raises(LayoutError, match="the mesh has no axis 'model', it has 'data', 'tensor'"):
        cache_sharding(LAYOUT, mesh, tensor_axis="model")
    with pytest.raises(LayoutError, match="no axis 'batch'"):
        shard_step(model.forward, mesh, data_axis="batch")
    odd = CacheLayout(DSV4Config.tiny(num_attention_heads=3, o_groups=3))
    with pytest.raises(LayoutError, match="3 query heads do not divide by axis 'tensor' of 2"):
        cache_sharding(odd, mesh, tensor_axis="tensor")
    with pytest.raises(PlanError, match="got none"):
        stack_plans([])
    with pytest.raises(PlanError, match="one plan per data shard, got None"):
        stack_plans([None])
    for wrong in (-1, None):
        with pytest.raises(LayoutError, match=f"out_axis must be an integer of at least 0, got {wrong}"):
            shard_step(model.forward, mesh, out_axis=wrong)
    with pytest.raises(LayoutError, match=r"expected a jax\.sharding\.Mesh, got None"):
        shard_step(model.forward, None)
    spread = model.shard_params(CFG, model.init_params(CFG, 0), mesh)
    with pytest.raises(LayoutError, match=r"parameters are split over a mesh of .* this one is {'data': 2}"):
        shard_step(model.forward, jax.make_mesh((2,), ("data",))).trace(spread, None, None)
    manager = KVCacheManager(LAYOUT, SIZE)
    request = manager.admit_request()
    short, long = (manager.plan_step([(request, n)]) for n in (1, 16))
    with pytest.raises(PlanError, match=r"shard 1 has token_seq \(16,\), shard 0 has \(1,\)"):
        stack_plans([short, long])


def test_counts_over_shards_are_donated_and_split() -> None:
    """What a step draws, and penalties' counts, are those of each shard alone; of results each has its own axis."""
    mesh, vocab = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), CFG.vocab_size
    managers = [KVCacheManager(LAYOUT, SIZE) for _ in range(4)]
    for i, manager in enumerate(managers):
        for _ in range(1 + i % 2):
            manager.admit_request([1, 2])
    plans = [m.plan_step([(r, 1) for r in m.requests], shape=managers[0].pinned_shape(2)) for m in managers]

    def step(params, cache, plan, logits, rows, counts, biases):
        plan = plan.unpack()
        drawn = sample_rows(logits, plan.seq_slot, plan.seq_start, rows, counts, biases=biases, logprobs=True)
        return jax.tree.map(lambda x: x[None], drawn._replace(counts=None))._replace(counts=drawn.counts), cache

    logits = np.random.default_rng(0).normal(0, 2, (8, vocab)).astype(np.float32)
    hows = [model.Sampling(0.8, top_p=0.9, presence_penalty=1.0, seed=i, logit_bias={9 * i: 4.0}) for i in range(8)]
    biases = bias_rows(hows)
    rows, slots = model.SamplingRows.of(hows), init_cache(LAYOUT, SIZE).slot_units
    counts = np.random.default_rng(1).integers(0, 3, (4 * slots, vocab)).astype(np.int32)
    sharded = shard_step(step, mesh, out_axis=(model.Sampled(1, 1, counts=0),), donated=(2,))
    given = jax.device_put(counts, NamedSharding(mesh, PartitionSpec("data")))
    cache = init_cache(LAYOUT, SIZE, sharding=cache_sharding(LAYOUT, mesh))
    drawn, _ = sharded({}, cache, stack_plans(plans), logits, rows, given, biases)
    drawn = jax.tree.map(np.asarray, drawn)
    assert given.is_deleted() and drawn.tokens.shape == drawn.logprobs.shape == (1, 8)
    for i, plan in enumerate(plans):
        mine = slice(2 * i, 2 * i + 2)
        own = counts[slots * i : slots * (i + 1)]
        want, _ = step({}, None, plan, logits[mine], rows[mine], own, biases[mine])
        np.testing.assert_array_equal(drawn.tokens[:, mine], want.tokens)
        np.testing.assert_array_equal(drawn.logprobs[:, mine], want.logprobs)
        np.testing.assert_array_equal(drawn.counts[slots * i : slots * (i + 1)], want.counts)
