"""In which order and on which streams the calls of a group run (`sequence`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .grouping import CallNode

__all__ = ["MAX_LANES", "CallPlace", "places", "waits_of"]

MAX_LANES = 4  # lanes: `kLanes` of csrc/fusion/sequence.h


@dataclasses.dataclass(frozen=True)
class CallPlace:
    """When and where a call runs.

    Attributes:
        lane: its stream; calls of a lane run in order. The first is XLA's.
        early: whether it may start before what it waits for has ended: 1 behind the one before it on its lane, 2
            behind the one that it waits for.
        awaited: whether calls of other lanes wait for it: 1 for its end, 2 to start early behind it, 3 both.
        waits: calls of other lanes that it waits for.
    """

    lane: int
    early: int
    awaited: int
    waits: tuple[int, ...]


def waits_of(nodes: Sequence[CallNode]) -> list[set[int]]:
    """Returns for each call of a group those it comes after: it reads what they make, or overwrites what they read."""
    found = []
    for i, node in enumerate(nodes):
        made = {id(out): k for k, other in enumerate(nodes[:i]) for out in other.eqn.outvars}
        waits = {made[id(r)] for r in node.reads if id(r) in made}
        for v in node.overwrites:
            waits |= {k for k, other in enumerate(nodes[:i]) if any(v is r for r in other.reads)}
        found.append(waits)
    return found


def places(nodes: Sequence[CallNode], early: frozenset[str]) -> list[CallPlace]:
    """Returns when and where each call of a group runs; the calls are given in an order in which they can run.

    The longest chain of calls has the first lane. Of those that wait for a call the one with the longest chain behind
    it goes on in its lane, and the others get lanes of their own.
    """
    waits = waits_of(nodes)
    before: list[set[int]] = []  # all that must have ended
    for each in waits:
        before.append(set().union(each, *(before[k] for k in each)))
    direct = [{k for k in each if not any(k in before[other] for other in each)} for each in waits]
    height = [1] * len(nodes)
    for i in reversed(range(len(nodes))):
        for k in direct[i]:
            height[k] = max(height[k], height[i] + 1)
    heirs: dict[int | None, int] = {}  # None: of the start
    for i, each in enumerate(direct):
        for k in each or {None}:
            if k not in heirs or height[i] > height[heirs[k]]:
                heirs[k] = i

    lanes: list[int] = []
    tails: list[int | None] = [None]
    for i, each in enumerate(direct):
        own = [lanes[k] for k in sorted(each) if heirs[k] == i and tails[lanes[k]] == k]
        free = [lane for lane, tail in enumerate(tails) if tail in before[i] and heirs.get(tail, i) <= i]
        if own:
            lane = min(own)
        elif not each and heirs[None] == i:
            lane = 0
        elif free:
            lane = free[-1]
        elif len(tails) < MAX_LANES:
            lane = len(tails)
            tails.append(None)
        else:
            lane = MAX_LANES - 1
        lanes.append(lane)
        tails[lane] = i
    others = [tuple(sorted(k for k in each if lanes[k] != lanes[i])) for i, each in enumerate(direct)]
    soon = [node.eqn.params.get("target_name") in early for node in nodes]
    starts = [_early(i, direct[i], lanes, soon) for i in range(len(nodes))]
    awaited = [0] * len(nodes)
    for start, each in zip(starts, others, strict=True):
        for k in each:
            awaited[k] |= 2 if start == 2 else 1
    return [CallPlace(*each) for each in zip(lanes, starts, awaited, others, strict=True)]


def _early(i: int, direct: set[int], lanes: list[int], soon: list[bool]) -> int:
    """`CallPlace.early` of call i, which waits for `direct`. `soon`: whether calls may start early, and let others."""
    if not soon[i]:
        return 0
    if lanes[i] == 0 and any(lanes[k] == 0 for k in direct):
        return 1
    return 2 if len(direct) == 1 and all(lanes[k] != lanes[i] and soon[k] for k in direct) else 0
