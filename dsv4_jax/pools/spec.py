"""What the pools hold: shapes and bytes, for allocation and for the capacity planner. Imports no jax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ..checks import check_integer, int_array
from ..errors import PoolError

__all__ = ["MAX_ROWS", "STORAGE", "GDNSpec", "KVSpec", "as_ids", "distinct"]

# Storage -> carrier dtype. Unsigned carriers: XLA's CPU scatter into bf16 or fp8 converts the whole pool.
STORAGE = {"bf16": "uint16", "f16": "uint16", "f32": "uint32", "fp8": "uint8"}
_ROW_ALIGN = 8
MAX_ROWS = 2**31 - 1  # rows are addressed in int32


def as_ids(name: str, ids: Any) -> np.ndarray:
    """Returns `ids` as a NumPy array of integers (no copy of one), nothing at all as int64. Raises `PoolError`."""
    if type(ids) is list and (packed := int_array(ids, "Q")):
        values = np.frombuffer(packed, np.int64)
        if values.min() >= 0:  # none is beyond int64
            return values
    try:
        array = np.asarray(ids)
    except ValueError:  # ragged
        raise PoolError(f"{name} must be integers, got {ids!r}") from None
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu" or _has_booleans(ids):
        raise PoolError(f"{name} must be integers, got {array.dtype if array.dtype.kind not in 'iu' else 'a boolean'}")
    return array


def _has_booleans(ids: Any) -> bool:
    """Whether NumPy took some of them, beside integers, for 0 or 1."""
    if isinstance(ids, np.ndarray | np.generic | bool):
        return np.result_type(ids).kind == "b"
    if not isinstance(ids, list | tuple):
        return False
    one_of_each = dict(zip(map(type, ids), ids, strict=True))
    if not one_of_each.keys().isdisjoint({list, tuple, np.ndarray}):
        return any(map(_has_booleans, ids))
    return any(map(_has_booleans, one_of_each.values()))


def distinct(ids: np.ndarray) -> np.ndarray:
    """Returns the ids without repetitions, ascending. (`numpy.unique` hashes them: 50 times as long for 100,000.)"""
    ordered = np.sort(ids)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def _check_storage(name: str, storage: str, allowed: tuple[str, ...]) -> None:
    if storage not in allowed:
        raise PoolError(f"{name} must be one of {list(allowed)}, got {storage!r}")


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """The geometry of a `KVPool`.

    Attributes:
        size: usable token slots, ids page_size .. page_size + size - 1. Slot 0 is the padding sink.
        layers: attention layers.
        k_heads, k_dim: heads of a K row and their width.
        v_heads, v_dim: the same of V; None means those of K.
        storage: "bf16", "f16", "f32", or "fp8" (e4m3 with one float32 power-of-two scale per row).
        page_size: of the allocator; the page of the sink comes on top of `size`.
    """

    size: int
    layers: int
    k_heads: int
    k_dim: int
    v_heads: int | None = None
    v_dim: int | None = None
    storage: str = "bf16"
    page_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_heads", self.k_heads if self.v_heads is None else self.v_heads)
        object.__setattr__(self, "v_dim", self.k_dim if self.v_dim is None else self.v_dim)
        for name in ("size", "layers", "k_heads", "k_dim", "v_heads", "v_dim", "page_size"):
            object.__setattr__(self, name, check_integer(f"KVSpec.{name}", getattr(self, name), 1, error=PoolError))
        _check_storage("KVSpec.storage", self.storage, tuple(STORAGE))
        if self.layers * self.rows > MAX_ROWS:
            raise PoolError(f"KVSpec: {self.layers} layers of {self.rows} rows exceed {MAX_ROWS} rows")

    @property
    def last(self) -> int:
        """The highest slot."""
        return self.size + self.page_size - 1

    @property
    def rows(self) -> int:
        """Rows of one layer: the slots and the sink's page, rounded up to a multiple of 8."""
        return -(-(self.last + 1) // _ROW_ALIGN) * _ROW_ALIGN

    def heads(self, part: str) -> tuple[int, int]:
        """Returns (heads, width) of "k" or "v" rows."""
        heads, dim = (self.k_heads, self.k_dim) if part == "k" else (self.v_heads, self.v_dim)
        assert heads is not None and dim is not None
        return heads, dim

    def width(self, part: str) -> int:
        heads, dim = self.heads(part)
        return heads * dim

    @property
    def leaves(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Leaf name -> (shape, carrier dtype), all layers in one leaf: row = layer * rows + slot."""
        total = self.layers * self.rows
        out: dict[str, tuple[tuple[int, int], str]] = {}
        for part in ("k", "v"):
            out[part] = ((total, self.width(part)), STORAGE[self.storage])
            if self.storage == "fp8":
                out[f"{part}_scale"] = ((total, 1), "float32")
        return out

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token slot over all layers, K and V and their scales."""
        return sum(self.layers * shape[1] * np.dtype(dtype).itemsize for shape, dtype in self.leaves.values())

    @property
    def total_bytes(self) -> int:
        """Exactly what `KVPool.init` allocates."""
        return self.rows * self.bytes_per_token


@dataclasses.dataclass(frozen=True)
class GDNSpec:
    """The geometry of a `GDNPool` (gated delta net, or any linear attention with a matrix state).

    Attributes:
        max_requests: working slots, ids 1..max_requests (those of `ReqToTokenPool`).
        layers: linear-attention layers.
        heads: value heads.
        k_dim, v_dim: widths of a head's key and value.
        conv_dim: channels of the causal convolution.
        conv_kernel: its width; the state keeps the last conv_kernel - 1 inputs.
        track_slots: slots for snapshots, ids max_requests + 1 ...
        conv_storage: "bf16", "f16" or "f32".
    """

    max_requests: int
    layers: int
    heads: int
    k_dim: int
    v_dim: int
    conv_dim: int
    conv_kernel: int
    track_slots: int = 0
    conv_storage: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("max_requests", "layers", "heads", "k_dim", "v_dim", "conv_dim", "conv_kernel", "track_slots"):
            low = {"track_slots": 0, "conv_kernel": 2}.get(name, 1)
            object.__setattr__(self, name, check_integer(f"GDNSpec.{name}", getattr(self, name), low, error=PoolError))
        _check_storage("GDNSpec.conv_storage", self.conv_storage, ("bf16", "f16", "f32"))

    @property
    def slots(self) -> int:
        """All slots: the padding slot 0, the working slots, the track slots."""
        return 1 + self.max_requests + self.track_slots

    @property
    def leaves(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Leaf name -> (shape, carrier dtype). Note the order of a state: value dim before key dim."""
        return {
            "recurrent": ((self.layers, self.slots, self.heads, self.v_dim, self.k_dim), "float32"),
            "conv": ((self.layers, self.slots, self.conv_dim, self.conv_kernel - 1), STORAGE[self.conv_storage]),
        }

    @property
    def bytes_per_slot(self) -> int:
        return sum(math.prod(s) * np.dtype(d).itemsize for s, d in self.leaves.values()) // self.slots

    @property
    def total_bytes(self) -> int:
        """Exactly what `GDNPool.init` allocates."""
        return self.slots * self.bytes_per_slot
