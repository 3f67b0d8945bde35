"""The tensors of a checkpoint directory, each checked against the parameter it is for before any is read."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..config import DSV4Config
from ..errors import CheckpointError
from ..untrusted import plain, read_json, shown
from .names import names_of
from .safetensors import read_safetensors

__all__ = ["Found", "Source", "open_tensors"]

_FP8_BLOCK = 128
_FLOATS = tuple(np.dtype(name) for name in (np.float32, np.float16, ml_dtypes.bfloat16))
_SCALES = (*_FLOATS, np.dtype(ml_dtypes.float8_e8m0fnu))
_MOST_SCALE = 2.0**118  # times 448, the largest e4m3, it is a float32
_MOST_INDEX_BYTES = 32 * 2**20  # that of V4-Pro's 140,000 tensors has 12 MB


class _Stored(NamedTuple):
    """A tensor of a checkpoint; if it is FP8, with its scales."""

    tensor: np.ndarray
    scale: np.ndarray | None = None

    def read(self) -> np.ndarray:
        return self.tensor if self.scale is None else _dequantise(self.tensor, self.scale)


@dataclasses.dataclass(frozen=True)
class Found:
    """Where a parameter is: one tensor, or tensors whose rows follow one another in it."""

    spec: jax.ShapeDtypeStruct
    parts: tuple[_Stored, ...]

    def read(self) -> jax.Array:
        if len(self.parts) == 1:
            return jnp.asarray(self.parts[0].read().astype(self.spec.dtype))
        whole = np.empty(self.spec.shape, self.spec.dtype)
        rows = whole.reshape(len(self.parts), -1, whole.shape[-1])
        for to, part in zip(rows, self.parts, strict=True):
            to[:] = part.read().astype(self.spec.dtype)
        return jnp.asarray(whole)


class Source:
    """The tensors of a checkpoint by name, and which of them were asked for."""

    def __init__(self, tensors: dict[str, np.ndarray], cfg: DSV4Config):
        # Names are compared without the "model." that module names start with.
        self.tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        if len(self.tensors) < len(tensors):
            twice = next(name for name in tensors if f"model.{name}" in tensors)
            raise CheckpointError(f"tensor {plain(twice)} is there twice, with and without 'model.'")
        self.cfg = cfg
        self.unread = {name for name in self.tensors if not self._is_skipped(name)}

    def _is_skipped(self, name: str) -> bool:
        """Of an MTP layer, or a head that the config replaces by the embedding."""
        layer = re.match(r"layers\.([0-9]{1,9})\.", name)
        beyond = int(layer[1]) - self.cfg.num_layers if layer else -1
        is_head = self.cfg.tie_word_embeddings and name in names_of("", "head")
        return name.startswith("mtp.") or 0 <= beyond < self.cfg.num_mtp_layers or is_head

    def find(self, prefix: str, name: str, spec: jax.ShapeDtypeStruct) -> Found:
        """The tensors of a parameter, checked against its shape and dtype but not yet read."""
        names = names_of(prefix, name)
        found = next((prefix + known for known in names if prefix + known in self.tensors), None)
        if found is not None:
            return Found(spec, (self._take(found, spec.shape, spec.dtype),))
        per_expert = {"ffn.experts.gate_up": ("w1", "w3"), "ffn.experts.down": ("w2",)}.get(name)
        if per_expert is None:
            raise CheckpointError(f"missing tensor {prefix}{names[0]} (or {', '.join(names[1:])})")
        experts, rows, columns = spec.shape
        part = (rows // len(per_expert), columns)
        stored = (f"{prefix}ffn.experts.{e}.{w}.weight" for e in range(experts) for w in per_expert)
        return Found(spec, tuple(self._take(name, part, spec.dtype) for name in stored))

    def _take(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> _Stored:
        if name not in self.tensors:
            raise CheckpointError(f"missing tensor {name}")
        tensor = self.tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {name} has shape {tensor.shape}, expected {shape}")
        self.unread.discard(name)
        if jnp.issubdtype(dtype, jnp.integer):
            return _Stored(self._expert_ids(name, tensor))
        if tensor.dtype in _FLOATS:
            return _Stored(tensor)
        if tensor.dtype == ml_dtypes.float8_e4m3fn:
            return _Stored(tensor, self._scale(name, tensor))
        if tensor.dtype.itemsize == 1:
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, which this loader cannot dequantise")
        raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, expected one of {_listed(_FLOATS)}")

    def _expert_ids(self, name: str, tensor: np.ndarray) -> np.ndarray:
        if not np.issubdtype(tensor.dtype, np.integer):
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, expected integers")
        low, high, experts = tensor.min(), tensor.max(), self.cfg.n_routed_experts
        if low < 0 or high >= experts:
            raise CheckpointError(f"tensor {name} holds experts {low}..{high}, the model has 0..{experts - 1}")
        return tensor

    def _scale(self, name: str, tensor: np.ndarray) -> np.ndarray:
        names = (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale")
        found = next((known for known in names if known in self.tensors), None)
        if found is None:
            raise CheckpointError(f"tensor {name} is FP8 but has no {' or '.join(names)}")
        scale = self.tensors[found]
        if tensor.ndim != 2:
            raise CheckpointError(f"tensor {name} is FP8 but no matrix: its shape is {tensor.shape}")
        blocks = tuple(-(-size // _FP8_BLOCK) for size in tensor.shape)
        if scale.shape != blocks:
            raise CheckpointError(f"tensor {found} has shape {scale.shape}, expected {blocks}")
        if scale.dtype not in _SCALES:
            raise CheckpointError(f"tensor {found} has dtype {scale.dtype}, expected one of {_listed(_SCALES)}")
        largest = np.abs(scale.astype(np.float32)).max()
        if not largest <= _MOST_SCALE:  # so is NaN
            raise CheckpointError(f"tensor {found} holds the scale {largest}, at most {_MOST_SCALE:g} is possible")
        self.unread.discard(found)
        return scale

    def check_all_found(self) -> None:
        if self.unread:
            example = plain(min(self.unread))
            raise CheckpointError(f"{len(self.unread)} tensors are not part of the model, such as {example}")


def _listed(dtypes: tuple[np.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def _dequantise(tensor: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """e4m3 [m, n] times one scale per 128 x 128 block -> float32."""
    spread = np.repeat(np.repeat(scale.astype(np.float32), _FP8_BLOCK, 0), _FP8_BLOCK, 1)
    return tensor.astype(np.float32) * spread[: tensor.shape[0], : tensor.shape[1]]


def open_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a directory by name. As in transformers, one file wins over an index."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if os.path.isfile(single) or not os.path.isfile(index):
        return read_safetensors(single)
    where = _read_index(index)
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(where.values())):
        shard = read_safetensors(path / file)
        extra = next((name for name in shard if where.get(name) != file), None)
        if extra is not None:
            raise CheckpointError(f"tensor {plain(extra)} is in {file}, where the index does not place it")
        tensors |= shard
    for name, file in where.items():
        if name not in tensors:
            raise CheckpointError(f"missing tensor {plain(name)}: the index places it in {file}")
    return tensors


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Tensor name -> name of a file beside the index."""
    try:
        index = read_json(path, _MOST_INDEX_BYTES, unique_keys=True)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict):
        raise CheckpointError(f"{path} holds no weight_map")
    for name, file in where.items():
        if not _is_file_name(file):
            raise CheckpointError(f"{path} places {plain(name)} in {shown(file)}, which is no plain file name")
    return where


def _is_file_name(name: Any) -> bool:
    """A visible file of this directory, whatever the platform."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="replace")) <= 255
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & set("/\\:")
    )
