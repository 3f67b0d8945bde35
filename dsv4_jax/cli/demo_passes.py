"""What the demo does: a model and a text, its own where none are given, through a cache, and without one."""

from __future__ import annotations

import collections
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ..cache import KVCache, init_cache
from ..capacity import capacity
from ..config import AttentionType, DSV4Config
from ..engine import Core, Drawn, Prompt, Shapes, Work, drive, shapes_of
from ..errors import PlanError
from ..layout import CacheLayout
from ..manager import CachePolicy, KVCacheManager
from ..manager.transfers import Transfers
from ..model import Params, Sampling, forward, forward_uncached, generate, init_params, save_hf
from ..output import check_output, open_output
from ..text import Tokenizer
from .inputs import open_regular

__all__ = [
    "PROMPTS",
    "TEXT",
    "Served",
    "Written",
    "continued",
    "fast_to_compile",
    "keep",
    "random_model",
    "read_prompts",
    "save_folder",
    "serve",
    "without_cache",
]

TEXT = """\
A transformer that reads a million tokens cannot keep every key it has seen. DeepSeek-V4 keeps the last hundred
and twenty-eight as they are, folds every four into one entry that an indexer may pick, and every hundred and
twenty-eight into one entry that is always read. What a request leaves behind is therefore three kinds of memory:
a ring that forgets, a compressor that is half way through its sum, and pages of finished entries that other
requests may share. This text is fed to four requests, each from another place, a chunk at a time; then all four
write on, one byte per step, while every logit is compared with a model that has no cache at all and recomputes
everything from the first byte.
"""
# Two files of Python that begin alike. Nobody wrote them before: they were not trained on.
HEAD = """\
# garden/plots.py
\"\"\"Plots of a garden: how large they are, what grows on them and when it was last watered.\"\"\"

from __future__ import annotations

import math
from typing import Any


class Plot:
    \"\"\"A piece of ground, and what grows on it.\"\"\"

    def __init__(self, name: str, plants: list[str] | None = None):
        self.name = name
        self.plants = list(plants or [])
        self.watered = None

    def area(self) -> float:
        \"\"\"Return how large it is, in square metres.\"\"\"
        raise NotImplementedError

    def plant(self, name: str) -> None:
        \"\"\"Put a plant there.\"\"\"
        if name in self.plants:
            raise ValueError(f"{name!r} grows there already")
        self.plants.append(name)


"""
FILES = (
    HEAD + "class RoundPlot(Plot):\n    def __init__(self, name: str, radius: float):\n",
    HEAD + 'class Garden:\n    """All plots together."""\n\n    def __init__(self, plots: list[Plot]):\n',
)
PROMPTS = (233, 150, 90, 37)  # tokens; several HCA flushes of the tiny model, and one short of its first chunk
_MAX_TEXT = 1 << 20  # bytes of a text that a tokenizer is given


def random_model() -> tuple[DSV4Config, Params]:
    """Returns a tiny model, a layer of each kind of attention. Experts are looked up by token in all of them.

    A random router decides by near ties. Where a quantised cache is compared with float32, rounding would send tokens
    to other experts, and the comparison would be one of experts.
    """
    cfg = DSV4Config.tiny(layer_types=tuple(AttentionType), num_hash_layers=len(AttentionType))
    return cfg, init_params(cfg)


def read_prompts(path: pathlib.Path | None, tokenizer: Tokenizer | None = None) -> list[list[int]]:
    """Returns tokens from four places of a text: bytes, or those of a tokenizer.

    Args:
        path: None: a text of the demo's own, about the cache; for a tokenizer Python code.

    Raises:
        PlanError: the text is too short.
        FileError: it is no file.
        RequestError: the tokenizer has no ids for it.
    """
    if path is None:
        data = (TEXT if tokenizer is None else "".join(FILES)).encode()
        return _four_of(list(data) if tokenizer is None else tokenizer.encode(data.decode()))
    with open_regular(path, "--text") as file:
        size = os.fstat(file.fileno()).st_size
        if tokenizer is not None:
            tokens = tokenizer.encode(os.pread(file.fileno(), _MAX_TEXT, 0).decode(errors="replace"))
            if len(tokens) < max(PROMPTS):
                raise PlanError(f"--text {path}: {len(tokens)} tokens, needs at least {max(PROMPTS)}")
            return _four_of(tokens)
        if size < max(PROMPTS):
            raise PlanError(f"--text {path}: {size} bytes, needs at least {max(PROMPTS)}")
        return [list(os.pread(file.fileno(), n, at)) for n, at in _places(size)]


def _four_of(tokens: list[int]) -> list[list[int]]:
    return [tokens[at : at + n] for n, at in _places(len(tokens))]


def _places(size: int) -> list[tuple[int, int]]:
    """Returns the length and the first token of each prompt in a text of so many."""
    starts = np.linspace(0, size - max(PROMPTS), len(PROMPTS)).astype(int)
    return list(zip(PROMPTS, starts.tolist(), strict=True))


def keep(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the demo's own model and text. Returns what was written.

    Raises:
        FileError: a file cannot be written.
    """
    checkpoint, text = folder / "checkpoint", folder / "text.txt"
    save_folder(checkpoint, lambda place: save_hf(*random_model(), place))
    with open_output(text, encoding="utf-8") as file:
        file.write(TEXT)
    return [checkpoint, text]


def save_folder(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Puts the files that `write` makes into a folder, each whole or not at all. Raises `FileError`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        write(pathlib.Path(temporary))
        made = sorted(pathlib.Path(temporary).iterdir())
        for source in made:
            check_output(folder / source.name)
        for source in made:
            with open_output(folder / source.name) as file:
                file.write(source.read_bytes())


# Passes


def fast_to_compile() -> dict[str, int]:
    """Compiler options for what runs a few times and is not timed: on a CPU, half the time of compiling it."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


class Served(NamedTuple):
    """One run of all requests over one cache.

    Attributes:
        sequences: prompt and generated tokens of each request.
        logits: [tokens that were fed, vocab] float32 of each request.
        prefill_rate, decode_rate: tokens a second; compiling does not count.
    """

    sequences: list[list[int]]
    logits: list[np.ndarray]
    prefill_rate: float
    decode_rate: float


class _Watched:
    """Runs `forward` and keeps every logit. What it samples is the likeliest token, or what the script has there."""

    def __init__(
        self,
        params: Params,
        cache: KVCache,
        shapes: Shapes,
        script: Sequence[Sequence[int]],
        compiler_options: dict[str, int] | None,
    ):
        self.params, self.cache, self.shapes = params, cache, shapes
        self.script = dict[Hashable, Sequence[int]](enumerate(script))
        self.logits = collections.defaultdict[Hashable, list[np.ndarray]](list)  # of each request, by its id
        self.fed, self.seconds = {"mixed": 0, "decode": 0}, {"mixed": 0.0, "decode": 0.0}
        self._step = jax.jit(forward, donate_argnames="cache", compiler_options=compiler_options)

    def check(self, prompt: Prompt) -> None:
        """Everything can be asked for."""

    def move(self, transfers: Sequence[Transfers]) -> None:
        """There are no tiers."""

    def recover(self) -> None:
        """What fails ends the demo."""

    def send(self, work: Work) -> _Watched:
        began, (plan,), (rows,) = time.perf_counter(), work.plans, work.rows
        logits, self.cache = self._step(self.params, self.cache, plan.pack(), work.tokens)
        logits, drawn = np.asarray(logits), list[list[int]]()
        if rows:  # else it was to compile
            self.seconds[work.kind] += time.perf_counter() - began
        for row, first, start in zip(rows, plan.seq_first.tolist(), plan.seq_start.tolist(), strict=False):
            mine, place = logits[first : first + row.count], start + row.count
            known = self.script.get(row.prompt.id, ())
            drawn.append([known[place] if place < len(known) else int(mine[-1].argmax())])
            self.logits[row.prompt.id].append(mine)
            self.fed[work.kind] += row.count
        self._drawn = Drawn([drawn])
        return self

    def get(self) -> Drawn:
        return self._drawn


def serve(
    params: Params,
    layout: CacheLayout,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    chunk: int,
    *,
    script: Sequence[Sequence[int]] | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
    compiler_options: dict[str, int] | None = None,
) -> Served:
    """Prefills all prompts in chunks and decodes all requests together, in a step for each token.

    Args:
        new_tokens: to generate for each request.
        chunk: most tokens of a step.
        script: sequences to follow; None: the likeliest token is taken.
        on_tokens: called with how many tokens were generated.
        compiler_options: of `jax.jit`.
    """
    plan = capacity(layout, max_requests=len(prompts), max_context=max(map(len, prompts)) + new_tokens)
    manager = KVCacheManager(layout, plan.size)
    shapes = shapes_of([manager], min(max(chunk, len(prompts)), sum(map(len, prompts))))
    if script is not None:  # nothing is timed, and one executable does: decodes are padded to it
        shapes = shapes._replace(decode=shapes.mixed)
    core, cache = Core(manager, shapes, ahead=False), init_cache(layout, plan.size)
    device = _Watched(params, cache, shapes, script or (), compiler_options)
    for work in core.warm_up(draws=False):
        device.send(work)
    sequences: dict[Hashable, list[int]] = {i: list(prompt) for i, prompt in enumerate(prompts)}
    for i, prompt in enumerate(prompts):  # and one more token, as what is sampled last is never fed
        core.add(Prompt(tokens=prompt, max_new_tokens=new_tokens + 1, id=i), 0.0)
    for turn in drive(core, device):
        for output in turn.outputs:
            sequences[output.id] += output.tokens
        on_tokens(sum(output.finish is None for output in turn.outputs))
    rates = [device.fed[kind] / seconds if seconds else 0.0 for kind, seconds in device.seconds.items()]
    logits = [np.concatenate(device.logits[i]) for i in sequences]
    return Served([text[:-1] for text in sequences.values()], logits, *rates)


def without_cache(
    params: Params, layout: CacheLayout, sequences: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[np.ndarray]:
    """Logits of the first `counts[i]` tokens of each sequence, by a forward that has no cache."""
    step = jax.jit(forward_uncached, static_argnums=0, compiler_options=fast_to_compile())
    # One shape for all sequences: what follows a token does not change its logits.
    padded = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    rows = zip(padded, counts, strict=True)
    return [np.asarray(step(layout.cfg, params, row))[:count] for row, count in rows]


class Written(NamedTuple):
    """A file that the model wrote on.

    Attributes:
        begun: what it was given.
        written: what it wrote.
        prompt_tokens: of what it was given.
        cached: tokens of them that were found in the cache.
    """

    begun: str
    written: str
    prompt_tokens: int
    cached: int


def continued(params: Params, layout: CacheLayout, tokenizer: Tokenizer, new_tokens: int) -> list[Written]:
    """Has the model write on two files that begin alike, one after the other: the second finds the first's blocks.

    Greedy text of a small model repeats itself: it is sampled at a temperature of 0.7.

    Args:
        layout: of the cache between the two.
        new_tokens: to write on each.
    """
    prompts = [tokenizer.encode(begun) for begun in FILES]
    plan = capacity(layout, max_requests=4, max_context=max(map(len, prompts)) + new_tokens)
    manager, cache = KVCacheManager(layout, plan.size, policy=CachePolicy()), init_cache(layout, plan.size)
    sampling, found = Sampling(temperature=0.7, top_p=0.95, seed=0), []
    for begun, prompt in zip(FILES, prompts, strict=True):
        before = sum(manager.stats().cache.counters.hit_tokens.values())
        (tokens,), cache = generate(
            params, cache, manager, [prompt], max_new_tokens=new_tokens, sampling=sampling, chunk_tokens=64
        )
        cached = sum(manager.stats().cache.counters.hit_tokens.values()) - before
        found.append(Written(begun, tokenizer.decode(tokens), len(prompt), cached))
    return found
