"""What goes to storage and what comes back: host records under content hashes. Pure Python.

Storage answers late, so here alone a move has two ends: a `plan_` call that reserves, and a `finish_` call
that gets what became of it. In between nothing is lost: blocks on their way to storage stay usable, and
an answer that comes after `reset` is ignored. Who moves the bytes: `dsv4_jax.tiers.storage_driver`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..checks import shown
from ..errors import IntegrityError, PlanError
from .guard import Guard
from .prefix.eviction import Freed
from .prefix.hashing import BlockHasher, HashSpec, MediaItem, Namespace
from .prefix.node import MATCHABLE, Node, S, T
from .tiered_cache import TieredCache
from .transfers import BLOCK, SLOT

__all__ = ["Contains", "StorageMove", "StorageTier", "Stored"]

_DIGEST_BYTES = 32
Contains = Callable[[list[bytes]], Sequence[bool]]


class StorageMove(NamedTuple):
    """A host record on its way to or from storage.

    Attributes:
        scope: "block" or "slot" (a snapshot).
        node: whose.
        pages: of the host that it is in, in order.
    """

    scope: str
    node: Node
    pages: tuple[int, ...]

    @property
    def key(self) -> bytes:
        """What it is stored under: the digest of the block, and of everything before it."""
        return self.node.digest


class Stored(Protocol):
    """What a storage tier needs of its `KVCacheManager`. `reset` makes another `cache`."""

    guard: Guard
    cache: TieredCache

    @property
    def hash_spec(self) -> HashSpec: ...

    def persist(self) -> None: ...


class StorageTier:
    """The storage side of a manager. It wants every block and snapshot that comes to the host.

    Args:
        manager: with a host tier.
    """

    def __init__(self, manager: Stored):
        self._manager = manager
        manager.persist()

    @property
    def _cache(self) -> TieredCache:
        return self._manager.cache

    def is_current(self, move: StorageMove) -> bool:
        """Whether the manager still waits for this move."""
        return self._cache.tree.is_current(move.node)

    # To storage

    def plan_writes(self, limit: int) -> list[StorageMove]:
        """Up to `limit` host records that storage does not have. Read them now, before anything else runs.

        Call it after the transfers of a step were run. While some wait, for the next step or to be gone through
        (`Transfers.ran`), there are none.
        """
        with self._manager.guard("plan_writes"):
            cache = self._cache
            if cache.is_waiting:
                return []
            writes = []
            for node in cache.tree.wanted.pop_persists(limit):
                cache.tree.moves.begin_persist(node)
                writes.append(StorageMove(BLOCK, node, (node.host,)))
            for node in cache.tree.wanted.pop_snapshot_persists(limit - len(writes)):
                if node.snapshot is not None:
                    writes.append(StorageMove(SLOT, node, node.snapshot.host))
            return writes

    def finish_writes(self, writes: Iterable[StorageMove], done: Iterable[bool]) -> None:
        """Whether storage has them now; one that it has not is tried again when it next comes to the host.

        Raises:
            PlanError: these are no moves, or not as many answers.
        """
        ends = _ends(writes, done)
        with self._manager.guard("finish_writes"):
            tree = self._cache.tree
            for move, stored in ends:
                node = move.node
                if not tree.is_current(node):
                    continue
                if move.scope == SLOT:
                    if stored and node.state is not S.WRITING and not (node.snapshot and node.snapshot.stored):
                        tree.snapshots.attach(node, T.STORAGE)
                elif node.state is S.PERSISTING:
                    (tree.moves.complete if stored else tree.moves.abort)(node)
                elif stored and not node.stored:  # a request has taken it to the device meanwhile
                    tree.add_stored(node.parent, node.digest)

    # From storage

    def plan_reads(
        self,
        tokens: Sequence[int] | np.ndarray,
        blocks: Contains,
        snapshots: Contains,
        *,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
    ) -> list[StorageMove]:
        """What to fetch to the host so that a request with this prompt finds its prefix there.

        The longest leading run that ends at a snapshot and for which there is room; in path order, the
        snapshot last. Nothing if all of it is nearer already.

        Args:
            blocks, snapshots: which of these keys storage probably has. Asked before anything changes.

        Raises:
            RequestError: as `KVCacheManager.admit_request`.
            PlanError: an answer is not one per key.
        """
        return self.plan_fetch(self.digests(tokens, namespace=namespace, items=items), blocks, snapshots)

    def digests(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
    ) -> list[bytes]:
        """The digests of the blocks that a request with this prompt could find. Raises `RequestError`."""
        hasher = BlockHasher(self._manager.hash_spec, tokens, namespace=namespace, items=items)
        full = max(hasher.num_tokens - 1, 0) // hasher.spec.block_tokens
        self._cache.tree.name(hasher, 0, full)
        return hasher.digests[:full]

    def plan_fetch(self, digests: list[bytes], blocks: Contains, snapshots: Contains) -> list[StorageMove]:
        """Does `plan_reads` of a prompt with these `digests`: for who asks storage first and plans when it has
        answered.

        Raises:
            PlanError: they are no list of digests, or an answer is not one per key.
        """
        self._manager.guard.check()
        if not isinstance(digests, list) or not all(isinstance(d, bytes) and len(d) == _DIGEST_BYTES for d in digests):
            raise PlanError(f"digests must be a list of {_DIGEST_BYTES} bytes each, got {shown(digests)}")
        near = self._near(digests)
        rest = digests[len(near) :]
        if rest and self._cache.tree.get(rest[0]) is not None:
            rest = []  # being written, or on the move
        found = _answers(blocks, rest)
        digests = digests[: len(near) + (found.index(False) if False in found else len(found))]
        states = _answers(snapshots, digests)
        with self._manager.guard("plan_fetch"):
            return self._plan_fetch(digests, states)

    def _plan_fetch(self, digests: list[bytes], states: list[bool]) -> list[StorageMove]:
        """`digests`: of blocks that the cache or storage has; `states`: of which storage has a snapshot."""
        cache, tree = self._cache, self._cache.tree
        path = self._near(digests)
        for digest in digests[len(path) :]:
            if tree.get(digest) is not None:
                break
            path.append(tree.add_stored(path[-1] if path else None, digest))
        ends = [i + 1 for i, node in enumerate(path) if states[i] or node.snapshot is not None]
        path = path[: ends[-1]] if ends else []
        tree.acquire(path)  # so that making room takes none of these
        kept = [node for node in path if node.snapshot is not None]
        for node in kept:
            tree.snapshots.pin(node)
        try:
            state = cache.landing_snapshot_pages() if path and not path[-1].has_near_state else ()
            missing = [node for node in path if node.state is S.STORAGE]
            room = cache.landing_pages([node.depth for node in missing])
            if len(room) < len(missing):  # only what there is room for, up to a snapshot
                reach = path.index(missing[len(room)])
                ends = [end for end in ends if end <= reach]
                path_end = ends[-1] if ends else 0
            else:
                path_end = len(path)
            missing = [node for node in path[:path_end] if node.state is S.STORAGE]
            needed = path_end > 0 and not path[path_end - 1].has_near_state
            if needed and not state:
                missing = []
            cache.pages.release([*room[len(missing) :], *(() if needed else state)])
            for node, page in zip(missing, room, strict=False):
                tree.moves.begin_fetch(node, page)
        finally:
            for node in kept:
                tree.snapshots.unpin(node)
            tree.release(path)
        moves = [StorageMove(BLOCK, node, (node.host,)) for node in missing]
        if needed and state:
            cache.fetching[state] = path[path_end - 1]
            moves.append(StorageMove(SLOT, path[path_end - 1], state))
        return moves

    def finish_reads(self, reads: Sequence[StorageMove], done: Sequence[bool], *, lost: bool = True) -> None:
        """What has arrived, for the moves of one `plan_reads`, once it is in the host records.

        Only moves that are still current may be put there (`is_current`): the record of another may be somebody else's.
        Blocks after the first that did not arrive are called off.

        Args:
            lost: whether storage does not have what did not arrive: it is forgotten then.

        Raises:
            PlanError: these are no moves, or not as many answers.
        """
        ends = _ends(reads, done)
        with self._manager.guard("finish_reads"):
            cache, tree = self._cache, self._cache.tree
            late: list[Node] = []
            for move, arrived in ends:
                node = move.node
                if move.scope == SLOT:
                    self._finish_snapshot(move, arrived)
                elif not tree.is_current(node):
                    continue
                elif late or not arrived:
                    late.append(node)
                else:
                    tree.moves.complete(node)
            for node in reversed(late):
                cache.give_back(tree.moves.abort(node))
            if late and lost:
                with contextlib.suppress(IntegrityError):  # somebody else is fetching below it: they will find out
                    cache.give_back(tree.moves.discard(late[0]))

    def _near(self, digests: list[bytes]) -> list[Node]:
        """Nodes of the leading run that the cache has, in whatever tier."""
        tree, path = self._cache.tree, list[Node]()
        for digest in digests:
            node = tree.get(digest)
            if node is None or node.state not in MATCHABLE:
                break
            path.append(node)
        return path

    def _finish_snapshot(self, move: StorageMove, arrived: bool) -> None:
        cache, node = self._cache, move.node
        if cache.fetching.get(move.pages) is not node:
            return  # of before a reset
        del cache.fetching[move.pages]
        usable = arrived and cache.tree.is_current(node) and node.state.tier >= T.HOST
        if usable and not (node.snapshot and node.snapshot.host):
            cache.tree.snapshots.attach(node, T.HOST, move.pages)
        else:
            cache.give_back(Freed(pages=list(move.pages)))


def _ends(moves: Iterable[StorageMove], done: Iterable[bool]) -> list[tuple[StorageMove, bool]]:
    """What became of each move. Raises `PlanError`."""
    try:
        ends = list(zip(moves, map(bool, done), strict=True))
    except (TypeError, ValueError) as error:
        raise PlanError(f"moves and what became of them are not two lists of one length: {error}") from error
    if wrong := [move for move, _ in ends if not isinstance(move, StorageMove)]:
        raise PlanError(f"not a move to or from storage: {shown(wrong[0])}")
    return ends


def _answers(ask: Contains, keys: list[bytes]) -> list[bool]:
    given = ask(keys) if keys else []
    try:
        answers = [bool(answer) for answer in given]
    except (TypeError, ValueError) as error:
        raise PlanError(f"asked for {len(keys)} keys, storage answered {shown(given)}") from error
    if len(answers) != len(keys):
        raise PlanError(f"asked for {len(keys)} keys, storage answered for {len(answers)}")
    return answers
