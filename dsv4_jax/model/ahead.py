"""A step's plan at places that the device knows alone: for loops whose steps keep as many drafts as prove right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..layout import CacheLayout
from ..plan import StepPlan

__all__ = ["moved"]


def moved(plan: StepPlan, layout: CacheLayout, start: jax.Array, max_tokens: int) -> StepPlan:
    """The plan with its sequences at other places, as the manager would make it; with no copies or table entries.

    A sequence whose tokens would go beyond what the plan has reserved for it is padding.

    Args:
        start: [B] int32, tokens of each sequence in the cache.
        max_tokens: tokens of a sequence in the step, at most.
    """
    total, first, count = np.int32(plan.num_tokens), jnp.asarray(plan.seq_first), jnp.asarray(plan.seq_count)
    plan = plan.settled().only(start + count <= plan.seq_stop)
    index = jnp.arange(plan.num_tokens, dtype=jnp.int32)
    position = jnp.where(plan.token_slot > 0, (start - first)[plan.token_seq] + index, 0)

    def listed(offset: jax.Array, stop: jax.Array) -> jax.Array:
        """Returns the [B, ...] tokens at these offsets of each sequence; T beyond `stop`."""
        own = first.reshape(-1, *[1] * (offset.ndim - 1)) + offset
        return jnp.where(offset < stop, own, total)

    ratio = layout.flush_ratio
    ends = np.arange(-(-max_tokens // ratio), dtype=np.int32) * np.int32(ratio)
    offset = (np.int32(ratio - 1) - start % np.int32(ratio))[:, None] + ends[None]
    flushes = listed(offset, count[:, None]).reshape(-1)

    ratio = layout.group_ratio
    groups, length = (max_tokens + ratio - 2) // ratio + 1, min(max_tokens, ratio)
    begin = np.arange(groups, dtype=np.int32)[None] * np.int32(ratio) - (start % np.int32(ratio))[:, None]
    offset = jnp.maximum(begin, 0)[..., None] + np.arange(length, dtype=np.int32)[None, None]
    stop = jnp.minimum(begin + np.int32(ratio), count[:, None])
    members = listed(offset, stop[..., None]).reshape(-1, length)
    return plan._replace(seq_start=start, token_position=position, flush_tokens=flushes, group_tokens=members)
