"""`init`: writes a tiny checkpoint as the published ones are, of random weights, with a tokenizer of bytes."""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
from typing import Any

from ..config import DSV4Config
from ..errors import FileError
from ..output import open_output
from ..text import save_byte_tokenizer
from ..untrusted import plain
from .models import add_weights
from .options import add_command, add_json, naming, option, start_jax
from .printing import Progress, human, present
from .values import natural, output_folder

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax init DIR                                         FP8 and FP4 weights, all kinds of layers, MTP: 10 MiB
  dsv4-jax generate --checkpoint DIR --prompt 'Once upon a time' --max-new-tokens 32    what it says is noise
  dsv4-jax generate --checkpoint DIR --tokens 1,2,3 --drafts 2                          ids need no tokenizer
  dsv4-jax plan --model DIR --hbm 1GiB --context 8K         what fits?
  dsv4-jax init DIR --seed 1 --force                        other weights in its place
"""
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_END = 1  # the id that ends a text


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "init", "a tiny checkpoint to try things with", __doc__, _EXAMPLES)
    parser.add_argument("folder", type=output_folder, metavar="DIR", help="to write it into, made if it is not there")
    option(parser, "--seed", natural, "N", "of the weights", default=0)
    add_weights(parser, "matrices in this dtype, or FP8 and FP4 (default: %(default)s)", "released")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that this command wrote")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    cfg = DSV4Config.tiny_released()
    with naming("DIR"):
        _check_folder(args.folder, force=args.force)
        start_jax()
        _write(cfg, args.folder, args.seed, args.weights)
    files = sorted(args.folder.iterdir())
    report = {
        "out": str(args.folder),
        "files": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "weights": args.weights,
        "seed": args.seed,
    }
    quoted = shlex.quote(str(args.folder))
    said = (
        f"{args.folder}: {cfg.num_layers} layers and an MTP layer, {args.weights} weights, {human(report['bytes'])}\n"
        f"dsv4-jax generate --checkpoint {quoted} --prompt 'Once upon a time' --max-new-tokens 32"
    )
    present(report, args.json, lambda console: console.print(said, markup=False, highlight=False, soft_wrap=True))
    return 0


def _check_folder(folder: pathlib.Path, *, force: bool) -> None:
    """Raises `FileError` if something is there, or with `force` something that this command does not write."""
    said = plain(str(folder))
    try:
        there = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileError(f"{said}: {error.strerror}") from error
    others = [name for name in there if name not in _FILES]
    if others:
        raise FileError(f"{said} has {plain(others[0])} in it, which is no file of this command's: name another folder")
    if there and not force:
        raise FileError(f"{said} has a checkpoint in it (--force replaces it)")


def _write(cfg: DSV4Config, folder: pathlib.Path, seed: int, weights: str) -> None:
    import jax
    import jax.numpy as jnp

    from ..model import init_params, save_hf
    from ..model.weights.params import is_leaf

    def published(path: tuple[Any, ...], x: Any) -> Any:
        """Norms are bfloat16 there."""
        return x.astype(jnp.bfloat16) if "norm" in path[-1].key else x

    def report(done: int, total: int) -> None:
        progress.update(done=done >> 10, total=total >> 10)

    with Progress("KiB of weights") as progress:
        form = weights if weights == "released" else jnp.dtype(weights)
        params = init_params(cfg, seed, form, drafts=True, progress=report)
        if weights == "released":
            params = jax.tree_util.tree_map_with_path(published, params, is_leaf=is_leaf)
        save_hf(cfg, params, folder)
    save_byte_tokenizer(folder)
    with open_output(folder / "generation_config.json", encoding="utf-8") as file:
        json.dump({"eos_token_id": _END}, file)
