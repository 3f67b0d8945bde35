"""hyper_connection in the project's own CUDA for Hopper, in two launches.

One makes what the next block reads (`csrc/residual/hyper_connection_kernel.cuh`), the other, beside that block, how its
output goes into the streams (`csrc/residual/hyper_mixing.cuh`).
Products are as exact as float32's, whether streams are float32 or bfloat16. A token's bits depend on the token and the
weights alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.hyper_connection import HyperConnectionArguments
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "MAX_TOKENS", "STREAMS", "WIDTHS", "call", "supports"]

STREAMS, WIDTHS, MAX_TOKENS = 4, (4096, 7168), 2**17


def supports(arguments: HyperConnectionArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    tokens, n, width = arguments.streams.shape
    if n != STREAMS or width not in WIDTHS:
        return f"it takes {STREAMS} streams of {' or '.join(map(str, WIDTHS))} channels, not {n} of {width}"
    return f"it takes up to {MAX_TOKENS} tokens, not {tokens}" if tokens > MAX_TOKENS else None


def call(arguments: HyperConnectionArguments):
    """Computes what `ops.hyper_connection.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    streams, written, head = arguments.streams, arguments.written, arguments.iterations is None
    tokens, n, width = streams.shape
    operands = [streams.reshape(tokens, n * width), arguments.fn, arguments.vector]
    results = [jax.ShapeDtypeStruct((max(tokens, arguments.rows), width), arguments.dtype)]
    if not head:
        results.append(jax.ShapeDtypeStruct((tokens, n + n * n), jnp.float32))
    aliases = {}
    if written is not None:
        operands += [written.post, written.comb.reshape(tokens, n * n), *written.outputs]
        if not head:
            aliases = {0: len(results)}
            results.append(jax.ShapeDtypeStruct((tokens, n * width), streams.dtype))
    out = launch(
        "hyper_connection",
        "dsv4_hyper_connection",
        tuple(results),
        *operands,
        aliases=aliases,
        outputs=len(written.outputs) if written else 0,
        hc_eps=float(arguments.hc_eps),
        eps=float(arguments.eps),
        head=head,
        bf16=arguments.dtype == jnp.bfloat16,
        bf16_streams=streams.dtype == jnp.bfloat16,
    )
    if head:
        return out[0]
    x, back, *new = out
    shapes = tuple(jax.ShapeDtypeStruct((tokens, size), jnp.float32) for size in (n, n * n))
    settings = dict(iterations=arguments.iterations, eps=float(arguments.hc_eps))
    post, comb = launch("hyper_connection", "dsv4_hyper_mixing", shapes, back, **settings)
    return x, (new[0].reshape(streams.shape) if new else streams), post, comb.reshape(tokens, n, n)


IMPLEMENTATION = declare(
    "hyper_connection",
    call,
    supports,
    "dsv4_hyper_connection",
    "dsv4_hyper_mixing",
    early=("dsv4_hyper_connection",),
)
