"""Prompts are computed on one host, answers on another: two processes, each with its own manager and draft width.

The prefill host computes prompts, and tells of each block as soon as it is full; the decode host fetches what it does
not have, block by block, while later chunks of the prompt are still being computed, and goes on with drafts. This
process is the router: it knows from the decode host's events which prefixes lie there, and sends a prompt to the
prefill host only if there is much to compute. Kill either host, lose what they say, tear what they send: requests end
all the same, with the answers of runs that are alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

import dsv4_jax as dsv4
from dsv4_jax import model
from dsv4_jax.errors import HandoffError, NoFreeSlotError, OutOfBlocksError, PlanError, TransferError
from dsv4_jax.manager import Arrival, BlockHasher, CachePolicy, EventLog, HashSpec, HostSize, Request
from dsv4_jax.tiers.host_memory import host_memory
from dsv4_jax.tiers.remote import Peer, RecordTransport, RemoteDriver
from dsv4_jax.transports import open_engine

EXAMPLES = """
examples:
  python examples/disaggregated.py                            16 requests
  python examples/disaggregated.py --fault kill-prefill       and the prefill host dies in the middle of it
  python examples/disaggregated.py --fault torn-record --json numbers for a script
"""
FAULTS = ("none", "kill-prefill", "kill-decode", "lost-acknowledgement", "stale-lease", "torn-record")
SWA, CSA, HCA = dsv4.AttentionType
CONFIG = dsv4.DSV4Config.tiny(layer_types=(CSA, HCA), num_hash_layers=0)
BLOCK, MAX_TOKENS, STEP_TOKENS, DRAFTS = 16, 192, 48, 2
LEASE, PATIENCE = 3.0, 5.0  # seconds: of a lease; that a decode host waits for a prompt that nobody tells of
WORTH = 2  # blocks to compute from which on a prompt goes to the prefill host


class Host:
    """One process: an engine, its transport, and the router at the other end of a pipe."""

    def __init__(self, pipe: Connection, fault: str, drafts: int, size: dsv4.CacheSize, blocks: int):
        self.pipe, self.fault = pipe, fault
        self.layout = dsv4.CacheLayout(CONFIG, "f32", "f32", block_tokens=BLOCK, draft_tokens=drafts)
        self.params = model.init_params(CONFIG, seed=0)
        self.events, host = EventLog(), HostSize.of(self.layout, blocks, 6)
        self.manager = dsv4.KVCacheManager(
            self.layout, size, policy=CachePolicy(), host=host, weights_id="seed 0", events=self.events
        )
        self.cache, self.host = dsv4.init_cache(self.layout, size), dsv4.init_host_cache(self.layout, host.num_pages)
        self.shape = self.manager.pinned_shape(size.num_slots, STEP_TOKENS, history=True)
        self.jitted = jax.jit(model.forward, donate_argnames="cache")
        self.step([])  # which compiles it
        self.transport = RecordTransport(open_engine("loopback"), timeout=PATIENCE)
        metadata = self.transport.publish_host(self.host)
        self.driver = RemoteDriver(self.manager, self.transport)
        self.seen = 0
        pipe.send(("ready", metadata, self.manager.hash_spec))

    def step(self, scheduled: list[tuple[Request, int]]) -> np.ndarray:
        """The likeliest token behind each token of the step."""
        plan = self.manager.plan_step(scheduled, shape=self.shape)
        self.transfer()
        tokens = self.manager.plan_tokens(plan)
        logits, self.cache = self.jitted(self.params, self.cache, plan.pack(), tokens)
        return np.asarray(logits.argmax(-1))

    def transfer(self) -> None:
        self.cache, self.host = dsv4.run_transfers(self.cache, self.host, self.manager.take_transfers())

    def poll(self) -> None:
        """What goes on beside the steps, and the events that the router wants."""
        self.manager.flush()
        self.transfer()
        self.driver.poll(self.cache, self.host)
        events, _ = self.events.since(self.seen)
        if events:
            self.seen = events[-1].sequence
            self.pipe.send(("events", [(event.kind, event.tier, event.digest) for event in events]))

    def run(self) -> None:
        """Until the router says so, or is gone."""
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError), self.transport:
            while True:
                busy = self.serve()
                self.poll()
                while self.pipe.poll(0 if busy else 0.005):
                    word, *what = self.pipe.recv()
                    if word == "stop":
                        return
                    getattr(self, word)(*what)
                    busy = True

    def serve(self) -> bool:
        """One step. Whether there was anything to do."""
        raise NotImplementedError

    def held(self) -> None:
        """What is held for other hosts, or of them: nothing, once leases are over."""
        self.manager.commit()
        self.manager.check_integrity()
        cache = self.manager.cache
        held = len(self.manager.leases) + len(cache.tree.holds.active) + len(cache.reading) + len(cache.landed)
        self.pipe.send(("held", held + len(self.manager.requests) + len(self.manager.preempted)))


class PrefillHost(Host):
    """Computes prompts up to their last block boundary, and tells of them."""

    def __init__(self, pipe: Connection, fault: str):
        super().__init__(pipe, fault, 0, dsv4.CacheSize(30, 2, 12, num_snapshots=4), 40)
        self.waiting: list[tuple[int, list[int]]] = []
        self.live: dict[Request, int] = {}
        self.numbers: dict[str, int] = {}  # by lease

    def prompt(self, number: int, tokens: list[int]) -> None:
        self.waiting.append((number, tokens))

    def serve(self) -> bool:
        with contextlib.suppress(NoFreeSlotError):
            while self.waiting:
                self.live[self.manager.admit_request(self.waiting[0][1])] = self.waiting[0][0]
                self.waiting.pop(0)
        for request, number in list(self.live.items()):
            end = (len(request.tokens) - 1) // BLOCK * BLOCK
            if request.num_cached < end:  # one chunk of one prompt a turn: others are told of meanwhile
                self.step([(request, min(STEP_TOKENS, end - request.num_cached))])
            self.numbers[self.driver.export(request, seconds=LEASE).lease] = number
            if request.num_cached == end:
                self.manager.release_request(request)
                del self.live[request]
        for handoff in self.driver.take_handoffs():
            if self.fault == "torn-record" and handoff.blocks:
                host_memory(self.host)[handoff.blocks[0]] ^= 1
            self.pipe.send(("handoff", self.numbers[handoff.lease], handoff.to_json()))
        return bool(self.live or self.driver.busy)


@dataclasses.dataclass(eq=False)
class Job:
    """A request at the decode host; `until`: when nobody waits for its prompt any more."""

    number: int
    tokens: list[int]
    count: int
    until: float
    arrival: Arrival | None = None


class DecodeHost(Host):
    """Answers: from what another host has computed, from what lies here, from nothing."""

    def __init__(self, pipe: Connection, fault: str):
        super().__init__(pipe, fault, DRAFTS, dsv4.CacheSize(22, 3, 12, num_snapshots=3), 30)
        self.peer: Peer | None = None
        self.waiting: dict[int, Job] = {}
        self.live: dict[Request, Job] = {}
        self.late: list[tuple[float, int, bytes]] = []
        if fault == "lost-acknowledgement":
            self.transport.notify = lambda peer, message: None  # type: ignore[method-assign]

    def connect(self, metadata: bytes) -> None:
        if self.peer is not None:
            self.transport.disconnect(self.peer)
        self.peer = None
        with contextlib.suppress(TransferError):
            self.peer = self.transport.connect(metadata)

    def request(self, number: int, tokens: list[int], count: int, remote: bool) -> None:
        self.waiting[number] = Job(number, tokens, count, time.monotonic() + (PATIENCE if remote else 0))

    def alone(self, number: int) -> None:
        """Nobody computes this prompt any more."""
        if number in self.waiting:
            self.waiting[number].until = 0

    def handoff(self, number: int, data: bytes) -> None:
        wait = 1.2 * LEASE if self.fault == "stale-lease" else 0
        self.late.append((time.monotonic() + wait, number, data))

    def serve(self) -> bool:
        now = time.monotonic()
        for item in [item for item in self.late if item[0] <= now]:
            self.late.remove(item)
            job = self.waiting.get(item[1])
            if job is not None and self.peer is not None:
                with contextlib.suppress(HandoffError):  # of another life of the prefill host, say
                    job.arrival = self.driver.receive(item[2], self.peer, job.tokens)
                    job.until = now + PATIENCE
        for job in list(self.waiting.values()):
            if now >= job.until or (job.arrival is not None and job.arrival.is_over):
                with contextlib.suppress(NoFreeSlotError):
                    self.start(job)
        while self.manager.preempted and not self.manager.requests:
            self.manager.resume(self.manager.preempted[0])
        if scheduled := self.manager.schedule(STEP_TOKENS - 3 * DRAFTS, shape=self.shape):
            self.decode(scheduled)
        elif self.manager.requests:
            self.manager.preempt(self.manager.requests[-1])
        return bool(self.live)

    def start(self, job: Job) -> None:
        limit = dict(max_tokens=len(job.tokens) + job.count)
        if job.arrival is None:
            request = self.manager.admit_request(job.tokens, **limit)
        else:
            request = self.manager.admit_remote(job.arrival, **limit)  # what has not come is computed here
        del self.waiting[job.number]
        self.live[request] = job
        records = job.arrival.records if job.arrival is not None else 0
        why = job.arrival.failure if job.arrival is not None else None
        self.pipe.send(("started", job.number, request.num_hit, records, why))

    def decode(self, scheduled: list[tuple[Request, int]]) -> None:
        """A step of these tokens, and of drafts if there are blocks for them."""
        drafted = [(request, count + self.draft(request)) for request, count in scheduled]
        try:
            sampled = self.step(drafted).tolist()
        except (OutOfBlocksError, PlanError):  # nothing has changed, and what was scheduled fits
            for (request, more), (_, count) in zip(drafted, scheduled, strict=True):
                del request.tokens[len(request.tokens) - (more - count) :]
            drafted, sampled = scheduled, self.step(scheduled).tolist()
        first = 0
        for request, count in drafted:
            self.keep(request, count, sampled[first : first + count])
            first += count

    def draft(self, request: Request) -> int:
        """Adds what followed the last token before, if it is a decode; how many tokens."""
        if request.num_pending != 1 or len(request.tokens) <= request.num_prompt:
            return 0
        text, most = request.tokens, min(DRAFTS, request.max_tokens - len(request.tokens))
        last = next((i for i in range(len(text) - 2, -1, -1) if text[i] == text[-1]), None)
        drafts = [] if last is None else text[last + 1 : last + 1 + most]
        request.tokens += drafts
        return len(drafts)

    def keep(self, request: Request, count: int, sampled: list[int]) -> None:
        """Keeps of a step what would have been sampled, and samples the next token."""
        first, kept = request.num_cached - count, count
        if request.num_pending:
            return  # in the middle of its prompt
        if first >= request.num_prompt and count <= 1 + DRAFTS:
            kept = 1
            while kept < count and request.tokens[first + kept] == sampled[kept - 1]:
                kept += 1
            self.manager.accept(request, kept)
        request.tokens.append(sampled[kept - 1])
        if len(request.tokens) >= request.max_tokens:
            job = self.live.pop(request)
            self.manager.release_request(request)
            self.pipe.send(("done", job.number, request.tokens[len(job.tokens) :][: job.count]))

    def lone(self, tokens: list[int], count: int) -> None:
        """The answer to a request that runs alone, from an empty cache that keeps nothing."""
        size = self.manager.size
        manager, cache = dsv4.KVCacheManager(self.layout, size), dsv4.init_cache(self.layout, size)
        request = manager.admit_request(tokens)
        while len(request.tokens) < len(tokens) + count:
            computed = min(request.num_pending, STEP_TOKENS)
            plan = manager.plan_step([(request, computed)], shape=self.shape)
            logits, cache = self.jitted(self.params, cache, plan.pack(), manager.plan_tokens(plan))
            if not request.num_pending:
                request.tokens.append(int(np.asarray(logits.argmax(-1))[computed - 1]))
        self.pipe.send(("lone", request.tokens[len(tokens) :]))


def serve(kind: str, pipe: Connection, fault: str) -> None:
    """Runs one host, in a process of its own."""
    {"prefill": PrefillHost, "decode": DecodeHost}[kind](pipe, fault).run()


# The router


class Child:
    """A host's process, and the pipe to it."""

    def __init__(self, kind: str, fault: str):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(kind, theirs, fault), daemon=True)
        self.process.start()
        theirs.close()
        _, self.metadata, self.hash_spec = self.wait("ready")
        self.alive = True

    def tell(self, *what: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(what)

    def heard(self) -> list[tuple[Any, ...]]:
        """What it has said; of a host that has died the last words."""
        messages = []
        try:
            while self.pipe.poll(0):
                messages.append(self.pipe.recv())
        except (EOFError, ConnectionResetError):
            self.alive = False
        return messages

    def wait(self, word: str) -> tuple[Any, ...]:
        """What it says with this word."""
        while (message := self.pipe.recv())[0] != word:
            pass
        return message

    def stop(self) -> None:
        self.tell("stop")
        self.process.join(10)
        self.process.kill()


@dataclasses.dataclass(eq=False)
class Asked:
    """What a user asked for."""

    number: int
    tokens: list[int]
    count: int
    answer: list[int] | None = None


class Router:
    """Sends prompts to the host that is to compute them, and again when it has died."""

    def __init__(self, fault: str):
        self.fault, self.counts = fault, collections.Counter[str]()
        self.asked: list[Asked] = []
        self.held: set[bytes] = set()  # digests of blocks at the decode host
        self.prefill, self.decode = Child("prefill", fault), Child("decode", fault)
        self.decode.tell("connect", self.prefill.metadata)

    def ask(self, tokens: list[int], count: int) -> None:
        self.asked.append(Asked(len(self.asked), tokens, count))
        self.send(self.asked[-1])

    def send(self, asked: Asked) -> None:
        spec: HashSpec = self.decode.hash_spec
        digests = BlockHasher(spec, asked.tokens).digests[: (len(asked.tokens) - 1) // BLOCK]
        there = next((i for i, digest in enumerate(digests) if digest not in self.held), len(digests))
        remote = len(digests) - there >= WORTH
        self.counts["sent to the prefill host" if remote else "sent to the decode host alone"] += 1
        self.decode.tell("request", asked.number, asked.tokens, asked.count, remote)
        if remote:
            self.prefill.tell("prompt", asked.number, asked.tokens)

    @property
    def open(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.answer is None]

    def turn(self) -> None:
        multiprocessing.connection.wait([self.prefill.pipe, self.decode.pipe], 0.01)
        for word, *what in self.prefill.heard():
            if word == "handoff":
                self.counts["hand-offs"] += 1
                self.decode.tell("handoff", *what)
        for word, *what in self.decode.heard():
            if word == "events":
                for kind, _, digest in what[0]:
                    self.held.add(digest) if kind == "stored" else self.held.discard(digest)
            elif word == "started":
                _, hit, records, why = what
                self.counts.update(
                    {"tokens found": hit, "records fetched": records, "hand-offs given up": why is not None}
                )
            elif word == "done":
                self.asked[what[0]].answer = what[1]
        if not self.prefill.alive:
            self.counts["hosts that died"] += 1
            self.prefill = Child("prefill", self.fault)
            self.decode.tell("connect", self.prefill.metadata)
            for asked in self.open:
                self.decode.tell("alone", asked.number)
        if not self.decode.alive:
            self.counts["hosts that died"] += 1
            self.decode, self.held = Child("decode", self.fault), set()
            self.decode.tell("connect", self.prefill.metadata)
            for asked in self.open:
                self.send(asked)

    def kill(self, kind: str) -> None:
        process = getattr(self, kind).process
        process.kill()
        process.join()
        self.turn()  # which starts another

    def finish(self) -> int:
        """What the hosts hold once leases are over: nothing."""
        until = time.monotonic() + 4 * LEASE
        while True:
            held = 0
            for child in (self.prefill, self.decode):
                child.tell("held")
                held += child.wait("held")[1]
            if not held or time.monotonic() > until:
                return held
            time.sleep(LEASE / 8)

    def close(self) -> None:
        self.prefill.stop(), self.decode.stop()


def prompts(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Returns prompts that ask about two documents."""
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> list[int]:
        return rng.integers(0, CONFIG.vocab_size, rng.integers(low, high + 1)).tolist()

    documents = [text(64, 100) for _ in range(2)]
    return [(documents[rng.integers(2)] + text(4, 50), int(rng.integers(8, 20))) for _ in range(count)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="what goes wrong (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    router, start = Router(args.fault), time.perf_counter()
    try:
        waiting = prompts(args.requests, args.seed)
        victim = {"kill-prefill": "prefill", "kill-decode": "decode"}.get(args.fault)
        while waiting or router.open:
            while waiting and len(router.open) < 4:
                router.ask(*waiting.pop(0))
            router.turn()
            if victim and len(router.asked) - len(router.open) >= args.requests // 4:  # answered
                router.kill(victim)
                victim = None
        numbers: dict[str, Any] = {"answered": len(router.asked), "seconds": round(time.perf_counter() - start, 2)}
        wrong = 0
        for asked in router.asked:
            router.decode.tell("lone", asked.tokens, asked.count)
            wrong += router.decode.wait("lone")[1] != asked.answer
        numbers |= {**router.counts, "wrong": wrong, "held": router.finish()}
    finally:
        router.close()
    print(json.dumps(numbers, indent=2) if args.json else "\n".join(f"{name:32}{n:>8}" for name, n in numbers.items()))
    return 1 if wrong or numbers["held"] else 0


if __name__ == "__main__":
    sys.exit(main())
