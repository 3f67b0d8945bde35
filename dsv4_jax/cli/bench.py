"""`bench`: times every op, or a whole decode step, against what this device can do at most.

Terms: floor = the time no implementation can beat, the larger of bytes / copy ceiling and FLOPs / matmul ceiling
(bytes and FLOPs are those the shape cannot do without, both ceilings are measured in the same run); required and
goal = the project's targets; peer = the best other system's time on an H200. Times are kernel times (profiler) where
the device has them, else wall times over many calls per synchronisation. A quick run, as every run on a CPU is, shows
that all runs and is right: its times are put in relation to nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Any, get_args

from ..bench.shapes import CASES, OPS, QUICK, Case, select
from ..errors import OptionError
from ..layout import KeySplit
from ..output import open_output
from .bench_steps import fits, model_options, step_options
from .bench_table import print_record
from .models import BUILT_IN
from .options import PROGRAM, add_command, add_json, naming, refuse_same, start_jax
from .printing import Progress, present, say, write_json
from .values import given_path, natural, output_folder, picture_file, positive, short, token_count

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax bench --quick                                       all ops at tiny sizes, on any machine
  dsv4-jax bench attend --shapes csa-flash --batch 1,64,256    chosen shapes of one op
  dsv4-jax bench all --json bench.json --plot roofline.png     everything, to files
  dsv4-jax bench top_k --implementations xla,lax.top_k,torch   baselines only
  dsv4-jax bench step --model pro --batch 64 --context 32K     a whole decode step of the attention stack
  dsv4-jax bench step --batch 1 --context 128K --chunk 4K      prefill: the last 4,096 tokens of a context
  dsv4-jax bench step --layers 4 --loop 8 --xla xla_gpu_enable_triton_gemm=true
  dsv4-jax bench model --batch 1,64,256                        whole layers of Flash, weights as released
  dsv4-jax bench model --batch 1 --chunk 4K                    prefill of whole layers
  dsv4-jax bench model --model pro --layers 4 --context 32K    four layers of Pro and its head
  dsv4-jax bench model --devices 2 --batch 1,64 --context 8K   over two devices: heads and experts, or experts alone
  dsv4-jax bench model --devices 2 --batch 1 --drafts 3        with tokens drafted and verified in every step
  dsv4-jax bench --render                                      make the pages of benchmarks/ from benchmarks/records
"""
# Options of steps alone: what they are if they are not given, which must be told from given.
_STEP_DEFAULTS = MappingProxyType(
    {
        "model": None,
        "layers": None,
        "chunk": 1,
        "steps": 20,
        "loop": 1,
        "xla": (),
        "profile": None,
        "devices": None,
        "tensor": None,
        "drafts": 0,
    }
)
_OP_OPTIONS = ("shapes", "invariance", "plot")
_SHARED_OPTIONS = ("batch", "context", "implementations", "key_split", "quick", "json")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(
        commands,
        "bench",
        "time the ops or a decode step",
        __doc__,
        _EXAMPLES,
        fails="a result is wrong, a step cannot run, or with --check a page differs",
    )
    parser.add_argument("what", nargs="*", metavar="OP", help=f"{', '.join(OPS)}, all (default), step or model")
    parser.add_argument("--shapes", metavar="TEXT", help="only shapes whose op/name holds this")
    parser.add_argument(
        "--batch", type=_list_of(positive), metavar="N,...", help="these batches instead of each shape's"
    )
    parser.add_argument(
        "--context", type=_list_of(token_count), metavar="N,...", help="of 8K, 128K, 1M; any for a step or model"
    )
    parser.add_argument(
        "--implementations", type=_names, metavar="NAME,...", help="cuda, pallas, triton, xla, lax.top_k, torch"
    )
    parser.add_argument(
        "--key-split",
        choices=get_args(KeySplit),
        help="how a token's keys are cut (default: throughput; in a model's step of up to 16 requests latency)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run? (the default on a CPU)")
    parser.add_argument(
        "--invariance", action="store_true", help="also check that rows keep their bits in other batches"
    )
    add_json(parser)
    parser.add_argument("--plot", type=picture_file, metavar="PNG", help="draw times, beside what the device can do")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--render",
        nargs="?",
        const=pathlib.Path("benchmarks"),
        type=given_path,
        metavar="DIR",
        help="measure nothing: write DIR/RESULTS.md, README.md and its picture from DIR/records (default: benchmarks)",
    )
    results.add_argument("--check", action="store_true", help="with --render: write nothing, fail if one differs")
    step = parser.add_argument_group(
        "step and model", "step: the attention stack in bf16. model: whole layers and the head, weights as released."
    )
    step.add_argument("--model", choices=BUILT_IN, help="default: flash; tiny in a quick run without --layers")
    step.add_argument(
        "--layers",
        type=positive,
        metavar="N",
        help="only the first N (default: all; of a model that does not fit 12, or what fits)",
    )
    step.add_argument(
        "--chunk", type=token_count, metavar="N", help="prefill: the last N tokens of each context (default: 1)"
    )
    step.add_argument("--devices", type=positive, metavar="N", help="model: over so many devices (default: 1)")
    step.add_argument(
        "--tensor",
        type=positive,
        metavar="N",
        help="of them, have the same requests and share the heads (default: all up to 8 requests, else 1)",
    )
    step.add_argument(
        "--drafts",
        type=natural,
        choices=range(4),
        metavar="N",
        help="model: that the MTP layer makes for each request, verified in the same step (default: none)",
    )
    step.add_argument("--steps", type=positive, metavar="N", help="calls per synchronisation (default: 20)")
    step.add_argument("--loop", type=positive, metavar="K", help="steps in one executable (default: 1)")
    step.add_argument(
        "--xla",
        action="append",
        type=_xla_option,
        metavar="OPTION=VALUE",
        help="compiler option of the step, such as xla_gpu_enable_triton_gemm=false",
    )
    step.add_argument("--profile", type=output_folder, metavar="DIR", help="keep the profiler trace of a step")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.render is not None:
        _refuse_given(args, ("what", *_OP_OPTIONS, *_SHARED_OPTIONS, *_STEP_DEFAULTS), "--render measures nothing")
        return _render(args.render, check=args.check)
    if args.check:
        raise OptionError("--check: goes with --render")
    ops, whole = _chosen(args.what or ["all"])
    if not ops:
        _refuse_given(args, _OP_OPTIONS, "is for ops, not for a step")
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

    names = _implementations(args.implementations, measure.IMPLEMENTATIONS)
    start_jax()
    quick = args.quick or jax.default_backend() == "cpu"
    cases = [case.with_key_split(args.key_split or "throughput") for case in (QUICK if quick else CASES)]
    chosen = []
    if ops:
        with naming(", ".join(f"--{name}" for name in ("shapes", "context") if getattr(args, name)) or "OP"):
            chosen = select(cases, ops, name=args.shapes, batches=args.batch, contexts=args.context)
    pairs = [(case, batch, names or measure.default_implementations(case.op)) for case, batch in chosen]
    _fit(chosen)
    steps = step_options(args, quick) if "step" in whole else []
    models = model_options(args, quick) if "model" in whole else []
    if quick and not args.quick:
        say("no GPU: tiny sizes, as with --quick")
    found: list[Any] = []
    reports: list[dict[str, Any]] = []
    device = jax.devices()[0].device_kind
    command = shlex.join([PROGRAM, *map(str, args.argv)])

    def result() -> dict[str, Any]:
        """What was measured so far; on disk, too, so that a run that is killed leaves it."""
        rows = [{"table": "ops"} | dataclasses.asdict(r) for r in found]
        rows += reports
        made = new_record(
            rows,
            device=device,
            command=command,
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
            found += measure.measure(
                case, batch, each, top, quick=quick, invariance=args.invariance, on_done=progress.advance
            )
            result()
        for table, report in _whole_steps(steps, models, top, progress):
            reports.append({"table": table} | report)
            result()
            progress.advance()
    if args.plot:
        plot.draw(found, top, args.plot, device=device)
    record = result()
    present(record, args.json, lambda console: print_record(console, record))
    # An op's implementation that cannot run here is a row; a wrong result or no step is a failure.
    # The reference promises no batch invariance on a GPU: its products are a library's.
    wrong = any(r.correct is False or (r.batch_invariant is False and r.implementation != "xla") for r in found)
    return 1 if wrong or any("problem" in report for report in reports) else 0


def _render(folder: pathlib.Path, *, check: bool) -> int:
    """Writes what is made from the records; with `check` compares what a repository keeps of it."""
    from ..bench.records import dumps
    from ..bench.render import newest, pages

    with naming("--render"):
        made = pages(folder)
    if check:
        del made["RESULTS.md"]  # which is made where it is read
        stale = [folder / name for name, text in made.items() if not _holds(folder / name, text)]
        for path in stale:
            say(f"{path} is not what {folder / 'records'} gives: run {PROGRAM} bench --render")
        return int(bool(stale))
    for name, text in made.items():
        with open_output(folder / name, encoding="utf-8") as file:
            file.write(text)
    for name, record in newest(folder / "records").items():
        if not record["rows"]:
            (folder / "records" / name).unlink()
            continue
        with open_output(folder / "records" / name, encoding="utf-8") as file:
            file.write(dumps(record))
    return 0


def _holds(path: pathlib.Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _whole_steps(
    steps: list[Any], models: list[Any], top: Any, progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (table, report) of every step that is measured."""
    from ..bench import model, step
    from ..bench.measure import one_line
    from ..bench.mesh import mesh_of
    from ..bench.targets import judged, judged_model
    from ..model import init_params

    def report(options: Any, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        progress.update(f"step of {options.model}, batch {options.batch}")
        try:
            return measured()
        except Exception as error:  # kernels may fail in any way; the other steps still count
            names = ("model", "implementation", "batch", "context", "layers")
            return {name: getattr(options, name) for name in names} | {"problem": one_line(error)}

    def drawn(done: int, total: int) -> None:
        progress.update(f"weights, {done >> 20:,} of {total >> 20:,} MiB")

    for options in steps:
        yield "steps", report(options, lambda: judged(step.measure_step(options, top)))  # noqa: B023
    split = None
    for options in models:
        if options.split != split:
            split, params, mesh, cfg = options.split, None, mesh_of(options), model.model_config(options)
            mtp = options.drafts > 0
            params = init_params(cfg, 0, "released", packed=True, mtp=mtp, mesh=mesh, progress=drawn)
        yield "models", report(options, lambda: judged_model(model.measure_model(options, params, top)))  # noqa: B023


def _chosen(what: list[str]) -> tuple[list[str], set[str]]:
    """Returns the ops and the whole steps that were asked for."""
    whole = {"step", "model"}.intersection(what)
    ops = list(OPS) if "all" in what else [name for name in dict.fromkeys(what) if name not in whole]
    return ops, whole


def _refuse_given(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    for name in names:
        if getattr(args, name):
            raise OptionError(f"{'OP' if name == 'what' else '--' + name.replace('_', '-')}: {why}")


def _fit(chosen: list[tuple[Case, int]]) -> None:
    """Raises `OptionError` if an op's arguments cannot lie in the device's memory, before they are made."""
    for case, batch in chosen:
        fits(f"{case.op} {case.name} of batch {batch}", case.make(batch).bytes_moved)


def _implementations(names: list[str] | None, known: tuple[str, ...]) -> list[str] | None:
    for name in names or ():
        if name not in known:
            raise OptionError(f"--implementations: {short(name)} is none of {', '.join(known)}")
    return names


def _xla_option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{short(text)} is not OPTION=VALUE")
    return name, {"true": True, "false": False}.get(value.lower(), value)


def _list_of(item: Callable[[str], int]) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        return [item(part) for part in text.split(",")]

    return parse


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))
