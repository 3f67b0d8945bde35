"""Dense FP8 products (csrc/dense_fp8.cu): checks, then CUDA-graph times of the plain C entry. Needs torch and a GPU.

    python benchmarks/bench_dense_graph.py path/to/libdsv4_cuda.so [--only check,time,tuning] [--json FILE]

Checked: relative L2 against float64 of the same dequantised weights; a row's bits alone, among others and for every
shape of the kernel. Timed: other weights in each of the calls of a graph, at least 400 MB of them, so that they come
from memory. `tuning` also times other shapes of the kernel and numbers of parts of K than the launch chooses. The
bytes counted are those of the weights; the ceilings are a read of 4 GiB and a copy of 1 GiB in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from graph_timing import Recorder, copy_ceiling, microseconds, read_ceiling

from dsv4_jax.cuda.c_entries import DenseFp8Args, open_entry
from dsv4_jax.weights import dense_fp8


class Matrix(NamedTuple):
    """Rows and columns of the weights, and groups of the rows that take other columns of x."""

    rows: int
    columns: int
    groups: int = 1

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}" + (f"/{self.groups}" if self.groups > 1 else "")


# Of a layer: wq_b, wo_b, wo_a, wq_a with wkv, the indexer's wq_b, the shared expert's first two and its last.
FLASH = (Matrix(32768, 1024), Matrix(4096, 8192), Matrix(8192, 4096, 8), Matrix(1536, 4096), Matrix(8192, 1024),
         Matrix(4096, 4096), Matrix(4096, 2048))  # fmt: skip
PRO = (Matrix(65536, 1536), Matrix(7168, 16384), Matrix(16384, 4096, 16), Matrix(2048, 7168), Matrix(8192, 1536),
       Matrix(6144, 7168), Matrix(7168, 3072))  # fmt: skip
BATCHES = (1, 16, 64, 256, 1024, 4096)
# Shapes of the kernel by the rows that they take: number -> tiles of the weights, parts of K, columns of a stage.
SHAPES = {8: {1: (1, 1, 128), 2: (2, 1, 128), 3: (1, 2, 128), 4: (1, 4, 64), 5: (2, 2, 128)},
          16: {6: (1, 1, 128), 7: (2, 1, 128), 8: (1, 2, 128), 9: (1, 4, 128), 10: (2, 2, 128)},
          32: {11: (1, 1, 128), 12: (2, 1, 128), 13: (1, 2, 128), 14: (1, 4, 64), 15: (2, 2, 128)},
          64: {16: (1, 1, 128), 17: (2, 1, 128), 18: (1, 2, 64), 19: (1, 4, 64), 20: (2, 2, 128)},
          128: {21: (2, 1, 128)}}  # fmt: skip
# Those for more rows: number -> parts of K that a block takes in turn, and that have a block of a cluster each.
MANY = {22: (1, 1), 23: (2, 1), 24: (4, 1), 25: (2, 2), 26: (4, 2), 27: (2, 4)}
MEMORY = 400 << 20  # bytes of weights that the calls of a graph go through, at least


class Weights:
    """A random matrix as released, packed, and copies of it with the tiles in other places."""

    def __init__(self, matrix: Matrix, copies: int = 1):
        self.matrix = matrix
        rng = np.random.default_rng(matrix.rows + matrix.columns)
        codes = rng.integers(0, 256, matrix[:2], np.uint8)
        codes[codes & 0x7F == dense_fp8.NAN] = 0
        scales = rng.integers(105, 116, (-(-matrix.rows // 128), matrix.columns // 128), np.uint8)
        with ThreadPoolExecutor(16) as pool:
            parts = range(0, matrix.rows, 512)
            packed = np.concatenate(
                list(pool.map(lambda i: dense_fp8.pack(codes[i : i + 512], scales[i // 128 : i // 128 + 4]), parts))
            )
        self.released, self.scales = torch.from_numpy(codes).cuda(), torch.from_numpy(scales).cuda()
        first = torch.from_numpy(packed).cuda()
        self.packed = [first, *(first[torch.randperm(len(first), device="cuda")] for _ in range(copies - 1))]

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Float64."""
        m = self.matrix
        scale = torch.exp2(self.scales.double() - 127).repeat_interleave(128, 0)[: m.rows].repeat_interleave(128, 1)
        w = self.released.view(torch.float8_e4m3fn).double() * scale
        x = x.double().view(len(x), m.groups, m.columns)
        return torch.einsum("tgk,gnk->tgn", x, w.view(m.groups, -1, m.columns)).reshape(len(x), m.rows)


class Library:
    def __init__(self, path: str):
        library = ctypes.CDLL(path)
        self.entry, self.parts = open_entry(library, "dense_fp8"), library.dsv4_dense_fp8_parts

    def launch(self, matrix: Matrix, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor,
               shape: int = 0, parts: int = 0, window: int = 0) -> None:  # fmt: skip
        args = DenseFp8Args(x.data_ptr(), packed.data_ptr(), scales.data_ptr(), out.data_ptr(), len(x), matrix.rows,
                            matrix.columns, matrix.groups, int(out.dtype == torch.float32))  # fmt: skip
        self.entry(args, shape, parts, window, torch.cuda.current_stream().cuda_stream)

    def run(
        self, weights: Weights, x: torch.Tensor, shape: int = 0, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        out = torch.full((len(x), weights.matrix.rows), torch.nan, device="cuda", dtype=dtype)
        self.launch(weights.matrix, x.contiguous(), weights.packed[0], weights.scales, out, shape)
        torch.cuda.synchronize()
        return out


def rows_of(matrix: Matrix, count: int) -> torch.Tensor:
    return torch.randn((count, matrix.groups * matrix.columns), device="cuda").to(torch.bfloat16)


def fitting(matrix: Matrix, most_rows: int = 128) -> list[tuple[int, int]]:
    """Shapes of the kernel and parts of K that they take: for so many rows, or up to 64."""
    found = []
    for rows in {most_rows, min(64, most_rows)}:
        for shape, (tiles, split, columns) in SHAPES[rows].items():
            clusters = (1,) if split == 1 else (1, 2, 4)
            parts = [split * n for n in clusters if matrix.columns % (split * n * columns) == 0]
            found += [(shape, p) for p in parts if matrix.rows // matrix.groups % (64 * tiles) == 0]
    return found


def check(library: Library, matrix: Matrix) -> int:
    """The number of wrong results."""
    weights = Weights(matrix)
    x = rows_of(matrix, 256)
    got, want = library.run(weights, x), weights.reference(x)
    error = float((got.double() - want).norm() / want.norm())
    rounded = library.run(weights, x, dtype=torch.bfloat16)
    bf16 = float((rounded.double() - want).norm() / want.norm())
    parts = library.parts(*matrix[:2])
    shapes = [s for n in SHAPES for s, p in fitting(matrix, n) if p == parts]
    if matrix.rows // matrix.groups % 128 == 0:
        shapes += [s for s, (in_turn, cluster) in MANY.items() if in_turn * cluster == parts]
    differ = [s for s in shapes if not torch.equal(library.run(weights, x[:70], s), got[:70])]
    alone = []
    for size in (1, 3, 8, 9, 16, 17, 33, 64, 65, 200):
        for at in sorted({0, 77, 256 - size} & set(range(257 - size))):
            if not torch.equal(library.run(weights, x[at : at + size]), got[at : at + size]):
                alone.append((at, size))
    wrong = int(not (error <= 1e-4 and bf16 <= 2e-3)) + len(differ) + len(alone)
    wrong += not torch.equal(rounded, got.to(torch.bfloat16))
    print(f"dense_fp8 {matrix!s:14}: relative L2 {error:.1e}, bf16 {bf16:.1e}; {len(set(shapes))} shapes equal, rows "
          f"alone equal", flush=True)  # fmt: skip
    if wrong:
        print(f"WRONG ({wrong}): shapes {differ}, alone {alone[:4]}", flush=True)
    return wrong


def time_matrix(library: Library, matrix: Matrix, tuning: bool, ceilings: list[float], recorder: Recorder) -> None:
    size = matrix.rows * matrix.columns
    weights = Weights(matrix, max(4, MEMORY // size))
    for batch in BATCHES:
        x, out = rows_of(matrix, batch), torch.empty((batch, matrix.rows), device="cuda", dtype=torch.bfloat16)
        found = {}
        bound = min((n for n in SHAPES if n >= batch), default=128)
        tried = [(*x, window) for x in fitting(matrix, bound) for window in (0, 1, 2, 3, 4, 6)] if tuning else []
        tried += [(s, a * b, 0) for s, (a, b) in MANY.items() if a * b == library.parts(*matrix[:2])] if tuning else []
        for shape, parts, window in [(0, 0, 0), *tried]:
            launch = functools.partial(library.launch, out=out, shape=shape, parts=parts, window=window)
            calls = [functools.partial(launch, matrix, x, w, weights.scales) for w in weights.packed]
            us = found[shape, parts, window] = microseconds(calls, 9 if shape == 0 else 3)
            variant = {"variant": f"shape {shape}, {parts} parts, {window} ahead", "tuning": True} if shape else {}
            rate = size / us / 1e3
            recorder.add("dense_fp8", str(matrix), batch, us, bytes=size, of_copy=rate / ceilings[1], **variant)
        row, us = recorder.rows[-len(found)], found.pop((0, 0, 0))
        targets = f"required {row.get('required_us', '-')}, goal {row.get('goal_us', '-')}: {row.get('verdict', '-')}"
        print(f"{matrix!s:14} {batch:4} rows: {us:6.2f} us, {size / us / 1e3:5.0f} GB/s "
              f"({size / us / 1e3 / ceilings[0]:4.0%} of read), {targets}", flush=True)  # fmt: skip
        for (shape, parts, window), us in sorted(found.items(), key=lambda x: x[1])[:12]:
            print(f"   {shape}*{parts} {window}: {us:.2f}", end="", flush=True)
        print() if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--only", default="check,time")
    parser.add_argument("--model", choices=("flash", "pro", "both"), default="both")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    options = parser.parse_args()
    library = Library(options.library)
    torch.manual_seed(0)
    matrices = {"flash": FLASH, "pro": PRO, "both": FLASH + PRO}[options.model]
    recorder = Recorder()
    wrong = 0
    if "check" in options.only:
        small = Matrix(64, 128), Matrix(192, 384), Matrix(640, 512, 5), Matrix(256, 4224)
        wrong = sum(check(library, matrix) for matrix in (*small, *matrices))
        torch.cuda.empty_cache()
    if "time" in options.only or "tuning" in options.only:
        ceilings = [read_ceiling(), copy_ceiling()]
        print(f"ceilings: read {ceilings[0]:.0f} GB/s, copy {ceilings[1]:.0f} GB/s", flush=True)
        for matrix in matrices:
            time_matrix(library, matrix, "tuning" in options.only, ceilings, recorder)
        recorder.write(options.json, read_gb_per_s=ceilings[0], copy_gb_per_s=ceilings[1])
    if wrong:
        raise SystemExit(f"{wrong} wrong results")


if __name__ == "__main__":
    main()
