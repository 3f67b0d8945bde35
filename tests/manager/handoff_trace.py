"""Two managers on symbolic devices, and what goes between them: hand-offs, reads, acknowledgements, all of it unsure.

One computes prompts and exports them, the other takes them over; both serve loads of their own meanwhile. Messages are
lost, late, doubled and out of order, reads fail and come after their lease, hosts are reset. Whatever a step reads has
to be the history of its request (`Trace`), and in the end nothing may be held.
"""

from __future__ import annotations

import collections
import hashlib
import random
from typing import NamedTuple

from dsv4_jax.errors import HandoffError, NoFreeSlotError
from dsv4_jax.manager import Arrival, Handoff, HostSize, Namespace
from dsv4_jax.manager.remote_tier import RemoteRead, RemoteTier
from dsv4_jax.manager.request import Request
from tests.clock import FakeClock

from .symbolic_device import UNWRITTEN
from .test_caching_stateful import BLOCK, LAYOUT, Trace

TORN = (UNWRITTEN, 0, 0, object)
LEASE = 20.0  # seconds


class Message(NamedTuple):
    """A part of an exported prompt on its way, with what the router knows of the request."""

    handoff: Handoff
    tokens: list[int]
    space: Namespace


def vouch(record: object) -> bytes:
    """Stands for the checksum of a page."""
    return hashlib.sha256(repr(record).encode()).digest()[:16]


class Pair:
    """A producer and a consumer. `did` counts what happened."""

    def __init__(self, seed: int, *, policy: str = "write_back", drafts: tuple[int, int] = (0, 3), small: int = 0):
        self.random, self.clock = random.Random(seed), FakeClock()
        self.apart = random.Random(~seed)  # what came later: the rest stays as it was
        hosts = HostSize.of(LAYOUT, 24 - small, 5), HostSize.of(LAYOUT, 18 - small, 4)
        self.sender, self.taker = (
            Trace(
                seed + i,
                policy=policy,
                drafts=drafts[i],
                host=hosts[i],
                blocks=(26, 18)[i],
                snapshots=3 - i,
                clock=self.clock,
            )
            for i in (0, 1)
        )
        self.taker.texts[0] = self.sender.texts[0]
        self.tier = RemoteTier(self.taker.manager, clock=self.clock)
        self.prompts: dict[str, Message] = {}  # by lease, as the request was when it was first exported
        self.exported: list[Handoff] = []  # wait for their copies
        self.messages: list[Message] = []
        self.arrivals: list[Arrival] = []
        self.reads: list[tuple[Arrival, list[RemoteRead]]] = []
        self.leases: list[str] = []  # all that were ever told
        self.did: collections.Counter[str] = collections.Counter()

    # The producer

    def prefill(self) -> None:
        """A prompt of the sender's, chunk by chunk, told of as it becomes full."""
        trace = self.sender
        trace.random = self.random
        if not (waiting := [request for request in trace.manager.requests if request.num_pending > BLOCK]):
            trace.admit()
            return
        request = self.random.choice(waiting)
        while request.num_pending > 1:
            scheduled = trace.schedule(self.random.randint(BLOCK, 40), requests=[request])
            if not scheduled:
                trace.make_room()
                return
            trace.run_plan(trace.manager.plan_step(scheduled))
            self.export(request)
            self.send()

    def export(self, request: Request | None = None) -> None:
        if (request := request or self.sender.any_request()) is None:
            return
        before = set(self.sender.manager.leases.active)
        held = [lease for lease in self.sender.manager.leases.active.values() if lease.request is request]
        peer = held[0].peer if held else self.apart.choice([None, None, "a", "b"])
        handoff = self.sender.manager.export_request(request, seconds=LEASE, peer=peer)
        self.did["ended for room"] = self.sender.manager.stats().handoffs.ended["sent", "room"]
        if handoff.lease not in before:
            self.prompts[handoff.lease] = Message(handoff, list(request.tokens), self.sender.spaces[request.id])
        self.did["streamed"] += handoff.first > 0 and bool(handoff.blocks)
        self.exported.append(handoff)

    def flush(self) -> None:
        self.sender.manager.flush()
        self.sender.device.transfer(self.sender.manager.take_transfers())
        self.send()

    def send(self) -> None:
        """What was copied to the host goes out, with its checksums."""
        manager, pages = self.sender.manager, self.sender.device.pages
        if manager.cache.is_waiting:
            return
        for handoff in self.exported:
            if not manager.leases.is_sound(handoff.lease):
                self.did["not sent"] += 1
                continue
            sums = [[vouch(pages[page]) for page in part] for part in (handoff.blocks, handoff.state)]
            message = self.prompts[handoff.lease]._replace(handoff=handoff.vouched(*sums))
            self.leases.append(handoff.lease)
            self.messages += [message] * self.random.choice([0, 1, 1, 1, 1, 2])
        self.exported = []

    def acknowledge(self) -> None:
        """Any lease there ever was: under way, acknowledged before, over, of before a reset."""
        if self.leases:
            self.acknowledge_lease(self.random.choice(self.leases))

    def acknowledge_lease(self, lease: str) -> None:
        there = lease in self.sender.manager.leases.active
        if there and (peer := self.sender.manager.leases.active[lease].peer) is not None:
            assert not self.sender.manager.acknowledge(lease, peer=f"not {peer}")
        assert self.sender.manager.acknowledge(lease) <= there
        self.did["acknowledged" if there else "acknowledged too late"] += 1

    # The consumer

    def deliver(self) -> None:
        if not self.messages:
            return
        i = 0 if self.random.random() < 0.8 else self.random.randrange(len(self.messages))
        handoff, tokens, space = self.messages.pop(i)
        data = handoff.to_json()
        known = [arrival for arrival in self.arrivals if arrival.lease == handoff.lease and not arrival.closed]
        try:
            if known:
                self.tier.extend(known[0], data)
                self.did["extended"] += 1
            else:
                known = [self.tier.expect(data, tokens, namespace=space)]
                self.arrivals += known
                self.did["expected"] += 1
        except HandoffError as error:
            self.did[f"refused: {error.field}"] += 1
        else:
            if known[0].asks or self.random.random() < 0.1:
                self.export_again(known[0])

    def export_again(self, arrival: Arrival) -> None:
        manager = self.sender.manager
        if again := manager.export_again(arrival.lease, self.random.choice([arrival.announced, arrival.announced, 0])):
            self.did["told again"] += 1
            self.exported.append(again)

    def plan(self) -> None:
        for arrival in self.arrivals:
            if reads := self.tier.plan_reads(arrival):
                # Their pages are written from now on, in any order.
                self.taker.device.pages.update((page, TORN) for read in reads for page in read.pages)
                self.reads.append((arrival, reads))

    def finish(self) -> None:
        """Some reads of an arrival end: whole, if the sender's pages still hold what it vouched for."""
        if not self.reads:
            return
        arrival, reads = self.reads.pop(self.random.randrange(len(self.reads)))
        count = self.random.randint(1, len(reads))
        if reads[count:]:
            self.reads.append((arrival, reads[count:]))
        theirs, ours, fails = self.sender.device.pages, self.taker.device.pages, self.random.random() < 0.05
        done = []
        for read in reads[:count]:
            assert all(ours[page] is TORN for page in read.pages), "a page that is being read into was given away"
            records = [theirs.get(page, TORN) for page in read.source]
            right = all(vouch(record) == each for record, each in zip(records, read.sums, strict=True))
            self.did["stale records"] += not right
            done.append(right and not fails)
            ours.update(zip(read.pages, records, strict=True))
        self.did["records"] += sum(done)
        self.tier.finish_reads(arrival, reads[:count], done)

    def admit(self) -> None:
        """The prompt of an arrival; mostly once all that will come has come."""
        over = [arrival for arrival in self.arrivals if arrival.is_over]
        arrival = self.random.choice(over if over and self.random.random() < 0.9 else self.arrivals or [None])
        if arrival is None:
            return
        try:
            request = self.taker.manager.admit_remote(arrival)
        except NoFreeSlotError:
            return
        self.taker.spaces[request.id] = arrival.namespace
        self.taker.fed[request.id] = arrival.tokens[: request.num_cached]
        whole = arrival.failure is None and arrival.state is not None
        self.did["records that were here"] += max(arrival.joined - arrival.records, 0)
        self.did["remote hits"] += whole and request.num_cached == arrival.total * BLOCK > 0
        self.did["admitted early"] += not arrival.is_over
        self.did[f"failed: {arrival.failure}"] += arrival.failure is not None
        self.gone(arrival)

    def give_up(self) -> None:
        if self.arrivals:
            arrival = self.random.choice(self.arrivals)
            self.tier.close(arrival)
            self.gone(arrival)

    def gone(self, arrival: Arrival) -> None:
        self.arrivals.remove(arrival)
        if self.random.random() < 0.7:  # else it is lost
            self.acknowledge_lease(arrival.lease)

    # Both

    def serve_sender(self) -> None:
        self.act(self.sender)
        self.send()

    def serve_taker(self) -> None:
        self.act(self.taker)

    def act(self, trace: Trace) -> None:
        calls = ["step"] * 9 + ["admit"] * 4 + ["release", "preempt", "resume", "fork", "fail", "edit"]
        trace.random = self.random
        getattr(trace, self.random.choice(calls))()

    def wait(self) -> None:
        self.clock.advance(self.random.choice([1, 2, LEASE / 2, LEASE]))
        self.tier.expire()

    def reset(self) -> None:
        trace = self.random.choice([self.sender, self.taker])
        trace.manager.reset()
        self.did["resets"] += 1
        self.did["resets while reading"] += trace is self.taker and bool(self.reads)
        if trace is self.taker:
            for arrival in self.arrivals[::2]:  # of others nobody thinks any more
                self.tier.close(arrival)
            self.arrivals = []

    def check(self) -> None:
        self.sender.manager.check_integrity()
        self.taker.manager.check_integrity()
        manager = self.sender.manager
        leases, stats, pages = manager.leases.active.values(), manager.stats().handoffs, manager.cache.snapshot_pages
        assert stats.begun["sent"] - sum(n for (side, _), n in stats.ended.items() if side == "sent") == len(leases)
        for name, held in ((None, stats.lease_pages), *stats.peers.items()):
            mine = [lease for lease in leases if name in (None, lease.peer)]
            states = {lease.state_held for lease in mine} - {None}
            assert held == len({node for lease in mine for node in lease.nodes}) + pages * len(states)
            share = self.sender.leases.all if name is None else self.sender.leases.peer
            assert held <= share * manager.cache.pages.num_total

    def run(self, steps: int) -> None:
        calls = {
            self.serve_sender: 6,
            self.serve_taker: 5,
            self.prefill: 2,
            self.export: 3,
            self.flush: 3,
            self.deliver: 6,
            self.plan: 5,
            self.finish: 5,
            self.admit: 2,
            self.give_up: 0.2,
            self.acknowledge: 0.3,
            self.wait: 0.4,
            self.reset: 0.1,
        }
        for _ in range(steps):
            self.random.choices(list(calls), list(calls.values()))[0]()
            self.check()
        self.end()

    def end(self) -> None:
        """Whoever is left in the middle of something: in the end nothing is held anywhere."""
        while self.reads:
            self.finish()
        for arrival in self.arrivals:
            self.tier.close(arrival)
        self.clock.advance(2 * LEASE)
        self.check()
        for trace in (self.sender, self.taker):
            trace.manager.commit()
            assert not len(trace.manager.leases) and not trace.manager.cache.tree.holds.active
            trace.end()
            host = trace.manager.stats().cache.pools["host"]
            assert host.private == 0
            assert len(trace.manager.cache.try_pages(range(host.total))) == host.total, "pages that nobody can take"
