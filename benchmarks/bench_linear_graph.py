"""Kernel times of the CUDA linear: CUDA-graph replays of the plain C entry. Needs torch and a GPU.

    python benchmarks/bench_linear_graph.py path/to/libdsv4_cuda.so [--tokens 64,1,16,256] [--variants] [--quick]

Results are checked first: against float64, every shape with 1, 5, 64, 100 and 256 tokens, and the rows of a token
compared bit by bit between these. The bytes counted are the weights'; a graph rotates over so many copies of them that
they exceed 200 MB. torch: its own bf16 product (cuBLAS, bf16 result) of the same operands. With --variants also other
splits of K, tiles and numbers of stages than the planned ones, with and without fetching ahead into L2.
"""

from __future__ import annotations

import argparse
import ctypes

import torch
from bench_select_graph import copy_ceiling, microseconds

POINTER = ctypes.c_void_p
SECTIONS = 8
# Name -> rows of the results, columns, groups.
SHAPES = {
    "flash of_input csa": ((1024, 512, 1024, 1024, 256, 256, 64), 4096, 1),
    "flash of_input hca": ((1024, 512, 512, 512), 4096, 1),
    "flash of_input swa": ((1024, 512), 4096, 1),
    "flash of_q_latent csa": ((32768, 8192), 1024, 1),
    "flash of_q_latent": ((32768,), 1024, 1),
    "flash wo_a": ((8192,), 4096, 8),
    "flash wo_b": ((4096,), 8192, 1),
    "pro of_input csa": ((1536, 512, 1024, 1024, 256, 256, 64), 7168, 1),
    "pro of_q_latent csa": ((65536, 8192), 1536, 1),
    "pro wo_a": ((16384,), 4096, 16),
    "pro wo_b": ((7168,), 16384, 1),
}
CHECKED = (1, 5, 64, 100, 256)


class LinearArgs(ctypes.Structure):
    """`dsv4::LinearArgs` of csrc/linear_kernel.cuh."""

    _fields_ = (
        ("x", POINTER),
        ("weights", POINTER),
        ("out", POINTER * SECTIONS),
        ("end", ctypes.c_int * SECTIONS),
        *((name, ctypes.c_int) for name in ("sections", "tokens", "rows", "depth", "groups", "rounded")),
        *((name, ctypes.c_int) for name in ("split", "tile_rows", "group_tiles", "stages", "stream")),
    )


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Case:
    def __init__(
        self, shape, x: torch.Tensor, weights: torch.Tensor, split=0, tile_rows=0, stages=0, stream=1, rounded=False
    ):
        widths, depth, self.groups = shape
        self.x, self.weights = x, weights
        dtype = torch.bfloat16 if rounded else torch.float32
        self.out = [torch.full((len(x), n), torch.nan, device="cuda", dtype=dtype) for n in widths]
        self.args = LinearArgs(x=x.data_ptr(), weights=weights.data_ptr(), sections=len(widths), tokens=len(x))
        self.args.rows, self.args.depth, self.args.groups, self.args.rounded = sum(widths), depth, self.groups, rounded
        self.args.split, self.args.tile_rows, self.args.stages, self.args.stream = split, tile_rows, stages, stream
        for i, out in enumerate(self.out):
            self.args.out[i] = out.data_ptr()
            self.args.end[i] = sum(widths[: i + 1])

    def grouped(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[groups, T, K] and [groups, K, N / groups]."""
        x = self.x.reshape(len(self.x), self.groups, -1).transpose(0, 1)
        return x, self.weights.reshape(self.groups, -1, self.weights.shape[1]).transpose(1, 2)

    def check(self) -> tuple[torch.Tensor, str]:
        """The results side by side, and how far from float64 they are."""
        got = torch.cat(self.out, 1)
        x, w = self.grouped()
        want = torch.cat([a.double() @ b.double() for a, b in zip(x, w, strict=True)], 1)
        # The matrix units cut off what they add: up to 2^-23 of the sum for each 16 columns.
        bad = ~((got - want).abs() < 1e-4 * want.abs().max())
        if bad.any():
            first = bad.nonzero()[:4].tolist()
            values = [(*i, float(got[tuple(i)]), float(want[tuple(i)])) for i in first]
            return got, f"WRONG: {int(bad.sum())} of {bad.numel()}; token, row, got, want {values}"
        return got, f"relative L2 {float((got - want).norm() / want.norm()):.1e}"


def check_all(launch, shape, x: torch.Tensor, weights: torch.Tensor, split: int, tile_rows: int) -> str:
    """What is wrong with the results of 256 and fewer tokens, or their error."""
    full, said = None, ""
    for tokens in reversed(CHECKED):
        case, rounded = (Case(shape, x[:tokens], weights, split, tile_rows, rounded=r) for r in (False, True))
        launch(case)
        launch(rounded)
        torch.cuda.synchronize()
        got, said = case.check()
        full = got if full is None else full
        for other, what in ((full[:tokens], "those of 256"), (torch.cat(rounded.out, 1), "bf16")):
            if not torch.equal(got.to(other.dtype), other):
                said += f", WRONG: {int((got.to(other.dtype) != other).sum())} differ from {what}"
        if "WRONG" in said:
            return f"{tokens} tokens: {said}"
    return f"{said}, rows equal bit by bit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--tokens", default="64,1,16,256")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--quick", action="store_true", help="V4-Flash only")
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    entry = library.dsv4_linear_launch
    entry.argtypes = (ctypes.POINTER(LinearArgs), POINTER)

    def launch(case: Case) -> None:
        status = entry(ctypes.byref(case.args), torch.cuda.current_stream().cuda_stream)
        assert status == 0, f"CUDA error {status}"

    torch.manual_seed(0)
    ceiling = copy_ceiling()
    print(f"copy ceiling {ceiling:.0f} GB/s; clusters at once: "
          + ", ".join(f"{n} of {s}" for s in (1, 2, 4, 8) if (n := library.dsv4_linear_clusters(s))))  # fmt: skip
    shapes = {k: v for k, v in SHAPES.items() if k.startswith("flash") or not options.quick}
    wrong = 0
    for name, shape in shapes.items():
        widths, depth, groups = shape
        x, weights = bf16(256, groups * depth), bf16(sum(widths), depth)
        splits = [s for s in (1, 2, 4, 8) if depth % (64 * s) == 0]
        for split, tile_rows in [(0, 0), (0, 64)] + [(s, 0) for s in splits] * options.variants:
            said = check_all(launch, shape, x, weights, split, tile_rows)
            wrong += "WRONG" in said
            print(f"linear {name}, {split=} {tile_rows=}: {said}", flush=True)

    for tokens in map(int, options.tokens.split(",")):
        for name, shape in shapes.items():
            widths, depth, groups = shape
            moved = 2 * sum(widths) * depth
            operands = [
                (bf16(tokens, groups * depth), bf16(sum(widths), depth)) for _ in range(max(2, 250_000_000 // moved))
            ]
            variants = [(0, 0, 0, 1)]
            if options.variants:
                variants += [(0, 0, 0, 0), (0, 0, 3, 1), (0, 160, 0, 1), (0, 96, 0, 1)]
                variants += [(s, 0, 0, 1) for s in (1, 2, 4, 8) if depth % (64 * s) == 0]
            for split, tile_rows, stages, stream in variants:
                cases = [Case(shape, *o, split, tile_rows, stages, stream) for o in operands]
                us = microseconds([lambda c=c: launch(c) for c in cases])
                planned = (split, tile_rows, stages, stream) == variants[0]
                label = "planned" if planned else f"{split=} {tile_rows=} {stages=} {stream=}"
                print(f"linear T {tokens:3} {name:22}: {us:7.1f} us, {moved / us / 1e3:5.0f} GB/s "
                      f"({moved / us / 1e3 / ceiling:4.0%} of copy) {label}", flush=True)  # fmt: skip
            pairs = [c.grouped() for c in cases]
            if groups == 1:
                pairs = [(x[0], w[0]) for x, w in pairs]
            us = microseconds([lambda p=p: p[0] @ p[1] for p in pairs])
            print(f"torch  T {tokens:3} {name:22}: {us:7.1f} us, {moved / us / 1e3:5.0f} GB/s", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} checks failed")


if __name__ == "__main__":
    main()
