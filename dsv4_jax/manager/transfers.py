"""What must travel between the tiers before the next step, in an order that is safe. Pure Python + numpy.

A stage runs its copies to the host first, then those to the device, each kind as one call. Stages run in
order, all before the step they were taken for. As whatever comes later on a device sees what came before,
a unit may be given away as soon as its copy is queued: there is nothing to wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..plan import StateSwapPlan, SwapPlan

__all__ = ["TransferQueue", "TransferStage", "Transfers"]

BLOCK, SLOT = "block", "slot"
HostPages: TypeAlias = int | Sequence[int]


class TransferStage(NamedTuple):
    """Copies of one stage, in the order to run them; None where there is nothing.

    Attributes:
        swap_out: blocks to pages of the host (`dsv4_jax.swap_out`).
        snapshot: states of slots to pages.
        swap_in: pages to blocks.
        restore: states from pages to slots.
    """

    swap_out: SwapPlan | None
    snapshot: StateSwapPlan | None
    swap_in: SwapPlan | None
    restore: StateSwapPlan | None


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

    def pages(self) -> set[int]:
        """The host pages that the stages read or write."""
        plans = [plan for i in range(len(self)) for plan in self[i] if plan is not None]
        return {page for plan in plans for page in plan.host_ids.ravel().tolist()}


class _Copy(NamedTuple):
    """One unit of the device, and its pages of the host, in order; of a state its tokens."""

    device: int
    host: tuple[int, ...]
    num_tokens: int


@dataclasses.dataclass(slots=True)
class _Stage:
    """By scope: the copies of either direction, and the device units that they fill; and all pages that they use."""

    out: dict[str, list[_Copy]] = dataclasses.field(default_factory=lambda: {BLOCK: [], SLOT: []})
    into: dict[str, list[_Copy]] = dataclasses.field(default_factory=lambda: {BLOCK: [], SLOT: []})
    filled: dict[str, set[int]] = dataclasses.field(default_factory=lambda: {BLOCK: set(), SLOT: set()})
    touched: set[int] = dataclasses.field(default_factory=set)


class TransferQueue:
    """Copies in the order they were asked for, packed into as few stages as keep their meaning."""

    def __init__(self) -> None:
        self._stages: list[_Stage] = []

    def __len__(self) -> int:
        """Copies queued."""
        return sum(
            len(copies) for stage in self._stages for side in (stage.out, stage.into) for copies in side.values()
        )

    def out(self, scope: str, device: int, host: HostPages, num_tokens: int = 0) -> None:
        """Queues a copy of a device unit to the host: a block to a page, a state of `num_tokens` to pages."""
        host = _tuple(host)
        stage = self._stages[-1] if self._stages else None
        # A stage reads its pages last: one that it reads or has written must wait for the next.
        if stage is None or not stage.touched.isdisjoint(host) or device in stage.filled[scope]:
            stage = self._open()
        stage.out[scope].append(_Copy(device, host, num_tokens))
        stage.touched.update(host)

    def into(self, scope: str, host: HostPages, device: int, num_tokens: int = 0) -> None:
        """Queues a copy of a page (of a state: its pages) to a device unit."""
        host = _tuple(host)
        stage = self._stages[-1] if self._stages else None
        if stage is None or device in stage.filled[scope]:
            stage = self._open()
        stage.into[scope].append(_Copy(device, host, num_tokens))
        stage.filled[scope].add(device)
        stage.touched.update(host)

    def pages(self) -> set[int]:
        """The host pages that queued copies read or write."""
        return {page for stage in self._stages for page in stage.touched}

    def drain(self) -> Transfers:
        """All stages queued, in order; the queue is empty then."""
        stages, self._stages = self._stages, []
        return Transfers(
            TransferStage(
                _plan(stage.out[BLOCK]), _state_plan(stage.out[SLOT]),
                _plan(stage.into[BLOCK]), _state_plan(stage.into[SLOT]),
            )
            for stage in stages
        )  # fmt: skip

    def _open(self) -> _Stage:
        self._stages.append(_Stage())
        return self._stages[-1]


def _plan(copies: list[_Copy]) -> SwapPlan | None:
    """Padded with null ids to a power of two, so that few executables serve all lengths."""
    if not copies:
        return None
    plan = SwapPlan(_nulls(copies), _nulls(copies))
    plan.device_ids[: len(copies)] = [copy.device for copy in copies]
    plan.host_ids[: len(copies)] = [copy.host[0] for copy in copies]
    return plan


def _state_plan(copies: list[_Copy]) -> StateSwapPlan | None:
    """As `_plan`; states of fewer pages than another have null ids behind them."""
    if not copies:
        return None
    plan = StateSwapPlan(_nulls(copies), _nulls(copies, max(len(copy.host) for copy in copies)), _nulls(copies))
    for i, copy in enumerate(copies):
        plan.device_ids[i], plan.num_tokens[i] = copy.device, copy.num_tokens
        plan.host_ids[i, : len(copy.host)] = copy.host
    return plan


def _tuple(host: HostPages) -> tuple[int, ...]:
    return (host,) if isinstance(host, int) else tuple(host)


def _nulls(copies: list[_Copy], *width: int) -> np.ndarray:
    return np.zeros((1 << (len(copies) - 1).bit_length(), *width), np.int32)
