"""Writes checkpoints that `load_hf` reads: plain parameters as `transformers` does, quantised ones as published."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...config import DSV4Config
from ...errors import CheckpointError, ConfigError, FileError
from ...formats.weights import WeightFormat
from ...formats.weights.fp4 import gates_and_ups
from ...output import open_output
from ...untrusted import plain
from .names import EXPERT_MATRICES, MTP, address, expert_name, names_of, published_name
from .params import RELEASED, Params, is_leaf, param_specs
from .quantised import Quantised
from .safetensors import Later, write_safetensors

__all__ = ["save_hf"]

# Beside the fields of every config: what the released checkpoints say of their weights.
_RELEASED_FIELDS = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}
_CODES = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e2m1": np.dtype(np.int8)}
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def save_hf(cfg: DSV4Config, params: Params, path: str | pathlib.Path) -> None:
    """Writes `config.json` and `model.safetensors`.

    Plain parameters get the names that `transformers` reads too, those of layers that
    draft (which it ignores) the published ones.
    Quantised ones (`weights="released"`) are written with
    the published names and in the published formats, one tensor at a time; what is not quantised keeps its dtype.

    Raises:
        ConfigError: they have layers that draft, and `cfg` has none.
        CheckpointError: `params` are packed or stacked, or not those of `cfg`, or Hugging Face's fields cannot say
            `cfg`; names the parameter or field. Nothing is written.
        FileError: the directory cannot be made, or a file not be written. Each is written beside its place and then
            renamed, so a checkpoint that was there stays whole, also for who has it mapped.
    """
    path = pathlib.Path(path)
    _check_sayable(cfg)
    released = any(map(is_leaf, jax.tree.leaves(params, is_leaf=is_leaf)))
    specs = param_specs(cfg, RELEASED if released else jnp.float32, drafts=MTP in params)
    if (tree := jax.tree.structure(params)) != jax.tree.structure(specs):
        if any(word in str(tree) for word in ("PackedLayers", "of_input")):
            raise CheckpointError(
                "the parameters are packed or stacked: save them as they were before `pack_layers` and "
                "`stack_projections`, or load or make them without packed=True"
            )
        raise CheckpointError("the parameters are not those of this config: the trees differ")
    tensors: dict[str, np.ndarray | Later] = {}
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_leaf)
    for (keys, value), spec in zip(leaves, jax.tree.leaves(specs, is_leaf=is_leaf), strict=True):
        prefix, name = address(keys)
        if value.shape != spec.shape:
            raise CheckpointError(f"{prefix}{name}: has shape {value.shape}, the config says {spec.shape}")
        if jnp.issubdtype(value.dtype, jnp.floating) != jnp.issubdtype(spec.dtype, jnp.floating):
            raise CheckpointError(f"{prefix}{name}: has dtype {value.dtype}, expected {spec.dtype}")
        if isinstance(value, Quantised):
            tensors |= _quantised(prefix, name, value)
            continue
        module = names_of(prefix, name)[0]
        if released or prefix.startswith(MTP):
            full = published_name(prefix, name)
        else:
            full = module if name == "head" else f"model.{prefix}{module}"
        dtype = np.dtype(np.int64) if name == "ffn.tid2eid" else np.dtype(value.dtype)
        tensors[full] = Later(dtype, value.shape, functools.partial(_read, value, dtype))
    dtype = "bfloat16" if params["embed"].dtype == jnp.bfloat16 else "float32"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # the latter: a NUL
        raise FileError(f"{plain(str(path))}: {getattr(error, 'strerror', None) or error}") from error
    fields = cfg.to_hf(dtype) | (_RELEASED_FIELDS if released else {})
    write_safetensors(path / "model.safetensors", tensors)
    with open_output(path / "config.json", encoding="utf-8") as file:
        file.write(json.dumps(fields, indent=2) + "\n")


def _read(value: jax.Array, dtype: np.dtype) -> np.ndarray:
    return np.asarray(value).astype(dtype)


def _quantised(prefix: str, name: str, value: Quantised) -> Iterator[tuple[str, Later]]:
    """A matrix, or those of all experts: codes, then scales, of each."""
    fmt, matrices = value.format, EXPERT_MATRICES.get(name)
    if matrices is None:
        yield from _pair(fmt, published_name(prefix, name), value.shape, functools.partial(_bits, value))
        return
    experts, rows, columns = value.shape
    each = (rows // len(matrices), columns)

    @functools.lru_cache(maxsize=1)  # an expert's tensors are written one after the other
    def of_expert(e: int) -> tuple[tuple[np.ndarray, ...], ...]:
        codes, scales = _bits(Quantised(tuple(part[e] for part in value.parts), fmt))
        if len(matrices) == 1:
            return ((codes, scales),)
        return tuple(zip(gates_and_ups(codes), gates_and_ups(scales), strict=True))

    for e in range(experts):
        for i, matrix in enumerate(matrices):
            bits = functools.partial(lambda e, i: of_expert(e)[i], e, i)
            yield from _pair(fmt, expert_name(prefix, e, matrix), each, bits)


def _pair(fmt: WeightFormat, name: str, shape: tuple[int, ...], bits: Any) -> Iterator[tuple[str, Later]]:
    codes, scales = fmt.released(*shape)
    yield name, Later(_CODES[fmt.code], codes, lambda: bits()[0].view(_CODES[fmt.code]))
    yield f"{name.removesuffix('.weight')}.scale", Later(_E8M0, scales, lambda: bits()[1].view(_E8M0))


def _bits(matrix: Quantised) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = _unpack(matrix)
    return np.asarray(codes), np.asarray(scales)


@jax.jit
def _unpack(matrix: Quantised) -> tuple[jax.Array, jax.Array]:
    return matrix.format.codec.unpack(*matrix.parts)


def _check_sayable(cfg: DSV4Config) -> None:
    try:
        read = DSV4Config.from_hf(cfg.to_hf("float32"))
    except ConfigError as error:
        raise CheckpointError(f"this config would not be read back: {error}") from None
    for field in dataclasses.fields(cfg):
        said, ours = getattr(read, field.name), getattr(cfg, field.name)
        if said != ours:
            raise CheckpointError(f"config field {field.name!r}: {ours!r} would be read back as {said!r}")
