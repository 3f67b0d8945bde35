"""The model of a command: its sizes; its weights, in which form, what they take of a device, loaded with progress."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..capacity import device_limit
from ..config import DSV4Config, Numerics
from ..errors import OptionError
from .options import naming, option
from .printing import Progress
from .values import fraction, given_path, natural, short

__all__ = [
    "BUILT_IN",
    "FORMS",
    "add_drafts",
    "add_model",
    "add_weights",
    "check",
    "check_drafts",
    "devices_that_hold",
    "form_of",
    "load",
    "model_config",
    "model_file",
    "weight_bytes",
]

BUILT_IN = ("flash", "pro", "tiny")
_MAX_OF_MTP = 3  # drafts of a step
FORMS = ("float32", "bfloat16", "released")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, of commands that need a model's sizes and no weights."""
    parser.add_argument(
        "--model",
        type=lambda text: str(given_path(text)),
        default="flash",
        metavar="NAME|PATH",
        help="flash, pro, tiny, or a config.json or its folder (default: flash)",
    )


def model_config(name: str) -> DSV4Config:
    """Returns the config of a built-in model, or one in Hugging Face's form. Raises `OptionError`."""
    if name in BUILT_IN:
        return getattr(DSV4Config, name)()
    if not os.path.exists(name):
        raise OptionError(f"--model: {short(name)} is neither flash, pro or tiny nor an existing path")
    with naming("--model"):
        return DSV4Config.from_hf(name)


def model_file(name: str) -> str | None:
    """The file that `model_config` reads; None for a built-in model."""
    if name in BUILT_IN:
        return None
    return os.path.join(name, "config.json") if os.path.isdir(name) else name


def add_weights(parser: argparse._ActionsContainer, help: str, default: str | None = None) -> None:
    """Adds `--weights`. `help` says what it is for and what the default is."""
    parser.add_argument("--weights", choices=FORMS, default=default, help=help)


def add_drafts(parser: argparse._ActionsContainer) -> None:
    """Adds `--drafts`, the attribute `draft_tokens`, and `--least-confidence`."""
    drafts = "tokens that the MTP layer (at most 3) or DSpark guesses ahead and the model verifies (default: none)"
    option(parser, "--drafts", natural, "N", drafts, dest="draft_tokens", choices=range(9), default=0)
    least = "drafts end before the first that DSpark is less sure of, 0 to 1; the same text (default: 0)"
    option(parser, "--least-confidence", fraction, "P", least, default=0.0)


def check_drafts(cfg: DSV4Config, drafts: int, least_confidence: float = 0.0) -> None:
    """Raises `OptionError` if the checkpoint's draft head does not guess so many tokens, or cannot say how surely."""
    if least_confidence and not (drafts and cfg.dspark):
        raise OptionError("--least-confidence: of --drafts by DSpark, whose head says how sure it is")
    if drafts and cfg.dspark is None and cfg.num_mtp_layers != 1:
        raise OptionError(f"--drafts: one MTP layer drafts, the checkpoint has {cfg.num_mtp_layers}")
    most = _MAX_OF_MTP if cfg.dspark is None else cfg.dspark.block_size
    if drafts > most:
        of = "an MTP layer" if cfg.dspark is None else "a block of the checkpoint's DSpark stages"
        raise OptionError(f"--drafts: {of} guesses at most {most} tokens, got {drafts}")


def form_of(args: argparse.Namespace, hf: Mapping[str, Any], cfg: DSV4Config, tensor: int, *, drafts: bool) -> str:
    """The form of a checkpoint's weights: `--weights`, or what its devices compute with best. Raises `OptionError`."""
    from ..model.weights.placement import default_form

    wide = partial(weight_bytes, cfg, "bfloat16", args.devices, tensor, drafts=drafts)
    return args.weights or default_form(hf, device_limit(), wide, args.numerics)


def check(checkpoint: pathlib.Path, cfg: DSV4Config, weights: str, *, drafts: bool = False) -> None:
    """Refuses a checkpoint of a kind that `load` could not run in this form, by the names and dtypes of its tensors.

    Raises:
        OptionError: says which kind it is, and how it runs; or its files cannot be read.
    """
    from ..model.weights.sources import Source, open_tensors

    with naming("--checkpoint"):
        Source(open_tensors(checkpoint), cfg, drafts=drafts, released=weights == "released")


def load(
    checkpoint: pathlib.Path,
    weights: str = "float32",
    *,
    drafts: bool = False,
    numerics: Numerics = "plain",
    mesh: Any = None,
) -> tuple[DSV4Config, Any]:
    """Loads a checkpoint's config and parameters, those in released formats packed as they are decoded with.

    Args:
        drafts: with the layers that draft.
        numerics: of the model, as its cache's layout has them.
        mesh: the devices over which they are split; None: one.
    """
    from ..model import load_hf

    def report(done: int, total: int) -> None:
        progress.update(done=done >> 20, total=total >> 20)

    with naming("--checkpoint"), Progress("MiB of weights") as progress:
        return load_hf(
            checkpoint,
            weights=weights,
            packed=weights == "released",
            drafts=drafts,
            numerics=numerics,
            mesh=mesh,
            progress=report,
        )


def weight_bytes(cfg: DSV4Config, weights: str, devices: int = 1, tensor: int = 1, *, drafts: bool = False) -> int:
    """Returns bytes of a model's weights on each of its devices, with `drafts` those of layers that draft too.

    Raises:
        OptionError: the model, or the devices, cannot be split so.
    """
    from ..model import Split, device_bytes

    if devices % tensor:
        raise OptionError(f"--tensor: {devices} devices do not divide by {tensor}")
    with naming("--devices, --tensor" if devices > 1 else "--weights"):
        return device_bytes(cfg, weights, Split(devices // tensor, tensor), drafts=drafts)


def devices_that_hold(cfg: DSV4Config, weights: str, each: int, *, more_than: int, drafts: bool = False) -> str:
    """What to do where weights do not fit: how many devices of `each` bytes would hold them, as the end of an error.

    Args:
        more_than: how many do not.
    """
    tried = more_than
    for devices in (2, 4, 8):
        if devices > more_than:
            try:
                if weight_bytes(cfg, weights, devices, drafts=drafts) < each:
                    return f"; --devices {devices} would hold them"
            except OptionError:  # the model does not divide by so many
                break
            tried = devices
    return f"; they do not fit on {tried} devices either" if tried > more_than else ""
