"""What a cache of fewer bits costs a trained model: loss, divergence and what its indexers pick, on real text.

Windows of a text go through the cache as a server's requests do: several side by side, prompts in chunks that they
share, then a token a step for all of them; the tokens are always those of the text. Every variant runs the same steps,
so that each token's probabilities stand beside those of the reference: the same weights and numerics, with rows and
index keys in float32. Each other reference is itself compared with that of float32 weights.

Intervals are of 95 %, of the mean over windows (Student's t): tokens of one window are not independent.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache, init_cache
from ..capacity import capacity
from ..config import AttentionType, DSV4Config, Numerics
from ..errors import OptionError
from ..layout import CacheLayout, CacheSize, KeySplit
from ..manager import KVCacheManager, Request, StepShape
from ..model.attention import attention, selected_entries
from ..model.forward import GPU_DECODE_OPTIONS, embed
from ..model.head import head
from ..model.hyper_connections import behind, read
from ..model.moe import moe
from ..model.numerics import activations
from ..model.weights.params import Params
from ..ops.registry import Choice
from ..plan import PackedPlan

__all__ = [
    "REFERENCE",
    "Feeding",
    "Form",
    "Mean",
    "Variant",
    "measure_quality",
    "reference_bytes",
    "variants",
    "windows_of",
]


class Form(NamedTuple):
    """What weights are held in, and what their products round."""

    weights: str
    numerics: Numerics = "plain"


class Variant(NamedTuple):
    """What a cache stores rows and index keys in, and how attention cuts its keys."""

    kv_format: str
    index_format: str
    key_split: KeySplit = "throughput"

    def __str__(self) -> str:
        return f"{self.kv_format}/{self.index_format}, {self.key_split}"


REFERENCE = Variant("f32", "f32")
_SHIPPED = Variant("fp8", "fp4")  # as the model was trained


def variants(kv_formats: Sequence[str], index_formats: Sequence[str], key_splits: Sequence[KeySplit]) -> list[Variant]:
    """Returns the reference, every row format with every index format, and the formats of V4 with every key split.

    One key split: everything with this one.
    """
    first = REFERENCE.key_split if REFERENCE.key_split in key_splits else key_splits[0]
    formats = [Variant(*pair, first) for pair in itertools.product(kv_formats, index_formats)]
    own = _SHIPPED if _SHIPPED[:2] in {pair[:2] for pair in formats} else formats[0]
    return list(dict.fromkeys([REFERENCE, *formats, *(own._replace(key_split=split) for split in key_splits)]))


@dataclasses.dataclass(frozen=True)
class Feeding:
    """A text, and the steps it goes through a cache in.

    Attributes:
        windows: [windows, context + 1] int32 tokens; of each all but the first are predicted.
        requests: windows side by side.
        chunk: tokens of a step of prefill.
        decoded: the last tokens of each window, fed one a step.
    """

    windows: np.ndarray
    requests: int
    chunk: int
    decoded: int

    @property
    def context(self) -> int:
        return self.windows.shape[1] - 1

    @property
    def tokens(self) -> int:
        return self.windows.shape[0] * self.context

    def groups(self) -> Iterator[np.ndarray]:
        """Yields the windows that are fed side by side; the last may be fewer."""
        for first in range(0, len(self.windows), self.requests):
            yield np.arange(first, min(first + self.requests, len(self.windows)))


def windows_of(tokens: np.ndarray, context: int, most: int) -> np.ndarray:
    """Cuts a text into windows of `context` tokens and the one after: at most `most` tokens, as the text lies.

    Raises:
        OptionError: the text is shorter than one window.
    """
    count = min((tokens.size - 1) // context, max(most // context, 1))
    if count < 1:
        raise OptionError(f"a text of {tokens.size} tokens has no window of {context + 1}")
    places = context * np.arange(count)[:, None] + np.arange(context + 1)
    return tokens[places].astype(np.int32)


class Mean(NamedTuple):
    """The mean over windows, and half the width of its interval; None of fewer than four windows."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, each: np.ndarray) -> Mean:
        """Takes one value of each window; NaN of those that have none."""
        each = each[np.isfinite(each)]
        if not each.size:
            return cls(float("nan"), None)
        half = _t95(each.size - 1) * each.std(ddof=1) / each.size**0.5 if each.size >= 4 else None
        return cls(float(each.mean()), None if half is None else float(half))


def _t95(degrees: int) -> float:
    """Student's t at 97.5 %, by its expansion in 1 / degrees: within 1 % from three degrees on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def reference_bytes(cfg: DSV4Config, feeding: Feeding) -> int:
    """Returns the bytes that the reference's probabilities and picks take on the device while others are compared."""
    picks = 4 * cfg.count(AttentionType.CSA) * cfg.index_topk
    return (4 * cfg.vocab_size + picks) * (feeding.tokens + feeding.chunk * len(list(feeding.groups())))


# A step, and what is read off it


class _Seen(NamedTuple):
    """What is kept of a step of the reference, for the others to be compared with.

    Attributes:
        logp: [T, vocab] float32.
        picks: [CSA layers, T, K] int32, entries in ascending order.
    """

    logp: jax.Array
    picks: jax.Array


def _step(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    targets: jax.Array,
    reference: _Seen | None,
    *,
    keep: bool,
    implementation: Choice,
) -> tuple[dict[str, jax.Array], _Seen | None, KVCache]:
    """Runs a step as `forward` does: (numbers of each token [T], itself if it is kept, the cache)."""
    step = cache.begin(plan, implementation)
    cfg, dtype, here = step.layout.cfg, activations(params), step.plan
    residual, picks = embed(params, tokens, cfg), []
    for i, p in enumerate(params["layers"]):
        x, streams, *back = read(p, "hc_attn", residual, cfg, dtype, implementation)
        y, handle = attention(p["attn"], step.layer(i), x)
        if cfg.layer_types[i] is AttentionType.CSA:
            picks.append(_sorted(*selected_entries(p["attn"], handle, x), cfg.index_topk))
        step, residual = handle.step, behind((y,), streams, *back)
        x, streams, *back = read(p, "hc_ffn", residual, cfg, dtype, implementation)
        added, _ = moe(p["ffn"], x, tokens, cfg)
        residual = behind(added, streams, *back)
    logp = jax.nn.log_softmax(head(params, residual, cfg, implementation), -1)
    none = jnp.zeros((0, tokens.shape[0], cfg.index_topk), jnp.int32)
    seen = _Seen(logp, jnp.stack(picks) if picks else none)
    found = {"loss": -jnp.take_along_axis(logp, targets[:, None], 1)[:, 0]}
    if reference is not None:
        found["kl"] = (jnp.exp(reference.logp) * (reference.logp - logp)).sum(-1)
        found["same_token"] = (reference.logp.argmax(-1) == logp.argmax(-1)).astype(jnp.float32)
        if picks:
            chooses = (here.token_position + np.int32(1)) // np.int32(cfg.csa_ratio) > cfg.index_topk
            found["same_entries"] = jnp.where(chooses, _alike(seen.picks, reference.picks), np.float32(np.nan))
    return found, seen if keep else None, step.finish()


def _sorted(entries: jax.Array, count: jax.Array, width: int) -> jax.Array:
    """The entries that count in ascending order, [T, width]; others are -1, -2, ..., which no other row has."""
    entries = jnp.pad(entries, ((0, 0), (0, width - entries.shape[1])))
    place = jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.sort(jnp.where(place < count[:, None], entries, -np.int32(1) - place), -1)


def _alike(picks: jax.Array, others: jax.Array) -> jax.Array:
    """The share of `others` that is in `picks` too, both [layers, T, K] without repeats: [T] float32."""
    both = jnp.sort(jnp.concatenate([picks, others], -1), -1)
    same = ((both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0)).sum(-1)
    return same.mean(0, dtype=jnp.float32) / np.float32(picks.shape[-1])


# The steps of a text


class _Fed(NamedTuple):
    """A step: its plan and tokens, what follows each token, and whose they are.

    Attributes:
        plan: packed.
        tokens, targets: [T] int32.
        window: [T] int, -1 of padding.
        decoded: whether it is a step of one token each.
    """

    plan: PackedPlan
    tokens: np.ndarray
    targets: np.ndarray
    window: np.ndarray
    decoded: bool


class _Shapes(NamedTuple):
    size: CacheSize
    prefill: StepShape
    decode: StepShape


def _shapes(layout: CacheLayout, feeding: Feeding) -> _Shapes:
    size = capacity(layout, max_requests=feeding.requests, max_context=feeding.context).size
    manager = KVCacheManager(layout, size)
    prefill = manager.pinned_shape(feeding.requests, feeding.chunk, history=True)
    return _Shapes(size, prefill, manager.pinned_shape(feeding.requests))


def _steps(layout: CacheLayout, feeding: Feeding, shapes: _Shapes) -> Iterator[_Fed]:
    """Yields the steps of all windows: of equal text and equal shapes whatever the formats are."""
    manager, prompt = KVCacheManager(layout, shapes.size), feeding.context - feeding.decoded

    def fed(scheduled: list[tuple[Request, int]], shape: StepShape, of: dict[Any, int], decoded: bool) -> _Fed:
        targets, window, at = np.zeros(shape.tokens, np.int32), np.full(shape.tokens, -1), 0
        for request, count in scheduled:
            i, start = of[request.id], request.num_cached
            targets[at : at + count] = feeding.windows[i, start + 1 : start + count + 1]
            window[at : at + count] = i
            at += count
        plan = manager.plan_step(scheduled, shape=shape)
        return _Fed(plan.pack(), manager.plan_tokens(plan), targets, window, decoded)

    for group in feeding.groups():
        requests = [manager.admit_request(feeding.windows[i, :prompt].tolist()) for i in group]
        of = {request.id: int(i) for request, i in zip(requests, group, strict=True)}
        while scheduled := manager.schedule(feeding.chunk, shape=shapes.prefill):
            yield fed(scheduled, shapes.prefill, of, False)
        for place in range(prompt, feeding.context):
            for request in requests:
                request.tokens.append(int(feeding.windows[of[request.id], place]))
            yield fed([(request, 1) for request in requests], shapes.decode, of, True)
        for request in requests:
            manager.release_request(request)


# Measuring


class _Beside(NamedTuple):
    """A reference: what was kept of its steps, and the loss of each window."""

    seen: list[_Seen]
    losses: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A variant whose two steps are compiled, or are being."""

    variant: Variant
    layout: CacheLayout
    shapes: _Shapes
    prefill: Future[Any]
    decode: Future[Any]


def measure_quality(
    cfg: DSV4Config,
    load: Callable[[Form], Params],
    forms: Sequence[Form],
    chosen: Sequence[Variant],
    feeding: Feeding,
    *,
    implementation: Choice = None,
    compilers: int = 1,
    on_start: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Yields a row of the table "quality" for every form of the weights and every variant, the reference first.

    Args:
        load: gives the parameters in one of these forms.
        forms: with that of "float32" weights first if it is among them: the others' references are compared with its
            own.
        chosen: as `variants` gives them.
        compilers: how many steps are compiled at a time.
        on_start: told what comes next.

    Raises:
        CacheError: a layout, or a kernel, that is not possible.
    """
    of_float32: _Beside | None = None
    for form in forms:
        name = f"{form.weights} weights, {form.numerics} numerics"
        on_start(name)
        params, reference = load(form), None
        with ThreadPoolExecutor(compilers) as pool:
            compile_ = partial(_prepared, cfg, params, feeding, form.numerics, implementation, pool)
            ready = []
            for variant in chosen:
                on_start(f"{name}, {variant}: tracing")
                ready.append(compile_(variant, compared=variant != REFERENCE or of_float32 is not None))
            for each in ready:
                on_start(f"{name}, {each.variant}")
                first = each.variant == REFERENCE
                beside = of_float32 if first else reference
                row, losses, seen = _measured(each, params, feeding, beside.seen if beside else None, keep=first)
                row["loss_change"], row["loss_change_half"] = (
                    Mean.of(losses - beside.losses) if beside else (None, None)
                )
                row["against"] = ("float32 weights" if first else "float32 rows") if beside else None
                if first:
                    reference = _Beside(seen, losses)
                    of_float32 = reference if form.weights == "float32" else of_float32
                own = dict(weights=form.weights, numerics=None if form.numerics == "plain" else form.numerics)
                yield {**own, **row, "implementation": implementation}


def _prepared(
    cfg: DSV4Config,
    params: Params,
    feeding: Feeding,
    numerics: Numerics,
    implementation: Choice,
    pool: ThreadPoolExecutor,
    variant: Variant,
    compared: bool,
) -> _Ready:
    given: dict[str, Any] = dict(key_split=variant.key_split, numerics=numerics)
    layout = CacheLayout(cfg, variant.kv_format, variant.index_format, **given)
    shapes = _shapes(layout, feeding)
    cache = jax.eval_shape(partial(init_cache, layout, shapes.size))

    def compiled(shape: StepShape) -> Future[Any]:
        options = {} if shape.history else GPU_DECODE_OPTIONS  # as `generate` has it
        plan = KVCacheManager(layout, shapes.size).plan_step([], shape=shape).pack()
        each = jax.ShapeDtypeStruct((shape.tokens,), jnp.int32)
        picked = (cfg.count(AttentionType.CSA), shape.tokens, cfg.index_topk)
        beside = jax.eval_shape(
            lambda: _Seen(jnp.zeros((shape.tokens, cfg.vocab_size), jnp.float32), jnp.zeros(picked, jnp.int32))
        )
        step = partial(_step, keep=variant == REFERENCE, implementation=implementation)
        jitted = jax.jit(step, donate_argnums=1, compiler_options=options)
        return pool.submit(jitted.lower(params, cache, plan, each, each, beside if compared else None).compile)

    return _Ready(variant, layout, shapes, compiled(shapes.prefill), compiled(shapes.decode))


def _measured(
    ready: _Ready, params: Params, feeding: Feeding, reference: list[_Seen] | None, *, keep: bool
) -> tuple[dict[str, Any], np.ndarray, list[_Seen]]:
    """Runs all steps: the row, the loss of each window, and what is kept of the steps."""
    cache, runs = init_cache(ready.layout, ready.shapes.size), {False: ready.prefill, True: ready.decode}
    for run in runs.values():
        run.result()
    begun, seen, found, owners = time.perf_counter(), [], [], []
    for i, step in enumerate(_steps(ready.layout, feeding, ready.shapes)):
        beside = None if reference is None else reference[i]
        numbers, kept, cache = runs[step.decoded].result()(params, cache, step.plan, step.tokens, step.targets, beside)
        if keep:
            seen.append(kept)
        found.append(numbers)
        owners.append((step.window, step.decoded))
    each = jax.device_get(found)
    seconds = time.perf_counter() - begun
    names = ("loss", "kl", "same_token", "same_entries")
    all_ = {name: _by_window(name, each, owners, feeding) for name in names if name in each[0]}
    decoded = {name: _by_window(name, each, owners, feeding, decoded=True) for name in ("loss", "kl") if name in all_}
    row: dict[str, Any] = dict(ready.variant._asdict())
    row |= dict(
        tokens=feeding.tokens,
        windows=len(feeding.windows),
        context=feeding.context,
        requests=feeding.requests,
        chunk=feeding.chunk,
        decoded=feeding.decoded,
    )
    for name in names:
        row[name], row[f"{name}_half"] = Mean.of(all_[name]) if name in all_ else (None, None)
    for name in ("loss", "kl"):
        row[f"decoded_{name}"], row[f"decoded_{name}_half"] = (
            Mean.of(decoded[name]) if name in decoded else (None, None)
        )
    row["seconds"], row["tokens_per_s"] = seconds, feeding.tokens / seconds
    return row, all_["loss"], seen


def _by_window(
    name: str,
    each: list[dict[str, Any]],
    owners: list[tuple[np.ndarray, bool]],
    feeding: Feeding,
    decoded: bool = False,
) -> np.ndarray:
    """Each window's mean of a number of its tokens, of the decoded ones alone if asked; NaN where it has none."""
    sums, counts = np.zeros(len(feeding.windows)), np.zeros(len(feeding.windows))
    for numbers, (window, of_decode) in zip(each, owners, strict=True):
        if of_decode or not decoded:
            value = np.asarray(numbers[name], np.float64)
            use = (window >= 0) & np.isfinite(value)
            np.add.at(sums, window[use], value[use])
            np.add.at(counts, window[use], 1)
    with np.errstate(invalid="ignore"):
        return sums / counts
