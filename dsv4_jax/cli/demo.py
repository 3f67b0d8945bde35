"""`demo`: decodes real text through the cache and checks every logit against a cache-free forward."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from ..errors import PlanError
from ..layout import CacheLayout
from ..output import check_output, open_output
from .inputs import open_regular
from .options import add_command, add_json, naming, refuse_same, start_jax
from .printing import Progress, present
from .values import given_path, output_folder, positive

__all__ = ["Pass", "add_parser", "read_prompts", "run"]

_EXAMPLES = """
  dsv4-jax demo                                   a tiny random model, text of its own
  dsv4-jax demo --checkpoint DIR --text FILE      yours (a byte-level vocabulary of at least 256)
  dsv4-jax demo --keep demo-out                   keep the checkpoint and the text it writes
"""
_TEXT = """\
A transformer that reads a million tokens cannot keep every key it has seen. DeepSeek-V4 keeps the last hundred
and twenty-eight as they are, folds every four into one entry that an indexer may pick, and every hundred and
twenty-eight into one entry that is always read. What a request leaves behind is therefore three kinds of memory:
a ring that forgets, a compressor that is half way through its sum, and pages of finished entries that other
requests may share. This text is fed to four requests, each from another place, a chunk at a time; then all four
write on, one byte per step, while every logit is compared with a model that has no cache at all and recomputes
everything from the first byte.
"""
_PROMPTS = (233, 150, 90, 37)  # tokens; several HCA flushes of the tiny model, and one short of its first chunk
# Quantised rows change the logits by design; only the float32 cache must agree with the cache-free forward.
_TOLERANCE = 1e-4


class Pass(NamedTuple):
    """One run of all requests over one cache layout."""

    layout: CacheLayout
    bytes_by_pool: dict[str, int]
    sequences: list[list[int]]
    errors: list[float]
    prefill_rate: float
    decode_rate: float


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(
        commands, "demo", "decode real text through the cache and check it", __doc__, _EXAMPLES,
        fails="a logit differs from the cache-free forward's",
    )  # fmt: skip
    parser.add_argument("--checkpoint", type=given_path, metavar="DIR", help="default: writes a tiny random one")
    parser.add_argument("--text", type=given_path, metavar="FILE", help="default: writes a paragraph")
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="per request (default: 64)")
    parser.add_argument("--chunk", type=positive, default=64, metavar="N", help="most tokens per step (default: 64)")
    parser.add_argument("--keep", type=output_folder, metavar="DIR", help="where to write the checkpoint and the text")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import jax

    from ..model import load_hf

    refuse_same({"--text": args.text, "--json": args.json})
    start_jax()
    with _inputs(args) as (checkpoint, text):
        prompts = read_prompts(text)
        with naming("--checkpoint"):
            cfg, params = load_hf(checkpoint)
    if cfg.vocab_size < 256:
        raise PlanError(f"--checkpoint: a vocabulary of {cfg.vocab_size} has no room for bytes")
    exact = CacheLayout(cfg, "f32", "f32")
    served = CacheLayout(cfg, "fp8", "fp4")
    with Progress("decoding", 2 * len(prompts) * args.new_tokens) as progress:
        first = _serve(params, exact, prompts, None, args, progress.advance)
        # The same tokens again, so that the errors of the two can be compared.
        second = _serve(params, served, prompts, first.sequences, args, progress.advance)
    passed = max(first.errors) <= _TOLERANCE
    report = {
        "passed": passed, "tolerance": _TOLERANCE, "jax": jax.__version__, "device": str(jax.devices()[0]),
        "prompt_tokens": list(_PROMPTS), "new_tokens": args.new_tokens,
        "passes": [_as_dict(first), _as_dict(second)],
    }  # fmt: skip
    present(report, args.json, lambda console: _print(console, [first, second], prompts, passed))
    return 0 if passed else 1


@contextlib.contextmanager
def _inputs(args: argparse.Namespace) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """The checkpoint directory and the text file, written where they are not given."""
    from ..config import DSV4Config
    from ..model import init_params, save_hf

    with contextlib.ExitStack() as stack:
        folder = args.keep or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint, text = args.checkpoint, args.text
        if checkpoint is None:
            checkpoint, cfg = folder / "checkpoint", DSV4Config.tiny()
            _save(checkpoint, lambda place: save_hf(cfg, init_params(cfg), place))
        if text is None:
            text = folder / "text.txt"
            folder.mkdir(parents=True, exist_ok=True)
            with open_output(text, encoding="utf-8") as file:
                file.write(_TEXT)
        yield checkpoint, text


def _save(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Puts the files that `write` makes into a folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        write(pathlib.Path(temporary))
        made = sorted(pathlib.Path(temporary).iterdir())
        for source in made:
            check_output(folder / source.name)
        for source in made:
            with open_output(folder / source.name) as file:
                file.write(source.read_bytes())


def read_prompts(path: pathlib.Path) -> list[list[int]]:
    """Bytes of a text from four places. Raises `PlanError` if it is too short, `InputError` if it is no file."""
    with open_regular(path, "--text") as file:
        room = os.fstat(file.fileno()).st_size - max(_PROMPTS)
        if room < 0:
            raise PlanError(f"--text {path}: {room + max(_PROMPTS)} bytes, needs at least {max(_PROMPTS)}")
        starts = np.linspace(0, room, len(_PROMPTS)).astype(int)
        return [list(os.pread(file.fileno(), n, at)) for n, at in zip(_PROMPTS, starts, strict=True)]


def _serve(
    params: Any, layout: CacheLayout, prompts: list, script: list[list[int]] | None, args: argparse.Namespace, on_tokens
) -> Pass:
    """Prefills and decodes all prompts over one cache and compares all logits with the cache-free forward.

    Args:
        script: sequences to follow; None: the likeliest token is taken.
    """
    import jax

    from ..cache import init_cache
    from ..capacity import capacity
    from ..manager import KVCacheManager
    from ..model import forward, forward_uncached

    longest = max(map(len, prompts)) + args.new_tokens
    plan = capacity(layout, max_requests=len(prompts), max_context=longest)
    manager, cache = KVCacheManager(layout, plan.size), init_cache(layout, plan.size)
    step = jax.jit(forward, donate_argnames="cache")
    chunk = min(max(args.chunk, len(prompts)), sum(map(len, prompts)))
    shapes = {True: manager.pinned_shape(len(prompts)), False: manager.pinned_shape(len(prompts), chunk, history=True)}
    for shape in shapes.values():  # a step of padding compiles
        empty = manager.plan_step([], shape=shape)
        _, cache = step(params, cache, empty.pack(), manager.plan_tokens(empty))

    requests = [manager.admit_request(prompt) for prompt in prompts]
    lengths = [len(prompt) + args.new_tokens for prompt in prompts]
    seen: list[list[np.ndarray]] = [[] for _ in prompts]
    seconds, fed = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    while scheduled := manager.schedule(chunk):
        start = time.perf_counter()
        decoding = all(count == 1 for _, count in scheduled)
        plan_ = manager.plan_step(scheduled, shape=shapes[decoding])
        logits, cache = step(params, cache, plan_.pack(), manager.plan_tokens(plan_))
        rows = np.asarray(logits)
        seconds[decoding] += time.perf_counter() - start
        fed[decoding] += sum(count for _, count in scheduled)
        first = 0
        for request, count in scheduled:
            i = requests.index(request)
            seen[i].append(rows[first : first + count])
            first += count
            if not request.num_pending and len(request.tokens) < lengths[i]:
                request.tokens.append(script[i][len(request.tokens)] if script else int(seen[i][-1][-1].argmax()))
                on_tokens(1)

    # One shape for all sequences: what follows a token does not change its logits.
    sequences = [list(request.tokens) for request in requests]
    reference = jax.jit(forward_uncached, static_argnums=0)
    errors = []
    for sequence, chunks in zip(sequences, seen, strict=True):
        padded = np.zeros(longest, np.int32)
        padded[: len(sequence)] = sequence
        got = np.concatenate(chunks)
        errors.append(float(np.abs(got - np.asarray(reference(layout.cfg, params, padded))[: len(got)]).max()))
    for request in requests:
        manager.release_request(request)
    rates = [fed[kind] / seconds[kind] if seconds[kind] else 0.0 for kind in (False, True)]
    return Pass(layout, plan.bytes_by_pool, sequences, errors, *rates)


def _as_dict(result: Pass) -> dict[str, Any]:
    return {
        "kv_format": result.layout.kv_row.name, "index_format": result.layout.index_row.name,
        "bytes_by_pool": result.bytes_by_pool, "bytes_per_token": result.layout.bytes_per_token,
        "max_logit_error": max(result.errors), "max_logit_error_by_request": result.errors,
        "prefill_tokens_per_s": result.prefill_rate, "decode_tokens_per_s": result.decode_rate,
    }  # fmt: skip


def _print(console: Console, passes: list[Pass], prompts: list, passed: bool) -> None:
    names = [f"{p.layout.kv_row.name} / {p.layout.index_row.name}" for p in passes]
    table = Table("", *names, title="The same requests through two caches", title_justify="left")

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    for i, (prompt, sequence) in enumerate(zip(prompts, passes[0].sequences, strict=True)):
        name = f"request {i + 1}: {len(prompt)} + {len(sequence) - len(prompt)} tokens, max logit error"
        row(name, *(f"{p.errors[i]:.1e}" for p in passes))
    table.add_section()
    for pool in passes[0].bytes_by_pool:
        row(f"{pool} bytes", *(f"{p.bytes_by_pool[pool]:,}" for p in passes))
    row("cache bytes", *(f"{sum(p.bytes_by_pool.values()):,}" for p in passes))
    row("bytes per token (paged)", *(f"{p.layout.bytes_per_token:,.2f}" for p in passes))
    table.add_section()
    row("prefill tokens/s", *(f"{p.prefill_rate:,.0f}" for p in passes))
    row("decode tokens/s", *(f"{p.decode_rate:,.0f}" for p in passes))
    console.print(table)
    verdict = "[green]OK[/]" if passed else "[red]FAILED[/]"
    worst = max(passes[0].errors)
    console.print("Quantised rows move a random model's logits: its experts and entries are chosen by near ties.")
    console.print(f"{verdict}: float32 cache against the cache-free forward: {worst:.1e} (at most {_TOLERANCE:.0e})")
