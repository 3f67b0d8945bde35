"""How answers are drawn and where they end, as options of `generate` and `chat`."""

from __future__ import annotations

import argparse
from typing import Any

from ..text import stop_tokens_of
from .options import naming, option
from .prompts import token_ids
from .values import natural, number, positive, unicode_text

__all__ = ["add_sampling", "sampling_of", "stops_of"]

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = {name: f"--{name.replace('_', '-')}" for name in ("temperature", "top_k", "top_p", "min_p", *_PENALTIES)}


def add_sampling(parser: argparse.ArgumentParser, *, limit: int) -> argparse._ArgumentGroup:
    """Adds the options; `limit` is the default of --max-new-tokens."""
    group = parser.add_argument_group("what is sampled")
    option(group, "--max-new-tokens", positive, "N", "of each answer", default=limit)
    option(group, "--temperature", number, "X", "0: always the likeliest token (default)", default=0.0)
    option(group, "--top-k", natural, "K", "of the K likeliest only (default: all)", default=0)
    option(group, "--top-p", number, "P", "of the fewest that reach P", default=1.0)
    option(group, "--min-p", number, "P", "of those with this share of the likeliest one's chance", default=0.0)
    option(group, "--repetition-penalty", number, "X", "of tokens in prompt or answer (1: none)", default=1.0)
    option(group, "--presence-penalty", number, "X", "of tokens in the answer, once", default=0.0)
    option(group, "--frequency-penalty", number, "X", "of tokens in the answer, as often as there", default=0.0)
    option(group, "--seed", natural, "N", "of the samples (default: 0)", default=0)
    stops = "end before one of these; none (default: the checkpoint's)"
    option(group, "--stop-tokens", _stop_tokens, "IDS", stops)
    stop = "end before this text; several: several times"
    option(group, "--stop", unicode_text, "TEXT", stop, action="append", default=[])
    return group


def sampling_of(args: argparse.Namespace) -> Any:
    """The `Sampling` that the options say. Raises `OptionError`."""
    from ..model import Sampling

    with naming(fields=_SAMPLING):
        return Sampling(**{name: getattr(args, name) for name in _SAMPLING})


def stops_of(args: argparse.Namespace) -> frozenset[int]:
    """The ids that end an answer. Raises `OptionError`."""
    with naming("--stop-tokens"):
        return frozenset(stop_tokens_of(args.checkpoint) if args.stop_tokens is None else args.stop_tokens)


def _stop_tokens(text: str) -> list[int]:
    """Parses ids separated by commas, or none."""
    return [] if text == "none" else token_ids(text)
