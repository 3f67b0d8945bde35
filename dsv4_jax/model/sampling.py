"""Sampling of the next token from logits."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import check_integer
from ..errors import RequestError
from ..untrusted import brief

__all__ = ["GREEDY", "Sampling", "distribution", "keys_of", "sample", "sampling_keys", "seed_key"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample. Static: one executable each.

    Attributes:
        temperature: 0 takes the likeliest token, ties to the lowest id; others from 1e-30 to 1e30, for logits over
            them to be float32.
        top_k: keep only the k likeliest tokens; 0 keeps all.
        top_p: then keep the fewest tokens whose probability reaches p (at least one); 1 keeps all.

    Raises:
        RequestError: naming the attribute that is out of range, or of a wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        warm = self.temperature
        for name, value in (("temperature", warm), ("top_p", self.top_p)):
            if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
                raise RequestError(f"{name} must be a number, got {brief(value)}")
        check_integer("top_k", self.top_k, error=RequestError)
        if not (math.isfinite(warm) and (warm == 0 or 1e-30 <= warm <= 1e30)):
            raise RequestError(f"temperature must be finite and at least 0 (1e-30 to 1e30, or 0), got {warm}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}")


GREEDY = Sampling()


def sample(
    logits: jax.Array, sampling: Sampling = GREEDY, keys: jax.Array | None = None, position: jax.Array | None = None
) -> jax.Array:
    """Samples [B] int32 from logits [B, vocab] float32.

    Args:
        keys: [B] random keys, one per row; not needed when greedy.
        position: [B] int32, of the tokens that gave the logits. A row's sample depends on nothing
            but its logits, its key and its position: not on the batch, nor on steps per call.

    Raises:
        RequestError: not greedy, and `keys` or `position` is missing.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    if keys is None or position is None:
        raise RequestError(f"sampling at temperature {sampling.temperature} needs keys and positions")
    top, ids = _kept(logits, sampling)
    sampled = jax.vmap(lambda key, at, row: jax.random.categorical(jax.random.fold_in(key, at), row))(
        keys, position, top
    )
    return jnp.take_along_axis(ids, sampled[:, None], 1)[:, 0]


def distribution(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the probabilities of [..., vocab] logits by which `sample` chooses at a temperature above 0, float32 as
    well."""
    if not sampling.top_k and sampling.top_p == 1:
        return jax.nn.softmax(logits / np.float32(sampling.temperature), -1)
    top, ids = _kept(logits, sampling)
    return jnp.put_along_axis(jnp.zeros_like(logits), ids, jax.nn.softmax(top, -1), -1, inplace=False)


def seed_key(seed: int) -> jax.Array:
    """Returns the random key of a seed of 64 bits: jax takes 32 of them, or all with `jax_enable_x64`."""
    low, high = (np.uint32(seed >> shift & 0xFFFFFFFF) for shift in (0, 32))
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key


def keys_of(key: jax.Array, stream: jax.Array) -> jax.Array:
    """Returns a key for each stream of [B] int32."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, stream)


def sampling_keys(
    keys: jax.Array | None, position: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the keys [B] of three independent samples at a position: of a draft, of its acceptance, and of what
    replaces it.

    Args:
        keys: [B] random keys.
        position: [B] int32.

    Raises:
        RequestError: `keys` is missing.
    """
    if keys is None:
        raise RequestError(f"sampling at temperature {sampling.temperature} needs keys")
    split = jax.vmap(lambda key, at: jax.random.split(jax.random.fold_in(key, at), 3))(keys, position)
    return split[:, 0], split[:, 1], split[:, 2]


def _kept(logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Logits over the temperature of the tokens that may be sampled, likeliest first, others -inf; and their ids."""
    kept = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    top, ids = lax.top_k(logits / np.float32(sampling.temperature), kept)
    chance = jax.nn.softmax(top, -1)
    before = jnp.cumsum(chance, -1) - chance
    # A subnormal top_p is 0 to some devices, and the likeliest token itself has 0 before it.
    reach = max(np.float32(sampling.top_p), np.finfo(np.float32).tiny)
    return jnp.where(before < reach, top, -np.float32(np.inf)), ids
