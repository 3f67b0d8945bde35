"""The tensors of a checkpoint directory, each checked against the parameter it is for before any is read."""

from __future__ import annotations

import functools
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...config import DSV4Config
from ...errors import CheckpointError
from ...formats.weights import WeightFormat, fp4, fp4_e4m3
from ...untrusted import brief, plain, read_json
from .deferred import Deferred
from .names import EXPERT_MATRICES, MTP, OWN_MTP_TABLES, expert_name, names_of
from .params import check_expert_ids
from .quantised import FP4, FP8, Quantised
from .safetensors import read_safetensors

__all__ = ["Source", "open_tensors"]

_E4M3_NAN = np.uint8(0x7F)  # magnitude of the codes that are no numbers
_E8M0_NAN = 0xFF
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_NIBBLES = (np.dtype(np.int8), np.dtype(np.uint8))  # of files: two e2m1 codes a byte
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FLOATS = tuple(np.dtype(name) for name in (np.float32, np.float16, ml_dtypes.bfloat16))
_SCALES = (*_FLOATS, _E8M0)
_MAX_SCALE = 2.0**118  # times 448, the largest e4m3, it is a float32
_MAX_INDEX_BYTES = 32 * 2**20  # that of V4-Pro's 140,000 tensors has 12 MB


class _Stored(NamedTuple):
    """A tensor of a checkpoint; with its scales, and the rows and columns that share one, if it is quantised."""

    name: str
    tensor: np.ndarray
    scale: np.ndarray | None = None
    block: tuple[int, int] = (1, 1)

    def read(self, dtype: Any) -> jax.Array:
        """Reads the tensor as a plain array on the device, never a view of the file.

        Raises `CheckpointError`: an FP8 code is NaN.
        """
        if np.issubdtype(self.tensor.dtype, np.integer) and self.scale is None:
            return jnp.array(self.tensor.astype(dtype))
        if self.scale is None:
            return jnp.array(self.tensor).astype(dtype)
        self._check_codes()
        return jnp.array(_dequantise(self.tensor, self.scale, self.block).astype(dtype))

    def bits(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales, as they are. Raises `CheckpointError`: a code is NaN."""
        assert self.scale is not None
        return self._check_codes(), self.scale.view(np.uint8)

    def _check_codes(self) -> np.ndarray:
        codes = self.tensor.view(np.uint8)
        if self.tensor.dtype == ml_dtypes.float8_e4m3fn and codes.size and (codes & _E4M3_NAN).max() == _E4M3_NAN:
            raise CheckpointError(f"tensor {self.name} holds a NaN")
        return codes


class Source:
    """The tensors of a checkpoint by name, and which of them were asked for.

    Args:
        drafts: whether those of the layers that draft are to be; else they are skipped.
        released: whether matrices are to stay as they are stored.

    Raises:
        CheckpointError: a tensor is there twice; or the checkpoint is of a kind that does not run so: says of which,
            and how it runs.
    """

    def __init__(
        self, tensors: dict[str, np.ndarray], cfg: DSV4Config, *, drafts: bool = False, released: bool = False
    ):
        # Names are compared without the "model." that module names start with.
        self.tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        if len(self.tensors) < len(tensors):
            twice = next(name for name in tensors if f"model.{name}" in tensors)
            raise CheckpointError(f"tensor {plain(twice)} is there twice, with and without 'model.'")
        self.cfg, self.drafts = cfg, drafts
        self.unread = {name for name in self.tensors if not self._is_skipped(name)}
        first = expert_name("layers.0.", 0, "w1")
        if released and first in self.tensors and self.tensors[first].dtype == ml_dtypes.float8_e4m3fn:
            raise CheckpointError(
                "the checkpoint's routed experts are FP8 (e4m3, a scale per 128 x 128), as in base checkpoints: as "
                "released only FP4 experts run, and these dequantised, with weights of bfloat16 or float32"
            )
        if drafts:
            self._check_drafts()

    def _check_drafts(self) -> None:
        """Refuses heads that are not the layers of `param_specs`."""
        stages = {int(found[1]) for name in self.tensors if (found := re.match(rf"{MTP}\.([0-9]{{1,9}})\.", name))}
        if len(stages) > 1 and self.cfg.dspark is None:
            raise CheckpointError(
                f"the checkpoint's draft head has {len(stages)} stages, as DSpark's has, of which its config says "
                "nothing (dspark_*): it runs without drafts"
            )
        own = next((name for name in OWN_MTP_TABLES if name in self.tensors), None)
        if own is not None:
            raise CheckpointError(
                f"the checkpoint's MTP layer has an embedding and a head of its own ({own}), and here it shares the "
                "model's: it runs without drafts"
            )

    def _is_skipped(self, name: str) -> bool:
        """Whether a tensor is of a layer that drafts, or of a head that the config replaces by the embedding.

        A stage's second bias of its gate is for images, which are not drafted.
        """
        layer = re.match(r"layers\.([0-9]{1,9})\.", name)
        beyond = int(layer[1]) - self.cfg.num_layers if layer else -1
        is_head = self.cfg.tie_word_embeddings and name in names_of("", "head")
        drafting = name.startswith(f"{MTP}.")
        of_images = drafting and self.cfg.dspark is not None and name.endswith(".ffn.gate.bias_vl")
        skipped = of_images or (drafting and not self.drafts)
        return skipped or 0 <= beyond < self.cfg.num_draft_layers or is_head

    def find(self, prefix: str, name: str, spec: Any) -> Any:
        """A parameter that is read when it is made: its tensors are checked against its shape and dtype already."""
        names = names_of(prefix, name)
        found = next((prefix + known for known in names if prefix + known in self.tensors), None)
        matrices = EXPERT_MATRICES.get(name)
        if found is None and matrices is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise CheckpointError(f"missing tensor {prefix}{names[0]}{others}")
        if isinstance(spec, Quantised):
            return self._quantised(prefix, None if matrices else found, matrices, spec)
        if found is not None:
            return _plain(spec, (self._take(found, spec.shape, spec.dtype),))
        assert matrices is not None
        experts, rows, columns = spec.shape
        part = (rows // len(matrices), columns)
        stored = (expert_name(prefix, e, w) for e in range(experts) for w in matrices)
        return _plain(spec, tuple(self._take(name, part, spec.dtype) for name in stored))

    def _quantised(self, prefix: str, name: str | None, matrices: tuple[str, ...] | None, spec: Quantised) -> Quantised:
        """Finds a quantised parameter: one tensor, or those of all experts."""
        fmt = spec.format
        if name is not None:
            stored = [(self._released(name, spec.shape, fmt),)]
        else:
            assert matrices is not None
            experts, rows, columns = spec.shape
            each = (rows // len(matrices), columns)
            names = [[expert_name(prefix, e, w) for w in matrices] for e in range(experts)]
            stored = [tuple(self._released(name, each, fmt) for name in of_expert) for of_expert in names]

        def part(i: int, of: jax.ShapeDtypeStruct) -> Deferred:
            pieces = (functools.partial(_packed, matrix, fmt, i) for matrix in stored)
            return Deferred(of.shape, of.dtype, tuple((of.size // len(stored), piece) for piece in pieces))

        return Quantised(tuple(part(i, of) for i, of in enumerate(spec.parts)), fmt)

    def _released(self, name: str, shape: tuple[int, ...], fmt: WeightFormat) -> _Stored:
        """A matrix in the format in which it is to stay."""
        if name not in self.tensors:
            raise CheckpointError(f"missing tensor {name}")
        tensor, (codes, _) = self.tensors[name], fmt.released(*shape)
        expected = _NIBBLES if fmt.per_byte == 2 else (np.dtype(ml_dtypes.float8_e4m3fn),)
        if tensor.dtype not in expected:
            raise CheckpointError(
                f"tensor {name} has dtype {tensor.dtype}, as released it has {_listed(expected)} ({fmt.code} codes)"
            )
        if tensor.shape != codes:
            raise CheckpointError(f"tensor {name} has shape {tensor.shape}, expected {codes}")
        self.unread.discard(name)
        return _Stored(name, tensor, self._scale(name, fmt, shape, (_E8M0,), _of_e8m0(fmt.largest_scale)), fmt.block)

    def _take(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> _Stored:
        if name not in self.tensors:
            raise CheckpointError(f"missing tensor {name}")
        tensor = self.tensors[name]
        nibbles = tensor.dtype in _NIBBLES and FP4.released(*shape)[0] == tensor.shape if len(shape) == 2 else False
        if tensor.shape != shape and not nibbles:
            raise CheckpointError(f"tensor {name} has shape {tensor.shape}, expected {shape}")
        self.unread.discard(name)
        if jnp.issubdtype(dtype, jnp.integer):
            check_expert_ids(name, tensor, self.cfg)
            return _Stored(name, tensor)
        if tensor.dtype in _FLOATS:
            return _Stored(name, tensor)
        if tensor.dtype == ml_dtypes.float8_e4m3fn or nibbles:
            fmt = FP4 if nibbles else FP8
            return _Stored(name, tensor, self._scale(name, fmt, shape, _SCALES, _MAX_SCALE), fmt.block)
        if tensor.dtype.itemsize == 1:
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, which this loader cannot dequantise")
        raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, expected one of {_listed(_FLOATS)}")

    def _scale(
        self, name: str, fmt: WeightFormat, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...], limit: float
    ) -> np.ndarray:
        """Returns the scales of a matrix of this shape, of one of these dtypes, none greater than `limit`."""
        names = (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale")
        found = next((known for known in names if known in self.tensors), None)
        if found is None:
            raise CheckpointError(f"tensor {name} is {fmt.code} but has no {' or '.join(names)}")
        scale = self.tensors[found]
        if len(shape) != 2:
            raise CheckpointError(f"tensor {name} is {fmt.code} but no matrix: its shape is {shape}")
        blocks = tuple(-(-size // step) for size, step in zip(shape, fmt.block, strict=True))
        if scale.shape != blocks:
            raise CheckpointError(f"tensor {found} has shape {scale.shape}, expected {blocks}")
        if scale.dtype not in dtypes:
            raise CheckpointError(f"tensor {found} has dtype {scale.dtype}, expected one of {_listed(dtypes)}")
        of_codes = scale.dtype == _E8M0
        largest = _of_e8m0(scale.view(np.uint8).max()) if of_codes else np.abs(scale.astype(np.float32)).max()
        if not largest <= limit:  # so is NaN
            raise CheckpointError(f"tensor {found} holds the scale {largest}, at most {limit:g} is possible")
        self.unread.discard(found)
        return scale

    def check_all_found(self) -> None:
        if self.unread:
            example = plain(min(self.unread))
            raise CheckpointError(f"{len(self.unread)} tensors are not part of the model, such as {example}")


def _of_e8m0(code: int) -> float:
    return float("nan") if code == _E8M0_NAN else 2.0 ** (int(code) - 127)


def _listed(dtypes: tuple[np.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def _dequantise(tensor: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """e4m3 [m, n], or e2m1 two a byte, times one scale per block -> float32."""
    if tensor.dtype in _NIBBLES:
        codes = tensor.view(np.uint8)
        values = _E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(len(codes), -1)
    else:
        values = tensor.astype(np.float32)
    spread = np.repeat(np.repeat(scale.astype(np.float32), block[0], 0), block[1], 1)
    return values * spread[: values.shape[0], : values.shape[1]]


def _plain(spec: jax.ShapeDtypeStruct, stored: tuple[_Stored, ...]) -> Deferred:
    """A parameter of tensors whose rows follow one another in it."""
    size = spec.size // len(stored)
    return Deferred(spec.shape, spec.dtype, tuple((size, functools.partial(x.read, spec.dtype)) for x in stored))


def _packed(stored: tuple[_Stored, ...], fmt: WeightFormat, part: int) -> jax.Array:
    """Returns a part of a packed matrix, or of an expert's gates and ups."""
    if fmt.parts[part].name == "scales":
        return jnp.array(stored[0].bits()[1])
    bits = tuple(x.bits() for x in stored)
    if (fmt.code, fmt.rows) == ("e2m1", "e4m3"):
        for one, (codes, scales) in zip(stored, bits, strict=True):
            if int(scales.max()) - int(scales.min()) > fp4_e4m3.MAX_SPAN:  # else no 128 columns span more
                fp4_e4m3.warn_of_spans(f"tensor {one.name}", fp4_e4m3.spans(codes, scales))
    return _pack(bits, fmt, part)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pack(bits: tuple[tuple[jax.Array, jax.Array], ...], fmt: WeightFormat, part: int) -> jax.Array:
    codes, scales = bits[0] if len(bits) == 1 else (fp4.gate_up_rows(*pair) for pair in zip(*bits, strict=True))
    return fmt.codec.pack(codes, scales)[part]


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
        index = read_json(path, _MAX_INDEX_BYTES, unique_keys=True)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict):
        raise CheckpointError(f"{path} holds no weight_map")
    for name, file in where.items():
        if not _is_file_name(file):
            raise CheckpointError(f"{path} places {plain(name)} in {brief(file)}, which is no plain file name")
    return where


def _is_file_name(name: Any) -> bool:
    """Returns a visible file of this directory, whatever the platform."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="replace")) <= 255
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & set("/\\:")
    )
