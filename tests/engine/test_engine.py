"""The engine's thread: readers of all kinds, aborts at any moment, failures, a device that hangs, the end."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import queue
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from dsv4_jax.engine import Core, Engine, Limits, Prompt, shapes_of
from dsv4_jax.engine.handle import Loops
from dsv4_jax.errors import EngineError, PlanError, QueueFullError, RequestError

from ..clock import PATIENCE
from .serving import CFG, COLUMNS, Seeded, Server, eventually

TEXT = list(range(1, 71))


def engine(watchdog=None, freeze=False, clock=time.monotonic, **options) -> tuple[Engine, Server]:
    server = Server(**options)
    return Engine(server.core, server.executor, watchdog=watchdog, freeze=freeze, clock=clock), server


class Inbox(queue.SimpleQueue):
    """Knows how often something was asked for."""

    asked = 0

    def put(self, item, *how) -> None:
        self.asked += 1
        super().put(item, *how)


def hold(serving: Engine, server: Server, calls: int, add: Callable[[], object]) -> None:
    """Requests that cannot end before somebody asks the engine for something, however busy the machine is.

    They are added together; of the calls behind that, the one of this number is under way until then.
    """
    left, before, asked = [calls], server.executor.on_get, list[int]()
    former, serving._inbox = serving._inbox, Inbox()
    former.put(lambda: None)  # the thread may wait there

    def on_get() -> None:
        before()
        left[0] -= 1
        if left[0] == 0:
            eventually(lambda: asked and serving._inbox.asked > asked[0])

    serving.pause()
    server.executor.on_get = on_get
    add()
    serving.resume()
    asked.append(serving._inbox.asked)


def prompt(number: int, count: int = 12, **options) -> Prompt:
    return Prompt(tokens=[number % CFG.vocab_size, 2, 3], max_new_tokens=count, sampling=Seeded(number), **options)


def answer(server: Server, number: int, count: int = 12, index: int = 0) -> list[int]:
    return server.expected([number % CFG.vocab_size, 2, 3], count, seed=number, index=index)


def joined(outputs) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def test_outputs_come_as_they_are_sampled():
    serving, server = engine()
    with serving:
        readers = []
        hold(serving, server, 3, lambda: readers.append(iter(serving.add(prompt(5)))))
        outputs = [next(readers[0])]
        serving.abort("nobody")
        outputs += readers[0]
        assert joined(outputs) == answer(server, 5)
        assert [output.finish for output in outputs][-1] == "length" and len(outputs) > 1
        handle = serving.add(prompt(6, n=3))
        assert [one.tokens for one in handle.results(10)] == [answer(server, 6, index=i) for i in range(3)]
        assert handle.done and {output.index for output in handle} == {0, 1, 2}, "all of it, for who comes late"
        answers = serving.run(prompt(i) for i in range(20))
        assert [samples[0].tokens for samples in answers] == [answer(server, i) for i in range(20)]
    server.check_empty()


def test_a_loop_that_has_not_run_is_waited_for_once(monkeypatch):
    """Steps that never let go of the interpreter would keep a loop from its turns until the engine is done."""
    monkeypatch.setattr("dsv4_jax.engine.handle.FAIR", PATIENCE)
    loops, loop, events = Loops(), asyncio.new_event_loop(), [asyncio.Event() for _ in range(3)]
    loops.wake([(loop, events[0]), (loop, events[0])])  # waits for nothing
    step = threading.Thread(target=loops.wake, args=([(loop, events[1])],))
    step.start()
    eventually(lambda: loops._called[loop].waited)
    loops.wake([(loop, events[2])])  # who comes after that waits no longer
    assert step.is_alive()
    loop.run_until_complete(asyncio.sleep(0))
    step.join(PATIENCE)
    assert not step.is_alive() and all(event.is_set() for event in events) and not loops._called
    loops.wake([(loop, events[0])])
    loop.close()
    other = asyncio.new_event_loop()
    loops.wake([(other, events[1])])
    assert [*loops._called] == [other], "one that is closed is forgotten"
    other.close()
    loops.wake([(other, events[1])])  # nobody reads any more


def test_readers_in_asyncio_come_and_go():
    """Fifty streams on one loop; leaving one, or being cancelled, aborts its request."""
    serving, server = engine(slots=3)

    def leaving(seen: list[int]) -> Callable[[list[int]], bool]:
        """Of a request that does not end before its reader leaves."""
        return lambda ids: seen.extend(ids) or (len(seen) > 5 and eventually(serving._inbox.qsize)) or False

    async def read(number: int) -> list[int]:
        tokens: list[int] = []
        async for output in serving.add(prompt(number, 40, stop_after=None if number % 5 else leaving([]))):
            tokens += output.tokens
            if number % 5 == 0 and len(tokens) > 3:
                break
        return tokens

    async def all_of_them() -> list[list[int]]:
        cancelled = [asyncio.create_task(read(1000 + i)) for i in range(5)]
        tasks = [asyncio.create_task(read(i)) for i in range(50)]
        await asyncio.sleep(0.01)
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        return await asyncio.gather(*tasks)

    with serving:
        for number, tokens in enumerate(asyncio.run(all_of_them())):
            assert tokens == answer(server, number, 40)[: len(tokens)] and (number % 5 == 0 or len(tokens) == 40)
        eventually(lambda: serving.stats().live + serving.stats().queued == 0)
        assert serving.stats().counts["ended_abort"] >= 10
    server.check_empty()


def test_many_threads_add_abort_and_read():
    """None is forgotten, and none is told what is another's."""
    serving, server = engine(slots=5, steps=3, host=True, limits=Limits(queued=100_000))
    wrong: list[object] = []

    def user(first: int) -> None:
        rng = random.Random(first)
        for number in range(first, first + 25):
            handle = serving.add(prompt(number, rng.randint(1, 30), priority=rng.randint(0, 2)))
            if rng.random() < 0.3:
                handle.abort()
            elif rng.random() < 0.3:
                for output in handle:
                    if output.tokens and rng.random() < 0.3:
                        break
            one = handle.result(60)
            if one.tokens != answer(server, number, 30)[: len(one.tokens)] or one.finish not in ("length", "abort"):
                wrong.append(one)

    with serving:
        users = [threading.Thread(target=user, args=(100 * i,)) for i in range(8)]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join(120)
        assert not wrong and not any(thread.is_alive() for thread in users)
    assert sum(count for name, count in server.core.counts.items() if name.startswith("ended")) == 200
    server.check_empty()


def test_a_slow_reader_holds_nobody_up():
    """What it does not read waits, joined, and is one output then."""
    serving, server = engine()
    with serving:
        slow = iter(serving.add(prompt(1, 60)))
        first = next(slow)
        serving.add(prompt(2, 100)).results(10)
        time.sleep(0.01)
        rest = list(slow)
        assert len(rest) <= 2 and first.tokens + joined(rest) == answer(server, 1, 60)


def test_refusals_come_at_once():
    serving, server = engine(limits=Limits(queued=2))
    with serving:
        serving.pause()
        held = [serving.add(prompt(1, id="a")), serving.add(prompt(2))]
        for problem, match, one in (
            (QueueFullError, "2 requests wait already, at most 2", prompt(3)),
            (RequestError, "'a' is in use", prompt(3, id="a")),
            (RequestError, "hashable", prompt(3, id=[])),
            (RequestError, "expected a Prompt", [1, 2]),
            (RequestError, "is not in 0..255", Prompt(tokens=[10_000])),
        ):
            with pytest.raises(problem, match=match):
                serving.add(one)
        with pytest.raises(TimeoutError):
            held[0].result(0.05)
        serving.resume()
        assert [handle.result(10).finish for handle in held] == ["length"] * 2
        assert len(serving.run(prompt(i) for i in range(10))) == 10, "a list waits for room in the queue"
    with pytest.raises(EngineError, match="closed"):
        serving.add(prompt(1))
    with pytest.raises(EngineError, match="closed"):
        serving.pause()
    server.check_empty()


def test_a_failed_step_is_its_requests_error():
    calls = [0]

    def on_send(_: object) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise OSError("the device is gone")

    serving, server = engine(slots=2, on_send=on_send)
    with serving:
        first = [serving.add(prompt(i)) for i in range(2)]
        ends = {handle.result(10).finish for handle in first}
        assert "error" in ends
        assert [samples[0].tokens for samples in serving.run([prompt(7)])] == [answer(server, 7)]
        assert isinstance(next(h.result() for h in first if h.result().finish == "error").error, OSError)
        assert serving.stats().counts["failures"] == 1
    server.check_empty()


def test_a_device_that_hangs_trips_the_watchdog():
    """All who wait are told, the next are refused; when the device is back, the engine is."""
    release, calls = threading.Event(), [0]

    def on_get() -> None:
        calls[0] += 1
        if calls[0] == 1:
            release.wait(PATIENCE)

    serving, server = engine(watchdog=0.2, slots=1, on_get=on_get)
    with serving:
        serving.pause()
        handles = [serving.add(prompt(i)) for i in range(3)]
        serving.resume()
        assert {handle.result(10).finish for handle in handles} == {"error"}
        assert "0.2 s" in str(handles[0].result().error)
        with pytest.raises(EngineError, match=r"0\.2 s"):
            serving.add(prompt(4))
        serving._watchdog = PATIENCE  # nor is a busy machine a device that hangs
        release.set()
        eventually(lambda: serving._hung is None)
        handle = serving.add(prompt(4))
        assert handle.result(10).tokens == answer(server, 4)
    server.check_empty()


def test_an_executor_that_does_not_recover_ends_the_engine():
    serving, server = engine(on_send=lambda _: (_ for _ in ()).throw(OSError("gone")))
    server.executor.recover = lambda: (_ for _ in ()).throw(OSError("for good"))
    handle = serving.add(prompt(1))
    assert "for good" in str(handle.result(10).error)
    with pytest.raises(EngineError, match="for good"):
        serving.add(prompt(1))
    serving.close(timeout=10)


def test_closing_aborts_or_waits():
    serving, server = engine()
    handles = [serving.add(prompt(i, 100)) for i in range(20)]
    serving.close(drain=True)
    assert {handle.result(0.1).finish for handle in handles} == {"length"}
    serving, server = engine()
    hold(serving, server, 3, lambda: handles.extend(serving.add(prompt(i, 150)) for i in range(20)))
    serving.close()
    assert {handle.result(0.1).finish for handle in handles[20:]} == {"abort"}
    serving.close()
    server.check_empty()


def test_pause_and_resume_keep_or_drop():
    serving, server = engine(slots=2)
    with serving:
        handles = []
        hold(serving, server, 3, lambda: handles.extend(serving.add(prompt(i, 100)) for i in range(2)))
        next(iter(handles[0]))
        serving.pause()
        steps = server.core.counts["steps"]
        time.sleep(0.02)
        assert server.core.counts["steps"] == steps
        serving.resume()
        assert [handle.result(10).finish for handle in handles] == ["abort", "length"], "of one the reader left"
        assert handles[1].result().tokens == answer(server, 1, 100)
        hold(serving, server, 3, lambda: handles.extend(serving.add(prompt(i, 150)) for i in range(2)))
        eventually(lambda: serving.stats().live)
        serving.pause()
        serving.resume(keep=False)
        assert {handle.result(10).finish for handle in handles[2:]} == {"abort"}
    server.check_empty()


def test_the_collector_is_left_as_it_was():
    before = gc.get_threshold()
    serving, _ = engine(freeze=True)
    with serving:
        serving.run([prompt(1)])
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count()
    assert gc.get_threshold() == before and not gc.get_freeze_count()


def test_bad_arguments_are_refused():
    server = Server()
    with pytest.raises(PlanError, match="core must be a Core"):
        Engine(None, server.executor)
    with pytest.raises(PlanError, match="executor must be an Executor, got 5"):
        Engine(server.core, 5)
    with pytest.raises(PlanError, match="other shapes"):
        Engine(server.core, Server(chunk=64).executor)
    with pytest.raises(PlanError, match="watchdog"):
        Engine(server.core, server.executor, watchdog=0)
    shapes = server.executor.shapes
    wide = shapes._replace(decode=dataclasses.replace(shapes.decode, columns=COLUMNS + 1))
    for problem, given, options in (
        ("managers must be an iterable, got 5", (5, shapes), {}),
        ("storage must be an iterable, got 5", (server.managers, shapes), dict(storage=5)),
        ("shapes must be Shapes, got None", (server.managers, None), {}),
        (f"decode must be a StepShape of {COLUMNS} columns", (server.managers, wide), {}),
    ):
        with pytest.raises(PlanError, match=problem):
            Core(*given, **options)
    for chunk, options in ((None, {}), (64, dict(drafts="x"))):
        with pytest.raises(PlanError, match="must be an integer"):
            shapes_of(server.managers, chunk, **options)


def test_calls_with_what_is_none_are_refused():
    serving, server = engine()
    vars(server.executor).update(update=lambda params, donate, fits: fits())
    with serving:
        for problem, call in (
            (RequestError, lambda: serving.run(5)),
            (RequestError, lambda: serving.score(None)),
            (RequestError, lambda: serving.receive([], b"")),
            (RequestError, lambda: serving.update_weights(None, np.array([1, 2]))),
            (EngineError, lambda: serving.close(drain=1)),
            (EngineError, lambda: serving.close(timeout="long")),
        ):
            with pytest.raises(problem):
                call()
        assert serving.add(prompt(4)).result(10).tokens == answer(server, 4), "it is open, and nothing has changed"
    server.check_empty()
