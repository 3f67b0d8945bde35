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

The books are in tree_base.py, eviction and snapshots in tree_eviction.py, the check in tree_checks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import PrefixTreeError, TransitionError
from ..allocator import as_count
from .eviction import Freed
from .node import MATCHABLE, SETTLED, Node, S, Snapshot, T, Tier, children_of, link, unlink
from .tree_checks import check_tree
from .tree_eviction import EvictingTree

__all__ = ["Match", "PrefixTree", "Published"]


class Match(NamedTuple):
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


class PrefixTree(EvictingTree):
    """See the module.

    Args:
        block_tokens: tokens of a block.
        order: eviction order: the smallest key leaves first; keys must not shrink. Default: least
            recently used, and of one path the deepest.
        backup_after: hits after which a device block without host copy is put on the list of
            `pop_backups`; 0: when published; None: never.
        persists: whether blocks that come to rest on the host are put on the list of `pop_persists`.
        events: where copies that come and go are told.
    """

    def match(self, digests: Sequence[bytes], num_tokens: int) -> Match:
        """The longest cached path of these digests, in path order. Changes nothing.

        At least the prompt's last token stays outside, so that there is something to compute.

        Args:
            digests: of the prompt's full blocks (`BlockHasher.digests`).
            num_tokens: of the prompt.

        Raises:
            PrefixTreeError: cached nodes with these digests do not follow each other: not one prompt's digests.
        """
        limit = min(len(digests), max(as_count("num_tokens", num_tokens) - 1, 0) // self.block_tokens)
        path: list[Node] = []
        hit, previous, nodes = 0, None, self._nodes
        for i in range(limit):
            node = nodes.get(digests[i])
            if node is None or node.state not in MATCHABLE:
                break
            if node.parent is not previous:
                raise PrefixTreeError(f"digest {i} does not follow digest {i - 1}: these are no path")
            path.append(node)
            previous = node
            if node.snapshot is not None:
                hit = i + 1
        return Match(tuple(path), hit, num_tokens)

    # References

    def take(self, match: Match, blocks: int | None = None, found: Sequence[Tier] | None = None) -> list[Node]:
        """References the first `blocks` nodes of a match (default: its hit) and counts the lookup.

        Args:
            found: the tiers in which those nodes were found, if they have been moved since.

        Raises:
            PrefixTreeError: the match is stale, or has fewer blocks; nothing has changed.
        """
        blocks = match.hit if blocks is None else as_count("blocks", blocks)
        if blocks > len(match.path):
            raise PrefixTreeError(f"cannot take {blocks} blocks of a match of {len(match.path)}")
        nodes = self.acquire(match.path[:blocks])
        counters, size = self.counters, self.block_tokens
        counters.lookups += 1
        counters.lookup_tokens += match.num_tokens
        counters.hits += bool(nodes)
        wanted = self._backup_after
        for node, tier in zip(nodes, found or [node.state.tier for node in nodes], strict=True):
            node.hits += 1
            counters.hit_tokens[tier] += size
            if wanted is not None and node.hits >= wanted and not node.host:
                self._want_backup(node)
        if nodes and (snapshot := nodes[-1].snapshot):
            snapshot.last_used = self._clock
        return nodes

    def acquire(self, path: Sequence[Node]) -> list[Node]:
        """One more reference to every node of a path (a fork's share, or a match). All or none.

        Raises:
            PrefixTreeError: not a path from a first block on, or a node is gone, being written or on the move.
        """
        previous = None
        for node in path:
            self._check(node)
            if node.parent is not previous:
                raise PrefixTreeError(f"{node} does not follow {previous}: references go to whole paths")
            if node.state not in MATCHABLE:
                raise PrefixTreeError(f"{node} cannot be referenced in this state")
            previous = node
        self._clock = clock = self._clock + 1
        for node in path:
            if not node.refs and node.state in SETTLED:
                self._idle[node.state.tier] -= 1
            node.refs += 1
            node.last_access = clock
        return list(path)

    def release(self, nodes: Sequence[Node]) -> None:
        """One reference less to every node: of a whole path, or of its tail. All or none.

        Nodes being written are not released but published or aborted.

        Raises:
            PrefixTreeError: a node is gone, being written or unreferenced, or the nodes do not follow each other.
        """
        previous = None
        for node in nodes:
            self._check(node)
            if previous is not None and node.parent is not previous:
                raise PrefixTreeError(f"{node} does not follow {previous}")
            if node.state is S.WRITING or not node.refs:
                raise PrefixTreeError(f"{node} has no reference to release")
            previous = node
        self._clock += 1
        access = self._access(nodes[0].parent) if nodes else 0
        for node in reversed(nodes):
            node.refs -= 1
            node.last_access = access
            if not node.refs and node.state in SETTLED:
                self._idle[node.state.tier] += 1
                self._enqueue(node)

    # Writing

    def reserve(self, parent: Node | None, digest: bytes, block: int) -> Node:
        """A node for a block about to be written: nobody can match it until `publish`. Referenced once, by the caller.

        Args:
            parent: the node before it in the caller's path, published or itself reserved; None for a first block.
            digest: of the block.
            block: the device block that will hold it.

        Raises:
            PrefixTreeError: the parent is gone, not on the device, or the caller cannot hold a reference to it.
        """
        block = as_count("block", block, 1)
        if parent is not None:
            self._check(parent)
            if parent.state.tier is not T.DEVICE or not parent.refs:
                raise PrefixTreeError(f"nothing can be written below {parent}: it must be on the device and referenced")
        node = self._new(digest, parent, S.WRITING)
        node.block, node.refs = block, 1
        self._writing[node] = None
        return node

    def publish(self, node: Node) -> Published:
        """Makes a written block matchable. Call it in path order, once the step that writes it is dispatched.

        If another request has published the same block meanwhile, its node serves and this block is
        spare; if that node's bytes are in a lower tier only, it takes this block. The reference
        moves along. While the parent is unpublished, or the other node is on the move between
        tiers, nothing happens: the returned node is still WRITING, and publishing can be tried again.

        Raises:
            PrefixTreeError: the node is gone or not WRITING.
        """
        self._check(node)
        if node.state is not S.WRITING:
            raise TransitionError(f"{node} is not being written")
        if node.parent is not None and node.parent.state.tier is not T.DEVICE:
            raise TransitionError(f"{node} cannot be published below {node.parent}")
        other = self._nodes.get(node.digest)
        waits = node.parent is not None and node.parent.state is S.WRITING
        if waits or (other is not None and other.state not in SETTLED and other.state is not S.BACKING_UP):
            return Published(node, 0)
        if other is not None and other.parent is not node.parent:
            raise PrefixTreeError(f"{node} and {other} have one digest and different parents")
        self._clock += 1
        if other is None:
            del self._writing[node]
            self._nodes[node.digest] = node
            self._set_state(node, S.DEVICE)
            node.last_access = self._access(node.parent)
            self._emit("stored", T.DEVICE, node)
            if self._backup_after == 0:
                self._want_backup(node)
            return Published(node, 0)
        spare = node.block
        if other.state.tier is not T.DEVICE:
            self._set_state(other, S.DEVICE)
            other.block, spare = node.block, 0
            self._emit("stored", T.DEVICE, other)
            self.counters.adoptions += 1
        else:
            self.counters.duplicates += 1
        if not other.refs and other.state in SETTLED:
            self._idle[T.DEVICE] -= 1
        other.refs += 1
        other.last_access = self._access(other.parent)
        for child in list(children_of(node)):  # reserved below this node, now below the one that serves
            unlink(child)
            child.parent = other
            link(child)
        self._drop(node, Freed())
        return Published(other, spare)

    def add_stored(self, parent: Node | None, digest: bytes) -> Node:
        """A node for a block found in storage, e.g. after a restart; the existing one if there is one.

        Raises:
            PrefixTreeError: the parent is gone or not published.
        """
        if parent is not None:
            self._check(parent)
            if parent.state is S.WRITING:
                raise PrefixTreeError(f"{parent} is not published: nothing below it can be known to storage")
        node = self._nodes.get(digest)
        if node is not None:
            if node.parent is not parent:
                raise PrefixTreeError(f"{node} is not below {parent}")
        else:
            node = self._new(digest, parent, S.STORAGE)
            node.last_access = self._access(parent)
            self._nodes[digest] = node
        if not node.stored:
            node.stored = True
            self._emit("stored", T.STORAGE, node)
        self._enqueue(node)
        return node

    def _access(self, parent: Node | None) -> int:
        """When a node below this parent counts as accessed: never after it, so that the deepest always leaves first."""
        return self._clock if parent is None else parent.last_access

    def check_integrity(self) -> None:
        """The invariants of the module's text, and all counters. O(nodes), for tests. Raises `IntegrityError`."""
        check_tree(self)
