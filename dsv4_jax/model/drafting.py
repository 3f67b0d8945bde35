"""Steps with drafts between managers and the devices: what `generate(drafts=)` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache
from ..errors import PlanError
from ..manager import Request, StepShape
from ..ops.registry import Choice
from ..plan import PackedPlan
from .compiled_steps import CompiledSteps, stacked
from .draft_steps import draft_loop, draft_step
from .forward import GPU_DECODE_OPTIONS
from .sampling import Sampling, keys_of
from .shards import Shards
from .weights.params import Params, has_mtp

__all__ = ["Drafter"]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Drafts of up to `width` tokens for each request that decodes. Raises `PlanError` if they are not possible.

    Attributes:
        params: with the MTP layer.
        width: at least 1.
        key: [shards], that those of the requests are made of, over the placement.
        options: `sampling` and `implementation` of the steps.
    """

    params: Params
    shards: Shards
    placement: CompiledSteps
    width: int
    key: jax.Array
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        layout, width = self.shards.managers[0].layout, self.width
        if not has_mtp(self.params):
            raise PlanError(f"drafts={width}: the parameters have no MTP layer, load them with mtp=True")
        if not layout.include_mtp or layout.draft_tokens < width:
            has = f"include_mtp={layout.include_mtp} and draft_tokens={layout.draft_tokens}"
            raise PlanError(f"drafts={width}: the layout has {has}")

    def fits(self, requests: Sequence[Request], steps: int) -> bool:
        """Whether these can run a loop of so many steps: they all decode, and have room for all drafts."""
        most = steps * (1 + self.width)
        return all(_decodes(request) and request.num_cached + most <= request.max_tokens for request in requests)

    def budget(self, tokens: int, requests: Sequence[Request]) -> int:
        """How many tokens to schedule of a step of so many, for its drafts to have room beside them."""
        return tokens - self.width * sum(map(_decodes, requests))

    def run(
        self,
        cache: KVCache,
        scheduled: Sequence[Sequence[tuple[Request, int]]],
        shape: StepShape,
        streams: np.ndarray,
        steps: int = 1,
    ) -> tuple[list[list[int]], KVCache]:
        """One step, or a loop of them: (the tokens newly sampled for each row [shards * B]; the cache).

        The requests' own `tokens` lack them still.

        Args:
            scheduled: as `schedule` gave it for each data shard, within `budget`.
            shape: of each shard's plan; the room for its table entries is made wider, for those of drafts.
            streams: [shards * B] int32, whose keys the rows sample with.
            steps: more than one: every request decodes, and has room for all that they may keep.
        """
        shards = len(scheduled)
        tokens = np.zeros((shards, shape.tokens), np.int32)
        drafts = np.zeros((shards, shape.sequences), np.int32)
        rows = shape.sequences * (1 + self.width // self.shards.managers[0].layout.block_tokens)
        wider, plans = dataclasses.replace(shape, table_entries=shape.table_entries + rows), []
        for manager, pairs, ids, wanted in zip(self.shards.managers, scheduled, tokens, drafts, strict=True):
            at = 0
            for i, (request, known) in enumerate(pairs):
                room = request.max_tokens - request.num_cached - known
                wanted[i] = min(self.width, room) if _decodes(request) else 0
                ids[at : at + known] = request.tokens[request.num_cached : request.num_cached + known]
                at += known + wanted[i]
            with_drafts = [(request, known + int(more)) for (request, known), more in zip(pairs, wanted, strict=False)]
            plans.append(manager.plan_step(with_drafts, steps=steps, shape=wider))
        xla = {} if shape.history else GPU_DECODE_OPTIONS
        step = self.placement.compiled(_step, xla, width=self.width, steps=steps, **self.options)
        if steps > 1:  # the known token of each
            tokens = np.stack([ids[plan.seq_first] for ids, plan in zip(tokens, plans, strict=True)])
        drawn, cache = step(
            self.params, cache, stacked(plans), tokens.reshape(-1), drafts.reshape(-1), self.key, streams
        )
        rows_drawn = [[token for kept, *row in each for token in row[:kept]] for each in np.asarray(drawn).tolist()]
        for shard, (manager, pairs) in enumerate(zip(self.shards.managers, scheduled, strict=True)):
            for i, (request, _) in enumerate(pairs):
                if drafts[shard, i]:
                    manager.accept(request, len(rows_drawn[shard * shape.sequences + i]))
        return rows_drawn, cache


def _decodes(request: Request) -> bool:
    """The end of a prompt gets no drafts, one token or many: how it is cut must not matter for what is sampled."""
    return request.num_cached >= request.num_prompt


def _step(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    drafts: jax.Array,
    key: jax.Array,
    stream: jax.Array,
    *,
    width: int,
    steps: int,
    sampling: Sampling,
    implementation: Choice,
) -> tuple[jax.Array, KVCache]:
    """[B, steps, 1 + width + 1] int32: how many tokens each sequence keeps, and these: one array to wait for."""
    how: dict[str, Any] = dict(sampling=sampling, keys=keys_of(key[0], stream), implementation=implementation)
    if steps > 1:
        drawn, kept, cache = draft_loop(params, cache, plan, tokens, drafts, width, steps, **how)
        return jnp.concatenate([kept[..., None], drawn], -1).swapaxes(0, 1), cache
    drawn, kept, cache = draft_step(params, cache, plan, tokens, drafts, width, **how)
    return jnp.concatenate([kept[:, None], drawn], 1)[:, None], cache
