"""The router (csrc/route.cu): a check, then CUDA-graph times of the plain C entry. Needs torch and a GPU.

    python benchmarks/bench_route_graph.py path/to/libdsv4_cuda.so [--json FILE]

Checked against torch: the experts chosen and their shares, of 1 to 1,024 tokens. The lists of tokens by expert are part
of the experts' products (bench_moe_graph.py).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import pathlib

import torch
from graph_timing import Recorder, microseconds

from dsv4_jax.cuda.c_entries import RouteArgs, open_entry

SIZES = {"flash": (256, 1.5), "pro": (384, 2.5)}  # experts, scale
TOP = 6


class Case:
    def __init__(self, name: str, tokens: int):
        experts, self.scale = SIZES[name]
        self.logits = torch.randn((tokens, experts), device="cuda") * 2
        self.bias = torch.randn(experts, device="cuda") * 0.1
        self.chosen = torch.full((tokens, TOP), -1, device="cuda", dtype=torch.int32)
        self.share = torch.full((tokens, TOP), torch.nan, device="cuda")

    def launch(self, entry) -> None:
        data = (self.logits.data_ptr(), self.bias.data_ptr(), 0, self.chosen.data_ptr(), self.share.data_ptr())
        entry(RouteArgs(*data, *self.logits.shape, TOP, self.scale), torch.cuda.current_stream().cuda_stream)

    def wrong(self) -> bool:
        score = torch.nn.functional.softplus(self.logits.double(), threshold=1000).sqrt()
        chosen = (score + self.bias.double()).topk(TOP).indices
        share = score.gather(1, chosen)
        share = self.scale * share / share.sum(1, keepdim=True)
        return not (torch.equal(chosen.int(), self.chosen) and torch.allclose(share.float(), self.share, rtol=1e-5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    options = parser.parse_args()
    entry, recorder = open_entry(ctypes.CDLL(options.library), "route"), Recorder()
    torch.manual_seed(0)
    for name in SIZES:
        for tokens in (1, 16, 64, 256, 1024):
            cases = [Case(name, tokens) for _ in range(16)]
            us = microseconds([functools.partial(case.launch, entry) for case in cases])
            wrong = sum(case.wrong() for case in cases)
            print(f"route {name:5} {tokens:4} tokens: {us:.2f} us, {wrong} of {len(cases)} wrong", flush=True)
            recorder.add("route", name, tokens, us)
            if wrong:
                raise SystemExit("wrong results")
    recorder.write(options.json)


if __name__ == "__main__":
    main()
