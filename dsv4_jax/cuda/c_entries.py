"""The kernels as plain C calls, for timing without XLA: mirrors of their argument structs, and their entries.

`dsv4_<op>_launch(args, ..., stream)` of the CUDA library enqueues one call and returns a cudaError_t. A mirror is the
struct of `csrc/` field by field; `open_entry` compares its size with what the library says, and so does a test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ..errors import ImplementationError

__all__ = [
    "ENTRIES",
    "AppendArgs",
    "AttendArgs",
    "AttendRowsArgs",
    "DenseFp8Args",
    "EpilogueArgs",
    "GatherArgs",
    "HyperArgs",
    "HyperMixingArgs",
    "KVRows",
    "KVStoreArgs",
    "MoeArgs",
    "QueryArgs",
    "QueryProductArgs",
    "RouteArgs",
    "RowPool",
    "Rows",
    "ScoreArgs",
    "TopKArgs",
    "mismatch",
    "open_entry",
]

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


def _all(kind: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names)


class EpilogueArgs(ctypes.Structure):
    """`dsv4::EpilogueArgs` of csrc/rows/epilogue.cuh."""

    _fields_ = (*_all(_POINTER, "norm", "cosine", "sine"), ("eps", _FLOAT), ("hadamard", _INT))


class RowPool(ctypes.Structure):
    """`dsv4::RowPool` of csrc/rows/emit.cuh."""

    _fields_ = (*_all(_POINTER, "codes", "rope", "scale"), ("rows", ctypes.c_int64), ("format", _INT))


class AppendArgs(ctypes.Structure):
    """`dsv4::AppendArgs` of csrc/rows/append.cu."""

    _fields_ = (*_all(_POINTER, "values", "row_ids"), ("epilogue", EpilogueArgs), ("pool", RowPool), ("stride", _INT))


class Rows(ctypes.Structure):
    """`dsv4::Rows` of csrc/attend/block.cuh."""

    _fields_ = (*_all(_POINTER, "nope", "rope", "scale"), ("rows", _INT))


class AttendArgs(ctypes.Structure):
    """`dsv4::AttendArgs` of csrc/attend/block.cuh; null `cosine` and `sine`: the output is not turned back.

    `sums`: room for runs with clusters of their own, else null.
    """

    _fields_ = (
        *_all(_POINTER, "queries", "sink"),
        *_all(Rows, "window", "entries"),
        *_all(_POINTER, "window_ids", "window_visible", "entry_ids", "entry_count", "out", "lse"),
        *_all(_INT, "tokens", "heads", "window_keys", "entry_keys"),
        ("scale_log2", _FLOAT),
        *_all(_POINTER, "cosine", "sine"),
        ("bf16_out", _INT),
        ("sums", _POINTER),
    )


class AttendRowsArgs(ctypes.Structure):
    """`dsv4::AttendRowsArgs` of csrc/attend/bf16_block.cuh: its rows are bf16, `nope` alone."""

    _fields_ = (("attend", AttendArgs), ("sums", _POINTER))


class ScoreArgs(ctypes.Structure):
    """`dsv4::ScoreArgs` of csrc/index/scores_keys.cuh."""

    _fields_ = (
        *_all(_POINTER, "codes", "scale", "queries", "weights", "table", "count", "scores"),
        *_all(_INT, "tokens", "heads", "columns", "base", "rows_per_block", "run_tiles", "weight_stride"),
        ("weight_scale", _FLOAT),
        ("blocks", _INT),
    )


class TopKArgs(ctypes.Structure):
    """`dsv4::TopKArgs` of csrc/index/top_k_rows.cuh."""

    _fields_ = (*_all(_POINTER, "scores", "count", "indices", "kept"), *_all(_INT, "width", "k"))


class QueryArgs(ctypes.Structure):
    """`dsv4::QueryArgs` of csrc/attend/queries_kernel.cuh."""

    _fields_ = (
        *_all(_POINTER, "queries", "cosine", "sine", "out"),
        *_all(_INT, "rows", "heads", "stride"),
        ("eps", _FLOAT),
        *_all(_INT, "hadamard", "round_fp4"),
    )


class QueryProductArgs(ctypes.Structure):
    """`dsv4::QueryProductArgs` of csrc/attend/query_product_kernel.cuh."""

    _fields_ = (
        *_all(_POINTER, "x", "weights", "cosine", "sine", "out"),
        *_all(_INT, "tokens", "heads", "columns"),
        ("eps", _FLOAT),
        *_all(_INT, "hadamard", "round_fp4"),
    )


class MoeArgs(ctypes.Structure):
    """`dsv4::MoeArgs` of csrc/moe/lists.cuh."""

    _fields_ = (
        *_all(_POINTER, "x", "chosen", "share", "gate_up", "down", "out", "work"),
        *_all(_INT, "tokens", "top", "hidden", "inter", "experts", "first", "routed"),
        ("limit", _FLOAT),
    )


class DenseFp8Args(ctypes.Structure):
    """`dsv4::DenseFp8Args` of csrc/dense/stream_kernel.cuh."""

    _fields_ = (
        *_all(_POINTER, "x", "codes", "scales", "out"),
        *_all(_INT, "rows", "weight_rows", "columns", "groups", "float_out"),
    )


class GatherArgs(ctypes.Structure):
    """`dsv4::GatherArgs` of csrc/rows/gather_kernel.cuh."""

    _fields_ = (
        *_all(_POINTER, "codes", "rope", "scale", "ids", "out"),
        *_all(ctypes.c_int64, "rows", "pool_rows"),
        ("float_out", _INT),
    )


class KVRows(ctypes.Structure):
    """`dsv4::KVRows` of csrc/rows/kv_store_kernel.cuh."""

    _fields_ = (*_all(_POINTER, "values", "codes", "scale"), ("width", _INT))


class KVStoreArgs(ctypes.Structure):
    """`dsv4::KVStoreArgs` of csrc/rows/kv_store_kernel.cuh."""

    _fields_ = (*_all(KVRows, "k", "v"), ("ids", _POINTER), *_all(ctypes.c_int64, "tokens", "pool_rows"))


class HyperArgs(ctypes.Structure):
    """`dsv4::HyperArgs` of csrc/residual/hyper_connection_kernel.cuh; null `output`: nothing is added to the streams."""

    _fields_ = (
        *_all(_POINTER, "streams", "fn", "base", "scale", "norm", "output", "other_output", "old_post", "old_comb"),
        *_all(_POINTER, "x", "new_streams", "back"),
        *_all(_INT, "tokens", "width", "rows"),
        *_all(_FLOAT, "hc_eps", "eps"),
        *_all(_INT, "bf16_out", "x_rows"),
    )


class HyperMixingArgs(ctypes.Structure):
    """`dsv4::HyperMixingArgs` of csrc/residual/hyper_mixing.cuh."""

    _fields_ = (*_all(_POINTER, "back", "post", "comb"), *_all(_INT, "tokens", "iterations"), ("eps", _FLOAT))


class RouteArgs(ctypes.Structure):
    """`dsv4::RouteArgs` of csrc/moe/route.cu; null `bias`: `given` holds the experts."""

    _fields_ = (
        *_all(_POINTER, "logits", "bias", "given", "chosen", "share"),
        *_all(_INT, "tokens", "experts", "top"),
        ("scale", _FLOAT),
    )


# Op -> its arguments' struct, and the integers that its entry takes between them and the stream.
ENTRIES: dict[str, tuple[type[ctypes.Structure], tuple[str, ...]]] = {
    "append": (AppendArgs, ("tokens", "epilogue")),
    "attend": (AttendArgs, ("splits", "blocks", "most", "least")),
    "attend_rows": (AttendRowsArgs, ("blocks", "splits", "most", "least")),
    "dense_fp8": (DenseFp8Args, ("shape", "parts", "window")),
    "gather": (GatherArgs, ()),
    "hyper_connection": (HyperArgs, ()),
    "hyper_mixing": (HyperMixingArgs, ()),
    "index_scores": (ScoreArgs, ("fp8",)),
    "kv_store": (KVStoreArgs, ()),
    "moe": (MoeArgs, ("shape",)),
    "queries": (QueryArgs, ("width",)),
    "query_product": (QueryProductArgs, ("width",)),
    "route": (RouteArgs, ()),
    "top_k": (TopKArgs, ("tokens",)),
}


def mismatch(library: ctypes.CDLL, op: str) -> str | None:
    """Why `library` cannot be called with the mirror of this op (a key of `ENTRIES`), None if it can."""
    mirror, _ = ENTRIES[op]
    try:
        size = getattr(library, f"dsv4_{op}_args_size")()
    except AttributeError:
        return f"the library has no dsv4_{op}_args_size: it was built from other sources, build csrc/ anew"
    if size == ctypes.sizeof(mirror):
        return None
    return f"{mirror.__name__} has {ctypes.sizeof(mirror)} bytes here and {size} in the library: build csrc/ anew"


def open_entry(library: ctypes.CDLL, op: str) -> Callable[..., None]:
    """A call of the kernel of this op: (args, the integers of `ENTRIES`, stream) -> None.

    Raises:
        ImplementationError: `mismatch`; the call: the launch failed.
    """
    if problem := mismatch(library, op):
        raise ImplementationError(f"{op}: {problem}")
    mirror, numbers = ENTRIES[op]
    entry = getattr(library, f"dsv4_{op}_launch")
    entry.argtypes = (ctypes.POINTER(mirror), *(_INT for _ in numbers), _POINTER)

    def launch(args: ctypes.Structure, *rest: Any) -> None:
        if status := entry(ctypes.byref(args), *rest):
            raise ImplementationError(f"{op}: CUDA error {status}")

    return launch
