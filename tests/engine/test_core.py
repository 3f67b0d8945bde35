"""The core decides; answers are those of lone runs whatever it decides, and nothing is held at the end."""

from __future__ import annotations

import itertools
import random
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dsv4_jax.engine import Core, Limits, Prompt, shapes_of
from dsv4_jax.engine.prompt import derived_seed
from dsv4_jax.errors import ContextLimitError, EngineError, PlanError, QueueFullError, RequestError
from dsv4_jax.manager import KVCacheManager, Namespace

from .serving import BLOCK, CFG, COLUMNS, Seeded, Server

TEXT = list(range(1, 71))


def random_server(rng: random.Random) -> tuple[Server, list[int]]:
    """A server, and the calls of its executor that fail."""
    fails = [rng.randrange(80)] if rng.random() < 0.3 else []
    calls = [0]

    def on_send(_: object) -> None:
        calls[0] += 1
        if calls[0] in fails:
            raise OSError("the device is gone")

    return Server(
        slots=rng.randint(1, 6),
        blocks=rng.choice([COLUMNS, COLUMNS + 3, 3 * COLUMNS]),
        shards=rng.choice([1, 1, 2]),
        drafts=rng.choice([0, 0, 2]),
        steps=rng.choice([1, 1, 4]),
        prefill=rng.choice([(), (18,), (32, 20)]),
        host=rng.random() < 0.6,
        ahead=rng.random() < 0.8,
        on_send=on_send,
    ), fails


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_lone_runs(seed):
    """Bursts, priorities, tenants, n, stops, deadlines, aborts and failed steps: each is answered once, and right."""
    rng = random.Random(seed)
    server, fails = random_server(rng)
    core, base = server.core, [rng.randrange(CFG.vocab_size) for _ in range(80)]
    wanted, aborted, left = {}, set(), 40
    while left or not core.idle:
        while left and rng.random() < 0.3:
            left -= 1
            text = base[: rng.randrange(1, 80)] + [rng.randrange(CFG.vocab_size) for _ in range(rng.randrange(1, 40))]
            count, own = rng.randint(1, 40), rng.randrange(100)
            stops = [rng.randrange(CFG.vocab_size) for _ in range(3)]
            samples = rng.choice([1, 1, 3])
            name = server.add(
                text,
                count,
                sampling=Seeded(own),
                n=samples,
                namespace=rng.choice([None, Namespace(tenant="x")]),
                priority=rng.randint(0, 2),
                stop_tokens=stops,
                deadline=rng.choice([None, None, None, 8.0]),
            )
            for index in range(samples):
                whole = server.expected(text, count, seed=own, index=index)
                cut = next((i for i, token in enumerate(whole) if token in stops), None)
                wanted[name, index] = (whole, "length") if cut is None else (whole[:cut], "stop")
        if wanted and rng.random() < 0.02:
            name = rng.choice([*wanted])[0]
            if core.abort(name):
                aborted.add(name)
        server.turn()
        if rng.random() < 0.05:
            for manager in server.managers:
                manager.check_integrity()
    assert server.finish.keys() == wanted.keys()
    for key, (answer, finish) in wanted.items():
        if server.finish[key] in ("stop", "length"):
            assert (server.tokens[key], server.finish[key]) == (answer, finish)
        else:
            assert server.tokens[key] == answer[: len(server.tokens[key])]
            assert server.finish[key] == "deadline" or key[0] in aborted or (fails and server.errors[key] is not None)
    server.check_empty()
    assert core.counts["sampled_tokens"] >= sum(map(len, server.tokens.values())) > 0


def plans(server: Server) -> list[list[bytes]]:
    return [
        [b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plan)) for plan in work.plans]
        for work in server.run()
    ]


def test_equal_calls_give_equal_plans():
    first, second = Server(slots=3, steps=4), Server(slots=3, steps=4)
    for server in (first, second):
        for i in range(8):
            server.add(TEXT[: 9 + 7 * i], 9 + i)
    one, other = plans(first), plans(second)
    assert one == other and len(one) > 10


def test_a_step_is_planned_while_the_one_before_it_runs():
    """Fed from the device: the core has not seen the token; also beside chunks of others, and of those that enter."""
    server = Server(slots=2)
    server.add(TEXT[:5], 12, id="a")
    seen = []
    for turn in range(12):
        if turn == 4:
            server.add(TEXT[:60], 3, id="b")
        work = server.turn()
        seen.append((work.kind, work.source[0] >= 0, [row.count for row in work.rows[0]]))
    assert seen[0] == ("mixed", False, [5]) and seen[1:4] == [("decode", True, [1])] * 3
    assert seen[4] == ("mixed", True, [1, 47]), "the newcomer's chunk stands beside a decode whose token is not known"
    server.run()
    assert server.finish == {("a", 0): "length", ("b", 0): "length"}
    alone = Server(slots=2, ahead=False)
    alone.add(TEXT[:5], 12, id="a")
    assert all((work.source < 0).all() for work in alone.run()) and alone.tokens["a", 0] == server.tokens["a", 0]


def test_loops_of_steps_run_while_nobody_waits():
    server = Server(slots=1, steps=4)
    server.add(TEXT[:5], 9)
    server.add(TEXT[:5], 9)
    works = server.run()
    first = next(i for i, work in enumerate(works[1:], 1) if work.kind == "mixed")
    assert {work.steps for work in works[:first]} == {1}, "another one waits"
    assert [work.steps for work in works[first + 1 :]] == [4, 4]


@pytest.mark.parametrize("options", [{}, dict(shards=2, steps=4), dict(drafts=2, ahead=False, caching=False)], ids=str)
def test_a_step_has_the_least_shape_with_room_for_its_tokens(options):
    """Prompts, hits, preemption, scores: the steps are those of one shape, each as narrow as its busiest shard lets."""

    def run(prefill) -> tuple[list[Any], list[int], dict[Any, list[int]]]:
        server, rng = Server(blocks=COLUMNS + 1, prefill=prefill, **options), random.Random(7)
        works, widths = list[Any](), list[int]()
        for i in range(24):
            text = TEXT[: rng.randrange(70)] + [rng.randrange(CFG.vocab_size) for _ in range(rng.randrange(1, 30))]
            count = rng.randint(1, 60)
            server.add(text, count, sampling=Seeded(i), score=i % 8 == 7, logprobs=0 if i % 8 == 7 else None)
            works.append(server.turn())
        works = [work for work in [*works, *server.run()] if work is not None]
        for work in works:
            if work.kind != "decode":
                need = max(sum(row.count + row.drafts for row in rows) for rows in work.rows)
                widths.append(work.plans[0].num_tokens)
                assert {plan.num_tokens for plan in work.plans} == {min(n for n in (*prefill, 48) if n >= need)}
        assert server.core.counts["preemptions"] and (server.core.counts["cached_tokens"] or "caching" in options)
        server.check_empty()
        each = [[[(row.slot, row.count, row.drafts) for row in rows] for rows in work.rows] for work in works]
        steps = [*zip((work.kind for work in works), each, strict=True)]
        return steps, widths, server.tokens

    steps, widths, tokens = run((12, 30))
    one = run(())
    assert (steps, tokens) == (one[0], one[2])
    assert set(widths) == {12, 30, 48} and set(one[1]) == {48}


@pytest.mark.parametrize(("slots", "drafts", "chunk"), [(2, 1, 4), (2, 1, 6), (2, 3, 9), (3, 3, 12), (3, 3, 15)])
def test_nothing_is_drafted_amid_an_answer_that_is_computed_again(slots, drafts, chunk):
    """After preemption a step may have room for one known token: with drafts behind it nothing was planned any more."""
    server = Server(slots=slots, blocks=COLUMNS + 1, drafts=drafts, chunk=chunk)
    names = [server.add(TEXT[: 40 + i], 90, sampling=Seeded(i)) for i in range(slots)]
    rows = [row for work in server.run(2000) for each in work.rows for row in each]
    assert server.core.counts["preemptions"] and any(row.drafts for row in rows)
    assert all(row.samples for row in rows if row.drafts)
    for i, name in enumerate(names):
        assert server.tokens[name, 0] == server.expected(TEXT[: 40 + i], 90, seed=i)
    server.check_empty()


def test_the_urgent_go_first_and_who_waits_becomes_urgent():
    server = Server(slots=1, limits=Limits(aging=5.0))
    for name, priority in (("first", 0), ("idle", 3), ("normal", 1), ("urgent", -1)):
        server.add(TEXT[:5], 3, id=name, priority=priority)
    server.run()
    assert [name for name, _ in server.finish] == ["urgent", "first", "normal", "idle"]
    server.add(TEXT[:5], 3, id="idle", priority=3)
    server.now += 16.0  # more than three levels
    server.add(TEXT[:5], 3, id="normal")
    server.finish.clear()
    server.run()
    assert [name for name, _ in server.finish] == ["idle", "normal"]


def test_tenants_share_the_slots():
    """Of two that ask for more than there is each has half; of one with three times the weight three quarters."""
    for weights, share in (({}, 2), ({"a": 3.0}, 3)):
        server = Server(slots=4, blocks=8 * COLUMNS, limits=Limits(queued=1000, weights=weights))
        for tenant in ("a", "b"):
            for i in range(40):
                server.add(TEXT[:5], 6, id=(tenant, i), namespace=Namespace(tenant=tenant))
        for _ in range(30):
            server.turn()
        assert sum(job.tenant == "a" for job in server.core.jobs if job.request is not None) == share


def test_the_least_important_are_preempted_and_come_back():
    server = Server(slots=3, blocks=COLUMNS, caching=False)
    for name, priority in (("a", 0), ("b", -1), ("c", 1)):
        server.add(TEXT[:40], 100, id=name, priority=priority)
    preempted = set()
    while not server.core.idle:
        server.turn()
        preempted |= {job.id for job in server.core.jobs if job.state.value == "preempted"}
    assert preempted == {"a", "c"} and set(server.finish.values()) == {"length"}
    assert next(iter(server.finish))[0] == "b"
    server.check_empty()


def test_an_abort_frees_blocks_at_once():
    server = Server(caching=False)
    name = server.add(TEXT[:60], 50)
    for _ in range(4):
        server.turn()
    assert server.managers[0].stats().blocks_used
    assert server.core.abort(name) and not server.core.abort(name)
    assert not server.managers[0].stats().blocks_used
    server.run()
    assert server.finish == {(name, 0): "abort"}
    server.check_empty()


def test_many_that_come_and_go_leave_no_trace_in_the_queue():
    server = Server(slots=1)
    server.add(TEXT[:5], 50, priority=-1)
    server.turn()
    for _ in range(2000):
        server.core.abort(server.add(TEXT[:5], deadline=100.0))
    held = sum(len(heap) for heap in server.core._queue.values()) + len(server.core._deadlines)
    assert server.core.queued == 0 and held < 300
    server.run()
    server.check_empty()


def test_refusals_change_nothing():
    server = Server(limits=Limits(queued=3, new_tokens=50))
    core = server.core
    server.add([1], 5, id="a")
    longest = COLUMNS * BLOCK
    for problem, match, options in (
        (RequestError, "'a' is in use", dict(tokens=[1], id="a", max_new_tokens=5)),
        (RequestError, "hashable", dict(tokens=[1], id=[], max_new_tokens=5)),
        (RequestError, "at most 50", dict(tokens=[1], max_new_tokens=51)),
        (RequestError, "300", dict(tokens=[1, 300], max_new_tokens=5)),
        (ContextLimitError, f"{longest + 1} tokens", dict(tokens=[1] * (longest - 7), max_new_tokens=9)),
        (QueueFullError, "1 requests wait already, at most 3", dict(tokens=[1], n=3, max_new_tokens=5)),
    ):
        with pytest.raises(problem, match=match):
            core.add(Prompt(**options), 0.0)
        assert (core.queued, core.counts["added"]) == (1, 1)
    with pytest.raises(RequestError, match="expected a Prompt"):
        core.add([1], 0.0)
    server.run()
    assert server.finish == {("a", 0): "length"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", []),
        ("tokens", "text"),
        ("tokens", 5),
        ("tokens", [1.5]),
        ("max_new_tokens", 0),
        ("n", 0),
        ("priority", 0.5),
        ("deadline", 0),
        ("logprobs", -1),
        ("stop_tokens", 7),
        ("stop_tokens", "7"),
        ("stop_after", 7),
        ("mask", 7),
        ("export", 1),
        ("reuse", "both"),
        ("score", 1),
        ("score", True),
        ("namespace", "x"),
        ("peer", 7),
        ("items", 7),
        ("reuse", np.array([1, 2])),
    ],
)
def test_a_prompt_is_checked_when_it_is_made(name, value):
    with pytest.raises(RequestError, match=name.rstrip("s")):
        Prompt(**{"tokens": [1]} | {name: value})


def test_each_sample_has_a_seed_of_its_own():
    assert len({derived_seed(seed, i) for seed in (0, 1, 2**63, -(2**63) + 1) for i in range(9)}) == 36


def test_a_prompt_is_a_copy():
    given = np.array([1, 2, 3], np.int32)
    prompt = Prompt(tokens=given)
    given[0] = 9
    assert prompt.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        prompt.tokens[0] = 9


def test_one_bad_request_ends_alone():
    """A callback that raises, a mask of nothing: its own error, and no other's."""

    def bad(*_: object) -> None:
        raise ZeroDivisionError("mine")

    server = Server()
    good = server.add(TEXT[:5], 9)
    names = [server.add(TEXT[:5], 9, stop_after=bad), server.add(TEXT[:5], 9, mask=bad)]
    names.append(server.add(TEXT[:5], 9, mask=lambda ids, row: None))
    server.run()
    assert [server.finish[name, 0] for name in (good, *names)] == ["length", "error", "error", "error"]
    assert [type(server.errors[name, 0]) for name in names] == [ZeroDivisionError, ZeroDivisionError, RequestError]
    server.check_empty()


def test_masks_say_what_may_come_next():
    """They see all that was sampled before; no step runs ahead of them."""
    seen = []

    def mask(ids, row):
        seen.append(list(ids))
        row[0] = 1 << (7 + len(ids))  # one token

    server = Server(steps=4)
    name = server.add(TEXT[:5], 6, mask=mask)
    other = server.add(TEXT[:9], 20, sampling=Seeded(3))
    server.run()
    assert server.tokens[name, 0] == [7, 8, 9, 10, 11, 12] and seen == [[7, 8, 9, 10, 11, 12][:i] for i in range(6)]
    assert server.tokens[other, 0] == server.expected(TEXT[:9], 20, seed=3)


def test_a_mask_changes_neither_what_it_is_shown_nor_the_form_of_its_row():
    """Else an answer of its own would come without end, and a row of another shape would be the whole step's error."""
    shapes = set()

    def bent(ids, row):
        row[:] = 0xFFFFFFFF
        with warnings.catch_warnings(action="ignore"):
            row.shape = (-1, 1)

    server = Server(on_send=lambda work: shapes.update(words.shape for words in work.masks.values()))
    good = server.add(TEXT[:5], 9, sampling=Seeded(1))
    names = [server.add(TEXT[:6], 9, mask=mask) for mask in (lambda ids, row: ids.clear(), bent)]
    server.run(100)
    assert server.tokens[good, 0] == server.expected(TEXT[:5], 9, seed=1) and shapes == {(CFG.vocab_size // 32,)}
    assert [server.finish[name, 0] for name in names] == ["error", "length"]
    assert isinstance(server.errors[names[0], 0], AttributeError)
    server.check_empty()


def test_weights_of_no_name_change_nothing():
    """They are refused by the manager: the core has not forgotten who is live by then."""
    server = Server(ahead=False)
    name = server.add(TEXT[:40], 9, sampling=Seeded(1), namespace=Namespace(tenant="x"))
    for _ in range(4):
        server.turn()
    with pytest.raises(RequestError, match=r"1\.5"):
        server.core.forget(weights_id=1.5)
    assert (server.core.live, server.core._tenants) == (1, {"x": 1})
    server.run()
    assert server.tokens[name, 0] == server.expected(TEXT[:40], 9, seed=1)
    server.check_empty()


def test_scores_are_of_every_token_but_the_first():
    """Beside others that sample; nothing of them stays cached, and they wait until all of their blocks are there."""
    calls = [0]

    def on_send(work):
        calls[0] += work.kind == "score"
        if calls[0] == 3:
            calls[0] += 1
            raise OSError("the device is gone")

    server = Server(blocks=COLUMNS, chunk=16, on_send=on_send, ahead=False)
    lost = server.add(TEXT[:40], score=True, logprobs=0)
    while lost:
        server.turn()
        lost = not server.finish
    assert server.core.counts["failures"] == 1
    names = [server.add(TEXT[:n], score=True, logprobs=0) for n in (2, 70, 50)]
    other = server.add(TEXT[:20], 60, sampling=Seeded(1))
    server.run()
    assert [server.tokens[name, 0] for name in names] == [TEXT[1:n] for n in (2, 70, 50)]
    assert [server.finish[name, 0] for name in names] == ["length"] * 3
    assert server.tokens[other, 0] == server.expected(TEXT[:20], 60, seed=1)
    again = server.add(TEXT, 2)
    job = next(server.core.jobs)
    server.run()
    assert job.cached <= 16 and server.finish[again, 0] == "length", "no more than the other request's block"
    server.check_empty()


def test_scores_of_few_tokens_a_step_are_no_drafts():
    """The second text gets the two tokens of each step that the first one leaves; then a mask ends looking ahead."""
    server = Server(drafts=2, chunk=16)
    names = [server.add(TEXT[:n], score=True, logprobs=0) for n in (46, 40)]
    for _ in range(4):
        server.turn()
    server.add(TEXT[:9], 9, mask=lambda ids, row: row.fill(0xFFFFFFFF))
    server.run()
    assert [server.tokens[name, 0] for name in names] == [TEXT[1:46], TEXT[1:40]]
    assert {*server.finish.values()} == {"length"}
    server.check_empty()


def test_a_step_of_a_score_that_was_taken_is_not_taken_again():
    """The next one is planned behind others' step: what is kept is said of each while nothing else of it is planned."""
    server = Server(drafts=20, steps=2, chunk=84)
    name = server.add(TEXT[:9], 30, sampling=Seeded(1))
    texts = [server.add(TEXT[:n], score=True, logprobs=0) for n in (66, 70, 60, 50)]
    for _ in range(3):
        server.turn()
    server.run()
    assert [server.tokens[text, 0] for text in texts] == [TEXT[1:n] for n in (66, 70, 60, 50)]
    assert server.tokens[name, 0] == server.expected(TEXT[:9], 30, seed=1)
    server.check_empty()


@pytest.mark.parametrize("drafts", [0, 2])
def test_scores_take_turns_with_the_others(drafts):
    """Also where those cannot be planned behind a score that is under way."""
    server = Server(drafts=drafts, chunk=16)
    name = server.add(TEXT[:5], 12, sampling=Seeded(1))
    for i in range(8):
        server.add(TEXT[:66], score=True, logprobs=0, id=("text", i))
    works = server.run()
    kinds = [work.kind == "score" for work in works]
    last = len(kinds) - 1 - kinds[::-1].index(False)
    assert last < len(kinds) - 8 and not any(map(all, itertools.pairwise(kinds[:last])))
    assert server.tokens[name, 0] == server.expected(TEXT[:5], 12, seed=1)
    server.check_empty()


def test_who_has_ended_is_no_longer_waited_for():
    """A step that fails puts its requests among those whose prompts are looked for, before they end."""
    server = Server(storage=[SimpleNamespace(prefetch=lambda tokens, **space: SimpleNamespace(done=True))])
    server.add(TEXT[:40], 9)
    server.turn()
    server.core.fail(OSError("the device is gone"))
    assert server.core.fetching == server.core.queued == 0
    server.add(TEXT[:40], 9, id="aborted")
    assert server.core.fetching == 1 and server.core.abort("aborted") and server.core.fetching == 0


def test_stop_after_ends_behind_what_it_was_shown():
    shown, server = [], Server(steps=4, ahead=True)
    name = server.add(TEXT[:5], 30, stop_after=lambda ids: shown.extend(ids) or len(shown) >= 5)
    server.run()
    assert server.tokens[name, 0] == shown and 5 <= len(shown) <= 8 and server.finish[name, 0] == "stop"


def test_a_failed_step_ends_its_own_requests_and_the_others_begin_anew():
    calls = [0]

    def on_send(work):
        calls[0] += 1
        if calls[0] == 6:
            raise OSError("the device is gone")

    server = Server(slots=2, on_send=on_send, ahead=False)
    names = [server.add(TEXT[: 5 + i], 12, sampling=Seeded(i)) for i in range(4)]
    server.run()
    assert [server.finish[name, 0] for name in names] == ["error", "error", "length", "length"]
    assert server.executor.recovered == 1 and isinstance(server.errors[names[0], 0], OSError)
    for i, name in enumerate(names):
        whole = server.expected(TEXT[: 5 + i], 12, seed=i)
        assert server.tokens[name, 0] == whole[: len(server.tokens[name, 0])]
    server.check_empty()


def test_other_weights_forget_what_was_cached():
    """Live requests go on from their texts; nothing of the old weights is found."""
    server = Server(slots=2)
    name = server.add(TEXT, 20, sampling=Seeded(4))
    for _ in range(6):
        server.turn()
    with pytest.raises(EngineError, match="under way"):
        server.core.forget(weights_id="new")
    while server.under_way:
        server.note(server.core.take(server.under_way.popleft().get(), server.now))
    before = len(server.tokens[name, 0])
    server.core.forget(weights_id="new")
    server.run()
    assert 0 < before < 20 and server.tokens[name, 0] == server.expected(TEXT, 20, seed=4)
    assert server.managers[0].weights_id == "new"
    again = server.add(TEXT, 2)
    job = next(server.core.jobs)
    server.run()
    assert job.cached > 0 and server.finish[again, 0] == "length"


def test_a_sleep_loses_nothing():
    server = Server(slots=2, host=True)
    name = server.add(TEXT, 20, sampling=Seeded(4))
    for _ in range(6):
        server.turn()
    with pytest.raises(EngineError, match="under way"):
        server.core.sleep()
    while server.under_way:
        server.note(server.core.take(server.under_way.popleft().get(), server.now))
    with pytest.raises(EngineError, match="does not sleep"):
        server.core.wakeup()
    server.executor.move(server.core.sleep())
    with pytest.raises(EngineError, match="sleeps already"):
        server.core.sleep()
    assert server.core.plan(server.now) is None
    server.core.wakeup()
    server.run()
    assert server.tokens[name, 0] == server.expected(TEXT, 20, seed=4)


def test_a_score_under_way_begins_anew_after_a_sleep():
    """Its text is not the manager's: what is computed of it is given up, and in no shard is anything of it left."""
    fetched = list[int]()

    class Driver:
        def prefetch(self, tokens, **space):
            fetched.append(len(tokens))
            return SimpleNamespace(done=True)

    server = Server(shards=2, chunk=16, ahead=False, storage=[Driver(), Driver()])
    names = [server.add(TEXT[:n], score=True, logprobs=0) for n in (60, 50, 40)]
    other = server.add(TEXT[:20], 60, sampling=Seeded(1))
    for _ in range(3):
        server.turn()
    assert server.core.live == 4 and not server.finish
    server.executor.move(server.core.sleep())
    assert (server.core.live, server.core.queued, server.core.preempted) == (0, 3, 1)
    server.core.wakeup()
    server.run()
    assert [server.tokens[name, 0] for name in names] == [TEXT[1:n] for n in (60, 50, 40)]
    assert server.tokens[other, 0] == server.expected(TEXT[:20], 60, seed=1)
    assert fetched == [20], "of a score nothing is looked up"
    server.check_empty()


def test_bad_settings_are_refused():
    server = Server()
    for options in (dict(queued=0), dict(aging=0.0), dict(patience=-1), dict(new_tokens=0), dict(weights={"a": 0})):
        with pytest.raises(PlanError, match=next(iter(options)).rstrip("s")):
            Limits(**options)
    with pytest.raises(PlanError, match="at least the number of slots 4"):
        shapes_of(server.managers, 3)
    for few in (5, "1", (3,), (48,), (4.5,), (True,)):
        with pytest.raises(PlanError, match="prefill_tokens"):
            shapes_of(server.managers, 48, prefill_tokens=few)
    with pytest.raises(PlanError, match="prefill_tokens must be an integer from 12 to 47, got 11"):
        shapes_of(server.managers, 48, drafts=2, prefill_tokens=(11,))
    with pytest.raises(PlanError, match="one manager was given for several"):
        shapes_of(server.managers * 2, 48)
    others = Server(shards=2).managers
    others[1].reset(weights_id="others")
    with pytest.raises(PlanError, match="shard 1 is of weights 'others', that of shard 0 of None"):
        Core(others, server.executor.shapes)
    with pytest.raises(PlanError, match="shard 1 is of another cache"):  # one that keeps nothing
        Core([others[0], KVCacheManager(others[0].layout, others[0].size)], server.executor.shapes)
    with pytest.raises(PlanError, match="limits must be Limits"):
        Core(server.managers, server.executor.shapes, limits=3)
    with pytest.raises(PlanError, match="expected a manager"):
        Core([None], server.executor.shapes)
    with pytest.raises(PlanError, match="no manager"):
        Core([], server.executor.shapes)
