"""Sampling of the next token from logits: settings as data, one executable whatever each request asks for.

The draws themselves are an op, `ops.sample_tokens`: the largest of logit / temperature + noise, where the noise is a
function of a row's seed, the position and the token's id, and of nothing else. So a draw depends neither on the batch
nor on the number of steps in a call, a filter only takes tokens out of the race, and a draft that is drawn with the
noise of its place is right whenever it can be (`speculative.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import INT32_MAX, MAX_BIASES, check_integer, check_iterable
from ..errors import RequestError, ShapeError
from ..ops.numerics import row_total
from ..ops.registry import Choice, offered
from ..ops.sample_tokens import SETTINGS, SamplingRows, noise, sample_tokens, threefry
from ..untrusted import brief

__all__ = [
    "GREEDY",
    "Sampled",
    "Sampling",
    "SamplingRows",
    "bias_rows",
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
BIAS_SIZES = (32, MAX_BIASES)  # of a row of `bias_rows`: each is an executable of its own
_INF = np.float32(np.inf)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request samples.

    A draw at a temperature above 0 is of softmax(logits / temperature) over the tokens that all filters keep: `min_p`
    of all tokens, `top_k` of those, `top_p` of what is then left. "Likelier" is the order of logits, ties the lower id
    first. At temperature 0 nothing is drawn and filters change nothing.

    Biases and then penalties change logits before all that, at temperature 0 as well: `logit_bias` those of the tokens
    it names, `repetition_penalty` those of tokens in prompt or output, the two others those of tokens in the output.

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
        logit_bias: what is added to the logits of which tokens, -100 to 100, of at most 1024 tokens: a mapping, or
            pairs. It is kept as pairs in the order of ids, without those that add 0.

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
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("top_k", "seed", "logit_bias"):
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
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """It draws nothing: the likeliest token is taken, penalties aside."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """It needs to know which tokens there were (`counts` of a step)."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @functools.cached_property
    def bias_row(self) -> np.ndarray:
        """Ids and float32 bits of what is added to their logits, [2, n] int32."""
        pairs: Any = self.logit_bias
        values = np.array([value for _, value in pairs], np.float32)
        return np.stack([np.array([token for token, _ in pairs], np.int32), values.view(np.int32)])

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
        return SETTINGS.pack(self.temperature, reach, self.min_p, *penalties, *last)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of ids and biases, by id. Raises `RequestError`."""
    pairs = given.items() if isinstance(given, Mapping) else given
    if isinstance(pairs, str | bytes) or not hasattr(pairs, "__len__"):
        raise RequestError(f"logit_bias must be a mapping or pairs of token ids and numbers, got {brief(given)}")
    found: dict[int, float] = {}
    for pair in check_iterable("logit_bias", pairs, error=RequestError):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"logit_bias must be a mapping or pairs of token ids and numbers, got {brief(pair)}")
        token, value = check_integer("a token of logit_bias", pair[0], 0, INT32_MAX, error=RequestError), pair[1]
        number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if not number or not -100 <= value <= 100:
            raise RequestError(f"logit_bias must be numbers from -100 to 100, got {brief(value)} for token {token}")
        if token in found:
            raise RequestError(f"logit_bias has token {token} twice")
        found[token] = float(value)
    kept = tuple(sorted((token, value) for token, value in found.items() if value))
    if len(kept) > MAX_BIASES:
        raise RequestError(f"logit_bias is of at most {MAX_BIASES} tokens, got {len(kept)}")
    return kept


GREEDY = Sampling()


class Sampled(NamedTuple):
    """What a step drew, or what `score_step` was given; of loops with a leading axis for the steps. A pytree.

    Attributes:
        tokens: [B] int32; of drafts [B, width + 1].
        logprobs: float32 like `tokens`, or None: the raw log-probability of each, log_softmax of the logits as they
            are, before biases, masks, penalties, temperature and filters.
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
    biases: jax.Array | None = None,
    counts: jax.Array | None = None,
    logprobs: bool = False,
    top: int = 0,
    implementation: Choice = None,
) -> Sampled:
    """Samples a token of each row.

    A row's draw depends on its own logits, settings, mask, biases, counts and position, and on no other row.

    Args:
        logits: [B, vocab] float32.
        sampling: [B, 10] uint32 of `SamplingRows.of`; None: every row takes its likeliest token.
        position: [B] int32, of the tokens that gave the logits; needed with `sampling`.
        masks: [B, ceil(vocab / 32)] uint32 or int32: bit i % 32 of word i // 32 allows token i; None: all tokens are
            allowed. A row without any allowed token draws 0.
        biases: [B, 2, n] int32 of `bias_rows`; None: no row has any.
        counts: [B, vocab] int32, rows of `token_counts`; None: no row has penalties.
        logprobs: static; whether to give log-probabilities.
        top: static, N of `Sampled.top_ids`; 0: none.
        implementation: of the op `sample_tokens`, see `dsv4_jax.ops`.

    Raises:
        RequestError: `sampling` is there and `position` is not, or `counts` without `sampling`.
        ShapeError: `sampling`, `masks`, `biases` or `counts` do not fit the logits.
    """
    chosen = _changed(logits, masks, biases)
    if sampling is None:
        if counts is not None:
            raise RequestError("counts are of penalties, which are settings: they need sampling")
        tokens = chosen.argmax(-1).astype(jnp.int32)
    else:
        rows = SamplingRows.unpack(sampling, logits.shape[0])
        if position is None:
            raise RequestError("sampling needs the positions of the rows")
        chosen = _penalised(chosen, rows, counts)
        tokens = sample_tokens(chosen, sampling, position, implementation=offered("sample_tokens", implementation))
    if not logprobs and not top:
        return Sampled(tokens)
    return log_probabilities(logits, tokens, top=top)


def distribution(
    logits: jax.Array,
    sampling: jax.Array,
    *,
    masks: jax.Array | None = None,
    biases: jax.Array | None = None,
    counts: jax.Array | None = None,
) -> jax.Array:
    """What `sample` draws from with these arguments: [B, vocab] float32, each row's sum 1, up to rounding.

    Rows of filters sort the vocabulary. At temperature 0 the likeliest token has all of it.
    """
    rows = SamplingRows.unpack(sampling, logits.shape[0])
    chosen = _penalised(_changed(logits, masks, biases), rows, counts)
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
    bits, _ = threefry(
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
        asked: `masks`, `biases`, `logprobs` and `top` of `sample`.
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
    behind = jnp.log(row_total(jnp.exp(logits - largest)))

    def of(values: jax.Array) -> jax.Array:
        return (values - largest) - behind[:, None]

    own = of(jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], 1))[:, 0]
    sampled = Sampled(tokens, jnp.where(tokens < 0, np.float32(0), own))
    if not top:
        return sampled
    values, ids = lax.top_k(logits, min(top, logits.shape[-1]))
    return sampled._replace(top_ids=ids, top_logprobs=of(values))


def token_counts(prompt: Any, output: Any, vocab: int) -> np.ndarray:
    """Returns one request's row of `counts`, [vocab] int32: how often it sampled each token, and whether the prompt
    has it (`IN_PROMPT`).

    Args:
        prompt, output: token ids below `vocab`.
    """
    counts = np.bincount(np.asarray(output, np.int64), minlength=vocab).astype(np.int32)
    counts[np.asarray(prompt, np.int64)] |= IN_PROMPT
    return counts


def bias_rows(samplings: Iterable[Sampling | None]) -> np.ndarray:
    """Returns the biases of a step's rows, [B, 2, n] int32: ids, and float32 bits of what is added to their logits.

    n is the least of `BIAS_SIZES` that all of them fit; ids beyond the vocabulary fill what is left of a row.

    Args:
        samplings: of each row; None: nobody reads what it draws.
    """
    each = [None if one is None else one.bias_row for one in samplings]
    most = max((row.shape[1] for row in each if row is not None), default=0)
    size = next(size for size in BIAS_SIZES if most <= size)
    rows = np.zeros((len(each), 2, size), np.int32)
    rows[:, 0] = INT32_MAX - np.arange(size)
    for i, row in enumerate(each):
        if row is not None:
            rows[i, :, : row.shape[1]] = row
    return rows


def mask_words(vocab: int) -> int:
    """Returns how many words of 32 bits a mask of so many tokens has."""
    return -(-vocab // 32)


def _changed(logits: jax.Array, masks: jax.Array | None, biases: jax.Array | None) -> jax.Array:
    """Logits with biases added, and -inf where a mask allows no token."""
    if biases is not None:
        count = logits.shape[0]
        fits = len(biases.shape) == 3 and biases.shape[:2] == (count, 2) and biases.dtype == np.int32
        if not fits:
            raise ShapeError(f"biases are {biases.dtype}{[*biases.shape]}, expected int32[{count}, 2, n] of bias_rows")
        values = lax.bitcast_convert_type(jnp.asarray(biases)[:, 1], jnp.float32)
        rows = jnp.arange(count, dtype=jnp.int32)[:, None]
        logits = jnp.asarray(logits).at[rows, biases[:, 0]].add(values, mode="drop", unique_indices=True)
    return logits if masks is None else jnp.where(_allowed(masks, logits.shape), logits, -_INF)


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
