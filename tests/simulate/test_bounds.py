"""Bounds against all possible choices on small traces, and against the manager on larger ones."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config
from dsv4_jax.manager import CachePolicy, HostSize, SnapshotPlacement, WritePolicy
from dsv4_jax.manager.policies import EVICTION_POLICIES
from dsv4_jax.records import state_pages
from dsv4_jax.simulate import Server, TraceRequest, simulate
from dsv4_jax.simulate.bounds import Turn, blocks_bound, bounds, endless_bound, states_bound, turns_of
from dsv4_jax.simulate.synthesis import ChatTrace, make_trace
from dsv4_jax.simulate.trace import TraceRun

LAYOUT = CacheLayout(DSV4Config.tiny(max_position_embeddings=1 << 16))


def random_turns(seed: int, turns: int = 7) -> list[Turn]:
    """Paths in a small tree; a name is the path itself, as a number."""
    draw = random.Random(seed)
    made = []
    for _ in range(turns):
        name, names = 0, []
        for _ in range(draw.randint(1, 4)):
            name = 3 * name + draw.randint(1, 2)
            names.append(name)
        made.append(Turn(names, draw.randint(max(len(names) - 1, 1), len(names))))
    return made


def best_blocks(turns: list[Turn], blocks: int) -> int:
    """The most blocks found over all choices of what to keep after each turn."""

    @functools.cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(turns):
            return 0
        names, asked = turns[index]
        found = next((i for i, name in enumerate(names[:asked]) if name not in kept), asked)
        there = sorted(kept | set(names))
        choices = itertools.combinations(there, min(blocks, len(there)))
        return found + max(best(index + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


def best_states(turns: list[Turn], states: int) -> int:
    """The same of states, with room for all blocks: a turn can keep a state at each boundary of its path."""

    @functools.cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(turns):
            return 0
        names, asked = turns[index]
        seen = set().union(*(turn.names for turn in turns[:index]), ())
        usable = next((i for i, name in enumerate(names[:asked]) if name not in seen), asked)
        found = max((i + 1 for i in range(usable) if names[i] in kept), default=0)
        there = sorted(kept | set(names))
        choices = itertools.combinations(there, min(states, len(there)))
        return found + max(best(index + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_the_best_of_all_choices(seed: int) -> None:
    turns = random_turns(seed)
    for blocks in (0, 1, 2, 3, 5):
        assert blocks_bound(turns, blocks) == best_blocks(turns, blocks)
    assert blocks_bound(turns, 100) == endless_bound(turns) == best_blocks(turns, 100)


@pytest.mark.parametrize("seed", range(30))
def test_states_are_no_less_than_the_best_of_all_choices(seed: int) -> None:
    turns = random_turns(seed)
    for states in (0, 1, 2, 3):
        assert best_states(turns, states) <= states_bound(turns, states) <= endless_bound(turns)
    assert states_bound(turns, 100) == endless_bound(turns) == best_states(turns, 100)


def test_the_bound_of_states_by_hand() -> None:
    """Two chats take turns: one state serves one of them, and the sum over all turns half of the other."""
    turns = [Turn([1, 2], 2), Turn([5, 6], 2), Turn([1, 2], 2), Turn([5, 6], 2)]
    assert (best_states(turns, 1), states_bound(turns, 1)) == (2, 4)
    assert states_bound(turns * 4, 1) == 2 * 8 < endless_bound(turns * 4)


def test_turns_of_a_trace() -> None:
    """At least the prompt's last token is computed, and the output's last one never is."""
    runs = (TraceRun("a", 256),)
    trace = [TraceRequest(0, runs, (TraceRun("b", 128),)), TraceRequest(1, (*runs, TraceRun("b", 300)), ())]
    first, second = turns_of(trace, LAYOUT)
    assert (len(first.names), first.asked, len(second.names), second.asked) == (2, 1, 4, 4)
    assert first.names == second.names[:2]
    found = bounds([first, second], trace, 128, blocks=1, states=5)
    assert (found.prompt, found.endless, found.blocks, found.states) == (256 + 556, 256, 128, 256)
    assert found.clairvoyant == 128


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_policy_exceeds_them(seed: int) -> None:
    """Of every size and every choice some: all of them together take minutes."""
    lengths = "turns=4,system=900,question=200,answer=50"
    trace = make_trace(ChatTrace.parse(f"seed={seed},chats=12,tenants=2,{lengths},rate=5,pause=3"))
    turns, draw = turns_of(trace, LAYOUT), random.Random(seed)
    for blocks, snapshots, host in (
        (60, 1, None),
        (60, 20, None),
        (150, 4, None),
        (60, 10, HostSize.of(LAYOUT, 80, 30)),
    ):
        more = host or HostSize(0)
        found = bounds(
            turns,
            trace,
            128,
            blocks=blocks + more.num_pages,
            states=4 + snapshots + more.num_pages // state_pages(LAYOUT, 0),
        )
        for _ in range(3):
            policy = CachePolicy(
                write=draw.choice([WritePolicy.write_back(), WritePolicy.write_through()]),
                snapshots=draw.choice(
                    [SnapshotPlacement(), SnapshotPlacement(every=1), SnapshotPlacement(doubling=None)]
                ),
                eviction=draw.choice(list(EVICTION_POLICIES.values())),
            )
            result = simulate(trace, Server(LAYOUT, CacheSize(blocks, 4, 64, snapshots), policy, host))
            assert result.totals.hit <= found.clairvoyant <= found.endless
