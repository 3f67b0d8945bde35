"""Kernel time of the CUDA append: CUDA-graph replays of the library's plain C entry. Needs torch and a GPU.

    python benchmarks/bench_append_graph.py path/to/libdsv4_cuda.so [--json FILE]

RMSNorm, RoPE, quantisation and store of fp8 KV rows. A graph holds a call for each of 64 input sets; the time of a call
is the median replay over the calls, gaps between the graph's nodes included. Rows are checked against float64 first.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib

import torch
from graph_timing import Recorder, copy_ceiling, microseconds

from dsv4_jax.cuda.c_entries import AppendArgs, EpilogueArgs, RowPool, open_entry

SETS, POOL_ROWS, EPS = 64, 1 << 20, 1e-6
TOKENS = (1, 16, 64, 256, 1024, 8192)


class Case:
    """One set of arguments."""

    def __init__(self, tokens: int, pool: tuple[torch.Tensor, ...]) -> None:
        self.pool = pool
        self.values = torch.randn((tokens, 512), device="cuda")
        self.ids = torch.randperm(POOL_ROWS, device="cuda")[:tokens].int()
        self.norm = torch.rand(512, device="cuda") + 0.5
        angle = torch.rand((tokens, 32), device="cuda") * 100
        self.cosine, self.sine = angle.cos(), angle.sin()
        self.args = AppendArgs(
            self.values.data_ptr(), self.ids.data_ptr(),
            EpilogueArgs(*(x.data_ptr() for x in (self.norm, self.cosine, self.sine)), EPS, 0),
            RowPool(*(x.data_ptr() for x in pool), POOL_ROWS, 0), 512,
        )  # fmt: skip

    def error(self) -> float:
        """Relative L2 of the stored rows."""
        x = self.values.double()
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * self.norm.double()
        even, odd, c, s = x[:, 448::2], x[:, 449::2], self.cosine.double(), self.sine.double()
        rotated = torch.stack([even * c - odd * s, even * s + odd * c], -1).reshape(-1, 64)
        want = torch.cat([x[:, :448], rotated], 1)
        codes, rope, scale = (part[self.ids.long()] for part in self.pool)
        factor = torch.exp2(scale[:, :7].double() - 127).repeat_interleave(64, 1)
        got = torch.cat([codes.view(torch.float8_e4m3fn).double() * factor, rope.double()], 1)
        return float((got - want).norm() / want.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    options = parser.parse_args()
    entry, recorder = open_entry(ctypes.CDLL(options.library), "append"), Recorder()

    def launch(case: Case) -> None:
        tokens = case.values.shape[0]
        entry(case.args, tokens, 1, torch.cuda.current_stream().cuda_stream)

    torch.manual_seed(0)
    pool = (
        torch.zeros((POOL_ROWS, 448), device="cuda", dtype=torch.uint8),
        torch.zeros((POOL_ROWS, 64), device="cuda", dtype=torch.bfloat16),
        torch.zeros((POOL_ROWS, 8), device="cuda", dtype=torch.uint8),
    )
    for tokens in TOKENS:
        cases = [Case(tokens, pool) for _ in range(SETS)]
        launch(cases[0])
        error = cases[0].error()
        assert error < 0.03, error  # e4m3 rounds to 4 bits
        us = microseconds([lambda c=c: launch(c) for c in cases])
        print(f"{tokens:5} rows  {us:6.2f} us   relative L2 {error:.1e}", flush=True)
        recorder.add("append", "fused", tokens, us, relative_error=error)
    recorder.write(options.json, copy_gb_per_s=copy_ceiling())


if __name__ == "__main__":
    main()
