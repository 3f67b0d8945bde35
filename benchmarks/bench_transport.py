"""Records from another process's host pool into ours: one record's time, and the rate of many scattered ones.

    python benchmarks/bench_transport.py [--engines nixl,loopback,jax] [--records 256] [--rounds 20] [--pinned]
        [--json FILE]

Two processes of this machine, each with a pool of twice as many pages as are read at once, filled and touched before.
A page is a block record of V4-Flash (450,048 bytes). Ids are drawn anew for every read, and in the end all pages are
compared with what they should hold. "verified": with checksums, as `RecordTransport.read` does unless told otherwise;
they were made before the clock starts, as the host that has the records makes them. `--pinned`: both pools are host
caches of the default device (page-locked where that is a GPU), read and written where they lie; in the end their
addresses must be what they were.

Rates are medians of the rounds, and the best one's; they measure the machine's cores and memory as much as the engine.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from harness import Recorder, parser

from dsv4_jax import CacheLayout, DSV4Config
from dsv4_jax.records import page_bytes
from dsv4_jax.tiers.remote import Peer, RecordTransport
from dsv4_jax.transports import engine_problem, open_engine

LAYOUT = CacheLayout(DSV4Config.flash())
WIDTH = page_bytes(LAYOUT)
ONE_US, MANY_GB = 120, 1.2  # required of NIXL


class PagePool:
    """Holds pages in this process's memory, or of a host cache."""

    def __init__(self, pages: int, pinned: bool):
        self.host: Any = None
        if pinned:
            from dsv4_jax.tiers.host_cache import init_host_cache

            self.host = init_host_cache(LAYOUT, pages)
        self.pages = self.view() if pinned else np.zeros((1 + pages, WIDTH), np.uint8)
        self.pages[:] = 0  # touched
        self.address = self.pages.ctypes.data

    def view(self) -> np.ndarray:
        from dsv4_jax.tiers.host_memory import host_memory

        return host_memory(self.host)

    def check(self) -> None:
        assert self.host is None or self.view().ctypes.data == self.address, "the host pool has moved"


def content(page: int) -> np.ndarray:
    return np.random.default_rng(page).integers(0, 256, WIDTH, np.uint8)


def open_pool(engine: str, pages: int, pinned: bool) -> tuple[PagePool, RecordTransport, bytes]:
    pool = PagePool(pages, pinned)
    transport = RecordTransport(open_engine(engine))
    return pool, transport, transport.publish(LAYOUT, pool.pages)


def produce(engine: str, pages: int, pinned: bool) -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    pool, transport, metadata = open_pool(engine, pages, pinned)
    with transport:
        for page in range(1, 1 + pages):
            pool.pages[page] = content(page)
        sums = transport.checksums("block", range(1, 1 + pages))
        first = {"metadata": base64.b64encode(metadata).decode(), "sums": [each.hex() for each in sums]}
        print(json.dumps(first), file=out, flush=True)
        sys.stdin.read()  # until the parent closes it
        pool.check()


def rounds(
    transport: RecordTransport, peer: Peer, pool: PagePool, count: int, times: int, sums: list[bytes] | None
) -> Iterator[float]:
    """Yields the seconds of each read of so many pages. Then all that came are compared with what they should hold."""
    rng, held = np.random.default_rng(count), {}
    for _ in range(times):
        source = 1 + rng.permutation(peer.num_pages)[:count]
        destination = 1 + rng.permutation(peer.num_pages)[:count]
        expected = None if sums is None else [sums[i - 1] for i in source]
        start = time.perf_counter()
        transport.read(peer, "block", source, destination, expected).wait()
        yield time.perf_counter() - start
        held.update(zip(destination.tolist(), source.tolist(), strict=True))
    for ours, theirs in held.items():
        assert np.array_equal(pool.pages[ours], content(theirs)), "other bytes"


def measure(engine: str, records: int, times: int, pinned: bool, recorder: Recorder) -> None:
    options = [engine, "--records", str(records), *(["--pinned"] if pinned else [])]
    command = [sys.executable, __file__, "--produce", *options]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None
    try:
        first = json.loads(other.stdout.readline())
        sums = [bytes.fromhex(each) for each in first["sums"]]
        pool, transport, _ = open_pool(engine, 2 * records, pinned)
        with transport:
            peer = transport.connect(base64.b64decode(first["metadata"]))
            list(rounds(transport, peer, pool, records, 2, None))
            where = f"{engine}, {'page-locked' if pinned else 'plain'} memory"
            strict = engine == "nixl"
            for name, given in (("not verified", None), ("verified", sums)):
                one = statistics.median(rounds(transport, peer, pool, 1, 20 * times, given)) * 1e6
                raw = strict and given is None
                recorder.fact(
                    "transport", f"one record, {name}: {where}", one, "us", **({"at_most": ONE_US} if raw else {})
                )
                rates = [records * WIDTH / each / 1e9 for each in rounds(transport, peer, pool, records, times, given)]
                target = {"at_least": MANY_GB} if strict else {}
                recorder.fact(
                    "transport", f"{records} records, {name}: {where}", statistics.median(rates), "GB/s", **target
                )
                recorder.fact("transport", f"{records} records, {name}, best round: {where}", max(rates), "GB/s")
            pool.check()
    finally:
        other.stdin.close()
        code = other.wait()
    assert code == 0, f"the other process ended with {code}"


def describe(pinned: bool) -> str:
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    if not pinned:
        return cores
    import jax

    return f"{jax.devices()[0].device_kind}, {cores}"


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "nixl-cu12", "nixl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--engines", default="nixl,loopback,jax")
    command.add_argument("--produce", metavar="ENGINE", help="for the other process")
    command.add_argument("--records", type=int, default=256)
    command.add_argument("--rounds", type=int, default=20)
    command.add_argument("--pinned", action="store_true")
    arguments = command.parse_args()
    if arguments.produce:
        produce(arguments.produce, 2 * arguments.records, arguments.pinned)
        return
    recorder = Recorder(
        arguments.json,
        device=describe(arguments.pinned),
        software=versions(),
        command="python benchmarks/bench_transport.py" + (" --pinned" if arguments.pinned else ""),
    )
    for engine in arguments.engines.split(","):
        if (problem := engine_problem(engine)) is not None:
            print(f"{engine}: {problem}", flush=True)
            continue
        measure(engine, arguments.records, arguments.rounds, arguments.pinned, recorder)


if __name__ == "__main__":
    main()
