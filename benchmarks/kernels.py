"""Kernels in CUDA graphs: every handler by itself, checked, then timed beside the ceilings of the same run.

    python benchmarks/kernels.py [OP ...] [--shapes TEXT] [--batch N,...] [--json FILE]
    python benchmarks/kernels.py attend --implementation cuda,pallas --warm
    python benchmarks/kernels.py dense_fp8 --peers FOLDER           # peers' times of the same session beside ours
    python benchmarks/kernels.py --list                             # the cases; needs no device
    JAX_PLATFORMS=cpu python benchmarks/kernels.py --tiny           # does it run? Any device, the reference

The table is in problems.py. Before a case is timed, what the op gives is compared with the reference. Then its FFI
handlers, as the op calls them, are called in a loop of one executable, on other operands in each call of a round, whose
calls are one CUDA graph (graphs.py says how the time of one comes out of that). There are so many calls in a graph that
it reads 200 MB, if 64 do: then rows and weights come from memory. `--warm`: few calls over small pools, which L2 holds.
Shares are of a copy (bytes read and written) in the same run; beside them the rate of products. Fails if a result is
wrong. A kernel of several handlers has a line for each.

`--peers`: a folder with the JSON that peers' scripts leave (lists of objects: `fp8_dense.json`, `marlin_moe.json`,
`topk.json`, `indexer_sdg.json`, `flashmla.json`); what is not in it is `targets.py`'.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from graphs import graph_us, handlers, whole_call
from harness import Recorder, jax_device, parser
from problems import KERNELS, OPS, TINY, Kernel

from dsv4_jax.bench.measure import one_line, outcome, relative_error
from dsv4_jax.bench.ops import Problem
from dsv4_jax.bench.timing import Ceilings, measure_ceilings
from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops.registry import NAMES, find

READ, MAX_CALLS, MIN_CALLS, WARM_CALLS = 220e6, 64, 4, 16
CHECKED = 600  # tokens that are compared with the reference, at most: enough for what a chunk does
POOL_ROWS, WARM_ROWS = 1 << 21, 1 << 14
MEMORY = 24e9  # bytes that all calls of a graph may take
BATCHED_OPS = ("gather", "index_scores", "top_k")  # whose call arguments all have the batch in front
CONTEXTS = {2048: "8k", 8192: "32k", 32768: "128k", 262144: "1m"}  # tokens of a cache by its index keys


def peer_times(folder: pathlib.Path) -> dict[tuple[str, str, int], float]:
    """Reads the best peer's us by (op, shape, batch) from the files there are."""
    found: dict[tuple[str, str, int], float] = {}

    def read(name: str, key: Callable[[dict[str, Any]], tuple[str, str, int]], time: str) -> None:
        path = folder / name
        for row in json.loads(path.read_text()) if path.is_file() else ():
            if row.get(time) and row.get("op") != "torch" and {"b", "m"} & set(row):
                found[key(row)] = min(row[time], found.get(key(row), row[time]))

    groups, experts = {(8192, 4096): "/8"}, {256: "flash", 128: "flash, half of the experts"}
    read(
        "fp8_dense.json",
        lambda r: ("dense_fp8", f"{r['n']}x{r['k']}{groups.get((r['n'], r['k']), '')}", r["m"]),
        "deepgemm_us",
    )
    read("marlin_moe.json", lambda r: ("moe", experts[r["experts"]], r["m"]), "gemms_us")
    read(
        "topk.json",
        lambda r: ("top_k", f"{'flash' if r.get('k') == 512 else 'pro'}-{CONTEXTS.get(r['n'])}", r["b"]),
        "us",
    )
    read("indexer_sdg.json", lambda r: ("index_scores", f"fp8-{CONTEXTS.get(r['n'])}", r["b"]), "us")
    read("flashmla.json", lambda r: ("attend", r["case"].lower().replace("-only", ""), r["b"]), "us")
    scores = {key: us for key, us in found.items() if key[0] == "index_scores"}
    return found | {(op, name.replace("fp8", "fp4"), batch): us for (op, name, batch), us in scores.items()}


def implementations(kernel: Kernel, wanted: Sequence[str] | None) -> list[str]:
    """Names the implementations that are timed: the ones that were asked for, else the case's own on a GPU and the
    reference elsewhere.
    """
    return list(wanted or [kernel.implementation if jax.default_backend() == "gpu" else "xla"])


def call_count(kernel: Kernel, batch: int, *, warm: bool, tiny: bool) -> int:
    """Returns how many calls a graph has."""
    if tiny:
        return 2
    size = max(kernel.size(batch), 1.0)
    calls = WARM_CALLS if warm else max(MIN_CALLS, min(MAX_CALLS, int(READ / size)))
    return max(1, min(calls, int(MEMORY / size)))


def check(kernel: Kernel, batch: int, name: str, *, tiny: bool, invariance: bool) -> tuple[float, bool, bool | None]:
    """Returns the relative error, whether it is small enough, and whether rows have the same bits in other batches."""
    batch = min(batch, CHECKED)
    made = kernel.make(batch, 1, 1 << (10 if tiny else 16)).problem
    pairs = zip(outcome(made, name), outcome(made, "xla"), strict=True)
    error = max(relative_error(got, want) for got, want in pairs)
    same = is_batch_invariant(made, name, batch) if invariance and kernel.op in BATCHED_OPS else None
    return error, error <= made.tolerance, same


def is_batch_invariant(inputs: Problem, implementation: str, batch: int) -> bool:
    """Says whether rows of the first call have the same bits in batches of 1, 2, 16 and 64."""
    whole = outcome(inputs, implementation, slice(None))
    share = whole[0].shape[0] // batch  # rows that a gather makes per request
    for size in (1, 2, 16, 64):
        for first in {0, (batch - size) // 2} if size < batch else ():
            rows = slice(first * share, (first + size) * share)
            part = outcome(inputs, implementation, rows)
            if not all(np.array_equal(a[rows], b, equal_nan=False) for a, b in zip(whole, part, strict=True)):
                return False
    return True


def measure(kernel: Kernel, batch: int, name: str, args: Any, ceilings: Ceilings, recorder: Recorder) -> bool:
    """Checks and times a case, prints and records what came out, and returns whether the result was right."""
    peers, tiny = args.peer_times, args.tiny
    error, correct, same = check(kernel, batch, name, tiny=tiny, invariance=args.invariance)
    calls = call_count(kernel, batch, warm=args.warm, tiny=tiny)
    rows = 1 << 10 if tiny else WARM_ROWS if args.warm else POOL_ROWS
    made = kernel.make(batch, calls, rows)
    variant = ", ".join(filter(None, (kernel.variant, "warm" if args.warm else None))) or None
    bodies = handlers(made.problem, name)
    # The op's own handler is the one that is no part; without any, all that the op does is timed.
    named = {dict(kernel.parts).get(target.split()[0], kernel.name): body for target, body in bodies.items()}
    timed = {shape: body for shape, body in named.items() if shape}
    for shape, body in (timed or {kernel.name: whole_call(made.problem, name)}).items():
        us = graph_us(body, 3 if tiny else 15)
        own = shape == kernel.name
        bytes_, flops = (made.bytes, made.flops) if own else (None, None)
        peer = peers.get((kernel.op, shape, batch))
        row = recorder.op(
            kernel.op,
            shape,
            batch,
            us,
            implementation=name,
            variant=variant,
            timer="graph",
            bytes=bytes_,
            flops=flops or None,
            of_copy=1e6 * bytes_ / us / ceilings.copy if bytes_ else None,
            peer_us=peer,
            relative_error=error if own else None,
            correct=correct if own else None,
            batch_invariant=same if own else None,
        )
        said = [f"{kernel.op} {shape}{f', {variant}' if variant else ''}", f"{batch:5}", f"{name:6}", f"{us:8.2f} us"]
        if bytes_ and not tiny:
            said.append(f"{bytes_ / us / 1e3:6.0f} GB/s, {row['of_copy']:4.0%} of a copy")
        if flops and not tiny:
            said.append(f"{flops / us / 1e6:4.0f} TFLOP/s")
        said += [f"peer {row['peer_us']:g} ({us / row['peer_us']:.2f}x)"] if row.get("peer_us") and not tiny else []
        said += [f"error {error:.1e}{'' if correct else ' WRONG'}{'' if same is not False else ' NOT INVARIANT'}"]
        said += [row["verdict"]] if "verdict" in row and not tiny else []
        print("  ".join(said), flush=True)
    return correct and same is not False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 if a result was wrong or a case failed."""
    command = parser(__doc__)
    command.add_argument("ops", nargs="*", metavar="OP", help=f"{', '.join(OPS)} (default: all)")
    command.add_argument("--shapes", default="", metavar="TEXT", help="only shapes whose op/name holds this")
    command.add_argument("--batch", type=lambda text: [int(x) for x in text.split(",")], metavar="N,...")
    command.add_argument(
        "--implementation", type=lambda text: text.split(","), metavar="NAME,...", help="(default: cuda)"
    )
    command.add_argument("--warm", action="store_true", help="operands that lie in L2")
    command.add_argument("--invariance", action="store_true", help="also check bits in other batches")
    command.add_argument("--peers", type=pathlib.Path, metavar="FOLDER", help="peers' times of this session")
    command.add_argument("--tiny", action="store_true", help="a small case of each op (the default without a GPU)")
    command.add_argument("--list", action="store_true", help="show the cases, and measure nothing")
    args = command.parse_args(argv)
    if unknown := set(args.ops) - set(OPS):
        command.error(f"there are {', '.join(OPS)}, not {', '.join(sorted(unknown))}")
    if unknown := set(args.implementation or ()) - set(NAMES):
        command.error(f"--implementation: there are {', '.join(NAMES)}, not {', '.join(sorted(unknown))}")
    args.tiny = args.tiny or (not args.list and jax.default_backend() != "gpu")
    args.peer_times = peer_times(args.peers) if args.peers else {}
    cases = [
        (kernel, batch)
        for kernel in (TINY if args.tiny else KERNELS)
        if kernel.op in (args.ops or OPS) and args.shapes in f"{kernel.op}/{kernel.name}"
        for batch in (args.batch or kernel.batches)
    ]
    if not cases:
        command.error("no case is left")
    if args.list:
        for kernel, batch in cases:
            calls = call_count(kernel, batch, warm=args.warm, tiny=args.tiny)
            print(
                f"{kernel.op} {kernel.name}{f', {kernel.variant}' if kernel.variant else ''}, {batch}: {calls} calls, "
                f"{calls * kernel.size(batch) / 1e6:.0f} MB"
            )
        return 0
    ceilings = measure_ceilings(quick=args.tiny)
    recorder = Recorder(
        args.json,
        **jax_device(),
        ceilings=ceilings.as_dict(),
        quick=args.tiny,
        note="peers' times are of the same session" if args.peers else None,
    )
    if not args.tiny:
        print(f"copy {ceilings.copy / 1e9:.0f} GB/s, bf16 products {ceilings.matmul / 1e12:.0f} TFLOP/s", flush=True)
    failed = 0
    for kernel, batch in cases:
        for name in implementations(kernel, args.implementation):
            if name != "xla" and (problem := _problem(kernel, name)):
                print(f"{kernel.op} {kernel.name}: {name}: {problem}", flush=True)
                failed += 1
                continue
            try:
                failed += not measure(kernel, batch, name, args, ceilings, recorder)
            except Exception as error:  # a case may fail in any way; the others still count
                print(f"{kernel.op} {kernel.name}, {batch}, {name}: FAILED: {one_line(error)}", flush=True)
                failed += 1
    return int(failed > 0)


def _problem(kernel: Kernel, name: Any) -> str | None:
    try:
        return find(kernel.registered or kernel.op, name).problem()
    except ImplementationError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
