"""What no cache could exceed: one without end, and a clairvoyant one of the configured memory. Pure Python + numpy.

Both look at the trace alone. Requests take turns in the order of their arrival, which is that of admission; a
turn looks up the prompt's full blocks (at least the last token is computed), then leaves all blocks of prompt and
output behind. So what a turn may find, all turns before it have left, even if they are still under way.

**Endless**: the tokens of leading blocks that an earlier turn of the tenant left behind.

**Clairvoyant**: the smaller of two numbers, each of which leaves out what the other one counts.

* *Blocks*: a cache of N blocks, N those of device and host together, as if nobody else needed any, a block were never
  in both, and every block boundary had a snapshot. Who is used next furthest in the future is left out (Belady's rule;
  blocks without a next use are never kept). Of blocks of equal next use the deepest leaves first, and no block
  is needed later than one below it: so the rule keeps prefixes whole, and its hits are the most that N blocks can give.
  `tests/simulate/test_bounds.py` compares them with all possible choices on small traces.
* *States*: a cache of S states, S those of all slots (live requests' among them) and of the host together, with room
  for all blocks. A hit of d blocks needs the state at boundary d to be kept from the last turn before that came through
  that boundary. Each turn takes one of its boundaries; a turn at which a state is kept costs one, and S times the
  number of turns is to spend. Hits are cut into the steps of their concave hulls, the best are taken first,
  and the last one in part: the optimum of the linear relaxation, so at least that of any choice.

Where the manager exceeds a bound it is by what the order of turns simplifies: a request that was admitted but has not
computed its blocks yet holds nothing, and here they count as kept from its turn on. That is at most what the live
requests have ahead of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..layout import CacheLayout
from .tokens import prefix_names, run_tokens
from .trace import TraceRequest

__all__ = ["Bounds", "Turn", "blocks_bound", "bounds", "endless_bound", "states_bound", "turns_of"]

_NEVER = 1 << 60


class Turn(NamedTuple):
    """What a request looks up and leaves behind.

    Attributes:
        names: of its full blocks, prompt and output, in path order; a name stands for all that comes before, too.
        asked: the leading ones that its prompt may find.
    """

    names: list[int]
    asked: int


class Bounds(NamedTuple):
    """The prompt tokens that caches find at most.

    Attributes:
        prompt: tokens of all prompts.
        endless: by a cache without end.
        blocks, states: by a clairvoyant one, as far as its blocks or its states allow (see the module).
    """

    prompt: int
    endless: int
    blocks: int
    states: int

    @property
    def clairvoyant(self) -> int:
        return min(self.blocks, self.states)


def bounds(
    turns: Sequence[Turn], trace: Sequence[TraceRequest], block_tokens: int, *, blocks: int, states: int
) -> Bounds:
    """What caches of so many blocks and states in all find at most, in tokens."""
    found = endless_bound(turns), blocks_bound(turns, blocks), states_bound(turns, states)
    return Bounds(sum(request.prompt_tokens for request in trace), *(count * block_tokens for count in found))


def turns_of(trace: Iterable[TraceRequest], layout: CacheLayout) -> list[Turn]:
    """Returns the turns of a trace, earliest first."""
    turns, block = [], layout.block_tokens
    for request in trace:
        ids = run_tokens((*request.prompt, *request.output), layout.cfg.vocab_size)
        # The last token is sampled and never computed: a block that it fills is not cached.
        names = prefix_names(ids[:-1] if request.output else ids, block, request.tenant)
        turns.append(Turn(names, (request.prompt_tokens - 1) // block))
    return turns


def endless_bound(turns: Iterable[Turn]) -> int:
    """Blocks found by a cache without end."""
    seen: set[int] = set()
    found = 0
    for turn in turns:
        for name in turn.names[: turn.asked]:
            if name not in seen:
                break
            found += 1
        seen.update(turn.names)
    return found


def blocks_bound(turns: Sequence[Turn], blocks: int) -> int:
    """Returns blocks found by a clairvoyant cache of so many blocks."""
    if not blocks:
        return 0
    following: list[list[int]] = []  # of each turn's blocks: the next turn that asks for it
    ahead: dict[int, int] = {}
    for index in range(len(turns) - 1, -1, -1):
        names, asked = turns[index]
        following.append([ahead.get(name, _NEVER) for name in names])
        ahead.update(dict.fromkeys(names[:asked], index))
    following.reverse()
    kept: dict[int, int] = {}  # name -> the next turn that asks for it
    farthest: list[tuple[int, int, int]] = []  # a heap of (-next turn, -depth, name), some of them out of date
    found = 0
    for (names, asked), nexts in zip(turns, following, strict=True):
        for depth, (name, after) in enumerate(zip(names, nexts, strict=True)):
            had = kept.pop(name, None)
            found += had is not None and depth < asked
            if after == _NEVER:
                continue
            kept[name] = after
            heapq.heappush(farthest, (-after, -depth, name))
            while len(kept) > blocks:
                far, _, victim = heapq.heappop(farthest)
                if kept.get(victim) == -far:
                    del kept[victim]
    return found


def states_bound(turns: Sequence[Turn], states: int) -> int:
    """Returns blocks found by a clairvoyant cache of so many states, at most (rounded up)."""
    last: dict[int, int] = {}
    gains: list[np.ndarray] = []
    costs: list[np.ndarray] = []
    for index, (names, asked) in enumerate(turns):
        kept_for = []  # turns that a state at each boundary is kept: not decreasing with depth
        for name in names[:asked]:
            before = last.get(name)
            if before is None:
                break
            kept_for.append(index - before)
        last.update(dict.fromkeys(names, index))
        if kept_for:
            gain, cost = _hull(kept_for)
            gains.append(gain)
            costs.append(cost)
    if not gains or not states:
        return 0
    gain, cost = np.concatenate(gains), np.concatenate(costs)
    order = np.argsort(cost / gain, kind="stable")
    gain, spent = gain[order], np.cumsum(cost[order])
    to_spend = states * len(turns)
    whole = int(np.searchsorted(spent, to_spend, side="right"))
    found = float(gain[:whole].sum())
    if whole < len(gain):
        left = to_spend - (spent[whole - 1] if whole else 0)
        found += gain[whole] * left / cost[order][whole]
    return int(np.ceil(found))


def _hull(kept_for: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps (blocks gained, turns paid) of the concave hull of blocks over turns, the cheapest first."""
    corners = [(0, 0)]
    for blocks, turns in enumerate(kept_for, 1):
        if corners[-1][1] == turns:
            corners.pop()  # more blocks for the same
        corners.append((blocks, turns))
        while len(corners) > 2:
            (b0, t0), (b1, t1), (b2, t2) = corners[-3:]
            if (b1 - b0) * (t2 - t1) > (b2 - b1) * (t1 - t0):
                break
            del corners[-2]
    steps = np.diff(np.array(corners, np.float64), axis=0)
    return steps[:, 0], steps[:, 1]
