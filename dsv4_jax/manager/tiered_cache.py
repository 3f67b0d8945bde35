"""The units of all tiers and the prefixes cached in them: what a request takes its blocks from. Pure Python.

Live requests hold blocks and slots of their own or share cached ones; everything else is free or cached.
A cached unit is given away when nothing is free: to a lower tier if there is room, else its bytes are lost.
Device slots that no request lives in hold snapshots (window and compressor state at a block boundary):
the `num_snapshots` extra ones of the cache's size, and those that are idle.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import NoFreeSlotError, OutOfBlocksError
from ..layout import CacheLayout, CacheSize
from ..records import state_pages
from .block_pool import BlockPool
from .pending import PendingCopies
from .policies import CachePolicy
from .prefix.events import EventLog
from .prefix.eviction import Freed
from .prefix.node import Node, T
from .prefix.prefix_tree import PrefixTree
from .transfers import BLOCK, SLOT, TransferQueue, Transfers

__all__ = ["HostSize", "TieredCache"]


class HostSize(NamedTuple):
    """Records of the host tier.

    Block record b is page b of the host's memory; snapshot records are runs of pages behind these. The state of a
    request that is preempted within a block takes as many snapshot records as its pages fill.
    """

    num_blocks: int
    num_snapshots: int = 0

    def num_pages(self, layout: CacheLayout) -> int:
        """Pages that these records take: what `dsv4_jax.init_host_cache` is to be asked for."""
        return self.num_blocks + self.num_snapshots * state_pages(layout, 0)


class TieredCache:
    """See the module.

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
        self.blocks = BlockPool(size.num_blocks)
        self.slots = BlockPool(size.num_slots + size.num_snapshots, pool="slot")
        host = host or HostSize(0, 0)
        self._pages_before, self._pages_each = host.num_blocks, state_pages(layout, 0)
        self.host_blocks = BlockPool(host.num_blocks, pool="host")
        self.host_snapshots = BlockPool(host.num_snapshots, pool="host snapshot")
        self.transfers = TransferQueue()
        self.copies = PendingCopies()
        self.due: list[Transfers] = []  # stages of steps that have not been gone through yet, in order
        self.fetching: dict[int, Node] = {}  # host snapshot records on their way from storage, and whose
        self.failures: collections.Counter[str] = collections.Counter()
        choices = policy or CachePolicy()
        self.tree = PrefixTree(
            layout.block_tokens, order=choices.order, host=host.num_blocks > 0,
            moves_down=choices.write.moves_when_evicted, events=events, persists=persists,
            snapshot_blocks=-(-layout.bytes_per_slot // max(layout.bytes_per_block, 1)),
            backup_after=choices.write.backup_after if host.num_blocks else None,
        )  # fmt: skip

    # Device units

    @property
    def num_available(self) -> int:
        """Device blocks available: free, or cached and unreferenced."""
        return self.blocks.num_free + self.tree.evictable(T.DEVICE)

    def num_slots_available(self, pinned: int) -> int:
        """Device slots available when the snapshots of so many slots cannot be given away."""
        return self.slots.num_free + self.tree.snapshots.count(T.DEVICE) - pinned

    def can_acquire(self, count: int, more: int = 0) -> bool:
        """Whether `acquire_blocks(count)` would succeed with `more` free blocks besides. Changes nothing."""
        return count <= self.num_available + more

    def acquire_blocks(self, count: int) -> list[int]:
        """Device blocks, all or none. Raises `OutOfBlocksError`."""
        if count > self.blocks.num_free and not self._make_room(count):
            raise OutOfBlocksError(count, self.num_available, self.blocks.num_total)
        return self.blocks.acquire(count)

    def acquire_slot(self) -> int:
        """A slot, a snapshot's if none is free. Raises `NoFreeSlotError`."""
        if not (slot := self.try_slot()):
            raise NoFreeSlotError(self.slots.num_total)
        return slot

    def try_slot(self) -> int:
        """A slot, a snapshot's if none is free; 0 if there is neither."""
        return self.slots.acquire(1)[0] if self.slots.num_free or self._evict_snapshot() else 0

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
        self.slots.release(freed.snapshots)
        self.host_blocks.release(freed.host_blocks)
        self.host_snapshots.release(freed.host_snapshots)

    @property
    def _moves_down(self) -> bool:
        """Whether a block that is evicted from the device moves to the host."""
        return self.policy is not None and self.policy.write.moves_when_evicted and self.host_blocks.num_total > 0

    def _make_room(self, count: int) -> bool:
        """Whether so many device blocks are free now; if not, nothing has changed."""
        if count > self.num_available:
            return False
        if not self._evict_blocks(count - self.blocks.num_free):
            # Some have blocks below them that are on their way from or to storage, and no room on the host: those are
            # lost.
            while count > self.blocks.num_free:
                if not self._evict_blocks(1):
                    self.give_back(self.tree.moves.retract(self.tree.evictor.device_leaf()))
        return True

    def _evict_blocks(self, missing: int) -> bool:
        room: list[int] = []
        if self._moves_down:
            room = self.try_host_blocks(missing)
        try:
            eviction = self.tree.evictor.evict(T.DEVICE, missing, room)
        except OutOfBlocksError:
            self.host_blocks.release(room)
            return False
        self.give_back(eviction)
        self.host_blocks.release(eviction.unused)
        for move in eviction.moves:
            self.transfers.out(BLOCK, move.source, move.destination)
            self.give_back(self.tree.moves.complete(move.node))
        return True

    def _evict_snapshot(self) -> bool:
        room = self.try_host_snapshots(1) if self.tree.snapshots.count(T.DEVICE) else []
        try:
            eviction = self.tree.snapshots.evict(T.DEVICE, 1, room)
        except OutOfBlocksError:
            self.host_snapshots.release(room)
            return False
        for node, device, host in eviction.moves:
            tokens = (node.depth + 1) * self.tree.block_tokens
            self.transfers.out(SLOT, device, self.snapshot_pages(host), tokens)
        self.slots.release(eviction.units)
        self.host_snapshots.release(eviction.unused)
        return True

    # Host units

    def try_host_blocks(self, count: int) -> list[int]:
        """Up to `count` host block records, cached ones that leave first among them."""
        missing = min(count, self.host_blocks.num_total) - self.host_blocks.num_free
        for fewer in (missing, 1) if missing > 0 else ():
            try:
                self.give_back(self.tree.evictor.evict(T.HOST, fewer))
                break
            except OutOfBlocksError:
                pass
        return self.host_blocks.acquire(min(count, self.host_blocks.num_free))

    def landing_blocks(self, count: int) -> list[int]:
        """As `try_host_blocks`, none that a copy between device and host still waits to read or write.

        What comes from storage lands at any time: before such a copy, though it was asked for later.
        """
        return self._settled(BLOCK, self.try_host_blocks, self.host_blocks, count)

    def landing_snapshots(self, count: int) -> list[int]:
        """As `landing_blocks`, of host snapshot records."""
        return self._settled(SLOT, self.try_host_snapshots, self.host_snapshots, count)

    def _settled(self, scope: str, take: Callable[[int], list[int]], pool: BlockPool, count: int) -> list[int]:
        busy = self.busy_records(scope)
        room = take(count)
        kept = [record for record in room if not self._is_among(scope, record, busy)]
        passed = [record for record in room if self._is_among(scope, record, busy)]
        while passed and len(kept) < count and pool.num_free:  # others, as far as there are free ones
            (record,) = pool.acquire(1)
            (passed if self._is_among(scope, record, busy) else kept).append(record)
        pool.release(passed)
        return kept

    def _is_among(self, scope: str, record: int, pages: set[int]) -> bool:
        return not pages.isdisjoint(self.snapshot_pages(record) if scope == SLOT else (record,))

    def snapshot_pages(self, record: int) -> tuple[int, ...]:
        """The pages of a host snapshot record."""
        last = self._pages_before + record * self._pages_each
        return tuple(range(last - self._pages_each + 1, last + 1))

    def busy_records(self, scope: str) -> set[int]:
        """Host pages that copies not queued on the device yet will read or write."""
        records = self.transfers.host_records(scope)
        return records.union(*(stages.host_records(scope) for stages in self.due if not stages.ran))

    @property
    def is_waiting(self) -> bool:
        """Whether copies were asked for that are not queued on the device yet."""
        return len(self.transfers) > 0 or not all(stages.ran for stages in self.due)

    def drain(self) -> Transfers:
        """The copies asked for, as stages of a step. Until somebody has gone through them they count as waiting."""
        stages = self.transfers.drain()
        ran = [i for i, due in enumerate(self.due) if due.ran]  # and with them those before: they run in this order
        self.due = [*self.due[ran[-1] + 1 if ran else 0 :], stages]
        return stages

    def try_host_snapshots(self, count: int) -> list[int]:
        """Up to `count` host snapshot records, cached ones that leave first among them."""
        pool = self.host_snapshots
        while pool.num_free < min(count, pool.num_total):
            try:
                pool.release(self.tree.snapshots.evict(T.HOST, 1).units)
            except OutOfBlocksError:
                break
        return pool.acquire(min(count, pool.num_free))

    def keep_watermark(self) -> None:
        """Evicts from the host what the policy wants to be free there."""
        if self.policy is not None and self.host_blocks.num_total:
            excess = self.policy.watermark.excess(self.host_blocks.num_free, self.host_blocks.num_total)
            self.host_blocks.release(self.try_host_blocks(self.host_blocks.num_free + excess) if excess else [])

    def back_up(self) -> None:
        """Queues the copies to the host that the write policy wants, as far as there is room.

        The coldest first, as these leave the device next; of one path its beginning. A copy makes room only of
        colder ones: neither of one queued here nor of its own path; and none of what the watermark keeps free. What
        finds no room is listed again at its next hit.
        """
        if self.policy is None or not self.host_blocks.num_total:
            return
        nodes = self.tree.wanted.pop_backups(len(self.tree))
        nodes.sort(key=lambda node: (node.last_access, node.depth))
        room: list[int] = []
        kept_free = self.policy.watermark.kept_free(self.host_blocks.num_total)
        for node in nodes:
            if self.host_blocks.num_free <= kept_free and not self._evict_colder(node):
                break
            room += self.host_blocks.acquire(1)
        for node, record in zip(nodes, room, strict=False):
            self.tree.moves.begin_backup(node, record)
            self.transfers.out(BLOCK, node.block, record)
            self.tree.moves.complete(node)

    def _evict_colder(self, node: Node) -> bool:
        """Evicts one host copy that leaves before this node's would."""
        freed = self.tree.evictor.evict_colder(T.HOST, node)
        if freed is None:
            return False
        self.give_back(freed)
        return True

    # The whole device

    def evict_all(self) -> None:
        """Takes every cached unit off the device: to the host as far as there is room."""
        while self.tree.snapshots.count(T.DEVICE) and self._evict_snapshot():
            pass
        if self.tree.evictable(T.DEVICE):
            self._make_room(self.num_available)

    def resize(self, size: CacheSize) -> None:
        """Other numbers of device units; none may be held. Raises `PoolResizeError`."""
        self.blocks.resize(size.num_blocks)
        self.slots.resize(size.num_slots + size.num_snapshots)
