"""The model, the cache and the manager behind `generate`, and how large the cache is that a list of prompts needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ..capacity import largest_fitting
from ..errors import OptionError
from ..layout import CacheLayout, CacheSize
from ..manager import CachePolicy, KVCacheManager, SnapshotPlacement
from .answers import Answer, AnswerPrinter, Speed
from .options import naming
from .printing import Progress, human

__all__ = ["DeviceMemory", "Engine", "choose_size", "shared_tokens"]

_SPARE = 0.1  # of what the weights leave: for what a step computes with


class DeviceMemory(NamedTuple):
    """The bytes of a device, and those of them that the weights take."""

    total: int
    weights: int

    @property
    def free(self) -> int:
        """The bytes that a cache may take."""
        return int((self.total - self.weights) * (1 - _SPARE))


def choose_size(
    layout: CacheLayout,
    needs: Sequence[int],
    high: int,
    memory: DeviceMemory,
    *,
    snapshots: bool = False,
    ranks: int = 1,
) -> CacheSize:
    """The cache in which up to `high` requests run at once, fewer if there is no memory for so many.

    Args:
        needs: tokens of each request.
        snapshots: states are kept, one for each request and one more.
        ranks: devices that share each request's blocks, each with this memory.

    Raises:
        OptionError: not even one request fits.
    """
    blocks = sorted((layout.blocks_for(need) for need in needs), reverse=True)

    def size(slots: int) -> CacheSize:
        each = sum(-(-count // ranks) for count in blocks[:slots])
        return CacheSize(each, slots, blocks[0], slots + 1 if snapshots else 0, pool_ranks=ranks)

    fitting = largest_fitting(lambda slots: layout.total_bytes(size(slots)) <= memory.free, high)
    if not fitting:
        raise OptionError(
            f"--max-new-tokens: a cache for {max(needs)} tokens, prompt included, takes "
            f"{human(layout.total_bytes(size(1)))}, the device has {human(max(memory.free, 0))} for it beside "
            f"{human(memory.weights)} of weights"
        )
    with naming("--max-batch"):
        layout.check_size(size(fitting))
    return size(fitting)


def shared_tokens(prompts: Sequence[Sequence[int]], block_tokens: int) -> int | None:
    """Tokens, in whole blocks, with which all prompts begin, one at least left to compute.

    None: no two prompts have their first block in common: nothing to find in a cache.
    """
    firsts = Counter(tuple(prompt[:block_tokens]) for prompt in prompts if len(prompt) > block_tokens)
    if max(firsts.values(), default=0) < 2:
        return None
    shortest = min(len(prompt) - 1 for prompt in prompts)
    same = next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest)
    return math.floor(same / block_tokens) * block_tokens


class Engine:
    """The model, a cache of the right size and its managers, one for each data shard of a mesh."""

    def __init__(
        self, params: Any, layout: CacheLayout, size: CacheSize, keeps: bool, options: dict[str, Any], mesh: Any = None
    ):
        from ..cache import init_cache
        from ..model.weights.split import TENSOR
        from ..sharding import cache_sharding

        policy = CachePolicy(snapshots=SnapshotPlacement(end_of_output=False, doubling=None)) if keeps else None
        self._params, self._options = params, options
        shards = 1 if mesh is None else mesh.shape["data"]
        self._managers = [KVCacheManager(layout, size, policy=policy) for _ in range(shards)]
        pool = TENSOR if size.pool_ranks > 1 else None
        placed = None if mesh is None else cache_sharding(layout, mesh, pool_axis=pool)
        self._cache = init_cache(layout, size, sharding=placed)

    def compile(self, longest: int) -> None:
        """Runs every executable once: so what is timed afterwards compiles nothing.

        Args:
            longest: tokens of the longest prompt. One alone is decoded without a step for prompts.
        """
        new = min(self._options["max_new_tokens"], 2)
        self._generate([[0] * min(longest, 2)], max_new_tokens=new, stop_tokens=())

    def remember(self, tokens: list[int], speed: Speed) -> None:
        """Computes what prompts begin with, in every shard: all but the last token stays cached."""
        self._generate(
            [tokens] * len(self._managers),
            max_new_tokens=1,
            on_step=lambda step: speed.note(step.fed, 0, 0) and None,
        )

    def answer(self, answers: list[Answer], printer: AnswerPrinter, progress: Progress, speed: Speed) -> None:
        def take(output: Any) -> Collection[int]:
            seconds = speed.note(output.fed, sum(map(len, output.tokens.values())), len(output.tokens))
            for index, tokens in output.tokens.items():
                piece = answers[index].add(tokens, index in output.ended, seconds)
                printer.show(index, piece)
                progress.advance(len(tokens))
            return [index for index in output.tokens if answers[index].end]

        self._generate([answer.prompt.tokens for answer in answers], on_step=take)

    @property
    def found_tokens(self) -> int:
        """Tokens of prompts that were found in the cache."""
        return sum(sum(m.stats().cache.counters.hit_tokens.values()) for m in self._managers)

    def _generate(self, prompts: list[list[int]], **options: Any) -> None:
        from .. import model

        _, self._cache = model.generate(self._params, self._cache, self._managers, prompts, **self._options | options)
