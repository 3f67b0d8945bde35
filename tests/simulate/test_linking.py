"""Outputs that get the ids of the next turn: which ones, and that they are found then."""

from __future__ import annotations

import json

import numpy as np

from dsv4_jax import CacheLayout, CacheSize, DSV4Config
from dsv4_jax.manager import CachePolicy, SnapshotPlacement
from dsv4_jax.simulate import Server, TraceRequest, read_trace, simulate
from dsv4_jax.simulate.linking import link_outputs
from dsv4_jax.simulate.tokens import run_tokens
from dsv4_jax.simulate.trace import TraceRun


def trace(*requests: tuple[int, int, list[int]]) -> list[TraceRequest]:
    """(prompt tokens, output tokens, ids of 512), a minute apart."""
    lines = [
        json.dumps({"timestamp": 60_000 * i, "input_length": n, "output_length": m, "hash_ids": ids})
        for i, (n, m, ids) in enumerate(requests)
    ]
    return read_trace(lines)


def test_an_output_goes_on_as_the_next_turn_does() -> None:
    chat = trace((700, 1000, [1, 2]), (2000, 5, [1, 3, 4, 5]))
    (first, second), count = link_outputs(chat)
    assert count == 1 and second.prompt == chat[1].prompt
    assert first.prompt == (TraceRun(1, 512), TraceRun(3, 188))
    assert first.output == (TraceRun(3, 324, 188), TraceRun(4, 512), TraceRun(5, 164))
    whole = run_tokens((*first.prompt, *first.output), 1000)
    assert len(whole) == 1700 and np.array_equal(whole, run_tokens(second.prompt, 1000)[:1700])


def test_they_are_found() -> None:
    chat = trace((700, 1000, [1, 2]), (2000, 5, [1, 3, 4, 5]))
    layout = CacheLayout(DSV4Config.tiny(max_position_embeddings=1 << 16))
    server = Server(layout, CacheSize(100, 2, 32, 30), CachePolicy(snapshots=SnapshotPlacement(every=1)))
    hits = [[job.hit for job in simulate(each, server).jobs] for each in (chat, link_outputs(chat)[0])]
    assert hits == [[0, 512], [0, 1699 // 128 * 128]]  # the last token is sampled and never computed


def test_a_prompt_of_whole_blocks_has_nothing_to_rename() -> None:
    (first, _), count = link_outputs(trace((512, 10, [1]), (1100, 5, [1, 2, 3])))
    assert count == 1 and first.prompt == (TraceRun(1, 512),) and first.output == (TraceRun(2, 10),)


def test_what_is_not_linked() -> None:
    """No next turn; one too short for the output; several that differ; less than a block; one without another block."""
    for requests in (
        [(700, 10, [1, 2]), (700, 10, [8, 9])],
        [(700, 600, [1, 2]), (1200, 10, [1, 3, 4])],
        [(700, 10, [1, 2]), (1100, 10, [1, 3, 4]), (1100, 10, [1, 5, 6])],
        [(300, 10, [1]), (700, 10, [2, 3])],
        [(512, 10, [1]), (700, 10, [1, 2])],
        [(1100, 10, [1, 3, 4]), (700, 10, [1, 2])],
    ):
        given = trace(*requests)
        assert link_outputs(given) == (given, 0)


def test_named_outputs_and_other_tenants_stay_as_they_are() -> None:
    named = TraceRequest(0, (TraceRun(1, 512),), (TraceRun("answer", 10),))
    ours = TraceRequest(0, (TraceRun(1, 512),), (TraceRun("\0output of line 1", 10),), "a")
    theirs = TraceRequest(1, (TraceRun(1, 512), TraceRun(2, 512)), (), "b")
    assert link_outputs([named, ours, theirs]) == ([named, ours, theirs], 0)
    (first, _), count = link_outputs([ours, TraceRequest(1, theirs.prompt, (), "a")])
    assert count == 1 and first.output == (TraceRun(2, 10),)


def test_a_partial_block_is_renamed_once_and_for_all_who_have_it() -> None:
    """The same prompt asked twice: both go on as the first next turn does."""
    twice = trace((700, 100, [1, 2]), (700, 100, [1, 2]), (1100, 5, [1, 3, 4]))
    linked, count = link_outputs(twice)
    assert count == 2
    assert linked[0].prompt == linked[1].prompt == (TraceRun(1, 512), TraceRun(3, 188))
    assert linked[0].output == linked[1].output == (TraceRun(3, 100, 188),)
