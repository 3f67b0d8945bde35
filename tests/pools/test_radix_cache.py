"""The radix cache against a dict of pages: matches, ownership, locks, eviction, tombstones, snapshots."""

from __future__ import annotations

import functools
import struct
from hashlib import sha256
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.errors import OutOfBlocksError, PoolError
from dsv4_jax.events import EventBatch, EventLog, Tier, coalesce
from dsv4_jax.pools import GDNSpec, RadixCache, StateSlots, TokenToKVPoolAllocator
from dsv4_jax.pools.chunk_cache import ChunkCache
from dsv4_jax.pools.digests import page_digests

from ..effort import lines_run


def states_of(count: int) -> StateSlots:
    return StateSlots(GDNSpec(2, 1, 1, 1, 1, 1, 2, track_slots=count))


def make(size: int = 60, page: int = 1, window: int | None = None, states: int = 0) -> tuple[RadixCache, Any, Any, Any]:
    pool = TokenToKVPoolAllocator(size, page)
    rows = TokenToKVPoolAllocator(size, page) if window else None
    slots = states_of(states) if states else None
    cache = RadixCache(pool, window=window, window_allocator=rows, states=slots, events=EventLog())
    return cache, pool, rows, slots


def test_match_splits_and_insert_says_who_owns_what() -> None:
    cache, pool, *_ = make()
    first = cache.insert([1, 2, 3, 4], pool.alloc(4))
    assert first.ids.tolist() == [1, 2, 3, 4] and first.prefix == 0 and first.kept.size == 0
    hit = cache.match([1, 2, 9])
    assert hit.ids.tolist() == [1, 2] and hit.length == 2
    # The caller computed token 2 itself (a duplicate) and brings two new ones.
    ids = np.concatenate([hit.ids[:1], pool.alloc(3)])
    second = cache.insert([1, 2, 9, 8], ids)
    assert second.prefix == 2 and second.ids.tolist() == [1, 2, 6, 7] and second.kept.tolist() == [5]
    pool.free(second.kept)
    assert cache.match([1, 2, 3, 4, 5]).ids.tolist() == [1, 2, 3, 4]
    assert cache.match([1, 2], "adapter").length == 0
    assert cache.match([1, 2, 3], limit=1).length == 1
    assert (cache.total_size, cache.evictable_size, pool.num_held) == (6, 6, 6)
    cache.check_integrity()
    cache.clear()
    assert pool.available_size() == 60 and cache.total_size == 0
    cache.check_integrity()


def test_evicts_leaves_least_recently_used_first_and_no_locked_one() -> None:
    cache, pool, *_ = make()
    for tail in (3, 4, 5):
        cache.insert(
            [1, 2, tail], np.concatenate([cache.match([1, 2]).ids, pool.alloc(3 - cache.match([1, 2]).length)])
        )
    lock = cache.lock(cache.match([1, 2, 4]).node)
    cache.match([1, 2, 3])
    assert (cache.protected_size, cache.evictable_size) == (3, 2)
    assert cache.evict(1) == 1 and cache.match([1, 2, 5]).length == 2  # 5 was the oldest
    assert cache.evict(10) == 1 and cache.match([1, 2, 4]).length == 3
    with pytest.raises(PoolError, match="1 locks"):
        cache.clear()
    cache.unlock(lock)
    with pytest.raises(PoolError, match="ended already"):
        cache.unlock(lock)
    assert cache.evictable_size == 3 == cache.evict(3) and pool.num_held == 0
    with pytest.raises(PoolError, match="left the tree"):
        cache.lock(lock.node)


def test_sizes_never_go_negative_when_a_locked_node_gains_a_child() -> None:
    cache, pool, *_ = make()
    a = cache.insert([1, 2], pool.alloc(2))
    lock = cache.lock(a.node)
    cache.insert([1, 2, 3], np.concatenate([a.ids, pool.alloc(1)]))
    assert (cache.protected_size, cache.evictable_size) == (2, 1)
    cache.unlock(lock)
    assert (cache.protected_size, cache.evictable_size) == (0, 3)


@pytest.mark.parametrize(
    ("ids", "more", "problem"),
    [
        ([7, 8, 9], {}, "not all handed out"),
        ([1, 3, 3], {}, "twice"),
        ([1, 2], {}, "3 tokens, 2 ids"),
        ([2, 3, 4], {}, "the cache's at another place"),
        ([1, 3, 4], {"window_ids": [0, 0, 1]}, "no window"),
        ([1, 3, 4], {"snapshot": 3}, "not a track slot"),
        ([1, 0, 3], {}, "not all"),
    ],
)
def test_insert_refuses_and_changes_nothing(ids: list[int], more: dict[str, Any], problem: str) -> None:
    cache, pool, *_ = make()
    cache.insert([1, 2], pool.alloc(2))
    pool.alloc(2)
    with pytest.raises(PoolError, match=problem):
        cache.insert([1, 5, 6], ids, **more)
    cache.check_integrity()
    assert cache.total_size == 2 and cache.match([1, 2]).length == 2


def test_snapshots_stay_with_the_end_they_describe() -> None:
    cache, pool, _, slots = make(states=3)
    a, b = slots.alloc_track_slot(), slots.alloc_track_slot()
    assert cache.insert([1, 2, 3, 4], pool.alloc(4), snapshot=a).took_snapshot
    # KV of [1, 2] is shared, but there is no state there.
    hit = cache.match([1, 2, 9])
    assert hit.length == 0 and hit.kv_length == 2 and hit.snapshot is None
    new = cache.insert([1, 2, 9], pool.alloc(3), snapshot=b)
    pool.free(new.kept)
    assert cache.match([1, 2, 3, 4, 5]).snapshot == a and cache.match([1, 2, 9, 9]).snapshot == b
    assert cache.match([1, 2, 3, 4], limit=3).length == 0  # not a cut of the longer one
    again = cache.insert([1, 2, 9], cache.match([1, 2, 9]).ids, snapshot=slots.alloc_track_slot())
    assert not again.took_snapshot
    with pytest.raises(PoolError, match="already the cache's"):
        cache.insert([5], pool.alloc(1), snapshot=a)
    cache.match([1, 2, 9])
    assert cache.evict_snapshots(1) == 1 and cache.match([1, 2, 3, 4]).length == 0
    assert not slots.is_held(a) and cache.match([1, 2, 9]).length == 3
    cache.check_integrity()


def test_window_tombstones_end_matches_and_are_revived() -> None:
    cache, pool, rows, _ = make(window=2)
    tokens = [1, 2, 3, 4, 5, 6]
    first = cache.insert(tokens, pool.alloc(6), window_ids=[0, 0, 0, *rows.alloc(3)])
    assert first.kept_window.size == 0
    hit = cache.match([*tokens, 7])
    assert hit.length == 6 and hit.window_ids.tolist() == [0, 0, 0, 1, 2, 3]
    short = cache.match(tokens[:4])  # one live token behind it, two are needed
    assert short.length == 0 and short.kv_length == 4
    assert cache.match(tokens[:5]).length == 5
    lock = cache.lock(cache.match(tokens).node)
    assert cache.evict_window(9) == 0  # both nodes hold a part of the locked window
    longer = cache.insert([*tokens, 7, 8], [*first.ids, *pool.alloc(2)], window_ids=[0] * 6 + rows.alloc(2).tolist())
    cache.unlock(lock)
    lock = cache.lock(longer.node)
    assert cache.evict_window(9) == 3 and rows.num_held == 2  # those that have left the locked window
    assert cache.match([*tokens, 7, 8]).length == 8 and cache.match(tokens).kv_length == 6
    cache.unlock(lock)
    assert cache.evict(2) == 2 and cache.match(tokens).length == 0 and cache.total_size == 6
    # A request computed the window anew, tokens 3..6: the cache adopts it, its KV ids stay the caller's.
    back = cache.insert(tokens, pool.alloc(6), window_ids=[0, 0, *rows.alloc(4)])
    assert back.kept.size == 6 and back.kept_window.size == 0 and back.ids.tolist() == first.ids.tolist()
    pool.free(back.kept)
    assert cache.match(tokens).length == 6
    # Once more: everything is there, so everything stays the caller's.
    twice = cache.insert(tokens, first.ids, window_ids=[0] * 4 + rows.alloc(2).tolist())
    assert twice.kept.size == 0 and twice.kept_window.size == 2
    rows.free(twice.kept_window)
    with pytest.raises(PoolError, match="without gaps"):
        cache.insert([9, 9, 9], pool.alloc(3), window_ids=[*rows.alloc(1), 0, *rows.alloc(1)])
    cache.check_integrity()


def test_a_locked_window_stays_when_its_node_is_split() -> None:
    cache, pool, rows, _ = make(window=4)
    tokens = [1, 2, 3, 4, 5, 6]
    lock = cache.lock(cache.insert(tokens, pool.alloc(6), window_ids=rows.alloc(6)).node)
    assert cache.match(tokens[:4]).length == 4  # splits within the window
    assert cache.evict_window(9) == 0 and cache.match(tokens).length == 6
    cache.check_integrity()
    cache.unlock(lock)
    cache.check_integrity()
    assert cache.evict_window(9) == 6


def test_a_window_needs_its_own_allocator() -> None:
    pool = TokenToKVPoolAllocator(8)
    for more in ({"window": 2}, {"window_allocator": pool}, {"window": 2, "window_allocator": pool}):
        with pytest.raises(PoolError, match="of its own"):
            RadixCache(pool, **more)


def test_chunk_cache_caches_nothing() -> None:
    cache, real = ChunkCache(), RadixCache
    assert {n for n in vars(real) if n[0] != "_"} <= set(dir(cache))
    done = cache.insert([1, 2], [5, 6], window_ids=[0, 3])
    assert done.kept.tolist() == [5, 6] and done.kept_window.tolist() == [3] and not done.took_snapshot
    hit = cache.match([1, 2])
    assert hit.length == 0 and cache.evict(3) == cache.evict_window(1) == cache.evict_snapshots(1) == 0
    cache.unlock(cache.lock(hit.node))
    cache.clear()
    cache.check_integrity()


def test_events_tell_which_pages_come_and_go() -> None:
    log, pool = EventLog(), TokenToKVPoolAllocator(40, 2)
    cache = RadixCache(pool, events=log)
    a = page_digests([1, 2, 3, 4, 5, 6], 2)
    first = cache.insert([1, 2, 3, 4, 5, 6, 7], pool.alloc(7))
    cache.match([1, 2, 3, 4])  # a split says nothing
    b = page_digests(np.array([1, 2, 9, 9], np.uint8), 2)
    cache.insert([1, 2, 9, 9], [*first.ids[:2], *pool.alloc(2)])
    other = page_digests([1, 2], 2, "adapter")
    cache.insert([1, 2], pool.alloc(2), "adapter")
    assert a[0] == b[0] and len({*a, *b, *other}) == 5 and page_digests([1], 2) == []
    cache.match([1, 2, 9, 9])
    assert cache.evict(4) == 4
    cache.clear()
    with pytest.raises(PoolError):
        cache.insert([1, 2, 3], [1, 2, 3])
    assert coalesce(log.since(0)[0]) == [
        EventBatch(1, "stored", Tier.DEVICE, tuple(a), None),
        EventBatch(4, "stored", Tier.DEVICE, (b[1],), b[0]),
        EventBatch(5, "stored", Tier.DEVICE, tuple(other), None),
        EventBatch(6, "removed", Tier.DEVICE, (a[2], a[1]), a[1]),
        EventBatch(8, "cleared", Tier.NONE, (), None),
    ]


def test_digests_are_of_canonical_bytes() -> None:
    """A known value, so that they are the same tomorrow; and no two namespaces share one."""
    root = sha256(b"dsv4_jax page digest 1 2 ('a', 1)").digest()
    assert page_digests([3, -1, 4, 5, 6], 2, ("a", np.int8(1)))[0] == sha256(root + struct.pack("<qq", 3, -1)).digest()
    tokens = list(range(100))
    for page in (np.int8(16), np.uint8(32), np.uint8(33)):
        assert page_digests(tokens, page) == page_digests(tokens, int(page)) != []
    spaces = [None, 1, "1", b"1", (1,), ("1",), (), ((),), "None", (1, "1")]
    assert len({page_digests([7], 1, space)[0] for space in spaces}) == len(spaces)
    cache = RadixCache(TokenToKVPoolAllocator(4), events=EventLog())
    for odd in (True, 1.0, (1, 2.0), 2**64, frozenset()):
        for call in (lambda odd=odd: page_digests([1], 1, odd), lambda odd=odd: cache.match([1], odd)):
            with pytest.raises(PoolError, match="namespace"):
                call()
    assert not RadixCache(TokenToKVPoolAllocator(4)).match([1], frozenset()).length  # its bytes are never read


@pytest.mark.parametrize("odd", [[1.0], [True], ["1"], [None], [[1], [2, 3]], [2**63], [2**70], 1.5, "12", {1}])
def test_odd_types_are_refused(odd: Any) -> None:
    cache, pool, *_ = make(window=2, states=2)
    ids = pool.alloc(1)
    calls = [lambda: cache.match(odd), lambda: cache.insert(odd, ids), lambda: page_digests(odd)]
    if odd != [2**63]:
        calls += [lambda: cache.insert([1], odd), lambda: cache.insert([1], ids, window_ids=odd)]
    for call in calls:
        with pytest.raises(PoolError):
            call()
    for call in (
        lambda: cache.match([1], [odd]),
        lambda: cache.insert([1], ids, {}),
        lambda: cache.insert([1], ids, snapshot=odd),
        lambda: cache.lock(odd),
        lambda: cache.unlock(odd),
        lambda: cache.evict(odd),
        lambda: cache.match([1], limit=odd),
    ):
        with pytest.raises(PoolError):
            call()
    cache.check_integrity()
    assert cache.total_size == 0


def test_a_snapshot_is_an_integer() -> None:
    cache, pool, _, slots = make(states=2)
    slots.alloc_track_slot()
    for odd in (3.0, np.float64(3), "3", [3]):
        with pytest.raises(PoolError, match="not a track slot"):
            cache.insert([1], pool.alloc(1), snapshot=odd)


def test_nodes_and_locks_of_another_cache_are_refused() -> None:
    mine, pool, *_ = make()
    theirs, their_pool, *_ = make()
    node = theirs.insert([1, 2], their_pool.alloc(2)).node
    mine.insert([1, 2], pool.alloc(2))
    with pytest.raises(PoolError, match="another cache's"):
        mine.lock(node)
    with pytest.raises(PoolError, match="another cache's"):
        mine.unlock(theirs.lock(node))
    assert mine.protected_size == 0 and theirs.protected_size == 2


def test_no_slot_changes_hands_within_a_batch() -> None:
    """The batch could take back what the tree has given away, and the other way round."""
    cache, pool, rows, _ = make(window=2)
    done = cache.insert([1, 2], pool.alloc(2), window_ids=rows.alloc(2))
    ids = pool.alloc(1)
    for allocator in (pool, rows):
        with allocator.batch():
            for call in (
                lambda: cache.insert([5], ids),
                lambda: cache.evict(1),
                lambda: cache.evict_window(1),
                cache.clear,
            ):
                with pytest.raises(PoolError, match="within a batch"):
                    call()
            assert cache.match([1, 2]).length == 2
            cache.unlock(cache.lock(done.node))
    cache.check_integrity()
    assert cache.evict(2) == 2


class Model:
    """What is cached, page by page: (namespace, prefix) -> its page's ids, window ids and snapshot."""

    def __init__(self, page: int, window: int, stateful: bool):
        self.page, self.window, self.stateful = page, window, stateful
        self.ids: dict[Any, list[int]] = {}
        self.rows: dict[Any, list[int]] = {}
        self.states: dict[Any, int] = {}

    def pages(self, space: Any, tokens: list[int]) -> list[Any]:
        """Keys of the whole pages of `tokens`."""
        return [(space, tuple(tokens[: i + self.page])) for i in range(0, len(tokens) - self.page + 1, self.page)]

    def match(self, space: Any, tokens: list[int]) -> tuple[list[int], int]:
        found, best = [], 0
        for key in self.pages(space, tokens):
            if key not in self.ids:
                break
            found.append(key)
            length = len(found) * self.page
            needed = -(-min(self.window, length) // self.page)
            whole = all(k in self.rows for k in found[len(found) - needed :])
            if whole and (not self.stateful or key in self.states):
                best = length
        return [i for key in found for i in self.ids[key]][:best], len(found) * self.page


@functools.cache
def digest_of(page: int, space: Any, tokens: tuple[int, ...]) -> bytes:
    return page_digests(tokens, page, space)[-1]


def hear(cache: RadixCache, known: dict[bytes, bytes | None]) -> None:
    """A router's books, from the events since the last call: no page is told of without the one before it."""
    events, missed = cache._tree.events.since(HEARD.get(cache, 0))
    assert not missed
    HEARD[cache] = cache._tree.events.last
    for event in events:
        if event.kind == "stored":
            assert event.digest not in known and (event.parent is None or event.parent in known)
            known[event.digest] = event.parent
        elif event.kind == "removed":
            assert event.digest not in known.values() and known.pop(event.digest) == event.parent
        else:
            known.clear()


HEARD: WeakKeyDictionary[RadixCache, int] = WeakKeyDictionary()


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]), st.sampled_from([0, 0, 3]), st.booleans())
@settings(max_examples=30)
@pytest.mark.slow
def test_trace(seed: int, page: int, window: int, stateful: bool) -> None:
    """100 operations an example over few tokens, so that prefixes are shared; after each, all books."""
    random = Random(seed)
    cache, pool, rows, slots = make(40, page, window or None, 6 if stateful else 0)
    model, locks = Model(page, window, stateful), []
    known: dict[bytes, bytes | None] = {}  # what a router has been told

    def sync() -> None:
        """What an eviction took, read off the allocators."""
        model.ids = {k: v for k, v in model.ids.items() if pool.is_held(v).all()}
        model.rows = {k: v for k, v in model.rows.items() if rows.is_held(v).all()}
        model.states = {k: v for k, v in model.states.items() if slots.is_held(v)}

    def insert(space: Any, tokens: list[int]) -> None:
        hit = cache.match(tokens, space)
        lock = cache.lock(hit.node)  # before any allocation that may evict
        at = hit.length if random.random() < 0.7 else random.randint(0, hit.length) // page * page  # some duplicates
        new = len(tokens) - at
        live = random.randint(0, len(tokens)) if window else len(tokens)
        for allocator, evict, count in ((pool, cache.evict, new), (rows, cache.evict_window, len(tokens) - live)):
            if allocator and allocator.available_size() < count:
                evict(count - allocator.available_size() + page)
                if allocator.available_size() < count and allocator is rows:
                    cache.evict(count)
                sync()
        try:
            ids = np.concatenate([hit.ids[:at], pool.alloc(new)])
        except OutOfBlocksError:
            return cache.unlock(lock)
        window_ids = None
        if window:
            try:
                window_ids = np.concatenate([np.zeros(live, np.int32), rows.alloc(len(tokens) - live)])
            except OutOfBlocksError:
                window_ids = np.zeros(len(tokens), np.int32)
        snapshot = None
        if stateful and len(tokens) % page == 0 and random.random() < 0.8 and slots.num_free:
            snapshot = slots.alloc_track_slot()
        done = cache.insert(tokens, ids, space, window_ids=window_ids, snapshot=snapshot)
        pages = model.pages(space, tokens)
        for number, key in enumerate(pages):
            part = slice(number * page, (number + 1) * page)
            model.ids.setdefault(key, ids[part].tolist())
            if window and window_ids[part].all():
                model.rows.setdefault(key, window_ids[part].tolist())
        assert done.ids.tolist() == [i for key in pages for i in model.ids[key]]
        pool.free(done.kept)
        if window:
            rows.free(done.kept_window)
        if snapshot is not None:
            assert done.took_snapshot == (bool(pages) and pages[-1] not in model.states)
            if done.took_snapshot:
                model.states[pages[-1]] = snapshot
            else:
                slots.free_track_slot(snapshot)
        cache.unlock(lock)

    for _ in range(100):
        kind = random.choice(["insert", "insert", "insert", "lock", "unlock", "evict", "rows", "states", "clear"])
        space = random.choice([None, "a"])
        tokens = [random.randint(1, 2) for _ in range(random.randint(0, 12))]
        kept = {lock: (space, tokens, cache_ids) for lock, space, tokens, cache_ids in locks}
        if kind == "insert":
            insert(space, tokens)
        elif kind == "lock" and len(locks) < 3:
            hit = cache.match(tokens, space)
            locks.append((cache.lock(hit.node), space, tokens[: hit.length], hit.ids.tolist()))
        elif kind == "unlock" and locks:
            cache.unlock(locks.pop(random.randrange(len(locks)))[0])
        elif kind == "evict":
            count, before = random.randint(0, 12), cache.evictable_size
            assert min(count, before) <= cache.evict(count) <= before
        elif kind == "rows" and window:
            cache.evict_window(random.randint(0, 9))
        elif kind == "states" and stateful:
            cache.evict_snapshots(random.randint(0, 3))
        elif kind == "clear" and not locks and random.random() < 0.2:
            cache.clear()
        sync()
        cache.check_integrity()
        pool.check_integrity()
        hear(cache, known)
        digests = {key: digest_of(page, *key) for key in model.ids}
        assert known == {d: digests.get((key[0], key[1][:-page])) for key, d in digests.items()}
        assert (
            sorted(i for ids in model.ids.values() for i in ids)
            == np.flatnonzero(pool.is_held(np.arange(40 + page))).tolist()
        )
        if window:
            held = np.flatnonzero(rows.is_held(np.arange(40 + page))).tolist()
            assert sorted(i for ids in model.rows.values() for i in ids) == held
        assert cache.total_size == pool.num_held == cache.protected_size + cache.evictable_size
        assert cache.evictable_size >= 0
        for space, tokens, ids in kept.values():
            if any(t is tokens for _, _, t, _ in locks):  # a locked match is still a match
                assert cache.match(tokens, space).ids.tolist() == ids == model.match(space, tokens)[0]
        probe = [random.randint(1, 2) for _ in range(12)]
        hit = cache.match(probe, space)
        assert (hit.ids.tolist(), hit.kv_length) == model.match(space, probe)
        if hit.length and stateful:
            assert hit.snapshot == model.states[space, tuple(probe[: hit.length])]
        if window and hit.length:
            assert hit.window_ids[-window:].all() or hit.window_ids[: hit.length].all()
    for lock, *_ in locks:
        cache.unlock(lock)
    cache.evict(100)
    assert cache.total_size == 0 == pool.num_held and (not stateful or slots.num_free == 6)


@pytest.mark.parametrize("form", [list, np.asarray], ids=["list", "array"])
def test_lines_do_not_grow_with_the_length(form) -> None:
    """Of an insert into an empty cache, one of the same again, a match, a lock and an eviction."""

    def use(length: int) -> None:
        pool, rows = TokenToKVPoolAllocator(3 * length), TokenToKVPoolAllocator(3 * length)
        cache = RadixCache(pool, window=16, window_allocator=rows)
        tokens = form(range(5, 5 + length))
        for _ in range(2):
            done = cache.insert(tokens, pool.alloc(length), window_ids=rows.alloc(length))
            pool.free(done.kept)
            rows.free(done.kept_window)
        match = cache.match(tokens)
        cache.unlock(cache.lock(match.node))
        assert match.length == length == cache.evict(1) and pool.num_held == rows.num_held == 0

    assert lines_run(use, 4000) == lines_run(use, 40)


@pytest.mark.parametrize(
    ("tokens", "key"),
    [
        ([1, 2, 2**63 - 1], [1, 2, 2**63 - 1]),
        ([-1, 2, 3], [-1, 2, 3]),
        ([np.int8(1), np.int64(2), 3], [1, 2, 3]),
        ((1, 2, 3), [1, 2, 3]),
        ([[1, 2, 3]], [1, 2, 3]),
    ],
)
def test_tokens_are_integers_of_any_type(tokens: Any, key: list[int]) -> None:
    cache, pool, *_ = make()
    cache.insert(tokens, pool.alloc(3))
    assert cache.match(np.array(key)).length == 3


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0],
        [1, 2.5],
        ["1"],
        [None],
        [2**64],
        [2**63, 1],
        [True],
        [[1], [2, 3]],
        [1, True],
        (1, False),
        [-1, True],
        [2, np.True_],
        [[1, 2], [3, True]],
        ([1, 2], (3, False)),
        [np.array([True]), np.array([2])],
    ],
    ids=repr,
)
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    cache, pool, *_ = make()
    for call in (lambda: cache.match(tokens), lambda: cache.insert(tokens, pool.alloc(1))):
        with pytest.raises(PoolError, match="tokens must be"):
            call()
    cache.check_integrity()


def test_a_node_keeps_no_more_memory_than_its_own_tokens_take() -> None:
    """Nodes were views of the prompts they came with: each turn of a long conversation kept all of it once more."""
    pool, rows = TokenToKVPoolAllocator(9000, 1), TokenToKVPoolAllocator(9000, 1)
    cache = RadixCache(pool, window=4, window_allocator=rows)
    tokens = np.arange(2000)
    for turn in range(20):
        hit = cache.match(tokens)
        tokens = np.append(tokens, [turn] * 3)
        new = len(tokens) - hit.length
        ids, row_ids = (np.append(a, b.alloc(new)) for a, b in ((hit.ids, pool), (hit.window_ids, rows)))
        cache.insert(tokens, ids, window_ids=row_ids)
    cache.match(tokens[:700])  # splits the first one
    arrays = [a for n in cache._tree.nodes() for a in (n.tokens, n.ids, n.window_ids)]
    assert len(arrays) == 21 * 3 and all(a.base is None for a in arrays)
