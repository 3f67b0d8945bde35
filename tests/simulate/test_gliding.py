"""What the manager is not told of at once changes nothing but its CPU time."""

from __future__ import annotations

import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config
from dsv4_jax.manager import CachePolicy, HostSize, SnapshotPlacement, WritePolicy
from dsv4_jax.simulate import Server, simulate
from dsv4_jax.simulate.report import report
from dsv4_jax.simulate.synthesis import ChatTrace, make_trace

CFG = DSV4Config.tiny(max_position_embeddings=1 << 16)
LAYOUT = CacheLayout(CFG)
POLICIES = {
    "none": None,
    "write back": CachePolicy(),
    "write through": CachePolicy(write=WritePolicy.write_through(), snapshots=SnapshotPlacement(every=2)),
    "selective": CachePolicy(write=WritePolicy.write_through_selective(2), snapshots=SnapshotPlacement(doubling=None)),
}


def numbers(server: Server, trace: list) -> dict:
    """All that must not differ: peaks are those of the planned steps that were looked at."""
    answer = report(simulate(trace, server))
    del answer["cpu"], answer["planned_steps"]
    for pool in answer["pools"].values():
        del pool["peak_used"], pool["peak_in_use"]
    return answer


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("blocks", "slots", "budget"), [(400, 16, 512), (40, 8, 512), (24, 12, 96)])
def test_gliding_is_planning_every_step(policy: str, blocks: int, slots: int, budget: int) -> None:
    """Hits, evictions, transfers, preemptions and every time of every request, to the last bit."""
    settings = ChatTrace(seed=blocks, chats=14, tenants=2, turns=3, system=300, answer=150, rate=200.0, pause=0.5)
    trace = make_trace(settings)
    answers = [
        numbers(
            Server(
                LAYOUT,
                CacheSize(blocks, slots, 64, 10),
                POLICIES[policy],
                HostSize.of(LAYOUT, 30, 12),
                token_budget=budget,
                every_step=every,
            ),
            trace,
        )
        for every in (False, True)
    ]
    assert answers[0] == answers[1]
    assert answers[0]["requests"]["run"] + answers[0]["requests"]["rejected"]["device"] == len(trace)
    assert answers[0]["isolation"] == {"foreign_units": 0, "wrong_units": 0}
    assert (answers[0]["preemptions"] > 0) == (blocks < 400)


def test_who_glides() -> None:
    trace = make_trace(ChatTrace(seed=1, chats=3, turns=2, system=300, answer=150))
    size = CacheSize(400, 8, 64, 10)
    plain = simulate(trace, Server(LAYOUT, size))
    assert plain.planned < plain.steps / 2
    drafts = CacheLayout(CFG, draft_tokens=1)
    for server in (Server(LAYOUT, size, every_step=True), Server(LAYOUT, size, token_budget=8), Server(drafts, size)):
        result = simulate(trace, server)
        assert result.planned == result.steps
        assert [job.sampled for job in result.jobs] == [job.trace.output_tokens for job in result.jobs]
