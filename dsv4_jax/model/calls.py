"""Calls of the devices between managers and the cache: what `generate` sends, and what comes back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache
from ..manager import Request
from ..ops.registry import Choice, frozen
from ..plan import PackedPlan, StepPlan
from .compiled_steps import CompiledSteps, stacked
from .drafting import Drafter
from .forward import GPU_DECODE_OPTIONS, decode_loop, prefill
from .sampling import Sampling, keys_of, sample, seed_key
from .shards import Shards
from .weights.params import Params

__all__ = ["Call", "Caller"]

Left = Mapping[Request, int]


class Call(NamedTuple):
    """A call that is under way.

    Attributes:
        scheduled: of each data shard, its requests, in the order of its rows, and how many tokens of each it computes.
        stream: [shards * B] int32: whose keys the rows sample with.
        rows: waits for it; what each row has sampled. Where a prompt goes on it means nothing.
        tokens: [shards * B, K] int32, on the devices: what its decode steps sample; None: it is of another kind.
    """

    scheduled: list[list[tuple[Request, int]]]
    stream: np.ndarray
    rows: Callable[[], list[list[int]]] = list
    tokens: jax.Array | None = None

    def drawn(self) -> list[tuple[Request, int, list[int]]]:
        """Waits for it: every request, how many of its tokens were computed, and what it has sampled, if anything."""
        rows, each = self.rows(), len(self.stream) // len(self.scheduled)
        return [
            (request, count, [] if request.num_pending else row)
            for shard, pairs in enumerate(self.scheduled)
            for (request, count), row in zip(pairs, rows[shard * each :], strict=False)
        ]


@dataclasses.dataclass
class Caller:
    """Sends the next step, or loop of steps, of some requests, to all data shards as one.

    Attributes:
        params: over the devices of the placement.
        chunk_tokens, decode_steps, drafts, sampling, seed, implementation: as in `generate`.
    """

    params: Params
    shards: Shards
    placement: CompiledSteps
    chunk_tokens: int
    decode_steps: int
    drafts: int
    sampling: Sampling
    seed: int
    implementation: Choice

    def __post_init__(self) -> None:
        first = self.shards.managers[0]
        rows, self._implementation = first.size.num_slots, frozen(self.implementation)
        self._rows, self._layout = rows, first.layout
        self._chunk_shape = first.pinned_shape(rows, self.chunk_tokens, history=True)
        self._decode_shape = first.pinned_shape(rows, rows * (1 + self.drafts), steps=self.decode_steps)
        # A key for each shard, so that it is split as all else is.
        keys = jnp.broadcast_to(seed_key(self.seed), (self.placement.shards,))
        self._key = jax.device_put(keys, self.placement.rows)
        same: dict[str, Any] = dict(sampling=self.sampling, implementation=self._implementation)
        self._prefill = self.placement.compiled(_prefill, **same)
        self._drafter = None
        if self.drafts:
            self._drafter = Drafter(self.params, self.shards, self.placement, self.drafts, self._key, same)

    def begin(self, cache: KVCache) -> tuple[Call, KVCache]:
        """The next call of the live requests, whose tokens are known."""
        requests = self.shards.requests
        decoding = self._tabled() and all(request.num_pending == 1 for request in requests)
        shape = self._decode_shape if decoding else self._chunk_shape
        stream, scheduled = np.zeros((len(self.shards.managers), self._rows), np.int32), []
        for manager, live, row in zip(self.shards.managers, self.shards.live, stream, strict=True):
            budget = shape.tokens if self._drafter is None else self._drafter.budget(shape.tokens, list(live))
            scheduled.append(manager.schedule(budget, shape=shape, requests=live) if live else [])
            row[: len(scheduled[-1])] = [live[request] for request, _ in scheduled[-1]]
        call = Call(scheduled, stream.reshape(-1))
        if self._drafter is not None:
            loop = self.decode_steps > 1 and decoding and self._drafter.fits(requests, self.decode_steps)
            steps = self.decode_steps if loop else 1
            fresh, cache = self._drafter.run(cache, scheduled, shape, call.stream, steps)
            return call._replace(rows=lambda: fresh), cache
        fits = all(request.num_cached + self.decode_steps <= request.max_tokens for request in requests)
        steps = self.decode_steps if decoding and fits else 1
        each = zip(self.shards.managers, scheduled, strict=True)
        plans = [manager.plan_step(pairs, steps=steps, shape=shape) for manager, pairs in each]
        tokens = np.concatenate([m.plan_tokens(plan) for m, plan in zip(self.shards.managers, plans, strict=True)])
        if decoding:
            # Placed where a call leaves those of the next: from elsewhere they would take another executable.
            first = jax.device_put(np.broadcast_to(tokens[:, None], (len(tokens), steps)), self.placement.rows)
            return self._decode(cache, plans, first, call)
        new, cache = self._prefill(self.params, cache, stacked(plans), tokens, self._key, call.stream)
        return call._replace(rows=lambda: np.asarray(new)[:, None].tolist()), cache

    def follow(self, before: Call, cache: KVCache, left: Left) -> tuple[Call | None, KVCache]:
        """The call after one whose samples are still on the devices; None if not all its requests surely go on.

        Args:
            left: how many tokens each may sample, those of the call before among them.
        """
        if before.tokens is None or sum(map(len, before.scheduled)) != len(self.shards.requests):
            return None, cache
        steps = before.tokens.shape[1]
        for request, _ in itertools.chain(*before.scheduled):
            if left.get(request, 0) <= steps or request.num_cached + steps > request.max_tokens:
                return None, cache
        if not self._tabled():
            return None, cache
        each = zip(self.shards.managers, before.scheduled, strict=True)
        plans = [manager.plan_step(pairs, steps=steps, shape=self._decode_shape) for manager, pairs in each]
        return self._decode(cache, plans, before.tokens, before)

    def _tabled(self) -> bool:
        """Blocks found in the cache need table entries that decode plans may have no room for."""
        for manager in self.shards.managers:
            manager.commit()
        block = self._layout.block_tokens
        return all(request.num_tabled * block >= request.num_cached for request in self.shards.requests)

    def _decode(self, cache: KVCache, plans: list[StepPlan], tokens: jax.Array, call: Call) -> tuple[Call, KVCache]:
        """`call` with K steps that begin with the last of `tokens` [shards * B, K]."""
        step = self.placement.compiled(
            _decode,
            GPU_DECODE_OPTIONS,
            steps=tokens.shape[1],
            sampling=self.sampling,
            implementation=self._implementation,
        )
        new, cache = step(self.params, cache, stacked(plans), tokens, self._key, call.stream)
        return call._replace(tokens=new, rows=lambda: np.asarray(new).tolist()), cache


def _prefill(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    key: jax.Array,
    stream: jax.Array,
    *,
    sampling: Sampling,
    implementation: Choice,
) -> tuple[jax.Array, KVCache]:
    """One step, and each row's next token: [B]. `stream` [B] says whose keys, made of `key` [1], the rows use."""
    step = plan.unpack()
    logits, cache = prefill(params, cache, step, tokens, implementation=implementation)
    last = step.seq_start + step.seq_count - np.int32(1)
    return sample(logits, sampling, keys_of(key[0], stream), jnp.maximum(last, 0)), cache


def _decode(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    key: jax.Array,
    stream: jax.Array,
    *,
    steps: int,
    sampling: Sampling,
    implementation: Choice,
) -> tuple[jax.Array, KVCache]:
    """K decode steps, which begin with the last of `tokens` [B, K]: [B, K] tokens."""
    new, cache = decode_loop(
        params,
        cache,
        plan,
        tokens[:, -1],
        steps,
        sampling=sampling,
        keys=keys_of(key[0], stream),
        implementation=implementation,
    )
    return new.T, cache
