"""What the parsers of all commands have in common: their form, shared options, and errors in the words of options."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from ..config import DSV4Config
from ..errors import (
    CacheError,
    CapacityError,
    FileError,
    ImplementationError,
    IntegrityError,
    OptionError,
)
from ..formats import INDEX_FORMATS, KV_FORMATS
from ..layout import CacheLayout
from .printing import human, one_line, say
from .values import json_file, natural, positive, short

__all__ = [
    "EXIT_STATUS",
    "FAILURES",
    "LATENCY_REQUESTS",
    "LAYOUT_FIELDS",
    "PROGRAM",
    "Parser",
    "add_command",
    "add_implementation",
    "add_json",
    "add_layout",
    "check_devices",
    "check_implementation",
    "devices_sharing_heads",
    "layout_from",
    "naming",
    "option",
    "refuse_same",
    "start_jax",
]

PROGRAM = "dsv4-jax"
EXIT_STATUS = {
    0: "done",
    1: "ran and failed: a check did not hold, or the device, a compiler or the memory gave out",
    2: "refused: bad arguments, input or output; one line on stderr says what",
    130: "interrupted (Ctrl-C)",
    141: "the reader of the output has gone (a closed pipe)",
}
FAILURES = (ImplementationError, IntegrityError)  # of the machine or of this package, not of what was asked
LATENCY_REQUESTS = 8  # up to which heads are split over devices if not told otherwise
# Numbers of bytes in a `CapacityError`, which are said in IEC units here.
_BYTES = re.compile(r"\b([0-9]{5,}) bytes\b|(?<=take )([0-9]{5,})\b|(?<=blocks of )([0-9]{5,})\b")
LAYOUT_FIELDS = MappingProxyType({"block_tokens": "--block-tokens", "draft_tokens": "--draft-tokens"})


class Parser(argparse.ArgumentParser):
    """Reports bad arguments in one line, and takes options by their whole names only."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)")
        raise SystemExit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or () if self._subparsers is None else ():
            if re.fullmatch(r"--[a-z-]+=--", word):  # argparse would take an empty list for the value
                self.error(f"argument {word[:-3]}: '--' is no value")
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            near = [option for option in options if option.startswith(unknown[0].partition("=")[0])]
            near = near or difflib.get_close_matches(unknown[0], options, 1)
            hint = f", did you mean {near[0]}?" if near and unknown[0].startswith("-") else ""
            self.error(f"unknown argument {short(unknown[0])}{hint}")
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse would not mind a full disk or a closed pipe."""
        print(message, end="", file=file or sys.stdout)


def add_command(
    commands: argparse._SubParsersAction,
    name: str,
    summary: str,
    doc: str | None,
    examples: str,
    *,
    fails: str | None = None,
) -> argparse.ArgumentParser:
    """Adds the parser of a command.

    Args:
        summary: its line in the list of all commands.
        doc: of its module: "`name`: what it does".
        examples: lines.
        fails: when its exit status is 1, beside when the machine gives out.
    """
    said = (doc or "").partition(": ")[2]
    failed = f"; 1 {fails}" if fails else ""
    end = f"exit status: 0 done{failed}; 2 refused (more: {PROGRAM} --help)"
    return commands.add_parser(
        name,
        help=summary,
        description=said[:1].upper() + said[1:],
        epilog=f"examples:\n{examples.strip(chr(10))}\n\n{end}\nthe same: python -m dsv4_jax {name}",
    )


def option(
    parser: argparse._ActionsContainer, name: str, kind: Callable[[str], Any], metavar: str, help: str, **more: Any
) -> None:
    """Adds an option with a value of a type of `values`, and says its default, if it has one.

    Args:
        metavar: what stands for the value in the help.
        more: what else `add_argument` takes.
    """
    said = f"{help} (default: %(default)s)" if more.get("default") else help
    parser.add_argument(name, type=kind, metavar=metavar, help=said, **more)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`, which every command takes."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=json_file,
        metavar="FILE",
        help="print JSON and nothing else, or write it to FILE (.json) beside printing the table",
    )


def add_layout(
    parser: argparse.ArgumentParser, *, kv_format: str = "fp8", index_format: str = "fp4", drafts: bool = True
) -> None:
    """Adds the options that choose a `CacheLayout`; `drafts`: the room for drafts among them."""
    group = parser.add_argument_group("cache layout")
    chosen = "default: %(default)s"
    group.add_argument("--kv-format", choices=sorted(KV_FORMATS), default=kv_format, help=chosen)
    group.add_argument("--index-format", choices=sorted(INDEX_FORMATS), default=index_format, help=chosen)
    option(group, "--block-tokens", positive, "N", "tokens per block (default: 128)")
    if drafts:
        option(group, "--draft-tokens", natural, "N", "drafts a verify step may carry", default=0)
    group.add_argument("--hca-state", choices=("online", "raw"), default="online", help=chosen)


def layout_from(args: argparse.Namespace, cfg: DSV4Config, **options: Any) -> CacheLayout:
    """Returns the layout that these options choose. Raises `OptionError`."""
    with naming(fields=LAYOUT_FIELDS):
        return CacheLayout(
            cfg,
            args.kv_format,
            args.index_format,
            args.block_tokens,
            args.draft_tokens,
            hca_state=args.hca_state,
            **options,
        )


@contextlib.contextmanager
def naming(option: str | None = None, fields: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Errors of the package and of files in the words of the command line: `OptionError`, and `FAILURES` as they are.

    Args:
        option: what the errors are about, said first.
        fields: words that messages use -> what to say instead: an option.
    """
    try:
        yield
    except FAILURES:
        raise
    except CacheError as error:
        text = str(error)
        if isinstance(error, CapacityError):
            text = _BYTES.sub(lambda match: human(int(match[match.lastindex or 0])), text)
        if fields:
            longest = sorted(fields, key=len, reverse=True)  # CacheSize.num_slots before CacheSize
            text = re.sub(rf"\b({'|'.join(map(re.escape, longest))})\b", lambda match: fields[match[0]], text)
        raise OptionError(f"{option}: {text}" if option else text) from error
    except OSError as error:
        if option is None:
            raise
        raise OptionError(f"{option}: {error}") from error


def refuse_same(paths: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Refuses two options that name one file: an output would destroy the input, or the other output."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is not None and str(path) != "-":
            other = seen.setdefault(os.path.realpath(path), option)
            if other != option:
                raise FileError(f"{option}: {path} is the file of {other} too")


# The machine


def check_devices(count: int) -> None:
    """Raises `OptionError` if jax does not see so many devices."""
    import jax

    if count > (there := len(jax.devices())):
        raise OptionError(f"--devices: {count} of the {there} that jax sees")


def add_implementation(parser: argparse._ActionsContainer) -> None:
    """Adds `--implementation`."""
    parser.add_argument("--implementation", choices=("xla", "pallas", "cuda"), help="of the cache ops (default: best)")


def check_implementation(name: str | None) -> None:
    """Raises `OptionError` if none of the ops that have such kernels can run them in this process."""
    from ..ops.registry import OPS, find

    ops = [op.name for op in OPS.values() if name in op.names]
    problems = [problem for op in ops if (problem := find(op, name).problem())] if name else []
    if problems and len(problems) == len(ops):
        raise OptionError(f"--implementation: {name} cannot run here: {problems[0]} (dsv4-jax doctor says more)")


def devices_sharing_heads(given: int | None, devices: int, requests: int) -> int:
    """Returns `--tensor` as given; if it is not, all of them up to `LATENCY_REQUESTS` requests, for latency, else 1."""
    return given or (devices if requests <= LATENCY_REQUESTS else 1)


def start_jax() -> None:
    """Raises `ImplementationError` if jax finds no device: a platform that does not exist, a broken driver."""
    import jax

    try:
        jax.devices()
    except RuntimeError as error:
        raise ImplementationError(f"jax finds no device: {error}") from error
