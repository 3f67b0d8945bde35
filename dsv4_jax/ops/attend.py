"""attend: one softmax over the window and the selected compressed entries, with a sink."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..errors import ImplementationError
from ..formats import RowFormat, codec
from .append import Rows, WindowView, load
from .arguments import Check
from .batches import in_batches
from .numerics import rope
from .registry import Choice, Implementation, run

__all__ = [
    "CHUNK",
    "IMPLEMENTATION",
    "AttendArguments",
    "KernelSplit",
    "SharedEntries",
    "attend",
    "finish_output",
    "reference",
]

KernelSplit = Literal["throughput", "latency"]
CHUNK = 512  # tokens of a step below which no kernel gains by what they share


class SharedEntries(NamedTuple):
    """The entries from which a chunk's tokens have theirs: a kernel may read these first, each once.

    Attributes:
        rows: [R] int32 row ids of them.
        ids: [T, K] int32: which of `rows` each of `entry_ids` is, where those are keys.
    """

    rows: jax.Array
    ids: jax.Array


@dataclasses.dataclass(frozen=True)
class AttendArguments:
    """Holds what an implementation of `attend` is given, as in its arguments.

    `rounds`: products that round rows take the output, which is bfloat16. An implementation may give it as
    `RoundedRows` [T, H * dim].
    """

    queries: jax.Array
    sink: jax.Array
    window: WindowView
    entries: Rows | None
    entry_ids: jax.Array | None
    entry_count: jax.Array | None
    scale: float
    fmt: RowFormat
    inverse_rope: tuple[jax.Array, jax.Array] | None = None
    dtype: DTypeLike = jnp.float32
    key_split: KernelSplit = "throughput"
    heads: int | None = None
    shared: SharedEntries | None = None
    rounds: bool = False

    @property
    def empty(self) -> bool:
        return 0 in (*self.queries.shape, self.window.ids.shape[1])


def attend(
    queries: jax.Array,
    sink: jax.Array,
    window: WindowView,
    entries: Rows | None,
    entry_ids: jax.Array | None,
    entry_count: jax.Array | None,
    *,
    scale: float,
    fmt: RowFormat,
    inverse_rope: tuple[jax.Array, jax.Array] | None = None,
    dtype: DTypeLike = jnp.float32,
    key_split: KernelSplit = "throughput",
    heads: int | None = None,
    shared: SharedEntries | None = None,
    implementation: Choice = None,
) -> tuple[jax.Array, jax.Array]:
    """Sparse MQA where keys and values are the same rows (docs/model.md, Attention).

    z_k = scale * q . K_k; o = sum_k e^z_k K_k / (sum_k e^z_k + e^sink).

    Args:
        queries: [T, H, dim].
        sink: [H] float32 logit of the sink.
        window: as from `window_view`, [T, W].
        entries: compressed-entry leaves, or None for SWA layers.
        entry_ids: [T, K] int32 row ids into `entries`. These and `window.ids` may be anything where they are no keys;
            elsewhere an id out of range reads the nearest row.
        entry_count: [T] int32: how many of `entry_ids` are keys, from the first.
        scale: softmax scale, head_dim ** -0.5.
        inverse_rope: (position [T] int32, inv_freq [rope_dim / 2] float32): `out` is turned back by the angles of its
            token's position (`numerics.rope`), as values that carry RoPE need it before a projection.
        dtype: of `out`, float32 or bfloat16; everything before is float32.
        key_split: how finely the CUDA kernel cuts a token's keys (`CacheLayout.key_split`; its "context" is
            `ops.attend_parts`); the others ignore it.
        heads: of the model, if these are a device's share of them: keys are cut by those of the model, so that bits do
            not depend on the number of devices.
        shared: where `entry_ids` come from, if tokens have them in common. It changes no bit.

    Returns:
        (out [T, H, dim] of `dtype`, lse [T, H] float32 = log sum_k e^z_k without the sink).
        A token that sees no key gives 0 and -inf.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: unknown key split; and as every op (`registry.pick`).
    """
    if key_split not in get_args(KernelSplit):
        raise ImplementationError(f"attend: unknown key_split {key_split!r}, expected 'throughput' or 'latency'")
    check = Check("attend")
    queries = check.array("queries", queries, "float", "T", "H", fmt.dim)
    sink = check.array("sink", sink, "float32", "H")
    check.given("window", window, WindowView)
    window = WindowView(
        check.parts("window.rows", window.rows, fmt),
        check.array("window.ids", window.ids, "int32", "T", "W"),
        check.array("window.visible", window.visible, "bool", "T", "W"),
    )
    if entries is not None:
        entries = check.parts("entries", entries, fmt)
        entry_ids = check.array("entry_ids", entry_ids, "int32", "T", "K")
        entry_count = check.array("entry_count", entry_count, "int32", "T")
        if shared is not None:
            shared = SharedEntries(
                check.array("shared.rows", shared.rows, "int32", "R"),
                check.array("shared.ids", shared.ids, "int32", "T", "K"),
            )
    if inverse_rope is not None:
        position, inv_freq = inverse_rope
        position = check.array("inverse_rope's position", position, "int32", "T")
        inverse_rope = position, check.array("inverse_rope's inv_freq", inv_freq, "float32", "RoPE pairs")
    arguments = AttendArguments(
        queries,
        sink,
        window,
        entries,
        entry_ids,
        entry_count,
        scale,
        fmt,
        inverse_rope,
        dtype,
        key_split,
        heads,
        shared if entries is not None else None,
    )
    return run("attend", arguments, implementation)


def finish_output(out: jax.Array, inverse_rope: tuple[jax.Array, jax.Array] | None, dtype: DTypeLike) -> jax.Array:
    """Returns the last steps of `attend` on its float32 output."""
    if inverse_rope is not None:
        position, inv_freq = inverse_rope
        out = rope(out, jnp.asarray(position)[:, None], jnp.asarray(inv_freq), inverse=True)
    return out.astype(dtype)


def reference(arguments: AttendArguments) -> tuple[jax.Array, jax.Array]:
    """Computes `attend` in `jnp`, float32 throughout."""
    fmt, sink, scale = arguments.fmt, arguments.sink, arguments.scale
    window, entries = arguments.window, arguments.entries
    decode = codec(fmt).decode

    def one(q: jax.Array, w_ids: jax.Array, visible: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = decode(fmt, load(window.rows, w_ids), jnp.float32)
        if entries is not None:
            e_ids, count = rest
            keys = jnp.concatenate([keys, decode(fmt, load(entries, e_ids), jnp.float32)])
            visible = jnp.concatenate([visible, jnp.arange(e_ids.shape[0]) < count])
        # Rows that are not keys may hold anything: keep them out of the products, NaN included.
        keys = jnp.where(visible[:, None], keys, np.float32(0))
        logits = jnp.einsum("hd,kd->hk", q, keys, precision=lax.Precision.HIGHEST) * np.float32(scale)
        logits = jnp.where(visible, logits, -np.float32(np.inf))
        top = jnp.maximum(logits.max(-1, initial=-np.inf), sink)
        weights = jnp.exp(logits - top[:, None])
        total = weights.sum(-1)
        out = jnp.einsum("hk,kd->hd", weights, keys, precision=lax.Precision.HIGHEST)
        return out / (total + jnp.exp(sink - top))[:, None], jnp.log(total) + top

    rows = (arguments.queries.astype(jnp.float32), window.ids, window.visible)
    selected = (arguments.entry_ids, arguments.entry_count)
    rows += tuple(ids for ids in selected if ids is not None)
    out, lse = in_batches(one, *rows)
    return finish_output(out, arguments.inverse_rope, arguments.dtype), lse


IMPLEMENTATION = Implementation("attend", "xla", reference)
