"""`bench`: times every op, or a whole decode step, against what this device can do at most.

Terms: floor = the time no implementation can beat, the larger of bytes / copy ceiling and FLOPs / matmul ceiling
(bytes and FLOPs are those the shape cannot do without, both ceilings are measured in the same run). Times are kernel
times (profiler) where the device has them, else wall times over many calls per synchronisation. A quick run, as every
run on a CPU is, shows that all runs and is right: its times are put in relation to nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.shapes import CASES, OPS, QUICK, DraftHead, select
from ..config import Numerics
from ..errors import OptionError
from ..layout import KeySplit
from .bench_quality import OPTIONS, acceptance_table, add_options, draw, listed, measured, quality_table
from .bench_steps import fits, model_options, step_options
from .models import BUILT_IN
from .options import PROGRAM, add_command, add_json, naming, option, refuse_same, start_jax
from .printing import Output, Progress, present, say, write_json
from .values import natural, output_folder, picture_file, positive, short, token_count

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax bench --quick                                       all ops at tiny sizes, on any machine
  dsv4-jax bench attend --shapes csa-flash --batch 1,64,256    chosen shapes of one op
  dsv4-jax bench all --json bench.json --plot roofline.png     everything, to files
  dsv4-jax bench top_k --implementations xla,lax.top_k         baselines only
  dsv4-jax bench step --model pro --batch 64 --context 32K     a whole decode step of the attention stack
  dsv4-jax bench step --batch 1 --context 128K --chunk 4K      prefill: the last 4,096 tokens of a context
  dsv4-jax bench step --layers 4 --loop 8 --xla xla_gpu_enable_triton_gemm=true
  dsv4-jax bench model --batch 1,64,256                        whole layers of Flash, weights as released
  dsv4-jax bench model --batch 1 --chunk 4K                    prefill of whole layers (with --devices over several)
  dsv4-jax bench model --model pro --layers 4 --context 32K    four layers of Pro and its head
  dsv4-jax bench model --devices 2 --batch 1,64 --context 8K   over two devices: heads and experts, or experts alone
  dsv4-jax bench model --devices 2 --batch 1 --drafts 3        with tokens drafted and verified in every step
  dsv4-jax bench model --batch 1 --drafts 5 --draft-head dspark    by DSpark's stages in place of the MTP layer
  dsv4-jax bench model --batch 64 --numerics released          rows of products rounded as the released model's are
  dsv4-jax bench quality --checkpoint DIR --text held_out.npy --drafts 3 --json quality.json --plot quality.png
"""
# Options of steps alone: what they are if they are not given, which must be told from given.
_STEP_DEFAULTS = MappingProxyType(
    dict.fromkeys(("model", "layers", "profile", "devices", "tensor", "draft_head", "numerics"))
    | dict(chunk=1, steps=20, loop=1, xla=(), drafts=0)
)
_OP_OPTIONS = ("shapes", "plot")
_STEPS = {"steps": "decode step", "models": "decode step of whole layers"}  # table of a record -> title
# Column of a measured op -> field and format. What follows "kernel us" says something of real sizes only.
_COLUMNS = MappingProxyType(
    {
        "us": ("us", ",.1f"),
        "kernel us": ("kernel_us", ",.1f"),
        "GB/s": ("gb_per_s", ",.0f"),
        "TFLOP/s": ("tflop_per_s", ",.1f"),
        "floor us": ("floor_us", ",.1f"),
        "of floor": ("of_floor", ".0%"),
    }
)
_WIDE = 140  # a wide table in a pipe or a log is better than one cell per line


def add_parser(commands: argparse._SubParsersAction) -> None:
    fails = "a result is wrong, or a step cannot run"
    parser = add_command(commands, "bench", "time the ops or a decode step", __doc__, _EXAMPLES, fails=fails)
    parser.add_argument(
        "what", nargs="*", metavar="OP", help=f"{', '.join(OPS)}, all (default), step, model or quality"
    )
    option(parser, "--shapes", str, "TEXT", "only shapes whose op/name holds this")
    option(parser, "--batch", partial(_several, positive), "N,...", "these batches instead of each shape's")
    option(parser, "--context", partial(_several, token_count), "N,...", "of 8K, 128K, 1M; any for a step or model")
    known = "cuda, pallas, triton, xla, lax.top_k"
    option(parser, "--implementations", lambda text: list(dict.fromkeys(text.split(","))), "NAME,...", known)
    parser.add_argument(
        "--key-split",
        choices=get_args(KeySplit),
        help="how a token's keys are cut (default: throughput; in a model's step of up to 16 requests latency)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run? (the default on a CPU)")
    add_json(parser)
    option(parser, "--plot", picture_file, "PNG", "draw times, beside what the device can do")
    for gone in ("--render", "--check"):  # for one release
        parser.add_argument(gone, nargs="?", const="", help=argparse.SUPPRESS)
    step = parser.add_argument_group(
        "step and model", "step: the attention stack in bf16. model: whole layers and the head, weights as released."
    )
    step.add_argument("--model", choices=BUILT_IN, help="default: flash; tiny in a quick run without --layers")
    layers = "only the first N (default: all; of a model that does not fit 12, or what fits)"
    option(step, "--layers", positive, "N", layers)
    option(step, "--chunk", token_count, "N", "prefill: the last N tokens of each context (default: 1)")
    option(step, "--devices", positive, "N", "model: over so many devices (default: 1)")
    tensor = "of them, have the same requests and share the heads (default: all up to 8 requests, else 1)"
    option(step, "--tensor", positive, "N", tensor)
    drafts = "that are made for each request and verified in the same step (default: none); quality: accepted"
    option(step, "--drafts", natural, "N", drafts, choices=range(9))
    head = "model: what makes them, an MTP layer (at most 3; the default) or DSpark's stages (at most 5)"
    step.add_argument("--draft-head", choices=get_args(DraftHead), help=head)
    numerics = "plain, released: of a model and of quality; released rounds rows of products to e4m3 (default: plain)"
    option(step, "--numerics", listed(get_args(Numerics)), "NAME,...", numerics)
    option(step, "--steps", positive, "N", "calls per synchronisation (default: 20)")
    option(step, "--loop", positive, "K", "steps in one executable (default: 1)")
    xla = "compiler option of the step, such as xla_gpu_enable_triton_gemm=false"
    option(step, "--xla", _xla_option, "OPTION=VALUE", xla, action="append")
    option(step, "--profile", output_folder, "DIR", "keep the profiler trace of a step")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for gone in ("render", "check"):
        if getattr(args, gone) is not None:
            raise OptionError(f"--{gone}: pages of results are made by `python benchmarks/render.py` in a checkout")
    asked = args.what or ["all"]
    if "quality" in asked:
        return _quality(args, asked)
    _refuse_given(args, OPTIONS, "is for quality")
    whole = {"step", "model"}.intersection(asked)
    ops = list(OPS) if "all" in asked else [name for name in dict.fromkeys(asked) if name not in whole]
    if not ops:
        _refuse_given(args, _OP_OPTIONS, "is for ops, not for a step")
    if args.numerics and "model" not in whole:
        raise OptionError("--numerics: of a model's whole layers, name `model` or `quality`")
    if not whole:
        _refuse_given(args, _STEP_DEFAULTS, "is for a step: name `step` or `model`")
    for name, default in _STEP_DEFAULTS.items():
        setattr(args, name, getattr(args, name) or default)
    with naming("OP"):
        select(CASES, ops or list(OPS))  # unknown names are refused before jax starts
    refuse_same({"--json": args.json, "--plot": args.plot})
    import jax

    from ..bench import measure, plot, timing
    from ..bench.records import new_record

    for name in args.implementations or ():
        if name not in measure.IMPLEMENTATIONS:
            raise OptionError(f"--implementations: {short(name)} is none of {', '.join(measure.IMPLEMENTATIONS)}")
    start_jax()
    quick = args.quick or jax.default_backend() == "cpu"
    cases = [case.with_key_split(args.key_split or "throughput") for case in (QUICK if quick else CASES)]
    chosen = []
    if ops:
        with naming(", ".join(f"--{name}" for name in ("shapes", "context") if getattr(args, name)) or "OP"):
            chosen = select(cases, ops, name=args.shapes, batches=args.batch, contexts=args.context)
    for case, batch in chosen:  # whose arguments must lie in the device's memory
        fits(f"{case.op} {case.name} of batch {batch}", case.make(batch).bytes_moved)
    names = args.implementations
    pairs = [(case, batch, names or measure.default_implementations(case.op)) for case, batch in chosen]
    steps = step_options(args, quick) if "step" in whole else []
    models = model_options(args, quick) if "model" in whole else []
    if quick and not args.quick:
        say("no GPU: tiny sizes, as with --quick")
    found: list[Any] = []
    reports: list[dict[str, Any]] = []
    device = jax.devices()[0].device_kind

    def result() -> dict[str, Any]:
        """Makes the record of what was measured so far; writes it, too, so that a run that is killed leaves it."""
        made = new_record(
            [*({"table": "ops"} | dataclasses.asdict(r) for r in found), *reports],
            device=device,
            command=shlex.join([PROGRAM, *map(str, args.argv)]),
            quick=quick,
            ceilings=top.as_dict() if top else {},
            software={"jax": jax.__version__, "backend": jax.default_backend()},
        )
        if args.json and args.json != "-":
            write_json(made, args.json)
        return made

    with Progress("ceilings", sum(len(each) for *_, each in pairs) + len(steps) + len(models)) as progress:
        top = None if quick else timing.measure_ceilings()
        for case, batch, each in pairs:
            progress.update(f"{case.op} {case.name}, batch {batch}")
            found += measure.measure(case, batch, each, top, quick=quick, on_done=progress.advance)
            result()
        for table, report in _whole_steps(steps, models, top, progress):
            reports.append({"table": table} | report)
            result()
            progress.advance()
    if args.plot:
        plot.draw(found, top, args.plot, device=device)
    record = result()
    present(record, args.json, lambda console: _print(console, record))
    # An op's implementation that cannot run here is a row; a wrong result or no step is a failure.
    return int(any(r.correct is False for r in found) or any("problem" in report for report in reports))


def _quality(args: argparse.Namespace, asked: list[str]) -> int:
    if asked != ["quality"]:
        raise OptionError("OP: quality is measured by itself")
    _refuse_given(args, ("shapes", "model", "layers", "profile", "devices", "tensor", "xla"), "is not for quality")
    args.chunk = args.chunk or 1
    refuse_same({"--json": args.json, "--plot": args.plot, "--text": args.text})
    import jax

    from ..bench.records import new_record

    start_jax()
    quick, rows, record = args.quick or jax.default_backend() == "cpu", [], {}
    device = jax.devices()[0].device_kind
    found = measured(args, quick)
    if quick and not args.quick:
        say("no GPU: short windows of little text, as with --quick")
    for table, row in found:
        rows.append({"table": table} | row)
        record = new_record(
            rows,
            device=device,
            command=shlex.join([PROGRAM, *map(str, args.argv)]),
            quick=quick,
            ceilings={},
            software={"jax": jax.__version__, "backend": jax.default_backend()},
        )
        if args.json and args.json != "-":
            write_json(record, args.json)
    by_table = {name: [row for row in rows if row["table"] == name] for name in ("quality", "acceptance")}
    if args.plot:
        draw(by_table["quality"], args.plot, device=device)

    def tables(console: Console) -> None:
        wide = console if console.is_terminal else Output(width=max(console.width, _WIDE))
        for name, table in (("quality", quality_table), ("acceptance", acceptance_table)):
            if by_table[name]:
                wide.print(table(by_table[name]))

    present(record, args.json, tables)
    return 0


def _whole_steps(
    steps: list[Any], models: list[Any], top: Any, progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (table, report) of every step that is measured."""
    from ..bench import model, step
    from ..bench.measure import one_line
    from ..model import init_params

    def report(options: Any, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        progress.update(f"step of {options.model}, batch {options.batch}")
        try:
            return measured()
        except Exception as error:  # kernels may fail in any way; the other steps still count
            names = ("model", "implementation", "batch", "context", "layers")
            return {name: getattr(options, name) for name in names} | {"problem": one_line(error)}

    def show(done: int, total: int) -> None:
        progress.update(f"weights, {done >> 20:,} of {total >> 20:,} MiB")

    for options in steps:
        yield "steps", report(options, lambda: step.measure_step(options, top))  # noqa: B023
    held = None
    for options in models:
        if (options.split, options.numerics) != held:
            held, params = (options.split, options.numerics), None
            mesh, cfg = model.mesh_of(options), model.model_config(options)
            how: dict[str, Any] = dict(drafts=options.drafts > 0, numerics=options.numerics, mesh=mesh)
            params = init_params(cfg, 0, "released", packed=True, progress=show, **how)
        yield "models", report(options, lambda: model.measure_model(options, params, top))  # noqa: B023


def _refuse_given(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    for name in names:
        if getattr(args, name):
            raise OptionError(f"--{name}: {why}")


def _xla_option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{short(text)} is not OPTION=VALUE")
    return name, {"true": True, "false": False}.get(value.lower(), value)


def _several(item: Callable[[str], Any], text: str) -> list[Any]:
    return [item(part) for part in text.split(",")]


# The record as tables


def _print(console: Console, record: dict[str, Any]) -> None:
    """Prints what `bench` found: the ops in one table, and a table for each step."""
    top, quick = record["ceilings"], record["quick"]
    known = (
        "tiny sizes, which show what runs and is right, not how fast it can be"
        if quick
        else f"copy {top['copy_gb_per_s']:,.0f} GB/s, bf16 matmul {top['matmul_tflop_per_s']:,.0f} TFLOP/s"
    )
    plain: dict[str, Any] = dict(markup=False, highlight=False, soft_wrap=True)
    console.print(f"{record['device']}, jax {record['software']['jax']}: {known}", **plain)
    ops = [row for row in record["rows"] if row["table"] == "ops"]
    if measured := [row for row in ops if not row["problem"]]:
        wide = console if console.is_terminal or quick else Output(width=max(console.width, _WIDE))
        wide.print(_table(measured, quick))
    for reason, names in _problems(ops).items():
        said = f"not measured: {'; '.join(f'{name} ({also})' for name, also in names.items())}: {reason}"
        console.print(said, **plain)
    for report in record["rows"]:
        if title := _STEPS.get(report["table"]):
            console.print(_step(report, title))


def _table(rows: list[dict[str, Any]], quick: bool) -> Table:
    by_kernel = any(row["kernel_us"] is not None for row in rows)
    cells = [name for name in list(_COLUMNS)[: 2 if quick else None] if by_kernel or name != "kernel us"]
    table = Table("op / shape", "implementation")
    for name in ("batch", *cells, "error"):
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        label = f"{row['op']} {row['shape']}{', ' + row['variant'] if row['variant'] else ''}"
        if last is not None and (label, row["batch"]) != last:
            table.add_section()
        last = label, row["batch"]
        values = ((row[_COLUMNS[name][0]], _COLUMNS[name][1]) for name in cells)
        shown = ("-" if value is None else f"{value:{form}}" if value else "" for value, form in values)
        error = f"{row['relative_error']:.0e}" if row["correct"] else f"[red]{row['relative_error']:.1e} wrong[/]"
        table.add_row(label, row["implementation"], str(row["batch"]), *shown, error)
    return table


def _problems(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Groups what could not be measured: reason -> implementation -> its ops."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for row in rows:
        if row["problem"]:
            found.setdefault(row["problem"], {}).setdefault(row["implementation"], {})[row["op"]] = None
    return {reason: {name: ", ".join(ops) for name, ops in names.items()} for reason, names in found.items()}


def _step(report: dict[str, Any], title: str) -> Table:
    table = Table("", "", title=title, title_justify="left", show_header=False)
    for name, value in report.items():
        if isinstance(value, dict):
            for part, number in value.items():
                shown = f"{number:,.1f}" if isinstance(number, float) else str(number)
                table.add_row(escape(f"  {name}: {part[:60]}"), escape(shown))
        elif value is not None and name != "table":
            table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else escape(str(value)))
    return table
