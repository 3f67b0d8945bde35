"""Engines from what a user has: a checkpoint, or parameters, a layout and memory."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ..cache import KVCache, init_cache
from ..capacity import device_limit, plan_capacity, plan_host_capacity
from ..checks import check_boolean, check_integer, check_iterable, shown
from ..config import DSV4Config, Numerics
from ..errors import CapacityError, CheckpointError, PlanError
from ..events import EventLog
from ..hf_config import read_hf
from ..layout import CacheLayout, CacheSize
from ..manager import CachePolicy, HostSize, KVCacheManager
from ..model.weights.loading import load_hf
from ..model.weights.params import Params
from ..model.weights.placement import default_form, device_bytes
from ..model.weights.split import DATA, TENSOR, Split
from ..ops.exchange_buffers import Exchange
from ..ops.registry import Choice
from ..records import page_bytes
from ..sharding import cache_sharding
from ..stores import AsyncStore
from ..tiers.host_cache import HostCache, init_host_cache
from ..tiers.remote import RecordTransport, RemoteDriver
from ..tiers.storage_driver import StorageDriver
from .core import Core, Limits, shapes_of
from .device import MAX_TOP, DeviceExecutor, Renew

__all__ = ["build", "load"]

MANY_SLOTS = 8  # from so many on decodes of a few requests have shapes of their own
MIN_CHUNK = 512  # tokens of a step that computes prompts, if there are not more slots
_DEFAULT, _LIMITS = CachePolicy(states="blocks"), Limits()
_SPARE = 0.1  # of what weights leave of a device: for what a step computes with


def build(
    params: Params,
    layout: CacheLayout,
    memory: int | CacheSize,
    *,
    max_requests: int = 64,
    max_context: int | None = None,
    host: int | HostSize = 0,
    stores: tuple[AsyncStore, AsyncStore] | None = None,
    transport: RecordTransport | None = None,
    policy: CachePolicy | None = _DEFAULT,
    weights_id: Any = None,
    events: Sequence[EventLog] | bool = (),
    mesh: Mesh | None = None,
    pool: bool = False,
    exchanges: Sequence[Exchange] = (),
    chunk_tokens: int | None = None,
    decode_steps: int = 1,
    decode_rows: Iterable[int] | None = None,
    prefill_tokens: Iterable[int] | None = None,
    drafts: int = 0,
    acceptance: str = "coupled",
    least_confidence: float = 0.0,
    ahead: bool = True,
    limits: Limits = _LIMITS,
    seed: int = 0,
    top: int = MAX_TOP,
    implementation: Choice = None,
) -> tuple[Core, DeviceExecutor]:
    """Makes the two parts of an `Engine`: cache, tiers and managers of the right size, and what runs them.

    Args: as `Engine.of`.
    """
    drafts, pool = check_integer("drafts", drafts, error=PlanError), check_boolean("pool", pool, error=PlanError)
    shards = 1 if mesh is None else _checked(mesh).shape.get(DATA, 1)
    if policy is _DEFAULT and pool:  # whose ranks have blocks of their own
        policy = CachePolicy()
    if isinstance(memory, CacheSize):
        size = memory
    else:
        size = plan_capacity(
            layout,
            hbm_bytes=memory,
            max_requests=max_requests,
            max_context=max_context,
            pool_ranks=mesh.shape[TENSOR] if pool and mesh is not None else 1,
            num_snapshots=0 if policy is None else None,
            states="slots" if policy is None else policy.states,
        )
    if isinstance(host, HostSize):
        pages = host
    elif host := check_integer("host", host, error=CapacityError):
        pages = HostSize(plan_host_capacity(layout, host // shards))
    else:
        pages = HostSize(0)
    if isinstance(events, bool):
        events = [EventLog(details=True) for _ in range(shards)] if events else []
    events = [*check_iterable("events", events, error=PlanError)]
    if wrong := [log for log in events if not isinstance(log, EventLog)]:
        raise PlanError(f"events must be of EventLog, got {shown(wrong[0])}")
    if events and len(events) != shards:
        raise PlanError(f"{len(events)} event logs for {shards} data shards")
    if stores is not None and not pages.num_pages:
        raise PlanError("stores: records come from the host tier, of which there is none")
    if transport is not None and (not pages.num_pages or policy is None or shards > 1):
        raise PlanError("transport: hand-offs need a policy and a host tier, and are of one data shard")
    placed = None if mesh is None else cache_sharding(layout, mesh, pool_axis=TENSOR if pool else None)
    managers = [
        KVCacheManager(
            layout,
            size,
            policy=policy,
            host=pages if pages.num_pages else None,
            weights_id=weights_id,
            events=events[i] if events else None,
        )
        for i in range(shards)
    ]

    def new_cache() -> KVCache:
        return init_cache(layout, size, sharding=placed)

    def new_host() -> HostCache:
        leaf = None
        if placed is not None:
            leaf = next(placed.arrays[leaf.name] for leaf in layout.leaves if leaf.scope == "block")
            assert isinstance(leaf, NamedSharding)
        return init_host_cache(layout, pages.num_pages, sharding=leaf)

    if chunk_tokens is None:
        chunk_tokens = max(MIN_CHUNK, size.num_slots * (1 + drafts))
    slots, on_gpu = size.num_slots, jax.default_backend() == "gpu"  # a CPU compiles for long, and gains little
    if decode_rows is None:
        decode_rows = {1, slots // 4} if slots >= MANY_SLOTS and on_gpu else ()
    if prefill_tokens is None:
        few = check_integer("chunk_tokens", chunk_tokens, error=PlanError) // 4
        prefill_tokens = {few} if few >= max(MIN_CHUNK, slots * (1 + drafts)) and on_gpu else ()
    widths = dict(decode_rows=decode_rows, prefill_tokens=prefill_tokens)
    shapes = shapes_of(managers, chunk_tokens, steps=decode_steps, drafts=drafts, **widths)
    drivers = []
    if stores is not None:
        drivers = [StorageDriver(manager, *stores, shard=i, shards=shards) for i, manager in enumerate(managers)]
    new, remote = new_host() if pages.num_pages else None, None
    if transport is not None and new is not None:
        managers[0].need_weights_id()
        transport.publish_host(new)
        remote = RemoteDriver(managers[0], transport)
    executor = DeviceExecutor(
        params,
        new_cache(),
        shapes,
        host=new,
        renew=Renew(new_cache, new_host if pages.num_pages else None),
        exchanges=exchanges,
        drivers=drivers,
        remote=remote,
        top=top,
        acceptance=acceptance,
        least_confidence=least_confidence,
        implementation=implementation,
    )
    return Core(managers, shapes, limits=limits, storage=drivers, remote=remote, ahead=ahead, seed=seed), executor


def load(
    checkpoint: str | pathlib.Path,
    *,
    weights: Any = None,
    kv_format: str = "fp8",
    index_format: str = "fp4",
    block_tokens: int = 128,
    numerics: Numerics = "plain",
    memory: int | float = 0.9,
    drafts: int = 0,
    mesh: Mesh | None = None,
    weights_id: Any = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> tuple[Core, DeviceExecutor]:
    """Makes the parts of an `Engine` from a checkpoint's folder.

    Args: as `Engine.load`.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise CheckpointError(f"checkpoint must be the path of a folder, got {shown(checkpoint)}")
    drafts = check_integer("drafts", drafts, error=PlanError)
    hf = read_hf(pathlib.Path(checkpoint))
    cfg, sizes = DSV4Config.from_hf(hf), {} if mesh is None else _checked(mesh).shape
    split = Split(sizes.get(DATA, 1), sizes.get(TENSOR, 1))
    wide = functools.partial(device_bytes, cfg, "bfloat16", split, drafts=drafts > 0)
    form = default_form(hf, device_limit(), wide, numerics) if weights is None else weights
    layout = CacheLayout(
        cfg,
        kv_format,
        index_format,
        block_tokens=block_tokens,
        draft_tokens=drafts,
        include_drafts=drafts > 0,
        numerics=numerics,
    )
    if isinstance(memory, float) and not 0 < memory <= 1:
        raise CapacityError(f"memory: a share of the device is above 0 and at most 1, got {shown(memory)}")
    _, params = load_hf(
        checkpoint,
        weights=form,
        packed=form == "released",
        drafts=drafts > 0,
        numerics=numerics,
        mesh=mesh,
        progress=progress,
    )
    if isinstance(memory, float):
        held = sum(_own_bytes(leaf) for leaf in jax.tree.leaves(params))
        memory = int((device_limit() * memory - held) * (1 - _SPARE))
        if memory < page_bytes(layout):
            raise CapacityError(f"weights take {held} bytes of the device, nothing of its share is left for a cache")
    name = str(pathlib.Path(checkpoint).resolve()) if weights_id is None else weights_id
    return build(params, layout, memory, drafts=drafts, mesh=mesh, weights_id=name, **options)


def _checked(mesh: Mesh) -> Mesh:
    """Raises `PlanError` if it is no mesh."""
    if not isinstance(mesh, Mesh):
        raise PlanError(f"mesh must be a Mesh or None, got {shown(mesh)}")
    return mesh


def _own_bytes(array: Any) -> int:
    """The bytes of an array that the first device holds."""
    shards = getattr(array, "addressable_shards", None)
    return shards[0].data.nbytes if shards else array.nbytes
