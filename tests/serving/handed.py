"""Mixes on a decode host whose prompts are computed by another: unlike drafts, pools and policies, one record format.

What `Mix` compares stays the same: tokens, logits and bytes are those of lone, cold runs on the decode host.
"""

from __future__ import annotations

import dataclasses

import dsv4_jax as dsv4
from dsv4_jax.cache import KVCache
from dsv4_jax.errors import HandoffError, NoFreeSlotError, OutOfBlocksError
from dsv4_jax.manager import Arrival, CachePolicy, HostSize, KVCacheManager, Namespace, Request
from dsv4_jax.testing import StepRunner
from dsv4_jax.testing.mixes import Mix, host_size
from dsv4_jax.testing.serving import Mixes
from dsv4_jax.tiers.host_cache import HostCache
from dsv4_jax.tiers.remote import Peer, RecordTransport, RemoteDriver
from dsv4_jax.transports import open_engine

EXERCISED = (
    "hits from another host",
    "records from another host",
    "records that were here already",
    "streamed parts",
    "arrivals admitted early",
    "hand-offs lost",
    "hand-offs refused",
)
SIZE = dsv4.CacheSize(num_blocks=13, num_slots=2, max_blocks_per_request=8, num_snapshots=3)  # of the prefill host


class Prefill:
    """A host that computes prompts and answers nothing: one manager a mix, in the same arrays."""

    def __init__(self, runner: StepRunner):
        self.runner = runner
        self.cache = dsv4.init_cache(runner.layout, runner.size)
        self.host = dsv4.init_host_cache(runner.layout, host_size(runner).num_pages)
        self.transport = RecordTransport(open_engine("loopback"))
        self.metadata = self.transport.publish_host(self.host)

    def begin(self, weights_id: int) -> None:
        self.manager = KVCacheManager(
            self.runner.layout,
            SIZE,
            policy=CachePolicy(),
            host=HostSize(self.host.num_pages),
            weights_id=weights_id,
            arrays=self.runner.size,
        )
        self.driver = RemoteDriver(self.manager, self.transport)

    def step(self, request: Request, count: int) -> bool:
        """Whether there was room for it."""
        scheduled = self.manager.schedule(count, requests=[request], shape=self.runner.shape)
        if not scheduled:
            return False
        plan = self.manager.plan_step(scheduled, shape=self.runner.shape)
        self.transfer()
        _, self.cache = self.runner.run(self.cache, self.manager, plan)
        return True

    def transfer(self) -> None:
        self.cache, self.host = dsv4.run_transfers(self.cache, self.host, self.manager.take_transfers())

    def send(self) -> list[tuple[str, bytes]]:
        """Hand-offs whose bytes are on the host now: their leases, and as they are sent."""
        self.manager.flush()
        self.transfer()
        self.cache, self.host = _settled(self.cache, self.host)
        self.driver.poll(self.cache, self.host)
        return [(handoff.lease, handoff.to_json()) for handoff in self.driver.take_handoffs()]


@dataclasses.dataclass(eq=False)
class Coming:
    """A prompt on its way through the other host."""

    tokens: list[int]
    tenant: Namespace | None
    total: int
    there: Request | None
    lease: str = ""
    arrival: Arrival | None = None


class HandedMix(Mix):
    """A mix whose prompts mostly come through `prefill`, connected as `peer`."""

    prefill: Prefill
    transport: RecordTransport
    peer: Peer

    def run(self) -> None:
        self.prefill.begin(self.manager.hash_spec.weights_id[1])
        self.driver = RemoteDriver(self.manager, self.transport)
        self.coming: list[Coming] = []
        super().run()
        assert not self.coming
        while self.driver.busy:  # reads of what was admitted early
            self.poll()
        for manager in (self.manager, self.prefill.manager):
            for lease in list(manager.leases.active):
                manager.acknowledge(lease)
            manager.check_integrity()
            assert not manager.cache.tree.holds.active and not manager.cache.reading and not manager.cache.landed

    def admit(self, tokens: list[int]) -> None:
        self.prompts.append(tokens)
        if len(self.coming) >= self.waiting:
            return
        if self.chance(0.3):
            super().admit(tokens)
            return
        tenant = Namespace(tenant="other") if self.chance(0.1) else None
        total = len(tokens) + int(self.rng.integers(1, 1 + 12 * self.eighth))
        try:
            there = self.prefill.manager.admit_request(tokens, namespace=tenant)
        except NoFreeSlotError:
            return
        self.coming.append(Coming(tokens, tenant, total, there))

    def interfere(self) -> None:
        super().interfere()
        for coming in list(self.coming):
            if self.chance(0.8):
                self.prefill_step(coming)
            if coming.there is None and (coming.arrival is None or coming.arrival.is_over or self.chance(0.1)):
                self.take_over(coming)
        for lease, data in self.prefill.send():
            self.deliver(lease, data)
        for _ in range(100):
            self.poll()
            if not any(coming.arrival and coming.arrival.reads for coming in self.coming):
                break

    def poll(self) -> None:
        self.cache, self.host = _settled(self.cache, self.host)
        self.driver.poll(self.cache, self.host)

    def prefill_step(self, coming: Coming) -> None:
        """Some tokens there, and mostly the blocks they fill go out at once."""
        there, prefill = coming.there, self.prefill
        if there is None:
            return
        left = max(len(coming.tokens) - 1, 0) // prefill.runner.layout.block_tokens * 8 - there.num_cached
        try:
            went = left <= 0 or prefill.step(there, int(self.rng.integers(1, 1 + prefill.runner.shape.tokens)))
        except OutOfBlocksError:
            went = False
        if left <= 0 or self.chance(0.6) or not went:
            coming.lease = prefill.driver.export(there).lease
        if left <= 0 or not went:
            prefill.manager.release_request(there)
            coming.there = None

    def deliver(self, lease: str, data: bytes) -> None:
        coming = next((coming for coming in self.coming if coming.lease == lease), None)
        if coming is None or self.chance(0.05):
            self.seen["hand-offs lost"] += 1
            return
        try:
            arrival = self.driver.receive(data, self.peer, coming.tokens, namespace=coming.tenant)
            self.seen["streamed parts"] += coming.arrival is arrival
            if coming.arrival not in (None, arrival):
                self.driver.tier.close(coming.arrival)
            coming.arrival = arrival
        except HandoffError:
            self.seen["hand-offs refused"] += 1

    def take_over(self, coming: Coming) -> None:
        arrival, options = coming.arrival, dict(max_tokens=coming.total)
        try:
            if arrival is None:
                request = self.manager.admit_request(coming.tokens, namespace=coming.tenant, **options)
            else:
                self.seen["arrivals admitted early"] += not arrival.is_over
                request = self.manager.admit_remote(arrival, **options)
        except NoFreeSlotError:
            self.seen["waits for a slot"] += 1
            return
        self.coming.remove(coming)
        if arrival is not None:
            whole = arrival.state is not None and request.num_hit == arrival.total * 8
            self.seen["hits from another host"] += whole and arrival.records > 0
            self.seen["records from another host"] += arrival.records
            self.seen["records that were here already"] += max(arrival.joined - arrival.records, 0)
        self.enter(request, coming.tenant, coming.total)


class HandedMixes(Mixes):
    """Mixes on a decode host beside a prefill host."""

    def __init__(self, decode: StepRunner, prefill: StepRunner):
        super().__init__(decode)
        transport = RecordTransport(open_engine("loopback"))
        transport.publish_host(self.host)
        there = Prefill(prefill)
        self.kind = type(
            "Kind", (HandedMix,), dict(prefill=there, transport=transport, peer=transport.connect(there.metadata))
        )

    def run(self, seed: int, kind: type[Mix] | None = None) -> None:
        super().run(seed, kind or self.kind)

    @property
    def missing(self) -> list[str]:
        return [name for name in EXERCISED if not self.seen[name]]

    def close(self) -> None:
        self.kind.transport.close()
        self.kind.prefill.transport.close()


def _settled(cache: KVCache, host: HostCache) -> tuple[KVCache, HostCache]:
    """Both, once everything that was started has run."""
    for array in (host.pages, *cache.arrays.values()):
        array.block_until_ready()
    return cache, host
