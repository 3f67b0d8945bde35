"""Kills writers of a slab store, many times, on one file. Run by `test_slab_crash.py`; imports no jax, so it may fork.

    python -m tests.stores.crash_rounds PATH MODE ROUNDS MAX_RECORDS

MODE "call": the writer dies by SIGKILL inside a random `pwritev`, when a random part of its bytes is written. MODE
"time": it is killed from outside a random time after its first write. Each round goes on with the file the last one
left. After every kill the store is opened and everything is read. Prints JSON, one line a round.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time

import numpy as np

from dsv4_jax.stores import SlabStore

from .samples import FINGERPRINT, keys, records

BATCH = 4
RECORD_BYTES = 9000
PER_ROUND = 10_000  # ids of a round; a writer dies long before it has used them all


def open_store(path: pathlib.Path, max_records: int) -> SlabStore:
    return SlabStore(path, record_bytes=RECORD_BYTES, max_records=max_records, fingerprint=FINGERPRINT)


def die_in_call(rng: np.random.Generator) -> None:
    """From now on the process lives for a random number of `pwritev` calls, and a part of one more."""
    left, whole = int(rng.integers(0, 40)), os.pwritev

    def pwritev(file, views, offset):
        nonlocal left
        if not left:
            data = b"".join(views)
            os.pwrite(file, data[: int(rng.integers(0, len(data) + 1))], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return whole(file, views, offset)

    os.pwritev = pwritev


def write_until_killed(path: pathlib.Path, max_records: int, first: int, acknowledge: int) -> None:
    """Batches of consecutive ids; tells of each batch that `write` returned from."""
    store = open_store(path, max_records)
    for start in range(first, first + PER_ROUND, BATCH):
        ids = range(start, start + BATCH)
        store.write(keys(*ids), records(*ids, record_bytes=RECORD_BYTES))
        os.write(acknowledge, b"x")


def one_round(path: pathlib.Path, mode: str, max_records: int, number: int, kept: list[int]) -> dict:
    """`kept`: what an undisturbed store would hold, oldest first; updated."""
    rng = np.random.default_rng(number)
    receive, acknowledge = os.pipe()
    first = number * PER_ROUND
    child = os.fork()
    if not child:
        try:
            if mode == "call":
                die_in_call(rng)
            write_until_killed(path, max_records, first, acknowledge)
        finally:
            os._exit(1)  # only if something went wrong
    os.close(acknowledge)
    acknowledged = 0
    if mode == "time":
        acknowledged = len(os.read(receive, 1)) * BATCH  # it is at work
        time.sleep(float(rng.uniform(0, 0.02)))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while data := os.read(receive, 65536):
        acknowledged += len(data) * BATCH
    os.close(receive)

    kept += range(first, first + acknowledged)
    # The batch in flight may have pushed out the oldest, and may or may not be there, in part.
    must = kept[-(max_records - BATCH) :]
    may = {*kept[-max_records:], *range(first + acknowledged, first + acknowledged + BATCH)}
    ids = [*kept[-max_records - BATCH :], *range(first + acknowledged, first + acknowledged + BATCH)]
    with open_store(path, max_records) as store:
        buffers = np.full((len(ids), RECORD_BYTES), 0xEE, np.uint8)
        good = store.read_into(keys(*ids), buffers)
        expected = records(*ids, record_bytes=RECORD_BYTES)
        served = {i for i, flag in zip(ids, good, strict=True) if flag}
        report = {
            "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            "acknowledged": acknowledged,
            "lost": sorted(set(must) - served),
            "unexpected": sorted(served - may),
            "wrong": int((buffers[good] != expected[good]).any(1).sum()),
            "in_flight_served": sorted(served - set(kept)),
            "corrupted": store.stats().corrupted,
            "records": store.stats().records,
        }
    kept += report["in_flight_served"]
    kept[:] = [i for i in kept if i in served][-max_records:]
    return report


def main() -> None:
    path, mode, rounds, max_records = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    kept: list[int] = []
    for number in range(rounds):
        print(json.dumps(one_round(path, mode, max_records, number, kept)), flush=True)


if __name__ == "__main__":
    main()
