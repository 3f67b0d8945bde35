"""One call at a time: those of another thread, or of a signal handler, are refused and change nothing. Numbers for all.

A trace function stops a call of the manager at any of its lines; what other threads, or handlers within the same one,
do meanwhile must leave it as if nothing had been.
"""

from __future__ import annotations

import itertools
import pathlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import dsv4_jax.manager
from dsv4_jax import CacheLayout, CachePolicy, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.errors import ContextLimitError, ManagerBusyError, ManagerInterruptedError, NoFreeSlotError
from dsv4_jax.manager import EventLog, HostSize, Tier, guard, prometheus_text
from dsv4_jax.manager.storage_tier import StorageTier

from .test_interrupted import assert_closed

ROOT = str(pathlib.Path(dsv4_jax.manager.__file__).parent)
LAYOUT = CacheLayout(DSV4Config.tiny(hca_ratio=8), block_tokens=8)
PROMPT = [i * 5 % 7 for i in range(40)]


def make(**options) -> KVCacheManager:
    size = CacheSize(num_blocks=14, num_slots=3, max_blocks_per_request=8, num_snapshots=2)
    host = HostSize.of(LAYOUT, 12, 2)
    return KVCacheManager(LAYOUT, size, policy=CachePolicy(), host=host, events=EventLog(), **options)


class Pause:
    """Calls `meanwhile` before the n-th line of the manager that runs within a call; `reached` says whether it came to
    that."""

    def __init__(self, line: int, meanwhile: Callable[[], object]):
        self.left, self.meanwhile, self.reached = line, meanwhile, False

    def call(self, function: Callable, *args):
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function(*args)
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, arg):
        # (Not within the guard: the call has not begun there yet, or has ended.)
        ours = frame.f_code.co_filename.startswith(ROOT) and not frame.f_code.co_filename.endswith("guard.py")
        return self._line if ours else None

    def _line(self, frame, event, arg):
        if event == "line" and not self.reached:
            self.left -= self._inside(frame)
            if self.left < 0:
                self.reached = True
                sys.settrace(None)
                self.meanwhile()
        return self._line

    @staticmethod
    def _inside(frame) -> bool:
        """Whether the guard has noted the call."""
        while frame is not None:
            if isinstance(manager := frame.f_locals.get("self"), KVCacheManager):
                return bool(manager.guard._noted)
            frame = frame.f_back
        return False


def all_calls(manager: KVCacheManager) -> Iterator[Callable[[], object]]:
    """Every call that changes something, with arguments that would do."""
    request = manager.requests[0]
    tier = StorageTier(manager)
    yield from (
        lambda: manager.admit_request([1, 2]),
        lambda: manager.release_request(request),
        manager.reset,
        manager.sleep,
        lambda: manager.abort_request(request),
        lambda: manager.preempt(request),
        lambda: manager.fork(request),
        lambda: manager.reserve(request, 9),
        lambda: manager.schedule(9),
        lambda: manager.plan_step([(request, 1)]),
        lambda: manager.accept(request, 1),
        manager.commit,
        manager.take_transfers,
        manager.flush,
        manager.wakeup,
        lambda: manager.resize(manager.size),
        lambda: manager.acknowledge(""),
        lambda: manager.export_request(request),
        lambda: manager.resume(request),
        lambda: manager.can_resume(request),
        lambda: tier.plan_writes(9),
        lambda: tier.finish_writes([], []),
        lambda: tier.finish_reads([], []),
    )


def work(manager: KVCacheManager, pause: Pause | None = None) -> list:
    """A few steps of three requests; `pause` stops within the third. Returns all that the manager said."""
    said: list = []
    for tokens in (PROMPT, PROMPT[:20] + [9] * 5, PROMPT):
        manager.admit_request(tokens)
    for i in range(6):
        scheduled = manager.schedule(16)
        plan = manager.plan_step
        step = plan(scheduled) if pause is None or i != 2 else pause.call(plan, scheduled)
        said.append(([(r.id, n) for r, n in scheduled], step.pack().vector, manager.plan_tokens(step)))
        said.append([len(stage) for stage in manager.take_transfers()])
        for request in manager.requests:
            if not request.num_pending:
                request.tokens.append(i % 3)
        if i == 3:
            manager.preempt(manager.requests[0])
    manager.check_integrity()
    said.append((manager.stats(), [e[1:] for e in manager.events.since(0)[0]]))
    return said


def assert_same(one: list, other: list) -> None:
    for a, b in zip(one, other, strict=True):
        if isinstance(a, tuple) and isinstance(a[1], np.ndarray):
            assert a[0] == b[0]
            np.testing.assert_array_equal(a[1], b[1])
            np.testing.assert_array_equal(a[2], b[2])
        else:
            assert a == b


@pytest.mark.parametrize("where", ["another thread", "a handler"])
def test_a_call_beside_another_is_refused_and_the_other_goes_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one was told that the first had been interrupted, and that only `reset` was possible."""
    monkeypatch.setattr(guard, "PATIENCE", 0.0)
    undisturbed, told, lines = work(make()), 0, 0
    for line in range(0, 10_000, 23):
        manager = make()
        failures: list[BaseException | str] = []

        def ask(manager: KVCacheManager = manager, failures: list = failures) -> None:
            nonlocal told
            before = manager.stats()  # of the call before: there is nothing better now
            try:
                for call in (*all_calls(manager), manager.check_integrity, manager.can_admit):
                    with pytest.raises(ManagerBusyError, match=r"plan_step\(\) of this manager is under way") as busy:
                        call()
                    assert busy.value.call == "plan_step"
                    assert busy.value.thread == (None if where == "a handler" else "engine")
                    told += 1
                assert manager.stats() == before and manager.memory_bytes() and manager.pinned_shape(1)
                assert len(manager.requests) == 3 and not manager.preempted and manager.find(manager.requests[0].ref)
                assert prometheus_text(before)
            except BaseException as error:
                failures.append(error)

        def meanwhile(ask: Callable[[], None] = ask) -> None:
            if where == "a handler":
                ask()
            else:
                other = threading.Thread(target=ask)
                other.start()
                other.join()

        pause, said = Pause(line, meanwhile), []
        engine = threading.Thread(target=lambda m=manager, p=pause, s=said: s.extend(work(m, p)), name="engine")
        engine.start()
        engine.join()
        assert not failures, failures
        assert_same(said, undisturbed)
        if not pause.reached:
            break
        lines += 1
    assert lines > 10 and told == 25 * lines


def test_a_call_that_was_broken_off_in_a_thread_that_has_ended() -> None:
    manager, raised = make(), []
    request = manager.admit_request(PROMPT)

    def interrupt() -> None:
        raise KeyboardInterrupt("injected")

    def engine() -> None:
        try:
            Pause(5, interrupt).call(manager.plan_step, [(request, 8)])
        except KeyboardInterrupt:
            raised.append(True)

    for _ in range(2):
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
        assert raised.pop()
        assert_closed(manager)
        with pytest.raises(ManagerInterruptedError, match=r"plan_step.*KeyboardInterrupt"):
            manager.can_admit()
        manager.reset()
        request = manager.admit_request(PROMPT)
        manager.plan_step([(request, 8)])
        manager.check_integrity()


def test_who_waits_for_the_end_of_a_call_gets_fresh_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And `check_integrity` an answer: calls of an engine end, and others wait that long."""
    monkeypatch.setattr(guard, "PATIENCE", 60.0)
    manager = make()
    request = manager.admit_request(PROMPT)
    paused, go, seen = threading.Event(), threading.Event(), []

    def meanwhile() -> None:
        paused.set()
        assert go.wait(60)

    def look() -> None:
        seen.append(manager.stats())
        manager.check_integrity()
        seen.append(manager.can_admit())

    engine = threading.Thread(target=lambda: Pause(30, meanwhile).call(manager.plan_step, [(request, 40)]))
    engine.start()
    assert paused.wait(60)
    reader = threading.Thread(target=look)
    reader.start()
    reader.join(0.05)
    go.set()
    engine.join()
    reader.join()
    assert seen == [manager.stats(), True] and seen[0].tokens_cached == 40


def load(manager: KVCacheManager, steps: int, seed: int = 0) -> int:
    """An engine's loop: prompts that share beginnings come and go, blocks run out. Returns the steps planned."""
    draw, planned = random.Random(seed), 0
    while planned < steps:
        prompt = PROMPT[: draw.randrange(40)] + [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        if manager.can_admit(len(prompt)) and draw.random() < 0.5:
            manager.admit_request(prompt, request_id=draw.choice([None, ("name", planned)]))
        if manager.preempted and manager.can_resume(manager.preempted[0]) and draw.random() < 0.5:
            manager.resume(manager.preempted[0])
        if not (scheduled := manager.schedule(20)):
            if manager.requests:
                draw.choice([manager.preempt, manager.release_request])(draw.choice(manager.requests))
            continue
        manager.plan_tokens(manager.plan_step(scheduled))
        manager.take_transfers()
        planned += 1
        for request, _ in scheduled:
            if not request.num_pending:
                request.tokens.append(draw.randrange(3))
                if draw.random() < 0.2:
                    manager.release_request(request)
    return planned


class Scrapers:
    """Threads that ask for all that is for all threads, until they are stopped. `counts`: what each of them did."""

    def __init__(self, manager: KVCacheManager, count: int):
        self.manager, self.stop, self.failures = manager, threading.Event(), list[BaseException]()
        self.counts = [dict.fromkeys(("stats", "fresh", "events", "busy"), 0) for _ in range(count)]
        self.held: list[set[bytes]] = [set() for _ in range(count)]  # blocks on the device, by the events of each
        each = zip(self.counts, self.held, strict=True)
        self.threads = [threading.Thread(target=self._run, args=args, daemon=True) for args in each]

    def __enter__(self) -> Scrapers:
        self.before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        sys.setswitchinterval(self.before)

    def _run(self, count: dict[str, int], held: set[bytes]) -> None:
        try:
            self._scrape(count, held)
        except BaseException as error:
            self.failures.append(error)

    def _scrape(self, count: dict[str, int], held: set[bytes]) -> None:
        manager, seen, last = self.manager, 0, None
        assert manager.events is not None
        while True:
            stop = self.stop.is_set()  # once more after the engine's last step
            stats = manager.stats()
            text = prometheus_text(stats)
            assert f'requests{{state="live"}} {stats.slots_used}' in text
            for pool in stats.cache.pools.values():
                assert pool.free + pool.private + pool.cached == pool.total
            count["stats"] += 1
            count["fresh"] += stats is not last
            last = stats
            events, missed = manager.events.since(seen)
            assert not missed
            for event in events:
                seen += 1
                assert event.sequence == seen and event.digest is not None
                if event.tier is Tier.DEVICE:
                    (held.add if event.kind == "stored" else held.remove)(event.digest)
            count["events"] += len(events)
            assert all(request.id is not None for request in (*manager.requests, *manager.preempted))
            try:
                manager.can_admit(10)
                if count["stats"] % 50 == 0:
                    manager.check_integrity()
            except ManagerBusyError:
                count["busy"] += 1
            if stop:
                return


def test_scrapers_beside_an_engine() -> None:
    """They met `IntegrityError`, "a bug", or `ManagerInterruptedError`, "only reset() is possible now"."""
    manager = make()
    alone = make()
    with Scrapers(manager, 2) as scrapers:
        assert load(manager, 250) == 250
        while not scrapers.failures and any(count["stats"] < 4 for count in scrapers.counts):
            time.sleep(1e-3)
    assert not scrapers.failures, scrapers.failures
    assert load(alone, 250) == 250
    manager.check_integrity()
    assert manager.stats() == alone.stats()
    assert [r.tokens for r in manager.requests] == [r.tokens for r in alone.requests]
    assert [e[1:] for e in manager.events.since(0)[0]] == [e[1:] for e in alone.events.since(0)[0]]
    on_device = {node.digest for node in manager.cache.tree.nodes.published.values() if node.block}
    assert all(held == on_device for held in scrapers.held)
    assert all(count["stats"] > 3 and count["events"] == manager.events.last for count in scrapers.counts)


def test_threads_that_all_drive_one_manager_are_told_so_and_break_nothing() -> None:
    """Each call is done wholly or refused, whoever comes when; ids are given once."""
    manager, failures, done = make(), [], [0, 0]

    def drive(index: int) -> None:
        mine: list = []
        try:
            for i in itertools.count():
                if min(done) > 20 or failures:
                    return
                try:
                    if len(mine) > 1:
                        manager.release_request(mine[0])
                        del mine[0]
                    mine.append(manager.admit_request(PROMPT[: i % 40], request_id=(index, i)))
                    done[index] += 1
                except (ManagerBusyError, NoFreeSlotError, ContextLimitError):
                    continue
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=drive, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert not failures
    manager.check_integrity()


if __name__ == "__main__":
    soaked = make()
    with Scrapers(soaked, 3) as soak:
        steps, seed = 0, 0
        while steps < int(sys.argv[1]) or sum(count["stats"] for count in soak.counts) < int(sys.argv[2]):
            steps, seed = steps + load(soaked, 1000, seed), seed + 1
            for left in (*soaked.requests, *soaked.preempted):
                soaked.release_request(left)
            if soak.failures:
                break
    soaked.check_integrity()
    print(steps, "steps", soak.counts, "failures:", soak.failures)
