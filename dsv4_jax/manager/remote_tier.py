"""What comes from another host: the prefix of a prompt that it has computed, to the host records here. Pure Python.

As with storage a move has two ends: `plan_reads` names pages of the peer and pages here that nobody else has,
`finish_reads` gets what arrived. In between the read stands in `Arrival.reads`, which makes the pages its own,
whatever happens: an arrival that is closed or late, even a `reset`, gives none of them to others before. What has
arrived whole joins the prefix tree, block after block, and the state behind the last one; then the request is admitted
as for any other hit. What has not come by then is computed. Who moves the bytes: `dsv4_jax.tiers.remote`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ..checks import shown
from ..errors import ContextLimitError, HandoffError, PlanError, RequestError
from ..layout import CacheLayout
from ..records import snapshot_layouts, state_pages
from .guard import Guard
from .handoff import Handoff
from .metrics import HandoffCounts
from .prefix.hashing import BlockHasher, HashSpec, MediaItem, Namespace, given_items
from .prefix.holds import Hold
from .prefix.node import MATCHABLE, Node, Pages, S, T
from .prefix.worth import kind_of
from .request_tokens import prompt_tokens
from .tiered_cache import TieredCache
from .transfers import BLOCK, SLOT

__all__ = ["Arrival", "Receives", "RemoteRead", "RemoteTier", "end_arrival"]


class RemoteRead(NamedTuple):
    """A record to be read from a peer.

    Attributes:
        scope: "block" or "slot" (a snapshot).
        index: of the block in its prompt, of a snapshot that of the block it stands behind.
        source: its pages there, in order.
        pages: pages here, as many; of a snapshot as many as one has here.
        sums: 16 bytes that vouch for each of the source's.
    """

    scope: str
    index: int
    source: Pages
    pages: Pages
    sums: tuple[bytes, ...]


class Receives(Protocol):
    """What a remote tier needs of its `KVCacheManager`. `reset` makes another `cache`."""

    guard: Guard
    handoffs: HandoffCounts
    cache: TieredCache
    layout: CacheLayout

    @property
    def hash_spec(self) -> HashSpec: ...

    @property
    def context_limit(self) -> int: ...

    @property
    def pool_limit(self) -> int: ...


@dataclasses.dataclass(eq=False, slots=True)
class Arrival:
    """A prompt whose prefix comes from another host. Made by `RemoteTier.expect`.

    Attributes:
        manager: whose pages it is read into, and which admits it.
        lease: of the sender, to be acknowledged when `is_over`.
        tokens: the prompt.
        namespace, items: as for `KVCacheManager.admit_request`.
        until: when the lease ends, by the clock here.
        failure: why no more of it will come; None if nothing went wrong so far.
        reason: that in a word, as `HandoffStats.ended` counts it.
        records: how many were read whole.
        reads: those under way: planned, and not finished. Who was broken off in `plan_reads` finds them here.
        asks: whether the part that came last was no use, since others before it were lost. The sender's
            `KVCacheManager.export_again(lease, announced)` makes good for them.
        closed: whether nobody waits for it any more.
        counted: whether its end is counted.
    """

    manager: Receives
    lease: str
    tokens: list[int]
    namespace: Namespace | None
    items: tuple[MediaItem, ...]
    until: float
    cache: TieredCache
    hold: Hold
    root: str
    digests: list[bytes]
    total: int
    pages: list[int] = dataclasses.field(default_factory=list)  # of the blocks announced
    sums: list[bytes] = dataclasses.field(default_factory=list)
    state: tuple[Pages, tuple[bytes, ...]] | None = None
    last: bool = False
    planned: int = 0  # blocks read or being read, or here
    state_planned: bool = False
    joined: int = 0  # blocks known to be in the tree
    landed: dict[int, int] = dataclasses.field(default_factory=dict)  # page of a block that waits to join
    landed_state: Pages = ()
    failure: str | None = None
    reason: str = "left"
    records: int = 0
    reads: dict[RemoteRead, None] = dataclasses.field(default_factory=dict)
    asks: bool = False
    closed: bool = False
    counted: bool = False

    @property
    def announced(self) -> int:
        """How many blocks hand-offs have announced so far."""
        return len(self.pages)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come, and no page is being written: time to acknowledge, and to admit it."""
        return not self.reads and (self.closed or self.failure is not None or self.is_complete)

    def fail(self, why: str, reason: str) -> None:
        """No more of it will come. The first reason stays."""
        if self.failure is None:
            self.failure, self.reason = why, reason

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here."""
        state = self.state is None or (self.state_planned and not self.landed_state)
        return self.last and self.joined == self.total and state


class RemoteTier:
    """The receiving side of a manager.

    Args:
        manager: with a host tier and a policy.
        clock: what leases are measured with, in seconds.

    Raises (all calls): `RequestError` for what is no arrival of this manager; nothing has changed.
    """

    def __init__(self, manager: Receives, *, clock: Callable[[], float] = time.monotonic):
        self._manager, self._clock = manager, clock
        self._holding: dict[Arrival, None] = {}
        # Pages of a state, by what it is called: of a host that drafts, and that does not, they may be others.
        self._states = {each.snapshot_fingerprint: state_pages(each, 0) for each in snapshot_layouts(manager.layout)}

    def expect(
        self,
        handoff: bytes,
        tokens: Iterable[int],
        *,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
    ) -> Arrival:
        """A prompt that another host tells of, to be read by `plan_reads`.

        Args:
            handoff: what the host sent: `Handoff.to_json` of its first part (or a later one: see `Arrival.asks`).
                Anything may be in it.
            tokens, namespace, items: of the request, from whoever sent it.

        Raises:
            HandoffError: it is no hand-off, not of this prompt in this namespace, of other weights or records, of no
                use here (no policy, no host tier, no room for all of it). Nothing has changed.
            ContextLimitError, PlanError, RequestError: as `KVCacheManager.admit_request`.
        """
        self._manager.guard.check()
        part, cache, layout = Handoff.from_json(handoff), self._manager.cache, self._manager.layout
        items = given_items(items)
        known, ids = prompt_tokens(tokens, layout.cfg.vocab_size)
        if len(known) > (limit := min(self._manager.context_limit, self._manager.pool_limit)):
            raise ContextLimitError("expected", len(known), limit)  # it could never be admitted
        hasher = BlockHasher.adopt(self._manager.hash_spec, ids, namespace=namespace, items=items)
        if part.block_fingerprint != layout.block_fingerprint:
            raise HandoffError("block_fingerprint", "records mean something else there")
        if not cache.caching or part.total + cache.snapshot_pages > cache.pages.num_total:
            raise HandoffError("total", f"no room on the host for {part.total} blocks and a state")
        if part.total > max(len(known) - 1, 0) // layout.block_tokens:
            raise HandoffError("total", f"{part.total} blocks, the prompt has {len(known)} tokens")
        cache.tree.name(hasher, 0, part.total)
        arrival = Arrival(
            self._manager,
            part.lease,
            known,
            namespace,
            items,
            self._clock() + part.seconds,
            cache,
            Hold(),
            hasher.root.hex(),
            hasher.digests[: part.total],
            part.total,
        )
        self._check_part(arrival, part)
        with self._manager.guard("expect"):
            arrival.hold = cache.tree.holds.open()
            self._holding[arrival] = None
            self._manager.handoffs.begin("received")
            self._take(arrival, part)
        return arrival

    def extend(self, arrival: Arrival, handoff: bytes) -> None:
        """Takes the next part of the same lease. One that came before changes nothing but how long the lease lasts.

        Nor does one before which others are missing: it sets `Arrival.asks`.

        Raises:
            HandoffError: as `expect`; or it is of another lease. Nothing has changed.
        """
        self._manager.guard.check()
        self._check(arrival)
        part = Handoff.from_json(handoff)
        self._check_part(arrival, part)
        with self._manager.guard("extend"):
            self._take(arrival, part)

    def plan_reads(self, arrival: Arrival) -> list[RemoteRead]:
        """What to read now: what was announced, and is neither here nor on its way here. In path order.

        Call it again after `extend` and after `finish_reads`, of any arrival. What lies on the device or the host is
        not read. Nor is what storage is bringing, or another arrival: then nothing behind it is either, yet.

        All of them stand in `Arrival.reads` until they are finished, so nothing is lost if the call is broken off when
        it had planned them, and its caller before it had noted them.
        """
        with self._manager.guard("plan_reads"):
            self._check(arrival)
            self._check_time(arrival)
            self._join(arrival)
            if arrival.closed or arrival.failure is not None:
                return []
            reads = self._plan_blocks(arrival) + self._plan_state(arrival)
            if reads:
                arrival.cache.receiving[arrival] = None
            arrival.reads.update(dict.fromkeys(reads))  # broken off before, there are no reads: `reset` frees the pages
            arrival.cache.landed.difference_update(page for read in reads for page in read.pages)
            return reads

    def finish_reads(self, arrival: Arrival, reads: Sequence[RemoteRead], done: Sequence[bool]) -> None:
        """The pages of these reads are not written any more, and whether each arrived whole.

        After the first that did not, no more of this arrival is read. If the call is broken off, call it again (after
        the `reset`, if one is needed): of reads that were ended before nothing changes.

        Raises:
            PlanError: these are no reads, or not as many answers.
        """
        try:
            ends = list(zip(reads, map(bool, done), strict=True))
        except (TypeError, ValueError) as error:
            raise PlanError(f"reads and what became of them are not two lists of one length: {error}") from error
        if wrong := [read for read, _ in ends if not isinstance(read, RemoteRead)]:
            raise PlanError(f"not a read of plan_reads: {shown(wrong[0])}")
        with self._manager.guard("finish_reads"):
            self._check(arrival)
            cache = self._manager.cache
            for read, arrived in ends:
                if read not in arrival.reads:
                    continue  # it was ended before
                if read.scope == BLOCK:
                    arrival.cache.arriving.discard(arrival.digests[read.index])
                del arrival.reads[read]
                if not arrived:
                    arrival.fail("a record did not arrive whole", "torn")
                if not arrived or arrival.closed or arrival.cache is not cache:
                    cache.pages.release(read.pages)
                    continue
                arrival.records += 1
                if read.scope == BLOCK and read.index < arrival.joined:  # computed here, or found, meanwhile
                    cache.pages.release(read.pages)
                    continue
                cache.landed.update(read.pages)
                if read.scope == BLOCK:
                    (arrival.landed[read.index],) = read.pages
                else:
                    arrival.landed_state = read.pages
            if not arrival.reads:
                cache.receiving.pop(arrival, None)
            self._check_time(arrival)
            self._join(arrival)

    def expire(self) -> None:
        """Lets go of all arrivals whose lease is over, whether or not somebody still waits for them."""
        with self._manager.guard("expire"):
            now = self._clock()
            for arrival in [a for a in self._holding if a.closed or a.until <= now]:
                del self._holding[arrival]
                self._check_time(arrival)
                _count(arrival)
                arrival.cache.tree.holds.end(arrival.hold)
                _let_go(arrival)

    def fail(self, arrival: Arrival, why: str, reason: str = "peer") -> None:
        """No more of it will come. What is under way may still arrive. `reason`: as `Arrival.reason`."""
        with self._manager.guard("fail"):
            self._check(arrival)
            arrival.fail(why, reason)

    def close(self, arrival: Arrival) -> None:
        """Nobody waits for it any more: what has joined may be evicted again. `KVCacheManager.admit_remote` does it.

        Reads that are under way end as before. Does nothing again.
        """
        with self._manager.guard("close"):
            self._check(arrival)
            end_arrival(arrival, self._manager.cache)

    def _check(self, arrival: Arrival) -> None:
        if not isinstance(arrival, Arrival) or arrival.manager is not self._manager:
            raise RequestError(f"not an arrival of this manager: {shown(type(arrival))}")

    # Parts

    def _check_part(self, arrival: Arrival, part: Handoff) -> None:
        for name, mine in (("lease", arrival.lease), ("root", arrival.root), ("total", arrival.total)):
            if getattr(part, name) != mine:
                why = "other weights, another namespace or block size" if name == "root" else f"not {_short(mine)}"
                raise HandoffError(name, f"{why}: {_short(getattr(part, name))}")
        if (pages := self._states.get(part.snapshot_fingerprint)) is None:
            raise HandoffError("snapshot_fingerprint", "records mean something else there")
        if part.state and len(part.state) != pages:
            raise HandoffError("state", f"{len(part.state)} pages, a snapshot has {pages}")
        digest = arrival.digests[part.end - 1].hex() if part.end else arrival.root
        if part.digest != digest:
            raise HandoffError("digest", "not of this prompt")

    def _take(self, arrival: Arrival, part: Handoff) -> None:
        new, blocks = len(arrival.pages) - part.first, len(part.blocks)
        arrival.until = max(arrival.until, self._clock() + part.seconds)
        arrival.asks = new < 0
        if arrival.asks:
            return
        arrival.pages += part.blocks[new:]
        arrival.sums += part.sums[new:blocks] if new < blocks else ()
        if part.state and arrival.state is None:
            arrival.state = part.state, part.sums[blocks:]
        arrival.last |= part.last

    def _check_time(self, arrival: Arrival) -> None:
        if arrival.cache is not self._manager.cache:
            arrival.fail("the manager was reset", "reset")
        elif not arrival.is_complete and self._clock() >= arrival.until:
            arrival.fail("its lease has ended", "time")

    # Reads

    def _plan_blocks(self, arrival: Arrival) -> list[RemoteRead]:
        cache, tree, digests = arrival.cache, arrival.cache.tree, arrival.digests
        missing: list[int] = []
        for i in range(arrival.planned, len(arrival.pages)):
            node = tree.get(digests[i])
            if digests[i] in cache.arriving or (node is not None and node.state not in MATCHABLE):
                break  # on its way here
            missing.append(i)
        if not missing:
            return []
        pages = cache.landing_pages(missing)
        if len(pages) < len(missing):
            cache.pages.release(pages)
            arrival.fail(f"{len(missing)} pages of the host are not free", "room")
            return []
        arrival.planned = missing[-1] + 1
        cache.arriving.update(digests[i] for i in missing)
        cache.landed.update(pages)
        return [
            RemoteRead(BLOCK, i, (arrival.pages[i],), (page,), (arrival.sums[i],))
            for i, page in zip(missing, pages, strict=True)
        ]

    def _plan_state(self, arrival: Arrival) -> list[RemoteRead]:
        if arrival.state is None or arrival.state_planned or arrival.planned < arrival.total:
            return []
        cache, node = arrival.cache, arrival.cache.tree.get(arrival.digests[-1])
        arrival.state_planned = True
        if node is not None and node.snapshot is not None and node.has_near_state:
            if node.snapshot.host:
                cache.tree.holds.keep_state(arrival.hold, node)
            return []
        pages = cache.landing_snapshot_pages()
        if not pages:
            arrival.fail(f"{cache.snapshot_pages} pages of the host are not free", "room")
            return []
        cache.landed.update(pages)
        source, sums = arrival.state
        return [RemoteRead(SLOT, arrival.total - 1, source, pages, sums)]

    # What has arrived

    def _join(self, arrival: Arrival) -> None:
        """Puts what has arrived, or came here otherwise, into the tree as far as its beginning is there."""
        cache = arrival.cache
        if cache is not self._manager.cache or arrival.closed:
            return
        while arrival.joined < len(arrival.pages):
            i = arrival.joined
            node = self._joined(arrival, i)
            if node is None:
                break
            if node.host:
                cache.tree.holds.keep(arrival.hold, node)
            arrival.joined = i + 1
            arrival.planned = max(arrival.planned, i + 1)
        if arrival.landed_state and arrival.joined == arrival.total:
            self._join_state(arrival)
        if arrival.failure is not None:
            _let_go(arrival)

    def _joined(self, arrival: Arrival, i: int) -> Node | None:
        """The node of block i, on the host or nearer; None if it is not there (yet)."""
        cache, tree = arrival.cache, arrival.cache.tree
        parent = tree.get(arrival.digests[i - 1]) if i else None
        if i and (parent is None or parent.state.tier < T.HOST):
            arrival.fail("what comes before it has left the cache", "evicted")
            return None
        node, page = tree.get(arrival.digests[i]), arrival.landed.get(i)
        if node is not None and node.state not in MATCHABLE:
            return None  # on the move: later
        if page is None:
            return node if node is not None and node.state.tier >= T.HOST else None
        del arrival.landed[i]
        cache.landed.discard(page)
        if node is None:
            return tree.add_host(parent, arrival.digests[i], page)
        if node.state is S.STORAGE:
            tree.moves.begin_fetch(node, page)
            tree.moves.complete(node)
        else:
            cache.pages.release([page])
        return node

    def _join_state(self, arrival: Arrival) -> None:
        cache, pages = arrival.cache, arrival.landed_state
        node = cache.tree.get(arrival.digests[-1])
        arrival.landed_state = ()
        cache.landed.difference_update(pages)
        if node is None or node.state.tier < T.HOST or node.has_near_state:
            cache.pages.release(pages)
            return
        block = cache.tree.block_tokens
        kind = kind_of(arrival.total * block, len(arrival.tokens), block)
        cache.tree.snapshots.attach(node, T.HOST, pages, kind=kind)
        cache.tree.holds.keep_state(arrival.hold, node)


def end_arrival(arrival: Arrival, cache: TieredCache) -> None:
    """Ends its hold, and gives back what waits to join. `cache`: the manager's now."""
    _count(arrival)
    arrival.closed = True
    if arrival.cache is cache:
        cache.tree.holds.end(arrival.hold)
        _let_go(arrival)


def _count(arrival: Arrival) -> None:
    """Counts how it has ended, once."""
    if not arrival.counted:
        arrival.counted = True
        whole = arrival.is_complete and arrival.failure is None
        arrival.manager.handoffs.end("received", "done" if whole else arrival.reason)


def _let_go(arrival: Arrival) -> None:
    """Gives back the pages of what has arrived and waits to join."""
    pages = [*arrival.landed.values(), *arrival.landed_state]
    arrival.landed, arrival.landed_state = {}, ()
    arrival.cache.landed.difference_update(pages)
    arrival.cache.pages.release(pages)


def _short(value: object) -> str:
    return str(value)[:16]
