"""The slab store against the disk it is on: write and read back n records. Needs no GPU and no jax.

    python benchmarks/bench_store.py [DIRECTORY] [--records 10000] [--record-bytes 450048]
        [--rounds 3] [--direct] [--quick] [--json FILE]

A record is one of a block of DeepSeek-V4 Flash unless `--record-bytes` says otherwise.

The disk's own rate is the faster of buffered and O_DIRECT sequential I/O of a plain file of the same total size, 8 MiB
a call: writing counts the final fdatasync, reading starts with the file dropped from the page cache. The store does
the same work plus its checksums and headers, in batches of 8 MiB: `write` counts `flush`, `read` verifies every
record and is followed by a comparison of all bytes. Both files have their room reserved before the clock starts.

A shared disk's rate drifts, so rounds alternate between the disk and the store, and a store's share is the median of
its shares in each round. All move to and from the same memory, in huge pages where there are any: the disk is a third
slower with memory that lies in scattered pages, and that must not be what is compared. A tenth of a round first says
how long it will take. Everything is deleted in the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Recorder, cpu_name, parser

from dsv4_jax import CacheLayout, DSV4Config
from dsv4_jax.errors import StoreError
from dsv4_jax.records import block_record
from dsv4_jax.stores import AsyncStore, SlabStore
from dsv4_jax.stores.checksum import checksum

CALL_BYTES = 8 << 20
POOL_BYTES = 256 << 20
TARGET = 0.70
WAYS = ("write", "read")


def aligned(rows: int, columns: int) -> np.ndarray:
    """Returns uint8 [rows, columns] at the beginning of a page, as page-locked memory is; touched."""
    memory = mmap.mmap(-1, rows * columns, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8).reshape(rows, columns)
    array[:] = 0
    return array


def drop_cache(path: pathlib.Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def remove(path: pathlib.Path) -> None:
    path.unlink()
    os.sync()  # a disk that is told of free room is told now, not during the next measurement


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def disk(path: pathlib.Path, pool: np.ndarray, target: np.ndarray, total: int, flags: int) -> dict[str, float]:
    """Returns the seconds to write and to read a plain file sequentially, from and to the memory that the store's
    records have.
    """
    whole = pool.size // CALL_BYTES * CALL_BYTES
    source, target = (part.reshape(-1)[:whole].reshape(-1, CALL_BYTES) for part in (pool, target))
    calls = -(-total // CALL_BYTES)
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | flags)
    os.posix_fallocate(file, 0, calls * CALL_BYTES)

    def write() -> None:
        for i in range(calls):
            assert os.pwritev(file, [source[i % len(source)]], i * CALL_BYTES) == CALL_BYTES
        os.fdatasync(file)

    def read() -> None:
        for i in range(calls):
            assert os.preadv(file, [target[i % len(target)]], i * CALL_BYTES) == CALL_BYTES

    times = {"write": seconds(write)}
    drop_cache(path)
    times["read"] = seconds(read)
    os.close(file)
    remove(path)
    return {name: value * total / (calls * CALL_BYTES) for name, value in times.items()}


def store(
    path: pathlib.Path, keys: list[bytes], pool: np.ndarray, target: np.ndarray, *, direct: bool, workers: int
) -> dict[str, float]:
    """Returns the seconds to write and to read back; raises if a byte is wrong. workers 0: the store itself, without
    threads.
    """
    path.unlink(missing_ok=True)
    slab = SlabStore(path, record_bytes=pool.shape[1], max_records=len(keys), fingerprint="bench", direct=direct)
    calls = AsyncStore(slab, workers=workers) if workers else None
    target[:] = 0
    step = max(1, CALL_BYTES // pool.shape[1])

    def each(name: str, records: np.ndarray) -> None:
        """Batch by batch; the records repeat, the keys do not. A buffer is used again only when it is free."""
        made = []
        for i in range(0, len(keys), step):
            at = i % len(records)
            some = keys[i : i + min(step, len(records) - at)]
            if calls and name == "read_into" and i >= len(records):
                made[-(len(records) // step)].result()
            made.append(getattr(calls or slab, name)(some, records[at : at + len(some)]))
        assert all((m.result() if calls else m).all() for m in made), name
        if name == "write":
            (calls or slab).flush()

    times = {"write": seconds(lambda: each("write", pool))}
    drop_cache(path)
    times["read"] = seconds(lambda: each("read_into", target))
    used = min(len(keys), len(pool))
    assert np.array_equal(target[:used], pool[:used]) and slab.stats().read == len(keys)
    (calls or slab).close()
    remove(path)
    return times


def checksum_rate(record: np.ndarray) -> float:
    """Returns bytes a second of checksums on one core, the record in its cache."""
    work = [lambda: checksum(record, b"k" * 32, b"f" * 32, 1)] * max(1, (64 << 20) // record.size)
    return len(work) * record.size / min(seconds(lambda: [w() for w in work]) for _ in range(3))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(
    path: pathlib.Path, pool: np.ndarray, target: np.ndarray, count: int, rounds: int, modes: tuple[str, ...]
) -> tuple[dict[str, list[dict[str, float]]], float]:
    """Returns bytes a second of every round by subject ("disk, ..." and "store, ..."), and the seconds it all took."""
    keys = [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(count)]
    total = count * pool.shape[1]
    # What the disk can do, and the store's modes: with and without the page cache, alone and on four threads.
    subjects: dict[str, Callable[[], dict[str, float]]] = {
        "disk, O_DIRECT": lambda: disk(path, pool, target, total, os.O_DIRECT),
        "store, direct, 4 threads": lambda: store(path, keys, pool, target, direct=True, workers=4),
        "store, direct": lambda: store(path, keys, pool, target, direct=True, workers=0),
        "disk, buffered": lambda: disk(path, pool, target, total, 0),
        "store, buffered, 4 threads": lambda: store(path, keys, pool, target, direct=False, workers=4),
        "store, buffered": lambda: store(path, keys, pool, target, direct=False, workers=0),
    }
    subjects = {name: subject for name, subject in subjects.items() if name.startswith(("disk", *modes))}
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    start = time.perf_counter()
    for i in range(rounds):
        for name, subject in subjects.items():
            try:
                times = subject()
            except (StoreError, OSError) as error:
                if "direct" not in name.lower():
                    raise
                say(f"  {name}: not here: {error}")
                continue
            rates[name].append({way: total / times[way] for way in times})
            cells = ", ".join(f"{way} {rate / 1e9:.3f} GB/s" for way, rate in rates[name][-1].items())
            say(f"  {time.perf_counter() - start:5.0f} s  round {i + 1}/{rounds}  {name:26}  {cells}")
    return {name: taken for name, taken in rates.items() if taken}, time.perf_counter() - start


def run(directory: pathlib.Path, count: int, record_bytes: int, rounds: int, modes: tuple[str, ...]) -> dict:
    step = max(1, CALL_BYTES // record_bytes)
    held = min(count, step * max(1, POOL_BYTES // (step * record_bytes)))  # whole batches
    held = max(held, -(-CALL_BYTES // record_bytes))
    pool, target = aligned(held, record_bytes), aligned(held, record_bytes)
    pool[:] = np.random.default_rng(1).integers(0, 256, pool.shape, np.uint8)
    path = directory / "bench.slab"
    say(f"a tenth of a round; load {os.getloadavg()[0]:.2f}")
    _, took = measure(path, pool, target, -(-count // 10), 1, modes)
    say(f"{rounds} rounds of {count} records: about {10 * took * rounds:.0f} s")
    load = os.getloadavg()[0]
    rates, took = measure(path, pool, target, count, rounds, modes)
    best = [
        {way: max(taken[i][way] for name, taken in rates.items() if name.startswith("disk")) for way in WAYS}
        for i in range(rounds)
    ]
    return {
        "records": count,
        "record_bytes": record_bytes,
        "rounds": rounds,
        "seconds": took,
        "load": [load, os.getloadavg()[0]],
        "bytes_per_second": {
            name: {way: statistics.median(one[way] for one in taken) for way in WAYS} for name, taken in rates.items()
        },
        # Of the faster disk of the same round: one share a round, sorted.
        "of_disk_best": {
            name: {way: sorted(mine[way] / disks[way] for mine, disks in zip(taken, best, strict=True)) for way in WAYS}
            for name, taken in rates.items()
            if name.startswith("store")
        },
        "checksum_bytes_per_second": checksum_rate(pool[0]),
    }


def main() -> None:
    """Runs the command line."""
    command = parser(__doc__)
    command.add_argument("directory", nargs="?", type=pathlib.Path, default=pathlib.Path.cwd(), help="on which disk")
    command.add_argument("--records", type=int, default=10_000)
    command.add_argument("--record-bytes", type=int, default=block_record(CacheLayout(DSV4Config.flash())).bytes)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--direct", action="store_true", help="of the store, only what goes past the page cache")
    command.add_argument("--quick", action="store_true", help="1,000 records, one round")
    args = command.parse_args()
    if args.quick:
        args.records, args.rounds = 1000, 1
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        modes = ("store, direct",) if args.direct else ("store",)
        report = run(pathlib.Path(directory), args.records, args.record_bytes, args.rounds, modes)
    load = report["load"]
    recorder = Recorder(args.json, device=f"disk of {cpu_name()}", software={"numpy": np.__version__}, quick=args.quick)
    print(
        f"{args.records} records of {args.record_bytes} bytes, {args.rounds} rounds in {report['seconds']:.0f} s, load "
        f"{load[0]:.1f} to {load[1]:.1f}"
    )
    print("median GB/s (median share of the disk's best of the same round, least to most)")
    for name, rate in report["bytes_per_second"].items():
        cells, fields = [], dict[str, Any]()
        for way in WAYS:
            cells.append(f"{way} {rate[way] / 1e9:6.3f}")
            fields[f"{way}_gb_per_s"] = rate[way] / 1e9
            if shares := report["of_disk_best"].get(name, {}).get(way):
                cells[-1] += f" ({statistics.median(shares):4.0%}, {shares[0]:4.0%} to {shares[-1]:4.0%})"
                fields |= {f"{way}_share": statistics.median(shares), f"{way}_shares": [shares[0], shares[-1]]}
        recorder.add("store", what=name, load_from=load[0], load_to=load[1], **fields)
        print(f"  {name:26}", "".join(f"{cell:40}" for cell in cells).rstrip())
    recorder.fact("store", "checksum, one core", report["checksum_bytes_per_second"] / 1e9, "GB/s")
    print(f"target: >= {TARGET:.0%} of the disk's best in both directions")


if __name__ == "__main__":
    main()
