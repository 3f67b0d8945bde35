"""Prompts that are computed here for another host, and those that another host computes. Imports no jax."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from ..errors import HandoffError, PeerError, RequestError
from ..manager import Arrival, Handoff, KVCacheManager, Request
from .job import Job, JobState

__all__ = ["Handoffs", "Remote"]

_OVER = "not all was told when it ended: the other host has given it up, its time was over, or others needed its room"
_REMEMBERED = 1024  # requests that have ended, of which parts may still come


class Remote(Protocol):
    """What brings prompts from host to host, beside the steps: a `RemoteDriver`, say."""

    def export(self, request: Request, *, seconds: float, peer: str | None = None) -> Handoff:
        """Exports what the request has computed, for this host; `take_handoffs` has it when its bytes can be read."""
        ...

    def take_handoffs(self) -> list[Handoff]:
        """What is to be sent now, in the order exported; parts that were lost come again."""
        ...

    def receive(self, handoff: bytes, peer: Any, tokens: Any, *, namespace: Any = None, items: Any = ()) -> Arrival:
        """A part that has come: of a new arrival, or of one of this prompt. `PeerError`: the peer is lost."""
        ...

    def refuse(self, handoff: bytes, peer: Any) -> None:
        """A part that has come and nobody waits for: its host is told."""
        ...

    def close(self, arrival: Arrival) -> None:
        """Nobody waits for it any more."""
        ...


class Handoffs:
    """The hand-offs of a core's requests, out and in.

    Args:
        seconds: of a lease.
        patience: seconds that one waits for room on the host, and for the next part.
        leave: called with a request that is computed: its slot and its blocks are to be given back.
        end: called with one that has ended, how, and with what error.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        remote: Remote,
        seconds: float,
        patience: float,
        leave: Callable[[Job], object],
        end: Callable[..., object],
    ):
        self._manager, self._remote, self._seconds, self._patience = manager, remote, seconds, patience
        self._leave, self._end = leave, end
        self._moved: dict[Job, None] = {}  # live, with something to tell
        self._leases: dict[str, Job] = {}  # whose parts go out, of requests that have ended, too
        self._ended: OrderedDict[Hashable, Any] = OrderedDict()  # requests, and the peers that they waited for

    # Out

    def moved(self, job: Job) -> None:
        """More of a live request is computed, or planned."""
        self._moved[job] = None

    def send(self, now: float) -> None:
        """Exports what is new, and gives what is ready to whoever sends it. After each plan."""
        for job in list(self._moved):
            del self._moved[job]
            if job.state is JobState.LIVE:
                try:
                    self._export(job, now)
                except (HandoffError, RequestError) as error:
                    self._end(job, "error", error)
        if not self._leases:
            return
        for handoff in self._remote.take_handoffs():
            job = self._leases.get(handoff.lease)
            if job is not None and job.lease == handoff.lease:
                self._give(job, handoff)
        self._manager.leases.expire()
        for lease in self._leases.keys() - self._manager.leases.active.keys():
            job = self._leases.pop(lease)
            if job.state is JobState.LEAVING and job.lease == lease:
                self._end(job, "error", HandoffError("lease", _OVER))

    def _export(self, job: Job, now: float) -> None:
        request = job.request
        assert request is not None
        if job.lease is not None and job.lease not in self._manager.leases.active:
            raise HandoffError("lease", _OVER)
        while True:
            handoff = self._remote.export(request, seconds=self._seconds, peer=job.prompt.export_to)
            job.lease = handoff.lease
            self._leases[handoff.lease] = job
            if handoff.last or not handoff.blocks:
                break  # else there may be more than go into one part
        if request.num_cached < job.goal:
            return
        if handoff.last:
            self._leave(job)
            return
        job.patience = min(job.patience, now + self._patience)
        if now >= job.patience:
            raise HandoffError("total", f"no room on the host for {handoff.total} blocks and a state")
        self._moved[job] = None  # until there is room

    def _give(self, job: Job, handoff: Handoff) -> None:
        give = job.prompt.export
        assert give is not None
        try:
            give(handoff.to_json())
        except BaseException as error:
            if job.state is not JobState.ENDED:
                told = error if isinstance(error, Exception) else RequestError(f"export raised {error!r}")
                self._end(job, "error", told)
            return
        if handoff.last and job.state is JobState.LEAVING:
            self._end(job, "handoff", lease=handoff.lease)

    def withdraw(self, job: Job) -> None:
        """Nobody is to read it: it has ended otherwise than by its hand-off."""
        if job.lease is not None:
            self._manager.acknowledge(job.lease)
            self._leases.pop(job.lease, None)

    def forget(self) -> None:
        """The manager was reset: there are no leases any more."""
        self._moved.clear()
        self._leases.clear()

    # In

    def receive(self, jobs: list[Job], part: bytes, now: float) -> bool:
        """A part of the prompt that these wait for: samples of one request. Whether it was of use.

        Raises: as `RemoteDriver.receive`; nothing has changed, but that nobody waits for a peer that is lost.
        """
        prompt, before = jobs[0].prompt, jobs[0].arrival
        if before is not None and before.is_over and before.lease == Handoff.from_json(part).lease:
            return False  # it has failed, and is admitted as it is
        space = dict(namespace=prompt.namespace, items=prompt.items)
        try:
            arrival = self._remote.receive(part, prompt.peer, prompt.tokens, **space)
        except PeerError:
            for job in jobs:
                job.patience = min(job.patience, now)
            raise
        if before is not None and before is not arrival:
            self._remote.close(before)  # its host has begun anew
        for job in jobs:
            job.arrival, job.patience = arrival, now + self._patience
        return True

    def refuse(self, name: Hashable, jobs: Sequence[Job], part: bytes) -> None:
        """A part of the prompt of a request that does not wait for it: the other host need not keep it."""
        peer = jobs[0].prompt.peer if jobs else self._ended.get(name)
        if peer is not None:
            with contextlib.suppress(HandoffError):  # anything may come
                self._remote.refuse(part, peer)

    def ended(self, job: Job) -> None:
        """All samples of a request have ended that waited for another host, or had: what comes of it is in vain."""
        if job.arrival is not None and not job.arrival.closed:
            self._remote.close(job.arrival)
        self._ended[job.id] = job.prompt.peer
        self._ended.move_to_end(job.id)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
