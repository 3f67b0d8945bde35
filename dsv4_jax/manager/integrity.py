"""Whether a manager's books agree with each other. For tests. Pure Python."""

from __future__ import annotations

import collections

from ..errors import IntegrityError
from ..layout import CacheLayout, CacheSize
from .allocator import BlockAllocator
from .prefix.node import S, T
from .prefix.prefix_tree import PrefixTree
from .request import Request, RequestState
from .request_book import RequestBook
from .stats import collect
from .tiered_cache import TieredCache

__all__ = ["check_manager"]


def check_manager(layout: CacheLayout, size: CacheSize, book: RequestBook, cache: TieredCache) -> None:
    """Recomputes from the requests and the tree what the pools should hold. Raises `IntegrityError`."""
    live, waiting = book.requests, book.preempted
    for pool in (cache.blocks, cache.slots, cache.pages):
        pool.check_integrity()
    cache.tree.check_integrity()
    late_blocks, late_slots = cache.copies.late
    nodes = [*cache.tree.nodes.published.values()]
    parked = [r.parked for r in waiting if r.parked is not None]
    _partition(
        "device block",
        cache.blocks,
        [
            *(block for r in live for block in r.blocks[r.num_shared :]),
            *(n.block for n in nodes),
            *(block for blocks in cache.state_blocks.values() for block in blocks),
            *late_blocks,
        ],
    )
    _partition(
        "slot",
        cache.slots,
        [
            *(r.slot for r in live),
            *(n.snapshot.device for n in nodes if n.snapshot and not cache.snapshot_blocks),
            *late_slots,
        ],
    )
    if cache.snapshot_blocks:
        units = {n.snapshot.device for n in nodes if n.snapshot and n.snapshot.device}
        _require(units == set(cache.state_blocks), "states in blocks that no node has, or none")
    for node in nodes:
        for pool, unit in ((cache.blocks, node.block), (cache.pages, node.host)):
            _require(not unit or pool.rank_of(unit) == node.depth % pool.ranks, f"{node} is not where its place is")
    for request in live:
        ranks = [cache.blocks.rank_of(block) for block in request.blocks]
        _require(ranks == [i % cache.ranks for i in range(len(ranks))], f"{request.id!r}: blocks on ranks {ranks}")
    states = [n.snapshot.host for n in nodes if n.snapshot and n.snapshot.host] + [*cache.fetching]
    _partition(
        "host page",
        cache.pages,
        [
            *(page for p in parked for page in (*p.blocks, *p.state)),
            *(n.host for n in nodes),
            *(page for pages in states for page in pages),
            *cache.reading,
            *cache.landed,
        ],
    )
    _require(all(len(pages) == cache.snapshot_pages for pages in states), "a snapshot has another number of pages")
    for pages in (*states, *(p.state for p in parked)):
        _require(len({cache.pages.rank_of(page) for page in pages}) == 1, f"the state in pages {pages} is of two ranks")
    _require(len(live) <= size.num_slots, "more live requests than slots for them")
    _require(set(book.ids.values()) == {*live, *waiting}, "ids and requests differ")
    refs = collections.Counter(node for r in live for node in r.nodes)
    for node in (*nodes, *cache.tree.nodes.writing):
        _require(node.refs == refs[node], f"{node} has {node.refs} references, {refs[node]} requests list it")
    pins = collections.Counter(r.restores for r in live if r.restores is not None)
    for node in nodes:
        snapshot = node.snapshot
        _require(not snapshot or snapshot.pins == pins[node], f"{node} has a snapshot pinned by no request")
    for slot, request in book.live.items():
        _check_request(layout, book, cache.tree, slot, request)
    for request in waiting:
        _require(not request.slot and not request.blocks and not request.nodes, f"{request.id!r} holds units")
    collect(layout, size, book, cache)


def _check_request(layout: CacheLayout, book: RequestBook, tree: PrefixTree, slot: int, r: Request) -> None:
    name = f"request {r.id!r}"
    _require(r.slot == slot and book.ids.get(r.id) is r, f"{name} is not in its slot")
    _require(r.state is RequestState.LIVE and r.generation == book.generation, f"{name} is stale")
    _require(0 <= r.num_scheduled <= r.num_cached <= r.max_tokens and r.step_start >= 0, f"{name}: impossible lengths")
    needed = layout.blocks_for(max(r.num_cached, r.reserved))
    _require(len(r.blocks) >= needed, f"{name} holds {len(r.blocks)} blocks, needs {needed}")
    _require(len(set(r.blocks)) == len(r.blocks) and all(b > 0 for b in r.blocks), f"{name}: impossible block ids")
    _require(r.num_tabled <= len(r.blocks), f"{name}: table entries without blocks")
    _require(len(r.nodes) <= r.num_cached // layout.block_tokens, f"{name} publishes blocks that are not full")
    parent = None
    for i, node in enumerate(r.nodes):
        _require(tree.is_current(node) and node.parent is parent, f"{name}: its nodes are no path")
        _require(node.state.tier is T.DEVICE and node.block == r.blocks[i], f"{name}: {node} is not its block {i}")
        # (Without a hasher: ids that are none came after these, and nothing more is cached.)
        _require(r.hasher is None or node.digest == r.hasher.digests[i], f"{name}: {node} has another digest")
        _require(i < r.num_shared or node.state is S.WRITING, f"{name}: published beyond one that is not")
        parent = node


def _partition(what: str, pool: BlockAllocator, held: list[int]) -> None:
    held = [unit for unit in held if unit]
    if len(set(held)) != len(held):
        raise IntegrityError(f"two holders of one {what}: {sorted(held)}")
    if len(held) != pool.num_held or not all(pool.is_held(unit) for unit in held):
        raise IntegrityError(f"{what}s: {sorted(held)} have holders, the pool says that {pool.num_held} are held")


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise IntegrityError(problem)
