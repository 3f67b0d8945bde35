"""The slab store against the disk it is on: write and read back n records. Needs no GPU and no jax.

    python benchmarks/bench_store.py [DIRECTORY] [--records 10000] [--record-bytes 450048] [--quick] [--json]

A record is one of a block of DeepSeek-V4 Flash unless `--record-bytes` says otherwise.

The disk's own rate is the faster of buffered and O_DIRECT sequential I/O of a plain file of the same total size, 8 MiB
a call: writing counts the final fdatasync, reading starts with the file dropped from the page cache. The store does
the same work plus its checksums and headers, in batches of 8 MiB: `write` counts `flush`, `read` verifies every
record and is followed by a comparison of all bytes. Rounds alternate between the disk and the store, because a
shared disk's rate drifts; the medians are compared. Everything is deleted in the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from dsv4_jax import CacheLayout, DSV4Config
from dsv4_jax.errors import StoreError
from dsv4_jax.tiers.async_store import AsyncStore
from dsv4_jax.tiers.records import block_record
from dsv4_jax.tiers.slab import SlabStore
from dsv4_jax.tiers.slab_record import checksum

CALL_BYTES = 8 << 20
POOL_BYTES = 256 << 20
TARGET = 0.70


def aligned(size: int) -> np.ndarray:
    """Page-aligned uint8 [size], as page-locked memory is; touched."""
    array = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    array[:] = 0
    return array


def drop_cache(path: pathlib.Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def disk(path: pathlib.Path, pool: np.ndarray, total: int, flags: int) -> dict[str, float]:
    """Seconds to write and to read a plain file sequentially, from and to the memory that the store's records have."""
    flat = pool.reshape(-1)[: pool.size // CALL_BYTES * CALL_BYTES].reshape(-1, CALL_BYTES)
    calls = -(-total // CALL_BYTES)
    target = aligned(flat.size).reshape(flat.shape)
    path.unlink(missing_ok=True)

    def write() -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | flags)
        for i in range(calls):
            assert os.pwritev(file, [flat[i % len(flat)]], i * CALL_BYTES) == CALL_BYTES
        os.fdatasync(file)
        os.close(file)

    def read() -> None:
        file = os.open(path, os.O_RDONLY | flags)
        for i in range(calls):
            assert os.preadv(file, [target[i % len(flat)]], i * CALL_BYTES) == CALL_BYTES
        os.close(file)

    times = {"write": seconds(write)}
    drop_cache(path)
    times["read"] = seconds(read)
    path.unlink()
    return {name: value * total / (calls * CALL_BYTES) for name, value in times.items()}


def store(path: pathlib.Path, keys: list[bytes], pool: np.ndarray, *, direct: bool, workers: int) -> dict[str, float]:
    """Seconds to write and to read back; raises if a byte is wrong. workers 0: the store itself, without threads."""
    path.unlink(missing_ok=True)
    slab = SlabStore(path, record_bytes=pool.shape[1], max_records=len(keys), fingerprint="bench", direct=direct)
    calls = AsyncStore(slab, workers=workers) if workers else None
    target = aligned(pool.size).reshape(pool.shape)
    step = max(1, CALL_BYTES // pool.shape[1])

    def each(name: str, records: np.ndarray) -> None:
        """Batch by batch; the records repeat, the keys do not. A buffer is used again only when it is free."""
        made = []
        for i in range(0, len(keys), step):
            at = i % len(records)
            some = keys[i : i + min(step, len(records) - at)]
            if at == 0 and name == "read_into" and calls:
                calls.drain()
            made.append(getattr(calls or slab, name)(some, records[at : at + len(some)]))
        assert all((m.result() if calls else m).all() for m in made), name
        if name == "write":
            (calls or slab).flush()

    times = {"write": seconds(lambda: each("write", pool))}
    drop_cache(path)
    times["read"] = seconds(lambda: each("read_into", target))
    assert np.array_equal(target, pool) and slab.stats().read == len(keys)
    (calls or slab).close()
    path.unlink()
    return times


def checksum_rate(record: np.ndarray) -> float:
    """Bytes a second, one core, the record in cache."""
    work = [lambda: checksum(record, b"k" * 32, b"f" * 32, 1)] * max(1, (64 << 20) // record.size)
    return len(work) * record.size / min(seconds(lambda: [w() for w in work]) for _ in range(3))


def run(directory: pathlib.Path, count: int, record_bytes: int, rounds: int) -> dict:
    step = max(1, CALL_BYTES // record_bytes)
    held = min(count, step * max(1, POOL_BYTES // (step * record_bytes)))  # whole batches
    pool = aligned(held * record_bytes).reshape(held, record_bytes)
    pool[:] = np.random.default_rng(1).integers(0, 256, pool.shape, np.uint8)
    keys = [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(count)]
    path, total = directory / "bench.slab", count * record_bytes
    # What the disk can do, and the store's modes: with and without the page cache, alone and on four threads.
    subjects: dict[str, Callable[[], dict[str, float]]] = {
        "disk, buffered": lambda: disk(path, pool, total, 0),
        "disk, O_DIRECT": lambda: disk(path, pool, total, os.O_DIRECT),
        "store, buffered": lambda: store(path, keys, pool, direct=False, workers=0),
        "store, buffered, 4 threads": lambda: store(path, keys, pool, direct=False, workers=4),
        "store, direct": lambda: store(path, keys, pool, direct=True, workers=0),
        "store, direct, 4 threads": lambda: store(path, keys, pool, direct=True, workers=4),
    }
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            try:
                samples[name].append(subject())
            except (StoreError, OSError) as error:
                if "direct" not in name.lower():
                    raise
                print(f"{name}: not here: {error}")
    rates = {
        name: {way: total / statistics.median(s[way] for s in taken) for way in ("write", "read")}
        for name, taken in samples.items()
        if taken
    }
    best = {way: max(rates[name][way] for name in rates if name.startswith("disk")) for way in ("write", "read")}
    return {
        "records": count,
        "record_bytes": record_bytes,
        "rounds": rounds,
        "bytes_per_second": rates,
        "disk_best": best,
        "of_disk_best": {
            name: {way: rate[way] / best[way] for way in best} for name, rate in rates.items() if "store" in name
        },
        "checksum_bytes_per_second": checksum_rate(pool[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=pathlib.Path, default=pathlib.Path.cwd(), help="on which disk")
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--record-bytes", type=int, default=block_record(CacheLayout(DSV4Config.flash())).bytes)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1,000 records, one round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.records, args.rounds = 1000, 1
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        report = run(pathlib.Path(directory), args.records, args.record_bytes, args.rounds)
    if args.json:
        print(json.dumps(report))
        return
    print(f"{args.records} records of {args.record_bytes} bytes, medians of {args.rounds} rounds, GB/s (of the disk's)")
    for name, rate in report["bytes_per_second"].items():
        share = report["of_disk_best"].get(name)
        cells = [
            f"{way} {rate[way] / 1e9:6.3f}" + (f" ({share[way]:4.0%})" if share else " " * 7)
            for way in ("write", "read")
        ]
        print(f"  {name:26}", "   ".join(cells))
    print(f"  {'checksum, one core':26} {report['checksum_bytes_per_second'] / 1e9:.1f}")
    print(f"target: >= {TARGET:.0%} of the disk's best in both directions")


if __name__ == "__main__":
    main()
