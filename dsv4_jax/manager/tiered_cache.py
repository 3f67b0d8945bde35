"""The units of all tiers and the prefixes cached in them: what a request takes its blocks from. Pure Python.

Live requests hold blocks and slots of their own or share cached ones; everything else is free or cached.
A cached unit is given away when nothing is free: to a lower tier if there is room, else its bytes are lost.
Device slots that no request lives in hold snapshots (window and compressor state at a block boundary):
the `num_snapshots` extra ones of the cache's size, and those that are idle. Or (`CachePolicy.states` is "blocks")
snapshots lie in blocks, several for each, and compete with cached blocks for the device's memory as on the host.

Along a pool axis (`CacheSize.pool_ranks`) blocks and pages are of ranks: block i of a path, and its page on the host,
of rank i mod n. So who takes units says for which places, and a block that is found again is where it is to be. A state
is on all ranks' devices; its pages on the host are those of one rank.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from ..checks import INT32_MAX
from ..errors import ConfigError, NoFreeSlotError, OutOfBlocksError
from ..events import EventLog
from ..layout import CacheLayout, CacheSize
from ..records import state_blocks, state_pages
from .allocator import BlockAllocator
from .pending import PendingCopies
from .policies import CachePolicy
from .prefix.eviction import Freed
from .prefix.node import Node, Pages, T
from .prefix.prefix_tree import PrefixTree
from .transfers import BLOCK, SLOT, TransferQueue

__all__ = ["HostSize", "Landing", "PageReceiver", "TieredCache"]


_FIRST_UNIT = INT32_MAX  # no slot is beyond it


class HostSize(NamedTuple):
    """The host tier: pages for blocks and states alike, as many as `dsv4_jax.init_host_cache` is asked for.

    A block takes one, a state `dsv4_jax.records.state_pages` of them, wherever they are. Along a pool axis: of each
    rank.
    """

    num_pages: int

    @classmethod
    def of(cls, layout: CacheLayout, num_blocks: int, num_snapshots: int = 0) -> HostSize:
        """The pages that so many blocks and snapshots take. (Which of them fill these is not laid down.)"""
        return cls(num_blocks + num_snapshots * state_pages(layout, 0))


class Landing(Protocol):
    """A record that is being written to these pages."""

    @property
    def pages(self) -> Pages: ...


class PageReceiver(Protocol):
    """Whom such records are read for."""

    @property
    def reads(self) -> Collection[Landing]: ...


class TieredCache:
    """The units and cached prefixes of device and host, and what is to move between them.

    Args:
        policy: None: nothing is cached.
        host: None: there is no host tier.
        persists: whether what comes to the host is listed for storage.
    """

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        policy: CachePolicy | None = None,
        host: HostSize | None = None,
        events: EventLog | None = None,
        *,
        persists: bool = False,
    ):
        self.policy = policy
        self.caching = policy is not None
        self.ranks = size.pool_ranks
        self.blocks = BlockAllocator(size.total_blocks, ranks=self.ranks)
        self.slots = BlockAllocator(size.num_slots + size.num_snapshots, pool="slot")
        pages = host.num_pages * self.ranks if host is not None else 0
        self.pages = BlockAllocator(pages, pool="host", ranks=self.ranks)
        self.snapshot_pages = state_pages(layout, 0)
        self.snapshot_blocks = state_blocks(layout) if policy is not None and policy.states == "blocks" else 0
        if self.snapshot_blocks and self.ranks > 1:
            raise ConfigError("cache policy: states", "lie in slots along a pool axis: a state is on all of its ranks")
        self.state_blocks: dict[int, list[int]] = {}  # of each state in blocks, by its unit: beyond all slots
        self.transfers = TransferQueue()
        self.copies = PendingCopies()
        self.fetching: dict[Pages, Node] = {}  # where states on their way from storage land, and whose they are
        self.receiving: dict[PageReceiver, None] = {}  # whom records of another host are being read for
        self.arriving: set[bytes] = set()  # digests of blocks among these records
        self.landed: set[int] = set()  # pages that hold such records, and wait to join the tree
        self.failures: collections.Counter[str] = collections.Counter()
        choices = policy or CachePolicy()
        self.tree = PrefixTree(
            layout.block_tokens,
            eviction=choices.eviction,
            host=self.pages.num_total > 0,
            moves_down=choices.write.moves_when_evicted,
            events=events,
            persists=persists,
            snapshot_blocks=self.snapshot_pages,
            backup_after=choices.write.backup_after if self.pages.num_total else None,
            ranks=self.ranks,
            share_of=choices.shares.share_of if choices.shares is not None else None,
            capacity={T.DEVICE: self._device_capacity, T.HOST: self.pages.num_total},
        )

    @property
    def _device_capacity(self) -> int:
        """The device's blocks and slots, these in blocks of as many bytes as a state has on the host."""
        return self.blocks.num_total + (0 if self.snapshot_blocks else self.slots.num_total * self.snapshot_pages)

    # Device units

    @property
    def num_available(self) -> int:
        """Device blocks available: free, or cached and unreferenced."""
        return self.blocks.num_free + sum(self._evictable_on())

    def _evictable_on(self) -> list[int]:
        """How many device blocks of each rank can be given away."""
        if not self.snapshot_blocks:
            return self.tree.evictable_on()
        # Of pinned states none, wherever these lie: some may be counted several times.
        states = max(self.tree.snapshots.count(T.DEVICE) - self.tree.nodes.pins, 0)
        return [self.tree.evictable(T.DEVICE) + states * self.snapshot_blocks]

    def num_slots_available(self, pinned: int) -> int:
        """Device slots available when the snapshots of so many slots cannot be given away."""
        if self.snapshot_blocks:
            return self.slots.num_free
        return self.slots.num_free + self.tree.snapshots.count(T.DEVICE) - pinned

    @property
    def available_on(self) -> list[int]:
        """How many device blocks are available on each rank."""
        return [free + idle for free, idle in zip(self.blocks.free_on, self._evictable_on(), strict=True)]

    def shortage(self, places: Sequence[int], freed: Sequence[int] = ()) -> OutOfBlocksError | None:
        """What `acquire_blocks(places)` would raise, if the blocks of the places `freed` were free besides.

        Changes nothing.
        """
        return self.blocks.shortage(places, self._evictable_on(), freed)

    def acquire_blocks(self, places: Sequence[int]) -> list[int]:
        """Takes device blocks for these places in requests, all or none. Raises `OutOfBlocksError`."""
        if len(places) and self.blocks.shortage(places):
            if error := self.shortage(places):
                raise error
            self._make_room(places)
        return self.blocks.acquire_at(places)

    def acquire_slot(self) -> int:
        """A slot, a snapshot's if none is free. Raises `NoFreeSlotError`."""
        if not (slot := self.try_slot()):
            raise NoFreeSlotError(self.slots.num_total)
        return slot

    def try_slot(self) -> int:
        """A slot, a snapshot's if none is free; 0 if there is neither."""
        if self.slots.num_free or (not self.snapshot_blocks and self._evict_snapshot()):
            return self.slots.acquire(1)[0]
        return 0

    # States on the device: a unit is a slot, or the first of its blocks, counted from behind the slots on

    def try_state(self) -> int:
        """A unit for a snapshot, if need be that of another; 0 if there is none."""
        if not self.snapshot_blocks:
            return self.try_slot()
        places = range(self.snapshot_blocks)
        if self.shortage(places):
            return 0
        blocks = self.acquire_blocks(places)
        unit = _FIRST_UNIT + blocks[0]
        self.state_blocks[unit] = blocks
        return unit

    def release_states(self, units: Iterable[int]) -> None:
        """Gives back units of snapshots."""
        for unit in units:
            if unit > _FIRST_UNIT:
                self.blocks.release(self.state_blocks.pop(unit))
            else:
                self.slots.release([unit])

    def put_state(self, slot: int, unit: int, tokens: int) -> None:
        """Queues the way of a slot's state, after so many tokens, to a unit of blocks."""
        self.transfers.put(slot, self.state_blocks[unit], tokens)

    def get_state(self, unit: int, slot: int, tokens: int) -> bool:
        """Queues the way of the state in a unit of blocks to a slot. False: it is in a slot, and nothing is queued."""
        if unit <= _FIRST_UNIT:
            return False
        self.transfers.get(self.state_blocks[unit], slot, tokens)
        return True

    def copy_out_state(self, unit: int, pages: Pages, tokens: int) -> None:
        """Queues the way of a state on the device to pages of the host."""
        if unit > _FIRST_UNIT:
            self.transfers.spill(self.state_blocks[unit], pages)
        else:
            self.transfers.out(SLOT, unit, pages, tokens)

    def release_blocks(self, blocks: Iterable[int]) -> None:
        """Gives back blocks that the tree does not hold, once nothing is to be copied from them any more."""
        self.blocks.release(self.copies.release_blocks(blocks))

    def release_slot(self, slot: int) -> None:
        self.slots.release(self.copies.release_slots([slot]))

    def end_copies(self) -> None:
        """The pending copies are in a plan, or called off."""
        blocks, slots = self.copies.clear()
        self.blocks.release(blocks)
        self.slots.release(slots)

    def give_back(self, freed: Freed) -> None:
        """Takes units that the tree has let go of back into their pools."""
        self.blocks.release(freed.blocks)
        self.release_states(freed.snapshots)
        self.pages.release(freed.pages)

    @property
    def _moves_down(self) -> bool:
        """Whether a block that is evicted from the device moves to the host."""
        return self.policy is not None and self.policy.write.moves_when_evicted and self.pages.num_total > 0

    def _make_room(self, places: Sequence[int]) -> None:
        """Makes device blocks free for these places, for which enough are available."""
        if self.snapshot_blocks and self.tree.snapshots.count(T.DEVICE):
            while self.blocks.num_free < len(places):
                self._evict_unit()
            return
        if self.ranks == 1 and self._evict_blocks(len(places) - self.blocks.num_free):
            return
        # One at a time: of several ranks, as the order decides where the next one is. And some have blocks below them
        # that are on their way from or to storage, and no room on the host: those are lost.
        while self.blocks.shortage(places):
            self._evict_one()

    def _evict_unit(self) -> None:
        """Makes the block or the state leave the device that comes first by the order of both."""
        blocks, states = self.tree.queues.blocks[T.DEVICE], self.tree.queues.snapshots[T.DEVICE]
        block, state = blocks.first(), states.first()
        if state is None or state.snapshot is None:
            first = False
        elif block is None:
            first = True
        elif self._moves_down:  # nothing is lost: the oldest
            first = state.snapshot.last_used <= block.last_access
        else:
            first = states.key(state) < blocks.key(block)
        if not (first and self._evict_snapshot()) and not self._evict_blocks(1) and not self._evict_snapshot():
            self.give_back(self.tree.moves.retract(self.tree.evictor.device_leaf()))

    def _evict_one(self) -> None:
        if not self._evict_blocks(1):
            self.give_back(self.tree.moves.retract(self.tree.evictor.device_leaf()))

    def _evict_blocks(self, missing: int) -> bool:
        """Whether so many have left the device. Along a pool axis: `missing` is 1."""
        room: list[int] = []
        if self._moves_down:
            room = self.try_pages(range(missing)) if self.ranks == 1 else self._page_of_next()
        try:
            eviction = self.tree.evictor.evict(T.DEVICE, missing, room)
        except OutOfBlocksError:
            self.pages.release(room)
            return False
        self.give_back(eviction)
        self.pages.release(eviction.unused)
        for move in eviction.moves:
            self.transfers.out(BLOCK, move.source, move.destination)
            self.give_back(self.tree.moves.complete(move.node))
        return True

    def _page_of_next(self) -> list[int]:
        """A page of the rank of the block that leaves the device next; none if there is none, or it needs none."""
        queue = self.tree.queues.blocks[T.DEVICE]
        if (node := queue.first()) is None or node.host:
            return []
        room = self.try_pages([node.depth])
        if queue.first() is node:
            return room
        self.pages.release(room)  # what made room has changed who is next
        return []

    def _evict_snapshot(self) -> bool:
        """Whether a slot is free now, or the blocks of a state."""
        room = self.try_snapshot_pages() if self.tree.snapshots.count(T.DEVICE) else ()
        try:
            eviction = self.tree.snapshots.evict(T.DEVICE, 1, [room] if room else [])
        except OutOfBlocksError:
            self.pages.release(room)
            # Of one whose node has left the host to make room.
            return self.slots.num_free > 0 if not self.snapshot_blocks else False
        for node, unit, pages in eviction.moves:
            self.copy_out_state(unit, pages, (node.depth + 1) * self.tree.block_tokens)
        self.release_states(eviction.slots)
        for pages in eviction.unused:
            self.pages.release(pages)
        return True

    # Pages of the host

    def try_pages(self, places: Sequence[int]) -> list[int]:
        """Pages of the host for these places, or for the first of them, those of what leaves it first among them."""
        if self.ranks == 1:
            missing = min(len(places), self.pages.num_total) - self.pages.num_free
            if missing > 0:
                self.give_back(self.tree.host.evict(missing))
            return self.pages.acquire_at(places[: self.pages.num_free])
        room: list[int] = []
        for place in places:
            while error := self.pages.shortage([place]):
                if not self._evict_page():
                    break
            if error:
                break
            room += self.pages.acquire_at([place])
        return room

    def _evict_page(self) -> bool:
        """Whether another page of the host is free now, of whatever rank."""
        freed = self.tree.host.evict(1)
        self.give_back(freed)
        return len(freed.pages) > 0

    def try_state_pages(self, count: int) -> Pages:
        """The pages for a state, as `try_pages` finds them: all or none."""
        return self._all_or_none(count, self.try_pages)

    def try_snapshot_pages(self) -> Pages:
        """The pages for a snapshot, as `try_pages` finds them: all or none."""
        return self.try_state_pages(self.snapshot_pages)

    def landing_pages(self, places: Sequence[int]) -> list[int]:
        """Pages as `try_pages` finds them, none that a copy between device and host still waits to read or write.

        What comes from storage lands at any time: before such a copy, though it was asked for later.
        """
        busy, room = self.transfers.pages(), self.try_pages(places)
        kept: list[list[int]] = [[] for _ in range(self.ranks)]
        passed: list[int] = []
        for place, page in zip(places, room, strict=False):
            (passed if page in busy else kept[place % self.ranks]).append(page)
        for page in passed:  # others of its rank instead, as far as there are free ones: these may be passed, too
            place = self.pages.rank_of(page)
            if not self.pages.shortage([place]):
                others = self.pages.acquire_at([place])
                (passed if others[0] in busy else kept[place]).extend(others)
        landing: list[int] = []
        for place in places:
            if not kept[place % self.ranks]:
                break
            landing.append(kept[place % self.ranks].pop(0))
        self.pages.release(passed + [page for pages in kept for page in pages])
        return landing

    def landing_snapshot_pages(self) -> Pages:
        """The pages for a snapshot, as `landing_pages` finds them: all or none."""
        return self._all_or_none(self.snapshot_pages, self.landing_pages)

    def _all_or_none(self, count: int, take: Callable[[Sequence[int]], list[int]]) -> Pages:
        """Pages of the rank that has most free."""
        if self.pages.num_total // self.ranks < count:
            return ()
        while self.ranks > 1 and max(self.pages.free_on) < count and self._evict_page():
            pass
        free = self.pages.free_on
        pages = take([free.index(max(free))] * count)
        if len(pages) < count:
            self.pages.release(pages)
            return ()
        return tuple(pages)

    @property
    def is_waiting(self) -> bool:
        """Whether copies were asked for that are not queued on the device yet."""
        return not self.transfers.have_run(self.transfers.asked)

    def keep_watermark(self) -> None:
        """Evicts from the host what the policy wants to be free there."""
        if self.policy is not None and self.pages.num_total:
            excess = self.policy.watermark.excess(self.pages.num_free, self.pages.num_total)
            if excess:
                self.give_back(self.tree.host.evict(excess))

    def back_up(self) -> None:
        """Queues the copies to the host that the write policy wants, as far as there is room.

        The coldest first, as these leave the device next; of one path its beginning. A copy makes room only of
        colder ones: neither of one queued here nor of its own path; and none of what the watermark keeps free. What
        finds no room is listed again at its next hit.
        """
        if self.policy is None or not self.pages.num_total:
            return
        nodes = self.tree.wanted.pop_backups(len(self.tree))
        nodes.sort(key=lambda node: (node.last_access, node.depth))
        room: list[int] = []
        kept_free = self.policy.watermark.kept_free(self.pages.num_total)
        for node in nodes:
            if self.pages.num_free <= kept_free and not self._evict_colder(node):
                break
            while (full := self.pages.shortage([node.depth])) and self._evict_colder(node):
                pass
            if full:
                break
            room += self.pages.acquire_at([node.depth])
        for node, page in zip(nodes, room, strict=False):
            self.tree.moves.begin_backup(node, page)
            self.transfers.out(BLOCK, node.block, page)
            self.tree.moves.complete(node)

    def _evict_colder(self, node: Node) -> bool:
        """Evicts what leaves the host before this node's copy would."""
        freed = self.tree.host.evict_colder(node)
        if freed is None:
            return False
        self.give_back(freed)
        return True

    @property
    def reading(self) -> list[int]:
        """Pages that records of another host are being written to: those of `Arrival.reads`, and nowhere else noted."""
        return [page for arrival in self.receiving for read in arrival.reads for page in read.pages]

    def keep_reading(self, before: TieredCache) -> None:
        """Takes over, while all is free, the pages that are being written for the cache before a reset."""
        if reading := set(before.reading):
            ids = self.pages.acquire(self.pages.num_total)
            self.receiving = {arrival: None for arrival in before.receiving if arrival.reads}
            self.pages.release([page for page in ids if page not in reading])

    # The whole device

    def evict_all(self) -> None:
        """Takes every cached unit off the device: to the host as far as there is room."""
        while self.tree.snapshots.count(T.DEVICE) and self._evict_snapshot():
            pass
        if self.ranks == 1 and (count := self.tree.evictable(T.DEVICE)) and self._evict_blocks(count):
            return
        while self.tree.evictable(T.DEVICE):
            self._evict_one()

    def resize(self, size: CacheSize) -> None:
        """Other numbers of device units; none may be held. Raises `PoolError`."""
        self.blocks.resize(size.total_blocks)
        self.slots.resize(size.num_slots + size.num_snapshots)
        self.tree.owners.resize(T.DEVICE, self._device_capacity)
