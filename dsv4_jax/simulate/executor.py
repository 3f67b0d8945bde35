"""Runs the works of a core on a clock that nobody waits for, and checks every unit they touch. Pure Python + numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..engine.executor import Drawn, Shapes, Work
from ..engine.prompt import Prompt
from ..manager.transfers import Transfers
from ..plan import StepPlan
from .shadow import TransferBytes
from .simulation import Server, SimulatedRequest, Simulation

__all__ = ["TimedExecutor", "TimedStep"]


class TimedStep(NamedTuple):
    """A step under way: what it samples, and how long it takes."""

    drawn: Drawn
    seconds: float

    def get(self) -> Drawn:
        return self.drawn


class TimedExecutor:
    """Steps that take the times of a model, on a `ShadowDevice`. What requests sample is known from their traces.

    Attributes:
        shapes: of its steps.
        jobs: those that were asked for, by the ids of their prompts.
        flushed: bytes that travelled since the last step; they count with the next one.
    """

    def __init__(self, server: Server, shapes: Shapes, result: Simulation):
        self.shapes, self._server, self._result = shapes, server, result
        self.jobs: dict[int, SimulatedRequest] = {}
        self.flushed = TransferBytes()
        self._loaded = set[int]()  # blocks that came from the host, for somebody who has not begun

    def check(self, prompt: Prompt) -> None:
        """Everything can be asked for."""

    def move(self, transfers: Sequence[Transfers]) -> None:
        for stages in transfers:
            moved, loaded = self._result.shadow.transfer(stages)
            self.flushed = self.flushed.plus(moved)
            self._loaded |= loaded

    def recover(self) -> None:
        """Nothing is ever lost."""

    def send(self, work: Work) -> TimedStep:
        """Carries out a work. Its time is counted at once."""
        result, step_time = self._result, self._server.step_time
        self.move(work.transfers)
        moved, self.flushed = self.flushed, TransferBytes()
        decodes, context = work.quiet
        tokens: list[list[list[int]]] = []
        prefill = prefill_context = 0
        for plan, rows in zip(work.plans, work.rows, strict=True):
            result.shadow.begin(plan)
            tokens.append([])
            for row, (start, count) in zip(rows, _spans(plan), strict=False):
                job = self.jobs[row.prompt.id]  # type: ignore[index]
                self._compute(job, row.slot, start, count)
                if count == 1 or (row.samples and row.text is None):  # of those that have glided, this step's token
                    decodes, context = decodes + 1, context + start + count - 1
                else:
                    prefill += count
                    prefill_context += count * start + count * (count - 1) // 2
                tokens[-1].append(job.output_from(start + count, 1) if row.samples else [])
        if not result.unbegun:
            self._loaded.clear()
        computing = step_time.computing(decodes, context, prefill, prefill_context)
        seconds = step_time.seconds(computing, moved.loaded, moved.stored)
        result.planned += bool(work.plans)
        result.busy, result.waited = result.busy + seconds, result.waited + seconds - computing
        result.scheduled_tokens += decodes + prefill
        result.prefill_tokens += prefill
        if decodes:
            result.token_gaps.append((seconds, decodes))
        return TimedStep(Drawn(tokens), seconds)

    def _compute(self, job: SimulatedRequest, slot: int, start: int, count: int) -> None:
        assert job.text is not None and job.request is not None
        result = self._result
        if job.begun < 0:
            job.begun = result.now
            result.unbegun -= 1
            result.find(job, start)  # others may have computed more of it since it was admitted
            blocks = job.request.blocks[: job.hit // self._server.layout.block_tokens]
            job.hit_host = sum(block in self._loaded for block in blocks) * self._server.layout.block_tokens
            result.totals.hit_host += job.hit_host
            self._loaded.difference_update(blocks)
        result.shadow.compute(job.text, slot, start, count, check_blocks=job.unchecked)
        job.unchecked = False
        job.computed += count
        job.reached = start + count


def _spans(plan: StepPlan) -> Iterable[tuple[int, int]]:
    """First token and number of tokens of each sequence."""
    return zip(plan.seq_start.tolist(), plan.seq_count.tolist(), strict=True)
