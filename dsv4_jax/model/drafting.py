"""Steps with drafts between a manager and the device: what `generate(drafts=)` runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache
from ..errors import PlanError
from ..manager import KVCacheManager, Request, StepShape
from ..ops.registry import Choice
from ..plan import PackedPlan
from .forward import GPU_DECODE_OPTIONS
from .mtp import draft_step
from .params import Params, has_mtp
from .sampling import Sampling, keys_of

__all__ = ["Drafter"]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Drafts of up to `width` tokens for each request that decodes. Raises `PlanError` if they are not possible.

    Attributes:
        params: with the MTP layer.
        width: at least 1.
        sampling, key: how to draw, and the key that those of the requests are made of.
        implementation: of the cache ops.
    """

    params: Params
    manager: KVCacheManager
    width: int
    sampling: Sampling
    key: jax.Array
    implementation: Choice = None

    def __post_init__(self) -> None:
        layout, width = self.manager.layout, self.width
        if not has_mtp(self.params):
            raise PlanError(f"drafts={width}: the parameters have no MTP layer, load them with mtp=True")
        if not layout.include_mtp or layout.draft_tokens < width:
            has = f"include_mtp={layout.include_mtp} and draft_tokens={layout.draft_tokens}"
            raise PlanError(f"drafts={width}: the layout has {has}")

    def budget(self, tokens: int, requests: Sequence[Request]) -> int:
        """How many tokens to schedule of a step of so many, for its drafts to have room beside them."""
        return tokens - self.width * sum(map(_decodes, requests))

    def run(
        self,
        cache: KVCache,
        scheduled: Sequence[tuple[Request, int]],
        shape: StepShape,
        limits: Sequence[int],
        streams: np.ndarray,
    ) -> tuple[list[list[int]], KVCache]:
        """One step: (the tokens newly drawn for each request, none where its prompt goes on; the cache).

        The requests' own `tokens` lack them still.

        Args:
            scheduled: as `schedule` gave it, within `budget`.
            shape: of the plan; the room for its table entries is made wider, for those of drafts.
            limits: the most tokens to draw, at least 1, for each.
            streams: [B] int32, whose keys the rows draw with.
        """
        pairs = zip(scheduled, limits, strict=True)
        wanted = [min(self.width, most - 1) if _decodes(request) else 0 for (request, _), most in pairs]
        tokens, drafts, at = np.zeros(shape.tokens, np.int32), np.zeros(shape.sequences, np.int32), 0
        pairs = [(request, count + more) for (request, count), more in zip(scheduled, wanted, strict=True)]
        for (request, known), (_, count) in zip(scheduled, pairs, strict=True):
            tokens[at : at + known] = request.tokens[request.num_cached : request.num_cached + known]
            at += count
        drafts[: len(wanted)] = wanted
        rows = shape.sequences * (1 + self.width // self.manager.layout.block_tokens)
        wider = dataclasses.replace(shape, table_entries=shape.table_entries + rows)
        plan = self.manager.plan_step(pairs, shape=wider).pack()
        step = _mixed if shape.history else _decode
        drawn, cache = step(
            self.params, cache, plan, tokens, drafts, self.key, streams, self.width, self.sampling, self.implementation
        )
        fresh = []
        for (request, _), more, (kept, *row) in zip(scheduled, wanted, np.asarray(drawn).tolist(), strict=False):
            if more:
                self.manager.accept(request, kept)
            fresh.append([] if request.num_pending else row[:kept])
        return fresh, cache


def _decodes(request: Request) -> bool:
    """The end of a prompt gets no drafts, one token or many: how it is cut must not matter for what is drawn."""
    return request.num_cached >= request.num_prompt


def _step(
    params: Params, cache: KVCache, plan: PackedPlan, tokens: jax.Array, drafts: jax.Array, key: jax.Array,
    stream: jax.Array, width: int, sampling: Sampling, implementation: Choice,
) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """[B, 1 + width + 1] int32: how many tokens each sequence keeps, and these: one array to wait for."""
    keys = keys_of(key, stream)
    drawn, kept, cache = draft_step(
        params, cache, plan, tokens, drafts, width, sampling=sampling, keys=keys, implementation=implementation
    )
    return jnp.concatenate([kept[:, None], drawn], 1), cache


_compiled = functools.partial(
    jax.jit, _step, static_argnames=("width", "sampling", "implementation"), donate_argnames="cache"
)
_mixed, _decode = _compiled(), _compiled(compiler_options=GPU_DECODE_OPTIONS)
