"""What turns a raw row into one that is stored: RMSNorm, RoPE and, for index keys, a Hadamard rotation."""

from __future__ import annotations

import dataclasses

import jax

from ..errors import ShapeError
from .arguments import Check
from .numerics import hadamard, rms_norm, rope

__all__ = ["Epilogue", "check_epilogue"]


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The last steps before quantisation, the same for window rows and compressed entries: norm, RoPE, rotation.

    The cache knows at which position: a window row's own, and for an entry that of its block's first token
    (docs/model.md, Epilogue: which values a layer of V4 has).

    Attributes:
        norm: [e] float32, RMSNorm weight: `kv_norm` for window rows, the compressor's own norm for its entries.
        inv_freq: [rope_dim / 2] float32, RoPE frequencies of the last `rope_dim` dims: `rope_frequencies` of the layer.
        eps: of the norm.
        hadamard: whether the row is rotated by a Hadamard matrix at the end: for index keys alone, exactly if
            `index_queries` has `qat=True`.
    """

    norm: jax.Array
    inv_freq: jax.Array
    eps: float = 1e-6
    hadamard: bool = False

    def __call__(self, rows: jax.Array, position: jax.Array) -> jax.Array:
        """Finishes raw rows [N, e] float32 at `position` [N] int32: [N, e] float32."""
        row = rope(rms_norm(rows, self.norm, self.eps), position, self.inv_freq)
        return hadamard(row) if self.hadamard else row


jax.tree_util.register_dataclass(Epilogue, data_fields=["norm", "inv_freq"], meta_fields=["eps", "hadamard"])


def check_epilogue(check: Check, name: str, epilogue: Epilogue, dim: int, pairs: int | None = None) -> None:
    """Raises `ShapeError` if this is no epilogue of rows of `dim` values; with `pairs`, of so many RoPE frequencies."""
    check.given(name, epilogue, Epilogue)
    check.array(f"{name}.norm", epilogue.norm, "float32", dim)
    expected = f"RoPE pairs of {name}" if pairs is None else pairs
    check.array(f"{name}.inv_freq", epilogue.inv_freq, "float32", expected)
    if (found := epilogue.inv_freq.shape[0]) > dim // 2:
        raise ShapeError(f"{check.op}: {name}.inv_freq has {found} frequencies, rows of {dim} have {dim // 2} pairs")
