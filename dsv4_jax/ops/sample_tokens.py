"""sample_tokens: a token of each row of logits, drawn as the row's settings say.

A token is drawn by the Gumbel-max rule: the largest of logit / temperature + noise, where the noise is a function of a
row's seed, the position and the token's id, and of nothing else (Threefry-2x32 of Salmon et al. 2011, 20 rounds: the
seed is its key, position and id its counter).

Filters need no order of the vocabulary. Whether they keep a token follows from how many tokens stand before it and how
much probability these have, a count and a sum. So the winner of the race over all tokens is looked at; if the filters
do not keep it, neither do they keep what stands behind it, and the race is run again over those before it.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShapeError
from .arguments import Check
from .numerics import row_total
from .registry import Choice, Implementation, run

__all__ = [
    "IMPLEMENTATION",
    "SETTINGS",
    "SampleTokensArguments",
    "SamplingRows",
    "noise",
    "reference",
    "sample_tokens",
    "threefry",
]

_INF = np.float32(np.inf)
# A row of settings, as kernels read it: six floats, top_k, 1 | kind << 1 (0: nobody reads the draw), the seed.
SETTINGS = struct.Struct("<6fiIII")
_NOTHING = SETTINGS.pack(0, 1, 0, 1, 0, 0, 0, 0, 0, 0)
_WORDS = SETTINGS.size // 4


class _HasRow(Protocol):
    @property
    def row(self) -> bytes: ...


class SamplingRows(NamedTuple):
    """The settings of a step's rows, as its executable reads them. All are [B].

    They cross the jit boundary as one array, [B, 10] uint32: `of` makes it, `unpack` takes it apart.

    Attributes:
        temperature, top_p, min_p, repetition, presence, frequency: float32.
        top_k: int32.
        draws: bool; False: nobody reads what the row draws.
        kind: int32; 0 is greedy, 1 draws of all tokens, 2 of those that filters keep.
        seed_low, seed_high: uint32.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    top_k: jax.Array
    draws: jax.Array
    kind: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array

    @staticmethod
    def of(samplings: Iterable[_HasRow | None]) -> np.ndarray:
        """Returns the packed rows, [B, 10] uint32, read-only.

        Args:
            samplings: of each row; None: nobody reads what it draws, as it is padding, or a prompt that goes on.

        Raises:
            RequestError: one of them draws and has no seed.
        """
        packed = b"".join([_NOTHING if one is None else one.row for one in samplings])
        return np.frombuffer(packed, "<u4").reshape(-1, _WORDS)

    @classmethod
    def unpack(cls, packed: jax.Array, rows: int) -> Self:
        """Raises `ShapeError` if they are not so many rows."""
        wanted = (rows, _WORDS)
        if packed.shape != wanted or packed.dtype != np.uint32:
            raise ShapeError(f"sampling is {packed.dtype}{[*packed.shape]}, expected uint32{[*wanted]} of SamplingRows")
        packed = jnp.asarray(packed)
        floats = lax.bitcast_convert_type(packed[:, :6], jnp.float32)
        top_k = lax.bitcast_convert_type(packed[:, 6], jnp.int32)
        kind = (packed[:, 7] >> np.uint32(1)).astype(jnp.int32)
        columns = [*(floats[:, i] for i in range(6)), top_k, packed[:, 7] > 0, kind, packed[:, 8], packed[:, 9]]
        return cls(*columns)


@dataclasses.dataclass(frozen=True)
class SampleTokensArguments:
    """Holds what an implementation of `sample_tokens` is given, as in its arguments."""

    logits: jax.Array
    settings: jax.Array
    position: jax.Array

    @property
    def empty(self) -> bool:
        return self.logits.size == 0


def sample_tokens(
    logits: jax.Array, settings: jax.Array, position: jax.Array, *, implementation: Choice = None
) -> jax.Array:
    """Draws a token of each row, [B] int32; at temperature 0 the likeliest one, ties to the lowest id.

    A row's draw depends on its own logits, settings and position, and on no other row. Rows with logits that are NaN or
    infinite draw some token below vocab.

    Args:
        logits: [B, vocab] float32, after masks and penalties.
        settings: [B, 10] uint32 of `SamplingRows.of`; their penalties are not looked at.
        position: [B] int32, of the tokens that gave the logits.

    Raises:
        ShapeError: an argument has the wrong shape or dtype; the message names it.
        ImplementationError: as every op (`registry.pick`).
    """
    check = Check("sample_tokens")
    logits = check.array("logits", logits, "float32", "B", "vocab")
    settings = check.array("settings", settings, "uint32", "B", _WORDS)
    position = check.array("position", position, "int32", "B")
    return run("sample_tokens", SampleTokensArguments(logits, settings, position), implementation)


def reference(arguments: SampleTokensArguments) -> jax.Array:
    """Computes `sample_tokens` in `jnp`: as much as the row that asks for most needs, which the host waits for."""
    rows = SamplingRows.unpack(arguments.settings, arguments.logits.shape[0])
    branches = [_likeliest, _drawn, _drawn_of_kept]  # of which one is run
    operands = arguments.logits, jnp.asarray(arguments.settings), arguments.position
    return lax.switch(rows.kind.max(initial=0), branches, *operands)


def noise(rows: SamplingRows, position: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise [B, vocab] float32: of seed, position [B] int32 and token id."""
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.uint32)[None], (position.shape[0], vocab))
    places = jnp.broadcast_to(position.astype(jnp.uint32)[:, None], ids.shape)
    high, low = threefry(rows.seed_low[:, None], rows.seed_high[:, None], places, ids)
    # 64 bits, of which float32 keeps 24 wherever the first one stands: small values, the winners, are not coarse.
    share = high.astype(jnp.float32) * np.float32(2**-32) + low.astype(jnp.float32) * np.float32(2.0**-64)
    share = jnp.clip(share, np.float32(2.0**-65), np.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-share))


def _likeliest(chosen: jax.Array, packed: jax.Array, position: jax.Array) -> jax.Array:
    return chosen.argmax(-1).astype(jnp.int32)


def _drawn(chosen: jax.Array, packed: jax.Array, position: jax.Array) -> jax.Array:
    return _raced(SamplingRows.unpack(packed, chosen.shape[0]), chosen, position)[1].argmax(-1).astype(jnp.int32)


def _drawn_of_kept(chosen: jax.Array, packed: jax.Array, position: jax.Array) -> jax.Array:
    """Each row's draw of the tokens that its filters keep."""
    rows, vocab = SamplingRows.unpack(packed, chosen.shape[0]), np.int32(chosen.shape[1])
    scaled, raced = _raced(rows, chosen, position)
    ids, warm, largest = jnp.arange(vocab, dtype=jnp.int32)[None], rows.temperature > 0, scaled.max(-1)
    floor = jnp.where(warm & (rows.min_p > 0), largest + jnp.log(rows.min_p), -_INF)
    most = jnp.where(warm & (rows.top_k > 0), jnp.minimum(rows.top_k, vocab), vocab)
    narrow = warm & (rows.top_p < 1)

    def mass(there: jax.Array) -> jax.Array:
        """Probability of those of the tokens that `min_p` keeps, over that of the likeliest."""
        weight = jnp.exp(scaled - largest[:, None])
        return row_total(jnp.where(there & (scaled >= floor[:, None]), weight, np.float32(0)))

    # Of the `most` likeliest: those above the last one, and as many equals of it as are missing, whichever.
    last = _kth_largest(scaled, largest, most, narrow & (most < vocab))
    above, ties = scaled > last[:, None], scaled == last[:, None]
    missing = jnp.minimum(most - above.sum(-1, dtype=jnp.int32), ties.sum(-1, dtype=jnp.int32)).astype(jnp.float32)
    whole = mass(above) + jnp.where(last >= floor, missing * jnp.exp(last - largest), np.float32(0))
    reach = jnp.where(narrow, rows.top_p * whole, _INF)

    def before(value: jax.Array, token: jax.Array) -> jax.Array:
        """Which tokens stand before this one of each row."""
        return (scaled > value[:, None]) | ((scaled == value[:, None]) & (ids < token[:, None]))

    def race(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        value, bound, token, open_ = state
        left = before(value, bound) & (scaled >= floor[:, None])
        winner = jnp.where(left, raced, -_INF).argmax(-1).astype(jnp.int32)
        winner = jnp.where(open_, winner, token)
        value = jnp.take_along_axis(scaled, winner[:, None], 1)[:, 0]
        better = before(value, winner)
        count = better.sum(-1, dtype=jnp.int32)
        # The first one is always kept; so each row comes to an end, whatever is infinite or no number in it.
        kept = (count == 0) | ((count < most) & (mass(better) < reach))
        return value, winner, winner, open_ & ~kept

    start = jnp.full_like(largest, -_INF), jnp.full_like(most, vocab), jnp.zeros_like(most), jnp.ones_like(warm)
    return lax.while_loop(lambda state: state[3].any(), race, start)[2]


def _raced(rows: SamplingRows, chosen: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits over the temperature, and with the noise; at temperature 0 the logits themselves, twice."""
    warm = (rows.temperature > 0)[:, None]
    scaled = chosen / jnp.where(warm, rows.temperature[:, None], np.float32(1))
    return scaled, scaled + jnp.where(warm, noise(rows, position, chosen.shape[1]), np.float32(0))


def _kth_largest(scaled: jax.Array, largest: jax.Array, k: jax.Array, asked: jax.Array) -> jax.Array:
    """A value [B] of each row above which it has fewer than k[b] of [B, vocab], and k[b] at it or above; where it is
    not asked for, or probability is 0 before, one as good: below all that have any.

    Found by halving the interval that it lies in.
    """

    def count(value: jax.Array) -> jax.Array:
        return (scaled > value[:, None]).sum(-1, dtype=jnp.int32)

    def middle(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        between = low * np.float32(0.5) + high * np.float32(0.5)
        return between, (low < between) & (between < high)

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (low, high), (between, going) = state, middle(*state)
        there = count(between)
        return jnp.where(going & (there >= k), between, low), jnp.where(going & (there <= k), between, high)

    low = largest - np.float32(128)  # whose exponential is 0 beside that of the largest
    high = jnp.where(asked & (count(low) >= k), largest, low)
    return lax.while_loop(lambda state: middle(*state)[1].any(), halve, (low, high))[1]


def threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of Salmon et al. 2011, 20 rounds: two uint32 arrays of key and counter, for any shapes."""
    keys = key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1


IMPLEMENTATION = Implementation("sample_tokens", "xla", reference)
