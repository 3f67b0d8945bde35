"""Live requests of which no step has computed anything yet: what they find in the cache when their turn comes.

At admission a request takes what is cached of its prompt then. Much of it may be computed by others before its first
chunk is scheduled, so `begin` looks again. And while another live request is just computing what it shares with a
newcomer, this one waits (`arrange`): the other one leaves a state where their prompts part (`Request.wanted`), from
which all who wait for it start. Nobody waits for longer than the other one makes progress: `schedule` skips a request
only in calls in which it offers tokens of the one it waits for. That one may be anywhere: preempted, aborted, released,
left out by the caller; then the newcomer goes on, or waits for the next.

Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import RequestError
from ..layout import CacheLayout
from .hits import load, usable
from .prefix.hashing import BlockHasher
from .prefix.node import MATCHABLE, Node, T
from .prefix.prefix_tree import PrefixMatch
from .prefix.token_ids import packed, token_ids
from .publishing import Publisher
from .request import Request, RequestState
from .request_book import RequestBook
from .tiered_cache import TieredCache
from .transfers import SLOT

__all__ = ["Newcomers", "Room", "follow_verified"]

Pending = tuple[Request, int]


class _Wait(NamedTuple):
    """Until a request has computed its first `tokens` tokens, and its state after them is kept."""

    owner: Request
    epoch: int
    tokens: int

    @property
    def lasts(self) -> bool:
        owner = self.owner
        here = owner.state is RequestState.LIVE and owner.epoch == self.epoch and owner.hasher is not None
        return here and owner.num_cached <= self.tokens

    @property
    def is_over(self) -> bool:
        """Whether the other one has come so far: if no state is kept there, nobody waits for that again."""
        owner = self.owner
        return owner.state is RequestState.LIVE and owner.epoch == self.epoch and owner.num_cached > self.tokens


class Room(NamedTuple):
    """What a step has: available device blocks of each rank, table entries, slot copies."""

    blocks: Sequence[int]
    entries: int
    copies: int


class Newcomers:
    """Matches requests again before their first chunk, and knows which of them wait for whom.

    Attributes:
        began: whether one has taken what it found since `at`.
    """

    def __init__(self, layout: CacheLayout, book: RequestBook, cache: TieredCache, publisher: Publisher):
        self._block, self._drafts, self._vocab_size = layout.block_tokens, layout.draft_tokens, layout.cfg.vocab_size
        self._book, self._cache, self._publisher = book, cache, publisher
        self.began = False
        self._planned = self._num_slots = 0
        self._here: dict[Request, int] = {}  # those that `arrange` was given
        self._pinned: set[Node] | None = None  # `book.pinned()`, which looks at all live requests
        self._computing: dict[bytes, Request] = {}  # who computes the block of this digest, or is to
        self._listed: dict[Request, tuple[int, list[bytes]]] = {}  # who is named there: its digests from a block on
        self._waits: dict[Request, _Wait] = {}
        self._passed: dict[Request, int] = {}  # tokens up to which they wait no more

    def forget(self, request: Request) -> None:
        """It gives up what it has: nobody waits for it any more."""
        self._unlist(request)
        self._waits.pop(request, None)
        self._passed.pop(request, None)

    # Who waits for whom

    @property
    def waiting(self) -> list[Request]:
        """Those that wait for others, as of the latest look at them."""
        return list(self._waits)

    def at(self, planned: int, num_slots: int) -> Newcomers:
        """Itself, after so many steps were planned, with slots for so many live requests."""
        self._planned, self._num_slots, self.began, self._pinned = planned, num_slots, False, None
        return self

    def arrange(self, prefills: list[Pending]) -> tuple[list[Pending], dict[Request, Request]]:
        """The order of the turns for chunks, and for whom some of them wait: these come before those."""
        snapshots = self._publisher.snapshots
        if not snapshots.junctions:
            return prefills, {}
        for owner, (first, digests) in [*self._listed.items()]:
            if owner.num_cached > (first + len(digests)) * self._block or owner.hasher is None:
                self._unlist(owner)
        self._here = here = dict(prefills)
        for request, _ in prefills:
            if (wait := self._waits.get(request)) is not None:
                if wait.lasts and request.last_step <= request.started and self._is_here(wait.owner):
                    continue
                del self._waits[request]
                if wait.is_over:
                    self._passed[request] = wait.tokens
            elif request in self._listed:
                continue
            self._look(request)
        if not self._waits:
            return prefills, {}
        order: dict[Request, int] = {}
        waits: dict[Request, Request] = {}
        for request, _ in prefills:
            if (wait := self._waits.get(request)) is not None:
                waits[request] = wait.owner
            path = [request]  # of who waits for whom, up to one whose turn has come
            while wait is not None and wait.owner not in order and wait.owner not in path:
                path.append(wait.owner)
                wait = self._waits.get(wait.owner)
            for each in reversed(path):
                if each in here:
                    order.setdefault(each, here[each])
        return list(order.items()), waits

    def waits_for(self, request: Request) -> Request | None:
        """For whom a request waits that has found more since it was looked at."""
        self._unlist(request)
        self._look(request)
        return self._waits[request].owner if request in self._waits else None

    def _look(self, request: Request) -> None:
        """Notes for whom a request waits, or that it is to compute its prompt itself."""
        hasher = request.hasher
        if hasher is None:
            return
        digests, block = hasher.digests, self._block
        limit = min(len(digests), (len(request.ids) - 1) // block)
        hit = request.num_cached // block
        if self._is_new(request):
            get = self._cache.tree.get
            for i in range(hit, limit):  # what a match would find
                node = get(digests[i])
                if node is None or node.state not in MATCHABLE:
                    break
                if node.has_near_state:
                    hit = i + 1
            owner = self._computing.get(digests[hit]) if hit < limit else None
            if owner is not None and owner is not request and owner.hasher is not None and self._is_here(owner):
                tokens = _common(owner.hasher.digests, digests, hit + 1, limit) * block
                lasts = owner.num_cached <= tokens and tokens > self._passed.get(request, 0)
                if lasts and self._has_spare_slot:
                    self._unlist(request)
                    self._waits[request] = _Wait(owner, owner.epoch, tokens)
                    if tokens not in owner.wanted:
                        owner.wanted.append(tokens)
                    return
        if request not in self._listed and hit < len(digests):
            own = digests[hit:]
            self._listed[request] = hit, own
            for digest in own:
                owner = self._computing.setdefault(digest, request)
                if owner is not request and not self._is_here(owner):
                    self._computing[digest] = request

    def _is_here(self, owner: Request) -> bool:
        """Whether it may be scheduled now: the caller may have left it out."""
        return owner in self._here or owner.num_pending == 1

    def _unlist(self, request: Request) -> None:
        computing = self._computing
        for digest in self._listed.pop(request, (0, ()))[1]:
            if computing.get(digest) is request:
                del computing[digest]

    def _is_new(self, request: Request) -> bool:
        """Whether nothing was computed for it since it became live, and all that it holds of its prompt is cached."""
        return (
            request.last_step <= request.started
            and len(request.nodes) * self._block == request.num_cached
            and request.slot not in self._cache.copies.slots
        )

    # What they find

    @property
    def available(self) -> list[int]:
        """Device blocks of each rank that are available now."""
        return self._cache.available_on

    def begin(self, request: Request, room: Room, left: Room) -> bool:
        """Gives a request whose first chunk may be scheduled now what is cached of its tokens by now.

        What no step with this `room` could take it leaves. Returns whether the step has room `left` for what it found:
        if not, nothing has changed.
        """
        hasher, tree = request.hasher, self._cache.tree
        if hasher is None or not self._is_new(request):
            return True
        known, had = len(request.ids), len(request.nodes)
        if request.ids.edits != request.looked_up:
            try:
                request.settle_changes()
            except RequestError:
                return True  # planning it says so
            known = follow_verified(request, hasher, self._vocab_size, self._drafts)
            request.looked_up = request.ids.edits
        digests = hasher.digests
        if had >= min(len(digests), (known - 1) // self._block) or tree.get(digests[had]) is None:
            return True
        match = tree.match(digests, known)
        hit = usable(match, T.HOST)
        if hit <= had:
            if len(match.path) > max(had, request.junction // self._block):
                request.junction = len(match.path) * self._block
            return True
        snapshot = match.path[hit - 1].snapshot
        assert snapshot is not None
        in_slot = snapshot.device > 0 and not self._cache.snapshot_blocks
        copies = 1 if in_slot else 0
        if hit >= room.entries or copies > room.copies:
            return True
        if hit >= left.entries or copies > left.copies:
            return False
        if in_slot and not snapshot.pins and not self._has_spare_slot:
            return True  # for the state until it is copied
        # What nobody else holds is available no more, and its first own block it needs besides.
        path, blocks = match.path[:hit], [*left.blocks]
        places = [n.depth for n in path[had:] if n.state.tier is not T.DEVICE or not n.refs]
        for place in (*places, *([hit] if len(request.blocks) <= hit else ())):
            blocks[place % len(blocks)] -= 1
        if min(blocks) < 0:
            return False
        self._take(request, match, hit)
        return True

    @property
    def _has_spare_slot(self) -> bool:
        """Whether a slot can keep a state, and all others that may become live find one, too."""
        if self._pinned is None:
            self._pinned = self._book.pinned()
        free = self._cache.num_slots_available(len(self._pinned))
        return free > self._num_slots - len(self._book.live)

    def _take(self, request: Request, match: PrefixMatch, hit: int) -> None:
        cache, tree, had = self._cache, self._cache.tree, len(request.nodes)
        path, node = match.path[:hit], match.path[hit - 1]
        found = [n.state.tier for n in path]
        tree.snapshots.pin(node)
        if not load(cache, path):
            tree.snapshots.unpin(node)
            return
        nodes = tree.take(match, hit, found, had=had)
        tree.release(request.nodes)
        if request.restores is not None:
            tree.snapshots.unpin(request.restores)
        request.restores, self._pinned = node, None
        assert node.snapshot is not None
        in_slot = node.snapshot.device > 0 and not cache.snapshot_blocks
        if not in_slot:
            tree.snapshots.unpin(node)
            request.restores = None
            if not cache.get_state(node.snapshot.device, request.slot, hit * self._block):
                cache.transfers.into(SLOT, node.snapshot.host, request.slot, hit * self._block)
        spare, own = request.blocks[had:hit], request.blocks[hit:]
        request.nodes, request.blocks = nodes, [n.block for n in nodes] + own
        request.junction = len(match.path) * self._block if len(match.path) > hit else 0
        request.num_cached = request.num_hit = hit * self._block
        if len(request.history) < request.num_cached:
            assert request.hasher is not None
            request.history = request.hasher.ids(request.num_cached)
        request.num_tabled, request.forked, request.started = 0, None, self._planned
        cache.release_blocks(spare)
        self.began = True


def follow_verified(request: Request, hasher: BlockHasher, vocab_size: int, drafts: int) -> int:
    """Makes the hasher's tokens those of the request that are certain to stand: computed, of the prompt, or sampled
    last. Returns how many it knows: one of them is left to compute.

    `drafts`: `draft_tokens` of the layout.
    """
    history, tokens = request.history, request.ids
    certain = max(request.num_prompt, len(history) + 1) if drafts else len(tokens)
    ids = history[:]
    try:
        ids += packed(token_ids(tokens[len(history) : certain], vocab_size))
        hasher.follow(ids)
    except RequestError:  # no ids: `plan_tokens` will say so
        ids = history
        hasher.follow(ids)
    hasher.truncate(len(ids))
    return len(tokens)


def _common(a: Sequence[bytes], b: Sequence[bytes], low: int, high: int) -> int:
    """How many leading digests two paths have in common, at least `low` and at most `high`."""
    high = min(high, len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
