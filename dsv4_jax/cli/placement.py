"""Where snapshots are kept, as an option: `SnapshotPlacement` in words."""

from __future__ import annotations

import argparse
from typing import Any

from ..manager import SnapshotPlacement
from .values import positive, short

__all__ = ["DEFAULT_PLACEMENT", "PLACEMENT_HELP", "placement"]

DEFAULT_PLACEMENT = "prompt,output,junctions,doubling:4"
PLACEMENT_HELP = (
    "where states are kept, a list: prompt and output (at their ends), junctions (where a prompt leaves what is "
    "cached), doubling:N (N, 2N, 4N ... blocks before the end of the prompt), every:N (blocks); or none "
    f"(default: {DEFAULT_PLACEMENT})"
)
_FLAGS = {"prompt": "end_of_prompt", "output": "end_of_output", "junctions": "junctions"}


def placement(text: str) -> SnapshotPlacement:
    """argparse type: the placement of these names."""
    choices: dict[str, Any] = {"every": None, "doubling": None, **dict.fromkeys(_FLAGS.values(), False)}
    named = set[str]()
    for part in text.split(",") if text != "none" else ():
        name, colon, number = part.partition(":")
        if name in named:
            raise argparse.ArgumentTypeError(f"{short(name)} is named twice")
        named.add(name)
        if name in ("every", "doubling") and colon:
            choices[name] = positive(number)
        elif part in _FLAGS:
            choices[_FLAGS[part]] = True
        else:
            names = ", ".join((*_FLAGS, "doubling:N, every:N or none"))
            raise argparse.ArgumentTypeError(f"{short(part)} is none of {names}")
    return SnapshotPlacement(**choices)
