"""As many random mixes as wanted, one after the other, and what they exercised. See mixes.py.

python -m tests.serving.check --mixes 500
"""

from __future__ import annotations

import argparse
import collections
import sys
import time

import numpy as np
from rich.progress import track

import dsv4_jax as dsv4

from .engine import SIZE, Model, with_garbage
from .mixes import HOST, Mix

# What a run has to have seen for its equalities to mean anything.
EXERCISED = (
    "hits on the device", "hits on the host", "prefixes restored from device snapshots", "preemptions",
    "resumes from parked state", "resumes from a cached prefix", "resumes from nothing", "forks",
    "forks before the first step", "drafts accepted", "drafts rejected", "steps taken back whole", "sleeps", "aborts",
    "reservations", "replayed tokens", "blocks out", "blocks in", "snapshots out", "snapshots in",
    "evictions from the device", "evictions from the host", "snapshot evictions", "duplicate blocks",
    "waits for a slot", "steps without enough blocks",
)  # fmt: skip


class Mixes:
    """Mixes one after the other in the same arrays."""

    def __init__(self, kv_format: str = "f32", index_format: str = "f32") -> None:
        self.model, self.seen = Model(kv_format, index_format), collections.Counter[str]()
        layout = self.model.layout
        self.cache = with_garbage(dsv4.init_cache(layout, SIZE), np.random.default_rng(0))
        self.host = dsv4.init_host_cache(layout, HOST.num_blocks, snapshots=HOST.num_snapshots)

    def run(self, seed: int, kind: type[Mix] = Mix) -> None:
        mix = kind(self.model, self.cache, self.host, seed, self.seen)
        try:
            mix.run()
        except Exception as error:
            error.add_note(f"in mix {seed}")
            raise
        finally:
            self.cache, self.host = mix.cache, mix.host
        self.seen["mixes"] += 1

    @property
    def missing(self) -> list[str]:
        """What should have happened and did not."""
        return [name for name in EXERCISED if not self.seen[name]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first mix (default: 0)")
    parser.add_argument("--kv-format", default="f32", help="default: f32, in which no rounding hides a difference")
    parser.add_argument("--index-format", default="f32")
    args = parser.parse_args()
    mixes, start = Mixes(args.kv_format, args.index_format), time.perf_counter()
    seeds = range(args.first, args.first + args.mixes)
    for seed in track(seeds, "mixes", disable=not sys.stdout.isatty()):
        mixes.run(seed)
    for name, count in sorted(mixes.seen.items()):
        print(f"{name:42} {count:>9}")
    print(f"{args.mixes} mixes in {time.perf_counter() - start:.1f} s: all equal to lone, cold runs, bit by bit")
    if mixes.missing:
        raise SystemExit(f"never happened: {', '.join(mixes.missing)}")


if __name__ == "__main__":
    main()
