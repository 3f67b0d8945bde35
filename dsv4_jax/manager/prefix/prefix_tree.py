"""The prefix tree: which blocks of which prompts are where. Pure Python, deterministic, one thread.

One node per block, found by its chained digest: a digest names a whole prefix within one namespace,
so one dictionary serves all paths and all tenants (see hashing.py).

What holds at any time (`check_integrity`):

* A node is matchable only after `publish`, which follows the dispatch of the step that writes it.
* A parent is never in a lower tier than its child. So matches are a run of device blocks, then of
  host blocks, then of storage blocks; nodes go down leaf first, and up parents first.
* A request references whole paths from the first block on: what has no references has none below it.
* Every unit id that a node holds is held by this tree until a call returns it as freed. The tree
  does not know the pools; their owner passes ids in and takes them back.

The parts, each with its own state and rules; `PrefixTree` itself knows paths: matching, references, writing.

* `nodes` (nodes.py): every node by digest, every change of a state, all counts.
* `queues`, `wanted` (queues.py): who leaves a tier next (eviction_policies.py, worth.py); who wants a copy in a lower.
* `moves` (moves.py): blocks that go from tier to tier, and blocks that are lost.
* `evictor` (evictor.py): blocks that leave a tier to make room.
* `snapshots` (snapshots.py): the states that hits can end at.
* `host` (host_evictor.py): blocks and states that leave the host to make room for either.
* `owners` (owners.py): whose units are whose, where namespaces have shares of a tier.
* `holds` (holds.py): host copies that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from ...checks import check_integer
from ...errors import IntegrityError, PlanError
from ...events import EventLog
from .eviction import Freed, TreeCounters
from .eviction_policies import WORTH, EvictionPolicy
from .evictor import Evictor
from .hashing import BlockHasher
from .holds import Holds
from .host_evictor import HostEvictor
from .moves import BlockMoves
from .node import MATCHABLE, SETTLED, Node, NodeState, Owner, S, Snapshot, T, Tier, children_of, link, unlink
from .nodes import NodeTable
from .owners import Owners
from .queues import CopyLists, EvictionQueues
from .snapshots import Snapshots
from .tree_checks import check_tree

__all__ = ["PrefixMatch", "PrefixTree", "Published"]


class PrefixMatch(NamedTuple):
    """What the cache has of a prompt. Holds no references: `take` it before anything else changes.

    Attributes:
        path: nodes with blocks, from the first block on.
        hit: leading blocks that can be used at once: the last of them has a snapshot.
        num_tokens: of the prompt that was looked up.
    """

    path: tuple[Node, ...]
    hit: int
    num_tokens: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the hit, in path order."""
        return self.path[: self.hit]

    @property
    def snapshot(self) -> Snapshot | None:
        """The state to restore, None for a hit of no blocks."""
        return self.path[self.hit - 1].snapshot if self.hit else None


class Published(NamedTuple):
    """What became of a published node.

    Attributes:
        node: the one to list from now on: the same, or the one that had this digest already. If it
            is still WRITING, publishing has to wait (see `PrefixTree.publish`).
        spare: the caller's block if the other node's serves instead, else 0: the caller's again.
    """

    node: Node
    spare: int


class PrefixTree:
    """Which prefixes are cached, and in which tier each of their blocks is.

    Args:
        block_tokens: tokens of a block.
        eviction: who leaves first (see eviction_policies.py).
        host: whether there is a host tier: what leaves the device is lost otherwise.
        moves_down: whether blocks that are evicted from the device move there.
        snapshot_blocks: blocks that take the bytes of one snapshot.
        backup_after: hits after which a device block without host copy is put on the list of
            `pop_backups`; 0: when published; None: never.
        persists: whether blocks that come to rest on the host are put on the list of `pop_persists`.
        events: the log of copies that come and go.
        ranks: over which the blocks of a path are dealt out (`CacheSize.pool_ranks`).
        share_of: the share of a namespace of each tier's units; None: all are evicted alike.
        capacity: units of each tier, in blocks, which shares are of.
    """

    def __init__(
        self,
        block_tokens: int = 128,
        *,
        eviction: EvictionPolicy = WORTH,
        host: bool = False,
        moves_down: bool = False,
        snapshot_blocks: int = 1,
        backup_after: int | None = None,
        persists: bool = False,
        events: EventLog | None = None,
        ranks: int = 1,
        share_of: Callable[[Hashable], float] | None = None,
        capacity: Mapping[Tier, int] | None = None,
    ):
        self.ranks = ranks
        self.snapshot_blocks = check_integer("snapshot_blocks", snapshot_blocks, 1, error=PlanError)
        shared = share_of is not None
        self.block_tokens = check_integer("block_tokens", block_tokens, 1, error=PlanError)
        self.counters = TreeCounters()
        self.queues = EvictionQueues(eviction, moves_down=host and moves_down, shared=shared)
        self.wanted = CopyLists(backup_after, persists)
        self.owners = Owners(share_of, capacity or {}, self._demote)
        self.nodes = NodeTable(
            self.queues,
            self.wanted,
            events,
            last_tier=T.HOST if host else T.DEVICE,
            ranks=ranks,
            owners=self.owners if shared else None,
            snapshot_blocks=self.snapshot_blocks,
        )
        self.moves = BlockMoves(self.nodes)
        self.evictor = Evictor(self.nodes, self.queues, self.moves, self.counters)
        self.snapshots = Snapshots(
            self.nodes,
            self.queues,
            self.wanted,
            self.counters,
            self.snapshot_blocks,
        )
        self.host = HostEvictor(self.queues, self.evictor, self.snapshots)
        self.holds = Holds(self.nodes, self.queues)
        self._events = events

    def __len__(self) -> int:
        """How many nodes are published."""
        return len(self.nodes.published)

    def get(self, digest: bytes) -> Node | None:
        """Returns the published node of this digest."""
        return self.nodes.published.get(digest)

    def is_current(self, node: Node) -> bool:
        """Whether the node is still in the tree. Late events (a transfer's end after `reset`) ask this first."""
        return self.nodes.is_current(node)

    def count(self, state: NodeState) -> int:
        """How many nodes are in this state."""
        return self.nodes.counts[state]

    def held(self, tier: Tier) -> int:
        """Returns units of published blocks: on the device, pages of the host (also backups), storage copies without
        either."""
        if tier is T.HOST:
            return self.nodes.num_host
        states = (S.STORAGE, S.FETCHING)
        if tier is T.DEVICE:
            states = (S.DEVICE, S.BACKING_UP, S.OFFLOADING, S.LOADING)
        return sum(self.nodes.counts[state] for state in states)

    def evictable(self, tier: Tier) -> int:
        """Returns unreferenced nodes at rest in this tier. All can leave it, unless moves are under way below some."""
        return self.nodes.idle[tier]

    def evictable_on(self) -> list[int]:
        """Returns how many device blocks of each rank."""
        return self.nodes.idle_on

    def reset(self) -> None:
        """Forgets everything. Nodes known before are refused from now on; the caller resets the pools."""
        self.nodes.clear()
        self.holds.clear()
        if self._events is not None:
            self._events.emit("cleared", T.NONE)

    def match(self, digests: Sequence[bytes], num_tokens: int) -> PrefixMatch:
        """Returns the longest cached path of these digests, in path order. Changes nothing.

        At least the prompt's last token stays outside, so that there is something to compute.

        Args:
            digests: of the prompt's full blocks (`BlockHasher.digests`).
            num_tokens: of the prompt.

        Raises:
            IntegrityError: cached nodes with these digests do not follow each other: not one prompt's digests.
        """
        limit = min(
            len(digests), max(check_integer("num_tokens", num_tokens, error=PlanError) - 1, 0) // self.block_tokens
        )
        path: list[Node] = []
        hit, previous, published = 0, None, self.nodes.published
        for i in range(limit):
            node = published.get(digests[i])
            if node is None or node.state not in MATCHABLE:
                break
            if node.parent is not previous:
                raise IntegrityError(f"digest {i} does not follow digest {i - 1}: these are no path")
            path.append(node)
            previous = node
            if node.snapshot is not None:
                hit = i + 1
        return PrefixMatch(tuple(path), hit, num_tokens)

    def name(self, hasher: BlockHasher, first: int, last: int) -> None:
        """Tells the event log, if it wants to know, which tokens the hasher's blocks first..last - 1 have."""
        if self._events is not None and self._events.details:
            self._events.name(hasher.named(first, last))

    # References

    def take(
        self,
        match: PrefixMatch,
        blocks: int | None = None,
        found: Sequence[Tier] | None = None,
        *,
        had: int | None = None,
    ) -> list[Node]:
        """References the first `blocks` nodes of a match (default: its hit) and counts the lookup.

        Args:
            found: the tiers in which those nodes were found, if they have been moved since.
            had: blocks that the same lookup has found before, and that were counted then.

        Raises:
            IntegrityError: the match is stale, or has fewer blocks; nothing has changed.
        """
        blocks = match.hit if blocks is None else check_integer("blocks", blocks, error=PlanError)
        if blocks > len(match.path):
            raise IntegrityError(f"cannot take {blocks} blocks of a match of {len(match.path)}")
        nodes = self.acquire(match.path[:blocks])
        counters, size = self.counters, self.block_tokens
        if had is None:
            counters.lookups += 1
            counters.lookup_tokens += match.num_tokens
        counters.hits += bool(nodes) and not had
        backup_after, new = self.wanted.backup_after, nodes[had or 0 :]
        for node, tier in zip(new, (found or [node.state.tier for node in nodes])[had or 0 :], strict=True):
            node.hits += 1
            counters.hit_tokens[tier] += size
            if backup_after is not None and node.hits >= backup_after and not node.host:
                self.wanted.want_backup(node)
        if nodes:
            self.snapshots.hit(nodes[-1])
        return nodes

    def acquire(self, path: Sequence[Node]) -> list[Node]:
        """One more reference to every node of a path (a fork's share, or a match). All or none.

        Raises:
            IntegrityError: not a path from a first block on, or a node is gone, being written or on the move.
        """
        previous, epoch = None, self.nodes.epoch
        for node in path:
            if node.epoch is not epoch or node.parent is not previous or node.state not in MATCHABLE:
                self.nodes.check(node)
                if node.parent is not previous:
                    raise IntegrityError(f"{node} does not follow {previous}: references go to whole paths")
                raise IntegrityError(f"{node} cannot be referenced in this state")
            previous = node
        self.nodes.clock += 1
        self.nodes.add_references(path, self.nodes.clock, self.nodes.level)
        return list(path)

    def release(self, nodes: Sequence[Node]) -> None:
        """Drops a reference to every node: of a whole path, or of its tail. All or none.

        Nodes being written are not released but published or aborted.

        Raises:
            IntegrityError: a node is gone, being written or unreferenced, or the nodes do not follow each other.
        """
        previous = None
        for node in nodes:
            self.nodes.check(node)
            if previous is not None and node.parent is not previous:
                raise IntegrityError(f"{node} does not follow {previous}")
            if node.state is S.WRITING or not node.refs:
                raise IntegrityError(f"{node} has no reference to release")
            previous = node
        self.nodes.clock += 1
        if nodes:
            self.nodes.drop_references(reversed(nodes), self.nodes.accessed(nodes[0].parent))

    # Writing

    def _demote(self, node: Node, tier: Tier) -> None:
        """The node's block and snapshot have come to leave the tier before others."""
        self.queues.blocks[tier].relist(node)
        self.queues.snapshots[tier].relist(node)

    def reserve(self, parent: Node | None, digest: bytes, block: int, owner: Owner | None = None) -> Node:
        """Returns a node for a block about to be written: nobody can match it until `publish`. Referenced once, by the
        caller.

        Args:
            parent: the node before it in the caller's path, published or itself reserved; None for a first block.
            digest: of the block.
            block: the device block that will hold it.
            owner: whose path it is (`owners.of`); that of a parent that nobody owned becomes the owner's.

        Raises:
            IntegrityError: the parent is gone, not on the device, or the caller cannot hold a reference to it.
        """
        block = check_integer("block", block, 1, error=PlanError)
        if parent is not None:
            self.nodes.check(parent)
            if parent.state.tier is not T.DEVICE or not parent.refs:
                raise IntegrityError(f"nothing can be written below {parent}: it must be on the device and referenced")
            if owner is not None and parent.owner is None:  # it came from storage, or from another host
                root = parent
                while root.parent is not None:
                    root = root.parent
                self.owners.adopt(root, owner, self.snapshot_blocks)
        node = self.nodes.new(digest, parent, S.WRITING, owner)
        node.block, node.refs = block, 1
        self.nodes.writing[node] = None
        return node

    def publish(self, node: Node) -> Published:
        """Makes a written block matchable. Call it in path order, once the step that writes it is dispatched.

        If another request has published the same block meanwhile, its node serves and this block is
        spare; if that node's bytes are in a lower tier only, it takes this block. The reference
        moves along. While the parent is unpublished, or the other node is on the move between
        tiers, nothing happens: the returned node is still WRITING, and publishing can be tried again.

        Raises:
            IntegrityError: the node is gone or not WRITING.
        """
        table = self.nodes
        table.check(node)
        if node.state is not S.WRITING:
            raise IntegrityError(f"{node} is not being written")
        if node.parent is not None and node.parent.state.tier is not T.DEVICE:
            raise IntegrityError(f"{node} cannot be published below {node.parent}")
        other = table.published.get(node.digest)
        waits = node.parent is not None and node.parent.state is S.WRITING
        if waits or (other is not None and other.state not in SETTLED and other.state is not S.BACKING_UP):
            return Published(node, 0)
        if other is not None and other.parent is not node.parent:
            raise IntegrityError(f"{node} and {other} have one digest and different parents")
        table.clock += 1
        if other is None:
            del table.writing[node]
            table.published[node.digest] = node
            table.set_state(node, S.DEVICE)
            node.last_access = table.accessed(node.parent)
            table.emit("stored", T.DEVICE, node)
            if self.wanted.backup_after == 0:
                self.wanted.want_backup(node)
            return Published(node, 0)
        spare = node.block
        if other.state.tier is not T.DEVICE:
            table.set_state(other, S.DEVICE)
            other.block, spare = node.block, 0
            table.emit("stored", T.DEVICE, other)
            self.counters.adoptions += 1
        else:
            self.counters.duplicates += 1
        level = table.level if other.parent is None else other.parent.level
        table.add_references([other], table.accessed(other.parent), level)
        for child in list(children_of(node)):  # reserved below this node, now below the one that serves
            unlink(child)
            child.parent = other
            link(child)
        table.drop(node, Freed())
        return Published(other, spare)

    def add_stored(self, parent: Node | None, digest: bytes) -> Node:
        """Returns a node for a block found in storage, e.g. after a restart; the existing one if there is one.

        Raises:
            IntegrityError: the parent is gone or not published.
        """
        if parent is not None:
            self.nodes.check(parent)
            if parent.state is S.WRITING:
                raise IntegrityError(f"{parent} is not published: nothing below it can be known to storage")
        node = self.get(digest)
        if node is not None:
            if node.parent is not parent:
                raise IntegrityError(f"{node} is not below {parent}")
        else:
            node = self.nodes.new(digest, parent, S.STORAGE)
            node.last_access = self.nodes.accessed(parent)
            self.nodes.published[digest] = node
        if not node.stored:
            node.stored = True
            self.nodes.emit("stored", T.STORAGE, node)
        self.queues.push(node)
        return node

    def add_host(self, parent: Node | None, digest: bytes, page: int) -> Node:
        """A node for a block whose bytes have come to a page of the host from elsewhere than the device or storage.

        Raises:
            IntegrityError: the parent is gone, not published or in too low a tier, or the digest has a node.
        """
        if parent is not None and (self.nodes.check(parent).state.tier < T.HOST or parent.state is S.WRITING):
            raise IntegrityError(f"nothing can come to the host below {parent}")
        if self.get(digest) is not None:
            raise IntegrityError(f"{self.get(digest)} is there already")
        page = check_integer("page", page, 1, error=PlanError)
        node = self.nodes.new(digest, parent, S.HOST)
        self.nodes.clock += 1
        node.last_access = self.nodes.accessed(parent)
        self.nodes.published[digest] = node
        self.nodes.set_host(node, page)
        self.nodes.emit("stored", T.HOST, node)
        self.wanted.came_to_host(node)
        self.queues.push(node)
        return node

    def check_integrity(self) -> None:
        """Checks the invariants of the module's text, and all counters. O(nodes), for tests. Raises
        `IntegrityError`."""
        check_tree(self.nodes, self.queues, self.holds)
