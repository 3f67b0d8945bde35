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
import functools
import json
import multiprocessing as mp
import multiprocessing.connection as channel
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

import dsv4_jax as dsv4
from dsv4_jax import model
from dsv4_jax.engine import Engine, Handle, Limits, Prompt
from dsv4_jax.engine.build import build
from dsv4_jax.errors import HandoffError
from dsv4_jax.manager import BlockHasher, EventLog, Handoff, HashSpec, HostSize, Namespace
from dsv4_jax.tiers.host_memory import host_memory
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


class Host:
    """One process: an engine, its transport, and the router at the other end of a pipe."""

    peer: Peer | None = None
    alone: Engine | None = None

    def __init__(self, pipe: channel.Connection, kind: str, engine: str, address: str, fault: str):
        self.pipe, self.fault, self.sending = pipe, fault, threading.Lock()
        drafts, self.size, blocks = SIZES[kind]
        self.layout = dsv4.CacheLayout(CONFIG, "f32", "f32", block_tokens=BLOCK, draft_tokens=drafts, include_mtp=True)
        self.options = dict(
            chunk_tokens=48, drafts=drafts, weights_id="seed 0", limits=Limits(patience=PATIENCE, lease=LEASE)
        )
        self.params = model.init_params(CONFIG, seed=0, mtp=True)
        options = {"address": address} if engine == "jax" and address else {}
        self.transport = RecordTransport(open_engine(engine, **options), timeout=PATIENCE)
        self.events, host = EventLog(), HostSize.of(self.layout, blocks, 6)
        core, self.executor = build(
            self.params,
            self.layout,
            self.size,
            host=host,
            events=[self.events],
            transport=self.transport,
            **self.options,  # type: ignore[arg-type]
        )
        self.engine, self.handles, self.seen = Engine(core, self.executor), dict[int, Handle](), 0
        self.late = list[tuple[float, int, bytes | None]]()
        if fault == "lost-acknowledgement":
            self.transport.notify = lambda peer, message: None  # type: ignore[method-assign]
        self.engine.warm_up()
        self.tell("ready", self.transport.published, self.engine.managers[0].hash_spec)

    def tell(self, *what: Any) -> None:
        """From the engine's thread, too."""
        with self.sending, contextlib.suppress(OSError):
            self.pipe.send(what)

    def run(self) -> None:
        """Until the router says so, or is gone."""
        with contextlib.suppress(EOFError, OSError), self.transport, self.engine:
            while True:
                while self.pipe.poll(0.005):
                    word, *what = self.pipe.recv()
                    if word == "stop":
                        return
                    getattr(self, word)(*what)
                for number, _handle in [item for item in self.handles.items() if item[1].done]:
                    done = self.handles.pop(number).result()
                    self.tell("ended", number, done.finish, done.tokens, done.cached)
                events, _ = self.events.since(self.seen)
                if events:
                    self.seen = events[-1].sequence
                    self.tell("events", [(event.kind, event.digest) for event in events])
                now = time.monotonic()
                for item in [item for item in self.late if item[0] <= now]:
                    self.late.remove(item)
                    with contextlib.suppress(HandoffError):  # of another life of the prefill host, say
                        self.engine.receive(*item[1:])

    def compute(self, number: int, tokens: list[int]) -> None:
        """A prompt for the other host."""

        def export(part: bytes) -> None:
            blocks = Handoff.from_json(part).blocks
            if self.fault == "torn-record" and blocks and self.executor.host is not None:
                host_memory(self.executor.host)[blocks[0]] ^= 1
            self.tell("part", number, part)

        self.handles[number] = self.engine.add(Prompt(tokens=tokens, export=export))

    def connect(self, metadata: bytes) -> None:
        if self.peer is not None:
            self.transport.disconnect(self.peer)  # who waits for it goes on alone
        self.peer = self.transport.connect(metadata)

    def answer(self, number: int, tokens: list[int], count: int, remote: bool) -> None:
        asked = Prompt(tokens=tokens, max_new_tokens=count, peer=self.peer if remote else None, id=number)
        self.handles[number] = self.engine.add(asked)

    def part(self, number: int, data: bytes | None) -> None:
        self.late.append((time.monotonic() + (1.2 * LEASE if self.fault == "stale-lease" else 0), number, data))

    def lone(self, number: int, tokens: list[int], count: int) -> None:
        """The answer to a request that runs alone, and finds nothing of others."""
        self.alone = self.alone or Engine.of(self.params, self.layout, self.size, **self.options)  # type: ignore[arg-type]
        asked = Prompt(tokens=tokens, max_new_tokens=count, namespace=Namespace(str(number)))
        self.tell("lone", self.alone.run([asked])[0][0].tokens)

    def held(self) -> None:
        """What is held for other hosts, or of them: nothing, once leases are over."""
        self.engine.pause()
        manager, now = self.engine.managers[0], self.engine.stats()
        held = len(manager.leases) + sum(pool.private for pool in manager.stats().cache.pools.values())
        self.tell("held", held + now.live + now.queued + now.preempted)
        self.engine.resume()


def serve(pipe: channel.Connection, *what: str) -> None:
    """Runs one host."""
    Host(pipe, *what).run()


class Child:
    """The router's end of a host: of a process that it starts, or of one on another machine."""

    def __init__(self, kind: str, engine: str, fault: str, address: tuple[str, int] | None = None):
        self.process = None
        if address is not None:
            self.pipe: channel.Connection = channel.Client(address, authkey=b"dsv4_jax")
        else:
            spawn = mp.get_context("spawn")
            self.pipe, theirs = spawn.Pipe()
            self.process = spawn.Process(target=serve, args=(theirs, kind, engine, "", fault), daemon=True)
            self.process.start()
            theirs.close()
        self.alive = True

    @functools.cached_property
    def ready(self) -> list[Any]:
        """What others connect with, and what its digests are made of."""
        return self.wait("ready")

    def tell(self, *what: Any) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(what)

    def heard(self) -> list[Any]:
        """What it has said; of a host that has died the last words."""
        messages = []
        try:
            while self.pipe.poll(0):
                messages.append(self.pipe.recv())
        except (EOFError, OSError):
            self.alive = False
        return messages

    def wait(self, word: str) -> list[Any]:
        while (message := self.pipe.recv())[0] != word:
            pass
        return list(message[1:])

    def stop(self) -> None:
        self.tell("stop")
        if self.process is not None:
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

    def __init__(self, engine: str, fault: str, address: tuple[str, int] | None):
        self.start = lambda kind: Child(kind, engine, fault, address if kind == "prefill" else None)
        self.counts, self.asked, self.held = Counter[str](), list[Asked](), set[bytes]()  # digests at the decode host
        self.prefill, self.decode = self.start("prefill"), self.start("decode")
        self.join()

    def join(self) -> None:
        self.decode.tell("connect", self.prefill.ready[0])

    def ask(self, tokens: list[int], count: int) -> None:
        self.asked.append(Asked(len(self.asked), tokens, count))
        self.send(self.asked[-1])

    def send(self, asked: Asked) -> None:
        spec: HashSpec = self.decode.ready[1]
        digests = BlockHasher(spec, asked.tokens).digests[: (len(asked.tokens) - 1) // BLOCK]
        there = next((i for i, digest in enumerate(digests) if digest not in self.held), len(digests))
        remote = len(digests) - there >= WORTH
        self.counts["sent to the prefill host" if remote else "sent to the decode host alone"] += 1
        self.decode.tell("answer", asked.number, asked.tokens, asked.count, remote)
        if remote:
            self.prefill.tell("compute", asked.number, asked.tokens)

    @property
    def open(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.answer is None]

    def turn(self) -> None:
        channel.wait([self.prefill.pipe, self.decode.pipe], 0.01)
        for word, number, *what in self.prefill.heard():
            if word == "part":
                self.counts["parts of hand-offs"] += 1
                self.decode.tell("part", number, what[0])
            elif word == "ended" and what[0] != "handoff":
                self.decode.tell("part", number, None)
        for word, what, *more in self.decode.heard():
            if word == "events":
                for kind, digest in what:
                    self.held.add(digest) if kind == "stored" else self.held.discard(digest)
            elif word == "ended":
                _, self.asked[what].answer, found = more
                self.counts["tokens found"] += found
        if not self.prefill.alive:
            self.counts["hosts that died"] += 1
            self.prefill = self.start("prefill")
            self.join()
        if not self.decode.alive:
            self.counts["hosts that died"] += 1
            self.decode, self.held = self.start("decode"), set()
            self.join()
            for asked in self.open:
                self.send(asked)

    def finish(self) -> int:
        """What the hosts hold once leases are over: nothing."""
        until = time.monotonic() + 4 * LEASE
        while True:
            held = 0
            for child in (self.prefill, self.decode):
                child.tell("held")
                held += child.wait("held")[0]
            if not held or time.monotonic() > until:
                return held
            time.sleep(LEASE / 8)


def prompts(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Returns prompts that ask about two documents."""
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> list[int]:
        return rng.integers(0, CONFIG.vocab_size, rng.integers(low, high + 1)).tolist()

    documents = [text(64, 100) for _ in range(2)]
    return [(documents[rng.integers(2)] + text(4, 50), int(rng.integers(8, 20))) for _ in range(count)]


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="what goes wrong (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engine", choices=ENGINES, default="loopback", help="what moves records (default: loopback)")
    parser.add_argument("--address", metavar="HOST:PORT", help="of the prefill host, on another machine")
    parser.add_argument("--prefill", action="store_true", help="be that prefill host, for one router")
    args = parser.parse_args(argv)
    place, _, port = (args.address or "").rpartition(":")
    if (args.prefill and not args.address) or (args.address and not (place and port.isdecimal())):
        parser.error("--address: HOST:PORT")
    address = (place, int(port)) if args.address else None
    if address and args.fault == "kill-prefill":
        parser.error("--fault kill-prefill: it is another's process")
    if args.prefill:
        with channel.Listener(address, authkey=b"dsv4_jax") as listener:
            serve(listener.accept(), "prefill", args.engine, place, args.fault)
        return 0

    router, start, wrong = Router(args.engine, args.fault, address), time.perf_counter(), 0
    try:
        waiting = prompts(args.requests, args.seed)
        victim = args.fault.removeprefix("kill-") if args.fault.startswith("kill-") else None
        while waiting or router.open:
            while waiting and len(router.open) < 4:
                router.ask(*waiting.pop(0))
            router.turn()
            if victim and len(router.asked) - len(router.open) >= args.requests // 4:  # answered
                getattr(router, victim).process.kill()
                victim = None
        numbers: dict[str, Any] = {"answered": len(router.asked), "seconds": round(time.perf_counter() - start, 2)}
        for asked in router.asked:
            router.decode.tell("lone", asked.number, asked.tokens, asked.count)
            wrong += router.decode.wait("lone")[0] != asked.answer
        numbers |= {**router.counts, "wrong": wrong, "held": router.finish()}
    finally:
        router.prefill.stop(), router.decode.stop()
    print(json.dumps(numbers, indent=2) if args.json else "\n".join(f"{name:32}{n:>8}" for name, n in numbers.items()))
    return 1 if wrong or numbers["held"] else 0


if __name__ == "__main__":
    sys.exit(main())
