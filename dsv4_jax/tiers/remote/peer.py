"""`Peer`: another host, what became of the link to it, and when a lost one is connected to again. Imports no jax."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from ...errors import TransferError
from ...layout import CacheLayout
from ...manager.metrics import Family, Samples
from .metadata import PoolMetadata
from .read import PageRead

__all__ = ["HANDOFF_COUNTS", "Link", "Peer", "PeerStats", "TransportStats"]

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds before a lost peer is connected to again: doubled each time
_STEADY = 10.0  # seconds that a link has to last for the pauses to begin anew
GIVEN_UP = 600.0  # seconds after which a lost peer is not connected to any more
_COUNTS = {
    "losses": "Times that a peer was lost.",
    "reconnects": "Times that one was found again.",
    "given_up": "Peers that were looked for in vain.",
    "reads": "Reads of other hosts' records that have ended.",
    "failed_reads": "Those of them that have failed.",
    "bytes": "Bytes read from other hosts.",
    "notices": "Messages of other hosts.",
}
HANDOFF_COUNTS = {  # of a `RemoteDriver`; what has begun and ended is counted by its manager
    "exported": "Parts of prompts that were exported.",
    "announced": "Those that were ready to be sent, again where they were missed.",
    "acknowledged": "Leases that the other host has ended.",
    "asked_again": "Parts that the other host has missed.",
    "foreign": "Words about leases of others.",
    "dropped": "Notices for others than the driver that nobody took.",
}


@dataclasses.dataclass(eq=False)
class Peer:
    """Another host, as `RecordTransport.connect` gives it. It stays the same one when it was lost and is found again.

    Attributes:
        name: of its transport.
        num_pages: it has pages 1..num_pages.
        error: why it is lost; None while it is not known to be, and again once it is found.
        losses, reconnects: how often either has happened.
        reads, bytes, seconds: reads of its pages that have ended well (or with pages that were others), what came by
            them, and how long they took, added up.
    """

    name: str
    num_pages: int
    error: TransferError | None = None
    losses: int = 0
    reconnects: int = 0
    reads: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class PeerStats:
    """A `Peer` as it was. `error`: as text; None if it is up."""

    name: str
    error: str | None
    losses: int
    reconnects: int
    reads: int
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class TransportStats:
    """What a `RecordTransport` knows of its peers, and has done since it was made.

    Attributes:
        engine: its name.
        peers: that it is connected to, or lost and looks for.
        counts: "losses", "reconnects", "given_up" (peers that were looked for in vain), "reads", "failed_reads",
            "bytes", "notices", of all peers there ever were; and what the engine counts: of sockets connections
            "accepted", "strangers" that were dropped, peers "refused", and messages "dropped" for want of room.
        seconds: that reads took, added up.
        handoffs: `RemoteDriver.counts`, if it is that which tells.
    """

    engine: str
    peers: tuple[PeerStats, ...]
    counts: collections.Counter[str]
    seconds: float
    handoffs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def families(self) -> Iterator[Family]:
        """For `prometheus_text`."""
        engine = {"engine": self.engine}
        peers: Samples = [({**engine, "state": "up"}, self.up), ({**engine, "state": "lost"}, self.lost)]
        yield Family("peers", "gauge", "Other hosts: connected to, and lost and looked for.", peers)
        for name in {**_COUNTS, **self.counts}:
            text = _COUNTS.get(name, f"What the engine counts as {name}.")
            yield Family(f"{name}_total", "counter", text, [(engine, self.counts[name])])
        yield Family("read_seconds_total", "counter", "How long reads took, added up.", [(engine, self.seconds)])
        for name in filter(self.handoffs.__contains__, HANDOFF_COUNTS):
            yield Family(f"handoffs_{name}_total", "counter", HANDOFF_COUNTS[name], [(engine, self.handoffs[name])])

    @property
    def up(self) -> int:
        """How many peers are."""
        return sum(peer.error is None for peer in self.peers)

    @property
    def lost(self) -> int:
        """How many peers are looked for."""
        return len(self.peers) - self.up


@dataclasses.dataclass(eq=False)
class Link:
    """What a transport keeps of a peer.

    Attributes:
        there: what it has published.
        records: the layout of its records, as far as ours can do with them.
        link: the engine's; None while there is none.
        tried: whether it is not known yet to be the way back to a peer that was lost.
        reads: under way.
        since: when it was made, or lost.
        failures: in a row.
        again: when the next is to be made, if it is lost.
    """

    there: PoolMetadata
    records: CacheLayout
    link: Any = None
    tried: bool = False
    reads: set[PageRead] = dataclasses.field(default_factory=set)
    since: float = 0.0
    failures: int = 0
    again: float = 0.0

    def made(self, now: float) -> None:
        """It is up."""
        self.tried, self.since = False, now

    def lost(self, now: float) -> None:
        """It is not, and the next is made after a pause."""
        if self.link is not None and not self.tried:
            self.failures = 0 if now - self.since >= _STEADY else self.failures
            self.since = now
        self.failures += 1
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, 16))
        self.link, self.tried, self.again = None, False, now + random.uniform(longest / 2, longest)
