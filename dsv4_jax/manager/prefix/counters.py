"""What has happened to a prefix tree since it was made. Pure Python."""

from __future__ import annotations

import dataclasses

from .node import TIERS, Tier

__all__ = ["TreeCounters"]


def _by_tier() -> dict[Tier, int]:
    return dict.fromkeys(TIERS, 0)


@dataclasses.dataclass(slots=True)
class TreeCounters:
    """Totals since construction. Tokens of a hit count in the tier where their block was found."""

    lookups: int = 0
    lookup_tokens: int = 0
    hits: int = 0
    hit_tokens: dict[Tier, int] = dataclasses.field(default_factory=_by_tier)
    evicted: dict[Tier, int] = dataclasses.field(default_factory=_by_tier)
    evicted_snapshots: int = 0
    duplicates: int = 0
    adoptions: int = 0
