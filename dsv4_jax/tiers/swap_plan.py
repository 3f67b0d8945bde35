"""`plan_swap`, `plan_state_swap`, `own_swaps`: which units travel to or from which records. Mistakes are found here.

Imports no jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..checks import INT32_MAX, check_integer
from ..errors import PlanError
from ..layout import CacheLayout
from ..plan import OwnSwapPlan, StateSwapPlan, SwapPlan, own_ids
from ..records import state_pages

__all__ = ["own_swaps", "plan_state_swap", "plan_swap"]

Direction = Literal["out", "in"]


def plan_swap(
    direction: Direction,
    device_ids: Sequence[int] | np.ndarray,
    host_ids: Sequence[int] | np.ndarray,
    *,
    num_device: int,
    num_host: int,
    length: int | None = None,
) -> SwapPlan:
    """The plan that moves block `device_ids[i]` to ("out") or from ("in") host page `host_ids[i]`.

    Args:
        direction: "out" (device to host) or "in".
        device_ids: blocks, in 1..num_device.
        host_ids: as many pages, in 1..num_host. Sources may repeat (one page can fill several blocks), destinations
            may not.
        num_device: usable units, the null unit not counted (`CacheSize.num_blocks`, ...).
        num_host: usable pages (`HostCache.num_pages`).
        length: static length of the plan; default: the next power of two, and 0 for no ids.

    Returns:
        The plan, padded with null ids. Without ids it moves nothing.

    Raises:
        PlanError: names the side, the index, the value and the range of the first id that is
            not an integer, null, out of range or a repeated destination; unequal or too many ids; no length.
    """
    device = _checked("device", device_ids, num_device)
    host = _checked("host", host_ids, num_host)
    if len(device) != len(host):
        raise PlanError(f"{len(device)} device ids for {len(host)} host ids")
    _check_destinations(direction, device, host)
    length = _length(len(device), length)
    plan = SwapPlan(np.zeros(length, np.int32), np.zeros(length, np.int32))
    plan.device_ids[: len(device)] = device
    plan.host_ids[: len(host)] = host
    return plan


def plan_state_swap(
    direction: Direction,
    layout: CacheLayout,
    device_ids: Sequence[int] | np.ndarray,
    host_ids: Sequence[int | Sequence[int]] | np.ndarray,
    num_tokens: Sequence[int] | np.ndarray,
    *,
    num_device: int,
    num_host: int,
    length: int | None = None,
) -> StateSwapPlan:
    """The plan that moves the state in slot `device_ids[i]` to ("out") or from ("in") host pages `host_ids[i]`.

    Args:
        direction: "out" (device to host) or "in".
        layout: of the cache.
        device_ids: slots, in 1..num_device.
        host_ids: for each as many host pages as its state takes (`dsv4_jax.records.state_pages`), in 1..num_host, in
            the order of its bytes; a number stands for one.
        num_tokens: of each request, at that state. Rows lie by position, so a wrong number moves other rows.
        num_device, num_host, length: as for `plan_swap`.

    Raises:
        PlanError: as `plan_swap`; a number of tokens is none, or another number of records.
    """
    device = _checked("device", device_ids, num_device)
    tokens = [
        check_integer(f"num_tokens[{i}]", value, 0, INT32_MAX, error=PlanError) for i, value in enumerate(num_tokens)
    ]
    states: Any = host_ids
    given = [[ids] if np.ndim(ids) == 0 else list(ids) for ids in states]
    host = _checked("host", [value for ids in given for value in ids], num_host)
    if not len(device) == len(given) == len(tokens):
        raise PlanError(f"{len(device)} device ids for {len(given)} states of {len(tokens)} token counts")
    for i, count in enumerate(tokens):
        if len(given[i]) != state_pages(layout, count):
            raise PlanError(
                f"the state of {count} tokens takes {state_pages(layout, count)} host pages, got {len(given[i])}"
            )
    _check_destinations(direction, device, host)
    length = _length(len(device), length)
    width = max(map(len, given), default=1)
    plan = StateSwapPlan(np.zeros(length, np.int32), np.zeros((length, width), np.int32), np.zeros(length, np.int32))
    plan.device_ids[: len(device)], plan.num_tokens[: len(tokens)] = device, tokens
    for row, ids in zip(plan.host_ids, given, strict=False):
        row[: len(ids)] = ids
    return plan


def own_swaps(plan: SwapPlan, ranks: int) -> OwnSwapPlan:
    """Returns a plan of all pool ranks' blocks, dealt out: for `overlapped_swap` along a pool axis.

    Args:
        plan: as from `plan_swap`.
        ranks: of the pool axis (`CacheSize.pool_ranks`).

    Returns:
        Each rank's pairs in its own ids, padded to a power of two, the same for all ranks.

    Raises:
        PlanError: a block and its page are of two ranks.
    """
    device, host = (np.asarray(ids) for ids in plan)
    pairs = np.flatnonzero((device > 0) & (host > 0))
    (rank, blocks), (of_page, pages) = (own_ids(ids[pairs], ranks) for ids in (device, host))
    for i, block, here, page, there in zip(pairs, device[pairs], rank, host[pairs], of_page, strict=True):
        if here != there:
            raise PlanError(f"device_ids[{i}]: block {block} is of rank {here}, page {page} of rank {there}")
    length = _length(int(np.bincount(rank, minlength=1).max()), None)
    dealt = OwnSwapPlan(*np.zeros((2, ranks, length), np.int32))
    for r in range(ranks):
        mine = rank == r
        dealt.device_ids[r, : mine.sum()], dealt.host_ids[r, : mine.sum()] = blocks[mine], pages[mine]
    return OwnSwapPlan(*(ids.reshape(-1) for ids in dealt))


def _check_destinations(direction: Direction, device: list[int], host: list[int]) -> None:
    """Raises `PlanError` if one is written twice, or for another direction."""
    if direction not in ("out", "in"):
        raise PlanError(f"direction must be 'out' or 'in', got {direction!r}")
    side, written = ("host", host) if direction == "out" else ("device", device)
    first: dict[int, int] = {}
    for i, value in enumerate(written):
        if first.setdefault(value, i) != i:
            raise PlanError(f"{side}_ids[{i}]: {value} is written twice, first at index {first[value]}")


def _length(count: int, length: int | None) -> int:
    """Returns the static length of a plan of so many ids. Raises `PlanError` if it is none, or too short."""
    if length is None:
        return 1 << (count - 1).bit_length() if count else 0
    static = check_integer("length", length, 0, INT32_MAX, error=PlanError)
    if count > static:
        raise PlanError(f"{count} ids do not fit a plan of length {length}")
    return static


def _checked(side: str, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
    return [check_integer(f"{side}_ids[{i}]", value, 1, limit, error=PlanError) for i, value in enumerate(ids)]
