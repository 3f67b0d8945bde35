"""`bench`: times every op, or a whole decode step, against what this device can do at most.

Terms: floor = the time no implementation can beat, the larger of bytes / copy ceiling and FLOPs / matmul ceiling
(bytes and FLOPs are those the shape cannot do without, both ceilings are measured in the same run); required and
goal = the project's targets; peer = the best other system's time on an H200. Times are kernel times (profiler) where
the device has them, else wall times over many calls per synchronisation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.shapes import CASES, OPS, QUICK, Case, select
from ..errors import BenchmarkError
from ..layout import CacheLayout, CacheSize, KeySplit
from ..output import open_output
from .options import memory_bytes, print_json, progress_bar, refuse_same, start_jax, stdout
from .values import output_file, output_folder, picture_file, positive, token_count

__all__ = ["add_parser", "run"]

_EXAMPLES = """
examples:
  dsv4_jax bench --quick                                       all ops at tiny sizes, on any machine
  dsv4_jax bench attend --shapes csa-flash --batch 1,64,256    chosen shapes of one op
  dsv4_jax bench all --json bench.json --plot roofline.png     everything, to files
  dsv4_jax bench top_k --implementations xla,lax.top_k,torch   baselines only
  dsv4_jax bench step --model pro --batch 64 --context 32K     a whole decode step of the attention stack
  dsv4_jax bench --render                                      make benchmarks/RESULTS.md from benchmarks/records
"""
_SHARED_MODELS = ("flash", "pro", "tiny")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench", help="time the ops or a decode step", description=__doc__, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("what", nargs="*", default=["all"], metavar="OP", help=f"{', '.join(OPS)}, all or step")
    parser.add_argument("--shapes", metavar="TEXT", help="only shapes whose op/name holds this")
    parser.add_argument(
        "--batch", type=_list_of(positive), metavar="N,...", help="these batches instead of each shape's"
    )
    parser.add_argument(
        "--context", type=_list_of(token_count), metavar="N,...", help="of 8K, 128K, 1M; any for a step"
    )
    parser.add_argument(
        "--implementations", type=_names, metavar="NAME,...", help="cuda, pallas, triton, xla, lax.top_k, torch"
    )
    parser.add_argument(
        "--key-split", choices=get_args(KeySplit), default="throughput",
        help="how attend and steps cut a token's keys (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run? (the default on a CPU)")
    parser.add_argument(
        "--invariance", action="store_true", help="also check that rows keep their bits in other batches"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=_json_file,
        metavar="FILE",
        help="write the record of the run, one JSON object (default: to stdout)",
    )
    parser.add_argument("--plot", type=picture_file, metavar="PNG", help="draw the roofline (needs matplotlib)")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--render", nargs="?", const=pathlib.Path("benchmarks"), type=pathlib.Path, metavar="DIR",
        help="measure nothing: write DIR/RESULTS.md from DIR/records/*.json (default: benchmarks)",
    )  # fmt: skip
    results.add_argument("--check", action="store_true", help="with --render: write nothing, fail if the page differs")
    step = parser.add_argument_group("step")
    step.add_argument("--model", choices=_SHARED_MODELS, default="flash", help="default: %(default)s")
    step.add_argument("--layers", type=positive, metavar="N", help="only the first N layers")
    step.add_argument("--steps", type=positive, default=20, metavar="N", help="calls per synchronisation (default: 20)")
    step.add_argument("--loop", type=positive, default=1, metavar="K", help="steps in one executable (default: 1)")
    step.add_argument(
        "--xla", action="append", default=[], type=_xla_option, metavar="OPTION=VALUE",
        help="compiler option of the step, such as xla_gpu_enable_triton_gemm=false",
    )  # fmt: skip
    step.add_argument("--profile", type=output_folder, metavar="DIR", help="keep the profiler trace of a step")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.render is not None:
        return _render(args.render, check=args.check)
    if args.check:
        raise BenchmarkError("--check goes with --render")
    ops, with_step = _chosen(args.what)
    if ops:
        select(CASES, ops)  # unknown names are refused before jax starts
    refuse_same({"--json": args.json, "--plot": args.plot})
    if args.plot and not ops:
        raise BenchmarkError("--plot draws ops, not steps")
    import jax

    from ..bench import ceilings, measure, plot
    from ..bench.records import new_record

    names = _implementations(args.implementations, measure.IMPLEMENTATIONS)
    start_jax()
    quick = args.quick
    if jax.default_backend() == "cpu" and not quick:
        quick = True
        print("no GPU: tiny sizes, as with --quick", file=sys.stderr)
    cases = [case.with_key_split(args.key_split) for case in (QUICK if quick else CASES)]
    chosen = select(cases, ops, name=args.shapes, batches=args.batch, contexts=args.context) if ops else []
    pairs = [(case, batch, names or measure.default_implementations(case.op)) for case, batch in chosen]
    _fit(chosen)
    steps = _step_options(args, quick) if with_step else []
    found: list[Any] = []
    reports: list[dict[str, Any]] = []
    device = jax.devices()[0].device_kind
    command = shlex.join(["python", "-m", "dsv4_jax", *map(str, args.argv)])

    def result() -> dict[str, Any]:
        """What was measured so far; on disk, too, so that a run that is killed leaves it."""
        rows = [{"table": "ops"} | dataclasses.asdict(r) for r in found]
        rows += [{"table": "steps"} | report for report in reports]
        made = new_record(
            rows, device=device, command=command, quick=quick, ceilings=top.as_dict(),
            software={"jax": jax.__version__, "backend": jax.default_backend()},
        )  # fmt: skip
        if args.json and args.json != "-":
            with open_output(args.json, encoding="utf-8") as file:
                file.write(json.dumps(made, indent=2) + "\n")
        return made

    with progress_bar() as bar:
        task = bar.add_task("ceilings", total=sum(len(each) for *_, each in pairs) + len(steps))
        top = ceilings.measure_ceilings(quick=quick)
        for case, batch, each in pairs:
            bar.update(task, description=f"{case.op} {case.name}, {batch}")
            found += measure.measure(
                case, batch, each, top, quick=quick, invariance=args.invariance, on_done=lambda: bar.advance(task)
            )
            result()
        if steps:
            from ..bench.step import measure_step
            from ..bench.targets import judged

            for options in steps:
                bar.update(task, description=f"step of {options.model}, {options.batch}")
                try:
                    reports.append(judged(measure_step(options, top)))
                except Exception as error:  # kernels may fail in any way; the other steps still count
                    failed = {"model": options.model, "implementation": options.implementation}
                    failed |= {"batch": options.batch, "context": options.context}
                    reports.append(failed | {"problem": measure.one_line(error)})
                result()
                bar.advance(task)
    if args.plot:
        plot.draw(found, top, args.plot, title=f"dsv4_jax on {device}{' (tiny sizes)' if quick else ''}")
    if args.json == "-":
        print_json(result())
    else:
        _print(stdout(), result())
    # An op's implementation that cannot run here is a row; a wrong result or no step is a failure.
    # The reference promises no batch invariance on a GPU: its products are a library's.
    wrong = any(r.correct is False or (r.batch_invariant is False and r.implementation != "xla") for r in found)
    return 1 if wrong or any("problem" in report for report in reports) else 0


def _render(folder: pathlib.Path, *, check: bool) -> int:
    from ..bench.render import page

    path = folder / "RESULTS.md"
    made = page(folder / "records")
    if not check:
        with open_output(path, encoding="utf-8") as file:
            file.write(made)
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == made:
        return 0
    print(f"{path} is not what {folder / 'records'} gives: run bench --render", file=sys.stderr)
    return 1


def _chosen(what: list[str]) -> tuple[list[str], bool]:
    """(ops, whether a step was asked for)"""
    ops = list(OPS) if "all" in what else [name for name in dict.fromkeys(what) if name != "step"]
    return ops, "step" in what


def _fit(chosen: list[tuple[Case, int]]) -> None:
    """Raises `BenchmarkError` if an op's arguments cannot lie in the device's memory, before they are made."""
    for case, batch in chosen:
        _fits(f"{case.op} {case.name} of batch {batch}", case.make(batch).bytes_moved)


def _fits(what: str, needed: int) -> None:
    if needed > (held := _device_bytes()):
        raise BenchmarkError(f"{what} takes at least {needed} bytes, the device has {held}")


def _device_bytes() -> int:
    """Memory of the device; of the machine if the device does not say."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit") or memory_bytes()


def _implementations(names: list[str] | None, known: tuple[str, ...]) -> list[str] | None:
    for name in names or ():
        if name not in known:
            raise BenchmarkError(f"unknown implementation {name!r}, expected some of {', '.join(known)}")
    return names


def _step_options(args: argparse.Namespace, quick: bool) -> list[Any]:
    """One per batch, context and implementation."""
    from ..bench.step import StepOptions
    from ..ops.registry import NAMES

    names: list[Any] = [name for name in args.implementations or [None] if name is None or name in NAMES]
    small = quick and not args.layers
    options = [
        StepOptions(
            model="tiny" if small else args.model, batch=batch, context=context, layers=args.layers,
            implementation=name, key_split=args.key_split, steps=2 if quick else args.steps, loop=args.loop,
            profile=args.profile, xla=tuple(args.xla),
        )
        for batch in args.batch or [2 if quick else 64]
        for context in args.context or [256 if quick else 128 * 1024]
        for name in names
    ]  # fmt: skip
    for option in options:
        layout = CacheLayout(option.config())
        columns = layout.blocks_for(option.context)
        needed = layout.total_bytes(CacheSize(option.batch * columns, option.batch, columns))
        _fits(f"a step of {option.model}, batch {option.batch}, context {option.context}", needed)
    return options


def _json_file(text: str) -> str | pathlib.Path:
    """argparse type: a file to write, or - for stdout."""
    return text if text == "-" else output_file(text)


def _xla_option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not OPTION=VALUE")
    return name, {"true": True, "false": False}.get(value.lower(), value)


def _list_of(item: Callable[[str], int]) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        return [item(part) for part in text.split(",")]

    return parse


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


def _print(console: Console, result: dict[str, Any]) -> None:
    top = result["ceilings"]
    ops, steps = ([row for row in result["rows"] if row["table"] == table] for table in ("ops", "steps"))
    console.print(
        f"{result['device']}, jax {result['software']['jax']}: copy {top['copy_gb_per_s']:,.0f} GB/s, "
        f"bf16 matmul {top['matmul_tflop_per_s']:,.2f} TFLOP/s"
    )
    if ops:
        # A wide table in a pipe or a log is better than one cell per line.
        wide = console if console.is_terminal else Console(width=max(console.width, 140))
        wide.print(_table([r for r in ops if not r["problem"]]))
        for reason, names in _problems(ops).items():
            wide.print(f"not measured: {', '.join(names)}: {reason}", markup=False, highlight=False)
    for report in steps:
        table = Table("", "", title="decode step", title_justify="left", show_header=False)
        for name, value in list(report.items())[1:]:
            if isinstance(value, dict):
                for part, x in value.items():
                    shown = f"{x:,.1f}" if isinstance(x, float) else str(x)
                    table.add_row(escape(f"  {name}: {part[:60]}"), escape(shown))
            else:
                table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else escape(str(value)))
        console.print(table)


def _table(records: list[dict[str, Any]]) -> Table:
    table = Table("op / shape", "implementation")
    for name in (
        "batch",
        "us",
        "kernel us",
        "GB/s",
        "TFLOP/s",
        "floor us",
        "of floor",
        "required / goal / peer",
        "error",
    ):
        table.add_column(name, justify="right")
    last = None
    for r in records:
        label = f"{r['op']} {r['shape']}{', ' + r['variant'] if r['variant'] else ''}"
        if last is not None and (label, r["batch"]) != last:
            table.add_section()
        last = label, r["batch"]
        targets = [r["required_us"], r["goal_us"], r["peer_us"]]
        judged = " / ".join(_number(x) for x in targets) if any(targets) else ""
        colour = {"goal": "green", "required": "green", "missed": "red"}.get(r["verdict"], "default")
        if r["verdict"]:
            judged += f" {r['verdict']}"
        error = f"{r['relative_error']:.0e}" if r["correct"] else f"[red]{r['relative_error']:.1e} wrong[/]"
        if r["batch_invariant"] is not None:
            error += ", invariant" if r["batch_invariant"] else ", [red]not invariant[/]"
        table.add_row(
            label, r["implementation"], str(r["batch"]), _number(r["us"]), _number(r["kernel_us"]),
            f"{r['gb_per_s']:,.0f}", f"{r['tflop_per_s']:,.1f}" if r["flops"] else "", _number(r["floor_us"]),
            f"{r['of_floor']:.0%}", f"[{colour}]{judged}[/]", error,
        )  # fmt: skip
    return table


def _problems(records: list[dict[str, Any]]) -> dict[str, list[str]]:
    """reason -> what could not be measured for it."""
    found: dict[str, list[str]] = {}
    for r in records:
        if r["problem"]:
            names = found.setdefault(r["problem"], [])
            name = f"{r['op']} {r['implementation']}"
            if name not in names:
                names.append(name)
    return found


def _number(us: float | None) -> str:
    return "-" if us is None else f"{us:,.1f}"
