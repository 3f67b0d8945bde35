"""What jax offers around a step works with ours: export, checkify, donation that is told of, shardings, pickling."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from dsv4_jax import (
    AttentionType,
    CacheLayout,
    CacheSize,
    DSV4Config,
    KVCache,
    KVCacheManager,
    cache_sharding,
    init_cache,
    init_host_cache,
    model,
)
from dsv4_jax.errors import LayoutError, StepError
from dsv4_jax.ops.scatter import set_existing
from dsv4_jax.serialization import layout_from_json, layout_to_json

from .harness import image

_, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(layer_types=(CSA, HCA))  # each has a window as SWA layers do
LAYOUT = CacheLayout(CFG)
SIZE = CacheSize(6, 3, 2)
LAYOUTS = [
    LAYOUT,
    CacheLayout(DSV4Config.flash(), "bf16", "fp8", 256, 3, hca_state="raw", include_drafts=True, key_split="latency"),
    CacheLayout(dataclasses.replace(CFG, yarn=None), "fp8_per_entry", "f32", numerics="released"),
]


@pytest.fixture(scope="module")
def params():
    return model.init_params(CFG, 0)


def decode(params, cache, plan, tokens):
    return model.decode_step(params, cache, plan, tokens)


jit_prefill = jax.jit(model.prefill, donate_argnames="cache")
jit_decode = jax.jit(decode, donate_argnums=1)


def operands() -> tuple:
    """Of a decode step of two requests and padding, one request long enough to read what it compressed."""
    manager, cache = KVCacheManager(LAYOUT, SIZE), init_cache(LAYOUT, SIZE)
    requests = [manager.admit_request(list(range(1, n))) for n in (40, 3)]
    plan = manager.plan_step([(request, request.num_pending) for request in requests])
    params = model.init_params(CFG, 0)
    _, cache = jit_prefill(params, cache, plan.pack(), manager.plan_tokens(plan))
    for request in requests:
        request.tokens.append(7)
    plan = manager.plan_step([(request, 1) for request in requests], shape=manager.pinned_shape(3))
    return cache, plan, manager.plan_tokens(plan)


# jax.export


def test_an_exported_decode_step_gives_equal_bytes(params) -> None:
    (cache, plan, tokens), (other, *_) = operands(), operands()
    data = export.export(jit_decode)(params, cache, plan.pack(), tokens).serialize()
    again = export.deserialize(bytearray(data))
    expected, expected_cache = jit_decode(params, other, plan.pack(), tokens)
    logits, after = jax.jit(again.call, donate_argnums=1)(params, cache, plan.pack(), tokens)
    np.testing.assert_array_equal(np.asarray(logits).view(np.uint32), np.asarray(expected).view(np.uint32))
    assert isinstance(after, KVCache) and after.layout == LAYOUT and image(after) == image(expected_cache)
    with pytest.raises(ValueError, match="tree"):
        again.call(params, init_cache(CacheLayout(CFG, "bf16"), SIZE), plan.pack(), tokens)


def test_plans_and_begun_steps_are_exported_with_what_is_static_of_them() -> None:
    cache, plan, _ = operands()
    plan = plan._replace(seq_stop=plan.seq_stop + 1)  # as of two steps

    def begun(cache, plan):
        return cache.begin(plan, implementation="xla"), plan.advance(), plan.unpack()

    again = export.deserialize(bytearray(export.export(jax.jit(begun))(cache, plan).serialize()))
    step, advanced, same = again.call(cache, plan)
    assert step.implementation == "xla" and not any(step.written) and step.finish(partial=True).layout == LAYOUT
    assert same.facts == advanced.facts == plan.facts
    assert np.asarray(advanced.token_position).tolist()[:2] == [39 + 1, 2 + 1]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_are_written_whole(layout: CacheLayout) -> None:
    text = layout_to_json(layout)
    assert layout_from_json(text) == layout
    for wrong, problem in (
        (json.dumps(json.loads(text) | {"fingerprint": "0" * 64}), "a layout 000000000000 was written"),
        (json.dumps(json.loads(text) | {"fingerprint": None}), "a layout None was written"),
        ("{}", "no layout that was written here"),
        ("[" * 100_000, "no layout that was written here"),
        (text.replace("bf16", "fp7").replace('"fp8', '"fp7'), "no layout that was written here"),
    ):
        with pytest.raises(LayoutError, match=problem):
            layout_from_json(wrong)


# Derivatives


def test_a_step_has_no_gradient(params) -> None:
    """One error where it would be zero or lack paths; what follows the step has one, and a forward without a cache."""
    cache, plan, tokens = operands()

    def loss(step, name):
        return lambda x: step(params | {name: x}, cache, plan, tokens)[0].sum()

    for step in (decode, jax.jit(decode)):
        with pytest.raises(StepError, match=r"forward_uncached"):
            jax.eval_shape(jax.grad(loss(step, "embed")), params["embed"])
        of_head = jax.eval_shape(jax.grad(loss(step, "head")), params["head"])
        assert of_head.shape == params["head"].shape

    def uncached(embed):
        return model.forward_uncached(CFG, params | {"embed": embed}, np.arange(4)).sum()

    assert jax.eval_shape(jax.grad(uncached), params["embed"]).shape == params["embed"].shape


# checkify


@pytest.fixture(scope="module")
def checked():
    errors = checkify.index_checks | checkify.nan_checks | checkify.div_checks
    return jax.jit(checkify.checkify(model.forward, errors=errors))


@pytest.mark.slow
def test_checkify_raises_no_false_alarm(params, checked) -> None:
    """Padding is written to rows that do not exist, on purpose, and has no sum to divide by."""
    cache, plan, tokens = operands()
    assert checked(params, cache, plan.pack(), tokens)[0].get() is None
    manager = KVCacheManager(LAYOUT, SIZE)
    padded = manager.plan_step([(manager.admit_request([1, 2, 3]), 1)], shape=manager.pinned_shape(3))
    assert padded.facts == plan.facts  # one program for both
    error, _ = checked(params, cache, padded.pack(), np.zeros(padded.num_tokens, np.int32))
    assert error.get() is None


@pytest.mark.slow
def test_checkify_sees_a_real_mistake(params, checked) -> None:
    cache, plan, tokens = operands()
    broken = jax.tree.map(lambda x: x * jnp.asarray(np.nan, x.dtype) if x.dtype == np.float32 else x, params)
    assert "nan" in checked(broken, cache, plan.pack(), tokens)[0].get()

    def wrong(cache, plan):
        return cache.begin(plan).cache.block_table[jnp.asarray(plan.unpack().token_position)]

    error, _ = jax.jit(checkify.checkify(wrong, errors=checkify.index_checks))(cache, plan.pack())
    assert "out-of-bounds" in error.get()


def test_set_existing_drops_what_does_not_exist_in_place() -> None:
    rows, ids, new = jnp.zeros((4, 2), jnp.uint8), jnp.array([2, 4, -1, 2**31 - 1]), jnp.ones((4, 2), jnp.uint8)
    for axis, array in ((0, rows), (1, rows[None])):
        values = new if axis == 0 else new[None]
        step = jax.jit(lambda a, values=values, axis=axis: set_existing(a, ids, values, axis=axis), donate_argnums=0)
        assert "copy" not in step.lower(array).compile().as_text().split("ENTRY")[1]
        assert np.asarray(step(array)).reshape(4, 2).tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]
    both = jax.vmap(set_existing, (0, None, None))(jnp.zeros((2, 4, 2), jnp.uint8), ids, new)
    assert np.asarray(both.sum((1, 2))).tolist() == [2, 2]


# Donation, equality, repr, copies


def test_a_step_moves_only_what_it_is_given(params) -> None:
    """Compiling and running it needs no transfer of its own: engines forbid those that nobody asked for."""
    cache, plan, tokens = operands()
    given = jax.device_put((plan.pack(), tokens))
    with jax.transfer_guard("disallow"):
        logits, cache = jax.jit(decode, donate_argnums=1)(params, cache, *given)
    with jax.transfer_guard("disallow"), pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
        jax.jit(decode)(params, cache, plan.pack(), tokens)
    assert jnp.isfinite(logits).all()


def test_a_donated_cache_says_so(params) -> None:
    cache, plan, tokens = operands()
    _, after = jit_decode(params, cache, plan.pack(), tokens)
    for use in (
        lambda: jit_decode(params, cache, plan.pack(), tokens),
        lambda: cache.begin(plan),
        lambda: jax.tree.leaves(cache),
        lambda: jax.block_until_ready(cache),
    ):
        with pytest.raises(StepError, match="go on with the cache that the step returned"):
            use()
    assert repr(cache).startswith("KVCache(donated, CacheLayout(")
    assert "donated" not in repr(after)


def test_a_cache_is_itself_only_and_its_repr_is_short() -> None:
    cache, other = init_cache(LAYOUT, SIZE), init_cache(LAYOUT, SIZE)
    assert cache == cache and cache != other and len({cache, other}) == 2
    assert repr(cache).startswith(f"KVCache({LAYOUT.total_bytes(SIZE):,} bytes in {len(LAYOUT.leaves)} arrays, Cache")
    mesh = jax.make_mesh((1,), ("data",))
    for odd in (cache_sharding(LAYOUT, mesh), jax.eval_shape(lambda: cache), jax.tree.map(lambda _: None, cache)):
        assert len(repr(odd)) < 300
    host = init_host_cache(LAYOUT, 5)
    jax.jit(lambda host: host, donate_argnums=0)(host)
    assert repr(host).startswith("HostCache(5 pages, CacheLayout(") and host == host
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(cache)]
    assert sorted(paths) == sorted(f".arrays['{leaf.name}']" for leaf in LAYOUT.leaves)


def test_caches_and_plans_are_copied_and_pickled() -> None:
    cache, plan, _ = operands()
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert again.layout == LAYOUT and image(again) == image(cache)
        assert again.arrays["swa.nope"] is not cache.arrays["swa.nope"]
    for form in (plan, plan.pack()):
        for again in (copy.deepcopy(form), pickle.loads(pickle.dumps(form))):
            assert type(again) is type(form) and again.facts == plan.facts
            assert all(np.array_equal(a, b) for a, b in zip(again.unpack().arrays, plan.arrays, strict=True))


def test_a_cache_put_together_of_other_arrays_is_refused() -> None:
    """Restored of two checkpoints, or in another order: rows would be another layer's."""
    cache, plan, _ = operands()
    whole, large = cache.arrays, init_cache(LAYOUT, dataclasses.replace(SIZE, num_blocks=SIZE.num_blocks + 8)).arrays
    paged = next(leaf.name for leaf in reversed(LAYOUT.leaves) if leaf.scope == "block")
    for changes, problem in (
        ({paged: large[paged]}, f"leaf {paged} is"),
        ({paged: whole[paged].astype("float32")}, "float32"),
        ({"x": 1}, "not both have x"),
        ({"swa.nope": whole["block_table.ids"]}, "leaf swa.nope is int32"),
    ):
        with pytest.raises(LayoutError, match=problem):
            KVCache(whole | changes, LAYOUT).begin(plan)
    with pytest.raises(LayoutError, match=r"not both have block_table\.ids"):
        KVCache({name: whole[name] for name in whole if name != "block_table.ids"}, LAYOUT).begin(plan)


# Shardings


def test_where_a_cache_may_be() -> None:
    devices = jax.devices()
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    whole = LAYOUT.total_bytes(SIZE)
    for sharding, shards, where in (
        (devices[1], 1, {devices[1]}),
        (SingleDeviceSharding(devices[2]), 1, {devices[2]}),
        (NamedSharding(mesh, PartitionSpec("data")), 2, {*mesh.devices.flat}),
        (NamedSharding(mesh, PartitionSpec()), 1, {*mesh.devices.flat}),
        (NamedSharding(mesh, PartitionSpec(("data", "tensor"))), 4, {*mesh.devices.flat}),
    ):
        cache = init_cache(LAYOUT, SIZE, sharding=sharding)
        assert sum(x.nbytes for x in jax.tree.leaves(cache)) == shards * whole
        assert all(x.devices() == where and x.committed for x in jax.tree.leaves(cache))
    like = cache_sharding(LAYOUT, mesh)
    named = init_cache(LAYOUT, SIZE, sharding=NamedSharding(mesh, PartitionSpec("data")))
    given = init_cache(LAYOUT, SIZE, sharding=like)
    for a, b in zip(jax.tree.leaves(named), jax.tree.leaves(given), strict=True):
        assert a.shape == b.shape and a.sharding == b.sharding
    for wrong, problem in (
        (NamedSharding(mesh, PartitionSpec("data", "tensor")), "along its leading axis only"),
        (PartitionSpec("data"), "a device, a jax Sharding or the KVCache"),
        ("cpu", "got str"),
        (cache_sharding(CacheLayout(CFG, "bf16"), mesh), "the sharding is of CacheLayout"),
        (init_cache(LAYOUT, SIZE), "got ArrayImpl for swa.nope"),
    ):
        with pytest.raises(LayoutError, match=problem):
            init_cache(LAYOUT, SIZE, sharding=wrong)
