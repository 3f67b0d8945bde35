"""The capacity planner: memory, concurrent requests and context per request; two give the third. Imports no jax.

With R request slots, P snapshot slots, B blocks and block tables X columns wide, a cache takes

    total = (R + P + 1) * (slot_bytes + 4 X) + (B + 1) * block_bytes

bytes, the null slot and the null block included: exactly what `init_cache` allocates. If every
request may reach the whole context at once, B = R * X and X = blocks_for(context).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from .checks import as_int, shown
from .errors import CapacityError, LayoutError
from .layout import CacheLayout, CacheSize

__all__ = ["Capacity", "Limit", "capacity", "plan_capacity"]

Limit = Literal["blocks", "slots", "context", "none"]
_TABLE_ENTRY_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Capacity:
    """A sized cache and what it can hold.

    Attributes:
        layout: what is stored.
        size: how much of it; `init_cache(layout, size)` allocates `total_bytes`.
        hbm_bytes: the memory given, None if it was the question.
        max_requests: requests that can be live at once.
        max_context: tokens that one request can reach.
        limited_by: what stops it from holding more. "blocks" or "slots": the memory is used up,
            and most of it went into blocks (entries and index keys, by token) or slots (windows
            and compressor state, by request). "context": the model's own context limit.
            "none": everything asked for fits.
    """

    layout: CacheLayout
    size: CacheSize
    hbm_bytes: int | None
    max_requests: int
    max_context: int
    limited_by: Limit

    @property
    def total_bytes(self) -> int:
        return self.layout.total_bytes(self.size)

    @property
    def leftover_bytes(self) -> int | None:
        """Of the memory given, what the cache does not take."""
        return None if self.hbm_bytes is None else self.hbm_bytes - self.total_bytes

    @property
    def bytes_by_pool(self) -> dict[str, int]:
        """Bytes of every pool, null units included; they add up to `total_bytes`."""
        pools: dict[str, int] = {}
        for leaf in self.layout.leaves:
            pools[leaf.pool] = pools.get(leaf.pool, 0) + self.layout.leaf_bytes(leaf, self.size)
        return pools

    @property
    def total_tokens(self) -> int:
        """Tokens of all requests together that the blocks hold."""
        return self.size.num_blocks * self.layout.block_tokens

    @property
    def full_requests(self) -> int:
        """Requests that can be at `max_context` at the same time."""
        return min(self.max_requests, self.size.num_blocks // self.layout.blocks_for(self.max_context))

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        layout = self.layout
        return {
            "kv_format": layout.kv_row.name,
            "index_format": layout.index_row.name,
            "block_tokens": layout.block_tokens,
            "draft_tokens": layout.draft_tokens,
            "hca_state": layout.hca_state,
            "hbm_bytes": self.hbm_bytes,
            "max_requests": self.max_requests,
            "max_context": self.max_context,
            "limited_by": self.limited_by,
            "full_requests": self.full_requests,
            "total_tokens": self.total_tokens,
            "total_bytes": self.total_bytes,
            "leftover_bytes": self.leftover_bytes,
            "bytes_by_pool": self.bytes_by_pool,
            "bytes_per_token": layout.bytes_per_token,
            "bytes_per_block": layout.bytes_per_block,
            "bytes_per_slot": layout.bytes_per_slot,
            "bytes_per_full_request": layout.request_bytes(self.max_context),
            "size": dataclasses.asdict(self.size),
        }


def plan_capacity(
    layout: CacheLayout,
    *,
    hbm_bytes: int | None = None,
    max_requests: int | None = None,
    max_context: int | None = None,
    num_snapshots: int = 0,
) -> CacheSize:
    """How large a cache to allocate. Arguments and errors are those of `capacity`."""
    return capacity(
        layout, hbm_bytes=hbm_bytes, max_requests=max_requests, max_context=max_context, num_snapshots=num_snapshots
    ).size


def capacity(
    layout: CacheLayout,
    *,
    hbm_bytes: int | None = None,
    max_requests: int | None = None,
    max_context: int | None = None,
    num_snapshots: int = 0,
) -> Capacity:
    """Finds the one of memory, requests and context that is not given.

    * requests and context: the memory they take when all requests reach the context at once.
    * memory and requests: the longest context that all of them can reach at once, in whole blocks.
    * memory and context: the most requests that can reach it at once.
    * all three: slots for all the requests and tables for the context; what memory remains becomes
      blocks, as far as the requests could use them. At least one request can then reach the
      context, `full_requests` of them at once; the manager reports when blocks run out.

    Args:
        layout: what is stored.
        hbm_bytes: memory for the cache alone (weights and activations come on top).
        max_requests: concurrent requests.
        max_context: tokens of one request, prompt and output together.
        num_snapshots: extra slots for state snapshots.

    Raises:
        CapacityError: fewer than two are given, a value is impossible, the context is beyond the
            model's, the memory is too small (the message says how much is needed), or the cache would
            have more rows than int32 has numbers (see `CacheLayout.check_size`).
    """
    try:
        answer = _answer(layout, hbm_bytes, max_requests, max_context, num_snapshots)
        layout.check_size(answer.size)
    except LayoutError as error:
        raise CapacityError(f"too large a cache: {error}") from error
    return answer


def _answer(
    layout: CacheLayout,
    hbm_bytes: int | None,
    max_requests: int | None,
    max_context: int | None,
    num_snapshots: int,
) -> Capacity:
    snapshots = _count("num_snapshots", num_snapshots, 0)
    given = {"hbm_bytes": hbm_bytes, "max_requests": max_requests, "max_context": max_context}
    known = {name: _count(name, value, 1) for name, value in given.items() if value is not None}
    if len(known) < 2:
        missing = ", ".join(name for name in given if name not in known)
        raise CapacityError(f"give at least two of hbm_bytes, max_requests and max_context (missing: {missing})")
    model_limit = layout.cfg.max_position_embeddings
    context, requests, memory = (known.get(name) for name in ("max_context", "max_requests", "hbm_bytes"))
    if context is not None and context > model_limit:
        raise CapacityError(f"max_context: {context} tokens exceed the model's {model_limit}")
    slot, block, null = layout.bytes_per_slot, layout.bytes_per_block, 1

    if requests is None:
        assert memory is not None and context is not None
        columns = layout.blocks_for(context)
        table = columns * _TABLE_ENTRY_BYTES
        fixed = (snapshots + null) * (slot + table) + null * block
        requests = (memory - fixed) // (slot + table + columns * block)
        if requests < 1:
            raise _too_small(layout, memory, CacheSize(columns, 1, columns, snapshots), context)
        size = CacheSize(columns * requests, requests, columns, snapshots)
        return Capacity(layout, size, memory, requests, context, _larger_part(layout, size))
    slots = requests + snapshots + null
    if context is None:
        assert memory is not None
        per_column = requests * block + slots * _TABLE_ENTRY_BYTES
        columns = (memory - slots * slot - null * block) // per_column
        if columns < 1:
            size = CacheSize(requests, requests, 1, snapshots)
            raise _too_small(layout, memory, size, min(layout.block_tokens, model_limit))
        capped = columns >= layout.blocks_for(model_limit)
        columns = layout.blocks_for(model_limit) if capped else columns
        size = CacheSize(columns * requests, requests, columns, snapshots)
        context = model_limit if capped else columns * layout.block_tokens
        return Capacity(layout, size, memory, requests, context, "context" if capped else _larger_part(layout, size))
    columns = layout.blocks_for(context)
    size = CacheSize(columns * requests, requests, columns, snapshots)
    if memory is None or layout.total_bytes(size) <= memory:
        return Capacity(layout, size, memory, requests, context, "none")
    # Not all requests reach the context at once: the fewest blocks let one of them.
    least = dataclasses.replace(size, num_blocks=columns)
    spare = memory - layout.total_bytes(least)
    if spare < 0:
        raise _too_small(layout, memory, least, context)
    size = dataclasses.replace(size, num_blocks=columns + spare // block)
    return Capacity(layout, size, memory, requests, context, _larger_part(layout, size))


def _larger_part(layout: CacheLayout, size: CacheSize) -> Limit:
    """The largest parts of a cache: where to save."""
    blocks = size.block_units * layout.bytes_per_block
    return "blocks" if 2 * blocks >= layout.total_bytes(size) else "slots"


def _too_small(layout: CacheLayout, memory: int, size: CacheSize, context: int) -> CapacityError:
    needed = layout.total_bytes(size)
    full = size.num_blocks // size.max_blocks_per_request
    return CapacityError(
        f"hbm_bytes: {memory} bytes are too few: {size.num_slots} request(s), {full} at {context} tokens at once, take "
        f"{needed} ({size.slot_units} slots of {layout.bytes_per_slot} bytes and {size.block_units} blocks of "
        f"{layout.bytes_per_block}, null units included): {needed - memory} bytes are missing"
    )


def _count(name: str, value: object, least: int) -> int:
    number = as_int(value)
    if number is None or number < least:
        raise CapacityError(f"{name} must be an integer >= {least}, got {shown(value)}")
    if number >= 2**63:
        raise CapacityError(f"{name} must be below 2^63, got {shown(value)}")
    return number
