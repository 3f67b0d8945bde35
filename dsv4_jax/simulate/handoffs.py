"""Prompts from one simulated host to another: the managers' leases and arrivals, as `RemoteDriver` drives them.

The host that computes exports after each step of a prompt; when the copies to its own host memory have gone out, the
hand-off is sent. The host that goes on looks at what has come between its steps: it reads what it lacks, and when
nothing more comes it acknowledges, and the request is put in line. Checksums are those of the names that `ShadowDevice`
has for the bytes: a page that was given to somebody else meanwhile is seen, as in the real thing. Pure Python.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import NamedTuple

from ..errors import HandoffError
from ..manager import Arrival, Handoff
from ..manager.remote_tier import RemoteRead, RemoteTier
from ..records import page_bytes
from .host import Host
from .network import Network
from .simulation import SimulatedRequest
from .tokens import run_tokens

__all__ = ["LEASE", "HandoffPart", "Receiver", "Sender"]

LEASE = 60.0  # seconds


class HandoffPart(NamedTuple):
    """A part of a hand-off: what is sent of a prompt at once.

    Attributes:
        index: of the request in the trace.
        data: `Handoff.to_json`.
        gives_up: nothing more comes, though not all is told.
    """

    index: int
    data: bytes
    gives_up: bool


class Sender:
    """The side of a host that computes prompts for others.

    Args:
        number: of the host in the network.
    """

    def __init__(self, number: int, host: Host):
        self.number, self._host, self.manager, self.shadow = number, host, host.manager, host.result.shadow
        self._exports: list[tuple[int, Handoff, bool]] = []

    def export(self, job: SimulatedRequest) -> None:
        """Notes what of a prompt was computed; called after each of its steps."""
        assert job.request is not None
        handoff = self.manager.export_request(job.request, seconds=LEASE)
        gives_up = job.request.num_cached >= job.until and not handoff.last
        if handoff.blocks or handoff.last or gives_up:
            self._exports.append((job.index, handoff, gives_up))

    def take_parts(self) -> tuple[float, list[HandoffPart]]:
        """What is to be sent, and in how many seconds: when all that it tells of has gone to host memory."""
        exports, self._exports = self._exports, []
        if not exports:
            return 0.0, []
        seconds, sums = self._host.flush() / self._host.server.step_time.bandwidth, self.shadow.sums
        return seconds, [
            HandoffPart(index, handoff.vouched(sums(handoff.blocks), sums(handoff.state)).to_json(), gives_up)
            for index, handoff, gives_up in exports
        ]


class Receiver:
    """The side of a host that goes on with prompts that others have computed.

    Args:
        number: of the host in the network.
        at: `(seconds, call)`: calls then.
        wake: called when there is something for `poll`.

    Attributes:
        whole: hand-offs of which all came.
        given_up: the others, by what went wrong.
        records: read, by scope: "block", and "slot" for states.
    """

    def __init__(
        self,
        number: int,
        host: Host,
        network: Network,
        at: Callable[[float, Callable[[], object]], object],
        wake: Callable[[], object],
    ):
        self._number, self._network, self._at, self._wake = number, network, at, wake
        self._layout, self._shadow = host.server.layout, host.result.shadow
        self._tier = RemoteTier(host.manager, clock=host.manager.clock)
        self._page = page_bytes(self._layout)
        self._waiting: dict[int, SimulatedRequest] = {}
        self._arrivals: dict[SimulatedRequest, tuple[Arrival, Sender]] = {}
        self._inbox: list[tuple[HandoffPart, Sender]] = []
        self._ended: list[tuple[Arrival, list[RemoteRead], list[bool]]] = []
        self.whole, self.records, self.given_up = 0, collections.Counter[str](), collections.Counter[str]()

    def held(self) -> int:
        """Counts what still waits for others."""
        self._tier.expire()
        return len(self._waiting) + len(self._inbox) + len(self._ended)

    def expect(self, job: SimulatedRequest) -> None:
        """Notes a request whose prompt will come from another host."""
        self._waiting[job.index] = job

    def receive(self, part: HandoffPart, sender: Sender) -> None:
        """Takes a part of a hand-off that has come."""
        self._inbox.append((part, sender))
        self._wake()

    def poll(self, now: float) -> list[SimulatedRequest]:
        """Takes up what has come. Returns who waits for nothing any more."""
        if not (self._inbox or self._ended):
            return []  # nothing else gives an arrival something to do
        self._tier.expire()
        ready = [job for part, sender in self._inbox if (job := self._take(part, sender)) is not None]
        self._inbox.clear()
        for arrival, reads, done in self._ended:
            self._tier.finish_reads(arrival, reads, done)
        self._ended.clear()
        for job, (arrival, sender) in list(self._arrivals.items()):
            if reads := self._tier.plan_reads(arrival):
                self._read(now, arrival, reads, sender)
            if arrival.is_over:
                ready.append(self._end(now, job, arrival, sender))
        return ready

    def _take(self, part: HandoffPart, sender: Sender) -> SimulatedRequest | None:
        """A part of a prompt; returns its job if nothing more of it can come."""
        job = self._waiting.get(part.index)
        if job is None:
            return None  # it has gone on without
        arrival, _ = self._arrivals.get(job, (None, sender))
        try:
            if arrival is not None and arrival.lease == Handoff.from_json(part.data).lease:
                self._tier.extend(arrival, part.data)
            else:
                if arrival is not None:
                    self._tier.close(arrival)  # the lease was over, and the host begins anew
                prompt = run_tokens(job.trace.prompt, self._layout.cfg.vocab_size)
                arrival = self._tier.expect(part.data, prompt, namespace=job.namespace)
                self._arrivals[job] = arrival, sender
        except HandoffError as error:
            del self._waiting[part.index]
            self._arrivals.pop(job, None)
            self.given_up[_plain(str(error))] += 1
            return job
        if part.gives_up:
            self._tier.fail(arrival, "no room on the host that computes")
        return None

    def _read(self, now: float, arrival: Arrival, reads: list[RemoteRead], sender: Sender) -> None:
        count = sum(len(read.pages) for read in reads)

        def done() -> None:
            whole = [sender.shadow.sums(read.source) == read.sums for read in reads]
            for read, arrived in zip(reads, whole, strict=True):
                if arrived:
                    self._shadow.receive(sender.shadow, read.source, read.pages)
            self._ended.append((arrival, reads, whole))
            self.records.update(read.scope for read in reads)
            self._wake()

        self._network.transfer(now, sender.number, self._number, count * self._page, done)

    def _end(self, now: float, job: SimulatedRequest, arrival: Arrival, sender: Sender) -> SimulatedRequest:
        del self._arrivals[job], self._waiting[job.index]
        self._at(now + self._network.link.latency, lambda: sender.manager.acknowledge(arrival.lease))
        if arrival.failure is None:
            self.whole += 1
        else:
            self.given_up[_plain(arrival.failure)] += 1
        job.arrival = arrival
        return job


def _plain(why: str) -> str:
    """Leaves the numbers out of a reason, so that equal ones are counted together."""
    return re.sub(r"\d+ ", "", why)
