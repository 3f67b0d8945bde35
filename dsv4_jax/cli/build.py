"""`build`: compiles the native libraries for an installed package; the CUDA kernels, if there was no nvcc before."""

from __future__ import annotations

import argparse
import sys

from rich.progress import Progress

from .. import libraries, native_build
from .options import add_json, print_json, progress_bar
from .values import positive

__all__ = ["add_parser", "run"]

_EXAMPLES = """
examples:
  dsv4-jax build                              with the nvcc that is found, for every GPU it knows
  dsv4-jax build --architectures 90           for Hopper only: quicker
  pip install cmake ninja nvidia-cuda-nvcc nvidia-cuda-cccl    a compiler (CUDA 13: a driver of 580 or later)
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "build", help="compile the CUDA kernels", description=__doc__, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--architectures",
        type=_architectures,
        metavar="LIST",
        default=[],
        help="compute capabilities, such as 80,90 (default: all)",
    )
    parser.add_argument("--nvcc", metavar="PATH", help="the compiler (default: the first found that the driver allows)")
    parser.add_argument("--cpu-only", action="store_true", help="only the CPU library, which needs no nvcc")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compilers at a time (default: one per CPU)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    nvcc = None if args.cpu_only else native_build.choose_nvcc(args.nvcc)
    if nvcc:
        print(f"nvcc {nvcc.path}, CUDA {libraries.spelled(nvcc.version)}", file=sys.stderr)
    with progress_bar() as progress:
        made = native_build.build(nvcc, architectures=args.architectures, jobs=args.jobs, report=_Steps(progress))
    least = libraries.LEAST_DRIVERS.get(nvcc.version // 1000) if nvcc else None
    if args.json:
        cuda = libraries.spelled(nvcc.version) if nvcc else None
        print_json({"libraries": [str(path) for path in made], "cuda": cuda, "least_driver": least})
        return 0
    for path in made:
        print(path)
    if nvcc and least:
        print(f"built with CUDA {libraries.spelled(nvcc.version)}: needs a driver of {least} or later", file=sys.stderr)
    return 0


class _Steps:
    """A bar on a terminal; elsewhere a line per step, so that a log shows where a build is."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.task = progress.add_task("build", total=None)

    def __call__(self, done: int, steps: int, name: str) -> None:
        if self.progress.disable:
            print(f"[{done}/{steps}] {name}", file=sys.stderr, flush=True)
        else:
            self.progress.update(self.task, completed=done, total=steps, description=name)


def _architectures(text: str) -> list[int]:
    parts = text.replace(";", ",").split(",")
    for part in parts:
        if not (part.isascii() and part.isdigit() and 80 <= int(part[:5]) < 1000):
            raise argparse.ArgumentTypeError(f"{part!r} is no compute capability from 80 on: give them as 80,90")
    return [int(part) for part in parts]
