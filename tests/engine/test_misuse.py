"""What users and machines do to an engine that they should not: none of it is another request's trouble."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time

import numpy as np
import pytest

from dsv4_jax.engine import Engine, Limits, Prompt
from dsv4_jax.engine.handle import Handle
from dsv4_jax.engine.prompt import Output
from dsv4_jax.errors import EngineError, PlanError, RequestError
from dsv4_jax.manager import MediaItem, Namespace

from ..clock import PATIENCE, FakeClock
from ..effort import lines_run
from .serving import BLOCK, COLUMNS, Seeded, Server, eventually
from .test_engine import TEXT, answer, engine, hold, joined, prompt

# Ids, and who aborts whom


def test_an_abort_of_what_is_no_id_is_refused_and_nobodys_trouble():
    serving, server = engine()
    with serving:
        handle = serving.add(prompt(1, 100))
        with pytest.raises(RequestError, match="hashable"):
            serving.abort([])
        serving.abort("nobody")
        assert handle.result(10).tokens == answer(server, 1, 100) and not serving.stats().counts.get("failures")
    server.check_empty()


def test_a_handle_aborts_its_own_request_and_none_of_its_name():
    serving, server = engine()
    with serving:
        first = serving.add(prompt(1, 3, id="name"))
        reader = iter(serving.add(prompt(2, 100, id="other")))
        next(reader)
        first.result(10)
        eventually(lambda: "name" not in serving._handles)
        second = serving.add(prompt(3, 150, id="name"))
        first.abort()
        assert second.result(10).finish == "length" and second.result().tokens == answer(server, 3, 150)
        reader.close()
    server.check_empty()


def test_more_samples_than_the_queue_holds_are_refused():
    serving, server = engine(limits=Limits(queued=3))
    with serving:
        with pytest.raises(RequestError, match="n is 4, at most 3"):
            serving.run([prompt(1, n=4)])
        assert len(serving.run([prompt(1, n=3)])[0]) == 3
    server.check_empty()


# Callbacks


def test_callbacks_may_ask_the_engine_and_must_not_wait_for_it():
    """In the engine's thread: they add and abort requests; what would wait for a turn is refused, not a deadlock."""
    serving, server = engine(slots=3)
    refused, more = [], []

    def meddle(ids):
        if refused:
            return False
        more.append(serving.add(prompt(7, 5)))
        for call in (
            serving.pause,
            serving.resume,
            serving.sleep,
            serving.warm_up,
            more[0].result,
            lambda: next(iter(more[0])),
            lambda: serving.update_weights(None, "new"),
            lambda: serving.run([prompt(8)]),
        ):
            try:
                call()
            except EngineError as error:
                refused.append(str(error))
        serving.abort("victim")
        return False

    with serving:
        serving.pause()
        victim = serving.add(prompt(3, 150, id="victim"))
        handles = [serving.add(prompt(1, 40, stop_after=meddle)), serving.add(prompt(2, 40))]
        serving.resume()
        assert [handle.result(10).finish for handle in handles] == ["length"] * 2
        assert [handle.result(10).tokens for handle in handles] == [answer(server, i, 40) for i in (1, 2)]
        assert len(refused) == 8 and all("engine's own thread" in problem for problem in refused)
        assert victim.result(10).finish == "abort"
        assert more[0].result(10).finish == "abort", "who leaves an iteration aborts"
    server.check_empty()


def test_a_callback_may_close_the_engine():
    serving, server = engine()
    first = serving.add(prompt(1, 100, stop_after=lambda ids: serving.close()))
    assert first.result(10).finish == "abort"
    serving.close(timeout=10)
    assert not serving._thread.is_alive()
    server.check_empty()


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_callback_that_gives_up_ends_its_own_request(error):
    def bad(*_):
        raise error

    server = Server()
    good = server.add(TEXT[:5], 9)
    names = [server.add(TEXT[:5], 9, stop_after=bad), server.add(TEXT[:5], 9, mask=bad)]
    server.run()
    assert [server.finish[name, 0] for name in (good, *names)] == ["length", "error", "error"]
    server.check_empty()


def test_callbacks_that_end_requests_of_the_core():
    """Their own, or those of the same step: each ends once."""
    server = Server(slots=4)
    core = server.core
    plain = server.add(TEXT[:5], 9, sampling=Seeded(1))
    stop = server.add(TEXT[:6], 9, id="stop", stop_after=lambda ids: core.abort("stop"))
    mask = server.add(TEXT[:7], 9, id="mask", mask=lambda ids, row: core.abort("mask"))

    def both(ids, row):
        core.abort("both")
        raise ValueError

    both_ = server.add(TEXT[:8], 9, id="both", mask=both)
    server.run()
    assert {server.finish[name, 0] for name in (stop, mask, both_)} == {"abort"}
    assert server.tokens[plain, 0] == server.expected(TEXT[:5], 9, seed=1)
    server.check_empty()


def test_a_callback_cannot_change_what_it_is_shown():
    server = Server()
    name = server.add(TEXT[:5], 9, sampling=Seeded(1), stop_after=lambda ids: ids.clear())
    server.run()
    assert server.tokens[name, 0] == server.expected(TEXT[:5], 9, seed=1)


# Failures


def test_an_error_that_comes_again_and_again_ends_requests():
    """Of planning, or beside the steps: nobody is under way, and nobody's request is left without an answer."""
    for what in ("poll", "plan"):
        serving, server = engine()

        def broken(**_):
            raise OSError("a store has no manners")

        with serving:
            serving.run([prompt(1)])
            if what == "poll":
                vars(server.executor).update(poll=broken)
            else:
                vars(server.core).update(_bring_in=lambda now: broken())
            ends = [serving.add(prompt(i, 20)).result(10) for i in range(3)]
            assert {end.finish for end in ends} == {"error"}
            if what == "poll":
                del vars(server.executor)["poll"]
            else:
                del vars(server.core)["_bring_in"]
            assert serving.add(prompt(4)).result(10).tokens == answer(server, 4)
        server.check_empty()


def test_a_failed_warm_up_is_the_callers_error_and_the_engine_goes_on():
    calls = [0]

    def on_send(_):
        calls[0] += 1
        if calls[0] == 1:
            raise OSError("no memory")

    serving, server = engine(on_send=on_send, ahead=False)
    with serving:
        with pytest.raises(OSError, match="no memory"):
            serving.warm_up()
        assert server.executor.recovered == 1
        assert serving.add(prompt(4)).result(10).tokens == answer(server, 4)
    server.check_empty()


class Sleeping:
    """What a `ShadowExecutor` lacks of a device that sleeps."""

    def __init__(self, executor, problem: Exception | None = None):
        self.executor, self.problem, self.calls = executor, problem, []

    def put_on(self, server: Server) -> None:
        vars(server.executor).update(sleep=self.sleep, wakeup=self.wakeup)

    def sleep(self, leave):
        if self.problem is not None:
            raise self.problem
        self.executor.move(leave())
        self.calls.append("sleep")

    def wakeup(self):
        self.calls.append("wakeup")


def test_waking_what_is_awake_touches_nothing():
    """A second `wakeup` would empty a cache that managers take for full."""
    serving, server = engine(host=True)
    sleeping = Sleeping(server.executor)
    sleeping.put_on(server)
    with serving:
        handle = serving.add(prompt(1, 150))
        with pytest.raises(EngineError, match="does not sleep"):
            serving.wakeup()
        serving.sleep()
        with pytest.raises(EngineError, match="sleeps already"):
            serving.sleep()
        with pytest.raises(EngineError, match="sleeps"):
            serving.warm_up()
        serving.wakeup()
        serving.sleep()
        vars(server.executor).update(update=lambda params, donate, fits: fits())
        serving.update_weights(None, "others")  # as a trainer does that has the memory meanwhile
        serving.wakeup()
        assert sleeping.calls == ["sleep", "wakeup"] * 2 and handle.result(10).tokens == answer(server, 1, 150)
    server.check_empty()


def test_an_executor_that_cannot_sleep_says_so_first():
    serving, server = engine(host=True)
    with serving:
        with pytest.raises(EngineError, match="cannot sleep"):
            serving.sleep()
        sleeping = Sleeping(server.executor, EngineError("nothing says how (renew)"))
        sleeping.put_on(server)
        with pytest.raises(EngineError, match="renew"):
            serving.sleep()
        assert serving.add(prompt(1)).result(10).tokens == answer(server, 1)
    server.check_empty()


def test_asleep_requests_are_aborted_and_the_engine_is_closed():
    clock, handles = FakeClock(), []
    serving, server = engine(host=True, clock=clock)
    sleeping = Sleeping(server.executor)
    sleeping.put_on(server)
    with serving:
        asked = [prompt(i, 150, deadline=d) for i, d in ((1, None), (2, 0.05), (3, None))]
        hold(serving, server, 2, lambda: handles.extend(map(serving.add, asked)))
        eventually(lambda: serving.stats().live == 3)
        serving.sleep()
        clock.advance(0.1)
        handles[0].abort()
        assert [handle.result(10).finish for handle in handles[:2]] == ["abort", "deadline"]
        late = serving.add(prompt(4))
        serving.pause()
        serving.resume(keep=False)
        assert handles[2].result(10).finish == "abort"
    assert late.result(1).finish == "abort"
    server.check_empty()


# The watchdog


def test_a_watchdog_that_is_late_does_not_end_the_engine():
    """The call ends just as the watchdog finds it too long: either it has tripped, or it has not."""
    serving, server = engine(watchdog=60)
    with serving:
        assert serving.add(prompt(1)).result(10).tokens == answer(server, 1)
        serving._trip(0.0)  # of a wait that is over
        assert serving.add(prompt(2)).result(10).tokens == answer(server, 2)
    server.check_empty()


def test_a_device_that_hangs_and_then_fails():
    """All have been told by then: none goes on for nobody, and names are free again."""
    release, calls = threading.Event(), [0]

    def on_get():
        calls[0] += 1
        if calls[0] == 1:
            release.wait(PATIENCE)
            raise OSError("gone after all")

    serving, server = engine(watchdog=0.2, slots=1, on_get=on_get)
    with serving:
        serving.pause()
        handles = [serving.add(prompt(i, 60, id=i)) for i in range(3)]
        serving.resume()
        assert {handle.result(10).finish for handle in handles} == {"error"}
        serving._watchdog = PATIENCE  # nor is a busy machine a device that hangs
        release.set()
        eventually(lambda: serving._hung is None)
        for i in range(3):
            again = serving.add(prompt(i, 5, id=i)).result(10)
            assert (again.finish, again.tokens) == ("length", answer(server, i, 5))
        assert server.core.counts["ended_length"] == 3
    server.check_empty()


def test_a_watchdog_does_not_mind_pauses():
    serving, server = engine(watchdog=0.1)
    with serving:
        serving.pause()
        handle = serving.add(prompt(1, 100))
        time.sleep(0.3)
        assert not handle.done and serving._hung is None
        serving._watchdog = PATIENCE  # of calls, on a busy machine
        serving.resume()
        assert handle.result(10).tokens == answer(server, 1, 100)
    server.check_empty()


# Readers


def test_what_was_read_late_names_the_weights_that_gave_it():
    handle = Handle("name", 1, lambda _: None)
    reader = iter(handle)
    for token, weights, finish in ((1, "a", None), (2, "a", None), (3, "b", None), (4, "c", None), (5, "c", "length")):
        handle.put(Output("name", tokens=[token], logprobs=[-float(token)], finish=finish, weights_id=weights))
    seen = [(output.tokens, output.logprobs, output.weights_id, output.finish) for output in reader]
    assert seen == [
        ([1, 2], [-1.0, -2.0], "a", None),
        ([3], [-3.0], "b", None),
        ([4, 5], [-4.0, -5.0], "c", "length"),
    ]
    one = handle.result()
    assert [one.weights_of(i) for i in range(5)] == ["a", "a", "b", "c", "c"]
    late = Handle("name", 1, lambda _: None)
    late.put(Output("name", tokens=[1], weights_id="a"))
    late.put(Output("name", finish="abort", weights_id="b"))
    assert [(output.tokens, output.weights_id, output.finish) for output in late] == [([1], "a", "abort")]


def test_handles_that_nobody_keeps():
    serving, server = engine(slots=2)
    with serving:
        for i in range(30):
            serving.add(prompt(i))
        gc.collect()
        eventually(lambda: server.core.counts["ended_length"] == 30 and not serving._handles)
    server.check_empty()


def test_loops_that_close_and_leave_their_readers_behind():
    serving, server = engine(slots=3, on_get=lambda: time.sleep(0.001))
    loop = asyncio.new_event_loop()
    kept = []

    async def first_of(number: int) -> None:
        stream = aiter(serving.add(prompt(number, 60)))
        kept.append(stream)
        await anext(stream)

    with serving:
        for number in range(3):
            loop.run_until_complete(first_of(number))
        loop.close()
        assert serving.add(prompt(9)).result(10).tokens == answer(server, 9)
        eventually(lambda: server.core.counts["ended_length"] == 4)
    server.check_empty()


def test_those_that_come_and_go_leave_nothing_in_the_engine():
    """As many objects after 3,000 requests that were added and aborted at once as after 1,000."""
    serving, server = engine(slots=2, limits=Limits(queued=100_000))

    def cycle(count: int) -> int:
        for number in range(count):
            handle = serving.add(prompt(number, 9, deadline=1000.0 if number % 3 else None))
            handle.abort()
        handle.results(30)
        serving.pause()  # a turn behind all of them
        serving.resume()
        del handle
        gc.collect()
        return len(gc.get_objects())

    with serving:
        before = cycle(1000)
        assert cycle(2000) - before < 1500 and not serving._handles and not serving._entering
        assert len(server.core._deadlines) <= 130 and server.core.queued == 0
    server.check_empty()


# Who starves, and who is forgotten


def test_a_shard_whose_blocks_are_out_goes_on_beside_one_that_is_busy():
    """Its least important request has to go although calls of the other shard are always under way."""
    server = Server(slots=2, blocks=COLUMNS, shards=2, caching=False)
    names = []
    for i in range(3):
        names.append(server.add(TEXT[: 40 + i], 140, id=f"long {i}", sampling=Seeded(i)))
        server.turn()
    for _ in range(160):  # the shard with one long request is kept busy
        server.turn()
        if not server.core.queued:
            server.add([5], 3)
    assert server.core.counts["preemptions"] >= 1
    server.run()
    for i in range(3):
        assert server.tokens[f"long {i}", 0] == server.expected(TEXT[: 40 + i], 140, seed=i)


def test_deadlines_of_those_that_have_ended_are_forgotten():
    """100,000 requests with an hour each would be kept for an hour."""
    server = Server(slots=4)
    for i in range(200):
        server.add([1 + i % 200, 2], 1, deadline=3600.0)
        server.turn()
    server.run()
    assert len(server.core._deadlines) < 100


def test_samples_wait_together_for_what_storage_has():
    class Store:
        def prefetch(self, tokens, *, namespace=None, items=()):
            self.asked = type("Fetch", (), {"done": False})()
            return self.asked

    store = Store()
    server = Server(storage=[store])
    name = server.add(TEXT, 4, n=3)
    server.turn()
    assert server.core.live == 0 and server.core.fetching == 3
    store.asked.done = True
    server.run()
    assert {server.finish[name, i] for i in range(3)} == {"length"}
    server.check_empty()


def test_a_mask_of_bits_beyond_the_vocabulary_allows_nothing():
    server = Server()
    server.core._allowed = np.full(8, 0xFFFFFFFF, np.uint32)
    server.core._allowed[-1] = 1  # as of a vocabulary of 225 tokens

    def mask(ids, row):
        row[-1] = 2

    name = server.add(TEXT[:5], 5, mask=mask)
    server.run()
    assert server.finish[name, 0] == "error"


def test_a_lease_that_ends_frees_who_waits_whatever_deadlines_there_are():
    """The engine looks again although the next thing on its calendar is an hour away."""
    serving, server = engine(slots=1, caching=False)
    manager = server.managers[0]
    with serving:
        held = [manager.admit_request([1, 2, 3], max_tokens=9)]  # somebody else's

        def poll(*, idle: bool) -> bool:
            if server.core.queued and held:  # behind the plan in which there was no room
                manager.release_request(held.pop())
            return False

        vars(server.executor).update(poll=poll)
        handle = serving.add(prompt(1, deadline=3600.0))
        assert handle.result(10).tokens == answer(server, 1)
    server.check_empty()


def test_the_longest_requests_that_fit_are_answered():
    whole = COLUMNS * BLOCK
    for steps, drafts in ((1, 0), (4, 0), (4, 2)):
        server = Server(slots=3, blocks=COLUMNS, steps=steps, drafts=drafts)
        names = [
            server.add(([*TEXT] * 3)[:size], whole - size + 1, id=size, sampling=Seeded(size))
            for size in (1, 190, 192, 100)
        ]
        server.run()
        for size in names:
            expected = server.expected(([*TEXT] * 3)[:size], whole - size + 1, seed=size)
            assert (server.finish[size, 0], server.tokens[size, 0]) == ("length", expected)
        server.check_empty()


def test_an_urgent_request_passes_one_that_was_preempted():
    """Who had to go comes back by its turn: not before who is more urgent."""
    server = Server(slots=3, blocks=COLUMNS, caching=False, limits=Limits(aging=5.0))
    for name in ("a", "b"):
        server.add(TEXT[:40], 110, id=name, priority=3)
    while not server.core.preempted:
        server.turn()
    server.add(TEXT[:5], 3, id="urgent", priority=-5)
    server.run()
    assert next(iter(server.finish)) == ("urgent", 0)
    server.check_empty()


def test_a_queue_full_of_urgent_ones_does_not_starve_the_others():
    server = Server(slots=1, limits=Limits(queued=1000, aging=1.0))
    server.add(TEXT[:5], 2, id="patient", priority=3)
    turns = 0
    while ("patient", 0) not in server.finish:
        for _ in range(3):
            with contextlib.suppress(EngineError):
                server.add(TEXT[:5], 2, priority=-3)
        server.turn()
        turns += 1
        assert turns < 700
    assert server.now >= 5.9


def test_readers_get_each_token_once_and_one_end():
    """Several threads at one handle, some late: each has all of it."""
    serving, server = engine(on_get=lambda: time.sleep(0.001))
    with serving:
        handle = serving.add(prompt(5, 60, n=2))
        seen: list[list] = [[] for _ in range(4)]

        def read(mine, late):
            time.sleep(late)
            mine += list(handle)

        readers = [threading.Thread(target=read, args=(mine, 0.01 * i)) for i, mine in enumerate(seen)]
        for thread in readers:
            thread.start()
        for thread in readers:
            thread.join(PATIENCE)
        for outputs in seen:
            for index in range(2):
                own = [output for output in outputs if output.index == index]
                assert joined(own) == answer(server, 5, 60, index)
                assert [output.finish for output in own if output.finish] == ["length"]
    server.check_empty()


def test_everything_at_once_from_many_threads():
    """Requests, aborts, pauses, sleeps, weights and the end, at any moment: each request is answered once."""
    for round_ in range(3):
        serving, server = engine(slots=3, host=True, steps=3, on_get=lambda: time.sleep(0.0002))
        sleeping = Sleeping(server.executor)
        sleeping.put_on(server)
        vars(server.executor).update(update=lambda params, donate, fits: fits())
        handles, over, wrong = [], threading.Event(), []

        def user(first, serving=serving, handles=handles, over=over):
            number = first
            while not over.is_set():
                number += 1
                if number - first > 400:  # enough: all of them are waited for
                    time.sleep(0.001)
                    continue
                with contextlib.suppress(EngineError):
                    handles.append((number, serving.add(prompt(number, 30, id=("id", number)))))
                    if number % 3 == 0:
                        handles[-1][1].abort()
                    elif number % 7 == 0:
                        handles[-1][1].result(30)

        def admin(which, serving=serving, over=over, wrong=wrong):
            number = 0
            while not over.is_set():
                number += 1
                try:
                    if which == 0:
                        serving.pause()
                        serving.resume(keep=bool(number % 2))
                    elif which == 1:
                        with contextlib.suppress(EngineError):
                            serving.sleep()
                            serving.wakeup()
                    else:
                        serving.update_weights(None, f"weights {which} {number}")
                except EngineError as error:
                    if "closed" not in str(error):
                        wrong.append(error)
                time.sleep(0.003)

        threads = [threading.Thread(target=user, args=(10_000 * i,)) for i in range(3)]
        threads += [threading.Thread(target=admin, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        eventually(lambda handles=handles: len(handles) > 30)
        if round_ == 1:
            serving.close(drain=True)
        elif round_ == 2:
            serving.close()
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        if round_ == 0:
            with contextlib.suppress(EngineError):
                serving.wakeup()
            serving.resume()
        for number, handle in handles:
            one = handle.result(30)
            assert one.tokens == answer(server, number, 30)[: len(one.tokens)] and one.finish in (
                "length",
                "abort",
                "error",
            )
            if one.finish == "error":
                assert "closed" in str(one.error)
        serving.close()
        assert not wrong and len(handles) > 5
        server.check_empty()


def test_the_engine_is_a_plain_object_to_its_users():
    """What is not there is not made by asking for it."""
    serving, server = engine()
    with serving:
        assert isinstance(serving, Engine) and not serving.stats().live
        for name in (None, 0, False, "", (), float("nan"), frozenset({1}), np.int64(3)):
            one = serving.add(Prompt(tokens=[1], max_new_tokens=2, id=name))
            assert one.result(10).finish == "length"
    server.check_empty()


def test_keys_and_places_that_are_none_are_refused():
    """Before anything changes: in a plan they would be everybody's trouble."""
    for shards in (1, 2):
        serving, server = engine(shards=shards)
        with serving:
            for options in (
                dict(namespace=Namespace(tenant=1.5)),  # type: ignore[arg-type]
                dict(namespace=Namespace(tenant=[])),  # type: ignore[arg-type]
                dict(items=[MediaItem("picture", 5, 3)]),
                dict(items=[MediaItem("picture", -1, 3)]),
                dict(items=["picture"]),
            ):
                with pytest.raises((RequestError, PlanError)):
                    serving.add(prompt(1, **options))
            assert serving.add(prompt(2)).result(10).tokens == answer(server, 2)
            assert not serving.stats().counts.get("failures")
        server.check_empty()


def test_an_engine_that_is_lost_answers_all_who_call_it():
    """Also behind a call in the inbox that fails then."""
    serving, server = engine(on_send=lambda _: entered.set() or release.wait(30) or 1 / 0)
    entered, release = threading.Event(), threading.Event()
    vars(server.executor).update(recover=lambda: 1 / 0)
    handle = serving.add(prompt(1))
    entered.wait(10)
    told = []

    def call():
        try:
            serving.pause()
        except EngineError as error:
            told.append(str(error))

    thread = threading.Thread(target=call)
    serving._inbox.put(lambda: 1 / 0)
    thread.start()
    eventually(lambda: serving._inbox.qsize() == 2)
    release.set()
    thread.join(10)
    assert len(told) == 1 and handle.result(10).finish == "error"


# What a turn costs


def turn_lines(rows: int, *, newcomer: bool) -> int:
    """Lines of Python of a turn of so many decodes, one call ahead; with a request that joins, or among the same."""
    server = Server(slots=rows + 1, blocks=4 * rows, chunk=max(rows + 9, 48), caching=False)
    for i in range(rows):
        server.add([1 + i % 200, 2], 40)
    while server.core.counts["sampled_tokens"] < 9 * rows:
        server.turn()
    core, drawn = server.core, server.under_way[0].get()
    if newcomer:
        server.add([1, 2, 3], 9)
    assert core.under_way == 1 and core.live == rows
    return lines_run(lambda: (core.plan(server.now), core.take(drawn, server.now)))


def test_a_turn_costs_so_much_a_row_and_no_more():
    """Without a clock (times: `bench_manager.py --only turning`): lines of Python for each more row of a turn."""
    for newcomer, most in ((False, 140), (True, 260)):
        few, many = turn_lines(32, newcomer=newcomer), turn_lines(128, newcomer=newcomer)
        assert (many - few) / 96 < most and few < 32 * most + 2000


def test_many_that_wait_cost_a_turn_nothing():
    """Nor do many that came and went: what is looked at is the head of each tenant's queue."""

    def lines(waiting: int) -> int:
        server = Server(slots=2, limits=Limits(queued=10_000))
        for i in range(2 + waiting):
            server.add([1, 2], 100, priority=0 if i < 2 else 5)
        for _ in range(4):
            server.turn()
        drawn = server.under_way[0].get()
        return lines_run(lambda: (server.core.plan(server.now), server.core.take(drawn, server.now)))

    def tenants(count: int) -> int:
        server = Server(slots=2, limits=Limits(queued=10_000))
        for i in range(2 + count):
            server.add([1, 2], 100, namespace=Namespace(tenant=i))
        for _ in range(4):
            server.turn()
        drawn = server.under_way[0].get()
        return lines_run(lambda: (server.core.plan(server.now), server.core.take(drawn, server.now)))

    assert tenants(500) <= tenants(20) + 20
    lines(20)  # what is imported or cached at first
    assert lines(2000) <= lines(20) + 20


def test_an_abort_frees_blocks_within_one_turn():
    """Of the engine: while a call is under way, and the next one is planned already."""
    used: list[int] = []
    serving, server = engine(slots=2, caching=False, on_send=lambda _: used.append(blocks()))
    manager = server.managers[0]

    def blocks() -> int:
        return manager.stats().blocks_used

    victim = Prompt(tokens=TEXT, max_new_tokens=100, id="victim")
    with serving:
        hold(serving, server, 3, lambda: [serving.add(prompt(1, 150)), serving.add(victim)])
        eventually(lambda: len(used) == 4)  # the third is under way, the fourth is planned
        serving.abort("victim")
        eventually(lambda: len(used) > 4)
    assert used[3:5] == [1 + -(-len(TEXT) // BLOCK), 1]
    server.check_empty()
