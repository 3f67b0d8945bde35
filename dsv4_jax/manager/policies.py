"""What to keep where: small strategy objects that hold no state. Pure Python."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import warnings
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from ..checks import check_integer, check_seconds, shown
from ..errors import ConfigError, PerformanceWarning, PlanError
from ..layout import CacheSize
from .prefix.eviction_policies import EVICTION_POLICIES, WORTH, EvictionPolicy
from .prefix.hashing import Namespace

__all__ = [
    "EVICTION_POLICIES",
    "CachePolicy",
    "HostWatermark",
    "LeaseShares",
    "NamespaceShares",
    "SnapshotKind",
    "SnapshotPlacement",
    "WritePolicy",
]


StatePlace = Literal["slots", "blocks"]


@dataclasses.dataclass(frozen=True, slots=True)
class WritePolicy:
    """When a device block's bytes go to the host. Use one of the three constructors.

    Attributes:
        name: of the policy.
        backup_after: hits after which a block is copied; 0: when it is published; None: never.
        moves_when_evicted: whether an evicted block without host copy moves there.
    """

    name: str
    backup_after: int | None
    moves_when_evicted: bool

    @classmethod
    def write_through(cls) -> WritePolicy:
        """Every block is copied when it is published: eviction is free, traffic is highest."""
        return cls("write_through", 0, False)

    @classmethod
    def write_through_selective(cls, threshold: int) -> WritePolicy:
        """A block is copied at its `threshold`-th hit: what nobody shares never travels."""
        return cls("write_through_selective", check_integer("threshold", threshold, 1, error=PlanError), False)

    @classmethod
    def write_back(cls) -> WritePolicy:
        """A block is copied when it is evicted: least traffic, and eviction waits for the copy."""
        return cls("write_back", None, True)


class SnapshotKind(enum.Enum):
    """What becomes of a snapshot taken at a block boundary."""

    NONE = "none"  # take none
    KEEP = "keep"
    ROLLING = "rolling"  # keep it until the same request's next snapshot: the last one is the end of the output


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotPlacement:
    """At which block boundaries the state is kept, for hits to end there. The choices add up.

    Attributes:
        every: blocks between two snapshots, None for none at regular intervals: a long document that is asked again
            up to anywhere finds a state near by.
        end_of_prompt: at the last boundary that the same prompt can hit: before its last token.
        end_of_output: at the last boundary of the output. Where that is shows only when the request
            ends, so every boundary of the output gets a snapshot that replaces the one before.
        junctions: where a prompt leaves what is cached, if no hit could end there: the next one that shares
            as much hits all of it.
        doubling: at this many blocks before the end of the prompt, at twice, four times ... as many: a prompt
            that goes other ways near its end finds a state near by, and a long one needs only a few. None for none.

    Raises:
        PlanError: `every` or `doubling` is no count, or another choice neither True nor False.
    """

    every: int | None = 64
    end_of_prompt: bool = True
    end_of_output: bool = True
    junctions: bool = True
    doubling: int | None = 4

    def __post_init__(self) -> None:
        for name in ("every", "doubling"):
            if (blocks := getattr(self, name)) is not None:  # Python's: numpy's overflow, and have no `bit_length`
                object.__setattr__(self, name, check_integer(name, blocks, 1, error=PlanError))
        for name in ("end_of_prompt", "end_of_output", "junctions"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be True or False, got {shown(getattr(self, name))}")

    @classmethod
    def none(cls) -> SnapshotPlacement:
        """The placement that keeps no state, ever."""
        return cls(None, False, False, False, None)

    def at(self, tokens: int, *, prompt_tokens: int, block_tokens: int, junction: int = 0) -> SnapshotKind:
        """What to do with the state after `tokens` tokens.

        Args:
            junction: where the request left what was cached, in tokens; 0 if a hit could end there.
        """
        block, rest = divmod(tokens, block_tokens)
        if rest or not tokens:
            return SnapshotKind.NONE
        ahead = max(prompt_tokens - 1, 0) // block_tokens - block  # blocks up to the end of the prompt
        if (
            (self.every is not None and block % self.every == 0)
            or (self.end_of_prompt and not ahead)
            or (self.junctions and tokens == junction)
            or (self.doubling is not None and ahead > 0 and ahead == self._doubled(ahead))
        ):
            return SnapshotKind.KEEP
        return SnapshotKind.ROLLING if self.end_of_output and tokens > prompt_tokens else SnapshotKind.NONE

    def next_stop(self, start: int, stop: int, *, prompt_tokens: int, block_tokens: int, junction: int = 0) -> int:
        """Where a chunk of tokens [start, stop) has to end for the next snapshot to be taken: in (start, stop]."""
        block, end = start // block_tokens + 1, max(prompt_tokens - 1, 0) // block_tokens
        blocks = []  # candidates, none of them before `block`
        if self.every is not None:
            blocks.append(-(-block // self.every) * self.every)
        if self.end_of_prompt:
            blocks.append(end)
        if self.junctions:
            blocks.append(junction // block_tokens)
        if self.doubling is not None and end - block >= self.doubling:
            blocks.append(end - self._doubled(end - block))
        if self.end_of_output:
            blocks.append(max(block, prompt_tokens // block_tokens + 1))
        return min([stop, *(i * block_tokens for i in blocks if i >= block)])

    def _doubled(self, blocks: int) -> int:
        """Returns the largest of `doubling`, twice, four times ... as many that is at most `blocks`; 0 if none is."""
        assert self.doubling is not None
        times = blocks // self.doubling
        return self.doubling << times.bit_length() - 1 if times else 0


@dataclasses.dataclass(frozen=True, slots=True)
class HostWatermark:
    """Keeps a share of the host's pages free, so that evicting from the device does not wait for it.

    Attributes:
        low: share of free pages below which to evict, blocks and states alike.
        high: share to evict up to.

    Raises:
        ConfigError: one of them is no number, or 0 <= low <= high <= 1 does not hold.
    """

    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            share = getattr(self, name)
            if not isinstance(share, numbers.Real) or isinstance(share, bool):
                raise ConfigError("host watermark", f"{name} must be a number in [0, 1], got {shown(share)}")
        if not 0 <= self.low <= self.high <= 1:
            given = f"{shown(self.low)} and {shown(self.high)}"
            raise ConfigError("host watermark", f"0 <= low <= high <= 1 must hold, got {given}")

    def kept_free(self, total: int) -> int:
        """The fewest free pages with which nothing has to be evicted."""
        return math.ceil(self.low * total)

    def excess(self, free: int, total: int) -> int:
        """How many pages are to be freed now."""
        return max(math.ceil(self.high * total) - free, 0) if free < self.low * total else 0


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class NamespaceShares:
    """How much of a tier one namespace's units may take while others want room there.

    Whoever has more is evicted first, whatever its units are worth, until it has a tenth less than its share. So who
    scans does not evict what the others have; where nobody else wants room, nothing is evicted for its share.

    Attributes:
        each: of a namespace that is not named in `of`, in (0, 1]: a share of the bytes of blocks and cached states.
        of: the shares of single namespaces, as pairs.

    Raises:
        ConfigError: a share is no number in (0, 1], or what has one is no `Namespace`.
    """

    each: float
    of: tuple[tuple[Namespace, float], ...]

    def __init__(self, each: float = 1.0, of: Mapping[Namespace, float] | None = None):
        if not isinstance(of, Mapping | None):
            raise ConfigError("namespace shares", f"of must map namespaces to shares, got {shown(of)}")
        object.__setattr__(self, "each", _share("each", each))
        for namespace in of or ():
            if not isinstance(namespace, Namespace):
                raise ConfigError("namespace shares", f"of names namespaces, got {shown(namespace)}")
        pairs = tuple((name, _share(f"that of {shown(name)}", share)) for name, share in (of or {}).items())
        object.__setattr__(self, "of", pairs)

    def share_of(self, namespace: Any) -> float:
        """The share of a namespace."""
        return dict(self.of).get(namespace, self.each)


def _share(name: str, share: Any, what: str = "namespace shares") -> float:
    if isinstance(share, bool) or not isinstance(share, int | float | np.number) or not 0 < share <= 1:
        raise ConfigError(what, f"{name} must be a number in (0, 1], got {shown(share)}")
    return float(share)


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseShares:
    """How much of the host other hosts may hold: pages that they may read, under leases, are not evicted meanwhile.

    A prompt that is told to another host ends older leases if it has to, those first of which nothing new was told
    for longest: so hosts that never answer keep no later prompt from being told whole.

    Attributes:
        all: the most pages that all leases together may hold, as a share of the host's, in (0, 1].
        peer: of those of one peer, likewise.
        grace: seconds for which a lease is left alone after the last that was told of it. One of a prompt that is
            still being computed is left alone anyway.

    Raises:
        ConfigError: a share is no number in (0, 1], or `grace` no time.
    """

    all: float = 0.9
    peer: float = 0.9
    grace: float = 1.0

    def __post_init__(self) -> None:
        for name in ("all", "peer"):
            object.__setattr__(self, name, _share(name, getattr(self, name), "lease shares"))
        grace = check_seconds("grace", self.grace, error=functools.partial(ConfigError, "lease shares"))
        object.__setattr__(self, "grace", grace)


_WRITE_BACK, _SNAPSHOTS, _WATERMARK = WritePolicy.write_back(), SnapshotPlacement(), HostWatermark()
_LEASES = LeaseShares()


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class CachePolicy:
    """All choices of one cache: what is kept, where, and what leaves first.

    Attributes:
        write: when blocks go to the host.
        snapshots: where states are kept.
        eviction: what leaves a tier first (see `EVICTION_POLICIES`): what is worth least, or the least recently or
            frequently used.
        watermark: how much of the host is kept free.
        shares: how much of a tier one namespace may take from the others; None: all are evicted alike.
        states: where snapshots lie on the device: in "slots", of which the cache's size has `num_snapshots` for them,
            or in "blocks", several for each, where they compete with cached blocks for all memory: then who runs the
            steps runs the transfers as well, also without a host tier (`run_transfers` takes None for it).
        leases: how much of the host other hosts may hold.

    Raises:
        ConfigError: one of them is something else.
    """

    write: WritePolicy
    snapshots: SnapshotPlacement
    eviction: EvictionPolicy
    watermark: HostWatermark
    shares: NamespaceShares | None
    states: StatePlace
    leases: LeaseShares

    def __init__(
        self,
        write: WritePolicy = _WRITE_BACK,
        snapshots: SnapshotPlacement = _SNAPSHOTS,
        eviction: EvictionPolicy = WORTH,
        watermark: HostWatermark = _WATERMARK,
        shares: NamespaceShares | None = None,
        states: StatePlace = "slots",
        leases: LeaseShares = _LEASES,
        *,
        order: EvictionPolicy | None = None,  # the former name of `eviction`, for one release
    ):
        if order is not None:
            warnings.warn("CachePolicy(order=) is CachePolicy(eviction=) now", DeprecationWarning, stacklevel=2)
            eviction = order
        for name, part, kind in (
            ("write", write, WritePolicy),
            ("snapshots", snapshots, SnapshotPlacement),
            ("eviction", eviction, EvictionPolicy),
            ("watermark", watermark, HostWatermark),
            ("leases", leases, LeaseShares),
        ):
            if not isinstance(part, kind):
                raise ConfigError(f"cache policy: {name}", f"must be of type {kind.__name__}, got {shown(part)}")
            object.__setattr__(self, name, part)
        if not isinstance(shares, NamespaceShares | None):
            raise ConfigError("cache policy: shares", f"must be NamespaceShares or None, got {shown(shares)}")
        object.__setattr__(self, "shares", shares)
        if states not in get_args(StatePlace):
            raise ConfigError("cache policy: states", f'must be "slots" or "blocks", got {shown(states)}')
        object.__setattr__(self, "states", states)

    @property
    def order(self) -> EvictionPolicy:
        """The former name of `eviction`, for one release."""
        warnings.warn("CachePolicy.order is CachePolicy.eviction now", DeprecationWarning, stacklevel=2)
        return self.eviction

    def warn_if_vain(self, size: CacheSize, before: CacheSize | None = None) -> None:
        """Warns with `PerformanceWarning` if a cache of this size keeps next to no states: prompts find little in it.

        Args:
            before: the size so far, of which the same need not be said again.
        """
        problem = self._problem(size)
        if problem and (before is None or problem != self._problem(before)):
            text = f"prompts find next to nothing under this cache policy: {problem}"
            warnings.warn(PerformanceWarning(text), stacklevel=3)

    def _problem(self, size: CacheSize) -> str:
        if self.snapshots == SnapshotPlacement.none():
            return "its placement keeps no states"
        if self.states == "slots" and size.num_slots + size.num_snapshots < 2:
            return "num_snapshots is 0, and the one slot is the live request's (plan_capacity gives snapshots a share)"
        return ""
