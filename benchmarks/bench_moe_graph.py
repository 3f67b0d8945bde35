"""The experts' products (csrc/moe.cu): checks, then CUDA-graph times of the plain C entry. Needs torch and a GPU.

    python benchmarks/bench_moe_graph.py path/to/libdsv4_cuda.so [--only tiny,check,time,parts] [--shapes 0,1,...]

Checked: relative L2 against float64 of the same dequantised weights; each token's bits alone against among others, for
every shape of the kernel and under skewed routing; a device with a part of the experts. Timed: uniform random routing,
other experts in each of the calls of a graph, 3.4 GB of weights, so that they come from memory. The bytes counted are
those of the chosen experts' weights, the ceiling is a read of 4 GiB and a copy of 1 GiB in the same run.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from graph_timing import Recorder, copy_ceiling, microseconds, read_ceiling

from dsv4_jax.cuda.c_entries import MoeArgs, open_entry
from dsv4_jax.weights import expert_fp4

TOP, LIMIT = 6, 10.0
FLASH, PRO, TINY = (4096, 2048), (7168, 3072), (512, 256)  # hidden, inter
SHAPES = tuple(range(7))
TOKENS = (1, 4, 16, 64, 128, 256, 1024)
MARLIN = {256: {1: 45.3, 4: 127, 16: 412, 64: 972, 128: 1210, 256: 1440, 1024: 2023},
          128: {1: 45.0, 4: 123, 16: 347, 64: 613, 128: 721, 256: 772, 1024: 1596}}  # fmt: skip
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


class Weights:
    """`experts` experts, copies of `kinds` that are made as released, packed and dequantised."""

    def __init__(self, sizes: tuple[int, int], experts: int, kinds: int, reference: bool = True):
        self.hidden, self.inter = sizes
        self.kind = torch.arange(experts, device="cuda") * 7 % kinds
        rng = np.random.default_rng(1)
        shapes = {"gate": (self.inter, self.hidden), "up": (self.inter, self.hidden), "down": sizes}
        codes = {k: rng.integers(0, 256, (kinds, n, m // 2), np.uint8) for k, (n, m) in shapes.items()}
        scales = {k: rng.integers(117, 123, (kinds, n, m // 32), np.uint8) for k, (n, m) in shapes.items()}
        both = [expert_fp4.gate_up_rows(x["gate"], x["up"]) for x in (codes, scales)]
        with ThreadPoolExecutor(16) as pool:
            packed = [np.stack(list(pool.map(expert_fp4.pack, *x)))
                      for x in (both, (codes["down"], scales["down"]))]  # fmt: skip
        self.gate_up, self.down = (torch.from_numpy(x).cuda()[self.kind] for x in packed)
        if reference:
            self.real = {k: [dequantised(*x) for x in zip(codes[k], scales[k], strict=True)] for k in shapes}

    @property
    def bytes(self) -> int:
        """Of an expert."""
        return self.gate_up[0].numel() + self.down[0].numel()

    def reference(
        self, x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, here: range, rounded: bool
    ) -> torch.Tensor:
        """Float64; `rounded`: the rows between the products in bf16, as the kernel keeps them."""
        out = torch.zeros(x.shape, device="cuda", dtype=torch.float64)
        local = (chosen >= here.start) & (chosen < here.stop)
        kind = torch.where(local, self.kind[(chosen.long() - here.start).clamp(0, len(self.kind) - 1)], -1)
        for k in range(len(self.real["gate"])):
            token, place = (kind == k).nonzero(as_tuple=True)
            gate, up = (x[token].double() @ self.real[name][k].T for name in ("gate", "up"))
            middle = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
            if rounded:
                middle = middle.to(torch.bfloat16).double()
            out.index_add_(0, token, share[token, place, None].double() * (middle @ self.real["down"][k].T))
        return out


def dequantised(codes: np.ndarray, scales: np.ndarray) -> torch.Tensor:
    codes, scales = (torch.from_numpy(x).cuda() for x in (codes, scales))
    values = torch.tensor([*VALUES, *(-x for x in VALUES)], device="cuda", dtype=torch.float64)
    x = values[torch.stack([codes & 15, codes >> 4], -1).long()].reshape(len(codes), -1)
    return x * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)


class Case:
    """Tokens, and experts chosen at random among `routed` of which those from `first` on are here."""

    def __init__(self, weights: Weights, tokens: int, routed: int = 0, first: int = 0, skewed: bool = False):
        self.weights, self.first, self.routed = weights, first, routed or len(weights.kind)
        self.x = torch.randn((tokens, weights.hidden), device="cuda").to(torch.bfloat16)
        score = torch.rand((tokens, self.routed), device="cuda")
        if skewed:  # most tokens want the same experts
            score[:, 1:7] += 0.9
        self.chosen = score.topk(TOP).indices.to(torch.int32)
        share = torch.rand((tokens, TOP), device="cuda") + 0.1
        self.share = 1.5 * share / share.sum(1, keepdim=True)
        self.out = torch.empty((tokens, weights.hidden), device="cuda")

    @property
    def here(self) -> range:
        return range(self.first, self.first + len(self.weights.kind))

    def part(self, pick: slice) -> Case:
        few = copy.copy(self)
        few.x, few.chosen, few.share, few.out = (x[pick].clone() for x in (self.x, self.chosen, self.share, self.out))
        return few

    def args(self, work: torch.Tensor | None) -> MoeArgs:
        w = self.weights
        data = (self.x, self.chosen, self.share, w.gate_up, w.down, self.out)
        return MoeArgs(*(x.data_ptr() for x in data), work.data_ptr() if work is not None else 0, len(self.x), TOP,
                       w.hidden, w.inter, len(w.kind), self.first, self.routed, LIMIT)  # fmt: skip

    def moved(self) -> int:
        local = self.chosen[(self.chosen >= self.here.start) & (self.chosen < self.here.stop)]
        return len(local.unique()) * self.weights.bytes


class Library:
    def __init__(self, path: str):
        library = ctypes.CDLL(path)
        self.entry, self.workspace = open_entry(library, "moe"), library.dsv4_moe_workspace
        self.workspace.argtypes, self.workspace.restype = (ctypes.POINTER(MoeArgs),), ctypes.c_int64

    def work(self, case: Case) -> torch.Tensor:
        size = self.workspace(ctypes.byref(case.args(None)))
        return torch.full((size,), 255, device="cuda", dtype=torch.uint8)  # NaNs

    def launch(self, case: Case, work: torch.Tensor, shape: int = 0) -> None:
        self.entry(case.args(work), shape, torch.cuda.current_stream().cuda_stream)

    def run(self, case: Case, shape: int = 0) -> torch.Tensor:
        case.out.fill_(torch.nan)
        self.launch(case, self.work(case), shape)
        torch.cuda.synchronize()
        return case.out.clone()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check(library: Library, name: str, case: Case, shapes: tuple[int, ...]) -> int:
    """The number of wrong results."""
    got = library.run(case, shapes[0])
    wants = [case.weights.reference(case.x, case.chosen, case.share, case.here, rounded) for rounded in (False, True)]
    errors = [relative(got, want) for want in wants]
    wrong = int(not errors[0] <= 2e-3)
    differ = [s for s in shapes[1:] if not torch.equal(library.run(case, s), got)]
    alone = []
    tokens = len(case.x)
    for size in (1, 5, 16):
        for at in sorted({0, tokens // 3, max(0, tokens - size)}):
            pick = slice(at, min(at + size, tokens))
            for shape in (0, shapes[-1]):
                few = library.run(case.part(pick), shape)
                if not torch.equal(few, got[pick]):
                    alone.append((at, size, shape, int((few != got[pick]).sum())))
    wrong += len(differ) + len(alone)
    print(f"moe {name:22} {tokens:5} tokens: relative L2 {errors[0]:.1e}, rows between rounded alike {errors[1]:.1e}; "
          f"{len(shapes)} shapes equal, tokens alone equal", flush=True)  # fmt: skip
    if wrong:
        print(f"WRONG: shapes {differ}, alone {alone[:4]}", flush=True)
    return wrong


def time_all(
    library: Library, weights: Weights, batches: list[int], shapes: list[int], ceilings: list[float], recorder: Recorder
) -> None:
    here = len(weights.kind)
    for tokens in batches:
        cases = [Case(weights, tokens, 256) for _ in range(24 if tokens < 64 else 8)]
        work = library.work(cases[0])
        moved = sum(c.moved() for c in cases) / len(cases)
        peer = MARLIN[here].get(tokens, float("nan"))
        for shape in shapes:
            us = microseconds([functools.partial(library.launch, c, work, shape) for c in cases], 9)
            rate = moved / us / 1e3
            print(f"moe {here} of 256 experts, {tokens:4} tokens, shape {shape}: {us:7.1f} us, {moved / 1e6:5.0f} MB, "
                  f"{rate:5.0f} GB/s ({rate / ceilings[0]:4.0%} of read, {rate / ceilings[1]:4.0%} of copy), "
                  f"Marlin {peer} ({us / peer:.2f}x)", flush=True)  # fmt: skip
            name = "flash" if here == 256 else "flash, half of the experts"
            chosen = {"variant": f"shape {shape}", "tuning": True} if shape else {}
            recorder.add(
                "moe", name, tokens, us, peer_us=MARLIN[here].get(tokens), bytes=round(moved),
                of_copy=rate / ceilings[1], **chosen,
            )  # fmt: skip


def time_parts(library: Library, weights: Weights) -> None:
    """Each kernel's own duration, launched one call after the other."""
    for tokens in (1, 64, 1024):
        cases = [Case(weights, tokens) for _ in range(8)]
        work = library.work(cases[0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for case in cases * 3:
                library.launch(case, work)
            torch.cuda.synchronize()
        for event in sorted(profile.key_averages(), key=lambda e: -e.device_time_total):
            if event.count >= len(cases):
                each = event.device_time_total / event.count
                print(f"moe parts, {tokens:4} tokens: {event.key[:70]:70} {each:8.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--only", default="tiny,check,time,parts")
    parser.add_argument("--shapes", default="0", help="of the kernel, to be timed; 0: the launch chooses")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="to be timed")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    options = parser.parse_args()
    library = Library(options.library)
    torch.manual_seed(0)
    wrong, recorder = 0, Recorder()
    if "tiny" in options.only:
        tiny = Weights(TINY, 8, 8)
        wrong += check(library, "tiny", Case(tiny, 3), SHAPES)
        wrong += check(library, "tiny, skewed", Case(tiny, 70, skewed=True), SHAPES)
        print("tiny done", flush=True)
    if "check" in options.only:
        flash = Weights(FLASH, 256, 12)
        for tokens, skewed in ((1, False), (7, False), (64, False), (64, True), (300, False), (1024, False)):
            wrong += check(library, f"Flash{', skewed' if skewed else ''}", Case(flash, tokens, skewed=skewed), SHAPES)
        loud = Case(flash, 33)
        loud.x *= 8  # past the limits of the SwiGLU
        wrong += check(library, "Flash, clamped", loud, SHAPES)
        del flash, loud
        half = Weights(FLASH, 128, 12)
        wrong += check(library, "Flash, 128 of 256", Case(half, 64, 256, first=128), SHAPES)
        del half
        wrong += check(library, "Pro", Case(Weights(PRO, 12, 3), 40), SHAPES)
        torch.cuda.empty_cache()
    if any(x in options.only for x in ("time", "parts", "profile")):
        ceilings = [read_ceiling(), copy_ceiling()]
        shapes, batches = ([int(x) for x in y.split(",")] for y in (options.shapes, options.tokens))
        flash = Weights(FLASH, 256, 12, reference=False)
        if "time" in options.only:
            print(f"ceilings: read {ceilings[0]:.0f} GB/s, copy {ceilings[1]:.0f} GB/s", flush=True)
            time_all(library, flash, batches, shapes, ceilings, recorder)
        if "parts" in options.only:
            time_parts(library, flash)
        for tokens in (1, 64, 256, 1024) if "profile" in options.only else ():  # under a profiler
            library.run(Case(flash, tokens))
        del flash
        if "time" in options.only:
            time_all(library, Weights(FLASH, 128, 12, reference=False), batches, [0], ceilings, recorder)
            recorder.write(options.json, read_gb_per_s=ceilings[0], copy_gb_per_s=ceilings[1])
    if wrong:
        raise SystemExit(f"{wrong} wrong results")


if __name__ == "__main__":
    main()
