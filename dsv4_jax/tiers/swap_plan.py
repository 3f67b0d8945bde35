"""`plan_swap`: which units travel to or from which records. All mistakes are found here. Imports no jax."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..errors import SwapPlanError
from ..plan import SwapPlan

__all__ = ["Direction", "plan_swap"]

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
    """The plan that moves device unit `device_ids[i]` to ("out") or from ("in") host record `host_ids[i]`.

    Args:
        direction: "out" (device to host) or "in".
        device_ids: blocks, or slots for snapshots, in 1..num_device.
        host_ids: as many records, in 1..num_host. Sources may repeat (one record can fill several
            blocks), destinations may not.
        num_device: usable units, the null unit not counted (`CacheSize.num_blocks`, ...).
        num_host: usable records (`HostCache.num_blocks` or `.num_snapshots`).
        length: static length of the plan; default: the next power of two, and 0 for no ids.

    Returns:
        The plan, padded with null ids. Without ids it moves nothing.

    Raises:
        SwapPlanError: names the side, the index, the value and the range of the first id that is
            not an integer, null, out of range or a repeated destination; unequal or too many ids.
    """
    if direction not in ("out", "in"):
        raise SwapPlanError(f"direction must be 'out' or 'in', got {direction!r}")
    device = _checked("device", device_ids, num_device)
    host = _checked("host", host_ids, num_host)
    if len(device) != len(host):
        raise SwapPlanError(f"{len(device)} device ids for {len(host)} host ids")
    side, written = ("host", host) if direction == "out" else ("device", device)
    first: dict[int, int] = {}
    for i, value in enumerate(written):
        if first.setdefault(value, i) != i:
            raise SwapPlanError("is written twice, first at index " + str(first[value]), side, i, value)
    if length is None:
        length = 1 << (len(device) - 1).bit_length() if device else 0
    if len(device) > length:
        raise SwapPlanError(f"{len(device)} ids do not fit a plan of length {length}")
    plan = SwapPlan(np.zeros(length, np.int32), np.zeros(length, np.int32))
    plan.device_ids[: len(device)] = device
    plan.host_ids[: len(host)] = host
    return plan


def _checked(side: str, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
    out = []
    for i, value in enumerate(ids):
        try:
            out.append(operator.index(value))
        except TypeError:
            raise SwapPlanError("is not an integer", side, i, value) from None
        if isinstance(value, bool | np.bool_):
            raise SwapPlanError("is not an integer", side, i, value)
        if out[-1] == 0:
            raise SwapPlanError(f"is the null id (valid ids are 1..{limit})", side, i, 0)
        if not 1 <= out[-1] <= limit:
            raise SwapPlanError(f"is out of range (valid ids are 1..{limit})", side, i, out[-1])
    return out
