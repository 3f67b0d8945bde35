"""A model over a mesh gives each data shard's requests the bits that one device gives them: logits and cache bytes."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import pathlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import (
    AttentionType,
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
from dsv4_jax.cuda import attend as cuda_attend
from dsv4_jax.errors import LayoutError, ShapeError
from dsv4_jax.manager import StepShape
from dsv4_jax.model.forward import GPU_DECODE_OPTIONS, heard_layers
from dsv4_jax.model.head import logits
from dsv4_jax.model.numerics import linear
from dsv4_jax.model.weights.deferred import Deferred, make
from dsv4_jax.model.weights.params import is_leaf
from dsv4_jax.model.weights.placement import device_bytes, device_specs
from dsv4_jax.model.weights.quantised import FP8
from dsv4_jax.model.weights.split import BLOCKS, Split, check_split
from dsv4_jax.ops import registry
from dsv4_jax.ops.exchange_buffers import open_exchanges

from . import released, soak_mesh
from .feeding import V4_WIDTHS

SWA, CSA, HCA = AttentionType
SIZE = CacheSize(num_blocks=8, num_slots=2, max_blocks_per_request=4)
STEPS = {"prefill": model.prefill, "forward": model.forward, "loop": functools.partial(model.decode_loop, num_steps=3)}
# Sizes of which XLA rounds products and exponentials on the CPU alike, whole and halved; so is the chunk of 8 tokens.
F32 = DSV4Config.tiny(layer_types=(HCA,), o_groups=4, hc_sinkhorn_iters=1, n_routed_experts=8, num_experts_per_tok=3)
RELEASED = dataclasses.replace(
    released.CFG,
    layer_types=(CSA,),
    num_hash_layers=0,
    num_mtp_layers=0,
    o_lora_rank=128,
    hc_sinkhorn_iters=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
)
# V4's attention widths, so that every kernel takes part.
WIDE = dataclasses.replace(
    DSV4Config.tiny(),
    **V4_WIDTHS,
    hidden_size=256,
    q_lora_rank=128,
    o_lora_rank=128,
    moe_intermediate_size=256,
    o_groups=8,
    n_routed_experts=16,
    num_experts_per_tok=6,
)


@pytest.fixture(autouse=True)
def split_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of these small models; on GPUs XLA would merge the products."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr("dsv4_jax.model.weights.split.WHOLE_BYTES", 0)


def mesh_of(data: int, tensor: int, explicit: bool = False) -> jax.sharding.Mesh:
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jax.make_mesh((data, tensor), ("data", "tensor"), (kind, kind), devices=jax.devices()[: data * tensor])


def run(
    params: Any, layout: CacheLayout, names: list[str], shards: list[int], mesh: Any = None, peers: Any = ()
) -> Any:
    """What each step gives, shards concatenated, and the cache: prompts in chunks, a verified draft, decode steps.

    Args:
        names: the step that takes prompts and drafts; then "loop", maybe.
    """
    managers = [KVCacheManager(layout, SIZE) for _ in shards]
    cache = init_cache(layout, SIZE, sharding=None if mesh is None else cache_sharding(layout, mesh))
    requests = []
    for manager, shard in zip(managers, shards, strict=True):
        rng = np.random.default_rng(shard)
        prompts = (rng.integers(0, layout.cfg.vocab_size, n).tolist() for n in (14 + shard % 4, 9))
        requests.append([manager.admit_request(prompt, max_tokens=40) for prompt in prompts])
    outs = []

    def step(name: str, shape: StepShape, **reserved: int) -> None:
        nonlocal cache
        scheduled = [[(r, min(r.num_pending, shape.tokens // 2)) for r in pair if r.num_pending] for pair in requests]
        plans = [m.plan_step(s, shape=shape, **reserved) for m, s in zip(managers, scheduled, strict=True)]
        tokens = np.concatenate([m.plan_tokens(p) for m, p in zip(managers, plans, strict=True)])
        out, cache = compiled(name, mesh, peers)(params, cache, stack_plans(plans), tokens)
        live = np.concatenate([p.seq_slot > 0 if name == "prefill" else p.token_slot > 0 for p in plans])
        outs.append(
            np.where(live if name == "loop" else live[:, None], np.asarray(out.tokens if name == "loop" else out), 0)
        )

    chunk = StepShape.bound(layout, 2, 8, columns=4)
    for name, tokens in zip(names, ([5, 250, 77], [9]), strict=False):
        if name == "loop":
            for request in (r for pair in requests for r in pair):
                request.tokens += tokens
            step(name, managers[0].pinned_shape(2, steps=3), steps=3)
            continue
        for _ in range(4):
            step(name, chunk)
        for request in (r for pair in requests for r in pair):
            request.tokens += tokens
        step(name, chunk)
    return outs, cache


@functools.cache
def compiled(name: str, mesh: Any, peers: Any) -> Any:
    if mesh is None:
        return jax.jit(STEPS[name], donate_argnums=1)
    return shard_step(STEPS[name], mesh, out_axis=int(name == "loop"), peers=peers)


def check(params: model.Params, layout: CacheLayout, mesh: Any, *names: str) -> None:
    shards = list(range(mesh.shape["data"]))
    spread = model.shard_params(layout.cfg, params, mesh)
    released = params["embed"].dtype == jnp.bfloat16
    split = Split(mesh.shape["data"], mesh.shape["tensor"])
    predicted = device_bytes(layout.cfg, "released" if released else params["embed"].dtype, split)
    for device in mesh.devices.flat:
        held = [s.data.nbytes for x in jax.tree.leaves(spread) for s in x.addressable_shards if s.device == device]
        assert sum(held) == predicted
    with jax.set_mesh(mesh), open_exchanges(mesh) as opened:
        outs, cache = run(spread, layout, list(names), shards, mesh, tuple(exchange.peers for exchange in opened))
        for exchange in opened:
            exchange.check()
    one = model.pack_layers(model.stack_projections(params))
    alone = [run(one, layout, list(names), [shard]) for shard in shards]
    assert all(np.isfinite(out).all() and np.ptp(out) > 0.1 for out in outs)
    for i, out in enumerate(outs):
        expected = np.concatenate([a[0][i] for a in alone], axis=int(out.dtype == np.int32))
        np.testing.assert_array_equal(out, expected, err_msg=f"step {i}")
    for leaf in layout.leaves:
        rows = layout.leaf_shape(leaf, SIZE)[0]
        for shard in cache.arrays[leaf.name].addressable_shards:  # of every device, those of a tensor axis included
            which = (shard.index[0].start or 0) // rows
            np.testing.assert_array_equal(shard.data, alone[which][1].arrays[leaf.name], err_msg=leaf.name)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(2, 2), (4, 2), (8, 1)])
def test_heads_and_experts_over_four_and_eight_devices(split: tuple[int, int]) -> None:
    check(model.init_params(F32, 0), CacheLayout(F32), mesh_of(*split, explicit=True), "prefill", "loop")


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["plain", "released"])
def test_weights_as_released_over_four_devices(numerics: Any) -> None:
    params, layout = (
        model.init_params(RELEASED, 0, "released", numerics=numerics),
        CacheLayout(RELEASED, numerics=numerics),
    )
    check(params, layout, mesh_of(2, 2), "forward")


@pytest.mark.parametrize(
    ("split", "names"), [((1, 2), ("prefill", "loop")), ((1, 2), ("forward",)), ((2, 2), ("prefill",))], ids=str
)
def test_tokens_of_a_long_step_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, split: tuple[int, int], names: tuple[str, ...]
) -> None:
    """In the released numerics, in every kind of layer; not those of the loop's steps, which are few."""
    cfg = dataclasses.replace(RELEASED, layer_types=(SWA, CSA, HCA), num_hash_layers=1)
    layout, kinds = CacheLayout(cfg, numerics="released"), list[str]()

    def noted(op: str, arguments: Any, choice: Any) -> Any:
        kinds.append(arguments.kind)
        return registry.run(op, arguments, choice)

    monkeypatch.setattr("dsv4_jax.ops.exchange.run", noted)
    monkeypatch.setattr("dsv4_jax.model.weights.split.MIN_SHARED_TOKENS", 8)
    compiled.cache_clear()
    check(model.init_params(cfg, 0, "released", numerics="released"), layout, mesh_of(*split), *names)
    assert kinds.count("all_to_all") == 3 and kinds.count("sum_to_all") == (3 if "loop" in names else 0)


@pytest.mark.parametrize(("of_some", "ranks"), [(False, 1), (True, 1), (False, 2)])
def test_all_devices_have_what_is_asked_of_shared_tokens(
    monkeypatch: pytest.MonkeyPatch, of_some: bool, ranks: int
) -> None:
    """Residuals of all tokens or some, those that DSpark's stages hear, and the experts that tokens chose; also where
    the devices share each request's blocks."""
    cfg, mesh = dataclasses.replace(RELEASED, layer_types=(CSA, SWA)), mesh_of(1, 2)
    layout = CacheLayout(cfg, numerics="released", key_split="context" if ranks > 1 else "throughput")
    size = dataclasses.replace(SIZE, pool_ranks=ranks)
    placed = cache_sharding(layout, mesh, pool_axis="tensor" if ranks > 1 else None)
    params = model.init_params(cfg, 0, "released", numerics="released", mesh=mesh)
    manager, wanted = KVCacheManager(layout, size), jnp.array([6, 0, 3, 7, 4], jnp.int32) if of_some else None
    plan = manager.plan_step([(manager.admit_request([7, 9, 250, 4, 77, 8, 1, 30]), 8)])

    def step(params: Any, cache: Any, plan: Any, tokens: jax.Array) -> tuple[Any, Any]:
        begun = cache.begin(plan)
        residual, after, experts, heard = heard_layers(params, begun, tokens, None, True, (0,), rows=wanted)
        return (residual, experts, heard), after.finish()

    def run() -> list[np.ndarray]:
        cache = init_cache(layout, size, sharding=placed)
        found, _ = shard_step(step, mesh)(params, cache, stack_plans([plan]), manager.plan_tokens(plan))
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]

    whole = run()
    monkeypatch.setattr("dsv4_jax.model.weights.split.MIN_SHARED_TOKENS", 8)
    for one, other in zip(run(), whole, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [len(x) for x in whole] == [5 if of_some else 8] * 4 + [8] * 5


def test_a_checkpoint_goes_to_the_devices_that_need_it(tmp_path: pathlib.Path) -> None:
    """As parameters that were read whole do, and no device holds more than is predicted."""
    params, mesh = model.init_params(F32, 0), mesh_of(2, 2)
    model.save_hf(F32, params, tmp_path)
    seen = []
    cfg, read = model.load_hf(tmp_path, mesh=mesh, progress=lambda *counts: seen.append(counts))
    spread = model.shard_params(cfg, params, mesh)
    assert jax.tree.structure(read) == jax.tree.structure(spread)
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(spread), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)
    assert seen[-1] == (4 * device_bytes(F32, jnp.float32, Split(2, 2)),) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("split", [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8)])
def test_several_gpus_give_the_bits_of_one(split: tuple[int, int]) -> None:
    if len(jax.devices()) < math.prod(split):
        pytest.skip(f"needs {math.prod(split)} devices")
    params, mesh = model.init_params(WIDE, 0, "released"), mesh_of(*split)
    check(params, CacheLayout(WIDE), mesh, "forward", "loop")
    drawn, spread = model.init_params(WIDE, 0, "released", mesh=mesh), model.shard_params(WIDE, params, mesh)
    assert jax.tree.structure(drawn) == jax.tree.structure(spread)
    jax.tree.map(np.testing.assert_array_equal, drawn, spread)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [(1, 2), (2, 2), (1, 4), (1, 8)])
def test_gpus_that_share_out_tokens_give_the_bits_of_one(
    monkeypatch: pytest.MonkeyPatch, split: tuple[int, int]
) -> None:
    if len(jax.devices()) < math.prod(split):
        pytest.skip(f"needs {math.prod(split)} devices")
    monkeypatch.setattr("dsv4_jax.model.weights.split.MIN_SHARED_TOKENS", 8)
    compiled.cache_clear()
    cfg = dataclasses.replace(WIDE, hidden_size=4096, hc_mult=4, index_topk=32)  # all sums over a row have kernels
    params = model.init_params(cfg, 0, "released", numerics="released")
    check(params, CacheLayout(cfg, numerics="released"), mesh_of(*split), "forward", "loop")


@pytest.mark.gpu
def test_words_of_a_share_have_the_bits_of_the_whole() -> None:
    """At V4's size: whole, it is multiplied in the blocks that devices share out."""
    of_all = jax.jit(logits, static_argnums=(2, 3), compiler_options=GPU_DECODE_OPTIONS)
    product = jax.jit(linear, compiler_options=GPU_DECODE_OPTIONS)
    drawn = jax.jit(lambda key, rows: jax.random.normal(key, (rows, 4096), jnp.bfloat16), static_argnums=1)
    weight, x = drawn(jax.random.key(0), 129_280), drawn(jax.random.key(1), 64)
    for tokens in (1, 3, 8, 64):
        whole = np.asarray(of_all(x[:tokens], weight, tokens, 0))
        parts = [np.asarray(product(x[:tokens], block)) for block in jnp.split(weight, BLOCKS)]
        np.testing.assert_array_equal(whole, np.concatenate(parts, 1), err_msg=f"{tokens} tokens")


@pytest.mark.parametrize(
    ("cfg", "split", "message"),
    [
        (F32, Split(3, 1), "3 devices: the sum over experts can be divided among 1, 2, 4 or 8"),
        (F32, Split(1, 16), "16 devices"),
        (F32, Split(0, 1), "at least one device along each axis"),
        (dataclasses.replace(F32, n_routed_experts=6), Split(2, 2), "6 experts do not divide by 4 devices"),
        (F32, Split(1, 8), "4 query heads do not divide by 8 devices"),
        (dataclasses.replace(F32, o_groups=2), Split(2, 4), "2 groups of query heads do not divide by 4 devices"),
    ],
)
def test_splits_that_there_are_not(cfg: DSV4Config, split: Split, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_split(cfg, split)


def test_meshes_of_other_axes() -> None:
    mesh = jax.make_mesh((2,), ("model",))
    with pytest.raises(LayoutError, match="the mesh has an axis 'model'"):
        model.shard_params(F32, {}, mesh)
    with pytest.raises(LayoutError, match="Mesh of devices, got AbstractMesh"):
        model.shard_params(F32, {}, mesh.abstract_mesh)


def test_a_mesh_may_have_one_axis() -> None:
    params = model.init_params(F32, 0)
    for axis in ("data", "tensor"):
        one, both = (
            model.shard_params(F32, params, mesh)
            for mesh in (jax.make_mesh((2,), (axis,)), mesh_of(*((2, 1) if axis == "data" else (1, 2))))
        )
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(both), strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.addressable_shards[0].data.shape == y.addressable_shards[0].data.shape


def test_parameters_that_cannot_be_divided() -> None:
    params, mesh = model.init_params(F32, 0), mesh_of(2, 1)
    for wrong in ({}, model.stack_projections(params), model.pack_layers(model.stack_projections(params))):
        with pytest.raises(ShapeError, match="neither stacked nor packed"):
            model.shard_params(F32, wrong, mesh)
    with pytest.raises(ShapeError, match=r"experts.*\[8, 64, 64\], of this model it is \[16, 64, 64\]"):
        model.shard_params(dataclasses.replace(F32, n_routed_experts=16), params, mesh)


def test_an_error_stops_all_devices() -> None:
    """Of a thread a device, whose pieces are told of one at a time."""
    params, seen = model.init_params(F32, 0), []

    def tell(made: int, total: int) -> None:
        seen.append(made)
        if len(seen) > 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        model.shard_params(F32, params, mesh_of(2, 2), progress=tell)
    assert seen == sorted(seen)


def test_what_compiles_is_made_by_one_thread_at_a_time() -> None:
    """jax's compilation cache takes an entry that two threads write at once for a broken one."""
    busy, seen = threading.Lock(), []

    def piece() -> np.ndarray:
        alone = busy.acquire(blocking=False)
        time.sleep(0.01)
        seen.append(alone)
        busy.release()
        return np.ones((1, 7), np.float32)

    def one(device: jax.Device) -> None:
        made = make(Deferred((2, 7), np.dtype(np.float32), ((7, piece), (7, lambda: jnp.ones(7)))), device=device)
        assert made.sum() == 14 and made.devices() == {device}

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, jax.devices()[:4]))
    assert seen == [True] * 4


def test_a_share_of_rows_knows_the_whole_matrix() -> None:
    """A kernel that cuts sums by a matrix's size must cut those of a share as of the whole (`ops.dense_fp8`)."""

    def rows(split: Split) -> list[int]:
        layers = device_specs(RELEASED, "released", split)["layers"]
        leaves = [jax.ShapeDtypeStruct(place.shape, np.uint8) for place in layers.places[0]]
        nodes = jax.tree.leaves(jax.tree.unflatten(layers.trees[0], leaves), is_leaf=is_leaf)
        return [node.whole_rows or node.shape[0] for node in nodes if is_leaf(node) and node.format == FP8]

    assert len(rows(Split())) >= 5 and rows(Split()) == rows(Split(1, 2)) == rows(Split(2, 1)) == rows(Split(2, 2))


def test_a_share_of_heads_has_its_keys_cut_as_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 64 heads, `key_split="latency"` cuts otherwise than of 64 (`cuda.attend.split_count`)."""
    cfg, mesh = dataclasses.replace(F32, num_attention_heads=72, o_groups=2), mesh_of(1, 2)
    layout, seen = CacheLayout(cfg, key_split="latency"), []
    manager = KVCacheManager(layout, SIZE)
    plan = stack_plans([manager.plan_step([], shape=manager.pinned_shape(2))])
    params = model.shard_params(cfg, model.init_params(cfg, 0), mesh)

    def noted(op: str, arguments: Any, choice: Any) -> Any:
        if op != "attend":
            return registry.run(op, arguments, choice)
        seen.append((arguments.queries.shape[1], cuda_attend.split_count(256, 1024, arguments.heads, "latency")))
        return registry.find(op, "xla").call(arguments)

    monkeypatch.setattr("dsv4_jax.step.run", noted)
    cache = init_cache(layout, SIZE, sharding=cache_sharding(layout, mesh))
    shard_step(model.forward, mesh).trace(params, cache, plan, np.zeros(2, np.int32))
    assert seen == [(36, cuda_attend.split_count(256, 1024, 72, "latency"))]
    assert cuda_attend.split_count(256, 1024, 36, "latency") != seen[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 2)])
def test_who_comes_and_goes_finds_what_one_device_has(data: int, tensor: int) -> None:
    """Joins, prefix hits, drafts, preemption, blocks and states to the host and back: tokens and bytes.

    (Two thousand steps of it: `python -m tests.model.soak_mesh`.)
    """
    cfg, mesh = soak_mesh.TINY, mesh_of(data, tensor)
    params, layout = model.init_params(cfg, 0), CacheLayout(cfg, "f32", "f32", block_tokens=8, draft_tokens=2)
    whole = model.pack_layers(model.stack_projections(params))
    soak = soak_mesh.Soak(layout, mesh, model.shard_params(cfg, params, mesh), whole)
    held = None
    for step in range(120):
        soak.step()
        if step % 20 == 19:
            soak.compare()
            gc.collect()  # what other tests left behind
            live = [x.nbytes for x in jax.live_arrays()]
            assert held in (None, (len(live), sum(live))), "memory grows"
            held = len(live), sum(live)
    assert not [name for name in soak_mesh.SEEN if not soak.seen[name]]
