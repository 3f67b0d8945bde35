"""Kernel times of the CUDA index_scores and top_k: CUDA-graph replays of the plain C entries. Needs torch and a GPU.

    python benchmarks/bench_select_graph.py path/to/libdsv4_cuda.so [--only index_scores,top_k] [--quick]

A graph holds one call for each of several input sets, so many that a replay touches >= 200 MB where that is
possible; the time of a call is the median replay over the calls. Results are checked first: scores against float64,
top-k against a stable sort. Keys: random blocks of 32 of a pool of 2^22 keys; the bytes counted are the visible keys'.

Queries rounded to FP4 (`--queries qat`, as the model's are) take FP8 products; others (`plain`) take bf16 ones.
`--run-tiles` overrides what the launch would choose.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import pathlib

import torch
from graph_timing import Recorder, copy_ceiling, microseconds

from dsv4_jax.cuda.c_entries import ScoreArgs, TopKArgs, open_entry

ROWS_PER_BLOCK = 32
CONTEXTS = {2048: "8k", 8192: "32k", 32768: "128k", 262144: "1m"}  # by the number of keys or scores
ROW_BYTES = {"fp4": 68, "fp8": 132}
SCORE_SHAPES = ((1, 8192), (1, 32768), (1, 262144), (16, 32768), (64, 2048), (64, 32768), (256, 2048), (256, 32768))
# DeepGEMM's fp8 times of the same shapes on the same kind of machine, us.
DEEPGEMM = {(1, 8192): 3.8, (1, 32768): 4.3, (1, 262144): 13.0, (16, 32768): 22.0, (64, 2048): 8.4, (64, 32768): 70.5,
            (256, 32768): 262.9, (4096, 8192): 500, (4096, 32768): 2250}  # fmt: skip
PREFILL_SHAPES = ((4096, 8192), (4096, 32768))  # tokens of one request
TOP_SHAPES = ((1, 2048, 512), (1, 8192, 512), (1, 32768, 512), (1, 262144, 512), (1, 262144, 1024), (16, 32768, 512),
              (16, 262144, 512), (64, 2048, 512), (64, 32768, 512), (64, 32768, 1024), (256, 32768, 512),
              (4096, 2048, 512), (4096, 8192, 512), (4096, 32768, 512))  # fmt: skip
VLLM = {(1, 2048, 512): 3.0, (1, 8192, 512): 4.4, (1, 32768, 512): 9.1, (1, 262144, 512): 15.1, (1, 262144, 1024): 15.3,
        (16, 32768, 512): 10.5, (16, 262144, 512): 26.6, (64, 2048, 512): 3.8, (64, 32768, 512): 12.4,
        (64, 32768, 1024): 13.0, (256, 32768, 512): 27.2}  # fmt: skip


def to_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 128] float -> codes [n, 128], exponents [n, 4] (dsv4_jax/formats/index_fp4.py), without the corner cases."""
    groups = x.float().reshape(-1, 4, 32)
    mantissa, exponent = torch.frexp(groups.abs().amax(-1).clamp(min=1e-30))  # 6 is 0.75 * 2^3
    exponent = exponent - 3 + (mantissa > 0.75)
    scaled = torch.ldexp(groups, -exponent[..., None])
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], device="cuda")
    codes = torch.bucketize(scaled.abs(), midpoints)  # ties do not matter here
    return (codes + 8 * (scaled < 0)).reshape(-1, 128).to(torch.uint8), exponent


def fp4_values(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda", dtype=torch.float64)
    return torch.cat([values, -values])[codes.long()]


def make_keys(fmt: str, rows: int, kind: str = "spread") -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes; scales of the groups of an fp4 key `equal`, or `spread` over 2^10, or of encoded `normal` rows."""
    codes = torch.randint(0, 256, (rows, 64 if fmt == "fp4" else 128), device="cuda", dtype=torch.uint8)
    if fmt == "fp4":
        if kind == "normal":
            codes, exponent = to_fp4(torch.randn((rows, 128), device="cuda"))
            return codes[:, 0::2] | codes[:, 1::2] << 4, (exponent + 127).to(torch.uint8)
        low, high = (120, 131) if kind == "spread" else (124, 125)
        return codes, torch.randint(low, high, (rows, 4), device="cuda", dtype=torch.uint8)
    if kind == "normal":
        return torch.randn((rows, 128), device="cuda").mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).view(
            torch.uint8
        ), torch.full((rows, 1), 0.01, device="cuda")
    codes = torch.where((codes & 0x7F) == 0x7F, codes & 0xFE, codes)
    return codes, torch.exp2(torch.randint(-8, -4, (rows, 1), device="cuda").float())


def make_queries(kind: str, tokens: int, heads: int) -> torch.Tensor:
    x = torch.randn((tokens * heads, 128), device="cuda")
    if kind == "qat":
        codes, exponent = to_fp4(x)
        x = fp4_values(codes) * torch.exp2(exponent.double()).repeat_interleave(32, 1)
    return x.reshape(tokens, heads, 128).to(torch.bfloat16)


def decode(fmt: str, keys: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    codes, scale = (x[rows] for x in keys)
    if fmt == "fp8":
        return codes.view(torch.float8_e4m3fn).double() * scale.double()
    pairs = torch.stack([codes & 15, codes >> 4], -1).reshape(len(rows), 128)
    return fp4_values(pairs) * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


class ScoreCase:
    def __init__(self, fmt: str, keys, tokens: int, entries: int, heads: int = 64, ragged: bool = False,
                 queries: str = "plain", run_tiles: int = 0):  # fmt: skip
        columns = entries // ROWS_PER_BLOCK
        key_blocks = keys[0].shape[0] // ROWS_PER_BLOCK
        self.fmt, self.keys = fmt, keys
        self.fp8 = queries == "qat"  # then the kernel takes FP8 products
        self.queries = make_queries(queries, tokens, heads)
        self.weights = torch.randn((tokens, heads), device="cuda")
        self.table = torch.randint(0, key_blocks, (tokens, columns), device="cuda", dtype=torch.int32)
        self.count = torch.full((tokens,), entries, device="cuda", dtype=torch.int32)
        if ragged:
            self.count = torch.randint(0, entries + 1, (tokens,), device="cuda", dtype=torch.int32)
            self.count[0] = 0
        self.scores = torch.full((tokens, entries), math.nan, device="cuda")
        data = [x.data_ptr() for x in (*keys, self.queries, self.weights, self.table, self.count, self.scores)]
        self.args = ScoreArgs(*data, tokens, heads, columns, 0, ROWS_PER_BLOCK, run_tiles, heads, 1.0, key_blocks)

    def check(self) -> tuple[float, float]:
        """Worst over tokens: relative L2, and the largest error relative to the token's largest score.

        bf16 products lose nothing, sums are of float32. FP8 products are cut off 2^-13 below the leading bit of the
        largest of a step of 32 (DeepGEMM's, the same, lose 1.5e-4 of arbitrary fp8 keys).
        """
        offsets = torch.arange(ROWS_PER_BLOCK, device="cuda")
        worst = greatest = 0.0
        for t, n in enumerate(self.count.tolist()):
            rows = (self.table[t].long()[:, None] * ROWS_PER_BLOCK + offsets).reshape(-1)[:n]
            dots = self.queries[t].double() @ decode(self.fmt, self.keys, rows).T
            want = self.weights[t].double() @ dots.clamp(min=0)
            got = self.scores[t].double()
            got = torch.where(got.isnan(), math.inf, got)  # a NaN would be lost in the maxima below
            assert got[n:].isneginf().all()
            if n:
                error = got[:n] - want
                worst = max(worst, float(error.norm() / want.norm()))
                greatest = max(greatest, float(error.abs().max() / want.abs().max()))
        return worst, greatest


def bench_scores(library: ctypes.CDLL, options: argparse.Namespace, ceiling: float, recorder: Recorder) -> int:
    """Checks, reports and goes on; the number of wrong results."""
    wrong = 0
    entry = open_entry(library, "index_scores")

    def launch(case: ScoreCase) -> None:
        entry(case.args, case.fmt == "fp8", torch.cuda.current_stream().cuda_stream)

    for fmt in options.formats.split(","):
        for kind, queries in itertools.product(("normal", "equal", "spread"), ("qat", "plain")):
            keys = make_keys(fmt, 1 << 20, kind)
            shapes = ((1, 32, 64), (5, 96, 64), (7, 4128, 16), (3, 32768, 64), (2, 262144, 61))
            for tokens, entries, heads in shapes:
                case = ScoreCase(fmt, keys, tokens, entries, heads, tokens > 1, queries)
                launch(case)
                l2, most = case.check()
                good = l2 < (5e-4 if case.fp8 else 2e-6)
                wrong += not good
                print(f"index_scores {fmt} {kind} keys, {queries} queries, {tokens} x {entries}, {heads} heads, "
                      f"relative L2 {l2:.1e}, largest {most:.1e}{'' if good else ' WRONG'}",
                      flush=True)  # fmt: skip
        keys = make_keys(fmt, 1 << 22)
        shapes = SCORE_SHAPES[:3] if options.quick else SCORE_SHAPES
        runs = [int(x) for x in options.run_tiles.split(",")]
        for queries, run, shape in itertools.product(options.queries.split(","), runs, shapes):
            tokens, entries = shape
            moved = tokens * entries * ROW_BYTES[fmt]
            copies = max(2, min(64, 220_000_000 // moved))
            cases = [ScoreCase(fmt, keys, tokens, entries, 64, False, queries, run) for _ in range(copies)]
            us = microseconds([lambda c=c: launch(c) for c in cases])
            peer = DEEPGEMM.get(shape)
            flops = 2 * 64 * 128 * tokens * entries
            products = "fp8" if cases[0].fp8 else "bf16"
            print(f"index_scores {fmt} {queries:5}, {products:4} products, run {run:2}, "
                  f"{tokens:3} x {entries:6}: {us:7.1f} us, {moved / us / 1e3:5.0f} GB/s "
                  f"({moved / us / 1e3 / ceiling:4.0%} of copy), {flops / us / 1e6:4.0f} TFLOP/s, DeepGEMM fp8 "
                  f"{peer or '-'} ({f'{us / peer:.2f}x' if peer else ''})", flush=True)  # fmt: skip
            recorder.add(
                "index_scores", f"{fmt}-{CONTEXTS[entries]}", tokens, us, peer_us=peer,
                of_copy=moved / us / 1e3 / ceiling, variant=None if queries == "qat" else "bf16 queries",
                tuning=True if run else None,
            )  # fmt: skip
        for tokens, entries in () if options.quick else PREFILL_SHAPES:
            case = ScoreCase(fmt, keys, tokens, entries, 64, False, "qat")
            case.table.copy_(case.table[:1].expand_as(case.table).clone())
            us, peer = microseconds([lambda c=case: launch(c)], 5), DEEPGEMM[tokens, entries]
            flops = 2 * 64 * 128 * tokens * entries
            print(f"index_scores {fmt} prefill, {tokens} x {entries:6}: {us:7.0f} us, {flops / us / 1e6:4.0f} TFLOP/s, "
                  f"DeepGEMM fp8 {peer} ({us / peer:.2f}x)", flush=True)  # fmt: skip
            recorder.add("index_scores", f"{fmt}-{CONTEXTS[entries]}-prefill", tokens, us, peer_us=peer)
    return wrong


class TopCase:
    def __init__(self, tokens: int, width: int, k: int, kind: str = "normal"):
        self.k = min(k, width)
        self.scores = torch.randn((tokens, width), device="cuda")
        self.count = torch.full((tokens,), width, device="cuda", dtype=torch.int32)
        if kind != "normal":
            self.count = torch.randint(0, width + 1, (tokens,), device="cuda", dtype=torch.int32)
            self.count[0] = width
        if kind == "ties":
            self.scores = self.scores.clamp(min=0).mul(4).round()
        if kind == "close":
            self.scores = self.scores * 0.01 + 100
        if kind == "relu":
            self.scores[torch.rand_like(self.scores) < 0.97] = 0
        if kind == "zeros":
            self.scores = torch.where(torch.rand_like(self.scores) < 0.5, -0.0, 0.0)
        if kind == "odd":
            self.scores[torch.rand_like(self.scores) < 0.1] = math.nan
            self.scores[torch.rand_like(self.scores) < 0.1] = -math.inf
            self.scores[torch.rand_like(self.scores) < 0.001] = math.inf
        self.indices = torch.full((tokens, self.k), -1, device="cuda", dtype=torch.int32)
        self.kept = torch.full((tokens,), -1, device="cuda", dtype=torch.int32)
        data = [x.data_ptr() for x in (self.scores, self.count, self.indices, self.kept)]
        self.args = TopKArgs(*data, width, self.k)

    def check(self) -> None:
        for t, n in enumerate(self.count.tolist()):
            ranked = self.scores[t, :n].nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf) + 0.0
            want = torch.sort(ranked, descending=True, stable=True).indices[: self.k]
            assert int(self.kept[t]) == len(want)
            assert torch.equal(self.indices[t, : len(want)].long(), want), t
            assert not self.indices[t, len(want) :].any()


def bench_top_k(library: ctypes.CDLL, quick: bool, ceiling: float, recorder: Recorder) -> None:
    entry = open_entry(library, "top_k")

    def launch(case: TopCase) -> None:
        tokens = case.scores.shape[0]
        entry(case.args, tokens, torch.cuda.current_stream().cuda_stream)

    for kind in ("normal", "ragged", "ties", "close", "relu", "zeros", "odd"):
        for tokens, width, k in (
            (1, 1, 1),
            (3, 5, 4),
            (9, 2048, 512),
            (3, 4096, 1024),
            (3, 8192, 512),
            (3, 16384, 512),
            (5, 32767, 1000),
            (3, 65536, 512),
            (20, 65536, 512),
            (70, 40000, 512),
            (20, 131072, 512),
            (300, 2048, 512),
            (140, 8190, 512),
            (300, 32768, 512),
            (3, 262144, 1024),
        ):
            case = TopCase(tokens, width, k, kind)
            launch(case)
            case.check()
        print(f"top_k, {kind}: equal to a stable sort", flush=True)
    for shape in TOP_SHAPES[:4] if quick else TOP_SHAPES:
        tokens, width, k = shape
        moved = tokens * (4 * width + 4 * k + 8)
        cases = [TopCase(tokens, width, k) for _ in range(max(2, min(64, 220_000_000 // moved)))]
        us = microseconds([lambda c=c: launch(c) for c in cases])
        peer = VLLM.get(shape)
        line = f"top_k {tokens:3} x {width:6} k {k:4}: {us:6.1f} us, {moved / us / 1e3 / ceiling:4.0%} of copy"
        line += f", vLLM {peer} ({us / peer:.2f}x)" if peer else ""
        torch_us = microseconds([lambda c=c: torch.topk(c.scores, c.k, dim=1) for c in cases])
        print(f"{line}, torch.topk {torch_us:.1f}", flush=True)
        recorder.add(
            "top_k", f"{'flash' if k == 512 else 'pro'}-{CONTEXTS[width]}", tokens, us, peer_us=VLLM.get(shape),
            bytes=moved, of_copy=moved / us / 1e3 / ceiling,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--only", default="index_scores,top_k")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    parser.add_argument("--formats", default="fp4,fp8", help="of keys")
    parser.add_argument("--queries", default="qat,plain", help="timed ones")
    parser.add_argument("--run-tiles", default="0", help="tiles of 64 keys a block of threads; 0: the launch chooses")
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    torch.manual_seed(0)
    wrong, recorder = 0, Recorder()
    ceiling = copy_ceiling()
    print(f"copy ceiling {ceiling:.0f} GB/s")
    if "index_scores" in options.only:
        wrong = bench_scores(library, options, ceiling, recorder)
    if "top_k" in options.only:
        bench_top_k(library, options.quick, ceiling, recorder)
    if wrong:
        raise SystemExit(f"{wrong} wrong results")
    recorder.write(options.json, copy_gb_per_s=ceiling)


if __name__ == "__main__":
    main()
