"""Prompts are computed on one host, answers on another: two processes, each with its own engine and draft width.

The prefill host computes prompts, and tells of blocks as soon as they are full; the decode host fetches what it does
not have while later chunks of the prompt are still being computed, and goes on with drafts. This process is the
router: it knows from the decode host's events which prefixes lie there, and sends a prompt to the prefill host only if
there is much to compute. Kill either host, lose what they say, tear what they send: requests end all the same, with
the answers of runs that are alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing as mp
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.managers import SyncManager
from typing import Any

import numpy as np

import dsv4_jax as dsv4
from dsv4_jax import model
from dsv4_jax.engine import Engine, Handle, Limits, Prompt
from dsv4_jax.errors import HandoffError, PeerError
from dsv4_jax.manager import BlockHasher, EventLog, Handoff, HashSpec, HostSize
from dsv4_jax.tiers.remote import Peer, RecordTransport
from dsv4_jax.transports import ENGINES, open_engine

EXAMPLES = """
examples:
  python examples/disaggregated.py                            16 requests, both hosts on this machine
  python examples/disaggregated.py --fault kill-prefill       and the prefill host dies in the middle of it
  python examples/disaggregated.py --fault torn-record --json numbers for a script
on two machines that trust each other:
  python examples/disaggregated.py --engine jax --address 10.0.0.7:7000 --prefill     on 10.0.0.7, then elsewhere:
  python examples/disaggregated.py --engine jax --address 10.0.0.7:7000
"""
FAULTS = ("none", "kill-prefill", "kill-decode", "lost-acknowledgement", "stale-lease", "torn-record")
CONFIG = dsv4.DSV4Config.tiny(layer_types=(dsv4.AttentionType.CSA, dsv4.AttentionType.HCA), num_mtp_layers=1)
BLOCK, LEASE, PATIENCE = 16, 3.0, 5.0  # tokens; seconds: of a lease; that a prompt of which nobody tells is waited for
WORTH = 2  # blocks to compute from which on a prompt goes to the prefill host
SIZES = {  # drafts, cache and host blocks of each host
    "prefill": (0, dsv4.CacheSize(30, 2, 12, num_snapshots=4), 40),
    "decode": (2, dsv4.CacheSize(22, 3, 12, num_snapshots=3), 30),
}
KEY = b"dsv4_jax"  # of processes, for one another
LOST = EOFError, OSError  # what a call of a host that has died raises


class Host:
    """What a process serves: an engine and its transport. Every call comes in a thread of its own."""

    peer: Peer | None = None

    def __init__(self, kind: str, engine: str, address: str, fault: str):
        drafts, size, blocks = SIZES[kind]
        small: Any = dict(block_tokens=BLOCK, draft_tokens=drafts, include_drafts=True)
        layout, params = dsv4.CacheLayout(CONFIG, "f32", "f32", **small), model.init_params(CONFIG, drafts=True)
        self.of, limits = (params, layout, size), Limits(patience=PATIENCE, lease=LEASE)
        self.options: Any = dict(chunk_tokens=48, drafts=drafts, weights_id="seed 0", limits=limits)
        reached = open_engine(engine, **(dict(address=address) if engine == "jax" and address else {}))
        self.transport = RecordTransport(reached, timeout=PATIENCE)
        if fault == "lost-acknowledgement":
            self.transport.notify = lambda peer, message: None  # type: ignore[method-assign]
        self.fault, self.seen, self.handles = fault, 0, dict[int, Handle]()
        here: Any = dict(host=HostSize.of(layout, blocks, 6), events=[EventLog()], transport=self.transport)
        self.engine = Engine.of(*self.of, **here, **self.options)
        self.engine.warm_up()

    def about(self) -> tuple[int, bytes | None, HashSpec]:
        """Its process, what others connect with, and what its digests are made of."""
        return os.getpid(), self.transport.published, self.engine.managers[0].hash_spec

    def compute(self, tokens: list[int]) -> Iterator[bytes | None]:
        """The parts of a hand-off, as they can be told; None at the end if that is not all."""
        parts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        handle = self.engine.add(Prompt(tokens=tokens, export=parts.put))
        if self.fault == "stale-lease":
            handle.result(), time.sleep(1.2 * LEASE)
        while not (handle.done and parts.empty()):
            with contextlib.suppress(queue.Empty):
                handoff = Handoff.from_json(parts.get(timeout=0.01))
                if self.fault == "torn-record" and handoff.sums:
                    handoff = dataclasses.replace(handoff, sums=(bytes(len(handoff.sums[0])), *handoff.sums[1:]))
                yield handoff.to_json()
        if handle.result().finish != "handoff":
            yield None

    def connect(self, metadata: bytes) -> None:
        if self.peer is not None:
            self.transport.disconnect(self.peer)  # who waits for it goes on alone
        self.peer = self.transport.connect(metadata)

    def add(self, number: int, tokens: list[int], count: int, remote: bool) -> None:
        asked = Prompt(tokens=tokens, max_new_tokens=count, peer=self.peer if remote else None, id=number)
        self.handles[number] = self.engine.add(asked)

    def receive(self, number: int, part: bytes | None) -> None:
        with contextlib.suppress(HandoffError, PeerError):  # of another life of the prefill host, say
            self.engine.receive(number, part)

    def result(self, number: int) -> tuple[list[int], int]:
        done = self.handles.pop(number).result()
        return done.tokens, done.cached

    def events(self) -> list[tuple[str, bytes | None]]:
        """What has changed in its cache since it was asked."""
        new, _ = self.engine.events(self.seen)
        self.seen += len(new)
        return [(event.kind, event.digest) for event in new]

    def alone(self, asked: list[tuple[list[int], int]]) -> list[list[int]]:
        """The answers to requests that find nothing of others."""
        with Engine.of(*self.of, policy=None, **self.options) as engine:
            answers = engine.run(Prompt(tokens=tokens, max_new_tokens=count) for tokens, count in asked)
            return [samples[0].tokens for samples in answers]

    def held(self) -> int:
        """What is held for other hosts, or of them: nothing, once leases are over."""
        manager, now = self.engine.managers[0], self.engine.stats()
        held = len(manager.leases) + sum(pool.private for pool in manager.stats().cache.pools.values())
        return held + now.live + now.queued + now.preempted


SyncManager.register("Host", Host, method_to_typeid={"compute": "Iterator"})  # a process that makes and calls them


class Router:
    """Sends prompts to the host that is to compute them, and again when it has died. Called from many threads."""

    def __init__(self, engine: str, fault: str, address: tuple[str, int] | None):
        self.engine, self.fault, self.address = engine, fault, address
        self.counts, self.held, self.lock = Counter[str](), set[bytes](), threading.Lock()  # digests at the decode host
        with ThreadPoolExecutor() as pool:
            self.hosts = dict(zip(SIZES, pool.map(self.start, SIZES), strict=True))
        self.spec: HashSpec = self.hosts["decode"].about()[2]
        self.join()

    def start(self, kind: str) -> Any:
        """A host, by way of a process of its own, or of one on another machine."""
        remote = self.address if kind == "prefill" else None
        process: Any = SyncManager(remote, KEY, ctx=mp.get_context("spawn"))
        process.connect() if remote else process.start()
        host = process.Host(kind, self.engine, remote[0] if remote else "", self.fault)
        host.process = process  # which ends when nobody knows it any more
        return host

    def join(self) -> None:
        self.hosts["decode"].connect(self.hosts["prefill"].about()[1])

    def mend(self) -> None:
        """Starts again who has died."""
        with self.lock:
            for kind, host in self.hosts.items():
                try:
                    host.about()
                except LOST:
                    self.counts["hosts that died"] += 1
                    self.hosts[kind] = self.start(kind)
                    self.held = set() if kind == "decode" else self.held
                    self.join()

    def worth(self, decode: Any, tokens: list[int]) -> bool:
        """Whether so much of a prompt is not at the decode host that the prefill host is to compute it."""
        with self.lock:
            for kind, digest in decode.events():
                self.held.add(digest) if kind == "stored" else self.held.discard(digest)
            digests = BlockHasher(self.spec, tokens).digests[: (len(tokens) - 1) // BLOCK]
            there = next((i for i, digest in enumerate(digests) if digest not in self.held), len(digests))
            return len(digests) - there >= WORTH

    def answer(self, number: int, tokens: list[int], count: int) -> list[int]:
        while True:
            prefill, decode = self.hosts.values()
            with contextlib.suppress(*LOST):
                remote = self.worth(decode, tokens)
                self.counts["sent to the prefill host" if remote else "sent to the decode host alone"] += 1
                decode.add(number, tokens, count, remote)
                with contextlib.suppress(*LOST):
                    for part in prefill.compute(tokens) if remote else ():
                        self.counts["parts of hand-offs"] += 1
                        decode.receive(number, part)
                self.mend()  # if it was the prefill host, this one goes on alone
                answer, found = decode.result(number)
                self.counts["tokens found"] += found
                return answer
            self.mend()


def prompts(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Returns prompts that ask about two documents."""
    rng = np.random.default_rng(seed)
    documents, each = rng.integers(0, CONFIG.vocab_size, (2, 90)), rng.integers((0, 4, 8), (2, 51, 20), (count, 3))
    ends = (rng.integers(0, CONFIG.vocab_size, more) for _, more, _ in each)
    return [([*documents[i].tolist(), *next(ends).tolist()], int(answer)) for i, _, answer in each]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(None, None, __doc__, EXAMPLES, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="what goes wrong (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engine", choices=ENGINES, default="loopback", help="what moves records (default: loopback)")
    place = lambda text: (text.rpartition(":")[0], int(text.rpartition(":")[2]))  # noqa: E731
    parser.add_argument("--address", type=place, metavar="HOST:PORT", help="of the prefill host, on another machine")
    parser.add_argument("--prefill", action="store_true", help="be that prefill host, until somebody ends it")
    args = parser.parse_args(argv)
    if args.prefill if args.address is None else args.fault == "kill-prefill":
        parser.error("--prefill needs an --address; --fault kill-prefill is for a process of one's own, without")
    if args.prefill:
        SyncManager(args.address, KEY).get_server().serve_forever()

    router, start = Router(args.engine, args.fault, args.address), time.perf_counter()
    asked, answers, victim = prompts(args.requests, args.seed), list[list[int]](), args.fault.removeprefix("kill-")
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(router.answer, range(len(asked)), *zip(*asked, strict=True)):
            answers.append(answer)
            if len(answers) == args.requests // 4 and victim in router.hosts:
                os.kill(router.hosts[victim].about()[0], signal.SIGKILL)
    numbers: dict[str, Any] = {"answered": len(answers), "seconds": round(time.perf_counter() - start, 2)}
    wrong, until = sum(map(list.__ne__, router.hosts["decode"].alone(asked), answers)), time.monotonic() + 4 * LEASE
    while (held := sum(host.held() for host in router.hosts.values())) and time.monotonic() < until:
        time.sleep(LEASE / 8)  # leases end
    numbers |= {**router.counts, "wrong": wrong, "held": held}
    print(json.dumps(numbers, indent=2) if args.json else "\n".join(f"{name:32}{n:>8}" for name, n in numbers.items()))
    return 1 if wrong or held else 0


if __name__ == "__main__":
    sys.exit(main())
