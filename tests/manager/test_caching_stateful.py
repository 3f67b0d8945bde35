"""Random traces of the caching manager on a symbolic device: whatever a step reads is its own history."""

from __future__ import annotations

import collections
import os
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import NoFreeSlotError, OutOfBlocksError, RequestError
from dsv4_jax.manager import (
    CachePolicy,
    EventLog,
    HostSize,
    LeaseShares,
    Namespace,
    NamespaceShares,
    SnapshotPlacement,
    WritePolicy,
    scheduling,
)
from dsv4_jax.manager.policies import StatePlace
from dsv4_jax.manager.request import Request, RequestState
from dsv4_jax.plan import StepPlan
from dsv4_jax.records import state_blocks
from tests.manager.symbolic_device import SymbolicDevice

BLOCK = 8
LAYOUT = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=BLOCK)
CALLS = ["decode", "release", "preempt", "resume", "fork", "sleep", "edit", "fail"]
POLICIES = {
    "write_back": WritePolicy.write_back(),
    "write_through": WritePolicy.write_through(),
    "selective": WritePolicy.write_through_selective(2),
}


class Trace:
    """One random load. Counts what happened, so that a test can ask for all of it."""

    def __init__(
        self,
        seed: int,
        *,
        policy: str,
        drafts: int,
        host: HostSize,
        blocks: int,
        snapshots: int,
        ranks: int = 1,
        states: StatePlace = "slots",
        clock: Callable[[], float] = time.monotonic,
    ):
        self.random = random.Random(seed)
        cfg = DSV4Config.tiny(hca_ratio=8)
        self.layout = CacheLayout(cfg, block_tokens=BLOCK, draft_tokens=drafts)
        size = CacheSize(blocks // ranks, 4, 12, num_snapshots=snapshots, pool_ranks=ranks)
        few = NamespaceShares(0.9, {Namespace("b"): 0.1})
        self.apart = random.Random(~seed)  # what came later: the rest of the trace stays as it was
        shares = self.apart.choice([None, NamespaceShares(0.4), few])
        self.leases = LeaseShares(self.apart.choice([1.0, 0.7]), self.apart.choice([1.0, 0.6]), grace=0.01)
        placement = SnapshotPlacement(
            self.random.choice([None, 1, 2, 3]),
            self.random.random() < 0.8,
            True,
            self.random.random() < 0.8,
            self.random.choice([None, None, 1, 2]),
        )
        self.manager = KVCacheManager(
            self.layout,
            size,
            policy=CachePolicy(
                write=POLICIES[policy], snapshots=placement, shares=shares, states=states, leases=self.leases
            ),
            host=host,
            events=EventLog(),
            clock=clock,
        )
        self.device = SymbolicDevice(self.layout, size, host)
        self.spaces: dict[object, Namespace] = {}
        self.fed: dict[object, list[int]] = {}  # what the steps of each request were really fed
        self.did: collections.Counter[str] = collections.Counter()
        self.junctions: set[tuple[Namespace, tuple[int, ...]]] = set()
        self.texts = [[self.random.randrange(4) for _ in range(96)] for _ in range(3)]

    # Requests

    def admit(self) -> None:
        text = self.random.choice(self.texts)
        prompt = text[: self.random.randint(0, 80)]
        if self.random.random() < 0.3:
            prompt = prompt + [self.random.randrange(4) for _ in range(self.random.randint(0, 6))]
        space = Namespace(self.random.choice(["a", "a", "a", "b"]))
        for i in range(self.random.choice([1, 1, 1, 2])):  # several that share much may come together
            self.admit_one(prompt + [i] * 3 * i, space)

    def admit_one(self, prompt: list[int], space: Namespace) -> None:
        try:
            reuse = self.apart.choice(["output", "output", "prompt"])
            request = self.manager.admit_request(prompt, namespace=space, reuse=reuse)
        except NoFreeSlotError:
            live = self.manager.requests
            # Who starts anew after an abort has, until its next step, the snapshot's slot beside its own.
            held = len(live) + len(self.manager.cache.copies.late[1]) + len(self.manager.book.pinned())
            assert held >= 4
            return
        self.spaces[request.id] = space
        self.fed[request.id] = prompt[: request.num_cached]
        assert request.num_cached % BLOCK == 0 and (not request.num_cached or request.num_cached < len(prompt))
        self.did["hit"] += bool(request.num_cached)
        assert not request.junction or request.num_cached < request.junction < len(prompt)
        self.did["hit at a junction"] += (space, tuple(prompt[: request.num_cached])) in self.junctions
        if request.junction:
            self.junctions.add((space, tuple(prompt[: request.junction])))
        self.did["admitted"] += 1

    def release(self) -> None:
        if request := self.any_request():
            if self.random.random() < 0.3:  # the next turn of this conversation begins with it
                self.texts[self.random.randrange(3)] = (request.tokens + self.random.choices(range(4), k=96))[:96]
            (self.manager.abort_request if self.random.random() < 0.2 else self.manager.release_request)(request)
            assert request.state is RequestState.RELEASED
            self.catch_up()

    def schedule(self, budget: int, **options) -> list[tuple[Request, int]]:
        """What the manager offers. Newcomers may find more than at their admission, and wait only for who goes on."""
        before = {r: r.num_cached for r in self.manager.requests}
        asked = options.get("requests", before)
        scheduled = self.manager.schedule(budget, **options)
        self.manager.check_integrity()
        self.did["found more"] += any(r.num_cached > length for r, length in before.items())
        assert all(r.last_step <= r.started or r.num_cached == length for r, length in before.items())
        going = {r for r, _ in scheduled}
        waiting = [r for r in asked if r.num_pending > 1 and r in self.manager.steps.newcomers.waiting]
        self.did["waited"] += bool(set(waiting) - going)
        self.catch_up()
        return scheduled

    def catch_up(self) -> None:
        """After an abort forks may start anew behind more than they had been fed: somebody else was, meanwhile."""
        for request in self.manager.requests:
            fed = self.fed[request.id]
            fed += request.tokens[len(fed) : request.num_cached]

    def preempt(self) -> None:
        request = self.any_request()
        if request and len(request.tokens) >= request.num_cached:
            ref = request.ref
            assert self.manager.find(ref) is request
            self.manager.preempt(request)
            assert self.manager.find(ref) is None
            self.did["preempted"] += 1
            self.did["parked"] += request.parked is not None

    def resume(self, *, may_release: bool = True) -> None:
        waiting = self.manager.preempted
        if not waiting:
            return
        request = self.random.choice(waiting)
        if may_release and self.random.random() < 0.1:
            self.manager.release_request(request)
            return
        parked = request.parked
        try:
            self.manager.resume(request)
        except (NoFreeSlotError, OutOfBlocksError):
            assert request.state is RequestState.PREEMPTED and request.parked is parked
            return
        self.did["unparked"] += bool(parked and request.num_cached == parked.num_cached)
        self.did["resumed"] += 1
        fed = self.fed[request.id]
        fed += request.tokens[len(fed) : request.num_cached]  # a prompt that others have fed meanwhile

    def fork(self, request: Request | None = None) -> None:
        if request := request or self.any_request():
            ids = [None] * self.random.randint(1, 2)
            try:
                children = self.manager.fork(request, request_ids=ids)
            except (NoFreeSlotError, OutOfBlocksError):
                return
            for child in children:
                self.spaces[child.id] = self.spaces[request.id]
                self.fed[child.id] = list(self.fed[request.id])
                assert (child.tokens, child.num_cached) == (request.tokens, request.num_cached)
            self.did["forked"] += len(children)

    def edit(self) -> None:
        """The caller changes ids, fed or not: of what is computed it is refused, all else is what will be fed."""
        request = self.random.choice([*self.manager.requests, *self.manager.preempted] or [None])
        if not request or not request.tokens:
            return
        before, fed = list(request.tokens), self.fed[request.id]
        i = self.random.randrange(len(before))
        if len(request.history) < request.num_cached:
            return  # of K steps: noted by the manager's next call
        more = self.random.choices(range(4), k=self.random.randint(0, min(12, self.manager.context_limit - i)))
        how = self.random.randrange(4)
        if how == 0:
            request.tokens[i] = self.random.randrange(4)
        elif how == 1:
            del request.tokens[i:]
            request.tokens += more
        elif how == 2:
            request.tokens = [*before[:i], *more]
        elif len(before) < self.manager.context_limit:
            request.tokens.insert(i, self.random.randrange(4))
        same = next((j for j, (a, b) in enumerate(zip(before, request.tokens, strict=False)) if a != b), None)
        same = min(len(before), len(request.tokens)) if same is None else same
        if same >= min(request.num_cached, len(request.history)):
            del fed[max(same, request.num_cached) :]
            self.did["edited"] += same < len(before)
            return
        for refused in (self.manager.fork, lambda r: self.manager.plan_step([(r, 1)])):
            with pytest.raises(RequestError, match=f"token {same} was fed as"):
                refused(request)
        known = max(len(request.tokens), len(request.history)) >= request.num_cached
        if self.random.random() < 0.5 and known and not request.is_open:
            self.manager.preempt(request)
            del fed[same:]
            self.did["edited and preempted"] += 1
        else:
            request.tokens[same:] = before[same:]
            self.did["restored"] += 1

    def fail(self) -> None:
        """A step is planned and does not run; others come and go; the requests of the step are aborted."""
        scheduled = self.schedule(self.random.randint(1, 40), max_chunk=self.random.randint(1, 30))
        if not scheduled:
            return  # no request to abort: a plan of nothing but copies that does not run calls for `reset`
        try:
            self.manager.plan_step(scheduled)
        except OutOfBlocksError:
            self.make_room()
            return
        self.lose_or_run()
        failed = [request for request, _ in scheduled]
        started = {r: r.num_cached for r in self.manager.requests if r not in failed}
        for _ in range(self.random.randint(0, 3)):
            calls = ["admit", "commit", "commit", "resume", "preempt", "fork", "schedule"]
            if (call := self.random.choice(calls)) == "commit":
                self.manager.commit()
            elif call == "schedule":  # newcomers find what the lost step should have computed
                self.schedule(40)
            elif call == "preempt" and failed and self.random.random() < 0.5:
                if (request := self.random.choice(failed)) in self.manager.requests:
                    self.manager.preempt(request)
            elif call == "fork" and failed and (request := self.random.choice(failed)) in self.manager.requests:
                self.fork(request)
            elif call == "resume":
                self.resume(may_release=False)  # a request of the lost step is aborted, not released
            elif call == "admit":
                self.admit()
            self.manager.check_integrity()
            started |= {r: r.num_cached for r in self.manager.requests if r not in failed and r not in started}
        for request in failed:
            if request in self.manager.requests or request in self.manager.preempted:
                self.manager.abort_request(request)
            self.manager.check_integrity()
        self.catch_up()
        self.did["failed steps"] += bool(scheduled)
        self.did["started anew"] += any(r.num_cached < started[r] for r in self.manager.requests if r in started)

    def lose_or_run(self) -> None:
        """The transfers of a step that is lost: they have run, in part or not at all, too, when it was."""
        transfers = self.manager.take_transfers()
        most = self.random.choice([None, None, 0, self.random.randint(1, 6)])
        self.did["moved"] += self.device.transfer(transfers, most)
        self.did["lost transfers"] += not transfers.ran

    def sleep(self) -> None:
        self.manager.sleep()
        self.device.transfer(self.manager.take_transfers())
        self.device.wipe()
        stats = self.manager.stats()
        assert stats.blocks_free == stats.blocks_total and stats.slots_used == 0
        if self.random.random() < 0.4:
            self.manager.wakeup(weights_id=self.random.randrange(3))
            self.did["new weights"] += bool(self.manager.preempted)
        else:
            self.manager.wakeup()
        self.did["slept"] += 1

    # Steps

    def step(self) -> None:
        for request in self.manager.requests:
            room = self.manager.context_limit - len(request.tokens)
            if not request.num_pending and room:
                many = self.random.randint(1, 1 + self.layout.draft_tokens)
                request.tokens += self.random.choices(range(4), k=min(many, room))
        requests = list(self.manager.requests)
        if self.random.random() < 0.5:
            scheduled = self.schedule(self.random.randint(1, 40), max_chunk=self.random.randint(1, 30))
        else:
            self.random.shuffle(requests)
            scheduled = [(r, self.random.randint(1, r.num_pending)) for r in requests[:2] if r.num_pending]
        steps = 1
        if self.random.random() < 0.2:  # K decode steps in one plan
            steps, scheduled = self.random.randint(2, 9), [(r, 1) for r, _ in scheduled if r.num_pending == 1]
            scheduled = [(r, 1) for r, _ in scheduled if len(r.tokens) + steps - 1 <= self.manager.context_limit]
        try:
            plan = self.manager.plan_step(scheduled, steps=steps)
        except OutOfBlocksError:
            self.did["out of blocks"] += 1
            self.make_room()
            return
        for r, _ in scheduled if steps > 1 else ():
            r.tokens += self.random.choices(range(4), k=steps - 1)
        self.run_plan(plan, steps)
        self.did["fed"] += len(scheduled)
        for request, count in scheduled:
            if steps == 1 and self.layout.draft_tokens and 1 < count <= 1 + self.layout.draft_tokens:
                kept = self.random.randint(0, count)
                self.manager.accept(request, kept)
                del self.fed[request.id][request.num_cached :]
                self.did["rejected"] += count - kept

    def decode(self) -> None:
        """Some steps of the same rows, as most steps of an engine are."""
        for _ in range(self.random.randint(2, 5)):
            ahead = self.random.random() < 0.5  # of the tokens that the step before draws
            for r in self.manager.requests if not ahead else ():
                if not r.num_pending and len(r.tokens) < self.manager.context_limit:
                    r.tokens.append(self.random.randrange(4))
            shape = self.manager.pinned_shape(4, slot_copies=8, block_copies=40)
            scheduled = [feed for feed in self.schedule(4, shape=shape, ahead=ahead) if feed[1] == 1]
            try:
                plan = self.manager.plan_step(scheduled, shape=shape, ahead=ahead)
            except OutOfBlocksError:
                self.make_room()
                return
            if ahead:
                ids = self.manager.plan_tokens(plan, unknown=-1).tolist()
                for (r, _), token in zip(scheduled, ids, strict=False):
                    assert (token < 0) == (len(r.tokens) < r.num_cached)
                    if token < 0:
                        r.tokens.append(self.random.randrange(4))
                        self.did["ahead"] += 1
            self.run_plan(plan)
            self.did["decoded"] += len(scheduled)

    def run_plan(self, plan: StepPlan, steps: int = 1) -> None:
        self.did["moved"] += self.device.transfer(self.manager.take_transfers())
        ids, by_slot = self.manager.plan_tokens(plan).tolist(), {r.slot: r for r in self.manager.requests}
        assert self.manager.plan_tokens(plan).tolist() == ids
        for slot, start, count in zip(plan.seq_slot.tolist(), plan.seq_start.tolist(), plan.seq_count, strict=True):
            if not slot:
                continue
            request, row, ids = by_slot[slot], ids[:count], ids[count:]
            fed = self.fed[request.id]
            if fed[start : start + count]:  # again, after a preemption: as it was
                assert row[: len(fed) - start] == fed[start : start + count]
                self.did["fed again"] += 1
            later = request.tokens[start + count : start + steps]
            self.fed[request.id] = fed[:start] + row + (fed[start + count :] if start + count < len(fed) else later)
        tokens = {r.slot: self.fed[r.id] for r in self.manager.requests}
        weights = self.manager.weights_id
        spaces = {r.slot: (weights, self.spaces[r.id]) for r in self.manager.requests}
        for _ in range(steps + self.random.choice((0, 0, 3))):  # a step that was not reserved does nothing
            self.device.step(plan, spaces, tokens)
            plan = plan.advance()

    def make_room(self) -> None:
        if self.random.random() < 0.5:
            self.preempt()
        else:
            self.release()

    def any_request(self) -> Request | None:
        return self.random.choice(self.manager.requests) if self.manager.requests else None

    def run(self, steps: int) -> None:
        calls = {
            self.step: 12,
            self.decode: 3,
            self.admit: 6,
            self.release: 2,
            self.preempt: 2,
            self.resume: 3,
            self.fork: 1,
            self.edit: 2,
            self.fail: 2,
        }
        for _ in range(steps):
            if self.random.random() < 0.01:
                self.sleep()
            else:
                self.random.choices(list(calls), list(calls.values()))[0]()
            self.manager.check_integrity()
        self.end()

    def end(self) -> None:
        """Everything goes back. Copies that wait for a plan get one first."""
        self.manager.plan_step([])
        self.device.transfer(self.manager.take_transfers())
        for request in (*self.manager.requests, *self.manager.preempted):
            self.manager.release_request(request)
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.slots_used == stats.preempted == stats.tokens_cached == 0
        assert stats.cache.pools["device"].private == 0 == stats.cache.pools["slot"].private


class CachingMachine(RuleBasedStateMachine):
    """The same load, its order and its choices hypothesis's: what fails shrinks."""

    @initialize(
        seed=st.integers(0, 99),
        policy=st.sampled_from(sorted(POLICIES)),
        drafts=st.sampled_from([0, 1, 3, 7]),
        where=st.sampled_from([(1, "slots"), (2, "slots"), (1, "blocks")]),
        host=st.sampled_from([HostSize(0), HostSize.of(LAYOUT, 2, 1), HostSize(9), HostSize.of(LAYOUT, 12, 3)]),
        blocks=st.integers(12, 30),
        snapshots=st.integers(0, 5),
    )
    def start(self, seed: int, where: tuple[int, StatePlace], **options) -> None:
        more = 3 * state_blocks(LAYOUT) if where[1] == "blocks" else 0
        self.trace = Trace(seed, ranks=where[0], states=where[1], **options | {"blocks": options["blocks"] + more})

    @rule(call=st.sampled_from(["step"] * 6 + ["admit"] * 3 + CALLS), choices=st.randoms(use_true_random=False))
    def act(self, call: str, choices: random.Random) -> None:
        self.trace.random = choices
        getattr(self.trace, call)()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "trace"):
            self.trace.manager.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "trace"):
            self.trace.end()


TestCaching = pytest.mark.slow(CachingMachine.TestCase)
# 12,000 steps with RUN_SLOW=1; the traces below are as many at all times.
TestCaching.settings = settings(max_examples=150 if os.environ.get("RUN_SLOW") else 40, stateful_step_count=80)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_reads_its_own_history(policy: str, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    did: collections.Counter[str] = collections.Counter()
    for seed in range(12):
        monkeypatch.setattr(scheduling, "_MANY", (1, 128)[seed % 2])
        ranks = (1, 1, 2, 4)[seed % 4] if seed < 8 else 1  # of a pool axis
        states: StatePlace = "slots" if seed < 8 else "blocks"
        more = 0 if seed < 8 else (1 + seed % 4) * state_blocks(LAYOUT)
        host = HostSize(0) if seed == 0 else HostSize.of(LAYOUT, 3 + 5 * (seed % 3), 1 + seed % 3)
        trace = Trace(
            seed,
            policy=policy,
            drafts=drafts,
            host=host,
            blocks=14 + 6 * (seed % 3) + more,
            snapshots=seed % 4,
            ranks=ranks,
            states=states,
        )
        trace.run(250)
        did += trace.did
    happened = {
        "hit",
        "hit at a junction",
        "fed",
        "preempted",
        "parked",
        "unparked",
        "resumed",
        "forked",
        "slept",
        "moved",
        "out of blocks",
        "decoded",
        "edited",
        "edited and preempted",
        "restored",
        "lost transfers",
        "new weights",
        "fed again",
        "failed steps",
        "started anew",
        "ahead",
        "found more",
        "waited",
    }
    assert all(did[name] for name in happened | ({"rejected"} if drafts else set())), did
