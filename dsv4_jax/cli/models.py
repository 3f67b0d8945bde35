"""The model of a command that needs its sizes but no weights."""

from __future__ import annotations

import argparse
import os

from ..config import DSV4Config
from ..errors import OptionError
from .options import naming
from .values import given_path, short

__all__ = ["BUILT_IN", "add_model", "model_config", "model_file"]

BUILT_IN = ("flash", "pro", "tiny")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=_name,
        default="flash",
        metavar="NAME|PATH",
        help="flash, pro, tiny, or a config.json or its folder (default: flash)",
    )


def _name(text: str) -> str:
    return str(given_path(text))


def model_config(name: str) -> DSV4Config:
    """A built-in model or a Hugging Face config. Raises `OptionError`."""
    if name in BUILT_IN:
        return getattr(DSV4Config, name)()
    if not os.path.exists(name):
        raise OptionError(f"--model: {short(name)} is neither flash, pro or tiny nor an existing path")
    with naming("--model"):
        return DSV4Config.from_hf(name)


def model_file(name: str) -> str | None:
    """The file that is read for it; None for a built-in model."""
    if name in BUILT_IN:
        return None
    return os.path.join(name, "config.json") if os.path.isdir(name) else name
