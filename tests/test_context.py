"""One request's blocks over 1, 2 and 4 devices: the same selection, the same bits, through every way of the manager."""

from __future__ import annotations

import dataclasses
import pathlib
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
    plan_capacity,
    run_transfers,
    shard_step,
)
from dsv4_jax.errors import LayoutError, OutOfBlocksError
from dsv4_jax.formats import kv_format
from dsv4_jax.manager import CachePolicy, HostSize
from dsv4_jax.manager.allocator import BlockAllocator
from dsv4_jax.ops.append import WindowView
from dsv4_jax.ops.attend import attend
from dsv4_jax.ops.attend_parts import attend_parts
from dsv4_jax.ops.merge import Partial, in_halves, merge_candidates, with_sink
from dsv4_jax.ops.pool_axis import ONE_RANK, PoolAxis, entries_of_parts
from dsv4_jax.ops.top_k import top_k
from dsv4_jax.records import block_record, snapshot_record
from dsv4_jax.stores import AsyncStore, SlabStore
from dsv4_jax.tiers.remote import RecordTransport, RemoteDriver
from dsv4_jax.tiers.storage_driver import StorageDriver
from dsv4_jax.transports import open_engine

from .model.feeding import V4_WIDTHS
from .oracle import attention as oracle

SWA, CSA, HCA = AttentionType
# Sizes of which XLA rounds products alike on the CPU, whole and halved.
CFG = DSV4Config.tiny(layer_types=(CSA, HCA), o_groups=4, n_routed_experts=8)
# V4's attention widths, so that every kernel takes part.
WIDE = dataclasses.replace(
    CFG,
    **V4_WIDTHS,
    hidden_size=256,
    q_lora_rank=128,
    o_lora_rank=128,
    moe_intermediate_size=256,
    index_topk=64,
    n_routed_experts=16,
    num_experts_per_tok=6,
)


def layout_of(cfg: DSV4Config, key_split: Any) -> CacheLayout:
    return CacheLayout(cfg, block_tokens=cfg.hca_ratio, draft_tokens=2, key_split=key_split)


class Server:
    """A manager, its cache and host records, over a mesh or on one device, and a step that all of them take."""

    def __init__(self, params: Any, layout: CacheLayout, mesh: Any = None, axis: str = ""):
        ranks, block = mesh.size if mesh else 1, layout.block_tokens
        self.params, self.layout = params, layout
        self.size = CacheSize(12 // ranks, 2, 8, num_snapshots=1, pool_ranks=ranks)
        self.pages = HostSize.of(layout, 16 // ranks, 4)
        self.placed = cache_sharding(layout, mesh, data_axis=None, pool_axis=axis) if mesh else None
        self.step = (
            shard_step(model.forward, mesh, data_axis=None) if mesh else jax.jit(model.forward, donate_argnums=1)
        )
        self.outs, self.moved = list[np.ndarray](), 0
        self.restart()
        # One shape, so one executable, for chunks, decodes and drafts.
        self.shape = self.manager.pinned_shape(1, block // 2)

    def restart(self) -> None:
        """With nothing cached."""
        self.manager = KVCacheManager(self.layout, self.size, policy=CachePolicy(), host=self.pages, weights_id="same")
        self.cache: Any = init_cache(self.layout, self.size, sharding=self.placed)
        where: Any = self.placed.arrays["hca.nope"] if self.placed else None
        self.records: Any = init_host_cache(self.layout, self.pages.num_pages, sharding=where)

    def transfer(self) -> None:
        stages = self.manager.take_transfers()
        self.moved += len(stages)
        self.cache, self.records = run_transfers(self.cache, self.records, stages)

    def run(self, request: Any, count: int) -> None:
        plan = self.manager.plan_step([(request, count)], shape=self.shape)
        self.transfer()
        out, self.cache = self.step(self.params, self.cache, plan.pack(), self.manager.plan_tokens(plan))
        self.outs.append(np.asarray(out)[:count])
        self.manager.check_integrity()

    def prefill(self, request: Any) -> None:
        while request.num_pending > 1:
            most = min(request.num_pending - 1, self.layout.block_tokens // 2)
            ((_, count),) = self.manager.schedule(most, shape=self.shape, requests=[request])
            self.run(request, count)

    def turn(self, request: Any, last: int) -> None:
        self.prefill(request)
        request.tokens += [5, 250]  # drafts, of which the second is rejected
        self.run(request, 3)
        self.manager.accept(request, 2)
        request.tokens.append(last)
        self.run(request, 1)

    def empty(self, driver: StorageDriver) -> None:
        """All that is cached goes to storage."""
        self.manager.sleep()
        self.transfer()
        self.manager.wakeup()
        driver.save(self.records)
        self.records = driver.drain(self.records)

    def connected(self) -> tuple[RemoteDriver, RecordTransport]:
        transport = RecordTransport(open_engine("loopback"))
        self.published = transport.publish_host(self.records)
        return RemoteDriver(self.manager, transport), transport


def serve(params: Any, layout: CacheLayout, folder: pathlib.Path, mesh: Any = None, axis: str = "") -> np.ndarray:
    """Logits of all tokens of five turns: with hits on the device, the host, in storage and on another host."""
    server, block, rng = Server(params, layout, mesh, axis), layout.block_tokens, np.random.default_rng(0)
    folder.mkdir()
    records = {"blocks": block_record(layout), "states": snapshot_record(layout)}
    stores = [
        AsyncStore(SlabStore(folder / name, record_bytes=record.bytes, max_records=32, fingerprint="0" * 64))
        for name, record in records.items()
    ]
    manager, most = server.manager, dict(max_tokens=8 * block)
    storage = StorageDriver(manager, *stores)
    prompt = rng.integers(0, layout.cfg.vocab_size, 4 * block + 11).tolist()
    first = manager.admit_request(prompt, **most)
    server.turn(first, 77)
    first.tokens.append(3)
    manager.preempt(first)  # its state and its last block go to the host
    other = prompt[: 5 * block // 2] + rng.integers(0, layout.cfg.vocab_size, 3 * block).tolist()
    second = manager.admit_request(other, **most)
    server.turn(second, 9)  # and its blocks push the first one's there
    manager.release_request(second)
    manager.resume(first)
    server.run(first, 1)
    manager.release_request(first)
    third = manager.admit_request([*prompt, 1, 2], **most)
    server.turn(third, 4)
    assert third.num_hit == 4 * block and first.num_hit == 4 * block + 13 and server.moved > 2
    manager.release_request(third)

    server.empty(storage)
    server.restart()
    storage = StorageDriver(server.manager, *stores)
    prefetch = storage.prefetch(prompt)
    server.records = storage.drain(server.records)
    fourth = server.manager.admit_request(prompt, **most)
    assert prefetch.records == 5 and fourth.num_hit == 4 * block
    there, sending = server.connected()
    published = server.published
    there.export(fourth)
    while not (handed := there.take_handoffs()):
        server.manager.flush()
        server.transfer()
        there.poll(server.cache, server.records)
    kept = server.records

    server.restart()
    here, taking = server.connected()
    arrival = here.receive(handed[0].to_json(), taking.connect(published), prompt)
    while not arrival.is_over:
        here.poll(server.cache, server.records)
    sending.close(), taking.close(), kept.pages.delete()
    fifth = server.manager.admit_remote(arrival, **most)
    assert fifth.num_hit == 4 * block
    server.turn(fifth, 8)
    return np.concatenate(server.outs)


def check(folder: pathlib.Path, cfg: DSV4Config, params: Any, *meshes: tuple[int, str]) -> None:
    layout, apart = layout_of(cfg, "context"), {}
    alone = serve(model.pack_layers(model.stack_projections(params)), layout, folder / "alone")
    assert np.isfinite(alone).all() and np.ptp(alone) > 0.1
    for size, axis in meshes:
        mesh = jax.make_mesh((size,), (axis,), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])
        if axis == "tensor":
            ours = model.shard_params(cfg, params, mesh)
        else:
            packed = model.pack_layers(model.stack_projections(params))
            ours = jax.device_put(packed, jax.NamedSharding(mesh, jax.P()))
        with jax.set_mesh(mesh):
            several = serve(ours, layout, folder / axis, mesh, axis)
        apart[f"{size} ranks of {axis}"] = np.abs(several - alone).max()
    assert not any(apart.values()), apart


@pytest.mark.slow
def test_bits_do_not_depend_on_the_ranks(tmp_path: pathlib.Path) -> None:
    """Over the axis that splits the heads, and over one of its own."""
    check(tmp_path, CFG, model.init_params(CFG, 0), (2, "tensor"), (4, "pool"))


@pytest.mark.slow
def test_generate_draws_what_one_device_does() -> None:
    """Over the axis that splits the heads."""
    cfg = dataclasses.replace(CFG, layer_types=(HCA,))
    layout, drawn = CacheLayout(cfg, block_tokens=cfg.hca_ratio, key_split="context"), list[list[list[int]]]()
    params, prompts = model.init_params(cfg, 0), [[7, 1, 4] * 10, [3]]
    for ranks in (1, 2):
        mesh, size = model.Split(1, ranks).mesh(), CacheSize(6 // ranks, 1, 6, pool_ranks=ranks)
        placed = cache_sharding(layout, mesh, pool_axis="tensor") if ranks > 1 else None
        ours, manager = model.shard_params(cfg, params, mesh) if ranks > 1 else params, KVCacheManager(layout, size)
        cache = init_cache(layout, size, sharding=placed)
        drawn.append(model.generate(ours, cache, manager, prompts, max_new_tokens=9, chunk_tokens=1)[0])
    assert drawn[0] == drawn[1] and len({*drawn[0][0]}) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_gpus_give_the_bits_of_one(tmp_path: pathlib.Path, ranks: int) -> None:
    if len(jax.devices()) < ranks:
        pytest.skip(f"needs {ranks} devices")
    check(tmp_path, WIDE, model.init_params(WIDE, 0, "released"), (ranks, "pool"), (ranks, "tensor"))


@pytest.mark.parametrize("ranks", [2, 8])
def test_selection_and_shares(ranks: int) -> None:
    """What ranks propose gives what one device selects, ties and NaN included; their shares are all keys."""
    per_block, columns, k, rng = 4, 11, 9, np.random.default_rng(ranks)
    total = columns * per_block
    scores = rng.integers(0, 5, (6, total)).astype(np.float32)
    scores[:, ::7] = np.nan
    scores[scores == 1] = -0.0
    visible = np.array([0, 3, 10, 21, 43, total], np.int32)
    expected, kept = top_k(scores, visible, k=k)
    proposed, entries, seen = [], [], np.zeros((6, total), int)
    for rank in range(ranks):
        mine = [c for c in range(-(-columns // ranks) * ranks) if c % ranks == rank]
        own = np.array([c * per_block + i for c in mine for i in range(per_block)])
        axis, count = At(ranks, rank), np.array([(own < v).sum() for v in visible], np.int32)
        np.testing.assert_array_equal(axis.own_visible(jnp.asarray(visible), per_block), count)
        table = jnp.arange(1, columns + 1, dtype=jnp.int32)[None]  # block c + 1 is on rank c mod n
        theirs = np.asarray(axis.own_columns(table))[0]
        assert theirs.tolist() == [c // ranks + 1 if c < columns else 0 for c in mine]
        here = np.take(np.pad(scores, ((0, 0), (0, per_block * ranks))), own, 1)
        found, some = top_k(here, count, k=k)
        everyones = np.asarray(axis.entries_of_all(found, per_block))
        proposed.append(np.take_along_axis(here, np.asarray(found), 1))
        entries.append(np.where(np.arange(found.shape[1]) < np.asarray(some)[:, None], everyones, 2**31 - 1))
        for listed in (None, expected):
            (chosen,), (number,) = entries_of_parts(
                listed,
                jnp.asarray(visible if listed is None else kept),
                jnp.array([rank]),
                ranks,
                per_block=per_block,
                columns=columns,
            )
            for t in range(6):
                part = np.asarray(chosen)[t, : number[t]]
                assert (part // per_block % ranks == rank).all()
                if listed is None:
                    seen[t, part] += 1
                else:
                    order = [e for e in np.asarray(expected)[t, : kept[t]] if e // per_block % ranks == rank]
                    assert part.tolist() == sorted(order)
    assert (seen == (np.arange(total) < visible[:, None])).all()
    merged = merge_candidates(jnp.concatenate(proposed, 1), jnp.concatenate(entries, 1).astype(jnp.int32), k=k)
    for t in range(6):
        np.testing.assert_array_equal(merged[t, : kept[t]], expected[t, : kept[t]])


class At(PoolAxis):
    """A rank, outside of `shard_map`."""

    def __init__(self, ranks: int, rank: int):
        super().__init__("pool" if ranks > 1 else None, ranks)
        object.__setattr__(self, "at", np.int32(rank))

    @property
    def rank(self) -> np.int32:
        return self.at  # type: ignore[attr-defined]


def test_softmax_of_parts() -> None:
    """Any number of ranks that merge their parts first gives the same bits; and it is the softmax of all keys."""
    rng = np.random.default_rng(0)
    logits, values = rng.normal(0, 4, (8, 3, 5)).astype(np.float32), rng.normal(size=(8, 3, 5, 6)).astype(np.float32)
    logits[2], logits[:, 1] = -np.inf, -np.inf  # a part without keys, a token without any
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(logits.astype(float)).sum(-1))
        out = np.nan_to_num((np.exp(logits - lse[..., None])[..., None] * values).sum(-2))
        sink = 0.5
        whole = np.exp(logits.astype(float))
        expected = (whole[..., None] * values).sum((0, 2)) / (whole.sum((0, 2)) + np.exp(sink))[:, None]
    parts = [
        Partial.of(jnp.asarray(o, jnp.float32), jnp.asarray(x, jnp.float32)) for o, x in zip(out, lse, strict=True)
    ]
    sums = [in_halves([in_halves(parts[rank::ranks]) for rank in range(ranks)]) for ranks in (1, 2, 4, 8)]
    for one in sums[1:]:
        for x, y in zip(one, sums[0], strict=True):
            np.testing.assert_array_equal(x, y)
    got, of_all = with_sink(sums[0], jnp.full(3, sink, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert of_all[1] == -np.inf and not np.asarray(got)[1].any()


def test_outputs_of_any_number_of_ranks_are_within_a_millionth() -> None:
    """Of the exact ones, in float32, with the other key splits: what n ranks make together, n parts make on one."""
    rng, heads, dim, per_block = np.random.default_rng(1), 4, 32, 4
    fmt, shapes = kv_format("f32", dim, 8), [(3, heads, dim), (80, dim), (40, dim)]
    queries, rows, window = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    sink, listed = np.full(heads, 0.5, np.float32), np.stack([rng.permutation(80)[:60] for _ in range(3)])
    count, ids = np.array([60, 33, 0], np.int32), np.tile(np.arange(40), (3, 1))
    how = dict(scale=dim**-0.5, fmt=fmt, implementation="xla")
    held, near = (rows,), WindowView((window,), jnp.asarray(ids, jnp.int32), jnp.asarray(ids < [[40], [40], [7]]))
    chosen = jnp.asarray(listed, jnp.int32)
    keys = [np.concatenate([window[: 7 if t == 2 else 40], rows[listed[t, : count[t]]]]) for t in range(3)]
    expected, _ = oracle.attend(queries, sink, keys, dim**-0.5)

    def outs(*given: jax.Array) -> list[jax.Array]:
        q, count, *listed = given
        found = [attend(q, sink, near, held, *listed, count, **how)[0]]
        for parts in (2, 8):
            found += attend_parts(
                q,
                sink,
                near,
                held,
                *listed,
                count,
                rows_of=lambda _, entries: entries,
                axis=ONE_RANK,
                parts=parts,
                heads=heads,
                per_block=per_block,
                columns=20,
                inverse_rope=None,
                dtype=jnp.float32,
                key_split="throughput",
                **how,
            )[:1]
        return found

    for out in jax.jit(outs)(queries, count, chosen):
        assert np.abs(out - expected).max() < 1e-6 * np.abs(expected).max()


def test_units_of_ranks() -> None:
    pool = BlockAllocator(6, ranks=2)
    assert pool.acquire_at([1, 2, 3, 5]) == [2, 1, 4, 6] and pool.free_on == [2, 0]
    with pytest.raises(OutOfBlocksError, match=r"device \(rank 1\)"):
        pool.acquire_at([2, 1])
    assert pool.free_on == [2, 0]
    pool.release([6])
    pool.resize(4)
    pool.check_integrity()
    assert pool.free_on == [1, 0] and pool.acquire_at([4]) == [3]


def test_capacity_and_refusals() -> None:
    layout = layout_of(CFG, "throughput")
    one, four = (
        plan_capacity(layout, hbm_bytes=8 << 20, max_requests=2, num_snapshots=0, pool_ranks=n) for n in (1, 4)
    )
    assert layout.total_bytes(four) <= 8 << 20 and four.pool_ranks == 4
    assert four.max_blocks_per_request > 3 * one.max_blocks_per_request or four.max_blocks_per_request == 256
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    with pytest.raises(LayoutError, match="axis 'data' cannot split a request's blocks: it splits requests"):
        cache_sharding(layout, mesh, pool_axis="data")
    over = cache_sharding(layout, mesh, pool_axis="tensor")
    with pytest.raises(LayoutError, match="the size is of 1 pool ranks, the sharding of 2"):
        init_cache(layout, CacheSize(4, 1, 4), sharding=over)
    with pytest.raises(LayoutError, match="of 2 pool ranks, the sharding of 1"):
        init_cache(layout, CacheSize(4, 1, 4, pool_ranks=2))
    assert ONE_RANK.own_blocks(3) == 3
