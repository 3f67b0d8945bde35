"""Reads and writes safetensors files with NumPy: a JSON header, then raw little-endian tensors.

Written out here because the `safetensors` package cannot hand FP8 tensors to NumPy, and because
views of a memory map let a checkpoint be read tensor by tensor.
Source: the format description at https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ...errors import CheckpointError
from ...output import open_output
from ...untrusted import brief, parse_json

__all__ = ["Later", "read_safetensors", "write_safetensors"]

_DTYPES: dict[str, type] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_MAX_HEADER_BYTES = 32 * 2**20  # all of V4-Pro's 140,000 tensors in one file would need 20 MB
_MAX_DIMS = 8
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class Later(NamedTuple):
    """A tensor to write that is made when its turn comes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Name -> read-only view of the memory-mapped file; no tensor is read yet.

    As the format demands, the tensors must fill the file: none overlap, no byte is left over. Each
    must lie at a multiple of its element size.

    Raises:
        CheckpointError: no such file, not a safetensors file, or a tensor that is not as above.
    """
    data = _mapped(path)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 + length:
        raise CheckpointError(f"{path}: truncated header")
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: a header of {length} bytes, at most {_MAX_HEADER_BYTES} are read")
    try:
        header = parse_json(data[8 : 8 + length].tobytes(), unique_keys=True)
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.pop("__metadata__", {}), dict):
        raise CheckpointError(f"{path}: the header or its __metadata__ is no JSON object")
    body, entries = data[8 + length :], {}
    for name, entry in header.items():
        try:
            entries[name] = _entry(entry, 8 + length, body.size)
        except ValueError as error:
            raise CheckpointError(f"{path}: tensor {brief(name)} {error}") from None
    _check_filled(path, entries, body.size)
    return {name: body[e.start : e.end].view(e.dtype).reshape(e.shape) for name, e in entries.items()}


def _mapped(path: pathlib.Path) -> np.ndarray:
    if not os.path.isfile(path):
        raise CheckpointError(f"no such file: {path}")
    try:
        with path.open("rb") as file:
            return np.asarray(np.memmap(file, mode="r")) if os.fstat(file.fileno()).st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def _entry(entry: Any, body_start: int, body_size: int) -> _Entry:
    """Returns a checked entry of the header. Raises `ValueError` that says what the tensor has or does."""
    fields = entry if isinstance(entry, dict) else {}
    name, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"has unsupported dtype {brief(name)}")
    dtype = np.dtype(_DTYPES[name])
    if shape is None or len(shape) > _MAX_DIMS or math.prod(max(n, 1) for n in shape) >= 2**60:
        raise ValueError(f"has no possible shape: {brief(fields.get('shape'))}")
    if offsets is None or len(offsets) != 2:
        raise ValueError(f"has no possible data_offsets: {brief(fields.get('data_offsets'))}")
    start, end = offsets
    if not start <= end <= body_size or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"does not fit the file: {dtype} {brief(shape)} in bytes {brief(offsets)} of {body_size}")
    if (body_start + start) % dtype.itemsize:
        raise ValueError(f"is misaligned: {dtype} at byte {body_start + start}")
    return _Entry(dtype, shape, start, end)


def _sizes(values: Any) -> tuple[int, ...] | None:
    """A list of non-negative integers, or None if it is anything else."""
    good = isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
    return tuple(values) if good else None


def _check_filled(path: pathlib.Path, entries: Mapping[str, _Entry], body_size: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != at:
            problem = f"starts at byte {entry.start}, where the one before it ends at {at}"
            raise CheckpointError(f"{path}: tensor {brief(name)} {problem}")
        at = entry.end
    if at != body_size:
        raise CheckpointError(f"{path}: {body_size - at} bytes after the last tensor")


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray | Later]) -> None:
    """Writes the tensors, those of wide elements first: so each lies at a multiple of its element size.

    Raises:
        CheckpointError: a dtype that such files do not hold.
        FileError: as `open_output`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, which safetensors files do not hold")
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open_output(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            array = tensor.read() if isinstance(tensor, Later) else tensor
            assert (array.dtype, array.shape) == (tensor.dtype, tensor.shape)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
