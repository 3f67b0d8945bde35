"""Random mixes of requests through a manager that does all it can; every result is compared with a lone, cold run.

A mix: 3..12 requests with shared, repeated and continued prompts in tight pools, under a random policy, with chunks of
odd sizes, preemption, forks, drafts of which some are rejected, aborts and sleep. Of every request that ends (and of
some on their way) the tokens sampled, the logits of every token it fed and the bytes that its next token would see have
to be those of `StepRunner.alone`, bit by bit.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses

import numpy as np

from ..cache import KVCache
from ..errors import NoFreeSlotError, OutOfBlocksError, PlanError
from ..layout import CacheSize
from ..manager import CachePolicy, HostSize, KVCacheManager, Namespace, Request, SnapshotPlacement, WritePolicy
from ..manager.policies import EVICTION_POLICIES, SnapshotKind
from ..manager.prefix.node import T
from ..tiers.host_cache import HostCache
from ..tiers.transfers import run_transfers
from .live import assert_same_bytes
from .runner import StepRunner, with_garbage

__all__ = ["Mix", "MixJob", "host_size"]


def host_size(runner: StepRunner) -> HostSize:
    """Returns the size of the host arrays that mixes of this runner use: half its blocks, and its snapshots."""
    return HostSize.of(runner.layout, runner.size.num_blocks // 2, runner.size.num_snapshots)


@dataclasses.dataclass(eq=False)
class MixJob:
    """A request, and what is known of it beside its tokens.

    Attributes:
        tenant: whose prefixes it shares.
        total: tokens at which it ends.
        streams: per token, whose random numbers drew it; None: the prompt's.
        stream: whose keys the next ones are sampled with; 0: greedy.
        logits: of the positions that it fed itself.
    """

    request: Request
    tenant: Namespace | None
    total: int
    streams: list[int | None]
    stream: int
    logits: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def draw(self, position: int, logits: np.ndarray) -> int:
        """Returns the token at a position, from the logits of the one before it."""
        return _draw(self.stream, position, logits)

    def append(self, token: int) -> None:
        self.request.tokens.append(token)
        self.streams.append(self.stream)


def _draw(stream: int, position: int, logits: np.ndarray) -> int:
    noise = np.random.default_rng((stream, position)).gumbel(size=logits.shape) if stream else 0.0
    return int((logits + noise).argmax())


class Mix:
    """One mix. `cache` and `host` are taken over with whatever bytes they hold, and left behind."""

    def __init__(self, runner: StepRunner, cache: KVCache, host: HostCache, seed: int, seen: collections.Counter[str]):
        rng = self.rng = np.random.default_rng((20, seed))
        self.branches = self.chance(0.3)  # whether nearly all prompts begin alike, and states are kept where they part
        self.runner, self.cache, self.host, self.seen = runner, cache, host, seen
        whole, n = runner.size, runner.size.max_blocks_per_request
        size = CacheSize(
            min(self.pick([n, n, n + 1, n + 2, n + n // 2, 2 * n, whole.num_blocks]), whole.num_blocks),
            int(rng.integers(2, 1 + whole.num_slots)),
            n,
            int(rng.integers(0, 1 + whole.num_snapshots)),
        )
        if self.branches:
            size = dataclasses.replace(size, num_snapshots=whole.num_snapshots)
        blocks, states = rng.integers(1, 1 + whole.num_blocks // 2), rng.integers(0, 1 + whole.num_snapshots)
        records = HostSize.of(runner.layout, int(blocks), int(states))
        self.manager = KVCacheManager(
            runner.layout,
            size,
            policy=self._policy(),
            host=records if self.chance(0.85) else None,
            weights_id=seed,
            arrays=whole,
        )
        self.jobs: dict[Request, MixJob] = {}
        # Lengths in units of an eighth of a block: prompts of up to five blocks and a half, outputs of one and a half
        # (less of either where the context ends before that: small blocks, or few of a request).
        self.eighth = max(1, runner.layout.block_tokens // 8)
        self.waiting = int(rng.integers(3, 9)) + 4 * self.branches
        self.forks, self.streams = 3, 0
        self.bases = [self.text(8 * self.eighth, 40 * self.eighth) for _ in range(2)]
        self.prompts: list[list[int]] = []
        self.junctions: set[tuple[Namespace | None, tuple[int, ...]]] = set()
        self.ended: list[MixJob] = []

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def text(self, low: int, high: int) -> list[int]:
        return self.rng.integers(0, self.runner.vocab_size, self.rng.integers(low, high + 1)).tolist()

    def pick(self, items):
        return items[int(self.rng.integers(len(items)))]

    def _policy(self) -> CachePolicy | None:
        if not self.branches and self.chance(0.05):
            return None
        write = self.pick(
            [
                WritePolicy.write_through(),
                WritePolicy.write_through_selective(1),
                WritePolicy.write_back(),
                WritePolicy.write_through_selective(2),
                WritePolicy.write_back(),
            ]
        )
        placement = SnapshotPlacement(
            self.pick([None, None, None, 1, 2, 3]),
            self.chance(0.7),
            self.chance(0.7),
            self.chance(0.8),
            self.pick([None, None, 1, 2]),
        )
        if self.branches or placement == SnapshotPlacement.none():
            placement = SnapshotPlacement(doubling=None)
        return CachePolicy(write, placement, eviction=EVICTION_POLICIES[self.pick([*EVICTION_POLICIES])])

    # The loop

    def run(self) -> None:
        """Until every request has ended."""
        for _ in range(2000):
            if not self.waiting and not self.jobs:
                break
            self.interfere()
            self.step()
        else:
            raise AssertionError("the mix does not come to an end")
        self.replay()
        manager = self.manager
        manager.commit()
        manager.check_integrity()
        assert not manager.requests and not manager.preempted
        counters = manager.stats().cache.counters
        self.seen.update(
            {
                "hits on the device": counters.hit_tokens[T.DEVICE],
                "hits on the host": counters.hit_tokens[T.HOST],
                "evictions from the device": counters.evicted[T.DEVICE],
                "evictions from the host": counters.evicted[T.HOST],
                "snapshot evictions": counters.evicted_snapshots,
                "duplicate blocks": counters.duplicates,
                "adopted blocks": counters.adoptions,
                "lookups": counters.lookups,
            }
        )

    def replay(self) -> None:
        """Reads what the cache has in the end of the latest requests, as another one would find it."""
        if self.chance(0.3):
            self.sleep()
        for tokens, tenant in [(job.request.tokens, job.tenant) for job in self.ended[-3:]]:
            request = self.manager.admit_request(tokens, namespace=tenant)
            if request.num_cached:
                self.seen["replayed tokens"] += request.num_cached
                job = self.jobs[request] = MixJob(request, tenant, len(tokens), [None] * len(tokens), 0)
                self.feed([(request, min(request.num_pending, self.runner.shape.tokens))])
                self.check(job)
                del self.jobs[request]
            self.manager.abort_request(request)

    def interfere(self) -> None:
        """Does one thing that a scheduler, or its user, may do between two steps."""
        manager, live = self.manager, list(self.manager.requests)
        if self.waiting and (not self.jobs or self.chance(0.4)):
            self.admit(self.prompt())
            while self.waiting and self.chance(0.2):  # another with the same prompt, side by side
                self.admit(list(self.prompts[-1]))
        if live and self.chance(0.07):
            manager.preempt(self.pick(live))
            self.seen["preemptions"] += 1
        if manager.preempted and (not manager.requests or self.chance(0.25)):
            self.resume()
        if manager.requests and self.forks and self.chance(0.06):
            self.fork(self.pick(manager.requests))
        if manager.requests and self.chance(0.015):
            request = self.pick(manager.requests)
            manager.abort_request(request)
            del self.jobs[request]
            self.seen["aborts"] += 1
        if manager.requests and self.chance(0.03):
            self.reserve(self.pick(manager.requests))
        if manager.requests and self.chance(0.02):
            self.lose_step()
        if manager.preempted and self.chance(0.05):
            self.rewrite(self.pick(manager.preempted))
        if self.chance(0.02):
            self.sleep()
        if self.chance(0.004):
            manager.reset()
            self.jobs.clear()
            self.seen["resets"] += 1
        manager.check_integrity()

    def prompt(self) -> list[int]:
        kind, most = self.rng.random(), min(44 * self.eighth, self.manager.context_limit - 1)
        if self.branches and self.chance(0.8):
            tokens = self.bases[0] + self.text(1, 12 * self.eighth)
        elif kind < 0.2 and self.prompts:
            tokens = list(self.pick(self.prompts))
        elif kind < 0.5 and self.ended:
            tokens = self.pick(self.ended).request.tokens + self.text(0, 8 * self.eighth)
        elif kind < 0.9:
            base = self.pick(self.bases)
            tokens = base[: int(self.rng.integers(1, len(base) + 1))] if self.chance(0.5) else list(base)
            tokens += self.text(0, 12 * self.eighth)
        else:
            tokens = self.text(1, most)
        return tokens[:most]

    def admit(self, tokens: list[int]) -> None:
        total = min(len(tokens) + int(self.rng.integers(1, 1 + 12 * self.eighth)), self.manager.context_limit)
        tenant = Namespace(tenant="other") if self.chance(0.1) else None
        try:
            request = self.manager.admit_request(tokens, max_tokens=total, namespace=tenant)
        except NoFreeSlotError:
            self.seen["waits for a slot"] += 1
            return
        self.prompts.append(tokens)
        self.enter(request, tenant, total)

    def enter(self, request: Request, tenant: Namespace | None, total: int) -> None:
        """A request of the mix is live now, and ends at so many tokens."""
        self.waiting -= 1
        self.jobs[request] = MixJob(request, tenant, total, [None] * request.num_prompt, self.stream())
        tokens = request.tokens
        self.seen["requests"] += 1
        self.seen["prefixes restored from device snapshots"] += request.restores is not None
        self.seen["hits at a junction"] += (tenant, tuple(tokens[: request.num_cached])) in self.junctions
        if self.keeps_for_its_junction(request):
            self.junctions.add((tenant, tuple(tokens[: request.junction])))

    def keeps_for_its_junction(self, request: Request) -> bool:
        """Whether it will keep a state where it leaves what is cached, and for no other reason."""
        policy, junction = self.manager.policy, request.junction
        if policy is None or not junction or not policy.snapshots.junctions:
            return False
        facts = dict(prompt_tokens=request.num_prompt, block_tokens=self.runner.layout.block_tokens)
        return policy.snapshots.at(junction, **facts) is SnapshotKind.NONE

    def stream(self) -> int:
        self.streams += 1
        return self.streams if self.chance(0.5) else 0

    def resume(self) -> None:
        request = self.pick(self.manager.preempted)
        parked = request.parked
        try:
            self.manager.resume(request)
        except (NoFreeSlotError, OutOfBlocksError):
            assert self.manager.requests, "an empty cache has no room for one request"
            return
        if parked is not None and request.num_cached == parked.num_cached:
            self.seen["resumes from parked state"] += 1
        else:
            self.seen["resumes from a cached prefix" if request.num_cached else "resumes from nothing"] += 1

    def fork(self, request: Request) -> None:
        count = int(self.rng.integers(1, 1 + self.forks))
        try:
            children = self.manager.fork(request, request_ids=[None] * count)
        except (NoFreeSlotError, OutOfBlocksError):
            return
        parent = self.jobs[request]
        for child in children:
            self.jobs[child] = MixJob(
                child, parent.tenant, parent.total, list(parent.streams), self.stream(), dict(parent.logits)
            )
            assert child.tokens == request.tokens and child.blocks is not request.blocks
        self.forks -= count
        self.seen["forks"] += count
        self.seen["forks before the first step"] += count * (request.last_step == 0)

    def reserve(self, request: Request) -> None:
        """Takes all blocks of a request at once, if they can be had."""
        with contextlib.suppress(OutOfBlocksError):
            self.manager.reserve(request, self.jobs[request].total)
            self.seen["reservations"] += 1

    def lose_step(self) -> None:
        """A step that is planned and never runs, with its transfers or without them; its requests are aborted."""
        scheduled = self.manager.schedule(self.runner.shape.tokens, shape=self.runner.shape)
        if not scheduled:
            return  # no request to abort: a plan of nothing but copies that does not run calls for `reset`
        self.manager.plan_step(scheduled, shape=self.runner.shape)
        if self.chance(0.5):
            self.transfer()
            self.seen["lost steps"] += 1
        else:
            self.seen["lost transfers"] += len(self.manager.take_transfers()) > 0
        for request, _ in scheduled:
            self.manager.abort_request(request)
            del self.jobs[request]

    def rewrite(self, request: Request) -> None:
        """A preempted request is to go on from another text, which begins as its own does."""
        job, keep = self.jobs[request], int(self.rng.integers(1, 1 + len(request.tokens)))
        del request.tokens[keep:], job.streams[keep:]
        more = self.text(0, min(4 * self.eighth, job.total - 1 - keep)) if keep < job.total - 1 else []
        request.tokens += more
        job.streams += [None] * len(more)
        job.logits = {position: logits for position, logits in job.logits.items() if position < keep}
        self.seen["rewritten"] += 1

    def sleep(self) -> None:
        self.manager.sleep()
        self.transfer()
        self.cache = with_garbage(self.cache, self.rng)
        self.manager.wakeup()
        self.seen["sleeps"] += 1

    # A step

    def step(self) -> None:
        manager, rng = self.manager, self.rng
        budget, chunk = rng.integers(1, 1 + self.runner.shape.tokens, 2).tolist()
        scheduled = manager.schedule(budget, max_chunk=chunk, shape=self.runner.shape)
        if not scheduled and manager.requests:
            self.seen["steps without enough blocks"] += 1
            assert len(manager.requests) > 1, "one request alone must fit"
            manager.preempt(manager.requests[-1])
            self.seen["preemptions"] += 1
            return
        fed = self.feed(scheduled)
        if self.chance(0.1) and fed and (job := self.pick(fed)).request.num_cached:
            self.check(job)
        for job in fed:
            request = job.request
            if len(request.tokens) >= job.total:
                self.check(job)
                self.ended.append(job)
                manager.release_request(request)
                del self.jobs[request]

    def feed(self, scheduled: list[tuple[Request, int]]) -> list[MixJob]:
        """Plans and runs one step, and does with its logits what is to be done. Whose."""
        manager = self.manager
        plan, scheduled = self.plan(scheduled)
        manager.check_integrity()
        starts = dict(zip(plan.seq_slot.tolist(), plan.seq_start.tolist(), strict=True))
        firsts = dict(zip(plan.seq_slot.tolist(), plan.seq_first.tolist(), strict=True))
        self.transfer()
        logits, self.cache = self.runner.run(self.cache, manager, plan)
        self.seen["steps"] += 1
        fed = []
        for request, count in scheduled:
            job, slot = self.jobs[request], request.slot
            rows = logits[firsts[slot] :][:count]
            job.logits.update(zip(range(starts[slot], starts[slot] + count), rows, strict=True))
            self.keep(job, starts[slot], rows)
            fed.append(job)
        manager.check_integrity()
        return fed

    def plan(self, scheduled: list[tuple[Request, int]]):
        """The plan of these tokens, some with drafts if blocks and table entries reach: (plan, scheduled)."""
        room, drafted = self.runner.shape.tokens - sum(count for _, count in scheduled), []
        most = self.runner.layout.draft_tokens
        for request, count in scheduled:
            job, drafts = self.jobs[request], 0
            if request.num_pending == 1 and len(request.tokens) > request.num_prompt and most and self.chance(0.5):
                drafts = min(int(self.rng.integers(1, 1 + most)), room, job.total - len(request.tokens))
                request.tokens += self.drafts(request, drafts)
                room -= drafts
            drafted.append((request, count + drafts))
        try:
            return self.manager.plan_step(drafted, shape=self.runner.shape), drafted
        except (OutOfBlocksError, PlanError):  # nothing has changed: the tokens scheduled must fit
            for (request, count), (_, less) in zip(drafted, scheduled, strict=True):
                del request.tokens[len(request.tokens) - (count - less) :]
            return self.manager.plan_step(scheduled, shape=self.runner.shape), scheduled

    def drafts(self, request: Request, count: int) -> list[int]:
        """Returns what followed the last token before, in this request or another; else anything."""
        last, known = request.tokens[-1], [request.tokens, *(job.request.tokens for job in self.ended)]
        followers = [text[i + 1 : i + 1 + count] for text in known for i in range(len(text) - count) if text[i] == last]
        return list(self.pick(followers)) if followers and self.chance(0.8) else self.text(count, count)

    def keep(self, job: MixJob, start: int, rows: np.ndarray) -> None:
        """Accepts what was fed, as far as it is what would have been sampled, or less; samples the next token."""
        request, count = job.request, len(rows)
        drafted = len(request.tokens) - len(job.streams)
        kept = count
        if drafted:
            ahead = request.tokens[start + 1 : start + count]
            right = 0
            while right < drafted and ahead[right] == job.draw(start + 1 + right, rows[right]):
                right += 1
            kept = 1 + right if self.chance(0.85) else int(self.rng.integers(0, 2 + right))
            self.seen["drafts accepted"] += max(kept - 1, 0)
            self.seen["drafts rejected"] += count - max(kept, 1)
            job.streams += [job.stream] * drafted
        first, stream = request.tokens[start], job.streams[start]
        if drafted or self.chance(0.5):
            self.manager.accept(request, kept)
        del job.streams[len(request.tokens) :]
        for position in range(start + kept, start + count):
            del job.logits[position]
        if not kept:
            self.seen["steps taken back whole"] += 1
            request.tokens.append(first)
            job.streams.append(stream)
        elif not request.num_pending:
            job.append(job.draw(len(request.tokens), rows[kept - 1]))

    def transfer(self) -> None:
        stages = self.manager.take_transfers()
        for stage in stages[:]:
            plans = (stage.swap_out, stage.snapshot, stage.swap_in, stage.restore)
            for name, plan in zip(("blocks out", "snapshots out", "blocks in", "snapshots in"), plans, strict=True):
                self.seen[name] += 0 if plan is None else int((plan.device_ids > 0).sum())
        self.cache, self.host = run_transfers(self.cache, self.host, stages)

    # The comparison

    def check(self, job: MixJob) -> None:
        """Tokens, logits and bytes are those of a lone run."""
        request, tokens = job.request, job.request.tokens
        assert len(job.streams) == len(tokens)
        lone = self.runner.alone(tokens[: request.num_cached])
        for position, logits in job.logits.items():
            if position >= request.num_cached:
                continue  # of before it was preempted: to be fed again
            self.seen["logits compared"] += 1
            same = logits.view(np.uint32) == lone.logits[position].view(np.uint32)
            assert same.all(), f"{request}: logits of position {position} differ in {(~same).sum()} of {same.size}"
        for position, stream in enumerate(job.streams[: request.num_cached + 1]):
            if stream is not None:
                drawn = _draw(stream, position, lone.logits[position - 1])
                assert tokens[position] == drawn, f"{request}: token {position} is {tokens[position]}, not {drawn}"
        assert_same_bytes(self.runner.live(self.cache, request), lone.live, f"{request}")
        self.seen["comparisons"] += 1
