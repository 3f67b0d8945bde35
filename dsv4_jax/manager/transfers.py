"""What must travel between the tiers before the next step, in an order that is safe. Pure Python + numpy.

A stage runs its copies to the host first, then those to the device, each kind as one call; where states lie in
blocks, they go there in between, and from there to slots last of all. Stages run in order, all before the step they
were taken for. As whatever comes later on a device sees what came before,
a unit may be given away as soon as its copy is queued: there is nothing to wait for.

Every copy runs once, in the order asked for. So a step that is lost does not lose its copies: those that did not run
come before those of the next step, while the device still holds what it held.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import PlanError
from ..plan import SpillPlan, StateBlocksPlan, StateSwapPlan, SwapPlan

__all__ = ["TransferQueue", "TransferStage", "Transfers", "null_states"]

BLOCK, SLOT = "block", "slot"
HostPages: TypeAlias = int | Sequence[int]


class TransferStage(NamedTuple):
    """Copies of one stage, in the order to run them; None where there is nothing.

    Attributes:
        swap_out: blocks to pages of the host (`dsv4_jax.tiers.swap.swap_out`).
        snapshot: states of slots to pages.
        spill_states: states in blocks of the device to pages.
        put_states: states of slots to blocks of the device.
        swap_in: pages to blocks.
        restore: states from pages to slots.
        get_states: states in blocks of the device to slots.
    """

    swap_out: SwapPlan | None = None
    snapshot: StateSwapPlan | None = None
    spill_states: SpillPlan | None = None
    put_states: StateBlocksPlan | None = None
    swap_in: SwapPlan | None = None
    restore: StateSwapPlan | None = None
    get_states: StateBlocksPlan | None = None


_CALLS = len(TransferStage._fields)


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far the stages of one queue have run, in calls: as many to a stage as it has fields.

    Attributes:
        relied: of these, those that the manager has taken notice of: what it does since relies on them.
        closed: whether the manager was reset since: none of them may run any more.
    """

    ran: int = 0
    relied: int = 0
    closed: bool = False


class Transfers(list[TransferStage]):
    """The stages of one step, in order, behind those of earlier steps that did not run. They run once.

    `dsv4_jax.run_transfers` runs them. For a loop of one's own, a stage counts as run when the next one, or the end, is
    asked for. Who is broken off by an exception goes on from there, with these transfers or with those of a later step:
    `calls` from the very call, a loop over stages from the beginning of the stage. Indexing runs nothing,
    and a slice is a list that runs as often as one likes: for another cache that is to hold the same.

    Attributes:
        has_own: whether there are any of the step itself.

    Raises (when they are iterated):
        PlanError: they have run already, or run elsewhere at the same time; or the manager was reset since.
    """

    def __init__(
        self, stages: Iterable[TransferStage] = (), progress: _Progress | None = None, *, first: int = 0, late: int = 0
    ):
        """`first`: calls of the queue before the first stage. `late`: how many of the stages are of earlier steps."""
        super().__init__(stages)
        self._progress, self._first = progress or _Progress(), first
        self._stop, self.has_own = first + _CALLS * len(self), len(self) > late
        self._looked_from: int | None = None  # where a loop over the stages began, if `calls` did not run since

    @property
    def ran(self) -> bool:
        """Whether all of them were gone through: the copies are queued on the device then."""
        return self._progress.ran >= self._stop

    def __iter__(self) -> Iterator[TransferStage]:
        """The stages that have not run; of one that has run in part, the rest. All again if nothing has run since."""
        self._begin()
        self._looked_from = self._progress.ran
        for stage, done in self._remaining(_CALLS):
            yield TransferStage(*[None] * done, *stage[done:])

    def calls(self) -> Iterator[tuple[str, Any]]:
        """The calls of the stages that have not run, one by one: the field's name, and its plan."""
        self._begin()
        self._looked_from = None
        for stage, done in self._remaining(1):
            yield TransferStage._fields[done], stage[done]

    def _begin(self) -> None:
        progress = self._progress
        looked_from = self._looked_from
        if looked_from is not None and progress.ran == self._stop and progress.relied <= looked_from:
            progress.ran = looked_from  # they may only have been looked at
        if progress.closed and (self.has_own or not self.ran):
            raise PlanError("these transfers were taken before the manager was reset: they must not run any more")
        if self.has_own and self.ran:
            raise PlanError("these transfers have run already: every copy runs once")

    def _remaining(self, max_calls: int) -> Iterator[tuple[TransferStage, int]]:
        """What has not run, up to `max_calls` calls of a stage at a time: the stage, and its calls that have run."""
        progress = self._progress
        while (ran := progress.ran) < self._stop:
            index, done = divmod(ran - self._first, _CALLS)
            yield self[index], done
            if progress.ran != ran or progress.closed:
                raise PlanError("these transfers were run elsewhere at the same time, or the manager was reset")
            progress.ran = ran + min(max_calls, _CALLS - done)

    def __reduce__(self):
        stages = [self[i] for i in range(len(self))]
        names = ("_first", "_stop", "has_own", "_looked_from")
        return Transfers, (stages, self._progress), {name: getattr(self, name) for name in names}


def null_states(most: int, blocks: int) -> Transfers:
    """Copies between slots and blocks that move nothing, of all lengths that plans of up to `most` states have: to run
    each executable once.

    Args:
        blocks: that a state takes.
    """
    plans = (_blocks_plan([_Copy(0, (), 0, (0,) * blocks)] * (1 << i)) for i in range((most - 1).bit_length() + 1))
    return Transfers(TransferStage(put_states=plan, get_states=plan) for plan in plans)


class _Copy(NamedTuple):
    """One unit of the device, and its pages of the host, in order; of a state its tokens, and blocks of the device."""

    device: int
    host: tuple[int, ...]
    num_tokens: int
    blocks: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class _Stage:
    """The copies of either direction and the device units that they fill, by scope; and all pages that they use."""

    out: dict[str, list[_Copy]] = dataclasses.field(default_factory=lambda: {BLOCK: [], SLOT: []})
    into: dict[str, list[_Copy]] = dataclasses.field(default_factory=lambda: {BLOCK: [], SLOT: []})
    filled: dict[str, set[int]] = dataclasses.field(default_factory=lambda: {BLOCK: set(), SLOT: set()})
    touched: set[int] = dataclasses.field(default_factory=set)
    spilled: list[_Copy] = dataclasses.field(default_factory=list)  # of states in blocks, which `blocks` names
    put: list[_Copy] = dataclasses.field(default_factory=list)
    get: list[_Copy] = dataclasses.field(default_factory=list)
    read: set[int] = dataclasses.field(default_factory=set)  # blocks that `get` reads, last of all


class TransferQueue:
    """Copies in the order they were asked for, packed into as few stages as keep their meaning."""

    def __init__(self) -> None:
        self._stages: list[_Stage] = []
        self._waiting: collections.deque[TransferStage] = collections.deque()  # of steps; the first ones may have run
        self._gone = 0  # stages of steps before these
        self._progress = _Progress()

    def __len__(self) -> int:
        """How many copies are queued."""
        return sum(
            len(copies)
            for stage in self._stages
            for copies in (*stage.out.values(), *stage.into.values(), stage.spilled, stage.put, stage.get)
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
        if stage is None or device in stage.filled[scope] or (scope == BLOCK and device in stage.read):
            stage = self._open()
        stage.into[scope].append(_Copy(device, host, num_tokens))
        stage.filled[scope].add(device)
        stage.touched.update(host)

    def spill(self, blocks: Sequence[int], host: HostPages) -> None:
        """Queues a copy of a state that lies in blocks of the device to pages of the host."""
        host = _tuple(host)
        stage = self._stages[-1] if self._stages else None
        if stage is None or not stage.touched.isdisjoint(host) or not stage.filled[BLOCK].isdisjoint(blocks):
            stage = self._open()
        stage.spilled.append(_Copy(0, host, 0, tuple(blocks)))
        stage.touched.update(host)

    def put(self, slot: int, blocks: Sequence[int], num_tokens: int) -> None:
        """Queues a copy of a slot's state to blocks of the device."""
        stage = self._stages[-1] if self._stages else None
        if stage is None or slot in stage.filled[SLOT] or not (stage.filled[BLOCK] | stage.read).isdisjoint(blocks):
            stage = self._open()
        stage.put.append(_Copy(slot, (), num_tokens, tuple(blocks)))
        stage.filled[BLOCK].update(blocks)

    def get(self, blocks: Sequence[int], slot: int, num_tokens: int) -> None:
        """Queues a copy of a state that lies in blocks of the device to a slot."""
        stage = self._stages[-1] if self._stages else None
        if stage is None or slot in stage.filled[SLOT]:
            stage = self._open()
        stage.get.append(_Copy(slot, (), num_tokens, tuple(blocks)))
        stage.filled[SLOT].add(slot)
        stage.read.update(blocks)

    def pages(self) -> set[int]:
        """The host pages that copies which have not run will read or write."""
        self._forget_run()
        plans = [plan for stage in tuple(self._waiting) for plan in stage if plan is not None]
        of_host = [plan for plan in plans if not isinstance(plan, StateBlocksPlan)]
        waiting = {page for plan in of_host for page in plan.host_ids.ravel().tolist()}
        return waiting.union(*(stage.touched for stage in self._stages))

    @property
    def asked(self) -> int:
        """Stages asked for so far, those that are still being packed included."""
        return self._gone + len(self._waiting) + len(self._stages)

    def have_run(self, asked: int) -> bool:
        """Whether the first `asked` stages were gone through: their copies are queued on the device then."""
        self._forget_run()
        return self._progress.ran >= asked * _CALLS

    def drain(self) -> Transfers:
        """Returns the stages of a step: those packed so far, behind those of earlier steps that have not run."""
        self._forget_run()
        late = len(self._waiting)
        self._waiting += [
            TransferStage(
                _plan(stage.out[BLOCK]),
                _state_plan(stage.out[SLOT]),
                _spill_plan(stage.spilled),
                _blocks_plan(stage.put),
                _plan(stage.into[BLOCK]),
                _state_plan(stage.into[SLOT]),
                _blocks_plan(stage.get),
            )
            for stage in self._stages
        ]
        self._stages = []
        return Transfers(self._waiting, self._progress, first=self._gone * _CALLS, late=late)

    def close(self) -> None:
        """The manager is reset: no stage may run any more."""
        self._progress.closed = True

    def _forget_run(self) -> None:
        while self._waiting and self._progress.ran >= (self._gone + 1) * _CALLS:
            self._waiting.popleft()
            self._gone += 1
        self._progress.relied = self._gone * _CALLS

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
    """The plan of copies of states, padded as by `_plan`; states of fewer pages have null ids behind them."""
    if not copies:
        return None
    plan = StateSwapPlan(_nulls(copies), _nulls(copies, max(len(copy.host) for copy in copies)), _nulls(copies))
    for i, copy in enumerate(copies):
        plan.device_ids[i], plan.num_tokens[i] = copy.device, copy.num_tokens
        plan.host_ids[i, : len(copy.host)] = copy.host
    return plan


def _blocks_plan(copies: list[_Copy]) -> StateBlocksPlan | None:
    """The plan of copies of states between slots and blocks, padded as by `_plan`."""
    if not copies:
        return None
    plan = StateBlocksPlan(_nulls(copies), _nulls(copies, len(copies[0].blocks)), _nulls(copies))
    for i, copy in enumerate(copies):
        plan.slots[i], plan.blocks[i], plan.num_tokens[i] = copy.device, copy.blocks, copy.num_tokens
    return plan


def _spill_plan(copies: list[_Copy]) -> SpillPlan | None:
    if not copies:
        return None
    plan = SpillPlan(_nulls(copies, len(copies[0].blocks)), _nulls(copies, len(copies[0].host)))
    for i, copy in enumerate(copies):
        plan.blocks[i], plan.host_ids[i] = copy.blocks, copy.host
    return plan


def _tuple(host: HostPages) -> tuple[int, ...]:
    return (host,) if isinstance(host, int) else tuple(host)


def _nulls(copies: list[_Copy], *width: int) -> np.ndarray:
    return np.zeros((1 << (len(copies) - 1).bit_length(), *width), np.int32)
