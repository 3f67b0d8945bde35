"""The capacity planner: memory, concurrent requests and context per request; two give the third. Imports no jax.

With R request slots, P snapshot slots, B blocks and block tables X columns wide, a cache takes

    total = (R + P + 1) * (slot_bytes + 4 X) + (B + 1) * block_bytes

bytes, the null slot and the null block included: exactly what `init_cache` allocates. If every
request may reach the whole context at once, B = R * X and X = blocks_for(context).

Along a pool axis of n ranks that is what each of them takes, with B of its own: B = R * ceil(X / n).

A prefix hit needs blocks and a snapshot, so what is cached is split by bytes: snapshots take a share F of those of
blocks and snapshots together, P = ceil(F / (1 - F) * B * block_bytes / slot_bytes), at least one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
import os
from collections.abc import Callable
from typing import Any, Literal

from .checks import INT32_MAX, check_integer, shown
from .errors import CapacityError, LayoutError
from .layout import CacheLayout, CacheSize, check_layout
from .records import block_record, page_bytes, state_pages

__all__ = [
    "SNAPSHOT_FRACTION",
    "Capacity",
    "Limit",
    "capacity",
    "device_limit",
    "largest_fitting",
    "machine_bytes",
    "plan_capacity",
    "plan_host_capacity",
    "snapshots_beside",
]

SNAPSHOT_FRACTION = 0.2  # of the bytes of blocks and snapshots: the best of 0.12 .. 0.4 on a trace of conversations
Limit = Literal["blocks", "slots", "context", "none"]
_TABLE_ENTRY_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Capacity:
    """A sized cache and what it can hold.

    Attributes:
        layout: what is stored.
        size: how much of it; `init_cache(layout, size)` allocates `total_bytes`.
        hbm_bytes: the memory given, None if it was the question.
        weight_bytes: what the weights take of it.
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
    weight_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.layout.total_bytes(self.size)

    @property
    def leftover_bytes(self) -> int | None:
        """Returns the bytes of the given memory that weights and cache do not take."""
        return None if self.hbm_bytes is None else self.hbm_bytes - self.weight_bytes - self.total_bytes

    @property
    def bytes_by_pool(self) -> dict[str, int]:
        """Bytes of every pool, null units included; they add up to `total_bytes`."""
        pools: dict[str, int] = {}
        for leaf in self.layout.leaves:
            pools[leaf.pool] = pools.get(leaf.pool, 0) + self.layout.leaf_bytes(leaf, self.size)
        return pools

    @property
    def total_tokens(self) -> int:
        """Tokens of all requests together that the blocks hold, of all pool ranks."""
        return self.size.total_blocks * self.layout.block_tokens

    @property
    def full_requests(self) -> int:
        """Requests that can be at `max_context` at the same time."""
        return min(self.max_requests, self.size.num_blocks // self._blocks_of_one)

    @property
    def full_request_bytes(self) -> int:
        """What a request at `max_context` occupies, on each pool rank."""
        return self.layout.bytes_per_slot + self._blocks_of_one * self.layout.bytes_per_block

    @property
    def _blocks_of_one(self) -> int:
        return -(-self.layout.blocks_for(self.max_context) // self.size.pool_ranks)

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields and what follows from them, ready for JSON."""
        layout = self.layout
        return {
            "kv_format": layout.kv_row.name,
            "index_format": layout.index_row.name,
            "block_tokens": layout.block_tokens,
            "draft_tokens": layout.draft_tokens,
            "hca_state": layout.hca_state,
            "hbm_bytes": self.hbm_bytes,
            "weight_bytes": self.weight_bytes,
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
            "bytes_per_full_request": self.full_request_bytes,
            "size": dataclasses.asdict(self.size),
        }


def plan_capacity(
    layout: CacheLayout,
    *,
    hbm_bytes: int | None = None,
    max_requests: int | None = None,
    max_context: int | None = None,
    num_snapshots: int | None = None,
    snapshot_fraction: float | None = None,
    weight_bytes: int = 0,
    pool_ranks: int = 1,
    states: Literal["slots", "blocks"] = "slots",
) -> CacheSize:
    """Returns how large a cache can be allocated. Arguments and errors are those of `capacity`."""
    return capacity(
        layout,
        hbm_bytes=hbm_bytes,
        max_requests=max_requests,
        max_context=max_context,
        num_snapshots=num_snapshots,
        snapshot_fraction=snapshot_fraction,
        weight_bytes=weight_bytes,
        pool_ranks=pool_ranks,
        states=states,
    ).size


def plan_host_capacity(layout: CacheLayout, host_bytes: int) -> int:
    """Returns how many pages so many bytes of a host tier hold, the null page included: what `HostSize` and
    `init_host_cache` are given.

    Raises:
        CapacityError: no count of bytes, too few for one block and one snapshot, or more than pages have int32 ids for.
    """
    memory, page = check_integer("host_bytes", host_bytes, 1, error=CapacityError), page_bytes(layout)
    least = 1 + bool(block_record(layout).bytes) + state_pages(layout, 0)
    if memory < least * page:
        raise CapacityError(f"host_bytes: {memory} bytes are too few: a block and a snapshot take {least * page}")
    if memory // page - 1 > INT32_MAX:
        most = (INT32_MAX + 1) * page
        raise CapacityError(f"host_bytes: page ids are int32 and reach {INT32_MAX}: {most} bytes, got {memory}")
    return memory // page - 1


def capacity(
    layout: CacheLayout,
    *,
    hbm_bytes: int | None = None,
    max_requests: int | None = None,
    max_context: int | None = None,
    num_snapshots: int | None = None,
    snapshot_fraction: float | None = None,
    weight_bytes: int = 0,
    pool_ranks: int = 1,
    states: Literal["slots", "blocks"] = "slots",
) -> Capacity:
    """Finds the one of memory, requests and context that is not given.

    * requests and context: the memory they take when all requests reach the context at once.
    * memory and requests: the longest context that all of them can reach at once, in whole blocks.
    * memory and context: the most requests that can reach it at once.
    * all three: slots for all the requests and tables for the context; what memory remains becomes
      blocks and their snapshots. Without snapshots, no more than the requests could use; with them all of it, for
      prefixes that stay cached. At least one request can then reach the context, `full_requests` of them at once;
      the manager reports when blocks run out.

    Args:
        layout: what is stored.
        hbm_bytes: memory of a device for cache and weights (activations come on top).
        max_requests: concurrent requests, of a data shard if there are several devices.
        max_context: tokens of one request, prompt and output together.
        num_snapshots: extra slots for state snapshots; 0 where no prefixes are cached.
        snapshot_fraction: instead of their number, their share of the bytes of blocks and snapshots together, in
            [0, 1); default, if neither is given: `SNAPSHOT_FRACTION`. Of a share above 0 there is at least one.
        weight_bytes: what the weights take of `hbm_bytes`: `model.device_bytes`, of each device of a split.
        pool_ranks: devices that share each request's blocks (`CacheSize.pool_ranks`), each with `hbm_bytes`.
        states: where snapshots lie, as `CachePolicy.states` has it: for those in "blocks" nothing is set aside.

    Raises:
        CapacityError: fewer than two are given, a value is impossible, the context is beyond the
            model's, the memory is too small (the message says how much is needed), or the cache would
            have more rows than int32 has numbers (see `CacheLayout.check_size`).
        LayoutError: `layout` is none.
    """
    check_layout(layout)
    weights, left = check_integer("weight_bytes", weight_bytes, 0, error=CapacityError), hbm_bytes
    if hbm_bytes is not None and weights:
        left = check_integer("hbm_bytes", hbm_bytes, 1, error=CapacityError) - weights
        if left <= 0:
            raise CapacityError(f"hbm_bytes: {hbm_bytes} bytes are too few: weights take {weights}")
    try:
        if states not in ("slots", "blocks"):
            raise CapacityError(f'states must be "slots" or "blocks", got {shown(states)}')
        in_blocks = states == "blocks"
        if in_blocks and not num_snapshots and not snapshot_fraction:
            num_snapshots, snapshot_fraction = 0, None
        snapshots = _snapshots(layout, num_snapshots, snapshot_fraction)
        ranks = check_integer("pool_ranks", pool_ranks, 1, error=CapacityError)
        answer = _answer(layout, left, max_requests, max_context, snapshots, ranks, in_blocks)
        layout.check_size(answer.size)
    except LayoutError as error:
        raise CapacityError(f"too large a cache: {error}") from error
    whole = None if answer.hbm_bytes is None else answer.hbm_bytes + weights
    return dataclasses.replace(answer, hbm_bytes=whole, weight_bytes=weights)


def _answer(
    layout: CacheLayout,
    hbm_bytes: int | None,
    max_requests: int | None,
    max_context: int | None,
    snapshots: Callable[[int], int],
    ranks: int,
    in_blocks: bool,
) -> Capacity:
    """`snapshots`: how many for so many blocks of a rank; `in_blocks`: whether they lie in blocks."""
    given = {"hbm_bytes": hbm_bytes, "max_requests": max_requests, "max_context": max_context}
    known = {
        name: check_integer(name, value, 1, error=CapacityError) for name, value in given.items() if value is not None
    }
    if len(known) < 2:
        missing = ", ".join(name for name in given if name not in known)
        raise CapacityError(f"give at least two of hbm_bytes, max_requests and max_context (missing: {missing})")
    model_limit = layout.cfg.max_position_embeddings
    context, requests, memory = (known.get(name) for name in ("max_context", "max_requests", "hbm_bytes"))
    if context is not None and context > model_limit:
        raise CapacityError(f"max_context: {context} tokens exceed the model's {model_limit}")

    def size_of(blocks: int, requests: int, columns: int) -> CacheSize:
        return CacheSize(blocks, requests, columns, snapshots(blocks), ranks)

    def shares(columns: int) -> int:
        """Returns the largest number of these blocks that one rank has."""
        return -(-columns // ranks)

    def fits(blocks: int, requests: int, columns: int) -> bool:
        """Does not go by way of a `CacheSize`: that has no more units than int32 has numbers."""
        slot = layout.bytes_per_slot + columns * _TABLE_ENTRY_BYTES
        return (requests + snapshots(blocks) + 1) * slot + (blocks + 1) * layout.bytes_per_block <= (memory or 0)

    def numbered(blocks: int, requests: int, columns: int) -> bool:
        """Whether all rows have int32 ids."""
        try:
            layout.check_size(size_of(blocks, requests, columns))
        except LayoutError:
            return False
        return True

    if requests is None:
        assert memory is not None and context is not None
        columns = layout.blocks_for(context)
        each = shares(columns)
        requests = largest_fitting(lambda count: fits(each * count, count, columns), memory // layout.bytes_per_slot)
        if not requests:
            raise _too_small(layout, memory, size_of(each, 1, columns), context)
        size = size_of(each * requests, requests, columns)
        return Capacity(layout, size, memory, requests, context, _larger_part(layout, size))
    if context is None:
        assert memory is not None
        widest = layout.blocks_for(model_limit)
        columns = largest_fitting(lambda count: fits(shares(count) * requests, requests, count), widest)
        if not columns:
            raise _too_small(layout, memory, size_of(requests, requests, 1), min(layout.block_tokens, model_limit))
        size = size_of(shares(columns) * requests, requests, columns)
        capped = columns == widest
        context = model_limit if capped else columns * layout.block_tokens
        return Capacity(layout, size, memory, requests, context, "context" if capped else _larger_part(layout, size))
    columns = layout.blocks_for(context)
    each = shares(columns)
    size = size_of(each * requests, requests, columns)
    if memory is None:
        return Capacity(layout, size, memory, requests, context, "none")
    if layout.total_bytes(size) <= memory:
        if (size.num_snapshots or in_blocks) and layout.bytes_per_block:
            blocks = largest_fitting(
                lambda count: fits(count, requests, columns) and numbered(count, requests, columns),
                memory // layout.bytes_per_block,
            )
            size = size_of(max(blocks, size.num_blocks), requests, columns)
        return Capacity(layout, size, memory, requests, context, "none")
    # Not all requests reach the context at once: the fewest blocks let one of them.
    blocks = largest_fitting(lambda count: fits(count, requests, columns), size.num_blocks)
    if blocks < each:
        raise _too_small(layout, memory, size_of(each, requests, columns), context)
    size = size_of(blocks, requests, columns)
    return Capacity(layout, size, memory, requests, context, _larger_part(layout, size))


def _snapshots(layout: CacheLayout, count: int | None, fraction: float | None) -> Callable[[int], int]:
    """Returns how many snapshots go with so many blocks."""
    if count is not None and fraction is not None:
        raise CapacityError("give either num_snapshots or snapshot_fraction")
    if count is not None:
        fixed = check_integer("num_snapshots", count, 0, error=CapacityError)
        return lambda blocks: fixed
    share = _fraction(fraction)
    return lambda blocks: snapshots_beside(share, blocks * layout.bytes_per_block, layout.bytes_per_slot)


def snapshots_beside(fraction: float, block_bytes: int, snapshot_bytes: int) -> int:
    """Snapshots that take this share of their bytes and those of the blocks."""
    return max(math.ceil(fraction / (1 - fraction) * block_bytes / snapshot_bytes), 1) if fraction else 0


def largest_fitting(fits: Callable[[int], bool], high: int) -> int:
    """Returns the largest count of 0..high that fits, if those below one that fits do too; 0 need not."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _larger_part(layout: CacheLayout, size: CacheSize) -> Limit:
    """Returns the largest parts of a cache: where to save."""
    blocks = size.block_units * layout.bytes_per_block
    return "blocks" if 2 * blocks >= layout.total_bytes(size) else "slots"


def _too_small(layout: CacheLayout, memory: int, size: CacheSize, context: int) -> CapacityError:
    needed = layout.total_bytes(size)
    full = size.num_blocks // -(-size.max_blocks_per_request // size.pool_ranks)
    return CapacityError(
        f"hbm_bytes: {memory} bytes are too few: {size.num_slots} request(s), {full} at {context} tokens at once, take "
        f"{needed} ({size.slot_units} slots of {layout.bytes_per_slot} bytes and {size.block_units} blocks of "
        f"{layout.bytes_per_block}, null units included): {needed - memory} bytes are missing"
    )


def _fraction(value: object) -> float:
    if value is None:
        return SNAPSHOT_FRACTION
    share = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy's included
        with contextlib.suppress(OverflowError):
            share = float(value)
    if not 0 <= share < 1:
        raise CapacityError(f"snapshot_fraction must be a number in [0, 1), got {shown(value)}")
    return share


def machine_bytes() -> int:
    """Returns the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_limit() -> int:
    """Returns the bytes that jax may use of a device; those of the machine if the device does not say."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit") or machine_bytes()
