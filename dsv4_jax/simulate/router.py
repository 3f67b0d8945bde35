"""Which host a prompt goes to: by the prefix that lies there, and by what is asked of it already. Pure Python.

A prompt goes where the least is to be done before it, in tokens: what is asked of the host and not done, and of the
prompt what is not cached there. Of hosts that are equal the one with fewer requests, then the first.

* Of a host that computes prompts, what is asked are the tokens of its prompts that were not cached there when they were
  sent, until the first token is sampled or all was handed over.
* Of a host that decodes only, they are the prompts of its requests, until they end: what they hold.

What is cached where is known from the host's `EventLog`, at once and for nothing. Events tell of blocks alone; a hit
ends at a state, so it may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..manager import EventLog

__all__ = ["HostView", "choose"]


class HostView:
    """What a router knows of a host.

    Attributes:
        events: of its manager.
        tokens: asked of it and not done.
        requests: there.
    """

    def __init__(self) -> None:
        self.events = EventLog()
        self.tokens = self.requests = 0
        self._tiers: dict[bytes, int] = {}  # a bit for each tier that has a copy
        self._seen = 0

    def update(self) -> None:
        """Takes up what the host's manager has told since."""
        events, missed = self.events.since(self._seen)
        if missed:
            self._tiers.clear()
        for event in events:
            self._seen = event.sequence
            if event.digest is None:
                self._tiers.clear()
            elif event.kind == "stored":
                self._tiers[event.digest] = self._tiers.get(event.digest, 0) | 1 << event.tier
            elif left := self._tiers.pop(event.digest, 0) & ~(1 << event.tier):
                self._tiers[event.digest] = left

    def missing(self, digests: Sequence[bytes]) -> int:
        """Blocks of a prompt from the first one on that is not there."""
        return len(digests) - next((i for i, digest in enumerate(digests) if digest not in self._tiers), len(digests))


def choose(views: Sequence[HostView], digests: Sequence[bytes], block_tokens: int) -> tuple[int, int]:
    """The host for a prompt of these full blocks, and how many of them are not there."""
    missing = [view.missing(digests) for view in views]
    costs = [(view.tokens + n * block_tokens, view.requests) for view, n in zip(views, missing, strict=True)]
    best = costs.index(min(costs))
    return best, missing[best]
