"""Queries of a long chunk: product and last steps in one kernel, and by cuBLAS and the queries kernel after it.

    python benchmarks/bench_query_product.py path/to/libdsv4_cuda.so [--variant LIBRARY ...] [--tokens 4096]
        [--json FILE]

Kernel times by CUDA-graph replays of the plain C entries. Before timing, results are compared with float64's, and a
token's bits among other tokens with those among all. `--variant`: other builds of csrc/query_product.cu. Needs torch
and a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib

import torch
from graph_timing import Recorder, copy_ceiling, in_turns, microseconds

from dsv4_jax.cuda.c_entries import QueryArgs, QueryProductArgs, open_entry

DIM, INDEX_DIM, ROPE, EPS = 512, 128, 64, 1e-6
# Heads, their dims, columns.
SHAPES = {"flash": (64, 512, 1024), "pro": (128, 512, 1536), "indexer": (64, 128, 1024)}
# Tokens, and the same.
CHECKED = ((4096, 64, 512, 1024), (200, 2, 512, 1024), (1, 64, 512, 512), (1000, 128, 512, 1536), (777, 5, 512, 576),
           (4096, 64, 128, 1024), (333, 4, 128, 1024))  # fmt: skip
# Other products of a chunk, by cuBLAS: what their output's type costs.
PRODUCTS = {"wq_b": (1024, 32_768), "wq_b, indexer": (1024, 40_960), "indexer": (1024, 8192), "wo_b": (8192, 4096),
            "of_input CSA": (4096, 4160), "of_input HCA": (4096, 2560)}  # fmt: skip


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def multiply(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x @ w.T if dtype == torch.bfloat16 else torch.mm(x, w.T, out_dtype=dtype)


class Case:
    def __init__(self, tokens: int, heads: int, dim: int, columns: int):
        self.x = torch.randn((tokens, columns), device="cuda").to(torch.bfloat16)
        self.w = (torch.randn((heads * dim, columns), device="cuda") / columns**0.5).to(torch.bfloat16)
        angle = torch.rand((tokens, ROPE // 2), device="cuda") * 100
        self.cosine, self.sine = angle.cos(), angle.sin()
        self.tokens, self.heads, self.dim, self.columns = tokens, heads, dim, columns
        self.steps = (EPS, 0, 0) if dim == DIM else (-1, 1, 1)

    def arguments(self, first: int = 0, last: int | None = None) -> QueryProductArgs:
        part = slice(first, last)
        x = self.x[part]
        self.out = torch.full((x.shape[0], self.heads, self.dim), torch.nan, device="cuda", dtype=torch.bfloat16)
        tables = (self.cosine[part].data_ptr(), self.sine[part].data_ptr())
        return QueryProductArgs(
            x.data_ptr(), self.w.data_ptr(), *tables, self.out.data_ptr(), x.shape[0], self.heads, self.columns,
            *self.steps,
        )  # fmt: skip

    def finish(self, product: torch.Tensor) -> QueryArgs:
        self.out = torch.full((self.tokens, self.heads, self.dim), torch.nan, device="cuda", dtype=torch.bfloat16)
        return QueryArgs(
            product.data_ptr(), self.cosine.data_ptr(), self.sine.data_ptr(), self.out.data_ptr(),
            self.tokens * self.heads, self.heads, product.shape[1], *self.steps,
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        q = (self.x.double() @ self.w.double().T).view(self.tokens, self.heads, DIM)
        q = q * torch.rsqrt((q * q).mean(-1, keepdim=True) + EPS)
        even, odd = q[..., DIM - ROPE :: 2], q[..., DIM - ROPE + 1 :: 2]
        c, s = self.cosine[:, None].double(), self.sine[:, None].double()
        turned = torch.stack([even * c - odd * s, even * s + odd * c], -1)
        return torch.cat([q[..., : DIM - ROPE], turned.reshape(*q.shape[:-1], ROPE)], -1)


def check(name: str, entry, finish, tokens: int, heads: int, dim: int, columns: int) -> None:
    case = Case(tokens, heads, dim, columns)
    args = case.arguments()
    entry(args, dim, stream())
    out = case.out
    alone = []
    for first, last in ((0, 1), (tokens // 3, tokens // 3 + 100), (tokens - 1, tokens)):
        args = case.arguments(first, last)
        entry(args, dim, stream())
        alone.append(torch.equal(case.out, out[first:last]))
    product = multiply(case.x, case.w, torch.float32)
    args = case.finish(product)
    finish(args, dim, stream())
    wanted = case.reference() if dim == DIM else case.out.double()  # FP4: rounded as the sum's last bit has it
    error = float((out.double() - wanted).norm() / wanted.norm())
    same = float((case.out == out).double().mean())
    right = all(alone) and same > 0.999 and (error < 3e-3 or dim == INDEX_DIM)
    print(f"{name}: {tokens} tokens, {heads} heads of {dim}, {columns} columns: relative L2 {error:.1e}, "
          f"alone {alone}, {same:.4%} as of cuBLAS: {'right' if right else 'WRONG'}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--variant", action="append", default=[], type=pathlib.Path, metavar="LIBRARY")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    finish = open_entry(library, "queries")
    paths = [pathlib.Path(options.library), *options.variant]
    libraries = {path.stem: ctypes.CDLL(str(path)) for path in paths}
    kernels = {
        name: open_entry(opened, "query_product")
        for name, opened in libraries.items()
        if hasattr(opened, "dsv4_query_product_launch")
    }
    torch.manual_seed(0)
    for name, entry in kernels.items():
        for shape in CHECKED:
            check(name, entry, finish, *shape)
    recorder = Recorder()
    for shape, (heads, dim, columns) in SHAPES.items():
        case = Case(options.tokens, heads, dim, columns)
        product = multiply(case.x, case.w, torch.float32)
        last = case.finish(product)
        apart = microseconds(
            [lambda c=case: multiply(c.x, c.w, torch.float32), lambda a=last, d=dim: finish(a, d, stream())]
        )
        print(f"{shape} {options.tokens} tokens: cuBLAS and queries {2 * apart:7.1f} us", flush=True)
        flops = 2 * options.tokens * heads * dim * columns
        args = case.arguments()
        calls = {name: lambda e=entry, a=args, d=dim: e(a, d, stream()) for name, entry in kernels.items()}
        for name, us in in_turns(calls).items():
            print(f"    {name:20} {us:7.1f} us, {flops / us / 1e6:4.0f} TFLOP/s", flush=True)
            recorder.add("queries", f"product-{shape}", options.tokens, us, variant=name, tuning=True)
    for name, (columns, rows) in PRODUCTS.items():
        x = torch.randn((options.tokens, columns), device="cuda").to(torch.bfloat16)
        w = (torch.randn((rows, columns), device="cuda") / columns**0.5).to(torch.bfloat16)
        times = []
        for dtype in (torch.float32, torch.bfloat16):
            us = microseconds([lambda x=x, w=w, d=dtype: multiply(x, w, d)])
            times.append(f"{us:7.1f} us, {2 * options.tokens * columns * rows / us / 1e6:4.0f} TFLOP/s")
        print(f"cuBLAS {name:14} float32 {times[0]}; bf16 {times[1]}", flush=True)
    recorder.write(options.json, copy_gb_per_s=copy_ceiling())


if __name__ == "__main__":
    main()
