"""Nothing to do is no error: no tokens, no rows, no keys, no k. The shapes are those of the contract."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, codec, index_format, kv_format
from dsv4_jax.ops import append, attend, encode, finish_queries, gather_rows, index_scores, top_k

FORMATS = [kv_format(n, 32, 8) for n in KV_FORMATS] + [index_format(n, 32) for n in INDEX_FORMATS]
rooms = pytest.mark.parametrize("implementation", ["xla", "pallas", "cuda"])


def ids(*shape: int) -> jnp.ndarray:
    return jnp.zeros(shape, jnp.int32)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{'kv' if f.rope_dim else 'index'}-{f.name}")
def test_no_rows(fmt) -> None:
    for lead in ((0,), (2, 0)):
        parts = codec(fmt).encode(fmt, jnp.zeros((*lead, 32)))
        assert [(p.shape, p.dtype) for p in parts] == [((*lead, p.width), p.dtype) for p in fmt.parts]
        assert codec(fmt).decode(fmt, parts).shape == (*lead, 32)
    pool = codec(fmt).encode(fmt, jnp.ones((4, 32)))
    for implementation in ("xla", "pallas"):
        after = append(pool, jnp.zeros((0, 32)), ids(0), fmt=fmt, implementation=implementation)
        for a, b in zip(pool, after, strict=True):
            np.testing.assert_array_equal(a, b)
        assert [p.shape[0] for p in encode(jnp.zeros((0, 32)), fmt=fmt, implementation=implementation)] == [0] * len(
            pool
        )
        for shape in ((0,), (3, 0)):
            assert gather_rows(pool, ids(*shape), fmt=fmt, implementation=implementation).shape == (*shape, 32)


@rooms
@pytest.mark.parametrize(("tokens", "columns"), [(0, 2), (2, 0), (0, 0)])
def test_no_keys_to_score(implementation, tokens: int, columns: int) -> None:
    fmt = index_format("fp4", 128)
    pool = codec(fmt).encode(fmt, jnp.ones((64, 128)))
    scores = index_scores(
        pool, jnp.ones((tokens, 4, 128)), jnp.ones((tokens, 4)), ids(tokens, columns), ids(tokens), base=0,
        rows_per_block=16, fmt=fmt, implementation=implementation,
    )  # fmt: skip
    assert scores.shape == (tokens, 16 * columns)


@rooms
@pytest.mark.parametrize(("tokens", "scores", "k"), [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_nothing_to_rank(implementation, tokens: int, scores: int, k: int) -> None:
    indices, kept = top_k(jnp.ones((tokens, scores)), ids(tokens), k=k, implementation=implementation)
    assert indices.shape == (tokens, min(k, scores)) and kept.tolist() == [0] * tokens


@rooms
@pytest.mark.parametrize(("tokens", "window", "entries"), [(0, 3, 2), (2, 3, 0), (2, 0, 2), (2, 0, 0)])
def test_nothing_to_attend_to(implementation, tokens: int, window: int, entries: int) -> None:
    fmt = kv_format("fp8", 32, 8)
    pool = codec(fmt).encode(fmt, jnp.ones((4, 32)))
    out, lse = attend(
        jnp.ones((tokens, 4, 32)), jnp.zeros(4), pool, ids(tokens, window), jnp.ones((tokens, window), bool), pool,
        ids(tokens, entries), ids(tokens), scale=1.0, fmt=fmt, implementation=implementation,
    )  # fmt: skip
    assert out.shape == (tokens, 4, 32) and lse.shape == (tokens, 4)
    if not window:
        assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()


@rooms
def test_no_queries(implementation) -> None:
    assert finish_queries(jnp.ones((0, 4, 32)), ids(0), jnp.ones(4), implementation=implementation).shape == (0, 4, 32)


def test_an_unknown_name_is_refused_all_the_same() -> None:
    with pytest.raises(ImplementationError, match="unknown implementation 'fast'"):
        top_k(jnp.ones((0, 4)), ids(0), k=1, implementation="fast")  # pyrefly: ignore
