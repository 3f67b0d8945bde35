"""Arguments and output that several commands share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..config import DSV4Config
from ..formats import INDEX_FORMATS, KV_FORMATS
from ..layout import CacheLayout

__all__ = ["add_json", "add_layout", "layout_from", "natural", "positive", "print_json", "progress_bar", "stdout"]


def stdout() -> Console:
    """Where tables go. Made per command, so that it writes to the stdout of the moment."""
    return Console()


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()


def add_layout(parser: argparse.ArgumentParser, *, kv_format: str = "fp8", index_format: str = "fp4") -> None:
    """The options that choose a `CacheLayout`."""
    group = parser.add_argument_group("cache layout")
    group.add_argument("--kv-format", choices=sorted(KV_FORMATS), default=kv_format, help="default: %(default)s")
    group.add_argument(
        "--index-format", choices=sorted(INDEX_FORMATS), default=index_format, help="default: %(default)s"
    )
    group.add_argument("--block-tokens", type=positive, metavar="N", help="tokens per block (default: 128)")
    group.add_argument("--draft-tokens", type=natural, default=0, metavar="N", help="drafts a verify step may carry")
    group.add_argument("--hca-state", choices=("online", "raw"), default="online", help="default: %(default)s")


def layout_from(args: argparse.Namespace, cfg: DSV4Config, **options: Any) -> CacheLayout:
    return CacheLayout(
        cfg,
        args.kv_format,
        args.index_format,
        args.block_tokens,
        args.draft_tokens,
        hca_state=args.hca_state,
        **options,
    )


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = natural(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def natural(text: str) -> int:
    """argparse type: an integer of at least 0."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def progress_bar() -> Progress:
    """A bar on stderr, drawn only on a terminal and removed when done, also when interrupted."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
