"""Nothing to do is no error: no tokens, no rows, no keys, no k. The shapes are those of the contract."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, RowFormat, codec, index_format, kv_format
from dsv4_jax.ops import append, attend, index_scores, top_k
from dsv4_jax.ops.append import WindowView, encode
from dsv4_jax.ops.gather import gather_rows
from dsv4_jax.ops.queries import finish_queries

FORMATS = [kv_format(n, 32, 8) for n in KV_FORMATS] + [index_format(n, 32) for n in INDEX_FORMATS]
rooms = pytest.mark.parametrize("implementation", ["xla", "pallas", "cuda"])


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ids(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def stored(fmt: RowFormat, rows: int) -> tuple[np.ndarray, ...]:
    return tuple(np.ones((rows, p.width), p.dtype) for p in fmt.parts)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{'kv' if f.rope_dim else 'index'}-{f.name}")
def test_no_rows(fmt) -> None:
    @jax.jit
    def coded(values):
        parts = codec(fmt).encode(fmt, values)
        return parts, codec(fmt).decode(fmt, parts)

    for lead in ((0,), (2, 0)):
        parts, values = coded(zeros(*lead, 32))
        assert [(p.shape, p.dtype) for p in parts] == [((*lead, p.width), p.dtype) for p in fmt.parts]
        assert values.shape == (*lead, 32)

    @functools.partial(jax.jit, static_argnames="implementation")
    def every_op(pool, implementation):
        options = dict(fmt=fmt, implementation=implementation)
        after = append(pool, zeros(0, 32), ids(0), **options)
        gathered = [gather_rows(pool, ids(*shape), **options) for shape in ((0,), (3, 0))]
        return after, encode(zeros(0, 32), **options), gathered

    pool = stored(fmt, 4)
    for implementation in ("xla", "pallas"):
        after, encoded, gathered = every_op(pool, implementation)
        for a, b in zip(pool, after, strict=True):
            np.testing.assert_array_equal(a, b)
        assert [p.shape[0] for p in encoded] == [0] * len(pool)
        assert [x.shape for x in gathered] == [(0, 32), (3, 0, 32)]


@rooms
@pytest.mark.parametrize(("tokens", "columns"), [(0, 2), (2, 0), (0, 0)])
def test_no_keys_to_score(implementation, tokens: int, columns: int) -> None:
    fmt = index_format("fp4", 128)
    call = functools.partial(index_scores, base=0, rows_per_block=16, fmt=fmt, implementation=implementation)
    scores = jax.jit(call)(stored(fmt, 64), zeros(tokens, 4, 128), zeros(tokens, 4), ids(tokens, columns), ids(tokens))
    assert scores.shape == (tokens, 16 * columns)


@rooms
@pytest.mark.parametrize(("tokens", "scores", "k"), [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_nothing_to_rank(implementation, tokens: int, scores: int, k: int) -> None:
    call = functools.partial(top_k, k=k, implementation=implementation)
    indices, kept = jax.jit(call)(zeros(tokens, scores), ids(tokens))
    assert indices.shape == (tokens, min(k, scores)) and kept.tolist() == [0] * tokens


@pytest.mark.parametrize(
    ("tokens", "window", "entries", "implementation"),
    [(*shape, name) for shape in ((0, 3, 2), (2, 0, 2), (2, 0, 0)) for name in ("xla", "pallas", "cuda")]
    + [(2, 3, 0, "xla"), (2, 3, 0, "pallas")],
)
def test_nothing_to_attend_to(implementation, tokens: int, window: int, entries: int) -> None:
    fmt = kv_format("fp8", 512, 64)
    pool = stored(fmt, 4)
    out, lse = jax.jit(functools.partial(attend, scale=1.0, fmt=fmt, implementation=implementation))(
        zeros(tokens, 4, 512),
        zeros(4),
        WindowView(pool, ids(tokens, window), np.ones((tokens, window), bool)),
        pool,
        ids(tokens, entries),
        ids(tokens),
    )
    assert out.shape == (tokens, 4, 512) and lse.shape == (tokens, 4)
    if not window:
        assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()


@rooms
def test_no_queries(implementation) -> None:
    call = functools.partial(finish_queries, implementation=implementation)
    assert jax.jit(call)(zeros(0, 4, 32), ids(0), zeros(4)).shape == (0, 4, 32)


def test_an_unknown_name_is_refused_all_the_same() -> None:
    with pytest.raises(ImplementationError, match="unknown implementation 'fast'"):
        top_k(zeros(0, 4), ids(0), k=1, implementation="fast")  # pyrefly: ignore
