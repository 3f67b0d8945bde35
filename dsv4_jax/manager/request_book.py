"""Which requests there are: live ones by slot, live and preempted ones by id. Pure Python + numpy."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from ..checks import shown
from ..errors import RequestError
from .prefix.node import Node
from .request import Counts, Request, RequestRef, RequestState
from .request_tokens import Edits, PromptIds, TokenIds

__all__ = ["RequestBook"]


class RequestBook:
    """The requests of a manager, by slot and by id.

    Attributes:
        live: by slot, in the order they became live.
        ids: live and preempted requests by id, in the order they were admitted.
        generation: how often the book was cleared.
        counts: of the live requests, by slot.
        edits: whether `tokens` of a request were changed, other than by appending, since `settle_changes`.
    """

    def __init__(self) -> None:
        self.live: dict[int, Request] = {}
        self.ids: dict[Hashable, Request] = {}
        self.generation = 0
        self.edits = Edits()
        self.counts = Counts(1)
        self._last_id = self._last_epoch = 0
        self._changes = 0  # of `live`
        self._requests: tuple[int, tuple[Request, ...]] = 0, ()  # of `live`, after so many changes
        # Of these, after so many were made lists.
        self._columns: tuple[object, int, np.ndarray, list[TokenIds | PromptIds]] = None, 0, np.zeros(0, np.int64), []

    @property
    def requests(self) -> tuple[Request, ...]:
        """The live requests, in the order they became live."""
        changes, (seen, requests) = self._changes, self._requests
        if seen != changes:  # another thread may ask while one comes or goes: what it finds is for its number only
            requests = tuple(self.live.values())
            self._requests = changes, requests
        return requests

    def columns(self, requests: Sequence[Request]) -> tuple[np.ndarray, list[TokenIds | PromptIds]]:
        """Slots and ids of these requests: at no cost of all, if it was asked since one came or went."""
        seen, listed, slots, ids = self._columns
        if requests is self._requests[1] and requests is seen and listed == self.edits.listed:
            return slots, ids
        slots, ids = np.array([r.slot for r in requests], np.int64), [r.ids for r in requests]
        if requests is self._requests[1]:
            self._columns = requests, self.edits.listed, slots, ids
        return slots, ids

    @property
    def preempted(self) -> tuple[Request, ...]:
        """The preempted requests, in the order they were admitted."""
        # Of a copy: another thread may ask.
        return tuple(r for r in tuple(self.ids.values()) if r.state is RequestState.PREEMPTED)

    def pinned(self) -> set[Node]:
        """Nodes whose snapshots live requests have still to start from."""
        return {r.restores for r in self.live.values() if r.restores is not None}

    # Which request is meant

    def find(self, ref: RequestRef) -> Request | None:
        """The live request that `ref` was made of; None if it was released or preempted since."""
        request = self.ids.get(ref.id)
        live = request is not None and request.state is RequestState.LIVE and request.epoch == ref.epoch
        return request if live else None

    def find_live(self, request: Request) -> Request:
        """Returns the request itself. Raises `RequestError` if it is not live here, or is none: an integer, say."""
        if not isinstance(request, Request):
            raise RequestError(f"not a Request of admit_request, fork or manager.requests: {shown(request)}")
        if self.live.get(request.slot) is request:
            return request
        mine = request.state is not RequestState.LIVE
        why = f"was {request.state.value}" if mine else "belongs to another manager"
        raise RequestError(f"request {request.id!r} {why}")

    def find_all_live(self, requests: Sequence[Request]) -> list[Request]:
        """Does `find_live` of all of them."""
        live = self.live  # in full only what is not plainly right: hundreds pass here every step
        return [r if type(r) is Request and live.get(r.slot) is r else self.find_live(r) for r in requests]

    def find_in_slot(self, slot: int) -> Request:
        """Returns the live request of a slot. Raises `RequestError` if there is none."""
        if slot not in self.live:
            raise RequestError(f"no live request in slot {slot}")
        return self.live[slot]

    def find_known(self, request: Request) -> Request:
        """Returns the live or preempted request itself. Raises `RequestError` if it is neither, or no request."""
        if isinstance(request, Request) and self.is_preempted(request):
            return request
        return self.find_live(request)

    def is_preempted(self, request: Request) -> bool:
        return self.ids.get(request.id) is request and request.state is RequestState.PREEMPTED

    def check_id(self, request_id: Hashable, others: Iterable[Hashable] = ()) -> None:
        """Raises `RequestError` for an id that is in use, among the `others`, or no id."""
        if request_id is None:
            return
        try:
            sound = bool(request_id == request_id)  # NaN is not
            taken, twice = request_id in self.ids, request_id in set(others)
        except MemoryError:
            raise  # of the process, not of the argument
        except Exception as error:  # whatever its `__hash__` or `__eq__` raised
            raise RequestError(f"request id {shown(request_id)} cannot be hashed and compared") from error
        if not sound:
            raise RequestError(f"request id {shown(request_id)} does not equal itself")
        if taken:
            raise RequestError(f"request id {request_id!r} is in use by a {self.ids[request_id].state.value} request")
        if twice:
            raise RequestError(f"request id {request_id!r} is named twice")

    # Changes

    def settle_changes(self, requests: Iterable[Request]) -> None:
        """Takes notice of what was changed in the `tokens` of these requests: see `Request.settle_changes`.

        Raises:
            RequestError: an id was changed that is computed; of that request nothing has changed.
        """
        if not self.edits.any:
            return
        for request in requests:
            request.settle_changes()
        self.edits.any = any(request.ids.changed_from < sys.maxsize for request in self.ids.values())

    def add(self, tokens: list[int] | PromptIds, limit: int, request_id: Hashable, slot: int, started: int) -> Request:
        """A new live request; without an id it gets a number. `started`: steps planned so far.

        `tokens` are the request's from now on if they are `PromptIds`, else copied.
        """
        while request_id is None:
            self._last_id += 1
            request_id = None if self._last_id in self.ids else self._last_id
        self._last_epoch += 1
        ids = tokens if isinstance(tokens, PromptIds) else TokenIds(tokens, self.edits)
        request = Request(
            request_id,
            slot,
            self.generation,
            limit,
            ids,
            num_prompt=len(tokens),
            epoch=self._last_epoch,
        )
        request.started = started
        self.ids[request_id] = request
        self._enter(request)
        return request

    def _enter(self, request: Request) -> None:
        """It is live in its slot."""
        request.move_counts(self.counts.cells, request.slot)
        self.live[request.slot] = request
        self._changes += 1

    def leave(self, request: Request) -> None:
        """It gives up its slot."""
        request.move_counts(Counts(1).cells, 0)
        del self.live[request.slot]
        self._changes += 1

    def preempt(self, request: Request) -> None:
        """It has given up its slot, and may come back."""
        self._last_epoch += 1
        request.state, request.epoch = RequestState.PREEMPTED, self._last_epoch
        request.slot = request.num_cached = 0

    def resume(self, request: Request, started: int) -> None:
        """It is live again, in the slot that it has now."""
        request.started = started
        self._enter(request)
        request.state = RequestState.LIVE

    def remove(self, request: Request) -> None:
        """Takes a request out that has ended."""
        del self.ids[request.id]
        request.state = RequestState.RELEASED

    def resize(self, slots: int) -> None:
        """There are slots up to this one from now on; no request is live."""
        self.counts = Counts(1 + slots)

    def clear(self) -> None:
        """All have ended. Ids and epochs go on from where they were."""
        for request in self.live.values():
            request.move_counts(Counts(1).cells, 0)
        for request in self.ids.values():
            request.blocks, request.nodes, request.restores, request.parked = [], [], None, None
            request.state = RequestState.RELEASED
        self.generation += 1
        self.live, self.ids = {}, {}
        self._changes += 1
