"""Parameters over the devices of a mesh: each device gets its part, stacked and packed, and nothing else.

Over `tensor` are split the matrices of the query heads (`wq_b`, `wo_a` and the sinks) and, by words, that of the output
(`head.logits`); over both axes the experts. All else is on every device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...config import DSV4Config, Numerics
from ...errors import LayoutError, ShapeError
from ...former_names import former_keywords
from .deferred import Deferred, Progress, make
from .names import MTP
from .packing import PackedLayers, pack_layers
from .params import RELEASED, Params, Weights, is_leaf, param_specs
from .quantised import Quantised
from .split import ALONE, HEAD, ORDER, TENSOR, RowShare, Split, check_split, in_blocks, parts_of, split_over
from .stacking import stack_projections

__all__ = ["default_form", "device_bytes", "device_params", "device_specs", "shard_params"]


def shard_params(cfg: DSV4Config, params: Params, mesh: Mesh, *, progress: Progress | None = None) -> Params:
    """Parameters as `load_hf` or `init_params` give them, over the devices of a mesh: what `shard_step` takes.

    Stacked and packed, a copy: every device's part is what `pack_layers(stack_projections(params))` makes of its share.

    Args:
        params: neither stacked nor packed; deferred arrays are made where they are to stay.
        mesh: has no axes but "data" and "tensor".
        progress: called with the bytes made and the bytes in all, on all devices together.

    Raises:
        LayoutError: as `split_over`.
        ShapeError: the parameters are stacked or packed, or not those of this model; or as `stack_projections`.
        ConfigError: there are layers that draft, of which the config does not know.
    """
    split, devices = split_over(cfg, mesh), list(_devices(mesh))
    _check_params(cfg, params)
    deferred = jax.tree.map(_deferred, params)
    parts = [device_params(deferred, split, index) for index, _ in devices]
    each = _made([(part, device) for part, (_, device) in zip(parts, devices, strict=True)], progress)
    axes = tuple(axis for axis in ORDER if axis in mesh.shape)
    whole = functools.partial(_whole, mesh)

    def join(part: Any, *others: Any) -> Any:
        if isinstance(part, RowShare):
            rows = whole((TENSOR,), part.rows, *(other.rows for other in others))
            return dataclasses.replace(part, rows=rows)
        if not isinstance(part, PackedLayers):
            return whole((), part, *others)
        shards = zip(part.arrays, *(other.arrays for other in others), strict=True)
        sizes = tuple((axis, mesh.shape[axis]) for axis in axes)
        return dataclasses.replace(part, arrays=tuple(whole(axes, *x) for x in shards), axes=sizes)

    return jax.tree.map(join, *each, is_leaf=lambda node: isinstance(node, PackedLayers | RowShare))


def device_params(params: Params, split: Split, index: int) -> Params:
    """The part of deferred parameters that a device has, stacked and packed.

    Args:
        index: of the device among those of the split, in the order of their experts: those of a tensor index follow
            one another.
    """

    def take(path: tuple[Any, ...], leaf: Any) -> Any:
        parts = parts_of(path, split)
        return _rows(leaf, index * parts // split.devices, parts)

    taken = jax.tree_util.tree_map_with_path(take, params, is_leaf=is_leaf)
    for layer in (*taken["layers"], *taken.get(MTP, ())):
        for block in ("attn", "ffn"):
            layer[block] |= {"split": split}
    if split.tensor > 1 and HEAD in taken and in_blocks(taken[HEAD].shape, taken[HEAD].dtype):
        share = _rows(taken[HEAD], index * split.tensor // split.devices, split.tensor)
        taken[HEAD] = RowShare(share, split.tensor)
    return pack_layers(stack_projections(taken))


def device_specs(
    cfg: DSV4Config,
    weights: Weights = RELEASED,
    split: Split = ALONE,
    *,
    drafts: bool = False,
    numerics: Numerics = "plain",
) -> Params:
    """The tree of `jax.ShapeDtypeStruct` that each device of a split has, stacked and packed.

    Raises as `param_specs`, `check_split` and `stack_projections`.
    """
    specs = param_specs(cfg, weights, drafts=drafts, numerics=numerics)
    local = device_params(jax.tree.map(_deferred, specs), check_split(cfg, split), 0)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), local)


@former_keywords(mtp="drafts")
def device_bytes(cfg: DSV4Config, weights: Weights = RELEASED, split: Split = ALONE, *, drafts: bool = False) -> int:
    """Returns the bytes that the parameters take on each device of a split, with `drafts` of layers that draft too.

    Raises as `device_specs`.
    """
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(device_specs(cfg, weights, split, drafts=drafts))
    )


def default_form(hf: Mapping[str, Any], memory: int, wide: Callable[[], int], numerics: Numerics = "plain") -> str:
    """The form of a checkpoint's weights if none is asked for.

    Those in FP8 stay as released where there are kernels for them. A CPU has none, and would dequantise them in every
    step: there they are bfloat16, which holds their values exactly, if that takes at most half of the memory.

    Args:
        hf: the checkpoint's `config.json`.
        memory: bytes that each device has.
        wide: says how many bytes of these the weights take in bfloat16; called if that decides.
        numerics: released ones are of weights as released, wherever they are.
    """
    if numerics == "released":
        return RELEASED
    if not hf.get("quantization_config"):
        return "float32"
    return "bfloat16" if jax.default_backend() == "cpu" and wide() <= memory // 2 else "released"


def _check_params(cfg: DSV4Config, params: Params) -> None:
    """Raises `ShapeError` unless they are those of this model, neither stacked nor packed."""
    found = _shapes(params)
    released = any(is_leaf(node) for node in jax.tree.leaves(params, is_leaf=is_leaf))
    with_mtp = isinstance(params, dict) and MTP in params
    wanted = _shapes(param_specs(cfg, RELEASED if released else jnp.float32, drafts=with_mtp))
    for path in [*wanted, *found]:
        if found.get(path) != wanted.get(path):
            raise ShapeError(
                f"params{path} is {found.get(path, 'missing')}, of this model it is {wanted.get(path, 'nothing')}: "
                "expected what load_hf or init_params give, neither stacked nor packed"
            )


def _shapes(params: Any) -> dict[str, list[int]]:
    return {jax.tree_util.keystr(path): list(np.shape(x)) for path, x in jax.tree.leaves_with_path(params)}


def _deferred(array: Any) -> Deferred:
    if isinstance(array, Deferred):
        return array
    # What is on the host is put together there.
    on_host = isinstance(array, jax.Array) and all(device.platform == "cpu" for device in array.devices())
    made = functools.partial(np.asarray, array) if on_host else lambda: array
    return Deferred(array.shape, array.dtype, ((array.size, made),))


def _rows(leaf: Any, index: int, parts: int) -> Any:
    """One of so many equal runs of rows of a deferred array, or of matrices with several."""
    if parts == 1:
        return leaf
    if isinstance(leaf, Quantised):
        whole = leaf.shape[0] if len(leaf.shape) == 2 else None
        shares = tuple(_rows(part, index, parts) for part in leaf.parts)
        return dataclasses.replace(leaf, parts=shares, whole_rows=whole)
    if leaf.shape[0] % parts:
        raise LayoutError(f"a matrix of {leaf.shape[0]} rows of tiles or scales does not divide by {parts} devices")
    rows = leaf.shape[0] // parts
    return leaf.rows(index * rows, (index + 1) * rows)


def _devices(mesh: Mesh) -> Iterator[tuple[int, jax.Device]]:
    """(index, device) of this process's devices, by index: as of `device_params`."""
    sizes = {axis: mesh.shape.get(axis, 1) for axis in ORDER}
    present = [axis for axis in ORDER if axis in mesh.shape]
    order = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in present]).reshape(*sizes.values())
    for index, device in enumerate(order.flat):
        if device.process_index == jax.process_index():
            yield index, device


def _whole(mesh: Mesh, axes: tuple[str, ...], *shards: jax.Array) -> jax.Array:
    """Joins the shards of this process's devices to one array; with axes their rows follow one another."""
    sharding = NamedSharding(mesh, PartitionSpec(*([axes] if axes else [])))
    parts = math.prod(mesh.shape[axis] for axis in axes)
    shape = (parts * shards[0].shape[0], *shards[0].shape[1:]) if parts > 1 else shards[0].shape
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))


def _made(parts: Sequence[tuple[Params, jax.Device]], progress: Progress | None) -> list[Params]:
    """Returns the parts, each made on its device by a thread of its own: none waits for another's pieces.

    Progress is told of all together, by one thread at a time. The first error stops them all at their next piece.
    """
    done, totals = [0] * len(parts), [0] * len(parts)
    lock, stop = threading.Lock(), threading.Event()

    def one(number: int) -> Params:
        def tell(made: int, total: int) -> None:
            with lock:
                if stop.is_set():
                    raise CancelledError
                done[number], totals[number] = made, total
                if progress is not None:
                    progress(sum(done), max(totals) * len(parts))

        return make(parts[number][0], tell, parts[number][1])

    with ThreadPoolExecutor(len(parts)) as pool:
        futures = [pool.submit(one, number) for number in range(len(parts))]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            stop.set()
    return [future.result() for future in futures]
