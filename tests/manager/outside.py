"""Random loads of a manager from outside: tiny pools of all tiers, storage, new sizes, steps that never ran.

After every call the books agree, the events told so far add up to what is cached, and, when no copy is under way,
every cached unit of every tier holds the bytes that its digest stands for.

    python -m tests.manager.outside --rounds 1000 --first 0
"""

from __future__ import annotations

import argparse
import collections
import random
import warnings
from collections.abc import Sequence

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import (
    ContextLimitError,
    NoFreeSlotError,
    OutOfBlocksError,
    PlanError,
    RequestError,
)
from dsv4_jax.manager import (
    BlockHasher,
    CachePolicy,
    EventLog,
    HostSize,
    HostWatermark,
    Namespace,
    SnapshotPlacement,
    Tier,
    WritePolicy,
)
from dsv4_jax.manager.policies import EVICTION_POLICIES
from dsv4_jax.manager.prefix.node import NodeState, copies
from dsv4_jax.manager.request import Request
from dsv4_jax.manager.storage_tier import StorageMove, StorageTier
from dsv4_jax.plan import StateSwapPlan, SwapPlan
from tests.manager.symbolic_device import UNWRITTEN, State, SymbolicDevice, whole

BLOCK = 8
NARROW = dict(hca_ratio=8, layer_types=(AttentionType.HCA,) * 3, num_hash_layers=0, sliding_window=4)
REFUSED = (NoFreeSlotError, OutOfBlocksError, RequestError, ContextLimitError, PlanError)
WRITES = (WritePolicy.write_back(), WritePolicy.write_through(), WritePolicy.write_through_selective(2))
KINDS = {"block": SwapPlan, "slot": StateSwapPlan}
CALLS = dict(
    step=20,
    many_steps=2,
    admit=8,
    release=6,
    preempt=3,
    resume=4,
    fork=1,
    reserve=0.3,
    commit=1,
    lose_step=2,
    write=4,
    answer_writes=4,
    read=6,
    answer_reads=6,
    sleep=0.3,
    resize=0.4,
    reset=0.3,
    refuse=0.5,
)


class Outside:
    """One load. Everything about it follows from the seed."""

    def __init__(self, seed: int):
        self.random = r = random.Random(seed)
        wide = r.random() < 0.3  # states of 37 pages, else of 3
        cfg = DSV4Config.tiny(hca_ratio=8) if wide else DSV4Config.tiny(**NARROW)
        self.layout = CacheLayout(cfg, block_tokens=BLOCK, draft_tokens=r.choice([0, 0, 1, 3, 7]))
        self.host = HostSize(r.choice([60, 100] if wide and r.random() < 0.5 else [0, 1, 2, 3, 5, 7, 9, 12, 30]))
        low, high = sorted(r.choices([0, 0, 0.1, 0.3, 1], k=2))
        placement = SnapshotPlacement(
            r.choice([None, 1, 2, 3]), r.random() < 0.7, r.random() < 0.7, r.random() < 0.8, r.choice([None, 1, 2, 8])
        )
        policy = CachePolicy(
            r.choice(WRITES), placement, r.choice(list(EVICTION_POLICIES.values())), HostWatermark(low, high)
        )
        self.manager = KVCacheManager(
            self.layout,
            self.some_size(),
            policy=policy,
            host=self.host,
            events=EventLog(1 << 20),
            weights_id=seed,
        )
        self.storage = StorageTier(self.manager) if self.host.num_pages and r.random() < 0.6 else None
        self.fresh_device()
        self.stored: dict[tuple[str, bytes], State] = {}
        self.writes: list[list[tuple[StorageMove, State]]] = []  # on their way
        self.reads: list[list[StorageMove]] = []
        self.known: dict[bytes, State] = {}  # every digest of what was fed: namespace, and all tokens up to its end
        self.seen, self.told = 0, collections.defaultdict[Tier, set[bytes]](set)
        self.texts = [[r.randrange(3) for _ in range(120)] for _ in range(2)]
        self.did: collections.Counter[str] = collections.Counter()

    def some_size(self) -> CacheSize:
        r = self.random
        return CacheSize(
            r.choice([2, 5, 9, 14, 24, 40]), r.randint(1, 4), r.choice([2, 6, 12, 12]), r.choice([0, 0, 1, 2, 5])
        )

    def fresh_device(self) -> None:
        pages = self.device.pages if hasattr(self, "device") else {}
        self.device = SymbolicDevice(self.layout, self.manager.size, self.host)
        self.device.pages = pages

    def run(self, calls: int) -> None:
        for _ in range(calls):
            (name,) = self.random.choices(list(CALLS), list(CALLS.values()))
            getattr(self, name)()
            self.check()
        self.end()

    def any_of(self, requests) -> Request | None:
        return self.random.choice(requests) if requests else None

    # Requests

    def prompt(self) -> list[int]:
        text = self.random.choice(self.texts)[: self.random.randint(0, 100)]
        if self.random.random() < 0.3:
            text = text + [self.random.randrange(3) for _ in range(self.random.randint(0, 20))]
        return text[: min(self.manager.context_limit, self.manager.pool_limit)]

    def admit(self) -> None:
        space = Namespace(self.random.choice(["a", "a", "b"]))
        try:
            request = self.manager.admit_request(self.prompt(), namespace=space, request_id=self.name(space))
        except NoFreeSlotError:
            return
        self.did["hit"] += bool(request.num_cached)
        self.did["junction"] += bool(request.junction)

    def name(self, space: Namespace) -> tuple:
        self.count = getattr(self, "count", 0) + 1
        return space, self.count

    def release(self) -> None:
        if request := self.any_of([*self.manager.requests, *self.manager.preempted]):
            if self.random.random() < 0.3:
                more = self.random.choices(range(3), k=120)
                self.texts[self.random.randrange(2)] = (request.tokens + more)[:120]
            self.manager.release_request(request)

    def preempt(self) -> None:
        request = self.any_of(self.manager.requests)
        if request and len(request.tokens) >= request.num_cached:
            self.manager.preempt(request)
            self.did["parked"] += request.parked is not None

    def resume(self) -> None:
        if request := self.any_of(self.manager.preempted):
            parked = request.parked
            try:
                self.manager.resume(request)
            except (NoFreeSlotError, OutOfBlocksError):
                return
            self.did["unparked"] += bool(parked and request.num_cached == parked.num_cached)

    def fork(self) -> None:
        if request := self.any_of(self.manager.requests):
            names = [self.name(request.id[0]) for _ in range(self.random.randint(1, 2))]
            try:
                self.manager.fork(request, request_ids=names)
            except (NoFreeSlotError, OutOfBlocksError):
                return
            self.did["forked"] += 1

    def reserve(self) -> None:
        if request := self.any_of(self.manager.requests):
            try:
                self.manager.reserve(request, self.random.randint(0, 100))
            except (OutOfBlocksError, ContextLimitError):
                return

    def commit(self) -> None:
        self.manager.commit()

    # Steps

    def draw(self) -> None:
        for request in self.manager.requests:
            room = min(self.manager.context_limit, request.max_tokens) - len(request.tokens)
            if not request.num_pending and room > 0:
                many = self.random.randint(1, 1 + self.layout.draft_tokens)
                request.tokens += self.random.choices(range(3), k=min(many, room))

    def choose(self) -> list[tuple[Request, int]]:
        if self.random.random() < 0.6:
            shape = self.manager.pinned_shape(4, 40, slot_copies=12, block_copies=60)
            return self.manager.schedule(
                self.random.randint(1, 40),
                max_chunk=self.random.randint(1, 40),
                shape=self.random.choice([None, shape]),
            )
        waiting = [r for r in self.manager.requests if r.num_pending]
        self.random.shuffle(waiting)
        return [(r, self.random.randint(1, r.num_pending)) for r in waiting[: self.random.randint(1, 3)]]

    def step(self) -> None:
        self.draw()
        try:
            if not (scheduled := self.choose()) and self.random.random() < 0.7:
                self.release()
                self.admit()
                scheduled = self.choose()
            plan = self.manager.plan_step(scheduled)
        except OutOfBlocksError:
            (self.preempt if self.random.random() < 0.5 else self.release)()
            return
        except ContextLimitError as error:
            self.end_outgrown(error)
            return
        self.execute(plan, 1)
        self.did["fed"] += sum(count for _, count in scheduled)
        for request, count in scheduled:
            if self.layout.draft_tokens and 1 < count <= 1 + self.layout.draft_tokens and self.random.random() < 0.8:
                kept = self.random.randint(0, count)
                self.manager.accept(request, kept)
                self.did["rejected"] += count - kept

    def end_outgrown(self, error: ContextLimitError) -> None:
        """Ends a request that all blocks together hold no more of."""
        assert error.limit == self.manager.pool_limit < error.tokens
        self.manager.release_request(self.manager.book.ids[error.request])
        self.did["outgrown"] += 1

    def many_steps(self) -> None:
        self.draw()
        steps, chosen = self.random.randint(2, 12), []
        for request in self.manager.requests:
            room = min(self.manager.context_limit, request.max_tokens) - len(request.tokens)
            if request.num_pending == 1 and room >= steps - 1:
                chosen.append(request)
        try:
            plan = self.manager.plan_step([(request, 1) for request in chosen], steps=steps)
        except OutOfBlocksError:
            return
        except ContextLimitError as error:
            self.end_outgrown(error)
            return
        for request in chosen:
            request.tokens += self.random.choices(range(3), k=steps - 1)
        ran = self.random.choice((steps, steps + 3, self.random.randint(1, steps)))  # those not reserved do nothing
        self.execute(plan, ran, chosen if ran < steps else [])
        self.did["steps at once"] += len(chosen)
        self.did["steps left out"] += max(steps - ran, 0) * len(chosen)

    def execute(self, plan, steps: int, ended: Sequence[Request] = ()) -> None:
        """`ended`: requests of which fewer steps ran than were planned."""
        self.did["moved"] += self.device.transfer(self.manager.take_transfers())
        if self.random.random() < 0.7:
            self.manager.plan_tokens(plan)
        live = self.manager.requests
        for _ in range(steps):
            self.device.step(plan, {r.slot: r.id[0] for r in live}, {r.slot: r.tokens for r in live})
            plan = plan.advance()
        for request in ended:
            self.manager.accept(request, steps, steps=steps)
        for request in live:
            self.learn(request.id[0], request.tokens[: request.num_cached])

    def learn(self, space: Namespace, tokens: list[int]) -> None:
        digests = BlockHasher(self.manager.hash_spec, tokens, namespace=space).digests
        for i, digest in enumerate(digests):
            self.known[digest] = space, tuple(tokens[: (i + 1) * BLOCK])

    def lose_step(self) -> None:
        """A step is planned and never runs; others come and go; its requests are aborted."""
        self.draw()
        try:
            if not (scheduled := self.choose()):
                return  # no request to abort: a plan of nothing but copies that does not run calls for `reset`
            self.manager.plan_step(scheduled)
        except (OutOfBlocksError, ContextLimitError):
            return
        self.device.transfer(self.manager.take_transfers())
        failed = [request for request, _ in scheduled]
        for request in failed:
            self.learn(request.id[0], request.tokens[: request.num_cached])
        for _ in range(self.random.randint(0, 4)):
            call = self.random.choice(
                ["admit", "commit", "resume", "preempt", "fork", "reserve", "answer_writes", "answer_reads", "read"]
            )
            getattr(self, call)()
            self.manager.check_integrity()
        self.random.shuffle(failed)
        for request in failed:
            if request in self.manager.requests or request in self.manager.preempted:
                self.manager.abort_request(request)
            self.manager.check_integrity()
        self.did["lost"] += 1

    # Storage

    def write(self) -> None:
        if self.storage is None:
            return
        moves = self.storage.plan_writes(self.random.randint(1, 6))
        if moves:
            pages = self.device.pages
            self.writes.append([(move, whole(pages, move.pages, KINDS[move.scope])) for move in moves])

    def answer_writes(self) -> None:
        if self.storage is None or not self.writes:
            return
        batch = self.writes.pop(self.random.randrange(len(self.writes)))
        done = [self.random.random() < 0.8 for _ in batch]
        for (move, content), ok in zip(batch, done, strict=True):
            if ok:
                self.stored[move.scope, move.key] = content
        self.storage.finish_writes([move for move, _ in batch], done)
        self.did["written"] += sum(done)

    def read(self) -> None:
        if self.storage is None:
            return
        space = Namespace(self.random.choice("ab"))
        moves = self.storage.plan_reads(self.prompt(), self.has("block"), self.has("slot"), namespace=space)
        if moves:
            self.reads.append(moves)

    def has(self, scope: str):
        return lambda keys: [(scope, key) in self.stored for key in keys]

    def answer_reads(self) -> None:
        if self.storage is None or not self.reads:
            return
        moves = self.reads.pop(self.random.randrange(len(self.reads)))
        done = [self.random.random() < 0.85 for _ in moves]
        for move, ok in zip(moves, done, strict=True):
            if ok and self.storage.is_current(move):
                value = self.stored[move.scope, move.key]
                for i, page in enumerate(move.pages):
                    self.device.pages[page] = value, i, len(move.pages), KINDS[move.scope]
        self.storage.finish_reads(moves, done, lost=False)
        self.did["read"] += sum(done)

    # The whole cache

    def sleep(self) -> None:
        self.manager.sleep()
        self.device.transfer(self.manager.take_transfers())
        self.fresh_device()
        self.manager.wakeup()

    def resize(self) -> None:
        before = self.manager.size
        try:
            self.manager.resize(self.some_size())
        except ContextLimitError:
            assert self.manager.size == before
            return
        self.device.transfer(self.manager.take_transfers())
        self.fresh_device()
        self.did["resized"] += 1

    def reset(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        self.manager.reset()
        self.fresh_device()

    def refuse(self) -> None:
        """Calls that are refused change nothing."""
        m, r = self.manager, self.random
        request, foreign = self.any_of(m.requests), KVCacheManager(self.layout, CacheSize(3, 2, 3))
        other = foreign.admit_request([1, 2, 3])
        calls = [
            lambda: m.admit_request([0] * (m.context_limit + 1)),
            lambda: m.admit_request([0, -1]),
            lambda: m.release_request(other),
            lambda: m.plan_step([(other, 1)]),
            lambda: m.resume(other),
            lambda: m.fork(other),
            lambda: m.accept(other, 0),
            lambda: m.wakeup(),
            lambda: m.resize(None),
            lambda: m.plan_tokens(foreign.plan_step([(other, 3)])),
            lambda: m.schedule(0),
        ]
        if request:
            calls += [
                lambda: m.plan_step([(request, 1), (request, 1)]),
                lambda: m.plan_step([(request, 0)]),
                lambda: m.plan_step([(request, 1000)]),
                lambda: m.fork(request, request_ids=[request.id]),
                lambda: m.admit_request([1], request_id=request.id),
                lambda: m.resume(request),
                lambda: m.reserve(request, 10**6),
                lambda: m.accept(request, 10**6),
            ]
        before = m.stats()._replace(cache=None), m.events.last
        r.shuffle(calls)
        for call in calls[:4]:
            try:
                call()
            except REFUSED:
                continue
            raise AssertionError("it was not refused")
        failures = m.stats()._replace(cache=None), m.events.last
        assert failures == before

    # What must hold

    def check(self) -> None:
        self.manager.check_integrity()
        self.replay()
        self.compare()

    def replay(self) -> None:
        events, missed = self.manager.events.since(self.seen)
        assert not missed
        for event in events:
            assert event.sequence == self.seen + 1
            self.seen, told = event.sequence, self.told[event.tier]
            if event.kind == "cleared":
                self.told.clear()
            elif event.kind == "stored":
                assert event.digest not in told and (event.parent is None or self.somewhere(event.parent))
                told.add(event.digest)
            else:
                told.remove(event.digest)
        has = collections.defaultdict(set)
        for digest, node in self.manager.cache.tree.nodes.published.items():
            for tier in copies(node):
                has[tier].add(digest)
        for tier in (Tier.DEVICE, Tier.HOST, Tier.STORAGE):
            assert has[tier] == self.told[tier], f"{tier.name}: the events tell of other blocks than there are"

    def somewhere(self, digest: bytes) -> bool:
        return any(digest in told for told in self.told.values())

    def compare(self) -> None:
        cache, device = self.manager.cache, self.device
        if cache.is_waiting or self.manager.has_transfers or cache.copies.slots or cache.copies.blocks:
            return
        self.did["compared"] += 1
        for digest, node in cache.tree.nodes.published.items():
            space, tokens = self.known[digest]
            block, state, snapshot = (space, tokens[-BLOCK:]), (space, tokens), node.snapshot
            if node.state in (NodeState.DEVICE, NodeState.BACKING_UP):
                assert device.blocks.get(node.block) == block, f"{node}: {device.blocks.get(node.block)}"
            if Tier.HOST in copies(node):
                assert whole(device.pages, (node.host,), SwapPlan) == block, f"{node} on the host"
            if node.stored:
                assert self.stored["block", digest] == block
            if snapshot is not None and snapshot.device:
                found = device.states.get(snapshot.device, UNWRITTEN)
                assert device.state_at(found, len(tokens)) == state, f"{node}: state {found}"
            if snapshot is not None and snapshot.host:
                assert whole(device.pages, snapshot.host, StateSwapPlan) == state, f"{node}: state on the host"
            if snapshot is not None and snapshot.stored:
                assert self.stored["slot", digest] == state
        for request in self.manager.preempted:
            if (parked := request.parked) is not None:
                state = request.id[0], tuple(request.tokens[: parked.num_cached])
                assert whole(device.pages, tuple(parked.state), StateSwapPlan) == state

    def end(self) -> None:
        """Everything goes back."""
        self.execute(self.manager.plan_step([]), 1)
        for request in (*self.manager.requests, *self.manager.preempted):
            self.manager.release_request(request)
        self.check()
        while self.writes or self.reads:
            self.answer_writes()
            self.answer_reads()
        self.check()
        stats = self.manager.stats()
        assert stats.slots_used == stats.preempted == stats.tokens_cached == 0
        assert not any(pool.private for pool in stats.cache.pools.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--calls", type=int, default=200, help="of a round (default: 200)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    did: collections.Counter[str] = collections.Counter()
    for seed in range(args.first, args.first + args.rounds):
        load = Outside(seed)
        try:
            load.run(args.calls)
        except BaseException:
            print(f"seed {seed}")
            raise
        did += load.did
    print(f"{args.rounds} rounds of {args.calls} calls: {dict(sorted(did.items()))}")


if __name__ == "__main__":
    main()
