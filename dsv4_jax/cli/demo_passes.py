"""The demo's requests through a cache, and without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from ..cache import init_cache
from ..capacity import capacity
from ..layout import CacheLayout
from ..manager import KVCacheManager
from ..model import forward, forward_uncached

if TYPE_CHECKING:
    from ..model import Params

__all__ = ["Served", "fast_to_compile", "serve", "without_cache"]


def fast_to_compile() -> dict[str, int]:
    """Compiler options for what runs a few times and is not timed: on a CPU, half the time of compiling it."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


class Served(NamedTuple):
    """One run of all requests over one cache.

    Attributes:
        sequences: prompt and generated tokens of each request.
        logits: [tokens that were fed, vocab] float32 of each request.
        prefill_rate, decode_rate: tokens a second; compiling does not count.
    """

    sequences: list[list[int]]
    logits: list[np.ndarray]
    prefill_rate: float
    decode_rate: float


def serve(
    params: Params,
    layout: CacheLayout,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    chunk: int,
    *,
    script: Sequence[Sequence[int]] | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Served:
    """Prefills all prompts in chunks and decodes all requests together, in a step for each token.

    Args:
        new_tokens: to generate for each request.
        chunk: most tokens of a step.
        script: sequences to follow; None: the likeliest token is taken.
        on_tokens: called with how many tokens were generated.
    """
    plan = capacity(layout, max_requests=len(prompts), max_context=max(map(len, prompts)) + new_tokens)
    manager, cache = KVCacheManager(layout, plan.size), init_cache(layout, plan.size)
    step = jax.jit(forward, donate_argnames="cache", compiler_options=None if script is None else fast_to_compile())
    chunk = min(max(chunk, len(prompts)), sum(map(len, prompts)))
    prefill = manager.pinned_shape(len(prompts), chunk, history=True)
    # Where nothing is timed, one executable does: decodes are padded to it.
    shapes = {False: prefill, True: prefill if script else manager.pinned_shape(len(prompts))}
    for shape in set(shapes.values()):  # a step of padding compiles
        empty = manager.plan_step([], shape=shape)
        _, cache = step(params, cache, empty.pack(), manager.plan_tokens(empty))

    requests = [manager.admit_request(list(prompt)) for prompt in prompts]
    lengths = [len(prompt) + new_tokens for prompt in prompts]
    seen: list[list[np.ndarray]] = [[] for _ in prompts]
    seconds, fed = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    while scheduled := manager.schedule(chunk):
        start = time.perf_counter()
        decoding = all(count == 1 for _, count in scheduled)
        planned = manager.plan_step(scheduled, shape=shapes[decoding])
        logits, cache = step(params, cache, planned.pack(), manager.plan_tokens(planned))
        rows = np.asarray(logits)
        seconds[decoding] += time.perf_counter() - start
        fed[decoding] += sum(count for _, count in scheduled)
        first = 0
        for request, count in scheduled:
            i = requests.index(request)
            seen[i].append(rows[first : first + count])
            first += count
            if not request.num_pending and len(request.tokens) < lengths[i]:
                request.tokens.append(script[i][len(request.tokens)] if script else int(seen[i][-1][-1].argmax()))
                on_tokens(1)
    sequences = [list(request.tokens) for request in requests]
    for request in requests:
        manager.release_request(request)
    rates = [fed[kind] / seconds[kind] if seconds[kind] else 0.0 for kind in (False, True)]
    return Served(sequences, [np.concatenate(chunks) for chunks in seen], *rates)


def without_cache(
    params: Params, layout: CacheLayout, sequences: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[np.ndarray]:
    """Logits of the first `counts[i]` tokens of each sequence, by a forward that has no cache."""
    step = jax.jit(forward_uncached, static_argnums=0, compiler_options=fast_to_compile())
    # One shape for all sequences: what follows a token does not change its logits.
    padded = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    rows = zip(padded, counts, strict=True)
    return [np.asarray(step(layout.cfg, params, row))[:count] for row, count in rows]
