"""Arguments and output that several commands share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..config import DSV4Config
from ..errors import ImplementationError, OutputError
from ..formats import INDEX_FORMATS, KV_FORMATS
from ..layout import CacheLayout
from .values import natural, positive

__all__ = [
    "add_json",
    "add_layout",
    "layout_from",
    "memory_bytes",
    "one_line",
    "print_json",
    "progress_bar",
    "refuse_same",
    "start_jax",
    "stdout",
]

# What is printed


def stdout() -> Console:
    """Where tables go. Made per command, so that it writes to the stdout of the moment."""
    return Console()


def print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()


def one_line(message: object, most: int = 600) -> str:
    """A message fit for one line of a terminal: no control characters, and of a bounded length."""
    text = " ".join(str(message).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def progress_bar() -> Progress:
    """A bar on stderr, drawn only on a terminal and removed when done, also when interrupted."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


# Shared options


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


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


def refuse_same(paths: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Refuses two options that name one file: an output would destroy the input, or the other output."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is not None and str(path) != "-":
            other = seen.setdefault(os.path.realpath(path), option)
            if other != option:
                raise OutputError(f"{option}: {path} is the file of {other} too")


# The machine


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def start_jax() -> None:
    """Raises `ImplementationError` if jax finds no device: a platform that does not exist, a broken driver."""
    import jax

    try:
        jax.devices()
    except RuntimeError as error:
        raise ImplementationError(f"jax finds no device: {error}") from error
