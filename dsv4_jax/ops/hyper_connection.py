"""hyper_connection: adds a block's output to the residual streams, and makes of them what the next block reads.

One op from the end of a block to the beginning of the next, because all of it passes over the streams
(docs/model.md, Hyper-connections).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import check_integer
from ..errors import ShapeError
from ..formats.activations import to_bfloat16
from .arguments import Check
from .numerics import MIN_ROWS, unit_rms
from .registry import Choice, Implementation, run

__all__ = [
    "IMPLEMENTATION",
    "VECTOR_MULTIPLE",
    "HyperConnectionArguments",
    "Written",
    "connection_vector",
    "hyper_connection",
    "hyper_head",
    "reference",
    "sinkhorn",
    "widened",
]

VECTOR_MULTIPLE = 64  # floats, 256 bytes: what XLA gives a kernel the address of, within a larger array, without a copy


class Written(NamedTuple):
    """A block's output on its way into the streams.

    Attributes:
        outputs: [T, D] each, one or two, of the streams' dtype; the block's output is their sum.
        post: [T, n] float32, how much of it each stream takes.
        comb: [T, n, n] float32, how much of stream j goes to stream k: [:, j, k].
    """

    outputs: tuple[jax.Array, ...]
    post: jax.Array
    comb: jax.Array


@dataclasses.dataclass(frozen=True)
class HyperConnectionArguments:
    """Holds what an implementation of `hyper_connection` is given, as in its arguments.

    `iterations` None: those of `hyper_head`, whose result is x alone.
    """

    streams: jax.Array
    fn: jax.Array
    vector: jax.Array
    written: Written | None
    iterations: int | None
    hc_eps: float
    eps: float
    dtype: jnp.dtype
    rows: int

    @property
    def empty(self) -> bool:
        return self.streams.shape[0] == 0


def hyper_connection(
    streams: jax.Array,
    fn: jax.Array,
    vector: jax.Array,
    written: Written | None = None,
    *,
    iterations: int,
    hc_eps: float,
    eps: float,
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds a block's output to the streams, mixes what the next block reads, and normalises it.

    (docs/model.md, Hyper-connections; `mix`, `pre`, `post` and `comb` are as there.)

    Args:
        streams: [T, n, D] float32; or bfloat16, to which then new streams are rounded before they are mixed, and the
            mix before it is normalised, as the released model does.
        fn: [(2 + n) n, n D] float32, the rows of `pre`, `post` and `comb`.
        vector: float32, `connection_vector` of the weights [D] of the RMSNorm that the block begins with, base
            [(2 + n) n], and scale [3], of `pre`, `post` and `comb`.
        written: the output of the block before; None before the first.
        iterations: of `sinkhorn`, at least 1.
        hc_eps: of `pre` and `sinkhorn`.
        eps: of the RMSNorms.
        dtype: of x, float32 or bfloat16.

    Returns:
        x: [T, D] of `dtype`, the block's input.
        streams: [T, n, D] of their dtype, with the output of the block before.
        post, comb: [T, n] and [T, n, n] float32, for the block's own `Written`.

    Raises:
        ShapeError: an argument has the wrong shape or dtype, or is out of range; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    iterations = check_integer("hyper_connection: iterations", iterations, 1, error=ShapeError)
    mixed = 2 + streams.shape[1] if getattr(streams, "ndim", 0) == 3 else 0
    given = _checked("hyper_connection", streams, fn, vector, written, mixed, 3, dtype)
    arguments = HyperConnectionArguments(*given, iterations, hc_eps, eps, jnp.dtype(dtype), 0)
    return run("hyper_connection", arguments, implementation)


def hyper_head(
    streams: jax.Array,
    fn: jax.Array,
    vector: jax.Array,
    written: Written | None = None,
    *,
    hc_eps: float,
    eps: float,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rows: int = 0,
    implementation: Choice = None,
) -> jax.Array:
    """What the head reads: the streams after the last block, summed by their gates and normalised.

    [max(T, rows), D] of `dtype`; `rows`: `MIN_ROWS` or fewer, those behind the tokens are zero (`numerics.pad_rows`).

    As `hyper_connection` with fn [n, n D], and in the vector base [n] and scale [1], those of the gates; implemented
    by it.
    """
    given = _checked("hyper_head", streams, fn, vector, written, 1, 1, dtype)
    rows = check_integer("hyper_head: rows", rows, 0, MIN_ROWS, error=ShapeError)
    arguments = HyperConnectionArguments(*given, None, hc_eps, eps, jnp.dtype(dtype), rows)
    return run("hyper_connection", arguments, implementation)


def connection_vector(norm: jax.Array, base: jax.Array, scale: jax.Array) -> jax.Array:
    """What `hyper_connection` takes beside fn: these one after the other, and zeros to a multiple of `VECTOR_MULTIPLE`.

    One vector, because XLA gives a kernel the address of a part of a large array only if it is of 256 bytes, or more.
    """
    joined = jnp.concatenate([norm, base, scale])
    return jnp.pad(joined, (0, -joined.size % VECTOR_MULTIPLE))


def _checked(
    name: str,
    streams: jax.Array,
    fn: jax.Array,
    vector: jax.Array,
    written: Written | None,
    rows: int,
    scales: int,
    dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array, Written | None]:
    check = Check(name)
    of_streams = "bfloat16" if getattr(streams, "dtype", None) == jnp.bfloat16 else "float32"
    streams = check.array("streams", streams, of_streams, "T", "n", "D")
    _, n, width = streams.shape
    fn, size = check.array("fn", fn, "float32", rows * n, n * width), width + rows * n + scales
    vector = check.array("vector", vector, "float32", size + -size % VECTOR_MULTIPLE)
    if written is not None:
        check.given("written", written, Written)
        if not isinstance(written.outputs, tuple) or len(written.outputs) not in (1, 2):
            raise ShapeError(f"{name}: written.outputs has not one or two arrays")
        outputs = tuple(check.array("written.outputs", x, of_streams, "T", "D") for x in written.outputs)
        post = check.array("written.post", written.post, "float32", "T", "n")
        written = Written(outputs, post, check.array("written.comb", written.comb, "float32", "T", "n", "n"))
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ShapeError(f"{name}: dtype is {jnp.dtype(dtype).name}, expected float32 or bfloat16")
    return streams, fn, vector, written


def reference(arguments: HyperConnectionArguments):
    """Computes `hyper_connection`, or `hyper_head`, in `jnp`."""
    given, hc_eps = arguments.streams, np.float32(arguments.hc_eps)
    tokens, n, width = given.shape
    written = given if arguments.written is None else widened(given, arguments.written)
    streams = written.astype(jnp.float32)
    flat = unit_rms(streams.reshape(tokens, n * width), arguments.eps)
    mix = jnp.einsum("ti,oi->to", flat, arguments.fn, precision=_EXACT)
    starts = (0, n) if arguments.iterations is None else (0, n, 2 * n, (2 + n) * n)
    norm, base, scale, _ = jnp.split(arguments.vector, np.cumsum([width, starts[-1], len(starts) - 1]).tolist())
    parts = [
        mix[:, first:last] * factor + base[None, first:last]
        for first, last, factor in zip(starts[:-1], starts[1:], scale, strict=True)
    ]
    pre = jax.nn.sigmoid(parts[0]) + hc_eps
    x = jnp.einsum("tn,tnd->td", pre, streams, precision=_EXACT)
    x = unit_rms(_as_held(x, given.dtype), arguments.eps)
    x = (x * norm[None]).astype(arguments.dtype)
    if arguments.rows > tokens:
        x = jnp.pad(x, ((0, arguments.rows - tokens), (0, 0)))
    if arguments.iterations is None:
        return x
    comb = sinkhorn(parts[2].reshape(tokens, n, n), arguments.iterations, hc_eps)
    return x, written, np.float32(2) * jax.nn.sigmoid(parts[1]), comb


_EXACT = lax.Precision.HIGHEST  # GPUs would otherwise round float32 factors to TF32


def widened(streams: jax.Array, written: Written) -> jax.Array:
    """Returns the streams with a block's output: X'[k] = post[k] * y + sum_j comb[j, k] * X[j]. [T, n, D], as given."""
    first, *rest = (x.astype(jnp.float32) for x in written.outputs)
    y = sum(rest, first)
    mixed = jnp.einsum("tjk,tjd->tkd", written.comb, streams.astype(jnp.float32), precision=_EXACT)
    return _as_held(written.post[..., None] * y[:, None] + mixed, streams.dtype).astype(streams.dtype)


def _as_held(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 numbers as streams of this dtype hold them, still float32."""
    return to_bfloat16(x) if dtype == jnp.bfloat16 else x


def sinkhorn(logits: jax.Array, iterations: int, eps: np.float32) -> jax.Array:
    """Returns a nearly doubly stochastic [T, n, n]: softmax over rows, columns normalised, then rows and columns in
    turn."""

    def normalised(comb: jax.Array, axis: int) -> jax.Array:
        return comb / (comb.sum(axis, keepdims=True) + eps)

    comb = normalised(jax.nn.softmax(logits, -1) + eps, -2)
    # A loop: unrolled, twenty iterations at two sites a layer would be most of the model's compile time.
    return lax.fori_loop(0, iterations - 1, lambda _, comb: normalised(normalised(comb, -1), -2), comb)


IMPLEMENTATION = Implementation("hyper_connection", "xla", reference)
