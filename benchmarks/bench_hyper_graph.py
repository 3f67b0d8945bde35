"""Hyper-connections (csrc/hyper_connection.cu): checks, then CUDA-graph times of the C entry. Needs torch and a GPU.

    python benchmarks/bench_hyper_graph.py path/to/libdsv4_cuda.so [--only check,time,reference] [--json FILE]

Checked: relative L2 of every result against float64; a token's bits alone, among others and beside tokens that are not
finite. Timed (`mixing` apart, which runs beside the block): another layer's weights and other streams in each of the
calls of a graph, 400 MB of them, so that they come from memory. `reference` times what XLA makes of the `jnp` form, for
comparison (needs JAX on the GPU). The bytes counted are streams, outputs and weights in, streams and x out; the ceiling
is a copy of 1 GiB in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from graph_timing import Recorder, copy_ceiling, microseconds

from dsv4_jax.cuda.c_entries import HyperArgs, HyperMixingArgs, open_entry

N, ROWS, ITERATIONS, HC_EPS, EPS = 4, 24, 20, 1e-6, 1e-6
WIDTHS = {"flash": 4096, "pro": 7168}
TOKENS = (1, 16, 64, 256, 1024)
MEMORY = 400 << 20


def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") * (high - low) + low


class Kernels(NamedTuple):
    """What the next block reads; how its output goes into the streams."""

    read: Callable[..., None]
    mix: Callable[..., None]


@dataclasses.dataclass
class Case:
    """A call: `outputs` of the block before (0: the first block), or of the head."""

    tokens: int
    width: int
    outputs: int = 1
    head: bool = False
    bf16: bool = True

    def __post_init__(self):
        t, d, rows = self.tokens, self.width, N if self.head else ROWS
        self.streams = torch.randn((t, N, d), device="cuda") * uniform(0.1, 8, t, 1, 1)
        self.fn = torch.randn((rows, N * d), device="cuda") * (N * d) ** -0.5
        self.base, self.scale = torch.randn(rows, device="cuda"), uniform(0.5, 1.5, 1 if self.head else 3)
        self.norm = uniform(0.5, 1.5, d)
        self.written = [torch.randn((t, d), device="cuda") for _ in range(self.outputs)]
        self.old_post, self.old_comb = uniform(0, 2, t, N), uniform(0, 1, t, N, N)
        self.clear()

    def clear(self):
        t, d = self.tokens, self.width
        nan = functools.partial(torch.full, fill_value=torch.nan, device="cuda")
        self.x = nan((t, d), dtype=torch.bfloat16 if self.bf16 else torch.float32)
        self.back, self.post, self.comb = nan((t, N + N * N)), nan((t, N)), nan((t, N, N))
        self.new_streams = nan((t, N, d))

    def part(self, pick: slice) -> Case:
        few = Case(1, self.width, self.outputs, self.head, self.bf16)
        for name in ("fn", "base", "scale", "norm"):
            setattr(few, name, getattr(self, name))
        for name in ("streams", "old_post", "old_comb"):
            setattr(few, name, getattr(self, name)[pick].clone())
        few.written = [x[pick].clone() for x in self.written]
        few.tokens = len(few.streams)
        few.clear()
        return few

    def args(self, in_place: bool = False) -> HyperArgs:
        def at(x: torch.Tensor | None) -> int:
            return 0 if x is None else x.data_ptr()

        new = None if self.head or not self.outputs else self.streams if in_place else self.new_streams
        old = (self.old_post, self.old_comb) if self.outputs else (None, None)
        given = (self.streams, self.fn, self.base, self.scale, self.norm, *self.written, *[None] * (2 - self.outputs),
                 *old, self.x, new, self.back)  # fmt: skip
        return HyperArgs(
            *map(at, given), self.tokens, self.width, len(self.fn), HC_EPS, EPS, int(self.bf16), self.tokens
        )

    def call(self, kernels: Kernels, in_place: bool = False) -> None:
        """Both kernels."""
        stream = torch.cuda.current_stream().cuda_stream
        kernels.read(self.args(in_place), stream)
        if not self.head:
            kernels.mix(self.mixing_args(), stream)
        torch.cuda.synchronize()

    def mixing_args(self) -> HyperMixingArgs:
        return HyperMixingArgs(
            *(x.data_ptr() for x in (self.back, self.post, self.comb)), self.tokens, ITERATIONS, HC_EPS
        )

    def run(self, kernels: Kernels) -> dict[str, torch.Tensor]:
        self.call(kernels)
        found = {"x": self.x}
        if not self.head:
            found |= {"post": self.post, "comb": self.comb}
            found |= {"streams": self.new_streams} if self.outputs else {}
        return found

    def reference(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        streams, fn, base, scale, norm = (
            x.to(dtype) for x in (self.streams, self.fn, self.base, self.scale, self.norm)
        )
        if self.outputs:
            y = torch.stack([x.to(dtype) for x in self.written]).sum(0)
            mixed = torch.einsum("tjk,tjd->tkd", self.old_comb.to(dtype), streams)
            streams = self.old_post.to(dtype)[..., None] * y[:, None] + mixed
        flat = streams.reshape(len(streams), -1)
        mix = flat * torch.rsqrt((flat * flat).mean(1, keepdim=True) + EPS) @ fn.T
        pre = torch.sigmoid(mix[:, :N] * scale[0] + base[:N]) + HC_EPS
        x = torch.einsum("tn,tnd->td", pre, streams)
        x = x * torch.rsqrt((x * x).mean(1, keepdim=True) + EPS) * norm
        if self.head:
            return {"x": x}
        post = 2 * torch.sigmoid(mix[:, N : 2 * N] * scale[1] + base[N : 2 * N])
        comb = torch.softmax((mix[:, 2 * N :] * scale[2] + base[2 * N :]).view(-1, N, N), -1) + HC_EPS
        for axis in [1] + [2, 1] * (ITERATIONS - 1):
            comb = comb / (comb.sum(axis, keepdim=True) + HC_EPS)
        return {"x": x, "post": post, "comb": comb, "streams": streams}

    @property
    def bytes(self) -> int:
        t, d = self.tokens, self.width
        return 4 * (t * N * d * (2 if self.outputs else 1) + self.outputs * t * d + self.fn.numel()) + 2 * t * d


def check(kernels: Kernels, width: int) -> int:
    """The number of wrong results."""
    wrong, errors = 0, {}
    for case in (Case(257, width, 1), Case(13, width, 2, bf16=False), Case(9, width, 0), Case(8, width, 1, head=True),
                 Case(3, width, 2, head=True, bf16=False)):  # fmt: skip
        found, want = case.run(kernels), case.reference()
        for name, got in found.items():
            error = float((got.double() - want[name]).norm() / want[name].norm())
            limit = 2e-3 if got.dtype == torch.bfloat16 else 2e-6
            errors[name, got.dtype] = max(errors.get((name, got.dtype), 0), error)
            if not error <= limit:
                wrong += 1
                print(f"WRONG {name} of {case.tokens} x {width}, {case.outputs} outputs, head {case.head}: {error}")
    case = Case(70, width, 2)
    among = case.run(kernels)
    for first, size in ((0, 1), (5, 1), (69, 1), (3, 8), (1, 9), (20, 33)):
        pick = slice(first, first + size)
        for name, got in case.part(pick).run(kernels).items():
            if not torch.equal(got, among[name][pick]):
                wrong += 1
                print(f"WRONG: {name} of tokens {first} to {first + size - 1} alone has other bits")
    hostile = case.part(slice(0, 70))
    hostile.streams[1], hostile.written[0][2, 7], hostile.old_post[4, 0] = torch.nan, torch.inf, torch.nan
    kept = [i for i in range(70) if i not in (1, 2, 4)]
    beside = hostile.run(kernels)
    wrong += sum(not torch.equal(beside[name][kept], among[name][kept]) for name in among)
    wrong += sum(not bool(beside["x"][i].isnan().any()) for i in (1, 2, 4))
    again = case.part(slice(0, 70))
    again.call(kernels, in_place=True)
    wrong += not torch.equal(again.streams, among["streams"]) or not torch.equal(again.comb, among["comb"])
    shown = ", ".join(f"{name} {str(dtype)[6:]} {error:.1e}" for (name, dtype), error in errors.items())
    print(f"hyper_connection {width}: relative L2 {shown}; {wrong} wrong", flush=True)
    return wrong


def time_all(kernels: Kernels, copy: float, recorder: Recorder) -> None:
    stream = torch.cuda.current_stream
    for name, width in WIDTHS.items():
        for tokens in TOKENS:
            kinds: dict[str, Any] = {"": dict(outputs=1), "two outputs": dict(outputs=2), "first": dict(outputs=0),
                     "head": dict(outputs=1, head=True)}  # fmt: skip
            for kind, options in kinds.items() if tokens == 64 else [("", kinds[""])]:
                one = Case(tokens, width, **options)
                cases = [one, *(Case(tokens, width, **options) for _ in range(min(128, MEMORY // one.bytes)))]
                args = [case.args(in_place=True) for case in cases]
                us = microseconds([lambda a=a: kernels.read(a, stream().cuda_stream) for a in args])
                rate = one.bytes / us / 1e3
                print(f"{name:5} {tokens:4} tokens {kind:12}: {us:6.2f} us, {one.bytes / copy / 1e3:5.2f} at the "
                      f"ceiling, {rate / copy:4.0%} of a copy", flush=True)  # fmt: skip
                recorder.add(
                    "hyper_connection", f"{name} {kind}".strip(), tokens, us, bytes=one.bytes, of_copy=rate / copy
                )
                if kind == "":
                    args = [case.mixing_args() for case in cases]
                    us = microseconds([lambda a=a: kernels.mix(a, stream().cuda_stream) for a in args])
                    print(f"{name:5} {tokens:4} tokens mixing      : {us:6.2f} us", flush=True)
                    recorder.add("hyper_connection", f"{name} mixing", tokens, us)
                del cases, args


def time_reference(recorder: Recorder) -> None:
    """What XLA makes of the reference: the time of one of 20 calls in a loop of one executable."""
    import jax
    import jax.numpy as jnp

    from dsv4_jax.ops import Written, connection_vector, hyper_connection

    for tokens in (1, 64, 256):
        case = Case(tokens, WIDTHS["flash"])
        vector = connection_vector(*(jnp.asarray(x.cpu().numpy()) for x in (case.norm, case.base, case.scale)))
        given = [*(jnp.asarray(x.cpu().numpy()) for x in (case.streams, case.fn)), vector]
        y = jnp.asarray(case.written[0].cpu().numpy())
        post, comb = (jnp.asarray(x.cpu().numpy()) for x in (case.old_post, case.old_comb))
        op = functools.partial(hyper_connection, iterations=ITERATIONS, hc_eps=HC_EPS, eps=EPS)
        for implementation in ("xla", "cuda"):

            def loop(streams, fn, vector, y=y, post=post, comb=comb, op=op, implementation=implementation):
                def one(_, carry):
                    streams, post, comb = carry
                    _, *carry = op(streams, fn, vector, Written((y,), post, comb), implementation=implementation)
                    return tuple(carry)

                return jax.lax.fori_loop(0, 20, one, (streams, post, comb))

            compiled = jax.jit(loop).lower(*given).compile()
            jax.block_until_ready(compiled(*given))
            start = time.perf_counter()
            jax.block_until_ready([compiled(*given) for _ in range(5)])
            us = (time.perf_counter() - start) * 1e6 / 100
            print(f"flash {tokens:4} tokens, {implementation} in a loop of XLA's: {us:.1f} us", flush=True)
            recorder.add(
                "hyper_connection", "flash", tokens, us, implementation=implementation, timer="wall", tuning=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--only", default="check,time")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    options = parser.parse_args()
    library, recorder, only = ctypes.CDLL(options.library), Recorder(), options.only
    kernels = Kernels(open_entry(library, "hyper_connection"), open_entry(library, "hyper_mixing"))
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = sum(check(kernels, width) for width in WIDTHS.values()) if "check" in only else 0
    copy = copy_ceiling()
    print(f"copy {copy:.0f} GB/s", flush=True)
    if "time" in only:
        time_all(kernels, copy, recorder)
    if "reference" in only:
        time_reference(recorder)
    recorder.write(options.json, copy_gb_per_s=copy)
    if wrong:
        raise SystemExit(f"{wrong} wrong results")


if __name__ == "__main__":
    main()
