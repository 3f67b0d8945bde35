"""Checkpoints: a directory with `config.json` and `model.safetensors` (or shards and their index).

Two spellings of tensor names are read: that of the published checkpoints, which `transformers`
>= 5.10 also writes, and that of the `transformers` modules, which `save_hf` writes. FP8 matrices
with scales per 128 x 128 block are dequantised; MTP layers are skipped.

A checkpoint is not trusted: every file, name, shape and dtype is checked against the config before
the first parameter is made, and no text in it names a file outside its directory. A file in the
directory may be a symbolic link, to wherever it points: caches of downloads are made of them, and
only who may write to the directory can make one.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from ..config import DSV4Config
from ..errors import CheckpointError, ConfigError
from ..hf_config import check_weight_blocks, read_hf
from .names import address, names_of
from .params import Params, param_specs
from .safetensors import write_safetensors
from .sources import Found, Source, open_tensors

__all__ = ["load_hf", "save_hf"]


def load_hf(path: str | pathlib.Path, *, dtype: jax.typing.DTypeLike = jnp.float32) -> tuple[DSV4Config, Params]:
    """Reads a checkpoint directory.

    Args:
        path: holds `config.json` and `model.safetensors` or else the shards that
            `model.safetensors.index.json` names, plain names of files in this directory.
        dtype: of the matrices, whatever the checkpoint stores: float32 for the reference,
            bfloat16 to compute as fast as the weights allow.

    Raises:
        ConfigError: `config.json` is missing or wrong.
        CheckpointError: a file or tensor is missing, has the wrong shape, is in a format this
            loader cannot read, or is not part of the model; names it.
    """
    path = pathlib.Path(path)
    hf = read_hf(path)
    cfg = DSV4Config.from_hf(hf)
    check_weight_blocks(hf)
    source = Source(open_tensors(path), cfg)
    found = jax.tree_util.tree_map_with_path(
        lambda keys, spec: source.find(*address(keys), spec), param_specs(cfg, dtype)
    )
    source.check_all_found()
    return cfg, jax.tree.map(Found.read, found)


def save_hf(cfg: DSV4Config, params: Params, path: str | pathlib.Path) -> None:
    """Writes `config.json` and `model.safetensors` so that `load_hf` and `transformers` read them.

    Raises:
        CheckpointError: `params` are not those of `cfg`, or Hugging Face's fields cannot say `cfg`;
            names the parameter or field. Nothing is written.
    """
    path = pathlib.Path(path)
    _check_sayable(cfg)
    specs, tensors = param_specs(cfg), {}
    if jax.tree.structure(specs) != jax.tree.structure(params):
        raise CheckpointError("the parameters are not those of this config: the trees differ")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (keys, value), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        prefix, name = address(keys)
        if value.shape != spec.shape:
            raise CheckpointError(f"{prefix}{name}: has shape {value.shape}, the config says {spec.shape}")
        if jnp.issubdtype(value.dtype, jnp.floating) != jnp.issubdtype(spec.dtype, jnp.floating):
            raise CheckpointError(f"{prefix}{name}: has dtype {value.dtype}, expected {spec.dtype}")
        module = names_of(prefix, name)[0]
        full = module if name == "head" else f"model.{prefix}{module}"
        array = np.asarray(value)
        tensors[full] = array.astype(np.int64) if name == "ffn.tid2eid" else array
    dtype = "bfloat16" if params["embed"].dtype == jnp.bfloat16 else "float32"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(cfg.to_hf(dtype), indent=2) + "\n")
    write_safetensors(path / "model.safetensors", tensors)


def _check_sayable(cfg: DSV4Config) -> None:
    try:
        read = DSV4Config.from_hf(cfg.to_hf("float32"))
    except ConfigError as error:
        raise CheckpointError(f"this config would not be read back: {error}") from None
    for field in dataclasses.fields(cfg):
        said, ours = getattr(read, field.name), getattr(cfg, field.name)
        if said != ours:
            raise CheckpointError(f"config field {field.name!r}: {ours!r} would be read back as {said!r}")
