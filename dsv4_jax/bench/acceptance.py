"""How many drafts of an MTP layer, or of DSpark's stages, are accepted on real text, by their place.

At every place of the decoded part of a text's windows the model's head drafts, the backbone verifies, and the step
after it is given the text's own next token, whatever was accepted: so all places are those of real text, and none are
of what the model would have made of it. (Greedy text of a small model soon repeats itself, where every draft is
accepted.)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from ..cache import KVCache, init_cache
from ..capacity import capacity
from ..config import DSV4Config, Numerics
from ..layout import CacheLayout
from ..manager import KVCacheManager, Request, StepShape
from ..model.draft_steps import draft_step
from ..model.sampling import Sampling, SamplingRows
from ..model.weights.params import Params
from ..ops.registry import Choice
from ..plan import PackedPlan
from .quality import Feeding, Mean

__all__ = ["measure_acceptance"]


def measure_acceptance(
    cfg: DSV4Config,
    params: Params,
    feeding: Feeding,
    drafts: int,
    temperature: float,
    *,
    rule: str = "coupled",
    numerics: Numerics = "plain",
    kv_format: str = "fp8",
    index_format: str = "fp4",
    implementation: Choice = None,
) -> Iterator[dict[str, Any]]:
    """Yields a row of the table "acceptance" for every place of a draft.

    Args:
        params: with the layers that draft.
        drafts: of each step.
        temperature: of drafts and of what verifies them; 0: greedy. A window's number is its seed.
        rule: what keeps a draft, the `acceptance` of `draft_step`; of no matter where all is greedy.
        numerics: those of the parameters.

    Raises:
        CacheError: a layout, or drafts, that the model cannot have.
    """
    choices: dict[str, Any] = dict(draft_tokens=drafts, include_drafts=True, numerics=numerics)
    layout = CacheLayout(cfg, kv_format, index_format, **choices)
    size = capacity(layout, max_requests=feeding.requests, max_context=feeding.context + drafts).size
    manager, cache = KVCacheManager(layout, size), init_cache(layout, size)
    prefill = manager.pinned_shape(feeding.requests, feeding.chunk, history=True)
    verify = manager.pinned_shape(feeding.requests, feeding.requests * (1 + drafts))
    # Those of drafts that are refused are set again in the next step.
    more = feeding.requests * (1 + drafts // layout.block_tokens)
    verify = dataclasses.replace(verify, table_entries=verify.table_entries + more)
    how: Any = dict(width=drafts, acceptance=rule, implementation=implementation)
    step = jax.jit(partial(_step, **how), donate_argnums=1)
    prompt = feeding.context - feeding.decoded
    kept = np.zeros((feeding.decoded, len(feeding.windows)), np.int64)
    begun = time.perf_counter()

    def run(
        cache: KVCache, scheduled: list[tuple[Request, int]], shape: StepShape, width: int, of: dict[Any, int]
    ) -> tuple[Any, KVCache]:
        tokens, wanted, at = np.zeros(shape.tokens, np.int32), np.zeros(shape.sequences, np.int32), 0
        for i, (request, count) in enumerate(scheduled):
            tokens[at : at + count] = request.tokens[request.num_cached : request.num_cached + count]
            wanted[i] = width
            at += count + width
        plan = manager.plan_step([(request, count + width) for request, count in scheduled], shape=shape)
        how = [Sampling(temperature, seed=of[request.id]) for request, _ in scheduled]
        rows = SamplingRows.of([*how, *[None] * (shape.sequences - len(how))])
        return step(params, cache, plan.pack(), tokens, wanted, rows)

    for group in feeding.groups():
        requests = [manager.admit_request(feeding.windows[i, :prompt].tolist()) for i in group]
        of = {request.id: int(i) for request, i in zip(requests, group, strict=True)}
        while scheduled := manager.schedule(feeding.chunk, shape=prefill):
            _, cache = run(cache, scheduled, prefill, 0, of)
        for place in range(feeding.decoded):
            for request in requests:
                request.tokens.append(int(feeding.windows[of[request.id], prompt + place]))
            found, cache = run(cache, [(request, 1) for request in requests], verify, drafts, of)
            kept[place, group] = np.asarray(found)[: len(group)] - 1
            for request in requests:
                manager.accept(request, 1)
        for request in requests:
            manager.release_request(request)
    seconds = time.perf_counter() - begun
    for place in range(1, drafts + 1):
        reached, accepted = (kept >= place - 1).sum(0), (kept >= place).sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            given = Mean.of(accepted / reached)
        mean, half = Mean.of(accepted / feeding.decoded)
        yield dict(
            head="mtp" if cfg.dspark is None else "dspark",
            rule=rule if temperature else None,
            numerics=None if numerics == "plain" else numerics,
            temperature=temperature,
            draft=place,
            drafts=drafts,
            accepted=mean,
            accepted_half=half,
            accepted_after_others=float(accepted.sum() / max(reached.sum(), 1)),
            accepted_after_others_half=given.half,
            tokens_a_step=1 + float(np.minimum(kept, place).mean()),
            places=int(kept.size),
            windows=len(feeding.windows),
            context=feeding.context,
            requests=feeding.requests,
            kv_format=kv_format,
            index_format=index_format,
            implementation=implementation,
            seconds=seconds,
        )


def _step(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    drafts: jax.Array,
    sampling: jax.Array,
    *,
    width: int,
    **how: Any,
) -> tuple[jax.Array, KVCache]:
    """`draft_step`: how many tokens each sequence keeps, [B], and the cache."""
    _, kept, cache = draft_step(params, cache, plan, tokens, drafts, width, sampling=sampling, **how)
    return kept, cache
