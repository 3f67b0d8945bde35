"""How a request takes what is cached of its tokens: a slot, blocks on the device, and the state it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import NoFreeSlotError, OutOfBlocksError
from .prefix.node import Node, S, T, Tier
from .prefix.prefix_tree import PrefixMatch
from .tiered_cache import TieredCache
from .transfers import BLOCK, SLOT

__all__ = ["Hit", "load", "take_hit", "usable"]


class Hit(NamedTuple):
    """Cached blocks that a request has taken, all on the device now.

    Attributes:
        nodes: in path order, referenced.
        state: the node whose snapshot the request starts from: pinned, in a device slot; None if there
            is nothing to restore, or the transfers restore it from the host or from blocks, or the slot holds it.
        slot: the request's.
        junction: leading blocks that are cached, if more than these; else 0.
    """

    nodes: list[Node]
    state: Node | None
    slot: int
    junction: int = 0


def take_hit(cache: TieredCache, match: PrefixMatch | None, *, others: int, pinned: int) -> Hit:
    """A slot, and the longest hit of which the host part fits on the device.

    Args:
        match: None: there is nothing to look up.
        others: further requests that may become live before the next step, each in need of a slot.
        pinned: snapshots in device slots that cannot be given away.

    Raises:
        NoFreeSlotError: nothing has changed.
    """
    available = cache.num_slots_available(pinned)
    if available < 1:
        raise NoFreeSlotError(cache.slots.num_total)
    if match is None:
        return Hit([], None, cache.acquire_slot())
    hit = usable(match, T.HOST)
    found = [node.state.tier for node in match.path[:hit]]
    while hit and not _load_hit(cache, match.path[:hit]):
        hit = usable(match, T.DEVICE)
    nodes = cache.tree.take(match, hit, found[:hit])
    junction = len(match.path) if len(match.path) > hit else 0
    if not nodes:
        return Hit([], None, cache.acquire_slot(), junction)
    node, snapshot = nodes[-1], nodes[-1].snapshot
    assert snapshot is not None
    in_slot = snapshot.device > 0 and not cache.snapshot_blocks
    if in_slot and not snapshot.pins and available - 1 < 1 + others:
        # Two slots for one request would leave too few: it moves into the snapshot's own.
        (slot,) = cache.tree.snapshots.drop(node, T.DEVICE)
        return Hit(nodes, None, slot, junction)
    cache.tree.snapshots.pin(node)
    slot = cache.acquire_slot()
    if in_slot:
        return Hit(nodes, node, slot, junction)
    cache.tree.snapshots.unpin(node)
    tokens = len(nodes) * cache.tree.block_tokens
    if not cache.get_state(snapshot.device, slot, tokens):
        cache.transfers.into(SLOT, snapshot.host, slot, tokens)
    return Hit(nodes, None, slot, junction)


def _load_hit(cache: TieredCache, path: Sequence[Node]) -> bool:
    """`load`; the state at the end is not given up for it."""
    cache.tree.snapshots.pin(path[-1])
    try:
        return load(cache, path)
    finally:
        cache.tree.snapshots.unpin(path[-1])


def usable(match: PrefixMatch, lowest: Tier) -> int:
    """Leading blocks of a match that a request can start with: in no tier below `lowest`, a snapshot at the end."""
    hit = 0
    for i, node in enumerate(match.path):
        if node.state.tier < lowest:
            break
        if node.snapshot is not None and node.snapshot.tier >= T.HOST:
            hit = i + 1
    return hit


def load(cache: TieredCache, path: Sequence[Node]) -> bool:
    """Brings all nodes of a path to the device, if there are blocks for them; else changes nothing."""
    tree = cache.tree
    below = [node for node in path if node.state.tier is not T.DEVICE]
    if not below:
        return True
    for node in below:
        if node.state is S.PERSISTING:  # the copy to storage goes on; its end goes to `StorageTier.finish_writes`
            tree.moves.abort(node)
    tree.acquire(path)  # so that making room takes none of these
    try:
        blocks = cache.acquire_blocks([node.depth for node in below])
    except OutOfBlocksError:
        return False
    finally:
        tree.release(path)
    for node, block in zip(below, blocks, strict=True):
        tree.moves.begin_load(node, block)
        cache.transfers.into(BLOCK, node.host, block)
        cache.give_back(tree.moves.complete(node))
    return True
