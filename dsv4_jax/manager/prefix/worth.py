"""What cached units are worth: the computing that they save, for their bytes. Pure Python.

Worth is counted in what one block saves that is hit once, in 1/`UNIT` of it, so that it is an integer.

A block saves its own tokens, as often as it has been hit, and perhaps once more. But a hit ends at a snapshot: a block
that neither has one nor anything below it saves nothing (`is_idle_end`), and leaves first.

A snapshot saves the blocks between the next snapshot above it and itself: a hit that cannot end here ends there. How
often it will be hit, nobody knows; but snapshots are taken at few kinds of places (near the end of a prompt, at the
end of an output, where prompts part), and how often those of each kind were hit so far is counted (`HitRates`). One
below which a later request has left its own, and nothing else, has been passed: a kind as well, seldom hit.

Worth fades as in GreedyDual-Size-Frequency (Cherkasova 1998): a unit's counts from the level at which it was last used,
and the level is that of the last unit that was lost.
"""

from __future__ import annotations

import dataclasses

from .node import Node, Snapshot

__all__ = ["UNIT", "HitRates", "Kind", "block_worth", "is_idle_end", "kind_of", "snapshot_worth"]

UNIT = 1024
_SHARE = 4  # a block counts as hit once more than it was: that is about four times too often. Best of 1 to 16
_MEMORY = 2000  # snapshots of a kind after which those of before count half


class Kind:
    """Places of snapshots that are no distances; those are >= 0 (see `kind_of`)."""

    UNKNOWN = -1
    PASSED = -2  # a later request has gone through it, and left a snapshot below
    JUNCTION = -3  # paths part here


def kind_of(tokens: int, prompt_tokens: int, block_tokens: int) -> int:
    """The kind of place that the end of a block is: 0 in the output, else 1 and more by doubling distances.

    Args:
        tokens: at which the block ends.
        prompt_tokens: of the request that has filled it.
    """
    ahead = max(prompt_tokens - 1, 0) // block_tokens - tokens // block_tokens
    return 0 if tokens > prompt_tokens else 1 + max(ahead, 0).bit_length()


@dataclasses.dataclass(slots=True)
class _Count:
    taken: float = 0
    hits: float = 0


class HitRates:
    """How often a snapshot of each kind is hit, as far as this cache has seen.

    Args:
        blocks: that take the bytes of one snapshot.
    """

    def __init__(self, blocks: int = 1):
        self._scale = _SHARE * UNIT / blocks
        self._counts: dict[int, _Count] = {}

    def worth(self, kind: int) -> float:
        """The worth of a snapshot of this kind, for each block that it saves, also of one that has not been hit yet."""
        return self._worth(self._of(kind))

    def taken(self, kind: int) -> float:
        """A snapshot of this kind was taken. Returns what it is worth."""
        count = self._of(kind)
        count.taken += 1
        if count.taken > _MEMORY:
            count.taken, count.hits = count.taken / 2, count.hits / 2
        return self._worth(count)

    def given_up(self, kind: int) -> None:
        """One was, before anybody could hit it: as if it had not been taken."""
        count = self._of(kind)
        count.taken = max(count.taken - 1, 0)

    def hit(self, kind: int) -> float:
        """One was hit. Returns what it is worth now."""
        count = self._of(kind)
        count.hits += 1
        return self._worth(count)

    def _worth(self, count: _Count) -> float:
        return self._scale * (count.hits + 0.5) / (count.taken + 8)

    def _of(self, kind: int) -> _Count:
        count = self._counts.get(kind)
        if count is None:
            count = self._counts[kind] = _Count()
        return count


def is_idle_end(node: Node) -> bool:
    """Whether nobody needs the node: a path ends here that is not in use, and no hit can."""
    return not node.children and node.snapshot is None and not node.refs


def block_worth(node: Node) -> int:
    """The worth of a node's block, the level at which it was last used included. An idle end has none."""
    return node.level + UNIT * (1 + node.hits)


def snapshot_worth(snapshot: Snapshot) -> int:
    """Returns the worth of a node's snapshot. It grows by itself when one above it is lost."""
    return snapshot.level + int(snapshot.rate * snapshot.reach)
