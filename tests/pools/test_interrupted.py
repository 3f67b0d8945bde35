"""Every call on host books is done wholly or not at all, wherever it is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from dsv4_jax.events import EventLog
from dsv4_jax.pools import GDNSpec, RadixCache, ReqToTokenPool, StateSlots, TokenToKVPoolAllocator
from tests.interruption import changes_nothing_when_interrupted, raises_at


def tokens_of(pool: TokenToKVPoolAllocator) -> Any:
    pool.check_integrity()
    return pool.is_held(np.arange(pool.num_ids)).tolist(), pool.available_size()


def half_used() -> TokenToKVPoolAllocator:
    """Pages of 2: tokens 2..10 are held, pages 2 and 3 of them free again and not merged yet."""
    pool = TokenToKVPoolAllocator(16, 2)
    pool.alloc(9)
    pool.free([4, 5, 6, 7])
    return pool


def nested(pool: TokenToKVPoolAllocator) -> None:
    with pool.batch():
        pool.free([8, 9])
        with pool.batch():
            pool.free(pool.alloc(3)[1:])
            pool.free([3])
        pool.alloc(2, after=10)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.alloc(3),
        lambda p: p.alloc(10),
        lambda p: p.alloc(3, after=10),
        lambda p: p.free([8, 2, 9]),
        nested,
        lambda p: p.clear(),
    ],
    ids=["alloc", "merge", "after", "free", "batch", "clear"],
)
def test_token_allocator(call: Callable[[Any], Any]) -> None:
    assert changes_nothing_when_interrupted(half_used, call, tokens_of) >= 5


def test_a_batch_goes_on_after_an_interrupted_call() -> None:
    """Whoever catches the interruption inside the batch has that call undone, and only that."""
    for line in range(1, 100):
        pool = half_used()
        with pool.batch():
            pool.free([2])
            fired = raises_at(line, MemoryError, lambda pool=pool: pool.free([8, 9]))
            assert pool.is_held([2, 8, 9]).tolist() == [False, fired, fired]
            pool.check_integrity()
        assert tokens_of(pool)[1] == 8 + 4 + 2 * (not fired) - 2
        if not fired:
            return
    raise AssertionError("there are no 100 lines")


def table_of(pool: ReqToTokenPool) -> Any:
    pool.check_integrity()
    rows = [pool.tokens(s).tolist() for s in (1, 2, 3) if pool._slots.is_held(s)]
    return rows, pool.available_size(), pool.lengths.tolist(), dict(pool._dirty)


def table() -> ReqToTokenPool:
    pool = ReqToTokenPool(3, 8)
    pool.alloc(2)
    pool.append(1, [5, 6, 7])
    pool.drain()
    pool.append(2, [9])
    return pool


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.alloc(),
        lambda p: p.free(2),
        lambda p: p.clear(),
        lambda p: p.write(1, 1, [8, 9, 10]),
        lambda p: p.append(2, [3]),
        lambda p: p.truncate(1, 1),
        lambda p: p.drain(),
    ],
    ids=["alloc", "free", "clear", "write", "append", "truncate", "drain"],
)
def test_request_table(call: Callable[[Any], Any]) -> None:
    assert changes_nothing_when_interrupted(table, call, table_of) >= 5


class Cached(NamedTuple):
    cache: RadixCache
    pool: TokenToKVPoolAllocator
    rows: TokenToKVPoolAllocator
    states: StateSlots
    events: EventLog
    ids: np.ndarray
    row_ids: np.ndarray
    node: Any
    lock: Any


def cached() -> Cached:
    """[1..6] with a window over 3..6 and a snapshot, [1, 2, 9, 9] without; some slots for the caller's use."""
    pool, rows = TokenToKVPoolAllocator(40, 2), TokenToKVPoolAllocator(40, 2)
    states, events = StateSlots(GDNSpec(2, 1, 1, 1, 1, 1, 2, track_slots=4)), EventLog()
    cache = RadixCache(pool, window=4, window_allocator=rows, states=states, events=events)
    done = cache.insert(
        [1, 2, 3, 4, 5, 6], pool.alloc(6), window_ids=[0, 0, *rows.alloc(4)], snapshot=states.alloc_track_slot()
    )
    other = cache.insert([1, 2, 9, 9], [*done.ids[:2], *pool.alloc(2)])
    lock = cache.lock(other.node)
    states.alloc_track_slot()
    return Cached(cache, pool, rows, states, events, pool.alloc(10), rows.alloc(10), done.node, lock)


def tree_of(c: Cached) -> Any:
    """All that the tree, the allocators and the log say."""
    for books in (c.cache, c.pool, c.rows, c.states):
        books.check_integrity()
    nodes = sorted(
        (
            n.start,
            n.tokens.tolist(),
            n.ids.tolist(),
            n.rows.tolist(),
            n.snapshot or 0,
            n.refs,
            n.window_refs,
            len(n.digests),
            n.parent.number if n.parent and n.parent.parent else 0,
        )
        for n in c.cache._tree.nodes()
    )
    sizes = c.cache.total_size, c.cache.protected_size, len(c.cache._tree.locks), len(c.cache._tree.roots)
    return nodes, sizes, tokens_of(c.pool), tokens_of(c.rows), sorted(c.states.held), c.events.since(0)


CALLS: dict[str, Callable[[Cached], Any]] = {
    "lock": lambda c: c.cache.lock(c.node),
    "unlock": lambda c: c.cache.unlock(c.lock),
    "evict": lambda c: c.cache.evict(3),
    "evict_window": lambda c: c.cache.evict_window(4),
    "evict_snapshots": lambda c: c.cache.evict_snapshots(1),
    "insert": lambda c: c.cache.insert([7, 8, 7, 8], c.ids[:4], window_ids=[0, 0, *c.row_ids[:2]], snapshot=4),
    "insert that splits": lambda c: c.cache.insert(
        [1, 2, 3, 4, 8, 8], c.ids[:6], window_ids=[0, 0, *c.row_ids[:4]], snapshot=4
    ),
    "insert that revives": lambda c: c.cache.insert([1, 2, 9, 9], c.ids[:4], window_ids=c.row_ids[:4], snapshot=4),
    "insert in a new namespace": lambda c: c.cache.insert([1, 2], c.ids[:2], "adapter"),
}


@pytest.mark.parametrize("name", CALLS)
def test_radix_cache(name: str) -> None:
    assert changes_nothing_when_interrupted(cached, CALLS[name], tree_of) >= 10
    thing, line = cached(), 1  # once more, all interruptions on the same cache: all of it can still be evicted
    while raises_at(line, MemoryError, lambda: CALLS[name](thing)):
        line += 5
    for lock in list(thing.cache._tree.locks):
        thing.cache.unlock(lock)
    assert thing.cache.evict_window(99) + thing.cache.evict_snapshots(9) >= 0
    thing.cache.evict(99)
    tree = thing.cache._tree
    assert tree.total == 0 and not tree.owned_states and not tree.owned_window.any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_radix_trace(seed: int) -> None:
    """Random calls, each interrupted at random lines first: nothing changed, and the call itself can still be made."""
    random, c = Random(seed), cached()
    locks, interrupted = [c.lock], 0
    c.pool.free(c.ids)
    c.rows.free(c.row_ids)
    c.states.free(4)

    def insert(tokens: list[int]) -> Callable[[], Any]:
        hit = c.cache.match(tokens)
        lock = c.cache.lock(hit.node)
        new = len(tokens) - hit.length
        if c.pool.available_size() < new + 2 or c.rows.available_size() < new + 2 or not c.states.num_free:
            c.cache.evict(8), c.cache.evict_window(8), c.cache.evict_snapshots(1)
        c.cache.unlock(lock)
        if c.pool.available_size() < new or c.rows.available_size() < new or not c.states.num_free:
            return lambda: c.cache.evict(8)
        ids, rows = (np.concatenate([a, b.alloc(new)]) for a, b in ((hit.ids, c.pool), (hit.window_ids, c.rows)))
        state, live = c.states.alloc_track_slot(), random.randint(0, len(tokens))
        given = np.where((np.arange(len(tokens)) >= live) & (np.cumsum(rows[::-1] == 0)[::-1] == 0), rows, 0)

        def call() -> None:
            done = c.cache.insert(tokens, ids, window_ids=given, snapshot=state if len(tokens) % 2 == 0 else None)
            # What the caller still has, it gives back: not interrupted, or two calls were undone as one.
            sys.settrace(None)
            c.pool.free(done.kept)
            c.rows.free(np.union1d(done.kept_window, rows[hit.length :][given[hit.length :] == 0]))
            if not done.took_snapshot:
                c.states.free(state)

        return call

    for _ in range(120):
        kind = random.choice(["match", "insert", "insert", "lock", "unlock", "evict", "rows", "states"])
        tokens = [random.randint(1, 2) for _ in range(random.randint(0, 10))]
        call: Callable[[], Any] = {
            "match": lambda tokens=tokens: c.cache.match(tokens),
            "lock": lambda tokens=tokens: locks.append(c.cache.lock(c.cache.match(tokens).node)),
            "unlock": lambda: locks and (c.cache.unlock(locks[-1]), locks.pop()),
            "evict": lambda: c.cache.evict(3),
            "rows": lambda: c.cache.evict_window(3),
            "states": lambda: c.cache.evict_snapshots(1),
        }.get(kind) or insert(tokens)
        before = tree_of(c)
        if raises_at(random.randint(1, 250), MemoryError, call):
            interrupted += 1
            assert kind == "lock" or tree_of(c) == before  # a lock's match may have split
            call()
        tree_of(c)
    assert interrupted > 20
    for lock in locks:
        c.cache.unlock(lock)
    c.cache.evict(99)
    assert c.pool.num_held == c.rows.num_held == len(c.states.held) == 0


def test_radix_match_and_clear() -> None:
    def windowless() -> Cached:
        c = cached()
        cache = RadixCache(c.pool, events=c.events)
        done = cache.insert([1, 2, 3, 4], c.ids[:4])
        return c._replace(cache=cache, node=done.node)

    assert changes_nothing_when_interrupted(windowless, lambda c: c.cache.match([1, 2, 5, 5]), tree_of) >= 10
    assert changes_nothing_when_interrupted(windowless, lambda c: c.cache.clear(), tree_of) >= 10
