"""A core for simulations, which plans a block of decodes at once. Imports no jax.

Within a block a decode needs nothing of the manager, gives it nothing, and is always scheduled: of most steps nothing
but positions would reach the manager. So a request *glides* there: its tokens are told of all at once, as one chunk, in
the step that fills the block or samples the last token. Blocks are taken, published and evicted in the same steps as if
every one were planned (`tests/engine/test_coarse.py`).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from ..errors import PlanError, RequestError
from ..manager import KVCacheManager, StepShape
from ..manager.transfers import Transfers
from .core import Core, Sent
from .executor import Drawn, Shapes, Work
from .job import Job, JobState
from .prompt import Output, Prompt

__all__ = ["CoarseCore"]

_NOTHING = np.zeros(0, np.int32)


class CoarseCore(Core):
    """A core whose decodes are told of block by block. For executors whose samples are known before they run.

    Its works have rows of several decoded tokens: those that have glided up to here, and the one of this step; such a
    row samples though it does not for the first time (`text` is None). Who glides is in `Work.quiet`. A step in which
    everyone glides has no plans. Ids are not laid out (`Work.tokens`), one call is under way at a time, and what
    glides when the core is put to sleep is computed again.

    Args:
        answer: the next so many ids of a job's answer.
        others: as `Core`.

    Raises:
        PlanError: as `Core`; or steps are looped, have drafts or, with all slots decoding, no room for a chunk.
    """

    def __init__(
        self,
        managers: KVCacheManager | Sequence[KVCacheManager],
        shapes: Shapes,
        answer: Callable[[Job, int], Sequence[int]],
        **options: Any,
    ):
        super().__init__(managers, shapes, ahead=False, **options)
        if shapes.steps > 1 or shapes.drafts or self.layout.draft_tokens:
            raise PlanError("steps of a coarse core are single ones without drafts")
        if shapes.mixed.tokens <= (slots := self.managers[0].size.num_slots):
            raise PlanError(f"steps of {shapes.mixed.tokens} tokens leave out some of {slots} decodes")
        self._answer = answer
        self._step = self._done = 0  # the one planned last, and the one whose results are here
        self._due: list[list[tuple[int, int, Job, int]]] = [[] for _ in self.managers]  # heaps: the end of each glide
        self._context = 0  # tokens before those that glide, added up, if each had glided since step 0
        self._before: set[Job] = set()  # in the plans of the last step
        self._shapes: dict[tuple[int, int], StepShape] = {}

    @property
    def _gliding(self) -> tuple[int, int]:
        count = sum(map(len, self._quiet))
        return count, self._context + count * self._step

    def check(self, prompt: Prompt) -> None:
        super().check(prompt)
        if prompt.score:
            raise RequestError("a coarse core scores nothing")

    # Steps

    def plan(self, now: float) -> Work | None:
        self._step += 1
        work = super().plan(now)
        if work is None and any(self._quiet) and not (self._sent or self.paused or self.asleep):
            for manager in self.managers:
                manager.commit()
            nothing: list[list[tuple[Job, int]]] = [[] for _ in self.managers]
            if any(manager.cache.transfers for manager in self.managers):
                return self._planned(nothing)
            self.counts["calls"] += 1
            self.counts["steps"] += 1
            self._sent.append(Sent([[] for _ in self.managers], True))
            return Work("quiet", (), (), 1, _NOTHING, _NOTHING, (), {}, quiet=self._gliding)
        if work is None:
            self._step -= 1
        return work

    def _schedule(self, shard: int) -> list[tuple[Job, int]]:
        due = self._fall_due(shard)  # glide on while the others are scheduled
        offered = super()._schedule(shard)
        for job, _ in due:
            self._stop(job)
        if not due:
            return offered
        split = next((i for i, (_, count) in enumerate(offered) if count > 1), len(offered))
        # Among the decodes, where they would be if all were planned: those come first that were left out before.
        decodes = [(job in self._before, i) for i, (job, _) in enumerate(offered[:split])]
        first = [offered[i] for before, i in decodes if not before]
        rest = [offered[i] for before, i in decodes if before]
        return [*first, *sorted([*rest, *due], key=lambda pair: (pair[0].rank, pair[0].order)), *offered[split:]]

    def _fall_due(self, shard: int) -> list[tuple[Job, int]]:
        """Whose glide ends with this step, and how many of its tokens the plan tells of."""
        due, heap, quiet = list[tuple[Job, int]](), self._due[shard], self._quiet[shard]
        while heap and heap[0][0] <= self._step:
            _, _, job, since = heapq.heappop(heap)
            if quiet.get(job) == since:
                self._learn(job, self._step - since - 1)
                due.append((job, self._step - since))
        return due

    def _learn(self, job: Job, count: int) -> None:
        """What it has sampled meanwhile is part of its text now."""
        if count and job.request is not None:
            ids = list(self._answer(job, count))
            job.out += ids
            job.request.ids.extend(ids)
            self.counts["sampled_tokens"] += count
            self._tell(job, tokens=ids)

    def _work(self, each: list[list[tuple[Job, int]]], drafts: Any, decoding: bool, steps: int, **more: Any) -> Work:
        shapes = [self._shape(len(pairs), sum(count for _, count in pairs)) for pairs in each]
        plans, transfers, rows, sent = self._planned_rows(each, drafts, shapes)
        self._before = set()
        for job, _, _, samples in (entry for entries in sent for entry in entries):
            job.ahead += samples
            self._before.add(job)
        self._sent.append(Sent(sent, False))
        return Work("mixed", plans, transfers, 1, _NOTHING, _NOTHING, rows, {}, quiet=self._gliding)

    def _shape(self, rows: int, tokens: int) -> StepShape:
        """Of a step: the mixed one's, but for its rows and tokens. What glides takes none of its room."""
        key = 1 << max(rows - 1, 0).bit_length(), 1 << max(tokens - 1, 0).bit_length()
        if key not in self._shapes:
            mixed = self.shapes.mixed
            fits = StepShape.bound(self.layout, *key, columns=mixed.columns, history=True)
            more = {name: getattr(mixed, name) for name in ("table_entries", "slot_copies", "block_copies")}
            self._shapes[key] = dataclasses.replace(fits, **more)
        return self._shapes[key]

    def take(self, drawn: Drawn, now: float) -> list[Output]:
        rows = self._sent[0].rows
        if not any(rows):
            self._before = set()
        self._done = self._step
        outputs = super().take(drawn, now)
        for entries in rows:
            for job, _, _, samples in entries:
                if samples and job.state is JobState.LIVE and not self._is_asked_more(job):
                    self._glide(job)
        return outputs

    def _is_asked_more(self, job: Job) -> bool:
        """Whether it asks for more than tokens, or may end before it has them all."""
        prompt = job.prompt
        return not prompt.is_plain or bool(prompt.stop_tokens) or prompt.mask is not None

    def _glide(self, job: Job) -> None:
        request, block = job.request, self.layout.block_tokens
        assert request is not None
        if within := request.num_cached % block:
            steps = min(block - within, job.left)
            heapq.heappush(self._due[job.shard], (self._step + steps, job.order, job, self._step))
            self._quiet[job.shard][job] = self._step
            self._context += request.num_cached - self._step - 1

    def _stop(self, job: Job) -> None:
        """It glides no more."""
        assert job.request is not None
        self._context -= job.request.num_cached - self._quiet[job.shard].pop(job) - 1

    # Ends

    def _end(self, job: Job, finish: str, error: Exception | None = None, **what: Any) -> None:
        self._interrupt(job)
        super()._end(job, finish, error, **what)

    def sleep(self) -> list[Transfers]:
        if not (self._sent or self.asleep):
            for job in list(self.jobs):
                self._interrupt(job)
        return super().sleep()

    def _begin_again(self, lost: Container[Job], error: Exception | None, **weights: Any) -> None:
        for job in list(self.jobs):
            self._interrupt(job)
        super()._begin_again(lost, error, **weights)

    def _interrupt(self, job: Job) -> None:
        """It glides no more, and what it has sampled is part of its text."""
        since = self._quiet[job.shard].get(job)
        if since is not None:
            self._stop(job)
            self._learn(job, self._done - since)
            self.counts["computed_tokens"] += self._done - since
