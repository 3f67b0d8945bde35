"""What ops refuse: an argument of the wrong type or shape is named, by any implementation, before XLA sees it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import LayoutError, ShapeError
from dsv4_jax.formats import index_format, kv_format
from dsv4_jax.ops import Columns, Epilogue, append, attend, index_scores, top_k
from dsv4_jax.ops.append import WindowView, encode
from dsv4_jax.ops.compress import compress_csa, compress_hca
from dsv4_jax.ops.gather import gather_rows
from dsv4_jax.ops.queries import finish_queries
from dsv4_jax.pools.kv_pool import store_kv

from ..pallas.test_compress import STREAMS, plan_of, stream_of

FMT, KEYS = kv_format("fp8", 32, 8), index_format("fp4", 32)
every_implementation = pytest.mark.parametrize("implementation", [None, "xla", "pallas", "cuda"])


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def stored(fmt, rows: int) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros((rows, p.width), p.dtype) for p in fmt.parts)


def window(**wrong: Any) -> WindowView:
    return WindowView(stored(FMT, 4), ints(2, 5), np.ones((2, 5), bool))._replace(**wrong)


EPILOGUE = Epilogue(jnp.ones(32), jnp.ones(4))
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "append": (
        append,
        dict(
            pool=stored(FMT, 4),
            values=floats(3, 32),
            row_ids=ints(3),
            fmt=FMT,
            epilogue=EPILOGUE,
            position=ints(3),
        ),
    ),
    "encode": (encode, dict(values=floats(3, 32), fmt=FMT, epilogue=EPILOGUE, position=ints(3))),
    "attend": (
        attend,
        dict(
            queries=floats(2, 3, 32),
            sink=floats(3),
            window=window(),
            entries=stored(FMT, 9),
            entry_ids=ints(2, 7),
            entry_count=ints(2),
            scale=1.0,
            fmt=FMT,
            inverse_rope=(ints(2), floats(4)),
        ),
    ),
    "gather": (gather_rows, dict(pool=stored(FMT, 4), row_ids=ints(2, 3), fmt=FMT)),
    "index_scores": (
        index_scores,
        dict(
            pool=stored(KEYS, 64),
            queries=floats(2, 3, 32),
            weights=floats(2, 3),
            table=ints(2, 4),
            count=ints(2),
            base=0,
            rows_per_block=16,
            fmt=KEYS,
        ),
    ),
    "finish_queries": (finish_queries, dict(queries=floats(2, 3, 32), position=ints(2), inv_freq=floats(4))),
    "top_k": (top_k, dict(scores=floats(2, 9), count=ints(2), k=3)),
    "kv_store": (
        store_kv,
        dict(
            k_pool=(np.zeros((4, 8), np.uint16),),
            v_pool=(np.zeros((4, 6), np.uint16),),
            k=floats(3, 8),
            v=floats(3, 6),
            rows=ints(3),
            storage="bf16",
        ),
    ),
}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("append", dict(values=ints(3, 32)), "values is int32 [3, 32], expected float [T, 32]"),
    ("append", dict(values=floats(3, 31)), "values is float32 [3, 31], expected float [T, 32]"),
    ("append", dict(values=Columns(jnp.ones((3, 40), jnp.int32), 4, (32,))), "values is Columns of int32 [3, 32]"),
    ("append", dict(row_ids=floats(3)), "row_ids is float32 [3], expected int32 [3]"),
    ("append", dict(row_ids=ints(4)), "row_ids is int32 [4], expected int32 [3]"),
    ("append", dict(position=None), "position is None, expected int32 [3]"),
    ("append", dict(pool=stored(FMT, 4)[:2]), "pool is 2 parts, expected rows of format fp8: nope uint8 [rows, 24]"),
    ("append", dict(pool=stored(FMT, 4)[0]), "expected rows of format fp8"),
    ("append", dict(pool=(*stored(FMT, 4)[:2], ints(4, 8))), "part 'scale' is int32 [4, 8], expected uint8 [4, 8]"),
    ("append", dict(pool=(*stored(FMT, 4)[:2], stored(FMT, 5)[2])), "pool's part 'scale' is uint8 [5, 8]"),
    ("append", dict(pool=None), "pool is None, expected rows of format fp8"),
    ("append", dict(epilogue=(1, 2)), "epilogue is (1, 2), expected Epilogue"),
    ("append", dict(epilogue=Epilogue(jnp.ones(31), jnp.ones(4))), "epilogue.norm is float32 [31]"),
    ("append", dict(epilogue=Epilogue(jnp.ones(32), jnp.ones(17))), "epilogue.inv_freq has 17 frequencies"),
    ("encode", dict(values=[1.0]), "values is [1.0], expected float [T, 32]"),
    ("encode", dict(position=ints(3, 1)), "position is int32 [3, 1], expected int32 [3]"),
    ("attend", dict(queries=ints(2, 3, 32)), "queries is int32 [2, 3, 32], expected float [T, H, 32]"),
    ("attend", dict(sink=ints(3)), "sink is int32 [3], expected float32 [3]"),
    ("attend", dict(sink=floats(4)), "sink is float32 [4], expected float32 [3]"),
    ("attend", dict(sink=jnp.zeros(3, jnp.bfloat16)), "sink is bfloat16 [3], expected float32 [3]"),
    ("attend", dict(window=window(ids=floats(2, 5))), "window.ids is float32 [2, 5], expected int32 [2, W]"),
    ("attend", dict(window=window(visible=ints(2, 5))), "window.visible is int32 [2, 5], expected bool [2, 5]"),
    ("attend", dict(window=window(rows=stored(FMT, 4)[:1])), "window.rows is 1 parts, expected rows of format fp8"),
    ("attend", dict(window=stored(FMT, 4)), "expected WindowView"),
    ("attend", dict(entries=stored(FMT, 9)[::-1]), "entries's part 'nope' is uint8 [9, 8], expected uint8"),
    ("attend", dict(entry_ids=None), "entry_ids is None, expected int32 [2, K]"),
    ("attend", dict(entry_count=ints(3)), "entry_count is int32 [3], expected int32 [2]"),
    ("attend", dict(inverse_rope=(ints(3), floats(4))), "inverse_rope's position is int32 [3], expected int32 [2]"),
    ("attend", dict(inverse_rope=(ints(2), ints(4))), "inverse_rope's inv_freq is int32 [4], expected float32"),
    ("gather", dict(row_ids=floats(2)), "row_ids is float32 [2], expected int32"),
    ("gather", dict(pool=()), "pool is 0 parts"),
    ("index_scores", dict(queries=floats(2, 3, 16)), "queries is float32 [2, 3, 16], expected float [T, H, 32]"),
    ("index_scores", dict(weights=floats(2, 4)), "weights is float32 [2, 4], expected float [2, 3]"),
    ("index_scores", dict(table=floats(2, 4)), "table is float32 [2, 4], expected int32 [2, X]"),
    ("index_scores", dict(count=ints(1)), "count is int32 [1], expected int32 [2]"),
    ("finish_queries", dict(queries=ints(2, 3, 32)), "queries is int32 [2, 3, 32], expected float [T, H, dim]"),
    ("finish_queries", dict(inv_freq=floats(17)), "inv_freq has 17 frequencies, 32 dims have 16 pairs"),
    ("finish_queries", dict(queries=floats(2, 3, 48), rotate=True), "queries have 48 dims, rotate needs a power"),
    ("top_k", dict(scores=ints(2, 9)), "scores is int32 [2, 9], expected float32 [T, S]"),
    ("top_k", dict(count=ints(3)), "count is int32 [3], expected int32 [2]"),
    ("top_k", dict(k=-1), "k must be an integer of at least 0, got -1"),
    ("kv_store", dict(k=ints(3, 8)), "k is int32 [3, 8], expected float"),
    ("kv_store", dict(rows=floats(3)), "rows is float32 [3], expected int32 [3]"),
]  # fmt: skip


@every_implementation
@pytest.mark.parametrize(("op", "wrong", "message"), WRONG, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_wrong_arguments_are_named(op: str, wrong: dict[str, Any], message: str, implementation) -> None:
    call, right = CALLS[op]
    with pytest.raises(ShapeError, match=re.escape(message)) as caught:
        call(**right | wrong, implementation=implementation)
    assert str(caught.value).startswith(f"{op}: {next(iter(wrong))}")


@pytest.mark.parametrize("op", CALLS)
def test_right_arguments_are_taken_from_numpy_and_jax(op: str) -> None:
    """int64 and float64 NumPy arrays count as int32 and float32, as at the border of a jitted function."""
    call, right = CALLS[op]
    kept = ("pool", "window", "entries", "fmt", "k_pool", "v_pool", "epilogue")

    def wide(x: Any) -> Any:
        return x.astype({"i": np.int64, "f": np.float64}.get(x.dtype.kind, x.dtype)) if hasattr(x, "dtype") else x

    given = {name: x if name in kept else jax.tree.map(wide, x) for name, x in right.items()}
    assert any(x.dtype == np.int64 for x in jax.tree.leaves(given) if hasattr(x, "dtype"))
    want = call(**right, implementation="xla")
    for got in (call(**given, implementation="xla"), call(**given, implementation="pallas") if op == "top_k" else want):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@every_implementation
class TestCompress:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (dict(kv=jnp.zeros((2, 1024), jnp.int32)), "kv is int32 [2, 1024], expected float32 [2, 1024]"),
            (dict(kv=jnp.zeros((3, 1024))), "kv is float32 [3, 1024], expected float32 [2, 1024]"),
            (dict(score=jnp.zeros((2, 512))), "score is float32 [2, 512], expected float32 [2, 1024]"),
            (dict(epilogue=None), "epilogue is None, expected Epilogue"),
            (dict(state=jnp.zeros((48, 2048), jnp.bfloat16)), "state is bfloat16 [48, 2048], expected float32"),
            (dict(pool=()), "pool is 0 parts"),
            (dict(ape=jnp.zeros((3, 1024))), "ape is float32 [3, 1024], expected float32 [4, 1024]"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_a_compressors_inputs_are_named(self, wrong: dict[str, Any], message: str, implementation) -> None:
        plan, table, inputs = step_of("csa")
        with pytest.raises(ShapeError, match="^" + re.escape(f"compress_csa: compressors[1].{message}")):
            given = [inputs, dataclasses.replace(inputs, **wrong)]
            compress_csa(given, plan, table, implementation=implementation)

    def test_what_is_no_compressor(self, implementation) -> None:
        plan, table, inputs = step_of("hca")
        with pytest.raises(ShapeError, match=r"compress_hca: compressor is None, expected CompressorInputs"):
            compress_hca(None, plan, table, implementation=implementation)  # pyrefly: ignore
        with pytest.raises(ShapeError, match=r"compress_csa: no compressor was given"):
            compress_csa([], plan, table, implementation=implementation)
        with pytest.raises(ShapeError, match=r"compress_hca: table is float32 \[3, 1\], expected int32"):
            compress_hca(inputs, plan, table.astype(np.float32), implementation=implementation)
        with pytest.raises(LayoutError, match=r"compress_hca: unknown state 'both', expected 'online' or 'raw'"):
            compress_hca(inputs, plan, table, mode="both", implementation=implementation)  # pyrefly: ignore


def step_of(name: str):
    plan, table = plan_of(np.array([3, 7]), 1)
    ((kind, fmt),) = STREAMS[name]
    return plan, table, stream_of(kind, plan, table, fmt, 0, np.random.default_rng(0))
