"""The ops in plain torch, as a baseline: gathers, products and softmax as anyone would write them, in CUDA graphs.

    python benchmarks/torch_ops.py [OP ...] [--shapes TEXT] [--json FILE]       needs torch with CUDA, and a GPU for jax

Operands are those of `dsv4-jax bench`, and so is what results are compared with. Fails if one is wrong.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from harness import Recorder, jax_device, parser

from dsv4_jax.bench.measure import one_line, outcome, relative_error
from dsv4_jax.bench.ops import Problem, problem
from dsv4_jax.bench.shapes import CASES, AttendShape, GatherShape, ScoreShape, Shape, TopKShape, select
from dsv4_jax.bench.timing import L2_FLUSH, call_count
from dsv4_jax.errors import OptionError
from dsv4_jax.formats import Codes, RowFormat, Scales

__all__ = ["OPS", "TOLERANCE", "main", "measure", "why_not"]

DEVICE = "cuda"
TOLERANCE = 2e-2  # relative error: products come out of torch rounded to bf16
OPS = ("gather", "index_scores", "top_k", "attend")


def why_not(op: str) -> str | None:
    """Says why there is no torch baseline here, None if there is."""
    if op not in OPS:
        return "no torch version"
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch has no CUDA"


def measure(op: str, shape: Shape, inputs: Problem, *, repeats: int) -> tuple[float, list[np.ndarray]]:
    """Returns (us of a call, result of the first call). Calls are captured in one CUDA graph and replayed, L2 cold."""
    import torch

    call = _call(op, shape)
    shared = jax.tree.map(_tensor, inputs.shared)
    calls = [jax.tree.map(_tensor, args) for args in inputs.calls]
    first = call(shared, calls[0])
    call(shared, calls[-1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in calls:
            call(shared, args)
    other = torch.ones(L2_FLUSH // 4, device=DEVICE, dtype=torch.int32)
    times = []
    for _ in range(repeats + 1):
        other.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    results = [x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy() for x in first]
    del graph, other, shared, calls, first
    torch.cuda.empty_cache()  # the rest of the memory is JAX's
    return min(times[1:]), results


def _tensor(x: jax.Array) -> Any:
    """Copies an array to torch; bf16 and uint16 keep their bits."""
    import torch

    host = np.array(x)
    if host.dtype == jax.numpy.bfloat16 or host.dtype == np.uint16:
        return torch.from_numpy(host.view(np.int16)).to(DEVICE).view(torch.bfloat16)
    return torch.from_numpy(host).to(DEVICE)


def _decode(pool: Any, ids: Any) -> Any:
    """Decodes fp8 KV rows to [..., 512] bf16."""
    import torch

    nope, rope, scale = (part[ids.long()] for part in pool)
    factor = torch.exp2(scale[..., :7].float() - 127).repeat_interleave(64, -1)
    values = nope.view(torch.float8_e4m3fn).float() * factor
    return torch.cat([values.bfloat16(), rope], -1)


def _call(op: str, shape: Shape) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Returns a function (shared, call) -> results, in the order of the op's own."""
    import torch

    match shape:
        case GatherShape():
            return lambda pool, ids: (_decode(pool, ids),)
        case TopKShape():
            return lambda _, args: (torch.topk(args[0], shape.k, dim=-1).indices,)
        case ScoreShape(fmt=RowFormat(holds=(Codes("e4m3"), Scales("power_of_two")))):

            def scores(pool: Any, args: Any) -> tuple[Any, ...]:
                queries, weights, table, _ = args
                offset = torch.arange(shape.rows_per_block, device=DEVICE)
                ids = (table.long()[..., None] * shape.rows_per_block + offset).flatten(1)
                codes, scale = (part[ids] for part in pool)
                dots = queries @ codes.view(torch.float8_e4m3fn).bfloat16().transpose(1, 2)
                return (torch.einsum("th,ths->ts", weights, dots.relu().float()) * scale[..., 0],)

            return scores
        case AttendShape():

            def attend(shared: Any, args: Any) -> tuple[Any, ...]:
                pool, sink = shared
                queries, ids, _, entry_ids, _ = args  # every key is visible
                keys = _decode(pool, torch.cat([ids, entry_ids], 1))
                logits = (queries @ keys.transpose(1, 2)).float() * shape.fmt.dim**-0.5
                lse = logits.logsumexp(-1)
                weights = torch.exp(logits - torch.logaddexp(lse, sink)[..., None])
                return (weights.bfloat16() @ keys).float(), lse

            return attend
    raise OptionError(f"no torch version of {op} for this row format")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 if a result was wrong, or there is no torch."""
    command = parser(__doc__)
    command.add_argument("ops", nargs="*", metavar="OP", default=list(OPS), help=f"{', '.join(OPS)} (default: all)")
    command.add_argument("--shapes", metavar="TEXT", help="only shapes whose op/name holds this")
    args = command.parse_args(argv)
    if problems := [f"{op}: {why}" for op in args.ops if (why := why_not(op))]:
        print("; ".join(problems))
        return 1
    recorder, wrong = Recorder(args.json, **jax_device()), 0
    for case, batch in select(CASES, args.ops, name=args.shapes):
        shape = case.make(batch)
        inputs = problem(shape, call_count(shape.bytes_moved), pool_rows=1 << 20)
        try:
            us, got = measure(case.op, shape, inputs, repeats=12)
        except (OptionError, RuntimeError) as error:  # no such row format; memory
            print(f"{case.op} {case.name}, {batch}: {one_line(error)}", flush=True)
            continue
        error = max(relative_error(a[: len(b)], b) for a, b in zip(got, outcome(inputs, "xla"), strict=True))
        correct = error <= TOLERANCE
        how: dict[str, Any] = dict(implementation="torch", timer="graph", bytes=shape.bytes_moved, flops=shape.flops)
        recorder.op(case.op, case.name, batch, us, **how, relative_error=error, correct=correct)
        print(
            f"{case.op} {case.name}, {batch}: {us:.2f} us, error {error:.1e}{'' if correct else ' WRONG'}", flush=True
        )
        wrong += not correct
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
