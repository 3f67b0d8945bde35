"""`logits`: teacher-forced logits of a token array, through the cache in given chunks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from ..capacity import machine_bytes
from ..config import DSV4Config
from ..errors import PlanError
from ..layout import CacheLayout, CacheSize
from ..manager import StepShape
from ..manager.planning import build_plan
from ..manager.step_shape import StepSequence
from ..output import open_output
from .inputs import read_tokens
from .models import add_weights, load
from .options import (
    add_command,
    add_implementation,
    add_json,
    add_layout,
    check_implementation,
    layout_from,
    naming,
    option,
    refuse_same,
    start_jax,
)
from .printing import Progress, human, present
from .values import given_path, output_file, positive

__all__ = ["add_parser", "chunk_sizes", "compiler_options", "feed", "run", "split", "step_sizes"]

_EXAMPLES = """
  dsv4-jax logits --checkpoint ckpt --tokens tokens.npy --out logits.npy
      the whole array at once, with the default FP8 / FP4 cache
  dsv4-jax logits --checkpoint ckpt --tokens tokens.npy --chunks 13,1,1,7 \\
      --kv-format f32 --index-format f32 --out logits.npy
      chunks of 13, 1, 1, 7, 7, 7, ... tokens through an unquantised cache
  dsv4-jax logits --checkpoint ckpt --tokens tokens.npy --chunks 1 --out logits.npy
      token by token
"""

# A step takes seconds to compile on a CPU. Up to so many tokens take less time than LLVM takes to optimise it: leaving
# that out saves half of those seconds, and a token then costs three times as much.
_FEW_TOKENS = 256
_MANY_STEPS = 64  # of one token: they pay for a step of their own


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "logits", "teacher-forced logits of a token array", __doc__, _EXAMPLES)
    option(parser, "--checkpoint", given_path, "DIR", "config.json, safetensors", required=True)
    option(parser, "--tokens", given_path, "FILE", ".npy, 1-D integers", required=True)
    option(parser, "--out", output_file, "FILE", ".npy, float32 [tokens, vocab]", required=True)
    chunks = "tokens of each step, the last repeated as needed (default: all at once)"
    option(parser, "--chunks", chunk_sizes, "N,N,...", chunks)
    parser.add_argument(
        "--index-qat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Hadamard rotation and FP4 round trip in the indexer (default: if the index format needs it)",
    )
    add_implementation(parser)
    add_weights(parser, "matrices in this dtype, or released: FP8 and FP4 as they are (default: float32)", "float32")
    add_layout(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    refuse_same({"--tokens": args.tokens, "--out": args.out, "--json": args.json})
    tokens = read_tokens(args.tokens)
    start_jax()
    check_implementation(args.implementation)
    with naming("--checkpoint"):
        cfg = DSV4Config.from_hf(args.checkpoint)
    _check_vocabulary(tokens, cfg.vocab_size)
    if (needed := len(tokens) * cfg.vocab_size * 4) > (held := machine_bytes()):
        raise PlanError(
            f"--tokens: logits of {len(tokens)} tokens take {human(needed)}, this machine has {human(held)}"
        )
    layout = layout_from(args, cfg)
    _, params = load(args.checkpoint, args.weights)
    chunks = list(split(len(tokens), args.chunks or [len(tokens)]))
    start = time.perf_counter()
    logits, cache_bytes = feed(params, layout, tokens, chunks, args.index_qat, args.implementation)
    seconds = time.perf_counter() - start
    with open_output(args.out) as file:
        np.save(file, logits)
    report = {
        "out": str(args.out),
        "tokens": len(tokens),
        "chunks": len(chunks),
        "vocab": cfg.vocab_size,
        "kv_format": layout.kv_row.name,
        "index_format": layout.index_row.name,
        "cache_bytes": cache_bytes,
        "seconds": round(seconds, 3),
    }
    said = f"{args.out}: logits of {len(tokens)} tokens in {len(chunks)} chunks, {seconds:.1f} s"
    present(report, args.json, lambda console: console.print(said, markup=False))
    return 0


def feed(
    params: dict, layout: CacheLayout, tokens: np.ndarray, chunks: list[int], index_qat: bool | None, implementation
) -> tuple[np.ndarray, int]:
    """Feeds one request in these chunks: (logits [tokens, vocab] float32, bytes of its cache)."""
    import jax

    from ..cache import init_cache
    from ..model.forward import forward

    columns = layout.blocks_for(len(tokens))
    size = CacheSize(num_blocks=columns, num_slots=1, max_blocks_per_request=columns)
    cache = init_cache(layout, size)
    static = ("index_qat", "implementation")
    options = compiler_options(len(tokens))
    step = jax.jit(forward, donate_argnames="cache", static_argnames=static, compiler_options=options)
    out = np.empty((len(tokens), layout.cfg.vocab_size), np.float32)
    at = blocks = 0
    with Progress("chunks", len(chunks)) as progress:
        for count, padded in zip(chunks, step_sizes(chunks), strict=True):
            shape = StepShape.bound(layout, 1, padded, columns=columns, history=padded > 1 + layout.draft_tokens)
            held, blocks = blocks, layout.blocks_for(at + count)
            entries = [(1, column, column + 1) for column in range(held, blocks)]
            plan = build_plan(layout, [StepSequence(1, at, count)], shape, size=size, table_entries=entries)
            fed = np.zeros(padded, np.int32)
            fed[:count] = tokens[at : at + count]
            logits, cache = step(params, cache, plan.pack(), fed, index_qat=index_qat, implementation=implementation)
            out[at : at + count] = np.asarray(logits)[:count]
            at += count
            progress.advance()
    return out, layout.total_bytes(size)


def compiler_options(tokens: int) -> dict[str, int] | None:
    """Returns compiler options of the steps that feed so many tokens."""
    import jax

    few = tokens <= _FEW_TOKENS and jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 0} if few else None


def step_sizes(chunks: list[int]) -> list[int]:
    """Returns tokens of the step that feeds each chunk: a few sizes, so that any list of chunks compiles a few
    steps."""
    largest, many_single = max(chunks), chunks.count(1) > _MANY_STEPS

    def size_of(count: int) -> int:
        size = 1 if count == 1 and many_single else 64
        while size < count:
            size *= 16
        return min(size, largest)

    return [size_of(count) for count in chunks]


def chunk_sizes(text: str) -> list[int]:
    """Parses positive integers separated by commas."""
    return [positive(part.strip()) for part in text.split(",")]


def split(total: int, sizes: list[int]) -> Iterator[int]:
    """Chunks of these sizes, the last repeated, that add up to `total`."""
    done, i = 0, 0
    while done < total:
        count = min(sizes[min(i, len(sizes) - 1)], total - done)
        yield count
        done, i = done + count, i + 1


def _check_vocabulary(tokens: np.ndarray, vocab_size: int) -> None:
    """Raises `PlanError` naming the first id outside the vocabulary."""
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        i = int(wrong[0])
        raise PlanError(f"--tokens: token {i} is {int(tokens[i])}, outside the vocabulary 0..{vocab_size - 1}")
