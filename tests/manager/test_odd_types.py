"""Tokens, counts, ids and namespaces of types that are never meant: typed errors, before anything changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pytest

from dsv4_jax import CacheLayout, CachePolicy, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.checks import check_integer
from dsv4_jax.errors import CacheError, PlanError, PoolError, RequestError
from dsv4_jax.manager import EventLog, MediaItem, Namespace
from dsv4_jax.manager.allocator import BlockAllocator
from dsv4_jax.manager.storage_tier import StorageTier

from .prefix.test_hashing_keys import BAD_TOKENS, Evil, kind

LAYOUT = CacheLayout(DSV4Config.tiny(hca_ratio=16), block_tokens=16)
SIZE = CacheSize(num_blocks=8, num_slots=3, max_blocks_per_request=4, num_snapshots=2)
BAD_COUNTS = [
    True,
    np.True_,
    1.0,
    np.float32(1),
    np.nan,
    "1",
    b"1",
    None,
    [1],
    np.array([1]),
    np.array(True),
    -1,
    2**63,
    10**5000,
    -(10**5000),
    Evil(),
    object(),
    1j,
]


@pytest.fixture(params=[None, CachePolicy()], ids=["no policy", "policy"])
def manager(request) -> KVCacheManager:
    manager = KVCacheManager(LAYOUT, SIZE, policy=request.param)
    manager.admit_request(range(20), request_id="first")
    return manager


def refused(manager: KVCacheManager, error: type[CacheError], call: Callable[[], object]) -> None:
    before, ids = manager.stats(), list(manager.book.ids)
    with pytest.raises(error):
        call()
    assert manager.stats() == before and list(manager.book.ids) == ids
    manager.check_integrity()


@pytest.mark.parametrize("count", BAD_COUNTS, ids=kind)
def test_counts(count) -> None:
    with pytest.raises(PlanError, match="the count must be"):
        check_integer("the count", count, error=PlanError)


def test_integers_of_any_type_are_counts() -> None:
    for value in (3, np.int8(3), np.uint64(3), np.array(3)):
        count = check_integer("the count", value, error=PlanError)
        assert count == 3 and type(count) is int
    assert check_integer("the count", 7, 7, 7, error=PlanError) == 7
    with pytest.raises(PlanError, match="from 0 to 6, got 7"):
        check_integer("the count", 7, 0, 6, error=PlanError)


def test_other_things_close_no_manager() -> None:
    """A packed plan, say: it is refused, and the manager goes on."""
    manager = KVCacheManager(LAYOUT, SIZE, policy=CachePolicy(), host=(9,))
    request, tier = manager.admit_request(range(20)), StorageTier(manager)
    plan = manager.plan_step([(request, 20)])
    manager.take_transfers()
    own = plan._replace(seq_slot=plan.seq_slot.copy(), seq_start=plan.seq_start.tolist())
    foreign = [b"a" * 31]

    def yes(keys):
        return [True] * len(keys)

    assert manager.export_again([], 0) is None
    for error, call in (
        *((PlanError, functools.partial(manager.plan_tokens, odd)) for odd in (plan.pack(), None, own)),
        *((PlanError, functools.partial(tier.finish_writes, odd, [True])) for odd in ([None], [], None)),
        *((PlanError, functools.partial(tier.finish_reads, odd, [True])) for odd in ([plan], [], None)),
        *((PlanError, functools.partial(tier.plan_fetch, odd, yes, yes)) for odd in (foreign, "ab", None)),
        (PlanError, lambda: tier.plan_fetch([b"a" * 32], lambda _: None, yes)),
        (PlanError, lambda: manager.plan_step(None)),
        (PlanError, lambda: manager.fork(request, request_ids=None)),
        (PlanError, lambda: manager.schedule(9, requests=5)),
        (RequestError, lambda: manager.find(request)),
        (RequestError, lambda: manager.resume(Evil())),
    ):
        refused(manager, error, call)
    assert manager.plan_tokens(plan)[:20].tolist() == list(range(20))


@pytest.mark.parametrize("count", [c for c in BAD_COUNTS if c is not None], ids=kind)
def test_counts_of_public_calls(manager: KVCacheManager, count) -> None:
    (request,) = manager.requests
    calls: list[Callable[[], object]] = [
        lambda: manager.admit_request(max_tokens=count),
        lambda: manager.reserve(request, count),
        lambda: manager.plan_step([(request, count)]),
        lambda: manager.plan_step([(request, 1)], steps=count),
        lambda: manager.accept(request, count),
        lambda: manager.schedule(count),
        lambda: manager.schedule(4, max_sequences=count),
        lambda: manager.schedule(4, max_chunk=count),
        lambda: BlockAllocator(count),
        lambda: EventLog(count),
        lambda: EventLog().since(count),
    ]
    for call in calls:
        refused(manager, PlanError, call)


@pytest.mark.parametrize("block", [c for c in BAD_COUNTS if c != -1 or isinstance(c, list)], ids=kind)
def test_released_ids(block) -> None:
    pool = BlockAllocator(4)
    pool.acquire(2)
    with pytest.raises(PoolError, match=r"not an integer|out of range"):
        pool.release([2, block])
    assert not pool.is_held(block) and pool.num_free == 2


def test_a_pool_of_more_ids_than_int32_has() -> None:
    with pytest.raises(PlanError, match="device pool must be an integer from 0 to 2147483647"):
        BlockAllocator(2**31)


@pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_tokens(manager: KVCacheManager, tokens) -> None:
    refused(manager, RequestError, lambda: manager.admit_request(tokens))


def test_tokens_that_became_bad(manager: KVCacheManager) -> None:
    (request,) = manager.requests
    plan = manager.plan_step([(request, 20)])
    for token in (True, 1.0, None, -1, 2**70, "1"):
        request.tokens[3] = token
        with pytest.raises(RequestError, match="tokens must be"):
            manager.plan_tokens(plan)


def test_what_a_generator_raises_is_passed_on(manager: KVCacheManager) -> None:
    def broken():
        yield 1
        raise KeyError("mine")

    for arguments in (dict(tokens=broken()), dict(items=broken_items())):
        with pytest.raises(KeyError, match="mine"):
            manager.admit_request(**arguments)
        assert len(manager.requests) == 1
        manager.check_integrity()


def broken_items():
    yield MediaItem("k", 0, 1)
    raise KeyError("mine")


@pytest.mark.parametrize("space", ["", "tenant", 0, [], (), False, {}, object()])
def test_namespaces(manager: KVCacheManager, space) -> None:
    refused(manager, RequestError, lambda: manager.admit_request([1], namespace=space))


@pytest.mark.parametrize("items", [None, 5, ["k"], [MediaItem("k", 3, 3)], [MediaItem(1.5, 0, 1)]])
def test_items(manager: KVCacheManager, items) -> None:
    refused(manager, RequestError, lambda: manager.admit_request([1], items=items))
    refused(manager, PlanError, lambda: manager.admit_request([1], items=[MediaItem("k", -1, 2)]))


def test_namespace_keys_without_a_policy_too(manager: KVCacheManager) -> None:
    refused(manager, RequestError, lambda: manager.admit_request([1], namespace=Namespace(1.5)))


def test_weights_id() -> None:
    for weights_id in (1.5, [1], {"a": 1}, True):
        with pytest.raises(RequestError):
            KVCacheManager(LAYOUT, SIZE, weights_id=weights_id)


@pytest.mark.parametrize(
    "host", [0, 5, "", (), [], (1, 2, 3), {}, False, (1.0, 0), (True, 0), (-1, 0), (4, "1"), (2**31, 0)]
)
def test_host_sizes(host) -> None:
    with pytest.raises(PlanError, match=r"host(\.\w+)? must be|pool must be"):
        KVCacheManager(LAYOUT, SIZE, host=host)


def test_host_sizes_of_any_integers() -> None:
    for host, size in ((None, (0,)), ((4,), (4,)), ([4], (4,)), ((np.int64(4),), (4,))):
        assert KVCacheManager(LAYOUT, SIZE, policy=CachePolicy(), host=host).host_size == size


@pytest.mark.parametrize("request_", BAD_COUNTS, ids=kind)
def test_requests(manager: KVCacheManager, request_) -> None:
    for call in (
        lambda: manager.release_request(request_),
        lambda: manager.abort_request(request_),
        lambda: manager.preempt(request_),
        lambda: manager.fork(request_),
        lambda: manager.accept(request_, 1),
        lambda: manager.reserve(request_, 1),
        lambda: manager.plan_step([(request_, 1)]),
    ):
        refused(manager, RequestError, call)
    refused(manager, PlanError, lambda: manager.plan_step([request_]))


def test_integers_are_no_requests(manager: KVCacheManager) -> None:
    """They meant slots, and so ended other requests than the one with this id."""
    others = [manager.admit_request([1, 2]) for _ in range(2)]
    assert [(r.id, r.slot) for r in others] == [(1, 2), (2, 3)]
    for number in (1, 2, 3, np.int32(1)):
        for call in (
            lambda n: manager.release_request(n),
            lambda n: manager.abort_request(n),
            lambda n: manager.preempt(n),
            lambda n: manager.fork(n),
            lambda n: manager.accept(n, 1),
            lambda n: manager.reserve(n, 1),
            lambda n: manager.plan_step([(n, 1)]),
            lambda n: manager.schedule(4, requests=[n]),
            lambda n: manager.export_request(n),
            lambda n: manager.resume(n),
            lambda n: manager.can_resume(n),
        ):
            refused(manager, RequestError, functools.partial(call, number))
    assert len(manager.requests) == 3


# Request ids


class Unhashable:
    def __hash__(self) -> int:
        raise ZeroDivisionError


class Incomparable:
    def __hash__(self) -> int:
        return hash("first")

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


class Different:
    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return False


BAD_IDS = [
    [],
    {},
    set(),
    np.array([1]),
    ([],),
    float("nan"),
    np.float64("nan"),
    Decimal("NaN"),
    Decimal("sNaN"),
    Unhashable(),
    Incomparable(),
    Different(),
    slice(1, 2, []),
]


@pytest.mark.parametrize("name", BAD_IDS, ids=kind)
def test_request_ids(manager: KVCacheManager, name) -> None:
    (request,) = manager.requests
    refused(manager, RequestError, lambda: manager.admit_request([1], request_id=name))
    refused(manager, RequestError, lambda: manager.fork(request, request_ids=[name]))
    refused(manager, RequestError, lambda: manager.fork(request, request_ids=["a", name]))


def test_ids_named_twice(manager: KVCacheManager) -> None:
    (request,) = manager.requests
    refused(manager, RequestError, lambda: manager.fork(request, request_ids=["a", "a"]))
    refused(manager, RequestError, lambda: manager.fork(request, request_ids=[1, np.int64(1)]))
    assert [r.id for r in manager.fork(request, request_ids=[None, None])] == [1, 2]


def test_ids_of_any_sound_type(manager: KVCacheManager) -> None:
    manager.reset()
    for name in ((1, "a"), frozenset([1]), b"x", 1.5, Decimal(2), object()):
        request = manager.admit_request([1], request_id=name)
        assert manager.find(request.ref) is request
        manager.release_request(request)


def test_a_request_has_a_list_of_its_own_of_plain_ints(manager: KVCacheManager) -> None:
    given = [200, 201, 202]
    request = manager.admit_request(given)
    given[0] = 5
    assert request.tokens == [200, 201, 202] and request.tokens[2] is given[2]
    manager.release_request(request)
    for tokens in (np.array([1, 2], np.uint16), [np.int64(1), 2], iter((1, 2))):
        request = manager.admit_request(tokens)
        assert request.tokens == [1, 2] and set(map(type, request.tokens)) == {int}
        manager.release_request(request)
