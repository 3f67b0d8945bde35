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
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, get_args

from ..bench.shapes import CASES, OPS, QUICK, Case, select
from ..errors import OptionError
from ..layout import CacheLayout, CacheSize, KeySplit
from ..output import open_output
from .bench_table import print_record
from .models import BUILT_IN
from .options import PROGRAM, add_command, add_json, memory_bytes, naming, refuse_same, start_jax
from .printing import Progress, present, say, write_json
from .values import given_path, output_folder, picture_file, positive, short, token_count

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax bench --quick                                       all ops at tiny sizes, on any machine
  dsv4-jax bench attend --shapes csa-flash --batch 1,64,256    chosen shapes of one op
  dsv4-jax bench all --json bench.json --plot roofline.png     everything, to files
  dsv4-jax bench top_k --implementations xla,lax.top_k,torch   baselines only
  dsv4-jax bench step --model pro --batch 64 --context 32K     a whole decode step of the attention stack
  dsv4-jax bench step --layers 4 --loop 8 --xla xla_gpu_enable_triton_gemm=true
  dsv4-jax bench --render                                      make benchmarks/RESULTS.md from benchmarks/records
"""
_STEP_FIELDS = MappingProxyType(
    {"context": "--context", "CacheSize.num_blocks": "--batch, --context", "CacheSize": "--batch"}
)
# Options of steps alone: what they are if they are not given, which must be told from given.
_STEP_DEFAULTS = MappingProxyType({"model": None, "layers": None, "steps": 20, "loop": 1, "xla": (), "profile": None})
_OP_OPTIONS = ("shapes", "invariance", "plot")
_SHARED_OPTIONS = ("batch", "context", "implementations", "key_split", "quick", "json")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(
        commands, "bench", "time the ops or a decode step", __doc__, _EXAMPLES,
        fails="a result is wrong, a step cannot run, or with --check the page differs",
    )  # fmt: skip
    parser.add_argument("what", nargs="*", metavar="OP", help=f"{', '.join(OPS)}, all (default) or step")
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
        "--key-split", choices=get_args(KeySplit),
        help="how attend and steps cut a token's keys (default: throughput)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run? (the default on a CPU)")
    parser.add_argument(
        "--invariance", action="store_true", help="also check that rows keep their bits in other batches"
    )
    add_json(parser)
    parser.add_argument("--plot", type=picture_file, metavar="PNG", help="draw times, beside what the device can do")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--render", nargs="?", const=pathlib.Path("benchmarks"), type=given_path, metavar="DIR",
        help="measure nothing: write DIR/RESULTS.md from DIR/records/*.json (default: benchmarks)",
    )  # fmt: skip
    results.add_argument("--check", action="store_true", help="with --render: write nothing, fail if the page differs")
    step = parser.add_argument_group("step")
    step.add_argument("--model", choices=BUILT_IN, help="default: flash; tiny in a quick run without --layers")
    step.add_argument("--layers", type=positive, metavar="N", help="only the first N layers")
    step.add_argument("--steps", type=positive, metavar="N", help="calls per synchronisation (default: 20)")
    step.add_argument("--loop", type=positive, metavar="K", help="steps in one executable (default: 1)")
    step.add_argument(
        "--xla", action="append", type=_xla_option, metavar="OPTION=VALUE",
        help="compiler option of the step, such as xla_gpu_enable_triton_gemm=false",
    )  # fmt: skip
    step.add_argument("--profile", type=output_folder, metavar="DIR", help="keep the profiler trace of a step")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.render is not None:
        _refuse_given(args, ("what", *_OP_OPTIONS, *_SHARED_OPTIONS, *_STEP_DEFAULTS), "--render measures nothing")
        return _render(args.render, check=args.check)
    if args.check:
        raise OptionError("--check: goes with --render")
    ops, with_step = _chosen(args.what or ["all"])
    if not ops:
        _refuse_given(args, _OP_OPTIONS, "is for ops, not for a step")
    if not with_step:
        _refuse_given(args, _STEP_DEFAULTS, "is for a step: name `step`")
    for name, default in _STEP_DEFAULTS.items():
        setattr(args, name, getattr(args, name) or default)
    args.key_split = args.key_split or "throughput"
    with naming("OP"):
        select(CASES, ops or list(OPS))  # unknown names are refused before jax starts
    refuse_same({"--json": args.json, "--plot": args.plot})
    import jax

    from ..bench import ceilings, measure, plot
    from ..bench.records import new_record

    names = _implementations(args.implementations, measure.IMPLEMENTATIONS)
    start_jax()
    quick = args.quick or jax.default_backend() == "cpu"
    cases = [case.with_key_split(args.key_split) for case in (QUICK if quick else CASES)]
    chosen = []
    if ops:
        with naming(", ".join(f"--{name}" for name in ("shapes", "context") if getattr(args, name)) or "OP"):
            chosen = select(cases, ops, name=args.shapes, batches=args.batch, contexts=args.context)
    pairs = [(case, batch, names or measure.default_implementations(case.op)) for case, batch in chosen]
    _fit(chosen)
    steps = _step_options(args, quick) if with_step else []
    if quick and not args.quick:
        say("no GPU: tiny sizes, as with --quick")
    found: list[Any] = []
    reports: list[dict[str, Any]] = []
    device = jax.devices()[0].device_kind
    command = shlex.join([PROGRAM, *map(str, args.argv)])

    def result() -> dict[str, Any]:
        """What was measured so far; on disk, too, so that a run that is killed leaves it."""
        rows = [{"table": "ops"} | dataclasses.asdict(r) for r in found]
        rows += [{"table": "steps"} | report for report in reports]
        made = new_record(
            rows, device=device, command=command, quick=quick, ceilings=top.as_dict() if top else {},
            software={"jax": jax.__version__, "backend": jax.default_backend()},
        )  # fmt: skip
        if args.json and args.json != "-":
            write_json(made, args.json)
        return made

    with Progress("ceilings", sum(len(each) for *_, each in pairs) + len(steps)) as progress:
        top = None if quick else ceilings.measure_ceilings()
        for case, batch, each in pairs:
            progress.update(f"{case.op} {case.name}, batch {batch}")
            found += measure.measure(
                case, batch, each, top, quick=quick, invariance=args.invariance, on_done=progress.advance
            )
            result()
        if steps:
            from ..bench.step import measure_step
            from ..bench.targets import judged

            for options in steps:
                progress.update(f"step of {options.model}, batch {options.batch}")
                try:
                    reports.append(judged(measure_step(options, top)))
                except Exception as error:  # kernels may fail in any way; the other steps still count
                    failed = {"model": options.model, "implementation": options.implementation}
                    failed |= {"batch": options.batch, "context": options.context}
                    reports.append(failed | {"problem": measure.one_line(error)})
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
    from ..bench.render import page

    path = folder / "RESULTS.md"
    with naming("--render"):
        made = page(folder / "records")
    if not check:
        with open_output(path, encoding="utf-8") as file:
            file.write(made)
        return 0
    if path.is_file() and path.read_bytes() == made.encode():
        return 0
    say(f"{path} is not what {folder / 'records'} gives: run {PROGRAM} bench --render")
    return 1


def _chosen(what: list[str]) -> tuple[list[str], bool]:
    """(ops, whether a step was asked for)"""
    ops = list(OPS) if "all" in what else [name for name in dict.fromkeys(what) if name != "step"]
    return ops, "step" in what


def _refuse_given(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    for name in names:
        if getattr(args, name):
            raise OptionError(f"{'OP' if name == 'what' else '--' + name.replace('_', '-')}: {why}")


def _fit(chosen: list[tuple[Case, int]]) -> None:
    """Raises `OptionError` if an op's arguments cannot lie in the device's memory, before they are made."""
    for case, batch in chosen:
        _fits(f"{case.op} {case.name} of batch {batch}", case.make(batch).bytes_moved)


def _fits(what: str, needed: int) -> None:
    if needed > (held := _device_bytes()):
        raise OptionError(f"--batch, --context: {what} takes at least {needed} bytes, the device has {held}")


def _device_bytes() -> int:
    """Memory of the device; of the machine if the device does not say."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit") or memory_bytes()


def _implementations(names: list[str] | None, known: tuple[str, ...]) -> list[str] | None:
    for name in names or ():
        if name not in known:
            raise OptionError(f"--implementations: {short(name)} is none of {', '.join(known)}")
    return names


def _step_options(args: argparse.Namespace, quick: bool) -> list[Any]:
    """One per batch, context and implementation."""
    from ..bench.step import StepOptions
    from ..ops.registry import NAMES

    names: list[Any] = [name for name in args.implementations or [None] if name is None or name in NAMES]
    if not names:
        raise OptionError(f"--implementations: a step runs {', '.join(NAMES)}")
    asked_for = not quick or (args.model and args.layers)  # real layers on a CPU: only a few, and only by name
    model = (args.model or "flash") if asked_for else "tiny"
    options = [
        StepOptions(
            model=model, batch=batch, context=context, layers=args.layers,
            implementation=name, key_split=args.key_split, steps=2 if quick else args.steps, loop=args.loop,
            profile=args.profile, xla=tuple(args.xla),
        )
        for batch in args.batch or [2 if quick else 64]
        for context in args.context or [256 if quick else 128 * 1024]
        for name in names
    ]  # fmt: skip
    for option in options:
        with naming(fields=_STEP_FIELDS):
            cfg = option.config()
            layout = CacheLayout(cfg)
            columns = layout.blocks_for(option.context)
            needed = layout.total_bytes(CacheSize(option.batch * columns, option.batch, columns))
        if args.layers and args.layers > cfg.num_layers:
            raise OptionError(f"--layers: {option.model} has {cfg.num_layers}")
        _fits(f"a step of {option.model}, batch {option.batch}, context {option.context}", needed)
    return options


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
