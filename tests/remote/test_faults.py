"""A few rounds of each fault between real processes; more: python -m tests.remote.faults --rounds 220"""

from __future__ import annotations

from .faults import FAULTS, Outcome, run_rounds, table


def test_whatever_dies_or_is_torn_every_answer_is_right_and_nothing_stays_held() -> None:
    names = ["nothing", "prefill process killed", "decode process killed", "records torn", "leases stale", "links cut"]
    outcomes = run_rounds(names, seed=5)
    assert sum(o.wrong for o in outcomes.values()) == 0 and sum(o.held for o in outcomes.values()) == 0, outcomes
    assert outcomes["nothing"].handed > 0 and sum(o.kills for o in outcomes.values()) == 2
    assert outcomes["leases stale"].given_up or outcomes["records torn"].given_up, outcomes


def test_the_table_counts_all_rounds() -> None:
    outcomes = {name: Outcome(rounds=2, kills=1, requests=5, handed=3) for name in FAULTS}
    outcomes["leases stale"].given_up["lease over"] = 4
    lines = table(outcomes).splitlines()
    assert len(lines) == 3 + len(FAULTS) and lines[-1] == f"| all | {2 * len(FAULTS)} | {len(FAULTS)} | " + (
        f"{5 * len(FAULTS)} | {3 * len(FAULTS)} | 0 | lease over 4 | 0 | 0 |"
    )
