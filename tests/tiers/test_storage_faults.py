"""`StorageDriver` over stores that hang, fail, are closed or answer nonsense: misses, and nobody waits."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from dsv4_jax.errors import RequestError, StoreError, StoreFormatError
from dsv4_jax.manager import prometheus_text
from dsv4_jax.manager.prefix.node import Tier
from dsv4_jax.tiers import storage_driver
from dsv4_jax.tiers.storage_driver import MAX_SAVES, StorageDriver
from dsv4_jax.tiers.store_calls import MAX_LATE

from ..clock import PATIENCE
from .test_storage_driver import HOST, PROMPT, Engine, serve_random_prompts, stored_prompt


class Fault:
    """Calls of a store by this name go on to it when `open` is set, and then do as they are told."""

    def __init__(self, engine: Engine, scope: int, name: str, result=None):
        store = engine.stores[scope].store
        self.open, self.result, self.calls = threading.Event(), result, 0
        self.work = getattr(store, name)
        setattr(store, name, self)

    def __call__(self, *arguments):
        self.calls += 1
        assert self.open.wait(PATIENCE)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.work(*arguments) if self.result is None else self.result


@pytest.fixture
def engine(tmp_path):
    """Its prompt is in storage, and nowhere else."""
    engine = Engine(tmp_path)
    stored_prompt(engine)
    engine.manager.reset()
    engine.fresh()
    engine.faults = []
    yield engine
    for fault in engine.faults:
        fault.open.set()
    engine.close()


def fault(engine: Engine, scope: int, name: str, result=None, *, hang: bool = False) -> Fault:
    engine.faults.append(Fault(engine, scope, name, result))
    if not hang:
        engine.faults[-1].open.set()
    return engine.faults[-1]


def again(engine: Engine, **deadlines) -> None:
    engine.driver = StorageDriver(engine.manager, *engine.stores, clock=engine.clock, **deadlines)


@pytest.mark.parametrize("scope", [0, 1])
@pytest.mark.parametrize("name", ["contains", "read_into"])
def test_a_hanging_store_is_a_miss_and_nobody_waits(engine, scope, name) -> None:
    again(engine, lookup_deadline=5 if name == "contains" else 30, deadline=5)
    hanging = fault(engine, scope, name, hang=True)
    prefetch = engine.driver.prefetch(PROMPT)
    while not hanging.calls:
        engine.host = engine.driver.poll(engine.host)
    for _ in range(3):
        engine.clock.advance(1.5)
        engine.host = engine.driver.poll(engine.host)
        engine.manager.check_integrity()
        assert not prefetch.done
    engine.clock.advance(1.5)
    engine.host = engine.driver.drain(engine.host)
    engine.manager.check_integrity()
    assert prefetch.done
    assert engine.manager.admit_request(PROMPT).num_hit == 0 and not engine.driver.busy
    if name == "contains" or scope == 0:
        assert engine.free() == HOST.num_pages
    hanging.open.set()  # what it says now counts no more
    for store in engine.stores:
        store.drain(PATIENCE)
    engine.host = engine.driver.poll(engine.host)
    engine.manager.check_integrity()
    engine.manager.reset()
    assert engine.fetch(PROMPT) == 5  # the store is well again


NONSENSE = [np.ones(9, bool), object(), StoreError("no"), SystemExit()]


@pytest.mark.parametrize("scope", [0, 1])
@pytest.mark.parametrize("name", ["contains", "read_into"])
@pytest.mark.parametrize("result", NONSENSE, ids=["flags", "object", "StoreError", "SystemExit"])
def test_a_store_that_fails_or_answers_nonsense_is_a_miss(engine, scope, name, result) -> None:
    failing = fault(engine, scope, name, result)
    prefetch = engine.driver.prefetch(PROMPT)
    engine.host = engine.driver.drain(engine.host)
    engine.manager.check_integrity()
    assert prefetch.done and failing.calls
    assert engine.manager.admit_request(PROMPT).num_hit == 0
    tree, digests = engine.manager.cache.tree, engine.driver.tier.digests(PROMPT)
    if name == "read_into":  # it did not say that it has lost the records
        assert all(tree.get(digest) for digest in digests)
        failing.result = None
        engine.manager.reset()
        assert engine.fetch(PROMPT) == 5


def test_what_becomes_of_calls_is_counted(engine) -> None:
    """Hits, misses, failures, deadlines and refusals, each by store and kind of call."""
    again(engine, lookup_deadline=1, deadline=1)
    engine.manager.reset()
    assert engine.fetch(PROMPT) == 5
    before = engine.driver.stats().counts
    assert before["block", "read_into", "found"] == 4 and before["slot", "read_into", "found"] == 1
    assert before["slot", "contains", "missed"] > 0
    failing = fault(engine, 0, "contains", StoreError("no"))
    assert engine.fetch([6] * 33) == 0
    failing.result, failing.open = None, threading.Event()
    for _ in range(MAX_LATE + 2):
        engine.driver.prefetch([5] * 33)
        engine.clock.advance(1)
        engine.host = engine.driver.drain(engine.host)
    stats = engine.driver.stats()
    more = {result: stats.counts["block", "contains", result] for result in ("failed", "late", "refused")}
    assert more == {"failed": 1, "late": MAX_LATE, "refused": 2} and stats.late["block"] == MAX_LATE
    text = prometheus_text(stats, prefix="dsv4_storage")
    assert 'dsv4_storage_calls_total{scope="block",call="contains",result="late"} 16' in text
    size = stats.record_bytes["block"]
    assert f'dsv4_storage_bytes_total{{scope="block",call="read_into"}} {4 * size}' in text
    assert stats.seconds["block", "contains"] >= MAX_LATE


def test_closed_stores_are_misses(engine) -> None:
    engine.stores[1].close()
    assert engine.fetch(PROMPT) == 0
    engine.stores[0].close()
    assert engine.fetch(PROMPT) == 0
    engine.serve([3] * 41)
    again(engine, deadline=5)
    engine.serve([4] * 41)  # saved to nowhere
    engine.clock.advance(5)
    engine.host = engine.driver.drain(engine.host)
    engine.manager.check_integrity()
    assert not engine.driver.busy


def test_prefetch_raises_for_its_arguments_only(engine) -> None:
    for tokens in ([-1] * 33, ["a"] * 33, [2**40] * 33):
        with pytest.raises(RequestError):
            engine.driver.prefetch(tokens)
    assert engine.driver.prefetch([]).done and not engine.driver.busy
    assert engine.fetch(np.array(PROMPT)) == 5
    for bad in (0, -1.0, float("nan"), None, "1", True):
        for name in ("deadline", "lookup_deadline"):
            with pytest.raises(StoreFormatError, match=name):
                again(engine, **{name: bad})


def test_a_prompt_that_changes_after_prefetch_was_asked_is_the_one_that_it_was(engine) -> None:
    prompt = list(PROMPT)
    prefetch = engine.driver.prefetch(prompt)
    prompt[:] = [5] * 33
    engine.host = engine.driver.drain(engine.host)
    assert prefetch.records == 5 and engine.manager.admit_request(PROMPT).num_hit == 32


def test_a_store_that_hangs_for_ever_takes_a_bounded_number_of_calls(engine) -> None:
    again(engine, lookup_deadline=1, deadline=1)
    fault(engine, 0, "contains", hang=True)
    for _ in range(100):
        engine.driver.prefetch(PROMPT)
        engine.clock.advance(1)
        engine.host = engine.driver.poll(engine.host)
    assert engine.stores[0].pending_calls == MAX_LATE
    engine.host = engine.driver.drain(engine.host)


def test_records_for_a_store_that_hangs_do_not_pile_up(engine, monkeypatch) -> None:
    """Those accepted are in its queue; those that it has no room for are a few, and given up in time."""
    for store in engine.stores:
        store.queue_bytes = 1
    fault(engine, 0, "write", hang=True), fault(engine, 1, "write", hang=True)
    again(engine, deadline=5)
    for other in range(8):
        engine.serve([other] * 41)
        assert engine.driver.waiting_saves <= MAX_SAVES + 1
    assert engine.driver.waiting_saves
    engine.clock.advance(5)
    engine.host = engine.driver.drain(engine.host)
    engine.manager.check_integrity()
    assert not engine.manager.cache.tree.held(Tier.STORAGE)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", ["gather_of_ranks", "scatter_of_ranks"])
def test_a_copy_that_fails_leaves_the_books_whole(engine, monkeypatch, name, error) -> None:
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(storage_driver, name, fail)
        with pytest.raises(error):
            if name == "scatter_of_ranks":
                engine.fetch(PROMPT)
            else:
                engine.serve([3] * 41)
                engine.serve([4] * 41)
                engine.serve([5] * 41)
        engine.manager.check_integrity()
    if name == "scatter_of_ranks":
        assert engine.free() == HOST.num_pages and not engine.driver.busy
        assert engine.fetch(PROMPT) == 5
    engine.host = engine.driver.drain(engine.host)
    engine.manager.check_integrity()


def test_random_traces_over_faulty_stores(tmp_path) -> None:
    """Whatever the stores do, what comes back has the bytes that were saved, and in the end all is accounted for.

    How much comes back depends on which calls are late, so on the order of threads; afterwards, all of a prompt does.
    """
    rng, engine, faulty = random.Random(5), Engine(tmp_path), threading.Event()
    again(engine, lookup_deadline=5, deadline=5)
    for store in engine.stores:
        for name in ("contains", "read_into", "write"):
            setattr(store.store, name, sometimes(getattr(store.store, name), engine, random.Random(name), faulty))
    faulty.set()
    assert serve_random_prompts(engine, rng, 40)
    faulty.clear()
    again(engine)
    stored_prompt(engine)
    engine.manager.reset()
    assert engine.fetch(PROMPT) == 5
    engine.close()


def sometimes(work, engine: Engine, rng: random.Random, faulty: threading.Event):
    """A call of a store that now and then fails, is late, or answers nonsense, as long as `faulty` is set."""

    def run(*arguments):
        kind = rng.random() if faulty.is_set() else 1.0
        if kind < 0.1:
            raise OSError("now and then")
        if kind < 0.2:
            engine.clock.advance(7)  # and with it all that are under way
        answer = work(*arguments)
        return answer[:-1] if 0.2 < kind < 0.25 else answer

    return run
