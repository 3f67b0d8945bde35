"""The weights of a command: in which form, loaded with progress, and what they take."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from ..config import DSV4Config
from ..errors import OptionError
from .options import naming
from .printing import Progress

__all__ = ["FORMS", "add_weights", "check", "load", "taken"]

FORMS = ("float32", "bfloat16", "released")


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=FORMS,
        default="float32",
        help="matrices in this dtype, or released: FP8 and FP4 as they are (default: %(default)s)",
    )


def check(checkpoint: pathlib.Path, cfg: DSV4Config, weights: str, *, mtp: bool = False) -> None:
    """Refuses a checkpoint of a kind that `load` could not run in this form, by the names and dtypes of its tensors.

    Raises:
        OptionError: says which kind it is, and how it runs; or its files cannot be read.
    """
    from ..model.sources import Source, open_tensors

    with naming("--checkpoint"):
        Source(open_tensors(checkpoint), cfg, mtp=mtp, released=weights == "released")


def load(
    checkpoint: pathlib.Path, weights: str = "float32", *, mtp: bool = False, mesh: Any = None
) -> tuple[DSV4Config, Any]:
    """A checkpoint's config and parameters, those in released formats as they are decoded with.

    Args:
        mtp: with the MTP layer.
        mesh: over its devices.
    """
    from ..model import load_hf

    with naming("--checkpoint"), Progress("MiB of weights") as progress:
        return load_hf(
            checkpoint,
            weights=weights,
            packed=weights == "released",
            mtp=mtp,
            mesh=mesh,
            progress=lambda done, total: progress.update(done=done >> 20, total=total >> 20),
        )


def taken(cfg: DSV4Config, weights: str, devices: int = 1, tensor: int = 1, *, mtp: bool = False) -> int:
    """Bytes of a model's weights on each of its devices, with `mtp` the MTP layer's too."""
    from ..model import Split, device_bytes

    if devices % tensor:
        raise OptionError(f"--tensor: {devices} devices do not divide by {tensor}")
    with naming("--devices, --tensor" if devices > 1 else "--weights"):
        return device_bytes(cfg, weights, Split(devices // tensor, tensor), mtp=mtp)
