"""A step function with the one executable that all comparisons share, and requests that run alone in a cold cache.

Rounding may differ between executables, so mixed and lone runs share one: one `StepShape`, one size of arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ..cache import CHECKED, KVCache, init_cache
from ..errors import ShapeError
from ..layout import CacheLayout, CacheSize
from ..manager import KVCacheManager, StepShape
from ..manager.request import Request
from ..plan import StepPlan
from .live import Held, Live, live_bytes

__all__ = ["Cold", "Step", "StepRunner", "with_garbage"]

# (params, cache, plan, tokens [T] int32) -> (logits [T, vocab] float32, cache)
Step: TypeAlias = Callable[[Any, KVCache, Any, Any], tuple[Any, KVCache]]


class Cold(NamedTuple):
    """What a request has that nobody ran beside, from a cache of zeros.

    Attributes:
        logits: [N, vocab] of its tokens.
        live: see `live_bytes`.
    """

    logits: np.ndarray
    live: Live


class StepRunner:
    """A model's step, compiled once for every comparison.

    Args:
        step: `(params, cache, plan, tokens) -> (logits, cache)`: logits [T, vocab] float32 of every token of the plan
            (padding included), as `dsv4.model.forward` gives them. The plan is packed. Pure; it is jitted here, with
            the cache donated.
        params: whatever `step` takes: a pytree of arrays.
        layout: of the caches. Small blocks make comparisons fast: `block_tokens=8` with `hca_ratio=8` in the config.
        size: of the arrays; default: 4 requests of 8 blocks each, 20 blocks in all, and 4 snapshots.
        max_tokens: tokens of one step; default: two blocks.
        vocab_size: tokens that prompts are made of; default: the config's.
        checked: with caches that raise where a plan runs twice or out of order (`init_cache`).

    Attributes:
        shape: of every step.
    """

    def __init__(
        self,
        step: Step,
        params: Any,
        layout: CacheLayout,
        *,
        size: CacheSize | None = None,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        checked: bool = False,
    ):
        def run(params: Any, cache: KVCache, plan: Any, tokens: Any) -> tuple[Any, KVCache]:
            logits, cache = step(params, cache, plan, tokens)
            if logits.ndim != 2 or logits.shape[0] != plan.unpack().num_tokens:
                raise ShapeError(
                    f"the step gives logits {logits.shape}: comparisons need those of every token, "
                    f"({plan.unpack().num_tokens}, vocab)"
                )
            return logits, cache

        self.params, self.layout, self.checked = params, layout, checked
        self.size = size or CacheSize(num_blocks=20, num_slots=4, max_blocks_per_request=8, num_snapshots=4)
        self.vocab_size = layout.cfg.vocab_size if vocab_size is None else vocab_size
        columns, tokens = self.size.max_blocks_per_request, max_tokens or 2 * layout.block_tokens
        shape = StepShape.bound(
            layout, self.size.num_slots, tokens, columns=columns, history=True, slot_copies=8, block_copies=24
        )
        # As `pinned_shape` has it, and one for every row that gets drafts.
        entries = shape.table_entries + columns + self.size.num_slots
        self.shape: StepShape = dataclasses.replace(shape, table_entries=entries)
        # A function of its own: jax.jit shares the executables of one function, wherever it is jitted.
        self._step: Any = jax.jit(run, donate_argnums=1)

    @property
    def executables(self) -> int:
        """Compiled so far; more than one, and equal bits are no longer promised."""
        return self._step._cache_size()

    def empty_cache(self) -> KVCache:
        """Returns zeros, of the runner's size."""
        return init_cache(self.layout, self.size, checked=self.checked)

    def run(self, cache: KVCache, manager: KVCacheManager, plan: StepPlan) -> tuple[np.ndarray, KVCache]:
        """Runs a step of the requests' known tokens: (logits [T, vocab], cache)."""
        logits, cache = self._step(self.params, cache, plan.pack(), manager.plan_tokens(plan))
        return np.asarray(logits), cache

    def alone(self, tokens: Sequence[int], chunks: Sequence[int] | None = None) -> Cold:
        """Returns these tokens with nobody beside them, from an empty cache.

        Args:
            chunks: tokens of each step, their sum that of the tokens; default: as many as a step takes.
        """
        manager, cache, logits = KVCacheManager(self.layout, self.size), self.empty_cache(), []
        request, left = manager.admit_request(list(tokens)), iter(chunks or ())
        while count := min(request.num_pending, self.shape.tokens):
            count = next(left, 0) if chunks else count
            plan = manager.plan_step([(request, count)], shape=self.shape)
            out, cache = self.run(cache, manager, plan)
            logits.append(out[:count])
        return Cold(np.concatenate(logits), self.live(cache, request))

    def live(self, cache: KVCache, request: Request) -> Live:
        """All bytes that the request's next token can see."""
        return live_bytes(cache, Held.of(request))


def with_garbage(cache: KVCache, rng: np.random.Generator) -> KVCache:
    """Returns the same arrays with random bytes, NaNs among them, and random block ids in the table.

    (But for the lengths of a checked cache, of which its next steps would be told that they are wrong.)
    """
    blocks = cache.block_units

    def garbage(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == np.int32:
            data = rng.integers(0, blocks, leaf.shape, dtype=np.int32)
        else:
            data = np.frombuffer(rng.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape)
        return jax.device_put(data, leaf.sharding)

    drawn = {name: x if name in CHECKED else garbage(x) for name, x in sorted(cache.arrays.items())}
    return dataclasses.replace(cache, arrays=cache.arrays | drawn)
