"""`build`: compiles the native libraries for an installed package; the CUDA kernels, if there was no nvcc before."""

from __future__ import annotations

import argparse
import pathlib

from .. import libraries, native_build
from ..errors import ImplementationError, OptionError
from .options import add_command, add_json, option
from .printing import Progress, present, say
from .values import given_path, positive, short

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax build                              with the nvcc that is found, for every GPU it knows
  dsv4-jax build --architectures 90           for Hopper only: quicker
  pip install cmake ninja nvidia-cuda-nvcc nvidia-cuda-cccl    a compiler (CUDA 13: a driver of 580 or later)
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    fails = "a tool is missing or failed"
    parser = add_command(commands, "build", "compile the CUDA kernels", __doc__, _EXAMPLES, fails=fails)
    capabilities = "compute capabilities, such as 80,90 (default: all)"
    option(parser, "--architectures", _architectures, "LIST", capabilities, default=[])
    option(parser, "--nvcc", given_path, "PATH", "the compiler (default: the first found that the driver allows)")
    parser.add_argument("--cpu-only", action="store_true", help="only the CPU library, which needs no nvcc")
    option(parser, "--jobs", positive, "N", "compilers at a time (default: one per CPU)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.cpu_only and (args.nvcc or args.architectures):
        raise OptionError(f"--cpu-only: excludes {'--nvcc' if args.nvcc else '--architectures'}, it needs no CUDA")
    nvcc = None if args.cpu_only else _nvcc(args.nvcc)
    if nvcc:
        say(f"nvcc {nvcc.path}, CUDA {libraries.spelled(nvcc.version)}")

    def report(done: int, steps: int, name: str) -> None:
        progress.update(f"build, {name}", done=done, total=steps)

    with Progress("build") as progress:
        made = native_build.build(nvcc, architectures=args.architectures, jobs=args.jobs, report=report)
    least = libraries.MIN_DRIVERS.get(nvcc.version // 1000) if nvcc else None
    cuda = libraries.spelled(nvcc.version) if nvcc else None
    if least:
        say(f"built with CUDA {cuda}: needs a driver of {least} or later")
    found = {"libraries": [str(path) for path in made], "cuda": cuda, "least_driver": least}
    present(found, args.json, lambda console: console.print(*made, sep="\n", soft_wrap=True, markup=False))
    return 0


def _nvcc(named: pathlib.Path | None) -> native_build.Compiler:
    try:
        return native_build.choose_nvcc(named)
    except ImplementationError as error:
        if named is None:
            raise
        raise OptionError(f"--nvcc: {error}") from error


def _architectures(text: str) -> list[int]:
    """Parses compute capabilities separated by commas."""
    parts = text.replace(";", ",").split(",")
    for part in parts:
        if not (part.isascii() and part.isdigit() and 80 <= int(part[:5]) < 1000):
            raise argparse.ArgumentTypeError(f"{short(part)} is no compute capability from 80 on: give them as 80,90")
    return [int(part) for part in parts]
