"""Many rounds of an engine's bad days, by hand: `python -m tests.transports.check [ENGINE] [ROUNDS]`.

A host reads from two others, several reads at once, of random pages, now and then with a wrong checksum. Others are
killed or stopped at random moments, and come back; peers are cut off. After every step all pages that no read owns must
be what they were, and every read that ended well must have brought the right bytes.
"""

from __future__ import annotations

import collections
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from dsv4_jax.errors import PeerError, RecordMismatchError, TransferError

from .peer import Host
from .samples import LAYOUT, PAGES, open_transport, pool

__all__ = ["run"]


class Reader:
    """This process, and what it knows."""

    def __init__(self, engine: str, seed: int):
        self.engine, self.rng, self.ours = engine, np.random.default_rng(seed), pool()
        self.expected = self.ours.copy()
        self.transport = open_transport(engine, timeout=0.3)
        self.transport.publish(LAYOUT, self.ours)
        self.seen: collections.Counter[str] = collections.Counter()
        self.owned: set[int] = set()
        self.hosts: list[Any] = [self.start(i) for i in (1, 2)]
        self.reads: list[Any] = []

    def start(self, seed: int) -> dict[str, Any]:
        host = Host(self.engine, seed)
        sums = host.checksums("block", list(range(1, PAGES + 1)))
        return {"host": host, "seed": seed, "sums": sums, "pages": pool(seed), "stopped": False, "peer": None}

    def begin(self, at: dict[str, Any]) -> None:
        free = sorted(set(range(1, PAGES + 1)) - self.owned)
        count = int(self.rng.integers(1, 9))
        if len(free) < count:
            return
        try:
            if at["peer"] is None or at["peer"].error is not None:
                at["peer"] = self.transport.connect(at["host"].metadata)
            theirs = self.rng.integers(1, PAGES + 1, count)
            ours = self.rng.permutation(free)[:count]
            sums = [at["sums"][i - 1] for i in theirs]
            if torn := self.rng.random() < 0.1:
                sums[0] = bytes(16)
            handle = self.transport.read(at["peer"], "block", theirs, ours, sums)
        except PeerError:
            self.seen["refused: the peer is gone"] += 1
            return
        self.owned.update(ours.tolist())
        self.reads.append((handle, at["pages"][theirs], ours, torn))

    def look(self) -> None:
        for each in [each for each in self.reads if each[0].is_ready()]:
            handle, right, ours, torn = each
            self.reads.remove(each)
            self.owned.difference_update(ours.tolist())
            error = handle.error
            if error is None or isinstance(error, RecordMismatchError):
                assert (error is not None) == torn and (self.ours[ours] == right).all(), "other bytes"
                self.seen["mismatch" if torn else "read"] += 1
            else:
                assert isinstance(error, PeerError | TransferError), error
                self.seen["lost: " + str(error).partition(": ")[2][:40]] += 1
            self.expected[ours] = self.ours[ours]
        still = [i for i in range(PAGES + 1) if i not in self.owned]
        assert (self.ours[still] == self.expected[still]).all(), "a page that nobody reads has changed"

    def disturb(self) -> None:
        index = int(self.rng.integers(2))
        at, what = self.hosts[index], self.rng.random()
        if what < 0.04:
            at["host"].close()
            self.hosts[index] = self.start(at["seed"])
            self.seen["killed"] += 1
        elif what < 0.10 and not at["stopped"]:
            at["host"].process.send_signal(signal.SIGSTOP)
            at["stopped"], self.seen["stopped"] = True, self.seen["stopped"] + 1
        elif what < 0.30 and at["stopped"]:
            at["host"].process.send_signal(signal.SIGCONT)
            at["stopped"] = False
        elif what < 0.35 and at["peer"] is not None:
            self.transport.disconnect(at["peer"])
            self.seen["cut off"] += 1
        if not self.hosts[index]["stopped"] and self.hosts[index]["host"].process.poll() is not None:
            self.seen["a host died by itself"] += 1
            self.hosts[index] = self.start(at["seed"])

    def close(self) -> None:
        self.transport.close()
        self.look()
        assert not self.reads
        for at in self.hosts:
            at["host"].close()


def run(engine: str, rounds: int, seed: int = 0) -> dict[str, int]:
    """What happened how often."""
    reader = Reader(engine, seed)
    try:
        for _ in range(rounds):
            for at in reader.hosts:
                if reader.rng.random() < 0.7:
                    reader.begin(at)
            reader.disturb()
            for _ in range(int(reader.rng.integers(1, 20))):
                reader.look()
                time.sleep(0.002)
    finally:
        reader.close()
    files = len(os.listdir("/proc/self/fd"))
    return {**dict(sorted(reader.seen.items())), "open files": files}


if __name__ == "__main__":
    name, count = (sys.argv[1:] + ["loopback", "300"][len(sys.argv) - 1 :])[:2]
    for what, number in run(name, int(count)).items():
        print(f"{number:6} {what}")
