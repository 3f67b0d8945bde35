"""Kernel time of the CUDA attend: CUDA-graph replays of the library's plain C entry. Needs torch and a GPU.

    python benchmarks/bench_attend_graph.py path/to/libdsv4_cuda.so [--splits 1,2,5] [--fused] [--json FILE]

A graph holds one call for each of several input sets (4 to 64 of them, so that a replay reads >= 200 MB of rows if it
can); the time of a call is the median replay over the calls. Before timing, results are checked against float64 and
the rows of a batch of 256 against smaller batches, bit by bit, among them those whose runs have several blocks.
Rows: a random 128-row run of the window pool and random rows of a pool of 3 * 2^20 entries. `--fused` times calls that
turn the output's RoPE dims back and round it to bf16.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import pathlib

import torch
from graph_timing import Recorder, copy_ceiling, microseconds

from dsv4_jax.cuda.attend import SUM_WORDS, WIDE_CLUSTERS, blocks_of_run, cut, split_count, tile_count
from dsv4_jax.cuda.c_entries import AttendArgs, Rows, open_entry
from dsv4_jax.ops.attend import KernelSplit

SHAPES = {
    "csa-flash": (64, 128, 512, (1, 8, 16, 64, 128, 256)),
    "hca-flash-128k": (64, 128, 1024, (1, 8, 64, 256)),
    "hca-flash-1m": (64, 128, 8192, (1, 16)),
    "csa-pro": (128, 128, 1024, (1, 64, 256)),
    "swa-flash": (64, 128, 0, (1, 64)),
}
SCALE = 512**-0.5


def make_pool(rows: int) -> tuple[torch.Tensor, ...]:
    nope = torch.randint(0, 0x7F, (rows, 448), device="cuda", dtype=torch.uint8)
    nope |= torch.randint(0, 2, (rows, 448), device="cuda", dtype=torch.uint8) << 7
    rope = torch.randn((rows, 64), device="cuda").to(torch.bfloat16)
    return nope, rope, torch.randint(116, 123, (rows, 8), device="cuda", dtype=torch.uint8)


def decode(pool: tuple[torch.Tensor, ...]) -> torch.Tensor:
    nope, rope, scale = pool
    factor = torch.exp2(scale[:, :7].double() - 127).repeat_interleave(64, 1)
    return torch.cat([nope.view(torch.float8_e4m3fn).double() * factor, rope.double()], 1)


class Case:
    """One set of arguments and its outputs."""

    def __init__(self, tokens: int, heads: int, window: int, entries: int, pools, *, ragged=False, fused=False):
        self.pools, self.window, self.entries = pools, window, entries
        w_rows, e_rows = (p[0].shape[0] for p in pools)
        start = torch.randint(0, w_rows - window + 1, (tokens, 1), device="cuda")
        self.queries = torch.randn((tokens, heads, 512), device="cuda").to(torch.bfloat16)
        self.sink = torch.randn(heads, device="cuda")
        self.window_ids = (start + torch.arange(window, device="cuda")).int()
        self.visible = torch.ones((tokens, window), device="cuda", dtype=torch.bool)
        self.entry_ids = torch.randint(0, e_rows, (tokens, max(entries, 1)), device="cuda", dtype=torch.int32)
        self.count = torch.full((tokens,), entries, device="cuda", dtype=torch.int32)
        if ragged:
            share = torch.rand((tokens, 1), device="cuda")
            self.visible = torch.rand((tokens, window), device="cuda") < share
            self.count = torch.randint(0, entries + 1, (tokens,), device="cuda", dtype=torch.int32)
            self.count[0] = 0
        angle = torch.rand((tokens, 32), device="cuda") * 100
        self.cosine, self.sine = angle.cos(), angle.sin()
        self.args = self.arguments(0, tokens, fused)

    def arguments(self, first: int, tokens: int, fused: bool = False) -> AttendArgs:
        part = slice(first, first + tokens)
        heads = self.sink.shape[0]
        dtype = torch.bfloat16 if fused else torch.float32
        self.out = torch.full((tokens, heads, 512), math.nan, device="cuda", dtype=dtype)
        self.lse = torch.full((tokens, heads), math.nan, device="cuda")
        # Of runs with clusters of their own.
        self.sums = torch.empty((WIDE_CLUSTERS, SUM_WORDS), device="cuda", dtype=torch.int32)
        rows = [Rows(*(x.data_ptr() for x in pool), pool[0].shape[0]) for pool in self.pools]
        ids = [x[part].data_ptr() for x in (self.window_ids, self.visible, self.entry_ids, self.count)]
        return AttendArgs(
            self.queries[part].data_ptr(), self.sink.data_ptr(), *rows, *ids, self.out.data_ptr(), self.lse.data_ptr(),
            tokens, heads, self.window, self.entries, SCALE * math.log2(math.e),
            *((x[part].data_ptr() if fused else None) for x in (self.cosine, self.sine)), fused,
            self.sums.data_ptr(),
        )  # fmt: skip

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        window, entries = (decode(pool) for pool in self.pools)
        out, lse = [], []
        for t in range(self.queries.shape[0]):
            own = window[self.window_ids[t].long()][self.visible[t]]
            keys = torch.cat([own, entries[self.entry_ids[t, : int(self.count[t])].long()]])
            weights = torch.exp(self.queries[t].double() @ keys.T * SCALE)
            out.append(weights @ keys / (weights.sum(1) + self.sink.double().exp())[:, None])
            lse.append(weights.sum(1).log())
        return torch.stack(out), torch.stack(lse)


def turned_back(out: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """What the fused form makes of a plain output: one torch kernel an operation, so every product is rounded."""
    even, odd = out[..., 448::2], out[..., 449::2]
    c, s = cosine[:, None], sine[:, None]
    rotary = torch.stack([even * c + odd * s, odd * c - even * s], -1)
    return torch.cat([out[..., :448], rotary.reshape(*out.shape[:-1], 64)], -1).to(torch.bfloat16)


def check(launch, tokens: int, heads: int, window: int, entries: int, splits: int) -> None:
    case = Case(tokens, heads, window, entries, (make_pool(max(1024, 2 * window)), make_pool(4096)), ragged=True)
    launch(case.args, splits)
    out, lse = case.reference()
    seen = lse.isfinite()
    error = float((case.out.double() - out).norm() / out.norm())
    lse_error = float((case.lse.double() - lse)[seen].abs().max())
    assert error <= 3e-3 and lse_error <= 1e-3, (tokens, heads, window, entries, splits, error, lse_error)
    assert torch.equal(case.lse.isneginf(), lse.isneginf())
    plain = case.out
    launch(case.arguments(0, tokens, fused=True), splits)
    assert torch.equal(case.out, turned_back(plain, case.cosine, case.sine))
    print(f"{tokens:4} tokens {heads:3} heads {window:3} + {entries:4} keys, {splits} splits: "
          f"relative L2 {error:.1e}, LSE {lse_error:.0e}")  # fmt: skip


def check_small_calls(default, heads: int, window: int, entries: int, key_split: KernelSplit) -> None:
    """Calls of up to 14 tokens against one of 32, which has one block a run."""
    case = Case(32, heads, window, entries, (make_pool(1024), make_pool(4096)), ragged=True)
    for fused in (False, True):
        default(case.arguments(0, 32, fused), key_split)
        out, lse = case.out, case.lse
        for first, size in ((0, 1), (5, 2), (5, 3), (9, WIDE_CLUSTERS // -(-heads // 64))):
            default(case.arguments(first, size, fused), key_split)
            assert torch.equal(case.out, out[first : first + size]), (heads, window, entries, first, size)
            assert torch.equal(case.lse, lse[first : first + size]), (heads, window, entries, first, size)


def check_batch_invariance(launch, splits: int) -> None:
    case = Case(256, 64, 128, 512, (make_pool(1024), make_pool(4096)), ragged=True)
    launch(case.args, splits)
    out, lse = case.out, case.lse
    for size in (1, 2, 16, 64):
        for first in (0, 3, 128):
            launch(case.arguments(first, size), splits)
            assert torch.equal(case.out, out[first : first + size])
            assert torch.equal(case.lse, lse[first : first + size])


def record(recorder: Recorder, name: str, batch: int, default: float, latency: float, times: dict[int, float]) -> None:
    """The default's time, that of `latency`, and every split count's with one block a run."""
    recorder.add("attend", name, batch, default)
    recorder.add("attend", name, batch, latency, variant="latency")
    for count, us in times.items():
        recorder.add("attend", name, batch, us, variant=f"{count} split{'s' * (count > 1)}", tuning=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--splits", default="1,2,4,5,6,8")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    options = parser.parse_args()
    splits = [int(x) for x in options.splits.split(",")]
    entry = open_entry(ctypes.CDLL(options.library), "attend")

    def launch(args: AttendArgs, count: int) -> None:
        entry(args, count, 1, 1 << 20, count, torch.cuda.current_stream().cuda_stream)

    def default(args: AttendArgs, key_split: KernelSplit = "throughput") -> None:
        splits = split_count(args.window_keys, args.entry_keys, args.heads, key_split)
        tiles, stream = tile_count(args.window_keys, args.entry_keys), torch.cuda.current_stream().cuda_stream
        blocks = blocks_of_run(args.tokens, args.heads, splits, tiles)
        entry(args, splits, blocks, *cut(args.heads, key_split), stream)

    torch.manual_seed(0)
    for shape in ((1, 64, 128, 64), (257, 64, 128, 512), (5, 16, 130, 77), (4, 128, 128, 1024), (64, 130, 128, 300),
                  (2, 64, 128, 8192), (3, 64, 1, 1)):  # fmt: skip
        for count in (1, 2, 5, 8):
            check(launch, *shape, count)
    check_batch_invariance(launch, 2)
    for heads in (16, 64, 130):
        for keys in ((128, 64), (128, 512), (1, 200), (70, 1000), (128, 1024), (128, 8192)):
            for key_split in ("throughput", "latency"):
                check_small_calls(default, heads, *keys, key_split)
    ceiling = copy_ceiling()
    print(f"copy ceiling {ceiling:.0f} GB/s; us of the default, of latency, and per split count:")
    pools, recorder = (make_pool(1 << 19), make_pool(3 << 20)), Recorder()
    for name, (heads, window, entries, batches) in SHAPES.items():
        for batch in batches:
            moved = batch * (window + entries) * 584
            sets = max(4, min(64, 220_000_000 // moved))
            cases = [Case(batch, heads, window, entries, pools, fused=options.fused) for _ in range(sets)]
            times = {n: microseconds([lambda c=c, n=n: launch(c.args, n) for c in cases]) for n in splits}
            us = microseconds([lambda c=c: default(c.args) for c in cases])
            latency = microseconds([lambda c=c: default(c.args, "latency") for c in cases])
            best = min(us, latency, *times.values())
            flops = 4 * heads * 512 * (window + entries) * batch
            row = "  ".join(f"{count}: {x:6.1f}" for count, x in times.items())
            rates = (
                f"{moved / best / 1e3:5.0f} GB/s {moved / best / 1e3 / ceiling:4.0%} {flops / best / 1e6:4.0f} TFLOP/s"
            )
            print(f"{name:15} batch {batch:3}  {us:6.1f}  {latency:6.1f}  {row}  best {rates}", flush=True)
            record(recorder, name, batch, us, latency, times)
    recorder.write(options.json, copy_gb_per_s=ceiling)


if __name__ == "__main__":
    main()
