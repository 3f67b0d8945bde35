"""As many random mixes as wanted, one after the other, and what they exercised. See dsv4_jax/testing/mixes.py.

python -m tests.serving.check --mixes 500
python -m tests.serving.check --mixes 200 --handed     prompts computed by another host, of another draft width
"""

from __future__ import annotations

import argparse
import sys
import time

from rich.progress import track

from dsv4_jax.testing.serving import Mixes

from .engine import runner
from .handed import HandedMixes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first mix (default: 0)")
    parser.add_argument("--kv-format", default="f32", help="default: f32, in which no rounding hides a difference")
    parser.add_argument("--index-format", default="f32")
    parser.add_argument("--handed", action="store_true", help="prompts come through a prefill host without drafts")
    args = parser.parse_args()
    formats, start = (args.kv_format, args.index_format), time.perf_counter()
    mixes = HandedMixes(runner(*formats), runner(*formats, drafts=0)) if args.handed else Mixes(runner(*formats))
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
