"""Reads and writes safetensors files with NumPy: a JSON header, then raw little-endian tensors.

Written out here because the `safetensors` package cannot hand FP8 tensors to NumPy, and because
views of a memory map let a checkpoint be read tensor by tensor.
Source: the format description at https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from ..errors import CheckpointError

__all__ = ["read_safetensors", "write_safetensors"]

_DTYPES: dict[str, type] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Name -> read-only view of the memory-mapped file.

    Raises:
        CheckpointError: no such file, not a safetensors file, or a tensor that lies outside it.
    """
    if not path.is_file():
        raise CheckpointError(f"no such file: {path}")
    data = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 + length:
        raise CheckpointError(f"{path}: truncated header")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    body, tensors = data[8 + length :], {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} has unsupported dtype {entry['dtype']}")
        dtype, (start, end) = np.dtype(_DTYPES[entry["dtype"]]), entry["data_offsets"]
        if not 0 <= start <= end <= body.size or end - start != math.prod(entry["shape"]) * dtype.itemsize:
            raise CheckpointError(f"{path}: tensor {name!r} does not fit the file")
        tensors[name] = body[start:end].view(dtype).reshape(entry["shape"])
    return tensors


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the tensors in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())
