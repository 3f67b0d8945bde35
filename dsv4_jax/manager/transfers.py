"""What must travel between the tiers before the next step, in an order that is safe. Pure Python + numpy.

A stage runs its copies to the host first, then those to the device, each kind as one call. Stages run in
order, all before the step they were taken for. As whatever comes later on a device sees what came before,
a unit may be given away as soon as its copy is queued: there is nothing to wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..plan import SwapPlan

__all__ = ["TransferQueue", "TransferStage", "Transfers"]

BLOCK, SLOT = "block", "slot"
Pairs = dict[int, int]  # destination -> source


class TransferStage(NamedTuple):
    """Copies of one stage, in the order to run them; None where there is nothing.

    Attributes:
        swap_out: blocks to host block records (`dsv4_jax.swap_out`).
        snapshot: slots to host snapshot records.
        swap_in: host block records to blocks.
        restore: host snapshot records to slots.
    """

    swap_out: SwapPlan | None
    snapshot: SwapPlan | None
    swap_in: SwapPlan | None
    restore: SwapPlan | None


class Transfers(list[TransferStage]):
    """The stages of one step, in order, to be gone through once.

    Attributes:
        ran: whether somebody has gone through them: the copies are queued on the device then.
    """

    def __init__(self, stages: Iterable[TransferStage] = ()):
        super().__init__(stages)
        self.ran = not self

    def __iter__(self) -> Iterator[TransferStage]:
        yield from super().__iter__()
        self.ran = True

    def host_records(self, scope: str) -> set[int]:
        """The host records that the stages read or write."""
        plans = [
            plan for i in range(len(self))
            for plan in ((self[i].swap_out, self[i].swap_in) if scope == BLOCK else (self[i].snapshot, self[i].restore))
        ]  # fmt: skip
        return {record for plan in plans if plan is not None for record in plan.host_ids.tolist()}


@dataclasses.dataclass(slots=True)
class _Stage:
    out: dict[str, Pairs] = dataclasses.field(default_factory=lambda: {BLOCK: {}, SLOT: {}})
    into: dict[str, Pairs] = dataclasses.field(default_factory=lambda: {BLOCK: {}, SLOT: {}})
    read: dict[str, set[int]] = dataclasses.field(default_factory=lambda: {BLOCK: set(), SLOT: set()})


class TransferQueue:
    """Copies in the order they were asked for, packed into as few stages as keep their meaning."""

    def __init__(self) -> None:
        self._stages: list[_Stage] = []

    def __len__(self) -> int:
        """Copies queued."""
        return sum(len(pairs) for stage in self._stages for side in (stage.out, stage.into) for pairs in side.values())

    def out(self, scope: str, device: int, host: int) -> None:
        """Queues a copy of a device unit to a host record."""
        stage = self._stages[-1] if self._stages else None
        # A stage reads its host records last: one that it reads or has written must wait for the next.
        if stage is None or host in stage.out[scope] or host in stage.read[scope] or device in stage.into[scope]:
            stage = self._open()
        stage.out[scope][host] = device

    def into(self, scope: str, host: int, device: int) -> None:
        """Queues a copy of a host record to a device unit."""
        stage = self._stages[-1] if self._stages else None
        if stage is None or device in stage.into[scope]:
            stage = self._open()
        stage.into[scope][device] = host
        stage.read[scope].add(host)

    def host_records(self, scope: str) -> set[int]:
        """The host records that queued copies read or write."""
        return {record for stage in self._stages for record in (*stage.out[scope], *stage.into[scope].values())}

    def drain(self) -> Transfers:
        """All stages queued, in order; the queue is empty then."""
        stages, self._stages = self._stages, []
        return Transfers(
            TransferStage(
                _plan(stage.out[BLOCK], outward=True), _plan(stage.out[SLOT], outward=True),
                _plan(stage.into[BLOCK], outward=False), _plan(stage.into[SLOT], outward=False),
            )
            for stage in stages
        )  # fmt: skip

    def _open(self) -> _Stage:
        self._stages.append(_Stage())
        return self._stages[-1]


def _plan(pairs: Pairs, *, outward: bool) -> SwapPlan | None:
    """Padded with null ids to a power of two, so that few executables serve all lengths."""
    if not pairs:
        return None
    length = 1 << (len(pairs) - 1).bit_length()
    written, read = np.zeros(length, np.int32), np.zeros(length, np.int32)
    written[: len(pairs)], read[: len(pairs)] = list(pairs), list(pairs.values())
    return SwapPlan(read, written) if outward else SwapPlan(written, read)
