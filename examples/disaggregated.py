"""Prompts are computed on one host, answers on another: two processes, each with its own engine and draft width.

The prefill host tells of blocks as soon as they are full; the decode host fetches what it lacks while later chunks of
the prompt are still being computed, and goes on with drafts. This process is the router: it knows from the decode
host's events what lies there, and sends a prompt to the prefill host if there is much to compute. Kill a host, lose
what it says, tear what it sends: requests end all the same, with the answers of runs that are alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.managers import SyncManager
from typing import Any

import numpy as np

import dsv4_jax as dsv4
from dsv4_jax.engine import Engine, Handle, Limits, Prompt
from dsv4_jax.errors import HandoffError, PeerError
from dsv4_jax.manager import BlockHasher, EventLog, Handoff, HashSpec, HostSize
from dsv4_jax.tiers.remote import Peer, RecordTransport
from dsv4_jax.transports import ENGINES, open_engine

EXAMPLES = """
examples:
  python examples/disaggregated.py                            16 requests, both hosts on this machine
  python examples/disaggregated.py --fault kill-prefill       and the prefill host dies in the middle of it
on two machines that trust each other:
  python examples/disaggregated.py --engine jax --address 10.0.0.7:7000 --prefill     on 10.0.0.7, then elsewhere:
  python examples/disaggregated.py --engine jax --address 10.0.0.7:7000
"""
FAULTS = ("none", "kill-prefill", "kill-decode", "lost-acknowledgement", "stale-lease", "torn-record")
CONFIG = dsv4.DSV4Config.tiny(layer_types=(dsv4.AttentionType.CSA, dsv4.AttentionType.HCA), num_mtp_layers=1)
BLOCK, WORTH = 16, 2  # tokens; blocks to compute from which on a prompt goes to the prefill host
LIMITS = Limits(lease=3.0, patience=5.0)  # seconds: of a lease; that a prompt of which nobody tells is waited for
SIZES = {  # drafts, cache and host tier of each host
    "prefill": (0, dsv4.CacheSize(30, 2, 12, num_snapshots=4), HostSize(136)),
    "decode": (2, dsv4.CacheSize(22, 3, 12, num_snapshots=3), HostSize(126)),
}
KEY = b"dsv4_jax"  # of processes, for one another
LOST = EOFError, OSError  # what a call of a host that has died raises


class Host:
    """What a process serves: an engine and its transport. Every call comes in a thread of its own."""

    peer: Peer | None = None

    def __init__(self, kind: str, engine: str, address: str, fault: str):
        drafts, size, host = SIZES[kind]
        layout = dsv4.CacheLayout(CONFIG, "f32", "f32", block_tokens=BLOCK, draft_tokens=drafts, include_drafts=True)
        self.of = (dsv4.model.init_params(CONFIG, drafts=True), layout, size)
        self.options: Any = dict(chunk_tokens=48, drafts=drafts, weights_id="seed 0", limits=LIMITS)
        reached = open_engine(engine, **(dict(address=address) if engine == "jax" and address else {}))
        self.transport = RecordTransport(reached, timeout=LIMITS.patience)
        if fault == "lost-acknowledgement":
            self.transport.notify = lambda peer, message: None  # type: ignore[method-assign]
        self.fault, self.seen, self.handles = fault, 0, dict[int, Handle]()
        self.engine = Engine.of(*self.of, host=host, events=[EventLog()], transport=self.transport, **self.options)
        self.engine.warm_up()

    def about(self) -> tuple[int, bytes | None, HashSpec]:
        """Its process, what others connect with, and what its digests are made of."""
        return os.getpid(), self.transport.published, self.engine.managers[0].hash_spec

    def compute(self, tokens: list[int]) -> Iterator[bytes | None]:
        """The parts of a hand-off, as they can be told; None at the end if that is not all."""
        parts = deque[bytes]()
        handle = self.engine.add(Prompt(tokens=tokens, export=parts.append))
        if self.fault == "stale-lease":
            handle.result(), time.sleep(1.2 * LIMITS.lease)
        while not handle.done or parts:
            time.sleep(0.01)
            while parts:
                handoff = Handoff.from_json(parts.popleft())
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
            return [one.tokens for (one,) in engine.run(Prompt(tokens=t, max_new_tokens=n) for t, n in asked)]

    def held(self) -> int:
        """What is held for other hosts, or of them: nothing, once leases are over."""
        manager = self.engine.managers[0]
        return len(manager.leases) + sum(pool.private for pool in manager.stats().cache.pools.values())


SyncManager.register("Host", Host, method_to_typeid={"compute": "Iterator"})  # a process that makes and calls them


class Router:
    """Sends prompts to the host that is to compute them, and again when it has died. Called from many threads."""

    def __init__(self, engine: str, fault: str, address: tuple[str, int] | None):
        self.engine, self.fault, self.address = engine, fault, address
        self.counts, self.held, self.lock = Counter[str](), set[bytes](), threading.Lock()  # digests at the decode host
        with ThreadPoolExecutor() as pool:
            self.hosts = dict(zip(SIZES, pool.map(self.start, SIZES), strict=True))
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

    def mend(self) -> dict[str, Any]:
        """Starts again who has died. Returns all."""
        with self.lock:
            for kind, host in self.hosts.items():
                try:
                    host.about()
                except LOST:
                    self.counts["hosts that died"] += 1
                    self.hosts[kind] = self.start(kind)
                    self.held = set() if kind == "decode" else self.held
                    self.join()
            return self.hosts

    def worth(self, decode: Any, tokens: list[int]) -> bool:
        """Whether so much of a prompt is not at the decode host that the prefill host is to compute it."""
        with self.lock:
            for kind, digest in decode.events():
                self.held.add(digest) if kind == "stored" else self.held.discard(digest)
            digests = BlockHasher(decode.about()[2], tokens).digests[: (len(tokens) - 1) // BLOCK]
            return sum(digest not in self.held for digest in digests) >= WORTH

    def answer(self, number: int, tokens: list[int], count: int) -> list[int]:
        while True:
            prefill, decode = self.mend().values()
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


def prompts(count: int) -> list[tuple[list[int], int]]:
    """Returns prompts that ask about two documents, and how long the answers are to be."""
    rng = np.random.default_rng(0)
    text = lambda length: rng.integers(0, CONFIG.vocab_size, length).tolist()  # noqa: E731
    documents = text(90), text(90)
    return [(documents[rng.integers(2)] + text(rng.integers(4, 51)), int(rng.integers(8, 20))) for _ in range(count)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(None, None, __doc__, EXAMPLES, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="what goes wrong (default: %(default)s)")
    parser.add_argument("--engine", choices=ENGINES, default="loopback", help="what moves records (default: loopback)")
    place = lambda text: (text.rpartition(":")[0], int(text.rpartition(":")[2]))  # noqa: E731
    parser.add_argument("--address", type=place, metavar="HOST:PORT", help="of the prefill host, on another machine")
    parser.add_argument("--prefill", action="store_true", help="be that prefill host, until somebody ends it")
    args = parser.parse_args(argv)
    if args.prefill if args.address is None else args.fault == "kill-prefill":
        parser.error("--prefill needs an --address; --fault kill-prefill is for a process of one's own, without")
    if args.prefill:
        SyncManager(args.address, KEY).get_server().serve_forever()

    router, answers, victim = Router(args.engine, args.fault, args.address), [], args.fault.removeprefix("kill-")
    asked = prompts(args.requests)
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(router.answer, range(len(asked)), *zip(*asked, strict=True)):
            answers.append(answer)
            if len(answers) == args.requests // 4 and victim in router.hosts:
                os.kill(router.hosts[victim].about()[0], signal.SIGKILL)
    wrong, until = sum(map(list.__ne__, router.mend()["decode"].alone(asked), answers)), time.monotonic() + 12
    while (held := sum(host.held() for host in router.hosts.values())) and time.monotonic() < until:
        time.sleep(0.4)  # leases end
    print(json.dumps({"answered": len(answers), **router.counts, "wrong": wrong, "held": held}, indent=2))
    return 1 if wrong or held else 0


if __name__ == "__main__":
    sys.exit(main())
