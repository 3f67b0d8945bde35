"""sample_tokens in the project's own CUDA (`csrc/sampling/sample_tokens.cu`), called through XLA FFI.

Two launches, the race of all tokens and what the filters say of its winner, and nothing that the host has to wait for:
branches and loops of XLA's would be decided there, in the middle of a step. Vocabularies of up to 131,072 tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..ops.sample_tokens import SampleTokensArguments
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "call", "supports"]

MAX_TOKENS = 131_072  # that eight blocks keep in registers
CHUNK = 1024  # tokens of a block of the race


def supports(arguments: SampleTokensArguments) -> str | None:
    """Says why the kernels cannot take these arguments; None if they can."""
    vocab = arguments.logits.shape[1]
    return f"it takes vocabularies of at most {MAX_TOKENS} tokens, not {vocab}" if vocab > MAX_TOKENS else None


def call(arguments: SampleTokensArguments) -> jax.Array:
    """Computes what `ops.sample_tokens.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    rows, vocab = arguments.logits.shape
    winners = jax.ShapeDtypeStruct((rows, -(-vocab // CHUNK), 2), jnp.uint32)
    results = jax.ShapeDtypeStruct((rows,), jnp.int32), winners
    operands = arguments.logits, arguments.settings, arguments.position
    return launch("sample_tokens", "dsv4_sample_tokens", results, *operands)[0]


IMPLEMENTATION = declare("sample_tokens", call, supports, "dsv4_sample_tokens", alone=("dsv4_sample_tokens",))
