"""Where the time of one record over NIXL goes on this machine, and which of UCX's settings change it.

    python benchmarks/transport_parts.py [--times 300] [--pages 256] [--plain] [--json FILE]

For each variant two processes with pools of their own, measured one variant after the other: reads of
one random record through `RecordTransport`, through NIXL alone, and the copy alone: `process_vm_readv`, the system call
in which UCX reads from another process. Page-locked memory comes from the CUDA driver, if there is one; --plain: not.
Medians in us.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import json
import os
import pathlib
import platform
import select
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from dsv4_jax import CacheLayout, DSV4Config
from dsv4_jax.records import page_bytes
from dsv4_jax.tiers.remote import RecordTransport
from dsv4_jax.tiers.remote import read as remote_read
from dsv4_jax.transports import nixl, open_engine

LAYOUT = CacheLayout(DSV4Config.flash())
WIDTH = page_bytes(LAYOUT)
AHEAD = 3  # variants that start while one is measured
TLS = {"shared memory and TCP": "posix,sysv,tcp,self,cuda_copy", "TCP": "tcp,self,cuda_copy"}
PIECES = {"UCX_CMA_SEG_SIZE": "64k", "UCX_CMA_TX_QUOTA": "16"}
# name -> (page-locked memory, environment)
VARIANTS: dict[str, tuple[bool, dict[str, str]]] = {
    "as it is": (True, {}),
    "plain memory": (False, {}),
    "pieces of 64k": (True, PIECES),
    **{name: (True, {"UCX_TLS": tls}) for name, tls in TLS.items()},
}


class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def make_pool(pages: int, locked: bool) -> np.ndarray:
    """[1 + pages, WIDTH], page i filled with bytes of its number."""
    size = (1 + pages) * WIDTH
    pool = (page_locked(size) if locked else np.zeros(size, np.uint8)).reshape(1 + pages, WIDTH)
    pool[:] = (np.arange(1 + pages) % 251).astype(np.uint8)[:, None]
    return pool


def page_locked(size: int) -> np.ndarray:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_void_p()
    for call in (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        lambda: cuda.cuCtxSetCurrent(context),
        lambda: cuda.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size), 3),  # portable, mapped: as XLA's
    ):
        if code := call():
            raise OSError(f"the CUDA driver says {code}")
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (size,))


def produce(pages: int, locked: bool) -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    with RecordTransport(open_engine("nixl")) as transport:
        pool = make_pool(pages, locked)
        first = {"metadata": base64.b64encode(transport.publish(LAYOUT, pool)).decode()}
        print(json.dumps(first | {"pid": os.getpid(), "address": pool.ctypes.data}), file=out, flush=True)
        sys.stdin.read()


def median(call: Callable[[], Any], times: int) -> float:
    took = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e6


def read(name: str, pages: int, locked: bool, times: int) -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    command = [sys.executable, __file__, "--produce", "--pages", str(pages), *([] if locked else ["--plain"])]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None
    pool = make_pool(pages, locked)
    first = json.loads(next(line for line in other.stdout if line.startswith("{")))  # UCX says things, too
    with RecordTransport(open_engine("nixl")) as transport:
        transport.publish(LAYOUT, pool)
        peer = transport.connect(base64.b64decode(first["metadata"]))
        rng, found = np.random.default_rng(0), {}
        ids = [rng.integers(1, 1 + pages, 1, np.int32) for _ in range(101)]
        turn = iter(range(10**9))

        def pair() -> tuple[np.ndarray, np.ndarray]:
            i = next(turn)
            return ids[i % 101], ids[(7 * i + 3) % 101]

        def whole() -> None:
            transport.read(peer, "block", *pair(), None).wait()

        def alone() -> None:
            each = nixl._Read(link, *pair())
            each.begin(engine._reader)
            while not each.is_done():
                pass
            each.let_go()

        libc = ctypes.CDLL(None, use_errno=True)

        def call(source: int, target: int, piece: int) -> None:
            cuts = range(0, WIDTH, piece)
            there, here = ((Vector * len(cuts))() for _ in range(2))
            for k, cut in enumerate(cuts):
                size = min(piece, WIDTH - cut)
                there[k], here[k] = Vector(source + cut, size), Vector(target + cut, size)
            count = libc.process_vm_readv(first["pid"], here, len(cuts), there, len(cuts), 0)
            if count != WIDTH:
                raise OSError(f"process_vm_readv: {count}, {os.strerror(ctypes.get_errno())}")

        def copy(piece: int) -> Callable[[], None]:
            def one() -> None:
                source, target = pair()
                base = int(source[0]) * WIDTH + first["address"]
                call(base, pool.ctypes.data + int(target[0]) * WIDTH, piece)

            return one

        def within() -> None:
            source, target = pair()
            pool[int(target[0])] = pool[int(source[0])]

        for _ in range(20):
            whole()
        print("ready", file=out, flush=True)
        if not sys.stdin.readline():
            return
        engine: Any = transport._engine
        link = transport._links[peer].link
        found["transport"] = median(whole, times)
        vars(remote_read)["time"] = types.SimpleNamespace(monotonic=time.monotonic, sleep=yielding)
        found["and yields"] = median(whole, times)
        found["nixl"] = median(alone, times)
        reader, pages_here = engine._reader.agent, engine._reader.pages
        posts, checks, handles = [], [], []
        for _ in range(times):
            source, target = pair()
            handle = reader.make_prepped_xfer("READ", pages_here, target, link.pages, source)
            start = time.perf_counter()
            state = reader.transfer(handle)
            posts.append(time.perf_counter() - start)
            start, looks = time.perf_counter(), 0
            while state == "PROC":
                state, looks = reader.check_xfer_state(handle), looks + 1
            checks.append(time.perf_counter() - start)
            handles.append(looks)
            reader.release_xfer_handle(handle)
        found |= {"post": statistics.median(posts) * 1e6, "checks": statistics.median(checks) * 1e6}
        found["looks"] = statistics.median(handles)
        with contextlib.suppress(OSError):
            for piece in (1 << 20, 65536, 16384):
                found[f"copy {min(piece, WIDTH)}"] = median(copy(piece), times)
        found["memcpy"] = median(within, times)
        poll = select.epoll()
        poll.register(os.pipe()[0], select.EPOLLIN)
        found["epoll"] = median(lambda: poll.poll(0), times)
        found["sleep(0)"] = median(lambda: time.sleep(0), times)
        found["yield"] = median(os.sched_yield, times)
        found["getppid"] = median(os.getppid, times)
        source, target = pair()
        pool[int(target[0])] = 0
        transport.read(peer, "block", source, target, None).wait()
        assert (pool[int(target[0])] == int(source[0]) % 251).all(), "other bytes"
        print(json.dumps(found), file=out, flush=True)
    other.stdin.close()
    other.wait()


def yielding(seconds: float) -> None:
    time.sleep(seconds) if seconds else os.sched_yield()


def start(name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    locked, settings = VARIANTS[name]
    options = ["--times", str(args.times), "--pages", str(args.pages)]
    options += ["--plain"] if args.plain or not locked else []
    command = [sys.executable, __file__, "--read", name, *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | settings, stdin=pipe, stdout=pipe, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--plain", action="store_true", help="no page-locked memory")
    parser.add_argument("--only", help="variants, by commas")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--produce", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", metavar="VARIANT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.produce:
        return produce(args.pages, not args.plain)
    if args.read:
        return read(args.read, args.pages, not args.plain, args.times)
    names = args.only.split(",") if args.only else list(VARIANTS)
    print(f"{platform.release()} {platform.version()}, {os.cpu_count()} cores", flush=True)
    results: dict[str, dict[str, float]] = {}
    readers: list[subprocess.Popen[str]] = []
    for i, name in enumerate(names):
        while len(readers) < min(i + AHEAD, len(names)):
            readers.append(start(names[len(readers)], args))
        each = readers[i]
        assert each.stdin is not None and each.stdout is not None
        if any(line.strip() == "ready" for line in each.stdout):
            each.stdin.write("go\n")
            each.stdin.flush()
        if line := each.stdout.readline():
            results[name] = json.loads(line)
        times = "  ".join(f"{what} {us:.1f}" for what, us in results.get(name, {}).items())
        print(f"{name:22}", times or "failed", flush=True)
        each.stdin.close()
        each.wait()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"kernel": platform.release(), "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
