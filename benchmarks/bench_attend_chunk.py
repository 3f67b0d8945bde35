"""attend of a long chunk of one request: over its fp8 rows, and over bf16 rows they are decoded to once.

    python benchmarks/bench_attend_chunk.py path/to/libdsv4_cuda.so [--old LIBRARY] [--variant LIBRARY ...]
        [--tokens 4096] [--json FILE]

Kernel times by CUDA-graph replays of the plain C entries. Before timing, every result over bf16 rows is compared with
that over the fp8 rows they come from, bit by bit. Windows of neighbouring tokens overlap; CSA's tokens choose 512 of
32,768 entries each, HCA's see all before them. `--variant`: other builds of csrc/attend_rows.cu, checked and timed in
the same run, in turns. Needs torch and a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import pathlib
from collections.abc import Callable

import torch
from bench_attend_graph import Case, check, check_batch_invariance, decode, make_pool
from graph_timing import Recorder, copy_ceiling, in_turns, microseconds

from dsv4_jax.cuda.attend import cut, split_count
from dsv4_jax.cuda.c_entries import AttendRowsArgs, Rows, open_entry

BLOCKS = 132  # of an H100 or H200
CHUNKS = {"swa": (64, 0, 0), "csa": (64, 512, 32_768), "hca-8k": (64, 64, 64), "hca-128k": (64, 1024, 1024),
          "csa-pro": (128, 1024, 32_768)}  # fmt: skip
DECODE = (("swa-flash", 64, 0, (1, 64)), ("csa-flash", 64, 512, (1, 16, 64, 256)), ("hca-128k", 64, 1024, (1, 256)))

# Tokens, heads, window, entries; runs at most, tiles of a run at most, runs at least.
COMPARED = (
    ((300, 64, 128, 512), (2, 9, 1)), ((5, 16, 130, 77), (3, 2, 1)), ((140, 130, 128, 1100), (5, 3, 4)),
    ((2, 64, 128, 8192), (8, 9, 1)), ((3, 64, 1, 1), (1, 9, 1)), ((200, 64, 128, 0), (1, 9, 1)),
)  # fmt: skip


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def one_block(library: ctypes.CDLL) -> Callable[..., None]:
    """Its attend over fp8 rows with a block a run, as many tokens have."""
    entry = open_entry(library, "attend")
    return lambda args, splits, *cut_and_stream: entry(args, splits, 1, *cut_and_stream)


class Chunk(Case):
    """A chunk's arguments: over fp8 rows (`args`), and over bf16 rows (`rows`)."""

    def __init__(self, tokens: int, heads: int, window: int, entries: int, pools, **how):
        super().__init__(tokens, heads, window, entries, pools, **how)
        self.dense = [decode(pool).to(torch.bfloat16) for pool in pools]

    def over_rows(self, splits: int, fused: bool) -> AttendRowsArgs:
        args = self.arguments(0, self.queries.shape[0], fused)
        for name, dense in zip(("window", "entries"), self.dense, strict=True):
            setattr(args, name, Rows(dense.data_ptr(), None, None, dense.shape[0]))
        self.sums = torch.empty((BLOCKS, max(splits - 1, 1), 65_536), device="cuda", dtype=torch.uint8)
        return AttendRowsArgs(args, self.sums.data_ptr())


def compare(fp8, kernels, tokens: int, heads: int, window: int, entries: int, cuts: tuple[int, int, int]) -> None:
    pools = (make_pool(max(1024, 2 * window)), make_pool(4096))
    case = Chunk(tokens, heads, window, entries, pools, ragged=True)
    for fused in (False, True):
        fp8(case.arguments(0, tokens, fused), *cuts, stream())
        out, lse = case.out, case.lse
        for (name, rows), blocks in itertools.product(kernels.items(), (BLOCKS, 3)):
            args = case.over_rows(cuts[0], fused)
            rows(args, blocks, *cuts, stream())
            torch.cuda.synchronize()
            verdict = "equal"
            if not (torch.equal(case.out, out) and torch.equal(case.lse, lse)):
                off = (case.out.float() - out.float()).norm() / out.float().norm()
                verdict = f"NOT EQUAL, {float(off):.1e}, lse {float((case.lse - lse).abs().max())}"
            shape = f"{name}: {tokens} tokens, {heads} heads, {window} + {entries} keys, cut {cuts}"
            print(f"{shape}, fused {fused}, {blocks} blocks: {verdict}", flush=True)


def chunk_case(name: str, tokens: int, pools) -> Chunk:
    heads, entries, total = CHUNKS[name]
    case = Chunk(tokens, heads, 128, entries, pools, fused=True)
    position = torch.arange(tokens, device="cuda")
    case.window_ids = (position[:, None] + torch.arange(128, device="cuda")).int()
    if name.startswith("csa"):
        case.entry_ids = torch.rand((tokens, 4 * entries), device="cuda").mul_(total).int()[:, :entries].contiguous()
    elif entries:
        case.entry_ids = torch.arange(entries, device="cuda").expand(tokens, entries).int().contiguous()
        case.count = (entries - tokens // 128 + (position + 1) // 128).clamp(min=0).int()
    return case


def time_chunks(fp8, kernels, tokens: int, recorder: Recorder) -> None:
    for name, (heads, entries, total) in CHUNKS.items():
        pools = (make_pool(tokens + 256), make_pool(max(total, 64)))
        case = chunk_case(name, tokens, pools)
        splits = split_count(128, entries, heads)
        cuts = (splits, *cut(heads))
        plain = case.arguments(0, tokens, fused=True)
        fp8(plain, *cuts, stream())
        (out, kept), over = (case.out, case.lse), case.over_rows(splits, fused=True)  # the graphs write to both
        calls: dict[str, Callable[[], object]] = {"fp8 rows": lambda a=plain, c=cuts: fp8(a, *c, stream())}
        for kernel, rows in kernels.items():
            calls[kernel] = lambda a=over, c=cuts, r=rows: r(a, BLOCKS, *c, stream())
            case.out.fill_(torch.nan)
            calls[kernel]()
            if not (torch.equal(out, case.out) and torch.equal(kept, case.lse)):
                print(f"{name}: {kernel} NOT EQUAL", flush=True)
        keys = 128 * tokens + int(case.count.sum()) * (entries > 0)
        for kernel, us in in_turns(calls).items():
            print(f"{name:9} {kernel:20} {us:7.1f} us, {4 * heads * 512 * keys / us / 1e6:4.0f} TFLOP/s", flush=True)
            how = {} if kernel == "library" else {"variant": kernel, "tuning": True}
            recorder.add("attend", f"{name}-chunk", tokens, us, **how)


def time_decode(libraries, pools, fused: bool = True) -> None:
    for name, heads, entries, batches in DECODE:
        for batch in batches:
            sets = max(4, min(64, 220_000_000 // (batch * (128 + entries) * 584)))
            cases = [Case(batch, heads, 128, entries, pools, fused=fused) for _ in range(sets)]
            row = []
            for split in ("throughput", "latency"):
                cuts = (split_count(128, entries, heads, split), *cut(heads, split))
                for entry in libraries:
                    row.append(microseconds([lambda c=c, e=entry, n=cuts: e(c.args, *n, stream()) for c in cases]))
            print(f"{name:10} batch {batch:3}  " + "  ".join(f"{us:6.2f}" for us in row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--old", help="another library, whose decode times are shown before")
    parser.add_argument("--variant", action="append", default=[], type=pathlib.Path, metavar="LIBRARY")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    fp8, kernels = one_block(library), {"library": open_entry(library, "attend_rows")}
    kernels |= {path.stem: open_entry(ctypes.CDLL(str(path)), "attend_rows") for path in options.variant}
    torch.manual_seed(0)
    check(lambda args, n: fp8(args, n, 1 << 20, n, stream()), 65, 64, 128, 512, 2)
    check_batch_invariance(lambda args, n: fp8(args, n, 1 << 20, n, stream()), 2)
    if options.old:
        print("decode, us: throughput old, new; latency old, new", flush=True)
        time_decode([one_block(ctypes.CDLL(options.old)), fp8], (make_pool(1 << 19), make_pool(3 << 20)))
    for shape, cuts in COMPARED:
        compare(fp8, kernels, *shape, cuts)
    recorder = Recorder()
    time_chunks(fp8, kernels, options.tokens, recorder)
    recorder.write(options.json, copy_gb_per_s=copy_ceiling())


if __name__ == "__main__":
    main()
