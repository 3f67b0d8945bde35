"""The model, the cache and the manager behind `generate`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..layout import CacheLayout, CacheSize
from ..manager import CachePolicy, KVCacheManager, SnapshotPlacement
from .answers import Answer, Speed, Teller
from .printing import Progress

__all__ = ["Engine"]


class Engine:
    """The model, a cache of the right size and its managers, one for each data shard of a mesh."""

    def __init__(
        self, params: Any, layout: CacheLayout, size: CacheSize, keeps: bool, options: dict[str, Any], mesh: Any = None
    ):
        from ..cache import init_cache
        from ..model.split import TENSOR
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
            [tokens] * len(self._managers), max_new_tokens=1, on_step=lambda drawn: speed.note(drawn.fed, 0, 0) and None
        )

    def answer(self, answers: list[Answer], teller: Teller, progress: Progress, speed: Speed) -> None:
        def take(drawn: Any) -> Collection[int]:
            seconds = speed.note(drawn.fed, sum(map(len, drawn.tokens.values())), len(drawn.tokens))
            for index, tokens in drawn.tokens.items():
                piece = answers[index].add(tokens, index in drawn.ended, seconds)
                teller.tell(index, piece)
                progress.advance(len(tokens))
            return [index for index in drawn.tokens if answers[index].end]

        self._generate([answer.prompt.tokens for answer in answers], on_step=take)

    @property
    def found_tokens(self) -> int:
        """Of prompts, in the cache."""
        return sum(sum(m.stats().cache.counters.hit_tokens.values()) for m in self._managers)

    def _generate(self, prompts: list[list[int]], **options: Any) -> None:
        from .. import model

        _, self._cache = model.generate(self._params, self._cache, self._managers, prompts, **self._options | options)
