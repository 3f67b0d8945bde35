"""One request's blocks over 1, 2 and 4 devices: the same selection, the same bits, through every way of the manager."""

from __future__ import annotations

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
    init_host_cache,
    model,
    run_transfers,
    shard_step,
)
from dsv4_jax.errors import LayoutError
from dsv4_jax.manager import CachePolicy, HostSize
from dsv4_jax.ops.merge import NO_SINK, Partial, in_halves, merge_candidates, with_sink
from dsv4_jax.ops.pool_axis import PoolAxis, part_of, visible_of
from dsv4_jax.ops.top_k import top_k

SWA, CSA, HCA = AttentionType
# Sizes of which XLA rounds products alike on the CPU, whole and halved.
CFG = DSV4Config.tiny(layer_types=(CSA, HCA), o_groups=4, n_routed_experts=8)
TOKENS = 8  # of every step: one executable for chunks, decodes and drafts


def layout_of(key_split: Any) -> CacheLayout:
    return CacheLayout(CFG, block_tokens=16, draft_tokens=2, key_split=key_split)


def serve(params: Any, layout: CacheLayout, mesh: Any = None, axis: str = "") -> tuple[np.ndarray, dict[str, int]]:
    """Logits of all tokens of three turns, and what happened: hits, blocks and states that went to the host and came back."""
    ranks = mesh.size if mesh else 1
    size = CacheSize(12 // ranks, 2, 8, num_snapshots=1, pool_ranks=ranks)
    host = HostSize.of(layout, 16 // ranks, 4)
    manager = KVCacheManager(layout, size, policy=CachePolicy(), host=host)
    placed = cache_sharding(layout, mesh, data_axis=None, pool_axis=axis) if mesh else None
    pages = placed.arrays["hca.nope"] if placed else None
    cache: Any = init_cache(layout, size, sharding=placed)
    records: Any = init_host_cache(layout, host.num_pages, sharding=pages)
    step = shard_step(model.forward, mesh, data_axis=None) if mesh else jax.jit(model.forward, donate_argnums=1)
    shape, rng, outs, moved = manager.pinned_shape(1, TOKENS), np.random.default_rng(0), [], 0

    def run(request: Any, count: int) -> None:
        nonlocal cache, records, moved
        plan = manager.plan_step([(request, count)], shape=shape)
        stages = manager.take_transfers()
        moved += len(stages)
        cache, records = run_transfers(cache, records, stages)
        out, cache = step(params, cache, plan.pack(), manager.plan_tokens(plan))
        outs.append(np.asarray(out)[:count])
        manager.check_integrity()

    def turn(request: Any, last: int) -> None:
        while request.num_pending > 1:
            ((_, count),) = manager.schedule(TOKENS, shape=shape, max_chunk=request.num_pending - 1, requests=[request])
            run(request, count)
        request.tokens += [5, 250]  # drafts, of which the second is rejected
        run(request, 3)
        manager.accept(request, 2)
        request.tokens.append(last)
        run(request, 1)

    prompt = rng.integers(0, CFG.vocab_size, 75).tolist()
    first = manager.admit_request(prompt, max_tokens=128)
    turn(first, 77)
    first.tokens.append(3)
    manager.preempt(first)  # its state and its last block go to the host
    second = manager.admit_request(prompt[:40] + rng.integers(0, CFG.vocab_size, 48).tolist(), max_tokens=128)
    turn(second, 9)  # and its blocks push the first one's there
    manager.release_request(second)
    manager.resume(first)
    run(first, 1)
    manager.release_request(first)
    third = manager.admit_request([*prompt, 1, 2], max_tokens=128)
    turn(third, 4)
    did = {"hit": third.num_hit, "resumed": first.num_hit, "moved": moved}
    return np.concatenate(outs), did


def mesh_of(size: int, axis: str) -> jax.sharding.Mesh:
    return jax.make_mesh((size,), (axis,), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])


@pytest.mark.slow
def test_bits_do_not_depend_on_the_ranks() -> None:
    """Over an axis of its own, and over the one that splits the heads."""
    layout, params = layout_of("context"), model.init_params(CFG, 0)
    alone, did = serve(model.pack_layers(model.stack_projections(params)), layout)
    assert did["hit"] == 64 and did["resumed"] == 77 and did["moved"] > 2, did
    for size, axis in ((2, "tensor"), (4, "pool")):
        mesh = mesh_of(size, axis)
        ours = model.shard_params(CFG, params, mesh) if axis == "tensor" else params
        with jax.set_mesh(mesh):
            several, done = serve(ours, layout, mesh, axis)
        assert done == did
        np.testing.assert_array_equal(several, alone, err_msg=f"{size} ranks")
