"""Reads checkpoints: a directory with `config.json` and `model.safetensors` (or shards and their index).

Two spellings of tensor names are read: that of the published checkpoints, which `transformers`
>= 5.10 also writes, and that of the `transformers` modules. FP8 matrices with scales per 128 x 128
block and FP4 matrices with scales per row and 32 columns are kept as they are, or dequantised. The layers
that draft (`mtp.0.*`; of DSpark three) are read if they are asked for, else skipped.

A checkpoint is not trusted: every file, name, shape, dtype and scale is checked against the config
before the first parameter is made, and no text in it names a file outside its directory. A file in the
directory may be a symbolic link, to wherever it points: caches of downloads are made of them, and
only who may write to the directory can make one.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...config import DSV4Config, Numerics
from ...former_names import former_keywords
from ...hf_config import check_weight_blocks, read_hf
from .deferred import Progress, make
from .names import address
from .packing import pack_layers
from .params import RELEASED, Params, Weights, is_leaf, param_specs
from .placement import shard_params
from .sources import Source, open_tensors
from .stacking import stack_projections

__all__ = ["load_hf"]


@former_keywords(mtp="drafts")
def load_hf(
    path: str | pathlib.Path,
    *,
    weights: Weights = jnp.float32,
    packed: bool = False,
    drafts: bool = False,
    numerics: Numerics = "plain",
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> tuple[DSV4Config, Params]:
    """Reads a checkpoint directory.

    Tensors go from the mapped files to the device one by one, to where they stay: beside the files, a host needs memory
    for a few of them, whatever the size of the checkpoint.

    Args:
        path: holds `config.json` and `model.safetensors` or else the shards that
            `model.safetensors.index.json` names, plain names of files in this directory.
        weights: "released" keeps FP8 and FP4 matrices as they are (`param_specs` says which those are); a dtype is
            that of all matrices, whatever the checkpoint stores: float32 for the reference, bfloat16 to compute as
            fast as plain arrays allow.
        packed: in the form to decode with, what `pack_layers(stack_projections(params))` makes, without their copies.
        drafts: with the layers that draft (`generate(drafts=)`): the MTP layer, or the stages of DSpark.
        numerics: as of `param_specs`: "released" reads FP8 and FP4 matrices into forms whose products round rows to
            e4m3.
        mesh: over its devices as by `shard_params`, and packed: each is given its own part, and no more.
        progress: called with the bytes made and the bytes in all, after every tensor.

    Raises:
        ConfigError: `config.json` is missing or wrong, or `weights`, `drafts` or `numerics` are not possible for it.
        CheckpointError: a file or tensor is missing, has the wrong shape, is in a format this
            loader cannot read or that is not the released one, or is not part of the model; names it.
        ShapeError: as `param_specs`.
        LayoutError: as `shard_params`.

    Warns:
        PerformanceWarning: with released numerics, of FP4 scales too far apart to be widened, as `as_released`.
    """
    path = pathlib.Path(path)
    hf = read_hf(path)
    cfg = DSV4Config.from_hf(hf)
    check_weight_blocks(hf)
    specs = param_specs(cfg, weights, drafts=drafts, numerics=numerics)
    source = Source(open_tensors(path), cfg, drafts=drafts, released=isinstance(weights, str) and weights == RELEASED)
    params = jax.tree_util.tree_map_with_path(
        lambda keys, spec: source.find(*address(keys), spec), specs, is_leaf=is_leaf
    )
    source.check_all_found()
    if mesh is not None:
        return cfg, shard_params(cfg, params, mesh, progress=progress)
    return cfg, make(pack_layers(stack_projections(params)) if packed else params, progress)
