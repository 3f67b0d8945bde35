"""Processes that serve: one computes prompts, one goes on from there. Each is a `ByteEngine` behind a pipe. No jax.

What the router says, and what it is told, are tuples: a word and its arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from multiprocessing.connection import Connection
from typing import Any

from dsv4_jax import CacheSize
from dsv4_jax.errors import HandoffError, NoFreeSlotError, OutOfBlocksError, PeerError, TransferError
from dsv4_jax.manager import Arrival, HostSize, Namespace, Request
from dsv4_jax.tiers.remote import Peer, RecordTransport, RemoteDriver
from dsv4_jax.transports import open_engine, wire

from .byte_engine import BLOCK, VOCAB, ByteEngine

__all__ = ["LEASE", "Faults", "decode_host", "prefill_host"]

LEASE = 0.8  # seconds
PATIENCE = 2.4  # seconds that a decode host waits for a prompt


@dataclasses.dataclass(frozen=True)
class Faults:
    """Shares of what goes wrong in a host, other than that it is killed."""

    lost_acknowledgements: float = 0.0
    lost_handoffs: float = 0.0
    doubled_handoffs: float = 0.0
    torn_records: float = 0.0  # a page is not what its checksum was made of
    late_reads: float = 0.0  # a hand-off is looked at when its lease is over, and its pages are somebody else's


class Server:
    """What both have: an engine, a transport, a pipe and a loop."""

    def __init__(self, pipe: Connection, drafts: int, size: CacheSize, pages: int, seed: int):
        self.pipe, self.random, self.faults = pipe, random.Random(seed), Faults()
        self.engine = ByteEngine(drafts=drafts, size=size, host=HostSize(pages), seed=seed)
        self.manager = self.engine.manager
        self.transport = RecordTransport(open_engine("loopback"), timeout=2.0)
        self.metadata = self.transport.publish_host(self.engine.host)
        self.driver = RemoteDriver(self.manager, self.transport, ask_after=LEASE / 8)
        self.stopped = False
        self.tell("metadata", self.metadata)

    def tell(self, *what: Any) -> None:
        self.pipe.send(what)

    def run(self) -> None:
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError), self.transport:
            while not self.stopped:
                while self.pipe.poll(0 if self.serve() else 0.002):
                    word, *arguments = self.pipe.recv()
                    getattr(self, word)(*arguments)

    def stop(self) -> None:
        self.stopped = True

    def fail(self, faults: Faults) -> None:
        self.faults = faults

    def held(self) -> None:
        """Whoever asks whether something is held waits until leases are over."""
        self.manager.commit()
        self.tell("held", self.engine.held())

    def cut(self) -> None:
        """All connections to this host break."""
        server = self.transport._engine._server
        with server._lock:
            for connection in server._threads:
                wire.cut(connection)

    def serve(self) -> bool:
        """Something of what is to be done. Whether there was anything."""
        raise NotImplementedError

    def happens(self, share: float) -> bool:
        return self.random.random() < share

    def poll(self) -> None:
        if not self.manager.has_transfers:
            self.manager.flush()
        self.engine.transfer()
        self.driver.poll(self.engine.host, self.engine.host)


class PrefillHost(Server):
    def __init__(self, pipe: Connection, seed: int):
        super().__init__(pipe, 0, CacheSize(30, 2, 16, num_snapshots=4), 140, seed)
        self.waiting: list[tuple[int, list[int], Namespace]] = []
        self.live: dict[Request, int] = {}
        self.leases: dict[str, int] = {}

    def prompt(self, number: int, tokens: list[int], space: Namespace) -> None:
        self.waiting.append((number, tokens, space))

    def serve(self) -> bool:
        while self.waiting:
            number, tokens, space = self.waiting[0]
            try:
                request = self.manager.admit_request(tokens, namespace=space)
            except NoFreeSlotError:
                break
            self.engine.spaces[request.id] = space
            self.live[request] = number
            self.waiting.pop(0)
        busy = bool(self.live)
        for request in list(self.live):
            self.compute(request)
        self.poll()
        for handoff in self.driver.take_handoffs():
            if self.happens(self.faults.torn_records) and handoff.sums:
                # In what is told, not in the page: the next prompt that begins so would be told with its new checksum.
                i = self.random.randrange(len(handoff.sums))
                torn = bytes([handoff.sums[i][0] ^ 1]) + handoff.sums[i][1:]
                handoff = dataclasses.replace(handoff, sums=(*handoff.sums[:i], torn, *handoff.sums[i + 1 :]))
            for _ in range(1 - self.happens(self.faults.lost_handoffs) + self.happens(self.faults.doubled_handoffs)):
                self.tell("handoff", self.leases[handoff.lease], handoff.to_json())
        return busy

    def compute(self, request: Request) -> None:
        end = max(len(request.tokens) - 1, 0) // BLOCK * BLOCK
        if request.num_cached < end:
            budget = min(self.random.randint(BLOCK, 3 * BLOCK), end - request.num_cached)
            if not (scheduled := self.manager.schedule(budget, requests=[request])):
                return
            try:
                self.engine.step(scheduled)
            except OutOfBlocksError:
                return
        handoff = self.driver.export(request, seconds=LEASE)
        self.leases[handoff.lease] = self.live[request]
        if request.num_cached >= end:
            self.manager.release_request(request)
            del self.live[request]


@dataclasses.dataclass(eq=False)
class Job:
    number: int
    tokens: list[int]
    count: int
    space: Namespace
    until: float
    alone: bool
    arrival: Arrival | None = None


class DecodeHost(Server):
    def __init__(self, pipe: Connection, seed: int):
        super().__init__(pipe, 2, CacheSize(22, 3, 16, num_snapshots=3), 110, seed)
        self.peer: Peer | None = None
        self.waiting: dict[int, Job] = {}
        self.live: dict[Request, Job] = {}
        self.late: list[tuple[float, int, bytes]] = []

    def connect(self, metadata: bytes) -> None:
        if self.peer is not None:
            self.transport.disconnect(self.peer)
        try:
            self.peer = self.transport.connect(metadata)
        except TransferError:  # it is gone again
            self.peer = None

    def request(self, number: int, tokens: list[int], count: int, space: Namespace, alone: bool) -> None:
        until = time.monotonic() + PATIENCE
        self.waiting[number] = Job(number, tokens, count, space, until, alone)

    def alone(self, number: int) -> None:
        """Nobody computes this prompt any more."""
        if number in self.waiting:
            self.waiting[number].alone = True

    def handoff(self, number: int, data: bytes) -> None:
        if self.happens(self.faults.late_reads):
            self.late.append((time.monotonic() + 1.2 * LEASE, number, data))
        else:
            self.take(number, data)

    def take(self, number: int, data: bytes) -> None:
        job = self.waiting.get(number)
        if job is None or self.peer is None:
            return
        job.until = time.monotonic() + PATIENCE
        with contextlib.suppress(HandoffError, PeerError):
            job.arrival = self.driver.receive(data, self.peer, job.tokens, namespace=job.space)

    def serve(self) -> bool:
        now = time.monotonic()
        for item in [item for item in self.late if item[0] <= now]:
            self.late.remove(item)
            self.take(*item[1:])
        send = self.transport.notify
        if self.happens(self.faults.lost_acknowledgements):
            self.transport.notify = lambda peer, message: None
        self.poll()
        self.transport.notify = send
        for job in list(self.waiting.values()):
            self.start(job, now)
        self.resume()
        if not self.live:
            return bool(self.waiting)
        if not (scheduled := self.manager.schedule(40)):
            self.manager.preempt(self.manager.requests[-1])
            return True
        drafted = [(request, count + self.draft(request)) for request, count in scheduled]
        try:
            drawn = self.engine.step(drafted)
        except OutOfBlocksError:  # what was scheduled fits
            for (request, more), (_, count) in zip(drafted, scheduled, strict=True):
                del request.tokens[len(request.tokens) - (more - count) :]
            drafted, drawn = scheduled, self.engine.step(scheduled)
        for request, count in drafted:
            self.keep(request, count, drawn[request])
        return True

    def draft(self, request: Request) -> int:
        """Some tokens behind the last one of a decode, right or wrong; how many."""
        if request.num_pending != 1 or len(request.tokens) <= request.num_prompt:
            return 0
        count = min(2, request.max_tokens - len(request.tokens))
        request.tokens += [self.random.randrange(VOCAB) for _ in range(count)]
        return count

    def start(self, job: Job, now: float) -> None:
        arrival = job.arrival
        if not job.alone and now < job.until and (arrival is None or not arrival.is_over):
            return
        limit = dict(max_tokens=len(job.tokens) + job.count)
        try:
            if arrival is None or arrival.closed:
                request = self.manager.admit_request(job.tokens, namespace=job.space, **limit)
            else:
                request = self.manager.admit_remote(arrival, **limit)
        except NoFreeSlotError:
            return
        self.engine.spaces[request.id] = job.space
        del self.waiting[job.number]
        self.live[request] = job
        whole = arrival is not None and arrival.state is not None and arrival.records and arrival.failure is None
        self.tell("started", job.number, request.num_hit, bool(whole and request.num_hit == arrival.total * BLOCK))
        if arrival is not None and arrival.failure is not None:
            self.tell("failure", job.number, arrival.failure)

    def resume(self) -> None:
        """One that came back at once would be the next to go: it waits until there is room for all of it."""
        for request in self.manager.preempted:
            use = self.manager.stats().cache.pools["device"]
            if self.manager.requests and self.engine.layout.blocks_for(request.max_tokens) > use.free + use.evictable:
                return
            with contextlib.suppress(NoFreeSlotError, OutOfBlocksError):
                self.manager.resume(request)

    def keep(self, request: Request, count: int, drawn: list[int]) -> None:
        if request.num_pending:
            return  # in the middle of its prompt
        first, kept = request.num_cached - count, count
        if first >= request.num_prompt and count <= 3:  # a decode, perhaps with drafts
            kept = 1
            while kept < count and request.tokens[first + kept] == drawn[kept - 1]:
                kept += 1
            self.manager.accept(request, kept)
        request.tokens.append(drawn[kept - 1])
        job = self.live[request]
        if len(request.tokens) >= request.max_tokens:
            self.manager.release_request(request)
            del self.live[request]
            self.tell("done", job.number, request.tokens[len(job.tokens) :][: job.count])


def prefill_host(pipe: Connection, seed: int) -> None:
    PrefillHost(pipe, seed).run()


def decode_host(pipe: Connection, seed: int) -> None:
    DecodeHost(pipe, seed).run()
