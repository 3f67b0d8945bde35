"""A trace on several hosts: those that do everything, or some that compute prompts and some that decode.

Every host is a `Host`: a manager of its own, its own queue, clock and steps. What happens anywhere happens in the order
of simulated time; of what happens at one instant requests come first, then messages, then steps end, then the next ones
begin. Pure Python + numpy, deterministic.

With hosts of two kinds a prompt goes to one of each when it arrives (`router.choose`). If the one that decodes lacks at
least `WORTH` blocks of it, the other one computes it up to its last block boundary, and tells of its blocks after every
step, while it goes on; what is left, less than a block and one token, is computed where the request is decoded. There
everything is computed if less is lacking, or if the hand-off fails.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from ..checks import check_integer
from ..errors import CapacityError, LayoutError
from ..manager import BlockHasher
from ..records import block_record
from .engine import runnable
from .handoffs import LEASE, Receiver, Sender
from .host import Host
from .network import Link, Network
from .router import HostView, choose
from .simulation import MAX_UNITS, Server, SimulatedRequest, Simulation
from .tokens import run_tokens
from .trace import TraceRequest

__all__ = ["Handed", "HostsRun", "simulate_handed", "simulate_joint"]

WORTH = 2  # blocks to compute from which on a prompt goes to a host that computes prompts
_ARRIVAL, _MESSAGE, _END, _BEGIN = range(4)  # the order of what happens at one instant
Kind = Literal["joint", "prefill", "decode"]


@dataclasses.dataclass(frozen=True)
class Handed:
    """A request, and where its prompt was computed.

    Attributes:
        job: where it was decoded.
        prompt: where its prompt was computed, if elsewhere.
    """

    job: SimulatedRequest
    prompt: SimulatedRequest | None


@dataclasses.dataclass(frozen=True)
class HostsRun:
    """What has happened on several hosts.

    Attributes:
        requests: that ran, in the order of the trace.
        rejected: that could never run, by what they exceed.
        hosts: of each kind, in order.
        network: between them; those that compute prompts have the first numbers.
        records: that travelled, by scope: "block", and "slot" for states.
        whole, given_up: hand-offs of which all came, and others by what went wrong.
        held: requests, leases, holds and pages under way that are left at the end: 0.
    """

    requests: list[Handed]
    rejected: collections.Counter[str]
    hosts: list[tuple[Kind, Simulation]]
    network: Network | None = None
    records: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    whole: int = 0
    given_up: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    held: int = 0


def simulate_joint(
    trace: Sequence[TraceRequest], server: Server, hosts: int, *, on_done: Callable[[], object] = lambda: None
) -> HostsRun:
    """Runs a trace on hosts each of which does everything. Arguments as for `simulate`, which has one host.

    Raises:
        CapacityError: there is no host, or there are more than memory can list the units of.
        TraceError: as `simulate`.
    """
    _check_count(hosts, server)
    world = _World(trace, server, on_done)
    nodes = [_Node(world, number, "joint") for number in range(hosts)]

    def send(job: SimulatedRequest) -> None:
        number, missing = choose([node.view for node in nodes], world.digests(job), server.layout.block_tokens)
        nodes[number].take(job, missing * server.layout.block_tokens)

    return world.run(send, nodes)


def simulate_handed(
    trace: Sequence[TraceRequest],
    server: Server,
    prefill: int,
    decode: int,
    link: Link,
    *,
    on_done: Callable[[], object] = lambda: None,
) -> HostsRun:
    """Runs a trace on `prefill` hosts that compute prompts and `decode` hosts that go on with them.

    Raises:
        CapacityError: as `simulate_joint`; or the server has no host memory or no cache policy, and nothing could be
            handed over.
        LayoutError: blocks of the layout have no records.
        TraceError: as `simulate`.
    """
    if server.host is None or server.policy is None:
        raise CapacityError("hand-offs need host memory, and a cache policy")
    if not block_record(server.layout).bytes:
        raise LayoutError("blocks of this layout have no records: all layers see the window only")
    _check_count(prefill, server)
    _check_count(decode, server)
    world = _World(trace, server, on_done)
    network = Network(link, world.at)
    first = [_Node(world, number, "prefill", network) for number in range(prefill)]
    second = [_Node(world, prefill + number, "decode", network) for number in range(decode)]
    block = server.layout.block_tokens

    def send(job: SimulatedRequest) -> None:
        digests = world.digests(job)
        number, missing = choose([node.view for node in second], digests, block)
        if missing < WORTH:
            second[number].take(job, job.trace.prompt_tokens)
            return
        source, lacking = choose([node.view for node in first], digests, block)
        leg = SimulatedRequest(dataclasses.replace(job.trace, output=()), job.index, until=len(digests) * block)
        world.prompts[job.index] = leg
        second[number].expect(job)
        first[source].take(leg, lacking * block, second[number])

    return world.run(send, [*first, *second], network)


def _check_count(hosts: int, server: Server) -> None:
    size, pages = server.size, server.host.num_pages if server.host is not None else 0
    units = size.num_blocks + size.num_slots + size.num_snapshots + pages
    check_integer(f"hosts of {units} units each", hosts, 1, max(MAX_UNITS // units, 1), error=CapacityError)


class _World:
    """Simulated time: what happens on all hosts, in its order."""

    def __init__(self, trace: Sequence[TraceRequest], server: Server, on_done: Callable[[], object]):
        self.server, self.on_done, self.now = server, on_done, 0.0
        self.jobs, self.rejected = runnable(trace, server)
        self.prompts: dict[int, SimulatedRequest] = {}
        self._events: list[tuple[float, int, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def at(self, seconds: float, call: Callable[[], object], rank: int = _MESSAGE) -> None:
        heapq.heappush(self._events, (seconds, rank, next(self._count), call))

    def digests(self, job: SimulatedRequest) -> list[bytes]:
        """The digests of the blocks of its prompt that others could have left."""
        prompt = run_tokens(job.trace.prompt, self.server.layout.cfg.vocab_size)
        return BlockHasher(self.hash_spec, prompt[:-1], namespace=job.namespace).digests

    def run(
        self, send: Callable[[SimulatedRequest], object], nodes: Sequence[_Node], network: Network | None = None
    ) -> HostsRun:
        """Runs the trace to its end. `send`: gives a request to its hosts."""
        self.hash_spec = nodes[0].host.manager.hash_spec
        for _ in range(self.rejected.total()):
            self.on_done()
        ahead = iter(self.jobs)

        def arrive(job: SimulatedRequest) -> None:
            for node in nodes:
                node.view.update()
            send(job)
            follow()

        def follow() -> None:  # one at a time: a trace is long
            if (job := next(ahead, None)) is not None:
                self.at(job.trace.arrival, lambda: arrive(job), _ARRIVAL)

        follow()
        while self._events:
            self.now, _, _, call = heapq.heappop(self._events)
            call()
        receivers = [node.receiver for node in nodes if node.receiver is not None]
        return HostsRun(
            [Handed(job, self.prompts.get(job.index)) for job in self.jobs],
            self.rejected,
            [(node.kind, node.host.finish()) for node in nodes],
            network,
            records=sum((receiver.records for receiver in receivers), collections.Counter[str]()),
            whole=sum(receiver.whole for receiver in receivers),
            given_up=sum((receiver.given_up for receiver in receivers), collections.Counter[str]()),
            held=sum(node.held(self.now + 2 * LEASE) for node in nodes),
        )


class _Node:
    """A host in the world, with the side of hand-offs that it has."""

    def __init__(self, world: _World, number: int, kind: Kind, network: Network | None = None):
        self.kind, self.view = kind, HostView()
        self._world, self._network = world, network
        computed = self._computed if kind == "prefill" else None
        self.host = Host(world.server, self._ended, self._answered, self.view.events, computed)
        self._sender = Sender(number, self.host) if kind == "prefill" else None
        self.receiver = None
        if kind == "decode" and network is not None:
            self.receiver = Receiver(number, self.host, network, world.at, self._wake)
        self._targets: dict[int, _Node] = {}  # of prompts: who goes on with them
        self._asked: dict[SimulatedRequest, int] = {}  # tokens, as the router counts them
        self._works = self._woken = False

    def take(self, job: SimulatedRequest, tokens: int, target: _Node | None = None) -> None:
        """A job for this host, of so many tokens as the router counts them; `target`: who goes on with it."""
        self._ask(job, tokens)
        if target is not None:
            self._targets[job.index] = target
        self.host.take(job, self._world.now)
        self._wake()

    def expect(self, job: SimulatedRequest) -> None:
        """A job whose prompt comes from another host."""
        assert self.receiver is not None
        self._ask(job, job.trace.prompt_tokens)
        self.receiver.expect(job)

    def held(self, later: float) -> int:
        """What is left when every lease has ended, as at that time."""
        manager, result = self.host.manager, self.host.result
        now, result.now = result.now, later
        manager.commit()
        waiting = self.receiver.held() if self.receiver is not None else 0
        result.now = now
        cache = manager.cache
        held = len(manager.leases) + len(cache.tree.holds.active) + len(cache.reading) + len(cache.landed)
        return waiting + held + len(manager.requests) + len(manager.preempted)

    # What the router counts

    def _ask(self, job: SimulatedRequest, tokens: int) -> None:
        self._asked[job] = tokens
        self.view.tokens += tokens
        self.view.requests += 1

    def _answered(self, job: SimulatedRequest) -> None:
        if self.kind == "joint":
            self.view.tokens -= self._asked[job]
            self._asked[job] = 0

    def _computed(self, job: SimulatedRequest) -> None:
        assert self._sender is not None
        self._sender.export(job)

    def _ended(self, job: SimulatedRequest) -> None:
        self.view.tokens -= self._asked.pop(job)
        self.view.requests -= 1
        if self.kind != "prefill":
            self._world.on_done()

    # Steps

    def _wake(self) -> None:
        """There is something to do. A host at work sees it when it is through."""
        if not (self._works or self._woken):
            self._woken = True
            self._world.at(self._world.now, self._begin, _BEGIN)

    def _begin(self) -> None:
        self._woken, now = False, self._world.now
        self.host.result.now = max(self.host.result.now, now)
        if self.receiver is not None:
            for job in self.receiver.poll(now):
                self.host.take(job, now)
        ends = self.host.begin(now)
        self._send()
        self.view.update()
        if ends is not None:
            self._works = True
            self._world.at(ends, self._end, _END)

    def _end(self) -> None:
        self._works = False
        self.host.end()
        self._send()
        self._wake()

    def _send(self) -> None:
        if self._sender is None or self._network is None:
            return
        seconds, parts = self._sender.take_parts()
        for part in parts:
            receiver = self._targets[part.index].receiver
            assert receiver is not None
            arrives = self._world.now + seconds + self._network.link.latency
            self._world.at(arrives, functools.partial(receiver.receive, part, self._sender))
