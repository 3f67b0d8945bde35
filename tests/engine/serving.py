"""A core over managers of a tiny cache and a shadow of a device, and what it should answer."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dsv4_jax as dsv4
from dsv4_jax.engine import Core, Limits, Output, Prompt, ShadowExecutor, shapes_of
from dsv4_jax.engine.prompt import derived_seed
from dsv4_jax.engine.shadow import answer_of
from dsv4_jax.manager import CachePolicy, EventLog, HostSize, KVCacheManager

from ..clock import PATIENCE

CFG = dsv4.DSV4Config.tiny(layer_types=tuple(dsv4.AttentionType))
BLOCK, COLUMNS = 16, 12


def eventually(condition: Callable[[], object]) -> None:
    """Waits until it is so."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


@dataclasses.dataclass(frozen=True)
class Seeded:
    """In place of a `model.Sampling`: the shadow reads nothing but a seed."""

    seed: int = 0


class Server:
    """A core, its executor, and the loop that drives them, turn by turn.

    Attributes:
        tokens, finish, errors: of each (id, index), what it was told.
    """

    def __init__(
        self,
        *,
        slots: int = 4,
        blocks: int = 3 * COLUMNS,
        shards: int = 1,
        drafts: int = 0,
        steps: int = 1,
        chunk: int = 48,
        prefill: Sequence[int] = (),
        host: bool = False,
        caching: bool = True,
        limits: Limits | None = None,
        logs: Sequence[EventLog] = (),
        **options: Any,
    ):
        layout = dsv4.CacheLayout(CFG, "f32", "f32", block_tokens=BLOCK, draft_tokens=drafts)
        size = dsv4.CacheSize(blocks, slots, COLUMNS, num_snapshots=2 * slots if caching else 0)
        policy, pages = CachePolicy() if caching else None, HostSize.of(layout, 20, 6) if host else None
        self.managers = [
            KVCacheManager(layout, size, policy=policy, host=pages, events=logs[i] if logs else None)
            for i in range(shards)
        ]
        shapes = shapes_of(self.managers, chunk, steps=steps, drafts=drafts, prefill_tokens=prefill)
        executor = {name: options.pop(name) for name in ("on_send", "on_get", "guesses") if name in options}
        self.executor = ShadowExecutor(shapes, CFG.vocab_size, **executor)
        self.core = Core(self.managers, shapes, limits=limits or Limits(queued=1000), **options)
        self.under_way: collections.deque[Any] = collections.deque()
        self.tokens: dict[tuple[Any, int], list[int]] = collections.defaultdict(list)
        self.finish: dict[tuple[Any, int], str] = {}
        self.errors: dict[tuple[Any, int], Exception | None] = {}
        self.now = 0.0

    def add(self, tokens: Iterable[int], count: int = 8, **options: Any) -> Any:
        return self.core.add(Prompt(tokens=[*tokens], max_new_tokens=count, **options), self.now)

    def note(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            key = output.id, output.index
            assert key not in self.finish, "nothing is told of one that has ended"
            self.tokens[key] += output.tokens
            if output.finish is not None:
                self.finish[key], self.errors[key] = output.finish, output.error

    def turn(self) -> Any:
        """Plans, sends, and takes up the call before; an error of the executor is a failed step."""
        core = self.core
        self.now += 0.1
        try:
            work = core.plan(self.now)
            if work is not None:
                self.under_way.append(self.executor.send(work))
            self.note(core.drain())
            if self.under_way and (work is None or len(self.under_way) == core.depth):
                self.note(core.take(self.under_way.popleft().get(), self.now))
        except OSError as error:
            self.under_way.clear()
            self.executor.recover()
            self.note(core.fail(error))
            return None
        return work

    def run(self, turns: int = 5000) -> list[Any]:
        """Until nothing is left to do; returns the works."""
        works = []
        while not self.core.idle:
            turns -= 1
            assert turns, "it does not come to an end"
            works.append(self.turn())
        return [work for work in works if work is not None]

    def check_empty(self) -> None:
        """Nothing is held by anybody."""
        core = self.core
        assert (core.queued, core.live, core.preempted, core.under_way, core.fetching) == (0, 0, 0, 0, 0)
        assert not [*core.jobs]
        for manager in self.managers:
            manager.commit()
            manager.check_integrity()
            assert not manager.requests and not manager.preempted

    def expected(self, tokens: list[int], count: int, *, seed: int, index: int = 0) -> list[int]:
        """The answer to a prompt without stops."""
        return answer_of(tokens, count, derived_seed(seed, index) if index else seed, CFG.vocab_size)
