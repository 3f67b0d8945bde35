"""Sampling of the next token from logits: settings as data, one executable whatever each request asks for.

A token is drawn by the Gumbel-max rule: the largest of logit / temperature + noise, where the noise is a function of a
row's seed, the position and the token's id, and of nothing else (Threefry-2x32 of Salmon et al. 2011, 20 rounds: the
seed is its key, position and id its counter). So a draw depends neither on the batch nor on the number of steps in a
call, a filter only takes tokens out of the race, and a draft that is drawn with the noise of its place is right
whenever it can be (`speculative.py`).

Filters need no order of the vocabulary. Whether they keep a token follows from how many tokens stand before it and how
much probability these have, a count and a sum. So the winner of the race over all tokens is looked at; if the filters
do not keep it, neither do they keep what stands behind it, and the race is run again over those before it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import INT32_MAX, check_integer
from ..errors import RequestError, ShapeError
from ..untrusted import brief

__all__ = [
    "GREEDY",
    "Sampled",
    "Sampling",
    "SamplingRows",
    "counted",
    "distribution",
    "draw",
    "log_probabilities",
    "mask_words",
    "noise",
    "sample",
    "sample_rows",
    "token_counts",
    "uniform",
]

# Added to a position: further random numbers of the same place, independent of those that `sample` draws with.
SECOND, THIRD = np.uint32(1 << 31), np.uint32(3 << 30)
IN_PROMPT = 1 << 30  # of a token's count: it stands in the prompt
_INF = np.float32(np.inf)
_TERMS = 16  # added in a row by `_total`
_ROW = struct.Struct("<6fiIII")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request samples.

    A draw at a temperature above 0 is of softmax(logits / temperature) over the tokens that all filters keep: `min_p`
    of all tokens, `top_k` of those, `top_p` of what is then left. "Likelier" is the order of logits, ties the lower id
    first. At temperature 0 nothing is drawn and filters change nothing.

    Penalties change logits before all that, at temperature 0 as well: `repetition_penalty` those of tokens in prompt or
    output, the two others those of tokens in the output.

    Attributes:
        temperature: 0 takes the likeliest token, ties to the lowest id; others from 1e-30 to 1e30, for logits over
            them to be float32.
        top_k: keep only the k likeliest tokens; 0 keeps all.
        top_p: then keep the fewest tokens whose probability reaches p (at least one); 1 keeps all.
        min_p: keep tokens that have at least this share of the likeliest one's probability; 0 keeps all.
        repetition_penalty: above 0: logits above 0 are divided by it, others multiplied; 1 changes nothing.
        presence_penalty: -2 to 2, subtracted once.
        frequency_penalty: -2 to 2, subtracted as often as the token was sampled.
        seed: 64 bits, of the request's random numbers; None: whoever runs the request gives it one.

    Raises:
        RequestError: naming the attribute that is out of range, or of a wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("top_k", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
                raise RequestError(f"{field.name} must be a number, got {brief(value)}")
        check_integer("top_k", self.top_k, error=RequestError)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1, error=RequestError)
        warm, penalty = self.temperature, self.repetition_penalty
        if not (math.isfinite(warm) and (warm == 0 or 1e-30 <= warm <= 1e30)):
            raise RequestError(f"temperature must be finite and at least 0 (1e-30 to 1e30, or 0), got {warm}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 1e-30 <= penalty <= 1e30:
            raise RequestError(f"repetition_penalty must be finite and above 0 (1e-30 to 1e30), got {penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise RequestError(f"{name} must be in [-2, 2], got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """It draws nothing: the likeliest token is taken, penalties aside."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """It needs to know which tokens there were (`counts` of a step)."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @functools.cached_property
    def row(self) -> bytes:
        """The request's row of `SamplingRows`. Raises `RequestError` if it draws and has no seed."""
        if self.seed is None and not self.greedy:
            raise RequestError(f"sampling at temperature {self.temperature} needs a seed")
        # A subnormal is 0 to some devices, and the likeliest token itself has 0 before it.
        reach = max(float(self.top_p), float(np.finfo(np.float32).tiny))
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        bits = (self.seed or 0) & (2**64 - 1)
        kind = 0 if self.greedy else 2 if self.top_k or self.top_p < 1 or self.min_p else 1
        last = min(int(self.top_k), INT32_MAX), 1 | kind << 1, bits & 0xFFFFFFFF, bits >> 32
        return _ROW.pack(self.temperature, reach, self.min_p, *penalties, *last)


GREEDY = Sampling()
_NOTHING = _ROW.pack(0, 1, 0, 1, 0, 0, 0, 0, 0, 0)


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
    def of(samplings: Iterable[Sampling | None]) -> np.ndarray:
        """Returns the packed rows, [B, 10] uint32, read-only.

        Args:
            samplings: of each row; None: nobody reads what it draws, as it is padding, or a prompt that goes on.

        Raises:
            RequestError: one of them draws and has no seed.
        """
        packed = b"".join([_NOTHING if one is None else one.row for one in samplings])
        return np.frombuffer(packed, "<u4").reshape(-1, _ROW.size // 4)

    @classmethod
    def unpack(cls, packed: jax.Array, rows: int) -> Self:
        """Raises `ShapeError` if they are not so many rows."""
        wanted = (rows, _ROW.size // 4)
        if packed.shape != wanted or packed.dtype != np.uint32:
            raise ShapeError(f"sampling is {packed.dtype}{[*packed.shape]}, expected uint32{[*wanted]} of SamplingRows")
        packed = jnp.asarray(packed)
        floats = lax.bitcast_convert_type(packed[:, :6], jnp.float32)
        top_k = lax.bitcast_convert_type(packed[:, 6], jnp.int32)
        kind = (packed[:, 7] >> np.uint32(1)).astype(jnp.int32)
        columns = [*(floats[:, i] for i in range(6)), top_k, packed[:, 7] > 0, kind, packed[:, 8], packed[:, 9]]
        return cls(*columns)


class Sampled(NamedTuple):
    """What a step drew, or what `score_step` was given; of loops with a leading axis for the steps. A pytree.

    Attributes:
        tokens: [B] int32; of drafts [B, width + 1].
        logprobs: float32 like `tokens`, or None: the raw log-probability of each, log_softmax of the logits as they
            are, before masks, penalties, temperature and filters.
        top_ids, top_logprobs: int32 and float32 [B, N] (or [B, width + 1, N]), or None: the N likeliest tokens by the
            same logits, likeliest first, ties by the lowest id.
        experts: int16 [T, layers, k], or None: which routed experts each token that was fed chose, -1 of padding.
        counts: int32 [slots, vocab], or None: how often tokens were there after the step (`token_counts`).
    """

    tokens: jax.Array
    logprobs: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    experts: jax.Array | None = None
    counts: jax.Array | None = None


def sample(
    logits: jax.Array,
    sampling: jax.Array | None = None,
    position: jax.Array | None = None,
    *,
    masks: jax.Array | None = None,
    counts: jax.Array | None = None,
    logprobs: bool = False,
    top: int = 0,
) -> Sampled:
    """Samples a token of each row.

    A row's draw depends on its own logits, settings, mask, counts and position, and on no other row.

    Args:
        logits: [B, vocab] float32.
        sampling: [B, 10] uint32 of `SamplingRows.of`; None: every row takes its likeliest token.
        position: [B] int32, of the tokens that gave the logits; needed with `sampling`.
        masks: [B, ceil(vocab / 32)] uint32 or int32: bit i % 32 of word i // 32 allows token i; None: all tokens are
            allowed. A row without any allowed token draws 0.
        counts: [B, vocab] int32, rows of `token_counts`; None: no row has penalties.
        logprobs: static; whether to give log-probabilities.
        top: static, N of `Sampled.top_ids`; 0: none.

    Raises:
        RequestError: `sampling` is there and `position` is not, or `counts` without `sampling`.
        ShapeError: `sampling`, `masks` or `counts` do not fit the logits.
    """
    chosen = logits if masks is None else jnp.where(_allowed(masks, logits.shape), logits, -_INF)
    if sampling is None:
        if counts is not None:
            raise RequestError("counts are of penalties, which are settings: they need sampling")
        tokens = chosen.argmax(-1).astype(jnp.int32)
    else:
        rows = SamplingRows.unpack(sampling, logits.shape[0])
        if position is None:
            raise RequestError("sampling needs the positions of the rows")
        chosen = _penalised(chosen, rows, counts)
        # As narrow as the narrowest row: of the branches one is run.
        branches = [_likeliest, _drawn, _drawn_of_kept]
        tokens = lax.switch(rows.kind.max(initial=0), branches, chosen, jnp.asarray(sampling), position)
    if not logprobs and not top:
        return Sampled(tokens)
    return log_probabilities(logits, tokens, top=top)


def distribution(
    logits: jax.Array, sampling: jax.Array, *, masks: jax.Array | None = None, counts: jax.Array | None = None
) -> jax.Array:
    """What `sample` draws from with these arguments: [B, vocab] float32, each row's sum 1, up to rounding.

    Rows of filters sort the vocabulary. At temperature 0 the likeliest token has all of it.
    """
    rows = SamplingRows.unpack(sampling, logits.shape[0])
    chosen = logits if masks is None else jnp.where(_allowed(masks, logits.shape), logits, -_INF)
    chosen = _penalised(chosen, rows, counts)
    ids, warm = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None], rows.temperature > 0
    best = (ids == chosen.argmax(-1)[:, None]).astype(jnp.float32)

    def of_all() -> jax.Array:
        return jax.nn.softmax(chosen / jnp.where(warm, rows.temperature, np.float32(1))[:, None], -1)

    def of_kept() -> jax.Array:
        order = jnp.argsort(-chosen, 1, stable=True)  # ties: the lower id first
        share = jnp.take_along_axis(of_all(), order, 1)
        kept = (share >= rows.min_p[:, None] * share[:, :1]) & (
            (rows.top_k[:, None] == 0) | (ids < rows.top_k[:, None])
        )
        share = jnp.where(kept, share, np.float32(0))
        reach = jnp.where(rows.top_p < 1, rows.top_p * share.sum(-1), _INF)
        share = jnp.where((ids == 0) | (jnp.cumsum(share, 1) - share < reach[:, None]), share, np.float32(0))
        share = share / share.sum(-1, keepdims=True)
        return jnp.zeros_like(share).at[jnp.arange(len(share))[:, None], order].set(share)

    drawn = lax.switch(rows.kind.max(initial=0), [lambda: best, of_all, of_kept])
    # A row without any allowed token draws 0, as `sample` does.
    return jnp.where(warm[:, None] & jnp.isfinite(chosen.max(-1))[:, None], drawn, best)


def draw(shares: jax.Array, sampling: jax.Array, position: jax.Array) -> jax.Array:
    """A token of each row by probabilities [B, vocab] (which may lack a factor), [B] int32.

    Args:
        position: as of `sample`, whose random numbers these are; with `SECOND` added others.
    """
    rows = SamplingRows.unpack(sampling, shares.shape[0])
    return (jnp.log(shares) + noise(rows, position, shares.shape[1])).argmax(-1).astype(jnp.int32)


def uniform(sampling: jax.Array, position: jax.Array) -> jax.Array:
    """A random number of each row, [B] float32 in [0, 1): of its seed and position, and of nothing else."""
    rows = SamplingRows.unpack(sampling, position.shape[0])
    bits, _ = _threefry(
        rows.seed_low, rows.seed_high, position.astype(jnp.uint32) + THIRD, jnp.zeros_like(rows.seed_low)
    )
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def sample_rows(
    logits: jax.Array,
    slots: jax.Array,
    position: jax.Array,
    sampling: jax.Array | None,
    counts: jax.Array | None,
    **asked: Any,
) -> Sampled:
    """Does `sample` for the sequences of a step with counts [slots, vocab], and adds what it draws to them.

    Args:
        slots: [B] int32, of the sequences, 0 of padding.
        asked: `masks`, `logprobs` and `top` of `sample`.
    """
    drawn = sample(logits, sampling, position, counts=None if counts is None else counts[slots], **asked)
    if counts is None:
        return drawn
    return drawn._replace(counts=counted(counts, slots, sampling, drawn.tokens[:, None]))


def counted(
    counts: jax.Array, slots: jax.Array, sampling: jax.Array | None, tokens: jax.Array, kept: jax.Array | None = None
) -> jax.Array:
    """Returns counts [slots, vocab] with the first kept[b] of tokens [B, n] added, of rows whose draws are read.

    Those of padding are added to slot 0, which is nobody's.
    """
    assert sampling is not None  # `sample` has seen to it
    adds = SamplingRows.unpack(sampling, tokens.shape[0]).draws[:, None]
    if kept is not None:
        adds = adds & (jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < kept[:, None])
    adds = jnp.broadcast_to(adds, tokens.shape).astype(jnp.int32)
    return jnp.asarray(counts).at[jnp.broadcast_to(slots[:, None], tokens.shape), tokens].add(adds)


def log_probabilities(logits: jax.Array, tokens: jax.Array, *, top: int = 0) -> Sampled:
    """Raw log-probabilities of [B] int32 tokens by logits [B, vocab] float32, and of the `top` likeliest ones.

    A row's result depends on no other row, nor on how many there are: the same logits give the same bits. Of tokens
    below 0 it is 0.
    """
    largest = logits.max(-1, keepdims=True)
    behind = jnp.log(_total(jnp.exp(logits - largest)))

    def of(values: jax.Array) -> jax.Array:
        return (values - largest) - behind[:, None]

    own = of(jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], 1))[:, 0]
    sampled = Sampled(tokens, jnp.where(tokens < 0, np.float32(0), own))
    if not top:
        return sampled
    values, ids = lax.top_k(logits, min(top, logits.shape[-1]))
    return sampled._replace(top_ids=ids, top_logprobs=of(values))


def noise(rows: SamplingRows, position: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise [B, vocab] float32: of seed, position [B] int32 and token id."""
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.uint32)[None], (position.shape[0], vocab))
    places = jnp.broadcast_to(position.astype(jnp.uint32)[:, None], ids.shape)
    high, low = _threefry(rows.seed_low[:, None], rows.seed_high[:, None], places, ids)
    # 64 bits, of which float32 keeps 24 wherever the first one stands: small values, the winners, are not coarse.
    share = high.astype(jnp.float32) * np.float32(2**-32) + low.astype(jnp.float32) * np.float32(2.0**-64)
    share = jnp.clip(share, np.float32(2.0**-65), np.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-share))


def token_counts(prompt: Any, output: Any, vocab: int) -> np.ndarray:
    """Returns one request's row of `counts`, [vocab] int32: how often it sampled each token, and whether the prompt
    has it (`IN_PROMPT`).

    Args:
        prompt, output: token ids below `vocab`.
    """
    counts = np.bincount(np.asarray(output, np.int64), minlength=vocab).astype(np.int32)
    counts[np.asarray(prompt, np.int64)] |= IN_PROMPT
    return counts


def mask_words(vocab: int) -> int:
    """Returns how many words of 32 bits a mask of so many tokens has."""
    return -(-vocab // 32)


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
        return _total(jnp.where(there & (scaled >= floor[:, None]), weight, np.float32(0)))

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


def _penalised(logits: jax.Array, rows: SamplingRows, counts: jax.Array | None) -> jax.Array:
    if counts is None:
        return logits
    if counts.shape != logits.shape:
        raise ShapeError(f"counts are {counts.dtype}{[*counts.shape]}, expected int32{[*logits.shape]}")
    sampled = counts & np.int32(IN_PROMPT - 1)
    repetition = rows.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    return (
        logits
        - rows.frequency[:, None] * sampled.astype(jnp.float32)
        - rows.presence[:, None] * (sampled > 0).astype(jnp.float32)
    )


def _allowed(masks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Masks as [B, vocab] bool."""
    wanted = (*shape[:-1], mask_words(shape[-1]))
    if masks.shape != wanted or masks.dtype not in (np.uint32, np.int32):
        raise ShapeError(f"masks are {masks.dtype}{[*masks.shape]}, expected uint32{[*wanted]}")
    words = lax.bitcast_convert_type(jnp.asarray(masks), jnp.uint32)
    bits = words[..., None] >> lax.expand_dims(np.arange(32, dtype=np.uint32), range(len(shape)))
    return (bits & np.uint32(1)).reshape(*wanted[:-1], -1)[..., : shape[-1]] > 0


def _total(x: jax.Array) -> jax.Array:
    """Sums the last axis of [B, n] in an order that is the same for every B, and wherever the sum stands."""
    while (n := x.shape[-1]) > 1:
        terms = min(n, _TERMS)
        width = -(-n // terms)
        x = jnp.pad(x, ((0, 0), (0, terms * width - n)))
        parts = [x[:, i * width : (i + 1) * width] for i in range(terms)]
        x = functools.reduce(jnp.add, parts)
    return x[:, 0]


def _threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32, 20 rounds, of uint32 arrays."""
    keys = key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1
