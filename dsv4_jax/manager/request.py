"""A request as the manager sees it. Pure Python + numpy."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..checks import as_int, shown
from ..errors import PlanError, RequestError
from .prefix.hashing import BlockHasher
from .prefix.node import Node, S
from .request_tokens import PromptIds, TokenIds

__all__ = ["Counts", "Parked", "Request", "RequestRef", "RequestState", "Reuse"]

Reuse = Literal["output", "prompt"]


class RequestState(enum.Enum):
    LIVE = "live"
    PREEMPTED = "preempted"  # no slot and no blocks; `KVCacheManager.resume` makes it live again
    RELEASED = "released"


class RequestRef(NamedTuple):
    """A request as it was at one time: what to keep with a step under way (see `KVCacheManager.find`)."""

    id: Hashable
    epoch: int


class Parked(NamedTuple):
    """What a preempted request keeps on the host: its state, and the blocks that only it has.

    Attributes:
        num_cached: tokens the state stands after.
        first_block: blocks before these are in the prefix tree, or were.
        blocks: host pages of the others, in path order.
        state: those of the state, in order.
    """

    num_cached: int
    first_block: int
    blocks: list[int]
    state: list[int]


CELLS = 7  # of a request in `Counts`


class Counts:
    """What changes of many requests in every step, for all of them at once: a row each."""

    __slots__ = ("cells",)

    def __init__(self, rows: int):
        self.cells = array("q", bytes(8 * CELLS * rows))

    @property
    def table(self) -> np.ndarray:
        """A view, [rows, 7] int64: `num_cached`, `num_tabled`, `num_scheduled`, `loop`, `last_step`, `started`,
        `max_tokens`."""
        return np.frombuffer(self.cells, np.int64).reshape(-1, CELLS)


def _cell(index: int) -> property:
    """An attribute of a request that stands in this column of its row."""

    def get(self: Request) -> int:
        return self._cells[self._at + index]

    def change(self: Request, value: int) -> None:
        self._cells[self._at + index] = value

    return property(get, change)


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Request:
    """One request. Made by `KVCacheManager.admit_request`; only `tokens` is the caller's to change.

    What a step has computed stays what it was: `KVCacheManager.plan_tokens` notes the ids it lays out (for a caller
    that does so itself they are noted when their block is published, or the request is preempted), and cached blocks
    are known by these. So ids before `num_cached` that were noted are fixed: after a change of them in `tokens` the
    next step, fork or export of the request raises `RequestError`, until they are restored or the request is
    preempted. From `num_cached` on, and so in all of a preempted request, `tokens` may be changed: that is what will be
    computed.

    It stands in for its slot number wherever an integer is wanted (`operator.index(request)`).

    Attributes:
        id: the caller's, or a number that only grows.
        slot: its row of per-request state, >= 1; 0 while it is preempted.
        generation: of the manager that admitted it; `reset()` makes older ones stale.
        max_tokens: the most tokens it may ever hold, prompt and output together.
        ids: prompt and output ids known so far: `tokens`, or, before anybody has asked for these, an array (code "I").
        history: ids scheduled so far (code "I"), as far as they are noted; what was found in the cache included.
        num_prompt: tokens it was admitted with.
        num_cached: tokens whose rows are in the cache once the steps planned so far have run.
        num_hit: tokens found in the cache when it was admitted (or last resumed), or its first chunk was scheduled.
        junction: tokens whose blocks were cached then, if more than `num_hit`: no state was kept there; else 0.
        blocks: block ids in path order: block i holds tokens [i, i + 1) * block_tokens.
        num_tabled: leading blocks whose block-table entries a plan has already carried.
        reserved: tokens for which blocks are kept whatever happens (see `KVCacheManager.reserve`).
        num_scheduled: tokens of its last step, while that step may still be accepted in part; else 0.
        loop: steps of its last plan, while `num_scheduled` is not 0; else 0.
        wanted: tokens after which its state is kept, as requests that wait for it go other ways there.
        looked_up: `tokens.edits` when its prompt was last looked up.
        earlier: tokens and steps of plans before that one of which `accept` has still to say what they kept, in order:
            it was planned ahead. `num_cached` counts all of them as kept whole.
        torn: `num_cached` after a whole verify step of which nothing was kept: until its next step its ring lacks the
            oldest row of a state's record, which no token sees any more. -1 if there was none.
        kept_from: `step_start`, once the step cannot be accepted in part any more.
        started: steps planned when it became live.
        left_by: number of the step that `written` and `attached` are of.
        last_step: number of the last step that it was part of, 0 before the first.
        epoch: how often it was preempted.
        forked: id and last step of the request whose copy it is, until its next step; None if it is none.
        copied: the step before which such a copy, or the one it was copied from, was made; 0 if none was planned yet.
        hasher: digests of its full blocks; None if nothing is cached.
        nodes: of its leading blocks in the prefix tree: shared, or (the last ones) about to be.
        restores: the node whose snapshot its first step restores, pinned until then.
        rolling: the node with its latest snapshot that the next one replaces.
        written: nodes of blocks that its last step filled, published since: what an abort takes back.
        attached: nodes that its last step, or its preemption since, gave a snapshot.
        parked: what it left on the host when it was preempted.
        reuse: whether the next turn goes on from its "output", or only from its "prompt" (see `admit_request`).
    """

    id: Hashable
    slot: int
    generation: int
    max_tokens: int
    ids: TokenIds | PromptIds
    history: array[int] = dataclasses.field(default_factory=lambda: array("I"))
    num_prompt: int = 0
    num_hit: int = 0
    junction: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    reserved: int = 0
    earlier: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    wanted: list[int] = dataclasses.field(default_factory=list)
    looked_up: int = 0
    torn: int = -1
    kept_from: int = 0
    left_by: int = 0
    epoch: int = 0
    state: RequestState = RequestState.LIVE
    forked: tuple[Hashable, int] | None = None
    copied: int = 0
    hasher: BlockHasher | None = None
    nodes: list[Node] = dataclasses.field(default_factory=list)
    restores: Node | None = None
    rolling: Node | None = None
    written: list[Node] = dataclasses.field(default_factory=list)
    attached: list[Node] = dataclasses.field(default_factory=list)
    parked: Parked | None = None
    reuse: Reuse = "output"
    _cells: array[int] = dataclasses.field(default_factory=lambda: Counts(1).cells)
    _at: int = 0

    num_cached = _cell(0)
    num_tabled = _cell(1)
    num_scheduled = _cell(2)
    loop = _cell(3)
    last_step = _cell(4)
    started = _cell(5)

    def move_counts(self, cells: array[int], row: int) -> None:
        """Its counts are in this row of these from now on."""
        here = self._cells[self._at : self._at + CELLS - 1]
        here.append(self.max_tokens)
        self._cells, self._at = cells, row * CELLS
        cells[self._at : self._at + CELLS] = here

    @property
    def tokens(self) -> list[int]:
        """Prompt and output ids known so far. Append what was sampled: `request.tokens.append(t)`.

        A caller that keeps its token ids elsewhere may leave this empty; nothing of it is then cached. Another list may
        be assigned; raises `RequestError` for what is no list (or tuple) of ints. The list is made when it is first
        asked for: of 100,000 ids that takes as long as to admit them.
        """
        ids = self.ids
        if isinstance(ids, PromptIds):
            ids = self.ids = ids.listed()
        return ids

    @tokens.setter
    def tokens(self, ids: Sequence[int]) -> None:
        if not isinstance(ids, list | tuple):
            raise RequestError(f"request {self.id!r}: tokens must be a list of integers, got {shown(ids)}")
        if ids is not self.ids:
            self.tokens[:] = ids

    @property
    def is_displaced(self) -> bool:
        """Whether `tokens` differs from what was noted, so that ids behind may not be where they were computed."""
        return self.ids.changed_from < len(self.history) and self._first_changed() < len(self.history)

    def _first_changed(self) -> int:
        """The lowest index at which `tokens` differs from what was noted, or either ends."""
        ids, history = self.ids, self.history
        first, stop = self.ids.changed_from, min(len(ids), len(history))
        same = zip(ids[first:stop], history[first:stop], strict=True)
        return next((i for i, (now, fed) in enumerate(same, first) if as_int(now) != fed), stop)

    def settle_changes(self) -> None:
        """Ids that were changed in `tokens` after they were noted, from `num_cached` on, are no history any more.

        Raises:
            RequestError: one before was changed; nothing has changed here.
        """
        ids, history = self.ids, self.history
        if ids.changed_from < len(history):
            here = self._first_changed()
            if here < min(self.num_cached, len(history)):
                now = f"is {shown(ids[here])} now" if here < len(ids) else "is gone now"
                raise RequestError(
                    f"request {self.id!r}: token {here} was fed as {history[here]} and {now}: restore it, or preempt "
                    "and resume the request to compute it again"
                )
            if here < len(history):
                del history[here:]
                if self.hasher is not None and here < self.hasher.num_tokens:
                    self.hasher.truncate(here)
                self.num_prompt = min(self.num_prompt, here + 1)
        if len(history) <= ids.shortest < self.num_cached:
            if len(ids) > ids.shortest:
                raise RequestError(
                    f"request {self.id!r}: token {ids.shortest} was removed, which is computed, and another stands "
                    "there: preempt and resume the request to compute it"
                )
            return  # so far nothing does
        if ids.shortest < self.num_prompt:  # what was appended since may be drafts
            self.num_prompt = min(self.num_prompt, max(ids.shortest, len(history)))
        ids.settle()

    def __repr__(self) -> str:
        where = f"live in slot {self.slot}" if self.state is RequestState.LIVE else self.state.value
        name = " ".join(shown(self.id).split())
        return f"<Request {name} {where}: {self.num_cached} of {len(self.ids)} tokens cached>"

    def __index__(self) -> int:
        """Returns the slot. Raises `RequestError` without one: the slot may be someone else's by then."""
        if self.state is not RequestState.LIVE:
            raise RequestError(f"request {self.id!r} was {self.state.value}: it has no slot")
        return self.slot

    @property
    def num_pending(self) -> int:
        """Known tokens that are not in the cache yet."""
        return max(len(self.ids) - self.num_cached, 0)

    @property
    def num_excess(self) -> int:
        """Known tokens beyond `max_tokens`: no step will ever compute them."""
        return max(len(self.ids) - self.max_tokens, 0)

    @property
    def step_start(self) -> int:
        """Tokens it had before its last step (the first that is open); `num_cached` once it is known that this step
        ran."""
        if self.earlier:
            return self.num_cached - self.num_scheduled - sum([tokens for tokens, _ in self.earlier])
        return self.num_cached - self.num_scheduled if self.num_scheduled else self.kept_from

    @property
    def is_open(self) -> bool:
        """Whether what its last steps keep is not known before `accept`: its last plan is of several steps of several
        tokens, or was made ahead of others' outcome."""
        return 1 < self.loop < self.num_scheduled or len(self.earlier) > 0

    def leaves_open(self, max_tokens: int) -> bool:
        """Whether what its last plan keeps is still to be said when the next one is planned ahead.

        So it is if the steps have drafts that were drawn on the device. `max_tokens`: of a step that may be cut.
        """
        if self.is_open:
            return True
        return self.loop < self.num_scheduled <= self.loop * max_tokens and self.num_cached > len(self.ids)

    def check_accepted(self) -> None:
        """Raises `PlanError` if it is not known yet what its last steps have kept."""
        if self.is_open:
            steps = sum([loop for _, loop in self.earlier], self.loop)
            raise PlanError(f"request {self.id!r} has {steps} steps with drafts that were not accepted")

    def keep_step(self) -> None:
        """Its last step is kept whole: it can no longer be accepted in part."""
        self.kept_from, self.num_scheduled, self.loop = self.step_start, 0, 0

    def forget_earlier_steps(self, step: int) -> None:
        """What earlier steps left can no longer be taken back: `written` and `attached` are of this one."""
        if self.left_by != step:
            self.left_by, self.written, self.attached = step, [], []

    @property
    def has_whole_state(self) -> bool:
        """Whether its slot holds all that a state's record does: else none is taken of it."""
        return self.torn != self.num_cached

    @property
    def was_scheduled(self) -> bool:
        """Whether it was part of a step since it became live."""
        return self.num_cached != self.num_hit

    @property
    def ref(self) -> RequestRef:
        """Itself as of now: stale once it is preempted or released."""
        return RequestRef(self.id, self.epoch)

    @property
    def num_shared(self) -> int:
        """Leading blocks that the prefix tree holds."""
        count = len(self.nodes)
        while count and self.nodes[count - 1].state is S.WRITING:
            count -= 1
        return count
